"""The applications over graphs and tables: their functions against NumPy in float64, their losses, their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from benchmarks import segments, store, table
from benchmarks.__main__ import main
from benchmarks.graphs import offchip
from benchmarks.graphs.apps import GRAPH_APPS, GraphCase, case_of, click_error, label_error, squared_error
from benchmarks.graphs.libraries import LIBRARY_APPS, NEEDS
from benchmarks.graphs.measure import in_float64, loss_and_grads, max_relative_error
from tests.support import checks
from tests.support.draws import drawn_by_numpy

SMALL = {"meshgraphnets": 150, "graphcast": 300, "graphcast_processor": 300, "dlrm": 23, "gat": 200, "graph_transformer": 200}


def small_case(name: str) -> GraphCase:
    for needed in ("matplotlib", "optax", "rich"):
        pytest.importorskip(needed)
    with drawn_by_numpy():
        return case_of(GRAPH_APPS[name], "f32", SMALL[name])


def normalised(p: Any, x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["offset"]


def summed(values: np.ndarray, ids: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros((n, *values.shape[1:]))
    np.add.at(out, ids, values)
    return out


def mesh_mlp(p: Any, x: np.ndarray, normalise: bool = True) -> np.ndarray:
    for w, b in zip(p["w"][:-1], p["b"][:-1], strict=True):
        x = np.maximum(x @ w + b, 0)
    x = x @ p["w"][-1] + p["b"][-1]
    return normalised(p, x) if normalise else x


def meshgraphnets(p: Any, nodes: np.ndarray, edges: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    slopes = 5 * (nodes[senders, :1] - nodes[receivers, :1])
    h, e = mesh_mlp(p["encode_nodes"], nodes), mesh_mlp(p["encode_edges"], np.concatenate([edges, slopes], 1))
    for step in p["steps"]:
        messages = mesh_mlp(step["edges"], np.concatenate([e, h[senders], h[receivers]], 1))
        h = h + mesh_mlp(step["nodes"], np.concatenate([h, summed(messages, receivers, len(h))], 1))
        e = e + messages
    return mesh_mlp(p["decode"], h, normalise=False)


def swish_mlp(p: Any, x: np.ndarray, normalise: bool = True) -> np.ndarray:
    x = x @ p["w0"] + p["b0"]
    x = x / (1 + np.exp(-x)) @ p["w1"] + p["b1"]
    return normalised(p, x) if normalise else x


def step(p: Any, part: Any, e: np.ndarray, s: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    messages = swish_mlp(p["edges"], np.concatenate([e, s[part["senders"]], r[part["receivers"]]], 1))
    return messages, swish_mlp(p["nodes"], np.concatenate([r, summed(messages, part["receivers"], len(r))], 1))


def graphcast_processor(layers: Any, part: Any, e: np.ndarray, mesh: np.ndarray) -> np.ndarray:
    for p in layers:
        more_e, more = step(p, part, e, mesh, mesh)
        e, mesh = e + more_e, mesh + more
    return mesh


def graphcast(p: Any, graph: Any, fields: np.ndarray) -> np.ndarray:
    embed = p["embed"]
    grid = swish_mlp(embed["grid"], np.concatenate([fields, graph["grid_position"]], 1))
    mesh = swish_mlp(embed["mesh_nodes"], graph["mesh_position"])
    e = {k: swish_mlp(embed[k], graph[k]["edges"]) for k in ("to_mesh", "mesh", "to_grid")}
    mesh = mesh + step(p["to_mesh"], graph["to_mesh"], e["to_mesh"], grid, mesh)[1]
    grid = grid + swish_mlp(p["to_mesh"]["grid"], grid)
    mesh = graphcast_processor(p["layers"], graph["mesh"], e["mesh"], mesh)
    grid = grid + step(p["to_grid"], graph["to_grid"], e["to_grid"], mesh, grid)[1]
    return swish_mlp(p["out"], grid, normalise=False)


def dlrm(p: Any, numbers: np.ndarray, categories: np.ndarray) -> np.ndarray:
    x = numbers
    for w, b in p["bottom"]:
        x = np.maximum(x @ w + b, 0)
    vectors = [x, *(t[categories[:, i]] for i, t in enumerate(p["tables"]))]
    pairs = [np.sum(vectors[i] * vectors[j], 1) for i in range(27) for j in range(i)]
    x = np.concatenate([x, np.stack(pairs, 1)], 1)
    for i, (w, b) in enumerate(p["top"]):
        x = x @ w + b
        x = np.maximum(x, 0) if i + 1 < len(p["top"]) else x
    return x[:, 0]


def neighbours_softmax(scores: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    out = np.zeros_like(scores)
    for r in np.unique(receivers):
        out[receivers == r] = softmax(scores[receivers == r], axis=0)
    return out


def gat(layers: Any, x: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    for i, p in enumerate(layers):
        h = (x @ p["w"]).reshape(len(x), len(p["sender"]), -1)
        scores = np.sum(h * p["sender"], -1)[senders] + np.sum(h * p["receiver"], -1)[receivers]
        weights = neighbours_softmax(np.where(scores > 0, scores, 0.2 * scores), receivers)
        x = summed(weights[..., None] * h[senders], receivers, len(x)).reshape(len(x), -1) + p["b"]
        x = np.where(x > 0, x, np.expm1(np.minimum(x, 0))) if i + 1 < len(layers) else x
    return x


def graph_transformer(p: Any, x: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    def linear(q: Any, x: np.ndarray) -> np.ndarray:
        return x @ q["w"] + q["b"]

    x = linear(p["encode"], x)
    for layer in p["layers"]:
        q, k, v = np.split(linear(layer["qkv"], x).reshape(len(x), 8, -1), 3, axis=-1)
        weights = neighbours_softmax(np.sum(q[receivers] * k[senders], -1) / np.sqrt(q.shape[-1]), receivers)
        received = summed(weights[..., None] * v[senders], receivers, len(x)).reshape(len(x), -1)
        x = normalised(layer["attention_norm"], x + linear(layer["out"], received))
        x = normalised(layer["feed_forward_norm"], x + linear(layer["down"], np.maximum(linear(layer["up"], x), 0)))
    return linear(p["decode"], x)


REFERENCES = {f.__name__: f for f in (meshgraphnets, graphcast, graphcast_processor, dlrm, gat, graph_transformer)}


def wide(arrays: Any) -> Any:
    """With float64 in place of float32."""
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float64 if a.dtype == jnp.float32 else a.dtype), arrays)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("graphcast", "meshgraphnets") else ()) for n in GRAPH_APPS]
)
def test_function_is_the_reference(name: str) -> None:
    case = small_case(name)
    want = REFERENCES[name](wide(case.params), *wide(case.inputs))
    exact = checks.in_float64(case.function, case.params, *case.inputs)
    assert exact.dtype == np.float64 and exact.shape == want.shape
    np.testing.assert_allclose(exact, want, rtol=1e-9, atol=1e-9 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPH_APPS)
def test_function_stays_near_the_reference_in_float32(name: str) -> None:
    case = small_case(name)
    want = REFERENCES[name](wide(case.params), *wide(case.inputs))
    assert max_relative_error(jax.jit(case.function)(case.params, *case.inputs), want) < 1e-4


def test_losses() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((7, 4)), rng.integers(4, size=7)
    clicks = rng.integers(2, size=7).astype(float)
    probability = 1 / (1 + np.exp(-logits[:, 0]))
    want = -np.mean(clicks * np.log(probability) + (1 - clicks) * np.log(1 - probability))
    assert float(click_error(jnp.asarray(logits[:, 0]), jnp.asarray(clicks))) == pytest.approx(want, rel=1e-5)
    want = -np.mean(log_softmax(logits, axis=1)[np.arange(7), labels])
    assert float(label_error(jnp.asarray(logits), jnp.asarray(labels))) == pytest.approx(want, rel=1e-5)
    assert float(squared_error(jnp.asarray(logits), jnp.zeros((7, 4)))) == pytest.approx(np.mean(logits**2), rel=1e-5)


@pytest.mark.slow
def test_gradients_in_float64_are_finite_differences() -> None:
    case = small_case("dlrm")
    loss, grads = in_float64(loss_and_grads(case, case.function), case)
    direction = jax.tree.map(lambda g: np.random.default_rng(g.size).standard_normal(g.shape), grads)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), grads, direction)))

    def moved(by: float) -> float:
        def compute(params: Any, inputs: Any, y: Any) -> Any:
            return loss_and_grads(case, case.function)(jax.tree.map(lambda p, d: p + by * d, params, direction), inputs, y)[0]

        return float(in_float64(compute, case))

    assert (moved(1e-8) - moved(-1e-8)) / 2e-8 == pytest.approx(slope, rel=1e-3)  # few sums of a ReLU turn in so short a step
    assert moved(0.0) == pytest.approx(float(loss), rel=1e-12)


def test_names_of_library_models_agree() -> None:
    assert tuple(LIBRARY_APPS) == tuple(NEEDS)
    assert set(LIBRARY_APPS) <= set(store.LIBRARY_APP_NAMES)
    assert not set(store.ROW_APP_NAMES) & set(store.GRAPH_APP_NAMES)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_run_store_and_table(mode: str, tmp_path: Path) -> None:
    small_case("gat")
    run = ["run", "--app", "gat", "--mode", mode, "--dtype", "f32", "--rows", "300", "--rounds", "2", "--seconds", "1"]
    assert main([*run, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    (record,) = json.loads(path.read_text())["cases"]
    assert record["unit"] == "edges"
    if mode == "infer":
        assert set(record["columns"]) == {"jit", "pipeline"}
        assert max(c["max_rel_error"] for c in record["columns"].values()) < 1e-4
    else:
        assert set(record["columns"]) == {"jit", "network", "whole"}
        assert max(c["errors"]["mean"] for c in record["columns"].values()) < 1e-4
        assert set(record["explain"]) == {"network", "whole", "gradient"}
    shown = table.markdown(store.newest(tmp_path), mode)
    assert "graph attention network, 8 heads of 8, 300 edges, float32" in shown
    assert "not measured" in shown


@pytest.mark.parametrize("distribution", segments.DISTRIBUTIONS)
@pytest.mark.parametrize("reduction", list(segments.REDUCTIONS))
def test_segment_reductions_alone(reduction: str, distribution: str) -> None:
    sizes: dict[str, Any] = {"rows": 997, "width": 5, "segments": 131, "dtype": "f32", "rounds": 3, "seconds": 1.0}
    record = segments.measure(reduction, distribution, False, **sizes)
    assert max(column["max_rel_error"] for column in record["columns"].values()) < 1e-5
    assert "x | " in segments.markdown([record])
    ids = segments.segment_ids(distribution, 5000, 50, np.random.default_rng(0))
    assert ids.min() >= 0 and ids.max() < 50
    assert (np.bincount(ids).max() > 2000) == (distribution == "skewed")


def test_error_of_a_segment_reduction_sees_what_is_wrong() -> None:
    x, ids = np.arange(12.0).reshape(6, 2), np.array([0, 2, 2, 0, 5, 0])
    want = segments.reference("max", x, ids, 6)
    np.testing.assert_array_equal(want[[0, 2, 5]], x[[5, 2, 4]])
    assert segments.error(want, want) == 0
    assert segments.error(np.where(np.isfinite(want), want, 0), want) == np.inf
    assert segments.error(want + 1, want) > 0.1


def test_row_of_the_papers_table() -> None:
    case = small_case("dlrm")
    cells = offchip.row(case, "infer")
    assert len(cells) == len(offchip.markdown(()).splitlines()[2].split("|")) - 2
    assert cells[4] == "81 / 81"
    assert set(offchip.PAPER) <= set(offchip.TABLED_APPS)
