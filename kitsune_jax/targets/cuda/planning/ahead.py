"""Which weight a call asks the L2 for, because a product that XLA runs behind it will read that weight.

Comes in: a Graph, and the calls that were chosen with their plans. Goes out: for each call an ``Ahead``, or None. A product of few
rows takes as long as its weight takes to come from memory. While a kernel ends and the next ones are launched, memory has nothing
to do, so the pieces that are asked for then come for nothing; the product reads them at the speed of the L2 and the others at that
of memory, both at once.

Invariants: the weight is an argument of the graph, so it is there when the call starts and nothing is copied for it. Its product
depends on the call, so nobody overwrites the weight before the call has run who would not have to wait for it anyway: an argument
that is updated in place stays so.

The model, on a machine with bandwidths M of memory and C of the L2: of a weight of W bytes at most W (1 - M / C) are worth asking
for, because then the L2 is what limits the product; not more than memory brings in the gaps between the kernels from the call to
the product (``kernel_seconds`` each; the last sums of the call itself and its own start are not counted); and not more than what is
left of half of the L2 when all that may run in between has passed through it. The product gains what memory need not bring again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.spec import DTYPES
from kitsune_jax.planning.cost import itemsize
from kitsune_jax.planning.plan import Ahead, Plan
from kitsune_jax.planning.xla_kernels import left_region
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.cuda.fetches import PIECE_BYTES
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.planning.xla_times import baseline

_LEAST_SECONDS, _LEAST_SHARE = 1e-6, 0.02  # what must be gained: so much, or this part of what the call and the product take
Call = Sequence[tuple[Region, Plan]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """``op`` takes as long as its weight takes to come, which is ``size`` bytes of argument ``value`` from byte ``first`` on."""

    op: int
    value: int
    first: int
    size: int


def of_calls(graph: Graph, calls: Sequence[Call], machine: GpuMachine, force: bool = False) -> list[Ahead | None]:
    """What each of the ``calls`` asks for. A weight is asked for once, and a call asks for one weight: the one that gains most.
    ``force``: however little is gained."""
    found: list[Ahead | None] = [None] * len(calls)
    inside = {i for call in calls for region, _ in call for i in region.ops}
    if not force and sum(map(_bytes_of(graph), graph.inputs)) <= machine.shared_bytes // 2:
        return found  # the L2 has held all of it since the program ran last
    products = [p for i in range(len(graph.ops)) if i not in inside and (p := _product(graph, i, machine)) is not None]
    if not products or not calls:
        return found
    flow = _Flow(graph, calls)
    offers = [(k, _ahead(flow, k, product, machine, force)) for k in range(len(calls)) for product in products]
    taken: set[tuple[int, int]] = set()
    # Of calls as good as each other the last one: less runs between it and the product.
    for k, offer in sorted(offers, key=lambda pair: (-pair[1].seconds, -pair[0]) if pair[1] else (0.0, 0)):
        if offer is not None and found[k] is None and (offer.value, offer.first) not in taken:
            found[k] = offer
            taken.add((offer.value, offer.first))
    return found


def _ahead(flow: _Flow, k: int, product: _Product, machine: GpuMachine, force: bool) -> Ahead | None:
    """What call ``k`` can do for ``product``."""
    behind = flow.behind(k)
    if product.op not in behind.ops:
        return None
    after = flow.behind_op(product.op)
    may = behind.without(after, product.op)
    must = flow.leading_to(product.op, behind)
    seconds, moved = flow.seconds_and_bytes(must, machine)
    gaps = machine.kernel_seconds * (1 + len(must.calls)) + max(0.0, seconds - moved / machine.dram_bandwidth)
    room = machine.shared_bytes // 2 - flow.seconds_and_bytes(may, machine)[1]
    wanted = product.size * (1 - machine.dram_bandwidth / max(machine.shared_bandwidth, machine.dram_bandwidth))
    fetched = int(min(wanted, gaps * machine.dram_bandwidth, room)) // PIECE_BYTES * PIECE_BYTES
    gained = fetched / machine.dram_bandwidth
    whole = flow.seconds_of(k) + seconds + machine.kernel_seconds + product.size / machine.dram_bandwidth
    if fetched <= 0 or not (force or gained >= min(_LEAST_SECONDS, _LEAST_SHARE * whole)):
        return None
    size = _bytes_of(flow.graph)(product.value)
    return Ahead(product.value, size, product.first, product.size, fetched, product.op, machine.workers, gained)


# -- products


def _product(graph: Graph, i: int, machine: GpuMachine) -> _Product | None:
    """Op ``i``, where it is a product that reads mostly one weight and takes as long as that takes."""
    op, size = graph.ops[i], _bytes_of(graph)
    if op.kind != "dot_general":
        return None
    values = [graph.values[v] for v in (*op.inputs, *op.outputs)]
    if any(v.dtype not in DTYPES or not all(isinstance(n, int) for n in v.shape) for v in values):
        return None
    weight = max(op.inputs, key=size)
    others = sum(size(v) for v in (*op.inputs, *op.outputs)) - size(weight)
    flops = 2 * values[2].size * math.prod(values[0].shape[d] for d in op["lhs_contract"])
    rate = machine.rate(machine.tensor_rates, values[0].dtype) * machine.workers
    if others > size(weight) // 4 or flops / rate > size(weight) / machine.dram_bandwidth:
        return None
    place = _place(graph, graph.producers(), weight)
    return None if place is None else _Product(i, *place, size(weight))


def _place(graph: Graph, producers: dict[int, int], v: int) -> tuple[int, int] | None:
    """(argument, byte) where the elements of ``v`` lie in one piece, in whatever order; None where they are made of something."""
    first, cut = 0, False
    while (i := producers.get(v)) is not None:
        op = graph.ops[i]
        if op.kind == "slice":
            start = _start(op, graph.values[op.inputs[0]].shape)
            if start is None:
                return None
            first, cut = first + start * itemsize(graph.values[v].dtype), True
        elif op.kind == "transpose" and cut or op.kind not in ("reshape", "transpose"):
            return None  # a part of what is transposed does not lie in one piece
        v = op.inputs[0]
    return (v, first) if v in graph.inputs else None


def _start(op: Op, shape: tuple[int, ...]) -> int | None:
    """The first element of a slice that lies in one piece: all of each dimension behind the first one that has several."""
    start, limit, strides = op["start"], op["limit"], op["strides"] or (1,) * len(shape)
    sizes = [b - a for a, b in zip(start, limit, strict=True)]
    outer = next((d for d, n in enumerate(sizes) if n != 1), len(sizes))
    if set(strides) - {1} or any(sizes[d] != shape[d] for d in range(outer + 1, len(shape))):
        return None
    return sum(start[d] * math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _bytes_of(graph: Graph) -> Callable[[int], int]:
    """The bytes of a value; none of what is no array."""

    def size(v: int) -> int:
        value = graph.values[v]
        return value.size * itemsize(value.dtype) if value.dtype in DTYPES else 0

    return size


# -- what runs behind what


@dataclasses.dataclass(frozen=True, slots=True)
class _Nodes:
    """Ops that XLA runs, and calls, by number."""

    ops: frozenset[int]
    calls: frozenset[int]

    def without(self, others: _Nodes, op: int) -> _Nodes:
        return _Nodes(self.ops - others.ops - {op}, self.calls - others.calls)


class _Flow:
    """Which ops and calls need which. What is behind a call, or an op, is found once."""

    def __init__(self, graph: Graph, calls: Sequence[Call]):
        self.graph, self.calls = graph, calls
        self.consumers, self.producers = graph.consumers(), graph.producers()
        self.owner = {i: k for k, call in enumerate(calls) for region, _ in call for i in region.ops}
        self.results = [tuple(v for region, _ in call for v in region.outputs) for call in calls]
        self.giver = {v: k for k, values in enumerate(self.results) for v in values}
        self._behind: dict[tuple[bool, int], _Nodes] = {}

    def behind(self, k: int) -> _Nodes:
        return self._known((True, k), self.results[k], k)

    def behind_op(self, i: int) -> _Nodes:
        return self._known((False, i), self.graph.ops[i].outputs, -1)

    def _known(self, key: tuple[bool, int], values: Iterable[int], own: int) -> _Nodes:
        if key not in self._behind:
            self._behind[key] = self._search(values, own)
        return self._behind[key]

    def _search(self, values: Iterable[int], own: int) -> _Nodes:
        """What reads ``values`` or anything made of them; ``own``: the call that they are of."""
        ops, calls, work = set[int](), set[int](), list(values)
        while work:
            for i in self.consumers.get(work.pop(), ()):
                k = self.owner.get(i)
                if k is None:
                    if i not in ops:
                        ops.add(i)
                        work += self.graph.ops[i].outputs
                elif k != own and k not in calls:
                    calls.add(k)
                    work += self.results[k]
        return _Nodes(frozenset(ops), frozenset(calls))

    def leading_to(self, op: int, among: _Nodes) -> _Nodes:
        """What of ``among`` the op needs."""
        ops, calls, work = set[int](), set[int](), list(self.graph.ops[op].inputs)
        while work:
            v = work.pop()
            k, i = self.giver.get(v), self.producers.get(v)
            if k is not None:
                if k in among.calls and k not in calls:
                    calls.add(k)
                    work += [x for region, _ in self.calls[k] for x in region.inputs]
            elif i is not None and i in among.ops and i not in ops:
                ops.add(i)
                work += self.graph.ops[i].inputs
        return _Nodes(frozenset(ops), frozenset(calls))

    def seconds_of(self, k: int) -> float:
        return sum(plan.seconds for _, plan in self.calls[k])

    def seconds_and_bytes(self, nodes: _Nodes, machine: GpuMachine) -> tuple[float, int]:
        """Modelled, of XLA's kernels of the ops; and the bytes that calls move besides."""
        size = _bytes_of(self.graph)
        known = [i for i in sorted(nodes.ops) if self.graph.ops[i].kind not in ("opaque", "reshape")]
        seconds, moved = baseline(GpuCost(self.graph, left_region(self.graph, known), machine)) if known else (0.0, 0)
        unknown = [op for i in nodes.ops if (op := self.graph.ops[i]).kind == "opaque"]
        moved += sum(size(v) for op in unknown for v in (*op.inputs, *op.outputs))
        return seconds, moved + sum(plan.bytes_moved for k in nodes.calls for _, plan in self.calls[k])
