"""From planned regions to a ``Report``.

Comes in: a Graph, planned regions, and the rejected ops with their reasons. Goes out: a ``Report``. Invariants: every op of a
region or of ``rejected`` is counted exactly once, and byte counts come from the plans. An op left to XLA adds its distinct operands
and its results to both traffic sums, so the difference of the sums is what the regions save.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from kitsune_jax.ops.graph import Graph, Value
from kitsune_jax.ops.loops import parts
from kitsune_jax.ops.reduce import EXACT_FOLDS
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Machine, Phase, Plan, Queue
from kitsune_jax.planning.streams import Region, row_shape
from kitsune_jax.report.data import (
    LoopReport,
    PhaseReport,
    QueueReport,
    RegionReport,
    Rejected,
    StageReport,
    StreamReport,
)
from kitsune_jax.report.render import Report

# Views move no bytes of their own, so they are not counted as operators, in or outside of a region.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota"})
# Operators whose bodies have reports of their own.
HOLD_BODIES = frozenset({"scan", "while", "cond"})
# Conversions between keys and the arrays that hold them.
_KEYS = frozenset({"random_unwrap", "random_wrap"})


class Planned(Protocol):
    """The part of a planned region that ``build_report`` reads. ``region`` is the whole call."""

    @property
    def name(self) -> str: ...
    @property
    def region(self) -> Region: ...
    @property
    def phases(self) -> Sequence[Phase]: ...


def build_report(
    graph: Graph,
    planned: Iterable[Planned],
    rejected: Sequence[tuple[int, str]],
    machine: Machine,
    notes: Sequence[str] = (),
    xla_seconds: Mapping[int, float] | None = None,
) -> Report:
    """The report of ``graph``: ``rejected`` pairs an op's index with the reason it was left to XLA. ``xla_seconds``: the modelled
    time of ops in XLA's code."""
    planned = tuple(planned)
    pipelined = len(_operators(graph, sorted({i for p in planned for i in p.region.ops})))
    rejected = [(i, reason) for i, reason in rejected if not _is_view(graph, i)]
    outside = sum(op_bytes(graph, i) for i, _ in rejected)
    return Report(
        ops_total=pipelined + len(rejected),
        ops_pipelined=pipelined,
        regions=tuple(_region(graph, p, machine) for p in planned),
        rejected=_grouped(graph, rejected, xla_seconds),
        traffic_bulk_sync=outside + sum(plan.baseline_bytes for p in planned for plan in _plans(p)),
        traffic_pipeline=outside + sum(plan.bytes_moved for p in planned for plan in _plans(p)),
        platform=machine.platform,
        machine=machine.name,
        bandwidth=machine.dram_bandwidth,
        gain_band=machine.gain_band,
        unknown=_unknown(graph, rejected),
        notes=tuple(dict.fromkeys((*notes, *_varying(graph, planned)))),
        # Reports of loop bodies are added later and count their own flops.
        flops=graph_flops(graph) - sum(op_flops(graph, i) for i, _ in rejected if graph.ops[i].body is not None),
    )


def _region(graph: Graph, planned: Planned, machine: Machine) -> RegionReport:
    first, *later = planned.phases
    region, plan = planned.region, first.plan
    names = tuple(s.name for s in plan.stages)
    kept, most = _kept(graph, planned)
    return RegionReport(
        name=planned.name,
        ops=len(_operators(graph, region.ops)),
        rows=region.space.rows,
        tile_rows=plan.tile_rows,
        tiles=plan.tiles,
        arrangement=plan.arrangement,
        stages=tuple(
            StageReport(
                name=s.name,
                ops=_operators(graph, s.ops),
                resource=s.resource,
                workers=s.workers,
                microseconds=s.tile_seconds * 1e6,
                split=s.split,
                resident=s.resident,
                sources=_sources(graph, s.ops),
            )
            for s in plan.stages
        ),
        queues=tuple(_queue(graph, first.region, plan, names, q) for q in plan.queues),
        workers=plan.workers // plan.replicas,
        replicas=plan.replicas,
        bytes_in=sum(_bytes(graph.values[v]) for v in region.inputs),
        bytes_out=sum(_bytes(graph.values[v]) for v in region.outputs),
        bytes_saved=sum(p.baseline_bytes - p.bytes_moved for p in _plans(planned)),
        seconds=sum(p.seconds for p in _plans(planned)),
        baseline_seconds=sum(p.baseline_seconds for p in _plans(planned)),
        bound=plan.bound,
        traits=plan.traits,
        order=_order(graph, first),
        loops=_loops(graph, region.ops, region.outputs),
        later=tuple(_phase(graph, planned, [p for p in later if p.number == n]) for n in sorted({p.number for p in later})),
        kept_bytes=kept,
        kept_at_once=most,
        flops=sum(op_flops(graph, i) for i in region.ops),
        bytes_moved=sum(p.bytes_moved for p in _plans(planned)),
        baseline_bytes=sum(p.baseline_bytes for p in _plans(planned)),
        peak_flops=_peak(graph, region, machine),
        sources=tuple(dict.fromkeys(line for i in sorted(region.ops) if (line := graph.ops[i].source))),
    )


def _peak(graph: Graph, region: Region, machine: Machine) -> float:
    """Operations per second of the whole machine in the dtype of the largest matrix product of ``region``; 0 without one."""
    products = [i for i in region.ops if graph.ops[i].kind == "dot_general"]
    if not products:
        return 0.0
    largest = max(products, key=lambda i: op_flops(graph, i))
    return machine.workers * machine.rate(machine.tensor_rates, graph.values[graph.ops[largest].inputs[0]].dtype)


def _varying(graph: Graph, planned: Sequence[Planned]) -> list[str]:
    """A note that names the sums whose last bits may differ from run to run, if there are any."""
    free = [i for p in planned for plan in _plans(p) for i in plan.unordered if graph.ops[i].kind not in EXACT_FOLDS]
    found = dict.fromkeys((_label(graph, i), graph.ops[i].source) for i in free)
    sums = ", ".join(f"{label} ({source or 'no source line'})" for label, source in found)
    note = f"deterministic=False: the last bits of {sums} may differ from run to run, because rows are added atomically"
    return [note] if sums else []


def _order(graph: Graph, phase: Phase) -> str:
    """The order of a stream, named by the first op that adds rows by its indices."""
    order = phase.plan.order
    by = next((i for i in phase.region.sinks if order is not None and order in graph.ops[i].inputs[1:]), None)
    return "" if by is None else f"the indices of {_label(graph, by)} ({graph.ops[by].source or 'no source line'})"


def _plans(planned: Planned) -> list[Plan]:
    """The plans of all phases."""
    return [p.plan for p in planned.phases]


def _kept(graph: Graph, planned: Planned) -> tuple[int, int]:
    """(bytes that phases make for later ones only, the most of them that live at a time); phases run one after the other."""
    results = set(planned.region.outputs)
    last = {v: k for k, p in enumerate(planned.phases) for v in p.region.inputs}
    total = alive = most = 0
    dying = collections.Counter[int]()
    for k, phase in enumerate(planned.phases):
        for v in phase.region.outputs:
            if v not in results:
                size = _bytes(graph.values[v])
                total, alive = total + size, alive + size
                dying[last.get(v, k)] += size
        most = max(most, alive)
        alive -= dying[k]
    return total, most


def _phase(graph: Graph, planned: Planned, phases: Sequence[Phase]) -> PhaseReport:
    """The report of ``phases``, all those with one number."""
    results = set(planned.region.outputs)
    streams = []
    for p in phases:
        ops = tuple(label for stage in p.plan.stages for label in _operators(graph, stage.ops))
        streams.append(StreamReport(1, p.region.space.rows, p.plan.tiles, p.plan.tile_rows, _order(graph, p), ops))
    return PhaseReport(
        number=phases[0].number,
        ops=sum(len(_operators(graph, p.region.ops)) for p in phases),
        streams=len(phases),
        rows=sum(p.region.space.rows for p in phases),
        seconds=sum(p.plan.seconds for p in phases),
        kept_bytes=sum(_bytes(graph.values[v]) for p in phases for v in p.region.outputs if v not in results),
        spaces=tuple(dataclasses.replace(one, count=n) for one, n in collections.Counter(streams).items()),
    )


def _queue(graph: Graph, region: Region, plan: Plan, names: tuple[str, ...], queue: Queue) -> QueueReport:
    value = graph.values[queue.value]
    shape = (plan.tile_rows, *row_shape(value.shape, region.label_of().get(queue.value)))
    return QueueReport(
        value=f"{value.dtype}[{','.join(map(str, shape))}]",
        producer=names[queue.producer],
        consumers=tuple(names[c] for c in queue.consumers),
        depth=queue.depth,
        bytes=queue.depth * queue.entry_bytes,
        place=queue.place,
    )


def _grouped(graph: Graph, rejected: Sequence[tuple[int, str]], xla_seconds: Mapping[int, float] | None) -> tuple[Rejected, ...]:
    """Equal (operator, line, reason) become one entry with a count, in the order of their first appearance."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, reason in rejected:
        groups.setdefault((_label(graph, i), graph.ops[i].source, reason), []).append(i)
    return tuple(
        Rejected(*entry, len(ops), None if xla_seconds is None else sum(xla_seconds.get(i, 0.0) for i in ops))
        for entry, ops in groups.items()
    )


def _unknown(graph: Graph, rejected: Sequence[tuple[int, str]]) -> int:
    """How many of the ``rejected`` ops have no model of their time: neither operations that are counted, nor bodies of their
    own."""
    ops = (graph.ops[i] for i, _ in rejected)
    return sum(
        op.kind == "opaque" and bool(op.inputs) and "flops" not in dict(op.params) and op.label not in HOLD_BODIES for op in ops
    )


def _sources(graph: Graph, ops: Iterable[int]) -> tuple[str, ...]:
    """The user's lines of ``ops``, those of loop bodies with them, each once."""
    found: list[str] = []
    for i in ops:
        body = graph.ops[i].body
        found += [graph.ops[i].source] if body is None else _sources(body, range(len(body.ops)))
    return tuple(dict.fromkeys(source for source in found if source))


def _operators(graph: Graph, ops: Iterable[int]) -> tuple[str, ...]:
    """The labels of the operators among ``ops``, those of loop bodies once each."""
    found: list[str] = []
    for i in ops:
        body = graph.ops[i].body
        if body is not None:
            found += _operators(body, range(len(body.ops)))
        elif not _is_view(graph, i):
            found.append(_label(graph, i))
    return tuple(found)


def _loops(graph: Graph, ops: Iterable[int], stored: Container[int]) -> tuple[LoopReport, ...]:
    """The loops among ``ops``, outer ones before those inside them. Of the ys only those in ``stored`` count as written."""
    found: list[LoopReport] = []
    for i in ops:
        op = graph.ops[i]
        if op.body is not None:
            p = parts(op)
            made = [v for y, v in zip(p.ys, p.in_ys, strict=True) if y in stored]
            sizes = [sum(_bytes(op.body.values[v]) for v in values) for values in (p.in_carries, p.in_xs, made)]
            found.append(LoopReport(_label(graph, i), op.source, op["length"], *sizes))
            found += _loops(op.body, range(len(op.body.ops)), range(len(op.body.values)))
    return tuple(found)


def _is_view(graph: Graph, i: int) -> bool:
    """Is op ``i`` no operator of its own: a view, a slice of leading rows of an argument (contiguous), an empty loop?"""
    op = graph.ops[i]
    if op.label in _KEYS:
        return True
    if op.body is not None:
        return not _operators(op.body, range(len(op.body.ops)))
    if op.kind != "slice" or op.inputs[0] not in graph.inputs and op.inputs[0] not in _arrays_of_keys(graph):
        return op.kind in _VIEWS
    cut = [d for d, n in enumerate(graph.values[op.inputs[0]].shape) if n != graph.values[op.outputs[0]].shape[d]]
    return cut in ([], [0]) and set(op["strides"] or (1,)) == {1}


def _arrays_of_keys(graph: Graph) -> set[int]:
    return {op.outputs[0] for op in graph.ops if op.label == "random_unwrap"}


def _label(graph: Graph, i: int) -> str:
    return graph.ops[i].label or graph.ops[i].kind


def op_bytes(graph: Graph, i: int) -> int:
    """Bytes of the distinct operands and the results of op ``i``."""
    op = graph.ops[i]
    return sum(_bytes(graph.values[v]) for v in (*dict.fromkeys(op.inputs), *op.outputs))


def graph_flops(graph: Graph) -> int:
    """Useful operations: two per multiply-add of a matrix product, pointwise operators and reductions as the table counts them, a
    loop its body times its steps."""
    return sum(op_flops(graph, i) for i in range(len(graph.ops)))


def op_flops(graph: Graph, i: int) -> int:
    """Useful operations of op ``i``, as ``graph_flops`` counts them; 0 of one that is not known."""
    op = graph.ops[i]
    if op.kind == "opaque":
        flops = dict(op.params).get("flops", 0)
        return flops if isinstance(flops, int) else 0
    if op.body is not None:
        return op["length"] * graph_flops(op.body)
    spec, out = OPS[op.kind], graph.values[op.outputs[0]]
    if spec.family == "dot":
        return 2 * out.size * math.prod(graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"])
    if spec.family in ("reduce", "argreduce", "cumulative"):
        return graph.values[op.inputs[0]].size
    return round(spec.flops * out.size) if spec.family == "pointwise" else 0


def _bytes(value: Value) -> int:
    if value.literal is not None:
        return 0
    try:
        itemsize = np_dtype(value.dtype).itemsize
    except TypeError:  # keys of ``jax.random``
        itemsize = 8
    return math.prod(value.shape) * itemsize
