"""Time loops from a user's function to a kernel in the emulator: planned, chosen, and the numbers of ``jax.jit``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from kitsune_jax.targets.cuda.stage import fitting
from tests.support import cuda_recurrent_cases
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import Kernel, Subject, arrangements, kernel_cache

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")


def draw(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jax.device_put(np.asarray(0.3 * np.random.default_rng(seed).standard_normal(shape), dtype))


def cart_pole(state: Any, actions: jax.Array) -> Any:
    def step(state: Any, action: jax.Array) -> Any:
        x, v, angle, turn = state
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * turn**2 * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = push - 0.05 * bend * cos / 1.1
        state = x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend
        return state, (state[0], jnp.abs(state[0]) < 2.4)

    return jax.lax.scan(step, state, actions)


def lstm(weights: Any, state: Any, xs: jax.Array) -> Any:
    w, u, b = weights

    def step(state: Any, x: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, state, xs)


def policy(w1: jax.Array, w2: jax.Array, state: jax.Array) -> jax.Array:
    def step(_: Any, s: jax.Array) -> jax.Array:
        return s + 0.02 * jnp.concatenate([s[:, 1:], jnp.tanh(jnp.tanh(s @ w1) @ w2)], 1)

    return jax.lax.fori_loop(0, 5, step, state)


def nested(x: jax.Array) -> jax.Array:
    inner = lambda c: jax.lax.fori_loop(0, 3, lambda k, y: jnp.sin(y) + k.astype(jnp.float32), c)  # noqa: E731
    return jax.lax.scan(lambda c, t: (inner(c) * t, None), x, jnp.arange(3.0))[0]


def backwards(state: jax.Array, xs: jax.Array) -> Any:
    return jax.lax.scan(lambda c, x: (0.5 * c + x, c), state, xs, reverse=True)


def scalars(x: jax.Array, y: jax.Array) -> Any:
    return jax.lax.fori_loop(0, 9, lambda _, c: (0.9 * c[0] + c[1], jnp.sin(c[0])), (x, y))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cart_pole": (cart_pole, (tuple(draw(131, seed=k) for k in range(4)), jnp.arange(7 * 131).reshape(7, 131) % 3)),
    "lstm": (lstm, ((draw(9, 32), draw(8, 32, seed=1), draw(32, seed=2)), (draw(70, 8), draw(70, 8, seed=3)), draw(4, 70, 9))),
    "policy": (policy, (draw(4, 40), draw(40, 1, seed=1), draw(130, 4, seed=2))),
    "nested": (nested, (draw(70, 5),)),
    "backwards": (backwards, (draw(70, 3), draw(5, 70, 3, seed=1))),
    "one_step": (backwards, (draw(1, 3), draw(1, 1, 3, seed=1))),
    "scalars": (scalars, (jnp.float32(0.3), jnp.float32(0.2))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_is_one_kernel(name: str) -> None:
    function, args = CASES[name]
    pipelined = jax.jit(kj.pipeline(function, target="emulator", force=True))
    before = runtime.calls()
    got, want = jax.block_until_ready(pipelined(*args)), jax.jit(function)(*args)
    assert runtime.calls() == before + 1
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (g, w)), atol=2e-3)


@pytest.mark.parametrize(
    "function, args, gain",
    [
        (cart_pole, (tuple(draw(65536) for _ in range(4)), jnp.zeros((100, 65536), jnp.int32)), 10),
        (lstm, ((draw(64, 256), draw(64, 256), draw(256)), (draw(8192, 64), draw(8192, 64)), draw(10, 8192, 64)), 1.5),
        (scalars, (jnp.float32(0.3), jnp.float32(0.2)), 3),
    ],
)
def test_loops_are_chosen_where_the_model_says_that_they_pay(function: Callable[..., Any], args: Any, gain: float) -> None:
    report = kj.explain(kj.pipeline(function), platform="cuda")(*args)
    (region,) = report.regions
    assert report.coverage == 1.0
    assert region.baseline_seconds / region.seconds > gain


def test_an_op_of_the_body_without_code_is_told_with_its_line() -> None:
    def step(c: jax.Array, x: jax.Array) -> Any:
        return c + jnp.cumsum(x, 1), None

    report = str(kj.explain(kj.pipeline(lambda c, xs: jax.lax.scan(step, c, xs)[0]), platform="cuda")(draw(70, 3), draw(5, 70, 3)))
    assert "cumsum" in report and "test_scans.py" in report and "no code on the GPU" in report


WIDE_LSTM = jax.grad(functools.partial(cuda_recurrent_cases.loss, cuda_recurrent_cases.lstm), (0, 1, 2))


def lstm_arguments(rows: int, steps: int, hidden: int) -> list[tuple[int, ...]]:
    return [(hidden, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,), (rows, hidden), (rows, hidden), (steps, rows, hidden)]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_carries_of_three_lanes_that_become_images(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lanes have few registers: what the loop carries lies in shared memory, and is written over in each step."""
    args = [draw(*shape, seed=k, dtype=dtype) for k, shape in enumerate(lstm_arguments(203, 3, 64))]
    captured = capture(
        jax.make_jaxpr(WIDE_LSTM)(*args),
        context=RewriteContext(TargetCapabilities(divides_gradients=True, runs_loops=True, sums_online=True, sums_by_batch=False)),
    )
    first_loop = route(captured.graph, "cuda", RouteOptions(device="h200", code=False, force=True, merge=False)).regions[0]
    assert not first_loop.region.sinks
    of = Subject(captured, first_loop.region, tuple(args))
    plan = arrangements(of)["sm90-vertical-resident-lanes3"]
    run = Kernel(of, plan)
    first, again = run(seed=0), run(seed=1)
    want = in_float64(WIDE_LSTM, *args)
    for g, other, w in zip(first, again, want, strict=True):
        assert np.abs(g.astype(np.float64) - w).max() < 3e-2 * np.abs(w).max() and g.tobytes() == other.tobytes()
    monkeypatch.setattr(fitting, "_CARRIED_MARGINS", (0,))
    program = of.program(plan)
    assert lower.generate_kernel(program, arrangement_of(plan, program), "region").source != run.code.kernel.source


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("dtype, spilled", [("bfloat16", (192, 532)), ("float16", (128, 220))])
def test_the_machine_code_of_carries_of_three_lanes(dtype: str, spilled: tuple[int, int], compiler: str) -> None:
    """Bytes of a thread in each step, by the newest compiler and by 13.0."""
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in lstm_arguments(8192, 100, 64)]
    graph = capture(
        jax.make_jaxpr(WIDE_LSTM)(*shapes),
        context=RewriteContext(TargetCapabilities(divides_gradients=True, runs_loops=True, sums_online=True, sums_by_batch=False)),
    ).graph
    region = route(graph, "cuda", RouteOptions(device="h200", code=False)).regions[0]
    program, plan = region.program.only, region.phases[0].plan
    assert program is not None
    plan = dataclasses.replace(plan, lanes=3)  # which the planner takes no more: they spill
    source = lower.generate_kernel(program, arrangement_of(plan, program), "region").source
    made = compilers.cubin(source, "sm_90a", folder_of(compiler))
    assert sass.resources(made.log, made.cubin).spill_bytes <= spilled[COMPILERS.index(compiler)]
    paths = flow(sass.disassemble(made.cubin, "kitsune_region").instructions)
    assert not in_flight(paths).hazards and not skipped(paths)
