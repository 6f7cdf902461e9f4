"""Stationary operands in the layout that kernels read, packed by XLA before the custom call.

Comes in: a tile program; arrays in the user's layout and the recipes that code generation made. Goes out: one-dimensional arrays:
images of weights (chunks of 128 bytes of K by N columns, both permuted to the fragment layout, with the 128-byte swizzle:
``cuda/include/kitsune/layout.h``), and vectors of 32-bit words padded to their tile's width.

float32 weights are rounded to the nearest tf32: the tensor core truncates, which would make all products of a layer too small by up
to a unit in the tenth place of the mantissa. Packing uses only this, reshapes, transposes, pads and selects, which XLA fuses into
one pass over the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax.errors import CannotLower
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import ArrayType, Instr, TileProgram, walk
from kitsune_jax.targets.cuda.stage.split import rows_side_by_side, slab_by_slab
from kitsune_jax.targets.cuda.tiles import ROW_BYTES, WeightShape, block, is_half, padded

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

    def blocks(self, array: Any) -> Any:
        """The blocks of ``array`` in the order in which a tile multiplies with them: [batches, count, *block]."""
        array = jnp.moveaxis(jnp.asarray(array), self.batch_dims, range(len(self.batch_dims)))
        rest = array.shape[len(self.batch_dims) :]
        array = array.reshape(self.batches, *rest)
        if self.dim < 0:
            return array[:, None]
        d = 1 + self.dim - sum(b < self.dim for b in self.batch_dims)
        if self.step == self.size:  # the blocks are adjacent
            end = self.first + self.count * self.size
            array = jnp.moveaxis(array, d, 1)[:, self.first : end]
            array = array.reshape(self.batches, self.count, self.size, *rest[: d - 1], *rest[d:])
            array = jnp.moveaxis(array, 2, d + 1)
        else:
            index = self.first + self.step * np.arange(self.count)[:, None] + np.arange(self.size)
            array = jnp.moveaxis(jnp.take(array, index, axis=d), d, 1)
        return jnp.flip(array, 1) if self.reverse else array


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
    these columns."""

    value: int
    permutation: tuple[int, ...]
    contracted: int
    shape: WeightShape
    slices: WeightSlice | None = None
    groups: int = 1
    runs: tuple[int, ...] = ()

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


def weights(parts: Sequence[tuple[WeightRecipe, int]], value: Callable[[int], Any]) -> jax.Array:
    """The image of several weight matrices in their own dtype: ``parts``, one after the other. A part is (recipe, column chunk), or
    (recipe, -1) for a whole matrix, slab by slab. ``value`` gives a stationary value of the tile program.

    Sliced weights lie batch by batch; in each the weights of every loop, iteration by iteration, and of no loop.
    """
    recipes = dict.fromkeys(recipe for recipe, _ in parts)
    if parts[0][0].slices is None:
        chunks = {recipe: _weight(recipe, value(recipe.value)) for recipe in recipes}
        found = [part for recipe, chunk in parts for part in (chunks[recipe] if chunk < 0 else [chunks[recipe][chunk]])]
        return found[0] if len(found) == 1 else jnp.concatenate(found)
    chunks = {}  # [batches, count, elements]
    for recipe in recipes:
        assert recipe.slices is not None
        pack_one = functools.partial(_weight, recipe)
        chunks[recipe] = jax.vmap(jax.vmap(pack_one))(recipe.slices.blocks(value(recipe.value)))
    runs = []
    for _, run in itertools.groupby(parts, key=lambda part: part[0].loop):
        together = jnp.concatenate([chunks[recipe][chunk] for recipe, chunk in run], axis=2)
        runs.append(together.reshape(together.shape[0], -1))
    return jnp.concatenate(runs, axis=1).reshape(-1)


def vectors(recipes: Sequence[VectorRecipe], values: Sequence[Any]) -> jax.Array:
    """All vectors as one array of uint32 words: floats as float32; integers and booleans as 32-bit integers."""
    return jnp.concatenate([_vector(r, v) for r, v in zip(recipes, values, strict=True)])


def _weight(recipe: WeightRecipe, value: Any) -> list[jax.Array]:
    """The packed column chunks of a matrix, slab by slab."""
    shape = recipe.shape
    w = jnp.transpose(jnp.asarray(value), recipe.permutation)
    w = w.reshape(math.prod(w.shape[: recipe.contracted]), math.prod(w.shape[recipe.contracted :]))
    w = rows_side_by_side(slab_by_slab(w, recipe.groups, shape.split), recipe.runs, shape.split)
    half = is_half(shape.dtype)
    if not half:
        w = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=10)
    starts = itertools.accumulate(shape.pieces, initial=0)
    rows = [_blocks_of_k(w[start : start + piece], half) for start, piece in zip(starts, shape.pieces, strict=False)]
    w = rows[0] if len(rows) == 1 else jnp.concatenate(rows)  # [32 * k_blocks, n]
    lanes = ROW_BYTES // (2 if half else 4)
    w = jnp.pad(w, ((0, shape.k_chunks * lanes - w.shape[0]), (0, 0)))
    per = -(-shape.n // shape.split)
    return [part for s in range(shape.split) for part in _slab(w[:, s * per : (s + 1) * per], shape, lanes)]


def _blocks_of_k(w: jax.Array, half: bool) -> jax.Array:
    """The rows of one piece in the order in which the instructions read a block of 32; blocks are padded to 32."""
    width = padded(w.shape[0])
    b = block(width)
    w = jnp.pad(w, ((0, width - w.shape[0]), (0, 0))).reshape(width // b, 4, b // 8, 2, -1)  # [block, q, j, e, n]
    w = w.transpose((0, 2, 1, 3, 4) if half else (0, 2, 3, 1, 4)).reshape(width // b, b, -1)
    return jnp.pad(w, ((0, 0), (0, 32 - b), (0, 0))).reshape(width // b * 32, -1)


def _slab(w: jax.Array, shape: WeightShape, lanes: int) -> list[jax.Array]:
    """[K, n] as column chunks [k chunk][column][128 bytes of K], with permuted columns, swizzled and flat."""
    width, b = shape.slab, block(shape.slab)
    w = jnp.pad(w, ((0, 0), (0, width - w.shape[1])))
    w = w.reshape(-1, width // b, 4, b // 8, 2).transpose(0, 1, 3, 2, 4).reshape(-1, width)  # [block, j, q, e]
    parts = []
    for start, columns in zip(itertools.accumulate(shape.chunks, initial=0), shape.chunks, strict=False):
        part = w[:, start : start + columns].reshape(shape.k_chunks, lanes, columns).transpose(0, 2, 1)
        parts.append(_swizzle(part.reshape(shape.k_chunks, columns // 8, 8, 8, lanes // 8)).reshape(-1))
    return parts


def _swizzle(x: jax.Array) -> jax.Array:
    """[.., row 8, unit 8, ..] with unit u of row r moved to u ^ r: for each bit, halves are exchanged in the rows that have it
    set."""
    for bit in (1, 2, 4):
        units = x.reshape(*x.shape[:3], 8 // (2 * bit), 2, bit, x.shape[-1])
        exchanged = jnp.flip(units, 4).reshape(x.shape)
        rows = (jnp.arange(8) & bit).astype(bool).reshape(8, 1, 1)
        x = jnp.where(rows, exchanged, x)
    return x


def _vector(recipe: VectorRecipe, value: Any) -> jax.Array:
    if recipe.value is None:
        words = jnp.asarray(np.asarray(recipe.table, np.int32).view(np.uint32))
    elif recipe.how is not None:
        words = jax.lax.bitcast_convert_type(recipe.how.of(jnp.asarray(value)).astype(jnp.int32).reshape(-1), jnp.uint32)
    else:
        value = jnp.asarray(value)
        unsigned = jnp.issubdtype(value.dtype, jnp.unsignedinteger) or value.dtype == jnp.bool_
        integer = jnp.uint32 if unsigned else jnp.int32
        value = value.astype(jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else integer)
        words = jax.lax.broadcast_in_dim(value.reshape(recipe.shape), recipe.row_shape, recipe.dims).reshape(-1)
        words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    words = slab_by_slab(words, recipe.groups, recipe.split)
    if recipe.split > 1:
        per = -(-words.shape[0] // recipe.split)
        words = jnp.pad(words, (0, recipe.split * per - words.shape[0])).reshape(recipe.split, per)
        words = jnp.pad(words, ((0, 0), (0, recipe.width - per))).reshape(-1)
    return jnp.pad(words, (0, recipe.words - words.shape[0]))
