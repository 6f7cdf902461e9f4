"""Functions of several arguments whose gradients by some of them leave dead or sliced parts behind.

Comes in: nothing. Goes out: ``CASES`` for ``test_gradients_arguments``, name -> (function, shape of each argument). Invariant:
widths are odd where that is possible, and every argument has a gradient that is not zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
N, NODES = 29, 11
SENDERS, RECEIVERS = np.random.default_rng(0).integers(0, NODES, (2, N)).astype(np.int32)


def cat(*parts: Array) -> Array:
    return jnp.concatenate(parts, -1)


def norm(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-2)


def collected(messages: Array) -> Array:
    return jax.ops.segment_sum(messages, RECEIVERS, NODES)


def mesh_graph_net(edges: Array, nodes: Array, of_edges: Array, of_nodes: Array, out: Array) -> Array:
    for _ in range(2):
        edges = edges + norm(jax.nn.silu(cat(nodes[SENDERS], nodes[RECEIVERS], edges) @ of_edges))
        nodes = nodes + norm(jax.nn.silu(cat(collected(edges), nodes) @ of_nodes))
    return nodes @ out


def grid_to_mesh(grid: Array, mesh: Array, edges: Array, w1: Array, w2: Array, w3: Array) -> Array:
    messages = jax.nn.silu(cat(edges, grid[SENDERS], mesh[RECEIVERS]) @ w1) @ w2
    return mesh + cat(mesh, collected(messages)) @ w3


def dense_blocks(x: Array, a: Array, b: Array, c: Array) -> Array:
    h = jnp.tanh(x @ a)
    return cat(jnp.tanh(h[:, ::2] @ b), h) @ c


def gated(x: Array, w: Array) -> Array:
    h = x @ w
    return jnp.tanh(h[:, :4]) * h[:, 4:]


def thirds(x: Array, w: Array) -> Array:
    a, b, c = jnp.split(x @ w, [2, 4], -1)
    return jax.nn.sigmoid(a) * jnp.tanh(b) + c


def heads(x: Array, w: Array) -> Array:
    q, k, v = jnp.split((x @ w).reshape(N, 2, 12), 3, -1)
    weights = jax.nn.softmax(jnp.einsum("nhd,nkd->nhk", q, k))
    return jnp.einsum("nhk,nkd->nhd", weights, v).reshape(N, -1)


def recurrent(x: Array, h: Array, c: Array, wx: Array, wh: Array) -> Array:
    i, f, g, o = jnp.split(x @ wx + h @ wh, 4, -1)
    return jax.nn.sigmoid(o) * jnp.tanh(jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g))


def interactions(a: Array, b: Array, c: Array, w: Array) -> Array:
    z = jnp.stack([a, b, c], 1)
    pairs = jnp.einsum("nid,njd->nij", z, z)[:, np.array([1, 2, 2]), np.array([0, 0, 1])]
    return cat(a, pairs) @ w


def modulated(x: Array, c: Array, w: Array, wc: Array) -> Array:
    scale = c @ wc
    return jnp.tanh(x @ w) * (1 + scale[:, :6]) + scale[:, 6:]


CASES: dict[str, tuple[Callable[..., Array], tuple[tuple[int, ...], ...]]] = {
    "two_parts": (lambda a, b, w: cat(a, b) @ w, ((N, 5), (N, 4), (9, 3))),
    "three_parts": (lambda a, b, c, w: jnp.tanh(cat(a, b, c) @ w), ((N, 5), (N, 1), (N, 4), (10, 3))),
    "four_parts": (lambda a, b, c, d, w: jnp.tanh(cat(a, b, c, d) @ w), ((N, 5), (N, 1), (N, 4), (N, 3), (13, 3))),
    "part_twice": (lambda a, b, w: jnp.tanh(cat(a, b, a) @ w), ((N, 5), (N, 1), (11, 3))),
    "part_of_parts": (lambda a, b, c, w: cat(cat(a, b), c) @ w, ((N, 5), (N, 4), (N, 2), (11, 3))),
    "parts_and_network": (lambda a, b, w: cat(a, jnp.tanh(cat(a, b) @ w)), ((N, 5), (N, 4), (9, 7))),
    "skip": (lambda a, b, w, v: cat(a, jnp.tanh(cat(b, a) @ w)) @ v, ((N, 5), (N, 4), (9, 7), (12, 3))),
    "transposed_weights": (lambda a, b, w: cat(a, b) @ w.T, ((N, 5), (N, 4), (3, 9))),
    "tokens": (lambda a, b, w: cat(a, b) @ w, ((3, 7, 5), (3, 7, 4), (9, 3))),
    "parts_of_rows": (lambda a, b, w: jnp.tanh(jnp.concatenate([a, b]) @ w), ((N, 5), (12, 5), (5, 3))),
    "parts_of_weights": (lambda x, w, v: jnp.tanh(x @ cat(w, v)), ((N, 5), (5, 3), (5, 4))),
    "parts_of_contracted": (lambda x, w, v: jnp.tanh(x @ jnp.concatenate([w, v])), ((N, 9), (5, 3), (4, 3))),
    "global_part": (lambda a, g, w: cat(a, jnp.broadcast_to(g, (N, 4))) @ w, ((N, 5), (4,), (9, 3))),
    "number_as_part": (lambda a, t, w: cat(a, jnp.ones((N, 1), a.dtype) * t) @ w, ((N, 5), (), (6, 3))),
    "sliced": (lambda x, w, v: (x @ w)[:, 2:7:2] @ v, ((N, 5), (5, 8), (3, 2))),
    "sliced_input": (lambda x, w: jnp.tanh(x[:, 1:4] @ w), ((N, 5), (3, 8))),
    "sliced_weights": (lambda x, w: jnp.tanh(x @ w[:, 1:4]), ((N, 5), (5, 8))),
    "neighbours": (lambda x, w: jnp.diff(jnp.tanh(x @ w), axis=0), ((N, 5), (5, 8))),
    "gated": (gated, ((N, 5), (5, 8))),
    "split": (thirds, ((N, 5), (5, 6))),
    "split_with_dead_parts": (lambda x, w: jnp.tanh(jnp.split(x @ w, 3, -1)[1]), ((N, 5), (5, 6))),
    "glu": (lambda x, w: jax.nn.glu(x @ w), ((N, 5), (5, 8))),
    "padded": (lambda x, w, v: jnp.pad(jnp.tanh(x @ w), ((0, 0), (2, 1))) @ v, ((N, 5), (5, 4), (7, 3))),
    "stacked": (lambda a, b, w: jnp.stack([a, b], -1).reshape(N, -1) @ w, ((N, 5), (N, 5), (10, 3))),
    "heads": (heads, ((N, 5), (5, 24))),
    "tied": (lambda x, w: jnp.tanh(x @ w) @ w.T, ((N, 5), (5, 8))),
    "gathered": (lambda t, e, w: jnp.tanh(cat(t[SENDERS], e, t[RECEIVERS]) @ w), ((NODES, 5), (N, 3), (13, 4))),
    "mesh_graph_net": (mesh_graph_net, ((N, 4), (NODES, 3), (10, 4), (7, 3), (3, 2))),
    "grid_to_mesh": (grid_to_mesh, ((NODES, 3), (NODES, 5), (N, 2), (10, 7), (7, 4), (9, 5))),
    "norm": (lambda x, g, b, w: norm(x @ w) * g + b, ((N, 5), (6,), (6,), (5, 6))),
    "interactions": (interactions, ((N, 4), (N, 4), (N, 4), (7, 2))),
    "modulated": (modulated, ((N, 5), (N, 3), (5, 6), (3, 12))),
    "recurrent": (recurrent, ((N, 5), (N, 3), (N, 3), (5, 12), (3, 12))),
    "experts": (
        lambda x, g, w: jnp.einsum("ne,nek->nk", jax.nn.softmax(x @ g), jnp.einsum("nd,edk->nek", x, w)),
        ((N, 5), (5, 3), (3, 5, 4)),
    ),
    "bilinear": (lambda a, b, w: jnp.einsum("ni,ijk,nj->nk", a, w, b), ((N, 3), (N, 4), (3, 4, 2))),
    "dense_blocks": (dense_blocks, ((N, 5), (5, 8), (4, 6), (14, 3))),
}
