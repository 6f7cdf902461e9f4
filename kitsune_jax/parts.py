"""The choice between a function as it was captured and the same with long reductions of few rows in parts.

Comes in: a ``Captured`` and a target, and what was planned of a graph. Goes out: the ``Captured`` in parts, where there is such a
thing: a few parts of its own for each worker (``capture.split_reductions``), or each element a row of a stream
(``capture.elements_as_rows``); and the modelled seconds of a whole graph, by which plans of two graphs that compute the same are
compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from kitsune_jax import targets
from kitsune_jax.capture.captured import Captured
from kitsune_jax.capture.elements_as_rows import elements_as_rows
from kitsune_jax.capture.rewrites import OF_ROWS, rewritten
from kitsune_jax.capture.split_reductions import split_reductions
from kitsune_jax.graph import Graph, Op
from kitsune_jax.route import Routed

Nodes = TypeVar("Nodes")


def whole_or_in_parts(
    captured: Captured, settled: Callable[[Captured], tuple[Routed, Nodes]], target: str, device: str | None, body: bool
) -> tuple[Captured, Routed, Nodes]:
    """``captured``, or the same in parts where the model finds that faster, with what ``settled`` says of it. ``body``: it is the
    step of a loop."""
    planned, nodes = settled(captured)
    split = in_parts(captured, target, device)
    if split is captured:
        return captured, planned, nodes
    in_one = modelled_seconds(captured.graph, planned, target, device, body)
    split_planned, split_nodes = settled(split)
    if modelled_seconds(split.graph, split_planned, target, device, body) < in_one:
        return split, split_planned, split_nodes
    return captured, planned, nodes


def in_parts(captured: Captured, target: str, device: str | None) -> Captured:
    """``captured`` with its long reductions of few rows in parts; itself where there are none, or no workers for parts."""
    executor = targets.get(target)
    if executor.streams_elements:
        found = rewritten(captured, (("making rows of the elements of long reductions", elements_as_rows),))
        return found if found is captured else rewritten(found, OF_ROWS)
    if not executor.splits_reductions:
        return captured
    split = functools.partial(split_reductions, workers=executor.machine(device).workers)
    return rewritten(captured, (("taking long reductions of few rows in parts", split),))


def modelled_seconds(graph: Graph, planned: Routed, target: str, device: str | None, body: bool) -> float:
    """What the model says ``graph`` takes: the calls of ``planned``, and what XLA does with all other ops that it knows."""
    executor = targets.get(target)
    calls = sum(phase.plan.seconds for region in planned.regions for phase in region.phases)
    inside = {i for region in planned.regions for i in region.region.ops}
    left = [i for i, op in enumerate(graph.ops) if i not in inside and op.kind != "opaque" and not _moves_nothing(graph, op)]
    return calls + executor.unpipelined_seconds(graph, left, executor.as_found_by(graph, executor.machine(device), body))


def _moves_nothing(graph: Graph, op: Op) -> bool:
    """XLA has no kernel for a change of the shape alone."""
    if op.kind != "transpose":
        return op.kind == "reshape"
    shape = graph.values[op.inputs[0]].shape
    real = [d for d in op["permutation"] if shape[d] != 1]
    return real == sorted(real)
