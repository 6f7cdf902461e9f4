"""The guard of generated code: equal code has equal hashes, another line another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kitsune_jax.targets.cpu import bytecode
from kitsune_jax.targets.cuda import print_kernel
from scripts import code_hashes

SAMPLE = r"cuda/loss/bfloat16|cpu/mlp 3 x 128 relu, 2003 rows, f32"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("hashes") / "before.json"
    assert code_hashes.main(["write", str(file), "--match", SAMPLE]) == 0
    return file


def test_a_sample_has_kernels_and_programs_of_every_cpu(before: Path) -> None:
    names = json.loads(before.read_text())
    assert all(len(h) == 64 for h in names.values())
    assert sum(name.startswith("cuda/loss/bfloat16/") for name in names) > 3
    assert {cpu for cpu in code_hashes.CPUS if any(f"/{cpu}/" in name for name in names)} == set(code_hashes.CPUS)


def test_unchanged_code_has_the_same_hashes(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_hashes.main(["compare", str(before), "--match", SAMPLE]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of ")


def test_another_source_is_named(before: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = print_kernel.source
    monkeypatch.setattr(print_kernel, "source", lambda *args: source(*args) + "\n")
    assert code_hashes.main(["compare", str(before), "--match", "cuda/loss/bfloat16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4 and all(line.startswith("changed: cuda/loss/bfloat16/") for line in lines[:-1])


def test_another_program_is_named(before: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bytecode, "ACTIVATIONS", ("relu", "none", *bytecode.ACTIVATIONS[2:]))
    assert code_hashes.main(["compare", str(before), "--match", "cpu/mlp 3 x 128 relu, 2003 rows, f32"]) == 1
    assert "changed: cpu/mlp 3 x 128 relu, 2003 rows, f32" in capsys.readouterr().out
