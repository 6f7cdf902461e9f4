"""The tile program: typed SSA over tiles, one body per stage, and the calls that consist of tile programs.

Comes in: bodies, arrays, queues and sinks from ``program.build``, which makes them of a Graph, a Region and a Plan. Goes out: a
``TileProgram`` or a ``Program``, which every target and the NumPy interpreter execute. Invariant: the rules below, all of which
``reference.check`` checks. A **tile** value has shape ``(rows, *row_shape)``, rows first; a **stationary** value is a whole array
in its original layout. The number of rows is the program's ``tile_rows``, or less on the last tile of a batch; parameters of
rows-first ops write it as ``ROWS`` (-1).

Instruction kinds:

* every pointwise / structural kind of the op table, with its parameters rewritten to the rows-first shapes (``axes=(1,)`` of a
  ``[batch, n]`` value streamed over dimension 0 stays ``(1,)``; of an ``[n, batch]`` value streamed over dimension 1, axis 0
  becomes 1). An op of stationary operands only has a stationary result and the parameters of whole arrays;
* ``load``: value <- input array ``array`` (a tile, or the whole array when the array is stationary);
* ``row_index``: value <- integer index along streamed dimensions, for ``iota``; ``axes``: the stream axes, outermost first, whose
  mixed-radix index it is. The value's tile shape may have trailing dimensions over which it is constant;
* ``matmul``: (tile x, stationary w) -> tile; ``x_contract, x_batch`` are dimensions of the rows-first x, ``w_contract, w_batch`` of
  w, and the result is ``transpose(dot_general(x, w), out_perm)``, rows first again. ``accumulate`` is the accumulation dtype. w is
  any stationary value: loaded, sliced in a loop, or computed in the stage;
* ``dot``: (tile x, tile y) -> tile, a product for each row: ``x_contract, y_contract, x_batch, y_batch`` are rows-first dimensions
  (never 0); the result's dimensions are rows, batch, those left of x, those left of y. ``accumulate`` as above;
* ``gather``: (table, index) -> tile. The table is stationary, ``[n, *row]``; the index is an integer tile of row shape s, and the
  result has row shape ``(*s, *row)``. ``mode``: an index below 0 or beyond n - 1 reads the nearest row ("clip"), gives the number
  ``fill`` ("fill"), or does not occur ("promise_in_bounds");
* ``take``: (tile x, stationary index) -> tile: x with dimension ``axis`` (rows-first, never 0) replaced by the dimensions of the
  index, which selects its elements. ``mode`` and ``fill`` as above;
* ``put``: (tile x, stationary index) -> tile, the gradient of ``take``: the dimensions of x from ``axis`` on that are those of the
  index become one of extent ``n``, which holds at each i the sum of the elements whose index is i. Indices below 0 or beyond n - 1
  are dropped;
* ``loop``: initial carries -> final carries, by running ``block`` ``count`` times; ``reverse``: the iterations' numbers count down.
  ``within``, (axis, step, low, high, which), leaves out iterations. Iteration i covers the elements from ``i * step`` to
  ``(i + 1) * step - 1``, and runs if some are in [x + low, y + high], where x and y are the smallest and the largest index of the
  tile's rows on the stream axis ``axis``, no batch axis; None: no bound on that side. An iteration is whole if all its elements are
  in [y + low, x + high]; ``which`` of them run: "all", the "whole" ones, or the others, the "edges". ``together``: only so many
  neighbours, counted from 0, are whole, all of them; 1 without it.
  ``shifted``, (input, sign, guard, size), adds to both bounds the number in that int32 input array times ``sign``. All iterations
  are edges if a row of the tile would see none of the ``size`` elements (``guard`` "rows"), if no row of the axis would see some
  element ("elements"), or if the number is beyond 2^30, where indices wrap.
  A loop contains no push, no pop, and no ``sink_at`` of sorted indices; a sink inside folds once for every iteration;
* ``load_slice``: numbers of loops -> value: of input array ``array``, elements ``[i * step, i * step + size)`` of dimension
  ``dims[k]`` for the k-th number i, with ``steps[k]`` and ``sizes[k]``, and all elements of the others. These dimensions do not
  stream, and stay with extent ``size``. ``store_slice``: (value, numbers of loops) -> the same elements of output array ``array``.
  If a size does not divide the dimension, a copy of the body behind the loop does the remainder: there are no masks. A number may
  also be a constant;
* ``cut``: (value x, number of a loop) -> the part of x at that index of the first dimension of its rows (of a stationary x: of its
  first dimension), without this dimension. ``paste``: (value x, value part, number of a loop) -> x with ``part`` there; the loop
  counts all indices. ``empty``: nothing -> a value with undefined elements, to paste into;
* ``sink``: tile -> sink accumulator ``sink``, reducing by its ``how`` over rows and ``axes`` (rows-first, 0 included). No output;
* ``matmul_sink``: (tile x, tile y) -> sink accumulator ``sink``: adds ``dot_general(x, y)`` over ``x_contract``/``y_contract``
  (rows-first dimensions, 0 included) and ``x_batch``/``y_batch``, accumulated in the sink's dtype. No output: a weight gradient.
  A ``sink`` or a ``matmul_sink`` may have numbers of loops behind its operands, with ``dims``, ``steps`` and ``sizes`` as in a
  ``load_slice``: it then folds into that part of the accumulator only;
* ``sink_at``: (value, index) -> sink accumulator ``sink`` of shape ``[n, *row]``, a segment sum: the sink's ``how`` folds every
  ``row`` of the value, a tile of row shape ``(*s, *row)``, into the row that the index, an integer tile of row shape s, names.
  Indices below 0 or beyond n - 1 are dropped. ``sorted`` promises that the others never decrease along the stream; if they do, the
  result is undefined. With a third operand, tops, a tile of row shape t, the rows of the value were scaled by e^-top, with one top
  for each of the first dimensions of ``row``; a top that is not finite counts as 0. The sink adds up such sums at the largest of
  their tops, and unless ``finite`` gives NaN where that is not finite. Its indices are sorted, one for each row, and its tops come
  from ``run_max``;
* ``run_max``: (tile x, integer index tile of row shape ()) -> tile like x: the elementwise maximum of x over adjacent rows of the
  tile with the same index. (A target may cut tiles: a run then becomes several, each with its top.) ``n``: indices below 0 or
  beyond n - 1 belong to no run;
* ``push`` / ``pop``: value <-> queue ``queue``; ``store``: value -> output array ``array``.

Constants are no instructions but values of ``TileProgram.literals``, which every body may read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kitsune_jax.ops.graph import Param, Scalar, make_params, quick
from kitsune_jax.ops.spec import ROWS

SINKS = frozenset({"sink", "matmul_sink", "sink_at"})
WITHIN = ("all", "whole", "edges")
EFFECTS = SINKS | {"push", "pop", "store", "store_slice"}  # instructions that matter beyond their results


@quick
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
class LoopBody:
    """The body of a loop. It may read values of the code around it; nothing outside can read values that it defines.

    ``index``: the iteration's number, a stationary int32 of rank 0; ``carries``: the carries before an iteration; ``results``:
    after it.
    """

    index: int
    carries: tuple[int, ...]
    body: tuple[Instr, ...]
    results: tuple[int, ...]


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class Instr:
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[tuple[str, Param], ...] = ()
    op: int = -1  # index of the graph op it came from, for messages
    block: LoopBody | None = None

    def __getitem__(self, name: str) -> Param:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(f"{self.kind} has no parameter {name!r}")

    def get(self, name: str, default: Param = None) -> Param:
        return next((v for k, v in self.params if k == name), default)

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that the instruction itself reads: its operands, and what its block hands to the next iteration."""
        return (*self.inputs, *(self.block.results if self.block else ()))

    def with_body(self, body: Sequence[Instr]) -> Instr:
        """The loop with another body."""
        assert self.block is not None
        return dataclasses.replace(self, block=dataclasses.replace(self.block, body=tuple(body)))


def walk(body: Sequence[Instr]) -> Iterator[Instr]:
    """The instructions of ``body``, with those inside a loop directly after it."""
    for instr in body:
        yield instr
        if instr.block is not None:
            yield from walk(instr.block.body)


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """An array at the border of the program: dense, row-major unless ``strides`` says otherwise.

    ``row_strides``: element stride of each stream axis, 0 for an axis it does not depend on; ``dims``: the array's dimensions, in
    order, that are *not* streamed (the tile's row shape). Both are empty for an array that depends on no stream axis. An array that
    depends on batch axes only is not ``streamed``: it has row strides, and its part for a tile is a stationary value.
    ``strides``: of an array that lives during a call only, the element stride of each dimension, where a target has chosen another
    order; else ().
    """

    shape: tuple[int, ...]
    dtype: str
    streamed: bool
    row_strides: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """The dimensions that a tile's part of the array has. In a stream of one row, without axes, streamed arrays also have
        ``dims``."""
        return self.dims if self.streamed or self.row_strides else tuple(range(len(self.shape)))

    @property
    def loaded(self) -> TileType:
        """The type of a tile's part of the array."""
        return TileType(self.streamed, tuple(self.shape[d] for d in self.kept), self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class SinkType:
    """A reduction over the stream. The accumulator of ``shape`` is folded over all tiles by ``how``: sum, max, min, prod, and, or.

    ``array``: the output array it is written to, converted to that array's dtype. Elements into which nothing is folded hold the
    identity of ``how``: 0, 1, or for max and min the lowest and the highest number of the dtype (the infinities of a float).

    If the array has row strides, each batch has an accumulator, folded over its tiles (the gradient of the keys of an attention
    head). Only ``sink`` and ``matmul_sink`` fold into such a sink.
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
    body: tuple[Instr, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TileProgram:
    """Stages and queues over one stream space.

    The first ``batch_axes`` of ``axes`` are batch axes, as in a ``StreamSpace``: a tile never crosses from one index to the next.

    ``order``: the number of an input of int32 [rows], a permutation, which no instruction reads. Row r of the stream is then
    element ``order[r]`` of every streamed array: ``load``, ``store`` and ``row_index`` index by it, sinks fold in the order of the
    stream. A program with an order has no batch axes.
    """

    axes: tuple[int, ...]  # extents of the stream axes; rows = their product
    tile_rows: int
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    values: tuple[TileType, ...]
    literals: tuple[tuple[int, Scalar], ...]  # value id -> constant
    stages: tuple[StageProgram, ...]
    queues: tuple[QueueType, ...]
    sinks: tuple[SinkType, ...]
    workers: int = 1  # that the plan assumes, all stages and replicas together
    batch_axes: int = 0
    order: int | None = None

    @property
    def rows(self) -> int:
        return math.prod(self.axes)

    @property
    def batches(self) -> int:
        return math.prod(self.axes[: self.batch_axes])

    @property
    def tiles(self) -> int:
        return self.batches * -(-math.prod(self.axes[self.batch_axes :]) // self.tile_rows)

    def rows_of(self, tile: int) -> range:
        """The rows of tile number ``tile``.

        >>> program = TileProgram((2, 5), 4, (), (), (), (), (), (), (), batch_axes=1)
        >>> [program.rows_of(n) for n in range(program.tiles)]
        [range(0, 4), range(4, 5), range(5, 9), range(9, 10)]
        """
        rows = math.prod(self.axes[self.batch_axes :])  # of a batch
        batch, number = divmod(tile, -(-rows // self.tile_rows))
        return range(batch * rows + number * self.tile_rows, batch * rows + min(rows, (number + 1) * self.tile_rows))

    def with_bodies(self, change: Callable[[tuple[Instr, ...]], tuple[Instr, ...]]) -> TileProgram:
        """The program with ``change`` of the body of each stage in its place."""
        return dataclasses.replace(self, stages=tuple(dataclasses.replace(s, body=change(s.body)) for s in self.stages))

    def __str__(self) -> str:
        batch = f" batch_axes={self.batch_axes}" if self.batch_axes else ""
        order = f" order=input {self.order}" if self.order is not None else ""
        lines = [f"program rows={self.rows} axes={self.axes}{batch}{order} tile_rows={self.tile_rows}"]
        lines += [f"  input {k}: {_array_text(array)}" for k, array in enumerate(self.inputs)]
        lines += [f"  output {k}: {_array_text(array)}" for k, array in enumerate(self.outputs)]
        lines += [f"  sink {k}: {s.how} {s.dtype}{list(s.shape)} -> output {s.array}" for k, s in enumerate(self.sinks)]
        for q, queue in enumerate(self.queues):
            lines.append(f"  queue {q}: {queue.tile} {queue.producer} -> {queue.consumers} depth {queue.depth}")
        for s, stage in enumerate(self.stages):
            lines += [f"  stage {s} {stage.name}", *self._text(stage.body, dict(self.literals), "    ")]
        return "\n".join(lines)

    def _text(self, body: Sequence[Instr], literals: dict[int, Scalar], indent: str) -> list[str]:
        def names(values: Sequence[int], typed: bool = False) -> str:
            return ", ".join(str(literals[v]) if v in literals else f"%{v}:{self.values[v]}" if typed else f"%{v}" for v in values)

        lines = []
        for i in body:
            made = f"{names(i.outputs, typed=True)} = " if i.outputs else ""
            if i.block is None:
                params = " ".join(f"{k}={v}" for k, v in i.params)
                lines.append(f"{indent}{made}{i.kind}({names(i.inputs)}){' ' * bool(params)}{params}")
                continue
            numbers = f"reversed(range({i['count']}))" if i.get("reverse") else f"range({i['count']})"
            carried = f" with {names(i.block.carries)} = {names(i.inputs)}" if i.inputs else ""
            lines.append(f"{indent}{made}{i.kind} %{i.block.index} in {numbers}{carried}:")
            lines += self._text(i.block.body, literals, f"{indent}  ")
            lines.append(f"{indent}  next {names(i.block.results)}".rstrip())
        return lines


def _array_text(array: ArrayType) -> str:
    strides = f" row_strides={array.row_strides}" if array.row_strides else ""
    return f"{array.dtype}{list(array.shape)}{strides} loaded as {array.loaded}"


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """An array of a call: dense, row-major."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A tile program on arrays of the call: ``reads`` are its inputs, ``writes`` its outputs. It runs in phase ``phase``."""

    phase: int
    program: TileProgram
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A whole call: tile programs, and the arrays that they pass on.

    ``arrays``: first the call's ``operands``, then its ``results``, then arrays that live during the call only. Parts are ordered
    by phase, with a barrier between phases; parts of one phase may run in any order, or at once. A part reads operands and arrays
    of earlier phases; every other array is written by one part.
    """

    arrays: tuple[Array, ...]
    operands: int
    results: int
    parts: tuple[Part, ...]

    @staticmethod
    def of(program: TileProgram) -> Program:
        """The call of ``program`` alone: its inputs are the operands, its outputs the results."""
        arrays = tuple(Array(a.shape, a.dtype) for a in (*program.inputs, *program.outputs))
        n = len(program.inputs)
        return Program(arrays, n, len(program.outputs), (Part(0, program, tuple(range(n)), tuple(range(n, len(arrays)))),))

    @property
    def only(self) -> TileProgram | None:
        """The tile program of a call of one program alone; None for any other call."""
        return self.parts[0].program if len(self.parts) == 1 and self == Program.of(self.parts[0].program) else None

    def __str__(self) -> str:
        n, m = self.operands, self.operands + self.results
        roles = ["operand"] * n + ["result"] * self.results + ["inner"] * (len(self.arrays) - m)
        arrays = [
            f"  array {k} ({role}): {a.dtype}{list(a.shape)}" for k, (role, a) in enumerate(zip(roles, self.arrays, strict=True))
        ]
        parts = [f"phase {p.phase}: reads {p.reads} writes {p.writes}\n{p.program}" for p in self.parts]
        return "\n".join(["call", *arrays, *parts])


# --- a writer of instructions -----------------------------------------------------------------------------------------------------

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
