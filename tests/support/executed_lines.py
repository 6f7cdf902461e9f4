"""A pytest plugin: which lines of the package each file of tests executes.

    pytest -n 2 --dist loadfile -p tests.support.executed_lines --executed-lines out/lines

Each process writes one JSON file into the folder: file of tests -> file of the package -> its lines. Other processes that a test
starts are not seen, nor is anything that an earlier file of the same process computed and kept. A mutation of a line is caught by
the files that execute it (``python -m scripts.mutations --lines out/lines``). Needs ``sys.monitoring`` (Python 3.12), which tells
each line once after every restart, so a run with it takes a few per cent longer.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[2]
_PACKAGE = f"{ROOT / 'kitsune_jax'}{os.sep}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executed-lines", metavar="DIR", type=Path, help="where the executed lines are written")


def pytest_configure(config: pytest.Config) -> None:
    if (folder := config.getoption("--executed-lines")) is not None:
        config.pluginmanager.register(_Recorder(ROOT / folder))


class _Recorder:
    def __init__(self, folder: Path):
        self.folder = folder
        self.lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.tests = ""
        self.monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self.tool = self.monitoring.COVERAGE_ID
        self.monitoring.use_tool_id(self.tool, "executed_lines")
        self.monitoring.register_callback(self.tool, self.monitoring.events.LINE, self._line)
        self.monitoring.set_events(self.tool, self.monitoring.events.LINE)

    def _line(self, code: CodeType, line: int) -> object:
        if code.co_filename.startswith(_PACKAGE):
            self.lines[self.tests][code.co_filename].add(line)
        return self.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        tests = item.path.relative_to(ROOT).as_posix()
        if tests != self.tests:
            self.tests = tests
            self.monitoring.restart_events()
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self.monitoring.set_events(self.tool, self.monitoring.events.NO_EVENTS)
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {
            tests: {Path(file).relative_to(ROOT).as_posix(): sorted(lines) for file, lines in files.items()}
            for tests, files in self.lines.items()
            if tests
        }
        (self.folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json").write_text(json.dumps(found))
