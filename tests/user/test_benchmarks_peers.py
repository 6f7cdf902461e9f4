"""Columns of PyTorch: a process of its own answers, and the tables show the fastest library.

The networks themselves need PyTorch, which the project's tests do not install: those tests are skipped without it. Every measured
record holds their errors against the same references as the other columns."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import table
from benchmarks.__main__ import main
from benchmarks.measure import Effort, measure, peer_errors
from benchmarks.peers import client
from benchmarks.timing import interleaved

QUESTION = client.Question("mgn", "infer", {"w": jnp.ones((3, 2), jnp.bfloat16)}, (np.arange(5),))

# A process that answers as ``benchmarks.peers.worker`` does, with known numbers.
ANSWERS = """#!{python}
import json, sys, numpy as np
folder = sys.argv[-1]
print(json.dumps({{"version": "0"}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "result" in order:
        np.savez(folder + "/result.npz", **{{"result": np.full(3, 7.0), "loss": np.float64(3), "grad.w": np.full((3, 2), 2.0)}})
        print(json.dumps({{"file": "result.npz"}}), flush=True)
    else:
        print(json.dumps({{"seconds": {{"torch": 1.0, "torch_compile": 2.0}}[order["run"]] * order["calls"]}}), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(ANSWERS.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_the_clock_of_a_column_is_that_of_its_process(python: str) -> None:
    with client.peers(python, QUESTION) as found:
        times = interleaved({"jit": lambda: jnp.zeros(2), **found}, rounds=3, seconds=60, calls=4)
        result = found["torch"].result()["result"]
    assert times["torch"] == [4.0] * 3 and times["torch_compile"] == [8.0] * 3
    assert max(times["jit"]) < 1.0
    assert result.tolist() == [7.0] * 3


def test_errors_are_those_of_the_worst_gradient_and_of_the_loss(python: str) -> None:
    with client.peers(python, QUESTION) as found:
        errors = peer_errors(found["torch"], 4.0, {"w": np.full((3, 2), 1.0)})
    assert errors == {"loss": 0.25, "mean": 1.0}


def test_the_process_gets_names_dtypes_and_bits(tmp_path: Path) -> None:
    params = [{"w": jnp.asarray([1.5, -2.0], jnp.bfloat16)}, {"w": np.float32([3.0])}]
    client._write(tmp_path, client.Question("gat", "train", params, (np.int32([1, 2]),), np.int32([0]), "label_error"))
    case = json.loads((tmp_path / "case.json").read_text())
    assert case == {
        "app": "gat",
        "mode": "train",
        "arrays": {"params.0.w": "bfloat16", "params.1.w": "float32", "inputs.0": "int32", "targets": "int32"},
        "inputs": 1,
        "loss": "label_error",
    }
    assert np.load(tmp_path / "params.0.w.npy").tolist() == [0x3FC0, 0xC000]
    assert np.load(tmp_path / "params.1.w.npy").tolist() == [3.0]


def test_a_process_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such module: torch')\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    with pytest.raises(RuntimeError, match="no such module: torch"), client.peers(str(path), QUESTION):
        pass


def test_an_interpreter_without_pytorch_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    args = ["run", "--app", "mgn", "--rows", "64", "--results", str(tmp_path / "results"), "--peers", str(path)]
    assert main(args) == 2
    assert f"{path} -m pip install torch" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_applications_without_a_network_and_runs_without_peers_start_no_process() -> None:
    for python, app in (("", "mgn"), ("/no/such/interpreter", "dlrm")):
        with client.peers(python, client.Question(app, "infer", {}, ())) as found:
            assert not found


def _record(app: str, dtype: str, mode: str, ratios: dict[str, float]) -> dict[str, Any]:
    speedup: Any = {name: {"median": ratio} for name, ratio in ratios.items()}
    return {
        "title": app,
        "rows": 8,
        "dtype": dtype,
        "mode": mode,
        "pytorch": "2.0",
        "speedup": speedup if mode == "infer" else {"whole": speedup, "network": {}},
    }


def test_the_readme_shows_the_ratio_to_the_fastest_library() -> None:
    """Applications that were not run in PyTorch are left out, and so are machines without such records."""
    machine = {"cpu": "Some(R) Processor", "cores": 2, "isa": ["avx512f"]}
    records = [
        _record("a", "f32", "infer", {"jit": 2.0, "torch": 1.25, "torch_compile": 1.5, "blocked": 0.5}),
        _record("a", "bf16", "train", {"jit": 0.75, "torch": 3.0, "torch_compile": 2.0}),
        _record("b", "f32", "infer", {"jit": 2.0}),
    ]
    assert table.peers_summary([(machine, records), ({**machine, "cores": 4}, records[2:])]).splitlines() == [
        "Some, 2 cores, AVX-512, PyTorch 2.0:",
        "",
        "| application | float32, inference | float32, training step | bfloat16, inference | bfloat16, training step |",
        "|---|---:|---:|---:|---:|",
        "| a, 8 rows | 1.25x PyTorch | - | - | 0.75x `jax.jit` |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_networks_compute_the_references(mode: str) -> None:
    """Needs PyTorch in this interpreter or in the one that ``TORCH_PYTHON`` names."""
    from benchmarks.graphs.apps import GRAPH_APPS
    from benchmarks.graphs.measure import measure_graph
    from benchmarks.sequences.apps import SEQUENCE_APPS

    python = os.environ.get("TORCH_PYTHON", sys.executable)
    try:
        client.version(python)
    except RuntimeError as no:
        pytest.skip(str(no))
    effort = Effort(rounds=3, seconds=0.1, peers=python)
    sizes = {"attention": 96, "attention_full": 96, "transformer_layer": 64, "gat": 2000}
    for app in client.NAMES:
        rows = sizes.get(app, 16 if "_" in app else 256)
        other = {**GRAPH_APPS, **SEQUENCE_APPS}.get(app)
        record = (
            measure_graph(other, mode, "f32", "cpu", rows, effort)
            if other
            else measure(app, mode, "f32", "cpu", rows, effort, child=False)
        )
        for column in client.COLUMNS:
            errors = record["columns"][column]
            assert (errors["max_rel_error"] if mode == "infer" else errors["errors"]["mean"]) < 1e-4, app
