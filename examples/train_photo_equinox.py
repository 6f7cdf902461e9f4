"""Fit a photograph with a coordinate network in equinox, its loss and its gradient as spatial pipelines.

    python examples/train_photo_equinox.py                       # about a minute on two cores; Ctrl-C ends with a checkpoint
    python examples/train_photo_equinox.py --steps 2000 --resume # goes on from there
    python examples/train_photo_equinox.py --compare             # runs the same steps without pipelines, too

The model is an ``eqx.Module`` for one pixel, the loss maps it over a batch with ``jax.vmap``, and the step has
``kj.pipeline(eqx.filter_value_and_grad(loss_fn))`` in it: forward and backward pass are one pipeline, and no activation is kept in
memory. Leaves of the model that are not arrays (its activation function) are
static for a pipelined function, as they are for ``eqx.filter_jit``. The photograph is NASA's portrait of Eileen Collins (public
domain), which ships inside the scikit-image wheel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _training as training
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image
from skimage.data import astronaut

import kitsune_jax as kj

FREQUENCIES = 64
BANDWIDTH = 8.0  # standard deviation of the random frequencies, in cycles per image


class CoordinateNetwork(eqx.Module):
    """The colour of one pixel from its coordinates: random Fourier features (arXiv:2006.10739), then a multilayer perceptron."""

    frequencies: jax.Array
    layers: list[eqx.nn.Linear]
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, width: int, depth: int, *, key: jax.Array) -> None:
        key, *keys = jax.random.split(key, depth + 2)
        widths = [2 * FREQUENCIES, *[width] * depth, 3]
        self.frequencies = BANDWIDTH * jax.random.normal(key, (FREQUENCIES, 2))
        self.layers = [eqx.nn.Linear(m, n, key=k) for k, m, n in zip(keys, widths, widths[1:], strict=False)]
        self.activation = jax.nn.silu

    def __call__(self, coordinates: jax.Array) -> jax.Array:
        angles = 2 * jnp.pi * jax.lax.stop_gradient(self.frequencies) @ coordinates
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return jax.nn.sigmoid(self.layers[-1](x))


def photograph(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates ``[size * size, 2]`` and colours ``[size * size, 3]`` of the pixels, both in 0..1."""
    picture = Image.fromarray(astronaut()).resize((size, size), Image.Resampling.LANCZOS)
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    grid = np.stack(np.meshgrid(centres, centres, indexing="ij"), -1)
    return grid.reshape(-1, 2), np.asarray(picture, np.float32).reshape(-1, 3) / 255


def cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, tree)


def loss_fn(model: CoordinateNetwork, coordinates: jax.Array, colours: jax.Array, dtype: str = "float32") -> jax.Array:
    """Mean squared error. Casts inside the loss, so gradients come back in the float32 of the weights."""
    model, coordinates = cast((model, coordinates), dtype)
    return jnp.mean((jax.vmap(model)(coordinates).astype(jnp.float32) - colours) ** 2)


optimiser = optax.adam(2e-3)


gradient_fn = eqx.filter_value_and_grad(loss_fn)


def make_train_step(gradient_fn: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """The training step on ``gradient_fn``, pipelined or not."""

    @eqx.filter_jit
    def train_step(model: CoordinateNetwork, opt_state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
        loss, grads = gradient_fn(model, x, y, dtype)
        updates, opt_state = optimiser.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def create(settings: dict[str, Any]) -> tuple[CoordinateNetwork, optax.OptState]:
    model = CoordinateNetwork(settings["width"], depth=6, key=jax.random.key(settings["seed"]))
    return model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))


def save(path: Path, settings: dict[str, Any], losses: Sequence[Any], state: tuple[Any, ...]) -> None:
    """A line of JSON, then the leaves: the form that equinox's documentation suggests."""
    with training.replacing(path) as fresh, open(fresh, "wb") as file:
        file.write(training.to_json(settings, losses).encode() + b"\n")
        eqx.tree_serialise_leaves(file, state)


def restore(path: Path, settings: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """(losses so far, state)."""
    if not path.exists():
        raise SystemExit(f"cannot resume: there is no {path}")
    with open(path, "rb") as file:
        info = json.loads(file.readline())
        training.check_same(settings, info["settings"])
        return info["losses"], eqx.tree_deserialise_leaves(file, create(settings))


def fit(
    step: Callable[..., Any],
    state: tuple[Any, ...],
    losses: list[Any],
    batches: training.Batches,
    until: int,
    after_step: Callable[[tuple[Any, ...]], None] = lambda _: None,
) -> tuple[Any, ...]:
    """Train from step ``len(losses)`` on, and append the losses. Returns the state, (model, optimiser's state)."""
    for i in training.steps(losses, until):
        model, opt_state, loss = step(*state, *batches[i])
        state = (model, opt_state)
        losses.append(loss)
        after_step(state)
    return state


def compare(losses: Sequence[Any], settings: dict[str, Any], batches: training.Batches) -> str:
    """The same steps without pipelines, and once more with the initial weights rounded."""
    plain: list[Any] = []
    rounded: list[Any] = []
    step = make_train_step(gradient_fn, settings["dtype"])
    model, opt_state = create(settings)
    fit(step, (model, opt_state), plain, batches, len(losses))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    nudged = eqx.combine(training.nudged(arrays, settings["dtype"], settings["seed"]), rest)
    fit(step, (nudged, opt_state), rounded, batches, len(losses))
    return training.comparison(losses, plain, rounded)


def main(argv: Sequence[str] | None = None) -> int:
    options = training.parser(__doc__ or "", out="out/photo_equinox", steps=300, batch=8192)
    options.add_argument("--width", type=int, default=256, help="of the six hidden layers (default 256)")
    options.add_argument("--size", type=int, default=256, help="edge of the picture in pixels (default 256)")
    args = training.parse(options, argv)
    settings = {name: getattr(args, name) for name in ("seed", "batch", "dtype", "width", "size")}
    checkpoint = args.out / "checkpoint.eqx"
    coordinates, colours = photograph(args.size)
    batches = training.Batches((coordinates, colours), args.batch, args.seed)

    pipelined = kj.pipeline(gradient_fn, force=args.force or None)
    train_step = make_train_step(pipelined, args.dtype)
    losses, state = restore(checkpoint, settings) if args.resume else ([], create(settings))

    def after_step(state: tuple[Any, ...]) -> None:
        if len(losses) % args.save_every == 0:
            save(checkpoint, settings, losses, state)

    state = fit(train_step, state, losses, batches, args.steps, after_step)
    save(checkpoint, settings, losses, state)
    training.draw_curve(args.out / "loss.png", losses, "photograph, equinox")

    pipelined_loss = eqx.filter_jit(kj.pipeline(loss_fn, force=args.force or None))
    error = pipelined_loss(state[0], jnp.asarray(coordinates), jnp.asarray(colours))
    print(training.ending(losses, args, f"PSNR {-10 * jnp.log10(error):.1f} dB over all pixels"))
    print(training.outcome(kj.explain(pipelined)(state[0], *batches[0], args.dtype)))
    if args.compare:
        print(compare(losses, settings, batches))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
