"""What every test shares: a known random stream, a fair share of the cores, and reasons for what is skipped."""

import gc
import os
import shutil

import hypothesis
import pytest

os.environ.setdefault("MPLBACKEND", "Agg")  # figures are drawn to files; no test opens a window

import torch

# Examples are the same in every run, and none fails for being slow: a test that passes here passes there.
hypothesis.settings.register_profile("memlab", derandomize=True, deadline=None)
hypothesis.settings.load_profile("memlab")


def pytest_configure(config):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_collection_finish(session):
    """What is imported by now stays: `memlab.measure` collects garbage, and need not look through all of PyTorch."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("browser") and not shutil.which("chromium"):
        pytest.skip("needs chromium, which is not installed")


@pytest.fixture(autouse=True)
def known_random_stream():
    torch.manual_seed(0)
