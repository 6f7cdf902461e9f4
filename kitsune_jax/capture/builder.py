"""A Graph under construction.

Comes in: values (abstract arrays, literals) and ops, one by one, in topological order. Goes out: ``Captured``. Invariant: every op
of the table is valid when it is appended: its entry gives the shape and the dtype of its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.capture.captured import Captured, Step, pruned
from kitsune_jax.fallbacks import Failure
from kitsune_jax.graph import Graph, Op, Param, Scalar, Value, make_params
from kitsune_jax.ops.spec import DTYPES, is_float, name_of
from kitsune_jax.ops.verify import result, verify_op
from kitsune_jax.plain_text import printable


class Builder:
    """Collects values, ops and steps."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.avals: list[Any] = []
        self.ops: list[Op] = []
        self.steps: list[Step] = []
        self._makers: dict[int, Op] = {}
        self._literals: dict[tuple[str, str], int] = {}

    def value(self, aval: Any) -> int:
        """A new value."""
        self.values.append(value_of(aval))
        self.avals.append(aval)
        return len(self.values) - 1

    def literal(self, scalar: Scalar, dtype: str) -> int:
        """The literal ``scalar`` (representable in ``dtype``); equal literals are one value."""
        key = (repr(scalar), dtype)
        if key not in self._literals:
            self.values.append(Value((), dtype, scalar))
            self.avals.append(None)
            self._literals[key] = len(self.values) - 1
        return self._literals[key]

    def add(self, kind: str, inputs: Sequence[int], step: Step, like: Any, dtype: str = "", **params: Param) -> int:
        """Append an op of the table. Returns its result, which varies over the mesh axes of the abstract value ``like``.

        ``dtype``: the result's, where the kind and the operands leave it open. Raises ``ValueError`` where the op is not defined.
        """
        op = self._op(kind, inputs, step, "", params)
        made = result(op, [self.values[v] for v in inputs], dtype)
        same = (made.shape, made.dtype) == (like.shape, name_of(like.dtype))
        return self._append(op, [like if same else _compat.aval_like(like, made.shape, made.dtype)], step)[0]

    def opaque(self, inputs: Sequence[int], avals: Sequence[Any], step: Step, reason: str, label: str = "") -> list[int]:
        """Append an op that the table does not know. Returns its results, which are of ``avals``. ``label``: instead of the
        equation's.
        """
        op = self._op("opaque", inputs, step, reason, {})
        return self._append(dataclasses.replace(op, label=label or op.label), avals, step)

    def loop(self, inputs: Sequence[int], avals: Sequence[Any], step: Step, body: Graph, **params: Param) -> list[int]:
        """Append a loop. Returns its results, which are of ``avals``. Raises ``ValueError`` where its body does not fit them."""
        made = self._append(dataclasses.replace(self._op("scan", inputs, step, "", params), body=body), avals, step)
        verify_op(self.ops[-1], self.values)
        return made

    def _op(self, kind: str, inputs: Sequence[int], step: Step, reason: str, params: dict[str, Param]) -> Op:
        label = printable(_compat.called(step.origin.eqns[-1])) if step.origin.eqns else kind
        return Op(kind, tuple(inputs), (), make_params(**params), step.origin.source, printable(reason), label)

    def _append(self, op: Op, avals: Sequence[Any], step: Step) -> list[int]:
        outputs = [self.value(aval) for aval in avals]
        op = Op(op.kind, op.inputs, tuple(outputs), op.params, op.source, op.reason, op.label, body=op.body)
        self.ops.append(op)
        self._makers.update(dict.fromkeys(outputs, op))
        self.steps.append(step)
        return outputs

    def maker(self, v: int) -> Op | None:
        """The op that makes ``v``; None for an input or a literal."""
        return self._makers.get(v)

    def cut(self, mark: int) -> None:
        """Take away the ops from number ``mark`` on. Their values stay, and are dropped in the end since nothing makes them."""
        del self.ops[mark:], self.steps[mark:]

    def check(self, results: Sequence[int], avals: Sequence[Any]) -> None:
        """Raise ``ValueError`` unless ``results`` are what ``avals`` say."""
        wanted = list(map(value_of, avals))
        found = [self.values[v] for v in results]
        if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in wanted]:
            raise ValueError(f"the results are {', '.join(map(str, found))}, not {', '.join(map(str, wanted))}")

    def finish(self, inputs: Sequence[int], outputs: Sequence[int], failures: Sequence[Failure] = ()) -> Captured:
        """The Graph without what nothing reads: inlined bodies leave dead ops behind that XLA would drop too."""
        graph = Graph(tuple(self.values), tuple(inputs), tuple(outputs), tuple(self.ops))
        return pruned(Captured(graph, tuple(self.steps), tuple(self.avals), tuple(failures)))


def value_of(aval: Any) -> Value:
    """The value of that abstract value; what is no array has the dtype "ref" or "token"."""
    dtype = getattr(aval, "dtype", None)
    name = "ref" if _compat.is_ref(aval) else "token" if dtype is None else name_of(dtype)
    return Value(tuple(getattr(aval, "shape", ())), name)


def is_array(aval: Any) -> bool:
    """Is this an ordinary array of a dtype that the op table knows?"""
    return type(aval).__name__ == "ShapedArray" and name_of(aval.dtype) in DTYPES


def scalar_of(x: Any) -> tuple[Scalar, str] | None:
    """``(Python scalar, dtype)`` of a concrete rank-0 array or scalar of a dtype the table knows, else ``None``."""
    if isinstance(x, jax.core.Tracer) or np.ndim(x) != 0:
        return None
    dtype = str(x.dtype if hasattr(x, "dtype") else np.result_type(x))  # of an array of JAX's NumPy warns
    if dtype not in DTYPES:
        return None
    x = np.asarray(x)
    return (bool(x) if dtype == "bool" else float(x) if is_float(dtype) else int(x)), dtype
