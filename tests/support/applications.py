"""Examples run as a user runs them, in small: what the tests of all of them share."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.progress import Progress

from benchmarks.graphs.apps import example
from tests.support.draws import drawn_by_numpy


@dataclasses.dataclass(frozen=True)
class Examples:
    """``tiny``: name -> fields of the sizes that a test takes; ``pictures``: name -> the picture that it draws; ``steps``: that it
    runs; ``needs``: name -> packages without which its tests are skipped."""

    tiny: Mapping[str, Mapping[str, Any]]
    pictures: Mapping[str, str]
    steps: int
    needs: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def module(self, name: str) -> ModuleType:
        for needed in ("matplotlib", "optax", "rich", *self.needs.get(name, ())):
            pytest.importorskip(needed)
        return example(name)

    def run(self, name: str, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, *more: str) -> str:
        """What the example prints."""
        module = self.module(name)
        monkeypatch.setattr(module, "SMALL", dataclasses.replace(module.SMALL, **self.tiny[name]))
        with drawn_by_numpy():
            assert module.main(["--steps", str(self.steps), "--out", str(out), *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    def check_same(
        self, name: str, out: Path, monkeypatch: Any, capsys: Any, reached: Callable[[str], float], relative: float, least: float
    ) -> None:
        """Pipelined and plain print the same number (``reached``), more than the part ``least`` of the operators is pipelined, and
        the picture shows something."""
        pipelined = self.run(name, out / "deeper", monkeypatch, capsys, "--force")
        plain = self.run(name, out / "plain", monkeypatch, capsys, "--plain")
        assert reached(pipelined) == pytest.approx(reached(plain), rel=relative, abs=1e-3)
        done, total = map(int, re.search(r"pipelined: (\d+) of (\d+) operators", pipelined).groups())  # type: ignore[union-attr]
        assert least * total < done <= total
        assert "with jax.jit" in plain and "with jax.jit" not in pipelined
        assert "with --plain nothing is pipelined" in plain
        picture = Image.open(out / "deeper" / f"{self.pictures[name]}.png").convert("RGB")
        assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 50

    def check_ctrl_c(self, name: str, out: Path, monkeypatch: Any, capsys: Any) -> None:
        """Ctrl-C in step 4 ends the example with what it has reached, and its picture."""
        update, handler = Progress.update, signal.getsignal(signal.SIGINT)

        def interrupting(self: Progress, *args: Any, **kwargs: Any) -> None:
            update(self, *args, **kwargs)
            if kwargs.get("completed") == 4:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Progress, "update", interrupting)
        assert f"interrupted after 4 of {self.steps} steps with jax.jit" in self.run(name, out, monkeypatch, capsys, "--plain")
        assert (out / f"{self.pictures[name]}.png").exists()
        assert signal.getsignal(signal.SIGINT) is handler

    def check_arguments(self, name: str, capsys: Any) -> None:
        """What makes no sense is told, before anything runs."""
        for argument, value, why in (("--steps", "0", "--steps must be at least 1"), ("--out", __file__, "cannot be a folder")):
            with pytest.raises(SystemExit):
                self.module(name).main([argument, value])
            assert why in capsys.readouterr().err
