"""What the driver of ``scripts/gpu_check.sh`` does about programs that hang, crash, are killed, or cannot write: with toy steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import archive, plant, results, summary
from tests.support.gpu_check_toy import CASE_SECONDS, CASES

ROOT = Path(__file__).parents[2]


def start(folder: Path, *options: str, steps: str = "a,b,c", toy: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.gpu_check_toy", "drive", steps, "--dry-run", *options, str(folder)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "GPU_CHECK_TOY": toy}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def drive(folder: Path, *options: str, **more: str) -> tuple[int, str]:
    run = start(folder, *options, **more)
    output, _ = run.communicate(timeout=90)
    return run.returncode, output


def status(folder: Path) -> dict[str, int]:
    return {name: of["status"] for name, of in json.loads((folder / "status.json").read_text())["steps"].items()}


def found(folder: Path, step: str) -> dict[str, Any]:
    return {f["name"]: f for f in results.findings_of(folder, step)}


def archived(path: Path, name: str) -> Any:
    with tarfile.open(path) as tar:
        member = tar.extractfile(name)
        assert member is not None
        return member.read().decode()


def test_a_check_without_faults_is_right_and_is_not_done_again(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    code, output = drive(folder)
    assert code == 0, output
    assert status(folder) == {"a": 0, "b": 0, "c": 0}
    before = found(folder, "b")
    code, output = drive(folder)
    assert code == 0 and "every step was done before" in output
    assert found(folder, "b") == before
    code, output = drive(folder, "--again", "--only", "b")
    assert code == 0 and "=== b" in output and "=== a" not in output
    assert found(folder, "b") != before  # another process


def test_a_hang_costs_its_case_and_is_named(tmp_path: Path) -> None:
    """It holds Python's lock, so nothing written in Python could end it; its kind is left out afterwards."""
    begin = time.monotonic()
    code, output = drive(tmp_path / "check", "--plant", "hang@b:1")
    assert code == 1
    assert time.monotonic() - begin < CASE_SECONDS + 15
    assert status(tmp_path / "check") == {"a": 0, "b": 1, "c": 0}
    cases = found(tmp_path / "check", "b")
    assert cases["case 1"]["error"] == f"did not end within {CASE_SECONDS:g} s"
    assert [cases[name]["ok"] for name in ("case 0", "case 2")] == [True, True]
    assert "case 3" not in cases  # of the same kind
    assert "plant.py" in (tmp_path / "check" / "logs" / "b.log").read_text()  # the stack of the hang
    page = archived(tmp_path / "check.tar.gz", "check/summary.md")
    assert "- b: case 1: did not end within" in page and "left out of later steps, because they hung or crashed: sm90-toy-b" in page


@pytest.mark.parametrize(("fault", "cause"), [("segv", "SIGSEGV"), ("abort", "SIGABRT")])
def test_a_crash_costs_its_case_and_is_named(tmp_path: Path, fault: str, cause: str) -> None:
    code, _ = drive(tmp_path / "check", "--plant", f"{fault}@b:1", steps="b,c")
    assert code == 1
    assert status(tmp_path / "check") == {"b": 1, "c": 0}
    cases = found(tmp_path / "check", "b")
    assert {name: f["ok"] for name, f in cases.items()} == {name: name != "case 1" for name in CASES}
    assert cases["case 1"]["error"] == f"the process ended with {cause}"


def test_a_lost_context_costs_its_case_only(tmp_path: Path) -> None:
    code, output = drive(tmp_path / "check", steps="b", toy="lost@b")
    assert code == 1
    cases = found(tmp_path / "check", "b")
    assert {name: f["ok"] for name, f in cases.items()} == {name: name != "case 1" for name in CASES}, output
    assert len({f["pid"] for f in cases.values()}) == 2


def test_a_full_disk_is_told_and_loses_nothing_before_or_after(tmp_path: Path) -> None:
    code, output = drive(tmp_path / "check", "--plant", "full-disk@b")
    assert code == 1
    assert status(tmp_path / "check") == {"a": 0, "b": 1, "c": 0}
    assert "could not be written (File too large)" in output
    assert "b: 4 of 4 right" in output  # what it found is told, though it could not be kept
    assert set(found(tmp_path / "check", "a")) == set(found(tmp_path / "check", "c")) == set(CASES)
    assert "could not be written" in archived(tmp_path / "check.tar.gz", "check/summary.md")
    code, _ = drive(tmp_path / "check")  # there is room again
    assert code == 0 and set(found(tmp_path / "check", "b")) == set(CASES)


@pytest.mark.parametrize("where", ["a:0", "b:2", "c:3"])
def test_a_kill_at_any_step_leaves_an_archive_and_the_next_call_goes_on(tmp_path: Path, where: str) -> None:
    folder, file = tmp_path / "check", tmp_path / "results.tar.gz"
    code, output = drive(folder, "--plant", f"kill@{where}", "--archive", str(file))
    assert code == -signal.SIGKILL, output
    step, number = where[0], int(where[2])
    done = "abc"[: "abc".index(step)]
    assert all(f"| {s} | right |" in archived(file, "check/summary.md") for s in done) or not file.exists()
    before = {s: found(folder, s) for s in "abc"}
    assert len(before[step]) == number
    code, output = drive(folder, "--archive", str(file))
    assert code == 0, output
    for s in "abc":
        cases = found(folder, s)
        assert set(cases) == set(CASES)
        assert all(cases[name] == finding for name, finding in before[s].items())  # not done again
    assert all(f"=== {s} " not in output for s in done)


def test_what_a_program_started_ends_with_a_check_that_is_killed(tmp_path: Path) -> None:
    run = start(tmp_path / "check", steps="b", toy="crawl@b")
    log = tmp_path / "check" / "logs" / "b.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "case 0" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.kill()
    run.communicate(timeout=60)  # returns when nobody holds the pipe any more
    time.sleep(1.5)
    assert len(log.read_text().splitlines()) <= 3  # the start, and a case or two


def test_another_machine_goes_on_from_the_archive(tmp_path: Path) -> None:
    first, second, steps = tmp_path / "first", tmp_path / "second", "build,a,b,c"
    drive(first, "--plant", "kill@b:2", "--archive", str(tmp_path / "one.tar.gz"), steps=steps)
    code, output = drive(
        second, "--resume-from", str(tmp_path / "one.tar.gz"), "--archive", str(tmp_path / "two.tar.gz"), steps=steps
    )
    assert code == 0, output
    assert "=== a" not in output and "=== build" in output  # what is built there is not here
    assert found(second, "a") == found(first, "a")


def test_the_limit_cuts_a_step_off_and_the_next_call_goes_on_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    code, output = drive(folder, "--limit", "9", steps="b:5,c", toy="crawl@b")
    assert code == 1
    page = (folder / "summary.md").read_text()
    assert "| c | no time left: the next call goes on |" in page, page
    before = found(folder, "b")
    assert 0 < len(before) < len(CASES)
    assert "| b | stopped by its time limit: the next call goes on |" in page
    code, output = drive(folder, steps="b:5,c")
    assert code == 0, output
    assert output.index("=== c") < output.index("=== b")  # what has not had its turn comes first
    assert all(found(folder, "b")[name] == finding for name, finding in before.items())


def test_an_interrupt_ends_the_step_and_still_writes_the_summary(tmp_path: Path) -> None:
    run = start(tmp_path / "check", toy="crawl@a")
    log = tmp_path / "check" / "logs" / "a.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "case 0" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130, output
    assert status(tmp_path / "check") == {"a": 130}
    assert "interrupted" in archived(tmp_path / "check.tar.gz", "check/summary.md")


def test_a_wrong_result_does_not_stop_the_next_step(tmp_path: Path) -> None:
    code, output = drive(tmp_path / "check", steps="a,b", toy="wrong@a")
    assert code == 1
    assert status(tmp_path / "check") == {"a": 1, "b": 0}
    assert "| a | failed (1) |" in output


def test_changed_sources_start_anew(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    drive(folder, steps="a")
    content = json.loads((folder / "status.json").read_text())
    results.write_json(folder / "status.json", {**content, "sources": "others"})
    code, output = drive(folder, steps="a")
    assert code == 0 and "the sources differ" in output and "=== a" in output


def test_the_summary_comes_first_and_long_logs_are_cut(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    (folder / "logs").mkdir(parents=True)
    (folder / "cache").mkdir()
    for name in ("a.json", "summary.md", "z.tmp", "cache/kernel.cubin"):
        (folder / name).write_text(name)
    (folder / "logs" / "a.log").write_text("x" * (2 * archive.LONGEST_FILE) + "the end")
    assert archive.pack(folder, tmp_path / "out.tar.gz") == ""
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        assert tar.getnames() == ["check/summary.md", "check/a.json", "check/logs/a.log"]
    assert archived(tmp_path / "out.tar.gz", "check/logs/a.log").endswith("xthe end")


def test_an_archive_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    folder.mkdir()
    (folder / "summary.md").write_text("one")
    assert archive.pack(folder, tmp_path / "out.tar.gz") == ""
    (folder / "summary.md").write_text("two")
    with plant.full_disk(True):
        told = archive.pack(folder, tmp_path / "out.tar.gz")
    assert "File too large" in told
    assert archived(tmp_path / "out.tar.gz", "check/summary.md") == "one"
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_member_of_an_archive_stays_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "bad.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("check/../../outside", "check/inside"):
            tar.addfile(tarfile.TarInfo(name))
    archive.unpack(path, tmp_path / "a" / "folder")
    assert [p.name for p in (tmp_path / "a").rglob("*") if p.is_file()] == ["inside"]


@pytest.mark.parametrize("text", ["hang", "boil@soak", "hang@", "hang@soak:x"])
def test_a_fault_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    code, output = drive(tmp_path / "check", "--plant", text)
    assert code == 2 and "is no fault" in output


def test_the_summary_tells_of_steps_that_were_stopped(tmp_path: Path) -> None:
    steps = {"soak": {"status": 124, "seconds": 50, "short": False}, "micro": {"status": 1, "seconds": 3, "done": True}}
    results.write_json(tmp_path / "status.json", {"steps": steps, "compiled": {"training": 3, "micro": 1}})
    results.write_json(tmp_path / "soak.json", {"findings": [{"name": "a", "ok": True}], "expected": 4, "finished": False})
    wrong = {"name": "stream l2", "benchmark": "queue", "ok": False, "error": "WrongResult: x"}
    results.write_json(tmp_path / "micro.json", {"findings": [wrong], "finished": True})
    page = summary.summary(tmp_path)
    assert "| soak | stopped by its time limit: the next call goes on | 50 | 1 of 4 right, then it was stopped |" in page
    assert "- micro: stream l2: WrongResult: x" in page
    assert "4 kernels were compiled on this machine: 3 in training, 1 in micro" in page
