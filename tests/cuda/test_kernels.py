"""Every kernel family under the arrangements it admits, run in the emulator: against float64, and bit for bit against itself under
other schedules.

The fast part draws a sample in which every arrangement, dtype and awkward number of rows occurs; the slow part covers the square of
(family, dtype) and (rows, arrangement).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import lower
from kitsune_jax.targets.cuda import lower as cuda_lower
from tests.support import checks
from tests.support.cuda_cases import DTYPES, FAMILIES, Arg, Family, dense_relu
from tests.support.cuda_run import Arrangements, Kernel, Subject, arrangements, kernel_cache, run, subject
from trust import reference
from trust.primitives import PRIMITIVES

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROWS = (1, 7, 63, 64, 65, 130, 257)
SMALL = [name for name, family in FAMILIES.items() if family.small]
# A rounding of the dtype, of an operand of a product (float32 is multiplied as tf32), in units of the largest result; a few of them
# add up along a chain.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-11}
CHAIN = 8
SEEDS = (1, 2, 3, 4)


@functools.lru_cache(maxsize=8)
def case(name: str, dtype: str, rows: int) -> tuple[Subject, Arrangements, list[np.ndarray]]:
    """The subject, its arrangements, and its results in float64: of float32 arguments with the operands of products as tf32."""
    family = FAMILIES[name]
    of = subject(family.function, *family.arguments(rows, dtype))
    return of, arrangements(of), (in_tf32 if dtype == "float32" else in_float64)(family.function, of.args)


def in_float64(function: Callable[..., Any], args: tuple[Any, ...]) -> list[np.ndarray]:
    return jax.tree.leaves(checks.in_float64(function, *args))


def in_tf32(function: Callable[..., Any], args: tuple[Any, ...]) -> list[np.ndarray]:
    """Where sums cancel, as in front of a ReLU that is mostly 0, the rounding of the operands is large beside the result."""

    def rounded(x: np.ndarray) -> np.ndarray:
        bits = x.astype(np.float32).view(np.uint32) + np.uint32(1 << 12)
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

    plain = PRIMITIVES["dot_general"]
    with mock.patch.dict(PRIMITIVES, dot_general=lambda params, a, b: plain(params, rounded(a), rounded(b))):
        return reference.evaluate(jax.make_jaxpr(function)(*args), args, reference.Arithmetic(widen=True))


def check_close(got: list[np.ndarray], want: list[np.ndarray], limit: float) -> None:
    """Within ``limit`` of the largest value of each result."""
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape
        off = np.abs(g.astype(np.float64) - w)
        assert off.max() <= limit * max(np.abs(w).max(), 1e-3), (
            f"result {k} is off by {off.max():.3g} at element {off.argmax()}; the largest is {np.abs(w).max():.3g}"
        )


def check(name: str, dtype: str, rows: int, arrangement: str, seeds: tuple[int, ...] = SEEDS) -> None:
    of, found, want = case(name, dtype, rows)
    assert arrangement in found, f"no kernel; there is one for {sorted(found)}"
    kernel = Kernel(of, found[arrangement])
    first = kernel(seed=seeds[0])
    check_close(first, want, CHAIN * ROUNDING[dtype])
    for seed in seeds[1:]:
        for k, (a, b) in enumerate(zip(first, kernel(seed=seed), strict=True)):
            assert a.tobytes() == b.tobytes(), f"result {k} depends on the schedule: seeds {seeds[0]} and {seed} differ"


SAMPLE = [
    ("dense", "bfloat16", 257, "sm90-spatial-cluster-lanes1"),
    ("mlp", "bfloat16", 130, "sm90-vertical-streamed-cluster2-lanes2"),
    ("mlp", "float16", 257, "sm80-spatial-l2-lanes2"),
    ("mlp", "float32", 65, "sm90-vertical-resident-lanes3"),
    ("nerf-small", "float16", 65, "sm90-spatial-cluster-lanes2"),
    ("nerf-small", "bfloat16", 1, "sm80-vertical-resident-lanes2"),
    ("edge-update-small", "float32", 257, "sm90-spatial-l2-lanes1"),
    ("edge-phase-small", "bfloat16", 257, "sm90-vertical-resident-lanes2"),
    ("edge-phase-small", "bfloat16", 257, "sm90-vertical-resident-lanes2-unordered"),
    ("heads", "float32", 130, "sm80-vertical-resident-lanes1-unordered"),
    ("edge-phase-small", "float16", 65, "sm90-spatial-cluster-lanes1"),
    ("interaction-small", "bfloat16", 257, "sm90-vertical-resident-lanes2"),
    ("interaction-small", "float16", 65, "sm90-spatial-cluster-lanes1"),
    ("interaction-small", "float32", 130, "sm80-spatial-l2-lanes2"),
    ("heads", "bfloat16", 257, "sm90-vertical-resident-lanes3"),
    ("swiglu-small", "float16", 130, "sm90-spatial-cluster-lanes3"),
    ("loss", "bfloat16", 257, "sm90-spatial-l2-lanes1-split2"),
    ("loss", "float32", 130, "sm90-vertical-streamed-cluster2-lanes3"),
    ("loss", "bfloat16", 1, "sm90-vertical-resident-lanes1"),
    ("softmax", "bfloat16", 65, "sm90-vertical-resident-lanes3"),
    ("rms-norm", "float16", 130, "sm90-vertical-resident-lanes1"),
    ("activations", "bfloat16", 65, "sm90-spatial-l2-lanes3"),
    ("mixed", "bfloat16", 130, "sm90-spatial-cluster-lanes1"),
    ("diamond", "bfloat16", 65, "sm90-vertical-resident-lanes2"),
]

# Much like others of the sample.
MORE = [
    ("dense", "float32", 7, "sm80-vertical-streamed-cluster1-lanes1"),
    ("nerf-small", "bfloat16", 257, "sm90-vertical-streamed-cluster2-lanes1"),
    ("edge-update-small", "bfloat16", 130, "sm90-vertical-resident-lanes2"),
    ("edge-phase-small", "float32", 130, "sm80-vertical-streamed-cluster1-lanes1"),
    ("interaction-small", "float32", 63, "sm90-vertical-streamed-cluster2-lanes1"),
    ("heads", "float32", 63, "sm80-vertical-resident-lanes2"),
    ("swiglu-small", "bfloat16", 63, "sm90-vertical-streamed-cluster1-lanes2"),
    ("loss", "float16", 63, "sm80-vertical-streamed-cluster1-lanes3"),
    ("activations", "float32", 130, "sm90-vertical-streamed-cluster1-lanes1"),
    ("diamond", "float32", 63, "sm90-vertical-streamed-cluster1-lanes3"),
    ("mixed", "float16", 7, "sm80-spatial-l2-lanes1"),
    ("softmax", "float32", 257, "sm80-vertical-resident-lanes1"),
]


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "arrangement"),
    [*SAMPLE, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda v: str(v),
)
def test_sample(name: str, dtype: str, rows: int, arrangement: str) -> None:
    check(name, dtype, rows, arrangement)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_every_family_in_every_dtype(name: str, dtype: str, rows: int) -> None:
    """Over all rows every arrangement has its turn."""
    if dtype not in FAMILIES[name].dtypes:
        pytest.skip("the family says its own dtypes")
    _, found, _ = case(name, dtype, rows)
    failures = []
    for arrangement in sorted(found)[ROWS.index(rows) :: len(ROWS)]:
        try:
            check(name, dtype, rows, arrangement)
        except Exception as e:  # all of them are told, not the first alone
            failures.append(f"{arrangement}: {e}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("arrangement", ["sm90-vertical-resident-lanes1", "sm80-vertical-resident-lanes1"])
def test_float32_weights_are_rounded_to_the_nearest_tf32(arrangement: str) -> None:
    """Cut off, as the tensor core does it, a layer's products would all be too small, and so would the next layer's."""
    x, w = np.eye(64, dtype=np.float32), np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    of = subject(lambda x, w: jax.nn.relu(x @ w) + 0 * x, x, w)
    (got,) = run(of, arrangements(of)[arrangement])
    assert got.tobytes() == np.maximum(np.asarray(jax.lax.reduce_precision(w, 8, 10)), 0).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.small])
def test_every_large_family(name: str, dtype: str) -> None:
    _, found, _ = case(name, dtype, 130)
    assert found, "no kernel"
    failures = []
    for arrangement in sorted(found):
        try:
            check(name, dtype, 130, arrangement, SEEDS[:2])
        except Exception as e:
            failures.append(f"{arrangement}: {e}")
    assert not failures, "\n".join(failures)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_families_admit_what_their_kind_should(name: str, dtype: str) -> None:
    """A plan that silently loses its kernel would lose its tests."""
    if dtype not in FAMILIES[name].dtypes:
        pytest.skip("the family says its own dtypes")
    of, found, _ = case(name, dtype, 65)
    kinds = {"sm90-vertical-resident-lanes1", "sm80-vertical-resident-lanes1"}
    if any(of.graph.ops[i].kind == "dot_general" for i in of.region.ops):
        kinds |= {"sm90-vertical-streamed-cluster1-lanes1", "sm90-vertical-streamed-cluster2-lanes1"}
        kinds |= {"sm80-vertical-streamed-cluster1-lanes1"}
    if (name, dtype) != ("dense", "float32") and kinds >= {"sm90-vertical-streamed-cluster1-lanes1"}:
        kinds |= {"sm90-spatial-cluster-lanes1", "sm90-spatial-l2-lanes1", "sm80-spatial-l2-lanes1"}
    assert kinds <= set(found)


EXACT = Family("exact", dense_relu, (Arg((32, 64)), Arg((64,)), Arg((-1, 32))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", ["sm90", "sm80"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_multiplied_exactly(dtype: str, sm: str) -> None:
    """Sums of 32 products of integers up to 2 are representable in every dtype: any lost or doubled term shows."""
    rng = np.random.default_rng(5)
    args = tuple(jax.device_put(np.asarray(rng.integers(-2, 3, a.shape), dtype)) for a in EXACT.arguments(130, dtype))
    of = subject(dense_relu, *args)
    (got,) = run(of, arrangements(of)[f"{sm}-vertical-resident-lanes2"])
    wide = [np.asarray(a).astype(np.int64) for a in args]
    assert np.array_equal(got.astype(np.int64), np.maximum(wide[2] @ wide[0] + wide[1], 0))


def test_more_instances_than_tiles_and_fewer() -> None:
    """Workers without a tile take part in the last sum all the same."""
    of, found, want = case("loss", "bfloat16", 257)
    for replicas in (2, 3, 16):
        plan = dataclasses.replace(found["sm90-vertical-resident-lanes2"], replicas=replicas)
        check_close(run(of, plan, seed=replicas), want, CHAIN * ROUNDING["bfloat16"])


def test_a_cluster_of_more_than_the_portable_eight_ctas() -> None:
    rng = np.random.default_rng(5)
    weights = [jax.device_put(np.asarray(rng.standard_normal((16, 16)) / 4, jnp.float32)) for _ in range(12)]
    x = jax.device_put(np.asarray(rng.standard_normal((130, 16)), jnp.float32))

    def chain(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        return functools.reduce(lambda h, w: jnp.tanh(h @ w), ws, x)

    of = subject(lambda *args: chain(list(args[:-1]), args[-1]), *weights, x)
    plan = arrangements(of)["sm90-spatial-cluster-lanes1"]
    assert plan.cluster > 8
    expected = functools.reduce(lambda h, w: np.tanh(h @ np.asarray(w, np.float64)), weights, np.asarray(x, np.float64))
    (got,) = run(of, plan)
    np.testing.assert_allclose(got, expected, atol=12 * CHAIN * ROUNDING["float32"] * np.abs(expected).max())


def test_where_a_function_stands_does_not_change_its_kernel() -> None:
    """Else a line added above it would be a new compilation."""
    of, found, _ = case("mlp", "bfloat16", 65)
    plan = next(iter(found.values()))
    one, other = (
        cuda_lower.generate("emulator", Program.of(of.program(plan)), [plan], f"region0 (model.py:{line})") for line in (12, 13)
    )
    assert one.kernel.source == other.kernel.source and one.image == other.image
    assert one.name != other.name


def test_a_check_prints_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are compared by their layouts, and only the source of the chosen one is read."""
    of, found, _ = case("mlp", "bfloat16", 193)
    plan = next(iter(found.values()))
    lower._layout_or_reason.cache_clear()
    lower._printed.cache_clear()
    printed = list[str]()
    source = lower.print_kernel.source
    monkeypatch.setattr(lower.print_kernel, "source", lambda at, kinds: printed.append(at.name) or source(at, kinds))
    assert lower.check(of.program(plan), plan, "checked") is None and printed == []
    for _ in range(2):
        assert lower._cached_kernel(Program.of(of.program(plan)), (plan,), "checked").source
    assert printed == ["checked"]


def test_a_plan_that_does_not_fit_is_refused() -> None:
    """256 KiB of weights do not stay in the shared memory of a CTA, whatever a plan says."""
    family = FAMILIES["wide"]
    of = subject(family.function, *family.arguments(65, "bfloat16"))
    (streamed, *_) = (plan for plan in arrangements(of).values() if plan.arrangement == "vertical")
    resident = dataclasses.replace(streamed, stages=(dataclasses.replace(streamed.stages[0], resident=True),), cluster=1)
    reason = lower.check(of.program(resident), resident, "region")
    assert reason is not None and "in shared memory; a CTA has" in reason
