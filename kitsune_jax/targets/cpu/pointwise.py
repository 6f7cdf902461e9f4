"""Schedules a stage: gathers pointwise instructions into groups, each of which becomes one ``Vector``.

Comes in: a ``Stage``. Goes out: a list of items in an order that computes every value before it is read. An instruction joins a
group of the same loop (its row shape without dimensions of extent 1) if all it reads is available by then; a value that only its
group reads never leaves a register.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import Instr, walk
from kitsune_jax.program.passes import VIEWS
from kitsune_jax.targets.cpu import memory, vectors
from kitsune_jax.targets.cpu.memory import View
from kitsune_jax.targets.cpu.stage import StageLowering
from kitsune_jax.targets.cpu.vectors import TooManyRegisters, VectorBuilder, compute_type, is_pointwise

_NO_ITEM = frozenset({"load", "load_slice", "pop", "row_index", "iota", "cut", "empty"})
Shape = tuple[bool, tuple[int, ...]]  # of the loops over a value: whether they run over rows, and the extents other than 1


@dataclasses.dataclass
class Item:
    """A group of pointwise instructions over ``loop``, or (``loop`` None) one other instruction."""

    loop: Shape | None
    ops: list[int]
    touches: set[int] = dataclasses.field(default_factory=set)  # roots of the values that a group reads or makes


def schedule(stage: StageLowering) -> list[Item]:
    """The items of ``stage``, in order."""
    items: list[Item] = []
    at: dict[int, int] = {}  # root -> item that makes it; absent for values from outside
    direct: set[int] = set()  # roots that their group holds in a register
    for i, instr in enumerate(stage.body):
        if instr.kind in _NO_ITEM or i in stage.absorbed:
            continue
        inputs = {stage.root(v) for v in (*instr.inputs, *captured(instr))}
        ready = max((at[r] for r in inputs if r in at), default=-1)
        out = stage.root(instr.outputs[0]) if instr.outputs else -1
        if i in stage.exponentials:
            found = stage.exponentials[i]
            items.append(Item(None, [i]))
            at.update({stage.root(v): len(items) - 1 for v in (out, found.out, *(() if found.sums is None else (found.sums,)))})
            continue
        if i in stage.late_products:
            at[out] = ready  # its item comes where it is added
            continue
        if i in stage.late:
            items.append(Item(None, [stage.late[i].product]))
            at[out] = len(items) - 1
            continue
        if i in stage.added:
            at[out] = ready  # the item of the later product
            continue
        if out in stage.leaves or (instr.outputs and out != instr.outputs[0]):
            continue
        if instr.kind in VIEWS or (is_pointwise(instr.kind) and stage.widened(out) is not None):
            at[out] = ready
        elif is_pointwise(instr.kind):
            at[out] = _join(stage, items, i, inputs, at, direct)
            direct.add(out)
        else:
            items.append(Item(None, [i]))
            at.update(dict.fromkeys(instr.outputs, len(items) - 1))
    _sink_parts(stage, items)
    return [item for item in items if item.ops]


def _join(stage: StageLowering, items: list[Item], i: int, inputs: set[int], at: dict[int, int], direct: set[int]) -> int:
    """Put pointwise instruction ``i`` into a group; returns the group's position in ``items``."""
    out = stage.body[i].outputs[0]
    loop = shape_of(stage, out)
    first = 0
    for r in inputs:
        if r in at:
            held = r in direct and shape_of(stage, r) == loop
            first = max(first, at[r] if held else at[r] + 1)
    fitting = [k for k in range(first, len(items)) if items[k].loop == loop]
    if not fitting:
        items.append(Item(loop, []))
        fitting = [len(items) - 1]
    near = [k for k in fitting if items[k].touches & inputs]
    chosen = (near or fitting)[-1]
    items[chosen].ops.append(i)
    items[chosen].touches |= inputs | {out}
    return chosen


def _sink_parts(stage: StageLowering, items: list[Item]) -> None:
    """Move each connected part of a group into the one later group that reads it, so that values pass in registers.

    The operands of a moved part lie in memory that nothing overwrites. Example: the silu of a gate moves behind the second matrix
    product of a SwiGLU block, to the multiplication that reads both.
    """
    group_of = {i: k for k, item in enumerate(items) if item.loop is not None for i in item.ops}
    for k in range(len(items) - 1, -1, -1):
        for part in _parts(stage, items[k]):
            users = {j for i in part for j, _ in stage.uses.get(stage.body[i].outputs[0], ())} - part
            targets = {group_of.get(j, -1) for j in users}
            if len(targets) != 1:
                continue
            (target,) = targets
            if target > k and items[target].loop == items[k].loop:
                items[k].ops = [i for i in items[k].ops if i not in part]
                items[target].ops = sorted({*items[target].ops, *part})
                group_of.update(dict.fromkeys(part, target))


def _parts(stage: StageLowering, item: Item) -> list[set[int]]:
    """The instructions of a group as parts; instructions are connected if one reads another's result in a register."""
    parts: list[set[int]] = []
    for i in item.ops if item.loop is not None else ():
        makers = {stage.root(v) for v in stage.body[i].inputs}
        near = [p for p in parts if any(stage.body[j].outputs[0] in makers for j in p)]
        parts = [p for p in parts if p not in near] + [set().union({i}, *near)]
    return parts


def emit_group(stage: StageLowering, ops: list[int], loop: Shape) -> None:
    """Append the ``Vector`` of a group to the stage, or several where one needs too many registers."""
    saved = len(stage.code), dict(stage.views), set(stage.satisfied), len(stage.buffer_bytes)
    try:
        _emit(stage, ops, loop)
    except TooManyRegisters:
        del stage.code[saved[0] :]
        del stage.buffer_bytes[saved[3] :]
        stage.views, stage.satisfied = saved[1], saved[2]
        half = len(ops) // 2
        emit_group(stage, ops[:half], loop)
        emit_group(stage, ops[half:], loop)


def _emit(stage: StageLowering, ops: list[int], loop: Shape) -> None:
    builder, registers, inside = VectorBuilder(loop[1]), dict[int, int](), set(ops)
    computed: dict[int, int] = {}  # like ``registers``, but before rounding
    stores: list[tuple[int, View, int]] = []  # (the last instruction that reads the place's old value, place, register)
    stored = False
    for i in ops:
        instr = stage.body[i]
        out = instr.outputs[0]
        shape = stage.type(out).shape
        args = []
        for v in instr.inputs:
            held = (computed if _keeps_digits(stage, instr, v) else registers).get(stage.root(v))
            whole = shape_of(stage, v) == loop
            args.append(held if held is not None and whole else stage.read(builder, v, shape))
        dtypes = [stage.type(v).dtype for v in instr.inputs]
        dtype = stage.type(out).dtype
        rounds = any(j in inside for j, _ in stage.uses.get(out, ()))
        computed[out] = registers[out] = vectors.emit_micro_operations(builder, instr, args, dtypes, dtype, rounds)
        if rounds and stage.root(out) in stage.rounded.values:
            registers[out] = builder.rounded(registers[out], dtype)
        places, last = stage.places(out, inside)
        for place in places:
            made = computed[out] if place.dtype == dtype else registers[out]  # a store rounds
            stores.append((last, place, builder.convert(made, compute_type(dtype), compute_type(place.dtype))))
            stored = True
        for _, place, value in [store for store in stores if store[0] <= i]:
            builder.store(place, value)
        stores = [store for store in stores if store[0] > i]
    if stored:
        stage.emit(builder.finish(), tile=loop[0])


def _keeps_digits(stage: StageLowering, instr: Instr, v: int) -> bool:
    """Whether ``instr`` takes the unrounded digits of ``v``."""
    dtype, out = stage.type(v).dtype, stage.type(instr.outputs[0]).dtype
    return stage.root(v) not in stage.rounded.everywhere and stage.rounding.takes_digits(instr.kind, dtype, out)


def shape_of(stage: StageLowering, v: int) -> Shape:
    return stage.type(v).tile, memory.squeezed(stage.type(v).shape)


def captured(instr: Instr) -> set[int]:
    """Values outside of a loop that its body reads."""
    if instr.block is None:
        return set()
    inside = list(walk(instr.block.body))
    read = {v for i in inside for v in (*i.inputs, *(i.block.results if i.block else ()))}
    own = {v for i in inside for v in (*i.outputs, *((i.block.index, *i.block.carries) if i.block else ()))}
    return (read | set(instr.block.results)) - own - {instr.block.index, *instr.block.carries}
