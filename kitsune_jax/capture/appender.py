"""Ops that a rewrite puts in front of another one, one after the other.

Comes in: a ``Draft``, and the step of the op in front of which they stand. Goes out: new values of the draft, and ``ops``, for
``Draft.finish``. Invariant: where a value is of the shape, order or dtype already, it is itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.capture.captured import Draft, Step
from kitsune_jax.graph import Op, Param, Value, make_params


class Appender:
    def __init__(self, draft: Draft, step: Step):
        self.draft, self.step = draft, step
        self.ops: list[tuple[Op, Step]] = []

    def add(
        self, kind: str, inputs: Sequence[int], sizes: Sequence[int], dtype: str = "", /, *, like: int = -1, label: str = "",
        **params: Param,
    ) -> int:  # fmt: skip
        """The result of an op. It is of ``dtype``, or of that of its first operand; ``like``: a value where there is none.
        ``label``: what reports call it, where that is not its kind."""
        made, source = self.draft.value(inputs[0] if inputs else like, sizes, dtype), self.step.origin.source
        self.ops.append((Op(kind, tuple(inputs), (made,), make_params(**params), source, label=label or kind), self.step))
        return made

    def repeated(self, v: int, dims: Sequence[int], sizes: tuple[int, ...]) -> int:
        """``v`` repeated to ``sizes``, of which it has ``dims``, in rising order."""
        if self.draft.values[v].shape == sizes:
            return v
        return self.add("broadcast_in_dim", (v,), sizes, shape=sizes, dims=tuple(dims))

    def of_dtype(self, v: int, dtype: str) -> int:
        value = self.draft.values[v]
        if value.dtype == dtype:
            return v
        if value.literal is not None and "float" in value.dtype and "float" in dtype:
            return self.draft.literal(Value((), dtype, float(value.literal)))
        return self.add("convert_element_type", (v,), value.shape, dtype, new_dtype=dtype)

    def reshape(self, v: int, sizes: tuple[int, ...]) -> int:
        return v if self.draft.values[v].shape == sizes else self.add("reshape", (v,), sizes, new_sizes=sizes)

    def transpose(self, v: int, order: Sequence[int]) -> int:
        if list(order) == list(range(len(order))):
            return v
        shape = self.draft.values[v].shape
        real = [d for d in order if shape[d] != 1]
        if real == sorted(real):  # nothing moves
            return self.reshape(v, tuple(shape[d] for d in order))
        return self.add("transpose", (v,), tuple(shape[d] for d in order), permutation=tuple(order))
