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
from collections.abc import Callable, Container, Iterable, Mapping

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.local import Dims
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.table import OPS
from kitsune_jax.streams.seeds import Seed
from kitsune_jax.streams.space import DimLabels, StreamSpace
from kitsune_jax.streams.wiring import Wired, Wiring

_FOLDING = frozenset({"dot", "reduce", "argreduce", "cumulative"})
_BY_BATCH = frozenset({"dot", "reduce"})  # families whose sinks may have one sum for each batch
_STREAMED_SUM = "a reduction over the stream has a streamed result"
_SUM_OF_BATCH = "sums over the rows of each batch have no code on this target"
_WAITS = "it waits for sums over the rows of the stream"
_FUNCTION = 9  # operations of an elementary function
Labels = dict[int, list[tuple[int, ...]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """``labels`` cover members' values only. ``stops``: op index -> why the stream does not go through it.

    ``rounds``: of each time that the stream had to start again, the labels of all values that it had reached, and the ops that it
    was kept out of from then on, with the reasons. ``looks``: how often an op was looked at to find this out.
    """

    space: StreamSpace
    labels: dict[int, DimLabels]
    ops: tuple[int, ...]
    sinks: tuple[int, ...]
    stops: dict[int, str]
    rounds: tuple[tuple[dict[int, DimLabels], dict[int, str]], ...] = ()
    looks: int = 0


class _Refine(Exception):  # noqa: N818 - control flow, not an error
    """A reshape splits a stream axis: start again with the axis cut in two."""

    def __init__(self, axis: int, outer: int):
        self.axis, self.outer = axis, outer


def spread(
    graph: Graph,
    seed: Seed,
    allowed: Container[int],
    supports: Callable[[int], str | None],
    wiring: Wiring | None = None,
    barred: Mapping[int, str] | None = None,
) -> Spread:
    """Spread a stream from ``seed`` over the ops of ``allowed``.

    ``supports(op index)`` says in words why a target can't run the op, or None. ``wiring`` may be passed in to be shared between
    calls. ``barred``: of a round of another spread that reached ``seed`` with these labels; they would be found again.
    """
    wiring = wiring or Wiring(graph)
    shape = graph.values[seed.value].shape
    sizes = [shape[d] for d in seed.dims]
    labels: list[tuple[int, ...]] = [(seed.dims.index(d),) if d in seed.dims else () for d in range(len(shape))]
    batch = seed.batch
    for _ in range(64):
        try:
            spreader = _Spreader(graph, StreamSpace(tuple(sizes), batch), allowed, supports, wiring, seed.apart)
            return spreader.run(seed.value, labels, barred or {})
        except _Refine as split:
            sizes, labels = _split_axis(sizes, labels, split.axis, split.outer)
            batch += split.axis < batch
    raise AssertionError("a stream axis was split more often than it has prime factors")


def _split_axis(sizes: list[int], labels: list[tuple[int, ...]], axis: int, outer: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Axis ``axis`` becomes ``axis`` (extent ``outer``) and ``axis + 1``; later axes move up by one."""
    new_sizes = [*sizes[:axis], outer, sizes[axis] // outer, *sizes[axis + 1 :]]

    def move(a: int) -> tuple[int, ...]:
        return (a,) if a < axis else (a, a + 1) if a == axis else (a + 1,)

    return new_sizes, [tuple(b for a in axes for b in move(a)) for axes in labels]


# What an op implies for its operands: axes, and the (value, dimension) pairs that run over them.
Implied = list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]


class _Spreader:
    def __init__(
        self,
        graph: Graph,
        space: StreamSpace,
        allowed: Container[int],
        supports: Callable[[int], str | None],
        wiring: Wiring,
        apart: bool,
    ):
        self.graph, self.space, self.sizes = graph, space, space.sizes
        self.allowed, self.supports, self.wiring, self.apart = allowed, supports, wiring, apart
        self.looks = 0

    def run(self, seed: int, seed_labels: list[tuple[int, ...]], known: Mapping[int, str]) -> Spread:
        barred = dict(known)
        rounds: list[tuple[dict[int, DimLabels], dict[int, str]]] = []
        while True:
            labels, spreading, found = self._flood(seed, seed_labels, barred)
            stops, members, sinks = dict(barred), [], []
            tainted = {}
            for i in sorted({i for v, axes in labels.items() if any(axes) for i in self.wiring.touching(v)}):
                if i in barred:
                    continue
                why, sink = found[i]
                if why is None and not sink:
                    why = self._lost(i, labels)
                if why is None:
                    members.append(i)
                    if sink:
                        sinks.append(i)
                else:
                    stops[i] = why
                    readers = self._readers_of_sum(i, labels, spreading, barred) if why == _STREAMED_SUM else ()
                    tainted.update(dict.fromkeys(readers, _WAITS))
                    if i in spreading and not readers:
                        tainted[i] = why
            refused = [i for i, why in stops.items() if why == _SUM_OF_BATCH]
            if refused:  # their terms would be stored for a stream that makes them itself
                terms = self.wiring.only_for(refused)
                tainted.update((i, _SUM_OF_BATCH) for i in members if i in terms)
            if not tainted:
                touched = {v for i in members for v in self.wiring[i].operands}
                final = {v: tuple(axes) for v, axes in labels.items() if v in touched and any(axes)}
                return Spread(self.space, final, tuple(members), tuple(sinks), stops, tuple(rounds), self.looks)
            barred.update(tainted)
            rounds.append(({v: tuple(axes) for v, axes in labels.items()}, dict(barred)))

    def _readers_of_sum(self, i: int, labels: Labels, spreading: Container[int], barred: Container[int]) -> list[int]:
        """The ops that have sums over the rows of each batch, which ``i`` makes, stream along the rows of something else: an
        attention's gradients by queries, keys and values, where all are made of the same tokens."""
        rows = range(self.space.batch, len(self.sizes))
        if not self.space.batch or OPS[self.graph.ops[i].kind].family not in _BY_BATCH:
            return []
        made = [v for v in self.graph.ops[i].outputs if any(a in rows for axes in labels.get(v, ()) for a in axes)]
        return [j for v in made for j in self.wiring.touching(v) if j != i and j in spreading and j not in barred]

    def _flood(
        self, seed: int, seed_labels: list[tuple[int, ...]], barred: dict[int, str]
    ) -> tuple[Labels, set[int], dict[int, tuple[str | None, bool]]]:
        """Labels to the fixed point, the ops that handed some on, and for each op that was reached why it is not legal (None: it
        is) and whether it is a sink. An op that is not legal (yet) hands nothing on."""
        labels: Labels = {seed: list(seed_labels)}
        spreading: set[int] = set()
        found: dict[int, tuple[str | None, bool]] = {}
        work = collections.deque(self.wiring.touching(seed))
        queued = set(work)
        while work:
            i = work.popleft()
            queued.discard(i)
            self.looks += 1
            if i in barred:
                continue
            why = self._why_not(i)
            if why is not None:
                found[i] = (why, False)
                continue
            why, sink, implied = self._look(i, labels)
            found[i] = (why, sink)
            if why is not None:
                continue
            for axes, members in implied:
                for v, dim in members:
                    mine = labels.get(v)
                    if mine is None:
                        mine = labels[v] = [()] * len(self.graph.values[v].shape)
                    if mine[dim] == axes:
                        continue
                    mine[dim] = axes
                    spreading.add(i)
                    for j in self.wiring.touching(v):
                        if j not in queued:
                            queued.add(j)
                            work.append(j)
        return labels, spreading, found

    def _why_not(self, i: int) -> str | None:
        op = self.graph.ops[i]
        if op.kind == "opaque":
            return op.reason or f"{op.label} is not an op the pipeline knows"
        if i not in self.allowed:
            return "belongs to another region"
        return self.supports(i)

    def _lost(self, i: int, labels: Labels) -> str | None:
        """Under final labels: what streams in must stream out, or end in a sink."""
        op = self.graph.ops[i]
        into, out_of = ({a for v in side for axes in labels.get(v, ()) for a in axes} for side in (op.inputs, op.outputs))
        return None if into <= out_of else "a streamed dimension does not reach its result"

    def _look(self, i: int, labels: Labels) -> tuple[str | None, bool, Implied]:
        """(None if op ``i`` is legal under ``labels``, as far as they are known, else why not; is it a sink; what it implies)."""
        op, wired = self.graph.ops[i], self.wiring[i]
        contracted: set[int] = set()
        implied: Implied = []
        for role, members, r in wired.relations:
            found: tuple[int, ...] = ()
            agree = True
            for v, dim in members:
                mine = labels.get(v)
                if mine is not None and (axes := mine[dim]):
                    agree = agree and (not found or found == axes)
                    found = axes
            if not found:
                continue
            if role == "mixed":
                why = f"{op.label or op.kind} needs every index of the streamed dimension" + (f": {r.why}" if r.why else "")
                return why, False, []
            if role == "reshaped":
                through = self._through_reshape(i, r, labels)
                if through is None:
                    return "the reshape mixes streamed and per-row dimensions", False, []
                implied += [(axes, ((wired.operands[k], dim),)) for (k, dim), axes in through.items() if axes]
                continue
            if not agree:
                return "its operands would stream over different axes", False, []
            if role == "contracted":
                if not OPS[op.kind].sink:
                    return f"{op.label or op.kind} contracts the streamed dimension", False, []
                contracted.update(found)
            # A dot that contracts the stream is a sink, and both of its operands stream (in a backward pass one is a residual).
            if role == "parallel" or (role == "contracted" and len(members) > 1):
                implied.append((found, members))
        if contracted and not self._folds_all(op, contracted):
            return "reduces over a part of the stream axes", False, []
        if contracted and len(contracted) < len(self.sizes) and not self.wiring.sums_by_batch:
            return _SUM_OF_BATCH, False, []
        if contracted and self.apart and not self.wiring.scores.isdisjoint(op.inputs):
            return _SUM_OF_BATCH, False, []
        why_not = self._of_a_batch(wired, op, labels, implied) or self._check_operands(wired, op, labels, implied, bool(contracted))
        return why_not, bool(contracted), implied

    def _folds_all(self, op: Op, contracted: set[int]) -> bool:
        """Does the op fold the whole stream, or all rows of each batch?"""
        rows = set(range(self.space.batch, len(self.sizes)))
        return len(contracted) == len(self.sizes) or (contracted == rows and OPS[op.kind].family in _BY_BATCH)

    def _of_a_batch(self, wired: Wired, op: Op, labels: Labels, implied: Implied) -> str | None:
        """Is the op none of a stream with batch axes? What runs over batch axes only is made outside, and lies still while a batch
        is at work; so is what takes long and would be done again for every batch (a norm in front of an attention's heads)."""
        if not self.space.batch:
            return None
        streams = self._with(labels, implied, wired.operands)
        axes = {v: {a for mine in dims for a in mine} for v, dims in streams.items()}
        together = set().union(*axes.values())
        if together and max(together) < self.space.batch:
            return "it is the same for all rows of a batch"
        spec, batch = OPS[op.kind], set(range(self.space.batch))
        folds = spec.family in _FOLDING and not any(batch <= axes[v] for v in op.inputs)
        slow = spec.flops >= _FUNCTION and not batch <= together
        return "it is the same for several batches" if folds or slow else None

    def _check_operands(self, wired: Wired, op: Op, labels: Labels, implied: Implied, sink: bool) -> str | None:
        for v in wired.operands:
            if v in labels:
                axes = [a for dim in labels[v] for a in dim]
                if len(axes) > 1 and len(set(axes)) != len(axes):
                    return "two of its dimensions would run over one stream axis"
                if not wired.has_elements and 0 in self.graph.values[v].shape:
                    return "it has no elements"
        if wired.alone is not None:
            streams = self._with(labels, implied, op.inputs)  # an index streams because what it places does
            if why := wired.alone(op, [self._dims(v, streams) for v in op.inputs]):
                return f"{op.label or op.kind}: {why}"
        if sink:
            streams = self._with(labels, implied, op.outputs)
            return next((wrong for v, dims in streams.items() if (wrong := self._folded(v, dims))), None)
        return None

    def _folded(self, v: int, dims: list[tuple[int, ...]]) -> str | None:
        """Can a sink have the result ``v``, whose dimensions stream so? That of a sum for each batch runs over all batch axes."""
        axes = [a for mine in dims for a in mine]
        if not axes:
            return None
        if max(axes) >= self.space.batch:
            return _STREAMED_SUM
        if any(n > 1 and a not in axes for a, n in enumerate(self.sizes[: self.space.batch])):
            return "several batches would add to the same sums"
        kept = [not mine for mine, n in zip(dims, self.graph.values[v].shape, strict=True) if n > 1]
        return None if kept == sorted(kept) else "the sums of a batch would not lie together"

    def _with(self, labels: Labels, implied: Implied, values: Iterable[int]) -> Labels:
        """The labels of ``values`` with what an op implies for them."""
        found = {v: list(labels.get(v, [()] * len(self.graph.values[v].shape))) for v in values}
        for axes, members in implied:
            for v, dim in members:
                if v in found:
                    found[v][dim] = axes
        return found

    def _dims(self, v: int, labels: Labels) -> Dims:
        mine = labels.get(v)
        value = self.graph.values[v]
        return Dims(value.shape, tuple(mine) if mine is not None and any(mine) else None, value.dtype, self.space.batch)

    def _through_reshape(self, i: int, r: DimRelation, labels: Labels) -> dict[tuple[int, int], tuple[int, ...]] | None:
        """Labels of all members of a reshaped class, or None where streamed and unstreamed dimensions are mixed."""
        operands = self.wiring[i].operands
        shapes = [self.graph.values[v].shape for v in operands]
        inside = [m for m in r.members if m[0] == 0]
        outside = [m for m in r.members if m[0] != 0]
        result: dict[tuple[int, int], tuple[int, ...]] = {}
        for side, other in ((inside, outside), (outside, inside)):
            found = [labels[operands[k]][dim] if operands[k] in labels else () for k, dim in side]
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
