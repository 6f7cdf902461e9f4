"""What a CTA keeps where: registers and shared memory that a stage needs on a GPU.

Comes in: a ``RegionCost`` and the ops of a stage. Goes out: ``Storage`` for one lane, and the bytes of packed weights and rings.
Invariant: the need is never overstated, because a target checks exactly what it generates: a stage that has no ``Storage`` here
fits no kernel.

One warpgroup (a lane) works on a tile of 64 rows, the M of wgmma, in **steps**: one per matmul and per reduction of a row.
Elementwise ops run in the step that makes their last operand, column block by column block, so only values that a later step reads
are **kept**: in registers (the accumulator layout, 16-bit values two to a register), or, where these are too few, as an image in
shared memory. Values at the border of a stage cost nothing: they lie in memory or in a ring, and are read from there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

from kitsune_jax.planning.balance import Infeasible
from kitsune_jax.planning.cost import DotWork, RegionCost, itemsize, round_up
from kitsune_jax.planning.gpu_gradient import gradient_shapes, panel_bytes, panel_sums, useful_gradient_split
from kitsune_jax.planning.machines import KIB

TILE_ROWS = 64
CHUNK_ROW = 128  # bytes of K that one column of packed weights has in a chunk: the swizzle's width
CHUNK_COLUMNS = 128
CHUNK_BYTES = CHUNK_ROW * CHUNK_COLUMNS
# Addresses, loop counters and temporaries of a consumer thread: what the compiled kernels use beside accumulators and fragments.
_WORKING_REGISTERS = 24
_ELEMENTWISE_COLUMNS = 32  # what an elementwise loop has in flight: four 16-byte rows of 16-bit values
# Barriers and the alignment of the first swizzled chunk (1024 bytes).
_RESERVED_BYTES = 2 * KIB
# The fewest chunks under way: at 24 bytes a cycle of L2 bandwidth per SM, less than one hides 263 cycles of latency; two more keep
# both ends of the ring at work. A target takes what shared memory is left.
RING_CHUNKS = 3
_BEAM = 64  # placements that are followed at once; a chain of layers has four
_CHOICES = 6  # values of one step, the largest, that may become images
_ANCHORS = frozenset({"dot", "reduce", "argreduce", "cumulative"})
_REDUCTIONS = frozenset({"reduce", "argreduce"})
_VIEWS = frozenset({"broadcast", "reshape"})
_MATMUL_DTYPES = frozenset({"bfloat16", "float16", "float32"})


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


def padded(columns: int) -> int:
    """The width of a value in registers and of a weight's columns: 8, 16 or a multiple of 32.

    >>> [padded(n) for n in (1, 9, 17, 63, 256)]
    [8, 16, 32, 64, 256]
    """
    return 8 if columns <= 8 else 16 if columns <= 16 else round_up(columns, 32)


def slab(columns: int, split: int) -> int:
    """Columns of each of ``split`` slabs.

    >>> slab(1408, 22), slab(100, 1)
    (64, 100)
    """
    return columns if split == 1 else columns // split


def useful_split(columns: int, split: int) -> int:
    """The most slabs, all of the same number of whole blocks of 32 columns, that ``split`` CTAs can share.

    >>> useful_split(1408, 25), useful_split(256, 3), useful_split(100, 4)
    (22, 2, 1)
    """
    blocks = columns // 32 if columns % 32 == 0 else 1
    return max(s for s in range(1, min(split, blocks) + 1) if blocks % s == 0)


def dots_of(cost: RegionCost, ops: Iterable[int]) -> list[DotWork]:
    """Matmuls with stationary weights."""
    return [dot for i in ops if i not in cost.sinks and (dot := cost.work(i).dot) is not None]


def gradients_of(cost: RegionCost, ops: Iterable[int]) -> list[DotWork]:
    """Weight gradients: matmuls that contract the rows, of operands with ``m`` and ``n`` columns."""
    return [dot for i in ops if i in cost.sinks and (dot := cost.work(i).dot) is not None]


def packed_bytes(cost: RegionCost, ops: Iterable[int], split: int = 1) -> int:
    """Weights in 128-byte rows of K: a CTA's share of what the matmuls of ``ops`` read."""
    return sum(round_up(dot.k * itemsize(dot.dtype), CHUNK_ROW) * padded(slab(dot.n, split)) for dot in dots_of(cost, ops))


def vector_bytes(cost: RegionCost, ops: Iterable[int]) -> int:
    """Biases, gains and the like: stationary operands of other ops than matmuls."""
    return sum(cost.bytes(v) for v in cost.stationary_inputs(i for i in ops if cost.work(i).dot is None))


def entry_bytes(cost: RegionCost, v: int) -> int:
    """One tile of ``v`` in a ring: a 16-byte vector for each of 128 threads at least. A mask has one bit for each element."""
    return round_up(_image_bytes(cost.graph.values[v].dtype, cost.row_size(v)), 128 * 16)


def _image_bytes(dtype: str, columns: int) -> int:
    elements = TILE_ROWS * padded(columns)
    return elements // 8 if dtype == "bool" else elements * itemsize(dtype)


def shared_bytes(cost: RegionCost, ops: Sequence[int], storage: Storage, lanes: int, weights: int, rings: int) -> int:
    """Shared memory of a CTA: ``weights`` (or the ring they are streamed through), and for every lane its images and ``rings``."""
    return weights + vector_bytes(cost, ops) + lanes * (storage.image_bytes + rings) + _RESERVED_BYTES


def check_ops(cost: RegionCost) -> None:
    """Raise ``Infeasible`` for what no GPU kernel is generated for."""
    if len(set(cost.phase.values())) > 1:
        raise Infeasible("the CUDA target runs regions of one phase; this one needs a barrier over the whole stream")
    for i in cost.region.ops:
        dot, op = cost.work(i).dot, cost.graph.ops[i]
        if dot is None:
            continue
        if i in cost.sinks:
            if dot.batch * dot.k != 1:
                raise Infeasible("the CUDA target has no code for a weight gradient of several matrices")
        elif dot.batch * dot.m != 1:
            raise Infeasible(f"the CUDA target has no code for {dot.batch * dot.m} matrix rows per row of the stream")
        if dot.dtype not in _MATMUL_DTYPES:
            raise Infeasible(f"the CUDA target has no code for a matmul of {dot.dtype}")
        if dot.dtype == "float32" and dict(op.params).get("precision") == "HIGHEST":
            raise Infeasible("the CUDA target multiplies float32 as tf32; the function asks for precision HIGHEST")


def most_split(cost: RegionCost, ops: Sequence[int], split: int) -> int:
    """The most CTAs, ``split`` at most, that can share ``ops``."""
    if split == 1 or not is_splittable(cost, ops):
        return 1
    gradients = gradients_of(cost, ops)
    if gradients:
        return useful_gradient_split(gradients[0].m, gradients[0].n, split)
    return useful_split(dots_of(cost, ops)[0].n, split)


def is_splittable(cost: RegionCost, ops: Sequence[int]) -> bool:
    """One matmul and elementwise ops: each CTA of a stage can make its own columns of the results, or of a weight gradient."""
    sums = panel_sums(cost, ops)
    anchors = [i for i in ops if cost.family(i) in _ANCHORS and i not in sums]
    others = [i for i in ops if i not in sums and i not in anchors]
    if len(anchors) != 1 or cost.work(anchors[0]).dot is None or any(i in cost.sinks for i in others):
        return False
    if anchors[0] in cost.sinks:
        return _separate_operands(cost, others, anchors[0])
    columns = cost.row_size(cost.graph.ops[anchors[0]].outputs[0])
    after = _after(cost, ops, anchors[0])
    elementwise = all(cost.family(i) in ("pointwise", "convert", "broadcast") for i in ops if i != anchors[0])
    return elementwise and all(cost.row_size(v) in (1, columns) for i in after for v in cost.graph.ops[i].outputs)


def _separate_operands(cost: RegionCost, ops: Sequence[int], gradient: int) -> bool:
    """Whether the operands of a weight gradient meet nowhere in the stage: only those of one of them are shared out."""
    if any(cost.family(i) not in ("pointwise", "convert", "broadcast") for i in ops if i != gradient):
        return False
    reach = []
    for v in cost.graph.ops[gradient].inputs:
        seen: set[int] = set()
        todo = [v]
        while todo:
            v = todo.pop()
            if v in seen or not cost.streamed(v) or cost.row_size(v) == 1:
                continue
            seen.add(v)
            touching = [i for i in ops if i != gradient and v in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)]
            todo += [u for i in touching for u in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)]
        reach.append(seen)
    return not reach[0] & reach[1]


def _after(cost: RegionCost, ops: Sequence[int], first: int) -> list[int]:
    """Ops that depend on ``first``, itself included."""
    made = set(cost.graph.ops[first].outputs)
    after = [first]
    for i in ops:
        if made.intersection(cost.graph.ops[i].inputs):
            made.update(cost.graph.ops[i].outputs)
            after.append(i)
    return after


class Steps:
    """The steps of a stage and what is kept between them. ``storage(registers, lanes)`` places it, cheapest in shared memory
    first."""

    def __init__(self, cost: RegionCost, ops: Sequence[int], split: int = 1):
        self.cost, self.ops, self.split = cost, tuple(ops), split
        self.producer = {v: i for i in ops for v in cost.graph.ops[i].outputs}
        self.step: dict[int, int] = {}
        self.steps = [_Step(_ELEMENTWISE_COLUMNS // 2)]
        for i in self.ops:
            self._place(i)
        self.kept = self._kept()
        panels = panel_sums(cost, ops)
        self.sums = sum(2 if i in panels else self._sum_registers(i) for i in ops if i in cost.sinks and cost.work(i).dot is None)
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
        columns = padded(slab(dot.n, self.split))
        chunks = -(-columns // CHUNK_COLUMNS)
        # A result of one chunk is rounded and packed where it was accumulated; of several, the earlier ones stand beside the last.
        self.steps.append(_Step(min(columns, CHUNK_COLUMNS) // 2, 1.0 - 1.0 / chunks))

    def root(self, v: int) -> int | None:
        """The value that is kept where ``v`` is needed later: before it was repeated or widened; None for one at the border."""
        cost = self.cost
        while v in self.producer:
            i = self.producer[v]
            if cost.is_maker(i):
                return None
            (x,) = cost.graph.ops[i].inputs[:1]
            widens = cost.family(i) == "convert" and cost.row_bytes(v) > cost.row_bytes(x)
            repeats = cost.family(i) in _VIEWS and cost.row_size(v) >= cost.row_size(x)
            cut = cost.family(i) == "slice" and self.root(x) is None
            if not (widens or repeats or cut):
                return v
            v = x
        return None

    def _kept(self) -> list[list[_Kept]]:
        """By step in which they are made."""
        reads: dict[int, dict[int, int]] = {}
        for i in self.ops:
            if self.cost.family(i) in _REDUCTIONS:
                continue  # summed up in the step that makes the operand
            for v in dict.fromkeys(self.cost.graph.ops[i].inputs):
                root = self.root(v) if self.cost.streamed(v) else None
                if root is not None and self.step[i] > self.step[self.producer[root]]:
                    dot = self.cost.work(i).dot
                    times = -(-padded(slab(dot.n, self.split)) // CHUNK_COLUMNS) if dot else 1
                    at = reads.setdefault(root, {})
                    at[self.step[i]] = max(at.get(self.step[i], 0), times)
        made: list[list[_Kept]] = [[] for _ in self.steps]
        for v, at in reads.items():
            born = self.step[self.producer[v]]
            columns = self.cost.row_size(v)
            if born:
                columns = slab(columns, self.split)
            image = _image_bytes(self.cost.graph.values[v].dtype, columns)
            registers = 2 if columns == 1 else -(-image // 512)  # 128 threads, 4 bytes each
            made[born].append(_Kept(v, born, max(at), registers, image, sum(at.values())))
        return [sorted(values, key=lambda k: (-k.image, k.value)) for values in made]

    def _sum_registers(self, i: int) -> int:
        """A thread has two of every eight columns: a quarter of a column vector in float32, or one sum of two words."""
        columns = sum(self.cost.graph.values[v].size for v in self.cost.graph.ops[i].outputs)
        return 2 if columns == 1 else padded(columns) // 4

    def _gradients(self, lanes: int) -> tuple[int, int, int] | None:
        """(registers of a thread, bytes of a lane's panels, bytes that are written and read per tile); None if one does not fit."""
        registers = panels = traffic = 0
        for dot in gradients_of(self.cost, self.ops):
            half = itemsize(dot.dtype) == 2
            shapes = gradient_shapes(dot.m, dot.n, half, self.split, lanes)
            if not shapes:
                return None
            rows, columns = (panel_bytes(padded(n), half) for n in (shapes[0].rows, shapes[0].columns))
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
        return best and Storage(best.image_bytes + gradients[1], best.image_traffic + gradients[2])

    def _placed(self, budget: int) -> Storage | None:
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
