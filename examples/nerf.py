"""Fit a scene to its pictures with a neural radiance field (NeRF); a pixel streams from its ray to its colour.

    python examples/nerf.py             # about a minute on two cores; Ctrl-C ends with what was reached
    python examples/nerf.py --plain     # the same steps with jax.jit
    python examples/nerf.py --full      # the sizes of the paper's coarse network

The method is that of Mildenhall et al. 2020 (arXiv:2003.08934): points along a pixel's ray, sines and cosines of their coordinates,
a network that gives each a colour and a density, and the integral of colour times what reaches the eye. ``--full`` has the paper's
8 layers of 256, the encoding again after the fourth, 64 points on a ray and 4096 rays in a step; view directions and the second,
finer network are left out. The scene is made in this file: three soft balls over a chequered floor, whose true pictures are the
same integral over many more points."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import kitsune_jax as kj

Layers = list[tuple[jax.Array, jax.Array]]
Field = Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # points [..., 3] -> colours [..., 3], densities [...]
NEAR, FAR = 1.5, 4.5  # of the eye, which looks at the origin from a distance of 3
VIEWS, TRUE_POINTS = 24, 256
# Centre, radius and colour of each ball.
BALLS = (
    ((0.0, 0.0, 0.05), 0.45, (0.9, 0.25, 0.2)),
    ((0.55, -0.35, -0.2), 0.28, (0.2, 0.65, 0.3)),
    ((-0.4, 0.55, -0.15), 0.32, (0.25, 0.4, 0.9)),
)
FLOOR = -0.45


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``pixels`` by ``pixels`` in a picture; ``rays`` in a step, ``points`` on each; ``octaves`` of the encoding."""

    pixels: int
    rays: int
    points: int
    layers: int
    width: int
    octaves: int


SMALL = Sizes(pixels=48, rays=512, points=32, layers=4, width=64, octaves=6)
FULL = Sizes(pixels=200, rays=4096, points=64, layers=8, width=256, octaves=10)


def scene(points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The true field."""
    density = 30 * jax.nn.sigmoid((FLOOR - points[..., 2]) * 40) * (jnp.max(jnp.abs(points[..., :2]), axis=-1) < 1.0)
    squares = jnp.floor(4 * points[..., 0]) + jnp.floor(4 * points[..., 1])
    grey = jnp.where(squares % 2 == 0, 0.85, 0.35)
    weighted = density[..., None] * grey[..., None] * jnp.ones(3)
    for centre, radius, colour in BALLS:
        inside = 30 * jax.nn.sigmoid((radius - jnp.linalg.norm(points - jnp.array(centre), axis=-1)) * 40)
        density, weighted = density + inside, weighted + inside[..., None] * jnp.array(colour)
    return weighted / (density[..., None] + 1e-6), density


def rays_of(angle: float, height: float, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Origins and directions [pixels * pixels, 3] of a camera at a distance of 3 from the origin."""
    eye = 3 * np.array([np.cos(angle) * np.cos(height), np.sin(angle) * np.cos(height), np.sin(height)])
    forward = -eye / 3
    right = np.cross(forward, [0, 0, 1])
    right /= np.linalg.norm(right)
    up = np.cross(right, forward)
    across = 0.42 * (2 * (np.arange(pixels) + 0.5) / pixels - 1)
    directions = forward + across[None, :, None] * right - across[:, None, None] * up
    directions = (directions / np.linalg.norm(directions, axis=-1, keepdims=True)).reshape(-1, 3)
    return np.broadcast_to(eye, directions.shape).astype(np.float32), directions.astype(np.float32)


def render(field: Field, origins: jax.Array, directions: jax.Array, depths: Any) -> jax.Array:
    """Colours [rays, 3] on white, of rays [rays, 3] with points at ``depths`` [rays, points]."""
    points = origins[:, None, :] + depths[:, :, None] * directions[:, None, :]
    colour, density = field(points)
    length = jnp.diff(depths, axis=-1, append=FAR)
    passed = density * length
    reaches = jnp.exp(-(jnp.cumsum(passed, axis=-1) - passed))  # what is not swallowed before the point
    weight = reaches * (1 - jnp.exp(-passed))
    return jnp.sum(weight[..., None] * colour, axis=1) + (1 - jnp.sum(weight, axis=-1, keepdims=True))


def initial_params(key: jax.Array, sizes: Sizes) -> Layers:
    encoded = 3 + 6 * sizes.octaves
    inputs = [encoded, *(sizes.width + (encoded if i == sizes.layers // 2 else 0) for i in range(1, sizes.layers)), sizes.width]
    outputs = [sizes.width] * sizes.layers + [4]
    keys = jax.random.split(key, len(inputs))
    shapes = zip(keys, inputs, outputs, strict=True)
    return [(jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, jnp.zeros(n)) for k, m, n in shapes]


def encode(points: jax.Array, octaves: int) -> jax.Array:
    """[..., 3 + 6 * octaves]: the coordinates, and sines and cosines of their multiples."""
    scaled = (points[..., None] * (2.0 ** jnp.arange(octaves, dtype=points.dtype))).reshape(*points.shape[:-1], -1)
    return jnp.concatenate([points, jnp.sin(scaled), jnp.cos(scaled)], axis=-1)


def field_of(params: Layers, sizes: Sizes) -> Field:
    def field(points: jax.Array) -> tuple[jax.Array, jax.Array]:
        encoded = encode(points, sizes.octaves)
        *hidden, (w_last, b_last) = params
        x = encoded
        for i, (w, b) in enumerate(hidden):
            if i and i == sizes.layers // 2:
                x = jnp.concatenate([x, encoded], axis=-1)
            x = jax.nn.relu(x @ w + b)
        out = x @ w_last + b_last
        return jax.nn.sigmoid(out[..., :3]), jax.nn.softplus(out[..., 3])

    return field


def network(params: Layers, origins: jax.Array, directions: jax.Array, depths: jax.Array, sizes: Sizes) -> jax.Array:
    """Colours [rays, 3] of rays [rays, 3] with points at ``depths`` [rays, points]."""
    return render(field_of(params, sizes), origins, directions, depths)


def even_depths(rays: int, points: int) -> np.ndarray:
    return np.broadcast_to(np.linspace(NEAR, FAR, points, endpoint=False, dtype=np.float32), (rays, points))


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Rays [pixels of all views, 3], and their true colours [pixels of all views, 3]."""

    origins: np.ndarray
    directions: np.ndarray
    colours: np.ndarray

    @staticmethod
    def take(angles: Sequence[float], height: float, pixels: int) -> Pictures:
        true = jax.jit(lambda o, d: render(scene, o, d, even_depths(len(o), TRUE_POINTS)))
        views = [rays_of(angle, height + 0.25 * np.sin(3 * angle), pixels) for angle in angles]
        colours = [np.asarray(true(*view)) for view in views]
        origins, directions = (np.concatenate(parts) for parts in zip(*views, strict=True))
        return Pictures(origins, directions, np.concatenate(colours))

    def batch(self, sizes: Sizes, seed: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Origins, directions, depths and colours of random rays; each point is somewhere in its part of the ray."""
        rng = np.random.default_rng(seed)
        chosen = rng.integers(len(self.colours), size=sizes.rays)
        step = (FAR - NEAR) / sizes.points
        depths = even_depths(sizes.rays, sizes.points) + step * rng.random((sizes.rays, sizes.points), np.float32)
        return self.origins[chosen], self.directions[chosen], depths.astype(np.float32), self.colours[chosen]


def draw(path: Path, losses: Sequence[Any], truth: np.ndarray, found: np.ndarray) -> None:
    """The loss, and the picture from where no picture was taken."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.add_subplot(1, 3, 1, xlabel="step", ylabel="mean squared error", yscale="log", title="training")
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64))
    for i, (name, picture) in enumerate({"scene": truth, "network, a view that it never saw": found}.items()):
        axes = figure.add_subplot(1, 3, 2 + i, title=name)
        axes.imshow(np.clip(picture, 0, 1))
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/nerf", steps=1500), argv)
    sizes = FULL if args.full else SMALL
    pictures = Pictures.take(np.linspace(0, 2 * np.pi, VIEWS, endpoint=False).tolist(), 0.5, sizes.pixels)
    unseen = Pictures.take([0.13], 0.5, sizes.pixels)
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, args.steps, alpha=0.03))

    def loss_fn(params: Layers, origins: jax.Array, directions: jax.Array, depths: jax.Array, colours: jax.Array) -> jax.Array:
        return jnp.mean((network(params, origins, directions, depths, sizes) - colours) ** 2)

    def train_step(params: Layers, state: Any, *batch: jax.Array) -> tuple[Layers, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params = initial_params(jax.random.key(args.seed), sizes)
    step = training.compiled(train_step, args)
    picture = jax.jit(training.transformed(functools.partial(network, sizes=sizes), args))
    state = optimiser.init(params)
    report = training.outcome(
        kj.explain(train_step, force=args.force or None)(params, state, *pictures.batch(sizes, (0,))), args.plain
    )
    losses: list[Any] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, *pictures.batch(sizes, (args.seed, i)))
        losses.append(loss)

    depths = even_depths(len(unseen.colours), 2 * sizes.points)
    found = np.asarray(picture(params, unseen.origins, unseen.directions, depths))
    noise = float(-10 * np.log10(np.mean((found - unseen.colours) ** 2)))
    side = (sizes.pixels, sizes.pixels, 3)
    draw(args.out / "view.png", losses, unseen.colours.reshape(side), found.reshape(side))
    print(training.application_ending(losses, args, f"{noise:.1f} dB from a view that it never saw"))
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
