"""Pointwise instructions to micro-operations.

Comes in: one pointwise instruction of a tile program and the registers of its operands. Goes out: the register of its result.
16-bit floats are computed in float32; ``exact`` says which of them are rounded before the next operation reads them.
"""

from __future__ import annotations

from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cpu.philox import emit_element
from kitsune_jax.targets.cpu.vectors import VectorBuilder, compute_type
from kitsune_jax.targets.errors import CannotLower


def is_pointwise(kind: str) -> bool:
    """Whether ``kind`` becomes micro-operations of a ``Vector``."""
    return kind in OPS and OPS[kind].family in ("pointwise", "convert") and kind != "copy"


def emit(builder: VectorBuilder, instr: Instr, args: list[int], dtypes: list[str], out: str, rounds: bool) -> int:
    """Append ``instr`` to ``builder``: ``args`` are its operands' registers, ``dtypes`` their dtypes, ``out`` the result's dtype.

    ``rounds``: whether a conversion to a 16-bit float has to round in the register (a store rounds anyway).
    """
    spec, params, result = OPS[instr.kind], dict(instr.params), compute_type(out)
    if spec.family == "convert":
        return _convert(builder, args[0], dtypes[0], out, rounds)
    if spec.cpu is None:
        raise CannotLower(f"{instr.kind} has no micro-operation on the CPU")
    if spec.gives == "any":  # the operand as it is
        return builder.micro(spec.cpu, result, *args, from_type=compute_type(dtypes[0]))
    types = [compute_type(dtypes[0]) if spec.gives else result] * len(args)
    if instr.kind == "select_n":
        types[0] = "bool"
    if instr.kind == "philox4x32":
        return emit_element(builder, args)
    args = [builder.convert(x, compute_type(t), to) for x, t, to in zip(args, dtypes, types, strict=True)]
    return builder.micro(spec.cpu.format(**params), types[-1], *args, imm=tuple(float(params[name]) for name in spec.immediates))


def _convert(builder: VectorBuilder, x: int, source: str, out: str, rounds: bool) -> int:
    x = builder.convert(x, compute_type(source), compute_type(out))
    return builder.rounded(x, out) if rounds and source != out else x
