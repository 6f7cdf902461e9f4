"""Learn a swinging pendulum's motion as a differential equation: diffrax solves it, unchanged, its loss and gradient are pipelined.

    python examples/neural_ode.py             # less than a minute on two cores; Ctrl-C ends with what was reached
    python examples/neural_ode.py --plain     # the same steps with jax.jit
    python examples/neural_ode.py --full      # wider layers and more trajectories

A neural ordinary differential equation (Chen et al. 2018, arXiv:1806.07366) says how fast a state changes by a network. Here the
state is the angle and the speed of a pendulum with friction, of which the network sees noisy measurements only; diffrax
(pip install diffrax) solves the equation from the first of them with Tsitouras' method in steps of fixed length, many trajectories
at once, and differentiates through the solution. How well the equation is learned is told on trajectories three times as long."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _training as training
import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.integrate
from matplotlib.figure import Figure

import kitsune_jax as kj

Layers = list[tuple[jax.Array, jax.Array]]
FRICTION, GRAVITY, NOISE = 0.15, 4.0, 0.02
STEP = 0.1  # seconds, of the solver and between measurements


@dataclasses.dataclass(frozen=True)
class Sizes:
    trajectories: int
    steps: int  # of a trajectory
    width: int


SMALL = Sizes(trajectories=256, steps=20, width=64)
FULL = Sizes(trajectories=4096, steps=20, width=256)
LONGER = 3  # times ``steps``, in the end


def measure(trajectories: int, steps: int, noise: float, seed: int) -> np.ndarray:
    """Angles and speeds [trajectories, steps + 1, 2] of a pendulum, solved by SciPy, from random first states."""
    rng = np.random.default_rng(seed)
    first = rng.uniform(-1, 1, (trajectories, 2)) * (2.0, 1.5)  # too slow to turn over

    def change(_: float, flat: np.ndarray) -> np.ndarray:
        angle, speed = flat.reshape(2, -1)
        return np.concatenate([speed, -GRAVITY * np.sin(angle) - FRICTION * speed])

    times = STEP * np.arange(steps + 1)
    found = scipy.integrate.solve_ivp(change, (0, times[-1]), first.T.ravel(), t_eval=times, rtol=1e-8, atol=1e-8).y
    states = found.reshape(2, trajectories, steps + 1).transpose(1, 2, 0)
    return (states + noise * rng.standard_normal(states.shape)).astype(np.float32)


def initial_params(key: jax.Array, sizes: Sizes) -> Layers:
    widths = (2, sizes.width, sizes.width, 2)
    shapes = zip(jax.random.split(key, 3), widths, widths[1:], strict=False)
    return [(jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n)) for k, m, n in shapes]


def change(_: Any, state: jax.Array, params: Layers) -> jax.Array:
    """How fast a state [2] changes."""
    *hidden, (w, b) = params
    x = state
    for w_hidden, b_hidden in hidden:
        x = jnp.tanh(x @ w_hidden + b_hidden)
    return x @ w + b


def solve(params: Layers, first: jax.Array, steps: int) -> jax.Array:
    """States [trajectories, steps + 1, 2] from ``first`` [trajectories, 2]."""
    times = STEP * jnp.arange(steps + 1)

    def one(state: jax.Array) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(change),
            diffrax.Tsit5(),
            t0=0.0,
            t1=STEP * steps,
            dt0=STEP,
            y0=state,
            args=params,
            saveat=diffrax.SaveAt(ts=times),
            max_steps=steps + 1,  # rounding may leave a last step that is very short
        ).ys

    return jax.vmap(one)(first)


def draw(path: Path, losses: Sequence[Any], truth: np.ndarray, found: np.ndarray, params: Layers) -> None:
    """The loss, some trajectories, and the learned change in the plane of angle and speed."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.add_subplot(1, 3, 1, xlabel="step", ylabel="mean squared error", yscale="log", title="training")
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64))
    axes = figure.add_subplot(1, 3, 2, xlabel="seconds", ylabel="angle", title="pendulum (line), neural ODE (dots)")
    for i in range(min(5, len(truth))):
        axes.plot(STEP * np.arange(truth.shape[1]), truth[i, :, 0], f"C{i}", linewidth=0.8)
        axes.plot(STEP * np.arange(truth.shape[1]), found[i, :, 0], f"C{i}.", markersize=3)
    axes = figure.add_subplot(1, 3, 3, xlabel="angle", ylabel="speed", title="learned change")
    angle, speed = np.meshgrid(np.linspace(-2.5, 2.5, 17), np.linspace(-4, 4, 17))
    flow = np.asarray(change(None, jnp.asarray(np.stack([angle, speed], -1), jnp.float32), params))
    axes.quiver(angle, speed, flow[..., 0], flow[..., 1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/neural_ode", steps=400), argv)
    sizes = FULL if args.full else SMALL
    data = measure(4 * sizes.trajectories, sizes.steps, NOISE, args.seed)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, args.steps, alpha=0.02)))

    def loss_fn(params: Layers, states: jax.Array) -> jax.Array:
        return jnp.mean((solve(params, states[:, 0], sizes.steps) - states) ** 2)

    def train_step(params: Layers, state: Any, states: jax.Array) -> tuple[Layers, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, states)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    def batch(step: int) -> np.ndarray:
        return data[np.random.default_rng((args.seed, step)).integers(len(data), size=sizes.trajectories)]

    params = initial_params(jax.random.key(args.seed), sizes)
    step = training.compiled(train_step, args)
    state = optimiser.init(params)
    report = training.outcome(kj.explain(train_step, force=args.force or None)(params, state, batch(0)), args.plain)
    losses: list[Any] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, batch(i))
        losses.append(loss)

    truth = measure(64, LONGER * sizes.steps, 0.0, args.seed + 1)
    solver = jax.jit(training.transformed(functools.partial(solve, steps=LONGER * sizes.steps), args))
    found = np.asarray(solver(params, truth[:, 0]))
    draw(args.out / "motion.png", losses, truth, found, params)
    error = float(np.sqrt(np.mean((found - truth) ** 2)) / truth.std())
    print(training.application_ending(losses, args, f"error {error:.1%} over {LONGER} times as long as it was trained for"))
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
