"""Which 16-bit values of a stage are rounded by the operator that makes them, although operators compute in float.

Comes in: a tile program. Goes out: the values that ``jax.jit`` on a GPU rounds and whose digits somebody would read otherwise: XLA
computes bfloat16 and float16 operator by operator, and compensated sums (``s = a + b; e = b - (s - a)``) rely on it. What is kept,
queued, stored or multiplied as a matrix is rounded there in any case. Values that are compared with others are rounded everywhere,
for another reason (``program.passes.compared_values``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from kitsune_jax.graph import Scalar
from kitsune_jax.ops.comparisons import COMPARISONS, HAND_ON
from kitsune_jax.ops.rounding import EVERYWHERE, NARROW
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.passes import VIEWS

_MOVES = frozenset([*(kind for kind, spec in OPS.items() if spec.moves), "take", "cut", "paste", *VIEWS])
# The largest of rounded numbers is the largest number, rounded.
SAME_DIGITS = HAND_ON | _MOVES | {"reduce_max", "reduce_min", "run_max"}
_ROUNDED = frozenset({"pointwise", "convert", "reduce"})  # families of what is rounded, and of what reads it
_READERS = _ROUNDED | {"argreduce", "cumulative", "scatter"}
_SUMS = frozenset({"sink", "sink_at"})


def rounded_results(program: TileProgram, elsewhere: Collection[Instr] = ()) -> frozenset[int]:
    """The 16-bit results of operators, conversions, reductions and products that are rounded because an operator that computes, a
    sum or a conversion to a wider float reads them, through whatever hands them on. ``elsewhere``: sums that are made of values
    which have been kept.

    Not rounded are, because cuBLASLt's epilogues or JAX's attention keep float32 there, the sums of a product on their way to a
    bias and what a loop over blocks makes (the scores and exponentials of an attention); because XLA leaves the conversion out, a
    float that is converted to 16 bits and back right away; because ``summed_products.py`` makes one product of both where it can,
    the addition of two products; and what is computed of the largest scores of a segment, to which an online sum scales its rows.
    An elementary function in a step of a loop is not rounded for lack of registers: an LSTM of 64 in bfloat16 would spill 372 bytes
    a thread instead of 296 (three lanes, NVRTC 13.0).
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
    by_operators = _behind(program, body, read)
    by_all = by_operators | _behind(program, body, widened)
    unrounded = _of_blocks(body) | _of_largest_scores(body) | _of_products(body) | _of_functions_in_loops(body)
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
    """16-bit products that something else reads than one addition: all of its readers have the same bits, those of a kept one."""
    readers: dict[int, list[str]] = {}
    for i in body:
        for v in i.inputs:
            readers.setdefault(v, []).append(i.kind)
    made = {v for i in body if i.kind == "matmul" for v in i.outputs if program.values[v].dtype in NARROW}
    return {v for v in made if readers.get(v) != ["add"]}


def computes(kind: str, operands: Sequence[tuple[str, Scalar | None]]) -> bool:
    """Do the digits of its operands matter to an op of this kind, beyond those that it hands on? ``operands``: their dtypes, and
    their numbers where they are constants.

    >>> computes("add", [("bfloat16", None), ("bfloat16", 1.0)]), computes("gt", [("bfloat16", None), ("bfloat16", 0.0)])
    (True, False)
    """
    if kind in SAME_DIGITS:
        return False
    if kind in COMPARISONS and ("bfloat16", 0) in operands:
        return False  # rounding changes no sign
    return kind in _SUMS or (kind in OPS and OPS[kind].family in _READERS)


def _behind(program: TileProgram, body: Sequence[Instr], values: Iterable[int]) -> frozenset[int]:
    """``values``, and those whose digits these are. What a loop carries is kept between its iterations, with 16 bits, unless it is
    one number of each row."""
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
    """The constants, by whatever view of them is read."""
    found = dict(program.literals)
    for i in body:
        if i.kind in VIEWS and i.inputs[0] in found:
            found[i.outputs[0]] = found[i.inputs[0]]
    return found


def _of_blocks(body: Sequence[Instr]) -> set[int]:
    """What loops make that work off a dimension in blocks. (A loop over steps takes one slice for each.)"""
    loops = [i.block for i in body if i.block is not None]
    blocks = [b for b in loops if any(b.index in i.inputs and max(i.get("sizes", (1,))) > 1 for i in walk(b.body))]
    return {v for b in blocks for i in walk(b.body) for v in i.outputs}


def is_elementary(kind: str) -> bool:
    """Is an op of this kind a function that the device approximates, such as ``exp``?"""
    return kind in OPS and OPS[kind].special and not OPS[kind].exact


def _of_functions_in_loops(body: Sequence[Instr]) -> set[int]:
    """What elementary functions make in the step of a loop."""
    return {v for i in body if i.block is not None for j in walk(i.block.body) if is_elementary(j.kind) for v in j.outputs}


def _of_products(body: Sequence[Instr]) -> set[int]:
    """Additions of one product to another."""
    products = {v for i in body if i.kind == "matmul" for v in i.outputs}
    return {v for i in body if i.kind == "add" and products.issuperset(i.inputs) for v in i.outputs}


def _of_largest_scores(body: Sequence[Instr]) -> set[int]:
    """What is computed, row by row, of the largest scores of segments."""
    found = {v for i in body if i.kind == "run_max" for v in i.outputs}
    for i in body:
        if i.block is None and not found.isdisjoint(i.inputs):
            found.update(i.outputs)
    return found
