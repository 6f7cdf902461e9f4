"""The model of many devices: its formulas take as long as the messages of the algorithms, sent one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scaling, table
from benchmarks.scaling import Link, Step
from kitsune_jax.planning.cost import all_reduce_seconds

LINK = Link(3e-6, 2e9)


class Cluster:
    """Devices with clocks and arrays. A message waits for both ends, and takes the time of the link."""

    def __init__(self, devices: int, n: int) -> None:
        self.arrays = [np.arange(n, dtype=float) * (k + 1) for k in range(devices)]
        self.sent, self.received = [0.0] * devices, [0.0] * devices

    def step(self, messages: list[tuple[int, int, slice]], put: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        """Messages that are under way at the same time: (from, to, elements)."""
        carried = [(a, b, where, self.arrays[a][where].copy()) for a, b, where in messages]
        ready = [max(self.sent[k], self.received[k]) for k in range(len(self.arrays))]
        for a, b, where, array in carried:
            self.sent[a] = self.received[b] = max(ready[a], ready[b]) + LINK.message(array.nbytes)
            self.arrays[b][where] = put(self.arrays[b][where], array)

    @property
    def seconds(self) -> float:
        return max(*self.sent, *self.received)


def by_ring(p: int, n: int) -> Cluster:
    cluster, size = Cluster(p, n), n // p
    for put, first in ((np.add, 0), (lambda _, new: new, 1)):
        for s in range(p - 1):
            parts = [(k + first - s) % p for k in range(p)]
            cluster.step([(k, (k + 1) % p, slice(c * size, (c + 1) * size)) for k, c in enumerate(parts)], put)
    return cluster


def by_tree(p: int, n: int) -> Cluster:
    cluster, spans = Cluster(p, n), [1 << s for s in range((p - 1).bit_length())]
    for span in spans:
        cluster.step([(k, k - span, slice(None)) for k in range(span, p, 2 * span)], np.add)
    for span in reversed(spans):
        cluster.step([(k - span, k, slice(None)) for k in range(span, p, 2 * span)], lambda _, new: new)
    return cluster


@pytest.mark.parametrize(("run", "formula"), [(by_ring, scaling.ring_all_reduce), (by_tree, scaling.tree_all_reduce)])
@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
def test_a_formula_takes_as_long_as_its_messages(
    run: Callable[[int, int], Cluster], formula: Callable[[float, int, Link], float], devices: int
) -> None:
    n = 240
    cluster = run(devices, n)
    for array in cluster.arrays:
        np.testing.assert_array_equal(array, np.arange(n) * sum(range(1, devices + 1)))
    assert formula(8 * n, devices, LINK) == pytest.approx(cluster.seconds)


def test_one_device_sends_nothing() -> None:
    step = Step("net", {"jit": 2.0, "pipeline": 1.0}, (1000, 200))
    assert all(way(step, 1, LINK) == 0 for way in scaling.WAYS.values())


def test_a_long_ring_is_bound_by_latency_and_large_gradients_by_bandwidth() -> None:
    assert scaling.tree_all_reduce(1000, 1024, LINK) < scaling.ring_all_reduce(1000, 1024, LINK)
    assert scaling.ring_all_reduce(1e9, 8, LINK) < scaling.tree_all_reduce(1e9, 8, LINK)
    step = Step("net", {"jit": 2.0, "pipeline": 1.0}, (1000, 200))
    fsdp, ring = (scaling.WAYS[way](step, 64, LINK) for way in ("FSDP, ring", "data parallel, ring"))
    assert fsdp == pytest.approx(1.5 * ring)


@pytest.mark.parametrize(("n", "devices"), [(1e3, 2), (1e3, 1000), (1e9, 8), (3e5, 17)])
def test_plans_use_the_faster_formula(n: float, devices: int) -> None:
    formulas = scaling.ring_all_reduce, scaling.tree_all_reduce
    fastest = min(formula(n, devices, LINK) for formula in formulas)
    assert all_reduce_seconds(n, devices, (LINK.latency, LINK.bandwidth)) == pytest.approx(fastest)


def test_the_table_says_that_it_is_a_model() -> None:
    text = scaling.markdown([Step("net", {"jit": 2e-3, "pipeline": 1e-3}, (4000,))], Link(0.0, 4e6 * 2 * 1023 / 1024))
    assert text.startswith("Modelled, not measured")
    assert "| net, 1 ms | 4.00 kB | data parallel, ring |" in text
    (row,) = (line for line in text.splitlines() if "data parallel, ring" in line)
    assert row.endswith("| 50 %, 1.50x |")  # the all-reduce over 1 024 devices takes as long as the step


def test_steps_are_those_of_the_newest_measurement(tmp_path: Path) -> None:
    for date, ms in (("2026-01-02", 4.0), ("2026-01-01", 9.0)):
        times = {"jit": ms, "pipeline": ms / 2}
        case = {"network": "edges", "mode": "training", "devices": 2, "median_seconds": times}
        cases = [case, {**case, "mode": "inference"}, {**case, "devices": 4}]
        (tmp_path / f"devices-x-{date}.json").write_text(json.dumps({"date": date, "cases": cases}))
    (step,) = scaling.steps(tmp_path)
    assert (step.name, step.seconds["jit"]) == ("edges", 4.0)
    assert step.gradients == (384 * 128 * 4, 128 * 128 * 4, 128 * 128 * 4)
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.devices"):
        scaling.steps(tmp_path / "none")


def test_the_document_has_the_table_of_what_is_stored() -> None:
    text = scaling.markdown(scaling.steps(), scaling.DEFAULT)
    begin, end = table.markers(scaling.MARKER)
    assert f"{begin}\n{text}\n{end}" in scaling.DOCUMENT.read_text()
