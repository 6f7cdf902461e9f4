"""A tile program whose sums are online: the sum and the weighted sum of a segment softmax, in one pass over its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kitsune_jax.ops.graph import make_params
from kitsune_jax.program.build import ScaledRows
from kitsune_jax.program.ir import Instr, Program, Writer
from reference.operators import MEANINGS
from tests.support.irregular import ids_of, order_of
from tests.support.programs import Array, Case
from tests.support.tiles import Tiles


def scores_of(rng: np.random.Generator, kind: str, rows: int, heads: int, ids: Array) -> Array:
    """ "normal"; "wide": no two of them have exponentials of one size; "low": many are -inf, and all of some ids; "broken": among
    them are infinities and NaN."""
    scores = rng.standard_normal((rows, heads)) * (200 if kind == "wide" else 1)
    if kind in ("low", "broken"):
        scores[(rng.random((rows, heads)) < 0.4) | (ids % 3 == 0)[:, None]] = -np.inf
    if kind == "broken":
        scores[rng.random((rows, heads)) < 0.02] = np.inf
        scores[rng.random((rows, heads)) < 0.02] = np.nan
    return scores


def online_sums(
    rows: int = 131, heads: int = 2, width: int = 3, n: int = 11, dtype: str = "float32", *, ids: str = "mixed",
    scores: str = "normal", finite: bool = False, tile_rows: int = 16,
) -> Case:  # fmt: skip
    t = Tiles((rows,), tile_rows)
    s, x = t.load((rows, heads), dtype, ((0,), ())), t.load((rows, heads, width), dtype, ((0,), (), ()))
    index = t.load((rows,), "int32", ((0,),))
    t.in_order(t.input((rows,), "int32"))
    ones = t.broadcast(t.literal(1.0, dtype), (heads,), ())
    writer = Writer(t.values, {})
    writer.body, scaled = t.body, ScaledRows(writer)
    for values in (ones, x):
        u, at, tops = scaled.operands(values, index, s, n, values == ones)
        t.sink_at(u, at, "sum", n, "float32", ids_sorted=True)
        last = t.body.pop()
        params = make_params(**dict(last.params), finite=finite)
        t.body.append(Instr("sink_at", (u, at, tops), (), params))
    t.literals += writer.literals.items()

    def operands(rng: np.random.Generator) -> list[Array]:
        index = ids_of(rng, ids, rows, n)
        values = rng.standard_normal((rows, heads, width))
        score = scores_of(rng, scores, rows, heads, index)
        return [score.astype(np.dtype(dtype)), values.astype(np.dtype(dtype)), index, order_of(index, n)]

    def reference(s: Array, x: Array, index: Array, order: Array) -> list[Array]:
        params = {"axis": 0, "n": n, "sorted": False, "finite": finite}
        rule = MEANINGS["scatter_exp_sum"].numpy
        return [rule(params, values, index, s, out_dtype="float64") for values in (np.ones_like(s), x)]

    return Case(Program.of(t.program()), operands, reference)


ONLINE_CASES: dict[str, Callable[[], Case]] = {
    **{f"online_{kind}": lambda kind=kind: online_sums(scores=kind) for kind in ("normal", "wide", "low", "broken")},
    **{f"online_{ids}": lambda ids=ids: online_sums(rows=230, scores="wide", ids=ids) for ids in ("equal", "outside", "half")},
    "online_low_finite": lambda: online_sums(scores="low", finite=True, heads=1, width=21),
    "online_long_runs": lambda: online_sums(rows=2003, n=3, scores="low", heads=3, width=9, tile_rows=600),
    "online_short_runs": lambda: online_sums(rows=777, n=301, scores="low", heads=8, width=1, tile_rows=300),
    "online_bfloat16": lambda: online_sums(dtype="bfloat16"),
    "online_float16": lambda: online_sums(dtype="float16", scores="low"),
    "online_one_row": lambda: online_sums(rows=1, heads=1, width=1, ids="equal"),
}
