"""The tile program's form of a sum of ``values * e^(scores - largest)``, where only the scores of the tile at hand are known.

Comes in: the SSA values of one op ``scatter_exp_sum`` in a stage. Goes out: instructions that scale the rows of a tile by the
largest score of their run in the tile (``run_max``), and the operands of the sink, which keeps for each sum what it is scaled by
and scales it again where a larger score comes (``sink_at`` with a third operand).

The sink's state is a pair (m, sum), and two states add up at max(m1, m2), to which each sum is scaled first. That is all that an
online softmax needs, whatever tells the sums apart: here an index, for attention the query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kitsune_jax.graph import Param, Scalar, make_params
from kitsune_jax.program.ir import Instr, TileType

New = Callable[[TileType], int]


class Scaled:
    """Rows of a stage scaled by their runs; sums of the same scores by the same index share what is computed of these."""

    def __init__(self, body: list[Instr], types: Sequence[TileType], new: New, literal: Callable[[Scalar, str], int]):
        self.body, self.types, self.new, self.literal = body, types, new, literal
        self._factors: dict[tuple[int, int], tuple[int, int]] = {}

    def operands(self, values: int, index: int, scores: int, n: int, op: int) -> list[int]:
        """(rows, index, tops) of the sink: ``values`` scaled by the factor of their row, and the largest score of their run."""
        tops, factor = self._factor(index, scores, n, op)
        t = self.types[values]
        if self.types[factor].shape != t.shape:
            dims = tuple(range(1 + len(self.types[factor].shape)))
            factor = self._add("broadcast_in_dim", (factor,), t, op, shape=t.rows_first, dims=dims)
        return [self._add("mul", (values, factor), t, op), index, tops]

    def _factor(self, index: int, scores: int, n: int, op: int) -> tuple[int, int]:
        if (index, scores) not in self._factors:
            t = self.types[scores]
            tops = self._add("run_max", (scores, index), t, op, n=n)
            # A run of -inf only counts for nothing beside other runs: e^(-inf - 0).
            finite = self._add("is_finite", (tops,), TileType(True, t.shape, "bool"), op)
            used = self._add("select_n", (finite, self.literal(0.0, t.dtype), tops), t, op)
            difference = self._add("sub", (scores, used), t, op)
            self._factors[index, scores] = tops, self._add("exp", (difference,), t, op)
        return self._factors[index, scores]

    def _add(self, kind: str, inputs: Sequence[int], t: TileType, op: int, **params: Param) -> int:
        made = self.new(t)
        self.body.append(Instr(kind, tuple(inputs), (made,), make_params(**params), op))
        return made
