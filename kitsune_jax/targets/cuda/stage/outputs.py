"""Lowering of a stage's outputs: pushes into queues, stores to arrays, sinks, weight gradients, and sums of a segment softmax.

Comes in: an instruction, and the ``StageCodeBuilder`` of its stage. Goes out: nodes.
"""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.stage import column_moves, facts
from kitsune_jax.targets.cuda.stage.builder import StageCodeBuilder

# --- Weight gradients -------------------------------------------------------------------------------------------------------------


def lower_gradient(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower a ``matmul_sink``. Raises ``CannotLower``.

    Both operands are written to panels in shared memory, which the lanes of the CTA multiply together. The gradients of a stage use
    the panels one after the other. Sums over the rows of an operand (the gradient of a bias) are made from its panel.
    """
    if (instr["x_contract"], instr["y_contract"], instr["x_batch"], instr["y_batch"]) != ((0,), (0,), (), ()):
        raise CannotLower("a product that contracts the stream and other dimensions has no code on the GPU")
    sink = at.program.sinks[instr["sink"]]
    dtype, other = (at.value(v).dtype for v in instr.inputs)
    if other != dtype or dtype not in pointwise.OPERAND or sink.dtype != "float32":
        raise CannotLower(f"a weight gradient of {dtype} and {other} in {sink.dtype} has no code on the GPU")
    (x_value, x), (y_value, y) = _panels(at, instr)
    for v, panel in ((x_value, x), (y_value, y)):
        if panel in at.prologue or _holds(at, v, panel):
            continue  # written already, with another effect or for an earlier gradient
        _declare(at, v, panel)
        if at.value(v).row:
            at.add(st.RowToPanel(panel.ref, at.row_tile(v)))
        else:
            at.evaluate(panel.width, [ir.ToPanel(v, panel.ref)])
    gradient, shape = ir.Ref("gradient", instr["sink"]), _shape(at, instr)
    at.setup.append(frame.GradientStart(gradient, dtype, x, y, shape))
    sums = []
    for v, panel in ((x_value, x), (y_value, y)):
        for i in (i for g, of, i in at.facts.panel_sums if g == instr and of == v):
            sums.append(ir.Ref("columns", i["sink"]))
            n, ctas = math.prod(at.program.sinks[i["sink"]].shape), at.split.parts(v)
            at.setup.append(frame.PanelSumStart(sums[-1], panel, n // ctas, ctas > 1, gradient))
    at.add(st.AddGradient(gradient, tuple(sums)))
    at.done.add(instr)


def early_panel(at: StageCodeBuilder, effect: Instr) -> list[ir.ToPanel]:
    """The action that writes the value of ``effect`` to the panel of the stage's next gradient, in the same loop as ``effect``; or
    []."""
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
    return [ir.ToPanel(root, panel.ref)]


def _panels(at: StageCodeBuilder, instr: Instr) -> tuple[tuple[int, frame.Panel], tuple[int, frame.Panel]]:
    """The operand whose columns are the rows of the accumulators, and the other operand, each with its panel."""
    x, y = reversed(instr.inputs) if _shape(at, instr).swapped else instr.inputs
    k, dtype, (x_width, y_width) = instr["sink"], at.program.values[x].dtype, (_width(at, v) for v in (x, y))
    behind = tiles.panel_bytes(x_width, tiles.is_half(dtype))
    panels = frame.Panel(ir.Ref("panel", k, "x"), dtype, x_width, 0), frame.Panel(ir.Ref("panel", k, "y"), dtype, y_width, behind)
    return (x, panels[0]), (y, panels[1])


def _width(at: StageCodeBuilder, v: int) -> int:
    """Columns of the panel of ``v``, which may not have been made yet."""
    return tiles.padded(math.prod(at.program.values[v].shape) // at.split.parts(v))


def _holds(at: StageCodeBuilder, v: int, panel: frame.Panel) -> bool:
    """Does ``panel`` still hold ``v``? In a step of a loop, the gradients of two weights may share a cotangent."""
    return at.repeated and at.panels.get(panel.at, ())[:2] == (at.root(v), panel.width)


def _declare(at: StageCodeBuilder, v: int, panel: frame.Panel) -> None:
    """Note that ``panel`` holds ``v``, and that panels that it overlaps are overwritten."""
    at.once_per_tile(panel)
    end = panel.at + tiles.panel_bytes(panel.width, tiles.is_half(panel.dtype))
    at.panels = {place: of for place, of in at.panels.items() if place >= end or of[2] <= panel.at}
    at.panels[panel.at] = at.root(v), panel.width, end
    if panel.width % 64:
        at.setup.append(frame.ClearPanel(panel))


def _shape(at: StageCodeBuilder, instr: Instr) -> tiles.GradientShape:
    """The shape of a gradient's accumulators. In a split stage its slabs must be those of the stage."""
    n = [math.prod(at.program.values[v].shape) for v in instr.inputs]
    half = tiles.is_half(at.program.values[instr.inputs[0]].dtype)
    shapes = tiles.gradient_shapes(n[0], n[1], half, at.split.ctas, at.lanes)
    if at.split.ctas > 1:
        slabs = [v in at.split.slabs for v in instr.inputs]
        shapes = [s for s in shapes if slabs == [s.swapped, not s.swapped]]
    if not shapes:
        raise CannotLower(f"a weight gradient of {n[0]} x {n[1]} does not fit the registers of {at.split.ctas} CTAs")
    return shapes[0]


# --- Sums of a segment softmax ----------------------------------------------------------------------------------------------------


def lower_run_max(at: StageCodeBuilder, instr: Instr) -> None:
    """Give the largest scores of each row's run a home. Raises ``CannotLower``.

    A run is among the 16 rows of a warp. The rows of a tile with the same index may be several runs, each with its largest score;
    the sink joins them as it joins tiles (``stage/online.h``).
    """
    (x, index), (v,) = instr.inputs, instr.outputs
    at.split.refuse_stage("a sum that is scaled by the largest scores of segments")
    value, source = at.new(instr), at.root(x)
    runs, tops = _runs(at, index, instr["n"]), ir.Ref("tops", v)
    column_moves.to_scratch(at, [source])
    start = frame.TopsStart(tops, value.n, at.segment_bytes)
    at.segment_bytes += start.bytes
    at.setup.append(start)
    at.tops[v] = tops, runs
    at.add(st.FindTops(tops, runs))
    column_moves.from_scratch(at, v, range(value.n))


def _runs(at: StageCodeBuilder, index: int, rows: int) -> ir.Ref:
    """The runs of ``index``, which all sums of softmaxes by it share."""
    key = at.root(index), rows
    if key not in at.runs:
        at.runs[key] = ir.Ref("of_index", key[0])
        at.add(st.RowRuns(at.runs[key], at.row(index), rows))
    return at.runs[key]


def online_scaling(at: StageCodeBuilder, instr: Instr) -> tuple[frame.Tops, ir.Ref]:
    """(how the rows of a sink are scaled by their run's largest score, the runs of equal indices)."""
    v, _, scores = instr.inputs
    if at.root(scores) not in at.tops:
        raise CannotLower("a sum that is scaled by other numbers than the largest scores of its runs has no code on the GPU")
    tops, runs = at.tops[at.root(scores)]
    shape = at.program.values[scores].shape
    return frame.Tops(tops, math.prod(shape), bool(instr["finite"])), runs


# --- Effects ----------------------------------------------------------------------------------------------------------------------

HOW = {spec.fold: str(spec.cuda["any"]) for spec in OPS.values() if spec.family == "reduce" and spec.cuda}
# Atomic operations of the L2: fold -> dtypes.
_ATOMIC = {"sum": ("float32",), "max": ("float32", "int32", "uint32"), "min": ("float32", "int32", "uint32")}


@dataclasses.dataclass(frozen=True, slots=True)
class _Effect:
    """``action``: None if the nodes before and after do all, as for a value with one number per row."""

    before: tuple[ir.Node, ...]
    action: ir.Action | None = None
    after: tuple[ir.Node, ...] = ()


def lower_output(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower ``instr`` and all later effects of its value, in one loop. An effect may come earlier than its place in the stage,
    never later, as a wait for a free slot of a queue may only depend on earlier tiles."""
    batch = [_MAKERS[i.kind](at, i) for i in _with_same_value(at, instr)]
    for effect in batch:
        at.add(*effect.before)
    actions = [effect.action for effect in batch if effect.action is not None]
    if actions:
        at.evaluate(at.value(instr.inputs[0]).width, [*actions, *early_panel(at, instr)])
    for effect in batch:
        at.add(*effect.after)


def _with_same_value(at: StageCodeBuilder, instr: Instr) -> list[Instr]:
    """``instr`` and the later effects of its value, except those that have been lowered; [] if ``instr`` has been."""
    done = at.done.union(i for _, _, i in at.facts.panel_sums)  # lowered with their gradient
    root = at.root(instr.inputs[0])
    found = [i for i in at.instrs if i.kind in _MAKERS and at.root(i.inputs[0]) == root and i not in done]
    # A later sink's indices may not have been made yet, nor need its scratch rows be free.
    later = [i for i in found if i.kind == "sink_at" and i is not instr]
    found = [i for i in found if i not in later]
    at.done.update(found)
    return found


def _push(at: StageCodeBuilder, instr: Instr) -> _Effect:
    (v,), q = instr.inputs, instr["queue"]
    value, queue, push = at.value(v), ir.Ref("queue", q), ir.Ref("push", q)
    acquire, release = st.QueueCall(queue, "wr_acquire"), st.QueueCall(queue, "wr_release")
    if value.row:
        return _Effect((acquire, st.PushRow(queue, at.row(v), at.split.once(v)), release))
    form = st.queue_form(value.dtype, q in at.slab_queues)
    entry = st.Entry(push, queue, value.slab_vectors(form), write=True, once=at.split.once(v))
    return _Effect((acquire, entry), ir.Keep(v, ir.Ref("q", q), form, to=push, push=True, reads=1), (release,))


def _store(at: StageCodeBuilder, instr: Instr) -> _Effect:
    (v,), value = instr.inputs, at.value(instr.inputs[0])
    if value.row:
        row = at.row(v)
        return _Effect((st.StoreRow(at.rows("out", instr["array"]), row, at.split.once(v)),))
    if at.split.once(v):
        raise CannotLower("a stage that is split by columns cannot store a value that is not")
    return _Effect((), ir.Store(v, at.rows("out", instr["array"]), value.part))


def _sink(at: StageCodeBuilder, instr: Instr) -> _Effect:
    (v,), k = instr.inputs, instr["sink"]
    sink, value, rank = at.program.sinks[k], at.value(v), len(at.program.values[v].shape)
    if sink.how not in HOW:
        raise CannotLower(f"a sink by {sink.how} has no code on the GPU")
    how, ref = HOW[sink.how], ir.Ref("sink", k)
    scalar = value.row or len(instr["axes"]) == rank + 1
    if not scalar and tuple(instr["axes"]) != (0,):
        raise CannotLower("a sink over the rows and a part of a row's dimensions has no code on the GPU")
    at.split.refuse_stage("a sink")
    apart = not value.row or facts.has_scalar_rows(at.program)
    spread = instr in at.facts.spread_sums
    at.setup.append(frame.SinkStart(ref, how, sink.dtype, 0 if scalar else value.width, apart, spread))
    if value.row:
        return _Effect((st.FoldRow(ref, how, sink.dtype, at.row(v)),))
    return _Effect((), ir.Fold(v, how, ref, True, scalar, ir.Identity(how, sink.dtype) if spread else None))


def _sink_at(at: StageCodeBuilder, instr: Instr) -> _Effect:
    (v, index), k = instr.inputs[:2], instr["sink"]
    sink, value = at.program.sinks[k], at.value(v)
    if sink.how not in HOW:
        raise CannotLower(f"a sink by {sink.how} has no code on the GPU")
    if not at.value(index).row:
        raise CannotLower("a sink by several indices of a row has no code on the GPU")
    at.split.refuse_stage("a sink")
    if instr.get("unordered"):
        return _atomic_fold(at, v, index, k)
    how, ref, width = HOW[sink.how], ir.Ref("segments", k), value.width
    rows = 0 if instr["sorted"] else sink.shape[0]
    if rows and tiles.table_bytes(rows, width) > tiles.MOST_TABLE_BYTES:
        raise CannotLower(
            f"a sink by unsorted indices into {rows} rows of {value.n} columns: a lane's table has {tiles.MOST_TABLE_BYTES} bytes "
            "at most; sort the indices, or use fewer rows"
        )
    tops, found = online_scaling(at, instr) if len(instr.inputs) > 2 else (None, None)
    start = frame.SegmentStart(ref, how, sink.dtype, width, value.n, at.segment_bytes, rows, tops)
    at.segment_bytes += start.bytes
    at.setup.append(start)
    at.scratch_words = max(at.scratch_words, tiles.block(width) | 1)
    runs: ir.Node = st.SegmentRuns(ref, at.row(index), sink.shape[0], not rows)
    if found is not None:
        runs = st.BeginSegments(ref, found)
    join = st.JoinSegments(ref, found)
    if value.row:
        return _Effect((runs, st.SyncWarp(), st.RowToSegments(ref, how, sink.dtype, at.row(v), found), join))
    return _Effect((runs, st.SyncWarp()), ir.ToSegments(v, ref, how, sink.dtype, found), (join,))


def _atomic_fold(at: StageCodeBuilder, v: int, index: int, k: int) -> _Effect:
    """A fold in any order by atomic operations: every thread adds its part of a row, or folds it into a maximum or minimum. The
    result has 32 bits; XLA converts it."""
    sink, value, ref = at.program.sinks[k], at.value(v), ir.Ref("sums", k)
    if sink.dtype not in _ATOMIC.get(sink.how, ()):
        raise CannotLower(f"a {sink.how} of {sink.dtype} by atomic operations has no code on the GPU")
    if at.program.outputs[sink.array].dtype != sink.dtype:
        narrow = at.program.outputs[sink.array].dtype
        raise CannotLower(f"a {sink.how} of {narrow} by atomic operations has no code in a call of several phases on the GPU")
    if sink.how != "sum":
        out, n = ir.parameter("out", sink.array), value.n
        to = st.FoldedRows(ref, HOW[sink.how], sink.dtype, value.width, out, at.row(index), sink.shape[0], n)
        if value.row:
            return _Effect((to, st.FoldRowAt(ref, at.row(v))))
        at.scratch_words = max(at.scratch_words, tiles.block(value.width) | 1)
        return _Effect((to, st.SyncWarp()), ir.FoldToRows(v, ref))
    rows = st.SummedRows(ref, ir.parameter("out", sink.array), at.row(index), sink.shape[0], value.n)
    if value.row:
        return _Effect((rows, st.AddRow(ref, at.row(v))))
    return _Effect((rows,), ir.AddToRows(v, ref, value.n, frame.contiguous_access(value.n, "float32", 4 * value.n)))


_MAKERS = {"push": _push, "store": _store, "sink": _sink, "sink_at": _sink_at}
