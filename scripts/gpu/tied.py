"""Runs a command that ends with the process that started it: ``python -I tied.py PARENT COMMAND...``.

The kernel sends SIGKILL to the command when its parent is gone (Linux), also to one that hangs in a call of a driver. A program of
its own, because a process with threads, as every one with JAX in it, must not run Python code between fork and exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # core files fill disks
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it is gone already
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
