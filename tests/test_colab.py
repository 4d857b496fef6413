"""Colab's versions: what `make test-colab` runs the lessons with agrees with what Colab has and with our own bounds.

That the lessons run with them is seen by `make test-colab`, in an environment of its own.
"""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
ON_COLAB = {
    "ipykernel": "6.17.1",
    "ipython": "7.34.0",
    "ipywidgets": "7.7.1",
    "jupyter-client": "7.4.9",
    "matplotlib": "3.10.0",
}


def pins(name):
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text("utf-8"), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in lines}


def test_colabs_own_packages_are_as_on_colab():
    assert pins("constraints-colab.txt").items() >= ON_COLAB.items()


def test_torch_is_that_of_the_tests():
    assert pins("constraints-colab.txt")["torch"] == pins("constraints.txt")["torch"]


def test_our_bounds_let_colabs_packages_stay():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = pins("constraints-colab.txt")
    for text in project["dependencies"] + project["optional-dependencies"]["notebooks"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text
