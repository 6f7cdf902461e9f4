"""Columns that change places: broadcasts, concatenations, slices, transposes, pads, and columns that are their own index.

Comes in: an instruction that only moves elements within a row. Goes out: a place for its result. What an instruction does is found
by running it on the *indices* of its operands' columns, so there is one rule for all of them: if whole blocks move, nothing is
emitted; else the warp's rows go through shared memory in the new order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kitsune_jax.ops.local import resolve_rows
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.actions import ToScratch
from kitsune_jax.targets.cuda.pack import VectorRecipe
from kitsune_jax.targets.cuda.values import Expression, InScratch, InVector, Literal, Multiply, Parts, Splat
from kitsune_jax.targets.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body

REARRANGING = frozenset({"broadcast_in_dim", "concatenate", "slice", "transpose", "pad", "rev", "iota"})
_FILL = -1


@dataclasses.dataclass
class Vectors:
    """The stationary vectors of a kernel, each once, one after the other."""

    recipes: list[VectorRecipe] = dataclasses.field(default_factory=list)
    words: int = 0
    _starts: dict[VectorRecipe, int] = dataclasses.field(default_factory=dict)

    def add(self, recipe: VectorRecipe) -> int:
        """The word at which the vector starts."""
        return self._starts[recipe] if recipe in self._starts else self.append([recipe])

    def append(self, recipes: Sequence[VectorRecipe]) -> int:
        """The same for several that must follow each other."""
        start = self.words
        for recipe in recipes:
            self._starts.setdefault(recipe, self.words)
            self.recipes.append(recipe)
            self.words += recipe.words
        return start

    def copy(self) -> Vectors:
        return Vectors(list(self.recipes), self.words, dict(self._starts))


def rearrange(body: Body, instr: Instr) -> None:
    """Places the result of ``instr``. Raises ``CannotLower``."""
    if instr.kind == "iota":
        _iota(body, instr)
    elif instr.kind == "broadcast_in_dim" and _stationary(body, instr.inputs[0]):
        _broadcast_stationary(body, instr)
    elif instr.outputs[0] in body.concatenations:
        body.new(instr)  # only matmuls read it, part by part
    else:
        _move(body, instr)


def _stationary(body: Body, v: int) -> bool:
    return not body.program.values[v].tile


def _iota(body: Body, instr: Instr) -> None:
    value = body.new(instr)
    shape = tuple(instr["shape"])[1:]
    _check_width(instr, shape)
    index = np.broadcast_to(
        np.arange(shape[instr["dimension"] - 1]).reshape([-1 if d == instr["dimension"] - 1 else 1 for d in range(len(shape))]),
        shape,
    )
    words = index.reshape(-1).astype(np.float32).view(np.int32) if pointwise.COMPUTE[value.dtype] == "float" else index.reshape(-1)
    value.place = InVector(body.vectors.add(_table(words)), False)
    if value.row:
        value.place = Literal(0)


def _check_width(instr: Instr, shape: tuple[int, ...]) -> None:
    """Indices are computed for every column, here, and those of a stationary array may be many."""
    if math.prod(shape) > tiles.MOST_COLUMNS:
        raise CannotLower(f"{instr.kind} of {math.prod(shape)} columns: the GPU has code for {tiles.MOST_COLUMNS} at most")


def _table(words: Any) -> VectorRecipe:
    table = tuple(int(w) for w in np.asarray(words, np.int32))
    return VectorRecipe(None, (), (), (len(table),), tiles.padded(len(table)), table=table)


def _broadcast_stationary(body: Body, instr: Instr) -> None:
    value = body.new(instr)
    (x,) = instr.inputs
    literals = dict(body.program.literals)
    if x in literals:
        body.value(x)
        value.place = Literal(literals[x]) if value.row else Splat(x)
        return
    slab = value.width if instr.outputs[0] in body.slabs else 0
    offset, layer = body.vector_of(instr)
    value.place = InVector(offset, value.row, slab, layer)


def is_vector(body: Body, instr: Instr) -> bool:
    """Does a broadcast make a vector (or scalar) of a stationary array?"""
    return _stationary(body, instr.inputs[0]) and instr.inputs[0] not in dict(body.program.literals)


def broadcast_recipe(body: Body, instr: Instr) -> VectorRecipe:
    """How a stationary value that ``instr`` broadcasts to every row becomes a vector."""
    (x,) = instr.inputs
    t = body.program.values[instr.outputs[0]]
    shape, dims = body.program.values[x].shape, tuple(instr["dims"])
    kept = [d for d in range(len(shape)) if dims[d] != 0]  # the row dimension takes one of extent 1
    row_shape = tuple(instr["shape"])[1:]
    split = body.config.split if instr.outputs[0] in body.slabs else 1
    width = tiles.padded(math.prod(t.shape) // split)
    return VectorRecipe(x, tuple(shape[d] for d in kept), tuple(dims[d] - 1 for d in kept), row_shape, width, split)


def _move(body: Body, instr: Instr) -> None:
    sources = [v for k, v in enumerate(instr.inputs) if not (instr.kind == "pad" and k == 1)]
    index = _index(body, instr, sources)
    value = body.new(instr)
    (v,) = instr.outputs
    if v in body.slabs or any(x in body.slabs for x in sources):
        raise CannotLower(f"{instr.kind} of columns that are split over CTAs has no code on the GPU")
    counts = [body.value(x).n for x in sources]
    if len(sources) == 1 and np.array_equal(index[:, 1], np.arange(counts[0])):
        body.alias(instr, sources[0])
    elif len(sources) == 1 and counts[0] == 1 and (index[:, 1] == 0).all():
        value.place = Splat(sources[0])
    elif not value.row and (parts := _whole_blocks(body, value.width, value.n, index, sources)):
        for x in dict.fromkeys(x for x, _, _ in parts):
            if _waits_for_product(body, x):  # whose chunks are those of another width
                body.materialize(x)
        value.place = Parts(parts)
    else:
        _through_scratch(body, instr, v, index, sources)


def _waits_for_product(body: Body, v: int) -> bool:
    match body.value(v).place:
        case Multiply():
            return True
        case Expression(instr):
            return any(_waits_for_product(body, x) for x in instr.inputs)
    return False


def _index(body: Body, instr: Instr, sources: list[int]) -> np.ndarray:
    """[columns, 2]: which source each column of the result comes from (-1: none), and its column there."""
    operands, stride = [], 1 << 40
    _check_width(instr, body.program.values[instr.outputs[0]].shape)
    for k, x in enumerate(sources):
        shape = body.program.values[x].shape
        _check_width(instr, shape)
        operands.append((k * stride + np.arange(math.prod(shape), dtype=np.int64)).reshape(1, *shape))
    if instr.kind == "pad":
        operands.append(np.asarray(_FILL, np.int64))
    flat = OPS[instr.kind].numpy(resolve_rows(instr.params, 1), *operands, out_dtype="int64").reshape(-1)
    return np.stack([np.where(flat < 0, -1, flat // stride), np.where(flat < 0, 0, flat % stride)], axis=1)


def _whole_blocks(body: Body, width: int, n: int, index: np.ndarray, sources: list[int]) -> tuple[tuple[int, int, int], ...] | None:
    """The result as runs of whole blocks of its sources, or None."""
    size, runs = tiles.block(width), list[tuple[int, int, int]]()
    for b in range(tiles.blocks(width)):
        columns = index[b * size : min((b + 1) * size, n)]
        source, first = int(columns[0, 0]), int(columns[0, 1])
        if source < 0 or (columns[:, 0] != source).any() or first % size:
            return None
        x = body.value(sources[source])
        if x.row or tiles.block(x.width) != size or not np.array_equal(columns[:, 1], first + np.arange(len(columns))):
            return None
        last = runs[-1] if runs else None
        if last and last[0] == sources[source] and last[1] + last[2] == first // size:
            runs[-1] = (last[0], last[1], last[2] + 1)
        else:
            runs.append((sources[source], first // size, 1))
    return tuple(runs)


def _through_scratch(body: Body, instr: Instr, v: int, index: np.ndarray, sources: list[int]) -> None:
    value = body.value(v)
    starts, words = [], 0
    for x in sources:
        starts.append(words)
        words += body.value(x).width
    body.scratch_words = max(body.scratch_words, words | 1)
    body.text("syncwarp();")  # whoever read the rows before is done
    for x, start in zip(sources, starts, strict=True):
        source = body.value(x)
        if source.row:
            body.text("KITSUNE_UNROLL")
            body.text(f"for (int h = 0; h < 2; ++h) if (lane.q == 0) rows.put(lane, h, {start}, to_word({body.row(x)}));")
        else:
            body.loop(source.width, [ToScratch(x, "rows", start)])
    body.text("syncwarp();")
    where = [_FILL if s < 0 else starts[s] + c for s, c in index]
    type_ = pointwise.COMPUTE[value.dtype]
    fill = f"{type_}(0)"
    if _FILL in where:
        if instr.kind != "pad":
            raise AssertionError("only a pad leaves columns open")
        fill = body.row(instr.inputs[1])
    if value.row:
        body.row_value(v, fill if where[0] < 0 else f"from_word<{type_}>(rows.get(lane, h, {where[0]}))")
        return
    table = body.vectors.add(_table(where))
    value.place = InScratch("rows", table, fill)
    body.materialize(v)


def concatenations_for_matmuls(body: Body) -> dict[int, tuple[int, ...]]:
    """Concatenations along the columns of 2-D tiles that only matmuls read (or other such concatenations): nothing need move."""
    readers: dict[int, list[Instr]] = {}
    for instr in body.instrs:
        for x in instr.inputs:
            readers.setdefault(x, []).append(instr)
    found: dict[int, tuple[int, ...]] = {}
    for instr in reversed(body.instrs):
        if instr.kind != "concatenate" or len(body.program.values[instr.outputs[0]].shape) != 1 or instr["dimension"] != 1:
            continue
        (v,) = instr.outputs
        if all(r.kind == "matmul" or (r.kind == "concatenate" and r.outputs[0] in found) for r in readers.get(v, ())):
            found[v] = instr.inputs
    return found


__all__ = ["REARRANGING", "CannotLower", "Vectors", "concatenations_for_matmuls", "rearrange"]
