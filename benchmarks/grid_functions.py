"""The functions of the grid: a ``GridCase`` in, a ``Problem`` out.

Inputs are random normal: zeros run faster than data. Layer norms and losses are computed in float32, as model libraries do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.ode import odeint

from benchmarks.apps import make_case
from benchmarks.grid_cases import DLRM_BOTTOM, DLRM_TABLES, DLRM_TOP, GridCase
from benchmarks.training import make_train_case, train_step

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "tanh": jnp.tanh,
    "none": lambda x: x,
}
# How far two correct programs of the same function may be apart, by dtype: rounding differs in every layer and adds up.
_TOLERANCE = {"f32": 2e-3, "bf16": 0.2, "f16": 0.03}
_RATE = 0.1  # of SGD: high, so that an update is not lost in the rounding of a 16-bit parameter


@dataclasses.dataclass(frozen=True)
class Problem:
    """``error(got, want)``: how far two results of ``function(*args)`` are apart; more than ``tolerance`` is a wrong result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    error: Callable[[Any, Any], float]
    tolerance: float


def make_problem(case: GridCase, seed: int = 0) -> Problem:
    make = {
        "mlp": _mlp,
        "pointwise": _pointwise,
        "softmax": _softmax,
        "app": _app,
        "dlrm": _dlrm,
        "reduction": _reduction,
        "program": _program,
    }
    return make[case.kind](case, np.random.default_rng(seed))


def row_error(got: Any, want: Any) -> float:
    """The largest error of a row in norm, relative to the larger of the row's own norm and the average row's. A NaN that only one
    of the two has is an infinite error."""
    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(a).astype(np.float32).reshape(a.shape[0] if a.ndim else 1, -1) for a in (g, w))
        if not np.array_equal(np.isnan(g), np.isnan(w)):
            return float("inf")
        size = np.linalg.norm(np.nan_to_num(w), axis=1)
        base = np.maximum(size, np.sqrt(np.mean(size**2)))
        apart = np.linalg.norm(np.nan_to_num(g - w), axis=1)
        worst = max(worst, float(np.max(apart / np.where(base == 0, 1, base), initial=0.0)))
    return worst


def update_error(old: Any) -> Callable[[Any, Any], float]:
    """The error of a step's (new parameters, loss): of the loss, and in norm of what each parameter was changed by.

    A changed parameter is rounded to its dtype, which may well be more than the change: the part of the error that this explains
    does not count.
    """

    def error(got: Any, want: Any) -> float:
        worst = row_error(got[1], want[1])
        for before, g, w in zip(*(jax.tree.leaves(tree) for tree in (old, got[0], want[0])), strict=True):
            rounding = float(jnp.finfo(before.dtype).eps)
            before, g, w = (np.asarray(a).astype(np.float32) for a in (before, g, w))
            apart, change = float(np.linalg.norm(g - w)), float(np.linalg.norm(w - before))
            if np.isnan(apart):
                return float("inf")
            beyond = apart - rounding * float(np.linalg.norm(w))
            worst = max(worst, beyond / change if change else beyond)
        return worst

    return error


def gradient_error(got: Any, want: Any) -> float:
    """The error of a (value, gradient): of each array in norm. A gradient's small entries are sums of large ones."""
    return max(row_error(jnp.ravel(g)[None], jnp.ravel(w)[None]) for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True))


def _array(rng: np.random.Generator, case: GridCase, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale), DTYPES[case.dtype])


def _sgd(network: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of ``network(params, x)`` towards ``y``: squared error by rows, its gradient, and the parameters less a part of it."""

    def step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            difference = network(params, x).astype(jnp.float32) - y.astype(jnp.float32)
            return jnp.sum(difference**2) / x.shape[0]

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - jnp.asarray(_RATE, p.dtype) * g, params, grads), value

    return step


def _problem(case: GridCase, rng: np.random.Generator, network: Callable[..., jax.Array], params: Any) -> Problem:
    x = _array(rng, case, case.rows, case.width)
    tolerance = _TOLERANCE[case.dtype]
    if case.mode == "infer":
        return Problem(network, (params, x), row_error, tolerance)
    return Problem(_sgd(network), (params, x, _array(rng, case, case.rows, case.width)), update_error(params), tolerance)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _layer_norm(h: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    f = _widened(h)
    f = f - f.mean(-1, keepdims=True)
    f = f * jax.lax.rsqrt((f * f).mean(-1, keepdims=True) + 1e-5)
    return (f * _widened(gain) + _widened(bias)).astype(h.dtype)


def _mlp(case: GridCase, rng: np.random.Generator) -> Problem:
    activation = _ACTIVATIONS[case.activation]
    scale = (2.0 if case.activation in ("relu", "silu", "gelu") else 1.0) ** 0.5 * case.width**-0.5
    params = []
    for k in range(case.depth):
        layer = {"w": _array(rng, case, case.width, case.width, scale=scale), "b": _array(rng, case, case.width, scale=0.1)}
        if case.norm and k:
            layer |= {"gain": 1 + _array(rng, case, case.width, scale=0.1), "bias": _array(rng, case, case.width, scale=0.1)}
        params.append(layer)

    def mlp(params: Any, x: jax.Array) -> jax.Array:
        h = x
        for layer in params:
            if "gain" in layer:
                h = _layer_norm(h, layer["gain"], layer["bias"])
            h = activation(h @ layer["w"] + layer["b"])
        return h

    return _problem(case, rng, mlp, params)


def _pointwise(case: GridCase, rng: np.random.Generator) -> Problem:
    activation = _ACTIVATIONS[case.activation]
    params = [(1 + _array(rng, case, case.width, scale=0.1), _array(rng, case, case.width, scale=0.1)) for _ in range(case.depth)]

    def chain(params: Any, x: jax.Array) -> jax.Array:
        for scale, shift in params:
            x = activation(x * scale + shift)
        return x

    return _problem(case, rng, chain, params)


def _softmax(case: GridCase, rng: np.random.Generator) -> Problem:
    def softmax(temperature: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x * temperature, axis=-1)

    return _problem(case, rng, softmax, 1 + _array(rng, case, case.width, scale=0.1))


def _neighbours(x: jax.Array) -> jax.Array:
    return jnp.sum((x[:, 1:] - x[:, :-1]) ** 2)


# Of an array of blocks of ``_BLOCK`` rows, where the name has "middle" or "neighbours" in it.
REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "mean of squares, leading": lambda x: (x * x).mean(0),
    "mean of squares, middle": lambda x: (x * x).mean(1),
    "mean of squares, all": lambda x: (x * x).mean(),
    "variance, leading": lambda x: x.var(0),
    "sum of absolute values, middle": lambda x: jnp.abs(x).sum(1),
    "sum of absolute values, all": lambda x: jnp.abs(x).sum(),
    "squared difference, all": lambda x, y: jnp.sum((x - y) ** 2),
    "squared difference of neighbours": _neighbours,
}
_BLOCK = 256


def _reduction(case: GridCase, rng: np.random.Generator) -> Problem:
    blocks = "middle" in case.app or "neighbours" in case.app
    shape = (case.rows // _BLOCK, _BLOCK, case.width) if blocks else (case.rows, case.width)
    count = 2 if case.app == "squared difference, all" else 1
    return Problem(REDUCTIONS[case.app], tuple(_array(rng, case, *shape) for _ in range(count)), row_error, _TOLERANCE[case.dtype])


def _app(case: GridCase, rng: np.random.Generator) -> Problem:
    if case.mode == "infer":
        made = make_case(case.app, case.dtype, case.rows)
        return Problem(made.app.function, (made.params, made.x), row_error, _TOLERANCE[case.dtype])
    train = make_train_case(case.app, case.dtype, case.rows)

    def error(got: Any, want: Any) -> float:
        # Adam's first moment started at zero, so it is the gradient. A gradient's small entries are sums of large ones, so in norm.
        return max(row_error(jax.tree.map(jnp.ravel, got[0].mean[k])[None], want[0].mean[k].ravel()[None]) for k in want[0].mean)

    step = train_step(train.case.app.function)
    return Problem(step, (train.state, train.case.x, train.y), error, _TOLERANCE[case.dtype])


def _dlrm(case: GridCase, rng: np.random.Generator) -> Problem:
    tables, vocabulary, width = DLRM_TABLES
    pairs = np.tril_indices(tables + 1, -1)

    def layers(*widths: int) -> list[tuple[jax.Array, jax.Array]]:
        return [
            (_array(rng, case, a, b, scale=(2.0 / a) ** 0.5), _array(rng, case, b, scale=0.1))
            for a, b in zip(widths, widths[1:], strict=False)
        ]

    params = {
        "bottom": layers(*DLRM_BOTTOM),
        "top": layers(len(pairs[0]) + width, *DLRM_TOP),
        "tables": [_array(rng, case, vocabulary, width, scale=width**-0.5) for _ in range(tables)],
    }
    dense = _array(rng, case, case.rows, DLRM_BOTTOM[0])
    sparse = jnp.asarray(rng.integers(0, vocabulary, (case.rows, tables)), jnp.int32)
    clicked = jnp.asarray(rng.integers(0, 2, case.rows), DTYPES[case.dtype])

    def logits(params: Any, dense: jax.Array, sparse: jax.Array) -> jax.Array:
        h = dense
        for w, b in params["bottom"]:
            h = jax.nn.relu(h @ w + b)
        features = jnp.stack([h, *(table[sparse[:, k]] for k, table in enumerate(params["tables"]))], axis=1)
        products = jnp.einsum("bik,bjk->bij", features, features)
        h = jnp.concatenate([h, products[:, pairs[0], pairs[1]]], axis=-1)
        for w, b in params["top"][:-1]:
            h = jax.nn.relu(h @ w + b)
        w, b = params["top"][-1]
        return (h @ w + b)[:, 0]

    def step(params: Any, dense: jax.Array, sparse: jax.Array, clicked: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            z = logits(params, dense, sparse)
            return jnp.mean(jax.nn.softplus(z) - clicked * z)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - _RATE * g, params, grads), value

    return Problem(step, (params, dense, sparse, clicked), update_error(params), _TOLERANCE[case.dtype])


def _hash_grid_field(case: GridCase, rng: np.random.Generator) -> Problem:
    """A field over the unit cube: 16 grids of features, hashed into tables and interpolated between eight corners, in front of a
    small network (Mueller et al. 2022, arXiv:2201.05989, whose primes and growth of the grids these are)."""
    levels, entries, features = 16, 1 << 14, 2
    primes = jnp.asarray([1, 2_654_435_761, 805_459_861], jnp.uint32)
    corners = jnp.asarray(np.stack(np.meshgrid(*[[0, 1]] * 3, indexing="ij"), -1).reshape(8, 3), jnp.uint32)
    params = {
        "tables": _array(rng, case, levels, entries, features, scale=0.1),
        "hidden": _array(rng, case, levels * features, 64, scale=0.25),
        "out": _array(rng, case, 64, 4, scale=0.125),
    }
    x = jnp.asarray(rng.random((case.rows, 3)), jnp.float32)

    def encoded(table: jax.Array, x: jax.Array, resolution: int) -> jax.Array:
        scaled = x * resolution
        cell = jnp.floor(scaled)
        at = scaled - cell
        corner = cell.astype(jnp.uint32)[:, None] + corners
        hashed = corner * primes
        index = (hashed[..., 0] ^ hashed[..., 1] ^ hashed[..., 2]) % entries
        weight = jnp.prod(jnp.where(corners[None] == 1, at[:, None], 1 - at[:, None]), -1)
        return jnp.sum(table[index] * weight[..., None], 1)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jnp.concatenate([encoded(params["tables"][k], x, int(16 * 1.32**k)) for k in range(levels)], -1)
        return jnp.mean((jax.nn.relu(h @ params["hidden"]) @ params["out"] - y) ** 2)

    return Problem(jax.value_and_grad(loss), (params, x, _array(rng, case, case.rows, 4)), gradient_error, _TOLERANCE[case.dtype])


def _gaussian_process(case: GridCase, rng: np.random.Generator) -> Problem:
    """The negative log marginal likelihood of a regression with squared exponential kernel and noise (Rasmussen and Williams 2006,
    equation 2.30)."""
    x, y = _array(rng, case, case.rows, 8), _array(rng, case, case.rows)
    params = {"lengths": 1 + _array(rng, case, 8, scale=0.1), "amplitude": jnp.float32(1.0), "noise": jnp.float32(0.5)}

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        scaled = x / params["lengths"]
        squares = jnp.sum((scaled[:, None] - scaled[None]) ** 2, -1)
        kernel = params["amplitude"] ** 2 * jnp.exp(-0.5 * squares) + params["noise"] ** 2 * jnp.eye(len(x), dtype=x.dtype)
        lower = jnp.linalg.cholesky(kernel)
        solved = jax.scipy.linalg.cho_solve((lower, True), y)
        return 0.5 * y @ solved + jnp.sum(jnp.log(jnp.diag(lower)))

    return Problem(jax.value_and_grad(loss), (params, x, y), gradient_error, _TOLERANCE[case.dtype])


def _differential_equation(case: GridCase, rng: np.random.Generator) -> Problem:
    """A neural ordinary differential equation (Chen et al. 2018, arXiv:1806.07366) in adaptive steps of Dormand and Prince, and its
    adjoint, as JAX's ``odeint`` has them."""
    params = [(_array(rng, case, a, b, scale=a**-0.5), _array(rng, case, b, scale=0.1)) for a, b in ((2, 64), (64, 64), (64, 2))]

    def change(state: jax.Array, time: jax.Array, params: Any) -> jax.Array:
        for w, b in params[:-1]:
            state = jnp.tanh(state @ w + b)
        w, b = params[-1]
        return state @ w + b

    def loss(params: Any, first: jax.Array, y: jax.Array) -> jax.Array:
        times = jnp.linspace(0.0, 1.0, 5, dtype=first.dtype)
        return jnp.mean((odeint(change, first, times, params)[-1] - y) ** 2)

    args = (params, _array(rng, case, case.rows, 2), _array(rng, case, case.rows, 2))
    return Problem(jax.value_and_grad(loss), args, gradient_error, _TOLERANCE[case.dtype])


def _language_model(case: GridCase, rng: np.random.Generator) -> Problem:
    """Two blocks of GPT-2's smallest model (Radford et al. 2019), over sequences of 256 of its 50 257 tokens, whose embeddings are
    the last layer too. Of fewer rows one sequence, and of fewer tokens."""
    tokens, width, heads, length = min(50_257, 100 * case.rows), 768, 12, min(256, case.rows)

    def block() -> dict[str, jax.Array]:
        wide = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        found = {name: _array(rng, case, *shape, scale=shape[0] ** -0.5) for name, shape in wide.items()}
        return found | {f"{name} bias": _array(rng, case, shape[1], scale=0.1) for name, shape in wide.items()}

    params = {"tokens": _array(rng, case, tokens, width, scale=0.05), "blocks": [block() for _ in range(2)]}
    params["places"] = _array(rng, case, length, width, scale=0.05)
    params["norms"] = [(1 + _array(rng, case, width, scale=0.1), _array(rng, case, width, scale=0.1)) for _ in range(5)]
    ids = jnp.asarray(rng.integers(0, tokens, (case.rows // length, length + 1)), jnp.int32)

    def layer(p: Any, name: str, x: jax.Array) -> jax.Array:
        return x @ p[name] + p[f"{name} bias"]

    def attention(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in jnp.split(layer(p, "qkv", x), 3, -1))
        return layer(p, "out", jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        norms = iter(params["norms"])
        x = params["tokens"][ids[:, :-1]] + params["places"]
        for p in params["blocks"]:
            x = x + attention(p, _layer_norm(x, *next(norms)))
            x = x + layer(p, "down", jax.nn.gelu(layer(p, "up", _layer_norm(x, *next(norms)))))
        logits = _widened(_layer_norm(x, *next(norms)) @ params["tokens"].T)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], -1))

    return Problem(jax.value_and_grad(loss), (params, ids), gradient_error, _TOLERANCE[case.dtype])


PROGRAMS: dict[str, Callable[[GridCase, np.random.Generator], Problem]] = {
    "hash-grid field": _hash_grid_field,
    "Gaussian process": _gaussian_process,
    "differential equation": _differential_equation,
    "language model": _language_model,
}


def _program(case: GridCase, rng: np.random.Generator) -> Problem:
    return PROGRAMS[case.app](case, rng)
