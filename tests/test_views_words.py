"""Sentences and tables say what the values hold, and draw the right conclusions from them."""

import dataclasses
import re

import pytest
from views_samples import EMPTY, FAILED, IN_BACKWARD, IN_OPTIMIZER, comparison, every_trace, measured, row, trace

from memlab import (
    Baseline,
    Checkpoint,
    Comparison,
    LowPrecision,
    MicroBatch,
    MixedPrecision,
    OptimizerInBackward,
    Trace,
)
from memlab.units import MiB, format_bytes
from memlab.views.table import comparison_frame, comparison_text
from memlab.views.verdicts import comparison_sentences
from memlab.views.words import describe_trace, figure_summary, trace_sentences, unit_for

CHECKPOINT, MICRO = Checkpoint("blocks.*"), MicroBatch(count=4)


def sentences(value):
    """The explanation, a line for each sentence."""
    return "\n".join((trace_sentences if isinstance(value, Trace) else comparison_sentences)(value))


def line_of(text, start):
    """The one line that starts so."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


# -- a trace -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("its", every_trace(), ids=lambda its: its.strategy)
def test_a_trace_tells_its_peak_and_all_that_is_alive_there(its):
    text = describe_trace(its)
    assert f"peak {format_bytes(its.peak_bytes)}" in text.splitlines()[0]
    shown = dict(re.findall(r"^  (\w[\w ]*?) {2,}(\d\S* \w+) ", text, re.MULTILINE))
    assert shown == {category: format_bytes(nbytes) for category, nbytes in its.by_category().items()}
    assert format_bytes(its.saved_bytes) in line_of(text, "saved for backward")


def test_what_is_not_seen_and_notes_are_told():
    text = describe_trace(trace((1, "parameters", 0, 3), absent=("workspace: nobody listened",), notes=("cut short",)))
    assert "workspace: nobody listened" in line_of(text, "not seen")
    assert "cut short" in line_of(text, "note")


def test_tensors_alone_are_told_where_they_peak_otherwise():
    assert "tensors alone" not in describe_trace(IN_BACKWARD)
    with_workspace = trace((10, "parameters", 0, 3), (9, "temporaries", 3, 3), (30, "workspace", 1, 1))
    assert line_of(describe_trace(with_workspace), "tensors alone").endswith("peak 19.0 MiB in the optimizer step")


def test_a_peak_in_the_optimizer_step_is_not_moved_by_checkpointing():
    text = sentences(IN_OPTIMIZER)
    assert "30.0 MiB, is in the optimizer step" in text
    for technique in ("- Checkpoint", "- MicroBatch"):
        assert "cannot move it. The peak is in the optimizer step" in line_of(text, technique)
    # 10 of parameters and 2 of activations remain in forward when the temporaries are gone.
    assert "18.0 MiB (60 %)" in line_of(text, "- a fused optimizer")
    assert "would be 12.0 MiB, in the forward pass" in line_of(text, "- a fused optimizer")


def test_a_peak_of_activations_is_bounded_by_what_would_remain():
    text = sentences(IN_BACKWARD)
    assert "The next highest is the forward pass, with 60.0 MiB." in text
    assert "50.0 MiB (77 %)" in line_of(text, "- Checkpoint")
    assert "would be 15.0 MiB, in the backward pass" in line_of(text, "- Checkpoint")
    assert "5.00 MiB (8 %)" in line_of(text, "- OptimizerInBackward")
    assert "cannot move it" in line_of(text, "- a fused optimizer")
    assert "10.0 MiB (15 %)" in line_of(text, "Of all techniques only LowPrecision")


def test_a_few_bytes_are_not_called_a_saving():
    crumb = trace((10, "parameters", 0, 3), (4 / MiB, "activations", 1, 3), (5, "temporaries", 3, 3))
    assert line_of(sentences(crumb), "- Checkpoint").endswith("in the optimizer step, where only 4 B of them is alive.")


def test_a_second_peak_as_high_stops_a_technique():
    twice = trace((10, "parameters", 0, 3), (20, "activations", 1, 1), (20, "temporaries", 3, 3))
    assert "cannot move it. The optimizer step is as high without them" in line_of(sentences(twice), "- Checkpoint")


@pytest.mark.parametrize("strategy", [CHECKPOINT, MicroBatch(count=2), OptimizerInBackward()], ids=str)
def test_the_bounds_hold_against_what_techniques_really_do(strategy):
    """The bound from the plain step's trace is no more than what a technique leaves of the peak."""
    plain = measured()
    line = line_of(sentences(plain), f"- {type(strategy).__name__}")
    if "cannot move it" in line:
        assert measured(strategy).peak_bytes >= plain.peak_bytes
    else:
        number, unit = re.search(r"would be (\S+) (\w+),", line).groups()
        floor = float(number) * {"KiB": 2**10, "MiB": MiB}[unit]
        assert measured(strategy).peak_bytes >= floor * 0.995  # three digits were printed


def test_explanations_are_sentences_in_lines_that_a_notebook_does_not_break():
    for value in (*every_trace(), ROWS):
        text = value.explain()
        assert " ".join(text.split()) == " ".join(sentences(value).split())
        assert max(map(len, text.splitlines())) <= 100


def test_an_empty_trace_says_so():
    assert "Nothing" in sentences(EMPTY)
    assert "no operator ran" in describe_trace(EMPTY)


def test_summaries_are_one_line_each_and_name_the_peak():
    for its in every_trace():
        assert format_bytes(its.peak_bytes) in figure_summary(its)
        assert "\n" not in figure_summary(its)
    assert "baseline 65.0 MiB" in figure_summary(comparison(FAILED))


@pytest.mark.parametrize(("nbytes", "name"), [(0, "KiB"), (MiB - 1, "KiB"), (MiB, "MiB"), (2**33, "GiB")])
def test_units(nbytes, name):
    assert unit_for(nbytes)[0] == name


# -- a comparison in sentences -----------------------------------------------------------------------------------------


def test_saved_bytes_and_the_peak_are_told_apart():
    checkpointed = trace((10, "parameters", 0, 3), (25, "temporaries", 2, 2), (5, "activations", 1, 2), saved=5)
    text = sentences(comparison(row(CHECKPOINT, checkpointed)))
    line = line_of(text, "checkpoint blocks.*: ")
    assert "saved bytes fell 90 %, the peak 38 %" in line
    assert "in the backward pass: temporaries 62 %, parameters 25 %, activations 12 %" in line


def test_a_plain_peak_in_the_optimizer_step_is_told_first():
    plain = row(Baseline(), IN_OPTIMIZER)
    text = sentences(Comparison((plain, row(CHECKPOINT, IN_OPTIMIZER))))
    assert (
        "The peak is in the optimizer step, where nothing is saved for backward: checkpointing cannot move it." in text
    )
    assert line_of(text, "Leave the peak where it is").endswith("checkpoint blocks.*.")
    assert "Lowest" not in text


def test_the_lowest_is_named_with_its_price():
    text = sentences(
        comparison(
            row(CHECKPOINT, IN_OPTIMIZER, time_ratio=1.26, flops_ratio=1.25),
            row(MICRO, trace((45, "activations", 1, 2)), time_ratio=1.03),
        )
    )
    assert line_of(text, "Lowest:").endswith(
        "checkpoint blocks.*, 30.0 MiB (46 % of the plain step's), for 1.26x the time and 1.25x the FLOPs."
    )
    assert line_of(text, "The peak of checkpoint blocks.* is in the optimizer step").endswith("cannot move it.")


def test_the_lowest_that_trains_the_same_model_is_named_too():
    text = sentences(
        comparison(
            row(MICRO, trace((20, "activations", 1, 2)), equivalent=False, notes=("bn: BatchNorm saw parts",)),
            row(CHECKPOINT, trace((40, "activations", 1, 2))),
        )
    )
    assert line_of(text, "Lowest:").endswith("It does not train the same model.")
    assert "checkpoint blocks.*, 40.0 MiB" in line_of(text, "Lowest of those that train the same model")
    assert "4 micro-batches does not train the same model: bn: BatchNorm saw parts." in text


def test_a_raised_peak_is_told():
    text = sentences(comparison(row(MICRO, trace((78, "gradients", 1, 2)))))
    assert "Raise the peak: 4 micro-batches (120 %)." in text
    assert "Lowest" not in text


@pytest.mark.parametrize(("both", "says"), [(29.9, "no better than"), (35, "worse than"), (20, None)])
def test_sums_are_held_against_their_parts(both, says):
    text = sentences(
        comparison(
            row(CHECKPOINT, trace((30, "temporaries", 2, 2))),
            row(MICRO, trace((40, "temporaries", 2, 2))),
            row(CHECKPOINT + MICRO, trace((both, "temporaries", 2, 2))),
        )
    )
    found = [line for line in text.splitlines() if line.startswith("checkpoint blocks.* + 4 micro-batches is")]
    assert [f"{says} checkpoint blocks.*:" in line for line in found] == ([True] if says else [])
    # 35 and 25 MiB one by one, of 65 MiB.
    assert f"60.0 MiB one by one, {format_bytes(int((65 - both) * MiB))} together" in line_of(
        text, "Savings do not add"
    )


def test_errors_and_missing_proofs_are_told():
    text = sentences(comparison(FAILED, row(CHECKPOINT, IN_OPTIMIZER, equivalent=None, proof="none")))
    assert "999 micro-batches could not run: 999 micro-batches asked, but the batch holds 32." in text
    assert "Not proven to train the same model: checkpoint blocks.*." in text
    assert "train the same model as" not in text


def test_rounding_is_read_by_that_of_the_plain_step():
    text = sentences(
        comparison(
            row(CHECKPOINT, IN_OPTIMIZER, gradient_error=2e-7),
            row(MixedPrecision("bf16"), IN_OPTIMIZER, gradient_error=6e-3),
            row(CHECKPOINT + MixedPrecision("bf16"), IN_OPTIMIZER, gradient_error=6e-3),
        )
    )
    assert line_of(text, "Rounding").endswith("1e-07 (baseline), 6e-03 (bf16 autocast).")
    assert line_of(text, "All train the same model").endswith(
        "are identical, apart from the rounding of autocast, which leaves float64 alone."
    )


def test_a_difference_without_a_note_is_told_in_numbers():
    buffers = row(CHECKPOINT, IN_OPTIMIZER, equivalent=False, buffer_differences=("bn.running_mean",))
    gradients = row(MICRO, IN_OPTIMIZER, equivalent=False, gradient_difference=0.11)
    text = sentences(comparison(buffers, gradients))
    assert "buffers end differently: bn.running_mean." in text
    assert "gradients differ by 0.11, relative." in text


def test_a_plain_step_alone_and_nothing_at_all():
    assert "65.0 MiB" in sentences(comparison())
    assert sentences(Comparison(())) == ""


# -- a comparison as a table -------------------------------------------------------------------------------------------

ROWS = comparison(
    row(CHECKPOINT, IN_OPTIMIZER, time_ratio=1.26, flops_ratio=1.25, notes=("shared note",)),
    row(LowPrecision("bf16"), IN_BACKWARD, equivalent=None, notes=("shared note", "a note of its own " * 20)),
    row(CHECKPOINT + MICRO + MixedPrecision("bf16"), IN_OPTIMIZER, equivalent=False),
    FAILED,
)


def test_the_frame_holds_the_values():
    frame = comparison_frame(ROWS)
    assert list(frame.index) == [row.label for row in ROWS.rows]
    assert frame["peak MiB"].tolist()[:4] == [65, 30, 65, 30]
    assert frame["saved MiB"].tolist()[:4] == [50, 2, 50, 2]
    assert frame["relative to baseline"].iloc[1] == pytest.approx(30 / 65, abs=1e-3)
    assert frame["phase of peak"].tolist()[:2] == ["backward", "optimizer"]
    assert frame["same model"].tolist() == ["yes", "yes", "not proven", "no", ""]
    assert frame["time ratio"].iloc[1] == 1.26
    assert "999" in frame["notes"].iloc[4]
    assert frame.iloc[4].drop(["notes", "same model"]).isna().all()


def test_the_strict_frame_has_nothing_that_varies():
    """Workspace, times, rounding: none of it moves a strict figure."""
    noisy = dataclasses.replace(
        IN_BACKWARD, allocations=IN_BACKWARD.allocations + trace((40, "workspace", 1, 1)).allocations
    )
    assert (noisy.peak.phase, noisy.tensor_peak.phase) == ("forward", "backward")
    quiet, loud = (
        Comparison((row(Baseline(), its, time_ratio=time, gradient_error=time),))
        for its, time in ((IN_BACKWARD, 1.0), (noisy, 2.0))
    )
    assert comparison_frame(quiet, strict=True).equals(comparison_frame(loud, strict=True))
    columns = ["tensor peak MiB", "relative to baseline", "saved MiB", "phase of peak", "same model"]
    assert list(comparison_frame(ROWS, strict=True).columns) == columns


def test_the_text_fits_a_terminal_and_its_columns_are_aligned():
    text = comparison_text(ROWS)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    end = lines[0].index("peak MiB") + len("peak MiB")
    assert [line[:end].split()[-1] for line in lines if "x  " in line or "1e-07" in line] == [
        "65.00",
        "30.00",
        "65.00",
        "30.00",
    ]
    assert "+ bf16 autocast" in text
    assert text.count("shared note") == 1
    assert "[3] could not run: 999 micro-batches asked" in text


def test_a_comparison_of_nothing_is_a_table_of_nothing():
    assert comparison_frame(Comparison(())).empty
    assert "peak" in comparison_text(Comparison(()))
