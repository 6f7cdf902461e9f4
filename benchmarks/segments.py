"""``jax.ops.segment_sum`` and ``segment_max`` alone, against ``jax.jit``.

Comes in: rows, width, segments. Goes out: a table of milliseconds, of the speed against ``jax.jit`` round by round, of the
bytes that must be read and written a second, and of the error against float64. Usage::

    python -m benchmarks.segments                       # 1 000 000 rows of 64, 100 000 segments, float32
    python -m benchmarks.segments --rows 100000 --dtype bf16 --json segments.json

Ids are even (every segment is as likely), skewed (half of all rows are of one segment) or of a power law, each sorted and
promised to be so, and in random order. "forced" pipelines whatever the cost model says, so it tells where the model is wrong.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj
from benchmarks.apps import DTYPES
from benchmarks.timing import interleaved, paired_speedup, summary

REDUCTIONS: dict[str, Callable[..., jax.Array]] = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max}
DISTRIBUTIONS = ("even", "skewed", "power law")


def segment_ids(distribution: str, rows: int, segments: int, rng: np.random.Generator) -> np.ndarray:
    """[rows] int32 from 0 to ``segments`` - 1, in random order."""
    even = rng.integers(segments, size=rows)
    if distribution == "skewed":
        even = np.where(rng.random(rows) < 0.5, segments // 2, even)
    if distribution == "power law":
        even = np.minimum((rng.pareto(0.7, rows) * segments / 20).astype(np.int64), segments - 1)
    return even.astype(np.int32)


def reference(reduction: str, x: np.ndarray, ids: np.ndarray, segments: int) -> np.ndarray:
    """In float64: [segments, width]."""
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    fold, identity = (np.add, 0.0) if reduction == "sum" else (np.maximum, -np.inf)
    out = np.full((segments, x.shape[1]), identity)
    if len(ids):
        out[ids[order][starts]] = fold.reduceat(x[order].astype(np.float64), starts, axis=0)
    return out


def measure(
    reduction: str,
    distribution: str,
    ordered: bool,
    *,
    rows: int,
    width: int,
    segments: int,
    dtype: str,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """One record. ``speedup[column]``: against "jit", round by round."""
    rng = np.random.default_rng(rows)
    ids = segment_ids(distribution, rows, segments, rng)
    ids = np.sort(ids) if ordered else ids
    x = jnp.asarray(rng.standard_normal((rows, width), np.float32), DTYPES[dtype])

    def function(x: jax.Array, ids: jax.Array) -> jax.Array:
        return REDUCTIONS[reduction](x, ids, num_segments=segments, indices_are_sorted=ordered)

    args = (x, jnp.asarray(ids))
    columns: dict[str, Any] = {
        "jit": jax.jit(function),
        "pipeline": jax.jit(kj.pipeline(function)),
        "forced": jax.jit(kj.pipeline(function, force=True)),
    }
    want = reference(reduction, np.asarray(x), ids, segments)
    errors = {c: error(np.asarray(f(*args)), want) for c, f in columns.items()}
    times = interleaved({c: functools.partial(f, *args) for c, f in columns.items()}, rounds=rounds, seconds=seconds)
    return {
        "reduction": reduction,
        "ids": f"{distribution}, {'sorted' if ordered else 'unsorted'}",
        "rows": rows,
        "width": width,
        "segments": segments,
        "dtype": dtype,
        "bytes": x.nbytes + ids.nbytes + segments * width * x.dtype.itemsize,
        "columns": {c: {**summary(t), "max_rel_error": errors[c]} for c, t in times.items()},
        "speedup": {c: paired_speedup(times["jit"], t) for c, t in times.items() if c != "jit"},
        "operators pipelined": kj.explain(function)(*args).ops_pipelined,
    }


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest |got - want| / max(|want|, rms(want)); infinite where one of them is infinite or no number and the other is not."""
    finite = np.isfinite(want)
    if not np.array_equal(got.astype(np.float64)[~finite], want[~finite]):
        return float("inf")
    root = np.sqrt(np.mean(want[finite] ** 2)) if finite.any() else 1.0
    apart = np.abs(got.astype(np.float64)[finite] - want[finite]) / np.maximum(np.abs(want[finite]), root)
    return float(apart.max(initial=0.0))


def markdown(records: Sequence[dict[str, Any]]) -> str:
    head = ("reduction", "ids", "`jax.jit`", "pipeline", "forced", "pipeline vs `jax.jit`", "forced vs", "GB/s", "error")
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for r in records:
        cells = [r["reduction"], r["ids"], *(f"{1e3 * c['median']:.1f} ms" for c in r["columns"].values())]
        cells += [f"{r['speedup'][c]['median']:.2f}x" for c in ("pipeline", "forced")]
        cells += [f"{r['bytes'] / r['columns']['forced']['median'] / 1e9:.1f}", f"{r['columns']['forced']['max_rel_error']:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.segments", description="Segment reductions alone against jax.jit.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="f32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=20.0, help="stop a case's rounds after this long")
    parser.add_argument("--json", type=Path, help="write the records here")
    args = parser.parse_args(argv)
    sizes = {name: getattr(args, name) for name in ("rows", "width", "segments", "dtype", "rounds", "seconds")}
    records: list[dict[str, Any]] = []
    for reduction, distribution, ordered in itertools.product(REDUCTIONS, DISTRIBUTIONS, (True, False)):
        records.append(measure(reduction, distribution, ordered, **sizes))
        print("\n".join(markdown(records).splitlines()[0 if len(records) == 1 else -1 :]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
