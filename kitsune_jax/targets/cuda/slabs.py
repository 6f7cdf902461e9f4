"""Which values of a stage are slabs: their columns shared out over the CTAs of the stage.

Comes in: the stage's instructions and in how many slabs it is split. Goes out: the values, each with its *groups*. The results of
its matmuls are slabs, and so is whatever meets one in a pointwise operator; a matmul's operand never is, because it contracts all
columns. Of a weight gradient one operand is: the one whose columns become the columns of the accumulators.

A stage with a loop carries slabs from step to step, so a product may read what is one: its CTAs then hand each other their columns
(``exchanges.py``). A value that is cut into equal parts, as the gates of an LSTM, has that many groups of columns, and a slab of it
is a slab of each group. Where such a product contracts more bytes than the sums that it makes have, as that of the cotangents of
gates does, it is *partial*: each CTA multiplies its columns with its rows of the weights, and they hand each other the sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from kitsune_jax.program.ir import SINKS, Instr, TileProgram, walk
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS, SUM_BYTES, gradient_shapes, is_half
from kitsune_jax.targets.errors import CannotLower

Joined = Mapping[int, Sequence[int]]  # concatenations that only matmuls read -> their parts


def of_stage(instrs: Sequence[Instr], program: TileProgram, split: int, lanes: int, joined: Joined) -> dict[int, int]:
    """The slabs, with the groups of each. Raises ``CannotLower`` where the stage cannot be split so."""
    if split == 1:
        return {}
    if any(i.block is not None for i in instrs):
        return _of_loops(instrs, program, split, joined)

    found = {v for i in instrs if i.kind == "matmul" for v in i.outputs}
    for v in found:
        _check_columns(program, v, split)
    _spread(instrs, program, found)
    for i in instrs:
        if i.kind == "matmul_sink":
            found = _of_gradient(i, instrs, program, split, lanes, found)
    if any(i.kind == "matmul" and i.inputs[0] in found for i in instrs):
        raise CannotLower("a matmul reads columns that are split over CTAs")
    return dict.fromkeys(sorted(found), 1)


def _check_columns(program: TileProgram, v: int, parts: int) -> None:
    columns = _columns(program, v)
    if columns % (parts * BLOCK_COLUMNS):
        raise CannotLower(f"{columns} columns are not {parts} slabs of whole blocks of {BLOCK_COLUMNS}")


def _of_gradient(
    gradient: Instr, instrs: Sequence[Instr], program: TileProgram, split: int, lanes: int, found: set[int]
) -> set[int]:
    """``found`` with the operand of ``gradient`` whose columns are shared out: the better one whose slabs leave the other whole."""
    first, second = gradient.inputs
    half = is_half(program.values[first].dtype)
    for shape in gradient_shapes(_columns(program, first), _columns(program, second), half, split, lanes):
        rows, columns = (second, first) if shape.swapped else (first, second)
        slabs = {*found, columns}
        _spread(instrs, program, slabs)
        if rows not in slabs:
            return slabs
    raise CannotLower(f"a weight gradient does not fit the registers of {split} CTAs")


def _columns(program: TileProgram, v: int) -> int:
    return math.prod(program.values[v].shape)


def _is_wide(program: TileProgram, v: int) -> bool:
    return program.values[v].tile and _columns(program, v) != 1


_APART = frozenset({"matmul", "load", "pop", "push", "store", *SINKS})


def _spread(instrs: Sequence[Instr], program: TileProgram, found: set[int]) -> None:
    """Adds what meets a slab in a pointwise operator."""
    changed = True
    while changed:
        changed = False
        for i in instrs:
            if i.kind in _APART or not i.outputs:
                continue
            here = [v for v in (*i.inputs, *i.outputs) if _is_wide(program, v)]
            if any(v in found for v in here) and not all(v in found for v in here):
                found.update(here)
                changed = True


# -- loops


class _Alike:
    """Values whose columns are shared out in the same way, as classes that grow together."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def of(self, v: int) -> int:
        while (up := self.parent.setdefault(v, v)) != v:
            self.parent[v] = v = self.parent.setdefault(up, up)
        return v

    def join(self, values: Iterable[int]) -> None:
        first, *others = map(self.of, values)
        for v in others:
            self.parent[self.of(v)] = self.of(first)


def _of_loops(instrs: Sequence[Instr], program: TileProgram, split: int, joined: Joined) -> dict[int, int]:
    body = tuple(walk(instrs))
    if not any(i.kind == "matmul" for i in body):
        raise CannotLower("a loop that multiplies with no weights is not split by columns")
    if any(i.kind in SINKS for i in body):
        raise CannotLower("sums over the steps of a loop whose weights are split over CTAs have no code on the GPU")
    alike, cut = _Alike(), list[tuple[int, int]]()  # (a value, an equal part of it)
    for i in body:
        cut += _parts(i, program, joined)
        for values in _same(i, program):
            alike.join(values)
    whole = {alike.of(x): _columns(program, x) // _columns(program, part) for x, part in cut}
    if any(_columns(program, x) != whole[alike.of(x)] * _columns(program, part) or alike.of(part) in whole for x, part in cut):
        raise CannotLower("columns that are cut into parts of several sizes are not split over CTAs")
    found = {alike.of(v) for i in body if i.kind == "matmul" for v in i.outputs}
    while more := {alike.of(b) for x in cut for a, b in (x, x[::-1]) if alike.of(a) in found} - found:
        found |= more
    slabs = {v: whole.get(alike.of(v), 1) for v in sorted(alike.parent) if alike.of(v) in found}
    for v, groups in slabs.items():
        _check_columns(program, v, split * groups)
    sums = partial(instrs, program, slabs, joined)
    for i in body:
        if i.kind == "matmul" and i.outputs[0] not in sums and any(slabs.get(v, 1) > 1 for v in _pieces(i.inputs[0], joined)):
            raise CannotLower("columns that are cut into parts are multiplied beside others, and not split over CTAs")
    return slabs


def _same(instr: Instr, program: TileProgram) -> list[list[int]]:
    """Values of ``instr`` whose columns are shared out alike."""
    if instr.block is not None:
        count = len(instr.block.carries)
        places = zip(instr.inputs[-count:], instr.block.carries, instr.block.results, instr.outputs, strict=True) if count else ()
        groups = [[v for v in place if _is_wide(program, v)] for place in places]
    elif instr.kind in ("slice", "concatenate", "store", "store_slice"):
        groups = [[v] for v in (*instr.inputs, *instr.outputs) if _is_wide(program, v)]
    elif instr.kind == "matmul":
        groups = [[v] for v in (instr.inputs[0], *instr.outputs) if _is_wide(program, v)]
    else:
        groups = [[v for v in (*instr.inputs, *instr.outputs) if _is_wide(program, v)]]
        if len({_columns(program, v) for v in groups[0]}) > 1:
            groups = [[v] for v in groups[0]]  # one that moves columns, which has no code for slabs
    return [group for group in groups if group]


def partial(instrs: Sequence[Instr], program: TileProgram, found: Mapping[int, int], joined: Joined) -> frozenset[int]:
    """The results of partial products. ``found``: the slabs, with their groups."""
    body, sums = tuple(walk(instrs)), set[int]()
    makers = {v: i for i in body for v in i.outputs}
    for i in body:
        pieces = _pieces(i.inputs[0], joined) if i.kind == "matmul" else []
        if not pieces or any(p not in found or _is_loaded(p, makers) for p in pieces):
            continue
        size = 2 if is_half(program.values[i.inputs[0]].dtype) else 4
        contracted = size * _columns(program, i.inputs[0])
        if contracted > SUM_BYTES * _columns(program, i.outputs[0]) or any(found[p] > 1 for p in pieces):
            sums.update(i.outputs)
    return frozenset(sums)


def _is_loaded(v: int, makers: Mapping[int, Instr]) -> bool:
    """Does ``v`` come from an array, where every CTA finds all of its columns?"""
    while v in makers and makers[v].kind == "reshape":
        v = makers[v].inputs[0]
    return v in makers and makers[v].kind in ("load", "load_slice")


def _pieces(x: int, joined: Joined) -> list[int]:
    """The values whose columns make up the operand ``x`` of a product."""
    found = [x]
    while any(p in joined for p in found):
        found = [part for p in found for part in joined.get(p, (p,))]
    return found


def _parts(instr: Instr, program: TileProgram, joined: Collection[int]) -> list[tuple[int, int]]:
    """(A value, an equal part of its columns) of an instruction that cuts or puts together."""
    if instr.kind == "slice":
        (x,), (part,) = instr.inputs, instr.outputs
        if _is_wide(program, x) and len(program.values[x].shape) == 1:
            return [(x, part)]
    if instr.kind == "concatenate" and instr.outputs[0] not in joined and instr["dimension"] == 1:
        (x,) = instr.outputs
        if _is_wide(program, x) and len(program.values[x].shape) == 1:
            return [(x, part) for part in instr.inputs]
    return []
