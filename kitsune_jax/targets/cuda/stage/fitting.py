"""Fitting a stage into the registers of a thread and the shared memory of a CTA.

Comes in: a stage and its ``Arrangement``. Goes out: ``Fitted``: the nodes of the stage, and the sizes of the memory it uses. For
the planner, which has no nodes yet: ``Placements`` of the values that it expects, and the ``Storage`` of the best one.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.ir import Node, Ref
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.stage import chunks, split
from kitsune_jax.targets.cuda.stage import loops as bodies
from kitsune_jax.targets.cuda.stage.builder import Shape, StageCodeBuilder
from kitsune_jax.targets.cuda.stage.facts import Facts, kept_rows

# --- Liveness: registers that the values of a stage need --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """``held``: registers that are alive for the whole kernel, the accumulators of sinks; ``peak``: the most alive at once,
    including these; ``alive``: values that are kept at that moment, largest first; ``lives``: first and last moment of each
    owner."""

    held: int
    peak: int
    alive: tuple[int, ...]
    lives: dict[Ref, tuple[int, int]]
    end: int

    def life(self, v: int) -> tuple[int, int]:
        """First and last moment of value ``v``; a value that is not kept yet could be alive at any time."""
        return self.lives.get(Ref("v", v), (0, self.end))


@dataclasses.dataclass(slots=True)
class _Span:
    owner: Ref
    registers: int
    first: int
    last: int


def liveness_of(setup: Iterable[Node], nodes: Iterable[Node]) -> Liveness:
    """The liveness of values that nodes keep and of accumulators in flight; addresses and temporaries are not counted."""
    held, spans, of = sum(node.held for node in setup), list[_Span](), dict[Ref, list[_Span]]()
    moment = 0
    for moment, (owner, registers) in enumerate((event for node in nodes for event in node.events()), 1):
        if registers is None:
            for span in of.get(owner, ()):
                span.last = moment
        else:
            spans.append(_Span(owner, registers, moment, moment))
            of.setdefault(owner, []).append(spans[-1])
    change = [0] * (moment + 2)
    for s in spans:
        change[s.first] += s.registers
        change[s.last + 1] -= s.registers
    peak, at = held, 0
    for now, total in enumerate(itertools.accumulate(change, initial=held), -1):
        if total > peak:
            peak, at = total, now
    alive: dict[int, int] = {}
    for s in spans:
        if s.first <= at <= s.last and s.registers and s.owner.kind in ("v", "h"):
            alive[s.owner.of] = alive.get(s.owner.of, 0) + s.registers
    lives = {owner: (min(s.first for s in mine), max(s.last for s in mine)) for owner, mine in of.items()}
    return Liveness(held, peak, tuple(sorted(alive, key=lambda v: (-alive[v], v))), lives, moment)


# --- The least depth of the ring of streamed weights ------------------------------------------------------------------------------


def least_ring_depth(nodes: Iterable[Node]) -> int:
    """Chunks that a ring needs so that lanes do not wait forever; 0 where no weights are streamed.

    A slot is loaded again when every lane of the CTA has released its chunk. So the ring must hold the chunks that a lane holds at
    once for the products that it has in flight; and, in ping-pong, those of a lane's turn, because the other lanes release none of
    them before their own turns.
    """
    events = list(_product_events(nodes))
    return max(_chunks_in_flight(events), _chunks_in_turn(events))


def _product_events(nodes: Iterable[Node]) -> Iterator[Node]:
    """Products, waits and turns in the order of the code; loops twice, because an iteration starts with products of the one
    before."""
    for node in nodes:
        if isinstance(node, st.CountedLoop | st.LayerLoop):
            body = list(_product_events(node.body))
            first, last = (node.first, node.last) if isinstance(node, st.CountedLoop) else ((), ())
            yield from (*_product_events(first), *body, *body, *_product_events(last))
        elif isinstance(node, st.Complete | st.Turn) or (isinstance(node, st.Issue) and node.weights is None):
            yield node


def _chunks_in_flight(events: Sequence[Node]) -> int:
    """The most chunks of the products that a lane has in flight."""
    most, flying = 0, dict[object, int]()
    for node in events:
        if isinstance(node, st.Issue):
            held, left = _rolling_chunks(node) if node.rolling else (node.k_chunks, node.k_chunks)
            most = max(most, sum(flying.values()) + held)
            flying[node.ref] = left
        elif isinstance(node, st.Complete):
            flying.pop(node.ref, None)
    return most


def _rolling_chunks(issue: st.Issue) -> tuple[int, int]:
    """(most chunks that a rolling product holds, chunks that it holds at its end) (``feed_rolling``, ``step_fetched``)."""
    per, held, end, released = 2 if tiles.is_half(issue.dtype) else 1, 0, 0, 0
    for operand, first, done in issue.feeds:
        blocks = tiles.blocks(operand.width)
        for start in range(0, blocks, chunks.ROLLING_GROUP):
            end, released = first + min(start + chunks.ROLLING_GROUP, blocks), done // per
            held = max(held, -(-end // per) - released)
            done = end if operand.fetched else first + start
            released = done // per
    return held, -(-end // per) - released


def _chunks_in_turn(events: Sequence[Node]) -> int:
    """The most chunks that a lane multiplies with during its turn."""
    most = own = 0
    has_turn = False
    for node in events:
        if isinstance(node, st.Turn):
            has_turn, own = node.what == "take", 0
        elif isinstance(node, st.Issue) and has_turn:
            own += node.k_chunks
            most = max(most, own)
    return most


# --- Fitting ----------------------------------------------------------------------------------------------------------------------

MAX_DEPTH = 12  # chunks of 16 KiB: they hide an L2 round trip twice over
# Chunks of 8 KiB where lanes keep rows that they multiply with: those of two products and more, so that one lane may be at its next
# product while the other computes with the results of the last one.
_KEPT_DEPTH = 20
_MIN_DEPTH = 2
STAGED_DEPTH = 6  # chunks of a ring of weights that staged arrays must leave room for: they hide an L2 round trip
# (two chunks of a product in flight, columns of a chunk), best first. With two in flight, one chunk's epilogue runs during the
# other's product; narrow chunks need more barrier rounds, but from 64 columns on the tensor cores are as fast as with wide ones.
_SHAPES = ((True, 128), (True, 64), (False, 128), (False, 64))
_NARROW_SHAPES = ((True, 64), (False, 64))
# Registers for values by lanes: setmaxnreg's share less addresses and temporaries (``pipeline.h``).
_VALUE_REGISTERS = {1: 208, 2: 200, 3: 112}
# Registers to leave free, if possible, beside accumulators that live through the tile loop, so that ptxas can order its work.
_HELD_MARGIN = 16
# Registers to leave free where products are added to two carries or more (gradients by keys and values), which live beside other
# products in flight. Values that the loop only reads then become images, as far as there is room, and ptxas spills little or
# nothing. With three lanes there is no choice.
_SUMS_MARGINS = (56, 40, 24, 0)
# The same with three lanes whose loop carries other values (a recurrence). An image of 16 registers moves 64 bytes of a thread in a
# step; without it ptxas spills 200 more in an LSTM of 64.
_CARRIED_MARGINS = (16, 0)
# The same beside many sums over the rows: they live through the tile loop, and in the middle of an epilogue a sum has 8 numbers of
# a thread more. NVRTC spills 17 registers in the backward pass of NeRF, and 104 without a margin.
_SPREAD_MARGINS = (56, 24, 0)
# Most registers of a value that returns from an image to registers: with one of 128, the size of float32 tiles of 256 columns,
# ptxas spills although the estimate fits.
_MOST_RETURNED = 64
_SMALLEST_IMAGE = 32  # columns of a value that may become an image


def value_registers(lanes: int) -> int:
    """Registers for the values of a loop over blocks of keys."""
    return _VALUE_REGISTERS[lanes] - (_CARRIED_MARGINS[0] if lanes == 3 else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """The registers that the values of a stage need. ``must_be_images``: values that a loop over layers or a product for each row
    writes to images."""

    must_be_images: frozenset[int]
    values: dict[int, st.StageValue]
    liveness: Liveness

    def image_bytes(self, v: int) -> int:
        value = self.values[v]
        return tiles.aligned(tiles.image_bytes(value.width, value.form))

    def may_be_image(self, v: int) -> bool:
        return not self.values[v].row and self.values[v].width >= _SMALLEST_IMAGE


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered(Needs):
    """A stage as nodes."""

    setup: tuple[Node, ...]
    prologue: tuple[Node, ...]
    nodes: tuple[Node, ...]
    weights: tuple[WeightRecipe, ...]
    vectors: tuple[tuple[VectorRecipe, ...], ...]
    tables: tuple[int, ...]
    scratch_words: int
    addresses: int
    product_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LaneMemory:
    """Offsets in a lane's part of shared memory: ``images``, then scratch rows, runs of segments, panels of weight gradients, tiles
    of staged arrays, addresses and operands of products for each row, entries of exchanges. ``bytes``: all of it."""

    images: dict[int, int]
    rows: int
    segments: int
    panels: int
    staged: int
    products: int
    exchanges: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """``depth``: chunks in the ring of streamed weights, of ``slot`` bytes. ``weight_bytes``: of the CTA's weights."""

    lowered: Lowered
    shape: Shape
    resident: bool
    memory: LaneMemory
    depth: int
    slot: int
    weight_bytes: int

    @property
    def fetches(self) -> list[st.Issue]:
        """Chunks of weights in the order of their use, in which the loader brings them."""
        return [issue for _, issue in _issues(self.lowered.nodes)]

    @property
    def loops(self) -> list[tuple[st.CountedLoop | None, tuple[st.Issue, ...]]]:
        """The same, grouped by the loop around them (None: no loop)."""
        runs = itertools.groupby(_issues(self.lowered.nodes), key=lambda found: found[0])
        return [(loop, tuple(issue for _, issue in run)) for loop, run in runs]

    @property
    def packed(self) -> list[st.Issue]:
        """Chunks of weights in the order of memory, where equal blocks of several loops are stored once."""
        known, found = set[tuple[object, ...]](), list[st.Issue]()
        for loop, issues in self.loops:
            if loop is not None:
                blocks = self.blocks_of(issues)
                if blocks in known:
                    continue
                known.add(blocks)
            found += issues
        return found

    def blocks_of(self, issues: Sequence[st.Issue]) -> tuple[object, ...]:
        """A key of the blocks that ``issues`` of a loop multiply with, equal for loops that share them."""
        found = []
        for i in issues:
            r = self.lowered.weights[i.weight]
            found.append((dataclasses.replace(r, value=-1, slices=r.slices and dataclasses.replace(r.slices, loop=-1)), i.chunk))
        return tuple(found)


class StageFit:
    """Fits stage ``s`` of the first of ``programs``, which are equivalent, or of a later one that needs less memory for images,
    because it computes values again instead of keeping them. A stage is fitted into several amounts of memory: what it needs in a
    shape is worked out once. ``boxed``: the inputs that products read in boxes."""

    def __init__(self, programs: Sequence[TileProgram], s: int, a: Arrangement, boxed: frozenset[int] = frozenset()):
        self.programs, self.s, self.a, self.boxed = programs, s, a, boxed
        self._fitters: list[_Fitter] = []  # of the first programs

    def fit(self, header_bytes: int, staging: bool) -> Fitted:
        """The fit behind ``header_bytes`` of shared memory. ``staging``: arrays may be copied through shared memory. Raises
        ``CannotLower``."""
        best, why = None, None
        for k, program in enumerate(self.programs):
            if k == len(self._fitters):
                self._fitters.append(_fitter(program, self.s, self.a, self.boxed))
            staged = staged_arrays(program, self.s) if staging else frozenset[int]()
            try:
                found = self._fitters[k].fitted(staged, self.a.shared_bytes - header_bytes)
            except CannotLower as no:
                why = why or no
                continue
            if best is None or found.memory.bytes < best.memory.bytes:
                best = found
            if not best.shape.images or program.stages[self.s] == self.programs[-1].stages[self.s]:
                break
        if best is None:
            assert why is not None
            raise why
        return best


_Fitters = dict[tuple[TileProgram, int, Arrangement, frozenset[int]], "_Fitter"]
_known: contextvars.ContextVar[_Fitters | None] = contextvars.ContextVar("fitters", default=None)


@contextlib.contextmanager
def shared_fits() -> Iterator[None]:
    """Inside, what equal stages need is worked out once: parts of calls are laid out again for each call that they may join."""
    before = _known.set({})
    try:
        yield
    finally:
        _known.reset(before)


def _fitter(program: TileProgram, s: int, a: Arrangement, boxed: frozenset[int]) -> _Fitter:
    known, key = _known.get(), (program, s, a, boxed)
    if known is None:
        return _Fitter(*key)
    if key not in known:
        known[key] = _Fitter(*key)
    return known[key]


def staged_arrays(program: TileProgram, s: int) -> frozenset[int]:
    """The arrays whose tiles stage ``s`` should copy to shared memory."""
    if program.tile_rows < tiles.TILE_ROWS:
        return frozenset()
    loads = {i["array"] for i in program.stages[s].body if i.kind == "load"}
    return frozenset(k for k in loads if frame.is_staged(program, program.inputs[k]))


def most_chunks(program: TileProgram) -> int:
    """The most chunks of a ring of weights in a kernel of ``program``."""
    return _KEPT_DEPTH if any(kept_rows(program, stage.body) for stage in program.stages) else MAX_DEPTH


class _Fitter:
    def __init__(self, program: TileProgram, s: int, a: Arrangement, boxed: frozenset[int] = frozenset()):
        self.boxed = boxed
        self.program, self.a, self.instrs, self.resident = program, a, program.stages[s].body, a.resident[s]
        self.facts = Facts(program, s, a.split[s], a.lanes)
        self.slab_queues = a.slab_queues(program)
        self.sums, several = _summed_products(self.instrs)
        carried = any(i.block is not None and i.block.carries for i in walk(self.instrs))
        self.sums_last = several and a.lanes < 3
        margins: tuple[int, ...] = (0,)
        if self.sums_last:
            margins = _SUMS_MARGINS
        elif carried and not self.sums and a.lanes == 3:
            margins = _CARRIED_MARGINS
        elif self.facts.spread_sums and a.lanes < 3:
            margins = _SPREAD_MARGINS
        self.limits = [_VALUE_REGISTERS[a.lanes] - margin for margin in margins]
        self.in_turns = a.lanes > 1 and a.sm >= 900 and bool(a.batch_tiles(program))  # may lanes work in ping-pong?
        self._needs: dict[Shape, Needs] = {}
        self._built_once: dict[Shape, StageCodeBuilder] = {}  # of shapes without images, by the shape with an overlap
        self._lowered: dict[tuple[Shape, int, bool], Lowered] = {}

    def needs(self, shape: Shape) -> Needs:
        """The registers that the stage needs in ``shape``, as ``lower_stage`` with the default depth finds them. Turns
        need none."""
        found = self._needs.get(shape)
        if found is None:
            # The pass for late products is over the steps of loops.
            found = self._needs[shape] = self.lower_stage(shape) if shape.late else self._registers_of(shape)
        return found

    def _registers_of(self, shape: Shape) -> Needs:
        """``needs`` of a shape without late products; also noted for shapes with the same code."""
        key = dataclasses.replace(shape, overlap=True)
        at = self._built_once.pop(key, None) or self._built(shape)
        if shape.overlap and not shape.images:
            self._built_once[key] = at  # the search tries chunks of this width without an overlap next
        nodes, overlaps = chunks.reads_of_chunks(at.nodes, at.weights, 0 if self.resident else MAX_DEPTH, shape.overlap)
        found = Needs(frozenset(at.must_be_images), at.values, liveness_of(at.setup, nodes))
        used = at.used | ({"overlap"} if overlaps else set())
        choices = (("copies", shape.copies), ("ahead", shape.ahead), ("overlap", shape.overlap))
        for copies, ahead, overlap in itertools.product(*((on, False) if on and n not in used else (on,) for n, on in choices)):
            self._needs[dataclasses.replace(shape, copies=copies, ahead=ahead, overlap=overlap)] = found
        return found

    def lower_stage(self, shape: Shape, depth: int = MAX_DEPTH, in_turns: bool = True) -> Lowered:
        """Run all passes over the stage, once for the same arguments. ``in_turns``: allow ping-pong."""
        key = shape, 0 if self.resident else depth, in_turns and self.in_turns
        if key not in self._lowered:
            self._lowered[key] = self._all_passes(*key)
        return self._lowered[key]

    def _built(self, shape: Shape) -> StageCodeBuilder:
        """The stage in front of the passes over its nodes."""
        at = StageCodeBuilder(self.facts, shape, self.a.lanes, self.slab_queues)
        bodies.lower_body(at, self.instrs)
        split.release_entries(at, {})
        at.add(*(st.QueueCall(Ref("queue", i["queue"]), "rd_release") for i in self.instrs if i.kind == "pop"))
        return at

    def _all_passes(self, shape: Shape, depth: int, in_turns: bool) -> Lowered:
        at = self._built(shape)
        nodes = chunks.expand_chunks(at.nodes, at.weights, depth, shape.overlap)
        if shape.late:
            nodes = chunks.with_late_products(nodes, at.weights)
        if in_turns:
            nodes, takes_turns = chunks.with_ping_pong(nodes)
            at.setup += [st.Turn("first")] if takes_turns else []
        return Lowered(
            frozenset(at.must_be_images),
            at.values,
            liveness_of(at.setup, nodes),
            tuple(at.setup),
            tuple(at.prologue),
            nodes,
            tuple(at.weights),
            tuple(at.vectors),
            tuple(at.tables),
            at.scratch_words,
            len(at.addresses),
            at.product_bytes,
        )

    def fitted(self, staged: frozenset[int], free: int) -> Fitted:
        """The fit with the lowest limit of registers for which ``free`` bytes of shared memory have room."""
        for limit in self.limits:
            try:
                return self.fit_memory(self.fit_registers(staged, limit), free)
            except CannotLower:
                if limit == self.limits[-1]:
                    raise
        raise AssertionError("there is no limit")

    def fit_registers(self, staged: frozenset[int], limit: int) -> Shape:
        """The first shape that fits the registers, or the one that needs fewest, with images until it fits."""
        best: tuple[Shape, Needs] | None = None
        copying = (True, False) if self.a.lanes < 3 else (False,)  # three lanes have no registers for a copied operand
        recurs = any(i.block is not None and i.block.carries for i in walk(self.instrs))
        for copies, (overlap, columns), ahead in itertools.product(copying, self._shapes(), (True, False) if recurs else (False,)):
            shape = Shape(columns, overlap, ahead, copies, staged=staged, boxed=self.boxed)
            needs = self.needs(shape)
            found = needs.liveness
            if best is None or found.peak < best[1].liveness.peak:
                best = shape, needs
            if found.peak <= limit - (_HELD_MARGIN if found.held >= _HELD_MARGIN else 0):
                break
        assert best is not None
        shape = self._with_images(*best, limit)
        if self.a.sm >= 900 and not self.resident and self.a.batch_tiles(self.program):
            late = dataclasses.replace(shape, late=True)
            if self.needs(late).liveness.peak <= limit:
                return late
        return shape

    def _with_images(self, shape: Shape, needs: Needs, limit: int) -> Shape:
        """Turn values into images until the others fit ``limit`` registers; then return the small ones that are not needed."""
        while needs.liveness.peak > limit or needs.must_be_images - shape.images:
            wide = [v for v in needs.liveness.alive if v not in shape.images and needs.may_be_image(v)]
            if self.sums_last:
                wide.sort(key=lambda v: v in self.sums)  # carries that products are added to are the last choice
            more = needs.must_be_images - shape.images or frozenset(wide[:1])
            if not more:
                peak = needs.liveness.peak
                raise CannotLower(f"a stage needs {peak} registers a thread for its values; there are {limit}")
            shape = dataclasses.replace(shape, images=shape.images | more)
            needs = self.needs(shape)
        for v in sorted(shape.images) if len(shape.images) > 1 else ():
            fewer = dataclasses.replace(shape, images=shape.images - {v})
            if needs.values[v].registers <= _MOST_RETURNED:
                without = self.needs(fewer)
                if without.liveness.peak <= limit and not without.must_be_images - fewer.images:
                    shape, needs = fewer, without
        return shape

    def _shapes(self) -> tuple[tuple[bool, int], ...]:
        """Chunks to try. With three lanes, or two and f32 operands or rows in registers, ptxas spills or serialises chunks of 128
        columns."""
        single = any(self.program.values[i.inputs[0]].dtype == "float32" for i in walk(self.instrs) if i.kind == "matmul")
        if self.a.lanes == 2 and self.facts.kept_rows:
            return _NARROW_SHAPES[1:]
        narrow = self.a.lanes == 3 or (self.a.lanes == 2 and single)
        return _NARROW_SHAPES if narrow else _SHAPES

    def most_depth(self, slot: int) -> int:
        """The most chunks of ``slot`` bytes in a ring of weights."""
        return _KEPT_DEPTH if self.facts.kept_rows and slot <= tiles.ROW_BYTES * tiles.CHUNK_COLUMNS // 2 else MAX_DEPTH

    def fit_memory(self, shape: Shape, free: int) -> Fitted:
        """Divide ``free`` bytes of the CTA's memory; a ring of streamed weights gets the rest. Raises ``CannotLower``."""
        lowered = self.lower_stage(shape)
        lanes, memory = self.a.lanes, _lane_memory(self.program, shape, lowered)
        resident = sum(r.shape.slab_bytes for r in lowered.weights)
        slot = max((c * tiles.ROW_BYTES for r in lowered.weights for c in r.shape.chunks), default=0)
        if shape.staged and free - lanes * memory.bytes < (resident if self.resident else STAGED_DEPTH * slot):
            shape = dataclasses.replace(shape, staged=frozenset())  # the rows are read from global memory
            lowered = self.lower_stage(shape)
            memory = _lane_memory(self.program, shape, lowered)
        tile_bytes, depth, weights = lanes * memory.bytes, MAX_DEPTH, resident
        if not self.resident:
            depth = min(self.most_depth(slot), (free - tile_bytes) // slot if slot else 0)
            if depth < _MIN_DEPTH:
                raise CannotLower(f"{tile_bytes} bytes of tiles leave no room for a ring of weights in shared memory")
            if depth != MAX_DEPTH:
                lowered = self.lower_stage(shape, depth)
            if shape.late and depth < least_ring_depth(lowered.nodes):
                shape = dataclasses.replace(shape, late=False)  # chunks of one product at a time
                lowered = self.lower_stage(shape, depth)
            if depth < least_ring_depth(lowered.nodes):
                lowered = self.lower_stage(shape, depth, in_turns=False)  # without turns lanes release chunks sooner
            if depth < (least := least_ring_depth(lowered.nodes)):
                raise CannotLower(f"only a ring of {depth} chunks of weights fits in shared memory; lanes need {least}")
            weights = depth * slot
        if weights + tile_bytes > free:
            raise CannotLower(
                f"a stage needs {weights} bytes for weights and {tile_bytes} for tiles in shared memory; "
                f"a CTA has {self.a.shared_bytes}"
            )
        return Fitted(lowered, shape, self.resident, memory, depth, slot, weights)


def _summed_products(instrs: Sequence[Instr]) -> tuple[frozenset[int], bool]:
    """(carries, under all their names, to which loops add products; has a loop several of them?)."""
    found: set[int] = set()
    most = 0
    for loop in walk(instrs):
        if loop.block is None:
            continue
        makers = {v: i for i in loop.block.body for v in i.outputs}
        carried = zip(loop.inputs[-len(loop.block.carries) :], loop.block.carries, loop.block.results, loop.outputs, strict=False)
        own = 0
        for names in carried:
            maker = makers.get(names[2])
            added = maker is not None and maker.kind in ("add", "add_any") and names[1] in maker.inputs
            if maker is not None and added and any(x in makers and makers[x].kind == "matmul" for x in maker.inputs):
                found.update(names)
                own += 1
        most = max(most, own)
    return frozenset(found), most > 1


def allows_half_tiles(stage: Fitted) -> bool:
    """May a tile of the stage have 32 rows? Memory of a lane other than that of exchanges is by rows of 64."""
    memory = stage.memory
    return bool(exchanges_of(stage.lowered)) and stage.resident and memory.rows == memory.exchanges


def exchanges_of(lowered: Lowered) -> list[st.Exchange]:
    return [n for n in lowered.setup if isinstance(n, st.Exchange)]


def _lane_memory(program: TileProgram, shape: Shape, lowered: Lowered) -> LaneMemory:
    images = place_images(shape.images, lowered)
    rows = max((at + lowered.image_bytes(v) for v, at in images.items()), default=0)
    segments = rows + tiles.aligned(tiles.TILE_ROWS * lowered.scratch_words * 4)
    panels = segments + tiles.aligned(sum(n.bytes for n in lowered.setup if isinstance(n, frame.SegmentStart | frame.TopsStart)))
    found = [p for p in lowered.prologue if isinstance(p, frame.Panel)]
    staged = panels + tiles.aligned(max((p.at + tiles.panel_bytes(p.width, tiles.is_half(p.dtype)) for p in found), default=0))
    products = staged + tiles.aligned(sum(frame.staged_bytes(program.inputs[k]) for k in shape.staged))
    exchanges = products + tiles.aligned(st.address_bytes(lowered.addresses) + lowered.product_bytes)
    end = exchanges + sum(n.bytes for n in exchanges_of(lowered))
    return LaneMemory(images, rows, segments, panels, staged, products, exchanges, end)


def place_images(values: Iterable[int], lowered: Needs) -> dict[int, int]:
    """Offsets of images in a lane's memory. Images that are never alive at the same time share memory."""
    placed: dict[int, int] = {}
    for v in sorted(values, key=lambda v: (lowered.liveness.life(v), v)):  # in the order of their first moments
        size, (first, last) = lowered.image_bytes(v), lowered.liveness.life(v)
        at = 0
        for start, other in sorted((start, u) for u, start in placed.items()):
            since, until = lowered.liveness.life(other)
            if since <= last and first <= until:
                if at + size <= start:
                    break
                at = max(at, start + lowered.image_bytes(other))
        placed[v] = at
    return placed


def _issues(nodes: Iterable[Node], loop: st.CountedLoop | None = None) -> Iterator[tuple[st.CountedLoop | None, st.Issue]]:
    """All products, each with the loop around it."""
    for node in nodes:
        if isinstance(node, st.Issue):
            yield loop, node
        elif isinstance(node, st.LayerLoop):
            one = [issue for _, issue in _issues(node.body)]
            for layer in range(node.layers):
                yield from ((loop, dataclasses.replace(i, weight=i.weight + layer * node.weights)) for i in one)
        elif isinstance(node, st.CountedLoop):
            yield from _issues(node.body, node)


# --- What the planner expects: values in registers or in shared memory -----------------------------------------------------------

_BEAM = 64  # placements that are searched side by side; a chain of layers has four
_CHOICES = 6  # the largest values of a step, which may become images


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Storage:
    """``image_bytes``: the most bytes that images take at once; ``image_traffic``: bytes of images written and read per tile."""

    image_bytes: int
    image_traffic: int


@dataclasses.dataclass(frozen=True, slots=True)
class LiveValue:
    """A value that later steps read, until step ``last``; ``reads``: how often all of it is read. ``image``: bytes of its image in
    shared memory."""

    value: int
    last: int
    registers: int
    image: int
    reads: int


@dataclasses.dataclass(frozen=True, slots=True)
class StageStep:
    """``working``: registers of its accumulators. ``done``: the fraction of its results that is alive beside the accumulators, or
    None where a result replaces the value that it was made from."""

    working: int
    done: float | None = None

    def registers(self, held: int, made: int, left: int) -> float:
        """The most registers in use at once, by those of values: live before the step, made in it, still live after it."""
        if self.done is None:
            return max(held, left) + self.working
        return max(held + self.working + made * self.done, left)


class _Placing(NamedTuple):
    """Places of the values that a step makes. ``registers``: of those without an image; ``images``: bytes of the others, and
    ``traffic`` what is written and read of them. ``left``: the codes of those that are read after the step, which are twice their
    number, plus one for an image; ``left_registers`` and ``left_images`` are of these alone."""

    registers: int
    images: int
    traffic: int
    left: tuple[int, ...]
    left_registers: int
    left_images: int


class Placements:
    """``best(budget)``: of the values ``kept`` by the step of ``steps`` that makes them, with so many registers of a thread for
    them, the placement that needs least shared memory, then least traffic; or None where they do not fit.

    A beam search. A greedy choice of the value to move, step by step, changed 33 of 1600 plans and lost an A100 its pipeline of
    NeRF.
    """

    def __init__(self, steps: Sequence[StageStep], kept: Sequence[Sequence[LiveValue]]):
        self._values = [k for made in kept for k in made]
        self._steps, self._last = steps, {k.last for k in self._values}
        self._starts = list(itertools.accumulate(map(len, kept), initial=0))
        self._choices = functools.cache(lambda t: _choices(kept[t], self._starts[t], t))

    def best(self, budget: int) -> Storage | None:
        # Codes of live values -> (most bytes of images so far, traffic so far), registers, bytes of images.
        beam: dict[tuple[int, ...], tuple[tuple[int, int], int, int]] = {(): ((0, 0), 0, 0)}
        for t, step in enumerate(self._steps):
            choices, ends = self._choices(t), t in self._last
            following: dict[tuple[int, ...], tuple[tuple[int, int], int, int]] = {}
            for live, ((most, so_far), held, images) in beam.items():
                rest, rest_held, rest_images = self._after(live, t) if ends else (live, held, images)
                for made, born, traffic, left, left_held, left_images in choices:
                    if step.registers(held, made, rest_held + left_held) > budget:
                        continue
                    after, found = rest + left, (max(most, images + born), so_far + traffic)
                    if after not in following or found < following[after][0]:
                        following[after] = found, rest_held + left_held, rest_images + left_images
            if not following:
                return None
            beam = following if len(following) == 1 else dict(sorted(following.items(), key=lambda item: item[1][0])[:_BEAM])
        return Storage(*min(found for found, _, _ in beam.values()))

    def _after(self, live: tuple[int, ...], step: int) -> tuple[tuple[int, ...], int, int]:
        """Those of ``live`` that are read after ``step``, their registers, and the bytes of their images."""
        values = self._values
        rest = tuple(code for code in live if values[code >> 1].last > step)
        held = sum(values[code >> 1].registers for code in rest if not code & 1)
        return rest, held, sum(values[code >> 1].image for code in rest if code & 1)


def _choices(made: Sequence[LiveValue], first: int, step: int) -> list[_Placing]:
    """All placements of the values that ``step`` makes, the first of which has number ``first``."""
    found = [_Placing(0, 0, 0, (), 0, 0)]
    for n, k in enumerate(made):
        code, left = ((2 * (first + n),), 1) if k.last > step else ((), 0)
        imaged = (code[0] + 1,) if code else ()
        places = [_Placing(k.registers, 0, 0, code, left * k.registers, 0)]
        if n < _CHOICES:
            places.append(_Placing(0, k.image, k.image * (1 + k.reads), imaged, 0, left * k.image))
        found = [_both(before, place) for before in found for place in places]
    return found


def _both(a: _Placing, b: _Placing) -> _Placing:
    return _Placing(
        a.registers + b.registers,
        a.images + b.images,
        a.traffic + b.traffic,
        a.left + b.left,
        a.left_registers + b.left_registers,
        a.left_images + b.left_images,
    )
