"""What pays as a phase of a chosen call though it would not by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kitsune_jax.config import PlannerOptions
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import Plan, Stage
from kitsune_jax.planning.streams import Region
from kitsune_jax.regions.joining import Chosen
from kitsune_jax.regions.select import select
from kitsune_jax.targets import get
from tests.support.graphs import graph_of, struct

MACHINE = "zen5-2"
NODES, EDGES, WIDTH = 300, 2_000, 16


def step(edges: Any, w: Any, receivers: Any) -> Any:
    """Edges, nodes, edges again. What an edge holds is kept for the last part."""
    edges = jnp.tanh(edges @ w)
    nodes = jnp.tanh(jax.ops.segment_sum(edges, receivers, num_segments=NODES) @ w)
    return jnp.tanh(nodes[receivers] * edges)


ARGS = struct(EDGES, WIDTH), struct(WIDTH, WIDTH), struct(EDGES, dtype="int32")
NODE_BYTES, EDGE_BYTES = 4 * NODES * WIDTH, 4 * EDGES * WIDTH


def nodes_lose(graph: Graph, region: Region) -> Plan:
    """Everything takes half of XLA's time but what stands between edges, which takes 0.1 s more than XLA."""
    baseline = 2.0 if region.space.rows == EDGES else 0.9
    return Plan("test", "vertical", 8, 1, (Stage("all", region.ops, "tensor", 1, 1.0),), (), 1, 1.0, baseline, 2, 2, "all")


def calls(fresh: float, fn: Any = step, args: Any = ARGS, most_merged: int = 512, **options: Any) -> list[list[int]]:
    """The rows of the phases of each call."""
    graph = graph_of(fn, *args)
    capabilities = TargetCapabilities(runs_phases=True, most_merged=most_merged)
    chosen = select(graph, lambda i: None, nodes_lose, capabilities, force=False, fresh=fresh, **options)
    return sorted([r.space.rows for r in c.regions] for c in chosen.regions)


def test_what_loses_is_left_to_xla_where_arrays_cost_nothing():
    assert calls(0.0) == [[EDGES], [EDGES]]


def test_it_is_a_phase_where_its_own_arrays_cost_more_than_it_loses():
    assert calls(0.11 / (2 * NODE_BYTES)) == [[EDGES, NODES, EDGES]]


def test_it_is_a_phase_where_the_calls_around_it_become_one_and_that_saves_more():
    """The nodes are 2 x 19 kB, which cost 0.08 s, and the edges that one call hands to the other 128 kB more."""
    assert calls(0.08 / (2 * NODE_BYTES)) == [[EDGES, NODES, EDGES]]
    assert calls(0.09 / (2 * NODE_BYTES + EDGE_BYTES)) == [[EDGES], [EDGES]]


def test_not_where_something_else_reads_its_arrays():
    def fn(edges: Any, w: Any, receivers: Any) -> Any:
        edges = jnp.tanh(edges @ w)
        sums = jax.ops.segment_sum(edges, receivers, num_segments=NODES)
        nodes = jnp.tanh(sums @ w)
        return jnp.tanh(nodes[receivers]), sums, nodes

    assert calls(1.0, fn) == [[EDGES], [EDGES]]


def test_not_where_it_would_be_a_call_of_its_own():
    def merge_phases(call: Chosen) -> Chosen | str:
        return "no phases of one call"

    assert calls(1.0, merge_phases=merge_phases) == [[EDGES], [EDGES]]
    assert calls(1.0, most_merged=1) == [[EDGES], [EDGES]]


@pytest.mark.parametrize(("edges", "costs"), [(2_000, False), (2_000_000, True)])
def test_arrays_cost_where_the_program_has_much_of_them(edges: int, costs: bool):
    """Up to 32 MB the C library hands out the same pages again."""
    graph = graph_of(step, struct(edges, WIDTH), struct(WIDTH, WIDTH), struct(edges, dtype="int32"))
    target = get("cpu")
    assert (target.program_context(graph, target.machine(MACHINE), PlannerOptions(), False).fresh_seconds > 0) == costs


def test_what_reads_repeated_numbers_streams_over_the_rows_that_have_them():
    """As a follower, over elements, it would read an array that XLA makes of one number for each head."""

    def fn(messages: Any, receivers: Any, weights: Any, h: Any, w: Any) -> Any:
        received = jax.ops.segment_sum(messages, receivers, num_segments=NODES)
        return (received + h * weights[:, :, None]).reshape(NODES, -1) @ w

    args = struct(EDGES, 8, 4), struct(EDGES, dtype="int32"), struct(NODES, 8), struct(NODES, 8, 4), struct(32, 5)
    assert calls(1.0, fn, args) == [[EDGES, NODES]]
