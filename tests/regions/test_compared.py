"""What is compared has one maker: a region reads what XLA takes the largest of, where the two would differ in the last bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import targets
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import Plan, Stage
from kitsune_jax.planning.streams import Region
from kitsune_jax.regions.grow import compared_extremes, compared_floats
from kitsune_jax.regions.select import Selection, select
from tests.support.graphs import graph_of

NODES, EDGES = 41, 907
RNG = np.random.default_rng(5)
SENDERS, RECEIVERS = RNG.integers(0, NODES, (2, EDGES), np.int32)
RECEIVERS[:NODES] = np.arange(NODES)


def pooled(score: Any) -> Any:
    """The largest score of each node's edges: its gradient compares all scores with it."""

    def of(z: Any, g: Any, senders: Any, receivers: Any) -> Any:
        return jnp.sum(jax.ops.segment_max(score(z[senders], z[receivers]), receivers, num_segments=NODES) * g)

    return of


SCORES = {
    "exp": lambda s, r: jnp.exp(s * 0.5) * r + s,
    "one multiplication and addition": lambda s, r: s * 0.37 + r * s,
    "tanh": lambda s, r: jnp.tanh(s + r),
    "leaky relu": lambda s, r: jax.nn.leaky_relu(s + r, 0.2),
}


def plan(graph: Graph, region: Region) -> Plan | str:
    if any(graph.ops[i].kind == "scatter_max" for i in region.ops):
        return "for XLA"
    return Plan("test", "vertical", 8, 1, (Stage("all", region.ops, "tensor", 1, 1.0),), (), 1, 1.0, 2.0, 1, 2, "all")


def chosen(score: Any) -> tuple[Graph, Selection]:
    z = jnp.zeros((NODES, 6))
    graph = graph_of(jax.grad(pooled(score)), z, z, SENDERS, RECEIVERS)
    return graph, select(graph, lambda i: "no" if graph.ops[i].kind == "scatter_max" else None, plan, force=True)


@pytest.mark.parametrize("name", SCORES)
def test_no_arithmetic_on_the_way_is_done_by_regions_and_by_xla(name: str) -> None:
    graph, selection = chosen(SCORES[name])
    again = {i for c in selection.regions for r in c.regions for i in r.recomputed}
    inside = {i for c in selection.regions for i in c.ops}
    producers, (largest,) = graph.producers(), (op for op in graph.ops if op.kind == "scatter_max")
    work, by_both = [largest.inputs[0], largest.inputs[-1]], set[str]()
    while work:  # what XLA makes for it
        i = producers.get(work.pop())
        if i is not None and (i not in inside or i in again):
            by_both |= {graph.ops[i].kind} if i in inside else set()
            work += graph.ops[i].inputs
    assert by_both.isdisjoint({"mul", "exp", "tanh", "sub"})
    assert again, "a lookup is made again"


@pytest.mark.parametrize("name", SCORES)
def test_gradients_where_xla_takes_the_largest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With makers of their own half of the gradient was missing."""
    cpu = targets.get("cpu")
    supports = cpu.supports
    monkeypatch.setattr(cpu, "supports", lambda op, *of: "for XLA" if op.kind == "scatter_max" else supports(op, *of))
    z, g = (RNG.standard_normal((NODES, 6)) for _ in range(2))
    grad = jax.grad(pooled(SCORES[name]))
    got = jax.jit(kj.pipeline(grad, force=True))(z.astype(np.float32), g.astype(np.float32), SENDERS, RECEIVERS)
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(grad)(z, g, SENDERS, RECEIVERS))
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_values_that_nobody_compares_are_made_again() -> None:
    z = jnp.zeros((NODES, 6))
    graph = graph_of(pooled(SCORES["exp"]), z, z, SENDERS, RECEIVERS)
    assert not compared_floats(graph)


def test_what_is_compared_with_a_constant_is_not_held_against_another_maker() -> None:
    x = jnp.zeros((9, 5))
    assert not compared_floats(graph_of(lambda x: jnp.where(jnp.exp(x) > 0.5, x, 0.0), x))
    assert not compared_floats(graph_of(lambda x: jnp.isnan(jnp.exp(x)), x))
    graph = graph_of(jax.grad(lambda x: jnp.maximum(jnp.exp(x), x[:, ::-1]).sum()), x)
    assert compared_floats(graph) and not compared_extremes(graph)
    assert compared_extremes(graph_of(jax.grad(lambda x: jnp.exp(x).max(-1).sum()), x))
