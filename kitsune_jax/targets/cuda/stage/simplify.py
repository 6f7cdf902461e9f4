"""Passes over a tile program before a GPU stage is lowered: joined products, values of loops as tiles, and rounded values.

Comes in: a ``TileProgram``. Goes out: one that computes the same, in a form that a stage has code for; and the 16-bit results that
must be rounded (``rounded_results``).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.graph import Param, Scalar, make_params
from kitsune_jax.ops.spec import COMPARISONS, EVERYWHERE, HAND_ON, NARROW, ROWS
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram, TileType, walk
from kitsune_jax.program.passes import VIEWS, compared_values
from kitsune_jax.targets.cuda import pack

# --- Sums of two products as one product ------------------------------------------------------------------------------------------

_SAME_CONTRACTION = ("x_contract", "w_contract", "x_batch", "w_batch", "out_perm", "accumulate")


def sums_of_products_as_one(program: TileProgram) -> TileProgram:
    """``program`` with ``[x h] @ [a; b]`` in place of ``x @ a + h @ b``, as in a recurrent cell, which needs one set of
    accumulators.

    The concatenation of the operands is never made, because only products read it, and XLA joins the weights when it packs them.
    The operand from an array comes first, so that a step multiplies with it while it waits for columns of other CTAs.
    """
    return _JoinProducts(program).run()


class _JoinProducts:
    def __init__(self, program: TileProgram):
        self.program, self.values = program, list(program.values)
        body = [i for s in program.stages for i in walk(s.body)]
        self.uses = Counter(v for i in body for v in (*i.inputs, *(i.block.results if i.block else ())))
        self.makers = {v: i for i in body for v in i.outputs}
        self.kept = compared_values(program) | pack.find_weight_slices(program).makers.keys()

    def run(self) -> TileProgram:
        stages = tuple(dataclasses.replace(s, body=self._body(s.body)) for s in self.program.stages)
        return dataclasses.replace(self.program, stages=stages, values=tuple(self.values))

    def _body(self, body: Sequence[Instr]) -> tuple[Instr, ...]:
        here = {v: i for i in body for v in i.outputs}
        found: list[Instr] = []
        gone: set[Instr] = set()
        for i in body:
            pair = [here[v] for v in i.inputs if v in here] if i.kind == "add" else []
            if len(pair) == 2 and self._joinable(i, *pair):
                gone.update(pair)
                found += self._joined(i, *sorted(pair, key=self._waits))
            elif i.block is not None:
                found.append(dataclasses.replace(i, block=dataclasses.replace(i.block, body=self._body(i.block.body))))
            else:
                found.append(i)
        return tuple(i for i in found if i not in gone)

    def _joinable(self, add: Instr, a: Instr, b: Instr) -> bool:
        """Do both products multiply whole rows with whole matrices, and does only ``add`` read them?"""
        if a is b or not a.kind == b.kind == "matmul" or any(a.get(name) != b.get(name) for name in _SAME_CONTRACTION):
            return False
        x, w, y, u = (self.values[v] for i in (a, b) for v in i.inputs)
        plain = tuple(a["x_contract"]) == (1,) and tuple(a["w_contract"]) == (0,) and len(w.shape) == len(u.shape) == 2
        alike = x.dtype == y.dtype == w.dtype == u.dtype and w.shape[1] == u.shape[1] and len(x.shape) == len(y.shape) == 1
        dtypes = {self.values[i.outputs[0]].dtype for i in (add, a, b)}
        read = any(self.uses[i.outputs[0]] != 1 for i in (a, b))
        compared = not self.kept.isdisjoint((*add.outputs, *add.inputs, a.inputs[1], b.inputs[1]))
        return plain and alike and len(dtypes) == 1 and not read and not compared

    def _waits(self, product: Instr) -> bool:
        """Does the product read a value that a step makes or carries?"""
        maker = self.makers.get(product.inputs[0])
        while maker is not None and maker.kind == "reshape":
            maker = self.makers.get(maker.inputs[0])
        return maker is None or maker.kind not in ("load", "load_slice")

    def _joined(self, add: Instr, a: Instr, b: Instr) -> list[Instr]:
        x, y = (self.values[i.inputs[0]] for i in (a, b))
        w, u = (self.values[i.inputs[1]] for i in (a, b))
        rows = self._new(TileType(True, (x.shape[0] + y.shape[0],), x.dtype))
        weights = self._new(TileType(False, (w.shape[0] + u.shape[0], w.shape[1]), w.dtype))
        return [
            Instr("concatenate", (a.inputs[0], b.inputs[0]), (rows,), make_params(dimension=1)),
            Instr("concatenate", (a.inputs[1], b.inputs[1]), (weights,), make_params(dimension=0)),
            dataclasses.replace(a, inputs=(rows, weights), outputs=add.outputs),
        ]

    def _new(self, t: TileType) -> int:
        self.values.append(t)
        return len(self.values) - 1


# --- Stationary values that change with a loop or a batch, as tiles ---------------------------------------------------------------

_SLICES = ("load_slice", "store_slice")
_SAME = frozenset({"pointwise", "convert", "reduce"})  # families whose ops need at most other axes for tiles
_Params = dict[str, Param]


def loop_values_as_tiles(program: TileProgram) -> TileProgram:
    """``program`` in which stationary values that depend on a loop's number or carries, or on the batch of a tile, are tiles whose
    rows are all the same. XLA makes the other stationary values before the call, which it cannot do for these. Unchanged if there
    is no loop and no batch. Raises ``CannotLower`` where an instruction has no form for tiles.
    """
    if not program.batch_axes and not any(i.kind == "loop" or i.kind in _SLICES for s in program.stages for i in walk(s.body)):
        return program
    weights = pack.find_weight_slices(program).makers.keys()
    found = {v for s in program.stages for v in _varying_values(program, s.body)} - weights
    values = [dataclasses.replace(t, tile=t.tile or v in found) for v, t in enumerate(program.values)]
    stages = tuple(dataclasses.replace(s, body=_body_with_tiles(s.body, found, program, values)) for s in program.stages)
    return dataclasses.replace(program, values=tuple(values), stages=stages)


def _varying_values(program: TileProgram, body: Sequence[Instr]) -> set[int]:
    """Stationary values of ``body`` that are made from a loop's number or carries, or loaded by these or by a batch."""
    found: set[int] = set()
    for i in walk(body):
        if i.block is not None:
            found.update((i.block.index, *i.block.carries, *i.outputs))
        elif i.kind == "load_slice" or (i.kind == "load" and pack.loads_by_batch(program, i)) or not found.isdisjoint(i.inputs):
            found.update(i.outputs)
    return {v for v in found if not program.values[v].tile}


def _body_with_tiles(body: Sequence[Instr], found: set[int], program: TileProgram, values: list[TileType]) -> tuple[Instr, ...]:
    """``body`` in which the values ``found`` are tiles. New values are appended to ``values``."""
    made = []
    for i in body:
        if i.block is not None:
            own = _body_with_tiles(i.block.body, found, program, values)
            i = dataclasses.replace(i, block=dataclasses.replace(i.block, body=own))
        elif i.kind not in _SLICES and not found.isdisjoint(i.inputs):
            if i.kind == "broadcast_in_dim" and program.values[i.outputs[0]].tile and 0 in i["dims"]:
                made.append(drop := _without_rows(i, values))
                dims = tuple(d for d in i["dims"] if d != 0)
                i = dataclasses.replace(_with(i, dims=(0, *dims)), inputs=drop.outputs)
            else:
                i = _for_tiles(i, program)
        made.append(i)
    return tuple(made)


def _without_rows(instr: Instr, values: list[TileType]) -> Instr:
    """A reshape that drops the dimension, of extent 1, that ``instr`` broadcasts along the rows."""
    (x,), k = instr.inputs, instr["dims"].index(0)
    t = values[x]
    if t.shape[k] != 1:
        raise CannotLower("a value of a loop is broadcast along the rows")
    kept = TileType(True, (*t.shape[:k], *t.shape[k + 1 :]), t.dtype)
    values.append(kept)
    return Instr("reshape", (x,), (len(values) - 1,), make_params(new_sizes=kept.rows_first), instr.op)


def _for_tiles(instr: Instr, program: TileProgram) -> Instr:
    """``instr`` for operands that have become tiles."""
    stationary = bool(instr.outputs) and not program.values[instr.outputs[0]].tile
    spec = OPS.get(instr.kind)
    if instr.kind == "broadcast_in_dim":
        # A broadcast of whole arrays, or of a stationary value to every row, has no dimension for the rows yet.
        dims = tuple(instr["dims"])
        shape = (ROWS, *instr["shape"]) if stationary else tuple(instr["shape"])
        return _with(instr, shape=shape, dims=(0, *(d + stationary for d in dims)))
    if not stationary:
        if spec is not None and spec.family in ("pointwise", "convert"):
            return instr
        if instr.kind in ("matmul", "gather", "take", "put"):
            raise CannotLower(f"{instr.kind} with a table or weights that change with a loop has no code on the GPU")
        return instr
    if spec is None or spec.family not in _SAME and instr.kind not in ("copy", *_SHIFTED):
        raise CannotLower(f"{instr.kind} of a value that changes with a loop but not with the rows has no code on the GPU")
    if spec.family == "reduce":
        return _with(instr, axes=tuple(a + 1 for a in instr["axes"]))
    shift = _SHIFTED.get(instr.kind)
    return _with(instr, **shift(dict(instr.params))) if shift else instr


def _with(instr: Instr, **params: Param) -> Instr:
    return dataclasses.replace(instr, params=tuple(sorted({**dict(instr.params), **params}.items())))


# Parameters that name dimensions, shifted by the dimension of the rows.
_SHIFTED: dict[str, Callable[[_Params], _Params]] = {
    "reshape": lambda p: {"new_sizes": (ROWS, *p["new_sizes"])},
    "slice": lambda p: {"start": (0, *p["start"]), "limit": (ROWS, *p["limit"]), "strides": (1, *p["strides"])},
    "concatenate": lambda p: {"dimension": p["dimension"] + 1},
    "transpose": lambda p: {"permutation": (0, *(d + 1 for d in p["permutation"]))},
}


# --- 16-bit values that are rounded by the operator that makes them ---------------------------------------------------------------

_MOVES = frozenset([*(kind for kind, spec in OPS.items() if spec.moves), "take", "cut", "paste", *VIEWS])
# Rounding keeps the order, so the largest of rounded numbers is the rounded largest number.
SAME_DIGITS = HAND_ON | _MOVES | {"reduce_max", "reduce_min", "run_max"}
_ROUNDED = frozenset({"pointwise", "convert", "reduce"})  # families of ops that round results and read rounded operands
_READERS = _ROUNDED | {"argreduce", "cumulative", "scatter"}
_SUMS = frozenset({"sink", "sink_at"})


def rounded_results(program: TileProgram, elsewhere: Collection[Instr] = ()) -> frozenset[int]:
    """The 16-bit results of operators, conversions, reductions and products that must be rounded, because an operator that
    computes, a sum, or a conversion to a wider float reads their digits, directly or through moves. ``elsewhere``: sums that read
    kept values.

    XLA on a GPU rounds bfloat16 and float16 after every operator, which compensated sums (``s = a + b; e = b - (s - a)``) rely on,
    while operators here compute in float. Values that are kept, queued, stored or multiplied as a matrix are rounded anyway;
    compared values for another reason (``program.passes.compared_values``).

    Not rounded are: products before their bias is added, and values of loops over blocks (scores and exponentials of an attention),
    as cuBLASLt's epilogues and JAX's attention keep float32 there; a float that is converted to 16 bits and back at once, where XLA
    omits the conversion; the addition of two products, which may become one product (``sums_of_products_as_one``); values computed
    from the largest scores of a segment, to which an online sum scales its rows; elementary functions in the step of a loop, for
    lack of registers: an LSTM of 64 in bfloat16 would spill 372 bytes a thread instead of 296 (three lanes, NVRTC 13.0).
    """
    body = [i for stage in program.stages for i in walk(stage.body)]
    if not any(program.values[v].dtype in NARROW for i in body for v in i.outputs):
        return frozenset()
    literals = _literals(program, body)
    read, widened = set[int](), set[int]()
    for i in body:
        if i.kind == "convert_element_type" and program.values[i.outputs[0]].dtype not in NARROW:
            widened.update(i.inputs)
        elif i not in elsewhere and computes(i.kind, [(program.values[v].dtype, literals.get(v)) for v in i.inputs]):
            read.update(i.inputs)
    by_operators = _sources(program, body, read)
    by_all = by_operators | _sources(program, body, widened)
    unrounded = _made_in_blocks(body) | _from_largest_scores(body) | _sums_of_products(body) | _functions_in_loops(body)
    found = set[int]()
    for i in body:
        if i.kind in SAME_DIGITS or i.kind not in OPS or OPS[i.kind].family not in _ROUNDED:
            continue
        readers = by_operators if i.kind == "convert_element_type" else by_all
        constants = tuple(literals.get(v) for v in i.inputs)
        for v in readers.intersection(i.outputs) - unrounded:
            dtype = program.values[v].dtype
            narrows = i.kind == "convert_element_type" and dtype in NARROW and program.values[i.inputs[0]].dtype != dtype
            if narrows or EVERYWHERE.rounds(i.kind, dtype, constants):
                found.add(v)
    return frozenset(found | (_products_without_bias(program, body) & by_all) - unrounded)


def _products_without_bias(program: TileProgram, body: Sequence[Instr]) -> set[int]:
    """16-bit products with other readers than one addition: all readers get the same bits, those of the kept product."""
    readers: dict[int, list[str]] = {}
    for i in body:
        for v in i.inputs:
            readers.setdefault(v, []).append(i.kind)
    made = {v for i in body if i.kind == "matmul" for v in i.outputs if program.values[v].dtype in NARROW}
    return {v for v in made if readers.get(v) != ["add"]}


def computes(kind: str, operands: Sequence[tuple[str, Scalar | None]]) -> bool:
    """Does an op of this kind compute with the digits of its operands, beyond moving them? ``operands``: (dtype, number if it is a
    constant).

    >>> computes("add", [("bfloat16", None), ("bfloat16", 1.0)]), computes("gt", [("bfloat16", None), ("bfloat16", 0.0)])
    (True, False)
    """
    if kind in SAME_DIGITS:
        return False
    if kind in COMPARISONS and ("bfloat16", 0) in operands:
        return False  # rounding changes no sign
    return kind in _SUMS or (kind in OPS and OPS[kind].family in _READERS)


def _sources(program: TileProgram, body: Sequence[Instr], values: Iterable[int]) -> frozenset[int]:
    """``values``, and those from which they get their digits through moves. Carries of several numbers do not count: they are kept,
    in 16 bits, between the iterations."""
    before: dict[int, tuple[int, ...]] = {}
    for i in body:
        if i.kind in SAME_DIGITS:
            before.update((v, i.inputs) for v in i.outputs)
        if i.block is not None:
            for first, carry, last, after in zip(i.inputs, i.block.carries, i.block.results, i.outputs, strict=True):
                if math.prod(program.values[after].shape) == 1:
                    before[carry] = before[after] = (first, last)
    seen, pending = set[int](), list(values)
    while pending:
        if (v := pending.pop()) not in seen:
            seen.add(v)
            pending += before.get(v, ())
    return frozenset(seen)


def _literals(program: TileProgram, body: Sequence[Instr]) -> dict[int, Scalar]:
    """The constants and all views of them."""
    found = dict(program.literals)
    for i in body:
        if i.kind in VIEWS and i.inputs[0] in found:
            found[i.outputs[0]] = found[i.inputs[0]]
    return found


def _made_in_blocks(body: Sequence[Instr]) -> set[int]:
    """Values of loops that process a dimension in blocks. (A loop over steps takes one slice in each.)"""
    loops = [i.block for i in body if i.block is not None]
    blocks = [b for b in loops if any(b.index in i.inputs and max(i.get("sizes", (1,))) > 1 for i in walk(b.body))]
    return {v for b in blocks for i in walk(b.body) for v in i.outputs}


def is_elementary(kind: str) -> bool:
    """Is the op a function that the device approximates, such as ``exp``?"""
    return kind in OPS and OPS[kind].special and not OPS[kind].exact


def _functions_in_loops(body: Sequence[Instr]) -> set[int]:
    """Results of elementary functions in the step of a loop."""
    return {v for i in body if i.block is not None for j in walk(i.block.body) if is_elementary(j.kind) for v in j.outputs}


def _sums_of_products(body: Sequence[Instr]) -> set[int]:
    """Sums of two products."""
    products = {v for i in body if i.kind == "matmul" for v in i.outputs}
    return {v for i in body if i.kind == "add" and products.issuperset(i.inputs) for v in i.outputs}


def _from_largest_scores(body: Sequence[Instr]) -> set[int]:
    """Values computed from the largest scores of segments."""
    found = {v for i in body if i.kind == "run_max" for v in i.outputs}
    for i in body:
        if i.block is None and not found.isdisjoint(i.inputs):
            found.update(i.outputs)
    return found
