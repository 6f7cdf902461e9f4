"""What ``kj.explain`` returns: a plan, told to a person.

Comes in: a Graph, the regions that were planned and the ops that were rejected (``build_report``). Goes out: a ``Report``, plain
frozen data that prints as text, as HTML in a notebook and as a dictionary. Nothing in here decides anything.
"""

from __future__ import annotations

from kitsune_jax.report.build import build_report as build_report
from kitsune_jax.report.model import PhaseReport as PhaseReport
from kitsune_jax.report.model import PlannedPasses as PlannedPasses
from kitsune_jax.report.model import PolicyReport as PolicyReport
from kitsune_jax.report.model import QueueReport as QueueReport
from kitsune_jax.report.model import RegionReport as RegionReport
from kitsune_jax.report.model import Rejected as Rejected
from kitsune_jax.report.model import Report as Report
from kitsune_jax.report.model import ResidualReport as ResidualReport
from kitsune_jax.report.model import StageReport as StageReport
