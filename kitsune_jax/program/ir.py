"""The tile program: typed SSA over tiles, one body per stage.

Comes in: a Graph, a Region of it and a Plan (``program.build``). Goes out: what every target and the NumPy interpreter execute. A
**tile** value has shape ``(rows, *row_shape)``, rows first, and a **stationary** value is a whole array in its original layout; the
number of rows is the program's ``tile_rows``, less on the last tile, and stands as ``ROWS`` (-1) in the parameters of rows-first
ops.

Instruction kinds:

* every pointwise / structural kind of the op table, with its parameters rewritten to the rows-first shapes (an ``axes=(1,)`` of a
  ``[batch, n]`` value streamed over dimension 0 stays ``(1,)``; of an ``[n, batch]`` value streamed over dimension 1, axis 0
  becomes 1);
* ``load``: value <- input array ``array`` (a tile, or the whole array when the array is stationary);
* ``literal``: value <- rank-0 constant ``value``;
* ``row_index``: value <- integer index along one streamed dimension, for ``iota`` over it, parameters ``axes`` (the stream axes,
  outermost first, whose mixed-radix index it is), dtype from the value's type; the value's tile shape may have trailing dimensions
  over which it is constant;
* ``matmul``: (tile x, stationary w) -> tile; ``x_contract, x_batch`` are dimensions of the rows-first x, ``w_contract, w_batch`` of
  w, and the result is ``transpose(dot_general(x, w), out_perm)``, rows first again. ``accumulate`` is the accumulation dtype.
* ``sink``: tile -> sink accumulator ``sink``, reducing by ``how`` over rows and ``axes`` (rows-first, 0 included). No output value.
* ``matmul_sink``: (tile x, tile y) -> sink accumulator ``sink``: adds ``dot_general(x, y)`` over ``x_contract``/``y_contract``
  (rows-first dimensions, 0 included) and ``x_batch``/``y_batch``, accumulated in the sink's dtype: a weight gradient. No output
  value.
* ``push`` / ``pop``: value <-> queue ``queue``; ``store``: tile value -> output array ``array``.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.graph import Param, Scalar
from kitsune_jax.ops.local import ROWS as ROWS


@dataclasses.dataclass(frozen=True, slots=True)
class TileType:
    """``tile``: shape is the *row shape* (without the row dimension). Otherwise stationary: the whole shape."""

    tile: bool
    shape: tuple[int, ...]
    dtype: str

    @property
    def rows_first(self) -> tuple[int, ...]:
        return (ROWS, *self.shape) if self.tile else self.shape

    def __str__(self) -> str:
        dims = ",".join(("R", *map(str, self.shape)) if self.tile else map(str, self.shape))
        return f"{self.dtype}[{dims}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Instr:
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[tuple[str, Param], ...] = ()
    op: int = -1  # index of the graph op it came from, for messages

    def __getitem__(self, name: str) -> Param:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(f"{self.kind} has no parameter {name!r}")

    def get(self, name: str, default: Param = None) -> Param:
        return next((v for k, v in self.params if k == name), default)


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """An array at the border of the program: dense, row-major.

    ``row_strides``: element stride of each stream axis, 0 for an axis it does not depend on (all of them empty for a stationary
    array); ``dims``: the array's dimensions, in order, that are *not* streamed (they are the tile's row shape).
    """

    shape: tuple[int, ...]
    dtype: str
    streamed: bool
    row_strides: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SinkType:
    """A reduction over the stream. The accumulator of ``shape`` is folded over all tiles by ``how``: sum, max, min, prod, and, or.

    ``array``: the output array it is written to, converted to that array's dtype.
    """

    how: str
    shape: tuple[int, ...]
    dtype: str
    array: int


@dataclasses.dataclass(frozen=True, slots=True)
class QueueType:
    """A ring of ``depth`` tiles from stage ``producer`` to every stage of ``consumers``; a slot is free once all have read it."""

    producer: int
    consumers: tuple[int, ...]
    tile: TileType
    depth: int


@dataclasses.dataclass(frozen=True, slots=True)
class StageProgram:
    name: str
    phase: int
    body: tuple[Instr, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TileProgram:
    axes: tuple[int, ...]  # extents of the stream axes; rows = their product
    tile_rows: int
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    values: tuple[TileType, ...]
    literals: tuple[tuple[int, Scalar], ...]  # value id -> constant
    stages: tuple[StageProgram, ...]
    queues: tuple[QueueType, ...]
    sinks: tuple[SinkType, ...]
    workers: int = 1  # that the plan counts on, all stages and replicas together

    @property
    def rows(self) -> int:
        rows = 1
        for n in self.axes:
            rows *= n
        return rows

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    def __str__(self) -> str:
        lines = [f"program rows={self.rows} axes={self.axes} tile_rows={self.tile_rows}"]
        for q, queue in enumerate(self.queues):
            lines.append(f"  queue {q}: {queue.tile} {queue.producer} -> {queue.consumers} depth {queue.depth}")
        for s, stage in enumerate(self.stages):
            lines.append(f"  stage {s} {stage.name} phase {stage.phase}")
            for i in stage.body:
                outs = ", ".join(f"%{v}:{self.values[v]}" for v in i.outputs)
                params = ", ".join(f"{k}={v}" for k, v in i.params)
                lines.append(f"    {outs} = {i.kind}({', '.join(f'%{v}' for v in i.inputs)}) {{{params}}}")
        return "\n".join(lines)
