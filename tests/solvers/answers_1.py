# One learner's answers; see test_solvers.py.

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
    rows = [row for row in comparison.rows if row.equivalent and row.flops_ratio <= 1.1]
    return min(rows, key=lambda row: row.tensor_peak_bytes).label


check("0.2", lowest)

# %% 0.3
# Exercise 0.3 · order · ** · 6 min
order = "d c b a"  # four letters

check("0.3", order)


# %% 0.4
# Exercise 0.4 · write · ** · 7 min
def choose(trace):
    alive = trace.by_category("tensor_peak")
    if alive.get("activations", 0) > alive.get("gradients", 0):
        return "checkpoint"
    return "optimizer in backward"


check("0.4", choose)


# %% 1.1
# Exercise 1.1 · fill · * · 5 min
def static_bytes(parameters, optimizer):
    each = {"SGD": 8, "SGD with momentum": 12, "AdamW": 16}[optimizer]  # bytes, for each number in a parameter
    return each * sum(parameter.numel() for parameter in parameters)


check("1.1", static_bytes)

# %% 1.2
# Exercise 1.2 · order · ** · 6 min
order = "c a d b"  # four letters, such as "a b c d"
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
    static = numbers * (4 + 4 + kept)
    each = saved(2) - saved(1)
    start = saved(1) - each
    return (static - start) // each + 1


check("1.4", first_batch)

# %% 2.1
# Exercise 2.1 · order · ** · 5 min
order = "e d f c g i a"

check("2.1", order)


# %% 2.2
# Exercise 2.2 · fill · * · 3 min
def storage_of(t):
    name = t.untyped_storage().data_ptr()
    nbytes = t.untyped_storage().nbytes()
    return name, nbytes


check("2.2", storage_of)


# %% 2.3
# Exercise 2.3 · write · ** · 8 min
def saved_bytes(loss_fn, model, batch):
    found = {}

    def pack(t):
        name, nbytes = storage_of(t)
        found[name] = nbytes
        return t.detach(), t._version

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = loss_fn(model, batch)
    for t in [*model.parameters(), *model.buffers(), *batch]:
        found.pop(storage_of(t)[0], None)
    return sum(found.values())


check("2.3", saved_bytes)


# %% 2.4
# Exercise 2.4 · fill · ** · 5 min
class LeakyReLU:
    def forward(x):
        y = torch.where(x > 0, x, 0.1 * x)
        kept = x > 0
        return y, kept

    def backward(dy, kept):
        dx = torch.where(kept, dy, 0.1 * dy)
        return dx


check("2.4", LeakyReLU)


# %% 3.1
# Exercise 3.1 · fill · * · 4 min
def backward(g, saved, w1, w2, w3):
    x = saved["x"]
    a = torch.tanh(x @ w1.T)  # the result of the first tanh
    b = torch.tanh(a @ w2.T)  # the result of the second

    g_w3, g_b = g.T @ b, g @ w3
    g_k = g_b * (1 - b**2)
    g_w2, g_a = g_k.T @ a, g_k @ w2
    g_h = g_a * (1 - a**2)
    g_w1, g_x = g_h.T @ x, g + g_h @ w1
    return g_x, g_w1, g_w2, g_w3


check("3.1", backward)

# %% 3.2
# Exercise 3.2 · order · * · 3 min
order = "b d f c a g e h"

check("3.2", order)


# %% 3.3
# Exercise 3.3 · write · *** · 8 min
class Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.save_for_backward(x)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(g)
        return x.grad, None


check("3.3", Checkpointed)


# %% 3.4
# Exercise 3.4 · write · ** · 6 min
def run_again(block, x, rng_state):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
        return torch.func.functional_call(block, buffers, (x,))


check("3.4", run_again)


# %% 3.5
# Exercise 3.5 · write · ** · 6 min
def most_held(inputs, saved, regions):
    highest = 0
    for r, region in enumerate(regions):
        waiting = sum(inputs[other[0]] for other in regions[: r + 1])
        back = sum(inputs[i] + saved[i] for i in region)
        highest = max(highest, waiting + back)
    return highest


check("3.5", most_held)
