"""What each category of bytes looks like, in figures and pages alike.

Colours are those of petroff10 (Petroff 2021, arXiv:2107.02270), chosen to be told apart by people with colour-blindness
too. Related categories share a colour and differ in their hatching: copies of the weights look like the weights,
checkpoint inputs like the activations they stand for.
"""

# In the order in which they are stacked: what stays through the whole step below what comes and goes.
COLOURS = {
    "parameters": "#3f90da",
    "buffers": "#a96b59",
    "optimizer state": "#832db6",
    "batch": "#b9ac70",
    "gradients": "#ffa90e",
    "activations": "#bd1f01",
    "checkpoint inputs": "#bd1f01",
    "weight copies": "#3f90da",
    "temporaries": "#92dadd",
    "workspace": "#94a4a2",
    "rounding": "#717581",
    "other": "#717581",
}
HATCHES = {"checkpoint inputs": "////", "weight copies": "////", "workspace": "....", "other": "xxxx"}
TOO_SMALL = 0.01  # of a figure's height or length, two or three pixels: cannot be seen, and is not in a legend
