"""Classify the nodes of a graph with a graph attention network, the whole training step as spatial pipelines.

    python examples/gat.py             # less than a minute on two cores; Ctrl-C ends with what was reached
    python examples/gat.py --plain     # the same steps with jax.jit
    python examples/gat.py --full      # a graph as large as ogbn-arxiv

The network is that of Veličković et al. 2018 (arXiv:1710.10903): a layer of 8 heads of 8 features each, whose edges are
weighted by a softmax over the edges of their receiver, and a layer of one head that gives the logits. The graph is drawn in
``_graphs.py``, with planted communities and power-law degrees; ``--full`` has the sizes of ogbn-arxiv (Hu et al. 2020,
arXiv:2005.00687: 169 343 nodes, 1 166 243 edges, here in both directions, 128 features, 40 classes)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import _graphs as graphs
import _training as training
import jax
import jax.numpy as jnp

Params = list[dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    nodes: int
    edges: int
    features: int
    classes: int
    heads: int = 8
    width: int = 8  # of a head


SMALL = Sizes(nodes=10_000, edges=120_000, features=64, classes=8)
FULL = Sizes(nodes=169_343, edges=169_343 + 2 * 1_166_243, features=128, classes=40)


def initial_params(key: jax.Array, sizes: Sizes) -> Params:
    layers = ((sizes.features, sizes.heads, sizes.width), (sizes.heads * sizes.width, 1, sizes.classes))

    def layer(key: jax.Array, inputs: int, heads: int, width: int) -> dict[str, Any]:
        w, sender, receiver = jax.random.split(key, 3)
        return {
            "w": jax.random.normal(w, (inputs, heads * width)) * (2 / (inputs + heads * width)) ** 0.5,
            "b": jnp.zeros(heads * width),
            "sender": jax.random.normal(sender, (heads, width)) * width**-0.5,
            "receiver": jax.random.normal(receiver, (heads, width)) * width**-0.5,
        }

    return [layer(k, *sizes_) for k, sizes_ in zip(jax.random.split(key, len(layers)), layers, strict=True)]


def attention_layer(params: dict[str, jax.Array], x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """[nodes, heads * width] of [nodes, inputs]."""
    nodes, heads = len(x), len(params["sender"])
    h = (x @ params["w"]).reshape(nodes, heads, -1)
    of_sender = jnp.sum(h * params["sender"], axis=-1)
    of_receiver = jnp.sum(h * params["receiver"], axis=-1)
    scores = jax.nn.leaky_relu(of_sender[senders] + of_receiver[receivers], 0.2)
    attention = graphs.segment_softmax(scores, receivers, nodes)
    received = jax.ops.segment_sum(attention[:, :, None] * h[senders], receivers, num_segments=nodes)
    return received.reshape(nodes, -1) + params["b"]


def network(params: Params, features: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """Logits [nodes, classes]."""
    *hidden, last = params
    x = features
    for layer in hidden:
        x = jax.nn.elu(attention_layer(layer, x, senders, receivers))
    return attention_layer(last, x, senders, receivers)


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/gat", steps=100), argv)
    sizes = FULL if args.full else SMALL
    graph = graphs.community_graph(sizes.nodes, sizes.edges, sizes.classes, sizes.features, args.seed)
    return graphs.classify(network, initial_params(jax.random.key(args.seed), sizes), graph, args, "graph attention network")


if __name__ == "__main__":
    raise SystemExit(main())
