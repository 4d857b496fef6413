"""A saved trace comes back equal, and no file makes `load` do anything but read or refuse."""

import gzip
import json
import os
import pickle
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from views_samples import IN_BACKWARD, every_trace

import memlab
from memlab import MemlabError, Trace
from memlab.files.store import load, save
from memlab.trace import CATEGORIES, PHASES, Allocation, Growth, Operator, Place, SavedTensor

# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("its", every_trace(), ids=lambda its: its.strategy)
def test_a_trace_comes_back_equal(its, tmp_path):
    path = its.save(tmp_path / "trace.json.gz")
    back = memlab.load(path)
    assert back == its
    assert back.peak == its.peak
    assert os.listdir(tmp_path) == ["trace.json.gz"]


counts = st.integers(0, 2**40)
texts = st.text(max_size=8)
places = st.builds(
    Place, st.sampled_from(("start", *PHASES)), texts, texts, st.integers(0, 99), st.integers(0, 9), st.none() | texts
)
shapes = st.lists(counts, max_size=4).map(tuple)


@st.composite
def allocations(draw):
    born = draw(st.integers(0, 50))
    freed = draw(st.none() | st.integers(born, 60))
    category = draw(st.sampled_from(CATEGORIES))
    number, storage = draw(st.integers(-1, 50)), draw(st.none() | counts)
    return Allocation(draw(counts), category, draw(places), born, freed, number, storage, draw(texts), "", draw(shapes))


saved_tensors = st.builds(
    SavedTensor, texts, texts, texts, shapes, texts, counts, st.none() | counts, counts, texts, texts,
    st.lists(texts, max_size=2).map(tuple), counts, counts, counts, st.none() | texts,
)  # fmt: skip
growths = st.builds(Growth, counts, texts, texts, st.none() | texts, texts, st.booleans())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


@st.composite
def traces(draw):
    ticks = sorted(draw(st.lists(st.integers(0, 60), max_size=6)))
    return Trace(
        tuple(draw(st.lists(allocations(), max_size=6))),
        tuple(Operator(draw(places), tick, draw(st.floats(0, 1e6))) for tick in ticks),
        tuple(draw(st.lists(saved_tensors, max_size=3))),
        strategy=draw(texts),
        source=draw(texts),
        allocator=draw(st.booleans()),
        absent=tuple(draw(st.lists(texts, max_size=2))),
        notes=tuple(draw(st.lists(texts, max_size=2))),
        provenance=draw(st.dictionaries(texts, json_values, max_size=3)),
        step_ends=tuple(sorted(draw(st.lists(st.integers(0, len(ticks)), max_size=3)))),
        growth=tuple(draw(st.lists(growths, max_size=3))),
    )


@given(its=traces())
def test_any_trace_comes_back_equal(its, tmp_path_factory):
    assert load(save(its, tmp_path_factory.getbasetemp() / "any")) == its


def test_the_same_trace_is_the_same_file(tmp_path):
    one, two = save(IN_BACKWARD, tmp_path / "one"), save(IN_BACKWARD, str(tmp_path / "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_place_is_stored_once(tmp_path):
    its = every_trace()[3]
    values = json.loads(gzip.decompress(save(its, tmp_path / "x").read_bytes()))
    used = {a.place for a in its.allocations} | {o.place for o in its.operators}
    assert len(values["places"]["phase"]) == len(used)


def test_provenance_that_json_does_not_know_becomes_text(tmp_path):
    its = Trace((), (), (), provenance={"device": os.path})
    assert load(save(its, tmp_path / "x")).provenance == {"device": str(os.path)}


# -- writing -----------------------------------------------------------------------------------------------------------


def test_saving_where_no_folder_is_says_so(tmp_path):
    with pytest.raises(MemlabError, match=r"cannot be saved to .*nowhere.*Make the folder first"):
        save(IN_BACKWARD, tmp_path / "nowhere" / "trace")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = save(IN_BACKWARD, tmp_path / "trace")
    before = path.read_bytes()

    def full(self, content):
        with open(self, "wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(MemlabError, match="No space left"):
        save(every_trace()[3], path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace"]


def test_a_saved_file_has_the_rights_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    mode = save(IN_BACKWARD, tmp_path / "trace").stat().st_mode
    assert stat.S_IMODE(mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_provenance_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(MemlabError, match="provenance"):
        save(Trace((), (), (), provenance={"x": float("nan")}), tmp_path / "x")


def test_a_trace_too_long_to_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("memlab.files.store._LONGEST", 100)
    with pytest.raises(MemlabError, match="too long"):
        save(IN_BACKWARD, tmp_path / "x")
    assert not os.listdir(tmp_path)


# -- refusing ----------------------------------------------------------------------------------------------------------


def refused(path):
    """The message with which a file is refused."""
    with pytest.raises(MemlabError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_no_file(tmp_path):
    assert "No such file" in refused(tmp_path / "nothing")
    assert "directory" in refused(tmp_path)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_a_pickle_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trap"
    for content in (pickle.dumps(Trap()), gzip.compress(pickle.dumps(Trap()))):
        path.write_bytes(content)
        refused(path)
    assert os.listdir(tmp_path) == ["trap"]


@pytest.mark.parametrize("kept", [0, 5, 20, -1, -9])
def test_a_file_cut_short(kept, tmp_path):
    path = save(IN_BACKWARD, tmp_path / "x")
    path.write_bytes(path.read_bytes()[:kept])
    assert "holds no trace" in refused(path)


def test_a_damaged_file(tmp_path):
    path = save(IN_BACKWARD, tmp_path / "x")
    content = path.read_bytes()
    for at in range(10, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        refused(path)


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("memlab.files.store._LONGEST", 10_000)
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(b" " * 10_001))
    assert "longer than 10,000 bytes" in refused(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", 'no "memlab_trace"'),
        ("{}", 'no "memlab_trace"'),
        ('{"memlab_trace": 3}', "version 2"),
        ('{"memlab_trace": 2}', '"places"'),
        ('{"memlab_trace": 1, "x": NaN}', "NaN is no number"),
        ('{"memlab_trace": 1, "x": 1e999}', "1e999 is no number"),
        ('{"memlab_trace": 1, "x": ' + "9" * 5000 + "}", "no JSON"),
    ],
)
def test_text_that_is_no_trace(text, why, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(text.encode()))
    assert why in refused(path)


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (("strategy",), 3, "strategy is 3"),
        (("strategy",), ..., "strategy is missing"),
        (("allocator",), 1, "allocator is 1"),
        (("absent",), ["x", 1], "absent is 1"),
        (("absent",), "x", "absent is 'x'"),
        (("provenance",), [], r"provenance is []"),
        (("step_ends",), [2, 1], "step_ends"),
        (("step_ends",), [99], "step_ends"),
        (("places", "phase", 0), "sideways", "places.phase[0] is 'sideways'"),
        (("places", "phase"), [], '"places"'),
        (("operators",), {}, '"operators"'),
        (("operators", "place", 1), -1, "operators.place[1]"),
        (("operators", "place", 1), 999, "operators.place[1]"),
        (("operators", "tick", 0), 99, "ticks of operators"),
        (("operators", "seconds", 0), 10**30, "operators.seconds[0]"),
        (("operators", "seconds", 0), "1", "operators.seconds[0]"),
        (("allocations", "nbytes", 0), 1.5, "allocations.nbytes[0] is 1.5"),
        (("allocations", "nbytes", 0), -1, "allocations[0].nbytes"),
        (("allocations", "nbytes", 0), True, "allocations.nbytes[0]"),
        (("allocations", "nbytes", 0), 2**70, "allocations.nbytes[0]"),
        (("allocations", "born", 0), 2**61, "allocations[0] should be born"),
        (("allocations", "freed", 0), 2**61, "allocations[0] should be born"),
        (("allocations", "freed", 1), 0, "allocations[1] should be born"),
        (("allocations", "category", 0), "misc", "allocations[0].category is 'misc'"),
        (("allocations", "shape", 0), [1, "2"], "allocations.shape[0]"),
        (("allocations", "shape"), None, '"allocations"'),
        (("allocations", "colour"), [], "should have the columns nbytes, category"),
        (("saved", "nbytes"), [], '"saved"'),
    ],
)
def test_a_value_out_of_order_is_named(where, value, why, tmp_path):
    path = save(IN_BACKWARD, tmp_path / "x")
    values = json.loads(gzip.decompress(path.read_bytes()))
    *outer, last = where
    inner = values
    for key in outer:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    assert why in refused(path)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "bytes"
    for packed in (content, gzip.compress(content)):
        path.write_bytes(packed)
        refused(path)


@given(values=json_values)
def test_any_json_is_refused_in_words(values, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "json"
    path.write_bytes(gzip.compress(json.dumps({"memlab_trace": 1, "places": values}).encode()))
    refused(path)
