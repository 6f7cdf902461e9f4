"""docs/graphs.md: its program runs, computes what the unpipelined function does, and streams what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kitsune_jax as kj

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a source distribution's tests")
def test_the_program_of_the_page() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "docs/graphs.md", "exec"), names)
    arguments = (
        names["params"],
        *(np.asarray(jax.random.normal(k, (m, 64))) for k, m in zip(names["keys"], (1_000, 20_000), strict=False)),
    )
    arguments += names["senders"], names["receivers"]
    function = names["message_passing"]
    plain = getattr(function, "__wrapped__", None)
    assert plain is not None
    got = jax.jit(kj.pipeline(plain, force=True))(*arguments)
    for mine, theirs in zip(got, jax.jit(plain)(*arguments), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    report = kj.explain(kj.pipeline(plain, force=True))(*arguments)
    assert report.coverage == 1.0, report
