"""Alternatives to a region: cut into parts that run one after the other, with ops computed again, or without ops that XLA runs
faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence, Set

from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.streams import Region, Seed, Spread, streamed_axes
from kitsune_jax.regions.grow import GraphIndex, Order, anchored, needed, region_of, regions_of, taken_the_largest_of
from kitsune_jax.regions.joining import Chosen, all_gained, compared, gained_apart, pays, seconds_gained

# ----------------------------------------------------------------------------------------------------------------------------------
# Where a region may be cut into parts that run one after the other: a training step at its loss, a network behind its products
# for each row.
#
# Comes in: a region. Goes out: the ops of each part, with a seed of its stream; of the best cut, the parts that pay as calls.
# Invariant: no op of a part depends on one of a later part.
# ----------------------------------------------------------------------------------------------------------------------------------

Pass = tuple[Seed, frozenset[int]]
_PUT_TOGETHER = frozenset({"concatenate", "reshape", "broadcast_in_dim"})


def best_cut(
    region: Region,
    planned: bool,
    index: GraphIndex,
    order: Order,
    free: Set[int],
    spread: Callable[[Seed, Set[int]], Spread],
    planner: Callable[[Region], Plan | str],
) -> list[Chosen]:
    """The parts of the cut of ``region`` that gains most, as far as they pay. ``planned``: it has a plan as a whole. ``order``: as
    the chosen calls stand; ``free``: ops that none of them has."""

    def parts(cut: tuple[Pass, ...]) -> list[Chosen]:
        now, found = order.copy(), list[Chosen]()
        for seed, ops in cut:
            sp = spread(seed, ops & free)
            part = max(regions_of(index, sp, now), key=lambda r: len(r.ops), default=None)
            plan = planner(part) if part is not None and part.outputs else ""
            if part is not None and not isinstance(plan, str) and pays(plan):
                found.append(Chosen.of([(part, plan)]))
                now.join(anchored(index.graph, part))
        return found

    return max(map(parts, cuts_of(index.graph, region, planned)), key=all_gained, default=[])


def cuts_of(graph: Graph, region: Region, planned: bool) -> list[tuple[Pass, ...]]:
    """Every way to cut ``region``; one that has no plan as a whole (not ``planned``) only around its products for each row."""
    at_loss = [passes_of(graph, region)] if planned else []
    return [cut for cut in (*at_loss, *_around_products(graph, region)) if cut is not None]


def _around_products(graph: Graph, region: Region) -> list[tuple[Pass, ...] | None]:
    """(all that products for each row depend on, with what is picked of them; the rest); and the same with the layers before them
    as a part of their own. Nothing, where there is no such product.

    Such a product reads many times the memory of a layer for each row, and computes little.
    """
    streamed, sinks = region.label_of(), set(region.sinks)
    matmuls = [i for i in region.ops if graph.ops[i].kind == "dot_general" and i not in sinks]
    products = [i for i in matmuls if all(v in streamed for v in graph.ops[i].inputs)]
    # The first ones: those of a backward pass wait for all of the forward pass.
    products = [i for i in products if not _needed_by(graph, region, [i]).intersection(set(products) - {i})]
    if not products:
        return []
    before = _needed_by(graph, region, products)
    made, after = {v for i in products for v in graph.ops[i].outputs}, set[int]()
    for i in region.ops:  # views and selections of nothing but such a product
        op = graph.ops[i]
        if op.kind in ("reshape", "take") and op.inputs[0] in made:
            after.add(i)
            made.update(op.outputs)
    layers = {i for i in matmuls if i in before and i not in products}
    computed = {v for i in layers for v in graph.ops[i].outputs}
    for i in region.ops:
        op = graph.ops[i]
        if i in before and i not in products and op.kind not in _PUT_TOGETHER and computed.intersection(op.inputs):
            layers.add(i)
            computed.update(op.outputs)
    first = _needed_by(graph, region, sorted(layers))
    rest = set(region.ops) - before - after
    return [_parts(graph, region, [before | after, rest]), _parts(graph, region, [first, (before | after) - first, rest])]


def _needed_by(graph: Graph, region: Region, ops: list[int]) -> set[int]:
    """The ops of ``region`` that ``ops`` depend on, themselves included."""
    inside, producers, found, work = set(region.ops), graph.producers(), set[int](), list(ops)
    while work:
        i = work.pop()
        if i in inside and i not in found:
            found.add(i)
            work += [producers[v] for v in graph.ops[i].inputs if v in producers]
    return found


def _parts(graph: Graph, region: Region, parts: list[set[int]]) -> tuple[Pass, ...] | None:
    found = [(_seed(graph, region, ops), frozenset(ops)) for ops in parts if ops]
    return tuple((seed, ops) for seed, ops in found if seed is not None) if len(found) > 1 else None


def passes_of(graph: Graph, region: Region) -> tuple[Pass, ...] | None:
    """(forward pass with the loss, backward pass), or None for a region that is no training step.

    The loss is a sink that makes one number; whatever it depends on is the forward pass. A backward pass has weight gradients.
    """
    losses = [i for i in region.sinks if graph.ops[i].kind != "dot_general" and graph.values[graph.ops[i].outputs[0]].size == 1]
    gradients = [i for i in region.sinks if graph.ops[i].kind == "dot_general"]
    if not losses or not gradients:
        return None
    forward = _needed_by(graph, region, losses)
    return None if forward.intersection(gradients) else _parts(graph, region, [forward, set(region.ops) - forward])


def _seed(graph: Graph, region: Region, ops: set[int]) -> Seed | None:
    """The stream of the region at one of ``ops``: an operand whose streamed dimensions are a stream axis each."""
    labels = region.label_of()
    for i in sorted(ops, key=lambda i: (graph.ops[i].kind != "dot_general", i)):
        for v in graph.ops[i].inputs:
            axes = labels.get(v)
            if axes is None or any(len(a) > 1 for a in axes):
                continue
            dims = sorted((d for d, a in enumerate(axes) if a), key=lambda d: axes[d])
            if [axes[d] for d in dims] == [(k,) for k in range(len(region.space.sizes))]:
                return Seed(v, tuple(dims))
    return None


# ----------------------------------------------------------------------------------------------------------------------------------
# What a later region computes again instead of reading it from memory.
#
# Comes in: the chosen regions, in an order in which they can run. Goes out: these regions, some of whose results are gone,
# because every region that read one makes it again. In a training step that is the forward pass of a layer, made again by the
# region of its backward pass; in a segment softmax the score of an edge. There are two ways: all is made again from what lies in
# memory anyway; or what products and reductions make is stored, and only pointwise work is done again. Of a layer normalisation
# JAX keeps four arrays as large as its operand, which are that operand, its mean and its variance. Invariants: a result that is
# read elsewhere stays; what is computed again streams as it does where it was made; and the model says that all calls together
# take less time.
# ----------------------------------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------------------------------
# Ops that cost less outside of the region that they could be in.
#
# Comes in: a region with its plan. Goes out: the same, or what is left of it with its own plan, where the model finds that this
# gains more, and why for ops that were left out. Invariant: what is left makes nothing for others that the whole region did not
# make.
# ----------------------------------------------------------------------------------------------------------------------------------

PlanOf = Callable[[Region], Plan | str]
Found = tuple[Region, Plan | str, dict[int, str]]  # the last: op that was left out -> why

_TABLE = "left to XLA: the pipeline that makes its rows would need a table for every worker, and a call of its own is"
_REPEATED = "made once outside of the pipeline that reads it, which would make it again for every index of an axis that it lacks"
_MOVED = frozenset({"reshape", "transpose"})
# Elements that a region makes again and again: with fewer of them there is nothing to gain, and a plan takes time to make.
_MANY = 1 << 17
_COSTLY = 6  # operations of a function that is not just arithmetic


def smaller_of(index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf) -> Found:
    """``region`` and its plan, or what is left of it without ops that cost less elsewhere."""
    region, plan, why = _without_tables(index, sp, region, plan, plan_of)
    left = repeated(index, region)
    if not left or isinstance(plan, str):
        return region, plan, why
    rest = region_of(index, sp, needed(index, sp, set(region.ops).difference(left)))
    smaller = plan_of(rest) if rest.outputs == region.outputs else ""
    if isinstance(smaller, str) or seconds_gained(smaller) <= seconds_gained(plan):
        return region, plan, why
    return rest, smaller, why | dict.fromkeys(left, _REPEATED)


def _without_tables(index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf) -> Found:
    """Without ops that fold rows into tables by indices.

    The rows of a call stream in one order. Folded in another one, they need a table for every worker, which a call of their own
    does not, or XLA does it.
    """
    folds = tuple(i for i in region.sinks if OPS[index.graph.ops[i].kind].family == "scatter")
    order, most = None if isinstance(plan, str) else plan.order, 0.0
    others = tuple(i for i in folds if index.graph.ops[i].inputs[1] != order)
    best: Found = region, plan, {}
    for left in dict.fromkeys((others, folds)):
        if not left:
            continue
        rest = region_of(index, sp, needed(index, sp, set(region.ops).difference(left)))
        smaller = plan_of(rest) if rest.outputs else ""
        if isinstance(smaller, str):
            continue
        alone = [plan_of(region_of(index, sp, needed(index, sp, {i}))) for i in left]
        gain = gained_apart(plan, smaller, alone)
        if gain > most:
            why = {i: own if isinstance(own, str) else f"{_TABLE} {compared(own)}" for i, own in zip(left, alone, strict=True)}
            best, most = (rest, smaller, best[2] | why), gain
    return best


def repeated(index: GraphIndex, region: Region) -> frozenset[int]:
    """Lookups, products and functions of ``region`` whose results do not run over all axes of its stream, so that they are made
    again for every index of the others (the bias of an attention, for every sample of a batch); with what moves their results and
    what only they read."""
    graph, labels, live = index.graph, region.label_of(), index.live
    sinks, again, left = set(region.sinks), set(region.again), set[int]()
    for i in region.ops:
        op = graph.ops[i]
        streamed = [v for v in op.outputs if v in labels]
        if i in sinks or i in again or not streamed:
            continue
        axes = streamed_axes(labels[streamed[0]])
        times = math.prod(n for a, n in enumerate(region.space.sizes) if a not in axes)
        if times < 2:
            continue
        moved = op.kind in _MOVED and index.producers.get(op.inputs[0]) in left
        if moved or _costs(graph, i) and (times - 1) * sum(graph.values[v].size for v in op.outputs) >= _MANY:
            left.add(i)
    if not left:
        return frozenset()
    for i in sorted(set(region.ops).difference(left, sinks, again), reverse=True):
        outs = graph.ops[i].outputs
        readers = {c for v in outs for c in index.consumers.get(v, ()) if c in live}
        if readers and readers <= left and not index.results.intersection(outs):
            left.add(i)
    return frozenset(left)


def _costs(graph: Graph, i: int) -> bool:
    """More than arithmetic: a lookup, a product, a function."""
    spec = OPS[graph.ops[i].kind]
    return spec.family in ("gather", "dot") or spec.flops > _COSTLY
