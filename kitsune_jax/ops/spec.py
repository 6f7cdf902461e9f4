"""The form of an entry of the op table: dimension relations, row-local form, semantics, cost and code of an op; and dtype rules.

Comes in: an op, and the shapes, dtypes or arrays of its operands. Goes out: ``OpSpec``, whose fields the other modules of ``ops``
fill; relations, cost and tile form of the op, or its value in NumPy. Invariant: 16-bit floats are computed in float32 (or wider)
and rounded once, to the result's dtype; integers wrap.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from jax import lax

from kitsune_jax.ops.graph import Op, Param, Scalar, Value, make_params, quick

# --- dimension relations ----------------------------------------------------------------------------------------------------------
# Operands are numbered inputs first, then outputs. Every dimension of every operand is in exactly one relation of its op.

OperandDim = tuple[int, int]  # (operand number, dimension)


@dataclasses.dataclass(frozen=True, slots=True)
class DimRelation:
    """One class of dimensions of one op.

    role:
      * ``"parallel"``: index i of one member meets index i of the others only (pointwise dimensions, batch and free dimensions of a
        dot, untouched dimensions of a reduction ...). All members have one size. A member may be alone (a weight's free dimension).
      * ``"contracted"``: reduced away; a sink if it is streamed. Members are inputs.
      * ``"reshaped"``: input dimensions ``members`` with operand 0 flatten, in order, to the same index as the output members.
      * ``"created"``: a dimension of the output that no input has, along which the op can make any slice on its own, given the
        index (iota) or not even that (broadcast).
      * ``"mixed"``: every output element may need every index (cumulative axis, sort axis, concatenated, sliced, padded, reversed
        axis, contracted dimension of a softmax-like op). It cannot be streamed; ``why`` is the reason in the report.
    """

    role: str
    members: tuple[OperandDim, ...]
    why: str = ""


def same_dims(rank: int, operands: Sequence[int] = (0, 1), why: Callable[[int], str] = lambda d: "") -> tuple[DimRelation, ...]:
    """Dimension d of all ``operands``: parallel, or mixed where there is a reason ``why(d)``."""
    return tuple(DimRelation("mixed" if why(d) else "parallel", tuple((k, d) for k in operands), why(d)) for d in range(rank))


# The parameter "accuracy" of a function that shall be as close as XLA has it. Only programs that XLA will divide hold such ops.
HIGHEST = "HIGHEST"

# Kinds of ops that matter for values that are compared (``program.passes.compared_values``, ``regions.grow``).

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"})
# Ops whose result is one of their operands, or its negative: nothing is rounded.
HAND_ON = frozenset({"select_n", "neg", "abs", "max", "min", "clamp", "copy"})


# --- the row-local form of an op: the same op on tiles, whose arrays have the rows in front (``(rows, *row_shape)``) --------------

ROWS = -1  # in the parameters below: the number of rows of the tile
_SIZES = ("shape", "new_sizes", "limit")


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class LocalOp:
    """An op on tiles: the same kind (or ``row_index``, ``matmul``, ``sink``, ``matmul_sink``) with parameters for rows-first
    shapes.

    Stationary operands keep their shape. ``swap``: exchange the operands (a ``matmul`` takes the tile first). ``squeeze``: reshape
    input 0 to this first.
    """

    kind: str
    params: tuple[tuple[str, Param], ...]
    swap: bool = False
    squeeze: tuple[int, ...] | None = None


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions of a value. ``labels``: for each one the stream axes it runs over; None: the value is stationary.

    ``batch``: how many of the first stream axes are batch axes. A value that runs over those only is stationary as well: a tile
    gets its other dimensions.
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
        """Does the stream pass over its elements in the order of memory?"""
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
    """The row-local form of ops whose parameters name no dimension."""
    return LocalOp(op.kind, op.params)


def one_axis(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """The row-local form of ops along the one dimension ``axis``."""
    return LocalOp(op.kind, make_params(**{**dict(op.params), "axis": ins[0].local(op["axis"])}))


def resolve_rows(params: Mapping[str, Param] | tuple[tuple[str, Param], ...], rows: int) -> dict[str, Param]:
    """Parameters of a rows-first op on a tile of ``rows`` rows: every ``ROWS`` in ``shape``, ``new_sizes`` or ``limit`` replaced.

    >>> resolve_rows({"shape": (-1, 4), "dims": (0,)}, rows=7)
    {'shape': (7, 4), 'dims': (0,)}
    """
    return {k: tuple(rows if n == ROWS else n for n in v) if k in _SIZES else v for k, v in dict(params).items()}


# --- an entry of the op table -----------------------------------------------------------------------------------------------------

Array = np.ndarray[Any, Any]
Params = Mapping[str, Any]
Shapes = tuple[tuple[int, ...], ...]

_NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = (*INTEGERS, *FLOATS)
BITS = ("bool", *INTEGERS)
DTYPES = ("bool", *INTEGERS, *FLOATS)
FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}  # exponent bits, mantissa bits

# The op's meaning: ``rule(params, *arrays, out_dtype=...)``, where ``params`` maps names to values; returns the result.
NumpyRule = Callable[..., Array]
# The op's evaluation by JAX: ``rule(params, *arrays, out=...)``, where ``out`` is the ``graph.Value`` to make; returns the result.
JaxRule = Callable[..., Any]
# C++ over ``{0} {1} {2}`` (the operands), ``{T}`` (the C++ type of the first operand), ``{R}`` (that of the result) and the op's
# parameters by name; or a function of the parameters that returns it, or None if they have no code.
CudaCode = str | Callable[[Params], "str | None"]


class RelateRule(Protocol):
    """The op's dimension relations at given operand and result shapes (``relations.DimRelation``)."""

    def __call__(self, op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class OpSpec:
    """Everything that is known about one kind of op.

    Meaning:
      * ``arity``: number of operands, ``None`` if it varies. ``dtypes``: those of the operands it is defined for. ``gives``: the
        dtype of the result: ``"bool"``, ``"any"`` (a parameter, or the op's result, says which) or "" (that of the operands).
        ``mixes``: its operands may have different dtypes.
      * ``relate``: how its dimensions travel together.
      * ``numpy``: its meaning, for ops that only make or move elements (CUDA code asks where each comes from), and for those that
        capture computes if their operands are constants. These round once, so that the number is the one that XLA would have
        computed. (``reference.operators`` has the meaning of all ops.)
      * ``fold``: how a reduction, a cumulative op or a product combines elements (``"sum"``, ``"max"`` ...). Over the stream a
        reduction or a product becomes a sink that folds in the same way (``sink``).
      * ``local``: its row-local form. ``alone``: the reason why it has none if these dimensions of its operands stream, "" if it
        has one; None for ops that always have one.
      * ``jax``: how JAX evaluates it; None if ``jax.lax`` has a function of its name that takes the operands and nothing else.

    Capture:
      * ``names``: JAX primitives that become this op, beside the one of its own name. ``takes``: parameters of the primitive that
        it keeps.

    Cost:
      * ``flops``: per output element, in float32 vector lane operations of a CPU (an addition is 1).
      * ``fast``: instructions per element on a GPU where a 16-bit result allows an approximate function: tanh.approx, ex2.approx
        (0: there is none). From compiled epilogues: ReLU and packing 0.5, SiLU by tanh 3.5, by ex2 and rcp 5.5, GELU by tanh 6.5.
        ``special``: it takes a result of the special function unit.
      * ``like``: the op whose loop XLA's loop on a CPU resembles, and how many times as long it takes.
      * ``measured``: profiles of CPUs have its time. Without one, plans go by its ``flops``.

    Code:
      * ``cpu``: its micro-operation, with the op's parameters in braces; None if it has none. ``opcodes``: all micro-operations it
        needs (by default ``cpu``). ``immediates``: parameters that the micro-operation takes.
      * ``cuda``: its C++ on a GPU, for a class of types: ``"float"``, ``"i32"``, ``"u32"``, ``"bool"`` or ``"any"`` other; and
        ``"coarse"`` if the result is a bfloat16, so that 8 significant bits suffice. The class is the result's, or that of the
        first operand where ``gives`` says that the result has another.
      * ``widens``: does it mean the same, with these parameters, on a 16-bit float (second argument) and on that number as a
        float32? Ops that depend on the bits of their operand do not, and have no code for 16-bit floats on either target.
      * ``exact``: floats are rounded correctly.
    """

    kind: str
    family: str
    arity: int | None
    relate: RelateRule
    flops: float = 0.0
    doc: str = ""
    dtypes: tuple[str, ...] = DTYPES
    gives: str = ""
    mixes: bool = False
    fold: str = ""
    numpy: NumpyRule | None = None
    local: Callable[[Op, list[Dims], Dims], LocalOp] = unchanged
    alone: Callable[[Op, list[Dims]], str] | None = None
    jax: JaxRule | None = None
    names: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    fast: float = 0.0
    special: bool = False
    like: tuple[str, float] | None = None
    measured: bool = True
    cpu: str | None = None
    opcodes: tuple[str, ...] = ()
    immediates: tuple[str, ...] = ()
    cuda: Mapping[str, CudaCode] = dataclasses.field(default_factory=dict)
    widens: Callable[[Params, str], bool] = lambda params, dtype: True
    exact: bool = False

    def evaluate(self, params: Params, /, *arrays: Any, out: Value) -> Any:
        """The result by JAX, on arrays or tracers; a literal operand may be a NumPy array of rank 0.

        The operands have shapes and dtypes for which the op is defined; ``out`` is the result's.
        """
        if self.jax is not None:
            return self.jax(params, *arrays, out=out)
        asked = {"accuracy": lax.AccuracyMode.HIGHEST} if params.get("accuracy") == HIGHEST else {}
        return getattr(lax, self.kind)(*arrays, **asked)

    @property
    def sink(self) -> str:
        """How it folds its operand over the stream; "" for ops that are no sinks."""
        return self.fold if self.family in ("reduce", "dot", "scatter") else ""

    @property
    def moves(self) -> bool:
        """Does it only make or move elements, and compute nothing?"""
        return self.family in _MOVES


_MOVES = frozenset({"broadcast", "reshape", "transpose", "rev", "slice", "pad", "concatenate", "iota"})


def np_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name, ``bfloat16`` included.

    >>> np_dtype("bfloat16").itemsize
    2
    """
    return _NARROW.get(name) or np.dtype(name)


@functools.cache
def name_of(dtype: Any) -> str:
    """The name of a dtype, JAX's extended ones included. NumPy takes microseconds to spell it."""
    return str(dtype)


def is_float(dtype: Any) -> bool:
    """Is this (NumPy dtype or name) one of the four floating dtypes?"""
    return name_of(dtype) in FLOATS


def is_narrow(dtype: str) -> bool:
    """Is this a 16-bit float, which is computed in float32?"""
    return dtype in _NARROW


def widen(x: Array) -> Array:
    """16-bit floats as float32; everything else unchanged."""
    return x.astype(np.float32) if str(x.dtype) in _NARROW else x


def round_to(x: Any, dtype: str) -> Array:
    """A result as an array of ``dtype``. All numbers reach a 16-bit float through float32, as a float32 computation would."""
    x = np.asarray(x)
    if str(x.dtype) == dtype:
        return x
    with np.errstate(all="ignore"):
        if dtype in _NARROW:
            x = x.astype(np.float32)
        return x.astype(np_dtype(dtype))


# --- rounding of 16-bit floats ----------------------------------------------------------------------------------------------------

NARROW = frozenset({"bfloat16", "float16"})
# If its dtype can hold the operands of such an op, it can hold the result: nothing is left to round.
_EXACT = HAND_ON | {"convert_element_type", "floor", "ceil", "round", "sign", "rem", "reduce_precision", "nextafter"}
# Functions for which JAX converts a 16-bit operand to float32 itself; others are XLA's own, in any dtype.
_WIDENED = frozenset({"erfc", "erf_inv", "sinh", "cosh", "lgamma", "digamma"})


@dataclasses.dataclass(frozen=True, slots=True)
class Rounding:
    """The results of 16-bit floats that are rounded to their dtype; the others keep the digits of their float32 computation.

    JAX rounds the result of every operator; a compiler may leave that out between operators that it fuses. Users rely on the
    roundings of ``jax.jit``: without them compensated sums (``s = a + b; e = b - (s - a)``) find an error of 0. So a pipeline
    rounds wherever ``jit`` on this platform does (``targets.cpu.profile.xla`` tries it).

    ``results``: dtypes in which every operator's result is rounded. ``widened``: dtypes in which that also holds for a result that
    is converted to a wider float at once, as by a sum in float32; in other dtypes the conversion takes the unrounded digits."""

    results: frozenset[str] = NARROW
    widened: frozenset[str] = NARROW

    def __repr__(self) -> str:
        """In keys of what is kept on disk: the same in every process, which the order of a set of texts is not.

        >>> Rounding(frozenset({"float16", "bfloat16"}), frozenset())
        Rounding(['bfloat16', 'float16'], [])
        """
        return f"Rounding({sorted(self.results)}, {sorted(self.widened)})"

    def rounds(self, kind: str, dtype: str, literals: tuple[Scalar | None, ...] = ()) -> bool:
        """Must a result of ``dtype`` of an op of this kind be rounded? ``literals``: its operands that are constants.

        >>> Rounding().rounds("add", "bfloat16"), Rounding().rounds("max", "bfloat16"), Rounding().rounds("add", "float32")
        (True, False, False)
        """
        if dtype not in self.results or kind in _EXACT:
            return False
        # bfloat16 has the exponents of float32: a factor of a half or two loses no digit of a normal number.
        scaled = kind == "mul" and dtype == "bfloat16" and any(_only_scales(c) for c in literals)
        return not scaled

    def takes_digits(self, kind: str, dtype: str, made: str) -> bool:
        """Does an op of this kind, which makes a ``made``, take the unrounded digits of an operand of ``dtype``?"""
        if kind in _WIDENED:
            return self.keeps_digits(dtype, "float32")
        return kind == "convert_element_type" and self.keeps_digits(dtype, made)

    def keeps_digits(self, dtype: str, wider: str) -> bool:
        """Does a conversion from ``dtype`` to ``wider`` take the unrounded digits of the value?"""
        return dtype in NARROW and wider in ("float32", "float64") and not (dtype in self.results and dtype in self.widened)


def _only_scales(c: Scalar | None) -> bool:
    return c is not None and abs(float(c)) in (0.25, 0.5, 1.0, 2.0, 4.0)


EVERYWHERE = Rounding()
