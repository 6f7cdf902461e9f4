"""A trace of ``jax.profiler`` as the kernels of each call of a function.

Comes in: ``jax.profiler.ProfileData`` (``events_of``), or events from anywhere (``Event``). Goes out: a ``TracedCall`` for each
call that was made inside of an annotation ``CALL``. Invariant: it holds a kernel once, and no kernel that runs others: of a loop
those of its steps only.

On a GPU a kernel is an event on a stream, and its launch is the call of the driver with the same correlation number. On a CPU a
kernel is a thunk of XLA. The thread that runs a thunk calls it itself, so a thunk has no launch. A thunk that leaves its work to
other threads returns at once, and ends with the event ``end: <thunk>`` of the same flow.
"""

from __future__ import annotations

import bisect
import dataclasses
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

CALL = "kitsune_jax.profile"  # the annotation around a call, from its start until its results are there
_END = "end: "
_LAUNCH = ("cuLaunch", "cuGraphLaunch", "cudaLaunch", "cudaGraphLaunch", "hipLaunch", "hipModuleLaunch", "hipGraphLaunch")
_COPY = ("Memcpy", "Memset")


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An interval of a trace, in nanoseconds since its start.

    ``device``: of a GPU's plane ("/device:GPU:0"), "" on the host. ``op``, ``module``: the HLO instruction and its module, or "".
    ``correlation``: the number that a launch and its kernels share. ``starts``, ``ends``: the flow that it begins or ends.
    ``ordinal``: of the device that a thunk runs for.
    """

    name: str
    start: float
    end: float
    device: str = ""
    op: str = ""
    module: str = ""
    correlation: int | None = None
    starts: int | None = None
    ends: int | None = None
    ordinal: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel as it ran once, in nanoseconds since the trace began. ``op``: its HLO instruction. ``launch``: when the call that
    launched it began; ``None`` for a thunk, and where the trace has no launch of it. ``launched_by``: the number of that call."""

    op: str
    start: float
    end: float
    launch: float | None = None
    launched_by: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of the function, from ``start`` until its results are there (``end``), and its kernels by their start."""

    start: float
    end: float
    kernels: tuple[KernelRun, ...]


def profile_data() -> Any:
    """The class ``jax.profiler.ProfileData``. Raises ``RuntimeError`` where this JAX has none."""
    found = getattr(jax.profiler, "ProfileData", None)
    if found is None or not hasattr(jax.profiler, "ProfileOptions"):
        raise RuntimeError(
            f"kj.profile reads traces with jax.profiler.ProfileData, which JAX {jax.__version__} does not have: install JAX 0.10.2 "
            "or later"
        )
    return found


def events_of(data: Any) -> list[Event]:
    """The events of ``data`` (a ``ProfileData``) that ``runs_of`` reads."""
    found = []
    for plane in data.planes:
        device = plane.name if plane.name.startswith("/device:") else ""
        for line in plane.lines:
            if device and not line.name.startswith("Stream"):  # other lines sum up those of the streams
                continue
            for event in line.events:
                name = event.name
                if not device and name.startswith("Threadpool"):
                    continue
                with warnings.catch_warnings():  # jaxlib makes the type of stats at the first look, without a module
                    warnings.simplefilter("ignore", DeprecationWarning)
                    stats = dict(event.stats)
                if device or name == CALL or name.startswith((_END, *_LAUNCH)) or "hlo_op" in stats:
                    found.append(_event(name, event, device, stats))
    return found


def _event(name: str, event: Any, device: str, stats: Mapping[str, Any]) -> Event:
    def number(key: str) -> int | None:
        return int(stats[key]) if key in stats else None

    return Event(
        name,
        event.start_ns,
        event.start_ns + event.duration_ns,
        device,
        str(stats.get("hlo_op", "")),
        str(stats.get("hlo_module", "")),
        number("correlation_id"),
        number("_p"),
        number("_c"),
        number("device_ordinal") or 0,
    )


def runs_of(events: Iterable[Event], module: str, holders: Mapping[str, Collection[str]]) -> tuple[TracedCall, ...]:
    """The calls in ``events``, in order, with the kernels of the HLO module ``module``.

    ``holders``: instructions that run others (loops, branches, calls), and the names of those. Such an instruction is no kernel in
    a call in which one of the others is. Of several devices only the first is read.
    """
    events = list(events)
    calls = sorted((e for e in events if e.name == CALL and not e.device), key=lambda e: e.start)
    devices = sorted({e.device for e in events if e.device})
    kernels = _of_device(events, devices[0]) if devices else _of_host(events, module)
    kernels.sort(key=lambda k: (k.start, -k.end))
    starts = [k.start for k in kernels]
    runs = []
    for call, following in zip(calls, [*[c.start for c in calls[1:]], float("inf")], strict=True):
        inside = kernels[bisect.bisect_left(starts, call.start) : bisect.bisect_left(starts, following)]
        seen = {k.op for k in inside}
        runs.append(TracedCall(call.start, call.end, tuple(k for k in inside if seen.isdisjoint(holders.get(k.op, ())))))
    return tuple(runs)


def _of_host(events: Sequence[Event], module: str) -> list[KernelRun]:
    """The thunks of ``module`` for its first device. Each ends when its own event ends, or later with its flow."""
    ends: dict[int | None, float] = {e.ends: e.start for e in events if e.ends is not None and e.name.startswith(_END)}
    thunks = [e for e in events if e.op and e.module == module and not e.device]
    first = min((e.ordinal for e in thunks), default=0)
    return [KernelRun(e.op, e.start, max(e.end, ends.get(e.starts, e.end))) for e in thunks if e.ordinal == first]


def _of_device(events: Sequence[Event], device: str) -> list[KernelRun]:
    """The kernels on the streams of ``device``, without copies, each with its launch."""
    calls = (e for e in events if not e.device and e.correlation is not None and e.name.startswith(_LAUNCH))
    launches: dict[int | None, float] = {e.correlation: e.start for e in calls}
    return [
        KernelRun(e.op or e.name, e.start, e.end, launches.get(e.correlation), e.correlation if e.correlation in launches else None)
        for e in events
        if e.device == device and not e.name.startswith(_COPY)
    ]
