"""Gradients of every differentiable op of the table, in a pipeline, against JAX in float64 and against finite differences.

A new op of the table fails ``test_every_op_says_whether_it_is_differentiable`` until it has a case in ``gradient_cases``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.spec import FLOATS
from kitsune_jax.ops.table import OPS
from reference.graph import evaluate_numpy
from tests.program.test_build import run_through_interpreter
from tests.support.checks import count, enable_x64
from tests.support.gradient_cases import CASES, NOT_DIFFERENTIABLE, RECENT, Case, differentiates
from tests.support.gradient_checks import check_close

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

Array = Any
Function = Callable[..., Any]
ROWS = (1, 2, 7, 64, 97, 257)
ROUNDINGS = 8
STEP = 1e-5  # of central differences: truncation is about STEP**2, rounding about 2**-52 / STEP

EXPENSIVE = ("igamma", "igammac", "cumlogsumexp")  # XLA takes seconds to compile a derivative of these
HERE = [kind for kind in CASES if kind not in RECENT or differentiates(CASES[kind][0])]
QUICK = [kind for kind in HERE if kind not in EXPENSIVE]
EVERY = [pytest.param(kind, k, id=f"{kind}-{k}") for kind in HERE for k in range(len(CASES[kind]))]
force = functools.partial(kj.pipeline, force=True)


# --- what is differentiated -------------------------------------------------------------------------------------------------------


def objective(case: Case, call: Function) -> Function:
    """(a weighted sum of the results, the results). Every element's gradient differs; the sum is in float32 or wider.

    The results are near 1 in size; the 4 keeps the sum from cancelling.
    """

    def f(mine: list[Array], others: list[Array], weights: Array) -> tuple[Array, Array]:
        y = call(mine, others)
        return jnp.sum((y.astype(jnp.promote_types(y.dtype, jnp.float32)) + 4) * weights), y

    return f


def whole(case: Case, wrap: Function) -> Function:
    """Value and gradient as one pipelined function."""
    return wrap(jax.value_and_grad(objective(case, case.call), has_aux=True))


def network_only(case: Case, wrap: Function) -> Function:
    """The gradient of a pipelined function: its forward and its backward pass are calls of their own."""
    return jax.value_and_grad(objective(case, wrap(case.call)), has_aux=True)


def forward_mode(case: Case, wrap: Function) -> Function:
    call = wrap(case.call)

    def f(mine: list[Array], others: list[Array], weights: Array) -> Any:
        tangents = [jnp.cos(3 * x) for x in mine]
        return jax.jvp(lambda m: call(m, others), (mine,), (tangents,))

    return f


MODES = {f.__name__: f for f in (whole, network_only, forward_mode)}


def arguments(case: Case, dtype: str, rows: int, seed: int = 0) -> tuple[Any, ...]:
    mine, others = case.arguments(rows, dtype, seed)
    shape = jax.eval_shape(case.call, mine, others).shape
    weights = np.random.default_rng(seed + 1).uniform(0.5, 1.5, shape).astype(np.float64 if dtype == "float64" else np.float32)
    return mine, others, weights


def check(case: Case, mode: str, dtype: str, rows: int, pipelined: bool = True) -> None:
    args = arguments(case, dtype, rows)
    compiled = jax.jit(MODES[mode](case, force)).lower(*args).compile()
    assert (count(compiled.as_text()) > 0) == pipelined
    check_close(compiled(*args), MODES[mode](case, lambda f: f), args, case.precision(dtype), ROUNDINGS)


def check_interpreter(case: Case, dtype: str, rows: int, seed: int = 0) -> None:
    args = arguments(case, dtype, rows)
    plain = whole(case, lambda f: f)
    got, regions = run_through_interpreter(plain, *args, seed=seed)
    assert regions, "nothing was pipelined"
    check_close(got, plain, args, case.precision(dtype), ROUNDINGS)


def check_finite_differences(case: Case, rows: int) -> None:
    """Directional derivatives of the op table's own NumPy rules, along random signs."""
    with enable_x64():
        mine, others, weights = arguments(case, "float64", rows)
        compiled = jax.jit(whole(case, force)).lower(mine, others, weights).compile()
        assert count(compiled.as_text()) > 0, "nothing was pipelined"
        _, gradients = compiled(mine, others, weights)
        graph = capture(jax.make_jaxpr(case.call)(mine, others)).graph
    rng = np.random.default_rng(5)

    def total(scale: float, directions: list[np.ndarray]) -> float:
        moved = [x + scale * v for x, v in zip(mine, directions, strict=True)]
        return float(np.sum(evaluate_numpy(graph, [*moved, *others])[0] * weights))

    for k, gradient in enumerate(gradients):
        for _ in range(2):
            signs = [rng.choice([-1.0, 1.0], x.shape) * (i == k) for i, x in enumerate(mine)]
            slope = (total(STEP, signs) - total(-STEP, signs)) / (2 * STEP)
            size = float(np.sqrt(np.sum(np.asarray(gradient) ** 2)))
            assert abs(slope - float(np.sum(np.asarray(gradient) * signs[k]))) <= 1e-6 * max(size, 1.0)


# --- the table --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPS)
def test_every_op_says_whether_it_is_differentiable(kind: str) -> None:
    assert (kind in CASES) != (kind in NOT_DIFFERENTIABLE), (
        f"say whether {kind} is differentiable: give it cases in gradient_cases.CASES, or a reason in NOT_DIFFERENTIABLE"
    )


def test_no_case_is_left_of_an_op_that_is_gone() -> None:
    assert {*CASES, *NOT_DIFFERENTIABLE} <= set(OPS)


@pytest.mark.parametrize("kind", [kind for kind in NOT_DIFFERENTIABLE if set(OPS[kind].dtypes) & set(FLOATS) and OPS[kind].arity])
def test_what_is_said_not_to_be_differentiable_is_not(kind: str) -> None:
    """It gives no floats, or JAX refuses."""
    index = {"axes": (0,), "index_dtype": np.dtype(np.int32)}
    options: dict[str, Any] = {"argmax": index, "argmin": index, "bitcast_convert_type": {"new_dtype": np.dtype(np.int32)}}.get(
        kind, {}
    )
    primitive = getattr(lax, f"{kind}_p")
    operands = [np.full(3, 1.5, np.float32)] * (OPS[kind].arity or 0)
    if not jnp.issubdtype(jax.eval_shape(lambda *xs: primitive.bind(*xs, **options), *operands).dtype, jnp.floating):
        return
    with pytest.raises(NotImplementedError):
        jax.grad(lambda *xs: jnp.sum(primitive.bind(*xs)), tuple(range(len(operands))))(*operands)


@pytest.mark.parametrize("kind", CASES)
def test_the_cases_of_an_op_hold_it(kind: str) -> None:
    kinds: set[str] = set()
    for case in CASES[kind]:
        mine, others = case.arguments(7, "float32", 0)
        kinds |= {
            op.kind
            for op in capture(
                jax.make_jaxpr(case.call)(mine, others), context=RewriteContext(TargetCapabilities(sums_online=True))
            ).graph.ops
        }
    assert kind in kinds


# --- gradients --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUICK)
def test_gradient(kind: str) -> None:
    check(CASES[kind][0], "whole", "float32", rows=37)


@pytest.mark.parametrize("kind", QUICK[::8])
def test_gradient_in_bfloat16(kind: str) -> None:
    check(CASES[kind][-1], "network_only", "bfloat16", rows=97)


@pytest.mark.parametrize("kind", QUICK[2::10])
def test_forward_mode(kind: str) -> None:
    check(CASES[kind][-1], "forward_mode", "float32", rows=7)


@pytest.mark.parametrize("kind", [kind for kind in QUICK[1::8] if not CASES[kind][0].casts])
def test_gradient_against_finite_differences(kind: str) -> None:
    check_finite_differences(CASES[kind][0], rows=37)


@pytest.mark.parametrize("kind", QUICK[3::8])
def test_gradient_in_the_interpreter(kind: str) -> None:
    check_interpreter(CASES[kind][0], "float32", rows=37)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind,k", EVERY)
def test_every_gradient(kind: str, k: int, dtype: str, mode: str) -> None:
    rows = ROWS[(len(kind) + 2 * k + len(dtype) + len(mode)) % len(ROWS)]
    # 16-bit floats are computed in float32, where their neighbours are others: a function of nothing else has no pipeline.
    left_to_xla = kind == "nextafter" and dtype != "float32" and mode != "whole"
    check(CASES[kind][k], mode, dtype, rows, pipelined=not left_to_xla)


@pytest.mark.slow
@pytest.mark.parametrize("kind,k", EVERY)
def test_every_gradient_against_finite_differences(kind: str, k: int) -> None:
    if CASES[kind][k].casts:
        pytest.skip("rounds on its way")
    check_finite_differences(CASES[kind][k], rows=ROWS[(len(kind) + k) % len(ROWS)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind,k", EVERY)
def test_every_gradient_in_the_interpreter(kind: str, k: int, dtype: str) -> None:
    check_interpreter(CASES[kind][k], dtype, rows=ROWS[(len(kind) + 2 * k) % len(ROWS)], seed=k)
