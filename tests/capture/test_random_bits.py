"""``jax.random`` in a Graph: keys are arrays of uint32, and what is made of them is made of ops of the table, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax import _compat
from kitsune_jax.capture.jaxpr import capture
from tests.capture.test_capture import run_steps

SHAPES = ((), (1,), (7,), (3, 5), (2, 1, 4), (0,), (4, 0), (129,))


def same(got, want) -> None:
    assert str(got.dtype) == str(want.dtype) and got.shape == want.shape
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    np.testing.assert_array_equal(got, want)


def evaluated(fn, *args) -> list:
    """``fn`` by its Graph, of which every op is evaluated by JAX; asserts that only keys' types are opaque."""
    captured = capture(jax.make_jaxpr(fn)(*args))
    assert not captured.failures
    assert {op.label for op in captured.graph.ops if op.kind == "opaque"} <= {"random_wrap", "random_unwrap"}, str(captured.graph)
    return jax.jit(lambda *a: run_steps(captured, a))(*jax.tree.leaves(args))


def check(fn, *args) -> None:
    for got, want in zip(evaluated(fn, *args), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        same(got, want)


def everything(key, i):
    bits = [jax.random.bits(key, shape) for shape in SHAPES]
    narrow = [jax.random.bits(key, (5, 3), width) for width in ("uint8", "uint16")]
    return bits, narrow, jax.random.split(key, 5), jax.random.split(key, (2, 3)), jax.random.fold_in(jax.random.fold_in(key, 17), i)


KEYS = {"typed": jax.random.key, "old": jax.random.PRNGKey}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("form", KEYS)
def test_bits_splits_and_folds(form, partitionable):
    key = KEYS[form](42)
    with jax.threefry_partitionable(partitionable):
        check(everything, key, jnp.int32(-3))


def test_bits_of_64():
    with jax.enable_x64(True):
        check(lambda k: jax.random.bits(k, (5, 3), "uint64"), jax.random.key(1))
        check(lambda s: jax.random.key(s), jnp.int64(2**40 + 3))


@pytest.mark.parametrize("seed", [0, -1, 2**31 - 1])
def test_seeds(seed):
    check(jax.random.key, jnp.int32(seed))
    check(jax.random.PRNGKey, jnp.int32(seed))
    check(jax.vmap(jax.random.key), jnp.arange(5) + seed)


def per_environment(key, x):
    key, first, second = jax.random.split(key, 3)
    return key, jax.random.bits(first, (3,)), jax.random.uniform(jax.random.fold_in(second, 5), ()) + x


@pytest.mark.parametrize("form", KEYS)
def test_a_key_for_each_row(form):
    keys = jax.vmap(KEYS[form])(jnp.arange(13))
    check(jax.vmap(jax.vmap(per_environment)), keys.reshape(13, 1, *keys.shape[1:]), jnp.ones((13, 1)))


def moved(keys):
    a, b = keys[:2], keys[2:]
    swapped = jnp.concatenate([b, a]).reshape(2, -1).T
    chosen = jnp.where(jnp.arange(swapped.shape[0])[:, None] % 2 == 0, swapped, swapped[::-1])
    return jnp.stack([chosen, chosen[::-1]]), jnp.broadcast_to(keys[0], (3,)), jnp.expand_dims(keys, 1)[1:5:2]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_that_are_only_moved(impl):
    keys = jax.vmap(functools.partial(jax.random.key, impl=impl))(jnp.arange(6))
    check(moved, keys)


def test_keys_that_are_passed_through_stay_themselves():
    captured = capture(jax.make_jaxpr(lambda k, x: (x, k))(jax.random.key(0), 1.0))
    assert captured.graph.outputs == tuple(reversed(captured.graph.inputs)) and not captured.graph.ops


def test_keys_closed_over_and_keys_of_opaque_ops():
    closed = jax.random.split(jax.random.key(5), 3)

    def fn(x):
        keys = jax.lax.sort(jax.random.bits(closed[0], (4,)))
        looped = jax.lax.fori_loop(0, 3, lambda i, k: jax.random.split(k)[i % 2], closed[1])
        return keys, jax.random.uniform(looped, x.shape) * x, looped

    closed_jaxpr, consts = _compat.hoist_consts(jax.make_jaxpr(fn)(jnp.ones(3)))
    captured = capture(closed_jaxpr)
    assert not captured.failures
    for got, want in zip(run_steps(captured, [*consts, jnp.ones(3)]), jax.jit(fn)(jnp.ones(3)), strict=True):
        same(got, want)
