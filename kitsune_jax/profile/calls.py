"""What a call of a pipeline costs beside its work, and what reads and sums by indices cost: small programs to be timed.

Comes in: sizes. Goes out: functions that are nothing but a call, to be timed inside a jitted function as XLA's own are.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kitsune_jax.graph import make_params
from kitsune_jax.profile.kernels import TILE
from kitsune_jax.program.ir import ArrayType, Instr, SinkType, StageProgram, TileProgram, TileType
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import emit
from kitsune_jax.targets.cpu.lower import lower
from kitsune_jax.targets.cpu.words import encode

_F32 = bc.DTYPE_CODE["float32"]
# Elements of the rows that are read and folded by indices; (m, k, n) of the products of each row.
ACCESSED = (16, 256)
PRODUCTS = ((8, 8, 8), (27, 128, 27))
_ACCESS_TILE = 256


def layers(rows: int, width: int, depth: int) -> np.ndarray:
    """The words of ``x @ w0 @ w1 ...``, ``rows`` x ``width``, in tiles of 96 rows."""
    tile = min(TILE, rows)
    weights = tuple(
        bc.Prep(bc.WEIGHT, bc.Ref(bc.IN, 1 + k, 0, _F32), _F32, (), (), (width,), (width,), (width,), (1,)) for k in range(depth)
    )

    def operand(k: int) -> bc.Operand:  # of layer k's input: the results in between take turns in two tiles of scratch
        if k in (0, depth):
            return bc.Operand(bc.Ref(bc.IN if k == 0 else bc.OUT, 0, 0, _F32), width, (0,))
        return bc.Operand(bc.Ref(bc.SCRATCH, 0, k % 2 * tile * width, _F32), width, (0,))

    products = tuple(bc.Matmul(operand(k), 1, 1, k, -1, 0, operand(k + 1)) for k in range(depth))
    return encode(
        bc.Program(
            name="profile",
            axes=(rows,),
            batch_axes=0,
            tile_rows=tile,
            workers=-(-rows // TILE),
            inputs=(bc.Array(_F32, rows * width), *[bc.Array(_F32, width * width)] * depth),
            outputs=(bc.Array(_F32, rows * width),),
            preps=weights,
            sinks=(),
            queues=(),
            stages=(bc.Stage("layers", 2 * tile * width * 4, products),),
        )
    )


def caller(rows: int, width: int, depth: int) -> Any:
    """A function of x (``rows`` x ``width``) and ``depth`` weights, float32, that is nothing but the call."""
    words = layers(rows, width, depth)
    result = jax.ShapeDtypeStruct((rows, width), np.float32)
    return lambda *args: emit.call(words, args, (result,))[0]


class _Tiles:
    """A tile program of one stage, an instruction at a time. Arrays stream unless it is said otherwise."""

    def __init__(self, rows: int):
        self.rows = rows
        self.inputs: list[ArrayType] = []
        self.outputs: list[ArrayType] = []
        self.values: list[TileType] = []
        self.sinks: list[SinkType] = []
        self.body: list[Instr] = []

    def add(
        self, kind: str, inputs: tuple[int, ...], tile: bool, shape: tuple[int, ...], dtype: str = "float32", **params: Any
    ) -> int:
        self.values.append(TileType(tile, shape, dtype))
        self.body.append(Instr(kind, inputs, (len(self.values) - 1,), make_params(**params)))
        return len(self.values) - 1

    def load(self, *shape: int, dtype: str = "float32", streamed: bool = True) -> int:
        self.inputs.append(self._array(shape, dtype) if streamed else ArrayType(shape, dtype, False))
        return self.add("load", (), streamed, shape, dtype, array=len(self.inputs) - 1)

    def store(self, v: int) -> None:
        t = self.values[v]
        self.outputs.append(self._array(t.shape, t.dtype))
        self.body.append(Instr("store", (v,), (), make_params(array=len(self.outputs) - 1)))

    def fold(self, x: int, ids: int, n: int, *, is_sorted: bool) -> None:
        """Row x into row ids of a table of ``n`` rows."""
        shape = (n, *self.values[x].shape)
        self.outputs.append(ArrayType(shape, "float32", False))
        self.sinks.append(SinkType("sum", shape, "float32", len(self.outputs) - 1))
        self.body.append(Instr("sink_at", (x, ids), (), make_params(sink=len(self.sinks) - 1, sorted=is_sorted)))

    def _array(self, shape: tuple[int, ...], dtype: str) -> ArrayType:
        return ArrayType((self.rows, *shape), dtype, True, (int(np.prod(shape)),), tuple(range(1, len(shape) + 1)))

    def function(self, workers: int) -> Any:
        """A function of the inputs that is nothing but the call."""
        program = TileProgram(
            axes=(self.rows,),
            tile_rows=_ACCESS_TILE,
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            values=tuple(self.values),
            literals=(),
            stages=(StageProgram("profile", tuple(self.body)),),
            queues=(),
            sinks=tuple(self.sinks),
            workers=workers,
        )
        words = encode(lower(program, "profile"))
        results = [jax.ShapeDtypeStruct(a.shape, np.dtype(a.dtype)) for a in self.outputs]
        return lambda *args: emit.call(words, args, results)


def taker(rows: int, n: int, width: int, workers: int) -> Any:
    """A function of ids (``rows``) and a table (``n`` x ``width``): the sums of the rows taken."""
    t = _Tiles(rows)
    ids, table = t.load(dtype="int32"), t.load(n, width, streamed=False)
    taken = t.add("gather", (table, ids), True, (width,), mode="clip", fill=0)
    t.store(t.add("reduce_sum", (taken,), True, (), axes=(1,)))
    return t.function(workers)


def folder(rows: int, n: int, width: int, workers: int, *, is_sorted: bool) -> Any:
    """A function of ids (``rows``) and x (``rows`` x ``width``), which is folded into ``n`` rows by the ids."""
    t = _Tiles(rows)
    ids, x = t.load(dtype="int32"), t.load(width)
    t.fold(x, ids, n, is_sorted=is_sorted)
    return t.function(workers)


def picker(rows: int, n: int, count: int, workers: int) -> Any:
    """A function of indices (``count``) and x (``rows`` x ``n``): the elements of every row that the indices name."""
    t = _Tiles(rows)
    ids, x = t.load(count, dtype="int32", streamed=False), t.load(n)
    t.store(t.add("take", (x, ids), True, (count,), axis=1, mode="clip", fill=0))
    return t.function(workers)


def multiplier(rows: int, m: int, k: int, n: int, workers: int) -> Any:
    """A function of x (``rows`` x m x k) and y (``rows`` x k x n): a product for each row."""
    t = _Tiles(rows)
    x, y = t.load(m, k), t.load(k, n)
    sides: dict[str, Any] = {"x_contract": (2,), "y_contract": (1,), "x_batch": (), "y_batch": ()}
    t.store(t.add("dot", (x, y), True, (m, n), accumulate="float32", **sides))
    return t.function(workers)
