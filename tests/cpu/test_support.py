"""The reasons the CPU target gives for what it has no code for."""

from __future__ import annotations

import pytest

from kitsune_jax.ops.graph import Op, Value, make_params
from kitsune_jax.ops.table import OPS
from kitsune_jax.targets.cpu.target import supports


def ask(kind: str, dtypes: tuple[str, ...], out: str, shape: tuple[int, ...] = (4, 3), **params: object) -> str | None:
    op = Op(kind, tuple(range(len(dtypes))), (len(dtypes),), make_params(**params))
    return supports(op, [Value(shape, d) for d in dtypes], [Value(shape, out)])


@pytest.mark.parametrize(
    "kind,dtypes,out,reason",
    [
        ("add", ("complex64", "complex64"), "complex64", "complex64"),
        ("sort", ("float32",), "float32", "sort"),
        ("nextafter", ("bfloat16", "bfloat16"), "bfloat16", "nextafter of bfloat16"),
        ("select_n", ("int32", "float32", "float32", "float32"), "float32", "two cases"),
        ("bitcast_convert_type", ("int16",), "bfloat16", "bitcast_convert_type of bfloat16"),
        ("cumsum", ("bool",), "bool", "cumsum of bool"),
    ],
)
def test_refused(kind: str, dtypes: tuple[str, ...], out: str, reason: str) -> None:
    assert reason in (ask(kind, dtypes, out) or "")


def test_sizes_and_ranks() -> None:
    assert "without elements" in (ask("exp", ("float32",), "float32", (0, 3)) or "")
    assert "dimensions" in (ask("exp", ("float32",), "float32", (1,) * 9) or "")


@pytest.mark.parametrize(
    "lhs,rhs,out,accumulate,fine",
    [
        ("float32", "float32", "float32", "float32", True),
        ("bfloat16", "bfloat16", "bfloat16", "float32", True),
        ("bfloat16", "bfloat16", "float32", "float32", True),
        ("float64", "float64", "float64", "float64", True),
        ("int32", "int32", "int32", "int32", False),
        ("bfloat16", "float32", "float32", "float32", False),
        ("float32", "float32", "float64", "float64", False),
        ("float64", "float64", "float32", "float32", False),
    ],
)
def test_matrix_products(lhs: str, rhs: str, out: str, accumulate: str, fine: bool) -> None:
    reason = ask("dot_general", (lhs, rhs), out, accumulate=accumulate)
    assert (reason is None) == fine, reason
    assert fine or "matrix product" in (reason or "")


def test_every_kind_of_the_table_is_supported() -> None:
    refused = set()
    for kind, spec in OPS.items():
        if spec.family == "dot":
            continue
        dtype = "float32" if "float32" in spec.dtypes else spec.dtypes[-1]
        if ask(kind, (dtype,) * (spec.arity or 3), dtype) is not None:
            refused.add(kind)
    assert refused == set()
