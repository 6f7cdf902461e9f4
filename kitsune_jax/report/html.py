"""A Report as one self-contained piece of HTML for notebooks: no script, no style sheet, every string escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from kitsune_jax.plain_text import printable
from kitsune_jax.report.data import RegionReport, ReportData
from kitsune_jax.report.text import (
    RESIDUALS_HEAD,
    ahead_text,
    in_phases,
    kept_text,
    loop_text,
    obstacle_texts,
    phase_texts,
    residual_rows,
    residual_title,
)
from kitsune_jax.report.units import byte_text, count_text, percent_text, plural, time_text


def render_html(report: ReportData) -> str:
    """The HTML behind ``Report._repr_html_``."""
    covered = percent_text(report.ops_pipelined, report.ops_total)
    head = (
        f"<p><b>{count_text(report.ops_pipelined)} of {plural(report.ops_total, 'operator')} pipelined</b> ({covered}) in "
        f"{plural(len(report.regions), 'region')}; planned for {escape(report.platform)}, {escape(report.machine)}<br>"
        f"off-chip traffic (modelled): {byte_text(report.traffic_bulk_sync)} bulk-synchronous, "
        f"{byte_text(report.traffic_pipeline)} pipelined, {byte_text(report.bytes_saved)} saved</p>"
    )
    top = [f"<p><b>{escape(text)}</b></p>" for text in obstacle_texts(report)]
    parts = ["<div>", *top, head, *(_region(region) for region in report.regions)]
    if report.residuals:
        parts += [f"<p>{escape(residual_title(report.residuals))}</p>", _table(RESIDUALS_HEAD, residual_rows(report.residuals))]
    if report.rejected:
        parts.append(f"<p>left to XLA: {plural(sum(r.count for r in report.rejected), 'operator')}</p>")
        parts.append(
            _table(("line", "operator", "count", "reason"), [(r.source, r.op, str(r.count), r.reason) for r in report.rejected])
        )
    parts += [f"<p>note: {escape(note)}</p>" for note in report.notes]
    return "\n".join([*parts, "</div>"])


def escape(text: str) -> str:
    """``text`` as it can stand anywhere in HTML."""
    return html.escape(printable(text))


def _region(region: RegionReport) -> str:
    head = (
        f"<p><b>{escape(region.name)}</b>: {plural(region.ops, 'operator')}{in_phases(region)} over "
        f"{plural(region.rows, 'row')} in {plural(region.tiles, 'tile')} of {count_text(region.tile_rows)}; "
        f"{escape(region.arrangement)} on "
        f"{plural(region.workers * region.replicas, 'worker')}; {time_text(region.seconds)} modelled, "
        f"{time_text(region.baseline_seconds)} bulk-synchronous; bound by {escape(region.bound)}; "
        f"saves {byte_text(region.bytes_saved)}</p>"
    )
    head += "".join(f"<p>{escape(loop_text(loop))}</p>" for loop in region.loops)
    if region.kept_bytes:
        head += f"<p>{escape(kept_text(region))}</p>"
    if region.ahead:
        head += f"<p>{escape(ahead_text(region.ahead))}</p>"
    workers = [(str(s.workers),) if region.lanes else () for s in region.stages]  # on a CPU every worker runs all stages
    stages = _table(
        ("stage", "unit", *(("workers",) if region.lanes else ()), "us/tile", "operators"),
        [
            (s.name, s.resource, *own, f"{s.microseconds:.1f}", ", ".join(s.ops))
            for s, own in zip(region.stages, workers, strict=True)
        ],
    )
    queues = [
        (f"{q.producer} → {', '.join(q.consumers)}", q.value, str(q.depth), byte_text(q.bytes), q.place) for q in region.queues
    ]
    phases = "".join(f"<p>{escape(text)}</p>" + _table(("rows", "operators"), spaces) for text, spaces in phase_texts(region))
    return head + stages + (_table(("queue", "entry", "depth", "bytes", "place"), queues) if queues else "") + phases


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag} style='text-align:left'>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"
