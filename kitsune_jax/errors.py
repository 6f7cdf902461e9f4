"""Exceptions and warnings that a user can meet, and the record of functions that a bug of this package kept from being pipelined.

Comes in: a ``Failure``, which passes return beside their result; only the lowering of a user's function records it. Goes out: the
records, by ``kitsune_jax.fallbacks()``, and one warning per function. Invariant: without ``strict`` a program that runs under
``jax.jit`` raises none of these exceptions, except ``MutatedArgument``: a function whose changes of its arguments would be lost
silently.
"""

from __future__ import annotations

import dataclasses
import threading
import traceback
import warnings
from typing import TYPE_CHECKING

from kitsune_jax.config import logger, printable, printable_lines
from kitsune_jax.warning_classes import CacheWarning as CacheWarning
from kitsune_jax.warning_classes import FallbackWarning as FallbackWarning
from kitsune_jax.warning_classes import KitsuneWarning as KitsuneWarning
from kitsune_jax.warning_classes import MissingExtensionWarning as MissingExtensionWarning
from kitsune_jax.warning_classes import NoCudaKernelsWarning as NoCudaKernelsWarning
from kitsune_jax.warning_classes import ResidualsWarning as ResidualsWarning
from kitsune_jax.warning_classes import ShardingWarning as ShardingWarning
from kitsune_jax.warning_classes import UnknownVariableWarning as UnknownVariableWarning
from kitsune_jax.warning_classes import UnsupportedJaxWarning as UnsupportedJaxWarning

if TYPE_CHECKING:
    from kitsune_jax.report.render import Report


# --- exceptions of the public API -------------------------------------------------------------------------------------------------


class NotPipelined(Exception):
    """Raised under ``strict=True`` (or ``KITSUNE_STRICT=1``) when a function is lowered and nothing of it could be pipelined.

    ``report`` is the ``Report`` that ``kitsune_jax.explain`` would give, or ``None`` where no plan was tried (a platform that
    kitsune_jax does not support, a program that is partitioned automatically).

    Example:
      >>> import jax, jax.numpy as jnp, kitsune_jax as kj
      >>> try:
      ...     jax.jit(kj.pipeline(jnp.sort, strict=True)).lower(jnp.ones(8))
      ... except kj.NotPipelined as error:
      ...     print(error.report.ops_pipelined)
      0
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message if report is None else f"{message}\n{report}")
        self.report = report


class MutatedArgument(NotPipelined):
    """Raised while tracing a function that changes an object among its arguments (a module of flax nnx, an optimizer, a counter of
    random numbers) and does not return the change. The caller's object would keep its old values, as it does under ``jax.jit``.

    Writing into lists, dicts and dataclasses is no error: as under ``jax.jit`` the caller does not see it. A step of flax nnx that
    calls ``optimizer.update(model, grads)`` raises; pipeline the loss inside of it instead.

    Example:
      >>> import jax, jax.numpy as jnp, kitsune_jax as kj
      >>> @jax.tree_util.register_pytree_node_class
      ... class Counter:
      ...     def __init__(self, n): self.n = n
      ...     def tree_flatten(self): return (self.n,), None
      ...     @classmethod
      ...     def tree_unflatten(cls, _, children): return cls(*children)
      >>> def count(counter, x):
      ...     counter.n = counter.n + 1
      ...     return 2 * x
      >>> try:
      ...     kj.pipeline(count)(Counter(jnp.zeros(())), jnp.ones(8))
      ... except kj.MutatedArgument:
      ...     print("return the counter, too")
      return the counter, too
    """


# --- failures of this package, recorded and warned about once per function --------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One part of a function that lowers as plain HLO because of an error in this package.

    ``part``: such as "region0 (mlp.py:12 (mlp))" or "the whole function". ``reason``: the error, with its type.
    ``traceback``: as Python prints it.
    """

    part: str
    reason: str
    traceback: str = dataclasses.field(default="", compare=False)

    @staticmethod
    def of(error: BaseException, part: str) -> Failure:
        """The failure of ``part`` that ``error`` caused."""
        reason = printable_lines(f"{type(error).__name__}: {error}")
        return Failure(printable(part), reason, printable_lines("".join(traceback.format_exception(error))))

    @property
    def report_reason(self) -> str:
        """The reason that a report gives for leaving an operator to XLA."""
        return f"a bug of kitsune_jax, please report it: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Fallback:
    """A ``Failure`` of the user's function ``function``, and how often that function was lowered with it in this process.

    Example:
      >>> import kitsune_jax as kj
      >>> [f"{f.function}: {f.reason}" for f in kj.fallbacks()]
      []
    """

    function: str
    part: str
    reason: str
    traceback: str = dataclasses.field(compare=False)
    count: int = 1


_lock = threading.Lock()
_recorded: dict[tuple[str, Failure], int] = {}
_warned: set[str] = set()


def fallbacks() -> tuple[Fallback, ...]:
    """Parts of functions that this process lowered as plain HLO because of a bug of this package, oldest first.

    Operators that are left to XLA by decision are not listed here: ``kitsune_jax.explain`` reports those. Example:

    >>> import kitsune_jax as kj
    >>> kj.fallbacks()
    ()
    """
    with _lock:
        return tuple(Fallback(function, f.part, f.reason, f.traceback, n) for (function, f), n in _recorded.items())


def record(function: str, failure: Failure) -> None:
    """Count ``failure`` of the user's function ``function``, log it with its traceback, and warn: once per function."""
    with _lock:
        _recorded[function, failure] = _recorded.get((function, failure), 0) + 1
        warned = function in _warned
        _warned.add(function)
    logger.warning("%s: %s lowers as plain HLO: %s\n%s", function, failure.part, failure.reason, failure.traceback)
    if not warned:
        warnings.warn(
            f"kitsune_jax could not pipeline {failure.part} of {function}, so XLA compiles it as usual: {failure.reason}. This "
            "is a bug of kitsune_jax: please report it, with the traceback that kitsune_jax.fallbacks() lists. KITSUNE_STRICT=1 "
            "turns this warning into an error.",
            FallbackWarning,
            stacklevel=2,
        )


def forget() -> None:
    """Forget what was recorded and which functions were warned about (for tests)."""
    with _lock:
        _recorded.clear()
        _warned.clear()


# --- errors of the code generators ------------------------------------------------------------------------------------------------


class CannotLower(ValueError):
    """A tile program, or its plan, holds something that a target has no code for; ``reason`` names it.

    ``supports`` gives the same reasons per op before a region is formed, and ``check`` per plan before it is chosen.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class InvalidProgram(Exception):
    """The extension refuses generated code: a bug of this package, found before the code becomes part of a compilation.

    The message is the extension's, and names the instruction. The region it was generated for can still lower as plain HLO.
    """
