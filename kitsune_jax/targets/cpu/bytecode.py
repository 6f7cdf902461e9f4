"""The CPU program: its instructions, its operands, and its encoding as int64 words. This file *is* the format.

Comes in: a ``CpuCall``, whose programs ``targets.cpu.lower`` makes. Goes out: the attribute of the custom call (``encode``), which
``cpu/src/program.cc`` parses. Invariant: the parser rejects accesses outside of an operand's memory, for all rows and indices.

Semantics shared by all instructions: a worker runs one stage on one tile, the rows ``row0 .. row0 + rows`` of a batch, ``rows ==
tile_rows`` except on the batch's last tile. The first ``CpuProgram.batch_axes`` axes number the batches; without them there is one.
Strides may be 0 or negative; extents may not.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import struct
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from kitsune_jax.ops.table import OPS

# --- Operands ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CpuRef:
    """Names memory from element ``offset`` (of ``dtype``) on. It moves by ``loop_strides`` with the numbers of the enclosing loops,
    outermost first, and an array also by ``batch_strides`` with the tile's index along each batch axis. Spaces:

    * ``IN``/``OUT``: array ``index``. A row stride applies to the row of the batch: element (r, i...) is at
      ``offset + (row0 + r) * row_stride + sum(i * stride)``. Stationary operands have row stride 0.
    * ``SCRATCH``: the worker's own memory, ``Stage.scratch_bytes`` of it, 64-byte aligned; ``index`` is 0; rows count from the
      tile's start.
    * ``QUEUE``: the slot ``tile % depth`` of queue ``index``, which the stage produces (and writes) or consumes (and reads); rows
      count from the tile's start.
    * ``PREP``: stationary operand ``index`` prepared once per call (see ``Prep``); row stride 0.
    """

    space: int
    index: int
    offset: int
    dtype: int
    loop_strides: tuple[int, ...] = ()
    batch_strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CpuOperand:
    """An operand of an instruction that loops over (rows, *extents): its stride, in elements, for the row and each extent."""

    ref: CpuRef
    row_stride: int
    strides: tuple[int, ...]


# --- Instructions that read or write by indices -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gather:
    """out(rows, *index_extents, *extents) = row index(rows, *index_extents) of ``table``, which has ``count`` rows of ``extents``.

    ``table.row_stride`` is the distance of its rows. An index below 0 or beyond count - 1 reads the nearest row (``mode`` CLIP) or
    gives ``fill`` (FILL; encoded as ``Micro.imm``). Table and result have one dtype; the index has any integer dtype.
    """

    CODE: ClassVar[int] = 9
    table: CpuOperand
    count: int
    mode: int
    fill: tuple[float, ...]
    index_extents: tuple[int, ...]
    extents: tuple[int, ...]
    index: CpuOperand
    out: CpuOperand


@dataclasses.dataclass(frozen=True)
class AccumulateAt:
    """Row index(rows, *index_extents) of the sink's accumulator (dense, [count, *extents]) folded with
    x(rows, *index_extents, *extents), whose ``extents`` lie dense. Indices below 0 or beyond count - 1 are dropped; rows without an
    index hold the identity. x has the sink's dtype, or a 16-bit one that is computed in it.

    ``sorted``: valid indices never decrease along the stream; if they do, the result is undefined, but stays in bounds. No other
    instruction folds into such a sink. ``ordered``: row r of the input x is at element ``order[r]`` of the program's order.
    """

    CODE: ClassVar[int] = 10
    sink: int
    count: int
    index_extents: tuple[int, ...]
    extents: tuple[int, ...]
    index: CpuOperand
    x: CpuOperand
    sorted: int = 0
    ordered: int = 0


@dataclasses.dataclass(frozen=True)
class RunMax:
    """out(rows, *extents) = the elementwise maximum of x over the adjacent rows of the tile with the same index(rows).

    ``extents`` lie dense in x and out, which have one 16-bit or 32-bit float dtype. Other indices belong to no run.
    """

    CODE: ClassVar[int] = 17
    count: int
    extents: tuple[int, ...]
    index: CpuOperand
    x: CpuOperand
    out: CpuOperand


@dataclasses.dataclass(frozen=True)
class AccumulateScaled(AccumulateAt):
    """AccumulateAt of rows scaled by e^-top. Each sum is kept with its top; two sums are added at the larger of their tops.
    Always ``sorted`` and never ``ordered``; one index for each row; the sink is a sum of float32.

    ``top(rows, heads)``: one for each of the first dimensions of a row, ``heads`` in all, the same for all rows of one index in a
    tile; one that is not finite counts as 0. Unless ``finite``, a sum whose largest top is not finite is NaN.
    """

    CODE: ClassVar[int] = 18
    top: CpuOperand = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(kw_only=True)
    finite: int = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class AccumulateTaken(AccumulateScaled):
    """A float32 sum by ``sorted`` indices, one for each row, of rows that are read in place from a table and multiplied: ``x`` is
    the table of ``rows`` rows, its row stride their distance, of one 16-bit or 32-bit float dtype.

    Row r is row taken(r) of the table (``mode`` and ``fill`` as in Gather) times factor(r, factors) of float32, which lie dense;
    each factor applies to an equal share of consecutive elements. Without ``factors`` rows are added as they are. Without ``heads``
    the sum is that of AccumulateAt, and ``top`` is ignored.
    """

    CODE: ClassVar[int] = 19
    rows: int = dataclasses.field(kw_only=True)
    mode: int = dataclasses.field(kw_only=True)
    fill: tuple[float, ...] = dataclasses.field(kw_only=True)
    taken: CpuOperand = dataclasses.field(kw_only=True)
    factor: CpuOperand = dataclasses.field(kw_only=True)
    factors: int = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class CpuRows:
    """Dense rows of a tile; or, with ``rows`` above 0, rows ``taken`` of a table with that many rows, at distance ``x.row_stride``
    (``mode`` and ``fill`` as in Gather). Without a table ``mode``, ``fill`` and ``taken`` are ignored."""

    x: CpuOperand
    rows: int
    mode: int
    fill: tuple[float, ...]
    taken: CpuOperand


@dataclasses.dataclass(frozen=True)
class CpuTakenDot:
    """out(rows, h) = the sum of the products of elements [h * inner, (h + 1) * inner) of two rows, h < ``heads``, in float32.

    x and y have one 16-bit or 32-bit float dtype, out any of these; the elements of a row lie dense in all three.
    """

    CODE: ClassVar[int] = 20
    heads: int
    inner: int
    x: CpuRows
    y: CpuRows
    out: CpuOperand


@dataclasses.dataclass(frozen=True)
class CpuPut:
    """out(rows, *outer, k, :) = sum of x(rows, *outer, i, :), ``inner`` elements each, over the i < ``indices`` with index[i] == k.

    The index does not depend on the row. x and out have a stride for each of ``outer``, then one for the dimension of ``count`` or
    ``indices``, which is ``inner``: the selected elements lie dense. 16-bit floats are added up in float32. Indices below 0 or
    beyond count - 1 are dropped.
    """

    CODE: ClassVar[int] = 16
    count: int
    indices: int
    inner: int
    outer: tuple[int, ...]
    index: CpuOperand
    x: CpuOperand
    out: CpuOperand


@dataclasses.dataclass(frozen=True)
class Take(CpuPut):
    """out(rows, *outer, i, :) = x(rows, *outer, index[i], :); the rest as in CpuPut, ``mode`` and ``fill`` as in Gather."""

    CODE: ClassVar[int] = 15
    mode: int
    fill: tuple[float, ...]


# --- Programs ---------------------------------------------------------------------------------------------------------------------

MAGIC = 0x004B4954_53554E45  # "KITSUNE"
VERSION = 16

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "bfloat16", "float32", "float64")
DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}

IN, OUT, SCRATCH, QUEUE, PREP = range(5)

REDUCTIONS = tuple(spec.fold for spec in OPS.values() if spec.family in ("reduce", "argreduce"))
CUMULATIVE = tuple(spec.fold for spec in OPS.values() if spec.family == "cumulative")
# Activations of a matrix product's sums, with their parameters a and b, positive but for that of scale. Float64 sums have none and
# relu only.
#   leaky_relu: x if x >= 0 else a x          elu: x if x > 0 else a (e^x - 1)       logistic: 1 / (1 + e^-x)
#   silu: x logistic(a x)                     gelu_tanh: x logistic(a x + b x^3)     gelu_erf: x erfc(-a x) / 2     scale: a x
# silu and gelu of minus infinity are NaN, as by definition. Where sums are rounded (``Matmul.rounds``), so are the logistic of silu
# and each step of gelu as ``jax.nn.gelu`` computes it.
ACTIVATIONS = ("none", "relu", "leaky_relu", "elu", "logistic", "tanh", "silu", "gelu_tanh", "gelu_erf", "scale")
ACTIVATION_PARAMETERS = (0, 0, 1, 1, 0, 0, 1, 2, 1, 1)
# How bfloat16 operands are multiplied: the kernels' own choice; widened to float32 (FMA); by instructions that add pairs of
# products to float32 (VDPBF16PS, BFDOT, BFMMLA); by AMX tiles. A CPU without one uses the one before it. Other dtypes use "best".
PRODUCTS = ("best", "widened", "dots", "tiles")

# Micro-operations of a Vector program, by name; the code is the position. SPECIAL_OPS are defined here, the others by the op table
# (scripts/opcodes.py writes the same list as a C++ header; a test compares them). Comparisons and is_finite give bool; select takes
# (pred, on_false, on_true). to_float16 and to_bfloat16 round a float32 as a store and a load would; reduce_precision to the bits of
# float16 also flushes numbers that are denormal in float16.
#   load: dst <- operand ``a`` (an index into Vector.loads), converted from its storage dtype to the register type
#   store: operand ``a`` (an index into Vector.stores) <- register ``b``, converted to its storage dtype
#   const: dst <- imm[0]; convert: dst <- register ``a`` of type ``from_type``
#   index: dst <- (position in loop dimension ``a`` // b) % c, an int64 unless ``type`` says otherwise; dimension 0 is the row of
#     the whole stream, 1.. are the extents, -1.. the numbers of the enclosing loops, outermost first
SPECIAL_OPS = ("load", "store", "const", "convert", "index")
OPCODES = (*SPECIAL_OPS, *(name for spec in OPS.values() for name in spec.opcodes))
OPCODE = {name: code for code, name in enumerate(OPCODES)}
MAX_REGISTERS = 32
SUM_GROUP = 32  # kSumGroup in cpu/include/kitsune_cpu/kernels.h
MAX_LOOP_DIMS = 8
MAX_NAME_BYTES = 1 << 16
MAX_WEIGHT_INDICES = 1 << 24  # b, k and n of all weights together: the executor has a table of offsets for each index


@dataclasses.dataclass(frozen=True)
class StridedLoad:
    """scratch/queue tile <- input array, for arrays whose element address is not linear in the row.

    Row r has the mixed-radix index (r_0, ..., r_k) over ``Program.axes`` (last fastest); element (r, i...) of the array is at
    ``array.offset + sum(r_j * axis_strides[j]) + sum(i * array_strides)``; ``tile`` has strides of its own. Both have one dtype.
    In a program with an order, row r of the tile is element ``order[r]`` of the stream instead.
    """

    CODE: ClassVar[int] = 1
    array: CpuRef
    axis_strides: tuple[int, ...]
    extents: tuple[int, ...]
    array_strides: tuple[int, ...]
    tile: CpuOperand


@dataclasses.dataclass(frozen=True)
class StridedStore(StridedLoad):
    """The reverse of StridedLoad: output array <- tile."""

    CODE: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True)
class Matmul:
    """out[b, m, :] = act(x[b, m, :] @ W[b] + bias), m over rows * row_multiple, accumulated in f32 (f64 for f64). If ``adds``
    (``out`` is f32), the previous contents of ``out`` are added to the product.

    ``rounds``: float16 or bfloat16, to which sums are rounded before the bias is added and before the activation; float32: nowhere.

    ``x``: row_stride is the leading dimension lda (distance of consecutive m), strides = (batch stride,); its K elements are
    contiguous. ``out`` likewise with N contiguous elements. ``weight``: a Prep of kind WEIGHT with the same batch, giving K, N.
    ``bias``: a Prep of kind DENSE of N f32 (f64 for f64) elements, or -1. For IN/OUT, lda * row_multiple is the global row stride.
    """

    CODE: ClassVar[int] = 3
    x: CpuOperand
    row_multiple: int
    batch: int
    weight: int
    bias: int
    activation: int  # index into ACTIVATIONS
    out: CpuOperand
    parameters: tuple[float, ...] = ()  # of the activation: ACTIVATION_PARAMETERS of them
    adds: bool = False  # to a result in float32 only
    rounds: int = DTYPE_CODE["float32"]


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
class CpuVector:
    """A straight-line pointwise program over (rows, *extents), run chunk by chunk.

    ``collapse_rows``: 1 when, for every operand, row_stride == extents[0] * strides[0], so rows and the first extent are one loop.
    """

    CODE: ClassVar[int] = 4
    extents: tuple[int, ...]
    collapse_rows: int
    loads: tuple[CpuOperand, ...]
    stores: tuple[CpuOperand, ...]
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
    x: CpuOperand  # strides for (*kept, *reduced)
    out: CpuOperand  # strides for kept


@dataclasses.dataclass(frozen=True)
class ExpRows:
    """out(rows, *kept, n) = e^(x(rows, *kept, n) * factor - shift(rows, *kept)), in float32, of elements that lie dense.

    ``shift`` is float32, ``x`` and ``out`` float32 or a 16-bit float. ``sums``: (), or the place of the sums over n, float32,
    before ``out`` is rounded. Where the CPU has no instruction for scaling, results below the normal numbers are 0.
    """

    CODE: ClassVar[int] = 21
    kept: tuple[int, ...]
    n: int
    factor: float
    x: CpuOperand  # strides for (*kept, n)
    shift: CpuOperand  # strides for kept
    out: CpuOperand  # strides for (*kept, n)
    sums: tuple[CpuOperand, ...]  # strides for kept


@dataclasses.dataclass(frozen=True)
class Scan:
    """Cumulative op along the last of ``extents`` (from the end when ``reverse``)."""

    CODE: ClassVar[int] = 6
    how: int
    reverse: int
    extents: tuple[int, ...]
    x: CpuOperand
    out: CpuOperand


@dataclasses.dataclass(frozen=True)
class Sums:
    """The part of a sink's accumulators an instruction folds into: from element ``offset`` on, moved by loop numbers."""

    offset: int = 0
    loop_strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """sink accumulator folded with x(rows, *kept, *reduced), over rows and reduced."""

    CODE: ClassVar[int] = 7
    sink: int
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    x: CpuOperand  # strides for (*kept, *reduced)
    sums: Sums = Sums()
    sum_strides: tuple[int, ...] = ()  # of the accumulators, for kept; () where they are dense
    only: int = 0  # 1: nothing else reads x, which the CpuVector in front may keep in registers then


@dataclasses.dataclass(frozen=True)
class AccumulateMatmul:
    """sink accumulator ([batch, m, n]) += sum over r of x[b, r, :] outer y[b, r, :], r over rows * row_multiple.

    A weight gradient. ``x``: row_stride is the distance of consecutive r, strides = (batch stride,); its m elements are contiguous.
    ``y`` likewise with n. Both have one dtype; the sink has how = sum and dtype float32 (float64 for float64), and accumulates in
    it. For IN refs the distance * row_multiple is the global row stride.

    ``matrices``: empty, or (height, rows, columns) of the sink's matrices (one for each of the batch) of which m x n is a part: a
    range of columns if ``rows`` is the height, else ``rows`` rows, or the remaining ones. The accumulators of each part of rows
    are contiguous and ordered by groups of ``SUM_GROUP`` columns; parts of columns begin with a group.
    """

    CODE: ClassVar[int] = 8
    sink: int
    row_multiple: int
    batch: int
    m: int
    n: int
    x: CpuOperand
    y: CpuOperand
    product: int = 0  # index into PRODUCTS
    sums: Sums = Sums()
    matrices: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Products:
    """How a program multiplies bfloat16 operands, as names in ``PRODUCTS``: tiles times weights, and weight gradients."""

    weights: str = "best"
    gradients: str = "best"

    def __post_init__(self) -> None:
        for name in (self.weights, self.gradients):
            if name not in PRODUCTS:
                raise ValueError(f"products are multiplied as one of {', '.join(PRODUCTS)}, not {name!r}")


@dataclasses.dataclass(frozen=True)
class Pack:
    """Prepares the ``local`` ``Prep`` of this number for the products that follow in the stage's body."""

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
    x: CpuOperand
    y: CpuOperand
    out: CpuOperand


@dataclasses.dataclass(frozen=True)
class CpuLoop:
    """Runs ``body`` ``count`` times, at least once; with ``reverse``, the iterations' numbers count down to 0.

    ``within``: empty, or (divisor, extent, step, low, high, which, together). Let x and y be the smallest and the largest row //
    divisor % extent of the tile's rows, counted from the start of the batch. Iteration i covers the elements i * step to (i + 1) *
    step - 1; it is skipped unless they overlap [x + low, y + high], and it is whole if all lie in [y + low, x + high], and those of
    all ``together`` neighbours, counted from 0. ``which``: 0 runs all iterations that are not skipped, 1 the whole ones, 2 the
    others. Rows that see no element of an iteration that is not whole may be left out of it.
    """

    CODE: ClassVar[int] = 13
    count: int
    reverse: int
    within: tuple[int, ...]
    body: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class CpuStationary:
    """Runs ``body`` on one row, for values that do not depend on the row: their row strides are 0."""

    CODE: ClassVar[int] = 14
    body: tuple[Instruction, ...]


Instruction = (
    StridedLoad | StridedStore | Matmul | CpuVector | Reduce | Scan | Accumulate | AccumulateMatmul
    | Gather | AccumulateAt | Pack | Dot | CpuLoop | CpuStationary | Take | CpuPut | RunMax
    | AccumulateScaled | AccumulateTaken | CpuTakenDot | ExpRows
)  # fmt: skip

CLIP, FILL = range(2)  # Gather.mode

WEIGHT, DENSE = range(2)


@dataclasses.dataclass(frozen=True)
class Prep:
    """A stationary operand prepared once per call, before any stage runs, from an IN ref; or, if ``local``, from any memory, for
    one worker and tile, at its ``Pack``.

    WEIGHT: ``source`` read as W[b, k, n] with b, k, n running over the mixed-radix indices of the three extent lists
    (last fastest), packed into the panels of the ISA at hand. DENSE: ``source`` read over ``n_extents`` into a contiguous array of
    ``dtype`` (converted); b and k lists are empty.
    """

    kind: int
    source: CpuRef
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
class CpuArray:
    dtype: int
    elements: int


@dataclasses.dataclass(frozen=True)
class Sink:
    """Folded per strand of consecutive tiles; strands are combined in order, so the result does not depend on the schedule.

    Floating sums and products fold in f64, those of AccumulateAt in f32 (f64 for f64) where the sink has more than 4096 elements,
    and of sorted indices in f32 up to 256 rows and in f64 beyond; AccumulateMatmul is an exception.

    ``batch_strides``: () for a sink of the whole stream. Else each batch has its own ``elements`` sums, from element
    sum(index * stride) of the output on, over the batch axes; together they fill the output.
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
class CpuStage:
    name: str
    scratch_bytes: int
    body: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class CpuProgram:
    """``workers``: threads that the plan assumes. A call runs on any number of threads; the number of partial sums depends on
    ``workers`` alone, so results have the same bits on every machine of one instruction set.

    ``order``: the number of the int32 [rows] input that StridedLoad and StridedStore index the stream by, or -1. It should be a
    permutation; with any contents, all accesses stay in bounds. A program with an order has no batch axes.
    """

    name: str
    axes: tuple[int, ...]
    batch_axes: int
    tile_rows: int
    workers: int
    inputs: tuple[CpuArray, ...]
    outputs: tuple[CpuArray, ...]
    preps: tuple[Prep, ...]
    sinks: tuple[Sink, ...]
    queues: tuple[Ring, ...]
    stages: tuple[CpuStage, ...]
    order: int = -1


# --- Calls and their encoding -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CpuPart:
    """A program on arrays of the call, given by number: ``reads`` are its inputs, ``writes`` its outputs."""

    phase: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    program: CpuProgram


@dataclasses.dataclass(frozen=True)
class CpuCall:
    """A whole call. ``arrays``: its ``operands``, then its ``results``, then arrays that live during the call only.

    Parts are ordered by phase, with a barrier between phases. A part reads operands and arrays written in earlier phases.
    """

    name: str
    arrays: tuple[CpuArray, ...]
    operands: int
    results: int
    parts: tuple[CpuPart, ...]

    @staticmethod
    def of(program: CpuProgram) -> CpuCall:
        """The call of ``program`` alone: its inputs are the operands, its outputs the results."""
        arrays = (*program.inputs, *program.outputs)
        n = len(program.inputs)
        part = CpuPart(0, tuple(range(n)), tuple(range(n, len(arrays))), program)
        return CpuCall(program.name, arrays, n, len(program.outputs), (part,))


def encode(call: CpuCall | CpuProgram) -> np.ndarray:
    """``call``, or the call of one program alone, as int64 words, shape (words,).

    The words are ``MAGIC, VERSION, number of words in all, CRC-32 of the words after the header (as little-endian bytes)``, then
    the dataclasses depth first in the order in which their fields are declared. An ``int`` is one word; a ``float`` is its IEEE-754
    double bits; a ``tuple`` is its length, then its elements; a name is its length, then one word for each UTF-8 byte; an
    instruction is its ``CODE``, then its fields.
    """
    body: list[int] = []
    _emit(call if isinstance(call, CpuCall) else CpuCall.of(call), body, {})
    words = np.asarray(body, np.int64)
    header = np.asarray([MAGIC, VERSION, 4 + len(body), zlib.crc32(words.astype("<i8").tobytes())], np.int64)
    return np.concatenate([header, words])


def name_bytes(name: str) -> bytes:
    """``name`` in UTF-8. Where the path of a source file is not valid Unicode, a question mark replaces each bad byte."""
    return name.encode("utf-8", "replace")[:MAX_NAME_BYTES].decode("utf-8", "ignore").encode()


_FLOATS = frozenset({"imm", "fill"})  # fields whose numbers are floats


@functools.cache
def _layout(kind: Any) -> tuple[tuple[int, ...], Callable[[Any], tuple[Any, ...]]] | None:
    """The words before the fields of an instruction or record of type ``kind``, and the fields of one; ``None`` for other types."""
    if not dataclasses.is_dataclass(kind):
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    taken = operator.attrgetter(*names)
    fields: Callable[[Any], tuple[Any, ...]] = taken if len(names) > 1 else lambda x: (taken(x),)
    if not _FLOATS.isdisjoint(names):
        fields = lambda x: tuple(tuple(map(float, getattr(x, n))) if n in _FLOATS else getattr(x, n) for n in names)  # noqa: E731
    return (kind.CODE,) if hasattr(kind, "CODE") else (), fields


def _emit(x: Any, out: list[int], programs: dict[int, list[int]]) -> None:
    """Append ``x`` to ``out``. ``programs``: words of each program by its identity, since equal parts share one program."""
    if type(x) is tuple:
        out.append(len(x))
        values = x
    elif (layout := _layout(x.__class__)) is not None:
        if id(x) in programs:
            out.extend(programs[id(x)])
            return
        start = len(out)
        code, fields = layout
        out.extend(code)
        values = fields(x)
    else:
        _emit_single(x, out)
        return
    for v in values:
        if type(v) is int:
            out.append(v)
        else:
            _emit(v, out, programs)
    if isinstance(x, CpuProgram):
        programs[id(x)] = out[start:]


def _emit_single(x: Any, out: list[int]) -> None:
    if isinstance(x, (bool, int, np.integer)):
        out.append(int(x))
    elif isinstance(x, float):
        out.append(struct.unpack("<q", struct.pack("<d", x))[0])
    else:
        data = name_bytes(x)
        out.append(len(data))
        out.extend(data)
