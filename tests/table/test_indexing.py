"""``take`` and the scatters: the NumPy rule against JAX's evaluation, and the dimension relations, by experiment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.ops.graph import Op, Value, make_params
from kitsune_jax.ops.reduce import GATHER_MODES, INDEXED, filling
from kitsune_jax.ops.spec import INTEGERS, is_float, np_dtype
from kitsune_jax.ops.table import result
from reference.operators import MEANINGS, to_double
from tests.support.checks import enable_x64, in_parts
from tests.support.table_cases import evaluate_op

FOLDS = [kind for kind in INDEXED if kind != "take"]
extents = st.integers(1, 4)
shapes = st.lists(extents, max_size=2).map(tuple)


def sample(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small whole numbers: every sum and product of them is exact."""
    low = 0 if dtype.startswith(("u", "b")) else -2
    return rng.integers(low, 2, shape).astype(np_dtype(dtype))


def indices(rng: np.random.Generator, shape: tuple[int, ...], n: int, dtype: str, inside: bool) -> np.ndarray:
    info = np.iinfo(dtype)
    low, high = (0, n) if inside else (max(-3, info.min), n + 3)
    index = rng.integers(low, max(high, low + 1), shape)
    if not inside and rng.random() < 0.5:
        index = np.where(rng.random(shape) < 0.3, rng.choice(np.array([info.min, info.max // 2], np.int64), shape), index)
    return index.astype(dtype)


@st.composite
def ops(draw):
    """(an op of this family, its operands)."""
    kind = draw(st.sampled_from(list(INDEXED)))
    before, index_shape, after, n = draw(shapes), draw(shapes), draw(shapes), draw(extents)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype, index_dtype = draw(st.sampled_from(INDEXED[kind].dtypes)), draw(st.sampled_from(INTEGERS))
    if kind == "take":
        mode = draw(st.sampled_from(list(GATHER_MODES)))
        fill = draw(st.sampled_from([None, 1])) if mode == "fill" else None
        params = {"axis": len(before), "mode": mode, "fill": fill}
        x = sample(rng, (*before, n, *after), dtype)
        # JAX takes an index that is filled modulo 2**32 where it has 64 bits; capture converts such an index first.
        index_dtype = index_dtype.replace("64", "32")
        index = indices(rng, index_shape, n, index_dtype, mode == "promise_in_bounds")
    else:
        params = {"axis": len(before), "n": n, "sorted": False}
        x = sample(rng, (*before, *index_shape, *after), dtype)
        index = indices(rng, index_shape, n, index_dtype, False)
    return Op(kind, (0, 1), (2,), make_params(**params)), [x, index]


@in_parts
@given(case=ops())
@settings(max_examples=40, deadline=None)
def test_the_rule_is_what_jax_evaluates(part, case):
    op, arrays = case
    got = evaluate_op(op, *arrays)
    out = result(op, [Value(a.shape, str(a.dtype)) for a in arrays])
    assert (got.shape, str(got.dtype)) == (out.shape, out.dtype)
    with enable_x64():
        want = np.asarray(jax.jit(lambda *a: INDEXED[op.kind].evaluate(dict(op.params), *a, out=out))(*arrays))
    assert want.dtype == got.dtype
    wide = np.float64 if is_float(got.dtype) else got.dtype
    np.testing.assert_array_equal(got.astype(wide), want.astype(wide))


@given(ops(), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_relations_hold_by_experiment(case, seed):
    op, (x, index) = case
    spec, rng = INDEXED[op.kind], np.random.default_rng(seed)
    full = evaluate_op(op, x, index)
    shapes_of = (x.shape, index.shape, full.shape)
    relations = spec.relate(op, (x.shape, index.shape), (full.shape,))
    assert sorted(m for r in relations for m in r.members) == [(k, d) for k, s in enumerate(shapes_of) for d in range(len(s))]
    for r in relations:
        assert bool(r.why) == (r.role == "mixed")
        sizes = {shapes_of[k][d] for k, d in r.members}
        assert len(sizes) == 1
        at = {k: d for k, d in r.members}
        i = int(rng.integers(sizes.pop()))
        if r.role == "parallel":  # what is done to index i of the operands is seen at index i of the result only
            touched = [np.array(a) for a in (x, index)]
            for k in (0, 1):
                if k in at:
                    part = (*(slice(None),) * at[k], i)
                    touched[k][part] = np.roll(touched[k], 1)[part] if k == 0 else 0
            same = np.delete(evaluate_op(op, *touched), i, at[2])
            # NumPy takes a NaN of bfloat16 for another number than itself.
            np.testing.assert_array_equal(to_double(same), to_double(np.delete(full, i, at[2])))
        elif r.role == "contracted":  # the fold of what two halves give
            halves = [[np.take(a, part, at[k]) for k, a in enumerate((x, index))] for part in (range(i), range(i, x.shape[at[0]]))]
            a, b = (evaluate_op(op, *half) for half in halves)
            fold = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[spec.fold]
            np.testing.assert_array_equal(fold(a, b).astype(full.dtype) if x.dtype != bool else fold(a, b), full)


@pytest.mark.parametrize("kind", FOLDS)
def test_a_scatter_accumulates_wider_than_its_dtype(kind):
    """2049 is no float16: ones that are added one by one in float16 end at 2048."""
    x, index = np.ones(3001, np.float16), np.zeros(3001, np.int32)
    params = {"axis": 0, "n": 1, "sorted": True}
    got = MEANINGS[kind].numpy(params, x, index, out_dtype="float16")
    by_jax = INDEXED[kind].evaluate(params, x, index, out=Value((1,), "float16"))
    assert got.tolist() == by_jax.tolist() == [3000.0 if kind == "scatter_sum" else 1.0]
    assert by_jax.dtype == np.float16


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "float32", "bfloat16"])
def test_what_fills_is_what_jax_fills_with(dtype):
    x = np.zeros(3, np_dtype(dtype))
    want = np.asarray(jax.jit(lambda x: x.at[jnp.array([7])].get(mode="fill"))(x)).astype(np.float64)
    np.testing.assert_array_equal(np.asarray([filling(None, dtype)], np.float64), want)


@pytest.mark.parametrize(
    ("kind", "params", "shapes", "dtypes"),
    [
        ("take", {"axis": 2, "mode": "clip", "fill": None}, ((3, 4), (5,)), ("float32", "int32")),
        ("take", {"axis": 0, "mode": "clip", "fill": None}, ((3, 4), (5,)), ("float32", "float32")),
        ("scatter_sum", {"axis": 0, "n": 3, "sorted": False}, ((3, 4), (5,)), ("float32", "int32")),
        ("scatter_sum", {"axis": 0, "n": -1, "sorted": False}, ((5, 4), (5,)), ("float32", "int32")),
        ("scatter_max", {"axis": 0, "n": 3, "sorted": False}, ((5, 4), (5,)), ("float32", "bool")),
    ],
)
def test_what_is_not_defined_is_refused(kind, params, shapes, dtypes):
    with pytest.raises(ValueError, match=kind):
        result(Op(kind, (0, 1), (2,), make_params(**params)), [Value(s, d) for s, d in zip(shapes, dtypes, strict=True)])
