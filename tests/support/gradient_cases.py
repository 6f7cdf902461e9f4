"""What the tests of gradients run: for every op of the table functions that hold it, and losses as users write them.

Comes in: nothing. Goes out: ``CASES`` and ``NOT_DIFFERENTIABLE``, which together have every kind of the op table, and ``LOSSES``.
Invariant: a case's function is differentiable at every point of its domain but for a set of measure zero, and values stay near 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Array = Any
ROWS = -1


@dataclasses.dataclass(frozen=True)
class Arg:
    """An operand: uniform in ``domain``, of ``shape`` with ``ROWS`` for the rows. ``dtype``: None is the dtype of the case."""

    domain: tuple[float, float] = (-2.0, 2.0)
    shape: tuple[int, ...] = (ROWS, 5)
    dtype: str | None = None

    def draw(self, rng: np.random.Generator, rows: int, dtype: str) -> np.ndarray:
        shape = tuple(rows if n == ROWS else n for n in self.shape)
        if self.dtype is not None:
            return rng.integers(*map(int, self.domain), shape).astype(self.dtype)
        return rng.uniform(*self.domain, shape).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Case:
    """``f(*arguments)``, differentiated by the arguments that have the dtype of the case. ``casts``: the dtype to
    which it rounds on its way whatever that is, so finite differences see steps.
    """

    f: Callable[..., Any]
    args: tuple[Arg, ...] = (Arg(),)
    casts: str = ""

    def precision(self, dtype: str) -> str:
        """The coarser of the dtype of the case and of what it casts to."""
        return max((dtype, self.casts or dtype), key=lambda name: float(jnp.finfo(name).eps))

    def arguments(self, rows: int, dtype: str, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(differentiated, others): ``f`` takes them in the order of ``args``."""
        rng = np.random.default_rng(seed)
        drawn = [a.draw(rng, rows, dtype) for a in self.args]
        return [x for a, x in zip(self.args, drawn) if a.dtype is None], [
            x for a, x in zip(self.args, drawn) if a.dtype is not None
        ]

    def call(self, differentiated: list[Array], others: list[Array]) -> Array:
        mine, given = iter(differentiated), iter(others)
        return self.f(*(next(mine if a.dtype is None else given) for a in self.args))


def _unary(function: Callable[..., Any], low: float = -2.0, high: float = 2.0) -> tuple[Case, ...]:
    return (Case(function, (Arg((low, high)),)),)


def _binary(function: Callable[..., Any], first: Arg = Arg(), second: Arg = Arg()) -> tuple[Case, ...]:
    """Of two streamed operands, and with a row of numbers that every row shares."""
    shared = dataclasses.replace(second, shape=second.shape[1:])
    return (
        Case(function, (first, second)),
        Case(lambda x, y: function(x, jnp.broadcast_to(y, x.shape)), (first, shared)),
    )


POSITIVE = Arg((0.3, 2.5))
SMALL = Arg((0.7, 1.4), (ROWS, 4))
FLAGS = Arg((0, 2), dtype="bool")
CUBE = (Arg(shape=(ROWS, 3, 4)),)
START = Arg((-3, 7), (), dtype="int32")  # of a slice; out of range it is the nearest
TABLE, IDS = Arg(shape=(6, 5)), Arg((-2, 8), (ROWS,), dtype="int32")  # some are out of range


def _round_trip(dtype: str) -> Callable[[Array], Array]:
    return lambda x: jnp.sin(x.astype(dtype)).astype(x.dtype) * x


def _along(function: Callable[..., Any]) -> tuple[Case, ...]:
    return tuple(Case(lambda x, r=r: function(x, axis=1, reverse=r), (SMALL,)) for r in (False, True))


def _softmax_sum(x: Array, score: Array, ids: Array) -> Array:
    """The mean of the rows of each segment, weighted by the softmax of their scores."""
    of_rows = jnp.clip(ids, 0, 5)
    weight = jnp.exp(score - lax.stop_gradient(jax.ops.segment_max(score, of_rows, 6))[of_rows])
    share = weight / jax.ops.segment_sum(weight, of_rows, 6)[of_rows]
    return jax.ops.segment_sum(jnp.sin(x) * share[:, None], of_rows, 6)


def _recurrence(x: Array, w: Array, u: Array) -> Array:
    """A weight and a bias row in every step, slices in and out, and a carry that is replaced, not added to."""

    def step(h: Array, scale: Array) -> tuple[Array, Array]:
        h = jnp.sin((h @ w) * 0.2 + u * scale)
        return h, h * scale

    h, ys = lax.scan(step, x, jnp.linspace(0.5, 1.5, 4).astype(x.dtype))
    return h + ys.sum(0) * x


def _counted(x: Array) -> Array:
    return lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * x + i, x)


CASES: dict[str, tuple[Case, ...]] = {
    **{kind: _unary(getattr(lax, kind)) for kind in ("neg", "abs", "sign", "floor", "ceil", "exp", "exp2", "expm1", "sin", "cos")},
    **{kind: _unary(getattr(lax, kind)) for kind in ("tanh", "logistic", "atan", "sinh", "cosh", "asinh", "erf", "erfc", "square")},
    **{kind: _unary(getattr(lax, kind), 0.2, 3.0) for kind in ("log", "sqrt", "rsqrt", "cbrt", "lgamma", "digamma")},
    **{kind: _unary(getattr(lax, kind), -0.8, 0.8) for kind in ("asin", "acos", "atanh", "erf_inv", "log1p")},
    **{kind: _unary(getattr(lax, kind), 0.1, 2.0) for kind in ("bessel_i0e", "bessel_i1e")},
    "tan": _unary(lax.tan, -1.2, 1.2),
    "acosh": _unary(lax.acosh, 1.2, 4.0),
    "round": (*_unary(lambda x: lax.round(x) + x), *_unary(lambda x: jnp.round(x) * x)),
    "integer_pow": tuple(Case(lambda x, y=y: lax.integer_pow(x, y), (POSITIVE,)) for y in (-2, 3, 7)),
    "reduce_precision": (Case(lambda x: lax.reduce_precision(x, 8, 7) * x, casts="bfloat16"),),
    "copy": (Case(lambda x: lax.reduce_precision(x, 11, 52) * x),),
    "add": _binary(lax.add),
    "sub": _binary(lax.sub),
    "mul": _binary(lax.mul),
    "div": _binary(lax.div, second=POSITIVE),
    "rem": _binary(lax.rem, Arg((3.0, 9.0)), Arg((1.1, 2.5))),
    "max": (*_binary(lax.max), *_unary(jax.nn.relu)),
    "min": _binary(lax.min),
    "pow": (*_binary(lax.pow, POSITIVE), Case(lax.pow, (POSITIVE, Arg((-3, 4), dtype="int32")))),
    "atan2": _binary(lax.atan2, second=POSITIVE),
    "nextafter": _binary(lax.nextafter),
    "igamma": (Case(lax.igamma, (POSITIVE, POSITIVE)),),
    "igammac": (Case(lax.igammac, (POSITIVE, POSITIVE)),),
    "polygamma": (Case(lambda x: lax.polygamma(jnp.full_like(x, 2), x), (Arg((0.8, 3.0)),)),),
    "regularized_incomplete_beta": (
        Case(lambda x: lax.betainc(jnp.full_like(x, 1.5), jnp.full_like(x, 2.5), x), (Arg((0.1, 0.9)),)),
    ),
    "select_n": (Case(lax.select_n, (FLAGS, Arg(), Arg())), Case(lambda x, y: jnp.where(x > y, x * y, x), (Arg(), Arg()))),
    "clamp": (Case(lambda x: lax.clamp(np.asarray(-1, x.dtype), x, np.asarray(0.7, x.dtype)) * x),),
    "convert_element_type": tuple(Case(_round_trip(dtype), casts=dtype) for dtype in ("float32", "bfloat16", "float16")),
    "broadcast_in_dim": (
        Case(lambda x, b: x * b, (Arg(), Arg(shape=(5,)))),
        Case(lambda x, s: jnp.sin(x) * s, (Arg(), Arg(shape=()))),
        Case(lambda x, c: x * c[:, None], (Arg(), Arg(shape=(ROWS,)))),
    ),
    "reshape": (Case(lambda x: jnp.sin(x).reshape(x.shape[0], 12) * 2, CUBE), Case(lambda x: jnp.sin(x.reshape(-1, 4)), CUBE)),
    "transpose": (Case(lambda x: jnp.sin(x).swapaxes(1, 2) * 2, CUBE), Case(lambda x: jnp.sin(x).T * 2)),
    "rev": (Case(lambda x: jnp.sin(x)[:, ::-1] * x),),
    "slice": (Case(lambda x: jnp.sin(x)[:, 1:4] * x[:, :3]), Case(lambda x: jnp.sin(x)[:, 1::2] * 2)),
    "dynamic_slice": (Case(lambda x, i: lax.dynamic_slice_in_dim(jnp.sin(x), i, 2, 1) * 2, (Arg(), START)),),
    "dynamic_update_slice": (
        Case(lambda x, i: lax.dynamic_update_slice_in_dim(jnp.sin(x), x[:, :2] * 2, i, 1) * x, (Arg(), START)),
    ),
    "pad": (Case(lambda x: jnp.sin(lax.pad(x, np.asarray(0.5, x.dtype), ((0, 0, 0), (2, -1, 1)))) * 2),),
    "concatenate": (Case(lambda x, y: jnp.sin(jnp.concatenate([x, y, x * y], 1)), (Arg(), Arg())),),
    "reduce_sum": (Case(lambda x: x * x.sum(1, keepdims=True)), Case(lambda x: jnp.sin(x).sum(0)), Case(lambda x: (x * x).sum())),
    "reduce_prod": (Case(lambda x: x.prod(1), (SMALL,)),),
    "reduce_max": (Case(lambda x: x * x.max(1, keepdims=True)), Case(lambda x: x.max((1, 2)), CUBE)),
    "reduce_min": (Case(lambda x: x * x.min(1, keepdims=True)), Case(lambda x: x.min((1, 2)), CUBE)),
    "cumsum": _along(lax.cumsum),
    "cumprod": _along(lax.cumprod),
    "cummax": _along(lax.cummax),
    "cummin": _along(lax.cummin),
    "cumlogsumexp": _along(lax.cumlogsumexp),
    "take": (
        Case(lambda t, i, x: t[i] * x, (TABLE, IDS, Arg())),
        Case(lambda x, i: jnp.sin(x)[:, i] * x, (Arg(), Arg((-7, 7), (5,), dtype="int32"))),
        Case(lambda x, i, j: jnp.sin(x)[:, i, j] * 2, (*CUBE, *(Arg((-4, 4), (3,), dtype="int32"),) * 2)),
        Case(lambda t, i: jnp.sin(jnp.take(t, i, axis=0, mode="clip")), (TABLE, Arg((-9, 9), (ROWS, 3), dtype="int32"))),
    ),
    "scatter_sum": (
        Case(lambda x, i: jnp.sin(jax.ops.segment_sum(jnp.sin(x), i, 6)), (Arg(), IDS)),
        Case(lambda x, i: jnp.sin(x) * jax.ops.segment_sum(x * x, i, 6, mode="clip")[jnp.clip(i, 0, 5)], (Arg(), IDS)),
        Case(lambda t, x, i: (t * t).at[i].add(jnp.sin(x)), (TABLE, Arg(), IDS)),
    ),
    "scatter_exp_sum": (Case(_softmax_sum, (Arg(), Arg(shape=(ROWS,)), IDS)),),
    "scatter_max": (Case(lambda t, x, i: jnp.sin(t).at[i].max(jnp.sin(x)), (TABLE, Arg(), IDS)),),
    "scatter_min": (Case(lambda t, x, i: jnp.sin(t).at[i].min(jnp.sin(x)), (TABLE, Arg(), IDS)),),
    "scatter_prod": (
        Case(lambda x, y: jnp.sin(y).at[jnp.arange(len(x))].multiply(jnp.sin(x), unique_indices=True), (Arg(), Arg())),
    ),
    "dot_general": (
        Case(lambda x, w: jnp.sin(x @ w), (Arg(), Arg(shape=(5, 7)))),
        Case(lambda x, w: jnp.sin(w @ x.T), (Arg(), Arg(shape=(7, 5)))),
        Case(lambda x, w: jnp.einsum("rhd,hdm->rmh", x, w), (*CUBE, Arg(shape=(3, 4, 2)))),
        Case(lambda x, y: jnp.sin(x).T @ y, (Arg(), Arg())),
        Case(lambda x: jnp.einsum("rif,rjf->rij", jnp.sin(x), x), CUBE),
        Case(lambda x, y: jnp.einsum("rhd,rd->rh", jnp.sin(x), y), (*CUBE, Arg(shape=(ROWS, 4)))),
    ),
    "scan": (Case(_recurrence, (Arg(), Arg(shape=(5, 5)), Arg(shape=(5,)))), Case(_counted)),
}  # fmt: skip

# Differentiable in newer versions of JAX only.
RECENT = ("nextafter",)

NOT_DIFFERENTIABLE: dict[str, str] = {
    **dict.fromkeys(("is_finite", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"), "gives booleans"),
    **dict.fromkeys(("argmax", "argmin"), "gives indices"),
    **dict.fromkeys(("not", "and", "or", "xor", "reduce_and", "reduce_or", "reduce_xor"), "is not defined on floats"),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), "is not defined on floats"),
    **dict.fromkeys(("population_count", "clz", "mulhi", "threefry2x32", "philox4x32"), "is not defined on floats"),
    "bitcast_convert_type": "gives bits",
    "zeta": "JAX defines no derivative",
    "iota": "has no operands",
}


def differentiates(case: Case) -> bool:
    """Does this version of JAX have the derivative?"""
    mine, others = case.arguments(2, "float32", 0)
    try:
        jax.eval_shape(jax.grad(lambda xs: jnp.sum(case.call(xs, others))), mine)
    except NotImplementedError:
        return False
    return True


# --- losses ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loss:
    """``loss(logits, target)``; ``labels``: the target is a class per row, else an array as the logits."""

    f: Callable[[Array, Array], Array]
    labels: bool = False

    def target(self, rng: np.random.Generator, rows: int, classes: int, dtype: str) -> np.ndarray:
        if self.labels:
            return rng.integers(0, classes, rows).astype(np.int32)
        return rng.uniform(0, 1, (rows, classes)).astype(jnp.dtype(dtype))


def _mean_of(loss: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda logits, y: jnp.mean(loss(logits, y))


LOSSES: dict[str, Loss] = {
    "mse": Loss(_mean_of(lambda z, y: (z - y) ** 2)),
    "huber": Loss(_mean_of(optax.huber_loss)),
    "bce_with_logits": Loss(_mean_of(optax.sigmoid_binary_cross_entropy)),
    "integer_labels": Loss(_mean_of(optax.softmax_cross_entropy_with_integer_labels), labels=True),
    "take_along_axis": Loss(
        _mean_of(lambda z, y: jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, y[:, None], -1)[:, 0]), labels=True
    ),
    "indexed": Loss(_mean_of(lambda z, y: -jax.nn.log_softmax(z)[jnp.arange(z.shape[0]), y]), labels=True),
    "vmapped": Loss(_mean_of(lambda z, y: jax.vmap(lambda row, k: jax.nn.logsumexp(row) - row[k])(z, y)), labels=True),
    "one_hot": Loss(_mean_of(lambda z, y: -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, z.shape[1]), -1)), labels=True),
}
