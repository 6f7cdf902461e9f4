"""Weight gradients without the transposition that autodiff puts behind them.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``transpose(dY^T X)`` stands as ``X^T dY``. The product is a
sink of the stream, so its result can be made in either orientation at the same cost, while a transposition behind it would be a
pass over memory. The gradient of a matrix that belongs to a row (an expert's weight, taken for each token) is an outer product
for each row, ``transpose(spread(y) * spread(x))``: its operands are spread in the order of the result instead. Invariant: every
value keeps its shape and meaning; an element of a gradient is the same sum or product as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kitsune_jax.capture.captured import Captured, Draft, Step, with_params
from kitsune_jax.graph import Graph, Op, Value


def fold_transposes(captured: Captured) -> Captured:
    """Rewrite the transpositions of ``captured`` whose operand, a weight gradient or an outer product, nothing else reads."""
    graph, draft = captured.graph, Draft(captured)
    before: dict[int, list[tuple[Op, Step]]] = {}
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
        elif product.kind == "mul" and (spreads := _spreads(graph, maker, product, op["permutation"])) is not None:
            inputs, shape = list(product.inputs), graph.values[op.outputs[0]].shape
            for k, (spread, dims) in spreads.items():
                inputs[k] = draft.value(inputs[k], shape)
                other = with_params(graph.ops[spread], graph.ops[spread].inputs, (inputs[k],), shape=shape, dims=dims)
                before.setdefault(i, []).append((other, captured.steps[spread]))
            draft.ops[i] = with_params(product, inputs, op.outputs)
            draft.steps[i] = captured.steps[first]
    return draft.finish(before)


def _spreads(
    graph: Graph, maker: Mapping[int, int], product: Op, permutation: Sequence[int]
) -> dict[int, tuple[int, tuple[int, ...]]] | None:
    """For each operand of ``product`` that is no number, the op that spreads it and where its dimensions come in the transposed
    product; None where one is not spread, or would have to be transposed itself."""
    found = {}
    for k, v in enumerate(product.inputs):
        if not graph.values[v].shape:
            continue
        spread = maker.get(v)
        if spread is None or graph.ops[spread].kind != "broadcast_in_dim":
            return None
        dims = tuple(permutation.index(d) for d in graph.ops[spread]["dims"])
        if dims != tuple(sorted(dims)):
            return None
        found[k] = spread, dims
    return found


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
