"""What the CPU target has code for, asked op by op before a region is formed.

Comes in: an op of the Graph with its values. Goes out: None, or the reason in words for the report. Invariant: ops that pass here
never make ``lower`` raise ``CannotLower``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.graph import Graph, Op, Value
from kitsune_jax.ops.spec import is_narrow
from kitsune_jax.ops.table import OPS
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, MAX_LOOP_DIMS
from kitsune_jax.targets.cpu.matmul import MATMUL_DTYPES


def supports(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    """None if the CPU target runs ``op``, else why not.

    Example: ``supports(op, ins, outs)`` of an int32 ``dot_general`` is ``"matrix product of int32 (only floating point)"``.
    """
    for value in (*in_values, *out_values):
        if value.dtype not in DTYPE_CODE:
            return f"dtype {value.dtype}"
        if value.size == 0:
            return "an array without elements"
        if len(value.shape) > MAX_LOOP_DIMS:
            return f"more than {MAX_LOOP_DIMS} dimensions"
    if op.body is not None:
        return _loop(op.body)
    if op.kind == "dot_general":
        return _dot_general(op, in_values, out_values)
    spec = OPS.get(op.kind)
    if spec is None or spec.family == "pointwise" and spec.cpu is None and op.kind != "copy":
        return f"{op.kind} has no code on the CPU"
    if op.kind == "select_n" and len(in_values) != 3:
        return "select_n with more than two cases"
    values = (in_values[0], *in_values[2:]) if spec.family in ("gather", "scatter") else in_values  # without the index
    for dtype in (v.dtype for v in (*values, *(out_values if spec.gives == "any" else ()))):
        if dtype not in spec.dtypes or spec.family == "cumulative" and dtype == "bool":
            return f"{op.kind} of {dtype}"
        if is_narrow(dtype) and not spec.widens(dict(op.params), dtype):
            return f"{op.kind} of {dtype} (16-bit floats are computed in float32)"
    return None


def _loop(body: Graph) -> str | None:
    for op in body.ops:
        why = supports(op, [body.values[v] for v in op.inputs], [body.values[v] for v in op.outputs])
        if why is not None:
            return f"{op.label or op.kind} ({op.source or 'no source line'}): {why}"
    return None


def _dot_general(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    if any(v.literal is not None for v in in_values):
        return "matrix product with a constant (a multiplication by it can be pipelined)"
    lhs, rhs = (v.dtype for v in in_values)
    out, accumulate = out_values[0].dtype, op["accumulate"]
    if lhs != rhs:
        return f"matrix product of {lhs} and {rhs}"
    if lhs not in MATMUL_DTYPES or out not in MATMUL_DTYPES:
        return f"matrix product of {lhs} to {out} (only floating point)"
    wide = "float64" if lhs == "float64" else "float32"
    if (out == "float64") != (lhs == "float64") or accumulate != wide:
        return f"matrix product of {lhs} accumulated in {accumulate}"
    return None
