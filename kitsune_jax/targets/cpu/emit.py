"""The custom call of a CPU program, as JAX sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

TARGET = "kitsune_cpu"


def call(program: np.ndarray, args: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """Bind the custom call that runs ``program`` (int64 words, ``bytecode.encode``) on ``args``.

    ``out_avals`` give shape and dtype of each result (``jax.ShapeDtypeStruct`` or the abstract values of the equations replaced,
    which also carry what ``shard_map`` tracks). Returns the results, one per aval. Arrays are dense and row-major.
    """
    return list(jax.ffi.ffi_call(TARGET, list(out_avals))(*args, program=program))
