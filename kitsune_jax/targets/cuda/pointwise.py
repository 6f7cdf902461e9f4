"""Pointwise operators as CUDA C++ expressions of one element.

Comes in: the operator and the C++ types of its operands. Goes out: an expression. 16-bit floats are computed in float. A value is
rounded to its dtype where it leaves a loop (``ir.Keep``), or earlier if another operator reads its digits
(``stage/simplify.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from kitsune_jax.ops.graph import Scalar
from kitsune_jax.ops.spec import HAND_ON, is_narrow
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr

# The type an element of a dtype is computed in; dtypes that are missing have no code.
COMPUTE = {"float32": "float", "bfloat16": "float", "float16": "float", "int32": "i32", "uint32": "u32", "bool": "bool"}
# Their element type in memory (kitsune::Element).
ELEMENT = {"float32": "float", "bfloat16": "Bf16", "float16": "F16", "int32": "i32", "uint32": "u32", "bool": "bool"}
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint32": 4, "bool": 1}
OPERAND = {"float32": "Tf32", "bfloat16": "Bf16", "float16": "F16"}
# float32 operators in a form that the compiler neither contracts with others nor computes in other steps.
_ROUNDED = {"add": "add_rounded({0}, {1})", "sub": "add_rounded({0}, -({1}))", "mul": "mul_rounded({0}, {1})"}
# Rounding to 16 bits and back. A bfloat16 is the upper half of a float, so one instruction packs it in front of zeros.
_NARROWED = {"bfloat16": "from_bits(pack<Bf16>(0.0f, {0}))", "float16": "rounded_to<F16>({0})"}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def convert(value: str, old: str, new: str) -> str:
    """``value`` of C++ type ``old`` as ``new``.

    A conversion to a 16-bit float does not round, as XLA too omits it where a conversion back follows
    (``xla_allow_excess_precision``, on by default). ``rounded`` rounds where a 16-bit operator reads the value.
    """
    if old == new:
        return value
    if new == "float":
        return f"({value} ? 1.0f : 0.0f)" if old == "bool" else f"static_cast<float>({value})"
    if new == "bool":
        return f"({value} != 0)"
    return f"to_{new}({value})" if old == "float" else f"static_cast<{new}>({value})"


def instruction(instr: Instr, operands: Sequence[str], types: Sequence[str], out: str, dtype: str) -> str | None:
    """The C++ expression of a pointwise instruction; None where there is no code for it. ``types``: C++ types of the operands;
    ``out``, ``dtype``: C++ type and dtype of the result."""
    if instr.kind == "convert_element_type":
        return convert(operands[0], types[0], out)
    spec, params = OPS.get(instr.kind), dict(instr.params)
    of = types[0] if spec is None or spec.gives else out
    if spec is None or of not in map(COMPUTE.get, spec.dtypes) or is_narrow(dtype) and not spec.widens(params, dtype):
        return None
    coarse = spec.cuda.get("coarse") if dtype == "bfloat16" else None
    code = coarse or spec.cuda.get(of) or spec.cuda.get("any")
    template = code(params) if callable(code) else code
    if template is None:
        return None
    names = {**params, "T": types[0], "R": out, **{str(k): x for k, x in enumerate(operands)}}
    return _PLACEHOLDER.sub(lambda found: str(names[found[1]]), template)


def rounded(kind: str, template: str, dtype: str) -> str:
    """The expression ``template`` of an operator ``kind`` with a result that has the same bits in every context: one of 16 bits is
    rounded, one of float32 is kept out of fused multiply-adds.

    >>> rounded("mul", "({0} * {1})", "float32"), rounded("exp", "expf({0})", "bfloat16"), rounded("neg", "(-{0})", "float16")
    ('mul_rounded({0}, {1})', 'from_bits(pack<Bf16>(0.0f, expf({0})))', '(-{0})')
    """
    if kind in HAND_ON or dtype not in OPERAND:
        return template
    if is_narrow(dtype):
        return _NARROWED[dtype].replace("{0}", template)
    return _ROUNDED.get(kind) or (template if kind == "convert_element_type" else f"add_rounded({template}, -0.0f)")


def literal(value: Scalar, type_: str) -> str:
    """A constant of a C++ type.

    >>> literal(0.5, "float"), literal(float("-inf"), "float"), literal(True, "bool")
    ('0.5f', 'from_bits(0xff800000u)', 'true')
    """
    if type_ == "bool":
        return "true" if value else "false"
    if type_ == "float":
        bits = int(np.float32(value).view(np.uint32))
        text = repr(float(np.float32(value)))
        return f"{text}f" if np.isfinite(np.float32(value)) and "e" not in text else f"from_bits(0x{bits:08x}u)"
    if type_ == "u32":
        return f"{int(value) & 0xFFFFFFFF}u"
    return str(int(value)) if 0 <= int(value) < 1 << 31 else f"static_cast<i32>({int(value) & 0xFFFFFFFF}u)"
