"""Train a small language model whose weights are sharded over the devices: fully sharded data parallelism (FSDP, ZeRO-3).

    python examples/fsdp.py --devices 8                          # about a minute, on eight devices that XLA makes of the CPU
    python examples/fsdp.py --devices 8 --processes 2            # the same in two processes, which talk by Gloo
    python examples/fsdp.py --devices 8 --checkpoint out/fsdp    # goes on where it was killed, also with other --devices
    python examples/fsdp.py --devices 8 --explain                # counts the collectives, with pipelines and with jax.jit

Each device has a part of every batch, and a part of every weight and of the optimiser's state (Rajbhandari et al. 2020,
arXiv:1910.02054). The layers are a ``jax.lax.scan``: a step of it gathers the weights of one layer only, and its gradient scatters
theirs again. XLA makes all of that of the shardings of the arrays, and the pipelines run between the collectives. On several
machines, start each process yourself, with ``--processes N --process I --coordinator HOST:PORT`` and one folder for
``--checkpoint`` that all of them see. The text is the reference of the Python language; a token is a character.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import _devices as devices
import _text
import _training as training
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HEAD = 16  # width of a head of attention
Params = dict[str, Any]


class State(NamedTuple):
    params: Params
    opt_state: optax.OptState


def initial_state(seed: int, characters: int, layers: int, width: int) -> State:
    """``layers`` are stacked: the first dimension of each of their weights."""

    def weight(name: str, *shape: int, scale: float = 1.0) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), sum(map(ord, name)))
        return jax.random.normal(key, shape) * scale * shape[-2] ** -0.5

    small = (2 * layers) ** -0.5  # of the products whose results are added up over the layers
    params = {
        "embedding": weight("embedding", characters, width, scale=characters**0.5),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "qkv": weight("qkv", layers, width, 3 * width),
            "out": weight("out", layers, width, width, scale=small),
            "hidden_norm": jnp.ones((layers, width)),
            "up": weight("up", layers, width, 4 * width),
            "down": weight("down", layers, 4 * width, width, scale=small),
        },
        "last_norm": jnp.ones(width),
        "logits": weight("logits", width, characters),
    }
    return State(params, optimiser.init(params))


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer(x: jax.Array, w: Params) -> jax.Array:
    """A transformer's: causal attention, then two products. ``x`` [batch, length, width]."""
    batch, length, width = x.shape
    q, k, v = jnp.split(norm(x, w["attention_norm"]) @ w["qkv"], 3, -1)
    q, k, v = (a.reshape(batch, length, width // HEAD, HEAD) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    x = x + seen.reshape(batch, length, width) @ w["out"]
    return x + jax.nn.gelu(norm(x, w["hidden_norm"]) @ w["up"]) @ w["down"]


def loss_fn(params: Params, text: jax.Array, rows: NamedSharding) -> jax.Array:
    """Mean cross-entropy of each next character, in nats. ``text`` [batch, length + 1], divided as ``rows`` says."""
    x = params["embedding"][text[:, :-1]] + positions(text.shape[1] - 1, params["embedding"].shape[1])
    # It could also be divided as the embedding is, by the width. Each layer would then send activations and not weights.
    x = jax.lax.with_sharding_constraint(x, rows)
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
    scores = norm(x, params["last_norm"]) @ params["logits"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:]).mean()


def positions(length: int, width: int) -> jax.Array:
    angles = jnp.arange(length)[:, None] * 1e4 ** -jnp.linspace(0, 1, width // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


# The schedule does not depend on --steps, so a finished run can be prolonged.
optimiser = optax.adamw(optax.linear_schedule(0.0, 2e-3, transition_steps=20), weight_decay=1e-2)


def train_step(state: State, text: jax.Array, *, rows: NamedSharding) -> tuple[State, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, text, rows)
    updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), loss


def train(args: argparse.Namespace, mesh: Mesh) -> None:
    settings = {name: getattr(args, name) for name in ("seed", "batch", "layers", "width", "context")}
    if args.width % HEAD or args.width % mesh.size:
        raise SystemExit(f"--width {args.width} is no multiple of {HEAD}, the width of a head, and of the {mesh.size} devices")
    text = _text.python_reference()
    pieces = text.train[: len(text.train) // (args.context + 1) * (args.context + 1)].reshape(-1, args.context + 1)
    batches = training.Batches((pieces,), args.batch, args.seed)

    def sharded(shape: tuple[int, ...]) -> P:
        """By the last but one dimension where it is the width or a multiple, else by the last one: what ``layers`` are stacked
        along stays whole, and every matrix and every norm is divided."""
        if len(shape) > 1 and shape[-2] % args.width == 0:
            return P(*(None,) * (len(shape) - 2), "data", None)
        return P(*(None,) * (len(shape) - 1), "data") if shape else P()

    def initial() -> State:
        return initial_state(args.seed, len(text.characters), args.layers, args.width)

    step = functools.partial(train_step, rows=NamedSharding(mesh, P("data")))
    trained = devices.fit(step, initial, sharded, batches, settings, args, mesh)
    devices.say(devices.ending(trained, args, mesh, " nats per character"))
    for name, part in zip(("parameters", "the optimiser's state"), trained.state, strict=True):
        here, everywhere = devices.bytes_of(part)
        devices.say(f"{name}: {here:,} of {everywhere:,} bytes in each device")


def main(argv: Sequence[str] | None = None) -> int:
    options = devices.parser(__doc__ or "", steps=200, batch=32)
    options.add_argument("--layers", type=int, default=4, help="of the transformer (default 4)")
    options.add_argument("--width", type=int, default=64, help="of the residual stream (default 64)")
    options.add_argument("--context", type=int, default=64, help="characters that it sees (default 64)")
    return devices.run(train, devices.parse(options, argv), __file__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
