"""Bits of ``rbg`` keys inside of pipelines: those of ``jax.jit``, on the CPU and in CUDA kernels in the emulator."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops import pointwise
from kitsune_jax.targets.cpu.profile import profile
from reference.operators import MEANINGS, philox_by_numpy
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture

# The last ones carry out of the lower half of the counter, and out of all of it.
KEYS = [(1, 2, 3, 4), (0, 0, 0, 0), (7, 2**32 - 1, 2**32 - 2, 2**32 - 1), (2**32 - 1, 5, 2**32 - 1, 2**32 - 1), (2**32 - 1,) * 4]
IMPLS = ("rbg", "unsafe_rbg")


def numbers(f: Any, *args: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(f(*args))
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    return [np.asarray(x) for x in plain]


def check(f: Any, *args: Any, tolerance: float = 0.0, **options: Any) -> None:
    agree(jax.jit(kj.pipeline(f, force=True, strict=True, **options)), jax.jit(f), *args, tolerance=tolerance)


def agree(pipelined: Any, plain: Any, *args: Any, tolerance: float = 0.0) -> None:
    for got, want in zip(numbers(pipelined, *args), numbers(plain, *args), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("key", KEYS)
def test_the_table_has_the_bits_of_xla(key: tuple[int, ...]) -> None:
    words = [np.uint32(k) for k in key]
    for n in (1, 2, 37, 1025):
        following, want = lax.rng_bit_generator(jnp.array(key, jnp.uint32), (n,), dtype=jnp.uint32)
        place = np.arange(n, dtype=np.uint32)
        np.testing.assert_array_equal(philox_by_numpy(*words, place), want)
        np.testing.assert_array_equal(MEANINGS["philox4x32"].numpy({}, *words, place, out_dtype="uint32"), want)
        np.testing.assert_array_equal(jax.jit(pointwise.philox_by_jax)(*words, place), want)
        # The next key has the counter behind the last block.
        counted = (key[3] << 32 | key[2]) + -(-n // 4)
        np.testing.assert_array_equal(following, [*key[:2], counted % 2**32, (counted >> 32) % 2**32])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("shape", [(1,), (131,), (3, 5, 7), (64, 33)])
def test_bits_and_the_next_key(shape: tuple[int, ...], dtype: str) -> None:
    def f(key: Any, x: Any) -> Any:
        following, bits = lax.rng_bit_generator(key, shape, dtype=dtype)
        return following, bits ^ x

    pipelined, plain, x = jax.jit(kj.pipeline(f, force=True, strict=True)), jax.jit(f), jnp.zeros(shape, dtype)
    for key in KEYS:
        agree(pipelined, plain, jnp.array(key, jnp.uint32), x)


@pytest.mark.parametrize("impl", IMPLS)
def test_distributions(impl: str) -> None:
    def f(key: Any, x: Any) -> Any:
        first, second, third = jax.random.split(key, 3)
        return (
            x + jax.random.uniform(first, x.shape),
            jnp.where(jax.random.bernoulli(jax.random.fold_in(second, 5), 0.3, x.shape), x, 0),
            jax.random.randint(third, x.shape, -3, 1000) + x.astype(int),
            x * jax.random.normal(key, x.shape),
        )

    check(f, jax.random.key(3, impl=impl), jnp.linspace(0, 1, 101 * 7).reshape(101, 7), tolerance=2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [1, 257])
def test_keys_split_in_every_step(impl: str, rows: int) -> None:
    """A simulator whose noise needs no array; all of it is in the pipeline, and the key behind the last step is JAX's."""

    def f(x: Any, key: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            x, key = state
            key, first, second = jax.random.split(key, 3)
            up = jax.random.bernoulli(first, 0.5, x.shape)
            x = jnp.where(up, x * 0.5, x + jax.random.uniform(second, x.shape))
            return (x, key), up

        return lax.scan(step, (x, key), None, length=5)

    args = jnp.linspace(-1, 1, rows), jax.random.key(9, impl=impl)
    check(f, *args, tolerance=1e-6)
    report = kj.explain(f, force=True)(*args)
    assert any(region.loops for region in report.regions) and not any(r.op == "scan" for r in report.rejected), str(report)


def test_a_gradient_through_dropout() -> None:
    def f(x: Any, w: Any, key: Any) -> Any:
        h = jax.nn.relu(x @ w)
        return (jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0) ** 2).mean()

    rng = np.random.default_rng(0)
    x, w = (jax.device_put(np.asarray(rng.standard_normal(s), jnp.float32)) for s in ((67, 12), (12, 9)))
    check(jax.value_and_grad(f, argnums=1), x, w, jax.random.key(2, impl="rbg"), tolerance=2e-5)


def test_what_no_pipeline_makes_is_left_to_the_generator() -> None:
    """XLA makes four elements of a hash; an element of its own for each would take longer, where nothing reads it on chip."""

    def kinds(f: Any, key: Any) -> list[str]:
        f = kj.pipeline(f)
        text = jax.jit(f).lower(key).as_text()
        return [name for name in ("rng_bit_generator", "kitsune_cpu") if name in text]

    key = jax.random.key(1, impl="rbg")
    assert kinds(lambda k: lax.sort(jax.random.bits(k, (50,))), key) == ["rng_bit_generator"]
    assert kinds(lambda k: jax.random.bits(k, ()), key) == ["rng_bit_generator"]
    captured = capture(jax.make_jaxpr(lambda k: jax.random.bits(k, (3,)))(key))
    assert [op.kind for op in captured.graph.ops].count("philox4x32") == 1
    threefry = lambda k: lax.rng_bit_generator(k, (8,), algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)[1]  # noqa: E731
    report = kj.explain(lambda k: threefry(k) >> 1, force=True)(jnp.arange(4, dtype=jnp.uint32))
    assert any("RNG_THREE_FRY" in r.reason for r in report.rejected)


def test_its_time_is_in_the_model() -> None:
    """About 100 operations for each element, which no micro-operation does at once."""
    from kitsune_jax.targets.cpu.planning.machines import times

    known = times(profile.shipped("zen5-2"))
    assert 20 * known.vector("add", "uint32") < known.vector("philox4x32", "uint32") < 200 * known.vector("add", "uint32")


@pytest.mark.usefixtures("kernel_cache")
def test_cuda_kernels_have_the_same_bits() -> None:
    def f(key: Any, x: Any) -> Any:
        return lax.rng_bit_generator(key, x.shape, dtype=jnp.uint32)[1] ^ x

    pipelined, plain = jax.jit(kj.pipeline(f, force=True, strict=True, target="emulator")), jax.jit(f)
    for key in KEYS:
        agree(pipelined, plain, jnp.array(key, jnp.uint32), jnp.zeros((70, 9), jnp.uint32))
