"""What this package failed to pipeline because of a bug of its own: counted, logged, and told once per function.

Comes in: a ``Failure``, which a pass returns beside its result. Goes out: the list that ``kitsune_jax.fallbacks()`` gives.
Invariant: passes stay pure: they return failures, and only the lowering of a user's function records them.
"""

from __future__ import annotations

import dataclasses
import threading
import traceback
import warnings

from kitsune_jax.config import logger
from kitsune_jax.plain_text import printable, printable_lines


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One part of a function that lowers as plain HLO because of an error in this package.

    ``part``: what fell back, such as "region0 (mlp.py:12 (mlp))" or "the whole function". ``reason``: the error, with its type.
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
    def told(self) -> str:
        """Why an operator is left to XLA, for a report."""
        return f"a bug of kitsune_jax, please report it: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Fallback:
    """A ``Failure`` of the user's function ``function``, and how often that function was lowered with it in this process."""

    function: str
    part: str
    reason: str
    traceback: str = dataclasses.field(compare=False)
    count: int = 1


_lock = threading.Lock()
_recorded: dict[tuple[str, Failure], int] = {}
_warned: set[str] = set()


def fallbacks() -> tuple[Fallback, ...]:
    """What this process lowered as plain HLO because of a bug of this package, oldest first; empty where all went well.

    An operator that is left to XLA by decision is not in here: ``kitsune_jax.explain`` tells those. Example:

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
        told = function in _warned
        _warned.add(function)
    logger.warning("%s: %s lowers as plain HLO: %s\n%s", function, failure.part, failure.reason, failure.traceback)
    if not told:
        warnings.warn(
            f"kitsune_jax could not pipeline {failure.part} of {function}, which lowers as plain HLO: {failure.reason}. This is a "
            "bug of kitsune_jax: please report it. kitsune_jax.fallbacks() tells all of them, with tracebacks; KITSUNE_STRICT=1 "
            "raises.",
            RuntimeWarning,
            stacklevel=2,
        )


def forget() -> None:
    """Forget what was recorded and which functions were warned about (for tests)."""
    with _lock:
        _recorded.clear()
        _warned.clear()
