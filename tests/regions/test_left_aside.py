"""What costs less outside of a pipeline: what its stream would make again for every index of an axis that it lacks, and weight
gradients that no worker has room for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import targets
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import PlannedRegion, RouteOptions, route
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.streams import Region, StreamSpace
from kitsune_jax.regions.alternatives import possible_cuts, repeated_ops
from kitsune_jax.regions.grow import GraphIndex
from kitsune_jax.targets.cuda.planning import planner, xla
from kitsune_jax.targets.cuda.planning.machines import gpu
from tests.support.graphs import graph_of

BATCH, HEADS, TOKENS, SIZE, BUCKETS = 4, 8, 512, 32, 16


def biased(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Attention as T5's encoder has it: a learned bias for each distance, the same for all of a batch."""
    distance = jnp.clip(jnp.arange(TOKENS) - jnp.arange(TOKENS)[:, None] + BUCKETS // 2, 0, BUCKETS - 1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.moveaxis(table[distance], -1, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def operands() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(BATCH, TOKENS, HEADS, SIZE)] * 3 + [(BUCKETS, HEADS)]
    return [jax.device_put(np.asarray(rng.standard_normal(s), jnp.float32)) for s in shapes]


@pytest.mark.parametrize("device", ["zen5-2", "amx-2", "avx512-64"])
def test_a_bias_that_all_of_a_batch_share_is_looked_up_once(device: str) -> None:
    report = kj.explain(biased, platform="cpu", device=device)(*operands())
    streams = [(r.rows, " ".join(op for stage in r.stages for op in stage.ops)) for r in report.regions]
    streams += [(s.rows, " ".join(s.ops)) for r in report.regions for p in r.later for s in p.spaces]
    (kinds,) = [ops for rows, ops in streams if rows == BATCH * HEADS * TOKENS]
    assert "dot_general" in kinds and "exp" in kinds and "gather" not in kinds, str(report)


def test_the_function_stays_the_same() -> None:
    args = operands()
    np.testing.assert_allclose(jax.jit(kj.pipeline(biased))(*args), jax.jit(biased)(*args), rtol=1e-4, atol=1e-5)
    of_sum = [jax.jit(jax.grad(lambda *a, g=f: jnp.sum(jnp.sin(g(*a))), (0, 3)))(*args) for f in (kj.pipeline(biased), biased)]
    for got, want in zip(*of_sum, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def left_of(function: Any, *args: Any, rows: tuple[int, ...]) -> list[str]:
    """Kinds that ``repeated`` names in a region of all ops; dimensions in front of all values of that rank stream."""
    graph = graph_of(function, *args)
    labels = tuple(
        (i, tuple((d,) if n == rows[d] else () for d, n in enumerate(v.shape)))
        for i, v in enumerate(graph.values)
        if len(v.shape) == len(rows)
    )
    region = Region(StreamSpace(rows), tuple(range(len(graph.ops))), labels, graph.inputs, graph.outputs)
    return [graph.ops[i].kind for i in sorted(repeated_ops(GraphIndex.of(graph), region))]


def test_what_is_made_again_goes_with_all_that_only_it_needs() -> None:
    x, y = jnp.ones((64, 9000)), jnp.ones((1, 9000))
    assert left_of(lambda x, y: x + jnp.sin(y * 2), x, y, rows=(64, 9000)) == ["mul", "sin"]
    assert left_of(lambda x, y: x + y * 2, x, y, rows=(64, 9000)) == []  # arithmetic costs less than an array
    assert left_of(lambda x, y: jnp.sin(x) + y, x, y, rows=(64, 9000)) == []  # of every row another one
    assert left_of(lambda x, y: x + jnp.sin(y * 2), x[:, :90], y[:, :90], rows=(64, 90)) == []  # too little
    assert left_of(lambda x, y: (x * (z := y * 2)) + jnp.sin(z), x, y, rows=(64, 9000)) == ["sin"]  # z stays where it is read


# --- Weight gradients -------------------------------------------------------------------------------------------------------------


def step_of(width: int, layers: int, rows: int) -> tuple[Graph, list[PlannedRegion]]:
    """The loss and the gradients of a network by its weights and biases, planned for an H200."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        for w, b in params:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean((x.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)

    params = [(jax.ShapeDtypeStruct((width, width), "bfloat16"), jax.ShapeDtypeStruct((width,), "bfloat16"))] * layers
    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    options = RouteOptions(device="h200", code=False)
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(params, x, x)
    graph = capture(closed, context=RewriteContext(targets.get("cuda").capabilities, options)).graph
    return graph, list(route(graph, "cuda", options).regions)


def products_of(graph: Graph, region: Region) -> tuple[list[int], list[int]]:
    """(weight gradients, other products)."""
    found = [i for i in region.ops if graph.ops[i].kind == "dot_general"]
    return [i for i in found if i in region.sinks], [i for i in found if i not in region.sinks]


def test_weight_gradients_that_no_worker_has_room_for_are_products_of_stored_arrays() -> None:
    """The backward pass of a deep network: one worker takes a tile through all of it, and XLA multiplies what it stores. By the
    model that takes less time than the backward pass with its gradients, in stages."""
    graph, calls = step_of(256, 8, 262_144)
    backward = max(calls, key=lambda c: len(c.region.outputs))
    gradients, others = products_of(graph, backward.region)
    plan = backward.phases[0].plan
    assert not gradients and len(others) >= 7 and plan.arrangement == "vertical"
    sums = [i for i in backward.region.sinks if graph.values[graph.ops[i].outputs[0]].size == 256]
    assert len(sums) >= 7, "the gradients of the biases stay"

    inside = {i for c in calls for i in c.region.ops}
    left = [i for i, op in enumerate(graph.ops) if op.kind == "dot_general" and i not in inside]
    region, machine = backward.region, gpu("h200")
    read = {v for i in left for v in graph.ops[i].inputs}
    mine = [i for i in left if not set(graph.ops[i].inputs).isdisjoint(region.outputs)]
    labels = region.label_of() | {v: ((0,), ()) for v in read}
    ops = sorted((*region.ops, *mine))
    outputs = [v for v in region.outputs if v not in read] + [v for i in mine for v in graph.ops[i].outputs]
    whole = planner.plan(graph, Region.of(graph, region.space, ops, labels, outputs, {*region.sinks, *mine}), machine)
    assert len(mine) >= 7 and whole.seconds > plan.seconds + xla.of_ops(graph, mine, machine)


def test_small_weight_gradients_stay_in_their_kernel() -> None:
    graph, calls = step_of(32, 3, 262_144)
    gradients, others = products_of(graph, max((c.region for c in calls), key=lambda r: len(r.ops)))
    assert len(gradients) == 3 and others


def step_of_wide_layers(rows: int) -> tuple[Any, list[jax.Array], jax.Array]:
    """A training step of two layers whose gradients take 34 MB, with arguments."""
    rng = np.random.default_rng(1)
    w = [jnp.asarray(rng.standard_normal(shape) / 32, jnp.float32) for shape in ((1024, 4096), (4096, 1024))]

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.square(jnp.tanh(x @ w[0]) @ w[1]))

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    return step, w, jnp.asarray(rng.standard_normal((rows, 1024)), jnp.float32)


@pytest.mark.parametrize(("device", "apart"), [("avx512-64", True), ("avx512-2", False)])
def test_weight_gradients_are_products_of_their_own_where_their_sums_would_leave_cores_idle(device: str, apart: bool) -> None:
    """64 workers with 34 MB each would take 2 GB, which a call does not get; two may have their sums."""
    step, *args = step_of_wide_layers(4096)
    closed = jax.make_jaxpr(step)(*args)
    graph = capture(closed, context=RewriteContext(targets.get("cpu").capabilities)).graph
    phases = [p for call in route(graph, "cpu", RouteOptions(device=device)).regions for p in call.phases]
    gradients = [i for p in phases for i in products_of(graph, p.region)[0]]
    assert len(gradients) == (0 if apart else 2)
    assert sum(len(products_of(graph, p.region)[1]) for p in phases) == (5 if apart else 3)
    assert all(p.plan.replicas == min(p.plan.tiles, int(device.split("-")[1])) for p in phases)


def test_such_products_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_PROFILE", "avx512-64")
    monkeypatch.setenv("KITSUNE_TUNE", "off")
    step, *args = step_of_wide_layers(4096)
    report = kj.explain(step)(*args)
    assert sum(stage.ops.count("dot_general") for r in report.regions for stage in r.stages) >= 3, str(report)
    for got, want in zip(jax.jit(kj.pipeline(step))(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_tile_is_no_larger_than_the_memory_for_all_workers() -> None:
    """The executor has a gigabyte for the tiles of all threads, beside the arrays. With tiles of four of these sequences one thread
    would get memory and the other none: a step of GPT-2 took 4.2 s in tiles of four, 2.0 of fewer (Zen 4)."""

    def loss(x: Any, w: Any, ids: Any) -> Any:
        logits = jax.nn.log_softmax((jnp.tanh(x) @ w).astype(jnp.float32), -1)
        return -jnp.mean(jnp.take_along_axis(logits, ids[..., None], -1))

    shapes = ((8, 256, 768), jnp.bfloat16), ((768, 50_257), jnp.bfloat16), ((8, 256), jnp.int32)
    report = kj.explain(jax.grad(loss, (0, 1)), platform="cpu", device="avx512-2", force=True)(
        *(jax.ShapeDtypeStruct(*s) for s in shapes)
    )
    largest = max(report.regions, key=lambda r: r.ops)
    assert largest.rows == 8 and largest.replicas == 2 and largest.tile_rows <= 2, str(report)


# --- rows of logits ---------------------------------------------------------------------------------------------------------------


def language_model(dtype: Any, tokens: int = 512, width: int = 256, vocabulary: int = 50257) -> tuple[Any, Any]:
    """(logits, loss by the weights) of a layer in front of a table that is the last layer, and arguments."""

    def logits(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["hidden"]) @ w["table"].T

    def loss(w: Any, x: Any) -> Any:
        log_p = jax.nn.log_softmax(logits(w, x).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_p, jnp.arange(tokens)[:, None] * 7 % vocabulary, 1))

    shapes = {"hidden": (width, width), "table": (vocabulary, width)}
    args = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in shapes.items()}, jax.ShapeDtypeStruct((tokens, width), dtype)
    return (logits, jax.value_and_grad(loss)), args


@pytest.mark.parametrize("device", ["zen5-2", "amx-2", "avx512-2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_logits_take_no_room_from_others(device: str, dtype: Any) -> None:
    """They go to memory as they are made. A tile of a few rows would read 50 257 columns of the weight for these alone."""
    (logits, _), args = language_model(dtype)
    (call,) = planned(logits, args, device)[1]
    assert [p.plan.tile_rows >= 64 for p in call.phases] == [True]


def planned(function: Any, args: Any, device: str, force: bool = False) -> tuple[Graph, list[PlannedRegion]]:
    graph = capture(jax.make_jaxpr(function)(*args), context=RewriteContext(targets.get("cpu").capabilities)).graph
    return graph, list(route(graph, "cpu", RouteOptions(device=device, force=force)).regions)


def test_a_loss_can_be_cut_around_the_products_with_its_logits() -> None:
    (_, gradient), args = language_model(jnp.float32)
    graph, calls = planned(gradient, args, "amx-2", force=True)
    phase = max((p for call in calls for p in call.phases), key=lambda p: len(p.region.ops))
    region = phase.region
    cut = possible_cuts(graph, region, (phase.plan, phase.plan), targets.get("cpu").capabilities)[-1]
    parts = [ops for _, ops in cut]
    left = set(region.ops).difference(*parts)
    assert sum(map(len, parts)) + len(left) == len(region.ops)
    assert sorted(graph.ops[i].kind for i in left) == ["dot_general"] * 2  # the gradients by the hidden rows and by the table
    (row,) = {graph.values[v].shape for i in left for v in graph.ops[i].inputs if 50257 in graph.values[v].shape} - {(50257, 256)}
    assert row == (512, 50257)
    made = [{v for i in ops for v in graph.ops[i].outputs} for ops in parts]
    for k, ops in enumerate(parts):  # no part reads what a later one makes
        read = {v for i in ops for v in graph.ops[i].inputs}
        assert all(read.isdisjoint(later) for later in made[k + 1 :])
    products = [sum(graph.ops[i].kind == "dot_general" for i in ops) for ops in parts]
    assert products == [2, 0, 1], products  # the layer and the logits; the softmax; the gradient of the layer's weight
