"""A progress bar for long work, seen while it runs and gone afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yields `tell(what)`: say what begins now; each call is one of about `steps` steps.

    A bar is shown only where somebody watches: in a terminal, or in a live notebook. A notebook that is executed to be
    stored (nbclient, nbval) has no watcher, and a bar would stay in it.
    """
    bar = _bar(steps)
    if bar is None:
        yield lambda what: None
        return

    def tell(what: str) -> None:
        bar.set_description_str(what)
        bar.update(1)

    try:
        yield tell
    finally:
        bar.close()


def _bar(steps: int):  # type: ignore[no-untyped-def]
    """A tqdm bar that clears itself, or None: no tqdm, or nobody there."""
    in_kernel = "ipykernel" in sys.modules
    watched = "JPY_SESSION_NAME" in os.environ or "google.colab" in sys.modules if in_kernel else sys.stderr.isatty()
    if not watched or importlib.util.find_spec("tqdm") is None:
        return None
    if in_kernel:
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    return tqdm(total=steps, leave=False, bar_format="{desc} {bar} {n_fmt}/{total_fmt}", initial=0)
