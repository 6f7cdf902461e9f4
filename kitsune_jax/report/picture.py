"""The picture of a region's plan, as SVG.

Comes in: a ``RegionReport``, and the machine's memory bandwidth. Goes out: one ``<svg>`` element without scripts and outside
references. It shows the stages with their operators and source lines, the queues between them, the phases behind them, the bytes
that cross the chip's edge before and after, and the region in the machine's roofline. Text takes the colour of the page around it
and fills are translucent, so it can be read on white, on black and in print; no fact is told by colour alone. ``<title>`` and
``<desc>`` say the same to a screen reader.
"""

from __future__ import annotations

import hashlib
import html
import math
import textwrap
from collections.abc import Iterable, Sequence

from kitsune_jax.config import printable
from kitsune_jax.report.data import QueueReport, RegionReport, StageReport, byte_text, flop_text, plural, time_text
from kitsune_jax.report.text import MOST_SHOWN, arrangement_text, bottleneck_text, phase_texts, repeats_text, short_operators

WIDTH = 960
_MARGIN, _GAP = 12, 76  # around the picture; between stages, for an arrow with two lines of text
_LINE, _CHAR = 15, 6.6  # height of a line and the most that a character of the text is wide, on average
_MOST_OPERATORS, _MOST_SOURCES = 10, 4  # lines in a stage
_FILLS = {"tensor": "rgba(46,118,204,.28)", "simt": "rgba(222,132,20,.28)", "memory": "rgba(120,120,120,.22)"}
_UNITS = {"tensor": "matrix products", "simt": "other arithmetic"}
_STYLE = (  # of the elements inside one picture: a page may hold several
    "#{0} text{{font:11px system-ui,sans-serif;fill:currentColor}}#{0} .b{{font-weight:600}}#{0} .f{{opacity:.75}}"
    "#{0} rect,#{0} path,#{0} circle{{stroke:currentColor;stroke-width:1}}#{0} .t{{stroke-width:3}}#{0} .d{{stroke-dasharray:4 3}}"
)
_ALONE = "svg{color:#1a1a1a;background:#fff}@media (prefers-color-scheme:dark){svg{color:#eee;background:#111}}"


def regions_svg(regions: Sequence[RegionReport], bandwidth: float, *, alone: bool = False) -> str:
    """The pictures of ``regions``, one below the other. ``bandwidth``: of the machine's memory, bytes per second, 0 where it is not
    known. ``alone``: for a file of its own, whose viewer has no page with colours around it."""
    drawing, bottom = _Drawing(), 0.0
    for region in regions:
        bottom = _draw(drawing, region, bandwidth, bottom) + 2 * _MARGIN
    if not regions:
        drawing.text(_MARGIN, 24, "nothing is pipelined")
        bottom = 24 + _MARGIN
    title = "Plan of " + ", ".join(region.name for region in regions) if regions else "No plan"
    return drawing.svg(bottom, title, " ".join(map(description, regions)) or "Nothing is pipelined.", alone)


def _draw(drawing: _Drawing, region: RegionReport, bandwidth: float, top: float) -> float:
    """Draw ``region`` from ``top`` on. Returns where it ends."""
    drawing.text(_MARGIN, top + 24, f"{region.name}: {_headline(region)}", "b")
    drawing.text(_MARGIN, top + 24 + _LINE, f"{arrangement_text(region)}; {bottleneck_text(region)}")
    bottom = _stages(drawing, region, top + 24 + 2 * _LINE)
    bottom = _phases(drawing, region, bottom + 16)
    return max(_bars(drawing, region, bottom + 28), _roofline(drawing, region, bandwidth, bottom + 28))


def description(region: RegionReport) -> str:
    """The picture in sentences."""
    said = [f"{region.name} runs {_headline(region)}", f"{arrangement_text(region)}, {bottleneck_text(region)}"]
    for stage in region.stages:
        said.append(
            f"stage {stage.name}, {_UNITS.get(stage.resource, stage.resource)}, {stage.microseconds:.1f} microseconds a tile, runs "
            f"{short_operators(stage.ops)}" + (f" from {', '.join(stage.sources[:_MOST_SOURCES])}" if stage.sources else "")
        )
    said += [f"{q.producer} hands {', '.join(q.consumers)} {_queue_text(q)} a tile through {q.place}" for q in region.queues]
    said += [text for text, _ in phase_texts(region, short_operators)[:MOST_SHOWN]]
    said.append(f"it takes {time_text(region.pipeline_seconds)}, with jax.jit {time_text(region.jit_seconds)}, both {_how(region)}")
    moved, before = byte_text(region.bytes_moved), byte_text(region.baseline_bytes)
    said.append(f"it moves {moved} to and from memory, with jax.jit {before}, both modelled")
    return ". ".join(s[0].upper() + s[1:] for s in said) + "."


def _how(region: RegionReport) -> str:
    return "modelled" if region.measured is None else "measured"


def _headline(region: RegionReport) -> str:
    return (
        f"{plural(region.ops, 'operator')} over {plural(region.rows, 'row')}, {plural(region.tiles, 'tile')} of "
        f"{plural(region.tile_rows, 'row')}{repeats_text(region)}"
    )


class _Drawing:
    """SVG elements, collected."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", size: float = math.inf) -> None:
        """One line. ``size``: the most pixels that it may take; a longer one ends in dots."""
        room = max(4, int(min(size, WIDTH) / _CHAR))
        shown = text if len(text) <= room else text[: room - 3] + "..."
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(printable(shown))}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, kind: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="4" fill="{fill}" class="{kind}"/>'
        )

    def path(self, points: Iterable[tuple[float, float]], kind: str = "") -> None:
        d = " ".join(f"{'L' if k else 'M'}{x:.1f} {y:.1f}" for k, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{d}" fill="none" class="{kind}"/>')

    def arrow(self, x0: float, x1: float, y: float) -> None:
        self.path([(x0, y), (x1, y)])
        self.path([(x1 - 6, y - 4), (x1, y), (x1 - 6, y + 4)])

    def dot(self, x: float, y: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"/>')

    def svg(self, height: float, title: str, about: str, alone: bool) -> str:
        inside = "".join(self.parts)
        key = "kj-" + hashlib.sha256((inside + about).encode()).hexdigest()[:12]
        style = (_ALONE if alone else "") + _STYLE.format(key)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{key}" role="img" aria-labelledby="{key}-title {key}-about" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" style="max-width:{WIDTH}px;width:100%;height:auto">'
            f'<title id="{key}-title">{html.escape(printable(title))}</title>'
            f'<desc id="{key}-about">{html.escape(printable(about))}</desc><style>{style}</style>{inside}</svg>'
        )


# --- stages, queues, phases -------------------------------------------------------------------------------------------------------


def _stages(drawing: _Drawing, region: RegionReport, top: float) -> float:
    """The stages from left to right, in rows of at most three, between the bytes that the region reads and writes."""
    ends = 74.0  # width of the boxes of operands and results
    each = min(3, len(region.stages))
    width = (WIDTH - 2 * _MARGIN - 2 * ends - (each + 1) * _GAP) / max(1, each)
    if len(region.stages) == 1:
        width = min(width, 560.0)
    lines = {stage.name: _stage_lines(stage, width, region) for stage in region.stages}
    queues = {consumer: q for q in region.queues for consumer in q.consumers}
    y = top
    for first in range(0, len(region.stages), each or 1):
        row = region.stages[first : first + each]
        height = 12 + _LINE * max(len(lines[stage.name]) for stage in row)
        x = float(_MARGIN)
        if first == 0:
            _end(drawing, x, y, ends, height, ("reads", byte_text(region.bytes_in)))
        x += ends
        for k, stage in enumerate(row):
            _arrow_between(drawing, x, y + height / 2, queues.get(stage.name), first + k == 0)
            x += _GAP
            bound = stage.name == region.bound
            drawing.box(x, y, width, height, _FILLS.get(stage.resource, "none"), "t" if bound else "")
            for n, (text, kind) in enumerate(lines[stage.name]):
                drawing.text(x + 8, y + 16 + n * _LINE, text, kind, size=width - 12)
            x += width
        if first + each >= len(region.stages):
            drawing.arrow(x + 4, x + _GAP - 4, y + height / 2)
            _end(drawing, x + _GAP, y, ends, height, ("writes", byte_text(region.bytes_out)))
        y += height + 14
    return y


def _end(drawing: _Drawing, x: float, y: float, width: float, height: float, texts: Sequence[str]) -> None:
    drawing.box(x, y, width, height, _FILLS["memory"])
    for n, text in enumerate(texts):
        drawing.text(x + width / 2, y + height / 2 - 2 + n * _LINE, text, "b" if n else "", "middle", width)


def _arrow_between(drawing: _Drawing, x: float, y: float, queue: QueueReport | None, first: bool) -> None:
    drawing.arrow(x + 4, x + _GAP - 4, y)
    if queue is not None and not first:
        drawing.text(x + _GAP / 2, y - 6, byte_text(queue.bytes / max(1, queue.depth)), "f", "middle", _GAP)
        drawing.text(x + _GAP / 2, y + 14, f"{queue.place} x{queue.depth}", "f", "middle", _GAP)


def _queue_text(queue: QueueReport) -> str:
    return f"{queue.value}, {byte_text(queue.bytes / max(1, queue.depth))}"


def _stage_lines(stage: StageReport, width: float, region: RegionReport) -> list[tuple[str, str]]:
    """(text, class) of each line in the box of a stage."""
    unit = _UNITS.get(stage.resource, stage.resource) + (", the bottleneck" if stage.name == region.bound else "")
    workers = f", {plural(stage.workers, 'CTA')}" if region.traits else ""
    room = max(12, int((width - 12) / _CHAR))
    operators = _cut(textwrap.wrap(printable(short_operators(stage.ops)), room), _MOST_OPERATORS)
    sources = _cut(list(stage.sources), _MOST_SOURCES)
    return [
        (stage.name, "b"),
        (unit, ""),
        (f"{stage.microseconds:.1f} us a tile{workers}", ""),
        *((line, "") for line in operators),
        *((line, "f") for line in sources),
    ]


def _cut(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], f"and {plural(len(lines) - most + 1, 'more line')}"]


def _phases(drawing: _Drawing, region: RegionReport, top: float) -> float:
    """The phases behind the first: a box each, with the barrier in front of it."""
    texts = phase_texts(region, short_operators)
    y = top
    for text, spaces in texts[:MOST_SHOWN]:
        lines = textwrap.wrap(printable(text), 130)
        for space, ops in spaces:
            lines += _cut(textwrap.wrap(printable(f"{space}: {ops}"), 130), 3)
        drawing.path([(_MARGIN, y - 8), (WIDTH - _MARGIN, y - 8)], "d")
        drawing.box(_MARGIN, y, WIDTH - 2 * _MARGIN, 10 + _LINE * len(lines), "none")
        for n, line in enumerate(lines):
            drawing.text(_MARGIN + 8, y + 15 + n * _LINE, line, "" if n else "b")
        y += 10 + _LINE * len(lines) + 16
    if len(texts) > MOST_SHOWN:
        drawing.text(_MARGIN, y + 8, f"and {plural(len(texts) - MOST_SHOWN, 'more kind')} of phases")
        y += _LINE
    return y


# --- bytes and roofline -----------------------------------------------------------------------------------------------------------


def _bars(drawing: _Drawing, region: RegionReport, top: float) -> float:
    """Two bars: bytes to and from memory with ``jax.jit`` and as a pipeline; and two of the times."""
    label, width = 70.0, 300.0
    y = top
    for title, text, pairs in (
        ("bytes to and from memory, modelled", byte_text, (region.baseline_bytes, region.bytes_moved)),
        (f"time, {_how(region)}", time_text, (region.jit_seconds, region.pipeline_seconds)),
    ):
        drawing.text(_MARGIN, y, title, "b")
        most = max(*pairs, 1e-12)
        for name, value, fill in zip(("jax.jit", "pipeline"), pairs, (_FILLS["memory"], _FILLS["tensor"]), strict=True):
            y += 20
            drawing.text(_MARGIN, y + 4, name)
            drawing.box(_MARGIN + label, y - 8, width * value / most, 15, fill)
            drawing.text(_MARGIN + label + width * value / most + 6, y + 4, text(value))
        y += 34
    return y


def _roofline(drawing: _Drawing, region: RegionReport, bandwidth: float, top: float) -> float:
    """Operations per second over operations per byte, both logarithmic: what the machine can do, the region as a pipeline, and the
    region with ``jax.jit``."""
    known = min(bandwidth, region.peak_flops, region.flops, region.bytes_moved, region.baseline_bytes, region.seconds) > 0
    if not known:
        return top
    left, right, bottom = 560.0, WIDTH - 90.0, top + 150.0
    points = [
        ("pipeline", region.flops / region.bytes_moved, region.flops / region.pipeline_seconds, _FILLS["tensor"]),
        ("jax.jit", region.flops / region.baseline_bytes, region.flops / region.jit_seconds, "none"),
    ]
    ridge = region.peak_flops / bandwidth
    xs = [ridge, *(x for _, x, _, _ in points)]
    ys = [region.peak_flops, *(y for _, _, y, _ in points)]
    x_range = math.floor(math.log10(min(xs)) - 0.3), math.ceil(math.log10(max(xs)) + 0.3)
    y_range = math.floor(math.log10(min(ys)) - 0.2), math.ceil(math.log10(max(ys)) + 0.1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_range[0]) / (x_range[1] - x_range[0])
        up = (math.log10(y) - y_range[0]) / (y_range[1] - y_range[0])
        return left + (right - left) * across, bottom - (bottom - top - 10) * up

    drawing.text(left, top, "roofline: operations a second over operations a byte", "b")
    drawing.path([(left, top + 8), (left, bottom), (right, bottom)])
    for decade in range(y_range[0], y_range[1] + 1):
        drawing.text(left - 6, place(10.0 ** x_range[0], 10.0**decade)[1] + 4, flop_text(10.0**decade), "f", "end")
    for decade in range(x_range[0], x_range[1] + 1):
        drawing.text(place(10.0**decade, 10.0 ** y_range[0])[0], bottom + 14, f"{10.0**decade:g}", "f", "middle")
    start = max(10.0 ** x_range[0], 10.0 ** y_range[0] / bandwidth)
    roof = [place(start, start * bandwidth), place(ridge, region.peak_flops), place(10.0 ** x_range[1], region.peak_flops)]
    drawing.path(roof, "t")
    below = -math.inf  # where the label above ends: two points may lie close together
    for name, x, y, fill in sorted(points, key=lambda point: -point[2]):
        at = place(x, min(max(y, 10.0 ** y_range[0]), 10.0 ** y_range[1]))
        drawing.dot(*at, fill)
        label = f"{name}, {100 * y / min(region.peak_flops, x * bandwidth):.0f} % of the roof"
        near_edge = at[0] + 9 + len(label) * _CHAR > WIDTH
        line = max(at[1] + (16 if near_edge else 4), below)
        drawing.text(at[0] + (-9 if near_edge else 9), line, label, "", "end" if near_edge else "start")
        below = line + _LINE
    drawing.text(left, bottom + 30, f"peak {flop_text(region.peak_flops)}/s, memory {byte_text(bandwidth)}/s", "f")
    return bottom + 34
