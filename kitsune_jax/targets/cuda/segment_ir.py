"""The device IR, continued: sums by indices that go to the result itself, by atomic additions.

Like ``statements.py``: data that ``stage_outputs.py`` makes and ``print_stage.py`` spells out.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda.device_ir import Constant, Expr, Node, Ref


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
