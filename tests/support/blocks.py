"""Attention as the planner likes it, and with its keys in blocks wherever they can be: on a small cache, or with more of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.planning.plan import Plan
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cpu.planning import planner
from kitsune_jax.targets.cpu.planning.planner import plans_in_blocks
from tests.support.graphs import graph_of

WAYS = ("planned", "in blocks")


@contextlib.contextmanager
def planned_as(way: str, block: int | None = None) -> Iterator[str]:
    """``block``: the extent of a block where it is not the smallest that there is a plan for."""

    def always(*args: Any) -> list[Plan]:
        plans = [plan for plan in plans_in_blocks(*args) if block is None or (plan.blocks is not None and plan.blocks[2] == block)]
        return [dataclasses.replace(plan, seconds=0.0) for plan in plans]

    with pytest.MonkeyPatch.context() as patch:
        if way == "in blocks":
            patch.setattr(planner, "plans_in_blocks", always)
        lowering._routed.cache_clear()
        yield way
    lowering._routed.cache_clear()


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def planned(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of a module that imports this runs in each of the ``WAYS``."""
    with planned_as(request.param) as way:
        yield way


def draw(seed: int, *shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jax.device_put(np.asarray(rng.standard_normal(s), dtype)) for s in shapes]


def programs(function: Callable[..., Any], *args: Any) -> list[TileProgram]:
    """Of the regions that the planner makes for two cores with AVX-512."""
    graph = graph_of(function, *args)
    return [build(graph, r.region, r.plan) for r in route(graph, "cpu", RouteOptions(force=True, device="avx512-2")).regions]
