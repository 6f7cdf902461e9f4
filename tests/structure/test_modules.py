"""The shape of the source tree: no circle of imports, no long file, and walls between rooms."""

from __future__ import annotations

import ast
import collections
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONGEST = 1000


def sources(folder: str, *endings: str) -> list[pathlib.Path]:
    return sorted(p for ending in endings for p in (ROOT / folder).rglob(f"*{ending}"))


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in sources("kitsune_jax", ".py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """The modules of the package that a file imports anywhere: inside of functions, and for the type checker only, as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kitsune_jax"):
            for name in node.names:
                module = f"{node.module}.{name.name}"
                found.add(module if module in known else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & known.keys()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or by way of others (strongly connected components of two or more)."""

    def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
        seen, work = set[str](), [start]
        while work:
            for other in edges[work.pop()]:
                if other not in seen:
                    seen.add(other)
                    work.append(other)
        return seen

    behind = {m: reached(m, graph) for m in graph}
    groups = {tuple(sorted({m, *(o for o in behind[m] if m in behind[o])})) for m in graph if m in behind[m]}
    return [list(group) for group in sorted(groups)]


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_modules_import_in_one_direction():
    known = modules()
    assert len(known) > 100
    assert not circles({name: imports(path, known) - {name} for name, path in known.items()})


def test_no_file_is_long():
    files = [
        *sources("kitsune_jax", ".py"),
        *sources("cpu/src", ".cc", ".h"),
        *sources("cuda/src", ".cc", ".h"),
        *sources("cuda/include", ".h"),
        *sources("cuda/emulator", ".cc", ".h"),
    ]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > LONGEST}
    assert not long


# The rooms in order: each knows those before it, and none of those after it.
ROOMS = (
    *("ops", "capture", "sharding", "gradient", "planning", "program", "regions", "report", "targets", "tuning", "frontend"),
    *("profiling", "cli"),
)
# Rooms that do not know each other, whatever their order.
APART = {
    "gradient": {"sharding"},
    "planning": {"capture", "sharding", "gradient"},
    "program": {"capture", "sharding", "gradient"},
    "regions": {"capture", "sharding", "gradient", "program"},
    "report": {"capture", "sharding", "gradient", "program", "regions"},
    "tuning": {"ops", "capture", "sharding", "gradient", "planning", "program", "regions", "report"},
    "targets": {"capture", "sharding", "gradient", "regions", "report"},
    "profiling": {"ops", "capture", "sharding", "gradient", "program", "regions", "tuning"},
}
WALLS = {room: {*ROOMS[i + 1 :], *APART.get(room, ())} for i, room in enumerate(ROOMS)}


def test_every_folder_is_a_room():
    assert {path.parent.name for path in (ROOT / "kitsune_jax").glob("*/__init__.py")} == {*ROOMS, "_compat"}


def assigned_twice(tree: ast.Module) -> list[str]:
    """The names of a module to which two statements assign, those in functions, branches and loops not counted."""
    seen, twice = set[str](), []
    for node in tree.body:
        targets = list[ast.expr]()
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets = [node.target]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        # What is decorated may stand twice: an overload, say.
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
            names.append(node.name)
        for name in names:
            if name in seen:
                twice.append(name)
            seen.add(name)
    return twice


def test_a_name_that_is_assigned_twice_is_found():
    assert assigned_twice(ast.parse("A = 1\nB: int\nB = 2\nif A:\n    B = 3\ndef f(): ...\nA = 4\n")) == ["A"]


def test_modules_assign_a_name_once():
    """Functions between the two assignments would see the second (a test's list of exceptions was replaced by another's)."""
    folders = ("kitsune_jax", "kernel_checks", "reference", "trust", "benchmarks", "scripts", "examples", "tests")
    files = [path for folder in folders for path in sources(folder, ".py")]
    found = {str(path.relative_to(ROOT)): twice for path in files if (twice := assigned_twice(ast.parse(path.read_text())))}
    assert not found


def test_a_class_name_stands_once():
    """In the package, whether private or not."""
    found = collections.defaultdict(list)
    for path in sources("kitsune_jax", ".py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


MOST_PARAMETERS, MOST_BOOLEANS = 8, 2
# Functions that users call take one argument for each option.
PUBLIC = {"kitsune_jax/config.py::override", "kitsune_jax/frontend/api.py::pipeline"}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """How many parameters a function has beside ``self``, and how many of them are booleans, by annotation or default."""
    found = function.args
    by_place, by_name = [*found.posonlyargs, *found.args], found.kwonlyargs
    defaults = [*[None] * (len(by_place) - len(found.defaults)), *found.defaults, *found.kw_defaults]
    given = [(a, d) for a, d in zip([*by_place, *by_name], defaults, strict=True) if a.arg not in ("self", "cls")]
    booleans = [
        a
        for a, default in given
        if (a.annotation and ast.unparse(a.annotation) in ("bool", "bool | None"))
        or (isinstance(default, ast.Constant) and isinstance(default.value, bool))
    ]
    return len(given), len(booleans)


def test_parameters_are_counted():
    source = "def f(self, a: bool, b, /, c: bool | None, *args, d=True, e: int = 1, **others): ..."
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == (5, 3)


def test_functions_have_few_parameters():
    """What belongs together is one frozen dataclass, and a call with several booleans cannot be read."""
    many = {}
    for path in sources("kitsune_jax", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name, (count, booleans) = f"{path.relative_to(ROOT).as_posix()}::{node.name}", parameters(node)
                if (count > MOST_PARAMETERS or booleans > MOST_BOOLEANS) and name not in PUBLIC:
                    many[name] = (count, booleans)
    assert not many


def test_folders_are_small():
    files = sources("kitsune_jax", ".py")
    assert len(files) <= 155
    counts = collections.Counter(path.parent for path in files)
    assert max(counts.values()) <= 20


@pytest.mark.parametrize("room", WALLS)
def test_a_room_knows_only_the_rooms_before_it(room: str):
    known = modules()
    inside = {name: path for name, path in known.items() if name.split(".")[1:2] == [room]}
    assert inside
    over = {
        (name, other)
        for name, path in inside.items()
        for other in imports(path, known)
        if other.split(".")[1:2] and other.split(".")[1] in WALLS[room]
    }
    assert not over


def test_slow_tests_are_known_by_name():
    """The README of the tests names every test function that is marked slow, or takes a mark that a case may carry."""
    told = (ROOT / "tests" / "README.md").read_text()
    unknown = []
    for path in sources("tests", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(d) for d in node.decorator_list]
                if any(mark == "pytest.mark.slow" for mark in marks) and f"`{node.name}`" not in told:
                    unknown.append(f"{path.name}::{node.name}")
    assert not unknown
