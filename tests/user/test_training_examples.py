"""The training examples run as a user runs them, and the fragments of docs/training.md compute what the unpipelined code does.

Forced: at sizes that suit a test no pipeline would pay, and the tests want them to run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.progress import Progress

import kitsune_jax as kj
from tests.support.checks import close
from tests.support.example_files import EXAMPLES, examples_on_the_path

__all__ = ["examples_on_the_path"]  # a fixture

ROOT = Path(__file__).parents[2]
SMALL = {
    "train_digits_optax": ["--width", "48", "--batch", "101"],
    "train_digits_nnx": ["--width", "32", "--batch", "101"],
    "train_photo_equinox": ["--width", "32", "--batch", "257", "--size", "31"],
}
NEEDS = {"train_digits_optax": "sklearn", "train_digits_nnx": "flax", "train_photo_equinox": "equinox"}
each_example = pytest.mark.parametrize("name", list(SMALL))
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


@pytest.fixture
def training() -> ModuleType:
    return importlib.import_module("_training")


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    out: Path
    text: str

    @property
    def losses(self) -> list[float]:
        return _checkpoint(self.name, self.out)[0]


def _main(name: str) -> Callable[[list[str]], int]:
    pytest.importorskip(NEEDS[name])
    main: Callable[[list[str]], int] = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    return main


def _train(name: str, out: Path, steps: int, capsys: Any, *more: str) -> Run:
    assert _main(name)([*SMALL[name], "--steps", str(steps), "--force", "--out", str(out), *more]) == 0
    return Run(name, out, " ".join(capsys.readouterr().out.split()))


def _checkpoint(name: str, out: Path) -> tuple[list[float], list[np.ndarray]]:
    """(losses, every array) of the latest checkpoint, read without the example's code."""
    if name == "train_digits_nnx":
        ocp = importlib.import_module("orbax.checkpoint")
        with ocp.CheckpointManager(out / "checkpoints") as manager:
            parts = ocp.args.Composite(state=ocp.args.StandardRestore(), info=ocp.args.JsonRestore())
            saved = manager.restore(manager.latest_step(), args=parts)
        return saved.info["losses"], [np.asarray(x) for x in jax.tree.leaves(saved.state)]
    if name == "train_digits_optax":
        with np.load(out / "checkpoint.npz") as file:
            return json.loads(str(file["info"]))["losses"], [file[k] for k in file.files if k != "info"]
    arrays = []
    with open(out / "checkpoint.eqx", "rb") as file:
        losses = json.loads(file.readline())["losses"]
        while file.peek(1):
            arrays.append(np.load(file))
    return losses, arrays


_finished: dict[str, Run] = {}


@pytest.fixture
def finished(name: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Run:
    """100 steps in float32, once for each example and process."""
    if name not in _finished:
        _finished[name] = _train(name, tmp_path_factory.mktemp(name) / "deeper", 100, capsys)
    return _finished[name]


@each_example
def test_learns(finished: Run) -> None:
    losses = finished.losses
    assert len(losses) == 100
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])
    if "digits" in finished.name:
        assert float(re.search(r"accuracy (\S+)% on 297 digits", finished.text)[1]) > 80  # type: ignore[index]
    else:
        assert float(re.search(r"PSNR (\S+) dB", finished.text)[1]) > 13  # type: ignore[index]  # a grey picture reaches 10.6 dB


@each_example
def test_says_what_share_was_pipelined(finished: Run) -> None:
    pipelined, total = map(int, re.search(r"pipelined: (\d+) of (\d+) operators", finished.text).groups())  # type: ignore[union-attr]
    assert total / 2 < pipelined <= total


@each_example
def test_draws_the_loss_curve(finished: Run) -> None:
    picture = Image.open(finished.out / "loss.png")
    assert picture.size == (768, 480)
    assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 10


_COMPARED = [
    pytest.param(
        name, dtype, id=f"{name}-{dtype}", marks=[] if (name, dtype) == ("train_photo_equinox", "float32") else pytest.mark.slow
    )
    for name in SMALL
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("name", "dtype"), _COMPARED)
def test_loss_stays_within_rounding_of_the_unpipelined_run(
    name: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over 200 steps. The yardstick is how far jax.jit comes from itself with initial weights rounded once more."""
    run = _train(name, tmp_path, 200, capsys, "--compare", "--dtype", dtype)
    distances = re.search(r"over 200 steps: (\S+) against jax.jit; (\S+) between", run.text)
    assert distances, run.text
    pipelined, rounded = map(float, distances.groups())
    assert 0 < rounded < {"float32": 1e-4, "bfloat16": 0.3}[dtype]  # else training is chaotic, and the comparison says nothing
    assert pipelined < 5 * rounded
    assert np.mean(run.losses[-10:]) < 0.2 * np.mean(run.losses[:10])
    assert {a.dtype for a in _checkpoint(name, tmp_path)[1] if a.ndim} == {np.dtype(np.float32)}  # master weights, moments


@each_example
def test_resumes_bit_by_bit(finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of an epoch, and past the number of steps that was asked for at first."""
    first = _train(finished.name, tmp_path, 41, capsys)
    assert len(first.losses) == 41
    _train(finished.name, tmp_path, 100, capsys, "--resume")
    losses, arrays = _checkpoint(finished.name, tmp_path)
    expected_losses, expected = _checkpoint(finished.name, finished.out)
    assert losses == expected_losses
    assert len(arrays) == len(expected) > 10
    for a, b in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", [pytest.param("train_digits_nnx", marks=pytest.mark.slow), "train_photo_equinox"])
def test_interrupted_run_leaves_a_checkpoint(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update, handler = Progress.update, signal.getsignal(signal.SIGINT)

    def interrupting(self: Progress, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        if kwargs.get("completed") == 7:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "update", interrupting)
    run = _train(name, tmp_path, 50, capsys)
    assert "interrupted after 7 of 50 steps" in run.text
    assert len(run.losses) == 7
    assert (tmp_path / "loss.png").exists()
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_ctrl_c_ends_the_process_politely(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    arguments = ["--width", "16", "--batch", "50", "--steps", "1000000", "--save-every", "5", "--out", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / "train_digits_optax.py"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "checkpoint.npz").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    done = re.search(r"interrupted after (\d+) of 1000000 steps", " ".join(out.split()))
    assert done, out
    assert len(_checkpoint("train_digits_optax", tmp_path)[0]) == int(done[1]) >= 5


@each_example
def test_rejects_what_makes_no_sense(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = _main(name)
    for arguments, why in (
        (["--steps", "0"], "--steps must be at least 1"),
        (["--save-every", "-1"], "--save-every must be at least 1"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--dtype", "float16"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, "--out", str(tmp_path)])
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit, match="more than the .* rows that there are"):
        main(["--batch", "1000000", "--out", str(tmp_path)])


@each_example
def test_does_not_resume_from_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot resume: there is no"):
        _main(name)([*SMALL[name], "--out", str(tmp_path), "--resume"])


@each_example
def test_does_not_resume_another_run(finished: Run) -> None:
    for other in (["--seed", "3"], ["--width", "24"]):
        with pytest.raises(SystemExit, match=f"was made with {other[0]} .*, not {other[1]}"):
            _main(finished.name)([*SMALL[finished.name], *other, "--out", str(finished.out), "--resume"])


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (13, 13), (13, 5), (17, 1), (101, 7)])
def test_each_epoch_has_every_row_at_most_once(training: ModuleType, rows: int, size: int) -> None:
    batches = training.Batches((np.arange(rows), 10 * np.arange(rows)), size, 5)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * (rows // size), (epoch + 1) * (rows // size))
        assert all((batches[i][1] == 10 * batches[i][0]).all() for i in steps)
        epochs.append(np.concatenate([batches[i][0] for i in steps]))
        assert len(epochs[-1]) == len(set(epochs[-1])) == rows // size * size
    assert rows == 1 or not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(batches[0][0], epochs[0][:size])  # whatever was asked for in between


def test_outcome_admits_that_nothing_was_pipelined(training: ModuleType) -> None:
    def tiny(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    arguments = jnp.ones((7, 3)), jnp.ones((3, 5))
    assert training.outcome(kj.explain(tiny, force=False)(*arguments)).startswith("pipelined: none of 2 operators")
    assert training.outcome(kj.explain(tiny, force=True)(*arguments)) == "pipelined: 2 of 2 operators (100%) in 1 region"


def test_an_interrupted_write_keeps_the_old_checkpoint(training: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoint"
    with training.replacing(path) as fresh:
        fresh.write_text("old")
    with pytest.raises(KeyboardInterrupt), training.replacing(path) as fresh:
        fresh.write_text("ha")
        raise KeyboardInterrupt
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint"]
    assert path.read_text() == "old"


# --- docs/training.md -----------------------------------------------------------------------------------------------------------

_DOC = (ROOT / "docs" / "training.md").read_text() if (ROOT / "docs").exists() else ""
RESULTS = {
    "optax": ("params", "opt_state", "loss"),
    "nnx": ("state", "loss"),
    "nnx_state": ("statistics", "loss"),
    "equinox": ("arrays", "opt_state", "loss"),
    "residuals": ("gradients",),
    "accumulation": ("loss", "grads"),
    "data_parallel": ("loss", "grads", "loss_unchecked", "grads_unchecked"),
    "mixed_precision": ("loss", "grads"),
}


def _fragment(name: str) -> str:
    blocks = re.findall(rf"<!-- test: {name} -->\n```python\n(.*?)```", _DOC, re.DOTALL)
    assert blocks, f"docs/training.md has no fragment {name}"
    return "\n".join(blocks)


@functools.cache
def _executed(name: str, switch: str) -> tuple[dict[str, Any], str]:
    """The names that the fragment defines, and the log, with every region pipelined (``force``) or none (``disable``)."""
    if not _DOC:
        pytest.skip("the documentation is not here")
    pytest.importorskip({"nnx": "flax", "nnx_state": "flax", "equinox": "equinox"}.get(name, "optax"))
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kitsune_jax")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    names: dict[str, Any] = {"__name__": name}
    try:
        with kj.config.override(**{switch: True}):
            exec(compile(_fragment(name), f"docs/training.md: {name}", "exec"), names)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    return names, "\n".join(log)


def _plain(x: Any) -> Any:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(x)]


def test_every_fragment_of_the_documentation_is_tested() -> None:
    if not _DOC:
        pytest.skip("the documentation is not here")
    assert set(re.findall(r"<!-- test: (\w+) -->\n```python", _DOC)) == set(RESULTS)
    assert _DOC.count("```python") == len(re.findall(r"<!-- test: \w+ -->\n```python", _DOC))


@pytest.mark.parametrize("name", RESULTS)
def test_fragment_computes_what_it_does_without_pipelines(name: str) -> None:
    got, log = _executed(name, "force")
    want, silence = _executed(name, "disable")
    assert re.search(r"[:;] [1-9]\d* of \d+ operators pipelined", log), "nothing was pipelined"
    assert "operators pipelined" not in silence
    for result in RESULTS[name]:
        close(_plain(got[result]), _plain(want[result]), 2e-2 if name == "mixed_precision" else 2e-4)


def test_fragments_of_accumulation_and_data_parallelism_give_the_gradient_of_the_whole_batch() -> None:
    for name, suffixes in (("accumulation", [""]), ("data_parallel", ["", "_unchecked"])):
        got, _ = _executed(name, "force")
        want, _ = _executed(name, "disable")
        loss, grads = jax.value_and_grad(want["loss_fn"])(want["params"], want["x"], want["y"])
        for suffix in suffixes:
            close((got[f"loss{suffix}"], _plain(got[f"grads{suffix}"])), (loss, _plain(grads)), 1e-5)


def test_fragment_of_residuals_gives_one_gradient_for_less_memory() -> None:
    got, _ = _executed("residuals", "force")
    for policy in got["policies"]:
        close(got["gradients"][policy], got["gradients"]["save"], 1e-5)
    assert got["temporary_bytes"]["recompute"] < got["temporary_bytes"]["save"]
