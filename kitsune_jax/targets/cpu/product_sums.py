"""Sums of two products of float32, of which the second adds to what the first has stored: ``x @ a + h @ b`` of a recurrent cell.

Comes in: a stage's body, as ``Flow``, whose biases stand before such sums (``with_biases_first``). Goes out: the sums, by their
products. Only products of whole rows are joined (everything but the rows is contracted), so both see the same matrix of results.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import Instr
from kitsune_jax.program.passes.flow import Flow

_SAME = ("x_contract", "w_contract", "x_batch", "w_batch", "out_perm")


@dataclasses.dataclass(frozen=True, slots=True)
class ProductSum:
    """``result`` = the product of instruction ``first`` + that of ``second``, a later one; ``add`` is the addition's number."""

    result: int
    first: int
    second: int
    add: int


def product_sums(flow: Flow) -> dict[int, ProductSum]:
    """The sums of two products in ``flow``'s body, by the number of each of the two."""
    number = {v: i for i, instr in enumerate(flow.body) for v in instr.outputs}
    found: dict[int, ProductSum] = {}
    for j, instr in enumerate(flow.body):
        if instr.kind != "add" or any(flow.uses.get(v) != [(j, p)] for p, v in enumerate(instr.inputs)):
            continue
        first, second = sorted(number.get(v, -1) for v in instr.inputs)
        if first >= 0 and _joined(flow, flow.body[first], flow.body[second]):
            found[first] = found[second] = ProductSum(instr.outputs[0], first, second, j)
    return found


def _joined(flow: Flow, a: Instr, b: Instr) -> bool:
    return (
        a.kind == b.kind == "matmul"
        and all(_plain(flow, m) for m in (a, b))
        and flow.type(a.outputs[0]) == flow.type(b.outputs[0])
        and all(a[name] == b[name] for name in _SAME)
    )


def _plain(flow: Flow, product: Instr) -> bool:
    x, w = (flow.type(v) for v in product.inputs[:2])
    return (
        x.tile
        and not w.tile
        and {x.dtype, w.dtype, flow.dtype(product.outputs[0])} == {"float32"}
        and len(product["x_contract"]) == len(x.shape)
        and not product["x_batch"]
        and product.get("activation", "none") == "none"
    )
