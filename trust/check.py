"""One program, run through the pipeline and compared with NumPy in float64.

Comes in: a ``Program``. Goes out: an ``Outcome``. A result may differ from float64 by as much as the roundings of its dtype may
cause. That is measured on the same program, by evaluating its jaxpr with each primitive rounded, several times with the roundings
moved. A program whose results are dominated by roundings is discarded. Before a result counts as wrong, more samples are drawn, and
one of ``jax.jit``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj
from kitsune_jax.errors import forget
from trust.build import Built, build
from trust.primitives import EXACT, Unknown
from trust.program import Invalid, Program
from trust.reference import Arithmetic, Endless, evaluate, inner_jaxprs, roundest

Array = Any
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
FAILURES = ("wrong", "exception", "fallback", "nondeterministic", "hang", "crash")
# Primitives whose result, rounded once, is the same on every machine, beside those that round nothing.
CORRECTLY_ROUNDED = frozenset({"add", "sub", "mul", "div", "sqrt", "add_any", "square", "integer_pow"})
CALL = re.compile(r'custom_call_target="kitsune_cpu"')


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``kind``: "ok", "discarded" or one of ``FAILURES``. ``pipelines``: custom calls in the compiled program."""

    kind: str
    detail: str = ""
    pipelines: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


def check(program: Program, wrap: Wrap | None = None) -> Outcome:
    """Run ``program``. ``wrap``: a replacement of ``kitsune_jax.pipeline`` (for tests of this file)."""
    with _precision(program.dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about numbers while JAX traces; fallbacks are found by ``kj.fallbacks()``
        try:
            built = build(program)
            closed, tree = _traced(built)
            exact = evaluate(closed, built.arguments, Arithmetic(widen=True))
        except Invalid as e:
            return Outcome("discarded", f"invalid: {e}")
        except (Unknown, Endless) as e:
            return Outcome("discarded", f"{type(e).__name__}: {e}")
        return _compare(program, built, closed, tree, exact, wrap or _pipeline(program))


def check_plain(program: Program) -> Outcome:
    """Run ``program`` by ``jax.jit`` alone."""
    with _precision(program.dtype):
        built = build(program)
        jax.block_until_ready(jax.jit(built.function(lambda f: f))(*built.arguments))
    return Outcome("ok")


def _pipeline(program: Program) -> Wrap:
    return lambda f: kj.pipeline(f, force=True if program.force else None, residuals=program.residuals)


def _precision(dtype: str) -> Any:
    if dtype != "float64":
        return contextlib.nullcontext()
    module: Any = jax
    return module.enable_x64(True)


def _traced(built: Built) -> tuple[Any, Any]:
    """The jaxpr of the plain function, and the tree of its result."""
    plain = built.function(lambda f: f)
    try:
        closed, shape = jax.make_jaxpr(plain, return_shape=True)(*built.arguments)
    except Exception as e:  # a program that plain JAX rejects proves nothing
        raise Invalid(f"{type(e).__name__}: {e}") from e
    return closed, jax.tree.structure(shape)


def _compare(program: Program, built: Built, closed: Any, tree: Any, exact: list[Array], wrap: Wrap) -> Outcome:
    forget()  # so that each program reports only its own fallbacks
    try:
        compiled = jax.jit(built.function(wrap)).lower(*built.arguments).compile()
        first, second = (jax.block_until_ready(compiled(*built.arguments)) for _ in range(2))
    except Exception as e:
        with contextlib.suppress(Exception):
            jax.block_until_ready(jax.jit(built.function(lambda f: f))(*built.arguments))
            return Outcome("exception", f"{type(e).__name__}: {e}")
        return Outcome("discarded", f"plain JAX fails as well: {type(e).__name__}: {e}")
    pipelines = len(CALL.findall(compiled.as_text() or ""))
    if found := kj.fallbacks():
        return Outcome("fallback", "; ".join(f"{f.part}: {f.reason}" for f in found), pipelines)
    if jax.tree.structure(first) != tree:
        return Outcome("wrong", f"tree {jax.tree.structure(first)} instead of {tree}", pipelines)
    got = [np.asarray(x) for x in jax.tree.leaves(first)]
    for k, (a, b) in enumerate(zip(got, jax.tree.leaves(second), strict=True)):
        if a.tobytes() != np.asarray(b).tobytes():
            return Outcome("nondeterministic", f"result {k}, {a.dtype}{a.shape}, differs between two runs", pipelines)
    avals = closed.out_avals
    for k, (a, aval) in enumerate(zip(got, avals, strict=True)):
        if a.shape != aval.shape or a.dtype != aval.dtype:
            return Outcome("wrong", f"result {k} is {a.dtype}{a.shape} instead of {aval.dtype}{aval.shape}", pipelines)
    samples = [evaluate(closed, built.arguments, Arithmetic())]
    if rounded_one_by_one(closed):
        plain = jax.tree.leaves(jax.jit(built.function(lambda f: f))(*built.arguments))
        for k, (a, want, b) in enumerate(zip(got, samples[0], plain, strict=True)):
            if (wrong := _other_bits(a, want)) and not _other_bits(np.asarray(b), want):
                why = f"result {k}, {a.dtype}{a.shape}: {wrong} elements differ from op by op, where jax.jit has its bits"
                return Outcome("wrong", why, pipelines)
    samples += [evaluate(closed, built.arguments, Arithmetic(jitter=np.random.default_rng(k))) for k in range(2)]
    if why := _ill_conditioned(samples, exact, closed):
        return Outcome("discarded", f"ill-conditioned: {why}", pipelines)
    if not _difference(got, exact, samples):
        return Outcome("ok", "", pipelines)
    samples += [evaluate(closed, built.arguments, Arithmetic(jitter=np.random.default_rng(k))) for k in range(2, 14)]
    plain = [np.asarray(x) for x in jax.tree.leaves(jax.jit(built.function(lambda f: f))(*built.arguments))]
    if why := _ill_conditioned(samples, exact, closed):
        return Outcome("discarded", f"ill-conditioned: {why}", pipelines)
    difference = _difference(got, exact, samples)
    if difference and _difference(got, exact, [*samples, plain]):
        against_plain = "as jax.jit differs too" if _difference(plain, exact, samples) else "jax.jit agrees with NumPy"
        return Outcome("wrong", f"{difference}; {against_plain}", pipelines)
    return Outcome("ok", "", pipelines)


def rounded_one_by_one(closed: Any) -> bool:
    """Is ``closed`` a chain of 16-bit floats whose every bit is determined if each operator rounds its result?"""
    jaxpr = getattr(closed, "jaxpr", closed)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = () if name.startswith("scatter") else inner_jaxprs(eqn)  # a sum is rounded in an order of its own
        if not all(map(rounded_one_by_one, inner)) or not (inner or name in CORRECTLY_ROUNDED or name in EXACT):
            return False
        floats = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars) if _is_float(v.aval.dtype)]
        if any(jnp.dtype(d).itemsize != 2 for d in floats) or len(set(floats)) > 1:
            return False
    return roundest(closed) > 1e-4


def _other_bits(a: Array, b: Array) -> int:
    """The number of elements that are not the same number; subnormal ones are zeros to XLA."""
    if not _is_float(a.dtype):
        return int(np.sum(a != b))
    a, b = (x.astype(np.float32) for x in (a, b))
    tiny = np.float32(2.0**-126)
    return int(np.sum((a != b) & ~(np.isnan(a) & np.isnan(b)) & ~((np.abs(a) <= tiny) & (np.abs(b) <= tiny))))


def _scale(x: Array) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def _errors(samples: Sequence[list[Array]], exact: list[Array], k: int) -> Array:
    """The largest error of the samples at each element of result ``k``; infinite where one is not finite."""
    with np.errstate(all="ignore"):
        off = [np.abs(np.asarray(s[k], np.float64) - np.asarray(exact[k], np.float64)) for s in samples]
        return np.nan_to_num(np.max(off, axis=0), nan=np.inf)


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _ill_conditioned(samples: Sequence[list[Array]], exact: list[Array], closed: Any) -> str:
    avals = closed.out_avals
    most = min(0.25, 0.02 + 32 * roundest(closed))  # relative to the largest element: a larger error makes a comparison useless
    for k, want in enumerate(exact):
        if not want.size or not _is_float(avals[k].dtype):
            continue
        off, scale = _errors(samples, exact, k), _scale(want)
        if not np.isfinite(want).all() and not np.isfinite(want).any():
            return f"result {k} is not finite"
        finite = off[np.isfinite(off)]
        if finite.size < off.size / 2:
            return f"result {k} overflows"
        if finite.size and finite.max() > most * scale + _floor(avals[k].dtype) * 64:
            return f"result {k} is off by {finite.max():.3g} of {scale:.3g} in its own dtype"
    return ""


def _floor(dtype: Any) -> float:
    """The magnitude below which a value is zero to XLA, or has few bits."""
    info = jnp.finfo(dtype)
    return float(info.smallest_subnormal) if dtype == jnp.float16 else float(info.tiny)


def _difference(got: list[Array], exact: list[Array], samples: Sequence[list[Array]]) -> str:
    """A text of how ``got`` differs from ``exact`` by more than the samples' roundings explain; empty if it does not."""
    for k, (a, want) in enumerate(zip(got, exact, strict=True)):
        if not want.size:
            continue
        if not _is_float(a.dtype):
            certain = np.all([np.asarray(s[k]) == want for s in samples], axis=0)
            if wrong := int(np.sum((a != want) & certain)):
                return f"result {k}, {a.dtype}{a.shape}: {wrong} of {a.size} elements differ"
            continue
        eps = float(jnp.finfo(a.dtype).eps)
        off = _errors(samples, exact, k)
        usable = np.isfinite(want) & np.isfinite(off)
        if not usable.any():
            continue
        scale, worst = _scale(want), float(off[usable].max())
        with np.errstate(all="ignore"):
            limit = 16 * (eps * np.abs(want) + off) + 4 * (eps * scale + worst) + 16 * _floor(a.dtype)
            error = np.abs(a.astype(np.float64) - want)
        bad = usable & ~(error <= limit)
        if bad.any():
            at = np.unravel_index(int(np.argmax(np.where(bad, np.nan_to_num(error / limit, nan=np.inf), -1))), a.shape)
            where = f"[{', '.join(map(str, at))}]" if at else ""
            return (
                f"result {k}, {a.dtype}{a.shape}, is {float(a[at]):.6g} at {where} instead of {float(want[at]):.6g} "
                f"(limit {float(limit[at]):.3g}, {int(bad.sum())} of {a.size} elements)"
            )
    return ""


def finite_differences(program: Program, seed: int = 0) -> tuple[float, float] | None:
    """The slope of a gradient program's objective along a random direction: (by its gradients, by differences of its values).

    Both in float64 by NumPy, so that JAX's derivative rules are checked as well. ``None`` for any other program than a
    "value_and_grad".
    """
    if program.transform != "value_and_grad":
        return None
    with _precision("float64"):
        built = build(dataclasses.replace(program, dtype="float64"))
        closed, _ = _traced(built)
        rng = np.random.default_rng(seed)
        moves: list[Any] = [rng.standard_normal(a.shape) if _is_float(a.dtype) else None for a in built.arguments]
        by_rule = _slope(program, built, closed, moves)
        step = 1e-6

        def value(sign: float) -> float:
            chosen = _chosen(program, built)
            args = [a + sign * step * moves[k] if k in chosen else a for k, a in enumerate(built.arguments)]
            return float(evaluate(closed, args, Arithmetic(widen=True))[0])

        return by_rule, (value(1) - value(-1)) / (2 * step)


def _chosen(program: Program, built: Built) -> tuple[int, ...]:
    from trust.program import Digits
    from trust.transforms import Callee, objective

    choices = Digits(program.transform_choice)
    callee = Callee(lambda *args: (), built.specs, program)
    objective(callee, choices)
    return callee.some(choices)


def _slope(program: Program, built: Built, closed: Any, moves: Sequence[Array]) -> float:
    _, *slopes = evaluate(closed, built.arguments, Arithmetic(widen=True))
    return float(sum(np.sum(s * moves[k]) for k, s in zip(_chosen(program, built), slopes, strict=True)))
