"""What a pointwise operator is in CUDA C++, element by element.

Comes in: the operator, the C++ types of its operands. Goes out: an expression over them. Floats of 16 bits are computed in float,
and a value is rounded to its dtype where it leaves a loop (``loop.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kitsune_jax.graph import Scalar
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr

# The type an element of a dtype is computed in; dtypes that are missing have no code.
COMPUTE = {"float32": "float", "bfloat16": "float", "float16": "float", "int32": "i32", "uint32": "u32", "bool": "bool"}
# Their element type in memory (kitsune::Element).
ELEMENT = {"float32": "float", "bfloat16": "Bf16", "float16": "F16", "int32": "i32", "uint32": "u32", "bool": "bool"}
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint32": 4, "bool": 1}
OPERAND = {"float32": "Tf32", "bfloat16": "Bf16", "float16": "F16"}

# Of all types; and of one class of types only. The op table's own expressions serve what is not here (functions of floats).
_ANY = {
    "max": "maximum({0}, {1})",
    "min": "minimum({0}, {1})",
    "clamp": "clamp({0}, {1}, {2})",
    "select_n": "({0} ? {2} : {1})",
    "sign": "sign({0})",
    "copy": "({0})",
    **{
        kind: f"({{0}} {sign} {{1}})"
        for kind, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    },
}
_FLOAT = {
    "is_finite": "finite({0})",
    "div": "divide({0}, {1})",
    "rem": "remainder_of({0}, {1})",
    "logistic": "logistic({0})",
    "abs": "magnitude({0})",
    "pow": "power({0}, {1})",
}
_INTEGER = {
    "neg": "minus(0, {0})",
    "abs": "magnitude({0})",
    "add": "plus({0}, {1})",
    "sub": "minus({0}, {1})",
    "mul": "times({0}, {1})",
    "square": "times({0}, {0})",
    "div": "divide({0}, {1})",
    "rem": "remainder_of({0}, {1})",
    "not": "(~{0})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "shift_left": "static_cast<{T}>(shift_left(static_cast<u32>({0}), static_cast<u32>({1})))",
    "shift_right_logical": "static_cast<{T}>(shift_right(static_cast<u32>({0}), static_cast<u32>({1})))",
    "shift_right_arithmetic": "static_cast<{T}>(shift_right_sign(static_cast<i32>({0}), static_cast<u32>({1})))",
    "population_count": "static_cast<{T}>(popc(static_cast<u32>({0})))",
    "clz": "static_cast<{T}>(clz(static_cast<u32>({0})))",
}
_UNSIGNED = {
    "neg": "(0u - {0})",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "square": "({0} * {0})",
    "abs": "({0})",
}
_BOOL = {
    "not": "(!{0})",
    "and": "({0} && {1})",
    "or": "({0} || {1})",
    "xor": "({0} != {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
}
_BOOL_ANY = frozenset({"select_n", "copy", "max", "min"})


def expression(kind: str, operands: Sequence[str], out: str, *, coarse: bool = False) -> str | None:
    """The C++ template of ``kind`` on operands of C++ types ``operands``, with a result of type ``out``; None where there is none.

    ``coarse``: the result is rounded to 8 significant bits. Placeholders: ``{0} {1} {2}``, ``{T}`` the operands' type.

    >>> expression("add", ("float", "float"), "float")
    '({0} + {1})'
    """
    of = operands[-1] if kind in ("select_n", "clamp") else operands[0]
    if of == "bool":
        found = _BOOL.get(kind) or (_ANY.get(kind) if kind in _BOOL_ANY else None)
        return found and found.replace("{T}", of)
    if coarse and kind == "logistic":
        return "logistic_coarse({0})"
    if kind in _ANY:
        return _ANY[kind]
    if of == "float":
        if kind == "pow" and operands[1] != "float":
            return "power({0}, static_cast<float>({1}))"
        spec = OPS.get(kind)
        return _FLOAT.get(kind) or (spec.cuda if spec is not None and spec.family == "pointwise" else None)
    if of == "u32" and kind in _UNSIGNED:
        return _UNSIGNED[kind]
    found = _INTEGER.get(kind)
    return found and found.replace("{T}", of)


def convert(value: str, old: str, new: str) -> str:
    """``value`` of C++ type ``old`` as ``new``.

    A float is not rounded to 16 bits on the way to another operator: XLA leaves such roundings out as well (its
    ``xla_allow_excess_precision``, on by default), and a value is rounded where it is kept or stored.
    """
    if old == new:
        return value
    if new == "float":
        return f"({value} ? 1.0f : 0.0f)" if old == "bool" else f"static_cast<float>({value})"
    if new == "bool":
        return f"({value} != 0)"
    return f"to_{new}({value})" if old == "float" else f"static_cast<{new}>({value})"


def instruction(instr: Instr, operands: Sequence[str], types: Sequence[str], out: str, dtype: str) -> str | None:
    """The C++ expression of a pointwise instruction of the tile program; None where there is no code for it."""
    if instr.kind == "convert_element_type":
        return convert(operands[0], types[0], out)
    if instr.kind == "integer_pow":
        y = instr["y"]
        if types[0] == "float" and abs(y) <= 64 or types[0] == "i32" and 0 <= y <= 64:
            return f"integer_power<{y}>({operands[0]})"
        return None
    if instr.kind == "round":
        return f"round_{'even' if instr['method'] == 'even' else 'away'}({operands[0]})" if types[0] == "float" else None
    if instr.kind == "reduce_precision" or instr.kind == "nextafter" and dtype != "float32":
        return None  # they speak of a dtype's bits, which 16-bit values do not have while they are computed with
    template = expression(instr.kind, types, out, coarse=dtype == "bfloat16")
    if template is None:
        return None
    for k, operand in enumerate(operands):
        template = template.replace(f"{{{k}}}", operand)
    return template


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
    return f"{int(value) & 0xFFFFFFFF}u" if type_ == "u32" else f"static_cast<i32>({int(value) & 0xFFFFFFFF}u)"
