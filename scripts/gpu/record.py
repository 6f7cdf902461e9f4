"""What every result of a step says of itself, and how it is written.

Comes in: a step's findings. Goes out: a JSON file that names machine, versions and sources. Invariant: it is rewritten whole after
every finding, so a step that is killed leaves what it had found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_commit, describe_driver, describe_machine, describe_software
from kitsune_jax.targets.cuda import runtime

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("kitsune_jax", "cuda", "benchmarks", "scripts")
_SUFFIXES = {".py", ".h", ".cc", ".cu", ".cpp", ".sh"}


def fingerprint() -> str:
    """A hash of the sources, by which a copy without its git folder can be told from a checkout."""
    digest = hashlib.sha256()
    for room in _SOURCES:
        for path in sorted(p for p in (ROOT / room).rglob("*") if p.suffix in _SUFFIXES):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def about(jax_devices: bool = True) -> dict[str, Any]:
    """Machine, driver, versions, commit. ``jax_devices=False`` leaves JAX's backend alone, which else takes the device's memory."""
    return {
        "machine": describe_machine() if jax_devices else None,
        "driver": runtime.driver_info(),
        "nvidia_smi": describe_driver(),
        "versions": describe_software(),
        **describe_commit(),
        "sources": fingerprint(),
    }


class Record:
    """A step's file. ``add`` takes findings; one with ``ok`` False makes the step fail."""

    def __init__(self, step: str, output: Path, jax_devices: bool = True):
        self.output, self.start = output, time.monotonic()
        self.content: dict[str, Any] = {"step": step, "about": about(jax_devices), "findings": []}
        self._write()

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
        return 1 if self.failures or not findings else 0

    def _write(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self.start, 1)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.output.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        temporary.replace(self.output)


def arguments(description: str) -> argparse.ArgumentParser:
    """What every step takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--dry-run", action="store_true", help="the emulator instead of a device, and tiny sizes")
    return parser
