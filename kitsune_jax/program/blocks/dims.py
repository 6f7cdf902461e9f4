"""Which values of a stage have the dimension that is worked off in blocks, and how instructions carry it on.

Comes in: a stage's body and one dimension of one value. Goes out: the same dimension of all values that have it, or ``NotBlocked``
with what stands in the way. Dimensions are rows-first ones: of a tile, 0 is its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kitsune_jax.graph import Op
from kitsune_jax.ops.local import resolve_rows
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.instructions import FOLDED
from kitsune_jax.program.ir import ArrayType, Instr, TileType

_ROWS = 1_000_003  # stands for the rows of a tile, and for no other extent
Join = tuple[str, tuple[tuple[int, int], ...]]  # (role, (value, dimension) pairs)
# What is folded over the dimension, and how two folds of parts of it are put together.
FOLDS = {
    "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul", "reduce_and": "and", "reduce_or": "or",
    "matmul": "add", "dot": "add",
}  # fmt: skip
# The index of an extreme element, and which of two elements that hold one is the extreme one.
ARGS = {"argmax": ("max", "gt"), "argmin": ("min", "lt")}
# Kinds whose parameters do not name the extent of a dimension, or whose code below knows how.
_PARALLEL = frozenset({"pointwise", "convert", "broadcast", "reshape", "transpose", "iota", "reduce"})


class NotBlocked(ValueError):
    """The stage cannot be worked off in blocks. The message is the reason."""


def inner_dims(types: Sequence[TileType], body: Sequence[Instr], value: int, dim: int) -> dict[int, int]:
    """Value -> its dimension that goes along with dimension ``dim`` of ``value``. Raises ``NotBlocked``."""
    touching: dict[int, list[Instr]] = {}
    for instr in body:
        for v in (*instr.inputs, *instr.outputs):
            touching.setdefault(v, []).append(instr)
    found, work = {value: dim}, [value]
    while work:
        v = work.pop()
        for instr in touching.get(v, ()):
            for w, d in _along(types, instr, v, found[v]):
                if w not in found:
                    found[w] = d
                    work.append(w)
                elif found[w] != d:
                    raise NotBlocked("a value has the dimension twice")
    return found


def _along(types: Sequence[TileType], instr: Instr, v: int, dim: int) -> list[tuple[int, int]]:
    """The dimensions of the operands and results of ``instr`` that go along with dimension ``dim`` of ``v``."""
    if instr.kind in ("load", "store", "row_index"):
        return []
    if instr.kind in FOLDED:
        return _along_sink(types, instr, v, dim)
    family = OPS[instr.kind].family if instr.kind in OPS else ""
    if family not in _PARALLEL and instr.kind not in FOLDS and instr.kind not in ARGS:
        raise NotBlocked(f"{instr.kind} has no code for a part of a dimension")
    for role, members in joins(types, instr):
        if (v, dim) not in members:
            continue
        if role == "mixed" and instr.kind in ARGS:
            return []
        if role == "mixed" or role == "reshaped" or (role == "contracted" and instr.kind not in FOLDS):
            raise NotBlocked(f"{instr.kind} needs every index of the dimension")
        return [m for m in members if m != (v, dim)]
    return []


def _along_sink(types: Sequence[TileType], instr: Instr, v: int, dim: int) -> list[tuple[int, int]]:
    if instr.kind == "sink":
        return []
    x, y = instr.inputs
    contract = list(zip(instr["x_contract"], instr["y_contract"], strict=True))
    found = [(y, b) for a, b in contract if (v, dim) == (x, a)] + [(x, a) for a, b in contract if (v, dim) == (y, b)]
    if (x == v and dim in instr["x_batch"]) or (y == v and dim in instr["y_batch"]):
        raise NotBlocked("products of tiles one by one along the dimension")
    return found


def sink_dim(types: Sequence[TileType], instr: Instr, inner: Mapping[int, int]) -> int | None:
    """The dimension of a sink that goes along with ``inner``; None where it is folded. Raises ``NotBlocked``."""
    if instr.kind == "sink":
        (x,), axes = instr.inputs, instr["axes"]
        return None if inner[x] in axes else sum(d not in axes for d in range(inner[x]))
    x, y = instr.inputs
    free = []
    for v, name in ((x, "x"), (y, "y")):
        used = (*instr[f"{name}_contract"], *instr[f"{name}_batch"])
        free.append([(v, d) for d in range(len(types[v].rows_first)) if d not in used])
    places = [k for k, (v, d) in enumerate((*free[0], *free[1])) if inner.get(v) == d]
    if len(places) > 1:
        raise NotBlocked("a sum with the dimension twice")
    if places and places[0] not in (0, len(free[0])):
        raise NotBlocked("a sum that has another dimension in front of it")
    return len(instr["x_batch"]) + places[0] if places else None


def joins(types: Sequence[TileType], instr: Instr) -> list[Join]:
    """How the dimensions of an instruction's operands and results go together."""
    operands = (*instr.inputs, *instr.outputs)
    if instr.kind in ("matmul", "dot"):
        return _product(types, instr)
    shapes = [_shape(types[v]) for v in operands]
    n = len(instr.inputs)
    inside = tuple(range(n)), tuple(range(n, len(operands)))
    op = Op(instr.kind, *inside, tuple(resolve_rows(dict(instr.params), _ROWS).items()))
    relations = OPS[instr.kind].relate(op, tuple(shapes[:n]), tuple(shapes[n:]))
    return [(r.role, tuple((operands[k], d) for k, d in r.members)) for r in relations]


def _shape(t: TileType) -> tuple[int, ...]:
    return (_ROWS, *t.shape) if t.tile else t.shape


def _product(types: Sequence[TileType], instr: Instr) -> list[Join]:
    x, y, *bias = instr.inputs
    if bias:
        raise NotBlocked("a product with a bias")
    (out,) = instr.outputs
    name = "w" if instr.kind == "matmul" else "y"
    contract, batch = (list(zip(instr[f"x_{what}"], instr[f"{name}_{what}"], strict=True)) for what in ("contract", "batch"))
    falls_out: list[tuple[tuple[int, int], ...]] = [] if instr.kind == "matmul" else [((x, 0), (y, 0))]
    falls_out += [((x, a), (y, b)) for a, b in batch]
    used = {(x, a) for a, _ in (*contract, *batch)}, {(y, b) for _, b in (*contract, *batch)}
    for v, taken in zip((x, y), used, strict=True):
        first = int(types[v].tile and instr.kind == "dot")
        falls_out += [((v, d),) for d in range(first, len(types[v].rows_first)) if (v, d) not in taken]
    order = instr["out_perm"] if instr.kind == "matmul" else range(len(falls_out))
    found: list[Join] = [("parallel", (*falls_out[p], (out, k))) for k, p in enumerate(order)]
    return found + [("contracted", ((x, a), (y, b))) for a, b in contract]


def array_dim(array: ArrayType, tile: bool, dim: int) -> int:
    """The dimension of ``array`` that is dimension ``dim`` of what is loaded of it."""
    return array.kept[dim - 1 if tile else dim]
