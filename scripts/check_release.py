"""Check that every place that names the version of a release names the same one.

Comes in: CHANGELOG.md, pyproject.toml, CITATION.cff and ``kitsune_jax.__version__`` of a source tree, and the tags of its commit.
Goes out: a line for each disagreement, and the exit status 1 if there is any. Run it before and after a release is tagged::

    python scripts/check_release.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def versions(root: Path) -> dict[str, str]:
    """The version by the place that names it: the newest released one of the changelog. "" where a place names none."""

    def first(file: str, pattern: str) -> str:
        found = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else ""

    return {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("version", ""),
        "kitsune_jax.__version__": first("kitsune_jax/config.py", r'^__version__ = "(.*)"$'),  # not imported: it need not be built
        "CITATION.cff": first("CITATION.cff", r'^version: "?([^"\s]*)"?$'),
        "CHANGELOG.md": first("CHANGELOG.md", r"^## \[?v?(\d[^\]\s]*)"),
    }


def tags(root: Path) -> list[str]:
    """The tags of the commit that is checked out: none in an unpacked source distribution."""
    if not (root / ".git").exists():
        return []
    command = ["git", "-C", str(root), "tag", "--points-at", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def disagreements(root: Path, tagged: Sequence[str]) -> list[str]:
    """A sentence for each place that does not name the version of ``pyproject.toml``. ``tagged``: the tags of the commit; those of
    releases are a version with or without a ``v``."""
    found = versions(root)
    wanted = found["pyproject.toml"]
    releases = {f"the tag {tag}": tag.removeprefix("v") for tag in tagged if re.match(r"v?\d", tag)}
    wrong = [
        f"{place} says {version or 'nothing'}, pyproject.toml {wanted}"
        for place, version in {**found, **releases}.items()
        if version != wanted
    ]
    changes = re.search(r"^## \[?Unreleased\]?\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M | re.S)
    if releases and changes and changes[1].strip():
        wrong.append("CHANGELOG.md has changes under Unreleased, and the commit is tagged as a release")
    return wrong


def main() -> int:
    wrong = disagreements(ROOT, tags(ROOT))
    print(*(wrong or [f"every place says {versions(ROOT)['pyproject.toml']}"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
