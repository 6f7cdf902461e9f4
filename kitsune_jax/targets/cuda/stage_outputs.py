"""What leaves a stage: pushes into queues, stores to arrays, sinks. All that is done with one value is done in one loop.

Comes in: an instruction with an effect, and the ``Evaluation`` of its stage. Goes out: nodes. Invariant: an effect may come earlier
than its place in the stage, never later: a wait for a queue's free slot depends on earlier tiles only.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import arrays, gradients, online, own_rows, segment_ir, tiles
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Action, AddToRows, Fold, FoldToRows, Keep, Node, Ref, Store, ToSegments, parameter
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.values import queue_form
from kitsune_jax.targets.errors import CannotLower

HOW = {spec.fold: str(spec.cuda["any"]) for spec in OPS.values() if spec.family == "reduce" and spec.cuda}
# What the L2 folds, by the dtype of the fold.
_ATOMIC = {"sum": ("float32",), "max": ("float32", "int32", "uint32"), "min": ("float32", "int32", "uint32")}


@dataclasses.dataclass(frozen=True, slots=True)
class _Effect:
    """``action``: None where the nodes in front do everything (a value with one number per row)."""

    before: tuple[Node, ...]
    action: Action | None = None
    after: tuple[Node, ...] = ()


def lower(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``, and with it every other effect of its value that the stage has further on."""
    batch = [_MAKERS[i.kind](at, i) for i in _with_same_value(at, instr)]
    for effect in batch:
        at.add(*effect.before)
    actions = [effect.action for effect in batch if effect.action is not None]
    if actions:
        at.evaluate(at.value(instr.inputs[0]).width, [*actions, *gradients.early_panel(at, instr)])
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
    acquire, release = st.QueueCall(queue, "wr_acquire"), st.QueueCall(queue, "wr_release")
    if value.row:
        return _Effect((acquire, st.PushRow(queue, at.row(v), _once(at, v)), release))
    form = queue_form(value.dtype, q in at.slab_queues)
    slab = tiles.image_vectors(value.width, form) if at.is_slab(v) else 0
    entry = st.Entry(push, queue, slab, write=True, once=_once(at, v))
    return _Effect((acquire, entry), Keep(v, Ref("q", q), form, to=push, push=True, reads=1), (release,))


def _store(at: Evaluation, instr: Instr) -> _Effect:
    (v,), value = instr.inputs, at.value(instr.inputs[0])
    if value.row:
        row = at.row(v)
        return _Effect((st.StoreRow(at.rows("out", instr["array"]), row, _once(at, v)),))
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
    apart = not value.row or own_rows.are(at.program)
    at.setup.append(st.SinkStart(ref, how, sink.dtype, 0 if scalar else value.width, apart))
    if value.row:
        return _Effect((st.FoldRow(ref, how, sink.dtype, at.row(v)),))
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
    tops, found = online.of_sink(at, instr) if len(instr.inputs) > 2 else (None, None)
    start = st.SegmentStart(ref, how, sink.dtype, width, value.n, at.segment_bytes, rows, tops)
    at.segment_bytes += start.bytes
    at.setup.append(start)
    at.scratch_words = max(at.scratch_words, tiles.block(width) | 1)
    runs: Node = segment_ir.SegmentRuns(ref, at.row(index), sink.shape[0], not rows)
    if found is not None:
        runs = segment_ir.BeginSegments(ref, found)
    join = segment_ir.JoinSegments(ref, found)
    if value.row:
        return _Effect((runs, st.SyncWarp(), segment_ir.RowToSegments(ref, how, sink.dtype, at.row(v), found), join))
    return _Effect((runs, st.SyncWarp()), ToSegments(v, ref, how, sink.dtype, found), (join,))


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
        to = segment_ir.FoldedRows(
            ref, HOW[sink.how], sink.dtype, value.width, parameter("out", sink.array), at.row(index), sink.shape[0], value.n
        )
        if value.row:
            return _Effect((to, segment_ir.FoldRowAt(ref, at.row(v))))
        at.scratch_words = max(at.scratch_words, tiles.block(value.width) | 1)
        return _Effect((to, st.SyncWarp()), FoldToRows(v, ref))
    rows = segment_ir.SummedRows(ref, parameter("out", sink.array), at.row(index), sink.shape[0], value.n)
    if value.row:
        return _Effect((rows, segment_ir.AddRow(ref, at.row(v))))
    return _Effect((rows,), AddToRows(v, ref, value.n, arrays.contiguous_access(value.n, "float32", 4 * value.n)))


_MAKERS = {"push": _push, "store": _store, "sink": _sink, "sink_at": _sink_at}
