"""Facts about a stage before it is lowered: aliases, readers, how its columns are split over CTAs, rows that one thread owns.

Comes in: a stage of a tile program, and the number of CTAs that share it. Goes out: ``Facts``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.passes import compared_values, is_other_name
from kitsune_jax.targets.cuda import pack, tiles
from kitsune_jax.targets.cuda.pack import WeightSlices
from kitsune_jax.targets.cuda.stage.simplify import rounded_results
from kitsune_jax.targets.cuda.stage.split import ColumnSplit

# --- Facts ------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """``names``: alias -> value. ``uses``: instructions that read each value. ``joined``: concatenation that only matmuls, or other
    such concatenations, read -> its parts, which need not be moved. ``panel_sums``: (weight gradient, its operand, the sum over the
    rows that is made from the operand's panel). ``stacked``: concatenation with adjacent columns -> its parts; ``only_multiplied``:
    those that only products for each row, or other such concatenations, read; ``row_pieces``: the values that make up the operands
    of these products. ``taken``: product for each row -> the ``take`` that alone reads it. ``slices``: weights that change from
    tile to tile. ``rounded``: float32 value -> its only 16-bit form. ``coarse``: see ``coarse_exponentials``. ``compared``: values
    with the same bits in every context (``program.passes.compared_values``); ``rounded_results``: 16-bit values that are rounded
    when they are made, as ``jax.jit`` does (``stage/simplify.py``).
    """

    program: TileProgram
    instrs: tuple[Instr, ...]
    names: dict[int, int]
    uses: Counter[int]
    joined: dict[int, tuple[int, ...]]
    panel_sums: tuple[tuple[Instr, int, Instr], ...]
    split: ColumnSplit
    stacked: dict[int, tuple[int, ...]]
    only_multiplied: frozenset[int]
    row_pieces: frozenset[int]
    taken: dict[int, Instr]
    slices: WeightSlices
    rounded: dict[int, int]
    coarse: frozenset[int]
    compared: frozenset[int]
    rounded_results: frozenset[int]

    def only_store(self, v: int) -> Instr | None:
        """The ``store`` that is the only reader of ``v``, or None."""
        named = {(v,) for v in self.names}
        found = [i for i in self.instrs if any(self.names.get(x, x) == v for x in i.inputs) and i.outputs[:1] not in named]
        return found[0] if len(found) == 1 and found[0].kind == "store" else None

    def pieces_of(self, v: int) -> list[int]:
        """The values that make up the operand ``v`` of a product for each row, in order."""
        v = self.names.get(v, v)
        parts = self.stacked.get(v)
        return [v] if parts is None else [p for part in parts for p in self.pieces_of(part)]


def facts_of_stage(program: TileProgram, stage: int, ctas: int, lanes: int) -> Facts:
    """The facts of stage ``stage``. Raises ``CannotLower`` where its columns cannot be split over ``ctas`` CTAs."""
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
    for _, v, _ in sums:  # a panel sum reads the panel, not the value
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
    found = Facts(
        program,
        instrs,
        names,
        uses,
        joined,
        sums,
        ColumnSplit.of(instrs, program, ctas, lanes, joined),
        stacked,
        _only_multiplied(stacked, readers),
        frozenset(),
        _taken_products(program, body, readers),
        pack.find_weight_slices(program),
        _rounded(program, body, names),
        coarse_exponentials(program, body) - compared,
        compared,
        rounded_results(program, [i for _, _, i in sums]),
    )
    operands = [x for i in body if i.kind == "dot" for x in i.inputs]
    return dataclasses.replace(found, row_pieces=frozenset(p for x in operands for p in found.pieces_of(x)))


def _is_name(program: TileProgram, instr: Instr) -> bool:
    """Is the result of ``instr`` an alias of its operand?"""
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


# Ops whose result has the same relative error as their operand.
_SCALES = frozenset({"mul", "neg", "select_n", "broadcast_in_dim", "transpose"})


def coarse_exponentials(program: TileProgram, body: Sequence[Instr]) -> frozenset[int]:
    """Exponentials that need only the precision of bfloat16: their readers are bfloat16 forms of them or of their multiples, and
    sums of columns, as for the probabilities of an attention in bfloat16."""
    instrs = tuple(walk(body))
    names: dict[int, int] = {}
    for i in instrs:
        if _is_name(program, i):
            names[i.outputs[0]] = names.get(i.inputs[0], i.inputs[0])
    exponentials = {v for i in instrs if i.kind == "exp" for v in i.outputs}
    rounded, others = set[int](), set[int]()
    for i in reversed(instrs):  # readers come after makers
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


def _taken_products(program: TileProgram, instrs: tuple[Instr, ...], readers: dict[int, list[Instr]]) -> dict[int, Instr]:
    """product -> the ``take`` that alone reads it. A take of a single column is excluded: it has one number per row, and no
    image."""
    products = [i.outputs[0] for i in instrs if i.kind == "dot" and math.prod(program.values[i.outputs[0]].shape) > 1]
    found = {}
    for v in products:
        mine = readers.get(v, ())
        if len(mine) == 1 and mine[0].kind == "take" and math.prod(program.values[mine[0].outputs[0]].shape) > 1:
            found[v] = mine[0]
    return found


def _panel_sums(program: TileProgram, instrs: tuple[Instr, ...], names: dict[int, int]) -> list[tuple[Instr, int, Instr]]:
    """Sums over the rows of 16-bit values of several columns, each with the first gradient that has the value as an operand."""
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


# --- Scalar rows: programs in which one thread computes whole rows ----------------------------------------------------------------

SCALAR_TILE_ROWS = 256  # rows of a lane's tile (``kOwnRows`` in layout.h)

_KINDS = frozenset({"load", "load_slice", "store", "store_slice", "row_index", "loop", "sink", "reshape", "broadcast_in_dim"})


def has_scalar_rows(program: TileProgram) -> bool:
    """Does each row of the loop consist of single numbers? A thread then has whole rows: two of the 256 rows of a tile. In the
    usual layout of a tile four threads share the columns of a row, and would all compute the same numbers."""
    if len(program.stages) != 1 or program.queues or program.batch_axes:
        return False
    body = list(walk(program.stages[0].body))
    return any(i.kind == "loop" for i in body) and all(_has_single_numbers(program, i) for i in body)


def _has_single_numbers(program: TileProgram, instr: Instr) -> bool:
    carried = (*instr.block.carries, *instr.block.results) if instr.block is not None else ()
    values = [program.values[v] for v in (*instr.inputs, *instr.outputs, *carried)]
    if any(math.prod(t.shape) != 1 for t in values):
        return False
    spec = OPS.get(instr.kind)
    return instr.kind in _KINDS or (spec is not None and spec.family in ("pointwise", "convert"))
