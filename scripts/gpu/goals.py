"""What the applications over graphs, tables and sequences are to reach on a GPU: sizes, and times the speed of ``jax.jit``.

Comes in: records of benchmarks. Goes out: a table of what was reached. Goals are this project's, for an H200, inference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Goal:
    """``rows``: edges, DLRM's batch, tokens, environments, or sequences. ``speedup``: of inference. ``dtype``: in which
    sequences are measured first."""

    rows: int
    speedup: float
    dtype: str = "f32"


GRAPH_GOALS = {
    "meshgraphnets": Goal(200_000, 3.0),
    "gat": Goal(1_000_000, 3.0),
    "graphcast_processor": Goal(81_900, 1.7),  # the multi-mesh of an icosahedron refined five times
    "dlrm": Goal(65_536, 1.5),
}


SEQUENCE_GOALS = {
    "transformer_layer": Goal(1024, 1.2),
    "cartpole": Goal(65_536, 15.0),
    "lstm_64": Goal(256, 2.0),
    "lstm_256": Goal(256, 2.0, "bf16"),  # in float32 no cluster holds its weights
    "gru_256": Goal(256, 2.0, "bf16"),
}
GOALS = {**GRAPH_GOALS, **SEQUENCE_GOALS}

# Attention alone is to be within 20 % of cuDNN's kernel on the same device (the step ``attention``).
OF_CUDNN = 0.8
# What cuDNN 9 reached on an H100 SXM5, forward, float16, 16 384 tokens in all and a width of 2 048: (tokens, head size, causal) ->
# TFLOP/s, half of the products counted under a causal mask. FlashAttention-3, arXiv 2407.08608, figure 5.
CUDNN_TFLOPS = {
    (1024, 128, False): 574.0,
    (4096, 128, False): 609.0,
    (1024, 128, True): 410.0,
    (4096, 128, True): 518.0,
    (1024, 64, False): 373.0,
    (4096, 64, False): 408.0,
}


def attention_markdown(findings: Iterable[Mapping[str, Any]]) -> str:
    """A row for each size of attention, in TFLOP/s. What is modelled is of an H200; what was published, of an H100.

    >>> finding = {"name": "attention bf16", "modelled_tflops": 600.0, "cudnn_published": None}
    >>> print(attention_markdown([finding]).splitlines()[-1])
    | attention bf16 | 600 |  |  |  |  | not measured |
    """
    lines = [
        f"| attention | modelled | cuDNN, published | pipeline | cuDNN | `jax.jit` | {100 * OF_CUDNN:.0f} % of cuDNN's |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for finding in findings:
        measured = finding.get("tflops", {})
        rates = [finding.get("modelled_tflops"), finding.get("cudnn_published"), *map(measured.get, ("pipeline", "cudnn", "jit"))]
        reached = "not measured"
        if measured.get("cudnn"):
            reached = "yes" if measured["pipeline"] >= OF_CUDNN * measured["cudnn"] else "no"
        cells = (finding["name"], *("" if rate is None else f"{rate:.0f}" for rate in rates), reached)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def decoding_markdown(findings: Iterable[Mapping[str, Any]]) -> str:
    """A row for each size of one token's layer: what asking for weights ahead gains by the model of an H200, and on the device.

    >>> finding = {"name": "token bf16", "asked_bytes": 7.3e6, "modelled_gain_seconds": 1.7e-6}
    >>> print(decoding_markdown([finding]).splitlines()[-1])
    | token bf16 | 7.3 MB | 1.7 us |  |  |  |  |
    """
    lines = [
        "| token | asked for | gain, modelled | pipeline | without | `jax.jit` | x without |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for finding in findings:
        measured = finding.get("seconds", {})
        times = [f"{measured[name]['median'] * 1e6:.1f} us" if name in measured else "" for name in ("pipeline", "without", "jit")]
        ratio = f"{finding['speedup']['without']['median']:.3f}" if "speedup" in finding else ""
        asked = f"{finding.get('asked_bytes', 0) / 1e6:.1f} MB", f"{finding.get('modelled_gain_seconds', 0) * 1e6:.1f} us"
        lines.append(f"| {' | '.join((finding['name'], *asked, *times, ratio))} |")
    return "\n".join(lines)


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
