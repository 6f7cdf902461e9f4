"""Sums by index whose rows are those of a table: they are read where the table has them, and never lie in a tile.

Comes in: a stage's body, as ``Flow``. Goes out: for each ``sink_at`` that can do so a ``TakenSum``, recognised by what is computed:

    sum over a segment's rows of  table[ids]  or  table[ids] * factor

where the indices of the sum are sorted and nobody else reads the rows. It is the sum over the edges of a node of what the nodes
at their other ends have, with or without a weight for each edge, or for each edge and head.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.program.passes.flow import Flow

_TABLES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class TakenSum:
    """``factor``: what rows are multiplied by, or None; of each row one number, one for each of the first dimensions, or all.
    ``absorbed``: the instructions of the body that the sum computes."""

    gather: Instr
    factor: int | None
    absorbed: tuple[int, ...]


def taken_sums(program: TileProgram, flow: Flow) -> dict[int, TakenSum]:
    """The sums of ``flow``'s body that read rows of a table, by the number of their ``sink_at``."""
    found: dict[int, TakenSum] = {}
    for i, instr in enumerate(flow.body):
        if instr.kind != "sink_at" or not instr["sorted"] or flow.type(instr.inputs[1]).shape != ():
            continue
        sink = program.sinks[instr["sink"]]
        if (sink.how, sink.dtype) == ("sum", "float32") and (match := _match(flow, i, instr.inputs[0])) is not None:
            found[i] = match
    return found


def _match(flow: Flow, sink: int, v: int) -> TakenSum | None:
    number = _only_reader(flow, v, sink)
    if number is None:
        return None
    instr = flow.body[number]
    if instr.kind != "mul":
        return _gathered(flow, number, None, ())
    for rows, factor in (instr.inputs, instr.inputs[::-1]):
        made, numbers = _only_reader(flow, rows, number), _factor(flow, factor)
        if made is not None and numbers is not None and flow.shape(rows) == flow.shape(v):
            match = _gathered(flow, made, numbers, (number,))
            if match is not None:
                return match
    return None


def _gathered(flow: Flow, number: int, factor: int | None, absorbed: tuple[int, ...]) -> TakenSum | None:
    """The sum of what instruction ``number`` makes, if that is rows of a table, perhaps widened to float32."""
    instr = flow.body[number]
    if instr.kind == "convert_element_type" and flow.dtype(instr.outputs[0]) == "float32":
        made = _only_reader(flow, instr.inputs[0], number)
        if made is None or flow.dtype(instr.inputs[0]) not in ("bfloat16", "float16"):
            return None
        number, absorbed = made, (*absorbed, number)
        instr = flow.body[number]
    if instr.kind != "gather":
        return None
    table, index = instr.inputs
    loaded = flow.makers.get(flow.root(table))
    fits = loaded is not None and loaded.kind == "load" and not flow.type(table).tile and flow.dtype(table) in _TABLES
    if not fits or flow.type(table).shape[0] == 0 or flow.type(index).shape != () or not flow.type(index).tile:
        return None
    return TakenSum(instr, factor, (*absorbed, number))


def _only_reader(flow: Flow, v: int, reader: int) -> int | None:
    """The instruction that makes ``v``, if ``reader`` alone reads that."""
    root = flow.root(v)
    maker = flow.makers.get(root)
    if maker is None or flow.readers(root) != [reader]:
        return None
    return next(i for i, instr in enumerate(flow.body) if instr is maker)


def _factor(flow: Flow, v: int) -> int | None:
    """What ``v`` repeats along the last dimensions of a row, or ``v`` if it repeats nothing; None where it is the same for all
    rows, or repeated in another way."""
    if not flow.type(v).tile or flow.literal(v) is not None:
        return None
    instr = flow.makers.get(flow.root(v))
    if instr is None or instr.kind != "broadcast_in_dim":
        return v if flow.dtype(v) in _TABLES else None
    source, shape = instr.inputs[0], flow.type(instr.outputs[0]).shape
    if not flow.type(source).tile or flow.dtype(source) not in _TABLES:
        return None
    own = [d - 1 for d, n in zip(instr["dims"][1:], flow.type(source).shape, strict=True) if n != 1]
    real = [d for d, n in enumerate(shape) if n != 1]
    return source if own == real[: len(own)] else None
