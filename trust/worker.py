"""The process that runs programs, and the handle by which another process watches it.

A request is a line of JSON on the worker's standard input, its outcome a line on its standard output. JAX is imported once for many
programs. A worker that does not answer in time, or dies, is a finding: ``Worker.run`` then returns "hang" or "crash", and the next
request starts another worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trust.program import Program

RECYCLED = 400  # programs per worker: JAX keeps everything it has compiled
MEMORY = 4 << 30  # bytes per worker: a program that takes more fails, not the machine
START = 120.0  # seconds for a worker to become ready, on a loaded machine


def command() -> list[str]:
    return [sys.executable, "-m", "trust.worker"]


class Worker:
    """A process that checks one program at a time. ``limit``: seconds per program."""

    def __init__(self, limit: float, argv: Sequence[str] | None = None) -> None:
        self.limit = limit
        self._argv = list(argv or command())
        self._process: subprocess.Popen[bytes] | None = None
        self._served = 0
        self._pending = b""

    def run(self, program: Program, limit: float | None = None) -> dict[str, Any]:
        """The outcome of ``program``: ``{"kind", "detail", "pipelines"}``. If plain JAX dies as well, the program proves
        nothing."""
        outcome = self._ask(program, False, limit or self.limit)
        if outcome["kind"] in ("hang", "crash"):
            plain = self._ask(program, True, limit or self.limit)
            if plain["kind"] in ("hang", "crash"):
                return {"kind": "discarded", "detail": f"plain JAX as well: {plain['detail']}", "pipelines": 0}
        return outcome

    def _ask(self, program: Program, plain: bool, limit: float) -> dict[str, Any]:
        process = self._started()
        request = (json.dumps({"plain": plain, "program": json.loads(program.to_json())}) + "\n").encode()
        try:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
            line = self._line(limit)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.close()
            return {"kind": "hang", "detail": f"no result after {limit:g} s", "pipelines": 0}
        if not line:
            code = process.wait()
            self.close()
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            return {"kind": "crash", "detail": f"the process ended: {name}", "pipelines": 0}
        return dict(json.loads(line))

    def kill(self) -> None:
        """End the process, if there is one, and its children: a ``run`` in another thread then returns."""
        if (process := self._process) is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """``kill``, and close the pipes. For the thread that calls ``run``."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # a dead process has not read everything
                        pipe.close()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and (self._served >= RECYCLED or self._process.poll() is not None):
            self.close()
        self._served += 1
        if self._process is None:
            self._served, self._pending = 0, b""
            root = str(Path(__file__).parents[1])
            path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
            environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
            for name in [n for n in environment if n.startswith("KITSUNE_")]:
                del environment[name]
            environment["KITSUNE_PROFILE"] = "zen5-2"  # the same plans on every machine
            flags = environment.get("XLA_FLAGS", "")
            environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=1".strip()
            # A session of its own: Ctrl-C reaches only the parent, which ends its workers.
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
            if self._line(START) is None:
                self.close()
                raise RuntimeError(f"{' '.join(self._argv)} was not ready after {START:g} s")
        return self._process

    def _line(self, limit: float) -> bytes | None:
        """The next line of the process; empty if it has ended, ``None`` after ``limit`` seconds."""
        assert self._process is not None and self._process.stdout is not None
        until = time.monotonic() + limit
        out = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                return None
            read = os.read(out, 1 << 16)
            if not read:
                return b""
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def main() -> int:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    import jax

    from trust.check import Outcome, check, check_plain

    print(json.dumps({"ready": True}), file=out, flush=True)
    for served, line in enumerate(sys.stdin):
        try:
            request = json.loads(line)
            outcome = (check_plain if request["plain"] else check)(Program.from_json(request["program"]))
        except Exception:
            outcome = Outcome("error", traceback.format_exc())
        print(
            json.dumps({"kind": outcome.kind, "detail": outcome.detail[-2000:], "pipelines": outcome.pipelines}),
            file=out,
            flush=True,
        )
        if served % 50 == 49:
            jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main())
