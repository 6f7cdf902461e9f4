"""The stages of a laid-out kernel as complete code: every place in them is known, as a ``Constant`` where equal stages may differ.

Comes in: ``Layout``. Goes out: a ``StageCode`` for each stage.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from kitsune_jax.targets.cuda import arrays, own_rows
from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Constant, Node, Ref, number, parameter
from kitsune_jax.targets.cuda.frame_ir import StageCode
from kitsune_jax.targets.cuda.layout import Layout, entry_vectors, gradients_of, segments_of, sinks_of, sums_of
from kitsune_jax.targets.cuda.product_ir import RowMemory, address_bytes
from kitsune_jax.targets.cuda.segment_ir import TopsStart
from kitsune_jax.targets.errors import CannotLower


def of_stage(at: Layout, s: int) -> StageCode:
    stage = at.stages[s]
    ring = frame.WeightRing(at.header_bytes)
    staged = tuple(_staged(at, s))
    setup, exchanged = [*_memory(at, s), *_queues(at, s), *staged], 0
    for node in _placed(at, s, stage.lowered.setup):
        if isinstance(node, st.SegmentStart):
            node = frame.SegmentMemory(node, _result(at, node.ref.of), stage.memory.segments + node.at)
        elif isinstance(node, st.Exchange):
            offset, exchanged = stage.memory.exchanges + exchanged, exchanged + node.bytes
            node = frame.ExchangeRing(node.ring, node.vectors, node.depth, offset, at.a.ctas)
        elif isinstance(node, TopsStart):
            node = dataclasses.replace(node, at=stage.memory.segments + node.at)
        setup.append(node)
    if not stage.resident:
        setup.append(ring)
    elif stage.fetches:
        setup.append(frame.AwaitWeights())
    body = _placed(at, s, (*stage.lowered.prologue, *stage.lowered.nodes))
    vectors, batches, own = bool(at.operands.vectors), bool(at.batch_tiles), own_rows.are(at.program)
    prefetched = () if own else _prefetched(at, s)
    loop = frame.TileLoop(at.uniform, at.consecutive, _order(at), staged, prefetched, vectors, batches, own, body)
    ctas = at.a.ctas if at.a.spatial else 0
    consumer = frame.Consumer(tuple(setup), ctas, loop, tuple(_finish(at, s)))
    cut = any(r.cut is not None for r in stage.lowered.weights)
    loader = _resident(at, s) if stage.resident else _blocks(at, s, ring) if cut else _streamed(at, s, ring, ctas)
    return StageCode(consumer, loader, at.a.split[s])


def _placed(at: Layout, s: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """``nodes`` with the places that the layout has given things."""
    stage, vectors = at.stages[s], at.operands.vector_at[s]

    def change(x: Any) -> Any:
        match x:
            case ir.Vector(group, offset):
                word = vectors[group] + offset
                return number("vector", word, word)
            case st.Resident(weight, offset, _, _):
                byte = _resident_offset(at, s, weight) + offset
                return dataclasses.replace(x, at=number("resident", byte, byte))
            case st.Image(ref):
                return st.Image(ref, stage.memory.images[ref.of])
            case st.TableRows(table=Ref(of=v)):
                return dataclasses.replace(x, table=parameter("table", at.operands.tables.index(v)))
        return x

    found: tuple[Node, ...] = ir.rebuild(nodes, change)
    return found


def _resident_offset(at: Layout, s: int, weight: int) -> int:
    """Where the image of a stage's weight lies in shared memory."""
    return at.header_bytes + sum(r.shape.slab_bytes for r in at.stages[s].lowered.weights[:weight])


def _lanes(at: Layout, s: int) -> frame.LaneScratch:
    stage = at.stages[s]
    return frame.LaneScratch(number("scratch", None, at.header_bytes + stage.weight_bytes), stage.memory.bytes)


def _memory(at: Layout, s: int) -> list[Node]:
    stage, found = at.stages[s], list[Node]()
    if stage.memory.bytes:
        found.append(_lanes(at, s))
    if stage.lowered.scratch_words:
        found.append(frame.ScratchRows(stage.memory.rows, stage.lowered.scratch_words))
    if stage.lowered.product_bytes:
        products, addresses = stage.memory.products, stage.lowered.addresses
        found.append(RowMemory(addresses, products, products + address_bytes(addresses), stage.lowered.product_bytes))
    if gradients_of(stage):
        found.append(frame.PanelMemory(_lanes(at, s), stage.memory.panels))
    return found


def _staged(at: Layout, s: int) -> list[frame.StagedArray]:
    """The staged arrays of a stage: the lane's buffers one after the other, behind what else the lane has."""
    stage, found = at.stages[s], list[frame.StagedArray]()
    offset = stage.memory.staged
    for n, k in enumerate(sorted(stage.shape.staged)):
        array = at.program.inputs[k]
        columns = arrays.columns_of(array).n
        found.append(frame.StagedArray(Ref("staged", k), array.dtype, columns, parameter("in", k), _lanes(at, s), offset, n))
        offset += arrays.staged_bytes(array)
    return found


def _order(at: Layout) -> Constant | None:
    return None if at.program.order is None else parameter("in", at.program.order)


def _prefetched(at: Layout, s: int) -> tuple[tuple[Constant, int], ...]:
    """The next tile of every input whose rows lie together, but for those that come in bulk anyway; of a stream with an order of
    its own, that of the order."""
    loads = {i["array"] for i in at.program.stages[s].body if i.kind == "load"} - at.stages[s].shape.staged
    inputs, order = at.program.inputs, at.program.order
    together = [(k, arrays.row_bytes(inputs[k])) for k in sorted(loads) if arrays.lies_together(at.program, inputs[k])]
    return tuple((parameter("in", k), size) for k, size in ([(order, 4)] if order is not None else together))


def _queues(at: Layout, s: int) -> list[Node]:
    found: list[Node] = []
    for q, queue in enumerate(at.program.queues):
        if s != queue.producer and s not in queue.consumers:
            continue
        ref, vectors, depth = Ref("queue", q), entry_vectors(at.program, at.a, q), queue.depth
        if at.a.places[q] == "cluster":
            slots = number("slots", q, at.queue_at[q])
            writers = number("writers", q, at.mask((queue.producer,)))
            readers = number("readers", q, at.mask(queue.consumers))
            found.append(frame.ClusterRing(ref, ir.ring(q, depth), vectors, depth, slots, writers, readers))
        else:
            counters, slots = number("counters", q, at.workspace.rings[q]), number("slots", q, at.workspace.slots[q], "i64")
            writers = number("writers", q, at.a.split[queue.producer])
            readers = number("readers", q, sum(at.a.split[c] for c in queue.consumers))
            found.append(frame.L2Ring(ref, vectors, counters, slots, number("depth", q, depth), writers, readers))
    return found


def _finish(at: Layout, s: int) -> list[Node]:
    """Partial sums, each added up by whoever comes last of those that have one."""
    stage, found = at.stages[s], list[Node]()
    if st.Turn("first") in stage.lowered.setup:
        found.append(st.Turn("last"))
    if s in at.workspace.sinks_arrived:
        arrived = number("arrived", "sinks", at.workspace.sinks_arrived[s])
        shapes = [at.program.sinks[sink.ref.of].shape for sink in sinks_of(stage)]
        sinks = [(sink, _result(at, sink.ref.of), math.prod(n)) for sink, n in zip(sinks_of(stage), shapes, strict=True)]
        starts = segments_of(stage)
        segments = tuple(start.ref for start in starts if not start.rows)
        groups = [(start.ref, at.workspace.groups_arrived.get(start.ref.of, 0)) for start in starts if start.rows]
        tables = tuple((ref, number("groups", ref.of, byte)) for ref, byte in groups)
        found.append(frame.FinishSinks(arrived, tuple(sinks), segments, tables))
    if gradients_of(stage):
        arrived = number("arrived", "gradients", at.workspace.gradients_arrived[s])
        gradients = []
        for g in gradients_of(stage):
            sums = tuple((total, _result(at, total.sums.of)) for total in sums_of(stage, g))
            gradients.append((g, _result(at, g.gradient.of), sums))
        found.append(frame.FinishGradients(arrived, at.a.gradient_parts(at.program), at.a.split[s], tuple(gradients)))
    return found


def _result(at: Layout, sink: int) -> frame.Result:
    array = at.program.sinks[sink].array
    partial = number("partial", sink, at.workspace.partials[sink], "i64")
    return frame.Result(partial, parameter("out", array), at.program.outputs[array].dtype)


# -- loader


def _resident(at: Layout, s: int) -> frame.LoadResident:
    stage, found = at.stages[s], list[frame.FetchResident]()
    for w in sorted({i.weight for i in stage.fetches}):
        group, source = at.operands.resident_at[at.operands.first_weight[s] + w]
        shape, to = stage.lowered.weights[w].shape, _resident_offset(at, s, w)
        where = number("resident", to, to), group, number("weights", w, source)
        found.append(frame.FetchResident(*where, shape.slab_bytes, shape.split > 1))
    return frame.LoadResident(tuple(found))


def _blocks(at: Layout, s: int, ring: frame.WeightRing) -> frame.LoadBlocks:
    """The weights of a batch, in the order in which a tile takes them."""
    stage, program = at.stages[s], at.program
    recipes = stage.lowered.weights
    cuts = [r.cut for r in recipes if r.cut is not None]
    if len(cuts) < len(recipes) or len({cut.axes for cut in cuts}) > 1:
        raise CannotLower("weights of which only some change from tile to tile, or with other batches, have no code on the GPU")
    inner = {a: math.prod(program.axes[a + 1 : program.batch_axes]) for a in range(program.batch_axes)}
    axes = tuple((inner[a], n) for a, n in cuts[0].axes)
    parts, sizes, known = list[frame.Blocks](), dict[int, int](), dict[tuple[object, ...], dict[int, int]]()
    for loop, fetches in stage.loops:
        chunks = []
        for i in fetches:
            shape = recipes[i.weight].shape
            chunks.append((at.operands.groups.index(shape.dtype), shape.chunk_bytes(i.columns), i.k_chunks))
        runs, each = [], dict[int, int]()
        for (group, size), run in itertools.groupby(chunks, key=lambda c: c[:2]):
            number = sum(k for _, _, k in run)
            each[group] = each.get(group, 0) + number * size
            runs.append((group, number, size))
        count = 1 if loop is None else loop.count
        blocks = stage.blocks_of(fetches) if loop is not None else (len(parts),)
        if blocks not in known:
            known[blocks] = {group: sizes.get(group, 0) for group in each}
            sizes |= {group: sizes.get(group, 0) + count * size for group, size in each.items()}
        places = tuple((group, known[blocks][group], size) for group, size in each.items())
        seen = (None, "all") if loop is None else (loop.seen, loop.which)
        parts.append(frame.Blocks(count, places, tuple(runs), *seen))
    found = tuple(node for node in _placed(at, s, stage.lowered.prologue) if isinstance(node, st.SeenBlocks))
    return frame.LoadBlocks(ring, tuple(sorted(sizes.items())), axes, found, tuple(parts))


def _streamed(at: Layout, s: int, ring: frame.WeightRing, ctas: int) -> frame.LoadStreamed:
    runs: list[tuple[int, int, int]] = []
    chunks = []
    for i in at.stages[s].fetches:
        shape = at.stages[s].lowered.weights[i.weight].shape
        chunks.append((at.operands.groups.index(shape.dtype), shape.chunk_bytes(i.columns), i.k_chunks))
    for (group, size), run in itertools.groupby(chunks, key=lambda c: c[:2]):
        runs.append((group, sum(count for _, _, count in run), size))
    return frame.LoadStreamed(ring, ctas, tuple(runs))
