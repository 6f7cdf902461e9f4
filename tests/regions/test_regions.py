"""Regions: convex, connected, disjoint; and every op outside has a reason."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import Plan, Stage
from kitsune_jax.planning.streams import Region
from kitsune_jax.regions.joining import region_of_call
from kitsune_jax.regions.select import select
from tests.support.graphs import graph_of, mlp, mlp_params, nerf, nerf_params

RNG = np.random.default_rng(1)


def one_stage_plan(graph: Graph, region: Region, *, seconds: float = 1.0, baseline: float = 2.0) -> Plan:
    stage = Stage("all", region.ops, "tensor", 1, 1.0)
    return Plan("test", "vertical", 8, 1, (stage,), (), 1, seconds, baseline, 1, 2, "all")


def choose(graph: Graph, *, force: bool = True, planner=one_stage_plan):
    return select(graph, lambda i: None, planner, force=force)


def assert_convex(graph: Graph, region: Region) -> None:
    inside = set(region.ops)
    after: set[int] = set()  # values that depend on a region output through an op outside
    made = {v for i in region.ops for v in graph.ops[i].outputs}
    for i, op in enumerate(graph.ops):
        if i in inside:
            assert not any(v in after for v in op.inputs), f"a path leaves the region and comes back at op {i}"
        elif any(v in after or v in region.outputs for v in op.inputs):
            after.update(op.outputs)
    assert set(region.outputs) <= made


def test_nerf_is_one_region():
    graph = graph_of(lambda x, p: nerf(p, x), jnp.zeros((32, 63)), nerf_params(RNG))
    selection = choose(graph)
    assert len(selection.regions) == 1
    assert {graph.ops[i].kind for i, _ in selection.rejected} <= {"reshape", "broadcast_in_dim"}  # of the biases


def test_a_sort_in_the_middle_gives_two_convex_regions_and_a_reason():
    def fn(x, w1, w2):
        h = jnp.tanh(x @ w1)
        s = jnp.sort(h, axis=0)
        return jnp.tanh((h + s) @ w2)

    graph = graph_of(fn, jnp.zeros((8, 4)), jnp.zeros((4, 5)), jnp.zeros((5, 3)))
    selection = choose(graph)
    assert len(selection.regions) == 2
    for c in selection.regions:
        assert_convex(graph, c.region)
    assert any("sort" in why for _, why in selection.rejected)


def test_a_sink_ends_a_level_and_what_follows_is_another_region():
    def fn(x, w):
        h = jnp.cumsum(x @ w, axis=1)  # so that columns can't stream
        h = h - h.mean(0)  # a batch statistic: a barrier
        return jnp.tanh(h) @ w.T

    graph = graph_of(fn, jnp.zeros((16, 4)), jnp.zeros((4, 4)))
    selection = choose(graph)
    assert len(selection.regions) >= 2
    for c in selection.regions:
        assert_convex(graph, c.region)
    assert sum(len(c.region.sinks) for c in selection.regions) == 1


def test_unprofitable_regions_are_left_to_xla_with_both_times_named():
    graph = graph_of(lambda x, p: mlp(p, x), jnp.zeros((8, 4)), mlp_params(RNG, (4, 4, 4)))
    selection = choose(graph, force=False, planner=lambda g, r: one_stage_plan(g, r, seconds=2.0, baseline=1.0))
    assert selection.regions == ()
    assert all(
        any(w in why for w in ("gains too little", "does not depend on the rows", "single numbers"))
        for _, why in selection.rejected
    )
    assert any("2000.00 ms" in why and "1000.00 ms" in why for _, why in selection.rejected)


@pytest.mark.parametrize(
    ("fn", "shape", "rows"),
    [
        (lambda x: jnp.mean(x * x, 0), (512, 32), 512),
        (lambda x: jnp.mean(x * x, 0), (8, 32), 32),  # few rows: the stream is over the columns, with the quotient in it
        (lambda x: x / jnp.sqrt((x * x).sum(0)), (512, 32), 512),
        (lambda x: (x[:, :1] > jnp.arange(32.0)).sum(0) / 2, (512, 32), 32),  # no array is read by columns
        (lambda x: x[:, :4].T @ x / 2 - x[:, :4].T @ (x * x), (512, 32), 512),
    ],
)
def test_forced_streams_over_rows_precede_those_over_columns_of_long_sums(fn, shape: tuple[int, ...], rows: int) -> None:
    graph = graph_of(fn, jnp.zeros(shape))
    able = TargetCapabilities(sums_by_worker=True)
    found = select(graph, lambda i: None, one_stage_plan, able, force=True)
    assert found.regions[0].region.space.rows == rows
    assert len({i for c in found.regions for i in c.ops}) + len(found.rejected) == len(graph.ops)


@pytest.mark.parametrize("fn", [lambda x: jnp.var(x, 0), lambda x: (x - x.mean(0)) / x.std(0)])
def test_numbers_of_columns_are_not_computed_for_every_element(fn) -> None:
    graph = graph_of(fn, jnp.zeros((512, 32)))
    found = select(graph, lambda i: None, one_stage_plan, TargetCapabilities(sums_by_worker=True), force=True)
    of_elements = [graph.ops[i] for c in found.regions if c.region.space.rows >= 512 for i in c.region.ops]
    small = [op.kind for op in of_elements if max(graph.values[v].size for v in (*op.inputs, *op.outputs)) <= 32]
    assert of_elements and set(small) <= {"broadcast_in_dim"}


@pytest.mark.parametrize("over_rows", ["no plan over rows", "a plan that does not pay"])
def test_the_reason_is_that_of_the_stream_over_most_rows(over_rows):
    graph = graph_of(lambda x, w: jax.nn.relu(x @ w), jnp.zeros((64, 16)), jnp.zeros((16, 8)))
    asked: list[tuple[int, ...]] = []

    def planner(graph: Graph, region: Region) -> Plan | str:
        asked.append(region.space.sizes)
        if region.space.sizes == (64,) and over_rows != "no plan over rows":
            return one_stage_plan(graph, region, seconds=2.0, baseline=1.0)
        return f"a reason of {region.space.rows} rows"

    reasons = dict(choose(graph, force=False, planner=planner).rejected)
    assert asked.index((64,)) < asked.index((8,))  # the stream over the columns of the result fails last
    product = next(reasons[i] for i, op in enumerate(graph.ops) if op.kind == "dot_general")
    assert ("gains too little" in product) if over_rows != "no plan over rows" else (product == "a reason of 64 rows")


@pytest.mark.parametrize(("speedup", "moved", "chosen"), [(1.03, 1, True), (1.03, 4, False), (1.1, 4, True), (0.99, 1, False)])
def test_a_region_as_fast_as_xla_is_chosen_where_it_moves_less_than_half_of_the_bytes(speedup, moved, chosen):
    graph = graph_of(lambda x, p: mlp(p, x), jnp.zeros((8, 4)), mlp_params(RNG, (4, 4, 4)))

    def planner(graph: Graph, region: Region) -> Plan:
        return dataclasses.replace(one_stage_plan(graph, region, baseline=speedup), bytes_moved=moved, baseline_bytes=7)

    assert bool(choose(graph, force=False, planner=planner).regions) == chosen


def _by_rows(graph: Graph, region: Region) -> Plan:
    """An op takes XLA a second, and a stream of one row a fifth less time, one of more rows half of it."""
    seconds = len(region.ops) * (0.8 if region.space.rows == 1 else 0.5)
    return one_stage_plan(graph, region, seconds=seconds, baseline=len(region.ops))


def _normalised_layers(batch: int) -> Graph:
    """Layers of which each ends in a statistic of the tokens of its batch: a stream of tokens has one of them, of batches all."""

    def network(x, weights):
        for w in weights:
            h = jnp.cumsum(x @ w, axis=2)  # so that columns can't stream
            x = jnp.tanh(h - h.mean(1, keepdims=True))
        return x

    return graph_of(network, jnp.zeros((batch, 16, 4)), [jnp.zeros((4, 4))] * 4)


@pytest.mark.parametrize(("workers", "whole"), [(1, True), (2, False)])
def test_streams_that_keep_all_workers_busy_are_compared_together_with_one_over_a_batch(workers: int, whole: bool) -> None:
    capabilities = TargetCapabilities(workers=workers)
    found = select(_normalised_layers(1), lambda i: None, _by_rows, capabilities, force=False).regions
    assert ([c.region.space.rows for c in found] == [1]) == whole
    assert any(c.region.space.rows == 1 for c in found) == whole


def test_a_stream_over_a_batch_stays_where_the_others_gain_less() -> None:
    def slower(graph: Graph, region: Region) -> Plan:
        return one_stage_plan(
            graph, region, seconds=len(region.ops) * (0.5 if region.space.rows == 1 else 0.8), baseline=len(region.ops)
        )

    found = select(_normalised_layers(1), lambda i: None, slower, TargetCapabilities(workers=2), force=False).regions
    assert [c.region.space.rows for c in found] == [1]


@pytest.mark.parametrize(("batch", "rows"), [(1, 16), (2, 2)])
def test_forced_streams_keep_all_workers_busy_where_any_does(batch: int, rows: int) -> None:
    found = select(_normalised_layers(batch), lambda i: None, one_stage_plan, TargetCapabilities(workers=2), force=True).regions
    products = [
        c.region.space.rows for c in found if any(_normalised_layers(batch).ops[i].kind == "dot_general" for i in c.region.ops)
    ]
    assert set(products) == {rows}


def _distances(x, centres, *, keep: str):
    squares = (x[:, None] - centres) ** 2
    other = {"nothing": 0.0, "result": squares, "reader": jnp.sort(squares, -1)}[keep]
    return jnp.argsort(squares.sum(-1)), other


@pytest.mark.parametrize(("keep", "chosen"), [("nothing", False), ("result", True), ("reader", True)])
def test_what_xla_computes_inside_of_its_reader_is_no_region(keep: str, chosen: bool) -> None:
    """With a sum that the target leaves to XLA: the squares would be stored for it alone."""
    graph = graph_of(functools.partial(_distances, keep=keep), jnp.zeros((40, 16)), jnp.zeros((8, 16)))
    left = {i: "no" for i, op in enumerate(graph.ops) if op.kind == "reduce_sum"}
    found = select(graph, left.get, one_stage_plan, force=False)
    squares = [i for i, op in enumerate(graph.ops) if op.kind == "integer_pow"]
    assert len(squares) == 1
    assert any(squares[0] in c.ops for c in found.regions) == chosen
    if not chosen:
        assert "inside of the operator that reads it" in dict(found.rejected)[squares[0]]
    assert any(squares[0] in c.ops for c in select(graph, left.get, one_stage_plan, force=True).regions)


def test_a_planner_that_says_no_is_quoted():
    graph = graph_of(lambda x, w: x @ w, jnp.zeros((8, 4)), jnp.zeros((4, 4)))
    selection = choose(graph, planner=lambda g, r: "needs 300 KB of shared memory")
    assert (0, "needs 300 KB of shared memory") in selection.rejected


def test_a_broadcast_used_inside_and_outside_is_not_stored():
    def fn(x, w, key):
        zeros = jnp.zeros((64, 4)) + w[0, 0]
        return jnp.maximum(x @ w, zeros), jnp.sort(zeros, 0)

    graph = graph_of(fn, jnp.zeros((64, 4)), jnp.zeros((4, 4)), 0)
    for c in choose(graph).regions:
        for v in c.region.outputs:
            producer = graph.ops[graph.producers()[v]]
            assert producer.kind != "broadcast_in_dim"


def test_momentum_times_its_decay_belongs_to_the_update_that_reads_it():
    def fn(w, m, x):
        m = 0.9 * m + jax.grad(lambda w: jnp.tanh(jnp.cumsum(x @ w, axis=1)).sum())(w)  # cumsum: columns can't stream
        return w - m, m

    graph = graph_of(fn, jnp.zeros((4, 3)), jnp.zeros((4, 3)), jnp.zeros((64, 4)))
    (chosen,) = select(graph, lambda i: None, one_stage_plan, TargetCapabilities(runs_phases=True), force=True).regions
    _, update = chosen.phases
    assert [graph.ops[i].kind for i in update.region.ops] == ["mul", "add", "sub"]
    assert len(chosen.ops) == len(graph.ops)


def test_a_weight_gradient_is_made_as_the_update_reads_it():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    graph = graph_of(step, jnp.zeros((4, 3)), jnp.zeros((64, 4)))
    assert not any(op.kind == "transpose" for op in graph.ops)
    twice = graph_of(lambda x, y: (x.T @ y, (x.T @ y).T), jnp.zeros((9, 4)), jnp.zeros((9, 3)))
    layer = graph_of(lambda x, w: (x @ w).T, jnp.zeros((9, 4)), jnp.zeros((4, 3)))
    assert any(op.kind == "transpose" for op in twice.ops)
    assert any(op.kind == "transpose" for op in layer.ops)  # its rows stream: nothing is made in another order


def test_what_reads_a_sink_in_a_larger_array_is_no_follower():
    def fn(x, w):
        h = jnp.cumsum(x @ w, axis=1)  # so that columns can't stream
        return jnp.tanh(h - h.mean(0))  # a batch statistic

    graph = graph_of(fn, jnp.zeros((16, 4)), jnp.zeros((4, 4)))
    selection = select(graph, lambda i: None, one_stage_plan, TargetCapabilities(runs_phases=True), force=True)
    assert all(p.region.space.rows <= 4 for c in selection.regions for p in c.phases[1:])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=10))
def test_random_updates_give_convex_calls_whose_phases_wait_for_earlier_ones_only(steps):
    def fn(x, u, v, w, b):
        def loss(w, b):
            return jnp.sum(jnp.tanh(jnp.cumsum(x @ w + b, axis=1)))

        dw, db = jax.grad(loss, (0, 1))(w, b)
        pool = [dw, db, u, v, jnp.float32(2.0) * dw.sum()]
        for kind, i, j in steps:
            a, c = pool[i % len(pool)], pool[j % len(pool)]
            pool.append(
                [
                    lambda a, c: jnp.tanh(a),
                    lambda a, c: a + c if c.shape in (a.shape, ()) else a * 2,
                    lambda a, c: a * c.sum(),
                    lambda a, c: jnp.sort(a, axis=0) if a.shape else a,
                    lambda a, c: jnp.sqrt(jnp.abs(a.sum())),
                    lambda a, c: jnp.flip(a) if a.shape else -a,
                    lambda a, c: jnp.where(c.sum() > 0, a, -a),
                ][kind](a, c)
            )
        return pool[-1], pool[len(pool) // 2], pool[-2]

    shapes = [(12, 4), (4, 3), (3,), (4, 3), (3,)]
    graph = graph_of(fn, *(jnp.zeros(s) for s in shapes))
    selection = select(graph, lambda i: None, one_stage_plan, TargetCapabilities(runs_phases=True), force=True)
    seen: set[int] = set()
    for c in selection.regions:
        assert not seen & set(c.ops)
        seen |= set(c.ops)
        whole = region_of_call(graph, c.regions)
        assert_convex(graph, whole)
        made: dict[int, int] = {}
        for p in c.phases:
            assert_convex(graph, p.region)
            assert all(made.get(v, -1) < p.number for v in p.region.inputs)
            assert any(v in made for v in p.region.inputs) == (p.number > 0)
            made |= dict.fromkeys(p.region.outputs, p.number)
        assert set(whole.outputs) <= set(made) and not set(whole.inputs) & set(made)
    assert not seen & {i for i, _ in selection.rejected}


@st.composite
def programs(draw):
    """Random programs over [12, 4] values: streams, sinks, sorts, transposed uses, skips."""
    steps = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12))

    def fn(x, w):
        pool = [x]
        for kind, a, b in steps:
            u, v = pool[a % len(pool)], pool[b % len(pool)]
            pool.append(
                [
                    lambda u, v: jnp.tanh(u),
                    lambda u, v: u + v,
                    lambda u, v: u @ w,
                    lambda u, v: u - v.mean(0),
                    lambda u, v: jnp.sort(u, axis=0) * v,
                    lambda u, v: jax.nn.softmax(u) * v,
                    lambda u, v: jnp.cumsum(u, axis=1) + v,
                    lambda u, v: u * v.sum(),
                ][kind](u, v)
            )
        return pool[-1], pool[len(pool) // 2]

    return fn


@settings(max_examples=40, deadline=None)
@given(programs())
def test_random_programs_give_disjoint_convex_regions_and_a_reason_for_the_rest(fn):
    graph = graph_of(fn, jnp.zeros((12, 4)), jnp.zeros((4, 4)))
    selection = choose(graph)
    seen: set[int] = set()
    for c in selection.regions:
        assert_convex(graph, c.region)
        assert not seen & set(c.region.ops)
        seen |= set(c.region.ops)
    assert all(why for _, why in selection.rejected)
    assert not seen & {i for i, _ in selection.rejected}
    # The regions, each taken as one node, and the other ops can be put in an order: no cycle between regions.
    owner = {i: ("region", k) for k, c in enumerate(selection.regions) for i in c.region.ops}
    producers = graph.producers()
    edges: dict[object, set[object]] = {}
    for i, op in enumerate(graph.ops):
        me = owner.get(i, i)
        for v in op.inputs:
            if v in producers:
                other = owner.get(producers[v], producers[v])
                if other != me:
                    edges.setdefault(me, set()).add(other)
    state: dict[object, int] = {}

    def visit(n: object) -> None:
        assert state.get(n) != 1, "a cycle through regions"
        if n not in state:
            state[n] = 1
            for m in edges.get(n, ()):
                visit(m)
            state[n] = 2

    for n in list(edges):
        visit(n)
