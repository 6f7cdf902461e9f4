"""What ``kj.explain`` returns: what was decided about a function, for people to read.

Comes in: a Graph, the regions that were planned and the ops that were rejected (``build_report``). Goes out: a ``Report``, plain
frozen data that prints as text, as HTML in a notebook and as a dictionary. Nothing in here decides anything.
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
