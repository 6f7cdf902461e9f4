"""XLA's own partition of a Graph, which takes the place of this package's where a device would send or hold more with that.

Comes in: the module of one shard, the whole Graph, and the shardings of its operands and results. Goes out: the module of XLA's
partition with the reason to take it, or None. Both are compiled alone, without optimization of machine code, and compared by their
bytes: nothing is timed, so all processes choose the same. A partition for devices that this process does not have is not compared.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.config import logger
from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.sharding.partition import Spec, evaluate, local_shape, plan_graph, shards, whole

KINDS = "all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter"
_BITS = {"pred": 8, **{f"{kind}{bits}": bits for kind in ("s", "u", "f") for bits in (8, 16, 32, 64)}, "bf16": 16}
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_GATHERS = frozenset({"all_gather", "all_to_all", "ppermute"})
# Some primitives whose results no product reads without an array between.
_COMPUTED = frozenset(
    {"dot_general", "tanh", "logistic", "exp", "max", "min", "mul", "add", "sub", "div", "select_n", "integer_pow"}
)
# Of bytes sent and of memory: what a part of a function takes alone differs a little from what it takes in the function. And a call
# has some memory of its own.
_MORE_SENT, _MORE_MEMORY, _MORE_BYTES = 1.01, 1.05, 4096


@dataclasses.dataclass(frozen=True, eq=False)
class ShardPrograms:
    """``local``, ``pipelined``: the jaxpr of one shard without and with pipelines. ``module``: the program made of the latter."""

    local: Any
    pipelined: Any
    module: bytes


def smaller_partition(
    graph: Graph,
    ours: ShardPrograms,
    given: Sequence[Spec],
    asked: Sequence[Spec],
    mesh: Mapping[str, int],
    everywhere: Mapping[str, int],
    platform: str,
) -> tuple[bytes, str] | None:
    """(XLA's partition, why it is taken) where a device sends fewer bytes with it than with ``ours``, or needs less memory.
    ``everywhere``: the whole mesh, of which a ``shard_map`` leaves ``mesh`` automatic. XLA divides a program for the devices of
    ``mesh`` alone: it ends the process in some divisions of a program with manual axes, where plain JAX does so too and this
    package's calls do not."""
    least = max(_least_memory(ours.local), _MORE_BYTES)
    # Where no partition has less, or the ops are XLA's in both, there is nothing to compile.
    if not _gathers(ours.pipelined) and (ours.pipelined is ours.local or _most_memory(ours.pipelined) <= least):
        return None
    operands, results = list(zip(graph.inputs, given, strict=True)), list(zip(graph.outputs, asked, strict=True))
    nothing = [whole(graph.values[v]) for v in graph.inputs]
    plan = plan_graph(graph, nothing, {})
    try:
        own_text, own_memory = _compat.compiled_shard(ours.module, everywhere, platform)
        if not _gathers(ours.pipelined) and own_memory <= least:
            return None
        sizes = [[_evened(graph.values[v].shape, spec, mesh) for v, spec in pairs] for pairs in (operands, results)]

        def padded(*arrays: Any) -> list[Any]:
            """Operands and results are padded to shards of equal size: JAX and Shardy divide no others."""
            arrays = tuple(_cut(x, graph.values[v].shape, spec, mesh) for x, (v, spec) in zip(arrays, operands, strict=True))
            made = zip(evaluate(graph, plan, arrays, {}, nothing), results, sizes[1], strict=True)
            return [_filled(x, shape, spec, mesh) for x, (_, spec), shape in made]

        with _compat.manual_mesh({}):
            dtypes = [np_dtype(graph.values[v].dtype) for v in graph.inputs]
            types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(sizes[0], dtypes, strict=True)]
            plain = jax.make_jaxpr(padded)(*types)
        other = _compat.partition_by_xla(plain, mesh, given, asked, platform)
        text, memory = _compat.compiled_shard(other, mesh, platform)
        other = _compat.in_every_group(other, mesh, everywhere)
    except Exception as error:
        logger.debug("XLA's own partition is not compared: %s", error)
        return None
    sent, own_sent = bytes_sent(text), bytes_sent(own_text)
    if own_sent > _MORE_SENT * sent:
        return other, f"a device would send {own_sent:,.0f} bytes instead of {sent:,.0f}"
    if own_memory > _MORE_MEMORY * memory + _MORE_BYTES:
        return other, f"a device would need {own_memory:,} bytes of temporary memory instead of {memory:,}"
    return None


def _evened(shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """``shape`` with the padding of its last shards."""
    return tuple(n * shards(axes, mesh) for n, axes in zip(local_shape(shape, spec, mesh), spec, strict=True))


def _cut(x: Any, shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> Any:
    """``x`` without padding, divided as it is."""
    return x if x.shape == tuple(shape) else _compat.constrained(lax.slice(x, (0,) * x.ndim, shape), tuple(mesh.items()), spec)


def _filled(x: Any, shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> Any:
    """``x`` with zeros as padding, divided as it is."""
    if x.shape == tuple(shape):
        return x
    x = _compat.constrained(x, tuple(mesh.items()), spec)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, n - m, 0) for m, n in zip(x.shape, shape, strict=True)])


def _gathers(closed: Any) -> bool:
    """Does a program of one shard have collectives other than those that reduce?"""
    jaxpr, _ = _compat.open_parts(closed)
    return any(eqn.primitive.name in _GATHERS or any(map(_gathers, _compat.inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _most_memory(closed: Any, inside: bool = False) -> int:
    """The bytes of all values that live at the same time, beside operands and results, if XLA fused nothing. ``inside`` of another
    program the results count too."""
    jaxpr, _ = _compat.open_parts(closed)
    results = set[Any]() if inside else {v for v in jaxpr.outvars if not _compat.is_literal(v)}
    last = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not _compat.is_literal(v)}
    last |= dict.fromkeys((v for v in jaxpr.outvars if not _compat.is_literal(v)), len(jaxpr.eqns))
    size = {v: _bytes(v) for eqn in jaxpr.eqns for v in eqn.outvars if v not in results}
    live = most = 0
    for k, eqn in enumerate(jaxpr.eqns):
        live += sum(size.get(v, 0) for v in eqn.outvars)
        most = max(most, live + max((_most_memory(inner, True) for inner in _compat.inner_jaxprs(eqn)), default=0))
        gone = {v for v in (*eqn.invars, *eqn.outvars) if not _compat.is_literal(v) and last.get(v, k) <= k}
        live -= sum(size.get(v, 0) for v in gone)
    return most


def _least_memory(closed: Any) -> int:
    """The bytes that some product or sum by index of a program without pipelines surely needs: for computed operands, and a
    product's result. (XLA sums by index in a loop, which reads them from memory.)"""
    jaxpr, _ = _compat.open_parts(closed)
    maker = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    results = {v for v in jaxpr.outvars if not _compat.is_literal(v)}
    least = [_least_memory(inner) for eqn in jaxpr.eqns for inner in _compat.inner_jaxprs(eqn)]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            operands = {v for v in eqn.invars if not _compat.is_literal(v) and maker.get(v) in _COMPUTED}
            least.append(sum(map(_bytes, {*operands, *eqn.outvars} - results)))
        elif eqn.primitive.name.startswith("scatter") and not _compat.is_literal(x := eqn.invars[2]) and maker.get(x) in _COMPUTED:
            least.append(_bytes(x))
    return max(least, default=0)


def _bytes(v: Any) -> int:
    return math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 1)


def collectives(text: str) -> Counter[str]:
    """How many collectives of each kind a compiled module has."""
    found = Counter(made[2] for line in text.splitlines() if (made := _COLLECTIVE.search(line)))
    return Counter({kind: found[kind] for kind in KINDS})


def bytes_sent(text: str) -> float:
    """The bytes that each device sends by the ring algorithms, where a step of every loop runs once."""
    return sum(_bytes_sent(line, *made.groups()) for line in text.splitlines() if (made := _COLLECTIVE.search(line)))


def _bytes_sent(line: str, types: str, kind: str) -> float:
    devices = 2 if kind == "collective-permute" else _devices(line)
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    size = sum(_BITS[dtype] // 8 * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in arrays)
    others = devices - 1
    parts = {"all-reduce": 2 * others / devices, "reduce-scatter": others, "collective-permute": 1}  # of the result
    return size * parts.get(kind, others / devices)


def _devices(line: str) -> int:
    """How many devices take part in a collective: in one of its groups, which are written in three ways."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if by_mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", by_mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", by_mesh[2]))
    shape = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    assert shape is not None, line
    return int(shape[1])
