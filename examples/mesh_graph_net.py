"""Learn to simulate waves on a triangle mesh with MeshGraphNets, the whole training step as spatial pipelines.

    python examples/mesh_graph_net.py             # about a minute on two cores; Ctrl-C ends with what was reached
    python examples/mesh_graph_net.py --plain     # the same steps with jax.jit
    python examples/mesh_graph_net.py --full      # 15 steps of latent size 128 on 200 000 edges: hours on two cores

The network is that of Pfaff et al. 2021 (arXiv:2010.03409): an encoder, message-passing steps and a decoder, all of them multilayer
perceptrons of two hidden layers with a layer normalisation at the end. ``--full`` takes the sizes of that paper (15 steps of latent
size 128) on a mesh as large as those of the Kitsune paper (arXiv:2502.18403: 30 000 nodes, 200 000 edges).

The data comes from a simulator in this file: the wave equation on a drum with a round hole, finite elements on the Delaunay mesh of
jittered points, explicit steps in time. The network sees displacement and velocity of the nodes and predicts the next frame's
acceleration. At the end it simulates on its own from an initial state that it never saw, and a picture shows both.
"""

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
import scipy.sparse
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation
from scipy.spatial import Delaunay

import kitsune_jax as kj

Params = dict[str, Any]
NODE_FEATURES, EDGE_FEATURES = 4, 4  # displacement, velocity, interior or fixed; relative position (2), length, displacement
FRAME = 0.03  # time between two frames, where a wave needs 1 to cross the drum
NOISE = 0.01  # standard deviation of what is added to a training frame, so that the network corrects its own errors
SHOWN = (0, 6, 12, 20)  # frames of the picture
HOLE, RADIUS = (0.62, 0.5), 0.15


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``points`` before the hole is cut out, ``steps`` of message passing, ``batch`` frames in a training step."""

    points: int
    latent: int
    steps: int
    batch: int
    trajectories: int


SMALL = Sizes(points=400, latent=64, steps=6, batch=4, trajectories=16)
FULL = Sizes(points=36_000, latent=128, steps=15, batch=1, trajectories=4)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """``points`` [nodes, 2], ``triangles`` [n, 3], ``fixed`` [nodes]: on the rim; every edge in both directions, ``senders``
    [edges] and ``receivers`` [edges]."""

    points: np.ndarray
    triangles: np.ndarray
    fixed: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray

    def edge_features(self) -> np.ndarray:
        """Relative position and length of every edge, in units of the mean length: [edges, 3] float32."""
        way = self.points[self.senders] - self.points[self.receivers]
        length = np.linalg.norm(way, axis=1, keepdims=True)
        return (np.concatenate([way, length], axis=1) / length.mean()).astype(np.float32)


def make_mesh(points: int, seed: int) -> Mesh:
    """The Delaunay mesh of about ``points`` jittered points in the unit square, without those in a round hole."""
    rng = np.random.default_rng(seed)
    side = max(6, round(points**0.5))
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, side)] * 2), -1).reshape(-1, 2)
    inside = ((grid > 0) & (grid < 1)).all(1)
    grid = grid + inside[:, None] * rng.uniform(-0.3, 0.3, grid.shape) / side
    grid = grid[np.hypot(*(grid - HOLE).T) > RADIUS + 0.5 / side]
    angle = np.linspace(0, 2 * np.pi, round(2 * np.pi * RADIUS * side), endpoint=False)
    grid = np.concatenate([grid, HOLE + RADIUS * np.stack([np.cos(angle), np.sin(angle)], 1)])
    triangles = Delaunay(grid).simplices
    triangles = triangles[np.hypot(*(grid[triangles].mean(1) - HOLE).T) > RADIUS]
    edges = np.sort(np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]), axis=1)
    edges, triangles_of_edge = np.unique(edges, axis=0, return_counts=True)
    fixed = np.zeros(len(grid), bool)
    fixed[edges[triangles_of_edge == 1]] = True
    return Mesh(grid, triangles, fixed, np.concatenate([edges[:, 0], edges[:, 1]]), np.concatenate([edges[:, 1], edges[:, 0]]))


def wave_operator(mesh: Mesh) -> scipy.sparse.csr_matrix:
    """The negative Laplacian of linear finite elements with lumped masses: [nodes, nodes]."""
    corners = mesh.points[mesh.triangles]
    sides = corners[:, [2, 0, 1]] - corners[:, [1, 2, 0]]  # opposite of each corner
    area = np.abs(sides[:, 0, 0] * sides[:, 1, 1] - sides[:, 0, 1] * sides[:, 1, 0]) / 2
    stiffness = np.einsum("tid,tjd->tij", sides, sides) / (4 * area[:, None, None])
    rows, columns = np.repeat(mesh.triangles, 3, axis=1), np.tile(mesh.triangles, 3)
    count = len(mesh.points)
    matrix = scipy.sparse.coo_matrix((stiffness.ravel(), (rows.ravel(), columns.ravel())), (count, count))
    mass = np.bincount(mesh.triangles.ravel(), np.repeat(area / 3, 3), count)
    return scipy.sparse.diags(1 / np.maximum(mass, 1e-12)) @ matrix.tocsr()


def simulate(mesh: Mesh, frames: int, seed: int) -> np.ndarray:
    """Displacements [frames, nodes] of the drum, at rest with three random bumps in the beginning."""
    rng = np.random.default_rng(seed)
    laplacian = wave_operator(mesh)
    stable = 1.5 / np.sqrt(abs(laplacian).sum(axis=1).max())  # 2 / sqrt(largest eigenvalue) is the limit, by Gershgorin's circles
    substeps = int(np.ceil(FRAME / stable))
    dt = FRAME / substeps
    bumps = zip(rng.uniform(0.1, 0.9, (3, 2)), rng.uniform(-1, 1, 3), rng.uniform(0.08, 0.16, 3), strict=True)
    u = sum(height * np.exp(-np.sum((mesh.points - c) ** 2, 1) / width**2) for c, height, width in bumps)
    rim = np.minimum(np.abs(np.stack([mesh.points, 1 - mesh.points])).min((0, 2)), np.hypot(*(mesh.points - HOLE).T) - RADIUS)
    u = u * np.tanh(rim / 0.05) * ~mesh.fixed
    velocity = np.zeros_like(u)
    found = [u]
    for _ in range(frames - 1):
        for _ in range(substeps):
            velocity -= dt * (laplacian @ u) * ~mesh.fixed
            u = u + dt * velocity
        found.append(u)
    return np.stack(found).astype(np.float32)


def initial_params(key: jax.Array, sizes: Sizes) -> Params:
    keys = iter(jax.random.split(key, 4 * (2 * sizes.steps + 3)))
    latent = sizes.latent

    def mlp_params(inputs: int, outputs: int = latent) -> Params:
        widths = (inputs, latent, latent, outputs)
        weights = [jax.random.normal(next(keys), (m, n)) * (2 / m) ** 0.5 for m, n in zip(widths, widths[1:], strict=False)]
        return {"w": weights, "b": [jnp.zeros(n) for n in widths[1:]], "scale": jnp.ones(outputs), "offset": jnp.zeros(outputs)}

    return {
        "encode_nodes": mlp_params(NODE_FEATURES),
        "encode_edges": mlp_params(EDGE_FEATURES),
        "steps": [{"edges": mlp_params(3 * latent), "nodes": mlp_params(2 * latent)} for _ in range(sizes.steps)],
        "decode": mlp_params(latent, 1),
    }


def mlp(params: Params, x: jax.Array, normalise: bool = True) -> jax.Array:
    """Two hidden layers, then a layer normalisation."""
    *hidden, last = zip(params["w"], params["b"], strict=True)
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    x = x @ last[0] + last[1]
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * params["scale"] + params["offset"] if normalise else x


def network(params: Params, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """The scaled acceleration of every node: [nodes, 1]."""
    slopes = 5 * (nodes[senders, :1] - nodes[receivers, :1])  # what the paper calls relative positions in world space
    nodes, edges = mlp(params["encode_nodes"], nodes), mlp(params["encode_edges"], jnp.concatenate([edges, slopes], axis=-1))
    for step in params["steps"]:
        messages = mlp(step["edges"], jnp.concatenate([edges, nodes[senders], nodes[receivers]], axis=-1))
        received = jax.ops.segment_sum(messages, receivers, num_segments=len(nodes))
        nodes = nodes + mlp(step["nodes"], jnp.concatenate([nodes, received], axis=-1))
        edges = edges + messages
    return mlp(params["decode"], nodes, normalise=False)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Standard deviations in the data, by which the network's inputs and outputs are divided."""

    displacement: float
    velocity: float
    acceleration: float

    @staticmethod
    def of(frames: np.ndarray) -> Scale:
        velocity = np.diff(frames, axis=1)
        return Scale(float(frames.std()), float(velocity.std()), float(np.diff(velocity, axis=1).std()))

    def features(self, u: Any, before: Any, fixed: np.ndarray) -> Any:
        """[..., nodes, 4] of displacements [..., nodes] and those a frame before."""
        kind = jnp.broadcast_to(fixed, u.shape)
        return jnp.stack([u / self.displacement, (u - before) / self.velocity, kind, ~kind], axis=-1)


def roll_out(network_of_mesh: Any, params: Params, start: np.ndarray, frames: int, scale: Scale, fixed: np.ndarray) -> np.ndarray:
    """The network's own simulation from the first two frames of ``start``: displacements [frames, nodes]."""

    @jax.jit
    def advance(params: Params, before: jax.Array, u: jax.Array) -> jax.Array:
        acceleration = network_of_mesh(params, scale.features(u, before, fixed))[:, 0] * scale.acceleration
        return jnp.where(fixed, 0, 2 * u - before + acceleration)

    found = [jnp.asarray(start[0]), jnp.asarray(start[1])]
    while len(found) < frames:
        found.append(advance(params, *found[-2:]))
    return np.stack(found)


def draw(path: Path, mesh: Mesh, truth: np.ndarray, found: np.ndarray) -> None:
    figure = Figure(figsize=(3 * len(SHOWN), 6.4), layout="constrained")
    limit = float(np.abs(truth).max())
    grid = Triangulation(mesh.points[:, 0], mesh.points[:, 1], mesh.triangles)
    for row, (name, frames) in enumerate({"simulator": truth, "network": found}.items()):
        for column, frame in enumerate(SHOWN):
            axes = figure.add_subplot(2, len(SHOWN), row * len(SHOWN) + column + 1, aspect="equal", title=f"{name}, frame {frame}")
            axes.tripcolor(grid, frames[frame], shading="gouraud", cmap="RdBu", vmin=-limit, vmax=limit)
            axes.triplot(grid, color="k", linewidth=0.2, alpha=0.4)
            axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> int:
    options = training.application_parser(__doc__ or "", out="out/mesh_graph_net", steps=600)
    args = training.parse(options, argv)
    sizes = FULL if args.full else SMALL
    mesh = make_mesh(sizes.points, args.seed)
    print(f"{len(mesh.points)} nodes, {len(mesh.senders)} edges; simulating {sizes.trajectories} drums ...", flush=True)
    frames = np.stack([simulate(mesh, max(SHOWN) + 10, args.seed + 1 + i) for i in range(sizes.trajectories)])
    scale = Scale.of(frames)

    # A batch of frames is one graph, whose parts are not connected.
    shift = len(mesh.points) * np.arange(sizes.batch)[:, None]
    senders, receivers = (jnp.asarray((ids + shift).reshape(-1), jnp.int32) for ids in (mesh.senders, mesh.receivers))
    edges = jnp.asarray(mesh.edge_features())
    batch_edges = jnp.tile(edges, (sizes.batch, 1))

    def loss_fn(params: Params, before: jax.Array, u: jax.Array, after: jax.Array) -> jax.Array:
        """Mean squared error of the acceleration, in units of its standard deviation. Displacements are [batch, nodes]."""
        nodes = scale.features(u, before, mesh.fixed).reshape(-1, NODE_FEATURES)
        found = network(params, nodes, batch_edges, senders, receivers).reshape(u.shape)
        return jnp.mean(jnp.where(mesh.fixed, 0, found - (after - 2 * u + before) / scale.acceleration) ** 2)

    optimiser = optax.adam(optax.cosine_decay_schedule(2e-3, args.steps, alpha=0.02))

    def train_step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    def batch_of(step: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng((args.seed, step))
        which, when = rng.integers(len(frames), size=sizes.batch), rng.integers(1, frames.shape[1] - 1, size=sizes.batch)
        before, u, after = (frames[which, when + i] for i in (-1, 0, 1))
        noise = NOISE * scale.velocity * rng.standard_normal(u.shape, np.float32) * ~mesh.fixed
        return before, u + noise, after + noise  # what the network should correct is the noise in the velocity

    params = initial_params(jax.random.key(args.seed), sizes)
    step = training.compiled(train_step, args)
    losses: list[Any] = []
    state = optimiser.init(params)
    example = (params, state, *batch_of(0))
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, *batch_of(i))
        losses.append(loss)

    truth = simulate(mesh, max(SHOWN) + 1, args.seed + 1000)

    def network_of_mesh(params: Params, nodes: jax.Array) -> jax.Array:
        return network(params, nodes, edges, *(jnp.asarray(ids, jnp.int32) for ids in (mesh.senders, mesh.receivers)))

    found = roll_out(training.transformed(network_of_mesh, args), params, truth, len(truth), scale, mesh.fixed)
    draw(args.out / "rollout.png", mesh, truth, found)
    error = np.sqrt(np.mean((found - truth) ** 2, axis=1)) / truth.std()
    print(
        training.application_ending(
            losses, args, f"error of the roll-out {error[SHOWN[1]]:.1%} at frame {SHOWN[1]}, {error[-1]:.1%} at frame {SHOWN[-1]}"
        )
    )
    print(training.outcome(kj.explain(train_step, force=args.force or None)(*example), args.plain))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
