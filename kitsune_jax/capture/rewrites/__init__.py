"""Rewrites of a captured function, each checked before the next one sees its result.

Comes in: a ``Captured``. Goes out: an equal function that streams better. Invariants: a rewrite is a pure function of a
``Captured`` that gives its argument back where it changes nothing; one that fails, or makes a graph that is not valid, is as if it
had not run, and is reported as a ``Failure``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kitsune_jax.capture.edit import Captured, merged, pruned
from kitsune_jax.capture.rewrites.attention_scores import multiply_scores, part_scores, repeat_scores, sum_results
from kitsune_jax.capture.rewrites.few_rows import reductions_as_folds, split_reductions
from kitsune_jax.capture.rewrites.loops import move_constants, move_products, move_sums, recompute_cheap_slices
from kitsune_jax.capture.rewrites.products import (
    exchange_operands,
    fold_slices,
    fold_transposed_operands,
    fold_transposes,
    masks_of_results,
    move_indexing,
    promise_sorted,
    split_gradients,
    spread_indices,
)
from kitsune_jax.capture.rewrites.reductions import cut_operands, reduce_outer_first
from kitsune_jax.capture.rewrites.segment_softmax import divide_segments, sum_online
from kitsune_jax.config import Options
from kitsune_jax.errors import Failure
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.table import verify_op


@dataclasses.dataclass(frozen=True)
class RewriteContext:
    """The target and the options that a function is rewritten for. ``kept``: the places (``Origin.key``) of loops that stay as they
    are. ``workers``: of the machine. ``partitioned``: XLA will divide the function among devices, so there are no rewrites, and
    a sharding keeps no operator out of the Graph."""

    capabilities: TargetCapabilities = TargetCapabilities()
    options: Options = Options()
    kept: Collection[Any] = ()
    workers: int = 1
    partitioned: bool = False


ALWAYS = RewriteContext()  # asks for the rewrites that suit every target
PARTITIONED = RewriteContext(partitioned=True)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """``run``: makes an equal ``Captured``, or returns its argument. ``when``: is it asked for? ``given``: keyword arguments of
    ``run``. ``name``: a participle, for messages."""

    name: str
    run: Callable[..., Captured]
    when: Callable[[RewriteContext], bool] = lambda _: True
    given: Callable[[RewriteContext], Mapping[str, Any]] = lambda _: {}


def _kept(context: RewriteContext) -> Mapping[str, Any]:
    return {"kept": context.kept}


_INDICES = Rewrite("computing indices in the shape in which they are compared", spread_indices)
_DIVISIONS = Rewrite("moving divisions by the sums of a segment softmax", divide_segments)
_ONLINE = Rewrite("summing a segment softmax online", sum_online, lambda c: c.capabilities.sums_online)

# For a function, and for the body of each loop that stays in the Graph; in this order.
OF_BODIES: Sequence[Rewrite] = (
    Rewrite("merging equal operators", merged),
    _INDICES,
    Rewrite("finding constant indices in order", promise_sorted),
    Rewrite("summing rows of weights and their gradients by results", sum_results),
    Rewrite("folding transpositions into weight gradients", fold_transposes),
    Rewrite("folding transpositions of operands into products", fold_transposed_operands),
    Rewrite("exchanging operands of products to store rows", exchange_operands, lambda c: c.capabilities.stores_rows),
    Rewrite("recomputing attention scores in the backward pass", repeat_scores),
    Rewrite("moving indexing to the other side of products", move_indexing),
    _DIVISIONS,
    Rewrite("folding slices into the weights of a product", fold_slices),
    Rewrite("computing masks from rectified values", masks_of_results),
    Rewrite("cutting operands instead of what is reduced", cut_operands, lambda c: c.capabilities.sums_by_worker),
    Rewrite("reducing outer dimensions before short inner ones", reduce_outer_first, lambda c: c.capabilities.sums_by_worker),
    Rewrite("moving work on constants in front of a loop", move_constants, lambda c: c.capabilities.runs_loops, _kept),
    Rewrite("moving the sums of a loop's steps behind the loop", move_sums, lambda c: c.capabilities.runs_loops, _kept),
    Rewrite(
        "recomputing cheap slices that loops store for each other",
        recompute_cheap_slices,
        lambda c: c.capabilities.runs_loops,
        _kept,
    ),
)
# For a function: those of bodies, and more.
REWRITES: Sequence[Rewrite] = (
    *OF_BODIES,
    Rewrite(
        "moving products behind a loop",
        move_products,
        lambda c: c.capabilities.runs_loops and c.capabilities.most_summed is not None,
        lambda c: {"most": c.capabilities.most_summed, "kept": c.kept},
    ),
    Rewrite("dividing the weight gradients of concatenations", split_gradients, lambda c: c.capabilities.divides_gradients),
    _ONLINE,
    Rewrite("multiplying scores by reciprocals of their statistics", multiply_scores, lambda c: not c.capabilities.sums_by_batch),
    Rewrite(
        "computing scores once for sums over rows and once for sums over columns",
        part_scores,
        lambda c: not c.capabilities.sums_by_batch,
    ),
)
# For a function with long reductions of few rows: its plans are compared with the plans of the result, and the faster ones win.
FEW_ROWS: Sequence[Rewrite] = (
    Rewrite("making the elements of long reductions rows", reductions_as_folds, lambda c: c.capabilities.streams_elements),
    Rewrite(
        "cutting long reductions of few rows into parts",
        split_reductions,
        lambda c: c.capabilities.splits_reductions and not c.capabilities.streams_elements,
        lambda c: {"workers": c.workers},
    ),
)
# For the result, where elements have become rows.
OF_NEW_ROWS: Sequence[Rewrite] = (_INDICES, _DIVISIONS, _ONLINE)


def apply_rewrites(captured: Captured, rewrites: Sequence[Rewrite] = REWRITES, context: RewriteContext = ALWAYS) -> Captured:
    """``captured`` after each of ``rewrites`` that is asked for, in turn."""
    for rewrite in () if context.partitioned else rewrites:
        if not rewrite.when(context):
            continue
        try:
            new = rewrite.run(captured, **rewrite.given(context))
            if new is captured:
                continue
            _check(captured, new)
            new = pruned(new)
        except Exception as e:
            captured = dataclasses.replace(captured, failures=(*captured.failures, Failure.of(e, f"a rewrite ({rewrite.name})")))
        else:
            captured = new
    return captured


def _check(before: Captured, after: Captured) -> None:
    """Raise ``ValueError`` unless ``after`` is valid and has the arguments, results and effects of ``before``."""
    after.graph.validate()
    same_values = after.graph.values[: len(before.graph.values)] == before.graph.values
    checked = set(map(id, before.graph.ops)) if same_values else set()
    for op in after.graph.ops:
        if id(op) not in checked:
            verify_op(op, after.graph.values)
    for ids in ("inputs", "outputs"):
        was, now = ([c.graph.values[v] for v in getattr(c.graph, ids)] for c in (before, after))
        if was != now:
            raise ValueError(f"the {ids} of the graph were {', '.join(map(str, was))} and are {', '.join(map(str, now))}")
    was, now = ([s for s in c.steps if s.has_effects] for c in (before, after))
    if was != now:
        raise ValueError("ops with effects were dropped or have changed their order")
