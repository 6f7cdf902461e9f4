"""What the examples on several devices share: their command line, processes, the mesh, checkpoints and the loop around a step.

Comes in: arguments, NumPy arrays, a step and where its state is to lie. Goes out: a trained state, losses, text. Nothing in here
knows a model. Invariants: which rows a step sees and which weights it begins with depend on the settings alone, and not on the
number of devices or processes; a checkpoint holds whole arrays, which any number of devices reads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _training as training
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj

FORCED = "--xla_force_host_platform_device_count"
COLLECTIVES = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"

# --- the command line -------------------------------------------------------------------------------------------------------------


def parser(doc: str, *, steps: int, batch: int) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--devices", type=int, help="devices in all; of a CPU as many are made (default: those that there are)")
    options.add_argument("--processes", type=int, default=1, help="share the devices among processes on this CPU (default 1)")
    options.add_argument("--coordinator", metavar="HOST:PORT", help="this is one of --processes that you start, at that process 0")
    options.add_argument("--process", type=int, help="its number")
    options.add_argument("--steps", type=int, default=steps, help=f"train until this step (default {steps})")
    options.add_argument("--batch", type=int, default=batch, help=f"rows in a step, over all devices (default {batch})")
    options.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data (default 0)")
    options.add_argument("--checkpoint", type=Path, metavar="DIR", help="go on from what is there, and save there")
    options.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default 100)")
    options.add_argument("--force", action="store_true", help="pipeline every legal region, also where no gain is expected")
    options.add_argument("--plain", action="store_true", help="run with jax.jit alone, for comparison")
    options.add_argument("--explain", action="store_true", help="count the collectives of the step, pipelined and with jax.jit")
    options.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)  # a child of `launched`
    return options


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed arguments. Ends the program for numbers that make no sense, and where nothing can be written to ``--checkpoint``."""
    args = options.parse_args(argv)
    for name, value in vars(args).items():
        if name not in ("seed", "process") and type(value) is int and value < 1:
            options.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.seed < 0:
        options.error(f"--seed must not be negative, but is {args.seed}")
    if args.devices is None and args.processes > 1:
        args.devices = args.processes
    if args.devices is not None and args.devices % args.processes:
        options.error(f"--devices {args.devices} are not the same number in each of --processes {args.processes}")
    if args.devices is not None and args.batch % args.devices:
        options.error(f"--batch {args.batch} is no multiple of --devices {args.devices}")
    if (args.process is None) != (args.coordinator is None):
        options.error("--process and --coordinator need each other")
    if args.process is not None and not 0 <= args.process < args.processes:
        options.error(f"--process must be from 0 to {args.processes - 1}, not {args.process}")
    if args.checkpoint is not None:
        try:
            args.checkpoint.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            options.error(f"--checkpoint {args.checkpoint} cannot be a folder: {error.strerror}")
        if not os.access(args.checkpoint, os.W_OK | os.X_OK):
            options.error(f"--checkpoint {args.checkpoint} is a folder that may not be written to")
    return args


# --- processes and devices --------------------------------------------------------------------------------------------------------


def run(
    train: Callable[[argparse.Namespace, Mesh], None], args: argparse.Namespace, script: str, argv: Sequence[str] | None
) -> int:
    """``train`` on a mesh of the devices that are asked for, in this process or in several of ``script``. The exit status."""
    if args.processes > 1 and args.process is None:
        return launched(script, sys.argv[1:] if argv is None else argv, args.processes)
    if args.with_parent:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        train(args, mesh_of(args))
    except KeyboardInterrupt:
        print("interrupted before the first step", file=sys.stderr)
        return 130
    return 0


def launched(script: str, argv: Sequence[str], processes: int) -> int:
    """``script`` in as many processes on this machine's CPU. Ctrl-C goes to all. Where one fails, or this process is killed,
    the others end as well. The exit status."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flags = re.sub(rf"{FORCED}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, script, *argv, "--with-parent", "--coordinator", coordinator, "--process"]
    # In groups of their own, a terminal's Ctrl-C reaches them once, from here. Standard input ends when this process does.
    children = [subprocess.Popen([*command, str(i)], env=env, stdin=subprocess.PIPE, process_group=0) for i in range(processes)]

    def to_all(number: int, _: Any = None) -> None:
        for child in children:
            child.send_signal(number)

    before = signal.signal(signal.SIGINT, to_all)
    try:
        while None in (statuses := [child.poll() for child in children]):
            if any(statuses):
                time.sleep(1)  # for the last words of the others
                to_all(signal.SIGKILL)
                break
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGINT, before)
    return max((child.wait() for child in children), key=lambda status: (status > 0, status != 0))


def _leave_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def mesh_of(args: argparse.Namespace) -> Mesh:
    """A mesh of one axis, ``data``. The first use of JAX's devices in this process, so that their number can be chosen."""
    if args.devices is not None and FORCED not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", args.devices // args.processes)
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    found = jax.devices()
    wanted = len(found) if args.devices is None else args.devices
    if wanted > len(found) or (args.processes > 1 and wanted != len(found)):
        raise SystemExit(
            f"--devices {wanted}: there are {len(found)}, {found[0].device_kind}; JAX_PLATFORMS=cpu makes some of the CPU"
        )
    if args.batch % wanted:
        raise SystemExit(f"--batch {args.batch} is no multiple of the {wanted} devices; --devices takes fewer of them")
    return jax.make_mesh((wanted,), ("data",), axis_types=(AxisType.Auto,), devices=found[:wanted])


def say(text: str) -> None:
    """To the terminal, once."""
    if jax.process_index() == 0:
        print(text)


def _stop(interrupted: bool, done: int) -> bool:
    """Whether to stop after ``done`` steps. Several processes ask each other every ten steps: all must have done the same ones."""
    if jax.process_count() == 1:
        return interrupted
    return done % 10 == 0 and bool(np.any(multihost_utils.process_allgather(np.asarray(interrupted))))


def on_mesh(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """``array``, which every process has; each device gets its shard."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def on_host(tree: Any) -> Any:
    """The arrays of ``tree``, of which every device has a whole copy, for NumPy or for one device."""
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)


def bytes_of(tree: Any) -> tuple[int, int]:
    """Of arrays: (in each device, in all)."""
    leaves = jax.tree.leaves(tree)
    shards = sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)
    return shards, sum(x.nbytes for x in leaves)


# --- checkpoints ------------------------------------------------------------------------------------------------------------------


class Checkpoints:
    """The latest two of a run in ``folder``; none for None. All processes write, each its shards, in the background."""

    def __init__(self, folder: Path | None, settings: dict[str, Any], every: int):
        self.settings, self.every = settings, every
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager: Any = None if folder is None else ocp.CheckpointManager(folder.absolute() / "steps", options=options)

    def restored(self, like: Any) -> tuple[list[Any], Any] | None:
        """(losses, state) of the latest one, if there is one. ``like``: shapes, dtypes and shardings that the state shall have."""
        latest = None if self.manager is None else self.manager.latest_step()
        if latest is None:
            return None
        info = self.manager.restore(latest, args=ocp.args.Composite(info=ocp.args.JsonRestore())).info
        training.check_same(self.settings, info["settings"])  # first: the arrays of another width would not fit
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        return info["losses"], self.manager.restore(latest, args=parts).state

    def save(self, losses: Sequence[Any], state: Any, *, last: bool = False) -> None:
        """After every so many steps, and after the ``last`` one."""
        if self.manager is None or not (last or len(losses) % self.every == 0) or len(losses) == self.manager.latest_step():
            return
        info = {"settings": self.settings, "losses": [float(x) for x in losses]}
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), info=ocp.args.JsonSave(info))
        self.manager.save(len(losses), args=parts)

    def close(self) -> None:
        """When everything is written."""
        if self.manager is not None:
            self.manager.close()


# --- training ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trained:
    """``text`` is the compiled step of one device; ``state`` lies on the mesh."""

    state: Any
    losses: list[Any]
    text: str


def fit(
    step: Callable[..., Any],
    initial: Callable[[], Any],
    placed: Callable[[tuple[int, ...]], P],
    batches: training.Batches,
    settings: dict[str, Any],
    args: argparse.Namespace,
    mesh: Mesh,
) -> Trained:
    """Train ``initial()`` by ``step`` (state, *batch to state, loss) until ``args.steps``, from the latest checkpoint on.

    ``placed``: the axes of the mesh by which an array of the state of that shape is divided. Batches are divided by rows.
    """
    abstract = jax.eval_shape(initial)
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, placed(x.shape)), abstract)
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    first = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows) for a in batches[0]]

    def compiled(step: Callable[..., Any]) -> Any:
        return jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole)).lower(like, *first).compile()

    run = compiled(training.transformed(step, args))
    with contextlib.closing(Checkpoints(args.checkpoint, settings, args.save_every)) as checkpoints:
        losses, state = checkpoints.restored(like) or ([], None)
        if state is None:
            state = jax.jit(initial, out_shardings=shardings)()
        else:
            say(f"goes on from step {len(losses)} in {args.checkpoint}")
        for i in training.steps(losses, args.steps, quiet=jax.process_index() != 0, stop=_stop):
            state, loss = run(state, *(on_mesh(a, rows) for a in batches[i]))
            losses.append(loss)
            checkpoints.save(losses, state)
        if not losses:
            raise KeyboardInterrupt
        checkpoints.save(losses, state, last=True)
    if args.checkpoint is not None and jax.process_index() == 0:
        training.draw_curve(args.checkpoint / "loss.png", losses, f"{mesh.size} devices, {jax.process_count()} processes")
    if args.explain:
        say(
            explained(
                run.as_text() if not args.plain else compiled(kj.pipeline(step, force=args.force or None)).as_text(), "pipelined"
            )
        )
        say(explained(run.as_text() if args.plain else compiled(step).as_text(), "jax.jit"))
    return Trained(state, losses, run.as_text())


def ending(trained: Trained, args: argparse.Namespace, mesh: Mesh, quality: str = "") -> str:
    """What was reached, on what, and how to go on where Ctrl-C ended the run."""
    done = len(trained.losses)
    how = f"interrupted after {done} of {args.steps} steps" if done < args.steps else f"{done} steps"
    goes_on = f"; checkpoint and curve are in {args.checkpoint}" if args.checkpoint else ""
    count = f"{mesh.size} device{'s' * (mesh.size > 1)} in {args.processes} process{'es' * (args.processes > 1)}"
    way = "with jax.jit" if args.plain else f"{pipelines(trained.text)} pipelines in the step of a device"
    return f"{how} on {count}, {way}: loss {float(trained.losses[-1]):.4f}{quality}{goes_on}"


# --- compiled text ----------------------------------------------------------------------------------------------------------------


def pipelines(text: str) -> int:
    return len(re.findall(r'custom_call_target="kitsune_(?:cpu|cuda)"', text))


def collectives(text: str) -> Iterator[tuple[str, int, int]]:
    """(kind, how many there are, how many of them in loops) of each collective in the text of a compiled program."""
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    parts = re.split(r"^(?=(?:ENTRY )?%?[\w.-]+ .*\{$)", text, flags=re.MULTILINE)
    for kind in COLLECTIVES:
        found = [(part, len(re.findall(rf" {kind}(?:-start)?\(", part))) for part in parts]
        inside = sum(n for part, n in found if part.split(" ", 1)[0].lstrip("%") in bodies)
        yield kind, sum(n for _, n in found), inside


def explained(text: str, way: str) -> str:
    told = [f"{n} {kind}{f' ({inside} in loops)' * (inside > 0)}" for kind, n, inside in collectives(text) if n]
    return f"{way}: {pipelines(text)} pipelines; collectives: {', '.join(told) or 'none'}"
