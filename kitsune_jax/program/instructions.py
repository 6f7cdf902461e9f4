"""A writer of the tile program's own instructions, which are no ops of the table (``reference.instruction_types``: their types)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kitsune_jax.ops.graph import Param, Scalar, make_params
from kitsune_jax.program.ir import Instr, TileType

# Instructions that fold into a sink, or into a part of it that numbers of loops select, and the tiles they take.
FOLDED: Mapping[str, int] = {"sink": 1, "matmul_sink": 2}
Place = tuple["int | None", ...]  # for each dimension of a value, the dimension of another one that it is; None: of extent 1


class Writer:
    """Appends instructions to ``body``, and their values and constants to ``types`` and ``literals``, which writers may share."""

    def __init__(self, types: list[TileType], literals: dict[int, Scalar]):
        self.types, self.literals = types, literals
        self.body: list[Instr] = []
        self.about = -1  # the graph op of the instructions being written
        self._constants: dict[tuple[str, str], int] = {}

    @contextmanager
    def separate_body(self) -> Iterator[list[Instr]]:
        """Write instructions to the list that this yields, instead of ``body``."""
        around, self.body = self.body, []
        yield self.body
        self.body = around

    def new(self, t: TileType) -> int:
        self.types.append(t)
        return len(self.types) - 1

    def literal(self, value: Scalar, dtype: str) -> int:
        key = repr(value), dtype
        if key not in self._constants:
            self._constants[key] = self.new(TileType(False, (), dtype))
            self.literals[self._constants[key]] = value
        return self._constants[key]

    def add(self, kind: str, inputs: Sequence[int], t: TileType, **params: Param) -> int:
        """Append an instruction that makes a value of type ``t``, and return the value."""
        out = self.new(t)
        self.write(kind, inputs, (out,), **params)
        return out

    def write(self, kind: str, inputs: Sequence[int], outputs: Sequence[int] = (), **params: Param) -> None:
        self.body.append(Instr(kind, tuple(inputs), tuple(outputs), make_params(**params), self.about))

    def op(self, kind: str, *inputs: int, dtype: str | None = None) -> int:
        """A pointwise op of operands of one shape; scalars are stretched."""
        t = max((self.types[v] for v in inputs), key=lambda t: (t.tile, len(t.shape)))
        return self.add(kind, inputs, TileType(t.tile, t.shape, dtype or self.types[inputs[-1]].dtype))

    def convert(self, x: int, dtype: str) -> int:
        t = self.types[x]
        return x if t.dtype == dtype else self.add("convert_element_type", (x,), TileType(t.tile, t.shape, dtype), new_dtype=dtype)

    def broadcast(self, x: int, t: TileType, dims: Sequence[int]) -> int:
        return self.add("broadcast_in_dim", (x,), t, shape=t.rows_first, dims=dims)

    def reshape(self, x: int, sizes: Sequence[int]) -> int:
        """``x`` with ``sizes``, the rows of a tile first."""
        have = self.types[x]
        return self.add("reshape", (x,), TileType(have.tile, tuple(sizes[have.tile :]), have.dtype), new_sizes=sizes)

    def filled(self, value: Scalar, t: TileType) -> int:
        return self.broadcast(self.literal(value, t.dtype), t, ())

    def spread(self, x: int, place: Place, t: TileType) -> int:
        """``x`` repeated to the shape of ``t``: dimension ``d`` of ``x`` becomes ``place[d]``."""
        have = self.types[x]
        if not have.shape and not have.tile:
            return x
        dims = tuple(d for d in place if d is not None)
        sizes = have.rows_first
        if len(dims) < len(place):
            sizes = tuple(n for n, d in zip(sizes, place, strict=True) if d is not None)
            x = self.reshape(x, sizes)
        order = sorted(range(len(dims)), key=lambda k: dims[k])
        if order != list(range(len(dims))):
            dims, sizes = tuple(dims[k] for k in order), tuple(sizes[k] for k in order)
            x = self.add("transpose", (x,), TileType(have.tile, sizes[have.tile :], have.dtype), permutation=order)
        if dims == tuple(range(len(t.rows_first))) and have.tile == t.tile:
            return x
        return self.broadcast(x, TileType(t.tile, t.shape, have.dtype), dims)
