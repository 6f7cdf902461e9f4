"""Train a small Llama on the reference of the Python language, and write text with it from its cache of keys and values.

    python examples/llama.py             # about a minute on two cores; Ctrl-C ends with what was reached
    python examples/llama.py --plain     # the same steps with jax.jit
    python examples/llama.py --full      # what would be pipelined in a layer of Llama 3 8B; nothing is run

The network is Llama 3's (Grattafiori et al. 2024, arXiv:2407.21783): RMS norms, rotary embeddings, attention of several heads of
queries to one of keys and values (grouped queries), SwiGLU, no biases. A token is a character. ``--full`` has the sizes of Llama 3
8B: a width of 4096, 32 heads of queries and 8 of keys and values of 128 each, SwiGLU of 14336, a context of 2048 tokens, and one
token against a cache of 2048."""

from __future__ import annotations

import dataclasses
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
Cache = tuple[jax.Array, jax.Array]  # keys and values, [batch, length, heads of keys, head]
PROMPT = "The statement "
PIECE = 20  # characters that are written in one call


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``heads`` of queries share ``kv_heads`` of keys and values, all of the width ``head``."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    batch: int
    context: int
    theta: float = 500_000.0  # base of the rotary frequencies, as in Llama 3


SMALL = Sizes(layers=4, width=128, heads=4, kv_heads=2, head=32, hidden=352, batch=8, context=256, theta=10_000.0)
FULL = Sizes(layers=32, width=4096, heads=32, kv_heads=8, head=128, hidden=14_336, batch=1, context=2048)


def layer_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    return {
        "attention_norm": (sizes.width,),
        "query": (sizes.width, queries),
        "key": (sizes.width, keys),
        "value": (sizes.width, keys),
        "out": (queries, sizes.width),
        "feed_forward_norm": (sizes.width,),
        "gate": (sizes.width, sizes.hidden),
        "up": (sizes.width, sizes.hidden),
        "down": (sizes.hidden, sizes.width),
    }


def layer_params(key: jax.Array, sizes: Sizes) -> Params:
    shapes = layer_shapes(sizes)
    small = (2 * sizes.layers) ** -0.5  # of the products whose results are added up over the layers
    keys = jax.random.split(key, len(shapes))

    def weight(key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape)
        return jax.random.normal(key, shape) * shape[0] ** -0.5 * (small if name in ("out", "down") else 1)

    return {name: weight(k, name, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def initial_params(key: jax.Array, sizes: Sizes, characters: int) -> Params:
    embedding, last, *layers = jax.random.split(key, 2 + sizes.layers)
    return {
        "embedding": jax.random.normal(embedding, (characters, sizes.width)) * 0.02,
        "layers": [layer_params(k, sizes) for k in layers],
        "norm": jnp.ones(sizes.width),
        "head": jax.random.normal(last, (sizes.width, characters)) * sizes.width**-0.5,
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """``x`` [batch, tokens, heads, head], each pair of its numbers turned by an angle that grows with ``positions`` [tokens]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """[batch, queries, heads, head] of ``q`` of that shape, ``k`` and ``v`` [batch, keys, kv_heads, head]. The query at position p
    sees the keys 0 to p."""
    batch, queries, heads, head = q.shape
    keys, kv_heads = k.shape[1:3]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * head**-0.5
    visible = jnp.arange(keys) <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf).astype(jnp.promote_types(q.dtype, jnp.float32)), axis=-1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(q.dtype), v).reshape(batch, queries, heads, head)


def layer(params: Params, x: jax.Array, positions: jax.Array, sizes: Sizes, cache: Cache | None = None) -> tuple[jax.Array, Cache]:
    """One layer of ``x`` [batch, tokens, width] at ``positions`` [tokens], which follow each other; and all keys and values, those
    of ``cache`` among them."""
    batch, tokens, _ = x.shape
    h = rms_norm(x, params["attention_norm"])

    def heads(name: str) -> jax.Array:
        return (h @ params[name]).reshape(batch, tokens, -1, sizes.head)

    q, k, v = rotary(heads("query"), positions, sizes.theta), rotary(heads("key"), positions, sizes.theta), heads("value")
    if cache is not None:
        k, v = (jax.lax.dynamic_update_slice_in_dim(old, new, positions[0], 1) for old, new in zip(cache, (k, v), strict=True))
    x = x + attention(q, k, v, positions).reshape(batch, tokens, -1) @ params["out"]
    h = rms_norm(x, params["feed_forward_norm"])
    return x + (jax.nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"], (k, v)


def network(
    params: Params, tokens: jax.Array, sizes: Sizes, first: Any = 0, caches: Sequence[Cache] | None = None
) -> tuple[jax.Array, list[Cache]]:
    """Logits [batch, tokens, characters] of ``tokens`` [batch, tokens], the first of which is at position ``first``; the caches."""
    x = params["embedding"][tokens]
    positions = first + jnp.arange(tokens.shape[1])
    new = []
    for i, weights in enumerate(params["layers"]):
        x, cache = layer(weights, x, positions, sizes, None if caches is None else caches[i])
        new.append(cache)
    return rms_norm(x, params["norm"]) @ params["head"], new


def empty_caches(sizes: Sizes, batch: int, length: int) -> list[Cache]:
    shape = (batch, length, sizes.kv_heads, sizes.head)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(sizes.layers)]


Writing = tuple[jax.Array, jax.Array, list[Cache], jax.Array]  # the last token [1], its position, the caches, a key


def continue_text(params: Params, writing: Writing, sizes: Sizes, count: int) -> tuple[Writing, jax.Array]:
    """``count`` more tokens [count], each drawn from the logits after those before it, made sharper."""

    def one(carry: Writing, _: None) -> tuple[Writing, jax.Array]:
        token, position, caches, key = carry
        logits, caches = network(params, token[:, None], sizes, position, caches)
        key, of_token = jax.random.split(key)
        token = jax.random.categorical(of_token, logits[:, -1] / 0.7).astype(jnp.int32)
        return (token, position + 1, caches, key), token[0]

    return jax.lax.scan(one, writing, length=count)


def write(params: Params, text: _text.Text, sizes: Sizes, transform: Callable[..., Any], seed: int) -> tuple[str, float]:
    """Text of ``sizes.context`` characters that starts with the prompt, printed while it is written; and the tokens per second."""
    prompt = text.encode(PROMPT)[None]

    def begin(params: Params, tokens: jax.Array, key: jax.Array) -> Writing:
        logits, caches = network(params, tokens, sizes, 0, empty_caches(sizes, 1, sizes.context))
        token = jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)
        return token, jnp.int32(len(PROMPT)), caches, key

    def more(params: Params, writing: Writing) -> tuple[Writing, jax.Array]:
        return continue_text(params, writing, sizes, PIECE)

    step = jax.jit(transform(more))
    writing = jax.jit(transform(begin))(params, prompt, jax.random.key(seed))
    written = text.decode(np.asarray(writing[0]))
    writing, tokens = step(params, writing)  # compiles
    written += text.decode(np.asarray(tokens))
    print(f"\n{PROMPT}{written}", end="", flush=True)
    before = time.perf_counter()
    pieces = (sizes.context - len(PROMPT) - 1) // PIECE - 1
    for _ in range(pieces):
        writing, tokens = step(params, writing)
        piece = text.decode(np.asarray(tokens))
        print(piece, end="", flush=True)
        written += piece
    rate = pieces * PIECE / (time.perf_counter() - before)
    print("\n")
    return PROMPT + written, rate


def plan_full() -> str:
    """What ``kj.explain`` says of a layer of Llama 3 8B: of a whole context, of its gradient, and of one token against a cache."""

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {name: struct(*shape) for name, shape in layer_shapes(FULL).items()}
    context = struct(FULL.batch, FULL.context, FULL.width)
    cache = (struct(1, FULL.context, FULL.kv_heads, FULL.head),) * 2

    def whole(params: Params, x: jax.Array) -> jax.Array:
        return layer(params, x, jnp.arange(x.shape[1]), FULL)[0]

    def gradient(params: Params, x: jax.Array, y: jax.Array) -> Any:
        return jax.value_and_grad(lambda params: jnp.mean((whole(params, x) - y) ** 2))(params)

    def token(params: Params, x: jax.Array, cache: Cache, position: jax.Array) -> Any:
        return layer(params, x, position[None], FULL, cache)

    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "context": (whole, (params, context)),
        "context, with gradients": (gradient, (params, context, context)),
        "one token": (token, (params, struct(1, 1, FULL.width), cache, jax.ShapeDtypeStruct((), jnp.int32))),
    }
    lines = []
    for name, (function, arguments) in cases.items():
        chosen, legal = (kj.explain(function, force=force)(*arguments) for force in (None, True))
        lines.append(
            f"{name}: {chosen.ops_pipelined} of {chosen.ops_total} operators pipelined ({legal.ops_pipelined} could be), "
            f"{chosen.bytes_saved / chosen.traffic_bulk_sync:.1%} of the off-chip bytes saved"
        )
    return "\n".join(lines)


def draw(path: Path, losses: Sequence[Any], held_out: Sequence[tuple[int, float]]) -> None:
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats per character", title="a small Llama learns the Python reference")
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64), label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", markersize=3, label="topics that it never saw")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(training.application_parser(__doc__ or "", out="out/llama", steps=250), argv)
    if args.full:
        print(f"A layer of Llama 3 8B, {FULL.context} tokens:\n{plan_full()}")
        return 0
    sizes = SMALL
    text = _text.python_reference()
    params = initial_params(jax.random.key(args.seed), sizes, len(text.characters))
    count = sum(a.size for a in jax.tree.leaves(params))
    print(f"{len(text.train)} characters to learn from, {len(text.held_out)} held out; {count} parameters", flush=True)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(20, args.steps), args.steps + 1, 3e-4)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))

    def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
        logits, _ = network(params, tokens[:, :-1], sizes)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = training.compiled(train_step, args)
    evaluate = jax.jit(training.transformed(loss_fn, args))
    unseen = text.held_out_batch(4 * sizes.batch, sizes.context)
    state = optimiser.init(params)
    report = training.outcome(kj.explain(train_step, force=args.force or None)(params, state, unseen[: sizes.batch]), args.plain)
    losses: list[Any] = []
    held_out: list[tuple[int, float]] = []
    for i in training.steps(losses, args.steps):
        params, state, loss = step(params, state, text.batch(sizes.batch, sizes.context, (args.seed, i)))
        losses.append(loss)
        if i % 50 == 49:
            held_out.append((i + 1, float(evaluate(params, unseen))))
    draw(args.out / "loss.png", losses, held_out)
    written, rate = write(params, text, sizes, lambda f: training.transformed(f, args), args.seed)
    (args.out / "written.txt").write_text(written + "\n")
    quality = f"{float(evaluate(params, unseen)):.3f} on topics that it never saw; it writes {rate:.0f} tokens/s"
    print(training.application_ending(losses, args, quality))
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
