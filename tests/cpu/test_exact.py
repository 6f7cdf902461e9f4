"""16-bit values that are compared, or whose maximum leaves a program, have the bits that rounding after every operation gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.targets.cpu.bytecode import encode
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.checks import in_float64
from tests.support.lowered import ROW, array, plain
from tests.support.tiles import Tiles

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROWS, WIDTH = 131, 5


def native(t: Tiles, *inputs: np.ndarray, dtype: type) -> np.ndarray:
    """The first result, of ``dtype``."""
    program = t.program()
    shape = program.outputs[0].shape
    got = np.empty(shape, dtype)
    _cpu.run(
        encode(lower_program(program, "test")), [plain(a) for a in inputs], [got.view(np.uint16) if dtype != np.float32 else got], 2
    )
    return got


def score(t: Tiles, x: int, y: int) -> int:
    return t.op("mul", t.op("add", x, y), t.op("mul", y, y))


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_compared_equals_what_was_stored(name: str) -> None:
    x, y = (array(ROWS, WIDTH, dtype=DTYPES[name]) for _ in range(2))
    t = Tiles((ROWS,), 16)
    tiles = [t.load((ROWS, WIDTH), name, ROW) for _ in range(3)]
    equal = t.op("eq", score(t, *tiles[:2]), tiles[2], dtype="bool")
    t.store(t.op("convert_element_type", equal, dtype="float32"), (ROWS, WIDTH), ROW)
    stored = (x + y) * (y * y)
    assert stored.dtype == DTYPES[name]
    assert native(t, x, y, stored, dtype=np.float32).all()


@pytest.mark.parametrize("name", DTYPES)
def test_a_maximum_that_leaves_is_of_rounded_values(name: str) -> None:
    x, y = (array(ROWS, WIDTH, dtype=DTYPES[name]) for _ in range(2))
    t = Tiles((ROWS,), 16)
    x_, y_ = (t.load((ROWS, WIDTH), name, ROW) for _ in range(2))
    t.sink(score(t, x_, y_), "max", (0,))
    np.testing.assert_array_equal(native(t, x, y, dtype=DTYPES[name]), ((x + y) * (y * y)).max(0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_softmax_over_segments_by_one_argument(name: str, argument: int) -> None:
    """By the weights alone one phase compares what another took the largest of: nothing was equal, and 0 / 0 NaN."""
    rng = np.random.default_rng(11)
    nodes, edges = 37, 509
    senders, receivers = rng.integers(0, nodes, (2, edges))
    receivers[: edges // 2], senders[edges // 3 :] = 5, 3  # a node of half of all edges
    receivers[:nodes] = np.arange(nodes)
    ids = jnp.asarray(senders, jnp.int32), jnp.asarray(receivers, jnp.int32)

    def loss(h: jax.Array, w: jax.Array, a: jax.Array, g: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        z = (h @ w).reshape(nodes, 2, 3)
        of_senders, of_receivers = (z * a[0]).sum(-1), (z * a[1]).sum(-1)
        scores = jax.nn.leaky_relu(of_senders[senders] + of_receivers[receivers], 0.2)
        largest = jax.ops.segment_max(scores, receivers, num_segments=nodes)
        weights = jnp.exp(scores - largest[receivers])
        weights = weights / jax.ops.segment_sum(weights, receivers, num_segments=nodes)[receivers]
        return jnp.sum(jax.ops.segment_sum(weights[..., None] * z[senders], receivers, num_segments=nodes) * g)

    h, w, a, g = (rng.standard_normal(s) * 0.5 for s in ((nodes, 8), (8, 6), (2, 2, 3), (nodes, 2, 3)))
    h, w, a, g = (np.asarray(v, DTYPES[name]) for v in (h, w, a, g))
    got = jax.jit(kj.pipeline(jax.grad(loss, argument), force=True))(h, w, a, g, *ids)
    want = in_float64(jax.grad(loss, argument), h, w, a, g, *ids)
    tolerance = (0.03 if name == "bfloat16" else 0.004) * (1 + np.abs(want).max())
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance)
