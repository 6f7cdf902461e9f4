"""Several reports as one.

Comes in: reports of parts of a program. Goes out: a ``Report`` whose counts are their sums. Invariant: nothing that one of them
says is lost, and what several say is said once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.report.model import Report


def with_bodies(reports: Sequence[Report]) -> Report:
    """One report of several: the function's own first, then those of the bodies of its loops."""
    if len(reports) == 1:
        return reports[0]
    bodies = len(reports) - 1
    are = "body is" if bodies == 1 else "bodies are"
    return joined(reports, f"{bodies} loop or branch {are} included, each counted once whatever its trip count")


def joined(reports: Sequence[Report], note: str) -> Report:
    """The sum of ``reports``, all for one machine, with ``note`` among its notes."""
    first = reports[0]
    regions = [dataclasses.replace(r, name=f"region{k}") for k, r in enumerate(r for report in reports for r in report.regions)]
    return dataclasses.replace(
        first,
        ops_total=sum(r.ops_total for r in reports),
        ops_pipelined=sum(r.ops_pipelined for r in reports),
        regions=tuple(regions),
        rejected=tuple(x for r in reports for x in r.rejected),
        traffic_bulk_sync=sum(r.traffic_bulk_sync for r in reports),
        traffic_pipeline=sum(r.traffic_pipeline for r in reports),
        notes=(*dict.fromkeys(n for r in reports for n in r.notes), note),
        flops=sum(r.flops for r in reports),
        obstacles=tuple(dict.fromkeys(o for r in reports for o in r.obstacles)),
    )
