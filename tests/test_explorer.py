"""`explore` answers with the numbers of `simulate` and, on a CPU, of `measure`; it does not fail under one's hands."""

import gc
import json
import re
import threading

import pytest
import torch
from torch import nn

pytest.importorskip("IPython", reason="the explorer is for notebooks")
pytest.importorskip("ipywidgets", reason="the explorer is made of ipywidgets")
pytest.importorskip("matplotlib", reason="the explorer draws with matplotlib")

import IPython

from memlab import (
    Checkpoint,
    LowPrecision,
    MemlabError,
    MicroBatch,
    MixedPrecision,
    OptimizerInBackward,
    TrainingStep,
    measure,
)
from memlab.notebook import explorer as module
from memlab.notebook.controls import MEMORIES, OPTIMIZERS, PRECISIONS
from memlab.notebook.explorer import explore
from memlab.simulate import simulate
from memlab.units import GiB, format_bytes
from memlab.views.fit import plot_fit
from memlab.zoo import gpt_step

PNG = b"\x89PNG\r\n\x1a\n"
SIZES = {"depth": [2, 3], "width": [32, 64], "context": [16], "batch": (8, 16)}
SAME = {"depth": 2, "width": 32, "context": 16, "batch": 8}


def small(**options):
    """The teaching GPT, small enough to be run for real too."""
    return explore(**(SIZES | options))


def move(explorer, **values):
    """Set controls, one answer for all."""
    with explorer.hold():
        for name, value in values.items():
            explorer.controls[name].value = value


def build(depth=2, width=16, batch=8):
    """A chain of blocks on tensors that a build function makes by itself."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
    return TrainingStep(model, torch.ones(batch, width), lambda model, x: model(x).sum(), torch.optim.SGD)


# -- its numbers -------------------------------------------------------------------------------------------------------

CHOICES = {
    "plain": ({}, None),
    "checkpoint": ({"checkpoint": True}, Checkpoint()),
    "micro-batches": ({"micro_batches": 2}, MicroBatch(count=2)),
    "autocast": ({"precision": "bf16 autocast"}, MixedPrecision("bf16")),
    "pure": ({"precision": "pure bf16"}, LowPrecision("bf16")),
    "in backward": ({"optimizer_in_backward": True}, OptimizerInBackward()),
    "sum": ({"checkpoint": True, "micro_batches": 2}, Checkpoint() + MicroBatch(count=2)),
}


@pytest.mark.parametrize(("values", "strategy"), CHOICES.values(), ids=CHOICES)
def test_on_a_cpu_its_peak_is_the_measured_one(values, strategy):
    explorer = small(device="cpu")
    move(explorer, **values)
    measured = measure(gpt_step(**SAME), strategy, allocator=False)
    assert explorer.trace.tensor_peak_bytes == measured.tensor_peak_bytes
    assert explorer.trace.by_category("tensor_peak") == measured.by_category("tensor_peak")
    assert explorer.plain.tensor_peak_bytes == measure(gpt_step(**SAME), allocator=False).tensor_peak_bytes


def test_on_a_gpu_its_trace_is_that_of_simulate():
    explorer = small()
    move(explorer, depth=3, width=64, batch=16, checkpoint=True, precision="bf16 autocast")
    sizes = {"depth": 3, "width": 64, "context": 16, "batch": 16}
    truth = simulate(gpt_step(**sizes), Checkpoint() + MixedPrecision("bf16"))
    assert explorer.trace.by_category() == truth.by_category()
    assert explorer.trace.by_phase() == truth.by_phase()
    assert explorer.plain.peak_bytes == simulate(gpt_step(**sizes)).peak_bytes
    assert explorer.strategy == Checkpoint() + MixedPrecision("bf16")


def test_two_micro_batches_stand_for_all():
    explorer = small()
    move(explorer, micro_batches=8)
    truth = simulate(gpt_step(**SAME), MicroBatch(count=8))
    losses = 6 * 512  # of the six that are left out, a block each
    assert explorer.trace.peak_bytes == truth.peak_bytes - losses
    assert explorer.trace.saved_bytes == truth.saved_bytes
    assert explorer.trace.strategy == truth.strategy == "8 micro-batches of 1"
    assert {operator.place.micro_batch for operator in explorer.trace.operators} == {0, 1}
    assert "Two of the 8 micro-batches are simulated: the others are as the second." in explorer.text
    assert module._seconds(explorer.trace, 8) == pytest.approx(truth.estimate_seconds("A100"), rel=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_is_chosen(name):
    explorer = small(device="cpu")
    move(explorer, optimizer=name)
    measured = measure(gpt_step(**SAME, optimizer=OPTIMIZERS[name]), allocator=False)
    assert explorer.trace.by_category("optimizer") == measured.by_category("optimizer")


def test_its_form_is_chosen():
    """CUDA's default is foreach, whose temporaries are one copy of the parameters (AdamW); fused has none."""
    explorer, temporaries = small(), {}
    for form in explorer.controls["form"].options:
        move(explorer, form=form)
        temporaries[form] = explorer.trace.by_category("optimizer").get("temporaries", 0)
    assert temporaries["PyTorch's default"] == temporaries["foreach"]
    assert temporaries["foreach"] == pytest.approx(explorer.trace.by_category()["parameters"], abs=64)
    assert temporaries["fused"] < 64 < temporaries["for-loop"] < temporaries["foreach"]


# -- what may be explored ----------------------------------------------------------------------------------------------


def test_what_a_function_builds_does_not_exist():
    explorer = explore(build, width=[50_000], depth=(4, 40), batch=[1, 64])
    assert explorer.trace.by_category()["parameters"] > 4 * 50_000**2 * 4
    assert explorer.values["depth"] == 4
    move(explorer, depth=40, batch=64)
    assert explorer.trace.by_category()["parameters"] > 40 * 50_000**2 * 4
    assert "optimizer" not in explorer.controls  # it has its own


def test_sliders_start_at_the_defaults():
    explorer = explore(build, depth=(1, 5), width=[8, 16, 32], batch=(16, 64, 16))
    assert [explorer.values[name] for name in ("depth", "width", "batch")] == [2, 16, 16]
    assert explorer.controls["batch"].step == 16


def test_a_step_that_exists_stays_as_it_is():
    step = gpt_step(**SAME)
    before = [parameter.clone() for parameter in step.model.parameters()]
    stream = torch.get_rng_state()
    explorer = explore(step)
    move(explorer, checkpoint=True)
    assert explorer.trace.peak_bytes == simulate(step, Checkpoint()).peak_bytes
    assert all(torch.equal(one, other) for one, other in zip(before, step.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert torch.equal(stream, torch.get_rng_state())
    assert list(explorer.controls["micro_batches"].options) == [1, 2, 4, 8]  # up to its batch


def test_a_step_that_does_not_exist_yet_is_not_built():
    step = TrainingStep(lambda: nn.Linear(64, 64), lambda: torch.ones(4, 64), lambda m, x: m(x).sum())
    assert explore(step).trace.by_category()["parameters"] == 64 * 65 * 4 - 64 * 4 + 256
    assert not step.is_built
    kept = explore(lambda: step)  # the same one at each call
    move(kept, micro_batches=2)
    assert kept.trace is not None
    assert not step.is_built
    assert all(type(parameter) is nn.Parameter for parameter in step.model.parameters())


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_verdict_adds_up():
    explorer = small(budget="1 GiB")
    left = GiB - explorer.trace.peak_bytes
    assert explorer.text.startswith(f"Fits in 1 GiB: {format_bytes(left)} left.\nThis is the plain step")
    assert f"Fits in 1 GiB: {format_bytes(left)} left." in explorer.headline.value
    move(explorer, budget="4096")
    assert explorer.text.startswith(f"Does not fit in 4096: {format_bytes(explorer.trace.peak_bytes - 4096)} missing.")
    move(explorer, budget=f"{explorer.trace.peak_bytes} B")
    assert explorer.text.startswith(f"Fits in {explorer.trace.peak_bytes} B: 0 B left.")


def test_it_says_what_moves_this_peak():
    explorer = small()
    assert "\n- Checkpoint (activations): " in explorer.text
    move(explorer, checkpoint=True)
    trace, plain = explorer.trace, explorer.plain
    share = f"{100 * trace.peak_bytes / plain.peak_bytes:.0f} %"
    against = f"{format_bytes(trace.peak_bytes)}, {share} of the plain step's {format_bytes(plain.peak_bytes)}."
    assert f"checkpoint: a peak of {against}" in explorer.text
    assert trace.explain().splitlines()[0] in explorer.text
    assert all(sentence in explorer.text for sentence in trace.absent)
    assert re.search("<ul.*?><li.*?>Checkpoint .activations", explorer.words.value)


def test_times_are_estimates_of_gpus():
    explorer = small()
    assert re.search(r"^Time, an estimate: at least \S+ \S+ a step on one A100\.$", explorer.text, re.MULTILINE)
    move(explorer, checkpoint=True)
    ratio = explorer.trace.estimate_seconds("A100") / explorer.plain.estimate_seconds("A100")
    assert f"{ratio:.2f}x the plain step's." in explorer.text
    move(explorer, device="cpu")
    assert "estimate" not in explorer.text


def test_a_page_without_a_kernel_shows_picture_and_text():
    explorer = small()
    shown, metadata = explorer._repr_mimebundle_()
    assert shown["image/png"].startswith(PNG)
    assert shown["text/plain"] == explorer.text == repr(explorer)
    assert metadata["image/png"]["alt"] == explorer.text
    view = shown["application/vnd.jupyter.widget-view+json"]
    assert json.loads(json.dumps(view))["model_id"] == explorer.box.model_id


# -- how it answers ----------------------------------------------------------------------------------------------------


def test_it_says_at_once_that_it_simulates_and_does_so_once():
    calls, said = [], []

    def counted(depth, optimizer):
        calls.append(depth)
        assert "simulating…" in explorer_headline()
        return gpt_step(**(SAME | {"depth": depth}), optimizer=optimizer)

    def explorer_headline():
        return said[-1] if said else "simulating…"

    explorer = explore(counted, depth=(1, 3))
    explorer.headline.observe(lambda change: said.append(change.new), names="value")
    move(explorer, depth=2)
    move(explorer, checkpoint=True)
    pictures = {bytes(explorer.image.value)}
    assert calls == [1, 2, 2]
    move(explorer, depth=1, checkpoint=False)
    pictures.add(bytes(explorer.image.value))
    move(explorer, depth=2, checkpoint=True)
    pictures.add(bytes(explorer.image.value))
    move(explorer, budget="1 MiB")
    assert calls == [1, 2, 2]
    assert len(pictures) == 2
    assert len([headline for headline in said if "simulating…" in headline]) == 2


def test_several_controls_make_one_answer():
    explorer = small()
    said = []
    explorer.headline.observe(lambda change: said.append(change.new), names="value")
    move(explorer, depth=3, batch=12, checkpoint=True)
    assert len(said) == 2  # simulating, and the verdict


def test_what_a_page_sends_waits_for_the_cells(monkeypatch):
    """In a kernel, messages of pages may come on a thread of their own. Nothing is simulated there, nor beside a cell;
    of several changes the newest is answered."""
    explorer, waiting, threads = small(), [], []

    class Loop:
        add_callback = staticmethod(waiting.append)

    shell = type("Shell", (), {"kernel": type("Kernel", (), {"io_loop": Loop})})
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    explorer.headline.observe(lambda _: threads.append(threading.current_thread()), names="value")
    before = explorer.text

    def page():
        for batch in (10, 12, 14):
            explorer.controls["batch"].value = batch

    sender = threading.Thread(target=page)
    sender.start()
    sender.join()
    assert explorer.text == before
    (answer,) = waiting
    answer()
    assert explorer.trace.peak_bytes == simulate(gpt_step(**(SAME | {"batch": 14}))).peak_bytes
    assert set(threads) == {threading.main_thread()}
    move(explorer, batch=8)
    assert explorer.text == before
    assert len(waiting) == 1


def test_it_keeps_a_limited_number_of_traces(monkeypatch):
    monkeypatch.setattr(module, "_TRACES_KEPT", 3)
    explorer = small()
    for batch in range(8, 14):
        move(explorer, batch=batch, checkpoint=batch % 2 == 0)
        assert explorer.trace.peak_bytes <= explorer.plain.peak_bytes
    assert len(explorer._traces) == 3


def test_what_the_garbage_collector_was_told_to_leave_stays_so():
    frozen = gc.get_freeze_count()
    try:
        gc.unfreeze()
        explorer = small()
        assert gc.get_freeze_count() == 0
        gc.freeze()
        before = gc.get_freeze_count()
        move(explorer, depth=3)
        assert 0 < gc.get_freeze_count() <= before
    finally:
        if not frozen:
            gc.unfreeze()


# -- what cannot run ---------------------------------------------------------------------------------------------------


def test_a_choice_that_cannot_run_says_why_and_the_controls_stay():
    explorer = small()
    before = bytes(explorer.image.value)
    move(explorer, optimizer_in_backward=True, micro_batches=2)
    assert explorer.text.startswith(
        "This choice cannot run.\nMicroBatch(count=2) + OptimizerInBackward() cannot be combined: the optimizer in "
        "backward consumes each gradient at once"
    )
    assert "This choice cannot run." in explorer.headline.value
    assert explorer.trace is None
    assert explorer.plain.peak_bytes == simulate(gpt_step(**SAME)).peak_bytes
    assert bytes(explorer.image.value) != before
    with pytest.raises(MemlabError, match="cannot be combined"):
        explorer.strategy  # noqa: B018
    move(explorer, micro_batches=1)
    assert explorer.trace.strategy == "optimizer in backward"


def test_more_micro_batches_than_samples():
    explorer = small()
    move(explorer, micro_batches=16)
    assert "16 micro-batches asked, but the batch holds 8 sample(s): give 1 to 8" in explorer.text
    move(explorer, batch=16)
    assert explorer.trace.strategy == "16 micro-batches of 1"


def test_a_memory_that_is_none():
    explorer = small()
    peak = explorer.trace.peak_bytes
    move(explorer, budget="much")
    assert explorer.text.startswith("'much' is no number of bytes: write a whole number")
    assert explorer.trace.peak_bytes == peak
    move(explorer, budget=MEMORIES[0])
    assert explorer.text.startswith("Fits in 8 GiB")


def test_what_the_users_code_raises_is_said():
    def picky(width=4, batch=2):
        if width == 5:
            raise ValueError("width must be even")
        return build(2, width, batch)

    explorer = explore(picky, width=(4, 6))
    move(explorer, width=5)
    assert explorer.text == "This choice cannot run.\nValueError: width must be even."
    assert explorer.plain is None
    move(explorer, width=6)
    assert explorer.trace is not None
    with pytest.raises(MemlabError, match="ValueError: width must be even") as caught:
        explore(picky, width=[5])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_model_without_blocks_says_what_could_be_checkpointed():
    explorer = explore(TrainingStep(nn.Linear(4, 4), torch.ones(2, 4), lambda m, x: m(x).sum()))
    move(explorer, checkpoint=True)
    with pytest.raises(MemlabError) as refused:
        simulate(TrainingStep(nn.Linear(4, 4), torch.ones(2, 4), lambda m, x: m(x).sum()), Checkpoint())
    assert str(refused.value) in explorer.text


WRONG = {
    "a model": (
        (nn.Linear(2, 2),),
        {},
        "explore() takes a TrainingStep, or a function that makes one from the sliders' values, not a Linear",
    ),
    "no function": ((3,), {}, "or a function that makes one from the sliders' values, not an int"),
    "a step with sliders": (
        (gpt_step(depth=1, width=16, context=8, batch=2),),
        {"depth": (2, 4)},
        "depth: a TrainingStep has its sizes. Give sliders to a function that makes one: "
        "memlab.explore(build, depth=(2, 24))",
    ),
    "unknown": ((build,), {"depht": (1, 2)}, "build() has no argument depht: its arguments are depth, width and batch"),
    "unknown to the GPT": ((), {"height": (1, 2)}, "has no argument height: its arguments are depth, width, context"),
    "a switch": (
        (build,),
        {"precision": ["a"]},
        "precision is a switch of the explorer's own: give the slider another",
    ),
    "missing": (
        (lambda depth: None,),
        {},
        "<lambda>() needs depth: give it a slider, such as depth=(1, 8), or a default",
    ),
    "empty range": ((build,), {"depth": (4, 4)}, "depth=(4, 4) is no slider: give a range of whole numbers, depth=(2,"),
    "step too long": ((build,), {"depth": (1, 4, 9)}, "depth=(1, 4, 9) is no slider"),
    "fractions": ((build,), {"depth": (0.5, 1)}, "depth=(0.5, 1) is no slider"),
    "a number": ((build,), {"depth": 4}, "depth=4 is no slider"),
    "no choices": ((build,), {"depth": []}, "or a list of choices, depth=[128, 256, 512]"),
    "device": ((), {"device": "tpu"}, "device is 'tpu': give 'cuda' or 'cpu'"),
    "budget": ((), {"budget": "a lot"}, "'a lot' is no number of bytes"),
    "no step": (
        (lambda: nn.Linear(2, 2),),
        {},
        "the function made a Linear: have it return memlab.TrainingStep(model, batch, loss_fn, optimizer)",
    ),
}


@pytest.mark.parametrize(("subject", "options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_given_wrongly_is_refused_at_once(subject, options, message):
    with pytest.raises(MemlabError, match=re.escape(message)):
        explore(*subject, **options)


# -- its figure --------------------------------------------------------------------------------------------------------


def widths(ax):
    """The length of each bar, by the row that it is in."""
    found = {}
    for patch in ax.patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        found[row] = found.get(row, 0) + patch.get_width()
    return found


def test_bars_are_as_long_as_the_peaks():
    plain, trace = simulate(gpt_step(**SAME)), simulate(gpt_step(**SAME), Checkpoint())
    figure = plot_fit(plain, trace, plain.peak_bytes * 5 // 4)
    bars, timeline = figure.axes
    assert plain.peak_bytes > 2**20
    assert widths(bars) == pytest.approx({0: plain.peak_bytes / 2**20, 1: trace.peak_bytes / 2**20})
    assert bars.lines[0].get_xdata()[0] == pytest.approx(plain.peak_bytes * 5 // 4 / 2**20)
    assert "checkpoint" in timeline.get_title(loc="left")
    assert (
        figure.summary
        == f"Memory through one training step, checkpoint: peak {format_bytes(trace.peak_bytes)} in "
        + ("the backward pass" if trace.peak.phase == "backward" else "the recomputation during backward")
    )


def test_a_memory_far_above_is_not_drawn():
    plain = simulate(gpt_step(**SAME))
    bars, timeline = plot_fit(plain, plain, 80 * GiB).axes
    assert not bars.lines
    assert bars.get_xlim()[1] < 1.2 * plain.peak_bytes / 2**20
    assert timeline.get_ylim()[1] < 1.5 * plain.peak_bytes / 2**20
    assert list(widths(bars)) == [0]


def test_what_cannot_run_is_named():
    plain = simulate(gpt_step(**SAME))
    texts = [text.get_text() for text in plot_fit(plain, None).axes[0].texts]
    assert texts == [f"baseline: {format_bytes(plain.peak_bytes)}", "this choice cannot run"]
    (bars,) = plot_fit(None, None).axes
    assert [text.get_text() for text in bars.texts] == ["the plain step cannot run", "this choice cannot run"]


def test_every_precision_is_a_switch_that_runs():
    explorer = small()
    peaks = {}
    for name in PRECISIONS:
        move(explorer, precision=name)
        peaks[name] = explorer.trace.peak_bytes
    assert peaks["pure bf16"] < peaks["bf16 autocast"]
    assert peaks["fp32"] == explorer.plain.peak_bytes
