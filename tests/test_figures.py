"""Figures and tables of one trace and of two: areas and bars are the bytes, sums add up, reasons are true."""

import dataclasses
import itertools
from collections import Counter

import pandas as pd
import pytest
import torch
import torchgen
from test_views_plots import assert_readable, texts, timed
from torch import nn
from torchgen.packaged.autograd.load_derivatives import load_derivatives
from views_samples import EMPTY, EVIL, IN_BACKWARD, every_trace, measured, trace

import memlab
from memlab import Checkpoint, MicroBatch, MixedPrecision, Trace, TrainingStep, zoo
from memlab.contrast import contrast
from memlab.held import counted_bytes, held
from memlab.trace import SAVED_CATEGORIES, Allocation, Operator, Place, SavedTensor
from memlab.units import MiB, format_bytes
from memlab.views import reasons_saved
from memlab.views.blocks import NOWHERE, block_names, pattern, runs
from memlab.views.canvas import canvas, shortened
from memlab.views.difference import difference_sentences
from memlab.views.figures import FIGURES
from memlab.views.modules import module_regions, module_sizes, nested, squarified
from memlab.views.network import chain, network_blocks
from memlab.views.plots import plot_comparison
from memlab.views.reasons_saved import INPUT, OUTPUT, SENTENCES, why
from memlab.views.saved import alike, others

CHECKPOINT = Checkpoint("blocks.*")
TRACES = every_trace()
every = pytest.mark.parametrize("its", TRACES, ids=lambda its: its.strategy)


def saved(module, slot, mib=1.0, storage=0, kind="activations", state="kept", entry=0, shape=(2, 3)):
    operator = slot.partition(".")[0]
    nbytes = int(mib * MiB)
    where = None if state == "recomputed" else storage
    return SavedTensor(module, operator, slot, shape, "float32", nbytes, where, nbytes, kind, state, entry=entry)


def deep(count, parameters=1.0, kept=2.0, name="blocks"):
    """A trace by hand of a chain of blocks, each with its parameters and one saved tensor."""
    allocations, operators, tensors = [], [], []
    for n in range(count):
        module = f"{name}.{n}.linear"
        storage = 2 * n
        allocations.append(
            Allocation(int(parameters * MiB), "parameters", Place("start", module), 0, None, -1, storage)
        )
        born = n + 1
        place = Place("forward", module, "aten::mm")
        allocations.append(Allocation(int(kept * MiB), "activations", place, born, None, n, storage + 1))
        operators.append(Operator(place, born + 1, 0.1))
        tensors.append(saved(module, "MmBackward0.self", kept, storage + 1))
    return Trace(tuple(allocations), tuple(operators), tuple(tensors))


# -- what is held ------------------------------------------------------------------------------------------------------


@every
def test_what_is_held_adds_up_to_the_saved_bytes(its):
    assert counted_bytes(held(its)) == its.saved_bytes


def test_a_storage_is_held_once_and_at_the_largest_entry():
    its = Trace(
        (),
        (),
        (
            saved("a", "ReluBackward0.result", 1, storage=1, entry=0),
            saved("b", "MmBackward0.self", 1, storage=1, entry=0),
            saved("a", "ReluBackward0.result", 3, storage=2, entry=1),
            saved("b", "MmBackward0.mat2", 9, storage=3, kind="parameters", entry=1),
            saved("c", "GeluBackward0.self", state="recomputed", entry=1),
            saved("d", "GeluBackward0.self", state="recomputed", entry=1),
        ),
    )
    found = held(its)
    assert [item.first.module for item in found] == ["a", "b", "c", "d"]
    assert counted_bytes(found) == 3 * MiB == its.saved_bytes
    assert [item.first.entry for item in found] == [1] * 4


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_blocks_are_cut_at_numbers_and_beside_the_way_to_them():
    modules = {
        "blocks.0.attn.qkv": "blocks.0",
        "bert": "bert",
        "bert.embeddings.words": "bert.embeddings",
        "bert.encoder.layer.1.attention": "bert.encoder.layer.1",
        "bert.pooler.dense": "bert.pooler",
        "head": "head",
        "3": "3",
        "": NOWHERE,
    }
    operators = tuple(Operator(Place("forward", module), 1, 0.0) for module in modules)
    assert block_names(Trace((), operators, ())) == modules
    assert [pattern(name) for name in ("blocks.12.mlp.0", "head", "3", "conv2d.x")] == [
        "blocks.*.mlp.0",
        "head",
        "*",
        "conv2d.x",
    ]


def test_runs_keep_every_row_in_order():
    rows = [*"abbbbcddefffg", *"abcdefghijklmnopqrstuvwxyz" * 2]
    for most in (2, 5, 12, 100):
        found = runs(rows, lambda row: row, most)
        assert [row for run in found for row in run] == rows
        assert len(found) <= 2 * most
    assert runs([*"abbbcc"], str, 3) == [["a"], ["b", "b", "b"], ["c"], ["c"]]


# -- modules -----------------------------------------------------------------------------------------------------------


def area(box):
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


@pytest.mark.parametrize("sizes", [[1], [5, 5], [100, 1, 1], [6, 6, 4, 3, 2, 2, 1], list(range(60, 0, -1))], ids=str)
def test_boxes_fill_their_frame_in_proportion_and_do_not_overlap(sizes):
    frame = (10, 20, 710, 420)
    boxes = squarified(sizes, frame)
    for size, box in zip(sizes, boxes, strict=True):
        assert area(box) == pytest.approx(area(frame) * size / sum(sizes))
        assert frame[0] - 1e-6 <= box[0] <= box[2] <= frame[2] + 1e-6
        assert frame[1] - 1e-6 <= box[1] <= box[3] <= frame[3] + 1e-6
    for a, b in itertools.combinations(boxes, 2):
        wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        assert min(wide, high) < 1e-6


@every
@pytest.mark.parametrize("depth", [None, 1, 2, 9])
def test_areas_are_the_bytes_of_modules_and_categories(its, depth):
    sizes = module_sizes(its, depth)
    boxes = nested(sizes, (0, 0, 700, 400))
    pixels = 700 * 400 / max(its.peak_bytes, 1)
    for path, nbytes in sizes.items():
        assert area(boxes[path]) == pytest.approx(nbytes * pixels)
    for (a, box), (b, other) in itertools.permutations(boxes.items(), 2):
        if a == b[: len(a)]:
            assert box[0] - 1e-6 <= other[0] <= other[2] <= box[2] + 1e-6
    by_category = Counter()
    for path, nbytes in sizes.items():
        by_category[path[-1]] += nbytes
    assert by_category == its.by_category()
    if depth is not None:
        regions = {".".join(path): nbytes for path, nbytes in module_regions(sizes).items()}
        assert regions == {name: nbytes for name, nbytes in its.by_module(depth=depth).items() if nbytes}


def test_a_depth_is_a_number_of_parts():
    with pytest.raises(memlab.MemlabError, match="depth=0: give the number of parts"):
        IN_BACKWARD.plot("modules", depth=0)


# -- every figure ------------------------------------------------------------------------------------------------------

LONG = deep(2, name="a_name_of_a_module_that_nobody_would_want_to_type_twice." * 2 + "blocks")
GIANT = dataclasses.replace(
    deep(3), allocations=(*deep(3).allocations, Allocation(2**40, "temporaries", Place("forward"), 1, None, 0))
)
ODD = [deep(24), deep(70, kept=0), LONG, GIANT, dataclasses.replace(deep(3), strategy=EVIL)]


@pytest.mark.parametrize("kind", FIGURES)
@pytest.mark.parametrize("number", range(len(TRACES) + len(ODD)))
def test_every_figure_can_be_read(kind, number):
    its = [*TRACES, *ODD][number]
    figure = its.plot(kind)
    assert_readable(figure)
    assert figure.get_size_inches()[0] <= 10
    data, metadata = figure._repr_mimebundle_()
    assert data["text/plain"] == metadata["image/png"]["alt"] == figure.summary
    assert its.strategy in figure.summary
    assert "\n" not in figure.summary


def test_a_kind_that_there_is_not_is_an_error_that_names_those_there_are():
    with pytest.raises(
        memlab.MemlabError, match=r"plot\('tree'\): there are 'timeline', 'modules', 'network', 'saved'"
    ):
        IN_BACKWARD.plot("tree")


def test_names_are_shortened_to_fit_and_no_further():
    _, ax = canvas(100, "")
    assert shortened(ax, "0", 100) == "0"
    assert shortened(ax, "head", 100) == "head"
    assert "…" in shortened(ax, "x" * 100, 100)


def test_a_legend_leaves_out_what_cannot_be_seen_and_adds_up_all_the_same():
    crumbs = trace((1, "parameters", 0, 3), (0.002, "batch", 0, 3), (0.001, "buffers", 0, 3), strategy="crumbs")
    for kind in ("timeline", "modules"):
        shown = [text for text, _ in texts(crumbs.plot(kind))]
        assert "parameters  1.00 MiB" in shown
        assert f"too small to see  {format_bytes(int(0.002 * MiB) + int(0.001 * MiB))}" in shown
        assert not any(text.startswith(("batch ", "buffers ")) for text in shown)


@pytest.mark.parametrize("count", [2, 9])
def test_points_that_lie_on_one_another_share_one_text(count):
    figure = plot_comparison(timed(count, same_place=True))
    numbers = [text.get_text() for text in figure.axes[1].texts]
    assert numbers == ["1", ", ".join(map(str, range(2, count + 1)))]


# -- the network -------------------------------------------------------------------------------------------------------


@every
def test_blocks_of_the_network_add_up(its):
    for blocks in (network_blocks(its), chain(network_blocks(its)), chain(network_blocks(its), most=2)):
        assert sum(block.saved_bytes for block in blocks) == its.saved_bytes
        parameters = sum(a.nbytes for a in its.allocations if a.category == "parameters")
        assert sum(block.parameters for block in blocks) == parameters


def test_blocks_stand_in_forward_order_with_what_they_save():
    names = [block.name for block in network_blocks(measured())]
    assert names == ["tokens", "positions", "blocks.0", "blocks.1", "norm", "head", NOWHERE]
    plain, again = ({block.name: block for block in network_blocks(its)} for its in (measured(), measured(CHECKPOINT)))
    assert again["blocks.0"].recomputed
    assert not plain["blocks.0"].recomputed
    assert again["blocks.0"].saved_bytes < plain["blocks.0"].saved_bytes
    assert set(again["blocks.0"].saved) == {"checkpoint inputs"}


def test_blocks_that_are_alike_are_one_box_in_a_long_chain():
    shown = [text for text, _ in texts(deep(24).plot("network"))]
    assert "blocks.0 … blocks.23 (24 alike)" in shown
    assert "each 2.00 MiB, 48.0 MiB in all" in shown
    assert [block.name for block in chain(network_blocks(deep(3)))] == ["blocks.0", "blocks.1", "blocks.2"]


# -- what is saved -----------------------------------------------------------------------------------------------------


@every
def test_bars_of_saved_tensors_add_up(its):
    assert sum(counted_bytes(items) for _, items in alike(its)) == its.saved_bytes


@every
def test_the_table_of_saved_tensors_has_every_tensor_once(its):
    table = its.saved_table()
    entry = {item.first.entry for item in table.rows}
    assert len(entry) <= 1
    slots = Counter(tensor.slot for row in table.rows for tensor in row.tensors)
    assert slots == Counter(tensor.slot for tensor in its.saved if tensor.entry in entry)
    frame = table.to_frame()
    assert len(frame) == len(table.rows)
    kept = frame[frame.kind.isin(SAVED_CATEGORIES)] if len(frame) else pd.DataFrame({"MiB": []})
    assert kept.MiB.sum() == pytest.approx(its.saved_bytes / MiB, abs=0.001 * len(frame) + 1e-9)
    assert format_bytes(its.saved_bytes) in str(table)


def test_a_table_of_the_largest_tells_what_it_leaves_out():
    its = measured()
    table = its.saved_table(3)
    sizes = [item.nbytes for item in its.saved_table().rows if item.counted]
    assert sizes == sorted(sizes, reverse=True)
    assert [item.nbytes for item in table.rows] == sizes[:3]
    assert counted_bytes(table.left) == sum(sizes[3:])
    assert f"and {len(table.left)} more, with {format_bytes(sum(sizes[3:]))}" in str(table)
    assert "baseline" in table._repr_html_()
    with pytest.raises(memlab.MemlabError, match="top=0"):
        its.saved_table(0)


def test_a_row_names_the_other_slots_on_its_storage():
    its = measured()
    softmax = next(item for item in held(its) if item.first.slot == "LogSoftmaxBackward0.result")
    assert others(softmax) == ["NllLossBackward0.self (no module)"]


# -- reasons -----------------------------------------------------------------------------------------------------------


def names_of(attributes):
    return {getattr(a.nctype.name, "name", a.nctype.name) for a in attributes}


def derivatives():
    """Of each derivative that PyTorch generates: the slots it saves of inputs and of outputs, and for each slot the
    inputs whose gradient needs it. Read from PyTorch's own table."""
    root = torchgen.__path__[0] + "/packaged/"
    infos, _ = load_derivatives(
        root + "autograd/derivatives.yaml",
        root + "ATen/native/native_functions.yaml",
        root + "ATen/native/tags.yaml",
    )
    found = {}
    for info in (kinds["Default"] for kinds in infos.values() if "Default" in kinds):
        if info.op is None:
            continue
        needed = {}
        for formula in info.derivatives:
            for slot in names_of((*formula.saved_inputs, *formula.saved_outputs)):
                needed.setdefault(slot, set()).update(formula.var_names)
        found[info.op] = names_of(info.all_saved_inputs), names_of(info.all_saved_outputs), needed
    return found


DERIVATIVES = derivatives()
FORMULAS = [(op, slot, *rest) for op, (given, returned, needed) in DERIVATIVES.items() for slot, *rest in (
    (slot, slot in returned, needed[slot]) for slot in sorted(needed)
)]  # fmt: skip


def reason(operator, slot):
    return why(SavedTensor("", operator, f"{operator}.{slot}", (), "float32", 4, 0, 4, "activations"))


def test_reasons_agree_with_pytorchs_own_formulas():
    """An output is one, what is called an input's own need is in its own gradient's formula, and what is said to serve
    the other's gradient is not in its own."""
    assert len(FORMULAS) > 700
    for operator, slot, is_output, needed in FORMULAS:
        sentence = reason(operator, slot)
        where = operator, slot, sentence
        if sentence == INPUT:
            assert slot in needed, where
            assert not is_output, where
        if sentence == OUTPUT or sentence.startswith("what the operator returned"):
            assert is_output, where
        if sentence in (reasons_saved.LEFT, reasons_saved.RIGHT, reasons_saved.FACTOR):
            assert needed - {slot} == needed != set(), where
            assert not is_output, where
        if sentence.startswith("an input"):
            assert not is_output, where


def test_every_slot_in_the_table_exists_in_pytorch():
    """A name that PyTorch does not have would be a sentence that nobody sees. (Names change between versions: a slot
    must be in one of the operators of its name.)"""
    slots = {}
    for operator, slot, *_ in FORMULAS:
        slots.setdefault(reasons_saved._OF_AUTOGRAD.fullmatch(operator)[1], set()).add(slot)
    known = {name: set(sentences) for name, sentences in SENTENCES.items() if name != "Checkpoint"}
    missing = {name for name in known if name not in slots}
    assert missing <= {"FusedRmsNorm", "SafeSoftmax"}, "renamed in this version of PyTorch?"
    assert len(known) >= 50


def networks():
    def step(model, *shape, target=None):
        return TrainingStep(model, torch.randn(*shape), lambda model, x: model(x).float().pow(2).mean())

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0] + self.attention(x, x, x, need_weights=False)[0]

    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4), nn.Softmax(-1),
    )  # fmt: skip
    yield "gpt", zoo.gpt_step(batch=2, context=16, width=16, depth=1, dropout=0.1)
    yield "resnet", zoo.resnet_step(batch=4, width=4, depth=1)
    yield "lstm", zoo.lstm_step(batch=2, context=8, width=8)
    yield "mlp", zoo.mlp_step(batch=4, width=8, depth=2)
    yield "attention", step(Attention(), 2, 5, 16)
    yield "encoder layer", step(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2, 5, 16)
    yield "convolutions", step(convolutions, 2, 3, 12, 12)


@pytest.mark.parametrize(("name", "step"), list(networks()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_saved_slot_of_usual_networks_has_a_sentence_of_its_own(name, step):
    strategies = [memlab.Baseline(), MixedPrecision("bf16")]
    for strategy in [*strategies, *([CHECKPOINT] if name == "gpt" else [])]:
        for tensor in memlab.measure(step, strategy, allocator=False).saved:
            operator = reasons_saved._OF_AUTOGRAD.fullmatch(tensor.operator)
            table = SENTENCES[operator[1] if operator else tensor.operator]
            assert why(tensor) in table.values(), tensor.slot


def test_reasons_of_what_is_in_no_table_follow_from_names_alone():
    assert reason("NewThingBackward0", "result2").startswith("what the operator returned")
    assert reason("NewThingBackward0", "self").startswith("an input of the operator")
    assert reason("NewThingBackward0", "attn_mask").startswith("a mask")
    assert reason("NewThingBackward0", "strange").startswith("`strange` of the operator")
    assert (
        reason("SquareBackward", "saved[0]")
        == "saved with ctx.save_for_backward by the function itself, for its own backward"
    )
    assert reason("SquareBackward", "result") == "kept as ctx.result by the function itself, for its own backward"
    unseen = dataclasses.replace(saved("", "CopySlices.unseen"), state="unseen")
    assert "does not show what it saves" in why(unseen)


# -- two traces --------------------------------------------------------------------------------------------------------

PAIRS = list(itertools.permutations(range(len(TRACES)), 2))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_differences_add_up_exactly(pair):
    first, second = (TRACES[number] for number in pair)
    its = first.diff(second)
    only = counted_bytes(its.only_second) - counted_bytes(its.only_first)
    assert only + sum(new.nbytes - old.nbytes for old, new in its.both) == second.saved_bytes - first.saved_bytes
    assert its.saved_bytes == second.saved_bytes - first.saved_bytes
    assert its.peak_bytes == second.peak_bytes - first.peak_bytes
    assert sum(new - old for old, new in its.by_category().values()) == its.peak_bytes


def keys(item):
    return {(t.module, t.operator, t.slot, t.shape, t.dtype) for t in item.tensors}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_what_is_in_one_alone_is_not_in_the_other(pair):
    """By brute force: no two that are left share a tensor, and all that are paired do; each storage is there once."""
    its = contrast(*(TRACES[number] for number in pair))
    assert all(keys(old) & keys(new) for old, new in its.both)
    assert not any(keys(old) & keys(new) for old, new in itertools.product(its.only_first, its.only_second))
    for one, side, left in ((its.first, 0, its.only_first), (its.second, 1, its.only_second)):
        found = [id(item.first) for item in (*left, *(pair[side] for pair in its.both))]
        assert sorted(found) == sorted(id(item.first) for item in held(one) if item.counted)


def test_of_equal_tensors_as_many_are_in_both_as_both_have():
    def having(count):
        return Trace((), (), tuple(saved("a", "MmBackward0.self", storage=n) for n in range(count)))

    its = having(5).diff(having(3))
    assert (len(its.both), len(its.only_first), len(its.only_second)) == (3, 2, 0)


def test_recomputed_and_moved_tensors_are_not_kept():
    kept = Trace((), (), (saved("a", "MmBackward0.self", 2),))
    for state, kind in (("recomputed", "activations"), ("offloaded", "offloaded")):
        gone = Trace((), (), (saved("a", "MmBackward0.self", 2, state=state, kind=kind),))
        its = kept.diff(gone)
        assert (len(its.only_first), its.saved_bytes) == (1, -2 * MiB)


def test_micro_batches_save_the_same_slots_in_another_shape():
    its = measured().diff(measured(MicroBatch(count=2)))
    assert {(old.first.module, old.first.slot) for old, _ in its.resized()} == {
        (new.first.module, new.first.slot) for _, new in its.resized()
    }
    assert len(its.resized()) == len(its.only_first) == len(its.only_second)
    assert "in another shape or type" in " ".join(difference_sentences(its))


@pytest.mark.parametrize("pair", [(0, 1), (3, 4), (3, 3), (2, 3), (3, 5)], ids=str)
def test_a_difference_can_be_read_in_every_form(pair):
    its = TRACES[pair[0]].diff(TRACES[pair[1]])
    assert_readable(its.plot())
    for number in (its.first.peak_bytes, its.second.saved_bytes):
        assert format_bytes(number) in str(its)
        assert format_bytes(number) in its._repr_html_()
    assert " ".join(its.explain().split()) == " ".join(difference_sentences(its))
    assert repr(its.plot()) == its.plot().summary
    frame = its.to_frame()
    assert frame.difference.iloc[1:].sum() == pytest.approx(frame.difference.iloc[0], abs=0.01)
    assert len(its.to_frame("saved")) == len(its.only_first) + len(its.only_second) + len(its.both)
    with pytest.raises(memlab.MemlabError, match='there are "categories" and "saved"'):
        its.to_frame("bytes")


def test_a_difference_names_the_two_apart():
    same = trace((1, "parameters", 0, 3)).diff(trace((2, "parameters", 0, 3)))
    assert "A (by hand)" in str(same)
    other = same.first.diff(dataclasses.replace(same.second, source="simulated"))
    assert "by hand (simulated)" in str(other)
    assert "The peak rises by 1.00 MiB (100 %)" in same.explain()
    assert "no difference" not in EMPTY.diff(EMPTY).explain()


def test_both_timelines_have_one_scale():
    figure = IN_BACKWARD.diff(TRACES[1]).plot()
    scales = {axes.get_ylim() for axes in figure.axes[1:]}
    assert len(figure.axes) == 3
    assert len(scales) == 1
