"""Lowering of the instructions of a stage in order, of loops with carries, and of runs of equal layers as loops.

Comes in: instructions, and the ``StageCodeBuilder`` of their stage. Goes out: nodes, with a ``CountedLoop`` for each loop and a
``LayerLoop`` for each run of equal layers. Raises ``CannotLower``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import Instr, LoopBody, TileProgram, walk
from kitsune_jax.targets.cuda import ir, pack, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.ir import Address, Keep, Ref
from kitsune_jax.targets.cuda.stage import column_moves, instructions, split
from kitsune_jax.targets.cuda.stage.builder import StageCodeBuilder, read_by
from kitsune_jax.targets.cuda.stage.facts import is_rounding

# --- Loops with carries: a recurrence over time, or over blocks of keys -----------------------------------------------------------

_MOST_KEPT = 32  # registers of a streamed value that is kept for all iterations; wider ones are read from their arrays again
_Kept = st.InImage | st.InRegisters  # the home of a value that passes from one iteration to the next


def _lower_counted_loop(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower ``instr`` and its body.

    A carry has registers for as long as the loop runs, or an image in shared memory if it does not fit. Values that the body reads
    from outside get homes before the loop begins, because pending values would be evaluated, and kept, inside. All next carries are
    made before the first carry changes.
    """
    block = instr.block
    assert block is not None
    seen, which = _seen_blocks(at, instr)
    if any(i.kind == "sink_at" and i["sorted"] for i in block.body):
        raise CannotLower("a sink by sorted indices in a loop has no code on the GPU: every iteration has an order of its own")
    for v in _outer_values(block):
        _give_home(at, v)
    for v in _operands(at, block):
        if at.is_kept_for_products(v):
            at.materialize(v)
    carries = [_carry(at, *pair) for pair in zip(block.carries, instr.inputs, strict=True)]
    number = Ref("number", block.index)
    at.values[block.index] = st.StageValue(1, "int32", True, st.LoopNumber(number))
    row_tiles, repeated = dict(at.row_tiles), at.repeated
    at.repeated = True
    known = at.gathered
    ahead = _RowsAhead(at, instr)
    with at.body_of_loop() as body:
        ahead.begin_step()
        split.begin_all_gathers(at, block.body, carries)
        lower_body(at, block.body)
        _update_carries(at, carries, [at.root(v) for v in block.results])
        split.release_entries(at, known)
        ahead.end_step()
    at.repeated = repeated
    at.row_tiles = row_tiles  # those of the body are not visible after it
    at.add(st.CountedLoop(number, instr["count"], bool(instr.get("reverse")), tuple(body), seen, which))
    for v, carry in zip(instr.outputs, carries, strict=True):
        at.values[at.root(v)] = at.values[carry]


def _seen_blocks(at: StageCodeBuilder, instr: Instr) -> tuple[Ref | None, str]:
    """(the blocks that a loop runs, which of them). The lanes of a CTA share the blocks, so each lane runs the blocks that any of
    them sees; the loop itself masks what a lane's rows do not see."""
    within = instr.get("within")
    if within is None:
        return None, "all"
    if not pack.lanes_share_batch(at.program):
        raise CannotLower("a loop that skips iterations by the rows of a tile needs weights of its own on the GPU")
    if instr.get("reverse"):
        raise CannotLower("a loop that skips iterations and counts down has no code on the GPU")
    axis, step, low, high, which = within
    inner = math.prod(at.program.axes[axis + 1 :])
    bounds = (inner, at.program.axes[axis], step, low, high, instr["count"], *_shift(at, instr))
    found = [node for node in at.prologue if isinstance(node, st.SeenBlocks)]
    ref = next((node.ref for node in found if node == st.SeenBlocks(node.ref, *bounds)), Ref("seen", len(found)))
    at.once_per_tile(st.SeenBlocks(ref, *bounds))
    return ref, which


def _shift(at: StageCodeBuilder, instr: Instr) -> tuple[Address, int, str, int] | tuple[()]:
    """(address of the number that shifts the bounds of a loop, sign, guard, size), or ()."""
    if (shifted := instr.get("shifted")) is None:
        return ()
    array, sign, guard, size = shifted
    loads = (i for i in walk(at.facts.instrs) if i.kind == "load" and i["array"] == array)
    for home in (at.value(v).home for i in loads for v in i.outputs):
        if isinstance(home, st.InVector):
            return home.address, sign, guard, size
    raise CannotLower("the bounds of a loop are shifted by a number that the stage does not load")


def _outer_values(block: LoopBody) -> list[int]:
    """Values that the body reads but does not make."""
    made, read = {block.index, *block.carries}, list[int]()
    for i in walk(block.body):
        read += i.inputs
        made.update(i.outputs)
        if i.block is not None:
            made.update((i.block.index, *i.block.carries))
            read += i.block.results
    return [v for v in dict.fromkeys((*read, *block.results)) if v not in made]


def _operands(at: StageCodeBuilder, block: LoopBody) -> list[int]:
    """Values from outside that products of the body contract. They may have a home, as rotated keys of two halves, and still none
    that a product reads: the first product would keep them inside of the loop, where nothing behind the loop sees them."""
    contracted = {at.root(p) for i in walk(block.body) if i.kind == "matmul" for p in at.split.pieces(i.inputs[0])}
    pieces = [at.root(p) for v in _outer_values(block) for p in at.split.pieces(v)]
    return [p for p in dict.fromkeys(pieces) if p in contracted and p in at.values and not at.values[p].slab]


def _give_home(at: StageCodeBuilder, v: int) -> None:
    """Give ``v`` a home that stays the same in all iterations."""
    if v in at.facts.joined:
        for part in at.facts.joined[v]:
            _give_home(at, part)
        return
    if at.root(v) not in at.values:  # a stationary value needs none
        return
    value = at.value(v)
    match value.home:
        case st.Expression() | st.Multiply():
            at.materialize(v)
        case st.InArray() if not value.row and value.registers <= _MOST_KEPT:
            at.materialize(v)
        case st.Splat() | st.Parts():
            for x in read_by(value.home):
                _give_home(at, x)


def _carry(at: StageCodeBuilder, carry: int, initial: int) -> int:
    """Give ``carry`` a home that holds ``initial``."""
    source = at.value(initial)
    if carry in at.split.slabs and not source.slab:
        raise CannotLower("a loop that is split over CTAs cannot start from the same numbers for all rows")
    value = dataclasses.replace(source, home=None)
    at.values[carry] = value
    if value.row:
        at.set_row(carry, at.row(initial))
        return carry
    in_image = carry in at.shape.images
    home = _image(carry, value.form) if in_image else _registers(Ref("h", carry), value.form)
    _copy_to_new(at, initial, home)
    at.settle(carry, home)
    return carry


def _image(v: int, form: str) -> st.InImage:
    return st.InImage(Ref("image", v), form, Ref("v", v))


def _registers(ref: Ref, form: str) -> st.InRegisters:
    return st.InRegisters(ref, form, ref)


def _copy_to_new(at: StageCodeBuilder, v: int, home: _Kept, reads: int = 1) -> None:
    """Copy ``v`` to ``home``, which nothing has used before. ``reads``: instructions that then read the copy."""
    value, in_image = at.value(v), isinstance(home, st.InImage)
    if in_image:
        at.once_per_tile(ir.Image(home.ref))
        at.add(ir.Alive(home.owner, 0))
    at.evaluate(value.width, [_written(v, home, reads)])
    if not in_image:
        at.add(ir.Alive(home.owner, value.registers))


def _written(v: int, home: _Kept, reads: int = 1, over: bool = False) -> Keep:
    """The action that writes ``v`` to ``home``. ``over``: over the registers of a value that is no longer read."""
    image = home.ref if isinstance(home, st.InImage) else None
    return Keep(v, home.ref, home.form, to=image, push=True, reads=reads, over=over and image is None)


def _update_carries(at: StageCodeBuilder, carries: Sequence[int], results: Sequence[int]) -> None:
    """Move ``results`` to the homes of the carries, for the next iteration."""
    moved = [(carry, made) for carry, made in zip(carries, results, strict=True) if carry != made]
    fresh = [(carry, _copied_row(at, made, carries)) for carry, made in moved if at.value(carry).row]
    moved = [(carry, made) for carry, made in moved if not at.value(carry).row]
    direct = [(carry, made) for carry, made in moved if isinstance(at.value(carry).home, st.InImage) and _is_elementwise(at, made)]
    added = [(carry, made) for carry, made in moved if _is_added_in_place(at, carry, made, moved)]
    direct += added
    others = [made for carry, made in moved if (carry, made) not in direct]
    pending = [made for made in others if isinstance(at.value(made).home, (st.Expression, st.Multiply))]
    for width, some in _by_width(at, pending):
        at.evaluate(width, [at.keep(v) for v in some])
    copied = [(carry, _copied_tile(at, made, carries)) for carry, made in moved if (carry, made) not in direct]
    alone = [(at.value(carry).width, [carry]) for carry, _ in added[1:]]  # the accumulators of one product at a time are alive
    later = {carry for _, some in alone for carry in some}
    for width, some in (*_by_width(at, [carry for carry, _ in direct if carry not in later]), *alone):
        at.evaluate(width, [_written(made, _home(at, carry), over=True) for carry, made in direct if carry in some])
        at.add(*(ir.Alive(_home(at, carry).owner) for carry in some))
    for carry, made in copied:
        _copy(at, carry, made)
    for carry, ref in fresh:
        to = at.value(carry).home
        assert isinstance(to, st.InRegisters)
        at.add(ir.CopyRegisters(to.ref, ref, 2))


def _by_width(at: StageCodeBuilder, values: Sequence[int]) -> list[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for v in dict.fromkeys(values):
        found.setdefault(at.value(v).width, []).append(v)
    return list(found.items())


def _is_elementwise(at: StageCodeBuilder, v: int) -> bool:
    """Is ``v`` a pending value of the same columns of other values? A loop may then overwrite a carry that it reads: it reads a
    block of all images before it writes one."""

    def visit(v: int) -> bool:
        match at.value(v).home:
            case st.Expression(_, operands):
                return all(map(visit, operands))
            case st.Multiply() | st.Parts():
                return False
        return True

    return isinstance(at.value(v).home, st.Expression) and visit(v)


def _is_added_in_place(at: StageCodeBuilder, carry: int, made: int, moved: Sequence[tuple[int, int]]) -> bool:
    """Is ``made`` a product added to ``carry``, column by column, which no other next carry reads? Each chunk of columns then
    replaces the registers that its accumulators started from."""
    home = at.value(made).home
    if not isinstance(at.value(carry).home, st.InRegisters) or not isinstance(home, st.Multiply) or home.start is None:
        return False
    started = isinstance(at.value(home.start).home, st.InRegisters) or _is_elementwise(at, home.start)
    others = [v for c, v in moved if c != carry] + [*home.pieces]
    return started and at.uses[made] == 1 and not any(_reads(at, v, carry) for v in others)


def _reads(at: StageCodeBuilder, v: int, carry: int) -> bool:
    """Does the pending value ``v`` read ``carry``?"""
    if v == carry:
        return True
    home = at.value(v).home
    pieces = home.pieces if isinstance(home, st.Multiply) else ()
    return any(_reads(at, x, carry) for x in (*pieces, *read_by(home)))


def _home(at: StageCodeBuilder, carry: int) -> _Kept:
    home = at.value(carry).home
    assert isinstance(home, (st.InImage, st.InRegisters))
    return home


def _copied_row(at: StageCodeBuilder, v: int, carries: Sequence[int]) -> Ref:
    """Two registers with the row value ``v`` that updating the carries does not change."""
    home = at.value(v).home
    if isinstance(home, st.InRegisters) and v not in carries:
        return home.ref
    at.counter += 1
    ref = Ref("r", v, f"_{at.counter}")
    at.add(st.SetRow(ref, at.value(v).dtype, at.row(v)))
    return ref


def _copied_tile(at: StageCodeBuilder, v: int, carries: Sequence[int]) -> int:
    """``v``, or a copy if it is a carry, or has no registers or image of its own."""
    home = at.value(v).home
    own = v not in carries and isinstance(home, (st.InRegisters, st.InImage)) and home.ref.kind != "pop"
    return v if own else _in_registers(at, v)


def _in_registers(at: StageCodeBuilder, v: int) -> int:
    """A copy of ``v`` in registers."""
    value = at.value(v)
    copy = at.unnamed(dataclasses.replace(value, home=None))
    home = _registers(Ref("c", v, f"_{-copy}"), value.form)
    _copy_to_new(at, v, home)
    at.settle(copy, home)
    return copy


def _copy(at: StageCodeBuilder, carry: int, made: int) -> None:
    """Copy ``made``, which has registers or an image, to the home of ``carry``."""
    to = at.value(carry)
    if isinstance(to.home, st.InImage):
        at.evaluate(to.width, [_written(made, to.home)])
        at.add(ir.Alive(to.home.owner))
        return
    if isinstance(at.value(made).home, st.InImage):
        made = _in_registers(at, made)
    source = at.value(made).home
    assert isinstance(to.home, st.InRegisters) and isinstance(source, st.InRegisters)
    at.add(ir.CopyRegisters(to.home.ref, source.ref, to.registers), ir.Alive(source.owner), ir.Alive(to.home.owner))


# --- Rows of the next step --------------------------------------------------------------------------------------------------------


class _RowsAhead:
    """The rows that a step of a recurrence reads from arrays, loaded while the step before it runs.

    A lane has no other tile to work on while it waits for rows, and a step begins with them: the product of an LSTM's inputs, the
    actions of a simulator. So they stay in registers from step to step. Those of the next step replace them as soon as nothing in
    this one reads them any more, and arrive during the rest of it. The last step loads its own rows again.
    """

    def __init__(self, at: StageCodeBuilder, instr: Instr):
        self.at, self.instr, self.block = at, instr, instr.block
        assert self.block is not None
        self.loads = [i for i in self.block.body if i.kind == "load_slice" and self._may_be_ahead(i)]
        wide = sum(tiles.registers(self._width(i), self._form(i)) for i in self.loads if not self._is_row(i))
        most = tiles.MOST_AHEAD if at.lanes < 3 else 0  # three lanes have no registers for them, and wait while others work
        if not at.shape.ahead or wide > most or not instr["count"] or instr.get("within") is not None:
            self.loads = []
        if self.loads:
            at.used.add("ahead")
        self.rows = [i for i in self.loads if self._is_row(i)]
        self.tiles = [i for i in self.loads if not self._is_row(i)]
        first = instr["count"] - 1 if instr.get("reverse") else 0
        for i in self.loads:
            (v,) = i.outputs
            at.new(i)
            loaded = self._load(i, st.Number(first), "_first")
            if self._is_row(i):
                at.set_row(v, at.row(loaded))
            else:
                home = _registers(Ref("ahead", v), at.value(v).form)
                _copy_to_new(at, loaded, home)
                at.settle(v, home)
        at.done.update(self.loads)

    def _may_be_ahead(self, i: Instr) -> bool:
        at, (v,) = self.at, i.outputs
        assert self.block is not None
        made = {x for k in walk(self.block.body) for x in k.outputs} | {k.block.index for k in walk(self.block.body) if k.block}
        if not at.program.values[v].tile or self.block.index not in i.inputs or made & {*i.inputs}:
            return False
        if at.facts.slices.makers or (not self._is_row(i) and self._form(i) == "bit"):
            return False
        # Of a slab that a product contracts, every CTA reads all columns from the array (``split.all_gather``).
        pieces = {at.root(p) for k in walk(self.block.body) if k.kind == "matmul" for p in at.split.pieces(k.inputs[0])}
        return at.root(v) not in pieces or v not in at.split.slabs

    def _columns(self, i: Instr) -> int:
        return math.prod(self.at.program.values[i.outputs[0]].shape)

    def _is_row(self, i: Instr) -> bool:
        return self._columns(i) == 1

    def _width(self, i: Instr) -> int:
        return tiles.padded(self._columns(i) // self.at.split.parts(i.outputs[0]))

    def _form(self, i: Instr) -> str:
        (v,) = i.outputs
        return st.StageValue(2, self.at.program.values[v].dtype, False, slab=self.at.split.slabs.get(v, 0)).form

    def _load(self, i: Instr, number: st.Home, part: str = "_next") -> int:
        """A value with the rows of ``i`` in the step of ``number``."""
        at, (v,) = self.at, i.outputs
        assert self.block is not None
        index = at.values[self.block.index]
        at.values[self.block.index] = dataclasses.replace(index, home=number)
        rows, loaded = instructions.slice_rows(at, i, "in", i.inputs), at.unnamed(at.values[v])
        if self._is_row(i):
            at.load_row(loaded, rows, ref=Ref("r", v, part))
        else:
            at.settle(loaded, st.InArray(rows))
        at.values[self.block.index] = index
        return loaded

    def begin_step(self) -> None:
        """Load the numbers of the next step, which take two registers each."""
        if not self.loads:
            return
        at, count = self.at, self.instr["count"]
        assert self.block is not None
        self.number = Ref("next", self.block.index)
        at.add(st.NextStep(self.number, Ref("number", self.block.index), count, bool(self.instr.get("reverse"))))
        self.next_rows = [(i.outputs[0], self._load(i, st.LoopNumber(self.number))) for i in self.rows]

    def end_step(self) -> None:
        """Move the numbers to their registers, and put the loads of wide rows behind the last node that reads the rows before."""
        at = self.at
        for v, loaded in self.next_rows if self.loads else ():
            to, source = at.value(v).home, at.value(loaded).home
            assert isinstance(to, st.InRegisters) and isinstance(source, st.InRegisters)
            at.add(ir.CopyRegisters(to.ref, source.ref, 2))
        for i in self.tiles:
            (v,) = i.outputs
            home = at.value(v).home
            assert isinstance(home, st.InRegisters)
            before, at.nodes = at.nodes, []
            loaded = self._load(i, st.LoopNumber(self.number))
            at.evaluate(at.value(v).width, [_written(loaded, home, over=True)])
            at.add(ir.Alive(home.owner))
            last = max((k for k, node in enumerate(before) if _multiplies(node) or _mentions(node, home.ref)), default=-1)
            before[last + 1 : last + 1] = at.nodes
            at.nodes = before


def _multiplies(node: ir.Node) -> bool:
    """Does the node run products? Rows that arrive beside one take registers that ptxas then spills."""
    match node:
        case st.CountedLoop(body=body) | st.LayerLoop(body=body):
            return any(map(_multiplies, body))
        case st.Evaluate(products=products):
            return bool(products)
    return isinstance(node, st.SingleColumn)


def _mentions(node: Any, ref: Ref) -> bool:
    """Is ``ref`` part of ``node``?"""
    if node == ref:
        return True
    parts = node if isinstance(node, tuple) else map(node.__getattribute__, node.fields()) if isinstance(node, ir.Node) else ()
    return any(_mentions(part, ref) for part in parts)


# --- Equal layers -----------------------------------------------------------------------------------------------------------------

_LONGEST = 32  # most instructions of a layer


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run of equal layers, each fed by the one before. ``segments[k]``: the tile instructions of layer k; ``entry``: the operand
    of layer 0; ``exits[k]``: the result of layer k.

    A loop over them keeps the kernel short, so that it compiles faster and its instructions stay in the instruction cache.
    """

    segments: tuple[tuple[Instr, ...], ...]
    entry: int
    exits: tuple[int, ...]


def find_equal_layers(program: TileProgram, instrs: Sequence[Instr]) -> list[Run]:
    """Disjoint runs of two or more layers, each headed by a matmul, that are equal except for their stationary operands."""
    tile = [i for i in instrs if not i.outputs or program.values[i.outputs[0]].tile]
    readers: dict[int, list[int]] = {}
    for k, instr in enumerate(tile):
        for v in instr.inputs:
            readers.setdefault(v, []).append(k)
    found, at = [], 0
    while at < len(tile):
        run = _run_at(program, tile, readers, at) if tile[at].kind == "matmul" else None
        if run is None:
            at += 1
        else:
            found.append(run)
            at += sum(len(s) for s in run.segments)
    return found


def _run_at(program: TileProgram, tile: Sequence[Instr], readers: dict[int, list[int]], at: int) -> Run | None:
    for period in range(1, min(_LONGEST, len(tile) - at) + 1):
        if at + period < len(tile) and tile[at + period].kind != "matmul":
            continue
        segments, exits = list[tuple[Instr, ...]](), list[int]()
        entry, wanted = tile[at].inputs[0], None
        for start in range(at, len(tile) - period + 1, period):
            segment, inside = tuple(tile[start : start + period]), range(start, start + period)
            signature = _signature(program, segment, entry)
            (exit_,) = segment[-1].outputs or (-1,)
            if signature is None or wanted not in (None, signature) or program.values[exit_] != program.values[entry]:
                break
            own = [v for i in segment for v in i.outputs if v != exit_] + exits[-1:]  # what only this layer may read
            if any(k not in inside for v in own for k in readers.get(v, ())):
                break
            wanted, entry = signature, exit_
            segments.append(segment)
            exits.append(exit_)
        if len(segments) > 1:
            return Run(tuple(segments), tile[at].inputs[0], tuple(exits))
    return None


def _signature(program: TileProgram, segment: Sequence[Instr], entry: int) -> tuple[Any, ...] | None:
    """The computation of a segment, with its operands as positions; None if it has effects or loads."""
    literals = dict(program.literals)
    made: dict[int, int] = {}
    lines = []
    for k, instr in enumerate(segment):
        if len(instr.outputs) != 1 or instr.kind in ("load", "load_slice", "loop", "pop", "gather"):
            return None
        operands: list[Any] = []
        for v in instr.inputs:
            if v == entry:
                operands.append("entry")
            elif v in made:
                operands.append(made[v])
            elif v in literals:
                operands.append((repr(literals[v]), program.values[v].dtype))
            elif not program.values[v].tile:
                operands.append((program.values[v].shape, program.values[v].dtype))
            else:
                operands.append(("outside", v))
        made[instr.outputs[0]] = k
        lines.append((instr.kind, instr.params, tuple(operands), program.values[instr.outputs[0]]))
    return tuple(lines)


_ALL = 1 << 30  # readers: all readers of a layer's result read what the loop passes on


def lower_layers(at: StageCodeBuilder, run: Run) -> None:
    """Lower all layers of ``run`` as a ``LayerLoop`` with the body of the first layer. The operands of all layers are packed at
    equal distances. The value that passes from layer to layer has its own registers, to which a layer's result is copied, or two
    images that alternate."""
    entry, out = at.root(run.entry), at.root(run.exits[0])
    value = at.value(entry)
    if value.row:
        raise CannotLower("a loop over layers of one column has no code on the GPU")
    reads = sum(i.inputs.count(run.entry) for i in run.segments[0])  # by the first layer
    images = [_image(v, value.form) for v in (entry, out)] if at.shape.images & {entry, out} else []
    inside: _Kept = _registers(Ref("h", entry), value.form)
    after = inside
    if images:
        at.must_be_images |= {entry, out}
        for image in images:
            at.once_per_tile(ir.Image(image.ref))
        inside, after = dataclasses.replace(images[0], ref=Ref("image", entry, "_in")), images[len(run.segments) % 2]
    _copy_to_new(at, entry, images[0] if images else inside, reads)
    at.add(*(ir.Alive(image.owner, 0) for image in images[1:]))
    first_weight, per_layer = len(at.weights), sum(i.kind == "matmul" for i in run.segments[0])
    _vectors(at, run)
    at.next_weight = first_weight  # of all layers, layer by layer; the matmuls of layer 0 take theirs in order
    at.weights += [instructions.weight_recipe(at, i) for segment in run.segments for i in segment if i.kind == "matmul"]
    with at.body_of_loop() as body:
        if images:
            at.add(ir.TurnImages(*(image.ref for image in images)))
        at.settle(entry, inside)
        for instr in run.segments[0]:
            instructions.lower_instruction(at, instr)
        if images:
            at.evaluate(value.width, [_written(out, dataclasses.replace(inside, ref=Ref("image", entry, "_out")), _ALL)])
            at.add(*(ir.Alive(image.owner) for image in images))
        else:
            at.materialize(out)
            _copy(at, entry, out)
    at.add(st.LayerLoop(len(run.segments), first_weight, per_layer, tuple(body)))
    at.next_weight = None
    at.layer_vectors = {}
    at.values[entry] = value
    at.values[at.root(run.exits[-1])] = dataclasses.replace(value, home=after)


def _vectors(at: StageCodeBuilder, run: Run) -> None:
    """Add the vectors of all layers, one after the other; those of layer 0 get addresses with the distance to the next layer's."""
    broadcasts = [k for k, i in enumerate(run.segments[0]) if i.kind == "broadcast_in_dim" and column_moves.is_vector(at, i)]
    recipes = [[column_moves.broadcast_recipe(at, segment[k]) for k in broadcasts] for segment in run.segments]
    if not broadcasts:
        return
    at.vectors.append(tuple(r for layer in recipes for r in layer))
    stride, offset = sum(r.words for r in recipes[0]), 0
    for k, recipe in zip(broadcasts, recipes[0], strict=True):
        vector = ir.StationaryVector(len(at.vectors) - 1, offset)
        at.layer_vectors[run.segments[0][k].outputs[0]] = ir.Address(vector, layer=stride)
        offset += recipe.words


# --- All instructions -------------------------------------------------------------------------------------------------------------


def _with_early_rounding(at: StageCodeBuilder, instrs: Sequence[Instr]) -> tuple[Instr, ...]:
    """``instrs`` with each rounding right after the instruction that makes its value, so that a loop that folds the value keeps its
    16-bit form."""
    makers = {v for i in instrs for v in i.outputs}
    moved: dict[int, list[Instr]] = {}
    for i in instrs:
        if is_rounding(at.program, i) and i.inputs[0] in makers:
            moved.setdefault(i.inputs[0], []).append(i)
    found: list[Instr] = []
    for i in instrs:
        if not (is_rounding(at.program, i) and i.inputs[0] in moved):
            found += [i, *(c for v in i.outputs for c in moved.get(v, ()))]
    return tuple(found)


def lower_body(at: StageCodeBuilder, instrs: Sequence[Instr]) -> None:
    """Lower ``instrs``, with loops over equal layers. Raises ``CannotLower``."""
    instrs = _with_early_rounding(at, instrs) if at.repeated else tuple(instrs)
    around, at.instrs = at.instrs, instrs
    found = [] if at.facts.slices.makers else find_equal_layers(at.program, instrs)
    runs = {run.segments[0][0]: run for run in found}
    in_loops = {i for run in runs.values() for segment in run.segments for i in segment}
    for i in instrs:
        if i in runs:
            lower_layers(at, runs[i])
        elif i in in_loops:
            continue
        elif i.kind == "loop":
            _lower_counted_loop(at, i)
        else:
            instructions.lower_instruction(at, i)
    at.instrs = around
