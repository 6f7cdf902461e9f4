"""The recipes of stationary operands: where a kernel wants the elements of weights and vectors.

Comes in: a tile program. Goes out: which weights change with a loop or a batch (``WeightSlices``), and the recipes that code
generation makes: of images of weights (chunks of 128 bytes of K by N columns, both permuted to the fragment layout, with the
128-byte swizzle: ``cuda/include/kitsune/layout.h``), and of vectors of 32-bit words padded to their tile's width. ``packing`` turns
them into the table by which one kernel writes all of them; ``reference/packed.py`` has their meaning.

float32 weights are rounded to the nearest tf32: the tensor core truncates, which would make all products of a layer too small by up
to a unit in the tenth place of the mantissa.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from kitsune_jax.errors import CannotLower
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import ArrayType, Instr, TileProgram, walk
from kitsune_jax.targets.cuda.tiles import WeightShape

# --- Sliced weights: weights that change with the iteration of a loop or with the batch of a tile ---------------------------------

NO_LOOP = -1  # ``WeightSlice.loop`` of a block that is not sliced by a loop


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSlice:
    """Weights that are blocks of input ``array``: elements [first + i step, first + i step + size) of dimension ``dim`` for
    i < ``count`` (-1: all of the array), for each of ``batches`` indices of the dimensions ``batch_dims``.

    ``axes``: (stream axis, extent), outermost first, whose mixed-radix index is the batch of a row. ``loop``: the number of the
    loop that uses the blocks, one in each iteration. The keys and values of an attention head are such weights, a block for each
    iteration over the keys. They pass through shared memory, where all lanes of a CTA read them, so the lanes work on tiles of one
    batch.
    """

    loop: int
    array: int
    dim: int
    first: int
    step: int
    size: int
    count: int
    reverse: bool
    batch_dims: tuple[int, ...]
    axes: tuple[tuple[int, int], ...]

    @property
    def batches(self) -> int:
        return math.prod(n for _, n in self.axes)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSlices:
    """``makers``: the instruction that loads each sliced weight; ``loops``: the loop that makes each number; ``literals``: the
    other numbers."""

    makers: dict[int, Instr]
    loops: dict[int, Instr]
    literals: dict[int, Any]

    def of(self, program: TileProgram, v: int) -> WeightSlice | None:
        """How weight ``v`` is sliced out of its array; None for a weight that is the same for all tiles."""
        if v not in self.makers:
            return None
        maker = self.makers[v]
        k = maker["array"]
        where = _batches(program, program.inputs[k])
        if maker.kind == "load":
            return WeightSlice(NO_LOOP, k, -1, 0, 0, 0, 1, False, *where)
        if len(maker.inputs) != 1:
            raise CannotLower("weights that several nested loops slice out of an array have no code on the GPU")
        (number,), (dim,), (step,), (size,) = maker.inputs, maker["dims"], maker["steps"], maker["sizes"]
        if (loop := self.loops.get(number)) is not None:
            return WeightSlice(number, k, dim, 0, step, size, loop["count"], bool(loop.get("reverse")), *where)
        return WeightSlice(NO_LOOP, k, dim, self.literals[number] * step, size, size, 1, False, *where)


def find_weight_slices(program: TileProgram) -> WeightSlices:
    """The sliced weights, which only products read. Other readers of a slice read its rows instead (``stage/instructions.py``)."""
    body = [i for stage in program.stages for i in walk(stage.body)]
    made = {i.outputs[0]: i for i in body if i.kind == "load_slice" or (i.kind == "load" and loads_by_batch(program, i))}
    for i in body:
        for k, v in enumerate(i.inputs):
            if v in made and not (i.kind == "matmul" and k == 1):
                del made[v]
    makers = {v: i for v, i in made.items() if not program.inputs[i["array"]].streamed}
    return WeightSlices(makers, {i.block.index: i for i in body if i.block is not None}, dict(program.literals))


def lanes_share_batch(program: TileProgram) -> bool:
    """Must all lanes of a CTA work on one batch at a time?"""
    return bool(program.batch_axes or find_weight_slices(program).makers)


def loads_by_batch(program: TileProgram, instr: Instr) -> bool:
    """Does ``instr`` load a value that depends on batch axes only?"""
    array = program.inputs[instr["array"]]
    return bool(array.row_strides) and not array.streamed


def _batches(program: TileProgram, array: ArrayType) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(dimensions of ``array`` that are indexed by batch axes, (axis, extent) of these axes)."""
    if not array.row_strides:
        return (), ()
    dims = tuple(d for d in range(len(array.shape)) if d not in array.dims)
    strides = dim_strides(array.shape)
    axes = sorted((a for a, s in enumerate(array.row_strides) if s), key=lambda a: -array.row_strides[a])
    inner = 1
    for a in reversed(axes):  # the axes must cover the dimensions in order
        if not dims or array.row_strides[a] not in {strides[d] * k for d in dims for k in (inner, 1)}:
            raise CannotLower("batches that are not consecutive in their array have no code on the GPU")
        inner *= program.axes[a]
    if math.prod(array.shape[d] for d in dims) != inner:
        raise CannotLower("batches of a part of an array have no code on the GPU")
    return dims, tuple((a, program.axes[a]) for a in axes)


# --- Recipes ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class WeightRecipe:
    """A packed weight. ``value``: the stationary value of the tile program; ``permutation``: its dimensions as (contracted...,
    free...), of which the first ``contracted`` flatten to K. ``shape``: of the matrices of all CTAs side by side. ``slices``: the
    weight is one block of many, whose dimensions these are. ``groups``: groups of columns; a slab is a slab of each group.
    ``runs``: runs of columns of the operand of a partial product; a CTA has its slab of each run, and the rows of the matrix for
    these columns. ``in_place``: pieces of K whose rows are in the order of memory, as the tensor core reads an operand in boxes
    (``BoxSource`` of ``stage/matmul.h``)."""

    value: int
    permutation: tuple[int, ...]
    contracted: int
    shape: WeightShape
    slices: WeightSlice | None = None
    groups: int = 1
    runs: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of matrices of this shape: blocks of an array, for each batch."""
        return 1 if self.slices is None else self.slices.batches * self.slices.count

    @property
    def loop(self) -> int:
        """The number of the loop that slices the weight."""
        return NO_LOOP if self.slices is None else self.slices.loop


@dataclasses.dataclass(frozen=True, slots=True)
class GatheredColumns:
    """A take along the dimension of extent ``count`` of [outer, count, inner] columns from column ``start``: for each column of the
    result, its column in the source. An index out of range gives -1 if it ``fills``, else the nearest."""

    outer: int
    count: int
    inner: int
    fills: bool
    start: int

    def of(self, index: jax.Array) -> jax.Array:
        index, inside = _positions(index, self.count)
        outer, inner = jnp.arange(self.outer)[:, None, None], jnp.arange(self.inner)
        found = self.start + (outer * self.count + index[:, None]) * self.inner + inner
        return jnp.where(inside[:, None], found, -1) if self.fills else found


@dataclasses.dataclass(frozen=True, slots=True)
class ScatteredColumns:
    """A scatter of [outer, count, inner] columns by ``count`` indices into [outer, n, inner]. ``part`` "list": the source columns
    of each result column, in order, one result column after the other, those out of range last; "first": where the list of each
    result column begins."""

    part: str
    outer: int
    count: int
    inner: int
    n: int
    start: int

    def of(self, index: jax.Array) -> jax.Array:
        index, inside = _positions(index, self.n)
        index = jnp.where(inside, index, self.n)  # after all others
        outer, inner = jnp.arange(self.outer)[:, None, None], jnp.arange(self.inner)
        out = jnp.where(index[:, None] < self.n, (outer * self.n + index[:, None]) * self.inner + inner, self._columns).reshape(-1)
        if self.part == "list":
            return self.start + jnp.argsort(out, stable=True)
        return jnp.searchsorted(jnp.sort(out), jnp.arange(self._columns + 1))

    @property
    def _columns(self) -> int:
        return self.outer * self.n * self.inner


def _positions(index: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """(flat indices clamped to [0, n), whether each was in range)."""
    index = index.reshape(-1)
    inside = (index >= 0) & (index < n)
    return jnp.clip(index, 0, n - 1).astype(jnp.int32), inside


@dataclasses.dataclass(frozen=True, slots=True)
class VectorRecipe:
    """A stationary value as every row reads it: reshaped to ``shape``, broadcast to ``row_shape`` along ``dims``, flattened,
    padded.

    ``how``: the value is an index, of which these columns are made. ``value`` is None for a table of constants, which is ``table``.
    ``width``: padded words, ``split`` times as many with slabs, each of which is a slab of every one of ``groups``.
    """

    value: int | None
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    row_shape: tuple[int, ...]
    width: int
    split: int = 1
    table: tuple[int, ...] = ()
    how: GatheredColumns | ScatteredColumns | None = None
    groups: int = 1

    @property
    def words(self) -> int:
        return -(-self.width * self.split // 32) * 32  # vectors start at multiples of 128 bytes, for aligned loads
