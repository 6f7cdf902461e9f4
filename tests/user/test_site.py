"""The site: it builds without a network, its links hold, and its page of benchmarks is up to date.

Every public name is on the page of the API, with an example in its docstring; the examples run here.
"""

from __future__ import annotations

import copy
import doctest
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import kitsune_jax as kj
from benchmarks import chart, page, store, table

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "mkdocs.yml"

documented = pytest.mark.skipif(not CONFIGURATION.exists(), reason="the documentation is not part of a source distribution's tests")


# --- the examples of the API ------------------------------------------------------------------------------------------------------


def public() -> dict[str, Any]:
    """Public objects by name; of a public module its functions."""
    found = {}
    for name in kj.__all__:
        value = getattr(kj, name)
        found |= {f"{name}.override": value.override} if inspect.ismodule(value) else {name: value}
    return found


@pytest.mark.parametrize("name", public())
def test_the_example_of_a_public_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value = public()[name]
    tests = [t for t in doctest.DocTestFinder(recurse=False).find(value, name, globs={}) if t.examples]
    assert tests, f"the docstring of {name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        assert runner.run(test).failed == 0


@pytest.mark.parametrize("name", ["benchmarks.page", "scripts.docs_hooks"])
def test_the_examples_of_what_makes_the_site_run(name: str) -> None:
    if name == "scripts.docs_hooks":
        pytest.importorskip("mkdocs"), pytest.importorskip("griffe")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0 and found.failed == 0


# --- the site ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. ``--strict``: a link that leads nowhere, or a page outside of the navigation, is an error."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # Not ``--quiet``: what it does not print it does not count.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIGURATION), "-d", str(folder)]
    built = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    return folder


@documented
def test_a_reader_needs_no_network(site: Path) -> None:
    """No page loads a script, a style, a font or a picture from elsewhere."""
    loaded = re.compile(r"""(?:<(?:script|img|iframe|source)\b[^>]*\bsrc|<link\b[^>]*\bhref)=["'](?:https?:)?//[^"']+""")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert {str(p.relative_to(site)): found for p in pages if (found := loaded.findall(p.read_text()))} == {}
    assert not [p for p in site.rglob("*.css") if re.search(r"(url\(|@import )[\"']?(https?:)?//", p.read_text())]


@documented
def test_the_page_of_the_api_has_every_public_name(site: Path) -> None:
    text = (site / "api.html").read_text()
    assert [name for name in public() if f'id="kitsune_jax.{name}"' not in text] == []


@documented
def test_notebooks_and_examples_are_pages(site: Path) -> None:
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / f"{notebook.stem}.html").exists()
    for example in (ROOT / "examples").glob("[!_]*.py"):
        assert (site / "examples" / f"{example.stem}.html").exists()


@documented
def test_a_link_to_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\nSee [a file](../cuda/none.cc).\n")
    hooks = ROOT / "scripts" / "docs_hooks.py"
    (tmp_path / "mkdocs.yml").write_text(f"site_name: a site\nhooks: [{hooks}]\nvalidation: {{nav: {{omitted_files: ignore}}}}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "out")]
    built = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert built.returncode != 0
    assert "index.md links to ../cuda/none.cc, and there is no such file" in built.stderr


# --- links in the repository ------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of a page, as the repository makes them of its headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h).lower()).replace(" ", "-") for h in headings}


def broken(path: Path) -> list[str]:
    """The links of a page to files that are not there, or to headings that their pages do not have."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not re.match(r"[a-z]+:", link) and (not target.exists() or (anchor and anchor not in anchors(target))):
            found.append(link)
    return found


@documented
@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "tests" / "README.md", *(ROOT / "docs").rglob("*.md")]
)
def test_links_work_in_the_repository_too(path: Path) -> None:
    assert broken(path) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# A `page`: it\n\n[a](page.md#a-page-it) [b](#no-heading) [c](none.md) [d](https://example.org/x) `x[0](y)`\n")
    assert broken(path) == ["#no-heading", "none.md"]


# --- the tour ---------------------------------------------------------------------------------------------------------------------


@documented
def test_the_pieces_of_the_tour_run_in_one_session(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = re.findall(r"<!-- tour: (\w+) -->\n```python\n(.*?)```", (ROOT / "docs" / "start" / "tour.md").read_text(), re.DOTALL)
    assert [name for name, _ in pieces] == ["pipeline", "explain", "check", "time", "train", "off"]
    names: dict[str, Any] = {}
    for name, code in pieces:
        exec(compile(code, f"docs/start/tour.md: {name}", "exec"), names)
    assert names["report"].ops_pipelined > 0
    assert re.search(r"jax.jit [\d.]+ ms, pipelined [\d.]+ ms", capsys.readouterr().out)


@documented
def test_the_program_of_the_page_on_timelines_writes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guides" / "timeline.md").read_text()
    (program,) = re.findall(r"<!-- timeline -->\n```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program, "docs/guides/timeline.md", "exec"), names)
    assert (tmp_path / "trace.json").stat().st_size > 0
    table = text[text.index("| event |") :].split("\n\n")[0]
    assert {event.kind for event in names["found"].events} <= set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE))
    assert any(event.kind == "tile" for event in names["found"].events)


@documented
def test_the_program_of_the_page_on_timelines_records_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guides" / "timeline.md").read_text()
    (program,) = re.findall(r"<!-- kernel timeline -->\n```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"jax": jax, "jnp": jax.numpy, "kj": kj}
    exec(compile(program, "docs/guides/timeline.md", "exec"), names)
    assert {event.number for event in names["found"].kernels if event.kind == "tile"} == set(range(5))
    assert "works on tiles in " in str(names["found"])


# --- the page of benchmarks -------------------------------------------------------------------------------------------------------


def parts() -> Iterator[tuple[Path, str, str]]:
    for path, made in page.documents().items():
        yield from ((path, name, text) for name, text in made.items())


@documented
@pytest.mark.parametrize(("path", "name", "text"), [pytest.param(*p, id=f"{p[0].stem}-{p[1]}") for p in parts()])
def test_the_benchmarks_are_those_of_the_records(path: Path, name: str, text: str) -> None:
    begin, end = table.markers(name)
    shown = path.read_text()
    assert shown[shown.index(begin) + len(begin) : shown.index(end)].strip() == text.strip(), "run `python -m benchmarks page`"


@documented
def test_the_picture_of_the_benchmarks_is_that_of_the_records() -> None:
    assert page.PICTURE.read_text() == chart.svg(chart.bars(page.ranges(store.newest()))), "run `python -m benchmarks page`"


def test_a_loss_is_left_of_the_line_and_said_in_words() -> None:
    record = {"app": "gat", "mode": "infer", "speedup": {"jit": {"median": 0.5}}}
    picture = chart.svg(chart.bars(page.ranges([({"gpu": {"name": "NVIDIA H200"}}, [record])])))
    (line,) = re.findall(r'class="one" d="M([\d.]+) ', picture)
    x, width = map(float, re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="9"', picture)[0])
    assert x + width < float(line)
    assert '<desc id="d">graph networks: GPU, inference 0.50x</desc>' in picture


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with the newest record of a CPU, from which a test makes later ones."""
    path = sorted(store.RESULTS.glob("amd-epyc-2c-*.json"))[-1]
    (tmp_path / path.name).write_text(path.read_text())
    return tmp_path


def later(results: Path, factor: float) -> tuple[str, str]:
    """Plants a record of a later day, of a case that is ``factor`` times as fast. Its name, and its speed as the page has it."""
    content = json.loads(next(results.glob("*.json")).read_text())
    record = copy.deepcopy(content["cases"][0])
    record["speedup"]["jit"] = {k: factor * v if k != "n" else v for k, v in record["speedup"]["jit"].items()}
    content |= {"date": "2099-01-01", "cases": [record]}
    (results / "planted.json").write_text(json.dumps(content))
    return table.what(record), f"{record['speedup']['jit']['median']:.2f}x"


def test_a_slower_record_is_marked(results: Path) -> None:
    assert page.regressions(results) == "None."
    name, speed = later(results, 0.5)
    (line,) = page.regressions(results).splitlines()
    assert name in line and f"{speed} on 2099-01-01" in line
    (row,) = [row for row in page.history(results).splitlines() if page.MARK in row]
    assert name in row and f"**{speed}, {page.MARK}**" in row


@pytest.mark.parametrize("factor", [0.95, 1.0, 1.5])
def test_a_record_that_is_about_as_fast_is_not_marked(results: Path, factor: float) -> None:
    later(results, factor)
    assert page.regressions(results) == "None."
    assert page.MARK not in page.history(results)


def test_a_slower_ordinary_function_is_listed(tmp_path: Path) -> None:
    path = sorted(store.RESULTS.glob("grid-amd-epyc-2c-*.json"))[-1]
    content = json.loads(path.read_text())
    (tmp_path / path.name).write_text(json.dumps(content))
    assert page.slower_functions(tmp_path) == "None."
    case = max(content["cases"], key=lambda r: r["speedup"]["choice"]["median"])
    case["speedup"]["choice"] = {k: 0.5 * v for k, v in case["speedup"]["choice"].items()}
    (tmp_path / "grid-later.json").write_text(json.dumps({**content, "date": "2099-01-01"}))
    listed = page.slower_functions(tmp_path)
    assert case["label"] in listed and f"1 of {len(content['cases'])} functions" in listed


def test_every_application_has_a_kind() -> None:
    for name in (*store.APP_NAMES, *store.ATTENTION_NAMES):
        assert page.kind_of(name) in page.KINDS
