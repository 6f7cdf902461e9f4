"""Weights that change from tile to tile: what a loop cuts out of an array, and what depends on the batch of the tile.

Comes in: a tile program. Goes out: which values these are, and ``Cut``s: how XLA lines up the blocks of an array in the order in
which a tile multiplies with them. The keys and values of an attention head are such weights: a block of them for each iteration of
the loop over keys. They pass through shared memory, and all lanes of a CTA share them, so the lanes work on tiles of one batch.
Raises ``CannotLower``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from kitsune_jax.program.ir import ArrayType, Instr, TileProgram, walk
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.errors import CannotLower

STRAIGHT = -1  # ``Cut.loop`` of a block that no loop cuts


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Blocks of input ``array``: the elements [first + i step, first + i step + size) of dimension ``dim`` for i < ``count`` (-1:
    all of the array), for each index of the dimensions ``batch_dims``, ``batches`` together. ``axes``: (stream axis, extent),
    outermost first, whose mixed-radix index says which batch a row has. ``loop``: the number of the loop in which the block is
    used; loops that use the same blocks share them."""

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
        """[batches, count, *block]"""
        array = jnp.moveaxis(jnp.asarray(array), self.batch_dims, range(len(self.batch_dims)))
        rest = array.shape[len(self.batch_dims) :]
        array = array.reshape(self.batches, *rest)
        if self.dim < 0:
            return array[:, None]
        d = 1 + self.dim - sum(b < self.dim for b in self.batch_dims)
        if self.step == self.size:  # they follow each other
            end = self.first + self.count * self.size
            array = jnp.moveaxis(array, d, 1)[:, self.first : end]
            array = array.reshape(self.batches, self.count, self.size, *rest[: d - 1], *rest[d:])
            array = jnp.moveaxis(array, 2, d + 1)
        else:
            index = self.first + self.step * np.arange(self.count)[:, None] + np.arange(self.size)
            array = jnp.moveaxis(jnp.take(array, index, axis=d), d, 1)
        return jnp.flip(array, 1) if self.reverse else array


@dataclasses.dataclass(frozen=True, slots=True)
class Cuts:
    """``makers``: what makes each value that is a cut; ``loops``: the loop of each number; ``literals``: the other numbers."""

    makers: dict[int, Instr]
    loops: dict[int, Instr]
    literals: dict[int, Any]

    def of(self, program: TileProgram, v: int) -> Cut | None:
        """How the weight ``v`` is cut out of its array; None for one that is the same for all tiles."""
        if v not in self.makers:
            return None
        maker = self.makers[v]
        k = maker["array"]
        where = _batches(program, program.inputs[k])
        if maker.kind == "load":
            return Cut(STRAIGHT, k, -1, 0, 0, 0, 1, False, *where)
        if len(maker.inputs) != 1:
            raise CannotLower("weights that several loops cut out of an array have no code on the GPU")
        (number,), (dim,), (step,), (size,) = maker.inputs, maker["dims"], maker["steps"], maker["sizes"]
        if (loop := self.loops.get(number)) is not None:
            return Cut(number, k, dim, 0, step, size, loop["count"], bool(loop.get("reverse")), *where)
        return Cut(STRAIGHT, k, dim, self.literals[number] * step, size, size, 1, False, *where)


def find(program: TileProgram) -> Cuts:
    """Only products read a cut; what else reads a slice or a batch of an array reads its rows (``slices.py``)."""
    body = [i for stage in program.stages for i in walk(stage.body)]
    made = {i.outputs[0]: i for i in body if i.kind == "load_slice" or (i.kind == "load" and by_batch(program, i))}
    for i in body:
        for k, v in enumerate(i.inputs):
            if v in made and not (i.kind == "matmul" and k == 1):
                del made[v]
    makers = {v: i for v, i in made.items() if not program.inputs[i["array"]].streamed}
    return Cuts(makers, {i.block.index: i for i in body if i.block is not None}, dict(program.literals))


def by_groups(program: TileProgram) -> bool:
    """Do all lanes of a CTA work on one batch at a time?"""
    return bool(program.batch_axes or find(program).makers)


def by_batch(program: TileProgram, instr: Instr) -> bool:
    """Does what ``instr`` loads depend on batch axes only?"""
    array = program.inputs[instr["array"]]
    return bool(array.row_strides) and not array.streamed


def _batches(program: TileProgram, array: ArrayType) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """The dimensions of ``array`` over which batch axes run, and these axes."""
    if not array.row_strides:
        return (), ()
    dims = tuple(d for d in range(len(array.shape)) if d not in array.dims)
    strides = dim_strides(array.shape)
    axes = sorted((a for a, s in enumerate(array.row_strides) if s), key=lambda a: -array.row_strides[a])
    inner = 1
    for a in reversed(axes):  # they must pass over the dimensions in order
        if not dims or array.row_strides[a] not in {strides[d] * k for d in dims for k in (inner, 1)}:
            raise CannotLower("batches of an array that do not follow each other have no code on the GPU")
        inner *= program.axes[a]
    if math.prod(array.shape[d] for d in dims) != inner:
        raise CannotLower("batches of a part of an array have no code on the GPU")
    return dims, tuple((a, program.axes[a]) for a in axes)
