"""kitsune_jax: JAX functions as spatial pipelines.

``pipeline(fn)`` runs a function as pipelines of tiles through on-chip queues, ``explain(fn)`` says what it would do. Everything
else in the package is their inside.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "NotPipelined": "errors",
    "Pipeline": "api",
    "Report": "report.model",
    "explain": "api",
    "pipeline": "api",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"kitsune_jax.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'kitsune_jax' has no attribute {name!r}")
