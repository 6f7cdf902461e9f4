"""Attention over the edges of a graph, in the ways in which people write its softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.checks import arrays

N, E, HEADS, WIDTH = 13, 61, 2, 5


def softmax(scores: Any, ids: Any, n: int) -> Any:
    largest = jax.ops.segment_max(scores, ids, num_segments=n)
    weights = jnp.exp(scores - jax.lax.stop_gradient(largest)[ids])
    return weights / jax.ops.segment_sum(weights, ids, num_segments=n)[ids]


def finite_softmax(scores: Any, ids: Any, n: int) -> Any:
    """As flax and others do it: 0 stands for a largest score that is not finite."""
    largest = jax.lax.stop_gradient(jax.ops.segment_max(scores, ids, num_segments=n))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0)[ids])
    return weights / jax.ops.segment_sum(weights, ids, num_segments=n)[ids]


def attention(normalised: Callable[..., Any]) -> Callable[..., Any]:
    """Of scores of edges [e, heads] and of receivers [n, heads], values [n, heads, width], and weights of heads [heads, width]."""

    def layer(of_edges: Any, of_receivers: Any, values: Any, w: Any, senders: Any, receivers: Any) -> Any:
        n = len(values)
        scores = jax.nn.leaky_relu(of_edges + of_receivers[receivers] + jnp.sum(values * w, -1)[senders], 0.2)
        weights = normalised(scores, receivers, n)
        return jax.ops.segment_sum(weights[:, :, None] * values[senders], receivers, num_segments=n)

    return layer


def attention_arguments(dtype: Any = jnp.float32, n: int = N, edges: int = E, seed: int = 0) -> tuple[Any, ...]:
    shapes = (edges, HEADS), (n, HEADS), (n, HEADS, WIDTH), (HEADS, WIDTH)
    rng = np.random.default_rng(seed)
    ids = (jax.device_put(np.asarray(rng.integers(0, n, edges), jnp.int32)) for _ in range(2))
    return (*(jnp.asarray(a, dtype) for a in arrays(seed + 7, *shapes)), *ids)
