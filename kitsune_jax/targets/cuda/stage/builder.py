"""The state of a stage while it is lowered: the home of each value (``stage_ir.Home``), and the loops that evaluate values.

Comes in: ``Facts`` of the stage, and a ``Shape`` with which the code generator tries to fit it. Goes out: nodes of the device IR in
the order in which they run; loops over blocks are ``Evaluate`` nodes still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.ir import Action, Expr, Keep, Node, Ref
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.stage.facts import Facts

# A product reads inputs of at most so many blocks into registers before it starts, again for each product. Wider ones are loaded
# during the product, which then waits for them.
_NARROW = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Choices that make a stage fit. ``columns``: most columns of a chunk; ``overlap``: two chunks of a product may be in flight;
    ``ahead``: a loop loads the rows of the next step; ``late``: a loop may issue its second product an iteration later; ``copies``:
    matmuls of several chunks read a queue's entry from registers; ``images``: values kept in shared memory; ``staged``: input
    arrays whose tiles are copied to shared memory; ``boxed``: those that products read in boxes there."""

    columns: int = tiles.CHUNK_COLUMNS
    overlap: bool = True
    ahead: bool = True
    copies: bool = True
    images: frozenset[int] = frozenset()
    staged: frozenset[int] = frozenset()
    late: bool = False
    boxed: frozenset[int] = frozenset()


def read_by(home: st.Home | None) -> tuple[int, ...]:
    """The values that a loop over the blocks of a value in ``home`` reads; products have read their operands before it."""
    match home:
        case st.Expression(_, operands):
            return operands
        case st.Splat(of):
            return (of,)
        case st.Parts(parts):
            return tuple(part for part, _, _ in parts)
        case st.Multiply(start=start) if start is not None:
            return (start,)
    return ()


class StageCodeBuilder:
    """Builds the nodes of one stage. ``slab_queues``: queues that a split stage writes or reads.

    Instructions register their values here. Effects are evaluated at once; pointwise values and matmuls wait until a loop reads
    them. So an epilogue is part of the loop that reads the accumulators, a value that is read once is never kept, and only one
    chunk of the accumulators of a wide matmul is alive at a time.
    """

    def __init__(self, facts: Facts, shape: Shape, lanes: int, slab_queues: frozenset[int]):
        self.facts, self.program, self.shape = facts, facts.program, shape
        self.split, self.lanes, self.slab_queues = facts.split, lanes, slab_queues
        self.instrs = facts.instrs  # of the stage, or of the loop body being lowered
        self.nodes: list[Node] = []
        self.prologue: list[Node] = []  # once per tile, before all else
        self.setup: list[Node] = []  # once per kernel
        self.weights: list[WeightRecipe] = []
        self.vectors: list[tuple[VectorRecipe, ...]] = []  # groups, whose members are adjacent
        self.tables: dict[int, None] = {}  # stationary values that are gathered from
        self.values: dict[int, st.StageValue] = {}
        self.literals = dict(facts.program.literals)
        self.names, self.uses = dict(facts.names), facts.uses.copy()
        self.layer_vectors: dict[int, ir.Address] = {}
        self.next_weight: int | None = None  # of the next matmul, in a loop over layers
        self.scalars: dict[int, Ref] = {}
        self.row_tiles: dict[int, Ref] = {}
        self.segment_bytes = 0  # of the lane's memory for sinks by sorted indices
        self.runs: dict[tuple[int, int], Ref] = {}  # (index, rows of the result) -> runs, which several sums share
        self.tops: dict[int, tuple[Ref, Ref]] = {}  # largest scores -> (where the lane keeps them, their runs)
        self.scratch_words = 0  # of the widest scratch row
        self.addresses: dict[Ref, int] = {}  # rows -> number of their addresses in the lane's shared memory
        self.product_bytes = 0  # of the lane's memory for a product for each row
        self.must_be_images: set[int] = set()  # values that are written to images as a whole
        self.repeated = False  # a loop body is being lowered
        self.panels: dict[int, tuple[int, int, int]] = {}  # offset of a panel -> (the value in it, its width, its end)
        self.done: set[Instr] = set()  # effects that have been lowered, some with an earlier one
        self.gathered: dict[int, int] = {}  # slabs -> the whole values (``stage/split.py``)
        self.counter = 0
        self.used: set[str] = set()  # "copies", "ahead": these choices of the shape changed the code

    def add(self, *nodes: Node) -> None:
        self.nodes += nodes

    def once_per_tile(self, node: Node) -> None:
        if node not in self.prologue:
            self.prologue.append(node)

    @contextlib.contextmanager
    def body_of_loop(self) -> Iterator[list[Node]]:
        """Collects the nodes that are added within the block."""
        outer, self.nodes, self.panels = self.nodes, [], {}
        known, self.gathered = self.gathered, dict(self.gathered)
        yield self.nodes
        self.nodes, self.panels, self.gathered = outer, {}, known

    def root(self, v: int) -> int:
        """The value that ``v`` is an alias of, or ``v`` itself."""
        while v in self.names:
            v = self.names[v]
        return v

    def alias(self, instr: Instr, x: int) -> None:
        """Make the result of ``instr`` an alias of ``x``."""
        (v,) = instr.outputs
        self.uses[self.root(x)] += self.uses[v] - 1
        self.names[v] = x

    def new(self, instr: Instr, home: st.Home | None = None) -> st.StageValue:
        """The new value that ``instr`` makes."""
        (v,) = instr.outputs
        t = self.program.values[v]
        if t.dtype not in pointwise.COMPUTE:
            raise CannotLower(f"{t.dtype} has no code on the GPU")
        n = math.prod(t.shape)
        self.values[v] = st.StageValue(n // self.split.parts(v), t.dtype, n == 1, home, self.split.slabs.get(v, 0))
        return self.values[v]

    def settle(self, v: int, home: st.Home) -> None:
        v = self.root(v)
        self.values[v] = dataclasses.replace(self.values[v], home=home)

    def value(self, v: int) -> st.StageValue:
        v = self.root(v)
        if v not in self.values:
            self.values[v] = self._from_outside(v)
        return self.values[v]

    def _from_outside(self, v: int) -> st.StageValue:
        t = self.program.values[v]
        if v in self.literals:
            return st.StageValue(1, t.dtype, True, st.Number(self.literals[v]))
        if t.tile:
            raise AssertionError(f"%{v} is read before it is made")
        n = math.prod(t.shape)  # several numbers: the first value of a carry, whose next values are tiles
        row, width = n == 1, 1 if n == 1 else tiles.padded(n)
        return st.StageValue(n, t.dtype, row, st.InVector(self.vector(VectorRecipe(v, (n,), (0,), (n,), width))))

    def unnamed(self, value: st.StageValue) -> int:
        """The number of a new value that the tile program does not have."""
        self.counter += 1
        v = -1 - len(self.program.values) - self.counter
        self.values[v] = value
        return v

    def vector(self, recipe: VectorRecipe) -> ir.Address:
        if (recipe,) not in self.vectors:
            self.vectors.append((recipe,))
        return ir.Address(ir.StationaryVector(self.vectors.index((recipe,)), 0))

    def set_row(self, v: int, expr: Expr, part: str = "") -> None:
        """Evaluate a row value into its two registers."""
        ref = Ref("r", v, part)
        self.add(st.SetRow(ref, self.values[v].dtype, expr))
        self.settle(v, st.InRegisters(ref, "row", ref))

    def load_row(self, v: int, rows: ir.Rows, column: int = 0, ref: Ref | None = None) -> None:
        """Load the number in ``column`` of each of ``rows`` as the row value ``v``."""
        ref = ref or Ref("r", v)
        self.add(st.LoadRow(ref, rows, column))
        self.settle(v, st.InRegisters(ref, "row", ref))

    def fold_row(self, v: int, x: int, how: str, dtype: str) -> None:
        """Fold the columns of tile ``x`` into the row value ``v``."""
        ref = Ref("r", v)
        self.add(st.StartFold(ref, how, dtype))
        self.evaluate(self.value(x).width, [ir.Fold(x, how, ref)])
        self.add(st.FoldQuad(ref, how))
        self.settle(v, st.InRegisters(ref, "row", ref))

    def row(self, v: int) -> Expr:
        value = self.value(v)
        match value.home:
            case st.Number(number):
                return ir.Literal(pointwise.literal(number, pointwise.COMPUTE[value.dtype]))
            case st.InVector():
                return ir.Read("scalar", self.scalar(v), value.dtype)
            case st.InRegisters(ref, "row", _):
                return ir.Read("row", ref, value.dtype)
            case st.LoopNumber(ref):
                return ir.Read("scalar", ref, value.dtype)
            case st.Splat(of):
                return self.row(of)
        raise AssertionError(f"a row value in {value.home}")

    def scalar(self, v: int) -> Ref:
        """The scalar of a stationary value, loaded once per kernel, or once per layer."""
        v, home = self.root(v), self.value(v).home
        assert isinstance(home, st.InVector)
        if v not in self.scalars:
            self.scalars[v] = Ref("s", v)
            load = frame.LoadScalar(self.scalars[v], self.value(v).dtype, home.address, not home.address.layer)
            (self.setup if load.once else self.nodes).append(load)
        self.settle(v, dataclasses.replace(home, scalar=self.scalars[v]))
        return self.scalars[v]

    def row_tile(self, v: int) -> Ref:
        """A row value as the first column of a tile, the operand of a matmul with K = 1."""
        v = self.root(v)
        if v not in self.row_tiles:
            self.row_tiles[v] = Ref("k", v)
            self.add(st.RowTile(self.row_tiles[v], self.row(v), self.value(v).dtype))
        return self.row_tiles[v]

    def rows(self, role: str, k: int) -> ir.Rows:
        array = self.program.inputs[k] if role == "in" else self.program.outputs[k]
        staged = role == "in" and k in self.shape.staged
        self.name_axes()
        self.once_per_tile(frame.addresses_of(array, role, k, staged))
        return frame.rows_of(array, role, k, staged)

    def address_number(self, ref: Ref, stored: bool = False) -> int:
        """The number of the addresses of ``ref`` among those that the lane keeps in shared memory."""
        if ref not in self.addresses:
            self.addresses[ref] = len(self.addresses)
            self.add(st.KeepAddress(ref, self.addresses[ref], stored))
        return self.addresses[ref]

    def name_axes(self) -> None:
        self.once_per_tile(ir.AxisIndices(self.program.axes))

    def keep(self, v: int) -> Keep:
        """The action that keeps ``v`` in registers or in its image."""
        v = self.root(v)
        form = self.value(v).form
        if v not in self.shape.images:
            return Keep(v, Ref("v", v), form)
        self.once_per_tile(ir.Image(Ref("image", v)))
        return Keep(v, Ref("image", v), form, to=Ref("image", v))

    def materialize(self, v: int) -> None:
        self.evaluate(self.value(v).width, [self.keep(v)])

    def evaluate(self, width: int, wanted: Iterable[Action]) -> None:
        """Add a loop over the blocks of tiles of ``width`` columns, which performs the actions ``wanted`` on their elements."""
        actions = [dataclasses.replace(a, value=self.root(a.value)) for a in wanted]
        if any(self.value(a.value).width != width for a in actions):
            raise AssertionError("a loop is over tiles of one width")
        for v in self._products(width, actions):
            self.prepare(v)  # before this loop, which may read the same operands
        actions += self._keep_reread(width, actions)
        products = tuple(self._products(width, actions))
        self.add(st.Evaluate(width, tuple(actions), products, self._homes([a.value for a in actions])))
        for a in actions:
            if isinstance(a, Keep) and not a.push:
                owner = Ref("v", a.value)
                self.settle(a.value, st.InImage(a.to, a.form, owner) if a.to else st.InRegisters(a.ref, a.form, owner))

    def _keep_reread(self, width: int, actions: Sequence[Action]) -> list[Action]:
        """Actions that keep the pending values of ``actions``, and of their operands, that are read again later."""
        kept = {a.value for a in actions if isinstance(a, Keep) and not a.push}
        pending = self._pending(width, actions)
        reads: Counter[int] = Counter()
        for a in actions:
            reads[a.value] += a.reads if isinstance(a, Keep) else 1
        for v in pending:
            reads.update(read_by(self.value(v).home))
        found = [v for v in pending if v not in kept and self.uses[v] > reads[v]]
        return [self.keep(self._rounded(v, reads[v])) for v in found]

    def _rounded(self, v: int, reads: int) -> int:
        """The value to keep for the remaining readers of ``v``, after ``reads``: its 16-bit form, if they all read that."""
        narrow = self.facts.rounded.get(v)
        waits = (
            self.repeated and narrow is not None and narrow in self.values and isinstance(self.values[narrow].home, st.Expression)
        )
        return narrow if narrow is not None and waits and self.uses[v] == reads + 1 else v

    def _pending(self, width: int, actions: Sequence[Action]) -> list[int]:
        found: dict[int, None] = {}

        def visit(v: int) -> None:
            value = self.value(v)
            if value.row or v in found:
                return
            match value.home:
                case st.Expression() | st.Multiply():
                    for x in read_by(value.home):
                        visit(x)
                    found[v] = None
                case st.Parts(parts):
                    for part, first, blocks in parts:
                        if self.value(part).width == width and first == 0 and blocks == tiles.blocks(width):
                            visit(part)

        for a in actions:
            visit(a.value)
        return list(found)

    def _products(self, width: int, actions: Sequence[Action]) -> list[int]:
        return [v for v in self._pending(width, actions) if isinstance(self.value(v).home, st.Multiply)]

    def _homes(self, values: Iterable[int]) -> tuple[tuple[int, st.StageValue], ...]:
        """The current homes of all values that a loop reads."""
        found: dict[int, st.StageValue] = {}

        def visit(v: int) -> None:
            if v in found:
                return
            value = self.value(v)
            if isinstance(value.home, st.InVector) and value.row:
                self.scalar(v)
                value = self.value(v)
            found[v] = value
            for x in read_by(value.home):
                visit(x)

        for v in values:
            visit(v)
        return tuple(found.items())

    def prepare(self, v: int) -> None:
        """Give the operands of product ``v`` their homes."""
        home = self.value(v).home
        if isinstance(home, st.Multiply) and not home.operands:  # preparing another product may have done so
            one_row = self.program.tile_rows == tiles.HALF_TILE_ROWS
            operands = tuple(dataclasses.replace(self._operand(p, home.shape), one_row=one_row) for p in home.pieces)
            in_place = tuple(k for k, o in enumerate(operands) if o.kind == "boxes")
            if in_place:
                self.weights[home.weight] = dataclasses.replace(self.weights[home.weight], in_place=in_place)
            self.settle(v, dataclasses.replace(home, operands=operands))

    def single_column(self, v: int) -> None:
        """Add a matmul with one column of results, which one thread of each quad passes to the others."""
        self.prepare(v)
        self.add(st.SingleColumn(v, ((v, self.values[v]),)))
        self.set_row(v, ir.Read("first column", Ref("d", v), "float32"))

    def _operand(self, v: int, shape: tiles.WeightShape) -> st.Operand:
        value, dtype = self.value(v), shape.dtype
        home, width = value.home, value.width
        if self.shape.copies and isinstance(home, st.InImage) and home.ref.kind == "pop" and len(shape.chunks) > 1:
            # Several chunks of columns read a queue's entry: from registers, products need not wait in between.
            self.used.add("copies")
            ref = self._name_of_copy(v)
            self.add(ir.Alive(ref, value.registers))
            self.evaluate(width, [Keep(v, ref, value.form, push=True)])
            return st.Operand("copy", ref, width, dtype, ref)
        if isinstance(home, st.InArray) and not value.row:
            if home.rows.ref.of in self.shape.boxed and self.root(v) not in self.facts.kept_rows:
                return st.Operand("boxes", home.rows.ref, width, dtype, home.rows.ref, home.rows)
            if tiles.blocks(width) <= _NARROW:
                ref = self._name_of_copy(v)
                self.evaluate(width, [Keep(v, ref, value.form, push=True)])
                return st.Operand("array", ref, width, dtype, ref)
            if not home.rows.strides and self.root(v) not in self.facts.kept_rows:
                return st.Operand("rows", home.rows.ref, width, dtype, home.rows.ref, home.rows)
        if value.row:
            return st.Operand("registers", self.row_tile(v), 8, dtype, Ref("r", self.root(v)))
        if self.is_kept_for_products(v):
            self.materialize(v)
        home = self.value(v).home
        if isinstance(home, st.InImage):
            return st.Operand("image", home.ref, width, dtype, home.owner)
        assert isinstance(home, st.InRegisters)
        return st.Operand("registers", home.ref, width, dtype, home.owner)

    def is_kept_for_products(self, v: int) -> bool:
        """Must ``v`` be brought to registers or an image before products read it? They read no other place but an array's rows."""
        value = self.value(v)
        if value.row or isinstance(value.home, (st.InImage, st.InRegisters)):
            return False
        if not isinstance(value.home, st.InArray):
            return True
        rows = not value.home.rows.strides and self.root(v) not in self.facts.kept_rows
        return tiles.blocks(value.width) > _NARROW and not rows

    def _name_of_copy(self, v: int) -> Ref:
        self.counter += 1
        return Ref("c", abs(self.root(v)), f"_{self.counter}")  # values without a name have negative numbers

    def most_columns(self, pieces: Sequence[int]) -> int:
        """The most columns that a chunk may have, of a product whose first operand is ``pieces`` side by side."""
        operands = [self.value(p) for p in pieces if self.root(p) in self.values]  # a loop makes those of later layers itself
        fetched = any(isinstance(x.home, st.InArray) and tiles.blocks(x.width) > _NARROW for x in operands)
        fetched &= self.facts.kept_rows.isdisjoint(map(self.root, pieces))
        return tiles.CHUNK_COLUMNS if fetched else self.shape.columns
