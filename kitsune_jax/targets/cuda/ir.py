"""The device IR: the work of the stages of a kernel as data, which passes transform, and the C++ that each node prints.

A stage is a tuple of nodes in the order in which the device runs them. This file has names, expressions and the loops over the
blocks of a tile; ``stage_ir.py`` has the other statements of a stage, ``frame_ir.py`` its setup and the nodes around the tiles.
Names are ``Ref``s, and numbers that may differ between equal stages are ``Constant``s, so that stages can be compared as data
(``layout.py``). A node decides nothing when it is printed; its only C++ text from elsewhere is the templates of operators, from
the op table.
"""

from __future__ import annotations

import dataclasses
import operator
import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, dataclass_transform

from kitsune_jax.targets.cuda import pointwise, tiles

Events = Iterator[tuple["Ref", int | None]]  # (owner, registers that it gets) or (owner, None) for a read


@dataclass_transform(frozen_default=True)
class Node:
    """A node of the device IR. Every subclass is a frozen dataclass of the fields that it declares.

    A node that is a statement has ``code``, its lines of C++ with fields in braces (``Spelling``), or its own method ``lines``.
    """

    code: ClassVar[Sequence[str] | None] = None
    stepped: ClassVar[tuple[str, ...]] = ()  # fields that may grow from one iteration of a ``ChunkLoop`` to the next

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """The names of the fields."""
        return cls.__match_args__  # type: ignore[attr-defined, no-any-return]

    def lines(self, at: Spelling) -> list[str]:
        """The C++ of a node that is a statement."""
        if self.code is None:
            raise AssertionError(f"{type(self).__name__} is no statement")
        return [at.vformat(line, (self,), {}) for line in self.code]

    @property
    def held(self) -> int:
        """Registers of a thread that the node has for the whole kernel."""
        return 0

    def events(self) -> Events:
        """The effects of the node on the registers of values, in the order in which the device runs."""
        yield from ()


class Declaration(Node):
    """A statement that declares ``ref``, for which a thread has ``registers`` while it is alive."""

    ref: Ref

    registers: ClassVar[int]

    def events(self) -> Events:
        yield self.ref, self.registers


def rebuild(x: Any, change: Callable[[Any], Any]) -> Any:
    """``x`` with ``change`` applied to every node in it, innermost first."""
    if not isinstance(x, _PARTS):
        return x
    old = x if isinstance(x, tuple) else vars(x).values()
    new = [rebuild(part, change) if isinstance(part, _PARTS) else part for part in old]
    same = all(map(operator.is_, new, old))
    if isinstance(x, tuple):
        return x if same else tuple(new)
    return change(x if same else type(x)(*new))


def within(x: Any) -> Iterator[Any]:
    """``x`` and all nodes in it."""
    if isinstance(x, Node):
        yield x
    work = [x]
    while work:
        part = work.pop()
        for inner in part if isinstance(part, tuple) else vars(part).values():
            if isinstance(inner, _PARTS):
                work.append(inner)
                if isinstance(inner, Node):
                    yield inner


_PARTS = (tuple, Node)  # that may hold nodes


def each_row(statement: str) -> list[str]:
    """The statement for each row h of the thread's two rows."""
    return ["KITSUNE_UNROLL", f"for (int h = 0; h < 2; ++h) {statement}"]


# --- Names ------------------------------------------------------------------------------------------------------------------------


class Ref(Node):
    """A named object of a stage. ``of``: the value, queue, sink or array of the tile program that it belongs to, or a counter."""

    kind: str
    of: int
    part: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}{self.of}{self.part}"

    @property
    def is_element(self) -> bool:
        """Is it an element of an array that is declared elsewhere?"""
        return self.part.startswith("[")

    @property
    def suffix(self) -> str:
        """What tells it apart from others of the same scope, for the names of objects that belong to it."""
        return f"_{self.part[1:-1]}" if self.is_element and self.part[1:-1].isdecimal() else self.part.partition("[")[0]


class Stepped(Node):
    """A number in the body of a ``ChunkLoop``: ``first`` in the first iteration, then ``step`` more in each."""

    first: int
    step: int

    def __str__(self) -> str:
        if self.step == -1:
            return f"{self.first} - chunk"
        chunk = "chunk" if self.step == 1 else f"{self.step} * chunk"
        return f"{chunk} + {self.first}" if self.first else chunk


Index = int | Stepped


class Constant(Node):
    """A number, or a member of struct ``of``, that may differ between equal stages. Constants with the same ``name`` and ``key``
    are the same. ``declaration``: as a member of a struct, with {} for its name."""

    name: str
    key: Hashable
    value: str
    declaration: str
    of: str = ""

    @property
    def initializer(self) -> str:
        return f"&{self.of}::{self.value}" if self.of else self.value


def number(name: str, key: Hashable, value: int, type_: str = "u32") -> Constant:
    return Constant(name, key, str(value), f"{type_} {{}}")


def parameter(role: str, k: int) -> Constant:
    """A pointer to rows: input ("in"), table ("table") or output ("out") ``k`` of the kernel's parameters; or the tensor map
    ("map") of an input."""
    type_ = "void*" if role == "out" else "const void*"
    return Constant(role, k, f"{role}{k}", f"{type_} Params::*{{}}", "Params")


def ring(queue: int, depth: int) -> Constant:
    """The barriers of the lanes' rings of a queue, which are in the header."""
    return Constant("ring", queue, f"queue{queue}", f"Ring<{depth}> (Header::*{{}})[kLanes]", "Header")


class StationaryVector(Node):
    """A word of a stage's stationary vectors: ``offset`` words into group ``group`` of them. The layout replaces it by a
    Constant."""

    group: int
    offset: int


class Address(Node):
    """The start of a stationary vector. ``slab``, ``layer``: words from the part of one slab, or layer, to that of the next."""

    at: StationaryVector | Constant
    slab: int = 0
    layer: int = 0


# Kinds of names that a stage's code has most of, as words.
_WORDS = dict(v="tile", r="row", d="acc", c="copy", h="carry", k="column", s="scalar", x="block", m="mask", number="step")
_TYPES = {"type": pointwise.COMPUTE, "element": pointwise.ELEMENT, "operand": pointwise.OPERAND}


class Spelling(string.Formatter):
    """How nodes spell names and constants. ``fields``: constants, by name and key, that are read from a table; others are literals.
    ``operators``: of values, which are named after the operator that makes them.

    In a node's ``code``, ``{x}`` is its attribute x. ``{dtype:type}`` is the C++ type in which a dtype is computed,
    ``{dtype:element}`` that of an element in memory, ``{dtype:operand}`` that of a product's operand; ``{x:0}`` and ``{x:rows}``
    are a row value for row 0 and for both rows; ``{x:yes|no}`` is "yes" if x is true or given, else "no".
    """

    def __init__(self, fields: frozenset[tuple[str, object]] = frozenset(), operators: Mapping[int, str] | None = None):
        self.fields, self.operators = fields, operators or {}

    def name(self, ref: Ref) -> str:
        if ref.kind not in _WORDS:
            return ref.name
        word = self.operators.get(ref.of, _WORDS[ref.kind]) if ref.kind in "vr" else _WORDS[ref.kind]
        return f"{word}_{ref.of}{ref.part}"

    def vectors(self, image: Ref, access: str) -> str:
        """The C++ function that accesses ("get", "put") vector i of an image or of a queue's entry."""
        return f"{image.name}.{access}" if image.kind == "image" else image.name

    def constant(self, c: Constant) -> str:
        text = f"at.{c.name}{c.key}" if (c.name, c.key) in self.fields else c.value
        if not c.of:
            return text
        member = f"*{text}" if text is not c.value else text
        return f"p.{member}" if c.of == "Params" else f"(header.{member})"

    def address(self, a: Address) -> str:
        assert isinstance(a.at, Constant)
        slab = f" + slab * {a.slab}" if a.slab else ""
        layer = f" + layer * {a.layer}" if a.layer else ""
        return f"vectors + {self.constant(a.at)}{slab}{layer}"

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in _TYPES:
            return _TYPES[format_spec][value]
        if "|" in format_spec:
            return format_spec.split("|")[not value]
        match value:
            case Ref():
                return self.name(value)
            case Constant():
                return self.constant(value)
            case Address():
                return self.address(value)
            case Rows():
                return value.name(self)
            case Expr() if format_spec:
                return ", ".join(value.of_row(self, h) for h in (range(2) if format_spec == "rows" else [int(format_spec)]))
            case Expr():
                return value.text(self)
        return str(value)

    def lines(self, nodes: Iterable[Node]) -> list[str]:
        return [line for node in nodes for line in node.lines(self)]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def flag(x: bool) -> str:
    return "true" if x else "false"


def _block(shift: Index) -> str:
    if isinstance(shift, Stepped):
        return f"(b - ({shift}))" if shift.first else f"(b - {shift})"
    return f"(b {'-' if shift > 0 else '+'} {abs(shift)})" if shift else "b"


# --- Expressions ------------------------------------------------------------------------------------------------------------------


class Expr(Node):
    """A value for an element (row h, column c of block b) or for a row (h)."""

    def text(self, at: Spelling, pairs: int = 0) -> str:
        """The C++ expression. ``pairs``: pairs of elements of a thread in a block of the loop around it."""
        raise NotImplementedError

    def of_row(self, at: Spelling, h: int) -> str:
        """The expression of a row value for row ``h`` of the thread's two rows."""
        return self.text(at).replace("[h]", f"[{h}]")


class Literal(Expr):
    value: str

    def text(self, at: Spelling, pairs: int = 0) -> str:
        return self.value


# The text that reads an element (h, c = 2 * (ii >> 1) + e of block b) of an object, by the form of the object.
READS = {
    "scalar": "{name}",
    "row": "{name}[h]",
    "first column": "shfl({name}[2 * h], lane_id() & ~3u)",
    "word": "{name}[2 * ({block} * {pairs} + ii) + e]",
    "pair": "unpack<{element}>({name}[{block} * {pairs} + ii], e)",
    "bit": "(({name}[({bit}) / 32] >> (({bit}) % 32) & 1u) != 0)",
    "rows": "{name}[h][c]",
    "pairs of rows": "unpack<{element}>({name}[h][ii >> 1], e)",
    "vector": "{name}[c]",
    "index": "static_cast<i32>(bits({name}[c]))",
    "word of image": "from_word<{type}>({name}[2 * ii + e])",
    "pair of image": "unpack<{element}>({name}[ii], e)",
    # both elements of a pair as one word
    "pair of registers": "{name}[b * {pairs} + ii]",
    "pair of block": "{name}[ii]",
    "pair of rows": "{name}[ii & 1][ii >> 1]",
}


class Read(Expr):
    """``form``: of the object read (``READS``); ``shift``: block of the loop minus block of the object."""

    form: str
    ref: Ref
    dtype: str
    shift: Index = 0

    stepped = ("shift",)

    def text(self, at: Spelling, pairs: int = 0) -> str:
        block, types = _block(self.shift), {"element": pointwise.ELEMENT[self.dtype], "type": pointwise.COMPUTE[self.dtype]}
        bit = f"2 * ({block} * {pairs} + ii) + e"
        return READS[self.form].format(name=at.name(self.ref), block=block, pairs=pairs, bit=bit, **types)


class ScratchFold(Node):
    """A fold by ``how`` of ``count`` columns that are ``step`` apart."""

    how: str
    count: int
    step: int


class ScratchList(Node):
    """Lists of columns to be added up: a vector of them, one list after the other."""

    columns: Address


class SumOfList(Expr):
    """The sum of those columns of the warp's scratch rows that a list in ``columns`` names. The vector ``first`` gives the starts
    of the lists, one for each column of the element. ``width``: of the loop's tiles, 0 for column 0 of a row."""

    dtype: str
    first: Address
    columns: Address
    width: int
    shift: int = 0

    def text(self, at: Spelling, pairs: int = 0) -> str:
        which = f"first_column<{self.width}>(lane, {_block(self.shift)}) + c" if self.width else "0"
        lists = f"{at.address(self.first)}, {at.address(self.columns)}"
        return f"sum_listed<{pointwise.COMPUTE[self.dtype]}>(rows, lane, h, {lists}, {which})"


class FromScratch(Expr):
    """An element of the warp's scratch rows, in ``column`` or in the column that ``index`` holds, where -1 means ``fill``; or the
    ``fold`` of that column and others."""

    dtype: str
    column: int = -1
    index: Ref | None = None
    fill: Expr | None = None
    fold: ScratchFold | None = None

    def text(self, at: Spelling, pairs: int = 0) -> str:
        where, type_ = self.column if self.index is None else at.name(self.index), pointwise.COMPUTE[self.dtype]
        if self.fold is not None:
            return f"fold_scratch<{self.fold.how}, {type_}, {self.fold.count}, {self.fold.step}>(rows, lane, h, {where})"
        element = f"from_word<{type_}>(rows.get(lane, h, {where}))"
        return element if self.fill is None else f"({where} < 0 ? {self.fill.text(at)} : {element})"


class RowIndex(Expr):
    """The mixed-radix index over stream axes (axis, extent), outermost first."""

    axes: tuple[tuple[int, int], ...]

    def text(self, at: Spelling, pairs: int = 0) -> str:
        index = ""
        for axis, extent in self.axes:
            index = f"({index} * {extent}ll + axis{axis}[h])" if index else f"axis{axis}[h]"
        return f"static_cast<i32>({index or 0})"


class Identity(Expr):
    how: str
    dtype: str

    def text(self, at: Spelling, pairs: int = 0) -> str:
        return f"{self.how}::identity<{pointwise.COMPUTE[self.dtype]}>()"


class Apply(Expr):
    """An operator: ``template`` is C++ with {0}, {1}, ... for the operands."""

    template: str
    operands: tuple[Expr, ...]

    def text(self, at: Spelling, pairs: int = 0) -> str:
        template = self.template
        for k, operand in enumerate(self.operands):
            template = template.replace(f"{{{k}}}", operand.text(at, pairs))
        return template


def segment_word(at: Spelling, runs: Ref, how: str, dtype: str, x: str) -> str:
    """The word that a row adds to its segment: the fold's identity if it belongs to none."""
    identity, type_ = Identity(how, dtype).text(at), pointwise.COMPUTE[dtype]
    return f"to_word({at.name(runs)}.inside[h] ? {type_}({x}) : {identity})"


# --- Rows of arrays ---------------------------------------------------------------------------------------------------------------


class Rows(Node):
    """A thread's access to its columns of an array's rows. ``columns``: logical columns of a row; ``access``: bytes of an access,
    or "kStaged"; ``strides``: of columns that are not contiguous, (extent, element stride) of the row's dimensions, innermost
    first; ``pairs``: loads return 16-bit values in pairs."""

    ref: Ref
    dtype: str
    columns: int
    access: str
    strides: tuple[tuple[int, int], ...]
    pairs: bool

    def name(self, at: Spelling) -> str:
        """The C++ array of the addresses of the thread's two rows."""
        return f"{at.name(self.ref)}_row"

    def load(self, at: Spelling, to: Ref, owned: int, column: str) -> str:
        where = f"{at.name(to)}[h], {self.name(at)}[h], {column}, {self.columns}, valid[h]"
        return f"load_halves<{owned}, {self.access}>({where});" if self.pairs else self._access("load", owned, where)

    def store(self, at: Spelling, owned: int, column: str, out: str) -> str:
        return self._access("store", owned, f"{self.name(at)}[h], {column}, {self.columns}, valid[h], {out}[h]")

    def _access(self, verb: str, owned: int, where: str) -> str:
        element = pointwise.ELEMENT[self.dtype]
        if not self.strides:
            return f"{verb}_row<{element}, {owned}, {self.access}>({where});"
        # A lambda from a logical column to its element offset.
        terms, inner = [], 1
        for extent, stride in self.strides:
            terms.append(f"static_cast<i64>(column / {inner} % {extent}) * {stride}")
            inner *= extent
        return f"{verb}_strided<{element}, {owned}>({where}, [](int column) {{ return {' + '.join(terms)}; }});"


class Slab(Node):
    """The ``columns`` of a value that one CTA has: a part of each of ``groups`` groups of columns (``stage/split.py``)."""

    columns: int
    groups: int

    def column_offset(self, rows: Rows, block: str) -> str:
        """The offset of block ``block`` of the slab in the columns of ``rows``, to be added to that in the slab. Each CTA's part
        follows that of the CTA before."""
        each, blocks = self.columns // self.groups, tiles.blocks(self.columns) // self.groups
        apart = "" if self.groups == 1 else f"{block} / {blocks} * {rows.columns // self.groups - each} + "
        return f"static_cast<int>(slab) * {each} + {apart}"


class AxisIndices(Node):
    """The index along each stream axis of the thread's two rows: the mixed-radix digits of the row, the last axis fastest."""

    extents: tuple[int, ...]

    def lines(self, at: Spelling) -> list[str]:
        if len(self.extents) == 1:
            return ["const i64 axis0[2] = {row[0], row[1]};"]
        found, inner = [], 1
        for a, extent in reversed(list(enumerate(self.extents))):
            digits = ", ".join(f"row[{h}] / {inner}ll % {extent}ll" for h in range(2))
            found.append(f"const i64 axis{a}[2] = {{{digits}}};")
            inner *= extent
        return found


class RowAddresses(Node):
    """The addresses of the thread's rows. ``strides``: (axis, bytes). ``staged``: the rows are in shared memory."""

    ref: Ref
    array: Constant
    strides: tuple[tuple[int, int], ...]
    staged: bool

    def lines(self, at: Spelling) -> list[str]:
        row, staged = f"{at.name(self.ref)}_row", f"staged{self.ref.of}"
        if self.staged:
            return [f"const u8* const {row}[2] = {{{staged}.row(n, lane.row), {staged}.row(n, lane.row + 8)}};"]
        const = "const " if self.ref.kind == "in" else ""
        array = f"static_cast<{const}u8*>({at.constant(self.array)})"
        offsets = [" + ".join(f"axis{axis}[{h}] * {stride}ll" for axis, stride in self.strides) or "0" for h in (0, 1)]
        starts = ", ".join(f"{array} + (valid[{h}] ? {offset} : 0)" for h, offset in enumerate(offsets))
        return [f"{const}void* const {row}[2] = {{{starts}}};"]


class TableRows(Declaration):
    """The addresses of the rows ``index`` of ``table``, which has ``rows`` rows of ``bytes`` bytes. An index out of range means the
    nearest row, or the one at ``otherwise``."""

    table: Ref | Constant  # the layout replaces a stationary value by a Constant
    index: Expr
    rows: int
    bytes: int
    otherwise: Address | None

    registers = 4  # two addresses
    code = (
        "const void* const {ref}_row[2] = {{table_row({table}, {index:0}, {rows}ll, {bytes}ll{otherwise:, {otherwise}|}), "
        "table_row({table}, {index:1}, {rows}ll, {bytes}ll{otherwise:, {otherwise}|})}};",
    )


class SliceRows(Node):
    """The addresses of the rows of a slice: those of ``whole``, plus for each number of a loop a multiple of so many bytes."""

    ref: Ref
    whole: Ref
    terms: tuple[tuple[Expr, int], ...]
    loads: bool

    def lines(self, at: Spelling) -> list[str]:
        row, const = f"{at.name(self.ref)}_row", "const " if self.loads else ""
        behind = [f"static_cast<i64>({n.text(at)}) * {size}ll" for n, size in self.terms]
        starts = [" + ".join([f"static_cast<{const}u8*>({at.name(self.whole)}_row[{h}])", *behind]) for h in (0, 1)]
        return [f"{const}void* const {row}[2] = {{{', '.join(starts)}}};"]


# --- Registers and images of tiles ------------------------------------------------------------------------------------------------


class Registers(Node):
    """Declare ``count`` registers of a value; those of a mask start as zeros."""

    ref: Ref
    form: str
    dtype: str
    count: int
    words: bool = False  # to be written to an image

    def lines(self, at: Spelling) -> list[str]:
        type_ = pointwise.COMPUTE[self.dtype] if self.form == "word" else "u32"
        start = " = {}" if self.form == "bit" else ""
        return [f"{type_} {'w_' if self.words else ''}{at.name(self.ref)}[{self.count}]{start};"]


class PutMask(Node):
    """Write all vectors of a mask to an image or an entry after the loop, because a vector has the bits of several blocks."""

    ref: Ref
    to: Ref
    width: int

    def lines(self, at: Spelling) -> list[str]:
        put = f"{at.vectors(self.to, 'put')}(i, image_vector(w_{at.name(self.ref)}, i));"
        return ["KITSUNE_UNROLL", f"for (int i = 0; i < {tiles.image_vectors(self.width, 'bit')}; ++i) {put}"]


class Image(Node):
    """The image of the value ``ref.of``; ``at``: offset in the lane's scratch memory, set by the layout."""

    ref: Ref
    at: int = -1

    code = ("const Image {ref} = Image::at(scratch + {at});",)


class TurnImages(Node):
    """Two images that alternate: ``first`` is the operand of the even layers."""

    first: Ref
    second: Ref

    code = ("const Image {first}_in = layer & 1 ? {second} : {first}, {first}_out = layer & 1 ? {first} : {second};",)


class CopyRegisters(Node):
    to: Ref
    source: Ref
    count: int

    code = ("KITSUNE_UNROLL", "for (int i = 0; i < {count}; ++i) {to}[i] = {source}[i];")


class Alive(Node):
    """No code: ``registers`` more are alive from here to the last use of ``owner``; None: ``owner`` is used here."""

    owner: Ref
    registers: int | None = None

    code = ()

    def events(self) -> Events:
        yield self.owner, self.registers


# --- Loops over the blocks of a tile: actions on values, before ``stage/chunks.py`` -----------------------------------------------


class Action(Node):
    """An action on each element of ``value``."""

    value: int

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        """Add the C++ for an element ``x`` of the block to ``loop``."""
        raise NotImplementedError


class Keep(Action):
    """Keep the value in registers ``ref`` of ``form``, or write its vectors to the image or queue entry ``to``.

    ``push``: a copy, or a queue's entry, so the value also stays where it was. ``reads``: instructions of the tile program that
    this replaces. ``first``: the first block of the registers. ``over``: the registers belonged to a value that is no longer read.
    """

    ref: Ref
    form: str
    to: Ref | None = None
    push: bool = False
    reads: int = 0
    first: int = 0
    over: bool = False

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        ref, pairs, to, block = loop.at.name(self.ref), loop.pairs, self.to, _block(self.first)
        own = f"{ref}_{-self.first}" if self.first < 0 else ref  # one loop makes several parts of ``ref``
        if inside := put.inside(loop):
            x = f"{inside} ? {x} : {pointwise.literal(0, put.type)}"
        if self.form == "bit":
            k = f"2 * (b * {pairs} + ii) + e"
            loop.element.append(f"{'w_' if to else ''}{ref}[({k}) / 32] |= static_cast<u32>({x}) << (({k}) % 32);")
            return
        if self.form == "pair":
            loop.pack(own, f"w_{own}[ii]" if to else f"{ref}[{block} * {pairs} + ii]", put, x)
        elif to:
            loop.element.append(f"w_{own}[2 * ii + e] = to_word({x});")
        else:
            loop.element.append(f"{ref}[2 * ({block} * {pairs} + ii) + e] = {x};")
        if to:
            words = pairs if self.form == "pair" else 2 * pairs
            vectors = -(-words // 4)
            loop.before.append(f"u32 w_{own}[{words}];")
            put_vector = f"{loop.at.vectors(to, 'put')}({block} * {vectors} + i, image_vector(w_{own}, i));"
            loop.after += ["KITSUNE_UNROLL", f"for (int i = 0; i < {vectors}; ++i) {put_vector}"]


class Store(Action):
    rows: Rows
    slab: Slab | None = None

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        out, first = f"o{self.rows.ref.of}", self.slab.column_offset(self.rows, "b") if self.slab else ""
        loop.before.append(f"{put.type} {out}[2][{loop.pairs}];")
        loop.element.append(f"{out}[h][c] = {x};")
        loop.after += each_row(self.rows.store(loop.at, loop.pairs, f"{first}{loop.first_column()}", out))


class Fold(Action):
    """Fold the columns of a row into ``ref[2]``; or with ``stream`` the rows, into ``ref`` (``scalar``) or into one per column.
    ``start``: of columns that are spread over the threads of a warp."""

    how: str
    ref: Ref
    stream: bool = False
    scalar: bool = True
    start: Identity | None = None

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        to = loop.at.name(self.ref)
        if self.start is not None:
            start, own = self.start.text(loop.at), f"{to}_own"
            loop.before.append(f"{pointwise.COMPUTE[self.start.dtype]} {own}[8] = {{{', '.join([start] * 8)}}};")
            loop.after.append(f"{to}[b] = {self.how}::fold({to}[b], fold_rows<{self.how}>({own}));")
            to = f"{own}[c]"
        elif not (self.scalar and self.stream):
            to += f"[{f'b * {loop.pairs} + c' if self.stream else 'h'}]"
        guards = " && ".join(filter(None, [put.inside(loop), "valid[h]" if self.stream else ""]))
        loop.element.append(f"{f'if ({guards}) ' if guards else ''}{to} = {self.how}::fold({to}, {put.type}({x}));")


class ToScratch(Action):
    """Write words of the value to the warp's scratch rows, from ``column`` on."""

    column: int

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        loop.element.append(f"rows.put(lane, h, {self.column} + {loop.first_column()} + c, to_word({x}));")


class ToSegments(Action):
    """Pass the value, a block at a time, through the warp's scratch rows into the rows of ``ref``'s result. ``runs``: of a sum that
    shares those of others."""

    ref: Ref
    how: str
    dtype: str
    runs: Ref | None = None

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        runs = self.runs or Ref("runs", self.ref.of)
        # Columns beyond the value's are folded too, but not stored.
        loop.put_block(segment_word(loop.at, runs, self.how, self.dtype, x))
        loop.after.append(f"{loop.at.name(self.ref)}.block(rows, {loop.at.name(runs)}, b);")


class AddToRows(Action):
    """Add atomically to the rows of a result of ``columns`` floats, at the addresses ``ref``, ``access`` bytes at a time."""

    ref: Ref
    columns: int
    access: int

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        part = f"{loop.at.name(self.ref)}_part"
        loop.before.append(f"float {part}[2][{loop.pairs}];")
        loop.element.append(f"{part}[h][c] = {x};")
        where = f"{loop.at.name(self.ref)}[h], {loop.first_column()}, {self.columns}, {part}[h]"
        loop.after += each_row(f"add_to_row<{loop.pairs}, {self.access}>({where});")


class FoldToRows(Action):
    """Pass the value, a block at a time, through the warp's scratch rows, and fold it atomically into the rows of ``ref``."""

    ref: Ref

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        loop.put_block(f"to_word({x})")
        loop.after.append(f"{loop.at.name(self.ref)}.block(rows, b);")


class ToPanel(Action):
    """Write the value to a panel in shared memory, the operand of a weight gradient."""

    panel: Ref

    def put(self, loop: LoopText, put: Put, x: str) -> None:
        panel, half = loop.at.name(self.panel), tiles.is_half(put.dtype)
        if inside := put.inside(loop):
            x = f"{inside} ? {x} : 0.0f"
        loop.before.append(f"{'u32' if half else 'float'} w_{panel}[{loop.pairs if half else 2 * loop.pairs}];")
        if half:
            loop.pack(panel, f"w_{panel}[ii]", put, x)
        else:
            loop.element.append(f"w_{panel}[2 * ii + e] = {x};")
        loop.after.append(f"{panel}.put(lane, b, w_{panel}, valid);")


# --- Loops over the blocks of a tile: steps on elements, after ``stage/chunks.py`` ------------------------------------------------


class LoopText:
    """The C++ of a loop over blocks of tiles of ``width`` columns, which its steps add to. ``pairs``: pairs of elements of a thread
    in a block."""

    def __init__(self, at: Spelling, width: int):
        self.at, self.width, self.pairs = at, width, tiles.owned(width)
        self.preamble: list[str] = []  # before the loop
        self.before: list[str] = []  # once per block
        self.element: list[str] = []
        self.temporaries: list[str] = []  # variables of both elements of a pair
        self.pair: list[str] = []  # after both elements of a pair
        self.after: list[str] = []  # once per block

    def lines(self, first: Index, count: int) -> list[str]:
        last = Stepped(first.first + count, first.step) if isinstance(first, Stepped) else first + count
        lines = [*self.preamble, "KITSUNE_UNROLL", f"for (int b = {first}; b < {last}; ++b) {{"]
        lines += indented(self.before)
        lines += ["  KITSUNE_UNROLL", f"  for (int ii = 0; ii < {self.pairs}; ++ii) {{"]
        if self.element:
            lines += ["    const int h = ii & 1;", *(f"    float {t}[2];" for t in self.temporaries)]
            lines += ["    KITSUNE_UNROLL", "    for (int e = 0; e < 2; ++e) {", "      const int c = 2 * (ii >> 1) + e;"]
            lines += [*(f"      {line}" for line in self.element), "    }"]
        lines += [*(f"    {line}" for line in self.pair), "  }"]
        return [*lines, *indented(self.after), "}"]

    def first_column(self, shift: int = 0) -> str:
        return f"first_column<{self.width}>(lane, {f'b - {shift}' if shift else 'b'})"

    def put_block(self, word: str) -> None:
        """Write the words of a block to the warp's scratch rows."""
        self.element.append(f"rows.put(lane, h, static_cast<int>(lane.q) * {self.pairs} + c, {word});")

    def pack(self, ref: str, word: str, put: Put, x: str) -> None:
        """Pack both elements of a pair into ``word``."""
        if put.pair:
            self.pair.append(f"{word} = {x};")
            return
        self.temporaries.append(f"t_{ref}")
        self.element.append(f"t_{ref}[e] = {x};")
        self.pair.append(f"{word} = pack<{pointwise.ELEMENT[put.dtype]}>(t_{ref}[0], t_{ref}[1]);")


class BlockStep(Node):
    """A step for a block, or for an element of it."""

    def add_to(self, loop: LoopText) -> None:
        raise NotImplementedError


class MaskWords(BlockStep):
    """Before the loop: load all words of a mask's image."""

    ref: Ref
    image: Ref
    width: int

    def add_to(self, loop: LoopText) -> None:
        ref, vectors = loop.at.name(self.ref), tiles.image_vectors(self.width, "bit")
        load = f"from_image_vector({ref}, i, {loop.at.vectors(self.image, 'get')}(i));"
        loop.preamble += [f"u32 {ref}[{tiles.registers(self.width, 'bit')}];", "KITSUNE_UNROLL"]
        loop.preamble.append(f"for (int i = 0; i < {vectors}; ++i) {load}")


class ArrayBlock(BlockStep):
    """Once per block: load a thread's columns of both rows."""

    ref: Ref
    rows: Rows
    shift: int
    slab: Slab | None = None

    def add_to(self, loop: LoopText) -> None:
        rows, owned = self.rows, loop.pairs
        type_, count = ("u32", owned // 2) if rows.pairs else (pointwise.COMPUTE[rows.dtype], owned)
        first = self.slab.column_offset(rows, _block(self.shift)) if self.slab else ""
        loop.before.append(f"{type_} {loop.at.name(self.ref)}[2][{count}];")
        loop.before += each_row(rows.load(loop.at, self.ref, owned, f"{first}{loop.first_column(self.shift)}"))


class KeptRows(Node):
    """Registers ``ref`` with ``count`` blocks, from ``first`` on, of ``rows`` of 16-bit elements; ``width``: of a tile of them."""

    ref: Ref
    rows: Rows
    width: int
    first: int
    count: int

    def lines(self, at: Spelling) -> list[str]:
        kept, row = at.name(self.ref), self.rows.name(at)
        where = f"{kept}[b][h], {row}[h], first_column<{self.width}>(lane, {self.first} + b), {self.rows.columns}, valid[h]"
        load = [*each_row(f"load_halves<8, {self.rows.access}>({where});")]
        head = ["KITSUNE_UNROLL", f"for (int b = 0; b < {self.count}; ++b) {{"]
        return [f"u32 {kept}[{self.count}][2][4];", *head, *indented(load), "}"]

    @property
    def registers(self) -> int:
        return 8 * self.count


class KeptBlock(BlockStep):
    """Once per block: the columns of both rows in ``kept``, whose first block is ``first``."""

    ref: Ref
    kept: Ref
    first: int
    shift: int

    def add_to(self, loop: LoopText) -> None:
        index = _block(self.shift + self.first)
        loop.before.append(f"const u32 (&{loop.at.name(self.ref)})[2][4] = {loop.at.name(self.kept)}[{index}];")


class VectorBlock(BlockStep):
    ref: Ref
    address: Address
    dtype: str
    shift: int

    def add_to(self, loop: LoopText) -> None:
        x, owned, type_ = loop.at.name(self.ref), loop.pairs, pointwise.COMPUTE[self.dtype]
        raw, where = x if type_ == "float" else f"{x}_bits", loop.at.address(self.address)
        loop.before += [f"float {raw}[{owned}];", f"load_vector<{owned}>({raw}, {where}, {loop.first_column(self.shift)});"]
        if type_ != "float":
            fill = f"for (int i = 0; i < {owned}; ++i) {x}[i] = from_word<{type_}>(bits({raw}[i]));"
            loop.before += [f"{type_} {x}[{owned}];", fill]


class ImageBlock(BlockStep):
    ref: Ref
    image: Ref
    form: str
    shift: int

    def add_to(self, loop: LoopText) -> None:
        words = loop.pairs if self.form == "pair" else 2 * loop.pairs
        vectors = -(-words // 4)
        loop.before += [f"u32 {loop.at.name(self.ref)}[{words}];", "KITSUNE_UNROLL"]
        vector = f"{loop.at.vectors(self.image, 'get')}({_block(self.shift)} * {vectors} + i)"
        loop.before.append(f"for (int i = 0; i < {vectors}; ++i) from_image_vector({loop.at.name(self.ref)}, i, {vector});")


class Let(BlockStep):
    """Per element: ``ref`` is the value of ``expr``."""

    ref: Ref
    dtype: str
    expr: Expr

    def add_to(self, loop: LoopText) -> None:
        text = self.expr.text(loop.at, loop.pairs)
        loop.element.append(f"const {pointwise.COMPUTE[self.dtype]} {loop.at.name(self.ref)} = {text};")


class Put(BlockStep):
    """Per element: pass ``x`` to ``action``; with ``pair``, x is a packed pair of elements. ``columns``: if fewer than the loop's,
    the elements beyond are zero, or are not folded."""

    action: Action
    x: Expr
    dtype: str
    columns: int
    pair: bool = False

    @property
    def type(self) -> str:
        return pointwise.COMPUTE[self.dtype]

    def inside(self, loop: LoopText) -> str:
        """The condition that the element is within the columns; "" where all are."""
        return f"{loop.first_column()} + c < {self.columns}" if self.columns != loop.width and not self.pair else ""

    def add_to(self, loop: LoopText) -> None:
        self.action.put(loop, self, self.x.text(loop.at, loop.pairs))


class BlockLoop(Node):
    """A loop over ``count`` blocks, from block ``first`` on, of tiles of ``width`` columns. ``reads``: objects whose registers and
    images it reads."""

    width: int
    first: Index
    count: int
    steps: tuple[BlockStep, ...]
    reads: tuple[Ref, ...]

    stepped = ("first",)

    def lines(self, at: Spelling) -> list[str]:
        loop = LoopText(at, self.width)
        for step in self.steps:
            step.add_to(loop)
        return loop.lines(self.first, self.count)

    def events(self) -> Events:
        yield from ((owner, None) for owner in self.reads)
