"""Parameters of networks drawn by NumPy: XLA compiles a generator of random numbers for each shape, a tenth of a second each.

Comes in: a block of code that calls ``jax.random.normal`` or ``jax.random.uniform``. Goes out: arrays of the same shapes, dtypes
and distributions, of another generator. Invariant: under a trace and inside of other functions of JAX nothing changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np


def _eager(name: str, draw: Callable[..., np.ndarray]) -> Callable[..., Any]:
    plain = getattr(jax.random, name)

    def drawn(key: Any, shape: Any = (), dtype: Any = float, *bounds: Any, **named: Any) -> Any:
        if isinstance(key, jax.core.Tracer) or any(isinstance(x, jax.Array) for x in (*bounds, *named.values())):
            return plain(key, shape, dtype, *bounds, **named)
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        rng = np.random.default_rng(np.asarray(key).ravel())
        return jax.device_put(np.asarray(draw(rng, shape, *bounds, **named), jax.dtypes.canonicalize_dtype(dtype)))

    return drawn


def _normal(rng: np.random.Generator, shape: Any) -> np.ndarray:
    return rng.standard_normal(shape)


def _uniform(rng: np.random.Generator, shape: Any, minval: float = 0.0, maxval: float = 1.0) -> np.ndarray:
    return rng.uniform(minval, maxval, shape)


@contextlib.contextmanager
def drawn_by_numpy() -> Iterator[None]:
    with mock.patch.multiple(jax.random, normal=_eager("normal", _normal), uniform=_eager("uniform", _uniform)):
        yield
