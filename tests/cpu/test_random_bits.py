"""Random numbers of ``jax.random`` inside of pipelines on the CPU: the bits of ``jax.jit``, tile by tile."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import kitsune_jax as kj


def check(fn, *args, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Forced into pipelines ``fn`` gives what ``jax.jit`` gives: integers and keys the same bits, floats within the tolerance."""
    pipelined = kj.pipeline(fn, force=True)
    report = kj.explain(pipelined)(*args)
    assert report.ops_pipelined > 0 and not any("has no code for this operator" in r.reason for r in report.rejected)
    for got, want in zip(jax.tree.leaves(jax.jit(pipelined)(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert got.dtype == want.dtype
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=atol)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_one_key(make, partitionable):
    def fn(key, x):
        return jax.random.bits(key, x.shape) ^ x, jax.random.bernoulli(key, 0.3, x.shape) | (x > 5)

    with jax.threefry_partitionable(partitionable):
        check(fn, make(7), jnp.arange(101 * 3, dtype=jnp.uint32).reshape(101, 3))


def per_environment(key, x):
    key, first, second = jax.random.split(key, 3)
    chosen = jax.random.randint(first, (2,), 0, 10)
    return key, chosen, jax.random.bits(jax.random.fold_in(second, chosen[0]), (3,)), jax.random.uniform(second, ()) + x


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_for_each_row(make):
    check(jax.vmap(per_environment), jax.vmap(make)(jnp.arange(257)), jnp.linspace(-1, 1, 257))


DRAWS = {
    "uniform": lambda key, x: jax.random.uniform(key, x.shape, minval=-2.0, maxval=3.0),
    "normal": lambda key, x: jax.random.normal(key, x.shape),
    "truncated_normal": lambda key, x: jax.random.truncated_normal(key, -1.0, 2.0, x.shape),
    "exponential": lambda key, x: jax.random.exponential(key, x.shape),
    "gumbel": lambda key, x: jax.random.gumbel(key, x.shape),
    "laplace": lambda key, x: jax.random.laplace(key, x.shape),
    "logistic": lambda key, x: jax.random.logistic(key, x.shape),
    "randint": lambda key, x: jax.random.randint(key, x.shape, -3, 1000),
    "categorical": lambda key, x: jax.random.categorical(key, x),
    "half precision": lambda key, x: jax.random.uniform(key, x.shape, jnp.bfloat16),
}


@pytest.mark.parametrize("name", DRAWS)
def test_distributions(name):
    x = jnp.linspace(-2, 2, 129 * 8).reshape(129, 8)
    check(DRAWS[name], jax.random.key(11), x, rtol=1e-5, atol=1e-6)


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def network(weights, key, x):
    first, second = jax.random.split(key)
    h = dropped(first, jax.nn.relu(x @ weights[0]))
    return jnp.mean((dropped(second, jax.nn.relu(h @ weights[1])) - x) ** 2)


def test_a_training_step_with_dropout():
    """In one call, and with the masks handed from a forward call to a backward one."""
    rng = np.random.default_rng(0)
    weights = [jax.device_put(np.asarray(rng.standard_normal((24, 24)) / 5, jnp.float32)) for _ in range(2)]
    args = weights, jax.random.key(1), jax.device_put(np.asarray(rng.standard_normal((301, 24)), jnp.float32))
    check(jax.value_and_grad(network), *args, rtol=2e-5, atol=2e-6)
    want = jax.jit(jax.value_and_grad(network))(*args)
    for got in (jax.value_and_grad(kj.pipeline(network, force=True, residuals=policy))(*args) for policy in ("save", "recompute")):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), got, want)


def attention(key, q, k, v):
    probabilities = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k) / 4, axis=-1)
    return jnp.einsum("hqk,hkd->hqd", dropped(key, probabilities), v)


def test_attention_with_dropout():
    rng = np.random.default_rng(0)
    q, k, v = (jax.device_put(np.asarray(rng.standard_normal((2, n, 16)), jnp.float32)) for n in (45, 33, 33))
    check(attention, jax.random.key(1), q, k, v, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@hypothesis.given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([8, 16, 32])
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_bits_of_any_shape(shape, seed, vmapped, width):
    def fn(key):
        return jax.random.bits(key, tuple(shape), f"uint{width}")

    keys = jax.random.key(np.uint32(seed))
    check(jax.vmap(fn) if vmapped else fn, jax.random.split(keys, 5) if vmapped else keys)
