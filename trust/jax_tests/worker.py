"""The process that runs one file of JAX's own tests, with ``jax.jit`` as it is or with pipelines under it.

    python -m trust.jax_tests.worker FILE RESULTS {jit,pipeline,list} [--only TESTS]
        [--processes 2 --process 0 --coordinator HOST:PORT]

Comes in: a file of ``unittest`` classes, and perhaps a file with the names of the tests to run. Goes out: a file with one line of
JSON when a test begins and one when it ends, so that whoever waits knows the test that a process died of. Invariant: only the names
``jax``, ``jit`` and ``pjit`` of the test file's module are replaced; JAX itself runs as it is.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MODES = ("jit", "pipeline", "list")


_pipelines: list[tuple[Any, dict[str, Any], Any]] = []


def pipeline_of(fun: Any, static: dict[str, Any]) -> Any:
    """The pipeline of ``fun``: one object, as ``jax.jit`` remembers a function by its identity."""
    import kitsune_jax as kj

    for known, arguments, made in _pipelines:
        if known is fun and arguments == static:
            return made
    _pipelines.append((fun, static, kj.pipeline(fun, **static)))
    return _pipelines[-1][2]


def pipelined(jit: Callable[..., Any]) -> Callable[..., Any]:
    """``jit`` (``jax.jit`` or ``pjit``) of pipelined functions, with the arguments of ``jit``."""

    def of_pipeline(fun: Callable[..., Any] | None = None, /, *args: Any, **given: Any) -> Any:
        if fun is None and "fun" not in given:
            return functools.partial(of_pipeline, *args, **given)
        fun = given.pop("fun", fun)
        if not callable(fun):
            return jit(fun, *args, **given)  # its error
        static = {name: given[name] for name in ("static_argnums", "static_argnames") if given.get(name) is not None}
        return jit(pipeline_of(fun, static), *args, **given)

    return of_pipeline


class _Replaced(types.ModuleType):
    """The module ``jax``, with another ``jit``."""

    def __init__(self, original: types.ModuleType, jit: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(_original=original, jit=jit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __reduce__(self) -> Any:  # where a function of the test file is pickled
        return importlib.import_module, (self.__name__,)


def replace_jit(module: types.ModuleType) -> None:
    """Have the functions of ``module`` pipeline what they give to ``jax.jit`` and ``pjit``."""
    import jax

    pjit = getattr(sys.modules.get("jax._src.pjit"), "pjit", jax.jit)  # the public name of it warns
    for name, value in list(vars(module).items()):
        if value is jax:
            setattr(module, name, _Replaced(jax, pipelined(jax.jit)))
        elif value is jax.jit or value is pjit:
            setattr(module, name, pipelined(value))


class _Written(unittest.TestResult):
    """Outcomes as lines of a file. A test with sub-tests has the outcome of the first that did not pass."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a")
        self._outcome: tuple[str, str, str] = ("pass", "", "")

    def _line(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def startTest(self, test: unittest.TestCase) -> None:
        from kitsune_jax.errors import forget

        super().startTest(test)
        forget()
        _pipelines.clear()
        self._outcome = ("pass", "", "")
        self._line(test=name_of(test), outcome="begun")

    def _not(self, outcome: str, err: Any = None) -> None:
        if self._outcome[0] in ("pass", "skip"):
            text = "".join(traceback.format_exception(*err)) if err else ""
            self._outcome = (outcome, f"{err[0].__name__}: {err[1]}" if err else "", text)

    def addError(self, test: Any, err: Any) -> None:
        self._not("error", err)
        if not isinstance(test, unittest.TestCase):  # setUpModule or setUpClass failed: no test of it runs
            self._line(test=str(test), outcome="error", detail=self._outcome[1], text=self._outcome[2])

    def addFailure(self, test: Any, err: Any) -> None:
        self._not("failure", err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._not("failure", err)

    def addSkip(self, test: Any, reason: str) -> None:
        if self._outcome[0] == "pass":
            self._outcome = ("skip", reason, "")

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        pass

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._outcome = ("failure", "UnexpectedSuccess: it was expected to fail", "")

    def stopTest(self, test: unittest.TestCase) -> None:
        from kitsune_jax.errors import fallbacks

        super().stopTest(test)
        outcome, detail, text = self._outcome
        if outcome == "pass" and (told := fallbacks()):
            outcome, detail, text = "fallback", f"Fallback: {told[0].reason}", told[0].traceback or ""
        self._line(test=name_of(test), outcome=outcome, detail=detail, text=text)


def name_of(test: unittest.TestCase) -> str:
    """``Class.method`` of a test; its ``id`` may have addresses of functions."""
    return f"{type(test).__qualname__}.{getattr(test, '_testMethodName', test.id())}"


def _cases(suite: Any) -> list[unittest.TestCase]:
    return [case for part in suite for case in _cases(part)] if isinstance(suite, unittest.TestSuite) else [suite]


def run_module(module: types.ModuleType, results: Path, only: set[str] | None) -> None:
    """Run the tests of ``module``, or ``only`` those, and append their outcomes to ``results``."""
    cases = _cases(unittest.defaultTestLoader.loadTestsFromModule(module))
    if only is not None:
        cases = [case for case in cases if name_of(case) in only]
    unittest.TestSuite(cases).run(_Written(results))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trust.jax_tests.worker")
    parser.add_argument("file", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--only", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--coordinator", default="")
    args = parser.parse_args(argv)
    only = set(args.only.read_text().split("\n")) if args.only else None

    spec = importlib.util.spec_from_file_location(args.file.stem, args.file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[args.file.stem] = module  # tests look themselves up there, and pickle

    def run_tests() -> None:
        if args.mode == "list":
            lines = (json.dumps({"test": name_of(case)}) for case in _cases(unittest.defaultTestLoader.loadTestsFromModule(module)))
            args.results.write_text("".join(f"{line}\n" for line in lines))
            return
        if args.mode == "pipeline":
            replace_jit(module)
        run_module(module, args.results, only)

    sys.argv = [str(args.file)]
    if args.processes > 1:
        from jax._src import test_multiprocess

        sys.argv += [
            f"--num_processes={args.processes}",
            f"--multiprocess_test_worker_id={args.process}",
            f"--multiprocess_test_controller_address={args.coordinator}",
            "--jax_cpu_collectives_implementation=gloo",
        ]
        spec.loader.exec_module(module)
        test_multiprocess.main(shard_main=run_tests)
        return 0
    spec.loader.exec_module(module)
    if (flags := sys.modules.get("absl.flags")) is not None:
        flags.FLAGS(sys.argv)
    run_tests()
    return 0


if __name__ == "__main__":
    sys.exit(main())
