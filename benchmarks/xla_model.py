"""What the model of XLA:CPU says of small programs, beside what they take.

Comes in: the machine's profile, or a file with one. Goes out: a table of microseconds beyond an empty call, modelled and measured,
and the ratio of both. Usage::

    python -m benchmarks.xla_model                        # all families
    python -m benchmarks.xla_model --only few --profile measured.json

The families: products of few rows ("few": a layer whose weights are in the caches), chains of them, batched products, and folds by
index ("scatter"). Measured is the fastest of calls in several turns (``targets.cpu.profile.kernels.fastest``), each turn over all
cases, so that what disturbs the machine for a while does not fall on one of them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.apps import DTYPES
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.config import PlannerOptions
from kitsune_jax.targets.cpu.planning.machines import CpuMachine, cpu_at_hand, cpu_of
from kitsune_jax.targets.cpu.planning.xla import of_ops, program_context
from kitsune_jax.targets.cpu.profile.kernels import fastest
from kitsune_jax.targets.cpu.profile.profile import MachineProfile

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]
_TURNS = 7
_HANDED = 1100  # elements: as many operations of a program XLA hands to another thread


def few(rng: np.random.Generator) -> Iterator[Case]:
    for dtype in ("f32", "bf16"):
        for rows in (8, 16, 32, 64, 128, 256):
            for k, n in ((64, 64), (256, 256), (512, 512), (512, 2048), (1024, 1024)):
                args = (_array(rng, (rows, k), dtype), _array(rng, (k, n), dtype))
                yield f"{dtype} {rows} x {k} x {n}", jnp.matmul, args


def chains(rng: np.random.Generator) -> Iterator[Case]:
    def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for w in weights:
            x = x @ w
        return x

    for dtype in ("f32", "bf16"):
        for rows, width, depth in ((8, 64, 6), (16, 256, 4), (16, 512, 3), (64, 256, 4), (128, 128, 6), (32, 1024, 2)):
            args = (_array(rng, (rows, width), dtype), *(_array(rng, (width, width), dtype) for _ in range(depth)))
            yield f"{dtype} {rows} x {width}, {depth} layers", layers, args


def batched(rng: np.random.Generator) -> Iterator[Case]:
    shapes = (
        (64, 8, 64, 64),
        (64, 8, 32, 64),
        (64, 64, 64, 64),
        (16, 128, 64, 128),
        (16, 8, 512, 64),
        (256, 16, 64, 16),
        (256, 4, 32, 32),
    )
    for dtype in ("f32", "bf16"):
        for count, m, k, n in shapes:
            args = (_array(rng, (count, m, k), dtype), _array(rng, (count, k, n), dtype))
            yield f"{dtype} {count} of {m} x {k} x {n}", jnp.matmul, args


def scatter(rng: np.random.Generator) -> Iterator[Case]:
    for rows, table, width in (
        (1000, 100, 1), (1000, 1000, 16), (4000, 500, 64), (10_000, 1000, 1), (10_000, 1000, 16), (10_000, 10_000, 64),
        (20_000, 2000, 64), (50_000, 5000, 4), (2000, 200, 256), (30_000, 3000, 32),
    ):  # fmt: skip
        ids = jnp.asarray(rng.integers(table, size=rows).astype(np.int32))
        for dtype in ("f32", "bf16"):
            x = _array(rng, (rows, width) if width > 1 else (rows,), dtype)
            yield f"{dtype} {rows} of {width} into {table}", _fold(table), (x, ids)
    ids, from_row = (jnp.asarray(rng.integers(1000, size=10_000).astype(np.int32)) for _ in range(2))
    for width in (1, 16, 64):
        x, edges = _array(rng, (1000, width), "f32"), _array(rng, (10_000, width), "f32")
        yield f"largest of 10000 of {width} into 1000", _largest, (edges, ids)
        yield f"10000 of {width} taken, times others, into 1000", _messages, (x, edges, ids, from_row)


FAMILIES = {"few": few, "chains": chains, "batched": batched, "scatter": scatter}


def _fold(table: int) -> Callable[..., jax.Array]:
    return lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=table)


def _largest(x: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.ops.segment_max(x, ids, num_segments=1000)


def _messages(x: jax.Array, edges: jax.Array, ids: jax.Array, from_row: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x[from_row] * edges, ids, num_segments=1000)


def _array(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> jax.Array:
    return jnp.asarray(rng.standard_normal(tuple(shape), np.float32), DTYPES[dtype])


def modelled(function: Callable[..., Any], args: Sequence[Any], machine: CpuMachine) -> float:
    """Seconds of all kernels of the function, without its call."""
    graph = capture(jax.make_jaxpr(function)(*args)).graph
    return of_ops(graph, range(len(graph.ops)), machine, program_context(graph, machine, PlannerOptions(), body=False))


def measured(functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]], workers: int) -> list[float]:
    """Seconds of each, its call included: the least of several turns."""
    compiled = [(jax.jit(f).lower(*args).compile(), args) for f, args in functions]

    def calls(run: Any, args: Sequence[Any]) -> Iterator[tuple[float, float]]:
        jax.block_until_ready(run(*args))
        while True:
            ran, before = time.process_time(), time.perf_counter()
            jax.block_until_ready(run(*args))
            yield time.perf_counter() - before, time.process_time() - ran

    turns = [[fastest(calls(run, args), workers) for run, args in compiled] for _ in range(_TURNS)]
    return [min(of_one) for of_one in zip(*turns, strict=True)]


def compare(families: Sequence[str], machine: CpuMachine) -> dict[str, list[tuple[str, float, float]]]:
    """Of each family its cases: name, modelled seconds, measured seconds beyond those of a call that does nothing."""
    rng = np.random.default_rng(0)
    found: dict[str, list[tuple[str, float, float]]] = {}
    for family in families:
        cases = list(FAMILIES[family](rng))
        nothing: tuple[Callable[..., Any], Sequence[Any]] = (lambda x: x + 1, (jnp.ones(_HANDED),))
        empty, *seconds = measured([nothing, *((f, args) for _, f, args in cases)], machine.workers)
        model = [modelled(f, args, machine) for _, f, args in cases]
        beyond = [max(s - empty, 1e-7) for s in seconds]
        found[family] = [(name, m, s) for (name, _, _), m, s in zip(cases, model, beyond, strict=True)]
    return found


def text(found: dict[str, list[tuple[str, float, float]]]) -> str:
    lines = ["| program | modelled us | measured us | ratio |", "|---|---:|---:|---:|"]
    for family, cases in found.items():
        lines += [f"| {family} {name} | {1e6 * m:.1f} | {1e6 * s:.1f} | {m / s:.2f} |" for name, m, s in cases]
    for family, cases in found.items():
        logs = [math.log(m / s) for _, m, s in cases]
        middle, spread = statistics.median(logs), statistics.fmean(map(abs, logs))
        lines.append(
            f"{family}: modelled {math.exp(middle):.2f} times what it takes (median), off by {math.exp(spread):.2f} times (mean)"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.xla_model", description="The model of XLA:CPU beside what it takes."
    )
    parser.add_argument("--only", choices=tuple(FAMILIES), nargs="+", default=tuple(FAMILIES))
    parser.add_argument("--profile", type=Path, help="a profile, as python -m kitsune_jax machine --json prints it")
    args = parser.parse_args(argv)
    machine = cpu_of(MachineProfile.from_json(args.profile.read_text())) if args.profile else cpu_at_hand()
    print(text(compare(args.only, machine)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
