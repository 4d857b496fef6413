"""Run notebooks, so that what they store is what they print.

    python notebooks/execute.py [notebook ...]           # in place; without names: all lessons, beside this file
    python notebooks/execute.py --check [notebook ...]   # only see whether they run: nothing is stored

Each runs from top to bottom in a fresh kernel, in its own folder. What would differ in every run and says nothing is
left out: times of execution, the state and the random numbers of widgets, the version of Python. A notebook that raises
an error where none is expected stays as it was, and the exit status says so.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
LESSONS = "[0-9][0-9]_*.ipynb"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run a notebook's cells in that folder, and put their outputs into it."""
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
        record_timing=False,
        store_widget_state=False,
    )
    client.execute()
    clean(notebook)


def clean(notebook: nbformat.NotebookNode) -> None:
    """Leave out what says nothing to a reader."""
    notebook.metadata.pop("widgets", None)  # with it, repository sites do not show the notebook at all
    notebook.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            # A stored view is a random number that leads nowhere; the picture or page beside it is what can be seen.
            if data.keys() & {"image/png", "text/html"}:
                data.pop(WIDGET_VIEW, None)


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def refresh(path: Path, check: bool) -> float:
    """Run a notebook, and store it unless it is only checked; how many seconds that took."""
    start = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    run(notebook, path.parent)
    if not check:
        store(notebook, path)
    return time.monotonic() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob(LESSONS)))
    options.add_argument("--check", action="store_true", help="store nothing")
    options.add_argument("--jobs", type=int, default=1, help="how many run side by side (default: %(default)s)")
    chosen = options.parse_args()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        running = {path: pool.submit(refresh, path, chosen.check) for path in chosen.notebooks}
        for path, result in running.items():
            print(path, end=" ", flush=True)
            try:
                print(f"runs, {result.result():.0f} s")
            except CellExecutionError as error:
                pool.shutdown(cancel_futures=True)
                sys.exit(f"was left as it was:\n{error}")


if __name__ == "__main__":
    main()
