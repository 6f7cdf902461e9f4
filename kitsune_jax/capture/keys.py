"""Typed keys of ``jax.random`` in a Graph: as the arrays of uint32 that they are, a dimension more at their end.

Comes in: values of a Graph under construction, and JAX's types of what they stand for. Goes out: the same, keys taken out of their
type or put into it. Invariant: only arguments and results of the Graph and of opaque ops have the type of keys; both directions
cost nothing, for JAX lowers a key as that array.
"""

from __future__ import annotations

from typing import Any

import jax

from kitsune_jax import _compat
from kitsune_jax.capture.builder import Builder
from kitsune_jax.capture.captured import Origin, Step

UNWRAP, WRAP = "random_unwrap", "random_wrap"  # labels of the ops
_REASON = "a key, which is an array of uint32 inside of pipelines"

# Primitives that move keys about, and the parameters that name all dimensions: what stands in them for a key's own.
_MOVES: dict[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("broadcast_dimensions",),
    "concatenate": (),
    "copy": (),
    "reshape": (),
    "rev": (),
    "select_n": (),
    "slice": ("start_indices", "limit_indices", "strides"),
    "split": (),
    "squeeze": (),
    "stack": (),
    "transpose": ("permutation",),
    "unstack": (),
}


def unwrapped(builder: Builder, v: int) -> int:
    """The array that ``v`` is: ``v`` itself unless it is of keys."""
    aval = builder.avals[v]
    if aval is None or not _compat.is_key(aval):
        return v
    step = Step(Origin(), lambda keys: [plain(keys)])
    return builder.opaque([v], [_compat.physical(aval)], step, _REASON, UNWRAP)[0]


def wrapped(builder: Builder, v: int, aval: Any) -> int:
    """The value of type ``aval`` that the array ``v`` stands for: ``v`` itself unless that is of keys."""
    if not _compat.is_key(aval):
        return v
    made = builder.maker(v)
    if made is not None and made.label == UNWRAP and builder.avals[made.inputs[0]] == aval:
        return made.inputs[0]
    step = Step(Origin(), lambda x: [typed(x, aval)])
    return builder.opaque([v], [aval], step, _REASON, WRAP)[0]


def plain(x: Any) -> Any:
    """The array (or tracer) of uint32 that ``x`` is if it is of keys, else ``x``."""
    return jax.random.key_data(x) if x is not None and _compat.is_key(x) else x


def typed(x: Any, aval: Any) -> Any:
    """``x``, which is an array that no key is typed in, as one of type ``aval``."""
    return _compat.wrapped_like(x, aval) if x is not None and _compat.is_key(aval) else x


def params_of(eqn: Any) -> dict[str, Any] | None:
    """The parameters of an equation as it is on arrays: those of one on keys that moves them about; None for others on keys."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    keys = [aval for aval in avals if _compat.is_key(aval)]
    if not keys:
        return dict(eqn.params)
    name = eqn.primitive.name
    if name not in _MOVES:
        return None
    size = _compat.physical(keys[0]).shape[-1]
    inside, outside = len(eqn.invars[-1].aval.shape), len(eqn.outvars[0].aval.shape)
    last = {"start_indices": 0, "limit_indices": size, "strides": 1, "permutation": inside, "broadcast_dimensions": outside}
    params = dict(eqn.params)
    return params | {k: (*params[k], last[k]) for k in _MOVES[name] if params[k] is not None}
