"""Weight gradients without the transposition that autodiff puts behind them.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``transpose(dY^T X)`` stands as ``X^T dY``. The product is a
sink of the stream, so its result can be made in either orientation at the same cost, while a transposition behind it would be a
pass over memory. Invariant: every value keeps its shape and meaning; an element of a gradient is the same sum as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kitsune_jax.capture.captured import Captured, Draft, with_params
from kitsune_jax.graph import Graph, Op, Value


def fold_transposes(captured: Captured) -> Captured:
    """Rewrite the transpositions of ``captured`` whose operand is a weight gradient that nothing else reads."""
    graph, draft = captured.graph, Draft(captured)
    reads = Counter([*graph.outputs, *(v for op in graph.ops for v in op.inputs)])
    maker = graph.producers()
    for i, op in enumerate(graph.ops):
        first = maker.get(op.inputs[0]) if op.kind == "transpose" else None
        if first is None or reads[op.inputs[0]] > 1:
            continue
        product = graph.ops[first]
        if is_weight_gradient(product, graph.values) and op["permutation"] == _exchange(graph, product):
            contract = {"lhs_contract": product["rhs_contract"], "rhs_contract": product["lhs_contract"]}
            draft.ops[i] = with_params(product, product.inputs[::-1], op.outputs, **contract)
            draft.steps[i] = captured.steps[first]
    return draft.finish()


def is_weight_gradient(op: Op, values: Sequence[Value]) -> bool:
    """Both operands are contracted over leading dimensions: rows, as opposed to the columns of a layer's product."""
    if op.kind != "dot_general" or op["lhs_batch"]:
        return False
    sides = zip(op.inputs, (op["lhs_contract"], op["rhs_contract"]), strict=True)
    return all(set(contract) == set(range(len(contract))) < set(range(len(values[v].shape))) for v, contract in sides)


def _exchange(graph: Graph, op: Op) -> tuple[int, ...]:
    """The permutation that puts the right operand's free dimensions in front of the left one's."""
    left, right = (len(graph.values[v].shape) - len(op["lhs_contract"]) for v in op.inputs)
    return (*range(left, left + right), *range(left))
