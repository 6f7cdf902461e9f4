"""Weight gradients without the transposition that autodiff puts behind them.

Comes in: a ``Builder`` at the end of a walk. Goes out: the same, where ``transpose(dY^T X)`` stands as ``X^T dY``. The product is a
sink of the stream, so its result can be made in either orientation at the same cost, while a transposition behind it would be a
pass over memory. Invariant: every value keeps its shape and meaning, and the step of a rewritten op binds what it bound before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kitsune_jax.capture.builder import Builder, Step
from kitsune_jax.graph import Op, make_params


def fold_transposes(builder: Builder, outputs: Sequence[int]) -> None:
    """Rewrite the transpositions of ``builder`` whose operand is a weight gradient that nothing else reads."""
    reads = Counter([*outputs, *(v for op in builder.ops for v in op.inputs)])
    maker = {v: i for i, op in enumerate(builder.ops) for v in op.outputs}
    for i, op in enumerate(builder.ops):
        if op.kind != "transpose" or reads[op.inputs[0]] > 1 or op.inputs[0] not in maker:
            continue
        first = maker[op.inputs[0]]
        product = builder.ops[first]
        if _is_weight_gradient(builder, product) and op["permutation"] == _exchange(builder, product):
            params = {**dict(product.params), "lhs_contract": product["rhs_contract"], "rhs_contract": product["lhs_contract"]}
            swapped = product.inputs[::-1]
            builder.ops[i] = dataclasses.replace(product, inputs=swapped, outputs=op.outputs, params=make_params(**params))
            builder.steps[i] = _both(builder.steps[first], builder.steps[i])


def _is_weight_gradient(builder: Builder, op: Op) -> bool:
    """Both operands are contracted over leading dimensions: rows, as opposed to the columns of a layer's product."""
    if op.kind != "dot_general" or op["lhs_batch"]:
        return False
    sides = zip(op.inputs, (op["lhs_contract"], op["rhs_contract"]), strict=True)
    return all(set(contract) == set(range(len(contract))) < set(range(len(builder.values[v].shape))) for v, contract in sides)


def _exchange(builder: Builder, op: Op) -> tuple[int, ...]:
    """The permutation that puts the right operand's free dimensions in front of the left one's."""
    left, right = (len(builder.values[v].shape) - len(op["lhs_contract"]) for v in op.inputs)
    return (*range(left, left + right), *range(left))


def _both(product: Step, transpose: Step) -> Step:
    """The step of a swapped product: the equations as they were, on operands in their first order."""

    def evaluate(right: Any, left: Any) -> Sequence[Any]:
        return transpose.run(*product.run(left, right))

    return Step(product.place, evaluate)
