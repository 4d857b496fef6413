"""Binder: what its builder makes of `binder/`. It reads the files and writes a Dockerfile; nothing is built."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("repo2docker", reason="reads binder/ as Binder does: pip install jupyter-repo2docker")

ROOT = Path(__file__).parent.parent
FILES = ["binder", "environment.yml", "pyproject.toml"]  # where a builder looks


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """What the builder says to a repository with our files."""
    repository = tmp_path_factory.mktemp("repository")
    for name in FILES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, repository / name)
    run = subprocess.run(
        [sys.executable, "-m", "repo2docker", "--no-build", "--debug", "."],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_it_takes_the_environment_of_binder_with_its_python(builder):
    assert "Building conda environment for python=3.12" in builder
    assert 'env update -p ${NB_PYTHON_PREFIX} --file "binder/environment.yml"' in builder


def test_it_installs_memlab_and_starts_with_one_thread(builder):
    assert "RUN ./binder/postBuild" in builder
    assert 'ENV R2D_ENTRYPOINT="${REPO_DIR}/binder/start"' in builder
