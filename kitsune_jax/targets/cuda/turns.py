"""Lanes that take turns: while one multiplies, the others do what stands between their products.

Comes in: the nodes of a stage whose loop has two products or more, one after the other (the scores of attention, and their product
with the values). Goes out: the same with ``Turn``s, as FlashAttention-3 has them (named barriers, arXiv 2407.08608, section 3.1): a
lane has its turn from the second product of an iteration to the first of the next one, and the softmax between the two runs under
the products of the other lanes. All lanes of the CTA must run the same loops as often; those on tiles of one batch do. Without
turns the lanes would multiply at the same time, and then all be in their softmax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Node


def with_turns(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], bool]:
    """``nodes``, and whether there was a loop in which to take turns."""
    found: list[Node] = []
    for node in nodes:
        body = _body(node.body) if isinstance(node, st.CountedLoop) else None
        if body is None:
            found.append(node)
        else:
            assert isinstance(node, st.CountedLoop)
            found += [st.Turn("take"), dataclasses.replace(node, body=body), st.Turn("give")]
    return tuple(found), len(found) > len(nodes)


def _body(body: Sequence[Node]) -> tuple[Node, ...] | None:
    """The body of a loop, entered with the turn and left with it; None where it has less than two products."""
    products = [(k, node.weight) for k, node in enumerate(body) if isinstance(node, st.Issue)]
    first = [k for k, weight in products if weight == products[0][1]]
    later = [k for k, weight in products if weight != products[0][1]]
    if not later or later[0] < first[-1]:
        return None
    return (*body[: first[-1] + 1], st.Turn("give"), *body[first[-1] + 1 : later[0]], st.Turn("take"), *body[later[0] :])
