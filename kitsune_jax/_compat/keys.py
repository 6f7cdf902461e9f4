"""Keys of ``jax.random``: the arrays of uint32 that they are, and what the primitives that take them compute of those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from kitsune_jax._compat.jaxprs import trace_jaxpr
from kitsune_jax._compat.versions import core, prng


def is_key(aval: Any) -> bool:
    """Is it the type of an array of typed keys (``jax.random.key``)?"""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def physical(aval: Any) -> Any:
    """What JAX lowers ``aval`` as: of keys uint32 with the dimensions of a key behind the others; else itself."""
    return core.physical_aval(aval) if is_key(aval) else aval


def wrapped_like(x: jax.Array, aval: Any) -> jax.Array:
    """The keys of the type ``aval`` that the uint32 array ``x`` holds."""
    return jax.random.wrap_key_data(x, impl=aval.dtype._impl.name)


def random_jaxpr(eqn: Any) -> Any | None:
    """What an equation on keys computes, as a closed jaxpr of the arrays that keys are; ``None`` for other equations."""
    base = _base(eqn)
    if base is None:
        return None
    with eqn.ctx.manager:  # which says how threefry counts (jax_threefry_partitionable)
        return trace_jaxpr(lambda *arrays: [base(*arrays)], [physical(v.aval) for v in eqn.invars], lower=True)


def _base(eqn: Any) -> Callable[..., Any] | None:
    """The function of arrays that JAX's lowering of the equation traces."""
    name, params = eqn.primitive.name, eqn.params
    if name == "random_seed":
        return functools.partial(prng.random_seed_impl_base, impl=params["impl"])
    if name not in ("random_bits", "random_split", "random_fold_in"):
        return None
    keys = eqn.invars[0].aval
    impl, rank = keys.dtype._impl, len(keys.shape)
    if name == "random_bits":
        how = {"bit_width": params["bit_width"], "shape": params["shape"]}
        return lambda x: prng.random_bits_impl_base(impl, x, rank, **how)
    if name == "random_split":
        return lambda x: prng.random_split_impl_base(impl, x, rank, shape=params["shape"])
    return lambda x, data: prng.random_fold_in_impl_base(impl, x, data, keys.shape)
