"""What a CTA keeps where: registers and shared memory that a stage needs on a GPU.

Comes in: a ``RegionCost`` and the ops of a stage. Goes out: ``Storage`` for one lane, and the bytes of packed weights and rings.
Invariant: the need is never overstated, because the code generator checks exactly what it generates: a stage that
has no ``Storage`` here fits no kernel.

This is an estimate of what code generation lays out, with its sizes (``targets.cuda.tiles``). The layout itself cannot be asked:
planning a deep network looks at hundreds of groups of ops, and each would be generated. Without the estimate 55 of 889 plans
changed, and a gradient of six layers took 126 seconds to plan instead of 4.

One warpgroup (a lane) works on a tile of 64 rows, the M of wgmma, in **steps**: one per matmul and per reduction of a row.
Elementwise ops run in the step that makes their last operand, column block by column block, so only values that a later step reads
are **kept**: in registers (the accumulator layout, 16-bit values two to a register), or, where these are too few, as an image in
shared memory. Values at the border of a stage cost nothing: they lie in memory or in a ring, and are read from there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from kitsune_jax.ops.indexing import may_differ
from kitsune_jax.ops.online import ONLINE
from kitsune_jax.planning.cost import RegionCost
from kitsune_jax.planning.machine import KIB
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.products import product_bytes, stacked_of
from kitsune_jax.targets.cuda.planning.sizes import form, gradients_of, slab, vector_bytes
from kitsune_jax.targets.cuda.planning.splits import panel_sums

# Addresses, loop counters and temporaries of a consumer thread: what the compiled kernels use beside accumulators and fragments.
_WORKING_REGISTERS = 24
_PRODUCT_REGISTERS = 56  # of a product for each row: sums, fragments, addresses (``row_products.py``)
_ELEMENTWISE_COLUMNS = 32  # what an elementwise loop has in flight: four 16-byte rows of 16-bit values
# Barriers and the alignment of the first swizzled chunk (1024 bytes).
_RESERVED_BYTES = 2 * KIB
_BEAM = 64  # placements that are followed at once; a chain of layers has four
_CHOICES = 6  # values of one step, the largest, that may become images
_ANCHORS = frozenset({"dot", "reduce", "argreduce", "cumulative"})
_REDUCTIONS = frozenset({"reduce", "argreduce"})
_VIEWS = frozenset({"broadcast", "reshape"})


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """``image_bytes``: most that images take at once, ``image_traffic``: bytes of images written and read per tile."""

    image_bytes: int
    image_traffic: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A value that steps after ``born`` read, up to ``last``; ``reads``: how often all of it is read."""

    value: int
    born: int
    last: int
    registers: int
    image: int
    reads: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """``working``: registers that its own accumulators take; ``done``: the part of its results that stands beside them at most,
    None where a result takes the place of what it was made from."""

    working: int
    done: float | None = None


def shared_bytes(cost: RegionCost, ops: Sequence[int], storage: Storage, lanes: int, weights: int, rings: int) -> int:
    """Shared memory of a CTA: ``weights`` (or the ring they are streamed through), and for every lane its images and ``rings``."""
    return weights + vector_bytes(cost, ops) + lanes * (storage.image_bytes + rings) + _RESERVED_BYTES


class Steps:
    """The steps of a stage and what is kept between them. ``storage(registers, lanes)`` places it, cheapest in shared memory
    first. ``slabs``: in a split stage, what is made in front of all products is shared out as well (a loop)."""

    def __init__(self, cost: RegionCost, ops: Sequence[int], split: int = 1, slabs: bool = False):
        self.cost, self.ops, self.split, self.slabs = cost, tuple(ops), split, slabs
        self.producer = {v: i for i in ops for v in cost.graph.ops[i].outputs}
        self.step: dict[int, int] = {}
        self.steps = [_Step(_ELEMENTWISE_COLUMNS // 2)]
        for i in self.ops:
            self._place(i)
        self.kept = self._kept()
        panels = panel_sums(cost, ops)
        self.sums = sum(2 if i in panels else self._sum_registers(i) for i in ops if i in cost.sinks and cost.work(i).dot is None)
        self.runs = max((self._segment_bytes(i) for i in ops if i in cost.sinks and cost.access(i) is not None), default=0)
        self.products = product_bytes(cost, ops)
        self.storage = functools.lru_cache(maxsize=None)(self._storage)

    def _place(self, i: int) -> None:
        cost, op = self.cost, self.cost.graph.ops[i]
        before = [self.step[self.producer[v]] for v in op.inputs if v in self.producer]
        if cost.family(i) not in _ANCHORS or i in cost.sinks:
            self.step[i] = max(before, default=0)
            return
        self.step[i] = len(self.steps)
        dot = cost.work(i).dot
        if dot is None:
            self.steps.append(self.steps[0])
            return
        if dot.per_row:
            self.steps.append(_Step(_PRODUCT_REGISTERS, 1.0))
            return
        columns = tiles.padded(slab(dot.n, self.split))
        chunks = -(-columns // tiles.CHUNK_COLUMNS)
        # A result of one chunk is rounded and packed where it was accumulated; of several, the earlier ones stand beside the last.
        self.steps.append(_Step(min(columns, tiles.CHUNK_COLUMNS) // 2, 1.0 - 1.0 / chunks))

    def root(self, v: int) -> int | None:
        """The value that is kept where ``v`` is needed later: before it was repeated or widened; None for one at the border."""
        cost = self.cost
        while v in self.producer:
            i = self.producer[v]
            if cost.is_maker(i):
                return None
            if cost.looks_up(i):
                return None
            (x,) = cost.graph.ops[i].inputs[:1]
            widens = cost.family(i) == "convert" and cost.row_bytes(v) > cost.row_bytes(x)
            repeats = cost.family(i) in _VIEWS and cost.row_size(v) >= cost.row_size(x)
            cut = cost.family(i) == "slice" and self.root(x) is None
            if not (widens or repeats or cut):
                return v
            v = x
        return None

    def _parts(self, v: int, stacked: frozenset[int]) -> list[int]:
        """What the operand of a product for each row is put together of."""
        i = self.producer.get(v, -1)
        return [p for x in self.cost.graph.ops[i].inputs for p in self._parts(x, stacked)] if i in stacked else [v]

    def _kept(self) -> list[list[_Kept]]:
        """By step in which they are made."""
        reads: dict[int, dict[int, int]] = {}
        stacked = stacked_of(self.cost, self.ops)
        for i in self.ops:
            if self.cost.family(i) in _REDUCTIONS or i in stacked:
                continue  # summed up in the step that makes the operand; or part by part in that of a product for each row
            for v in dict.fromkeys(p for x in self.cost.graph.ops[i].inputs for p in self._parts(x, stacked)):
                root = self.root(v) if self.cost.streamed(v) else None
                if root is not None and self.step[i] > self.step[self.producer[root]]:
                    dot = self.cost.work(i).dot
                    times = -(-tiles.padded(slab(dot.n, self.split)) // tiles.CHUNK_COLUMNS) if dot else 1
                    at = reads.setdefault(root, {})
                    at[self.step[i]] = max(at.get(self.step[i], 0), times)
        made: list[list[_Kept]] = [[] for _ in self.steps]
        for v, at in reads.items():
            born = self.step[self.producer[v]]
            columns = self.cost.row_size(v)
            if born or self.slabs:
                columns = slab(columns, self.split)
            width, how = tiles.padded(columns), form(self.cost.graph.values[v].dtype)
            image = tiles.image_bytes(width, how)
            registers = 2 if columns == 1 else tiles.registers(width, how)
            made[born].append(_Kept(v, born, max(at), registers, image, sum(at.values())))
        return [sorted(values, key=lambda k: (-k.image, k.value)) for values in made]

    def _sum_registers(self, i: int) -> int:
        """A thread has two of every eight columns: a quarter of a column vector in float32, or one sum of two words."""
        if self.cost.access(i) is not None:
            return 1  # of the segment that is open
        columns = sum(self.cost.graph.values[v].size for v in self.cost.graph.ops[i].outputs)
        return 2 if columns == 1 else tiles.padded(columns) // 4

    def _segment_bytes(self, i: int) -> int:
        """Shared memory of a lane for a sink by indices: the block that is folded, and the runs of a tile, or the lane's table."""
        width, access = tiles.padded(self.cost.elements(i)), self.cost.access(i)
        block = tiles.TILE_ROWS * 4 * (tiles.block(width) | 1)
        if isinstance(self.cost, GpuCost) and i in self.cost.unordered:
            return 0 if may_differ(self.cost.graph.ops[i]) else block  # the L2 folds
        if access is not None and not access.near:
            return block + tiles.table_bytes(self.cost.graph.ops[i]["n"], width)
        op = self.cost.graph.ops[i]
        tops = tiles.tops_bytes(self.cost.row_size(op.inputs[2])) if op.kind in ONLINE else 0
        return block + tiles.segment_bytes(width) + tops

    def _gradients(self, lanes: int) -> tuple[int, int, int] | None:
        """(registers of a thread, bytes of a lane's panels, bytes that are written and read per tile); None if one does not fit."""
        registers = panels = traffic = 0
        for dot in gradients_of(self.cost, self.ops):
            half = tiles.is_half(dot.dtype)
            shapes = tiles.gradient_shapes(dot.m, dot.n, half, self.split, lanes)
            if not shapes:
                return None
            rows, columns = (tiles.panel_bytes(tiles.padded(n), half) for n in (shapes[0].rows, shapes[0].columns))
            registers += shapes[0].registers
            panels = max(panels, rows + columns)  # gradients take turns
            traffic += 2 * rows + columns * (1 + shapes[0].all_blocks)
        return registers, panels, traffic

    def _storage(self, registers: int, lanes: int) -> Storage | None:
        """Place every kept value for ``lanes`` of threads of ``registers``: least shared memory first, then least traffic. None if
        none fits."""
        gradients = self._gradients(lanes)
        if gradients is None:
            return None
        best = self._placed(registers - _WORKING_REGISTERS - self.sums - gradients[0])
        shared = best.image_bytes + gradients[1] + self.runs + self.products if best else 0
        return best and Storage(shared, best.image_traffic + gradients[2])

    def _placed(self, budget: int) -> Storage | None:
        """The placements that need least shared memory are followed side by side: to choose the value that makes just room enough,
        step by step, changed 33 of 1600 plans and cost an A100 its pipeline of NeRF."""
        beam: dict[tuple[tuple[_Kept, bool], ...], Storage] = {(): Storage(0, 0)}
        for t, step in enumerate(self.steps):
            following: dict[tuple[tuple[_Kept, bool], ...], Storage] = {}
            for live, so_far in beam.items():
                for places in self._places(t):
                    born = tuple(zip(self.kept[t], places, strict=True))
                    if not self._fits(step, live, born, t, budget):
                        continue
                    images = sum(k.image for k, image in (*live, *born) if image)
                    traffic = sum(k.image * (1 + k.reads) for k, image in born if image)
                    after = tuple((k, image) for k, image in (*live, *born) if k.last > t)
                    found = Storage(max(so_far.image_bytes, images), so_far.image_traffic + traffic)
                    if after not in following or _rank(found) < _rank(following[after]):
                        following[after] = found
            beam = dict(sorted(following.items(), key=lambda item: _rank(item[1]))[:_BEAM])
        return min(beam.values(), key=_rank, default=None)

    def _places(self, t: int) -> list[tuple[bool, ...]]:
        """Which values of step ``t`` become images."""
        small = (False,) * max(0, len(self.kept[t]) - _CHOICES)
        return [(*large, *small) for large in itertools.product((False, True), repeat=len(self.kept[t]) - len(small))]

    def _fits(
        self, step: _Step, live: Sequence[tuple[_Kept, bool]], born: Sequence[tuple[_Kept, bool]], t: int, budget: int
    ) -> bool:
        held = sum(k.registers for k, image in live if not image)
        made = sum(k.registers for k, image in born if not image)
        after = sum(k.registers for k, image in (*live, *born) if not image and k.last > t)
        if step.done is None:
            return max(held, after) + step.working <= budget
        return max(held + step.working + made * step.done, after) <= budget


def _rank(s: Storage) -> tuple[int, int]:
    return s.image_bytes, s.image_traffic
