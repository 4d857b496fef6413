# The solutions of 06_mixed_precision.ipynb: each section is a cell of the lesson, with the answer in it.


# %% 6.1
# Exercise 6.1 · fill · * · 4 min
def forward(x, W, target):
    x_low = x.to(torch.bfloat16)
    W_low = W.to(torch.bfloat16)
    h = torch.tanh(F.linear(x_low, W_low))
    y = F.linear(h, W_low)
    y = y.float()  # as the loss reads it
    return F.mse_loss(y, target)


check("6.1", forward)


# %% 6.2
# Exercise 6.2 · write · ** · 8 min
def saved_bytes(sizes, samples):
    inputs = samples * sum(sizes[:-1])
    before_gelu = samples * sum(sizes[1:-1])
    copies = sum(sizes[n] * sizes[n + 1] for n in range(1, len(sizes) - 1))
    output = samples * sizes[-1]
    return 2 * (inputs + before_gelu + copies) + 4 * output


check("6.2", saved_bytes)

# %% 6.3
# Exercise 6.3 · order · ** · 4 min
order = "d g a i e f b"

check("6.3", order)


# %% 6.4
# Exercise 6.4 · write · *** · 8 min
def scaled_step(model, batch, loss_fn, optimizer, scale):
    optimizer.zero_grad()
    (loss_fn(model, batch) * scale).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for gradient in gradients:
        gradient.div_(scale)
    if all(gradient.isfinite().all() for gradient in gradients):
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

# %% quiz
answers = "c b a"  # @param {type: "string"}
quiz(6, answers)
