"""What an entry of the op table holds, and the dtype rules all entries share.

Comes in: nothing. Goes out: ``OpSpec`` and helpers. Invariant: 16-bit floats are computed in float32 (or wider) and rounded once,
to the result's dtype; integers wrap.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from jax import lax

from kitsune_jax.graph import Op, Value
from kitsune_jax.ops.local import Dims, LocalOp, unchanged
from kitsune_jax.ops.relations import DimRelation

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

INFINITY = float("inf")
POSITIVE, UNIT = (0.0, INFINITY), (-0.99, 0.99)  # domains

# The op's semantics: ``rule(params, *arrays, out_dtype=...)``, where ``params`` maps names to values; returns the result.
NumpyRule = Callable[..., Array]
# Its evaluation by JAX: ``rule(params, *arrays, out=...)``, where ``out`` is the ``graph.Value`` to make; returns the result.
JaxRule = Callable[..., Any]
# C++ over ``{0} {1} {2}`` (the operands), ``{T}`` (the C++ type of the first operand), ``{R}`` (that of the result) and the op's
# parameters by name; or a function of the parameters that gives it, or None where there is no code for them.
CudaCode = str | Callable[[Params], "str | None"]


class RelateRule(Protocol):
    """The op's dimension relations at given operand and result shapes (``relations.DimRelation``)."""

    def __call__(self, op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]: ...


def _always(params: Params, dtype: str) -> bool:
    return True


def _without_parameters(dtype: str) -> tuple[Params, ...]:
    return ({},)


@dataclasses.dataclass(frozen=True, slots=True)
class OpSpec:
    """Everything that is known about one kind of op.

    What it is:
      * ``arity``: number of operands, ``None`` if it varies. ``dtypes``: those of the operands it is defined for. ``gives``: the
        dtype of the result: ``"bool"``, ``"any"`` (a parameter, or the op's result, says which) or "" (that of the operands).
        ``mixes``: its operands may have different dtypes.
      * ``numpy`` and ``relate``: its meaning, and how its dimensions travel together.
      * ``fold``: how a reduction, a cumulative op or a product combines elements (``"sum"``, ``"max"`` ...). Over the stream a
        reduction or a product becomes a sink that folds in the same way (``sink``).
      * ``local``: its row-local form. ``alone``: why it has none where these dimensions of its operands stream, "" if it
        has; None for what always has one.
      * ``jax``: how JAX evaluates it; None if ``jax.lax`` has a function of its name that takes the operands and nothing else.

    Where it comes from:
      * ``names``: JAX primitives it stands for, beside the one of its own name. ``takes``: the primitive's parameters that it takes
        over as they are. ``folded``: on constants it is computed when it is captured. Only for what is rounded once, so that the
        number is the one that XLA would have computed.

    What it costs:
      * ``flops``: per output element, in float32 vector lane operations of a CPU (an addition is 1).
      * ``fast``: instructions per element on a GPU where a 16-bit result allows an approximate function: tanh.approx, ex2.approx
        (0: there is none). From compiled epilogues: ReLU and packing 0.5, SiLU by tanh 3.5, by ex2 and rcp 5.5, GELU by tanh 6.5.
        ``special``: it takes a result of the special function unit.
      * ``like``: the op whose loop XLA's loop on a CPU resembles, and how many times as long it takes.
      * ``measured``: profiles of CPUs have its time. Without one, plans go by its ``flops``.

    Its code:
      * ``cpu``: its micro-operation, with the op's parameters in braces; None if it is not computed by one. ``opcodes``: all
        micro-operations it needs (``cpu`` itself, unless it is said). ``immediates``: parameters that the micro-operation takes.
      * ``cuda``: its C++ on a GPU, for a class of types: ``"float"``, ``"i32"``, ``"u32"``, ``"bool"`` or ``"any"`` other; and
        ``"coarse"`` where the result is a bfloat16, so that 8 significant bits suffice. The class is the result's, or that of the
        first operand where ``gives`` says that the result has another.
      * ``widens``: whether, with these parameters, it means the same on a 16-bit float (second argument) and on that number as
        a float32. What does not (it speaks of the bits of its operand) has no code for 16-bit floats on either target.

    How it is tested:
      * ``samples``: parameters worth testing, for a dtype of the operands. ``domain``: for each operand (the last stands for the
        rest) the interval worth testing, open at an infinite end, or a ``range``; () means all numbers.
      * ``exact``: floats are rounded correctly. Otherwise ``ulps`` says how far, in units in the last place, results may be off:
        those of ``"xla"`` from this table (5 if it is not said) and those of ``"cuda"`` in the emulator (3). ``absolute`` and
        ``relative``: what XLA may be off beside, in float32, near zeros of the function and far in its tails.
    """

    kind: str
    family: str
    arity: int | None
    numpy: NumpyRule
    relate: RelateRule
    flops: float = 0.0
    doc: str = ""
    dtypes: tuple[str, ...] = DTYPES
    gives: str = ""
    mixes: bool = False
    fold: str = ""
    local: Callable[[Op, list[Dims], Dims], LocalOp] = unchanged
    alone: Callable[[Op, list[Dims]], str] | None = None
    jax: JaxRule | None = None
    names: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    folded: bool = False
    fast: float = 0.0
    special: bool = False
    like: tuple[str, float] | None = None
    measured: bool = True
    cpu: str | None = None
    opcodes: tuple[str, ...] = ()
    immediates: tuple[str, ...] = ()
    cuda: Mapping[str, CudaCode] = dataclasses.field(default_factory=dict)
    widens: Callable[[Params, str], bool] = _always
    samples: Callable[[str], Sequence[Params]] = _without_parameters
    domain: tuple[tuple[float, float] | range, ...] = ()
    exact: bool = False
    ulps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    absolute: float = 0.0
    relative: float = 0.0

    def evaluate(self, params: Params, /, *arrays: Any, out: Value) -> Any:
        """The result by JAX, on arrays or tracers; a literal operand may be a NumPy array of rank 0.

        The operands' shapes and dtypes are those that the op is defined for; ``out`` is the result's.
        """
        return getattr(lax, self.kind)(*arrays) if self.jax is None else self.jax(params, *arrays, out=out)

    @property
    def sink(self) -> str:
        """How it folds its operand over the stream; "" for what no stream goes into."""
        return self.fold if self.family in ("reduce", "dot", "scatter") else ""

    @property
    def moves(self) -> bool:
        """It makes or moves elements, and computes nothing."""
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


def to_double(x: Array) -> Array:
    """Floats as float64; everything else unchanged."""
    return x.astype(np.float64) if is_float(x.dtype) else x


def round_to(x: Any, dtype: str) -> Array:
    """A result as an array of ``dtype``. Doubles reach a 16-bit float through float32, as a float32 computation would."""
    x = np.asarray(x)
    if str(x.dtype) == dtype:
        return x
    with np.errstate(all="ignore"):
        if dtype in _NARROW and x.dtype == np.float64:
            x = x.astype(np.float32)
        return x.astype(np_dtype(dtype))


def arrays_of(xs: Sequence[Any]) -> list[Array]:
    """NumPy's scalars (what its functions return for rank 0) as arrays again."""
    return [np.asarray(x) for x in xs]
