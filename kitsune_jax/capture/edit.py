"""Writers of Graphs: the builder of a new one, and ops that a rewrite puts in front of another."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.config import printable
from kitsune_jax.errors import Failure
from kitsune_jax.ops.graph import Graph, Op, Param, Scalar, Value, make_params
from kitsune_jax.ops.loops import evaluate_jax
from kitsune_jax.ops.spec import DTYPES, is_float, name_of
from kitsune_jax.ops.table import OPS, result, verify_op

# ----------------------------------------------------------------------------------------------------------------------------------
# A function as a Graph, and beside it what JAX needs to evaluate its ops as they stood.
#
# Comes in: nothing (this is data). Goes out: ``Captured``. Invariants: ``steps`` and ``graph.ops`` have one index, as ``avals``
# and ``graph.values`` have; an op of the table is evaluated by its entry, so what is kept of its equation is only where it stood.
# ----------------------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------------------
# A Graph under construction.
#
# Comes in: values (abstract arrays, literals) and ops, one by one, in topological order. Goes out: ``Captured``. Invariant: every
# op of the table is valid when it is appended: its entry gives the shape and the dtype of its result.
# ----------------------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------------------
# Ops that a rewrite puts in front of another one, one after the other.
#
# Comes in: a ``Draft``, and the step of the op in front of which they stand. Goes out: new values of the draft, and ``ops``, for
# ``Draft.finish``. Invariant: where a value is of the shape, order or dtype already, it is itself.
# ----------------------------------------------------------------------------------------------------------------------------------


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
