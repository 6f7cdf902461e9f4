"""16-bit floats that are only chosen between: their bits are moved, and nothing is converted to float32 and back."""

from __future__ import annotations

import numpy as np
import pytest

from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, DTYPES, IN, OPCODE, SCRATCH, CpuRef, CpuVector
from kitsune_jax.targets.cpu.memory import View
from kitsune_jax.targets.cpu.vectors import VectorBuilder


def view(dtype: str, space: int = SCRATCH, offset: int = 0) -> View:
    return View(CpuRef(space, 0, offset, DTYPE_CODE[dtype]), 8, (8,), (1,))


def types(v: CpuVector) -> set[str]:
    """Of all operands and registers."""
    return {DTYPES[t] for t in (*(o.ref.dtype for o in (*v.loads, *v.stores)), *(m.type for m in v.code))}


def chosen(dtype: str, second: str = "", space: int = SCRATCH, scaled: bool = False, number: float | None = None) -> CpuVector:
    """``where(mask, x, y)``: ``y`` of dtype ``second``, or a ``number``; ``x`` in ``space``."""
    b = VectorBuilder((8,))
    mask, x = b.load(view("bool")), b.load(view(dtype, space))
    y = b.load(view(second or dtype, offset=8)) if number is None else b.const(number, dtype)
    if scaled:
        y = b.micro("mul", "float32", y, y)
    b.store(view(dtype, offset=16), b.micro("select", "float32", mask, y, x))
    return b.finish()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_choice_moves_bits(dtype: str) -> None:
    assert types(chosen(dtype)) == {"bool", "uint16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("number", [0.0, -0.0, 1.5, -1e9, float("inf"), float("nan")])
def test_a_number_is_chosen_by_its_bits(dtype: str, number: float) -> None:
    with np.errstate(over="ignore"):
        bits = np.array(number, np_dtype(dtype)).view(np.uint16)
    found = chosen(dtype, number=number)
    assert types(found) == {"bool", "uint16"}
    assert [m.imm for m in found.code if m.op == OPCODE["const"]] == [(float(bits),)]


def test_what_is_computed_or_converted_is_not_moved_as_bits() -> None:
    assert types(chosen("bfloat16", scaled=True)) == {"bool", "bfloat16", "float32"}
    assert types(chosen("bfloat16", second="float16")) == {"bool", "bfloat16", "float16", "float32"}
    assert types(chosen("float32")) == {"bool", "float32"}


def test_operands_of_the_call_keep_their_type() -> None:
    """The program says which dtype each of them has."""
    assert types(chosen("bfloat16", space=IN)) == {"bool", "bfloat16", "float32"}


def test_a_comparison_beside_a_choice_keeps_both_in_float32() -> None:
    b = VectorBuilder((8,))
    x, y = b.load(view("bfloat16")), b.load(view("bfloat16", offset=8))
    b.store(view("bfloat16", offset=16), b.micro("select", "float32", b.micro("lt", "float32", x, y), x, y))
    assert types(b.finish()) == {"bfloat16", "float32"}


def test_a_conversion_to_an_integer_keeps_float32() -> None:
    b = VectorBuilder((8,))
    mask, x, y = b.load(view("bool")), b.load(view("bfloat16")), b.load(view("bfloat16", offset=8))
    b.store(view("bfloat16", offset=16), b.micro("select", "float32", mask, x, y))
    b.store(view("int32", offset=24), b.convert(x, "float32", "int32"))
    assert types(b.finish()) == {"bool", "bfloat16", "float32", "int32"}
