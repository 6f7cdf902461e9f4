"""Sums over the rows of more columns than a thread has registers for: the threads of a warp share them out, tile by tile.

Such are the gradients of all biases of a network where one worker takes a tile through its whole backward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.targets.cuda import tiles
from tests.support import checks
from tests.support.cuda_run import Arrangements, Kernel, Subject, arrangements, kernel_cache, subject

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

WIDTHS = (192, 200, 224)  # 200 columns are padded to 224
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-11}


def sums(x: Any, *weights: Any) -> Any:
    """Sums and a maximum over the rows of every layer, and a sum of few columns."""
    first, second, third = (x := jnp.tanh(x @ w) for w in weights)
    return jnp.sum(first, 0), jnp.max(second, 0), jnp.sum(third, 0), jnp.sum(third[:, :8], 0)


@functools.lru_cache(maxsize=2)
def case(dtype: str, rows: int) -> tuple[Subject, Arrangements, list[np.ndarray]]:
    rng = np.random.default_rng(rows)
    shapes = [(rows, 16), *zip((16, *WIDTHS), WIDTHS, strict=False)]
    args = [jnp.asarray(rng.standard_normal(s) / np.sqrt(s[0] if k else 1), dtype) for k, s in enumerate(shapes)]
    of = subject(sums, *args)
    assert len(of.region.sinks) == 4, "the sums did not become sinks of one region"
    return of, arrangements(of), jax.tree.leaves(checks.in_float64(sums, *of.args))


def check(dtype: str, rows: int, arrangement: str) -> None:
    of, found, want = case(dtype, rows)
    kernel = Kernel(of, found[arrangement])
    assert kernel.code.kernel.source.count("fold_rows<") >= 3, "no columns were shared out"
    first, second = kernel(seed=1), kernel(seed=2)
    for k, (a, b, w) in enumerate(zip(first, second, want, strict=True)):
        assert a.tobytes() == b.tobytes(), f"result {k} depends on the schedule"
        off = np.abs(a.astype(np.float64) - w).max()
        # Roundings of the operands of three products, each of at most 1, add up over the rows.
        assert off <= 8 * ROUNDING[dtype] * max(1.0, np.abs(w).max(), rows**0.5), f"result {k} is off by {off:.3g}"


@pytest.mark.parametrize(
    ("dtype", "rows", "arrangement"),
    [
        ("bfloat16", 193, "sm90-vertical-streamed-cluster2-lanes2"),
        ("float16", 1, "sm80-vertical-streamed-cluster1-lanes1"),
        ("float32", 61, "sm90-vertical-streamed-cluster1-lanes1"),
    ],
)
def test_sums_of_many_columns(dtype: str, rows: int, arrangement: str) -> None:
    check(dtype, rows, arrangement)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64, 257])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_every_dtype(dtype: str, rows: int, subtests: Any) -> None:
    for arrangement in case(dtype, rows)[1].names():
        if "vertical" in arrangement and arrangement in case(dtype, rows)[1]:
            with subtests.test(arrangement):
                check(dtype, rows, arrangement)


def test_few_columns_stay_with_their_threads() -> None:
    """A thread keeps its two of eight columns where that takes half of its registers at most: no shuffle then."""
    assert tiles.spread_sums([tiles.MOST_SUM_REGISTERS * 4]) == (False,)
    assert tiles.spread_sums([tiles.MOST_SUM_REGISTERS * 4, 32, 8]) == (True, True, False)
