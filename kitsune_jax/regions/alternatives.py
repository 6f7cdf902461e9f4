"""Alternatives to a region: cut into parts, with ops computed again, or without ops that XLA runs faster.

Comes in: regions, and a planner. Goes out: other regions with their plans, wherever the model says that they take less time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set

from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph, reached
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import itemsize
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.streams import Region, Seed, Spread, row_shape, streamed_axes
from kitsune_jax.regions.grow import GraphIndex, Order, anchored, compared_extremes, needed, region_of, regions_of
from kitsune_jax.regions.joining import (
    Chosen,
    PlanOf,
    SpreadOver,
    estimate_text,
    gain_of_splitting,
    pays,
    seconds_gained,
    total_gain,
)

# --- cuts: a training step at its loss, a network behind its products for each row ------------------------------------------------

Pass = tuple[Seed, frozenset[int]]
BestOf = Callable[[Spread, Region], tuple[Region, Plan | str]]
_PUT_TOGETHER = frozenset({"concatenate", "reshape", "broadcast_in_dim"})


def best_cut(
    cuts: Sequence[tuple[Pass, ...]], index: GraphIndex, order: Order, free: Set[int], spread: SpreadOver, best_of: BestOf
) -> list[Chosen]:
    """The parts of the one of ``cuts`` of a region that gains most, those that pay. No op of a part depends on a later part.
    ``order``: that of the chosen calls; ``free``: ops that none of them has. ``best_of``: a region, or the rest of it without ops
    that cost less elsewhere, with a plan."""

    def parts(cut: tuple[Pass, ...]) -> list[Chosen]:
        now, found = order.copy(), list[Chosen]()
        for seed, ops in cut:
            sp = spread(seed, ops & free)
            part = max(regions_of(index, sp, now), key=lambda r: len(r.ops), default=None)
            part, plan = best_of(sp, part) if part is not None and part.outputs else (None, "")
            if part is not None and not isinstance(plan, str) and pays(plan):
                found.append(Chosen.of([(part, plan)]))
                now.join(anchored(index.graph, part))
        return found

    return max(map(parts, cuts), key=total_gain, default=[])


def possible_cuts(
    graph: Graph, region: Region, plans: tuple[Plan | str, Plan | str], able: TargetCapabilities
) -> list[tuple[Pass, ...]]:
    """Every way to cut ``region``. ``plans``: of all of it, and of the best rest of it without ops that others compute. Without a
    plan of all of it there is no cut at its loss; where that of the rest is vertical, only those behind the widest operand of a
    product and around long rows, if the target is ``able``."""
    whole, rest = plans
    spatial = isinstance(rest, str) or rest.arrangement == "spatial"
    at_loss = [split_at_loss(graph, region)] if spatial and not isinstance(whole, str) else []
    products = _around_products(graph, region) if spatial else []
    behind = _behind_widest(graph, region) if able.cuts_wide_rows else []
    long = _around_long_rows(graph, region, able.long_row_bytes) if able.long_row_bytes else []
    return [cut for cut in (*at_loss, *products, *behind, *long) if cut is not None]


def _long_rows(graph: Graph, region: Region, least: int) -> tuple[set[int], set[int]]:
    """The products with a weight that make rows of ``least`` bytes or more; those that read such rows, or sum them up."""
    labels, sinks = region.label_of(), set(region.sinks)

    def is_long(v: int) -> bool:
        value = graph.values[v]
        return v in labels and math.prod(row_shape(value.shape, labels[v])) * itemsize(value.dtype) >= least

    products = [i for i in region.ops if graph.ops[i].kind == "dot_general" and not graph.ops[i]["lhs_batch"]]
    makers = {i for i in products if i not in sinks and is_long(graph.ops[i].outputs[0])}
    return makers, {i for i in products if i not in makers and any(map(is_long, graph.ops[i].inputs))}


def has_long_rows(graph: Graph, region: Region, least: int | None) -> bool:
    """Does a product of ``region`` with a weight make or read rows of ``least`` bytes or more?"""
    return least is not None and any(_long_rows(graph, region, least))


def _around_long_rows(graph: Graph, region: Region, least: int) -> list[tuple[Pass, ...] | None]:
    """(All up to the products that make long rows; what is computed of these; all behind the products that read them), without
    those products. Empty where no row is long: those of a language model's loss are its logits.

    A tile of all ops has few of these rows, and reads all weights for them, those of the layers in front too. A product that makes
    them stores them as they are made. Those that read them are no part, and are tried by themselves.
    """
    makers, readers = _long_rows(graph, region, least)
    inside, consumers = set(region.ops), dict[int, list[int]]()
    for i in region.ops:
        for v in graph.ops[i].inputs:
            consumers.setdefault(v, []).append(i)
    first = _needed_by(graph, region, sorted(makers)) - readers
    behind = reached(readers, lambda i: [c for v in graph.ops[i].outputs for c in consumers.get(v, ())]) - readers - first
    return [_parts(graph, region, [first, inside - first - readers - behind, behind])] if makers or readers else []


_WIDE = 640  # columns: beside two tiles of them in shared memory there is little room for weights


def _behind_widest(graph: Graph, region: Region) -> list[tuple[Pass, ...] | None]:
    """(All that makes the widest operand of a product; the rest), and the same with all in front of the products that make it as
    another part. Empty where no operand is wide: that of a feed-forward block is its hidden layer.

    A tile of all its columns leaves no room for others; without the product behind it they are stored as they are made. A
    normalisation in front takes registers of its own, and XLA may run it at the speed of memory.
    """
    if region.sinks or any(graph.ops[i].body is not None for i in region.ops):
        return []
    labels, producers = region.label_of(), graph.producers()
    products = [graph.ops[i] for i in region.ops if graph.ops[i].kind == "dot_general"]
    made = [v for op in products for v in op.inputs if producers.get(v) in region.ops]
    size, v = max(((math.prod(row_shape(graph.values[v].shape, labels[v])), v) for v in made if v in labels), default=(0, -1))
    if size < _WIDE:
        return []
    inside, before = set(region.ops), _needed_by(graph, region, [producers[v]])

    def behind_products(i: int) -> set[int]:
        makers = () if graph.ops[i].kind == "dot_general" else (producers.get(x, -1) for x in graph.ops[i].inputs)
        return inside.intersection(makers)

    operands = [graph.ops[i].inputs[0] for i in reached({producers[v]}, behind_products) if graph.ops[i].kind == "dot_general"]
    if len(operands) < 2 or len(set(operands)) > 1:  # not a gate
        return []
    first, rest = _needed_by(graph, region, [producers.get(operands[0], -1)]), inside - before
    in_front = [_parts(graph, region, [first, before - first, rest])] if first else []
    return [_parts(graph, region, [before, rest]), *in_front]


def _around_products(graph: Graph, region: Region) -> list[tuple[Pass, ...] | None]:
    """Cuts of a region with products for each row: (all ops that these products depend on, with selections from their results; the
    rest), and the same with the layers before them as another part. Empty if there is no such product.

    Such a product reads many times the memory of a layer for each row, and computes little.
    """
    streamed, sinks = region.label_of(), set(region.sinks)
    matmuls = [i for i in region.ops if graph.ops[i].kind == "dot_general" and i not in sinks]
    products = [i for i in matmuls if all(v in streamed for v in graph.ops[i].inputs)]
    # Only the first ones: those of a backward pass depend on all of the forward pass.
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
    inside, producers = set(region.ops), graph.producers()
    return reached(inside.intersection(ops), lambda i: inside.intersection(producers.get(v, -1) for v in graph.ops[i].inputs))


def _parts(graph: Graph, region: Region, parts: list[set[int]]) -> tuple[Pass, ...] | None:
    found = [(_seed(graph, region, ops), frozenset(ops)) for ops in parts if ops]
    return tuple((seed, ops) for seed, ops in found if seed is not None) if len(found) > 1 else None


def split_at_loss(graph: Graph, region: Region) -> tuple[Pass, ...] | None:
    """(forward pass with the loss, backward pass), or None for a region that is no training step.

    The loss is a sink that makes one number; everything it depends on is the forward pass. A backward pass has weight gradients.
    """
    losses = [i for i in region.sinks if graph.ops[i].kind != "dot_general" and graph.values[graph.ops[i].outputs[0]].size == 1]
    gradients = [i for i in region.sinks if graph.ops[i].kind == "dot_general"]
    if not losses or not gradients:
        return None
    forward = _needed_by(graph, region, losses)
    return None if forward.intersection(gradients) else _parts(graph, region, [forward, set(region.ops) - forward])


def _seed(graph: Graph, region: Region, ops: set[int]) -> Seed | None:
    """The stream of the region at one of ``ops``: an operand of which each streamed dimension is one stream axis."""
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


# --- values that a later region computes again instead of reading them from memory ------------------------------------------------

Planned = tuple[Region, Plan]
# Ops that are computed again rather than stored: pointwise ones of few operations, and those that only move elements.
_POINTWISE = frozenset({"pointwise", "convert"})
_CHEAP = _POINTWISE | {"broadcast", "reshape", "iota", "slice", "concatenate", "transpose", "rev", "pad"}


def recompute(
    index: GraphIndex, planned: Sequence[Planned], others: Sequence[int], plan_of: PlanOf, worths: Sequence[Worth]
) -> list[Planned]:
    """``planned`` regions, some without results that every region reading them computes again, where that is worth something by one
    of ``worths``, each in turn. They come in an order in which they can run.

    In a training step that is the forward pass of a layer, computed again by the region of its backward pass; in a segment softmax
    the score of an edge. There are two ways: everything is computed again from values that are in memory anyway; or the results of
    products and reductions are stored, and only pointwise work is repeated. Of a layer normalisation, for example, JAX keeps four
    arrays as large as its operand, all of which are made of that operand, its mean and its variance. A result that is read
    elsewhere stays, and a repeated op streams as it does in its own region. ``others``: ops that are in none of the regions, or in
    later phases of their calls.
    """
    now = list(planned)
    # Elements that are compared with their maximum stay stored: all makers would have to agree to the last bit, also in products.
    outside = {v for i in others for v in index.graph.ops[i].inputs} | index.results | compared_extremes(index.graph)
    for worth in worths:
        for k in range(len(now)):
            for j, pair in _without_results(index, now, k, outside, plan_of, worth).items():
                now[j] = pair
    return now


@dataclasses.dataclass(frozen=True)
class Worth:
    """``saved``: by how much (regions before, regions after) differ. ``flops``: of ops that are cheap to repeat, for each element.
    ``cheap``: no others are repeated."""

    saved: Callable[[GraphIndex, Sequence[Planned], Sequence[Planned]], float]
    flops: float
    cheap: bool = False


def _seconds_saved(_: GraphIndex, before: Sequence[Planned], after: Sequence[Planned]) -> float:
    return sum(plan.seconds for _, plan in before) - sum(plan.seconds for _, plan in after)


def _bytes_saved(index: GraphIndex, before: Sequence[Planned], after: Sequence[Planned]) -> float:
    have, stored = ({v for region, _ in regions for v in region.outputs} for regions in (before, after))
    return float(sum(map(index.bytes, have)) - sum(map(index.bytes, stored)))


def _bytes_saved_in_time(index: GraphIndex, before: Sequence[Planned], after: Sequence[Planned]) -> float:
    """0 where the calls together would take longer than XLA's code."""
    return _bytes_saved(index, before, after) if sum(seconds_gained(plan) for _, plan in after) > 0 else 0.0


# Of cheap functions: an exponential, a tanh; where bytes count, also an erfc.
BY_TIME = Worth(_seconds_saved, 16.0)
BY_BYTES, BY_BYTES_ALONE = (Worth(saved, 24.0, cheap=True) for saved in (_bytes_saved_in_time, _bytes_saved))


def _without_results(
    index: GraphIndex, now: Sequence[Planned], k: int, outside: set[int], plan_of: PlanOf, worth: Worth
) -> dict[int, Planned]:
    """Region ``k`` and the regions that read its results, as they would be without these; empty if that is worth nothing."""
    maker, labels = now[k][0], now[k][0].label_of()
    readers = {j: region for j, (region, _) in enumerate(now) if j != k and not set(region.inputs).isdisjoint(maker.outputs)}
    if _has_loop(index, maker):
        return {}
    alike = {j: r for j, r in readers.items() if r.space == maker.space and not _has_loop(index, r)}
    elsewhere = outside | {v for j, r in readers.items() if j not in alike for v in r.inputs}
    made = set(maker.outputs).intersection(labels)
    otherwise = {v for r in alike.values() for v in made.intersection(r.inputs) if r.label_of().get(v) != labels[v]}
    gone = made - elsewhere - otherwise
    if not gone:
        return {}
    best: dict[int, Planned] = {}
    most = 0.0
    once = {v for v in gone if sum(v in r.inputs for r in alike.values()) == 1}  # a value between two layers has two readers
    for values in (gone, once) if once != gone else (gone,):
        costly = _worth_storing(index, maker, values, worth.flops)
        for stored in (costly,) if worth.cheap else dict.fromkeys((frozenset[int](), costly)):
            left = values - stored
            touched = {j: r for j, r in alike.items() if not left.isdisjoint(r.inputs)}
            changed = _changed(index, now, k, touched, left, stored, plan_of) if left else {}
            found = worth.saved(index, [now[j] for j in changed], list(changed.values()))
            if found > most:
                best, most = changed, found
    return best


def _changed(
    index: GraphIndex, now: Sequence[Planned], k: int, alike: dict[int, Region], gone: set[int], stored: Set[int], plan_of: PlanOf
) -> dict[int, Planned]:
    """Region ``k`` without its results ``gone`` and with the results ``stored``, and its readers ``alike``; empty if one of them
    has no plan."""
    maker = now[k][0]
    outputs = [*(v for v in maker.outputs if v not in gone), *sorted(stored - set(maker.outputs))]
    changed: dict[int, Planned] = {}
    for j, region in {k: maker, **alike}.items():
        new = _reduced(index, maker, outputs) if j == k else _grown(index, region, maker, gone, outputs)
        plan = "" if new is None else plan_of(new)
        if new is None or isinstance(plan, str):
            return {}
        old = now[j][1]
        changed[j] = new, dataclasses.replace(plan, baseline_seconds=old.baseline_seconds, baseline_bytes=old.baseline_bytes)
    return changed


def _worth_storing(index: GraphIndex, maker: Region, gone: set[int], flops: float) -> frozenset[int]:
    """Values to store so that ``gone`` can be computed from them by cheap ops alone, of at most ``flops`` for each element. Values
    that do not run over all axes, such as the angles of a rotary embedding, cannot be stored: a region has no rows for them."""
    found: set[int] = set()
    seen: set[int] = set()
    labels, inside, work = maker.label_of(), set(maker.ops), list(gone)
    while work:
        v = work.pop()
        i = index.producers.get(v)
        if v in seen or v not in labels or i not in inside or i in index.recomputed:
            continue
        seen.add(v)
        if _is_cheap(index, i, flops) or len(streamed_axes(labels[v])) < len(maker.space.sizes):
            work += index.graph.ops[i].inputs
        else:
            found.add(_last_of(index, v, inside))
    return frozenset(found)


def _is_cheap(index: GraphIndex, i: int, flops: float) -> bool:
    spec = OPS[index.graph.ops[i].kind]
    return spec.family in _CHEAP and spec.flops <= flops


def _last_of(index: GraphIndex, v: int, inside: set[int]) -> int:
    """The last value of the chain of pointwise ops behind ``v`` whose values nothing else reads: a bias, an activation."""
    values = index.graph.values
    while v not in index.results:
        readers = index.consumers.get(v, ())
        op = index.graph.ops[readers[0]] if len(readers) == 1 and readers[0] in inside else None
        if op is None or OPS[op.kind].family not in _POINTWISE or values[op.outputs[0]].size != values[v].size:
            break
        v = op.outputs[0]
    return v


def _has_loop(index: GraphIndex, region: Region) -> bool:
    """Does ``region`` have a loop? It takes and gives whole arrays, of which each step takes slices."""
    return any(index.graph.ops[i].body is not None for i in region.ops)


def _reduced(index: GraphIndex, maker: Region, outputs: Sequence[int]) -> Region | None:
    """``maker`` with the results ``outputs`` and without ops that only other results needed."""
    return _region(index, maker, _before(index, set(maker.ops), outputs, set()), outputs, maker.recomputed) if outputs else None


def _grown(index: GraphIndex, reader: Region, maker: Region, gone: set[int], stored: Sequence[int]) -> Region | None:
    """``reader`` with the ops that compute its operands among ``gone`` from values that are ``stored``."""
    copied = _before(index, set(maker.ops), [v for v in reader.inputs if v in gone], set(stored))
    labels, theirs = reader.label_of(), maker.label_of()
    touched = {v for i in copied for v in (*index.graph.ops[i].inputs, *index.graph.ops[i].outputs)}
    if any(labels.get(v, theirs.get(v)) != theirs.get(v) for v in touched if v in labels or v in theirs):
        return None
    if any(v in reader.inputs and v not in labels and v in theirs for v in touched):
        return None
    whole = dataclasses.replace(reader, labels=tuple(sorted({**{v: theirs[v] for v in touched if v in theirs}, **labels}.items())))
    again = (*reader.recomputed, *(i for i in copied if i not in reader.ops))
    return _region(index, whole, copied.union(reader.ops), list(reader.outputs), again)


def _before(index: GraphIndex, inside: set[int], values: Sequence[int], stored: set[int]) -> set[int]:
    """The ops of ``inside`` that compute ``values`` from ``stored`` ones."""
    ops = index.graph.ops
    return reached(inside & index.makers(values), lambda i: inside & index.makers(set(ops[i].inputs) - stored))


def _region(index: GraphIndex, like: Region, ops: set[int], outputs: Sequence[int], again: Sequence[int]) -> Region:
    """A region of ``ops`` with the labels of ``like``."""
    return Region.of(index.graph, like.space, sorted(ops), like.label_of(), outputs, like.sinks, set(again))


# --- removing ops from a region that XLA, or a call of their own, runs faster -----------------------------------------------------

Found = tuple[Region, Plan | str, dict[int, str]]  # the last: removed op -> reason

_TABLE = "the pipeline that computes its rows would need one table per worker, and alone"
_GRADIENT = "it has more sums than fit a worker that takes a tile through all operators: its operands are stored, and alone"
_REPEATED = "XLA computes it once: the pipeline that reads it would compute it again for every index of an axis that it lacks"
_MOST_PRODUCTS = 12  # of a training step whose activations may all stay with a worker
_SMALL = 16  # a weight gradient with so many times fewer elements than the largest may stay where that one does not fit
_MOVED = frozenset({"reshape", "transpose"})
# Elements that a region computes repeatedly: with fewer of them there is nothing to gain, and a plan takes time to make.
_MANY = 1 << 17
_COSTLY = 6  # operations of a function that is more than arithmetic


def drop_costly_ops(index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf) -> Found:
    """``region`` and its plan, or the rest of it without ops that cost less elsewhere, and the reasons for the removed ops.

    The rest makes no value for others that the whole region did not make.
    """
    region, plan, why = _without_tables(index, sp, region, plan, plan_of)
    left = repeated_ops(index, region)
    if not left or isinstance(plan, str):
        return region, plan, why
    rest = region_of(index, sp, needed(index, sp, set(region.ops).difference(left)))
    smaller = plan_of(rest) if rest.outputs == region.outputs else ""
    if isinstance(smaller, str) or seconds_gained(smaller) <= seconds_gained(plan):
        return region, plan, why
    return rest, smaller, why | dict.fromkeys(left, _REPEATED)


def _without_tables(index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf) -> Found:
    """``region`` without ops that add rows to tables by indices, if that gains more.

    The rows of a call stream in one order. To add them in another order takes one table per worker; a call of their own, or XLA,
    needs none.
    """
    folds = tuple(i for i in region.sinks if OPS[index.graph.ops[i].kind].family == "scatter")
    order = None if isinstance(plan, str) else plan.order
    others = tuple(i for i in folds if index.graph.ops[i].inputs[1] != order)
    return _best_without(index, sp, (region, plan, {}), dict.fromkeys((others, folds), _TABLE), plan_of)


def store_gradients(
    index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf, alone: Callable[[int], Plan | str]
) -> Found:
    """``region``, of whose ``plan`` workers are idle, without its large weight gradients, if that gains more.

    Every worker has sums of its own, which are added up in the end: those of a language model with 50 257 tokens take 154 MB for
    its table alone, and only as many workers run as have memory for them. A product of its own (``alone``) streams over the rows
    of the weight, reads the operands of the gradient from memory, and keeps no sums.
    """
    graph = index.graph
    products = [i for i in region.sinks if graph.ops[i].kind == "dot_general" and not graph.ops[i]["lhs_batch"]]
    sizes = {i: graph.values[graph.ops[i].outputs[0]].size for i in products}
    if not sizes or len(region.ops) == len(products):
        return region, plan, {}
    large = tuple(i for i, size in sizes.items() if _SMALL * size >= max(sizes.values()))
    return _best_without(index, sp, (region, plan, {}), {large: _GRADIENT}, plan_of, alone)


def drop_gradients(index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf) -> Found:
    """``region`` without weight gradients, if that gains more.

    The sums of all of them fit no worker, so they take a pipeline with stages, which wait for each other. Without them one worker
    takes a tile through a whole backward pass and stores the operands of the gradients, once. A deep training step is cut at its
    loss instead: a worker has no room for all activations of a tile, and it takes seconds to find that out. A result as long
    as the stream is no weight's gradient but that of keys, say, whose operands are whole arrays of scores.
    """
    if not isinstance(plan, str) and plan.arrangement != "spatial":
        return region, plan, {}
    graph, rows = index.graph, region.space.rows
    products = [i for i in region.ops if graph.ops[i].kind == "dot_general"]
    made = {i: graph.values[graph.ops[i].outputs[0]] for i in region.sinks if i in products}
    sizes = {i: value.size for i, value in made.items()}
    if not sizes or len(sizes) == len(products) or any(max(value.shape, default=1) >= rows for value in made.values()):
        return region, plan, {}
    if len(products) > _MOST_PRODUCTS and split_at_loss(graph, region) is not None:
        return region, plan, {}
    large = tuple(i for i, size in sizes.items() if _SMALL * size >= max(sizes.values()))
    return _best_without(index, sp, (region, plan, {}), dict.fromkeys((tuple(sizes), large), _GRADIENT), plan_of)


def _best_without(
    index: GraphIndex,
    sp: Spread,
    whole: Found,
    choices: Mapping[tuple[int, ...], str],
    plan_of: PlanOf,
    alone_of: Callable[[int], Plan | str] | None = None,
) -> Found:
    """``whole``, or its region without the ops of the one of ``choices`` that gains most, with the reasons. ``alone_of``: the plan
    of a removed op, by default in the same stream."""
    alone_of = alone_of or (lambda i: plan_of(region_of(index, sp, needed(index, sp, {i}))))
    region, plan, _ = best = whole
    most = 0.0
    for left, text in choices.items():
        if not left:
            continue
        rest = region_of(index, sp, needed(index, sp, set(region.ops).difference(left)))
        smaller = plan_of(rest) if rest.outputs else ""
        if isinstance(smaller, str):
            continue
        alone = [alone_of(i) for i in left]
        gain = gain_of_splitting(plan, smaller, alone)
        if gain > most:
            why = {i: own if isinstance(own, str) else f"{text} {estimate_text(own)}" for i, own in zip(left, alone, strict=True)}
            best, most = (rest, smaller, why), gain
    return best


def repeated_ops(index: GraphIndex, region: Region) -> frozenset[int]:
    """Lookups, products and functions of ``region`` whose results do not run over all axes of its stream, so that they are computed
    again for every index of the others (the bias of an attention, for every sample of a batch); with ops that move their results
    and ops that only they read."""
    graph, labels, live = index.graph, region.label_of(), index.live
    sinks, again, left = set(region.sinks), set(region.recomputed), set[int]()
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
        readers = live.intersection(index.readers(i))
        if readers and readers <= left and not index.results.intersection(outs):
            left.add(i)
    return frozenset(left)


def _costs(graph: Graph, i: int) -> bool:
    """Is op ``i`` more than arithmetic: a lookup, a product, a function?"""
    spec = OPS[graph.ops[i].kind]
    return spec.family in ("gather", "dot") or spec.flops > _COSTLY
