"""The order of a stream by ids: the CPU's custom call and every target's default, against NumPy's stable sort."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kitsune_jax.targets import Target
from kitsune_jax.targets.cpu.target import CPU

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")


def expected(ids: np.ndarray, n: int) -> np.ndarray:
    wide = ids.astype(object).reshape(-1)
    return np.argsort(np.asarray([i if 0 <= i < n else n for i in wide], np.int64), kind="stable")


def by_default(ids: jax.Array, n: int) -> jax.Array:
    return Target.order(CPU, ids, n)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [CPU.order, by_default])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_against_numpy(order, dtype: str) -> None:
    rng = np.random.default_rng(3)
    limits = np.iinfo(dtype)
    for shape, n in [((0,), 4), ((1,), 1), ((101,), 7), ((13, 17), 300), ((2003,), 40_000)]:
        ids = rng.integers(max(limits.min, -n), min(limits.max, 2 * n) + 1, shape, dtype=dtype)
        got = jax.jit(order, static_argnums=1)(ids, n)
        assert got.dtype == np.int32 and got.shape == (ids.size,)
        np.testing.assert_array_equal(got, expected(ids, n))


def test_64_bit_ids() -> None:
    ids = np.asarray([5, -(2**62), 2**62, 0, 5, 2**32, 2**32 - 2, 1], np.int64)
    with jax.enable_x64(True):
        for n in (6, 2**32 - 1, 2**32 + 1):
            for order in (CPU.order, by_default):
                np.testing.assert_array_equal(jax.jit(order, static_argnums=1)(ids, n), expected(ids, n))
        unsigned = np.asarray([2**64 - 1, 3, 0, 2**63], np.uint64)
        np.testing.assert_array_equal(CPU.order(jax.numpy.asarray(unsigned), 4), [2, 1, 0, 3])


def test_equal_orders_are_one() -> None:
    """XLA evaluates equal orders once, and takes one out of a loop that does not change the ids."""

    def steps(ids: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x[CPU.order(ids, 50)] + 1, None

        x = jax.lax.scan(step, ids, None, length=3)[0]
        return x[CPU.order(ids, 50)] * ids[CPU.order(ids, 50)]

    ids = np.random.default_rng(0).integers(0, 50, 200, dtype=np.int32)
    text = jax.jit(steps).lower(ids).compile().as_text()
    assert text.count('custom_call_target="kitsune_cpu_order"') == 1
