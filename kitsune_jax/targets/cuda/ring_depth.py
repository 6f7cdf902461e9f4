"""Chunks that the ring of streamed weights must hold, or lanes wait for ever.

Comes in: the nodes of a stage. Goes out: a number of chunks. A slot is loaded again when every lane of the CTA has given its chunk
back, so two things must fit: what a lane holds at once of the products that it has in flight; and, where lanes take turns, what one
multiplies with in a turn, because the others give nothing of that back before they have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.device_ir import Node

ROLLING_GROUP = 2  # blocks of K between two waits of a rolling product (``Product::kGroup``)


def least(nodes: Iterable[Node]) -> int:
    """Chunks without which a round of a stage with ``nodes`` does not come to its end; 0 where no weights are streamed."""
    events = list(_events(nodes))
    return max(_held(events), _turn(events))


def _events(nodes: Iterable[Node]) -> Iterator[Node]:
    """Products, waits and turns in the order of the code; loops twice, because an iteration meets what the one before has left."""
    for node in nodes:
        if isinstance(node, st.CountedLoop | st.LayerLoop):
            body = list(_events(node.body))
            yield from (*body, *body)
        elif isinstance(node, st.Complete | st.Turn) or (isinstance(node, st.Issue) and node.weights is None):
            yield node


def _held(events: Sequence[Node]) -> int:
    """Chunks of the products that a lane has in flight, at most."""
    most, flying = 0, dict[object, int]()
    for node in events:
        if isinstance(node, st.Issue):
            held, left = _rolled(node) if node.rolling else (node.k_chunks, node.k_chunks)
            most = max(most, sum(flying.values()) + held)
            flying[node.ref] = left
        elif isinstance(node, st.Complete):
            flying.pop(node.ref, None)
    return most


def _rolled(issue: st.Issue) -> tuple[int, int]:
    """Chunks that a product holds which waits as it goes, at most and at its end (``feed_rolling``, ``step_fetched``)."""
    per, held, end, given = 2 if tiles.is_half(issue.dtype) else 1, 0, 0, 0
    for operand, first, done in issue.feeds:
        blocks = tiles.blocks(operand.width)
        for start in range(0, blocks, ROLLING_GROUP):
            end, given = first + min(start + ROLLING_GROUP, blocks), done // per
            held = max(held, -(-end // per) - given)
            done = end if operand.fetched else first + start
            given = done // per
    return held, -(-end // per) - given


def _turn(events: Sequence[Node]) -> int:
    """Chunks that a lane multiplies with while it has its turn, at most."""
    most = own = 0
    has_turn = False
    for node in events:
        if isinstance(node, st.Turn):
            has_turn, own = node.what == "take", 0
        elif isinstance(node, st.Issue) and has_turn:
            own += node.k_chunks
            most = max(most, own)
    return most
