"""Transformers, recurrent networks, solvers and simulators of libraries, as their users write them and unchanged.

Comes in: a number of rows: tokens, sequences, trajectories or environments. Goes out: as of every ``GraphApp``, a function, its
parameters and its inputs. A library is imported when one of its models is made; ``NEEDS`` says which. Those without ``train_rows``
have no gradient that makes sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.graphs.apps import GraphApp, Made, Rng, normal, random_key, squared_error

WIDTH, HEADS, BATCH, STEPS = 64, 4, 2, 32


def _nnx_transformer(rows: int, rng: Rng) -> Made:
    """Two blocks of ``nnx.MultiHeadAttention`` under a causal mask and a perceptron, each behind a layer normalisation."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attention_norm, self.norm = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + self.attention(self.attention_norm(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.second = Block(rngs), Block(rngs)

        def __call__(self, x: Any) -> Any:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            return self.second(self.first(x, mask), mask)

    definition, state = nnx.split(Network(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(definition, state)(x), state, (normal(rng, BATCH, rows, WIDTH),)


def _linen_transformer(rows: int, rng: Rng) -> Made:
    """Two blocks of ``linen.MultiHeadDotProductAttention`` under a causal mask that also hides padding."""
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any, tokens: Any) -> Any:
            mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(jnp.ones_like(tokens), tokens > 0))
            for _ in range(2):
                h = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(h, mask=mask)
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
            return x

    network: Any = Network()
    tokens = rng.integers(0, 10, (BATCH, rows)).astype(np.int32)
    tokens[:, 0] = 1  # the first token is there, so that no row sees nothing
    inputs = (normal(rng, BATCH, rows, WIDTH), tokens)
    return network.apply, network.init(random_key(rng), *inputs), inputs


def _equinox_transformer(rows: int, rng: Rng) -> Made:
    """Two blocks of ``eqx.nn.MultiheadAttention`` with rotary embeddings; modules for one sequence, under ``jax.vmap``."""
    import equinox as eqx

    class Block(eqx.Module):
        attention: Any
        rotary: Any
        norms: Any
        perceptron: Any

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
            self.rotary = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)
            self.norms = [eqx.nn.RMSNorm(WIDTH) for _ in range(2)]
            self.perceptron = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.silu, key=second)

        def __call__(self, x: Any) -> Any:
            def turn(queries: Any, keys: Any, values: Any) -> Any:
                return jax.vmap(self.rotary, 1, 1)(queries), jax.vmap(self.rotary, 1, 1)(keys), values

            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)), process_heads=turn)
            return x + jax.vmap(lambda row: self.perceptron(self.norms[1](row)))(x)

    params, static = eqx.partition([Block(key) for key in jax.random.split(random_key(rng), 2)], eqx.is_inexact_array)

    def network(params: Any, x: Any) -> Any:
        for block in eqx.combine(params, static):
            x = jax.vmap(block)(x)
        return x

    return network, params, (normal(rng, BATCH, rows, WIDTH),)


def _jax_attention(rows: int, rng: Rng) -> Made:
    """``jax.nn.dot_product_attention`` with two heads of queries to each of keys, and a window of 64."""
    params = {"q": normal(rng, BATCH, rows, HEADS, 16)} | {name: normal(rng, BATCH, rows, HEADS // 2, 16) for name in ("k", "v")}

    def network(params: Any) -> Any:
        return jax.nn.dot_product_attention(params["q"], params["k"], params["v"], is_causal=True, local_window_size=(64, 0))

    return network, params, ()


def _nnx_lstm(rows: int, rng: Rng) -> Made:
    """``nnx.RNN`` of ``nnx.LSTMCell``; its loop has the batch first, time second."""
    from flax import nnx

    # Beside the parameters, a module holds the keys that it was made with.
    parts: Any = nnx.split(nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))), nnx.Param, ...)
    definition, params, rest = parts

    def network(params: Any, x: Any) -> Any:
        zeros = jnp.zeros((x.shape[0], WIDTH), x.dtype)
        return nnx.merge(definition, params, rest)(x, initial_carry=(zeros, zeros))

    return network, params, (normal(rng, rows, STEPS, WIDTH),)


def _linen_gru(rows: int, rng: Rng) -> Made:
    """``linen.RNN`` of ``linen.GRUCell``, backwards in time."""
    import flax.linen as nn

    network: Any = nn.RNN(nn.GRUCell(WIDTH), reverse=True, keep_order=True)
    x = normal(rng, rows, STEPS, WIDTH)
    params = network.init(random_key(rng), x)
    return lambda params, x: network.apply(params, x, initial_carry=jnp.zeros((len(x), WIDTH), x.dtype)), params, (x,)


def _equinox_gru(rows: int, rng: Rng) -> Made:
    """``eqx.nn.GRUCell`` in a ``lax.scan`` for one sequence, under ``jax.vmap``, as in equinox's own example."""
    import equinox as eqx

    params, static = eqx.partition(eqx.nn.GRUCell(WIDTH, WIDTH, key=random_key(rng)), eqx.is_inexact_array)

    def network(params: Any, x: Any) -> Any:
        cell = eqx.combine(params, static)
        return jax.vmap(lambda x: jax.lax.scan(lambda h, row: (cell(row, h), None), jnp.zeros(WIDTH, x.dtype), x)[0])(x)

    return network, params, (normal(rng, rows, STEPS, WIDTH),)


def _diffrax_ode(rows: int, rng: Rng) -> Made:
    """A neural ordinary differential equation, solved with Tsitouras' method in steps of fixed length."""
    import diffrax
    import equinox as eqx

    perceptron = eqx.nn.MLP(2, 2, WIDTH, 1, activation=jnp.tanh, key=random_key(rng))
    params, static = eqx.partition(perceptron, eqx.is_inexact_array)

    def network(params: Any, first: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, change: eqx.combine(change, static)(y))
        save = diffrax.SaveAt(ts=jnp.linspace(0, 1, 5, dtype=first.dtype))
        options: dict[str, Any] = {"t0": 0.0, "t1": 1.0, "dt0": 0.125, "args": params, "saveat": save, "max_steps": 16}
        return jax.vmap(lambda y: diffrax.diffeqsolve(term, diffrax.Tsit5(), y0=y, **options).ys)(first)

    return network, params, (normal(rng, rows, 2),)


def _gymnax(name: str, rows: int, rng: Rng) -> Made:
    """Gymnax's simulator under ``jax.vmap`` in a ``lax.scan`` with given actions: the observations [steps, rows, numbers]."""
    import gymnax

    environment, constants = gymnax.make(name)
    discrete = name == "CartPole-v1"
    actions = rng.integers(0, 2, (STEPS, rows)).astype(np.int32) if discrete else rng.uniform(-2, 2, (STEPS, rows, 1))

    def network(_: Any, data: jax.Array, actions: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.wrap_key_data(data), rows)
        _, state = jax.vmap(environment.reset, (0, None))(keys, constants)

        def step(carry: Any, action: jax.Array) -> Any:
            state, keys = carry
            pairs = jax.vmap(jax.random.split)(keys)
            found = jax.vmap(environment.step, (0, 0, 0, None))(pairs[:, 0], state, action, constants)
            return (found[1], pairs[:, 1]), found[0]

        return jax.lax.scan(step, (state, keys), actions)[1]

    key = jax.random.key_data(random_key(rng))
    return network, {}, (key, actions if discrete else actions.astype(np.float32))


def _optax_in_a_loop(rows: int, rng: Rng) -> Made:
    """The losses of 8 steps of ``optax.adamw`` in a ``lax.scan``, on batches of ``rows``."""
    import optax

    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["w0"] + params["b0"]) @ params["w1"] - y) ** 2)

    def network(params: Any, xs: jax.Array, ys: jax.Array) -> jax.Array:
        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
            updates, state = optimiser.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, optimiser.init(params)), (xs, ys))[1]

    params = {"w0": normal(rng, 16, WIDTH) / 4, "b0": normal(rng, WIDTH) / 4, "w1": normal(rng, WIDTH, 3) / 8}
    return network, params, (normal(rng, 8, rows, 16), normal(rng, 8, rows, 3))


# Title, what rows counts, what makes it, libraries that it needs, sizes, whether it has a gradient that makes sense.
_MODELS: dict[str, tuple[str, str, Callable[[int, Rng], Made], tuple[str, ...], int, bool]] = {
    "nnx_transformer": ("transformer of flax.nnx", "tokens", _nnx_transformer, ("flax",), 1024, True),
    "linen_transformer": ("transformer of flax.linen", "tokens", _linen_transformer, ("flax",), 1024, True),
    "equinox_transformer": ("transformer of equinox", "tokens", _equinox_transformer, ("equinox",), 1024, True),
    "jax_attention": ("jax.nn.dot_product_attention", "tokens", _jax_attention, (), 1024, True),
    "nnx_lstm": ("LSTM of flax.nnx", "sequences", _nnx_lstm, ("flax",), 1024, True),
    "linen_gru": ("GRU of flax.linen, backwards", "sequences", _linen_gru, ("flax",), 1024, True),
    "equinox_gru": ("GRU of equinox", "sequences", _equinox_gru, ("equinox",), 1024, True),
    "diffrax_ode": ("neural ODE by diffrax", "trajectories", _diffrax_ode, ("diffrax", "equinox"), 4096, True),
    "gymnax_cartpole": (
        "CartPole of gymnax",
        "environments",
        lambda rows, rng: _gymnax("CartPole-v1", rows, rng),
        ("gymnax",),
        65_536,
        False,
    ),
    "gymnax_pendulum": (
        "Pendulum of gymnax",
        "environments",
        lambda rows, rng: _gymnax("Pendulum-v1", rows, rng),
        ("gymnax",),
        65_536,
        False,
    ),
    "optax_in_a_loop": ("8 steps of optax.adamw in a scan", "rows", _optax_in_a_loop, ("optax",), 8192, False),
}
NEEDS = {name: model[3] for name, model in _MODELS.items()}
SEQUENCE_LIBRARY_APPS = {
    name: GraphApp(name, title, unit, make, squared_error, (rows,), (rows,) if trained else ())
    for name, (title, unit, make, _, rows, trained) in _MODELS.items()
}
