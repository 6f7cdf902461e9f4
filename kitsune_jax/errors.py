"""The exceptions and warnings a user of this package can meet.

Comes in: nothing. Goes out: exception types. Invariant: without ``strict`` a program that runs under ``jax.jit`` raises none of
them, but for a function whose changes of its arguments would be lost without a word (``MutatedArgument``).
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


class MutatedArgument(NotPipelined):
    """Raised where a function is traced that changes an object among its arguments (a module of flax nnx, an optimizer, a counter
    of random numbers) and does not return the change. The caller's object would keep its old values, as it does under ``jax.jit``.

    What is written into lists, dicts and dataclasses is no error: as under ``jax.jit`` the caller does not see it. Example::

        nnx.jit(kj.pipeline(step))  # ``step`` calls ``optimizer.update(model, grads)``: raises
        nnx.jit(step)               # with ``nnx.value_and_grad(kj.pipeline(loss))`` in ``step``: right
    """
