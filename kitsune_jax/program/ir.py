"""The tile program: typed SSA over tiles, one body per stage, and the calls that are made of tile programs.

Comes in: a Graph, a Region of it and a Plan (``program.build``). Goes out: what every target and the NumPy interpreter execute. A
**tile** value has shape ``(rows, *row_shape)``, rows first, and a **stationary** value is a whole array in its original layout; the
number of rows is the program's ``tile_rows``, less on the last tile of a batch, and stands as ``ROWS`` (-1) in the parameters of
rows-first ops. ``reference.check`` checks everything that is said here.

Instruction kinds:

* every pointwise / structural kind of the op table, with its parameters rewritten to the rows-first shapes (an ``axes=(1,)`` of a
  ``[batch, n]`` value streamed over dimension 0 stays ``(1,)``; of an ``[n, batch]`` value streamed over dimension 1, axis 0
  becomes 1); on stationary operands only, the result is stationary and the parameters are those of whole arrays;
* ``load``: value <- input array ``array`` (a tile, or the whole array when the array is stationary);
* ``row_index``: value <- integer index along one streamed dimension, for ``iota`` over it, parameters ``axes`` (the stream axes,
  outermost first, whose mixed-radix index it is), dtype from the value's type; the value's tile shape may have trailing dimensions
  over which it is constant;
* ``matmul``: (tile x, stationary w) -> tile; ``x_contract, x_batch`` are dimensions of the rows-first x, ``w_contract, w_batch`` of
  w, and the result is ``transpose(dot_general(x, w), out_perm)``, rows first again. ``accumulate`` is the accumulation dtype. w is
  any stationary value: loaded, sliced in a loop, or computed in the stage;
* ``dot``: (tile x, tile y) -> tile, a product for each row: ``x_contract, y_contract, x_batch, y_batch`` are rows-first dimensions
  (never 0); the result's dimensions are rows, batch, those left of x, those left of y. ``accumulate`` as above;
* ``gather``: (table, index) -> tile. The table is stationary, ``[n, *row]``; the index is an integer tile of row shape s, and the
  result has row shape ``(*s, *row)``. ``mode`` says what an index below 0 or beyond n - 1 gives: the nearest row ("clip"), the
  number ``fill`` ("fill"), or anything ("promise_in_bounds": there is none);
* ``take``: (tile x, stationary index) -> tile: the elements of dimension ``axis`` (rows-first, never 0) of x that the index says.
  The dimensions of the index stand in the place of that one. ``mode`` and ``fill`` as above;
* ``put``: (tile x, stationary index) -> tile: the dimensions of x from ``axis`` on that are those of the index become one of
  extent ``n``, which holds at each i the sum of the elements whose index is i, and 0 where there is none. Indices below 0 or beyond
  n - 1 are dropped. The gradient of ``take``;
* ``loop``: initial carries -> final carries, by running ``block`` ``count`` times; ``reverse``: the iterations' numbers count down.
  ``within``, (axis, step, low, high, which), leaves out iterations: number i stands for the elements from ``i * step`` to
  ``(i + 1) * step - 1``, and it runs where those reach into [x + low, y + high], with x and y the smallest and the largest index of
  the tile's rows on the stream axis ``axis``, no batch axis; None: no bound on that side. An iteration is
  whole if its elements lie in [y + low, x + high]; ``which`` of them run: "all", the "whole" ones or the others, the "edges".
  ``shifted``, (input, sign, guard, size), adds to both bounds the number in that input array, an int32, times ``sign``.
  Every iteration is an edge where a row of the tile would see none of the ``size`` elements (``guard`` "rows"), where no row of the
  axis would see some element ("elements"), and where the number is beyond 2^30: indices wrap there.
  There is no push or pop inside, nor a ``sink_at`` of sorted indices; a sink inside folds once for every iteration;
* ``load_slice``: numbers of loops -> value: of input array ``array``, elements ``[i * step, i * step + size)`` of dimension
  ``dims[k]`` for the k-th number i, with ``steps[k]`` and ``sizes[k]``, and all others whole. These dimensions do not stream, and
  stay with extent ``size``. ``store_slice``: (value, numbers of loops) -> the same elements of output array ``array``. Where a size
  does not divide the dimension, the remainder is a copy of the body behind the loop: there are no masks. A number may also be a
  constant;
* ``cut``: (value x, number of a loop) -> the part of x at that index of the first dimension of its rows (of a stationary x: of its
  first dimension), without this dimension. ``paste``: (value x, value part, number of a loop) -> x with ``part`` there; the loop
  counts all indices. ``empty``: nothing -> a value of any numbers, to paste into;
* ``sink``: tile -> sink accumulator ``sink``, reducing by its ``how`` over rows and ``axes`` (rows-first, 0 included). No output;
* ``matmul_sink``: (tile x, tile y) -> sink accumulator ``sink``: adds ``dot_general(x, y)`` over ``x_contract``/``y_contract``
  (rows-first dimensions, 0 included) and ``x_batch``/``y_batch``, accumulated in the sink's dtype. No output: a weight gradient.
  A ``sink`` or a ``matmul_sink`` may have numbers of loops behind its operands, with ``dims``, ``steps`` and ``sizes`` as a
  ``load_slice``: it then folds into that part of the accumulator only;
* ``sink_at``: (value, index) -> sink accumulator ``sink`` of shape ``[n, *row]``; an integer index tile of row shape s says for
  every ``row`` of the value, a tile of row shape ``(*s, *row)``, where it is folded in by the sink's ``how``. Indices below 0 or
  beyond n - 1 are dropped. ``sorted`` promises that, in the order of the stream, the others never decrease; where the promise is
  false the result is any numbers. No output: a segment sum. With a third operand, tops, a tile of row shape t, the sum is one of
  rows that were scaled by e^-top, one top for each of the first dimensions of ``row``; a top that is not finite stands for 0. The
  sink adds up such sums at the largest of their tops, and with ``finite`` false gives NaN where that is not finite. Its indices are
  sorted, one for each row, and tops are what ``run_max`` makes of them;
* ``run_max``: (tile x, integer index tile of row shape ()) -> tile like x: for each row the largest x of the rows around it in the
  tile that have its index, element by element (a target may look at parts of the tile one by one: a run is then several, each
  with a top of its own); ``n``: indices below 0 or beyond n - 1 are nobody's;
* ``push`` / ``pop``: value <-> queue ``queue``; ``store``: value -> output array ``array``.

A constant is no instruction: it is a value of ``TileProgram.literals``, and may be read everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from kitsune_jax.ops.graph import Param, Scalar
from kitsune_jax.ops.spec import ROWS

SINKS = frozenset({"sink", "matmul_sink", "sink_at"})
WITHIN = ("all", "whole", "edges")
EFFECTS = SINKS | {"push", "pop", "store", "store_slice"}  # what is there for more than its results


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
class Block:
    """The body of a loop. It may read values of the code around it, and defines its own, which nothing outside can read.

    ``index``: the iteration's number, a stationary int32 of rank 0; ``carries``: the carries as an iteration finds them;
    ``results``: as it leaves them.
    """

    index: int
    carries: tuple[int, ...]
    body: tuple[Instr, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Instr:
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[tuple[str, Param], ...] = ()
    op: int = -1  # index of the graph op it came from, for messages
    block: Block | None = None

    def __getitem__(self, name: str) -> Param:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(f"{self.kind} has no parameter {name!r}")

    def get(self, name: str, default: Param = None) -> Param:
        return next((v for k, v in self.params if k == name), default)


def walk(body: Sequence[Instr]) -> Iterator[Instr]:
    """The instructions of ``body`` and, behind each loop, those inside it."""
    for instr in body:
        yield instr
        if instr.block is not None:
            yield from walk(instr.block.body)


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """An array at the border of the program: dense, row-major.

    ``row_strides``: element stride of each stream axis, 0 for an axis it does not depend on; ``dims``: the array's dimensions, in
    order, that are *not* streamed (they are the tile's row shape). Both are empty for an array that depends on no stream axis. One
    that depends on batch axes only is not ``streamed``: it has row strides, and its part for a tile is a stationary value.
    """

    shape: tuple[int, ...]
    dtype: str
    streamed: bool
    row_strides: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """Its dimensions in the part for one tile. In a stream of one row, which has no axis, what streams has ``dims`` as well."""
        return self.dims if self.streamed or self.row_strides else tuple(range(len(self.shape)))

    @property
    def loaded(self) -> TileType:
        """The type of its part for one tile."""
        return TileType(self.streamed, tuple(self.shape[d] for d in self.kept), self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class SinkType:
    """A reduction over the stream. The accumulator of ``shape`` is folded over all tiles by ``how``: sum, max, min, prod, and, or.

    ``array``: the output array it is written to, converted to that array's dtype. What nothing is folded into holds the identity of
    ``how``: 0, 1, or for max and min the lowest and the highest number of the dtype (the infinities of a float).

    Where the array has row strides there is one accumulator for each batch, folded over its tiles (the gradient of the keys of an
    attention head). ``sink`` and ``matmul_sink`` may fold into such a one.
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

    The first ``batch_axes`` of ``axes`` are batch axes: a tile never crosses from one index of them to the next, so what depends on
    nothing else is stationary while a tile is at work (the keys of an attention head).

    ``order``: the number of an input of int32 [rows], a permutation, which no instruction reads. Row r of the stream is then
    element ``order[r]`` of every streamed array: ``load``, ``store`` and ``row_index`` go through it, sinks fold in the order of
    the stream. A program with an order has no batch axes.
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
    workers: int = 1  # that the plan counts on, all stages and replicas together
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
    """A whole call: tile programs, and the arrays that they hand on.

    Of ``arrays`` the first ``operands`` are the call's operands, the next ``results`` its results; the others live during the call
    only. Parts stand in the order of their phases, which a barrier separates; those of one phase may run in any order, or at once.
    A part reads operands and what parts of earlier phases wrote; every other array is written by one part.
    """

    arrays: tuple[Array, ...]
    operands: int
    results: int
    parts: tuple[Part, ...]

    @staticmethod
    def of(program: TileProgram) -> Program:
        """The call that is nothing but ``program``: its inputs are the operands, its outputs the results."""
        arrays = tuple(Array(a.shape, a.dtype) for a in (*program.inputs, *program.outputs))
        n = len(program.inputs)
        return Program(arrays, n, len(program.outputs), (Part(0, program, tuple(range(n)), tuple(range(n, len(arrays)))),))

    @property
    def only(self) -> TileProgram | None:
        """The tile program of a call that is nothing but that one; None for any other call."""
        return self.parts[0].program if len(self.parts) == 1 and self == Program.of(self.parts[0].program) else None

    def __str__(self) -> str:
        n, m = self.operands, self.operands + self.results
        roles = ["operand"] * n + ["result"] * self.results + ["inner"] * (len(self.arrays) - m)
        arrays = [
            f"  array {k} ({role}): {a.dtype}{list(a.shape)}" for k, (role, a) in enumerate(zip(roles, self.arrays, strict=True))
        ]
        parts = [f"phase {p.phase}: reads {p.reads} writes {p.writes}\n{p.program}" for p in self.parts]
        return "\n".join(["call", *arrays, *parts])
