"""Attention as the planner likes it, and with its keys in blocks wherever they can be: on a small cache, or with more of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from kitsune_jax.frontend import lowering
from kitsune_jax.planning.plan import Plan
from kitsune_jax.targets.cpu.planning import planner
from kitsune_jax.targets.cpu.planning.planner import plans_in_blocks

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
