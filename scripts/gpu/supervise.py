"""A program that may hang in a call that nothing interrupts, crash, or write without end; and what is known of it afterwards.

Comes in: a command, limits. Goes out: ``Process``, which the driver of the check looks at many times a second. Invariants: whatever
the program does, ``look`` returns at once, and after the limit the program and all that it has started get SIGKILL, with the stacks
of its Python threads in its log before that; a program ends with the driver. Standard library only.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LONGEST_LOG = 4 << 20
_TIED = Path(__file__).with_name("tied.py")
TIMED_OUT = 124
_LAST_WORDS_S = 2.0  # between SIGABRT, which makes Python tell its stacks, and SIGKILL
_LOST_S = 15.0  # a process that outlives SIGKILL by this hangs in the kernel, and is left there


class Process:
    """``status`` is None while it runs, then its exit status as the shell counts it (128 + the signal), or TIMED_OUT. ``lines``:
    its last words. ``lost``: it could not even be killed."""

    def __init__(
        self, command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str] | None = None, ask: bool = False
    ):
        """``ask``: the program waits for ``go`` before it does what it is for."""
        self.command, self.log, self.start = list(command), log, time.monotonic()
        self.deadline = self.start + limit
        self.status: int | None = None
        self.told: collections.deque[str] = collections.deque(maxlen=200)
        self.lost = False
        self._aborted = self._killed = 0.0
        self._why = TIMED_OUT
        # Not into a file: where the disk is full, a program must not fail because of its words.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), *self.command],
            stdin=subprocess.PIPE if ask else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **(environment or {})},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def look(self) -> int | None:
        """``status``, after doing what the time asks for."""
        if self.status is not None:
            return self.status
        now = time.monotonic()
        code = self._process.poll()
        if code is not None:
            self._signal(signal.SIGKILL)  # what it has started and left behind
            self._reader.join(5)  # not longer: a grandchild in another session may hold the pipe
            ended = self._aborted or self._killed
            self.status = self._why if ended else code if code >= 0 else 128 - code
        elif self._killed:
            if now > self._killed + _LOST_S:
                self.lost, self.status = True, self._why
        elif self._aborted:
            if now > self._aborted + _LAST_WORDS_S:
                self._signal(signal.SIGKILL)
                self._killed = now
        elif now > self.deadline:
            self.end()
        return self.status

    def end(self, status: int = TIMED_OUT) -> None:
        """Asks for its stacks; ``look`` then kills it."""
        if self.status is None and not self._aborted:
            self._why, self._aborted = status, time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, signal.SIGABRT)

    def go(self, limit: float) -> None:
        """Lets a program that waits for it go on, for ``limit`` seconds from now."""
        self.deadline = time.monotonic() + limit
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def wait(self) -> int:
        while (status := self.look()) is None:
            time.sleep(0.05)
        return status

    @property
    def lines(self) -> list[str]:
        return list(self.told)[-4:]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        """Its output into the log, of which the disk takes what it can."""
        written = 0
        assert self._process.stdout is not None
        with contextlib.ExitStack() as stack:
            file = None
            with contextlib.suppress(OSError):
                file = stack.enter_context(self.log.open("ab", buffering=0))
            for line in self._process.stdout:
                self.told.append(line.decode(errors="replace").rstrip("\n"))
                if file is not None and written < LONGEST_LOG:
                    with contextlib.suppress(OSError):
                        written += file.write(line)
