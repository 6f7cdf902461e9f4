"""Learn to swing a pendulum up by gradients through the simulator, policy and physics as spatial pipelines.

    python examples/pendulum.py             # about half a minute on two cores; Ctrl-C ends with what was reached
    python examples/pendulum.py --plain     # the same steps with jax.jit
    python examples/pendulum.py --full      # no learning: speed of simulating 65 536 pendulums for 1 000 steps

The simulator is Pendulum-v1 of OpenAI's gym: steps of 50 ms, a torque of at most 2, too weak to lift the pendulum at once, and a
cost of the angle from upright, of the speed and of the torque. The physics are differentiable, so the mean cost of many pendulums
over some seconds has a gradient by the policy's weights, through the ``lax.scan`` over the steps (analytic policy gradients, as in
Brax: Freeman et al. 2021, arXiv:2106.13281). It fades by 7 % in each step, because a swinging pendulum is chaotic. ``--full`` has
the sizes of a study of how fast GPUs collect data (arXiv:2207.07736), with torques that are given and that the policy chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import kitsune_jax as kj

Params = list[tuple[jax.Array, jax.Array]]
GRAVITY, LARGEST_SPEED, LARGEST_TORQUE, SECONDS = 10.0, 8.0, 2.0, 0.05  # mass and length are 1
KEPT = 0.93  # of the gradient, from each step to the one before it
OBSERVED = 3  # numbers in an observation: cosine and sine of the angle, speed


class State(NamedTuple):
    """Of ``pendulums``: angle from upright in radians and its speed, each [pendulums]."""

    angle: jax.Array
    speed: jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    pendulums: int
    steps: int
    width: int = 64  # of the two layers of the policy


SMALL = Sizes(pendulums=512, steps=100)
FULL = Sizes(pendulums=65_536, steps=1_000)
SHOWN = 200  # steps in the picture: an episode of the gym


def physics(state: State, torque: jax.Array) -> tuple[State, jax.Array]:
    """The pendulums 50 ms later, and what the step costs."""
    torque = jnp.clip(torque, -LARGEST_TORQUE, LARGEST_TORQUE)
    wrapped = jnp.mod(state.angle + jnp.pi, 2 * jnp.pi) - jnp.pi
    cost = wrapped**2 + 0.1 * state.speed**2 + 0.001 * torque**2
    speed = state.speed + SECONDS * (1.5 * GRAVITY * jnp.sin(state.angle) + 3 * torque)
    speed = jnp.clip(speed, -LARGEST_SPEED, LARGEST_SPEED)
    return State(state.angle + SECONDS * speed, speed), cost


def start(key: jax.Array, pendulums: int) -> State:
    """Any angle, and a small speed."""
    angle, speed = jax.random.uniform(key, (2, pendulums), minval=-1.0)
    return State(jnp.pi * angle, speed)


def observe(state: State) -> jax.Array:
    """[pendulums, 3]."""
    return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.speed], axis=-1)


def initial_params(key: jax.Array, sizes: Sizes) -> Params:
    widths = (OBSERVED, sizes.width, sizes.width, 1)
    keys = jax.random.split(key, 3)
    shapes = zip(keys, widths, widths[1:], strict=False)
    return [(jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n)) for k, m, n in shapes]


def policy(params: Params, observation: jax.Array) -> jax.Array:
    """The torque of each pendulum."""
    *hidden, (w, b) = params
    x = observation / jnp.array([1, 1, LARGEST_SPEED], observation.dtype)
    for w_hidden, b_hidden in hidden:
        x = jnp.tanh(x @ w_hidden + b_hidden)
    return LARGEST_TORQUE * jnp.tanh((x @ w + b)[..., 0])


def simulate(torques: jax.Array, state: State) -> jax.Array:
    """The cost of each pendulum [pendulums] under given ``torques`` [steps, pendulums]."""

    def one(carry: tuple[State, jax.Array], torque: jax.Array) -> tuple[Any, None]:
        state, cost = physics(carry[0], torque)
        return (state, carry[1] + cost), None

    (_, cost), _ = jax.lax.scan(one, (state, jnp.zeros_like(state.angle)), torques)
    return cost / len(torques)


def fading(state: State) -> State:
    """``state``, which hands on ``KEPT`` of its gradient."""
    return State(*(a + (1 - KEPT) * (jax.lax.stop_gradient(a) - a) for a in state))


def roll_out(params: Params, state: State, steps: int) -> tuple[jax.Array, jax.Array]:
    """Mean cost of a step of each pendulum [pendulums] under the policy, and their angles [steps, pendulums]."""

    def one(carry: tuple[State, jax.Array], _: None) -> tuple[Any, jax.Array]:
        before = fading(carry[0])
        state, cost = physics(before, policy(params, observe(before)))
        return (state, carry[1] + cost), state.angle

    (_, cost), angles = jax.lax.scan(one, (state, jnp.zeros_like(state.angle)), length=steps)
    return cost / steps, angles


def draw(path: Path, costs: Sequence[Any], before: np.ndarray, after: np.ndarray) -> None:
    """The learning curve, and the angles of some pendulums before and after learning: [steps, pendulums]."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.add_subplot(1, 3, 1, xlabel="update", ylabel="mean cost of a step", title="learning")
    axes.plot(np.arange(1, len(costs) + 1), np.asarray(costs, np.float64))
    for i, (name, angles) in enumerate({"before": before, "after": after}.items()):
        axes = figure.add_subplot(
            1, 3, 2 + i, xlabel="seconds", ylabel="cosine of the angle", title=f"{name} learning (1 is upright)"
        )
        axes.plot(SECONDS * np.arange(len(angles)), np.cos(angles[:, :12]), linewidth=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def compare_speed(sizes: Sizes, params: Params, force: bool | None, repeats: int = 3) -> str:
    """Simulated steps per second, with ``jax.jit`` and pipelined, in turns."""
    state = start(jax.random.key(1), sizes.pendulums)
    torques = jax.random.uniform(jax.random.key(2), (sizes.steps, sizes.pendulums), minval=-2.0, maxval=2.0)

    def with_policy(params: Params, state: State) -> jax.Array:
        return roll_out(params, state, sizes.steps)[0]

    kinds: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "torques given": (simulate, (torques, state)),
        "policy": (with_policy, (params, state)),
    }
    return "\n".join(
        f"{name}: {training.rates(f, a, sizes.pendulums * sizes.steps, force, repeats)}" for name, (f, a) in kinds.items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/pendulum", steps=300), argv)
    sizes = FULL if args.full else SMALL
    params = initial_params(jax.random.key(args.seed), sizes)
    if args.full:
        print(f"{sizes.pendulums} pendulums, {sizes.steps} steps ...", flush=True)
        print(compare_speed(sizes, params, args.force or None))
        return 0

    schedule = optax.cosine_decay_schedule(5e-3, args.steps, alpha=0.05)
    optimiser = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(schedule))

    def loss_fn(params: Params, state: State) -> jax.Array:
        return jnp.mean(roll_out(params, state, sizes.steps)[0])

    def train_step(params: Params, state: Any, begin: State) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, begin)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    keys = jax.random.split(jax.random.key(args.seed + 1), args.steps + 1)
    shown = start(keys[-1], 256)
    watched = jax.jit(training.transformed(lambda params: roll_out(params, shown, SHOWN), args))
    _, before = watched(params)
    step = training.compiled(train_step, args)
    state = optimiser.init(params)
    report = training.outcome(
        kj.explain(train_step, force=args.force or None)(params, state, start(keys[0], sizes.pendulums)), args.plain
    )
    losses: list[Any] = []
    for i in training.steps(losses, args.steps, quantity="cost"):
        params, state, loss = step(params, state, start(keys[i], sizes.pendulums))
        losses.append(loss)
    _, after = watched(params)
    draw(args.out / "learning.png", losses, np.asarray(before), np.asarray(after))
    upright = float(np.mean(np.cos(after[-1]) > 0.95))
    print(training.application_ending(losses, args, f"{upright:.0%} of the pendulums are upright after 10 seconds", "cost"))
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
