"""Gathers and scatters as the graph has them, read by NumPy: against lax itself at random dimension numbers and awkward indices."""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.spec import is_float, np_dtype
from reference.graph import evaluate_numpy
from tests.support.checks import in_parts

MODES = ("fill", "clip", "promise_in_bounds")
FOLDS = {
    "scatter_sum": lax.scatter_add,
    "scatter_max": lax.scatter_max,
    "scatter_min": lax.scatter_min,
    "scatter_prod": lax.scatter_mul,
    "sub": lax.scatter_sub,
}


def graph_of(f, *args):
    graph = capture(jax.make_jaxpr(f)(*args)).graph
    assert not [op.reason for op in graph.ops if op.kind == "opaque"]
    return graph


def check(f, *args, tolerance: float = 0.0):
    """The graph of ``f`` gives what JAX gives; returns the kinds of its ops."""
    graph = graph_of(f, *args)
    want = jax.tree.leaves(jax.jit(f)(*args))
    for g, w in zip(evaluate_numpy(graph, [np.asarray(a) for a in args]), want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        wide = np.float64 if is_float(w.dtype) else g.dtype
        np.testing.assert_allclose(g.astype(wide), np.asarray(w).astype(wide), rtol=tolerance, atol=tolerance)
    return [op.kind for op in graph.ops]


def draw_indices(draw, shape, extents, dtype, inside):
    """Positions along dimensions of ``extents``, stacked in the last dimension; out of range now and then unless ``inside``."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    low, high = (0, 0) if inside else (-3, 3)
    parts = [rng.integers(max(low, info.min), n + high, shape) for n in extents]
    index = np.stack(parts, -1) if parts else np.zeros((*shape, 0), int)
    if not inside and draw(st.booleans()):
        far = rng.integers(info.min, info.max, index.shape, dtype=dtype, endpoint=True)
        index = np.where(rng.random(index.shape) < 0.2, far, index)
    return index.astype(dtype)


@st.composite
def numbers(draw):
    """(array shape, index shape, index, dimension numbers of a gather of rows, its slice sizes, the index is in range)."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    dims = list(range(len(shape)))
    roles = draw(st.lists(st.sampled_from(["indexed", "batching", "kept"]), min_size=len(dims), max_size=len(dims)))
    indexed = [d for d in dims if roles[d] == "indexed"]
    hypothesis.assume(indexed)
    batching = [d for d in dims if roles[d] == "batching"]
    own = draw(st.lists(st.integers(1, 4), max_size=2))
    index_dims = draw(st.permutations([*(("own", n) for n in own), *(("batch", d) for d in batching)]))
    batch_shape = tuple(n if what == "own" else shape[n] for what, n in index_dims)
    index_batching = tuple(index_dims.index(("batch", d)) for d in batching)
    index_map = tuple(draw(st.permutations(indexed)))
    dropped = tuple(d for d in indexed if draw(st.booleans()))
    window = [d for d in dims if d not in dropped and d not in batching]
    rank = len(batch_shape) + len(window)
    offset = tuple(sorted(draw(st.permutations(range(rank)))[: len(window)]))
    sizes = tuple(1 if d in indexed or d in batching else shape[d] for d in dims)
    dtype = draw(st.sampled_from(["int8", "uint8", "int16", "int32", "uint32"]))
    mode = draw(st.sampled_from(MODES))
    index = draw_indices(draw, batch_shape, [shape[d] for d in index_map], dtype, mode == "promise_in_bounds")
    return shape, index, (offset, dropped, index_map, tuple(batching), index_batching), sizes, mode


@hypothesis.given(numbers(), st.integers(0, 99))
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_gather_of_rows_at_any_dimension_numbers(case, seed):
    shape, index, (offset, dropped, index_map, batching, index_batching), sizes, mode = case
    numbers = lax.GatherDimensionNumbers(offset, dropped, index_map, batching, index_batching)
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    kinds = check(lambda x, i: lax.gather(x, i, numbers, sizes, mode=mode), x, index)
    assert kinds.count("take") <= 1


@in_parts
@hypothesis.given(numbers(), st.sampled_from(list(FOLDS)), st.booleans(), st.integers(0, 99))
@hypothesis.settings(max_examples=30, deadline=None)
def test_a_scatter_of_rows_at_any_dimension_numbers(part, case, fold, fresh, seed):
    shape, index, (offset, dropped, index_map, batching, index_batching), sizes, mode = case
    numbers = lax.ScatterDimensionNumbers(offset, dropped, index_map, batching, index_batching)
    rng = np.random.default_rng(seed)
    kept = iter([sizes[d] for d in range(len(shape)) if d not in dropped and d not in batching])
    counted = iter(index.shape[:-1])
    given = [next(kept) if k in offset else next(counted) for k in range(len(offset) + index.ndim - 1)]
    identities = {"scatter_max": -np.inf, "scatter_min": np.inf, "scatter_prod": 1.0}
    hypothesis.assume(fresh or np.prod(shape) <= 4 * np.prod(given))
    x, updates = rng.integers(-3, 4, shape).astype(np.float32), rng.integers(-3, 4, given).astype(np.float32)

    def f(x, i, u):
        return FOLDS[fold](jnp.full_like(x, identities.get(fold, 0.0)) if fresh else x, i, u, numbers, mode=mode)

    check(f, x, index, updates)


# --- how people write them --------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(8)
TABLE = RNG.standard_normal((7, 3)).astype(np.float32)
IDS = np.array([0, 6, -1, 7, -8, 3, 3, 2**31 - 1, -(2**31), 100], np.int32)
PAIRS = IDS.reshape(5, 2)
CUBE = RNG.standard_normal((4, 5, 5)).astype(np.float32)
TRIANGLE = np.tril_indices(5)
READS = {
    "rows": lambda t, i: t[i],
    "jnp_take": lambda t, i: jnp.take(t, i, axis=0),
    "jnp_take_clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "jnp_take_fill": lambda t, i: jnp.take(t, i, axis=0, fill_value=7.5),
    "jnp_take_columns": lambda t, i: jnp.take(t, i, axis=1),
    "jnp_take_flat": lambda t, i: jnp.take(t, i),
    "get_clip": lambda t, i: t.at[i].get(mode="clip"),
    "get_fill": lambda t, i: t.at[i].get(mode="fill", fill_value=-2.0),
    "get_no_wrap": lambda t, i: t.at[i].get(mode="fill", wrap_negative_indices=False),
    "two_components": lambda t, i: t[i, i],
    "two_components_clip": lambda t, i: t.at[i, i - 1].get(mode="clip"),
    "a_number_and_ids": lambda t, i: t[i, 1],
    "columns": lambda t, i: t[:, i],
    "along": lambda t, i: jnp.take_along_axis(t, jnp.stack([i[:3], i[3:6]]), 0),
    "along_rows": lambda t, i: jnp.take_along_axis(t, i[:7, None] * jnp.ones((1, 4), jnp.int32), 1),
    "vmapped_ids": lambda t, i: jax.vmap(lambda k: t[k])(i),
    "dynamic_slices": lambda t, i: jax.vmap(lambda k: lax.dynamic_slice(t, (k, 0), (1, 3)))(i),
    "dynamic_slices_of_columns": lambda t, i: jax.vmap(lambda k: lax.dynamic_index_in_dim(t, k, 1))(i),
    "vmapped_table": lambda t, i: jax.vmap(lambda row: row[i])(t),
    "vmapped_both": lambda t, i: jax.vmap(lambda row, k: row[k])(t, jnp.stack([i[:7], i[3:]], 1)),
    "new_dimension_between": lambda t, i: t[i][:, None, i % 3],
}
SUMS = {
    "segment_sum": lambda u, i: jax.ops.segment_sum(u, i, 7),
    "segment_max": lambda u, i: jax.ops.segment_max(u, i, 7),
    "segment_min": lambda u, i: jax.ops.segment_min(u, i, 7),
    "segment_prod": lambda u, i: jax.ops.segment_prod(u, i, 7),
    "one_segment": lambda u, i: jax.ops.segment_sum(u, i, 1),
    "clipped": lambda u, i: jax.ops.segment_sum(u, i, 7, mode="clip"),
    "added": lambda u, i: jnp.ones((7, 3), u.dtype).at[i].add(u),
    "subtracted": lambda u, i: jnp.ones((7, 3), u.dtype).at[i].subtract(u),
    "multiplied": lambda u, i: (2 * jnp.ones((7, 3), u.dtype)).at[i].multiply(u),
    "largest": lambda u, i: jnp.zeros((7, 3), u.dtype).at[i].max(u),
    "least": lambda u, i: jnp.zeros((7, 3), u.dtype).at[i].min(u, mode="clip"),
    "into_columns": lambda u, i: jnp.zeros((3, 7), u.dtype).at[:, i].add(u.T),
    "two_components": lambda u, i: jnp.zeros((7, 3), u.dtype).at[i, i - 2].add(u[:, 0]),
    "vmapped_updates": lambda u, i: jax.vmap(lambda c: jax.ops.segment_sum(c, i, 7), 1, 1)(u),
    "vmapped_ids": lambda u, i: jax.vmap(lambda k: jax.ops.segment_sum(u, k, 7))(jnp.stack([i, i[::-1]])),
    "pairs": lambda u, i: jnp.zeros((7, 3), u.dtype).at[i.reshape(5, 2)].add(u.reshape(5, 2, 3)),
}


@pytest.mark.parametrize("name", READS)
def test_a_lookup_reads_what_jax_reads(name):
    check(READS[name], TABLE, IDS)


@pytest.mark.parametrize("name", READS)
def test_its_gradient_is_what_jax_says(name):
    shape = jax.eval_shape(READS[name], TABLE, IDS).shape
    ct = RNG.integers(-4, 5, shape).astype(np.float32)
    check(lambda t, i, ct: jax.vjp(lambda t: READS[name](t, i), t)[1](ct), TABLE, IDS, ct)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("name", SUMS)
def test_a_segment_reduction_folds_what_jax_folds(name, dtype):
    u = RNG.integers(1 if dtype == "uint8" else -2, 3, (10, 3)).astype(np_dtype(dtype))
    check(SUMS[name], u, IDS)


@pytest.mark.parametrize("name", [name for name in SUMS if name not in ("segment_prod", "multiplied")])  # JAX has no such gradient
def test_gradients_and_tangents_of_a_segment_reduction(name):
    u = RNG.permutation(30).reshape(10, 3).astype(np.float32) % 7 + 1
    du = RNG.integers(-4, 5, u.shape).astype(np.float32)
    ct = RNG.integers(-4, 5, jax.eval_shape(SUMS[name], u, IDS).shape).astype(np.float32)
    check(lambda u, i, ct: jax.vjp(lambda u: SUMS[name](u, i), u)[1](ct), u, IDS, ct, tolerance=1e-5)
    check(lambda u, i, du: jax.jvp(lambda u: SUMS[name](u, i), (u,), (du,)), u, IDS, du, tolerance=1e-5)


def test_a_static_selection_in_each_row_is_a_take_along_the_row():
    """DLRM's lower triangle: neither the matrix nor the result changes the order of its dimensions."""
    i, j = (jnp.asarray(a) for a in TRIANGLE)
    assert set(check(lambda x, i, j: x[:, i, j], CUBE, i, j)) - {"take", "reshape"} <= {
        "lt", "add", "select_n", "concatenate", "ge", "and", "mul", "clamp", "broadcast_in_dim", "convert_element_type",
    }  # fmt: skip
    graph = graph_of(lambda x, i, j: x[:, i, j], CUBE, i, j)
    (take,) = (op for op in graph.ops if op.kind == "take")
    assert take["axis"] == 1 and graph.values[take.inputs[0]].shape == (4, 25)


def test_one_element_of_each_row_where_the_rows_of_the_result_have_another_order():
    x, index = RNG.standard_normal((5, 7, 11)).astype(np.float32), RNG.integers(0, 11, (7, 1)).astype(np.int32)
    numbers = lax.GatherDimensionNumbers((1,), (2,), (2,), (1,), (0,))
    check(lambda x, i: lax.gather(2 * x, i, numbers, (5, 1, 1), mode="clip"), x, index)
    numbers = lax.ScatterDimensionNumbers((1,), (2,), (2,), (1,), (0,))
    updates = RNG.standard_normal((7, 5)).astype(np.float32)
    check(lambda i, u: lax.scatter_add(jnp.zeros((5, 7, 11), u.dtype), i, u, numbers, mode="clip"), index, updates)


@pytest.mark.parametrize("ids", [np.zeros(0, np.int32), np.array([2], np.int32), np.full(9, 3, np.int32), np.full(9, -9, np.int32)])
def test_no_id_one_id_and_equal_ids(ids):
    u = RNG.integers(-3, 4, (len(ids), 3)).astype(np.float32)
    check(lambda t, i: t[i], TABLE, ids)
    for n in (0, 1, 7):
        check(lambda u, i, n=n: jax.ops.segment_sum(u, i, n), u, ids)
    check(lambda u, i: jax.ops.segment_max(u, i, 7), u, ids)
    check(lambda t, i, u: jax.vjp(lambda t: t[i], t)[1](u), TABLE, ids, u)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_indices_of_every_integer_out_of_range(dtype, mode):
    """64 bits: JAX reads an index that may be filled modulo 2**32, and drops what a scatter would put out of range."""
    info = np.iinfo(dtype)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        ids = np.array([0, 3, 6, 7, info.max, info.min, info.max - 2, info.max // 2 + 2], dtype)
        gather = lax.GatherDimensionNumbers((1,), (0,), (0,))
        scatter = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        both = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
        check(lambda t, i: lax.gather(t, i[:, None], gather, (1, 3), mode=mode), TABLE, ids)
        check(lambda t, i: lax.gather(t, jnp.stack([i, i], 1), both, (1, 1), mode=mode), TABLE, ids)
        u = RNG.integers(-3, 4, (8, 3)).astype(np.float32)
        check(lambda u, i: lax.scatter_add(jnp.zeros((7, 3), u.dtype), i[:, None], u, scatter, mode=mode), u, ids)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "float32"])
def test_what_an_index_out_of_range_gives_in_every_dtype(dtype):
    table = RNG.integers(0, 2, (7, 3)).astype(np_dtype(dtype))
    check(lambda t, i: t.at[i].get(mode="fill"), table, IDS)
    check(lambda t, i: jnp.take(t, i, axis=0, fill_value=1), table, IDS)


def test_what_segments_of_booleans_and_of_nothing_give():
    check(lambda u, i: jax.ops.segment_max(u, i, 7), RNG.integers(0, 2, (10, 3)).astype(bool), IDS)
    nan = np.where(np.arange(10)[:, None] == 5, np.nan, np.ones((10, 3))).astype(np.float32)
    for reduce in (jax.ops.segment_sum, jax.ops.segment_max, jax.ops.segment_min):
        check(functools.partial(lambda reduce, u, i: reduce(u, i, 7), reduce), nan, IDS)


def sorted_param(f, *args):
    return [op["sorted"] for op in graph_of(f, *args).ops if op.kind.startswith("scatter_")]


def test_a_promise_of_sorted_indices_is_handed_on_where_it_holds():
    u, ids = np.ones((10, 3), np.float32), np.sort(IDS % 7)
    assert sorted_param(lambda u, i: jax.ops.segment_sum(u, i, 7, indices_are_sorted=True), u, ids) == [True]
    assert sorted_param(lambda u, i: jax.ops.segment_sum(u, i, 7), u, ids) == [False]
    pairs = lambda u, i, mode: jnp.zeros((7, 3)).at[i, i].add(u[:, 0], indices_are_sorted=True, mode=mode)  # noqa: E731
    assert sorted_param(lambda u, i: pairs(u, i, "drop"), u, ids) == [True]
    assert sorted_param(lambda u, i: pairs(u, i, "clip"), u, ids) == [False]  # a clipped component breaks the order of pairs


OPAQUE = {
    "in_place": (lambda t, i: t.at[i[:1]].add(1.0), "changes a small part of an array"),
    "set": (lambda t, i: t.at[i].set(1.0), "scatter"),
    "windows": (lambda t, i: jax.vmap(lambda k: lax.dynamic_slice(t, (k, 0), (2, 3)))(i), "a window of several rows"),
    "part_of_a_row": (
        lambda t, i: lax.gather(t, i[:, None], lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 2)),
        "a part of a row",
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_stays_with_xla_says_why(name):
    f, reason = OPAQUE[name]
    ops = capture(jax.make_jaxpr(f)(TABLE, IDS)).graph.ops
    assert [op.reason for op in ops if op.kind == "opaque" and reason in op.reason], [op.reason for op in ops]
