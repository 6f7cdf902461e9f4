"""What the CUDA target has code for, asked op by op before a region is formed.

Comes in: an op of the Graph with its values. Goes out: None, or the reason in words for the report. It speaks of what can be known
from one op; ``check`` has the last word on a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.graph import Graph, Op, Value
from kitsune_jax.ops.indexing import INDEXED
from kitsune_jax.ops.loops import parts
from kitsune_jax.ops.online import ONLINE
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import pointwise
from kitsune_jax.targets.cuda.instructions import REDUCTIONS

# tf32 is what JAX means by the default precision of a float32 product on a GPU.
_TF32_PRECISIONS = (None, "DEFAULT")


def supports(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    """None if the CUDA target runs ``op``, else why not."""
    for value in (*in_values, *out_values):
        if value.dtype not in pointwise.COMPUTE:
            return f"{value.dtype} has no code on the GPU"
        if value.size == 0:
            return "an array without elements"
    if op.kind in INDEXED or op.kind in ONLINE:  # what streams is not known of one op; an index that does says rows of a table
        return None
    if op.body is not None:
        return _loop(op.body)
    if op.kind == "dot_general":
        return _dot_general(op, in_values, out_values)
    spec = OPS.get(op.kind)
    if spec is None or not spec.moves and spec.family not in ("pointwise", "convert") and op.kind not in REDUCTIONS:
        return f"{op.kind} has no code on the GPU"
    return None if spec.moves or op.kind in REDUCTIONS else _pointwise(op, in_values, out_values)


def _loop(body: Graph) -> str | None:
    """What keeps a loop's body from running inside a kernel, and the line that it is on."""
    for op in body.ops:
        why = supports(op, [body.values[v] for v in op.inputs], [body.values[v] for v in op.outputs])
        if why is None and op.body is not None and (parts(op).xs or parts(op).ys):
            why = "a loop inside of it that takes or gives slices"
        if why is not None:
            return f"{op.label or op.kind} ({op.source}): {why}" if op.source else why
    return None


def _pointwise(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    if op.kind == "select_n" and len(in_values) != 3:
        return "select_n with more than two cases"
    if op.kind == "select_n" and in_values[0].dtype != "bool":
        return "select_n by an integer has no code on the GPU"
    instr = Instr(op.kind, op.inputs, op.outputs, op.params)
    types = [pointwise.COMPUTE[v.dtype] for v in in_values]
    out = out_values[0].dtype
    operands = [f"x{k}" for k in range(len(types))]
    if pointwise.instruction(instr, operands, types, pointwise.COMPUTE[out], out) is None:
        return f"{op.kind} of {in_values[0].dtype} has no code on the GPU"
    return None


def _dot_general(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    lhs, rhs = (v.dtype for v in in_values)
    if lhs != rhs or lhs not in pointwise.OPERAND:
        return f"matrix product of {lhs} and {rhs} has no code on the GPU"
    if op["accumulate"] != "float32":
        return f"matrix product accumulated in {op['accumulate']} has no code on the GPU"
    if lhs == "float32" and op["precision"] not in _TF32_PRECISIONS:
        return f"matrix product of float32 at precision {op['precision']}: the tensor cores round to tf32"
    return None
