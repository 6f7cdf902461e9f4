"""Which functions are compiled alone, to compare XLA's own partition with this package's. That takes as long as compiling them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.sharding.by_xla import _least_memory

MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))


def layers(x: Any, v: Any, w: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ v) @ w)


def recurrent(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros_like(x[0]), x)[0]


@pytest.mark.parametrize(
    ("function", "shapes", "divided", "compared"),
    [
        (layers, [(4096, 64), (64, 64), (64, 64)], ["x", None, None], False),
        (recurrent, [(16, 64, 256), (256, 256)], [(None, None, "x"), (None, "x")], True),
    ],
    ids=["rows", "recurrent columns"],
)
def test_only_what_may_need_less_is_compared(
    function: Any, shapes: list[tuple[int, ...]], divided: list[Any], compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    partition_by_xla = _compat.partition_by_xla
    monkeypatch.setattr(_compat, "partition_by_xla", lambda *args: asked.append(args) or partition_by_xla(*args))
    rng = np.random.default_rng(3)
    args = []
    for shape, axes in zip(shapes, divided, strict=True):
        array = rng.standard_normal(shape, np.float32)
        spec = PartitionSpec(*axes) if isinstance(axes, tuple) else PartitionSpec(axes)
        args.append(jax.device_put(array, NamedSharding(MESH, spec)))
    got = jax.jit(kj.pipeline(function, force=None))(*args)
    assert bool(asked) == compared
    np.testing.assert_allclose(got, jax.jit(function)(*args), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("computed", [True, False])
def test_rows_that_are_summed_by_index_take_memory(computed: bool) -> None:
    """XLA reads them from an array: of rows that some op computes, or of an operand, which takes no more memory."""

    def summed(rows: Any, index: Any) -> Any:
        return jax.ops.segment_sum(rows * rows if computed else rows, index, num_segments=7)

    rows = jax.ShapeDtypeStruct((97, 5), np.float32)
    needed = _least_memory(jax.make_jaxpr(summed)(rows, jax.ShapeDtypeStruct((97,), np.int32)))
    assert needed == (97 * 5 * 4 if computed else 0)
