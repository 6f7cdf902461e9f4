"""How JAX's primitives become ops of the table: one rule per primitive whose parameters differ, or that stands for several ops.

Comes in: a ``Translator`` at one equation. Goes out: value ids of its results, or the reason why it stays opaque. Invariant: a rule
that returns a reason has appended nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from kitsune_jax.capture import dots, indexing
from kitsune_jax.capture.translator import Translator
from kitsune_jax.ops.spec import FORMATS
from kitsune_jax.ops.special import LOG2_E
from kitsune_jax.ops.table import OPS, RENAMED

_MOST_PIECES = 64  # an unstack into more stays one op
_UNROLLED_TERMS = 8  # polynomials of more terms are loops in JAX's lowering


def pointwise(t: Translator) -> list[int] | str:
    """Operands of full shape or of rank 0; a dimension of extent 1 that JAX would expand on the way is expanded by an op of its
    own.
    """
    kind = RENAMED.get(t.name, t.name)
    shape = tuple(t.out.shape)
    if any(s and len(s) != len(shape) for s in map(t.shape_of, t.ins)):
        return f"{t.name}: operands of different ranks"
    ins = [v if t.shape_of(v) in ((), shape) else t.broadcast(v, shape, range(len(shape))) for v in t.ins]
    return t.original(kind, ins, **{name: _plain(t.params[name]) for name in OPS[kind].takes})


def _plain(x: Any) -> Any:
    """A parameter of a primitive as one of an op: dtypes by name."""
    return str(x) if isinstance(x, np.dtype) else x


def _select(t: Translator) -> list[int] | str:
    if len(t.ins) != 3:
        return "select_n: more than two cases"
    which, *cases = t.ins
    if t.builder.values[which].dtype == "bool":
        return t.original("select_n")
    one = t.builder.literal(1, t.builder.values[which].dtype)
    aval = t.in_avals[0].update(dtype=np.dtype(bool), weak_type=False)
    is_second = t.derived("ge", [which, one], aval, lambda x, _: lax.ge(x, lax.full_like(x, 1)))
    return [t.derived("select_n", [is_second, *cases], t.out, lambda p, a, b: lax.select_n(p, a, b))]


def _convert(t: Translator) -> list[int] | str:
    new = str(t.out.dtype)
    return t.ins if str(t.in_avals[0].dtype) == new else t.original("convert_element_type", new_dtype=new)


def _round(t: Translator) -> list[int] | str:
    method = "even" if t.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN else "away"
    return t.original("round", method=method)


def _reduce_precision(t: Translator) -> list[int] | str:
    exponent, mantissa = int(t.params["exponent_bits"]), int(t.params["mantissa_bits"])
    own = FORMATS[str(t.out.dtype)]
    if exponent >= own[0] and mantissa >= own[1]:
        return t.original("copy")
    return t.original("reduce_precision", exponent_bits=exponent, mantissa_bits=mantissa)


def _device_put(t: Translator) -> list[int] | str:
    if len(t.ins) != 1 or any(x is not None for x in (*t.params.get("devices", ()), *t.params.get("srcs", ()))):
        return "device_put: places an array on a device"
    return t.ins


def _one_minus_square(t: Translator) -> list[int] | str:
    """(1 + x) (1 - x), as JAX lowers it."""
    one = t.constant(1)
    return [t.binary("mul", t.binary("add", one, t.ins[0], lax.add), t.binary("sub", one, t.ins[0], lax.sub), lax.mul)]


def _log2(t: Translator) -> list[int] | str:
    log = t.derived("log", t.ins, t.out, lax.log)
    return [t.binary("mul", log, t.constant(LOG2_E), lax.mul)]


def _polynomial(t: Translator) -> list[int] | str:
    """Horner's rule, lowest coefficient first."""
    x, *terms = t.ins
    if len(terms) > (t.params.get("unroll") or _UNROLLED_TERMS):
        return "polynomial: so many terms are a loop"
    if any(t.shape_of(v) not in ((), tuple(t.out.shape)) for v in t.ins):
        return "polynomial: operands of different shapes"
    result = terms[-1]
    for c in reversed(terms[:-1]):
        result = t.binary("add", t.binary("mul", result, x, lax.mul), c, lax.add)
    return [result]


def _broadcast_in_dim(t: Translator) -> list[int] | str:
    shape, dims = tuple(t.out.shape), tuple(t.params["broadcast_dimensions"])
    if len(t.ins) != 1:
        return "broadcast_in_dim: the shape is not known"
    x = t.shape_of(t.ins[0])
    if x == shape:
        return t.ins
    if x and math.prod(x) == math.prod(shape) > 0:  # only dimensions of extent 1 were added
        return t.original("reshape", new_sizes=shape)
    return t.original("broadcast_in_dim", shape=shape, dims=dims)


def _reshape(t: Translator) -> list[int] | str:
    if t.params.get("dimensions") is not None:
        return "reshape: permutes dimensions first"
    if len(t.ins) != 1:
        return "reshape: the shape is not known"
    shape = tuple(t.out.shape)
    return t.ins if t.shape_of(t.ins[0]) == shape else t.original("reshape", new_sizes=shape)


def _squeeze(t: Translator) -> list[int] | str:
    shape = tuple(t.out.shape)
    return t.ins if t.shape_of(t.ins[0]) == shape else t.original("reshape", new_sizes=shape)


def _transpose(t: Translator) -> list[int] | str:
    permutation = tuple(t.params["permutation"])
    return t.ins if permutation == tuple(range(len(permutation))) else t.original("transpose", permutation=permutation)


def _rev(t: Translator) -> list[int] | str:
    return t.original("rev", dimensions=t.params["dimensions"]) if t.params["dimensions"] else t.ins


def _slice(t: Translator) -> list[int] | str:
    start, limit = t.params["start_indices"], t.params["limit_indices"]
    strides = t.params["strides"] or (1,) * len(start)
    if tuple(t.out.shape) == t.shape_of(t.ins[0]) and all(s == 1 for s in strides):
        return t.ins
    return t.original("slice", start=start, limit=limit, strides=strides)


def _split(t: Translator) -> list[int] | str:
    axis, outs, at = t.params["axis"], [], 0
    shape = t.shape_of(t.ins[0])
    for size in map(int, t.params["sizes"]):
        start = [at if d == axis else 0 for d in range(len(shape))]
        limit = [at + size if d == axis else n for d, n in enumerate(shape)]
        outs.append(t.ins[0] if size == shape[axis] else t.slice(t.ins[0], start, limit))
        at += size
    return outs


def _unstack(t: Translator) -> list[int] | str:
    axis, (x,) = t.params["axis"], t.ins
    shape = t.shape_of(x)
    if shape[axis] > _MOST_PIECES:
        return f"unstack: into more than {_MOST_PIECES} arrays"
    outs = []
    for k in range(shape[axis]):
        start = [k if d == axis else 0 for d in range(len(shape))]
        limit = [k + 1 if d == axis else n for d, n in enumerate(shape)]
        outs.append(t.reshape(x if shape[axis] == 1 else t.slice(x, start, limit), t.out.shape))
    return outs


def _stack(t: Translator) -> list[int] | str:
    axis = t.params["axis"]
    shape = tuple(t.out.shape)
    expanded = (*shape[:axis], 1, *shape[axis + 1 :])
    parts = [t.reshape(v, expanded) for v in t.ins]
    if len(parts) == 1:
        return parts
    return [t.derived("concatenate", parts, t.out, lambda *xs: lax.concatenate(xs, axis), dimension=axis)]


def _tile(t: Translator) -> list[int] | str:
    """Each repeated dimension gets a new one in front of it, which is then merged into it."""
    (x,), reps = t.ins, [int(r) for r in t.params["reps"]]
    if all(r == 1 for r in reps):
        return t.ins
    wide = [m for n, r in zip(t.shape_of(x), reps, strict=True) for m in ([n] if r == 1 else [r, n])]
    return [t.reshape(t.broadcast(x, wide, _tile_dims(reps)), t.out.shape)]


def _tile_dims(reps: Sequence[int]) -> tuple[int, ...]:
    dims, at = [], 0
    for r in reps:
        at += 0 if r == 1 else 1
        dims.append(at)
        at += 1
    return tuple(dims)


def _pad(t: Translator) -> list[int] | str:
    low, high, interior = zip(*t.params["padding_config"], strict=True) if t.params["padding_config"] else ((), (), ())
    return t.original("pad", low=low, high=high, interior=interior) if any((*low, *high, *interior)) else [t.ins[0]]


def _concatenate(t: Translator) -> list[int] | str:
    return t.ins if len(t.ins) == 1 else t.original("concatenate", dimension=t.params["dimension"])


def _iota(t: Translator) -> list[int] | str:
    return (
        "iota: the shape is not known" if t.ins else t.original("iota", shape=tuple(t.out.shape), dimension=t.params["dimension"])
    )


def _reduce(t: Translator) -> list[int] | str:
    axes = tuple(sorted(map(int, t.params["axes"])))
    made = t.builder.maker(t.ins[0])
    if made is not None and made.kind == "reshape" and t.shape_of(made.inputs[0]) == tuple(t.out.shape):
        return list(made.inputs)  # over dimensions of extent 1 that were just added, as the gradient of ``bias[None]`` does
    return t.original(t.name, axes=axes) if axes else t.ins


def _arg_reduce(t: Translator) -> list[int] | str:
    return t.original(t.name, axis=t.params["axes"][0])


def _cumulative(t: Translator) -> list[int] | str:
    return t.original(t.name, axis=t.params["axis"], reverse=bool(t.params["reverse"]))


RULES: dict[str, Callable[[Translator], list[int] | str]] = {
    "select_n": _select,
    "convert_element_type": _convert,
    "round": _round,
    "reduce_precision": _reduce_precision,
    "device_put": _device_put,
    "one_minus_square": _one_minus_square,
    "log2": _log2,
    "polynomial": _polynomial,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
    "tile": _tile,
    "pad": _pad,
    "concatenate": _concatenate,
    "iota": _iota,
    "dot_general": dots.dot_general,
    "gather": indexing.gather,
    "scatter-add": indexing.scatter_add,
    **dict.fromkeys(["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"], _reduce),
    **dict.fromkeys(("argmax", "argmin"), _arg_reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _cumulative),
}
