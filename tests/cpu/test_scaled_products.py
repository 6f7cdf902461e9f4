"""Products times a constant: the constant is a product's activation where the result lies in memory in any case."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.lowered import ROW, array, close, run
from tests.support.tiles import Tiles

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def scaled(rows: int, factor: float, dtype: str = "float32", kind: str = "mul", then: str = "max") -> Tiles:
    """max(x @ w * factor) of each row; or, with ``then``, another function of the product."""
    t = Tiles((rows,), 8)
    y = t.matmul(t.load((rows, 19), dtype, ROW), t.load((19, 45), dtype))
    y = t.op(kind, y, t.literal(factor, dtype)) if kind != "neg" else t.op("neg", y)
    if then == "max":
        t.store(t.reduce("max", y, (1,)), (rows,), ROW[:1])
    else:
        t.store(t.op(then, y), (rows, 45), ROW)
    return t


def product(t: Tiles) -> bc.Matmul:
    (found,) = (i for i in lower_program(t.program(), "test").stages[0].body if isinstance(i, bc.Matmul))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind,factor", [("mul", 0.125), ("mul", 0.08837890625), ("mul", -3.0), ("div", 8.0), ("neg", -1.0)])
@pytest.mark.parametrize("rows", [1, 37])
def test_the_product_scales_its_sums(rows: int, kind: str, factor: float, dtype: str) -> None:
    t = scaled(rows, factor, dtype, kind)
    wanted = 1 / factor if kind == "div" else factor
    assert bc.ACTIVATIONS[product(t).activation] == "scale" and product(t).parameters == (wanted,)
    x, w = array(rows, 19, dtype=DTYPES[dtype]), array(19, 45, dtype=DTYPES[dtype])
    (got,) = run(t.program(), x, w)
    sums = (x.astype(np.float64) @ w.astype(np.float64)).astype(np.float32).astype(DTYPES[dtype])
    each = (sums.astype(np.float64) * wanted).astype(DTYPES[dtype])
    close(got, each.max(1), {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype])


def test_what_only_elementwise_instructions_read_is_scaled_in_their_registers() -> None:
    t = scaled(21, 0.5, then="tanh")
    assert bc.ACTIVATIONS[product(t).activation] == "none"
    x, w = array(21, 19), array(19, 45)
    close(run(t.program(), x, w)[0], np.tanh(0.5 * (x @ w)), 1e-5)


@pytest.mark.parametrize("kind,factor", [("div", 3.0), ("add", 2.0), ("mul", 0.0), ("mul", float("inf"))])
def test_other_operators_stay_as_they_are(kind: str, factor: float) -> None:
    """A quotient by 3 has other bits than a product with a third, and 0 times an infinity is NaN."""
    assert bc.ACTIVATIONS[product(scaled(21, factor, kind=kind)).activation] == "none"
