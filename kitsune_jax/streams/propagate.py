"""Spreading a stream: from one value whose dimensions are declared streamed to every op that can stream along.

Comes in: a Graph, a seed (value, labels, axis extents) and the ops that may take part. Goes out: a ``Spread``: the labels of every
value reached, the ops that stream, which of them are sinks, and for each op at the rim why the stream stops there. Invariant: under
the returned labels every member op is legal on its own, and no label came from an op that is not a member.

The pass is an abstract interpretation: labels only grow. An op hands labels on while it is legal; when it turns out illegal after
it has handed some on, it is barred and everything starts again, so no stale label survives. Each restart bars at least one op.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Container, Iterator

from kitsune_jax.capture.ops import OPS
from kitsune_jax.capture.relations import DimRelation
from kitsune_jax.graph import Graph, Op
from kitsune_jax.streams.space import DimLabels, StreamSpace

Labels = dict[int, list[tuple[int, ...]]]

# dot_general: a weight gradient, both sides streamed and the stream contracted.
SINK_KINDS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "dot_general"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """``labels`` cover members' values only. ``stops``: op index -> why the stream does not go through it."""

    space: StreamSpace
    labels: dict[int, DimLabels]
    ops: tuple[int, ...]
    sinks: tuple[int, ...]
    stops: dict[int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Seed:
    value: int
    dims: tuple[int, ...]  # each becomes a stream axis of its own, in this order


class _Refine(Exception):  # noqa: N818 - control flow, not an error
    """A reshape splits a stream axis: start again with the axis cut in two."""

    def __init__(self, axis: int, outer: int):
        self.axis, self.outer = axis, outer


def spread(
    graph: Graph,
    seed: Seed,
    allowed: Container[int],
    supports: Callable[[int], str | None],
    relations: Callable[[int], tuple[DimRelation, ...]] | None = None,
    adjacency: dict[int, tuple[int, ...]] | None = None,
) -> Spread:
    """Spread a stream from ``seed`` over the ops of ``allowed``.

    ``supports(op index)`` says in words why a target can't run the op, or None. ``relations`` and ``adjacency`` (value -> ops that
    touch it) may be passed in to be shared between calls.
    """
    relations = relations or (lambda i: relations_of(graph, graph.ops[i]))
    adjacency = adjacency or adjacent_ops(graph)
    shape = graph.values[seed.value].shape
    sizes = [shape[d] for d in seed.dims]
    labels: list[tuple[int, ...]] = [(seed.dims.index(d),) if d in seed.dims else () for d in range(len(shape))]
    for _ in range(64):
        try:
            return _Spreader(graph, sizes, allowed, supports, relations, adjacency).run(seed.value, labels)
        except _Refine as split:
            sizes, labels = _split_axis(sizes, labels, split.axis, split.outer)
    raise AssertionError("a stream axis was split more often than it has prime factors")


def _split_axis(sizes: list[int], labels: list[tuple[int, ...]], axis: int, outer: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Axis ``axis`` becomes ``axis`` (extent ``outer``) and ``axis + 1``; later axes move up by one."""
    new_sizes = [*sizes[:axis], outer, sizes[axis] // outer, *sizes[axis + 1 :]]

    def move(a: int) -> tuple[int, ...]:
        return (a,) if a < axis else (a, a + 1) if a == axis else (a + 1,)

    return new_sizes, [tuple(b for a in axes for b in move(a)) for axes in labels]


def adjacent_ops(graph: Graph) -> dict[int, tuple[int, ...]]:
    """value id -> ops that define or read it."""
    out: dict[int, dict[int, None]] = {}
    for i, op in enumerate(graph.ops):
        for v in (*op.outputs, *op.inputs):
            out.setdefault(v, {})[i] = None
    return {v: tuple(ops) for v, ops in out.items()}


def relations_of(graph: Graph, op: Op) -> tuple[DimRelation, ...]:
    """The op's dimension relations, from the op table."""
    shapes = tuple(graph.values[v].shape for v in op.inputs)
    outs = tuple(graph.values[v].shape for v in op.outputs)
    return OPS[op.kind].relate(op, shapes, outs)


class _Spreader:
    def __init__(self, graph, sizes, allowed, supports, relations, adjacency):  # type: ignore[no-untyped-def]
        self.graph: Graph = graph
        self.sizes: list[int] = sizes
        self.allowed: Container[int] = allowed
        self.supports: Callable[[int], str | None] = supports
        self.relations: Callable[[int], tuple[DimRelation, ...]] = relations
        self.adjacency: dict[int, tuple[int, ...]] = adjacency

    def run(self, seed: int, seed_labels: list[tuple[int, ...]]) -> Spread:
        barred: dict[int, str] = {}
        while True:
            labels, spreading = self._flood(seed, seed_labels, barred)
            stops, members, sinks = dict(barred), [], []
            tainted = {}
            for i in sorted({i for v in labels for i in self.adjacency.get(v, ())}):
                if i in barred or not self._touches(i, labels):
                    continue
                why = self._why_not(i) or self._check(i, labels) or self._lost(i, labels)
                if why is None:
                    members.append(i)
                    if self._is_sink(i, labels):
                        sinks.append(i)
                else:
                    stops[i] = why
                    if i in spreading:
                        tainted[i] = why
            if not tainted:
                touched = {v for i in members for v in (*self.graph.ops[i].inputs, *self.graph.ops[i].outputs)}
                final = {v: tuple(axes) for v, axes in labels.items() if v in touched and any(axes)}
                return Spread(StreamSpace(tuple(self.sizes)), final, tuple(members), tuple(sinks), stops)
            barred.update(tainted)

    def _flood(self, seed: int, seed_labels: list[tuple[int, ...]], barred: dict[int, str]) -> tuple[Labels, set[int]]:
        """Labels to the fixed point, and the ops that handed some on. An op that is not legal (yet) hands nothing on."""
        labels: Labels = {seed: list(seed_labels)}
        spreading: set[int] = set()
        work = collections.deque(self.adjacency.get(seed, ()))
        queued = set(work)
        while work:
            i = work.popleft()
            queued.discard(i)
            if i in barred or self._why_not(i) or self._check(i, labels) is not None:
                continue
            for v, dim, axes in list(self._implied(i, labels)):
                mine = labels.setdefault(v, [()] * len(self.graph.values[v].shape))
                if mine[dim] == axes:
                    continue
                mine[dim] = axes
                spreading.add(i)
                for j in self.adjacency.get(v, ()):
                    if j not in queued:
                        queued.add(j)
                        work.append(j)
        return labels, spreading

    def _why_not(self, i: int) -> str | None:
        op = self.graph.ops[i]
        if op.kind == "opaque":
            return op.reason or f"{op.label} is not an op the pipeline knows"
        if i not in self.allowed:
            return "belongs to another region"
        return self.supports(i)

    def _operands(self, i: int) -> tuple[int, ...]:
        op = self.graph.ops[i]
        return (*op.inputs, *op.outputs)

    def _touches(self, i: int, labels: Labels) -> bool:
        return any(v in labels and any(labels[v]) for v in self._operands(i))

    def _label(self, i: int, member: tuple[int, int], labels: Labels) -> tuple[int, ...]:
        v = self._operands(i)[member[0]]
        return labels[v][member[1]] if v in labels else ()

    def _lost(self, i: int, labels: Labels) -> str | None:
        """Under final labels: what streams in must stream out, or end in a sink."""
        op = self.graph.ops[i]
        into, out_of = ({a for v in side for axes in labels.get(v, ()) for a in axes} for side in (op.inputs, op.outputs))
        return None if into <= out_of or self._is_sink(i, labels) else "a streamed dimension does not reach its result"

    def _is_sink(self, i: int, labels: Labels) -> bool:
        return any(r.role == "contracted" and any(self._label(i, m, labels) for m in r.members) for r in self.relations(i))

    def _check(self, i: int, labels: Labels) -> str | None:
        """None if op ``i`` is legal under ``labels`` (as far as they are known), else why not."""
        op = self.graph.ops[i]
        contracted: set[int] = set()
        for r in self.relations(i):
            found = {self._label(i, m, labels) for m in r.members} - {()}
            if not found:
                continue
            if r.role == "mixed":
                return f"{op.label or op.kind} needs every index of the streamed dimension" + (f": {r.why}" if r.why else "")
            if r.role == "reshaped":
                if self._through_reshape(i, r, labels) is None:
                    return "the reshape mixes streamed and per-row dimensions"
                continue
            if len(found) > 1:
                return "its operands would stream over different axes"
            if r.role == "contracted":
                if op.kind not in SINK_KINDS:
                    return f"{op.label or op.kind} contracts the streamed dimension"
                contracted.update(next(iter(found)))
        if contracted and len(contracted) != len(self.sizes):
            return "reduces over a part of the stream axes"
        return self._check_operands(i, labels, bool(contracted))

    def _check_operands(self, i: int, labels: Labels, sink: bool) -> str | None:
        op = self.graph.ops[i]
        for v in self._operands(i):
            if v in labels:
                axes = [a for dim in labels[v] for a in dim]
                if len(set(axes)) != len(axes):
                    return "two of its dimensions would run over one stream axis"
                if 0 in self.graph.values[v].shape:
                    return "it has no elements"
        streamed = [v in labels and any(labels[v]) for v in op.inputs]
        if op.kind == "dot_general" and all(streamed) and not sink:
            return "both operands stream (a product per row)"
        if sink and any(v in labels and any(labels[v]) for v in op.outputs):
            return "a reduction over the stream has a streamed result"
        return None

    def _implied(self, i: int, labels: Labels) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(value, dimension, axes) that op ``i`` implies for its operands."""
        operands = self._operands(i)
        for r in self.relations(i):
            # A dot that contracts the stream is a sink, and both of its operands stream (in a backward pass one is a residual).
            if r.role == "parallel" or (r.role == "contracted" and len(r.members) > 1):
                found = next((a for m in r.members if (a := self._label(i, m, labels))), ())
                if found:
                    yield from ((operands[m[0]], m[1], found) for m in r.members)
            elif r.role == "reshaped":
                for (operand, dim), axes in (self._through_reshape(i, r, labels) or {}).items():
                    if axes:
                        yield operands[operand], dim, axes

    def _through_reshape(self, i: int, r: DimRelation, labels: Labels) -> dict[tuple[int, int], tuple[int, ...]] | None:
        """Labels of all members of a reshaped class, or None where streamed and unstreamed dimensions are mixed."""
        shapes = [self.graph.values[v].shape for v in self._operands(i)]
        inside = [m for m in r.members if m[0] == 0]
        outside = [m for m in r.members if m[0] != 0]
        result: dict[tuple[int, int], tuple[int, ...]] = {}
        for side, other in ((inside, outside), (outside, inside)):
            found = [self._label(i, m, labels) for m in side]
            if not any(found):
                continue
            if any(not axes and shapes[m[0]][m[1]] != 1 for m, axes in zip(side, found, strict=True)):
                return None
            axes = [a for dim in found for a in dim]
            dealt = self._deal(axes, [shapes[o][d] for o, d in other])
            if dealt is None:
                return None
            for m, got in [*zip(side, found, strict=True), *zip(other, dealt, strict=True)]:
                if result.setdefault(m, got) != got:
                    return None
        return result

    def _deal(self, axes: list[int], extents: list[int]) -> list[tuple[int, ...]] | None:
        """Hand ``axes`` (outermost first) to dimensions of ``extents`` whose products match; asks for finer ones otherwise.

        None where no refinement of the axes fits both: (6, 4) can't be walked as (4, 6).
        """
        out: list[tuple[int, ...]] = []
        rest = list(axes)
        for extent in extents:
            mine: list[int] = []
            have = 1
            while have < extent:
                axis = rest[0]
                need, ragged = divmod(extent, have)
                if ragged:
                    return None
                if self.sizes[axis] > need:
                    need = math.gcd(need, self.sizes[axis])
                    if need == 1:
                        return None
                    raise _Refine(axis, need)
                mine.append(axis)
                have *= self.sizes[axis]
                rest.pop(0)
            if have != extent:
                return None
            out.append(tuple(mine))
        if rest and out:  # axes of extent 1: they ride on the last dimension
            out[-1] += tuple(rest)
        return out


def candidate_seeds(graph: Graph, op_index: int) -> list[Seed]:
    """Ways in which the stream could run through an op, most promising first.

    A dot streams over the free dimensions of either side (the other side is then stationary), or, where they are the longest, over
    the contracted ones (it is a sink then); anything else over all but the last dimension of its largest operand, its first
    dimension, and each single dimension.
    """
    op = graph.ops[op_index]
    seeds: list[Seed] = []
    if op.kind == "dot_general":
        sides = []
        for v, contract, batch in (
            (op.inputs[0], op["lhs_contract"], op["lhs_batch"]),
            (op.inputs[1], op["rhs_contract"], op["rhs_batch"]),
        ):
            shape = graph.values[v].shape
            free = [d for d in range(len(shape)) if d not in contract and d not in batch]
            sides.append((math.prod(shape[d] for d in free), v, free))
        # A weight gradient: the rows are what it contracts, and the other seeds would stream over columns of the weight.
        contracted = math.prod(graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"])
        if op["lhs_contract"] and contracted >= max(size for size, _, _ in sides):
            seeds.append(Seed(op.inputs[0], tuple(op["lhs_contract"])))
        for _, v, free in sorted(sides, key=lambda s: -s[0]):
            for k in range(len(free), 0, -1):
                seeds.append(Seed(v, tuple(free[:k])))
    else:
        operands = [v for v in (*op.outputs, *op.inputs) if graph.values[v].shape]
        if not operands:
            return []
        v = max(operands, key=lambda v: (graph.values[v].size, len(graph.values[v].shape)))
        rank = len(graph.values[v].shape)
        choices = [tuple(range(rank - 1)), (0,), *((d,) for d in range(1, rank)), tuple(range(rank))]
        seeds = [Seed(v, dims) for dims in choices if dims]
    return [s for s in dict.fromkeys(seeds) if all(graph.values[s.value].shape[d] > 0 for d in s.dims)]
