"""What lies where: shared memory of a CTA, operands, workspace in global memory.

Comes in: the fitted stages of a kernel. Goes out: ``Layout``. Shared memory of a CTA: a header of barriers, then weights (resident
images, or the ring they pass through), then each lane's memory (``fitting.LaneMemory``), then the slots of the queues that it
reads.
"""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.passes import simplified
from kitsune_jax.targets.cuda import arrays, fitting, loop_values, pointwise, summed_products, tiles
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.fetches import Fetch
from kitsune_jax.targets.cuda.fitting import Fitted
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.runtime import LAUNCH_VERSION
from kitsune_jax.targets.cuda.values import queue_form
from kitsune_jax.targets.errors import CannotLower

_COUNTER_BYTES = 128
_NEAR_BYTES = 16 << 20  # of weights that change from batch to batch: a third of an H100's L2, a part of which is further away


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """``weights``: of all stages, those of stage s from ``first_weight[s]`` on. ``groups``: their dtypes, an operand each, which
    holds the parts of ``order``: (weight of the group, column chunk, -1 for all). ``resident_at``: of a resident matrix: (operand,
    byte). ``vector_at[s]``: words at which the groups of vectors of stage s start. ``tables``: stationary values that are
    read row by row, as they lie."""

    inputs: tuple[int, ...]
    weights: tuple[WeightRecipe, ...]
    first_weight: tuple[int, ...]
    groups: tuple[str, ...]
    order: tuple[tuple[tuple[int, int], ...], ...]
    resident_at: dict[int, tuple[int, int]]
    vectors: tuple[VectorRecipe, ...]
    vector_at: tuple[tuple[int, ...], ...]
    tables: tuple[int, ...]

    def of_group(self, dtype: str) -> tuple[WeightRecipe, ...]:
        return tuple(r for r in self.weights if r.shape.dtype == dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes at which things start: counters (by stage, of groups of lanes by sink, of rings by queue), which must be zero; partial
    sums by sink; the slots of queues in the L2."""

    sinks_arrived: dict[int, int]
    groups_arrived: dict[int, int]
    gradients_arrived: dict[int, int]
    rings: dict[int, int]
    zero_bytes: int
    partials: dict[int, int]
    slots: dict[int, int]
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """``queue_at``: where the slots of queues in a cluster's shared memory start; ``rank``: of the first CTA of each stage.
    ``fetch``: what the kernel asks the L2 for."""

    program: TileProgram
    a: Arrangement
    name: str
    stages: tuple[Fitted, ...]
    header_bytes: int
    shared_bytes: int
    queue_at: dict[int, int]
    operands: Operands
    workspace: Workspace
    fetch: Fetch | None = None

    @property
    def working(self) -> int:
        """CTAs that have tiles."""
        return self.a.instances(self.program) * self.a.ctas

    @property
    def grid(self) -> int:
        """CTAs of the kernel: those that have tiles, and others that only ask for weights."""
        return self.working if self.fetch is None else self.fetch.grid(self.working, self.a.ctas)

    @property
    def uniform(self) -> bool:
        """Every lane takes part in every round, with a tile or without: the ring of streamed weights waits for all of them, and the
        lanes of a CTA multiply weight gradients together."""
        return not self.batch_tiles and (self.a.streamed or any(gradients_of(stage) for stage in self.stages))

    @property
    def batch_tiles(self) -> int:
        """Of a batch, where the lanes of a CTA work on one at a time; else 0."""
        return self.a.batch_tiles(self.program)

    @property
    def together(self) -> int:
        """Batches whose tiles the CTAs take together, where those at the end of a batch have more work (``batches.h``); else 0.
        Their weights stay in the L2 meanwhile."""
        seen = [node for stage in self.stages for node in stage.lowered.prologue if isinstance(node, st.SeenBlocks)]
        if not any(node.high is not None and node.low is None for node in seen):
            return 0
        each = sum(self.weight_bytes) // max(1, self.program.batches)
        return max(1, min(self.program.batches, _NEAR_BYTES // max(1, each)))

    @property
    def weight_bytes(self) -> list[int]:
        """Of each operand that holds weights."""
        found, o = [], self.operands
        for dtype, order in zip(o.groups, o.order, strict=True):
            recipes = o.of_group(dtype)
            found.append(sum(recipes[k].shape.part_bytes(chunk) * recipes[k].count for k, chunk in order))
        return found

    @property
    def consecutive(self) -> bool:
        """A lane's tiles follow each other in the stream: so few segments of a sink by sorted indices are shared with others."""
        return any(not start.rows for stage in self.stages for start in segments_of(stage))

    @property
    def filled(self) -> tuple[tuple[int, str], ...]:
        """The outputs that hold the identity of a fold before the kernel starts, with that fold: of sinks by sorted indices, and of
        those that are added to atomically."""
        sinks = [start.ref.of for stage in self.stages for start in segments_of(stage) if not start.rows]
        sinks += [instr["sink"] for stage in self.program.stages for instr in stage.body if is_added(instr)]
        return tuple((self.program.sinks[k].array, self.program.sinks[k].how) for k in sinks)

    @property
    def exchanges(self) -> list[st.Exchange]:
        """Rings between the CTAs of a cluster."""
        return [node for stage in self.stages for node in fitting.exchanges_of(stage.lowered)]

    @property
    def depth(self) -> int:
        """Of the ring of streamed weights."""
        return [stage.depth for stage in self.stages if not stage.resident][-1]

    @property
    def slot_bytes(self) -> int:
        """Of the ring of streamed weights, of the last stage that has one."""
        return [stage.slot for stage in self.stages if not stage.resident][-1]

    def mask(self, stages: tuple[int, ...]) -> int:
        """Of the ranks of stages that have one CTA each."""
        return sum(1 << self.a.first_rank(s) for s in stages)

    @property
    def launch(self) -> tuple[int, ...]:
        """The words that ``cuda/src`` launches the kernel with."""
        a, o, p = self.a, self.operands, self.program
        operands = len(o.inputs) + len(o.groups) + bool(o.vectors) + len(o.tables) + len(self.filled)
        hints = 0 if self.fetch is None else 1
        counts = operands + hints, len(p.outputs) + 1, self.workspace.zero_bytes, hints
        sizes = [arrays.array_bytes(p.inputs[k]) for k in o.inputs]
        sizes += self.weight_bytes
        sizes += [4 * sum(r.words for r in o.vectors)] if o.vectors else []
        sizes += [math.prod(p.values[v].shape) * pointwise.ITEM_SIZE[p.values[v].dtype] for v in o.tables]
        sizes += [arrays.array_bytes(p.outputs[k]) for k, _ in self.filled]
        sizes += [] if self.fetch is None else [self.fetch.array_bytes]
        sizes += [*(arrays.array_bytes(x) for x in p.outputs), self.workspace.bytes]
        geometry = a.sm, self.grid, a.threads, a.cluster, self.shared_bytes, int(a.cooperative), a.ctas
        return LAUNCH_VERSION, *geometry, *counts, *sizes


def is_added(instr: Instr) -> bool:
    """Is it a sum by indices whose rows are added to the result atomically?"""
    return instr.kind == "sink_at" and bool(instr.get("unordered"))


def gradients_of(stage: Fitted) -> list[st.GradientStart]:
    return [node for node in stage.lowered.setup if isinstance(node, st.GradientStart)]


def sinks_of(stage: Fitted) -> list[st.SinkStart]:
    return [node for node in stage.lowered.setup if isinstance(node, st.SinkStart)]


def segments_of(stage: Fitted) -> list[st.SegmentStart]:
    return [node for node in stage.lowered.setup if isinstance(node, st.SegmentStart)]


def sums_of(stage: Fitted, gradient: st.GradientStart) -> list[st.PanelSumStart]:
    return [n for n in stage.lowered.setup if isinstance(n, st.PanelSumStart) and n.gradient == gradient.gradient]


def entry_vectors(program: TileProgram, a: Arrangement, q: int) -> int:
    """16-byte vectors of a thread in an entry of queue ``q``."""
    tile = program.queues[q].tile
    n = math.prod(tile.shape)
    return 1 if n == 1 else tiles.image_vectors(tiles.padded(n), queue_form(tile.dtype, q in a.slab_queues(program)))


def of_kernel(program: TileProgram, a: Arrangement, name: str, beside: int = 0) -> Layout:
    """``beside``: bytes of the barriers of other parts of the kernel. Raises ``CannotLower`` where it does not fit."""
    program = loop_values.as_tiles(program)
    if a.spatial and a.cluster > 1 and len(program.stages) == 1:  # a loop over a cluster, which has few registers for a step
        program = summed_products.as_one(program)
    simpler = simplified(program)
    for staging in (True, False):
        header = tiles.aligned(beside + barrier_bytes(program, a, staging))
        stages = tuple(fitting.fit((simpler, program), s, a, header, staging) for s in range(len(program.stages)))
        queue_at, shared = _place_queues(program, a, [header + s.weight_bytes + a.lanes * s.memory.bytes for s in stages])
        if shared <= a.shared_bytes or not any(stage.shape.staged for stage in stages):
            break
    if shared > a.shared_bytes:
        raise CannotLower(f"the kernel needs {shared} bytes of shared memory; a CTA has {a.shared_bytes}")
    if a.cluster != a.ctas and any(fitting.exchanges_of(stage.lowered) for stage in stages):
        raise CannotLower("a loop whose weights are split over CTAs needs these to be a cluster")
    return Layout(program, a, name, stages, header, shared, queue_at, _operands(program, stages), _workspace(program, a, stages))


def barrier_bytes(program: TileProgram, a: Arrangement, staging: bool = True) -> int:
    """Of the header of a part, at most."""
    most = max((len(fitting.staged_arrays(program, s)) for s in range(len(program.stages))), default=0) if staging else 0
    rings = 16 * most * a.lanes + 16 * fitting.MAX_DEPTH + sum(16 * q.depth * a.lanes for q in program.queues)
    rings += sum(
        16 * tiles.EXCHANGE_DEPTH * a.lanes
        for split, s in zip(a.split, program.stages, strict=True)
        if split > 1
        for i in walk(s.body)
        for block in (i.block.body if i.block else ())
        if block.kind == "matmul"
    )
    return rings + 128


def _place_queues(program: TileProgram, a: Arrangement, ends: list[int]) -> tuple[dict[int, int], int]:
    """Slots of cluster queues behind what their readers hold already (``ends``), and the shared memory of the greediest CTA."""
    found: dict[int, int] = {}
    for q, queue in enumerate(program.queues):
        if a.places[q] != "cluster":
            continue
        if a.split[queue.producer] > 1 or any(a.split[c] > 1 for c in queue.consumers):
            raise CannotLower("a stage that is split by columns has queues in the L2 only")
        found[q] = max(ends[c] for c in queue.consumers)
        for c in queue.consumers:
            ends[c] = found[q] + a.lanes * queue.depth * entry_vectors(program, a, q) * tiles.GROUP_THREADS * 16
    return found, max(ends)


def _operands(program: TileProgram, stages: tuple[Fitted, ...]) -> Operands:
    body = [i for s in program.stages for i in walk(s.body)]
    loads = [(i["array"], program.values[i.outputs[0]].tile) for i in body if i.kind == "load"]
    read = {k for k, tile in loads if tile or program.inputs[k].streamed}
    cut = {i["array"] for i in body if i.kind == "load_slice" and program.values[i.outputs[0]].tile}
    weights = tuple(r for stage in stages for r in stage.lowered.weights)
    counts = [len(stage.lowered.weights) for stage in stages]
    first = tuple(sum(counts[:s]) for s in range(len(stages)))
    groups = tuple(dict.fromkeys(r.shape.dtype for r in weights))
    within = [[k for k, r in enumerate(weights) if r.shape.dtype == d] for d in groups]
    order: list[list[tuple[int, int]]] = [[] for _ in groups]
    resident_at: dict[int, tuple[int, int]] = {}
    at = [0] * len(groups)
    for stage, base in zip(stages, first, strict=True):
        parts = [(base + i.weight, i.chunk) for i in stage.packed]  # as they are used, so that the loader has but to go on
        if stage.resident:
            parts = [(w, -1) for w in sorted({w for w, _ in parts})]
        for w, chunk in parts:
            g = groups.index(weights[w].shape.dtype)
            order[g].append((within[g].index(w), chunk))
            if chunk < 0:
                resident_at[w] = (g, at[g])
                at[g] += weights[w].shape.bytes
    vectors, vector_at = _vectors(stages)
    inputs = tuple(sorted(read.union(cut, () if program.order is None else (program.order,))))
    tables = tuple(dict.fromkeys(v for stage in stages for v in stage.lowered.tables))
    return Operands(inputs, weights, first, groups, tuple(map(tuple, order)), resident_at, vectors, vector_at, tables)


def _vectors(stages: tuple[Fitted, ...]) -> tuple[tuple[VectorRecipe, ...], tuple[tuple[int, ...], ...]]:
    """The stationary vectors, one after the other; one that several stages read is there once."""
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
    at, sinks, groups, gradients, rings, partials, slots = 0, *(dict[int, int]() for _ in range(6))
    pipelines, workers = a.instances(program) * a.lanes, a.instances(program) * a.tiles_at_once
    for s, stage in enumerate(stages):
        if sinks_of(stage) or segments_of(stage):
            sinks[s] = at
            at += _COUNTER_BYTES
        for start in segments_of(stage):
            if start.rows:
                groups[start.ref.of] = at
                at += -(-workers // tiles.FAN_IN) * _COUNTER_BYTES
    for s, stage in enumerate(stages):
        if gradients_of(stage):
            gradients[s] = at
            at += a.split[s] * a.lanes * _COUNTER_BYTES
    l2 = [q for q in range(len(program.queues)) if a.places[q] == "l2"]
    for q in l2:
        rings[q] = at
        at += pipelines * 2 * program.queues[q].depth * _COUNTER_BYTES
    zero_bytes = at
    for stage in stages:
        for sink in sinks_of(stage):
            partials[sink.ref.of] = at
            at += tiles.aligned(workers * 4 * (sink.width or 1) * 4, 128)
        for start in segments_of(stage):
            partials[start.ref.of] = at
            at += tiles.aligned(workers * start.partial_words * 4, 128)
    for s, stage in enumerate(stages):
        parts = a.split[s] * a.gradient_parts(program)
        for gradient in gradients_of(stage):
            partials[gradient.gradient.of] = at
            at += parts * gradient.shape.words * 4
            for total in sums_of(stage, gradient):
                partials[total.sums.of] = at
                at += tiles.aligned(parts * total.panel.width * 4, 128)
    for q in l2:
        slots[q] = at
        at += pipelines * program.queues[q].depth * entry_vectors(program, a, q) * tiles.GROUP_THREADS * 16
    return Workspace(
        sinks, groups, gradients, rings, zero_bytes, partials, slots, max(at, _COUNTER_BYTES)
    )  # never empty: emit.py says why
