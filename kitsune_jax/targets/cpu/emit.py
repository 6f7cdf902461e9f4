"""The custom call of a CPU program, as JAX sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax.targets.cpu import runtime


def call(program: np.ndarray, args: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """Bind the custom call that runs ``program`` (int64 words, ``bytecode.encode``) on ``args``.

    ``out_avals`` give shape and dtype of each result (``jax.ShapeDtypeStruct`` or the abstract values of the equations replaced,
    which also carry what ``shard_map`` tracks). Returns the results, one per aval. Arrays are dense and row-major. Raises
    ``RuntimeError`` where the extension is missing.
    """
    if not runtime.register():
        raise RuntimeError(f"CPU pipelines cannot run here: {runtime.why_not()}")
    return list(jax.ffi.ffi_call(runtime.TARGET_NAME, list(out_avals))(*args, program=program))
