"""The report as frozen dataclasses of strings, numbers and tuples, and the texts of its numbers.

A report can be compared, pickled, printed and written as JSON. Byte counts and times are estimates of the planner's model, not
measurements. ``report.build`` makes these objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class StageReport:
    """Operators that one group of workers runs on a tile; ``microseconds`` is the modelled time of one tile on one worker.

    On a GPU ``split`` CTAs share a tile by columns, and weights are ``resident`` in shared memory or streamed through it.
    ``sources``: the user's lines that the operators come from, each once.
    """

    name: str
    ops: tuple[str, ...]
    resource: str  # "tensor" (matrix products) or "simt" (everything else)
    workers: int
    microseconds: float
    split: int = 1
    resident: bool = True
    sources: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class QueueReport:
    """A value that stages pass on: an entry, such as ``bfloat16[96,256]``, times ``depth`` makes ``bytes``."""

    value: str
    producer: str
    consumers: tuple[str, ...]
    depth: int
    bytes: int
    place: str


@dataclasses.dataclass(frozen=True, slots=True)
class StreamReport:
    """``count`` equal stream spaces of a phase: the operators on each row, and the order in which the rows are taken."""

    count: int
    rows: int
    tiles: int
    tile_rows: int
    order: str
    ops: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoopReport:
    """A time loop that runs inside a region: its operator, the user's line, its steps, and bytes summed over all rows: ``carried``
    from one step to the next, which stay on chip, and ``bytes_in`` and ``bytes_out`` of the slices that a step reads and writes."""

    op: str
    source: str
    steps: int
    carried: int
    bytes_in: int
    bytes_out: int


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseReport:
    """The streams that run behind a barrier in a region's call: ``streams`` stream spaces of ``rows`` rows in all.

    Rows of an update of parameters are its elements. ``kept_bytes``: values for later phases only, in scratch memory of the call.
    """

    number: int
    ops: int
    streams: int
    rows: int
    seconds: float
    kept_bytes: int = 0
    spaces: tuple[StreamReport, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RegionReport:
    """One pipelined subgraph.

    ``rows`` is the extent of its stream space, cut into ``tiles`` of ``tile_rows``. ``bytes_in`` and ``bytes_out`` are its operands
    and results, ``bytes_saved`` how much less it moves than the same operators under ``jax.jit``. ``seconds`` and
    ``baseline_seconds`` (under ``jax.jit``) are modelled; ``bound`` is the bottleneck (a stage's name, ``dram`` or ``l2``). On a
    GPU ``replicas`` are pipeline instances, and ``traits`` say how they are arranged: "clusters of 2" (thread blocks), "2 lanes"
    (consumer warpgroups of a thread block). A CPU's region has no traits. ``loops``: time loops that run inside it, whose operators
    are counted once each. ``order``: the indices that the rows are ordered by, "" if they stream as they lie in memory. ``rows``,
    the order, tiles, stages and queues describe the first stream of the first phase, ``later`` the others (and other streams of the
    first phase); the rest counts all phases. ``kept_bytes``: values for later phases only, in scratch memory of the call, at most
    ``kept_at_once`` of them at a time. ``times``: how often the call runs, the steps of the loops around it, as far as their number
    is known. ``flops`` are the useful operations of one run, ``bytes_moved`` and ``baseline_bytes`` its modelled off-chip bytes as
    a pipeline and with ``jax.jit``; ``peak_flops`` is the most that the machine computes in a second in the dtype of the region's
    matrix products (0 where it is not known). ``sources``: the user's lines of its operators. ``measured``: times of one run that
    were measured, of its call alone or of a function that does little else; ``None`` where only the function around it was
    measured, or nothing.
    """

    name: str
    ops: int
    rows: int
    tile_rows: int
    tiles: int
    arrangement: str  # "vertical": one group of workers runs the whole chain; "spatial": stages on different workers
    stages: tuple[StageReport, ...]
    queues: tuple[QueueReport, ...]
    workers: int
    replicas: int
    bytes_in: int
    bytes_out: int
    bytes_saved: int
    seconds: float
    baseline_seconds: float
    bound: str
    traits: tuple[str, ...] = ()
    order: str = ""
    loops: tuple[LoopReport, ...] = ()
    later: tuple[PhaseReport, ...] = ()
    kept_bytes: int = 0
    kept_at_once: int = 0
    times: int = 1
    flops: int = 0
    bytes_moved: int = 0
    baseline_bytes: int = 0
    peak_flops: float = 0.0
    sources: tuple[str, ...] = ()
    measured: MeasuredTimes | None = None

    @property
    def pipeline_seconds(self) -> float:
        """Of one run as a pipeline: measured where it was, else modelled."""
        return self.seconds if self.measured is None else self.measured.seconds

    @property
    def jit_seconds(self) -> float:
        """Of one run with ``jax.jit``: measured where it was, else modelled."""
        return self.baseline_seconds if self.measured is None else self.measured.jit_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """``count`` operators named ``op`` at the user's line ``source`` that were left to XLA, and the reason.

    ``seconds``: modelled time of all of them in XLA's code, in all steps of the loops around them; ``None`` where it was not asked
    for. Of an operator that the model does not know, only the time to move its operands and results.
    """

    op: str
    source: str
    reason: str
    count: int = 1
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Seconds of one call on this machine, with the best pipelines and with ``jax.jit``. ``busy``: other programs ran then."""

    seconds: float
    jit_seconds: float
    busy: bool = False

    def times(self, n: int) -> MeasuredTimes:
        """Those of ``n`` calls."""
        return dataclasses.replace(self, seconds=self.seconds * n, jit_seconds=self.jit_seconds * n)

    @staticmethod
    def sum_of(several: Iterable[MeasuredTimes]) -> MeasuredTimes:
        """Those of several calls, one after the other."""
        found = list(several)
        return MeasuredTimes(sum(t.seconds for t in found), sum(t.jit_seconds for t in found), any(t.busy for t in found))


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPasses:
    """Pipelines of a forward and a backward pass: their modelled time, and the difference from the policy "save".

    The other ``ops_total - ops_pipelined`` operators are left to XLA, and not in the times.
    """

    seconds: float
    seconds_added: float
    ops_pipelined: int
    ops_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyReport:
    """The residuals that one policy keeps between the forward and the backward pass of pipelined functions, and their cost.

    ``kept_bytes``: values that the forward pass makes and the backward pass reads. ``argument_bytes``: arguments of the forward
    pass that the backward pass reads again; every policy keeps them, most by the caller anyway. ``flops_added``: useful operations
    of both passes beyond those under the policy "save". ``plan``: the plans of both passes; ``None`` of a large program that is
    not the one explained.
    """

    policy: str
    in_use: bool
    kept_bytes: int
    argument_bytes: int
    flops_added: int
    plan: PlannedPasses | None


@dataclasses.dataclass(frozen=True, slots=True)
class ResidualReport:
    """The residual policy in use, "save" and "recompute", side by side.

    ``of_gradient``: the function itself has no backward pass; the numbers are those of its gradient by all arguments.
    """

    policies: tuple[PolicyReport, ...]
    of_gradient: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ReportData:
    """The fields of a ``Report``, described there."""

    ops_total: int
    ops_pipelined: int
    regions: tuple[RegionReport, ...]
    rejected: tuple[Rejected, ...]
    traffic_bulk_sync: int
    traffic_pipeline: int
    platform: str
    machine: str
    notes: tuple[str, ...] = ()
    flops: int = 0
    residuals: ResidualReport | None = None
    obstacles: tuple[str, ...] = ()
    measured: MeasuredTimes | None = None
    bandwidth: float = 0.0
    unknown: int = 0
    gain_band: tuple[float, float] | None = None

    @property
    def coverage(self) -> float:
        """Pipelined operators over all operators, 0 to 1 (0 for a function without operators)."""
        return self.ops_pipelined / self.ops_total if self.ops_total else 0.0

    @property
    def seconds(self) -> float:
        """Modelled time of the regions, in all steps of the loops around them; operators left to XLA are not in it."""
        return sum(region.seconds * region.times for region in self.regions)

    @property
    def left_seconds(self) -> float | None:
        """Modelled time of the operators left to XLA; ``None`` where it was not asked for. Those that the model does not know
        (``unknown`` of them) count with the time to move their operands and results."""
        times = [r.seconds for r in self.rejected]
        return None if None in times else sum(t for t in times if t is not None)

    @property
    def expected_speedup(self) -> float | None:
        """Time with ``jax.jit`` over time with pipelines: measured where it was, else modelled, for the whole function. ``None``
        where neither is known. 1.0 of a function that is left to XLA."""
        if not self.regions:
            return 1.0
        if self.measured is not None:
            return self.measured.jit_seconds / self.measured.seconds
        left = self.left_seconds
        if left is None or self.seconds + left <= 0:
            return None
        jit = sum(region.baseline_seconds * region.times for region in self.regions)
        return (jit + left) / (self.seconds + left)

    def likely(self, gain: float) -> tuple[float, float] | None:
        """The range in which a modelled ``gain`` is measured in 8 of 10 programs; ``None`` where that is not known."""
        return None if self.gain_band is None else (self.gain_band[0] * gain, self.gain_band[1] * gain)

    @property
    def bytes_saved(self) -> int:
        """Modelled off-chip bytes that the pipelines do not move."""
        return self.traffic_bulk_sync - self.traffic_pipeline


# --- texts of bytes, seconds, counts, percentages, ratios -------------------------------------------------------------------------


def byte_text(n: float) -> str:
    """Decimal units, three significant digits: ``1.03 GB``, ``48.2 kB``, ``12 B``."""
    return _scaled(n, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def time_text(seconds: float) -> str:
    """Three significant digits: ``1.20 s``, ``-42.0 ms``, ``7.31 us``."""
    return _scaled(seconds, {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def flop_text(n: float) -> str:
    """Three significant digits: ``1.03 Gflop``, ``-12.0 kflop``, ``7 flop``."""
    return _scaled(n, {"Tflop": 1e12, "Gflop": 1e9, "Mflop": 1e6, "kflop": 1e3, "flop": 1})


def signed(text: Callable[[float], str], x: float) -> str:
    """``text(x)``, with a plus sign if ``x`` is positive."""
    return f"+{text(x)}" if x > 0 else text(x)


def count_text(n: int) -> str:
    """Groups of thousands: ``65 536``."""
    return f"{n:,}".replace(",", " ")


def percent_text(part: float, whole: float) -> str:
    """``93 %``; one decimal above 90 %, so that 99.6 % does not read as 100 %; ``0 %`` of nothing."""
    share = 100.0 * part / whole if whole else 0.0
    return f"{share:.1f} %" if 90.0 <= share < 100.0 else f"{share:.0f} %"


def plural(n: int, noun: str) -> str:
    """``1 region``, ``2 regions``, ``1 024 tiles``."""
    return f"{count_text(n)} {noun}" + ("" if n == 1 else "s")


def _scaled(x: float, units: dict[str, float]) -> str:
    """Three significant digits in the first unit that is at most ``x``; a whole number of the last unit, the smallest."""
    *larger, smallest = units
    unit = next((unit for unit in larger if abs(x) >= 0.9995 * units[unit]), smallest)
    n = abs(x) / units[unit]
    digits = 0 if unit == smallest or n >= 99.95 else 1 if n >= 9.995 else 2
    return f"{'-' if x < 0 else ''}{n:.{digits}f} {unit}"
