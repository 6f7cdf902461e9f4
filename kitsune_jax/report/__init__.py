"""The report of ``kj.explain``: what was decided about a function, for people to read.

In: a Graph, the planned regions and the rejected ops (``build_report``). Out: a ``Report``, frozen data that prints as text, as
HTML in a notebook and as a dictionary. Nothing here decides anything.
"""

from __future__ import annotations

from kitsune_jax.report.build import build_report as build_report
from kitsune_jax.report.data import PhaseReport as PhaseReport
from kitsune_jax.report.data import PlannedPasses as PlannedPasses
from kitsune_jax.report.data import PolicyReport as PolicyReport
from kitsune_jax.report.data import QueueReport as QueueReport
from kitsune_jax.report.data import RegionReport as RegionReport
from kitsune_jax.report.data import Rejected as Rejected
from kitsune_jax.report.data import ResidualReport as ResidualReport
from kitsune_jax.report.data import StageReport as StageReport
from kitsune_jax.report.render import Report as Report
