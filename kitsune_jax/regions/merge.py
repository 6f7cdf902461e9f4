"""Calls that follow each other become one, whose phases they are: the steps of a message-passing network, forward and backward.

Comes in: chosen calls. Goes out: the calls, some of them merged. Two calls are merged where one reads what the other makes, no op
outside would have to run between them, and what a phase needs in front of the whole call (the permutation of its rows; a broadcast
that several calls make for themselves) does not wait for the other. Every phase keeps its plan, but for what the target changes in
it to run it with others.

A merged call does the same work. It saves a call for each phase behind the first, and the fresh pages of every value that only
phases of the call read: the executor keeps these in memory of its own, which it uses again within a call and between calls. It
costs that all operands and results of the call live while it runs. So calls are merged wherever that is legal and the target runs
them as one (``Target.together``), until a call has as many regions as the target takes, or would hold much more memory than its
parts did one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from kitsune_jax.graph import topological
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.regions.calls import Chosen
from kitsune_jax.regions.graph_index import GraphIndex

# A merged call may hold a quarter more than its parts did, and this many bytes.
_MOST_MORE, _FREE_BYTES = 1.25, 64 << 20


def merged(index: GraphIndex, calls: Sequence[Chosen], together: Callable[[Chosen], Chosen | str], most: int) -> list[Chosen]:
    """``calls``, merged where they can be. ``together(call)``: the call as the target would run it, or why it would not; ``most``:
    phases of a call."""
    return _Merge(index, calls, together, most).run()


class _Waits:
    """What waits for what: calls (numbers from 0) and, behind them, ops that XLA runs; some of these are ops of regions as well,
    which others make again for themselves.

    ``before[node]``: the nodes that make what it reads. ``position`` grows along every path. ``group[call]``: those that are one.
    """

    def __init__(self, index: GraphIndex, calls: Sequence[Chosen]):
        graph, producers = index.graph, index.producers
        given = {v: k for k, c in enumerate(calls) for r in c.regions for v in r.outputs}
        inside = {i for c in calls for i in c.ops}
        reads: list[Collection[int]] = [_reads(c) for c in calls]
        number: dict[int, int] = {}
        work = [(i, graph.ops[i].inputs) for i in sorted(index.live) if i not in inside]
        wanted = [v for values in reads for v in values]
        while work or wanted:
            if work:
                i, values = work.pop()
                number[i] = len(reads)
                reads.append(values)
                wanted += values
            else:
                made_by = producers.get(v := wanted.pop())
                if made_by is not None and v not in given and made_by not in number:
                    work.append((made_by, graph.ops[made_by].inputs))
        self.before = [
            {given[v] if v in given else number[producers[v]] for v in values if v in producers} - {k}
            for k, values in enumerate(reads)
        ]
        order = topological(self.before, range(len(reads)))
        self.position = dict(zip(order, range(len(order)), strict=True))
        self.group: dict[int, tuple[int, ...]] = {k: (k,) for k in range(len(calls))}

    def join(self, calls: tuple[int, ...]) -> bool:
        """Make ``calls`` one node, unless another would then stand both before and behind it."""
        inside = set(calls)
        first = min(self.position[k] for k in calls)
        seen: set[int] = set()
        work = [n for k in calls for n in self.before[k] - inside]
        while work:
            node = work.pop()
            if node in seen:
                continue
            members = self.group.get(node, (node,))
            seen.update(members)
            if max(self.position[m] for m in members) < first:
                continue
            before = {n for m in members for n in self.before[m]}
            if not before.isdisjoint(inside):
                return False
            work += before - seen
        self.group |= dict.fromkeys(calls, calls)
        return True


def _reads(call: Chosen) -> set[int]:
    """What must be there before the call or its phases begin: their operands, and the indices in whose order rows stream."""
    orders = {p.plan.order for p in call.phases if p.plan.order is not None}
    return {v for r in call.regions for v in r.inputs} | orders


class _Merge:
    def __init__(self, index: GraphIndex, calls: Sequence[Chosen], together: Callable[[Chosen], Chosen | str], most: int):
        self.index, self.calls, self.together, self.most = index, calls, together, most
        self.waits = _Waits(index, calls)
        self.made: dict[tuple[int, ...], Chosen] = {(k,): call for k, call in enumerate(calls)}  # the calls that there are

    def run(self) -> list[Chosen]:
        waits = self.waits
        place = waits.position.__getitem__
        for k in sorted(range(len(self.calls)), key=place):
            makers = [n for n in waits.before[k] if n < len(self.calls)]
            for j in sorted(makers, key=place, reverse=True):  # what was made last is in the caches
                if waits.group[j] != waits.group[k]:
                    self._try(tuple(sorted((*waits.group[j], *waits.group[k]), key=place)))
        return [self.made[calls] for calls in dict.fromkeys(waits.group.values())]

    def _try(self, calls: tuple[int, ...]) -> None:
        """Merge ``calls`` where that is legal and holds no more memory than it may."""
        apart = tuple(self.calls[k] for k in calls)
        call = Chosen.of([pair for c in apart for pair in c.planned], apart)
        made = {v for r in call.regions for v in r.outputs}
        ordered = any(p.plan.order in made for p in call.phases)
        if len(call.phases) > self.most or ordered or self._holds_more(call):
            return
        found = self.together(call)
        if not isinstance(found, str) and self.waits.join(calls):
            self.made[calls] = found

    def _holds_more(self, call: Chosen) -> bool:
        """Would ``call`` hold much more than its parts do, one after the other?

        As one call its operands are held from its beginning and its results to its end, though a part alone would free or make them
        when it runs. Arguments of the function are its caller's.
        """
        regions = call.regions
        results, consumers, given = self.index.results, self.index.consumers, set(self.index.graph.inputs)
        inside = {i for r in regions for i in r.ops}
        last: dict[int, int] = {v: k for k, r in enumerate(regions) for v in r.inputs}
        born = {v: k for k, r in enumerate(regions) for v in r.outputs}
        first = dict.fromkeys((v for v in last if v not in born and v not in given), 0)
        apart, together = [0] * (len(regions) + 1), [0] * (len(regions) + 1)  # bytes more or less from each phase on
        for v, k in (first | born).items():
            value = self.index.graph.values[v]
            size = value.size * np_dtype(value.dtype).itemsize
            stays = v in results or not inside.issuperset(consumers.get(v, ()))
            end = len(regions) if stays and v in born else last.get(v, k) + 1
            inner = v in born and not stays
            for held, begin, stop in ((apart, k, end), (together, *((k, end) if inner else (0, len(regions))))):
                held[begin] += size
                held[stop] -= size
        return max(itertools.accumulate(together)) > _MOST_MORE * max(itertools.accumulate(apart)) + _FREE_BYTES
