"""Faults on purpose, so that a dry run proves what the check does about them: ``scripts/gpu_check.sh --dry-run --plant hang@soak``.

Comes in: ``GPU_CHECK_PLANT``, "FAULT@STEP:N" (the N-th case of the step, from 0; 0 where no number stands). Goes out: the fault, in
the process that runs that case. A hang holds Python's lock, as a call of a driver can. A kill is that of the whole check. The disk
is full for the check and for all that it starts, as long as the step lasts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterator

VARIABLE, DRIVER = "GPU_CHECK_PLANT", "GPU_CHECK_PID"
FAULTS = ("hang", "segv", "abort", "full-disk", "kill")


def parse(text: str) -> tuple[str, str, int]:
    """Fault, step, number of the case. Raises ``ValueError`` for what is none."""
    fault, _, where = text.partition("@")
    step, _, number = where.partition(":")
    if fault not in FAULTS or not step or not (number or "0").isdecimal():
        raise ValueError(f"{text!r} is no fault: use FAULT@STEP or FAULT@STEP:N, with one of {', '.join(FAULTS)}")
    return fault, step, int(number or 0)


def here(step: str, number: int) -> None:
    """What was planted for this case of ``step``, happens."""
    text = os.environ.get(VARIABLE, "")
    if not text or parse(text)[1:] != (step, number):
        return
    fault = parse(text)[0]
    if fault == "hang":
        ctypes.PyDLL(None).sleep(3600)
    elif fault == "segv":
        ctypes.string_at(8)
    elif fault == "abort":
        os.abort()
    elif fault == "kill":
        os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
        time.sleep(3600)  # ended with the driver, as everything that it has started


@contextlib.contextmanager
def full_disk(planted: bool) -> Iterator[None]:
    """No write to a file succeeds, in this process and what it starts meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if planted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
