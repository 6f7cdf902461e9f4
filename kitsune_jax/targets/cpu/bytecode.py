"""The CPU program: its instructions, its operands, and its encoding as int64 words. This file *is* the format.

``targets.cpu.lower`` makes it of tile programs, and ``cpu/src/program.cc`` parses it.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from typing import Any, ClassVar

import numpy as np

from kitsune_jax.ops.table import OPS

# ----------------------------------------------------------------------------------------------------------------------------------
# What instructions of the CPU program name memory by. ``bytecode`` says what the fields mean, and hands these on.
# ----------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ref:
    space: int
    index: int
    offset: int
    dtype: int
    loop_strides: tuple[int, ...] = ()
    batch_strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an instruction that loops over (rows, *extents): its stride, in elements, for the row and each extent."""

    ref: Ref
    row_stride: int
    strides: tuple[int, ...]


# ----------------------------------------------------------------------------------------------------------------------------------
# The instructions of the CPU program that go by indices. ``bytecode`` is the format that they are part of, and hands them on.
# ----------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gather:
    """out(rows, *index_extents, *extents) = row index(rows, *index_extents) of ``table``, which has ``count`` rows of ``extents``.

    ``table.row_stride`` is the distance of its rows. An index below 0 or beyond count - 1 takes the nearest row (``mode`` CLIP) or
    ``fill`` (FILL), a number as ``Micro.imm`` has it. One dtype; the index is of any integer dtype.
    """

    CODE: ClassVar[int] = 9
    table: Operand
    count: int
    mode: int
    fill: tuple[float, ...]
    index_extents: tuple[int, ...]
    extents: tuple[int, ...]
    index: Operand
    out: Operand


@dataclasses.dataclass(frozen=True)
class AccumulateAt:
    """Row index(rows, *index_extents) of the sink's accumulator (dense, [count, *extents]) folded with
    x(rows, *index_extents, *extents), whose ``extents`` lie dense. Indices below 0 or beyond count - 1 are dropped; rows that none
    names hold the identity. x has the sink's dtype, or a 16-bit one that is computed in it.

    ``sorted``: the others never decrease from one row of the stream to the next; if they do, the result is any numbers. Nothing
    else folds into such a sink. ``ordered``: row r of x, an input, is at element ``order[r]`` of the program's order; there is an
    index for each row.
    """

    CODE: ClassVar[int] = 10
    sink: int
    count: int
    index_extents: tuple[int, ...]
    extents: tuple[int, ...]
    index: Operand
    x: Operand
    sorted: int = 0
    ordered: int = 0


@dataclasses.dataclass(frozen=True)
class RunMax:
    """out(rows, *extents) = the largest x of the rows around it in the tile that have its index(rows), element by element.

    ``extents`` lie dense in x and out, which have one 16-bit or 32-bit float dtype. Indices outside of [0, count) are nobody's.
    """

    CODE: ClassVar[int] = 17
    count: int
    extents: tuple[int, ...]
    index: Operand
    x: Operand
    out: Operand


@dataclasses.dataclass(frozen=True)
class AccumulateScaled(AccumulateAt):
    """AccumulateAt of rows that were scaled by e^-top, into sums that are kept with what they are scaled by: two sums are added up
    at the larger of their tops. ``sorted``, and not ``ordered``; one index for each row; a sum of float32.

    ``top(rows, heads)``: one for each of the first dimensions of a row, ``heads`` in all, the same for all rows of one index in a
    tile; one that is not finite stands for 0. ``finite``: otherwise a sum whose largest top is not finite is NaN.
    """

    CODE: ClassVar[int] = 18
    top: Operand = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(kw_only=True)
    finite: int = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class AccumulateTaken(AccumulateScaled):
    """A sum of float32 by ``sorted`` indices, one for each row, of rows that are read where a table has them and multiplied: ``x``
    is the table, and its row stride the distance of its ``rows`` rows, of one 16-bit or 32-bit float dtype.

    Row r is row taken(r) of the table, by ``mode`` and ``fill`` as of Gather, times factor(r, factors) of float32, which lie
    dense: each for as many elements of the row, one after the other. Without ``factors`` rows are added up as they are. Without
    ``heads`` the sum is that of AccumulateAt, and ``top`` any operand.
    """

    CODE: ClassVar[int] = 19
    rows: int = dataclasses.field(kw_only=True)
    mode: int = dataclasses.field(kw_only=True)
    fill: tuple[float, ...] = dataclasses.field(kw_only=True)
    taken: Operand = dataclasses.field(kw_only=True)
    factor: Operand = dataclasses.field(kw_only=True)
    factors: int = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a tile, dense; or, with ``rows`` above 0, those that ``taken`` names of a table of so many, whose row stride is their
    distance, by ``mode`` and ``fill`` as of Gather. Without a table these are any."""

    x: Operand
    rows: int
    mode: int
    fill: tuple[float, ...]
    taken: Operand


@dataclasses.dataclass(frozen=True)
class TakenDot:
    """out(rows, h) = the sum of the products of elements [h * inner, (h + 1) * inner) of two rows, h < ``heads``, in float32.

    x and y have one 16-bit or 32-bit float dtype, and out any of these; the elements of a row lie dense in all.
    """

    CODE: ClassVar[int] = 20
    heads: int
    inner: int
    x: Rows
    y: Rows
    out: Operand


@dataclasses.dataclass(frozen=True)
class Take:
    """out(rows, *outer, i, :) = x(rows, *outer, index[i], :), ``inner`` elements each, i < ``indices``; the dimension: ``count``.

    The index does not depend on the row. x and out have a stride for each of ``outer``, then that of the dimension and of the
    indices, which is ``inner``: what is selected lies dense. ``mode`` and ``fill`` as of Gather.
    """

    CODE: ClassVar[int] = 15
    count: int
    indices: int
    inner: int
    outer: tuple[int, ...]
    index: Operand
    x: Operand
    out: Operand
    mode: int
    fill: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Put:
    """out(rows, *outer, k, :) = sum of x(rows, *outer, i, :) over the i with index[i] == k < ``count``; the rest as of Take.

    16-bit floats are added up in float32. Indices below 0 or beyond count - 1 are dropped.
    """

    CODE: ClassVar[int] = 16
    count: int
    indices: int
    inner: int
    outer: tuple[int, ...]
    index: Operand
    x: Operand
    out: Operand


# ----------------------------------------------------------------------------------------------------------------------------------
# The CPU program: what ``targets.cpu.lower`` makes of tile programs and ``cpu/src/program.cc`` parses. This file *is* the format.
#
# A call holds a ``Program`` for each of its parts, and travels as an attribute of the custom call (``words.Call``,
# ``words.encode``).
#
# Semantics shared by all instructions. A worker runs one stage on one tile: rows ``row0 .. row0 + rows`` of a batch, ``rows ==
# tile_rows`` except on the batch's last tile. The first ``Program.batch_axes`` axes number the batches; without them there is one.
# ``Ref`` names memory; its ``offset`` counts elements of ``dtype``. It moves by ``loop_strides`` with the numbers of the enclosing
# loops, outermost first, and an array also by ``batch_strides`` with the tile's index along each batch axis. Spaces:
#
# * ``IN``/``OUT``: array ``index``. A row stride applies to the row of the batch: element (r, i...) is at
#   ``offset + (row0 + r) * row_stride + sum(i * stride)``. Stationary operands have row stride 0.
# * ``SCRATCH``: the worker's own memory, ``Stage.scratch_bytes`` of it, 64-byte aligned; ``index`` is 0; rows count from the tile's
#   start.
# * ``QUEUE``: the slot ``tile % depth`` of queue ``index``; rows count from the tile's start. A stage writes the queues it produces
#   and reads those it consumes.
# * ``PREP``: stationary operand ``index`` prepared once per call (see ``Prep``); row stride 0.
#
# The parser rejects whatever reaches outside its memory, for all rows and all indices; strides may be negative or 0, extents are
# at least 1.
# ----------------------------------------------------------------------------------------------------------------------------------

MAGIC = 0x004B4954_53554E45  # "KITSUNE"
VERSION = 14

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "bfloat16", "float32", "float64")
DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}

_FLOAT32 = DTYPE_CODE["float32"]

IN, OUT, SCRATCH, QUEUE, PREP = range(5)

REDUCTIONS = tuple(spec.fold for spec in OPS.values() if spec.family in ("reduce", "argreduce"))
CUMULATIVE = tuple(spec.fold for spec in OPS.values() if spec.family == "cumulative")
# Activations of a matrix product's sums, with their parameters a and b. Of float64 sums, only none and relu.
#   leaky_relu: x if x >= 0 else a x          elu: x if x > 0 else a (e^x - 1)       logistic: 1 / (1 + e^-x)
#   silu: x logistic(a x)                     gelu_tanh: x logistic(a x + b x^3)     gelu_erf: x erfc(-a x) / 2
# Parameters are positive. silu and gelu of minus infinity are NaN, as their definitions are. Of sums that are rounded
# (``Matmul.rounds``), the logistic of silu is rounded as well.
ACTIVATIONS = ("none", "relu", "leaky_relu", "elu", "logistic", "tanh", "silu", "gelu_tanh", "gelu_erf")
ACTIVATION_PARAMETERS = (0, 0, 1, 1, 0, 0, 1, 2, 1)
# How a product of bfloat16 operands is multiplied: as the kernels at hand like best; widened to float32 (FMA); by instructions
# that add pairs of bfloat16 products to float32 (VDPBF16PS, BFDOT, BFMMLA); by AMX tiles. Where the CPU lacks one, the next before
# it that it has is taken. Products of other types are "best".
PRODUCTS = ("best", "widened", "dots", "tiles")

# Micro-operations of a Vector program, by name; the code is the position. They are those below and what the op table's entries
# name, whose meaning they have (scripts/opcodes.py writes the same list as a C++ header; a test compares them). Comparisons and
# is_finite give bool; select takes (pred, on_false, on_true). to_float16 and to_bfloat16 round a float32 as a store to that type
# and a load would; reduce_precision to the bits of float16 also flushes what is denormal there.
#
# load: dst <- operand ``a`` (an index into Vector.loads), converted from its storage dtype to the register type; store: operand
# ``a`` (index into Vector.stores) <- register ``b``, converted to its storage dtype; const: dst <- imm[0]; convert: dst <- register
# ``a`` of type ``from_type``; index: dst <- (position in loop dimension ``a`` // b) % c, an int64 unless ``type`` says otherwise;
# dimension 0 is the row of the whole stream, 1.. are the extents, -1.. the numbers of the enclosing loops, outermost first
SPECIAL_OPS = ("load", "store", "const", "convert", "index")
OPCODES = (*SPECIAL_OPS, *(name for spec in OPS.values() for name in spec.opcodes))
OPCODE = {name: code for code, name in enumerate(OPCODES)}
MAX_REGISTERS = 32
SUM_GROUP = 32  # kSumGroup in cpu/include/kitsune_cpu/kernels.h
MAX_LOOP_DIMS = 8
MAX_NAME_BYTES = 1 << 16
MAX_WEIGHT_INDICES = 1 << 24  # b, k and n of all weights together: the executor has a table of offsets for each


@dataclasses.dataclass(frozen=True)
class StridedLoad:
    """scratch/queue tile <- input array, for arrays whose element address is not linear in the row.

    Row r has the mixed-radix index (r_0, ..., r_k) over ``Program.axes`` (last fastest); element (r, i...) of the array is at
    ``array.offset + sum(r_j * axis_strides[j]) + sum(i * array_strides)``; ``tile`` has strides of its own. No conversion: one
    dtype. In a program with an order, row r of the tile is element ``order[r]`` of the stream instead.
    """

    CODE: ClassVar[int] = 1
    array: Ref
    axis_strides: tuple[int, ...]
    extents: tuple[int, ...]
    array_strides: tuple[int, ...]
    tile: Operand


@dataclasses.dataclass(frozen=True)
class StridedStore:
    """The reverse of StridedLoad: output array <- tile."""

    CODE: ClassVar[int] = 2
    array: Ref
    axis_strides: tuple[int, ...]
    extents: tuple[int, ...]
    array_strides: tuple[int, ...]
    tile: Operand


@dataclasses.dataclass(frozen=True)
class Matmul:
    """out[b, m, :] = act(x[b, m, :] @ W[b] + bias), m over rows * row_multiple, accumulated in f32 (f64 for f64). Where it ``adds``
    (only in f32), what is in ``out`` is one of the addends.

    ``rounds``: float16 or bfloat16, to which the sums are rounded before the bias is added, and again before the activation; or
    float32, where they are not.

    ``x``: row_stride is the leading dimension lda (distance of consecutive m), strides = (batch stride,); its K elements are
    contiguous. ``out`` likewise with N contiguous elements. ``weight``: a Prep of kind WEIGHT with the same batch, giving K, N.
    ``bias``: a Prep of kind DENSE of N f32 (f64 for f64) elements, or -1. For IN/OUT refs lda * row_multiple is the global row
    stride.
    """

    CODE: ClassVar[int] = 3
    x: Operand
    row_multiple: int
    batch: int
    weight: int
    bias: int
    activation: int  # index into ACTIVATIONS
    out: Operand
    parameters: tuple[float, ...] = ()  # of the activation: ACTIVATION_PARAMETERS of them
    adds: bool = False  # of float32 only
    rounds: int = _FLOAT32


@dataclasses.dataclass(frozen=True)
class Micro:
    op: int
    type: int  # compute type of the result (for comparisons: of the operands); never float16/bfloat16 (they compute in float32)
    dst: int
    a: int
    b: int
    c: int
    d: int
    from_type: int  # convert and bitcast
    # const: the value (integers beyond 2**53: high and low 32 bits); integer_pow: (y,); reduce_precision: (exponent, mantissa)
    imm: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Vector:
    """A straight-line pointwise program over (rows, *extents), run chunk by chunk.

    ``collapse_rows``: 1 when, for every operand, row_stride == extents[0] * strides[0], so rows and the first extent are one loop.
    """

    CODE: ClassVar[int] = 4
    extents: tuple[int, ...]
    collapse_rows: int
    loads: tuple[Operand, ...]
    stores: tuple[Operand, ...]
    code: tuple[Micro, ...]


@dataclasses.dataclass(frozen=True)
class Reduce:
    """out(rows, *kept) = how over ``reduced`` of x(rows, *kept, *reduced).

    Sums and products of f16/bf16/f32 accumulate in f32 or better.
    argmax/argmin: ``reduced`` is one dimension, ``out`` has an integer dtype, NaN wins, ties take the lowest index.
    """

    CODE: ClassVar[int] = 5
    how: int
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    x: Operand  # strides for (*kept, *reduced)
    out: Operand  # strides for kept


@dataclasses.dataclass(frozen=True)
class Scan:
    """Cumulative op along the last of ``extents`` (from the end when ``reverse``)."""

    CODE: ClassVar[int] = 6
    how: int
    reverse: int
    extents: tuple[int, ...]
    x: Operand
    out: Operand


@dataclasses.dataclass(frozen=True)
class Sums:
    """Where in a sink's accumulators an instruction folds: from element ``offset`` on, further by the numbers of the loops."""

    offset: int = 0
    loop_strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """sink accumulator folded with x(rows, *kept, *reduced), over rows and reduced."""

    CODE: ClassVar[int] = 7
    sink: int
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    x: Operand  # strides for (*kept, *reduced)
    sums: Sums = Sums()
    sum_strides: tuple[int, ...] = ()  # of the accumulators, for kept; none: they are dense


@dataclasses.dataclass(frozen=True)
class AccumulateMatmul:
    """sink accumulator ([batch, m, n]) += sum over r of x[b, r, :] outer y[b, r, :], r over rows * row_multiple.

    A weight gradient. ``x``: row_stride is the distance of consecutive r, strides = (batch stride,); its m elements are contiguous.
    ``y`` likewise with n. Both have one dtype; the sink has how = sum and dtype float32 (float64 for float64), and accumulates in
    it. For IN refs the distance * row_multiple is the global row stride.

    ``matrices``: empty, or (height, rows, columns) of the sink's matrices, one for each of the batch, of which m x n is a part:
    some of the columns, where ``rows`` is the height, else ``rows`` rows, or as many as are left. In the accumulators such parts of
    rows follow each other, each in groups of ``SUM_GROUP`` columns, with which parts of columns begin.
    """

    CODE: ClassVar[int] = 8
    sink: int
    row_multiple: int
    batch: int
    m: int
    n: int
    x: Operand
    y: Operand
    product: int = 0  # index into PRODUCTS
    sums: Sums = Sums()
    matrices: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Products:
    """How a program multiplies bfloat16 operands, by names in ``PRODUCTS``: tiles times weights, and weight gradients."""

    weights: str = "best"
    gradients: str = "best"

    def __post_init__(self) -> None:
        for name in (self.weights, self.gradients):
            if name not in PRODUCTS:
                raise ValueError(f"products are multiplied as one of {', '.join(PRODUCTS)}, not {name!r}")


@dataclasses.dataclass(frozen=True)
class Pack:
    """Prepares the ``Prep`` of this number, which is ``local``, for the products behind this in the stage's body."""

    CODE: ClassVar[int] = 11
    prep: int


@dataclasses.dataclass(frozen=True)
class Dot:
    """out[r, b, m, n] = sum over k of x[r, b, m, k] y[r, b, n, k], accumulated in f32 (f64 for f64).

    x and y have one float dtype. Strides of ``x``: (b, m), of ``y``: (b, n, k), of ``out``: (b, m); the K elements of x and the N
    of out are contiguous.
    """

    CODE: ClassVar[int] = 12
    batch: int
    m: int
    n: int
    k: int
    x: Operand
    y: Operand
    out: Operand


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs ``body`` ``count`` times, at least once; with ``reverse``, the iterations' numbers count down to 0.

    ``within``: empty, or (divisor, extent, step, low, high, which). Iteration i is then left out unless the elements from i * step
    to (i + 1) * step - 1 reach into [x + low, y + high], where x and y are the smallest and the largest row // divisor % extent of
    the tile's rows; rows count from the start of the batch. An iteration is whole if its elements all lie in [y + low, x + high];
    ``which``: 0 for all that are left, 1 for the whole ones, 2 for the others.
    """

    CODE: ClassVar[int] = 13
    count: int
    reverse: int
    within: tuple[int, ...]
    body: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Stationary:
    """Runs ``body`` on one row, for values that do not depend on the row: their row strides are 0."""

    CODE: ClassVar[int] = 14
    body: tuple[Instruction, ...]


Instruction = (
    StridedLoad | StridedStore | Matmul | Vector | Reduce | Scan | Accumulate | AccumulateMatmul
    | Gather | AccumulateAt | Pack | Dot | Loop | Stationary | Take | Put | RunMax
    | AccumulateScaled | AccumulateTaken | TakenDot
)  # fmt: skip

CLIP, FILL = range(2)  # Gather.mode

WEIGHT, DENSE = range(2)


@dataclasses.dataclass(frozen=True)
class Prep:
    """A stationary operand prepared once per call, before any stage runs, from an IN ref; if ``local``, where ``Pack`` says so, for
    the worker and the tile at hand, from any memory.

    WEIGHT: ``source`` read as W[b, k, n] with b, k, n running over the mixed-radix indices of the three extent lists
    (last fastest), packed into the panels of the ISA at hand. DENSE: ``source`` read over ``n_extents`` into a contiguous array of
    ``dtype`` (converted); b and k lists are empty.
    """

    kind: int
    source: Ref
    dtype: int
    b_extents: tuple[int, ...]
    b_strides: tuple[int, ...]
    k_extents: tuple[int, ...]
    k_strides: tuple[int, ...]
    n_extents: tuple[int, ...]
    n_strides: tuple[int, ...]
    product: int = 0  # of a WEIGHT: index into PRODUCTS
    local: int = 0


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: int
    elements: int


@dataclasses.dataclass(frozen=True)
class Sink:
    """Folded per strand of consecutive tiles, strands combined in order (so the result does not depend on the schedule).

    Floating sums and products fold in f64, those of AccumulateAt in f32 (f64 for f64) where the sink has more than 4096 elements,
    and of sorted indices in f32 up to 256 rows and in f64 beyond; but see AccumulateMatmul.

    ``batch_strides``: none for a sink of the whole stream. Else there is one for each batch, whose sums are ``elements`` elements
    of the output, from sum(index * stride) over the batch axes on; together they fill it.
    """

    how: int
    dtype: int  # of the values folded
    elements: int
    out: int  # output array, written at the end (converted to its dtype)
    batch_strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Ring:
    producer: int
    consumers: tuple[int, ...]
    depth: int
    entry_bytes: int


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    scratch_bytes: int
    body: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """``workers``: threads that the plan counts on. A call runs on however many there are; how many partial sums are kept beside
    each other depends on this number, so that a program's results are the same bits on every machine of one instruction set.

    ``order``: the input, int32 [rows], through which StridedLoad and StridedStore go, or -1. It should be a permutation; whatever
    is in it, no element outside of an array is touched. There are no batch axes then.
    """

    name: str
    axes: tuple[int, ...]
    batch_axes: int
    tile_rows: int
    workers: int
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    preps: tuple[Prep, ...]
    sinks: tuple[Sink, ...]
    queues: tuple[Ring, ...]
    stages: tuple[Stage, ...]
    order: int = -1


# ----------------------------------------------------------------------------------------------------------------------------------
# A whole call, and it as the int64 words of the custom call's attribute.
#
# Comes in: a ``Call`` of programs (``bytecode``). Goes out: ``encode``, in int64 words: ``MAGIC, VERSION, number of words in all,
# CRC-32 of the words after the header (as little-endian bytes)``, then the dataclasses depth first in the order their fields are
# declared. An ``int`` is one word; a ``float`` is its IEEE-754 double bits; a ``tuple`` is its length, then its elements; a name
# is its length, then one word for each UTF-8 byte; an instruction is its ``CODE``, then its fields.
# ----------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A program on arrays of the call, given by number: ``reads`` are its inputs, ``writes`` its outputs."""

    phase: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    program: Program


@dataclasses.dataclass(frozen=True)
class Call:
    """A whole call. Of ``arrays`` the first are its ``operands``, the next its ``results``; the others live during the call only.

    Parts stand in the order of their phases, between which a barrier stands. A part reads operands and what earlier phases wrote.
    """

    name: str
    arrays: tuple[Array, ...]
    operands: int
    results: int
    parts: tuple[Part, ...]

    @staticmethod
    def of(program: Program) -> Call:
        """The call that is nothing but ``program``: its inputs are the operands, its outputs the results."""
        arrays = (*program.inputs, *program.outputs)
        n = len(program.inputs)
        part = Part(0, tuple(range(n)), tuple(range(n, len(arrays))), program)
        return Call(program.name, arrays, n, len(program.outputs), (part,))


def encode(call: Call | Program) -> np.ndarray:
    """``call``, or the call that is nothing but one program, as int64 words, shape (words,)."""
    body: list[int] = []
    _emit(call if isinstance(call, Call) else Call.of(call), body, {})
    words = np.asarray(body, np.int64)
    header = np.asarray([MAGIC, VERSION, 4 + len(body), zlib.crc32(words.astype("<i8").tobytes())], np.int64)
    return np.concatenate([header, words])


def name_bytes(name: str) -> bytes:
    """``name`` as it travels: UTF-8. The path of a source file may hold bytes that are not; each becomes a question mark."""
    return name.encode("utf-8", "replace")[:MAX_NAME_BYTES].decode("utf-8", "ignore").encode()


_layouts: dict[type, tuple[tuple[int, ...], tuple[str, ...]]] = {}


def _layout(x: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What stands in front of the fields of an instruction or record, and the fields' names."""
    if type(x) not in _layouts:
        code = (x.CODE,) if hasattr(x, "CODE") else ()
        _layouts[type(x)] = code, tuple(field.name for field in dataclasses.fields(x))
    return _layouts[type(x)]


def _emit(x: Any, out: list[int], programs: dict[int, list[int]]) -> None:
    """Append ``x`` to ``out``. ``programs``: words by the program's identity, for parameters of one shape share an update."""
    if isinstance(x, tuple):
        out.append(len(x))
        for v in x:
            _emit(v, out, programs)
    elif isinstance(x, (bool, int, np.integer)):
        out.append(int(x))
    elif isinstance(x, float):
        out.append(struct.unpack("<q", struct.pack("<d", x))[0])
    elif isinstance(x, str):
        data = name_bytes(x)
        out.append(len(data))
        out.extend(data)
    elif id(x) in programs:
        out.extend(programs[id(x)])
    else:
        start = len(out)
        code, names = _layout(x)
        out.extend(code)
        for name in names:
            v = getattr(x, name)
            if type(v) is int:
                out.append(v)
            else:
                _emit(tuple(float(e) for e in v) if name in ("imm", "fill") else v, out, programs)
        if isinstance(x, Program):
            programs[id(x)] = out[start:]
