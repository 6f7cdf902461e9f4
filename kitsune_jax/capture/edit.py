"""Graphs that JAX can evaluate op by op, and the two writers of graphs: ``Builder`` makes one, ``GraphEditor`` changes one.

Comes in: values and ops, one by one, or a ``Captured``. Goes out: a ``Captured``. Invariants: ``Captured.steps`` and ``graph.ops``
have one index, as ``avals`` and ``graph.values`` have; a writer never takes a value away (``pruned`` does, when nothing reads it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.config import printable
from kitsune_jax.errors import Failure
from kitsune_jax.ops.graph import Graph, Op, Param, Scalar, Value, is_constant, make_params
from kitsune_jax.ops.loops import body_of, evaluate_jax, parts
from kitsune_jax.ops.spec import DTYPES, is_float, name_of, np_dtype
from kitsune_jax.ops.table import OPS, result, result_of, verify_op

# --- a function as a Graph, with the means to evaluate it -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The place of an equation: the equations whose bodies enclose it, outermost first, and itself, last. May be empty."""

    eqns: tuple[Any, ...] = ()

    @property
    def source(self) -> str:
        """The user's line: the innermost one on record."""
        return next(filter(None, map(_compat.source_line, reversed(self.eqns))), "")

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for equations in the same place of one jaxpr, however often that jaxpr is captured."""
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
        """A context in which bound equations get the name stack, source line and mesh of this one."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.enclosing())
            if self.eqns:  # a constant of the whole function belongs to no equation
                stack.enter_context(_compat.user_context(self.eqns[-1]))
            yield


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Extra information about one op: its equation's origin and, for an opaque op, how JAX evaluates it.

    ``evaluate`` takes an array (or tracer) for each of the op's inputs and returns its results; a literal may be any array.
    ``prepare``: to be called before ``evaluate`` of a loop or branch that is left to XLA: it puts pipelines into the bodies, and
    returns the failures. ``rewritten``: a loop that a rewrite has changed, so that its equation computes something else.
    ``constant``: the integers that the op without inputs makes, where they are known. ``whole``: the opaque op is the equation.
    """

    origin: Origin = Origin()
    evaluate: Callable[..., Sequence[Any]] | None = None
    has_effects: bool = False
    prepare: Callable[[], Sequence[Failure]] | None = None
    rewritten: bool = False
    constant: np.ndarray | None = None
    whole: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A function as a Graph, with the means to evaluate it.

    ``steps[i]`` belongs to ``graph.ops[i]``; ``avals[v]`` is JAX's abstract value of ``graph.values[v]`` (``None`` for literals).
    ``failures``: the parts that are opaque, or were not rewritten, because of a bug of this package. ``saves``: a rewrite made it
    cheaper to evaluate than the function it was captured from, with or without pipelines.
    """

    graph: Graph
    steps: tuple[Step, ...]
    avals: tuple[Any, ...]
    failures: tuple[Failure, ...] = ()
    saves: bool = False

    def run(self, i: int, arrays: Sequence[Any]) -> list[Any]:
        """The results of op ``i`` by JAX on ``arrays`` (or tracers), one for each of its inputs.

        An op of the table is evaluated by its entry, an opaque op by its equation, both with the name stack, source line and mesh
        of the equation. Results vary over the mesh axes that their abstract values name (``shard_map`` checks that).
        """
        op, step = self.graph.ops[i], self.steps[i]
        if step.evaluate is not None:
            return list(step.evaluate(*arrays))
        spec = OPS.get(op.kind)
        if spec is None:
            raise ValueError(f"{op.label} ({op.source or 'no source line'}) is opaque, and its step has no function to evaluate it")
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

    def constant(self, v: int) -> np.ndarray | None:
        """The array that value ``v`` is in every call; None where it depends on an argument (``is_constant``)."""
        makers = self.graph.producers()
        if not is_constant(self.graph, makers, v):
            return None
        known: dict[int, np.ndarray] = {}

        def array(x: int) -> np.ndarray:
            value = self.graph.values[x]
            if value.literal is not None:
                return np.asarray(value.literal, np_dtype(value.dtype))
            if x not in known:
                made = makers[x]
                constant = self.steps[made].constant
                if constant is None:
                    constant = np.asarray(self.run(made, [jnp.asarray(array(y)) for y in self.graph.ops[made].inputs])[0])
                known[x] = constant
            return known[x]

        with jax.ensure_compile_time_eval():
            return array(v)


def pruned(captured: Captured) -> Captured:
    """``captured`` without ops that have no effect and whose results nothing reads, and without values that no op makes."""
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
        Op(op.kind, renumber(op.inputs), renumber(op.outputs), op.params, op.source, op.reason, op.label, op.body)
        for op in (graph.ops[i] for i in kept)
    ]
    return dataclasses.replace(
        captured,
        graph=Graph(tuple(graph.values[v] for v in order), renumber(graph.inputs), renumber(graph.outputs), tuple(ops)),
        steps=tuple(captured.steps[i] for i in kept),
        avals=tuple(captured.avals[v] for v in order),
    )


# Families of operators that are computed once. Views, and what is computed of constants alone, cost nothing and would tie the rows
# that read them together; a conversion that is made again where it is read is cheaper than its result in memory.
_MERGED = frozenset({"pointwise", "dot", "reduce", "argreduce", "cumulative", "gather", "scatter"})


def merged(captured: Captured) -> Captured:
    """``captured`` with equal operators of equal operands computed once, as XLA computes them: a function and its derivatives in
    one program (``jax.grad`` and ``jax.jvp`` of the same layers) compute the same layers again for each derivative."""
    graph = captured.graph
    equal: dict[int, int] = {}  # value -> the first one that equals it
    names: dict[int, int] = {}  # value -> the one that is read instead of it
    known: dict[Any, int] = {}
    constant = {v for v, value in enumerate(graph.values) if value.literal is not None}
    ops: list[Op] = []
    for op, step in zip(graph.ops, captured.steps, strict=True):
        if step.has_effects:  # no call runs on both sides of it, so a value would be kept in memory for the other side
            known.clear()
        if op.kind != "opaque" and op.body is None:
            (made,) = op.outputs
            if constant.issuperset(op.inputs):
                constant.add(made)
            key = (op.kind, tuple(equal.get(v, v) for v in op.inputs), op.params, graph.values[made])
            first = known.setdefault(key, made)
            if first != made:
                equal[made] = first
                if OPS[op.kind].family in _MERGED and not constant.issuperset(op.inputs):
                    names[made] = first
        renamed = names and any(v in names for v in op.inputs)
        ops.append(dataclasses.replace(op, inputs=tuple(names.get(v, v) for v in op.inputs)) if renamed else op)
    if not names:
        return captured
    outputs = tuple(names.get(v, v) for v in graph.outputs)
    return dataclasses.replace(captured, graph=dataclasses.replace(graph, ops=tuple(ops), outputs=outputs))


def needed_ops(ops: Sequence[Op], wanted: Iterable[int]) -> list[Op]:
    """Those of ``ops`` that the values ``wanted`` are made by, in order."""
    alive, needed = set(wanted), []
    for op in reversed(ops):
        if not alive.isdisjoint(op.outputs):
            alive.update(op.inputs)
            needed.append(op)
    return needed[::-1]


def with_params(op: Op, inputs: Sequence[int], outputs: Sequence[int], **params: Param) -> Op:
    """``op`` on other values, with some of its parameters replaced."""
    return dataclasses.replace(
        op, inputs=tuple(inputs), outputs=tuple(outputs), params=make_params(**{**dict(op.params), **params})
    )


# --- writers of graphs ------------------------------------------------------------------------------------------------------------


Params = tuple[tuple[str, Param], ...]


class _GraphWriter:
    """Values with their abstract values, and the ops that make them: what the builder and the editor of a Graph share."""

    def __init__(self, values: Iterable[Value] = (), avals: Iterable[Any] = ()) -> None:
        self.values, self.avals = list(values), list(avals)
        self._makers: dict[int, Op] = {}
        self._literals: dict[tuple[str, str], int] = {}

    def _add_value(self, value: Value, aval: Any) -> int:
        self.values.append(value)
        self.avals.append(aval)
        return len(self.values) - 1

    def _made(self, op: Op) -> Op:
        self._makers.update(dict.fromkeys(op.outputs, op))
        return op

    def literal(self, scalar: Scalar, dtype: str) -> int:
        """The literal ``scalar`` (representable in ``dtype``); equal literals are one value."""
        key = (repr(scalar), dtype)
        if key not in self._literals:
            self._literals[key] = self._add_value(Value((), dtype, scalar), None)
        return self._literals[key]

    def made_by(self, v: int) -> Op | None:
        """The op that makes ``v``; None for an input or a literal."""
        return self._makers.get(v)

    def constant_of(self, v: int) -> Scalar | None:
        """The number that every element of ``v`` is, if it is a reshaped or repeated literal."""
        while (op := self.made_by(v)) is not None and op.kind in ("broadcast_in_dim", "reshape"):
            (v,) = op.inputs
        return self.values[v].literal


class Builder(_GraphWriter):
    """Collects values, ops and steps of a new Graph, in topological order.

    Invariant: every op of the table is valid when it is appended: its entry gives the shape and the dtype of its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.steps: list[Step] = []

    def value(self, aval: Any) -> int:
        """A new value."""
        return self._add_value(value_of(aval), aval)

    def add(self, kind: str, inputs: Sequence[int], step: Step, like: Any, dtype: str = "", **params: Param) -> int:
        """Append an op of the table. Returns its result, which varies over the mesh axes of the abstract value ``like``.

        ``dtype``: the result's, where the kind and the operands leave it open. Raises ``ValueError`` where the op is not defined.
        """
        found = make_params(**params)
        made = result_of(kind, found, tuple([self.values[v] for v in inputs]), dtype)
        same = (made.shape, made.dtype) == type_of(like)
        v = self._add_value(made, like if same else _compat.aval_like(like, made.shape, made.dtype))
        self._append(kind, inputs, [v], step, found)
        return v

    def opaque(
        self, inputs: Sequence[int], avals: Sequence[Any], step: Step, reason: str, label: str = "", flops: int | None = None
    ) -> list[int]:
        """Append an op that the table does not know. Returns its results, of types ``avals``. ``label``: its name in reports, by
        default the equation's. ``flops``: its operations, where they are known; 0 for one that takes no time."""
        params = make_params() if flops is None else make_params(flops=flops)
        outputs = list(map(self.value, avals))
        self._append("opaque", inputs, outputs, step, params, printable(reason), label)
        return outputs

    def loop(self, inputs: Sequence[int], avals: Sequence[Any], step: Step, body: Graph, **params: Param) -> list[int]:
        """Append a loop. Returns its results, of types ``avals``. Raises ``ValueError`` where its body does not fit them."""
        made = list(map(self.value, avals))
        self._append("scan", inputs, made, step, make_params(**params), body=body)
        verify_op(self.ops[-1], self.values)
        return made

    def _append(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        step: Step,
        params: Params,
        reason: str = "",
        label: str = "",
        body: Graph | None = None,
    ) -> None:
        label = label or (printable(_compat.called(step.origin.eqns[-1])) if step.origin.eqns else kind)
        op = Op(kind, tuple(inputs), tuple(outputs), params, step.origin.source, reason, label, body)
        self.ops.append(self._made(op))
        self.steps.append(step)

    def cut(self, mark: int) -> None:
        """Take away the ops from number ``mark`` on. Their values stay, and ``finish`` drops them since nothing makes them."""
        del self.ops[mark:], self.steps[mark:]

    def check(self, results: Sequence[int], avals: Sequence[Any]) -> None:
        """Raise ``ValueError`` unless ``results`` have the shapes and dtypes of ``avals``."""
        found = [self.values[v] for v in results]
        if [(x.shape, x.dtype) for x in found] != list(map(type_of, avals)):
            wanted = list(map(value_of, avals))
            raise ValueError(f"the results are {', '.join(map(str, found))}, not {', '.join(map(str, wanted))}")

    def finish(self, inputs: Sequence[int], outputs: Sequence[int], failures: Sequence[Failure] = ()) -> Captured:
        """The Graph without ops that nothing reads: inlined bodies leave dead ops behind that XLA would drop too."""
        graph = Graph(tuple(self.values), tuple(inputs), tuple(outputs), tuple(self.ops))
        return pruned(Captured(graph, tuple(self.steps), tuple(self.avals), tuple(failures)))


class _Readable:
    """A Graph with maps of who makes and who reads its values. The maps are made when first asked for, and stay as they are."""

    graph: Graph

    @functools.cached_property
    def maker(self) -> dict[int, int]:
        """Value -> the index of the op that makes it (absent for inputs and literals)."""
        return self.graph.producers()

    @functools.cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Value -> the indices of the ops that read it, ascending, each once (absent where no op reads it)."""
        return self.graph.consumers()

    @functools.cached_property
    def _reads(self) -> Counter[int]:
        return Counter([*self.graph.outputs, *(v for op in self.graph.ops for v in op.inputs)])

    def reads(self, v: int) -> int:
        """How often ``v`` is read, as an operand or as an output of the graph."""
        return self._reads[v]


class GraphEditor(_Readable, _GraphWriter):
    """A ``Captured`` that a rewrite changes: ops are replaced or removed, and others are put in front of them or behind them.

    ``graph``, ``maker``, ``readers`` and ``reads`` are those of the graph as it came in, and an index ``i`` always names an op of
    that graph; ``ops`` and ``steps`` are its ops as they have been replaced so far. A rewrite that has to look at a changed graph
    makes a new editor of it.
    """

    def __init__(self, captured: Captured):
        super().__init__(captured.graph.values, captured.avals)
        self.captured, self.graph = captured, captured.graph
        self.ops, self.steps = list(captured.graph.ops), list(captured.steps)
        self._removed: set[int] = set()
        self._in_front: dict[int, Inserter] = {}
        self._behind: dict[int, Inserter] = {}

    def made_by(self, v: int) -> Op | None:
        """The op that makes ``v``: of the graph as it came in, or a new one."""
        i = self.maker.get(v)
        return self._makers.get(v) if i is None else self.graph.ops[i]

    def value(self, like: int, shape: Sequence[int], dtype: str = "") -> int:
        """A new value of another shape, and of ``dtype`` or else that of ``like``; it varies over the mesh axes of ``like``."""
        dtype = dtype or self.values[like].dtype
        return self._add_value(Value(tuple(shape), dtype), _compat.aval_like(self.avals[like], tuple(shape), dtype))

    def literal_of(self, value: Value) -> int:
        """The literal that is equal to ``value``, which is one of another graph."""
        assert value.literal is not None
        return self.literal(value.literal, value.dtype)

    def shape(self, v: int) -> tuple[int, ...]:
        return self.values[v].shape

    def dtype(self, v: int) -> str:
        return self.values[v].dtype

    def replace(self, i: int, op: Op, step: Step | None = None) -> None:
        """Put ``op`` in the place of op ``i``, whose step it keeps unless another one is given."""
        self.ops[i] = op
        self.steps[i] = step or self.steps[i]

    def remove(self, i: int) -> None:
        """Take op ``i`` away. Something else has to make its results, if they are read."""
        self._removed.add(i)

    def in_front_of(self, i: int) -> Inserter:
        """Adds ops in front of op ``i``, one after the other; the same ``Inserter`` each time."""
        return self._in_front.setdefault(i, Inserter(self, i))

    def behind(self, i: int) -> Inserter:
        """Adds ops behind op ``i``, one after the other; the same ``Inserter`` each time."""
        return self._behind.setdefault(i, Inserter(self, i))

    def finish(self) -> Captured:
        """The new ``Captured``; the one that came in where no op has changed."""
        ops, steps = self.ops, self.steps
        if self._removed or self._in_front or self._behind:
            placed = list[tuple[Op, Step]]()
            for i, here in enumerate(zip(self.ops, self.steps, strict=True)):
                if i in self._in_front:
                    placed += self._in_front[i].ops
                if i not in self._removed:
                    placed.append(here)
                if i in self._behind:
                    placed += self._behind[i].ops
            ops, steps = [op for op, _ in placed], [step for _, step in placed]
        if tuple(ops) == self.graph.ops:
            return self.captured
        graph = dataclasses.replace(self.graph, values=tuple(self.values), ops=tuple(ops))
        return dataclasses.replace(self.captured, graph=graph, steps=tuple(steps), avals=tuple(self.avals))


class Inserter:
    """Adds ops in front of, or behind, op ``i`` of an editor's graph; they have the step and the source line of that op.

    Where a value has the wanted shape, order or dtype already, the methods return it and add nothing.
    """

    def __init__(self, editor: GraphEditor, i: int):
        self.editor, self.op, self.step = editor, editor.graph.ops[i], editor.captured.steps[i]
        self.ops: list[tuple[Op, Step]] = []

    def append(self, op: Op, step: Step | None = None) -> int:
        """Add ``op`` as it is. Returns its first result."""
        self.ops.append((self.editor._made(op), step or self.step))
        return op.outputs[0]

    def add(self, kind: str, inputs: Sequence[int], dtype: str = "", /, *, like: int = -1, label: str = "", **params: Param) -> int:
        """The result of a new op, whose entry gives its shape. It varies over the mesh axes of ``like``, which is the first operand
        unless another value is given. ``dtype``: the result's, where the kind and the operands leave it open, by default that of
        ``like``. ``label``: the op's name in reports, where that is not its kind."""
        like = like if like >= 0 else inputs[0]
        op = Op(kind, tuple(inputs), (), make_params(**params), self.op.source, label=label or kind)
        return self._append_like(op, like, dtype)

    def copy(self, op: Op, inputs: Sequence[int], dtype: str = "", /, *, step: Step | None = None, **params: Param) -> int:
        """The result, a new value, of ``op`` on other inputs, with other ``params`` where given. ``dtype``: as in ``add``."""
        return self._append_like(with_params(op, inputs, (), **params), op.outputs[0], dtype, step)

    def _append_like(self, op: Op, like: int, dtype: str, step: Step | None = None) -> int:
        values = self.editor.values
        made = result(op, [values[v] for v in op.inputs], dtype or values[like].dtype)
        return self.append(dataclasses.replace(op, outputs=(self.editor.value(like, made.shape, made.dtype),)), step)

    def broadcast(self, v: int, dims: Sequence[int], shape: tuple[int, ...]) -> int:
        """``v`` repeated to ``shape``, of which it has ``dims``, in rising order."""
        if self.editor.shape(v) == shape:
            return v
        return self.add("broadcast_in_dim", (v,), shape=shape, dims=tuple(dims))

    def spread(self, v: int, place: Sequence[int | None], shape: Sequence[int]) -> int:
        """``v`` repeated to ``shape``: its dimension ``k`` becomes ``place[k]``, or has one element and is left out."""
        # A dimension of one element stays where the result has one as well: the stream may run over it.
        kept = {d: n for n, d in zip(self.editor.shape(v), place, strict=True) if d is not None and n == shape[d]}
        dims = list(kept)
        ordered = self.transpose(self.reshape(v, tuple(kept.values())), sorted(range(len(dims)), key=dims.__getitem__))
        return self.broadcast(ordered, sorted(dims), tuple(shape))

    def convert(self, v: int, dtype: str) -> int:
        value = self.editor.values[v]
        if value.dtype == dtype:
            return v
        if value.literal is not None and "float" in value.dtype and "float" in dtype:
            return self.editor.literal(float(value.literal), dtype)
        return self.add("convert_element_type", (v,), new_dtype=dtype)

    def reshape(self, v: int, shape: tuple[int, ...]) -> int:
        return v if self.editor.shape(v) == shape else self.add("reshape", (v,), new_sizes=shape)

    def transpose(self, v: int, order: Sequence[int]) -> int:
        if list(order) == list(range(len(order))):
            return v
        shape = self.editor.shape(v)
        real = [d for d in order if shape[d] != 1]
        if real == sorted(real):  # nothing moves
            return self.reshape(v, tuple(shape[d] for d in order))
        return self.add("transpose", (v,), permutation=tuple(order))


class LoopEditor(_Readable):
    """A ``scan`` op that a rewrite changes: each part is a list, of values around the loop with those that they are in its body.

    ``consts``, ``xs``, ``ys``: pairs (value around the loop, value of the body). ``carries``: (initial, value at the start of a
    step, value at its end, final). ``ops`` and ``values`` are those of the body. ``graph``, ``maker``, ``readers`` and ``reads``
    are of the body as it came in.
    """

    def __init__(self, op: Op):
        p = parts(op)
        self.op, self.graph = op, body_of(op)
        self.values, self.ops = list(self.graph.values), list(self.graph.ops)
        self.consts = list(zip(p.consts, p.in_consts, strict=True))
        self.carries = list(zip(p.initial, p.in_carries, p.in_next, p.final, strict=True))
        self.xs = list(zip(p.xs, p.in_xs, strict=True))
        self.ys = list(zip(p.ys, p.in_ys, strict=True))

    def made_by(self, v: int) -> Op | None:
        """The op of the body that makes ``v``; None for an operand or a literal."""
        i = self.maker.get(v)
        return None if i is None else self.graph.ops[i]

    def outputs(self) -> tuple[int, ...]:
        """The values of the body that a step hands on or stores."""
        return (*(after for _, _, after, _ in self.carries), *(v for _, v in self.ys))

    def read(self) -> set[int]:
        """The values of the body that a step hands on or stores, or needs to make those."""
        return {*self.outputs(), *(v for op in needed_ops(self.ops, self.outputs()) for v in op.inputs)}

    def finish(self) -> Op:
        """The loop of the parts as they are now, without ops of the body and constants that nothing reads any more."""
        read, outputs = self.read(), self.outputs()
        ops = needed_ops(self.ops, outputs)
        consts = [(w, v) for w, v in self.consts if v in read]
        inside = (*(v for _, v in consts), *(v for _, v, _, _ in self.carries), *(v for _, v in self.xs))
        inputs = (*(w for w, _ in consts), *(w for w, _, _, _ in self.carries), *(w for w, _ in self.xs))
        finals = (*(w for _, _, _, w in self.carries), *(w for w, _ in self.ys))
        new = with_params(self.op, inputs, finals, consts=len(consts), carries=len(self.carries))
        return dataclasses.replace(new, body=Graph(tuple(self.values), inside, outputs, tuple(ops)))


# --- values and types -------------------------------------------------------------------------------------------------------------


def kept_dims(before: Sequence[int], after: Sequence[int]) -> dict[int, int] | None:
    """Dimension of shape ``before`` -> the one of ``after`` that it is, where they differ by dimensions of one element only.

    >>> kept_dims((7, 1, 2), (7, 2)), kept_dims((7, 2), (14,))
    ({0: 0, 2: 1}, None)
    """
    real, other = ([d for d, n in enumerate(s) if n != 1] for s in (before, after))
    return dict(zip(real, other, strict=True)) if [before[d] for d in real] == [after[d] for d in other] else None


def value_of(aval: Any) -> Value:
    """The value of that abstract value."""
    return Value(*type_of(aval))


def type_of(aval: Any) -> tuple[tuple[int, ...], str]:
    """The shape and the dtype of an abstract value; of one that is no array the dtype is "ref" or "token"."""
    dtype = getattr(aval, "dtype", None)
    name = "ref" if _compat.is_ref(aval) else "token" if dtype is None else name_of(dtype)
    return tuple(getattr(aval, "shape", ())), name


_ARRAYS = frozenset(DTYPES)


def is_array(aval: Any) -> bool:
    """Is this an ordinary array of a dtype that the op table knows?"""
    return type(aval).__name__ == "ShapedArray" and name_of(aval.dtype) in _ARRAYS


def scalar_of(x: Any) -> tuple[Scalar, str] | None:
    """``(Python scalar, dtype)`` of a concrete rank-0 array or scalar of a dtype the table knows, else ``None``."""
    if isinstance(x, jax.core.Tracer) or np.ndim(x) != 0:
        return None
    dtype = str(x.dtype if hasattr(x, "dtype") else np.result_type(x))  # np.result_type of a JAX array warns
    if dtype not in DTYPES:
        return None
    x = np.asarray(x)
    return (bool(x) if dtype == "bool" else float(x) if is_float(dtype) else int(x)), dtype
