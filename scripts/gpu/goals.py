"""What the applications over graphs, tables and sequences are to reach on a GPU: sizes, and times the speed of ``jax.jit``.

Comes in: records of benchmarks. Goes out: a table of what was reached. Goals are this project's, for an H200, inference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Goal:
    """``rows``: edges, DLRM's batch, tokens, environments, or sequences. ``speedup``: of inference."""

    rows: int
    speedup: float


GRAPH_GOALS = {
    "meshgraphnets": Goal(200_000, 3.0),
    "gat": Goal(1_000_000, 3.0),
    "graphcast_processor": Goal(81_900, 1.7),  # the multi-mesh of an icosahedron refined five times
    "dlrm": Goal(65_536, 1.5),
}


# Attention alone is to be within 20 % of cuDNN's kernel; no column of the benchmarks runs that yet.
SEQUENCE_GOALS = {
    "transformer_layer": Goal(1024, 1.2),
    "cartpole": Goal(65_536, 15.0),
    "lstm_64": Goal(8192, 2.0),
}
GOALS = {**GRAPH_GOALS, **SEQUENCE_GOALS}


def markdown(records: Iterable[Mapping[str, Any]]) -> str:
    """A row for each inference record on a GPU of an application that has a goal, of that size.

    >>> record = {"app": "gat", "mode": "infer", "dtype": "f32", "platform": "cuda", "rows": 1_000_000}
    >>> print(markdown([record | {"speedup": {"jit": {"median": 3.5}}, "explain": {"coverage": 0.9}}]).splitlines()[-1])
    | gat | f32 | 1 000 000 | 90 % | 3.50 | 3.0 | yes |
    """
    lines = [
        "| application | dtype | rows | operators pipelined | x `jax.jit` | goal | reached |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for record in records:
        goal = GOALS.get(record["app"])
        if goal is None or (record["mode"], record["platform"], record["rows"]) != ("infer", "cuda", goal.rows):
            continue
        found = record["speedup"]["jit"]["median"]
        cells = (
            record["app"],
            record["dtype"],
            f"{record['rows']:,}".replace(",", " "),
            f"{100 * record['explain']['coverage']:.0f} %",
            f"{found:.2f}",
            f"{goal.speedup:.1f}",
            "yes" if found >= goal.speedup else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
