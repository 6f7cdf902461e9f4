"""Parameters in parts on all devices, and a pipelined loss: its forward and backward pass are calls that read the same ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax.sharding.by_xla import bytes_sent, collectives
from tests.support.checks import close, count, in_float64

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax")  # a fall-back to plain HLO is a failure here

LAYERS, ROWS, WIDTH = 3, 128, 64
_rng = np.random.default_rng(0)
X, Y = (_rng.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(2))
WEIGHTS = (_rng.standard_normal((LAYERS, WIDTH, WIDTH)) / 8).astype(np.float32)
BIASES = (_rng.standard_normal((LAYERS, WIDTH)) / 8).astype(np.float32)


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def layer(explicit: bool) -> Callable[..., Any]:
    """On an explicit mesh the user says where parameters are gathered."""

    def whole(x: Any) -> Any:
        return jax.sharding.reshard(x, P(*(None,) * x.ndim)) if explicit else x

    return lambda x, w, b: jnp.tanh(x @ whole(w) + whole(b))


def unrolled(f: Any) -> Any:
    def loss(w: Any, b: Any, x: Any, y: Any) -> Any:
        for k in range(LAYERS):
            x = f(x, w[k], b[k])
        return jnp.mean((x - y) ** 2)

    return loss


def scanned(f: Any) -> Any:
    def loss(w: Any, b: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.lax.scan(lambda x, p: (f(x, *p), None), x, (w, b))[0] - y) ** 2)

    return loss


def step(loss: Any) -> Any:
    """A training step whose update is outside of the pipeline."""

    def stepped(w: Any, b: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss, (0, 1))(w, b, x, y)
        return value, *jax.tree.map(lambda p, g: p - 0.1 * g, (w, b), grads)

    return stepped


def gathers(text: str) -> list[int]:
    found = collectives(text)
    return [found[kind] for kind in ("all-gather", "all-to-all", "collective-permute")]


@pytest.mark.parametrize("again", [False, True], ids=["stored", "checkpoint"])
@pytest.mark.parametrize("loop", [unrolled, scanned])
@pytest.mark.parametrize(
    ("kind", "columns"),
    [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, False)],
    ids=["rows", "columns", "explicit"],
)
def test_forward_and_backward_pass_share_the_gathers_of_parameters(kind: AxisType, columns: bool, loop: Any, again: bool) -> None:
    on, f = mesh(kind), layer(kind == AxisType.Explicit)
    loss = loop(jax.checkpoint(f) if again else f)
    weights, biases = (list(WEIGHTS), list(BIASES)) if loop is unrolled else (WEIGHTS, BIASES)
    outer = () if loop is unrolled else (None,)
    of_weights = NamedSharding(on, P(*outer, None, "d") if columns else P(*outer, "d", None))
    of_biases, of_rows = NamedSharding(on, P(*outer, "d")), NamedSharding(on, P("d", None))
    # Of a list of arrays, the sharding of each of them.
    places = of_weights, of_biases, of_rows, of_rows
    with jax.set_mesh(on) if kind == AxisType.Explicit else contextlib.nullcontext():
        args = jax.device_put((weights, biases, X, Y), places)
        wanted = (NamedSharding(on, P()), *places[:2])
        ours, plain = (
            jax.jit(step(g), in_shardings=places, out_shardings=wanted).lower(*args).compile()
            for g in (kj.pipeline(loss, force=True, strict=True), loss)
        )
        assert count(ours.as_text()) > 1
        assert all(a <= b for a, b in zip(gathers(ours.as_text()), gathers(plain.as_text()), strict=True))
        assert bytes_sent(ours.as_text()) <= 1.001 * bytes_sent(plain.as_text())
        if again and loop is unrolled:
            assert ours.memory_analysis().temp_size_in_bytes <= plain.memory_analysis().temp_size_in_bytes + 4096
        got = ours(*args)
    close(got, in_float64(step(loop(layer(False))), weights, biases, X, Y))


def test_parts_of_a_function_share_the_gather_of_a_parameter() -> None:
    """An operator that no pipeline has divides it into calls."""

    def f(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        h = jnp.real(jnp.fft.fft(h, axis=1))
        return jnp.tanh(h @ w)

    on = mesh(AxisType.Auto)
    args = [jax.device_put(x, NamedSharding(on, P("d"))) for x in (X, WEIGHTS[0])]
    ours, plain = (jax.jit(g).lower(*args).compile() for g in (kj.pipeline(f, force=True, strict=True), f))
    assert count(ours.as_text()) == 2
    assert gathers(ours.as_text()) == gathers(plain.as_text()) == [1, 0, 0]
    close(ours(*args), in_float64(f, X, WEIGHTS[0]), 1e-3)
