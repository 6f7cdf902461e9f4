"""The benchmark of several devices: both columns compute the same, and what is stored is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks import devices, store


@pytest.mark.parametrize("name", ["nerf", "edges", "layer", "gat"])
def test_both_columns_compute_the_same(name: str) -> None:
    function, args, divided, _ = devices.networks()[name]
    few = [x[: 1 if name == "layer" else 400] if k in divided else x for k, x in enumerate(args)]
    ours, plain = (np.asarray(jax.jit(f)(*few)) for f in (kj.pipeline(function), function))
    np.testing.assert_allclose(ours, plain, rtol=2e-3, atol=2e-3)


def test_records_are_stored_and_kept_out_of_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = devices.measure("gat", "inference", 2, 2)
    assert record["speedup"] == pytest.approx(record["median_seconds"]["jit"] / record["median_seconds"]["pipeline"])
    assert min(record["least_seconds"].values()) > 0 and record["temporary_bytes"]["jit"] > 0
    devices.save([record], tmp_path)
    path = devices.save([record], tmp_path)
    (case,) = json.loads(path.read_text())["cases"]
    assert (case["network"], case["mode"], case["devices"]) == ("gat", "inference", 2)
    assert store.newest(tmp_path) == []


def test_one_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        devices.main(["--devices", "1"])
    assert "at least 2 devices" in capsys.readouterr().err
