# One learner's answers, each wrong on purpose; see test_solvers.py.

# %% 4.1
# Slip: the input of every block before waits (segment boundaries forgotten), not one input for each segment.
# Exercise 4.1 · fill · * · 4 min
def most_held(lengths, A, a):
    most = 0
    for i, length in enumerate(lengths):
        moment = {"segment": i, "blocks": length, "waiting": sum(lengths[:i]) * a, "back": length * A}  # bytes in the last two
        most = max(most, moment["waiting"] + moment["back"])
    return most


check("4.1", most_held)

# %% 4.2
# Slip: blocks are whole, so the highest moment M is taken to be a multiple of A; the M between are never tried.
# Exercise 4.2 · write · ** · 8 min
def lengths(n, A, a):
    M = A
    while True:
        result, left = [], n
        while left > 0 and (M - len(result) * a) // A >= 1:
            length = min(left, (M - len(result) * a) // A)
            result.append(length)
            left -= length
        if left == 0:
            return result
        M += A


check("4.2", lengths)

# %% 4.3
# Slip: what A computed when the outer region ran again is still there for A's own backward, so A runs again only once.
# Exercise 4.3 · order · ** · 4 min
order = "b d f a e i g h"

check("4.3", order)

# %% 4.4
# Slip: puts everything into units of a first, as in the lesson's table, and rounds room and A down each for itself.
# Exercise 4.4 · write · ** · 7 min
def least_again(n, A, a, room):
    s = room // a - A // a
    if s < 1:
        return None
    r = 1
    while comb(s + r, r) < n:
        r += 1
    return r * n - comb(s + r, r - 1)


check("4.4", least_again)

# %% 4.5
# Slip: takes w to lie as nn.Linear's weight does, (outputs, inputs), so w.shape[0] is read as the result's columns.
# Exercise 4.5 · fill · ** · 5 min
def policy(ctx, op, *args, **kwargs):
    keep = op in products and args[-1].shape[0] <= args[-2].shape[1]
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


check("4.5", policy)

# %% 5.1
# Slip: a mean of means: every part counts alike, whatever its size.
# Exercise 5.1 · fill · * · 3 min
def add_up(model, loss_fn, parts, samples):
    for x, y in parts:
        weight = 1 / len(parts)
        (loss_fn(model(x), y) * weight).backward()


check("5.1", add_up)

# %% 5.2
# Slip: clips after each backward (a sum of gradients that are all short enough is taken to be the clipped gradient).
# Exercise 5.2 · order · ** · 5 min
order = "d e b i a h"

check("5.2", order)

# %% 5.3
# Slip: adds the weighted losses up and calls backward once; the gradient is right, but all graphs are alive until then.
# Exercise 5.3 · write · ** · 7 min
def gradient_of_all(model, loss_fn, loader):
    model.zero_grad()
    total, samples = 0, 0
    for x, y in loader:
        total = total + loss_fn(model(x), y) * len(x)
        samples += len(x)
    (total / samples).backward()
    return [p.grad for p in model.parameters()]


check("5.3", gradient_of_all)

# %% 5.4
# Slip: a weight of 0 takes a part without tokens out of the sum (its mean is NaN, and 0 * NaN is NaN).
# Exercise 5.4 · write · ** · 7 min
def accumulate_tokens(model, parts):
    tokens = sum((targets != -100).sum().item() for _, targets in parts)
    total = 0.0
    for inputs, targets in parts:
        weight = (targets != -100).sum().item() / tokens
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100) * weight
        loss.backward()
        total += loss.item()
    return total


check("5.4", accumulate_tokens)

# %% 5.5
# Slip: a plain step always peaks where backward begins, so its end, with all gradients, is not looked at.
# Exercise 5.5 · write · ** · 7 min
def fewest(static, gradients, activations, samples, budget):
    if static + activations <= budget:
        return 1
    for k in range(2, samples + 1):
        largest_part = -(-samples // k)
        if static + gradients + activations / samples * largest_part <= budget:
            return k
    return None


check("5.5", fewest)

# %% 6.1
# Slip: the 16-bit copy is a tensor of its own, no part of the graph of W; the gradient then stays with the copy.
# Exercise 6.1 · fill · * · 4 min
def forward(x, W, target):
    x_low = x.to(torch.bfloat16)
    W_low = W.detach().to(torch.bfloat16).requires_grad_()
    h = torch.tanh(F.linear(x_low, W_low))
    y = F.linear(h, W_low)
    y = y.to(torch.float32)  # as the loss reads it
    return F.mse_loss(y, target)


check("6.1", forward)

# %% 6.2
# Slip: a GELU is taken for a ReLU: what it keeps and the next layer's input are counted as one storage.
# Exercise 6.2 · write · ** · 8 min
def saved_bytes(sizes, samples):
    total = samples * sizes[0] * 2  # copy of x
    for width in sizes[1:-1]:
        total += samples * width * 2  # kept by the GELU and the next layer
    for before, after in zip(sizes[1:], sizes[2:]):
        total += before * after * 2  # weight copies, but the first
    return total + samples * sizes[-1] * 4  # for the loss


check("6.2", saved_bytes)

# %% 6.3
# Slip: after unscale_ the gradients are the usual ones, so the usual optimizer.step() is called (and nothing is skipped).
# Exercise 6.3 · order · ** · 4 min
order = "d g a i e c b"

check("6.3", order)

# %% 6.4
# Slip: an overflow shows in the loss; the (fp32) loss is tested in place of the gradients.
# Exercise 6.4 · write · *** · 8 min
def scaled_step(model, batch, loss_fn, optimizer, scale):
    optimizer.zero_grad()
    loss = loss_fn(model, batch) * scale
    loss.backward()
    if not loss.isfinite().all():
        return scale / 2
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    optimizer.step()
    return scale


check("6.4", scaled_step)

# %% 6.5
# Slip: the spacing is in proportion to w (a relative precision), in place of one spacing between two powers of 2.
# Exercise 6.5 · write · ** · 6 min
def vanishes(w, update, digits):
    return update / w < 2.0**-digits


check("6.5", vanishes)

# %% 7.1
# Slip: filling the gradient with zeros is letting it go.
# Exercise 7.1 · fill · * · 3 min
def make_hook(lr):
    def hook(parameter):
        parameter.data -= lr * parameter.grad  # the update, in place
        parameter.grad.zero_()  # the gradient is let go

    return hook


check("7.1", make_hook)

# %% 7.2
# Slip: a layer's old weights are needed for the gradient of the layer below, so its update waits until that one is born.
# Exercise 7.2 · order · * · 3 min
order = "g c b f a e d"

check("7.2", order)

# %% 7.3
# Slip: each hook is thought to keep its own turn's velocity; by late binding all of them use the last parameter's.
# Exercise 7.3 · write · ** · 7 min
def step_in_backward(model, lr, momentum):
    handles = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        velocity = torch.zeros_like(parameter, requires_grad=False)

        def hook(parameter):
            velocity.mul_(momentum).add_(parameter.grad)
            parameter.data.sub_(lr * velocity)
            parameter.grad = None

        handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove():
        for handle in handles:
            handle.remove()

    return remove


check("7.3", step_in_backward)

# %% 7.4
# Slip: the loop's highest moment is at the largest parameter; a smaller one right after it can be higher.
# Exercise 7.4 · write · ** · 6 min
def optimizer_peak(sizes, kind):
    parameters = sum(sizes)
    if kind == "sgd":
        return 2 * parameters
    if kind == "momentum":
        return 3 * parameters
    if kind == "fused":
        return 4 * parameters
    if kind == "foreach":
        return 5 * parameters
    where = sizes.index(max(sizes))
    before = sizes[where - 1] if where > 0 else 0
    return 4 * parameters + 2 * sizes[where] + before


check("7.4", optimizer_peak)

# %% 7.5
# Slip: a storage's address is taken for a tensor's name; it is given to another tensor once the first is freed, and the file is overwritten.
# Exercise 7.5 · write · ** · 8 min
def make_hooks(model, folder, smallest):
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        address = tensor.untyped_storage().data_ptr()
        if tensor.nbytes < smallest or address in parameters:
            return tensor.detach()
        path = folder / f"{address}.npy"
        np.save(path, tensor.detach().numpy())
        return path

    def unpack(packed):
        return torch.from_numpy(np.load(packed)) if isinstance(packed, Path) else packed

    return pack, unpack


check("7.5", make_hooks)

# %% 9.1
# Slip: the copy makes the weights equal, so the seed is only for the training and is set after model and copy are made, once for all seeds.
# Exercise 9.1 · order · * · 4 min
order = "i b d g a e f"

check("9.1", order)

# %% 9.2
# Slip: the spread of the single differences is taken for the standard error of their mean.
# Exercise 9.2 · fill · * · 4 min
import statistics


def paired(one, other):
    differences = [b - a for a, b in zip(one, other, strict=True)]
    mean = sum(differences) / len(differences)
    error = statistics.stdev(differences)  # the standard error of that mean
    return mean, error


check("9.2", paired)

# %% 9.3
# Slip: an error of 0 means that there is no difference (as with checkpointing's ± 0.00), even where every seed is better by 2.
# Exercise 9.3 · write · ** · 7 min
def verdict(one, other):
    differences = [b - a for a, b in zip(one, other, strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    if error == 0 or abs(mean / error) <= 3:
        return "no difference seen"
    return "better" if mean > 0 else "worse"


check("9.3", verdict)

# %% 9.4
# Slip: whole numbers are rounded to the nearest; "as many as fit" would be rounded down.
# Exercise 9.4 · write · ** · 6 min
def equal_steps(steps, batch, micro, accumulation, ratio):
    return round(steps * batch / (micro * accumulation)), round(steps / ratio)


check("9.4", equal_steps)

# %% 9.5
# Slip: the search ends at its lower end without having asked it: a model of size 1 is taken to fit always.
# Exercise 9.5 · write · ** · 8 min
def largest(peak, limit, most):
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if peak(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


check("9.5", largest)

# %% 11.1
# Slip: "saved" is read as the change that in-place makes, in place minus other: the sign is turned round.
# Exercise 11.1 · fill · ** · 5 min
def in_place(highest, make_net, x):
    def training(net):
        net(x).sum().backward()

    def inference(net):
        with torch.no_grad():
            net(x)

    saved_in_training = highest(training, make_net(True)) - highest(training, make_net(False))
    saved_in_inference = highest(inference, make_net(True)) - highest(inference, make_net(False))
    return saved_in_training, saved_in_inference


check("11.1", in_place)

# %% 11.2
# Slip: no gradient is alive in a forward pass (they were freed before the first); those of the micro-batches before are forgotten.
# Exercise 11.2 · write · ** · 5 min
def lowest(parameters, activations, k):
    state = 2 * parameters
    return parameters + state + activations / k


check("11.2", lowest)

# %% 11.3
# Slip: a large loss outside the blocks holds the peak; but what the loss saves is among the saved bytes too, so they do not fall by half.
# Exercise 11.3 · write · *** · 8 min
def counterexample():
    torch.manual_seed(0)
    stem, blocks, head = nn.Linear(64, 128), nn.Sequential(make_block(), make_block()), nn.Linear(128, 2048)
    model = nn.Sequential(OrderedDict(stem=stem, blocks=blocks, head=head))
    batch = torch.randn(1024, 64), torch.randn(1024, 2048)
    return memlab.TrainingStep(model, batch, nn.MSELoss(), torch.optim.SGD)


check("11.3", counterexample)

# %% 11.4
# Slip: the phase of the peak is asked first; but where parameters and state alone exceed the limit, an update in backward cannot help.
# Exercise 11.4 · order · ** · 5 min
order = "d b g e c"

check("11.4", order)

# %% 11.5
# Slip: pure bf16 halves everything, so it can always move the peak; a step that is nearly all batch is forgotten.
# Exercise 11.5 · write · ** · 6 min
def can_move(alive):
    peak = sum(alive.values())
    techniques = {"pure bf16"}
    if alive.get("activations", 0) >= peak / 10:
        techniques |= {"checkpoint", "micro-batches"}
    if alive.get("gradients", 0) >= peak / 10:
        techniques.add("optimizer in backward")
    return techniques


check("11.5", can_move)
