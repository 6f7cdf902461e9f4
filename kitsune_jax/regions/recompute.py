"""What a later region computes again instead of reading it from memory.

Comes in: the chosen regions, in an order in which they can run. Goes out: these regions, some of whose results are gone, because
every region that read one makes it again. In a training step that is the forward pass of a layer, made again by the region of its
backward pass; in a segment softmax the score of an edge. There are two ways: all is made again from what lies in memory anyway; or
what products and reductions make is stored, and only pointwise work is done again. Of a layer normalisation JAX keeps four arrays
as large as its operand, which are that operand, its mean and its variance. Invariants: a result that is read elsewhere stays; what
is computed again streams as it does where it was made; and the model says that all calls together take less time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.compared import taken_the_largest_of
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.streams import Region
from kitsune_jax.streams.space import streamed_axes

Planned = tuple[Region, Plan]
# Ops that are done again rather than stored: pointwise ones of at most so many operations an element (an exponential, a tanh), and
# those that only move elements.
_MOST_FLOPS = 16.0
_POINTWISE = frozenset({"pointwise", "convert"})
_CHEAP = _POINTWISE | {"broadcast", "reshape", "iota", "slice", "concatenate", "transpose", "rev", "pad"}


def recompute(
    index: GraphIndex, planned: Sequence[Planned], others: Sequence[int], plan_of: Callable[[Region], Plan | str]
) -> list[Planned]:
    """``planned`` regions, changed where that pays; ``others``: ops that are in none of them, or in parts of their calls."""
    now = list(planned)
    # What equals its maximum: makers would have to agree to the last bit, in products as well.
    outside = {v for i in others for v in index.graph.ops[i].inputs} | index.results | taken_the_largest_of(index.graph)
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
    best: dict[int, Planned] = {}
    gain = 0.0
    once = {v for v in gone if sum(v in r.inputs for r in alike.values()) == 1}  # what one layer hands to the next has two readers
    for values in (gone, once) if once != gone else (gone,):
        for stored in dict.fromkeys((frozenset[int](), _worth_storing(index, maker, values))):
            left = values - stored
            touched = {j: r for j, r in alike.items() if not left.isdisjoint(r.inputs)}
            changed = _changed(index, now, k, touched, left, stored, plan_of) if left else {}
            gained = sum(now[j][1].seconds - plan.seconds for j, (_, plan) in changed.items())
            if gained > gain:
                best, gain = changed, gained
    return best


def _changed(
    index: GraphIndex,
    now: Sequence[Planned],
    k: int,
    alike: dict[int, Region],
    gone: set[int],
    stored: frozenset[int],
    plan_of: Callable[[Region], Plan | str],
) -> dict[int, Planned]:
    """Region ``k`` without its results ``gone`` and with the results ``stored``, and its readers ``alike``; nothing where one of
    them has no plan."""
    maker = now[k][0]
    outputs = [*(v for v in maker.outputs if v not in gone), *sorted(stored.difference(maker.outputs))]
    changed: dict[int, Planned] = {}
    for j, region in {k: maker, **alike}.items():
        new = _reduced(index, maker, outputs) if j == k else _grown(index, region, maker, gone, outputs)
        plan = "" if new is None else plan_of(new)
        if new is None or isinstance(plan, str):
            return {}
        old = now[j][1]
        changed[j] = new, dataclasses.replace(plan, baseline_seconds=old.baseline_seconds, baseline_bytes=old.baseline_bytes)
    return changed


def _worth_storing(index: GraphIndex, maker: Region, gone: set[int]) -> frozenset[int]:
    """What has to lie in memory for ``gone`` to be made of it by cheap ops only, and by what makes values that a region has no rows
    for: those that do not run over all of its axes, as the angles of a rotary embedding."""
    found: set[int] = set()
    seen: set[int] = set()
    labels, inside, work = maker.label_of(), set(maker.ops), list(gone)
    while work:
        v = work.pop()
        i = index.producers.get(v)
        if v in seen or v not in labels or i not in inside or i in index.again:
            continue
        seen.add(v)
        if _is_cheap(index, i) or len(streamed_axes(labels[v])) < len(maker.space.sizes):
            work += index.graph.ops[i].inputs
        else:
            found.add(_last_of(index, v, inside))
    return frozenset(found)


def _is_cheap(index: GraphIndex, i: int) -> bool:
    spec = OPS[index.graph.ops[i].kind]
    return spec.family in _CHEAP and spec.flops <= _MOST_FLOPS


def _last_of(index: GraphIndex, v: int, inside: set[int]) -> int:
    """What a chain of pointwise ops makes of ``v``, as long as nobody else reads what is on the way: a bias, an activation."""
    values = index.graph.values
    while v not in index.results:
        readers = index.consumers.get(v, ())
        op = index.graph.ops[readers[0]] if len(readers) == 1 and readers[0] in inside else None
        if op is None or OPS[op.kind].family not in _POINTWISE or values[op.outputs[0]].size != values[v].size:
            break
        v = op.outputs[0]
    return v


def _has_loop(index: GraphIndex, region: Region) -> bool:
    """Such a region takes and gives arrays: a step cuts its slices out of them."""
    return any(index.graph.ops[i].body is not None for i in region.ops)


def _agrees(v: int, labels: dict[int, tuple[tuple[int, ...], ...]], reader: Region) -> bool:
    return v not in reader.inputs or reader.label_of().get(v) == labels[v]


def _reduced(index: GraphIndex, maker: Region, outputs: Sequence[int]) -> Region | None:
    """``maker`` with the results ``outputs`` and without what was there for others only."""
    return _region(index, maker, _before(index, set(maker.ops), outputs, set()), outputs, maker.again) if outputs else None


def _grown(index: GraphIndex, reader: Region, maker: Region, gone: set[int], stored: Sequence[int]) -> Region | None:
    """``reader`` with the ops that make what it reads of ``gone``, of what is ``stored``."""
    copied = _before(index, set(maker.ops), [v for v in reader.inputs if v in gone], set(stored))
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
