"""Planted bugs: the same seed plants the same ones, each at one place of a copy of the source tree."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from scripts import mutations

TEXT = '''\
"""Of 2 lines: 0 < 1."""


class Shape:
    size: "tuple[int, 2]" = 1

    def __repr__(self):
        return "a" if self.size > 0 else "b"


def holds(n: int, *, least: int = 0) -> bool:
    """Not 1 and 2."""
    if not (n) or (least <= n) is None:
        raise ValueError("1 and 2" if n == 1 else f"{n + 1}")
    assert n > 0, "is not"
    ü = "ü" * n; n += 2 * least // n  # 0 or 1
    return least not in (
        n,
        7,
    )


def calls(n: int) -> bool:
    return holds(n)
'''


def test_what_is_mutated() -> None:
    found = [(p.line, p.function, " ".join(p.old.split()), p.choices) for p in mutations.places("a.py", TEXT)]
    negated = "least not in (\n        n,\n        7,\n    )"
    assert found == [
        (5, "Shape", "1", ("0", "2")),
        (11, "holds", "0", ("1",)),
        (13, "holds", "not", ("",)),
        (13, "holds", "or", ("and",)),
        (13, "holds", "<=", ("<", ">")),
        (13, "holds", "is", ("is not",)),
        (16, "holds", "+=", ("-=",)),
        (16, "holds", "2", ("1", "3")),
        (16, "holds", "*", ("//",)),
        (16, "holds", "//", ("*",)),
        (17, "holds", " ".join(negated.split()), (f"not ({negated})",)),
        (17, "holds", "not in", ("in",)),
        (24, "calls", "holds(n)", ("not (holds(n))",)),
    ]


def test_the_same_seed_chooses_the_same_places() -> None:
    found = mutations.package_places("kitsune_jax/ops/spec")
    assert len(found) > 20
    chosen = mutations.choose(found, 1, 10)
    assert chosen == mutations.choose(found, 1, 10) == mutations.choose(found, 1, 20)[:10]
    assert len({(m.start, m.old) for m in chosen}) == 10
    assert chosen != mutations.choose(found, 2, 10)


def test_a_mutated_function_differs_in_one_place() -> None:
    file = "kitsune_jax/ops/spec.py"
    text = (mutations.ROOT / file).read_text()
    for mutation in mutations.choose(mutations.places(file, text), 1, 20):
        end = mutation.start + len(mutation.old)
        mutated = mutation.applied_to(text)
        assert mutated == text[: mutation.start] + mutation.new + text[end:]
        before, after = ([ast.dump(node) for node in ast.parse(t).body] for t in (text, mutated))
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize(
    ("output", "test"),
    [
        (
            "FAILED at 1\n=== short test summary info ===\nFAILED tests/a.py::test_b[1 - 2] - assert 1\n1 failed",
            "tests/a.py::test_b[1 - 2]",
        ),
        ("=== short test summary info ===\nERROR tests/a.py - ImportError: b\n1 error", "tests/a.py"),
        ("ImportError while loading conftest", ""),
    ],
)
def test_the_test_that_caught_it_is_read_from_pytest(output: str, test: str) -> None:
    assert mutations.failed_test(output) == test


def test_rooms_have_tests() -> None:
    for path in {place.path for place in mutations.package_places("/(__init__|base|planner)")}:
        assert all((mutations.ROOT / folder).is_dir() for folder in mutations.room_tests(path)), path
    assert mutations.room_tests("kitsune_jax/capture/rewrites/loops.py") == ["tests/capture"]
    assert mutations.room_tests("kitsune_jax/targets/cuda/planning/cost.py") == ["tests/planning", "tests/cuda"]
    assert mutations.room_tests("kitsune_jax/cache.py") == ["tests/user"]


def test_only_tests_that_execute_the_statement_can_catch_a_mutation(tmp_path: Path) -> None:
    (tmp_path / "gw0.json").write_text(json.dumps({"tests/a.py": {"b.py": [12, 13]}, "tests/c.py": {"b.py": [12, 19]}}))
    (tmp_path / "gw1.json").write_text(json.dumps({"tests/d.py": {"b.py": [5, 12]}, "tests/e.py": {"other.py": [13, 19]}}))
    lines = mutations.ExecutedLines(tmp_path)

    def reaching(line: int) -> list[str]:
        return lines.reaching(mutations.Mutation("b.py", line, "holds", 0, "", ""), TEXT)

    assert reaching(13) == ["tests/a.py"]
    assert reaching(18) == reaching(20) == ["tests/c.py"]  # lines of the statement of 17 to 20
    assert reaching(16) == []
    assert reaching(5) == []  # it runs on import


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with a line that its tests watch, one that they do not, and a test that always fails."""
    files = {
        "kitsune_jax/__init__.py": "def is_small(n):\n    return n < 3\n\n\ndef unwatched(n):\n    return n + 7\n",
        "tests/user/test_all.py": "import kitsune_jax as k\n\n\ndef test_bad():\n    assert 0\n\n\n"
        "def test_small():\n    assert k.is_small(2)\n    assert not k.is_small(3)\n",
    }
    for name, text in files.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setattr(mutations, "ROOT", tmp_path / "source")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take most of the time of such small runs
    return tmp_path / "source"


def test_the_tree_is_untouched(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    out = tmp_path / "out.json"
    assert mutations.main(["--places", "9", "--out", str(out)]) == 0
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
    found = {(r["function"], r["outcome"], r["test"]) for r in json.loads(out.read_text())["results"]}
    assert found == {("is_small", "caught", "tests/user/test_all.py::test_small"), ("unwatched", "survived", "")}
    assert "3 mutations: 2 caught, 1 survived, 0 timed out" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, tested = tmp_path / "out.json", []

    def run(self: mutations.Bench, mutation: mutations.Mutation) -> mutations.Result:
        if len(tested) == 1:
            tested.append(mutation)
            raise KeyboardInterrupt
        tested.append(mutation)
        return mutations.Result(mutation, "survived", "", 1.0)

    monkeypatch.setattr(mutations.Bench, "run", run)
    assert mutations.main(["--places", "9", "--out", str(out)]) == 130
    assert len(json.loads(out.read_text())["results"]) == 1
    assert mutations.main(["--places", "9", "--resume", str(out)]) == 0
    assert len(json.loads(out.read_text())["results"]) == 3
    assert len(tested) == 4 and tested[1] == tested[2]
    with pytest.raises(SystemExit):
        mutations.main(["--seed", "2", "--resume", str(out)])


def test_a_mutation_that_never_ends_is_timed_out(tree: Path, tmp_path: Path) -> None:
    (tree / "tests" / "user" / "test_all.py").write_text("import time\n\n\ndef test_slow():\n    time.sleep(600)\n")
    out = tmp_path / "out.json"
    assert mutations.main(["--places", "1", "--limit", "2", "--out", str(out)]) == 0
    assert [r["outcome"] for r in json.loads(out.read_text())["results"]] == ["timed out"]
