"""Point every link to the repository at another one, such as a teacher's fork.

    python notebooks/links.py owner/name     # or: make release-links REPO=owner/name

The badges and the set-up cell of each notebook, and every address in the other files, name the repository. Which name
that is now stands in the README, which is rewritten last: a run that was interrupted can be repeated.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUFFIXES = {".ipynb", ".md", ".py", ".toml", ".yaml", ".yml"}
MADE = {
    "build",
    "demo",
    "dist",
    "browser-artifacts",
}  # not ours to rewrite; nor are folders with a dot, but for .github
NAME = r"[A-Za-z0-9][A-Za-z0-9-]*/[\w.-]*[A-Za-z0-9]"
PLACES = r"(?:colab\.research\.google\.com/github|mybinder\.org/v2/gh|github\.com)/"


def repository(root: Path = ROOT) -> str:
    """The `owner/name` that the project's links point at."""
    badge = re.search(rf"colab\.research\.google\.com/github/({NAME})/blob/", (root / "README.md").read_text("utf-8"))
    if not badge:
        sys.exit("README.md has no link to Colab, from which the repository's name is read")
    return badge[1]


def files(root: Path) -> Iterator[Path]:
    """The files that may name the repository, the README last."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name not in MADE and (name[0] != "." or name == ".github"))
        for name in sorted(names):
            path = Path(folder) / name
            if path.suffix in SUFFIXES and path != root / "README.md":
                yield path
    yield root / "README.md"


def point_at(new: str, root: Path = ROOT) -> list[Path]:
    """Rewrite the links below `root`; returns the files that changed."""
    if not re.fullmatch(NAME, new):
        sys.exit(f"{new!r} is no repository: write owner/name, as in the address github.com/owner/name")
    old = re.compile(rf"({PLACES}){re.escape(repository(root))}(?![\w-])(?!\.(?!git\b)\w)")
    changed = []
    for path in files(root):
        text = path.read_bytes().decode("utf-8")  # as bytes, so that line ends stay
        if (rewritten := old.sub(rf"\g<1>{new}", text)) != text:
            path.write_bytes(rewritten.encode("utf-8"))
            changed.append(path)
    return changed


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("which repository? make release-links REPO=owner/name")
    for path in point_at(sys.argv[1]):
        print(path.relative_to(ROOT))
    print(f"links point at {repository()}")


if __name__ == "__main__":
    main()
