"""Train a recurrent network to write like the reference of the Python language, the loop over time as a spatial pipeline.

    python examples/lstm.py              # about a minute on two cores; Ctrl-C ends with what was reached
    python examples/lstm.py --plain      # the same steps with jax.jit
    python examples/lstm.py --cell gru   # gated recurrent units instead of long short-term memory
    python examples/lstm.py --full       # layers of 1024 and 256 steps

Two layers of LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000) or GRU (Cho et al. 2014,
arXiv:1406.1078) read characters, and tell the next one; training goes back through time over 64 steps. ``--full`` has
wider layers and longer sequences, which take hours on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _text
import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import kitsune_jax as kj

Params = dict[str, Any]
Carry = tuple[jax.Array, ...]  # what a layer remembers: each [batch, width]
Cell = Callable[[Params, Carry, jax.Array], tuple[Carry, jax.Array]]
PROMPT = "The statement "
WRITTEN = 300


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    steps: int
    batch: int
    layers: int = 2


SMALL = Sizes(width=128, steps=64, batch=64)
FULL = Sizes(width=1024, steps=256, batch=64)


def lstm_cell(params: Params, carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
    """Of ``carry`` (state of the cell, output) and ``x`` [batch, inputs], each [batch, width]."""
    c, h = carry
    i, f, g, o = jnp.split(x @ params["w"] + h @ params["u"] + params["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def gru_cell(params: Params, carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
    """Of ``carry`` (output,) and ``x`` [batch, inputs]."""
    (h,) = carry
    xr, xz, xn = jnp.split(x @ params["w"] + params["b"], 3, axis=-1)
    hr, hz, hn = jnp.split(h @ params["u"], 3, axis=-1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
    return (h,), h


CELLS: dict[str, tuple[Cell, int, int]] = {"lstm": (lstm_cell, 4, 2), "gru": (gru_cell, 3, 1)}  # cell, its gates, its carries


def layer_params(key: jax.Array, cell: str, inputs: int, width: int) -> Params:
    gates = CELLS[cell][1]
    w, u = jax.random.split(key)
    return {
        "w": jax.random.normal(w, (inputs, gates * width)) * inputs**-0.5,
        "u": jax.random.normal(u, (width, gates * width)) * width**-0.5,
        "b": jnp.zeros(gates * width),
    }


def initial_params(key: jax.Array, sizes: Sizes, cell: str, characters: int) -> Params:
    embedding, head, *layers = jax.random.split(key, 2 + sizes.layers)
    return {
        "embedding": jax.random.normal(embedding, (characters, sizes.width)) * 0.1,
        "layers": [layer_params(k, cell, sizes.width, sizes.width) for k in layers],
        "head": (jax.random.normal(head, (sizes.width, characters)) * sizes.width**-0.5, jnp.zeros(characters)),
    }


def start(cell: str, batch: int, width: int, dtype: Any = jnp.float32) -> Carry:
    return (jnp.zeros((batch, width), dtype),) * CELLS[cell][2]


def run_layer(cell: str, params: Params, x: jax.Array) -> jax.Array:
    """Outputs [steps, batch, width] of ``x`` [steps, batch, inputs]."""
    carry = start(cell, x.shape[1], params["u"].shape[0], x.dtype)
    return jax.lax.scan(lambda carry, x: CELLS[cell][0](params, carry, x), carry, x)[1]


def network(params: Params, tokens: jax.Array, cell: str) -> jax.Array:
    """Logits [steps, batch, characters] of ``tokens`` [steps, batch]."""
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = run_layer(cell, layer, x)
    w, b = params["head"]
    return x @ w + b


def write(params: Params, prompt: jax.Array, key: jax.Array, cell: str, count: int) -> jax.Array:
    """``count`` characters [count] after ``prompt`` [length], each drawn from the logits after those before it, made sharper."""
    width = params["embedding"].shape[1]

    def one(carry: Any, given: jax.Array) -> tuple[Any, jax.Array]:
        token, states, key = carry
        token = jnp.where(given >= 0, given, token)
        x = params["embedding"][token]
        new = []
        for layer, state in zip(params["layers"], states, strict=True):
            state, x = CELLS[cell][0](layer, state, x)
            new.append(state)
        key, of_token = jax.random.split(key)
        logits = x @ params["head"][0] + params["head"][1]
        token = jax.random.categorical(of_token, logits / 0.7).astype(jnp.int32)
        return (token, new, key), token[0]

    begin = (jnp.zeros(1, jnp.int32), [start(cell, 1, width) for _ in params["layers"]], key)
    given = jnp.concatenate([prompt, jnp.full(count - 1, -1, prompt.dtype)])
    return jax.lax.scan(one, begin, given)[1][len(prompt) - 1 :]


def draw(path: Path, losses: Sequence[Any], held_out: Sequence[tuple[int, float]], title: str) -> None:
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats per character", title=title)
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64), label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", markersize=3, label="topics that it never saw")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    options = training.application_parser(__doc__ or "", out="out/lstm", steps=300)
    options.add_argument("--cell", choices=tuple(CELLS), default="lstm", help="default: lstm")
    args = training.parse(options, argv)
    sizes, cell = FULL if args.full else SMALL, args.cell
    text = _text.python_reference()
    params = initial_params(jax.random.key(args.seed), sizes, cell, len(text.characters))
    schedule = optax.cosine_decay_schedule(5e-3, args.steps, alpha=0.05)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
        logits = network(params, tokens[:-1], cell)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    def train_step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    step = training.compiled(train_step, args)
    evaluate = jax.jit(training.transformed(loss_fn, args))
    unseen = text.held_out_batch(4 * sizes.batch, sizes.steps).T
    state = optimiser.init(params)
    report = training.outcome(kj.explain(train_step, force=args.force or None)(params, state, unseen[:, : sizes.batch]), args.plain)
    losses: list[Any] = []
    held_out: list[tuple[int, float]] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, text.batch(sizes.batch, sizes.steps, (args.seed, i)).T)
        losses.append(loss)
        if i % 50 == 49:
            held_out.append((i + 1, float(evaluate(params, unseen))))
    draw(args.out / "loss.png", losses, held_out, f"{cell.upper()} of {sizes.width} learns the Python reference")

    writer = jax.jit(training.transformed(functools.partial(write, cell=cell, count=WRITTEN), args))
    given = (params, text.encode(PROMPT), jax.random.key(args.seed))
    found = text.decode(np.asarray(writer(*given)))
    begin = time.perf_counter()
    jax.block_until_ready(writer(*given))
    rate = (WRITTEN + len(PROMPT) - 1) / (time.perf_counter() - begin)
    print(f"\n{PROMPT}{found}\n")
    (args.out / "written.txt").write_text(f"{PROMPT}{found}\n")
    quality = f"{float(evaluate(params, unseen)):.3f} on topics that it never saw; it writes {rate:.0f} characters/s"
    print(training.application_ending(losses, args, quality))
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
