"""Training steps with their optimisers as one kernel: gradients in the first phase, updates of the parameters in later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.targets.cuda import runtime
from tests.support.checks import in_float64
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

Tree = Any
RATE = 1e-2


def sgd(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), state


def momentum(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
    return jax.tree.map(lambda p, m: p - RATE * m, params, state), state


def adam(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    first, second = state
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
    return jax.tree.map(lambda p, m, v: p - RATE * m / (jnp.sqrt(v) + 1e-3), params, first, second), (first, second)


def clipped(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm).astype(g.dtype), grads)
    return momentum(params, state, grads)


OPTIMISERS: dict[str, Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
    "clipped": clipped,
}


def step_of(optimiser: str) -> Callable[..., Any]:
    def step(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Tree) -> jax.Array:
            error = (jnp.tanh(x @ p["w0"] + p["b0"]) @ p["w1"] - y).astype(jnp.float32)
            return jnp.mean(error * error)

        value, grads = jax.value_and_grad(loss)(params)
        return value, OPTIMISERS[optimiser](params, state, grads)

    return step


def arguments(optimiser: str, rows: int, dtype: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> jax.Array:
        return jax.device_put(np.asarray(rng.standard_normal(shape) * 0.3, dtype))

    params = {"w0": draw(24, 32), "b0": draw(32), "w1": draw(32, 10)}
    zeros = jax.tree.map(lambda p: jnp.abs(p) * 0.1, params)
    return params, (zeros, zeros) if optimiser == "adam" else zeros, draw(rows, 24), draw(rows, 10)


def change(old: Any, new: Any) -> np.ndarray:
    return np.asarray(new, np.float64) - np.asarray(old, np.float64)


@pytest.mark.parametrize(
    ("optimiser", "dtype", "rows"),
    [
        ("sgd", "float32", 257),
        ("momentum", "bfloat16", 67),
        pytest.param("adam", "float32", 67, marks=pytest.mark.slow),
        ("adam", "float16", 1),
        pytest.param("clipped", "float32", 257, marks=pytest.mark.slow),
        ("clipped", "bfloat16", 67),
    ],
)
def test_a_step_is_one_kernel(optimiser: str, dtype: str, rows: int) -> None:
    step, args = step_of(optimiser), arguments(optimiser, rows, dtype)
    pipelined = jax.jit(kj.pipeline(step, target="emulator", force=True))
    runtime.register("cpu")
    before = runtime.calls()
    value, (params, state) = pipelined(*args)
    jax.block_until_ready(params)
    assert runtime.calls() == before + 1
    want, (want_params, want_state) = in_float64(step, *args)
    tolerance = {"float32": 5e-3, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    assert abs(float(value) - float(want)) <= tolerance * abs(float(want))
    rounding = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for old, new, reference in zip(
        jax.tree.leaves(args[:2]), jax.tree.leaves((params, state)), jax.tree.leaves((want_params, want_state)), strict=True
    ):
        moved, wanted = change(old, new), change(old, reference)
        assert (
            np.abs(moved - wanted).max()
            <= 10 * tolerance * np.abs(wanted).max() + 2 * rounding * np.abs(np.asarray(old, np.float64)).max()
        )


def test_without_force_the_model_decides() -> None:
    """A small step gains from having no kernels behind it; the reasons of what stays outside are in words."""
    args = arguments("adam", 4096, "bfloat16")
    graph = capture(
        jax.make_jaxpr(step_of("adam"))(*args), context=RewriteContext(TargetCapabilities(divides_gradients=True))
    ).graph
    (region,) = route(graph, "cuda", RouteOptions(device="h200", code=False)).regions
    assert [p.number for p in region.phases] == [0, 1, 1, 1]
    assert all(p.plan.lanes == region.plan.lanes and p.plan.cluster == 1 for p in region.phases)
