"""How far a gradient may be off: roundings of its dtype, and what plain JAX is off beyond that.

Comes in: results of a pipeline, the same function without one, its arguments. Goes out: an assertion. Invariant: the reference is
JAX in float64 on the same (rounded) arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tests.support.checks import in_float64

EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-52}


def error(got: Any, want: Any, per_array: bool = False) -> float:
    """The largest distance, relative to the larger of the element and the root mean square of the array; with ``per_array`` to its
    largest element.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.all(np.isfinite(want)), "the case leaves its domain"
    if not want.size:
        return 0.0
    scale = np.max(np.abs(want)) if per_array else np.maximum(np.abs(want), np.sqrt(np.mean(want**2)))
    return float(np.max(np.abs(got - want) / np.where(scale == 0, 1.0, scale)))


def check_close(
    got: Any, plain: Callable[..., Any], args: Sequence[Any], dtype: str, roundings: float, per_array: bool = False
) -> None:
    """``got`` is what ``plain(*args)`` is in float64 up to ``roundings`` units of ``dtype``.

    Where it is not, it may be off twice as far as plain JAX in the same dtype: some of JAX's derivatives cancel.
    """
    want = in_float64(plain, *args)
    like = jax.tree.leaves(jax.eval_shape(plain, *args))
    assert [(g.shape, g.dtype) for g in jax.tree.leaves(got)] == [(x.shape, x.dtype) for x in like]
    limit = roundings * EPSILON[dtype]
    errors = [error(g, w, per_array) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    if all(e <= limit for e in errors):  # max may drop a NaN
        return
    jitted = jax.jit(plain)(*args)
    for k, (e, p, w) in enumerate(zip(errors, jax.tree.leaves(jitted), jax.tree.leaves(want), strict=True)):
        assert e <= limit + 2 * error(p, w, per_array), (
            f"result {k} ({p.dtype}{p.shape}): off by {e:.3g}, plain JAX by {error(p, w, per_array):.3g}"
        )
