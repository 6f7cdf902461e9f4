"""Pointwise instructions to micro-operations.

Comes in: one pointwise instruction of a tile program and the registers of its operands. Goes out: the register of its result.
16-bit floats are computed in float32 without rounding in between; only an explicit conversion to one rounds.
"""

from __future__ import annotations

from kitsune_jax.graph import Param
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cpu.bytecode import OPCODE
from kitsune_jax.targets.cpu.vectors import VectorBuilder, compute_type
from kitsune_jax.targets.errors import CannotLower

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_finite"})
_SPECIAL = frozenset({"convert_element_type", "select_n", "round"})
_ROUNDS = {"away": "round_away", "even": "round_even"}


def is_pointwise(kind: str) -> bool:
    """Whether ``kind`` becomes micro-operations of a ``Vector``."""
    return kind in _SPECIAL or (kind in OPS and OPS[kind].family == "pointwise" and kind != "copy")


def micro_name(kind: str) -> str | None:
    """The micro-operation of a pointwise ``kind`` that has exactly one; None where there is none."""
    name = OPS[kind].cpu if kind in OPS else None
    return name if name in OPCODE else None


def has_micro_op(kind: str) -> bool:
    """Whether ``emit`` has code for the pointwise ``kind``."""
    return kind in _SPECIAL or micro_name(kind) is not None


def emit(builder: VectorBuilder, instr: Instr, args: list[int], dtypes: list[str], out: str, rounds: bool) -> int:
    """Append ``instr`` to ``builder``: ``args`` are its operands' registers, ``dtypes`` their dtypes, ``out`` the result's dtype.

    ``rounds``: whether a conversion to a 16-bit float has to round in the register (a store rounds anyway).
    """
    kind, result = instr.kind, compute_type(out)
    if kind == "convert_element_type":
        return _convert(builder, args[0], dtypes[0], out, rounds)
    if kind == "select_n":
        pred = builder.convert(args[0], compute_type(dtypes[0]), "bool")
        return builder.micro("select", result, pred, *args[1:])
    if kind == "round":
        return builder.micro(_ROUNDS[instr["method"]], result, args[0])
    name = micro_name(kind)
    if name is None:
        raise CannotLower(f"{kind} has no micro-operation on the CPU")
    kind_type = compute_type(dtypes[0]) if kind in COMPARISONS else result
    args = [builder.convert(x, compute_type(t), kind_type) for x, t in zip(args, dtypes, strict=True)]
    return builder.micro(name, kind_type, *args, imm=_immediates(instr))


def _convert(builder: VectorBuilder, x: int, source: str, out: str, rounds: bool) -> int:
    x = builder.convert(x, compute_type(source), compute_type(out))
    return builder.rounded(x, out) if rounds and source != out else x


def _immediates(instr: Instr) -> tuple[float, ...]:
    names: dict[str, tuple[str, ...]] = {"integer_pow": ("y",), "reduce_precision": ("exponent_bits", "mantissa_bits")}
    values: list[Param] = [instr[name] for name in names.get(instr.kind, ())]
    return tuple(float(v) for v in values)
