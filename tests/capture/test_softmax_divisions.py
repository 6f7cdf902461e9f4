"""The sums of a segment softmax divide the segments, not their rows; the backward pass needs no pass over the rows of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from tests.support.checks import arrays, close, in_float64
from tests.support.segments import HEADS, WIDTH, N, attention, attention_arguments, finite_softmax, softmax

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")


def sums(f: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of what is summed over segments, and of the largest scores."""
    captured = capture(jax.make_jaxpr(f)(*args))
    assert not captured.failures
    graph = captured.graph
    return sorted(graph.values[op.outputs[0]].shape for op in graph.ops if op.kind.startswith("scatter_"))


def divides_rows(f: Callable[..., Any], *args: Any) -> bool:
    graph = capture(jax.make_jaxpr(f)(*args)).graph
    return any(op.kind == "div" and graph.values[op.outputs[0]].shape[0] == len(args[-1]) for op in graph.ops)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("normalised", [softmax, finite_softmax])
def test_the_weighted_sum_is_divided(dtype: Any, normalised: Any) -> None:
    args = attention_arguments(dtype)
    f = attention(normalised)
    assert not divides_rows(f, *args)
    close(jax.jit(kj.pipeline(f, force=True))(*args), in_float64(f, *args), 2e-4 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("argument", [0, 1, 2, 3, (0, 1, 2, 3)])
def test_gradients(argument: Any) -> None:
    args = attention_arguments()

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(attention(softmax)(*args)))

    gradient = jax.grad(loss, argument)
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args))
    close(jax.jit(jax.grad(kj.pipeline(loss, force=True), argument))(*args), in_float64(gradient, *args))


def test_the_backward_pass_makes_no_sum_over_segments_of_its_own_for_the_softmax() -> None:
    args = attention_arguments()
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(attention(softmax)(*a))), (0, 1, 2, 3))
    # Forward: the largest score, the sum, the weighted sum. Backward: the gradients by senders and by receivers of what each of the
    # four arguments gave, that by the weights of the senders' values among them.
    narrow, wide = (N, HEADS), (N, HEADS, WIDTH)
    assert sums(gradient, *args) == sorted([narrow, narrow, wide, narrow, narrow, wide])


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_over_the_sum(wide: bool) -> None:
    """Where nothing but a number is left of a row, there is no sum of rows to divide."""
    logits, ids = jax.random.normal(jax.random.key(0), (40,)), jnp.sort(jax.random.randint(jax.random.key(1), (40,), 0, 5))

    def f(x: jax.Array, i: jax.Array) -> Any:
        e = jnp.exp(x - jax.ops.segment_max(x, i, 5)[i])
        factor = 2.0 / jax.ops.segment_sum(e, i, 5)[i]
        return jax.ops.segment_sum(factor[:, None] * jnp.sin(x)[:, None] if wide else factor, i, 5), e

    assert sums(f, logits, ids) == sorted([(5,), (5,), (5, 1) if wide else (5,)])
    close(jax.jit(kj.pipeline(f, force=True))(logits, ids), in_float64(f, logits, ids))


def test_second_derivatives() -> None:
    args = attention_arguments()
    f = attention(softmax)

    def slope(*args: Any) -> Any:
        return jnp.sum(jnp.cos(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))))(*args)))

    gradient = jax.grad(slope)
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("normalised", [softmax, finite_softmax])
@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan, "segment"])
def test_scores_that_are_no_numbers(normalised: Any, bad: Any) -> None:
    *head, senders, receivers = attention_arguments()
    if bad == "segment":  # all scores of a segment are -inf
        head[1] = head[1].at[3].set(-np.inf)
    else:
        head[0] = head[0].at[4, 1].set(bad)
    args = (*head, senders, receivers)
    f = attention(normalised)
    np.testing.assert_allclose(jax.jit(kj.pipeline(f, force=True))(*args), jax.jit(f)(*args), rtol=2e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("normalised", [softmax, finite_softmax])
@pytest.mark.parametrize("pick", ["empty", "outside", "one", "negative"])
def test_segments_of_any_kind(normalised: Any, pick: str) -> None:
    *head, senders, receivers = attention_arguments()
    kinds = {"empty": receivers // 3 * 3, "outside": receivers * 2, "one": receivers * 0 + 5, "negative": receivers - N // 2}
    args = (*head, senders, kinds[pick])
    f = attention(normalised)
    np.testing.assert_allclose(jax.jit(kj.pipeline(f, force=True))(*args), jax.jit(f)(*args), rtol=2e-5, atol=1e-6)
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2, 3))
    want, got = jax.jit(gradient)(*args), jax.jit(kj.pipeline(gradient, force=True))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_float16_is_left_alone() -> None:
    args = attention_arguments(jnp.float16)
    assert divides_rows(attention(softmax), *args)


def test_a_softmax_by_other_ids_is_left_alone() -> None:
    args = attention_arguments()
    (scores,) = arrays(9, (len(args[-1]), HEADS))

    def by_senders(scores: Any, values: Any, senders: Any, receivers: Any) -> Any:
        weights = softmax(scores, senders, N)
        return jax.ops.segment_sum(weights[:, :, None] * values[senders], receivers, num_segments=N)

    call = (jnp.asarray(scores), args[2], *args[-2:])
    assert divides_rows(by_senders, *call)
    close(jax.jit(kj.pipeline(by_senders, force=True))(*call), in_float64(by_senders, *call))


def test_exponentials_that_may_be_large_are_left_alone() -> None:
    args = attention_arguments()

    def not_shifted(scores: Any, values: Any, senders: Any, receivers: Any) -> Any:
        e = jnp.exp(scores)
        weights = e / jax.ops.segment_sum(e, receivers, num_segments=N)[receivers]
        return jax.ops.segment_sum(weights[:, :, None] * values[senders], receivers, num_segments=N)

    call = (jnp.asarray(arrays(9, (len(args[-1]), HEADS))[0]), args[2], *args[-2:])
    assert divides_rows(not_shifted, *call)
