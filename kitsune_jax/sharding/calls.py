"""Custom calls that hold a Graph until the shardings or the sizes of their operands are known, and the program in their place.

Comes in: a function that is lowered for several devices, or exported with symbolic shapes, with its options. Goes out: the same as
a jaxpr with calls. Parts of the function between operators that the op table does not know become one call each. One that is
lowered for several devices has a sharding rule for XLA's propagation; XLA's partitioner then calls ``_Partitioner``, which plans
the pipelines of one shard. For one with symbolic sizes ``_Resolver`` plans the pipelines, when JAX lowers the call of the exported
program with arrays of known sizes. Invariants: a call's configuration says everything that its program depends on, so that JAX's
caches are right; a failure of this package becomes a program without pipelines.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax import _compat, config
from kitsune_jax.capture.edit import Captured, Origin, needed_ops
from kitsune_jax.capture.equation import bind_in_place
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import PARTITIONED
from kitsune_jax.config import Options, logger
from kitsune_jax.errors import Failure, record
from kitsune_jax.ops.graph import Graph, Op, Value, make_params
from kitsune_jax.ops.loops import evaluate_jax, graph_by_jax
from kitsune_jax.ops.spec import COMPARISONS, np_dtype
from kitsune_jax.ops.table import OPS, verify
from kitsune_jax.sharding.by_xla import ShardPrograms, smaller_partition
from kitsune_jax.sharding.partition import GraphPlan, Spec, evaluate, gathered_operands, plan_graph, resharded, whole

# XLA's error names the call where an exported program runs without the package: "No registered implementation for ...".
TARGET = "kitsune_region (import kitsune_jax)"
# A part of a function without any of these has nothing to stream.
_WORTH = frozenset({"dot", "reduce", "scatter", "gather", "cumulative", "loop"})

# Families of ops that a part may repeat instead of reading their results.
_REPEATED = frozenset({"pointwise", "convert", "broadcast"})

# --- a Graph as text -------------------------------------------------------------------------------------------------------------


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """``graph`` as lists, dictionaries, strings and numbers, as JSON has them."""
    return {
        "values": [[value.shape, value.dtype, value.literal] for value in graph.values],
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "ops": [
            [op.kind, op.inputs, op.outputs, dict(op.params), op.source, op.label, op.body and graph_to_json(op.body)]
            for op in graph.ops
        ],
    }


def graph_from_json(found: dict[str, Any]) -> Graph:
    """The Graph that ``graph_to_json`` wrote. Raises ``ValueError`` for one that is not valid."""
    graph = Graph(
        tuple(Value(tuple(shape), dtype, literal) for shape, dtype, literal in found["values"]),
        tuple(found["inputs"]),
        tuple(found["outputs"]),
        tuple(
            Op(kind, tuple(ins), tuple(outs), make_params(**params), source, "", label, body and graph_from_json(body))
            for kind, ins, outs, params, source, label, body in found["ops"]
        ),
    )
    graph.validate()
    return graph


# --- parts of a function --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """Ops that are one call: ``graph``, and the values of the whole function that its inputs and outputs are."""

    graph: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def subgraphs_of(captured: Captured, like: Graph | None = None) -> list[Subgraph | int]:
    """The parts of a function and, by their indices, the ops that no part has, in an order in which they can run.

    An op that the table does not know divides the function: the ops that it needs are in an earlier part than those that need it.
    Ops that need no operand of the function are in every part that reads them, and constant arrays are made first. ``like``: the
    Graph of the same function at other sizes; the parts are those of that one, and all ops of the table are in parts.
    """
    graph, steps = captured.graph, captured.steps
    producers = graph.producers()
    level: dict[int, int] = dict.fromkeys(graph.inputs, 0)
    of_op, effects = list[int](), 0
    constants = [i for i, op in enumerate(graph.ops) if op.kind == "opaque" and not op.inputs and not steps[i].has_effects]
    for i, (op, step) in enumerate(zip(graph.ops, steps, strict=True)):
        if i in constants:
            of_op.append(0)
            level.update(dict.fromkeys(op.outputs, 0))
            continue
        at = max((level[v] for v in op.inputs if v in level), default=-1)
        if op.kind == "opaque":
            at = max(at, 0, effects if step.has_effects else 0)
            effects = at if step.has_effects else effects
        of_op.append(at)
        if at >= 0:
            level.update(dict.fromkeys(op.outputs, at + (op.kind == "opaque")))
    read: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for v in op.inputs:
            read.setdefault(v, []).append(i)
    nodes: list[Subgraph | int] = []
    levels = [[i for i, at in enumerate(of_op) if at == k and graph.ops[i].kind != "opaque"] for k in range(max((*of_op, 0)) + 1)]
    worth = [bool(mine) if like else any(OPS[graph.ops[i].kind].family in _WORTH for i in mine) for mine in levels]
    sized = like or graph
    again = [_repeated(sized, of_op, k, read, producers) if worth[k] else set[int]() for k in range(len(levels))]
    readers = {v: set(ops) for v, ops in read.items()}  # of values, without those that make them again
    for mine, more in zip(levels, again, strict=True):
        for v in {v for i in more for v in graph.ops[i].outputs}:
            readers[v].difference_update(mine)
    outside = [{v for i in more for v in graph.ops[i].inputs if producers.get(v) not in more} for more in again]
    for k, mine in enumerate(levels):
        if worth[k]:
            inside, later = set(mine), set().union(*outside[k + 1 :])
            made = [v for i in mine for v in graph.ops[i].outputs]
            wanted = [v for v in made if v in graph.outputs or v in later or not inside.issuperset(readers.get(v, ()))]
            nodes.append(_subgraph(graph, [*again[k], *mine], wanted, producers, of_op))
        else:
            nodes += mine
        nodes += [i for i, at in enumerate(of_op) if at == k and graph.ops[i].kind == "opaque" and i not in constants]
    # Ops that need nothing, for whoever reads them outside of the parts.
    alone = {
        i
        for node in nodes
        if isinstance(node, int)
        for v in graph.ops[node].inputs
        for i in _made_of_nothing(v, graph, producers, of_op)
    }
    alone |= {i for v in graph.outputs for i in _made_of_nothing(v, graph, producers, of_op)}
    if like is None or not alone:
        return [*constants, *sorted(alone), *nodes]
    made = sorted(v for i in alone for v in graph.ops[i].outputs)
    return [*constants, _subgraph(graph, sorted(alone), made, producers, of_op), *nodes]


def _repeated(
    graph: Graph, of_op: Sequence[int], k: int, read: Mapping[int, Sequence[int]], producers: Mapping[int, int]
) -> set[int]:
    """Pointwise ops of earlier parts that part ``k`` repeats, so that fewer bytes lie between the parts: those of all values that
    only it reads, or of those that are made of values which lie in memory anyway."""
    ops, values = graph.ops, graph.values

    def lies_in_memory(v: int) -> bool:
        others = [i for i in read.get(v, ()) if ops[i].kind == "opaque" or of_op[i] > of_op[producers[v]]]
        return bool(others) or v in graph.outputs

    def chain_of(v: int) -> tuple[set[int], set[int]] | None:
        """(ops, values in memory) that make ``v``; None where its bits may be compared with those that another part makes."""
        chain, sources, work = set[int](), set[int](), [v]
        while work:
            w = work.pop()
            i = producers.get(w)
            if values[w].literal is not None or i in chain or (i is not None and of_op[i] < 0):
                continue
            if i is None or not _is_repeated(ops[i]) or (w != v and lies_in_memory(w)):
                sources.add(w)
                continue
            if any(
                ops[j].kind in COMPARISONS or OPS[ops[j].kind].fold in ("max", "min") for j in read[w] if ops[j].kind != "opaque"
            ):
                return None
            chain.add(i)
            work += ops[i].inputs
        return chain, sources

    read_here = {v for i, at in enumerate(of_op) if at == k and ops[i].kind != "opaque" for v in ops[i].inputs}
    crossing = [v for v in read_here if v in producers and 0 <= of_op[producers[v]] < k]
    alone = [v for v in crossing if v not in graph.outputs and all(of_op[i] in (of_op[producers[v]], k) for i in read[v])]
    alone = [v for v in alone if all(ops[i].kind != "opaque" for i in read[v]) and _is_repeated(ops[producers[v]])]
    chains = {v: chain for v in alone if (chain := chain_of(v)) is not None}
    kept = {v for v in crossing if v not in chains}

    def more(v: int) -> set[int]:
        _, sources = chains[v]
        return {w for w in sources if w in producers and w not in kept and not (lies_in_memory(w) and w not in chains)}

    def size(ids: Iterable[int]) -> int:
        return sum(values[v].size * np_dtype(values[v].dtype).itemsize for v in ids)

    free = [v for v in chains if not more(v)]
    found = chains if size(set().union(*map(more, chains))) < size(chains) else free
    return set().union(*(chains[v][0] for v in found))


def _is_repeated(op: Op) -> bool:
    return op.kind != "opaque" and op.body is None and OPS[op.kind].family in _REPEATED and op.kind not in COMPARISONS


def _made_of_nothing(v: int, graph: Graph, producers: dict[int, int], of_op: Sequence[int]) -> set[int]:
    """The ops that make ``v``, where those need no operand of the function."""
    found, work = set[int](), [v]
    while work:
        i = producers.get(work.pop())
        if i is not None and of_op[i] < 0 and i not in found:
            found.add(i)
            work += graph.ops[i].inputs
    return found


def _subgraph(graph: Graph, ops: Iterable[int], wanted: Sequence[int], producers: dict[int, int], of_op: Sequence[int]) -> Subgraph:
    inside = set(ops)
    for i in list(inside):
        for v in graph.ops[i].inputs:
            inside |= _made_of_nothing(v, graph, producers, of_op)
    order = sorted(inside)
    made = {v for i in order for v in graph.ops[i].outputs}
    reads = dict.fromkeys(v for i in order for v in graph.ops[i].inputs)
    inputs = [v for v in reads if v not in made and graph.values[v].literal is None]
    kept = [*inputs, *(v for v in reads if graph.values[v].literal is not None), *sorted(made)]
    number = {v: k for k, v in enumerate(kept)}

    def renumbered(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[v] for v in ids)

    new = [
        dataclasses.replace(op, inputs=renumbered(op.inputs), outputs=renumbered(op.outputs))
        for op in (graph.ops[i] for i in order)
    ]
    found = Graph(tuple(graph.values[v] for v in kept), renumbered(inputs), renumbered(wanted), tuple(new))
    return Subgraph(dataclasses.replace(found, ops=tuple(needed_ops(found.ops, found.outputs))), tuple(inputs), tuple(wanted))


# --- sharding constraints inside of a part --------------------------------------------------------------------------------------


def with_constraints_inside(captured: Captured) -> Captured:
    """``captured`` with the sharding constraints between ops of the table as such ops, of one mesh: copies with the axes of each
    dimension (None where any may stay). Those of operands and results stay as they are."""
    graph = captured.graph
    producers, consumers = graph.producers(), graph.consumers()
    ops, mesh = list(graph.ops), None
    for i, (op, step) in enumerate(zip(graph.ops, captured.steps, strict=True)):
        wish = _compat.sharding_wish(step.origin.eqns) if op.kind == "opaque" and len(op.outputs) == 1 else None
        if wish is None or (mesh is not None and wish[0] != mesh) or op.outputs[0] in graph.outputs:
            continue
        made, readers = producers.get(op.inputs[0]), consumers.get(op.outputs[0], ())
        if made is None or ops[made].kind == "opaque" or any(graph.ops[k].kind == "opaque" for k in readers):
            continue
        mesh, parts = wish
        ops[i] = dataclasses.replace(op, kind="copy", params=make_params(mesh=mesh, parts=parts), reason="")
    return dataclasses.replace(captured, graph=dataclasses.replace(graph, ops=tuple(ops)))


# --- the lowering ---------------------------------------------------------------------------------------------------------------


@functools.cache
def _region() -> Any:
    primitive = _compat.new_primitive("kitsune_region")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, avals, **__: avals)

    def rule(ctx: Any, *args: Any, avals: Any, text: str, graph: _ById | None, marked: tuple[tuple[str, int], ...]) -> Any:
        if graph is None:
            return _compat.unsized_call(ctx, args, TARGET, text)
        return _compat.partitioned_call(ctx, args, TARGET, text, _plain(graph.graph), dict(marked))

    _compat.register_lowering(primitive, rule)
    return primitive


@dataclasses.dataclass(frozen=True, eq=False)
class _ById:
    """A Graph as a parameter of an equation, which JAX hashes and prints."""

    graph: Graph

    def __repr__(self) -> str:
        return f"{len(self.graph.ops)} ops"


def _plain(graph: Graph) -> Any:
    """The jaxpr of ``graph`` without pipelines, for XLA to divide."""
    nothing = [whole(graph.values[v]) for v in graph.inputs]
    plan = plan_graph(graph, nothing, {})
    with _compat.manual_mesh({}):
        avals = [_compat.array_type(graph.values[v].shape, np_dtype(graph.values[v].dtype)) for v in graph.inputs]
        return _compat.trace_jaxpr(lambda *arrays: evaluate(graph, plan, arrays, {}, nothing), avals, lower=True)


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The surroundings of a function: the target and the platform that it is lowered for, and, inside of a ``shard_map`` that
    leaves axes of its mesh automatic, the axes with their sizes and those that are manual. ``machine``: a key of what plans depend
    on beside their program, for JAX's cache of compiled programs; a program may be divided on another machine. ``function``: a key
    of the user's function with its types and options, in the bodies of its loops too."""

    target: str
    platform: str
    machine: str = ""
    function: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    manual: tuple[str, ...] = ()

    @property
    def automatic(self) -> dict[str, int]:
        """The automatic axes that divide anything, with their sizes, inside of a ``shard_map``."""
        return {name: size for name, size in self.mesh if name not in self.manual and size > 1}


def _marked(around: Surroundings) -> tuple[tuple[str, int], ...]:
    """The axes that divide one more operand of a call, of which nothing is read.

    Inside of a ``shard_map`` that leaves axes automatic, XLA asks for the program of a group of devices. With several such axes it
    numbers the devices of a group in one order or another; how that operand is divided tells which.
    """
    found = tuple(around.automatic.items())
    return found if len(found) > 1 else ()


def _text(name: str, options: Options, around: Surroundings, graph: Any, **more: Any) -> str:
    """The configuration of a call."""
    found = {
        "version": config.__version__,
        "options": dataclasses.asdict(options),
        "around": dataclasses.asdict(around),
        "name": name,
        "graph": graph,
        **more,
    }
    return json.dumps(found, sort_keys=True, default=lambda size: {_SIZE: str(size)})


def _read(text: str) -> dict[str, Any]:
    """The configuration. Raises ``ValueError`` for one of another version of this package."""
    found: dict[str, Any] = json.loads(text)
    if found["version"] != config.__version__:
        raise ValueError(
            f"this program was exported with kitsune_jax {found['version']}, and this is {config.__version__}: export it again"
        )
    return found


def partitioned_jaxpr(call_jaxpr: Any, options: Options, around: Surroundings) -> Any:
    """``call_jaxpr`` with a call in the place of each of its subgraphs, also in the bodies of loops that XLA runs."""

    def rewrite(body: Any, _: int) -> Any:
        new = partitioned_jaxpr(body, options, around)
        return _compat.as_kind_of(_compat.constants_inside(new), body)

    jaxpr, consts = _compat.hoist_consts(call_jaxpr)
    captured = capture(jaxpr, rewrite, PARTITIONED)
    explicit = not around.manual and any(map(_compat.is_explicit, captured.avals))
    if not around.manual:
        captured = with_constraints_inside(captured)
    graph, nodes = captured.graph, subgraphs_of(captured)
    for node in nodes:
        if isinstance(node, int) and (prepare := captured.steps[node].prepare) is not None:
            for failure in prepare():
                record(_compat.function_name(call_jaxpr), failure)

    def run_op(i: int, arrays: list[Any]) -> list[Any]:
        if not explicit:
            return captured.run(i, arrays)
        if captured.steps[i].evaluate is not None:
            return captured.run(i, _compat.with_types_of(captured.steps[i].origin.eqns[-1:], arrays))
        # The op may be a part of the equation that it comes from, whose rules of shardings are not its own.
        op = graph.ops[i]
        with captured.steps[i].origin.context(), _compat.no_mesh():
            arrays = [_compat.without_type(x) for x in arrays]
            if op.body is not None:
                made = evaluate_jax(OPS, op, arrays)
            else:
                made = [OPS[op.kind].evaluate(dict(op.params), *arrays, out=graph.values[op.outputs[0]])]
        return [_compat.with_type(x, captured.avals[v]) for x, v in zip(made, op.outputs, strict=True)]

    def run(*args: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(graph.inputs, [*consts, *args], strict=True))
        called = set[int]()  # results of calls

        def read(v: int) -> Any:
            value = graph.values[v]
            return env[v] if v in env else np.asarray(value.literal, np_dtype(value.dtype))

        for node in nodes:
            if isinstance(node, int):
                op = graph.ops[node]
                # A call's results are divided by lists of devices, and XLA knows fewer ways from these to another sharding than
                # from the names of mesh axes: it gathers the operand of a sort. A barrier's result has the names again.
                arrays = [jax.lax.optimization_barrier(read(v)) if v in called else read(v) for v in op.inputs]
                env.update(zip(op.outputs, run_op(node, arrays), strict=True))
                continue
            text = _text(_compat.function_name(call_jaxpr), options, around, graph_to_json(node.graph))
            avals = tuple(captured.avals[v] for v in node.outputs)
            graph_of = _ById(node.graph)
            made = _region().bind(*map(read, node.inputs), avals=avals, text=text, graph=graph_of, marked=_marked(around))
            env.update(zip(node.outputs, made, strict=True))
            called.update(node.outputs)
        return [read(v) for v in graph.outputs]

    return _compat.trace_jaxpr(run, _compat.in_avals(call_jaxpr), lower=True, like=call_jaxpr)


# --- sizes that are not known yet -----------------------------------------------------------------------------------------------

_SIZE = "$"  # the only key of a size with symbols: {"$": "2*b + 1"}
# A function is captured with so many values of its symbols, and one more for each of them: no two expressions agree in all of them
# by chance. The product of the symbols is such that the elements of arrays can be counted in 32 bits.
_SAMPLES, _ELEMENTS, _TRIES = 4, 1000, 40
# Other values: the operators for one row, or for a million, may differ from those for some, which are right for them too. The
# largest values with which expressions are compared, min(b, 512) with b.
_SMALL, _LARGE, _LARGEST = 4, 1 << 16, 1 << 20
_MULTIPLES = (1, 2, 8, 60, 64, 1024)
_LOOPS = frozenset({"scan", "while", "cond"})


class Unfit(Exception):
    """The reason why no Graph stands for a function at all sizes."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Sample:
    """A function captured where its symbols have the values ``sizes``, and the parts that it is cut into."""

    sizes: Mapping[str, int]
    at: _compat.AtSizes
    captured: Captured
    nodes: Sequence[Subgraph | int] = ()

    @functools.cached_property
    def structure(self) -> str:
        """The Graph without the sizes of values and the integers among literals and parameters."""
        return repr(_structure(self.captured.graph))


def _structure(graph: Graph) -> Any:
    values = [(len(value.shape), value.dtype, _without_integers(value.literal)) for value in graph.values]
    ops = [
        (op.kind, op.inputs, op.outputs, _without_integers(op.params), op.label, op.body and _structure(op.body))
        for op in graph.ops
    ]
    return values, graph.inputs, graph.outputs, ops


def _without_integers(found: Any) -> Any:
    if isinstance(found, tuple):
        return [_without_integers(x) for x in found]
    return "" if type(found) is int else found


def symbolic_jaxpr(call_jaxpr: Any, options: Options, around: Surroundings, names: Sequence[str]) -> Any:
    """``call_jaxpr``, whose sizes have the symbols ``names``, with a call in the place of each of its subgraphs.

    It is captured with several values of each symbol. Where the Graphs differ in integers alone, each of these is an expression of
    the symbols. Raises ``Unfit`` where they differ in more, and where no operator has anything to stream.
    """
    jaxpr, consts = _compat.hoist_consts(call_jaxpr)
    first, *others = _samples(jaxpr, names)
    expressions = _Expressions([first, *others])
    captured, name = first.captured, _compat.function_name(call_jaxpr)
    graph, in_bodies = captured.graph, 0
    parts = {
        k: expressions.fit([graph_to_json(part.graph) for part in same if isinstance(part, Subgraph)])
        for k, same in enumerate(zip(*(sample.nodes for sample in expressions.samples), strict=True))
        if isinstance(same[0], Subgraph)
    }
    shapes = {
        v: tuple(expressions.fit([list(sample.captured.graph.values[v].shape) for sample in expressions.samples]))
        for v in {v for node in first.nodes for v in (graph.ops[node].outputs if isinstance(node, int) else node.outputs)}
    }

    def body(found: Any) -> Any:
        nonlocal in_bodies
        if not _compat.is_jaxpr(found) or _compat.open_parts(found)[1]:
            return found
        try:
            made = _compat.as_kind_of(_compat.constants_inside(symbolic_jaxpr(found, options, around, names)), found)
        except Unfit as why:
            logger.debug("%s: a body with symbolic shapes stays as it is: %s", name, why)
            return found
        in_bodies += 1
        return made

    def run_op(i: int, arrays: list[Any]) -> list[Any]:
        step = captured.steps[i]
        if not step.whole:
            made = captured.run(i, arrays)
        else:
            *enclosing, eqn = step.origin.eqns
            if id(eqn) not in first.at.origins:
                raise Unfit(f"{graph.ops[i].label} has no form with symbolic shapes ({graph.ops[i].source or 'no source line'})")
            eqn = first.at.origins[id(eqn)][1]
            params = eqn.params
            if eqn.primitive.name in _LOOPS:
                params = {k: tuple(map(body, v)) if isinstance(v, tuple) else body(v) for k, v in params.items()}
            made = bind_in_place(eqn, Origin((*enclosing, eqn)), params, *arrays)
        for v, x in zip(graph.ops[i].outputs, made, strict=True):
            if not expressions.are_equal(_compat.physical(jax.typeof(x)).shape, shapes[v]):
                raise Unfit(f"{graph.ops[i].label} has another shape with symbols ({graph.ops[i].source or 'no source line'})")
        return list(made)

    def run(*args: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(graph.inputs, [*consts, *args], strict=True))

        def read(v: int) -> Any:
            value = graph.values[v]
            return env[v] if v in env else np.asarray(value.literal, np_dtype(value.dtype))

        for k, node in enumerate(first.nodes):
            if isinstance(node, int):
                op = graph.ops[node]
                env.update(zip(op.outputs, run_op(node, [read(v) for v in op.inputs]), strict=True))
                continue
            text = _text(name, options, around, parts[k], sizes=list(names))
            avals = tuple(_compat.with_shape(captured.avals[v], shapes[v]) for v in node.outputs)
            made = _region().bind(*map(read, node.inputs), avals=avals, text=text, graph=None, marked=())
            env.update(zip(node.outputs, made, strict=True))
        return [read(v) for v in graph.outputs]

    try:
        made = _compat.trace_jaxpr(run, _compat.in_avals(call_jaxpr), lower=True, like=call_jaxpr)
    except (TypeError, ValueError) as error:  # two expressions may be equal without JAX's knowing it
        raise Unfit(f"it cannot be traced with calls: {error}") from error
    for found, wanted in zip(_compat.out_avals(made), _compat.out_avals(call_jaxpr), strict=True):
        if not expressions.are_equal(_compat.physical(found).shape, _compat.physical(wanted).shape):
            raise Unfit(f"a result would have the shape {found.shape} and not {wanted.shape}")
    if not in_bodies and not any(OPS[op.kind].family in _WORTH for op in graph.ops if op.kind != "opaque"):
        raise Unfit("no operator in it has anything to stream")
    return made


def _samples(jaxpr: Any, names: Sequence[str]) -> list[_Sample]:
    """``jaxpr`` at several sizes, cut into the same parts. Raises ``Unfit``."""
    avals = [*_compat.in_avals(jaxpr), *_compat.out_avals(jaxpr)]
    symbolic = next((d for aval in avals for d in getattr(aval, "shape", ()) if _compat.is_symbolic(d)), None)
    values = _Values(names, symbolic)
    count, most = _SAMPLES + len(names), max(17, round(_ELEMENTS ** (1 / max(1, len(names)))))
    same = values.drawn(count, most, most // 4, _SMALL)
    if len(same) < count:
        raise Unfit(f"{count} values that satisfy the constraints of its sizes were not found")
    first = _sample(jaxpr, same[0])
    other = [*values.drawn(2, _SMALL), *values.drawn(1, max(17, round(_LARGE ** (1 / max(1, len(names))))))]
    same += values.separating(list(first.at.expressions.values()), same)
    found = [first]
    for sizes in (*same[1:], *other):
        sample = _sample(jaxpr, sizes)
        if sample.structure == first.structure:
            found.append(sample)
        elif sizes in same:
            raise Unfit(f"it has other operators where {_assignment(sizes)} than where {_assignment(first.sizes)}")
    like = first.captured.graph
    return [dataclasses.replace(sample, nodes=subgraphs_of(sample.captured, like)) for sample in found]


def _assignment(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes.items())


def _sample(jaxpr: Any, sizes: Mapping[str, int]) -> _Sample:
    at = _compat.AtSizes(sizes)
    try:
        known = at.of(jaxpr)
    except (NotImplementedError, KeyError, ValueError) as error:
        raise Unfit(f"it cannot be traced where {_assignment(sizes)}: {error}") from error
    return _Sample(sizes, at, capture(known, lambda body, _: body, PARTITIONED))


class _Values:
    """Values of the symbols ``names`` that satisfy the constraints of the scope of ``size``; the same in every process."""

    def __init__(self, names: Sequence[str], size: Any):
        self.names, self.size = names, size
        self._draw = random.Random(0)

    def drawn(self, count: int, *most: int) -> list[dict[str, int]]:
        """``count`` different ones, or fewer where no more are found, up to the first of ``most`` that allows them."""
        found: list[dict[str, int]] = []
        for highest, factor in itertools.product((*most, 1), _MULTIPLES):
            for _ in range(_TRIES):
                sizes = self._one(highest, factor)
                if sizes not in found and self._fit(sizes):
                    found.append(sizes)
                if len(found) == count:
                    return found
        return found

    def separating(self, expressions: Sequence[Any], known: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
        """Values at which those of ``expressions`` differ that are equal, or constant, at all of ``known``, if they are found."""
        found: list[dict[str, int]] = []

        def vector(size: Any) -> tuple[int, ...]:
            return tuple(_compat.size_at(size, sizes) for sizes in (*known, *found))

        first: dict[tuple[int, ...], Any] = {}
        for size in sorted(expressions, key=str):
            values = vector(size)
            constant = values[0] if len(set(values)) == 1 else None
            other = first.setdefault(values, size)
            for like in (*(() if other is size else (other,)), *(() if constant is None else (constant,))):
                for k in range(10 * _TRIES):
                    sizes = self._one(2 << k % (_LARGEST.bit_length() - 1), self._draw.choice(_MULTIPLES))
                    if self._fit(sizes) and _compat.size_at(like, sizes) != _compat.size_at(size, sizes):
                        found.append(sizes)
                        first = {vector(known): known for known in first.values()}
                        break
        return found

    def _one(self, highest: int, factor: int) -> dict[str, int]:
        return {name: factor * self._draw.randint(min(2, highest), highest) for name in self.names}

    def _fit(self, sizes: Mapping[str, int]) -> bool:
        return self.size is None or _compat.satisfies(self.size, sizes)


class _Expressions:
    """The expressions of symbols that have the values found in the ``samples`` of a function."""

    def __init__(self, samples: Sequence[_Sample]):
        self.samples = samples
        met = {text: size for sample in samples for text, size in sample.at.expressions.items()}
        symbols = [_compat.size_of_text(name, next(iter(met.values())).scope) for name in samples[0].sizes] if met else []
        products = [a * b for a, b in itertools.combinations_with_replacement(symbols, 2)]
        candidates = [*symbols, *(met[text] for text in sorted(met, key=lambda text: (len(text), text))), *products]
        self._known: dict[tuple[int, ...], Any] = {}
        for size in candidates:
            self._known.setdefault(tuple(_compat.size_at(size, sample.sizes) for sample in samples), size)
        self._vectors = list(self._known)

    def fit(self, found: Sequence[Any]) -> Any:
        """Trees of lists, dictionaries and numbers that are equal but for integers, as one with expressions in their place."""
        first = found[0]
        if isinstance(first, dict):
            return {key: self.fit([x[key] for x in found]) for key in first}
        if isinstance(first, list | tuple):
            return [self.fit(entries) for entries in zip(*found, strict=True)]
        return first if all(x == first for x in found) or type(first) is not int else self._expression(tuple(found))

    def are_equal(self, shape: Sequence[Any], other: Sequence[Any]) -> bool:
        """Have both shapes the same sizes in all samples, and symbols in the same dimensions?"""
        pairs = list(zip(shape, other, strict=True))
        at = [(_compat.size_at(a, sample.sizes), _compat.size_at(b, sample.sizes)) for a, b in pairs for sample in self.samples]
        return all(a == b for a, b in at) and all(_compat.is_symbolic(a) == _compat.is_symbolic(b) for a, b in pairs)

    def _expression(self, values: tuple[int, ...]) -> Any:
        """An expression that has these values in the samples: one that was met, a product of two symbols, or a multiple of them."""
        if values not in self._known:
            factors = [(values[0] // vector[0], vector) for vector in self._vectors if vector[0]]
            multiples = [(f, vector) for f, vector in factors if values == tuple(f * x for x in vector)]
            if not multiples:
                raise Unfit(
                    f"a number in its operators is no multiple of its sizes: {values[0]} where "
                    f"{_assignment(self.samples[0].sizes)}, {values[1]} where {_assignment(self.samples[1].sizes)}"
                )
            factor, vector = multiples[0]
            self._known[values] = factor * self._known[vector]
        return self._known[values]


def _at_sizes(found: Any, sizes: Mapping[str, int]) -> Any:
    """The tree ``found`` with numbers in the place of the expressions in it."""
    known: dict[str, int] = {}

    def number(x: Any) -> Any:
        if isinstance(x, list):
            return [number(y) for y in x]
        if not isinstance(x, dict):
            return x
        if x.keys() != {_SIZE}:
            return {key: number(y) for key, y in x.items()}
        text = x[_SIZE]
        if text not in known:
            known[text] = _compat.size_at(_compat.size_of_text(text), sizes)
        return known[text]

    return number(found)


# (the context that JAX lowers a call of an exported program in, a part's jaxpr, options, surroundings) -> the jaxpr with pipelines
Loaded = Callable[[Any, Any, Options, Surroundings], Any]


def register_loaded(pipelined: Loaded, machine_key: Callable[[str], str]) -> None:
    """Have JAX ask for the programs of parts with symbolic sizes where it lowers the call of an exported program.
    ``machine_key``: of what plans for a target depend on."""
    _compat.register_resolver(TARGET, functools.partial(_resolved, pipelined, machine_key))


def _resolved(
    pipelined: Loaded, machine_key: Callable[[str], str], ctx: Any, text: str, integers: Sequence[int | None]
) -> tuple[bytes | tuple[str, bytes, dict[str, int]], int]:
    """For a call in a program that JAX lowers in ``ctx``: its module or, where XLA divides that program, also what the call in its
    place is partitioned by; and the number of operands that are sizes."""
    found = _read(text)
    names = found["sizes"]
    values = [n for n in integers[len(integers) - len(names) :] if n is not None]
    if len(values) < len(names):
        raise ValueError(f"kitsune_jax: the sizes {', '.join(names)} of {found['name']} are not known where it is compiled")
    sizes = dict(zip(names, values, strict=True))
    graph = graph_from_json(_at_sizes(found["graph"], sizes))
    try:
        verify(graph)
    except ValueError as error:
        raise ValueError(
            f"kitsune_jax: the exported function {found['name']} has no pipelines where {_assignment(sizes)}: export it with "
            f'export="plain" ({error})'
        ) from error
    mesh, manual = _compat.partly_manual_mesh(ctx) or ({}, ())
    target, platform = found["around"]["target"], found["around"]["platform"]
    around = Surroundings(target, platform, mesh=tuple(mesh.items()), manual=manual)
    options: Options | None = Options(**config.check_options(found["options"]))
    here = _compat.platforms_of(ctx)
    if platform not in here:  # a branch of a program for several platforms, which is not taken
        platform, options = here[0], None
    if config.disabled():
        options = None
    alone = _compat.runs_on_one_device(ctx)
    everywhere = mesh or {"a0": 1}
    with _compat.manual_mesh(everywhere):
        avals = [_compat.array_type(graph.values[v].shape, np_dtype(graph.values[v].dtype)) for v in graph.inputs]
        part = _compat.trace_jaxpr(functools.partial(_part, graph), avals, lower=True, name=found["name"])
        if options is not None and alone:
            part = pipelined(ctx, part, options, around)
        module = _compat.module_of(part, everywhere, platform)
    if options is not None and not alone and _compat.partitions_automatically(ctx):
        around = dataclasses.replace(around, machine=machine_key(target))
        return (_text(found["name"], options, around, graph_to_json(graph)), module, dict(_marked(around))), len(names)
    return module, len(names)


def _part(graph: Graph, *arrays: Any) -> list[Any]:
    return graph_by_jax(OPS, graph, arrays)


# --- the partitioner ------------------------------------------------------------------------------------------------------------

Pipelined = Callable[[Any, Options, str, Mapping[str, int]], Any]  # a jaxpr of one shard, with pipelines
_partitioners: list[_Partitioner] = []


def register(pipelined: Pipelined) -> None:
    """Have XLA ask for the programs of shards. ``pipelined(jaxpr, options, target, axes)``: puts pipelines into the program of
    one, on a mesh with ``axes`` of these sizes."""
    partitioner = _Partitioner(pipelined)
    _partitioners.append(partitioner)
    _compat.register_partitioner(TARGET, partitioner)


def forget_programs() -> None:
    """Drop the programs of shards that are kept for equal calls, for measurements of how long they take to make."""
    for partitioner in _partitioners:
        partitioner.forget()


def why_divided_by_xla(function: str) -> tuple[str, ...]:
    """The reasons why XLA's own partition of parts of this function was taken, if it was compiled in this process.
    ``function``: as in ``Surroundings``."""
    return tuple(dict.fromkeys(why for found in _partitioners for why in found.by_xla.get(function, ())))


class _Partitioner:
    """Called by XLA for each call in a module that it partitions. Equal calls have one program."""

    def __init__(self, pipelined: Pipelined):
        self.pipelined = pipelined
        self._known: dict[tuple[Any, ...], Any] = {}
        self.by_xla: dict[str, list[str]] = {}  # functions, and why XLA divides parts of them

    def forget(self) -> None:
        self._known.clear()
        self.by_xla.clear()

    @_compat.with_room_for_frames
    def __call__(self, shapes: Any, shardings: Any, result_shape: Any, result_sharding: Any, text: Any) -> Any:
        text = text if isinstance(text, str) else bytes(text).decode()
        found = _read(text)
        machine = config.num_threads(), config.profile(), config.cuda_arch(), config.cuda_avoid()
        key = (text, tuple(map(str, shardings)), str(result_sharding), machine)
        if key not in self._known:
            if len(self._known) > 256:
                self.forget()
            self._known[key] = self._program(shapes, shardings, result_shape, result_sharding, found)
        return self._known[key]

    def _program(self, shapes: Any, shardings: Any, result_shape: Any, result_sharding: Any, found: dict[str, Any]) -> Any:
        graph = graph_from_json(found["graph"])
        _, results = _compat.parts_of_result(result_shape, result_sharding)
        options = Options(**config.check_options(found["options"]))
        n, around = len(graph.inputs), _surroundings(found)
        last = len(shardings) - bool(_marked(around))
        given, plain, marks = shardings[:n], shardings[n:last], shardings[last:]
        try:
            automatic = _compat.in_order_of_devices(around.automatic, marks[0]) if marks else around.automatic
            wished = next((dict(op["mesh"]) for op in graph.ops if dict(op.params).get("mesh")), None)
            mesh, specs = _compat.common_mesh([*given, *results], automatic or None, wished)
            return self._module(graph, mesh, (specs[:n], plain, specs[n:]), shapes, result_shape, found, options)
        except Exception as error:
            if options.strict:
                raise _compat.compilation_error(
                    f"kitsune_jax could not pipeline {found['name']} for one of its devices, and strict=True forbids to leave "
                    f"that to XLA: {type(error).__name__}: {error}"
                ) from error
            record(found["name"], Failure.of(error, "the partition of a call"))
            nothing = [None] * n, plain, [None] * len(graph.outputs)
            return self._module(graph, {"a0": 1}, nothing, shapes, result_shape, found, None)

    def _module(
        self,
        graph: Graph,
        mesh: dict[str, int],
        divided: tuple[Sequence[Spec | None], Sequence[Any], Sequence[Spec | None]],
        shapes: Any,
        result_shape: Any,
        found: dict[str, Any],
        options: Options | None,
    ) -> Any:
        """(module, shardings of the operands, of the result). ``divided``: how the operands, XLA's own results (its shardings) and
        the results are. ``options``: None for a program without pipelines."""
        given, plain, asked = divided
        inputs = [_padded(s, graph.values[v]) for v, s in zip(graph.inputs, given, strict=True)]
        wanted = [_padded(s, graph.values[v]) for v, s in zip(graph.outputs, asked, strict=True)]
        around = _surroundings(found)
        plan: GraphPlan = plan_graph(graph, inputs, mesh, wanted, gathers_rows=bool(around.manual))
        # XLA gathers an operand once for all of its readers, such as the calls of a forward and a backward pass.
        read = gathered_operands(graph, plan, inputs)
        marks = len(shapes) > len(inputs) + len(plain)
        mark = [_compat.sharding_of(mesh, tuple((axis,) if axis in mesh else () for axis in around.automatic))] if marks else []
        made: Sequence[Spec] = plan.outputs
        everywhere = dict(around.mesh) or mesh  # of collectives, which name devices of the whole mesh

        def placed(specs: Sequence[Spec]) -> list[Any]:
            return [*(_compat.sharding_of(mesh, spec) for spec in specs), *plain, *mark]

        def traced(program: Any, specs: Sequence[Spec]) -> Any:
            return _compat.trace_jaxpr(program, _compat.local_avals(shapes, placed(specs)), lower=True)

        with _compat.manual_mesh(everywhere):
            local = traced(lambda *arrays: evaluate(graph, plan, arrays[: len(inputs)], mesh, read), read)
            pipelined = local if options is None else self.pipelined(local, options, around.target, everywhere)
            module = _compat.module_of(pipelined, everywhere, around.platform)
        if options is not None and not options.force:
            ours = ShardPrograms(local, pipelined, module)
            if read != tuple(inputs):  # XLA's partition of the call gathers its operands

                def gathering(*arrays: Any) -> list[Any]:
                    whole = resharded(graph, arrays[: len(inputs)], inputs, read, mesh)
                    return list(_compat.jaxpr_as_fun(pipelined)(*whole, *arrays[len(inputs) :]))

                with _compat.manual_mesh(everywhere):
                    program = traced(gathering, inputs)
                    module_of_all = _compat.module_of(program, everywhere, around.platform)
                ours = ShardPrograms(program if pipelined is local else local, program, module_of_all)
            other = smaller_partition(graph, ours, inputs, wanted, mesh, everywhere, around.platform)
            if other is not None:
                (module, why), read, made = other, tuple(inputs), wanted
                logger.info("%s: XLA divides a part of it, without pipelines: %s", found["name"], why)
                self.by_xla.setdefault(around.function, []).append(why)
        results = [_compat.sharding_of(mesh, spec) for spec in made]
        return module, placed(read), _compat.as_result(result_shape, results)


def _surroundings(found: Mapping[str, Any]) -> Surroundings:
    around = found["around"]
    mesh, manual = tuple((name, size) for name, size in around["mesh"]), tuple(around["manual"])
    return Surroundings(**{**around, "mesh": mesh, "manual": manual})


def _padded(spec: Spec | None, value: Value) -> Spec:
    """``spec`` with an entry for every dimension of ``value``; of dimensions of one element none is divided."""
    found = whole(value) if spec is None else (*spec, *whole(value)[len(spec) :])
    return tuple(axes if n > 1 else () for axes, n in zip(found, value.shape, strict=True))
