"""Stationary operands in the layout that kernels read, in NumPy: the meaning of the recipes of ``targets/cuda/pack.py``.

Comes in: recipes and arrays. Goes out: one-dimensional arrays, the images of weights and the vectors of 32-bit words. Those of the
packing kernel equal them bit by bit (``tests/cuda/test_packing.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe, WeightSlice
from kitsune_jax.targets.cuda.stage.split import slab_by_slab
from kitsune_jax.targets.cuda.tiles import ROW_BYTES, WeightShape, block, is_half, padded


def weights(parts: Sequence[tuple[WeightRecipe, int]], value: Callable[[int], Any]) -> np.ndarray:
    """The image of several weight matrices in their own dtype: ``parts``, one after the other. A part is (recipe, column chunk), or
    (recipe, -1) for a whole matrix, slab by slab. ``value`` gives a stationary value of the tile program.

    Sliced weights lie batch by batch; in each the weights of every loop, iteration by iteration, and of no loop.
    """
    recipes = dict.fromkeys(recipe for recipe, _ in parts)
    if parts[0][0].slices is None:
        chunks = {recipe: _weight(recipe, value(recipe.value)) for recipe in recipes}
        found = [part for recipe, chunk in parts for part in (chunks[recipe] if chunk < 0 else [chunks[recipe][chunk]])]
        return found[0] if len(found) == 1 else np.concatenate(found)
    chunks = {}  # [batches, count, elements]
    for recipe in recipes:
        assert recipe.slices is not None
        blocks = _blocks(recipe.slices, value(recipe.value))
        each = [[_weight(recipe, block) for block in batch] for batch in blocks]
        chunks[recipe] = [np.array([[block[c] for block in batch] for batch in each]) for c in range(len(each[0][0]))]
    runs = []
    for _, run in itertools.groupby(parts, key=lambda part: part[0].loop):
        together = np.concatenate([chunks[recipe][chunk] for recipe, chunk in run], axis=2)
        runs.append(together.reshape(together.shape[0], -1))
    return np.concatenate(runs, axis=1).reshape(-1)


def vectors(recipes: Sequence[VectorRecipe], values: Sequence[Any]) -> np.ndarray:
    """All vectors as one array of uint32 words: floats as float32; integers and booleans as 32-bit integers."""
    return np.concatenate([_vector(r, v) for r, v in zip(recipes, values, strict=True)])


def _blocks(of: WeightSlice, array: Any) -> Any:
    """The blocks of ``array`` in the order in which a tile multiplies with them: [batches, count, *block]."""
    array = np.moveaxis(np.asarray(array), of.batch_dims, range(len(of.batch_dims)))
    rest = array.shape[len(of.batch_dims) :]
    array = array.reshape(of.batches, *rest)
    if of.dim < 0:
        return array[:, None]
    d = 1 + of.dim - sum(b < of.dim for b in of.batch_dims)
    if of.step == of.size:  # the blocks are adjacent
        end = of.first + of.count * of.size
        array = np.moveaxis(array, d, 1)[:, of.first : end]
        array = array.reshape(of.batches, of.count, of.size, *rest[: d - 1], *rest[d:])
        array = np.moveaxis(array, 2, d + 1)
    else:
        index = of.first + of.step * np.arange(of.count)[:, None] + np.arange(of.size)
        array = np.moveaxis(np.take(array, index, axis=d), d, 1)
    return np.flip(array, 1) if of.reverse else array


def _weight(recipe: WeightRecipe, value: Any) -> list[np.ndarray]:
    """The packed column chunks of a matrix, slab by slab."""
    shape = recipe.shape
    w = np.transpose(np.asarray(value), recipe.permutation)
    w = w.reshape(math.prod(w.shape[: recipe.contracted]), math.prod(w.shape[recipe.contracted :]))
    w = _rows_side_by_side(slab_by_slab(w, recipe.groups, shape.split), recipe.runs, shape.split)
    half = is_half(shape.dtype)
    if not half:
        w = nearest_tf32(w)
    starts = itertools.accumulate(shape.pieces, initial=0)
    pieces = [w[start : start + piece] for start, piece in zip(starts, shape.pieces, strict=False)]
    rows = [piece if k in recipe.in_place else _blocks_of_k(piece, half) for k, piece in enumerate(pieces)]
    w = rows[0] if len(rows) == 1 else np.concatenate(rows)  # [32 * k_blocks, n]
    lanes = ROW_BYTES // (2 if half else 4)
    w = np.pad(w, ((0, shape.k_chunks * lanes - w.shape[0]), (0, 0)))
    per = -(-shape.n // shape.split)
    return [part for s in range(shape.split) for part in _slab(w[:, s * per : (s + 1) * per], shape, lanes)]


def _blocks_of_k(w: np.ndarray, half: bool) -> np.ndarray:
    """The rows of one piece in the order in which the instructions read a block of 32; blocks are padded to 32."""
    width = padded(w.shape[0])
    b = block(width)
    w = np.pad(w, ((0, width - w.shape[0]), (0, 0))).reshape(width // b, 4, b // 8, 2, -1)  # [block, q, j, e, n]
    w = w.transpose((0, 2, 1, 3, 4) if half else (0, 2, 3, 1, 4)).reshape(width // b, b, -1)
    return np.pad(w, ((0, 0), (0, 32 - b), (0, 0))).reshape(width // b * 32, -1)


def _slab(w: np.ndarray, shape: WeightShape, lanes: int) -> list[np.ndarray]:
    """[K, n] as column chunks [k chunk][column][128 bytes of K], with permuted columns, swizzled and flat."""
    width, b = shape.slab, block(shape.slab)
    w = np.pad(w, ((0, 0), (0, width - w.shape[1])))
    w = w.reshape(-1, width // b, 4, b // 8, 2).transpose(0, 1, 3, 2, 4).reshape(-1, width)  # [block, j, q, e]
    parts = []
    for start, columns in zip(itertools.accumulate(shape.chunks, initial=0), shape.chunks, strict=False):
        part = w[:, start : start + columns].reshape(shape.k_chunks, lanes, columns).transpose(0, 2, 1)
        parts.append(_swizzle(part.reshape(shape.k_chunks, columns // 8, 8, 8, lanes // 8)).reshape(-1))
    return parts


def _swizzle(x: np.ndarray) -> np.ndarray:
    """[.., row 8, unit 8, ..] with unit u of row r moved to u ^ r: for each bit, halves are exchanged in the rows that have it
    set."""
    for bit in (1, 2, 4):
        units = x.reshape(*x.shape[:3], 8 // (2 * bit), 2, bit, x.shape[-1])
        exchanged = np.flip(units, 4).reshape(x.shape)
        rows = (np.arange(8) & bit).astype(bool).reshape(8, 1, 1)
        x = np.where(rows, exchanged, x)
    return x


def _vector(recipe: VectorRecipe, value: Any) -> np.ndarray:
    if recipe.value is None:
        words = np.asarray(recipe.table, np.int32).view(np.uint32)
    elif recipe.how is not None:
        words = np.asarray(recipe.how.of(value)).astype(np.int32).reshape(-1).view(np.uint32)
    else:
        value = np.asarray(value)
        integer = np.uint32 if value.dtype.kind in "ub" else np.int32
        value = np.ascontiguousarray(value.astype(integer if value.dtype.kind in "uib" else np.float32)).view(np.uint32)
        expanded = [1] * len(recipe.row_shape)
        for d, n in zip(recipe.dims, recipe.shape, strict=True):
            expanded[d] = n
        words = np.broadcast_to(value.reshape(expanded), recipe.row_shape).reshape(-1)
    words = slab_by_slab(words, recipe.groups, recipe.split)
    if recipe.split > 1:
        per = -(-words.shape[0] // recipe.split)
        slabs = np.pad(words, (0, recipe.split * per - words.shape[0])).reshape(recipe.split, per)
        words = np.pad(slabs, ((0, 0), (0, recipe.width - per))).reshape(-1)
    return np.pad(words, (0, recipe.words - words.shape[0]))


def nearest_tf32(w: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; NaN stays as it is."""
    bits = np.ascontiguousarray(w, np.float32).view(np.uint32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1)) & ~np.uint32(0x1FFF)
    return np.where(np.isnan(w), w, rounded.view(np.float32))


def _rows_side_by_side(w: np.ndarray, runs: Sequence[int], ctas: int) -> np.ndarray:
    """[K, n] as [K / ctas, ctas x n]: for each CTA the rows of its slab in every run of K."""
    if not runs:
        return w
    starts = itertools.accumulate(runs, initial=0)
    parts = [w[start : start + run].reshape(ctas, run // ctas, -1) for start, run in zip(starts, runs, strict=False)]
    return np.concatenate(parts, axis=1).swapaxes(0, 1).reshape(w.shape[0] // ctas, -1)
