"""The planner's model of a GPU beside what a run on that GPU measured: ``python -m benchmarks model``. No GPU is needed.

Comes in: the record of an H200 (``benchmarks/results/h200``), and how its kernels were arranged (``MEASURED``). Goes out: a
``Comparison`` of each kernel and of each plan that was measured: modelled and measured seconds, and the bound by the model. What is
modelled is the arrangement that ran, which need not be the planner's choice today. Nothing is computed or compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import store, table
from benchmarks.apps import APPS, DTYPES
from benchmarks.graphs.apps import GRAPH_APPS, case_of
from benchmarks.graphs.measure import train_step as graph_step
from benchmarks.sequences.apps import SEQUENCE_APPS
from benchmarks.training import initial_state, train_step
from kitsune_jax import _compat
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import GpuPlan
from kitsune_jax.planning.stages import finest
from kitsune_jax.planning.streams import Region
from kitsune_jax.targets import get
from kitsune_jax.targets.cuda import lower
from kitsune_jax.targets.cuda.planning.arrangements import GpuRegion, spatial_as
from kitsune_jax.targets.cuda.planning.cost import GpuCost, fed_by, panel_sums_of
from kitsune_jax.targets.cuda.planning.machines import gpu
from kitsune_jax.targets.cuda.planning.planner import candidates, plans_in_batches

RECORD = store.RESULTS / "h200" / "2026-11-26.json"
DEVICE = "h200"
NEAR, FAR = 1.35, 2.0  # times too short or too long: most kernels are to be within the first, all within the second
_TOKENS, _WIDTH = 16_384, 2_048  # of attention in the record: in all, and of all heads


@dataclasses.dataclass(frozen=True)
class Ran:
    """How a region of ``ops`` ops ran. ``way``: "resident" or "streamed" weights of a vertical plan, the place of a spatial one's
    rings ("l2", "cluster"), "loop" over a cluster, or the extent of a block. ``stages``: the ops of each. ``by``: rows of unsorted
    indices stream in their "order". ``times``: kernels of the case that are such."""

    ops: int
    way: str | int
    lanes: int
    cluster: int = 1
    stages: tuple[int, ...] = ()
    order: bool = False
    times: int = 1


def _mesh(*ran: Ran) -> tuple[Ran, ...]:
    return ran


# As the planner of the record's commit arranged its kernels, made again from its sources; grids and threads are those that ncu saw.
MEASURED: dict[tuple[str, str, str, int], tuple[Ran, ...]] = {
    ("attention_128_causal", "bf16", "infer", 1024): (Ran(31, 64, 3),),
    ("attention_128_causal", "bf16", "infer", 4096): (Ran(31, 64, 3),),
    ("attention_128_full", "bf16", "infer", 4096): (Ran(21, 64, 2),),
    ("attention_64_causal", "bf16", "infer", 4096): (Ran(31, 128, 2),),
    ("attention_64_full", "bf16", "infer", 4096): (Ran(21, 128, 2),),
    ("cartpole", "f32", "infer", 65536): (Ran(2, "resident", 3),),
    ("gat", "f32", "infer", 1_000_000): (
        Ran(8, "resident", 3),
        Ran(19, "resident", 3, order=True, times=2),
        Ran(24, "resident", 3),
    ),
    ("gru_256", "bf16", "infer", 256): (Ran(2, "loop", 1, 8),),
    ("lstm_256", "bf16", "infer", 256): (Ran(2, "loop", 1, 8),),
    ("lstm_64", "f32", "infer", 256): (Ran(2, "loop", 1, 2),),
    ("mgn", "bf16", "infer", 1_000_000): (Ran(30, "resident", 3),),
    ("mgn", "bf16", "infer", 200_000): (Ran(30, "resident", 3),),
    ("mgn", "f32", "infer", 200_000): (Ran(28, "streamed", 2, 2),),
    ("mgn", "bf16", "train", 200_000): (Ran(79, "l2", 2, stages=(5, 67, 5, 2)),),
    ("nerf", "bf16", "infer", 1_048_576): (Ran(36, "streamed", 2, 2),),
    ("nerf", "bf16", "infer", 262_144): (Ran(36, "streamed", 2, 2),),
    ("nerf", "f32", "infer", 262_144): (Ran(36, "streamed", 1, 2),),
}
