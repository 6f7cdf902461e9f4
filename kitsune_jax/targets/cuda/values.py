"""Where a value of a stage is while the stage is lowered: its *home*.

Comes in: nothing. Goes out: ``Value`` and the homes. A value is *pending* (an ``Expression`` or a ``Multiply`` that nobody has
asked for) until a loop evaluates it; what is read more than once then gets registers or an image in shared memory.
"""

from __future__ import annotations

from kitsune_jax.graph import Scalar
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.device_ir import Address, Expr, Node, Ref, Rows, ScratchFold, ScratchList
from kitsune_jax.targets.cuda.statements import Operand


class Home(Node):
    """Where a value is."""


class Number(Home):
    value: Scalar


class Expression(Home):
    """A pointwise operator (C++ with {0}, {1}, ... for its operands), evaluated where it is needed."""

    template: str
    operands: tuple[int, ...]


class Multiply(Home):
    """A matmul whose products are issued by the loop that reads it first.

    ``product``: the value by which its accumulators are named. ``weight``: index of its recipe. ``pieces``: the values that make up
    its K. ``bias``: the vector that the accumulators start from, with its width; ``start``: the value that they start from, of a
    product of one chunk of columns. ``operands``: the pieces, once they have homes.
    """

    product: int
    weight: int
    shape: tiles.WeightShape
    pieces: tuple[int, ...]
    bias: tuple[Address, int] | None = None
    operands: tuple[Operand, ...] = ()
    start: int | None = None


class InRegisters(Home):
    """``form``: "pair" (u32, two 16-bit values each), "bit" (u32, 32 booleans each), "word" (one element each) or "row" (one per
    row). ``owner``: whose registers they are (``liveness.py``)."""

    ref: Ref
    form: str
    owner: Ref


class InImage(Home):
    """A register image, or the entry of a queue (whose ref is a "pop")."""

    ref: Ref
    form: str
    owner: Ref


class InArray(Home):
    """Rows of a streamed input array."""

    rows: Rows
    array: int


class InVector(Home):
    """A stationary vector, or the scalar ``scalar`` that was loaded of one."""

    address: Address
    scalar: Ref | None = None


class InScratch(Home):
    """Columns of the warp's scratch rows; the vector at ``table`` says which, -1 stands for ``fill``. ``fold``: each is the fold of
    several, the first of which the vector says, or the sum of those in a list that begins where the vector says."""

    table: Address
    fill: Expr | None
    fold: ScratchFold | ScratchList | None = None


class LoopNumber(Home):
    """The number of an iteration of a loop: the same for all rows."""

    ref: Ref


class Splat(Home):
    """One number per row (or a constant), seen as a tile."""

    of: int


class Parts(Home):
    """Whole blocks of other values: (value, first block there, blocks)."""

    parts: tuple[tuple[int, int, int], ...]


class Value(Node):
    """``n``: logical columns of a row; ``row``: it is one number per row; ``slab``: it is one slab of a wider value, which has so
    many groups of columns; 0 if it is none."""

    n: int
    dtype: str
    row: bool
    home: Home | None = None
    slab: int = 0

    @property
    def width(self) -> int:
        return tiles.padded(self.n)

    @property
    def form(self) -> str:
        """How its elements lie in registers. A mask is bits, but of a slab: other stages read several slabs as one value."""
        return "pair" if tiles.is_half(self.dtype) else "bit" if self.dtype == "bool" and not self.slab else "word"

    @property
    def registers(self) -> int:
        """32-bit registers a thread needs to hold it."""
        return 2 if self.row else tiles.registers(self.width, self.form)


def queue_form(dtype: str, slabs: bool) -> str:
    """How the elements of a queue's entries lie. ``slabs``: a split stage writes or reads it."""
    return Value(2, dtype, False, slab=slabs).form
