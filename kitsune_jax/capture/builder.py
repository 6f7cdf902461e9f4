"""A Graph under construction, and the steps that evaluate its ops with JAX.

Comes in: values (abstract arrays, literals) and ops, one by one, in topological order. Goes out: ``Captured``. Invariant: ``steps``
and ``graph.ops`` have one index, as ``avals`` and ``graph.values`` have.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.capture.verify import verify_op
from kitsune_jax.fallbacks import Failure
from kitsune_jax.graph import Graph, Op, Param, Scalar, Value, make_params
from kitsune_jax.ops.spec import DTYPES, is_float, name_of
from kitsune_jax.plain_text import printable

Run = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where an equation stands: the equations whose bodies enclose it, outermost first, and itself, last."""

    eqns: tuple[Any, ...]

    @property
    def source(self) -> str:
        """The user's line: the innermost one on record."""
        return next(filter(None, map(_compat.source_line, reversed(self.eqns))), "")

    @contextlib.contextmanager
    def enclosing(self) -> Iterator[None]:
        """The name stack and context of the bodies around the equation, as JAX's own lowering of them would set it."""
        with contextlib.ExitStack() as stack:
            for eqn in self.eqns[:-1]:
                stack.enter_context(_compat.user_context(eqn))
                if eqn.primitive.name in ("pjit", "jit"):
                    stack.enter_context(jax.named_scope(f"jit({eqn.params['name']})"))
            yield

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What is bound in here stands where the equation stands."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.enclosing())
            if self.eqns:  # a constant of the whole function stands in no equation
                stack.enter_context(_compat.user_context(self.eqns[-1]))
            yield


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Evaluates one op of the Graph with JAX, as it was: the original equation, in its context."""

    place: Place
    evaluate: Run
    has_effects: bool = False

    def run(self, *arrays: Any) -> list[Any]:
        """Results on ``arrays`` (or tracers), one for each of the op's inputs, in order. Literals may be any array."""
        return list(self.evaluate(*arrays))

    def context(self) -> contextlib.AbstractContextManager[None]:
        """What is bound in this context stands where the op stood: its name stack, source line and mesh."""
        return self.place.context()


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A function as a Graph, with the means to evaluate it.

    ``steps[i]`` evaluates ``graph.ops[i]``; ``avals[v]`` is JAX's abstract value of ``graph.values[v]`` (``None`` for literals).
    ``failures``: the parts that are opaque, or were not rewritten, because of a bug of this package.
    """

    graph: Graph
    steps: tuple[Step, ...]
    avals: tuple[Any, ...]
    failures: tuple[Failure, ...] = ()


def pruned(captured: Captured) -> Captured:
    """``captured`` without the ops that have no effect and whose results nothing reads, and without the values of none."""
    graph = captured.graph
    alive = set(graph.outputs)
    kept = []
    for i in reversed(range(len(graph.ops))):
        if captured.steps[i].has_effects or not alive.isdisjoint(graph.ops[i].outputs):
            kept.append(i)
            alive.update(graph.ops[i].inputs)
    kept.reverse()
    alive |= set(graph.inputs) | {v for i in kept for v in graph.ops[i].outputs}
    if len(alive) == len(graph.values) and len(kept) == len(graph.ops):
        return captured
    order = sorted(alive)
    number = {v: k for k, v in enumerate(order)}

    def renumber(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple([number[v] for v in ids])

    ops = tuple(
        Op(op.kind, renumber(op.inputs), renumber(op.outputs), op.params, op.source, op.reason, op.label)
        for op in (graph.ops[i] for i in kept)
    )
    return Captured(
        Graph(tuple(graph.values[v] for v in order), renumber(graph.inputs), renumber(graph.outputs), ops),
        tuple(captured.steps[i] for i in kept),
        tuple(captured.avals[v] for v in order),
        captured.failures,
    )


class Builder:
    """Collects values, ops and steps."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.avals: list[Any] = []
        self.ops: list[Op] = []
        self.steps: list[Step] = []
        self._makers: dict[int, Op] = {}
        self._literals: dict[tuple[str, str], int] = {}
        self._checked = 0

    def value(self, aval: Any) -> int:
        """A new value."""
        self.values.append(Value(tuple(getattr(aval, "shape", ())), dtype_name(aval)))
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

    def add(
        self, kind: str, inputs: Sequence[int], avals: Sequence[Any], step: Step, *, reason: str = "", **params: Param
    ) -> list[int]:
        """Append an op with results of ``avals``. Returns their value ids."""
        eqn = step.place.eqns[-1] if step.place.eqns else None
        outputs = [self.value(aval) for aval in avals]
        label = printable(_compat.called(eqn)) if eqn is not None else kind
        op = Op(kind, tuple(inputs), tuple(outputs), make_params(**params), step.place.source, printable(reason), label)
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
        self._checked = min(self._checked, mark)

    def check(self, results: Sequence[int], avals: Sequence[Any]) -> None:
        """Raise ``ValueError`` unless the ops since the last check are valid and ``results`` are what ``avals`` say."""
        for op in self.ops[self._checked :]:
            verify_op(op, self.values)
        self._checked = len(self.ops)
        wanted = [Value(tuple(getattr(a, "shape", ())), dtype_name(a)) for a in avals]
        found = [self.values[v] for v in results]
        if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in wanted]:
            raise ValueError(f"the results are {', '.join(map(str, found))}, not {', '.join(map(str, wanted))}")

    def finish(self, inputs: Sequence[int], outputs: Sequence[int], failures: Sequence[Failure] = ()) -> Captured:
        """The Graph without what nothing reads: inlined bodies leave dead ops behind that XLA would drop too."""
        graph = Graph(tuple(self.values), tuple(inputs), tuple(outputs), tuple(self.ops))
        return pruned(Captured(graph, tuple(self.steps), tuple(self.avals), tuple(failures)))


def dtype_name(aval: Any) -> str:
    """The dtype's name; of what is no array (tokens, references) the kind of thing it is."""
    if type(aval).__name__ == "AbstractRef":
        return "ref"
    dtype = getattr(aval, "dtype", None)
    return "token" if dtype is None else name_of(dtype)


def is_array(aval: Any) -> bool:
    """Is this an ordinary array of a dtype that the op table knows?"""
    return type(aval).__name__ == "ShapedArray" and name_of(aval.dtype) in DTYPES


def scalar_of(x: Any) -> tuple[Scalar, str] | None:
    """``(Python scalar, dtype)`` of a concrete rank-0 array or scalar of a dtype the table knows, else ``None``."""
    if isinstance(x, jax.core.Tracer) or np.ndim(x) != 0:
        return None
    dtype = str(getattr(x, "dtype", np.result_type(x)))
    if dtype not in DTYPES:
        return None
    x = np.asarray(x)
    return (bool(x) if dtype == "bool" else float(x) if is_float(dtype) else int(x)), dtype
