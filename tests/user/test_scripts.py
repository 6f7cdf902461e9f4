"""The set-up scripts: they find what is there and name what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOLS = ("bash", "mktemp", "head", "sed", "rm", "cat")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / script), *arguments]
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHON")}
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for PATH that holds no compiler and no Python."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / tool).symlink_to(found)
    return tmp_path


def test_finds_a_python_that_jax_supports() -> None:
    done = run("find_python.sh", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    version = subprocess.run(
        [done.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    assert version.stdout.strip() == str(sys.version_info[:2])


def test_says_what_a_python_lacks(bare: Path) -> None:
    python = bare / "python3.99"  # a version that no folder the script searches has
    python.write_text("#!/bin/sh\ncat >/dev/null\necho 'Python.h (Debian: apt install python3.99-dev)'\n")
    python.chmod(0o755)
    done = run("find_python.sh", "3.99", PATH=str(bare), HOME=str(bare))
    assert done.returncode == 1
    assert "python3.99 lacks Python.h (Debian: apt install python3.99-dev)" in done.stderr


def test_refuses_a_python_that_is_named_but_not_usable() -> None:
    done = run("find_python.sh", PYTHON="no-such-python")
    assert done.returncode == 1
    assert "PYTHON=no-such-python is not a usable Python" in done.stderr


def test_says_what_to_install_without_a_compiler(bare: Path) -> None:
    done = run("check_compiler.sh", PATH=str(bare))
    assert done.returncode == 1
    assert "apt install g++" in done.stderr


def test_a_named_compiler_is_used_or_refused() -> None:
    done = run("check_compiler.sh", CXX="no-such-compiler")
    assert done.returncode == 1
    assert "tried: no-such-compiler" in done.stderr
