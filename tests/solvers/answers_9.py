# One learner's answers; see test_solvers.py.

# %% 4.1
# Exercise 4.1 · fill · * · 4 min
def most_held(lengths, A, a):
    most = 0
    for i, length in enumerate(lengths):
        moment = {"segment": i, "blocks": length, "waiting": i * a, "back": length * A}  # bytes in the last two
        most = max(most, moment["waiting"] + moment["back"])
    return most


check("4.1", most_held)

# %% 4.2
# Exercise 4.2 · write · ** · 8 min
def lengths(n, A, a):
    M = A
    while True:
        result = []
        left = n
        i = 0
        while left > 0:
            length = (M - i * a) // A
            if length < 1:
                break
            if length > left:
                length = left
            result.append(length)
            left = left - length
            i = i + 1
        if left == 0:
            return result
        M = M + 1


check("4.2", lengths)

# %% 4.3
# Exercise 4.3 · order · ** · 4 min
order = "b d f a e i g e h"

check("4.3", order)

# %% 4.4
# Exercise 4.4 · write · ** · 7 min
def least_again(n, A, a, room):
    s = (room - A) // a
    if s < 1:
        return None
    return formula(n, s)


check("4.4", least_again)

# %% 4.5
# Exercise 4.5 · fill · ** · 5 min
def policy(ctx, op, *args, **kwargs):
    x = args[-2]
    w = args[-1]
    keep = op in products and w.shape[1] <= x.shape[1]
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


check("4.5", policy)

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
    samples = len(loader.dataset)
    for x, y in loader:
        loss = loss_fn(model(x), y) * len(x) / samples
        loss.backward()
    gradients = []
    for p in model.parameters():
        gradients.append(p.grad)
    return gradients


check("5.3", gradient_of_all)

# %% 5.4
# Exercise 5.4 · write · ** · 7 min
def accumulate_tokens(model, parts):
    total = 0
    tokens = 0
    for inputs, targets in parts:
        logits = model(inputs).flatten(0, 1)
        loss = cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
        loss.backward()
        total += loss.item()
        tokens += (targets != -100).sum().item()
    for p in model.parameters():
        p.grad = p.grad / tokens
    return total / tokens


check("5.4", accumulate_tokens)

# %% 5.5
# Exercise 5.5 · write · ** · 7 min
def fewest(static, gradients, activations, samples, budget):
    import math

    for k in range(1, samples + 1):
        if k == 1:
            peak = static + max(activations, gradients)
        else:
            largest = math.ceil(samples / k)
            peak = static + gradients + activations / samples * largest
        if peak <= budget:
            return k
    return None


check("5.5", fewest)

# %% 6.1
# Exercise 6.1 · fill · * · 4 min
def forward(x, W, target):
    x_low = x.to(torch.bfloat16)
    W_low = W.to(torch.bfloat16)
    h = torch.tanh(F.linear(x_low, W_low))
    y = F.linear(h, W_low)
    y = y.to(torch.float32)  # as the loss reads it
    return F.mse_loss(y, target)


check("6.1", forward)

# %% 6.2
# Exercise 6.2 · write · ** · 8 min
def saved_bytes(sizes, samples):
    total = 0
    for i in range(len(sizes) - 1):
        total += samples * sizes[i] * 2  # input of the layer
        if i > 0:
            total += samples * sizes[i] * 2  # input of the GELU before
            total += sizes[i] * sizes[i + 1] * 2  # copy of the weight
    total += samples * sizes[-1] * 4  # for the loss
    return total


check("6.2", saved_bytes)

# %% 6.3
# Exercise 6.3 · order · ** · 4 min
order = "d g a i e f b"

check("6.3", order)

# %% 6.4
# Exercise 6.4 · write · *** · 8 min
def scaled_step(model, batch, loss_fn, optimizer, scale):
    optimizer.zero_grad()
    loss = loss_fn(model, batch) * scale
    loss.backward()
    finite = True
    for parameter in model.parameters():
        parameter.grad.div_(scale)
        if not parameter.grad.isfinite().all():
            finite = False
    if finite:
        optimizer.step()
        return scale
    return scale / 2


check("6.4", scaled_step)

# %% 6.5
# Exercise 6.5 · write · ** · 6 min
def vanishes(w, update, digits):
    spacing = 2.0 ** (math.floor(math.log2(w)) - (digits - 1))
    return update < spacing / 2


check("6.5", vanishes)

# %% 7.1
# Exercise 7.1 · fill · * · 3 min
def make_hook(lr):
    def hook(parameter):
        parameter -= lr * parameter.grad  # the update, in place
        parameter.grad = None  # the gradient is let go

    return hook


check("7.1", make_hook)

# %% 7.2
# Exercise 7.2 · order · * · 3 min
order = "g c f b e a d"

check("7.2", order)

# %% 7.3
# Exercise 7.3 · write · ** · 7 min
def step_in_backward(model, lr, momentum):
    handles = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            velocity = torch.zeros_like(parameter)

            def hook(parameter, velocity=velocity):
                velocity = momentum * velocity + parameter.grad
                parameter -= lr * velocity
                parameter.grad = None

            handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove():
        for handle in handles:
            handle.remove()

    return remove


check("7.3", step_in_backward)

# %% 7.4
# Exercise 7.4 · write · ** · 6 min
def optimizer_peak(sizes, kind):
    total = sum(sizes)
    if kind == "sgd":
        return 2 * total
    if kind == "momentum":
        return 3 * total
    if kind == "fused":
        return 4 * total
    if kind == "foreach":
        return 5 * total
    most = 0
    before = 0
    for size in sizes:
        most = max(most, 2 * size + before)
        before = size
    return 4 * total + most


check("7.4", optimizer_peak)

# %% 7.5
# Exercise 7.5 · write · ** · 8 min
def make_hooks(model, folder, smallest):
    addresses = [p.untyped_storage().data_ptr() for p in model.parameters()]
    files = 0

    def pack(tensor):
        if tensor.nbytes >= smallest and tensor.untyped_storage().data_ptr() not in addresses:
            path = folder / f"{files}.npy"
            np.save(path, tensor.detach().numpy())
            files = files + 1
            return path
        return tensor.detach()

    def unpack(packed):
        if isinstance(packed, Path):
            return torch.from_numpy(np.load(packed))
        return packed

    return pack, unpack


check("7.5", make_hooks)

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
    error = statistics.stdev(differences) / len(differences) ** 0.5  # the standard error of that mean
    return mean, error


check("9.2", paired)

# %% 9.3
# Exercise 9.3 · write · ** · 7 min
def verdict(one, other):
    mean, error = paired(one, other)
    if error == 0:
        return "no difference seen"
    if mean / error > 3:
        return "better"
    if mean / error < -3:
        return "worse"
    return "no difference seen"


check("9.3", verdict)

# %% 9.4
# Exercise 9.4 · write · ** · 6 min
def equal_steps(steps, batch, micro, accumulation, ratio):
    samples = steps * batch
    by_samples = samples // (micro * accumulation)
    by_time = int(steps / ratio)
    return by_samples, by_time


check("9.4", equal_steps)

# %% 9.5
# Exercise 9.5 · write · ** · 8 min
def largest(peak, limit, most):
    low = 1
    high = most
    best = 0
    while low <= high:
        middle = (low + high) // 2
        if peak(middle) <= limit:
            best = middle
            low = middle + 1
        else:
            high = middle - 1
    return best


check("9.5", largest)

# %% 11.1
# Exercise 11.1 · fill · ** · 5 min
def in_place(highest, make_net, x):
    def training(net):
        net(x).sum().backward()

    def inference(net):
        with torch.no_grad():
            net(x)

    saved_in_training = highest(training, make_net(False)) - highest(training, make_net(True))
    saved_in_inference = highest(inference, make_net(False)) - highest(inference, make_net(True))
    return saved_in_training, saved_in_inference


check("11.1", in_place)

# %% 11.2
# Exercise 11.2 · write · ** · 5 min
def lowest(parameters, activations, k):
    # parameters + state; gradients are freed before the forward pass
    return 3 * parameters + activations / k


check("11.2", lowest)

# %% 11.3
# Exercise 11.3 · write · *** · 8 min
def counterexample():
    torch.manual_seed(0)
    model = nn.Sequential(*(make_block() for _ in range(8)))
    batch = torch.randn(16, 128), torch.randn(16, 128)
    return memlab.TrainingStep(model, batch, nn.MSELoss(), torch.optim.AdamW)


check("11.3", counterexample)

# %% 11.4
# Exercise 11.4 · order · ** · 5 min
order = "d g b e c"

check("11.4", order)

# %% 11.5
# Exercise 11.5 · write · ** · 6 min
def can_move(alive):
    total = sum(alive.values())
    names = set()
    if alive.get("activations", 0) >= total / 10:
        names.add("checkpoint")
        names.add("micro-batches")
    if alive.get("gradients", 0) >= total / 10:
        names.add("optimizer in backward")
    if total - alive.get("batch", 0) >= total / 10:
        names.add("pure bf16")
    return names


check("11.5", can_move)
