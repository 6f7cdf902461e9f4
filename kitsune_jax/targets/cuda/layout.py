"""The layout of a kernel: shared memory of a CTA, operands, and workspace in global memory; and stages that share one function.

Comes in: a tile program and its ``Arrangement``. Goes out: ``Layout``; a ``StageCode`` for each stage, in which all addresses are
known; and ``Kind``s, groups of equal stages. Shared memory of a CTA: a header of barriers, then weights (resident images, or the
ring that streams them), then each lane's memory (``fitting.LaneMemory``), then the slots of the queues that the CTA reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.passes import simplified
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import ir, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.frame_ir import StageCode
from kitsune_jax.targets.cuda.ir import Constant, Node, Ref, number, parameter, rebuild
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.packing import (
    CallResult,
    CallWorkspace,
    CustomCall,
    MadeByXla,
    PackedImage,
    Pointer,
    Stationary,
    TensorMap,
    custom_call,
)
from kitsune_jax.targets.cuda.stage import facts, fitting, inputs, simplify, split
from kitsune_jax.targets.cuda.stage.fitting import Fitted
from kitsune_jax.targets.cuda.stage.rolling import rolled
from kitsune_jax.targets.cuda.stage_ir import queue_form

# --- Layout -----------------------------------------------------------------------------------------------------------------------

_Kind = TypeVar("_Kind", bound=Node)
_Key = TypeVar("_Key", bound=Hashable)
_COUNTER_BYTES = 128
RECORDER_BYTES = 64  # of a lane of a stamped kernel, at the start of shared memory
_NEAR_BYTES = 16 << 20  # of weights that change with the batch: a third of an H100's L2, a part of which is farther from an SM


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """``weights``: an operand for each dtype of weights, with its parts in their order: (recipe, column chunk or -1 for all).
    ``resident_at``: (stage, resident one of its weights) -> (operand, byte). ``vector_at[s]``: words at which the groups of vectors
    of stage s start. ``tables``: stationary values that are gathered from by row, in their own layout."""

    inputs: tuple[int, ...]
    weights: dict[str, list[tuple[WeightRecipe, int]]]
    resident_at: dict[tuple[int, int], tuple[int, int]]
    vectors: tuple[VectorRecipe, ...]
    vector_at: tuple[tuple[int, ...], ...]
    tables: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Workspace:
    """``at``: byte offsets in the workspace. Its first ``zero_bytes`` are counters, which must be zero: of lanes that are done with
    the ("sinks", stage), ("gradients", stage), and, by groups of lanes, ("groups", sink); of a ("ring", queue). Behind these are
    the partial sums of a ("partial", sink), and the ("slots", queue) of queues in the L2."""

    at: dict[tuple[str, int], int]
    zero_bytes: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """``queue_at``: offsets of the slots of queues in a cluster's shared memory. ``stamped``: it records when it
    runs which tile (``cuda/include/kitsune/timeline.h``). ``ring``: of tiles of inputs, which the only stage reads as ``reads``
    says."""

    program: TileProgram
    a: Arrangement
    name: str
    stages: tuple[Fitted, ...]
    header_bytes: int
    shared_bytes: int
    queue_at: dict[int, int]
    operands: Operands
    workspace: Workspace
    stamped: bool = False
    ring: frame.TileRing | None = None
    reads: inputs.RingReads | None = None

    @property
    def grid(self) -> int:
        """CTAs of the kernel."""
        return self.a.instances(self.program) * self.a.ctas

    @property
    def uniform(self) -> bool:
        """Does every lane take part in every round, even without a tile? So it must for the ring of streamed weights, which waits
        for all lanes, and for weight gradients, which the lanes of a CTA multiply together."""
        return not self.batch_tiles and (self.a.streamed or any(in_setup(stage, frame.GradientStart) for stage in self.stages))

    @property
    def batch_tiles(self) -> int:
        """Tiles of a batch, where the lanes of a CTA work on one batch at a time; else 0."""
        return self.a.batch_tiles(self.program)

    @property
    def batches_at_once(self) -> int:
        """The number of batches whose tiles the CTAs interleave because tiles at the end of a batch have more work (``batches.h``);
        else 0. The weights of these batches must fit in the L2."""
        seen = [node for stage in self.stages for node in stage.lowered.prologue if isinstance(node, st.SeenBlocks)]
        if not any(node.high is not None and node.low is None for node in seen):
            return 0
        each = sum(self.weight_bytes) // max(1, self.program.batches)
        return max(1, min(self.program.batches, _NEAR_BYTES // max(1, each)))

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of each operand that holds weights."""
        groups = self.operands.weights.values()
        return [sum(recipe.shape.part_bytes(chunk) * recipe.count for recipe, chunk in parts) for parts in groups]

    @property
    def packed(self) -> list[tuple[str, str, int]]:
        """The operands that hold weights and vectors: type and name of the pointer in C++, bytes."""
        found = [("const u8*", f"weights{k}", size) for k, size in enumerate(self.weight_bytes)]
        vectors = self.operands.vectors
        return found + ([("const float*", "vectors", 4 * sum(r.words for r in vectors))] if vectors else [])

    @property
    def consecutive(self) -> bool:
        """Are a lane's tiles consecutive in the stream? Sinks by sorted indices then share few segments with other lanes."""
        return any(not start.rows for stage in self.stages for start in in_setup(stage, frame.SegmentStart))

    @property
    def filled(self) -> tuple[tuple[int, str], ...]:
        """(output, fold) for outputs that hold the fold's identity before the kernel starts: those of sinks by sorted indices, and
        of atomic additions."""
        starts = [start for stage in self.stages for start in in_setup(stage, frame.SegmentStart)]
        sinks = [start.ref.of for start in starts if not start.rows]
        sinks += [instr["sink"] for stage in self.program.stages for instr in stage.body if is_added(instr)]
        return tuple((self.program.sinks[k].array, self.program.sinks[k].how) for k in sinks)

    @property
    def exchanges(self) -> list[st.Exchange]:
        """Rings between the CTAs of a cluster."""
        return [node for stage in self.stages for node in fitting.exchanges_of(stage.lowered)]

    @property
    def streaming(self) -> Fitted:
        """The last stage that streams its weights, whose depth and slots the kernel's ring has."""
        return [stage for stage in self.stages if not stage.resident][-1]

    def mask(self, stages: tuple[int, ...]) -> int:
        """Bit mask of the ranks of stages that have one CTA each."""
        return sum(1 << self.a.first_rank(s) for s in stages)

    @property
    def pointers(self) -> list[Pointer]:
        """Those of the kernel's ``Params``."""
        o, p = self.operands, self.program
        found = [Pointer(f"in{k}", k, frame.array_bytes(p.inputs[k])) for k in o.inputs]
        found += [Pointer(name, PackedImage(0, k), size) for k, (_, name, size) in enumerate(self.packed)]
        found += [Pointer(f"table{k}", MadeByXla(0, v), frame.array_bytes(p.values[v])) for k, v in enumerate(o.tables)]
        filled = [(k, how, p.outputs[k]) for k, how in self.filled]
        found += [Pointer(f"filled{k}", CallResult(k, how, a.dtype), frame.array_bytes(a)) for k, how, a in filled]
        found += [Pointer(f"out{k}", CallResult(k), frame.array_bytes(a)) for k, a in enumerate(p.outputs)]
        return [*found, Pointer("workspace", CallWorkspace(), self.workspace.bytes)]

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        """The tensor maps of the kernel's ``Params``."""
        boxed = [] if self.ring is None or self.reads is None else zip(self.reads.arrays, self.ring.arrays, strict=True)
        rows = self.program.rows
        return tuple(TensorMap(f"map{k}", f"in{k}", size // 2, rows) for k, (_, _, size, in_boxes) in boxed if in_boxes)

    @property
    def call(self) -> CustomCall:
        """The custom call: its operands, and how ``cuda/src`` launches the kernel."""
        a = self.a
        flags = flags_of(a.cooperative, self.stamped, len(self.maps))
        geometry = a.sm, self.grid, a.threads, a.cluster, self.shared_bytes, flags, a.ctas
        part = self.stationary(range(len(self.program.inputs)))
        return custom_call(self.pointers, [part], geometry, self.workspace.zero_bytes, self.maps)

    def stationary(self, reads: Sequence[int]) -> Stationary:
        """The weights and vectors to pack; ``reads``: for each input of the program, the number of the call's operand."""
        weights = tuple(map(tuple, self.operands.weights.values()))
        return Stationary(self.program, weights, self.operands.vectors, tuple(reads))


def flags_of(cooperative: bool, stamped: bool, maps: int = 0) -> int:
    """The flags among the words with which ``cuda/src`` launches a kernel, and its number of tensor maps."""
    return int(cooperative) + 2 * int(stamped) + 4 * maps


def is_added(instr: Instr) -> bool:
    """Is the instruction a sum by indices whose rows are added to the result atomically?"""
    return instr.kind == "sink_at" and bool(instr.get("unordered"))


def in_setup(stage: Fitted, kind: type[_Kind]) -> list[_Kind]:
    """The nodes of this class in the setup of a stage."""
    return [node for node in stage.lowered.setup if isinstance(node, kind)]


def sums_of(stage: Fitted, gradient: frame.GradientStart) -> list[frame.PanelSumStart]:
    return [total for total in in_setup(stage, frame.PanelSumStart) if total.gradient == gradient.gradient]


def entry_vectors(program: TileProgram, a: Arrangement, q: int) -> int:
    """16-byte vectors of a thread in an entry of queue ``q``."""
    tile = program.queues[q].tile
    n = math.prod(tile.shape)
    return 1 if n == 1 else tiles.image_vectors(tiles.padded(n), queue_form(tile.dtype, q in a.slab_queues(program)))


def lay_out(program: TileProgram, a: Arrangement, name: str, beside: int = 0, alone: bool = True) -> Layout:
    """The layout of a kernel, or of a part of one if not ``alone``; ``beside``: bytes of the barriers of other parts and of a
    timeline's recorders. Raises ``CannotLower`` if it does not fit."""
    program = simplify.loop_values_as_tiles(program)
    if a.spatial and a.cluster > 1 and len(program.stages) == 1:  # a loop split over a cluster has few registers for a step
        program = simplify.sums_of_products_as_one(program)
    simpler = simplified(program)
    # The loader of a later phase would have to wait for what the phases before it make.
    arrays = inputs.ring_arrays(program, a) if alone else ()
    versions = (program,) if simpler == program else (simpler, program)
    boxed = inputs.boxed_arrays(program, arrays)
    if boxed:
        with contextlib.suppress(CannotLower):
            found = _laid_out(versions, a, name, beside, arrays, boxed)
            if found.reads is not None and inputs.multiplies_boxes(found.reads.nodes, boxed):
                return found
    return _laid_out(versions, a, name, beside, arrays, frozenset())


def _laid_out(
    versions: Sequence[TileProgram],
    a: Arrangement,
    name: str,
    beside: int,
    arrays: Sequence[int],
    boxed: frozenset[int],
) -> Layout:
    """The layout, with a ring of as many of ``arrays`` as have room; of those that are ``boxed`` in boxes."""
    program = versions[-1]
    fits = [fitting.StageFit(versions, s, a, boxed) for s in range(len(program.stages))]
    for staging in (True, False):
        header = tiles.aligned(beside + barrier_bytes(program, a, staging) + (tiles.RING_BARRIER_BYTES if arrays else 0))
        stages = tuple(fit.fit(header, staging) for fit in fits)
        queue_at, shared = _place_queues(program, a, [_end(s, a, header) for s in stages])
        if shared <= a.shared_bytes or not any(stage.shape.staged for stage in stages):
            break
    if shared > a.shared_bytes:
        raise CannotLower(f"the kernel needs {shared} bytes of shared memory; a CTA has {a.shared_bytes}")
    if a.cluster != a.ctas and any(fitting.exchanges_of(stage.lowered) for stage in stages):
        raise CannotLower("the CTAs that split the weights of a loop must be one cluster")
    if program.tile_rows < tiles.TILE_ROWS and not all(map(fitting.allows_half_tiles, stages)):
        raise CannotLower("a tile of 32 rows has code only in loops over a cluster that keep their values in place")
    ring, reads = None, None
    # Fewer arrays where all have no room; held to the end of a tile where the ring has entries for that.
    for count, held in itertools.product(range(len(arrays), 0, -1), (True, False)):
        reads = _ring_reads(stages[0], a, arrays[:count], held, boxed)
        stage, entries = _with_ring(fits[0], stages[0], header, staging, inputs.entry_bytes(program, reads.arrays), bool(boxed))
        if entries >= (tiles.held_entries(a.lanes) if held else 1):
            stages, reads = (stage,), _ring_reads(stage, a, arrays[:count], held, boxed)
            ring = _ring(program, reads.arrays, entries, _ring_at(_end(stage, a, header), bool(boxed)), boxed)
            shared = ring.at + ring.depth * ring.bytes
            break
    for found in stages:
        slices = [r.slices for r in found.lowered.weights if r.slices is not None]
        some = len(slices) < len(found.lowered.weights) or len({s.axes for s in slices}) > 1
        if slices and some and not found.resident:
            raise CannotLower("weights of which only some change from tile to tile, or with other batches, have no code on the GPU")
    made = _operands(program, stages), _workspace(program, a, stages)
    return Layout(program, a, name, stages, header, shared, queue_at, *made, ring=ring, reads=reads if ring else None)


def _ring_reads(stage: Fitted, a: Arrangement, arrays: Sequence[int], held: bool, boxed: frozenset[int]) -> inputs.RingReads:
    room = inputs.room_for_kept(a.lanes, stage.lowered.liveness)
    return inputs.through_ring(stage.lowered.nodes, arrays, held, room, boxed)


def _end(stage: Fitted, a: Arrangement, header: int) -> int:
    """The end of a stage's weights and tiles in shared memory."""
    return header + stage.weight_bytes + a.lanes * stage.memory.bytes


def _with_ring(fit: fitting.StageFit, stage: Fitted, header: int, staging: bool, entry: int, boxed: bool) -> tuple[Fitted, int]:
    """(the fit of the only stage beside a ring of tiles with entries of ``entry`` bytes, the ring's entries or 0).

    Resident weights leave what they leave. Lanes that multiply weight gradients together need an entry each: one must not wait for
    the entry of another that waits for it. A ring of streamed weights takes all that is left, and gives some of it back where it
    keeps as many chunks as two lanes need that are a product apart. Its lanes wait for each other: a chunk is free when all have
    multiplied with it. So the ring of tiles then needs an entry for each lane, too.
    """
    a = fit.a
    if not entry:
        return stage, 0
    if stage.resident:
        entries = tiles.ring_entries(entry, a.lanes, a.shared_bytes - _ring_at(_end(stage, a, header), boxed))
        return stage, 0 if in_setup(stage, frame.GradientStart) and entries < a.lanes else entries
    needed = max(fitting.STAGED_DEPTH, 2 * max((r.shape.k_chunks for r in stage.lowered.weights), default=0))
    for entries in dict.fromkeys((2 * a.lanes, max(2, a.lanes))):
        try:
            found = fit.fit(header + entries * entry, staging)
        except CannotLower:
            continue
        fits = _ring_at(_end(found, a, header), boxed) + entries * entry <= a.shared_bytes
        if fits and found.shape == stage.shape and found.depth >= min(stage.depth, needed):
            return found, entries
    return stage, 0


def _ring_at(end: int, boxed: bool) -> int:
    """The first byte of the ring of tiles behind byte ``end`` of shared memory. Boxes need the alignment of their swizzle."""
    return tiles.aligned(end) if boxed else tiles.aligned(end, 128)


def _ring(program: TileProgram, arrays: Sequence[int], entries: int, at: int, boxed: frozenset[int]) -> frame.TileRing:
    """The ring of tiles of ``arrays``, which lie one behind the other in an entry."""
    sizes = {k: frame.row_bytes(program.inputs[k]) for k in arrays}
    places, size = offsets((k, tiles.TILE_ROWS * n) for k, n in sizes.items())  # each a multiple of 1024 bytes
    found = tuple((parameter("map" if k in boxed else "in", k), places[k], n, k in boxed) for k, n in sizes.items())
    return frame.TileRing(entries, size, at, found)


def barrier_bytes(program: TileProgram, a: Arrangement, staging: bool = True) -> int:
    """Upper bound of the bytes of a part's barriers."""
    most = max((len(fitting.staged_arrays(program, s)) for s in range(len(program.stages))), default=0) if staging else 0
    rings = 16 * most * a.lanes + 16 * fitting.most_chunks(program) + sum(16 * q.depth * a.lanes for q in program.queues)
    rings += split.ring_bytes(zip(a.split, (s.body for s in program.stages), strict=True), a.lanes)
    return rings + 128


def _place_queues(program: TileProgram, a: Arrangement, ends: list[int]) -> tuple[dict[int, int], int]:
    """(slots of cluster queues, placed after the memory that their readers use already (``ends``); shared memory of the largest
    CTA)."""
    found: dict[int, int] = {}
    for q, queue in enumerate(program.queues):
        if a.places[q] != "cluster":
            continue
        if a.split[queue.producer] > 1 or any(a.split[c] > 1 for c in queue.consumers):
            raise CannotLower("the queues of a stage that is split by columns must be in the L2")
        found[q] = max(ends[c] for c in queue.consumers)
        for c in queue.consumers:
            ends[c] = found[q] + a.lanes * queue.depth * entry_vectors(program, a, q) * tiles.GROUP_THREADS * 16
    return found, max(ends)


def _operands(program: TileProgram, stages: tuple[Fitted, ...]) -> Operands:
    body = [i for s in program.stages for i in walk(s.body)]
    loads = [(i["array"], program.values[i.outputs[0]].tile) for i in body if i.kind == "load"]
    read = {k for k, tile in loads if tile or program.inputs[k].streamed}
    sliced = {i["array"] for i in body if i.kind == "load_slice" and program.values[i.outputs[0]].tile}
    weights: dict[str, list[tuple[WeightRecipe, int]]] = {r.shape.dtype: [] for stage in stages for r in stage.lowered.weights}
    resident_at: dict[tuple[int, int], tuple[int, int]] = {}
    for s, stage in enumerate(stages):
        parts = [(i.weight, i.chunk) for i in stage.packed]  # in the order of use, so that the loader reads consecutively
        for w, chunk in [(w, -1) for w in sorted({w for w, _ in parts})] if stage.resident else parts:
            recipe = stage.lowered.weights[w]
            before = weights[recipe.shape.dtype]
            if stage.resident:
                resident_at[s, w] = list(weights).index(recipe.shape.dtype), sum(r.shape.bytes for r, _ in before)
            before.append((recipe, chunk))
    vectors, vector_at = _vectors(stages)
    inputs = tuple(sorted(read.union(sliced, () if program.order is None else (program.order,))))
    tables = tuple(dict.fromkeys(v for stage in stages for v in stage.lowered.tables))
    return Operands(inputs, weights, resident_at, vectors, vector_at, tables)


def _vectors(stages: tuple[Fitted, ...]) -> tuple[tuple[VectorRecipe, ...], tuple[tuple[int, ...], ...]]:
    """The stationary vectors, one after the other; vectors that several stages read are stored once."""
    recipes: list[VectorRecipe] = []
    starts: dict[VectorRecipe, int] = {}
    words, found = 0, []
    for stage in stages:
        at = []
        for group in stage.lowered.vectors:
            if len(group) == 1 and group[0] in starts:
                at.append(starts[group[0]])
                continue
            at.append(words)
            for recipe in group:
                starts.setdefault(recipe, words)
                recipes.append(recipe)
                words += recipe.words
        found.append(tuple(at))
    return tuple(recipes), tuple(found)


def _workspace(program: TileProgram, a: Arrangement, stages: tuple[Fitted, ...]) -> Workspace:
    pipelines, workers = a.instances(program) * a.lanes, a.instances(program) * a.tiles_at_once
    l2 = [q for q in range(len(program.queues)) if a.places[q] == "l2"]
    counters: list[tuple[tuple[str, int], int]] = []
    for s, stage in enumerate(stages):
        sinks, segments = in_setup(stage, frame.SinkStart), in_setup(stage, frame.SegmentStart)
        counters += [(("sinks", s), _COUNTER_BYTES)] if sinks or segments else []
        counters += [(("groups", start.ref.of), -(-workers // start.fan_in) * _COUNTER_BYTES) for start in segments]
    with_gradients = [s for s, stage in enumerate(stages) if in_setup(stage, frame.GradientStart)]
    counters += [(("gradients", s), a.split[s] * a.lanes * _COUNTER_BYTES) for s in with_gradients]
    counters += [(("ring", q), pipelines * 2 * program.queues[q].depth * _COUNTER_BYTES) for q in l2]
    rest: list[tuple[tuple[str, int], int]] = []
    for stage in stages:
        words = [(sink.ref.of, 4 * (sink.width or 1)) for sink in in_setup(stage, frame.SinkStart)]
        words += [(start.ref.of, start.partial_words) for start in in_setup(stage, frame.SegmentStart)]
        rest += [(("partial", sink), tiles.aligned(workers * n * 4, 128)) for sink, n in words]
    for s in with_gradients:
        parts = a.split[s] * a.gradient_parts(program)
        for gradient in in_setup(stages[s], frame.GradientStart):
            rest.append((("partial", gradient.gradient.of), parts * gradient.shape.words * 4))
            sums = sums_of(stages[s], gradient)
            rest += [(("partial", total.sums.of), tiles.aligned(parts * total.panel.width * 4, 128)) for total in sums]
    for q in l2:
        slots = pipelines * program.queues[q].depth * entry_vectors(program, a, q)
        rest.append((("slots", q), slots * tiles.GROUP_THREADS * 16))
    zeroed, zero_bytes = offsets(counters)
    others, end = offsets(rest, zero_bytes)
    return Workspace(zeroed | others, zero_bytes, max(end, _COUNTER_BYTES))  # never empty: see ``lower.call``


def offsets(sizes: Iterable[tuple[_Key, int]], start: int = 0) -> tuple[dict[_Key, int], int]:
    """(key -> byte, end) of things of so many bytes that lie one behind the other from byte ``start`` on."""
    found = {}
    for key, size in sizes:
        found[key] = start
        start += size
    return found, start


# --- Stages with all addresses ----------------------------------------------------------------------------------------------------


def place_stage(at: Layout, s: int) -> StageCode:
    """The complete code of stage ``s``. Addresses are ``Constant``s where equal stages may differ."""
    stage = at.stages[s]
    ring = frame.WeightRing(at.header_bytes)
    staged = tuple(_staged(at, s))
    tile_ring = [] if at.ring is None else [at.ring]
    setup = [*_memory(at, s), *_queues(at, s), *staged, *tile_ring, *_with_places(at, s, stage.lowered.setup)]
    if not stage.resident:
        setup.append(ring)
    elif stage.fetches:
        setup.append(frame.AwaitWeights(at.stamped))
    loops = at.a.sm >= 900 or not at.a.spatial  # spatial kernels for sm_80 spill up to 164 bytes more with loops over chunks
    body = _with_places(at, s, rolled(_tile_nodes(at, s), loops))
    vectors, batches, scalar = bool(at.operands.vectors), bool(at.batch_tiles), facts.has_scalar_rows(at.program)
    rows = facts.SCALAR_TILE_ROWS if scalar else at.program.tile_rows
    prefetched = _prefetched(at, s) if rows == tiles.TILE_ROWS else ()
    order = None if at.program.order is None else parameter("in", at.program.order)
    # A wait for each end of a queue; the tile, and the sums of its waits for weights and for other CTAs.
    waits = sum((s == q.producer) + (s in q.consumers) for q in at.program.queues)
    stamp = frame.TileStamp(number("stage_number", "stamp", s), waits + 3) if at.stamped else None
    ring_too = at.ring is not None
    loop = frame.TileLoop(at.uniform, at.consecutive, order, staged, prefetched, vectors, batches, rows, body, stamp, ring_too)
    ctas = at.a.ctas if at.a.spatial else 0
    consumer = frame.Consumer(tuple(setup), ctas, loop, tuple(_finish(at, s)))
    sliced = any(r.slices is not None for r in stage.lowered.weights)
    loader: frame.LoadResident | frame.LoadBlocks | frame.LoadStreamed
    if stage.resident:
        loader = _resident(at, s)
    else:
        loader = _blocks(at, s, ring) if sliced else frame.LoadStreamed(ring, ctas, _runs(at, s, stage.fetches))
    tiles_too = None if at.ring is None else frame.LoadTiles(at.ring, at.uniform, at.consecutive)
    return StageCode(consumer, loader, at.a.split[s], tiles_too)


def _tile_nodes(at: Layout, s: int) -> tuple[Node, ...]:
    """The nodes of a tile, with the rows that come through the ring."""
    prologue, nodes = at.stages[s].lowered.prologue, at.stages[s].lowered.nodes
    if at.ring is None or at.reads is None:
        return (*prologue, *nodes)
    unread = {Ref("in", k) for k in at.reads.arrays if k not in at.reads.others}
    kept = [node for node in prologue if not (isinstance(node, ir.RowAddresses) and node.ref in unread)]
    rows = list[Node]()
    for k, (_, to, size, boxed) in zip(at.reads.arrays, at.ring.arrays, strict=True):
        rows.append(frame.RingBoxes(Ref("ring", k), to) if boxed else frame.RingRows(Ref("ring", k), to, size))
    return (*kept, *rows, *at.reads.nodes)


def _with_places(at: Layout, s: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """``nodes`` with the offsets and parameters of this layout."""
    stage, vectors = at.stages[s], at.operands.vector_at[s]
    rings = ((x.ring, x.bytes) for x in fitting.exchanges_of(stage.lowered))
    exchanges, _ = offsets(rings, stage.memory.exchanges)

    def change(x: Any) -> Any:
        match x:
            case frame.SegmentStart():
                return dataclasses.replace(x, at=stage.memory.segments + x.at, result=_result(at, x.ref.of))
            case frame.TopsStart():
                return dataclasses.replace(x, at=stage.memory.segments + x.at)
            case st.Exchange():
                return dataclasses.replace(x, at=exchanges[x.ring], ctas=(1 << at.a.ctas) - 1, stamped=at.stamped)
            case ir.StationaryVector(group, offset):
                word = vectors[group] + offset
                return number("vector", word, word)
            case st.Resident(weight, offset, _, _):
                byte = _resident_offset(at, s, weight) + (offset.first if isinstance(offset, ir.Stepped) else offset)
                return dataclasses.replace(x, at=number("resident", byte, byte))
            case ir.Image(ref):
                return ir.Image(ref, stage.memory.images[ref.of])
            case ir.TableRows(table=Ref(of=v)):
                return dataclasses.replace(x, table=parameter("table", at.operands.tables.index(v)))
        return x

    found: tuple[Node, ...] = ir.rebuild(nodes, change)
    return found


def _resident_offset(at: Layout, s: int, weight: int) -> int:
    """Offset of a resident weight of stage ``s`` in shared memory."""
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
        found.append(st.RowMemory(addresses, products, products + st.address_bytes(addresses), stage.lowered.product_bytes))
    if in_setup(stage, frame.GradientStart):
        found.append(frame.PanelMemory(_lanes(at, s), stage.memory.panels))
    return found


def _staged(at: Layout, s: int) -> list[frame.StagedArray]:
    """The staged arrays of stage ``s``: their buffers follow the other memory of the lane, one after the other."""
    stage, found = at.stages[s], list[frame.StagedArray]()
    offset = stage.memory.staged
    for n, k in enumerate(sorted(stage.shape.staged)):
        array = at.program.inputs[k]
        columns = frame.columns_of(array).n
        found.append(frame.StagedArray(Ref("staged", k), array.dtype, columns, parameter("in", k), _lanes(at, s), offset, n))
        offset += frame.staged_bytes(array)
    return found


def _prefetched(at: Layout, s: int) -> tuple[tuple[Constant, int], ...]:
    """(input, bytes of a row) of the next tiles to prefetch: of contiguous inputs that are not copied in bulk anyway, or of the
    stream's order if it has one."""
    loads = {i["array"] for i in at.program.stages[s].body if i.kind == "load"} - at.stages[s].shape.staged
    loads.difference_update(() if at.reads is None else at.reads.arrays)
    arrays, order = at.program.inputs, at.program.order
    contiguous = [(k, frame.row_bytes(arrays[k])) for k in sorted(loads) if frame.has_contiguous_tiles(at.program, arrays[k])]
    return tuple((parameter("in", k), size) for k, size in ([(order, 4)] if order is not None else contiguous))


def _queues(at: Layout, s: int) -> list[Node]:
    found: list[Node] = []
    for q, queue in enumerate(at.program.queues):
        if s != queue.producer and s not in queue.consumers:
            continue
        ref, vectors, depth = Ref("queue", q), entry_vectors(at.program, at.a, q), queue.depth
        stamp = number("queue_number", q, q) if at.stamped else None
        if at.a.places[q] == "cluster":
            slots = number("slots", q, at.queue_at[q])
            writers = number("writers", q, at.mask((queue.producer,)))
            readers = number("readers", q, at.mask(queue.consumers))
            found.append(frame.ClusterRing(ref, ir.ring(q, depth), vectors, depth, slots, writers, readers, stamp))
        else:
            counters = number("counters", q, at.workspace.at["ring", q])
            slots = number("slots", q, at.workspace.at["slots", q], "i64")
            writers = number("writers", q, at.a.split[queue.producer])
            readers = number("readers", q, sum(at.a.split[c] for c in queue.consumers))
            found.append(frame.L2Ring(ref, vectors, counters, slots, number("depth", q, depth), writers, readers, stamp))
    return found


def _finish(at: Layout, s: int) -> list[Node]:
    """The nodes that add up partial sums: the last CTA or lane to arrive adds up those of all."""
    stage, found = at.stages[s], list[Node]()
    if st.Turn("first") in stage.lowered.setup:
        found.append(st.Turn("last"))
    if ("sinks", s) in at.workspace.at:
        arrived = number("arrived", "sinks", at.workspace.at["sinks", s])
        sinks = [(x, _result(at, x.ref.of), math.prod(at.program.sinks[x.ref.of].shape)) for x in in_setup(stage, frame.SinkStart)]
        starts = in_setup(stage, frame.SegmentStart)
        segments = [(x.ref, number("groups", x.ref.of, at.workspace.at["groups", x.ref.of])) for x in starts]
        found.append(frame.FinishSinks(arrived, tuple(sinks), tuple(segments)))
    if ("gradients", s) in at.workspace.at:
        arrived = number("arrived", "gradients", at.workspace.at["gradients", s])
        parts, gradients = at.a.gradient_parts(at.program), []
        for g in in_setup(stage, frame.GradientStart):
            sums = tuple((total, _result(at, total.sums.of)) for total in sums_of(stage, g))
            gradients.append((g, _result(at, g.gradient.of), sums))
        found.append(frame.FinishGradients(arrived, parts, at.a.spatial, at.a.split[s], tuple(gradients)))
    return found


def _result(at: Layout, sink: int) -> frame.Result:
    array = at.program.sinks[sink].array
    partial = number("partial", sink, at.workspace.at["partial", sink], "i64")
    return frame.Result(partial, parameter("out", array), at.program.outputs[array].dtype)


def _resident(at: Layout, s: int) -> frame.LoadResident:
    stage, found = at.stages[s], list[frame.FetchResident]()
    for w in sorted({i.weight for i in stage.fetches}):
        group, source = at.operands.resident_at[s, w]
        shape, to = stage.lowered.weights[w].shape, _resident_offset(at, s, w)
        where = number("resident", to, to), group, number("weights", w, source)
        found.append(frame.FetchResident(*where, shape.slab_bytes, shape.split > 1))
    return frame.LoadResident(tuple(found))


def _blocks(at: Layout, s: int, ring: frame.WeightRing) -> frame.LoadBlocks:
    """The loader of sliced weights, batch by batch in the order in which a tile multiplies with them."""
    stage, program = at.stages[s], at.program
    slices = [r.slices for r in stage.lowered.weights if r.slices is not None]
    inner = {a: math.prod(program.axes[a + 1 : program.batch_axes]) for a in range(program.batch_axes)}
    axes = tuple((inner[a], n) for a, n in slices[0].axes)
    parts, sizes, known = list[frame.WeightBlocks](), dict[int, int](), dict[tuple[object, ...], dict[int, int]]()
    for loop, fetches in stage.loops:
        runs, each = _runs(at, s, fetches), dict[int, int]()
        for group, chunks, size in runs:
            each[group] = each.get(group, 0) + chunks * size
        count = 1 if loop is None else loop.count
        blocks = stage.blocks_of(fetches) if loop is not None else (len(parts),)
        if blocks not in known:
            known[blocks] = {group: sizes.get(group, 0) for group in each}
            sizes |= {group: sizes.get(group, 0) + count * size for group, size in each.items()}
        places = tuple((group, known[blocks][group], size) for group, size in each.items())
        seen = (None, "all") if loop is None else (loop.seen, loop.which)
        late = _runs(at, s, fetches[1:]) if loop is not None and loop.first else ()
        parts.append(frame.WeightBlocks(count, places, _runs(at, s, fetches[:1]) if late else runs, *seen, late))
    found = tuple(node for node in _with_places(at, s, stage.lowered.prologue) if isinstance(node, st.SeenBlocks))
    return frame.LoadBlocks(ring, tuple(sorted(sizes.items())), axes, found, tuple(parts))


def _runs(at: Layout, s: int, fetches: Sequence[st.Issue]) -> tuple[tuple[int, int, int], ...]:
    """(operand, chunks, bytes of a chunk) of ``fetches``, where consecutive ones of equal chunks are one run."""
    chunks = []
    for i in fetches:
        recipe = at.stages[s].lowered.weights[i.weight]
        chunks.append((list(at.operands.weights).index(recipe.shape.dtype), i.columns * tiles.ROW_BYTES, i.k_chunks))
    runs = itertools.groupby(chunks, key=lambda c: c[:2])
    return tuple((group, sum(count for _, _, count in run), size) for (group, size), run in runs)


# --- Kinds of stages --------------------------------------------------------------------------------------------------------------

# Kinds of names, by the numbers in the tile program that they count: values, queues, sinks, inputs, outputs.
_FAMILIES = (
    ("v", "d", "c", "r", "e", "k", "s", "h", "index", "image", "gather", "work", "pick"),
    ("q", "queue", "pop", "push"),
    ("sink", "gradient", "panel", "columns"),
    ("in", "staged", "ring", "kept"),
    ("out",),
)
_FAMILY = {kind: number for number, kinds in enumerate(_FAMILIES) for kind in kinds}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Equal ``stages``: one function, called with the constants in which they differ (``fields``, and a row of ``places`` for each
    stage). Other constants are literals.

    ptxas takes time for every inlined line, and the layers of a deep network, forwards and backwards, are only a few kinds of
    stages. The constants are in constant memory, not in registers, so a stage that needs all of its registers can read them again.
    """

    stages: tuple[int, ...]
    code: Any
    fields: tuple[Constant, ...]
    places: tuple[tuple[str, ...], ...]

    @property
    def number(self) -> int:
        """The number of its first stage, which names its functions."""
        return self.stages[0]


def kinds(codes: Sequence[Any], share: bool = True) -> list[Kind]:
    """The kinds of the stages, in the order of their first stages; without ``share`` each stage is its own kind. Stages are equal
    if their codes are equal once names and constants are numbered within the stage."""
    if not share or len(codes) == 1:
        return [Kind((s,), code, (), ()) for s, code in enumerate(codes)]
    numbered = [_numbered(code) for code in codes]
    groups: dict[Any, list[int]] = {}
    for s, (code, _) in enumerate(numbered):
        without_values = rebuild(code, lambda x: dataclasses.replace(x, value="") if isinstance(x, Constant) else x)
        groups.setdefault(without_values, []).append(s)
    found = []
    for first, *others in groups.values():
        code, constants = numbered[first] if others else (codes[first], ())
        columns = zip(constants, *(numbered[s][1] for s in others), strict=True)
        differing = [column for column in columns if len({x.value for x in column}) > 1]
        places = tuple(zip(*([x.initializer for x in column] for column in differing), strict=True))
        found.append(Kind((first, *others), code, tuple(column[0] for column in differing), places))
    return found


def _numbered(code: Any) -> tuple[Any, tuple[Constant, ...]]:
    """(``code`` with names and constants numbered from 0 in the order of their occurrence, its constants)."""
    names: dict[tuple[int | str, int], int] = {}
    counts: dict[int | str, int] = {}
    found: dict[tuple[str, Any], Constant] = {}

    def change(x: Any) -> Any:
        if isinstance(x, Ref):
            family = _FAMILY.get(x.kind, x.kind)
            if (family, x.of) not in names:
                names[family, x.of] = counts.get(family, 0)
                counts[family] = names[family, x.of] + 1
            return Ref(x.kind, names[family, x.of], x.part)
        if isinstance(x, Constant):
            if (x.name, x.key) not in found:
                index = sum(name == x.name for name, _ in found)
                found[x.name, x.key] = dataclasses.replace(x, key=index)
            elif found[x.name, x.key].value != x.value:
                raise AssertionError(f"{x.name} of {x.key} is {found[x.name, x.key].value} and {x.value}")
            return found[x.name, x.key]
        return x

    return rebuild(code, change), tuple(found.values())
