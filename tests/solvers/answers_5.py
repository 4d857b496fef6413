# One learner's answers, each wrong on purpose; see test_solvers.py.

# %% 0.1
# Slip: max of a dictionary compares its names, not its bytes.
# Exercise 0.1 · fill · * · 4 min
from memlab.course import check


def at_the_peak(highest, alive):
    phase = max(highest)
    largest = max(alive)
    return phase, largest


check("0.1", at_the_peak)


# %% 0.2
# Slip: "not proven" (None) counts as good enough, only False is thrown out.
# Exercise 0.2 · write · * · 6 min
def lowest(comparison):
    rows = [row for row in comparison.rows if row.equivalent is not False and row.flops_ratio <= 1.1]
    return min(rows, key=lambda row: row.tensor_peak_bytes).label


check("0.2", lowest)

# %% 0.3
# Slip: the order of most tutorials: loss, zero_grad, backward, step.
# Exercise 0.3 · order · ** · 6 min
order = "c d b a"  # four letters

check("0.3", order)


# %% 0.4
# Slip: "optimizer in backward" is taken to act on the optimizer's state, too.
# Exercise 0.4 · write · ** · 7 min
def choose(trace):
    alive = trace.by_category("tensor_peak")
    optimizer = alive.get("gradients", 0) + alive.get("optimizer state", 0)
    if alive.get("activations", 0) > optimizer:
        return "checkpoint"
    return "optimizer in backward"


check("0.4", choose)


# %% 1.1
# Slip: plain SGD "keeps none", so only the parameter is left; the gradient is in AdamW's 16 alone.
# Exercise 1.1 · fill · * · 5 min
def static_bytes(parameters, optimizer):
    each = {"SGD": 4, "SGD with momentum": 8, "AdamW": 16}[optimizer]  # bytes, for each number in a parameter
    return each * sum(parameter.numel() for parameter in parameters)


check("1.1", static_bytes)

# %% 1.2
# Slip: gradients are freed as early as possible, before the optimizer has read them.
# Exercise 1.2 · order · ** · 6 min
order = "c a b d"  # four letters, such as "a b c d"
check("1.2", order)


# %% 1.3
# Slip: "four times as many when the width is doubled" becomes 2 x width instead of width squared.
# Exercise 1.3 · fill · * · 5 min
def grow(batch, depth, width, context):
    more_parameters = depth * 2 * width
    more_activations = batch * depth * width * context
    return more_parameters, more_activations


check("1.3", grow)


# %% 1.4
# Slip: the worked example copied (divide, round up); what is there at any batch size is forgotten.
# Exercise 1.4 · write · ** · 8 min
def first_batch(numbers, kept, saved):
    import math

    static = 4 * (2 + kept) * numbers
    each = saved(2) - saved(1)
    return math.ceil(static / each)


check("1.4", first_batch)

# %% 2.1
# Slip: the derivative is read as 1 - z², as GELU's line used saved["z"].
# Exercise 2.1 · order · ** · 5 min
order = "e d f c b a i"

check("2.1", order)


# %% 2.2
# Slip: the address of the tensor's first element, not of its storage.
# Exercise 2.2 · fill · * · 3 min
def storage_of(t):
    name = t.data_ptr()
    nbytes = t.untyped_storage().nbytes()
    return name, nbytes


check("2.2", storage_of)


# %% 2.3
# Slip: section 3's own pack and ledger are used, and the ledger is not cleared at the end: all stays alive.
# Exercise 2.3 · write · ** · 8 min
def saved_bytes(loss_fn, model, batch):
    ledger.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss_fn(model, batch)
    known = [*model.parameters(), *model.buffers(), *batch]
    known = {t.untyped_storage().data_ptr() for t in known}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in ledger}
    return sum(nbytes for name, nbytes in sizes.items() if name not in known)


check("2.3", saved_bytes)


# %% 2.4
# Slip: the mask is turned into floats to calculate with it, and has four bytes an element again.
# Exercise 2.4 · fill · ** · 5 min
class LeakyReLU:
    def forward(x):
        y = torch.where(x > 0, x, 0.1 * x)
        kept = (x > 0).float()
        return y, kept

    def backward(dy, kept):
        dx = dy * kept + 0.1 * dy * (1 - kept)
        return dx


check("2.4", LeakyReLU)


# %% 3.1
# Slip: the second line copies the formula, and computes the first tanh once more.
# Exercise 3.1 · fill · * · 4 min
def backward(g, saved, w1, w2, w3):
    x = saved["x"]
    a = torch.tanh(x @ w1.T)  # the result of the first tanh
    b = torch.tanh(torch.tanh(x @ w1.T) @ w2.T)  # the result of the second

    g_w3, g_b = g.T @ b, g @ w3
    g_k = g_b * (1 - b**2)
    g_w2, g_a = g_k.T @ a, g_k @ w2
    g_h = g_a * (1 - a**2)
    g_w1, g_x = g_h.T @ x, g + g_h @ w1
    return g_x, g_w1, g_w2, g_w3


check("3.1", backward)

# %% 3.2
# Slip: first everything runs again, then comes the backward pass.
# Exercise 3.2 · order · * · 3 min
order = "b d f c e a g h"

check("3.2", order)


# %% 3.3
# Slip: one gradient for two arguments: `block` has none, and its None is forgotten.
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
        return x.grad


check("3.3", Checkpointed)


# %% 3.4
# Slip: the block's own buffers are handed over, not copies, so that the second run updates them all the same.
# Exercise 3.4 · write · ** · 6 min
def run_again(block, x, rng_state):
    buffers = dict(block.named_buffers())
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        return torch.func.functional_call(block, buffers, (x,))


check("3.4", run_again)


# %% 3.5
# Slip: all kept inputs plus the largest region: later inputs are never let go of, inputs within a region not counted.
# Exercise 3.5 · write · ** · 6 min
def most_held(inputs, saved, regions):
    kept = sum(inputs[region[0]] for region in regions)
    return kept + max(sum(saved[i] for i in region) for region in regions)


check("3.5", most_held)
