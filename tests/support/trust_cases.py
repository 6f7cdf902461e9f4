"""Functions as users write them, with arguments that are easy to get wrong, for ``test_trust``.

Comes in: nothing. Goes out: ``CASES``, name -> ``Case``. Invariant: every case but those with ``pipelined=False`` must hold a
custom call when it is forced, and must agree with plain ``jax.jit`` in every value, NaN and infinity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """``tol``: relative and absolute distance from plain JAX; 0 asks for the same bits."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    tol: float = 2e-5
    pipelined: bool = True


CASES: dict[str, Case] = {}
RNG = np.random.default_rng(20)
SPECIAL = np.array([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-38, 1e-40, -1e-45, 7e-46], np.float32)
FLOATS = ("float32", "bfloat16", "float16")
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03, "float16": 4e-3, "float64": 1e-12}


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(jnp.dtype(dtype))


def add(name: str, f: Callable[..., Any], *args: Any, tol: float = 2e-5, pipelined: bool = True) -> None:
    assert name not in CASES
    CASES[name] = Case(f, args, tol, pipelined)


def named(module: Any, name: str) -> Callable[..., Any]:
    """A function of its own, for it may be jitted already."""
    return lambda *args: getattr(module, name)(*args)


def dense(x: Array, w: Array, b: Array) -> Array:
    return jnp.tanh(x @ w + b)


# --- numbers of rows -------------------------------------------------------------------------------------------------------------

for rows in (1, 2, 7, 127, 131, 1009):
    add(f"rows_{rows}", dense, normal(rows, 19), normal(19, 13), normal(13))
    add(f"rows_{rows}_bfloat16", dense, normal(rows, 19, dtype="bfloat16"), normal(19, 13, dtype="bfloat16"),
        normal(13, dtype="bfloat16"), tol=0.03)  # fmt: skip
add("rows_0", dense, normal(0, 19), normal(19, 13), normal(13), pipelined=False)
add("rows_0_with_a_sink", lambda x, w: jnp.sum(jnp.tanh(x @ w), 0), normal(0, 5), normal(5, 4), pipelined=False)
add("no_features", lambda x: jnp.concatenate([jnp.tanh(x), x * 2], 1), normal(9, 0), pipelined=False)
add("nothing_contracted", lambda x, w, y: jnp.tanh(x @ w + y), normal(9, 0), normal(0, 3), normal(9, 3))
add("one_element", lambda x: jnp.tanh(x) * 3, normal(1))
add("one_feature", lambda x, w: jax.nn.relu(x @ w) @ w.T, normal(33, 1), normal(1, 1))

# --- layouts -------------------------------------------------------------------------------------------------------------------

add("numpy_transposed", dense, normal(19, 33).T, normal(13, 19).T, normal(13))
add("numpy_strided", dense, normal(66, 38)[::2, ::2], normal(19, 26)[:, ::-2], normal(26)[::2])
add("numpy_fortran", dense, np.asfortranarray(normal(33, 19)), np.asfortranarray(normal(19, 13)), normal(13))
add("numpy_broadcast", dense, np.broadcast_to(normal(19), (33, 19)), normal(19, 13), normal(13))
add("batch_time_features", dense, normal(3, 11, 19), normal(19, 13), normal(13))
add("batch_time_position", lambda x, p, w: jax.nn.gelu(x + p) @ w, normal(3, 11, 8), normal(11, 8), normal(8, 5))
add("rows_last", lambda x, w: jnp.tanh(w @ x), normal(8, 37), normal(5, 8))
add("rows_in_the_middle", lambda x, w: jnp.einsum("anb,bc->acn", jnp.sin(x), w), normal(3, 11, 4), normal(4, 5))
add("several_streams", lambda x, y, w, v: (jnp.tanh(x @ w) + y @ v, jnp.sin(y), (x * x).sum(1)),
    normal(37, 5), normal(37, 6), normal(5, 7), normal(6, 7))  # fmt: skip


def dense_net(x: Array, *weights: Array) -> Array:
    for w in weights:
        x = jnp.concatenate([x, jax.nn.relu(x @ w)], axis=-1)
    return x


add("dense_net", dense_net, normal(37, 5), normal(5, 6), normal(11, 7), normal(18, 3))
add("partly_streamed_weight_gradient", lambda x, v, c: lax.dot_general(
    jnp.sin(x + v[:, None]), lax.broadcast_in_dim(v * c, x.shape, (0, 2)), (((0, 1), (0, 1)), ((), ()))),
    normal(5, 7, 3), normal(5, 3), normal(3))  # fmt: skip

add("reshape_across_axes", lambda x: jnp.sin(jnp.tanh(x).reshape(4, 6, 5)) * 2, normal(6, 4, 5))
add("stretched_row", lambda x, c: (jnp.sin(jnp.tanh(x) + 1), jnp.broadcast_to(jnp.tanh(x) * 2, (2, 3)) * c),
    normal(1, 3), normal(2, 3))  # fmt: skip
add("one_inner_contracted", lambda x, w: jnp.einsum("rfk,km->rmf", jnp.sin(x), w), normal(9, 97, 1), normal(1, 2))
add("reshape_in_and_out", lambda x, w: jnp.tanh(x.reshape(2, 3, 8, 5) @ w).reshape(12, 4, 3), normal(6, 8, 5), normal(5, 3))

# --- special values --------------------------------------------------------------------------------------------------------------

GRID = np.stack(np.meshgrid(SPECIAL, SPECIAL), -1).reshape(-1, 2)
for op in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "equal", "less", "greater_equal", "nextafter", "fmod"):
    add(f"special_{op}", named(jnp, op), GRID[:, 0], GRID[:, 1], tol=0.0)
NORMAL = GRID[np.all((GRID == 0) | (np.abs(GRID) > 1e-37) | np.isnan(GRID), axis=1)]
add("special_arctan2", jnp.arctan2, NORMAL[:, 0], NORMAL[:, 1], tol=3e-7)
add("special_power", jnp.power, NORMAL[:, 0], NORMAL[:, 1], tol=3e-6)
for op in ("abs", "sign", "floor", "ceil", "round", "isfinite", "isnan", "negative", "square", "sqrt"):
    add(f"special_{op}", named(jnp, op), SPECIAL, tol=0.0)
for op in ("exp", "log", "log1p", "expm1", "tanh", "sin", "cos", "reciprocal", "cbrt", "arcsinh"):
    add(f"special_{op}", named(jnp, op), SPECIAL[:9], tol=1e-6)
for op in ("relu", "silu", "gelu", "sigmoid", "softplus", "elu", "leaky_relu", "log_sigmoid"):
    add(f"special_{op}", named(jax.nn, op), SPECIAL[:7], tol=1e-6)
add("special_where", lambda x, y: jnp.where(x > y, x, -y), GRID[:, 0], GRID[:, 1], tol=0.0)
add("special_clip", lambda x: jnp.clip(x, -2.0, 1.0), SPECIAL, tol=0.0)
MATRIX = np.concatenate([normal(6, 5), np.tile(SPECIAL[:, None], (1, 5))])
MATRIX[6:, 1:] = normal(13, 4)
add("special_matmul", lambda x, w: x @ w, MATRIX[:-6], normal(5, 4))
add("special_matmul_relu", lambda x, w: jax.nn.relu(x @ w), MATRIX[:-6], normal(5, 4))
add("special_reductions", lambda x: (x.max(1), x.min(1), x.sum(1)), MATRIX[:-6])
add("special_sinks", lambda x: (jnp.max(x * 1, 0), jnp.min(x * 1, 0)), MATRIX)
add("special_softmax", lambda x: (jax.nn.softmax(x, 1), jax.nn.logsumexp(x, 1)), MATRIX[:-6])
add("all_minus_infinity", lambda x: (x.max(1), jax.nn.logsumexp(x, 1), jnp.max(x + 0, 0)), np.full((7, 3), -np.inf, np.float32))
add("infinite_weight", lambda x, w: jnp.tanh(x @ w), normal(9, 3), np.array([[np.inf, 1], [0, np.nan], [-1, 2]], np.float32))
add("nan_in_a_weight_gradient", lambda x, y: jnp.sin(x).T @ y, MATRIX[:-6], normal(13, 3))

# --- integers and booleans -------------------------------------------------------------------------------------------------------


def integers(dtype: str, n: int = 61) -> np.ndarray:
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    x[:6] = [0, 1, info.max, info.min, info.max // 2, 3]
    return x


def arithmetic(x: Array, y: Array) -> Any:
    return x + y, x - y, x * y, lax.div(x, y), lax.rem(x, y), jnp.maximum(x, y), x & y, x | ~y, x ^ y, x < y, -x, abs(x)


def shifts(x: Array, y: Array) -> Any:
    shifted = lax.shift_left(x, y), lax.shift_right_logical(x, y), lax.shift_right_arithmetic(x, y)
    return *shifted, lax.population_count(x), lax.clz(x)


def folds(x: Array) -> Any:
    x = x.reshape(-1, 2) + 1
    return x.sum(1), x.sum(0), jnp.prod(x, 0), x.max(0), x.min(), jnp.cumsum(x, 1), jnp.argmax(x, 1), x.sum(), jnp.bitwise_xor(x, 5)


for dtype in ("int8", "int16", "int32", "uint8", "uint16", "uint32"):
    a, b = integers(dtype), integers(dtype)
    b[5:9] = 0
    add(f"arithmetic_{dtype}", arithmetic, a, b, tol=0.0)
    add(f"shifts_{dtype}", shifts, a, (np.arange(61) % 40).astype(dtype), tol=0.0)
    add(f"folds_{dtype}", folds, integers(dtype, 62), tol=0.0)
BITS = RNG.integers(0, 2, (31, 6)).astype(bool)
add("booleans", lambda p, q: (p & q, p | q, p ^ q, ~p, p == q, jnp.where(p, q, ~q)), BITS, BITS[::-1], tol=0.0)
add("boolean_folds", lambda p: ((~p).all(1), (~p).any(1), (~p).any(0), (p | True).all(), p.any(), jnp.argmax(p, 1)), BITS, tol=0.0)
add("counts", lambda x: (jnp.sum(x > 0), jnp.sum(x > 0, 0), jnp.mean(x > 0)), normal(31, 6))
add("casts", lambda x: tuple((x * 100).astype(t) for t in ("int8", "uint8", "int32", "float16", "bfloat16", "bool", "uint32")),
    np.array([0, -0.3, 1.6, 2.5, -3e9, 1e30, np.nan, np.inf, -np.inf], np.float32), tol=0.0)  # fmt: skip

# --- reductions, scans, shapes ---------------------------------------------------------------------------------------------------

TALL = normal(17, 9)
TIES = np.array([[1, 3, 3, 2], [5, 5, 5, 5], [np.nan, 1, np.nan, 9], [-np.inf] * 4, [-0.0, 0.0, -0.0, 0.0]], np.float32)
add("arg_ties", lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1), jnp.argmax(-x, 1)), TIES, tol=0.0)
add("arg_of_several", lambda x: (jnp.argmax(x, 1), jnp.argmin(jnp.abs(x), 2)), normal(9, 5, 3), tol=0.0)
add("cumulative", lambda x: (jnp.cumsum(x, 1), jnp.cumprod(x, 1), lax.cummax(x, 1), lax.cummin(x, 1)), normal(9, 7))
add("cumulative_reversed", lambda x: (lax.cumsum(x, 1, True), lax.cumprod(x, 1, True), lax.cumlogsumexp(x, 1, True)), normal(9, 7))
for name, padding in {"negative": (-2, 1, 0), "interior": (2, 0, 3), "mixed": (2, -1, 3), "all_cut": (-4, -3, 2)}.items():
    add(f"pad_{name}", lambda x, p=padding: lax.pad(jnp.sin(x), np.float32(9), ((0, 0, 0), p)) * 2, normal(9, 7))
add("reductions", lambda x: (x.sum(1), x.mean(1), x.prod(1), x.max(1), x.min(1), x.std(1), jnp.linalg.norm(x, axis=1)), TALL)
add("reductions_of_two", lambda x: (x.sum((1, 2)), x.max((0, 2)), x.mean((0, 1, 2)), x.prod(2)), normal(17, 3, 4))
add("sinks", lambda x: (x.sum(0), jnp.mean(x * x), x.max(0), x.min(0), x.prod(0), x.var(0)), normal(37, 5) * 0.5, tol=1e-5)
add("slices", lambda x: (x[:, ::-2], x[:, 2:5], jnp.roll(x, 2, 1), jnp.tile(x, (1, 2)), x[:, None].repeat(2, 1)), normal(9, 7))
add("rows_sliced", lambda x: jnp.sin(x)[1:-1] + jnp.cos(x)[2:], normal(19, 7))
add("stacked", lambda x, y: jnp.stack([jnp.sin(x), y], 1).reshape(9, -1), normal(9, 7), normal(9, 7))

# --- layers ----------------------------------------------------------------------------------------------------------------------


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(x: Array, scale: Array) -> Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def swiglu(x: Array, w: Array, v: Array, out: Array) -> Array:
    return (jax.nn.silu(x @ w) * (x @ v)) @ out


for dtype in FLOATS:
    row, scale, shift = normal(23, 16, dtype=dtype), normal(16, dtype=dtype), normal(16, dtype=dtype)
    up, down = (0.25 * normal(16, 24)).astype(row.dtype), (0.25 * normal(24, 16)).astype(row.dtype)
    tolerance = TOLERANCE[dtype]
    add(f"layer_norm_{dtype}", layer_norm, row, scale, shift, tol=2 * tolerance)
    add(f"rms_norm_{dtype}", rms_norm, row, scale, tol=tolerance)
    add(f"standardize_{dtype}", lambda x: jax.nn.standardize(x), row, tol=2 * tolerance)
    for activation in ("relu", "silu", "gelu", "softmax", "log_softmax", "sigmoid", "softplus", "elu", "mish", "glu"):
        add(f"{activation}_{dtype}", named(jax.nn, activation), row, tol=tolerance)
    add(f"logsumexp_{dtype}", lambda x: jax.nn.logsumexp(x, axis=-1), row, tol=tolerance)
    add(f"gelu_exact_{dtype}", lambda x: jax.nn.gelu(x, approximate=False), row, tol=tolerance)
    add(f"swiglu_{dtype}", swiglu, row, up, up, down, tol=tolerance)
    add(f"gradient_{dtype}", jax.grad(lambda w, x, v, out: jnp.mean(swiglu(x, w, v, out).astype(jnp.float32) ** 2), (0, 1)),
        up, row, up, down, tol=tolerance)  # fmt: skip

# --- weak types and scalars ------------------------------------------------------------------------------------------------------

add("python_scalar_argument", lambda x, s: x * s + 1, normal(9, 3), 2.5)
add("python_int_argument", lambda x, s: (x * s, s + 1), normal(9, 3), 3)
add("numpy_scalar_argument", lambda x, s: x * s, normal(9, 3, dtype="bfloat16"), np.float32(2.5), tol=0.02)
add("jax_scalar_argument", lambda x, s: x * s, normal(9, 3, dtype="bfloat16"), jnp.bfloat16(2.5), tol=0.02)
add("weak_results", lambda x: (jnp.full((9, 3), 2.0) * x, jnp.where(x > 0, 1.0, 0.0), lax.full_like(x, 2)),
    normal(9, 3, dtype="float16"))  # fmt: skip
add("rank_0", lambda a, b: jnp.sin(a) * b + 1, np.float32(0.3), 2.0, pipelined=False)
add("nothing_to_do", lambda x: x, normal(9, 3), pipelined=False)
add("only_a_constant", lambda x: jnp.zeros(3), normal(9, 3), pipelined=False)

# --- ops the pipeline does not know, in the middle ------------------------------------------------------------------------------

add("sort_between", lambda x, w: jnp.tanh(jnp.sort(jnp.tanh(x @ w), axis=-1) @ w.T), normal(19, 5), normal(5, 7))
add("fft_between", lambda x, w: jnp.abs(jnp.fft.rfft(jnp.tanh(x @ w), axis=-1)) * 2, normal(19, 5), normal(5, 8))
add("gather_between", lambda x, i, w: jnp.tanh(jnp.sin(x)[i] @ w), normal(19, 5), np.arange(19)[::-1].copy(), normal(5, 7))
add("scatter_between", lambda x, w: jnp.tanh(x @ w).at[::2].add(1.0) * 2, normal(19, 5), normal(5, 7))
add("convolution_between", lambda x, k: jnp.sin(lax.conv_general_dilated(jnp.cos(x)[:, None], k, (1,), "SAME"))[:, 0] * 2,
    normal(19, 9), normal(1, 1, 3))  # fmt: skip
add("cholesky_between", lambda x: jnp.linalg.cholesky(jnp.tanh(x) @ jnp.tanh(x).T + 10 * jnp.eye(7)) * 2, normal(7, 5))
add("scan_between", lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), jnp.sin(x), None, length=3),
    normal(19, 5), normal(5, 5))  # fmt: skip
add("random_between", lambda x: jnp.tanh(x) + jax.random.normal(jax.random.key(0), x.shape), normal(19, 5))
add("complex_between", lambda x: jnp.real(lax.complex(jnp.sin(x), x) ** 2) * 3, normal(19, 5))
for dtype in ("bfloat16", "float16", "int8", "uint8", "int32", "float32"):
    add(f"iota_{dtype}", lambda x, dtype=dtype: (
        (lax.broadcasted_iota(dtype, (523, 3), 0) + x.astype(dtype)), lax.broadcasted_iota(dtype, (523, 3), 1) * x.astype(dtype),
        lax.broadcasted_iota(dtype, (1, 523), 1)[0] * x[:, 0].astype(dtype)), np.ones((523, 3), np.float32), tol=0.0)  # fmt: skip
add("iota_of_extent_1", lambda x: lax.broadcasted_iota(jnp.float32, (9, 1, 4), 1) + x, normal(9, 1, 4))
