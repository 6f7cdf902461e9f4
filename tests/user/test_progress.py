"""Long work: it is told once after a second, and Ctrl-C ends it."""

from __future__ import annotations

import _thread
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitsune_jax import config, progress
from kitsune_jax.targets.cuda import compile, nvrtc

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A "second" is shorter here, and no other work was told."""
    monkeypatch.setattr(progress, "_SILENT_S", 0.1)
    monkeypatch.setattr(progress, "_works", {})
    monkeypatch.setenv("KITSUNE_PROGRESS", "on")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield
    signal.signal(signal.SIGINT, before)


def work(*seconds: float, kind: str = "test") -> None:
    for s in seconds:
        with progress.announced(kind, "stirring the soup, for about an hour"):
            time.sleep(s)


def test_long_work_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    work(0.3, 0.3)
    assert capsys.readouterr().err == "kitsune_jax: stirring the soup, for about an hour\n"


def test_short_work_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    work(0.0)
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_short_pieces_of_one_kind_are_long_together(capsys: pytest.CaptureFixture[str]) -> None:
    work(*[0.06] * 4)
    assert capsys.readouterr().err.count("soup") == 1


def test_seconds_of_all_work_are_counted_once() -> None:
    before, began = progress.seconds(), time.monotonic()
    with progress.announced("outer", "stirring"):
        work(0.1)
    work(0.1)
    assert 0.2 <= progress.seconds() - before <= time.monotonic() - began


def test_later_work_of_the_same_kind_is_told_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_APART_S", 0.0)
    work(0.3, 0.3)
    assert capsys.readouterr().err.count("soup") == 2


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("setting", "terminal", "level", "told"),
    [
        ("off", True, logging.WARNING, False),
        ("", True, logging.WARNING, True),
        ("", True, logging.INFO, False),  # the log has it
        ("", False, logging.WARNING, False),
        ("on", False, logging.INFO, True),
    ],
)
def test_who_is_told(monkeypatch: pytest.MonkeyPatch, setting: str, terminal: bool, level: int, told: bool) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(Terminal, "isatty", lambda self: terminal)
    monkeypatch.setenv("KITSUNE_PROGRESS", setting)
    before = config.logger.level
    config.logger.setLevel(level)
    try:
        work(0.3)
    finally:
        config.logger.setLevel(before)
    assert bool(stderr.text) == told


def test_the_log_has_it_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kitsune_jax"):
        work(0.0, 0.0)
    assert [r.getMessage() for r in caplog.records] == ["stirring the soup, for about an hour"]


def test_an_error_of_the_work_is_returned() -> None:
    def fails() -> None:
        raise KeyError("soup")

    assert isinstance(progress.in_own_thread(fails, "kitsune_jax test"), KeyError)


@pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.why_not() or "")
def test_ctrl_c_ends_a_compilation_and_keeps_nothing(ctrl_c: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    lines = "".join(f"a = sinf(a * {k}.5f) + powf(a, {k}.25f) + x[{k}];\n" for k in range(1000))  # minutes of work
    source = f'extern "C" __global__ void kitsune_region(float* x) {{ float a = x[0]; {lines} x[1] = a; }}'
    threading.Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        compile.cubin(source, "sm_90a")
    for thread in threading.enumerate():
        if thread.name == "kitsune_jax nvrtc":
            thread.join(5)
            assert not thread.is_alive()  # it stopped, or it would go on for minutes
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("handler", ["raise", "print('caught', flush=True); progress.end_at_once()"])
def test_a_process_that_ctrl_c_ends_does_not_wait_for_what_cannot_stop(handler: str) -> None:
    program = f"""
import _thread, ctypes, signal, threading
from kitsune_jax import progress
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, _thread.interrupt_main).start()
try:
    progress.in_own_thread(lambda: ctypes.CDLL(None).sleep(300), "kitsune_jax test")
except KeyboardInterrupt:
    {handler}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.returncode == -signal.SIGINT
    assert ("KeyboardInterrupt" in ended.stderr) == (handler == "raise") and ("caught" in ended.stdout) == (handler != "raise")
