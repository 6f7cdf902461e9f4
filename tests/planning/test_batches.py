"""Products for each of a batch: their stream has the batch for axes, or holds all of it in a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax.planning.cost import DotWork, kernels_of
from kitsune_jax.planning.streams import Region, StreamSpace
from kitsune_jax.targets.cpu.planning.cost import CpuCost, CpuWork
from kitsune_jax.targets.cpu.planning.machines import cpu_model
from tests.support.graphs import graph_of

BATCH, HEADS, TOKENS, SIZE = 8, 8, 128, 32


def retention(q: Any, k: Any, v: Any, decay: Any) -> Any:
    """Attention without a softmax, as RetNet has it: the same decay for all of a batch."""
    before = jnp.arange(TOKENS)[:, None] >= jnp.arange(TOKENS)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * jnp.where(before, decay, 0)
    return jnp.einsum("bhqk,bhkd->bhqd", scores, v)


def test_weights_of_a_batch_inside_a_row_pass_by_for_each_tile() -> None:
    graph = graph_of(lambda x: x * 2, jnp.zeros((4, 4)))
    machine = cpu_model("amx-2")
    cost = CpuCost(graph, Region(StreamSpace((4,)), (0,), (), graph.inputs, graph.outputs), machine)

    def seconds(batch: int, k: int) -> float:
        return cost.seconds(CpuWork("float32", False, DotWork(batch, 1, 32, k, "float32")), 16)

    assert seconds(64, 128) - 64 * seconds(1, 128) == pytest.approx(64 * 128 * 32 * 4 / machine.place("l2").bandwidth)
    assert seconds(512, 512) - 512 * seconds(1, 512) == pytest.approx(512 * 512 * 32 * 4 / machine.place("l3").bandwidth)
    assert seconds(4, 32) == pytest.approx(4 * seconds(1, 32))  # all of them stay in the first cache


@pytest.mark.parametrize("device", ["avx2-2", "avx2-8"])
def test_a_batch_whose_products_would_pass_by_for_each_tile_becomes_axes_of_the_stream(device: str) -> None:
    """In rows of all 64 products the scores took 1.75 ms and with batch axes 0.9, where ``jax.jit`` took 1.3 (Xeon with AMX)."""
    heads = jax.ShapeDtypeStruct((BATCH, HEADS, TOKENS, SIZE), "float32")
    decay = jax.ShapeDtypeStruct((HEADS, TOKENS, TOKENS), "float32")
    (region,) = kj.explain(retention, platform="cpu", device=device)(heads, heads, heads, decay).regions
    assert region.rows == BATCH * HEADS * TOKENS


@pytest.mark.parametrize("sliced", [False, True])
def test_what_a_kernel_takes_of_an_array_does_not_cost_all_of_it(sliced: bool) -> None:
    """A paged cache in the steps of a loop: XLA reads the pages of a step, and was modelled with a pass over the whole pool,
    so that a pipeline was chosen which copies the pool and took 34 ms of CPU time where ``jax.jit`` took 2 (Xeon with AMX)."""

    def taken(x: Any, i: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(x, i[0], 3, 1) if sliced else jnp.take(x, i, axis=1, mode="clip")

    graph = graph_of(taken, jnp.zeros((8, 4096, 4)), jnp.zeros((3,), jnp.int32))
    streamed = tuple((v, ((0,), (), ())) for v, value in enumerate(graph.values) if len(value.shape) == 3)
    region = Region(StreamSpace((8,)), tuple(range(len(graph.ops))), streamed, graph.inputs, graph.outputs)
    cost = CpuCost(graph, region, cpu_model("amx-2"))
    assert sum(kernel.moved(cost) for kernel in kernels_of(cost)) < 3 * (8 * 3 * 4 * 4)
