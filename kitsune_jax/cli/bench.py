"""``python -m kitsune_jax bench``: a user's function with ``jax.jit`` beside the same function with pipelines.

Comes in: a function and arguments. Goes out: for each of the two the time of the first call and of later ones, and the largest
difference of their results. Invariant: the two take turns, so that other programs disturb both alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

import kitsune_jax as kj
from kitsune_jax import _compat, progress
from kitsune_jax.cli.functions import Example, users_errors, with_arrays
from kitsune_jax.cli.output import Table
from kitsune_jax.frontend import explain as preview
from kitsune_jax.report.data import plural, time_text

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 1000


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds: of the first call, with tracing and compiling; and of the later ones, their median and quartiles."""

    first: float
    median: float
    lower: float
    upper: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """``error``: the largest difference of two elements over the largest element of their array (``inf``: one result has a NaN or
    an infinity where the other has none). ``calls``: of each, beside the first. ``once``: seconds of the first pipelined call that
    measured this machine and timed plans, or compiled kernels. ``how``: the part of the function that runs as a pipeline."""

    jit: Times
    pipeline: Times
    calls: int
    error: float
    once: float
    how: str

    @property
    def speed(self) -> float:
        """How many times as fast as ``jax.jit``."""
        return self.jit.median / self.pipeline.median

    def to_dict(self) -> dict[str, Any]:
        """For JSON, where ``None`` stands for an error of ``inf``."""
        return {**dataclasses.asdict(self), "speed": self.speed, "error": self.error if math.isfinite(self.error) else None}

    def tables(self, name: str) -> list[Table]:
        rows = [
            (what, *map(time_text, (t.first, t.median)), f"{time_text(t.lower)} to {time_text(t.upper)}")
            for what, t in (("jax.jit", self.jit), ("kj.pipeline", self.pipeline))
        ]
        found = [
            ("speed", f"{self.speed:.2f}x of jax.jit"),
            ("largest error", f"{self.error:.1e} of the largest element of its array"),
            ("pipelined", self.how),
        ]
        if self.once:
            text = "of the first call went into measuring and compiling that is kept on disk, unless other programs disturbed it"
            found.append(("once", f"{time_text(self.once)} {text}"))
        head = ("", "first call", "median", "half of the calls")
        return [Table(f"{name}: {self.calls} calls of each, in turn", rows, head, right=(1, 2, 3)), Table("compared", found)]


def measure(example: Example, seconds: float) -> Comparison:
    """Time ``example`` for about ``seconds`` after the first calls, at least five calls of each. Raises ``UsageError``."""
    args = with_arrays(example.args)
    with users_errors(example.path, f"{example.name} fails with these arguments"):
        of_arrays, arrays = split(args)
        pipelined, calls = with_pipelines(example.function, of_arrays, arrays)
        jax.clear_caches()  # what was traced with pipelines would stay so
        with kj.config.override(disable=True):
            jit, first_jit = _compiled(of_arrays(example.function), arrays)
        jax.clear_caches()
        before = progress.seconds()
        ours, first_ours = _compiled(of_arrays(pipelined), arrays)
        once = progress.seconds() - before
        error = _error(ours(), jit())
        jit_times, our_times = _in_turn(jit, ours, seconds)
        report = kj.explain(example.function)(*args)
    where = f"{plural(calls, 'pipelined call')} inside of it" if calls else "the whole function"
    how = f"{report.ops_pipelined} of {report.ops_total} operators of {where}"
    return Comparison(_times(first_jit, jit_times), _times(first_ours, our_times), len(jit_times), error, once, how)


OfArrays: TypeAlias = Callable[[Callable[..., Any]], Callable[..., list[Any]]]


def with_pipelines(function: Callable[..., Any], of_arrays: OfArrays, arrays: Sequence[Any]) -> tuple[Callable[..., Any], int]:
    """``function`` as it is if it has pipelined calls, else pipelined as a whole; and the number of those calls."""
    calls = preview.pipelined_calls(jax.make_jaxpr(of_arrays(function))(*arrays))
    return function if calls else kj.pipeline(function), len(calls)


def split(args: tuple[Any, ...]) -> tuple[OfArrays, list[Any]]:
    """Makes of a function of ``args`` one of their arrays, which returns the arrays of the result; and these arrays. Other leaves,
    such as strings and functions, are constants of it."""
    leaves, tree = jax.tree.flatten(args)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct) or _compat.valid_jaxtype(leaf)]

    def of_arrays(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        def call(*arrays: Any) -> list[Any]:
            given = dict(zip(places, arrays, strict=True))
            result = function(*jax.tree.unflatten(tree, [given.get(k, leaf) for k, leaf in enumerate(leaves)]))
            return [leaf for leaf in jax.tree.leaves(result) if _compat.valid_jaxtype(leaf)]

        return call

    return of_arrays, [leaves[k] for k in places]


def _compiled(function: Callable[..., list[Any]], arrays: Sequence[Any]) -> tuple[Callable[[], list[Any]], float]:
    """A call of the compiled ``function``, and the seconds of tracing, compiling and the first call."""
    began = time.perf_counter()
    executable = jax.jit(function).lower(*arrays).compile()

    def run() -> list[Any]:
        found: list[Any] = jax.block_until_ready(executable(*arrays))
        return found

    run()
    return run, time.perf_counter() - began


def _in_turn(jit: Callable[[], Any], ours: Callable[[], Any], seconds: float) -> tuple[list[float], list[float]]:
    """The seconds of each call, one of each in a round, which begins with the one and then with the other."""
    times: tuple[list[float], list[float]] = ([], [])
    until, rounds = time.perf_counter() + seconds, 0
    while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and time.perf_counter() < until):
        for which in (0, 1) if rounds % 2 else (1, 0):
            began = time.perf_counter()
            (jit, ours)[which]()
            times[which].append(time.perf_counter() - began)
        rounds += 1
    return times


def _times(first: float, seconds: Sequence[float]) -> Times:
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Times(first, median, lower, upper)


def _error(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    return max((_difference(_numbers(a), _numbers(b)) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _numbers(x: Any) -> np.ndarray:
    x = jax.random.key_data(x) if _compat.is_key(jax.typeof(x)) else x
    exact = np.asarray(x)
    return exact.astype(np.complex128 if np.iscomplexobj(exact) else np.float64)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference over the largest finite element of ``theirs``; ``inf`` where only one of two is finite.

    >>> _difference(np.array([1.0, np.nan]), np.array([2.0, np.nan])), _difference(np.array([np.nan]), np.array([1.0]))
    (0.5, inf)
    """
    finite = np.isfinite(theirs)
    if not np.array_equal(finite, np.isfinite(ours)) or not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.max(np.abs(ours[finite] - theirs[finite])) / (np.max(np.abs(theirs[finite])) or 1.0))
