"""Columns of PyTorch, run by a process of its own.

Comes in: an interpreter that has PyTorch, a case. Goes out: ``Peer`` for each column, which ``benchmarks.timing`` times in turn
with the others, and errors against the same references.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

COLUMNS = ("torch", "torch_compile")
ROOT = Path(__file__).parents[2]
# What ``networks.make`` knows: only an interpreter with PyTorch can import it.
NAMES = ("nerf", "mgn", "swiglu", "attention", "attention_full", "transformer_layer", "gat") + tuple(
    f"{cell}_{width}" for cell in ("lstm", "gru") for width in (16, 64, 256)
)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A column. ``seconds(n)`` are those of one of ``n`` calls, by the clock of the process that makes them."""

    worker: Worker
    column: str

    def seconds(self, calls: int) -> float:
        return float(self.worker.ask({"run": self.column, "calls": calls})["seconds"])

    def result(self) -> dict[str, np.ndarray]:
        """ "result", or "loss" and "grad.NAME" of a training step, in float64."""
        path = self.worker.folder / self.worker.ask({"result": self.column})["file"]
        with np.load(path) as found:
            return dict(found)


class Worker:
    """The process, which has said its ``version`` of PyTorch."""

    def __init__(self, python: str, folder: Path):
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
        self._log: TextIO = open(folder / "log.txt", "w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT)},
        )
        self.version = str(self._answer()["version"])

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says why
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"the process of PyTorch ended:\n{self._log.read()[-2000:]}")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


@dataclasses.dataclass(frozen=True)
class Question:
    """A case for the other process: of ``app`` in ``mode``, with ``loss`` "squared_error" or "label_error" in mode "train"."""

    app: str
    mode: str
    params: Any
    inputs: tuple[Any, ...]
    targets: Any = None
    loss: str = "squared_error"


@contextlib.contextmanager
def peers(python: str, question: Question) -> Iterator[dict[str, Peer]]:
    """The columns of ``question`` by ``python``; none where ``python`` is empty or the application is not written in PyTorch.
    Raises ``RuntimeError`` with the last lines of a process that ended."""
    if not python or question.app not in NAMES:
        yield {}
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, question)
        worker = Worker(python, folder)
        try:
            yield {column: Peer(worker, column) for column in COLUMNS}
        finally:
            worker.close()


def version(python: str) -> str:
    """The version of PyTorch that ``python`` has. Raises ``RuntimeError`` where it has none."""
    done = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    if done.returncode:
        how = "pip install torch" if python == sys.executable else f"{python} -m pip install torch"
        raise RuntimeError(f"{python} cannot import PyTorch: {how}, or give the interpreter that has it by --peers PYTHON")
    return done.stdout.strip()


def flat(params: Any) -> dict[str, Any]:
    """The leaves of a pytree by names such as "w0" and "0.sender"."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf for path, leaf in leaves}


def _write(folder: Path, question: Question) -> None:
    arrays = {f"params.{name}": leaf for name, leaf in flat(question.params).items()}
    arrays |= {f"inputs.{k}": leaf for k, leaf in enumerate(question.inputs)}
    if question.targets is not None:
        arrays["targets"] = question.targets
    dtypes = {}
    for name, leaf in arrays.items():
        array = np.asarray(leaf)
        dtypes[name] = array.dtype.name
        np.save(folder / f"{name}.npy", array.view(np.uint16) if array.dtype.name == "bfloat16" else array)
    case = {"app": question.app, "mode": question.mode, "arrays": dtypes, "inputs": len(question.inputs), "loss": question.loss}
    (folder / "case.json").write_text(json.dumps(case))
