"""What the tests of transformations share: counting custom calls, and comparing with JAX in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from trust.primitives import Unknown
from trust.reference import Arithmetic, evaluate

TARGET = "kitsune_cpu"

# Of a test that draws its cases: as many more in each other part, which are slow.
in_parts = pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])


def arrays(seed: int, *shapes: tuple[int, ...], scale: float = 0.5) -> list[jax.Array]:
    """Normal float32 arrays."""
    rng = np.random.default_rng(seed)
    return [jax.device_put(rng.standard_normal(s).astype(np.float32) * scale) for s in shapes]


def forced(f: Any, **options: Any) -> Any:
    return kj.pipeline(f, force=True, **options)


def custom_calls(f: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many pipelines the compiled ``jax.jit(f)`` holds."""
    return count(jax.jit(f).lower(*args, **kwargs).compile().as_text())


def count(compiled_text: str) -> int:
    return len(re.findall(rf'custom_call_target="{TARGET}"', compiled_text))


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set, given as a parameter, that the kernels of programs compiled in the test are for."""
    from kitsune_jax import _cpu

    before = _cpu.isa()
    assert _cpu.set_isa(request.param)
    yield request.param
    assert _cpu.set_isa(before)


def enable_x64() -> Any:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True)


def in_float64(f: Callable[..., Any], *args: Any, by_xla: bool = False) -> Any:
    """``f`` of the same arguments in float64.

    By NumPy, where it knows all primitives of ``f`` (it knows none of random numbers), and not by XLA: that takes several times as
    long to compile most functions of tests as NumPy takes to run them. ``by_xla``: where the result is what XLA makes of something,
    as of an index out of range, or where a function compiled once is called many times.
    """

    def up(x: Any) -> Any:
        floats = np.float16, np.float32, jnp.bfloat16
        return np.asarray(x, np.float64) if isinstance(x, jax.Array | np.ndarray) and x.dtype in floats else x

    args = jax.tree.map(up, args)
    with enable_x64():
        if by_xla:
            return jax.tree.map(np.asarray, jax.jit(f)(*args))
        closed, results = jax.make_jaxpr(f, return_shape=True)(*args)
        types, tree = jax.tree.flatten(results)
        try:
            outs = evaluate(closed, jax.tree.leaves(args), Arithmetic())
        except Unknown:
            return in_float64(f, *args, by_xla=True)
    return jax.tree.unflatten(tree, [np.asarray(x, t.dtype) for x, t in zip(outs, types, strict=True)])


def leaves_in_float64(f: Callable[..., Any], args: Any) -> list[np.ndarray]:
    """The leaves of ``in_float64(f, *args)``."""
    return jax.tree.leaves(in_float64(f, *args))


def close(got: Any, want: Any, tol: float = 2e-4) -> None:
    """Same tree, same shapes, values within ``tol`` relative or absolute."""
    assert jax.tree.structure(got) == jax.tree.structure(want)

    def one(a: Any, b: Any) -> None:
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tol, atol=tol)

    jax.tree.map(one, got, want)
