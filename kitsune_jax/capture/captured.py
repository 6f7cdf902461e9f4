"""A function as a Graph, and beside it what JAX needs to evaluate its ops as they stood.

Comes in: nothing (this is data). Goes out: ``Captured``. Invariants: ``steps`` and ``graph.ops`` have one index, as ``avals`` and
``graph.values`` have; an op of the table is evaluated by its entry, so what is kept of its equation is only where it stood.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from kitsune_jax import _compat
from kitsune_jax.fallbacks import Failure
from kitsune_jax.graph import Graph, Op, Param, Value, make_params
from kitsune_jax.ops.loops import evaluate_jax
from kitsune_jax.ops.table import OPS


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where an equation stands: the equations whose bodies enclose it, outermost first, and itself, last. May be empty."""

    eqns: tuple[Any, ...] = ()

    @property
    def source(self) -> str:
        """The user's line: the innermost one on record."""
        return next(filter(None, map(_compat.source_line, reversed(self.eqns))), "")

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for what stands in the same place of one jaxpr, however often that is captured."""
        return tuple(map(id, self.eqns))

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
        """What is bound in here stands where the equation stands: its name stack, source line and mesh."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.enclosing())
            if self.eqns:  # a constant of the whole function stands in no equation
                stack.enter_context(_compat.user_context(self.eqns[-1]))
            yield


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What stands beside an op of the Graph: its equation's origin and, for an opaque op, how JAX evaluates it.

    ``evaluate`` takes an array (or tracer) for each of the op's inputs and returns its results; a literal may be any array.
    ``prepare``: to be called before ``evaluate`` of a loop or branch that is left to XLA: it puts pipelines into its bodies, and
    returns what went wrong there. ``rewritten``: a loop that computes something else than its equation, for the sake of a pipeline.
    """

    origin: Origin = Origin()
    evaluate: Callable[..., Sequence[Any]] | None = None
    has_effects: bool = False
    prepare: Callable[[], Sequence[Failure]] | None = None
    rewritten: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A function as a Graph, with the means to evaluate it.

    ``steps[i]`` belongs to ``graph.ops[i]``; ``avals[v]`` is JAX's abstract value of ``graph.values[v]`` (``None`` for literals).
    ``failures``: the parts that are opaque, or were not rewritten, because of a bug of this package. ``saves``: a rewrite has made
    it less work than the function it was captured from, for whoever evaluates it.
    """

    graph: Graph
    steps: tuple[Step, ...]
    avals: tuple[Any, ...]
    failures: tuple[Failure, ...] = ()
    saves: bool = False

    def run(self, i: int, arrays: Sequence[Any]) -> list[Any]:
        """The results of op ``i`` by JAX on ``arrays`` (or tracers), one for each of its inputs.

        An op of the table is what its entry says, an opaque one its equation. Both stand where the equation stood: name stack,
        source line, mesh. Results vary over the mesh axes that their abstract values name (``shard_map`` checks that).
        """
        op, step = self.graph.ops[i], self.steps[i]
        if step.evaluate is not None:
            return list(step.evaluate(*arrays))
        spec = OPS.get(op.kind)
        if spec is None:
            raise ValueError(f"{op.label} ({op.source or 'no source line'}) is opaque, and nothing says how to evaluate it")
        if op.body is not None:
            like = [None] * op["consts"] + [self.avals[v] for v in op.outputs[: op["carries"]]] + [None] * len(op.inputs)
            with step.origin.context():
                arrays = [x if aval is None else _compat.varying_like(x, aval) for x, aval in zip(arrays, like, strict=False)]
                return evaluate_jax(OPS, op, arrays)
        (made,) = op.outputs
        aval = self.avals[made]
        with step.origin.context():
            arrays = [_compat.varying_like(x, aval) for x in arrays]
            return [_compat.varying_like(spec.evaluate(dict(op.params), *arrays, out=self.graph.values[made]), aval)]


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

    ops = [
        Op(op.kind, renumber(op.inputs), renumber(op.outputs), op.params, op.source, op.reason, op.label, op.code, op.body)
        for op in (graph.ops[i] for i in kept)
    ]
    return dataclasses.replace(
        captured,
        graph=Graph(tuple(graph.values[v] for v in order), renumber(graph.inputs), renumber(graph.outputs), tuple(ops)),
        steps=tuple(captured.steps[i] for i in kept),
        avals=tuple(captured.avals[v] for v in order),
    )


class Draft:
    """A ``Captured`` that a rewrite changes: lists of its ops with their steps, and of its values."""

    def __init__(self, captured: Captured):
        self.captured = captured
        self.values, self.avals = list(captured.graph.values), list(captured.avals)
        self.ops, self.steps = list(captured.graph.ops), list(captured.steps)

    def value(self, like: int, shape: Sequence[int], dtype: str = "") -> int:
        """A new value of another shape, and of ``dtype`` or else that of ``like``; it varies over the mesh axes of ``like``."""
        self.values.append(Value(tuple(shape), dtype or self.values[like].dtype))
        self.avals.append(_compat.aval_like(self.avals[like], tuple(shape), self.values[-1].dtype))
        return len(self.values) - 1

    def literal(self, value: Value) -> int:
        """A new value that is the constant ``value``."""
        self.values.append(value)
        self.avals.append(None)
        return len(self.values) - 1

    def finish(self, before: Mapping[int, Sequence[tuple[Op, Step]]] | None = None) -> Captured:
        """What it was made of if no op has changed, else the new ``Captured``. ``before``: what stands in front of an op of those
        that there are."""
        if before:
            pairs = list(zip(self.ops, self.steps, strict=True))
            self.ops, self.steps = [], []
            for i, pair in enumerate(pairs):
                for op, step in (*before.get(i, ()), pair):
                    self.ops.append(op)
                    self.steps.append(step)
        if tuple(self.ops) == self.captured.graph.ops:
            return self.captured
        graph = dataclasses.replace(self.captured.graph, values=tuple(self.values), ops=tuple(self.ops))
        return dataclasses.replace(self.captured, graph=graph, steps=tuple(self.steps), avals=tuple(self.avals))


def with_params(op: Op, inputs: Sequence[int], outputs: Sequence[int], **params: Param) -> Op:
    """``op`` on other values, with some of its parameters replaced."""
    return dataclasses.replace(
        op, inputs=tuple(inputs), outputs=tuple(outputs), params=make_params(**{**dict(op.params), **params})
    )
