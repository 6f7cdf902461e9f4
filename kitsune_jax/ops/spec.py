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
from kitsune_jax.ops.relations import DimRelation

Array = np.ndarray[Any, Any]
Params = Mapping[str, Any]
Shapes = tuple[tuple[int, ...], ...]

_NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}  # exponent bits, mantissa bits
DTYPES = ("bool", *INTEGERS, *FLOATS)


# The op's semantics: ``rule(params, *arrays, out_dtype=...)``, where ``params`` maps names to values; returns the result.
NumpyRule = Callable[..., Array]
# Its evaluation by JAX: ``rule(params, *arrays, out=...)``, where ``out`` is the ``graph.Value`` to make; returns the result.
JaxRule = Callable[..., Any]


class RelateRule(Protocol):
    """The op's dimension relations at given operand and result shapes (``relations.DimRelation``)."""

    def __call__(self, op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class OpSpec:
    """Everything that is known about one kind of op.

    ``arity``: number of operands, ``None`` if it varies. ``flops``: per output element, in float32 vector lane operations of a CPU
    (an addition is 1). ``cpu``: the micro-operation of ``targets.cpu.bytecode.OPCODES``; ``cuda``: a C++ expression over ``{0} {1}
    {2}`` (float32 scalars if the op is defined on floats, else integers); ``None`` where no single one exists. ``dtypes``: those of
    the operands it is defined for. ``jax``: how JAX evaluates it; ``None`` if ``jax.lax`` has a function of its name that takes the
    operands and nothing else.
    """

    kind: str
    family: str
    arity: int | None
    numpy: NumpyRule
    relate: RelateRule
    flops: float = 0.0
    cpu: str | None = None
    cuda: str | None = None
    doc: str = ""
    dtypes: tuple[str, ...] = DTYPES
    jax: JaxRule | None = None

    def evaluate(self, params: Params, /, *arrays: Any, out: Value) -> Any:
        """The result by JAX, on arrays or tracers; a literal operand may be a NumPy array of rank 0.

        The operands' shapes and dtypes are those that the op is defined for; ``out`` is the result's.
        """
        return getattr(lax, self.kind)(*arrays) if self.jax is None else self.jax(params, *arrays, out=out)


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
