"""The least time a case could take: its arithmetic over a rate, or its compulsory bytes over a bandwidth, whichever is longer.

Comes in: a case, and ceilings: a machine model's, or those measured on the device at hand (``measured_ceilings``). Goes out:
seconds. Compulsory bytes: each operand read once, each result written once.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.apps import DTYPES, Case
from kitsune_jax.planning.plan import Machine

_GEMM = 8192  # large enough that a library's matmul is at its best
_COPY_BYTES = 2 << 30  # many times any L2
_REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Operations per second of matrix products in the case's dtype; bytes per second of device memory, read and written."""

    flops: float
    bandwidth: float


def floor_seconds(case: Case, ceilings: Ceilings) -> float:
    out = jax.eval_shape(case.app.function, case.params, case.x)
    moved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((case.params, case.x, out)))
    return max(case.app.flops * case.rows / ceilings.flops, moved / ceilings.bandwidth)


def model_ceilings(machine: Machine, dtype: str) -> Ceilings:
    rate = machine.rate(machine.tensor_rates, jnp.dtype(DTYPES[dtype]).name)
    return Ceilings(rate * machine.workers, machine.dram_bandwidth)


@functools.cache
def measured_ceilings(dtype: str) -> Ceilings:
    """What a library's large matmul of random data and an elementwise pass over memory reach on JAX's default device, in
    ``jax.jit`` with default precision (tf32 for float32 on a GPU)."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(k, (_GEMM, _GEMM), DTYPES[dtype]) for k in keys)
    seconds = _median_seconds(jax.jit(lambda a, b: a @ b), a, b)
    del a, b
    x = jax.random.normal(keys[0], (_COPY_BYTES // 4,), jnp.float32)
    copied = _median_seconds(jax.jit(lambda x: x + 1), x)
    return Ceilings(2.0 * _GEMM**3 / seconds, 2 * _COPY_BYTES / copied)


def _median_seconds(function: Callable[..., Any], *args: Any) -> float:
    for _ in range(2):
        function(*args).block_until_ready()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        function(*args).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
