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
    make = {"mlp": _mlp, "pointwise": _pointwise, "softmax": _softmax, "app": _app, "dlrm": _dlrm, "reduction": _reduction}
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


def _layer_norm(h: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    f = h.astype(jnp.float32)
    f = f - f.mean(-1, keepdims=True)
    f = f * jax.lax.rsqrt((f * f).mean(-1, keepdims=True) + 1e-5)
    return (f * gain.astype(jnp.float32) + bias.astype(jnp.float32)).astype(h.dtype)


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
