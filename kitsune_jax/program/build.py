"""Builds tile programs: ``build`` makes one of a Graph, a Region and a Plan; ``assemble`` makes the ``Program`` of a call.

Comes in: a Graph, a Region and a Plan; for ``assemble``, tile programs by phase. Goes out: a ``TileProgram`` with one body per
stage; a ``Program``. A body has loads and pops where a value is first read, the rows-first form of each op (``OpSpec.local``), and
pushes, stores and sinks directly behind the value they take, so that a target can compute in place. Invariant: the program obeys
every rule that ``reference.check`` checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kitsune_jax.ops.graph import Graph, Op, Scalar, Value, make_params
from kitsune_jax.ops.loops import as_step, body_of, labels_inside, live_inside, parts
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.ops.spec import Dims, LocalOp, is_narrow
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.streams import DimLabels, Region, row_shape, row_strides
from kitsune_jax.program.blocks import blocked
from kitsune_jax.program.ir import (
    SINKS,
    Array,
    ArrayType,
    Instr,
    LoopBody,
    Part,
    Program,
    QueueType,
    SinkType,
    StageProgram,
    TileProgram,
    TileType,
    Writer,
)

# --- A stage under construction ---------------------------------------------------------------------------------------------------


class StageBuilder(Writer):
    """Stage number ``number``, or the body of a loop in it. ``graph``, ``labels``: of the region, or of the loop's body. ``ids``:
    graph value -> its SSA value here. ``repeated``: graph value -> the tile that repeats it for each row.
    """

    def __init__(self, builder: _TileProgramBuilder, number: int, graph: Graph, labels: Mapping[int, DimLabels]):
        super().__init__(builder.values, builder.literals)
        self.number, self.graph, self.labels, self.space = number, graph, labels, builder.region.space
        self.ids: dict[int, int] = {}
        self.repeated: dict[int, int] = {}

    def dims(self, v: int) -> Dims:
        value = self.graph.values[v]
        return Dims(value.shape, self.labels.get(v), value.dtype, self.space.batch)

    def type_of(self, v: int) -> TileType:
        value, labels = self.graph.values[v], self.labels.get(v)
        tile = labels is not None and not self.space.of_batch(labels)
        return TileType(tile, row_shape(value.shape, labels), value.dtype)

    def for_rows(self, x: int, t: TileType) -> int:
        """``x`` as a ``t``: if ``t`` has rows, a value that is the same for all rows of a tile is repeated for each."""
        have = self.types[x]
        if have == t:
            return x
        if have.tile or (have.shape, have.dtype) != (t.shape, t.dtype):
            raise ValueError(f"a carry of a loop is {have} in one step and {t} in another")
        return self.broadcast(x, t, range(1, 1 + len(t.shape)))


def same_for_all(stage: StageBuilder, op: Op) -> bool:
    """Whether ``op`` reads nothing that streams, in a stream of one row: it is computed once, and its result repeated."""
    streams = any(v in stage.labels for v in op.inputs) or any(axes for v in op.outputs for axes in stage.labels.get(v, ()))
    return not streams and not stage.space.sizes and any(v in stage.labels for v in op.outputs)


# --- Sums of ``values * e^(scores - largest)`` ------------------------------------------------------------------------------------


class ScaledRows:
    """Rows of a stage scaled for a sum of ``values * e^(scores - largest)`` that knows the scores of one tile only
    (``scatter_exp_sum``): by the largest score of their run in the tile (``run_max``).

    The sink's state is a pair (m, sum); two states add up at max(m1, m2), to which each sum is scaled first (``sink_at`` with a
    third operand). Sums of the same scores by the same index share their factors.
    """

    def __init__(self, writer: Writer):
        self.writer = writer
        self.factors: dict[tuple[int, int], tuple[int, int]] = {}  # (index, scores) -> (tops, factor)

    def operands(self, values: int, index: int, scores: int, n: int, ones: bool) -> list[int]:
        """(rows, index, tops) of the sink: ``values`` times the factor of their row, and the largest score of their run. ``ones``:
        every element of ``values`` is the constant 1."""
        tops, factor = self._factor(index, scores, n)
        w, t = self.writer, self.writer.types[values]
        have = w.types[factor].shape
        if ones and have == t.shape:
            return [factor, index, tops]
        if have != t.shape:
            factor = w.broadcast(factor, t, range(1 + len(have)))
        return [w.add("mul", (values, factor), t), index, tops]

    def _factor(self, index: int, scores: int, n: int) -> tuple[int, int]:
        if (index, scores) not in self.factors:
            w, t = self.writer, self.writer.types[scores]
            tops = w.add("run_max", (scores, index), t, n=n)
            # A run of -inf only adds nothing to other runs: e^(-inf - 0).
            finite = w.op("is_finite", tops, dtype="bool")
            used = w.add("select_n", (finite, w.literal(0.0, t.dtype), tops), t)
            self.factors[index, scores] = tops, w.op("exp", w.op("sub", scores, used))
        return self.factors[index, scores]


# --- Powers of 16-bit numbers -----------------------------------------------------------------------------------------------------


_ROUNDED_ONCE = (-1, 0, 1, 2)  # exponents of powers that one operator computes


def write_power(w: Writer, x: int, y: int) -> int:
    """``x**y`` for an integer y as the products and the quotient that JAX makes of it, each of which is rounded."""
    result, square, left = -1, x, abs(y)
    while left:
        if left & 1:
            result = square if result < 0 else w.op("mul", result, square)
        left >>= 1
        if left:
            square = w.op("square", square)
    return result if y > 0 else w.op("div", w.literal(1.0, w.types[x].dtype), result)


# --- Slices and updates at computed places: elements selected inside rows (``take``), and a choice between two --------------------


def write_slice(w: Writer, x: int, starts: Sequence[int], dims: Sequence[int], sizes: Sequence[int]) -> int:
    """``sizes`` elements of the tile ``x`` along ``dims`` (rows first) from ``starts`` on."""
    for d, size, start in zip(dims, sizes, starts, strict=True):
        first = _clamped(w, start, w.types[x].shape[d - 1] - size)
        x = _take(w, x, w.op("add", _count(w, size), first), d)
    return x


def write_update(w: Writer, x: int, update: int, starts: Sequence[int], dims: Sequence[int]) -> int:
    """The tile ``x`` with the tile ``update`` along ``dims`` (rows first) from ``starts`` on."""
    whole, mask = w.types[x], -1
    for d, start in zip(dims, starts, strict=True):
        n, size = whole.shape[d - 1], w.types[update].shape[d - 1]
        first = _clamped(w, start, n - size)
        if size == 1:  # for example of a cache of keys: repeat it, and select it in one place
            here = w.op("eq", _count(w, n), first, dtype="bool")
            t = w.types[update]
            t = TileType(True, (*t.shape[: d - 1], n, *t.shape[d:]), t.dtype)
            update = w.broadcast(update, t, range(1 + len(t.shape)))
        else:
            place = w.op("sub", _count(w, n), first)
            last = w.literal(size - 1, "int32")
            nearest = w.op("min", w.op("max", place, w.literal(0, "int32")), last)
            here = w.op("eq", place, nearest, dtype="bool")
            update = _take(w, update, nearest, d)
        wide = w.broadcast(here, TileType(True, whole.shape, "bool"), (d,))
        mask = wide if mask < 0 else w.op("and", mask, wide)
    return update if mask < 0 else w.add("select_n", (mask, x, update), whole)


def _clamped(w: Writer, start: int, most: int) -> int:
    """``start`` as an int32 in [0, most], so that the window lies inside the array."""
    dtype = w.types[start].dtype
    return w.convert(w.op("min", w.op("max", start, w.literal(0, dtype)), w.literal(most, dtype)), "int32")


def _count(w: Writer, n: int) -> int:
    return w.add("iota", (), TileType(False, (n,), "int32"), shape=(n,), dimension=0)


def _take(w: Writer, x: int, index: int, d: int) -> int:
    t, (size,) = w.types[x], w.types[index].shape
    made = TileType(True, (*t.shape[: d - 1], size, *t.shape[d:]), t.dtype)
    return w.add("take", (x, index), made, axis=d, mode="promise_in_bounds", fill=0)


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
    return blocked(program, builder.made[value], builder.stage(0).dims(value).local(dim), elements, plan.edge)


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
        return StageBuilder(self, s, self.graph, self.labels)

    def _array(self, v: int) -> ArrayType:
        value, labels = self.graph.values[v], self.labels.get(v)
        if labels is None:
            return ArrayType(value.shape, value.dtype, False)
        dims = tuple(d for d, axes in enumerate(labels) if not axes)
        strides = row_strides(value.shape, labels, self.region.space)
        return ArrayType(value.shape, value.dtype, not self.region.space.of_batch(labels), strides, dims)

    def _is_one(self, stage: StageBuilder, v: int) -> bool:
        """Whether ``v`` is the constant 1, repeated."""
        spread = next((i for i in stage.body if v in i.outputs and i.kind == "broadcast_in_dim"), None)
        return spread is not None and self.literals.get(spread.inputs[0]) == 1

    def _stage(self, s: int) -> list[Instr]:
        stage = self.stage(s)
        scaled = ScaledRows(stage)
        for i in self.plan.stages[s].ops:
            op, stage.about = self.graph.ops[i], i
            if any(i in sums for sums in self.sums.values()):
                continue  # it is in the loop
            if op.body is not None:
                self._loop(stage, op, [v in self.output_number for v in op.outputs], self.sums[i])
                for v in op.outputs[: op["carries"]]:
                    if v in stage.ids:
                        self._push_or_store(stage, v)
                continue
            if OPS[op.kind].family == "window":
                self._push_or_store(stage, self._window(stage, op))
                continue
            local, inputs = self._operands(stage, op)
            if op.kind in ONLINE and op.outputs[0] in self.output_number:
                values, index, scores = inputs
                inputs = scaled.operands(values, index, scores, op["n"], self._is_one(stage, values))
            if local.kind in SINKS:
                if local.kind == "sink_at" and self.plan.order is not None:  # the promise was made for another order
                    params = {**dict(local.params), "sorted": op.inputs[1] == self.plan.order}
                    local = dataclasses.replace(local, params=make_params(**params))
                if i in self.plan.unordered:
                    local = dataclasses.replace(local, params=make_params(**dict(local.params), unordered=True))
                self._sink(stage, inputs, local, op.inputs[0], op.outputs[0])
                continue
            self._push_or_store(stage, self._add(stage, op, local, inputs))
        self.made.update(stage.ids)
        return stage.body

    def _operands(self, stage: StageBuilder, op: Op, result: Value | None = None) -> tuple[LocalOp, list[int]]:
        """The rows-first form of an op of the table, and its operands. ``result``: of a sum, which no row has."""
        local = LocalOp(op.kind, op.params)  # of values that are the same for all rows
        family = OPS[op.kind].family
        still = result is None and same_for_all(stage, op)
        if not still and (result is not None or any(v in stage.labels for v in (*op.inputs, *op.outputs))):
            ins = [stage.dims(v) for v in op.inputs]
            if family != "dot":
                ins = [dataclasses.replace(x, batch=0) if x.batch else x for x in ins]
            made = stage.dims(op.outputs[0]) if result is None else Dims(result.shape, None, result.dtype)
            local = OPS[op.kind].local(op, ins, made)
        inputs = [self._read(stage, v) for v in op.inputs]
        if family != "dot":
            inputs = [self._as_tile(stage, v, x) for v, x in zip(op.inputs, inputs, strict=True)]
        if local.squeeze is not None:
            inputs[0] = stage.reshape(inputs[0], local.squeeze)
        if local.swap:
            inputs.reverse()
        if still:
            return local, inputs
        if family in ("pointwise", "concatenate") and any(v in stage.labels for v in op.outputs):
            # In a stream of one row, stationary values may have the shape of values that stream.
            for k, t in enumerate([self.values[x] for x in inputs]):
                if t.shape:
                    inputs[k] = stage.for_rows(inputs[k], dataclasses.replace(t, tile=True))
        if family == "pointwise":  # a scalar may be a tile
            shape = stage.type_of(op.outputs[0]).shape
            for k, t in enumerate([self.values[x] for x in inputs]):
                if t.tile and t.shape != shape:
                    inputs[k] = stage.broadcast(inputs[k], TileType(True, shape, t.dtype), (0,))
        return local, inputs

    def _add(self, stage: StageBuilder, op: Op, local: LocalOp, inputs: list[int]) -> int:
        """Append the rows-first form of an op. Returns the graph value that it makes."""
        (out,) = op.outputs
        t = stage.type_of(out)
        if op.kind == "integer_pow" and is_narrow(t.dtype) and op["y"] not in _ROUNDED_ONCE:
            made = write_power(stage, inputs[0], op["y"])
        else:
            own = dataclasses.replace(t, tile=t.tile and not same_for_all(stage, op))
            made = stage.add(local.kind, inputs, own, **dict(local.params))
        stage.ids[out] = stage.for_rows(made, t)
        return out

    def _window(self, stage: StageBuilder, op: Op) -> int:
        """Append a slice or an update at a computed place. Returns the graph value that it makes."""
        (out,), arrays = op.outputs, 2 if op.kind == "dynamic_update_slice" else 1
        dims: Any = dict(OPS[op.kind].local(op, [], stage.dims(out)).params)["dims"]
        tiles = []
        for v in op.inputs[:arrays]:  # a stationary array is repeated for each row
            tiles.append(stage.for_rows(self._read(stage, v), dataclasses.replace(stage.type_of(v), tile=True)))
        starts = [self._read(stage, v) for v in op.inputs[arrays:]]
        if arrays == 2:
            stage.ids[out] = write_update(stage, tiles[0], tiles[1], starts, dims)
        else:
            stage.ids[out] = write_slice(stage, tiles[0], starts, dims, op["sizes"])
        return out

    def _read(self, stage: StageBuilder, v: int) -> int:
        """The SSA value of graph value ``v`` in the stage: defined here, popped, loaded, or a literal."""
        if v in stage.ids:
            return stage.ids[v]
        s, value = stage.number, stage.graph.values[v]
        new = stage.ids[v] = stage.new(stage.type_of(v))
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
            about, stage.about = stage.about, -1  # other ops read it as well
            stage.repeated[v] = stage.for_rows(x, dataclasses.replace(self.values[x], tile=True))
            stage.about = about
        return stage.repeated[v]

    def _sink(self, stage: StageBuilder, inputs: list[int], local: LocalOp, x: int, out: int) -> None:
        if out in self.output_number:
            params, number = dict(local.params), len(self.sinks)
            dtype = params.get("accumulate", self.graph.values[x].dtype)
            shape = row_shape(self.graph.values[out].shape, self.labels.get(out))  # of one batch, where each has its own sum
            self.sinks.append(SinkType(params.pop("how", "sum"), shape, dtype, self.output_number[out]))
            stage.write(local.kind, inputs, sink=number, **params)

    def _push_or_store(self, stage: StageBuilder, v: int) -> None:
        for q in self.outgoing.get((stage.number, v), ()):
            stage.write("push", (stage.ids[v],), queue=q)
        if v in self.output_number:
            stage.write("store", (stage.ids[v],), array=self.output_number[v])

    # --- loops ------------------------------------------------------------------------------------------------------------------

    def _loop(self, stage: StageBuilder, op: Op, wanted: Sequence[bool], sums: Mapping[int, Op]) -> None:
        """Append a loop, whose steps load slices of the arrays xs and store slices of the arrays ys. ``wanted``: for each result,
        whether anybody reads it; the others are not computed. ``sums``: the graph's sums over its steps, as ops of its body."""
        p, carries = parts(op), op["carries"]
        labels = labels_inside(OPS, op, [stage.labels.get(v) for v in (*op.inputs, *op.outputs)])
        inner = StageBuilder(self, stage.number, body_of(op), labels)
        inner.about = stage.about
        deeper = [_sums_of(body_op, sums) for body_op in inner.graph.ops]
        here = {k: step for k, step in sums.items() if not any(k in d for d in deeper)}
        live = self._live(op, wanted, sums)
        kept = [k for k in range(carries) if p.in_carries[k] in live]
        for outside, v in zip(p.consts, p.in_consts, strict=True):
            if v in live:
                x, t = self._read(stage, outside), inner.type_of(v)
                # In a stream of one row, the body may stream values that are stationary around the loop.
                inner.ids[v] = stage.for_rows(x, t) if t.tile and t.shape and not self.values[x].tile else x
        initial, carried = [], []
        for k in kept:
            v = p.in_carries[k]
            initial.append(stage.for_rows(self._read(stage, p.initial[k]), inner.type_of(v)))
            inner.ids[v] = inner.new(inner.type_of(v))
            carried.append(inner.ids[v])
        number = inner.new(TileType(False, (), "int32"))
        for outside, v in zip(p.xs, p.in_xs, strict=True):
            if v in live:
                self._cut(stage, inner, outside, v, number)
        for body_op, added in zip(inner.graph.ops, deeper, strict=True):
            if live.isdisjoint(body_op.outputs):
                continue
            if body_op.body is not None:
                used = self._live(op, wanted, {k: step for k, step in sums.items() if k not in added})
                self._loop(inner, body_op, [v in used for v in body_op.outputs], added)
            elif OPS[body_op.kind].family == "window":
                self._window(inner, body_op)
            else:
                self._add(inner, body_op, *self._operands(inner, body_op))
        final = [p.final[k] for k in kept]
        results = [inner.for_rows(self._read(inner, p.in_next[k]), inner.type_of(p.in_carries[k])) for k in kept]
        for k, (outside, v) in enumerate(zip(p.ys, p.in_ys, strict=True), carries):
            if wanted[k] and stage.graph is self.graph:
                self._store(inner, outside, v, number)
            elif wanted[k]:
                self._paste(stage, inner, outside, v, number, (initial, carried, results))
                final.append(outside)
        for k, step in here.items():
            inner.about = k
            local, inputs = self._operands(inner, step, self.graph.values[step.outputs[0]])
            self._sink(inner, inputs, local, self.graph.ops[k].inputs[0], step.outputs[0])
        block = LoopBody(number, tuple(carried), tuple(inner.body), tuple(results))
        outs = [stage.new(self.values[v]) for v in carried]
        stage.ids.update(zip(final, outs, strict=True))
        params = make_params(count=op["length"], reverse=op["reverse"])
        stage.body.append(Instr("loop", tuple(initial), tuple(outs), params, stage.about, block))

    @staticmethod
    def _live(op: Op, wanted: Sequence[bool], sums: Mapping[int, Op]) -> set[int]:
        """The values of the loop's body that its ``wanted`` results and ``sums`` need."""
        added = {v for step in sums.values() for v in step.inputs}
        return added | live_inside(op, [want or v in added for want, v in zip(wanted, body_of(op).outputs, strict=True)])

    def _cut(self, stage: StageBuilder, inner: StageBuilder, x: int, slice_: int, number: int) -> None:
        """Set ``slice_`` of the body to the slice of ``x`` for step ``number``."""
        t = inner.type_of(slice_)
        if stage.graph is not self.graph:
            whole = self._read(stage, x)
            have = self.values[whole]
            part = inner.add("cut", (whole, number), TileType(have.tile, have.shape[1:], have.dtype))
            inner.ids[slice_] = inner.for_rows(part, t)
            return
        if x not in self.input_number:
            raise ValueError("a loop takes slices of an array that is made in its own region")
        thick = dataclasses.replace(t, shape=(1, *t.shape))
        part = inner.add("load_slice", (number,), thick, array=self.input_number[x], dims=(0,), steps=(1,), sizes=(1,))
        inner.ids[slice_] = inner.reshape(part, t.rows_first)

    def _store(self, inner: StageBuilder, y: int, slice_: int, number: int) -> None:
        """Store ``slice_`` of the body as the slice of ``y`` for step ``number``."""
        array = self.outputs[self.output_number[y]]
        t = TileType(array.streamed, inner.type_of(slice_).shape, array.dtype)
        value = inner.for_rows(self._read(inner, slice_), t)
        thick = inner.reshape(value, dataclasses.replace(t, shape=(1, *t.shape)).rows_first)
        inner.write("store_slice", (thick, number), array=self.output_number[y], dims=(0,), steps=(1,), sizes=(1,))

    def _paste(self, stage: StageBuilder, inner: StageBuilder, y: int, slice_: int, number: int, loop: Sequence[list[int]]) -> None:
        """Make ``y``, which other loops of the same step read, one more carry of ``loop``, its (initial, carried, results)."""
        t = stage.type_of(y)
        value = inner.for_rows(self._read(inner, slice_), TileType(t.tile, t.shape[1:], t.dtype))
        empty, before = stage.add("empty", (), t), inner.new(t)
        after = inner.add("paste", (before, value, number), t)
        for values, v in zip(loop, (empty, before, after), strict=True):
            values.append(v)


# --- Calls ------------------------------------------------------------------------------------------------------------------------


def assemble(
    parts: Sequence[tuple[int, TileProgram, Sequence[int], Sequence[int]]], operands: Sequence[int], results: Sequence[int]
) -> Program:
    """The call that reads the graph values ``operands`` and returns ``results``. Each of ``parts``: (phase, program, the values it
    reads, the values it makes)."""
    given = [v for _, _, _, gives in parts for v in gives]
    returned = set(results)
    order = [*operands, *results, *(v for v in given if v not in returned)]
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
