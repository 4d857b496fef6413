# The solutions of 00_start_here.ipynb: each section is a cell of the lesson, with the answer in it.

# %% 0.1
# Exercise 0.1 · fill · * · 4 min
from memlab.course import check


def at_the_peak(highest, alive):
    phase = max(highest, key=highest.get)
    largest = max(alive, key=alive.get)
    return phase, largest


check("0.1", at_the_peak)


# %% 0.2
# Exercise 0.2 · write · * · 6 min
def lowest(comparison):
    rows = [row for row in comparison.rows if row.equivalent is True and row.flops_ratio <= 1.1]
    return min(rows, key=lambda row: row.tensor_peak_bytes).label


check("0.2", lowest)

# %% 0.3
# Exercise 0.3 · order · ** · 6 min
order = "c b a d"  # or "d c b a": in either, no gradient is alive during the forward pass

check("0.3", order)


# %% 0.4
# Exercise 0.4 · write · ** · 7 min
def choose(trace):
    alive = trace.by_category("tensor_peak")
    if alive.get("activations", 0) > alive.get("gradients", 0):
        return "checkpoint"
    return "optimizer in backward"


check("0.4", choose)

# %% quiz
from memlab.course import quiz

answers = "b c b"  # @param {type: "string"}
quiz(0, answers)
