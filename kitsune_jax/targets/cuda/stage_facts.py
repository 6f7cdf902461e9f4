"""What is known of a stage before it is lowered: other names of values, how often each is read, what need not be made at all.

Comes in: a stage of a tile program. Goes out: ``Facts``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.passes import compared_values
from kitsune_jax.program.passes.flow import is_other_name
from kitsune_jax.targets.cuda import cuts, slabs, tiles
from kitsune_jax.targets.cuda.cuts import Cuts
from kitsune_jax.targets.cuda.rounding import rounded_results


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """``names``: what is only another name of a value -> that value. ``uses``: instructions that read each value. ``joined``: a
    concatenation that only matmuls read, or other such concatenations, -> its parts: nothing need move. ``panel_sums``: (weight
    gradient, its operand, sum over the rows that is made of the operand's panel). ``slabs``: values that are shared out over CTAs,
    with the groups of columns of each; ``partial``: products whose CTAs hand each other sums (``slabs.py``). ``stacked``: a
    concatenation -> its parts, where their columns follow each other; ``only_multiplied``: those that only products for each row
    read, or other such concatenations; ``row_pieces``: the values that the operands of these products are made of. ``picked``: a
    product for each row that only a ``take`` reads -> that ``take``. ``cuts``: weights that change from tile to tile. ``rounded``:
    a float32 value -> the only 16-bit form that is made of it; ``coarse``: exponentials that nobody reads but bfloat16 forms, of
    them or of multiples of them, and sums of columns, such as the probabilities of an attention in bfloat16. ``compared``: values
    that have the same bits whatever stands around them (``program.passes.compared_values``); ``rounded_results``: 16-bit values
    that are rounded where they are made, as ``jax.jit`` rounds them (``rounding.py``).
    """

    program: TileProgram
    instrs: tuple[Instr, ...]
    names: dict[int, int]
    uses: Counter[int]
    joined: dict[int, tuple[int, ...]]
    panel_sums: tuple[tuple[Instr, int, Instr], ...]
    slabs: dict[int, int]
    partial: frozenset[int]
    stacked: dict[int, tuple[int, ...]]
    only_multiplied: frozenset[int]
    row_pieces: frozenset[int]
    picked: dict[int, Instr]
    cuts: Cuts
    rounded: dict[int, int]
    coarse: frozenset[int]
    compared: frozenset[int]
    rounded_results: frozenset[int]

    def only_store(self, v: int) -> Instr | None:
        """The ``store`` that alone reads ``v``."""
        found = [i for i in self.instrs if any(self.names.get(x, x) == v for x in i.inputs) and i.outputs[:1] not in self._named]
        return found[0] if len(found) == 1 and found[0].kind == "store" else None

    @property
    def _named(self) -> set[tuple[int, ...]]:
        return {(v,) for v in self.names}

    def pieces_of(self, v: int) -> list[int]:
        """The values that, one after the other, make up the operand ``v`` of a product for each row."""
        v = self.names.get(v, v)
        parts = self.stacked.get(v)
        return [v] if parts is None else [p for part in parts for p in self.pieces_of(part)]


def of_stage(program: TileProgram, stage: int, split: int, lanes: int) -> Facts:
    """Raises ``CannotLower`` where the stage cannot be split as asked."""
    instrs = program.stages[stage].body
    names: dict[int, int] = {}
    uses: Counter[int] = Counter()
    body = tuple(walk(instrs))
    for i in body:
        if _is_name(program, i):
            names[i.outputs[0]] = names.get(i.inputs[0], i.inputs[0])
        else:
            uses.update(names.get(x, x) for x in i.inputs)
    for i in body:
        if i.block is not None:
            uses.update(names.get(x, x) for x in i.block.results)
    blocks = (instrs, *(i.block.body for i in body if i.block is not None))
    sums = tuple(found for block in blocks for found in _panel_sums(program, block, names))
    for _, v, _ in sums:  # they do not read the value where it lies
        uses[names.get(v, v)] -= 1
    readers: dict[int, list[Instr]] = {}
    for i in body:
        if i.outputs and i.outputs[0] in names:
            continue
        for x in dict.fromkeys(names.get(x, x) for x in i.inputs):
            readers.setdefault(x, []).append(i)
    stacked = _stacked(program, body)
    compared = compared_values(program)
    joined = _joined(program, body)
    shared = slabs.of_stage(instrs, program, split, lanes, joined)
    found = Facts(
        program,
        instrs,
        names,
        uses,
        joined,
        sums,
        shared,
        slabs.partial(instrs, program, shared, joined),
        stacked,
        _only_multiplied(stacked, readers),
        frozenset(),
        _picked(program, body, readers),
        cuts.find(program),
        _rounded(program, body, names),
        coarse(program, body) - compared,
        compared,
        rounded_results(program, [i for _, _, i in sums]),
    )
    operands = [x for i in body if i.kind == "dot" for x in i.inputs]
    return dataclasses.replace(found, row_pieces=frozenset(p for x in operands for p in found.pieces_of(x)))


def _is_name(program: TileProgram, instr: Instr) -> bool:
    """Is its result another name of its operand?"""
    if instr.kind != "reshape" and not is_other_name(program.values, instr):
        return False
    return program.values[instr.outputs[0]].tile


def _rounded(program: TileProgram, instrs: Sequence[Instr], names: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for i in instrs:
        if is_rounding(program, i):
            x = names.get(i.inputs[0], i.inputs[0])
            found[x] = -1 if x in found else i.outputs[0]
    return {x: v for x, v in found.items() if v >= 0}


# What these make of a number is off by as much as the number, relatively.
_SCALES = frozenset({"mul", "neg", "select_n", "broadcast_in_dim", "transpose"})


def coarse(program: TileProgram, body: Sequence[Instr]) -> frozenset[int]:
    """``Facts.coarse`` of a stage."""
    instrs = tuple(walk(body))
    names: dict[int, int] = {}
    for i in instrs:
        if _is_name(program, i):
            names[i.outputs[0]] = names.get(i.inputs[0], i.inputs[0])
    exponentials = {v for i in instrs if i.kind == "exp" for v in i.outputs}
    rounded, others = set[int](), set[int]()
    for i in reversed(instrs):  # who reads a value stands behind who makes it
        read = {names.get(x, x) for x in (*i.inputs, *(i.block.results if i.block else ()))}
        multiple = i.kind in _SCALES and i.outputs[0] in rounded and i.outputs[0] not in others
        if multiple or (is_rounding(program, i) and program.values[i.outputs[0]].dtype == "bfloat16"):
            rounded |= read
        elif i.kind == "reduce_sum":
            others |= read - exponentials
        elif i.outputs[:1] not in {(v,) for v in names}:
            others |= read
    return frozenset(rounded & exponentials - others)


def is_rounding(program: TileProgram, instr: Instr) -> bool:
    """Does ``instr`` round float32 to 16 bits?"""
    if instr.kind != "convert_element_type" or not program.values[instr.outputs[0]].tile:
        return False
    return tiles.is_half(program.values[instr.outputs[0]].dtype) and program.values[instr.inputs[0]].dtype == "float32"


def _stacked(program: TileProgram, instrs: tuple[Instr, ...]) -> dict[int, tuple[int, ...]]:
    return {
        i.outputs[0]: i.inputs
        for i in instrs
        if i.kind == "concatenate"
        and program.values[i.outputs[0]].tile
        and math.prod(program.values[i.outputs[0]].shape[: i["dimension"] - 1]) == 1
    }


def _only_multiplied(stacked: dict[int, tuple[int, ...]], readers: dict[int, list[Instr]]) -> frozenset[int]:
    found = set[int]()
    for v in reversed(stacked):
        mine = readers.get(v, ())
        if mine and all(r.kind == "dot" or (r.kind == "concatenate" and r.outputs[0] in found) for r in mine):
            found.add(v)
    return frozenset(found)


def _picked(program: TileProgram, instrs: tuple[Instr, ...], readers: dict[int, list[Instr]]) -> dict[int, Instr]:
    """One column of a product is left to ``take``: it is a number of a row, which no image holds."""
    products = [i.outputs[0] for i in instrs if i.kind == "dot" and math.prod(program.values[i.outputs[0]].shape) > 1]
    found = {}
    for v in products:
        mine = readers.get(v, ())
        if len(mine) == 1 and mine[0].kind == "take" and math.prod(program.values[mine[0].outputs[0]].shape) > 1:
            found[v] = mine[0]
    return found


def _panel_sums(program: TileProgram, instrs: tuple[Instr, ...], names: dict[int, int]) -> list[tuple[Instr, int, Instr]]:
    """Of 16-bit values of several columns; each with the first gradient that has the value for an operand."""
    found, known = [], set[int]()
    for gradient in (i for i in instrs if i.kind == "matmul_sink"):
        roots = [names.get(v, v) for v in gradient.inputs]
        for v, root in zip(gradient.inputs, roots, strict=True):
            t = program.values[v]
            if root not in known and gradient.inputs.count(v) == 1 and tiles.is_half(t.dtype) and math.prod(t.shape) != 1:
                mine = [i for i in instrs if i.kind == "sink" and names.get(i.inputs[0], i.inputs[0]) == root]
                found += [(gradient, v, i) for i in mine if tuple(i["axes"]) == (0,) and _is_sum(program, i, t.dtype)]
            known.add(root)
    return found


def _is_sum(program: TileProgram, instr: Instr, dtype: str) -> bool:
    sink = program.sinks[instr["sink"]]
    return sink.how == "sum" and sink.dtype in ("float32", dtype)


def _joined(program: TileProgram, instrs: tuple[Instr, ...]) -> dict[int, tuple[int, ...]]:
    readers: dict[int, list[Instr]] = {}
    for i in instrs:
        for x in (*i.inputs, *(i.block.results if i.block else ())):
            readers.setdefault(x, []).append(i)
    found: dict[int, tuple[int, ...]] = {}
    for i in reversed(instrs):
        if i.kind != "concatenate" or len(program.values[i.outputs[0]].shape) != 1 or i["dimension"] != 1:
            continue
        (v,) = i.outputs
        if all(r.kind == "matmul" or (r.kind == "concatenate" and r.outputs[0] in found) for r in readers.get(v, ())):
            found[v] = i.inputs
    return found
