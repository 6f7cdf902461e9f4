"""Rewrites of a captured function, each checked before the next one sees its result.

Comes in: a ``Captured``. Goes out: an equal function that streams better. Invariants: a rewrite is a pure function of a
``Captured`` that gives its argument back where it changes nothing; one that fails, or makes a graph that is not valid, is as if it
had not run, and is reported as a ``Failure``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kitsune_jax.capture.edit import Captured, pruned
from kitsune_jax.capture.rewrites.attention_scores import multiply_scores, part_scores, repeat_scores
from kitsune_jax.capture.rewrites.loops import hand_less, move_constants, move_products, move_sums
from kitsune_jax.capture.rewrites.products import (
    allow_any_order,
    fold_slices,
    fold_transposes,
    masks_of_results,
    move_indexing,
    split_gradients,
    spread_indices,
)
from kitsune_jax.capture.rewrites.segment_softmax import divide_segments, sum_online
from kitsune_jax.errors import Failure
from kitsune_jax.ops.table import verify_op

Rewriting = Callable[[Captured], Captured]

_INDICES: tuple[str, Rewriting] = ("making indices where they are compared", spread_indices)
_DIVISIONS: tuple[str, Rewriting] = ("moving divisions by the sums of a segment softmax", divide_segments)
REWRITES: Sequence[tuple[str, Rewriting]] = (
    _INDICES,
    ("folding transpositions into weight gradients", fold_transposes),
    ("making scores again behind the attention they are of", repeat_scores),
    ("moving indexing to the other side of products", move_indexing),
    _DIVISIONS,
    ("folding slices into the weights of a product", fold_slices),
    ("reading the masks of rectified values off the results", masks_of_results),
)
ONLINE: tuple[str, Rewriting] = ("making the sums of a segment softmax online", sum_online)
UNORDERED: tuple[str, Rewriting] = ("letting sums by index run in any order", allow_any_order)
OF_ROWS: Sequence[tuple[str, Rewriting]] = (_INDICES, _DIVISIONS, ONLINE)  # once elements have become rows
PARTS: tuple[str, Rewriting] = ("dividing the weight gradients of concatenations", split_gradients)
APART: Sequence[tuple[str, Rewriting]] = (
    ("multiplying scores by the reciprocals of what they are divided by", multiply_scores),
    ("making scores once for sums over their rows and once for those over their columns", part_scores),
)


def of_loops(kept: Collection[Any]) -> Sequence[tuple[str, Rewriting]]:
    """The rewrites of loops, but for those whose ``Origin.key`` is among ``kept``: they stay as they are."""
    return (
        ("moving what a loop makes of its constants in front of the loop", functools.partial(move_constants, kept=kept)),
        ("moving the sums of a loop's steps behind the loop", functools.partial(move_sums, kept=kept)),
        ("making again what loops hand to each other", functools.partial(hand_less, kept=kept)),
    )


def behind_loops(most: int, kept: Collection[Any]) -> tuple[str, Rewriting]:
    """The rewrite of loops that multiply with more than ``most`` elements of weights, but for those at ``kept`` places."""
    return "moving products behind a loop", functools.partial(move_products, most=most, kept=kept)


def rewritten(captured: Captured, rewrites: Sequence[tuple[str, Rewriting]] = REWRITES) -> Captured:
    """``captured`` after each rewrite in turn."""
    for name, rewrite in rewrites:
        try:
            new = rewrite(captured)
            if new is captured:
                continue
            _check(captured, new)
            new = pruned(new)
        except Exception as e:
            captured = dataclasses.replace(captured, failures=(*captured.failures, Failure.of(e, f"a rewrite ({name})")))
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
