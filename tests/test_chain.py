"""A chain's predictions are what `memlab.measure` then measures, and its search finds what trying everything finds."""

import itertools
import random

import pytest
import torch
from torch import nn

from memlab import Baseline, Checkpoint, MemlabError, TrainingStep, measure, zoo
from memlab.chain import Block, Chain, Placement, best, pareto, regions_of, schedule, weigh
from memlab.measure import Stage, trace
from memlab.nest import near_equal
from memlab.passes import Pass, Passes

SGD = torch.optim.SGD


class Norm(nn.Module):
    """A block of a width of its own; with `plus`, it begins with an operator that saves nothing of its input."""

    def __init__(self, inputs, outputs, plus):
        super().__init__()
        self.plus = plus
        self.norm, self.linear = nn.LayerNorm(inputs), nn.Linear(inputs, outputs)

    def forward(self, x):
        return nn.functional.gelu(self.linear(self.norm(x + 1 if self.plus else x)))


def of_many_widths(plus=False):
    widths = [16, 64, 8, 128]
    norms = [Norm(inputs, outputs, plus) for inputs, outputs in itertools.pairwise(widths)]
    model = nn.Sequential(*norms, nn.Sequential(nn.Linear(128, 4), nn.Tanh()))
    return TrainingStep(model, (torch.randn(32, 16), torch.arange(32) % 4), nn.CrossEntropyLoss(), SGD)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return TrainingStep(model, torch.randn(4, 8, 16), lambda model, x: model(x).square().mean(), torch.optim.AdamW)


def frozen():
    step = zoo.gpt_step(batch=4, context=16, width=16, depth=3, optimizer=SGD)
    step.model.tokens.requires_grad_(False)
    step.model.positions.requires_grad_(False)
    step.model.blocks[0].requires_grad_(False)
    return step


def in_bf16():
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return zoo.gpt_loss(model, batch)

    like = zoo.gpt_step(batch=4, context=16, width=16, depth=3)
    return TrainingStep(like.model, like.batch, loss, SGD)


STEPS = {
    "gpt": lambda: zoo.gpt_step(batch=4, context=32, width=32, depth=4, optimizer=SGD),
    "gpt with dropout": lambda: zoo.gpt_step(batch=4, context=16, width=16, depth=3, dropout=0.1, tied=True),
    "resnet": lambda: zoo.resnet_step(batch=4, depth=3, width=8),
    "mlp": lambda: zoo.mlp_step(batch=256, depth=3, width=64, optimizer=SGD),
    "post-norm encoder": encoder,
    "frozen below": frozen,
    "bf16 autocast": in_bf16,
    "many widths": of_many_widths,
    "inputs not saved": lambda: of_many_widths(plus=True),
}
MODULES = {"many widths": tuple("0123"), "inputs not saved": tuple("0123")}


def chain_of(name, step):
    return Chain.of(step, MODULES.get(name, "auto"))


def strategy_for(chain, flags):
    names = tuple(block.name for block, flag in zip(chain.blocks, flags, strict=True) if flag)
    return Checkpoint(names) if names else Baseline()


# -- against measuring -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_every_placement_peaks_where_it_is_measured_to(name):
    step = STEPS[name]()
    chain = chain_of(name, step)
    with Stage(step) as stage:
        for flags in itertools.product([False, True], repeat=len(chain.blocks)):
            measured = trace(stage, strategy_for(chain, flags), allocator=False)
            assert weigh(chain, flags).peak_bytes == measured.tensor_peak_bytes, flags

            highest = {}
            for now in schedule(chain, flags):
                highest[now.phase] = max(now.nbytes, highest.get(now.phase, 0))
            by_phase = measured.by_phase(at="tensor_peak")
            assert highest["forward"] == by_phase["forward"], flags
            on_the_way_back = [max(its.get("recompute", 0), its["backward"]) for its in (highest, by_phase)]
            assert on_the_way_back[0] == on_the_way_back[1], flags


@pytest.mark.parametrize("depth", [6, 8])
def test_a_sample_of_the_placements_of_a_deeper_chain(depth):
    step = zoo.gpt_step(batch=2, context=16, width=16, depth=depth, optimizer=SGD)
    chain, draw = Chain.of(step), random.Random(depth)
    for _ in range(6):
        flags = tuple(draw.random() < 0.5 for _ in range(depth))
        measured = measure(step, strategy_for(chain, flags), allocator=False)
        assert weigh(chain, flags).peak_bytes == measured.tensor_peak_bytes, flags


# 16 B: a bias of 4 numbers, whose gradient is born at another place; 1024 B: the input of the second region, which the
# block it goes to does not save, so that alone and kept it would let go of it.
@pytest.mark.parametrize(("name", "most"), [("resnet", 0), ("mlp", 0), ("many widths", 16), ("inputs not saved", 1024)])
def test_joined_blocks_peak_where_segments_are_measured_to(name, most):
    step = STEPS[name]()
    chain = chain_of(name, step)
    count = len(chain.blocks)
    with Stage(step) as stage:
        for segments in range(1, count + 1):
            bounds = itertools.accumulate(near_equal(count, segments), initial=0)
            joined = tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise(bounds))
            strategy = Checkpoint(MODULES.get(name, "auto"), segments=segments)
            measured = trace(stage, strategy, allocator=False).tensor_peak_bytes
            assert abs(weigh(chain, joined).peak_bytes - measured) <= most


def test_the_best_is_the_best_of_all_that_were_measured():
    step = zoo.resnet_step(batch=4, depth=3, width=8)
    chain, tried = Chain.of(step), []
    with Stage(step) as stage:
        plain = trace(stage, Baseline(), allocator=False)
        for flags in itertools.product([False, True], repeat=3):
            its = trace(stage, strategy_for(chain, flags), allocator=False)
            again = sum(operator.flops for operator in its.operators if operator.place.phase == "recompute")
            tried.append(Placement(regions_of(chain, flags), its.tensor_peak_bytes, again))
    assert chain.work == sum(operator.flops for operator in plain.operators)
    least = min(its.peak_bytes for its in tried)
    assert best(chain).peak_bytes == least
    assert best(chain).work == min(its.work for its in tried if its.peak_bytes == least)
    for budget in {its.peak_bytes for its in tried}:
        assert best(chain, budget).work == min(its.work for its in tried if its.peak_bytes <= budget)


def test_what_is_held_before_backward_is_what_autograd_saved():
    step = zoo.gpt_step(batch=4, context=32, width=32, depth=3)
    chain = Chain.of(step)
    for flags in [(False, False, False), (True, True, True), (True, False, True)]:
        saved = measure(step, strategy_for(chain, flags), allocator=False).saved_bytes
        before = next(now for now in schedule(chain, flags) if now.phase == "backward")
        loss = 2 * 4  # the loss and its gradient are alive too
        unsaved = sum(map(before.total, ("saved", "input", "outside"))) - saved
        assert unsaved - loss in (0, 32 * 8), flags  # and the positions, an int64 each


def test_the_step_is_left_as_it_was():
    step = STEPS["gpt with dropout"]()
    state, stream = {k: v.clone() for k, v in step.model.state_dict().items()}, torch.get_rng_state()
    Chain.of(step)
    assert all(torch.equal(state[k], v) for k, v in step.model.state_dict().items())
    assert torch.equal(stream, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_a_chain_is_made_from_four_traces_of_any_kind():
    step, ran = zoo.gpt_step(batch=2, context=8, width=8, depth=5), []

    def run(strategy):
        ran.append(strategy)
        return measure(step, strategy, allocator=False)

    chain = Chain.of(step, run=run)
    names = tuple(f"blocks.{number}" for number in range(5))
    assert ran == [Baseline(), Checkpoint(names), Checkpoint(names[::2]), Checkpoint(names[1::2])]
    assert chain == Chain.of(step)


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain():
    return Chain.of(zoo.gpt_step(batch=2, context=16, width=16, depth=4))


def test_blocks_run_in_order_and_back(chain):
    ran = [(now.phase, now.block) for now in schedule(chain, ((0,), (2, 3)))]
    forward = [("forward", block) for block in (-1, 0, 1, 2, 3, 4)]
    again = [("recompute", 2), ("recompute", 3), ("backward", 3), ("backward", 2)]
    rest = [("backward", 1), ("recompute", 0), ("backward", 0), ("backward", -1), ("optimizer", 4)]
    assert ran == [*forward, ("backward", 4), *again, *rest]


@pytest.mark.parametrize("placement", [(), ((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),), ((1, 2),)], ids=str)
def test_what_is_alive_adds_up(chain, placement):
    instants = schedule(chain, placement)
    for now in instants:
        kinds = ("saved", "input", "gradients", "outside")
        assert now.nbytes == now.resident + sum(map(now.total, kinds)) + now.working
        assert now.working >= 0
    assert max(now.nbytes for now in instants) == weigh(chain, placement).peak_bytes
    parameters = sum(p.numel() * 4 for p in zoo.gpt_step(batch=2, context=16, width=16, depth=4).model.parameters())
    last = instants[-1]
    assert {kind for kind, _ in last.held} == {"gradients"}
    assert last.total("gradients") == parameters


def test_a_checkpointed_block_holds_its_input_alone(chain):
    before = next(now for now in schedule(chain, (True, False, True, True)) if now.phase == "backward").held
    boundary = 2 * 16 * 16 * 4
    assert [before["input", number] for number in range(4)] == [boundary] * 4
    random_state = torch.get_rng_state().nbytes
    assert [before["saved", number] for number in (0, 2, 3)] == [random_state] * 3
    assert before["saved", 1] == chain.blocks[1].saved_bytes > 10 * boundary


def test_sizes_of_a_block(chain):
    block = chain.blocks[0]
    model = zoo.gpt_step(batch=2, context=16, width=16, depth=4).model
    assert block.name == "blocks.0"
    assert block.output_bytes == chain.input_bytes == 2 * 16 * 16 * 4
    assert block.gradient_bytes == sum(p.numel() * 4 for p in model.blocks[0].parameters())
    assert 0 < block.recompute_work < block.kept[0].forward.work  # it ends before the last linear layer
    assert block.temporary_bytes >= 0


# -- search ------------------------------------------------------------------------------------------------------------


def every_placement(count, joined):
    """All tuples of disjoint regions, written down without the code under test."""
    for states in itertools.product("kcj" if joined else "kc", repeat=count):  # kept; checkpointed; joined to the last
        if any(state == "j" and (number == 0 or states[number - 1] == "k") for number, state in enumerate(states)):
            continue
        regions = []
        for number, state in enumerate(states):
            if state == "c":
                regions.append((number,))
            elif state == "j":
                regions[-1] += (number,)
        yield tuple(regions)


def random_chain(draw):
    """Blocks of any sizes, whose passes know nothing of one another."""

    def run(late=0):
        change = draw.randint(-20, 20) + late
        return Pass(max(change, 0) + draw.randint(0, 20), change, work=draw.randint(0, 5), late=late)

    def pair(late=0):
        return tuple(Passes(run(draw.randint(0, late)), run(), run()) for _ in range(2))

    blocks = [Block("", *(draw.randint(0, 20) for _ in range(3)), pair(9), pair(9)) for _ in range(draw.randint(1, 4))]
    return Chain(tuple(blocks), 100, 3, 1000, pair(), pair(), run())


@pytest.mark.parametrize("joined", [False, True])
def test_the_front_is_that_of_all_placements(joined):
    draw = random.Random(0)
    for chain in (random_chain(draw) for _ in range(60)):
        tried = [weigh(chain, regions) for regions in every_placement(len(chain.blocks), joined)]
        front = pareto(chain, joined)
        costs = {(one.work, one.peak_bytes) for one in tried}
        beaten = {(w, p) for w, p in costs if any(a <= w and b <= p for a, b in costs - {(w, p)})}
        assert {(one.work, one.peak_bytes) for one in front} == costs - beaten
        assert all(one == weigh(chain, one.regions) for one in front)
        assert best(chain, joined=joined).peak_bytes == min(peak for _, peak in costs)


def test_a_budget_below_the_least_peak_is_refused(chain):
    least = best(chain)
    assert best(chain, least.peak_bytes) == least
    with pytest.raises(MemlabError, match=r"no placement of checkpoints peaks within 1\.00 KiB: the least is \d+ KiB"):
        best(chain, "1 KiB")


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((True, False), "the placement has 2 flags, and the chain 4 blocks"),
        ((0, 2), r"\(0, 2\) is no placement: give a flag for each block"),
        (((0, 2),), r"are no regions of blocks 0 to 3: each is a run of blocks, in order"),
        (((2,), (1,)), "in order"),
        (((1, 2), (2, 3)), "no regions"),
        (((4,),), "no regions of blocks 0 to 3"),
    ],
    ids=str,
)
def test_a_placement_that_the_chain_cannot_have(chain, placement, message):
    with pytest.raises(MemlabError, match=message):
        schedule(chain, placement)


def test_blocks_that_run_twice_are_no_chain():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

        def forward(self, x):
            one, two = self.blocks
            return one(two(one(x)))

    step = TrainingStep(Twice(), torch.ones(2, 4), lambda model, x: model(x).sum())
    with pytest.raises(MemlabError, match=r"blocks\.0 runs again after blocks\.1 has run: these blocks are no chain"):
        Chain.of(step)


def test_a_model_that_checkpoints_by_itself_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    step = TrainingStep(Own(), torch.ones(2, 4), lambda model, x: model(x).sum())
    with pytest.raises(MemlabError, match="the model checkpoints by itself already"):
        Chain.of(step)
