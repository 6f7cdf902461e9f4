"""What a stream would make again for every index of an axis that it lacks is made once, outside, where that costs less."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.planning.streams import Region, StreamSpace
from kitsune_jax.regions.alternatives import repeated_ops
from kitsune_jax.regions.grow import GraphIndex
from tests.support.graphs import graph_of

BATCH, HEADS, TOKENS, SIZE, BUCKETS = 4, 8, 512, 32, 16


def biased(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Attention as T5's encoder has it: a learned bias for each distance, the same for all of a batch."""
    distance = jnp.clip(jnp.arange(TOKENS) - jnp.arange(TOKENS)[:, None] + BUCKETS // 2, 0, BUCKETS - 1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.moveaxis(table[distance], -1, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def operands() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(BATCH, TOKENS, HEADS, SIZE)] * 3 + [(BUCKETS, HEADS)]
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


@pytest.mark.parametrize("device", ["zen5-2", "amx-2", "avx512-64"])
def test_a_bias_that_all_of_a_batch_share_is_looked_up_once(device: str) -> None:
    report = kj.explain(biased, platform="cpu", device=device)(*operands())
    streams = [(r.rows, " ".join(op for stage in r.stages for op in stage.ops)) for r in report.regions]
    streams += [(s.rows, " ".join(s.ops)) for r in report.regions for p in r.later for s in p.spaces]
    (kinds,) = [ops for rows, ops in streams if rows == BATCH * HEADS * TOKENS]
    assert "dot_general" in kinds and "exp" in kinds and "gather" not in kinds, str(report)


def test_the_function_stays_the_same() -> None:
    args = operands()
    np.testing.assert_allclose(jax.jit(kj.pipeline(biased))(*args), jax.jit(biased)(*args), rtol=1e-4, atol=1e-5)
    of_sum = [jax.jit(jax.grad(lambda *a, g=f: jnp.sum(jnp.sin(g(*a))), (0, 3)))(*args) for f in (kj.pipeline(biased), biased)]
    for got, want in zip(*of_sum, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def left_of(function: Any, *args: Any, rows: tuple[int, ...]) -> list[str]:
    """Kinds that ``repeated`` names in a region of all ops; dimensions in front of all values of that rank stream."""
    graph = graph_of(function, *args)
    labels = tuple(
        (i, tuple((d,) if n == rows[d] else () for d, n in enumerate(v.shape)))
        for i, v in enumerate(graph.values)
        if len(v.shape) == len(rows)
    )
    region = Region(StreamSpace(rows), tuple(range(len(graph.ops))), labels, graph.inputs, graph.outputs)
    return [graph.ops[i].kind for i in sorted(repeated_ops(GraphIndex.of(graph), region))]


def test_what_is_made_again_goes_with_all_that_only_it_needs() -> None:
    x, y = jnp.ones((64, 9000)), jnp.ones((1, 9000))
    assert left_of(lambda x, y: x + jnp.sin(y * 2), x, y, rows=(64, 9000)) == ["mul", "sin"]
    assert left_of(lambda x, y: x + y * 2, x, y, rows=(64, 9000)) == []  # arithmetic costs less than an array
    assert left_of(lambda x, y: jnp.sin(x) + y, x, y, rows=(64, 9000)) == []  # of every row another one
    assert left_of(lambda x, y: x + jnp.sin(y * 2), x[:, :90], y[:, :90], rows=(64, 90)) == []  # too little
    assert left_of(lambda x, y: (x * (z := y * 2)) + jnp.sin(z), x, y, rows=(64, 9000)) == ["sin"]  # z stays where it is read
