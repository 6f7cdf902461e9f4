"""What is packed: a source distribution is the same bytes each time, with what its tests need; licences of what is compiled in.

And what is told about it: the description, the versions that are supported, the version of a release.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools

import kitsune_jax as kj
from kitsune_jax.frontend.explain import TESTED_JAX
from scripts.check_release import disagreements, tags, versions

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUPPORTED = re.findall(r"3\.\d+", re.findall(r'SUPPORTED="(.*)"', (ROOT / "scripts" / "find_python.sh").read_text())[0])


def sdist(folder: Path, **environment: str) -> Path:
    """A source distribution of this tree, whose metadata is written elsewhere: tests leave no trace in the tree."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder)]
    env = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"} | environment
    with (ROOT / "setup.py").open() as tree:
        # setuptools packs in the tree itself, so one at a time, whoever runs the tests.
        fcntl.flock(tree, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sdist(tmp_path_factory.mktemp("sdist"))


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def test_a_source_distribution_is_the_same_bytes_each_time(packed: Path, tmp_path: Path) -> None:
    assert sdist(tmp_path).read_bytes() == packed.read_bytes()


def test_the_date_of_a_source_distribution_is_that_of_the_environment(tmp_path: Path) -> None:
    with tarfile.open(sdist(tmp_path, SOURCE_DATE_EPOCH="1700000000")) as tar:
        assert {entry.mtime for entry in tar} == {1700000000}


def test_a_source_distribution_tells_nothing_of_who_made_it(packed: Path) -> None:
    with tarfile.open(packed) as tar:
        entries = tar.getmembers()
    assert {(e.uid, e.gid, e.uname, e.gname) for e in entries} == {(0, 0, "", "")}
    assert {e.mode for e in entries} == {0o644, 0o755}


def test_a_source_distribution_has_what_its_tests_need_and_nothing_that_is_built(packed: Path) -> None:
    found = names(packed)
    rooms = [
        "kitsune_jax",
        "tests",
        "cpu",
        "cuda",
        "benchmarks",
        "examples",
        "scripts",
        "docs",
        "trust",
        "kernel_checks",
        "licenses",
    ]
    sources = {".py", ".h", ".cc", ".cpp", ".cu", ".cuh", ".S", ".sh", ".mk", ".md", ".txt", ".json", ".typed"}
    want = {
        path.relative_to(ROOT).as_posix()
        for room in rooms
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix in sources and "__pycache__" not in path.parts
    }
    want |= {"setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md", "Makefile", ".ci/run"}
    want |= {"CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", ".github/workflows/ci.yml"}
    assert want <= found, sorted(want - found)[:20]
    assert not [name for name in found if re.search(r"\.(so|o|pyc)$|__pycache__|^build/", name)]


def test_every_requirement_of_a_build_is_pinned() -> None:
    for requirement in PYPROJECT["build-system"]["requires"]:
        assert re.match(r"[A-Za-z0-9_-]+==[0-9.]+(;|$)", requirement), requirement


def test_the_licences_of_what_is_compiled_in_are_packed(packed: Path) -> None:
    with tarfile.open(packed) as tar:
        (metadata,) = (e for e in tar if e.name.count("/") == 1 and e.name.endswith("/PKG-INFO"))
        file = tar.extractfile(metadata)
        assert file is not None
        text = file.read().decode()
    for name in ("LICENSE", "licenses/nanobind.txt", "licenses/robin-map.txt"):
        assert f"\nLicense-File: {name}\n" in text
    assert "\nLicense-Expression: Apache-2.0 AND BSD-3-Clause AND MIT\n" in text


def test_the_licences_are_those_of_the_version_that_is_compiled_in() -> None:
    """They are looked at again, and this line is changed, when nanobind is."""
    (pinned,) = (r for r in PYPROJECT["build-system"]["requires"] if r.startswith("nanobind"))
    assert pinned == "nanobind==3.1.0"
    assert "Wenzel Jakob" in (ROOT / "licenses" / "nanobind.txt").read_text()
    assert "Thibaut Goetghebuer-Planchon" in (ROOT / "licenses" / "robin-map.txt").read_text()
    try:
        installed = importlib.metadata.distribution("nanobind")
    except importlib.metadata.PackageNotFoundError:
        return  # it is there while the extension is built only
    for file in installed.files or ():
        if installed.version == "3.1.0" and file.name == "LICENSE":
            assert file.read_text() == (ROOT / "licenses" / "nanobind.txt").read_text()


def test_wheels_are_made_for_every_python_that_is_supported() -> None:
    built = PYPROJECT["tool"]["cibuildwheel"]["build"]
    assert sorted(built) == sorted(f"cp{version.replace('.', '')}-*" for version in SUPPORTED)


def test_classifiers_name_every_python_that_is_supported() -> None:
    told = [c.removeprefix("Programming Language :: Python :: ") for c in PYPROJECT["project"]["classifiers"]]
    assert sorted(c for c in told if c.startswith("3.")) == sorted(SUPPORTED)


def test_ci_runs_every_python_and_the_first_and_the_last_jax_that_are_supported() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pythons, jaxs = (re.findall(r'"(.*?)"', re.findall(rf"^ +{name}: (\[.*)$", workflow, re.M)[0]) for name in ("python", "jax"))
    assert sorted(pythons) == sorted(SUPPORTED)
    jaxs = [tuple(map(int, version.split("."))) for version in jaxs]
    assert (min(jaxs), max(jaxs)) == (min(TESTED_JAX), max(TESTED_JAX))


@pytest.mark.parametrize(
    ("readme", "told"),
    [
        ("See [the list](docs/list.md#a), [it](#b).", "See the list, it."),
        ("A\n\n![idea](docs/idea.svg)\n\nB", "A\n\n\n\nB"),
        ('<picture><source srcset="a.svg">\n<img src="b.svg"></picture>\nB <img src="c.png">C', "B C"),
        ("[paper](https://arxiv.org/abs/2502.18403)", "[paper](https://arxiv.org/abs/2502.18403)"),
        ("[`a.py`](examples/a.py) is `f[0](x)`", "`a.py` is `f[0](x)`"),
        ("```python\nf[0](x)\n![a](b)\n```", "```python\nf[0](x)\n![a](b)\n```"),
    ],
)
def test_a_description_has_no_link_into_the_repository(setup_py: dict[str, Any], readme: str, told: str) -> None:
    assert setup_py["description"](readme).startswith(told + "\n\nThe source distribution has")


def test_the_description_is_the_readme(packed: Path) -> None:
    with tarfile.open(packed) as tar:
        (metadata,) = (e for e in tar if e.name.count("/") == 1 and e.name.endswith("/PKG-INFO"))
        text = tar.extractfile(metadata).read().decode()  # type: ignore[union-attr]
    headers, _, description = text.partition("\n\n")
    assert "\nDescription-Content-Type: text/markdown\n" in headers
    headings = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("#")]
    assert headings and set(headings) <= set(description.splitlines())
    assert not re.search(r"\]\((?!https?://)|<img", re.sub(r"```.*?```|`[^`]*`", "", description, flags=re.DOTALL))


def test_every_place_names_the_same_version() -> None:
    assert not disagreements(ROOT, tags(ROOT))
    assert set(versions(ROOT).values()) == {kj.__version__}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("pyproject.toml", '\nversion = "', '\nversion = "9'),
        ("kitsune_jax/config.py", '\n__version__ = "', '\n__version__ = "9'),
        ("CITATION.cff", '\nversion: "', '\nversion: "9'),
        ("CITATION.cff", "\nversion: ", "\nno: "),
        ("CHANGELOG.md", f"\n## {kj.__version__}", f"\n## 9{kj.__version__}"),
    ],
)
def test_a_place_with_another_version_is_named(tmp_path: Path, file: str, old: str, new: str) -> None:
    for name in ("pyproject.toml", "kitsune_jax/config.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    assert not disagreements(tmp_path, [])
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    wrong = disagreements(tmp_path, [])
    if file == "pyproject.toml":
        assert len(wrong) == 3 and all(f"pyproject.toml 9{kj.__version__}" in line for line in wrong)
    else:
        (line,) = wrong
        assert line.startswith(("kitsune_jax.__version__" if file.endswith(".py") else file) + " says ")


def test_a_tag_names_the_version_and_leaves_nothing_unreleased(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "kitsune_jax/config.py", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(f"# Changelog\n\n## Unreleased\n\n## {kj.__version__}\n- All.\n")
    assert not disagreements(tmp_path, ["benchmarks", f"v{kj.__version__}"])
    (wrong,) = disagreements(tmp_path, ["v9.9.9"])
    assert wrong == f"the tag v9.9.9 says 9.9.9, pyproject.toml {kj.__version__}"
    changelog.write_text(changelog.read_text().replace("## Unreleased\n", "## Unreleased\n- More.\n"))
    assert not disagreements(tmp_path, [])
    (wrong,) = disagreements(tmp_path, [f"v{kj.__version__}"])
    assert "under Unreleased" in wrong


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``setup.py`` defines."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def isa_flags(setup_py: dict[str, Any]) -> Callable[[str, str], list[str]]:
    """``setup.py``'s function of a unit's file name and the platform that is built for."""
    return setup_py["isa_flags"]


def test_objects_without_python_are_kept_by_all_that_they_are_made_of(
    setup_py: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_object, tree = setup_py["kept_object"], tmp_path / "tree"
    header, unit = tree / "cpu" / "src" / "kernels" / "a.h", tree / "cpu" / "src" / "isa_a.cc"
    header.parent.mkdir(parents=True)
    header.write_text("1")
    unit.write_text("2")
    monkeypatch.setitem(kept_object.__globals__, "ROOT", tree)
    monkeypatch.delenv("KERNEL_OBJECTS", raising=False)
    assert kept_object(str(unit), []) is None
    monkeypatch.setenv("KERNEL_OBJECTS", str(tmp_path / "kept"))
    assert kept_object(str(unit.with_name("module.cc")), []) is None
    assert kept_object(str(tree / "cuda" / "src" / "launch.cc"), []) is None
    found = [kept_object(str(unit), ["-O3"])]
    assert found[0].parent == tmp_path / "kept" and kept_object(str(unit), ["-O3"]) == found[0]
    found.append(kept_object(str(unit), ["-O2"]))
    header.write_text("3")
    found.append(kept_object(str(unit), ["-O3"]))
    unit.write_text("4")
    found.append(kept_object(str(unit), ["-O3"]))
    assert len(set(found)) == 4


ARCHITECTURES = {
    "x86-64": ["linux-x86_64", "macosx-10.13-x86_64"],
    "AArch64": ["linux-aarch64", "macosx-11.0-arm64"],
    "none": ["linux-riscv64", "linux-i686"],
}


@pytest.mark.parametrize("unit", sorted((ROOT / "cpu" / "src").glob("isa_*.cc")), ids=lambda path: path.stem)
def test_a_unit_of_an_isa_gets_the_flags_that_it_asks_for(isa_flags: Callable[[str, str], list[str]], unit: Path) -> None:
    asked = re.search(r"^// Flags(?:, on (\S+) only)?: (.*(?:\n// -.*)*)$", unit.read_text(), re.MULTILINE)
    assert asked is not None
    wanted = [] if asked[1] is None else asked[2].replace("//", "").split()
    assert asked[1] is not None or asked[2] == "none beyond the common ones."
    for architecture, platforms in ARCHITECTURES.items():
        for platform in platforms:
            assert isa_flags(unit.name, platform) == (wanted if architecture == asked[1] else []), platform
    option = {"x86-64": "-Xarch_x86_64", "AArch64": "-Xarch_arm64"}.get(asked[1], "")
    assert isa_flags(unit.name, "macosx-10.13-universal2") == [word for flag in wanted for word in (option, flag)]


def test_other_units_get_no_flags_of_an_isa(isa_flags: Callable[[str, str], list[str]]) -> None:
    for platform in ("linux-x86_64", "linux-aarch64", "macosx-11.0-arm64", "macosx-10.13-universal2"):
        assert isa_flags("kernels.cc", platform) == []


@pytest.mark.parametrize(
    ("platform", "arch", "tag"),
    [("linux", "x86_64", "manylinux_x86_64"), ("linux", "aarch64", "manylinux_aarch64"), ("macos", "arm64", "macosx_arm64")],
)
def test_cibuildwheel_reads_its_configuration(platform: str, arch: str, tag: str) -> None:
    pytest.importorskip("cibuildwheel", reason="`make wheels` installs it")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform, "--archs", arch]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"cp{version}-{tag}" for version in (311, 312, 313, 314)]


def test_wheels_for_a_mac_are_for_its_arm_cpus() -> None:
    assert PYPROJECT["tool"]["cibuildwheel"]["macos"]["archs"] == ["arm64"]
