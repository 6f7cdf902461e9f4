"""Indices that are repeated to be compared with other indices are made in the shape of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import products
from reference import standalone

N, M = 5, 7


def rows() -> jax.Array:
    return jnp.arange(N)[:, None]


MASKS: dict[str, Callable[[], jax.Array]] = {
    "bare": lambda: rows() >= jnp.arange(M),
    "offsets": lambda: rows() + 2 >= jnp.arange(M)[None] - 3,
    "window": lambda: (rows() >= jnp.arange(M)) & (rows() - jnp.arange(M) < 2),
    "distance": lambda: jnp.abs(rows() - jnp.arange(M)) < 3,
    "floats": lambda: jnp.arange(N, dtype=jnp.float32)[:, None] * 2 > jnp.arange(M, dtype=jnp.float32) * 3,
    "one_row": lambda: jnp.arange(1)[:, None] + jnp.zeros((N, 1), jnp.int32) >= jnp.arange(M),
    "batch": lambda: (jnp.arange(N)[None, None, :, None] >= jnp.arange(M)[None, None, None, :])[0, 0],
}


def chain(index: jax.Array, length: int) -> jax.Array:
    for k in range(length):
        index = index + 1 if k % 2 else index - 1
    return index


def captured(function: Callable[..., Any], *args: Any) -> Captured:
    found = capture(jax.make_jaxpr(function)(*args))
    assert not found.failures
    return found


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_indices(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((N, M)).astype("float32")
    found = captured(lambda x: jnp.where(MASKS[name](), x, -1.0), x)
    (got,) = jax.jit(lambda x: standalone.run(found, [], (x,)))(x)
    np.testing.assert_array_equal(got, np.where(MASKS[name](), x, -1.0))
    graph = found.graph
    compared = [graph.values[v].shape for op in graph.ops if op.kind == "iota" for v in op.outputs]
    if name != "one_row":
        assert compared and all(np.prod(shape) == N * M for shape in compared)
        assert all(op.kind != "broadcast_in_dim" or graph.values[op.inputs[0]].shape in ((), (N, M)) for op in graph.ops)


def test_a_long_chain_of_indices() -> None:
    """Longer than Python's limit of nested calls."""
    x = np.zeros((N, M), np.float32)
    graph = captured(lambda x: jnp.where(rows() >= chain(jnp.arange(M), 1200), x, 1.0), x).graph
    assert all(graph.values[v].shape == (N, M) for op in graph.ops if op.kind in ("add", "sub") for v in op.outputs)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("few", [0, 2**25])
def test_slopes_of_heads_are_made_once(power: bool, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi: a function of few indices is not computed in the shape of many distances, whatever the dtype of its exponent."""
    monkeypatch.setattr(products, "_FEW", few)

    def biased(x: jax.Array) -> jax.Array:
        heads = 1 + jnp.arange(3)
        slopes = 2.0**-heads if power else jnp.exp2(-heads.astype(x.dtype))
        return x + slopes[:, None, None] * (jnp.arange(M) - rows())

    x = np.random.default_rng(0).standard_normal((3, N, M)).astype("float32")
    found = captured(biased, x)
    (got,) = jax.jit(lambda x: standalone.run(found, [], (x,)))(x)
    np.testing.assert_allclose(got, x + 0.5 ** np.arange(1, 4)[:, None, None] * (np.arange(M) - np.arange(N)[:, None]), atol=1e-6)
    ops, values = found.graph.ops, found.graph.values
    assert [values[op.outputs[0]].shape for op in ops if op.kind in ("exp2", "pow")] == [(3, N, M) if few else (3,)]
    assert all(values[v].shape == (3, N, M) for op in ops if op.kind == "sub" for v in op.outputs)


def test_an_index_that_is_compared_with_data_stays_a_vector() -> None:
    labels = np.arange(N, dtype=np.int32)
    graph = captured(lambda labels: jax.nn.one_hot(labels, M), labels).graph
    assert {graph.values[v].shape for op in graph.ops if op.kind == "iota" for v in op.outputs} <= {(M,), (1, M)}


def test_a_result_is_kept() -> None:
    graph = captured(lambda: (jnp.broadcast_to(jnp.arange(M), (N, M)),)).graph
    assert [op.kind for op in graph.ops][-1] == "broadcast_in_dim"


@pytest.mark.parametrize("where", ["argument", "computed", "alone"])
def test_a_place_that_is_an_argument(where: str) -> None:
    """A single integer is combined with indices in the shape of the comparison, too; alone it stays what is repeated."""

    def masked(x: jax.Array, place: jax.Array) -> jax.Array:
        if where == "alone":
            return jnp.where(jnp.broadcast_to(place * 2, (N, M)) > jnp.arange(M), x, -1.0)
        first = place if where == "argument" else place * 2 - 1
        return jnp.where(first + rows() >= jnp.arange(M), x, -1.0)

    x, place = np.random.default_rng(0).standard_normal((N, M)).astype("float32"), jnp.int32(2)
    found = captured(masked, x, place)
    (got,) = jax.jit(lambda *args: standalone.run(found, [], args))(x, place)
    np.testing.assert_array_equal(got, masked(x, place))
    iotas = [found.graph.values[op.outputs[0]].shape for op in found.graph.ops if op.kind == "iota"]
    assert iotas == [(N, M)] * (1 if where == "alone" else 2)
