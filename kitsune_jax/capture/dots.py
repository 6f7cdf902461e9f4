"""``dot_general`` in the op table's terms: a product that adds up, or an outer product, which is a multiplication.

Comes in: an ``Equation``, a ``dot_general``. Goes out: value ids of its result, or the reason why it stays opaque. Invariant:
the op ``dot_general`` contracts at least one pair of dimensions. Transposition writes the gradient of ``vdot(w, w)`` as a
``dot_general`` of a number and an array that contracts nothing: such a product has one term for each element of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from kitsune_jax.capture.equation import Equation
from kitsune_jax.ops.spec import is_float

_MOST_PRECISE = ("DEFAULT", "HIGH", "HIGHEST")
# Algorithms that multiply numbers of a type, and what is wider rounded to it; such products are exact and added up in float32
# anyway. jax.nn.dot_product_attention asks for them, its gradient with an operand in float32.
_ROUNDED = {"BF16_BF16_F32": "bfloat16", "F16_F16_F32": "float16"}


def dot_general(e: Equation) -> int | str:
    """One op that adds products up in ``accumulate``, or a multiplication where nothing is contracted."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = e.params["dimension_numbers"]
    dtypes = [str(a.dtype) for a in (*e.in_avals, e.out)]
    if "bool" in dtypes or len({is_float(d) for d in dtypes}) > 1:
        return f"dot_general: multiplies {dtypes[0]} by {dtypes[1]} into {dtypes[2]}"
    narrow = _ROUNDED.get(str(getattr(e.params["precision"], "name", "")))
    narrow = narrow if narrow in dtypes[:2] else None  # two wide operands XLA does not round on every platform
    precision = None if narrow else _precision(e.params["precision"], dtypes)
    alike = narrow or _common(*dtypes[:2])
    if precision == "":
        return f"dot_general: asks for {e.params['precision']}"
    accumulate = dtypes[2] if not is_float(dtypes[2]) else "float64" if "float64" in dtypes else "float32"
    if not lhs_contract:
        return _outer(e, lhs_batch, rhs_batch, accumulate)
    return e.op(
        "dot_general",
        *(e.convert(v, alike) for v in e.ins),
        lhs_contract=lhs_contract,
        rhs_contract=rhs_contract,
        lhs_batch=lhs_batch,
        rhs_batch=rhs_batch,
        accumulate=accumulate,
        precision=precision,
    )


def _common(lhs: str, rhs: str) -> str:
    """The dtype in which both operands are multiplied: every number of either is one of it."""
    return lhs if lhs == rhs or not (is_float(lhs) and is_float(rhs)) else str(jnp.promote_types(lhs, rhs))


def _outer(e: Equation, lhs_batch: Sequence[int], rhs_batch: Sequence[int], accumulate: str) -> int:
    """Each side spread over the dimensions of the result (batch, free of the left, free of the right), then multiplied.

    The product is rounded once: where the dtypes differ it is made in ``accumulate``, which holds it exactly or is what a product
    that adds up would round it to first.
    """
    dtype, shape = e.out_dtype, e.out_shape
    wide = dtype if all(e.dtype_of(v) == dtype for v in e.ins) else accumulate
    free_of_left = len(e.shape_of(e.ins[0])) - len(lhs_batch)
    sides = []
    for v, batch, first_free in ((e.ins[0], lhs_batch, len(lhs_batch)), (e.ins[1], rhs_batch, len(lhs_batch) + free_of_left)):
        rank = len(e.shape_of(v))
        order = (*batch, *(d for d in range(rank) if d not in batch))  # batch dimensions first, as in the result
        to = (*range(len(batch)), *range(first_free, first_free + rank - len(batch)))
        x = e.transpose(e.convert(v, wide), order)
        sides.append(x if e.shape_of(x) in ((), shape) else e.broadcast(x, shape, to))
    return e.convert(e.op("mul", *sides), dtype)


def _precision(precision: Any, dtypes: Sequence[str]) -> str | None:
    """The stronger of the operands' precisions by name, ``None`` where nothing is asked for, "" for what cannot be promised."""
    if precision is None:
        return None
    sides = precision if isinstance(precision, tuple) else (precision,)
    names = [str(getattr(p, "name", p)) for p in sides]
    if all(n in _MOST_PRECISE for n in names):
        return max(names, key=_MOST_PRECISE.index)
    exact = {"F32_F32_F32": "float32", "F64_F64_F64": "float64"}
    return "HIGHEST" if len(names) == 1 and all(d == exact.get(names[0]) for d in dtypes) else ""
