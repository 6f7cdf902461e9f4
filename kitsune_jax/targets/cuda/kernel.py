"""The kernel around the stages: shared memory, roles, loader, sinks and launch geometry, as CUDA C++ text.

Comes in: a tile program, an ``Arrangement`` (what the plan asks for) and the bodies of its stages. Goes out: ``Kernel``: the
source, the launch words, and the recipes of its operands. Raises ``CannotLower`` where the arrangement does not fit the device.

Shared memory of a CTA: a header of barriers, then weights (resident images, or the ring they pass through), then each lane's
scratch (register images, rows that change places), then the slots of the queues that the CTA reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from kitsune_jax.program.ir import ArrayType, TileProgram, walk
from kitsune_jax.targets.cuda import arrays as border
from kitsune_jax.targets.cuda import pointwise, text, tiles
from kitsune_jax.targets.cuda.body import Body, StageConfig
from kitsune_jax.targets.cuda.columns import Vectors
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.runtime import LAUNCH_VERSION
from kitsune_jax.targets.cuda.values import GradientCode, queue_form
from kitsune_jax.targets.errors import CannotLower

_ALIGN = 1024  # of everything in shared memory: the swizzle's atom
_COUNTER_BYTES = 128
_MAX_DEPTH = 12  # chunks of 16 KiB: what hides an L2 round trip twice over
_MIN_DEPTH = 2
_STAGED_DEPTH = 6  # staged arrays leave a ring of weights as many chunks: what hides an L2 round trip
# (two chunks of a product in flight, columns of a chunk), best first. In flight together, one chunk's epilogue hides behind the
# other's product; narrow chunks need more barrier rounds, but from 64 columns on the tensor core's rate is that of wide ones.
_SHAPES = ((True, 128), (True, 64), (False, 128), (False, 64))
_NARROW_SHAPES = ((True, 64), (False, 64))
# Registers for values: setmaxnreg's share less addresses and temporaries (``pipeline.h``).
_VALUE_REGISTERS = {1: 208, 2: 200, 3: 112}
# Accumulators that live through the tile loop leave ptxas less room to order its work: so much less is asked of it where it can be.
_HELD_MARGIN = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """What a plan asks of the kernel.

    ``sm``: 900 (wgmma, bulk copies, clusters) or 800 (portable). ``lanes``: consumer warpgroups of a CTA. ``cluster``: CTAs of a
    cluster. ``replicas``: pipeline instances at most. ``resident`` and ``split`` per stage, ``places`` per queue ("cluster", "l2").
    """

    spatial: bool
    sm: int
    lanes: int
    cluster: int
    replicas: int
    resident: tuple[bool, ...]
    split: tuple[int, ...]
    places: tuple[str, ...]
    shared_bytes: int

    @property
    def ctas(self) -> int:
        """CTAs of one pipeline instance."""
        return sum(self.split) if self.spatial else self.cluster


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """``weights``: recipes of each image operand, and ``order``, how ``pack.weights`` lines them up; operands are the streamed
    ``inputs``, the images, the vectors."""

    source: str
    launch: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[tuple[WeightRecipe, ...], ...]
    order: tuple[tuple[tuple[int, int], ...], ...]
    vectors: tuple[VectorRecipe, ...]
    workspace_bytes: int
    registers: int  # estimate of what values need, at most

    @property
    def shared_bytes(self) -> int:
        return self.launch[5]


def generate(program: TileProgram, arrangement: Arrangement, name: str, share: bool = True) -> Kernel:
    """The kernel of ``program`` as ``arrangement`` asks. ``share``: equal stages run the same code. Raises ``CannotLower``."""
    used = {i.kind for stage in program.stages for i in walk(stage.body)}
    if without := sorted(used & {"dot", "gather", "loop", "load_slice", "store_slice", "sink_at"}):
        raise CannotLower(f"{' and '.join(without)} inside a kernel: no code for it yet")
    if program.batch_axes:
        raise CannotLower("tiles that keep within a batch have no kernel yet")
    if program.tile_rows != tiles.TILE_ROWS:
        raise CannotLower(f"tiles of {program.tile_rows} rows; the GPU's have {tiles.TILE_ROWS}")
    return _Generator(program, arrangement, name, share).run()


def _aligned(n: int, to: int = _ALIGN) -> int:
    return -(-n // to) * to


def image_bytes(body: Body, v: int) -> int:
    """Shared memory of a value's register image, for one lane."""
    value = body.value(v)
    return _aligned(tiles.image_vectors(value.width, value.form) * tiles.GROUP_THREADS * 16)


@dataclasses.dataclass(slots=True)
class _Stage:
    body: Body
    config: StageConfig
    first_rank: int
    first_weight: int
    scratch: int = 0  # bytes of one lane
    panels_at: int = 0  # of a lane's scratch: the operands of weight gradients
    staged_at: int = 0  # of a lane's scratch: tiles of staged arrays
    scratch_at: int = 0
    end: int = 0  # of the CTA's shared memory, queues apart

    def weights_used(self) -> list[int]:
        return sorted({f.weight for f in self.body.products.order})

    def config_offset(self, weight: int) -> int:
        """Where a resident image lies in shared memory."""
        return self.body.config.weight_offset[weight]


class _Generator:
    def __init__(self, program: TileProgram, arrangement: Arrangement, name: str, share: bool, staging: bool = True):
        self.program, self.a, self.name, self.share, self.staging = program, arrangement, name, share, staging
        self.vectors = Vectors()
        self.weights: list[WeightRecipe] = []
        self.stages: list[_Stage] = []
        self.queue_at: dict[int, int] = {}
        self.depth = 0

    @property
    def slab_queues(self) -> frozenset[int]:
        """Queues that a split stage writes or reads."""
        split = self.a.split
        queues = enumerate(self.program.queues)
        return frozenset(k for k, q in queues if any(split[s] > 1 for s in (q.producer, *q.consumers)))

    def run(self) -> Kernel:
        self.header_bytes = self._header_bytes()
        rank = 0
        for s in range(len(self.program.stages)):
            self.stages.append(self._stage(s, rank))
            rank += self.a.split[s] if self.a.spatial else 0
        shared = self._place_queues()
        if shared > self.a.shared_bytes and any(stage.config.staged for stage in self.stages):
            return _Generator(self.program, self.a, self.name, self.share, staging=False).run()
        if shared > self.a.shared_bytes:
            raise CannotLower(f"the kernel needs {shared} bytes of shared memory; a CTA has {self.a.shared_bytes}")
        self._layout_operands()
        self._layout_workspace()
        return Kernel(
            text.kernel(self),
            self._launch(shared),
            self.inputs,
            tuple(tuple(r for r in self.weights if r.shape.dtype == d) for d in self.groups),
            tuple(tuple(order) for order in self.order),
            tuple(self.vectors.recipes),
            self.workspace_bytes,
            max(s.body.budget.peak()[0] for s in self.stages),
        )

    # -- geometry

    @property
    def threads(self) -> int:
        return (1 + self.a.lanes) * tiles.GROUP_THREADS

    @property
    def instances(self) -> int:
        """Pipeline instances that have a tile."""
        per = self.a.lanes * (1 if self.a.spatial else self.a.cluster)
        return max(1, min(self.a.replicas, -(-self.program.tiles // per)))

    @property
    def grid(self) -> int:
        return self.instances * self.a.ctas

    @property
    def workers(self) -> int:
        """Warpgroups among which the tiles are dealt out."""
        return self.instances * self.a.lanes * (1 if self.a.spatial else self.a.cluster)

    @property
    def parts(self) -> int:
        """CTAs that have a partial sum of each weight gradient (or of each slab of it)."""
        return self.instances if self.a.spatial else self.grid

    @property
    def uniform(self) -> bool:
        """Every lane takes part in every round, with a tile or without: the ring of streamed weights waits for all of them, and the
        lanes of a CTA multiply weight gradients together."""
        return self.streamed or any(stage.body.gradients for stage in self.stages)

    @property
    def cooperative(self) -> bool:
        return "l2" in self.a.places

    @property
    def streamed(self) -> bool:
        return not all(self.a.resident)

    # -- stages

    def _stage(self, s: int, rank: int) -> _Stage:
        """Generates the body, with as many values in shared memory as the registers ask for."""
        first = len(self.weights)
        self.vectors_before = self.vectors
        config = StageConfig(
            resident=self.a.resident[s],
            split=self.a.split[s],
            lanes=self.a.lanes,
            depth=_MAX_DEPTH,
            slab_queues=self.slab_queues,
            staged=self._staged(s),
        )
        limit = _VALUE_REGISTERS[self.a.lanes]
        best: tuple[int, Body, StageConfig] | None = None
        copying = (True, False) if self.a.lanes < 3 else (False,)  # the registers of three lanes do not hold a copied operand
        for copies, (overlap, columns) in itertools.product(copying, self._shapes(s)):
            config = dataclasses.replace(config, overlap=overlap, columns=columns, copies=copies)
            body = self._emit(s, config, first)
            peak, _ = body.budget.peak()
            if best is None or peak < best[0]:
                best = peak, body, config
            if peak <= limit - (_HELD_MARGIN if body.budget.held >= _HELD_MARGIN else 0):
                break
        assert best is not None
        peak, body, config = best
        spill: list[int] = []
        while peak > limit or body.also_spill - set(spill):
            wide = [v for v in body.budget.peak()[1] if self._may_spill(body, v, spill)]
            more = sorted(body.also_spill - set(spill)) or wide[:1]
            if not more:
                raise CannotLower(f"a stage needs {peak} registers a thread for its values; there are {limit}")
            spill += more
            config = dataclasses.replace(config, spill=self._spill_offsets(body, spill))
            body = self._emit(s, config, first)
            config = dataclasses.replace(config, spill=self._spill_offsets(body, spill))  # now that they are images
            body = self._emit(s, config, first)
            peak, _ = body.budget.peak()
        if config is not best[2] or not spill:
            body = self._emit(s, config, first)
        stage = _Stage(body, config, rank, first)
        self._fit_memory(s, stage)
        return stage

    def _staged(self, s: int) -> frozenset[int]:
        """The arrays whose tiles stage ``s`` would read from shared memory."""
        loads = {i["array"] for i in self.program.stages[s].body if i.kind == "load"}
        return frozenset(k for k in loads if self.staging and border.is_staged(self.program, self.program.inputs[k]))

    def _shapes(self, s: int) -> tuple[tuple[bool, int], ...]:
        """Chunks to try. Beside two other lanes, or one and f32 operands, ptxas spills or serialises with chunks of 128 columns."""
        p = self.program
        single = any(p.values[i.inputs[0]].dtype == "float32" for i in p.stages[s].body if i.kind == "matmul")
        return _NARROW_SHAPES if self.a.lanes == 3 or (self.a.lanes == 2 and single) else _SHAPES

    def _may_spill(self, body: Body, v: int, spilled: Sequence[int]) -> bool:
        return v not in spilled and not body.value(v).row and body.value(v).width >= 32

    def _emit(self, s: int, config: StageConfig, first: int) -> Body:
        """A fresh body instead of that of an earlier attempt. Resident weights need their place before the text is made."""
        offsets: tuple[int, ...] = ()
        for _ in range(2):  # the first pass finds the weights, the second has their offsets
            del self.weights[first:]
            self.vectors = self.vectors_before.copy()
            body = Body(self.program, s, dataclasses.replace(config, weight_offset=offsets), self.weights, self.vectors)
            body.emit()
            if not config.resident:
                break
            at, found = self.header_bytes, []
            for recipe in self.weights[first:]:
                found.append(at)
                at += recipe.shape.slab_bytes
            offsets = (*[0] * first, *found)
        return body

    def _spill_offsets(self, body: Body, spill: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Offsets of images in a lane's scratch; those that are never alive together share memory."""
        placed: list[tuple[int, int, tuple[int, int]]] = []  # (offset, bytes, life)
        found = []
        for v in sorted(spill, key=body.budget.life):  # first come, first placed
            size, (first, last) = image_bytes(body, v), body.budget.life(v)
            taken = sorted((at, n) for at, n, (start, end) in placed if start <= last and first <= end)
            at = 0
            for start, n in taken:
                if at + size <= start:
                    break
                at = max(at, start + n)
            placed.append((at, size, (first, last)))
            found.append((v, at))
        return tuple(found)

    def _fit_memory(self, s: int, stage: _Stage) -> None:
        """Shared memory of the stage's CTA; streamed weights get the ring that is left."""
        body, config = stage.body, stage.config
        images = max((at + image_bytes(body, v) for v, at in config.spill), default=0)
        stage.panels_at = images + _aligned(tiles.TILE_ROWS * body.scratch_words * 4) if body.scratch_words else images
        stage.staged_at = stage.panels_at + _aligned(body.panel_bytes)
        staged = _aligned(sum(border.staged_bytes(self.program.inputs[k]) for k in config.staged))
        recipes = self.weights[stage.first_weight :]
        resident = sum(r.shape.slab_bytes for r in recipes)
        slot = max((r.shape.chunk_bytes(c) for r in recipes for c in r.shape.chunks), default=0)
        free = self.a.shared_bytes - self.header_bytes - self.a.lanes * stage.staged_at
        if staged and free - self.a.lanes * staged < (resident if config.resident else _STAGED_DEPTH * slot):
            config, staged = dataclasses.replace(config, staged=frozenset()), 0  # rows are read where they lie
            stage.config, stage.body = config, self._emit(s, config, stage.first_weight)
        stage.scratch = stage.staged_at + staged
        lanes = self.a.lanes * stage.scratch
        if config.resident:
            weights = resident
        else:
            depth = min(_MAX_DEPTH, (free - self.a.lanes * staged) // slot if slot else 0)
            if depth < _MIN_DEPTH:
                raise CannotLower(f"{lanes} bytes of tiles leave no room for a ring of weights in shared memory")
            if depth < config.depth:
                stage.config = dataclasses.replace(config, depth=depth)
                stage.body = self._emit(s, stage.config, stage.first_weight)
            self.depth, self.slot_bytes = depth, slot
            weights = depth * slot
        stage.scratch_at = self.header_bytes + weights
        stage.end = stage.scratch_at + lanes
        if stage.end > self.a.shared_bytes:
            raise CannotLower(
                f"a stage needs {weights} bytes for weights and {lanes} for tiles in shared memory; a CTA has {self.a.shared_bytes}"
            )

    def _header_bytes(self) -> int:
        staged = max((len(self._staged(s)) for s in range(len(self.program.stages))), default=0) * 16 * self.a.lanes
        rings = staged + 16 * _MAX_DEPTH + sum(16 * q.depth * self.a.lanes for q in self.program.queues)
        return _aligned(rings + 128)

    # -- queues

    def entry_vectors(self, q: int) -> int:
        tile = self.program.queues[q].tile
        n = math.prod(tile.shape)
        return 1 if n == 1 else tiles.image_vectors(tiles.padded(n), queue_form(tile.dtype, q in self.slab_queues))

    def _place_queues(self) -> int:
        """Slots of cluster queues behind what their readers hold already. Returns the shared memory of the greediest CTA."""
        ends = [stage.end for stage in self.stages]
        for q, queue in enumerate(self.program.queues):
            if self.a.places[q] != "cluster":
                continue
            if self.a.split[queue.producer] > 1 or any(self.a.split[c] > 1 for c in queue.consumers):
                raise CannotLower("a stage that is split by columns has queues in the L2 only")
            at = max(ends[c] for c in queue.consumers)
            self.queue_at[q] = at
            for c in queue.consumers:
                ends[c] = at + self.a.lanes * queue.depth * self.entry_vectors(q) * tiles.GROUP_THREADS * 16
        return max(ends)

    # -- global memory

    def _layout_operands(self) -> None:
        read = {i["array"] for s in self.program.stages for i in s.body if i.kind == "load"}
        self.inputs = tuple(k for k in sorted(read) if self.program.inputs[k].streamed)
        self.groups = tuple(dict.fromkeys(r.shape.dtype for r in self.weights))
        self.weight_at: dict[int, tuple[int, int]] = {}  # of a resident matrix: (operand, byte)
        self.order: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        at = [0] * len(self.groups)
        within = [[k for k, r in enumerate(self.weights) if r.shape.dtype == d] for d in self.groups]
        for stage in self.stages:
            if stage.config.resident:
                parts = [(w, -1) for w in stage.weights_used()]
            else:  # as they are consumed, so that the loader has but to go on
                parts = [(f.weight, f.chunk) for f in stage.body.products.order]
            for w, chunk in parts:
                shape = self.weights[w].shape
                g = self.groups.index(shape.dtype)
                self.order[g].append((within[g].index(w), chunk))
                if chunk < 0:
                    self.weight_at[w] = (g, at[g])
                    at[g] += shape.bytes

    def _layout_workspace(self) -> None:
        """Counters first, because they must be zero; then partial sums, then the slots of L2 queues."""
        at = 0
        self.counter_at: dict[int, int] = {}
        for s, stage in enumerate(self.stages):
            if stage.body.sinks:
                self.counter_at[s] = at
                at += _COUNTER_BYTES
        self.gradient_counter_at: dict[int, int] = {}
        for s, stage in enumerate(self.stages):
            if stage.body.gradients:
                self.gradient_counter_at[s] = at
                at += self.a.split[s] * self.a.lanes * _COUNTER_BYTES
        pipelines = self.instances * self.a.lanes
        self.ring_at: dict[int, int] = {}
        l2 = [q for q in range(len(self.program.queues)) if self.a.places[q] == "l2"]
        for q in l2:
            self.ring_at[q] = at
            at += pipelines * 2 * self.program.queues[q].depth * _COUNTER_BYTES
        self.zero_bytes = at
        self.partial_at: dict[int, int] = {}
        for stage in self.stages:
            for sink in stage.body.sinks:
                self.partial_at[sink.sink] = at
                at += _aligned(self.workers * 4 * sink.width * 4, 128)
        for s, stage in enumerate(self.stages):
            for gradient in stage.body.gradients:
                self.partial_at[gradient.sink] = at
                at += self.a.split[s] * self.parts * self.gradient_words(gradient) * 4
                for total in gradient.sums:
                    self.partial_at[total.sink] = at
                    at += _aligned(self.a.split[s] * self.parts * total.width * 4, 128)
        self.slots_at: dict[int, int] = {}
        for q in l2:
            self.slots_at[q] = at
            at += pipelines * self.program.queues[q].depth * self.entry_vectors(q) * tiles.GROUP_THREADS * 16
        self.workspace_bytes = max(at, _COUNTER_BYTES)  # never empty: emit.py says why

    def gradient_words(self, gradient: GradientCode) -> int:
        """Of one part of a slab."""
        return gradient.shape.words

    def _launch(self, shared: int) -> tuple[int, ...]:
        geometry = (self.a.sm, self.grid, self.threads, self.a.cluster, shared, int(self.cooperative), self.a.ctas)
        return LAUNCH_VERSION, *geometry, *self._counts(), *self._buffer_bytes()

    def _buffer_bytes(self) -> tuple[int, ...]:
        """Of operands and results, as the launch finds them."""

        def array(a: ArrayType) -> int:
            return math.prod(a.shape) * pointwise.ITEM_SIZE[a.dtype]

        sizes = [array(self.program.inputs[k]) for k in self.inputs]
        for g, dtype in enumerate(self.groups):
            shapes = [r.shape for r in self.weights if r.shape.dtype == dtype]
            sizes.append(sum(shapes[k].part_bytes(chunk) for k, chunk in self.order[g]))
        if self.vectors.recipes:
            sizes.append(4 * sum(r.words for r in self.vectors.recipes))
        sizes += [array(a) for a in self.program.outputs]
        return (*sizes, self.workspace_bytes) if self.workspace_bytes else tuple(sizes)

    def _counts(self) -> tuple[int, int, int]:
        operands = len(self.inputs) + len(self.groups) + bool(self.vectors.recipes)
        return operands, len(self.program.outputs) + 1, self.zero_bytes
