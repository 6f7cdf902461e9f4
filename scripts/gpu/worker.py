"""One process of the check: it prepares, waits for its turn, runs, and writes its findings as it goes.

    python -m scripts.gpu.worker programs "mlp planned 0/1" --output F.json    # a family of kernels, compared with float64
    python -m scripts.gpu.worker case "nerf bf16 262144" --output F.json       # an application, timed
    python -m scripts.gpu.worker {torch,soak,queues,once} ...

Comes in: a kind of work and its name. Goes out: a JSON file that is whole at any time, with the name of what runs now. Invariants:
nothing outlives its limit, and an exception is a finding. ``--without-device`` puts the kernels into the cache on disk, and runs
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.gpu import results

READY = "ready"  # printed before a process waits for its turn
DRIVER = "GPU_CHECK_DRIVER"  # a file: what ``runtime.driver_info()`` is to say, so that plans are those that were prepared


class Findings:
    """The file of a process. ``content`` is written by ``write`` and before and after each ``watch``."""

    def __init__(self, output: Path, **content: Any):
        self.output, self.content = output, content
        self.write()

    def write(self) -> None:
        results.write_json(self.output, self.content)

    @contextlib.contextmanager
    def watch(self, name: str, seconds: float) -> Iterator[None]:
        """End the process, with the stacks of its threads, where the block takes longer: a thread that needs no lock of Python's
        sees to it, so that a call that never returns cannot stop it."""
        self.content["running"] = name
        self.write()
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.content["running"] = None

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """An exception in the block becomes ``error`` and ``traceback``."""
        try:
            yield
        except Exception as error:
            self.content |= failure(error)
        self.write()


def failure(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"[:600], "traceback": traceback.format_exc(limit=-4)[-1500:]}


def wait_for_turn() -> None:
    print(READY, flush=True)
    sys.stdin.read()


def note_kernels() -> Callable[[], list[str]]:
    """From now on note the entries of the kernel cache that are asked for. Returns a function that gives those since its last
    call: each names a kernel by its source, the device headers and the compiler."""
    from kitsune_jax import cache

    asked: dict[str, None] = {}
    get = cache.Cache.get

    def noted(self: cache.Cache, key: str, suffix: str, make: Callable[[], bytes]) -> bytes:
        if suffix == ".cubin":
            asked[key + suffix] = None
        return get(self, key, suffix, make)

    cache.Cache.get = noted  # type: ignore[method-assign]

    def since() -> list[str]:
        found = sorted(asked)
        asked.clear()
        return found

    return since


def plan_as_prepared() -> None:
    from kitsune_jax.targets.cuda import runtime

    if path := os.environ.get(DRIVER):
        told = json.loads(Path(path).read_text())
        runtime.driver_info = lambda: told  # type: ignore[assignment]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.worker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("programs", "case", "torch", "soak", "queues", "once"))
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--skip", default="[]", help="JSON: names of programs that are not to run (again)")
    parser.add_argument("--since", type=Path, help="measured.json of an earlier check: programs with the same kernels do not run")
    parser.add_argument("--without-device", action="store_true", help="compile for the device of $" + DRIVER + ", run nothing")
    parser.add_argument("--dry-run", action="store_true", help="the emulator, or a CPU, in the place of a device; tiny sizes")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    found = Findings(options.output, name=options.name, finished=False)
    plan_as_prepared()
    with found.failures():
        _work(options, found)
        found.content["finished"] = "error" not in found.content
    found.content["seconds"] = round(time.monotonic() - began, 1)
    found.write()
    return 0


def _work(options: argparse.Namespace, found: Findings) -> None:
    if options.kind == "programs":
        from scripts.gpu import correctness

        before = correctness.right_before(results.read_json(options.since) or {}) if options.since else {}
        correctness.run(options.name, found, set(json.loads(options.skip)), options.dry_run, options.without_device, before)
    elif options.kind == "case":
        from scripts.gpu import timing

        timing.run(options.name, found, options.dry_run, options.without_device)
    elif options.kind == "torch":
        from scripts.gpu import peer

        peer.run(found, options.dry_run)
    elif options.kind == "once":
        from scripts.gpu import timing

        timing.call_once(options.name.split(","), found)
    else:
        from scripts.gpu import queues

        {"soak": queues.soak, "queues": queues.measure}[options.kind](found, options.dry_run, options.without_device)


if __name__ == "__main__":
    raise SystemExit(main())
