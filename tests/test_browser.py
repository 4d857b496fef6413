"""Explorers and lessons under a person's hands: JupyterLab in headless Chromium, moved with the keyboard alone.

Screenshots are left in `browser-artifacts/`, to be looked at.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab", reason="the explorers are driven in JupyterLab")
pytest.importorskip("nbformat", reason="notebooks are written with nbformat")
pytest.importorskip("playwright.sync_api", reason="Chromium is driven by Playwright: pip install playwright")

import nbformat
from lessons import LESSONS, every_lesson
from playwright import sync_api

from memlab.notebook.explorer import explore

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent
ARTEFACTS = ROOT / "browser-artifacts"
SECONDS = 60  # for anything to appear: kernels start slowly on a busy machine

SIZES = {"depth": (2, 6), "width": [64, 128], "context": [64], "batch": (8, 64)}
NOTEBOOKS = {
    "explore": f"from memlab.notebook.explorer import explore\nexplore(budget='8 MiB', **{SIZES})",
    "mistake": "from memlab.notebook.explorer import explore\nexplore(depht=(2, 6))",
    "checkpointing": "from memlab.notebook.schedule import explore_checkpointing\nexplore_checkpointing(blocks=6)",
}
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # all cells are on the page, also those out of sight
}


# -- JupyterLab and the browser ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab that serves the notebooks, with folders of its own for all that it writes."""
    home = tmp_path_factory.mktemp("lab")
    for name, cell in NOTEBOOKS.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)], metadata=KERNEL)
        nbformat.write(notebook, home / f"{name}.ipynb")
    for lesson in LESSONS:
        nbformat.write(without_outputs(lesson.path), home / lesson.path.name)
    for name, text in SETTINGS.items():
        settings = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        settings.parent.mkdir(parents=True)
        settings.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    own = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    own |= {"IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": str(ROOT), "JUPYTER_TOKEN": token}
    own |= {"OMP_WAIT_POLICY": "passive"}  # threads that wait take no core from the browser
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--ServerApp.root_dir={home}", "--ServerApp.port_retries=0"]
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | own, cwd=home, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(f"{address}/api/status?token={token}"), home / "lab.log")
        yield f"{address}/lab/tree/{{}}.ipynb?reset&token={token}"
    finally:
        server.terminate()  # it shuts its kernels down
        server.wait(30)


def without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def answers(address):
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as reply:
        return reply.status == 200
    return False


def wait_for(condition, log=None):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, log.read_text() if log else "nothing happens"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(lab, chromium, request):
    """`opened(name)`: the page with that notebook, all cells started. How it looked at the end is kept."""
    ARTEFACTS.mkdir(exist_ok=True)
    context = chromium.new_context(viewport={"width": 1400, "height": 1500})
    context.set_default_timeout(SECONDS * 1000)

    def open_and_run(name):
        page = context.new_page()
        page.goto(lab.format(name))
        run_all(page)
        return page

    yield open_and_run
    for page in context.pages:
        page.screenshot(path=ARTEFACTS / f"{request.node.name}.png")
    context.close()


def run_all(page):
    """Run the cells; again where JupyterLab, not yet in touch with the kernel, has lost the request or asks for one."""
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    started = page.locator(".jp-InputArea-prompt").filter(has_text=re.compile(r"\[\d+\]"))
    started = started.or_(page.get_by_text("Python 3 (ipykernel) | Busy"))  # not [*]: a lost request leaves it behind
    for _ in range(10):
        if page.locator(".jp-Dialog").count():
            page.keyboard.press("Enter")
        else:
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_text("Run All Cells", exact=True).click()
        with contextlib.suppress(sync_api.TimeoutError):
            started.first.wait_for(timeout=5000)
            return


class Shown:
    """An explorer on a page: what it says, which picture it shows, and its controls by their labels."""

    def __init__(self, page):
        self.page = page
        self.panel = page.locator(".jp-OutputArea-output").filter(has=page.locator("img"))
        self.panel.wait_for()

    @property
    def text(self):
        return self.panel.inner_text()

    @property
    def picture(self):
        """What the picture is: its bytes' sum."""
        return hashlib.sha256(bytes(self.panel.locator("img").evaluate(BYTES_OF))).hexdigest()

    def says(self, *sentences):
        """Wait until it says them."""
        for sentence in sentences:
            self.panel.get_by_text(sentence).first.wait_for()

    def control(self, label, part):
        row = self.panel.locator(".widget-inline-hbox").filter(has=self.page.get_by_text(label, exact=True))
        return row.locator(part)

    def press(self, label, part, *keys):
        """Reach a control, and use the keyboard on it."""
        self.control(label, part).focus()
        for key in keys:
            self.page.keyboard.press(key)

    def shot(self, name):
        self.page.screenshot(path=ARTEFACTS / f"{name}.png")


BYTES_OF = "async image => Array.from(new Uint8Array(await (await fetch(image.src)).arrayBuffer()))"
SLIDER, BOX, LIST, FIELD = "[role=slider]", "[type=checkbox]", "select", "input"


# -- the explorers -----------------------------------------------------------------------------------------------------


def expected(**values):
    """What the explorer says of these values where no page is between: the first two lines."""
    panel = explore(budget="8 MiB", **SIZES)
    with panel.hold():
        for name, value in values.items():
            panel.controls[name].value = value
    return panel.text.splitlines()[:2]


def test_sliders_and_switches_answer_to_the_keyboard(opened):
    shown = Shown(opened("explore"))
    shown.says(*expected())
    pictures = [shown.picture]
    shown.shot("explore-1-plain")

    shown.press("batch", SLIDER, "Home")
    shown.says(*expected(batch=8))
    pictures.append(shown.picture)

    shown.press("checkpoint every block", BOX, "Space")
    shown.says(*expected(batch=8, checkpoint=True))
    pictures.append(shown.picture)
    shown.shot("explore-2-checkpoint")

    shown.press("precision", LIST, "Space", "ArrowDown", "Enter")
    shown.says(*expected(batch=8, checkpoint=True, precision="bf16 autocast"))
    pictures.append(shown.picture)

    shown.press("micro-batches", SLIDER, "ArrowRight", "ArrowRight")
    shown.says(*expected(batch=8, checkpoint=True, precision="bf16 autocast", micro_batches=4))
    pictures.append(shown.picture)
    shown.shot("explore-3-sum")

    shown.press("device memory", FIELD, "Control+A", "4", "0", "Space", "G", "i", "B", "Enter")
    shown.says("Fits in 40 GiB")
    assert len(set(pictures)) == len(pictures)
    assert "simulating" not in shown.text


def test_the_newest_of_many_requests_is_answered(opened):
    shown = Shown(opened("explore"))
    shown.press("depth", SLIDER, "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight")
    shown.says(*expected(depth=6))
    time.sleep(2)  # were an older one still waiting, it would come now
    shown.says(*expected(depth=6))


def test_a_choice_that_cannot_run_keeps_the_controls(opened):
    shown = Shown(opened("explore"))
    shown.press("micro-batches", SLIDER, "ArrowRight")
    shown.press("optimizer in backward", BOX, "Space")
    shown.says("This choice cannot run.", "MicroBatch(count=2) + OptimizerInBackward() cannot be combined")
    shown.shot("explore-4-cannot-run")
    shown.press("device memory", FIELD, "Control+A", "m", "u", "c", "h", "Enter")
    shown.press("optimizer in backward", BOX, "Space")
    shown.says("'much' is no number of bytes", "2 micro-batches of 32: a peak of")
    shown.shot("explore-5-no-number")
    assert "Traceback" not in shown.page.locator(".jp-Notebook").inner_text()


def test_a_wrong_slider_is_named_in_the_cell(opened):
    page = opened("mistake")
    page.get_by_text("has no argument depht: its arguments are depth, width, context").first.wait_for()
    page.screenshot(path=ARTEFACTS / "explore-6-mistake.png")


def test_checkpoints_are_toggled_with_the_keyboard(opened):
    try:
        from memlab.notebook.schedule import explore_checkpointing
    except ImportError as error:
        pytest.skip(f"there is no explorer of checkpoints: {error}")
    panel = explore_checkpointing(blocks=6)
    shown = Shown(opened("checkpointing"))
    shown.says(panel.text.splitlines()[0])
    pictures = [shown.picture]

    shown.page.get_by_role("button", name="2", exact=True).press("Space")
    panel.toggles[2].value = True
    shown.says(panel.text.splitlines()[0])
    pictures.append(shown.picture)
    shown.shot("checkpointing-1-one-block")

    shown.press("instant", SLIDER, "Home")
    panel.instant.value = 0
    shown.says(*panel.text.splitlines()[:2])
    pictures.append(shown.picture)

    shown.page.get_by_role("button", name="best", exact=True).press("Space")
    panel.buttons["best"].click()
    shown.says(panel.text.splitlines()[0])
    shown.shot("checkpointing-2-best")
    assert len(set(pictures)) == len(pictures)


def test_it_can_be_read_on_a_dark_page_and_a_narrow_one(opened):
    shown = Shown(opened("explore"))
    shown.says(*expected())
    shown.page.get_by_role("menuitem", name="Settings", exact=True).click()
    shown.page.get_by_text("Theme", exact=True).hover()
    shown.page.get_by_text("JupyterLab Dark", exact=True).click()
    shown.page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    shown.page.locator("#jupyterlab-splash").wait_for(state="detached")
    shown.page.set_viewport_size({"width": 900, "height": 1500})
    shown.shot("explore-7-dark-narrow")
    overflow = shown.panel.evaluate("panel => panel.scrollWidth - panel.clientWidth")
    assert overflow <= 0, f"{overflow} pixels are out of sight"


# -- the lessons -------------------------------------------------------------------------------------------------------

A_LESSON = 240  # seconds at most: a quarter of it in peace, but other tests run beside it
ERRORS = "[data-mime-type$='jupyter.error'], [data-mime-type$='jupyter.stderr']"


def seen(explorer):
    """What an explorer says and shows."""
    return explorer.inner_text(), explorer.locator("img").first.get_attribute("src")


@every_lesson
def test_a_lesson_runs_from_top_to_bottom(opened, lesson):
    page = opened(lesson.path.stem)
    last = page.get_by_text(f"[{len(lesson.code)}]:", exact=True)
    last.or_(page.locator(ERRORS)).first.wait_for(timeout=A_LESSON * 1000)
    assert not page.locator(ERRORS).all_inner_texts()

    explorers = page.locator(".jp-OutputArea-output").filter(has=page.locator(SLIDER)).all()
    assert len(explorers) == sum(bool(re.search(r"\bexplore\w*\(", cell.source)) for cell in lesson.code)
    for explorer in explorers:
        before = seen(explorer)
        explorer.locator(SLIDER).first.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")  # not where it began, unless that was the second place
        page.keyboard.press("ArrowRight")
        wait_for(lambda explorer=explorer, before=before: seen(explorer) != before)

    cells = page.locator(".jp-Notebook .jp-Cell")
    height = sum(box["height"] for cell in cells.all() if (box := cell.bounding_box()))
    page.set_viewport_size({"width": 1400, "height": min(int(height) + 300, 15_000)})  # for the picture of the whole
    cells.first.scroll_into_view_if_needed()
