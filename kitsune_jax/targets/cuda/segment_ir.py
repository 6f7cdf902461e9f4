"""The device IR, continued: sinks by indices, by runs of sorted ones, atomically, and those of a segment softmax.

Like ``statements.py``: data that ``stage_outputs.py`` and ``online.py`` make and ``print_stage.py`` spells out.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.device_ir import Constant, Expr, Node, Ref


class SegmentRuns(Node):
    """In front of the blocks of a tile: the runs of equal ``index`` among its rows, of ``rows`` that the result has; where they are
    not ``sorted``, the indices themselves."""

    ref: Ref
    index: Expr
    rows: int
    sorted: bool = True


class RowToSegments(Node):
    """All of a tile that is one number per row."""

    ref: Ref
    how: str
    dtype: str
    row: Expr
    runs: Ref | None = None


class JoinSegments(Node):
    ref: Ref
    runs: Ref | None = None


# -- atomic sums, maxima and minima


class SummedRows(Node):
    """Where the thread's two rows are added up: in the rows ``index`` of the ``rows`` of ``out``, of ``columns`` floats each; null
    where a row is added to none."""

    ref: Ref
    out: Constant
    index: Expr
    rows: int
    columns: int


class AddRow(Node):
    """One number of each row is added at ``ref``."""

    ref: Ref
    row: Expr


class FoldedRows(Node):
    """Which of the ``rows`` rows of ``out``, of ``columns`` numbers of ``dtype`` each, ``index`` says: the tile, of ``width``
    columns, is folded into them by ``how``."""

    ref: Ref
    how: str
    dtype: str
    width: int
    out: Constant
    index: Expr
    rows: int
    columns: int


class FoldRowAt(Node):
    """All of a tile that is one number per row."""

    ref: Ref
    row: Expr


# -- sums of a segment softmax


class RowRuns(Node):
    """The runs of equal ``index`` among the rows of a warp, of ``rows`` that the results have: for all sums of a softmax."""

    ref: Ref
    index: Expr
    rows: int


class TopsStart(Node):
    """``columns``: the scores of a row. ``at``: bytes into the lane's memory for segments."""

    ref: Ref
    columns: int
    at: int

    @property
    def bytes(self) -> int:
        return tiles.tops_bytes(self.columns)


class FindTops(Node):
    """The scores in the warp's scratch rows become the largest ones of their runs."""

    ref: Ref
    runs: Ref


class BeginSegments(Node):
    """In front of the blocks of a tile of a sum whose ``runs`` are known."""

    ref: Ref
    runs: Ref


class Tops(Node):
    """What a sum of a softmax is scaled by: ``columns`` scores of a row, those of ``ref``. ``finite``: 0 stands for a largest score
    that is not finite."""

    ref: Ref
    columns: int
    finite: bool
