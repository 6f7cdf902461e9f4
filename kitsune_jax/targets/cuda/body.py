"""One stage of a tile program as the C++ text that a consumer warpgroup runs on a tile.

Comes in: a stage's instructions and the ``StageConfig`` that the layout of the kernel gave it. Goes out: text, in the order in
which things happen on the device, and what the kernel around it must provide: weights in the order of their use, vectors, sinks,
scratch.

Instructions are taken in order. Those with an effect (store, push, a fold) are emitted at once as loops over the tile's blocks
(``loop.py``); pointwise ones and matmuls wait until a loop asks for their value. So an epilogue is part of the loop that reads the
accumulators, a value that is used once is never materialised, and the accumulators of a wide matmul live one chunk at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from kitsune_jax.program.ir import Instr, StageProgram, TileProgram
from kitsune_jax.targets.cuda import columns, effects, instructions, layers, pointwise, repeats, slabs, tiles
from kitsune_jax.targets.cuda.actions import Action, Keep
from kitsune_jax.targets.cuda.arrays import Arrays
from kitsune_jax.targets.cuda.budget import Budget
from kitsune_jax.targets.cuda.gradients import sums_panel
from kitsune_jax.targets.cuda.loop import Loop
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.products import Products
from kitsune_jax.targets.cuda.sharing import Constants
from kitsune_jax.targets.cuda.values import GradientCode, InImage, InVector, Literal, Registers, SinkCode, Splat, Value
from kitsune_jax.targets.errors import CannotLower


@dataclasses.dataclass(frozen=True, slots=True)
class StageConfig:
    """What the kernel's layout decides for a stage.

    ``resident``: weights stay in shared memory, at ``weight_offset`` of each recipe; else they pass through a ring of ``depth``
    chunks. ``overlap``: two chunks of a product may be in flight; ``columns``: those of a chunk at most. ``spill``: values kept as
    images, at these offsets of a lane's scratch. ``split``: slabs of columns its CTAs share out. ``lanes``: of each of them.
    ``copies``: matmuls of several chunks take entries of queues from registers. ``slab_queues``: those with a split stage at an
    end. ``loops``: layers that repeat become a loop. ``staged``: input arrays whose tiles come through shared memory.
    ``fetched``: columns of a chunk at most where the operand is fetched from memory on the way, again for each chunk.
    """

    resident: bool = True
    weight_offset: tuple[int, ...] = ()
    depth: int = 0
    overlap: bool = True
    columns: int = 128
    spill: tuple[tuple[int, int], ...] = ()
    split: int = 1
    lanes: int = 1
    copies: bool = True
    slab_queues: frozenset[int] = frozenset()
    loops: bool = True
    staged: frozenset[int] = frozenset()
    fetched: int = 128


class Body:
    def __init__(
        self, program: TileProgram, stage: int, config: StageConfig, weights: list[WeightRecipe], vectors: columns.Vectors
    ):
        self.program, self.stage, self.config = program, stage, config
        self.weights, self.vectors = weights, vectors
        self.lines: list[str] = []
        self.prologue: list[str] = []  # once per tile, in front of everything
        self.setup: list[str] = []  # once per kernel
        self.constants = Constants()
        self.sinks: list[SinkCode] = []
        self.gradients: list[GradientCode] = []
        self.panel_bytes = 0  # of the largest gradient's operands, which take turns
        self.early_panels: set[str] = set()  # written before their gradient's turn, in the loop of another effect
        self.emitted: set[int] = set()  # effects that came with an earlier one: positions in ``instrs``
        self.scratch_words = 0  # of the widest row that changes places
        self.popped: list[int] = []
        self.entries: set[int] = set()  # values that lie in a queue's entry
        self.next_recipe: int | None = None  # of the matmul that comes next, in a loop over layers
        self.layer_vectors: dict[int, tuple[int, int]] = {}
        self.carries: dict[int, tuple[object, ...]] = {}  # a loop's result -> what holds it
        self.also_spill: set[int] = set()  # values that must be images because what a loop makes of them is one
        self.budget = Budget()
        self.arrays = Arrays(self)
        self.products = Products(self)
        self.values: dict[int, Value] = {}
        self.scalars: dict[int, str] = {}
        self.row_tiles: dict[int, str] = {}
        self.counter = 0
        self.instrs = program.stages[stage].body
        self.another_name: dict[int, int] = {}
        self.uses = self._count_uses(program.stages[stage])
        self.spill = dict(config.spill)
        self.concatenations = columns.concatenations_for_matmuls(self)
        self._forget_panel_sums()
        self.slabs = slabs.of_stage(self.instrs, program, config.split, config.lanes)

    def emit(self) -> None:
        """Generates the whole body. Raises ``CannotLower``."""
        runs = {run.segments[0][0].outputs[0]: run for run in repeats.find(self.program, self.instrs)} if self.config.loops else {}
        in_loops: set[int] = set()
        for k, instr in enumerate(self.instrs):
            if k in self.emitted:
                continue
            if instr.outputs and instr.outputs[0] in runs:
                run = runs[instr.outputs[0]]
                layers.emit(self, run)
                in_loops |= {v for segment in run.segments for i in segment for v in i.outputs}
            elif not in_loops.intersection(instr.outputs):
                instructions.emit(self, instr)
        for q in self.popped:
            self.text(f"queue{q}.rd_release(n);")

    def effects_of(self, instr: Instr) -> list[Instr]:
        """``instr`` and the effects further on of the same value, which are now taken care of."""
        start, v = self.instrs.index(instr), self.root(instr.inputs[0])
        found = [
            k
            for k, i in enumerate(self.instrs[start:], start)
            if i.kind in effects.KINDS and self.root(i.inputs[0]) == v and k not in self.emitted and not sums_panel(self, i)
        ]
        self.emitted.update(found)
        return [self.instrs[k] for k in found]

    def vector_of(self, instr: Instr) -> tuple[int, int]:
        """(words from the first vector, words to the next layer's) of a stationary value that is broadcast to every row."""
        if instr.outputs[0] in self.layer_vectors:
            return self.layer_vectors[instr.outputs[0]]
        return self.vectors.add(columns.broadcast_recipe(self, instr)), 0

    # -- what loops ask

    def value(self, v: int) -> Value:
        if v not in self.values:
            self.values[v] = self._outside(v)
        return self.values[v]

    def text(self, line: str) -> None:
        self.lines.append(line)

    def fresh(self, prefix: str) -> str:
        self.counter += 1
        return f"{prefix}{self.counter}"

    def root(self, v: int) -> int:
        """The value that ``v`` is another name of; itself if it is none."""
        return self.another_name.get(v, v)

    def read_again(self, v: int, reads: int) -> bool:
        """Is ``v`` read by others than the ``reads`` instructions that are at hand?"""
        return self.uses[v] > reads

    def expression(self, instr: Instr, operands: Sequence[str], types: Sequence[str], out: str, dtype: str) -> str:
        text = pointwise.instruction(instr, operands, types, out, dtype)
        if text is None:
            raise CannotLower(f"{instr.kind} of {types[0]} has no code on the GPU")
        return text

    def column0(self, v: int) -> str:
        """What the slab adds to the columns of a value in global memory."""
        return f"static_cast<int>(slab) * {self.value(v).n} + " if v in self.slabs else ""

    def keep(self, v: int) -> Keep:
        value = self.value(v)
        form = value.form
        if v in self.spill:
            offset = self.spill[v]
            name = f"image{v}"
            self.prologue.append(f"const Image {name} = Image::at(scratch + {offset});")
            return Keep(v, name, form, put=f"{name}.put")
        return Keep(v, f"v{v}", form)

    def settle(self, action: Keep) -> None:
        """The loop that keeps a value has been emitted."""
        value = self.value(action.value)
        if action.put:
            value.place = InImage(f"{action.name}.get", action.form)
        else:
            value.place = Registers(action.name, action.form)

    def materialize(self, v: int) -> None:
        """Gives ``v`` a home of its own."""
        self.loop(self.value(v).width, [self.keep(v)])

    def copy_of(self, v: int) -> str:
        """Registers with a value that stays where it is: the operand of one product."""
        name = self.fresh(f"c{v}_")
        self.loop(self.value(v).width, [Keep(v, name, self.value(v).form, push=True)])
        return name

    def loop(self, width: int, actions: Sequence[Action]) -> None:
        for action in actions:
            self.used(action.value)
        Loop(self, width, actions).emit()

    def address(self, place: InVector) -> str:
        """The C++ expression of where a vector starts."""
        slab = f" + slab * {place.slab}" if place.slab else ""
        layer = f" + layer * {place.layer}" if place.layer else ""
        return f"{self.vector_at(place.offset)}{slab}{layer}"

    def vector_at(self, offset: int) -> str:
        return f"vectors + {self.constants.number('vector', offset, offset)}"

    def vector(self, v: int, name: str, width: int, shift: int) -> list[str]:
        """Declares and fills ``name[owned]``: the columns of a stationary vector in block b - shift."""
        place, type_ = self.value(v).place, pointwise.COMPUTE[self.value(v).dtype]
        assert isinstance(place, InVector)
        owned, raw = tiles.owned(width), f"{name}_bits"
        block = f"b - {shift}" if shift else "b"
        fill = f"load_vector<{owned}>({{}}, {self.address(place)}, first_column<{width}>(lane, {block}));"
        if type_ == "float":
            return [f"float {name}[{owned}];", fill.format(name)]
        return [
            f"float {raw}[{owned}];",
            fill.format(raw),
            f"{type_} {name}[{owned}];",
            f"for (int i = 0; i < {owned}; ++i) {name}[i] = from_word<{type_}>(bits({raw}[i]));",
        ]

    def scalar(self, v: int) -> str:
        """The name of a stationary scalar, loaded once per kernel."""
        if v not in self.scalars:
            place, type_ = self.value(v).place, pointwise.COMPUTE[self.value(v).dtype]
            assert isinstance(place, InVector)
            self.scalars[v] = f"s{v}"
            if place.layer:
                self.text(f"const {type_} s{v} = from_word<{type_}>(bits(ld_global({self.address(place)})));")
            else:
                self.setup.append(f"const {type_} s{v} = from_word<{type_}>(bits(ld_global(p.{self.address(place)})));")
        return self.scalars[v]

    def row_as_tile(self, v: int) -> str:
        """One number per row as the first column of a tile of width 8: the operand of a matmul with K = 1."""
        if v not in self.row_tiles:
            name = self.row_tiles[v] = f"k{v}"
            value = self.value(v)
            row = self.row(v)
            if tiles.is_half(value.dtype):
                element = pointwise.ELEMENT[value.dtype]
                items = ", ".join(f"lane.q == 0 ? pack<{element}>({row.replace('[h]', f'[{h}]')}, 0.0f) : 0" for h in range(2))
                self.text(f"u32 {name}[2] = {{{items}}};")
            else:
                items = ", ".join(f"lane.q == 0 ? {row.replace('[h]', f'[{h}]')} : 0.0f, 0.0f" for h in range(2))
                self.text(f"float {name}[4] = {{{items}}};")
        return self.row_tiles[v]

    # -- values from outside the body

    def _outside(self, v: int) -> Value:
        t = self.program.values[v]
        literals = dict(self.program.literals)
        n = math.prod(t.shape)
        if v in literals:
            return Value(1, t.dtype, True, Literal(literals[v]))
        if t.tile or n != 1:
            raise CannotLower("a stationary value is used without a broadcast")
        recipe = VectorRecipe(v, (1,), (0,), (1,), 1)
        return Value(1, t.dtype, True, InVector(self.vectors.add(recipe), True))

    def _count_uses(self, stage: StageProgram) -> Counter[int]:
        """How many instructions read each value; what is only another name for a value counts for that value."""
        alias: dict[int, int] = {}
        uses: Counter[int] = Counter()
        for instr in stage.body:
            if instr.kind == "reshape" and self.program.values[instr.outputs[0]].tile:
                alias[instr.outputs[0]] = alias.get(instr.inputs[0], instr.inputs[0])
                continue
            for x in instr.inputs:
                uses[alias.get(x, x)] += 1
        for name, x in alias.items():
            uses[name] = uses[x]
        self.another_name = alias
        return uses

    def _forget_panel_sums(self) -> None:
        """A sum that is made from a panel does not read the value where it lies."""
        for instr in self.instrs:
            if instr.kind == "sink" and sums_panel(self, instr):
                root = self.root(instr.inputs[0])
                self.uses.subtract(v for v in list(self.uses) if self.root(v) == root)

    def used(self, v: int) -> None:
        """``v`` is read now: whatever registers it is in must still be there."""
        self.budget.use(v)
        for other in self.carries.get(v, ()):
            self.budget.use(other)

    # -- values of instructions

    def new(self, instr: Instr) -> Value:
        """The value an instruction makes, without a place yet."""
        (v,) = instr.outputs
        t = self.program.values[v]
        if t.dtype not in pointwise.COMPUTE:
            raise CannotLower(f"dtype {t.dtype}")
        n = math.prod(t.shape)
        slab = v in self.slabs
        self.values[v] = Value(n // self.config.split if slab else n, t.dtype, n == 1, slab=slab)
        return self.values[v]

    def row_value(self, v: int, text: str) -> None:
        """Gives a row value its two registers; ``text`` may speak of ``h``."""
        type_ = pointwise.COMPUTE[self.values[v].dtype]
        self.text(f"{type_} r{v}[2];")
        self.text("KITSUNE_UNROLL")
        self.text(f"for (int h = 0; h < 2; ++h) r{v}[h] = {text};")
        self.values[v].place = Registers(f"r{v}", "row")
        self.budget.define(v, 2)

    def row(self, v: int) -> str:
        value = self.value(v)
        match value.place:
            case Literal(constant):
                return pointwise.literal(constant, pointwise.COMPUTE[value.dtype])
            case InVector():
                return self.scalar(v)
            case Registers(name, "row"):
                return f"{name}[h]"
            case Splat(of):
                return self.row(of)
        raise AssertionError(f"a row value in {value.place}")

    def alias(self, instr: Instr, v: int) -> None:
        self.values[instr.outputs[0]] = self.value(v)
