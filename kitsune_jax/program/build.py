"""Builds tile programs: ``build`` makes one of a Graph, a Region and a Plan; ``assemble`` makes the ``Program`` of a call.

Every stage of the plan becomes one body: loads and pops where a value is first read, the rows-first form of each op
(``OpSpec.local``), and pushes, stores and sinks directly behind the value they take, so that a target can compute in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kitsune_jax.ops.graph import Graph, Op, Param, Scalar, Value, make_params
from kitsune_jax.ops.loops import as_step, body_of, labels_inside, live_inside, parts
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.ops.spec import ROWS, Dims, LocalOp, is_narrow
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.streams import DimLabels, Region, StreamSpace, row_shape, row_strides
from kitsune_jax.program.blocks import blocked
from kitsune_jax.program.ir import (
    SINKS,
    Array,
    ArrayType,
    Block,
    Instr,
    Part,
    Program,
    QueueType,
    SinkType,
    StageProgram,
    TileProgram,
    TileType,
)

# --- A stage under construction ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class StageBuilder:
    """Stage number ``number``, or the body of a loop in it. ``graph``, ``labels``: of the region, or of the loop's body. ``ids``:
    graph value -> its SSA value here. ``repeated``: graph value -> the tile that repeats it for each row.
    """

    number: int
    graph: Graph
    labels: Mapping[int, DimLabels]
    space: StreamSpace
    body: list[Instr] = dataclasses.field(default_factory=list)
    ids: dict[int, int] = dataclasses.field(default_factory=dict)
    repeated: dict[int, int] = dataclasses.field(default_factory=dict)

    def dims(self, v: int) -> Dims:
        value = self.graph.values[v]
        return Dims(value.shape, self.labels.get(v), value.dtype, self.space.batch)

    def type_of(self, v: int) -> TileType:
        value, labels = self.graph.values[v], self.labels.get(v)
        tile = labels is not None and not self.space.of_batch(labels)
        return TileType(tile, row_shape(value.shape, labels), value.dtype)


def same_for_all(stage: StageBuilder, op: Op) -> bool:
    """Whether ``op`` reads nothing that streams, in a stream of one row: it is computed once, and its result repeated."""
    streams = any(v in stage.labels for v in op.inputs) or any(axes for v in op.outputs for axes in stage.labels.get(v, ()))
    return not streams and not stage.space.sizes and any(v in stage.labels for v in op.outputs)


# --- Sums of ``values * e^(scores - largest)`` ------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Appender:
    """Appends instructions of graph op ``op`` to ``body``. ``types``: of all values. ``new`` makes a value of a type, ``literal`` a
    constant."""

    body: list[Instr]
    types: Sequence[TileType]
    new: Callable[[TileType], int]
    literal: Callable[[Scalar, str], int]
    op: int = -1

    def _add(self, kind: str, inputs: Sequence[int], t: TileType, **params: Param) -> int:
        made = self.new(t)
        self.body.append(Instr(kind, tuple(inputs), (made,), make_params(**params), self.op))
        return made


@dataclasses.dataclass
class ScaledRows(_Appender):
    """Rows of a stage scaled for a sum of ``values * e^(scores - largest)`` that knows the scores of one tile only
    (``scatter_exp_sum``): by the largest score of their run in the tile (``run_max``).

    The sink's state is a pair (m, sum); two states add up at max(m1, m2), to which each sum is scaled first (``sink_at`` with a
    third operand). Sums of the same scores by the same index share their factors.
    """

    factors: dict[tuple[int, int], tuple[int, int]] = dataclasses.field(default_factory=dict)  # (index, scores) -> (tops, factor)

    def operands(self, values: int, index: int, scores: int, n: int, op: int, ones: bool) -> list[int]:
        """(rows, index, tops) of the sink: ``values`` times the factor of their row, and the largest score of their run. ``ones``:
        every element of ``values`` is the constant 1."""
        self.op = op
        tops, factor = self._factor(index, scores, n)
        t = self.types[values]
        if ones and self.types[factor].shape == t.shape:
            return [factor, index, tops]
        if self.types[factor].shape != t.shape:
            dims = tuple(range(1 + len(self.types[factor].shape)))
            factor = self._add("broadcast_in_dim", (factor,), t, shape=t.rows_first, dims=dims)
        return [self._add("mul", (values, factor), t), index, tops]

    def _factor(self, index: int, scores: int, n: int) -> tuple[int, int]:
        if (index, scores) not in self.factors:
            t = self.types[scores]
            tops = self._add("run_max", (scores, index), t, n=n)
            # A run of -inf only adds nothing to other runs: e^(-inf - 0).
            finite = self._add("is_finite", (tops,), TileType(True, t.shape, "bool"))
            used = self._add("select_n", (finite, self.literal(0.0, t.dtype), tops), t)
            difference = self._add("sub", (scores, used), t)
            self.factors[index, scores] = tops, self._add("exp", (difference,), t)
        return self.factors[index, scores]


# --- Powers of 16-bit numbers -----------------------------------------------------------------------------------------------------


_ROUNDED_ONCE = (-1, 0, 1, 2)  # exponents of powers that one operator computes


class Powers(_Appender):
    """Writes ``x**y`` for an integer y as the products and the quotient that JAX makes of it, each of which is rounded."""

    def power(self, x: int, y: int) -> int:
        t = self.types[x]
        result, square, left = -1, x, abs(y)
        while left:
            if left & 1:
                result = square if result < 0 else self._add("mul", (result, square), t)
            left >>= 1
            if left:
                square = self._add("square", (square,), t)
        return result if y > 0 else self._add("div", (self.literal(1.0, t.dtype), result), t)


# --- Slices and updates at computed places ----------------------------------------------------------------------------------------


class Windows(_Appender):
    """Writes a ``dynamic_slice`` or a ``dynamic_update_slice`` as elements selected inside rows (``take``) and a choice between
    two. Starts are clamped, so that windows lie inside the array."""

    def slice(self, x: int, starts: Sequence[int], dims: Sequence[int], sizes: Sequence[int]) -> int:
        """``sizes`` elements of the tile ``x`` along ``dims`` (rows first) from ``starts`` on."""
        for d, size, start in zip(dims, sizes, starts, strict=True):
            first = self._clamped(start, self.types[x].shape[d - 1] - size)
            x = self._take(x, self._add("add", (self._count(size), first), TileType(False, (size,), "int32")), d)
        return x

    def update(self, x: int, update: int, starts: Sequence[int], dims: Sequence[int]) -> int:
        """The tile ``x`` with the tile ``update`` along ``dims`` (rows first) from ``starts`` on."""
        whole, mask = self.types[x], -1
        for d, start in zip(dims, starts, strict=True):
            n, size = whole.shape[d - 1], self.types[update].shape[d - 1]
            number, inside = TileType(False, (n,), "int32"), TileType(False, (n,), "bool")
            first = self._clamped(start, n - size)
            if size == 1:  # for example of a cache of keys: repeat it, and select it in one place
                here = self._add("eq", (self._count(n), first), inside)
                update = self._repeat(update, n, d)
            else:
                place = self._add("sub", (self._count(n), first), number)
                last = self.literal(size - 1, "int32")
                nearest = self._add("min", (self._add("max", (place, self.literal(0, "int32")), number), last), number)
                here = self._add("eq", (place, nearest), inside)
                update = self._take(update, nearest, d)
            spread = TileType(True, whole.shape, "bool")
            wide = self._add("broadcast_in_dim", (here,), spread, shape=spread.rows_first, dims=(d,))
            mask = wide if mask < 0 else self._add("and", (mask, wide), spread)
        return update if mask < 0 else self._add("select_n", (mask, x, update), whole)

    def _clamped(self, start: int, most: int) -> int:
        """``start`` as an int32 in [0, most]."""
        t = self.types[start]
        inside = self._add("min", (self._add("max", (start, self.literal(0, t.dtype)), t), self.literal(most, t.dtype)), t)
        if t.dtype == "int32":
            return inside
        return self._add("convert_element_type", (inside,), TileType(False, (), "int32"), new_dtype="int32")

    def _count(self, n: int) -> int:
        return self._add("iota", (), TileType(False, (n,), "int32"), shape=(n,), dimension=0)

    def _repeat(self, x: int, n: int, d: int) -> int:
        """The tile ``x`` of one element along dimension ``d``, ``n`` times."""
        t = self.types[x]
        made = TileType(True, (*t.shape[: d - 1], n, *t.shape[d:]), t.dtype)
        return self._add("broadcast_in_dim", (x,), made, shape=made.rows_first, dims=tuple(range(len(t.shape) + 1)))

    def _take(self, x: int, index: int, d: int) -> int:
        t, (size,) = self.types[x], self.types[index].shape
        made = TileType(True, (*t.shape[: d - 1], size, *t.shape[d:]), t.dtype)
        return self._add("take", (x, index), made, axis=d, mode="promise_in_bounds", fill=0)


# --- Tile programs ----------------------------------------------------------------------------------------------------------------


def build(graph: Graph, region: Region, plan: Plan) -> TileProgram:
    """The tile program of ``region`` as ``plan`` arranges it. Raises ``ValueError`` for a plan that does not cover its ops.

    The inputs are those of the region and, if the plan has an order, the permutation that puts the rows into it.
    """
    covered = {i for stage in plan.stages for i in stage.ops}  # a maker may be in several stages
    if covered != set(region.ops):
        raise ValueError(f"the plan's stages cover ops {sorted(covered)}, the region has {sorted(region.ops)}")
    builder = _TileProgramBuilder(graph, region, plan)
    program = builder.run()
    if plan.blocks is None:
        return program
    value, dim, elements = plan.blocks
    return blocked(program, builder.made[value], builder.stage(0).dims(value).local(dim), elements)


def _sums_of(loop: Op, sums: Mapping[int, Op]) -> dict[int, Op]:
    """Those of ``sums`` that add up what ``loop`` makes in its steps, as ops of its body."""
    found = {k: as_step(loop, op) for k, op in sums.items()} if loop.body is not None else {}
    return {k: op for k, op in found.items() if op is not None}


def _sums(graph: Graph, region: Region) -> dict[int, dict[int, Op]]:
    """For each loop of the region, the sums over its steps: op of the graph -> the same as an op of the loop's body."""
    left, sums = {k: graph.ops[k] for k in region.ops}, dict[int, dict[int, Op]]()
    for i in region.ops:
        if graph.ops[i].body is not None:
            sums[i] = _sums_of(graph.ops[i], left)
            left = {k: op for k, op in left.items() if k not in sums[i]}
    return sums


class _TileProgramBuilder:
    def __init__(self, graph: Graph, region: Region, plan: Plan):
        self.graph, self.region, self.plan = graph, region, plan
        self.labels = region.label_of()
        self.values: list[TileType] = []
        self.literals: dict[int, Scalar] = {}
        self.input_number = {v: k for k, v in enumerate(region.inputs)}
        self.output_number = {v: k for k, v in enumerate(region.outputs)}
        self.sums = _sums(graph, region)
        self.outputs = tuple(self._array(v) for v in region.outputs)
        self.sinks: list[SinkType] = []
        self.made: dict[int, int] = {}  # graph value -> its SSA value in the last stage that has it
        self.incoming: dict[tuple[int, int], int] = {}  # (stage, graph value) -> queue
        self.outgoing: dict[tuple[int, int], list[int]] = {}
        for q, queue in enumerate(plan.queues):
            self.outgoing.setdefault((queue.producer, queue.value), []).append(q)
            for stage in queue.consumers:
                self.incoming[stage, queue.value] = q

    def run(self) -> TileProgram:
        stages = tuple(StageProgram(stage.name, tuple(self._stage(s))) for s, stage in enumerate(self.plan.stages))
        ordered = self.plan.order is not None
        order = (ArrayType((self.region.space.rows,), "int32", False),) if ordered else ()
        return TileProgram(
            axes=self.region.space.sizes,
            tile_rows=self.plan.tile_rows,
            inputs=(*(self._array(v) for v in self.region.inputs), *order),
            outputs=self.outputs,
            values=tuple(self.values),
            literals=tuple(self.literals.items()),
            stages=stages,
            queues=tuple(QueueType(q.producer, q.consumers, self.stage(0).type_of(q.value), q.depth) for q in self.plan.queues),
            sinks=tuple(self.sinks),
            workers=self.plan.workers,
            batch_axes=self.region.space.batch,
            order=len(self.region.inputs) if ordered else None,
        )

    def stage(self, s: int) -> StageBuilder:
        """Stage number ``s``, empty."""
        return StageBuilder(s, self.graph, self.labels, self.region.space)

    def _array(self, v: int) -> ArrayType:
        value, labels = self.graph.values[v], self.labels.get(v)
        if labels is None:
            return ArrayType(value.shape, value.dtype, False)
        dims = tuple(d for d, axes in enumerate(labels) if not axes)
        strides = row_strides(value.shape, labels, self.region.space)
        return ArrayType(value.shape, value.dtype, not self.region.space.of_batch(labels), strides, dims)

    def _new(self, t: TileType) -> int:
        self.values.append(t)
        return len(self.values) - 1

    def _literal(self, scalar: Scalar, dtype: str) -> int:
        new = self._new(TileType(False, (), dtype))
        self.literals[new] = scalar
        return new

    def _is_one(self, stage: StageBuilder, v: int) -> bool:
        """Whether ``v`` is the constant 1, repeated."""
        spread = next((i for i in stage.body if v in i.outputs and i.kind == "broadcast_in_dim"), None)
        return spread is not None and self.literals.get(spread.inputs[0]) == 1

    def _stage(self, s: int) -> list[Instr]:
        stage = self.stage(s)
        scaled = ScaledRows(stage.body, self.values, self._new, self._literal)
        for i in self.plan.stages[s].ops:
            op = self.graph.ops[i]
            if any(i in sums for sums in self.sums.values()):
                continue  # it is in the loop
            if op.body is not None:
                self._loop(stage, op, i, [v in self.output_number for v in op.outputs], self.sums[i])
                for v in op.outputs[: op["carries"]]:
                    if v in stage.ids:
                        self._push_or_store(stage, v, i)
                continue
            if OPS[op.kind].family == "window":
                self._push_or_store(stage, self._window(stage, op, i), i)
                continue
            local, inputs = self._operands(stage, op, i)
            if op.kind in ONLINE and op.outputs[0] in self.output_number:
                values, index, scores = inputs
                inputs = scaled.operands(values, index, scores, op["n"], i, self._is_one(stage, values))
            if local.kind in SINKS:
                if local.kind == "sink_at" and self.plan.order is not None:  # the promise was made for another order
                    params = {**dict(local.params), "sorted": op.inputs[1] == self.plan.order}
                    local = dataclasses.replace(local, params=make_params(**params))
                if i in self.plan.unordered:
                    local = dataclasses.replace(local, params=make_params(**dict(local.params), unordered=True))
                self._sink(stage, inputs, local, op.inputs[0], op.outputs[0], i)
                continue
            self._push_or_store(stage, self._add(stage, op, local, inputs, i), i)
        self.made.update(stage.ids)
        return stage.body

    def _operands(self, stage: StageBuilder, op: Op, i: int, result: Value | None = None) -> tuple[LocalOp, list[int]]:
        """The rows-first form of an op of the table, and its operands. ``result``: of a sum, which no row has."""
        local = LocalOp(op.kind, op.params)  # of values that are the same for all rows
        still = result is None and same_for_all(stage, op)
        if not still and (result is not None or any(v in stage.labels for v in (*op.inputs, *op.outputs))):
            ins = [stage.dims(v) for v in op.inputs]
            if OPS[op.kind].family != "dot":
                ins = [dataclasses.replace(x, batch=0) for x in ins]
            made = stage.dims(op.outputs[0]) if result is None else Dims(result.shape, None, result.dtype)
            local = OPS[op.kind].local(op, ins, made)
        inputs = [self._read(stage, v) for v in op.inputs]
        if OPS[op.kind].family != "dot":
            inputs = [self._as_tile(stage, v, x) for v, x in zip(op.inputs, inputs, strict=True)]
        if local.squeeze is not None:
            inputs[0] = self._squeeze(stage, inputs[0], local.squeeze, i)
        if local.swap:
            inputs.reverse()
        if still:
            return local, inputs
        if OPS[op.kind].family in ("pointwise", "concatenate") and any(v in stage.labels for v in op.outputs):
            # In a stream of one row, stationary values may have the shape of values that stream.
            types = [self.values[v] for v in inputs]
            inputs = [
                self._spread(stage, v, TileType(True, t.shape, t.dtype), i) if t.shape else v
                for v, t in zip(inputs, types, strict=True)
            ]
        if OPS[op.kind].family == "pointwise":  # a scalar may be a tile
            shape = row_shape(stage.graph.values[op.outputs[0]].shape, stage.labels.get(op.outputs[0]))
            inputs = [self._along(stage, v, shape, i) if self.values[v].tile else v for v in inputs]
        return local, inputs

    def _along(self, stage: StageBuilder, x: int, shape: tuple[int, ...], op: int) -> int:
        """The tile ``x``, repeated along a row of ``shape`` if it has one element for each row."""
        have = self.values[x]
        if have.shape == shape:
            return x
        new = self._new(TileType(True, shape, have.dtype))
        params = make_params(shape=self.values[new].rows_first, dims=(0,))
        stage.body.append(Instr("broadcast_in_dim", (x,), (new,), params, op))
        return new

    def _add(self, stage: StageBuilder, op: Op, local: LocalOp, inputs: list[int], i: int) -> int:
        """Append the rows-first form of an op. Returns the graph value that it makes."""
        (out,) = op.outputs
        t = stage.type_of(out)
        if op.kind == "integer_pow" and is_narrow(t.dtype) and op["y"] not in _ROUNDED_ONCE:
            made = Powers(stage.body, self.values, self._new, self._literal, i).power(inputs[0], op["y"])
        else:
            made = self._new(dataclasses.replace(t, tile=t.tile and not same_for_all(stage, op)))
            stage.body.append(Instr(local.kind, tuple(inputs), (made,), local.params, i))
        stage.ids[out] = self._spread(stage, made, t, i)
        return out

    def _window(self, stage: StageBuilder, op: Op, i: int) -> int:
        """Append a slice or an update at a computed place. Returns the graph value that it makes."""
        (out,), arrays = op.outputs, 2 if op.kind == "dynamic_update_slice" else 1
        dims: Any = dict(OPS[op.kind].local(op, [], stage.dims(out)).params)["dims"]
        tiles = []
        for v in op.inputs[:arrays]:  # a stationary array is repeated for each row
            t = stage.type_of(v)
            tiles.append(self._spread(stage, self._read(stage, v), dataclasses.replace(t, tile=True), i))
        starts = [self._read(stage, v) for v in op.inputs[arrays:]]
        windows = Windows(stage.body, self.values, self._new, self._literal, i)
        if arrays == 2:
            stage.ids[out] = windows.update(tiles[0], tiles[1], starts, dims)
        else:
            stage.ids[out] = windows.slice(tiles[0], starts, dims, op["sizes"])
        return out

    def _read(self, stage: StageBuilder, v: int) -> int:
        """The SSA value of graph value ``v`` in the stage: defined here, popped, loaded, or a literal."""
        if v in stage.ids:
            return stage.ids[v]
        s, value = stage.number, stage.graph.values[v]
        new = stage.ids[v] = self._new(stage.type_of(v))
        if value.literal is not None:
            self.literals[new] = value.literal
        elif stage.graph is not self.graph:
            raise ValueError(f"value {v} of a loop's body is read, and nothing makes it")
        elif (s, v) in self.incoming:
            stage.body.append(Instr("pop", (), (new,), make_params(queue=self.incoming[s, v])))
        elif v in self.input_number:
            stage.body.append(Instr("load", (), (new,), make_params(array=self.input_number[v])))
        else:
            raise ValueError(f"stage {s} needs value {v}, which no queue brings")
        return new

    def _as_tile(self, stage: StageBuilder, v: int, x: int) -> int:
        """``x``, the SSA value of graph value ``v``, repeated for each row if it is the same for all rows of a batch."""
        if not stage.space.of_batch(stage.labels.get(v)):
            return x
        if v not in stage.repeated:
            t = self.values[x]
            stage.repeated[v] = self._new(TileType(True, t.shape, t.dtype))
            params = make_params(shape=(ROWS, *t.shape), dims=tuple(range(1, 1 + len(t.shape))))
            stage.body.append(Instr("broadcast_in_dim", (x,), (stage.repeated[v],), params))
        return stage.repeated[v]

    def _squeeze(self, stage: StageBuilder, x: int, sizes: tuple[int, ...], op: int) -> int:
        t = self.values[x]
        new = self._new(TileType(t.tile, sizes[1:] if t.tile else sizes, t.dtype))
        stage.body.append(Instr("reshape", (x,), (new,), make_params(new_sizes=sizes), op))
        return new

    def _sink(self, stage: StageBuilder, inputs: list[int], local: LocalOp, x: int, out: int, op: int) -> None:
        params = dict(local.params)
        result = self.graph.values[out]
        if out in self.output_number:
            number = len(self.sinks)
            dtype = params.get("accumulate", self.graph.values[x].dtype)
            shape = row_shape(result.shape, self.labels.get(out))  # of one batch, where each has its own sum
            self.sinks.append(SinkType(params.pop("how", "sum"), shape, dtype, self.output_number[out]))
            stage.body.append(Instr(local.kind, tuple(inputs), (), make_params(sink=number, **params), op))

    def _push_or_store(self, stage: StageBuilder, v: int, op: int) -> None:
        new = stage.ids[v]
        for q in self.outgoing.get((stage.number, v), ()):
            stage.body.append(Instr("push", (new,), (), make_params(queue=q), op))
        if v in self.output_number:
            stage.body.append(Instr("store", (new,), (), make_params(array=self.output_number[v]), op))

    # --- loops ------------------------------------------------------------------------------------------------------------------

    def _loop(self, stage: StageBuilder, op: Op, i: int, wanted: Sequence[bool], sums: Mapping[int, Op]) -> None:
        """Append a loop, whose steps load slices of the arrays xs and store slices of the arrays ys. ``wanted``: for each result,
        whether anybody reads it; the others are not computed. ``sums``: the graph's sums over its steps, as ops of its body."""
        p, carries = parts(op), op["carries"]
        labels = labels_inside(OPS, op, [stage.labels.get(v) for v in (*op.inputs, *op.outputs)])
        inner = StageBuilder(stage.number, body_of(op), labels, stage.space)
        deeper = [_sums_of(body_op, sums) for body_op in inner.graph.ops]
        here = {k: step for k, step in sums.items() if not any(k in d for d in deeper)}
        live = self._live(op, wanted, sums)
        kept = [k for k in range(carries) if p.in_carries[k] in live]
        for outside, v in zip(p.consts, p.in_consts, strict=True):
            if v in live:
                x, t = self._read(stage, outside), inner.type_of(v)
                # In a stream of one row, the body may stream values that are stationary around the loop.
                inner.ids[v] = self._spread(stage, x, t, i) if t.tile and t.shape and not self.values[x].tile else x
        initial, carried = [], []
        for k in kept:
            v = p.in_carries[k]
            initial.append(self._spread(stage, self._read(stage, p.initial[k]), inner.type_of(v), i))
            inner.ids[v] = self._new(inner.type_of(v))
            carried.append(inner.ids[v])
        number = self._new(TileType(False, (), "int32"))
        for outside, v in zip(p.xs, p.in_xs, strict=True):
            if v in live:
                self._cut(stage, inner, outside, v, number, i)
        for body_op, added in zip(inner.graph.ops, deeper, strict=True):
            if live.isdisjoint(body_op.outputs):
                continue
            if body_op.body is not None:
                used = self._live(op, wanted, {k: step for k, step in sums.items() if k not in added})
                self._loop(inner, body_op, i, [v in used for v in body_op.outputs], added)
            elif OPS[body_op.kind].family == "window":
                self._window(inner, body_op, i)
            else:
                self._add(inner, body_op, *self._operands(inner, body_op, i), i)
        final = [p.final[k] for k in kept]
        results = [self._spread(inner, self._read(inner, p.in_next[k]), inner.type_of(p.in_carries[k]), i) for k in kept]
        for k, (outside, v) in enumerate(zip(p.ys, p.in_ys, strict=True), carries):
            if wanted[k] and stage.graph is self.graph:
                self._store(stage, inner, outside, v, number, i)
            elif wanted[k]:
                self._paste(stage, inner, outside, v, number, i, (initial, carried, results))
                final.append(outside)
        for k, step in here.items():
            local, inputs = self._operands(inner, step, k, self.graph.values[step.outputs[0]])
            self._sink(inner, inputs, local, self.graph.ops[k].inputs[0], step.outputs[0], k)
        block = Block(number, tuple(carried), tuple(inner.body), tuple(results))
        outs = [self._new(self.values[v]) for v in carried]
        stage.ids.update(zip(final, outs, strict=True))
        params = make_params(count=op["length"], reverse=op["reverse"])
        stage.body.append(Instr("loop", tuple(initial), tuple(outs), params, i, block))

    @staticmethod
    def _live(op: Op, wanted: Sequence[bool], sums: Mapping[int, Op]) -> set[int]:
        """The values of the loop's body that its ``wanted`` results and ``sums`` need."""
        added = {v for step in sums.values() for v in step.inputs}
        return added | live_inside(op, [want or v in added for want, v in zip(wanted, body_of(op).outputs, strict=True)])

    def _spread(self, stage: StageBuilder, x: int, t: TileType, op: int) -> int:
        """``x`` as a ``t``: if ``t`` has rows, a value that is the same for all rows of a tile is repeated for each."""
        have = self.values[x]
        if have == t:
            return x
        if have.tile or (have.shape, have.dtype) != (t.shape, t.dtype):
            raise ValueError(f"a carry of a loop is {have} in one step and {t} in another")
        new = self._new(t)
        dims = tuple(range(1, 1 + len(t.shape)))
        stage.body.append(Instr("broadcast_in_dim", (x,), (new,), make_params(shape=t.rows_first, dims=dims), op))
        return new

    def _cut(self, stage: StageBuilder, inner: StageBuilder, x: int, slice_: int, number: int, op: int) -> None:
        """Set ``slice_`` of the body to the slice of ``x`` for step ``number``."""
        t = inner.type_of(slice_)
        if stage.graph is not self.graph:
            whole = self._read(stage, x)
            have = self.values[whole]
            part = self._new(TileType(have.tile, have.shape[1:], have.dtype))
            inner.body.append(Instr("cut", (whole, number), (part,), (), op))
            inner.ids[slice_] = self._spread(inner, part, t, op)
            return
        if x not in self.input_number:
            raise ValueError("a loop takes slices of an array that is made in its own region")
        thick = self._new(TileType(t.tile, (1, *t.shape), t.dtype))
        params = make_params(array=self.input_number[x], dims=(0,), steps=(1,), sizes=(1,))
        inner.body.append(Instr("load_slice", (number,), (thick,), params, op))
        inner.ids[slice_] = self._new(t)
        inner.body.append(Instr("reshape", (thick,), (inner.ids[slice_],), make_params(new_sizes=t.rows_first), op))

    def _store(self, stage: StageBuilder, inner: StageBuilder, y: int, slice_: int, number: int, op: int) -> None:
        """Store ``slice_`` of the body as the slice of ``y`` for step ``number``."""
        array = self.outputs[self.output_number[y]]
        t = TileType(array.streamed, inner.type_of(slice_).shape, array.dtype)
        value = self._spread(inner, self._read(inner, slice_), t, op)
        thick = self._new(TileType(t.tile, (1, *t.shape), t.dtype))
        inner.body.append(Instr("reshape", (value,), (thick,), make_params(new_sizes=self.values[thick].rows_first), op))
        params = make_params(array=self.output_number[y], dims=(0,), steps=(1,), sizes=(1,))
        inner.body.append(Instr("store_slice", (thick, number), (), params, op))

    def _paste(
        self, stage: StageBuilder, inner: StageBuilder, y: int, slice_: int, number: int, op: int, loop: Sequence[list[int]]
    ) -> None:
        """Make ``y``, which other loops of the same step read, one more carry of ``loop``, its (initial, carried, results)."""
        t = stage.type_of(y)
        value = self._spread(inner, self._read(inner, slice_), TileType(t.tile, t.shape[1:], t.dtype), op)
        empty, before, after = (self._new(t) for _ in range(3))
        stage.body.append(Instr("empty", (), (empty,), (), op))
        inner.body.append(Instr("paste", (before, value, number), (after,), (), op))
        for values, v in zip(loop, (empty, before, after), strict=True):
            values.append(v)


# --- Calls ------------------------------------------------------------------------------------------------------------------------


def assemble(
    parts: Sequence[tuple[int, TileProgram, Sequence[int], Sequence[int]]], operands: Sequence[int], results: Sequence[int]
) -> Program:
    """The call that reads the graph values ``operands`` and returns ``results``. Each of ``parts``: (phase, program, the values it
    reads, the values it makes)."""
    given = [v for _, _, _, gives in parts for v in gives]
    order = [*operands, *results, *(v for v in given if v not in set(results))]
    number = {v: k for k, v in enumerate(order)}
    types: dict[int, Array] = {}
    for _, program, reads, gives in parts:
        arrays = zip((*reads, *gives), (*program.inputs, *program.outputs), strict=True)
        types.update((v, Array(array.shape, array.dtype)) for v, array in arrays)
    return Program(
        arrays=tuple(types[v] for v in order),
        operands=len(operands),
        results=len(results),
        parts=tuple(
            Part(phase, program, tuple(number[v] for v in reads), tuple(number[v] for v in gives))
            for phase, program, reads, gives in parts
        ),
    )
