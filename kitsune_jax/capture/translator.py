"""What the rules of one equation write with: single ops that bind the equation itself, and small ops that it stands for.

Comes in: an equation, its operands' value ids, its place. Goes out: ops appended to the builder. Invariant: every op has a step,
which binds under the equation's name stack, source line and mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.capture.builder import Builder, Place, Step
from kitsune_jax.graph import Param, Scalar
from kitsune_jax.ops.spec import is_float, np_dtype


class Translator:
    """Appends the ops of one equation to a builder."""

    def __init__(self, builder: Builder, eqn: Any, ins: list[int], place: Place):
        self.builder, self.eqn, self.ins, self.place = builder, eqn, ins, place
        self.params: dict[str, Any] = eqn.params
        self.name: str = eqn.primitive.name
        self.in_avals = [v.aval for v in eqn.invars]
        self.out = eqn.outvars[0].aval

    def original(self, kind: str, ins: Sequence[int] | None = None, **params: Param) -> list[int]:
        """One op whose step is the equation itself."""
        evaluate = functools.partial(bind_in_place, self.eqn, self.place, None)
        return self.builder.add(kind, self.ins if ins is None else ins, [self.out], Step(self.place, evaluate), **params)

    def derived(self, kind: str, ins: Sequence[int], aval: Any, run: Callable[..., Any], **params: Param) -> int:
        """One of several ops an equation stands for; ``run`` takes arrays and returns its one result."""

        def evaluate(*arrays: Any) -> Sequence[Any]:
            with self.place.context():
                return [run(*arrays)]

        return self.builder.add(kind, ins, [aval], Step(self.place, evaluate), **params)[0]

    def shape_of(self, v: int) -> tuple[int, ...]:
        return self.builder.values[v].shape

    def like(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """The result's abstract value with another shape and dtype."""
        return self.out.update(shape=tuple(shape), dtype=np_dtype(dtype or str(self.out.dtype)), weak_type=False)

    def reshape(self, v: int, shape: Sequence[int]) -> int:
        sizes = tuple(int(n) for n in shape)
        if self.shape_of(v) == sizes:
            return v
        aval = self.like(sizes, self.builder.values[v].dtype)
        return self.derived("reshape", [v], aval, lambda x: lax.reshape(x, sizes), new_sizes=sizes)

    def broadcast(self, v: int, shape: Sequence[int], dims: Sequence[int]) -> int:
        sizes, to = tuple(int(n) for n in shape), tuple(dims)
        dtype = self.builder.values[v].dtype
        aval = self.like(sizes, dtype)
        return self.derived("broadcast_in_dim", [v], aval, lambda x: lax.broadcast_in_dim(x, sizes, to), shape=sizes, dims=to)

    def slice(self, v: int, start: Sequence[int], limit: Sequence[int]) -> int:
        lo, hi = tuple(map(int, start)), tuple(map(int, limit))
        aval = self.like([b - a for a, b in zip(lo, hi, strict=True)])
        return self.derived("slice", [v], aval, lambda x: lax.slice(x, lo, hi), start=lo, limit=hi, strides=(1,) * len(lo))

    def transpose(self, v: int, permutation: Sequence[int]) -> int:
        order = tuple(permutation)
        if order == tuple(range(len(order))):
            return v
        aval = self.like([self.shape_of(v)[d] for d in order], self.builder.values[v].dtype)
        return self.derived("transpose", [v], aval, lambda x: lax.transpose(x, order), permutation=order)

    def convert(self, v: int, dtype: str) -> int:
        """``v`` in another dtype; of a literal a literal."""
        value = self.builder.values[v]
        if value.dtype == dtype:
            return v
        if value.literal is not None:
            return self.constant(value.literal, dtype)
        return self.derived(
            "convert_element_type",
            [v],
            self.like(value.shape, dtype),
            lambda x: lax.convert_element_type(x, np_dtype(dtype)),
            new_dtype=dtype,
        )

    def binary(
        self, kind: str, x: int, y: int, function: Callable[..., Any], dtype: str = "", shape: Sequence[int] | None = None
    ) -> int:
        """A pointwise op on two values of one dtype (by default the result's), either of which may have rank 0.

        ``shape``: that of the op's result, by default the operands'.
        """
        sizes = tuple(self.shape_of(x) or self.shape_of(y) if shape is None else shape)
        kept = np_dtype(dtype or str(self.out.dtype))

        def run(*arrays: Any) -> Any:
            return function(*(lax.broadcast_in_dim(jax.numpy.asarray(a, kept), sizes, range(np.ndim(a))) for a in arrays))

        return self.derived(kind, [x, y], self.like(sizes, str(kept)), run)

    def constant(self, scalar: Scalar, dtype: str = "") -> int:
        """A literal, by default of the result's dtype."""
        dtype = dtype or str(self.out.dtype)
        rounded = np.asarray(scalar).astype(np_dtype(dtype))
        return self.builder.literal(float(rounded) if is_float(dtype) else int(rounded), dtype)


def bind_in_place(eqn: Any, place: Place, params: dict[str, Any] | None, *arrays: Any) -> list[Any]:
    """The equation on ``arrays``, in its context (with other ``params`` if given). Literals keep their own, perhaps weak, type."""
    vals = [v.val if _compat.is_literal(v) and np.ndim(x) == 0 else x for v, x in zip(eqn.invars, arrays, strict=True)]
    with place.enclosing():
        return _compat.bind_eqn(eqn, vals, params)
