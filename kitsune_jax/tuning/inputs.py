"""Arguments to time a program with, and the reasons why a program cannot be timed.

Comes in: a closed jaxpr. Goes out: random arrays of the types of its arguments, with indices inside of the arrays that they point
into. Invariant: a program with side effects, or whose running time depends on its data, is never run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from kitsune_jax import _compat

_MOST_BYTES = 2 << 30  # of arguments and results together: several programs hold them at once
# Of an array inside of the program: XLA may store it, and several like it, where a pipeline does not (the scores of attention). The
# memory that a compiled program sets aside is no guide: of 1.6 GB XLA says 0 on a CPU.
_MOST_INSIDE = 1 << 30
# They run code that is not a part of the program, or wait for another device.
_OUTSIDE = ("callback", "infeed", "outfeed", "ffi_call", "custom_call", "print")


def why_not_timed(closed: Any, axes: Mapping[str, int] = MappingProxyType({})) -> str | None:
    """The reason why ``closed`` cannot be run on random arguments to see how long it takes, or ``None``.

    ``axes``: of the mesh whose devices run it at the same time, each on arguments of its own; it may have collectives over them.
    """
    jaxpr, _ = _compat.open_parts(closed)
    if not hasattr(closed, "consts"):
        return "it is a part of another program"
    if not _compat.are_collectives(jaxpr.effects, axes):
        return "it has side effects"
    avals = [*_compat.in_avals(closed), *_compat.out_avals(closed)]
    if any(_compat.is_ref(a) or _compat.varies(a) or not hasattr(a, "shape") for a in avals):
        return "it has arguments that are no arrays"
    copies = math.prod(axes.values())
    if copies * sum(_bytes(a) for a in avals) > _MOST_BYTES:
        return f"its arguments and results are larger than {_MOST_BYTES >> 30} GB"
    for eqn in all_equations(closed):
        name = _compat.called(eqn)
        if name == "while":
            return "it has a while loop, whose number of steps is unknown"
        if any(word in name for word in _OUTSIDE):
            return f"{name} runs code outside of it"
        if any(copies * _bytes(v.aval) > _MOST_INSIDE for v in eqn.outvars if hasattr(v.aval, "shape")):
            return f"{name} makes an array of more than {_MOST_INSIDE >> 30} GB"
    return None


def all_equations(closed: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of the jaxprs inside of them."""
    for eqn in _compat.open_parts(closed)[0].eqns:
        yield eqn
        for inner in _compat.inner_jaxprs(eqn):
            yield from all_equations(inner)


def random_arguments(closed: Any, seed: int = 0) -> list[Any]:
    """An array for each argument. Numbers are standard normal; indices are uniform over the array that they point into, other
    integers below the largest dimension of an argument; unsigned integers are random bits."""
    rng, avals = np.random.default_rng(seed), [_compat.physical(a) for a in _compat.in_avals(closed)]
    bounds = index_bounds(closed)
    other = max([2, *(d for a in avals for d in a.shape)])
    arrays = [_random(rng, a, bounds.get(k, other)) for k, a in enumerate(avals)]
    return [_compat.wrapped_like(x, a) if _compat.is_key(a) else x for x, a in zip(arrays, _compat.in_avals(closed), strict=True)]


def _random(rng: np.random.Generator, aval: Any, bound: int) -> Any:
    dtype, shape = np.dtype(aval.dtype), aval.shape
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if jax.numpy.issubdtype(dtype, np.unsignedinteger) and dtype.itemsize >= 4:
        return rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(dtype)
    if jax.numpy.issubdtype(dtype, np.integer):
        return rng.integers(0, min(bound, jax.numpy.iinfo(dtype).max), shape).astype(dtype)
    if jax.numpy.issubdtype(dtype, np.complexfloating):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def _bytes(aval: Any) -> int:
    aval = _compat.physical(aval)
    return int(np.prod(aval.shape, dtype=np.int64)) * np.dtype(aval.dtype).itemsize


def index_bounds(closed: Any) -> dict[int, int]:
    """For arguments that indices are computed from: number of the argument -> the extent that indices stay below."""
    jaxpr, _ = _compat.open_parts(closed)
    bounds = _bounds(jaxpr, {})
    return {k: bounds[v] for k, v in enumerate(jaxpr.invars) if v in bounds}


def _bounds(jaxpr: Any, bounds: dict[Any, int]) -> Mapping[Any, int]:
    """``bounds`` of variables of an open jaxpr, and those of the variables that these are computed from."""

    def note(atom: Any, bound: int) -> None:
        if not _compat.is_literal(atom) and jax.numpy.issubdtype(_compat.physical(atom.aval).dtype, np.integer):
            bounds[atom] = min(bounds.get(atom, bound), bound)

    for eqn in reversed(jaxpr.eqns):
        indices = dict(_indices(eqn))
        for k, bound in indices.items():
            note(eqn.invars[k], bound)
        wanted = [bounds[v] for v in eqn.outvars if v in bounds]
        inner = [_compat.open_parts(j)[0] for j in _compat.inner_jaxprs(eqn)]
        for body in inner:
            same = len(body.outvars) == len(eqn.outvars)
            known = {o: bounds[v] for o, v in zip(body.outvars, eqn.outvars, strict=True) if v in bounds} if same else {}
            found = _bounds(body, {o: b for o, b in known.items() if not _compat.is_literal(o)})
            operands = eqn.invars[len(eqn.invars) - len(body.invars) :]
            for v, atom in zip(body.invars, operands, strict=False):
                if v in found:
                    note(atom, found[v])
        if wanted and not inner:
            for k, atom in enumerate(eqn.invars):
                if k not in indices:
                    note(atom, min(wanted))
        if eqn.primitive.name == "cond":
            note(eqn.invars[0], len(inner))
    return bounds


def _indices(eqn: Any) -> Iterator[tuple[int, int]]:
    """The operands of ``eqn`` that are indices into its first operand, each with the extent that it stays below."""
    name, numbers = eqn.primitive.name, eqn.params.get("dimension_numbers")
    shape: Sequence[int] = eqn.invars[0].aval.shape if eqn.invars and hasattr(eqn.invars[0].aval, "shape") else ()
    if name == "gather":
        yield 1, min((shape[d] - eqn.params["slice_sizes"][d] + 1 for d in numbers.start_index_map), default=1)
    elif name.startswith("scatter") and numbers is not None:
        yield 1, min((shape[d] for d in numbers.scatter_dims_to_operand_dims), default=1)
    elif name == "dynamic_slice":
        yield from ((1 + d, n - size + 1) for d, (n, size) in enumerate(zip(shape, eqn.params["slice_sizes"], strict=True)))
    elif name == "dynamic_update_slice":
        update = eqn.invars[1].aval.shape
        yield from ((2 + d, n - size + 1) for d, (n, size) in enumerate(zip(shape, update, strict=True)))
