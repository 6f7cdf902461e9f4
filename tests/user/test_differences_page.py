"""docs/differences.md: every example runs on its own and shows what its section says of a pipeline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
TEXT = PAGE.read_text() if PAGE.exists() else ""
INTRODUCTION, *SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
TITLES = [section.splitlines()[0] for section in SECTIONS]
WITHOUT_EXAMPLE = ["On a GPU"]

pytestmark = pytest.mark.skipif(not TEXT, reason="the documentation is not part of a source distribution's tests")


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("title", [title for title in TITLES if title not in WITHOUT_EXAMPLE])
def test_example(title: str) -> None:
    names: dict[str, Any] = {}
    (shared,), (example,) = blocks(INTRODUCTION), blocks(SECTIONS[TITLES.index(title)])
    assert "assert" in example
    for code in (shared, example):
        exec(compile(code, f"docs/differences.md: {title}", "exec"), names)


def test_the_table_names_every_section_with_an_example() -> None:
    anchors = re.findall(r"\]\(#([\w-]+)\)", INTRODUCTION)
    assert anchors == [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in TITLES if title not in WITHOUT_EXAMPLE]
