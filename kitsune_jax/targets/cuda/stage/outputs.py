"""What leaves a stage: pushes into queues, stores to arrays, sinks, weight gradients, and sums of a segment softmax."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import frame_ir, ir, pointwise, tiles
from kitsune_jax.targets.cuda.ir import (
    Action,
    AddToRows,
    FindTops,
    Fold,
    FoldToRows,
    Keep,
    Node,
    Panel,
    Ref,
    RowRuns,
    Store,
    ToPanel,
    Tops,
    TopsStart,
    ToSegments,
    parameter,
)
from kitsune_jax.targets.cuda.stage import columns, facts
from kitsune_jax.targets.cuda.stage.evaluation import Evaluation, InScratch, queue_form

# ----------------------------------------------------------------------------------------------------------------------------------
# Weight gradients: both operands go to panels in shared memory, which the lanes of the CTA multiply together.
#
# Comes in: a ``matmul_sink`` and the ``Evaluation`` of its stage. Goes out: nodes. The gradients of a stage use the panels in
# turn. Sums over the rows of an operand (the gradient of a bias) are made from its panel.
# ----------------------------------------------------------------------------------------------------------------------------------


def lower_gradient(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``. Raises ``CannotLower``."""
    if (instr["x_contract"], instr["y_contract"], instr["x_batch"], instr["y_batch"]) != ((0,), (0,), (), ()):
        raise CannotLower("a product that contracts the stream and other dimensions has no code on the GPU")
    sink = at.program.sinks[instr["sink"]]
    dtype, other = (at.value(v).dtype for v in instr.inputs)
    if other != dtype or dtype not in pointwise.OPERAND or sink.dtype != "float32":
        raise CannotLower(f"a weight gradient of {dtype} and {other} in {sink.dtype} has no code on the GPU")
    (x_value, x), (y_value, y) = _panels(at, instr)
    for v, panel in ((x_value, x), (y_value, y)):
        if panel in at.prologue or _holds(at, v, panel):
            continue  # written already, in the loop of another effect, or for an earlier gradient
        _declare(at, v, panel)
        if at.value(v).row:
            at.add(ir.RowToPanel(panel.ref, at.row_tile(v)))
        else:
            at.evaluate(panel.width, [ToPanel(v, panel.ref)])
    gradient, shape = Ref("gradient", instr["sink"]), _shape(at, instr)
    at.setup.append(ir.GradientStart(gradient, dtype, x, y, shape))
    sums = []
    for v, panel in ((x_value, x), (y_value, y)):
        for i in (i for g, of, i in at.facts.panel_sums if g == instr and of == v):
            sums.append(Ref("columns", i["sink"]))
            n = math.prod(at.program.sinks[i["sink"]].shape)
            at.setup.append(ir.PanelSumStart(sums[-1], panel, n // at.split if at.is_slab(v) else n, at.is_slab(v), gradient))
    at.add(ir.AddGradient(gradient, tuple(sums)))
    at.done.add(instr)


def early_panel(at: Evaluation, effect: Instr) -> list[ToPanel]:
    """The panel of the stage's next gradient that holds the value of ``effect``: it is written in the same loop."""
    instrs, root = at.instrs, at.root(effect.inputs[0])
    instr = next((i for i in instrs if i.kind == "matmul_sink" and i not in at.done), None)
    if instr is None or instrs.index(instr) < instrs.index(effect):
        return []
    mine = [x for x in instr.inputs if at.root(x) == root]
    if len(mine) != 1:
        return []
    (panel,) = (p for v, p in _panels(at, instr) if v == mine[0])
    if panel in at.prologue or _holds(at, root, panel):
        return []
    _declare(at, root, panel)
    return [ToPanel(root, panel.ref)]


def _panels(at: Evaluation, instr: Instr) -> tuple[tuple[int, Panel], tuple[int, Panel]]:
    """The operand whose columns are the rows of the accumulators, and the other; each with its panel."""
    x, y = reversed(instr.inputs) if _shape(at, instr).swapped else instr.inputs
    k, dtype, (x_width, y_width) = instr["sink"], at.program.values[x].dtype, (_width(at, v) for v in (x, y))
    behind = tiles.panel_bytes(x_width, tiles.is_half(dtype))
    return (x, Panel(Ref("panel", k, "x"), dtype, x_width, 0)), (y, Panel(Ref("panel", k, "y"), dtype, y_width, behind))


def _width(at: Evaluation, v: int) -> int:
    """Of the panel of ``v``, which the stage may not have made yet."""
    columns = math.prod(at.program.values[v].shape)
    return tiles.padded(columns // at.split if at.is_slab(v) else columns)


def _holds(at: Evaluation, v: int, panel: Panel) -> bool:
    """Does ``v`` lie in the place of ``panel`` still? In a step of a loop two weights have gradients with one cotangent."""
    return at.repeated and at.panels.get(panel.at, ())[:2] == (at.root(v), panel.width)


def _declare(at: Evaluation, v: int, panel: Panel) -> None:
    """``v`` goes to ``panel``, and what lay there is gone."""
    at.once_per_tile(panel)
    end = panel.at + tiles.panel_bytes(panel.width, tiles.is_half(panel.dtype))
    at.panels = {place: of for place, of in at.panels.items() if place >= end or of[2] <= panel.at}
    at.panels[panel.at] = at.root(v), panel.width, end
    if panel.width % 64:
        at.setup.append(ir.ClearPanel(panel))


def _shape(at: Evaluation, instr: Instr) -> tiles.GradientShape:
    """The accumulators of a weight gradient: of a split stage, those whose slabs the stage's other values agree with."""
    n = [math.prod(at.program.values[v].shape) for v in instr.inputs]
    half = tiles.is_half(at.program.values[instr.inputs[0]].dtype)
    shapes = tiles.gradient_shapes(n[0], n[1], half, at.split, at.lanes)
    if at.split > 1:
        slabs = [at.is_slab(v) for v in instr.inputs]
        shapes = [s for s in shapes if slabs == [s.swapped, not s.swapped]]
    if not shapes:
        raise CannotLower(f"a weight gradient of {n[0]} x {n[1]} does not fit the registers of {at.split} CTAs")
    return shapes[0]


# ----------------------------------------------------------------------------------------------------------------------------------
# Sums of a segment softmax: the largest scores of the runs of a tile, and the sinks whose rows are scaled by them.
#
# Comes in: ``run_max``, and a ``sink_at`` with three operands (``program/build.py``), and the ``Evaluation`` of their stage.
# Goes out: nodes, and the home of the scores. A run is one of the 16 rows of a warp: the rows of a tile that have an index may be
# several runs with a top each, which the sink joins as it joins tiles (``stage/online.h``).
# ----------------------------------------------------------------------------------------------------------------------------------


def lower_run_max(at: Evaluation, instr: Instr) -> None:
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


def lower_online_sink(at: Evaluation, instr: Instr) -> tuple[Tops, Ref]:
    """What the rows of a sink are scaled by, and their runs."""
    v, _, scores = instr.inputs
    if at.root(scores) not in at.tops:
        raise CannotLower("a sum that is scaled by other numbers than the largest scores of its runs has no code on the GPU")
    tops, runs = at.tops[at.root(scores)]
    shape = at.program.values[scores].shape
    return Tops(tops, math.prod(shape), bool(instr["finite"])), runs


# ----------------------------------------------------------------------------------------------------------------------------------
# What leaves a stage: pushes into queues, stores to arrays, sinks. All that is done with one value is done in one loop.
#
# Comes in: an instruction with an effect, and the ``Evaluation`` of its stage. Goes out: nodes. Invariant: an effect may come
# earlier than its place in the stage, never later: a wait for a queue's free slot depends on earlier tiles only.
# ----------------------------------------------------------------------------------------------------------------------------------

HOW = {spec.fold: str(spec.cuda["any"]) for spec in OPS.values() if spec.family == "reduce" and spec.cuda}
# What the L2 folds, by the dtype of the fold.
_ATOMIC = {"sum": ("float32",), "max": ("float32", "int32", "uint32"), "min": ("float32", "int32", "uint32")}


@dataclasses.dataclass(frozen=True, slots=True)
class _Effect:
    """``action``: None where the nodes in front do everything (a value with one number per row)."""

    before: tuple[Node, ...]
    action: Action | None = None
    after: tuple[Node, ...] = ()


def lower_output(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``, and with it every other effect of its value that the stage has further on."""
    batch = [_MAKERS[i.kind](at, i) for i in _with_same_value(at, instr)]
    for effect in batch:
        at.add(*effect.before)
    actions = [effect.action for effect in batch if effect.action is not None]
    if actions:
        at.evaluate(at.value(instr.inputs[0]).width, [*actions, *early_panel(at, instr)])
    for effect in batch:
        at.add(*effect.after)


def _with_same_value(at: Evaluation, instr: Instr) -> list[Instr]:
    """The effects of the value of ``instr`` that nothing has been done about: none, or it and those further on."""
    done = at.done.union(i for _, _, i in at.facts.panel_sums)  # these come with their gradient
    root = at.root(instr.inputs[0])
    found = [i for i in at.instrs if i.kind in _MAKERS and at.root(i.inputs[0]) == root and i not in done]
    later = [
        i for i in found if i.kind == "sink_at" and i is not instr
    ]  # its indices may not be there yet, nor its scratch rows free
    found = [i for i in found if i not in later]
    at.done.update(found)
    return found


def _push(at: Evaluation, instr: Instr) -> _Effect:
    (v,), q = instr.inputs, instr["queue"]
    value, queue, push = at.value(v), Ref("queue", q), Ref("push", q)
    acquire, release = ir.QueueCall(queue, "wr_acquire"), ir.QueueCall(queue, "wr_release")
    if value.row:
        return _Effect((acquire, ir.PushRow(queue, at.row(v), _once(at, v)), release))
    form = queue_form(value.dtype, q in at.slab_queues)
    slab = tiles.image_vectors(value.width, form) if at.is_slab(v) else 0
    entry = ir.Entry(push, queue, slab, write=True, once=_once(at, v))
    return _Effect((acquire, entry), Keep(v, Ref("q", q), form, to=push, push=True, reads=1), (release,))


def _store(at: Evaluation, instr: Instr) -> _Effect:
    (v,), value = instr.inputs, at.value(instr.inputs[0])
    if value.row:
        row = at.row(v)
        return _Effect((ir.StoreRow(at.rows("out", instr["array"]), row, _once(at, v)),))
    if _once(at, v):
        raise CannotLower("a stage that is split by columns stores a value that is not")
    return _Effect((), Store(v, at.rows("out", instr["array"]), value.n if value.slab else 0, value.slab or 1))


def _once(at: Evaluation, v: int) -> bool:
    """Does one CTA hand ``v`` on for all? Those of a split stage all have what is no slab."""
    return at.split > 1 and not at.is_slab(v)


def _sink(at: Evaluation, instr: Instr) -> _Effect:
    (v,), k = instr.inputs, instr["sink"]
    sink, value, rank = at.program.sinks[k], at.value(v), len(at.program.values[v].shape)
    if sink.how not in HOW:
        raise CannotLower(f"a sink by {sink.how} has no code on the GPU")
    how, ref = HOW[sink.how], Ref("sink", k)
    scalar = value.row or len(instr["axes"]) == rank + 1
    if not scalar and tuple(instr["axes"]) != (0,):
        raise CannotLower("a sink over the rows and a part of a row's dimensions has no code on the GPU")
    if at.split > 1:
        raise CannotLower("a sink of a stage that is split by columns has no code on the GPU")
    apart = not value.row or facts.has_scalar_rows(at.program)
    at.setup.append(ir.SinkStart(ref, how, sink.dtype, 0 if scalar else value.width, apart))
    if value.row:
        return _Effect((ir.FoldRow(ref, how, sink.dtype, at.row(v)),))
    return _Effect((), Fold(v, how, ref, stream=True, scalar=scalar))


def _sink_at(at: Evaluation, instr: Instr) -> _Effect:
    (v, index), k = instr.inputs[:2], instr["sink"]
    sink, value = at.program.sinks[k], at.value(v)
    if sink.how not in HOW:
        raise CannotLower(f"a sink by {sink.how} has no code on the GPU")
    if not at.value(index).row:
        raise CannotLower("a sink by several indices of a row has no code on the GPU")
    if at.split > 1:
        raise CannotLower("a sink of a stage that is split by columns has no code on the GPU")
    if instr.get("unordered"):
        return _added(at, v, index, k)
    how, ref, width = HOW[sink.how], Ref("segments", k), value.width
    rows = 0 if instr["sorted"] else sink.shape[0]
    if rows and tiles.table_bytes(rows, width) > tiles.MOST_TABLE_BYTES:
        raise CannotLower(
            f"a sink by indices that are not sorted into {rows} rows of {value.n}: a lane holds {tiles.MOST_TABLE_BYTES} bytes at "
            "most; stream in the order of the indices"
        )
    tops, found = lower_online_sink(at, instr) if len(instr.inputs) > 2 else (None, None)
    start = ir.SegmentStart(ref, how, sink.dtype, width, value.n, at.segment_bytes, rows, tops)
    at.segment_bytes += start.bytes
    at.setup.append(start)
    at.scratch_words = max(at.scratch_words, tiles.block(width) | 1)
    runs: Node = ir.SegmentRuns(ref, at.row(index), sink.shape[0], not rows)
    if found is not None:
        runs = ir.BeginSegments(ref, found)
    join = ir.JoinSegments(ref, found)
    if value.row:
        return _Effect((runs, ir.SyncWarp(), ir.RowToSegments(ref, how, sink.dtype, at.row(v), found), join))
    return _Effect((runs, ir.SyncWarp()), ToSegments(v, ref, how, sink.dtype, found), (join,))


def _added(at: Evaluation, v: int, index: int, k: int) -> _Effect:
    """A fold in whatever order: a sum, to which every thread adds its part of a row, a maximum or a minimum. The result is of
    32 bits until XLA converts it."""
    sink, value, ref = at.program.sinks[k], at.value(v), Ref("sums", k)
    if sink.dtype not in _ATOMIC.get(sink.how, ()):
        raise CannotLower(f"a {sink.how} of {sink.dtype} by atomic operations has no code on the GPU")
    if at.program.outputs[sink.array].dtype != sink.dtype:
        raise CannotLower(
            f"a {sink.how} of {at.program.outputs[sink.array].dtype} by atomic operations where other phases may read it"
        )
    if sink.how != "sum":
        to = ir.FoldedRows(
            ref, HOW[sink.how], sink.dtype, value.width, parameter("out", sink.array), at.row(index), sink.shape[0], value.n
        )
        if value.row:
            return _Effect((to, ir.FoldRowAt(ref, at.row(v))))
        at.scratch_words = max(at.scratch_words, tiles.block(value.width) | 1)
        return _Effect((to, ir.SyncWarp()), FoldToRows(v, ref))
    rows = ir.SummedRows(ref, parameter("out", sink.array), at.row(index), sink.shape[0], value.n)
    if value.row:
        return _Effect((rows, ir.AddRow(ref, at.row(v))))
    return _Effect((rows,), AddToRows(v, ref, value.n, frame_ir.contiguous_access(value.n, "float32", 4 * value.n)))


_MAKERS = {"push": _push, "store": _store, "sink": _sink, "sink_at": _sink_at}
