"""Train a classifier of handwritten digits with optax and plain JAX, the whole training step as spatial pipelines.

    python examples/train_digits_optax.py                       # a few seconds; Ctrl-C ends with a checkpoint
    python examples/train_digits_optax.py --steps 2000 --resume # goes on from there
    python examples/train_digits_optax.py --compare             # runs the same steps with jax.jit, too

Parameters are a pytree, the step is a function from state to state, and ``jax.jit(kj.pipeline(train_step))`` pipelines all of it:
forward, loss, backward and the optimiser. The digits are the 8 x 8 pictures of Alpaydin and Kaynak (1998), which ship inside the
scikit-learn wheel. They are few and small: whether pipelines gain here is the cost model's choice, told at the end.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import kitsune_jax as kj

HELD_OUT = 297  # of 1 797 pictures
Params = list[dict[str, jax.Array]]


class State(NamedTuple):
    params: Params
    opt_state: optax.OptState


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(pictures ``[n, 64]`` in 0..1, labels ``[n]``) to train on, and the same held out."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int32)
    return (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT])


def initial_params(key: jax.Array, widths: Sequence[int]) -> Params:
    """He-initialised layers."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, widths, widths[1:], strict=False)
    ]


def logits(params: Params, x: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def loss_fn(params: Params, x: jax.Array, y: jax.Array, dtype: str = "float32") -> jax.Array:
    """Mean cross-entropy. Casts inside the loss, so gradients come back in the float32 of the weights."""
    params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x).astype(jnp.float32), y).mean()


# The schedule does not depend on --steps, so a finished run can be prolonged.
optimiser = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.linear_schedule(0.0, 1e-3, transition_steps=20), weight_decay=1e-2),
)


def train_step(state: State, x: jax.Array, y: jax.Array, *, dtype: str) -> tuple[State, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y, dtype)
    updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), loss


def initial_state(params: Params) -> State:
    return State(params, optimiser.init(params))


def save(path: Path, settings: dict[str, Any], losses: Sequence[Any], state: State) -> None:
    """Every leaf under the name of its place in the tree."""
    leaves = {jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in jax.tree.leaves_with_path(state)}
    with training.replacing(path) as fresh, open(fresh, "wb") as file:
        np.savez(file, allow_pickle=False, info=np.asarray(training.to_json(settings, losses)), **leaves)


def restore(path: Path, settings: dict[str, Any], like: State) -> tuple[list[Any], State]:
    """(losses so far, state)."""
    if not path.exists():
        raise SystemExit(f"cannot resume: there is no {path}")
    with np.load(path, allow_pickle=False) as saved:
        info = json.loads(str(saved["info"]))
        training.check_same(settings, info["settings"])
        return info["losses"], jax.tree.map_with_path(lambda place, _: jnp.asarray(saved[jax.tree_util.keystr(place)]), like)


def fit(
    step: Callable[..., Any],
    state: State,
    losses: list[Any],
    batches: training.Batches,
    until: int,
    after_step: Callable[[State], None] = lambda _: None,
) -> State:
    """Train from step ``len(losses)`` on, and append the losses."""
    for i in training.steps(losses, until):
        state, loss = step(state, *batches[i])
        losses.append(loss)
        after_step(state)
    return state


def main(argv: Sequence[str] | None = None) -> int:
    options = training.parser(__doc__ or "", out="out/digits_optax", steps=300, batch=500)
    options.add_argument("--width", type=int, default=256, help="of the three hidden layers (default 256)")
    args = training.parse(options, argv)
    settings = {name: getattr(args, name) for name in ("seed", "batch", "dtype", "width")}
    checkpoint = args.out / "checkpoint.npz"
    train, (x, y) = digits()
    batches = training.Batches(train, args.batch, args.seed)
    params = initial_params(jax.random.key(args.seed), [64, args.width, args.width, args.width, 10])

    plain_step = functools.partial(train_step, dtype=args.dtype)
    step = jax.jit(kj.pipeline(plain_step, force=args.force or None), donate_argnums=0)

    losses: list[Any] = []
    state = initial_state(jax.tree.map(jnp.copy, params))  # a copy, because the step gives its buffers away
    if args.resume:
        losses, state = restore(checkpoint, settings, state)

    def after_step(state: State) -> None:
        if len(losses) % args.save_every == 0:
            save(checkpoint, settings, losses, state)

    state = fit(step, state, losses, batches, args.steps, after_step)
    save(checkpoint, settings, losses, state)
    training.draw_curve(args.out / "loss.png", losses, "digits, optax")

    accuracy = jnp.mean(jnp.argmax(jax.jit(logits)(state.params, x), -1) == y)
    print(training.ending(losses, args, f"accuracy {accuracy:.1%} on {len(y)} digits that it never saw"))
    print(training.outcome(kj.explain(step)(state, *batches[0])))
    if args.compare:
        plain: list[Any] = []
        rounded: list[Any] = []
        fit(jax.jit(plain_step), initial_state(params), plain, batches, len(losses))
        fit(jax.jit(plain_step), initial_state(training.nudged(params, args.dtype, args.seed)), rounded, batches, len(losses))
        print(training.comparison(losses, plain, rounded))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
