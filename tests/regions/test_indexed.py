"""Regions over the edges of a graph: the order in which they stream, what they compute again, and what they leave aside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.frontend.route import Routed, RouteOptions, isolate, route
from kitsune_jax.planning.cost import Access, pipeline_traffic
from kitsune_jax.planning.plan import Phase
from kitsune_jax.planning.stages import orders_of
from kitsune_jax.regions.grow import recomputed_ops
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import cpu_model
from kitsune_jax.targets.cpu.planning.machines import times as times_of
from kitsune_jax.targets.cpu.planning.planner import order_seconds
from tests.support.graphs import graph_of

MACHINE = "zen5-2"
EDGES, NODES, WIDTH = 60_013, 40_009, 64


def planned(fn: Any, *args: Any) -> tuple[Any, Routed]:
    graph = graph_of(fn, *args)
    return graph, route(graph, "cpu", RouteOptions(device=MACHINE, code=False, strict=True))


def phases(found: Routed) -> list[Phase]:
    """Those of all calls."""
    return [p for r in found.regions for p in r.phases]


def ids(rng: np.random.Generator, n: int = NODES, rows: int = EDGES) -> jax.Array:
    return jax.device_put(np.asarray(rng.integers(0, n, rows), jnp.int32))


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def layer(w: Any, v: Any, edges: Any, nodes: Any, senders: Any, receivers: Any) -> tuple[Any, Any]:
    """A message-passing step: messages by a network of two layers, summed by receiver."""
    x = edges + jnp.take(nodes, senders, axis=0, mode="clip") + jnp.take(nodes, receivers, axis=0, mode="clip")
    messages = jax.nn.relu(jnp.tanh(x @ w) @ v)
    return messages, jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])


def graph_data(rng: np.random.Generator) -> tuple[Any, ...]:
    w, v = normal(rng, WIDTH, WIDTH), normal(rng, WIDTH, WIDTH)
    return w, v, normal(rng, EDGES, WIDTH), normal(rng, NODES, WIDTH), ids(rng), ids(rng)


def attention(el: Any, er: Any, h: Any, senders: Any, receivers: Any) -> Any:
    """A graph attention layer, as it is written without a library."""
    n = h.shape[0]
    score = jax.nn.leaky_relu(el[senders] + er[receivers], 0.2)
    weight = jnp.exp(score - jax.ops.segment_max(score, receivers, num_segments=n)[receivers])
    share = weight / jax.ops.segment_sum(weight, receivers, num_segments=n)[receivers]
    return jax.ops.segment_sum(share[:, :, None] * h[senders], receivers, num_segments=n)


def attention_data(rng: np.random.Generator, heads: int = 8) -> tuple[Any, ...]:
    return normal(rng, NODES, heads), normal(rng, NODES, heads), normal(rng, NODES, heads, 8), ids(rng), ids(rng)


def test_messages_and_their_sum_are_one_region_in_the_order_of_the_receivers():
    graph, found = planned(lambda *a: layer(*a)[1], *graph_data(np.random.default_rng(0)))
    (region,) = found.regions
    (scatter,) = region.region.sinks
    assert region.plan.order == graph.ops[scatter].inputs[1]
    assert [order.n for order in region.orders] == [NODES]
    assert region.program.parts[0].program.order == len(region.program.parts[0].program.inputs) - 1
    text = str(found.report)
    assert "in the order of the indices of scatter-add (test_indexed.py:" in text.replace("\n  ", " ")


@pytest.mark.parametrize("fold", [jax.ops.segment_sum, jax.ops.segment_max], ids=["sum", "max"])
def test_indices_stream_because_what_they_place_does(fold):
    """Nothing else reads the indices, and the table is larger than what is selected among inside a row."""

    def fn(w: Any, edges: Any, by: Any) -> Any:
        return fold(jnp.tanh(edges @ w), by, num_segments=NODES)

    rng = np.random.default_rng(13)
    graph, found = planned(fn, normal(rng, WIDTH, WIDTH), normal(rng, EDGES, WIDTH), ids(rng))
    assert [graph.ops[i].kind for r in found.regions for i in r.region.sinks] == [f"scatter_{fold.__name__[8:]}"]


def test_a_call_in_order_gives_what_jax_gives():
    rng = np.random.default_rng(1)
    args = graph_data(rng)
    receivers = np.array(args[5])
    receivers[:700], receivers[700:900] = 17, NODES + 3  # a large segment, and ids out of range; many others are empty
    args = (*args[:5], jnp.asarray(receivers))
    fn = lambda *a: layer(*a)[1]  # noqa: E731
    with kj.config.override(strict=True):
        report = kj.explain(kj.pipeline(fn))(*args)
        got = jax.jit(kj.pipeline(fn))(*args)
    wanted = fn(*args)
    assert any(r.order for r in report.regions)
    scale = float(jnp.max(jnp.abs(wanted)))
    assert float(jnp.max(jnp.abs(got - wanted))) < 1e-5 * scale


def test_steps_with_the_same_receivers_share_one_order():
    rng = np.random.default_rng(2)
    w, v, edges, nodes, senders, receivers = graph_data(rng)

    def steps(w: Any, v: Any, edges: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        for _ in range(3):
            nodes = nodes + layer(w, v, edges, nodes, senders, receivers)[1]
        return nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KITSUNE_PROFILE", MACHINE)
        compiled = jax.jit(kj.pipeline(steps)).lower(w, v, edges, nodes, senders, receivers).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="kitsune_cpu"') == 1
    assert text.count('custom_call_target="kitsune_cpu_order"') == 1


def test_a_second_fold_by_other_indices_leaves_the_region_or_has_tables_of_its_own():
    """One order serves one of them; whichever the model prefers for the other, it says so, and nothing is folded twice."""

    def fn(w: Any, edges: Any, senders: Any, receivers: Any) -> tuple[Any, Any]:
        messages = jnp.tanh(edges @ w)
        sums = [jax.ops.segment_sum(messages, by, num_segments=NODES) for by in (senders, receivers)]
        return sums[0], sums[1]

    rng = np.random.default_rng(3)
    graph, found = planned(fn, normal(rng, WIDTH, WIDTH), normal(rng, EDGES, WIDTH), ids(rng), ids(rng))
    scatters = {i for i, op in enumerate(graph.ops) if op.kind == "scatter_sum"}
    inside = [i for p in phases(found) for i in p.region.ops if i in scatters]
    assert len(inside) == len(set(inside))
    assert scatters == set(inside) | {i for i, _ in found.rejected if i in scatters}
    assert all(len(r.orders) <= sum(p.plan.order is not None for p in r.phases) for r in found.regions)


def test_a_segment_softmax_stores_no_array_of_its_edges():
    graph, found = planned(attention, *attention_data(np.random.default_rng(4)))
    stored = [graph.values[v] for r in found.regions for v in r.region.outputs]
    assert found.regions
    assert not [v for v in stored if v.shape[:1] == (EDGES,) and v.dtype == "float32"]


def test_scores_and_indices_are_computed_again_and_sums_are_not():
    graph = graph_of(attention, *attention_data(np.random.default_rng(5)))
    again = recomputed_ops(graph, range(len(graph.ops)), graph.consumers())
    kinds = {graph.ops[i].kind for i in again}
    assert {"take", "add", "exp"} <= kinds
    assert not [k for k in kinds if k.startswith("scatter") or k == "dot_general"]


def test_a_result_that_is_returned_is_not_computed_again():
    def fn(table: Any, by: Any) -> tuple[Any, Any]:
        rows = jnp.take(table, by, axis=0, mode="clip")
        return rows, jax.ops.segment_sum(rows * 2, by, num_segments=table.shape[0])

    rng = np.random.default_rng(6)
    graph = graph_of(fn, normal(rng, 11, 4), ids(rng, 11, 100))
    again = recomputed_ops(graph, range(len(graph.ops)), graph.consumers())
    assert not [i for i in again if graph.ops[i].kind == "take"]


def training_step(w: Any, v: Any, edges: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
    def loss(w: Any, v: Any) -> Any:
        _, total = layer(w, v, edges, nodes, senders, receivers)
        return jnp.sum(total * total)

    return jax.value_and_grad(loss, (0, 1))(w, v)


HIDDEN = 64


def training_of_wide_messages(w: Any, v: Any, edges: Any, receivers: Any) -> Any:
    """Few numbers come with an edge and few go to its node, many lie between."""

    def loss(w: Any, v: Any) -> Any:
        messages = jax.nn.relu(jax.nn.relu(edges @ w) @ v)
        total = jax.ops.segment_sum(messages, receivers, num_segments=100_003)
        return jnp.sum(total * total)

    return jax.value_and_grad(loss, (0, 1))(w, v)


def wide_messages(edges: int = 1_000_003) -> tuple[Any, ...]:
    """Shapes of arrays that no cache holds."""
    floats = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, HIDDEN), (HIDDEN, 16), (edges, 8)))
    return (*floats, jax.ShapeDtypeStruct((edges,), "int32"))


def test_a_backward_pass_makes_its_forward_pass_again_where_storing_it_takes_longer():
    """The sums of the messages stand between the passes, so both stream over the edges, one after the other."""
    graph, found = planned(training_of_wide_messages, *wide_messages())
    rows = wide_messages()[2].shape[0]
    over_edges = [p.region for p in phases(found) if p.region.space.rows == rows]
    assert len(over_edges) >= 2
    wide = [v for r in over_edges for v in r.outputs if graph.values[v].shape == (rows, HIDDEN)]
    assert not wide
    backward = max(over_edges, key=lambda r: len(r.ops))
    assert any(graph.ops[i].kind == "dot_general" for i in backward.recomputed)
    for r in over_edges:  # what a region computes again streams there too, and all that it reads is in memory
        made = {v for i in r.ops for v in graph.ops[i].outputs}
        read = {v for i in r.ops for v in graph.ops[i].inputs if graph.values[v].literal is None}
        assert read <= made.union(r.inputs)
        assert set(r.recomputed) <= set(r.ops)


def test_only_what_products_make_is_stored_where_the_rest_is_pointwise():
    """JAX keeps four arrays of a layer normalisation; all of them are made of its operand."""
    rows = 20_011

    def training(w: Any, v: Any, edges: Any, receivers: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            messages = jax.nn.standardize(jax.nn.relu(edges @ w) @ v, epsilon=1e-5)
            total = jax.ops.segment_sum(messages, receivers, num_segments=3_001)
            return jnp.sum(total * total)

        return jax.value_and_grad(loss, (0, 1))(w, v)

    shapes = (128, 128), (128, 128), (rows, 128)
    args = (*(jax.ShapeDtypeStruct(s, "float32") for s in shapes), jax.ShapeDtypeStruct((rows,), "int32"))
    graph, found = planned(training, *args)
    over_edges = [p.region for p in phases(found) if p.region.space.rows == rows]
    stored = {v for r in over_edges for v in r.outputs if graph.values[v].size == rows * 128}
    makers = graph.producers()
    assert {graph.ops[makers[v]].kind for v in stored} <= {"max", "dot_general"}
    assert len(stored) == 2
    again = [graph.ops[i].kind for r in over_edges for i in r.recomputed]
    assert again and "dot_general" not in again


def test_operators_that_are_computed_twice_count_once():
    graph, found = planned(training_of_wide_messages, *wide_messages())
    report = found.report
    inside = {i for p in phases(found) for i in p.region.ops}
    assert sum(len(p.region.ops) for p in phases(found)) > len(inside)
    assert report.ops_pipelined <= len(inside)
    assert inside.isdisjoint(i for i, _ in found.rejected)
    assert report.ops_total <= len(graph.ops)


def test_a_step_gives_the_gradients_that_jax_gives():
    rng = np.random.default_rng(9)
    data = graph_data(rng)
    args = (0.1 * data[0], 0.1 * data[1], *data[2:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KITSUNE_PROFILE", MACHINE)
        with kj.config.override(strict=True):
            got = jax.jit(kj.pipeline(training_step))(*args)
    wanted = jax.jit(training_step)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert float(jnp.max(jnp.abs(g - w))) < 2e-4 * float(jnp.max(jnp.abs(w)))


# -- what it costs


def cost_over_edges(fn: Any, *args: Any) -> tuple[Any, Any, CpuCost]:
    graph, found = planned(fn, *args)
    phase = max(phases(found), key=lambda p: p.region.space.rows)
    own = isolate(graph, phase.region)
    plan = own.in_own_graph(phase.plan)
    return own, plan, CpuCost(own.graph, own.region, cpu_model(MACHINE), plan.order)


def test_a_table_is_neither_packed_nor_read_whole():
    rng = np.random.default_rng(10)

    def fn(table: Any, by: Any, w: Any) -> Any:
        return jnp.tanh(jnp.take(table, by, axis=0, mode="clip") @ w)

    rows, n = 20_011, 1_000_003
    graph, found = planned(fn, jax.ShapeDtypeStruct((n, 64), "float32"), ids(rng, n, rows), normal(rng, 64, 64))
    (region,) = found.regions
    cost = CpuCost(graph, region.region, cpu_model(MACHINE))
    (table,) = cost.tables
    assert graph.values[table].shape == (n, 64)
    assert table not in cost.stationary_inputs(region.region.ops)
    assert cost.read_bytes(table) == rows * 64 * 4
    assert pipeline_traffic(cost) < 3 * rows * 64 * 4


def test_an_order_is_renamed_with_its_plan():
    own, plan, cost = cost_over_edges(lambda *a: layer(*a)[1], *graph_data(np.random.default_rng(11)))
    assert plan.order in orders_of(own.graph, own.region)
    assert own.in_own_graph(own.in_whole_graph(plan)) == plan
    assert order_seconds(cost) > 0


def test_indices_that_are_sorted_need_no_order():
    rng = np.random.default_rng(12)

    def fn(w: Any, edges: Any, by: Any) -> Any:
        return jax.ops.segment_sum(jnp.tanh(edges @ w), by, num_segments=NODES, indices_are_sorted=True)

    graph, found = planned(fn, normal(rng, WIDTH, WIDTH), normal(rng, EDGES, WIDTH), jnp.sort(ids(rng)))
    for region in found.regions:
        assert not orders_of(graph, region.region)
        assert region.plan.order is None and not region.orders


@pytest.mark.parametrize("width", [1, 3, 16, 64, 200, 1000])
@pytest.mark.parametrize("table", [1 << 14, 1 << 22, 1 << 28])
def test_rows_cost_more_the_wider_they_are_and_the_further_away(width, table):
    times = times_of(cpu_model(MACHINE).profile)
    here = times.access(Access(1, 4 * width, table, False, False))
    assert 0 < here <= times.access(Access(1, 8 * width, table, False, False))
    assert here <= times.access(Access(1, 4 * width, 4 * table, False, False)) * 1.0001
    assert times.access(Access(1, 4 * width, table, False, True)) <= here * 1.0001
    assert times.access(Access(3, 4 * width, table, False, False)) == pytest.approx(3 * here)
