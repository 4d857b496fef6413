"""What autograd saved: against the bytes alive after the forward pass, and against saved-tensor hooks."""

import contextlib
import functools
import gc

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memlab
from memlab import ledger, zoo
from memlab.clock import Clock
from memlab.tracker import Tracker
from tests.truth import distinct_bytes

LOSS_BYTES = 4
NETWORKS = {
    "gpt": lambda: (zoo.GPT(width=32, depth=2, heads=2, context=16, dropout=0.1), zoo.text_batch(4, 16), zoo.gpt_loss),
    "cnn": lambda: (zoo.ResNet(width=8, depth=2), zoo.digits_batch(4), zoo.classification_loss),
    "lstm": lambda: (zoo.LSTM(width=16, depth=2), zoo.text_batch(4, 8), zoo.gpt_loss),
    "mlp": lambda: (zoo.MLP(width=32, depth=3), zoo.digits_batch(8), zoo.classification_loss),
}
BLOCKS = {"gpt": "blocks", "cnn": "blocks", "mlp": "layers"}


def _keep_mm(ctx, operator, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_mm)}


def _checkpoint_blocks(model, name, **options):
    for block in getattr(model, name).children():
        forward = block.forward
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False, **options)


def _walked(loss):
    """The distinct storages that the ledger names."""
    return [entry.tensor for entry in ledger.walk([loss]).entries if entry.tensor is not None]


def _born_and_alive(run):
    """What `run` returns, and the bytes that it allocated and that are alive when it is over, by the allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
        gc.collect()
    alive = {}
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        node = pending.pop(0)
        pending = [*node.children, *pending]
        if node.name == "[memory]":
            size, address = node.extra_fields.alloc_size, node.extra_fields.ptr
            if size > 0:
                alive[address] = size
            else:
                alive.pop(address, None)  # it may be older
    return result, sum(alive.values())


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["plain", "checkpoint", "selective"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_byte_alive_after_the_forward_pass_is_explained(network, recompute, bf16):
    if network == "lstm" and (bf16 or recompute != "plain"):
        pytest.skip("one operator: it has no blocks, and oneDNN, which is off here, alone runs it in bf16")
    model, batch, loss_fn = NETWORKS[network]()
    if recompute != "plain":
        _checkpoint_blocks(model, BLOCKS[network], **(SELECTIVE if recompute == "selective" else {}))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return loss_fn(model, batch)

    with torch.backends.mkldnn.flags(enabled=network != "lstm"):
        forward()
        loss, alive = _born_and_alive(forward)
    older = [*model.parameters(), *model.buffers(), *batch]
    saved = distinct_bytes([*_walked(loss), *older]) - distinct_bytes(older)
    assert saved + LOSS_BYTES == alive


def test_each_micro_batch_is_explained():
    model, (tokens, targets), loss_fn = NETWORKS["gpt"]()
    older = [*model.parameters(), tokens, targets]
    for part in zip(tokens.split(2), targets.split(2), strict=True):
        loss, alive = _born_and_alive(lambda part=part: loss_fn(model, part))
        assert distinct_bytes([*_walked(loss), *older]) - distinct_bytes(older) + LOSS_BYTES == alive
        loss.backward()


@pytest.mark.parametrize("network", NETWORKS)
def test_the_walk_finds_what_hooks_see(network):
    model, batch, loss_fn = NETWORKS[network]()
    with ledger.hooks() as packed, torch.random.fork_rng():
        loss_fn(model, batch)
    loss = loss_fn(model, batch)
    assert _kinds(_walked(loss)) == _kinds(packed)


def _kinds(tensors):
    return sorted((tuple(t.shape), str(t.dtype)) for t in tensors)


# -- any chain of operators --------------------------------------------------------------------------------------------

CHAIN = {
    "exp": torch.exp,
    "sin": torch.sin,
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(-1),
    "matmul": lambda x: x @ x.transpose(-1, -2) @ x / 8,
    "square": lambda x: x * x,
    "norm": lambda x: nn.functional.layer_norm(x, (8,)),
    "view": lambda x: x.reshape(2, 8, 2).transpose(1, 2).reshape(4, 8),
    "expand": lambda x: x.mean(0, keepdim=True).expand(4, 8) * x,
    "index": lambda x: x[torch.tensor([3, 1, 1, 0])],
    "chunks": lambda x: torch.cat([part.tanh() for part in x.chunk(2, dim=1)], dim=1),
    "in place": lambda x: (x * 2).sigmoid_(),
    "maximum": lambda x: torch.maximum(x, x.cos()),
    "cast": lambda x: x.bfloat16().abs().float(),
}


@hypothesis.settings(max_examples=60)
@hypothesis.given(names=st.lists(st.sampled_from(sorted(CHAIN)), min_size=1, max_size=6))
def test_ledger_hooks_and_live_storages_agree_on_any_chain(names):
    def forward():
        x = weight
        for name in names:
            x = CHAIN[name](x)
        return x.sum()

    weight = torch.rand(4, 8, requires_grad=True)
    with ledger.hooks() as packed:
        forward()
    by_hooks = distinct_bytes([*packed, weight])
    del packed
    tracker = Tracker(Clock())
    tracker.meet_outside(weight)
    with tracker:
        loss = forward()
    alive = sum(s.nbytes for s in tracker.storages if s.died is None) - LOSS_BYTES
    tensors = [tensor for tensor in _walked(loss) if tensor.dim()]  # hooks are not called for Python's numbers
    assert distinct_bytes([*tensors, weight]) == by_hooks == alive


# -- kinds of holders --------------------------------------------------------------------------------------------------


def _slots(*roots):
    return sorted(entry.slot for entry in ledger.walk(roots).entries)


def test_views_and_shared_storages_count_once():
    weight = nn.Parameter(torch.rand(8, 8))
    with memlab.record() as trace:
        y = weight.exp()
        loss = (y.t() * y[:4].repeat(2, 1)).sum() + (y[0].expand(5, 8) * weight[:5]).sum() + y.sin().sum()
        loss.backward()
    saved = [tensor for tensor in trace.saved if tensor.kind == "activations" and tensor.storage_bytes == 256]
    ours = [tensor for tensor in saved if "ExpBackward0.result" in (tensor.slot, *tensor.shares_with)]
    assert [tensor.slot for tensor in ours] == [
        "ExpBackward0.result", "MulBackward0.self", "MulBackward0.self", "SinBackward0.self"
    ]  # fmt: skip
    assert ours[-1].shares_with == tuple(tensor.slot for tensor in ours[:-1])
    assert trace.saved_bytes == 2 * 256  # y, and its repeated half
    assert [tensor.nbytes for tensor in trace.saved if tensor.shape == (5, 8) and tensor in ours] == [160]


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        ctx.scale = x.sin()
        ctx.several = {"cos": x.cos(), "list": [x.tan()]}
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


def test_a_custom_function_and_all_that_it_put_on_its_context():
    x = torch.rand(4, requires_grad=True)
    y, alive = _born_and_alive(lambda: Custom.apply(x))
    entries = ledger.walk([y]).entries
    assert [entry.slot for entry in entries] == [
        "CustomBackward.saved[0]", "CustomBackward.saved[1]", "CustomBackward.scale",
        "CustomBackward.several", "CustomBackward.several",
    ]  # fmt: skip
    assert distinct_bytes(entry.tensor for entry in entries) == alive - 16 + 16  # without y, with x


def test_what_cannot_be_listed_is_named():
    weight = nn.Parameter(torch.rand(4))
    with memlab.record() as trace:
        x = torch.zeros(8)
        x[:4] = weight * weight
        (x * x).sum().backward()
    assert any("CopySlices" in sentence for sentence in trace.absent)
    with memlab.record() as trace:
        torch._foreach_exp([weight])[0].sum().backward()
    assert any("ForeachExpBackward" in sentence for sentence in trace.absent)


def test_ordinary_networks_have_nothing_unlisted():
    for make in NETWORKS.values():
        model, batch, loss_fn = make()
        assert ledger.walk([loss_fn(model, batch)]).opaque == ()


def test_offloaded_tensors_say_so():
    weight = nn.Parameter(torch.rand(8, 8))
    with memlab.record() as trace, torch.autograd.graph.save_on_cpu():
        weight.exp().sum().backward()
    assert {(tensor.slot, tensor.state) for tensor in trace.saved} == {("ExpBackward0.result", "offloaded")}


def test_what_a_users_hooks_packed_is_listed_without_unpacking():
    unpacked = []

    class Box:
        def __init__(self, tensor):
            self.hidden = tensor

    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: unpacked.append(1) or box.hidden):
        loss = torch.rand(4, requires_grad=True).exp().sum()
    (entry,) = ledger.walk([loss]).entries
    assert (entry.slot, entry.state, entry.tensor) == ("ExpBackward0.result", "packed", None)
    assert not unpacked


def test_a_checkpoint_is_listed_and_not_run():
    runs = []
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))
    block.register_forward_hook(lambda *_: runs.append(1))
    loss = checkpoint(block, torch.rand(2, 4), use_reentrant=False).sum()
    assert runs == [1]
    entries = ledger.walk([loss]).entries
    assert runs == [1]
    dropped = {(entry.slot, entry.shape, entry.dtype) for entry in entries if entry.state == "recomputed"}
    assert ("TanhBackward0.result", (2, 4), "float32") in dropped
    kept = {entry.slot: entry.tensor.nbytes for entry in entries if entry.tensor is not None}
    assert kept == {"Checkpoint.input[0]": 32, "Checkpoint.rng_state": torch.get_rng_state().nbytes}
    loss.backward()
    assert len(runs) == 1  # early stop: the last thing that is saved comes before the block's end


def test_keyword_arguments_and_nested_checkpoints():
    def inner(x, *, scale):
        return (x * scale).exp()

    def outer(x, scale):
        return checkpoint(inner, x.sin(), scale=scale, use_reentrant=False, preserve_rng_state=False).cos()

    x, scale = torch.rand(4, requires_grad=True), torch.rand(4)
    loss = checkpoint(outer, x, scale=scale, use_reentrant=False, preserve_rng_state=False).sum()
    held = [entry.tensor for entry in ledger.walk([loss]).entries if entry.tensor is not None]
    assert {t.data_ptr() for t in held} == {x.data_ptr(), scale.data_ptr()}


def test_a_released_graph_holds_nothing():
    x = torch.rand(4, requires_grad=True)
    loss = (x.exp() * x).sum()
    loss.backward()
    assert ledger.walk([loss]).entries == ()


def test_leaves_are_found_and_each_node_is_met_once():
    a, b = (torch.rand(4, requires_grad=True) for _ in range(2))
    shared = (a * b).exp()
    graph = ledger.walk([(shared + shared).sum(), shared.sin().sum()])
    assert {id(leaf) for leaf in graph.leaves} == {id(a), id(b)}
    assert sum(entry.slot == "ExpBackward0.result" for entry in graph.entries) == 1


def test_a_very_deep_graph_is_walked_without_recursion():
    x = torch.rand(2, requires_grad=True)
    y = x
    for _ in range(5000):
        y = y.sin()
    assert len(ledger.walk([y.sum()]).entries) == 5000


# -- the hooks ---------------------------------------------------------------------------------------------------------


def test_the_hooks_let_an_illegal_edit_be_an_error_and_change_no_gradient():
    x = torch.rand(4, requires_grad=True)
    with ledger.hooks():
        y = x.exp()
        loss = y.sum()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (x.exp() * x).sum().backward()
    assert torch.equal(x.grad, x.exp() * x + x.exp())


def test_the_hooks_keep_no_graph_alive():
    gc.disable()
    try:
        x = torch.rand(4, requires_grad=True)
        with contextlib.ExitStack() as stack:
            packed = stack.enter_context(ledger.hooks())
            y = x.exp()
            storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        del y, packed
        stack.close()
        assert storage.expired()
    finally:
        gc.enable()


def test_slots_are_named_by_operator_and_argument():
    x, w = torch.rand(3, 4), torch.rand(5, 4, requires_grad=True)
    assert _slots(nn.functional.linear(x, w, torch.zeros(5, requires_grad=True))) == ["AddmmBackward0.mat1"]
    parts = torch.stack([w.exp(), w.sin()]).prod()
    assert _slots(parts) == ["ExpBackward0.result", "ProdBackward0.result", "ProdBackward0.self", "SinBackward0.self"]
