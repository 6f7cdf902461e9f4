"""Keys as carries of loops, split in every step: simulators and rollouts draw what they draw under ``jax.jit``, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj

STEPS, ENVIRONMENTS = 13, 37


def cart_pole(state, force):
    """Of gymnasium, as gymnax writes it: position, velocity, angle, angular velocity."""
    x, dx, angle, turning = state
    temp = (force + 0.05 * turning**2 * jnp.sin(angle)) / 1.1
    turned = (9.8 * jnp.sin(angle) - jnp.cos(angle) * temp) / (0.5 * (4.0 / 3.0 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    pushed = temp - 0.05 * turned * jnp.cos(angle) / 1.1
    return x + 0.02 * dx, dx + 0.02 * pushed, angle + 0.02 * turning, turning + 0.02 * turned


def reset(key):
    return tuple(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05))


def random_actions(key, _):
    def step(carry, _):
        key, state = carry
        key, act, again = jax.random.split(key, 3)
        action = jax.random.randint(act, (), 0, 2)
        state = cart_pole(state, jnp.where(action == 1, 10.0, -10.0))
        done = (jnp.abs(state[0]) > 0.05) | (jnp.abs(state[2]) > 0.05)
        state = jax.tree.map(lambda new, old: jnp.where(done, new, old), reset(again), state)
        return (key, state), (action, done)

    key, first = jax.random.split(key)
    return jax.lax.scan(step, (key, reset(first)), None, length=STEPS)


def rollout(key, weights):
    def step(carry, _):
        key, state = carry
        key, act, noise = jax.random.split(key, 3)
        logits = jnp.tanh(jnp.stack(state) @ weights)
        action = jax.random.categorical(act, logits)
        state = cart_pole(state, 10.0 * action.astype(jnp.float32) - 10.0 + 0.1 * jax.random.normal(noise))
        return (key, state), action

    key, first = jax.random.split(key)
    return jax.lax.scan(step, (key, reset(first)), None, length=STEPS)


def counted(key, _):
    """One key for all steps, folded with the number of each."""
    return jax.lax.fori_loop(0, STEPS, lambda i, s: s + jax.random.uniform(jax.random.fold_in(key, i), (3,)), jnp.zeros(3))


def given(key, _):
    """A key for each step, made before."""
    return jax.lax.scan(
        lambda s, k: (s ^ jax.random.bits(k), jax.random.bits(k, (2,))), jnp.uint32(0), jax.random.split(key, STEPS)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("loop", [random_actions, rollout, counted, given])
def test_a_key_for_each_environment(loop, make):
    keys = jax.vmap(make)(jnp.arange(ENVIRONMENTS))
    weights = jnp.linspace(-1, 1, 12).reshape(4, 3)
    fn = jax.vmap(loop, in_axes=(0, None))
    pipelined = kj.pipeline(fn, force=True)
    report = kj.explain(pipelined)(keys, weights)
    # The actions, which a loop makes step by step, are turned around; slices alone make no pipeline.
    assert {r.op for r in report.rejected} <= {"transpose", "unstack"}
    for got, want in zip(jax.tree.leaves(pipelined(keys, weights)), jax.tree.leaves(jax.jit(fn)(keys, weights)), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        if jnp.issubdtype(want.dtype, jnp.floating):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(got, want)
