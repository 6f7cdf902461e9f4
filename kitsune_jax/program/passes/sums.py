"""A bias that is added to the sum of two products is added to one of them instead, which takes it for nothing.

Comes in: a ``TileProgram``, best a ``simplified`` one. Goes out: one in which ``(x @ a + h @ b) + bias`` is ``(x @ a + bias) +
h @ b`` where nobody else reads the sum or the products, in float32. For ``with_epilogues`` behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.program.passes.epilogues import bias_of
from kitsune_jax.program.passes.flow import Flow


def with_biases_first(program: TileProgram) -> TileProgram:
    """``program`` with biases of sums of products moved to the products."""
    values = list(program.values)

    def body_of(body: Sequence[Instr], results: Sequence[int], around: Mapping[int, Instr]) -> tuple[Instr, ...]:
        flow = Flow(program, body, results)
        makers = {**around, **flow.makers}
        moved = {j: found for j, instr in enumerate(body) if (found := _match(flow, makers, program, j, instr)) is not None}
        gone = {id(sums) for sums, *_ in moved.values()}
        out: list[Instr] = []
        for j, instr in enumerate(body):
            if instr.block is not None:
                inner = body_of(instr.block.body, instr.block.results, makers)
                instr = dataclasses.replace(instr, block=dataclasses.replace(instr.block, body=inner))
            if j in moved:
                _, product, bias, other = moved[j]
                values.append(flow.type(product))
                out.append(dataclasses.replace(instr, inputs=(product, bias), outputs=(len(values) - 1,)))
                out.append(dataclasses.replace(instr, inputs=(len(values) - 1, other)))
            elif id(instr) not in gone:
                out.append(instr)
        return tuple(out)

    stages = tuple(dataclasses.replace(s, body=body_of(s.body, (), {})) for s in program.stages)
    return dataclasses.replace(program, stages=stages, values=tuple(values))


def _match(
    flow: Flow, makers: Mapping[int, Instr], program: TileProgram, j: int, instr: Instr
) -> tuple[Instr, int, int, int] | None:
    """Of ``instr`` = (product + other) + bias: the inner addition, the product, the bias, the other product."""
    if instr.kind != "add" or flow.dtype(instr.outputs[0]) != "float32":
        return None
    for p, (v, bias) in enumerate((instr.inputs, instr.inputs[::-1])):
        inner = flow.makers.get(v)
        if inner is None or inner.kind != "add" or flow.uses.get(v) != [(j, p)]:
            continue
        products = [flow.makers.get(u) for u in inner.inputs]
        if any(m is None or m.kind != "matmul" or len(flow.uses.get(m.outputs[0], ())) != 1 for m in products):
            continue
        first = products[0]
        assert first is not None
        same = flow.type(first.outputs[0]) == flow.type(v) == flow.type(instr.outputs[0])
        if same and len(first.inputs) == 2 and bias_of(flow, makers, program, bias, first) is not None:
            return inner, inner.inputs[0], bias, inner.inputs[1]
    return None
