"""What a later region computes again instead of reading it from memory.

Comes in: the chosen regions, in an order in which they can run. Goes out: these regions, some of whose results are gone, because
every region that read one makes it again from what lies in memory anyway. In a training step that is the forward pass of a layer,
made again by the region of its backward pass; in a segment softmax the score of an edge. Invariants: a result that is read
elsewhere stays; what is computed again streams as it does where it was made; and the model says that all calls together take less
time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.streams import Region

Planned = tuple[Region, Plan]


def recompute(
    index: GraphIndex, planned: Sequence[Planned], others: Sequence[int], plan_of: Callable[[Region], Plan | str]
) -> list[Planned]:
    """``planned`` regions, changed where that pays; ``others``: ops that are in none of them, or in parts of their calls."""
    now = list(planned)
    outside = {v for i in others for v in index.graph.ops[i].inputs} | index.results
    for k in range(len(now)):
        changed = _without_results(index, now, k, outside, plan_of)
        if changed:
            for j, pair in changed.items():
                now[j] = pair
    return now


def _without_results(
    index: GraphIndex, now: Sequence[Planned], k: int, outside: set[int], plan_of: Callable[[Region], Plan | str]
) -> dict[int, Planned]:
    """Region ``k`` and those that read its results, as they would be without them; nothing where that does not pay."""
    maker, labels = now[k][0], now[k][0].label_of()
    readers = {j: region for j, (region, _) in enumerate(now) if j != k and not set(region.inputs).isdisjoint(maker.outputs)}
    if _has_loop(index, maker):
        return {}
    alike = {j: r for j, r in readers.items() if r.space == maker.space and not _has_loop(index, r)}
    elsewhere = outside | {v for j, r in readers.items() if j not in alike for v in r.inputs}
    gone = {v for v in maker.outputs if v in labels and v not in elsewhere and all(_agrees(v, labels, r) for r in alike.values())}
    if not gone:
        return {}
    changed: dict[int, Planned] = {}
    for j, region in {k: maker, **alike}.items():
        new = _reduced(index, maker, gone) if j == k else _grown(index, region, maker, gone)
        plan = "" if new is None else plan_of(new)
        if new is None or isinstance(plan, str):
            return {}
        old = now[j][1]
        changed[j] = new, dataclasses.replace(plan, baseline_seconds=old.baseline_seconds, baseline_bytes=old.baseline_bytes)
    before, after = (sum(pairs[j][1].seconds for j in changed) for pairs in (now, changed))
    return changed if after < before else {}


def _has_loop(index: GraphIndex, region: Region) -> bool:
    """Such a region takes and gives arrays: a step cuts its slices out of them."""
    return any(index.graph.ops[i].body is not None for i in region.ops)


def _agrees(v: int, labels: dict[int, tuple[tuple[int, ...], ...]], reader: Region) -> bool:
    return v not in reader.inputs or reader.label_of().get(v) == labels[v]


def _reduced(index: GraphIndex, maker: Region, gone: set[int]) -> Region | None:
    """``maker`` without the results ``gone`` and what was there for them only."""
    kept = [v for v in maker.outputs if v not in gone]
    return _region(index, maker, _before(index, set(maker.ops), kept, set()), kept, maker.again) if kept else None


def _grown(index: GraphIndex, reader: Region, maker: Region, gone: set[int]) -> Region | None:
    """``reader`` with the ops that make what it reads of ``gone``."""
    stored = {v for v in maker.outputs if v not in gone}
    copied = _before(index, set(maker.ops), [v for v in reader.inputs if v in gone], stored)
    labels, theirs = reader.label_of(), maker.label_of()
    touched = {v for i in copied for v in (*index.graph.ops[i].inputs, *index.graph.ops[i].outputs)}
    if any(labels.get(v, theirs.get(v)) != theirs.get(v) for v in touched if v in labels or v in theirs):
        return None
    if any(v in reader.inputs and v not in labels and v in theirs for v in touched):
        return None
    whole = dataclasses.replace(reader, labels=tuple(sorted({**{v: theirs[v] for v in touched if v in theirs}, **labels}.items())))
    again = (*reader.again, *(i for i in copied if i not in reader.ops))
    return _region(index, whole, copied.union(reader.ops), list(reader.outputs), again)


def _before(index: GraphIndex, inside: set[int], values: Sequence[int], stored: set[int]) -> set[int]:
    """The ops of ``inside`` that ``values`` are made by, behind what is ``stored``."""
    found: set[int] = set()
    work = list(values)
    while work:
        i = index.producers.get(work.pop())
        if i in inside and i not in found:
            found.add(i)
            work += [v for v in index.graph.ops[i].inputs if v not in stored]
    return found


def _region(index: GraphIndex, like: Region, ops: set[int], outputs: Sequence[int], again: Sequence[int]) -> Region:
    """A region of ``ops`` with the labels of ``like``."""
    graph = index.graph
    made = {v for i in ops for v in graph.ops[i].outputs}
    read = dict.fromkeys(v for i in sorted(ops) for v in graph.ops[i].inputs)
    touched = made.union(read)
    return Region(
        space=like.space,
        ops=tuple(sorted(ops)),
        labels=tuple((v, axes) for v, axes in like.labels if v in touched),
        inputs=tuple(v for v in read if v not in made and graph.values[v].literal is None),
        outputs=tuple(outputs),
        sinks=tuple(i for i in like.sinks if i in ops),
        again=tuple(sorted(set(again).intersection(ops))),
    )
