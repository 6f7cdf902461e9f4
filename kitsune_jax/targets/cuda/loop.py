"""One loop over the blocks of a tile: evaluates pointwise expressions element by element and hands the results on.

Comes in: values of a stage and what is to be done with them (keep, store, push, fold). Goes out: C++ text. Everything that the loop
reads is brought in once per block; everything pending that is read again later is kept on the way. Invariant: columns beyond the
logical ones are zero in whatever is kept or handed on, because a later matmul multiplies them by zero and NaN would survive that.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kitsune_jax.targets.cuda import pointwise, tiles
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
    from kitsune_jax.targets.cuda.body import Body


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """The value gets registers ``name`` of ``form``, or, with ``put``, an image: the C++ call that takes (vector, U4).

    ``push``: a copy, or an entry of a queue: the value stays where it was. ``reads``: instructions of the tile program that this
    stands for.
    """

    value: int
    name: str
    form: str
    put: str = ""
    push: bool = False
    reads: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    value: int
    array: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """Fold along the columns into ``name[2]``, or (``stream``) along the rows: into ``name`` (``scalar``) or one per column."""

    value: int
    how: str
    name: str
    stream: bool = False
    scalar: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class ToScratch:
    """Words of the value to its columns of the warp's scratch rows, from ``column`` on."""

    value: int
    scratch: str
    column: int


@dataclasses.dataclass(frozen=True, slots=True)
class ToPanel:
    """The value to a panel in shared memory, the operand of a weight gradient; ``panel``: the C++ object's name."""

    value: int
    panel: str


Action = Keep | Store | Fold | ToScratch | ToPanel


class Loop:
    def __init__(self, body: Body, width: int, actions: Iterable[Action]):
        self.body, self.width = body, width
        self.actions = list(actions)
        self.owned = tiles.owned(width)
        self.masks: dict[int, str] = {}  # images of masks, which are brought in whole
        for action in self.actions:
            if body.value(action.value).width != width:
                raise AssertionError("a loop is over tiles of one width")

    def emit(self) -> None:
        self._place_operands()
        self._keep_on_the_way()
        self._declare()
        products = self._products()
        for first, last in self._segments(products):
            if products:
                self.body.products.advance(products, first)
            _Segment(self, first, last).emit()
            self._count_kept(first, last)
        self._put_bits()
        for action in self.actions:
            if isinstance(action, Keep) and not action.push:
                self.body.settle(action)

    def _count_kept(self, first: int, last: int) -> None:
        for action in self.actions:
            if isinstance(action, Keep) and not action.push:
                share = self.body.value(action.value).registers * (last - first) // tiles.blocks(self.width)
                self.body.budget.define(action.value, 0 if action.put else share)

    # -- what is pending below the roots

    def _place_operands(self) -> None:
        """Operands of the products below get their homes first, in loops of their own: this loop may read them as well."""
        for v in self._products():
            if isinstance(self.body.value(v).place, Multiply):  # an earlier one's operand may have brought it home
                self.body.products.prepare(v)

    def _keep_on_the_way(self) -> None:
        """Pending values at and below the roots that are read again later are kept by this loop, too."""
        roots = {self.body.root(a.value) for a in self.actions if isinstance(a, Keep) and not a.push}
        pending = self._pending_below()
        reads: Counter[int] = Counter()
        for action in self.actions:
            reads[self.body.root(action.value)] += action.reads if isinstance(action, Keep) else 1
        for v in pending:
            place = self.body.value(v).place
            if isinstance(place, Expression):
                reads.update(self.body.root(x) for x in place.instr.inputs)
        for v in pending:
            if v not in roots and self.body.read_again(v, reads[v]):
                self.actions.append(self.body.keep(v))

    def _pending_below(self) -> list[int]:
        found: dict[int, None] = {}

        def visit(v: int) -> None:
            v, value = self.body.root(v), self.body.value(v)
            if value.row or v in found:
                return
            match value.place:
                case Expression(instr):
                    for operand in instr.inputs:
                        visit(operand)
                    found[v] = None
                case Multiply():
                    found[v] = None
                case Parts(parts):
                    for part, first, blocks in parts:
                        if self.body.value(part).width == self.width and first == 0 and blocks == tiles.blocks(self.width):
                            visit(part)

        for action in self.actions:
            visit(action.value)
        return list(found)

    def _products(self) -> list[int]:
        return [v for v in self._pending_below() if isinstance(self.body.value(v).place, Multiply)]

    def _declare(self) -> None:
        for action in self.actions:
            if not isinstance(action, Keep):
                continue
            count = tiles.registers(self.width, action.form)
            if action.form == "bit":
                self.body.text(f"u32 {'w_' if action.put else ''}{action.name}[{count}] = {{}};")
            elif not action.put:
                type_ = "u32" if action.form == "pair" else pointwise.COMPUTE[self.body.value(action.value).dtype]
                self.body.text(f"{type_} {action.name}[{count}];")

    def _put_bits(self) -> None:
        """Masks as images: a vector holds the bits of several blocks, so it is complete only after the loop."""
        for action in self.actions:
            if isinstance(action, Keep) and action.form == "bit" and action.put:
                vectors = tiles.image_vectors(self.width, "bit")
                self.body.text("KITSUNE_UNROLL")
                self.body.text(f"for (int i = 0; i < {vectors}; ++i) {action.put}(i, image_vector(w_{action.name}, i));")

    def _segments(self, products: list[int]) -> list[tuple[int, int]]:
        """Runs of blocks within which every source lies in one place."""
        total = tiles.blocks(self.width)
        cuts = {0, total}
        for v in self._all_sources():
            match self.body.value(v).place:
                case Parts(parts):
                    at = 0
                    for _, _, blocks in parts:
                        at += blocks
                        cuts.add(at)
        if products:
            at = 0
            for columns in self.body.column_chunks(self.width):
                at += columns // tiles.block(self.width)
                cuts.add(at)
        ordered = sorted(cuts)
        return list(zip(ordered, ordered[1:], strict=False))

    def _all_sources(self) -> list[int]:
        found: dict[int, None] = {}

        def visit(v: int) -> None:
            if v in found:
                return
            found[v] = None
            match self.body.value(v).place:
                case Expression(instr):
                    for operand in instr.inputs:
                        visit(operand)

        for action in self.actions:
            visit(action.value)
        return list(found)


class _Segment:
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
                return f"{self._array(v, array, shift)}[h][c]"
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
