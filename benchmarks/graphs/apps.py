"""The applications over graphs and tables.

Comes in: a dtype and a size. Goes out: ``GraphCase``, a function of (parameters, inputs) and both. The networks are those of
``examples/``, at their full sizes; what is less is said here. A case's ``rows`` is the number of edges or, for DLRM, of the batch;
graphs come near that number, meshes are refined as far as they have no more. Features are random normal, because zeros run faster
than data; meshes and graphs are real ones, and categories follow Zipf's law, because the speed of a gather depends on its indices.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.apps import DTYPES

EXAMPLES = Path(__file__).parents[2] / "examples"
GRAPHCAST_LAYERS = 4  # of 16: on a CPU all would take minutes in a training step
Rng = np.random.Generator
Loss = Callable[[jax.Array, jax.Array], jax.Array]
Made = tuple[Callable[..., jax.Array], Any, tuple[Any, ...]]  # function, parameters (of a key), inputs


def example(name: str) -> ModuleType:
    """A module of ``examples/``, imported as it is when it is run: its folder is on the path."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def squared_error(out: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((out.astype(jnp.float32 if out.dtype != jnp.float64 else out.dtype) - y) ** 2)


def click_error(out: jax.Array, y: jax.Array) -> jax.Array:
    """Cross-entropy of the logits [rows] of a click."""
    return jnp.mean(jax.nn.softplus(out) - y * out)


def label_error(out: jax.Array, y: jax.Array) -> jax.Array:
    """Cross-entropy of the logits [rows, classes] of labels [rows]."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], axis=-1))


@dataclasses.dataclass(frozen=True)
class GraphApp:
    """``make(rows, rng)`` gives the function, its parameters and its inputs in float32. ``unit``: what ``rows`` counts. The sizes
    that ``run --all`` measures are ``rows``, and ``train_rows`` in mode ``train``, on every platform, in ``dtypes``. ``by_hand`` is
    the same function as a JAX user makes it faster by hand, where there is such a way."""

    name: str
    title: str
    unit: str
    make: Callable[[int, Rng], Made]
    loss: Loss
    rows: tuple[int, ...]
    train_rows: tuple[int, ...]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    by_hand: Callable[..., jax.Array] | None = None

    def default_rows(self, platform: str, mode: str = "infer") -> tuple[int, ...]:
        return self.train_rows if mode == "train" else self.rows


@dataclasses.dataclass(frozen=True)
class GraphCase:
    app: GraphApp
    dtype: str
    rows: int
    function: Callable[..., jax.Array]
    params: Any
    inputs: tuple[Any, ...]
    targets: jax.Array  # for the app's loss

    def in_dtype(self, dtype: Any) -> GraphCase:
        """The case with everything that is a floating-point number in ``dtype``."""
        params, inputs, targets = (_cast(tree, dtype) for tree in (self.params, self.inputs, self.targets))
        return dataclasses.replace(self, params=params, inputs=inputs, targets=targets)


def case_of(app: GraphApp, dtype: str, rows: int, seed: int = 0) -> GraphCase:
    """Inputs for one measurement. Raises ``KeyError`` for an unknown dtype."""
    rng = np.random.default_rng(seed)
    function, params, inputs = app.make(rows, rng)
    targets = _targets(app.loss, jax.eval_shape(function, params, *inputs).shape, rng)
    return GraphCase(app, dtype, rows, function, params, inputs, targets).in_dtype(DTYPES[dtype])


def _targets(loss: Loss, shape: tuple[int, ...], rng: Rng) -> Any:
    """Labels of logits [rows, classes], clicks of 0 and 1, or random normal values."""
    if loss is label_error:
        return rng.integers(shape[-1], size=shape[0], dtype=np.int32)
    return (rng.random(shape) < 0.3).astype(np.float32) if loss is click_error else normal(rng, *shape)


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, dtype if jnp.issubdtype(a.dtype, jnp.floating) else None), tree)


def normal(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def random_key(rng: Rng) -> jax.Array:
    return jax.random.key(int(rng.integers(1 << 30)))


def _meshgraphnets(rows: int, rng: Rng) -> Made:
    module = example("mesh_graph_net")
    sizes = dataclasses.replace(module.FULL, points=max(36, round(rows / 5.6)))
    mesh = module.make_mesh(sizes.points, 0)
    nodes = normal(rng, len(mesh.points), module.NODE_FEATURES)
    ends = (mesh.senders.astype(np.int32), mesh.receivers.astype(np.int32))
    return module.network, module.initial_params(random_key(rng), sizes), (nodes, mesh.edge_features(), *ends)


def _graphcast_graph(rows: int, rng: Rng) -> tuple[Any, Any, Any]:
    module = example("graphcast")
    refinements = max(n for n in range(1, 8) if n == 1 or 20 * (4 ** (n + 1) - 1) <= rows)
    sizes = module.Sizes(round(180 / 2 ** (5 - refinements)), refinements, module.FULL.latent, GRAPHCAST_LAYERS)
    return module, module.initial_params(random_key(rng), sizes), module.make_graph(sizes)


def _graphcast(rows: int, rng: Rng) -> Made:
    module, params, graph = _graphcast_graph(rows, rng)
    return module.network, params, (graph, normal(rng, len(graph["grid_position"]), module.FIELDS))


def _graphcast_processor(rows: int, rng: Rng) -> Made:
    module, params, graph = _graphcast_graph(rows, rng)
    latent = params["out"]["b0"].size
    counts = (len(graph["mesh"]["senders"]), len(graph["mesh_position"]))
    return module.processor, params["layers"], (graph["mesh"], *(normal(rng, n, latent) for n in counts))


def _dlrm(rows: int, rng: Rng) -> Made:
    module = example("dlrm")
    clicks = module.Clicks.make(module.FULL, 0)
    numbers, categories, _, _ = clicks.draw(rows, (int(rng.integers(1 << 30)),))
    return module.network, module.initial_params(random_key(rng), module.FULL), (numbers, categories)


def _attention(name: str, rows: int, rng: Rng) -> Made:
    module, graphs = example(name), example("_graphs")
    full = module.FULL
    nodes = max(8, rows * full.nodes // full.edges)
    graph = graphs.community_graph(nodes, rows, full.classes, full.features, 0)
    return (
        module.network,
        module.initial_params(random_key(rng), full),
        (normal(rng, nodes, full.features), graph.senders, graph.receivers),
    )


_EDGES, _PROCESSOR = "edges", f"{GRAPHCAST_LAYERS} layers of latent size 512"
GRAPH_APPS = {
    app.name: app
    for app in (
        GraphApp(
            "meshgraphnets",
            "MeshGraphNets, 15 steps of latent size 128",
            _EDGES,
            _meshgraphnets,
            squared_error,
            (100_000,),
            (20_000,),
        ),
        GraphApp("graphcast", f"GraphCast, {_PROCESSOR}", "mesh edges", _graphcast, squared_error, (20_460,), (5_100,)),
        GraphApp(
            "graphcast_processor",
            f"GraphCast's processor, {_PROCESSOR}",
            "mesh edges",
            _graphcast_processor,
            squared_error,
            (20_460,),
            (20_460,),
        ),
        GraphApp("dlrm", "DLRM of MLPerf, tables of up to 50 000 rows", "rows", _dlrm, click_error, (8_192,), (4_096,)),
        GraphApp(
            "gat",
            "graph attention network, 8 heads of 8",
            _EDGES,
            functools.partial(_attention, "gat"),
            label_error,
            (1_000_000,),
            (500_000,),
        ),
        GraphApp(
            "graph_transformer",
            "Graph Transformer, 4 layers of latent size 128",
            _EDGES,
            functools.partial(_attention, "graph_transformer"),
            label_error,
            (300_000,),
            (100_000,),
        ),
    )
}
