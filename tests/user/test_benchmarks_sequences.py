"""The applications with attention or loops: their functions against NumPy in float64, and their records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from benchmarks import store, table
from benchmarks.__main__ import main
from benchmarks.graphs import offchip
from benchmarks.graphs.apps import GraphCase, case_of, example
from benchmarks.graphs.measure import max_relative_error
from benchmarks.sequences.apps import PLANNED_APPS, SEQUENCE_APPS, llama_sizes
from tests.support import checks
from tests.support.draws import drawn_by_numpy

ROWS = 13
WIDE = {"lstm_256", "gru_256", "lstm_64", "gru_64"}  # the same functions as of 16, for longer


def small_case(name: str, rows: int = ROWS) -> GraphCase:
    for needed in ("matplotlib", "optax", "rich"):
        pytest.importorskip(needed)
    with drawn_by_numpy():
        return case_of(SEQUENCE_APPS[name], "f32", rows)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int | None = 0) -> np.ndarray:
    """[queries, heads, head] of as many heads of keys as of queries; the first query is at position ``first``, None sees all."""
    out = np.zeros_like(q)
    for i in range(len(q)):
        seen = len(k) if first is None else first + i + 1
        for h in range(q.shape[1]):
            out[i, h] = softmax(k[:seen, h] @ q[i, h] / np.sqrt(q.shape[-1])) @ v[:seen, h]
    return out


def turned(x: np.ndarray, first: int, theta: float) -> np.ndarray:
    """Rotary embeddings as products of complex numbers."""
    half = x.shape[-1] // 2
    angle = (first + np.arange(len(x)))[:, None] * theta ** (-np.arange(half, dtype=np.float32).astype(float) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def llama(p: Any, x: np.ndarray, keys: Any = None, values: Any = None, position: Any = 0) -> np.ndarray:
    sizes = llama_sizes(512, x.shape[1])
    first = int(position)

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain

    (x,) = x
    h = norm(x, p["attention_norm"])
    q, k, v = ((h @ p[name]).reshape(len(x), -1, sizes.head) for name in ("query", "key", "value"))
    q, k = turned(q, first, sizes.theta), turned(k, first, sizes.theta)
    if keys is not None:
        k, v = np.concatenate([keys[0, :first], k]), np.concatenate([values[0, :first], v])
    shared = sizes.heads // sizes.kv_heads
    x = x + attend(q, k.repeat(shared, 1), v.repeat(shared, 1), first).reshape(len(x), -1) @ p["out"]
    h = norm(x, p["feed_forward_norm"])
    gate = h @ p["gate"]
    return (x + (gate * sigmoid(gate) * (h @ p["up"])) @ p["down"])[None]


def cartpole(_: Any, state: Any, pushes: np.ndarray) -> np.ndarray:
    """As in OpenAI's gym, with SciPy's solution of the two equations of motion instead of the formula."""
    first = np.stack(state[:4])
    x, count, age = first.copy(), np.zeros(first.shape[1]), np.zeros(first.shape[1])
    total, moment = 1.1, 0.1 * 0.5
    for push in pushes:
        cos, sin = np.cos(x[2]), np.sin(x[2])
        force = np.where(push, 10.0, -10.0)
        # total * linear + moment * cos * angular = force + moment * turn^2 * sin; linear * cos + 2/3 * angular = 9.8 * sin
        matrix = np.stack([np.stack([np.full_like(cos, total), moment * cos]), np.stack([cos, np.full_like(cos, 2 / 3)])])
        right = np.stack([force + moment * x[3] ** 2 * sin, 9.8 * sin])
        linear, angular = np.linalg.solve(matrix.transpose(2, 0, 1), right.T[..., None])[..., 0].T
        x = x + 0.02 * np.stack([x[1], linear, x[3], angular])
        age += 1
        done = (abs(x[0]) > 2.4) | (abs(x[2]) > np.radians(12)) | (age >= 500)
        x, age, count = np.where(done, first, x), np.where(done, 0, age), count + done
    return count


def pendulum(torques: np.ndarray, state: Any) -> np.ndarray:
    angle, speed = state
    cost = np.zeros_like(angle)
    for torque in torques:
        cost = cost + np.angle(np.exp(1j * angle)) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = np.clip(speed + 0.05 * (15 * np.sin(angle) + 3 * torque), -8, 8)
        angle = angle + 0.05 * speed
    return cost / len(torques)


def pendulum_policy(layers: Any, state: Any) -> np.ndarray:
    angle, speed = state
    torques = []
    for _ in range(100):
        x = np.stack([np.cos(angle), np.sin(angle), speed / 8], -1)
        for w, b in layers[:-1]:
            x = np.tanh(x @ w + b)
        torques.append(2 * np.tanh(x @ layers[-1][0] + layers[-1][1])[:, 0])
        speed = np.clip(speed + 0.05 * (15 * np.sin(angle) + 3 * torques[-1]), -8, 8)
        angle = angle + 0.05 * speed
    return pendulum(np.stack(torques), state)


def lstm(p: Any, xs: np.ndarray) -> np.ndarray:
    width = len(p["u"])
    c = h = np.zeros((xs.shape[1], width))
    out = []
    for x in xs:
        i, f, g, o = ((x @ p["w"] + h @ p["u"] + p["b"]).reshape(-1, 4, width)[:, n] for n in range(4))
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.stack(out)


def gru(p: Any, xs: np.ndarray) -> np.ndarray:
    width = len(p["u"])
    h = np.zeros((xs.shape[1], width))
    out = []
    for x in xs:
        of_x, of_h = ((a @ p[n] + b).reshape(-1, 3, width) for a, n, b in ((x, "w", p["b"]), (h, "u", 0)))
        r, z = sigmoid(of_x[:, 0] + of_h[:, 0]), sigmoid(of_x[:, 1] + of_h[:, 1])
        h = (1 - z) * np.tanh(of_x[:, 2] + r * of_h[:, 2]) + z * h
        out.append(h)
    return np.stack(out)


REFERENCES: dict[str, Callable[..., np.ndarray]] = {
    "attention": lambda p: attend(p["q"], p["k"], p["v"]),
    "attention_full": lambda p: attend(p["q"], p["k"], p["v"], None),
    "transformer_layer": llama,
    "llama_token": llama,
    "cartpole": cartpole,
    "pendulum": pendulum,
    "pendulum_policy": pendulum_policy,
    "lstm_16": lstm,
    "gru_16": gru,
}


@pytest.mark.parametrize("name", list(REFERENCES))
def test_function_is_the_reference(name: str) -> None:
    case = small_case(name)
    wide: Any = jax.tree.map(
        lambda a: np.asarray(a).astype(np.float64 if a.dtype == jnp.float32 else a.dtype), (case.params, case.inputs)
    )
    want = REFERENCES[name](wide[0], *wide[1])
    exact = checks.in_float64(case.function, case.params, *case.inputs)
    assert exact.shape == want.shape
    # The frequencies of rotary embeddings are of float32 in the function.
    np.testing.assert_allclose(exact, want, rtol=1e-5 if want.ndim == 3 and "l" in name else 1e-9, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [n for n in SEQUENCE_APPS if SEQUENCE_APPS[n].by_hand])
@pytest.mark.parametrize("rows", [1, 13, 512, 700])
def test_by_hand_is_the_same_function(name: str, rows: int) -> None:
    case = small_case(name, rows)
    by_hand: Any = case.app.by_hand
    found, want = (jax.jit(f)(case.params, *case.inputs) for f in (by_hand, case.function))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_every_app_is_tested() -> None:
    drawn = {"cartpole_random", "cartpole_policy"}  # of random bits, which NumPy has not: see the next test
    assert set(SEQUENCE_APPS) - WIDE - drawn == set(REFERENCES)
    assert tuple(SEQUENCE_APPS) == store.SEQUENCE_APP_NAMES
    assert not set(store.SEQUENCE_APP_NAMES) & {*store.GRAPH_APP_NAMES, *store.ROW_APP_NAMES}
    assert {"llama_8b", "llama_8b_token"} == set(PLANNED_APPS) <= set(offchip.PAPER)


def test_policy_and_drawn_pushes_move_the_carts_as_given_ones_do() -> None:
    module = example("cartpole")
    case = small_case("cartpole_policy", 50)
    state, key = case.inputs
    found = np.asarray(case.function(case.params, state, key))
    assert found.shape == (100, 50, 7)
    after, done = found[1:, :, :4], found[:-1, :, 6] > 0
    now = module.State(*found[:-1, :, :4].transpose(2, 0, 1), np.zeros_like(done, np.int32))
    ways = [np.stack(module.physics(now, np.full(done.shape, right))[:4], -1) for right in (True, False)]
    close = [np.isclose(way, after, rtol=1e-4, atol=1e-5).all(-1) for way in ways]
    assert (close[0] ^ close[1])[~done].all()  # every cart was pushed one way or the other
    assert (np.abs(after[done]) <= 0.05).all() and done.any()
    assert 0.3 < close[0][~done].mean() < 0.7
    counts = np.asarray(small_case("cartpole_random", 500).function({}, *small_case("cartpole_random", 500).inputs))
    assert 3 < counts.mean() < 6  # a pole falls after some 22 random pushes


@pytest.mark.parametrize(("name", "mode"), [("attention", "infer"), ("lstm_16", "train"), ("cartpole", "infer")])
def test_run_store_and_table(name: str, mode: str, tmp_path: Path) -> None:
    case = small_case(name)
    run = ["run", "--app", name, "--mode", mode, "--dtype", "f32", "--rows", "17", "--rounds", "2", "--seconds", "1"]
    assert main([*run, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    (record,) = json.loads(path.read_text())["cases"]
    assert record["unit"] == case.app.unit
    if mode == "infer":
        assert set(record["columns"]) == {"jit", "pipeline"} | ({"blocked"} if case.app.by_hand else set())
        assert max(c["max_rel_error"] for c in record["columns"].values()) < 1e-4
    else:
        assert max(c["errors"]["mean"] for c in record["columns"].values()) < 1e-4
    assert case.app.title in table.markdown(store.newest(tmp_path), mode)


def test_error_of_a_wrong_function_is_seen() -> None:
    case = small_case("lstm_16")
    want = checks.in_float64(case.function, case.params, *case.inputs)
    assert max_relative_error(jnp.asarray(want) * 1.01, want) > 5e-3


def test_rows_of_the_papers_table() -> None:
    for name, modes in (("lstm_16", 2), ("cartpole", 1)):
        small_case(name)
        lines = offchip.markdown([name]).splitlines()
        assert len(lines) == 4 + modes
        assert {line.count("|") for line in lines[2:]} == {8}
