"""The applications with attention or with a loop over time.

Comes in: a dtype and a size. Goes out: as of ``benchmarks.graphs.apps``, a case, whose function is that of an example. ``rows`` is
the number of tokens, of simulated environments, or of sequences, whatever the app streams over; all else is fixed here, and said in
the title. Attention is differentiated by queries, keys and values, pendulums by the torques or by the policy's weights. Simulators
are of float32 only: in bfloat16 the steps of 20 ms would be rounded away. Their errors are large in every column, because the
paths of two carts whose angles differ by a rounding part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.columns import block_rows
from benchmarks.graphs.apps import GraphApp, Made, Rng, example, normal, random_key, squared_error

HEADS, HEAD = 8, 64  # of attention alone: a width of 512
LSTM_STEPS = 128
RECURRENT_WIDTHS = (16, 64, 256)
CARTPOLE_STEPS, POLICY_STEPS = 1000, 100
KEYS_PER_BLOCK, CARTS_PER_BLOCK = 512, 2048


def attention(params: dict[str, jax.Array], causal: bool = True) -> jax.Array:
    """[tokens, heads, head], of "q", "k" and "v" of that shape; as many write it."""
    q, k, v = params["q"], params["k"], params["v"]
    scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        visible = jnp.tril(jnp.ones((len(q), len(k)), bool))
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.promote_types(q.dtype, jnp.float32)), axis=-1).astype(q.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, v)


def attention_by_blocks(params: dict[str, jax.Array], causal: bool = True) -> jax.Array:
    """``attention`` as one does it by hand: a block of queries against the keys that it sees, so that its scores stay in cache."""
    q, k, v = params["q"], params["k"], params["v"]
    size = min(KEYS_PER_BLOCK, len(q))
    blocks = []
    for first in range(0, len(q), size):
        last = min(first + size, len(q))
        seen = last if causal else len(k)
        scores = jnp.einsum("qhd,khd->hqk", q[first:last], k[:seen]) * q.shape[-1] ** -0.5
        if causal:
            scores = jnp.where(jnp.arange(seen) <= jnp.arange(first, last)[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores.astype(jnp.promote_types(q.dtype, jnp.float32)), axis=-1).astype(q.dtype)
        blocks.append(jnp.einsum("hqk,khd->qhd", weights, v[:seen]))
    return jnp.concatenate(blocks)


def _attention(causal: bool, rows: int, rng: Rng) -> Made:
    params = {name: normal(rng, rows, HEADS, HEAD) for name in ("q", "k", "v")}
    return functools.partial(attention, causal=causal), params, ()


def llama_sizes(width: int, tokens: int) -> Any:
    """A layer with Llama 3's proportions: heads of 64, four heads of queries to one of keys, SwiGLU of 2.75 times the width."""
    module = example("llama")
    heads = width // 64
    return dataclasses.replace(
        module.FULL, layers=1, width=width, heads=heads, kv_heads=heads // 4, head=64, hidden=11 * width // 4, context=tokens
    )


def llama_8b_sizes(tokens: int) -> Any:
    return dataclasses.replace(example("llama").FULL, context=tokens)


def _transformer_layer(sizes_of: Callable[[int], Any], rows: int, rng: Rng) -> Made:
    module, sizes = example("llama"), sizes_of(rows)

    def function(params: Any, x: jax.Array) -> jax.Array:
        return module.layer(params, x, jnp.arange(x.shape[1]), sizes)[0]

    return function, module.layer_params(random_key(rng), sizes), (normal(rng, 1, rows, sizes.width),)


def _llama_token(sizes_of: Callable[[int], Any], rows: int, rng: Rng) -> Made:
    """The layer for one token that comes after ``rows`` - 1 others, whose keys and values are in the cache."""
    module, sizes = example("llama"), sizes_of(rows)
    cache = [normal(rng, 1, rows, sizes.kv_heads, sizes.head) for _ in range(2)]

    def function(params: Any, x: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array) -> Any:
        return module.layer(params, x, position[None], sizes, (keys, values))[0]

    params = module.layer_params(random_key(rng), sizes)
    return function, params, (normal(rng, 1, 1, sizes.width), *cache, np.int32(rows - 1))


def simulate_by_blocks(_: Any, state: Any, pushes: jax.Array) -> jax.Array:
    """CartPole made faster by hand: all steps of a block of carts, whose state stays in cache, then the next block."""
    module, (steps, carts) = example("cartpole"), pushes.shape
    size = block_rows(carts, CARTS_PER_BLOCK)
    if carts % size:
        return module.simulate(state, pushes)
    blocks = (jax.tree.map(lambda a: a.reshape(-1, size), state), jnp.moveaxis(pushes.reshape(steps, -1, size), 1, 0))
    return jax.lax.map(lambda block: module.simulate(*block), blocks).reshape(-1)


def lstm_by_hand(params: Any, x: jax.Array) -> jax.Array:
    """The layer of ``examples/lstm.py`` made faster by hand: one product with the inputs of all steps, before the loop."""

    def step(carry: Any, of_x: jax.Array) -> Any:
        c, h = carry
        i, f, g, o = jnp.split(of_x + h @ params["u"], 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    zeros = jnp.zeros((x.shape[1], len(params["u"])), x.dtype)
    return jax.lax.scan(step, (zeros, zeros), x @ params["w"] + params["b"])[1]


def gru_by_hand(params: Any, x: jax.Array) -> jax.Array:
    """As ``lstm_by_hand``."""

    def step(h: jax.Array, of_x: jax.Array) -> tuple[jax.Array, jax.Array]:
        xr, xz, xn = jnp.split(of_x, 3, axis=-1)
        hr, hz, hn = jnp.split(h @ params["u"], 3, axis=-1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((x.shape[1], len(params["u"])), x.dtype), x @ params["w"] + params["b"])[1]


def _cartpole(rows: int, rng: Rng) -> Made:
    module = example("cartpole")
    pushes = rng.random((CARTPOLE_STEPS, rows)) < 0.5
    return (lambda _, state, pushes: module.simulate(state, pushes)), {}, (module.start(random_key(rng), rows), pushes)


def _cartpole_random(rows: int, rng: Rng) -> Made:
    module = example("cartpole")

    def function(_: Any, state: Any, key: jax.Array) -> jax.Array:
        return module.simulate_random(state, jax.random.wrap_key_data(key), POLICY_STEPS)

    return function, {}, (module.start(random_key(rng), rows), jax.random.key_data(random_key(rng)))


def _cartpole_policy(rows: int, rng: Rng) -> Made:
    """The observations [steps, carts, 4] that the policy of ``examples/cartpole.py`` collects; values and actions, too."""
    module = example("cartpole")
    params = module.initial_params(random_key(rng), module.FULL)

    def function(params: Any, state: Any, key: jax.Array) -> Any:
        found = module.collect(params, state, module.observe(state), jax.random.wrap_key_data(key), POLICY_STEPS)
        transitions = found[2]
        extra = jnp.stack([transitions.value, transitions.log_probability, transitions.done.astype(transitions.value.dtype)], -1)
        return jnp.concatenate([transitions.observation, extra], -1)

    return function, params, (module.start(random_key(rng), rows), jax.random.key_data(random_key(rng)))


def _pendulum(rows: int, rng: Rng) -> Made:
    module = example("pendulum")
    torques = rng.uniform(-2, 2, (POLICY_STEPS, rows)).astype(np.float32)
    return module.simulate, torques, (module.start(random_key(rng), rows),)


def _pendulum_policy(rows: int, rng: Rng) -> Made:
    module = example("pendulum")
    params = module.initial_params(random_key(rng), module.FULL)
    return (lambda params, state: module.roll_out(params, state, POLICY_STEPS)[0]), params, (module.start(random_key(rng), rows),)


def _recurrent(cell: str, width: int, rows: int, rng: Rng) -> Made:
    module = example("lstm")
    params = module.layer_params(random_key(rng), cell, width, width)
    return functools.partial(module.run_layer, cell), params, (normal(rng, LSTM_STEPS, rows, width),)


def _app(name: str, title: str, unit: str, make: Callable[[int, Rng], Made], rows: tuple[int, ...], **more: Any) -> GraphApp:
    """Sizes of training are those of inference where ``train_rows`` does not say others."""
    return GraphApp(name, title, unit, make, squared_error, rows, more.pop("train_rows", rows), **more)


_F32 = ("f32",)
_TOKENS, _CARTS, _PENDULUMS = "tokens", "carts", "pendulums"
SEQUENCE_APPS = {
    app.name: app
    for app in (
        _app(
            "attention",
            f"causal attention, {HEADS} heads of {HEAD}",
            _TOKENS,
            functools.partial(_attention, True),
            (1024, 4096),
            by_hand=attention_by_blocks,
        ),
        _app(
            "attention_full",
            f"attention without a mask, {HEADS} heads of {HEAD}",
            _TOKENS,
            functools.partial(_attention, False),
            (1024, 4096),
            by_hand=functools.partial(attention_by_blocks, causal=False),
        ),
        _app(
            "transformer_layer",
            "transformer layer as Llama's, width 512",
            _TOKENS,
            functools.partial(_transformer_layer, functools.partial(llama_sizes, 512)),
            (1024,),
        ),
        _app(
            "llama_token",
            "one token of a layer as Llama's, width 512",
            "tokens in the cache",
            functools.partial(_llama_token, functools.partial(llama_sizes, 512)),
            (2048,),
            train_rows=(),
        ),
        _app(
            "cartpole",
            f"CartPole, {CARTPOLE_STEPS} steps",
            _CARTS,
            _cartpole,
            (4_096, 65_536),
            train_rows=(),
            dtypes=_F32,
            by_hand=simulate_by_blocks,
        ),
        _app(
            "cartpole_random",
            f"CartPole with random pushes, {POLICY_STEPS} steps",
            _CARTS,
            _cartpole_random,
            (65_536,),
            train_rows=(),
            dtypes=_F32,
        ),
        _app(
            "cartpole_policy",
            f"CartPole with a policy network, {POLICY_STEPS} steps",
            _CARTS,
            _cartpole_policy,
            (4_096,),
            train_rows=(),
            dtypes=_F32,
        ),
        _app("pendulum", f"Pendulum, {POLICY_STEPS} steps", _PENDULUMS, _pendulum, (65_536,), dtypes=_F32),
        _app(
            "pendulum_policy",
            f"Pendulum with a policy network, {POLICY_STEPS} steps",
            _PENDULUMS,
            _pendulum_policy,
            (4_096,),
            dtypes=_F32,
        ),
        *(
            _app(
                f"{cell}_{width}",
                f"{cell.upper()} {width} wide, {LSTM_STEPS} steps",
                "sequences",
                functools.partial(_recurrent, cell, width),
                (256,),
                by_hand=by_hand,
            )
            for cell, by_hand in (("lstm", lstm_by_hand), ("gru", gru_by_hand))
            for width in RECURRENT_WIDTHS
        ),
    )
}
# Planned only (``python -m benchmarks.graphs.offchip``): on a CPU a call would take minutes.
PLANNED_APPS = {
    app.name: app
    for app in (
        _app("llama_8b", "layer of Llama 3 8B", _TOKENS, functools.partial(_transformer_layer, llama_8b_sizes), (2048,)),
        _app(
            "llama_8b_token",
            "one token of a layer of Llama 3 8B",
            "tokens in the cache",
            functools.partial(_llama_token, llama_8b_sizes),
            (2048,),
            train_rows=(),
        ),
    )
}
