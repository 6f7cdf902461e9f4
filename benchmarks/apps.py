"""The applications: a JAX function of (parameters, rows), its inputs, its arithmetic, and its float64 reference.

Comes in: a dtype and a number of rows. Goes out: ``Case``. Sizes and shapes follow the Kitsune paper's challenge applications and
common settings of the models named; inputs are random normal, because zeros run faster than data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import references

Params = dict[str, Any]
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class App:
    """``function(params, x)`` maps ``x`` [rows, width] to an array of [rows, ...], row by row.

    ``reference_vjp`` is the same in NumPy, for float64 arrays, and gives what ``jax.vjp`` gives: the result, and a function from
    its cotangent to the parameters' gradients. ``flops`` counts the multiply-adds of one row's matrix products, twice. The sizes
    that ``run --all`` measures: ``rows`` on a CPU, ``train_rows`` there in mode ``train``, ``cuda_rows`` on a GPU.
    """

    name: str
    title: str
    function: Callable[[Params, jax.Array], jax.Array]
    reference_vjp: Callable[[Params, np.ndarray], tuple[np.ndarray, references.Pullback]]
    shapes: dict[str, tuple[int, ...]]
    width: int
    flops: int
    rows: tuple[int, ...]
    train_rows: tuple[int, ...]
    cuda_rows: tuple[int, ...]

    def default_rows(self, platform: str, mode: str = "infer") -> tuple[int, ...]:
        if platform == "cuda":
            return self.cuda_rows
        return self.train_rows if mode == "train" else self.rows

    def reference(self, params: Params, x: np.ndarray) -> np.ndarray:
        return self.reference_vjp(params, x)[0]


@dataclasses.dataclass(frozen=True)
class Case:
    app: App
    dtype: str
    rows: int
    params: Params
    x: jax.Array


def make_case(name: str, dtype: str, rows: int, seed: int = 0) -> Case:
    """Inputs for one measurement. Raises ``KeyError`` for an unknown app or dtype."""
    app, jax_dtype = APPS[name], DTYPES[dtype]
    rng = np.random.default_rng(seed)

    def array(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale), jax_dtype)

    def parameter(key: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 2:
            return array(*shape, scale=(2.0 / shape[0]) ** 0.5)
        return array(*shape, scale=0.1) + (1 if key.startswith("gain") else 0)

    params = {key: parameter(key, shape) for key, shape in app.shapes.items()}
    return Case(app, dtype, rows, params, array(rows, app.width))


# NeRF's density network (Mildenhall et al. 2020, arXiv:2003.08934): 8 layers of 256 over the 63-d encoded position, the encoding
# concatenated again after layer 4, and a head of four (three colours and a density).
_NERF_IN = (63, 256, 256, 256, 256 + 63, 256, 256, 256, 256)
_NERF_OUT = (256,) * 8 + (4,)


def nerf(params: Params, x: jax.Array) -> jax.Array:
    h = x
    for i in range(8):
        if i == references.NERF_SKIP:
            h = jnp.concatenate([h, x], axis=-1)
        h = jax.nn.relu(h @ params[f"w{i}"] + params[f"b{i}"])
    return h @ params["w8"] + params["b8"]


# The edge update of MeshGraphNets (Pfaff et al. 2021, arXiv:2010.03409) without its gathers: an MLP over [edge, sender, receiver]
# of 128 each, layer normalisation, and the edge's own latent added.
def mgn(params: Params, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ params["w0"] + params["b0"])
    h = (h @ params["w1"] + params["b1"]).astype(jnp.float32)
    mean = h.mean(-1, keepdims=True)
    variance = ((h - mean) ** 2).mean(-1, keepdims=True)
    h = (h - mean) * jax.lax.rsqrt(variance + 1e-5) * params["gain"].astype(jnp.float32) + params["bias"].astype(jnp.float32)
    return x[:, :128] + h.astype(x.dtype)


# A Llama-like feed-forward block (Shazeer 2020, arXiv:2002.05202): RMSNorm, SwiGLU 512-1408-512, residual.
def swiglu(params: Params, x: jax.Array) -> jax.Array:
    f = x.astype(jnp.float32)
    f = f * jax.lax.rsqrt((f * f).mean(-1, keepdims=True) + 1e-6) * params["gain"].astype(jnp.float32)
    h = f.astype(x.dtype)
    return x + (jax.nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"]


def _app(
    name: str,
    title: str,
    function: Callable[[Params, jax.Array], jax.Array],
    reference_vjp: Callable[[Params, np.ndarray], tuple[np.ndarray, references.Pullback]],
    shapes: dict[str, tuple[int, ...]],
    width: int,
    rows: tuple[int, ...],
    train_rows: tuple[int, ...],
    cuda_rows: tuple[int, ...],
) -> App:
    flops = sum(2 * s[0] * s[1] for s in shapes.values() if len(s) == 2)
    return App(name, title, function, reference_vjp, shapes, width, flops, rows, train_rows, cuda_rows)


APPS: dict[str, App] = {
    app.name: app
    for app in (
        _app(
            "nerf",
            "NeRF MLP 8 x 256",
            nerf,
            references.nerf,
            {f"w{i}": (_NERF_IN[i], _NERF_OUT[i]) for i in range(9)} | {f"b{i}": (_NERF_OUT[i],) for i in range(9)},
            63,
            (65_536, 262_144),
            (65_536, 262_144),
            (65_536, 262_144, 1_048_576),
        ),
        _app(
            "mgn",
            "MeshGraphNets edge MLP 384-128-128",
            mgn,
            references.mgn,
            {"w0": (384, 128), "b0": (128,), "w1": (128, 128), "b1": (128,), "gain": (128,), "bias": (128,)},
            384,
            (200_000,),
            (100_000,),
            (200_000, 1_000_000),
        ),
        _app(
            "swiglu",
            "SwiGLU block 512-1408-512",
            swiglu,
            references.swiglu,
            {"gain": (512,), "gate": (512, 1408), "up": (512, 1408), "down": (1408, 512)},
            512,
            (8_192,),
            (8_192,),
            (65_536,),
        ),
    )
}
