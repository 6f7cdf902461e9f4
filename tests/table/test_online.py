"""``scatter_exp_sum``: the NumPy rule against JAX's evaluation and a definition in plain words, and the dimension relations."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.ops.graph import Op, Value, make_params
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.ops.table import OPS, result
from tests.support.checks import enable_x64, in_parts
from tests.support.table_cases import evaluate_op

SPEC = OPS["scatter_exp_sum"]
extents = st.integers(1, 4)
shapes = st.lists(extents, max_size=2).map(tuple)


@st.composite
def cases(draw):
    """(the op, values, index, scores)."""
    rows, heads, inner, n = draw(st.integers(1, 9)), draw(shapes), draw(shapes), draw(extents)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(SPEC.dtypes))
    scores = rng.standard_normal((rows, *heads)) * draw(st.sampled_from([1, 50]))
    scores[rng.random(scores.shape) < draw(st.sampled_from([0, 0.5]))] = draw(st.sampled_from([-np.inf, np.inf, np.nan]))
    values = rng.standard_normal((rows, *heads, *inner))
    index = rng.integers(-2, n + 2, rows).astype(draw(st.sampled_from(["int8", "int32", "int64"])))
    params = make_params(axis=0, n=n, sorted=False, finite=draw(st.booleans()))
    op = Op("scatter_exp_sum", (0, 1, 2), (3,), params)
    return op, values.astype(np_dtype(dtype)), index, scores.astype(np_dtype(dtype))


@in_parts
@given(case=cases())
@settings(max_examples=12, deadline=None)
def test_the_rule_is_what_jax_evaluates(part, case):
    op, *arrays = case
    got = evaluate_op(op, *arrays)
    out = result(op, [Value(a.shape, str(a.dtype)) for a in arrays])
    assert (got.shape, str(got.dtype)) == (out.shape, out.dtype)
    with enable_x64():
        want = np.asarray(jax.jit(lambda *a: SPEC.evaluate(dict(op.params), *a, out=out))(*arrays))
    assert want.dtype == got.dtype
    got, want = got.astype(np.float64), want.astype(np.float64)
    # How far a sum may be off depends on the size of what it is made of: its terms may have both signs.
    tolerance = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[out.dtype]
    values, index, scores = arrays
    size = evaluate_op(op, np.abs(values.astype(np.float64)), index, scores.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got[np.isnan(size)]), True)
    np.testing.assert_array_equal(np.isnan(want[np.isnan(size)]), True)
    fits = size < 1e4  # beyond, a dtype may overflow on the way to a sum that does not
    np.testing.assert_array_less(np.abs(got[fits] - want[fits]), tolerance * (size[fits] + 1e-3))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_rule_is_what_the_entry_says(case):
    op, values, index, scores = case
    values, scores = values.astype(np.float64), scores.astype(np.float64)
    got = evaluate_op(op, values, index, scores)
    for i in range(op["n"]):
        v, s = values[index == i], scores[index == i]
        with np.errstate(all="ignore"):
            largest = s.max(0, initial=-np.inf)
            largest = np.where(np.isfinite(largest), largest, 0) if op["finite"] else largest
            factor = np.exp(s - largest)
            np.testing.assert_allclose(got[i], (v * factor.reshape((*s.shape, *(1,) * (v.ndim - s.ndim)))).sum(0), rtol=1e-12)


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_relations_hold_by_experiment(case, seed):
    op, *arrays = case
    full, rng = evaluate_op(op, *arrays), np.random.default_rng(seed)
    shapes_of = (*(a.shape for a in arrays), full.shape)
    relations = SPEC.relate(op, shapes_of[:3], shapes_of[3:])
    assert sorted(m for r in relations for m in r.members) == [(k, d) for k, s in enumerate(shapes_of) for d in range(len(s))]
    for r in relations:
        sizes = {shapes_of[k][d] for k, d in r.members}
        assert len(sizes) == 1 and bool(r.why) == (r.role == "mixed")
        at, i = {k: d for k, d in r.members}, int(rng.integers(max(sizes)))
        if r.role == "parallel":  # what is done to index i of the operands is seen at index i of the result only
            touched = [np.array(a) for a in arrays]
            for k in (0, 2):
                if k in at:
                    part = (*(slice(None),) * at[k], i)
                    touched[k][part] = np.roll(touched[k], 1)[part]
            same = np.delete(evaluate_op(op, *touched), i, at[3])
            np.testing.assert_array_equal(same.astype(np.float64), np.delete(full, i, at[3]).astype(np.float64))


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        (((5, 4), (5,), (5, 3)), ("float32", "int32", "float32")),
        (((5, 4), (6,), (5, 4)), ("float32", "int32", "float32")),
        (((5, 4), (5, 4), (5, 4)), ("float32", "int32", "float32")),
        (((5, 4), (5,), (5, 4)), ("float32", "float32", "float32")),
    ],
)
def test_what_is_not_defined_is_refused(shapes, dtypes):
    params = make_params(axis=0, n=3, sorted=False, finite=False)
    with pytest.raises(ValueError, match="scatter_exp_sum"):
        result(Op("scatter_exp_sum", (0, 1, 2), (3,), params), [Value(s, d) for s, d in zip(shapes, dtypes, strict=True)])
