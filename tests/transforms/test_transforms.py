"""Every JAX transformation of a pipelined function: equal to the plain function, and a custom call was really there."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from tests.support.checks import close, count, custom_calls, enable_x64, in_float64
from tests.support.transform_cases import CASES, W1, W2, X, loss, mlp

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


def _identity(f: Any, **_: Any) -> Any:
    return f


@pytest.mark.sampled(2, force=True)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_plain_function(name: str, force: bool) -> None:
    build, args = CASES[name]
    got_fn = build(functools.partial(kj.pipeline, force=force))
    want = in_float64(build(_identity), *args)
    compiled = jax.jit(got_fn).lower(*args).compile()
    close(compiled(*args), want)
    if force:
        assert count(compiled.as_text()) > 0, "nothing was pipelined"


@pytest.mark.parametrize("name", ["forward", "grad", "vmap_with_shared_weights", "jvp", "trees", "residuals_recompute"])
def test_equal_without_jit(name: str) -> None:
    build, args = CASES[name]
    close(build(functools.partial(kj.pipeline, force=True))(*args), in_float64(build(_identity), *args))


def test_environment_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    before = custom_calls(kj.pipeline(f, force=False), X, W1)
    monkeypatch.setenv("KITSUNE_FORCE", "1")
    assert custom_calls(kj.pipeline(f), X, W1) > 0
    monkeypatch.delenv("KITSUNE_FORCE")
    with kj.config.override(force=True):
        assert custom_calls(kj.pipeline(f), X, W1) > 0
    assert custom_calls(kj.pipeline(f), X, W1) == before


def test_disabled_is_the_plain_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    p = kj.pipeline(mlp, force=True)
    assert custom_calls(p, X, W1, W2) == 0
    assert "kitsune" not in str(jax.make_jaxpr(p)(X, W1, W2))
    close(p(X, W1, W2), in_float64(mlp, X, W1, W2))


def test_decorator_with_and_without_arguments() -> None:
    @kj.pipeline
    def f(x: Any) -> Any:
        """Doc."""
        return x * 2

    @kj.pipeline(residuals="recompute", force=True)
    def g(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    assert (f.__name__, f.__doc__) == ("f", "Doc.")
    close(f(X), X * 2)
    assert custom_calls(g, X, W1) > 0


def test_pipelined_method() -> None:
    class Layer:
        scale = 2.0

        @kj.pipeline(force=True)
        def __call__(self, x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w) * self.scale

    layer = Layer()
    close(layer(X, W1), jnp.tanh(X @ W1) * 2)
    assert custom_calls(lambda x, w: layer(x, w), X, W1) > 0


def test_donated_arguments() -> None:
    p = kj.pipeline(lambda x, w: jnp.tanh(x @ w @ w.T), donate_argnums=0, force=True)
    x = X * 1.0
    close(p(x, W1), jnp.tanh(X @ W1 @ W1.T))
    assert x.is_deleted()
    f = jax.jit(kj.pipeline(lambda x, w: jnp.tanh(x @ w @ w.T), force=True), donate_argnums=0)
    assert count(f.lower(X, W1).compile().as_text()) > 0
    x = X * 1.0
    close(f(x, W1), jnp.tanh(X @ W1 @ W1.T))
    assert x.is_deleted()


def test_static_arguments() -> None:
    def f(x: Any, layers: int, w: Any, *, activation: str = "tanh") -> Any:
        for _ in range(layers):
            x = getattr(jnp, activation)(x @ w @ w.T)
        return x

    p = kj.pipeline(f, static_argnums=1, static_argnames="activation", force=True)
    close(p(X, 2, W1, activation="sin"), f(X, 2, W1, activation="sin"))
    close(p(X, 1, W1), f(X, 1, W1))
    assert custom_calls(lambda x, w: p(x, 2, w, activation="sin"), X, W1) > 0


def test_static_numbers_and_names_may_disagree() -> None:
    """As in ``jax.jit``: one is completed from the other only where that is not given."""

    def f(x: Any, y: Any) -> Any:
        return x * (1.0 if isinstance(y, jax.core.Tracer) else 2.0)

    by_number = kj.pipeline(f, static_argnums=1, static_argnames=())
    np.testing.assert_array_equal(jax.jit(by_number, static_argnums=1, static_argnames=())(X, y=3), X)
    np.testing.assert_array_equal(by_number(X, 3), 2 * X)
    np.testing.assert_array_equal(by_number(X, y=3), X)


def test_make_jaxpr_and_eval_shape() -> None:
    p = kj.pipeline(mlp, force=True)
    assert "kitsune_pipeline" in str(jax.make_jaxpr(p)(X, W1, W2))
    shape = jax.eval_shape(jax.grad(loss(p)), X, W1, W2)
    assert (shape.shape, shape.dtype) == (X.shape, X.dtype)
    closed = jax.make_jaxpr(p)(X, W1, W2)
    close(jax.extend.core.jaxpr_as_fun(closed)(X, W1, W2)[0], in_float64(mlp, X, W1, W2))


def test_ahead_of_time() -> None:
    p = kj.pipeline(mlp, force=True)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W1, W2)]
    for lowered in (p.lower(*shapes), jax.jit(p).lower(*shapes)):
        compiled = lowered.compile()
        assert count(compiled.as_text()) > 0
        close(compiled(X, W1, W2), in_float64(mlp, X, W1, W2))


def test_several_threads() -> None:
    p = kj.pipeline(mlp, force=True)
    failures: list[BaseException] = []

    def work(rows: int) -> None:
        try:
            x = jnp.ones((rows, 8)) * 0.1
            close(p(x, W1, W2), in_float64(mlp, x, W1, W2))
            close(jax.grad(loss(p), 1)(x, W1, W2), in_float64(jax.grad(loss(mlp), 1), x, W1, W2))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(3 + i % 3,)) for i in range(9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def test_bfloat16_with_float32_parameters() -> None:
    def f(x: Any, w1: Any, w2: Any) -> Any:
        h = jnp.dot(x.astype(jnp.bfloat16), w1.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return jax.nn.relu(h) @ w2

    g = jax.grad(loss(kj.pipeline(f, force=True)), (0, 1, 2))
    assert custom_calls(g, X, W1, W2) > 0
    got = jax.jit(g)(X, W1, W2)
    assert [a.dtype for a in got] == [jnp.float32] * 3
    close(got, in_float64(jax.grad(loss(mlp_linear), (0, 1, 2)), X, W1, W2), 5e-2)


def mlp_linear(x: Any, w1: Any, w2: Any) -> Any:
    return jax.nn.relu(x @ w1) @ w2


def test_float64_mode() -> None:
    with enable_x64():
        x, w1, w2 = (jnp.asarray(np.asarray(a), jnp.float64) for a in (X, W1, W2))
        out = jax.jit(kj.pipeline(mlp, force=True))(x, w1, w2)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, mlp(x, w1, w2), rtol=1e-12)
