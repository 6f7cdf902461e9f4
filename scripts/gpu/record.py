"""What every result of a step says of itself, and how it is written.

Comes in: a step's findings. Goes out: a JSON file that names machine, versions and sources. Invariants: it is rewritten whole after
every finding, so a step that is killed leaves what it had found, and the name of what it was doing; no case outlives its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.gpu import plant, results
from scripts.gpu.results import START

START_SECONDS = 90.0  # of JAX and the CUDA driver


def about(jax_devices: bool = True) -> dict[str, Any]:
    """Machine, driver, versions, commit. ``jax_devices=False`` leaves JAX's backend alone, which else takes the device's memory."""
    from benchmarks.machine import describe_commit, describe_driver, describe_machine, describe_software
    from kitsune_jax.targets.cuda import runtime

    return {
        "machine": describe_machine() if jax_devices else None,
        "driver": runtime.driver_info(),
        "nvidia_smi": describe_driver(),
        "versions": describe_software(),
        **describe_commit(),
        "sources": results.fingerprint(),
    }


class Record:
    """A step's file. ``add`` takes findings; one with ``ok`` False makes the step fail.

    A file of the same sources that was not finished is continued: ``wants`` says which cases have no finding yet. What happens in
    ``case`` is named in the file while it runs, and ends with the process if it takes too long: by a thread of faulthandler's that
    needs no lock of Python's, so that a call that never returns cannot stop it.
    """

    def __init__(self, step: str, output: Path, jax_devices: bool = True, patience: float = 1.0):
        self.output, self.patience, self.start = output, patience, time.monotonic()
        sources = results.fingerprint()
        self.content: dict[str, Any] = {"step": step, "about": {"sources": sources}, "findings": []}
        earlier = results.read_json(output) or {}
        if earlier.get("step") == step and not earlier.get("finished") and earlier.get("about", {}).get("sources") == sources:
            self.content["findings"] = earlier["findings"]
        self._trouble = ""
        with self.case(START, START_SECONDS):
            self.content["about"] = about(jax_devices)

    def wants(self, name: str) -> bool:
        return all(f["name"] != name for f in self.content["findings"])

    @contextlib.contextmanager
    def case(self, name: str, seconds: float, kind: str = "") -> Iterator[None]:
        """``seconds``: that it may take, times ``patience``. ``kind``: of the kernels that run in it, where there is one."""
        seconds *= self.patience
        self.content["running"] = {"name": name, "kind": kind, "seconds": seconds, "since": time.time()}
        self._write()
        print(f"... {name}", flush=True)  # beside the stacks of a hang in the log
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            if name != START:
                plant.here(self.content["step"], len(self.content["findings"]))
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.content["running"] = None

    def add(self, finding: dict[str, Any]) -> None:
        self.content["findings"].append(finding)
        self._write()

    def tell(self, finding: dict[str, Any]) -> None:
        """``add``, and a line for one that is not ``ok``."""
        self.add(finding)
        if not finding["ok"]:
            print(f"WRONG: {finding['name']}: {finding.get('error') or finding}", flush=True)

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [f for f in self.content["findings"] if not f.get("ok", True)]

    def finish(self) -> int:
        """The exit status; says in a line how it went."""
        findings = self.content["findings"]
        self.content["finished"] = True
        self._write()
        print(f"{self.content['step']}: {len(findings) - len(self.failures)} of {len(findings)} right")
        return 1 if self.failures or not findings or self._trouble else 0

    def _write(self) -> None:
        """A file that cannot be written is told once, and tried again with the next finding."""
        self.content["seconds"] = round(time.monotonic() - self.start, 1)
        trouble = results.write_json(self.output, self.content)
        if trouble and not self._trouble:
            print(f"WRONG: {trouble}", flush=True)
        self._trouble = trouble


def arguments(description: str) -> argparse.ArgumentParser:
    """What every step takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--dry-run", action="store_true", help="the emulator instead of a device, and tiny sizes")
    parser.add_argument("--patience", type=float, default=1.0, help="cases may take that many times as long")
    return parser
