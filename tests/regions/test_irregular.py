"""Functions over graphs and tables, forced into pipelines: values, gradients, transformations, at ids that people do not draw."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.planning.streams import Seed, spread
from tests.program.test_build import run_through_interpreter
from tests.support.checks import count
from tests.support.gradient_checks import check_close

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

Array = Any
NODES, WIDTH = 11, 6
force = functools.partial(kj.pipeline, force=True)


def message_passing(nodes: Array, edges: Array, w: Array, senders: Array, receivers: Array) -> Array:
    messages = jnp.tanh(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1) @ w)
    return nodes + jax.ops.segment_sum(messages, receivers, NODES)


def attention(nodes: Array, edges: Array, w: Array, senders: Array, receivers: Array) -> Array:
    """A softmax over the edges of each receiver."""
    receivers = receivers % NODES
    h = nodes @ w[:WIDTH]
    scores = jnp.sum(h[senders] * jnp.sin(h[receivers]) + edges, -1)
    most = jax.lax.stop_gradient(jax.ops.segment_max(scores, receivers, NODES))
    weights = jnp.exp(scores - most[receivers])
    total = jax.ops.segment_sum(weights, receivers, NODES)
    return jax.ops.segment_sum((weights / total[receivers])[:, None] * h[senders], receivers, NODES)


def embedding(nodes: Array, edges: Array, w: Array, senders: Array, receivers: Array) -> Array:
    """Two tables, one of them read twice, clipped."""
    x = jnp.take(nodes, senders, axis=0, mode="clip") + nodes.at[receivers].get(mode="clip")
    return jnp.tanh(jnp.concatenate([x, edges, w[:, :3][jnp.clip(senders, 0, 5)]], -1)).sum(-1)


def pooling(nodes: Array, edges: Array, w: Array, senders: Array, receivers: Array) -> Array:
    """The largest and the least of two segments, by both ids."""
    most = jax.ops.segment_max(jnp.sin(edges), receivers, NODES)
    least = jax.ops.segment_min(jnp.sin(edges) * nodes[senders], senders, NODES)
    return jnp.where(jnp.isfinite(most), most, 0) + jnp.where(jnp.isfinite(least), least, 0)


def interaction(nodes: Array, edges: Array, w: Array, senders: Array, receivers: Array) -> Array:
    """As DLRM's: pairs of what each edge looks up, without a selection."""
    vectors = jnp.stack([edges, nodes[jnp.clip(senders, 0, NODES - 1)], jnp.sin(edges)], 1)
    return jnp.einsum("bif,bjf->bij", vectors, vectors).reshape(len(edges), 9) @ w[:9, :4]


def selection(nodes: Array, edges: Array, w: Array, senders: Array, receivers: Array) -> Array:
    """A static selection in each row, with one element twice."""
    products = jnp.einsum("bi,bj->bij", edges, jnp.sin(edges))
    rows, columns = jnp.tril_indices(WIDTH)
    return jnp.tanh(products[:, rows, columns]).sum(-1)


def of_arrays(f: Callable[..., Array]) -> Callable[..., Array]:
    """``f`` of JAX's arrays, also where a test closes over NumPy's."""
    return lambda *args: f(*map(jnp.asarray, args))


FUNCTIONS: dict[str, Callable[..., Array]] = {
    f.__name__: of_arrays(f) for f in (message_passing, attention, embedding, pooling, interaction, selection)
}


def drawn(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    ids = rng.integers(0, NODES, n)
    if kind == "equal":
        ids[:] = 4
    elif kind == "outside":
        ids = rng.choice([NODES, NODES + 3, 2**31 - 1], n)
    elif kind == "negative":
        ids = rng.integers(-NODES, NODES, n)
    elif kind == "beyond":
        ids = rng.integers(-NODES - 3, NODES + 3, n)
    elif kind == "sorted":
        ids = np.sort(ids)
    elif kind == "half":
        ids[: n // 2] = 0
    return ids.astype(np.int32)


def arguments(edges: int = 37, ids: str = "any", dtype: str = "float32", seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((NODES, WIDTH), (edges, WIDTH), (3 * WIDTH, WIDTH))
    nodes, of_edges, w = ((0.7 * rng.standard_normal(s)).astype(jnp.dtype(dtype)) for s in shapes)
    return [nodes, of_edges, w, drawn(rng, ids, edges), drawn(rng, ids, edges)]


def gradients(f: Callable[..., Array], by: tuple[int, ...] = (0, 1, 2)) -> Callable[..., Any]:
    def loss(*args: Array) -> Array:
        return jnp.sum(jnp.sin(f(*args)).astype(jnp.float32))

    return jax.grad(loss, by)


def pipelined(f: Callable[..., Any], *args: Any) -> Any:
    compiled = jax.jit(f).lower(*args).compile()
    assert count(compiled.as_text()) > 0, "nothing was pipelined"
    return compiled(*args)


IDS = ("any", "equal", "negative", "beyond", "sorted", "half")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, ids: str) -> None:
    f, args = FUNCTIONS[name], arguments(ids=ids)
    check_close(pipelined(force(f), *args), f, args, "float32", 32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ids", ["any", "negative", "half"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str, ids: str) -> None:
    f, args = FUNCTIONS[name], arguments(ids=ids, seed=1)
    check_close(pipelined(force(gradients(f)), *args), gradients(f), args, "float32", 64, per_array=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("name", ["message_passing", "attention", "interaction"])
def test_gradients_by_some_arguments(name: str, by: tuple[int, ...]) -> None:
    f, args = FUNCTIONS[name], arguments(edges=23, seed=2)
    check_close(pipelined(gradients(force(f), by), *args), gradients(f, by), args, "float32", 64, per_array=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_in_16_bits(name: str, dtype: str) -> None:
    f, args = FUNCTIONS[name], arguments(edges=61, dtype=dtype, seed=3)
    check_close(pipelined(force(f), *args), f, args, dtype, 32, per_array=True)


@pytest.mark.parametrize("edges", [1, 2, 131, 400])
@pytest.mark.parametrize("name", ["message_passing", "attention", "pooling"])
def test_one_edge_and_many(name: str, edges: int) -> None:
    f, args = FUNCTIONS[name], arguments(edges=edges, seed=4)
    check_close(pipelined(force(f), *args), f, args, "float32", 32, per_array=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_edge(name: str) -> None:
    f, args = FUNCTIONS[name], arguments(edges=0)
    np.testing.assert_array_equal(jax.jit(force(f))(*args), jax.jit(f)(*args))


def test_ids_that_are_all_out_of_range_are_dropped_and_read_as_jax_reads_them() -> None:
    args = arguments(ids="outside", seed=5)

    def f(nodes: Array, edges: Array, w: Array, senders: Array, receivers: Array) -> Any:
        summed = jax.ops.segment_sum(jnp.sin(edges), receivers, NODES)
        return summed, jnp.take(nodes, senders, axis=0) * edges, nodes.at[senders].get(mode="fill", fill_value=2.0) * edges

    for got, want in zip(pipelined(force(f), *args), jax.jit(f)(*args), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_under_vmap_jvp_scan_and_remat(name: str) -> None:
    f, args = FUNCTIONS[name], arguments(edges=17, seed=6)
    several = [np.stack([args[1], args[1] * 0.5])]

    def batched(g: Callable[..., Array]) -> Callable[..., Any]:
        return lambda edges: jax.vmap(lambda e: g(args[0], e, *args[2:]))(edges)

    def tangents(g: Callable[..., Array]) -> Callable[..., Any]:
        return lambda nodes, edges: jax.jvp(lambda n, e: g(n, e, *args[2:]), (nodes, edges), (jnp.cos(nodes), jnp.sin(edges)))

    def looped(g: Callable[..., Array]) -> Callable[..., Any]:
        def step(edges: Array, scale: Array) -> tuple[Array, Array]:
            return edges * 0.9, g(args[0] * scale, edges, *args[2:])

        return lambda edges: jax.lax.scan(step, edges, jnp.ones(3, edges.dtype))

    def again(g: Callable[..., Array]) -> Callable[..., Any]:
        return gradients(jax.checkpoint(g))

    for transformed, given in ((batched, several), (tangents, args[:2]), (looped, [args[1]]), (again, args)):
        check_close(jax.jit(transformed(force(f)))(*given), transformed(f), given, "float32", 128, per_array=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ids", ["any", "negative"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_the_interpreter(name: str, ids: str) -> None:
    f, args = FUNCTIONS[name], arguments(ids=ids, edges=29, seed=7)
    for g in (f, gradients(f)):
        got, regions = run_through_interpreter(g, *args)
        assert regions
        like = jax.tree.structure(jax.eval_shape(g, *args))
        check_close(jax.tree.unflatten(like, got), g, args, "float32", 64, per_array=True)


# --- where a stream goes, and where it ends ---------------------------------------------------------------------------------------


def spread_over_edges(f: Callable[..., Array]) -> Any:
    args = arguments()
    graph = capture(jax.make_jaxpr(f)(*args)).graph
    return graph, spread(graph, Seed(graph.inputs[1], (0,)), range(len(graph.ops)), lambda i: None)


def test_edges_stream_from_their_lookups_to_their_sums() -> None:
    graph, found = spread_over_edges(lambda *a: message_passing(*a) - a[0])
    kinds = [graph.ops[i].kind for i in found.ops]
    assert kinds.count("take") == 2 and "dot_general" in kinds and "tanh" in kinds
    assert [graph.ops[i].kind for i in found.sinks] == ["scatter_sum"]
    assert set(found.stops.values()) <= {"a reduction over the stream has a streamed result"} or not found.stops


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda n, e, w, s, r: jnp.sin(e)[s], "any row of its table, which is complete only after"),
        (lambda n, e, w, s, r: (n[s] * e).T @ jax.ops.segment_sum(e, r, len(s)), "any row of its result may change"),
        (lambda n, e, w, s, r: (n.T[:, s] * e.T).sum(0), "must index the first dimension of its table"),
    ],
)
def test_a_stream_ends_with_a_reason(f: Callable[..., Array], words: str) -> None:
    graph, found = spread_over_edges(f)
    reached = {**found.stops}
    assert any(words in why for why in reached.values()), reached


def test_a_product_per_row_streams_over_what_its_operands_share() -> None:
    args = arguments()
    graph = capture(jax.make_jaxpr(interaction)(*args)).graph
    found = spread(graph, Seed(graph.inputs[1], (0,)), range(len(graph.ops)), lambda i: None)
    dots = [i for i, op in enumerate(graph.ops) if op.kind == "dot_general"]
    assert set(dots) <= set(found.ops)
    both = jnp.einsum
    outer = capture(jax.make_jaxpr(lambda x, y: both("if,jf->ij", jnp.sin(x), y))(args[1], args[1])).graph
    (dot,) = (i for i, op in enumerate(outer.ops) if op.kind == "dot_general")
    rows = spread(outer, Seed(outer.ops[dot].outputs[0], (0, 1)), range(len(outer.ops)), lambda i: None)
    assert "over dimensions that are not batch dimensions of both" in rows.stops[dot]


def test_many_pieces_are_concatenated_in_one_stream() -> None:
    """As DLRM's embeddings and its numbers, forward and backward; it has 26 of them."""
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal((n, 4)).astype(np.float32) for n in range(5, 17)]
    x, ids = rng.standard_normal((33, 4)).astype(np.float32), rng.integers(0, 5, (33, 12)).astype(np.int32)

    def f(tables: list[Array], x: Array, ids: Array) -> Array:
        pieces = [jnp.sin(x), *(table[ids[:, k]] for k, table in enumerate(tables))]
        stacked = jnp.stack(pieces, 1)[:, ::2].reshape(33, -1)
        return jnp.sum(jnp.concatenate([jnp.tanh(jnp.concatenate(pieces, -1)), stacked], -1) ** 2)

    for g in (f, jax.grad(f, (0, 1))):
        report = kj.explain(g, force=True)(tables, x, ids)
        assert report.ops_pipelined == report.ops_total, str(report)
        check_close(pipelined(force(g), tables, x, ids), g, (tables, x, ids), "float32", 64, per_array=True)
