"""``pipeline(fn)`` runs a JAX function as pipelines that keep intermediate tiles on chip; ``explain(fn)`` reports what it would do.

``fallbacks()`` lists functions that a bug of this package kept from being pipelined. Everything else in the package is internal.
Importing it registers the custom calls, so that programs exported or cached by another process run here.
"""

from __future__ import annotations

from kitsune_jax import config as config
from kitsune_jax.config import __version__ as __version__
from kitsune_jax.errors import Fallback as Fallback
from kitsune_jax.errors import MutatedArgument as MutatedArgument
from kitsune_jax.errors import NotPipelined as NotPipelined
from kitsune_jax.errors import fallbacks as fallbacks
from kitsune_jax.frontend.api import Pipeline as Pipeline
from kitsune_jax.frontend.api import explain as explain
from kitsune_jax.frontend.api import pipeline as pipeline
from kitsune_jax.report.render import Report as Report
from kitsune_jax.targets.cpu import call as _cpu_runtime

__all__ = ["Fallback", "MutatedArgument", "NotPipelined", "Pipeline", "Report", "config", "explain", "fallbacks", "pipeline"]

config.check_environment()
config.apply_log_level()
_cpu_runtime.available()  # registers them
