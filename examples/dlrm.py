"""Predict clicks with a deep learning recommendation model (DLRM), the whole training step as spatial pipelines.

    python examples/dlrm.py             # about a minute on two cores; Ctrl-C ends with what was reached
    python examples/dlrm.py --plain     # the same steps with jax.jit
    python examples/dlrm.py --full      # the sizes of MLPerf, but for the rows of the tables

The network is that of Naumov et al. 2019 (arXiv:1906.00091): a bottom network of 13 numbers, 26 embedding tables, the products
of each two of these 27 vectors, and a top network of those. ``--full`` has MLPerf's widths (bottom 13-512-256-128, embeddings
of 128, top 479-1024-1024-512-256-1; github.com/mlcommons/training) with tables of up to 50 000 rows instead of 40 000 000.

The clicks are drawn from a model in this file that the network does not know: every category has hidden factors, and some pairs
of the 26 columns attract or repel each other. Categories are as unequally common as in the logs of a shop (Zipf's law). How
well the network ranks is told by the area under the ROC curve (AUC), beside that of the drawn probabilities themselves, which
nothing can beat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from matplotlib.figure import Figure

import kitsune_jax as kj

Params = dict[str, Any]
NUMBERS, TABLES = 13, 26  # columns of a row


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``bottom`` and ``top`` are the widths of the layers; the last of ``bottom`` is that of an embedding. Tables have from 10 to
    ``largest`` rows."""

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    largest: int
    batch: int


SMALL = Sizes(bottom=(64, 32), top=(128, 64, 1), largest=2_000, batch=2048)
FULL = Sizes(bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1), largest=50_000, batch=8192)


def table_rows(sizes: Sizes) -> list[int]:
    return np.geomspace(10, sizes.largest, TABLES).astype(int).tolist()


def initial_params(key: jax.Array, sizes: Sizes) -> Params:
    keys = iter(jax.random.split(key, len(sizes.bottom) + len(sizes.top) + TABLES))
    width = sizes.bottom[-1]

    def layers(inputs: int, widths: Sequence[int]) -> list[tuple[jax.Array, jax.Array]]:
        pairs = zip((inputs, *widths), widths, strict=False)
        return [(jax.random.normal(next(keys), (m, n)) * (2 / (m + n)) ** 0.5, jnp.zeros(n)) for m, n in pairs]

    return {
        "bottom": layers(NUMBERS, sizes.bottom),
        "tables": [jax.random.uniform(next(keys), (n, width), minval=-1, maxval=1) * n**-0.5 for n in table_rows(sizes)],
        "top": layers(width + (TABLES + 1) * TABLES // 2, sizes.top),
    }


def network(params: Params, numbers: jax.Array, categories: jax.Array) -> jax.Array:
    """Logits [batch] of ``numbers`` [batch, 13] and ``categories`` [batch, 26]."""
    x = numbers
    for w, b in params["bottom"]:
        x = jax.nn.relu(x @ w + b)
    embedded = [table[categories[:, i]] for i, table in enumerate(params["tables"])]
    vectors = jnp.stack([x, *embedded], axis=1)
    products = jnp.einsum("bif,bjf->bij", vectors, vectors)
    rows, columns = np.tril_indices(TABLES + 1, -1)
    x = jnp.concatenate([x, products[:, rows, columns]], axis=-1)
    *hidden, (w, b) = params["top"]
    for w_hidden, b_hidden in hidden:
        x = jax.nn.relu(x @ w_hidden + b_hidden)
    return (x @ w + b)[:, 0]


@dataclasses.dataclass(frozen=True)
class Clicks:
    """The model that clicks are drawn from: biases and ``factors`` [4] of every category of every table, ``pairs`` [26, 26] of
    tables that attract or repel each other, and a weight for each number."""

    biases: list[np.ndarray]
    factors: list[np.ndarray]
    pairs: np.ndarray
    weights: np.ndarray

    @staticmethod
    def make(sizes: Sizes, seed: int) -> Clicks:
        rng = np.random.default_rng(seed)
        rows = table_rows(sizes)
        pairs = np.triu(rng.standard_normal((TABLES, TABLES)) * (rng.random((TABLES, TABLES)) < 0.1), 1)
        return Clicks(
            [0.3 * rng.standard_normal(n) for n in rows],
            [0.5 * rng.standard_normal((n, 4)) for n in rows],
            pairs,
            0.2 * rng.standard_normal(NUMBERS),
        )

    def draw(self, batch: int, seed: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Numbers [batch, 13], categories [batch, 26], clicks [batch] of 0 or 1, and their probabilities [batch]."""
        rng = np.random.default_rng(seed)
        numbers = rng.standard_normal((batch, NUMBERS))
        # Zipf's law of exponent 1: the logarithm of a category's number is evenly spread.
        ids = np.stack([np.exp(rng.uniform(0, np.log(len(b) + 1), batch)).astype(int) - 1 for b in self.biases], axis=1)
        ids = np.minimum(ids, [len(b) - 1 for b in self.biases])
        factors = np.stack([f[i] for f, i in zip(self.factors, ids.T, strict=True)], axis=1)
        pull = np.einsum("bif,ij,bjf->b", factors, self.pairs, factors, optimize=True)
        logit = np.sin(2 * numbers) @ self.weights + sum(b[i] for b, i in zip(self.biases, ids.T, strict=True)) + pull - 1
        probability = 1 / (1 + np.exp(-logit))
        clicks = rng.random(batch) < probability
        return numbers.astype(np.float32), ids.astype(np.int32), clicks.astype(np.float32), probability


def area_under_curve(score: np.ndarray, clicks: np.ndarray) -> float:
    """The probability that a click scores higher than what was not clicked."""
    ones = clicks > 0.5
    ranks = scipy.stats.rankdata(score)
    return float((ranks[ones].sum() - ones.sum() * (ones.sum() + 1) / 2) / (ones.sum() * (~ones).sum()))


def draw_curves(
    path: Path, losses: list[Any], areas: list[tuple[int, float]], best: float, scores: dict[str, Any], clicks: Any
) -> None:
    """The loss and the area over the steps, and the ROC curves at the end."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.add_subplot(1, 3, 1, xlabel="step", title="cross-entropy")
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64))
    axes = figure.add_subplot(1, 3, 2, xlabel="step", title="area under the ROC curve", ylim=(0.48, 1))
    axes.axhline(best, color="C1", label="the drawn probabilities")
    if areas:
        axes.plot(*zip(*areas, strict=True), "o-", markersize=3, label="network, rows that it never saw")
    axes.legend()
    axes = figure.add_subplot(1, 3, 3, xlabel="share of the others above", ylabel="share of clicks above", title="ROC")
    for name, score in scores.items():
        found = clicks[np.argsort(-score)]
        axes.plot(np.cumsum(1 - found) / np.sum(1 - found), np.cumsum(found) / np.sum(found), label=name)
    axes.plot([0, 1], [0, 1], "k:", linewidth=1)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/dlrm", steps=600), argv)
    sizes = FULL if args.full else SMALL
    model = Clicks.make(sizes, args.seed)
    *held_out, clicks, probability = model.draw(20_000, (args.seed, 1))
    best = area_under_curve(probability, clicks)
    print(
        f"26 tables of {min(table_rows(sizes))} to {max(table_rows(sizes))} rows; the area that can be reached is {best:.3f}",
        flush=True,
    )
    optimiser = optax.adam(optax.cosine_decay_schedule(4e-3, args.steps, alpha=0.02))

    def loss_fn(params: Params, numbers: jax.Array, categories: jax.Array, clicks: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(network(params, numbers, categories), clicks).mean()

    def train_step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    predict = jax.jit(training.transformed(network, args))
    params = initial_params(jax.random.key(args.seed), sizes)
    step = training.compiled(train_step, args)
    state = optimiser.init(params)
    example = jax.tree.map(jnp.copy, (params, state))
    losses: list[Any] = []
    areas: list[tuple[int, float]] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, *model.draw(sizes.batch, (args.seed, 2, i))[:3])
        losses.append(loss)
        if i % 50 == 49:
            areas.append((i + 1, area_under_curve(np.asarray(predict(params, *held_out)), clicks)))

    logits = np.asarray(predict(params, *held_out))
    draw_curves(args.out / "auc.png", losses, areas, best, {"drawn probabilities": probability, "network": logits}, clicks)
    print(training.application_ending(losses, args, f"AUC {area_under_curve(logits, clicks):.3f} of {best:.3f}"))
    print(
        training.outcome(kj.explain(train_step, force=args.force or None)(*example, *model.draw(sizes.batch, (0,))[:3]), args.plain)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
