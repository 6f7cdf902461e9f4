"""Rewriting one op of the Graph to its rows-first form.

Comes in: an op and the ``DimLabels`` of its operands. Goes out: a ``LocalOp``, the same kind (or ``row_index`` / ``matmul`` /
``sink``) with parameters that speak of the rows-first shapes ``(rows, *row_shape)``. Stationary operands keep their shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kitsune_jax.graph import Graph, Op, Param, make_params
from kitsune_jax.program.ir import ROWS
from kitsune_jax.streams.space import DimLabels, row_shape

_SINK_HOW = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LocalOp:
    """``swap``: the operands change places (a ``matmul`` takes the tile first). ``squeeze``: reshape input 0 to this first."""

    kind: str
    params: tuple[tuple[str, Param], ...]
    swap: bool = False
    squeeze: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Dims:
    """Where the dimensions of a value went: ``local[d]`` is the rows-first index of dimension d (0 for a streamed one)."""

    shape: tuple[int, ...]
    labels: DimLabels | None

    @property
    def tile(self) -> bool:
        return self.labels is not None

    def kept(self) -> list[int]:
        return [d for d in range(len(self.shape)) if self.labels is None or not self.labels[d]]

    def streamed(self, d: int) -> bool:
        return self.labels is not None and bool(self.labels[d])

    def local(self, d: int) -> int:
        if self.labels is None:
            return d
        return 0 if self.labels[d] else 1 + self.kept().index(d)

    def rows_first(self) -> tuple[int, ...]:
        return (ROWS, *row_shape(self.shape, self.labels)) if self.tile else self.shape


def localize(graph: Graph, op: Op, labels: dict[int, DimLabels]) -> LocalOp:
    """The rows-first form of ``op`` under ``labels`` (absent values are stationary)."""
    ins = [_Dims(graph.values[v].shape, labels.get(v)) for v in op.inputs]
    out = _Dims(graph.values[op.outputs[0]].shape, labels.get(op.outputs[0]))
    rule = _RULES.get(op.kind)
    if rule is not None:
        return rule(op, ins, out)
    return LocalOp(op.kind, op.params)


def _broadcast(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    (x,) = ins
    dims: Param = op["dims"]
    # Dimensions of extent 1 that become streamed ones: a stationary operand may spend one of them on the row dimension.
    gone = [d for d in x.kept() if out.streamed(dims[d])]
    spare = gone[:1] if not x.tile and len(gone) == 1 else []
    kept = [d for d in x.kept() if d not in gone or d in spare]
    mapped = tuple(out.local(dims[d]) for d in kept)
    if x.tile:
        mapped = (0, *mapped)
    squeeze = None
    if len(kept) != len(x.kept()):
        sizes = tuple(x.shape[d] for d in kept)
        squeeze = (ROWS, *sizes) if x.tile else sizes
    return LocalOp("broadcast_in_dim", make_params(shape=out.rows_first(), dims=mapped), squeeze=squeeze)


def _reshape(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    if out.tile and not ins[0].tile:  # the streamed dimensions are of extent 1 and new: every row gets the whole array
        row = row_shape(out.shape, out.labels)
        return LocalOp("broadcast_in_dim", make_params(shape=(ROWS, *row), dims=tuple(range(1, 1 + len(row)))), squeeze=row)
    return LocalOp("reshape", make_params(new_sizes=out.rows_first()))


def _transpose(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    perm = tuple(ins[0].local(op["permutation"][j]) for j in out.kept())
    return LocalOp("transpose", make_params(permutation=(0, *perm)))


def _rev(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    return LocalOp("rev", make_params(dimensions=tuple(ins[0].local(d) for d in op["dimensions"])))


def _slice(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    kept = ins[0].kept()
    strides = op["strides"] or (1,) * len(ins[0].shape)
    return LocalOp(
        "slice",
        make_params(
            start=(0, *(op["start"][d] for d in kept)),
            limit=(ROWS, *(op["limit"][d] for d in kept)),
            strides=(1, *(strides[d] for d in kept)),
        ),
    )


def _pad(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    kept = ins[0].kept()
    return LocalOp("pad", make_params(**{k: (0, *(op[k][d] for d in kept)) for k in ("low", "high", "interior")}))


def _concatenate(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    return LocalOp("concatenate", make_params(dimension=out.local(op["dimension"])))


def _iota(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    d = op["dimension"]
    if out.streamed(d):
        assert out.labels is not None
        return LocalOp("row_index", make_params(axes=out.labels[d]))
    return LocalOp("iota", make_params(shape=out.rows_first(), dimension=out.local(d)))


def _reduce(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    (x,) = ins
    axes = tuple(sorted({x.local(d) for d in op["axes"]}))
    if any(x.streamed(d) for d in op["axes"]):
        return LocalOp("sink", make_params(how=_SINK_HOW[op.kind], axes=axes))
    return LocalOp(op.kind, make_params(axes=axes))


def _one_axis(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    params = dict(op.params)
    return LocalOp(op.kind, make_params(**{**params, "axis": ins[0].local(params["axis"])}))


def _dot_sink(op: Op, x: _Dims, y: _Dims) -> LocalOp:
    pairs = [(x.local(a), y.local(b)) for a, b in zip(op["lhs_contract"], op["rhs_contract"], strict=True)]
    pairs = list(dict.fromkeys(pairs))  # several streamed dimensions are one row dimension
    return LocalOp(
        "matmul_sink",
        make_params(
            x_contract=tuple(a for a, _ in pairs),
            y_contract=tuple(b for _, b in pairs),
            x_batch=tuple(x.local(d) for d in op["lhs_batch"]),
            y_batch=tuple(y.local(d) for d in op["rhs_batch"]),
            accumulate=op["accumulate"],
        ),
    )


def _dot(op: Op, ins: list[_Dims], out: _Dims) -> LocalOp:
    if ins[0].tile and ins[1].tile:
        return _dot_sink(op, ins[0], ins[1])
    swap = not ins[0].tile
    x, w = (ins[1], ins[0]) if swap else (ins[0], ins[1])
    sides = [(op["lhs_contract"], op["lhs_batch"]), (op["rhs_contract"], op["rhs_batch"])]
    (x_contract, x_batch), (w_contract, w_batch) = reversed(sides) if swap else sides
    # Names of the result's dimensions: of dot_general(x, w) as it falls out, and of the op's own result.
    batch = [("batch", b) for b in range(len(x_batch))]
    x_free = [("x", d) for d in range(len(x.shape)) if d not in x_contract and d not in x_batch]
    w_free = [("w", d) for d in range(len(w.shape)) if d not in w_contract and d not in w_batch]
    wanted = [*batch, *(w_free if swap else x_free), *(x_free if swap else w_free)]
    row = ("row", 0)
    local = [row, *(n for n in wanted if not (n[0] == "x" and x.streamed(n[1])))]
    falls_out = [*batch, row, *(n for n in x_free if not x.streamed(n[1])), *w_free]
    return LocalOp(
        "matmul",
        make_params(
            x_contract=tuple(x.local(d) for d in x_contract),
            x_batch=tuple(x.local(d) for d in x_batch),
            w_contract=w_contract,
            w_batch=w_batch,
            out_perm=tuple(falls_out.index(n) for n in local),
            accumulate=op["accumulate"],
        ),
        swap=swap,
    )


_RULES: dict[str, Callable[[Op, list[_Dims], _Dims], LocalOp]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "rev": _rev,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "iota": _iota,
    "dot_general": _dot,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"), _reduce),
    **dict.fromkeys(("argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _one_axis),
}
