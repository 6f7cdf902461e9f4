"""``timeline``: when each worker ran which tile, and when it waited, as a trace for Perfetto beside XLA's own events.

Comes in: the calls that run inside a ``with`` block. Goes out: a file in Chrome's trace format, and a ``Timeline``, which says the
same in words. Invariants: outside of such a block nothing is recorded; inside, results and the order of work are as without it.
Workers' events come from the CPU extension, by a clock that ticks with the processor's time stamp counter; a mark that both clocks
see puts XLA's events, which ``jax.profiler`` records, on the same axis. The inside of GPU kernels: ``kernel_timeline.py``.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import glob
import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kitsune_jax.config import logger, printable
from kitsune_jax.profiling import kernel_timeline
from kitsune_jax.profiling.kernel_timeline import KernelEvent
from kitsune_jax.report.data import plural, time_text
from kitsune_jax.targets.cpu import call as cpu_call
from kitsune_jax.targets.cuda import runtime as cuda

KINDS = ("call", "prepare", "tile", "combine", "wait")
_MARK = "kitsune_jax.timeline clock"
_MOST_EVENTS = 1 << 20  # of a thread: 56 MB
_MOST_CHUNKS = 1 << 17  # of a device, 29 records each: 64 MiB


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An event of thread ``thread``, from ``begin`` to ``end`` (seconds since the block began).

    ``kind``: "call" (a whole pipeline call, on the thread that XLA called), "prepare" (packing weights), "tile", "combine" (adding
    partial sums), "wait". ``region``: the name of the call or of its phase. ``stage``: of a tile, "" else. ``number``: of the tile
    or task; of a wait the queue that it waited for, -1 for the other workers at the end of a round.
    """

    thread: int
    begin: float
    end: float
    kind: str
    region: str
    stage: str = ""
    number: int = -1


@dataclasses.dataclass
class Timeline:
    """The record of a block ``with kj.timeline(path) as found``; complete when the block has ended.

    ``events``: of all workers, by time. ``kernels``: of the lanes of GPU kernels, if they were asked for. ``dropped``: events
    beyond the most that are kept of a thread; ``dropped_records``: those of kernels for which a device had no room. ``unstamped``:
    calls of kernels that do not record, because they were compiled outside of such a block, or had no room. ``path``: the trace, to
    open in ui.perfetto.dev or chrome://tracing. ``with_xla``: XLA's events are in it too. ``print(found)``: where the time went.

    Example:
      >>> import tempfile, kitsune_jax as kj
      >>> with tempfile.TemporaryDirectory() as folder, kj.timeline(f"{folder}/trace.json") as found:
      ...     pass  # call pipelined functions here
      >>> print(found)
      no pipeline call ran on the CPU inside of the timeline
    """

    path: Path
    events: tuple[WorkerEvent, ...] = ()
    dropped: int = 0
    with_xla: bool = False
    kernels: tuple[KernelEvent, ...] = ()
    dropped_records: int = 0
    unstamped: int = 0

    def __str__(self) -> str:
        return "\n".join(summary(self))


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str], *, kernels: bool = False) -> Iterator[Timeline]:
    """Record when the workers of pipelines run and wait inside of a ``with`` block, and write a trace to ``path``.

    The trace has one track per worker: each tile of each stage, packed weights, combined sums, and waits with the queue that was
    waited for. XLA's own events are beside them, unless ``jax.profiler`` is in use already. Recording tiles costs less than 2 % of
    the time of a call, and XLA's own trace some 15 microseconds a call; nothing is recorded outside of the block. Block on results
    inside of it: later calls are not recorded.

    A GPU's pipelines are one kernel each, which XLA's events show under their names. With ``kernels`` the trace has the inside of
    them too: one track per lane of a CTA, with tiles, sums, and waits for queues and weights. That takes another kernel, so all
    functions are compiled again when they are first called in such a block, and both programs are kept: call a function once in a
    block before the one to look at. Outside of such blocks kernels are as if there were no timelines.

    Args:
      path: the file to write, in Chrome's trace format; compressed if it ends in ".gz".
      kernels: record the inside of GPU kernels, and of those of ``target="emulator"``.

    Raises:
      OSError: the file cannot be written. RuntimeError: another timeline is being recorded, or kernels cannot be recorded here.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, kitsune_jax as kj
      >>> f = jax.jit(kj.pipeline(lambda w, x: jax.nn.relu(x @ w), force=True))
      >>> w, x = jnp.ones((64, 64)), jnp.ones((4096, 64))
      >>> _ = f(w, x).block_until_ready()  # compile first
      >>> with tempfile.TemporaryDirectory() as folder, kj.timeline(f"{folder}/trace.json") as found:
      ...     _ = f(w, x).block_until_ready()
      >>> {event.kind for event in found.events} >= {"call", "tile"}
      True
    """
    global _recording
    if _recording:
        raise RuntimeError("kitsune_jax: a timeline is being recorded: end its with block before another one begins")
    path = Path(path)
    path.touch()  # an error of the path comes before the work, not after it
    extension, found = cpu_call.extension(), Timeline(path)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        _recording = True
        stack.callback(_stop)
        if kernels:
            cuda.start_timeline(_MOST_CHUNKS, _uses_gpus())  # may raise, so it comes first
        traced = _start_trace(folder)
        if extension is not None:
            extension.start_timeline(_MOST_EVENTS)
        launched = cuda.calls()
        cuda.set_stamps(kernels)
        start_ns, kernels_ns = _mark(extension)
        try:
            yield found
        finally:
            cuda.set_stamps(False)
            contexts, kernel_names, found.unstamped = cuda.stop_timeline() if kernels else ([], [], cuda.calls() - launched)
            names, rows, dropped = ([], b"", 0) if extension is None else extension.stop_timeline()
            xla = _stop_trace(folder) if traced else None
            found.events = events_of(names, rows, start_ns)
            found.dropped = dropped
            found.with_xla = xla is not None
            recorded = [kernel_timeline.recorded_of(context, kernel_names) for context in contexts]
            found.kernels = tuple(e for r in recorded for e in kernel_timeline.on_axis(r, kernels_ns, xla or []))
            found.dropped_records = sum(r.dropped for r in recorded)
            _write(path, trace_of(found.events, xla or [], found.kernels))


_recording = False


def _stop() -> None:
    global _recording
    _recording = False


def _start_trace(folder: str) -> bool:
    try:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of a Python function would be an event, and take its time
        jax.profiler.start_trace(folder, profiler_options=options)
    except Exception as error:  # the user's own trace runs, or this JAX has no profiler
        logger.info("the timeline is without XLA's events: %s", error)
        return False
    return True


def _uses_gpus() -> bool:
    return any(d.platform in ("gpu", "cuda") for d in jax.devices()) and not isinstance(cuda.driver_info(), str)


def _mark(extension: Any) -> tuple[int, int]:
    """An event that XLA's trace has, and the time of its middle by the clocks of the workers and of the kernels' extension."""
    with jax.profiler.TraceAnnotation(_MARK):
        return 0 if extension is None else int(extension.clock_ns()), cuda.clock_ns()


def _stop_trace(folder: str) -> list[dict[str, Any]] | None:
    """XLA's events in Chrome's format, the time of the mark as 0; ``None`` where there are none."""
    try:
        jax.profiler.stop_trace()
        (file,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(file, "rt", encoding="utf-8", errors="replace") as stored:
            events: list[dict[str, Any]] = json.load(stored)["traceEvents"]
        mark = next(e for e in events if e.get("name") == _MARK)
    except Exception as error:
        logger.info("the timeline is without XLA's events: %s", error)
        return None
    zero = mark["ts"] + mark.get("dur", 0) / 2
    return [{**e, "ts": e["ts"] - zero} if "ts" in e else e for e in events if e and e is not mark]


def events_of(names: Sequence[bytes], rows: bytes, start_ns: int) -> tuple[WorkerEvent, ...]:
    """The events that the extension recorded, by time. ``rows``: seven int64 each (``cpu/src/timeline.h``)."""
    texts = [printable(name.decode("utf-8", "replace")) for name in names]
    found = []
    for begin, end, thread, kind, name, stage, number in np.frombuffer(rows, np.int64).reshape(-1, 7).tolist():
        at = (begin - start_ns) * 1e-9, (end - start_ns) * 1e-9
        found.append(WorkerEvent(thread, *at, KINDS[kind], texts[name], texts[stage] if stage >= 0 else "", number))
    return tuple(sorted(found, key=lambda e: (e.begin, -e.end)))


# --- the file ---------------------------------------------------------------------------------------------------------------------

_PROCESS = 1 << 20  # beyond the numbers that XLA gives


def trace_of(events: Sequence[WorkerEvent], xla: Sequence[dict[str, Any]], kernels: Sequence[KernelEvent] = ()) -> dict[str, Any]:
    """All in Chrome's trace format: times in microseconds."""
    threads = sorted({e.thread for e in events})
    made: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "kitsune_jax pipelines"}},
        *({"ph": "M", "pid": _PROCESS, "tid": t, "name": "thread_name", "args": {"name": f"worker {t}"}} for t in threads),
    ]
    for e in events:
        args = {"region": e.region, **({"stage": e.stage} if e.stage else {}), **({"number": e.number} if e.number >= 0 else {})}
        made.append(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": e.thread,
                "ts": 1e6 * e.begin,
                "dur": 1e6 * (e.end - e.begin),
                "name": _name(e),
                "cat": e.kind,
                "args": args,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": [*made, *kernel_timeline.trace_events(kernels, _PROCESS + 1), *xla]}


def _name(e: WorkerEvent) -> str:
    if e.kind == "call":
        return e.region
    if e.kind == "tile":
        return f"{e.stage} tile {e.number}"
    if e.kind == "wait":
        return f"wait for queue {e.number}" if e.number >= 0 else "wait for other workers"
    return {"prepare": "pack weights", "combine": "combine sums"}[e.kind]


def _write(path: Path, trace: dict[str, Any]) -> None:
    """Write to a file beside ``path`` first, so that a trace is never half a file."""
    text = json.dumps(trace).encode()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    os.replace(part, path)


# --- in words ---------------------------------------------------------------------------------------------------------------------


def summary(found: Timeline) -> list[str]:
    """Lines with the times of each call: its stages, packing, sums and waits by queue, and the share in which its workers were
    busy."""
    calls = [e for e in found.events if e.kind == "call"]
    lines = kernel_timeline.summary(found.kernels)
    if not calls and not lines:
        lines = ["no pipeline call ran on the CPU inside of the timeline"]
    for region in dict.fromkeys(e.region for e in calls):
        own = [e for e in calls if e.region == region]
        spent: dict[str, float] = collections.defaultdict(float)
        capacity, most = 0.0, 0
        for call, inside in zip(own, _inside(own, found.events), strict=True):
            workers = len({call.thread, *(e.thread for e in inside)})
            capacity, most = capacity + workers * (call.end - call.begin), max(most, workers)
            for e in inside:
                spent[_share(e)] += e.end - e.begin
        spent["starting threads, taking jobs, memory"] = max(0.0, capacity - sum(spent.values()))
        each = sum(e.end - e.begin for e in own) / len(own)
        lines.append(f"{region}: {plural(len(own), 'call')} of {time_text(each)}, {plural(most, 'worker')}")
        for text, seconds in sorted(spent.items(), key=lambda item: -item[1]):
            if seconds > 0:
                lines.append(f"  {100 * seconds / max(capacity, 1e-12):5.1f} %  {text}")
    if found.dropped:
        lines.append(f"{found.dropped} events are missing: a thread keeps {_MOST_EVENTS}")
    if found.dropped_records:
        lines.append(f"{found.dropped_records} records of kernels are missing: there was no more room on the device")
    if found.unstamped:
        lines.append(f"{plural(found.unstamped, 'call')} of GPU kernels without a record of their inside: {_WHY_UNSTAMPED}")
    return lines


_WHY_UNSTAMPED = "compile functions in a block with kernels=True"


def _inside(calls: Sequence[WorkerEvent], events: Sequence[WorkerEvent]) -> list[list[WorkerEvent]]:
    """For each of ``calls``, all of one region and by time, the events that belong to it."""
    found: list[list[WorkerEvent]] = [[] for _ in calls]
    begins = [call.begin for call in calls]
    for e in events:
        k = bisect.bisect_right(begins, e.begin) - 1
        if e.kind != "call" and k >= 0 and e.end <= calls[k].end and e.region.startswith(calls[k].region):
            found[k].append(e)
    return found


def _share(e: WorkerEvent) -> str:
    if e.kind == "tile":
        return f"tiles of stage {e.stage}"
    if e.kind == "wait":
        return f"stage {e.stage} waits for queue {e.number}" if e.number >= 0 else "workers wait for the end of a round"
    return {"prepare": "weights are packed", "combine": "partial sums are combined"}[e.kind]
