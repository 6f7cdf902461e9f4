"""The custom calls of a CPU program and of the order of its stream, as JAX sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.targets.cpu import runtime


def call(program: np.ndarray, args: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """Bind the custom call that runs ``program`` (int64 words, ``bytecode.encode``) on ``args``.

    ``out_avals`` give shape and dtype of each result (``jax.ShapeDtypeStruct`` or the abstract values of the equations replaced,
    which also carry what ``shard_map`` tracks). Returns the results, one per aval. Arrays are dense and row-major. Raises
    ``RuntimeError`` where the extension is missing.

    The call has one more result, a byte that nobody reads. Without it, a loop whose body is nothing but this call would be compiled
    wrongly: XLA simplifies the tuple of all results of a call to the call itself, which makes the call the root of the body, and
    its loop-invariant code motion then takes "operand i of the root is carry i" for "carry i never changes".
    """
    if not runtime.register():
        raise RuntimeError(f"CPU pipelines cannot run here: {runtime.why_not()}")
    unread = _compat.aval_like(out_avals[0], (1,), np.uint8)
    outs = jax.ffi.ffi_call(runtime.TARGET_NAME, [*out_avals, unread])(*args, program=program)
    return list(outs)[: len(out_avals)]


def order(ids: Any, n: int) -> Any:
    """``Target.order`` by the custom call ``kitsune_cpu_order``. Raises ``RuntimeError`` where the extension is missing."""
    if not runtime.register():
        raise RuntimeError(f"CPU pipelines cannot run here: {runtime.why_not()}")
    result = _compat.aval_like(jax.typeof(ids), (ids.size,), np.int32)
    return jax.ffi.ffi_call(runtime.ORDER_NAME, result)(ids, n=np.int64(n))
