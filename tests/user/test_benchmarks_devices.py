"""The benchmark of several devices: both columns compute the same, and what is stored is what was measured."""

from __future__ import annotations

import json
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks import devices, store
from kitsune_jax.sharding import calls


@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    """Made once: a hundred million numbers are drawn."""
    return devices.networks()


def of_both(networks: dict[str, Any], name: str) -> tuple[list[Any], Any, Any]:
    """A few rows or tokens of the network ``name``: its arguments, the result of the pipeline, and that of ``jax.jit``."""
    function, args, divided, _ = networks[name]
    few = [x[: 1 if name.startswith("layer") else 400] if k in divided else x for k, x in enumerate(args)]
    ours, plain = (np.asarray(jax.jit(f)(*few)) for f in (kj.pipeline(function), function))
    return few, ours, plain


@pytest.mark.parametrize("name", ["nerf", "edges", "layer", "gat"])
def test_both_columns_compute_the_same(name: str, networks: dict[str, Any]) -> None:
    _, ours, plain = of_both(networks, name)
    np.testing.assert_allclose(ours, plain, rtol=2e-3, atol=2e-3)


def test_both_columns_round_to_16_bits_alike(networks: dict[str, Any]) -> None:
    few, *found = of_both(networks, "layer-bfloat16")
    exact = np.asarray(jax.jit(networks["layer"][0])(*(x.astype(np.float32) for x in few)))
    ours, plain = (np.abs(x.astype(np.float32) - exact).mean() for x in found)
    assert {x.dtype for x in found} == {np.dtype(jax.numpy.bfloat16)}
    assert 0 < ours < 1.05 * plain < 0.05 * np.abs(exact).mean()


def test_records_are_stored_and_kept_out_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, networks: dict[str, Any]
) -> None:
    monkeypatch.setattr(devices, "networks", lambda: networks)
    record = devices.measure("gat", "inference", 2, 2, 1)
    assert record["compile_ratio"] == pytest.approx(record["compile_seconds"]["pipeline"] / record["compile_seconds"]["jit"])
    assert record["speedup"] == pytest.approx(record["median_seconds"]["jit"] / record["median_seconds"]["pipeline"])
    assert min(record["least_seconds"].values()) > 0 and record["temporary_bytes"]["jit"] > 0
    devices.save([record], tmp_path)
    path = devices.save([record], tmp_path)
    (case,) = json.loads(path.read_text())["cases"]
    assert (case["network"], case["mode"], case["devices"]) == ("gat", "inference", 2)
    assert store.newest(tmp_path) == []


def test_compilation_is_timed_with_cold_caches() -> None:
    """Each round traces the function again, and plans it again: as XLA's own operators, and as the program of a shard."""
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(np.ones((8, 4), np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    traced = {"jit": 0, "pipeline": 0}

    def function(column: str) -> Any:
        def f(x: Any) -> Any:
            traced[column] += 1
            return jax.nn.relu(x @ x.T) @ x

        return f

    columns = {"jit": jax.jit(function("jit")), "pipeline": jax.jit(kj.pipeline(function("pipeline"), force=True))}
    with (
        unittest.mock.patch.object(calls, "plan_graph", wraps=calls.plan_graph) as planned,
        unittest.mock.patch.object(jax, "clear_caches", wraps=jax.clear_caches) as cleared,
    ):
        seconds = devices.cold_seconds(columns, [x], 2)
    assert traced == {"jit": 2, "pipeline": 2}
    assert (planned.call_count, cleared.call_count) == (4, 4)
    assert min(seconds.values()) > 0


def test_one_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        devices.main(["--devices", "1"])
    assert "at least 2 devices" in capsys.readouterr().err
