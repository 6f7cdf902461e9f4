"""The examples on several devices run as a user runs them, also in two processes, and go on where they were killed.

Forced: at sizes that suit a test no pipeline would pay, and the tests want them to run.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("optax")

import orbax.checkpoint as ocp  # noqa: E402

from tests.support.example_files import EXAMPLES, examples_on_the_path  # noqa: E402

__all__ = ["examples_on_the_path"]  # a fixture
SMALL = {
    "data_parallel": ["--width", "48", "--batch", "160", "--steps", "40"],
    "fsdp": ["--width", "32", "--layers", "2", "--context", "16", "--batch", "8", "--steps", "30"],
}
each_example = pytest.mark.parametrize("name", list(SMALL))
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


@dataclasses.dataclass(frozen=True)
class Run:
    losses: list[float]
    text: str


def _main(name: str) -> Callable[[list[str]], int]:
    main: Callable[[list[str]], int] = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    return main


def _losses(folder: Path) -> list[float]:
    """Those of the latest checkpoint, read without the examples' code."""
    with ocp.CheckpointManager(folder / "steps") as manager:
        info = manager.restore(manager.latest_step(), args=ocp.args.Composite(info=ocp.args.JsonRestore())).info
    losses: list[float] = info["losses"]
    return losses


def _train(name: str, folder: Path, devices: int, capsys: Any, *more: str) -> Run:
    arguments = [*SMALL[name], "--devices", str(devices), "--force", "--checkpoint", str(folder), *more]
    assert _main(name)(arguments) == 0
    return Run(_losses(folder), " ".join(capsys.readouterr().out.split()))


_finished: dict[str, Run] = {}


@pytest.fixture
def finished(name: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Run:
    """On eight devices, once for each example and process."""
    if name not in _finished:
        _finished[name] = _train(name, tmp_path_factory.mktemp(name) / "deeper", 8, capsys, "--explain")
    return _finished[name]


@each_example
def test_learns(finished: Run) -> None:
    assert np.mean(finished.losses[-5:]) < 0.8 * np.mean(finished.losses[:5])


@each_example
def test_the_step_of_a_device_has_pipelines(finished: Run) -> None:
    assert int(re.search(r"on 8 devices in 1 process, (\d+) pipelines in the step", finished.text)[1]) > 0  # type: ignore[index]


@each_example
def test_collectives_are_explained(name: str, finished: Run) -> None:
    told = re.findall(
        r"(pipelined|jax.jit): (\d+) pipelines; collectives: ((?:\d+ [a-z-]+(?: \(\d+ in loops\))?(?:, )?)+)", finished.text
    )
    (ours, pipelines, pipelined), (theirs, none, plain) = told
    assert (ours, theirs) == ("pipelined", "jax.jit")
    assert int(pipelines) > 0 == int(none)
    if name == "data_parallel":
        assert re.fullmatch(r"\d+ all-reduce", pipelined.strip()) and re.fullmatch(r"\d+ all-reduce", plain.strip())
    else:
        # Of the two loops over layers, each gathers the weights of a layer; the second one scatters their gradients.
        assert int(re.search(r"all-gather \((\d+) in loops", pipelined)[1]) == 12  # type: ignore[index]
        assert int(re.search(r"reduce-scatter \((\d+) in loops", pipelined)[1]) == 6  # type: ignore[index]


def test_each_device_holds_its_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if "fsdp" not in _finished:
        _finished["fsdp"] = _train("fsdp", tmp_path, 8, capsys, "--explain")
    for part in ("parameters", "optimiser's state"):
        told = re.search(rf"{part}: (\S+) of (\S+) bytes in each device", _finished["fsdp"].text)
        here, everywhere = (int(n.replace(",", "")) for n in told.groups())  # type: ignore[union-attr]
        assert everywhere / 8 <= here < everywhere / 8 + 16  # two counts of steps are whole everywhere


@each_example
def test_one_device_has_the_same_curve(name: str, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = _train(name, tmp_path, 1, capsys)
    np.testing.assert_allclose(finished.losses, alone.losses, rtol=1e-4)
    assert (tmp_path / "loss.png").exists()


def test_without_pipelines_it_has_the_same_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = _train("data_parallel", tmp_path / "plain", 8, capsys, "--plain")
    assert "on 8 devices in 1 process, with jax.jit" in plain.text
    if "data_parallel" not in _finished:
        _finished["data_parallel"] = _train("data_parallel", tmp_path / "pipelined", 8, capsys, "--explain")
    np.testing.assert_allclose(_finished["data_parallel"].losses, plain.losses, rtol=1e-4)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts an example in two processes with two devices each, and waits for its second checkpoint."""
    processes = []

    def start(name: str) -> subprocess.Popen[str]:
        root = EXAMPLES.parent
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}
        arguments = [*SMALL[name], "--devices", "4", "--processes", "2", "--force", "--checkpoint", str(tmp_path)]
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments, "--steps", "1000000", "--save-every", "10"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        processes.append(process)
        deadline = time.monotonic() + 240
        while not (tmp_path / "steps" / "20").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    yield start
    for process in processes:
        process.kill()


@pytest.mark.parametrize("name", ["data_parallel", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_killed_in_two_processes_and_resumed_on_other_devices(
    name: str, finished: Run, started: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = started(name)
    process.kill()
    process.communicate(timeout=60)  # ends when both processes, which write there too, have ended
    before = _losses(tmp_path)
    first = min(len(before), len(finished.losses))
    assert first >= 20
    np.testing.assert_allclose(before[:first], finished.losses[:first], rtol=1e-4)  # of one process
    shutil.copytree(tmp_path, tmp_path / "copy")
    until = ["--steps", str(len(before) + 5)]
    resumed = [_train(name, folder, n, capsys, *until) for folder, n in ((tmp_path / "copy", 8), (tmp_path, 1))]
    for run in resumed:
        assert f"goes on from step {len(before)} in" in run.text
        assert run.losses[: len(before)] == before
        assert len(run.losses) == len(before) + 5
    np.testing.assert_allclose(resumed[0].losses, resumed[1].losses, rtol=1e-4)


@pytest.mark.slow
@each_example
def test_ctrl_c_ends_both_processes_politely(name: str, started: Any, tmp_path: Path) -> None:
    process = started(name)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    told = re.search(
        r"interrupted after (\d+) of 1000000 steps on 4 devices in 2 processes, (\d+) pipelines", " ".join(out.split())
    )
    assert told, out
    assert len(_losses(tmp_path)) == int(told[1]) >= 20
    assert int(told[2]) > 0


def test_the_other_processes_end_with_one_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text("import sys, time\nif sys.argv[-1] == '1':\n    sys.exit(3)\ntime.sleep(100)\n")
    begin = time.monotonic()
    assert importlib.import_module("_devices").launched(str(script), [], 3) == 3
    assert time.monotonic() - begin < 60


def test_does_not_resume_another_run(tmp_path: Path) -> None:
    devices = importlib.import_module("_devices")
    checkpoints = devices.Checkpoints(tmp_path, {"seed": 0}, 1)
    checkpoints.save([1.0], {"w": np.ones(3)})
    checkpoints.close()
    with pytest.raises(SystemExit, match="was made with --seed 0, not 1"):
        devices.Checkpoints(tmp_path, {"seed": 1}, 1).restored({"w": np.ones(3)})


@each_example
def test_rejects_what_makes_no_sense(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = _main(name)
    for arguments, why in (
        (["--steps", "0"], "--steps must be at least 1"),
        (["--devices", "-2"], "--devices must be at least 1"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--devices", "3", "--processes", "2"], "not the same number in each of --processes 2"),
        (["--devices", "8", "--batch", "12"], "--batch 12 is no multiple of --devices 8"),
        (["--process", "1"], "--process and --coordinator need each other"),
        (["--process", "2", "--coordinator", "localhost:1", "--processes", "2"], "--process must be from 0 to 1, not 2"),
        (["--checkpoint", f"{__file__}/x"], "cannot be a folder"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert why in capsys.readouterr().err
    for arguments, why in (
        (["--devices", "16"], "--devices 16: there are 8, cpu"),
        (["--batch", "12"], "--batch 12 is no multiple of the 8 devices"),
        *([(["--width", "24"], "--width 24 is no multiple of 16")] if name == "fsdp" else []),
    ):
        with pytest.raises(SystemExit, match=why):
            main(arguments)
