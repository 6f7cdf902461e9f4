"""Lowering of the instructions of a stage in order, of loops with carries, and of runs of equal layers as loops.

Comes in: instructions, and the ``StageBuilder`` of their stage. Goes out: nodes, with a ``CountedLoop`` for each loop and a
``LayerLoop`` for each run of equal layers. Raises ``CannotLower``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import Block, Instr, TileProgram, walk
from kitsune_jax.targets.cuda import ir, pack
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.ir import Address, Keep, Ref
from kitsune_jax.targets.cuda.stage import columns, instructions, split
from kitsune_jax.targets.cuda.stage.builder import StageCodeBuilder
from kitsune_jax.targets.cuda.stage.facts import is_rounding

# --- Loops with carries: a recurrence over time, or over blocks of keys -----------------------------------------------------------

_MOST_KEPT = 32  # registers of a streamed value that is kept for all iterations; wider ones are read from their arrays again
Body = Callable[[StageCodeBuilder, Sequence[Instr]], None]


def lower_counted_loop(at: StageCodeBuilder, instr: Instr, lower_body: Body) -> None:
    """Lower ``instr``, with ``lower_body`` for its body.

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
    carries = [_carry(at, *pair) for pair in zip(block.carries, instr.inputs, strict=True)]
    number = Ref("number", block.index)
    at.values[block.index] = st.StageValue(1, "int32", True, st.LoopNumber(number))
    row_tiles, repeated = dict(at.row_tiles), at.repeated
    at.repeated = True
    known = at.gathered
    with at.body_of_loop() as body:
        split.begin_all_gathers(at, block.body, carries)
        lower_body(at, block.body)
        _update_carries(at, carries, [at.root(v) for v in block.results])
        split.release_entries(at, known)
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


def _outer_values(block: Block) -> list[int]:
    """Values that the body reads but does not make."""
    inside, read = set[int](), dict[int, None]()
    made = [*block.carries, block.index]
    for i in walk(block.body):
        read.update(dict.fromkeys(i.inputs))
        made += i.outputs
        if i.block is not None:
            made += [i.block.index, *i.block.carries]
            read.update(dict.fromkeys(i.block.results))
    read.update(dict.fromkeys(block.results))
    inside.update(made)
    return [v for v in read if v not in inside]


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
        case st.Splat(of):
            _give_home(at, of)
        case st.Parts(parts):
            for part, _, _ in parts:
                _give_home(at, part)


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
    ref = Ref("h", carry)
    if carry in at.shape.images:
        image, owner = Ref("image", carry), Ref("v", carry)
        at.once_per_tile(ir.Image(image))
        at.add(ir.Alive(owner, 0))
        at.evaluate(value.width, [Keep(initial, image, value.form, to=image, push=True, reads=1)])
        at.settle(carry, st.InImage(image, value.form, owner))
    else:
        at.evaluate(value.width, [Keep(initial, ref, value.form, push=True, reads=1)])
        at.add(ir.Alive(ref, value.registers))
        at.settle(carry, st.InRegisters(ref, value.form, ref))
    return carry


def _update_carries(at: StageCodeBuilder, carries: Sequence[int], results: Sequence[int]) -> None:
    """Move ``results`` to the homes of the carries, for the next iteration."""
    moved = [(carry, made) for carry, made in zip(carries, results, strict=True) if carry != made]
    fresh = [(carry, _copied_row(at, made, carries)) for carry, made in moved if at.value(carry).row]
    moved = [(carry, made) for carry, made in moved if not at.value(carry).row]
    direct = [(carry, made) for carry, made in moved if isinstance(at.value(carry).home, st.InImage) and _is_elementwise(at, made)]
    added = [(carry, made) for carry, made in moved if _is_added_in_place(at, carry, made, moved)]
    direct += added
    for width, some in _by_width(at, [made for carry, made in moved if (carry, made) not in direct and _is_pending(at, made)]):
        at.evaluate(width, [at.keep(v) for v in some])
    copied = [(carry, _copied_tile(at, made, carries)) for carry, made in moved if (carry, made) not in direct]
    alone = [(at.value(carry).width, [carry]) for carry, _ in added[1:]]  # the accumulators of one product at a time are alive
    later = {carry for _, some in alone for carry in some}
    for width, some in (*_by_width(at, [carry for carry, _ in direct if carry not in later]), *alone):
        at.evaluate(width, [_overwrite(at, carry, made) for carry, made in direct if carry in some])
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


def _is_pending(at: StageCodeBuilder, v: int) -> bool:
    return isinstance(at.value(v).home, (st.Expression, st.Multiply))


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
    match at.value(v).home:
        case st.Expression(_, operands):
            return any(_reads(at, x, carry) for x in operands)
        case st.Multiply(pieces=pieces, start=start):
            return any(_reads(at, x, carry) for x in (*pieces, *(() if start is None else (start,))))
        case st.Parts(parts):
            return any(_reads(at, x, carry) for x, _, _ in parts)
        case st.Splat(of):
            return _reads(at, of, carry)
    return False


def _home(at: StageCodeBuilder, carry: int) -> st.InImage | st.InRegisters:
    home = at.value(carry).home
    assert isinstance(home, (st.InImage, st.InRegisters))
    return home


def _overwrite(at: StageCodeBuilder, carry: int, made: int) -> Keep:
    """The action that writes ``made`` to the home of ``carry``."""
    form, home = at.value(carry).form, _home(at, carry)
    if isinstance(home, st.InImage):
        return Keep(made, home.ref, form, to=home.ref, push=True, reads=1)
    return Keep(made, home.ref, form, push=True, reads=1, over=True)


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
    ref = Ref("c", v, f"_{-copy}")
    at.evaluate(value.width, [Keep(v, ref, value.form, push=True, reads=1)])
    at.add(ir.Alive(ref, value.registers))
    at.settle(copy, st.InRegisters(ref, value.form, ref))
    return copy


def _copy(at: StageCodeBuilder, carry: int, made: int) -> None:
    """Copy ``made``, which has registers or an image, to the home of ``carry``."""
    to = at.value(carry)
    if isinstance(to.home, st.InImage):
        at.evaluate(to.width, [_overwrite(at, carry, made)])
        at.add(ir.Alive(to.home.owner))
        return
    if isinstance(at.value(made).home, st.InImage):
        made = _in_registers(at, made)
    source = at.value(made).home
    assert isinstance(to.home, st.InRegisters) and isinstance(source, st.InRegisters)
    at.add(ir.CopyRegisters(to.home.ref, source.ref, to.registers), ir.Alive(source.owner), ir.Alive(to.home.owner))


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
        segments, exits = [], []
        entry = tile[at].inputs[0]
        start, wanted = at, None
        while start + period <= len(tile):
            segment = tuple(tile[start : start + period])
            signature = _signature(program, segment, entry)
            (exit_,) = segment[-1].outputs or (-1,)
            if signature is None or wanted not in (None, signature) or not _is_closed(segment, start, readers, exit_):
                break
            if program.values[exit_] != program.values[entry]:
                break
            wanted = signature
            segments.append(segment)
            exits.append(exit_)
            entry, start = exit_, start + period
        while len(segments) > 1 and not _feeds_next_only(segments, exits, at, period, readers):
            segments.pop()
            exits.pop()
        if len(segments) > 1:
            return Run(tuple(segments), tile[at].inputs[0], tuple(exits))
    return None


def _is_closed(segment: Sequence[Instr], start: int, readers: dict[int, list[int]], exit_: int) -> bool:
    """Are all values of the segment, except its last, read only inside of it?"""
    inside = range(start, start + len(segment))
    return all(k in inside for i in segment for v in i.outputs if v != exit_ for k in readers.get(v, ()))


def _feeds_next_only(segments: Sequence[Any], exits: Sequence[int], at: int, period: int, readers: dict[int, list[int]]) -> bool:
    """Is the result of each layer, except the last, read only by the next layer?"""
    for k, v in enumerate(exits[:-1]):
        first = at + (k + 1) * period
        if any(r not in range(first, first + period) for r in readers.get(v, ())):
            return False
    return True


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
    equal distances; the value that passes from layer to layer has its own registers, or two images that alternate."""
    entry, out = at.root(run.entry), at.root(run.exits[0])
    value = at.value(entry)
    if value.row:
        raise CannotLower("a loop over layers of one column has no code on the GPU")
    in_images = bool(at.shape.images & {entry, out})
    if in_images:
        at.must_be_images |= {entry, out}
    handover = _LayerImages(at, run, entry, out) if in_images else _LayerRegisters(at, run, entry)
    handover.enter()
    first_weight, per_layer = len(at.weights), sum(i.kind == "matmul" for i in run.segments[0])
    _vectors(at, run)
    _weights(at, run)
    with at.body_of_loop() as body:
        at.settle(entry, handover.inside())
        for instr in run.segments[0]:
            instructions.lower_instruction(at, instr)
        handover.pass_on(out)
    at.add(st.LayerLoop(len(run.segments), first_weight, per_layer, tuple(body)))
    at.next_weight = None
    at.layer_vectors = {}
    at.values[entry] = value
    at.values[at.root(run.exits[-1])] = dataclasses.replace(value, home=handover.after())


def _vectors(at: StageCodeBuilder, run: Run) -> None:
    """Add the vectors of all layers, one after the other; those of layer 0 get addresses with the distance to the next layer's."""
    broadcasts = [k for k, i in enumerate(run.segments[0]) if i.kind == "broadcast_in_dim" and columns.is_vector(at, i)]
    recipes = [[columns.broadcast_recipe(at, segment[k]) for k in broadcasts] for segment in run.segments]
    if not broadcasts:
        return
    at.vectors.append(tuple(r for layer in recipes for r in layer))
    stride, offset = sum(r.words for r in recipes[0]), 0
    for k, recipe in zip(broadcasts, recipes[0], strict=True):
        vector = ir.StationaryVector(len(at.vectors) - 1, offset)
        at.layer_vectors[run.segments[0][k].outputs[0]] = ir.Address(vector, layer=stride)
        offset += recipe.words


def _weights(at: StageCodeBuilder, run: Run) -> None:
    """Add the recipes of all layers' weights, layer by layer; the matmuls of layer 0 take theirs in order."""
    at.next_weight = len(at.weights)
    at.weights += [instructions.weight_recipe(at, i) for segment in run.segments for i in segment if i.kind == "matmul"]


class _LayerRegisters:
    """The value that passes from layer to layer, in registers: a layer's result is copied to where the next layer reads it."""

    def __init__(self, at: StageCodeBuilder, run: Run, entry: int):
        self.at, self.entry, self.value = at, entry, at.value(entry)
        self.reads = sum(i.inputs.count(run.entry) for i in run.segments[0])  # of the first layer
        self.ref = Ref("h", entry)

    def enter(self) -> None:
        self.at.evaluate(self.value.width, [Keep(self.entry, self.ref, self.value.form, push=True, reads=self.reads)])
        self.at.add(ir.Alive(self.ref, self.value.registers))

    def inside(self) -> st.InRegisters | st.InImage:
        return st.InRegisters(self.ref, self.value.form, self.ref)

    def pass_on(self, out: int) -> None:
        self.at.materialize(out)
        made = self.at.value(out).home
        assert isinstance(made, st.InRegisters)
        copy = ir.CopyRegisters(self.ref, made.ref, self.value.registers)
        self.at.add(copy, ir.Alive(made.owner), ir.Alive(self.ref))

    def after(self) -> st.InRegisters | st.InImage:
        return self.inside()


class _LayerImages:
    """The value that passes from layer to layer, in two images in shared memory, which alternate."""

    def __init__(self, at: StageCodeBuilder, run: Run, entry: int, out: int):
        self.at, self.value = at, at.value(entry)
        self.reads = sum(i.inputs.count(run.entry) for i in run.segments[0])
        self.values, self.layers = (entry, out), len(run.segments)
        self.refs = tuple(Ref("image", v) for v in self.values)
        self.owners = tuple(Ref("v", v) for v in self.values)

    def enter(self) -> None:
        for ref in self.refs:
            self.at.once_per_tile(ir.Image(ref))
        self.at.add(ir.Alive(self.owners[0], 0))
        first = self.refs[0]
        self.at.evaluate(self.value.width, [Keep(self.values[0], first, self.value.form, to=first, push=True, reads=self.reads)])
        self.at.add(ir.Alive(self.owners[1], 0))

    def inside(self) -> st.InRegisters | st.InImage:
        self.at.add(ir.TurnImages(*self.refs))
        return st.InImage(Ref("image", self.values[0], "_in"), self.value.form, self.owners[0])

    def pass_on(self, out: int) -> None:
        to = Ref("image", self.values[0], "_out")
        self.at.evaluate(self.value.width, [Keep(out, to, self.value.form, to=to, push=True, reads=_ALL)])
        self.at.add(*map(ir.Alive, self.owners))

    def after(self) -> st.InRegisters | st.InImage:
        last = self.layers % 2
        return st.InImage(self.refs[last], self.value.form, self.owners[last])


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
        elif i in in_loops or i in at.done:
            continue
        elif i.kind == "loop":
            lower_counted_loop(at, i, lower_body)
        else:
            instructions.lower_instruction(at, i)
    at.instrs = around
