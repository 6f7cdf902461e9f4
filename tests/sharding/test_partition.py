"""The program of one shard: any sharding of the operands gives the Graph's results."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from kitsune_jax import _compat
from kitsune_jax.capture.edit import Step
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import PARTITIONED
from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.sharding.calls import Subgraph, graph_from_json, graph_to_json, subgraphs_of
from kitsune_jax.sharding.partition import Spec, evaluate, local_shape, plan_graph, shards
from tests.support.sharded_programs import PROGRAMS, attention, graph_attention, layer, mlp, recurrent

MESH = {"a": 2, "b": 3}


def subgraph_of(f: Any, *args: Any) -> tuple[Graph, list[int], list[int]]:
    """The one subgraph of ``f``, and the arguments and results of ``f`` that its operands and results are."""
    captured = capture(_compat.hoist_consts(jax.make_jaxpr(f)(*args))[0], None, PARTITIONED)
    (found,) = (node for node in subgraphs_of(captured) if isinstance(node, Subgraph))
    inputs, outputs = captured.graph.inputs, captured.graph.outputs
    return found.graph, [inputs.index(v) for v in found.inputs], [outputs.index(v) for v in found.outputs]


def graph_of(f: Any, *args: Any) -> Graph:
    return subgraph_of(f, *args)[0]


def padded(x: Any, spec: Spec) -> Any:
    """``x`` with NaN (or an index out of range) behind its end, as many as fill the shards."""
    local = local_shape(x.shape, spec, MESH)
    full = [n * shards(axes, MESH) for n, axes in zip(local, spec, strict=True)]
    fill = np.nan if np.issubdtype(x.dtype, np.floating) else -7
    return np.pad(x, [(0, n - m) for n, m in zip(full, x.shape, strict=True)], constant_values=fill)


def on_shards(graph: Graph, arrays: Sequence[Any], specs: Sequence[Spec], wanted: Sequence[Spec | None] = ()) -> list[Any]:
    """The results of ``graph`` by the program of one shard on each of six devices."""
    plan = plan_graph(graph, specs, MESH, wanted)
    devices = np.array(jax.devices()[:6]).reshape(2, 3)
    mesh = jax.sharding.Mesh(devices, tuple(MESH))

    def run(*local: Any) -> list[Any]:
        return [jnp.asarray(x) for x in evaluate(graph, plan, local, MESH, specs)]

    as_specs = lambda found: tuple(P(*(axes or None for axes in spec)) for spec in found)  # noqa: E731
    mapped = jax.shard_map(run, mesh=mesh, in_specs=as_specs(specs), out_specs=list(as_specs(plan.outputs)), check_vma=False)
    made = jax.jit(mapped)(*(padded(np.asarray(x), s) for x, s in zip(arrays, specs, strict=True)))
    return [np.asarray(x)[tuple(slice(n) for n in graph.values[v].shape)] for x, v in zip(made, graph.outputs, strict=True)]


def every_sharding(rank: int) -> list[Spec]:
    """All ways to divide an array of that rank by the axes of the mesh, each axis once."""
    choices: list[Spec] = []
    for places in itertools.product((-1, *range(rank)), repeat=2):
        axes: list[tuple[str, ...]] = [()] * rank
        for name, at in zip(MESH, places, strict=True):
            if at >= 0:
                axes[at] = (*axes[at], name)
        choices.append(tuple(axes))
    return choices


def _normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) * 0.3


def _indices(n: int, below: int) -> Any:
    return np.random.default_rng(n).integers(-2, below + 2, n).astype(np.int32)


def masked_attention(q: Any, k: Any, v: Any, hidden: float, narrow: Any = None) -> Any:
    """Most keys are hidden, so that a device may have none that counts."""
    scores = jnp.where(jnp.arange(len(k)) % 6 == 1, q @ k.T, hidden)
    weights = jax.nn.softmax(scores, -1)
    return weights @ v if narrow is None else (weights * 2).astype(narrow) @ v.astype(narrow)


# Sizes that no number of devices divides, and some that all do.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mlp": (mlp, (_normal(7, 6), _normal(6, 12), _normal(12), _normal(12, 5))),
    "gradient of mlp": (
        jax.grad(lambda *a: jnp.sum(mlp(*a) ** 2), (0, 1, 2)),
        (_normal(7, 6), _normal(6, 12), _normal(12), _normal(12, 5)),
    ),
    "attention": (attention, (_normal(2, 6, 3, 4), _normal(2, 6, 3, 4), _normal(2, 6, 3, 4))),
    "layer": (layer, (_normal(3, 6, 12), *(_normal(12, 12) for _ in range(4)), _normal(12, 7), _normal(7, 12))),
    "graph attention": (
        graph_attention,
        (_normal(6, 6), abs(_indices(13, 3)) % 6, abs(_indices(13, 3)) % 6, _normal(6, 6), _normal(6), _normal(6)),
    ),
    "recurrent": (recurrent, (_normal(4, 5, 6), _normal(6, 6), _normal(6, 6))),
    "a table": (lambda t, i: jnp.take(t, i, axis=0) * 2 + jnp.sum(t), (_normal(12, 4), _indices(5, 12))),
    "a table, clipped": (lambda t, i: jnp.sum(jnp.take(t, i, axis=0, mode="clip"), 0), (_normal(12, 4), _indices(5, 12))),
    "sums by index": (lambda x, i: jax.ops.segment_sum(x, i, 6) + 1, (_normal(11, 4), _indices(11, 6))),
    "gradient of a table": (jax.grad(lambda t, i: jnp.sum(jnp.tanh(t[i]) ** 2)), (_normal(60, 4), _indices(6, 60))),
    "largest by index": (lambda x, i: jax.ops.segment_max(x, i, 6), (_normal(11, 4), abs(_indices(11, 6)) % 6)),
    "reshapes": (lambda x: jnp.sum(x.reshape(12, 6).reshape(4, 3, 6).transpose(2, 0, 1).reshape(6, 12), 0), (_normal(2, 6, 6),)),
    "slices": (lambda x: jnp.sum(jnp.concatenate([x[1:], x[:1]]) * jnp.flip(x, 0), 1), (_normal(6, 7),)),
    "slices of slices": (
        lambda x, y: (jnp.roll(x, 3, 0) + jnp.roll(x, -5, 0)[::1], jnp.sum(jnp.concatenate([x[2:9], y, x[8:], x[5:6]]), 1)),
        (_normal(11, 4), _normal(13, 4)),
    ),
    "few elements": (lambda x: (x[-1:] * 2, x[3:5] > 0, x[::2], jnp.sum(x)), (_normal(12, 5),)),
    "splits": (lambda x: [jnp.tanh(a) @ jnp.ones((3, 2)) for a in jnp.split(x, 4, 1)], (_normal(5, 12),)),
    "padding": (
        lambda x, i: (
            jax.lax.pad(x, np.float32(1.5), [(5, -2, 0), (0, 0, 0)]) @ jnp.ones((4, 2)),
            jax.lax.pad(x, np.float32(-1), [(-3, 4, 0), (1, 1, 0)]),
            jax.lax.pad(i > 2, False, [(2, 3, 0)]),
            jax.lax.pad(i, np.int32(7), [(-2, 1, 2)]),
        ),
        (_normal(12, 4), _indices(12, 6)),
    ),
    "a stencil": (
        lambda x: (
            jnp.sum(jax.lax.pad(x[:-2, 1:-1] + x[2:, 1:-1] - x[1:-1, 2:], np.float32(2), [(2, 1, 0), (1, -2, 0)]), 1),
            x[1, 2] * 2,
            x[9:11, 3:],
        ),
        (_normal(12, 6),),
    ),
    "differences": (jax.grad(lambda x: jnp.sum(jnp.tanh((x[1:] - x[:-1]) @ jnp.ones((4, 2))) ** 2)), (_normal(12, 4),)),
    "softmaxes": (
        lambda q, k, v: (
            masked_attention(q, k, v, -jnp.inf),
            masked_attention(q, k, v, -1e30, jnp.bfloat16).astype(jnp.float32) / 8,
            jax.nn.logsumexp(q @ k.T, -1),
            jax.nn.softmax(q @ k.T, -1),
        ),
        (_normal(7, 4), _normal(6, 4) * 20, _normal(6, 5)),
    ),
    "cumulative": (lambda x: jnp.cumsum(x, 0) @ x.T, (_normal(6, 7),)),
    "extremes": (lambda x: (jnp.max(x, 0), jnp.min(x), jnp.argmax(x, 1), jnp.mean(x, 1)), (_normal(7, 6),)),
    "positions": (lambda x: jnp.where(jnp.arange(7)[:, None] >= jnp.arange(6), x, 0.0) @ x.T, (_normal(7, 6),)),
    "a large table": (lambda t, i: jnp.tanh(t[i]), (_normal(120, 4), _indices(6, 120))),
    "a large table, uneven": (lambda t, i: jnp.tanh(t[i]), (_normal(120, 4), _indices(5, 120))),
    "a large table, filled": (
        lambda t, i: jnp.take(t, i, axis=1, mode="fill", fill_value=-2.0),
        (_normal(4, 180), _indices(18, 180).reshape(6, 3)),
    ),
    "sums into a large table": (lambda x, i: jnp.tanh(jax.ops.segment_sum(x, i, 120)), (_normal(11, 4), _indices(11, 120))),
    **{
        f"a cache of {n}, row {at}": (
            lambda cache, row, i: jnp.sum(jax.lax.dynamic_update_slice_in_dim(cache, row, i[0], 1) ** 2, 2),
            (_normal(2, n, 4), _normal(2, 1, 4), np.array([at], np.int32)),
        )
        for n, at in ((12, 0), (12, 7), (12, 40), (11, 10))
    },
    "broadcasts alone": (
        lambda x, y: jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ jnp.ones((6, 2)) + jnp.sum(x),
        (_normal(7, 3), _normal(6, 3)),
    ),
    "any and all": (
        lambda x: (jnp.any(x > 0.5, 0), jnp.all(x < 0.5), jnp.bitwise_or.reduce(jnp.int32(9 * x), 0)),
        (_normal(7, 6),),
    ),
    "a mask that no operand enters": (lambda x: jnp.sum(x) + jnp.tril(jnp.ones((6, 7))), (_normal(6, 7),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_sharding_of_the_operands_gives_the_same_results(name: str, data: st.DataObject) -> None:
    f, args = FUNCTIONS[name]
    graph, inputs, outputs = subgraph_of(f, *args)
    arrays = [args[k] for k in inputs]
    specs = [data.draw(st.sampled_from(every_sharding(np.ndim(x))), label=f"operand {k}") for k, x in enumerate(arrays)]
    wanted = [data.draw(st.sampled_from([None, *every_sharding(len(graph.values[v].shape))])) for v in graph.outputs]
    results = jax.tree.leaves(jax.jit(f)(*args))
    for x, k in zip(on_shards(graph, arrays, specs, wanted), outputs, strict=True):
        np.testing.assert_allclose(x, results[k], rtol=1e-4, atol=1e-4)


def test_rows_that_pad_a_shard_reach_no_sum() -> None:
    """Seven rows on six devices: five of twelve places hold NaN."""
    f = lambda x, w: (jnp.sum(x @ w, 0), jnp.max(x, 0), jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w))  # noqa: E731
    args = _normal(7, 4), _normal(4, 3)
    graph, inputs, outputs = subgraph_of(f, *args)
    specs = [((("a", "b"), ()), ((), ()))[k] for k in inputs]
    results = f(*args)
    for x, k in zip(on_shards(graph, [args[k] for k in inputs], specs), outputs, strict=True):
        np.testing.assert_allclose(x, results[k], rtol=1e-5, atol=1e-5)


def running(x: Any, i: Any) -> list[Any]:
    """Sums, products, extremes and log-sums of all elements up to each."""
    found = jnp.cumsum(x, 0), jax.lax.cumsum(x, 0, reverse=True), jnp.cumsum(i, 0), jax.lax.cummax(i, 0, reverse=True)
    return [*found, jax.lax.cummin(x, 0), jax.lax.cumprod(1 + x, 0, reverse=True), jax.lax.cumlogsumexp(x, 0)]


@pytest.mark.parametrize("rows", [12, 11])
@pytest.mark.parametrize("spec", [(("a",), ()), (("a", "b"), ()), (("b", "a"), ()), (("b",), ("a",))])
def test_what_runs_along_a_divided_dimension(spec: Spec, rows: int) -> None:
    """Each device gets one row of each of the others; NaN fills shards up. Of a reversed dimension it gets the shard of one."""
    x, i = _normal(rows, 6), _indices(rows * 6, 9).reshape(rows, 6)
    for f in (running, lambda x, i: [jnp.flip(x) * jnp.sum(x), jnp.flip(i, 0)]):
        graph, inputs, outputs = subgraph_of(f, x, i)
        arrays, results = [(x, i)[k] for k in inputs], f(x, i)
        for made, k in zip(on_shards(graph, arrays, [spec] * len(arrays)), outputs, strict=True):
            np.testing.assert_allclose(made, results[k], rtol=1e-5, atol=1e-5)
        text = _traced(graph, arrays, [spec] * len(arrays), [None] * len(outputs))
        gathered = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"\[([\d,]+)\] = all_gather", text)]
        if f is running:
            assert gathered == [shards(spec[0], MESH) * local_shape(x.shape, spec, MESH)[1]] * len(outputs)
        elif rows == 12:
            assert not gathered and text.count("= ppermute") == 2 + bool(spec[1])


def _traced(graph: Graph, arrays: Sequence[Any], specs: Sequence[Spec], wanted: Sequence[Spec | None]) -> str:
    plan = plan_graph(graph, specs, MESH, wanted)
    local = [np.zeros(local_shape(x.shape, s, MESH), x.dtype) for x, s in zip(arrays, specs, strict=True)]
    run = lambda *xs: evaluate(graph, plan, xs, MESH, specs)  # noqa: E731
    return str(jax.make_jaxpr(run, axis_env=list(MESH.items()))(*local))


def _step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def _steps(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]))(w)


@pytest.mark.parametrize(
    ("f", "w", "of_w"),
    [
        (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), _normal(6, 3), (("a",), ())),
        (_step, _normal(6, 3), (("a",), ())),
        (_steps, _normal(4, 6, 6), ((), ("a",), ())),
    ],
    ids=["a gradient", "an updated parameter", "gradients of a loop"],
)
def test_a_sum_is_scattered_to_those_who_want_its_parts(f: Any, w: Any, of_w: Spec) -> None:
    x = _normal(12, 6)
    graph, inputs, _ = subgraph_of(f, w, x)
    specs = [(of_w, (("a",), ()))[k] for k in inputs]
    text = _traced(graph, [(w, x)[k] for k in inputs], specs, [of_w])
    assert "reduce_scatter" in text and "psum[" not in text and "all_gather" in text


def test_gradients_are_transposed_before_they_are_summed_over_devices() -> None:
    """JAX transposes the gradient of every weight; behind an all-reduce that would be a copy of the whole weight."""
    f = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    w, x = _normal(6, 4), _normal(12, 6)
    graph, inputs, _ = subgraph_of(f, w, x)
    rows = ("a",), ()
    for of_w, collective in ((((), ()), "psum["), ((("a",), ()), "reduce_scatter"), (((), ("a",)), "reduce_scatter")):
        text = _traced(graph, [(w, x)[k] for k in inputs], [((((), ()), rows)[k]) for k in inputs], [of_w])
        assert text.count(collective) == 1 and text.rindex("transpose[") < text.index(collective)


def test_positions_in_a_narrow_dtype_are_rounded_once() -> None:
    """Position 257 is 256 in bfloat16, and so is 129 + 128 there."""
    f = lambda x: x + jnp.arange(300, dtype=jnp.bfloat16)  # noqa: E731
    x = jnp.zeros(300, jnp.bfloat16)
    graph = graph_of(lambda x: jnp.sum(f(x)[None, :] * jnp.ones((2, 1), jnp.bfloat16), 0), x)
    (made,) = on_shards(graph, [np.asarray(x)], [(("a", "b"),)])
    np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(2 * f(x), np.float32))


def test_a_constant_array_does_not_divide_a_function() -> None:
    captured = capture(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w) @ w.T)(_normal(6, 4), _normal(4, 4)), None, PARTITIONED)
    constant = Op("opaque", (), (1,), reason="a constant array")  # w is now one
    graph = dataclasses.replace(captured.graph, inputs=captured.graph.inputs[:1], ops=(constant, *captured.graph.ops))
    nodes = subgraphs_of(dataclasses.replace(captured, graph=graph, steps=(Step(), *captured.steps)))
    assert nodes[0] == 0
    (found,) = (node for node in nodes if isinstance(node, Subgraph))
    assert sorted(found.inputs) == [0, 1]
    assert all(op.kind != "opaque" for op in found.graph.ops)


def test_a_table_of_which_each_device_has_some_rows_is_made_nowhere() -> None:
    """Neither the table nor its gradient: rows are read and added up where they are."""
    f = jax.grad(lambda table, index: jnp.sum(jnp.tanh(table[index]) ** 2))
    args = _normal(300, 4), abs(_indices(8, 300))
    graph, inputs, _ = subgraph_of(f, *args)
    of_table = (("b",), ())
    text = _traced(graph, [args[k] for k in inputs], [(of_table, (("a",),))[k] for k in inputs], [of_table])
    assert "[300,4]" not in text and "[100,4]" in text and "all_gather" not in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_is_the_same_after_json(name: str) -> None:
    import json

    program = PROGRAMS[name]
    captured = capture(_compat.hoist_consts(jax.make_jaxpr(program.function)(*program.args))[0], None, PARTITIONED)
    for node in subgraphs_of(captured):
        if isinstance(node, Subgraph):
            again = graph_from_json(json.loads(json.dumps(graph_to_json(node.graph))))
            assert again == node.graph
