"""Products of a loop's steps that nothing in the loop waits for are made behind it, all steps at once.

Comes in: a ``Captured`` whose loops have no sums of weights' gradients any more (``loop_sums``). Goes out: the same, where a
product of something that leaves the loop anyway with a constant, of which a step only makes a slice of a result, is one product of
all steps: the gradient of what came in at each step, ``dx = dz W^T``, where dz leaves for the sums. A target asks for it where the
sums of a loop cannot stay on chip: there dz lies in memory, and W takes room of the weights that carries are multiplied with.
Invariants: a loop takes and makes what it did but for such slices; an element of a product is the same sum as before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection
from typing import Any

from kitsune_jax.capture.captured import Captured, Draft, Step, with_params
from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.loops import body_of, parts


def move_products(captured: Captured, most: int, kept: Collection[Any] = ()) -> Captured:
    """Rewrite the loops of ``captured`` whose products have weights of more than ``most`` elements together, but for those at
    ``kept`` places."""
    draft = Draft(captured)
    draft.ops, draft.steps = [], []
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        moved = _movable(op, most) if op.body is not None and step.origin.key not in kept else {}
        draft.ops.append(_without(op, moved) if moved else op)
        draft.steps.append(Step(step.origin, rewritten=True) if moved else step)
        for k, product in moved.items():
            draft.ops.append(_of_all_steps(op, k, product))
            draft.steps.append(Step(step.origin))
    return draft.finish()


def _movable(op: Op, most: int) -> dict[int, Op]:
    """The ys of the loop ``op``, by their numbers, that are products to be made behind it."""
    body, p = body_of(op), parts(op)
    products = [inner for inner in body.ops if inner.kind == "dot_general" and inner.inputs[1] in p.in_consts]
    if sum(body.values[w].size for w in {inner.inputs[1] for inner in products}) <= most:
        return {}
    reads = Counter([*body.outputs, *(v for inner in body.ops for v in inner.inputs)])
    makers = {inner.outputs[0]: inner for inner in products if inner.inputs[0] in p.in_ys and not inner["lhs_batch"]}
    return {k: makers[v] for k, v in enumerate(p.in_ys) if v in makers and reads[v] == 1}


def _without(op: Op, moved: Collection[int]) -> Op:
    """The loop ``op`` without the ys ``moved``."""
    body, p = body_of(op), parts(op)
    kept = [k for k in range(len(p.ys)) if k not in moved]
    outputs = (*p.in_next, *(p.in_ys[k] for k in kept))
    alive, ops = set(outputs), list[Op]()
    for inner in reversed(body.ops):
        if not alive.isdisjoint(inner.outputs):
            alive.update(inner.inputs)
            ops.append(inner)
    consts = [k for k, v in enumerate(p.in_consts) if v in alive]
    new = Graph(body.values, (*(p.in_consts[k] for k in consts), *p.in_carries, *p.in_xs), outputs, tuple(reversed(ops)))
    inputs, outs = (*(p.consts[k] for k in consts), *p.initial, *p.xs), (*p.final, *(p.ys[k] for k in kept))
    return dataclasses.replace(with_params(op, inputs, outs, consts=len(consts)), body=new)


def _of_all_steps(op: Op, k: int, product: Op) -> Op:
    """``product`` of a step of the loop ``op``, whose result is the slice of its y ``k``, for all of them."""
    p = parts(op)
    x = p.ys[p.in_ys.index(product.inputs[0])]
    w = p.consts[p.in_consts.index(product.inputs[1])]
    return with_params(product, (x, w), (p.ys[k],), lhs_contract=tuple(d + 1 for d in product["lhs_contract"]))
