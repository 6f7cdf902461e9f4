"""Training steps as kernel families: a loss and its gradients, which become one kernel, forward and backward pass together.

Comes in: a family's name, rows, a dtype (see ``cuda_cases``). Goes out: a function that gives the loss and gradients, and its
arguments. Invariants: activations are smooth, because the mask of a ReLU flips where rounding differs and no tolerance covers that
(``relu_step`` of integers is exact, and has one); functions can be pickled, because ``scripts/gpu`` sends them to processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.cuda_cases import FAMILIES, Arg, Array, Family, bias, edge_update, rms_norm, swiglu, weight
from tests.support.graphs import layer_norm

Network = Callable[..., Any]


def value_and_grads(loss: Callable[..., Array], count: int, *args: Array) -> tuple[Array, tuple[Array, ...]]:
    """``loss`` of ``args`` and its gradients by the first ``count`` of them."""
    return jax.value_and_grad(loss, tuple(range(count)))(*args)


# -- networks: parameters first, then x


def dense(activation: str, *args: Array) -> Array:
    """Layers (w, b) with an activation of ``jax.nn`` between."""
    *params, x = args
    for k in range(0, len(params), 2):
        x = x @ params[k] + params[k + 1]
        x = getattr(jax.nn, activation)(x) if k + 2 < len(params) else x
    return x


def normalised(w: Array, gain: Array, shift: Array, x: Array) -> Array:
    return layer_norm((x @ w).astype(jnp.float32), gain, shift).astype(x.dtype)


def attended(w: Array, values: Array, x: Array) -> Array:
    return jax.nn.softmax(x @ w, axis=-1) @ values


def skip(w0: Array, b0: Array, w1: Array, b1: Array, w2: Array, b2: Array, x: Array) -> Array:
    """NeRF's input, which comes in again half way."""
    h = jax.nn.silu(x @ w0 + b0)
    h = jax.nn.silu(jnp.concatenate([h, x], -1) @ w1 + b1)
    return h @ w2 + b2


def gated_block(gain: Array, w_gate: Array, w_up: Array, w_down: Array, x: Array) -> Array:
    return x + swiglu(w_gate, w_up, w_down, rms_norm(gain, x))


def residual(w0: Array, b0: Array, w1: Array, b1: Array, x: Array) -> Array:
    return x + jax.nn.gelu(x @ w0 + b0) @ w1 + b1


def heads(w0: Array, w1: Array, x: Array) -> Array:
    """One input of two products, so of two weight gradients."""
    return jnp.concatenate([jnp.tanh(x @ w0), jax.nn.sigmoid(x @ w1)], -1)


# -- losses: of a network's arguments, then the target


def squared_error(network: Network, *args: Array) -> Array:
    *inputs, y = args
    error = (network(*inputs) - y).astype(jnp.float32)
    return jnp.mean(error * error)


def summed_squares(network: Network, *args: Array) -> Array:
    """Large enough that gradients by what a softmax divides, multiples of its sum ** -2, are no subnormal numbers of float16."""
    *inputs, y = args
    return jnp.sum((network(*inputs) - y).astype(jnp.float32) ** 2)


def cross_entropy(network: Network, *args: Array) -> Array:
    """Of the classes in ``labels``, looked up as optax does."""
    *inputs, labels = args
    logits = network(*inputs).astype(jnp.float32)
    taken = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - taken)


def one_hot_cross_entropy(network: Network, *args: Array) -> Array:
    *inputs, labels = args
    logits = network(*inputs).astype(jnp.float32)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[1]), -1))


def binary_cross_entropy(network: Network, *args: Array) -> Array:
    *inputs, y = args
    logits, y = network(*inputs).astype(jnp.float32), y.astype(jnp.float32)
    return -jnp.mean(y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits))


# -- without a loss


def pulled_back(w0: Array, w1: Array, x: Array, h: Array, g: Array) -> tuple[Array, ...]:
    """What ``jax.vjp`` leaves for later of ``tanh(x @ w0) @ w1``, with ``h`` saved: all gradients of the cotangent ``g``."""
    dh = (g @ w1.T) * (1 - h * h)
    return x.T @ dh, h.T @ g, g.astype(jnp.float32).sum(0), dh @ w0.T


# -- families


def _layers(*widths: int) -> tuple[Arg, ...]:
    return tuple(a for m, n in zip(widths, widths[1:], strict=False) for a in (weight(m, n), bias(n)))


def _step(
    name: str,
    loss: Callable[..., Array],
    network: Network,
    params: tuple[Arg, ...],
    x: int,
    target: Arg,
    *,
    by_x: bool = False,
    small: bool = True,
) -> Family:
    """The step that ``loss`` of ``network`` makes. ``by_x``: the gradient of the rows, too."""
    function = functools.partial(value_and_grads, functools.partial(loss, network), len(params) + by_x)
    return Family(name, function, (*params, Arg((-1, x)), target), small)


def _labels(classes: int) -> Arg:
    return Arg((-1,), "int32", classes=classes)


def _activated(name: str, *widths: int) -> Family:
    network = functools.partial(dense, name)
    return _step(f"{name}-step", squared_error, network, _layers(*widths), widths[0], Arg((-1, widths[-1])))


_CLASSIFIER = functools.partial(dense, "tanh")
_VECTORS = (Arg((40,), "float32"), Arg((40,), "float32"))

TRAINING: dict[str, Family] = {
    f.name: f
    for f in (
        _activated("tanh", 32, 64, 16),
        _activated("gelu", 27, 48, 24, 3),
        _activated("silu", 24, 40, 8),
        _step("labels-step", cross_entropy, _CLASSIFIER, _layers(24, 32, 10), 24, _labels(10)),
        _step("one-hot-step", one_hot_cross_entropy, _CLASSIFIER, _layers(24, 32, 10), 24, _labels(10)),
        _step("binary-step", binary_cross_entropy, _CLASSIFIER, _layers(24, 32, 5), 24, Arg((-1, 5))),
        _step("layer-norm-step", squared_error, normalised, (weight(24, 40), *_VECTORS), 24, Arg((-1, 40)), by_x=True),
        _step("rms-norm-step", squared_error, rms_norm, (Arg((72,)),), 72, Arg((-1, 72)), by_x=True),
        _step("softmax-step", summed_squares, attended, (weight(32, 40), weight(40, 16)), 32, Arg((-1, 16)), by_x=True),
        _step("skip-step", squared_error, skip, (*_layers(27, 32), *_layers(59, 32), *_layers(32, 4)), 27, Arg((-1, 4))),
        _step(
            "gated-step",
            squared_error,
            gated_block,
            (Arg((32,)), weight(32, 48), weight(32, 48), weight(48, 32)),
            32,
            Arg((-1, 32)),
            by_x=True,
        ),
        _step("residual-step", squared_error, residual, _layers(32, 64, 32), 32, Arg((-1, 32)), by_x=True),
        _step("heads-step", squared_error, heads, (weight(40, 16), weight(40, 32)), 40, Arg((-1, 48))),
        _step("regression-step", squared_error, _CLASSIFIER, _layers(13, 64, 1), 13, Arg((-1, 1))),
        Family(
            "pulled-back", pulled_back, (weight(32, 48), weight(48, 16), Arg((-1, 32)), Arg((-1, 48), scale=0.5), Arg((-1, 16)))
        ),
        # 256 x 128 sums: more than the registers of one warpgroup, so lanes or CTAs share them.
        _step("wide-step", squared_error, _CLASSIFIER, _layers(256, 128, 4), 256, Arg((-1, 4)), small=False),
    )
}

# Compiled only: ReLUs, and too large to be emulated.
COMPILED: dict[str, Family] = {
    f.name: f
    for f in (
        _step("edge-update-step", squared_error, edge_update, FAMILIES["edge-update"].args[:-1], 384, Arg((-1, 128)), small=False),
    )
}


# -- exact


def relu_step(w0: Array, b0: Array, w1: Array, x: Array, y: Array) -> tuple[Array, ...]:
    """A ReLU layer, half the sum of squares, and the gradients by everything but ``y``."""

    def loss(w0: Array, b0: Array, w1: Array, x: Array) -> Array:
        error = (jax.nn.relu(x @ w0 + b0) @ w1 - y).astype(jnp.float32)
        return jnp.sum(error * error) / 2

    value, grads = jax.value_and_grad(loss, (0, 1, 2, 3))(w0, b0, w1, x)
    return value, *grads


def integers(rows: int, seed: int, widths: tuple[int, int, int] = (24, 40, 16)) -> list[np.ndarray]:
    """Arguments of ``relu_step``: so small and so sparse that its values stay below 256, where 16-bit floats count in ones."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, share: float) -> np.ndarray:
        return rng.integers(-1, 2, shape) * (rng.random(shape) < share)

    m, n, k = widths
    shapes = ((m, n), (n,), (n, k), (rows, m), (rows, k))
    return [draw(*shape, share=share) for shape, share in zip(shapes, (0.6, 1.0, 0.25, 0.6, 1.0), strict=True)]


def relu_step_of_integers(w0: np.ndarray, b0: np.ndarray, w1: np.ndarray, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """``relu_step`` by hand. Fails where a value of a tile is beyond what all 16-bit floats hold."""
    before = x @ w0 + b0
    h = np.maximum(before, 0)
    error = h @ w1 - y
    dh = (error @ w1.T) * (before > 0)
    dx = dh @ w0.T
    assert max(np.abs(a).max(initial=0) for a in (before, error, error @ w1.T, dx)) <= 256
    return [(error**2).sum() / 2, x.T @ dh, dh.sum(0), h.T @ error, dx]
