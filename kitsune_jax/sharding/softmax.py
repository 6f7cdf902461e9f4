"""Softmaxes along a divided dimension: each device subtracts its own maximum, and its sums are scaled where they meet.

Comes in: a Graph with the plans of its ops. Goes out: a ``DividedSoftmax`` for each exponential ``exp(x - maximum)`` along a
divided dimension, if all of its readers are sums along it and products that contract it. So no device waits for the largest element
of all before it uses an exponential, and no device stores scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.spec import is_float, np_dtype
from kitsune_jax.ops.table import OPS
from kitsune_jax.sharding.moves import Spec

_ALONG_ROWS = frozenset({"pointwise", "convert", "reshape"})


@dataclasses.dataclass(frozen=True)
class DividedSoftmax:
    """``maximum``: a value, the largest element of each row along ``dim`` of ``scores``; ``row``: the value that is repeated along
    ``dim`` and subtracted, and ``chain`` the ops that make it of the maximum. ``difference``, ``exponentials``: values. ``linear``:
    ops that make values of the exponentials which have the same factor in each row, or another one."""

    dim: int
    scores: int
    maximum: int
    row: int
    chain: tuple[int, ...]
    difference: int
    exponentials: int
    linear: frozenset[int]


def divided_softmaxes(graph: Graph, plans: Sequence[Any], specs: Sequence[Spec | None]) -> tuple[DividedSoftmax, ...]:
    """``plans``: of each op, with its reads, makes and folded axes; ``specs``: of each value."""
    makers = graph.producers()
    found = []
    for i, op in enumerate(graph.ops):
        if op.kind == "exp" and plans[i] is not None and (one := _softmax(i, graph, plans, specs, makers)) is not None:
            found.append(one)
    return tuple(found)


def _softmax(
    i: int, graph: Graph, plans: Sequence[Any], specs: Sequence[Spec | None], makers: Mapping[int, int]
) -> DividedSoftmax | None:
    exponentials, (difference,) = graph.ops[i].outputs[0], graph.ops[i].inputs
    readers = graph.consumers()
    k = makers.get(difference)
    if k is None or graph.ops[k].kind != "sub" or readers.get(difference) != (i,) or difference in graph.outputs:
        return None
    scores, repeated = graph.ops[k].inputs
    j = makers.get(repeated)
    if j is None or graph.ops[j].kind != "broadcast_in_dim" or not is_float(graph.values[scores].dtype):
        return None
    (row,), shape = graph.ops[j].inputs, graph.values[scores].shape
    chain, maximum = list[int](), row
    while (m := makers.get(maximum)) is not None and OPS[graph.ops[m].kind].family in _ALONG_ROWS:
        known = [v for v in graph.ops[m].inputs if graph.values[v].literal is None]
        if len(known) != 1:
            return None
        chain.append(m)
        (maximum,) = known
    if m is None or graph.ops[m].kind != "reduce_max" or graph.ops[m].inputs != (scores,) or len(graph.ops[m]["axes"]) != 1:
        return None
    (dim,), spec, plan = graph.ops[m]["axes"], specs[scores], plans[m]
    if not plan.folded or spec is None or spec[dim] != plan.folded or not _repeats_along(graph.ops[j], graph, dim, shape):
        return None
    if not _is_row_of(row, specs, spec, dim):
        return None
    if any(p is None or any(mine != spec for mine in (*p.reads[:1], *p.makes)) for p in (plans[k], plans[i])):
        return None
    linear = _linear(exponentials, graph, plans, specs, spec, dim, readers)
    if not linear:
        return None
    return DividedSoftmax(dim, scores, maximum, row, tuple(reversed(chain)), difference, exponentials, linear)


def _repeats_along(op: Op, graph: Graph, dim: int, shape: Sequence[int]) -> bool:
    """Does ``op`` repeat its operand along ``dim`` alone?"""
    (v,) = op.inputs
    x, dims = graph.values[v].shape, op["dims"]
    kept = [d for n, d in zip(x, dims, strict=True) if n == shape[d]]
    return graph.values[op.outputs[0]].shape == tuple(shape) and sorted(kept) == [d for d in range(len(shape)) if d != dim]


def _is_row_of(row: int, specs: Sequence[Spec | None], spec: Spec, dim: int) -> bool:
    """Is ``row`` divided as rows of values with the sharding ``spec`` are?"""
    have = specs[row]
    kept = [axes for d, axes in enumerate(spec) if d != dim and axes]
    return have is not None and [axes for axes in have if axes] == kept


def _linear(
    v: int,
    graph: Graph,
    plans: Sequence[Any],
    specs: Sequence[Spec | None],
    spec: Spec,
    dim: int,
    readers: Mapping[int, Sequence[int]],
) -> frozenset[int]:
    """The ops that read ``v`` and what is made of it by one factor in each row; none where another op reads such a value."""
    makers, found, work = graph.producers(), set[int](), [v]
    shape, axes = graph.values[v].shape, spec[dim]
    while work:
        w = work.pop()
        if w in graph.outputs or not readers.get(w):
            return frozenset()
        for i in readers[w]:
            op, plan = graph.ops[i], plans[i]
            if plan is None or op.inputs.count(w) != 1 or plan.reads[op.inputs.index(w)] != spec:
                return frozenset()
            found.add(i)
            if op.kind == "reduce_sum" and op["axes"] == (dim,) and plan.folded == axes:
                continue
            if op.kind == "dot_general" and plan.folded == axes and _contracts(op, op.inputs.index(w)) == (dim,):
                continue
            j = makers.get(op.inputs[-1])
            maker = None if j is None else graph.ops[j]
            by_row = maker is not None and maker.kind == "broadcast_in_dim" and _repeats_along(maker, graph, dim, shape)
            by_row = by_row and maker is not None and _is_row_of(maker.inputs[0], specs, spec, dim)
            if plan.makes != (spec,) or not (
                op.kind == "convert_element_type" or (op.kind in ("div", "mul") and op.inputs[0] == w and by_row)
            ):
                return frozenset()
            work.append(op.outputs[0])
    return frozenset(found)


def _contracts(op: Op, side: int) -> tuple[int, ...]:
    return tuple(op[("lhs_contract", "rhs_contract")[side]])


# --- on one device ----------------------------------------------------------------------------------------------------------------


def own_row(softmax: DividedSoftmax, graph: Graph, own: Any, local: Any) -> Any:
    """The row that a device subtracts: made of its ``own`` maximum as ``row`` is of that of all. Not minus infinity, where all
    elements of a part are: their exponentials are 0. ``local``: from a value to it with the shape of this device's part."""
    made = {softmax.maximum: own}
    for i in softmax.chain:
        op = graph.ops[i]
        arrays = [made[v] if v in made else np.asarray(graph.values[v].literal, np_dtype(graph.values[v].dtype)) for v in op.inputs]
        out = local(op.outputs[0])
        params = {**dict(op.params), **({"new_sizes": out.shape} if op.kind == "reshape" else {})}
        made[op.outputs[0]] = OPS[op.kind].evaluate(params, *arrays, out=out)
    row = made[softmax.row]
    return jnp.maximum(row, jnp.asarray(jnp.finfo(row.dtype).min, row.dtype))


def scaled(array: Any, factor: Any, dims: Sequence[int]) -> Any:
    """``array`` times ``factor``, whose dimensions are ``dims`` of it."""
    factor = lax.transpose(factor, np.argsort(dims)).astype(array.dtype)
    return array * lax.broadcast_in_dim(factor, array.shape, sorted(dims))
