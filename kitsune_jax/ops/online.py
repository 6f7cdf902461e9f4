"""Sums whose rows carry a factor e^(score - largest score), and which can be folded before the largest score is known.

Comes in: nothing. Goes out: ``ONLINE``, entries of the op table by kind. Such a sum is one pass: what has been folded so far is
kept together with the largest score so far, and scaled by e^(old - new) where a larger one comes. The tile program has this state
in its sink (``program.online``), for scores that an index tells apart; the state is the same for those of a tiled axis.

``scatter_exp_sum(values, index, scores)`` is, for each index in [0, n), the sum of ``values * e^(scores - m)``, where m is the
largest score of that index. A score belongs to the dimensions of ``values`` that come first. ``finite``: 0 stands for an m that is
infinite or NaN; otherwise such a sum is NaN. A sum of nothing is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from kitsune_jax.graph import Op, Value, make_params
from kitsune_jax.ops.indexing import INDEXED
from kitsune_jax.ops.local import Dims, LocalOp
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.spec import Array, OpSpec, Params, Shapes, round_to, to_double

_ROWS = {"axis": 0, "mode": "clip", "fill": None}


def _sum(params: Params, /, values: Array, index: Array, scores: Array, *, out_dtype: str) -> Array:
    v, s = to_double(np.asarray(values)), to_double(np.asarray(scores))
    with np.errstate(all="ignore"):
        largest = INDEXED["scatter_max"].numpy(params, s, index, out_dtype=str(s.dtype))
        used = np.where(np.isfinite(largest), largest, 0) if params["finite"] else largest
        of_rows = INDEXED["take"].numpy(_ROWS, used, index, out_dtype=str(s.dtype))
        factor = np.exp(s - of_rows).reshape((*s.shape, *(1,) * (v.ndim - s.ndim)))
        return round_to(INDEXED["scatter_sum"].numpy(params, v * factor, index, out_dtype=str(v.dtype)), out_dtype)


def _sum_by_jax(params: Params, /, values: Any, index: Any, scores: Any, *, out: Value) -> Any:
    def by(kind: str, *operands: Any, shape: tuple[int, ...], **more: Any) -> Any:
        rule = INDEXED[kind].jax
        assert rule is not None
        return rule({**params, **more}, *operands, out=Value(shape, out.dtype))

    largest = by("scatter_max", scores, index, shape=(params["n"], *np.shape(scores)[1:]))
    if params["finite"]:
        largest = lax.select(lax.is_finite(largest), largest, lax.full_like(largest, 0))
    factor = lax.exp(scores - by("take", largest, index, shape=np.shape(scores), **_ROWS))
    dims = tuple(range(np.ndim(scores)))
    weighted = values * lax.broadcast_in_dim(factor, np.shape(values), dims)
    return by("scatter_sum", jnp.asarray(weighted), index, shape=out.shape)


def _relate(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    values, _, scores = in_shapes

    def beside(d: int) -> tuple[tuple[int, int], ...]:
        return ((0, d), *(((2, d),) if d < len(scores) else ()), (3, d))

    return (
        DimRelation("contracted", ((0, 0), (1, 0), (2, 0))),
        *(DimRelation("parallel", beside(d)) for d in range(1, len(values))),
        DimRelation("mixed", ((3, 0),), "any row of its result may change until the stream ends"),
    )


def _alone(op: Op, ins: list[Dims]) -> str:
    streams = all(x.streamed(0) and len(x.kept()) == len(x.shape) - 1 for x in ins)
    return "" if streams else "only its rows stream: the scores of an index are compared with each other"


def _local(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    params = {"how": "sum", "accumulate": "float32", "sorted": op["sorted"], "finite": op["finite"]}
    return LocalOp("sink_at", make_params(**params))


ONLINE: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        OpSpec("scatter_exp_sum", "scatter", 3, _sum, _relate, 1,
               "(values, index, scores): the sum of values * e^(scores - the largest of the index) of each index in [0, n)",
               ("float16", "bfloat16", "float32"), mixes=True, fold="sum", local=_local, alone=_alone, jax=_sum_by_jax),
    )
}  # fmt: skip
