"""Which weight a call on a GPU asks the L2 for: from graphs in which every ``tanh`` is a call and XLA runs all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax.planning.cost import left_region
from kitsune_jax.planning.plan import MIB, Ahead, Plan
from kitsune_jax.report.data import byte_text
from kitsune_jax.targets.cuda.arrangement import PIECE_BYTES
from kitsune_jax.targets.cuda.planning.machines import A100, H200, GpuMachine
from kitsune_jax.targets.cuda.planning.planner import prefetches_of_calls
from tests.support.graphs import graph_of

Array = Any
PLAN = Plan("h200", "vertical", 64, 1, (), (), 1, 6e-6, 8e-6, 1 << 20, 1 << 20, "dram")
W = 4096 * 4096 * 2


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


X, SQUARE = shape(1, 4096), shape(4096, 4096)


def asked(f: Callable[..., Any], *shapes: Any, machine: GpuMachine = H200, force: bool = False) -> list[Ahead | None]:
    graph = graph_of(f, *shapes)
    calls = [[(left_region(graph, (i,)), PLAN)] for i, op in enumerate(graph.ops) if op.kind == "tanh"]
    found = prefetches_of_calls(graph, calls, machine, force)
    for ahead in filter(None, found):
        assert ahead.value in graph.inputs and 0 < ahead.fetched_bytes <= ahead.weight_bytes and ahead.workers == machine.workers
        assert ahead.first >= 0 and ahead.first + ahead.weight_bytes <= ahead.array_bytes
        assert ahead.fetched_bytes % PIECE_BYTES == 0 and ahead.seconds == ahead.fetched_bytes / machine.dram_bandwidth
        pieces = ahead.fetched_bytes // PIECE_BYTES
        assert pieces >= 1 and pieces * PIECE_BYTES <= ahead.weight_bytes // pieces * pieces
    return found


def one(f: Callable[..., Any], *shapes: Any, **how: Any) -> Ahead:
    (ahead,) = asked(f, *shapes, **how)
    assert ahead is not None
    return ahead


def test_what_comes_in_the_gap_in_front_of_the_product() -> None:
    ahead = one(lambda x, w: jnp.tanh(x) @ w, X, SQUARE)
    gap = H200.kernel_seconds * H200.dram_bandwidth
    assert gap - PIECE_BYTES < ahead.fetched_bytes <= gap
    assert (ahead.first, ahead.weight_bytes, ahead.array_bytes) == (0, W, W) and 1.2e-6 < ahead.seconds <= H200.kernel_seconds


def test_no_more_than_makes_the_l2_the_limit() -> None:
    """Memory has time behind a norm as well: more gaps, but then the product reads all it can from the L2."""
    most = W * (1 - H200.dram_bandwidth / H200.shared_bandwidth)
    assert most - PIECE_BYTES < one(lambda x, w: norm(jnp.tanh(x)) @ w, X, SQUARE).fetched_bytes <= most


def test_the_weight_lies_in_an_argument_as_it_is() -> None:
    stack, wide = shape(3, 4096, 4096), shape(4096, 8192)
    third = one(lambda x, w: jnp.tanh(x) @ w[2], X, stack)
    assert (third.first, third.weight_bytes, third.array_bytes) == (2 * W, W, 3 * W)
    assert one(lambda x, w: jnp.tanh(x) @ w.T, X, SQUARE).first == 0
    assert one(lambda x, w: jnp.tanh(x) @ w.reshape(2, 4096, 4096)[1].T, X, shape(8192, 4096)).first == W
    heads = one(lambda x, w: jnp.einsum("bhd,hdn->bn", jnp.tanh(x), w), shape(1, 32, 128), shape(32, 128, 4096))
    assert heads.weight_bytes == W
    for not_there in (
        lambda x, w: jnp.tanh(x) @ w[:, :4096],  # columns lie apart
        lambda x, w: jnp.tanh(x) @ w.T[:4096, :].T[:, :4096].T,
        lambda x, w: jnp.tanh(x) @ (2 * w)[:, :],  # made in the program: whether it is there, only XLA's order says
        lambda x, w: jnp.tanh(x) @ w[::2, :].reshape(4096, 4096),
    ):
        assert asked(not_there, X, wide) == [None]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: jnp.tanh(x @ w),  # in front of the call
        lambda x, w: (jnp.tanh(x), x @ w),  # beside it
        lambda x, w: jnp.tanh(jnp.broadcast_to(x, (512, 4096))) @ w,  # bound by its operations
    ],
)
def test_products_that_gain_nothing(f: Callable[..., Any]) -> None:
    assert asked(f, X, SQUARE) == [None]


def test_little_is_left_alone() -> None:
    def f(x: Array, w: Array, large: Array) -> tuple[Array, Array]:
        return jnp.tanh(x) @ w, x.T @ jnp.sum(large, 0, keepdims=True)

    (ahead,) = asked(f, shape(1, 256), shape(256, 512), SQUARE)
    assert ahead is None
    (ahead,) = asked(f, shape(1, 256), shape(256, 512), SQUARE, force=True)
    most = 256 * 1024 * (1 - H200.dram_bandwidth / H200.shared_bandwidth)
    assert ahead is not None and most - PIECE_BYTES < ahead.fetched_bytes <= most


def test_a_program_that_fits_the_l2_finds_its_weights_there() -> None:
    n = 3400
    assert 2 * n * n < H200.shared_bytes // 2
    assert asked(lambda x, w: jnp.tanh(x) @ w, shape(1, n), shape(n, n)) == [None]
    assert one(lambda x, w: jnp.tanh(x) @ w, shape(1, n), shape(n, n), force=True).fetched_bytes > MIB
    assert A100.shared_bytes // 2 < 2 * n * n  # there it does not fit
    assert one(lambda x, w: jnp.tanh(x) @ w, shape(1, n), shape(n, n), machine=A100).seconds > 1e-6


def test_what_runs_in_between_leaves_no_room() -> None:
    """The first of two products is asked for; had the second been, its pieces would be gone when it runs."""
    first = one(lambda x, a, b: jnp.tanh(x) @ a @ b, X, shape(4096, 14_336), shape(14_336, 4096))
    assert first.array_bytes == 4096 * 14_336 * 2
    graph = graph_of(lambda x, a, b: jnp.tanh(x) @ a @ b, X, shape(4096, 14_336), shape(14_336, 4096))
    assert first.value == graph.inputs[1]
    # Of two products side by side nobody knows which XLA runs first.

    def gate(x: Array, a: Array, b: Array) -> tuple[Array, Array]:
        h = jnp.tanh(x)
        return h @ a, h @ b

    assert asked(gate, X, shape(4096, 14_336), shape(4096, 14_336)) == [None]
    assert one(gate, X, shape(4096, 2560), shape(4096, 2560)).seconds > 1e-6  # there is room for both


def norm(h: Array) -> Array:
    return h / jnp.sum(h, keepdims=True) / jnp.max(h)


def test_of_calls_as_good_as_each_other_the_last_one_asks() -> None:
    found = asked(lambda x, w: norm(jnp.tanh(jnp.tanh(x) * 2 + 1)) @ w, X, SQUARE)
    assert [ahead is not None for ahead in found] == [False, True]


def test_a_weight_is_asked_for_once() -> None:
    """The second product reads what the first has read."""
    found = asked(lambda x, w: jnp.tanh(jnp.tanh(x) @ w) @ w, X, SQUARE)
    assert sum(ahead is not None for ahead in found) == 1


def test_deep_graphs_take_time_in_proportion() -> None:
    """Values that are read twice make two paths each, and no more than two looks."""

    def deep(x: Array, w: Array) -> Array:
        h = jnp.tanh(x)
        for _ in range(300):
            h = h + h * 2
        return h @ w

    assert one(deep, X, SQUARE).seconds > 1e-6


def summed(x: Array, a: Array, b: Array, out: Array) -> Array:
    return jnp.sum(jax.nn.relu(jax.nn.relu(x @ a) @ b), axis=0, keepdims=True) @ out


SUMMED = shape(65_536, 256), shape(256, 256), shape(256, 256), shape(256, 65_536)


def test_the_report_says_what_is_asked_for() -> None:
    report = kj.explain(kj.pipeline(summed, fetch_ahead=True), platform="cuda", device="h200")(*SUMMED)
    (region,) = report.regions
    assert region.ahead is not None and region.ahead.weight_bytes == W and 1e-6 < region.ahead.seconds < 3e-6
    text, size = " ".join(str(report).split()), f"prefetches into the L2 cache {byte_text(region.ahead.bytes)}"
    assert f"{size} of the 33.6 MB of weights that dot_general (test_ahead.py:" in text and size in report._repr_html_()
    assert f"reads next; estimate: it takes {region.ahead.seconds * 1e6:.2f} us less" in text
    (without,) = kj.explain(kj.pipeline(summed), platform="cuda", device="h200")(*SUMMED).regions
    assert without.ahead is None and without.seconds == region.seconds
    assert without.bytes_in == region.bytes_in  # what is asked for is no operand that is read


def test_a_step_of_a_loop_asks_for_nothing() -> None:
    """What a loop cuts out of an array for each step would have to be copied for the call."""

    def steps(x: Array, a: Array, b: Array, outs: Array) -> Array:
        return jax.lax.scan(lambda c, out: (c + 1, summed(x + c, a, b, out)), jnp.bfloat16(0), outs)[1]

    report = kj.explain(kj.pipeline(steps, fetch_ahead=True), platform="cuda", device="h200")(*SUMMED[:3], shape(2, 256, 65_536))
    assert report.regions and all(region.ahead is None for region in report.regions), str(report)
