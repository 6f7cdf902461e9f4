"""A report as text of at most ``WIDTH`` columns.

Comes in: a ``ReportData``. Goes out: a string without a trailing newline. It begins with the verdict. By default it shows the
regions that take most of the time and, of the operators left to XLA, the reasons that cost most; ``verbose`` shows everything. A
reason is wrapped, never cut: users read the report to learn why an operator was left out.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence

from kitsune_jax.config import printable
from kitsune_jax.report.data import (
    MeasuredTimes,
    PhaseReport,
    PlannedPasses,
    RegionReport,
    Rejected,
    ReportData,
    ResidualReport,
    StreamReport,
    byte_text,
    count_text,
    flop_text,
    percent_text,
    plural,
    signed,
    time_text,
)

WIDTH = 120
_LONGEST_REPEAT = 16  # operators in a stretch whose repetitions are folded
_BANDWIDTHS = {"dram": "memory bandwidth", "l2": "L2 bandwidth"}  # a bottleneck that is no stage


def render_text(report: ReportData, verbose: bool = False) -> str:
    """The text of ``Report.text(verbose)``."""
    blocks = ["\n".join([line for text in (*obstacle_texts(report), *summary_texts(report)) for line in _wrap(text)])]
    shown, rest = (report.regions, "") if verbose else longest_regions(report.regions)
    blocks += ["\n".join(_text_region(region, report, verbose)) for region in shown]
    if rest:
        blocks.append("\n".join(_wrap(rest)))
    if report.residuals:
        blocks.append("\n".join(_residuals(report.residuals)))
    if report.rejected:
        blocks.append("\n".join(_rejected(report.rejected) if verbose else _causes(report)))
    if report.notes:
        blocks.append("\n".join(line for note in report.notes for line in _wrap(note, "note: ", " " * 6)))
    return "\n\n".join(blocks)


def obstacle_texts(report: ReportData) -> list[str]:
    """The first lines of a report: why nothing, or not all, of the function is pipelined."""
    share = "not all" if report.ops_pipelined else "nothing"
    return [f"{share} is pipelined: {obstacle}" for obstacle in report.obstacles]


def summary_texts(report: ReportData) -> list[str]:
    """The lines of a report that say whether pipelines help: the verdict, the operators, the bytes."""
    planned = f"planned for {report.platform}, {report.machine}" if report.machine else f"planned for {report.platform}"
    if not report.ops_total:
        return [f"nothing to pipeline: the function has no operators ({planned})"]
    covered = percent_text(report.ops_pipelined, report.ops_total)
    pipelined = f"{count_text(report.ops_pipelined)} of {plural(report.ops_total, 'operator')} pipelined ({covered})"
    lines = [f"{verdict_text(report)}; {pipelined} in {plural(len(report.regions), 'region')}; {planned}"]
    if report.regions:
        lines += _likely_line(report)
        lines.append(
            f"off-chip traffic (estimate): {byte_text(report.traffic_bulk_sync)} with jax.jit -> "
            f"{byte_text(report.traffic_pipeline)} pipelined, {byte_text(report.bytes_saved)} saved "
            f"({percent_text(report.bytes_saved, report.traffic_bulk_sync)})"
        )
    return lines


def _likely_line(report: ReportData) -> list[str]:
    """The range of a modelled verdict, and what the word "likely" means."""
    ratio = report.expected_speedup
    if report.gain_band is None or report.measured is not None or ratio is None:
        return []
    low, high = report.gain_band
    told = likely_text(report, ratio).removeprefix(", ")
    return [f"{told}: in 8 of 10 programs the measured gain is {low:g} to {high:g} times the modelled one"]


def verdict_text(report: ReportData) -> str:
    """Whether pipelines help, how much, and how that is known: "expected 1.30x as fast as jax.jit, modelled (10.0 ms instead of
    13.0 ms)"."""
    times, ratio = report.measured, report.expected_speedup
    if not report.regions:
        found = "runs as with jax.jit: nothing is pipelined"
        if times is None:
            return found + ("" if report.obstacles or not report.rejected else ", for the reasons below")
        return f"{found}, because that was measured as no faster ({time_text(times.seconds)} with pipelines, {_jit_text(times)})"
    if times is not None:
        busy = ", while other programs ran" if times.busy else ""
        return (
            f"{times.jit_seconds / times.seconds:.2f}x as fast as jax.jit, measured on this machine "
            f"({time_text(times.seconds)} instead of {time_text(times.jit_seconds)}{busy})"
        )
    if ratio is None:
        return f"pipelines take {time_text(report.seconds)}, modelled"
    seconds = report.seconds + (report.left_seconds or 0.0)
    unknown = f", without the time of {plural(report.unknown, 'operator')} that the model does not know" if report.unknown else ""
    most = "at most " if report.unknown else ""
    return (
        f"expected {most}{ratio:.2f}x as fast as jax.jit, modelled "
        f"({time_text(seconds)} instead of {time_text(seconds * ratio)}{unknown})"
    )


def _jit_text(times: MeasuredTimes) -> str:
    return f"{time_text(times.jit_seconds)} with jax.jit" + (", while other programs ran" if times.busy else "")


MOST_SHOWN = 5  # regions, phases, causes: so many are shown


def longest_regions(regions: Sequence[RegionReport]) -> tuple[Sequence[RegionReport], str]:
    """The regions that take most of the time, in their order, and a line about the others, "" if there are none."""
    by_time = sorted(regions, key=lambda region: -region.seconds * region.times)
    rest = by_time[MOST_SHOWN:]
    if not rest:
        return regions, ""
    seconds = sum(region.seconds * region.times for region in rest)
    shown = [region for region in regions if region in by_time[:MOST_SHOWN]]
    return shown, f"and {plural(len(rest), 'more region')} that take {time_text(seconds)}: {EVERYTHING}"


EVERYTHING = "print(report.text(verbose=True)) shows everything"


def _text_region(region: RegionReport, report: ReportData, verbose: bool) -> list[str]:
    order = f" in the order of {region.order}" if region.order else ""
    lines = _wrap(
        f"{region.name}: {plural(region.ops, 'operator')}{in_phases(region)} over {plural(region.rows, 'row')}{order}, "
        f"{plural(region.tiles, 'tile')} of {plural(region.tile_rows, 'row')}{repeats_text(region)}"
    )
    lines += _wrap(f"{arrangement_text(region)}; {bottleneck_text(region)}", "  ")
    lines += _wrap(
        f"{times_text(region, report)}; "
        f"reads {byte_text(region.bytes_in)}, writes {byte_text(region.bytes_out)}, saves {byte_text(region.bytes_saved)}",
        "  ",
    )
    lines += [line for text in detail_texts(region) for line in _wrap(text, "  ")]
    operators = _repeats if verbose else short_operators
    lines += _text_table(*stage_table(region, operators), right=(2, 3) if region.traits else (2,))
    if region.queues:
        lines += _text_table(QUEUES_HEAD, queue_rows(region, "->"), right=(2, 3))
    phases = phase_texts(region, operators)
    for text, spaces in phases if verbose else phases[:MOST_SHOWN]:
        lines += _wrap(text, "  ")
        lines += [line for space, ops in spaces for line in _wrap(f"{space}: {ops}", "    ")]
    if len(phases) > MOST_SHOWN and not verbose:
        lines += _wrap(f"and {plural(len(phases) - MOST_SHOWN, 'more kind')} of phases: {EVERYTHING}", "  ")
    return lines


def times_text(region: RegionReport, report: ReportData) -> str:
    """The times of one run of a region, measured or modelled, and their ratio."""
    how = "estimate" if region.measured is None else "measured"
    text = f"{how}: {time_text(region.pipeline_seconds)}, with jax.jit {time_text(region.jit_seconds)}"
    if region.pipeline_seconds <= 0:
        return text
    gain = region.jit_seconds / region.pipeline_seconds
    if region.measured is None:
        return f"{text} ({gain:.2f}x{likely_text(report, gain)})"
    busy = ", while other programs ran" if region.measured.busy else ""
    return f"{text} ({gain:.2f}x{busy}); modelled: {time_text(region.seconds)} and {time_text(region.baseline_seconds)}"


def likely_text(report: ReportData, gain: float) -> str:
    """The range that a modelled ``gain`` stands for: ", likely 0.61x to 1.83x"; "" where it is not known."""
    likely = report.likely(gain)
    return "" if likely is None else f", likely {likely[0]:.2g}x to {likely[1]:.2g}x"


def repeats_text(region: RegionReport) -> str:
    """How often a region runs, where a loop repeats it."""
    return f", in each of {plural(region.times, 'step')}" if region.times > 1 else ""


def in_phases(region: RegionReport) -> str:
    """The number of phases of a call with several; the text behind it describes the first."""
    last = max((phase.number for phase in region.later), default=0)
    return f" in {count_text(last + 1)} phases, the first" if last else ""


def detail_texts(region: RegionReport) -> list[str]:
    """The loops of a region, and the bytes that its phases leave for later ones."""
    texts = []
    for loop in region.loops:
        where = f" ({loop.source})" if loop.source else ""
        texts.append(
            f"{loop.op} of {plural(loop.steps, 'step')}{where}: {byte_text(loop.carried)} of carries stay on chip; "
            f"a step reads {byte_text(loop.bytes_in)} and writes {byte_text(loop.bytes_out)}"
        )
    if region.kept_bytes:
        texts.append(
            f"between its phases {byte_text(region.kept_bytes)} in scratch memory of the call, "
            f"{byte_text(region.kept_at_once)} of it at a time"
        )
    return texts


def stage_table(region: RegionReport, operators: Callable[[Sequence[str]], str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows; workers only on a GPU, as on a CPU every worker runs all stages."""
    head = ("stage", "unit", *(("workers",) if region.traits else ()), "us/tile", "operators")
    rows = []
    for s in region.stages:
        workers = (str(s.workers),) if region.traits else ()
        rows.append((s.name, s.resource, *workers, f"{s.microseconds:.1f}", operators(s.ops)))
    return head, rows


QUEUES_HEAD = ("queue", "entry", "depth", "bytes", "place")


def queue_rows(region: RegionReport, arrow: str) -> list[tuple[str, ...]]:
    return [
        (f"{q.producer} {arrow} {', '.join(q.consumers)}", q.value, str(q.depth), byte_text(q.bytes), q.place)
        for q in region.queues
    ]


def phase_texts(region: RegionReport, operators: Callable[[Sequence[str]], str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The later phases of a call, equal ones merged: a text for each, and the rows and operators of each of its stream spaces."""
    alike: dict[PhaseReport, list[int]] = {}
    for phase in region.later:
        alike.setdefault(dataclasses.replace(phase, number=0, seconds=0.0), []).append(phase.number)
    seconds = {phase.number: phase.seconds for phase in region.later}
    texts = []
    for phase, numbers in alike.items():
        several = len(numbers) > 1
        text = f"{'phases' if several else 'phase'} {', '.join(map(str, numbers))}: {plural(phase.ops, 'operator')} over "
        text += f"{plural(phase.rows, 'row')} in {plural(phase.streams, 'stream')}{' each' if several else ''}, "
        text += f"{time_text(sum(seconds[n] for n in numbers))}"
        if phase.kept_bytes:
            text += f"; {byte_text(phase.kept_bytes)} for later phases"
        texts.append((text, [(_space(s), operators(s.ops)) for s in phase.spaces]))
    return texts


def _space(stream: StreamReport) -> str:
    order = f" in the order of {stream.order}" if stream.order else ""
    times = f"{count_text(stream.count)} of " if stream.count > 1 else ""
    return f"{times}{plural(stream.rows, 'row')}{order}, {plural(stream.tiles, 'tile')} of {plural(stream.tile_rows, 'row')}"


def arrangement_text(region: RegionReport) -> str:
    if region.traits:
        return _gpu_arrangement(region)
    who = "one core takes" if region.replicas == 1 else f"each of {count_text(region.replicas)} cores takes"
    return f"{who} whole tiles through all stages"


def bottleneck_text(region: RegionReport) -> str:
    """The resource that limits a region, in words."""
    if region.bound in _BANDWIDTHS:
        return f"bottleneck: {_BANDWIDTHS[region.bound]}"
    stage = next((s for s in region.stages if s.name == region.bound), None)
    if stage is None:
        return f"bottleneck: {region.bound}"
    unit = "matrix products" if stage.resource == "tensor" else "arithmetic outside of matrix products"
    return f"bottleneck: {unit}" + (f" of stage {stage.name}" if len(region.stages) > 1 else "")


def _gpu_arrangement(region: RegionReport) -> str:
    """ "vertical, clusters of 2, 2 lanes, weights streamed, on 132 CTAs"."""
    parts = [region.arrangement, *region.traits]
    if any(s.resource == "tensor" for s in region.stages):
        parts.append("weights resident" if all(s.resident for s in region.stages) else "weights streamed")
    split = [f"{s.name} over {s.split}" for s in region.stages if s.split > 1]
    ctas = f"on {plural(region.workers * region.replicas, 'CTA')}"
    if region.arrangement == "spatial":
        ctas += f" in {plural(region.replicas, 'instance')}"
    return ", ".join((*parts, ctas)) + (f" (split: {', '.join(split)})" if split else "")


RESIDUALS_HEAD = ("policy", "keeps", "of arguments", "more work", "modelled", "operators pipelined")


def residual_title(residuals: ResidualReport) -> str:
    """The title of the table of residual policies."""
    if residuals.of_gradient:
        return "residuals: values that a gradient by all arguments would save in the forward pass"
    return "residuals: values that the forward pass saves for the backward pass"


def residual_rows(residuals: ResidualReport) -> list[tuple[str, ...]]:
    """One row under ``RESIDUALS_HEAD`` for each policy."""
    return [
        (
            p.policy + (" (in use)" if p.in_use else ""),
            byte_text(p.kept_bytes),
            byte_text(p.argument_bytes),
            signed(flop_text, p.flops_added),
            *_planned(p.plan),
        )
        for p in residuals.policies
    ]


def _planned(plan: PlannedPasses | None) -> tuple[str, str]:
    if plan is None:
        return "not planned", "-"
    more = f" ({signed(time_text, plan.seconds_added)})" if plan.seconds_added else ""
    modelled = time_text(plan.seconds) + more if plan.ops_pipelined else "left to XLA"
    return modelled, f"{count_text(plan.ops_pipelined)} of {count_text(plan.ops_total)}"


def _residuals(residuals: ResidualReport) -> list[str]:
    return [residual_title(residuals), *_text_table(RESIDUALS_HEAD, residual_rows(residuals), right=(1, 2, 3, 4))]


def _rejected(rejected: Sequence[Rejected]) -> list[str]:
    lines = [f"left to XLA: {plural(sum(r.count for r in rejected), 'operator')}"]
    timed = all(r.seconds is not None for r in rejected)
    head = (*(("time",) if timed else ()), "line", "operator", "reason")
    rows = [
        (
            *((_time_cell(r.seconds),) if timed else ()),
            r.source or "(no source line)",
            r.op + (f" x{r.count}" if r.count > 1 else ""),
            r.reason,
        )
        for r in rejected
    ]
    return lines + _text_table(head, rows, right=(0,) if timed else ())


def _time_cell(seconds: float | None) -> str:
    return time_text(seconds) if seconds else "-"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Operators left to XLA for one reason: those of all ``entries``, which differ by line, name, or numbers in the reason.

    ``reason``: that of the entry that takes most of the time. ``seconds``: of all of them, 0 where no time is known.
    """

    reason: str
    entries: tuple[Rejected, ...]
    seconds: float

    @property
    def count(self) -> int:
        return sum(r.count for r in self.entries)

    @property
    def operators(self) -> str:
        """Their names, those that occur most first."""
        counts = collections.Counter[str]()
        for r in self.entries:
            counts[r.op] += r.count
        names = [f"{name} x{n}" if n > 1 else name for name, n in counts.most_common(_MOST_NAMES)]
        return ", ".join(names) + _and_more(len(counts) - len(names), "name")

    @property
    def lines(self) -> str:
        """The user's lines, those that take most of the time first."""
        ordered = sorted(self.entries, key=lambda r: -(r.seconds or 0.0))
        found = list(dict.fromkeys(r.source or "(no source line)" for r in ordered))
        return ", ".join(found[:_MOST_LINES]) + _and_more(len(found) - _MOST_LINES, "line")


_MOST_NAMES, _MOST_LINES = 4, 2
_NUMBER = re.compile(r"\d[\d.,]*( \d{3})*( ?([mun]?s|[kMGT]?B)\b)?")


def _and_more(n: int, noun: str) -> str:
    return f" and {plural(n, 'more ' + noun)}" if n > 0 else ""


def causes_of(rejected: Sequence[Rejected]) -> list[Cause]:
    """``rejected`` by reason, the causes that take most of XLA's time first. Reasons that differ in numbers only are one cause."""
    groups: dict[str, list[Rejected]] = {}
    for r in rejected:
        groups.setdefault(_NUMBER.sub("#", r.reason), []).append(r)
    causes = [
        Cause(max(group, key=lambda r: r.seconds or 0.0).reason, tuple(group), sum(r.seconds or 0.0 for r in group))
        for group in groups.values()
    ]
    return sorted(causes, key=lambda cause: (-cause.seconds, -cause.count))


CAUSES_HEAD = ("time", "operators", "lines", "reason")


def cause_rows(causes: Sequence[Cause]) -> list[tuple[str, ...]]:
    """One row under ``CAUSES_HEAD`` for each cause."""
    return [(_time_cell(c.seconds), c.operators, c.lines, c.reason) for c in causes]


def causes_title(report: ReportData) -> str:
    """How much is left to XLA."""
    left = report.left_seconds
    took = f", {time_text(left)} (modelled)" if left else ""
    return f"left to XLA: {plural(sum(r.count for r in report.rejected), 'operator')}{took}, by reason"


def _causes(report: ReportData) -> list[str]:
    causes = causes_of(report.rejected)
    shown, rest = causes[:MOST_SHOWN], causes[MOST_SHOWN:]
    lines = [*_wrap(causes_title(report)), *_text_table(CAUSES_HEAD, cause_rows(shown), right=(0,))]
    if rest:
        n, seconds = sum(c.count for c in rest), sum(c.seconds for c in rest)
        took = f", {time_text(seconds)}" if seconds else ""
        lines += _wrap(f"and {plural(n, 'operator')} for {plural(len(rest), 'more reason')}{took}: {EVERYTHING}", "  ")
    return lines


_MOST_OPERATORS = 24  # names in a short list


def short_operators(ops: Sequence[str]) -> str:
    """As ``_repeats``, but of a long list only the first operators, how many there are, and those that occur most."""
    shown, names = list[str](), 0
    stretches = list(_stretches(ops))
    for text, length in stretches:
        names += length
        if shown and names > _MOST_OPERATORS:
            most = ", ".join(f"{count_text(n)} {name}" for name, n in collections.Counter(ops).most_common(3))
            return f"{', '.join(shown)}, ... ({count_text(len(ops))} operators, most of them {most})"
        shown.append(text)
    return ", ".join(shown)


def _repeats(ops: Sequence[str]) -> str:
    """Repeated stretches written once: ``dot, add, max, dot, add, max, cat`` -> ``(dot, add, max) x2, cat``."""
    return ", ".join(text for text, _ in _stretches(ops))


def _stretches(ops: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The text of each stretch, and the names in it."""
    at = 0
    while at < len(ops):
        period, times = max(
            ((p, _times(ops, at, p)) for p in range(1, _LONGEST_REPEAT + 1)), key=lambda r: (r[0] * (r[1] - 1), -r[0])
        )
        if times == 1:
            period = 1
        stretch = ", ".join(ops[at : at + period])
        yield stretch if times == 1 else f"{stretch} x{times}" if period == 1 else f"({stretch}) x{times}", period
        at += period * times


def _times(ops: Sequence[str], at: int, period: int) -> int:
    """How often the ``period`` names at ``at`` are repeated there."""
    first, times = ops[at : at + period], 1
    while len(first) == period and ops[at + times * period : at + (times + 1) * period] == first:
        times += 1
    return times


def _text_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Aligned columns, indented by two; the last column takes the rest of ``WIDTH``; a cell wider than its column wraps."""
    natural = [max(len(printable(row[i])) for row in (head, *rows)) + 2 * (i == 0) for i in range(len(head))]
    room = WIDTH - 2 * (len(head) - 1)
    last = min(natural[-1], max(24, room // 3))  # the least width of the last column
    widths = natural[:-1]
    while sum(widths) > room - last:
        widths[widths.index(max(widths))] -= 1
    widths.append(room - sum(widths))
    lines = []
    for row in (head, *rows):
        indents = itertools.chain(["  "], itertools.repeat(""))
        cells = [
            textwrap.wrap(printable(cell).strip(), width, initial_indent=indent, subsequent_indent=2 * indent) or [""]
            for cell, width, indent in zip(row, widths, indents, strict=False)
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = (p.rjust(w) if i in right else p.ljust(w) for i, (p, w) in enumerate(zip(parts, widths, strict=True)))
            lines.append("  ".join(padded).rstrip())
    return lines


def _wrap(text: str, first: str = "", rest: str | None = None) -> list[str]:
    rest = first + "  " if rest is None else rest
    return textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
