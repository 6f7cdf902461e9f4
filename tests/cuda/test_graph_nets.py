"""Graph networks through the public API, in the emulator: gathers, segment sums, the order of the stream."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cuda import runtime
from tests.support.checks import close, in_float64
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("kernel_cache"),
    pytest.mark.filterwarnings("error:kitsune_jax could not"),  # a failure of ours that falls back is a failure here
]
emulated = {"force": True, "target": "emulator"}
RNG = np.random.default_rng(21)
ROUNDING = {"float32": 4e-3, "bfloat16": 4e-2, "float16": 8e-3}


def drawn(*shape: int, dtype: str = "float32", scale: float = 1.0) -> jax.Array:
    return jax.device_put(np.asarray(RNG.standard_normal(shape) * scale, dtype))


def layer_norm(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def mlp(x: Any, *weights: Any) -> Any:
    for w in weights[:-1]:
        x = jax.nn.silu(x @ w)  # smooth: a rounding of tf32 flips no mask
    return layer_norm(x @ weights[-1])


def message_passing(nodes: Any, edges: Any, senders: Any, receivers: Any, *weights: Any) -> Any:
    """A step of MeshGraphNets: edges, then the sum of those that each node receives, then nodes."""
    new = mlp(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1), *weights[:2]) + edges
    received = jax.ops.segment_sum(new, receivers, nodes.shape[0])
    return mlp(jnp.concatenate([nodes, received], -1), *weights[2:]) + nodes, new


def graph(n: int, m: int, d: int, dtype: str, ids: str = "random") -> tuple[jax.Array, ...]:
    receivers = RNG.integers(0, n, m)
    if ids == "super":
        receivers = np.where(RNG.random(m) < 0.5, n // 2, receivers)
    if ids == "outside":
        receivers = np.where(RNG.random(m) < 0.2, RNG.choice([-1, -n, n, 2**30], m), receivers)
    if ids == "sorted":
        receivers = np.sort(receivers)
    weights = [drawn(k * d, d, dtype=dtype, scale=(2 / (k * d)) ** 0.5) for k in (3, 1, 2, 1)]
    indices = (jax.device_put(np.asarray(RNG.integers(0, n, m), jnp.int32)), jnp.asarray(receivers, jnp.int32))
    return (drawn(n, d, dtype=dtype), drawn(m, d, dtype=dtype), *indices, *weights)


@pytest.mark.parametrize(
    "dtype, ids",
    [
        ("float32", "random"),
        ("bfloat16", "super"),
        ("float16", "outside"),
        pytest.param("bfloat16", "sorted", marks=pytest.mark.slow),
    ],
)
def test_the_edges_of_a_step_are_one_kernel(dtype: str, ids: str) -> None:
    """With both gathers and the segment sum."""
    args = graph(50, 331, 32, dtype, ids)
    f = kj.pipeline(message_passing, strict=True, **emulated)
    before = runtime.calls()
    got = jax.block_until_ready(jax.jit(f)(*args))
    report = kj.explain(message_passing, **emulated)(*args)
    assert runtime.calls() == before + len(report.regions)
    labels = [[op for stage in region.stages for op in stage.ops] for region in report.regions]
    assert any(ops.count("gather") == 2 and "scatter-add" in ops for ops in labels), report
    wide = [np.asarray(a).astype(np.float32) if a.dtype == np.float16 else a for a in args]
    for g, w in zip(got, in_float64(message_passing, *wide), strict=True):
        close(np.asarray(g).astype(np.float64), w, ROUNDING[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype, ids", [("float32", "super"), ("bfloat16", "random")])
def test_gradients_of_a_step(dtype: str, ids: str) -> None:
    """By nodes, edges and weights: rows are gathered and summed up by both ends of an edge."""
    args = graph(50, 331, 32, dtype, ids)

    def loss(nodes: Any, edges: Any, *rest: Any) -> Any:
        new_nodes, new_edges = message_passing(nodes, edges, *rest)
        return (new_nodes.astype(jnp.float32) ** 2).mean() + (new_edges.astype(jnp.float32) ** 2).mean()

    by = (0, 1, *range(4, len(args)))
    wanted = in_float64(jax.grad(loss, by), *args)
    before = runtime.calls()
    got = jax.block_until_ready(jax.jit(jax.grad(kj.pipeline(loss, strict=True, **emulated), by))(*args))
    assert runtime.calls() > before
    for g, w in zip(got, wanted, strict=True):
        off = np.abs(np.asarray(g).astype(np.float64) - w).max()
        assert off <= ROUNDING[dtype] * np.abs(w).max()
