# The solutions of 09_accuracy_and_memory.ipynb: each section is a cell of the lesson, with the answer in it.

# %% 9.1
# Exercise 9.1 · order · * · 4 min
order = "i g b d a e f"

check("9.1", order)

# %% 9.2
# Exercise 9.2 · fill · * · 4 min
import statistics


def paired(one, other):
    differences = [b - a for a, b in zip(one, other, strict=True)]
    mean = sum(differences) / len(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return mean, error


check("9.2", paired)


# %% 9.3
# Exercise 9.3 · write · ** · 7 min
def verdict(one, other):
    differences = [b - a for a, b in zip(one, other, strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    if abs(mean) <= 3 * error:
        return "no difference seen"
    return "better" if mean > 0 else "worse"


check("9.3", verdict)


# %% 9.4
# Exercise 9.4 · write · ** · 6 min
def equal_steps(steps, batch, micro, accumulation, ratio):
    return steps * batch // (micro * accumulation), int(steps / ratio)


check("9.4", equal_steps)


# %% 9.5
# Exercise 9.5 · write · ** · 8 min
def largest(peak, limit, most):
    fits, too_large = 0, most + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if peak(middle) <= limit:
            fits = middle
        else:
            too_large = middle
    return fits


check("9.5", largest)

# %% quiz
answers = "c a b"  # @param {type: "string"}
quiz(9, answers)
