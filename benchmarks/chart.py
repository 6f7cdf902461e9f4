"""The picture of the page of benchmarks: the speed of each kind of model relative to ``jax.jit``, as bars on a logarithmic axis.

Comes in: the least and the largest speed of each kind, by device and mode. Goes out: SVG. Colours follow the reader's light or dark
mode, and print; every bar has its numbers beside it.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {
    ("CPU", "infer"): "CPU, inference",
    ("CPU", "train"): "CPU, training step",
    ("GPU", "infer"): "GPU, inference",
    ("GPU", "train"): "GPU, training step",
}
_COLOURS = {("CPU", "infer"): "#7fb3d5", ("CPU", "train"): "#2f6d9c", ("GPU", "infer"): "#f2b49c", ("GPU", "train"): "#c4623a"}
_LEFT, _RIGHT, _TOP = 290, 810, 64  # where the axis begins and ends, and where the first kind begins
_BAR, _GAP, _LEAST = 11, 14, 4.0  # heights of a bar and between kinds; the width of a bar of one number
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
_STYLE = """
    .page { fill: #fff } .ink { fill: #1c1c1c } .soft { fill: #4a4a4a } .line { stroke: #cfcfcf } .one { stroke: #1c1c1c }
    @media (prefers-color-scheme: dark) {
      .page { fill: #16191d } .ink { fill: #ececec } .soft { fill: #b9bec4 } .line { stroke: #3a4047 } .one { stroke: #ececec }
    }
    @media print {
      .page { fill: #fff } .ink { fill: #000 } .soft { fill: #333 } .line { stroke: #ccc } .one { stroke: #000 }
    }
  """


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """The speeds of a kind of model in one column, (device, mode), relative to ``jax.jit``."""

    column: tuple[str, str]
    least: float
    most: float


def bars(ranges: Mapping[str, Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]]) -> dict[str, list[Bar]]:
    """The bars of each kind, of the records of ``benchmarks.page.ranges``."""
    found: dict[str, list[Bar]] = {}
    for kind, columns in ranges.items():
        for column in _NAMES:
            if records := columns.get(column):
                of = [r["speedup"] if r["mode"] == "infer" else r["speedup"]["whole"] for r in records]
                ratios = [s["jit"]["median"] for s in of]
                found.setdefault(kind, []).append(Bar(column, min(ratios), max(ratios)))
    return found


def svg(kinds: Mapping[str, Sequence[Bar]]) -> str:
    """The picture. A speed outside of the axis ends at its edge."""
    parts, y = [], _TOP
    for kind, found in kinds.items():
        middle = y + len(found) * _BAR / 2
        parts.append(f'<text class="ink" x="{_LEFT - 12}" y="{middle + 4:g}" text-anchor="end">{html.escape(kind)}</text>')
        for bar in found:
            parts.append(_bar(bar, y))
            y += _BAR
        y += _GAP
    bottom = y - _GAP + 6
    lines = [_tick(x, bottom) for x in _TICKS]
    described = "; ".join(f"{kind}: {', '.join(map(_words, found))}" for kind, found in kinds.items())
    height = bottom + 34
    return (
        "\n  ".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" font-family="Helvetica, Arial, sans-serif"',
                'font-size="12" role="img" aria-labelledby="t d">',
                '<title id="t">Speed relative to jax.jit by kind of model</title>',
                f'<desc id="d">{html.escape(described)}</desc>',
                f"<style>{_STYLE}</style>",
                f'<rect class="page" width="900" height="{height}" rx="6"/>',
                *_legend(),
                *lines,
                *parts,
            ]
        )
        + "\n</svg>\n"
    )


def _x(speed: float) -> float:
    low, high = math.log2(_TICKS[0]), math.log2(_TICKS[-1])
    place = (math.log2(speed) - low) / (high - low)
    return round(_LEFT + (_RIGHT - _LEFT) * min(max(place, 0.0), 1.0), 1)


def _text(bar: Bar) -> str:
    least, most = f"{bar.least:.2f}x", f"{bar.most:.2f}x"
    return least if least == most else f"{least} to {most}"


def _words(bar: Bar) -> str:
    return f"{_NAMES[bar.column]} {_text(bar)}"


def _bar(bar: Bar, y: int) -> str:
    start, end = _x(bar.least), _x(bar.most)
    if end - start < _LEAST:
        start, end = start - _LEAST / 2, start + _LEAST / 2
    return (
        f'<rect x="{start:g}" y="{y + 1}" width="{end - start:g}" height="{_BAR - 2}" fill="{_COLOURS[bar.column]}"/>'
        f'<text class="soft" x="{end + 5:g}" y="{y + 9}" font-size="9">{_text(bar)}</text>'
    )


def _tick(speed: float, bottom: int) -> str:
    x, kind = _x(speed), "one" if speed == 1 else "line"
    words = "as jax.jit" if speed == 1 else f"{speed:g}x"
    return (
        f'<path class="{kind}" d="M{x:g} {_TOP - 8}V{bottom}"/>'
        f'<text class="soft" x="{x:g}" y="{bottom + 18}" text-anchor="middle">{words}</text>'
    )


def _legend() -> list[str]:
    found = ['<text class="ink" x="20" y="26" font-size="15" font-weight="bold">times as fast as jax.jit</text>']
    for k, (column, name) in enumerate(_NAMES.items()):
        x = _LEFT + 145 * k
        found.append(f'<rect x="{x}" y="16" width="12" height="12" fill="{_COLOURS[column]}"/>')
        found.append(f'<text class="soft" x="{x + 17}" y="26">{name}</text>')
    return found
