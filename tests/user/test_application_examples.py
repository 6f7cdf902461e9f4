"""The applications of ``examples/`` run as a user runs them, in small; and what they take their data from is what they say.

Forced: at sizes that suit a test no pipeline would pay, and the tests want them to run.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.graphs.apps import example
from tests.support.applications import Examples

TINY: dict[str, dict[str, Any]] = {
    "mesh_graph_net": {"points": 49, "latent": 16, "steps": 2, "batch": 2, "trajectories": 2},
    "graphcast": {"latitudes": 9, "refinements": 1, "latent": 16, "layers": 2},
    "dlrm": {"bottom": (16, 8), "top": (16, 1), "largest": 40, "batch": 1024},
    "gat": {"nodes": 200, "edges": 1_800, "features": 16, "classes": 3},
    "graph_transformer": {"nodes": 200, "edges": 1_800, "features": 16, "classes": 3, "latent": 16, "layers": 1},
}
PICTURES = {"mesh_graph_net": "rollout", "graphcast": "weather", "dlrm": "auc", "gat": "accuracy", "graph_transformer": "accuracy"}
STEPS = 30
EXAMPLES = Examples(TINY, PICTURES, STEPS)
each_example = pytest.mark.parametrize("name", list(TINY))
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


def loss_of(text: str) -> float:
    return float(re.search(r"loss (\S+),", text[text.index("steps") :])[1])  # type: ignore[index]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "gat" else pytest.mark.slow) for n in TINY])
def test_pipelined_and_plain_reach_the_same(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    EXAMPLES.check_same(name, tmp_path, monkeypatch, capsys, loss_of, 0.02, 0.25)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("gat", "mesh_graph_net") else pytest.mark.slow) for n in TINY])
def test_learns(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    losses: list[Any] = []
    training = importlib.import_module("_training")
    ending = training.application_ending
    monkeypatch.setattr(training, "application_ending", lambda found, *rest: losses.extend(found) or ending(found, *rest))
    steps = 4 * STEPS if name == "dlrm" else STEPS  # the embeddings start small
    EXAMPLES.run(name, tmp_path, monkeypatch, capsys, "--plain", "--steps", str(steps))
    assert len(losses) == steps
    assert np.mean(losses[-5:]) < 0.97 * np.mean(losses[:5])


@pytest.mark.parametrize("name", [pytest.param("dlrm", marks=pytest.mark.slow), "gat"])
def test_ctrl_c_ends_with_what_was_reached(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    EXAMPLES.check_ctrl_c(name, tmp_path, monkeypatch, capsys)


@each_example
def test_rejects_what_makes_no_sense(name: str, capsys: Any) -> None:
    EXAMPLES.check_arguments(name, capsys)


def test_full_sizes_are_those_of_the_papers() -> None:
    """Kitsune's table of applications, arXiv:2502.18403, and the papers that the examples name."""
    mesh = EXAMPLES.module("mesh_graph_net")
    made = mesh.make_mesh(mesh.FULL.points, 0)
    assert (mesh.FULL.steps, mesh.FULL.latent) == (15, 128)
    assert len(made.points) == pytest.approx(30_000, rel=0.15)
    assert len(made.senders) == pytest.approx(200_000, rel=0.01)
    graphcast = EXAMPLES.module("graphcast")
    assert (graphcast.FULL.latent, graphcast.FULL.layers, graphcast.FULL.refinements) == (512, 16, 5)
    dlrm = EXAMPLES.module("dlrm")
    assert (dlrm.FULL.bottom, dlrm.FULL.top) == ((512, 256, 128), (1024, 1024, 512, 256, 1))
    assert len(dlrm.table_rows(dlrm.FULL)) == 26
    gat = EXAMPLES.module("gat")
    assert (gat.FULL.heads, gat.FULL.width) == (8, 8)


# --- where the data comes from ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("points", "seed"), [(36, 0), (150, 3), (900, 7)])
def test_mesh_is_a_square_with_a_hole(points: int, seed: int) -> None:
    module = EXAMPLES.module("mesh_graph_net")
    mesh = module.make_mesh(points, seed)
    nodes, edges, faces = len(mesh.points), len(mesh.senders) // 2, len(mesh.triangles)
    assert nodes - edges + faces == 0  # Euler's number of a disc with a hole
    assert set(zip(mesh.senders, mesh.receivers, strict=True)) == set(zip(mesh.receivers, mesh.senders, strict=True))
    assert (mesh.senders != mesh.receivers).all()
    on_rim = (np.abs(mesh.points - 0.5).max(1) > 0.5 - 1e-9) | (np.hypot(*(mesh.points - module.HOLE).T) < module.RADIUS + 1e-9)
    np.testing.assert_array_equal(mesh.fixed, on_rim)


def test_laplacian_of_polynomials_and_energy_of_a_wave() -> None:
    module = EXAMPLES.module("mesh_graph_net")
    mesh = module.make_mesh(900, 1)
    laplacian, inside = module.wave_operator(mesh), ~mesh.fixed
    x, y = mesh.points.T
    np.testing.assert_allclose((laplacian @ (3 * x - 2 * y + 1))[inside], 0, atol=1e-8)
    assert -(laplacian @ (x**2 + y**2))[inside].mean() == pytest.approx(4, rel=0.05)
    frames = module.simulate(mesh, 30, 5).astype(np.float64)
    assert (frames[:, mesh.fixed] == 0).all()
    stretched = np.einsum("tn,tn->t", frames, frames @ laplacian.T)
    assert frames[0].std() > 3e-3
    assert stretched.max() < 1.5 * stretched[0]  # at rest in the beginning, all energy is in the stretching; a few per cent by mass


@pytest.mark.parametrize("refinements", [0, 1, 3])
def test_multi_mesh_has_the_edges_of_every_refinement(refinements: int) -> None:
    points, triangles, edges = EXAMPLES.module("graphcast").multi_mesh(refinements)
    assert len(points) == 10 * 4**refinements + 2
    assert len(triangles) == 20 * 4**refinements
    assert edges.shape == (2, 2 * sum(30 * 4**n for n in range(refinements + 1)))
    assert len(set(map(tuple, edges.T))) == edges.shape[1]
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1)
    lengths = np.linalg.norm(points[edges[0]] - points[edges[1]], axis=1)
    assert lengths.max() == pytest.approx(4 / math.sqrt(10 + 2 * math.sqrt(5)))  # of the icosahedron in the unit sphere


def test_every_grid_point_is_told_by_three_corners_around_it() -> None:
    module = EXAMPLES.module("graphcast")
    graph = module.make_graph(module.Sizes(latitudes=12, refinements=1, latent=8, layers=1))
    grid, mesh = graph["grid_position"], graph["mesh_position"]
    assert len(grid) == 12 * 24
    np.testing.assert_array_equal(np.bincount(graph["to_grid"]["receivers"]), 3)
    corners = mesh[graph["to_grid"]["senders"]].reshape(-1, 3, 3)
    weights = np.linalg.solve(corners.transpose(0, 2, 1), grid[..., None])[..., 0]
    assert (weights > -0.2).all()  # the nearest middle is that of the triangle around the point, or of one beside it
    assert set(graph["to_mesh"]["senders"]) == set(range(len(grid)))


def test_weather_keeps_the_tracer() -> None:
    module = EXAMPLES.module("graphcast")
    points = module.grid_points(40)
    fields, change = module.weather(points, 3)
    now = fields[:, 0]
    before, after = now - module.CHANGE * fields[:, 1], now + module.CHANGE * change[:, 0]
    area = np.sqrt((points[:, :2] ** 2).sum(1))
    np.testing.assert_allclose(np.einsum("ij,ij->i", fields[:, 2:], points), 0, atol=1e-6)  # the wind blows along the sphere
    for power in (1, 2):  # what flows without divergence keeps every mean
        total = [np.sum(area * field**power) for field in (before, now, after)]
        assert np.ptp(total) < 0.01 * np.sum(area * np.abs(now) ** power)
    assert np.abs(change).max() > 0.3


def test_clicks_follow_their_probabilities() -> None:
    module = EXAMPLES.module("dlrm")
    model = module.Clicks.make(dataclasses.replace(module.SMALL, largest=300), 1)
    numbers, categories, clicks, probability = model.draw(40_000, (5,))
    rows = module.table_rows(dataclasses.replace(module.SMALL, largest=300))
    assert (categories >= 0).all() and (categories < rows).all()
    assert set(np.unique(clicks)) == {0, 1}
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        chosen = (probability >= low) & (probability < high)
        assert clicks[chosen].mean() == pytest.approx(probability[chosen].mean(), abs=0.02)
    assert np.mean(categories[:, -1] == 0) == pytest.approx(math.log(2) / math.log(301), abs=0.02)  # Zipf's law
    assert numbers.std() == pytest.approx(1, abs=0.02)


def test_area_under_the_curve() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    clicks = (rng.random(501) < 0.3).astype(np.float32)
    score = np.round(clicks + 2 * rng.standard_normal(501), 1)  # with ties
    assert EXAMPLES.module("dlrm").area_under_curve(score, clicks) == pytest.approx(metrics.roc_auc_score(clicks, score))


def test_graph_has_communities_and_super_nodes() -> None:
    EXAMPLES.module("gat")
    graph = example("_graphs").community_graph(3_000, 30_000, 5, 16, 2)
    edges = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert len(edges) == len(graph.senders) <= 30_000
    assert edges == {(b, a) for a, b in edges} and {(n, n) for n in range(3_000)} <= edges
    degrees = np.bincount(graph.receivers)
    assert degrees.max() > 20 * degrees.mean()
    others = graph.senders != graph.receivers
    within = graph.labels[graph.senders[others]] == graph.labels[graph.receivers[others]]
    assert 0.6 < within.mean() < 0.9
    assert 0.2 < graph.known.mean() < 0.4
