"""DLRM's interaction as a kernel: as the planner makes it, against float64; and bugs planted in its header, which the emulator or a
wrong result must tell.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import hostcc, runtime
from tests.support.cuda_cases import FAMILIES, interaction
from tests.support.cuda_run import Kernel, arrangements, kernel_cache, subject
from tests.support.planted import Bug

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.usefixtures("kernel_cache"),
]

HEADER = "kitsune/stage/row_product.h"
ROWS = 70


UNORDERED = "race|in flight|nothing has written"
BUGS = {
    "no barrier between copies and products": Bug(r"syncwarp\(\);\n(?=      multiply)", "", UNORDERED),
    "no barrier between products and their use": Bug(r"syncwarp\(\);\n(?=      put)", "", UNORDERED),
    "no wait for copies": Bug(r"cp_async_wait<1>\(\);", "", UNORDERED),
    "one operand in the other slot": Bug(
        r"(?<=X x\(int row\) const \{ return \{base \+ )row % Slots", "(row + 1) % Slots", UNORDERED
    ),
    "addresses of the other rows": Bug(r"lane\.q == 0 \? first : second", "lane.q == 1 ? first : second"),
    "another column": Bug(r"from_bits\(ld_shared\(sums \+ from\)\)", "from_bits(ld_shared(sums + from / 2))"),
}


def example(dtype: str, rows: int) -> tuple[jax.Array, ...]:
    return FAMILIES["interaction-small"].arguments(rows, dtype)


def in_float64(args: tuple[jax.Array, ...]) -> np.ndarray:
    w0, b0, w1, pairs, numbers, ids, *tables = (np.asarray(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a) for a in args)
    w0, b0, w1, numbers, *tables = (a.astype(np.float64) for a in (w0, b0, w1, numbers, *tables))
    x = np.maximum(numbers @ w0 + b0, 0)
    vectors = np.stack([x, *(t[ids[:, i]] for i, t in enumerate(tables))], 1)
    products = np.einsum("bif,bjf->bij", vectors, vectors).reshape(len(x), -1)
    return np.concatenate([x, products[:, pairs]], -1) @ w1


OFTEN = "no barrier between copies and products", "no wait for copies", "another column"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in BUGS])
def test_a_planted_bug_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    args = example("float32", ROWS)
    want = in_float64(args)
    compilers.emulator_library()  # the emulator itself is the real one
    bug.plant(HEADER, tmp_path, monkeypatch)
    of = subject(interaction, *args)
    planted = Kernel(of, arrangements(of)["sm90-vertical-resident-lanes2"])
    if bug.found:
        with pytest.raises(Exception, match=bug.found):
            planted(seed=1)
    else:
        (got,) = planted(seed=1)
        assert np.abs(got - want).max() > 0.05 * np.abs(want).max()


@pytest.mark.parametrize("dtype, rows", [("float32", 131), ("bfloat16", 1)])
def test_a_pipelined_function_runs_it(dtype: str, rows: int) -> None:
    args = example(dtype, rows)
    before = runtime.calls()
    got = np.asarray(jax.jit(kj.pipeline(interaction, target="emulator", force=True, strict=True))(*args))
    report = kj.explain(interaction, target="emulator", force=True)(*args)
    assert runtime.calls() == before + len(report.regions)
    kernels = [[op for stage in region.stages for op in stage.ops] for region in report.regions]
    assert any(ops.count("dot_general") == 3 and ops.count("gather") == 5 for ops in kernels), report
    want = in_float64(args)
    assert np.abs(got - want).max() <= (2.0**-5 if dtype == "bfloat16" else 2.0**-8) * np.abs(want).max()


@pytest.mark.slow
def test_the_planner_makes_a_call_of_dlrms_interaction() -> None:
    """At MLPerf's sizes on the model of an H200."""
    family = FAMILIES["interaction"]
    report = kj.explain(family.function, platform="cuda", device="h200")(*family.shapes(65536, "bfloat16"))
    (region,) = report.regions
    (stage,) = region.stages
    assert {kind: stage.ops.count(kind) for kind in ("dot_general", "gather")} == {"dot_general": 1, "gather": 27}
    assert region.baseline_seconds > 1.5 * region.seconds, report
