"""Sums of a segment softmax: the largest scores of the runs of a tile, and the sinks whose rows are scaled by them.

Comes in: ``run_max``, and a ``sink_at`` with three operands (``program/online.py``), and the ``Evaluation`` of their stage. Goes
out: nodes, and the home of the scores. A run is one of the 16 rows of a warp: the rows of a tile that have an index may be several
runs with a top each, which the sink joins as it joins tiles (``stage/online.h``).
"""

from __future__ import annotations

import math

import numpy as np

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import columns
from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda.device_ir import Ref
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.segment_ir import FindTops, RowRuns, Tops, TopsStart
from kitsune_jax.targets.cuda.values import InScratch
from kitsune_jax.targets.errors import CannotLower


def run_max(at: Evaluation, instr: Instr) -> None:
    """Gives the largest scores of each row's run a home. Raises ``CannotLower``."""
    (x, index), (v,) = instr.inputs, instr.outputs
    if at.split > 1:
        raise CannotLower("the largest scores of segments in a stage that is split by columns have no code on the GPU")
    value, source = at.new(instr), at.root(x)
    runs, tops = _runs(at, index, instr["n"]), Ref("tops", v)
    columns.to_scratch(at, [source])
    start = TopsStart(tops, value.n, at.segment_bytes)
    at.segment_bytes += start.bytes
    at.setup.append(start)
    at.tops[v] = tops, runs
    at.add(FindTops(tops, runs))
    if value.row:
        at.set_row(v, ir.FromScratch(value.dtype, column=0))
    else:
        at.settle(v, InScratch(at.vector(columns.table(np.arange(value.n))), None))
        at.materialize(v)


def _runs(at: Evaluation, index: int, rows: int) -> Ref:
    """The runs of ``index``, which all sums of the softmaxes by it share."""
    key = at.root(index), rows
    if key not in at.runs:
        at.runs[key] = Ref("of_index", key[0])
        at.add(RowRuns(at.runs[key], at.row(index), rows))
    return at.runs[key]


def of_sink(at: Evaluation, instr: Instr) -> tuple[Tops, Ref]:
    """What the rows of a sink are scaled by, and their runs."""
    v, _, scores = instr.inputs
    if at.root(scores) not in at.tops:
        raise CannotLower("a sum that is scaled by other numbers than the largest scores of its runs has no code on the GPU")
    tops, runs = at.tops[at.root(scores)]
    shape = at.program.values[scores].shape
    return Tops(tops, math.prod(shape), bool(instr["finite"])), runs
