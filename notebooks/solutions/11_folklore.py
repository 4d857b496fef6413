# The solutions of 11_folklore.ipynb: each section is a cell of the lesson, with the answer in it.


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
def alive(parameters, activations, k):
    gradients = parameters if k > 1 else 0
    return parameters + 2 * parameters + gradients + activations / k


check("11.2", alive)


# %% 11.3
# Exercise 11.3 · write · *** · 8 min
def counterexample():
    model = nn.Sequential(*(make_block() for _ in range(4)))
    batch = torch.randn(64, 128), torch.randn(64, 128)
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
        names |= {"checkpoint", "micro-batches"}
    if alive.get("gradients", 0) >= total / 10:
        names.add("optimizer in backward")
    if total - alive.get("batch", 0) >= total / 10:
        names.add("pure bf16")
    return names


check("11.5", can_move)

# %% quiz
answers = "b c a"  # @param {type: "string"}
quiz(11, answers)
