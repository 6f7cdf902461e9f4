"""What the training examples share: the command line, the order of the data, the loop around a step, the loss curve.

Comes in: arguments and NumPy arrays. Goes out: the numbers of the steps to do, batches, text and a picture. Nothing in here knows a
model, an optimiser or a library of layers. Invariant: which rows step ``i`` sees depends on the seed and ``i`` alone, so a
checkpoint needs no state of the data.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import kitsune_jax as kj


def parser(doc: str, *, out: str, steps: int, batch: int) -> argparse.ArgumentParser:
    """The options of the examples that train batch by batch, and leave a checkpoint."""
    options = _parser(doc, out=out, steps=steps, left="the checkpoint and the curve")
    options.add_argument("--batch", type=int, default=batch, help=f"rows in a step (default {batch})")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in; weights are float32")
    options.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    options.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default 100)")
    options.add_argument("--compare", action="store_true", help="run the same steps with jax.jit, twice, and compare the losses")
    return options


def application_parser(doc: str, *, out: str, steps: int) -> argparse.ArgumentParser:
    """The options of the applications, which make their own data."""
    options = _parser(doc, out=out, steps=steps, left="the picture")
    options.add_argument("--full", action="store_true", help="the sizes of the papers")
    options.add_argument("--plain", action="store_true", help="run with jax.jit alone, for comparison")
    return options


def _parser(doc: str, *, out: str, steps: int, left: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--steps", type=int, default=steps, help=f"train until this step (default {steps})")
    options.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data (default 0)")
    options.add_argument("--out", type=Path, default=Path(out), help=f"folder of {left} (default {out})")
    options.add_argument("--force", action="store_true", help="pipeline every legal region, also where no gain is expected")
    return options


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed arguments, and the folder that ``--out`` names. Ends the program for numbers that make no sense, and where nothing
    can be written to the folder, before a run whose picture would be lost."""
    args = options.parse_args(argv)
    for name, value in vars(args).items():
        if name != "seed" and type(value) is int and value < 1:
            options.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.seed < 0:
        options.error(f"--seed must not be negative, but is {args.seed}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        options.error(f"--out {args.out} cannot be a folder: {error.strerror}")
    if not os.access(args.out, os.W_OK | os.X_OK):
        options.error(f"--out {args.out} is a folder that may not be written to")
    return args


def transformed(function: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """``function`` as the options ask for it: pipelined, or as it is with ``--plain``."""
    return function if args.plain else kj.pipeline(function, force=args.force or None)


def compiled(step: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """A training step (params, optimiser's state, ...) under ``jax.jit``, which gives params and state away."""
    return jax.jit(transformed(step, args), donate_argnums=(0, 1))


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches of ``size`` rows of ``arrays``, shuffled anew in each epoch; what does not fill a batch waits for the next epoch."""

    arrays: tuple[np.ndarray, ...]
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size > len(self.arrays[0]):
            raise SystemExit(f"--batch {self.size} is more than the {len(self.arrays[0])} rows that there are")

    def __getitem__(self, step: int) -> tuple[np.ndarray, ...]:
        rows = len(self.arrays[0])
        epoch, i = divmod(step, rows // self.size)
        chosen = _order(rows, self.seed, epoch)[i * self.size : (i + 1) * self.size]
        return tuple(a[chosen] for a in self.arrays)


@functools.lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def steps(
    losses: Sequence[Any],
    until: int,
    description: str = "training",
    quantity: str = "loss",
    *,
    quiet: bool = False,
    stop: Callable[[bool, int], bool] = lambda interrupted, _: interrupted,
) -> Iterator[int]:
    """The numbers of the steps from ``len(losses)`` to ``until``, under a progress bar unless ``quiet``. The loop appends a loss
    (or another ``quantity``, which the bar names) for each.

    Ctrl-C ends it after the step that runs: a step whose arguments are donated cannot be cut in two. ``stop(interrupted, steps
    done)`` decides otherwise where several processes have to end after the same step.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=quiet) as progress, _interruptible() as interrupted:
        task = progress.add_task(description, total=until, completed=len(losses))
        while len(losses) < until and not stop(interrupted.is_set(), len(losses)):
            yield len(losses)
            progress.update(task, completed=len(losses))
            if len(losses) % 10 == 0 or len(losses) == until:  # to read a loss is to wait for its step
                progress.update(task, description=f"{description}, {quantity} {float(losses[-1]):.4f}")


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, a second one does what it always does."""
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; the file takes the place of ``path`` when it is complete, so no crash leaves half a checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def check_same(settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """End the program unless a run with ``settings`` can go on from a checkpoint that was made with ``saved``."""
    for name, value in settings.items():
        if saved.get(name) != value:
            raise SystemExit(f"cannot resume: the checkpoint was made with --{name} {saved.get(name)}, not {value}")


def nudged(params: Any, dtype: str, seed: int) -> Any:
    """``params``, each scaled by 1 plus up to half a unit in the last place of ``dtype``: what one more rounding would do."""
    epsilon = float(jnp.finfo(dtype).eps)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: w * (1 + epsilon * rng.uniform(-0.5, 0.5, w.shape)).astype(np.float32), params)


def comparison(pipelined: Sequence[Any], plain: Sequence[Any], rounded: Sequence[Any]) -> str:
    """How far apart the losses of two runs are, and how far rounding alone would have brought them."""

    def apart(a: Sequence[Any], b: Sequence[Any]) -> float:
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.max(np.abs(x - y) / np.abs(y)))

    return (
        f"largest relative difference of the loss over {len(plain)} steps: {apart(pipelined, plain):.1e} against jax.jit; "
        f"{apart(rounded, plain):.1e} between jax.jit and itself with initial weights rounded once more"
    )


def rates(function: Callable[..., Any], arguments: Sequence[Any], count: int, force: bool | None, repeats: int = 3) -> str:
    """Steps per second of a function that makes ``count`` steps, in words: with ``jax.jit`` and pipelined, called in turns; each
    way's best of ``repeats`` calls."""
    ways = {"jax.jit": jax.jit(function), "pipelined": jax.jit(kj.pipeline(function, force=force))}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, compiled in ways.items():
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            if turn:  # the first call compiles
                taken[way].append(time.perf_counter() - begin)
    return ", ".join(f"{way} {count / min(seconds):.3g} steps/s" for way, seconds in taken.items())


def outcome(report: kj.Report, plain: bool = False) -> str:
    """What share of the operators under ``kj.pipeline`` ran pipelined, in words; or, of a ``plain`` run, would have."""
    if plain:
        return f"with --plain nothing is pipelined; without it, {report.ops_pipelined} of {report.ops_total} operators are"
    if not report.ops_pipelined:
        return (
            f"pipelined: none of {report.ops_total} operators. The cost model expects no gain at this size, so XLA ran them all; "
            "--force pipelines them anyway"
        )
    regions = len(report.regions)
    return (
        f"pipelined: {report.ops_pipelined} of {report.ops_total} operators ({report.coverage:.0%}) "
        f"in {regions} region{'s' * (regions > 1)}"
    )


def draw_curve(path: Path, losses: Sequence[Any], title: str) -> None:
    """The loss over the steps, on a logarithmic scale."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title=title, yscale="log")
    axes.plot(np.arange(1, len(losses) + 1), np.asarray(losses, np.float64))
    axes.grid(True, which="both", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def to_json(settings: dict[str, Any], losses: Sequence[Any]) -> str:
    """The part of a checkpoint that is not arrays. Python writes a float so that it is read back bit by bit."""
    return json.dumps({"settings": settings, "losses": [float(x) for x in losses]})


def ending(losses: Sequence[Any], args: argparse.Namespace, quality: str) -> str:
    """What was reached, and how to go on where Ctrl-C ended the run."""
    done, loss = len(losses), float(losses[-1])
    how = f"interrupted after {done} of {args.steps} steps, --resume goes on" if done < args.steps else f"{done} steps"
    return f"{how}: loss {loss:.4f}, {quality}; checkpoint and curve are in {args.out}"


def application_ending(losses: Sequence[Any], args: argparse.Namespace, quality: str, quantity: str = "loss") -> str:
    """What an application reached, and where its picture is. ``losses`` are of ``quantity``, as in ``steps``."""
    how = f"interrupted after {len(losses)} of {args.steps} steps" if len(losses) < args.steps else f"{len(losses)} steps"
    reached = f"{quantity} {float(losses[-1]):.4f}, {quality}"
    return f"{how}{' with jax.jit' if args.plain else ''}: {reached}; the picture is in {args.out}"
