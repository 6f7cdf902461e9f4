"""What is measured, and how it is told: one record per launch shape.

Comes in: a backend. Goes out: records (plain dictionaries) and a Markdown table. ``quick`` sizes are for the emulator: they show
that every kernel runs and computes what it should. Units: bytes per cycle are those of one multiprocessor, by its own clock;
terabytes per second are of the whole device, by events around the launch.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.micro.backends import Backend
from benchmarks.micro.kernels import BATCH_FLOPS, GROUP, Measured, Multicast, QueueRing, atomics_source, run_atomics

# arXiv 2502.18403, measured on an A100: 54 queues in the L2 with payloads of 128-256 KB move 2 TB/s together; a CTA does 100 M
# uncontended atomics a second; with payloads of 1 KB synchronisation costs 12 times.
PAPER = {"l2_terabytes_per_second": 2.0, "atomics_per_second": 100e6}
_CHUNK = 16384  # the product's chunk of streamed weights (kitsune_jax/targets/cuda/lower.py)
_WEIGHTS = 1 << 20  # what a network of eight 256 x 256 layers streams, and well inside the L2
_SHARED = 227 * 1024  # bytes a CTA may have, compute capability 9.0

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Effort:
    """``stream_bytes``: what a member writes in a stream; ``hops``: of a token; ``batches``: of matrix products; ``rounds``: over
    the weights of a multicast; ``additions``: of an atomic; ``repeats``: launches of each."""

    stream_bytes: int
    hops: int
    batches: int
    rounds: int
    additions: int
    repeats: int


FULL = Effort(stream_bytes=64 << 20, hops=4000, batches=2000, rounds=200, additions=200_000, repeats=5)
QUICK = Effort(stream_bytes=24 << 10, hops=4, batches=2, rounds=2, additions=20, repeats=1)


def rings(backend: Backend, *, quick: bool) -> list[QueueRing]:
    """Every queue by payload, then the cluster's by the size of the cluster, with and without matrix products beside it."""
    found = [QueueRing("smem", v, 2, 2) for v in ((2,) if quick else (1, 4, 8, 16))]
    found += [QueueRing("l2", v, 3 if v < 32 else 2, 2) for v in ((2,) if quick else (1, 4, 16, 32, 64))]
    if backend.sm >= 900:
        found += [QueueRing("cluster", v, 3, 2) for v in ((2,) if quick else (1, 4, 16, 32))]
        sizes = (4,) if quick else (2, 4, 8, 16)
        found += [QueueRing("cluster", 2 if quick else 8, 3, n, m) for m in (0, 2) for n in sizes]
    return found


def multicasts(backend: Backend, *, quick: bool) -> list[Multicast]:
    return [Multicast(_CHUNK, 4 if quick else 8, c) for c in ((1, 2, 4, 8) if backend.sm >= 900 else (1,)) if c <= 2 or not quick]


Case = tuple[str, Callable[[], Record]]


def sources(backend: Backend, *, quick: bool) -> list[str]:
    """The kernels of ``cases``. Of the backend only ``sm`` and ``emulated`` are asked."""
    queues = [*rings(backend, quick=quick), *(_cluster_of(n) for n in _cluster_sizes(backend))]
    streamed = multicasts(backend, quick=quick)
    return list(dict.fromkeys([*(q.source for q in queues), *(m.source for m in streamed), atomics_source()]))


def cases(backend: Backend, *, quick: bool) -> Iterator[Case]:
    """Names, and what measures each, in the order of measurement; a record of what failed has ``error`` and no numbers."""
    effort = QUICK if quick else FULL
    chosen: list[tuple[Any, Any]] = []
    for ring in rings(backend, quick=quick):
        chosen.append((_stream, ring))
        if not ring.multipliers and ring.vectors <= 32:
            chosen.append((_token, ring))
    chosen += [(_multicast, streamed) for streamed in multicasts(backend, quick=quick)]
    chosen += [(_atomics, fetch) for fetch in (False, True)]
    chosen += [(_active_clusters, size) for size in _cluster_sizes(backend)]
    for measure, case in chosen:
        yield f"{measure.__name__.strip('_')} {case}", functools.partial(_guarded, measure, backend, case, effort)


def run(backend: Backend, *, quick: bool) -> Iterator[Record]:
    """The records of ``cases``."""
    # Compiling is host work of a second a kernel; whoever needs one then finds it in the cache.
    with concurrent.futures.ThreadPoolExecutor(2 if quick else 8) as pool:
        list(pool.map(backend.compile, sources(backend, quick=quick)))
    for _, measure in cases(backend, quick=quick):
        yield measure()


def _cluster_sizes(backend: Backend) -> tuple[int, ...]:
    return (1, 2, 4, 8, 16) if backend.sm >= 900 and not backend.emulated else ()


def _cluster_of(size: int) -> QueueRing:
    return QueueRing("cluster", 8, 3, max(size, 2))


def _guarded(measure: Any, backend: Backend, case: Any, effort: Effort) -> Record:
    try:
        return dict(measure(backend, case, effort))
    except Exception as error:  # the other benchmarks still have something to say
        return {"benchmark": measure.__name__.strip("_"), "case": str(case), "error": f"{type(error).__name__}: {error}"}


def _most(backend: Backend, case: QueueRing) -> int:
    """Rings that fill the device with one CTA a multiprocessor; in the emulator one."""
    if backend.emulated:
        return 1
    if case.kind == "cluster":
        threads = case.groups * GROUP
        found = backend.max_active_clusters(case.source, cluster=case.members, block=threads, shared_bytes=case.shared_bytes)
        return max(1, found or 0)
    return backend.multiprocessors // (1 if case.kind == "smem" else case.members)


def _stream(backend: Backend, case: QueueRing, effort: Effort) -> Record:
    rings = _most(backend, case)
    entries = max(3, effort.stream_bytes // case.payload)
    batches = effort.batches if case.multipliers else 0
    got = case.run(backend, rings=rings, entries=entries, batches=batches, repeats=effort.repeats)
    record = _queue_record("stream", case, rings, entries)
    if not backend.emulated:
        members_here = case.members if case.kind == "smem" else 1
        written = case.payload * entries
        record["bytes_per_cycle"] = written * members_here / _median(got.cycles)
        if not case.multipliers:  # else the launch lasts as long as the slower of the two
            record["terabytes_per_second"] = written * case.members * rings / min(got.seconds) / 1e12
        else:
            record["flops_per_cycle"] = BATCH_FLOPS * batches * case.multipliers / _median(got.multiplier_cycles)
    return record


def _token(backend: Backend, case: QueueRing, effort: Effort) -> Record:
    entries = max(2, effort.hops // case.members)
    got = case.run(backend, rings=1, entries=entries, token=True, repeats=effort.repeats)
    record = _queue_record("token", case, 1, entries)
    if not backend.emulated:
        hops = entries * case.members
        record["cycles_per_hop"] = float(got.cycles.max()) / hops
        record["nanoseconds_per_hop"] = min(got.seconds) / hops * 1e9
    return record


def _queue_record(mode: str, case: QueueRing, rings: int, entries: int) -> Record:
    return {
        "benchmark": "queue",
        "mode": mode,
        "queue": case.kind,
        "payload_bytes": case.payload,
        "depth": case.depth,
        "members": case.members,
        "multipliers": case.multipliers,
        "rings": rings,
        "entries": entries,
    }


def _multicast(backend: Backend, case: Multicast, effort: Effort) -> Record:
    chunks = 3 if backend.emulated else _WEIGHTS // case.bytes
    clusters = 1
    if not backend.emulated:
        found = backend.multiprocessors
        if case.cluster > 1:
            found = (
                backend.max_active_clusters(case.source, cluster=case.cluster, block=384, shared_bytes=case.shared_bytes)
                or case.cluster
            )
        clusters = found
    got = case.run(backend, clusters=clusters, chunks=chunks, rounds=effort.rounds, repeats=effort.repeats)
    record: Record = {"benchmark": "multicast", "cluster": case.cluster, "clusters": clusters, "chunk_bytes": case.bytes}
    if not backend.emulated:
        delivered = case.bytes * chunks * effort.rounds
        record["bytes_per_cycle"] = delivered / _median(got.cycles)
        record["delivered_terabytes_per_second"] = delivered * clusters * case.cluster / min(got.seconds) / 1e12
        record["l2_terabytes_per_second"] = delivered * clusters / min(got.seconds) / 1e12
    return record


def _atomics(backend: Backend, fetch: bool, effort: Effort) -> Record:
    got = run_atomics(backend, additions=effort.additions, fetch=fetch, repeats=effort.repeats)
    record: Record = {"benchmark": "atomics", "operation": "atom.acq_rel" if fetch else "red.release", "ctas": len(got.cycles)}
    if not backend.emulated:
        record["cycles"] = _median(got.cycles) / effort.additions
        record["per_second_and_cta"] = effort.additions / min(got.seconds)
    return record


def _active_clusters(backend: Backend, size: int, effort: Effort) -> Record:
    case = _cluster_of(size)
    found = backend.max_active_clusters(case.source, cluster=size, block=GROUP, shared_bytes=_SHARED)
    return {"benchmark": "active clusters", "cluster": size, "shared_bytes": _SHARED, "found": found}


def _median(cycles: np.ndarray) -> float:
    return float(statistics.median(cycles.tolist()))


def markdown(records: list[Record]) -> str:
    """A line per record: what it is, and its numbers."""
    shown = [f"{what}_per_second" for what in ("terabytes", "delivered_terabytes", "l2_terabytes")]
    shown = ["bytes_per_cycle", *shown, "flops_per_cycle", "cycles_per_hop", "nanoseconds_per_hop", "cycles", "per_second_and_cta"]
    shown += ["found", "error"]
    lines = ["| what | result |", "|---|---|"]
    for record in records:
        what = ", ".join(f"{k} {v}" for k, v in record.items() if k not in shown)
        result = ", ".join(f"{k.replace('_', ' ')} {_text(record[k])}" for k in shown if k in record) or "right; not timed"
        lines.append(f"| {what} | {result} |")
    lines.append("")
    lines.append(
        f"The Kitsune paper's queues on an A100 (arXiv 2502.18403): {PAPER['l2_terabytes_per_second']} TB/s through 54 queues in "
        f"the L2 with payloads of 128 to 256 KB; {PAPER['atomics_per_second'] / 1e6:.0f} M uncontended atomics a second and CTA."
    )
    return "\n".join(lines)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


__all__ = ["FULL", "QUICK", "Measured", "cases", "markdown", "run", "sources"]
