"""What a later region computes again instead of reading it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import Plan, Stage
from kitsune_jax.planning.streams import Region, streamed_axes
from kitsune_jax.regions.select import select
from tests.support.graphs import graph_of

BATCH, TOKENS, WIDTH = 3, 50, 8


def by_bytes(graph: Graph, region: Region) -> Plan:
    """Products and stored rows take time, and nothing else."""
    stored = 4e-9 * sum(graph.values[v].size for v in region.outputs)
    products = 1e-3 * sum(graph.ops[i].kind == "dot_general" for i in region.ops)
    stage = Stage("all", region.ops, "tensor", 1, 1.0)
    return Plan("test", "vertical", 8, 1, (stage,), (), 1, 1e-9 + stored + products, 1.0, 1, 2, "all")


def test_what_does_not_run_over_all_axes_is_made_again_and_not_stored():
    """The sines of a rotary embedding are the same for all of a batch: a region of samples and tokens has no rows for them."""

    def fn(x: Any, v: Any, w: Any) -> Any:
        angles = jnp.arange(TOKENS)[:, None] * 1e4 ** (-jnp.arange(WIDTH) / WIDTH)
        h = x @ v
        a, b = h * jnp.sin(angles), h * jnp.cos(angles)
        mean = (a + b).mean((0, 1))  # of the batch: a barrier, behind which the rows in front of it are read
        return (jnp.maximum(a, mean) * jnp.maximum(b, mean)) @ w

    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((BATCH, TOKENS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))]
    graph = graph_of(fn, *args)
    chosen = select(graph, lambda i: None, by_bytes, TargetCapabilities(recomputes=True), force=False).regions
    first, second = (c.region for c in chosen if len(c.region.space.sizes) == 2)
    (product,) = (v for i in first.ops if graph.ops[i].kind == "dot_general" for v in graph.ops[i].outputs)
    sums = {v for i in first.sinks for v in graph.ops[i].outputs}
    assert set(first.outputs) == {product} | sums
    assert {"sin", "cos"} <= {graph.ops[i].kind for i in second.ops}
    for region in (first, second):
        labels, axes = region.label_of(), frozenset(range(len(region.space.sizes)))
        assert all(streamed_axes(labels[v]) == axes for v in region.outputs if v in labels)
