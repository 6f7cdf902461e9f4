"""The exceptions and warnings a user of this package can meet.

Comes in: nothing. Goes out: exception types. Invariant: without ``strict`` none of them is raised by a program that runs under
``jax.jit``; they report wrong arguments, or answer a user who asked to be told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitsune_jax.report.model import Report


class NotPipelined(Exception):
    """Raised under ``strict=True`` (or ``KITSUNE_STRICT=1``) when a function is lowered and nothing of it could be pipelined.

    ``report`` is the ``Report`` that ``kitsune_jax.explain`` would give, or ``None`` where no plan was attempted (a platform
    without a target, an automatically partitioned program). Example::

        try:
            jax.jit(kj.pipeline(f, strict=True)).lower(x)
        except kj.NotPipelined as e:
            print(e.report)
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message if report is None else f"{message}\n{report}")
        self.report = report
