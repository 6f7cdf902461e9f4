"""How JAX's primitives become ops of the table: one rule per primitive whose parameters differ, or that stands for several ops.

Comes in: an ``Equation``. Goes out: value ids of its results, or the reason why it stays opaque. Invariant: a rule that returns a
reason has appended nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import numpy as np
from jax import lax

from kitsune_jax.capture import dots, indexing, lookups, random_bits
from kitsune_jax.capture.equation import Equation
from kitsune_jax.capture.numbers import known
from kitsune_jax.ops.spec import FORMATS
from kitsune_jax.ops.special import LOG2_E
from kitsune_jax.ops.table import OPS

Rule = Callable[[Equation], "int | list[int] | str"]

_MOST_PIECES = 64  # an unstack into more stays one op
_UNROLLED_TERMS = 8  # polynomials of more terms are loops in JAX's lowering


def pointwise(e: Equation) -> int | str:
    """Operands of full shape or of rank 0; a dimension of extent 1 that JAX would expand on the way is expanded by an op of its
    own.
    """
    shape = e.out_shape
    if any(s and len(s) != len(shape) for s in map(e.shape_of, e.ins)):
        return f"{e.name}: operands of different ranks"
    ins = [v if e.shape_of(v) in ((), shape) else e.broadcast(v, shape, range(len(shape))) for v in e.ins]
    taken = {name: e.params[name] for name in OPS[e.kind].takes}
    return e.op(e.kind, *ins, **{name: str(x) if isinstance(x, np.dtype) else x for name, x in taken.items()})


def _select(e: Equation) -> int | list[int] | str:
    if len(e.ins) != 3:
        return "select_n: more than two cases"
    which, *cases = e.ins
    if 0 < len(e.shape_of(which)) < len(e.out_shape):  # of keys: all words of one alike
        which = e.broadcast(which, e.out_shape, range(len(e.shape_of(which))))
    if (known := e.builder.values[which].literal) is not None and e.shape_of(cases[int(known > 0)]) == e.out_shape:
        return [cases[int(known > 0)]]  # as jnp.var chooses by the number of elements
    if e.dtype_of(which) != "bool":
        which = e.op("ge", which, e.constant(1, e.dtype_of(which)))
    return e.op("select_n", which, *cases)


def _convert(e: Equation) -> int | list[int]:
    return e.ins if e.dtype_of(e.ins[0]) == e.out_dtype else e.op("convert_element_type", *e.ins, new_dtype=e.out_dtype)


def _round(e: Equation) -> int:
    method = "even" if e.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN else "away"
    return e.op("round", *e.ins, method=method)


def _reduce_precision(e: Equation) -> int:
    exponent, mantissa = int(e.params["exponent_bits"]), int(e.params["mantissa_bits"])
    own = FORMATS[e.out_dtype]
    kind = "copy" if exponent >= own[0] and mantissa >= own[1] else "reduce_precision"
    return e.op(kind, *e.ins, exponent_bits=exponent, mantissa_bits=mantissa)


def _device_put(e: Equation) -> list[int] | str:
    if len(e.ins) != 1 or any(x is not None for x in (*e.params.get("devices", ()), *e.params.get("srcs", ()))):
        return "device_put: places an array on a device"
    return e.ins


def _one_minus_square(e: Equation) -> int:
    """(1 + x) (1 - x), as JAX lowers it."""
    one, (x,) = e.constant(1), e.ins
    return e.op("mul", e.op("add", one, x), e.op("sub", one, x))


def _pow(e: Equation) -> int | str:
    """JAX converts an integer exponent to the dtype of the base."""
    base, exponent = e.ins
    e.ins = [base, e.convert(exponent, e.out_dtype)]
    return pointwise(e)


def _log2(e: Equation) -> int:
    return e.op("mul", e.op("log", *e.ins), e.constant(LOG2_E))


def _polynomial(e: Equation) -> int | str:
    """Horner's rule, lowest coefficient first."""
    x, *terms = e.ins
    if len(terms) > (e.params.get("unroll") or _UNROLLED_TERMS):
        return "polynomial: so many terms are a loop"
    if any(e.shape_of(v) not in ((), e.out_shape) for v in e.ins):
        return "polynomial: operands of different shapes"
    result = terms[-1]
    for c in reversed(terms[:-1]):
        result = e.op("add", e.op("mul", result, x), c)
    return result


def _broadcast_in_dim(e: Equation) -> int | str:
    shape = e.out_shape
    if len(e.ins) != 1:
        return "broadcast_in_dim: the shape is not known"
    x = e.shape_of(e.ins[0])
    if x == shape or (x and math.prod(x) == math.prod(shape) > 0):  # only dimensions of extent 1 were added
        return e.reshape(e.ins[0], shape)
    return e.broadcast(e.ins[0], shape, e.params["broadcast_dimensions"])


def _reshape(e: Equation) -> int | str:
    if len(e.ins) != 1:
        return "reshape: the shape is not known"
    order = e.params.get("dimensions")
    return e.reshape(e.ins[0] if order is None else e.transpose(e.ins[0], order), e.out_shape)


def _rev(e: Equation) -> int | list[int]:
    return e.op("rev", *e.ins, dimensions=e.params["dimensions"]) if e.params["dimensions"] else e.ins


def _split(e: Equation) -> list[int]:
    sizes = list(map(int, e.params["sizes"]))
    return [e.part(e.ins[0], e.params["axis"], end - n, n) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def _unstack(e: Equation) -> list[int] | str:
    axis, (x,) = e.params["axis"], e.ins
    pieces = e.shape_of(x)[axis]
    if pieces > _MOST_PIECES:
        return f"unstack: into more than {_MOST_PIECES} arrays"
    return [e.reshape(e.part(x, axis, k, 1), e.out_shape) for k in range(pieces)]


def _stack(e: Equation) -> int:
    axis, shape = e.params["axis"], e.out_shape
    parts = [e.reshape(v, (*shape[:axis], 1, *shape[axis + 1 :])) for v in e.ins]
    return parts[0] if len(parts) == 1 else e.op("concatenate", *parts, dimension=axis)


def _tile(e: Equation) -> int | list[int]:
    """Each repeated dimension gets a new one in front of it, which is then merged into it."""
    (x,), reps = e.ins, [int(r) for r in e.params["reps"]]
    if all(r == 1 for r in reps):
        return e.ins
    wide = [m for n, r in zip(e.shape_of(x), reps, strict=True) for m in ([n] if r == 1 else [r, n])]
    dims = [d + sum(r != 1 for r in reps[: d + 1]) for d in range(len(reps))]
    return e.reshape(e.broadcast(x, wide, dims), e.out_shape)


def _pad(e: Equation) -> int:
    low, high, interior = zip(*e.params["padding_config"], strict=True) if e.params["padding_config"] else ((), (), ())
    if not any((*low, *high, *interior)):
        return e.ins[0]
    return e.op("pad", *e.ins, low=low, high=high, interior=interior)


def _concatenate(e: Equation) -> int | list[int]:
    return e.ins if len(e.ins) == 1 else e.op("concatenate", *e.ins, dimension=e.params["dimension"])


def _iota(e: Equation) -> int | str:
    return "iota: the shape is not known" if e.ins else e.op("iota", shape=e.out_shape, dimension=e.params["dimension"])


def _reduce(e: Equation) -> int | list[int]:
    axes = tuple(sorted(map(int, e.params["axes"])))
    made = e.builder.maker(e.ins[0])
    if made is not None and made.kind == "reshape" and e.shape_of(made.inputs[0]) == e.out_shape:
        return list(made.inputs)  # over dimensions of extent 1 that were just added, as the gradient of ``bias[None]`` does
    return e.op(e.name, *e.ins, axes=axes) if axes else e.ins


def _window(e: Equation) -> int | list[int]:
    """A slice, or an update, along those dimensions that it does not have whole; what begins at constants is a slice or a pad."""
    updates = e.name == "dynamic_update_slice"
    arrays, starts = (e.ins[:2], e.ins[2:]) if updates else (e.ins[:1], e.ins[1:])
    shape, window = e.shape_of(arrays[0]), e.shape_of(arrays[1]) if updates else e.out_shape
    dims = [d for d, (n, m) in enumerate(zip(shape, window, strict=True)) if m != n]
    if not dims:
        return [arrays[-1]]
    numbers = [known(e.builder, starts[d]) for d in dims]
    if not updates and None not in numbers:
        first = [0] * len(shape)
        for d, number in zip(dims, numbers, strict=True):
            first[d] = min(max(int(number or 0), 0), shape[d] - window[d])
        return e.slice(arrays[0], first, [a + n for a, n in zip(first, window, strict=True)])
    operands = (*arrays, *(starts[d] for d in dims))
    if updates:
        return e.op(e.name, *operands, dims=tuple(dims))
    return e.op(e.name, *operands, dims=tuple(dims), sizes=tuple(window[d] for d in dims))


RULES: dict[str, Rule] = {
    "threefry2x32": random_bits.threefry,
    "iota_2x32_shape": random_bits.counts,
    "rng_bit_generator": random_bits.generated,
    "xor": lambda e: random_bits.both_words(e) or pointwise(e),
    "shift_right_logical": lambda e: random_bits.shifted_out(e) or pointwise(e),
    "and": lambda e: random_bits.all_bits(e) or pointwise(e),
    "select_n": _select,
    "convert_element_type": _convert,
    "round": _round,
    "reduce_precision": _reduce_precision,
    "device_put": _device_put,
    "one_minus_square": _one_minus_square,
    "log2": _log2,
    "pow": _pow,
    "polynomial": _polynomial,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda e: e.reshape(e.ins[0], e.out_shape),
    "transpose": lambda e: e.transpose(e.ins[0], e.params["permutation"]),
    "rev": _rev,
    "slice": lambda e: e.slice(e.ins[0], e.params["start_indices"], e.params["limit_indices"], e.params["strides"] or ()),
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
    "tile": _tile,
    "pad": _pad,
    "concatenate": _concatenate,
    "iota": _iota,
    "dynamic_slice": _window,
    "dynamic_update_slice": _window,
    "dot_general": dots.dot_general,
    "gather": indexing.gather,
    "scatter-add": indexing.scatter_add,
    "scatter-sub": lambda e: lookups.scatter(e, "sum"),
    "scatter-mul": lambda e: lookups.scatter(e, "prod"),
    "scatter-max": lambda e: lookups.scatter(e, "max"),
    "scatter-min": lambda e: lookups.scatter(e, "min"),
    **dict.fromkeys((kind for kind, spec in OPS.items() if spec.family == "reduce"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), lambda e: e.op(e.name, *e.ins, axis=e.params["axes"][0])),
}
