"""What a step changes comes back: values, identities, containers, random streams; and nothing else is kept alive."""

import collections
import dataclasses
import functools
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from memlab import walk as walk_module
from memlab.state import snapshot

HISTORY = []
SEEN = {"steps": 0}
CALLS = 0


def notebook_loss(model, batch):
    global CALLS
    CALLS += 1
    loss = model(batch).mean()
    HISTORY.append(loss)
    helper()
    return loss


def helper():
    SEEN["steps"] += 1


class Busy(nn.Module):
    """A module that changes everything it can reach in each forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.cache = []
        self.by_length = {}
        self.seen = set()
        self.recent = collections.deque(maxlen=2)
        self.count = collections.Counter()
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(3)
        self.table = np.zeros(3)
        self.options = Options()

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.cache.append(x * self.linear.weight.sum())
        self.by_length[len(x) + self.calls] = x
        self.seen.add(self.calls)
        self.recent.append(x)
        self.count["calls"] += 1
        self.table += 1
        self.options.scale += 1.0
        self.options.trail.append(x)
        noise = torch.rand(1, generator=self.generator).item() + float(self.numbers.random())
        self.late = x
        return self.norm(self.linear(x)) * noise


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    trail: list = dataclasses.field(default_factory=list)


def test_a_training_step_is_undone_and_can_be_repeated():
    model, batch = Busy(), {"x": torch.randn(6, 4), "names": ["a"]}
    optimizer = torch.optim.AdamW(model.parameters())
    model.linear.bias.requires_grad_(False)
    model.norm.eval()
    history = []

    def loss_fn(model, batch):
        batch["x"].add_(random.random() + np.random.random())
        loss = model(batch["x"]).pow(2).mean() + nn.functional.dropout(batch["x"], 0.5).sum()
        history.append(loss)
        batch["names"].append("b")
        batch.pop("extra", None)
        return loss

    before = {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "x": batch["x"].clone(),
    }
    mean = model.mean
    state = snapshot(model, batch, loss_fn, optimizer)
    losses = []
    for _ in range(3):
        model.train()
        model.linear.bias.requires_grad_(True)
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        state.restore()
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before["parameters"], strict=True))
        assert all(torch.equal(b, before["buffers"][name]) for name, b in model.named_buffers())
        assert model.mean is mean
        assert torch.equal(batch["x"], before["x"])
        assert batch["names"] == ["a"]
        assert all(p.grad is None for p in model.parameters())
        assert not model.linear.bias.requires_grad
        assert model.training
        assert not model.norm.training
        assert not optimizer.state
        assert history == model.cache == model.options.trail == []
        assert (model.by_length, model.seen, list(model.recent), dict(model.count)) == ({}, set(), [], {})
        assert (model.calls, model.options.scale) == (0, 1.0)
        assert not model.table.any()
        assert not hasattr(model, "late")
    assert len(set(losses)) == 1


def test_every_random_stream_is_put_back_and_none_is_drawn_from():
    own, numbers, python = torch.Generator().manual_seed(1), np.random.RandomState(1), random.Random(1)
    holder = [own, numbers, python, np.random.default_rng(1)]

    def draw():
        return [
            torch.rand(1).item(),
            random.random(),
            np.random.random(),
            torch.rand(1, generator=own).item(),
            numbers.random(),
            python.random(),
            holder[3].random(),
        ]

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = draw()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    own.manual_seed(1), numbers.seed(1), python.seed(1)
    holder[3] = np.random.default_rng(1)
    state = snapshot(holder)
    assert draw() == expected
    state.restore()
    assert draw() == expected


def test_gradients_come_back_as_the_same_objects_with_their_values():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    a.grad = torch.full((3,), 7.0)
    grad = a.grad
    state = snapshot([a, b])
    a.grad.add_(1)
    a.grad = torch.zeros(3)
    b.grad = torch.zeros(3)
    state.restore()
    assert a.grad is grad
    assert torch.equal(grad, torch.full((3,), 7.0))
    assert b.grad is None


@pytest.mark.parametrize("keep_old_storage", [True, False])
def test_rebound_data_returns_and_ties_stay(keep_old_storage):
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    tied = nn.Parameter(weight.data)  # another object, the same storage
    view = weight.data[1]
    state = snapshot([weight, tied, view])
    old = [weight.data, tied.data] if keep_old_storage else None
    for tensor in (weight, tied, view):
        tensor.data = torch.zeros(5, dtype=torch.bfloat16)
    for _ in range(2):
        state.restore()
        assert torch.equal(weight, torch.arange(6.0).reshape(2, 3))
        assert weight.dtype == tied.dtype == torch.float32
        assert torch.equal(view, torch.tensor([3.0, 4.0, 5.0]))
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(tied, weight)
        assert torch.equal(view, weight[1])
    if old:
        assert weight.data_ptr() == old[0].data_ptr()


def test_a_snapshot_holds_no_storage_of_the_model():
    weight = nn.Parameter(torch.ones(1000))
    storage = weakref.ref(weight.untyped_storage())
    state = snapshot(weight)
    weight.data = torch.zeros(1)
    assert storage() is None, "low precision would be measured beside the originals"
    state.restore()
    assert torch.equal(weight, torch.ones(1000))


def test_activations_die_when_the_state_is_restored():
    model, x = Busy(), torch.randn(6, 4)
    kept = []
    state = snapshot(model, kept)
    out = model(x)
    kept.append(out)
    alive = weakref.ref(out.untyped_storage())
    gc.disable()
    try:
        del out
        assert alive() is not None
        state.restore()
        assert alive() is None
    finally:
        gc.enable()


def test_buffers_added_removed_and_rebound():
    model = nn.BatchNorm1d(3)
    running = model.running_mean
    state = snapshot(model)
    model.register_buffer("extra", torch.ones(1))
    del model.running_var
    model.running_mean = torch.ones(3)
    model.weight = nn.Parameter(torch.zeros(3))
    state.restore()
    assert [name for name, _ in model.named_buffers()] == ["running_mean", "running_var", "num_batches_tracked"]
    assert model.running_mean is running
    assert torch.equal(model.weight, torch.ones(3))


def test_optimizer_state_and_hyperparameters():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    moments = {name: value.clone() for name, value in optimizer.state[weight].items()}
    objects = dict(optimizer.state[weight])
    state = snapshot(optimizer)
    other = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [other]})
    optimizer.param_groups[0]["lr"] = 3.0
    other.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[weight]["new"] = 1
    state.restore()
    assert list(optimizer.state) == [weight]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.param_groups) == 1
    assert optimizer.state[weight].keys() == moments.keys()
    for name, value in optimizer.state[weight].items():
        assert value is objects[name]
        assert torch.equal(value, moments[name])


def test_what_a_function_reaches_globals_closures_defaults_attributes():
    global CALLS
    model, x = nn.Linear(2, 2), torch.ones(3, 2)
    total, losses = torch.zeros(()), []

    def loss_fn(model, batch, seen=[], *, where={}):  # noqa: B006  # the user's bug is the point
        nonlocal total
        loss = notebook_loss(model, batch)
        total = total + loss
        seen.append(loss)
        where["loss"] = loss
        loss_fn.last = loss
        losses.append(loss)
        return loss

    bound = functools.partial(loss_fn, where={})
    state = snapshot(functools.partial(bound, model))
    outer = snapshot(notebook_loss)
    bound(model, x)
    assert HISTORY
    assert CALLS == 1
    outer.restore()
    assert (HISTORY, SEEN, CALLS) == ([], {"steps": 0}, 0)
    state.restore()
    assert losses == []
    assert total.item() == 0
    assert not total.requires_grad
    assert loss_fn.__defaults__ == ([],)
    assert not hasattr(loss_fn, "last")
    assert bound.keywords == {"where": {}}


def test_an_attribute_that_is_named_like_a_global_is_none():
    def loss_fn(model, batch):
        return batch.SEEN + batch.HISTORY

    state = snapshot(loss_fn)
    SEEN["steps"] = 7
    state.restore()
    assert SEEN.pop("steps") == 7
    SEEN["steps"] = 0


def test_a_bound_method_and_objects_with_slots():
    @dataclasses.dataclass(slots=True)
    class Meter:
        total: float = 0.0
        values: list = dataclasses.field(default_factory=list)

    class Trainer:
        def __init__(self):
            self.meter, self.ema = Meter(), {"w": torch.zeros(2)}

        def loss(self, model, batch):
            self.meter.total += 1
            self.meter.values.append(batch)
            self.ema["w"].add_(1)
            return batch.sum()

    trainer = Trainer()
    state = snapshot(trainer.loss)
    trainer.loss(None, torch.ones(1))
    state.restore()
    assert (trainer.meter.total, trainer.meter.values) == (0.0, [])
    assert torch.equal(trainer.ema["w"], torch.zeros(2))


def test_in_place_operations_that_pull_a_tensor_into_a_graph():
    x, weight = torch.ones(3), nn.Parameter(torch.ones(3))
    state = snapshot([x, weight])
    x.mul_(weight * 2)
    assert x.grad_fn is not None
    state.restore()
    assert x.is_leaf
    assert not x.requires_grad
    assert torch.equal(x, torch.ones(3))
    x.requires_grad_()
    state.restore()
    assert not x.requires_grad


def test_sparse_nested_lazy_and_foreign_tensors():
    sparse = torch.sparse_coo_tensor([[0, 1, 1]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    weight = nn.Parameter(torch.ones(4))
    weight.grad = sparse
    lazy = nn.LazyLinear(3)
    opaque = torch.ones(3).to_mkldnn()
    meta = torch.empty(3, device="meta")
    state = snapshot(sparse, jagged, weight, lazy, opaque, meta)
    weight.grad.mul_(5)
    weight.grad.add_(torch.sparse_coo_tensor([[3]], [9.0], (4,), check_invariants=True))
    jagged._values.add_(1)
    lazy(torch.ones(2, 5))
    state.restore()
    assert weight.grad is sparse
    assert torch.equal(sparse.to_dense(), torch.tensor([1.0, 5.0, 0.0, 0.0]))
    assert torch.equal(jagged._values, torch.ones(5))
    assert lazy.weight.shape == (3, 5)


def test_expanded_and_resized_storages():
    wide, grown = torch.ones(1, 3).expand(4, 3), torch.arange(3.0)
    state = snapshot(wide, grown)
    grown.resize_(10).fill_(0)
    state.restore()
    assert wide.stride() == (0, 1)
    assert torch.equal(grown, torch.arange(3.0))


def test_read_only_memory_is_not_written(tmp_path):
    np.arange(4.0).tofile(tmp_path / "data")
    mapped = np.memmap(tmp_path / "data", dtype=np.float64, mode="r")
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(np.asarray(mapped))
    snapshot(tensor).restore()  # a write would end the process


def test_hooks_and_patched_forwards_are_left_as_they_are():
    model, seen = nn.Linear(2, 2), []
    model.my_hooks = []
    handle = model.register_forward_hook(lambda module, args, out: seen.append(out))
    state = snapshot(model)
    model.forward = model.forward
    second = model.register_forward_hook(lambda *_: None)
    model(torch.ones(1, 2))
    model.my_hooks.append(seen[0])
    state.restore()
    assert seen == []
    assert model.my_hooks == []
    assert "forward" in vars(model)
    assert len(model._forward_hooks) == 2
    second.remove(), handle.remove()


def test_user_containers_keep_order_type_and_identity():
    ordered = collections.OrderedDict(a=1, b=2)
    default = collections.defaultdict(list, x=[1])
    user = collections.UserDict(k=[0])
    state = snapshot([ordered, default, user])
    ordered.move_to_end("a")
    ordered["c"] = 3
    default["y"].append(1)
    default["x"].append(2)
    user["k"].append(1)
    user["l"] = 1
    state.restore()
    assert list(ordered.items()) == [("a", 1), ("b", 2)]
    ordered["d"] = 4  # its linked list is whole
    assert list(ordered) == ["a", "b", "d"]
    assert default == {"x": [1]}
    assert user == {"k": [0]}


def test_what_is_not_followed_and_the_bound(monkeypatch):
    class Loop:
        pass

    loop = Loop()
    loop.me, loop.lock, loop.module, loop.kind = loop, __import__("threading").Lock(), torch, Loop
    assert snapshot(loop).complete
    monkeypatch.setattr(walk_module, "MOST_OBJECTS", 10)
    assert not snapshot([[n] for n in range(20)]).complete


@pytest.mark.cuda
def test_cuda_random_streams_and_storages():
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    state = snapshot(weight)
    drawn = torch.rand(3, device="cuda")
    weight.data = weight.data.half()
    state.restore()
    assert torch.equal(weight, torch.ones(3, device="cuda"))
    assert torch.equal(drawn, torch.rand(3, device="cuda"))
