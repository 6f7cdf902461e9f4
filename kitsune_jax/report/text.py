"""A Report as text: at most ``WIDTH`` columns, no dependency, readable in ten seconds.

Comes in: a ``Report``. Goes out: a string without a trailing newline. Long reasons and operator lists are wrapped, never cut,
because the reason for a "no" is what the reader came for.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Sequence

from kitsune_jax.plain_text import printable
from kitsune_jax.report.data import (
    AheadReport,
    LoopReport,
    PhaseReport,
    PlannedPasses,
    RegionReport,
    Rejected,
    ReportData,
    ResidualReport,
    StreamReport,
)
from kitsune_jax.report.units import byte_text, count_text, flop_text, percent_text, plural, signed, time_text

WIDTH = 120
_LONGEST_REPEAT = 16  # operators in a stretch that is looked for again


def render_text(report: ReportData) -> str:
    """The text behind ``str(report)``."""
    blocks = ["\n".join([*_obstacles(report), *_summary(report)]), *("\n".join(_region(r)) for r in report.regions)]
    if report.residuals:
        blocks.append("\n".join(_residuals(report.residuals)))
    if report.rejected:
        blocks.append("\n".join(_rejected(report.rejected)))
    if report.notes:
        blocks.append("\n".join(line for note in report.notes for line in _wrap(note, "note: ", " " * 6)))
    return "\n\n".join(blocks)


def obstacle_texts(report: ReportData) -> list[str]:
    """What stands at the top: why nothing, or not all, of the function is pipelined."""
    share = "not all" if report.ops_pipelined else "nothing"
    return [f"{share} is pipelined: {obstacle}" for obstacle in report.obstacles]


def _obstacles(report: ReportData) -> list[str]:
    return [line for text in obstacle_texts(report) for line in _wrap(text)]


def _summary(report: ReportData) -> list[str]:
    planned = f"planned for {report.platform}, {report.machine}" if report.machine else f"planned for {report.platform}"
    if not report.ops_total:
        return _wrap(f"nothing to pipeline: the function has no operators ({planned})")
    covered = percent_text(report.ops_pipelined, report.ops_total)
    head = f"{count_text(report.ops_pipelined)} of {plural(report.ops_total, 'operator')} pipelined ({covered})"
    lines = _wrap(f"{head} in {plural(len(report.regions), 'region')}; {planned}")
    if report.regions:
        lines += _wrap(
            f"off-chip traffic (modelled): {byte_text(report.traffic_bulk_sync)} bulk-synchronous -> "
            f"{byte_text(report.traffic_pipeline)} pipelined, {byte_text(report.bytes_saved)} saved "
            f"({percent_text(report.bytes_saved, report.traffic_bulk_sync)})"
        )
    elif not report.obstacles:
        lines.append("nothing is pipelined: the function runs as plain JAX")
    return lines


def _region(region: RegionReport) -> list[str]:
    order = f" in the order of {region.order}" if region.order else ""
    lines = _wrap(
        f"{region.name}: {plural(region.ops, 'operator')}{in_phases(region)} over {plural(region.rows, 'row')}{order}, "
        f"{plural(region.tiles, 'tile')} of {plural(region.tile_rows, 'row')}"
    )
    gain = f" ({region.baseline_seconds / region.seconds:.2f}x)" if region.seconds > 0 else ""
    lines += _wrap(f"{_arrangement(region)}; bound by {region.bound}", "  ")
    lines += _wrap(
        f"modelled {time_text(region.seconds)}, bulk-synchronous {time_text(region.baseline_seconds)}{gain}; "
        f"reads {byte_text(region.bytes_in)}, writes {byte_text(region.bytes_out)}, saves {byte_text(region.bytes_saved)}",
        "  ",
    )
    lines += [line for loop in region.loops for line in _wrap(loop_text(loop), "  ")]
    if region.kept_bytes:
        lines += _wrap(kept_text(region), "  ")
    if region.ahead:
        lines += _wrap(ahead_text(region.ahead), "  ")
    if region.lanes:
        stages = [(s.name, s.resource, str(s.workers), f"{s.microseconds:.1f}", _repeats(s.ops)) for s in region.stages]
        lines += _table(("stage", "unit", "workers", "us/tile", "operators"), stages, right=(2, 3))
    else:  # on a CPU every worker runs all stages
        alike = [(s.name, s.resource, f"{s.microseconds:.1f}", _repeats(s.ops)) for s in region.stages]
        lines += _table(("stage", "unit", "us/tile", "operators"), alike, right=(2,))
    if region.queues:
        queues = [
            (f"{q.producer} -> {', '.join(q.consumers)}", q.value, str(q.depth), byte_text(q.bytes), q.place) for q in region.queues
        ]
        lines += _table(("queue", "entry", "depth", "bytes", "place"), queues, right=(2, 3))
    for text, spaces in phase_texts(region):
        lines += _wrap(text, "  ")
        lines += [line for space, ops in spaces for line in _wrap(f"{space}: {ops}", "    ")]
    return lines


def in_phases(region: RegionReport) -> str:
    """How many phases a call has, where it has several; what follows is said of the first."""
    last = max((phase.number for phase in region.later), default=0)
    return f" in {count_text(last + 1)} phases, the first" if last else ""


def loop_text(loop: LoopReport) -> str:
    """What a loop inside a region keeps on chip, and what it moves."""
    where = f" ({loop.source})" if loop.source else ""
    text = f"{loop.op} of {plural(loop.steps, 'step')}{where}: {byte_text(loop.carried)} of carries stay on chip"
    return f"{text}; a step reads {byte_text(loop.bytes_in)} and writes {byte_text(loop.bytes_out)}"


def kept_text(region: RegionReport) -> str:
    """What phases hand on to each other."""
    return (
        f"between its phases {byte_text(region.kept_bytes)} in memory of the executor, "
        f"{byte_text(region.kept_at_once)} at a time: no arrays of XLA's"
    )


def ahead_text(ahead: AheadReport) -> str:
    """What a call asks the L2 for."""
    return (
        f"asks the L2 for {byte_text(ahead.bytes)} of the {byte_text(ahead.weight_bytes)} of weights that {ahead.op} "
        f"({ahead.source or 'no source line'}) reads behind it, which then takes {time_text(ahead.seconds)} less (modelled)"
    )


def phase_texts(region: RegionReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """The later phases of a call, equal ones together: a text for each, and for its stream spaces the rows and the operators."""
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
        texts.append((text, [(_space(s), _repeats(s.ops)) for s in phase.spaces]))
    return texts


def _space(stream: StreamReport) -> str:
    order = f" in the order of {stream.order}" if stream.order else ""
    times = f"{count_text(stream.count)} of " if stream.count > 1 else ""
    return f"{times}{plural(stream.rows, 'row')}{order}, {plural(stream.tiles, 'tile')} of {plural(stream.tile_rows, 'row')}"


def _arrangement(region: RegionReport) -> str:
    if region.lanes:
        return _gpu_arrangement(region)
    return f"{region.arrangement}: every tile passes all stages on one of {plural(region.replicas, 'worker')}"


def _gpu_arrangement(region: RegionReport) -> str:
    """ "vertical, clusters of 2, 2 lanes, weights streamed, on 132 CTAs"."""
    parts = [region.arrangement]
    if region.cluster > 1:
        parts.append(f"clusters of {region.cluster}")
    parts.append(plural(region.lanes, "lane"))
    if any(s.resource == "tensor" for s in region.stages):
        parts.append("weights resident" if all(s.resident for s in region.stages) else "weights streamed")
    split = [f"{s.name} over {s.split}" for s in region.stages if s.split > 1]
    ctas = f"on {plural(region.workers * region.replicas, 'CTA')}"
    if region.arrangement == "spatial":
        ctas += f" in {plural(region.replicas, 'instance')}"
    return ", ".join((*parts, ctas)) + (f" (split: {', '.join(split)})" if split else "")


RESIDUALS_HEAD = ("policy", "keeps", "of arguments", "more work", "modelled", "operators pipelined")


def residual_title(residuals: ResidualReport) -> str:
    """What the table of residual policies tells."""
    if residuals.of_gradient:
        return "residuals: what a gradient by all arguments would keep of the forward pass for the backward pass"
    return "residuals: what is kept of the forward pass for the backward pass"


def residual_rows(residuals: ResidualReport) -> list[tuple[str, ...]]:
    """A row under ``RESIDUALS_HEAD`` for each policy."""
    return [
        (
            p.policy + (" (in use)" if p.in_use else ""),
            byte_text(p.kept_bytes),
            byte_text(p.argument_bytes),
            signed(flop_text, p.flops_added),
            *(_planned(p.plan) if p.plan else ("not planned", "")),
        )
        for p in residuals.policies
    ]


def _planned(plan: PlannedPasses) -> tuple[str, str]:
    more = f" ({signed(time_text, plan.seconds_added)})" if plan.seconds_added else ""
    modelled = time_text(plan.seconds) + more if plan.ops_pipelined else "left to XLA"
    return modelled, f"{count_text(plan.ops_pipelined)} of {count_text(plan.ops_total)}"


def _residuals(residuals: ResidualReport) -> list[str]:
    return [residual_title(residuals), *_table(RESIDUALS_HEAD, residual_rows(residuals), right=(1, 2, 3, 4))]


def _rejected(rejected: Sequence[Rejected]) -> list[str]:
    lines = [f"left to XLA: {plural(sum(r.count for r in rejected), 'operator')}"]
    rows = [(r.source or "(no source line)", r.op + (f" x{r.count}" if r.count > 1 else ""), r.reason) for r in rejected]
    return lines + _table(("line", "operator", "reason"), rows)


def _repeats(ops: Sequence[str]) -> str:
    """Repeated stretches written once: ``dot, add, max, dot, add, max, cat`` -> ``(dot, add, max) x2, cat``."""
    parts = []
    at = 0
    while at < len(ops):
        period, times = max(
            ((p, _times(ops, at, p)) for p in range(1, _LONGEST_REPEAT + 1)), key=lambda r: (r[0] * (r[1] - 1), -r[0])
        )
        if times == 1:
            period = 1
        stretch = ", ".join(ops[at : at + period])
        parts.append(stretch if times == 1 else f"{stretch} x{times}" if period == 1 else f"({stretch}) x{times}")
        at += period * times
    return ", ".join(parts)


def _times(ops: Sequence[str], at: int, period: int) -> int:
    """How often the ``period`` names at ``at`` stand there in a row."""
    first, times = ops[at : at + period], 1
    while len(first) == period and ops[at + times * period : at + (times + 1) * period] == first:
        times += 1
    return times


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Aligned columns, indented by two; the last one takes what is left of ``WIDTH``; a cell wider than its column wraps."""
    natural = [max(len(printable(row[i])) for row in (head, *rows)) + 2 * (i == 0) for i in range(len(head))]
    room = WIDTH - 2 * (len(head) - 1)
    last = min(natural[-1], max(24, room // 3))  # what the last column is left with at least
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
    return textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=first + "  " if rest is None else rest)
