"""``pipeline(fn)`` runs a JAX function as pipelines that keep intermediate tiles on chip; ``explain(fn)`` reports what it would do.

``profile(fn)`` runs it and reports what bounds it. ``fallbacks()`` lists functions that a bug of this package kept from being
pipelined. Everything else in the package is internal. Importing it registers the custom calls, so that programs exported or cached
by another process run here.
"""

from __future__ import annotations

from kitsune_jax import config
from kitsune_jax.config import __version__ as __version__
from kitsune_jax.errors import Fallback, MutatedArgument, NotPipelined, fallbacks
from kitsune_jax.frontend.api import Pipeline, explain, pipeline
from kitsune_jax.profiling.report import Profile
from kitsune_jax.profiling.run import profile
from kitsune_jax.profiling.timeline import Timeline, timeline
from kitsune_jax.report.render import Report
from kitsune_jax.targets.cpu import call as _cpu_runtime

__all__ = [
    "Fallback",
    "MutatedArgument",
    "NotPipelined",
    "Pipeline",
    "Profile",
    "Report",
    "Timeline",
    "config",
    "explain",
    "fallbacks",
    "pipeline",
    "profile",
    "timeline",
]


def __dir__() -> list[str]:
    """The public names, for completion: without the modules of this package that happen to be imported."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if not config.is_command():  # which tells of wrong variables in a line, and of an unknown one where it matters
    config.check_environment()
    config.apply_log_level()
_cpu_runtime.available()  # registers them
