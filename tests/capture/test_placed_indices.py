"""Broadcasts of indices become indices, with the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from tests.support.graphs import graph_of

CASES = {
    "mask": lambda x: jnp.where(jnp.arange(7)[:, None] >= jnp.arange(5)[None], x, 0.0),
    "heads": lambda x: x[None] + jnp.arange(3.0)[:, None, None] * jnp.arange(5)[None, None],
    "turned": lambda x: x.T + jnp.arange(7)[None],
    "one": lambda x: x + jnp.arange(1)[:, None],
    "one_of_many": lambda x: x + jnp.broadcast_to(jnp.arange(1)[:, None], (7, 5)),
    "two_dimensions": lambda x: x + jnp.broadcast_to(jnp.arange(35).reshape(7, 5), (2, 7, 5)),
    "spread_twice": lambda x: x[None] * jnp.broadcast_to(jnp.broadcast_to(jnp.arange(5), (7, 5)), (4, 7, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_stay(name: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 5)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(kj.pipeline(CASES[name], strict=True, force=True))(x), jax.jit(CASES[name])(x))


def test_no_array_of_indices_is_left_where_they_are_counted() -> None:
    graph = graph_of(CASES["mask"], jnp.zeros((7, 5)))
    assert sorted(op["dimension"] for op in graph.ops if op.kind == "iota" and len(op["shape"]) == 2) == [0, 1]
    assert not any(op.kind == "reshape" for op in graph.ops)
    kept = graph_of(CASES["two_dimensions"], jnp.zeros((7, 5)))
    assert [op.kind for op in kept.ops].count("broadcast_in_dim") >= 1 and not any(
        op.kind == "iota" and len(op["shape"]) > 1 for op in kept.ops
    )
