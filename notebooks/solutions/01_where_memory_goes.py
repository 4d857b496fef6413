# The solutions of 01_where_memory_goes.ipynb: each section is a cell of the lesson, with the answer in it.

# %% 1.1
# Exercise 1.1 · fill · * · 5 min
def static_bytes(parameters, optimizer):
    each = {"SGD": 8, "SGD with momentum": 12, "AdamW": 16}[optimizer]  # bytes, for each number in a parameter
    return each * sum(parameter.numel() for parameter in parameters)


check("1.1", static_bytes)


# %% 1.2
# Exercise 1.2 · order · ** · 6 min
order = "c a d b"  # "b c a d" is right too
check("1.2", order)


# %% 1.3
# Exercise 1.3 · fill · * · 5 min
def grow(batch, depth, width, context):
    more_parameters = depth * width**2
    more_activations = batch * depth * width * context
    return more_parameters, more_activations


check("1.3", grow)


# %% 1.4
# Exercise 1.4 · write · ** · 8 min
def first_batch(numbers, kept, saved):
    static = 4 * numbers * (2 + kept)
    each = saved(2) - saved(1)
    always = saved(1) - each
    return (static - always) // each + 1


check("1.4", first_batch)


# %% quiz
answers = "d b b"  # @param {type: "string"}
quiz(1, answers)
