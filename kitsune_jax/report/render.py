"""``Report``, which prints itself; several reports as one.

Comes in: the fields of ``ReportData``. Goes out: text, HTML, a picture, a dictionary, a file. Nothing here decides anything.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kitsune_jax.report.data import MeasuredTimes, ReportData
from kitsune_jax.report.page import render_html, render_page
from kitsune_jax.report.picture import regions_svg
from kitsune_jax.report.text import render_text, summary_texts


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Report(ReportData):
    """The result of ``kj.explain(fn)(*args)``: what ``pipeline`` would do with ``fn`` on ``platform``, found without running it.

    ``ops_total`` counts the function's operators after calls were inlined, without views (reshapes, broadcasts, iota), which move
    no bytes of their own; ``ops_pipelined`` counts those inside a region. ``traffic_bulk_sync`` and ``traffic_pipeline`` are the
    modelled off-chip bytes of the whole function without and with its regions. ``flops`` are its useful operations: those of matrix
    products, and those of pointwise operators as the cost model counts them. ``residuals`` compares what is saved for the backward
    pass, if the function has or could have one. ``obstacles`` are the reasons that keep all pipelines away from the function, or
    from some of its pipelined calls: no operator of those counts as pipelined. ``measured``: the times that the choice between
    plans was made by, if it was made by times. ``bandwidth``: of the machine's memory, bytes per second. ``unknown``: how many
    operators left to XLA the model does not know; it counts them with the time to move their bytes. ``gain_band``: in most programs
    a modelled gain times these two numbers holds the measured one between them.

    A notebook shows it as HTML with a picture of each region's plan.

    Example:
      >>> import jax, jax.numpy as jnp, kitsune_jax as kj
      >>> report = kj.explain(lambda w, x: jax.nn.relu(x @ w), force=True)(jnp.ones((8, 8)), jnp.ones((512, 8)))
      >>> report.coverage
      1.0
      >>> "as fast as jax.jit" in report.text()  # the first line says whether a pipeline helps
      True
    """

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-serialisable dictionaries and lists; ``coverage``, ``bytes_saved`` and ``expected_speedup`` are in
        it."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        more = {"coverage": self.coverage, "bytes_saved": self.bytes_saved, "expected_speedup": self.expected_speedup}
        return {**plain, **more}

    def text(self, verbose: bool = False) -> str:
        """The report as text of at most 120 columns, beginning with the verdict.

        By default it shows the five regions and the five reasons that cost most; ``verbose``: all regions, and every operator that
        is left to XLA.
        """
        return render_text(self, verbose)

    def save(self, path: str | Path, title: str = "kitsune_jax: the plan") -> None:
        """Write the report to a file: ".html" (a page with a picture of each plan, which needs no network), ".svg" (the pictures),
        ".json" (``to_dict``) or ".txt" (``text(verbose=True)``).

        Raises ``ValueError`` for another ending, and ``OSError`` where the file cannot be written.
        """
        path = Path(path)
        makers: dict[str, Callable[[], str]] = {
            ".html": lambda: render_page(self, title),
            ".svg": lambda: regions_svg(self.regions, self.bandwidth, alone=True),
            ".json": lambda: json.dumps(self.to_dict(), indent=1),
            ".txt": lambda: self.text(verbose=True) + "\n",
        }
        if path.suffix not in makers:
            raise ValueError(f"a report cannot be saved as {path.name!r}: end its name in {', '.join(makers)}")
        path.write_text(makers[path.suffix](), encoding="utf-8")

    def __repr__(self) -> str:
        return f"<Report: {summary_texts(self)[0]}>"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return render_html(self)


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


# --- several reports as one -------------------------------------------------------------------------------------------------------


def repeated(report: Report, times: int) -> Report:
    """``report``, of a part of a program that runs ``times`` times. Operators and bytes are those of one run."""
    if times == 1:
        return report
    return dataclasses.replace(
        report,
        regions=tuple(dataclasses.replace(r, times=r.times * times) for r in report.regions),
        rejected=tuple(r if r.seconds is None else dataclasses.replace(r, seconds=r.seconds * times) for r in report.rejected),
        measured=None if report.measured is None else report.measured.times(times),
    )


_SHARE_OF_ALL = 0.9  # of a function's time: a region with this much of it takes as long as the function


def with_measured(report: Report, times: MeasuredTimes) -> Report:
    """``report`` with the measured times of the whole function, which are also those of a region that does almost all of it."""
    regions = report.regions
    if len(regions) == 1:
        (only,) = regions
        alone = only.times == 1 and only.seconds >= _SHARE_OF_ALL * (only.seconds + (report.left_seconds or 0.0))
        regions = (dataclasses.replace(only, measured=times),) if alone and report.left_seconds is not None else regions
    return dataclasses.replace(report, measured=times, regions=regions)


def with_measured_calls(report: Report, times: Mapping[str, MeasuredTimes]) -> Report:
    """``report`` with the measured ``times`` of some of its regions, by name."""
    regions = tuple(dataclasses.replace(r, measured=times[r.name]) if r.name in times else r for r in report.regions)
    return dataclasses.replace(report, regions=regions)


def merge_body_reports(reports: Sequence[Report]) -> Report:
    """One report of several: the function's own first, whose measured times are those of the whole function, then those of the
    bodies of its loops."""
    if len(reports) == 1:
        return reports[0]
    bodies = len(reports) - 1
    are = "body is" if bodies == 1 else "bodies are"
    note = f"{bodies} loop or branch {are} included: the operators and bytes of one step, the times of all steps"
    note += "; where their number depends on data, of one"
    return dataclasses.replace(_merged(reports, note), measured=reports[0].measured)


def merge_reports(reports: Sequence[Report], note: str) -> Report:
    """The sum of ``reports``, all for one machine, with ``note`` added; equal notes and obstacles are listed once."""
    times = [r.measured for r in reports]
    measured = None if None in times else MeasuredTimes.sum_of(t for t in times if t is not None)
    return dataclasses.replace(_merged(reports, note), measured=measured)


def _merged(reports: Sequence[Report], note: str) -> Report:
    regions = [dataclasses.replace(r, name=f"region{k}") for k, r in enumerate(r for report in reports for r in report.regions)]
    added = ("ops_total", "ops_pipelined", "traffic_bulk_sync", "traffic_pipeline", "flops", "unknown")
    sums: dict[str, Any] = {name: sum(getattr(r, name) for r in reports) for name in added}
    return dataclasses.replace(
        reports[0],
        regions=tuple(regions),
        rejected=tuple(x for r in reports for x in r.rejected),
        notes=(*dict.fromkeys(n for r in reports for n in r.notes), note),
        obstacles=tuple(dict.fromkeys(o for r in reports for o in r.obstacles)),
        **sums,
    )
