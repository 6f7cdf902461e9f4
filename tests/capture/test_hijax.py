"""High-level primitives (``jax.experimental.hijax``) are opened where they work on arrays, and named by their class elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.table import verify
from tests.support.checks import arrays, close, custom_calls, in_float64

hijax = pytest.importorskip("jax.experimental.hijax")
Base: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", None)
pytestmark = [
    pytest.mark.skipif(Base is None, reason="this JAX has no high-level primitives"),
    pytest.mark.filterwarnings("error:kitsune_jax could not"),
]
X, W = arrays(1, (37, 6), (6, 5))


class TwiceSine(Base if Base is not None else object):  # type: ignore[misc]
    def __init__(self, aval: Any) -> None:
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return 2 * jnp.sin(x)

    def vjp_fwd(self, nonzero: Any, x: Any) -> Any:
        return self(x), x

    def vjp_bwd_retval(self, x: Any, cotangent: Any) -> Any:
        return (TwiceSine(jax.typeof(x))(x + jnp.pi / 2) * cotangent,)


def network(x: Any, w: Any) -> Any:
    return jnp.tanh(TwiceSine(jax.typeof(x))(x) @ w)


def plain(x: Any, w: Any) -> Any:
    return jnp.tanh(2 * jnp.sin(x) @ w)


def test_a_high_level_primitive_is_opened() -> None:
    closed = jax.make_jaxpr(network)(X, W)
    assert "call_hi_primitive" in [eqn.primitive.name for eqn in _compat.open_parts(closed)[0].eqns]
    captured = capture(closed)
    verify(captured.graph)
    assert not captured.failures
    assert [op.kind for op in captured.graph.ops] == ["sin", "mul", "dot_general", "tanh"]


@pytest.mark.parametrize("argument", [None, 0, 1])
def test_functions_with_one_are_pipelined_and_explained_as_they_run(argument: int | None) -> None:
    def of(f: Any) -> Any:
        return f if argument is None else jax.grad(lambda *a: jnp.sum(f(*a)), argument)

    assert custom_calls(kj.pipeline(of(network), force=True), X, W) > 0
    close(jax.jit(kj.pipeline(of(network), force=True))(X, W), in_float64(of(plain), X, W))
    report = kj.explain(of(network), force=True)(X, W)
    assert not [r for r in report.rejected if "knows" in r.reason], report.rejected


def test_one_that_cannot_be_opened_is_named_by_its_class(monkeypatch: Any) -> None:
    monkeypatch.setattr(_compat, "expansion", lambda eqn: None)
    (op,) = (op for op in capture(jax.make_jaxpr(network)(X, W)).graph.ops if op.kind == "opaque")
    assert op.label == "TwiceSine" and op.reason.startswith("TwiceSine: ")


def test_a_custom_vjp_that_is_one_is_named_by_its_function(monkeypatch: Any) -> None:
    if not hasattr(jax.config, "jax_custom_vjp3"):
        pytest.skip("custom_vjp is no high-level primitive in this JAX")

    def square(x: Any) -> Any:
        return x * x

    before = jax.config.jax_custom_vjp3
    jax.config.update("jax_custom_vjp3", True)
    try:
        f = jax.custom_vjp(square)
        f.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
        closed = jax.make_jaxpr(lambda x: jnp.sin(f(x)))(X)
    finally:
        jax.config.update("jax_custom_vjp3", before)
    assert [op.kind for op in capture(closed).graph.ops] == ["mul", "sin"]
    monkeypatch.setattr(_compat, "expansion", lambda eqn: None)
    assert capture(closed).graph.ops[0].label == "square"
