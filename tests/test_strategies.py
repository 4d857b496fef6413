"""Each technique trains what a plain loop in PyTorch trains, says what it cannot do, and leaves nothing behind."""

import functools
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.errors import MemlabError
from memlab.step import TrainingStep
from memlab.strategies import (
    Baseline,
    Checkpoint,
    LowPrecision,
    MicroBatch,
    MixedPrecision,
    OptimizerInBackward,
    Sum,
    parse,
)


def ran(runner):
    """The loss of one more run."""
    runner.run()
    return runner.loss


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth=4, dropout=0.0):
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, 8), nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


ADAMW = functools.partial(torch.optim.AdamW, lr=0.05)


def make(model=Net, optimizer=ADAMW, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = model().to(dtype)
    batch = (torch.randn(10, 5, dtype=dtype), torch.arange(10) % 3)
    return TrainingStep(model, batch, cross_entropy, optimizer, **options)


def plain(step):
    """A person's loop: the loss, each parameter's gradient by name, and the parameters after the update."""
    loss = step.loss_fn(step.model, step.batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
    if step.optimizer is not None:
        step.optimizer.step()
    step.model.zero_grad()
    return loss.detach(), gradients, {name: p.detach().clone() for name, p in step.model.named_parameters()}


def run(step, strategy):
    """The same through a strategy."""
    names = {id(p): name for name, p in step.model.named_parameters()}
    gradients = {}

    def catch(parameter, gradient):
        assert names[id(parameter)] not in gradients, "caught twice"
        gradients[names[id(parameter)]] = gradient.detach().clone()

    with strategy.applied(step) as runner:
        runner.run(catch=catch)
        loss = runner.loss
        after = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    return loss, gradients, after


def close(one, other, tolerance=1e-12):
    assert one.keys() == other.keys()
    return all(torch.allclose(one[k].double(), other[k].double(), rtol=tolerance, atol=tolerance) for k in one)


def traces_left(step):
    """What a strategy could leave behind: everything that hangs on modules and parameters, and global switches."""
    left = [name for module in step.model.modules() for name in vars(module) if name == "forward"]
    left += [hooks for m in step.model.modules() for name, hooks in vars(m).items() if "_hooks" in name and hooks]
    for parameter in step.model.parameters():
        left += [parameter.grad] if parameter.grad is not None else []
        left += [h for h in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if h is not None]
    left += ["autocast is on"] * torch.is_autocast_enabled("cpu") + ["gradients are off"] * (
        not torch.is_grad_enabled()
    )
    return left


EXACT = [
    Baseline(),
    Checkpoint(),
    Checkpoint("blocks.1"),
    Checkpoint(("blocks.0", "blocks.3", "head")),
    Checkpoint(save=["mm", "addmm"]),
    Checkpoint("Net"),
    MicroBatch(count=4),
    MicroBatch(size=4),
    MicroBatch(size=100),
    MixedPrecision("bf16"),  # autocast leaves float64 alone
    OptimizerInBackward(),
    Checkpoint() + MicroBatch(count=3),
    Checkpoint() + OptimizerInBackward(),
    Checkpoint() + MicroBatch(size=4) + MixedPrecision("bf16"),
]


@pytest.mark.parametrize("strategy", EXACT, ids=repr)
@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), None]
)
def test_the_same_training_as_a_plain_loop(strategy, optimizer):
    if optimizer is None and OptimizerInBackward() in strategy.parts:
        return  # refused: see below
    loss, gradients, after = plain(make(optimizer=optimizer))
    step = make(optimizer=optimizer)
    loss_2, gradients_2, after_2 = run(step, strategy)
    assert torch.allclose(loss, loss_2, rtol=1e-12)
    assert loss_2.dim() == 0
    assert not loss_2.requires_grad
    assert close(gradients, gradients_2)
    assert close(after, after_2, 1e-9)
    assert traces_left(step) == []


@pytest.mark.parametrize("strategy", [Checkpoint(), Checkpoint("blocks.2"), OptimizerInBackward()], ids=repr)
def test_no_arithmetic_changes_bit_for_bit_with_dropout(strategy):
    results = []
    for way in (Baseline(), strategy):
        step = make(functools.partial(Net, dropout=0.3), dtype=torch.float32)
        torch.manual_seed(5)
        results.append((*run(step, way), torch.rand(1)))
    (loss, gradients, after, stream), (loss_2, gradients_2, after_2, stream_2) = results
    assert torch.equal(loss, loss_2)
    assert torch.equal(stream, stream_2)
    assert all(torch.equal(gradients[name], gradients_2[name]) for name in gradients)
    assert all(torch.equal(after[name], after_2[name]) for name in after)


# ----------------------------------------------------------------------------------------------------- the plain step


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not str(func).startswith("profiler."):  # zero_grad marks itself for the profiler
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_plain_step_runs_the_plain_loop_operator_for_operator():
    step = make()
    with Operators() as expected:
        loss = step.loss_fn(step.model, step.batch)
        value = loss.detach()
        loss.backward()
        step.optimizer.step()
        step.optimizer.zero_grad()
    assert value.dim() == 0
    step = make()
    with Baseline().applied(step) as runner, Operators() as found:
        runner.run()
    assert found.names == expected.names


def test_repeated_runs_are_repeated_steps():
    step, expected = make(), make()
    with (Checkpoint() + MicroBatch(count=2)).applied(step) as runner:
        losses = [ran(runner).item() for _ in range(3)]
    assert losses == pytest.approx([plain(expected)[0].item() for _ in range(3)], rel=1e-9)


def test_gradients_that_were_there_do_not_count():
    step, expected = make(), make()
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert close(run(step, Baseline())[1], plain(expected)[1])


def test_a_runner_ends_with_its_block():
    step = make()
    with Checkpoint().applied(step) as runner:
        pass
    with pytest.raises(MemlabError, match="no longer applied"):
        runner.run()


def test_no_graph_outlives_its_micro_batch():
    alive, most = [], 0

    def loss_fn(model, batch):
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        hidden = model(batch[0]).exp()  # saved for backward
        alive.append(weakref.ref(hidden.untyped_storage()))
        return F.cross_entropy(hidden, batch[1])

    step = TrainingStep(Net(), (torch.randn(10, 5), torch.arange(10) % 3), loss_fn, torch.optim.SGD)
    with MicroBatch(count=5).applied(step) as runner:
        runner.run()
    assert len(alive) == 5
    assert most == 0
    assert not any(ref() for ref in alive)


def test_parameters_outside_the_optimizer_and_unused_ones():
    def split(params):
        return torch.optim.SGD(params[:2], lr=0.1)

    expected = plain(make(optimizer=split))
    for strategy in (Baseline(), MicroBatch(count=2), OptimizerInBackward()):
        step = make(optimizer=split)
        step.model.register_parameter("unused", nn.Parameter(torch.ones(1)))
        _, gradients, after = run(step, strategy)
        assert close(gradients, expected[1])
        del after["unused"]
        assert close(after, expected[2])
        assert traces_left(step) == []


# -------------------------------------------------------------------------------------------------------- sums, texts


def test_sums_are_sets_in_canonical_order():
    parts = [OptimizerInBackward(), Checkpoint("a.*"), MixedPrecision("bf16")]
    sums = {
        functools.reduce(lambda one, other: one + other, order, Baseline()) for order in itertools.permutations(parts)
    }
    assert len(sums) == 1
    assert repr(sums.pop()) == "Checkpoint('a.*') + MixedPrecision('bf16') + OptimizerInBackward()"
    assert Baseline() + Baseline() == Baseline()
    assert Checkpoint() + Baseline() == Checkpoint()
    nested = (Checkpoint() + MicroBatch(count=2)) + MixedPrecision("fp16")
    assert isinstance(nested, Sum)
    assert nested.parts == (Checkpoint(), MicroBatch(count=2), MixedPrecision("fp16"))


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (Checkpoint(), Checkpoint("a"), "one technique twice"),
        (MicroBatch(count=2), MicroBatch(size=2), "one technique twice"),
        (MixedPrecision("bf16"), LowPrecision("bf16"), "choose one"),
        (OptimizerInBackward(), MicroBatch(count=2), "consumes each gradient at once.*leave one of them out"),
        (OptimizerInBackward(), MixedPrecision("fp16"), r"take MixedPrecision\('bf16'\)"),
    ],
)
def test_what_cannot_go_together(one, other, reason):
    for sum_of in (lambda: one + other, lambda: other + one, lambda: (one + Baseline()) + other):
        with pytest.raises(MemlabError, match=f"cannot be combined: .*{reason}"):
            sum_of()


def test_only_strategies_add_up():
    with pytest.raises(TypeError):
        Checkpoint() + 3


ALL = [*EXACT, LowPrecision("fp16"), Checkpoint(segments=3), MixedPrecision("fp16"), MicroBatch(count=1)]


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_repr_evaluates_and_values_hash(strategy):
    assert eval(repr(strategy)) == strategy
    assert hash(eval(repr(strategy))) == hash(strategy)


def test_labels():
    step = make()
    assert str(Baseline()) == "baseline"
    assert str(Checkpoint()) == "checkpoint"
    assert str(Checkpoint("blocks.*", segments=2)) == "checkpoint blocks.* in 2 segments"
    assert str(Checkpoint(["a.*", "b"], save=["mm"])) == "selective checkpoint a.*, b"
    assert str(MicroBatch(count=5)) == "5 micro-batches"
    assert MicroBatch(count=5).label(step) == "5 micro-batches of 2"
    assert MicroBatch(count=3).label(step) == "3 micro-batches of 4, 3 and 3"
    assert str(MicroBatch(size=8)) == "micro-batches of 8"
    assert MicroBatch(size=5).label(step) == "2 micro-batches of 5"
    assert MicroBatch(size=50).label(step) == "1 micro-batch of 10"
    assert str(MixedPrecision("bf16")) == "bf16 autocast"
    assert str(LowPrecision("fp16")) == "pure fp16"
    assert str(OptimizerInBackward()) == "optimizer in backward"
    assert (Checkpoint() + MicroBatch(size=5)).label(step) == "checkpoint + 2 micro-batches of 5"


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("baseline", Baseline()),
        ("checkpoint", Checkpoint()),
        ("Checkpoint ( blocks.* )", Checkpoint("blocks.*")),
        ("checkpoint(a.*, b.*, segments=3)", Checkpoint(("a.*", "b.*"), segments=3)),
        ("checkpoint(save=mm)", Checkpoint(save="mm")),
        ("micro-batch(4)", MicroBatch(count=4)),
        ("micro-batch(size=8)+checkpoint", Checkpoint() + MicroBatch(size=8)),
        ("checkpoint + micro-batch(4) + bf16", Checkpoint() + MicroBatch(count=4) + MixedPrecision("bf16")),
        ("pure-bf16 + optimizer-in-backward", LowPrecision("bf16") + OptimizerInBackward()),
    ],
)
def test_words_for_the_command_line(text, strategy):
    assert parse(text) == strategy


@pytest.mark.parametrize(
    "text", ["", "chekpoint", "micro-batch", "micro-batch(four)", "bf16(3)", "checkpoint(depth=3)"]
)
def test_words_that_mean_nothing(text):
    with pytest.raises(MemlabError, match=r"the words are: baseline, checkpoint|give MicroBatch either"):
        parse(text)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MicroBatch(), "either count= or size="),
        (lambda: MicroBatch(count=2, size=2), "either count= or size="),
        (lambda: MicroBatch(count=0), r"MicroBatch\(count=0\): give a whole number from 1"),
        (lambda: MixedPrecision("bfloat16"), r"MixedPrecision\('bfloat16'\): give 'bf16' or 'fp16'"),
        (lambda: LowPrecision(torch.float16), "give 'bf16' or 'fp16'"),
        (lambda: Checkpoint([]), "give names or patterns"),
        (lambda: Checkpoint(save=["mmm"]), r"save='mmm': torch has no operator aten\.mmm"),
        (lambda: Checkpoint(save=[]), "keeps nothing"),
    ],
)
def test_arguments_that_make_no_sense(build, message):
    with pytest.raises(MemlabError, match=message):
        build()
    with pytest.raises(TypeError):
        MicroBatch(4)


# ------------------------------------------------------------------------------------------------------- checkpointing


def regions_run(step, strategy):
    """Names of the modules whose forward ran in the step, in order, by module hooks: twice for a checkpointed one."""
    seen, names = [], {id(m): name for name, m in step.model.named_modules()}
    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, _: seen.append(names.get(id(m), "?")))
    try:
        with strategy.applied(step) as runner:
            runner.run()
            return seen, runner.notes
    finally:
        handle.remove()


def recomputed(step, strategy):
    """Linear layers that ran twice."""
    seen, _ = regions_run(step, strategy)
    return sorted(name for name in set(seen) if seen.count(name) == 2 and name.endswith("up"))


@pytest.mark.parametrize(
    ("patterns", "blocks"),
    [
        ("auto", "0123"),
        ("blocks.*", "0123"),
        ("blocks.?", "0123"),
        ("**.up", ""),
        ("b*.2", "2"),
        (["blocks.0", "blocks.3"], "03"),
        ("*.1", "1"),
    ],
)
def test_patterns_over_module_names(patterns, blocks):
    assert recomputed(make(), Checkpoint(patterns)) == [f"blocks.{number}.up" for number in blocks]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("blcks.*", r"'blcks.\*' matches no module of Net; near it are blocks\.\d"),
        (("blocks.1", "blocks.1.up"), r"blocks\.1\.up lies within blocks\.1 and both are matched"),
        ("blocks.**", r"lies within blocks\.\d and both are matched.*`\*\*` crosses dots"),
        ("blocks", r'blocks is a ModuleList, never called itself: match what it holds, "blocks\.\*"'),
    ],
)
def test_patterns_that_are_refused(patterns, message):
    step = make()
    with pytest.raises(MemlabError, match=message), Checkpoint(patterns).applied(step):
        pass
    assert traces_left(step) == []


class Towers(nn.Module):
    """Two containers of blocks, one block shared, one ModuleList inside a block."""

    def __init__(self):
        super().__init__()
        shared = Block(5)
        self.left = nn.Sequential(nn.Linear(5, 5), Block(5), Block(5), nn.ReLU(), nn.ReLU())
        self.right = nn.ModuleList([shared, shared, Block(5)])
        self.head = nn.Linear(5, 3)
        self.right[2].experts = nn.ModuleList([Block(5), Block(5)])

    def forward(self, x):
        x = self.left(x)
        for block in self.right:
            x = block(x)
        return self.head(x)


def test_auto_takes_the_outermost_repeated_blocks():
    step = make(Towers)
    seen, _ = regions_run(step, Checkpoint())
    # recomputed once a call: 2 calls of each left block, right.2; 4 of the shared one
    assert {name: seen.count(name) for name in ("left.1.up", "left.2.up", "right.2.up", "right.0.up", "left.0")} == {
        "left.1.up": 2,
        "left.2.up": 2,
        "right.2.up": 2,
        "right.0.up": 4,
        "left.0": 1,
    }
    assert close(run(make(Towers), Checkpoint())[1], plain(make(Towers))[1])


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), r"e\.g\. Checkpoint\(segments=2\)"),
        (lambda: nn.Linear(5, 3), r"single layers only.*Checkpoint\(\"Linear\"\) is the whole model"),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 3))),
            r'name what to checkpoint, e\.g\. Checkpoint\("0"\); candidates are 0',
        ),
    ],
)
def test_auto_where_nothing_repeats(model, remedy):
    step = make(model)
    with pytest.raises(MemlabError, match=f"no repeated blocks found in .*{remedy}"), Checkpoint().applied(step):
        pass


def test_a_matched_module_that_never_runs_is_noted():
    def model():
        net = Net()
        net.blocks[2].forward_only = Block()
        net.spare = Block()
        return net

    notes = regions_run(make(model), Checkpoint(["spare", "blocks.0"]))[1]
    assert notes == ["Checkpoint matched spare, but the forward pass never called it"]


def saved_bytes(step, strategy):
    """Distinct bytes that autograd holds for backward outside of parameters, by hooks around the forward pass."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage()._cdata for p in step.model.parameters()}
    with strategy.applied(step), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = step.loss()
    del loss
    return sum(size for key, size in storages.items() if key not in own)


def chain(depth):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(5, 20), nn.GELU(), nn.Linear(20, 5)) for _ in range(depth)])


def test_segments_checkpoint_every_group():
    expected = plain(make(lambda: chain(7)))
    held = []
    for count in range(1, 8):
        for patterns in ("auto", "*", "Sequential"):
            step = make(lambda: chain(7))
            strategy = Checkpoint(patterns, segments=count)
            _, gradients, after = run(step, strategy)
            assert close(gradients, expected[1])
            assert close(after, expected[2], 1e-9)
            assert traces_left(step) == []
            seen, _ = regions_run(make(lambda: chain(7)), strategy)
            assert all(seen.count(f"{number}.0") == 2 for number in range(7)), "each child runs twice"
        held.append(saved_bytes(make(lambda: chain(7)), strategy))
    # A region holds its input, 10 x 5 doubles, and the loss what it holds without any checkpoint.
    assert [after - before for before, after in itertools.pairwise(held)] == [10 * 5 * 8] * 6


def test_a_part_of_a_sequential_in_segments():
    def model():
        return nn.Sequential(nn.Linear(5, 8), *[Block() for _ in range(4)], nn.Linear(8, 3))

    step = make(model)
    seen, _ = regions_run(step, Checkpoint(["1", "2", "3"], segments=2))
    assert [seen.count(str(number)) for number in range(6)] == [1, 2, 2, 2, 1, 1]
    assert close(run(make(model), Checkpoint(["1", "2", "3"], segments=2))[1], plain(make(model))[1])


@pytest.mark.parametrize(
    ("model", "strategy", "message"),
    [
        (lambda: chain(6), Checkpoint(segments=7), "Sequential has 6 blocks: give 1 to 6 segments, not 7"),
        (lambda: chain(6), Checkpoint(segments=0), "give 1 to 6 segments, not 0"),
        (lambda: chain(6), Checkpoint(["0", "2"], segments=2), "0, 2 are not consecutive"),
        (lambda: chain(6), Checkpoint(["0.0", "2.0"], segments=2), "children of one nn.Sequential"),
        (Net, Checkpoint("blocks.*", segments=2), "blocks is a ModuleList, whose loop over its children is in"),
        (Net, Checkpoint(segments=2), "blocks is a ModuleList, whose loop over its children is in"),
        (lambda: nn.Linear(5, 3), Checkpoint(segments=2), r"Linear has no nn\.Sequential of two or more children"),
        (
            lambda: nn.Sequential(chain(2), chain(3), nn.Identity()),
            Checkpoint("*.0", segments=2),
            r'0\.0, 1\.0 are not: name those of one, e\.g\. Checkpoint\("layer1\.\*"',
        ),
    ],
)
def test_segments_that_are_refused(model, strategy, message):
    step = make(model)
    with pytest.raises(MemlabError, match=message), strategy.applied(step):
        pass
    assert traces_left(step) == []


def test_auto_segments_take_the_repeated_blocks_or_else_the_longest_chain():
    def blocks_between():
        return nn.Sequential(nn.Linear(5, 8), *[Block() for _ in range(4)], nn.Linear(8, 3))

    def single_layers():
        return nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 3))

    for model, twice, names in (
        (blocks_between, [1, 2, 2, 2, 2, 1], [str(number) for number in range(6)]),
        (single_layers, [2, 2, 2, 2, 1], ["0.0", "0.1", "0.2", "0.3", "1"]),
    ):
        seen, _ = regions_run(make(model), Checkpoint(segments=2))
        assert [seen.count(name) for name in names] == twice


def test_selective_checkpointing_keeps_what_is_asked():
    step = make()
    none, everything = saved_bytes(step, Checkpoint()), saved_bytes(step, Baseline())
    kept = {}
    for save in (["addmm"], torch.ops.aten.addmm, [torch.ops.aten.addmm.default], lambda op: "addmm" in str(op)):
        ran = []

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, ran=ran):
                ran.append(str(func))
                return func(*args, **(kwargs or {}))

        with Checkpoint(save=save).applied(make()) as runner, Count():
            runner.run()
        kept[str(save)] = (ran.count("aten.addmm.default"), ran.count("aten.gelu.default"))
    # 2 linear layers in each of 4 blocks, a stem and a head: none of them twice, each GELU twice
    assert set(kept.values()) == {(10, 8)}
    assert none < everything


def test_a_script_module_cannot_be_patched():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    step = make(lambda: nn.Sequential(scripted, nn.Linear(5, 3)))
    with pytest.raises(MemlabError, match="Sequential is a ScriptModule"), Checkpoint("0").applied(step):
        pass


def test_an_instance_forward_of_the_users_is_put_back():
    step = make()
    block = step.model.blocks[0]
    calls = []

    def forward(x, scale):
        calls.append(1)
        return type(block).forward(block, x, scale=scale)

    block.forward = forward
    run(step, Checkpoint())
    assert len(calls) == 2
    assert vars(block)["forward"] is forward


def test_compiled_and_data_parallel_modules():
    expected = plain(make())
    step = make()
    step.model.blocks[1] = torch.compile(step.model.blocks[1], backend="aot_eager")
    compiled = vars(step.model.blocks[1])["forward"]
    _, gradients, _ = run(step, Checkpoint())
    gradients = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients.items()}
    assert close(gradients, expected[1], 1e-9)
    assert vars(step.model.blocks[1])["forward"] is compiled


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel_synchronises_once(one_process):
    expected = plain(make())
    step = make(lambda: nn.parallel.DistributedDataParallel(Net().double()))
    reduced = []

    def count(state, bucket):
        reduced.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    step.model.register_comm_hook(None, count)
    assert [name for name, _ in step.named_parameters()] == list(expected[1])
    gradients = run(step, Checkpoint() + MicroBatch(count=3))[1]
    assert close({name.removeprefix("module."): gradient for name, gradient in gradients.items()}, expected[1])
    assert len(reduced) == len(set(reduced)), "each bucket is reduced once, after the last micro-batch"
    with pytest.raises(MemlabError, match="before gradients are reduced"), OptimizerInBackward().applied(step):
        pass


# ------------------------------------------------------------------------------------------------------- micro-batches


def test_notes_on_sizes_and_weights():
    step = make(weight=lambda batch: (batch[1] == 0).sum())
    assert [int((part == 0).sum()) for part in step.batch[1].split(2)] == [1, 1, 0, 1, 1]
    with MicroBatch(size=2).applied(step) as runner:
        runner.run()
        assert runner.notes == [
            "micro-batches hold 0.25, 0.25, 0, 0.25 and 0.25 of the loss terms",
            "micro-batch 3 holds no loss terms (weight 0) and is left out",
        ]
        assert len(runner.losses) == 4
    with MicroBatch(size=4).applied(make()) as runner:
        assert runner.notes == ["the batch does not divide evenly: micro-batches of 4, 4 and 2"]
    with MicroBatch(size=32).applied(make()) as runner:
        assert runner.notes == ["micro-batches of 32 asked, and the batch holds 10: one micro-batch"]


def masked(model, batch):
    x, target, keep = batch
    return F.cross_entropy(model(x)[keep], target[keep])


def test_a_micro_batch_without_loss_terms_is_no_nan():
    def make_masked(**options):
        torch.manual_seed(0)
        keep = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0]).bool()
        batch = (torch.randn(8, 5).double(), torch.arange(8) % 3, keep)
        return TrainingStep(Net().double(), batch, masked, torch.optim.SGD, **options)

    expected = plain(make_masked())
    loss, gradients, _ = run(make_masked(weight=lambda batch: batch[2].sum()), MicroBatch(size=4))
    assert torch.allclose(loss, expected[0], rtol=1e-12)
    assert close(gradients, expected[1])
    with MicroBatch(size=4).applied(make_masked()) as runner:
        assert ran(runner).isnan()
        assert runner.not_numbers() == [2]


def test_a_sum_loss_simply_adds():
    def summed(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    step = make()
    expected = TrainingStep(step.model, step.batch, summed)
    step = TrainingStep(make().model, step.batch, summed, reduction="sum")
    assert close(run(step, MicroBatch(size=3))[1], plain(expected)[1])


def test_a_loss_that_takes_the_batch_apart_runs_again():
    def loss_fn(model, batch):
        labels = batch.pop("labels")
        batch["logits"] = model(batch.pop("x"))
        return F.cross_entropy(batch["logits"], labels)

    x, labels = make().batch
    step = TrainingStep(make().model, {"x": x, "labels": labels}, loss_fn)
    with MicroBatch(count=2).applied(step) as runner:
        assert ran(runner).item() == ran(runner).item()
    assert set(step.batch) == {"x", "labels"}


def test_sparse_gradients_accumulate():
    def model():
        return nn.Sequential(nn.EmbeddingBag(20, 5, sparse=True), nn.Linear(5, 3))

    def sparse_step():
        torch.manual_seed(0)
        batch = (torch.randint(0, 20, (6, 4)), torch.arange(6) % 3)
        return TrainingStep(model().double(), batch, cross_entropy, functools.partial(torch.optim.SGD, lr=0.5))

    expected = plain(sparse_step())
    for strategy in (MicroBatch(count=3), OptimizerInBackward()):
        _, gradients, after = run(sparse_step(), strategy)
        assert close({k: g.to_dense() for k, g in gradients.items()}, {k: g.to_dense() for k, g in expected[1].items()})
        assert close(after, expected[2])


# ----------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_around_forward_and_loss_alone(dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    step = make(dtype=torch.float32)
    expected = make(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    with torch.autocast("cpu", dtype=dtype):
        loss = expected.loss_fn(expected.model, expected.batch)
    scaler.scale(loss).backward()
    scaler.unscale_(expected.optimizer)
    gradients = {k: p.grad.clone() for k, p in expected.model.named_parameters()}
    scaler.step(expected.optimizer)
    inside = []
    step.model.head.register_full_backward_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu")))
    loss_2, gradients_2, after = run(step, MixedPrecision(name))
    assert torch.equal(loss.detach(), loss_2)
    assert all(torch.equal(gradients[k], gradients_2[k]) for k in gradients)
    assert all(torch.equal(p, after[k]) for k, p in expected.model.named_parameters())
    assert inside == [False]


def test_loss_scaling_skips_until_it_fits_and_steps_once():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    steps = []
    step = TrainingStep(
        model,
        (x, torch.full((8, 1), 3e3)),
        lambda m, b: F.mse_loss(m(b[0]), b[1]),
        functools.partial(torch.optim.SGD, lr=1e-9),
    )
    step.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before = [p.detach().clone() for p in model.parameters()]
    with (MicroBatch(count=2) + MixedPrecision("fp16")).applied(step) as runner:
        assert runner.scales_loss
        runs = 0
        while runs == 0 or runner.skipped:
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            runner.run()
            runs += 1
        assert 1 < runs < 20
        assert len(steps) == 1
        caught = {}
        runner.run(catch=lambda p, g: caught.update({id(p): g.clone()}))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = step.loss()
    loss.backward()
    # lr is tiny, so that the gradient is the same at the next step
    for parameter in model.parameters():
        assert torch.allclose(parameter.grad, caught[id(parameter)], rtol=1e-2)


def test_low_precision_is_a_bf16_model_for_the_time_being():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.head.weight = nn.Parameter(torch.eye(8))
            self.again = nn.Parameter(self.head.weight.data)  # another object, the same storage
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            return self.out(self.head(self.norm(self.stem(x))) @ self.again)

    def warm(step):
        plain(step)
        return step

    step, expected = warm(make(Tied, dtype=torch.float32)), warm(make(Tied, dtype=torch.float32))
    storages = {name: t.untyped_storage().data_ptr() for name, t in step.model.state_dict().items()}
    values = {name: t.clone() for name, t in step.model.state_dict().items()}
    state = {name: t.clone() for name, t in step.optimizer.state[step.model.stem.weight].items()}
    data = step.batch[0].untyped_storage().data_ptr()

    model = expected.model.to(torch.bfloat16)
    model.again.data = model.head.weight.data
    expected.optimizer.load_state_dict(expected.optimizer.state_dict())
    batch = (expected.batch[0].bfloat16(), expected.batch[1])
    reference = TrainingStep(model, batch, cross_entropy, expected.optimizer)
    loss, gradients, after = plain(reference)

    with LowPrecision("bf16").applied(step) as runner:
        assert step.model.stem.weight.dtype == step.model.norm.running_mean.dtype == torch.bfloat16
        assert step.batch[0].dtype == torch.bfloat16
        assert step.model.norm.num_batches_tracked.dtype == torch.int64
        assert step.optimizer.state[step.model.stem.weight]["exp_avg"].dtype == torch.bfloat16
        assert step.optimizer.state[step.model.stem.weight]["step"].dtype == torch.float32
        assert step.model.again.data_ptr() == step.model.head.weight.data_ptr()
        caught = {}
        runner.run(catch=lambda p, g: caught.update({id(p): g.clone()}))
        loss_2 = runner.loss
        assert torch.equal(loss, loss_2)
        assert all(torch.equal(caught[id(p)], gradients[name]) for name, p in step.model.named_parameters())
        assert all(torch.equal(p, after[name]) for name, p in step.model.named_parameters())
    assert {name: t.untyped_storage().data_ptr() for name, t in step.model.state_dict().items()} == storages
    assert all(torch.equal(t, values[name]) for name, t in step.model.state_dict().items())
    assert step.batch[0].untyped_storage().data_ptr() == data
    assert all(torch.equal(t, state[name]) for name, t in step.optimizer.state[step.model.stem.weight].items())
    assert traces_left(step) == []


def test_low_precision_of_a_model_without_any_tensor():
    step = TrainingStep(nn.Identity(), torch.ones(4, requires_grad=True), lambda model, batch: model(batch).sum())
    assert run(step, LowPrecision("bf16"))[0].dtype == torch.bfloat16
    assert step.batch.dtype == torch.float32
    with LowPrecision("bf16").applied(TrainingStep(nn.Identity(), ["a"], cross_entropy)):
        pass


def test_low_precision_leaves_no_optimizer_state_that_it_made():
    step = make(dtype=torch.float32)
    run(step, LowPrecision("bf16") + MicroBatch(count=2))
    assert not step.optimizer.state


def test_low_precision_takes_criterion_and_slices_along_and_leaves_complex_alone():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.spin = nn.Linear(5, 3), nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            return self.linear(x) * self.spin.real.to(x.dtype)

    torch.manual_seed(0)
    step = TrainingStep(
        Spectral(), (torch.randn(10, 5), torch.arange(10) % 3), nn.CrossEntropyLoss(torch.rand(3)), torch.optim.SGD
    )
    with (MicroBatch(count=2) + LowPrecision("bf16")).applied(step) as runner:
        runner.run()
        assert runner.micro_batches[0].batch[0].dtype == torch.bfloat16
        assert step.model.spin.dtype == torch.complex64
        assert runner.notes == [
            "complex tensors stay complex: spin",
            "gradients are summed up in bfloat16, which rounds at each addition: see their error",
        ]
    assert step.loss_fn.weight.dtype == torch.float32


@pytest.mark.parametrize("strategy", [MixedPrecision("bf16"), LowPrecision("bf16")], ids=repr)
def test_emulated_bf16_is_refused(strategy, monkeypatch):
    step = make(dtype=torch.float32)
    step.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(MemlabError, match=r"bf16 is only emulated on Tesla T4.*use 'fp16'"), strategy.applied(step):
        pass


@pytest.mark.cuda
def test_on_cuda_originals_wait_in_host_memory_and_come_back():
    def wide():  # blocks of 512 bytes would hide what small tensors save
        return nn.Sequential(nn.Linear(5, 512), nn.Linear(512, 512), nn.Linear(512, 3))

    step = make(wide, dtype=torch.float32)
    step = TrainingStep(step.model.cuda(), tuple(t.cuda() for t in step.batch), cross_entropy, ADAMW)
    plain(step)
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    resident = torch.cuda.memory_allocated()
    with LowPrecision("fp16").applied(step) as runner:
        assert torch.cuda.memory_allocated() < 0.8 * resident
        runner.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    assert all(tensor.is_cuda for tensor in (*step.model.parameters(), *step.batch))


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", [Checkpoint(), MicroBatch(count=3), OptimizerInBackward()], ids=repr)
def test_the_same_training_on_cuda(strategy):
    results = []
    for way in (None, strategy):
        step = make()
        step = TrainingStep(step.model.cuda(), tuple(t.cuda() for t in step.batch), cross_entropy, ADAMW)
        results.append(plain(step) if way is None else run(step, way))
    assert close(results[0][1], results[1][1])
    assert close(results[0][2], results[1][2], 1e-9)


# ----------------------------------------------------------------------------------------------- optimizer in backward


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        functools.partial(torch.optim.Adam, lr=0.1, foreach=True),
        functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.Adafactor,
        torch.optim.Rprop,
    ],
)
def test_any_elementwise_optimizer_in_backward(optimizer):
    step, expected = make(optimizer=optimizer), make(optimizer=optimizer)
    for group_step in (step, expected):
        last = group_step.optimizer.param_groups[0]["params"].pop()
        group_step.optimizer.add_param_group({"params": [last], "lr": 0.5})
        torch.optim.lr_scheduler.StepLR(group_step.optimizer, 1)
    for _ in range(3):
        _, gradients, after = plain(expected)
        _, gradients_2, after_2 = run(step, OptimizerInBackward())
        assert close(gradients, gradients_2, 1e-9)
        assert close(after, after_2, 1e-9)
    for p, q in zip(step.model.parameters(), expected.model.parameters(), strict=True):
        assert step.optimizer.state[p].keys() == expected.optimizer.state[q].keys()


def test_gradients_die_as_they_are_consumed():
    step, alive, most = make(), [], 0

    def catch(parameter, gradient):
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(gradient.untyped_storage()))

    with OptimizerInBackward().applied(step) as runner:
        runner.run(catch=catch)
    assert len(alive) == len(list(step.model.parameters()))
    assert most <= 1


class Reused(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inp, self.shared, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.inp(x)
        for _ in range(2):
            x = checkpoint(lambda z: self.shared(z).tanh(), x, use_reentrant=self.reentrant)
        return self.out(x)


def test_shared_parameters_step_once_when_whole():
    expected = plain(make(lambda: Reused(False)))
    assert close(run(make(lambda: Reused(False)), OptimizerInBackward())[2], expected[2])
    step = make(lambda: Reused(True))
    with pytest.raises(MemlabError, match=r"gradient of shared\.\w+ came in two pieces.*use_reentrant=False"):
        run(step, OptimizerInBackward())
    assert traces_left(step) == []


def clipping():
    step = make()
    step.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(step.model.parameters(), 1.0))
    return step


def replaced():
    step = make()
    step.optimizer.step = lambda: None
    return step


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make(optimizer=None), "it has no optimizer"),
        (clipping, "hooks are registered on the AdamW's step.*clipping by global norm"),
        (replaced, "the AdamW's step was replaced on the instance"),
    ],
)
def test_steps_that_cannot_be_taken_in_backward(build, message):
    step = build()
    with pytest.raises(MemlabError, match=f"OptimizerInBackward cannot run this step: {message}"):
        run(step, OptimizerInBackward())


# ---------------------------------------------------------------------------------------------------------- undoing all


class Boom(Exception):
    pass


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Boom("in backward")


UNDONE = [*EXACT, LowPrecision("bf16"), LowPrecision("bf16") + MicroBatch(count=2), MixedPrecision("fp16")]


@pytest.mark.parametrize("strategy", UNDONE, ids=repr)
@pytest.mark.parametrize("where", ["forward", "backward", "interrupt", "optimizer"])
def test_everything_is_undone_after_an_exception(strategy, where):
    step = make(dtype=torch.float32)
    plain(step)
    armed = True

    def loss_fn(model, batch):
        x = model.stem(batch[0])
        for number, block in enumerate(model.blocks):
            if number == 2 and armed and where in ("forward", "interrupt"):
                raise Boom("in forward") if where == "forward" else KeyboardInterrupt
            x = block(x)
            if number == 1 and armed and where == "backward":
                x = Explode.apply(x)
        return F.cross_entropy(model.head(x), batch[1])

    step = TrainingStep(step.model, step.batch, loss_fn, step.optimizer)
    if where == "optimizer":
        step.optimizer.param_groups[0]["betas"] = None
    state = step.snapshot()
    tensors = {**dict(step.model.state_dict()), "batch": step.batch[0]}
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    attributes = {name: set(vars(module)) for name, module in step.model.named_modules()}
    flags = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_cache_enabled())
    with pytest.raises((Boom, KeyboardInterrupt, TypeError)):
        run(step, strategy)
    assert traces_left(step) == []
    tensors = {**dict(step.model.state_dict()), "batch": step.batch[0]}
    assert {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()} == storages
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert {name: set(vars(module)) for name, module in step.model.named_modules()} == attributes
    assert flags == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_cache_enabled())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    state.restore()
    if where != "optimizer":
        armed = False
        assert torch.isfinite(run(step, Baseline())[0])


def test_nothing_is_installed_before_a_part_of_a_sum_is_refused():
    step = make()
    for strategy in (Checkpoint() + MicroBatch(count=100), Checkpoint("nowhere") + LowPrecision("bf16")):
        with pytest.raises(MemlabError), strategy.applied(step):
            pass
        assert traces_left(step) == []
        assert step.model.stem.weight.dtype == torch.float64


def test_inference_mode_and_tensors_are_refused_first():
    step = make(dtype=torch.float32)
    with torch.inference_mode():
        features = torch.randn(10, 5)
    bad = TrainingStep(step.model, (features, step.batch[1]), cross_entropy)
    for strategy in (Baseline(), LowPrecision("bf16"), MicroBatch(count=2)):
        with pytest.raises(MemlabError, match="inference tensors"), strategy.applied(bad):
            pass


def test_low_precision_of_a_parameter_that_is_one_number():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.linear(x) * self.scale.exp()

    step = memlab.TrainingStep(Scaled(), torch.randn(4, 8), lambda m, x: m(x).float().mean(), torch.optim.AdamW)
    state = memlab.measure(step, memlab.LowPrecision("bf16"), allocator=False).by_category("optimizer")
    assert state["optimizer state"] == 2 * 2 * 73 + 3 * 4  # two moments in bf16, three counts in fp32
