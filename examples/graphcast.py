"""Learn to carry fields along with the wind on a sphere with GraphCast's network, the whole training step as spatial pipelines.

    python examples/graphcast.py             # about a minute on two cores; Ctrl-C ends with what was reached
    python examples/graphcast.py --plain     # the same steps with jax.jit
    python examples/graphcast.py --full      # latent size 512, 16 layers, a grid of one degree: days on two cores

The network is that of Lam et al. 2023 (arXiv:2212.12794): an encoder from a grid of latitudes and longitudes to an icosahedral
multi-mesh (the edges of all its refinements at once), message-passing layers there, and a decoder back to the grid; multilayer
perceptrons of one hidden layer with swish and a layer normalisation. ``--full`` has the sizes of the authors' GraphCast_small:
a grid of one degree, five refinements, latent size 512, 16 layers.

The data comes from a solver in this file: a tracer in a smooth random wind without divergence. Along a streamline it does not
change, so its values after some hours are the initial ones at the points that the wind comes from, which fourth-order Runge-Kutta
steps find. The network is given the tracer now, its change since some hours ago (the paper's network sees two states, too) and the
wind, and tells the next change.
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
import scipy.spatial
from matplotlib.figure import Figure

import kitsune_jax as kj

Params = dict[str, Any]
Arrays = dict[str, Any]
FIELDS = 5  # tracer, its last change, wind (3)
CHANGE = 0.15  # the unit of changes: about their standard deviation
EDGE_FEATURES = 4  # relative position (3), length


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A grid of ``latitudes`` by ``2 * latitudes``, ``refinements`` of the icosahedron."""

    latitudes: int
    refinements: int
    latent: int
    layers: int


SMALL = Sizes(latitudes=32, refinements=3, latent=64, layers=4)
FULL = Sizes(latitudes=180, refinements=5, latent=512, layers=16)


def icosahedron() -> tuple[np.ndarray, np.ndarray]:
    """Its 12 points [12, 3] on the unit sphere and its 20 triangles."""
    golden = (1 + 5**0.5) / 2
    flat = np.array([(s, t * golden) for s in (-1, 1) for t in (-1, 1)])
    points = np.concatenate([np.insert(flat, axis, 0, axis=1)[:, order] for axis, order in ((0, [0, 1, 2]), (2, [0, 1, 2]))])
    points = np.concatenate([points, np.stack([flat[:, 1], 0 * flat[:, 0], flat[:, 0]], 1)])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points, scipy.spatial.ConvexHull(points).simplices


def multi_mesh(refinements: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points [nodes, 3], triangles of the finest mesh, and the edges [2, n] of all meshes, both directions."""
    points, triangles = icosahedron()
    levels = [_edges(triangles)]
    for _ in range(refinements):
        edges = levels[-1]
        middles = points[edges].sum(0)
        number = {(a, b): len(points) + i for i, (a, b) in enumerate(edges.T.tolist())}
        points = np.concatenate([points, middles / np.linalg.norm(middles, axis=1, keepdims=True)])
        finer = []
        for a, b, c in triangles.tolist():
            ab, bc, ca = (number[min(p), max(p)] for p in ((a, b), (b, c), (c, a)))
            finer += [(a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca)]
        triangles = np.array(finer)
        levels.append(_edges(triangles))
    one_way = np.concatenate(levels, axis=1)
    return points, triangles, np.concatenate([one_way, one_way[::-1]], axis=1)


def _edges(triangles: np.ndarray) -> np.ndarray:
    """Each once, the smaller end first: [2, n]."""
    pairs = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    return np.unique(np.sort(pairs, axis=1), axis=0).T


def grid_points(latitudes: int) -> np.ndarray:
    """Points [latitudes * 2 latitudes, 3] on the unit sphere, from south to north and within a latitude to the east."""
    phi = (np.arange(latitudes) + 0.5) / latitudes * np.pi - np.pi / 2
    longitude = np.arange(2 * latitudes) / latitudes * np.pi
    phi, longitude = np.meshgrid(phi, longitude, indexing="ij")
    return np.stack([np.cos(phi) * np.cos(longitude), np.cos(phi) * np.sin(longitude), np.sin(phi)], -1).reshape(-1, 3)


def make_graph(sizes: Sizes) -> Arrays:
    """For each of "to_mesh", "mesh" and "to_grid" the ``senders`` [n], ``receivers`` [n] and ``edges`` [n, 4]; and the
    positions."""
    grid = grid_points(sizes.latitudes)
    mesh, triangles, edges = multi_mesh(sizes.refinements)
    longest = np.linalg.norm(np.diff(mesh[_edges(triangles)], axis=0), axis=-1).max()
    # A grid point tells all points of the mesh within 0.6 of its longest edge, and is told by the corners of its triangle (both as
    # in the paper), which is the one whose middle is nearest.
    near = scipy.spatial.cKDTree(mesh).query_ball_point(grid, 0.6 * longest)
    to_mesh = np.stack([np.repeat(np.arange(len(grid)), [len(n) for n in near]), np.concatenate(near).astype(int)])
    middles = mesh[triangles].mean(1)
    around = triangles[scipy.spatial.cKDTree(middles / np.linalg.norm(middles, axis=1, keepdims=True)).query(grid)[1]]
    to_grid = np.stack([around.reshape(-1), np.repeat(np.arange(len(grid)), 3)])

    def part(ends: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> Arrays:
        way = senders[ends[0]] - receivers[ends[1]]
        features = np.concatenate([way, np.linalg.norm(way, axis=1, keepdims=True)], axis=1) / longest
        return {"senders": ends[0].astype(np.int32), "receivers": ends[1].astype(np.int32), "edges": features.astype(np.float32)}

    parts = {"to_mesh": part(to_mesh, grid, mesh), "mesh": part(edges, mesh, mesh), "to_grid": part(to_grid, mesh, grid)}
    return {**parts, "grid_position": grid.astype(np.float32), "mesh_position": mesh.astype(np.float32)}


def initial_params(key: jax.Array, sizes: Sizes) -> Params:
    d = sizes.latent
    keys = iter(jax.random.split(key, 2 * (2 * sizes.layers + 11)))

    def mlp_params(inputs: int, outputs: int = d) -> Params:
        def weight(m: int, n: int) -> jax.Array:
            return jax.random.normal(next(keys), (m, n)) * m**-0.5

        ends = {"scale": jnp.ones(outputs), "offset": jnp.zeros(outputs)}
        return {"w0": weight(inputs, d), "b0": jnp.zeros(d), "w1": weight(d, outputs), "b1": jnp.zeros(outputs), **ends}

    def step_params() -> Params:
        return {"edges": mlp_params(3 * d), "nodes": mlp_params(2 * d)}

    embedded = {"grid": FIELDS + 3, "mesh_nodes": 3, "to_mesh": EDGE_FEATURES, "mesh": EDGE_FEATURES, "to_grid": EDGE_FEATURES}
    return {
        "embed": {name: mlp_params(width) for name, width in embedded.items()},
        "to_mesh": step_params() | {"grid": mlp_params(d)},
        "layers": [step_params() for _ in range(sizes.layers)],
        "to_grid": step_params(),
        "out": mlp_params(d, 1),
    }


def mlp(params: Params, x: jax.Array, normalise: bool = True) -> jax.Array:
    x = jax.nn.swish(x @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * params["scale"] + params["offset"] if normalise else x


def message_passing(
    params: Params, part: Arrays, edges: jax.Array, senders: jax.Array, receivers: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is to be added to the edges and to the receiving nodes."""
    ends = [senders[part["senders"]], receivers[part["receivers"]]]
    messages = mlp(params["edges"], jnp.concatenate([edges, *ends], axis=-1))
    received = jax.ops.segment_sum(messages, part["receivers"], num_segments=len(receivers))
    return messages, mlp(params["nodes"], jnp.concatenate([receivers, received], axis=-1))


def processor(layers: list[Params], part: Arrays, edges: jax.Array, mesh: jax.Array) -> jax.Array:
    for layer in layers:
        more_edges, more = message_passing(layer, part, edges, mesh, mesh)
        edges, mesh = edges + more_edges, mesh + more
    return mesh


def network(params: Params, graph: Arrays, fields: jax.Array) -> jax.Array:
    """The next change of the tracer: [grid points, 1] of ``fields`` [grid points, 5]."""
    embed = params["embed"]
    grid = mlp(embed["grid"], jnp.concatenate([fields, graph["grid_position"]], axis=-1))
    mesh = mlp(embed["mesh_nodes"], graph["mesh_position"])
    edges = {name: mlp(embed[name], graph[name]["edges"]) for name in ("to_mesh", "mesh", "to_grid")}
    mesh = mesh + message_passing(params["to_mesh"], graph["to_mesh"], edges["to_mesh"], grid, mesh)[1]
    grid = grid + mlp(params["to_mesh"]["grid"], grid)
    mesh = processor(params["layers"], graph["mesh"], edges["mesh"], mesh)
    grid = grid + message_passing(params["to_grid"], graph["to_grid"], edges["to_grid"], mesh, grid)[1]
    return mlp(params["out"], grid, normalise=False)


def weather(points: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Fields [points, 5], and the next change of the tracer [points, 1]; ``points`` [points, 3] on the sphere."""
    rng = np.random.default_rng(seed)
    flow, turn = rng.standard_normal((3, 3)) * 0.25, rng.standard_normal(3) * 0.4
    bumps = rng.standard_normal((6, 3))
    bumps /= np.linalg.norm(bumps, axis=1, keepdims=True)
    heights = rng.uniform(-1, 1, 6)

    def wind(p: np.ndarray) -> np.ndarray:  # the stream function is turn.p + p.flow.p; the wind is along its contour lines
        return np.cross(p, turn + p @ (flow + flow.T))

    def origin(p: np.ndarray, steps: int = 8, dt: float = -0.05) -> np.ndarray:
        for _ in range(steps):
            a = wind(p)
            b = wind(p + dt / 2 * a)
            c = wind(p + dt / 2 * b)
            p = p + dt / 6 * (a + 2 * b + 2 * c + wind(p + dt * c))
            p = p / np.linalg.norm(p, axis=1, keepdims=True)
        return p

    def tracer(p: np.ndarray) -> np.ndarray:
        return (np.exp(8 * (p @ bumps.T - 1)) @ heights)[:, None]

    once = origin(points)
    before, now, after = tracer(points), tracer(once), tracer(origin(once))
    fields = np.concatenate([now, (now - before) / CHANGE, wind(points)], axis=1)
    return fields.astype(np.float32), ((after - now) / CHANGE).astype(np.float32)


def draw(path: Path, latitudes: int, shown: dict[str, np.ndarray]) -> None:
    figure = Figure(figsize=(12, 7), layout="constrained")
    for i, (name, field) in enumerate(shown.items()):
        axes = figure.add_subplot(2, 2, i + 1, projection="mollweide")
        axes.set_title(name)
        edges = np.linspace(-np.pi, np.pi, 2 * latitudes + 1), np.linspace(-np.pi / 2, np.pi / 2, latitudes + 1)
        axes.pcolormesh(*edges, field.reshape(latitudes, -1), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_xticks([])
        axes.set_yticks([])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/graphcast", steps=300), argv)
    sizes = FULL if args.full else SMALL
    graph = make_graph(sizes)
    count = {name: len(graph[name]["senders"]) for name in ("to_mesh", "mesh", "to_grid")}
    print(f"{len(graph['grid_position'])} grid points, {len(graph['mesh_position'])} mesh points, edges: {count}", flush=True)

    def loss_fn(params: Params, graph: Arrays, fields: jax.Array, change: jax.Array) -> jax.Array:
        """Mean squared error of the change; cells count by their area."""
        area = jnp.sqrt(jnp.sum(graph["grid_position"][:, :2] ** 2, axis=-1, keepdims=True))
        return jnp.sum(area * (network(params, graph, fields) - change) ** 2) / jnp.sum(area)

    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(2e-3, args.steps, alpha=0.02)))

    def train_step(params: Params, state: Any, *batch: Any) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params = initial_params(jax.random.key(args.seed), sizes)
    step = training.compiled(train_step, args)
    state = optimiser.init(params)
    example = jax.tree.map(jnp.copy, (params, state))
    losses: list[Any] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, graph, *weather(graph["grid_position"], 1000 * (args.seed + 1) + i))
        losses.append(loss)

    fields, change = weather(graph["grid_position"], 0)
    found = np.asarray(jax.jit(training.transformed(network, args))(params, graph, fields))
    now, last = fields[:, :1], fields[:, 1:2]
    shown = {"tracer": now, "some hours later": now + CHANGE * change, "network": now + CHANGE * found}
    draw(args.out / "weather.png", sizes.latitudes, shown | {"error of the network": CHANGE * (found - change)})
    left, more_of_the_same = (float(np.sum((guess - change) ** 2) / np.sum(change**2)) for guess in (found, last))
    quality = f"{1 - left:.1%} of the change explained in weather that it never saw ({1 - more_of_the_same:.1%} by the last change)"
    print(training.application_ending(losses, args, quality))
    print(training.outcome(kj.explain(train_step, force=args.force or None)(*example, graph, fields, change), args.plain))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
