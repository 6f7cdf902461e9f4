"""Calls that follow each other as one call: which are merged, in which order their phases stand, and what is left apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax import targets
from kitsune_jax.frontend.lowering import schedule
from kitsune_jax.frontend.route import Routed, RouteOptions, route
from kitsune_jax.ops.graph import Graph
from reference.check import verify
from tests.support.graphs import graph_of, struct

MACHINE = "zen5-2"
NODES, EDGES, WIDTH = 300, 2_000, 16


def planned(graph: Graph, *, merged: bool = True) -> Routed:
    return route(graph, "cpu", RouteOptions(force=True, device=MACHINE, code=False, strict=True, merge=merged))


def messages(w: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> tuple[Any, Any]:
    edges = jnp.tanh(edges @ w + nodes[senders] + nodes[receivers])
    return jnp.tanh((nodes + jax.ops.segment_sum(edges, receivers, num_segments=nodes.shape[0])) @ w), edges


GRAPH = struct(WIDTH, WIDTH), struct(NODES, WIDTH), struct(EDGES, WIDTH), struct(EDGES, dtype="int32"), struct(EDGES, dtype="int32")


def check(graph: Graph) -> tuple[Routed, Routed]:
    """``graph`` planned with calls merged and apart: the same phases, in an order in which all can run."""
    whole, apart = planned(graph), planned(graph, merged=False)
    regions = [{p.region for r in found.regions for p in r.phases} for found in (whole, apart)]
    assert regions[0] == regions[1]
    assert whole.rejected == apart.rejected
    plans = [{p.region: p.plan.tile_rows for r in found.regions for p in r.phases} for found in (whole, apart)]
    assert plans[0] == plans[1]
    order, dissolved = schedule(graph, [False] * len(graph.ops), whole.regions)
    assert not dissolved  # every call stands as one node: convex
    assert [r.name for r in order if not isinstance(r, int)] != [] or not whole.regions
    for r in whole.regions:
        verify(r.program)
        assert [part.phase for part in r.program.parts] == sorted(p.number for p in r.phases)
        made = {v: p.number for p in r.phases for v in p.region.outputs}
        assert all(made.get(v, -1) < p.number for p in r.phases for v in p.region.inputs)
        assert not set(r.region.outputs) - set(made) and not set(r.region.inputs) & set(made)
        # What another call, an operator or the caller reads is a result; nothing else is.
        producers = graph.producers()
        inside = set(r.region.ops)
        others = [x.region.inputs for x in whole.regions if x is not r] + [graph.ops[n].inputs for n in order if isinstance(n, int)]
        wanted = {v for values in (*others, graph.outputs) for v in values if producers.get(v) in inside and v in made}
        assert wanted <= set(r.region.outputs)
    return whole, apart


def test_steps_of_message_passing_are_one_call():
    def steps(w: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
        for _ in range(3):
            nodes, edges = messages(w, nodes, edges, senders, receivers)
        return nodes

    graph = graph_of(steps, *GRAPH)
    whole, apart = check(graph)
    (call,) = whole.regions
    assert len(apart.regions) >= 6
    assert {p.region.space.rows for p in call.phases} == {NODES, EDGES}
    numbers = [p.number for p in call.phases]
    assert numbers == list(range(len(numbers)))  # each reads what the one before makes
    assert [graph.values[v].shape for v in call.region.outputs] == [(NODES, WIDTH)]
    assert len(call.orders) <= 1
    (report,) = whole.report.regions
    size = 4 * WIDTH * (2 * NODES + EDGES)
    assert report.kept_bytes >= 2 * size
    assert report.kept_at_once <= 2 * size  # what a step has read is gone
    text, page = str(whole.report), whole.report._repr_html_()
    for told in ("phases 1, 3: ", "between its phases", "for later phases"):
        assert told in text and told in page


def test_a_gradient_merges_too():
    def loss(w: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
        # Few edges for each node, so that products stay products of the edges.
        nodes, edges = messages(w, nodes, edges, senders, receivers)
        return jnp.sum(nodes * nodes)

    edges, ids = struct(EDGES, WIDTH), struct(EDGES, dtype="int32")
    few = struct(WIDTH, WIDTH), edges, edges, ids, ids
    whole, apart = check(graph_of(jax.grad(loss), *few))
    assert len(whole.regions) == 1 < len(apart.regions)


def test_two_networks_that_do_not_meet_stay_apart():
    def fn(w: Any, v: Any, x: Any, y: Any) -> tuple[Any, Any]:
        return jnp.tanh(x @ w), jnp.tanh(y @ v)

    whole, apart = check(graph_of(fn, struct(8, 8), struct(9, 9), struct(100, 8), struct(60, 9)))
    assert len(whole.regions) == len(apart.regions) == 2


def test_indices_that_the_first_region_makes_keep_the_second_apart():
    """The permutation by them is made in front of the call."""

    def fn(w: Any, edges: Any) -> Any:
        by = (jnp.tanh(edges @ w)[:, 0] * 100).astype(jnp.int32)
        messages = jnp.sin(edges) * 2.0
        return jax.ops.segment_sum(messages, by, num_segments=100_000), by

    graph = graph_of(fn, struct(64, 64), struct(1_000_003, 64))
    found = route(graph, "cpu", RouteOptions(force=True, device=MACHINE, code=False, strict=True))
    for r in found.regions:
        made = {v for p in r.phases for v in p.region.outputs}
        assert not made & {p.plan.order for p in r.phases}


def test_an_operator_that_must_run_in_between_keeps_calls_apart():
    def fn(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.tanh((h.sum(0) + jnp.sort(h, axis=0)[0]) @ w)

    whole, _ = check(graph_of(fn, struct(8, 8), struct(100, 8)))
    assert all(len(r.phases) == 1 or len({p.region.space.rows for p in r.phases}) < 3 for r in whole.regions)
    assert len(whole.regions) >= 1


def test_a_call_has_no_more_phases_than_it_may(monkeypatch: pytest.MonkeyPatch):
    def steps(w: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
        for _ in range(4):
            nodes, edges = messages(w, nodes, edges, senders, receivers)
        return nodes

    cpu = targets.get("cpu")
    monkeypatch.setattr(cpu, "capabilities", dataclasses.replace(cpu.capabilities, most_merged=3))
    whole, _ = check(graph_of(steps, *GRAPH))
    assert len(whole.regions) > 1
    assert max(len(r.phases) for r in whole.regions) == 3


def test_a_call_does_not_hold_much_more_than_its_parts_do():
    """What the first part reads would be free when the last one makes as much; one call would hold both."""

    def fn(w: Any, big: Any, ids: Any) -> Any:
        h = jnp.tanh(jnp.sort(big, axis=1) @ w)
        small = jax.ops.segment_sum(h, ids % 1000, num_segments=1000)
        for _ in range(2):
            small = jnp.tanh(small @ w)
        return jnp.tanh(jnp.cumsum(small, 0)[ids] @ w)

    rows = 4_000_000
    whole, _ = check(graph_of(fn, struct(16, 16), struct(rows, 16), struct(rows, dtype="int32")))
    large = [r for r in whole.regions if any(p.region.space.rows == rows for p in r.phases)]
    assert len(large) >= 2


@st.composite
def networks(draw: Any) -> list[tuple[int, int, int, int]]:
    steps = st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 9), st.integers(0, 1))
    return draw(st.lists(steps, min_size=2, max_size=9))


def network(steps: list[tuple[int, int, int, int]]) -> Any:
    """Layers over nodes and edges in a random order, each of random earlier results, some with an operator of XLA's between."""

    def fn(w: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
        ends = senders, receivers
        at_nodes, at_edges = [nodes], [edges]
        for kind, i, j, end in steps:
            n, e = at_nodes[i % len(at_nodes)], at_edges[j % len(at_edges)]
            if kind in (0, 1):
                at_edges.append(jnp.tanh(e @ w + n[ends[end]]))
            elif kind in (2, 3):
                at_nodes.append(n + jax.ops.segment_sum(jnp.tanh(e @ w), ends[end], num_segments=nodes.shape[0]))
            elif kind == 4:
                at_nodes.append(jnp.tanh(n @ w))
            elif kind == 5:
                at_nodes.append(jnp.sort(n, axis=0))
            else:
                at_edges.append(e * jnp.sum(n))
        return at_nodes[-1], at_edges[-1], at_nodes[len(at_nodes) // 2]

    return fn


@settings(max_examples=25, deadline=None, derandomize=True)
@given(networks())
def test_random_networks_merge_without_losing_or_reordering_anything(steps: list[tuple[int, int, int, int]]):
    small = struct(8, 8), struct(12, 8), struct(30, 8), struct(30, dtype="int32"), struct(30, dtype="int32")
    check(graph_of(network(steps), *small))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(networks())
def test_random_gradients_merge_without_losing_or_reordering_anything(steps: list[tuple[int, int, int, int]]):
    small = struct(8, 8), struct(12, 8), struct(30, 8), struct(30, dtype="int32"), struct(30, dtype="int32")
    fn = network(steps)
    check(graph_of(jax.grad(lambda *args: sum(jnp.sum(x * x) for x in fn(*args)), (0, 1, 2)), *small))
