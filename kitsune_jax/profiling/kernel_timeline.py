"""The inside of GPU kernels in a timeline: when each lane of a CTA ran which tile, and what it waited for.

Comes in: what stamped kernels recorded (``cuda/include/kitsune/timeline.h``), and XLA's events of the same time. Goes out:
``KernelEvent``s on the axis of the timeline, in Chrome's trace format, and in words. Invariant: a lane's events are contiguous:
each begins when the last one ended, except waits for queues, which lie inside their tiles.

Three clocks meet here. A record has the cycles of its SM. Each chunk of records has, at its start and at its end, those and the
nanoseconds of the device's clock, which is one for all SMs but may tick only once a microsecond: a line through all such pairs of a
launch turns cycles into nanoseconds, and its place is the mean of a lane's pairs. The device's clock is laid beside XLA's events by
its kernels: the offset is the one with which most launches lie in an event of ``kitsune_region`` on that device. Without such
events the last record is taken to be as old as the end of the block, which is too late by the time that the device was idle before.
The emulator's clock is the host's.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kitsune_jax.config import printable
from kitsune_jax.report.data import plural, time_text

KINDS = ("tile", "combine", "queue", "weights", "columns", "resident", "phase")  # in the order of ``Stamp``
_HEAD, _CHUNK = 3, 32  # records of a chunk: of its head, and all
_NO_TILE = 0xFFFFFFFF
_KERNEL = "kitsune_region"  # the name of every generated kernel
EMULATOR = -1


@dataclasses.dataclass(frozen=True, slots=True)
class KernelEvent:
    """An event of a lane of a CTA in a kernel, from ``begin`` to ``end`` (seconds since the block began).

    ``device``: its number, -1 for the emulator. ``region``: the name of the call. ``launch``: its number, from 0 for each kernel.
    ``kind``: "kernel" (a whole launch, with ``cta`` and ``lane`` -1), "tile", "idle" (a round in which the lane has no tile),
    "combine" (adding partial sums), or a wait: "queue" (for queue ``number``, until there is an entry to read or room for one),
    "resident" (for weights that stay in shared memory) or "phase" (for all CTAs, at the end of phase ``number``). ``number``: of a
    tile; -1 where there is none. ``weights``, ``columns``: seconds of a tile spent waiting for streamed weights, and for the
    columns of other CTAs of the cluster.
    """

    device: int
    region: str
    launch: int
    cta: int
    lane: int
    begin: float
    end: float
    kind: str
    phase: int = 0
    stage: int = -1
    number: int = -1
    weights: float = 0.0
    columns: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """The events of one device, in nanoseconds since ``zero_ns`` of its own clock. ``dropped``: records that found no room.
    ``read_ns``: the time by the host's clock when all of them had been written."""

    device: int
    zero_ns: int  # an integer: floats have 53 bits, and this clock may count since 1970
    events: tuple[KernelEvent, ...]
    dropped: int
    read_ns: int


# --- from records to events -------------------------------------------------------------------------------------------------------


def recorded_of(context: tuple[int, bytes, bytes, int], names: Sequence[bytes]) -> Recorded:
    """The events of a context, with times in nanoseconds of the device's clock."""
    device, head, memory, read_ns = context
    chunks = np.frombuffer(memory, np.uint32).reshape(-1, _CHUNK, 4)
    lanes: dict[tuple[int, int, int], list[Any]] = collections.defaultdict(list)
    for chunk in chunks:
        used, kernel, launch, worker = chunk[0].tolist()
        if _HEAD <= used <= _CHUNK:
            lanes[kernel, launch, worker].append(chunk)
    launches: dict[tuple[int, int], dict[int, list[Any]]] = collections.defaultdict(dict)
    for (kernel, launch, worker), own in lanes.items():
        launches[kernel, launch][worker] = sorted(own, key=lambda c: _clocks(c[1])[0])
    zero_ns = min((_clocks(own[0][1])[1] for workers in launches.values() for own in workers.values()), default=0)
    events: list[KernelEvent] = []
    for (kernel, launch), workers in sorted(launches.items()):
        region = printable(names[kernel].decode("utf-8", "replace"))
        slope = _slope(workers.values())
        lanes_here = ((own, (device, region, launch, worker)) for worker, own in sorted(workers.items()))
        inside = [e for own, lane in lanes_here for e in _of_lane(own, slope, zero_ns, lane)]
        if inside:
            span = min(e.begin for e in inside), max(e.end for e in inside)
            events += [KernelEvent(device, region, launch, -1, -1, *span, "kernel"), *inside]
    return Recorded(device, zero_ns, tuple(events), int(np.frombuffer(head, np.uint32)[3]), read_ns)


def _clocks(row: Any) -> tuple[int, int]:
    """(cycles of the SM, nanoseconds of the device)."""
    low, high, time_low, time_high = row.tolist()
    return low | high << 32, time_low | time_high << 32


def _slope(lanes: Any) -> float:
    """Nanoseconds of a cycle in a launch. Over all lanes: the ticks of the device's clock are coarse, their sum is not."""
    cycles = nanoseconds = 0
    for chunks in lanes:
        first, last = _clocks(chunks[0][1]), _clocks(chunks[-1][2])
        cycles, nanoseconds = cycles + last[0] - first[0], nanoseconds + last[1] - first[1]
    return nanoseconds / cycles if cycles > 0 and nanoseconds > 0 else 1.0


def _of_lane(chunks: Sequence[Any], slope: float, zero_ns: int, of: tuple[int, str, int, int]) -> list[KernelEvent]:
    """The events of a lane in a launch, waits in front of the tile that they are in."""
    device, region, launch, worker = of
    pairs = [_clocks(chunk[row]) for chunk in chunks for row in (1, 2)]
    offset = statistics.fmean((ns - zero_ns) - slope * (cycle - pairs[0][0]) for cycle, ns in pairs)
    found: list[KernelEvent] = []
    pending: list[KernelEvent] = []  # waits whose stage the next tile tells
    for chunk in chunks:
        opened = _clocks(chunk[1])[0]

        def at(cycle: int, opened: int = opened) -> float:
            return offset + slope * (opened - pairs[0][0] + (cycle - opened) % (1 << 32))

        for begin, end, what, number in chunk[_HEAD : chunk[0][0]].tolist():
            kind, phase, stage = KINDS[what >> 24], what >> 12 & 0xFFF, what & 0xFFF
            if kind in ("weights", "columns"):  # sums of the tile before them
                found[-1] = dataclasses.replace(found[-1], **{kind: begin * slope})
                continue
            event = KernelEvent(device, region, launch, worker >> 8, worker & 0xFF, at(begin), at(end), kind, phase, -1, number)
            if kind in ("queue", "resident"):
                pending.append(event)
                continue
            if kind == "phase":
                found.append(event)
                continue
            found += [dataclasses.replace(wait, stage=stage) for wait in pending]
            pending.clear()
            if kind == "combine" or number == _NO_TILE:
                event = dataclasses.replace(event, kind="combine" if kind == "combine" else "idle", number=-1)
            found.append(dataclasses.replace(event, stage=stage))
    return found + pending


# --- one axis ---------------------------------------------------------------------------------------------------------------------


def on_axis(recorded: Recorded, start_ns: int, xla: Sequence[Mapping[str, Any]]) -> tuple[KernelEvent, ...]:
    """The events in seconds since the mark, which was at ``start_ns`` by the host's clock; ``xla``: events in Chrome's format, the
    mark at 0."""
    if not recorded.events:
        return ()
    zero: float = start_ns - recorded.zero_ns
    if recorded.device != EMULATOR:
        launches = [(e.begin, e.end) for e in recorded.events if e.kind == "kernel"]
        offset = offset_of(launches, _kernels_of(xla, recorded.device))
        latest = max(end for _, end in launches)
        zero = latest - (recorded.read_ns - start_ns) if offset is None else -offset
    moved = (dataclasses.replace(e, begin=(e.begin - zero) * 1e-9, end=(e.end - zero) * 1e-9) for e in recorded.events)
    found = (dataclasses.replace(e, weights=e.weights * 1e-9, columns=e.columns * 1e-9) for e in moved)
    return tuple(sorted(found, key=lambda e: (e.begin, -e.end)))


def _kernels_of(xla: Sequence[Mapping[str, Any]], device: int) -> list[tuple[float, float]]:
    """Begin and end of generated kernels on the streams of a device, in nanoseconds since the mark."""
    named = [e for e in xla if e.get("ph") == "M"]
    pids = {
        e.get("pid")
        for e in named
        if e.get("name") == "process_name" and f"{e['args'].get('name', '')} ".startswith(f"/device:GPU:{device} ")
    }
    streams = {
        (e.get("pid"), e.get("tid"))
        for e in named
        if e.get("name") == "thread_name" and str(e["args"].get("name", "")).startswith("Stream")
    }
    own = (e for e in xla if e.get("ph") == "X" and e.get("pid") in pids and (e.get("pid"), e.get("tid")) in streams)
    return sorted((1e3 * e["ts"], 1e3 * (e["ts"] + e.get("dur", 0))) for e in own if _KERNEL in str(e.get("name", "")))


_SAMPLE = 64  # launches that are looked at, and events that each may belong to
_SLACK = 5e3  # nanoseconds that a kernel may take before its first record and behind its last


def offset_of(launches: Sequence[tuple[float, float]], kernels: Sequence[tuple[float, float]]) -> float | None:
    """The offset of the device's clock with which most ``launches`` lie in ``kernels``; ``None`` where no launch fits any. Both are
    sorted; kernels without stamps may be among them."""
    looked = sorted(launches)[:_SAMPLE]
    best: tuple[int, float] | None = None
    found: list[float] = []
    for begin, end in looked[:4]:
        for first, last in kernels[: 4 * _SAMPLE]:
            tried = (first + last - begin - end) / 2
            near = [_nearest(kernels, b + tried, e + tried) for b, e in looked]
            fits = [d for d in near if d is not None]
            score = len(fits), -sum(abs(d) for d in fits)
            if fits and (best is None or score > best):
                best, found = score, [tried + d for d in fits]
    return statistics.median(found) if found else None


def _nearest(kernels: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    """The distance from the middle of a launch to that of the kernel around it that is nearest; ``None`` where no kernel contains
    it."""
    fits = ((first + last - begin - end) / 2 for first, last in kernels if first <= begin + _SLACK and last >= end - _SLACK)
    return min(fits, key=abs, default=None)


# --- the file, and words ----------------------------------------------------------------------------------------------------------


def device_name(device: int) -> str:
    return "in the emulator" if device == EMULATOR else f"on GPU {device}"


def trace_events(events: Sequence[KernelEvent], first_process: int) -> list[dict[str, Any]]:
    """In Chrome's format: a process for each device from ``first_process`` on, with a track for launches and one for each lane."""
    made: list[dict[str, Any]] = []
    for device in sorted({e.device for e in events}):
        pid, own = first_process + 1 + device, [e for e in events if e.device == device]
        name = f"kitsune_jax kernels {device_name(device)}"
        made.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for cta, lane in sorted({(e.cta, e.lane) for e in own}):
            track = "launches" if cta < 0 else f"CTA {cta} lane {lane}"
            made.append({"ph": "M", "pid": pid, "tid": _track(cta, lane), "name": "thread_name", "args": {"name": track}})
        for e in own:
            args: dict[str, Any] = {"region": e.region, "launch": e.launch}
            args |= {"phase": e.phase, "stage": e.stage} if e.stage >= 0 else {}
            args |= {"waits for weights, us": 1e6 * e.weights} if e.weights else {}
            args |= {"waits for columns of other CTAs, us": 1e6 * e.columns} if e.columns else {}
            place = {"ph": "X", "pid": pid, "tid": _track(e.cta, e.lane), "ts": 1e6 * e.begin, "dur": 1e6 * (e.end - e.begin)}
            made.append({**place, "name": _name(e), "cat": e.kind, "args": args})
    return made


def _track(cta: int, lane: int) -> int:
    return 0 if cta < 0 else 1 + 8 * cta + lane


def _name(e: KernelEvent) -> str:
    names = {
        "kernel": e.region,
        "tile": f"stage {e.stage} tile {e.number}",
        "idle": f"stage {e.stage} round without a tile",
        "combine": "combine sums",
        "queue": f"wait for queue {e.number}",
        "resident": "wait for resident weights",
        "phase": f"wait for the end of phase {e.number}",
    }
    return names[e.kind]


def summary(events: Sequence[KernelEvent]) -> list[str]:
    """For each kernel its launches, and for each of its stages the shares of its time."""
    lines = []
    for device, region in dict.fromkeys((e.device, e.region) for e in events):
        own = [e for e in events if (e.device, e.region) == (device, region)]
        launches = [e for e in own if e.kind == "kernel"]
        lanes = {(e.cta, e.lane) for e in own if e.kind != "kernel"}
        mean = sum(e.end - e.begin for e in launches) / len(launches)
        length = f"{time_text(mean)}{' of simulated time' if device == EMULATOR else ''}"
        calls = f"{plural(len(launches), 'call')} of {length}, {plural(len(lanes), 'lane')}"
        lines.append(f"{region} {device_name(device)}: {calls}")
        phases = {e.phase for e in own if e.stage >= 0}
        for phase, stage in sorted({(e.phase, e.stage) for e in own if e.stage >= 0}):
            title = f"stage {stage}" if len(phases) == 1 else f"stage {stage} of phase {phase}"
            lines += _shares(title, [e for e in own if (e.phase, e.stage) == (phase, stage)])
        waits = sum(e.end - e.begin for e in own if e.kind == "phase")
        if waits:
            share = 100 * waits / (sum(e.end - e.begin for e in launches) * max(1, len(lanes)))
            lines.append(f"  lanes wait for the end of a phase in {share:.1f} % of their time")
    return lines


def _shares(title: str, events: Sequence[KernelEvent]) -> list[str]:
    """Lines with the shares of a stage's time, which for each lane is from its first event to its last."""
    spans: dict[tuple[int, int, int], list[float]] = {}
    spent: dict[str, float] = collections.defaultdict(float)
    for e in events:
        span = spans.setdefault((e.launch, e.cta, e.lane), [e.begin, e.end])
        span[:] = min(span[0], e.begin), max(span[1], e.end)
        seconds = e.end - e.begin
        if e.kind in ("tile", "idle"):
            spent["works on tiles" if e.kind == "tile" else "has no tile"] += seconds - e.weights - e.columns
            spent["waits for weights"] += e.weights
            spent["waits for columns of other CTAs"] += e.columns
        elif e.kind == "queue":
            spent[f"waits for queue {e.number}"] += seconds
            spent["works on tiles"] -= seconds  # the wait is in a tile
        else:
            spent["waits for resident weights" if e.kind == "resident" else "adds up partial sums"] += seconds
    whole = sum(end - begin for begin, end in spans.values())
    shares = sorted(((text, 100 * seconds / whole) for text, seconds in spent.items() if whole > 0), key=lambda s: -s[1])
    return [f"  {title} {text} in {share:.1f} % of its time" for text, share in shares if share >= 0.05]
