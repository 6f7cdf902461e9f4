"""The tile program's form of a slice that begins where a number says, and of an array with an update there: elements picked inside
rows (``take``), and a choice between two.

Comes in: the SSA values of one op ``dynamic_slice`` or ``dynamic_update_slice`` in a stage, whose parameters speak of tiles. Goes
out: instructions, and the value of the result. Invariant: a start is moved so that the window lies inside the array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kitsune_jax.graph import Param, Scalar, make_params
from kitsune_jax.program.ir import Instr, TileType


class Windows:
    """``new`` makes a value of a type, ``literal`` one that is a constant; ``op``: what the instructions are of."""

    def __init__(
        self,
        body: list[Instr],
        types: Sequence[TileType],
        new: Callable[[TileType], int],
        literal: Callable[[Scalar, str], int],
        op: int,
    ):
        self.body, self.types, self.new, self.literal, self.op = body, types, new, literal, op

    def slice(self, x: int, starts: Sequence[int], dims: Sequence[int], sizes: Sequence[int]) -> int:
        """``sizes`` elements of the tile ``x`` along ``dims`` (rows first) from ``starts`` on."""
        for d, size, start in zip(dims, sizes, starts, strict=True):
            first = self._clamped(start, self.types[x].shape[d - 1] - size)
            x = self._take(x, self._add("add", (self._count(size), first), TileType(False, (size,), "int32")), d)
        return x

    def update(self, x: int, update: int, starts: Sequence[int], dims: Sequence[int]) -> int:
        """The tile ``x`` with the tile ``update`` along ``dims`` (rows first) from ``starts`` on."""
        whole, mask = self.types[x], -1
        for d, start in zip(dims, starts, strict=True):
            n, size = whole.shape[d - 1], self.types[update].shape[d - 1]
            number, inside = TileType(False, (n,), "int32"), TileType(False, (n,), "bool")
            first = self._clamped(start, n - size)
            if size == 1:  # of a cache of keys: it stands everywhere, and is chosen in one place
                here = self._add("eq", (self._count(n), first), inside)
                update = self._repeat(update, n, d)
            else:
                place = self._add("sub", (self._count(n), first), number)
                last = self.literal(size - 1, "int32")
                nearest = self._add("min", (self._add("max", (place, self.literal(0, "int32")), number), last), number)
                here = self._add("eq", (place, nearest), inside)
                update = self._take(update, nearest, d)
            spread = TileType(True, whole.shape, "bool")
            wide = self._add("broadcast_in_dim", (here,), spread, shape=spread.rows_first, dims=(d,))
            mask = wide if mask < 0 else self._add("and", (mask, wide), spread)
        return update if mask < 0 else self._add("select_n", (mask, x, update), whole)

    def _clamped(self, start: int, most: int) -> int:
        """``start`` as an int32 in [0, most]."""
        t = self.types[start]
        inside = self._add("min", (self._add("max", (start, self.literal(0, t.dtype)), t), self.literal(most, t.dtype)), t)
        if t.dtype == "int32":
            return inside
        return self._add("convert_element_type", (inside,), TileType(False, (), "int32"), new_dtype="int32")

    def _count(self, n: int) -> int:
        return self._add("iota", (), TileType(False, (n,), "int32"), shape=(n,), dimension=0)

    def _repeat(self, x: int, n: int, d: int) -> int:
        """The tile ``x`` of one element along dimension ``d``, ``n`` times."""
        t = self.types[x]
        made = TileType(True, (*t.shape[: d - 1], n, *t.shape[d:]), t.dtype)
        return self._add("broadcast_in_dim", (x,), made, shape=made.rows_first, dims=tuple(range(len(t.shape) + 1)))

    def _take(self, x: int, index: int, d: int) -> int:
        t, (size,) = self.types[x], self.types[index].shape
        made = TileType(True, (*t.shape[: d - 1], size, *t.shape[d:]), t.dtype)
        return self._add("take", (x, index), made, axis=d, mode="promise_in_bounds", fill=0)

    def _add(self, kind: str, inputs: Sequence[int], t: TileType, **params: Param) -> int:
        made = self.new(t)
        self.body.append(Instr(kind, tuple(inputs), (made,), make_params(**params), self.op))
        return made
