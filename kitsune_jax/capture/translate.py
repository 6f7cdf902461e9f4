"""One equation in the op table's terms.

Comes in: an equation and the value ids of its operands. Goes out: the value ids of its results, with the ops that make them
appended to the builder, or the reason why the table has no ops for it. Invariant: nothing is appended where a reason is returned.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.capture import keys
from kitsune_jax.capture.builder import Builder, is_array, scalar_of
from kitsune_jax.capture.captured import Origin
from kitsune_jax.capture.equation import Equation
from kitsune_jax.capture.numbers import known
from kitsune_jax.capture.primitives import RULES, pointwise
from kitsune_jax.ops.spec import is_float, name_of, np_dtype
from kitsune_jax.ops.table import OPS

_KEY_TYPES = ("random_wrap", "random_unwrap")  # keys are the arrays that they are
_IDENTITIES = ("copy", "copy_p", "stop_gradient", "name", *_KEY_TYPES)  # "name": checkpoint_name, whose policies are applied by now
_COLLECTIVES = (
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "all_to_all"),
    *("ragged_all_to_all", "reduce_scatter", "axis_index", "pbroadcast", "pgather"),
)


def translate(builder: Builder, eqn: Any, ins: list[int], origin: Origin, stands_for: Origin) -> list[int] | str:
    """Value ids of the results of ``eqn`` on ``ins``, or why it has to stay opaque. ``stands_for``: the equation of the user's
    jaxpr that it is a part of."""
    name = eqn.primitive.name
    if name in _IDENTITIES and len(ins) == 1:
        return ins
    if name in _COLLECTIVES:
        return f"{name}: communicates between devices"
    params = keys.params_of(eqn)
    if params is None:
        return f"{_compat.called(eqn)}: of keys, which it does not only move"
    e = Equation(builder, eqn, ins, origin, params, stands_for)
    if name not in RULES and e.kind not in OPS:
        return f"{_compat.called(eqn)}: not an op the pipeline knows"
    why = _why_opaque(e)
    if why:
        return why
    constant = _folded(e)
    made = RULES.get(name, pointwise)(e) if constant is None else constant
    return [made] if isinstance(made, int) else made


def _folded(e: Equation) -> int | None:
    """The literal that an op on literals is: autodiff writes ``1 / n`` for the gradient of a mean, indexing wraps a fixed index.
    Where they are repeated, so is it, as the bounds of random numbers are.
    """
    values = [e.builder.values[v] for v in e.ins]
    numbers = [known(e.builder, v) for v in e.ins]
    if e.kind not in OPS or not OPS[e.kind].folded or None in numbers:
        return None
    dtype = e.out_dtype
    arrays = [np.asarray(x, np_dtype(v.dtype)) for x, v in zip(numbers, values, strict=True)]
    scalar = scalar_of(OPS[e.kind].numpy({"new_dtype": dtype}, *arrays, out_dtype=dtype))
    if scalar is None:
        return None
    small = is_float(dtype) and not abs(scalar[0]) >= float(ml_dtypes.finfo(np_dtype(dtype)).tiny)
    if small and (e.kind != "convert_element_type" or is_float(values[0].dtype)):
        return None  # zeros have a sign and subnormal numbers may be flushed: XLA's own arithmetic decides
    literal = e.builder.literal(*scalar)
    return e.broadcast(literal, e.out_shape, ()) if e.out_shape else literal


# --- reasons to stay opaque -------------------------------------------------------------------------------------------------------


def _why_opaque(e: Equation) -> str:
    """What rules out any op: dtypes, placement, requests about rounding. "" if nothing does."""
    avals = [*e.in_avals, *(_compat.physical(v.aval) for v in e.eqn.outvars)]
    for aval in avals:
        if not is_array(aval):
            return f"{e.name}: works on {getattr(aval, 'dtype', 'a token')}, which the pipeline does not know"
    if any(_placed(getattr(a, "sharding", None)) for a in avals) or any(
        _placed(e.params.get(k)) for k in ("sharding", "out_sharding")
    ):
        return f"{e.name}: is explicitly sharded"
    if getattr(e.params.get("accuracy"), "name", "DEFAULT" if e.params.get("accuracy") is None else "") != "DEFAULT":
        return f"{e.name}: asks for an accuracy of its own"
    if e.params.get("out_dtype") is not None:
        return f"{e.name}: asks for a result dtype of its own"
    spec = OPS.get(e.kind)
    if spec is not None and not spec.gives and not spec.mixes and e.in_avals:
        if len({name_of(a.dtype) for a in avals}) > 1:
            return f"{e.name}: mixes dtypes"
        if name_of(e.in_avals[0].dtype) not in spec.dtypes:
            return f"{e.name}: is not defined on {e.in_avals[0].dtype}"
    return ""


def _placed(sharding: Any) -> bool:
    """Does it name a mesh axis, or a device?"""
    if sharding is None:
        return False
    spec = getattr(sharding, "spec", None)
    return spec is None or any(part is not None for part in spec)
