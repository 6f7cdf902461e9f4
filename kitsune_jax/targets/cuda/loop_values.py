"""Stationary values that change with a loop or a batch become tiles: the same for all rows of a tile.

Comes in: a tile program. Goes out: one that computes the same, in which what depends on the number of a loop, is carried by one, or
depends on the batch of a tile, is a tile. XLA makes the other stationary values in front of the call, and these it cannot make
there. Raises ``CannotLower`` where an instruction has no form for tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from kitsune_jax.graph import Param, make_params
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import ROWS, Instr, TileProgram, TileType, walk
from kitsune_jax.targets.cuda import cuts
from kitsune_jax.targets.errors import CannotLower

_SLICES = ("load_slice", "store_slice")
_SAME = frozenset({"pointwise", "convert", "reduce"})  # families whose ops are the same of tiles, up to axes
_Params = dict[str, Param]


def as_tiles(program: TileProgram) -> TileProgram:
    """``program`` itself where it has no loop and no batches."""
    if not program.batch_axes and not any(i.kind == "loop" or i.kind in _SLICES for s in program.stages for i in walk(s.body)):
        return program
    weights = cuts.find(program).makers.keys()
    found = {v for s in program.stages for v in _varying(program, s.body)} - weights
    values = [dataclasses.replace(t, tile=t.tile or v in found) for v, t in enumerate(program.values)]
    stages = tuple(dataclasses.replace(s, body=_body(s.body, found, program, values)) for s in program.stages)
    return dataclasses.replace(program, values=tuple(values), stages=stages)


def _varying(program: TileProgram, body: Sequence[Instr]) -> set[int]:
    """Stationary values of ``body`` that are made by loops, of their numbers and carries, or cut out of arrays by these or by a
    batch."""
    found: set[int] = set()

    def visit(instrs: Iterable[Instr]) -> None:
        for i in instrs:
            if i.block is not None:
                found.update((i.block.index, *i.block.carries, *i.outputs))
                visit(i.block.body)
            elif i.kind == "load_slice" or (i.kind == "load" and cuts.by_batch(program, i)) or not found.isdisjoint(i.inputs):
                found.update(i.outputs)

    visit(body)
    return {v for v in found if not program.values[v].tile}


def _body(body: Sequence[Instr], found: set[int], program: TileProgram, values: list[TileType]) -> tuple[Instr, ...]:
    """``values``: those of the program; new ones are added."""
    made = []
    for i in body:
        if i.block is not None:
            i = dataclasses.replace(i, block=dataclasses.replace(i.block, body=_body(i.block.body, found, program, values)))
        elif i.kind not in _SLICES and not found.isdisjoint(i.inputs):
            if i.kind == "broadcast_in_dim" and program.values[i.outputs[0]].tile and 0 in i["dims"]:
                made.append(drop := _without_rows(i, values))
                dims = tuple(d for d in i["dims"] if d != 0)
                i = dataclasses.replace(_with(i, dims=(0, *dims)), inputs=drop.outputs)
            else:
                i = _of_tiles(i, found, program)
        made.append(i)
    return tuple(made)


def _without_rows(instr: Instr, values: list[TileType]) -> Instr:
    """The operand of a broadcast of a stationary value without its dimension of extent 1 that is repeated along the rows."""
    (x,), k = instr.inputs, instr["dims"].index(0)
    t = values[x]
    if t.shape[k] != 1:
        raise CannotLower("a value of a loop is broadcast along the rows")
    kept = TileType(True, (*t.shape[:k], *t.shape[k + 1 :]), t.dtype)
    values.append(kept)
    return Instr("reshape", (x,), (len(values) - 1,), make_params(new_sizes=kept.rows_first), instr.op)


def _of_tiles(instr: Instr, found: set[int], program: TileProgram) -> Instr:
    """``instr``, some of whose operands have become tiles."""
    stationary = bool(instr.outputs) and not program.values[instr.outputs[0]].tile
    spec = OPS.get(instr.kind)
    if instr.kind == "broadcast_in_dim":
        # Of whole arrays, or a stationary value to every row, which then has no dimension for the rows yet.
        dims = tuple(instr["dims"])
        shape = (ROWS, *instr["shape"]) if stationary else tuple(instr["shape"])
        return _with(instr, shape=shape, dims=(0, *(d + stationary for d in dims)))
    if not stationary:
        if spec is not None and spec.family in ("pointwise", "convert"):
            return instr
        if instr.kind in ("matmul", "gather", "take", "put"):
            raise CannotLower(f"{instr.kind} with a table or weights that change with a loop has no code on the GPU")
        return instr
    if spec is None or spec.family not in _SAME and instr.kind not in ("copy", *_SHIFTED):
        raise CannotLower(f"{instr.kind} of what a loop changes, and no row has, has no code on the GPU")
    if spec.family == "reduce":
        return _with(instr, axes=tuple(a + 1 for a in instr["axes"]))
    shift = _SHIFTED.get(instr.kind)
    return _with(instr, **shift(dict(instr.params))) if shift else instr


def _with(instr: Instr, **params: Param) -> Instr:
    return dataclasses.replace(instr, params=tuple(sorted({**dict(instr.params), **params}.items())))


# The parameters that speak of dimensions, with the rows in front.
_SHIFTED: dict[str, Callable[[_Params], _Params]] = {
    "reshape": lambda p: {"new_sizes": (ROWS, *p["new_sizes"])},
    "slice": lambda p: {"start": (0, *p["start"]), "limit": (ROWS, *p["limit"]), "strides": (1, *p["strides"])},
    "concatenate": lambda p: {"dimension": p["dimension"] + 1},
    "transpose": lambda p: {"permutation": (0, *(d + 1 for d in p["permutation"]))},
}
