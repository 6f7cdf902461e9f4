"""Segment softmaxes as pipelines on the CPU: one pass over the edges, for any scores and any ids, in each dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from tests.support.checks import close, in_float64
from tests.support.irregular import ids_of
from tests.support.online import scores_of
from tests.support.segments import attention, attention_arguments, finite_softmax, softmax

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 4e-3}


def pooled(normalised: Any) -> Any:
    """The mean of values [e, heads, width] of each of n segments, weighted by a softmax of scores [e, heads]."""

    def pool(scores: Any, values: Any, ids: Any, n: int) -> Any:
        weights = normalised(scores, ids, n)
        return jax.ops.segment_sum(weights[:, :, None] * values, ids, num_segments=n)

    return pool


def online(f: Any, *args: Any) -> list[str]:
    captured = capture(jax.make_jaxpr(f)(*args), context=RewriteContext(TargetCapabilities(sums_online=True)))
    assert not captured.failures
    return [op.kind for op in captured.graph.ops if op.kind.startswith("scatter_")]


def wanted(f: Any, *args: Any) -> Any:
    wide = [np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
    return in_float64(f, *wide)


@pytest.mark.parametrize("normalised", [softmax, finite_softmax])
def test_the_softmax_of_a_layer_is_one_pass(normalised: Any) -> None:
    args = attention_arguments()
    kinds = ["scatter_exp_sum"] * 2
    assert sorted(online(attention(normalised), *args)) == sorted(kinds + ["scatter_sum"] * (normalised is finite_softmax))


@given(
    st.integers(1, 80), st.integers(1, 9), st.integers(1, 6), st.integers(1, 12), st.sampled_from(list(TOLERANCE)),
    st.sampled_from(["mixed", "equal", "outside", "half"]), st.sampled_from(["normal", "wide", "low", "broken"]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_any_scores_and_ids(rows, heads, width, n, dtype, ids, scores, finite, seed) -> None:
    rng = np.random.default_rng(seed)
    index = ids_of(rng, ids, rows, n)
    s = jnp.asarray(scores_of(rng, scores, rows, heads, index), dtype)
    v = jax.device_put(np.asarray(rng.standard_normal((rows, heads, width)), dtype))
    f = pooled(finite_softmax if finite else softmax)

    def call(s: Any, v: Any, index: Any) -> Any:
        return f(s, v, index, n)

    got = np.asarray(jax.jit(kj.pipeline(call, force=True))(s, v, jnp.asarray(index)), np.float64)
    want = wanted(call, s, v, jnp.asarray(index))
    if scores == "broken" and finite:  # e^score of an infinity, in float64 and here: not a number either way, or an overflow
        want, got = (np.where(np.isfinite(x), x, np.nan) for x in (want, got))
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_node_with_half_of_all_edges(dtype: str) -> None:
    rng = np.random.default_rng(1)
    rows, n = 20_011, 501
    index = jnp.asarray(ids_of(rng, "half", rows, n))
    s, v = (jax.device_put(np.asarray(rng.standard_normal(shape), dtype)) for shape in ((rows, 8), (rows, 8, 8)))

    def call(s: Any, v: Any, index: Any) -> Any:
        return pooled(softmax)(s, v, index, n)

    got = jax.jit(kj.pipeline(call, force=True))(s, v, index)
    assert jax.jit(kj.pipeline(call, force=True))(s, v, index).tobytes() == got.tobytes()
    close(np.asarray(got, np.float64), wanted(call, s, v, index), TOLERANCE[dtype])


@pytest.mark.parametrize("argument", [0, 1, 2, 3, (0, 1, 2, 3)])
def test_gradients(argument: Any) -> None:
    args = attention_arguments(n=37, edges=1009)
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(attention(softmax)(*a))), argument)
    assert "scatter_exp_sum" in online(gradient, *args) or argument == ()
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args))


def test_several_heads_share_a_score_and_extra_factors_stay() -> None:
    rng = np.random.default_rng(0)
    rows, n = 301, 23
    s, v, g = (jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32)) for shape in ((rows,), (rows, 5), (rows, 5)))
    ids = jnp.asarray(ids_of(rng, "mixed", rows, n))

    def gated(s: Any, v: Any, g: Any, ids: Any) -> Any:
        return jax.ops.segment_sum(softmax(s, ids, n)[:, None] * (v * jnp.tanh(g)), ids, num_segments=n)

    assert online(gated, s, v, g, ids) == ["scatter_exp_sum", "scatter_exp_sum"]
    close(jax.jit(kj.pipeline(gated, force=True))(s, v, g, ids), in_float64(gated, s, v, g, ids))


def test_softmaxes_by_two_ids_are_not_one_region() -> None:
    args = attention_arguments(n=37, edges=1009)

    def both(of_edges: Any, of_nodes: Any, values: Any, w: Any, senders: Any, receivers: Any) -> Any:
        a = pooled(softmax)(of_edges, values[senders], receivers, 37)
        return a, pooled(softmax)(of_edges, values[receivers], senders, 37)

    close(jax.jit(kj.pipeline(both))(*args), in_float64(both, *args))
    close(jax.jit(kj.pipeline(both, force=True))(*args), in_float64(both, *args))


def test_a_large_graph_streams_in_the_order_of_its_receivers_and_the_report_says_so() -> None:
    shapes = ((400_003, 8), (40_009, 8), (40_009, 8, 8), (8, 8))
    ids = jax.ShapeDtypeStruct((400_003,), "int32")
    args = (*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes), ids, ids)
    captured = capture(jax.make_jaxpr(attention(softmax))(*args), context=RewriteContext(TargetCapabilities(sums_online=True)))
    found = route(captured.graph, "cpu", RouteOptions(device="zen5-2", code=False, strict=True))
    sums = [i for i, op in enumerate(captured.graph.ops) if op.kind == "scatter_exp_sum"]
    (phase,) = [p for r in found.regions for p in r.phases if set(sums) & set(p.region.ops)]
    assert set(sums) <= set(phase.region.sinks)
    assert phase.plan.order == captured.graph.ops[sums[0]].inputs[1]
    assert "online" in str(found.report)


def test_a_gpu_folds_online_sums_in_one_pass_too() -> None:
    """Of a large graph: it streams once in the order of its receivers, and no maxima are left to be found in front of it."""
    shapes = ((400_003, 8), (40_009, 8), (40_009, 8, 8), (8, 8))
    ids = jax.ShapeDtypeStruct((400_003,), "int32")
    report = kj.explain(attention(softmax), platform="cuda", device="h200", force=True)(
        *(jax.ShapeDtypeStruct(s, "float32") for s in shapes), ids, ids
    )
    spaces = [space for region in report.regions for phase in region.later for space in phase.spaces]
    ops = [op for region in report.regions for stage in region.stages for op in stage.ops]
    ops += [op for space in spaces for op in space.ops]
    assert ops.count("online scatter-add") == 2 and not any("max" in op for op in (*ops, *(r.op for r in report.rejected)))
    assert any("online scatter-add" in space.order for space in spaces)
