"""Graph + Region + Plan -> TileProgram, and several of those -> the Program of a call.

Every stage of the plan becomes one body: loads and pops where a value is first needed, the rows-first form of each op
(``OpSpec.local``), then pushes, stores and sinks right behind the value they take, so that a target can compute straight into
place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.graph import Graph, Scalar, make_params
from kitsune_jax.ops.local import Dims, LocalOp
from kitsune_jax.ops.online import ONLINE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.program.blocks import blocked
from kitsune_jax.program.ir import (
    ROWS,
    SINKS,
    Array,
    ArrayType,
    Instr,
    Part,
    Program,
    QueueType,
    SinkType,
    StageProgram,
    TileProgram,
    TileType,
)
from kitsune_jax.program.online import Scaled
from kitsune_jax.streams.space import Region, row_shape, row_strides


def build(graph: Graph, region: Region, plan: Plan) -> TileProgram:
    """The tile program of ``region`` as ``plan`` arranges it. Raises ``ValueError`` for a plan that does not cover its ops.

    Its inputs are those of the region and, where the plan has an order, the permutation that puts the rows into it.
    """
    covered = {i for stage in plan.stages for i in stage.ops}  # makers may stand in several stages
    if covered != set(region.ops):
        raise ValueError(f"the plan's stages cover ops {sorted(covered)}, the region has {sorted(region.ops)}")
    builder = _Builder(graph, region, plan)
    program = builder.run()
    if plan.blocks is None:
        return program
    value, dim, elements = plan.blocks
    return blocked(program, builder.made[value], builder.dims(value).local(dim), elements)


def assemble(
    parts: Sequence[tuple[int, TileProgram, Sequence[int], Sequence[int]]], operands: Sequence[int], results: Sequence[int]
) -> Program:
    """The call that reads the graph values ``operands`` and gives ``results``; each of ``parts`` is (phase, program, the values it
    reads, those it gives)."""
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


@dataclasses.dataclass
class _Stage:
    """A stage under construction. ``ids``: graph value -> its SSA value in this stage; ``spread``: ... -> the tile that repeats it
    for each row."""

    body: list[Instr]
    ids: dict[int, int]
    spread: dict[int, int] = dataclasses.field(default_factory=dict)


class _Builder:
    def __init__(self, graph: Graph, region: Region, plan: Plan):
        self.graph, self.region, self.plan = graph, region, plan
        self.labels = region.label_of()
        self.values: list[TileType] = []
        self.literals: dict[int, Scalar] = {}
        self.input_number = {v: k for k, v in enumerate(region.inputs)}
        self.output_number = {v: k for k, v in enumerate(region.outputs)}
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
            outputs=tuple(self._array(v) for v in self.region.outputs),
            values=tuple(self.values),
            literals=tuple(self.literals.items()),
            stages=stages,
            queues=tuple(QueueType(q.producer, q.consumers, self._type_of(q.value), q.depth) for q in self.plan.queues),
            sinks=tuple(self.sinks),
            workers=self.plan.workers,
            batch_axes=self.region.space.batch,
            order=len(self.region.inputs) if ordered else None,
        )

    def _array(self, v: int) -> ArrayType:
        value, labels = self.graph.values[v], self.labels.get(v)
        if labels is None:
            return ArrayType(value.shape, value.dtype, False)
        dims = tuple(d for d, axes in enumerate(labels) if not axes)
        strides = row_strides(value.shape, labels, self.region.space)
        return ArrayType(value.shape, value.dtype, not self.region.space.of_batch(labels), strides, dims)

    def dims(self, v: int) -> Dims:
        value = self.graph.values[v]
        return Dims(value.shape, self.labels.get(v), value.dtype, self.region.space.batch)

    def _type_of(self, v: int) -> TileType:
        value, labels = self.graph.values[v], self.labels.get(v)
        tile = labels is not None and not self.region.space.of_batch(labels)
        return TileType(tile, row_shape(value.shape, labels), value.dtype)

    def _new(self, t: TileType) -> int:
        self.values.append(t)
        return len(self.values) - 1

    def _literal(self, scalar: Scalar, dtype: str) -> int:
        new = self._new(TileType(False, (), dtype))
        self.literals[new] = scalar
        return new

    def _is_one(self, stage: _Stage, v: int) -> bool:
        """Is ``v`` the constant 1, repeated?"""
        spread = next((i for i in stage.body if v in i.outputs and i.kind == "broadcast_in_dim"), None)
        return spread is not None and self.literals.get(spread.inputs[0]) == 1

    def _stage(self, s: int) -> list[Instr]:
        stage = _Stage([], {})
        scaled = Scaled(stage.body, self.values, self._new, self._literal, lambda v: self._is_one(stage, v))
        for i in self.plan.stages[s].ops:
            op = self.graph.ops[i]
            ins, outs = ([self.dims(v) for v in values] for values in (op.inputs, op.outputs))
            inputs = [self._read(stage, s, v) for v in op.inputs]
            if OPS[op.kind].family != "dot":
                ins = [dataclasses.replace(x, batch=0) for x in ins]
                inputs = [self._as_tile(stage, v, x) for v, x in zip(op.inputs, inputs, strict=True)]
            local = OPS[op.kind].local(op, ins, outs[0])
            if local.squeeze is not None:
                inputs[0] = self._squeeze(stage, inputs[0], local.squeeze, i)
            if local.swap:
                inputs.reverse()
            if op.kind in ONLINE and op.outputs[0] in self.output_number:
                values, index, scores = inputs
                inputs = scaled.operands(values, index, scores, op["n"], i)
            if local.kind in SINKS:
                if local.kind == "sink_at" and self.plan.order is not None:  # what was promised held in another order
                    params = {**dict(local.params), "sorted": op.inputs[1] == self.plan.order}
                    local = dataclasses.replace(local, params=make_params(**params))
                self._sink(stage, inputs, local, op.inputs[0], op.outputs[0], i)
                continue
            (out,) = op.outputs
            stage.ids[out] = self._new(self._type_of(out))
            stage.body.append(Instr(local.kind, tuple(inputs), (stage.ids[out],), local.params, i))
            self._hand_on(stage, s, out, i)
        self.made.update(stage.ids)
        return stage.body

    def _read(self, stage: _Stage, s: int, v: int) -> int:
        """The SSA value of graph value ``v`` in stage ``s``: defined here, popped, loaded, or a literal."""
        if v in stage.ids:
            return stage.ids[v]
        new = stage.ids[v] = self._new(self._type_of(v))
        value = self.graph.values[v]
        if value.literal is not None:
            self.literals[new] = value.literal
        elif (s, v) in self.incoming:
            stage.body.append(Instr("pop", (), (new,), make_params(queue=self.incoming[s, v])))
        elif v in self.input_number:
            stage.body.append(Instr("load", (), (new,), make_params(array=self.input_number[v])))
        else:
            raise ValueError(f"stage {s} needs value {v}, which no queue brings")
        return new

    def _as_tile(self, stage: _Stage, v: int, x: int) -> int:
        """``x``, which graph value ``v`` is; repeated for each row where it is the same for all rows of a batch."""
        if not self.region.space.of_batch(self.labels.get(v)):
            return x
        if v not in stage.spread:
            t = self.values[x]
            stage.spread[v] = self._new(TileType(True, t.shape, t.dtype))
            params = make_params(shape=(ROWS, *t.shape), dims=tuple(range(1, 1 + len(t.shape))))
            stage.body.append(Instr("broadcast_in_dim", (x,), (stage.spread[v],), params))
        return stage.spread[v]

    def _squeeze(self, stage: _Stage, x: int, sizes: tuple[int, ...], op: int) -> int:
        t = self.values[x]
        new = self._new(TileType(t.tile, sizes[1:] if t.tile else sizes, t.dtype))
        stage.body.append(Instr("reshape", (x,), (new,), make_params(new_sizes=sizes), op))
        return new

    def _sink(self, stage: _Stage, inputs: list[int], local: LocalOp, x: int, out: int, op: int) -> None:
        params = dict(local.params)
        result = self.graph.values[out]
        if out in self.output_number:
            number = len(self.sinks)
            dtype = params.get("accumulate", self.graph.values[x].dtype)
            self.sinks.append(SinkType(params.pop("how", "sum"), result.shape, dtype, self.output_number[out]))
            stage.body.append(Instr(local.kind, tuple(inputs), (), make_params(sink=number, **params), op))

    def _hand_on(self, stage: _Stage, s: int, v: int, op: int) -> None:
        new = stage.ids[v]
        for q in self.outgoing.get((s, v), ()):
            stage.body.append(Instr("push", (new,), (), make_params(queue=q), op))
        if v in self.output_number:
            stage.body.append(Instr("store", (new,), (), make_params(array=self.output_number[v]), op))
