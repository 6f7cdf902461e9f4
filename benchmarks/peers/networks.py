"""The applications as PyTorch functions.

Comes in: the name of an application; its parameters and inputs as tensors, by the names that JAX's pytrees give them ("w0",
"0.sender"). Goes out: ``Network``. Each is written with the operators that PyTorch has for it: fused attention, layer and RMS
norms, its own LSTM and GRU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Tensor]
NERF_LAYERS, NERF_SKIP = 8, 4


def _same(leaves: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    return dict(zip(names, leaves, strict=True))


@dataclasses.dataclass(frozen=True)
class Network:
    """``function(leaves, *inputs)``; the ``leaves`` are trained. ``gradients(values)``: arrays of the leaves' shapes as arrays of
    the parameters' names and shapes."""

    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    gradients: Callable[[Sequence[Tensor]], dict[str, Tensor]]


def make(name: str, params: Tensors, inputs: Sequence[Tensor]) -> Network:
    """The application ``name``. Raises ``KeyError`` where it is not here."""
    if name.startswith(("lstm_", "gru_")):
        return _recurrent(name.split("_")[0], params, inputs)
    names = tuple(params)
    function = _FUNCTIONS[name]

    def call(leaves: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        return function(_same(leaves, names), *inputs)

    if name == "gat":  # an index of PyTorch has 64 bits
        inputs = [inputs[0], *(a.long() for a in inputs[1:])]
    return Network(call, tuple(params.values()), tuple(inputs), lambda values: _same(values, names))


def _nerf(p: Tensors, x: Tensor) -> Tensor:
    h = x
    for i in range(NERF_LAYERS):
        if i == NERF_SKIP:
            h = torch.cat([h, x], -1)
        h = torch.relu(torch.addmm(p[f"b{i}"], h, p[f"w{i}"]))
    return torch.addmm(p["b8"], h, p["w8"])


def _mgn(p: Tensors, x: Tensor) -> Tensor:
    h = torch.addmm(p["b1"], torch.relu(torch.addmm(p["b0"], x, p["w0"])), p["w1"])
    return x[:, :128] + F.layer_norm(h, (128,), p["gain"], p["bias"], 1e-5)


def _swiglu(p: Tensors, x: Tensor) -> Tensor:
    h = F.rms_norm(x, (x.shape[-1],), p["gain"], 1e-6)
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def _attention(p: Tensors, causal: bool) -> Tensor:
    q, k, v = (p[name].transpose(0, 1)[None] for name in "qkv")
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _transformer_layer(p: Tensors, x: Tensor, head: int = 64, theta: float = 500_000.0) -> Tensor:
    """``x`` [1, tokens, width]; the sizes are those of ``benchmarks.sequences.apps.llama_sizes``."""
    batch, tokens, width = x.shape
    half = head // 2
    angles = torch.arange(tokens)[:, None] * theta ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    h = F.rms_norm(x, (width,), p["attention_norm"], 1e-5)
    q, k, v = ((h @ p[name]).view(batch, tokens, -1, head) for name in ("query", "key", "value"))
    q, k, v = (a.transpose(1, 2) for a in (_rotary(q, cos, sin), _rotary(k, cos, sin), v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + mixed.transpose(1, 2).reshape(batch, tokens, -1) @ p["out"]
    h = F.rms_norm(x, (width,), p["feed_forward_norm"], 1e-5)
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def _gat(p: Tensors, x: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
    def layer(number: int, x: Tensor) -> Tensor:
        w, b, of_sender, of_receiver = (p[f"{number}.{name}"] for name in ("w", "b", "sender", "receiver"))
        nodes, heads = len(x), len(of_sender)
        h = (x @ w).view(nodes, heads, -1)
        sent, received = (h * of_sender).sum(-1), (h * of_receiver).sum(-1)
        scores = F.leaky_relu(sent[senders] + received[receivers], 0.2)
        index = receivers[:, None].expand_as(scores)
        lowest = torch.full((nodes, heads), float("-inf"), dtype=x.dtype)
        largest = lowest.scatter_reduce(0, index, scores.detach(), "amax")
        weights = torch.exp(scores - largest[receivers])
        sums = torch.zeros(nodes, heads, dtype=x.dtype).index_add(0, receivers, weights)
        attention = weights / sums[receivers]
        mixed = torch.zeros_like(h).index_add(0, receivers, attention[:, :, None] * h[senders])
        return mixed.reshape(nodes, -1) + b

    return layer(1, F.elu(layer(0, x)))


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "nerf": _nerf,
    "mgn": _mgn,
    "swiglu": _swiglu,
    "attention": lambda p: _attention(p, True),
    "attention_full": lambda p: _attention(p, False),
    "transformer_layer": _transformer_layer,
    "gat": _gat,
}


def _recurrent(cell: str, params: Tensors, inputs: Sequence[Tensor]) -> Network:
    """``torch.nn.LSTM`` or ``torch.nn.GRU``, whose gates are in our order. The 1 that is added to a forget gate is in its bias."""
    w, u, b = (params[name] for name in ("w", "u", "b"))
    width = u.shape[0]
    module = (torch.nn.LSTM if cell == "lstm" else torch.nn.GRU)(w.shape[0], width).to(w.dtype)
    of_input = b.clone()
    if cell == "lstm":
        of_input[width : 2 * width] += 1
    with torch.no_grad():
        module.weight_ih_l0.copy_(w.T)
        module.weight_hh_l0.copy_(u.T)
        module.bias_ih_l0.copy_(of_input)
        module.bias_hh_l0.zero_()
    module.bias_hh_l0.requires_grad_(False)  # the applications have one bias

    def gradients(values: Sequence[Tensor]) -> dict[str, Tensor]:
        of_w, of_u, of_b = values
        return {"w": of_w.T, "u": of_u.T, "b": of_b}

    leaves = (module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0)
    return Network(lambda _, x: module(x)[0], leaves, tuple(inputs), gradients)
