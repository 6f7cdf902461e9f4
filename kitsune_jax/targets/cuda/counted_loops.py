"""Loops with carries: a recurrence over time, or over blocks of keys.

Comes in: a ``loop`` of the tile program, and the ``Evaluation`` of its stage. Goes out: a ``CountedLoop`` whose body is the
instructions of the loop's block. A carry has registers of its own for as long as the loop runs, or an image in shared memory where
it does not fit. Invariants: what the body reads of the code around it has a home before the loop begins, because a value that waits
to be evaluated would be evaluated, and kept, inside; and all next carries are made before the first carry changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from kitsune_jax.program.ir import Block, Instr, walk
from kitsune_jax.targets.cuda import cuts, exchanges
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Address, Keep, Ref
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.values import (
    Expression,
    InArray,
    InImage,
    InRegisters,
    InVector,
    LoopNumber,
    Multiply,
    Parts,
    Splat,
    Value,
)
from kitsune_jax.targets.errors import CannotLower

# Registers of a streamed value that the body reads in every iteration: a wider one is read from its array again.
_MOST_KEPT = 32
Body = Callable[[Evaluation, Sequence[Instr]], None]


def lower(at: Evaluation, instr: Instr, lower_body: Body) -> None:
    """Lowers ``instr`` and, by ``lower_body``, what it repeats."""
    block = instr.block
    assert block is not None
    seen, which = _seen(at, instr)
    if any(i.kind == "sink_at" and i["sorted"] for i in block.body):
        raise CannotLower("a sink by sorted indices in a loop: each iteration has an order of its own")
    for v in _from_outside(block):
        _bring_home(at, v)
    carries = [_carry(at, *pair) for pair in zip(block.carries, instr.inputs, strict=True)]
    number = Ref("number", block.index)
    at.values[block.index] = Value(1, "int32", True, LoopNumber(number))
    row_tiles, repeated = dict(at.row_tiles), at.repeated
    at.repeated = True
    known = at.gathered
    with at.body_of_loop() as body:
        exchanges.begin(at, block.body, carries)
        lower_body(at, block.body)
        _hand_on(at, carries, [at.root(v) for v in block.results])
        exchanges.give_back(at, known)
    at.repeated = repeated
    at.row_tiles = row_tiles  # those of the body are out of sight behind it
    at.add(st.CountedLoop(number, instr["count"], bool(instr.get("reverse")), tuple(body), seen, which))
    for v, carry in zip(instr.outputs, carries, strict=True):
        at.values[at.root(v)] = at.values[carry]


def _seen(at: Evaluation, instr: Instr) -> tuple[Ref | None, str]:
    """The blocks that a loop has to look at, and which of them it takes. The lanes of a CTA, which share the blocks, look at those
    that one of them sees: what a mask hides from a lane's rows it hides there as well."""
    within = instr.get("within")
    if within is None:
        return None, "all"
    if not cuts.by_groups(at.program):
        raise CannotLower(
            "a loop that leaves out iterations by the rows of a tile, and has no weights of its own, has no code on the GPU"
        )
    if instr.get("reverse"):
        raise CannotLower("a loop that leaves out iterations and counts down has no code on the GPU")
    axis, step, low, high, which = within
    inner = math.prod(at.program.axes[axis + 1 :])
    bounds = (inner, at.program.axes[axis], step, low, high, instr["count"], *_shift(at, instr))
    found = [node for node in at.prologue if isinstance(node, st.SeenBlocks)]
    ref = next((node.ref for node in found if node == st.SeenBlocks(node.ref, *bounds)), Ref("seen", len(found)))
    at.once_per_tile(st.SeenBlocks(ref, *bounds))
    return ref, which


def _shift(at: Evaluation, instr: Instr) -> tuple[Address, int, str, int] | tuple[()]:
    """Where the number lies that shifts the bounds of a loop, and how it does."""
    if (shifted := instr.get("shifted")) is None:
        return ()
    array, sign, guard, size = shifted
    loads = (i for i in walk(at.facts.instrs) if i.kind == "load" and i["array"] == array)
    for home in (at.value(v).home for i in loads for v in i.outputs):
        if isinstance(home, InVector):
            return home.address, sign, guard, size
    raise CannotLower("bounds of a loop that are shifted by a number which the stage does not load")


def _from_outside(block: Block) -> list[int]:
    """What the body reads, and does not make."""
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


def _bring_home(at: Evaluation, v: int) -> None:
    """Gives ``v`` a home that stays the same in all iterations."""
    if v in at.facts.joined:
        for part in at.facts.joined[v]:
            _bring_home(at, part)
        return
    if at.root(v) not in at.values:  # a stationary value, which has no home of its own
        return
    value = at.value(v)
    match value.home:
        case Expression() | Multiply():
            at.materialize(v)
        case InArray() if not value.row and value.registers <= _MOST_KEPT:
            at.materialize(v)
        case Splat(of):
            _bring_home(at, of)
        case Parts(parts):
            for part, _, _ in parts:
                _bring_home(at, part)


def _carry(at: Evaluation, carry: int, initial: int) -> int:
    """Gives ``carry`` its home, which holds ``initial``."""
    source = at.value(initial)
    if at.is_slab(carry) and not source.slab:
        raise CannotLower("a loop that begins with the same numbers for all rows, split over CTAs, has no code on the GPU")
    value = dataclasses.replace(source, home=None)
    at.values[carry] = value
    if value.row:
        at.set_row(carry, at.row(initial))
        return carry
    ref = Ref("h", carry)
    if carry in at.shape.images:
        image, owner = Ref("image", carry), Ref("v", carry)
        at.once_per_tile(st.Image(image))
        at.add(st.Alive(owner, 0))
        at.evaluate(value.width, [Keep(initial, image, value.form, to=image, push=True, reads=1)])
        at.settle(carry, InImage(image, value.form, owner))
    else:
        at.evaluate(value.width, [Keep(initial, ref, value.form, push=True, reads=1)])
        at.add(st.Alive(ref, value.registers))
        at.settle(carry, InRegisters(ref, value.form, ref))
    return carry


def _hand_on(at: Evaluation, carries: Sequence[int], results: Sequence[int]) -> None:
    """The next iteration finds ``results`` where the carries are."""
    moved = [(carry, made) for carry, made in zip(carries, results, strict=True) if carry != made]
    fresh = [(carry, _row_of_its_own(at, made, carries)) for carry, made in moved if at.value(carry).row]
    moved = [(carry, made) for carry, made in moved if not at.value(carry).row]
    direct = [(carry, made) for carry, made in moved if isinstance(at.value(carry).home, InImage) and _is_elementwise(at, made)]
    added = [(carry, made) for carry, made in moved if _is_added_to(at, carry, made, moved)]
    direct += added
    for width, some in _by_width(at, [made for carry, made in moved if (carry, made) not in direct and _waits(at, made)]):
        at.evaluate(width, [at.keep(v) for v in some])
    copied = [(carry, _tile_of_its_own(at, made, carries)) for carry, made in moved if (carry, made) not in direct]
    alone = [(at.value(carry).width, [carry]) for carry, _ in added[1:]]  # so that accumulators of one product at a time are alive
    later = {carry for _, some in alone for carry in some}
    for width, some in (*_by_width(at, [carry for carry, _ in direct if carry not in later]), *alone):
        at.evaluate(width, [_over(at, carry, made) for carry, made in direct if carry in some])
        at.add(*(st.Alive(_home(at, carry).owner) for carry in some))
    for carry, made in copied:
        _copy(at, carry, made)
    for carry, ref in fresh:
        to = at.value(carry).home
        assert isinstance(to, InRegisters)
        at.add(st.CopyRegisters(to.ref, ref, 2))


def _by_width(at: Evaluation, values: Sequence[int]) -> list[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for v in dict.fromkeys(values):
        found.setdefault(at.value(v).width, []).append(v)
    return list(found.items())


def _waits(at: Evaluation, v: int) -> bool:
    return isinstance(at.value(v).home, (Expression, Multiply))


def _is_elementwise(at: Evaluation, v: int) -> bool:
    """Is ``v`` still to be made, of the same columns of other values? Then a loop may write it over a carry that it reads: it
    writes a block of images after it has read that of all."""

    def visit(v: int) -> bool:
        match at.value(v).home:
            case Expression(_, operands):
                return all(map(visit, operands))
            case Multiply() | Parts():
                return False
        return True

    return isinstance(at.value(v).home, Expression) and visit(v)


def _is_added_to(at: Evaluation, carry: int, made: int, moved: Sequence[tuple[int, int]]) -> bool:
    """Is ``made`` a product that is added to ``carry``, column by column, and does no other next carry wait for it? Then each chunk
    of columns takes the place of those that its accumulators started from."""
    home = at.value(made).home
    if not isinstance(at.value(carry).home, InRegisters) or not isinstance(home, Multiply) or home.start is None:
        return False
    started = isinstance(at.value(home.start).home, InRegisters) or _is_elementwise(at, home.start)
    others = [v for c, v in moved if c != carry] + [*home.pieces]
    return started and at.uses[made] == 1 and not any(_reads(at, v, carry) for v in others)


def _reads(at: Evaluation, v: int, carry: int) -> bool:
    """Does what is still to be made of ``v`` read ``carry``?"""
    if v == carry:
        return True
    match at.value(v).home:
        case Expression(_, operands):
            return any(_reads(at, x, carry) for x in operands)
        case Multiply(pieces=pieces, start=start):
            return any(_reads(at, x, carry) for x in (*pieces, *(() if start is None else (start,))))
        case Parts(parts):
            return any(_reads(at, x, carry) for x, _, _ in parts)
        case Splat(of):
            return _reads(at, of, carry)
    return False


def _home(at: Evaluation, carry: int) -> InImage | InRegisters:
    home = at.value(carry).home
    assert isinstance(home, (InImage, InRegisters))
    return home


def _over(at: Evaluation, carry: int, made: int) -> Keep:
    """``made`` takes the place of ``carry``."""
    form, home = at.value(carry).form, _home(at, carry)
    if isinstance(home, InImage):
        return Keep(made, home.ref, form, to=home.ref, push=True, reads=1)
    return Keep(made, home.ref, form, push=True, reads=1, over=True)


def _row_of_its_own(at: Evaluation, v: int, carries: Sequence[int]) -> Ref:
    """Two registers with the number of each row that ``v`` is, which no carry's next value changes."""
    home = at.value(v).home
    if isinstance(home, InRegisters) and v not in carries:
        return home.ref
    at.counter += 1
    ref = Ref("r", v, f"_{at.counter}")
    at.add(st.SetRow(ref, at.value(v).dtype, at.row(v)))
    return ref


def _tile_of_its_own(at: Evaluation, v: int, carries: Sequence[int]) -> int:
    """``v``, or a copy of it where it is one of the carries, or lies where no loop over columns has put it."""
    home = at.value(v).home
    own = v not in carries and isinstance(home, (InRegisters, InImage)) and home.ref.kind != "pop"
    return v if own else _in_registers(at, v)


def _in_registers(at: Evaluation, v: int) -> int:
    """A copy of ``v``."""
    value = at.value(v)
    copy = at.unnamed(dataclasses.replace(value, home=None))
    ref = Ref("c", v, f"_{-copy}")
    at.evaluate(value.width, [Keep(v, ref, value.form, push=True, reads=1)])
    at.add(st.Alive(ref, value.registers))
    at.settle(copy, InRegisters(ref, value.form, ref))
    return copy


def _copy(at: Evaluation, carry: int, made: int) -> None:
    """``made``, which has registers or an image, to where ``carry`` is."""
    to = at.value(carry)
    if isinstance(to.home, InImage):
        at.evaluate(to.width, [_over(at, carry, made)])
        at.add(st.Alive(to.home.owner))
        return
    if isinstance(at.value(made).home, InImage):
        made = _in_registers(at, made)
    source = at.value(made).home
    assert isinstance(to.home, InRegisters) and isinstance(source, InRegisters)
    at.add(st.CopyRegisters(to.home.ref, source.ref, to.registers), st.Alive(source.owner), st.Alive(to.home.owner))
