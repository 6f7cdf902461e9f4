"""Facts about a stage before it is lowered: aliases, readers, how its columns are split over CTAs, rows that one thread owns.

Comes in: a stage of a tile program, and the number of CTAs that share it. Goes out: ``Facts``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.passes import compared_values, is_other_name
from kitsune_jax.targets.cuda import pack, tiles
from kitsune_jax.targets.cuda.stage.simplify import rounded_results
from kitsune_jax.targets.cuda.stage.split import ColumnSplit


class Facts:
    """Facts about stage ``stage``, read-only. Raises ``CannotLower`` where its columns cannot be split over ``ctas`` CTAs."""

    def __init__(self, program: TileProgram, stage: int, ctas: int, lanes: int):
        self.program, self.instrs = program, program.stages[stage].body
        body = tuple(walk(self.instrs))
        blocks = (self.instrs, *(i.block.body for i in body if i.block is not None))
        self.names = names = _aliases(program, body)  # alias -> value
        self.readers = _readers(body, names)
        # (weight gradient, its operand, the sum over the rows that is made from the operand's panel)
        self.panel_sums = tuple(found for block in blocks for found in _panel_sums(program, block, names))
        # Sums over the rows whose columns the threads of a warp share out.
        self.spread_sums = _spread_sums(program, self.instrs, {i for _, _, i in self.panel_sums})
        # value -> reads of it; a panel sum reads the panel, not the value
        self.uses = Counter(names.get(x, x) for i in body if not names.keys() & i.outputs for x in _read(i))
        self.uses.subtract(names.get(v, v) for _, v, _ in self.panel_sums)
        # Concatenation with adjacent columns -> its parts; those that only products for each row, or other such concatenations,
        # read; and those that only matmuls read, whose parts need not be moved.
        self.stacked = _stacked(program, body)
        self.only_multiplied = _only_read_by("dot", self.stacked, self.readers)
        flat = {v: parts for v, parts in self.stacked.items() if len(program.values[v].shape) == 1}
        self.joined = {v: flat[v] for v in _only_read_by("matmul", flat, _readers(body, {}))}
        self.split = ColumnSplit.of(self.instrs, program, ctas, lanes, self.joined)
        # The values that make up the operands of products for each row; product -> the ``take`` that alone reads it.
        self.row_pieces = frozenset(p for i in body if i.kind == "dot" for x in i.inputs for p in self.pieces_of(x))
        self.taken = _taken_products(program, body, self.readers)
        self.slices = pack.find_weight_slices(program)  # weights that change from tile to tile
        self.rounded = _rounded(program, body, names)  # float32 value -> its only 16-bit form
        self.compared = compared_values(program)  # values with the same bits in every context
        self.coarse = coarse_exponentials(program, body) - self.compared
        self.kept_rows = kept_rows(program, self.instrs)  # read from their arrays once
        # 16-bit values that are rounded when they are made, as ``jax.jit`` does (``stage/simplify.py``)
        self.rounded_results = rounded_results(program, [i for _, _, i in self.panel_sums])

    def only_store(self, v: int) -> Instr | None:
        """The ``store`` that is the only reader of ``v``, or None."""
        found = self.readers.get(v, ())
        return found[0] if len(found) == 1 and found[0].kind == "store" else None

    def pieces_of(self, v: int) -> list[int]:
        """The values that make up the operand ``v`` of a product for each row, in order."""
        v = self.names.get(v, v)
        parts = self.stacked.get(v)
        return [v] if parts is None else [p for part in parts for p in self.pieces_of(part)]


def _aliases(program: TileProgram, instrs: Iterable[Instr]) -> dict[int, int]:
    """alias -> the tile that it is another name of."""
    names: dict[int, int] = {}
    for i in instrs:
        if (i.kind == "reshape" or is_other_name(program.values, i)) and program.values[i.outputs[0]].tile:
            names[i.outputs[0]] = names.get(i.inputs[0], i.inputs[0])
    return names


def _read(instr: Instr) -> tuple[int, ...]:
    """The operands of ``instr``, and the results of its block."""
    return (*instr.inputs, *(instr.block.results if instr.block else ()))


def _readers(instrs: Iterable[Instr], names: dict[int, int]) -> dict[int, list[Instr]]:
    """value -> the instructions that read it or an alias of it, which is no reader itself."""
    found: dict[int, list[Instr]] = {}
    for i in instrs:
        for x in dict.fromkeys(names.get(x, x) for x in _read(i)) if not names.keys() & i.outputs else ():
            found.setdefault(x, []).append(i)
    return found


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
    """Exponentials that need only the precision of 16 bits: their readers are 16-bit forms of them or of their multiples, and sums
    of columns, as for the probabilities of an attention in 16 bits."""
    instrs = tuple(walk(body))
    names = _aliases(program, instrs)
    exponentials = {v for i in instrs if i.kind == "exp" for v in i.outputs}
    rounded, others = set[int](), set[int]()
    for i in reversed(instrs):  # readers come after makers
        read = {names.get(x, x) for x in _read(i)}
        multiple = i.kind in _SCALES and i.outputs[0] in rounded and i.outputs[0] not in others
        if multiple or is_rounding(program, i):
            rounded |= read
        elif i.kind == "reduce_sum":
            others |= read - exponentials
        elif not names.keys() & i.outputs:
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


def _only_read_by(kind: str, stacked: dict[int, tuple[int, ...]], readers: dict[int, list[Instr]]) -> frozenset[int]:
    """Those of ``stacked`` that only instructions of ``kind``, or other such concatenations, read."""
    found = set[int]()
    for v in reversed(stacked):
        mine = readers.get(v, ())
        if mine and all(r.kind == kind or (r.kind == "concatenate" and r.outputs[0] in found) for r in mine):
            found.add(v)
    return frozenset(found)


def kept_rows(program: TileProgram, instrs: Sequence[Instr]) -> frozenset[int]:
    """Loaded rows that several products of many columns, a gate and others, multiply with. A product reads rows from their array
    again for each chunk of its columns, so a lane keeps these."""
    names = _aliases(program, tuple(walk(instrs)))
    loaded = {names.get(v, v) for i in instrs if i.kind == "load" for v in i.outputs}
    columns: dict[int, list[int]] = {}
    for i in instrs:
        if i.kind == "matmul" and (v := names.get(i.inputs[0], i.inputs[0])) in loaded:
            columns.setdefault(v, []).append(math.prod(program.values[i.outputs[0]].shape))
    return frozenset(v for v, n in columns.items() if len(n) > 1 and sum(n) >= tiles.MANY_COLUMNS)


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


def _spread_sums(program: TileProgram, instrs: tuple[Instr, ...], in_panels: Set[Instr]) -> frozenset[Instr]:
    columns = {i: math.prod(program.values[i.inputs[0]].shape) for i in instrs if i.kind == "sink" and tuple(i["axes"]) == (0,)}
    sums = [i for i, n in columns.items() if n > 1 and i not in in_panels]
    spread = tiles.spread_sums([tiles.padded(columns[i]) for i in sums])
    return frozenset(i for i, apart in zip(sums, spread, strict=True) if apart)


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
