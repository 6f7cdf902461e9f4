"""A report as text and as HTML; several reports merged into one.

In: a ``Report``. Out: a string of at most ``WIDTH`` columns without a trailing newline, or one self-contained piece of HTML without
scripts and style sheets, every string escaped. Long reasons and operator lists are wrapped, never cut: users read the report to
learn why an operator was left out.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from kitsune_jax.config import printable
from kitsune_jax.report.data import (
    PhaseReport,
    PlannedPasses,
    RegionReport,
    Rejected,
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

# --- text -------------------------------------------------------------------------------------------------------------------------

WIDTH = 120
_LONGEST_REPEAT = 16  # operators in a stretch whose repetitions are folded
_BANDWIDTHS = {"dram": "memory bandwidth", "l2": "L2 bandwidth"}  # a bottleneck that is no stage


def render_text(report: Report) -> str:
    """The text of ``str(report)``."""
    obstacles = [line for text in obstacle_texts(report) for line in _wrap(text)]
    blocks = ["\n".join([*obstacles, *_summary(report)]), *("\n".join(_text_region(r)) for r in report.regions)]
    if report.residuals:
        blocks.append("\n".join(_residuals(report.residuals)))
    if report.rejected:
        blocks.append("\n".join(_rejected(report.rejected)))
    if report.notes:
        blocks.append("\n".join(line for note in report.notes for line in _wrap(note, "note: ", " " * 6)))
    return "\n\n".join(blocks)


def obstacle_texts(report: Report) -> list[str]:
    """The first lines of a report: why nothing, or not all, of the function is pipelined."""
    share = "not all" if report.ops_pipelined else "nothing"
    return [f"{share} is pipelined: {obstacle}" for obstacle in report.obstacles]


def _summary(report: Report) -> list[str]:
    planned = f"planned for {report.platform}, {report.machine}" if report.machine else f"planned for {report.platform}"
    if not report.ops_total:
        return _wrap(f"nothing to pipeline: the function has no operators ({planned})")
    covered = percent_text(report.ops_pipelined, report.ops_total)
    head = f"{count_text(report.ops_pipelined)} of {plural(report.ops_total, 'operator')} pipelined ({covered})"
    lines = _wrap(f"{head} in {plural(len(report.regions), 'region')}; {planned}")
    if report.regions:
        lines += _wrap(
            f"off-chip traffic (estimate): {byte_text(report.traffic_bulk_sync)} with jax.jit -> "
            f"{byte_text(report.traffic_pipeline)} pipelined, {byte_text(report.bytes_saved)} saved "
            f"({percent_text(report.bytes_saved, report.traffic_bulk_sync)})"
        )
    elif not report.obstacles:
        lines.append("nothing is pipelined: XLA runs the function as under jax.jit; the reasons are below")
    return lines


def _text_region(region: RegionReport) -> list[str]:
    order = f" in the order of {region.order}" if region.order else ""
    lines = _wrap(
        f"{region.name}: {plural(region.ops, 'operator')}{in_phases(region)} over {plural(region.rows, 'row')}{order}, "
        f"{plural(region.tiles, 'tile')} of {plural(region.tile_rows, 'row')}"
    )
    gain = f" ({region.baseline_seconds / region.seconds:.2f}x)" if region.seconds > 0 else ""
    lines += _wrap(f"{_arrangement(region)}; {_bottleneck(region)}", "  ")
    lines += _wrap(
        f"estimate: {time_text(region.seconds)}, with jax.jit {time_text(region.baseline_seconds)}{gain}; "
        f"reads {byte_text(region.bytes_in)}, writes {byte_text(region.bytes_out)}, saves {byte_text(region.bytes_saved)}",
        "  ",
    )
    lines += [line for text in _details(region) for line in _wrap(text, "  ")]
    lines += _text_table(*_stage_table(region, _repeats), right=(2, 3) if region.lanes else (2,))
    if region.queues:
        lines += _text_table(QUEUES_HEAD, _queue_rows(region, "->"), right=(2, 3))
    for text, spaces in phase_texts(region):
        lines += _wrap(text, "  ")
        lines += [line for space, ops in spaces for line in _wrap(f"{space}: {ops}", "    ")]
    return lines


def in_phases(region: RegionReport) -> str:
    """The number of phases of a call with several; the text behind it describes the first."""
    last = max((phase.number for phase in region.later), default=0)
    return f" in {count_text(last + 1)} phases, the first" if last else ""


def _details(region: RegionReport) -> list[str]:
    """The loops of a region, the bytes that its phases leave for later ones, and the weight that it prefetches."""
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
    if ahead := region.ahead:
        texts.append(
            f"prefetches into the L2 cache {byte_text(ahead.bytes)} of the {byte_text(ahead.weight_bytes)} of weights that "
            f"{ahead.op} ({ahead.source or 'no source line'}) reads next; estimate: it takes {time_text(ahead.seconds)} less"
        )
    return texts


def _stage_table(region: RegionReport, operators: Callable[[Sequence[str]], str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows; workers only on a GPU, as on a CPU every worker runs all stages."""
    head = ("stage", "unit", *(("workers",) if region.lanes else ()), "us/tile", "operators")
    rows = []
    for s in region.stages:
        workers = (str(s.workers),) if region.lanes else ()
        rows.append((s.name, s.resource, *workers, f"{s.microseconds:.1f}", operators(s.ops)))
    return head, rows


QUEUES_HEAD = ("queue", "entry", "depth", "bytes", "place")


def _queue_rows(region: RegionReport, arrow: str) -> list[tuple[str, ...]]:
    return [
        (f"{q.producer} {arrow} {', '.join(q.consumers)}", q.value, str(q.depth), byte_text(q.bytes), q.place)
        for q in region.queues
    ]


def phase_texts(region: RegionReport) -> list[tuple[str, list[tuple[str, str]]]]:
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
        texts.append((text, [(_space(s), _repeats(s.ops)) for s in phase.spaces]))
    return texts


def _space(stream: StreamReport) -> str:
    order = f" in the order of {stream.order}" if stream.order else ""
    times = f"{count_text(stream.count)} of " if stream.count > 1 else ""
    return f"{times}{plural(stream.rows, 'row')}{order}, {plural(stream.tiles, 'tile')} of {plural(stream.tile_rows, 'row')}"


def _arrangement(region: RegionReport) -> str:
    if region.lanes:
        return _gpu_arrangement(region)
    who = "one core takes" if region.replicas == 1 else f"each of {count_text(region.replicas)} cores takes"
    return f"{who} whole tiles through all stages"


def _bottleneck(region: RegionReport) -> str:
    return f"bottleneck: {_BANDWIDTHS.get(region.bound, region.bound)}"


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
    """The title of the table of residual policies."""
    if residuals.of_gradient:
        return "residuals: what a gradient by all arguments would keep of the forward pass for the backward pass"
    return "residuals: what is kept of the forward pass for the backward pass"


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
    rows = [(r.source or "(no source line)", r.op + (f" x{r.count}" if r.count > 1 else ""), r.reason) for r in rejected]
    return lines + _text_table(("line", "operator", "reason"), rows)


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
    return textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=first + "  " if rest is None else rest)


# --- HTML -------------------------------------------------------------------------------------------------------------------------


def render_html(report: Report) -> str:
    """The HTML of ``Report._repr_html_``."""
    covered = percent_text(report.ops_pipelined, report.ops_total)
    head = (
        f"<p><b>{count_text(report.ops_pipelined)} of {plural(report.ops_total, 'operator')} pipelined</b> ({covered}) in "
        f"{plural(len(report.regions), 'region')}; planned for {escape(report.platform)}, {escape(report.machine)}<br>"
        f"off-chip traffic (estimate): {byte_text(report.traffic_bulk_sync)} with jax.jit, "
        f"{byte_text(report.traffic_pipeline)} pipelined, {byte_text(report.bytes_saved)} saved</p>"
    )
    top = [f"<p><b>{escape(text)}</b></p>" for text in obstacle_texts(report)]
    parts = ["<div>", *top, head, *(_html_region(region) for region in report.regions)]
    if report.residuals:
        parts += [
            f"<p>{escape(residual_title(report.residuals))}</p>",
            _html_table(RESIDUALS_HEAD, residual_rows(report.residuals)),
        ]
    if report.rejected:
        parts.append(f"<p>left to XLA: {plural(sum(r.count for r in report.rejected), 'operator')}</p>")
        parts.append(
            _html_table(
                ("line", "operator", "count", "reason"), [(r.source, r.op, str(r.count), r.reason) for r in report.rejected]
            )
        )
    parts += [f"<p>note: {escape(note)}</p>" for note in report.notes]
    return "\n".join([*parts, "</div>"])


def escape(text: str) -> str:
    """``text`` escaped for any place in HTML."""
    return html.escape(printable(text))


def _html_region(region: RegionReport) -> str:
    head = (
        f"<p><b>{escape(region.name)}</b>: {plural(region.ops, 'operator')}{in_phases(region)} over "
        f"{plural(region.rows, 'row')} in {plural(region.tiles, 'tile')} of {count_text(region.tile_rows)}; "
        f"{escape(region.arrangement)} on "
        f"{plural(region.workers * region.replicas, 'worker')}; estimate: {time_text(region.seconds)}, "
        f"with jax.jit {time_text(region.baseline_seconds)}; {escape(_bottleneck(region))}; "
        f"saves {byte_text(region.bytes_saved)}</p>"
    )
    details = "".join(f"<p>{escape(text)}</p>" for text in _details(region))
    stages = _html_table(*_stage_table(region, ", ".join))
    queues = _html_table(QUEUES_HEAD, _queue_rows(region, "→")) if region.queues else ""
    phases = "".join(f"<p>{escape(text)}</p>" + _html_table(("rows", "operators"), spaces) for text, spaces in phase_texts(region))
    return head + details + stages + queues + phases


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag} style='text-align:left'>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"


# --- the report that prints itself ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of ``kj.explain(fn)(*args)``: what ``pipeline`` would do with ``fn`` on ``platform``, found without running it.

    ``ops_total`` counts the function's operators after calls were inlined, without views (reshapes, broadcasts, iota), which move
    no bytes of their own; ``ops_pipelined`` counts those inside a region. ``traffic_bulk_sync`` and ``traffic_pipeline`` are the
    modelled off-chip bytes of the whole function without and with its regions. ``flops`` are its useful operations: those of matrix
    products, and those of pointwise operators as the cost model counts them. ``residuals`` compares what is saved for the backward
    pass, if the function has or could have one. ``obstacles`` are the reasons that keep all pipelines away from the function, or
    from some of its pipelined calls: no operator of those counts as pipelined.

    Example::

        report = kj.explain(mlp)(params, x)
        print(report)                      # regions, stages, queues, and the reason for every operator left out
        assert report.coverage > 0.9
        json.dumps(report.to_dict())
    """

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

    @property
    def coverage(self) -> float:
        """Pipelined operators over all operators, 0 to 1 (0 for a function without operators)."""
        return self.ops_pipelined / self.ops_total if self.ops_total else 0.0

    @property
    def seconds(self) -> float:
        """Modelled time of the regions; operators left to XLA are not in it."""
        return sum(region.seconds for region in self.regions)

    @property
    def bytes_saved(self) -> int:
        """Modelled off-chip bytes that the pipelines do not move."""
        return self.traffic_bulk_sync - self.traffic_pipeline

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-serialisable dictionaries and lists, ``coverage`` and ``bytes_saved`` included."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return {**plain, "coverage": self.coverage, "bytes_saved": self.bytes_saved}

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_html(self)


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


# --- several reports as one -------------------------------------------------------------------------------------------------------


def merge_body_reports(reports: Sequence[Report]) -> Report:
    """One report of several: the function's own first, then those of the bodies of its loops."""
    if len(reports) == 1:
        return reports[0]
    bodies = len(reports) - 1
    are = "body is" if bodies == 1 else "bodies are"
    return merge_reports(reports, f"{bodies} loop or branch {are} included, each counted once for any number of steps")


def merge_reports(reports: Sequence[Report], note: str) -> Report:
    """The sum of ``reports``, all for one machine, with ``note`` added; equal notes and obstacles are listed once."""
    regions = [dataclasses.replace(r, name=f"region{k}") for k, r in enumerate(r for report in reports for r in report.regions)]
    added = ("ops_total", "ops_pipelined", "traffic_bulk_sync", "traffic_pipeline", "flops")
    sums: dict[str, Any] = {name: sum(getattr(r, name) for r in reports) for name in added}
    return dataclasses.replace(
        reports[0],
        regions=tuple(regions),
        rejected=tuple(x for r in reports for x in r.rejected),
        notes=(*dict.fromkeys(n for r in reports for n in r.notes), note),
        obstacles=tuple(dict.fromkeys(o for r in reports for o in r.obstacles)),
        **sums,
    )
