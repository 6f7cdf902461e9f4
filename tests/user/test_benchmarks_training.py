"""Mode ``train`` of the harness on tiny sizes: every column makes the same step, and the table is what is stored."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import store, table, training
from benchmarks.__main__ import main
from benchmarks.apps import APPS
from benchmarks.measure import Effort, measure, run_child
from benchmarks.training import (
    PIPELINED,
    TRAIN_STEPS,
    State,
    TrainCase,
    make_train_case,
    reference,
    step_errors,
    train_column_names,
)
from kitsune_jax import config
from tests.support import checks

TINY = Effort(rounds=3, seconds=5.0)
ROWS = 37
COLUMNS = train_column_names("cpu")


@functools.cache
def small(app: str, dtype: str) -> tuple[TrainCase, tuple[State, float]]:
    train = make_train_case(app, dtype, ROWS)
    return train, reference(train)


def compiled(train: TrainCase, column: str) -> Any:
    """Pipelined whatever the cost model says: it would leave so few rows to XLA."""
    with config.override(force=True):
        return TRAIN_STEPS[column](train.case.app.function).lower(train.state, train.case.x, train.y).compile()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("app", list(APPS))
@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_makes_the_step_of_the_reference(app: str, column: str) -> None:
    train, want = small(app, "f32")
    step = compiled(train, column)
    assert (checks.count(step.as_text()) > 0) == (column in PIPELINED)
    errors = step_errors(step(train.state, train.case.x, train.y), want)
    assert set(errors) == {"loss", "params", "mean", "square"}
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("app", list(APPS))
def test_a_bfloat16_step_stays_near_the_reference(app: str) -> None:
    train, want = small(app, "bf16")
    state, loss = compiled(train, "whole")(train.state, train.case.x, train.y)
    assert {a.dtype for a in state.params.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {a.dtype for a in (*state.mean.values(), *state.square.values(), loss)} == {jnp.dtype(jnp.float32)}
    # bf16 has 8 bits: an error as small as float32's would mean that it was not used.
    assert 1e-4 < step_errors((state, loss), want)["mean"] < 0.2


def test_recomputing_makes_the_same_step() -> None:
    train, want = small("nerf", "f32")
    got = compiled(train, "recompute")(train.state, train.case.x, train.y)
    assert max(step_errors(got, want).values()) < 1e-5


def test_the_step_error_sees_a_wrong_part() -> None:
    train, want = small("swiglu", "f32")
    state, loss = want
    assert max(step_errors(want, want).values()) == 0
    gradient = {**state.mean, "up": state.mean["up"].copy()}
    gradient["up"][3, 5] += 10 * np.abs(gradient["up"]).max()
    assert step_errors((state._replace(mean=gradient), loss), want)["mean"] > 1e-3
    assert step_errors((state, 1.01 * loss), want)["loss"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="steps were counted"):
        step_errors((state._replace(steps=state.steps + 1), loss), want)


@pytest.mark.parametrize("rows", [1, pytest.param(8192, marks=pytest.mark.slow), 8198])
def test_microbatches_make_the_step_of_the_whole_batch_and_really_loop(rows: int) -> None:
    def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["w"]) * params["gain"]

    params = dict(zip(("w", "gain"), checks.arrays(rows, (3, 2), (2,)), strict=True))
    zeros, ones = ({k: np.full(p.shape, value, np.float32) for k, p in params.items()} for value in (0, 1))
    state = State(params, zeros, ones, np.int32(0))
    x, y = checks.arrays(rows + 1, (rows, 3), (rows, 2))
    step = training.microbatched_step(network)
    checks.close(jax.jit(step)(state, x, y), jax.jit(training.train_step(network))(state, x, y), 1e-5)
    (scan,) = [e for e in jax.make_jaxpr(step)(state, x, y).eqns if e.primitive.name == "scan"]
    assert scan.params["length"] == max(1, rows // 4096)


def test_run_store_and_table_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    run = ["run", "--app", "mgn", "--mode", "train", "--dtype", "f32", "--rows", "256", "--rounds", "3", "--seconds", "1"]
    assert main([*run, "--no-child", "--results", str(results)]) == 0
    assert "whole" in capsys.readouterr().out
    (path,) = results.glob("*.json")
    (record,) = json.loads(path.read_text())["cases"]
    assert record["mode"] == "train"
    assert set(record["columns"]) == set(COLUMNS)
    for pipelined in PIPELINED:
        assert set(record["speedup"][pipelined]) == set(COLUMNS) - {pipelined}
        assert 0 <= record["explain"][pipelined]["coverage"] <= 1
    assert set(record["memory"]) == set(TRAIN_STEPS)
    assert record["memory"]["jit"]["temp_bytes"] > 4 * 256 * 128  # at least one activation is kept for the backward pass

    parts = {name: table.markers(name) for name in (*table.PARTS, table.DEVICES, table.PLANS, table.SUMMARY, table.PEERS, "grid")}
    readme.write_text("\n".join(f"{begin}\nold\n{end}" for begin, end in parts.values()))
    assert main(["table", "--results", str(results), "--readme", str(readme), "--tables", str(readme)]) == 0
    text = readme.read_text()
    assert "old" not in text
    inference, trained = text.split(parts["training"][0])
    trained, rest = trained.split(parts["training"][1])
    assert f"float32 | {record['speedup']['whole']['jit']['median']:.2f}x |" in rest
    assert "No measurement is stored yet" in inference
    assert f"{1e3 * record['columns']['whole']['median']:.1f} ms" in trained
    assert "memory: " not in trained  # it asks for processes of its own
    assert f"{record['explain']['whole']['ops_pipelined']} of {record['explain']['whole']['ops_total']}" in trained


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_memory_of_a_step_is_measured_in_a_process_of_its_own() -> None:
    found = run_child("mgn", "f32", 4096, TINY, "--mode", "train", "--column", "jit")
    residuals = 2 * 4 * 4096 * 128  # at least two activations are kept for the backward pass
    assert residuals < found["peak_bytes"] < 100 * residuals


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_memory_that_a_call_gives_back_is_counted() -> None:
    # A process of its own, as run_child has: elsewhere another thread may free as much memory at the same time.
    code = "import numpy as np\nfrom benchmarks.memory import rise\nprint(rise(lambda: np.ones(1 << 24).sum()))"
    found = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout)
    assert (8 << 24) - (1 << 20) <= found <= (8 << 24) + (32 << 20)


def test_modes_of_a_case_are_stored_beside_each_other_and_drawn_apart(tmp_path: Path) -> None:
    inference = measure("nerf", "infer", "f32", "cpu", 8, TINY, child=False)
    for record in (inference, _record()):
        store.save(record, tmp_path)
    ((_, stored),) = store.newest(tmp_path)
    assert [r["mode"] for r in stored] == list(store.MODE_NAMES)
    assert "of 27 |" in table.markdown(store.newest(tmp_path))
    assert "9 of 10" not in table.markdown(store.newest(tmp_path))
    assert "9 of 10" in table.markdown(store.newest(tmp_path), "train")


def test_rows_of_the_training_table_have_as_many_cells_as_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"cpu": "Some CPU", "cores": 2, "isa": ["avx2"]}
    for name, described, platform in (("cpu", machine, "cpu"), ("gpu", {**machine, "gpu": {"name": "NVIDIA H200"}}, "cuda")):
        monkeypatch.setattr(store, "describe_machine", lambda described=described: described)
        record = {**_record(), "platform": platform}
        if platform == "cuda":
            del record["columns"]["microbatched"], record["speedup"]["whole"]["microbatched"], record["memory"]["microbatched"]
        store.save(record, tmp_path / name)
        head, _, row = table.markdown(store.newest(tmp_path / name), "train").splitlines()[-3:]
        assert head.count(" | ") == row.count(" | ")
        assert ("microbatched" in head) == (platform == "cpu")
        assert {"cpu": "4.00 GB / 1.00 GB / 52.0 MB / 48.0 MB", "cuda": "2.00 GB / 500 MB / 26.0 MB / 24.0 MB"}[platform] in row
        assert "**2.00x** (1.90 to 2.10)" in row


def _record() -> dict[str, Any]:
    columns = {c: {"median": 1.0, "errors": {"mean": 1e-6}} for c in COLUMNS}
    memory = {"jit": 4 * 10**9, "microbatched": 10**8, "network": 10**9, "recompute": 52 * 10**6, "whole": 48 * 10**6}
    ratio = {"median": 2.0, "q1": 1.9, "q3": 2.1}
    counts = {"ops_total": 10, "ops_pipelined": 9, "traffic_bulk_sync": 10**9, "traffic_pipeline": 10**7}
    return {
        "app": "nerf",
        "title": "NeRF",
        "mode": "train",
        "dtype": "f32",
        "platform": "cpu",
        "rows": 8,
        "columns": columns,
        "speedup": {"whole": {"jit": ratio, "microbatched": ratio}, "network": {"jit": ratio}},
        "memory": {c: {"temp_bytes": b // 2, "peak_bytes": b} for c, b in memory.items()},
        "explain": {"whole": counts, "network": counts},
    }
