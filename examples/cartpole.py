"""Learn to balance a pole on a cart with proximal policy optimisation (PPO), simulation and policy as spatial pipelines.

    python examples/cartpole.py             # some seconds on two cores; Ctrl-C ends with what was reached
    python examples/cartpole.py --plain     # the same steps with jax.jit
    python examples/cartpole.py --gymnax    # in gymnax's CartPole-v1, unchanged (pip install gymnax)
    python examples/cartpole.py --full      # no learning: speed of collecting data from 65 536 carts for 1 000 steps

The simulator is CartPole-v1 (Barto, Sutton and Anderson 1983, with the constants of OpenAI's gym): Euler steps of 20 ms, a push to
the left or to the right in each, an episode that ends when the pole leans 12 degrees, the cart is 2.4 m away or 500 steps are over.
Many carts are simulated at once, in a ``lax.scan`` over the steps. PPO is that of Schulman et al. 2017 (arXiv:1707.06347): data of
128 steps is collected with the policy, then used for some passes of small batches. ``--full`` has the sizes of a study of how fast
GPUs collect data (arXiv:2207.07736), with pushes that are given, that are drawn in each step, and that the policy chooses."""

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

Params = dict[str, Any]
GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL_MASS = CART_MASS + POLE_MASS
LARGEST_POSITION, LARGEST_ANGLE, LONGEST = 2.4, 12 * np.pi / 180, 500
OBSERVED = 4  # numbers in an observation: position, speed, angle, speed of the angle


class State(NamedTuple):
    """Of ``carts`` carts, each field [carts]: metres, radians and seconds; ``steps`` is how old the episode is."""

    position: jax.Array
    speed: jax.Array
    angle: jax.Array
    turn: jax.Array
    steps: jax.Array


class Transition(NamedTuple):
    """What happened in one step of every cart: [carts, 4], and [carts] in the other fields."""

    observation: jax.Array
    action: jax.Array
    log_probability: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``carts`` are simulated for ``steps`` steps; then PPO makes ``epochs`` passes over them, in ``batches`` batches each."""

    carts: int
    steps: int
    width: int = 64  # of the two layers of the policy, and of the value's
    epochs: int = 4
    batches: int = 4


SMALL = Sizes(carts=256, steps=128)
FULL = Sizes(carts=65_536, steps=1_000)
DISCOUNT, TRACE, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


def physics(state: State, right: jax.Array) -> State:
    """The carts 20 ms later, each pushed to the right or to the left."""
    force = jnp.where(right, FORCE, -FORCE)
    cos, sin = jnp.cos(state.angle), jnp.sin(state.angle)
    pull = (force + POLE_MASS * HALF_LENGTH * state.turn**2 * sin) / TOTAL_MASS
    angular = (GRAVITY * sin - cos * pull) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cos**2 / TOTAL_MASS))
    linear = pull - POLE_MASS * HALF_LENGTH * angular * cos / TOTAL_MASS
    return State(
        state.position + SECONDS * state.speed,
        state.speed + SECONDS * linear,
        state.angle + SECONDS * state.turn,
        state.turn + SECONDS * angular,
        state.steps + 1,
    )


def ended(state: State) -> jax.Array:
    """[carts]: whether the episode is over."""
    fallen = (jnp.abs(state.position) > LARGEST_POSITION) | (jnp.abs(state.angle) > LARGEST_ANGLE)
    return fallen | (state.steps >= LONGEST)


def start(key: jax.Array, carts: int, dtype: Any = jnp.float32) -> State:
    """Carts nearly at rest, in the middle."""
    position, speed, angle, turn = jax.random.uniform(key, (4, carts), jnp.float32, -0.05, 0.05).astype(dtype)
    return State(position, speed, angle, turn, jnp.zeros(carts, jnp.int32))


def restarted(done: jax.Array, fresh: State, state: State) -> State:
    return State(*(jnp.where(done, a, b) for a, b in zip(fresh, state, strict=True)))


def observe(state: State) -> jax.Array:
    """[carts, 4]."""
    return jnp.stack(state[:OBSERVED], axis=-1)


def step(key: jax.Array, state: State, right: jax.Array) -> tuple[jax.Array, State, jax.Array, jax.Array]:
    """(observation, state, reward, done) after a push. A cart whose episode is over starts anew."""
    state = physics(state, right)
    done = ended(state)
    state = restarted(done, start(key, len(done), state.angle.dtype), state)
    return observe(state), state, jnp.ones_like(state.angle), done


def simulate(state: State, pushes: jax.Array) -> jax.Array:
    """How many episodes of each cart end ([carts] float32) under given ``pushes`` [steps, carts] of bool; each starts again from
    the cart's own first state."""
    first = state

    def one(carry: tuple[State, jax.Array], right: jax.Array) -> tuple[Any, None]:
        state, count = carry
        state = physics(state, right)
        done = ended(state)
        return (restarted(done, first, state), count + done), None

    (_, count), _ = jax.lax.scan(one, (state, jnp.zeros(state.angle.shape, jnp.float32)), pushes)
    return count


def simulate_random(state: State, key: jax.Array, steps: int) -> jax.Array:
    """``simulate`` with pushes, and states to start from again, that are drawn in each step."""

    def one(carry: tuple[State, jax.Array, jax.Array], _: None) -> tuple[Any, None]:
        state, count, key = carry
        key, of_push, of_start = jax.random.split(key, 3)
        right = jax.random.uniform(of_push, state.angle.shape, jnp.float32) < 0.5
        state, done = step(of_start, state, right)[1::2]
        return (state, count + done, key), None

    (_, count, _), _ = jax.lax.scan(one, (state, jnp.zeros(state.angle.shape, jnp.float32), key), length=steps)
    return count


def initial_params(key: jax.Array, sizes: Sizes) -> Params:
    """Of the policy and of the value, which share nothing."""
    width = sizes.width
    keys = iter(jax.random.split(key, 6))

    def layers(last: float) -> list[tuple[jax.Array, jax.Array]]:
        shapes = ((OBSERVED, width, 2**0.5), (width, width, 2**0.5), (width, 1, last))
        return [(jax.nn.initializers.orthogonal(scale)(next(keys), (m, n)), jnp.zeros(n)) for m, n, scale in shapes]

    return {"policy": layers(0.01), "value": layers(1.0)}


def perceptron(layers: Sequence[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    *hidden, (w, b) = layers
    for w_hidden, b_hidden in hidden:
        x = jnp.tanh(x @ w_hidden + b_hidden)
    return (x @ w + b)[..., 0]


def log_probability(logit: jax.Array, action: jax.Array) -> jax.Array:
    """Of an action that is 1 (a push to the right) with the probability sigmoid(logit)."""
    return jax.nn.log_sigmoid(jnp.where(action, logit, -logit))


Step = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any, jax.Array, jax.Array]]


def collect(
    params: Params, simulator: Any, observation: jax.Array, key: jax.Array, steps: int, step: Step = step
) -> tuple[Any, jax.Array, Transition]:
    """(simulator, observation, transitions [steps, ...]) after ``steps`` steps of the policy in a simulator whose state is
    ``simulator``; ``step`` maps (key, state, action) to (observation, state, reward, done)."""

    def one(carry: tuple[Any, jax.Array, jax.Array], _: None) -> tuple[Any, Transition]:
        simulator, observation, key = carry
        key, of_action, of_step = jax.random.split(key, 3)
        logit, value = perceptron(params["policy"], observation), perceptron(params["value"], observation)
        action = jax.random.uniform(of_action, logit.shape, jnp.float32) < jax.nn.sigmoid(logit)
        after, simulator, reward, done = step(of_step, simulator, action)
        return (simulator, after, key), Transition(observation, action, log_probability(logit, action), value, reward, done)

    (simulator, observation, _), transitions = jax.lax.scan(one, (simulator, observation, key), length=steps)
    return simulator, observation, transitions


def advantages(transitions: Transition, last_value: jax.Array) -> jax.Array:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438): [steps, carts]."""

    def back(carry: tuple[jax.Array, jax.Array], now: Transition) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        advantage, next_value = carry
        goes_on = 1 - now.done.astype(now.value.dtype)
        error = now.reward + DISCOUNT * next_value * goes_on - now.value
        advantage = error + DISCOUNT * TRACE * goes_on * advantage
        return (advantage, now.value), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), transitions, reverse=True)[1]


def loss_fn(params: Params, batch: Transition, advantage: jax.Array, target: jax.Array) -> jax.Array:
    """PPO's clipped objective, the squared error of the value, and a reward for entropy."""
    logit, value = perceptron(params["policy"], batch.observation), perceptron(params["value"], batch.observation)
    ratio = jnp.exp(log_probability(logit, batch.action) - batch.log_probability)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    p = jax.nn.sigmoid(logit)
    entropy = -p * jax.nn.log_sigmoid(logit) - (1 - p) * jax.nn.log_sigmoid(-logit)
    return 0.5 * jnp.mean((value - target) ** 2) - jnp.mean(gain) - ENTROPY * jnp.mean(entropy)


def learn(optimiser: Any, sizes: Sizes, step: Step) -> Callable[..., Any]:
    """One iteration of PPO: a function of (parameters, optimiser's state, simulator, observation, key) that gives the first four
    anew, and how many episodes ended."""

    def update(carry: tuple[Params, Any], batch: Any) -> tuple[tuple[Params, Any], jax.Array]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimiser.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    def iteration(params: Params, state: Any, simulator: Any, observation: jax.Array, key: jax.Array) -> tuple[Any, ...]:
        of_data, of_order = jax.random.split(key)
        simulator, observation, data = collect(params, simulator, observation, of_data, sizes.steps, step)
        advantage = advantages(data, perceptron(params["value"], observation))
        rows = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (data, advantage, advantage + data.value))
        count = advantage.size // sizes.batches
        order = jnp.concatenate([jax.random.permutation(k, advantage.size) for k in jax.random.split(of_order, sizes.epochs)])
        batches = jax.tree.map(lambda a: a[order].reshape(-1, count, *a.shape[1:]), rows)
        (params, state), _ = jax.lax.scan(update, (params, state), batches)
        return params, state, simulator, observation, jnp.sum(data.done)

    return iteration


def gymnax_cartpole() -> tuple[Callable[[jax.Array, int], tuple[jax.Array, Any]], Step]:
    """Gymnax's CartPole-v1 for many carts: what starts it, and its step. Ends the program where gymnax is not installed."""
    try:
        import gymnax
    except ModuleNotFoundError as error:
        raise SystemExit(f"--gymnax simulates with gymnax, which is not here ({error}): pip install gymnax") from None

    environment, constants = gymnax.make("CartPole-v1")

    def begin(key: jax.Array, carts: int) -> tuple[jax.Array, Any]:
        return jax.vmap(environment.reset, (0, None))(jax.random.split(key, carts), constants)

    def step(key: jax.Array, state: Any, right: jax.Array) -> tuple[jax.Array, Any, jax.Array, jax.Array]:
        keys = jax.random.split(key, right.shape[0])
        # Since version 1 gymnax tells an end (terminated) from a time that is over (truncated); before, done is both.
        found = jax.vmap(environment.step, (0, 0, 0, None))(keys, state, right.astype(jnp.int32), constants)
        observation, state, reward, *done, _ = found
        return observation, state, reward, jnp.any(jnp.stack(done), axis=0)

    return begin, step


def own_cartpole() -> tuple[Callable[[jax.Array, int], tuple[jax.Array, Any]], Step]:
    def begin(key: jax.Array, carts: int) -> tuple[jax.Array, Any]:
        state = start(key, carts)
        return observe(state), state

    return begin, step


def watching(begin: Any, step: Step, key: jax.Array) -> Callable[[Params], jax.Array]:
    """The angles [500, 16] of 16 poles in degrees under the policy, as a function of its parameters."""

    def watch(params: Params) -> jax.Array:
        observation, simulator = begin(key, 16)
        return jnp.degrees(collect(params, simulator, observation, key, LONGEST, step)[2].observation[..., 2])

    return watch


def draw(path: Path, lengths: Sequence[float], steps: int, before: np.ndarray, after: np.ndarray) -> None:
    """The learning curve, and the angle of the first poles before and after learning: [time, carts] in degrees."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.add_subplot(1, 3, 1, xlabel="simulated steps", ylabel="steps of an episode", title="learning")
    axes.plot(steps * np.arange(1, len(lengths) + 1), np.asarray(lengths, np.float64))
    axes.axhline(LONGEST, color="k", linestyle=":")
    for i, (name, angles) in enumerate({"before": before, "after": after}.items()):
        axes = figure.add_subplot(1, 3, 2 + i, xlabel="step", ylabel="degrees", title=f"poles {name} learning", ylim=(-13, 13))
        axes.plot(angles[:, :16], linewidth=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def compare_speed(sizes: Sizes, params: Params, force: bool | None, repeats: int = 3) -> str:
    """Simulated steps per second of each way to collect data: with ``jax.jit`` and pipelined, in turns."""
    key = jax.random.key(1)
    state = start(key, sizes.carts)
    pushes = jax.random.bernoulli(key, shape=(sizes.steps, sizes.carts))

    def with_policy(params: Params, state: State, key: jax.Array) -> jax.Array:
        return collect(params, state, observe(state), key, sizes.steps)[2].done.sum(0)

    def drawn(state: State, key: jax.Array) -> jax.Array:
        return simulate_random(state, key, sizes.steps)

    kinds: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "pushes given": (simulate, (state, pushes)),
        "pushes drawn": (drawn, (state, key)),
        "policy": (with_policy, (params, state, key)),
    }
    count = sizes.carts * sizes.steps
    return "\n".join(f"{name}: {training.rates(f, a, count, force, repeats)}" for name, (f, a) in kinds.items())


def main(argv: Sequence[str] | None = None) -> int:
    options = training.application_parser(__doc__ or "", out="out/cartpole", steps=60)
    options.add_argument("--gymnax", action="store_true", help="simulate with gymnax's CartPole-v1")
    args = training.parse(options, argv)
    params = initial_params(jax.random.key(args.seed), FULL if args.full else SMALL)
    if args.full:
        print(f"{FULL.carts} carts, {FULL.steps} steps ...", flush=True)
        print(compare_speed(FULL, params, args.force or None))
        return 0

    sizes = SMALL
    begin, step_of_simulator = gymnax_cartpole() if args.gymnax else own_cartpole()
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-3, eps=1e-5))
    iteration = learn(optimiser, sizes, step_of_simulator)
    compiled = training.compiled(iteration, args)
    keys = jax.random.split(jax.random.key(args.seed + 1), args.steps + 1)
    observation, simulator = begin(keys[-1], sizes.carts)
    example: tuple[Any, ...] = (params, optimiser.init(params), simulator, observation, keys[0])

    watched = jax.jit(training.transformed(watching(begin, step_of_simulator, keys[-1]), args))
    before = np.asarray(watched(params))
    state = optimiser.init(params)
    report = training.outcome(kj.explain(iteration, force=args.force or None)(*example), args.plain)
    window = -(-LONGEST // sizes.steps)  # iterations, in which an episode of any length ends
    ended: list[Any] = []
    lengths: list[float] = []
    for i in training.steps(lengths, args.steps, quantity="steps of an episode"):
        params, state, simulator, observation, count = compiled(params, state, simulator, observation, keys[i])
        ended.append(int(count))
        recent = ended[-window:]
        lengths.append(sizes.carts * sizes.steps * len(recent) / max(1, sum(recent)))
    draw(args.out / "learning.png", lengths, sizes.carts * sizes.steps, before, np.asarray(watched(params)))
    quality = f"{len(lengths) * sizes.carts * sizes.steps / 1e6:.2f} million steps simulated"
    print(training.application_ending(lengths, args, quality, "steps of an episode"))
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
