"""Small bugs planted in the package, one at a time: how many of them do the tests catch?

    python -m scripts.mutations --seed 1 --places 30 --out before.json      # hours: a mutation that survives runs all fast tests
    python -m scripts.mutations --seed 1 --places 30 --resume before.json   # goes on where Ctrl-C ended the first
    python -m scripts.mutations --seed 1 --places 5 --match regions/ --tests tests/regions
    python -m scripts.mutations --seed 1 --places 30 --lines out/lines      # only files of tests that execute the mutated line

Comes in: the sources in ``kitsune_jax/``, and tests. Goes out: for each mutation the test that caught it, or that it survived or
timed out. The same seed chooses the same places of the same sources, and more ``--places`` add to them, so a change of the tests is
compared by a run before it and one after it. Some mutations change no behaviour; they survive both.

A mutation swaps an operator (``<`` and ``<=``, ``==`` and ``!=``, ``+`` and ``-``, ``*`` and ``//``, ``and`` and ``or``), drops a
``not``, changes a 0, 1 or 2 by one, or negates a returned condition. Docstrings, annotations, raised errors, assertions, f-strings,
``__repr__``, reports and ``_compat/`` are left alone. The mutated file is in a copy of the source tree in a temporary folder.
Without ``--tests`` the tests of the mutated file's room run first, then the other fast tests. A test that also fails without a
mutation is left out from then on. ``--lines``: the folder that ``tests/support/executed_lines.py`` wrote in a run of the same
sources. Tests that do not execute the mutated statement cannot catch it, and do not run. A statement that no test is known to
execute, such as one that runs on import, is tested by all.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import contextlib
import dataclasses
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# --- Places -----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a file can be mutated: the text ``old`` at character ``start``, and the texts that may replace it."""

    path: str
    line: int
    function: str
    start: int
    old: str
    choices: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    path: str
    line: int
    function: str
    start: int
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        end = self.start + len(self.old)
        assert text[self.start : end] == self.old, f"{self.path} is another file"
        return text[: self.start] + self.new + text[end:]

    def __str__(self) -> str:
        change = f"{self.old.strip()} -> {self.new}" if self.new else f"without {self.old.strip()}"
        return f"{self.path}:{self.line} in {self.function}: {' '.join(change.split())}"


_OPERATORS = {
    **{"<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",)},
    **{"is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",), "and": ("or",), "or": ("and",)},
    **{"+": ("-",), "-": ("+",), "*": ("//",), "//": ("*",), "+=": ("-=",), "-=": ("+=",), "*=": ("//=",), "//=": ("*=",)},
}
_NUMBERS = {"0": ("1",), "1": ("0", "2"), "2": ("1", "3")}
_SPEAKS = {"debug", "info", "warn", "warning", "error"}  # calls whose arguments are texts for users
_SKIPPED = ("kitsune_jax/_compat/", "kitsune_jax/report/", "kitsune_jax/frontend/explain.py", "kitsune_jax/frontend/residuals.py")


class _Finder(ast.NodeVisitor):
    """Collects the places of a file."""

    def __init__(self, path: str, text: str):
        self.path, self.text, self.functions = path, text, ["the module"]
        self.found: list[Place] = []
        self.returns_bool = [False]
        self.lines = text.splitlines(keepends=True)
        self.line_starts = [0]
        for line in self.lines:
            self.line_starts.append(self.line_starts[-1] + len(line))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        words = (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING)
        self.tokens = [(self.line_starts[t.start[0] - 1] + t.start[1], t.string) for t in tokens if t.type in words]
        self.token_starts = [start for start, _ in self.tokens]
        self.visit(ast.parse(text))

    def _at(self, line: int, column: int) -> int:
        """The character of a position of the syntax tree, whose columns are bytes."""
        return self.line_starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, start: int, old: str, choices: tuple[str, ...]) -> None:
        line = bisect.bisect_right(self.line_starts, start)
        self.found.append(Place(self.path, line, self.functions[-1], start, old, choices))

    def _operator(self, left: ast.expr, right: ast.expr) -> None:
        """The operator between two operands; parentheses may stand beside it."""
        (_, start), (end, _) = self._span(left), self._span(right)
        first, last = (bisect.bisect_left(self.token_starts, at) for at in (start, end))
        words = [(at, word) for at, word in self.tokens[first:last] if word not in "()"]
        at, old = words[0][0], self.text[words[0][0] : words[-1][0] + len(words[-1][1])]
        if old in _OPERATORS:
            self._add(at, old, _OPERATORS[old])

    # Nothing in these is mutated.
    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        inside = [node.name] if len(self.functions) == 1 else [self.functions[-1], node.name]
        self.functions.append(".".join(inside))
        self.returns_bool.append(isinstance(node.returns, ast.Name) and node.returns.id == "bool")
        for part in (*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body):
            self.visit(part)
        self.functions.pop()
        self.returns_bool.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.functions.append(node.name if len(self.functions) == 1 else f"{self.functions[-1]}.{node.name}")
        for part in node.body:
            self.visit(part)
        self.functions.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in _SPEAKS:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip((node.left, *node.comparators), node.comparators, strict=False):
            self._operator(left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(_is_sequence(operand) for operand in (node.left, node.right)):
            self._operator(node.left, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_sequence(node.value):
            self._operator(node.target, node.value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            following = self.token_starts[bisect.bisect_right(self.token_starts, start)]
            self._add(start, self.text[start:following], ("",))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if type(node.value) is int and (old := self.text[start:end]) in _NUMBERS:
            self._add(start, old, _NUMBERS[old])

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        is_condition = isinstance(value, ast.Compare | ast.BoolOp) or (self.returns_bool[-1] and not _is_not(value))
        if value is not None and is_condition:
            start, end = self._span(value)
            self._add(start, self.text[start:end], (f"not ({self.text[start:end]})",))
        self.generic_visit(node)


def _is_sequence(node: ast.expr) -> bool:
    """Is it written as a text, list or tuple? Other arithmetic on these is a TypeError, which every test catches."""
    is_text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    return is_text or isinstance(node, ast.List | ast.Tuple)


def _is_not(node: ast.expr | None) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def places(path: str, text: str) -> list[Place]:
    """The places of a file, in its order."""
    return sorted(_Finder(path, text).found, key=lambda p: (p.start, p.old))


def package_places(match: str = "") -> list[Place]:
    """The places of all files of the package whose path the regular expression ``match`` finds."""
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "kitsune_jax").rglob("*.py"))
    wanted = [path for path in paths if not path.startswith(_SKIPPED) and re.search(match, path)]
    return [place for path in wanted for place in places(path, (ROOT / path).read_text())]


def choose(found: Sequence[Place], seed: int, number: int) -> list[Mutation]:
    """Mutations of ``number`` places, one of each. A larger number has those of a smaller one in front."""
    chosen = random.Random(seed).sample(found, len(found))[:number]
    return [
        Mutation(p.path, p.line, p.function, p.start, p.old, random.Random(f"{seed} {p.path} {p.start}").choice(p.choices))
        for p in chosen
    ]


# --- Tests ------------------------------------------------------------------------------------------------------------------------

# The tests of a room, for rooms that have none of the same name. The longest beginning of a path counts.
_TESTS = {
    "": ("user",),
    "frontend": ("lowering", "transforms"),
    "gradient": ("transforms", "lowering"),
    "ops": ("table",),
    "targets": ("cpu", "cuda"),
    "targets/cpu": ("cpu",),
    "targets/cpu/planning": ("planning", "cpu"),
    "targets/cpu/profile": ("planning", "cpu"),
    "targets/cuda": ("cuda",),
    "targets/cuda/planning": ("planning", "cuda"),
}
# Keys of the cache of compiled code are made in these: a mutation of them could leave wrong code there.
_CACHING = ("cache.py", "compile.py", "hostcc.py", "nvrtc.py", "sources.py")
# Of the source tree, not copied.
_LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", ".make", ".gpu-check*", "__pycache__", "build", "dist", "out", "*.o")


def room_tests(path: str) -> list[str]:
    """The folders of the tests of the room that a file of the package belongs to."""
    room = path.removeprefix("kitsune_jax/").rpartition("/")[0]
    while room and room not in _TESTS and not (ROOT / "tests" / room).is_dir():
        room = room.rpartition("/")[0]
    return [f"tests/{name}" for name in _TESTS.get(room, (room,))]


def statement_lines(text: str, line: int) -> range:
    """The lines of the innermost statement around a line; of one with a body, those of its head."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):  # outer nodes come before inner ones
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
            body: list[ast.stmt] = getattr(node, "body", [])
            last = max(first, body[0].lineno - 1) if body else getattr(node, "end_lineno", first)
            if first <= line <= last:
                found = range(first, last + 1)
    return found


class ExecutedLines:
    """Which files of tests execute a line of the package, as ``tests/support/executed_lines.py`` has written them into a folder."""

    def __init__(self, folder: Path):
        self.tests: dict[str, dict[str, set[int]]] = {}
        for file in folder.glob("*.json"):
            for tests, lines in json.loads(file.read_text()).items():
                self.tests.setdefault(tests, {}).update({path: set(of) for path, of in lines.items()})
        if not self.tests:
            raise SystemExit(f"no file in {folder}: run the tests with -p tests.support.executed_lines --executed-lines {folder}")

    def reaching(self, mutation: Mutation, text: str) -> list[str]:
        """The files of tests that execute the mutated statement of the file ``text``; none for a statement that runs on import."""
        if not any(
            isinstance(n, ast.FunctionDef) and n.lineno <= mutation.line <= (n.end_lineno or 0) for n in ast.walk(ast.parse(text))
        ):
            return []
        lines = statement_lines(text, mutation.line)
        return sorted(tests for tests, files in self.tests.items() if not files.get(mutation.path, set()).isdisjoint(lines))


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """``outcome``: "caught", "survived" or "timed out". ``test``: that caught it."""

    mutation: Mutation
    outcome: str
    test: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome} by {self.test}" if self.test else self.outcome

    def as_data(self) -> dict[str, Any]:
        return dataclasses.asdict(self.mutation) | {"outcome": self.outcome, "test": self.test, "seconds": round(self.seconds, 1)}

    @staticmethod
    def of(data: dict[str, Any]) -> Result:
        mutation = Mutation(**{f.name: data[f.name] for f in dataclasses.fields(Mutation)})
        return Result(mutation, data["outcome"], data["test"], data["seconds"])


class _TimedOut(Exception):
    pass


class Bench:
    """A copy of the source tree in the temporary folder ``folder``, in which mutations are tested. ``tests``: arguments of pytest;
    without any the tests of the mutated file's room run, then the others; of both those that ``lines`` says reach the mutation.
    ``limit``: seconds for a mutation."""

    def __init__(self, folder: Path, tests: Sequence[str], limit: float, jobs: int, lines: ExecutedLines | None = None):
        self.folder, self.tests, self.limit, self.jobs, self.lines = folder, list(tests), limit, jobs, lines
        self.tree = folder / "tree"
        left_out = shutil.ignore_patterns(*_LEFT_OUT)
        shutil.copytree(ROOT, self.tree, ignore=left_out, symlinks=True)
        self.passing: set[str] = set()
        self.failing: list[str] = []  # tests that fail without a mutation
        where = self._python("-c", "import kitsune_jax; print(kitsune_jax.__file__)", until=time.monotonic() + 120)[1]
        if str(self.tree) not in where:
            raise SystemExit(f"the tests would not import the copy of kitsune_jax: {where.strip()}")

    def run(self, mutation: Mutation) -> Result:
        began = time.monotonic()
        outcome, test = "timed out", ""
        with contextlib.suppress(_TimedOut):
            test = self._catcher(mutation, began + self.limit)
            outcome = "caught" if test else "survived"
        return Result(mutation, outcome, test, time.monotonic() - began)

    def _catcher(self, mutation: Mutation, until: float) -> str:
        """The test that fails with the mutation and passes without it; "" if there is none."""
        for group in self._groups(mutation):
            while True:
                with self._mutated(mutation):
                    passed, output = self._pytest(group, until, mutation)
                if passed:
                    break
                test = failed_test(output)
                if self._passes_without(test, group):
                    return test or "an import or a crash"
                self.failing.append(test)
        return ""

    def _groups(self, mutation: Mutation) -> list[list[str]]:
        """Arguments of pytest, one run after the other."""
        if self.tests:
            return [self.tests]
        rooms = room_tests(mutation.path)
        if self.lines and (reaching := self.lines.reaching(mutation, (self.tree / mutation.path).read_text())):
            near = [tests for tests in reaching if tests.rpartition("/")[0] in rooms]
            return [group for group in (near, [tests for tests in reaching if tests not in near]) if group]
        return [rooms, ["tests", *(f"--ignore={room}" for room in rooms)]]

    def _passes_without(self, test: str, group: Sequence[str]) -> bool:
        if test in self.passing:
            return True
        arguments = [test] if test else [*group, "--collect-only"]
        passed, output = self._pytest(arguments, time.monotonic() + self.limit, None)
        if not passed and not test:
            raise SystemExit(f"the tests do not run without a mutation:\n{output[-2000:]}")
        if passed:
            self.passing.add(test)
        else:
            print(f"    {test} fails without a mutation, too, and is left out", file=sys.stderr, flush=True)
        return passed

    @contextlib.contextmanager
    def _mutated(self, mutation: Mutation) -> Iterator[None]:
        file = self.tree / mutation.path
        text = file.read_text()
        self._write(file, mutation.applied_to(text))
        try:
            yield
        finally:
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):  # these go by the second and the size
            stale.unlink()

    def _pytest(self, arguments: Sequence[str], until: float, mutation: Mutation | None) -> tuple[bool, str]:
        """Whether no test failed, and the output."""
        chosen = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-m", "not slow and not gpu"]
        chosen += [f"--{'deselect' if '::' in test else 'ignore'}={test}" for test in self.failing]
        chosen += ["-n", str(self.jobs), "--dist", "loadfile"] if self.jobs > 1 else []
        status, output = self._python("-m", "pytest", *chosen, *arguments, until=until, mutation=mutation)
        return status in (0, 5), output  # 5: there was no test

    def _python(self, *arguments: str, until: float, mutation: Mutation | None = None) -> tuple[int, str]:
        """Runs a Python process in the copy, with the environment of `make test`, and ends it with its children after ``until``."""
        cache = self.folder / "cache"
        if mutation is not None and mutation.path.endswith(_CACHING):
            cache = Path(tempfile.mkdtemp(dir=self.folder))
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        places = {"PYTHONPATH": str(self.tree), "KITSUNE_CACHE_DIR": str(cache), "XLA_FLAGS": flags.strip()}
        told = self.folder / "output"
        with told.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.tree,
                env={**os.environ, **places},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _limit_memory(process.pid)
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise _TimedOut from None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return status, told.read_text(errors="replace")


def _limit_memory(process: int) -> None:
    """A mutated loop may never stop asking for memory: three quarters of the machine's are enough for a test."""
    if hasattr(resource, "prlimit"):
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_DATA, (most, most))


def failed_test(output: str) -> str:
    """The test, or the file that could not be imported, that pytest names first.

    >>> failed_test("F  [ 50%]\\nFAILED tests/a.py::test_b[1 - 2] - assert 1 == 2\\n1 failed")
    'tests/a.py::test_b[1 - 2]'
    >>> failed_test("no test")
    ''
    """
    told = output.rpartition("short test summary info")[2]
    found = re.search(r"^(?:FAILED|ERROR) ([^\s:]+(?:::[^\s\[]+(?:\[.*?\](?= - |$))?)?)", told, flags=re.MULTILINE)
    return found[1] if found else ""


# --- The command ------------------------------------------------------------------------------------------------------------------


def write(file: Path, settings: dict[str, Any], results: Sequence[Result]) -> None:
    """Replaces the file, so that it is whole whenever the process ends."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps({**settings, "results": [r.as_data() for r in results]}, indent=1) + "\n")
    part.replace(file)


def summary(results: Sequence[Result]) -> str:
    counts = Counter(r.outcome for r in results)
    return f"{len(results)} mutations: " + ", ".join(f"{counts[o]} {o}" for o in ("caught", "survived", "timed out"))


def run_all(bench: Bench, mutations: Sequence[Mutation], known: Sequence[Result]) -> Iterator[Result]:
    """The results of all mutations, in their order; those in ``known`` are not tested again."""
    before = {result.mutation: result for result in known}
    for k, mutation in enumerate(mutations, 1):
        print(f"{k} of {len(mutations)}: {mutation}", flush=True)
        result = before[mutation] if mutation in before else bench.run(mutation)
        print(f"    {result} ({result.seconds:.0f} s)", flush=True)
        yield result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=int, default=30, help="number of mutations (default: 30)")
    parser.add_argument("--match", default="", help="a regular expression: only files whose path it finds")
    parser.add_argument("--tests", nargs="+", default=[], help="arguments of pytest (default: the file's room, then the others)")
    parser.add_argument("--lines", type=Path, metavar="DIR", help="the lines that tests execute: others do not run (see above)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a mutation (default: 1800)")
    parser.add_argument("--jobs", type=int, default=1, help="processes of pytest (default: 1)")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON; written after each mutation")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results of an earlier run, which this one continues")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    args = parser.parse_args(arguments)
    settings = {"seed": args.seed, "match": args.match, "tests": args.tests}
    mutations = choose(package_places(args.match), args.seed, args.places)
    if args.list:
        print(*mutations, sep="\n")
        return 0
    results, out = list[Result](), args.out or args.resume
    known = json.loads(args.resume.read_text()) if args.resume and args.resume.exists() else {**settings, "results": []}
    if {name: known[name] for name in settings} != settings:
        parser.error(f"{args.resume} has results of other settings: { ({name: known[name] for name in settings}) }")
    try:
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            bench = Bench(Path(folder).resolve(), args.tests, args.limit, args.jobs, args.lines and ExecutedLines(args.lines))
            for result in run_all(bench, mutations, [Result.of(data) for data in known["results"]]):
                results.append(result)
                if out and len(results) >= len(known["results"]):  # an earlier end would lose what is known
                    write(out, settings, results)
    except KeyboardInterrupt:
        print(f"stopped after {summary(results)}" + (f"; go on with --resume {out}" if out else ""))
        return 130
    print(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
