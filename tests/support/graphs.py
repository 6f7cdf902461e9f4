"""Small networks and the Graphs captured from them, shared by the tests of the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.graph import Graph, topological
from kitsune_jax.ops.table import verify


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    """The Graph of ``fn`` at the shapes of ``args`` (no closed-over arrays)."""
    closed = jax.make_jaxpr(fn)(*args)
    assert not closed.consts, "pass arrays as arguments"
    captured = capture(closed)
    verify(captured.graph)
    assert not captured.failures, captured.failures
    return captured.graph


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def mlp_params(rng: np.random.Generator, dims: tuple[int, ...], dtype: Any = np.float32) -> list[tuple[Any, Any]]:
    return [
        (
            jax.device_put(np.asarray(rng.standard_normal((i, o)) * (2.0 / i) ** 0.5, dtype)),
            jax.device_put(np.asarray(rng.standard_normal(o) * 0.1, dtype)),
        )
        for i, o in zip(dims[:-1], dims[1:], strict=True)
    ]


def nerf(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """8 x width ReLU with the input concatenated again after layer 4, then a linear head."""
    h = x
    for i, (w, b) in enumerate(params[:-1]):
        if i == 4:
            h = jnp.concatenate([h, x], -1)
        h = jax.nn.relu(h @ w + b)
    w, b = params[-1]
    return h @ w + b


def nerf_params(rng: np.random.Generator, width: int = 256, inputs: int = 63, dtype: Any = np.float32) -> list[tuple[Any, Any]]:
    dims = [(inputs, width), *[(width, width)] * 3, (width + inputs, width), *[(width, width)] * 3, (width, 4)]
    return [
        (
            jax.device_put(np.asarray(rng.standard_normal((i, o)) * (2.0 / i) ** 0.5, dtype)),
            jax.device_put(np.asarray(rng.standard_normal(o) * 0.1, dtype)),
        )
        for i, o in dims
    ]


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * gain + bias


def quotient_order(graph: Graph, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The ops in a topological order in which every group is one node (other ops alone), earliest ops first.

    Raises ``ValueError`` if no such order exists because groups depend on each other.
    """
    node_of = {i: k for k, group in enumerate(groups) for i in group}
    nodes: list[tuple[int, ...]] = [tuple(group) for group in groups]
    for i in range(len(graph.ops)):
        if i not in node_of:
            node_of[i] = len(nodes)
            nodes.append((i,))
    producers = graph.producers()
    needs: list[set[int]] = [set() for _ in nodes]
    for i, op in enumerate(graph.ops):
        made_by = {node_of[producers[v]] for v in op.inputs if v in producers}
        needs[node_of[i]] |= made_by - {node_of[i]}
    order = topological(needs, [node[0] for node in nodes])
    if len(order) != len(nodes):
        raise ValueError("the groups depend on each other")
    return [nodes[n] for n in order]
