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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob(LESSONS)))
    options.add_argument("--check", action="store_true", help="store nothing")
    chosen = options.parse_args()
    for path in chosen.notebooks:
        print(path, end=" ", flush=True)
        start = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        try:
            run(notebook, path.parent)
        except CellExecutionError as error:
            sys.exit(f"was left as it was:\n{error}")
        if not chosen.check:
            store(notebook, path)
        print(f"runs, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
