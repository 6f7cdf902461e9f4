"""What the model knows of sums by index alone: who writes the result, where runs end, and what indices of many numbers cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.planning.cost import Access
from kitsune_jax.planning.plan import VECTOR_MARGIN
from kitsune_jax.regions import joining
from kitsune_jax.targets.cpu.planning.machines import CpuTimes, cpu_model
from kitsune_jax.targets.cpu.planning.planner import FOLD_MARGIN

PROFILE = cpu_model("amx-2").profile


@pytest.fixture(autouse=True)
def xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")


def planned(rows: int, width: int, segments: int, *, ordered: bool = True) -> dict[str, Any]:
    """The one region of a segment sum of float32, pipelined whatever the model says."""

    def total(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, ids, segments, indices_are_sorted=ordered)

    shapes = jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    (region,) = kj.explain(total, force=True)(*shapes).to_dict()["regions"]
    return region


def copied(size: int) -> float:
    """One core, in the level that holds so many bytes."""
    return size * PROFILE.seconds("copy/l2" if size <= PROFILE.l2 else "copy/l3")


@pytest.mark.parametrize(("width", "segments"), [(16, 10_000), (64, 10_000), (16, 100_000)])
def test_xla_writes_the_whole_result_first(width: int, segments: int) -> None:
    # 100 rows took 33, 185 and 440 us on a Xeon with AMX, 8 to 10 into ten; a core copies 640 kB in 29 us and 2.56 MB in 180.
    more = planned(100, width, segments)["baseline_seconds"] - planned(100, width, 10)["baseline_seconds"]
    assert 0.9 * copied(4 * width * segments) < more < 1.5 * copied(4 * width * segments)


@pytest.mark.parametrize(
    ("rows", "width", "segments"), [(100, 1, 100_000), (1000, 1, 10_000), (100, 16, 10_000), (1000, 64, 10_000)]
)
def test_so_do_the_workers_of_a_pipeline(rows: int, width: int, segments: int) -> None:
    # 100 rows of 16 numbers took 21 us into 10 000 segments, 6 into ten.
    more = planned(rows, width, segments)["seconds"] - planned(rows, width, 10)["seconds"]
    assert more > 0.5 * copied(4 * width * segments)


@pytest.mark.parametrize("width", [16, 256])
def test_a_row_that_is_folded_into_a_table_of_the_l2_takes_what_was_measured(width: int) -> None:
    access = Access(1, 4 * width, PROFILE.l2 // 4, folds=True, near=False)
    assert CpuTimes(PROFILE).access(access) == pytest.approx(PROFILE.seconds(f"folded/{width}"))


def test_runs_that_end_take_time() -> None:
    # 10 000 single numbers of 10 indices took 28 us, of 10 000 indices 48.
    more = planned(10_000, 1, 10_000)["seconds"] - planned(10_000, 1, 10)["seconds"]
    assert 5e-6 < more < 40e-6


def test_an_order_of_many_numbers_takes_longer() -> None:
    # Of as many rows: 170 us more for 10^5 numbers that may be an index than for 10, beyond what their segments take in order.
    def order(segments: int) -> float:
        return planned(10_000, 128, segments, ordered=False)["seconds"] - planned(10_000, 128, segments)["seconds"]

    assert order(100_000) > order(10_000) + 1e-4


@pytest.mark.parametrize("alone", [True, False])
def test_folds_alone_have_to_gain_less(alone: bool) -> None:
    def function(x: Any, i: Any) -> Any:
        return jax.ops.segment_sum(x if alone else jax.nn.softmax(x), i, 50, indices_are_sorted=True)

    graph = capture(
        jax.make_jaxpr(function)(jnp.zeros((4001, 64)), jnp.zeros(4001, jnp.int32)),
        context=RewriteContext(TargetCapabilities(sums_online=True)),
    ).graph
    (chosen,) = route(graph, "cpu", RouteOptions(force=True, device="amx-2", code=False)).regions
    assert chosen.plan.margin == (FOLD_MARGIN if alone else VECTOR_MARGIN)
    at = dataclasses.replace(chosen.plan, seconds=1.0, baseline_seconds=(FOLD_MARGIN + VECTOR_MARGIN) / 2)
    assert joining.pays(at) is alone
