"""Classify digits with deep multiple kernel fusion: many kernels of similarity, a branch for each, and a layer that fuses them.

    python examples/kernel_fusion.py             # less than a minute on two cores; Ctrl-C ends with what was reached
    python examples/kernel_fusion.py --plain     # the same steps with jax.jit
    python examples/kernel_fusion.py --full      # more landmarks and wider branches

The network is that of Song et al. 2016 (arXiv:1612.09007). A kernel tells how similar two images are: here Gaussian kernels of
several widths, Laplacian kernels and polynomials. Its dense embedding of an image is the similarity to some landmark images, times
the inverse root of the landmarks' own similarities (the Nyström method). Every embedding has a branch of dense layers; a last layer
sees the sum of them. In training, kernel dropout leaves out whole branches, so that none relies on another. The data are the 1 797
digits of 8 x 8 pixels that scikit-learn brings along, with strong noise on the pixels, so that they are harder to tell."""

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
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import kitsune_jax as kj

Params = dict[str, Any]
KERNELS = (  # kind, and width in units of the typical distance, or degree
    *(("gaussian", width) for width in (4.0, 2.0, 1.0, 0.5)),
    ("laplacian", 1.0),
    *(("polynomial", degree) for degree in (2.0, 3.0, 4.0)),
)
CLASSES, PIXELS = 10, 64
DROPPED = 0.3  # of the branches, in training
TYPICAL = 8.0  # squared distance of two images, by which distances are divided
NOISE = 0.25  # standard deviation, of pixels between 0 and 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``landmarks`` of each kernel; ``width`` of the two layers of a branch."""

    landmarks: int
    width: int
    batch: int


SMALL = Sizes(landmarks=128, width=64, batch=512)
FULL = Sizes(landmarks=512, width=256, batch=4096)


def similarity(kind: str, scale: float, x: jax.Array, landmarks: jax.Array) -> jax.Array:
    """[rows, landmarks] of ``x`` [rows, 64] and ``landmarks`` [landmarks, 64]."""
    products = x @ landmarks.T
    squares = jnp.sum(x * x, axis=-1, keepdims=True), jnp.sum(landmarks * landmarks, axis=-1)
    if kind == "polynomial":
        return (products / jnp.sqrt(squares[0] * squares[1] + 1e-6)) ** int(scale)
    distance = jnp.maximum(squares[0] - 2 * products + squares[1], 1e-6) / (scale**2 * TYPICAL)
    return jnp.exp(-distance) if kind == "gaussian" else jnp.exp(-jnp.sqrt(distance))


def inverse_root(matrix: np.ndarray) -> np.ndarray:
    """Of a symmetric positive matrix; directions that are hardly there are left out."""
    values, vectors = np.linalg.eigh(matrix.astype(np.float64))
    kept = values > 1e-4 * values[-1]
    scale = np.where(kept, 1 / np.sqrt(np.where(kept, values, 1)), 0)
    return ((vectors * scale) @ vectors.T).astype(np.float32)


def nystroem(images: np.ndarray, sizes: Sizes, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each kernel its landmarks [landmarks, 64], chosen at random, and the matrix [landmarks, landmarks] that makes products of
    embeddings approximate the kernel."""
    rng = np.random.default_rng(seed)
    found = []
    for kind, scale in KERNELS:
        landmarks = images[rng.permutation(len(images))[: sizes.landmarks]]
        found.append((landmarks, inverse_root(np.asarray(similarity(kind, scale, jnp.asarray(landmarks), jnp.asarray(landmarks))))))
    return found


def initial_params(key: jax.Array, sizes: Sizes, landmarks: int) -> Params:
    last, *keys = jax.random.split(key, 1 + len(KERNELS))

    def branch(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        widths = (landmarks, sizes.width, sizes.width)
        pairs = zip(jax.random.split(key), widths, widths[1:], strict=False)
        return [(jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, jnp.zeros(n)) for k, m, n in pairs]

    fused = (jax.random.normal(last, (sizes.width, CLASSES)) * sizes.width**-0.5, jnp.zeros(CLASSES))
    return {"branches": [branch(k) for k in keys], "fusion": fused}


def network(params: Params, x: jax.Array, kernels: Sequence[tuple[Any, Any]], kept: jax.Array) -> jax.Array:
    """Logits [rows, 10] of ``x`` [rows, 64]; ``kept`` [rows, kernels] says how much of each branch is used."""
    total: Any = 0.0
    for i, ((kind, scale), (landmarks, root)) in enumerate(zip(KERNELS, kernels, strict=True)):
        h = similarity(kind, scale, x, landmarks) @ root
        for w, b in params["branches"][i]:
            h = jax.nn.relu(h @ w + b)
        total = total + h * kept[:, i : i + 1]
    w, b = params["fusion"]
    return total @ w + b


def kept_branches(key: jax.Array, rows: int) -> jax.Array:
    """Kernel dropout: for each row which branches are used, scaled so that their sum stays the same on average."""
    kept = jax.random.bernoulli(key, 1 - DROPPED, (rows, len(KERNELS)))
    return kept / (1 - DROPPED)


def split_digits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Noisy images [rows, 64] and labels [rows] to learn from (two thirds), and to test."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    images = (digits.data / 16 + NOISE * rng.standard_normal(digits.data.shape))[order].astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    part = len(labels) * 2 // 3
    return images[:part], labels[:part], images[part:], labels[part:]


def draw(path: Path, losses: Sequence[Any], alone: Sequence[float], fused: float, images: np.ndarray, found: np.ndarray) -> None:
    """The loss, the accuracy of each branch alone beside that of all, and some images with what was found."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.add_subplot(1, 3, 1, xlabel="step", ylabel="cross-entropy", yscale="log", title="deep multiple kernel fusion")
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64))
    axes = figure.add_subplot(1, 3, 2, ylabel="accuracy on images that were not seen", ylim=(min(alone) - 0.05, 1))
    names = [f"{kind}\n{scale:g}" for kind, scale in KERNELS]
    axes.bar([*range(len(names) + 1)], [*alone, fused], color=["C0"] * len(names) + ["C1"])
    axes.set_xticks(range(len(names) + 1), [*names, "all"], fontsize=6)
    axes = figure.add_subplot(1, 3, 3, title=" ".join(map(str, found[:8])))
    axes.imshow(np.concatenate([np.pad(image.reshape(8, 8), 1) for image in images[:8]], axis=1), cmap="gray")
    axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/kernel_fusion", steps=400), argv)
    sizes = FULL if args.full else SMALL
    images, labels, unseen, truth = split_digits(args.seed)
    kernels = nystroem(images, sizes, args.seed)
    params = initial_params(jax.random.key(args.seed), sizes, kernels[0][0].shape[0])
    optimiser = optax.adamw(optax.cosine_decay_schedule(3e-3, args.steps, alpha=0.02), weight_decay=0.05)

    def loss_fn(params: Params, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        logits = network(params, x, kernels, kept_branches(key, x.shape[0]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train_step(params: Params, state: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y, key)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def batch(step: int) -> tuple[Any, ...]:
        """Rows drawn with replacement, with a little more noise."""
        rng = np.random.default_rng((args.seed, step))
        chosen = rng.integers(len(labels), size=sizes.batch)
        noise = 0.1 * rng.standard_normal((sizes.batch, PIXELS), np.float32)
        return images[chosen] + noise, labels[chosen], jax.random.key(rng.integers(1 << 30))

    step = training.compiled(train_step, args)
    predict = jax.jit(training.transformed(lambda params, x, kept: network(params, x, kernels, kept), args))
    state = optimiser.init(params)
    report = training.outcome(kj.explain(train_step, force=args.force or None)(params, state, *batch(0)), args.plain)
    losses: list[Any] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, *batch(i))
        losses.append(loss)

    def accuracy(kept: np.ndarray) -> tuple[float, np.ndarray]:
        found = np.asarray(predict(params, unseen, np.broadcast_to(kept, (len(unseen), len(KERNELS))))).argmax(-1)
        return float(np.mean(found == truth)), found

    count = len(KERNELS)
    fused, found = accuracy(np.ones(count, np.float32))
    alone = [accuracy(count * np.eye(count, dtype=np.float32)[i])[0] for i in range(count)]
    draw(args.out / "accuracy.png", losses, alone, fused, unseen, found)
    quality = f"accuracy {fused:.1%} on noisy digits that it never saw, its best branch alone {max(alone):.1%}"
    print(training.application_ending(losses, args, quality))
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
