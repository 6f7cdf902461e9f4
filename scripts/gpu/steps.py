"""What the check consists of, as data: steps in the order of what matters, their programs and their limits.

Comes in: the interpreter, the folder of results, whether there is a device. Goes out: ``Step``s. A step's programs run side by
side; each writes the file that ``Program.output`` names. Standard library only.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

SHARDS = 8  # processes that share the device in `correctness`: XLA's compiler is what takes the time
PORTABLE = "bfloat16 333 sm80"  # what `portable` runs of the programs
SANITIZERS = ("memcheck", "racecheck", "synccheck")


@dataclasses.dataclass(frozen=True)
class Program:
    command: tuple[str, ...]
    output: Path | None = None  # of a program that keeps a record
    environment: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """``group``: another name that ``--only`` takes for it. ``missing``: why it cannot run, which is no failure."""

    name: str
    seconds: float
    programs: tuple[Program, ...]
    group: str = ""
    missing: str = ""


def steps(python: str, folder: Path, dry_run: bool) -> list[Step]:
    """All of them; which of them run is the driver's business."""

    def recorded(name: str, module: str, *arguments: str, shard: str = "", **environment: str) -> Program:
        output = folder / f"{name}{f'.{shard}' if shard else ''}.json"
        command = [python, "-m", f"scripts.gpu.{module}", "--output", str(output), *arguments]
        if dry_run:  # the emulator's compiler may share a core with other work
            command += ["--dry-run", "--patience", "5"]
        return Program(tuple(command), output, tuple(environment.items()))

    def check(name: str, seconds: float, *arguments: str, **environment: str) -> Step:
        return Step(name, seconds, (recorded(name, name.replace("-", "_"), *arguments, **environment),))

    def shards(name: str, seconds: float, *arguments: str, **environment: str) -> Step:
        count = 1 if dry_run else SHARDS
        return Step(
            name,
            seconds,
            tuple(
                recorded(name, "correctness", "--step", name, "--shard", f"{k}/{count}", *arguments, shard=str(k), **environment)
                for k in range(count)
            ),
        )

    measured = ("--results", str(folder / "results"))
    first = [
        check("environment", 100),
        check("smoke", 240),
        check("precompile", 150, JAX_PLATFORMS="cpu"),
        shards("correctness", 200),
        check("training", 150),
        check("benchmarks", 240, *measured),
        check("attention", 150),
        check("decoding", 100),
        Step("train-benchmarks", 150, (recorded("train-benchmarks", "benchmarks", "--train", *measured),)),
        check("micro", 90),
    ]
    last = [check("soak", 60, "--seconds", "30"), check("traffic", 180)]
    if dry_run:
        return [*first, *last]
    build = Step("build", 150, (Program((python, "-m", "scripts.gpu.build")),))
    # The path for every device from compute capability 8.0 on also runs on later ones; a process has one architecture.
    portable = shards("portable", 100, "--only", PORTABLE, KITSUNE_CUDA_ARCH="sm_90")
    missing = "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on PATH"
    watched = []
    for tool in SANITIZERS:
        program = recorded(tool, "correctness", "--step", tool, "--few", "--case-seconds", "60")
        if not missing:
            program = dataclasses.replace(program, command=(*_sanitizer_options(tool), *program.command))
        watched.append(Step(tool, 90, (program,), "sanitizer", missing))
    return [build, *first, *watched, *last, portable]


def _sanitizer_options(tool: str) -> tuple[str, ...]:
    """Our kernels only: XLA's own need no check here, and each tool slows what it watches. The option has had two names."""
    try:
        told = subprocess.run(["compute-sanitizer", "--help"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        told = ""
    chosen: tuple[str, ...] = ()
    if "--kernel-name" in told:
        chosen = ("--kernel-name", "kernel_substring=kitsune_region")
    elif "--kernel-regex" in told:
        chosen = ("--kernel-regex", "kns=kitsune_region")
    return ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *chosen)
