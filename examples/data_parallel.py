"""Train a classifier of handwritten digits on several devices, each with a part of every batch: data parallelism.

    python examples/data_parallel.py --devices 8                       # a few seconds, on eight devices that XLA makes of the CPU
    python examples/data_parallel.py --devices 8 --processes 2         # the same in two processes, which talk by Gloo
    python examples/data_parallel.py --devices 8 --checkpoint out/dp   # goes on where it was killed, also with other --devices
    python examples/data_parallel.py --devices 8 --plain               # with jax.jit alone, for comparison

The whole step is ``jax.jit(kj.pipeline(train_step))``, as on one device: batches are sharded by rows, weights are whole on every
device, and XLA adds the gradients up between the pipelines. On several machines, start each process yourself, with
``--processes N --process I --coordinator HOST:PORT`` and one folder for ``--checkpoint`` that all see. The digits are the 8 x 8
pictures of Alpaydin and Kaynak (1998), which ship inside the scikit-learn wheel. They are few and small: how much
is pipelined is the cost model's choice; ``--force`` pipelines all of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import _devices as devices
import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

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


def initial_state(seed: int, widths: Sequence[int]) -> State:
    """He-initialised layers."""
    keys = jax.random.split(jax.random.key(seed), len(widths) - 1)
    params = [
        {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, widths, widths[1:], strict=False)
    ]
    return State(params, optimiser.init(params))


def logits(params: Params, x: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


# The schedule does not depend on --steps, so a finished run can be prolonged.
optimiser = optax.adamw(optax.linear_schedule(0.0, 1e-3, transition_steps=20), weight_decay=1e-2)


def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    """Nothing in here knows of devices: the mean over the batch is over all of them, because the batch is."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
    updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), loss


def everywhere(_: Any) -> P:
    """Every device has all of an array."""
    return P()


def train(args: argparse.Namespace, mesh: Mesh) -> None:
    settings = {name: getattr(args, name) for name in ("seed", "batch", "width")}
    known, (x, y) = digits()
    batches = training.Batches(known, args.batch, args.seed)
    widths = [64, args.width, args.width, args.width, 10]
    trained = devices.fit(train_step, lambda: initial_state(args.seed, widths), everywhere, batches, settings, args, mesh)
    guesses = jnp.argmax(jax.jit(logits)(devices.on_host(trained.state.params), x), -1)
    quality = f", accuracy {np.mean(guesses == y):.1%} on {len(y)} digits that it never saw"
    devices.say(devices.ending(trained, args, mesh, quality))


def main(argv: Sequence[str] | None = None) -> int:
    options = devices.parser(__doc__ or "", steps=300, batch=480)
    options.add_argument("--width", type=int, default=256, help="of the three hidden layers (default 256)")
    return devices.run(train, devices.parse(options, argv), __file__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
