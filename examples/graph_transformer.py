"""Classify the nodes of a graph with a Graph Transformer, the whole training step as spatial pipelines.

    python examples/graph_transformer.py             # about a minute on two cores; Ctrl-C ends with what was reached
    python examples/graph_transformer.py --plain     # the same steps with jax.jit
    python examples/graph_transformer.py --full      # a graph as large as ogbn-arxiv

The network is that of Dwivedi and Bresson 2021 (arXiv:2012.09699): attention over the neighbours of a node with queries, keys and
values, then a feed-forward network, each with a residual and a layer normalisation; 8 heads, as there. The graph is drawn in
``_graphs.py``, with planted communities and power-law degrees; ``--full`` has the sizes of ogbn-arxiv (Hu et al. 2020,
arXiv:2005.00687: 169 343 nodes, 1 166 243 edges, here in both directions, 128 features, 40 classes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import _graphs as graphs
import _training as training
import jax
import jax.numpy as jnp

Params = dict[str, Any]
HEADS = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    nodes: int
    edges: int
    features: int
    classes: int
    latent: int
    layers: int


SMALL = Sizes(nodes=8_000, edges=80_000, features=64, classes=8, latent=64, layers=2)
FULL = Sizes(nodes=169_343, edges=169_343 + 2 * 1_166_243, features=128, classes=40, latent=128, layers=4)


def initial_params(key: jax.Array, sizes: Sizes) -> Params:
    keys = iter(jax.random.split(key, 2 + 4 * sizes.layers))

    def dense(inputs: int, outputs: int) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5, "b": jnp.zeros(outputs)}

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(sizes.latent), "offset": jnp.zeros(sizes.latent)}

    def layer() -> Params:
        d = sizes.latent
        parts = {"qkv": dense(d, 3 * d), "out": dense(d, d), "up": dense(d, 2 * d), "down": dense(2 * d, d)}
        return {**parts, "attention_norm": norm(), "feed_forward_norm": norm()}

    return {
        "encode": dense(sizes.features, sizes.latent),
        "layers": [layer() for _ in range(sizes.layers)],
        "decode": dense(sizes.latent, sizes.classes),
    }


def linear(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def layer_norm(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * params["scale"] + params["offset"]


def attention(params: Params, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """What the neighbours of each node tell it: [nodes, latent]."""
    nodes = len(x)
    q, k, v = jnp.split(linear(params["qkv"], x).reshape(nodes, HEADS, -1), 3, axis=-1)
    scores = jnp.sum(q[receivers] * k[senders], axis=-1) * q.shape[-1] ** -0.5
    weights = graphs.segment_softmax(scores, receivers, nodes)
    received = jax.ops.segment_sum(weights[:, :, None] * v[senders], receivers, num_segments=nodes)
    return linear(params["out"], received.reshape(nodes, -1))


def network(params: Params, features: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """Logits [nodes, classes]."""
    x = linear(params["encode"], features)
    for layer in params["layers"]:
        x = layer_norm(layer["attention_norm"], x + attention(layer, x, senders, receivers))
        x = layer_norm(layer["feed_forward_norm"], x + linear(layer["down"], jax.nn.relu(linear(layer["up"], x))))
    return linear(params["decode"], x)


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/graph_transformer", steps=60), argv)
    sizes = FULL if args.full else SMALL
    graph = graphs.community_graph(sizes.nodes, sizes.edges, sizes.classes, sizes.features, args.seed)
    return graphs.classify(network, initial_params(jax.random.key(args.seed), sizes), graph, args, "Graph Transformer")


if __name__ == "__main__":
    raise SystemExit(main())
