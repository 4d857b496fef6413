"""The frame that every explorer stands in: controls above, a picture, and what it says in words.

    class Doubling(Panel):
        def __init__(self) -> None:
            self.size = ipywidgets.IntSlider(4, 1, 9)
            super().__init__(self.size)

        def view(self) -> View:
            n = self.size.value
            return View(text=f"twice {n} is {2 * n}", key=n, draw=lambda: bars(n, 2 * n))

    panel = Doubling()          # the value of a cell: shown with its controls
    panel.size.value = 5        # as if a hand had moved it
    panel.text                  # 'twice 5 is 10'

Rules:

1. One bundle shows a panel: the live widgets, a PNG and a text. A page without a kernel has the picture and the text.
2. A change of any control's value is answered by one `refresh`: `view()` is asked, and a picture is drawn only where it
   was not drawn before. `hold()` makes one change of several.
3. No error in an answer is lost. The words say it; what is no `MemlabError` is raised as well.
4. Nothing but what ipywidgets 7.7 and 8 have in common: `observe`, never `interact` or `Output`.
5. Answers come one after another, on the thread that cells run on. JupyterLab hands what a page sends to another thread
   (a subshell of ipykernel 7), which would answer amid the answer before, or beside a cell that computes. What a page
   sends meanwhile waits, and the newest is answered.
"""

from __future__ import annotations

import contextlib
import html
import io
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MemlabError

try:
    import ipywidgets as ipywidgets  # explorers take it from here
except ImportError:
    raise MemlabError("explorers need ipywidgets, which is not installed: `pip install ipywidgets`") from None

from ..views.plots import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Panel", "View", "ipywidgets"]

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_NO_CONTROLS = (ipywidgets.HTML, ipywidgets.Label, ipywidgets.Image)  # these have a value to show, not to set
_PICTURES_KEPT = 256  # of about 50 KiB each


@dataclass(frozen=True)
class View:
    """What a panel shows.

    text: plain sentences, a line each; `html`: the same for a page (default: the text, a paragraph a line)
    key:  names the picture, a hashable value: the same key is the same picture
    draw: makes the picture
    """

    text: str
    key: Hashable
    draw: Callable[[], Figure]
    html: str = ""


class Panel:
    """Controls, an image and words; a subclass makes its controls, hands them over in rows, and says what is to be
    seen in `view`. See the module's rules.

    image, words: the ipywidgets Image and HTML; box: all of it, to be put into another widget
    """

    def __init__(self, *rows: Any) -> None:
        self.image = ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="100%"))
        self.words = ipywidgets.HTML()
        self.box = ipywidgets.VBox([*rows, self.image, self.words])
        self._text = ""
        self._pictures: dict[Hashable, bytes] = {}
        self._held = 0
        self._asked = False
        self.watch(*rows)
        self.refresh()

    def view(self) -> View:
        """What is to be seen with the controls as they are. It may set controls too: that asks for no other view."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """What the panel says now, in plain text."""
        return self._text

    def watch(self, *widgets: Any) -> None:
        """Answer changes of these controls and of those inside them; those handed to `Panel` are watched already."""
        for control in _controls(widgets):
            control.observe(self._changed, names="value")

    def button(self, label: str, action: Callable[[], object], **options: Any) -> Any:
        """A button that runs `action`; however many controls that sets, one refresh answers it."""

        def act() -> None:
            with self._errors_shown(), self.hold():
                action()

        def pressed(_: Any) -> None:
            loop = _loop_of_the_cells()
            act() if loop is None else loop.add_callback(act)

        button = ipywidgets.Button(description=label, **options)
        button.on_click(pressed)
        return button

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Set several controls in here, and one refresh follows at the end."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self._changed(None)

    def refresh(self) -> None:
        """Show what the controls now ask for. Raises what `view` raises."""
        self._held += 1
        try:
            view = self.view()
            picture = self._pictures.pop(view.key, None) or _quick_png(view.draw())
        finally:
            self._held -= 1
        self._view = view
        self._pictures[view.key] = picture  # the last one asked for stands last
        if len(self._pictures) > _PICTURES_KEPT:
            del self._pictures[next(iter(self._pictures))]
        self.image.value = picture  # nothing is sent where it is the same
        self._say(view.text, view.html)

    def _changed(self, _: Any) -> None:
        loop = _loop_of_the_cells()
        if loop is None:
            self._answer()
        elif not self._asked:  # else the answer to come will be this one's too
            self._asked = True
            loop.add_callback(self._answer)

    def _answer(self) -> None:
        self._asked = False
        if not self._held:
            with self._errors_shown():
                self.refresh()

    @contextlib.contextmanager
    def _errors_shown(self) -> Iterator[None]:
        try:
            yield
        except MemlabError as error:
            self._say(str(error))
        except Exception as error:
            self._say(f"This went wrong inside the explorer: {type(error).__name__}: {error}")
            raise

    def _say(self, text: str, page: str = "") -> None:
        self._text = text
        lines = (f"<p style='margin: 0.2em 0'>{html.escape(line)}</p>" for line in text.splitlines())
        paragraphs = page or "".join(lines)
        self.words.value = f"<div role='status' aria-live='polite' style='line-height: 1.4'>{paragraphs}</div>"

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        shown = {
            _WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id},
            "image/png": png(self._view.draw()),  # a notebook keeps this one: small rather than quick
            "text/plain": self.text,
        }
        return shown, {"image/png": {"alt": self.text}}


def _loop_of_the_cells() -> Any:
    """The event loop of the thread that cells run on, to hand work over to; None where there is no need to (Rule 5)."""
    if threading.current_thread() is threading.main_thread() or "IPython" not in sys.modules:
        return None
    kernel = getattr(sys.modules["IPython"].get_ipython(), "kernel", None)
    return getattr(kernel, "io_loop", None)


def _quick_png(figure: Figure) -> bytes:
    """As `png`, in half the time and twice the size: what is on its way to a page and kept nowhere."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100, pil_kwargs={"compress_level": 1})
    return drawn.getvalue()


def _controls(widgets: Iterable[Any]) -> Iterator[Any]:
    """The widgets that have a value to set, and those within containers."""
    for widget in widgets:
        yield from _controls(getattr(widget, "children", ()))
        if widget.has_trait("value") and not isinstance(widget, _NO_CONTROLS):
            yield widget
