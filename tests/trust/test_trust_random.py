"""Random networks through the public API: forward, vmap, grad and whole training-step gradients inside one pipeline.

Every result is compared with the same function in float64: it may be off by the rounding of its dtype, or by a small multiple of
how far plain ``jax.jit`` is off. The tile programs run through the NumPy interpreter as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import kitsune_jax as kj
from tests.program.test_build import run_through_interpreter
from tests.support.checks import count, in_float64
from tests.support.trust_programs import Network, networks

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _loss(network: Callable[..., Any], params: Any, x: Any) -> Any:
    last, row, stream = network(params, x)
    return jnp.mean(jnp.sin(last)) + jnp.mean(row * row) + jnp.sum(stream * stream)


def forward(network: Network, wrap: Wrap) -> Callable[..., Any]:
    return wrap(network)


def grad(network: Network, wrap: Wrap) -> Callable[..., Any]:
    return jax.grad(functools.partial(_loss, wrap(network)), (0, 1))


def value_and_grad_inside(network: Network, wrap: Wrap) -> Callable[..., Any]:
    return wrap(jax.value_and_grad(functools.partial(_loss, network), (0, 1)))


def vmap(network: Network, wrap: Wrap) -> Callable[..., Any]:
    """Shared weights, the new axis in the middle or at the end of the input."""
    axis = len(network.lead) if network.seed % 2 else 0

    def f(params: Any, x: Any) -> Any:
        return jax.vmap(wrap(network), in_axes=(None, axis))(params, jnp.stack([x, x * 0.5, -x], axis))

    return f


def vmap_of_weights(network: Network, wrap: Wrap) -> Callable[..., Any]:
    def f(params: Any, x: Any) -> Any:
        return jax.vmap(wrap(network), in_axes=(0, None), axis_size=2)([jnp.stack([p, p * 0.5]) for p in params], x)

    return f


MODES = {f.__name__: f for f in (forward, grad, value_and_grad_inside, vmap, vmap_of_weights)}


def _error(got: Any, want: np.ndarray) -> float:
    """Largest distance, relative to the largest value of the array."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    if want.size == 0:
        return 0.0
    return float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-3))


def check_all_close(network: Network, got: Any, plain: Any, want: Any) -> None:
    epsilon = EPSILON[network.dtype]
    if any(name == "cast" for name, _, _ in network.ops):
        epsilon = EPSILON["bfloat16"]
    assert jax.tree.structure(got) == jax.tree.structure(plain)
    for g, p, w in zip(*map(jax.tree.leaves, (got, plain, want)), strict=True):
        assert g.dtype == p.dtype and g.shape == p.shape
        limit = 64 * epsilon + 4 * _error(p, w)
        assert _error(g, w) <= limit, f"{g.dtype}{g.shape} is off by {_error(g, w):.3g}, plain JAX by {_error(p, w):.3g}"


def check(network: Network, mode: str) -> None:
    args = network.arguments()
    pipelined = jax.jit(MODES[mode](network, functools.partial(kj.pipeline, force=True))).lower(*args).compile()
    assert count(pipelined.as_text()) > 0, "nothing was pipelined"
    plain = MODES[mode](network, lambda f: f)
    check_all_close(network, pipelined(*args), jax.jit(plain)(*args), in_float64(plain, *args))


def check_interpreter(network: Network, mode: str) -> None:
    args = network.arguments()
    plain = MODES[mode](network, lambda f: f)
    got, regions = run_through_interpreter(plain, *args, seed=network.seed)
    assert regions, "nothing was pipelined"
    want = jax.jit(plain)(*args)
    check_all_close(network, jax.tree.unflatten(jax.tree.structure(want), got), want, in_float64(plain, *args))


quick = hypothesis.settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
thorough = hypothesis.settings(max_examples=150, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
modes = st.sampled_from(list(MODES))


@quick
@hypothesis.given(networks(6), modes)
def test_random_networks(network: Network, mode: str) -> None:
    check(network, mode)


@hypothesis.settings(quick, max_examples=4)
@hypothesis.given(networks(4), st.sampled_from(["forward", "grad"]))
def test_random_networks_in_the_interpreter(network: Network, mode: str) -> None:
    check_interpreter(network, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@thorough
@hypothesis.given(network=networks())
def test_many_random_networks(mode: str, network: Network) -> None:
    check(network, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@hypothesis.settings(thorough, max_examples=40)
@hypothesis.given(network=networks())
def test_many_random_networks_in_the_interpreter(mode: str, network: Network) -> None:
    check_interpreter(network, mode)
