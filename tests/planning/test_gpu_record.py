"""The planner's model of an H200 beside the record of one: modelled times are near the measured ones, or listed here as they are.

The aim is a ratio of modelled to measured time within 1.35 for 90 % of the functions and plans, and within 2 for all. ``OFF`` is
the plain list of what is farther away, with its ratio: an entry that gets worse fails, and one that gets as near as the others must
go.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu_model, store
from benchmarks.gpu_model import FAR, NEAR, Comparison

RECORD = store.load(gpu_model.RECORD)
CASES = {gpu_model.name_of(r): r for r in RECORD["cases"] if gpu_model.comparable(r) and r["app"] != "meshgraphnets"}
# Of functions and plans that are farther away than ``NEAR``: modelled over measured time.
OFF = {
    "attention, heads of 128, causal, 1 024 tokens, bfloat16": 0.67,
    "attention, heads of 128, causal, 4 096 tokens, bfloat16": 0.54,
    "attention, heads of 128, 4 096 tokens, bfloat16": 0.7,
    "attention, heads of 64, causal, 4 096 tokens, bfloat16": 0.74,
    "LSTM 64 wide, 128 steps, 256 sequences, float32": 0.54,
    "NeRF MLP 8 x 256, 262 144 rows, float32": 0.6,
    "training step: MeshGraphNets edge MLP 384-128-128, 200 000 rows, bfloat16": 0.54,
    "gradient of attention, heads of 128, causal, 4 096 tokens, bfloat16": 0.42,
    "attention, heads of 64, 4 096 tokens, bfloat16": 0.7,
    "NeRF MLP 8 x 256, 262 144 rows, bfloat16: sm90-vertical-streamed-cluster2-lanes3 cluster2 stages1 split1": 0.65,
    "NeRF MLP 8 x 256, 262 144 rows, bfloat16: sm90-spatial-l2-lanes2 cluster1 stages7 split1": 0.66,
    "NeRF MLP 8 x 256, 262 144 rows, bfloat16: sm90-spatial-l2-lanes3 cluster1 stages7 split1": 0.57,
    "NeRF MLP 8 x 256, 262 144 rows, bfloat16: sm90-spatial-l2-lanes2 cluster1 stages8 split1": 0.67,
    "NeRF MLP 8 x 256, 262 144 rows, bfloat16: sm90-spatial-l2-lanes3 cluster1 stages8 split1": 0.6,
    "DLRM of MLPerf, tables of up to 50 000 rows, 65 536 rows, bfloat16": 0.42,
    "DLRM of MLPerf, tables of up to 50 000 rows, 65 536 rows, float32": 0.33,
    "graph attention network, 8 heads of 8, 1 000 000 edges, float32": 0.12,
}
# Functions that the planner arranges otherwise now: no time of the record is theirs.
OTHERWISE = {"training step: NeRF MLP 8 x 256, 262 144 rows, bfloat16"}
# Plans that it makes no more.
GONE = {"sm90-spatial-l2-lanes3-split cluster1 stages2 split2"}
MARGIN = 1.03  # ratios are given with two digits
_SLOW = ("dlrm", "gat")  # their graphs take more than a few seconds; MeshGraphNets' 15 steps minutes: only the command has them


def _params() -> list[Any]:
    slow = {name for name, r in CASES.items() if r["app"] in _SLOW or r["mode"] == "train" or r["app"].endswith("gradient")}
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in CASES]


@pytest.mark.parametrize("name", _params())
def test_functions_take_about_as_long_as_modelled(name: str) -> None:
    found = gpu_model.compare(CASES[name])
    assert (found is None) == (name in OTHERWISE)
    if found is not None:
        _check(found)


@pytest.mark.parametrize("name", RECORD["plans"])
def test_plans_take_about_as_long_as_modelled(name: str) -> None:
    found = list(gpu_model.compare_plans(name, RECORD["plans"][name]))
    made = {comparison.name.removeprefix(f"{name}: ") for comparison in found}
    assert {plan["name"] for plan in RECORD["plans"][name]} - made <= GONE
    for comparison in found:
        _check(comparison)


def _check(found: Comparison) -> None:
    if found.name not in OFF:
        assert found.off <= NEAR, (
            f"modelled {found.modelled * 1e6:.0f} us, measured {found.measured * 1e6:.0f} us: {found.ratio:.2f}"
        )
        return
    known = OFF[found.name]
    assert found.off <= MARGIN * max(known, 1 / known), f"farther away than before: {found.ratio:.2f}, {known:.2f} before"
    assert found.off > NEAR / MARGIN, f"near now, at {found.ratio:.2f}: take it out of the list"


def test_the_list_names_what_is_in_the_record() -> None:
    plans = {f"{name}: {plan['name']}" for name, found in RECORD["plans"].items() for plan in found}
    assert OFF.keys() <= CASES.keys() | plans
    assert all(max(ratio, 1 / ratio) > NEAR / MARGIN for ratio in OFF.values())
    assert NEAR < FAR
