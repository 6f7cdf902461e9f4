"""The applications in NumPy, with their gradients written out by hand: what every column is checked against.

Comes in: float64 parameters and rows. Goes out: as of ``jax.vjp``, the result and a function from its cotangent to the gradients of
the parameters. Invariant: nothing here comes from JAX, so an error of its differentiation is seen too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, Any]
Pullback = Callable[[np.ndarray], Arrays]
NERF_SKIP = 4  # the layer that reads the encoding again


def nerf(params: Arrays, x: np.ndarray) -> tuple[np.ndarray, Pullback]:
    inputs = []
    h = x
    for i in range(8):
        inputs.append(np.concatenate([h, x], axis=-1) if i == NERF_SKIP else h)
        h = np.maximum(inputs[i] @ params[f"w{i}"] + params[f"b{i}"], 0)
    inputs.append(h)

    def pullback(d: np.ndarray) -> Arrays:
        grads: Arrays = {}
        for i in reversed(range(9)):
            grads |= {f"w{i}": inputs[i].T @ d, f"b{i}": d.sum(0)}
            if i:
                # A layer's input starts with the ReLU of the one before it, which is positive where that one's sum was.
                width = params[f"b{i - 1}"].size
                d = (d @ params[f"w{i}"].T)[:, :width] * (inputs[i][:, :width] > 0)
        return grads

    return h @ params["w8"] + params["b8"], pullback


def mgn(params: Arrays, x: np.ndarray) -> tuple[np.ndarray, Pullback]:
    h = np.maximum(x @ params["w0"] + params["b0"], 0)
    z = h @ params["w1"] + params["b1"]
    centred = z - z.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    n = centred * scale

    def pullback(d: np.ndarray) -> Arrays:
        dn = d * params["gain"]
        dz = scale * (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True))
        dh = (dz @ params["w1"].T) * (h > 0)
        products = {"w0": x.T @ dh, "b0": dh.sum(0), "w1": h.T @ dz, "b1": dz.sum(0)}
        return products | {"gain": (d * n).sum(0), "bias": d.sum(0)}

    return x[:, :128] + n * params["gain"] + params["bias"], pullback


def swiglu(params: Arrays, x: np.ndarray) -> tuple[np.ndarray, Pullback]:
    n = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    h = n * params["gain"]
    gate, up = h @ params["gate"], h @ params["up"]
    sigmoid = 1 / (1 + np.exp(-gate))
    product = gate * sigmoid * up

    def pullback(d: np.ndarray) -> Arrays:
        dproduct = d @ params["down"].T
        dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dproduct * gate * sigmoid
        dh = dgate @ params["gate"].T + dup @ params["up"].T
        return {"gain": (dh * n).sum(0), "gate": h.T @ dgate, "up": h.T @ dup, "down": product.T @ d}

    return x + product @ params["down"], pullback
