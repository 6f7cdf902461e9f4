"""Streams: stream spaces and ``Region``s as data, ``Seed``s where a stream may start, and ``spread``, which labels values from
there.

Comes in: a Graph and a ``Seed``. Goes out: a ``Spread``, from which ``regions.grow`` makes ``Region``s. Invariant: under a spread's
labels every member is legal on its own.

A **stream space** has one or more axes; the flattened index over them (last axis fastest) is the **row**. Each dimension of a value
is labelled with the axes that it runs over, outermost first, whose extents multiply to its size; ``()``: it is not streamed. A
value without streamed dimensions is **stationary**. In the tile form of a streamed value one row dimension in front replaces its
streamed dimensions: ``(rows, *row_shape)``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping

from kitsune_jax.ops.graph import Graph, Op, Param, quick
from kitsune_jax.ops.spec import DimRelation, Dims, Shapes
from kitsune_jax.ops.table import NO_OPERATOR, OPS, scores_of

# --- Stream spaces and regions ----------------------------------------------------------------------------------------------------

DimLabels = tuple[tuple[int, ...], ...]  # per dimension of a value: the stream axes it runs over
Supports = Callable[[int], str | None]  # op index -> the reason why a target cannot run the op, or None


@dataclasses.dataclass(frozen=True, slots=True)
class StreamSpace:
    """``sizes`` of the axes. The first ``batch`` are batch axes: a tile never crosses from one index of them to the next, so a
    value that streams over these alone is stationary during a tile (the keys of an attention head)."""

    sizes: tuple[int, ...]
    batch: int = 0

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def batches(self) -> int:
        return math.prod(self.sizes[: self.batch])

    def tiles(self, tile_rows: int) -> int:
        return self.batches * -(-math.prod(self.sizes[self.batch :]) // tile_rows)

    def of_batch(self, labels: DimLabels | None) -> bool:
        """Whether a value with these labels runs over batch axes only."""
        return labels is not None and self.batch > 0 and all(a < self.batch for axes in labels for a in axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A convex subgraph that becomes one custom call.

    ``ops``: graph op indices, topological. ``labels``: for every *streamed* value the region reads or makes, its ``DimLabels``
    (stationary values are absent). ``inputs`` / ``outputs``: graph value ids that cross the border (literals are not inputs). The
    result of a maker (a broadcast, an iota: an op without streamed inputs) is never an output: readers outside compute it again.
    ``sinks``: the ops that reduce over the whole stream space, with stationary results, or over all rows of each batch, with
    results that run over the batch axes. ``recomputed``: ops that others may compute as well, as that is cheaper than storing their
    results, which are no outputs.
    """

    space: StreamSpace
    ops: tuple[int, ...]
    labels: tuple[tuple[int, DimLabels], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sinks: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()

    @staticmethod
    def of(
        graph: Graph,
        space: StreamSpace,
        ops: Iterable[int],
        labels: Mapping[int, DimLabels],
        outputs: Iterable[int],
        sinks: Iterable[int] = (),
        recomputed: Container[int] = (),
    ) -> Region:
        """The region of ``ops``, with those of ``labels``, ``sinks`` and ``recomputed`` that belong to it."""
        ops = tuple(ops)
        inside = frozenset(ops)
        made = {v for i in ops for v in graph.ops[i].outputs}
        read = dict.fromkeys(v for i in ops for v in graph.ops[i].inputs)
        return Region(
            space,
            ops,
            labels=tuple((v, labels[v]) for v in sorted(made.union(read)) if v in labels),
            inputs=tuple(v for v in read if v not in made and graph.values[v].literal is None),
            outputs=tuple(outputs),
            sinks=tuple(i for i in sinks if i in inside),
            recomputed=tuple(i for i in ops if i in recomputed),
        )

    def label_of(self) -> dict[int, DimLabels]:
        return dict(self.labels)


def row_shape(shape: tuple[int, ...], labels: DimLabels | None) -> tuple[int, ...]:
    """The dimensions of ``shape`` that are not streamed. ``labels=None`` (stationary) leaves it whole."""
    if labels is None:
        return shape
    return tuple([n for n, axes in zip(shape, labels, strict=True) if not axes])


def row_strides(shape: tuple[int, ...], labels: DimLabels, space: StreamSpace) -> tuple[int, ...]:
    """Element stride of every stream axis in a dense row-major array of ``shape`` (0 for axes the value does not depend on)."""
    strides = [0] * len(space.sizes)
    step = 1
    for n, axes in zip(reversed(shape), reversed(labels), strict=True):
        inner = step
        for axis in reversed(axes):
            strides[axis] = inner
            inner *= space.sizes[axis]
        step *= n
    return tuple(strides)


def dim_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a dense row-major array."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def streamed_axes(labels: DimLabels) -> frozenset[int]:
    return frozenset(a for axes in labels for a in axes)


# --- Seeds ------------------------------------------------------------------------------------------------------------------------

# A batch of products with fewer results than this is no attention: all of a batch is one row.
_LARGE_BATCH = 64 * 64
FEW_ROWS = 4  # rows of a product that takes as long as reading its weight
FEW_OF_BATCH = 8  # the same for each product of a batch: its matrix is small enough to stay in cache for all rows
_LARGE_WEIGHT = 64 * 64  # elements
_MOVED = frozenset({"reshape", "transpose", "convert_element_type", "copy"})


@dataclasses.dataclass(frozen=True, slots=True)
class Seed:
    """A start of a stream: each of ``dims`` of ``value`` becomes a stream axis, in this order, the first ``batch`` batch axes.
    ``apart``: another stream makes the sums of scores over this one (``Wiring.scores``)."""

    value: int
    dims: tuple[int, ...]
    batch: int = 0
    apart: bool = False

    def start(self, graph: Graph) -> tuple[StreamSpace, DimLabels]:
        """The stream space, and the labels of ``value`` in it."""
        shape = graph.values[self.value].shape
        labels = tuple((self.dims.index(d),) if d in self.dims else () for d in range(len(shape)))
        return StreamSpace(tuple(shape[d] for d in self.dims), self.batch), labels


def candidate_seeds(
    graph: Graph, op_index: int, producers: Mapping[int, int] | None = None, scores: Container[int] = ()
) -> list[Seed]:
    """Ways in which the stream could run through an op, most promising first. ``scores``: see ``Wiring``.

    A dot streams over the free dimensions of either side (the other side is then stationary, or stationary for each batch), or over
    the contracted ones if they are the longest (it is then a sink). If ``producers`` are given, a product of a few rows streams
    over what it contracts, or over the columns of its weight, or, in a batch of these, over the batch, but not over the rows. Other
    ops stream over all but the last dimension of their largest operand, over its first, and over each single one.
    """
    op = graph.ops[op_index]
    if op.kind == "dot_general":
        sides = []
        for v, side in zip(op.inputs, ("lhs", "rhs"), strict=True):
            shape, used = graph.values[v].shape, {*op[f"{side}_contract"], *op[f"{side}_batch"]}
            free = [d for d in range(len(shape)) if d not in used]
            sides.append((math.prod(shape[d] for d in free), v, free))
        # A weight gradient contracts the rows; other seeds would stream over columns of the weight.
        seeds = _batched(graph, op_index)
        contracted = math.prod(graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"])
        if op["lhs_contract"] and contracted >= max(size for size, _, _ in sides):
            seeds.append(Seed(op.inputs[0], tuple(op["lhs_contract"])))
        if producers is not None and has_few_rows(graph, producers, op_index):
            batch = range(len(op["lhs_batch"]))
            seeds = [Seed(op.outputs[0], tuple(batch)) if batch else Seed(op.inputs[0], tuple(op["lhs_contract"]))]
            sides = [max(sides)]
        if producers is not None and (taken := _batch_dims_of_taken_matrices(graph, producers, op_index)):
            seeds.insert(0, Seed(op.outputs[0], taken))
        along = [Seed(v, tuple(free[:k])) for _, v, free in sorted(sides, key=lambda s: -s[0]) for k in range(len(free), 0, -1)]
        if any(v in scores for v in (*op.inputs, *op.outputs)) and not any(s.batch for s in seeds):
            seeds = [dataclasses.replace(s, apart=True) for s in along] + seeds
        seeds += along
    elif OPS[op.kind].family in ("gather", "scatter"):
        # The rows are the indices; the dimensions in front of the indexed one stream if the indices do not.
        v = op.outputs[0] if OPS[op.kind].family == "gather" else op.inputs[0]
        indexed = range(op["axis"], op["axis"] + len(graph.values[op.inputs[1]].shape))
        choices = [tuple(indexed), tuple(indexed[:1]), tuple(range(op["axis"]))]
        seeds = [Seed(v, dims) for dims in choices if dims]
    else:
        operands = [v for v in (*op.outputs, *op.inputs) if graph.values[v].shape]
        if not operands:
            return []
        v = max(operands, key=lambda v: (graph.values[v].size, len(graph.values[v].shape)))
        rank = len(graph.values[v].shape)
        choices = [tuple(range(rank - 1)), (0,), *((d,) for d in range(1, rank)), tuple(range(rank))]
        seeds = [Seed(v, dims) for dims in choices if dims]
    return [
        s for s in dict.fromkeys(_without_ones(graph, s) for s in seeds) if all(graph.values[s.value].shape[d] > 0 for d in s.dims)
    ]


def _batch_dims_of_taken_matrices(graph: Graph, producers: Mapping[int, int], op_index: int) -> tuple[int, ...]:
    """The batch dimensions of a product with matrices taken from a table, one or more for each of the batch (the weights of a
    token's experts). A row of such a stream reads its matrices in place; other streams would cut each of them."""
    op = graph.ops[op_index]
    taken = any(_maker_of(graph, producers, v) == "take" for v in op.inputs)
    return tuple(range(len(op["lhs_batch"]))) if taken else ()


def _maker_of(graph: Graph, producers: Mapping[int, int], v: int) -> str:
    """The kind of the op that makes ``v``, apart from ops that only move or convert it; "" for an input of the graph."""
    while (made_by := producers.get(v)) is not None and graph.ops[made_by].kind in _MOVED:
        v = graph.ops[made_by].inputs[0]
    return "" if made_by is None else graph.ops[made_by].kind


def has_few_rows(graph: Graph, producers: Mapping[int, int], op_index: int) -> bool:
    """Whether the op is a product of a few rows with a weight in memory (or, in a batch, each with a matrix of its own).

    A computed matrix is no such weight, even with few columns: that product streams with the op that makes its rows.
    """
    op = graph.ops[op_index]
    if op.kind != "dot_general" or not op["lhs_contract"]:
        return False
    (out,) = op.outputs
    batch = math.prod(graph.values[out].shape[: len(op["lhs_batch"])])
    rows, matrix = sorted(op.inputs, key=lambda v: graph.values[v].size)
    x, y = graph.values[rows].size, graph.values[matrix].size
    if _maker_of(graph, producers, matrix) not in ("", "opaque", "dynamic_update_slice"):
        return False
    contracted = math.prod(graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"])
    few = FEW_OF_BATCH if batch > 1 else FEW_ROWS
    return 0 < x <= few * contracted * batch and y >= _LARGE_WEIGHT * batch


def is_batched(graph: Graph, op_index: int) -> bool:
    """Whether the op is a product that may stream over batch axes, with one side stationary for each batch."""
    return graph.ops[op_index].kind == "dot_general" and bool(_batched(graph, op_index))


def _batched(graph: Graph, op_index: int) -> list[Seed]:
    """Streams over the batch dimensions of a dot and the free ones of one side: the other side is stationary for each batch."""
    op = graph.ops[op_index]
    batch, (out,) = len(op["lhs_batch"]), op.outputs
    shape = graph.values[out].shape
    if math.prod(shape[:batch]) <= 1 or math.prod(shape[batch:]) < _LARGE_BATCH:
        return []
    free = len(graph.values[op.inputs[0]].shape) - batch - len(op["lhs_contract"])
    lhs, rhs = range(batch, batch + free), range(batch + free, len(shape))
    sides = sorted((lhs, rhs), key=lambda side: -math.prod(shape[d] for d in side))
    return [Seed(out, (*range(batch), *side[:k]), batch) for side in sides for k in range(len(side), 0, -1)]


def _without_ones(graph: Graph, seed: Seed) -> Seed:
    """The same stream without axes of extent 1, unless it has no others."""
    shape = graph.values[seed.value].shape
    dims = tuple(d for d in seed.dims if shape[d] != 1)
    batch = sum(shape[d] != 1 for d in seed.dims[: seed.batch])
    return Seed(seed.value, dims, batch, seed.apart) if dims else Seed(seed.value, seed.dims)


# --- Connections between ops ------------------------------------------------------------------------------------------------------


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class Wired:
    """An op and its relations between dimensions: for each its role, its members as (value, dimension), and itself."""

    operands: tuple[int, ...]
    relations: tuple[tuple[str, tuple[tuple[int, int], ...], DimRelation], ...]
    has_elements: bool
    alone: Callable[[Op, list[Dims]], str] | None  # the reason why rows cannot be computed one by one along these dimensions


class Wiring:
    """The connections between the ops of a graph, computed on first access: ``wiring[i]``, and ``touching(v)``, the ops that define
    or read a value. ``sums_by_batch``: sums over the rows of each batch are sinks. ``scores``: if they are not, results of products
    that are much larger than their operands, for which two streams make sums over one dimension each."""

    def __init__(self, graph: Graph, sums_by_batch: bool = True):
        self.graph, self.sums_by_batch = graph, sums_by_batch
        self.scores: frozenset[int] = frozenset() if sums_by_batch else scores_of(graph)
        self._wired: dict[int, Wired] = {}
        self._touching: dict[int, dict[int, None]] = {}
        for i, op in enumerate(graph.ops):
            for v in (*op.outputs, *op.inputs):
                self._touching.setdefault(v, {})[i] = None

    def touching(self, v: int) -> Iterable[int]:
        return self._touching.get(v, ())

    def only_for(self, ops: Iterable[int]) -> set[int]:
        """The ops whose results only ``ops`` and these ops themselves read."""
        kept, found = set(self.graph.outputs), set(ops)
        work = [v for i in found for v in self.graph.ops[i].inputs]
        while work:
            v = work.pop()
            for i in self.touching(v):
                op = self.graph.ops[i]
                if v not in op.outputs or i in found or not kept.isdisjoint(op.outputs):
                    continue
                if all(j == i or j in found for out in op.outputs for j in self.touching(out)):
                    found.add(i)
                    work += op.inputs
        return found.difference(ops)

    def __getitem__(self, i: int) -> Wired:
        if i not in self._wired:
            op = self.graph.ops[i]
            operands = (*op.inputs, *op.outputs)
            relations = tuple([(r.role, tuple([(operands[k], d) for k, d in r.members]), r) for r in relations_of(self.graph, op)])
            has_elements = not any(0 in self.graph.values[v].shape for v in operands)
            self._wired[i] = Wired(operands, relations, has_elements, OPS[op.kind].alone)
        return self._wired[i]


def relations_of(graph: Graph, op: Op) -> tuple[DimRelation, ...]:
    """The op's dimension relations, from the op table."""
    shapes = tuple([graph.values[v].shape for v in op.inputs])
    outs = tuple([graph.values[v].shape for v in op.outputs])
    return _relations(op.kind, op.params, shapes, outs) if op.body is None else OPS[op.kind].relate(op, shapes, outs)


@functools.lru_cache(maxsize=4096)
def _relations(kind: str, params: tuple[tuple[str, Param], ...], shapes: Shapes, outs: Shapes) -> tuple[DimRelation, ...]:
    """Of an op without a body, whatever its values are called: every layer of a network has the same ones."""
    return OPS[kind].relate(Op(kind, tuple(range(len(shapes))), (), params), shapes, outs)


# --- Spreading a stream -----------------------------------------------------------------------------------------------------------

_FOLDING = frozenset({"dot", "reduce", "argreduce", "cumulative"})
_BY_BATCH = frozenset({"dot", "reduce"})  # families whose sinks may have one sum per batch
_STREAMED_SUM = "a reduction over the stream has a streamed result"
_SUM_OF_BATCH = "sums over the rows of each batch have no code on this target"
_WAITS = "it waits for sums over the rows of the stream"
_FUNCTION = 9  # operations of an elementary function
Labels = dict[int, list[tuple[int, ...]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The stream that ``spread`` found. ``labels``: of members' values only. ``stops``: op index -> why the stream does not pass
    it. Under these labels every member is legal on its own, and no label came from an op that is no member.

    ``rounds``: for each restart, the labels of all values reached, the ops barred from then on, and why. ``looks``: examinations of
    ops.
    """

    space: StreamSpace
    labels: dict[int, DimLabels]
    ops: tuple[int, ...]
    sinks: tuple[int, ...]
    stops: dict[int, str]
    rounds: tuple[tuple[dict[int, DimLabels], dict[int, str]], ...] = ()
    looks: int = 0


class _Refine(Exception):  # noqa: N818 - control flow, not an error
    """A reshape needs a stream axis to be split in two: start again."""

    def __init__(self, axis: int, outer: int):
        self.axis, self.outer = axis, outer


def spread(
    graph: Graph,
    seed: Seed,
    allowed: Container[int],
    supports: Supports,
    wiring: Wiring | None = None,
    barred: Mapping[int, str] | None = None,
) -> Spread:
    """Spread a stream from ``seed`` over the ops of ``allowed``.

    Labels only grow. An op passes labels on while it is legal; if it turns out to be illegal after that, it is barred and
    everything starts again, so no stale label survives. Each restart bars at least one op.

    ``wiring``: may be shared between calls. ``barred``: of a round of another spread that reached ``seed`` with these labels, and
    would be found again.
    """
    wiring = wiring or Wiring(graph)
    space, labels = seed.start(graph)
    for _ in range(64):
        try:
            return _Spreader(space, allowed, supports, wiring, seed.apart).run(seed.value, labels, barred or {})
        except _Refine as split:
            space, labels = _split_axis(space, labels, split.axis, split.outer)
    raise AssertionError("a stream axis was split more often than it has prime factors")


def _split_axis(space: StreamSpace, labels: DimLabels, axis: int, outer: int) -> tuple[StreamSpace, DimLabels]:
    """Axis ``axis`` becomes ``axis`` (extent ``outer``) and ``axis + 1``; later axes move up by one."""
    sizes = (*space.sizes[:axis], outer, space.sizes[axis] // outer, *space.sizes[axis + 1 :])

    def move(a: int) -> tuple[int, ...]:
        return (a,) if a < axis else (a, a + 1) if a == axis else (a + 1,)

    return StreamSpace(sizes, space.batch + (axis < space.batch)), tuple(tuple(b for a in axes for b in move(a)) for axes in labels)


# The labels that an op implies for its operands: axes, and the (value, dimension) pairs that run over them.
Implied = list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]


class _Spreader:
    def __init__(self, space: StreamSpace, allowed: Container[int], supports: Supports, wiring: Wiring, apart: bool):
        self.graph, self.space, self.sizes = wiring.graph, space, space.sizes
        self.allowed, self.supports, self.wiring, self.apart = allowed, supports, wiring, apart
        self.looks = 0

    def run(self, seed: int, seed_labels: DimLabels, known: Mapping[int, str]) -> Spread:
        barred = dict(known)
        rounds: list[tuple[dict[int, DimLabels], dict[int, str]]] = []
        while True:
            labels, spreading, found = self._flood(seed, seed_labels, barred)
            stops, members, sinks = dict(barred), [], []
            tainted = {}
            for i in sorted({i for v, axes in labels.items() if any(axes) for i in self.wiring.touching(v)}):
                if i in barred:
                    continue
                why, sink = found[i]
                if why is None and not sink:
                    why = self._lost(i, labels)
                if why is None:
                    members.append(i)
                    if sink:
                        sinks.append(i)
                else:
                    stops[i] = why
                    readers = self._readers_of_sum(i, labels, spreading, barred) if why == _STREAMED_SUM else ()
                    tainted.update(dict.fromkeys(readers, _WAITS))
                    if i in spreading and not readers:
                        tainted[i] = why
            refused = [i for i, why in stops.items() if why == _SUM_OF_BATCH]
            if refused:  # their terms would be stored, for a stream that computes them itself
                terms = self.wiring.only_for(refused)
                tainted.update((i, _SUM_OF_BATCH) for i in members if i in terms)
            if not tainted:
                touched = {v for i in members for v in self.wiring[i].operands}
                final = {v: tuple(axes) for v, axes in labels.items() if v in touched and any(axes)}
                return Spread(self.space, final, tuple(members), tuple(sinks), stops, tuple(rounds), self.looks)
            barred.update(tainted)
            rounds.append(({v: tuple(axes) for v, axes in labels.items()}, dict(barred)))

    def _readers_of_sum(self, i: int, labels: Labels, spreading: Container[int], barred: Container[int]) -> list[int]:
        """The readers that label the results of ``i``, sums over each batch's rows, with row axes, because they stream along rows
        of other values (an attention's gradients, if queries, keys and values are made of the same tokens)."""
        rows = range(self.space.batch, len(self.sizes))
        if not self.space.batch or OPS[self.graph.ops[i].kind].family not in _BY_BATCH:
            return []
        made = [v for v in self.graph.ops[i].outputs if any(a in rows for axes in labels.get(v, ()) for a in axes)]
        return [j for v in made for j in self.wiring.touching(v) if j != i and j in spreading and j not in barred]

    def _flood(
        self, seed: int, seed_labels: DimLabels, barred: dict[int, str]
    ) -> tuple[Labels, set[int], dict[int, tuple[str | None, bool]]]:
        """Labels at the fixed point, the ops that passed some on, and for each op reached why it is not legal (None: it is) and
        whether it is a sink. An op that is not legal (yet) passes nothing on."""
        labels: Labels = {seed: list(seed_labels)}
        spreading: set[int] = set()
        found: dict[int, tuple[str | None, bool]] = {}
        work = collections.deque(self.wiring.touching(seed))
        queued = set(work)
        while work:
            i = work.popleft()
            queued.discard(i)
            self.looks += 1
            if i in barred:
                continue
            why = self._why_not(i)
            if why is not None:
                found[i] = (why, False)
                continue
            why, sink, implied = self._look(i, labels)
            found[i] = (why, sink)
            if why is not None:
                continue
            for axes, members in implied:
                for v, dim in members:
                    mine = labels.get(v)
                    if mine is None:
                        mine = labels[v] = [()] * len(self.graph.values[v].shape)
                    if mine[dim] == axes:
                        continue
                    mine[dim] = axes
                    spreading.add(i)
                    for j in self.wiring.touching(v):
                        if j not in queued:
                            queued.add(j)
                            work.append(j)
        return labels, spreading, found

    def _why_not(self, i: int) -> str | None:
        op = self.graph.ops[i]
        if op.kind == "opaque":
            return op.reason or f"{op.label}: {NO_OPERATOR}"
        if i not in self.allowed:
            return "it belongs to another region"
        return self.supports(i)

    def _lost(self, i: int, labels: Labels) -> str | None:
        """Why op ``i`` loses a streamed dimension under the final labels: each must reach its result, or end in a sink."""
        op = self.graph.ops[i]
        into, out_of = set[int](), set[int]()
        for side, axes in ((op.inputs, into), (op.outputs, out_of)):
            for v in side:
                for mine in labels.get(v, ()):
                    axes.update(mine)
        return None if into <= out_of else "a streamed dimension does not reach its result"

    def _look(self, i: int, labels: Labels) -> tuple[str | None, bool, Implied]:
        """(None if op ``i`` is legal under ``labels``, as far as known, else why not; whether it is a sink; the labels it
        implies)."""
        op, wired = self.graph.ops[i], self.wiring[i]
        contracted: set[int] = set()
        implied: Implied = []
        for role, members, r in wired.relations:
            found: tuple[int, ...] = ()
            agree = True
            for v, dim in members:
                mine = labels.get(v)
                if mine is not None and (axes := mine[dim]):
                    agree = agree and (not found or found == axes)
                    found = axes
            if not found:
                continue
            if role == "mixed":
                why = f"{op.label or op.kind} needs every index of the streamed dimension" + (f": {r.why}" if r.why else "")
                return why, False, []
            if role == "reshaped":
                through = self._through_reshape(i, r, labels)
                if through is None:
                    return "the reshape mixes streamed and per-row dimensions (reshape each row by itself to stream it)", False, []
                implied += [(axes, ((wired.operands[k], dim),)) for (k, dim), axes in through.items() if axes]
                continue
            if not agree:
                return "its operands would stream over different axes", False, []
            if role == "contracted":
                if not OPS[op.kind].sink:
                    return f"{op.label or op.kind} contracts the streamed dimension", False, []
                contracted.update(found)
            # A dot that contracts the stream is a sink whose operands both stream (in a backward pass one is a residual).
            if role == "parallel" or (role == "contracted" and len(members) > 1):
                implied.append((found, members))
        if contracted and not self._folds_all(op, contracted):
            return "reduces over a part of the stream axes", False, []
        if contracted and len(contracted) < len(self.sizes) and not self.wiring.sums_by_batch:
            return _SUM_OF_BATCH, False, []
        if contracted and self.apart and not self.wiring.scores.isdisjoint(op.inputs):
            return _SUM_OF_BATCH, False, []
        why_not = self._of_a_batch(wired, op, labels, implied) or self._check_operands(wired, op, labels, implied, bool(contracted))
        return why_not, bool(contracted), implied

    def _folds_all(self, op: Op, contracted: set[int]) -> bool:
        """Whether the op folds the whole stream, or all rows of each batch."""
        rows = set(range(self.space.batch, len(self.sizes)))
        return len(contracted) == len(self.sizes) or (contracted == rows and OPS[op.kind].family in _BY_BATCH)

    def _of_a_batch(self, wired: Wired, op: Op, labels: Labels, implied: Implied) -> str | None:
        """Why the op does not belong in a stream with batch axes: it runs over batch axes only, so it is computed outside and stays
        stationary during a batch; or it is slow and would be repeated for every batch (a norm in front of an attention's heads)."""
        if not self.space.batch:
            return None
        streams = self._with(labels, implied, wired.operands)
        axes = {v: {a for mine in dims for a in mine} for v, dims in streams.items()}
        together = set().union(*axes.values())
        if together and max(together) < self.space.batch:
            return "it is the same for all rows of a batch, so it is computed once for each batch"
        spec, batch = OPS[op.kind], set(range(self.space.batch))
        folds = spec.family in _FOLDING and not any(batch <= axes[v] for v in op.inputs)
        slow = spec.flops >= _FUNCTION and not batch <= together
        return "it is the same for several batches, so it is computed once for all of them" if folds or slow else None

    def _check_operands(self, wired: Wired, op: Op, labels: Labels, implied: Implied, sink: bool) -> str | None:
        for v in wired.operands:
            if v in labels:
                axes = [a for dim in labels[v] for a in dim]
                if len(axes) > 1 and len(set(axes)) != len(axes):
                    return "two of its dimensions would run over one stream axis"
                if not wired.has_elements and 0 in self.graph.values[v].shape:
                    return "it has no elements"
        if wired.alone is not None:
            streams = self._with(labels, implied, op.inputs)  # an index streams because the rows it places do
            if why := wired.alone(op, [self._dims(v, streams) for v in op.inputs]):
                return f"{op.label or op.kind}: {why}"
        if sink:
            streams = self._with(labels, implied, op.outputs)
            return next((wrong for v, dims in streams.items() if (wrong := self._folded(v, dims))), None)
        return None

    def _folded(self, v: int, dims: list[tuple[int, ...]]) -> str | None:
        """Why a sink cannot have the result ``v`` with streamed ``dims``; a sum for each batch runs over all batch axes."""
        axes = [a for mine in dims for a in mine]
        if not axes:
            return None
        if max(axes) >= self.space.batch:
            return _STREAMED_SUM
        if any(n > 1 and a not in axes for a, n in enumerate(self.sizes[: self.space.batch])):
            return "several batches would add to the same sums"
        kept = [not mine for mine, n in zip(dims, self.graph.values[v].shape, strict=True) if n > 1]
        return None if kept == sorted(kept) else "the sums of a batch would not lie together"

    def _with(self, labels: Labels, implied: Implied, values: Iterable[int]) -> Labels:
        """The labels of ``values``, with those that an op implies for them."""
        found = {v: list(labels.get(v, [()] * len(self.graph.values[v].shape))) for v in values}
        for axes, members in implied:
            for v, dim in members:
                if v in found:
                    found[v][dim] = axes
        return found

    def _dims(self, v: int, labels: Labels) -> Dims:
        mine = labels.get(v)
        value = self.graph.values[v]
        return Dims(value.shape, tuple(mine) if mine is not None and any(mine) else None, value.dtype, self.space.batch)

    def _through_reshape(self, i: int, r: DimRelation, labels: Labels) -> dict[tuple[int, int], tuple[int, ...]] | None:
        """Labels of all members of a reshaped class, or None if it mixes streamed and unstreamed dimensions."""
        operands = self.wiring[i].operands
        shapes = [self.graph.values[v].shape for v in operands]
        inside = [m for m in r.members if m[0] == 0]
        outside = [m for m in r.members if m[0] != 0]
        result: dict[tuple[int, int], tuple[int, ...]] = {}
        for side, other in ((inside, outside), (outside, inside)):
            found = [labels[operands[k]][dim] if operands[k] in labels else () for k, dim in side]
            if not any(found):
                continue
            if any(not axes and shapes[m[0]][m[1]] != 1 for m, axes in zip(side, found, strict=True)):
                return None
            axes = [a for dim in found for a in dim]
            dealt = self._deal(axes, [shapes[o][d] for o, d in other])
            if dealt is None:
                return None
            for m, got in [*zip(side, found, strict=True), *zip(other, dealt, strict=True)]:
                if result.setdefault(m, got) != got:
                    return None
        return result

    def _deal(self, axes: list[int], extents: list[int]) -> list[tuple[int, ...]] | None:
        """Distribute ``axes`` (outermost first) to dimensions of ``extents`` with the same product, asking for finer axes if
        needed. None if no refinement fits both: (6, 4) cannot be walked as (4, 6).
        """
        out: list[tuple[int, ...]] = []
        rest = list(axes)
        for extent in extents:
            mine: list[int] = []
            have = 1
            while have < extent:
                axis = rest[0]
                need, ragged = divmod(extent, have)
                if ragged:
                    return None
                if self.sizes[axis] > need:
                    need = math.gcd(need, self.sizes[axis])
                    if need == 1:
                        return None
                    raise _Refine(axis, need)
                mine.append(axis)
                have *= self.sizes[axis]
                rest.pop(0)
            if have != extent:
                return None
            out.append(tuple(mine))
        if rest and out:  # axes of extent 1 go to the last dimension
            out[-1] += tuple(rest)
        return out
