"""The folder of the examples, and a fixture for tests that import from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True, scope="module")
def examples_on_the_path() -> Iterator[None]:
    """``python examples/x.py`` puts the folder there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield
