"""Every pointwise entry of the op table as a program for a target, at values where operators change their ways.

Comes in: a dtype, and what the target supports. Goes out: one tile program with all entries that it has code for, its operands, and
``disagreement``, which holds a result against the table's NumPy rule, to the tolerance that the entry states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from kitsune_jax.ops.graph import Op, Value, make_params
from kitsune_jax.ops.spec import FORMATS, is_float, np_dtype
from kitsune_jax.ops.table import OPS
from reference.operators import MEANINGS
from tests.support.tiles import Tiles

ROW = ((0,), ())
# Logistic of a bfloat16 by tanh.approx, whose error of 2**-11 is absolute (PTX ISA, tanh).
COARSE_LOGISTIC = 2.0**-11
# Units in the last place of float32 where the entry does not say. In the emulator they are those of glibc's functions (its manual,
# "Known Maximum Errors in Math Functions"), on a CPU those that docs/differences.md promises.
ULPS = {"cuda": 3.0, "cpu": 4.0}
# What no two libraries compute alike at the ends of its domain, and beyond.
SERIES = tuple(kind for kind, spec in OPS.items() if spec.flops >= 40 and not spec.exact)
Supports = Callable[..., str | None]


def evaluate_op(op: Op, *arrays: np.ndarray) -> np.ndarray:
    """The result of ``op`` by its meaning in NumPy, in the dtype of the first operand."""
    return MEANINGS[op.kind].numpy(dict(op.params), *arrays, out_dtype=str(arrays[0].dtype))


def specials(dtype: str) -> np.ndarray:
    """Values at which operators change their ways."""
    if dtype == "bool":
        return np.array([False, True])
    if not is_float(dtype):
        info = np.iinfo(dtype)
        small = [v for v in (-33, -32, -31, -7, -2, -1, 0, 1, 2, 3, 7, 31, 32, 33) if v >= info.min]
        return np.array([info.min, info.min + 1, *small, info.max - 1, info.max], dtype)
    exponent, mantissa = FORMATS[dtype]
    bias = 2 ** (exponent - 1) - 1
    least, most = 2.0 ** (1 - bias), 2.0**bias * (2 - 2.0**-mantissa)
    positive = [
        0.0,
        least * 2.0**-mantissa,
        least / 2,
        least,
        1e-3,
        0.25,
        0.5,
        0.75,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        3.14,
        10.5,
        90.0,
        most,
    ]
    values = [*positive, *(-v for v in positive), float("inf"), float("-inf"), float("nan")]
    return np.array(values, np.float64).astype(np_dtype(dtype))


def sample(rng: np.random.Generator, kind: str, operand: int, dtype: str, n: int) -> np.ndarray:
    """Operands over the domain of ``kind``: integers of all magnitudes, floats around 1."""
    if dtype == "bool" or (kind == "select_n" and operand == 0):
        return rng.integers(0, 2, n).astype(bool)
    if not is_float(dtype):
        info = np.iinfo(dtype)
        near = rng.integers(max(info.min, -9), 10, n).astype(dtype)
        far = rng.integers(info.min, info.max, n, dtype=np.dtype(dtype), endpoint=True)
        return np.where(rng.random(n) < 0.5, near, far)
    domain = MEANINGS[kind].domain if kind else ()
    within = domain[min(operand, len(domain) - 1)] if domain else (-np.inf, np.inf)
    low, high = (within.start, within.stop) if isinstance(within, range) else within
    x = rng.standard_normal(n) * np.exp(rng.uniform(-3, 2, n))
    if isinstance(within, range):
        x = rng.integers(low, high, n)
    elif np.isfinite(high):
        x = rng.uniform(low, high, n)
    elif np.isfinite(low):
        x = low + np.abs(x)
    return np.asarray(x, np.float32).astype(np_dtype(dtype))


def admitted(supports: Supports, kind: str, types: list[str], out: str, params: dict[str, Any]) -> bool:
    values = [Value((64, 8), t) for t in (*types, out)]
    n = len(types)
    return supports(Op(kind, tuple(range(n)), (n,), make_params(**params)), values[:n], values[n:]) is None


def entries(dtype: str, supports: Supports) -> list[tuple[str, dict[str, Any], list[str], str]]:
    """(kind, parameters, dtypes of the operands, dtype of the result) of every pointwise entry that ``supports`` admits."""
    found = []
    for kind, spec in OPS.items():
        if spec.family not in ("pointwise", "convert") or dtype not in spec.dtypes:
            continue
        for params in map(dict, MEANINGS[kind].samples(dtype)):
            types = [dtype] * (spec.arity or 0)
            if kind == "select_n":
                types[0] = "bool"
            out = "bool" if spec.gives == "bool" else params.get("new_dtype", dtype)
            if admitted(supports, kind, types, out, params):
                found.append((kind, params, types, out))
    return found


def operands(dtype: str) -> list[np.ndarray]:
    """Five operands in which every pair of special values meets, rows of 8: the width of which least is unrolled."""
    values = specials(dtype)
    pairs = np.array(list(itertools.product(values, values)), values.dtype)
    n = -(-len(pairs) // 8) * 8
    pairs = pairs[np.arange(n) % len(pairs)]
    others = [values[np.arange(n) * step % len(values)] for step in (7, 5, 3)]
    return [np.ascontiguousarray(a).reshape(-1, 8) for a in (pairs[:, 0], pairs[:, 1], *others)]


def all_pointwise(dtype: str, supports: Supports, without: Collection[str] = ()) -> tuple[Tiles, list[np.ndarray], list[str]]:
    arrays = operands(dtype)
    rows = len(arrays[0])
    t = Tiles((rows,), 64)
    loads = [t.load(a.shape, dtype, ROW) for a in arrays]
    which = (np.arange(arrays[0].size) % 3 == 0).reshape(arrays[0].shape)
    loads.append(t.load(which.shape, "bool", ROW))
    names = []
    for kind, params, types, out in entries(dtype, supports):
        if kind in without:
            continue
        inputs = [loads[-1] if ty == "bool" and dtype != "bool" else loads[k] for k, ty in enumerate(types)]
        y = t.op(kind, *inputs, dtype=out, **params)
        t.store(y, arrays[0].shape, ROW)
        names.append(f"{kind} {params}" if params else kind)
    return t, [*arrays, which], names


def disagreement(name: str, got: np.ndarray, want: np.ndarray, target: str) -> str:
    """What is wrong with the result of an entry ("" if nothing is). A CPU may take subnormal results for zeros."""
    spec, dtype = OPS[name.split()[0]], str(want.dtype)
    assert got.dtype == want.dtype, name
    if not is_float(dtype):
        wrong = got != want
        return f"{name} of {wrong.sum()} values: {got[wrong][:4]} where {want[wrong][:4]} is right" if wrong.any() else ""
    g, w = got.astype(np.float64), want.astype(np.float64)
    mantissa, least = FORMATS[dtype][1], 2 - 2 ** (FORMATS[dtype][0] - 1)
    with np.errstate(all="ignore"):
        unit = np.ldexp(1.0, np.maximum(np.frexp(w)[1] - 1, least) - mantissa)
        allowed = 0 * unit if spec.exact else unit * (MEANINGS[spec.kind].ulps.get(target, ULPS[target]) if mantissa >= 23 else 1)
        if target == "cuda" and spec.kind == "logistic" and dtype == "bfloat16":
            allowed = allowed + COARSE_LOGISTIC
        if target == "cpu":
            allowed = np.where(np.abs(w) < np.ldexp(1.0, least), np.ldexp(1.0, least), allowed)
        wrong = (np.abs(g - w) > allowed) & np.isfinite(w) | (np.isinf(w) & (g != w)) | (np.isnan(g) != np.isnan(w))
    if spec.exact and spec.kind not in ("max", "min", "clamp"):  # where zeros tie, NumPy takes either
        wrong |= (w == 0) & (g == 0) & (np.signbit(g) != np.signbit(w))
    return f"{name} of {wrong.sum()} values: {got[wrong][:4]} where {want[wrong][:4]} is right" if wrong.any() else ""
