"""The streams pass: which axis of which value streams, and where and why a stream stops."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.lower import NETWORKS
from kitsune_jax.planning.streams import DimLabels, Seed, StreamSpace, Wiring, row_shape, row_strides, spread
from kitsune_jax.regions.select import select
from tests.support.graphs import graph_of, layer_norm, mlp, mlp_params

RNG = np.random.default_rng(0)
F32 = jnp.float32


def everything(_: int) -> str | None:
    return None


def spread_from_input(fn, *args, number: int = 0, dims: tuple[int, ...] = (0,)):
    graph = graph_of(fn, *args)
    return graph, spread(graph, Seed(graph.inputs[number], dims), range(len(graph.ops)), everything)


def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, F32)


def left_out(graph, sp) -> set[str]:
    """Kinds of the ops that do not stream."""
    return {op.kind for i, op in enumerate(graph.ops) if i not in sp.ops}


def output_label(graph, sp, number: int = 0) -> DimLabels | None:
    return sp.labels.get(graph.outputs[number])


def test_a_batch_streams_through_an_mlp_and_weights_stay_stationary():
    params = mlp_params(RNG, (5, 7, 3))
    graph, sp = spread_from_input(lambda x, p: mlp(p, x), zeros(11, 5), params)
    assert sp.space == StreamSpace((11,))
    assert left_out(graph, sp) <= {"reshape", "broadcast_in_dim"}  # of a bias [n] to [1, n], which is stationary
    assert output_label(graph, sp) == ((0,), ())
    assert all(v not in sp.labels for v in graph.inputs[1:])
    assert not sp.sinks


@pytest.mark.parametrize("fn", [jax.nn.softmax, jax.nn.gelu, jax.nn.silu, jax.nn.logsumexp])
def test_activations_and_softmax_stream_over_the_batch(fn):
    graph, sp = spread_from_input(fn if fn is not jax.nn.logsumexp else lambda x: jax.nn.logsumexp(x, -1), zeros(6, 9))
    assert sp.ops == tuple(range(len(graph.ops)))
    assert output_label(graph, sp)[0] == (0,)


def test_layer_norm_streams_over_two_leading_axes():
    graph, sp = spread_from_input(layer_norm, zeros(2, 3, 8), zeros(8), zeros(8), dims=(0, 1))
    assert sp.space.sizes == (2, 3)
    assert left_out(graph, sp) <= {"reshape", "broadcast_in_dim"}
    assert output_label(graph, sp) == ((0,), (1,), ())


def test_a_value_may_depend_on_a_part_of_the_space():
    graph, sp = spread_from_input(lambda x, pos: x + pos, zeros(4, 5, 6), zeros(5, 6), dims=(0, 1))
    pos = sp.labels[graph.inputs[1]]
    assert pos == ((1,), ())
    assert row_strides((5, 6), pos, sp.space) == (0, 6)


def test_a_reduction_over_the_whole_stream_is_a_sink():
    graph, sp = spread_from_input(lambda x: jnp.mean(x * x), zeros(8, 3))
    kinds = [graph.ops[i].kind for i in sp.sinks]
    assert kinds == ["reduce_sum"]
    assert graph.outputs[0] not in sp.labels


def test_a_reduction_over_a_part_of_the_axes_stops_the_stream():
    graph, sp = spread_from_input(lambda x: x.sum(0), zeros(4, 5, 6), dims=(0, 1))
    assert [graph.ops[i].kind for i in sp.ops] == []
    assert "part of the stream axes" in next(iter(sp.stops.values()))


def test_flattening_leading_axes_keeps_them_apart():
    def fn(x, w):
        return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1)

    graph, sp = spread_from_input(fn, zeros(4, 5, 6), zeros(6, 7), dims=(0, 1))
    assert sp.ops == tuple(range(len(graph.ops)))
    flat = graph.ops[0].outputs[0]
    assert sp.labels[flat] == ((0, 1), ())
    assert output_label(graph, sp) == ((0,), (1,), ())


def test_a_split_of_the_streamed_dimension_refines_the_axis():
    graph, sp = spread_from_input(lambda x: jnp.tanh(x).reshape(3, 4, 5), zeros(12, 5))
    assert sp.space.sizes == (3, 4)
    assert sp.labels[graph.inputs[0]] == ((0, 1), ())
    assert output_label(graph, sp) == ((0,), (1,), ())


def test_a_stream_runs_over_a_trailing_dimension_when_the_weight_comes_first():
    graph, sp = spread_from_input(lambda x, w: jax.nn.relu(w @ x), zeros(5, 13), zeros(7, 5), dims=(1,))
    assert sp.space.sizes == (13,)
    assert output_label(graph, sp) == ((), (0,))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: jnp.cumsum(x, 0), "every index"),
        (lambda x: x[::-1], "every index"),
        (lambda x: x[1:4] * 2, "every index"),
        (lambda x: jnp.sort(x, 0), "sort"),
        (lambda x: x.reshape(2, 4, 3).sum(1), "part of the stream axes"),
        (lambda x: x @ x.T, "both operands stream"),
    ],
)
def test_the_stream_stops_with_a_reason(fn, words):
    graph, sp = spread_from_input(fn, zeros(8, 3))
    assert any(words in why for why in sp.stops.values()), sp.stops


def test_a_contraction_of_the_stream_is_a_sink_and_streams_both_operands():
    """A weight gradient of a backward pass: the residual x is only known to stream because the cotangent does."""
    graph, sp = spread_from_input(lambda ct, x: x.T @ jnp.tanh(ct), zeros(8, 3), zeros(8, 5))
    assert [graph.ops[i].kind for i in sp.sinks] == ["dot_general"]
    assert graph.outputs[0] not in sp.labels
    assert any(axes == ((0,), ()) for v, axes in sp.labels.items() if v == graph.inputs[1])


def test_a_conflict_of_axes_bars_the_op_and_leaves_no_stale_label():
    def fn(x, y):
        return jnp.sin(x) + jnp.cos(y.T)  # streams over dim 0 of x, hence over dim 1 of y

    graph, sp = spread_from_input(lambda x: fn(x, x), zeros(6, 6))
    adds = [i for i, op in enumerate(graph.ops) if op.kind == "add"]
    assert set(adds) & set(sp.stops)
    for i in sp.ops:
        for v in graph.ops[i].outputs:
            assert v in sp.labels


def test_row_shape_and_strides():
    labels = ((1,), (), (0,))
    space = StreamSpace((3, 2))
    assert row_shape((2, 5, 3), labels) == (5,)
    assert row_strides((2, 5, 3), labels, space) == (1, 15)
    assert row_shape((2, 5), None) == (2, 5)


def test_streams_that_many_layers_keep_out_of_the_same_ops_find_that_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of each layer's weights reach the whole training step before they are known to be of no use but to an update."""

    def looks(layers: int) -> int:
        step, args = NETWORKS["step"].make(lambda f: f, layers)
        graph = graph_of(step, *args)
        seen = []

        def counted(*args: Any) -> Any:
            made = spread(*args)
            seen.append(made.looks)
            return made

        monkeypatch.setattr(importlib.import_module("kitsune_jax.regions.select"), "spread", counted)
        select(graph, everything, lambda graph, region: "not planned", force=False)
        return sum(seen)

    few, many = looks(5), looks(20)
    assert few < many <= 5 * few


def attention_products(ds: Any, q: Any) -> Any:
    """What the keys' gradient and a sum over the queries are made of; the sum over heads as well has no batch to belong to."""
    ds = jnp.tanh(ds)
    return jnp.einsum("bhtj,bthd->bhjd", ds, q), ds.sum(2), ds.sum(1), ds.sum()


def test_sums_over_the_rows_of_a_batch_are_sinks():
    graph = graph_of(attention_products, zeros(2, 3, 40, 50), zeros(2, 40, 3, 8))
    seed = Seed(graph.ops[0].outputs[0], (0, 1, 2), 2)
    sp = spread(graph, seed, range(len(graph.ops)), everything)
    assert sp.space == StreamSpace((2, 3, 40), 2)
    keys, over_queries, over_heads, loss = graph.outputs
    made = {graph.ops[i].outputs[0] for i in sp.sinks}
    assert made == {keys, over_queries, loss}
    assert sp.labels[keys] == ((0,), (1,), (), ()) and sp.labels[over_queries] == ((0,), (1,), ())
    assert loss not in sp.labels
    (why,) = [w for i, w in sp.stops.items() if over_heads in graph.ops[i].outputs]
    assert why == "reduces over a part of the stream axes"


def test_a_target_without_sums_of_a_batch_leaves_out_what_only_they_read():
    """The gradient by the keys has scores of its own here: in a stream over the queries they would be stored for it."""

    def gradients(q: Any, k: Any, other: Any) -> tuple[Any, Any]:
        dq = jnp.einsum("bhtj,bhjd->bhtd", jnp.tanh(jnp.einsum("bhtd,bhjd->bhtj", q, k)), k)
        return dq, jnp.einsum("bhtj,bhtd->bhjd", jnp.sin(jnp.einsum("bhtd,bhjd->bhtj", q + other, k)), q)

    graph = graph_of(gradients, *[zeros(2, 3, 40, 8)] * 3)
    kinds = [op.kind for op in graph.ops]
    seed = Seed(graph.ops[kinds.index("tanh")].outputs[0], (0, 1, 2), 2)
    whole = spread(graph, seed, range(len(graph.ops)), everything)
    assert left_out(graph, whole) == set() and [graph.ops[i].outputs[0] for i in whole.sinks] == [graph.outputs[1]]
    sp = spread(graph, seed, range(len(graph.ops)), everything, Wiring(graph, sums_by_batch=False))
    assert [graph.ops[i].kind for i in sp.ops] == ["dot_general", "tanh", "dot_general"] and not sp.sinks
    assert left_out(graph, sp) == {"dot_general", "sin", "add"}
    assert set(sp.stops.values()) == {"sums over the rows of each batch have no code on this target"}


def test_sums_of_scores_without_a_batch_are_left_to_the_other_stream():
    """A single head: by queries what the keys are summed over, by keys the gradient by keys, and no scores are handed on."""

    def gradients(q: Any, k: Any, other: Any) -> tuple[Any, Any]:
        return jnp.tanh(q @ k.T) @ k, jnp.sin((q + other) @ k.T).T @ q

    graph = graph_of(gradients, *[zeros(300, 16)] * 3)
    scores = graph.ops[[op.kind for op in graph.ops].index("tanh")].outputs[0]
    other = graph.ops[[op.kind for op in graph.ops].index("sin")].outputs[0]
    wiring = Wiring(graph, sums_by_batch=False)
    assert {scores, other} <= wiring.scores and not Wiring(graph).scores
    for seed, left in ((Seed(scores, (0,), apart=True), "sin"), (Seed(other, (1,), apart=True), "tanh")):
        sp = spread(graph, seed, range(len(graph.ops)), everything, wiring)
        assert not sp.sinks and left in left_out(graph, sp) and len(sp.stops) > 0
    whole = spread(graph, Seed(scores, (0,)), range(len(graph.ops)), everything, wiring)
    assert len(whole.sinks) == 1


def test_sums_of_a_batch_that_lie_apart_are_no_sinks():
    graph = graph_of(lambda ds: jnp.tanh(ds).sum(1), zeros(2, 40, 50, 3))  # [b, j, h] of [b, t, j, h]
    sp = spread(graph, Seed(graph.ops[0].outputs[0], (0, 3, 1), 2), range(len(graph.ops)), everything)
    assert "the sums of a batch would not lie together" in sp.stops.values() and not sp.sinks


def test_what_adds_a_sum_of_a_batch_to_rows_waits_for_it():
    """Gradients by queries and keys that are slices of one array meet again: the sum is a sink, and they meet behind it."""

    def gradients(ds: Any, q: Any, k: Any) -> Any:
        ds = jnp.tanh(ds)
        dq, dk = jnp.einsum("bhtj,bhjd->bhtd", ds, k), jnp.einsum("bhtj,bhtd->bhjd", ds, q)
        return jnp.pad(dq, ((0, 0),) * 3 + ((0, 8),)) + jnp.pad(dk, ((0, 0),) * 3 + ((8, 0),))

    graph = graph_of(gradients, zeros(2, 3, 40, 40), zeros(2, 3, 40, 8), zeros(2, 3, 40, 8))
    sp = spread(graph, Seed(graph.ops[0].outputs[0], (0, 1, 2), 2), range(len(graph.ops)), everything)
    assert [graph.ops[i].kind for i in sp.sinks] == ["dot_general"]
    (made,) = (graph.ops[i].outputs[0] for i in sp.sinks)
    assert sp.labels[made] == ((0,), (1,), (), ())
    assert "it waits for sums over the rows of the stream" in sp.stops.values()
