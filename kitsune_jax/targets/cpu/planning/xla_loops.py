"""Products in the steps of XLA:CPU's loops, and what a step takes to start its kernels.

Comes in: the costs of a loop's body. Goes out: ``Steps``. XLA compiles a loop to one function where its body holds nothing that a
library multiplies or reduces: a step then starts nothing, products are loops of one thread like everything else. A loop with such a
product or reduction is interpreted: each of its kernels is called in each step. All figures: JAX 0.12, float32, a Xeon 6 (Granite
Rapids).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kitsune_jax.graph import Graph, Op
from kitsune_jax.profile.model import Profile

# A product in a compiled loop: x @ w of 1 x 16 x 16 took 39 ns, of 1 x 64 x 64 144 ns, of 1 x 256 x 256 2128 ns.
_COMPILED_SECONDS, _COMPILED_PER_TERM = 20e-9, 0.031e-9
# One of the library in an interpreted loop: 8 x 8 x 8 took 310 ns, 64 x 64 x 64 4230 ns. Below 8 columns 2 rows took 630 ns.
_CALLED_SECONDS, _CALLED_PER_TERM, _TINY_SECONDS = 250e-9, 0.0155e-9, 600e-9
# Any other kernel in an interpreted loop: one more fusion in a step took 80 to 150 ns with its 32 to 56 elements.
_KERNEL_SECONDS = 80e-9
_TINY_COLUMNS, _TINY_ROWS, _LEAST_COLUMNS = 8, 8, 4
# What the library reduces.
_REDUCTIONS, _FLOATS, _REDUCED = ("reduce_sum", "reduce_max", "reduce_min"), ("float32", "bfloat16", "float16", "float64"), 4096
# Of the last two dimensions of an array in a compiled loop: from 64 numbers on either is vectorised, the one before the last one
# also where eight divide it. exp of [16, o, n] took 0.4 to 0.8 ns an element with o x n of 8 x 4, 16 x 6, 64 x 15, 24 x 4, 65 x 4
# and 6 x 64, and 3.9 to 4.7 with 6 x 4, 12 x 4, 10 x 4, 6 x 24 and 7 x 33, broadcast or not; 1.2 and 1.3 with 20 x 4 and 4 x 4.
_VECTORISED, _DIVISOR = 64, 8
# An elementary function of one number there: exp 4.1, tanh 2.9, sin 2.8; of matrices, [37, 6] and [37, 20], exp 1.3 to 1.7.
_SCALAR_SECONDS, _OF_MATRICES = 3.3e-9, 1.5e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """What the kernels of a step take to start. ``compiled``: XLA compiles the loop as a whole.

    ``kernel``: seconds of the start of a kernel without products.
    """

    compiled: bool
    kernel: float

    def product_seconds(self, m: int, k: int, n: int, batch: int) -> float:
        """A product where one thread makes it, with its start. XLA shares out large ones: they may take less."""
        terms = batch * m * k * n
        if self.compiled:
            return _COMPILED_SECONDS + terms * _COMPILED_PER_TERM
        tiny = 1 < m < _TINY_ROWS and max(k, n) < _TINY_COLUMNS
        return (_TINY_SECONDS if tiny else _CALLED_SECONDS) + terms * _CALLED_PER_TERM


def steps_of(body: Graph, profile: Profile) -> Steps:
    """How XLA runs the steps of the loop whose body this is, its inner loops included."""
    compiled = not _calls_library(body)
    return Steps(compiled, profile.seconds("xla/while") if compiled else _KERNEL_SECONDS)


def _calls_library(body: Graph) -> bool:
    return any(_calls_library(op.body) if op.body is not None else _from_library(body, op) for op in body.ops)


def reduces_in_library(graph: Graph, op: Op) -> bool:
    """Does XLA hand ``op``, a reduction, to its library?"""
    if op.kind not in _REDUCTIONS:
        return False
    value = graph.values[op.inputs[0]]
    return value.dtype in _FLOATS and value.size >= _REDUCED


def _from_library(graph: Graph, op: Op) -> bool:
    """Which ops XLA hands on, as its programs for some 200 shapes say: what no library is for becomes loops.

    YNNPACK takes sums and maxima of 4096 numbers or more, and a product of which one size is 8 or more, where the rows of its
    first operand lie as they are (a weight gradient's do not). Eigen takes the other products that sum up 4 numbers or more and
    have 4 rows or columns or more. No library has products of vectors.
    """
    if reduces_in_library(graph, op):
        return True
    if op.kind != "dot_general":
        return False
    m, k, n, _ = sizes(graph, op)
    if min(m, n, k) == 1:
        return False
    if max(m, k, n) >= _TINY_COLUMNS and not _reads_columns(graph, op):
        return True
    return k >= _LEAST_COLUMNS and max(m, n) >= _LEAST_COLUMNS


def _reads_columns(graph: Graph, op: Op) -> bool:
    """Is the first operand of the product ``op`` a matrix, or one for each batch, that is added up over its rows?

    A transpose in front of it makes no difference: XLA makes one op of both.
    """
    rank, batch = len(graph.values[op.inputs[0]].shape), len(op["lhs_batch"])
    if rank - batch != 2 or len(op["lhs_contract"]) != 1:
        return False
    (dimension,) = op["lhs_contract"]
    maker = next((other for other in graph.ops if op.inputs[0] in other.outputs), None)
    if maker is not None and maker.kind == "transpose":
        dimension = maker["permutation"][dimension]
    return dimension == batch


def sizes(graph: Graph, op: Op) -> tuple[int, int, int, int]:
    """m, k, n and the batch of a product."""
    lhs, rhs = (graph.values[v] for v in op.inputs)
    batch = math.prod(lhs.shape[d] for d in op["lhs_batch"])
    k = math.prod(lhs.shape[d] for d in op["lhs_contract"])
    return lhs.size // max(1, batch * k), k, rhs.size // max(1, batch * k), batch


def scalar_seconds(shape: Sequence[int]) -> float:
    """What an elementary function of one number of such an array takes where a compiled loop goes number by number, or 0."""
    if len(shape) < 2 or math.prod(shape) == max(shape):
        return 0.0
    if shape[-1] >= _VECTORISED or shape[-2] >= _VECTORISED or shape[-2] % _DIVISOR == 0:
        return 0.0
    return _SCALAR_SECONDS if len(shape) > 2 else _OF_MATRICES
