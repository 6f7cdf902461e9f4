"""The program of one device: a Graph whose operands are sharded, evaluated on shards, with collectives where values meet.

Comes in: a Graph, the sizes of mesh axes, and the sharding of each operand. Goes out: ``plan_graph``, the shardings in which every
op reads and makes its values; ``evaluate``, which runs the ops by JAX on shards, inside a manual mesh. Each op is decided from its
dimension relations alone: parallel dimensions keep the axes of their operands, the parts of a contracted one are folded by a
collective, and every other dimension is whole. Invariant: the results are those of the Graph, whatever the shardings are.

A dimension whose size is no multiple of its shards is padded behind its end. What the padding holds is never defined, so it is
replaced by the identity of a fold before it is contracted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.ops.graph import Graph, Op, Value
from kitsune_jax.ops.loops import body_of, parts
from kitsune_jax.ops.reduce import filling
from kitsune_jax.ops.spec import DimRelation, Shapes, name_of, np_dtype
from kitsune_jax.ops.table import OPS
from kitsune_jax.sharding import moves
from kitsune_jax.sharding.moves import Axes, Mesh, Moves, Spec
from kitsune_jax.sharding.softmax import DividedSoftmax, divided_softmaxes, own_row, scaled

# Of bools "and" is the minimum. XLA's CPU client has no collective for the bits of integers: their parts are gathered.
_FOLDED = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
_FOLDED_BOOLS = {"and": lax.pmin, "or": lax.pmax}
_INDEX_OF = {"argmax": "max", "argmin": "min"}
_GATHERED = frozenset({"and", "or", "xor"})
# A row that a table lacks here is 0 in a sum over devices: reading a sharded table costs the rows that are read, not the table.
_READ_BY_PARTS = 2.0


@dataclasses.dataclass(frozen=True)
class OpPlan:
    """``reads``, ``makes``: the shardings of operands and results. ``folded``: the axes over which the result is folded, in the
    sharding ``before`` it is. ``rows``: the axes that divide the rows of the table that a ``take`` reads, a sum by index makes or
    an update writes to, each device those that it has. ``body``: of a loop. ``moves``: of the elements of a slice, or of an op that
    puts such together."""

    reads: tuple[Spec, ...]
    makes: tuple[Spec, ...]
    folded: Axes = ()
    before: Spec = ()
    rows: Axes = ()
    body: GraphPlan | None = None
    moves: Moves | None = None


@dataclasses.dataclass(frozen=True)
class _Collective:
    """A fold over the devices along ``axes``, such as a "sum". The parts of the value have the sharding
    ``before``, the result has ``after``."""

    how: str
    axes: Axes
    before: Spec
    after: Spec

    def transposed(self, permutation: Sequence[int]) -> _Collective:
        before, after = (tuple(spec[d] for d in permutation) for spec in (self.before, self.after))
        return dataclasses.replace(self, before=before, after=after)


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    """``ops``: one plan for each op; None for an op that is evaluated where it is read, in the sharding of its reader. ``specs``:
    the sharding in which each value is made; None for a literal, and for a value of such an op. ``outputs``: of the results."""

    ops: tuple[OpPlan | None, ...]
    specs: tuple[Spec | None, ...]
    outputs: tuple[Spec, ...]


def whole(value: Value) -> Spec:
    """The sharding of an array that every device has."""
    return ((),) * len(value.shape)


def shards(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh[a] for a in axes)


def local_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one shard.

    >>> local_shape((10, 4), (("x",), ()), {"x": 4})
    (3, 4)
    """
    return tuple(-(-n // shards(axes, mesh)) for n, axes in zip(shape, spec, strict=True))


# --- the shardings of all values ------------------------------------------------------------------------------------------------


def plan_graph(
    graph: Graph, inputs: Sequence[Spec], mesh: Mesh, wanted: Sequence[Spec | None] = (), gathers_rows: bool = False
) -> GraphPlan:
    """The plan of ``graph`` for operands of these shardings. ``wanted``: the sharding that is asked for of each result, or None; a
    result has it where that takes no gather, or one that an op reads too. A sum of which all readers want a part is scattered to
    them. ``gathers_rows``: rows that are summed by index into a table are gathered, where otherwise the table would be summed over
    the devices and that moves more. So XLA does inside of a partly manual ``shard_map``; elsewhere it sums the tables, with a
    collective less."""
    plan = _forward(graph, inputs, mesh, wanted, {}, gathers_rows)
    parts_wanted = _parts_wanted(graph, plan, mesh, wanted or [None] * len(graph.outputs), gathers_rows)
    return _forward(graph, inputs, mesh, wanted, parts_wanted, gathers_rows) if parts_wanted else plan


def _forward(
    graph: Graph,
    inputs: Sequence[Spec],
    mesh: Mesh,
    wanted: Sequence[Spec | None],
    parts_wanted: Mapping[int, Spec],
    gathers_rows: bool,
) -> GraphPlan:
    """``parts_wanted``: values that their makers scatter or make in parts, with the shardings that they shall have."""
    specs: list[Spec | None] = [None] * len(graph.values)
    for v, spec in zip(graph.inputs, inputs, strict=True):
        specs[v] = spec
    # And those of values that are evaluated where they are read: as what they are made of. A product that reads nothing but such
    # values, as of ``one_hot(ids)``, is divided as the ids are.
    offered = list(specs)
    plans = list[OpPlan | None]()
    for op in graph.ops:
        if _is_free(op, graph, specs):
            plans.append(None)
            if op.inputs:
                offered[op.outputs[0]] = _plan_op(op, graph, offered, mesh).makes[0]
            continue
        if op.body is not None:
            plan = _plan_loop(op, graph, specs, mesh, parts_wanted, gathers_rows)
        elif (wish := _wish(op, graph, offered[op.inputs[0]], mesh) if op.inputs else None) is not None:
            plan = OpPlan((wish,), (wish,), (), wish)
        else:
            (v,) = op.outputs
            plan = _plan_op(op, graph, offered, mesh, parts_wanted.get(v))
            if op.kind in moves.KINDS and (found := moves.moves_of(op, graph, specs, mesh, plan.makes[0])) is not None:
                plan = _in_moves(plan, found, op)
            if v in parts_wanted and _scatters(op, graph, plan, parts_wanted[v], mesh):
                plan = _in_parts(op, graph, plan, parts_wanted[v], gathers_rows)
        plans.append(plan)
        for v, spec in zip(op.outputs, plan.makes, strict=True):
            specs[v] = offered[v] = spec
    asked = wanted or [None] * len(graph.outputs)
    known = {pair for op, made in zip(graph.ops, plans, strict=True) if made for pair in zip(op.inputs, made.reads, strict=True)}
    outputs = [
        _result_spec(graph.values[v], want if (v, want) in known else offered[v], want, mesh)
        for v, want in zip(graph.outputs, asked, strict=True)
    ]
    return GraphPlan(tuple(plans), tuple(specs), tuple(outputs))


def _wish(op: Op, graph: Graph, have: Spec | None, mesh: Mesh) -> Spec | None:
    """The sharding that the user asks for, where ``op`` is a sharding constraint on a value that is made as ``have``."""
    parts = dict(op.params).get("parts") if op.kind == "copy" else None
    if parts is None:
        return None
    value = graph.values[op.inputs[0]]
    have = whole(value) if have is None else have
    if any(axis not in mesh for axes in parts for axis in axes or ()):
        return have  # the operands have no such mesh
    asked = {axis for axes in parts for axis in axes or ()}
    found = (_prefix(mine, asked) if axes is None else axes for mine, axes in zip(have, parts, strict=True))
    return tuple(axes if n > 1 else () for n, axes in zip(value.shape, found, strict=True))


def _in_moves(plan: OpPlan, found: Moves, op: Op) -> OpPlan:
    reads = dict(found.reads)
    made = plan.makes[0]
    made = (*made[: found.dim], () if found.summed else found.axes, *made[found.dim + 1 :])
    return OpPlan(tuple(reads.get(v, spec) for v, spec in zip(op.inputs, plan.reads, strict=True)), (made,), (), made, moves=found)


def _parts_wanted(graph: Graph, plan: GraphPlan, mesh: Mesh, wanted: Sequence[Spec | None], gathers_rows: bool) -> dict[int, Spec]:
    """The sums, products, and results of loops, of which all readers take the same part, which ops that keep elements in place hand
    back. And, with their own sharding, the sums by index whose rows are gathered."""
    asked: dict[int, set[Spec | None]] = {}
    for v, spec, want in zip(graph.outputs, plan.outputs, wanted, strict=True):
        asked.setdefault(v, set()).add(spec if want is None else want)
    found: dict[int, Spec] = {}
    for op, made in zip(reversed(graph.ops), reversed(plan.ops), strict=True):
        wants = [next(iter(asked[v])) if len(asked.get(v, ())) == 1 else None for v in op.outputs]
        if made is None:
            for v in op.inputs:
                asked.setdefault(v, set()).add(None)
            continue
        for v, want, have in zip(op.outputs, wants, made.makes, strict=True):
            by_index = gathers_rows and op.body is None and OPS[op.kind].family == "scatter" and bool(made.folded)
            loop_or_product = op.body is not None or op.kind == "dot_general"
            if want is not None and want != have and (loop_or_product or _scatters(op, graph, made, want, mesh)):
                found[v] = want
            elif by_index and _adds_less_than_a_table(op, graph, all_reduced=True):
                found[v] = have
        for k, v in enumerate(op.inputs):
            reads: Spec | None = made.reads[k]
            if op.body is None and wants[0] is not None and "parts" not in dict(op.params):
                reads = _handed_back(op, graph.values[v], graph.values[op.outputs[0]], wants[0]) or reads
            asked.setdefault(v, set()).add(reads)
    return found


def _scatters(op: Op, graph: Graph, made: OpPlan, want: Spec, mesh: Mesh) -> bool:
    """Can each device make its part of the sharding ``want``: of a sum over devices, or of the rows of a sum by index?"""
    value = graph.values[op.outputs[0]]
    fits = all(w[: len(h)] == h for h, w in zip(made.makes[0], want, strict=True))
    even = not any(n % shards(axes, mesh) for n, axes in zip(value.shape, want, strict=True))
    if not (fits and even and OPS[op.kind].fold == "sum" and OPS[op.kind].sink):
        return False
    known = {axis for spec in (*made.reads, *made.makes) for axes in spec for axis in axes}
    for d, (have, wanted) in enumerate(zip(made.makes[0], want, strict=True)):
        more = set(wanted[len(have) :])
        by_index = OPS[op.kind].family == "scatter" and d == op["axis"]
        folded = set(made.folded)
        by_index = by_index and more.isdisjoint(known - folded)
        by_index = by_index and (more.isdisjoint(folded) or _adds_less_than_a_table(op, graph, all_reduced=False))
        if not (more <= set(made.folded) or by_index):
            return False
    return True


def _in_parts(op: Op, graph: Graph, plan: OpPlan, want: Spec, gathers_rows: bool) -> OpPlan:
    """``plan`` with a result in the parts ``want``. A sum by index into a table that is larger than all that is added gathers the
    numbers and their indices, and each device adds those of its rows: no device has the whole table. With ``gathers_rows`` it
    gathers them too where the table is in no more parts than before, and nothing is summed over devices."""
    if OPS[op.kind].family != "scatter":
        return dataclasses.replace(plan, makes=(want,))
    d = op["axis"]
    more = want[d][len(plan.before[d]) :]
    whole = gathers_rows and want == plan.before
    gathered = set(plan.folded) if whole else set(more) & set(plan.folded)
    if gathered:
        if not _adds_less_than_a_table(op, graph, all_reduced=whole):
            return dataclasses.replace(plan, makes=(want,))
        reads = tuple(tuple(_prefix(axes, gathered) for axes in spec) for spec in plan.reads)
        divided = {axis for spec in reads for axes in spec for axis in axes}
        plan = dataclasses.replace(plan, reads=reads, folded=tuple(a for a in plan.folded if a in divided))
    return dataclasses.replace(plan, makes=(want,), before=(*plan.before[:d], want[d], *plan.before[d + 1 :]), rows=more)


def _adds_less_than_a_table(op: Op, graph: Graph, all_reduced: bool) -> bool:
    """Does a gather of all that a sum by index adds move less than its table? ``all_reduced``: that would be summed over the
    devices and handed to all of them, which moves it twice."""
    added, index, table = (graph.values[v].size for v in (op.inputs[0], op.inputs[1], op.outputs[0]))
    return added * _READ_BY_PARTS + index <= (2 if all_reduced else 1) * table


def _handed_back(op: Op, read: Value, made: Value, want: Spec) -> Spec | None:
    """The part of an operand that the part ``want`` of the result is made of; None where that is not one part."""
    if op.kind == "transpose":
        back = dict(zip(op["permutation"], want, strict=True))
        return tuple(back[d] for d in range(len(want)))
    if OPS[op.kind].family in ("pointwise", "convert") and read.shape == made.shape:
        return want
    return None


def _is_free(op: Op, graph: Graph, specs: Sequence[Spec | None]) -> bool:
    """Is any part of the result of ``op`` made from the same part of what it reads, or from nothing? Then it is made in the
    sharding of its reader."""
    if op.body is not None or len(op.outputs) != 1:
        return False
    family = OPS[op.kind].family
    if family in ("iota", "broadcast"):
        return True
    return family in ("pointwise", "convert") and all(specs[v] is None for v in op.inputs)


def _free_reads(op: Op, graph: Graph, spec: Spec) -> list[Spec]:
    """The shardings in which ``op``, which ``_is_free``, reads its operands where its result has the sharding ``spec``."""
    if op.kind == "broadcast_in_dim":
        x, out = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
        return [tuple(spec[to] if x.shape[d] == out.shape[to] else () for d, to in enumerate(op["dims"]))]
    return [spec if graph.values[v].shape else () for v in op.inputs]


def gathered_operands(graph: Graph, plan: GraphPlan, inputs: Sequence[Spec]) -> tuple[Spec, ...]:
    """The shardings in which a call asks XLA for its operands: those that they have (``inputs``), but for an operand that is
    gathered, and of which all ops read the same part, that of this part."""
    read: dict[int, set[Spec | None]] = {v: set() for v in range(len(graph.values))}
    for v, spec in zip(graph.outputs, plan.outputs, strict=True):
        read[v].add(spec)
    for op, made in zip(reversed(graph.ops), reversed(plan.ops), strict=True):
        if made is None:
            for asked in read[op.outputs[0]]:
                found = [None] * len(op.inputs) if asked is None else _free_reads(op, graph, asked)
                for v, mine in zip(op.inputs, found, strict=True):
                    read[v].add(mine)
        else:
            for v, mine in zip(op.inputs, made.reads, strict=True):
                read[v].add(None if made.moves else mine)

    def gathered(v: int, have: Spec) -> Spec:
        want = next(iter(read[v])) if len(read[v]) == 1 else None
        return want if want is not None and all(mine[: len(w)] == w for mine, w in zip(have, want, strict=True)) else have

    return tuple(map(gathered, graph.inputs, inputs))


def resharded(graph: Graph, arrays: Sequence[Any], have: Sequence[Spec], want: Sequence[Spec], mesh: Mesh) -> list[Any]:
    """The operands of ``graph`` in other shardings than those that they have."""
    nothing = GraphPlan((None,) * len(graph.ops), (None,) * len(graph.values), ())
    found = _Evaluation(graph, nothing, mesh, arrays, have)
    return [found.read(v, spec) for v, spec in zip(graph.inputs, want, strict=True)]


def _result_spec(value: Value, made: Spec | None, wanted: Spec | None, mesh: Mesh) -> Spec:
    if wanted is None:
        return whole(value) if made is None else made
    even = all(n % shards(axes, mesh) == 0 for n, axes in zip(value.shape, wanted, strict=True))
    extends = made is None or all(w[: len(m)] == m for m, w in zip(made, wanted, strict=True))
    if even and extends:
        return wanted
    return whole(value) if made is None else made


def _plan_op(op: Op, graph: Graph, specs: Sequence[Spec | None], mesh: Mesh, wanted: Spec | None = None) -> OpPlan:
    """``wanted``: the sharding in which all readers take the result. Of two operands of a product that are divided along the same
    axes, the larger one stays so, unless the other one's division is wanted and a gather of the larger moves less."""
    operands = (*op.inputs, *op.outputs)
    shapes = [graph.values[v].shape for v in operands]
    n_in = len(op.inputs)
    relations = _relations(op, tuple(shapes[:n_in]), tuple(shapes[n_in:]))

    def proposed(relation: DimRelation) -> tuple[float, Axes]:
        """(elements of the array that asks, its axes) for the largest array that is sharded along the dimension."""
        found: list[tuple[float, Axes]] = [(0.0, ())]
        for k, d in relation.members:
            spec = specs[operands[k]] if k < n_in else None
            if spec is not None and spec[d]:
                found.append((float(graph.values[operands[k]].size), spec[d]))
        return max(found, key=lambda x: x[0])

    def wished(relation: DimRelation) -> Axes:
        """The wanted axes of a dimension that is whole in all operands, which costs nothing to read in parts."""
        k, d = relation.members[-1]
        axes = wanted[d] if wanted is not None and relation.role == "parallel" and k == n_in else ()
        return axes if known.isdisjoint(axes) and shapes[k][d] % shards(axes, mesh) == 0 else ()

    order = {"parallel": 0, "reshaped": 0, "in order": 0, "contracted": 1}
    asked = [(r, *proposed(r)) for r in relations if r.role in order]
    known = {axis for _, _, axes in asked for axis in axes}
    asked = [(r, size, axes or wished(r)) for r, size, axes in asked]
    largest = max((size for _, size, axes in asked if axes), default=0.0)

    def gathers_less(relation: DimRelation, size: float, axes: Axes) -> bool:
        made = wanted is not None and bool(axes) and any(k == n_in and wanted[d] == axes for k, d in relation.members)
        return made and largest <= size + graph.values[op.outputs[0]].size

    asked.sort(key=lambda x: (order[x[0].role], not gathers_less(*x), -x[1]))
    used = set[str]()
    chosen: dict[tuple[int, int], Axes] = {}
    folded: Axes = ()
    for relation, _, axes in asked:
        axes = _prefix(axes, used)
        members: Sequence[tuple[int, int]] = relation.members
        if relation.role == "reshaped":
            firsts = [next(m for m in members if (m[0] < n_in) == side) for side in (True, False)]
            axes = _dividing(axes, [shapes[k][d] for k, d in firsts], mesh) if _leads(relation, specs, operands) else ()
            members = firsts
        if relation.role == "in order" and op.kind == "rev":
            axes = _dividing(axes, [shapes[k][d] for k, d in members], mesh)
        if relation.role == "contracted":
            made = shards([a for (k, _), others in chosen.items() if k == n_in for a in others], mesh)
            if not _folds_parts(op, graph, shards(axes, mesh)) or _gathers_less(op, graph, specs, relation, mesh, made):
                axes = ()
            folded += axes
        used.update(axes)
        chosen |= dict.fromkeys(members, axes)
    spec_of = [tuple(chosen.get((k, d), ()) for d in range(len(shape))) for k, shape in enumerate(shapes)]
    plan = OpPlan(tuple(spec_of[:n_in]), tuple(spec_of[n_in:]), folded, spec_of[n_in])
    if op.kind == "dynamic_update_slice":
        return _updated_in_parts(op, graph, specs, plan)
    return _from_parts(op, graph, specs, mesh, plan) if op.kind == "take" else plan


def _relations(op: Op, ins: Shapes, outs: Shapes) -> tuple[DimRelation, ...]:
    """The relations of ``op``, with the dimension of an ``argmax`` as contracted: each device finds the extreme of its part. A
    reversed or cumulative dimension is "in order": divided as it is, and exchanged or continued."""
    found = OPS[op.kind].relate(op, ins, outs)
    role = "contracted" if op.kind in _INDEX_OF else "in order" if OPS[op.kind].family in moves.IN_ORDER else "mixed"
    return tuple(dataclasses.replace(r, role=role) if r.role == "mixed" else r for r in found)


def _folds_parts(op: Op, graph: Graph, parts: int) -> bool:
    """Does each device fold its part, of so many ``parts``, and then the devices the results? Where these are gathered, they must
    not be more than the operands."""
    fold, made = OPS[op.kind].fold, graph.values[op.outputs[0]]
    if op.kind == "scatter_exp_sum":
        return False
    if op.kind in _INDEX_OF:
        return 2 * parts * made.size <= graph.values[op.inputs[0]].size
    if fold in _FOLDED or fold == "prod" or (made.dtype == "bool" and fold in _FOLDED_BOOLS):
        return True
    return fold in _GATHERED and parts * made.size <= sum(graph.values[v].size for v in op.inputs)


def _gathers_less(op: Op, graph: Graph, specs: Sequence[Spec | None], relation: DimRelation, mesh: Mesh, parts: int) -> bool:
    """Does a product move less where the operand that is divided along a contracted dimension is gathered, and not its result
    summed over the devices? The other operand is whole along it. ``parts``: of the result."""
    if op.kind != "dot_general":
        return False
    divided, others = list[float](), 0
    for k, d in relation.members:
        value, spec = graph.values[op.inputs[k]], specs[op.inputs[k]]
        if spec is not None and spec[d]:
            divided.append(value.size / shards([a for e, axes in enumerate(spec) if e != d for a in axes], mesh))
        elif spec is not None:
            others += 1
    return others > 0 and sum(divided) < 2 * graph.values[op.outputs[0]].size / parts


def _leads(relation: DimRelation, specs: Sequence[Spec | None], operands: Sequence[int]) -> bool:
    """Is the first dimension of a reshaped group the one that is sharded?"""
    k, d = relation.members[0]
    spec = specs[operands[k]]
    return spec is not None and bool(spec[d])


def _prefix(axes: Axes, used: set[str]) -> Axes:
    """``axes`` up to the first that is used already."""
    free = []
    for axis in axes:
        if axis in used:
            break
        free.append(axis)
    return tuple(free)


def _dividing(axes: Axes, sizes: Sequence[int], mesh: Mesh) -> Axes:
    """The longest prefix of ``axes`` into whose shards all ``sizes`` divide."""
    while axes and any(n % shards(axes, mesh) for n in sizes):
        axes = axes[:-1]
    return axes


def _from_parts(op: Op, graph: Graph, specs: Sequence[Spec | None], mesh: Mesh, plan: OpPlan) -> OpPlan:
    """``plan`` of a ``take`` from a table whose rows are divided: each device reads the rows that it has, and they are summed over
    the devices, where that moves less than a gather of the table.

    Indices that are divided along the same axes are gathered, and the sum is scattered to the devices that had them.
    """
    table, spec, axis = graph.values[op.inputs[0]], specs[op.inputs[0]], op["axis"]
    rows = spec[axis] if spec is not None else ()
    index, made = graph.values[op.inputs[1]], graph.values[op.outputs[0]]
    moved = made.size * _READ_BY_PARTS + index.size
    if not rows or table.dtype == "bool" or table.shape[axis] % shards(rows, mesh) or moved > table.size:
        return plan
    before, after = list[Axes](), list[Axes]()
    for d, axes in enumerate(plan.makes[0]):
        kept = _prefix(axes, set(rows))
        back = tuple(itertools.takewhile(lambda a: a in rows, axes[len(kept) :]))
        if len(kept + back) < len(axes) or back and (d - axis not in range(len(index.shape)) or made.shape[d] % shards(axes, mesh)):
            return plan
        before.append(kept)
        after.append(kept + back)
    reads = (*plan.reads[0][:axis], rows, *plan.reads[0][axis + 1 :]), tuple(before[axis : axis + len(index.shape)])
    return dataclasses.replace(plan, reads=reads, makes=(tuple(after),), before=tuple(before), rows=rows)


def _updated_in_parts(op: Op, graph: Graph, specs: Sequence[Spec | None], plan: OpPlan) -> OpPlan:
    """``plan`` of an update of one row, such as the key of a token in a cache: the device that has the row writes it. Axes that
    divide the rows of the cache divide nothing else: a row is less to gather than a cache."""
    update, spec = graph.values[op.inputs[1]].shape, specs[op.inputs[0]]
    for d in op["dims"]:
        axes = spec[d] if spec is not None else ()
        if axes and update[d] == 1:
            others = [_prefix(own, set(axes)) for own in plan.reads[0]]
            row = tuple(() if e in op["dims"] else own for e, own in enumerate(others))
            cache = (*others[:d], axes, *others[d + 1 :])
            return dataclasses.replace(plan, reads=(cache, row, *plan.reads[2:]), makes=(cache,), before=cache, rows=axes)
    return plan


def _plan_loop(
    op: Op,
    graph: Graph,
    specs: Sequence[Spec | None],
    mesh: Mesh,
    parts_wanted: Mapping[int, Spec],
    gathers_rows: bool,
) -> OpPlan:
    """A loop whose carries keep one sharding: that of their first value, or of the next one where the first is whole."""
    body, p = body_of(op), parts(op)
    given = [specs[v] for v in op.inputs]
    n = len(p.consts) + len(p.initial)
    inside = [whole(graph.values[v]) if s is None else s for v, s in zip(op.inputs, given, strict=True)]
    inside = [*inside[:n], *(s[1:] for s in inside[n:])]
    first = len(p.consts)
    slices = [parts_wanted.get(v, (None,))[1:] or None for v in p.ys]
    asked = {k for k in range(first) if given[k] is None}
    while True:
        plan = plan_graph(body, inside, mesh, [*inside[first:n], *slices], gathers_rows)
        changed = False
        for k, (before, after) in enumerate(zip(inside[first:n], plan.outputs, strict=False), first):
            if not any(before) and any(after):
                inside[k], changed = after, True
        for k in sorted(asked):  # what is made of nothing is made in the parts that the steps read
            read = _read_as(body, plan, p.in_consts[k])
            if read is not None and read != inside[k]:
                inside[k], changed = read, True
                asked.remove(k)
        if not changed:
            break
    carries = inside[first:n]
    outputs = (*carries, *plan.outputs[len(carries) :])
    reads = (*inside[:n], *(((), *s) for s in inside[n:]))
    makes = (*carries, *(((), *s) for s in outputs[len(carries) :]))
    return OpPlan(reads, makes, body=dataclasses.replace(plan, outputs=outputs))


def _read_as(body: Graph, plan: GraphPlan, v: int) -> Spec | None:
    """The sharding in which all ops of a loop's body read ``v``; None where they differ."""
    found = set[Spec | None]()
    for op, made in zip(body.ops, plan.ops, strict=True):
        found |= {None if made is None else made.reads[k] for k, w in enumerate(op.inputs) if w == v}
    return next(iter(found)) if len(found) == 1 and v not in body.outputs else None


# --- evaluation on shards -------------------------------------------------------------------------------------------------------


def evaluate(graph: Graph, plan: GraphPlan, arrays: Sequence[Any], mesh: Mesh, inputs: Sequence[Spec]) -> list[Any]:
    """The shards of the results, from those of the operands. To be traced where ``mesh`` is manual."""
    return _Evaluation(graph, plan, mesh, arrays, inputs).results()


class _Evaluation:
    def __init__(self, graph: Graph, plan: GraphPlan, mesh: Mesh, arrays: Sequence[Any], inputs: Sequence[Spec]):
        self.graph, self.plan, self.mesh = graph, plan, mesh
        self.made: dict[tuple[int, Spec], Any] = dict(zip(zip(graph.inputs, inputs, strict=True), arrays, strict=True))
        self.first: dict[int, Spec] = dict(zip(graph.inputs, inputs, strict=True))
        self.producer = graph.producers()
        self.consumers = graph.consumers()
        self.softmaxes = divided_softmaxes(graph, plan.ops, plan.specs)
        self.own = dict[int, Any]()  # the maxima of this device's part
        self.factors = dict[int, Any]()  # of each row of exponentials, and of what is made of them, to those of the whole softmax
        self.later = dict[int, tuple[int, OpPlan]]()  # slices, which an op may read from what they are slices of
        # Values that are folded over the devices behind the transpose that reads them: their parts, and the fold.
        self.waiting = dict[int, tuple[Any, _Collective]]()

    def results(self) -> list[Any]:
        for i, plan in enumerate(self.plan.ops):
            if plan is not None and plan.moves is not None and self.graph.ops[i].kind == "slice":
                self.later[self.graph.ops[i].outputs[0]] = i, plan
            elif plan is not None:
                self._run(i, plan)
        return [self.read(v, spec) for v, spec in zip(self.graph.outputs, self.plan.outputs, strict=True)]

    def read(self, v: int, spec: Spec) -> Any:
        """Value ``v`` in the sharding ``spec``."""
        value = self.graph.values[v]
        if value.literal is not None:
            return np.asarray(value.literal, np_dtype(value.dtype))
        if (v, spec) not in self.made:
            if v in self.later:
                self._run(*self.later.pop(v))
                return self.read(v, spec)
            i = self.producer.get(v)
            if i is not None and self.plan.ops[i] is None:
                self.made[v, spec] = self._make_free(self.graph.ops[i], spec)
            else:
                self.made[v, spec] = self._resharded(self.made[v, self.first[v]], value, self.first[v], spec)
        return self.made[v, spec]

    def _make_free(self, op: Op, spec: Spec) -> Any:
        (v,) = op.outputs
        out = self.graph.values[v]
        local = Value(local_shape(out.shape, spec, self.mesh), out.dtype)
        if op.kind == "iota":
            d = op["dimension"]
            index = lax.broadcasted_iota(np.int32, local.shape, d)
            if spec[d]:
                index = index + self._position(spec[d]) * local.shape[d]
            return lax.convert_element_type(index, np_dtype(out.dtype))
        arrays = [self.read(w, mine) for w, mine in zip(op.inputs, _free_reads(op, self.graph, spec), strict=True)]
        if "parts" in dict(op.params):
            return self._constrained(op, arrays[0])
        params = {**dict(op.params), **({"shape": local.shape} if op.kind == "broadcast_in_dim" else {})}
        return OPS[op.kind].evaluate(params, *arrays, out=local)

    def _run(self, i: int, plan: OpPlan) -> None:
        op = self.graph.ops[i]
        if op.inputs and op.inputs[0] in self.waiting:
            array, fold = self.waiting.pop(op.inputs[0])
            fold = fold.transposed(op["permutation"])
            self._keep(op.outputs[0], fold.after, _folded(lax.transpose(array, op["permutation"]), fold, self.mesh))
            return
        if plan.moves is not None:
            self._keep(op.outputs[0], plan.makes[0], self._moved_elements(op, plan.makes[0], plan.moves))
            return
        if "parts" in dict(op.params):
            self._keep(op.outputs[0], plan.makes[0], self._constrained(op, self.read(op.inputs[0], plan.reads[0])))
            return
        arrays = [self.read(v, spec) for v, spec in zip(op.inputs, plan.reads, strict=True)]
        if plan.body is not None:
            results = self._loop(op, plan, arrays)
        elif (softmax := self._softmax_with(i)) is not None:
            results = [self._in_softmax(softmax, op, plan, arrays)]
        else:
            results = [self._op(op, plan, arrays)]
        if any(softmax.maximum in op.outputs for softmax in self.softmaxes):
            self.own[op.outputs[0]] = results[0]
        for v, spec, made in zip(op.outputs, plan.makes, results, strict=True):
            if not plan.folded or op.kind in _INDEX_OF:
                self._keep(v, spec, made)
                continue
            fold = _Collective(OPS[op.kind].fold, plan.folded, plan.before, spec)
            if self._is_transposed_first(v, spec):
                self.waiting[v] = made, fold
            else:
                self._keep(v, spec, _folded(made, fold, self.mesh))

    def _softmax_with(self, i: int) -> DividedSoftmax | None:
        """The divided softmax whose difference or sums op ``i`` makes."""
        made = self.graph.ops[i].outputs[0]
        return next((s for s in self.softmaxes if i in s.linear or made == s.difference), None)

    def _in_softmax(self, softmax: DividedSoftmax, op: Op, plan: OpPlan, arrays: list[Any]) -> Any:
        """The result of ``op`` on this device, whose exponentials are relative to its own maximum; sums are scaled."""
        (v,) = op.outputs
        shape = local_shape(self.graph.values[v].shape, plan.before, self.mesh)
        if v == softmax.difference:
            kept = [d for d in range(len(shape)) if d != softmax.dim]
            own = own_row(softmax, self.graph, self.own[softmax.maximum], self._local)
            own, of_all = (lax.reshape(row, [shape[d] for d in kept]) for row in (own, self._row(softmax.row)))
            self.factors[softmax.exponentials] = jnp.exp(_wide_float(own) - _wide_float(of_all))
            return arrays[0] - lax.broadcast_in_dim(own, shape, kept)
        k = next(k for k, w in enumerate(op.inputs) if w in self.factors)
        factor = self.factors[op.inputs[k]]
        if op.kind in ("div", "mul"):
            (row,) = self.graph.ops[self.producer[op.inputs[1]]].inputs
            by = lax.reshape(self._row(row), factor.shape)
            self.factors[v] = factor / by if op.kind == "div" else factor * by
            return arrays[0]
        made = self._op(op, plan, arrays)
        if op.kind == "convert_element_type":
            self.factors[v] = factor
            return made
        if op.kind == "reduce_sum":
            return scaled(made, factor, range(factor.ndim))
        relations = OPS[op.kind].relate(op, self._shapes(op.inputs), self._shapes(op.outputs))
        to = {
            d: out
            for r in relations
            if r.role == "parallel"
            for side, d in r.members
            for place, out in r.members[-1:]
            if side == k and place == 2
        }
        return scaled(made, factor, [to[d] for d in sorted(to)])

    def _row(self, v: int) -> Any:
        spec = self.plan.specs[v]
        return self.read(v, whole(self.graph.values[v]) if spec is None else spec)

    def _local(self, v: int) -> Value:
        value, spec = self.graph.values[v], self.plan.specs[v]
        return Value(local_shape(value.shape, whole(value) if spec is None else spec, self.mesh), value.dtype)

    def _moved_elements(self, op: Op, spec: Spec, moved: Moves) -> Any:
        arrays = {v: self.read(v, have) for v, have in moved.reads}
        out = self.graph.values[op.outputs[0]]
        shape = list(local_shape(out.shape, spec, self.mesh))
        padding, fill = [(0, 0, 0)] * len(shape), None
        if op.kind == "slice":
            arrays = {v: moved.sliced(op, x) for v, x in arrays.items()}
        if op.kind == "pad":
            fill = self.read(op.inputs[1], ())
            for d in range(len(shape)):
                if d != moved.dim and (op["low"][d] or op["high"][d]):
                    padding[d] = op["low"][d], op["high"][d], 0
                    shape[d] -= op["low"][d] + op["high"][d]
        made = moved.run(arrays, fill, tuple(shape), np_dtype(out.dtype), self._position(moved.axes))
        return lax.pad(made, jnp.asarray(fill, made.dtype), padding) if any(map(any, padding)) else made

    def _keep(self, v: int, spec: Spec, array: Any) -> None:
        self.first[v] = spec
        self.made[v, spec] = array

    def _is_transposed_first(self, v: int, spec: Spec) -> bool:
        """Is value ``v`` only transposed, in the sharding ``spec``? A pipeline transposes the parts as it stores them; behind the
        collective XLA copies the gradient of each weight twice."""
        readers = self.consumers.get(v, ())
        if len(readers) != 1 or v in self.graph.outputs:
            return False
        (i,) = readers
        plan = self.plan.ops[i]
        return plan is not None and self.graph.ops[i].kind == "transpose" and plan.reads == (spec,)

    def _op(self, op: Op, plan: OpPlan, arrays: list[Any]) -> Any:
        (v,), spec = op.outputs, plan.before
        out = self.graph.values[v]
        local = Value(local_shape(out.shape, spec, self.mesh), out.dtype)
        params = dict(op.params)
        for name in ("shape", "new_sizes"):
            if name in params:
                params[name] = local.shape
        if "limit" in params:
            shape, reads = self.graph.values[op.inputs[0]].shape, plan.reads[0]
            mine = local_shape(shape, reads, self.mesh)
            params["limit"] = tuple(mine[d] if axes else params["limit"][d] for d, axes in enumerate(reads))
        if plan.rows and op.kind == "take":
            return self._take_parts(op, plan, arrays, params, local)
        if plan.rows and op.kind == "dynamic_update_slice":
            return self._update_part(op, plan, arrays, params, local)
        if plan.folded or OPS[op.kind].family == "cumulative":
            arrays = self._without_padding(op, plan, arrays)
        if plan.folded and op.kind in _INDEX_OF:
            return self._index_of_extreme(op, plan, arrays[0], local)
        if plan.rows:  # an index of a row that another device has is out of range
            params["n"] = local.shape[op["axis"]]
            arrays[1] = self._from_here(arrays[1], params["n"], op["n"], plan.rows)
        if OPS[op.kind].family == "cumulative" and (axes := spec[op["axis"]]):
            return self._cumulative(op, arrays[0], axes)
        made = OPS[op.kind].evaluate(params, *arrays, out=local)
        for d in op["dimensions"] if op.kind == "rev" else ():
            if spec[d]:
                made = moves.reversed_over_devices(made, spec[d], shards(spec[d], self.mesh))
        return made

    def _cumulative(self, op: Op, x: Any, axes: Axes) -> Any:
        def running(x: Any, reverse: bool) -> Any:
            return OPS[op.kind].evaluate({**dict(op.params), "reverse": reverse}, x, out=Value(x.shape, name_of(x.dtype)))

        return moves.running_over_devices(x, running, OPS[op.kind].fold, op["axis"], axes, op["reverse"])

    def _constrained(self, op: Op, x: Any) -> Any:
        """The result of a sharding constraint: what it reads; in a program of whole arrays, for XLA to divide, a constraint."""
        return x if self.mesh else _compat.constrained(x, op["mesh"], op["parts"])

    def _without_padding(self, op: Op, plan: OpPlan, arrays: list[Any]) -> list[Any]:
        """The operands with the identity of the fold in the padding of contracted and cumulative dimensions."""
        fold = _INDEX_OF.get(op.kind, OPS[op.kind].fold)
        relations = _relations(op, self._shapes(op.inputs), self._shapes(op.outputs))
        folded = {member for relation in relations if relation.role in ("contracted", "in order") for member in relation.members}
        found = []
        for k, (v, array) in enumerate(zip(op.inputs, arrays, strict=True)):
            value, spec = self.graph.values[v], plan.reads[k]
            for d, n in enumerate(value.shape):
                if (k, d) in folded and n % shards(spec[d], self.mesh):
                    inside = self._position(spec[d]) * array.shape[d] + lax.broadcasted_iota(np.int32, array.shape, d) < n
                    dtype = np_dtype(value.dtype)
                    fill = moves.neutral(fold, dtype)
                    if k == 1 and OPS[op.kind].family == "scatter":  # an index out of range adds nothing
                        fill = -1 if np.issubdtype(dtype, np.signedinteger) else np.iinfo(dtype).max
                    array = jnp.where(inside, array, np.asarray(fill, dtype))
            found.append(array)
        return found

    def _index_of_extreme(self, op: Op, plan: OpPlan, x: Any, local: Value) -> Any:
        """The index of the first extreme element along a divided dimension, from each device's extreme and where that is."""
        dtype = name_of(x.dtype)
        most = OPS[f"reduce_{_INDEX_OF[op.kind]}"].evaluate({"axes": (op["axis"],)}, x, out=Value(local.shape, dtype))
        at = OPS[op.kind].evaluate(dict(op.params), x, out=local)
        at = at + (self._position(plan.folded) * x.shape[op["axis"]]).astype(at.dtype)
        most, at = (lax.all_gather(part, plan.folded) for part in (most, at))
        which = OPS[op.kind].evaluate({"axis": 0}, most, out=Value(local.shape, "int32"))
        mine = lax.broadcasted_iota(np.int32, at.shape, 0) == which
        return jnp.sum(jnp.where(mine, at, 0), 0, dtype=at.dtype)

    def _take_parts(self, op: Op, plan: OpPlan, arrays: list[Any], params: dict[str, Any], local: Value) -> Any:
        """The rows of a table of which each device has a part: those that it has, and zeros, summed over the devices."""
        table, index = arrays
        n, mine = self.graph.values[op.inputs[0]].shape[op["axis"]], table.shape[op["axis"]]
        index = _wide(index)
        here = self._from_here(index if op["mode"] == "fill" else jnp.clip(index, 0, n - 1), mine, n, plan.rows)
        has = (here >= 0) & (here < mine)
        found = OPS["take"].evaluate({**params, "mode": "clip"}, table, jnp.clip(here, 0, mine - 1), out=local)
        dims = tuple(range(op["axis"], op["axis"] + np.ndim(index)))

        def along(mask: Any) -> Any:
            return lax.broadcast_in_dim(mask, local.shape, dims)

        fold = _Collective("sum", plan.rows, plan.before, plan.makes[0])
        summed = _folded(jnp.where(along(has), found, jnp.zeros((), found.dtype)), fold, self.mesh)
        if op["mode"] != "fill":
            return summed
        index = _wide(self.read(op.inputs[1], tuple(plan.makes[0][d] for d in dims)))  # of the rows that stay here
        known = lax.broadcast_in_dim((index >= 0) & (index < n), summed.shape, dims)
        return jnp.where(known, summed, np.asarray(filling(op["fill"], local.dtype), np_dtype(local.dtype)))

    def _update_part(self, op: Op, plan: OpPlan, arrays: list[Any], params: dict[str, Any], local: Value) -> Any:
        """The rows of this device, with the update if it is in one of them."""
        x, update, *starts = arrays
        k, d = next((k, d) for k, d in enumerate(op["dims"]) if plan.reads[0][d] == plan.rows)
        n, mine = self.graph.values[op.inputs[0]].shape[d], local.shape[d]
        here = self._from_here(jnp.clip(_wide(starts[k]), 0, n - 1), mine, n, plan.rows)
        starts[k] = jnp.clip(here, 0, mine - 1).astype(starts[k].dtype)
        value = self.graph.values[op.inputs[1]]
        as_it_is = OPS["dynamic_slice"].evaluate(params, x, *starts, out=Value(np.shape(update), value.dtype))
        return OPS[op.kind].evaluate(params, x, jnp.where((here >= 0) & (here < mine), update, as_it_is), *starts, out=local)

    def _from_here(self, index: Any, mine: int, n: int, axes: Axes) -> Any:
        """``index`` of a row of a table of ``n`` rows, counted from the first of this device's ``mine`` rows; negative for a row in
        front of it and for one that the table does not have."""
        wide = _wide(index)
        here = wide - self._position(axes).astype(wide.dtype) * mine
        return jnp.where((wide >= 0) & (wide < n), here, -1)

    def _loop(self, op: Op, plan: OpPlan, arrays: list[Any]) -> list[Any]:
        body, inner = body_of(op), plan.body
        assert inner is not None
        first, carries = op["consts"], op["carries"]
        n = first + carries
        inside = [*plan.reads[:n], *(s[1:] for s in plan.reads[n:])]
        consts, initial, xs = arrays[:first], arrays[first:n], arrays[n:]
        initial = [jnp.asarray(x, np_dtype(body.values[v].dtype)) for x, v in zip(initial, parts(op).in_carries, strict=True)]

        def step(state: Any, slices: Any) -> Any:
            made = [
                jnp.asarray(x, np_dtype(body.values[v].dtype))
                for x, v in zip(evaluate(body, inner, [*consts, *state, *slices], self.mesh, inside), body.outputs, strict=True)
            ]
            return made[:carries], made[carries:]

        final, ys = lax.scan(step, list(initial), list(xs), op["length"], op["reverse"])
        return [*final, *ys]

    def _shapes(self, values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.graph.values[v].shape for v in values)

    def _position(self, axes: Axes) -> Any:
        """The number of this device's shard along a dimension that ``axes`` divide."""
        return lax.axis_index(axes)

    # --- other shardings of a value ----------------------------------------------------------------------------------------------

    def _resharded(self, x: Any, value: Value, have: Spec, want: Spec) -> Any:
        if have == want:
            return x
        moved = self._moved(x, value, have, want)
        if moved is not None:
            return moved
        kept = [self._in_common(n, *axes) for n, *axes in zip(value.shape, have, want, strict=True)]
        for d, n in enumerate(value.shape):
            if lost := have[d][kept[d] :]:
                x = self._gathered(x, lost, d)
                if x.shape[d] > n:
                    x = lax.slice_in_dim(x, 0, n, axis=d)
        for d, common in enumerate(kept):
            if more := want[d][common:]:
                x = self._part(x, d, more)
        return x

    def _gathered(self, x: Any, axes: Axes, d: int) -> Any:
        """The parts of dimension ``d`` that the devices along ``axes`` have, one after the other.

        XLA gathers along the first dimension of an array, and copies the operand and the result of any other gather. A pipeline
        reads the parts where they are.
        """
        if d == 0:
            return lax.all_gather(x, axes, axis=0, tiled=True)
        parts = jnp.moveaxis(lax.all_gather(x, axes), 0, d)
        return lax.reshape(parts, (*x.shape[:d], shards(axes, self.mesh) * x.shape[d], *x.shape[d + 1 :]))

    def _in_common(self, n: int, have: Axes, want: Axes) -> int:
        """How many of the first axes of a dimension of ``n`` elements stay. Parts of padded shards are not those of the whole."""
        if have == want:
            return len(have)
        if n % shards(have, self.mesh) or n % shards(want, self.mesh):
            return 0
        return next((k for k, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))

    def _part(self, x: Any, d: int, axes: Axes) -> Any:
        """This device's part of dimension ``d``, padded where its size is no multiple of the parts."""
        k = shards(axes, self.mesh)
        size = -(-x.shape[d] // k)
        if size * k != x.shape[d]:
            x = lax.pad(x, jnp.zeros((), x.dtype), [(0, size * k - n if e == d else 0, 0) for e, n in enumerate(x.shape)])
        return lax.dynamic_slice_in_dim(x, self._position(axes) * size, size, axis=d)

    def _moved(self, x: Any, value: Value, have: Spec, want: Spec) -> Any | None:
        """``x`` with one axis moved from one dimension to another, where that is all that differs; None otherwise."""
        lost = [d for d in range(len(have)) if have[d] != want[d] and have[d][:-1] == want[d]]
        won = [d for d in range(len(have)) if have[d] != want[d] and want[d][:-1] == have[d]]
        if len(lost) != 1 or len(won) != 1 or sum(a != b for a, b in zip(have, want, strict=True)) != 2:
            return None
        (a,), (b,) = lost, won
        uneven = any(n % shards(axes, self.mesh) for spec in (have, want) for n, axes in zip(value.shape, spec, strict=True))
        if have[a][-1] != want[b][-1] or uneven:
            return None
        return lax.all_to_all(x, have[a][-1], split_axis=b, concat_axis=a, tiled=True)


def _folded(array: Any, fold: _Collective, mesh: Mesh) -> Any:
    """The parts of a value folded over the devices; of a sum that is wanted in parts, one to each."""
    axes = fold.axes
    for d, (before, after) in enumerate(zip(fold.before, fold.after, strict=True)):
        if (more := after[len(before) :]) and fold.how == "sum":
            array = lax.psum_scatter(array, more, scatter_dimension=d, tiled=True)
            axes = tuple(a for a in axes if a not in more)
    if not axes:
        return array
    if fold.how == "prod":
        return _compat.product_over_devices(array, {a: mesh[a] for a in axes})
    collective = _FOLDED.get(fold.how) or (_FOLDED_BOOLS.get(fold.how) if array.dtype == np.bool_ else None)
    if collective is not None:
        return collective(array, axes)
    out = Value(array.shape, name_of(array.dtype))
    return OPS[f"reduce_{fold.how}"].evaluate({"axes": (0,)}, lax.all_gather(array, axes), out=out)


def _wide_float(x: Any) -> Any:
    return x if x.dtype == np.float64 else lax.convert_element_type(x, np.float32)


def _wide(index: Any) -> Any:
    """``index`` in a dtype that has the number of every row."""
    return lax.convert_element_type(index, np.int64 if index.dtype in (np.int64, np.uint64, np.uint32) else np.int32)
