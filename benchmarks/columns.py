"""The ways one function is run.

Comes in: a row-wise function of (parameters, rows). Goes out: jitted functions of the same arguments. ``jax.jit`` is what everybody
writes; ``blocked`` is the best a JAX user does by hand on a CPU, keeping a block's intermediates in cache (on a GPU a block that
fits the cache is too small to fill the device, so there is no such column); ``pipeline`` is this project. The column with huge
pages is the first one in a process of its own (see ``measure``), because the C library reads its settings at start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kitsune_jax as kj

BLOCK_ROWS = 4096
RowFunction = Callable[[Any, jax.Array], jax.Array]


def block_rows(rows: int, largest: int = BLOCK_ROWS) -> int:
    """The largest divisor of ``rows`` in ``(largest / 2, largest]``, which spares the tail; else ``largest``, or all rows."""
    if rows <= largest:
        return rows
    return next((n for n in range(largest, largest // 2, -1) if rows % n == 0), largest)


def blocked(function: RowFunction) -> RowFunction:
    """``function`` over blocks of rows with ``lax.map``, and once over the tail where the blocks leave one."""

    def by_blocks(params: Any, x: jax.Array) -> jax.Array:
        rows, size = x.shape[0], block_rows(x.shape[0])
        whole = rows - rows % size
        head = jax.lax.map(lambda part: function(params, part), x[:whole].reshape(-1, size, *x.shape[1:]))
        head = head.reshape(whole, *head.shape[2:])
        return head if whole == rows else jnp.concatenate([head, function(params, x[whole:])])

    return by_blocks


COLUMNS: dict[str, Callable[[RowFunction], Any]] = {
    "jit": jax.jit,
    "blocked": lambda function: jax.jit(blocked(function)),
    "pipeline": lambda function: jax.jit(kj.pipeline(function)),
}


def column_names(platform: str) -> tuple[str, ...]:
    """The columns measured on ``platform`` ("cpu" or "cuda")."""
    return tuple(name for name in COLUMNS if platform == "cpu" or name != "blocked")
