"""The custom calls of a CPU program and of the order of its stream, as JAX sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.targets.cpu import runtime
from kitsune_jax.targets.cpu.planning import xla_program

# XLA:CPU runs a program of fewer operations than this at once, in the thread that asks for it (1000, JAX 0.10 to 0.12).
_OPERATIONS = 1024


def call(program: np.ndarray, args: Sequence[Any], out_avals: Sequence[Any], seconds: float = 0.0) -> list[Any]:
    """Bind the custom call that runs ``program`` (int64 words, ``bytecode.encode``) on ``args``, for ``seconds`` by the model.

    ``out_avals`` give shape and dtype of each result (``jax.ShapeDtypeStruct`` or the abstract values of the equations replaced,
    which also carry what ``shard_map`` tracks). Returns the results, one per aval. Arrays are dense and row-major. Raises
    ``RuntimeError`` where the extension is missing.

    The call has one more result, a byte that nobody reads. Without it, a loop whose body is nothing but this call would be compiled
    wrongly: XLA simplifies the tuple of all results of a call to the call itself, which makes the call the root of the body, and
    its loop-invariant code motion then takes "operand i of the root is carry i" for "carry i never changes".

    A long call has one more operand, which nobody reads: see ``_operations``.
    """
    if not runtime.register():
        raise RuntimeError(f"CPU pipelines cannot run here: {runtime.why_not()}")
    unread = _compat.aval_like(out_avals[0], (1,), np.uint8)
    more = _operations(args) if seconds >= xla_program.LONG_SECONDS else []
    outs = jax.ffi.ffi_call(runtime.TARGET_NAME, [*out_avals, unread])(*args, *more, program=program)
    return list(outs)[: len(out_avals)]


def _operations(args: Sequence[Any]) -> list[Any]:
    """An array that takes XLA ``_OPERATIONS`` operations to make of an element of ``args``, less than a microsecond; [] where there
    is no element.

    XLA:CPU counts the operations of a program and knows none of a custom call. A program of few operations it takes for cheap, and
    runs it in the thread that asks for it: the user's Python would stand still for as long as the call takes, where other programs
    return at once, and Ctrl-C would wait for its end.
    """
    some = next((x for x in args if x.size), None)
    if some is None:
        return []
    first = lax.slice(some, (0,) * some.ndim, (1,) * some.ndim).reshape(1).astype(np.int32)
    return [lax.iota(np.int32, _OPERATIONS) + first]


def order(ids: Any, n: int) -> Any:
    """``Target.order`` by the custom call ``kitsune_cpu_order``. Raises ``RuntimeError`` where the extension is missing."""
    if not runtime.register():
        raise RuntimeError(f"CPU pipelines cannot run here: {runtime.why_not()}")
    result = _compat.aval_like(jax.typeof(ids), (ids.size,), np.int32)
    return jax.ffi.ffi_call(runtime.ORDER_NAME, result)(ids, n=np.int64(n))
