# The solutions of 05_micro_batching.ipynb: each section is a cell of the lesson, with the answer in it.


# %% 5.1
# Exercise 5.1 · fill · * · 3 min
def add_up(model, loss_fn, parts, samples):
    for x, y in parts:
        weight = len(x) / samples
        (loss_fn(model(x), y) * weight).backward()


check("5.1", add_up)

# %% 5.2
# Exercise 5.2 · order · ** · 5 min
order = "h d e b f a"

check("5.2", order)


# %% 5.3
# Exercise 5.3 · write · ** · 7 min
def gradient_of_all(model, loss_fn, loader):
    model.zero_grad()
    samples = 0
    for x, y in loader:
        (loss_fn(model(x), y) * len(x)).backward()  # the batch's sum
        samples += len(x)
    return [parameter.grad / samples for parameter in model.parameters()]


check("5.3", gradient_of_all)


# %% 5.4
# Exercise 5.4 · write · ** · 7 min
def accumulate_tokens(model, parts):
    tokens = sum((targets != -100).sum() for _, targets in parts)
    total = 0
    for inputs, targets in parts:
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


check("5.4", accumulate_tokens)


# %% 5.5
# Exercise 5.5 · write · ** · 7 min
def fewest(static, gradients, activations, samples, budget):
    if static + max(gradients, activations) <= budget:
        return 1
    for k in range(2, samples + 1):
        largest = -(-samples // k)  # rounded up
        if static + gradients + activations * largest / samples <= budget:
            return k
    return None


check("5.5", fewest)

# %% quiz
answers = "b c a"  # @param {type: "string"}
quiz(5, answers)
