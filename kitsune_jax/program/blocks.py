"""Turns a stage that computes over a long dimension of its rows into loops over blocks of that dimension: ``blocked``.

Comes in: a ``TileProgram``, a dimension of one of its values, the extent of a block. Goes out: a program that computes the same and
never holds more than a block of that dimension. Arrays are read and written by slices, elementwise ops run block by block, and a
reduction over the dimension is a carry of the loop. A reduction that waits for an earlier one has a later loop, unless ``Factors``
takes it apart. Invariants: reductions keep their dtype; sums of 16-bit numbers are carried in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kitsune_jax.ops.graph import Op, Param, make_params
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import is_float, is_narrow, resolve_rows
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import FOLDED, ArrayType, Instr, LoopBody, Place, TileProgram, TileType, Writer
from kitsune_jax.program.loop_bounds import Range, Visible

# --- The dimension in every value (rows-first: 0 is the rows of a tile) -----------------------------------------------------------

_ROWS = 1_000_003  # stands for the rows of a tile; no other extent has this size
Join = tuple[str, tuple[tuple[int, int], ...]]  # (role, (value, dimension) pairs)
# Reductions over the dimension, and the op that combines two of them over parts of it.
FOLDS = {
    "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul", "reduce_and": "and", "reduce_or": "or",
    "matmul": "add", "dot": "add",
}  # fmt: skip
# The index of an extreme element: the reduction to that element, and the comparison of two such elements.
ARGS = {"argmax": ("max", "gt"), "argmin": ("min", "lt")}
# Families whose parameters do not name the extent of a dimension, or that are rewritten below.
_PARALLEL = frozenset({"pointwise", "convert", "broadcast", "reshape", "transpose", "iota", "reduce"})


class NotBlocked(ValueError):
    """The stage cannot be computed in blocks. The message is the reason."""


def inner_dims(types: Sequence[TileType], body: Sequence[Instr], value: int, dim: int) -> dict[int, int]:
    """Each value that has dimension ``dim`` of ``value``, and which of its dimensions that is. Raises ``NotBlocked``."""
    touching: dict[int, list[Instr]] = {}
    for instr in body:
        for v in (*instr.inputs, *instr.outputs):
            touching.setdefault(v, []).append(instr)
    found, work = {value: dim}, [value]
    while work:
        v = work.pop()
        for instr in touching.get(v, ()):
            for w, d in _along(types, instr, v, found[v]):
                if w not in found:
                    found[w] = d
                    work.append(w)
                elif found[w] != d:
                    raise NotBlocked("a value has the dimension twice")
    return found


def _along(types: Sequence[TileType], instr: Instr, v: int, dim: int) -> list[tuple[int, int]]:
    """The dimensions of the operands and results of ``instr`` that are the same as dimension ``dim`` of ``v``."""
    if instr.kind in ("load", "store", "row_index"):
        return []
    if instr.kind in FOLDED:
        return _along_sink(types, instr, v, dim)
    family = OPS[instr.kind].family if instr.kind in OPS else ""
    if family not in _PARALLEL and instr.kind not in FOLDS and instr.kind not in ARGS:
        raise NotBlocked(f"{instr.kind} has no code for a part of a dimension")
    for role, members in joins(types, instr):
        if (v, dim) not in members:
            continue
        if role == "mixed" and instr.kind in ARGS:
            return []
        if role == "mixed" or role == "reshaped" or (role == "contracted" and instr.kind not in FOLDS):
            raise NotBlocked(f"{instr.kind} needs every index of the dimension")
        return [m for m in members if m != (v, dim)]
    return []


def _along_sink(types: Sequence[TileType], instr: Instr, v: int, dim: int) -> list[tuple[int, int]]:
    if instr.kind == "sink":
        return []
    x, y = instr.inputs
    contract = list(zip(instr["x_contract"], instr["y_contract"], strict=True))
    found = [(y, b) for a, b in contract if (v, dim) == (x, a)] + [(x, a) for a, b in contract if (v, dim) == (y, b)]
    if (x == v and dim in instr["x_batch"]) or (y == v and dim in instr["y_batch"]):
        raise NotBlocked("products of tiles one by one along the dimension")
    return found


def sink_dim(types: Sequence[TileType], instr: Instr, inner: Mapping[int, int]) -> int | None:
    """The dimension of a sink's result that runs along the dimension ``inner`` of its operands; None where the sink folds it.
    Raises ``NotBlocked``."""
    if instr.kind == "sink":
        (x,), axes = instr.inputs, instr["axes"]
        return None if inner[x] in axes else sum(d not in axes for d in range(inner[x]))
    x, y = instr.inputs
    free = []
    for v, name in ((x, "x"), (y, "y")):
        used = (*instr[f"{name}_contract"], *instr[f"{name}_batch"])
        free.append([(v, d) for d in range(len(types[v].rows_first)) if d not in used])
    places = [k for k, (v, d) in enumerate((*free[0], *free[1])) if inner.get(v) == d]
    if len(places) > 1:
        raise NotBlocked("a sum with the dimension twice")
    if places and places[0] not in (0, len(free[0])):
        raise NotBlocked("a sum that has another dimension in front of it")
    return len(instr["x_batch"]) + places[0] if places else None


def joins(types: Sequence[TileType], instr: Instr) -> list[Join]:
    """The relations between the dimensions of an instruction's operands and results."""
    operands = (*instr.inputs, *instr.outputs)
    if instr.kind in ("matmul", "dot"):
        return _product(types, instr)
    shapes = [(_ROWS, *types[v].shape) if types[v].tile else types[v].shape for v in operands]
    n = len(instr.inputs)
    inside = tuple(range(n)), tuple(range(n, len(operands)))
    op = Op(instr.kind, *inside, tuple(resolve_rows(dict(instr.params), _ROWS).items()))
    relations = OPS[instr.kind].relate(op, tuple(shapes[:n]), tuple(shapes[n:]))
    return [(r.role, tuple((operands[k], d) for k, d in r.members)) for r in relations]


def _product(types: Sequence[TileType], instr: Instr) -> list[Join]:
    x, y, *bias = instr.inputs
    if bias:
        raise NotBlocked("a product with a bias")
    (out,) = instr.outputs
    name = "w" if instr.kind == "matmul" else "y"
    contract, batch = (list(zip(instr[f"x_{what}"], instr[f"{name}_{what}"], strict=True)) for what in ("contract", "batch"))
    falls_out: list[tuple[tuple[int, int], ...]] = [] if instr.kind == "matmul" else [((x, 0), (y, 0))]
    falls_out += [((x, a), (y, b)) for a, b in batch]
    used = {(x, a) for a, _ in (*contract, *batch)}, {(y, b) for _, b in (*contract, *batch)}
    for v, taken in zip((x, y), used, strict=True):
        first = int(types[v].tile and instr.kind == "dot")
        falls_out += [((v, d),) for d in range(first, len(types[v].rows_first)) if (v, d) not in taken]
    order = instr["out_perm"] if instr.kind == "matmul" else range(len(falls_out))
    found: list[Join] = [("parallel", (*falls_out[p], (out, k))) for k, p in enumerate(order)]
    return found + [("contracted", ((x, a), (y, b))) for a, b in contract]


# --- Taking sums over the dimension apart -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OuterFactor:
    """A factor of a sum's elements that is the same along the summed dimension. ``value``: the factor without that dimension;
    ``kind``: "mul"; "div" for a divisor; "" for an addend (``Top.minus``)."""

    kind: str
    value: int
    place: Place


@dataclasses.dataclass(frozen=True)
class Top:
    """``exp(scores - value)`` was a factor; the part has ``exp(scores - running)`` instead. ``minus`` is placed in the scores."""

    scores: int
    running: int
    minus: OuterFactor
    place: Place  # of the scores' dimensions in the part


@dataclasses.dataclass(frozen=True)
class FactoredPart:
    """A value without some of its factors. ``value``: the rest; ``outer``, ``top``: the factors. ``kept``: conditions (a value, and
    which case); where one does not hold, an element is 0 whatever its factors are."""

    value: int
    outer: tuple[OuterFactor, ...] = ()
    top: Top | None = None
    kept: tuple[tuple[int, bool, Place], ...] = ()


class Factors:
    """Takes factors out of sums, so that the sums need not wait for earlier reductions.

    A sum over k of ``g * x[k]`` is g times the sum of x; a sum of ``x[k] * exp(s[k] - c)`` is ``exp(t - c)`` times the sum of
    ``x[k] * exp(s[k] - t)``, for any t. So neither sum waits for a ``g`` or ``c`` that an earlier reduction makes (the sum of a
    softmax, the largest score): with the largest s so far as ``t``, it is scaled again whenever that grows.

    ``inner``: values that have the dimension, and which of theirs it is; ``level``: the number of loops that a value waits for."""

    def __init__(self, writer: Writer, makers: dict[int, Instr], inner: dict[int, int], level: Callable[[int], int]):
        self.writer, self.makers, self.inner, self.level = writer, makers, inner, level
        self.known: dict[int, FactoredPart] = {}
        self.running: dict[int, int] = {}  # scores -> the value that stands for the largest of them so far

    def split(self, v: int) -> FactoredPart:
        if v not in self.known:
            found = self._split(v, self.makers[v]) if v in self.makers and v in self.inner and self.level(v) else None
            self.known[v] = found or FactoredPart(v)
        return self.known[v]

    def _split(self, v: int, instr: Instr) -> FactoredPart | None:
        if instr.kind in ("mul", "div"):
            return self._product(v, instr)
        if instr.kind == "exp":
            return self._exponential(v, instr)
        if instr.kind == "select_n":
            return self._selected(v, instr)
        if instr.kind in ("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "neg"):
            return self._moved(v, instr)
        return None

    def _product(self, v: int, instr: Instr) -> FactoredPart | None:
        for k in (1, 0) if instr.kind == "mul" else (1,):
            x, y = instr.inputs[1 - k], instr.inputs[k]
            outer = self.constant(y)
            part = self.split(x)
            if outer is not None:
                return dataclasses.replace(part, outer=(*part.outer, dataclasses.replace(outer, kind=instr.kind)))
            if self.level(y) == 0 and part.value != x:
                inputs = (part.value, y) if k == 1 else (y, part.value)
                return dataclasses.replace(part, value=self._clone_with_operands(v, instr, inputs))
        return None

    def constant(self, v: int) -> OuterFactor | None:
        """``v`` without the dimension, along which it is repeated."""
        instr = self.makers.get(v)
        if instr is None or instr.kind != "broadcast_in_dim" or instr.inputs[0] in self.inner:
            return None
        (x,) = instr.inputs
        sizes = self.writer.types[x].rows_first
        return OuterFactor("", x, tuple(None if n == 1 else d for n, d in zip(sizes, instr["dims"], strict=True)))

    def _exponential(self, v: int, instr: Instr) -> FactoredPart | None:
        difference = self.makers.get(instr.inputs[0])
        if difference is None or difference.kind != "sub":
            return None
        scores, largest = difference.inputs
        minus = self.constant(largest)
        if minus is None or scores not in self.inner:
            return None
        w, t = self.writer, self.writer.types[scores]
        dtype = "float32" if is_narrow(t.dtype) else t.dtype
        dim, whole = self.inner[scores], TileType(t.tile, t.shape, dtype)
        kept = tuple(n for d, n in enumerate(t.rows_first) if d != dim)
        if not t.tile:
            return None
        if scores not in self.running:
            self.running[scores] = w.new(TileType(True, kept[1:], dtype))
        running = self.running[scores]
        wide = scores if dtype == t.dtype else self._new(scores, "convert_element_type", (scores,), whole, new_dtype=dtype)
        dims = tuple(d for d in range(len(t.rows_first)) if d != dim)
        top = self._new(scores, "broadcast_in_dim", (running,), whole, shape=t.rows_first, dims=dims)
        x = self._new(scores, "exp", (self._new(scores, "sub", (wide, top), whole),), whole)
        if dtype != t.dtype:
            x = self._new(scores, "convert_element_type", (x,), w.types[v], new_dtype=t.dtype)
        return FactoredPart(x, (), Top(scores, running, minus, tuple(range(len(t.rows_first)))))

    def _selected(self, v: int, instr: Instr) -> FactoredPart | None:
        which, *cases = instr.inputs
        if len(cases) != 2 or self.level(which) or which not in self.inner:
            return None
        for k in range(2):
            part = self.split(cases[k])
            if part.value != cases[k] and self._is_zero(cases[1 - k]):
                inputs = [which, *cases]
                inputs[1 + k] = part.value
                same: Place = tuple(range(len(self.writer.types[v].rows_first)))
                return dataclasses.replace(
                    part, value=self._clone_with_operands(v, instr, tuple(inputs)), kept=(*part.kept, (which, k == 1, same))
                )
        return None

    def _is_zero(self, v: int) -> bool:
        while v in self.makers and self.makers[v].kind in ("broadcast_in_dim", "reshape", "convert_element_type"):
            v = self.makers[v].inputs[0]
        return self.writer.literals.get(v) == 0

    def _moved(self, v: int, instr: Instr) -> FactoredPart | None:
        (x,) = instr.inputs
        part = self.split(x)
        if part.value == x:
            return None
        types = self.writer.types
        if instr.kind == "convert_element_type" and not (types[x].dtype.endswith(_FLOATS) and types[v].dtype.endswith(_FLOATS)):
            return None
        moved = moves(types, instr, x)
        placed = _placed(part, {d: moved.get(d) for d in range(len(types[x].rows_first))})
        return None if placed is None else dataclasses.replace(placed, value=self._clone_with_operands(v, instr, (part.value,)))

    def _clone_with_operands(self, v: int, instr: Instr, inputs: tuple[int, ...]) -> int:
        """The result of ``instr``, which makes ``v``, of other operands."""
        return self._new(v, instr.kind, inputs, self.writer.types[v], **dict(instr.params))

    def _new(self, like: int, kind: str, inputs: tuple[int, ...], t: TileType, **params: object) -> int:
        """A new value over the whole dimension, which is the same dimension as in ``like``."""
        self.writer.about = self.makers[like].op if like in self.makers else -1
        with self.writer.separate_body() as body:
            made = self.writer.add(kind, inputs, t, **params)  # type: ignore[arg-type]
        self.makers[made] = body[0]
        self.inner[made] = self.inner[like]
        return made


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def moves(types: list[TileType], instr: Instr, v: int) -> dict[int, int]:
    """Dimension of operand ``v`` -> the same dimension of the result."""
    (out,) = instr.outputs
    parallel = [members for role, members in joins(types, instr) if role == "parallel"]
    return {d: e for members in parallel for w, d in members if w == v for o, e in members if o == out}


def _placed(part: FactoredPart, moved: Mapping[int, int | None]) -> FactoredPart | None:
    """``part`` with its places moved along; None where a dimension of one of them is gone."""

    places = [*(o.place for o in part.outer), *(place for _, _, place in part.kept), *((part.top.place,) if part.top else ())]
    if any(d is not None and moved.get(d) is None for place in places for d in place):
        return None

    def on(place: Place) -> Place:
        return tuple(None if d is None else moved[d] for d in place)

    outer = tuple(dataclasses.replace(o, place=on(o.place)) for o in part.outer)
    top = part.top and dataclasses.replace(part.top, place=on(part.top.place))
    return FactoredPart(part.value, outer, top, tuple((w, k, on(place)) for w, k, place in part.kept))


def after_fold(types: list[TileType], part: FactoredPart, fold: Instr, v: int, inner: int) -> FactoredPart | None:
    """``part`` of operand ``v`` of ``fold``, with places in its result; None where the result lacks one of them."""
    moved: dict[int, int | None] = dict(moves(types, fold, v))

    def dropped(place: Place, sizes: tuple[int, ...]) -> Place:
        return tuple(None if n == 1 or d == inner else d for d, n in zip(place, sizes, strict=True))

    kept = tuple((w, k, dropped(p, types[w].rows_first)) for w, k, p in part.kept)
    top = part.top and dataclasses.replace(part.top, place=dropped(part.top.place, types[part.top.scores].rows_first))
    return _placed(dataclasses.replace(part, kept=kept, top=top), moved)


# --- One iteration: instructions over the whole dimension, written again for one block when a value is asked for ------------------

_SIZES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}


class Iteration:
    """The block of ``size`` elements from element ``number * step`` on. ``facts``: conditions that are the same for all of them.
    ``values``: value over the whole dimension -> value of the block."""

    def __init__(self, blocked: _Blocked, number: int, step: int, size: int, facts: Mapping[int, bool]):
        self.writer, self.program, self.makers, self.inner = blocked.writer, blocked.program, blocked.makers, blocked.inner
        self.number, self.step, self.size, self.facts = number, step, size, facts
        self.values: dict[int, int] = {}

    def value(self, v: int) -> int:
        work = [v]  # no recursion: a chain may be longer than Python's stack
        while work:
            x = work[-1]
            if x in self.values or x not in self.inner:
                work.pop()
                continue
            same = self._equal_operand(self.makers[x])
            operands = () if x in self.facts else self.makers[x].inputs if same is None else (same,)
            missing = [o for o in operands if o in self.inner and o not in self.values]
            work += reversed(missing)
            if not missing:
                self.values[x] = self._written(x, self.makers[x]) if same is None else self.values.get(same, same)
        return self.values.get(v, v)

    def _equal_operand(self, instr: Instr) -> int | None:
        """The operand that the result of ``instr`` equals because of ``facts``."""
        if instr.kind == "select_n" and instr.inputs[0] in self.facts:
            return instr.inputs[1 + self.facts[instr.inputs[0]]]
        if instr.kind in ("and", "or"):
            a, b = instr.inputs
            return next((x for x, c in ((a, b), (b, a)) if self.facts.get(c) is (instr.kind == "and")), None)
        return None

    def type(self, v: int) -> TileType:
        t = self.writer.types[v]
        first = int(t.tile)
        shape = tuple(self.size if d + first == self.inner[v] else n for d, n in enumerate(t.shape))
        return TileType(t.tile, shape, t.dtype)

    def _written(self, v: int, instr: Instr) -> int:
        w, t, params = self.writer, self.type(v), dict(instr.params)
        if v in self.facts:
            return w.filled(self.facts[v], t)
        if instr.kind == "load":
            array = self.program.inputs[instr["array"]]
            w.about = instr.op
            return w.add("load_slice", (self.number,), t, array=instr["array"], **self._part_of(array, v))
        if instr.kind in _SIZES:
            params[_SIZES[instr.kind]] = t.rows_first
        if instr.kind == "iota" and instr["dimension"] == self.inner[v]:  # counted in int32, then rounded or wrapped once
            first = self._first()
            counted = w.add("iota", (), dataclasses.replace(t, dtype="int32"), **params)
            return w.convert(w.op("add", counted, first), t.dtype)
        inputs = [self.value(x) for x in instr.inputs]
        w.about = instr.op
        return w.add(instr.kind, inputs, t, **params)

    def _first(self) -> int:
        """The number of the block's first element."""
        return self.number if self.step == 1 else self.writer.op("mul", self.number, self.writer.literal(self.step, "int32"))

    def _part(self, dim: int) -> dict[str, Param]:
        return {"dims": (dim,), "steps": (self.step,), "sizes": (self.size,)}

    def _part_of(self, array: ArrayType, v: int) -> dict[str, Param]:
        """The block as a part of ``array``, which is the value ``v`` as a whole."""
        return self._part(array.kept[self.inner[v] - self.writer.types[v].tile])

    def reduced(self, kind: str, x: int, dim: int, dtype: str) -> int:
        t = self.writer.types[x]
        kept = tuple(n for d, n in enumerate(t.rows_first) if d != dim)
        return self.writer.add(kind, (x,), TileType(True, kept[1:], dtype), axes=(dim,))

    def fold(self, instr: Instr, operand: int, t: TileType) -> int:
        """Write ``instr`` with ``operand`` in place of its first operand, and a result of type ``t``."""
        w = self.writer
        x = self.value(operand)
        if instr.kind == "reduce_sum" and is_narrow(w.types[x].dtype):
            x = w.convert(x, t.dtype)
        inputs = (x, *(self.value(v) for v in instr.inputs[1:]))
        w.about = instr.op
        return w.add(instr.kind, inputs, t, **dict(instr.params))

    def extreme(self, instr: Instr, best: int, index: int) -> tuple[int, int]:
        """The extreme element so far and its index, after the block: the first of equal elements, and the first NaN of all."""
        w, x = self.writer, self.value(instr.inputs[0])
        how, beyond = ARGS[instr.kind]
        t, counted = w.types[best], w.types[index]
        here = self.reduced(f"reduce_{how}", x, instr["axis"], t.dtype)
        w.about = instr.op
        at = w.add(instr.kind, (x,), counted, axis=instr["axis"])
        at = w.op("add", at, self._first())
        better = w.op(beyond, here, best, dtype="bool")
        if is_float(t.dtype):
            nan = w.op("and", w.op("ne", here, here, dtype="bool"), w.op("eq", best, best, dtype="bool"))
            better = w.op("or", better, nan)
        return w.op("select_n", better, best, here), w.op("select_n", better, index, at)

    def sink(self, instr: Instr) -> None:
        """Fold the block by ``instr``, into the block's part of its sink if the sink has the dimension."""
        inputs, params = [self.value(v) for v in instr.inputs], dict(instr.params)
        if (d := sink_dim(self.writer.types, instr, self.inner)) is not None:
            inputs.append(self.number)
            params |= self._part(d)
        self.writer.body.append(Instr(instr.kind, tuple(inputs), (), make_params(**params), instr.op))

    def store(self, instr: Instr) -> None:
        (x,) = instr.inputs
        params = make_params(array=instr["array"], **self._part_of(self.program.outputs[instr["array"]], x))
        self.writer.body.append(Instr("store_slice", (self.value(x), self.number), (), params, instr.op))


# --- Loops over blocks ------------------------------------------------------------------------------------------------------------

_LINEAR = frozenset({"reduce_sum", "matmul", "dot"})


def blocked(program: TileProgram, value: int, dim: int, block: int, edge: int = 0) -> TileProgram:
    """``program``, of one stage, with loops over blocks of ``block`` elements of (rows-first) dimension ``dim`` of ``value``.
    ``edge``, a divisor of ``block``: the elements of a block where a mask hides some of them; 0: as many as in others.

    Raises ``NotBlocked`` with the reason where an instruction cannot be cut there.
    """
    (stage,) = program.stages
    size = program.values[value].rows_first[dim]
    if not 0 < block < size:
        raise NotBlocked(f"blocks of {block} elements of {size}")
    inner = inner_dims(program.values, stage.body, value, dim)
    made = _Blocked(program, stage.body, inner, size, block, edge or block)
    body, w = tuple(made.run()), made.writer
    return dataclasses.replace(program.with_bodies(lambda _: body), values=tuple(w.types), literals=tuple(w.literals.items()))


@dataclasses.dataclass
class _BlockedFold:
    """A reduction over the dimension. ``result``: its last carry, in the dtype that is carried."""

    instr: Instr
    part: FactoredPart
    result: int

    @property
    def how(self) -> str:
        return "sum" if self.instr.kind in _LINEAR else self.instr.kind.removeprefix("reduce_")


@dataclasses.dataclass
class _Extreme:
    """The index of an extreme element along the dimension. ``best``, ``index``: the last carries, the index in int32."""

    instr: Instr
    best: int
    index: int


@dataclasses.dataclass
class _BlockLoopState:
    """The carries of one loop: running maxima of scores (``tops``: scores -> the last one), folds, indices of extreme elements, and
    whether any element was kept (``kept``: (condition, case) -> the last one); its stores and its sinks."""

    tops: dict[int, int] = dataclasses.field(default_factory=dict)
    folds: list[_BlockedFold] = dataclasses.field(default_factory=list)
    extremes: list[_Extreme] = dataclasses.field(default_factory=list)
    kept: dict[tuple[int, bool], int] = dataclasses.field(default_factory=dict)
    stores: list[Instr] = dataclasses.field(default_factory=list)
    sinks: list[Instr] = dataclasses.field(default_factory=list)

    @property
    def results(self) -> list[int]:
        extremes = (v for e in self.extremes for v in (e.best, e.index))
        return [*self.tops.values(), *(f.result for f in self.folds), *extremes, *self.kept.values()]


class _Blocked:
    def __init__(self, program: TileProgram, body: Sequence[Instr], inner: dict[int, int], size: int, block: int, edge: int):
        self.program, self.old, self.inner, self.size, self.block, self.edge = program, body, inner, size, block, edge
        self.writer = Writer(list(program.values), dict(program.literals))
        self.makers = {v: i for i in body for v in i.outputs}
        self.levels: dict[int, int] = {}
        self.outside: list[tuple[int, Instr]] = []
        self.loops: dict[int, _BlockLoopState] = {}
        self.factors = Factors(self.writer, self.makers, inner, self.level)

    def level(self, v: int) -> int:
        """The number of loops that end before ``v`` can be computed."""
        if v not in self.levels:
            made = self.makers.get(v)
            self.levels[v] = max(map(self.level, made.inputs), default=0) if made is not None else 0
        return self.levels[v]

    def run(self) -> list[Instr]:
        for instr in self.old:
            level = max(map(self.level, instr.inputs), default=0)
            across = any(v in self.inner for v in instr.inputs)
            if any(v in self.inner for v in instr.outputs):
                self.levels.update(dict.fromkeys(instr.outputs, level))
            elif across and instr.kind == "store":
                self._loop(level).stores.append(instr)
            elif across and instr.kind in FOLDED:
                self._loop(level).sinks.append(instr)
            elif across:
                self._fold(instr, level)
            else:
                self._outside(level, instr)
        with self.writer.separate_body() as body:
            for level in range(max((*self.loops, *(at for at, _ in self.outside)), default=0) + 1):
                body.extend(i for at, i in self.outside if at == level)
                if level in self.loops:
                    self._emit(self.loops[level])
        return body

    def _loop(self, level: int) -> _BlockLoopState:
        return self.loops.setdefault(level, _BlockLoopState())

    def _outside(self, level: int, instr: Instr) -> None:
        self.outside.append((level, instr))
        self.levels.update(dict.fromkeys(instr.outputs, level))

    def _fold(self, instr: Instr, level: int) -> None:
        types, (out,) = self.writer.types, instr.outputs
        if instr.kind not in FOLDS and instr.kind not in ARGS:
            raise NotBlocked(f"{instr.kind} has no code for a part of a dimension")
        if not types[out].tile:
            raise NotBlocked("a reduction that does not depend on the rows")
        if instr.kind in ARGS:
            return self._extreme(instr, level)
        part = FactoredPart(instr.inputs[0])
        if level and instr.kind in _LINEAR:
            found = self.factors.split(instr.inputs[0])
            lower = max(self._part_level(found), *map(self.level, instr.inputs[1:]), 0)
            placed = after_fold(types, found, instr, instr.inputs[0], self.inner[instr.inputs[0]]) if lower < level else None
            if placed is not None:
                part, level = placed, lower
        loop = self._loop(level)
        dtype = types[out].dtype
        wide = "float32" if instr.kind in _LINEAR and is_narrow(dtype) else dtype
        result = self.writer.new(TileType(True, types[out].shape, wide))
        loop.folds.append(_BlockedFold(instr, part, result))
        self.levels[result] = level + 1
        if part.top is not None and part.top.scores not in loop.tops:
            running = types[part.top.running]
            loop.tops[part.top.scores] = self.writer.new(running)
            self.levels[loop.tops[part.top.scores]] = level + 1
        for condition, case, _ in part.kept:
            if (condition, case) not in loop.kept:
                shape = tuple(n for d, n in enumerate(types[condition].rows_first) if d != self.inner[condition])[1:]
                loop.kept[condition, case] = self.writer.new(TileType(True, shape, "bool"))
        self._restore_factors(loop, part, result, out, level + 1)

    def _extreme(self, instr: Instr, level: int) -> None:
        types, (x,), (out,) = self.writer.types, instr.inputs, instr.outputs
        if types[x].dtype == "bool":
            raise NotBlocked(f"{instr.kind} of bools has no code for a part of a dimension")
        best, index = (self.writer.new(TileType(True, types[out].shape, dtype)) for dtype in (types[x].dtype, "int32"))
        self._loop(level).extremes.append(_Extreme(instr, best, index))
        self.levels.update({best: level + 1, index: level + 1})
        with self.writer.separate_body() as body:
            found = self.writer.convert(index, types[out].dtype)
            body.append(Instr("copy", (found,), (out,)))
        for after in body:
            self._outside(level + 1, after)

    def _part_level(self, part: FactoredPart) -> int:
        return max(self.level(part.value), self.level(part.top.scores) if part.top else 0)

    def _restore_factors(self, loop: _BlockLoopState, part: FactoredPart, result: int, out: int, level: int) -> None:
        """Multiply the last carry of a reduction by the factors that its operand was taken apart from."""
        w = self.writer
        t = w.types[result]
        with w.separate_body() as body:
            x = result
            if part.top is not None:
                x = w.op("mul", x, w.spread(*self._final_scale(loop.tops[part.top.scores], part.top), t))
            for outer in part.outer:
                x = w.op(outer.kind, x, w.spread(w.convert(outer.value, t.dtype), outer.place, t))
            for condition, case, place in part.kept:
                any_kept = loop.kept[condition, case]
                dims = tuple(p for d, p in enumerate(place) if d != self.inner[condition])
                whether = w.spread(any_kept, dims, TileType(True, t.shape, "bool"))
                x = w.op("select_n", whether, w.filled(0, t), x)
            x = w.convert(x, w.types[out].dtype)
            body.append(Instr("copy", (x,), (out,)))
        factors = [*(outer.value for outer in part.outer), *((part.top.minus.value,) if part.top else ())]
        level = max([level, *map(self.level, factors)])
        for instr in body:
            self._outside(level, instr)

    def _final_scale(self, last: int, top: Top) -> tuple[int, Place]:
        """exp(largest score - the score that the program subtracts), and where its dimensions are in the result."""
        w, dim = self.writer, self.inner[top.scores]
        t = w.types[last]
        place = tuple(None if d is None else d - (d > dim) for d in top.minus.place)
        minus = w.spread(w.convert(top.minus.value, t.dtype), place, t)
        kept = tuple(p for d, p in enumerate(top.place) if d != dim)
        return w.op("exp", w.op("sub", last, minus)), kept

    def _emit(self, loop: _BlockLoopState) -> None:
        """Write the loop, and behind it the remainder of the dimension. If a mask hides blocks from a tile, the blocks that it
        shows as a whole have a loop of their own, without the mask.
        """
        w = self.writer
        whole, rest = divmod(self.size, self.block)
        carries = [w.filled(*self._initial(loop, v)) for v in loop.results]
        seen, visible = self._visible_range(loop)
        kinds = ("whole", "edges") if seen is not None else ("all",)
        for which in kinds:
            inside, after = ([w.new(w.types[v]) for v in loop.results] for _ in range(2))
            number = w.new(TileType(False, (), "int32"))
            facts = visible.facts(seen) if seen is not None and which == "whole" else {}
            # Bounds that are known at run time only may make all blocks edges; all parts of a sink have one length.
            smaller = which == "edges" and seen is not None and seen.by is None and not loop.sinks
            size = self.edge if smaller else self.block
            with w.separate_body() as body:
                results = self._step(loop, inside, number, size, size, facts)
            params: dict[str, Param] = {"count": whole * self.block // size, "reverse": False}
            if seen is not None:
                params["within"] = seen.axis, size, seen.low, seen.high, which
            if size < self.block:
                params["together"] = self.block // size
            if seen is not None and seen.by is not None:
                params["shifted"] = *seen.by, seen.guard, self.size
            block = LoopBody(number, tuple(inside), tuple(body), tuple(results))
            w.body.append(Instr("loop", tuple(carries), tuple(after), make_params(**params), block=block))
            carries = after
        if rest:
            carries = self._step(loop, carries, w.literal(whole * self.block, "int32"), 1, rest, {})
        for made, result in zip(carries, loop.results, strict=True):
            w.body.append(Instr("copy", (made,), (result,)))

    def _initial(self, loop: _BlockLoopState, v: int) -> tuple[float | int | bool, TileType]:
        t = self.writer.types[v]
        if any(v == e.index for e in loop.extremes):
            return 0, t
        how = next((f.how for f in loop.folds if f.result == v), "max" if v in loop.tops.values() else "or")
        how = next((ARGS[e.instr.kind][0] for e in loop.extremes if e.best == v), how)
        dtype = np.dtype("float32") if is_narrow(t.dtype) else np.dtype(t.dtype)
        return identity(how, dtype), t

    def _visible_range(self, loop: _BlockLoopState) -> tuple[Range | None, Visible]:
        """The range of elements outside of which a tile's rows change neither the loop's carries nor a sink; None without one."""
        visible = Visible(self.writer, self.makers, self.inner, self.program, self.size)
        terms = [i.inputs for i in loop.sinks if self.program.sinks[i["sink"]].how == "sum"]
        others = [f for f in loop.folds if f.part.top is None and not self._is_top(loop, f)]
        terms += [(f.part.value, *f.instr.inputs[1:]) for f in others if f.how == "sum"]
        if loop.stores or loop.extremes or len(terms) < len(loop.sinks) + len(others) or loop.kept and terms:
            return None, visible
        seen = visible.of(list(loop.tops)) if loop.tops else None
        if terms:
            found = set.intersection(*(visible.of_terms(values) for values in terms))
            if loop.tops:
                found &= {seen}
            seen = next(iter(sorted(found, key=str)), None)
        return seen, visible

    def _is_top(self, loop: _BlockLoopState, fold: _BlockedFold) -> bool:
        """Whether ``fold`` is the largest of scores whose running maximum is carried in any case, perhaps as a wider float, which
        has the same value."""
        (scores, *_), (out,) = fold.instr.inputs, fold.instr.outputs
        if scores not in loop.tops or fold.how != "max" or fold.instr["axes"] != (self.inner[scores],):
            return False
        types = self.writer.types
        top, result = types[loop.tops[scores]], types[out]
        return dataclasses.replace(top, dtype=result.dtype) == result and result.dtype in (top.dtype, types[scores].dtype)

    def _step(
        self, loop: _BlockLoopState, carries: Sequence[int], number: int, step: int, size: int, facts: Mapping[int, bool]
    ) -> list[int]:
        """Write one block; returns the next carries. ``facts``: conditions that are the same for all of its elements."""
        w = self.writer
        of = Iteration(self, number, step, size, facts)
        scales: dict[int, int] = {}
        out = []
        now = dict(zip(loop.results, carries, strict=True))
        for scores, result in loop.tops.items():
            m, t = now[result], w.types[result]
            largest = w.convert(of.reduced("reduce_max", of.value(scores), self.inner[scores], w.types[scores].dtype), t.dtype)
            new = w.op("max", m, largest)
            nothing = w.op("eq", new, w.literal(-np.inf, t.dtype), dtype="bool")  # no block has shown a score yet
            running = w.op("select_n", nothing, new, w.filled(0.0, t))
            of.values[self.factors.running[scores]] = running
            scales[scores] = w.op("exp", w.op("sub", m, running))
            out.append(new)
        tops = dict(zip(loop.tops, out, strict=True))
        for fold in loop.folds:
            if self._is_top(loop, fold):
                out.append(w.convert(tops[fold.instr.inputs[0]], w.types[fold.result].dtype))
                continue
            t, acc = w.types[fold.result], now[fold.result]
            if fold.part.top is not None:
                top = fold.part.top
                place = tuple(p for d, p in enumerate(top.place) if d != self.inner[top.scores])
                acc = w.op("mul", acc, w.spread(scales[top.scores], place, t))
            out.append(w.op(FOLDS[fold.instr.kind], acc, of.fold(fold.instr, fold.part.value, t)))
        for extreme in loop.extremes:
            out += of.extreme(extreme.instr, now[extreme.best], now[extreme.index])
        for (condition, case), result in loop.kept.items():
            here = of.value(condition)
            here = here if case else w.op("not", here)
            out.append(w.op("or", now[result], of.reduced("reduce_or", here, self.inner[condition], "bool")))
        for store in loop.stores:
            of.store(store)
        for sink in loop.sinks:
            of.sink(sink)
        return out
