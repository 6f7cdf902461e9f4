"""Biases and activations move into the matrix products whose results they are computed of.

Comes in: a ``TileProgram``, best a ``simplified`` one. Goes out: one in which a product whose result is read by nothing but
``[convert] add(bias) [convert] activation [convert]`` is a ``matmul`` with the bias as its third operand and the activation as a
parameter. It adds and activates in the dtype that it accumulates in, and rounds once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy dtype)
import numpy as np

from kitsune_jax.graph import make_params
from kitsune_jax.ops.rounding import EVERYWHERE, Rounding
from kitsune_jax.program.ir import ROWS, Instr, TileProgram, TileType
from kitsune_jax.program.passes import activations
from kitsune_jax.program.passes.flow import VIEWS, Flow, is_other_name, squeezed
from kitsune_jax.program.passes.simplify import live

Makers = Mapping[int, Instr]
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def with_epilogues(program: TileProgram, rounding: Rounding = EVERYWHERE, *, activated: bool = True) -> TileProgram:
    """``program`` with biases and, where ``activated``, activations folded into its products, which round 16-bit sums on their way
    where ``rounding`` says so."""
    folding = _Folding(program, rounding, activated)
    stages = tuple(dataclasses.replace(s, body=folding.body(s.body, (), {})) for s in program.stages)
    return dataclasses.replace(program, stages=stages, values=tuple(folding.values))


@dataclasses.dataclass(frozen=True)
class _Epilogue:
    """``result`` is the value that the product ends up making, ``absorbed`` are the instructions that this replaces."""

    result: int
    bias: _Bias | None
    activation: str
    parameters: tuple[float, ...]
    absorbed: tuple[int, ...]
    rounds: str  # the dtype to which sums are rounded before the bias is added, and again before the activation; or float32


@dataclasses.dataclass(frozen=True)
class _Bias:
    """The stationary value ``source``, whose real dimensions lie along dimensions ``along`` of the product's columns."""

    source: int
    along: tuple[int, ...]


class _Folding:
    def __init__(self, program: TileProgram, rounding: Rounding, activated: bool):
        self.program, self.rounding, self.activated = program, rounding, activated
        self.values = list(program.values)

    def new(self, t: TileType) -> int:
        self.values.append(t)
        return len(self.values) - 1

    def body(self, body: Sequence[Instr], results: Sequence[int], around: Makers) -> tuple[Instr, ...]:
        """``around``: what makes the values of the code that a loop's body stands in."""
        flow = Flow(self.program, body, results)
        makers = {**around, **flow.makers}
        found = {i: self._match(flow, makers, i) for i, instr in enumerate(body) if instr.kind == "matmul"}
        found = {i: e for i, e in found.items() if e.absorbed}
        gone = {v for i, e in found.items() for j in (i, *e.absorbed) for v in body[j].outputs}
        absorbed = {j for e in found.values() for j in e.absorbed}
        out: list[Instr] = []
        position = {v: i for i, instr in enumerate(body) for v in instr.outputs}
        moved: set[int] = set()  # values that were made earlier, for a bias
        for i, instr in enumerate(body):
            if instr.block is not None:
                block = dataclasses.replace(instr.block, body=self.body(instr.block.body, instr.block.results, makers))
                instr = dataclasses.replace(instr, block=block)
            if i in found:
                bias = found[i].bias
                for j in _chain(flow.makers, bias.source if bias else None):
                    if position[j.outputs[0]] > i and j.outputs[0] not in moved:
                        moved.update(j.outputs)
                        out.append(j)
                out += self._product(instr, found[i])
                gone.discard(found[i].result)
            elif i in absorbed or not moved.isdisjoint(instr.outputs):
                continue
            elif not gone.isdisjoint(instr.inputs):
                gone.update(instr.outputs)  # another name of what is no longer made
            else:
                out.append(instr)
        return live(out, results)

    def _product(self, instr: Instr, e: _Epilogue) -> list[Instr]:
        """The product ``instr`` that makes ``e.result``, between what brings its bias into shape and its result."""
        before, after, inputs = [], [], instr.inputs
        (out,), result = instr.outputs, self.values[e.result]
        columns = tuple(self.values[out].shape[d - 1] for d in column_dims(instr, len(self.values[instr.inputs[1]].shape)))
        if e.bias is not None:
            bias, t = e.bias.source, self.values[e.bias.source]
            if t.shape != columns:
                if t.shape != squeezed(t.shape):
                    shaped = self.new(TileType(False, squeezed(t.shape), t.dtype))
                    before.append(Instr("reshape", (bias,), (shaped,), make_params(new_sizes=squeezed(t.shape))))
                    bias = shaped
                spread = self.new(TileType(False, columns, t.dtype))
                before.append(Instr("broadcast_in_dim", (bias,), (spread,), make_params(shape=columns, dims=e.bias.along)))
                bias = spread
            inputs = (*inputs, bias)
        made = e.result
        if result.shape != self.values[out].shape:
            made = self.new(dataclasses.replace(self.values[out], dtype=result.dtype))
            after.append(Instr("reshape", (made,), (e.result,), make_params(new_sizes=(ROWS, *result.shape)), instr.op))
        params = make_params(**{**dict(instr.params), "activation": e.activation, "parameters": e.parameters, "rounds": e.rounds})
        return [*before, dataclasses.replace(instr, inputs=inputs, outputs=(made,), params=params), *after]

    def _match(self, flow: Flow, makers: Makers, i: int) -> _Epilogue:
        """The longest chain ``[convert] add(bias) [convert] activation [convert]`` after product ``i``, no link read by others."""
        product = flow.body[i]
        (out,) = product.outputs
        current, bias, activation, rounded, rounds = out, None, "none", False, "float32"
        parameters: tuple[float, ...] = ()
        absorbed: list[int] = []
        while flow.dtype(out) in _FLOATS and len(product.inputs) == 2:
            own = flow.dtype(current) if flow.dtype(current) in self.rounding.results else "float32"
            # Sums are rounded before their bias and before their activation, or nowhere.
            both = bias is None or rounds == own
            if self.activated and activation == "none" and both and not (rounded and own == "float32"):
                found = activations.recognise(flow, current, self.rounding)
                if found is not None:
                    current, activation, parameters, rounds = found.result, found.name, found.parameters, own
                    absorbed.extend(found.absorbed)
            if len(uses := flow.uses.get(flow.root(current), [])) != 1:
                break
            j, p = uses[0]
            instr = flow.instruction(j)
            if len(instr.outputs) != 1 or flow.shape(instr.outputs[0]) != flow.shape(out):
                break
            other = instr.inputs[1 - p] if instr.kind in ("add", "max") else -1
            if instr.kind == "convert_element_type":
                x, y = flow.dtype(instr.inputs[0]), flow.dtype(instr.outputs[0])
                narrower = y in _FLOATS and np.dtype(y).itemsize < np.dtype(x).itemsize
                wider = y in _FLOATS and np.dtype(y).itemsize > np.dtype(x).itemsize
                if (
                    "float64" in (x, y)
                    or y not in _FLOATS
                    or (wider and (rounded or rounds == x or not self.rounding.keeps_digits(x, y)))
                ):
                    break
                rounded = rounded or narrower
            elif (
                instr.kind == "add"
                and bias is None
                and activation == "none"
                and (found_bias := bias_of(flow, makers, self.program, other, product))
            ):
                bias, rounds = found_bias, own
            elif instr.kind == "max" and self.activated and activation == "none" and flow.literal(other) == 0:
                activation = "relu"
            else:
                break
            absorbed.append(j)
            (current,) = instr.outputs
        return _Epilogue(current, bias, activation, parameters, tuple(absorbed), rounds)


def column_dims(product: Instr, w_rank: int) -> list[int]:
    """The dimensions of a ``matmul``'s rows-first result that are columns: free dimensions of w, ascending in the result."""
    columns = w_rank - len(product["w_contract"]) - len(product["w_batch"])
    perm = product["out_perm"]
    return [d for d, source in enumerate(perm) if source >= len(perm) - columns]


def bias_of(flow: Flow, makers: Makers, program: TileProgram, v: int, product: Instr) -> _Bias | None:
    """``v`` as an addend of the product's result, if it is a loaded stationary array that varies along the columns only."""
    out = flow.type(product.outputs[0])
    if flow.shape(v) != squeezed(out.shape) and (flow.type(v).tile or flow.shape(v)):
        return None
    real = [d for d, n in enumerate(out.shape, 1) if n != 1]
    along = dict(zip(_real(flow, v), real, strict=False))  # real dimensions of ``v``, rows-first -> of the result
    while flow.type(v).tile:
        instr = makers.get(v)
        if instr is None:
            return None
        x = instr.inputs[0] if instr.inputs else -1
        if instr.kind == "convert_element_type" and flow.dtype(x) in ("float16", "bfloat16") and flow.dtype(v) == "float32":
            pass
        elif is_other_name(flow.values, instr):
            along = dict(zip(_real(flow, x), (along[d] for d in sorted(along)), strict=True))
        elif instr.kind == "transpose":
            along = {instr["permutation"][d]: to for d, to in along.items()}
        elif instr.kind == "broadcast_in_dim":
            shape = flow.type(x).rows_first
            along = {k: along[d] for k, d in enumerate(instr["dims"]) if d in along and shape[k] != 1}
        else:
            return None
        v = x
    columns = column_dims(product, len(flow.type(product.inputs[1]).shape))
    places = [columns.index(along[d]) if along[d] in columns else -1 for d in sorted(along)]
    whole = squeezed(flow.type(v).shape) == tuple(out.shape[along[d] - 1] for d in sorted(along))
    if not whole or -1 in places or places != sorted(places) or flow.dtype(v) not in _FLOATS or not _loaded(makers, program, v):
        return None
    return _Bias(v, tuple(places))


def _real(flow: Flow, v: int) -> list[int]:
    """The dimensions of ``v``, rows-first, that are not the rows and not of extent 1."""
    t = flow.type(v)
    return [d for d, n in enumerate(t.shape, int(t.tile)) if n != 1]


def _loaded(makers: Makers, program: TileProgram, v: int) -> bool:
    """Whether ``v`` is an array that depends on no row, seen with other strides or in another shape, but not copied."""
    chain = _chain(makers, v)
    if not chain or chain[0].kind != "load" or program.inputs[chain[0]["array"]].row_strides:
        return False
    strided = False
    for instr in chain[1:]:
        if instr.kind == "reshape" and strided and not is_other_name(program.values, instr):
            return False
        strided |= instr.kind != "reshape"
    return True


def _chain(makers: Makers, v: int | None) -> list[Instr]:
    """The instruction that makes ``v``, behind those that make what it is a view of."""
    instr = makers.get(v) if v is not None else None
    if instr is None:
        return []
    return [*(_chain(makers, instr.inputs[0]) if instr.kind in (*VIEWS, "copy") else []), instr]
