"""What the model of XLA:CPU says of products of few rows, of many small ones, and of folds of bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import xla_model
from kitsune_jax.targets.cpu.planning.machines import cpu_model, times

MACHINE = cpu_model("amx-2")
TIMES = times(MACHINE.profile)


def modelled(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> float:
    return xla_model.modelled(function, [jax.ShapeDtypeStruct(s, dtype) for s in shapes], MACHINE)


@pytest.mark.parametrize("count", [16, 64])
def test_many_products_of_a_batch_are_handed_to_the_threads_once(count: int) -> None:
    # 64 of 64 x 64 x 64 took 194 us, and were 326 when each of them was handed over by itself (float32, Xeon with AMX).
    few, many = (modelled(jnp.matmul, (n, 64, 64), (n, 64, 64)) for n in (2, count))
    each, start = TIMES._xla_dot("float32", 64, 64, 64, "dot")
    assert start > 0 and many - few == pytest.approx((count - 2) * each)


@pytest.mark.parametrize(("rows", "k", "n"), [(16, 512, 512), (1024, 64, 64), (1024, 512, 512)])
def test_a_product_that_was_measured_is_modelled_as_that(rows: int, k: int, n: int) -> None:
    found = modelled(jnp.matmul, (rows, k), (k, n))
    assert 0.6 < found / MACHINE.profile.seconds(f"xla/dot/float32/{rows}x{k}x{n}") < 1.6


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_a_few_rows_take_what_the_weights_take_and_little_for_each_row(rows: int) -> None:
    few, twice = (modelled(jnp.matmul, (n, 512), (512, 512)) for n in (rows, 2 * rows))
    assert 1.0 < twice / few < 2.0


def test_folds_of_bfloat16_convert_what_they_add_up() -> None:
    # 20 000 rows of 64 numbers into 2000 took 277 us instead of 228 (Xeon with AMX).
    def fold(dtype: Any) -> float:
        args = (jax.ShapeDtypeStruct((20_000, 64), dtype), jax.ShapeDtypeStruct((20_000,), jnp.int32))
        return xla_model.modelled(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=2000), args, MACHINE)

    assert 1.02 < fold(jnp.bfloat16) / fold(jnp.float32) < 2.5
    assert TIMES.rounded("float32") == 0.0 < TIMES.rounded("bfloat16")


def test_a_comparison_has_every_case_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is made up: the empty call takes 10 us, any other 10 us and twice what is modelled."""
    asked: list[float] = []

    def measured(functions: Any, workers: int) -> list[float]:
        asked.extend(1e-5 + 2 * xla_model.modelled(f, args, MACHINE) for f, args in functions[1:])
        return [1e-5, *asked]

    monkeypatch.setattr(xla_model, "measured", measured)
    found = xla_model.compare(["batched"], MACHINE)
    assert len(found["batched"]) == 14 and all(math.isclose(s, 2 * m) for _, m, s in found["batched"])
    assert "batched: modelled 0.50 times what it takes (median), off by 2.00 times" in xla_model.text(found)
