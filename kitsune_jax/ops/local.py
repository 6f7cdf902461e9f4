"""The row-local form of an op: the same op on tiles, whose arrays have the rows in front (``(rows, *row_shape)``).

Comes in: an op and, for its operands and its result, a ``Dims``: which dimensions stream. Goes out: a ``LocalOp``, the same kind
(or ``row_index``, ``matmul``, ``sink``, ``matmul_sink``) with parameters that speak of the rows-first shapes. Stationary operands
keep their shape. An entry of the op table has such a rule as its ``local``; here is what the rules share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kitsune_jax.graph import Op, Param, make_params

ROWS = -1  # stands for the number of rows of the tile at hand, in the parameters below
_SIZES = ("shape", "new_sizes", "limit")


@dataclasses.dataclass(frozen=True, slots=True)
class LocalOp:
    """``swap``: the operands change places (a ``matmul`` takes the tile first). ``squeeze``: reshape input 0 to this first."""

    kind: str
    params: tuple[tuple[str, Param], ...]
    swap: bool = False
    squeeze: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Dims:
    """Where the dimensions of a value go. ``labels``: for each one the stream axes it runs over; None: the value is stationary.

    ``batch``: how many of the first stream axes are batch axes. A value that runs over those only is stationary as well: what a
    tile finds of it has the other dimensions.
    """

    shape: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...] | None
    dtype: str = ""
    batch: int = 0

    @property
    def tile(self) -> bool:
        return self.labels is not None and (not self.batch or any(a >= self.batch for axes in self.labels for a in axes))

    def streamed(self, d: int) -> bool:
        return self.labels is not None and bool(self.labels[d])

    def row_major(self) -> bool:
        """Does the stream pass over its elements in the order in which they lie?"""
        axes = [a for dims in self.labels or () for a in dims]
        return axes == sorted(axes) and self.kept() == list(range(len(self.shape)))[len(self.shape) - len(self.kept()) :]

    def kept(self) -> list[int]:
        """The dimensions that do not stream."""
        return [d for d in range(len(self.shape)) if not self.streamed(d)]

    def local(self, d: int) -> int:
        """The rows-first index of dimension ``d``: 0 for a streamed one."""
        if not self.tile:
            return self.kept().index(d)
        return 0 if self.streamed(d) else 1 + self.kept().index(d)

    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.kept())

    def rows_first(self) -> tuple[int, ...]:
        return (ROWS, *self.row_shape()) if self.tile else self.row_shape()


def unchanged(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """For ops whose parameters name no dimension."""
    return LocalOp(op.kind, op.params)


def one_axis(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """For ops along the one dimension ``axis``."""
    return LocalOp(op.kind, make_params(**{**dict(op.params), "axis": ins[0].local(op["axis"])}))


def resolve_rows(params: Mapping[str, Param] | tuple[tuple[str, Param], ...], rows: int) -> dict[str, Param]:
    """Parameters of a rows-first op on a tile of ``rows`` rows: every ``ROWS`` in ``shape``, ``new_sizes`` or ``limit`` replaced.

    >>> resolve_rows({"shape": (-1, 4), "dims": (0,)}, rows=7)
    {'shape': (7, 4), 'dims': (0,)}
    """
    return {k: _resolve(v, rows) if k in _SIZES else v for k, v in dict(params).items()}


def _resolve(sizes: Any, rows: int) -> tuple[int, ...]:
    return tuple(rows if n == ROWS else n for n in sizes)
