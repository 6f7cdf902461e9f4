"""Tile programs written by hand, for tests of what comes after ``program.build``: one method call per instruction."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from kitsune_jax.ops.graph import Param, Scalar, make_params
from kitsune_jax.ops.spec import ROWS
from kitsune_jax.program.ir import ArrayType, Instr, LoopBody, QueueType, SinkType, StageProgram, TileProgram, TileType


@dataclasses.dataclass
class Loop:
    """A loop under construction: ``next`` says what the carries become; ``results`` are there when it is over."""

    index: int
    carries: tuple[int, ...]
    after: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    def next(self, *values: int) -> None:
        self.after = values


class Tiles:
    """Builds a ``TileProgram`` over stream axes of extents ``axes``.

    Arrays are dense; ``streams`` says which stream axes each dimension runs over, so that ``((), (0,))`` is an ``[n, rows]`` array.

    >>> t = Tiles((10,), 4)
    >>> t.store(t.op("tanh", t.load((10, 3), "float32", ((0,), ()))), (10, 3), ((0,), ()))
    >>> t.program().tiles
    3
    """

    def __init__(self, axes: tuple[int, ...], tile_rows: int, batch_axes: int = 0):
        self.axes, self.tile_rows, self.batch_axes = axes, tile_rows, batch_axes
        self.inputs: list[ArrayType] = []
        self.outputs: list[ArrayType] = []
        self.values: list[TileType] = []
        self.literals: list[tuple[int, Scalar]] = []
        self.stages: list[list[Instr]] = [[]]
        self.body = self.stages[-1]  # where the next instruction goes
        self.queues: list[QueueType] = []
        self.sinks: list[SinkType] = []
        self.order: int | None = None

    def _new(self, tile: bool, shape: Sequence[int], dtype: str) -> int:
        self.values.append(TileType(tile, tuple(shape), dtype))
        return len(self.values) - 1

    def _add(self, kind: str, inputs: Sequence[int], outputs: Sequence[int], **params: Any) -> None:
        self.body.append(Instr(kind, tuple(inputs), tuple(outputs), make_params(**params)))

    def _array(self, shape: tuple[int, ...], dtype: str, streams: Sequence[Sequence[int]] | None) -> ArrayType:
        if streams is None:
            return ArrayType(shape, dtype, False)
        strides = [0] * len(self.axes)
        step = 1
        for n, axes in zip(reversed(shape), reversed(streams), strict=True):
            inner = step
            for a in reversed(axes):
                strides[a] = inner
                inner *= self.axes[a]
            step *= n
        dims = tuple(d for d, axes in enumerate(streams) if not axes)
        streamed = not self.axes or any(a >= self.batch_axes for axes in streams for a in axes)
        return ArrayType(shape, dtype, streamed, tuple(strides), dims)

    def load(self, shape: tuple[int, ...], dtype: str = "float32", streams: Sequence[Sequence[int]] | None = None) -> int:
        array = self._array(shape, dtype, streams)
        self.inputs.append(array)
        return self.again(len(self.inputs) - 1)

    def again(self, number: int) -> int:
        """Another load of input ``number``."""
        array = self.inputs[number]
        v = self._new(array.loaded.tile, array.loaded.shape, array.dtype)
        self._add("load", (), (v,), array=number)
        return v

    def input(self, shape: tuple[int, ...], dtype: str = "float32", streams: Sequence[Sequence[int]] | None = None) -> int:
        """The number of a new input, which nothing loads yet."""
        self.inputs.append(self._array(shape, dtype, streams))
        return len(self.inputs) - 1

    def output(self, shape: tuple[int, ...], dtype: str = "float32", streams: Sequence[Sequence[int]] | None = None) -> int:
        """The number of a new output, which nothing stores yet."""
        self.outputs.append(self._array(shape, dtype, streams))
        return len(self.outputs) - 1

    def load_slice(self, array: int, *cuts: tuple[int, int, int, int]) -> int:
        """Of input ``array``; each of ``cuts`` is (number of a loop, dimension, step, size)."""
        t = self.inputs[array]
        size = {d: n for _, d, _, n in cuts}
        kept = t.dims if t.row_strides else range(len(t.shape))
        v = self._new(t.streamed, [size.get(d, t.shape[d]) for d in kept], t.dtype)
        self._slice("load_slice", (), (v,), array, cuts)
        return v

    def store_slice(self, x: int, array: int, *cuts: tuple[int, int, int, int]) -> None:
        self._slice("store_slice", (x,), (), array, cuts)

    def _slice(self, kind: str, first: tuple[int, ...], outputs: tuple[int, ...], array: int, cuts: Any) -> None:
        numbers, dims, steps, sizes = zip(*cuts, strict=True)
        self._add(kind, (*first, *numbers), outputs, array=array, dims=dims, steps=steps, sizes=sizes)

    @contextlib.contextmanager
    def loop(self, count: int, *initial: int, reverse: bool = False) -> Iterator[Loop]:
        """What is added inside belongs to the loop's body."""
        types = [self.values[v] for v in initial]
        made = Loop(self._new(False, (), "int32"), tuple(self._new(t.tile, t.shape, t.dtype) for t in types))
        around, self.body = self.body, []
        yield made
        block, self.body = LoopBody(made.index, made.carries, tuple(self.body), made.after), around
        made.results = tuple(self._new(t.tile, t.shape, t.dtype) for t in types)
        self.body.append(Instr("loop", initial, made.results, make_params(count=count, reverse=reverse), block=block))

    def literal(self, value: Scalar, dtype: str = "float32") -> int:
        v = self._new(False, (), dtype)
        self.literals.append((v, value))
        return v

    def op(
        self,
        kind: str,
        *inputs: int,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        tile: bool = True,
        **params: Param,
    ) -> int:
        """``shape``: the row shape of the result (of the first tile operand, if not given); not ``tile``: its whole shape."""
        first = next((self.values[v] for v in inputs if self.values[v].tile), None)
        row = tuple(shape) if shape is not None else first.shape if first is not None else ()
        v = self._new(tile, row, dtype or (self.values[inputs[0]].dtype))
        self._add(kind, inputs, (v,), **params)
        return v

    def broadcast(self, x: int, shape: tuple[int, ...], dims: Sequence[int]) -> int:
        """To row shape ``shape``; ``dims`` rows-first."""
        v = self._new(True, shape, self.values[x].dtype)
        self._add("broadcast_in_dim", (x,), (v,), shape=(ROWS, *shape), dims=tuple(dims))
        return v

    def reshape(self, x: int, shape: tuple[int, ...]) -> int:
        return self.op("reshape", x, shape=shape, new_sizes=(ROWS, *shape))

    def transpose(self, x: int, perm: Sequence[int]) -> int:
        shape = tuple(self.values[x].shape[p - 1] for p in perm[1:])
        return self.op("transpose", x, shape=shape, permutation=tuple(perm))

    def concat(self, *xs: int, dimension: int) -> int:
        shape = list(self.values[xs[0]].shape)
        shape[dimension - 1] = sum(self.values[x].shape[dimension - 1] for x in xs)
        return self.op("concatenate", *xs, shape=shape, dimension=dimension)

    def reduce(self, how: str, x: int, axes: Sequence[int]) -> int:
        shape = tuple(n for d, n in enumerate(self.values[x].shape, 1) if d not in axes)
        return self.op(f"reduce_{how}", x, shape=shape, axes=tuple(axes))

    def matmul(self, x: int, w: int, dims: Any = None, out: str | None = None, perm: Sequence[int] | None = None) -> int:
        """``dims``: ((x_contract, w_contract), (x_batch, w_batch)), rows-first; the last of x with the first of w if not given."""
        xt, wt = self.values[x], self.values[w]
        (xc, wc), (xb, wb) = dims or (((len(xt.shape),), (0,)), ((), ()))
        x_shape = (ROWS, *xt.shape)
        free = [d for d in range(len(x_shape)) if d not in xc and d not in xb]
        columns = [d for d in range(len(wt.shape)) if d not in wc and d not in wb]
        falls = [*(x_shape[d] for d in xb), *(x_shape[d] for d in free), *(wt.shape[d] for d in columns)]
        order = tuple(perm) if perm is not None else (len(xb), *(k for k in range(len(falls)) if k != len(xb)))
        shape = tuple(falls[p] for p in order)
        assert shape[0] == ROWS
        v = self._new(True, shape[1:], out or xt.dtype)
        wide = "float64" if xt.dtype == "float64" else "float32"
        self._add("matmul", (x, w), (v,), x_contract=tuple(xc), x_batch=tuple(xb), w_contract=tuple(wc), w_batch=tuple(wb),
                  out_perm=order, accumulate=wide)  # fmt: skip
        return v

    def dot(self, x: int, y: int, contract: Any, batch: Any = ((), ()), out: str | None = None) -> int:
        """``contract``, ``batch``: rows-first dimensions of x and of y."""
        shape = [self.values[x].shape[d - 1] for d in batch[0]]
        for v, c, b in zip((x, y), contract, batch, strict=True):
            shape += [n for d, n in enumerate(self.values[v].shape, 1) if d not in (*c, *b)]
        v = self._new(True, shape, out or self.values[x].dtype)
        dims = {"x_contract": contract[0], "y_contract": contract[1], "x_batch": batch[0], "y_batch": batch[1]}
        self._add("dot", (x, y), (v,), **dims, accumulate="float32")
        return v

    def gather(self, table: int, index: int, mode: str = "clip", fill: Scalar = 0) -> int:
        t = self.values[table]
        v = self._new(True, (*self.values[index].shape, *t.shape[1:]), t.dtype)
        self._add("gather", (table, index), (v,), mode=mode, fill=fill)
        return v

    def take(self, x: int, index: int, axis: int, mode: str = "clip", fill: Scalar = 0) -> int:
        t = self.values[x]
        v = self._new(True, (*t.shape[: axis - 1], *self.values[index].shape, *t.shape[axis:]), t.dtype)
        self._add("take", (x, index), (v,), axis=axis, mode=mode, fill=fill)
        return v

    def put(self, x: int, index: int, axis: int, n: int) -> int:
        t = self.values[x]
        rank = len(self.values[index].shape)
        v = self._new(True, (*t.shape[: axis - 1], n, *t.shape[axis - 1 + rank :]), t.dtype)
        self._add("put", (x, index), (v,), axis=axis, n=n)
        return v

    def in_order(self, number: int) -> None:
        """The rows stream in the order that input ``number`` says."""
        self.order = number

    def index(self, axes: Sequence[int], shape: tuple[int, ...] = (), dtype: str = "int32") -> int:
        v = self._new(True, shape, dtype)
        self._add("row_index", (), (v,), axes=tuple(axes))
        return v

    def iota(self, shape: tuple[int, ...], dimension: int, dtype: str = "int32") -> int:
        v = self._new(True, shape, dtype)
        self._add("iota", (), (v,), shape=(ROWS, *shape), dimension=dimension)
        return v

    def store(self, x: int, shape: tuple[int, ...], streams: Sequence[Sequence[int]]) -> None:
        self.outputs.append(self._array(shape, self.values[x].dtype, streams))
        self._add("store", (x,), (), array=len(self.outputs) - 1)

    def sink(self, x: int, how: str, axes: Sequence[int]) -> None:
        t = self.values[x]
        shape = tuple(n for d, n in enumerate(t.shape, 1) if d not in axes)
        self.outputs.append(ArrayType(shape, t.dtype, False))
        self.sinks.append(SinkType(how, shape, t.dtype, len(self.outputs) - 1))
        self._add("sink", (x,), (), sink=len(self.sinks) - 1, axes=tuple(axes))

    def sink_at(
        self,
        x: int,
        index: int,
        how: str,
        n: int,
        accumulate: str | None = None,
        *,
        ids_sorted: bool = False,
        unordered: bool = False,
    ) -> None:
        """Fold ``x`` into the rows ``index`` of a new output of ``n`` rows."""
        t = self.values[x]
        shape = (n, *t.shape[len(self.values[index].shape) :])
        self.outputs.append(ArrayType(shape, t.dtype, False))
        self.sinks.append(SinkType(how, shape, accumulate or t.dtype, len(self.outputs) - 1))
        asked = {"unordered": True} if unordered else {}
        self._add("sink_at", (x, index), (), sink=len(self.sinks) - 1, sorted=ids_sorted, **asked)

    def matmul_sink(self, x: int, y: int) -> None:
        """Add x^T y over the rows, of tiles of one dimension each, to a new output of float32 (of float64 for float64)."""
        dtype = "float64" if self.values[x].dtype == "float64" else "float32"
        shape = (*self.values[x].shape, *self.values[y].shape)
        self.outputs.append(ArrayType(shape, dtype, False))
        self.sinks.append(SinkType("sum", shape, dtype, len(self.outputs) - 1))
        self._add("matmul_sink", (x, y), (), sink=len(self.sinks) - 1, x_contract=(0,), y_contract=(0,), x_batch=(), y_batch=(),
                  accumulate=dtype)  # fmt: skip

    def stage(self) -> None:
        """What follows belongs to a new stage."""
        self.stages.append([])
        self.body = self.stages[-1]

    def queue(self, x: int, consumers: tuple[int, ...], depth: int = 2) -> int:
        """Push ``x`` into a new queue; returns its number."""
        self.queues.append(QueueType(len(self.stages) - 1, consumers, self.values[x], depth))
        self._add("push", (x,), (), queue=len(self.queues) - 1)
        return len(self.queues) - 1

    def pop(self, queue: int) -> int:
        t = self.queues[queue].tile
        v = self._new(True, t.shape, t.dtype)
        self._add("pop", (), (v,), queue=queue)
        return v

    @property
    def rows(self) -> int:
        return math.prod(self.axes)

    def program(self) -> TileProgram:
        return TileProgram(
            self.axes,
            self.tile_rows,
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.values),
            tuple(self.literals),
            tuple(StageProgram(f"stage{s}", tuple(body)) for s, body in enumerate(self.stages)),
            tuple(self.queues),
            tuple(self.sinks),
            batch_axes=self.batch_axes,
            order=self.order,
        )
