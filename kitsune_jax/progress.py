"""Long work: it says what it does once it has lasted a second, and ends within a second of Ctrl-C.

Comes in: the work, and a line that names it and how long it takes. Goes out: the work's result; a record of the logger
``kitsune_jax`` at level INFO when it begins, and one line on stderr after a second (``KITSUNE_PROGRESS``). Invariants: short work
prints nothing; work of one kind that follows at once, as group after group of a machine's numbers, is one piece of work with one
line.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kitsune_jax import config
from kitsune_jax.config import logger

# --- Telling it -------------------------------------------------------------------------------------------------------------------

_SILENT_S = 1.0  # of work before its line
_APART_S = 10.0  # between two pieces of work of one kind


class _Work:
    """Pieces of work of one kind that follow each other. ``spent``: their seconds, but for those that still run."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.ended = 0.0
        self.running = 0
        self.said = False

    def say(self, line: str) -> None:
        if not self.said and self.running:
            self.said = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr that is closed, or none
                print(f"kitsune_jax: {line}", file=sys.stderr, flush=True)


_works: dict[str, _Work] = {}


class _Total:
    """Seconds in which any work ran, by whatever threads."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.running = 0
        self.began = 0.0

    def begin(self, now: float) -> None:
        if not self.running:
            self.began = now
        self.running += 1

    def end(self, now: float) -> None:
        self.running -= 1
        if not self.running:
            self.spent += now - self.began


_total = _Total()


def seconds() -> float:
    """Seconds that this process has spent so far on work that is told."""
    return _total.spent


@contextlib.contextmanager
def announced(kind: str, line: str) -> Iterator[None]:
    """Tell ``line`` once the ``with`` block has run for a second, together with the blocks of this ``kind`` just before it.

    ``line``: a clause that says what is done, how long it takes, and what avoids it. Example::

        with announced("profile", "measuring this machine, for up to 15 s"):
            measure()
    """
    began = time.monotonic()
    work = _works.get(kind)
    if work is None or not work.running and began - work.ended > _APART_S:
        work = _works[kind] = _Work()
        logger.info("%s", line)
    timer = None
    if not work.said and _shown():
        timer = threading.Timer(max(_SILENT_S - work.spent, 0.0), work.say, (line,))
        timer.daemon = True
        timer.start()
    work.running += 1
    _total.begin(began)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        work.ended = time.monotonic()
        work.spent += work.ended - began
        work.running -= 1
        _total.end(work.ended)


def _shown() -> bool:
    """Is a line printed? By default only to a person, and not where the log has told it."""
    asked = config.progress()
    if asked is not None:
        return asked
    try:
        return sys.stderr.isatty() and not logger.isEnabledFor(20)
    except (ValueError, AttributeError):
        return False


# --- Ending it --------------------------------------------------------------------------------------------------------------------

_MOST_WAIT_S = 0.25  # for work that was told to stop, before an interrupt goes on
_MOST_LEFT_S = 20.0  # for such work before a program ends that caught the interrupt, as XLA may be compiling
_left: list[threading.Thread] = []
_patience = _MOST_LEFT_S

T = TypeVar("T")


def in_own_thread(function: Callable[[], T], name: str, stop: Callable[[], None] = lambda: None) -> T | BaseException:
    """The result of ``function``, or its error, in a thread called ``name``, because JAX keeps state of each thread, and this one
    may be tracing a function. ``stop`` is called when the wait for that thread ends, also after Ctrl-C."""
    result: list[T | BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)  # without a timeout, Python 3.13.0 saw one Ctrl-C in ten only after the measurement
    finally:
        stop()
        thread.join(_MOST_WAIT_S)
        if thread.is_alive():
            _left.append(thread)
    return result[0]


def end_at_once() -> None:
    """Let the process end without waiting for work that was interrupted: for programs that catch Ctrl-C and then only end."""
    global _patience
    _patience = 0.0


@atexit.register
def _end_what_is_left() -> None:
    """Python 3.13 and older abort a process that ends while a thread of theirs is in C++. So wait for it, but not where Ctrl-C ends
    the process; then end the process as Ctrl-C ends a program."""
    interrupted = issubclass(getattr(sys, "last_type", None) or Exception, KeyboardInterrupt)
    until = time.monotonic() + (0.0 if interrupted else _patience)
    for thread in _left:
        thread.join(max(until - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in _left):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
