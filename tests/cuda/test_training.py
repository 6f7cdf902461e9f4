"""Training steps as CUDA kernels in the emulator: losses and gradients against float64, exact ones against integers, and equal bits
under every schedule with one pipeline instance or several.

The fast part draws a sample in which every dtype, kind of arrangement and awkward number of rows occurs; the slow part has the
square of families and dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kitsune_jax as kj
from kitsune_jax.planning.plan import Plan
from kitsune_jax.targets.cuda import runtime
from tests.support import checks
from tests.support.cuda_cases import DTYPES, Family
from tests.support.cuda_run import Arrangements, Kernel, Subject, arrangements, kernel_cache, subject
from tests.support.cuda_training_cases import TRAINING, integers, relu_step, relu_step_of_integers, residual, squared_error

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROWS = (1, 63, 65, 257)
SMALL = [name for name, family in TRAINING.items() if family.small]
# A rounding of the dtype, of an operand of a product (float32 is multiplied as tf32), in units of the largest result; a few of them
# add up on the way forth and back.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-11}
CHAIN = 8
SEEDS = (1, 2)


@functools.lru_cache(maxsize=4)
def case(name: str, dtype: str, rows: int) -> tuple[Subject, Arrangements, list[np.ndarray]]:
    """The subject, its arrangements, and its results in float64."""
    family = TRAINING[name]
    of = subject(family.function, *family.arguments(rows, dtype))
    assert of.region.space.rows == rows and of.region.sinks, "the step did not become one region over its rows"
    return of, arrangements(of), in_float64(family, of.args)


def in_float64(family: Family, args: tuple[Any, ...]) -> list[np.ndarray]:
    return jax.tree.leaves(checks.in_float64(family.function, *args))


def check_close(got: list[np.ndarray], want: list[np.ndarray], limit: float) -> None:
    """Within ``limit`` of the largest value of each result."""
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape
        off = np.abs(g.astype(np.float64) - w)
        assert off.max() <= limit * np.abs(w).max(), (
            f"result {k} is off by {off.max():.3g} at element {off.argmax()}; the largest is {np.abs(w).max():.3g}"
        )


def check_schedules(kernel: Kernel, seeds: tuple[int, ...]) -> list[np.ndarray]:
    """The results, which must have the same bits under all ``seeds``."""
    first = kernel(seed=seeds[0])
    for seed in seeds[1:]:
        for k, (a, b) in enumerate(zip(first, kernel(seed=seed), strict=True)):
            assert a.tobytes() == b.tobytes(), f"result {k} depends on the schedule: seeds {seeds[0]} and {seed} differ"
    return first


def check(name: str, dtype: str, rows: int, arrangement: str, seeds: tuple[int, ...] = SEEDS) -> None:
    of, found, want = case(name, dtype, rows)
    assert arrangement in found, f"no kernel; there is one for {sorted(found)}"
    check_close(check_schedules(Kernel(of, found[arrangement]), seeds), want, CHAIN * ROUNDING[dtype])


SAMPLE = [
    ("tanh-step", "bfloat16", 257, "sm90-spatial-cluster-lanes1"),
    ("silu-step", "float32", 63, "sm90-vertical-streamed-cluster1-lanes2"),
    ("labels-step", "bfloat16", 257, "sm90-vertical-resident-lanes3"),
    ("binary-step", "bfloat16", 63, "sm80-vertical-streamed-cluster1-lanes1"),
    ("layer-norm-step", "bfloat16", 65, "sm90-vertical-resident-lanes2"),
    ("rms-norm-step", "float32", 257, "sm90-vertical-resident-lanes3"),
    ("softmax-step", "float16", 63, "sm90-spatial-cluster-lanes2"),
    ("skip-step", "bfloat16", 65, "sm90-vertical-resident-lanes2"),
    ("residual-step", "bfloat16", 65, "sm90-spatial-l2-lanes1-split2"),
    ("heads-step", "float32", 65, "sm80-vertical-resident-lanes2"),
    ("regression-step", "bfloat16", 130, "sm90-vertical-streamed-cluster2-lanes2"),
    ("pulled-back", "bfloat16", 1, "sm90-vertical-resident-lanes2"),
]
# Larger kernels, or much like another of the sample.
MORE = [
    ("gelu-step", "bfloat16", 63, "sm90-spatial-l2-lanes1"),
    ("one-hot-step", "float16", 65, "sm90-vertical-streamed-cluster2-lanes1"),
    ("gated-step", "bfloat16", 63, "sm90-vertical-streamed-cluster2-lanes1"),
]


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "arrangement"),
    [*SAMPLE, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda v: str(v),
)
def test_sample(name: str, dtype: str, rows: int, arrangement: str) -> None:
    check(name, dtype, rows, arrangement)


def test_the_sample_has_every_family() -> None:
    assert {name for name, *_ in (*SAMPLE, *MORE)} == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_every_family_in_every_dtype(name: str, dtype: str, rows: int, subtests: Any) -> None:
    """Over all rows every arrangement has its turn."""
    if (name, dtype, rows) == ("pulled-back", "float32", 1):
        pytest.skip("with one row its largest region streams over the 48 columns")
    _, found, _ = case(name, dtype, rows)
    for arrangement in sorted(found)[ROWS.index(rows) :: len(ROWS)]:
        with subtests.test(arrangement=arrangement):
            check(name, dtype, rows, arrangement)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_beyond_the_registers_of_a_lane(dtype: str, subtests: Any) -> None:
    _, found, _ = case("wide-step", dtype, 130)
    assert found, "no kernel"
    for arrangement in sorted(found):
        with subtests.test(arrangement=arrangement):
            check("wide-step", dtype, 130, arrangement, SEEDS[:1])


# --- exact


@functools.lru_cache(maxsize=4)
def of_integers(dtype: str, rows: int) -> tuple[Subject, Arrangements, list[np.ndarray]]:
    args = integers(rows, seed=rows)
    of = subject(relu_step, *(jnp.asarray(a, dtype) for a in args))
    assert of.region.space.rows == rows
    return of, arrangements(of), relu_step_of_integers(*args)


def check_exact(of: Subject, plan: Plan, want: list[np.ndarray], seeds: tuple[int, ...]) -> None:
    """Results are sums of integers, exact until they are rounded to their dtype: a term that is lost or doubled shows."""
    for k, (g, w) in enumerate(zip(check_schedules(Kernel(of, plan), seeds), want, strict=True)):
        assert np.array_equal(g, w.astype(g.dtype)), f"result {k} differs in {np.count_nonzero(g != w.astype(g.dtype))} places"


EXACT = [("bfloat16", 257, "sm90-spatial-l2-lanes1"), ("float32", 65, "sm80-vertical-resident-lanes1")]


@pytest.mark.parametrize(("dtype", "rows", "arrangement"), EXACT, ids=lambda v: str(v))
def test_gradients_of_integers_are_exact(dtype: str, rows: int, arrangement: str) -> None:
    of, found, want = of_integers(dtype, rows)
    check_exact(of, found[arrangement], want, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_integers_are_exact_under_every_arrangement(dtype: str, rows: int, subtests: Any) -> None:
    of, found, want = of_integers(dtype, rows)
    assert len(found) >= 10
    for name, plan in found.items():
        with subtests.test(arrangement=name):
            check_exact(of, plan, want, SEEDS[:1])


# --- several pipeline instances


INSTANCES = [  # of five tiles: with two lanes and three instances one lane has none
    ("sm90-vertical-streamed-cluster2-lanes1", 2),
    ("sm90-vertical-resident-lanes2", 3),
    ("sm90-spatial-l2-lanes1-split2", 2),
]


@pytest.mark.parametrize(("arrangement", "replicas"), INSTANCES)
def test_instances_add_their_gradients_in_a_fixed_order(arrangement: str, replicas: int) -> None:
    """Whichever comes last adds up the parts of all: the bits do not tell which it was."""
    of, found, want = case("tanh-step", "bfloat16", 257)
    kernel = Kernel(of, dataclasses.replace(found[arrangement], replicas=replicas))
    check_close(check_schedules(kernel, (1, 2, 3, 4, 5, 6)), want, CHAIN * ROUNDING["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_arrangement_with_several_instances(dtype: str, replicas: int, subtests: Any) -> None:
    of, found, want = of_integers(dtype, 257)
    for name, plan in found.items():
        with subtests.test(arrangement=name):
            check_exact(of, dataclasses.replace(plan, replicas=replicas), want, SEEDS)


# --- as users call it


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_a_network_that_is_pipelined_alone_has_a_forward_and_a_backward_kernel(residuals: str) -> None:
    """The loss is outside, so that what the backward kernel needs goes through memory, or is computed again."""
    network = TRAINING["residual-step"]
    args = network.arguments(130, "float32")
    pipelined = kj.pipeline(residual, force=True, target="emulator", residuals=residuals)
    step = jax.jit(jax.value_and_grad(functools.partial(squared_error, pipelined), tuple(range(5))))
    before = runtime.calls()
    got = [np.asarray(x) for x in jax.tree.leaves(step(*args))]
    assert runtime.calls() >= before + 2
    check_close(got, in_float64(network, args), CHAIN * ROUNDING["float32"])


def test_the_optimiser_of_a_pipelined_step_runs_in_its_kernel() -> None:
    """AdamW and a cross-entropy with integer labels: one kernel for loss, gradients and updates."""
    rng = np.random.default_rng(0)
    params = {"w": jax.device_put(np.asarray(rng.standard_normal((24, 5)) * 0.2, jnp.float32)), "b": jnp.zeros(5)}
    x, y = jax.device_put(np.asarray(rng.standard_normal((130, 24)), jnp.float32)), jax.device_put(rng.integers(0, 5, 130))
    optimiser = optax.adamw(1e-2)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimiser.init(params)
    for _ in range(2):  # moments that are not zero: the first step of Adam only knows signs
        params, state, _ = jax.jit(step)(params, state, x, y)
    report = kj.explain(kj.pipeline(step, force=True), platform="cuda", device="h200")(params, state, x, y)
    assert report.coverage > 0.85 and len(report.regions) == 1
    before = runtime.calls()
    got = jax.jit(kj.pipeline(step, force=True, target="emulator", strict=True))(params, state, x, y)
    jax.block_until_ready(got)
    assert runtime.calls() == before + 1
    want = jax.jit(step)(params, state, x, y)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=5e-3, atol=2e-4)
