"""The blocks of a loop between which nothing changes place: its text, element by element.

Comes in: a ``Loop`` with its actions, and the blocks [first, last). Goes out: C++ text. Everything that is read is brought in once
per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.actions import Action, Fold, Keep, Store, ToPanel, ToScratch
from kitsune_jax.targets.cuda.values import (
    Expression,
    InArray,
    InImage,
    InScratch,
    InVector,
    Literal,
    Multiply,
    Parts,
    Registers,
    Splat,
)
from kitsune_jax.targets.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.loop import Loop


class Segment:
    """The blocks [first, last) of a loop."""

    def __init__(self, loop: Loop, first: int, last: int):
        self.loop, self.body = loop, loop.body
        self.first, self.last = first, last
        self.ahead: list[str] = []  # once, in front of the loop
        self.before: list[str] = []  # once per block
        self.element: list[str] = []
        self.pair: list[str] = []  # after both elements of a pair
        self.after: list[str] = []  # once per block
        self.temporaries: list[str] = []  # both elements of a pair
        self.names: dict[tuple[int, int], str] = {}
        self.loaded: dict[tuple[int, int], str] = {}

    def emit(self) -> None:
        for action in self.loop.actions:
            self._action(action)
        pairs = self.loop.owned
        text = self.body.text
        for line in self.ahead:
            text(line)
        text("KITSUNE_UNROLL")
        text(f"for (int b = {self.first}; b < {self.last}; ++b) {{")
        for line in self.before:
            text("  " + line)
        text("  KITSUNE_UNROLL")
        text(f"  for (int ii = 0; ii < {pairs}; ++ii) {{")
        if self.element:
            self._emit_elements()
        for line in self.pair:
            text("    " + line)
        text("  }")
        for line in self.after:
            text("  " + line)
        text("}")

    def _emit_elements(self) -> None:
        text = self.body.text
        text("    const int h = ii & 1;")
        for name in self.temporaries:
            text(f"    float {name}[2];")
        text("    KITSUNE_UNROLL")
        text("    for (int e = 0; e < 2; ++e) {")
        text("      const int c = 2 * (ii >> 1) + e;")
        for line in self.element:
            text("      " + line)
        text("    }")

    # -- actions

    def _action(self, action: Action) -> None:
        value = self.body.value(action.value)
        type_ = pointwise.COMPUTE[value.dtype]
        if isinstance(action, Keep | ToPanel) and (pair := self._ready_pair(action.value)):
            self._move_pairs(action, pair)
            return
        x = self.read(action.value, 0)
        inside = self._inside(value.n)
        pairs = self.loop.owned
        match action:
            case Keep(_, name, form, put):
                x = f"{inside} ? {x} : {type_}(0)" if inside else x
                if form == "pair":
                    element = pointwise.ELEMENT[value.dtype]
                    self.temporaries.append(f"t_{name}")
                    self.element.append(f"t_{name}[e] = {x};")
                    target = f"w_{name}[ii]" if put else f"{name}[b * {pairs} + ii]"
                    self.pair.append(f"{target} = pack<{element}>(t_{name}[0], t_{name}[1]);")
                elif form == "bit":
                    k = f"2 * (b * {pairs} + ii) + e"
                    self.element.append(f"{'w_' if put else ''}{name}[({k}) / 32] |= static_cast<u32>({x}) << (({k}) % 32);")
                else:
                    target = f"w_{name}[2 * ii + e]" if put else f"{name}[2 * (b * {pairs} + ii) + e]"
                    self.element.append(f"{target} = {f'to_word({x})' if put else x};")
                if put and form != "bit":
                    self._put(name, put, pairs if form == "pair" else 2 * pairs)
            case Store(_, array):
                out = f"o{array}"
                self.before.append(f"{type_} {out}[2][{pairs}];")
                self.element.append(f"{out}[h][c] = {x};")
                self.after += self.body.arrays.store(array, out, self.loop.width, self.body.column0(action.value))
            case Fold(_, how, name, stream, scalar):
                target = name if scalar and stream else f"{name}[b * {pairs} + c]" if stream else f"{name}[h]"
                guards = [*([inside] if inside else []), *(["valid[h]"] if stream else [])]
                guard = f"if ({' && '.join(guards)}) " if guards else ""
                self.element.append(f"{guard}{target} = {how}::fold({target}, {type_}({x}));")
            case ToPanel(_, panel):
                self._to_panel(action.value, panel, x)
            case ToScratch(_, scratch, column):
                self.element.append(f"{scratch}.put(lane, h, {column} + {self._column()}, to_word({x}));")

    def _ready_pair(self, v: int) -> str | None:
        """The word of a pair of 16-bit values that lie in this form already, zeros beyond the columns included."""
        match self.body.value(v).place:
            case Registers(name, "pair"):
                self.body.used(v)
                return f"{name}[b * {self.loop.owned} + ii]"
            case InImage(name, "pair"):
                self.body.used(v)
                return f"{self._image_words(v, name, 'pair', 0)}[ii]"
            case InArray(array) if self.body.arrays.in_pairs(array):
                return f"{self._array(v, array, 0)}[ii & 1][ii >> 1]"
        return None

    def _move_pairs(self, action: Keep | ToPanel, pair: str) -> None:
        pairs = self.loop.owned
        if isinstance(action, ToPanel):
            self.before.append(f"u32 w_{action.panel}[{pairs}];")
            self.pair.append(f"w_{action.panel}[ii] = {pair};")
            self.after.append(f"{action.panel}.put(lane, b, w_{action.panel}, valid);")
        elif action.put:
            self.pair.append(f"w_{action.name}[ii] = {pair};")
            self._put(action.name, action.put, pairs)
        else:
            self.pair.append(f"{action.name}[b * {pairs} + ii] = {pair};")

    def _to_panel(self, v: int, panel: str, x: str) -> None:
        value, pairs = self.body.value(v), self.loop.owned
        inside = self._inside(value.n)
        x = f"{inside} ? {x} : 0.0f" if inside else x
        if tiles.is_half(value.dtype):
            self.before.append(f"u32 w_{panel}[{pairs}];")
            self.temporaries.append(f"t_{panel}")
            self.element.append(f"t_{panel}[e] = {x};")
            self.pair.append(f"w_{panel}[ii] = pack<{pointwise.ELEMENT[value.dtype]}>(t_{panel}[0], t_{panel}[1]);")
        else:
            self.before.append(f"float w_{panel}[{2 * pairs}];")
            self.element.append(f"w_{panel}[2 * ii + e] = {x};")
        self.after.append(f"{panel}.put(lane, b, w_{panel}, valid);")

    def _put(self, name: str, put: str, words: int) -> None:
        """Words of a block as whole vectors of an image."""
        vectors = -(-words // 4)
        self.before.append(f"u32 w_{name}[{words}];")
        self.after.append("KITSUNE_UNROLL")
        self.after.append(f"for (int i = 0; i < {vectors}; ++i) {put}(b * {vectors} + i, image_vector(w_{name}, i));")

    def _column(self) -> str:
        return f"first_column<{self.loop.width}>(lane, b) + c"

    def _inside(self, n: int) -> str:
        return f"({self._column()} < {n})" if n != self.loop.width else ""

    # -- reading

    def read(self, v: int, shift: int) -> str:
        """The C++ expression of an element of ``v``, whose block is b - shift."""
        key = (v, shift)
        if key not in self.names:
            self.names[key] = self._read(v, shift)
        return self.names[key]

    def _read(self, v: int, shift: int) -> str:
        value = self.body.value(v)
        type_ = pointwise.COMPUTE[value.dtype]
        block = f"(b - {shift})" if shift else "b"
        pairs = self.loop.owned
        match value.place:
            case Literal(constant):
                return pointwise.literal(constant, type_)
            case Splat(of):
                return self.read(of, 0)
            case Registers(name, "row"):
                return f"{name}[h]"
            case Registers(name, "bit"):
                self.body.used(v)
                return self._bit(name, block)
            case Registers(name, "word"):
                self.body.used(v)
                return f"{name}[2 * ({block} * {pairs} + ii) + e]"
            case Registers(name, _):
                self.body.used(v)
                return f"unpack<{pointwise.ELEMENT[value.dtype]}>({name}[{block} * {pairs} + ii], e)"
            case Multiply():
                if shift:
                    raise AssertionError("a matmul is read in place")
                name, first = self.body.products.chunk_at(v, self.first)
                self.body.budget.use((v, self.body.products.chunk_of(v, self.first)))
                return f"{name}[2 * ((b - {first}) * {pairs} + ii) + e]"
            case InArray(array):
                x = self._array(v, array, shift)
                if self.body.arrays.in_pairs(array):
                    return f"unpack<{pointwise.ELEMENT[value.dtype]}>({x}[h][ii >> 1], e)"
                return f"{x}[h][c]"
            case InVector(_, scalar):
                return self.body.scalar(v) if scalar else f"{self._vector(v, shift)}[c]"
            case InImage(name, "bit"):
                self.body.used(v)
                return self._bit(self._mask(v, name), block)
            case InImage(name, form):
                self.body.used(v)
                return self._image(v, name, form, shift)
            case InScratch(name, table, fill):
                where = self._load_vector(table, shift)
                index = self.body.fresh("t")
                self.element.append(f"const i32 {index} = static_cast<i32>(bits({where}[c]));")
                return f"({index} < 0 ? {fill} : from_word<{type_}>({name}.get(lane, h, {index})))"
            case Parts(parts):
                at = 0
                for part, first, blocks in parts:
                    if at <= self.first - shift < at + blocks:
                        return self.read(part, shift + at - first)
                    at += blocks
                raise AssertionError("a segment lies in one part")
            case Expression(instr):
                operands = [self.read(o, shift) for o in instr.inputs]
                types = [pointwise.COMPUTE[self.body.value(o).dtype] for o in instr.inputs]
                text = self.body.expression(instr, operands, types, type_, value.dtype)
                name = self.body.fresh("t")
                self.element.append(f"const {type_} {name} = {text};")
                return name
        raise CannotLower(f"a value in {type(value.place).__name__} has no elements")

    def _array(self, v: int, array: int, shift: int) -> str:
        """The name of a block's columns of both rows, brought in once."""
        key = (v, shift)
        if key not in self.loaded:
            name = self.loaded[key] = self.body.fresh("x")
            self.before += self.body.arrays.load(array, name, self.loop.width, shift, self.body.column0(v))
        return self.loaded[key]

    def _vector(self, v: int, shift: int) -> str:
        key = (v, shift)
        if key not in self.loaded:
            name = self.loaded[key] = self.body.fresh("x")
            self.before += self.body.vector(v, name, self.loop.width, shift)
        return self.loaded[key]

    def _load_vector(self, offset: int, shift: int) -> str:
        name, owned, block = self.body.fresh("x"), self.loop.owned, f"b - {shift}" if shift else "b"
        self.before.append(f"float {name}[{owned}];")
        self.before.append(
            f"load_vector<{owned}>({name}, {self.body.vector_at(offset)}, first_column<{self.loop.width}>(lane, {block}));"
        )
        return name

    def _bit(self, name: str, block: str) -> str:
        k = f"2 * ({block} * {self.loop.owned} + ii) + e"
        return f"(({name}[({k}) / 32] >> (({k}) % 32) & 1u) != 0)"

    def _mask(self, v: int, name: str) -> str:
        """Registers with all bits of a mask's image."""
        if v not in self.loop.masks:
            x, width = self.body.fresh("m"), self.body.value(v).width
            self.loop.masks[v] = x
            self.ahead.append(f"u32 {x}[{tiles.registers(width, 'bit')}];")
            self.ahead.append("KITSUNE_UNROLL")
            vectors = tiles.image_vectors(width, "bit")
            self.ahead.append(f"for (int i = 0; i < {vectors}; ++i) from_image_vector({x}, i, {name}(i));")
        return self.loop.masks[v]

    def _image(self, v: int, name: str, form: str, shift: int) -> str:
        value, x = self.body.value(v), self._image_words(v, name, form, shift)
        if form == "pair":
            return f"unpack<{pointwise.ELEMENT[value.dtype]}>({x}[ii], e)"
        return f"from_word<{pointwise.COMPUTE[value.dtype]}>({x}[2 * ii + e])"

    def _image_words(self, v: int, name: str, form: str, shift: int) -> str:
        """The name of a block's words, brought in once."""
        half = form == "pair"
        words = self.loop.owned if half else 2 * self.loop.owned
        vectors = -(-words // 4)
        key = (v, shift)
        if key not in self.loaded:
            x = self.loaded[key] = self.body.fresh("x")
            self.before.append(f"u32 {x}[{words}];")
            self.before.append("KITSUNE_UNROLL")
            at = f"(b - {shift})" if shift else "b"
            self.before.append(f"for (int i = 0; i < {vectors}; ++i) from_image_vector({x}, i, {name}({at} * {vectors} + i));")
        return self.loaded[key]
