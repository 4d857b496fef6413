"""For `make test`, where nbval compares each notebook with its stored outputs: the same run is held under the limits.

After a notebook's last cell comes one item more, `limits`: it asks the system about the kernel that ran the cells.
"""

import os
import re
from pathlib import Path

import pytest

MEMORY = 1024  # MiB of the kernel, at its highest: Binder lends 2 GiB, for the kernel and for JupyterLab
SECONDS = 120  # of processor time, which depends little on what else the machine does: a minute on two cores


class Limits(pytest.Item):
    """Whether the kernel that ran a notebook stayed below the limits."""

    def runtest(self) -> None:
        process = Path("/proc") / str(self.parent.kernel.km.provisioner.pid)
        if not process.exists():
            pytest.skip("the system has no /proc, where a process's memory and time could be read")
        # Not `ru_maxrss`, which begins with the memory of the process that started the kernel.
        (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", (process / "status").read_text(), re.MULTILINE)
        mib = int(kib) / 1024
        user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        seconds = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        print(f"{self.parent.path.name}: {mib:.0f} MiB resident at most, {seconds:.0f} s of processor time")
        assert mib < MEMORY, f"{mib:.0f} MiB resident, {MEMORY} allowed"
        assert seconds < SECONDS, f"{seconds:.0f} s of processor time, {SECONDS} allowed"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        return f"{self.parent.path.name}: {excinfo.value}"

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, "limits"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put `limits` behind the last cell of each notebook."""
    last = {item.parent: place for place, item in enumerate(items) if item.path.suffix == ".ipynb"}
    for notebook, place in reversed(last.items()):
        items.insert(place + 1, Limits.from_parent(notebook, name="limits"))
