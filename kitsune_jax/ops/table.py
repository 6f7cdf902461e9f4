"""The op table, with an entry for each kind of op; the check of every op of a Graph; and attention-like scores.

Comes in: the entries of ``pointwise``, ``shape``, ``reduce`` and ``loops``. Goes out: ``OPS``, by canonical kind, and functions of
ops and graphs that read it. To add an op, add its entry (docs/adding.md) and, where JAX's parameters differ from the entry's, its
rule in ``capture.primitives``. Invariant: for every entry JAX equals the rule in NumPy (``reference.operators``) in every dtype of
``OpSpec.dtypes``, and the relations hold by experiment (``tests/table``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kitsune_jax.ops.graph import Graph, Op, Param, Value
from kitsune_jax.ops.loops import check, entries
from kitsune_jax.ops.pointwise import POINTWISE
from kitsune_jax.ops.reduce import INDEXED, ONLINE, REDUCTIONS
from kitsune_jax.ops.shape import SHAPES, WINDOWS
from kitsune_jax.ops.spec import COMPARISONS, DTYPES, INTEGERS, OpSpec, is_float

_TABLE: dict[str, OpSpec] = {**POINTWISE, **SHAPES, **REDUCTIONS, **INDEXED, **WINDOWS, **ONLINE}
_TABLE.update(entries(_TABLE))  # loops, whose bodies hold ops of the table

OPS: Mapping[str, OpSpec] = MappingProxyType(_TABLE)
# Why an opaque op is left to XLA, where nothing else is known about it.
NO_OPERATOR = "kitsune_jax has no code for this operator, so XLA runs it; to pipeline it, write it with other operators"

# JAX's names of primitives that have another kind here -> that kind.
RENAMED: Mapping[str, str] = MappingProxyType({name: spec.kind for spec in OPS.values() for name in spec.names})


# --- the check of a Graph ---------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]


def verify(graph: Graph) -> None:
    """Raise ``ValueError`` if ``graph`` is not valid.

    Values are defined once, before they are read (``Graph.validate``); every op of the table has the operands, result shape and
    result dtype that its kind and parameters require. The cost is linear in the number of ops, for any size of arrays.
    """
    graph.validate()
    for i, op in enumerate(graph.ops):
        try:
            verify_op(op, graph.values)
        except ValueError as e:
            raise ValueError(f"op {i}: {e}") from None


def verify_op(op: Op, values: Sequence[Value]) -> None:
    """Raise ``ValueError`` if ``op`` is neither in the table nor opaque, or does not fit its operands and results."""
    if op.kind == "opaque":
        return
    if op.kind not in OPS:
        raise ValueError(f"{op.kind} is not an op of the table")
    if (OPS[op.kind].family == "loop") != (op.body is not None):
        raise ValueError(f"{op.kind} has {'no' if op.body is None else 'a'} body")
    if op.body is not None:
        check(op, values)
        verify(op.body)
        return
    ins, outs = ([values[v] for v in ids] for ids in (op.inputs, op.outputs))
    if len(outs) != 1:
        raise ValueError(f"{op.kind} has {len(outs)} results, not one")
    made = result(op, ins, outs[0].dtype)
    if made.shape != outs[0].shape:
        raise ValueError(f"{op.kind} of {', '.join(map(str, ins))} has shape {made.shape}, not that of {outs[0]}")
    if made.dtype != outs[0].dtype:
        raise ValueError(f"{op.kind} does not make {outs[0]} of {', '.join(map(str, ins))}")


def result(op: Op, operands: Sequence[Value], dtype: str = "") -> Value:
    """The result of ``op`` on ``operands``. ``dtype``: the result's, if neither they nor the kind determine it (a product, an
    index).

    Raises ``ValueError`` if the op is not defined for them.
    """
    spec = OPS[op.kind]
    if spec.arity is not None and len(operands) != spec.arity:
        raise ValueError(f"{op.kind} has {len(operands)} operands and not {spec.arity}")
    dtypes = [x.dtype for x in operands]
    if spec.gives == "any":
        dtype = dict(op.params).get("new_dtype", dtype)
    else:
        dtype = spec.gives or dtypes[-1 if op.kind == "select_n" else 0]
    if not _agree(op.kind, dtypes, dtype):
        raise ValueError(f"{op.kind} does not make {dtype} of {', '.join(map(str, operands))}")
    return Value(result_shape(op, [x.shape for x in operands]), dtype)


@functools.lru_cache(maxsize=4096)
def result_of(kind: str, params: tuple[tuple[str, Param], ...], operands: tuple[Value, ...], dtype: str = "") -> Value:
    """``result`` of an op without a body: every layer of a network has the same ones."""
    return result(Op(kind, (), (), params), operands, dtype)


def result_shape(op: Op, shapes: Sequence[Shape]) -> Shape:
    """The shape that ``op`` gives for operands of ``shapes``. Raises ``ValueError`` if it is not defined for them."""
    shape = SHAPE_RULES[OPS[op.kind].family](op, shapes)
    if shape is None:
        raise ValueError(f"{op.kind} is not defined for {', '.join(map(str, shapes))} with {dict(op.params)}")
    return shape


def _agree(kind: str, dtypes: Sequence[str], out: str) -> bool:
    if out not in DTYPES or any(d not in DTYPES for d in dtypes):
        return False
    if kind == "select_n":
        return dtypes == ["bool", out, out]
    if OPS[kind].family in ("gather", "scatter"):
        return dtypes[1] in INTEGERS
    if OPS[kind].family == "window":
        starts = 2 if kind == "dynamic_update_slice" else 1
        return set(dtypes[:starts]) == {out} and all(d in INTEGERS for d in dtypes[starts:])
    return OPS[kind].mixes or OPS[kind].gives == "any" or len(set(dtypes)) == 1


# --- shapes by family; None if the op is not defined ------------------------------------------------------------------------------


def _pointwise(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    """Operands of one shape or of rank 0."""
    shape = next(filter(None, shapes), ())
    return shape if all(s in ((), shape) for s in shapes) else None


def _reduced(axes: Sequence[int], shape: Shape) -> Shape | None:
    if len(set(axes)) != len(axes) or not all(0 <= a < len(shape) for a in axes):
        return None
    return tuple(n for d, n in enumerate(shape) if d not in axes)


def _dot(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    sides = []
    for shape, contract, batch in zip(
        shapes, (op["lhs_contract"], op["rhs_contract"]), (op["lhs_batch"], op["rhs_batch"]), strict=True
    ):
        free = _reduced((*batch, *contract), shape)
        if free is None:
            return None
        sides.append((tuple(shape[d] for d in batch), tuple(shape[d] for d in contract), free))
    (batch, contracted, left), (other, too, right) = sides
    return (*batch, *left, *right) if (batch, contracted) == (other, too) else None


def _broadcast(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    (x,), to, dims = shapes, op["shape"], op["dims"]
    ascending = len(dims) == len(x) and all(a < b for a, b in zip(dims, dims[1:], strict=False))
    return to if ascending and all(0 <= d < len(to) and n in (1, to[d]) for n, d in zip(x, dims, strict=True)) else None


def _transpose(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    x, permutation = shapes[0], op["permutation"]
    return tuple(x[d] for d in permutation) if sorted(permutation) == list(range(len(x))) else None


def _concatenate(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    d = op["dimension"]
    if not shapes or not 0 <= d < len(shapes[0]) or len({(s[:d], s[d + 1 :]) for s in shapes}) != 1:
        return None
    return (*shapes[0][:d], sum(s[d] for s in shapes), *shapes[0][d + 1 :])


def _slice(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    x, start, limit = shapes[0], op["start"], op["limit"]
    strides = op["strides"] or (1,) * len(x)
    if not len(x) == len(start) == len(limit) == len(strides):
        return None
    if not all(0 <= a <= b <= n and s > 0 for a, b, s, n in zip(start, limit, strides, x, strict=True)):
        return None
    return tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, strides, strict=True))


def _pad(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    x, low, high, interior = shapes[0], op["low"], op["high"], op["interior"]
    if shapes[1] or not len(x) == len(low) == len(high) == len(interior):
        return None
    sizes = tuple(n + max(n - 1, 0) * i + lo + hi for n, i, lo, hi in zip(x, interior, low, high, strict=True))
    return sizes if all(n >= 0 for n in sizes) else None


def _take(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    (x, index), axis = shapes, op["axis"]
    return (*x[:axis], *index, *x[axis + 1 :]) if 0 <= axis < len(x) else None


def _scatter(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    (x, index, *scores), axis, n = shapes, op["axis"], op["n"]
    end = axis + len(index)
    if any(s != x[: len(s)] or (axis, end) != (0, 1) for s in scores):
        return None
    return (*x[:axis], n, *x[end:]) if axis >= 0 and n >= 0 and x[axis:end] == index else None


def _window(op: Op, shapes: Sequence[Shape]) -> Shape | None:
    x, dims = shapes[0], op["dims"]
    updates = op.kind == "dynamic_update_slice"
    starts = shapes[2:] if updates else shapes[1:]
    if len(starts) != len(dims) or any(starts) or len(set(dims)) != len(dims) or not all(0 <= d < len(x) for d in dims):
        return None
    sizes = dict(zip(dims, [shapes[1][d] for d in dims] if updates else op["sizes"], strict=True))
    window = tuple(sizes.get(d, n) for d, n in enumerate(x))
    if not all(0 <= m <= n for m, n in zip(window, x, strict=True)) or updates and shapes[1] != window:
        return None
    return x if updates else window


SHAPE_RULES: Mapping[str, Callable[[Op, Sequence[Shape]], Shape | None]] = {
    "pointwise": _pointwise,
    "convert": _pointwise,
    "reduce": lambda op, shapes: _reduced(op["axes"], shapes[0]),
    "argreduce": lambda op, shapes: _reduced((op["axis"],), shapes[0]),
    "cumulative": lambda op, shapes: shapes[0] if 0 <= op["axis"] < len(shapes[0]) else None,
    "dot": _dot,
    "broadcast": _broadcast,
    "reshape": lambda op, shapes: op["new_sizes"] if math.prod(op["new_sizes"]) == math.prod(shapes[0]) else None,
    "transpose": _transpose,
    "concatenate": _concatenate,
    "slice": _slice,
    "pad": _pad,
    "rev": lambda op, shapes: shapes[0] if all(0 <= d < len(shapes[0]) for d in op["dimensions"]) else None,
    "iota": lambda op, shapes: op["shape"] if 0 <= op["dimension"] < len(op["shape"]) else None,
    "gather": _take,
    "scatter": _scatter,
    "window": _window,
}


# --- scores: results of products that are much larger than their operands, as in attention, and values computed from them ---------

_GROWS = 8  # a score is so many times larger than the operands of its product (``capture.rewrites`` uses the same number)
_LONG = 256  # scores have at least so many rows and columns: a layer of few terms has as many rows, but not as many columns
CHEAP = frozenset({"pointwise", "convert", "broadcast", "reshape", "transpose", "iota"})


def grows(graph: Graph, op: Op) -> bool:
    """Is the result of the product ``op`` much larger than its operands?"""
    sizes = [graph.values[v].size for v in op.inputs]
    shape = graph.values[op.inputs[0]].shape
    summed = math.prod(shape[d] for d in (*op["lhs_batch"], *op["lhs_contract"]))
    return graph.values[op.outputs[0]].size >= _GROWS * max(sizes) and min(sizes) >= _LONG * summed


def is_cheap(op: Op) -> bool:
    """Does ``op`` work element by element, or only move elements?"""
    return op.kind != "opaque" and OPS[op.kind].family in CHEAP


def asks_for_equals(graph: Graph, producers: Mapping[int, int], op: Op) -> bool:
    """Is ``op`` a comparison of floats whose result depends on their last bits: an equality, or a comparison with a maximum or
    minimum?"""
    values = graph.values
    if op.kind not in COMPARISONS or any(values[v].literal is not None or not is_float(values[v].dtype) for v in op.inputs):
        return False
    return op.kind in ("eq", "ne") or any(_is_extreme(graph, producers, v) for v in op.inputs)


def _is_extreme(graph: Graph, producers: Mapping[int, int], v: int) -> bool:
    while v in producers:
        op = graph.ops[producers[v]]
        if op.kind == "opaque" or not (OPS[op.kind].moves or op.kind == "copy") or not op.inputs:
            return op.kind in ("reduce_max", "reduce_min")
        v = op.inputs[0]
    return False


def scores_of(graph: Graph) -> frozenset[int]:
    """The results of products that are much larger than their operands, and values of that size computed element by element."""
    roots = {i for i, op in enumerate(graph.ops) if op.kind == "dot_general" and grows(graph, op)}
    found: dict[int, int] = {}  # -> its size
    if not roots:
        return frozenset()
    for i, op in enumerate(graph.ops):
        sizes = [found[v] for v in op.inputs if v in found]
        for v in op.outputs:
            if i in roots or (sizes and is_cheap(op) and graph.values[v].size == max(sizes)):
                found[v] = graph.values[v].size
    return frozenset(found)
