"""Run notebooks in place, so that what they store is what they print.

    python notebooks/execute.py [notebook ...]      # without arguments: all that lie beside this file or below it

Each runs from top to bottom in a fresh kernel, in its own folder. What would differ in every run and says nothing is
left out: times of execution, the state and the random numbers of widgets, the version of Python. A notebook that raises
an error where none is expected stays as it was, and the exit status says so.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def execute(path: Path) -> None:
    """Run one notebook and store it."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": path.parent}},
        record_timing=False,
        store_widget_state=False,
    )
    client.execute()
    clean(notebook)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


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


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or sorted(
        path for path in HERE.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
    )
    for path in paths:
        print(path, flush=True)
        try:
            execute(path)
        except CellExecutionError as error:
            sys.exit(f"{path} was left as it was:\n{error}")


if __name__ == "__main__":
    main()
