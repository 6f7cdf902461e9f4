"""What the examples of attention over a graph share: a graph, the softmax over neighbours, and training to classify its nodes.

Comes in: sizes, or a network. Goes out: arrays, a trained network's numbers and picture. Nothing in here knows how the networks
look."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import kitsune_jax as kj

Network = Callable[..., jax.Array]  # (params, features, senders, receivers) -> logits [nodes, classes]


@dataclasses.dataclass(frozen=True)
class Graph:
    """``features`` [nodes, n] float32, ``labels`` [nodes]; an edge goes from ``senders`` [edges] to ``receivers`` [edges]; there is
    one in both directions, and one from every node to itself. ``known`` [nodes]: whose label is told in training."""

    features: np.ndarray
    labels: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    known: np.ndarray


def community_graph(nodes: int, edges: int, classes: int, features: int, seed: int) -> Graph:
    """A graph of ``edges`` edges at most, with planted communities and power-law degrees (a degree-corrected block model,
    Karrer and Newman 2011, arXiv:1008.3926): the largest degrees are some hundred times the mean. A node's features are its
    community's mean and noise of nine times that norm, so that a node alone says little about its label."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=nodes).astype(np.int32)
    weight = rng.pareto(1.5, nodes) + 0.5
    drawn = (edges - nodes) // 2
    first = rng.choice(nodes, drawn, p=weight / weight.sum())
    second = rng.choice(nodes, drawn, p=weight / weight.sum())
    own = np.flatnonzero(rng.random(drawn) < 0.7)  # these stay in the community of their first node
    for c in range(classes):
        members, here = np.flatnonzero(labels == c), own[labels[first[own]] == c]
        if len(members) and len(here):
            second[here] = rng.choice(members, len(here), p=weight[members] / weight[members].sum())
    itself = np.arange(nodes)
    ends = np.stack([np.concatenate([first, second, itself]), np.concatenate([second, first, itself])])
    senders, receivers = np.unique(ends, axis=1)[:, rng.permutation(len(np.unique(ends, axis=1)[0]))].astype(np.int32)
    means = rng.standard_normal((classes, features)) / features**0.5
    x = means[labels] + 9 * rng.standard_normal((nodes, features)) / features**0.5
    return Graph(x.astype(np.float32), labels, senders, receivers, rng.random(nodes) < 0.3)


def segment_softmax(scores: jax.Array, receivers: jax.Array, nodes: int) -> jax.Array:
    """The softmax over the edges of each receiver: [edges, heads]."""
    largest = jax.ops.segment_max(scores, receivers, num_segments=nodes)
    weights = jnp.exp(scores - jax.lax.stop_gradient(largest)[receivers])
    return weights / jax.ops.segment_sum(weights, receivers, num_segments=nodes)[receivers]


def classify(network: Network, params: Any, graph: Graph, args: argparse.Namespace, title: str) -> int:
    """Train ``network`` to tell the labels of the known nodes, and show how well it tells the others."""
    degrees = np.bincount(graph.receivers)
    print(f"{len(graph.labels)} nodes, {len(graph.senders)} edges, {degrees.mean():.0f} at a node, {max(degrees)} at the largest")
    optimiser = optax.adamw(5e-3, weight_decay=0.3)

    def loss_fn(params: Any, features: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean cross-entropy of the known nodes."""
        logits = network(params, features, senders, receivers)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(jnp.where(graph.known, each, 0)) / graph.known.sum()

    def train_step(params: Any, state: Any, *data: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *data)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    inputs = tuple(map(jnp.asarray, (graph.features, graph.senders, graph.receivers)))
    data = (*inputs, jnp.asarray(graph.labels))
    predict = jax.jit(training.transformed(network, args))
    step = training.compiled(train_step, args)
    state = optimiser.init(params)
    example = jax.tree.map(jnp.copy, (params, state))
    losses: list[Any] = []
    accuracies: list[tuple[int, float]] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, *data)
        losses.append(loss)
        if i % 10 == 9 or i == args.steps - 1:
            right = np.asarray(jnp.argmax(predict(params, *inputs), -1)) == graph.labels
            accuracies.append((i + 1, float(right[~graph.known].mean())))
    logits = np.asarray(predict(params, *inputs))
    _draw(args, logits, graph, losses, accuracies, title)
    accuracy = (logits.argmax(-1) == graph.labels)[~graph.known].mean()
    print(training.application_ending(losses, args, f"accuracy {accuracy:.1%} on the nodes whose label was not told"))
    print(training.outcome(kj.explain(train_step, force=args.force or None)(*example, *data), args.plain))
    return 0


def _draw(
    args: argparse.Namespace, logits: np.ndarray, graph: Graph, losses: list[Any], accuracies: list[tuple[int, float]], title: str
) -> None:
    """The loss, the accuracy, which labels are taken for which, and the accuracy by degree: a node with neighbours knows more."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    unknown = ~graph.known
    right = (logits.argmax(-1) == graph.labels)[unknown]
    axes = figure.add_subplot(1, 3, 1, xlabel="step", title=title)
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64), label="loss")
    if accuracies:
        axes.plot(*zip(*accuracies, strict=True), label="accuracy, labels not told")
    axes.legend()
    classes = logits.shape[-1]
    counts = np.zeros((classes, classes))
    np.add.at(counts, (graph.labels[unknown], logits.argmax(-1)[unknown]), 1)
    axes = figure.add_subplot(1, 3, 2, xlabel="label found", ylabel="label", title="share of a label's nodes")
    image = axes.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(image, ax=axes)
    axes = figure.add_subplot(1, 3, 3, xscale="log", xlabel="edges at a node", ylabel="accuracy", ylim=(0, 1.02))
    degree = np.bincount(graph.receivers, minlength=len(graph.labels))[unknown]
    bins = np.unique(np.geomspace(2, degree.max() + 1, 12).astype(int))
    found = [(low, right[(degree >= low) & (degree < high)]) for low, high in zip(bins, bins[1:], strict=False)]
    axes.plot([low for low, r in found if len(r)], [r.mean() for _, r in found if len(r)], "o-")
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "accuracy.png", dpi=110)
