"""Kernel families of the CUDA target as data: what its kernels are tested with: in the emulator, disassembled, and on a device.

Comes in: a family's name, rows, a dtype. Goes out: a function and its arguments. Invariants: values stay near 1, so that tolerances
may be those of the dtype; every row differs, so that a row in a wrong place is seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.graphs import layer_norm

Array = Any
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Arg:
    """``shape`` with -1 for the rows; ``dtype``: None is the dtype of the case; normal numbers times ``scale``, or where there are
    ``classes`` integers below them."""

    shape: tuple[int, ...]
    dtype: str | None = None
    scale: float = 1.0
    classes: int = 0

    def draw(self, rng: np.random.Generator, rows: int, dtype: str) -> Array:
        shape = _shape(self, rows)
        if self.classes:
            return jax.device_put(np.asarray(rng.integers(0, self.classes, shape), self.dtype or dtype))
        return jax.device_put(np.asarray(rng.standard_normal(shape).astype(np.float32) * self.scale, self.dtype or dtype))


@dataclasses.dataclass(frozen=True)
class Family:
    """``function(*arguments)``; weights first, then what has rows. ``small``: a fraction of a second in the emulator. ``rows``:
    those of the runs on a device, where not any will do. ``deterministic``: what ``kj.pipeline`` is told."""

    name: str
    function: Callable[..., Any]
    args: tuple[Arg, ...]
    small: bool = True
    dtypes: tuple[str, ...] = DTYPES
    rows: tuple[int, ...] = ()
    deterministic: bool = True

    def arguments(self, rows: int, dtype: str, seed: int = 0) -> tuple[Array, ...]:
        rng = np.random.default_rng(seed)
        return tuple(a.draw(rng, rows, dtype) for a in self.args)

    def shapes(self, rows: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What stands for the arguments where nothing runs."""
        return tuple(jax.ShapeDtypeStruct(_shape(a, rows), a.dtype or dtype) for a in self.args)


def _shape(arg: Arg, rows: int) -> tuple[int, ...]:
    return tuple(rows if n == -1 else n for n in arg.shape)


def weight(*shape: int, dtype: str | None = None) -> Arg:
    """Keeps the size of what it multiplies; the root of 2 makes up for a ReLU."""
    return Arg(shape, dtype, float((2.0 / shape[0]) ** 0.5))


def bias(n: int, dtype: str | None = None) -> Arg:
    return Arg((n,), dtype, 0.1)


# -- the functions


def dense_relu(w: Array, b: Array, x: Array) -> Array:
    return jax.nn.relu(x @ w + b)


def mlp(*args: Array) -> Array:
    """Layers (w, b) with ReLU between, then x."""
    *params, x = args
    for k in range(0, len(params), 2):
        x = x @ params[k] + params[k + 1]
        x = jax.nn.relu(x) if k + 2 < len(params) else x
    return x


def nerf(*args: Array) -> tuple[Array, Array]:
    """A chain that takes its input in again half way, a density head, and a colour head that sees the view direction as well."""
    *params, x, view = args
    layers, (w_sigma, b_sigma, w_view, b_view, w_rgb, b_rgb) = params[:-6], params[-6:]
    h = x
    for k in range(0, len(layers), 2):
        if k == len(layers) // 4 * 2:
            h = jnp.concatenate([h, x], -1)
        h = jax.nn.relu(h @ layers[k] + layers[k + 1])
    sigma = jax.nn.relu(h @ w_sigma + b_sigma)
    h = jax.nn.relu(jnp.concatenate([h, view], -1) @ w_view + b_view)
    return jax.nn.sigmoid(h @ w_rgb + b_rgb), sigma


def _nerf_args(width: int, depth: int, x: int, view: int) -> tuple[Arg, ...]:
    skip = depth // 2
    inputs = [x, *[width + x if k == skip else width for k in range(1, depth)]]
    layers = [a for n in inputs for a in (weight(n, width), bias(width))]
    half = width // 2
    heads = [weight(width, 1), bias(1), weight(width + view, half), bias(half), weight(half, 3), bias(3)]
    return (*layers, *heads, Arg((-1, x)), Arg((-1, view)))


def edge_update(*args: Array) -> Array:
    """MeshGraphNets' edge update: an MLP, layer normalisation in float32, and a residual."""
    *layers, gain, shift, x = args
    h = mlp(*layers, x).astype(jnp.float32)
    return x[:, : gain.shape[0]] + layer_norm(h, gain, shift).astype(x.dtype)


def swiglu(w_gate: Array, w_up: Array, w_down: Array, x: Array) -> Array:
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def loss(w0: Array, b0: Array, w1: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Three sinks: the mean of squared errors, and sums of the hidden layer and of the errors by column."""
    h = jax.nn.relu(x @ w0 + b0)
    error = (h @ w1 - y).astype(jnp.float32)
    return jnp.mean(error * error), h.astype(jnp.float32).sum(0), error.max(0)


def softmax_rows(x: Array) -> Array:
    return jax.nn.softmax(x, axis=-1)


def rms_norm(gain: Array, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def activations(w0: Array, w1: Array, w2: Array, x: Array) -> Array:
    return jnp.tanh(jax.nn.silu(jax.nn.gelu(x @ w0) @ w1) @ w2)


def narrow(w: Array, x: Array, mask: Array) -> Array:
    """As a gradient goes back through a head of four columns: half of what a product's instruction takes is zero."""
    return jnp.where(mask > 0, jnp.tanh(x) @ w, 0)


def mixed(w0: Array, b0: Array, w1: Array, x: Array) -> tuple[Array, Array]:
    """A float32 input into 16-bit weights, a float32 bias, and a float32 result beside a narrow one."""
    h = jnp.dot(x.astype(w0.dtype), w0, preferred_element_type=jnp.float32) + b0
    narrow = jnp.tanh(h).astype(w1.dtype)
    return jnp.dot(narrow, w1, preferred_element_type=jnp.float32) + x[:, :16], narrow


def two_sums(w0: Array, w1: Array, x: Array) -> Array:
    """One value, normalised, read by two products that meet again: a diamond."""
    h = jax.nn.relu(x @ w0)
    return (h @ w1) * jax.nn.sigmoid(h @ w1[:, ::-1]) + h


def edge_phase(
    w0: Array, b0: Array, w1: Array, b1: Array, gain: Array, shift: Array,
    nodes: Array, edges: Array, senders: Array, receivers: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """The edges of a step of message passing: both ends of each are gathered, and what a node receives is summed up."""
    x = jnp.concatenate([edges, jnp.tanh(nodes)[senders], jnp.tanh(nodes)[receivers]], -1)
    new = layer_norm(jax.nn.relu(x @ w0 + b0) @ w1 + b1, gain, shift) + edges
    return new, jax.ops.segment_sum(new, receivers, len(nodes))


def heads(nodes: Array, edges: Array, senders: Array, receivers: Array) -> Array:
    """Attention over a graph, without its softmax: a score for each of four heads weighs what the head has of the sender."""
    sent = nodes[senders].reshape(-1, 4, 8)
    score = jax.nn.leaky_relu((sent * (nodes[receivers] + edges).reshape(-1, 4, 8)).sum(-1))
    return jnp.maximum(jax.ops.segment_max((score[:, :, None] * sent).reshape(-1, 32), receivers, len(nodes)), -4)  # finite


def picked_products(pairs: Array, x: Array, ids: Array, *tables: Array) -> Array:
    """DLRM's interaction: the products of each two of a vector and rows of tables, of which ``pairs`` are picked."""
    vectors = jnp.stack([x, *(jnp.take(t, ids[:, i], axis=0) for i, t in enumerate(tables))], 1)
    products = jnp.einsum("bif,bjf->bij", vectors, vectors).reshape(len(x), -1)
    return products[:, pairs]


def interaction(w0: Array, b0: Array, w1: Array, pairs: Array, numbers: Array, ids: Array, *tables: Array) -> Array:
    """DLRM in small: a layer in front of the interaction, and one behind it, which reads both."""
    x = jax.nn.relu(numbers @ w0 + b0)
    return jnp.concatenate([x, picked_products(pairs, x, ids, *tables)], -1) @ w1


_NODES = 37
_ENDS = (Arg((-1,), "int32", classes=_NODES), Arg((-1,), "int32", classes=_NODES + 2))  # two of whose nodes there are not


def recurrence(w: Array, u: Array, b: Array, h: Array, xs: Array) -> tuple[Array, Array]:
    """Of few rows: its weights lie in each CTA, or are shared out over a cluster."""

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(x @ w + h @ u + b)
        return h, h

    return jax.lax.scan(step, h, xs)


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("dense", dense_relu, (weight(32, 64), bias(64), Arg((-1, 32)))),
        Family(
            "mlp",
            mlp,
            (weight(27, 64), bias(64), weight(64, 32), bias(32), weight(32, 64), bias(64), weight(64, 3), bias(3), Arg((-1, 27))),
        ),
        Family("nerf-small", nerf, _nerf_args(32, 4, 27, 9)),
        Family("nerf", nerf, _nerf_args(256, 8, 63, 27), small=False),
        Family(
            "edge-update-small",
            edge_update,
            (weight(96, 32), bias(32), weight(32, 32), bias(32), Arg((32,), "float32"), Arg((32,), "float32"), Arg((-1, 96))),
        ),
        Family(
            "edge-update",
            edge_update,
            (
                *(weight(384, 128), bias(128), weight(128, 128), bias(128), weight(128, 128), bias(128)),
                *(Arg((128,), "float32"), Arg((128,), "float32"), Arg((-1, 384))),
            ),
            small=False,
        ),
        Family(
            "edge-phase-small",
            edge_phase,
            (
                *(weight(96, 32), bias(32), weight(32, 32), bias(32), Arg((32,), "float32"), Arg((32,), "float32")),
                *(Arg((_NODES, 32)), Arg((-1, 32)), *_ENDS),
            ),
        ),
        Family(
            "edge-phase",
            edge_phase,
            (
                *(weight(384, 128), bias(128), weight(128, 128), bias(128), Arg((128,), "float32"), Arg((128,), "float32")),
                *(Arg((_NODES, 128)), Arg((-1, 128)), *_ENDS),
            ),
            small=False,
        ),
        Family(
            "interaction-small",
            interaction,
            (
                *(weight(13, 16), bias(16), weight(16 + 10, 24), Arg((10,), "int32", classes=25)),
                *(Arg((-1, 13)), Arg((-1, 4), "int32", classes=_NODES), *(Arg((_NODES, 16), scale=0.4),) * 4),
            ),
        ),
        Family(
            "interaction",
            picked_products,
            (
                Arg((351,), "int32", classes=27 * 27),
                *(Arg((-1, 128), scale=0.3), Arg((-1, 26), "int32", classes=_NODES), *(Arg((_NODES, 128), scale=0.3),) * 26),
            ),
            small=False,
        ),
        Family("heads", heads, (Arg((_NODES, 32)), Arg((-1, 32)), *_ENDS)),
        Family("swiglu-small", swiglu, (weight(64, 96), weight(64, 96), weight(96, 64), Arg((-1, 64)))),
        Family("swiglu", swiglu, (weight(512, 1408), weight(512, 1408), weight(1408, 512), Arg((-1, 512))), small=False),
        Family("loss", loss, (weight(32, 64), bias(64), weight(64, 16), Arg((-1, 32)), Arg((-1, 16)))),
        Family("softmax", softmax_rows, (Arg((-1, 40)),)),
        Family("rms-norm", rms_norm, (Arg((72,)), Arg((-1, 72)))),
        Family("activations", activations, (weight(32, 48), weight(48, 64), weight(64, 24), Arg((-1, 32)))),
        Family("narrow", narrow, (weight(4, 256), Arg((-1, 4)), Arg((-1, 256)))),
        Family(
            "mixed",
            mixed,
            (weight(32, 64), bias(64, "float32"), weight(64, 16), Arg((-1, 32), "float32")),
            dtypes=("bfloat16", "float16"),
        ),
        Family("diamond", two_sums, (weight(64, 64), weight(64, 64), Arg((-1, 64)))),
        Family("recurrence", recurrence, (weight(64, 64), weight(64, 64), bias(64), Arg((-1, 64)), Arg((3, -1, 64)))),
        # A stand-in for layers of 1024, whose weights no CTA holds: wide enough to be split by columns.
        Family("wide", mlp, (weight(256, 256), bias(256), weight(256, 256), bias(256), Arg((-1, 256))), small=False),
    )
}
