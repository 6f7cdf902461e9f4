"""Values of a stage while it is lowered: where each one is, and the loops that evaluate them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.graph import Scalar
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import frame_ir, ir, pointwise, tiles
from kitsune_jax.targets.cuda.ir import Action, Address, Expr, Keep, KeepAddress, Node, Operand, Ref, Rows, ScratchFold, ScratchList
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.stage.facts import Facts

# ----------------------------------------------------------------------------------------------------------------------------------
# Where a value of a stage is while the stage is lowered: its *home*.
#
# Comes in: nothing. Goes out: ``Value`` and the homes. A value is *pending* (an ``Expression`` or a ``Multiply`` that nobody has
# asked for) until a loop evaluates it; what is read more than once then gets registers or an image in shared memory.
# ----------------------------------------------------------------------------------------------------------------------------------


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
    row). ``owner``: whose registers they are (``stage/fitting.py``)."""

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


# ----------------------------------------------------------------------------------------------------------------------------------
# Values of a stage, and the loops that evaluate them.
#
# Comes in: the facts of a stage and a ``Shape``, with which code generation tries to fit it. Goes out: nodes of the device IR, in
# the order in which things happen; whole loops are ``Evaluate`` nodes still. Instructions hand their values in here: what has an
# effect is evaluated at once, and pointwise values and matmuls wait until a loop asks for them. So an epilogue is part of the
# loop that reads the accumulators, a value that is used once is never kept, and the accumulators of a wide matmul live one chunk
# at a time.
# ----------------------------------------------------------------------------------------------------------------------------------

# Blocks of an input that a product reads into registers before it starts, for each product again. A wider one is fetched on the
# way, which makes the product wait as it goes.
_NARROW = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What may be tried so that a stage fits. ``columns`` of a chunk at most; ``overlap``: two chunks of a product may be in
    flight; ``copies``: matmuls of several chunks take entries of queues from registers; ``images``: values kept in shared memory;
    ``staged``: input arrays whose tiles come through shared memory."""

    columns: int = tiles.CHUNK_COLUMNS
    overlap: bool = True
    copies: bool = True
    images: frozenset[int] = frozenset()
    staged: frozenset[int] = frozenset()


class Evaluation:
    """One stage on its way from values to nodes. ``slab_queues``: those with a split stage at an end."""

    def __init__(self, facts: Facts, shape: Shape, split: int, lanes: int, slab_queues: frozenset[int]):
        self.facts, self.program, self.shape = facts, facts.program, shape
        self.split, self.lanes, self.slab_queues = split, lanes, slab_queues
        self.instrs = facts.instrs  # of the stage, or of the loop that is being lowered
        self.nodes: list[Node] = []
        self.prologue: list[Node] = []  # once per tile, in front of everything
        self.setup: list[Node] = []  # once per kernel
        self.weights: list[WeightRecipe] = []
        self.vectors: list[tuple[VectorRecipe, ...]] = []  # groups, whose members follow each other
        self.tables: dict[int, None] = {}  # stationary values that are read row by row
        self.values: dict[int, Value] = {}
        self.literals = dict(facts.program.literals)
        self.names, self.uses = dict(facts.names), facts.uses.copy()
        self.layer_vectors: dict[int, ir.Address] = {}
        self.next_weight: int | None = None  # of the matmul that comes next, in a loop over layers
        self.scalars: dict[int, Ref] = {}
        self.row_tiles: dict[int, Ref] = {}
        self.segment_bytes = 0  # of the lane's memory for sinks by sorted indices
        self.runs: dict[tuple[int, int], Ref] = {}  # of an index into so many rows, where several sums share them
        self.tops: dict[int, tuple[Ref, Ref]] = {}  # largest scores of runs, as the lane keeps them, and these runs
        self.scratch_words = 0  # of the widest row that changes places
        self.addresses: dict[Ref, int] = {}  # of rows that the lane keeps in shared memory, with their numbers
        self.product_bytes = 0  # of the lane's memory for a product for each row
        self.together: set[int] = set()  # values that must be images because what a loop makes of them is one
        self.repeated = False  # what is being lowered is the body of a loop
        self.panels: dict[int, tuple[int, int, int]] = {}  # place of a panel -> the value in it, its width, where it ends
        self.done: set[Instr] = set()  # effects that have been lowered, some with an earlier one
        self.gathered: dict[int, int] = {}  # slabs -> the values of which they are slabs (``stage/products.py``)
        self.counter = 0

    # -- nodes

    def add(self, *nodes: Node) -> None:
        self.nodes += nodes

    def once_per_tile(self, node: Node) -> None:
        if node not in self.prologue:
            self.prologue.append(node)

    @contextlib.contextmanager
    def body_of_loop(self) -> Iterator[list[Node]]:
        """Collects the nodes that are added meanwhile."""
        outer, self.nodes, self.panels = self.nodes, [], {}
        known, self.gathered = self.gathered, dict(self.gathered)
        yield self.nodes
        self.nodes, self.panels, self.gathered = outer, {}, known

    # -- names

    def root(self, v: int) -> int:
        """The value that ``v`` is another name of; itself if it is none."""
        while v in self.names:
            v = self.names[v]
        return v

    def alias(self, instr: Instr, x: int) -> None:
        """The result of ``instr`` is another name of ``x``."""
        (v,) = instr.outputs
        self.uses[self.root(x)] += self.uses[v] - 1
        self.names[v] = x

    def is_slab(self, v: int) -> bool:
        return v in self.facts.slabs

    # -- values

    def new(self, instr: Instr, home: Home | None = None) -> Value:
        """The value that ``instr`` makes."""
        (v,) = instr.outputs
        t = self.program.values[v]
        if t.dtype not in pointwise.COMPUTE:
            raise CannotLower(f"dtype {t.dtype}")
        n, slab = math.prod(t.shape), self.facts.slabs.get(v, 0)
        self.values[v] = Value(n // self.split if slab else n, t.dtype, n == 1, home, slab)
        return self.values[v]

    def settle(self, v: int, home: Home) -> None:
        v = self.root(v)
        self.values[v] = dataclasses.replace(self.values[v], home=home)

    def value(self, v: int) -> Value:
        v = self.root(v)
        if v not in self.values:
            self.values[v] = self._from_outside(v)
        return self.values[v]

    def _from_outside(self, v: int) -> Value:
        t = self.program.values[v]
        if v in self.literals:
            return Value(1, t.dtype, True, Number(self.literals[v]))
        if t.tile:
            raise AssertionError(f"%{v} is read before it is made")
        n = math.prod(t.shape)  # of several numbers: what a loop carries, whose next value is a tile
        row, width = n == 1, 1 if n == 1 else tiles.padded(n)
        return Value(n, t.dtype, row, InVector(self.vector(VectorRecipe(v, (n,), (0,), (n,), width))))

    def unnamed(self, value: Value) -> int:
        """The number of a new value that the tile program does not name."""
        self.counter += 1
        v = -1 - len(self.program.values) - self.counter
        self.values[v] = value
        return v

    def vector(self, recipe: VectorRecipe) -> ir.Address:
        if (recipe,) not in self.vectors:
            self.vectors.append((recipe,))
        return ir.Address(ir.Vector(self.vectors.index((recipe,)), 0))

    # -- rows: one number per row

    def set_row(self, v: int, expr: Expr) -> None:
        """Gives a row value its two registers."""
        ref = Ref("r", v)
        self.add(ir.SetRow(ref, self.values[v].dtype, expr))
        self.settle(v, InRegisters(ref, "row", ref))

    def row(self, v: int) -> Expr:
        value = self.value(v)
        match value.home:
            case Number(number):
                return ir.Literal(pointwise.literal(number, pointwise.COMPUTE[value.dtype]))
            case InVector():
                return ir.Read("scalar", self.scalar(v), value.dtype)
            case InRegisters(ref, "row", _):
                return ir.Read("row", ref, value.dtype)
            case LoopNumber(ref):
                return ir.Read("scalar", ref, value.dtype)
            case Splat(of):
                return self.row(of)
        raise AssertionError(f"a row value in {value.home}")

    def scalar(self, v: int) -> Ref:
        """A stationary scalar, loaded once per kernel, or once per layer."""
        v, home = self.root(v), self.value(v).home
        assert isinstance(home, InVector)
        if v not in self.scalars:
            self.scalars[v] = Ref("s", v)
            load = ir.LoadScalar(self.scalars[v], self.value(v).dtype, home.address, not home.address.layer)
            (self.setup if load.once else self.nodes).append(load)
        self.settle(v, dataclasses.replace(home, scalar=self.scalars[v]))
        return self.scalars[v]

    def row_tile(self, v: int) -> Ref:
        """A row value as the first column of a tile: the operand of a matmul with K = 1."""
        v = self.root(v)
        if v not in self.row_tiles:
            self.row_tiles[v] = Ref("k", v)
            self.add(ir.RowTile(self.row_tiles[v], self.row(v), self.value(v).dtype))
        return self.row_tiles[v]

    # -- arrays

    def rows(self, role: str, k: int) -> ir.Rows:
        array = self.program.inputs[k] if role == "in" else self.program.outputs[k]
        staged = role == "in" and k in self.shape.staged
        self.name_axes()
        self.once_per_tile(frame_ir.addresses_of(array, role, k, staged))
        return frame_ir.rows_of(array, role, k, staged)

    def address_number(self, ref: Ref, stored: bool = False) -> int:
        """The number of the addresses of the rows ``ref`` among those that the lane keeps in shared memory."""
        if ref not in self.addresses:
            self.addresses[ref] = len(self.addresses)
            self.add(KeepAddress(ref, self.addresses[ref], stored))
        return self.addresses[ref]

    def name_axes(self) -> None:
        self.once_per_tile(ir.AxisIndices(self.program.axes))

    # -- loops

    def home_of_its_own(self, v: int) -> Ref:
        """The registers of ``v``, declared, or its image; who asks has yet to fill it, and to settle ``v`` there."""
        value = self.value(v)
        if v in self.shape.images:
            self.once_per_tile(ir.Image(Ref("image", v)))
            return Ref("image", v)
        self.add(ir.Registers(Ref("v", v), value.form, value.dtype, value.registers))
        return Ref("v", v)

    def keep(self, v: int) -> Keep:
        """``v`` gets a home of its own."""
        v = self.root(v)
        form = self.value(v).form
        if v not in self.shape.images:
            return Keep(v, Ref("v", v), form)
        self.once_per_tile(ir.Image(Ref("image", v)))
        return Keep(v, Ref("image", v), form, to=Ref("image", v))

    def materialize(self, v: int) -> None:
        self.evaluate(self.value(v).width, [self.keep(v)])

    def evaluate(self, width: int, wanted: Iterable[Action]) -> None:
        """A loop over the blocks of tiles of ``width`` columns, which does what is ``wanted`` with their elements."""
        actions = [dataclasses.replace(a, value=self.root(a.value)) for a in wanted]
        if any(self.value(a.value).width != width for a in actions):
            raise AssertionError("a loop is over tiles of one width")
        for v in self._products(width, actions):
            self.prepare(v)  # in loops of their own, because this loop may read the operands as well
        actions += self._kept_on_the_way(width, actions)
        products = tuple(self._products(width, actions))
        self.add(ir.Evaluate(width, tuple(actions), products, self._homes([a.value for a in actions])))
        for a in actions:
            if isinstance(a, Keep) and not a.push:
                owner = Ref("v", a.value)
                self.settle(a.value, InImage(a.to, a.form, owner) if a.to else InRegisters(a.ref, a.form, owner))

    def _kept_on_the_way(self, width: int, actions: Sequence[Action]) -> list[Action]:
        """Pending values at and below what is wanted that are read again later."""
        kept = {a.value for a in actions if isinstance(a, Keep) and not a.push}
        pending = self._pending(width, actions)
        reads: Counter[int] = Counter()
        for a in actions:
            reads[a.value] += a.reads if isinstance(a, Keep) else 1
        for v in pending:
            home = self.value(v).home
            if isinstance(home, Expression):
                reads.update(home.operands)
            elif isinstance(home, Multiply) and home.start is not None:
                reads[home.start] += 1
        found = [v for v in pending if v not in kept and self.uses[v] > reads[v]]
        return [self.keep(self._rounded(v, reads[v])) for v in found]

    def _rounded(self, v: int, reads: int) -> int:
        """What is kept for the readers of ``v`` that come after so many: its 16-bit form, where that is all that they read."""
        narrow = self.facts.rounded.get(v)
        waits = self.repeated and narrow is not None and narrow in self.values and isinstance(self.values[narrow].home, Expression)
        return narrow if narrow is not None and waits and self.uses[v] == reads + 1 else v

    def _pending(self, width: int, actions: Sequence[Action]) -> list[int]:
        found: dict[int, None] = {}

        def visit(v: int) -> None:
            value = self.value(v)
            if value.row or v in found:
                return
            match value.home:
                case Expression(_, operands):
                    for x in operands:
                        visit(x)
                    found[v] = None
                case Multiply(start=start):
                    if start is not None:
                        visit(start)
                    found[v] = None
                case Parts(parts):
                    for part, first, blocks in parts:
                        if self.value(part).width == width and first == 0 and blocks == tiles.blocks(width):
                            visit(part)

        for a in actions:
            visit(a.value)
        return list(found)

    def _products(self, width: int, actions: Sequence[Action]) -> list[int]:
        return [v for v in self._pending(width, actions) if isinstance(self.value(v).home, Multiply)]

    def _homes(self, values: Iterable[int]) -> tuple[tuple[int, Value], ...]:
        """Where what a loop reads is now."""
        found: dict[int, Value] = {}

        def visit(v: int) -> None:
            if v in found:
                return
            value = self.value(v)
            if isinstance(value.home, InVector) and value.row:
                self.scalar(v)
                value = self.value(v)
            found[v] = value
            match value.home:
                case Expression(_, operands):
                    for x in operands:
                        visit(x)
                case Splat(of):
                    visit(of)
                case Parts(parts):
                    for part, _, _ in parts:
                        visit(part)
                case Multiply(start=start) if start is not None:
                    visit(start)

        for v in values:
            visit(v)
        return tuple(found.items())

    # -- products

    def prepare(self, v: int) -> None:
        """Gives the operands of the product ``v`` their homes."""
        home = self.value(v).home
        if isinstance(home, Multiply) and not home.operands:  # an earlier one's operand may have brought it home
            operands = tuple(self._operand(piece, home.shape) for piece in home.pieces)
            self.settle(v, dataclasses.replace(home, operands=operands))

    def single_column(self, v: int) -> None:
        """A matmul with one column of results: the thread of a quad that has it tells the others."""
        self.prepare(v)
        self.add(ir.SingleColumn(v, ((v, self.values[v]),)))
        self.set_row(v, ir.Read("first column", Ref("d", v, "_0"), "float32"))

    def _operand(self, v: int, shape: tiles.WeightShape) -> Operand:
        value, dtype = self.value(v), shape.dtype
        home, width = value.home, value.width
        if self.shape.copies and isinstance(home, InImage) and home.ref.kind == "pop" and len(shape.chunks) > 1:
            # An entry of a queue that several chunks of columns read: from registers, products need not wait as they go.
            ref = self._name_of_copy(v)
            self.add(ir.Alive(ref, value.registers))
            self.evaluate(width, [Keep(v, ref, value.form, push=True)])
            return Operand("copy", ref, width, dtype, ref)
        if isinstance(home, InArray) and not value.row:
            if tiles.blocks(width) <= _NARROW:
                ref = self._name_of_copy(v)
                self.evaluate(width, [Keep(v, ref, value.form, push=True)])
                return Operand("array", ref, width, dtype, ref)
            if not home.rows.strides:
                return Operand("rows", home.rows.ref, width, dtype, home.rows.ref, home.rows)
        if value.row:
            return Operand("registers", self.row_tile(v), 8, dtype, Ref("r", self.root(v)))
        if not isinstance(home, (InImage, InRegisters)):
            self.materialize(v)
        home = self.value(v).home
        if isinstance(home, InImage):
            return Operand("image", home.ref, width, dtype, home.owner)
        assert isinstance(home, InRegisters)
        return Operand("registers", home.ref, width, dtype, home.owner)

    def _name_of_copy(self, v: int) -> Ref:
        self.counter += 1
        return Ref("c", abs(self.root(v)), f"_{self.counter}")  # unnamed ones are below zero

    def most_columns(self, pieces: Sequence[int]) -> int:
        """Columns of a chunk at most, of a product of ``pieces``."""
        operands = [self.value(p) for p in pieces if self.root(p) in self.values]  # those of later layers in a loop are made in it
        fetched = any(isinstance(x.home, InArray) and tiles.blocks(x.width) > _NARROW for x in operands)
        return tiles.CHUNK_COLUMNS if fetched else self.shape.columns
