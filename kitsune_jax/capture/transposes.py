"""Weight gradients without the transposition that autodiff puts behind them.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``transpose(dY^T X)`` stands as ``X^T dY``. The product is a
sink of the stream, so its result can be made in either orientation at the same cost, while a transposition behind it would be a
pass over memory. Invariant: every value keeps its shape and meaning, and the step of a rewritten op binds what it bound before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kitsune_jax.capture.builder import Captured, Step
from kitsune_jax.graph import Graph, Op, make_params


def fold_transposes(captured: Captured) -> Captured:
    """Rewrite the transpositions of ``captured`` whose operand is a weight gradient that nothing else reads."""
    graph = captured.graph
    reads = Counter([*graph.outputs, *(v for op in graph.ops for v in op.inputs)])
    maker = graph.producers()
    ops, steps = list(graph.ops), list(captured.steps)
    for i, op in enumerate(graph.ops):
        first = maker.get(op.inputs[0]) if op.kind == "transpose" else None
        if first is None or reads[op.inputs[0]] > 1:
            continue
        product = graph.ops[first]
        if _is_weight_gradient(graph, product) and op["permutation"] == _exchange(graph, product):
            params = {**dict(product.params), "lhs_contract": product["rhs_contract"], "rhs_contract": product["lhs_contract"]}
            swapped = product.inputs[::-1]
            ops[i] = dataclasses.replace(product, inputs=swapped, outputs=op.outputs, params=make_params(**params))
            steps[i] = _both(captured.steps[first], captured.steps[i])
    if tuple(ops) == graph.ops:
        return captured
    return dataclasses.replace(captured, graph=dataclasses.replace(graph, ops=tuple(ops)), steps=tuple(steps))


def _is_weight_gradient(graph: Graph, op: Op) -> bool:
    """Both operands are contracted over leading dimensions: rows, as opposed to the columns of a layer's product."""
    if op.kind != "dot_general" or op["lhs_batch"]:
        return False
    sides = zip(op.inputs, (op["lhs_contract"], op["rhs_contract"]), strict=True)
    return all(set(contract) == set(range(len(contract))) < set(range(len(graph.values[v].shape))) for v, contract in sides)


def _exchange(graph: Graph, op: Op) -> tuple[int, ...]:
    """The permutation that puts the right operand's free dimensions in front of the left one's."""
    left, right = (len(graph.values[v].shape) - len(op["lhs_contract"]) for v in op.inputs)
    return (*range(left, left + right), *range(left))


def _both(product: Step, transpose: Step) -> Step:
    """The step of a swapped product: the equations as they were, on operands in their first order."""

    def evaluate(right: Any, left: Any) -> Sequence[Any]:
        return transpose.run(*product.run(left, right))

    return Step(product.place, evaluate)
