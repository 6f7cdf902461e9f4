"""Programs that users shard, each with arguments and the mesh axes that divide them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

_rng = np.random.default_rng(0)


def _normal(*shape: int, scale: float = 0.3) -> Any:
    return (_rng.standard_normal(shape) * scale).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """``specs``: of the arguments. ``results``: of the results, if the user asks. ``wrt``: arguments to differentiate. ``rows``:
    the dimensions (argument, dimension) of its samples, edges or tokens, which may be any number."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[Any, ...]
    results: Any = None
    wrt: tuple[int, ...] = ()
    rows: tuple[tuple[int, int], ...] = ((0, 0),)


def _grad(program: Sharded, results: Any = None) -> Sharded:
    loss = lambda *args: jnp.mean(program.function(*args) ** 2)  # noqa: E731
    return dataclasses.replace(program, function=jax.grad(loss, program.wrt), results=results)


def enlarged(program: Sharded, times: int) -> Sharded:
    """``program`` with so many times as many rows."""
    args = list(program.args)
    for k, d in program.rows:
        args[k] = np.tile(args[k], [times if e == d else 1 for e in range(np.ndim(args[k]))])
    return dataclasses.replace(program, args=tuple(args))


# --- functions --------------------------------------------------------------------------------------------------------------------


def mlp(x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    return jnp.tanh(x @ w1 + b1) @ w2


def activated(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    """The network ``mlp`` with another function behind its hidden layer."""
    return lambda x, w1, b1, w2: activation(x @ w1 + b1) @ w2


def train_step(x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda *w: jnp.mean(mlp(x, *w) ** 2), (0, 1, 2))(w1, b1, w2)
    return loss, [w - 0.1 * g for w, g in zip((w1, b1, w2), grads, strict=True)]


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def layer(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, w1: Any, w2: Any) -> Any:
    batch, length, width = x.shape
    n = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = ((n @ w).reshape(batch, length, 4, -1) for w in (wq, wk, wv))
    x = x + attention(q, k, v).reshape(batch, length, width) @ wo
    return x + jax.nn.silu(x @ w1) @ w2


def layers(x: Any, *weights: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(x, *w), None), x, weights)[0]


def layers_again(x: Any, *weights: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, *w), None)), x, weights)[0]


def message(nodes: Any, send: Any, receive: Any, we: Any, wn: Any) -> Any:
    edges = jax.nn.relu(jnp.concatenate([nodes[send], nodes[receive]], -1) @ we)
    return nodes + jax.ops.segment_sum(edges, receive, nodes.shape[0]) @ wn


def graph_attention(nodes: Any, send: Any, receive: Any, w: Any, a: Any, b: Any) -> Any:
    n = nodes.shape[0]
    h = nodes @ w
    scores = jax.nn.leaky_relu((h @ a)[send] + (h @ b)[receive])
    weights = jnp.exp(scores - jax.ops.segment_max(scores, receive, n)[receive])
    total = jax.ops.segment_sum(weights, receive, n)
    return jax.ops.segment_sum(h[send] * (weights / total[receive])[:, None], receive, n)


def embedded(table: Any, index: Any, w: Any) -> Any:
    return jax.nn.relu(table[index].reshape(index.shape[0], -1) @ w)


def decoded(q: Any, keys: Any, values: Any, key: Any, value: Any, at: Any) -> tuple[Any, Any, Any]:
    """A token's attention, and the caches with its key and value."""
    keys, values = (jax.lax.dynamic_update_slice_in_dim(c, new, at, 2) for c, new in ((keys, key), (values, value)))
    scores = jnp.where(jnp.arange(keys.shape[2]) <= at, jnp.einsum("bhqd,bhkd->bhqk", q, keys), -1e30)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), values), keys, values


def radial(x: Any, centres: Any, w: Any) -> Any:
    return jnp.exp(-jnp.sum((x[:, None] - centres[None]) ** 2, -1)) @ w


def looked_up(ids: Any, table: Any) -> Any:
    return jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype) @ table


def encoded(x: Any, w: Any) -> Any:
    """The first layer of a NeRF, behind its encoding of positions."""
    return jax.nn.relu(jnp.sin((x[..., None] * 2.0 ** np.arange(6, dtype=np.float32)).reshape(len(x), -1)) @ w)


def checks(x: Any, w: Any) -> tuple[Any, Any]:
    y = jnp.tanh(x @ w)
    return jnp.any(y > 0.5), jnp.all(jnp.isfinite(y), 1)


def multiplied(x: Any, index: Any) -> tuple[Any, Any]:
    """``index``: the segment of each row."""
    y = 1 + x / 16
    return jnp.prod(y, 0), jax.ops.segment_prod(y, index, 3)


def recurrent(xs: Any, wx: Any, wh: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ wx + h @ wh)
        return h, h

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], wh.shape[0]), xs.dtype), xs)[1]


def lstm(xs: Any, wx: Any, wh: Any, b: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ wx + h @ wh + b, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((xs.shape[1], wh.shape[0]), xs.dtype)
    return jax.lax.scan(step, (zeros, zeros), xs)[1]


def gated(x: Any, w1: Any, w2: Any) -> Any:
    gate, up = jnp.split(x @ w1, 2, -1)
    return (jax.nn.silu(gate) * up) @ w2


def self_attention(x: Any, w: Any, wo: Any) -> Any:
    q, k, v = (a.reshape(*x.shape[:2], 4, -1) for a in jnp.split(x @ w, 3, -1))
    return attention(q, k, v).reshape(x.shape) @ wo


def stencil(u: Any, w: Any) -> Any:
    """A step of the heat equation on a grid, and a product."""
    p = jnp.pad(u, 1)
    return jnp.tanh((u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)) @ w)


def until_large(x: Any, w: Any) -> Any:
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 1e3, lambda c: c + jnp.abs(jnp.tanh(c @ w) @ w.T) + 1, x)


# --- arguments --------------------------------------------------------------------------------------------------------------------

_MLP = (_normal(48, 32), _normal(32, 64), _normal(64), _normal(64, 16))
_FEW = (_normal(64, 128), _normal(128), _normal(128, 32))
_QKV = tuple(_normal(8, 16, 4, 8) for _ in range(3))
_LAYER = (_normal(8, 16, 32), *(_normal(32, 32) for _ in range(4)), _normal(32, 64), _normal(64, 32))
_LAYERS = (_LAYER[0], *(np.stack([w, -w, w / 2]) for w in _LAYER[1:]))
_EDGES = tuple(_rng.integers(0, 64, 512).astype(np.int32) for _ in range(2))
_NODES = _normal(64, 32)
_TABLE = (_normal(4096, 16), _rng.integers(-5, 4100, (64, 4)).astype(np.int32), _normal(64, 8))
_TENSOR_MLP = (P("data"), P(None, "model"), P("model"), P("model"))
_TENSOR_LAYER = (P("data"), *(P(None, "model") for _ in range(3)), P("model"), P(None, "model"), P("model"))
_ALL = (1, 2, 3, 4, 5, 6)

# The mesh has 4 devices along "data" and 2 along "model".
PROGRAMS: dict[str, Sharded] = {
    "data parallel": Sharded(mlp, _MLP, (P("data"), P(), P(), P()), wrt=(0, 1, 2, 3)),
    "one result wanted sharded": Sharded(mlp, _MLP, (P(), P(), P(), P()), P("data")),
    "another dimension wanted sharded": Sharded(mlp, _MLP, (P("data"), P(), P(), P()), P(None, "data")),
    "batch over both axes": Sharded(mlp, _MLP, (P(("data", "model")), P(), P(), P())),
    "tensor parallel": Sharded(mlp, _MLP, _TENSOR_MLP, wrt=(0, 1, 2, 3)),
    "tensor parallel, gelu": Sharded(activated(jax.nn.gelu), _MLP, _TENSOR_MLP, wrt=(0, 1, 2, 3)),
    "tensor parallel, exact gelu": Sharded(
        activated(lambda x: jax.nn.gelu(x, approximate=False)), _MLP, _TENSOR_MLP, wrt=(0, 1, 2, 3)
    ),
    "tensor parallel, silu": Sharded(activated(jax.nn.silu), _MLP, _TENSOR_MLP, wrt=(0, 1, 2, 3)),
    "contracted": Sharded(mlp, _MLP, (P(None, "model"), P("model"), P(), P())),
    "fully sharded": Sharded(mlp, _MLP, (P("data"), P("data"), P(), P("data")), wrt=(1, 3)),
    "few rows, fully sharded by columns": Sharded(
        mlp, (_normal(16, 64), *_FEW), (P("data"), P(None, "data"), P("data"), P(None, "data")), wrt=(1, 2, 3)
    ),
    "train step": Sharded(train_step, _MLP, (P("data"), P(), P(), P())),
    "train step, fully sharded, whole bias": Sharded(
        train_step, _MLP, (P("data"), P("data"), P(), P("data")), (P(), [P("data"), P(), P("data")])
    ),
    "attention over batches": Sharded(attention, _QKV, (P("data"),) * 3, wrt=(0, 1, 2)),
    "attention over batches and heads": Sharded(attention, _QKV, (P("data", None, "model"),) * 3, wrt=(0, 1, 2)),
    "attention over queries": Sharded(attention, _QKV, (P(None, "data"), P(), P()), wrt=(0, 1, 2)),
    "attention over queries and keys": Sharded(attention, _QKV, (P(None, "data"),) * 3),
    "attention over keys": Sharded(attention, _QKV, (P(), P(None, "data"), P(None, "data"))),
    "layer, tensor parallel": Sharded(layer, _LAYER, _TENSOR_LAYER, wrt=(0, *_ALL)),
    "layer, fully sharded": Sharded(layer, _LAYER, (P("data"),) * 7, wrt=_ALL),
    "layers, fully sharded": Sharded(layers, _LAYERS, (P("data"), *(P(None, "data"),) * 6), wrt=_ALL),
    "layers, recomputed": Sharded(layers_again, _LAYERS, (P("data"), *(P(None, "data"),) * 6), wrt=_ALL),
    "edges": Sharded(
        message, (_NODES, *_EDGES, _normal(64, 32), _normal(32, 32)), (P(), P("data"), P("data"), P(), P()), wrt=(0, 3, 4)
    ),
    "edges and nodes": Sharded(
        message, (_NODES, *_EDGES, _normal(64, 32), _normal(32, 32)), (P("data"), P("data"), P("data"), P(), P()), wrt=(0, 3, 4)
    ),
    "graph attention": Sharded(
        graph_attention,
        (_NODES, *_EDGES, _normal(32, 32), _normal(32), _normal(32)),
        (P(), P("data"), P("data"), P(), P(), P()),
        wrt=(0, 3, 4, 5),
    ),
    "tables by row": Sharded(
        embedded,
        (_normal(1024, 16), _rng.integers(-5, 1030, (64, 4)).astype(np.int32), _normal(64, 8)),
        (P("model"), P("data"), P()),
        wrt=(0, 2),
    ),
    "tables by row, as the batch": Sharded(embedded, _TABLE, (P("data"), P("data"), P()), wrt=(0, 2)),
    "tables by row over both axes": Sharded(embedded, _TABLE, (P(("data", "model")), P("data"), P()), wrt=(0, 2)),
    "a token decoded": Sharded(
        decoded,
        (*(_normal(2, 4, n, 16) for n in (1, 512, 512, 1, 1)), np.int32(37)),
        (P(), P(None, None, "data"), P(None, None, "data"), P(), P(), P()),
        (P(), P(None, None, "data"), P(None, None, "data")),
    ),
    # Products and sums that read nothing but broadcasts of sharded arrays.
    "radial basis": Sharded(radial, (_MLP[0], _normal(64, 32), _normal(64, 16)), (P("data"), P(), P()), wrt=(0, 1, 2)),
    "one-hot rows": Sharded(looked_up, (np.arange(64, dtype=np.int32) % 32, _normal(32, 24)), (P("data"), P()), wrt=(1,)),
    "encoded positions": Sharded(encoded, (_normal(64, 3), _normal(18, 32)), (P("data"), P()), wrt=(0, 1)),
    "any and all": Sharded(checks, (_MLP[0], _MLP[1]), (P("data"), P(None, "model"))),
    "multiplied up": Sharded(multiplied, (_MLP[0], np.arange(48, dtype=np.int32) % 3), (P("data"), P("data"))),
    "recurrent": Sharded(
        recurrent, (_normal(10, 64, 16), _normal(16, 32), _normal(32, 32)), (P(None, "data"), P(), P()), wrt=(0, 1, 2)
    ),
    "recurrent, hidden": Sharded(
        recurrent, (_normal(10, 64, 16), _normal(16, 32), _normal(32, 32)), (P(), P(None, "model"), P(None, "model"))
    ),
    "recurrent, gates": Sharded(
        lstm,
        (_normal(10, 64, 16), _normal(16, 128), _normal(32, 128), _normal(128)),
        (P(None, "data"), P(None, "model"), P(None, "model"), P("model")),
        wrt=(1, 2, 3),
    ),
    "two products as one": Sharded(
        gated, (_normal(48, 32), _normal(32, 128), _normal(64, 16)), (P("data"), P(None, "model"), P("model")), wrt=(0, 1, 2)
    ),
    "three products as one": Sharded(
        self_attention, (_LAYER[0], _normal(32, 96), _normal(32, 32)), (P("data"), P(None, "model"), P("model")), wrt=(0, 1, 2)
    ),
    "rolled rows": Sharded(lambda x, w: jnp.roll(x, 1, 0) @ w, (_MLP[0], _MLP[1]), (P("data"), P())),
    "rolled columns": Sharded(lambda x, w: jnp.tanh(jnp.roll(x @ w, 3, 1)), (_MLP[0], _MLP[1]), (P("data"), P(None, "model"))),
    "a stencil": Sharded(stencil, (_normal(48, 32), _normal(32, 32)), (P("data"), P())),
    "a loop that depends on data": Sharded(until_large, (_normal(48, 32), _normal(32, 64)), (P("data"), P())),
    "second derivative": Sharded(
        lambda x, w1, b1, w2: jax.jvp(jax.grad(lambda w: jnp.sum(mlp(x, w, b1, w2) ** 2)), (w1,), (w1,))[1],
        _MLP,
        (P("data"), P(), P(), P()),
    ),
    "vmap": Sharded(jax.vmap(mlp, (0, None, None, None)), (_normal(8, 6, 32), *_MLP[1:]), (P("data"), P(), P(), P())),
    "a softmax over columns": Sharded(lambda x, w: jax.nn.softmax(x @ w, -1), (_MLP[0], _MLP[1]), (P("data"), P(None, "model"))),
    "a maximum and where": Sharded(lambda x, w: (jnp.max(x @ w, 0), jnp.argmax(x @ w, 0)), (_MLP[0], _MLP[1]), (P("data"), P())),
    "cumulative and sorted": Sharded(lambda x, w: jnp.cumsum(jnp.sort(x @ w, 0), 1), (_MLP[0], _MLP[1]), (P("data"), P())),
    "cumulative rows": Sharded(lambda x, w: jnp.cumsum(jnp.tanh(x @ w), 0) @ w.T, (_MLP[0], _MLP[1]), (P("data"), P()), wrt=(0, 1)),
    "cumulative rows, backwards": Sharded(
        lambda x, w: jax.lax.cummax(jnp.tanh(x @ w), 0, reverse=True) @ w.T, (_MLP[0], _MLP[1]), (P(("data", "model")), P())
    ),
    "flipped rows": Sharded(lambda x, w: jnp.flip(jnp.tanh(x @ w), 0) @ w.T, (_MLP[0], _MLP[1]), (P("data"), P()), wrt=(0, 1)),
    "sorted rows": Sharded(lambda x, w: jnp.sort(jnp.tanh(x @ w), 0) @ w.T, (_MLP[0], _MLP[1]), (P("data"), P())),
    "bfloat16": Sharded(
        lambda x, w1, w2: jnp.tanh(x @ w1) @ w2,
        tuple(jnp.asarray(a, jnp.bfloat16) for a in (_MLP[0], _MLP[1], _MLP[3])),
        (P("data"), P(None, "model"), P("model")),
    ),
}
_ROWS = {
    "attention": ((0, 0), (1, 0), (2, 0)),
    "attention over keys": ((1, 1), (2, 1)),
    "edges": ((1, 0), (2, 0)),
    "graph": ((1, 0), (2, 0)),
    "tables": ((1, 0),),
    "a token": tuple((k, 0) for k in range(5)),
    "multiplied": ((0, 0), (1, 0)),
    "recurrent": ((0, 1),),
}
for _start, _rows in _ROWS.items():
    PROGRAMS |= {n: dataclasses.replace(p, rows=_rows) for n, p in PROGRAMS.items() if n.startswith(_start)}
PROGRAMS |= {f"gradient of {name}": _grad(program) for name, program in PROGRAMS.items() if program.wrt}
_PARAMETERS = "fully sharded", "few rows, fully sharded by columns", "layer, fully sharded", "layers, fully sharded"
for _name in (*_PARAMETERS, *(n for n in PROGRAMS if n.startswith("tables"))):
    _program = PROGRAMS[_name]
    PROGRAMS[f"gradient of {_name}, sharded as the parameters"] = _grad(_program, tuple(_program.specs[k] for k in _program.wrt))
