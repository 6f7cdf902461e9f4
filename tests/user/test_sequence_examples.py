"""The examples with attention and with loops over time run as a user runs them, in small; and they compute what they say.

Forced: at sizes that suit a test no pipeline would pay, and the tests want them to run.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks.graphs.apps import example
from tests.support.applications import Examples

TINY: dict[str, dict[str, Any]] = {
    "cartpole": {"carts": 16, "steps": 16, "width": 8, "batches": 2},
    "pendulum": {"pendulums": 16, "steps": 10, "width": 8},
    "llama": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head": 16, "hidden": 32, "batch": 4, "context": 64},
    "lstm": {"width": 16, "steps": 16, "batch": 8},
    "kernel_fusion": {"landmarks": 16, "width": 16, "batch": 64},
    "nerf": {"pixels": 8, "rays": 64, "points": 8, "layers": 2, "width": 16, "octaves": 2},
    "neural_ode": {"trajectories": 16, "steps": 4, "width": 8},
}
PICTURES = {
    "cartpole": "learning",
    "pendulum": "learning",
    "llama": "loss",
    "lstm": "loss",
    "kernel_fusion": "accuracy",
    "nerf": "view",
    "neural_ode": "motion",
}
NEEDS = {"neural_ode": ("diffrax",), "kernel_fusion": ("sklearn",)}
EXAMPLES = Examples(TINY, PICTURES, 6, NEEDS)
SLOW = ("cartpole", "kernel_fusion", "llama", "nerf", "neural_ode", "pendulum")
each_example = pytest.mark.parametrize("name", list(TINY))
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


def reached(text: str) -> float:
    """The loss, the cost or the length of an episode at the end."""
    found = re.search(r"\d steps(?: with jax.jit)?: \D*([\d.]+),", text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TINY])
def test_pipelined_and_plain_reach_the_same(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    # One action that a rounding changes changes all that follows in a simulation.
    EXAMPLES.check_same(name, tmp_path, monkeypatch, capsys, reached, 0.2 if name == "cartpole" else 0.02, 0.0)


@pytest.mark.parametrize("name", ["lstm", pytest.param("kernel_fusion", marks=pytest.mark.slow)])
def test_ctrl_c_ends_with_what_was_reached(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    EXAMPLES.check_ctrl_c(name, tmp_path, monkeypatch, capsys)


@each_example
def test_rejects_what_makes_no_sense(name: str, capsys: Any) -> None:
    EXAMPLES.check_arguments(name, capsys)


def test_full_sizes_are_those_of_the_papers() -> None:
    """Kitsune's table of applications, arXiv:2502.18403, and the papers that the examples name."""
    llama = EXAMPLES.module("llama").FULL
    assert (llama.width, llama.heads, llama.kv_heads, llama.head, llama.hidden) == (4096, 32, 8, 128, 14_336)
    for name in ("cartpole", "pendulum"):
        full = EXAMPLES.module(name).FULL
        assert (dataclasses.astuple(full)[:2]) == (65_536, 1_000)
    nerf = EXAMPLES.module("nerf")
    shapes = [w.shape for w, _ in jax.eval_shape(lambda: nerf.initial_params(jax.random.key(0), nerf.FULL))]
    assert shapes == [(63, 256), *[(256, 256)] * 3, (319, 256), *[(256, 256)] * 3, (256, 4)]


# --- what they compute ------------------------------------------------------------------------------------------------------------


def test_llama_writes_from_its_cache_what_it_writes_from_all_tokens() -> None:
    module = EXAMPLES.module("llama")
    network = jax.jit(module.network, static_argnums=2)
    sizes = dataclasses.replace(module.SMALL, layers=2, width=48, heads=4, kv_heads=2, head=12, hidden=40)
    params = module.initial_params(jax.random.key(0), sizes, 31)
    tokens = jax.random.randint(jax.random.key(1), (2, 11), 0, 31)
    whole, _ = network(params, tokens, sizes)
    first, caches = network(params, tokens[:, :4], sizes, 0, module.empty_caches(sizes, 2, 16))
    pieces = [first]
    for i in range(4, 11):
        logits, caches = network(params, tokens[:, i : i + 1], sizes, jnp.int32(i), caches)
        pieces.append(logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), whole, rtol=1e-4, atol=1e-5)
    changed, _ = network(params, tokens.at[:, 7].set(0), sizes)
    np.testing.assert_array_equal(changed[:, :7], whole[:, :7])  # nobody sees what comes later


def test_llama_of_3_8b_is_planned(monkeypatch: Any, capsys: Any) -> None:
    module = EXAMPLES.module("llama")
    monkeypatch.setattr(module, "FULL", dataclasses.replace(module.FULL, context=64, width=256, heads=4, kv_heads=1, head=64))
    assert module.main(["--full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["context", "context, with gradients", "one token"]
    assert all("operators pipelined" in line for line in lines[1:])


def test_text_is_the_reference_of_the_language() -> None:
    EXAMPLES.module("lstm")
    text = example("_text").python_reference()
    assert len(text.train) > 300_000 and len(text.held_out) > 10_000
    assert text.decode(text.encode("The statement")) == "The statement"
    batch = text.batch(3, 8, (0, 1))
    assert batch.shape == (3, 9)
    np.testing.assert_array_equal(batch, text.batch(3, 8, (0, 1)))
    assert all(text.decode(row) in text.decode(text.train) for row in batch)


def test_advantages_are_those_of_the_paper() -> None:
    """Sums of discounted errors, arXiv:1506.02438, equations 11 and 16."""
    module = EXAMPLES.module("cartpole")
    rng = np.random.default_rng(0)
    value, reward = rng.standard_normal((2, 9, 4))
    done = rng.random((9, 4)) < 0.2
    last = rng.standard_normal(4)
    rest = jnp.zeros((9, 4))
    found = module.advantages(module.Transition(rest, rest, rest, *map(jnp.asarray, (value, reward, done))), jnp.asarray(last))
    following = np.concatenate([value[1:], last[None]])
    error = reward + module.DISCOUNT * following * ~done - value
    for t in range(9):
        want, weight = np.zeros(4), np.ones(4)
        for later in range(t, 9):
            want += weight * error[later]
            weight = weight * module.DISCOUNT * module.TRACE * ~done[later]
        np.testing.assert_allclose(found[t], want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_cartpole_learns(tmp_path: Path, capsys: Any) -> None:
    module = EXAMPLES.module("cartpole")
    assert module.main(["--steps", "15", "--plain", "--out", str(tmp_path)]) == 0
    assert reached(" ".join(capsys.readouterr().out.split())) > 60  # random pushes: 22


def test_without_gymnax_cartpole_says_what_to_install(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(SystemExit, match="pip install gymnax"):
        EXAMPLES.run("cartpole", tmp_path, monkeypatch, capsys, "--gymnax")


@pytest.mark.slow
def test_cartpole_of_gymnax_is_simulated_unchanged(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("gymnax")
    assert reached(EXAMPLES.run("cartpole", tmp_path, monkeypatch, capsys, "--gymnax", "--force")) > 5
    module = EXAMPLES.module("cartpole")
    begin, step = module.gymnax_cartpole()
    _, state = begin(jax.random.key(0), 9)
    right = jnp.arange(9) % 2 == 0
    own = module.State(state.x, state.x_dot, state.theta, state.theta_dot, jnp.zeros(9, jnp.int32))
    observation, _, reward, done = step(jax.random.key(1), state, right)
    np.testing.assert_allclose(observation, module.observe(module.physics(own, right)), rtol=1e-5, atol=1e-6)
    assert (reward == 1).all() and not done.any()


def test_the_gradient_through_the_pendulum_fades() -> None:
    module = EXAMPLES.module("pendulum")
    state = module.State(jnp.array([0.3, 2.0]), jnp.array([0.1, -0.5]))
    np.testing.assert_array_equal(module.fading(state).angle, state.angle)
    slope = jax.grad(lambda angle: module.fading(module.State(angle, state.speed)).angle.sum())(state.angle)
    np.testing.assert_allclose(slope, module.KEPT, rtol=1e-6)


def test_rays_through_nothing_are_white_and_through_a_ball_are_of_its_colour() -> None:
    module = EXAMPLES.module("nerf")
    centre, _, colour = module.BALLS[0]
    origins = jnp.array([[0.0, 3.0, 0.05], [0.0, 3.0, 3.0]])
    directions = jnp.array([[0.0, -1.0, 0.0], [0.0, -1.0, 0.0]])
    found = module.render(module.scene, origins, directions, module.even_depths(2, 256))
    np.testing.assert_allclose(found[1], 1, atol=1e-3)
    np.testing.assert_allclose(found[0], colour, atol=0.05)
    assert centre == (0.0, 0.0, 0.05)


@pytest.mark.parametrize("rows", [1, 37])
def test_a_rendered_pixel_and_its_gradient_stream(rows: int) -> None:
    module = EXAMPLES.module("nerf")
    sizes = dataclasses.replace(module.SMALL, **TINY["nerf"])
    params = module.initial_params(jax.random.key(0), sizes)
    rng = np.random.default_rng(rows)
    directions = rng.standard_normal((rows, 3)).astype(np.float32)
    arguments = (3 * directions, -directions, module.even_depths(rows, 7))

    def loss(params: Any, transform: Any) -> Any:
        return jnp.sum(transform(lambda p: module.network(p, *arguments, sizes))(params) ** 2)

    plain, pipelined = (
        jax.jit(jax.value_and_grad(lambda p, t=t: loss(p, t)))(params) for t in (lambda f: f, lambda f: kj.pipeline(f, force=True))
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(pipelined), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(a).max()) + 1e-6)


def test_nystroem_embeddings_multiply_to_the_kernel() -> None:
    module = EXAMPLES.module("kernel_fusion")
    images = module.split_digits(0)[0][:40]
    sizes = dataclasses.replace(module.SMALL, landmarks=40)
    for (kind, scale), (landmarks, root) in zip(module.KERNELS, module.nystroem(images, sizes, 0), strict=True):
        of_landmarks = np.asarray(module.similarity(kind, scale, images, landmarks), np.float64)
        embedded = of_landmarks @ root
        want = np.asarray(module.similarity(kind, scale, images, images))
        np.testing.assert_allclose(embedded @ embedded.T, want, atol=0.05)  # all images are landmarks
        np.testing.assert_allclose(np.diag(want), 1, atol=0.01)


def test_the_measured_pendulum_loses_energy() -> None:
    module = EXAMPLES.module("neural_ode")
    states = module.measure(5, 40, 0.0, 0).astype(np.float64)
    energy = states[..., 1] ** 2 / 2 - module.GRAVITY * np.cos(states[..., 0])
    assert (np.diff(energy, axis=1) < 1e-4).all() and (energy[:, -1] < energy[:, 0] - 0.01).all()
