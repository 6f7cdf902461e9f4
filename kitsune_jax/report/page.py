"""A report as HTML.

Comes in: a ``ReportData``. Goes out: a piece of HTML for a notebook, or a page, both self-contained, without scripts and every
string escaped. They show the verdict, the picture of each region, and everything that the text shows.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from kitsune_jax.config import printable
from kitsune_jax.report.data import RegionReport, ReportData, byte_text, plural, time_text
from kitsune_jax.report.picture import regions_svg
from kitsune_jax.report.text import (
    CAUSES_HEAD,
    QUEUES_HEAD,
    RESIDUALS_HEAD,
    cause_rows,
    causes_of,
    causes_title,
    detail_texts,
    in_phases,
    longest_regions,
    obstacle_texts,
    phase_texts,
    queue_rows,
    residual_rows,
    residual_title,
    stage_table,
    summary_texts,
    times_text,
)

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:2px 10px 2px 0;vertical-align:top}"
    "td:first-child{white-space:nowrap}"
    "@media print{details>*{display:block}}"
)


def render_page(report: ReportData, title: str) -> str:
    """A whole page, for ``Report.save``."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>\n{render_html(report, every=True)}\n</body></html>\n"
    )


def render_html(report: ReportData, *, every: bool = False) -> str:
    """The HTML of ``Report._repr_html_``. ``every``: of all regions and operators, not only of those that take most of the time."""
    first, *rest = summary_texts(report)
    top = [f"<p><b>{escape(text)}</b></p>" for text in (*obstacle_texts(report), first)]
    shown, more = (report.regions, "") if every else longest_regions(report.regions)
    parts = ["<div>", *top, *(f"<p>{escape(text)}</p>" for text in rest)]
    parts += [_region(region, report) for region in shown]
    if more:
        parts.append(f"<p>{escape(more)}</p>")
    if report.residuals:
        parts += [
            f"<p>{escape(residual_title(report.residuals))}</p>",
            _table(RESIDUALS_HEAD, residual_rows(report.residuals)),
        ]
    if report.rejected:
        parts += [f"<p>{escape(causes_title(report))}</p>", _table(CAUSES_HEAD, cause_rows(causes_of(report.rejected)))]
        rows = [(r.source, r.op, str(r.count), time_text(r.seconds) if r.seconds else "", r.reason) for r in report.rejected]
        parts.append(_closed("each operator left to XLA", _table(("line", "operator", "count", "time", "reason"), rows)))
    parts += [f"<p>note: {escape(note)}</p>" for note in report.notes]
    return "\n".join([*parts, "</div>"])


def escape(text: str) -> str:
    """``text`` escaped for any place in HTML."""
    return html.escape(printable(text))


def _region(region: RegionReport, report: ReportData) -> str:
    head = (
        f"<p><b>{escape(region.name)}</b>{escape(in_phases(region))}: {escape(times_text(region, report))}; saves "
        f"{byte_text(region.bytes_saved)}</p>"
    )
    details = "".join(f"<p>{escape(text)}</p>" for text in detail_texts(region))
    tables = _table(*stage_table(region, ", ".join))
    tables += _table(QUEUES_HEAD, queue_rows(region, "→")) if region.queues else ""
    for text, spaces in phase_texts(region, ", ".join):
        tables += f"<p>{escape(text)}</p>" + _table(("rows", "operators"), spaces)
    label = f"the operators of its {plural(len(region.stages), 'stage')}"
    return head + regions_svg([region], report.bandwidth) + details + _closed(label, tables)


def _closed(label: str, inside: str) -> str:
    """``inside`` behind a label that opens it."""
    return f"<details><summary>{escape(label)}</summary>{inside}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag} style='text-align:left'>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"
