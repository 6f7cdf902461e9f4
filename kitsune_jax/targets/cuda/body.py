"""One stage of a tile program as the C++ text that a consumer warpgroup runs on a tile.

Comes in: a stage's instructions and the ``StageConfig`` that the layout of the kernel gave it. Goes out: text, in the order in which
things happen on the device, and what the kernel around it must provide: weights in the order of their use, vectors, sinks, scratch.

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
from kitsune_jax.targets.cuda import columns, pointwise, repeats, slabs, tiles
from kitsune_jax.targets.cuda.arrays import Arrays
from kitsune_jax.targets.cuda.budget import Budget
from kitsune_jax.targets.cuda.loop import Action, Fold, Keep, Loop, Store
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.products import Products
from kitsune_jax.targets.cuda.values import (
    Expression,
    InArray,
    InImage,
    InVector,
    Literal,
    Multiply,
    Parts,
    Registers,
    Splat,
    Value,
)
from kitsune_jax.targets.errors import CannotLower


def image_vectors(width: int, dtype: str) -> int:
    """16-byte vectors of a tile's register image, per thread (``kImageVectors``)."""
    return -(-(width // 4 if tiles.is_half(dtype) else width // 2) // 4)


HOW = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "and": "And", "or": "Or"}
REDUCTIONS = {f"reduce_{how}": name for how, name in HOW.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class StageConfig:
    """What the kernel's layout decides for a stage.

    ``resident``: weights stay in shared memory, at ``weight_offset`` of each recipe; else they pass through a ring of ``depth``
    chunks. ``overlap``: two chunks of a product may be in flight; ``columns``: those of a chunk at most. ``spill``: values kept as images, at these offsets of a lane's
    scratch. ``split``: slabs of columns its CTAs share out. ``loops``: layers that repeat become a loop.
    """

    resident: bool = True
    weight_offset: tuple[int, ...] = ()
    depth: int = 0
    overlap: bool = True
    columns: int = 128
    spill: tuple[tuple[int, int], ...] = ()
    split: int = 1
    loops: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class SinkCode:
    """A sink of this stage: accumulator ``name``; ``scalar`` or ``width`` columns; ``quad``: threads of a quad hold different parts."""

    sink: int
    name: str
    how: str
    type: str
    scalar: bool
    width: int
    quad: bool


class Body:
    def __init__(
        self, program: TileProgram, stage: int, config: StageConfig, weights: list[WeightRecipe], vectors: columns.Vectors
    ):
        self.program, self.stage, self.config = program, stage, config
        self.weights, self.vectors = weights, vectors
        self.lines: list[str] = []
        self.prologue: list[str] = []  # once per tile, in front of everything
        self.setup: list[str] = []  # once per kernel
        self.sinks: list[SinkCode] = []
        self.scratch_words = 0  # of the widest row that changes places
        self.popped: list[int] = []
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
        self.uses = self._count_uses(program.stages[stage])
        self.spill = dict(config.spill)
        self.concatenations = columns.concatenations_for_matmuls(self)
        self.slabs = slabs.of_stage(self.instrs, program, config.split)

    def emit(self) -> None:
        """Generates the whole body. Raises ``CannotLower``."""
        runs = {run.segments[0][0].outputs[0]: run for run in repeats.find(self.program, self.instrs)} if self.config.loops else {}
        in_loops: set[int] = set()
        for instr in self.instrs:
            if instr.outputs and instr.outputs[0] in runs:
                run = runs[instr.outputs[0]]
                self._layers(run)
                in_loops |= {v for segment in run.segments for i in segment for v in i.outputs}
            elif not in_loops.intersection(instr.outputs):
                self._instr(instr)
        for q in self.popped:
            self.text(f"queue{q}.rd_release(n);")

    def _layers(self, run: repeats.Run) -> None:
        """A loop over equal layers: its body is the first layer's, with weights and vectors at a distance that grows with ``layer``.

        The value that goes from layer to layer lives in registers of its own, or in two images that take turns.
        """
        value, out = self.value(run.entry), run.exits[0]
        if value.row:
            raise CannotLower("a loop over layers of one column")
        if (run.entry in self.spill) != (out in self.spill):
            self.also_spill |= {run.entry, out}
        carry = (_ImageCarry if run.entry in self.spill and out in self.spill else _RegisterCarry)(self, run)
        carry.enter()
        first_weight, per_layer = len(self.weights), sum(i.kind == "matmul" for i in run.segments[0])
        self._layer_vectors(run)
        self._layer_weights(run)
        self.products.begin_layers(first_weight, per_layer, len(run.segments))
        self.text("KITSUNE_NO_UNROLL")
        self.text(f"for (u32 layer = 0; layer < {len(run.segments)}; ++layer) {{")
        self.values[run.entry] = dataclasses.replace(value, place=carry.inside())
        for instr in run.segments[0]:
            self._instr(instr)
        carry.hand_on()
        self.text("}")
        self.products.end_layers()
        self.next_recipe = None
        self.layer_vectors = {}
        self.values[run.entry] = value
        self.values[run.exits[-1]] = dataclasses.replace(value, place=carry.after())
        self.carries[run.exits[-1]] = carry.holds

    def _layer_vectors(self, run: repeats.Run) -> None:
        """Vectors of all layers one after the other; those of layer 0 know where they are, and how far the next layer's."""
        broadcasts = [k for k, i in enumerate(run.segments[0]) if i.kind == "broadcast_in_dim" and columns.is_vector(self, i)]
        recipes = [[columns.broadcast_recipe(self, segment[k]) for k in broadcasts] for segment in run.segments]
        stride = sum(r.words for r in recipes[0])
        at = self.vectors.append([r for layer in recipes for r in layer])
        for k, recipe in zip(broadcasts, recipes[0], strict=True):
            self.layer_vectors[run.segments[0][k].outputs[0]] = (at, stride)
            at += recipe.words

    def _layer_weights(self, run: repeats.Run) -> None:
        """Recipes of all layers' weights, layer by layer; ``_matmul`` takes those of layer 0 in order."""
        self.next_recipe = len(self.weights)
        for segment in run.segments:
            for instr in segment:
                if instr.kind == "matmul":
                    self.weights.append(self._recipe(instr))

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

    def column_chunks(self, width: int) -> tuple[int, ...]:
        return tiles.column_chunks(width, self.config.columns)

    def read_again(self, v: int) -> bool:
        return self.uses[v] > 1

    def expression(self, instr: Instr, operands: Sequence[str], types: Sequence[str], out: str, dtype: str, column: str) -> str:
        text = pointwise.instruction(instr, operands, types, out, dtype)
        if text is None:
            raise CannotLower(f"{instr.kind} of {types[0]} has no code on the GPU")
        return text

    def column0(self, v: int) -> str:
        """What the slab adds to the columns of a value in global memory."""
        return f"static_cast<int>(slab) * {self.value(v).n} + " if v in self.slabs else ""

    def keep(self, v: int) -> Keep:
        value = self.value(v)
        form = "pair" if tiles.is_half(value.dtype) else "word"
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
            value.place = InImage(f"{action.name}.get")
        else:
            value.place = Registers(action.name, action.form)

    def materialize(self, v: int) -> None:
        """Gives ``v`` a home of its own."""
        self.loop(self.value(v).width, [self.keep(v)])

    def copy_of(self, v: int) -> str:
        """Registers with a value that stays where it is: the operand of one product."""
        name = self.fresh(f"c{v}_")
        form = "pair" if tiles.is_half(self.value(v).dtype) else "word"
        self.loop(self.value(v).width, [Keep(v, name, form, push=True)])
        return name

    def loop(self, width: int, actions: Sequence[Action]) -> None:
        for action in actions:
            self.used(action.value)
        Loop(self, width, actions).emit()

    def vector(self, v: int, name: str, width: int, shift: int) -> list[str]:
        """Declares and fills ``name[owned]``: the columns of a stationary vector in block b - shift."""
        place, type_ = self.value(v).place, pointwise.COMPUTE[self.value(v).dtype]
        assert isinstance(place, InVector)
        owned, raw = tiles.owned(width), f"{name}_bits"
        block = f"b - {shift}" if shift else "b"
        fill = f"load_vector<{owned}>({{}}, {place.address}, first_column<{width}>(lane, {block}));"
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
                self.text(f"const {type_} s{v} = from_word<{type_}>(bits(ld_global({place.address})));")
            else:
                self.setup.append(f"const {type_} s{v} = from_word<{type_}>(bits(ld_global(p.{place.address})));")
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
        return uses

    def used(self, v: int) -> None:
        """``v`` is read now: whatever registers it is in must still be there."""
        self.budget.use(v)
        for other in self.carries.get(v, ()):
            self.budget.use(other)

    # -- instructions

    def _instr(self, instr: Instr) -> None:
        if instr.outputs and not self.program.values[instr.outputs[0]].tile:
            return  # stationary: made by XLA in front of the call
        handler = getattr(self, f"_{instr.kind}", None)
        if handler is not None:
            handler(instr)
        elif instr.kind in REDUCTIONS:
            self._reduce(instr)
        elif instr.kind in columns.REARRANGING:
            columns.rearrange(self, instr)
        else:
            self._pointwise(instr)

    def new(self, instr: Instr) -> Value:
        """The value an instruction makes, without a place yet."""
        (v,) = instr.outputs
        t = self.program.values[v]
        if t.dtype not in pointwise.COMPUTE:
            raise CannotLower(f"dtype {t.dtype}")
        n = math.prod(t.shape)
        self.values[v] = Value(n // self.config.split if v in self.slabs else n, t.dtype, n == 1)
        return self.values[v]

    def _load(self, instr: Instr) -> None:
        value, array = self.new(instr), instr["array"]
        value.place = InArray(array)
        if value.row:
            self._row_load(instr.outputs[0], array)

    def _row_load(self, v: int, array: int) -> None:
        value = self.values[v]
        row = self.arrays.row("in", array)
        type_, element = pointwise.COMPUTE[value.dtype], pointwise.ELEMENT[value.dtype]
        self.text(f"const {type_} r{v}[2] = {{load_one<{element}>({row}[0], valid[0]), load_one<{element}>({row}[1], valid[1])}};")
        value.place = Registers(f"r{v}", "row")
        self.budget.define(v, 2)

    def _pop(self, instr: Instr) -> None:
        """The entry stays in its slot, and is read from there, until the tile is done."""
        value, q, (v,) = self.new(instr), instr["queue"], instr.outputs
        if v in self.slabs:
            raise CannotLower("a queue's entry is read slab by slab")
        self.text(f"queue{q}.rd_acquire(n);")
        self.text(f"const auto pop{q} = [&](int i) {{ return queue{q}.pop(n, i); }};")
        self.popped.append(q)
        if value.row:
            type_ = pointwise.COMPUTE[value.dtype]
            self.text(f"const U4 e{v} = pop{q}(0);")
            self.text(f"const {type_} r{v}[2] = {{from_word<{type_}>(e{v}.x), from_word<{type_}>(e{v}.y)}};")
            value.place = Registers(f"r{v}", "row")
        else:
            value.place = InImage(f"pop{q}")

    def _push(self, instr: Instr) -> None:
        (v,), q = instr.inputs, instr["queue"]
        value = self.value(v)
        self.text(f"queue{q}.wr_acquire(n);")
        if value.row:
            x = [f"to_word({self.row(v).replace('[h]', f'[{h}]')})" for h in range(2)]
            self.text(f"queue{q}.push(n, 0, U4{{{x[0]}, {x[1]}, 0, 0}});")
        else:
            first = f"slab * {image_vectors(value.width, value.dtype)} + " if v in self.slabs else ""
            self.text(f"const auto push{q} = [&](int i, U4 v) {{ queue{q}.push(n, {first}i, v); }};")
            form = "pair" if tiles.is_half(value.dtype) else "word"
            self.loop(value.width, [Keep(v, f"q{q}", form, put=f"push{q}", push=True)])
        self.text(f"queue{q}.wr_release(n);")

    def _store(self, instr: Instr) -> None:
        (v,) = instr.inputs
        value, array = self.value(v), instr["array"]
        if value.row:
            row, x = self.arrays.row("out", array), self.row(v)
            element = pointwise.ELEMENT[self.program.outputs[array].dtype]
            self.text("KITSUNE_UNROLL")
            self.text(f"for (int h = 0; h < 2; ++h) store_one<{element}>({row}[h], valid[h] && lane.q == 0, {x});")
            return
        self.loop(value.width, [Store(v, array)])

    def _pointwise(self, instr: Instr) -> None:
        value = self.new(instr)
        if not value.row:
            value.place = self._with_bias(instr) or Expression(instr)
            return
        (v,) = instr.outputs
        type_ = pointwise.COMPUTE[value.dtype]
        operands = [self.row(x) for x in instr.inputs]
        types = [pointwise.COMPUTE[self.value(x).dtype] for x in instr.inputs]
        text = self.expression(instr, operands, types, type_, value.dtype, "0")
        self.row_value(v, text)

    def _with_bias(self, instr: Instr) -> Multiply | None:
        """An addition of a stationary vector to a matmul that nobody else reads: its accumulators start from the vector."""
        if instr.kind != "add":
            return None
        for x, bias in (instr.inputs, instr.inputs[::-1]):
            place, vector = self.value(x).place, self.value(bias).place
            if not isinstance(place, Multiply) or place.bias is not None or self.uses[x] != 1:
                continue
            if isinstance(vector, InVector) and not vector.scalar and pointwise.COMPUTE[self.value(bias).dtype] == "float":
                return dataclasses.replace(place, bias=bias)
        return None

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

    def _reshape(self, instr: Instr) -> None:
        self.alias(instr, instr.inputs[0])

    def alias(self, instr: Instr, v: int) -> None:
        self.values[instr.outputs[0]] = self.value(v)

    def _copy(self, instr: Instr) -> None:
        self.alias(instr, instr.inputs[0])

    def _row_index(self, instr: Instr) -> None:
        (v,) = instr.outputs
        value = self.new(instr)
        index = f"static_cast<i32>({self.arrays.axis_index(instr['axes'], 'h')})"
        text = pointwise.convert(index, "i32", pointwise.COMPUTE[value.dtype])
        if value.row:
            self.row_value(v, text)
            return
        row = -1 - v
        self.values[row] = Value(1, value.dtype, True)
        self.text(f"{pointwise.COMPUTE[value.dtype]} i{v}[2];")
        self.text("KITSUNE_UNROLL")
        self.text(f"for (int h = 0; h < 2; ++h) i{v}[h] = {text};")
        self.values[row].place = Registers(f"i{v}", "row")
        value.place = Splat(row)

    def _reduce(self, instr: Instr) -> None:
        x, v = self.value(instr.inputs[0]), instr.outputs[0]
        if instr.inputs[0] in self.slabs:
            raise CannotLower("a reduction along columns that are split over CTAs has no code on the GPU")
        rank = len(self.program.values[instr.inputs[0]].shape)
        if x.row:
            self.alias(instr, instr.inputs[0])
            return
        if tuple(instr["axes"]) != tuple(range(1, rank + 1)):
            raise CannotLower("a reduction over a part of a row's dimensions has no code on the GPU")
        value, how = self.new(instr), REDUCTIONS[instr.kind]
        type_ = pointwise.COMPUTE[value.dtype]
        self.text(f"{type_} r{v}[2] = {{{how}::identity<{type_}>(), {how}::identity<{type_}>()}};")
        self.loop(x.width, [Fold(instr.inputs[0], how, f"r{v}")])
        self.text(f"fold_quad<{how}>(r{v});")
        value.place = Registers(f"r{v}", "row")
        self.budget.define(v, 2)

    def _matmul(self, instr: Instr) -> None:
        x = instr.inputs[0]
        value, (v,) = self.new(instr), instr.outputs
        if self.next_recipe is None:
            self.weights.append(self._recipe(instr))
            weight = len(self.weights) - 1
        else:
            weight = self.next_recipe
            self.next_recipe += 1
        value.place = Multiply(v, weight, tuple(self._pieces(x)))
        if value.row:
            self._single_column(v)

    def _recipe(self, instr: Instr) -> WeightRecipe:
        x, w = instr.inputs
        shape_x, shape_w = self.program.values[x].shape, self.program.values[w].shape
        if instr["x_batch"] or sorted(instr["x_contract"]) != list(range(1, len(shape_x) + 1)):
            raise CannotLower("a matrix product for each row has no code on the GPU")
        if self.program.values[w].tile:
            raise CannotLower("a matrix product of two streamed values has no code on the GPU")
        pairs = sorted(zip(instr["x_contract"], instr["w_contract"], strict=True))
        free = [d for d in range(len(shape_w)) if d not in instr["w_contract"]]
        if instr["out_perm"][0] != 0:
            raise AssertionError("rows come first")
        order = [free[p - 1] for p in instr["out_perm"][1:]]
        dtype = self.program.values[x].dtype
        if self.program.values[w].dtype != dtype or dtype not in pointwise.OPERAND:
            raise CannotLower(f"matrix product of {dtype} and {self.program.values[w].dtype}")
        pieces = tuple(math.prod(self.program.values[p].shape) for p in self._pieces(x))
        n = math.prod(shape_w[d] for d in order)
        shape = tiles.WeightShape(pieces, n, dtype, self.config.split, self.config.columns)
        return WeightRecipe(w, (*(b for _, b in pairs), *order), len(pairs), shape)

    def _pieces(self, x: int) -> list[int]:
        """The values whose columns make up the operand: the parts of a concatenation that nobody else needs as one."""
        pieces = self.concatenations.get(x)
        return [x] if pieces is None else [p for part in pieces for p in self._pieces(part)]

    def _single_column(self, v: int) -> None:
        """A matmul with one column of results: the thread of a quad that has it tells the others."""
        value = self.values[v]
        self.products.advance([v], 0)
        name, _ = self.products.chunk_at(v, 0)
        text = f"shfl({name}[2 * h], lane_id() & ~3u)"
        self.row_value(v, text)
        value.row = True

    def _sink(self, instr: Instr) -> None:
        (v,) = instr.inputs
        sink = self.program.sinks[instr["sink"]]
        value, rank = self.value(v), len(self.program.values[v].shape)
        if sink.how not in HOW:
            raise CannotLower(f"a sink by {sink.how} has no code on the GPU")
        how, type_, name = HOW[sink.how], pointwise.COMPUTE[sink.dtype], f"sink{instr['sink']}"
        scalar = value.row or len(instr["axes"]) == rank + 1
        if not scalar and tuple(instr["axes"]) != (0,):
            raise CannotLower("a sink over the rows and a part of a row's dimensions has no code on the GPU")
        if v in self.slabs:
            raise CannotLower("a sink of a stage that is split by columns has no code on the GPU")
        width = 1 if scalar else value.width
        self.sinks.append(SinkCode(instr["sink"], name, how, type_, scalar, width, not value.row))
        identity = f"{how}::identity<{type_}>()"
        if scalar:
            self.setup.append(f"{type_} {name} = {identity};")
        else:
            self.setup.append(f"{type_} {name}[{width // 4}];")
            self.setup.append(f"for (int i = 0; i < {width // 4}; ++i) {name}[i] = {identity};")
        if value.row:
            x = self.row(v)
            self.text("KITSUNE_UNROLL")
            self.text(f"for (int h = 0; h < 2; ++h) if (valid[h]) {name} = {how}::fold({name}, {type_}({x}));")
            return
        self.loop(value.width, [Fold(v, how, name, stream=True, scalar=scalar)])

    def _matmul_sink(self, instr: Instr) -> None:
        raise CannotLower("weight gradients (products that contract the stream) have no code on the GPU yet")


class _RegisterCarry:
    """What a loop over layers hands on, in registers: the results of a layer are copied to where the next one expects them."""

    def __init__(self, body: Body, run: repeats.Run):
        self.body, self.run = body, run
        self.value = body.value(run.entry)
        self.form = "pair" if tiles.is_half(self.value.dtype) else "word"
        self.name = f"h{run.entry}"
        self.holds: tuple[object, ...] = (("carry", run.entry),)

    def enter(self) -> None:
        self.body.loop(self.value.width, [Keep(self.run.entry, self.name, self.form, push=True)])
        self.body.budget.define(("carry", self.run.entry), self.value.registers)

    def inside(self) -> Registers:
        return Registers(self.name, self.form)

    def hand_on(self) -> None:
        body, out = self.body, self.run.exits[0]
        body.materialize(out)
        made = body.value(out).place
        assert isinstance(made, Registers)
        count = self.value.width // (4 if self.form == "pair" else 2)
        body.text("KITSUNE_UNROLL")
        body.text(f"for (int i = 0; i < {count}; ++i) {self.name}[i] = {made.name}[i];")
        body.budget.use(out)
        body.budget.use(("carry", self.run.entry))

    def after(self) -> Registers:
        return self.inside()


class _ImageCarry:
    """The same in two images of shared memory, which change places with every layer."""

    def __init__(self, body: Body, run: repeats.Run):
        self.body, self.run = body, run
        self.value = body.value(run.entry)
        self.form = "pair" if tiles.is_half(self.value.dtype) else "word"
        self.names = (f"image{run.entry}", f"image{run.exits[0]}")
        self.holds: tuple[object, ...] = (
            (run.entry, run.exits[0])[len(run.segments) % 2],
        )  # where the last layer leaves its result

    def enter(self) -> None:
        body = self.body
        for v, name in zip((self.run.entry, self.run.exits[0]), self.names, strict=True):
            body.prologue.append(f"const Image {name} = Image::at(scratch + {body.spill[v]});")
        body.budget.define(self.run.entry, 0)
        body.loop(self.value.width, [Keep(self.run.entry, self.names[0], self.form, put=f"{self.names[0]}.put", push=True)])
        body.budget.define(self.run.exits[0], 0)

    def inside(self) -> InImage:
        a, b = self.names
        self.body.text(f"const Image {a}_in = layer & 1 ? {b} : {a}, {a}_out = layer & 1 ? {a} : {b};")
        return InImage(f"{a}_in.get")

    def hand_on(self) -> None:
        out = f"{self.names[0]}_out"
        self.body.loop(self.value.width, [Keep(self.run.exits[0], out, self.form, put=f"{out}.put", push=True)])
        for v in (self.run.entry, self.run.exits[0]):
            self.body.budget.use(v)

    def after(self) -> InImage:
        return InImage(f"{self.names[len(self.run.segments) % 2]}.get")


__all__ = ["Body", "InImage", "Parts", "SinkCode", "StageConfig"]
