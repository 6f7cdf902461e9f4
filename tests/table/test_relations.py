"""How dimensions travel through each op of the table: every relation is tried on numbers."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from kitsune_jax.ops.graph import Op, make_params
from kitsune_jax.ops.table import OPS
from reference.operators import MEANINGS

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
KINDS = [
    "transpose",
    "rev",
    "slice",
    "pad",
    "concatenate",
    "reshape",
    "broadcast_in_dim",
    "reduce_sum",
    "cumsum",
    "argmax",
    "add",
    "dot_general",
]


@st.composite
def structural_ops(draw):
    """(op, input shapes, output shape) of a random structural op."""
    shape = draw(shapes)
    rank = len(shape)
    dims = st.sampled_from(range(rank))
    kind = draw(st.sampled_from(KINDS))
    ins: list[tuple[int, ...]] = [shape]
    params: dict = {}
    if kind == "transpose":
        params["permutation"] = draw(st.permutations(range(rank)))
    elif kind == "rev":
        params["dimensions"] = draw(st.sets(dims).map(sorted))
    elif kind == "slice":
        start = [draw(st.integers(0, n - 1)) for n in shape]
        params = {"start": start, "limit": [draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]}
        params["strides"] = draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    elif kind == "pad":
        params = {k: draw(st.lists(st.integers(0, 1), min_size=rank, max_size=rank)) for k in ("low", "high", "interior")}
        ins = [shape, ()]
    elif kind == "concatenate":
        params["dimension"] = draw(dims)
        ins = [shape, shape]
    elif kind == "reshape":
        cut = draw(st.integers(0, rank))
        merged = [*shape[:cut], int(np.prod(shape[cut:])), *draw(st.lists(st.just(1), max_size=2))]
        params["new_sizes"] = draw(
            st.sampled_from([merged, sorted(shape), [*shape[::-1]], [1, *shape], [n for n in shape if n > 1]])
        )
    elif kind == "broadcast_in_dim":
        at = sorted(draw(st.permutations(range(rank + 1)))[:rank])
        out = [draw(st.integers(1, 3))] * (rank + 1)
        for n, d in zip(shape, at, strict=True):
            out[d] = n if n > 1 else draw(st.integers(1, 3))
        params = {"shape": out, "dims": at}
    elif kind == "reduce_sum":
        params["axes"] = draw(st.sets(dims).map(sorted))
    elif kind in ("cumsum", "argmax"):
        params = {"axis": draw(dims)} | ({"reverse": draw(st.booleans())} if kind == "cumsum" else {})
    elif kind == "add":
        ins = [shape, draw(st.sampled_from([shape, ()]))]
    elif kind == "dot_general":
        names = list(zip(shape, draw(st.lists(st.sampled_from("bcf"), min_size=rank, max_size=rank)), strict=True))
        left = [d for d in range(rank) if names[d][1] == "b"], [d for d in range(rank) if names[d][1] == "c"]
        right = draw(st.permutations([*left[0], *left[1], rank]))  # shared dimensions and one of its own
        ins = [shape, tuple(4 if d == rank else shape[d] for d in right)]
        params = {"lhs_batch": left[0], "lhs_contract": left[1], "accumulate": "float64"}
        params |= {"rhs_batch": [right.index(d) for d in left[0]], "rhs_contract": [right.index(d) for d in left[1]]}
    return Op(kind, tuple(range(len(ins))), (len(ins),), make_params(**params)), ins


def along(shape, operand, relation):
    """Index of every element of ``operand`` along ``relation``: its members' dimensions, flattened; None without members."""
    mine = [d for k, d in relation.members if k == operand]
    if not mine:
        return None
    grids = np.indices(shape)
    return np.ravel_multi_index([grids[d] for d in mine], [shape[d] for d in mine])


@hypothesis.given(structural_ops(), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=400, deadline=None)
def test_relations_hold_by_experiment(case, seed):
    op, in_shapes = case
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(s) for s in in_shapes]
    dtype = "int64" if op.kind == "argmax" else "float64"
    hypothesis.assume(op.kind != "reshape" or np.prod(op["new_sizes"]) == arrays[0].size)

    def evaluate(xs):
        return MEANINGS[op.kind].numpy(dict(op.params), *xs, out_dtype=dtype)

    full = evaluate(arrays)
    shapes_of = (*in_shapes, full.shape)
    relations = OPS[op.kind].relate(op, tuple(in_shapes), (full.shape,))
    stated = [m for r in relations for m in r.members]
    assert sorted(stated) == [(k, d) for k, s in enumerate(shapes_of) for d in range(len(s))], (
        "every dimension in exactly one relation"
    )
    last = len(in_shapes)
    for r in relations:
        assert bool(r.why) == (r.role == "mixed")
        sizes = [shapes_of[k][d] for k, d in r.members]
        out_index = along(full.shape, last, r)
        if r.role == "created":
            assert out_index is not None and len(r.members) == 1
            d = r.members[0][1]
            np.testing.assert_array_equal(full, np.broadcast_to(np.take(full, [0], axis=d), full.shape))
        elif r.role == "contracted":
            assert out_index is None
            parts = []
            for part in (0, 1):  # the sum of what even and odd indices contribute
                indices = [along(x.shape, k, r) for k, x in enumerate(arrays)]
                parts.append(
                    evaluate([x if i is None else np.where(i % 2 == part, x, 0) for x, i in zip(arrays, indices, strict=True)])
                )
            np.testing.assert_allclose(parts[0] + parts[1], full, atol=1e-9)
        elif r.role in ("parallel", "reshaped"):
            assert r.role == "reshaped" or len(set(sizes)) == 1
            extent = np.prod([shapes_of[k][d] for k, d in r.members if k == r.members[0][0]])
            i = int(rng.integers(extent))
            touched = []
            for k, x in enumerate(arrays):
                index = along(x.shape, k, r)
                touched.append(x if index is None else np.where(index == i, rng.standard_normal(x.shape), x))
            if out_index is not None:
                np.testing.assert_array_equal(evaluate(touched)[out_index != i], full[out_index != i])


def test_relations_of_iota_and_rank_0():
    op = Op("iota", (), (0,), make_params(shape=(3, 4), dimension=1))
    assert [r.role for r in OPS["iota"].relate(op, (), ((3, 4),))] == ["created", "created"]
    np.testing.assert_array_equal(MEANINGS["iota"].numpy(dict(op.params), out_dtype="int32"), np.broadcast_to(np.arange(4), (3, 4)))
    assert OPS["add"].relate(Op("add", (0, 1), (2,)), ((), ()), ((),)) == ()


@pytest.mark.parametrize(
    "before,after,roles",
    [
        ((6, 4), (6, 4), ["parallel", "parallel"]),
        ((6, 4), (24,), ["reshaped"]),
        ((2, 3, 5), (6, 5), ["reshaped", "parallel"]),
        ((6, 5), (2, 3, 5), ["reshaped", "parallel"]),
        ((6, 5), (6, 1, 5), ["created", "parallel", "parallel"]),
        ((6, 1, 5), (6, 5), ["mixed", "parallel", "parallel"]),
        ((4, 6, 5), (8, 3, 5), ["reshaped", "parallel"]),
        ((1,), (), ["mixed"]),
        ((0, 3), (3, 0), ["reshaped"]),
    ],
)
def test_relations_of_reshape(before, after, roles):
    op = Op("reshape", (0,), (1,), make_params(new_sizes=after))
    assert sorted(r.role for r in OPS["reshape"].relate(op, (before,), (after,))) == sorted(roles)
