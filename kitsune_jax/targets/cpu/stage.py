"""One stage under construction: the memory of every value of its body, and the instructions so far.

Comes in: the body of a stage, or of a loop inside it. Goes out: instructions, scratch buffers and preparations of weights, by a
``StageLowering``. ``lower``, ``pointwise`` and ``products`` read values with ``view`` and ask ``place``/``places`` where a result
goes: to a place that a reader wants (an output array, a queue slot, a carry, a piece of a concatenation), else to scratch.
Invariant: memory except that of carries is written once per tile (or iteration), before it is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.graph import Scalar
from kitsune_jax.ops.spec import Rounding
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import itemsize
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import Instr, LoopBody, TileProgram, TileType
from kitsune_jax.program.passes import VIEWS, Flow, Use
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import memory
from kitsune_jax.targets.cpu.facts import added_products, product_sums, rounded_values, row_exponentials, taken_dots, taken_sums
from kitsune_jax.targets.cpu.memory import BorderArray, View
from kitsune_jax.targets.cpu.vectors import VectorBuilder, compute_type, is_pointwise

_MOST = 1 << 48  # kMaxCount in cpu/include/kitsune_cpu/program.h
_VECTOR = 16  # elements
_CONFLICTING = 1 << 10  # bytes between rows, of which the sets of a first-level cache hold few
_COPIES = frozenset({"slice", "concatenate", "pad"})
NEVER = frozenset({-1})  # of ``StageLowering.waits``: the piece is copied with the others, where the concatenation comes
# Instructions, beside views and elementwise ones, that can read a value that lies column by column.
_READERS = _COPIES | {"results", "store", "store_slice"} | {kind for kind, op in OPS.items() if op.family == "reduce"}


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A value that every reader computes for itself: the constant ``const``, the row index over the stream axes ``axes``, an iota,
    or the number of the enclosing loop ``loop`` (1 is the outermost)."""

    const: Scalar | None = None
    axes: tuple[int, ...] | None = None
    iota: int | None = None  # row-shape dimension
    loop: int | None = None


class StageLowering:
    """``around``: the stage of the code around ``block``, a loop's body, which shares its values and buffers."""

    def __init__(
        self,
        program: TileProgram,
        body: tuple[Instr, ...],
        preps: list[bc.Prep],
        products: bc.Products,
        rounding: Rounding,
        around: StageLowering | None = None,
        block: LoopBody | None = None,
    ):
        self.program, self.body, self.preps, self.products, self.around = program, body, preps, products, around
        self.rounding = rounding
        self.flow = Flow(program.values, program.literals, body, block.results if block else ())
        self.uses = self.flow.uses
        self.rounded = rounded_values(program, self.flow, rounding)
        self.taken, self.dots = taken_sums(program, self.flow), taken_dots(self.flow)  # by the number of their sum
        self.exponentials = row_exponentials(self.flow)  # by the number of their exp
        facts = (self.taken, self.dots, self.exponentials)
        self.absorbed = {i for found in facts for fact in found.values() for i in fact.absorbed}
        self.sums = product_sums(self.flow)  # by the number of either product
        self.added = {s.add for s in self.sums.values()}
        late = added_products(self.flow, block.carries if block else ())  # by the number of the addition
        self.late = {i: s for i, s in late.items() if s.product not in self.sums}
        self.late_products = {s.product: s for s in self.late.values()}
        self.late_results = {s.result: self.body[s.product].outputs for s in self.late.values()}
        self.code: list[bc.Instruction] = []
        self.buffer_bytes: list[int] = around.buffer_bytes if around else []
        self.views: dict[int, View] = dict(around.views) if around else {}
        self.leaves: dict[int, Leaf] = dict(around.leaves) if around else {v: Leaf(const=c) for v, c in program.literals}
        self.satisfied: set[Use] = set()
        self.copies: dict[int, View] = {}  # of values whose rows lie badly, for the loops inside
        self.depth: int = around.depth + 1 if around else 0  # enclosing loops
        self.made = {*self.flow.makers, *((block.index, *block.carries) if block else ())}
        self.carry_results = tuple(zip(block.carries, block.results, strict=True)) if block else ()
        self.carried: dict[int, View] = {}  # number of a carry -> its place, if its next value may be written there at once
        # Pieces of a concatenation in such a place -> the instructions that read the old value, and must do so before.
        self.waits: dict[Use, frozenset[int]] = {}
        if block is not None:
            self.leaves[block.index] = Leaf(loop=self.depth)
        for instr in self.body:
            if instr.kind == "row_index":
                self.leaves[instr.outputs[0]] = Leaf(axes=tuple(instr["axes"]))
            elif instr.kind == "iota":
                d = instr["dimension"] - int(self.type(instr.outputs[0]).tile)
                only_zero = self.type(instr.outputs[0]).shape[d] == 1
                self.leaves[instr.outputs[0]] = Leaf(const=0) if only_zero else Leaf(iota=d)
            elif instr.kind in VIEWS and (leaf := self.leaf(instr.inputs[0])) is not None and leaf.iota is None:
                self.leaves[instr.outputs[0]] = leaf  # constants and row indices look the same under every view

    # Values.

    def type(self, v: int) -> TileType:
        return self.program.values[v]

    def root(self, v: int) -> int:
        r = self.flow.root(v)
        return r if r in self.made or self.around is None else self.around.root(r)

    def leaf(self, v: int) -> Leaf | None:
        return self.leaves.get(self.root(v))

    def widened(self, v: int) -> int | None:
        """The 16-bit float of ``v``'s shape that ``v`` is a widening conversion of, which loads do anyway; None where ``v`` itself
        lies in memory (as an operand of a matmul, say) or is no such conversion.
        """
        instr = self.flow.makers.get(self.root(v))
        if self.root(v) in self.views or instr is None or instr.kind != "convert_element_type":
            return None
        source = self.flow.makers.get(self.root(instr.inputs[0]))
        if source is not None and is_pointwise(source.kind):
            return None  # it may still be in a register: the conversion belongs to its group
        x, y = self.type(instr.inputs[0]), self.type(instr.outputs[0]).dtype
        return instr.inputs[0] if x.dtype != y == compute_type(x.dtype) and x.shape == self.type(v).shape else None

    # Memory.

    def new(self, v: int) -> View:
        """Fresh scratch for a value like ``v``."""
        t = self.type(v)
        if self.depth and self._by_columns(v):
            view = self.scratch(t.shape, t.dtype, dense=True)
            return dataclasses.replace(view, row_stride=1, strides=tuple(self.program.tile_rows * s for s in view.strides))
        return self.scratch(t.shape, t.dtype, tile=t.tile)

    def _by_columns(self, v: int) -> bool:
        """Whether a loop keeps ``v``, and the next step's value in its place, column by column in scratch.

        A carry of a few columns (the state of a simulator, ``[envs, 4]``) is sliced and concatenated in every iteration: row by row
        these are loads and stores with a stride, column by column dense ones. So all readers must be elementwise, views, copies,
        stores or reductions (a matrix product reads rows), and rows as long as a vector must be taken apart by some reader.
        """
        t, here = self.type(v), {self.root(v)}
        size = math.prod(t.shape)
        if not t.tile or not 1 < size <= memory.MOST_COLUMNS or sum(n > 1 for n in t.shape) != 1:
            return False
        for carry, result in self.carry_results:
            if not here.isdisjoint((carry, self.root(result))):
                here |= {carry, self.root(result)}
        if not here.isdisjoint(self.late_results):
            return False  # a product adds to it
        made = (self.flow.makers.get(r) for r in here)
        if len(here) > 1 and any(i is not None and i.kind == "matmul" for i in made):
            return False
        kinds = {kind for r in here for kind in self._reader_kinds(r)}
        fits = all(kind in _READERS or is_pointwise(kind) for kind in kinds)
        return fits and (size < _VECTOR or not kinds.isdisjoint(_COPIES))

    def _reader_kinds(self, v: int) -> Iterator[str]:
        """The kinds of the readers of ``v``, through views; a slice is both."""
        for i, _ in self.uses.get(v, ()):
            instr = self.flow.instruction(i)
            if instr.kind in _COPIES or instr.kind not in VIEWS:
                yield instr.kind
            if instr.kind in VIEWS:
                yield from self._reader_kinds(instr.outputs[0])

    def scratch(self, shape: tuple[int, ...], dtype: str, dense: bool = False, tile: bool = True) -> View:
        """A new value in scratch, in a buffer that has a number until ``memory.place_buffers`` gives it an address.

        ``dense``: no space between rows, so that one loop can walk rows and an inner dimension.
        """
        ref = bc.CpuRef(bc.SCRATCH, len(self.buffer_bytes), 0, bc.DTYPE_CODE[dtype])
        pitch = math.prod(shape) if dense or not tile else memory.row_pitch(shape, dtype)
        self.buffer_bytes.append(pitch * itemsize(dtype) * (self.program.tile_rows if tile else 1))
        return View(ref, pitch if tile else 0, shape, dim_strides(shape))

    def border(self, instr: Instr) -> BorderArray:
        """The array, or the part of one, that a load or store names."""
        loads, number = instr.kind in ("load", "load_slice"), instr["array"]
        array = (self.program.inputs if loads else self.program.outputs)[number]
        whole = memory.border(self.program, array, bc.IN if loads else bc.OUT, number)
        if instr.kind in ("load", "store"):
            return whole
        dims = [array.kept.index(d) for d in instr["dims"]]
        sizes = dict(zip(dims, instr["sizes"], strict=True))
        numbers = instr.inputs if loads else instr.inputs[1:]
        ref = memory.moved(whole.ref, *self.moves(numbers, instr["steps"], [whole.strides[d] for d in dims]))
        return dataclasses.replace(whole, ref=ref, shape=tuple(sizes.get(d, n) for d, n in enumerate(whole.shape)))

    def part(self, instr: Instr) -> View:
        """The part of its first operand that a ``cut`` reads or a ``paste`` writes."""
        whole = self.view(instr.inputs[0])
        ref = memory.moved(whole.ref, *self.moves(instr.inputs[-1:], (1,), whole.strides[:1]))
        return View(ref, whole.row_stride, whole.shape[1:], whole.strides[1:])

    def moves(self, numbers: Sequence[int], steps: Sequence[int], strides: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The offset in elements by which ``numbers`` move an operand, and a stride for each enclosing loop, the outermost first.
        Such an operand costs no instruction."""
        offset, moves = 0, [0] * self.depth
        for v, step, stride in zip(numbers, steps, strides, strict=True):
            leaf = self.leaf(v)
            assert leaf is not None
            if leaf.loop is not None:
                moves[leaf.loop - 1] += step * stride
            else:
                offset += int(leaf.const or 0) * step * stride
        return offset, tuple(moves) if any(moves) else ()

    def queue(self, number: int) -> View:
        t = self.program.queues[number].tile
        ref = bc.CpuRef(bc.QUEUE, number, 0, bc.DTYPE_CODE[t.dtype])
        return View(ref, memory.row_pitch(t.shape, t.dtype), t.shape, dim_strides(t.shape))

    def prep(self, prep: bc.Prep, v: int) -> int:
        """The number of ``prep``, which prepares ``v`` once for all stages, or, if ``local``, where ``v`` is defined."""
        if not prep.local:
            if prep not in self.preps:
                self.preps.append(prep)
            return self.preps.index(prep)
        home, r = self, self.root(v)
        while home.around is not None and r not in home.made:
            home = home.around
        self.preps.append(prep)
        home.code.append(bc.Pack(len(self.preps) - 1))
        return len(self.preps) - 1

    # Reading.

    def view(self, v: int) -> View:
        """The memory of ``v``, in ``v``'s shape. Emits the code that brings ``v`` into memory unless it is there."""
        r = self.root(v)
        if r not in self.views:
            self.views[r] = self._bring(r)
        found = memory.reshape(self.views[r], self.type(v).shape)
        assert found is not None
        return found

    def near(self, v: int) -> View:
        """``view(v)``, of a tile whose rows a product reads. Where a loop reads the rows of an array again and again, and they lie
        a multiple of 1 KiB apart, so that few of them fit the first-level cache at once: a copy that is made before the loop."""
        found = self.view(v)
        home = self
        while home.around is not None and self.root(v) not in home.made:
            home = home.around
        far = abs(found.row_stride) * itemsize(found.dtype)
        if home is self or found.ref.space != bc.IN or any(found.ref.loop_strides) or far == 0 or far % _CONFLICTING:
            return found
        if self.root(v) not in home.copies:
            copy = home.scratch(found.shape, found.dtype)
            home.copy(found, copy)
            home.copies[self.root(v)] = copy
        near = memory.reshape(home.copies[self.root(v)], found.shape)
        return found if near is None else near

    def view_that(self, fits: Callable[[View], bool], v: int, dtype: str) -> View:
        """``view(v)`` if it ``fits``, else a copy of ``v`` in scratch, of ``dtype``."""
        found = self.view(v)
        if not fits(found):
            found = self.scratch(found.shape, dtype)
            self.write(v, found)
        return found

    def _bring(self, r: int) -> View:
        if self.leaf(r) is not None or self.widened(r) is not None:
            target = self.new(r)
            self.write(r, target)
            return target
        instr = self.flow.makers[r]
        if instr.kind in ("load", "load_slice"):
            source = self.border(instr)
            if (view := source.view) is not None:
                return view
            tile = self.place(r)
            self.code.append(bc.StridedLoad(source.ref, source.axis_strides, source.shape, source.strides, tile.operand()))
            return tile
        if instr.kind == "pop":
            return self.queue(instr["queue"])
        if instr.kind == "cut":
            return self.part(instr)
        if instr.kind == "empty":
            return self.new(r)
        if instr.kind in VIEWS:
            return self._structural_view(instr)
        raise AssertionError(f"{instr.kind} has not been computed yet")

    def delivered(self, use: Use, v: int) -> bool:
        """Load ``v`` if it is still to be loaded, to the place that ``use`` wants if possible. Returns whether it is there."""
        instr = self.flow.makers.get(self.root(v))
        if use not in self.satisfied and instr is not None and instr.kind in ("load", "load_slice"):
            self.view(v)
        return use in self.satisfied

    def input_in_array_order(self, v: int) -> View | None:
        """``v`` in the order of its array, if it is an input of a program with an order that is used once and not loaded yet."""
        r = self.root(v)
        instr = self.flow.makers.get(r)
        if self.program.order is None or r in self.views or instr is None or instr.kind != "load" or len(self.uses.get(r, ())) > 1:
            return None
        program = dataclasses.replace(self.program, order=None)
        view = memory.border(program, program.inputs[instr["array"]], bc.IN, instr["array"]).view
        return None if view is None or not view.row_stride else memory.reshape(view, self.type(v).shape)

    def _structural_view(self, instr: Instr) -> View:
        """The view that a structural instruction makes of its operand, or of a copy where a reshape needs one."""
        x, y = self.type(instr.inputs[0]), self.type(instr.outputs[0])
        base = self.view(instr.inputs[0])
        if instr.kind != "broadcast_in_dim" and x.tile != y.tile:
            raise CannotLower(f"{instr.kind} from a stationary value to a tile")
        lead = 1 if x.tile else 0
        if instr.kind == "broadcast_in_dim":
            return memory.broadcast(base, y.shape, [d - int(y.tile) for d in instr["dims"][lead:]])
        if instr.kind == "transpose":
            return memory.transpose(base, [p - lead for p in instr["permutation"][lead:]])
        if instr.kind == "rev":
            return memory.reverse(base, [d - lead for d in instr["dimensions"]])
        if instr.kind == "slice":
            steps = instr["strides"] or (1,) * len(instr["start"])
            ranges = [range(*three) for three in zip(instr["start"], instr["limit"], steps, strict=True)]
            return memory.cut(base, ranges[lead:])
        return self.reshaped(base, y.shape, x.tile)

    def reshaped(self, view: View, shape: tuple[int, ...], tile: bool) -> View:
        """``view`` with another row shape; of a copy where that needs one."""
        found = memory.reshape(view, shape)
        if found is None:
            copy = self.scratch(view.shape, view.dtype, tile=tile)
            self.copy(view, copy)
            found = memory.reshape(copy, shape)
            assert found is not None
        return found

    def read(self, builder: VectorBuilder, v: int, shape: tuple[int, ...]) -> int:
        """Register of ``builder`` <- ``v`` as an operand of a pointwise op of row shape ``shape``."""
        leaf, t = self.leaf(v), self.type(v)
        if leaf is not None and leaf.const is not None:
            return builder.const(leaf.const, t.dtype)
        if leaf is not None and leaf.axes is not None:
            return self._row_index(builder, leaf.axes, t.dtype)
        if leaf is not None and leaf.loop is not None:
            return builder.index(-leaf.loop, 1, _MOST, t.dtype)
        if leaf is not None and leaf.iota is not None and self.root(v) not in self.views:
            own = self.type(self.root(v)).shape
            if memory.squeezed(own) == builder.extents:
                return builder.index(len(memory.squeezed(own[: leaf.iota])) + 1, 1, own[leaf.iota], t.dtype)
        narrow = self.widened(v)
        if narrow is not None:
            return self.read(builder, narrow, shape)
        return builder.load(memory.aligned(self.view(v), t.tile, shape))

    def _component(self, builder: VectorBuilder, divisor: int, modulus: int, kind: str) -> int:
        """The row's element // ``divisor`` % ``modulus``."""
        if self.program.order is None:
            return builder.index(0, divisor, modulus, kind)
        zeros = (0,) * len(builder.extents)
        order = View(bc.CpuRef(bc.IN, self.program.order, 0, bc.DTYPE_CODE["int32"]), 1, builder.extents, zeros)
        x = builder.convert(builder.load(order), "int32", kind)
        if divisor > 1:
            x = builder.micro("div", kind, x, builder.const(divisor, kind))
        return x if divisor * modulus >= self.program.rows else builder.micro("rem", kind, x, builder.const(modulus, kind))

    def _row_index(self, builder: VectorBuilder, over: tuple[int, ...], dtype: str) -> int:
        """Mixed-radix index over the stream axes ``over``; neighbouring axes are one component."""
        axes = self.program.axes
        kind = dtype if dtype in ("int32", "int64") else "int64"
        starts = [k for k in range(len(over)) if k == 0 or over[k] != over[k - 1] + 1]
        total: int | None = None
        for k, end in itertools.pairwise((*starts, len(over))):
            divisor = math.prod(axes[over[end - 1] + 1 :])
            modulus = math.prod(axes[a] for a in over[k:end])
            part = self._component(builder, divisor, modulus, kind)
            if total is not None:
                scaled = builder.micro("mul", kind, total, builder.const(modulus, kind))
                part = builder.micro("add", kind, scaled, part)
            total = part
        if total is None:
            return builder.const(0, dtype)
        return builder.rounded(builder.convert(total, kind, compute_type(dtype)), dtype)

    # Writing.

    def write(self, v: int, target: View) -> None:
        """Emit a copy of ``v`` (in memory, or a leaf) to ``target``, converting to its dtype."""
        shape = self.type(v).shape
        builder = VectorBuilder(memory.squeezed(shape))
        x = self.read(builder, v, shape)
        builder.store(target, builder.convert(x, compute_type(self.type(v).dtype), compute_type(target.dtype)))
        self.emit(builder.finish(), tile=target.row_stride != 0 or self.type(v).tile)

    def copy(self, source: View, target: View) -> None:
        builder = VectorBuilder(memory.squeezed(source.shape))
        builder.store(target, builder.load(source))
        self.emit(builder.finish(), tile=target.row_stride != 0 or source.row_stride != 0)

    def emit(self, instruction: bc.Instruction, tile: bool) -> None:
        """Append an instruction, which runs on one row if it is not of a tile."""
        self.code.append(instruction if tile else bc.CpuStationary((instruction,)))

    def wanted(self, r: int, inside: Set[int] = frozenset()) -> list[tuple[Use, View | None]]:
        """Every use of ``r``, through reshapes and transposes, with the place (in ``r``'s shape) that it wants, if any. ``inside``:
        the instructions of the group that makes ``r``, behind which a use may wait."""
        out: list[tuple[Use, View | None]] = []
        for i, p in self.uses.get(r, ()):
            instr = self.flow.instruction(i)
            if instr.kind in ("reshape", "transpose", "rev"):
                inner = self.wanted(self.root(instr.outputs[0]), inside)
                out.extend((use, None if w is None else self._operand_place(instr, w, r)) for use, w in inner)
                continue
            place = self._place_of(instr, p) if self.waits.get((i, p), frozenset()) <= inside else None
            out.append(((i, p), None if place is None else memory.reshape(place, self.type(r).shape)))
        return out

    def _place_of(self, instr: Instr, p: int) -> View | None:
        if instr.kind == "results":
            return self.carried.get(p)
        if instr.kind in ("store", "store_slice") and p == 0:
            array = self.border(instr).view
            return array if array is not None and array.dtype == self.type(instr.inputs[0]).dtype else None
        if instr.kind == "push":
            return self.queue(instr["queue"])
        if instr.kind == "paste" and p == 1:
            return self.part(instr)
        if instr.outputs and instr.outputs[0] in self.late_results and instr.inputs[p] not in self.late_results[instr.outputs[0]]:
            return self._place_of_sum(self.root(instr.outputs[0]))
        return self.piece(instr, p) if instr.kind == "concatenate" else None

    def _place_of_sum(self, r: int) -> View:
        """The place of a pointwise result that a product is added to: rows whose elements lie dense."""

        def fits(view: View) -> bool:
            return memory.readable(view) and memory.chain(view.shape, view.strides) in (0, 1)

        return self.place(r, fits, lambda: self.scratch(self.type(r).shape, self.type(r).dtype))

    def _operand_place(self, instr: Instr, place: View, r: int) -> View | None:
        """``place`` of the result of a bijective view instruction, as a place of its operand ``r``."""
        result = memory.reshape(place, self.type(instr.outputs[0]).shape)
        if result is None:
            return None
        if instr.kind == "transpose":
            lead = int(self.type(r).tile)
            perm = [p - lead for p in instr["permutation"][lead:]]
            result = memory.transpose(result, [perm.index(d) for d in range(len(perm))])
        elif instr.kind == "rev":
            result = memory.reverse(result, [d - int(self.type(r).tile) for d in instr["dimensions"]])
        return memory.reshape(result, self.type(r).shape)

    def piece(self, concat: Instr, p: int) -> View:
        """The part of a concatenation's memory that its operand ``p`` fills."""
        d = concat["dimension"] - int(self.type(concat.outputs[0]).tile)
        whole = self.place(self.root(concat.outputs[0]))
        start = sum(self.type(v).shape[d] for v in concat.inputs[:p])
        size = self.type(concat.inputs[p]).shape[d]
        return memory.cut(whole, [range(start, start + size) if k == d else range(n) for k, n in enumerate(whole.shape)])

    def place(self, r: int, fits: Callable[[View], bool] = lambda view: True, layout: Callable[[], View] | None = None) -> View:
        """The place of the result ``r`` of an instruction: one that a use wants and that ``fits``, else scratch by ``layout``."""
        if r in self.views:
            return self.views[r]
        wanted = self.wanted(r)
        for use, view in wanted:
            if view is None or not fits(view) or (len(wanted) > 1 and not memory.readable(view)):
                continue
            self.satisfied.add(use)
            self.views[r] = view
            return view
        self.views[r] = layout() if layout is not None else self.new(r)
        return self.views[r]

    def places(self, r: int, inside: set[int]) -> tuple[list[View], int]:
        """All places that a group (its instructions are ``inside``) writes ``r`` to; none where only the group reads it. And the
        last instruction of the group that must read before; -1 if there is none."""
        wanted = [(use, view) for use, view in self.wanted(r, inside) if use[0] not in inside]
        out = [view for _, view in wanted if view is not None]
        self.satisfied.update(use for use, view in wanted if view is not None)
        kept = next((view for view in out if memory.readable(view)), None)
        if kept is None and any(view is None for _, view in wanted):
            kept = self.new(r)
            out.append(kept)
        if kept is not None:
            self.views[r] = kept
        return out, max((j for use, view in wanted if view is not None for j in self.waits.get(use, ())), default=-1)
