"""The benchmark of lowering: every network runs in every column, and what is stored is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import store
from benchmarks.lower import COLUMNS, NETWORKS, PHASES, main


@pytest.mark.parametrize("name", NETWORKS)
def test_both_columns_compute_the_same(name: str) -> None:
    rng = np.random.default_rng(0)

    def array(x: jax.ShapeDtypeStruct) -> jax.Array:
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        return jax.device_put(
            np.asarray(rng.integers(0, 99, x.shape) if whole else 0.1 * np.abs(rng.standard_normal(x.shape)), x.dtype)
        )

    args = jax.tree.map(array, NETWORKS[name].make(COLUMNS["jit"], 2)[1])
    ours, theirs = (jax.jit(NETWORKS[name].make(COLUMNS[c], 2)[0])(*args) for c in ("pipeline", "jit"))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * float(jnp.abs(b).max()))


def test_records_are_stored_and_kept_out_of_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--network", "forward", "--rounds", "1", "--results", str(tmp_path)]
    assert main([*arguments, "--layers", "1", "2"]) == 0 and main([*arguments, "--layers", "2"]) == 0
    (path,) = tmp_path.glob("lower-*.json")
    cases = json.loads(path.read_text())["cases"]
    assert [(c["network"], c["layers"]) for c in cases] == [("forward", 1), ("forward", 2)]
    for case in cases:
        totals = {column: sum(case["columns"][column][phase] for phase in PHASES) for column in COLUMNS}
        assert case["ratio"] == pytest.approx(totals["pipeline"] / totals["jit"]) and min(totals.values()) > 0
    assert store.newest(tmp_path) == [] and "times jax.jit" in capsys.readouterr().out
