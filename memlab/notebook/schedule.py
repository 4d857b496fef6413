"""The explorer of checkpointing itself: choose blocks, go through the step, see what is alive and how far from the best
the choice is.

    panel = explore_checkpointing()             # a small GPT of 8 blocks; a step or a `Chain` of your own in its place
    panel.toggles[2].value = True               # as a click does
    panel.instant.value = 12                    # the passes of the step, in order
    print(panel.text)

Chains of more than 12 blocks have a field for a pattern in place of the buttons: `every 3`, or `0 3 6-9`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..chain import Chain, Placement, pareto, schedule, weigh
from ..errors import MemlabError
from ..simulate import simulated, simulation
from ..step import TrainingStep
from ..strategies import regions
from ..views.schedule import instant_sentences, placement_sentences, plot_schedule
from .panel import Panel, View, ipywidgets

_MOST_BUTTONS = 12
_RUN = re.compile(r"(\d+)(?:-(\d+))?")


def explore_checkpointing(
    of: TrainingStep | Chain | None = None, blocks: int = 8, modules: str | Sequence[str] = regions.AUTO
) -> CheckpointExplorer:
    """The explorer of a step's blocks (those that `modules` names, as for `Checkpoint`), of a `Chain`, or with neither
    of a small GPT of so many `blocks`. Shown as the value of a cell.

    A step whose model is still to be built is simulated for a GPU, so that the model never exists; any other is
    measured. Raises MemlabError where there are no blocks that run one after the other."""
    if of is None:
        if blocks < 2:
            raise MemlabError(f"blocks is {blocks}: a chain has two blocks or more")
        from ..zoo import gpt_step

        of = gpt_step(batch=8, context=64, width=64, depth=blocks)
    if not isinstance(of, Chain | TrainingStep):
        raise MemlabError(
            f"explore_checkpointing() takes a TrainingStep or a Chain, not {type(of).__name__}: "
            "memlab.TrainingStep(model, batch, loss_fn)"
        )
    return CheckpointExplorer(of if isinstance(of, Chain) else _chain(of, modules))


def _chain(step: TrainingStep, modules: str | Sequence[str]) -> Chain:
    if step.is_built:
        return Chain.of(step, modules)
    with simulation(step, "cuda") as (stage, mode):
        return Chain.of(stage.step, modules, run=lambda strategy: simulated(stage, mode, strategy, "cuda"))


class CheckpointExplorer(Panel):
    """Controls of a chain's placement and of the instant that is shown.

    toggles: a ToggleButton for each block, on where it is checkpointed; none for a long chain
    pattern: the Text field of a long chain
    instant: the IntSlider over the schedule; it begins at the peak
    buttons: by what is written on them
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._front = pareto(chain)
        numbers = range(len(chain.blocks))
        names = [block.name for block in chain.blocks]
        self.toggles = (
            [_toggle(number, name) for number, name in enumerate(names)] if len(names) <= _MOST_BUTTONS else []
        )
        self.pattern = ipywidgets.Text("none", description="checkpoints", continuous_update=False)
        self.instant = ipywidgets.IntSlider(0, 0, 1, description="instant", layout=ipywidgets.Layout(width="640px"))
        actions = {
            "none": lambda: self.place(()),
            "all": lambda: self.place(numbers),
            "every other": lambda: self.place(numbers[::2]),
            "best": lambda: self.place(_blocks(self._front[-1])),
            "best for this memory": lambda: self.place(_blocks(self._as_good())),
            "go to the peak": self.go_to_peak,
        }
        auto = {"width": "auto"}
        self.buttons = {label: self.button(label, action, layout=auto) for label, action in actions.items()}
        self.go_to_peak()
        super().__init__(
            _row(self.toggles or [self.pattern]),
            _row(self.buttons.values()),
            self.instant,
        )

    @property
    def placement(self) -> tuple[bool, ...]:
        """A flag for each block: whether it is checkpointed. Raises MemlabError for a pattern that says nothing."""
        if self.toggles:
            return tuple(bool(toggle.value) for toggle in self.toggles)
        return parse_pattern(self.pattern.value, len(self.chain.blocks))

    def place(self, blocks: Iterable[int]) -> None:
        """Checkpoint these blocks and no others."""
        chosen = set(blocks)
        if wrong := chosen - set(range(len(self.chain.blocks))):
            raise MemlabError(f"there is no block {min(wrong)}: this chain has 0 to {len(self.chain.blocks) - 1}")
        with self.hold():
            for number, toggle in enumerate(self.toggles):
                toggle.value = number in chosen
            self.pattern.value = " ".join(map(str, sorted(chosen))) or "none"

    def go_to_peak(self) -> None:
        """Show the instant of the most memory."""
        nbytes = [now.nbytes for now in schedule(self.chain, self.placement)]
        self.instant.max = len(nbytes) - 1
        self.instant.value = nbytes.index(max(nbytes))

    def view(self) -> View:
        chain, placement = self.chain, self.placement
        self.instant.max = len(schedule(chain, placement)) - 1
        for toggle in self.toggles:
            toggle.icon = "repeat" if toggle.value else ""  # not by its shade alone
        number = self.instant.value
        says = placement_sentences(chain, placement, self._front) + instant_sentences(chain, placement, number)
        return View(
            "\n".join(says),
            key=(placement, number),
            draw=lambda: plot_schedule(chain, placement, number, front=self._front),
        )

    def _as_good(self) -> Placement:
        """The least work for a peak no higher than the present one."""
        peak = weigh(self.chain, self.placement).peak_bytes
        return next(its for its in self._front if its.peak_bytes <= peak)


def parse_pattern(text: str, count: int) -> tuple[bool, ...]:
    """Flags for `count` blocks from "none", "all", "every 3" (0, 3, 6, ...) or numbers and spans ("0 3 6-9").

    >>> parse_pattern("0 2-3", 5)
    (True, False, True, True, False)
    """
    words = text.replace(",", " ").split()
    runs = [_RUN.fullmatch(word) for word in words]
    spans = [(int(run[1]), int(run[2] or run[1])) for run in runs if run]
    chosen: set[int] | None = None
    if words in ([], ["none"]):
        chosen = set()
    elif words == ["all"]:
        chosen = set(range(count))
    elif len(words) == 2 and words[0] == "every" and words[1].isdecimal() and int(words[1]):
        chosen = set(range(0, count, int(words[1])))
    elif all(runs) and all(first <= last < count for first, last in spans):
        chosen = {number for first, last in spans for number in range(first, last + 1)}
    if chosen is None:
        raise MemlabError(
            f'{text!r} names no blocks among 0 to {count - 1}: write "none", "all", "every 3", or numbers and spans '
            'such as "0 3 6-9"'
        )
    return tuple(number in chosen for number in range(count))


def _row(controls: Iterable[Any]) -> Any:
    return ipywidgets.HBox(list(controls), layout=ipywidgets.Layout(flex_flow="row wrap"))


def _toggle(number: int, name: str) -> Any:
    return ipywidgets.ToggleButton(
        description=f"{number}", tooltip=f"checkpoint {name}", layout=ipywidgets.Layout(width="64px")
    )


def _blocks(placement: Placement) -> list[int]:
    return [block for region in placement.regions for block in region]
