"""Printing the nodes of the device IR as C++: what a lane does with a tile.

Comes in: nodes of ``ir.py``. Goes out: lines of C++. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable

from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda.ir import Address, BlockLoop, Constant, Expr, Keep, Node, Ref

# --- Loops over the blocks of a tile ----------------------------------------------------------------------------------------------

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


def name(ref: Ref) -> str:
    return f"{ref.kind}{ref.of}{ref.part}"


def each_row(statement: str) -> list[str]:
    return ["KITSUNE_UNROLL", f"for (int h = 0; h < 2; ++h) {statement}"]


class Spelling:
    """Text of expressions. ``fields``: constants, by name and key, that are read from a table; others are literals."""

    def __init__(self, fields: frozenset[tuple[str, object]] = frozenset()):
        self.fields = fields

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

    def expression(self, x: Expr, pairs: int = 0) -> str:
        match x:
            case ir.Literal(text):
                return text
            case ir.Read(form, ref, dtype, shift):
                block = _block(shift)
                return READS[form].format(
                    name=name(ref),
                    block=block,
                    pairs=pairs,
                    bit=f"2 * ({block} * {pairs} + ii) + e",
                    element=pointwise.ELEMENT[dtype],
                    type=pointwise.COMPUTE[dtype],
                )
            case ir.FromScratch(dtype, column, index, fill, fold):
                where = column if index is None else name(index)
                if fold is not None:
                    template = f"{fold.how}, {pointwise.COMPUTE[dtype]}, {fold.count}, {fold.step}"
                    return f"fold_scratch<{template}>(rows, lane, h, {where})"
                element = f"from_word<{pointwise.COMPUTE[dtype]}>(rows.get(lane, h, {where}))"
                return element if fill is None else f"({where} < 0 ? {self.expression(fill)} : {element})"
            case ir.SumOfList(dtype, first, listed, width, shift):
                lists = f"{self.address(first)}, {self.address(listed)}"
                which = f"first_column<{width}>(lane, {_block(shift)}) + c" if width else "0"
                return f"sum_listed<{pointwise.COMPUTE[dtype]}>(rows, lane, h, {lists}, {which})"
            case ir.RowIndex(axes):
                text = "0"
                for axis, extent in axes:
                    text = f"({text} * {extent}ll + axis{axis}[h])"
                return f"static_cast<i32>({text})"
            case ir.Identity(how, dtype):
                return f"{how}::identity<{pointwise.COMPUTE[dtype]}>()"
            case ir.Apply(template, operands):
                for k, operand in enumerate(operands):
                    template = template.replace(f"{{{k}}}", self.expression(operand, pairs))
                return template
        raise AssertionError(f"{x} is no expression")

    def of_row(self, x: Expr, h: int) -> str:
        """The expression of a row value for row ``h`` of the thread's two rows."""
        return self.expression(x).replace("[h]", f"[{h}]")

    def segment_word(self, runs: Ref, how: str, dtype: str, x: str) -> str:
        """The word that a row adds to its segment: the fold's identity if it belongs to none."""
        type_ = pointwise.COMPUTE[dtype]
        return f"to_word({name(runs)}.inside[h] ? {type_}({x}) : {self.expression(ir.Identity(how, dtype))})"

    def block_loop(self, loop: BlockLoop) -> list[str]:
        return _PrintedLoop(self, loop).lines()


def _block(shift: int) -> str:
    return f"(b {'-' if shift > 0 else '+'} {abs(shift)})" if shift else "b"


def _from(slab: int, groups: int, rows: ir.Rows, width: int, block: str) -> str:
    """The offset of block ``block`` of a slab in the columns of ``rows``. A slab has a part of each of ``groups`` groups of
    columns, and each CTA's part follows that of the CTA before."""
    if not slab:
        return ""
    each, blocks = slab // groups, tiles.blocks(width) // groups
    apart = "" if groups == 1 else f"{block} / {blocks} * {rows.columns // groups - each} + "
    return f"static_cast<int>(slab) * {each} + {apart}"


def load_rows(rows: ir.Rows, owned: int, ref: Ref, column: str) -> str:
    row, element = f"{name(rows.ref)}_row", pointwise.ELEMENT[rows.dtype]
    where = f"{name(ref)}[h], {row}[h], {column}, {rows.columns}, valid[h]"
    if rows.pairs:
        return f"load_halves<{owned}, {rows.access}>({where});"
    if rows.strides:
        return f"load_strided<{element}, {owned}>({where}, {_offset(rows)});"
    return f"load_row<{element}, {owned}, {rows.access}>({where});"


def _store_rows(rows: ir.Rows, owned: int, column: str, out: str) -> str:
    where = f"{name(rows.ref)}_row[h], {column}, {rows.columns}, valid[h], {out}[h]"
    if rows.strides:
        return f"store_strided<{pointwise.ELEMENT[rows.dtype]}, {owned}>({where}, {_offset(rows)});"
    return f"store_row<{pointwise.ELEMENT[rows.dtype]}, {owned}, {rows.access}>({where});"


def _offset(rows: ir.Rows) -> str:
    """A C++ lambda from a logical column to its element offset, for an array whose columns are not contiguous."""
    terms, inner = [], 1
    for extent, stride in rows.strides:
        terms.append(f"static_cast<i64>(column / {inner} % {extent}) * {stride}")
        inner *= extent
    return f"[](int column) {{ return {' + '.join(terms)}; }}"


class _PrintedLoop:
    def __init__(self, spelling: Spelling, loop: BlockLoop):
        self.spelling, self.loop = spelling, loop
        self.pairs = tiles.owned(loop.width)  # pairs of elements of a thread in a block
        self.preamble: list[str] = []  # before the loop
        self.before: list[str] = []  # once per block
        self.element: list[str] = []
        self.temporaries: list[str] = []  # variables of both elements of a pair
        self.pair: list[str] = []  # after both elements of a pair
        self.after: list[str] = []  # once per block

    def lines(self) -> list[str]:
        for step in self.loop.steps:
            if isinstance(step, ir.Put):
                self._put(step)
            else:
                self._fetch(step)
        lines = [*self.preamble, "KITSUNE_UNROLL", f"for (int b = {self.loop.first}; b < {self.loop.last}; ++b) {{"]
        lines += [f"  {line}" for line in self.before]
        lines += ["  KITSUNE_UNROLL", f"  for (int ii = 0; ii < {self.pairs}; ++ii) {{"]
        if self.element:
            lines += ["    const int h = ii & 1;", *(f"    float {t}[2];" for t in self.temporaries)]
            lines += ["    KITSUNE_UNROLL", "    for (int e = 0; e < 2; ++e) {", "      const int c = 2 * (ii >> 1) + e;"]
            lines += [*(f"      {line}" for line in self.element), "    }"]
        lines += [*(f"    {line}" for line in self.pair), "  }"]
        return [*lines, *(f"  {line}" for line in self.after), "}"]

    def _first_column(self, shift: int = 0) -> str:
        return f"first_column<{self.loop.width}>(lane, {f'b - {shift}' if shift else 'b'})"

    def _fetch(self, step: ir.BlockStep) -> None:
        owned = self.pairs
        match step:
            case ir.MaskWords(ref, image, width):
                self.preamble += [f"u32 {name(ref)}[{tiles.registers(width, 'bit')}];", "KITSUNE_UNROLL"]
                vectors = tiles.image_vectors(width, "bit")
                vector = f"from_image_vector({name(ref)}, i, {getter(image)}(i))"
                self.preamble.append(f"for (int i = 0; i < {vectors}; ++i) {vector};")
            case ir.ArrayBlock(ref, rows, shift, slab, groups):
                type_, count = ("u32", owned // 2) if rows.pairs else (pointwise.COMPUTE[rows.dtype], owned)
                first = _from(slab, groups, rows, slab or self.loop.width, _block(shift))
                load = load_rows(rows, owned, ref, f"{first}{self._first_column(shift)}")
                self.before += [f"{type_} {name(ref)}[2][{count}];", *each_row(load)]
            case ir.VectorBlock(ref, address, dtype, shift):
                self.before += self._vector(name(ref), pointwise.COMPUTE[dtype], self.spelling.address(address), shift)
            case ir.ImageBlock(ref, image, form, shift):
                words = owned if form == "pair" else 2 * owned
                vectors, block = -(-words // 4), _block(shift)
                self.before += [f"u32 {name(ref)}[{words}];", "KITSUNE_UNROLL"]
                vector = f"{getter(image)}({block} * {vectors} + i)"
                self.before.append(f"for (int i = 0; i < {vectors}; ++i) from_image_vector({name(ref)}, i, {vector});")
            case ir.Let(ref, dtype, expr):
                self.element.append(f"const {pointwise.COMPUTE[dtype]} {name(ref)} = {self.spelling.expression(expr, owned)};")

    def _vector(self, x: str, type_: str, address: str, shift: int) -> list[str]:
        owned, raw = self.pairs, x if type_ == "float" else f"{x}_bits"
        lines = [f"float {raw}[{owned}];", f"load_vector<{owned}>({raw}, {address}, {self._first_column(shift)});"]
        if type_ == "float":
            return lines
        fill = f"for (int i = 0; i < {owned}; ++i) {x}[i] = from_word<{type_}>(bits({raw}[i]));"
        return [*lines, f"{type_} {x}[{owned}];", fill]

    def _put(self, put: ir.Put) -> None:
        x, pairs, type_ = self.spelling.expression(put.x, self.pairs), self.pairs, pointwise.COMPUTE[put.dtype]
        inside = f"({self._first_column()} + c < {put.columns})" if put.columns != self.loop.width and not put.pair else ""
        match put.action:
            case ir.Keep() as keep:
                self._keep(keep, put, x, inside, type_)
            case ir.Store(_, rows, slab, groups):
                out, first = f"o{rows.ref.of}", _from(slab, groups, rows, self.loop.width, "b")
                self.before.append(f"{type_} {out}[2][{pairs}];")
                self.element.append(f"{out}[h][c] = {x};")
                self.after += each_row(_store_rows(rows, pairs, f"{first}{self._first_column()}", out))
            case ir.Fold(_, how, ref, stream, scalar):
                to = name(ref) if scalar and stream else f"{name(ref)}[{f'b * {pairs} + c' if stream else 'h'}]"
                guards = " && ".join([*([inside] if inside else []), *(["valid[h]"] if stream else [])])
                self.element.append(f"{f'if ({guards}) ' if guards else ''}{to} = {how}::fold({to}, {type_}({x}));")
            case ir.ToScratch(_, column):
                self.element.append(f"rows.put(lane, h, {column} + {self._first_column()} + c, to_word({x}));")
            case ir.ToSegments(_, ref, how, dtype, runs):
                runs = runs or Ref("runs", ref.of)
                # Columns beyond the value's are folded too, but not stored.
                word = self.spelling.segment_word(runs, how, dtype, x)
                self.element.append(f"rows.put(lane, h, static_cast<int>(lane.q) * {pairs} + c, {word});")
                self.after.append(f"{name(ref)}.block(rows, {name(runs)}, b);")
            case ir.FoldToRows(_, ref):
                self.element.append(f"rows.put(lane, h, static_cast<int>(lane.q) * {pairs} + c, to_word({x}));")
                self.after.append(f"{name(ref)}.block(rows, b);")
            case ir.AddToRows(_, ref, columns, access):
                out = f"{name(ref)}_part"
                self.before.append(f"float {out}[2][{pairs}];")
                self.element.append(f"{out}[h][c] = {x};")
                where = f"{name(ref)}[h], {self._first_column()}, {columns}, {out}[h]"
                self.after += each_row(f"add_to_row<{pairs}, {access}>({where});")
            case ir.ToPanel(_, panel):
                half = tiles.is_half(put.dtype)
                self.before.append(f"{'u32' if half else 'float'} w_{name(panel)}[{pairs if half else 2 * pairs}];")
                if half:
                    self._pack(name(panel), f"w_{name(panel)}[ii]", put, f"{inside} ? {x} : 0.0f" if inside else x)
                else:
                    self.element.append(f"w_{name(panel)}[2 * ii + e] = {f'{inside} ? {x} : 0.0f' if inside else x};")
                self.after.append(f"{name(panel)}.put(lane, b, w_{name(panel)}, valid);")

    def _keep(self, keep: Keep, put: ir.Put, x: str, inside: str, type_: str) -> None:
        ref, pairs, to, block = name(keep.ref), self.pairs, keep.to, _block(keep.first)
        own = f"{ref}_{-keep.first}" if keep.first < 0 else ref  # one loop makes several parts of ``ref``
        if inside:
            x = f"{inside} ? {x} : {type_}(0)"
        if keep.form == "pair":
            self._pack(own, f"w_{own}[ii]" if to else f"{ref}[{block} * {pairs} + ii]", put, x)
        elif keep.form == "bit":
            k = f"2 * (b * {pairs} + ii) + e"
            self.element.append(f"{'w_' if to else ''}{ref}[({k}) / 32] |= static_cast<u32>({x}) << (({k}) % 32);")
        elif to:
            self.element.append(f"w_{own}[2 * ii + e] = to_word({x});")
        else:
            self.element.append(f"{ref}[2 * ({block} * {pairs} + ii) + e] = {x};")
        if to and keep.form != "bit":
            words = pairs if keep.form == "pair" else 2 * pairs
            vectors = -(-words // 4)
            self.before.append(f"u32 w_{own}[{words}];")
            put_vector = f"{putter(to)}({block} * {vectors} + i, image_vector(w_{own}, i));"
            self.after += ["KITSUNE_UNROLL", f"for (int i = 0; i < {vectors}; ++i) {put_vector}"]

    def _pack(self, ref: str, word: str, put: ir.Put, x: str) -> None:
        """Packs both elements of a pair into a word."""
        if put.pair:
            self.pair.append(f"{word} = {x};")
            return
        self.temporaries.append(f"t_{ref}")
        self.element.append(f"t_{ref}[e] = {x};")
        self.pair.append(f"{word} = pack<{pointwise.ELEMENT[put.dtype]}>(t_{ref}[0], t_{ref}[1]);")


def getter(image: Ref) -> str:
    """The C++ function that returns vector i of an image or of a queue's entry."""
    return f"{name(image)}.get" if image.kind == "image" else name(image)


def putter(image: Ref) -> str:
    return f"{name(image)}.put" if image.kind == "image" else name(image)


# --- Products for each row --------------------------------------------------------------------------------------------------------


def product_lines(at: Spelling, node: Node) -> list[str]:
    match node:
        case ir.RowMemory(addresses, offset, work, size):
            found = [f"u8* const row_work = scratch + {work} + thread_id() % kGroupThreads / 32 * {size // 4};"]
            if addresses:
                type_ = f"RowAddresses<{addresses}>"
                found.append(f"const {type_} row_addresses = {type_}::at(scratch + {offset});")
                found.append(f"static_assert({type_}::kBytes == {ir.address_bytes(addresses)});")
            return found
        case ir.KeepAddress(ref, number, stored):
            rows = [f"{f'!valid[{h}] ? nullptr : ' if stored else ''}{name(ref)}_row[{h}]" for h in range(2)]
            return [f"row_addresses.keep(lane, {number}, {', '.join(rows)});"]
        case ir.RowProduct():
            return _product(at, node)
    return []


def _product(at: Spelling, node: ir.RowProduct) -> list[str]:
    x, y = node.x, node.others
    flags = ", ".join(str(flag).lower() for flag in (x.across, y.across, node.y is None))
    type_ = f"RowProduct<{pointwise.OPERAND[node.dtype]}, {x.free}, {y.free}, {node.k}, {flags}, {node.slots}>"
    columns = "const AllColumns columns;"
    if node.picks is not None:
        assert node.fill is not None
        columns = f"const PickedColumns columns{{{at.address(node.picks)}, {at.expression(node.fill)}}};"
    element = pointwise.ELEMENT[node.out]
    match node.to:
        case ir.ToRows(number, pairs):
            where = f"row_addresses.get(row, {number})"
            put = f"store_product<{element}, {node.columns}, {str(pairs).lower()}>({where}, "
        case to:
            put = f"put_row<{element}, {tiles.padded(node.columns)}, {node.columns}>({name(to)}, row, "
    return [
        "{",
        f"  using Rows = {type_};",
        f"  static_assert(Rows::kBytes == {node.bytes});",
        f"  {columns}",
        "  Rows{row_work}.rows(",
        "      [&](int row, const Rows::X& x, const Rows::Y& y) {",
        "        (void)row, (void)y;",
        *(f"        {line}" for line in _copies("x", x)),
        *(f"        {line}" for line in (_copies("y", node.y) if node.y is not None else [])),
        "      },",
        f"      [&](int row, const u32* sums) {{ {put}[&](int c) {{ return columns.get(sums, c); }}); }});",
        "}",
    ]


def _copies(operand: str, x: ir.RowOperand) -> list[str]:
    found = []
    for how, source, pieces, first, count in ((c.how, c.source, c.pieces, c.first, c.count) for c in x.copied):
        if how == "scratch":
            found.append(f"{operand}.copy_scratch<{first}, {count}>(rows.base + row * rows.pitch + {source});")
            continue
        where = f"[&](int piece) {{ return row_addresses.get(row, {source} + piece); }}"
        if how == "async":
            found.append(f"{operand}.copy_async<{first}, {count}, {pieces}>({where});")
        else:
            found.append(f"{operand}.copy<{first}, {count}, {pieces}, {str(how == 'staged').lower()}>({where});")
    return found


# --- Nodes of a tile --------------------------------------------------------------------------------------------------------------


def lines(at: Spelling, nodes: Iterable[Node]) -> list[str]:
    found: list[str] = []
    for node in nodes:
        found += next(filter(None, (spell(at, node) for spell in _KINDS)), [])
    return found


_TURNS = {
    "take": "take_turn<kLanes>(group)",
    "give": "give_turn<kLanes>(group)",
    "first": "if (group == kLanes - 1) give_turn<kLanes>(group)",
    "last": "if (group == 0) take_turn<kLanes>(group)",
}


def _loops(at: Spelling, node: Node) -> list[str]:
    match node:
        case ir.BlockLoop():
            return at.block_loop(node)
        case ir.Registers(ref, form, dtype, count, words):
            type_ = pointwise.COMPUTE[dtype] if form == "word" else "u32"
            return [f"{type_} {'w_' if words else ''}{name(ref)}[{count}]{' = {}' if form == 'bit' else ''};"]
        case ir.PutMask(ref, to, width):
            put = f"{putter(to)}(i, image_vector(w_{name(ref)}, i));"
            return ["KITSUNE_UNROLL", f"for (int i = 0; i < {tiles.image_vectors(width, 'bit')}; ++i) {put}"]
        case ir.LayerLoop(layers, _, _, body):
            return ["KITSUNE_NO_UNROLL", f"for (u32 layer = 0; layer < {layers}; ++layer) {{", *lines(at, body), "}"]
        case ir.Turn(what):
            return [f"{_TURNS[what]};"]
        case ir.CountedLoop(number, count, reverse, body, seen, which):
            n, index = name(number), f"i_{name(number)}"
            of = f"{count - 1} - {index}" if reverse else index if seen is None else f"{name(seen)}.{which}_block({index})"
            return [
                "KITSUNE_NO_UNROLL",
                f"for (i32 {index} = 0; {index} < {count if seen is None else f'{name(seen)}.{which}_count()'}; ++{index}) {{",
                f"  const i32 {n} = {of};",
                f"  (void){n};",
                *(f"  {line}" for line in lines(at, body)),
                "}",
            ]
        case ir.TurnImages(first, second):
            a, b = name(first), name(second)
            return [f"const Image {a}_in = layer & 1 ? {b} : {a}, {a}_out = layer & 1 ? {a} : {b};"]
        case ir.CopyRegisters(to, source, count):
            return ["KITSUNE_UNROLL", f"for (int i = 0; i < {count}; ++i) {name(to)}[i] = {name(source)}[i];"]
    return []


def _rows(at: Spelling, node: Node) -> list[str]:
    match node:
        case ir.SetRow(ref, dtype, expr):
            return [f"{pointwise.COMPUTE[dtype]} {name(ref)}[2];", *each_row(f"{name(ref)}[h] = {at.expression(expr)};")]
        case ir.LoadRow(ref, rows, column):
            behind = column * pointwise.ITEM_SIZE[rows.dtype]
            starts = [f"{name(rows.ref)}_row[{h}]" for h in range(2)]
            if behind:
                starts = [f"static_cast<const u8*>({start}) + {behind}" for start in starts]
            loads = [f"load_one<{pointwise.ELEMENT[rows.dtype]}>({start}, valid[{h}])" for h, start in enumerate(starts)]
            return [f"const {pointwise.COMPUTE[rows.dtype]} {name(ref)}[2] = {{{', '.join(loads)}}};"]
        case ir.PopRow(ref, entry, pop, dtype):
            type_, e = pointwise.COMPUTE[dtype], name(entry)
            words = f"from_word<{type_}>({e}.x), from_word<{type_}>({e}.y)"
            return [f"const U4 {e} = {name(pop)}(0);", f"const {type_} {name(ref)}[2] = {{{words}}};"]
        case ir.StartFold(ref, how, dtype):
            identity = at.expression(ir.Identity(how, dtype))
            return [f"{pointwise.COMPUTE[dtype]} {name(ref)}[2] = {{{identity}, {identity}}};"]
        case ir.FoldQuad(ref, how):
            return [f"fold_quad<{how}>({name(ref)});"]
        case ir.FoldRow(sink, how, dtype, row):
            fold = f"{how}::fold({name(sink)}, {pointwise.COMPUTE[dtype]}({at.expression(row)}))"
            return each_row(f"if (valid[h]) {name(sink)} = {fold};")
        case ir.StoreRow(rows, row, once):
            where = f"{name(rows.ref)}_row[h], valid[h] && lane.q == 0, {at.expression(row)}"
            return each_row(f"{_once(once)}store_one<{pointwise.ELEMENT[rows.dtype]}>({where});")
        case ir.RowToScratch(column, row):
            return each_row(f"if (lane.q == 0) rows.put(lane, h, {column}, to_word({at.expression(row)}));")
        case ir.RowTile(ref, row, dtype):
            element = pointwise.ELEMENT[dtype]
            if tiles.is_half(dtype):
                items = [f"lane.q == 0 ? pack<{element}>({at.of_row(row, h)}, 0.0f) : 0" for h in range(2)]
                return [f"u32 {name(ref)}[2] = {{{', '.join(items)}}};"]
            items = [f"lane.q == 0 ? {at.of_row(row, h)} : 0.0f, 0.0f" for h in range(2)]
            return [f"float {name(ref)}[4] = {{{', '.join(items)}}};"]
        case ir.SyncWarp():
            return ["syncwarp();"]
        case ir.TableRows():
            return _table_rows(at, node)
        case ir.SliceRows():
            return _slice_rows(at, node)
    return []


def _table_rows(at: Spelling, node: ir.TableRows) -> list[str]:
    assert isinstance(node.table, ir.Constant)
    row, table = f"{name(node.ref)}_row", at.constant(node.table)
    otherwise = "" if node.otherwise is None else f", {at.address(node.otherwise)}"
    rows = [f"table_row({table}, {at.of_row(node.index, h)}, {node.rows}ll, {node.bytes}ll{otherwise})" for h in range(2)]
    return [f"const void* const {row}[2] = {{{', '.join(rows)}}};"]


def _slice_rows(at: Spelling, node: ir.SliceRows) -> list[str]:
    row, const = f"{name(node.ref)}_row", "const " if node.loads else ""
    behind = [f"static_cast<i64>({at.expression(n)}) * {size}ll" for n, size in node.terms]
    where = " + ".join([f"static_cast<{const}u8*>({name(node.whole)}_row[h])", *behind])
    return [f"{const}void* {row}[2];", *each_row(f"{row}[h] = {where};")]


def _once(once: bool) -> str:
    return "if (slab == 0) " if once else ""


def _queues(at: Spelling, node: Node) -> list[str]:
    match node:
        case ir.QueueCall(queue, call):
            n = _count(queue)
            return [f"{name(queue)}.{call}({n});", *([f"++{n};"] if n != "n" and call == "rd_release" else [])]
        case ir.Entry(ref, queue, slab, write, once):
            first, n = f"slab * {slab} + " if slab else "", _count(queue)
            if node.of is not None:
                first = f"{node.of * slab} + "
            if node.each:
                push = f"{name(queue)}.push_to({n}, slab * {slab} + i % {slab}, v, i / {slab});"
                return [f"const auto {name(ref)} = [&](int i, U4 v) {{ {push} }};"]
            if write:
                return [f"const auto {name(ref)} = [&](int i, U4 v) {{ {_once(once)}{name(queue)}.push({n}, {first}i, v); }};"]
            return [f"const auto {name(ref)} = [&](int i) {{ return {name(queue)}.pop({n}, {first}i); }};"]
        case ir.PushRow(queue, row, once):
            words = ", ".join(f"to_word({at.of_row(row, h)})" for h in range(2))
            return [f"{_once(once)}{name(queue)}.push(n, 0, U4{{{words}, 0, 0}});"]
    return []


def _count(queue: Ref) -> str:
    """The counter of a queue's entries: a tile has one entry of each queue, but a ring of an exchange counts its own."""
    return f"n_{name(queue)}" if queue.kind == "exchange" else "n"


def _segments(at: Spelling, node: Node) -> list[str]:
    match node:
        case ir.SegmentRuns(ref, index, rows, in_order):
            ids, segments = f"ids{ref.of}", name(ref)
            of, kind = ", ".join(at.of_row(index, h) for h in range(2)), "Runs" if in_order else "Members"
            return [
                f"const i64 {ids}[2] = {{{of}}};",
                f"const {kind} runs{ref.of} = {kind}::of({ids}, valid, {rows}ll);",
                f"{segments}.begin(runs{ref.of});",
            ]
        case ir.RowToSegments(ref, how, dtype, row, runs):
            runs = runs or Ref("runs", ref.of)
            x = at.segment_word(runs, how, dtype, at.expression(row))
            return [
                # The block has 8 columns, all with the same number.
                *each_row(f"for (u32 c = lane.q; c < 8; c += 4) rows.put(lane, h, c, {x});"),
                f"{name(ref)}.block(rows, {name(runs)}, 0);",
            ]
        case ir.RowRuns(ref, index, rows):
            ids, of = f"ids_{name(ref)}", ", ".join(at.of_row(index, h) for h in range(2))
            return [f"const i64 {ids}[2] = {{{of}}};", f"const Runs {name(ref)} = Runs::of({ids}, valid, {rows}ll);"]
        case ir.FindTops(ref, runs):
            return [f"{name(ref)}.find(rows, {name(runs)});"]
        case ir.BeginSegments(ref, runs):
            return [f"{name(ref)}.begin({name(runs)});"]
        case ir.SummedRows(ref, out, index, rows, columns):
            found = [f"summed_row({at.constant(out)}, {at.of_row(index, h)}, valid[{h}], {rows}ll, {columns}ll)" for h in range(2)]
            return [f"float* const {name(ref)}[2] = {{{', '.join(found)}}};"]
        case ir.AddRow(ref, row):
            return each_row(f"if ({name(ref)}[h] != nullptr && lane.q == 0) red_add({name(ref)}[h], {at.expression(row)});")
        case ir.FoldedRows(ref, how, dtype, width, out, index, rows, columns):
            ids, of = f"ids_{name(ref)}", ", ".join(at.of_row(index, h) for h in range(2))
            type_ = f"FoldedRows<{how}, {pointwise.COMPUTE[dtype]}, {width}>"
            made = f"{type_}::of({at.constant(out)}, {columns}, {ids}, valid, {rows}ll)"
            return [f"const i64 {ids}[2] = {{{of}}};", f"const {type_} {name(ref)} = {made};"]
        case ir.FoldRowAt(ref, row):
            return each_row(f"{name(ref)}.row(lane, h, {at.expression(row)});")
        case ir.JoinSegments(ref):
            return [f"{name(ref)}.join();"]
    return []


def _products(at: Spelling, node: Node) -> list[str]:
    match node:
        case ir.Issue():
            return _issue(at, node)
        case ir.Complete(ref, pending, done, blocks):
            return [f"{name(ref)}_product.complete<{pending}, {done}, {blocks}>();"]
        case ir.RowToPanel(panel, tile):
            return [f"{name(panel)}.put(lane, 0, {name(tile)}, valid);"]
        case ir.AddGradient(gradient, sums):
            meanwhile = " ".join(f"{name(s)}.add(sink{s.of});" for s in sums)
            return [f"{name(gradient)}.add(sum{gradient.of}, [{'&' if sums else ''}] {{{f' {meanwhile} ' if sums else ''}}});"]
    return []


def _issue(at: Spelling, node: ir.Issue) -> list[str]:
    d, found = name(node.ref), list[str]()
    weights = "weights"
    if node.weights is not None:
        assert node.weights.at is not None
        layer = f" + layer * {node.weights.layer}" if node.weights.layer else ""
        weights = f"{d}_weights"
        found.append(f"ResidentWeights<{node.columns}> {weights}{{shared + {at.constant(node.weights.at)}{layer}}};")
    if not node.started:
        found.append(f"float {d}[{node.columns // 2}];")
    if node.bias is not None:
        address, width, first = node.bias
        found.append(f"start_from<{node.columns}, {width}>({d}, {at.address(address)}, lane, {first});")
    flags = f"{'true' if node.rolling else 'false'}, {'true' if node.started or node.bias is not None else 'false'}"
    template = f"{pointwise.OPERAND[node.dtype]}, {node.columns}, {flags}, decltype({weights})"
    found.append(f"Product<{template}> {d}_product({d}, {weights});")
    for operand, first, done in node.feeds:
        if operand.awaited:
            found.append(f"{name(operand.owner)}.rd_acquire({_count(operand.owner)});")
        found.append(f"{d}_product.feed<{first}, {done}>({_operand(operand)});")
    return [*found, f"{d}_product.commit();"]


def _operand(o: ir.Operand) -> str:
    type_ = pointwise.OPERAND[o.dtype]
    if o.kind == "image":
        return f"image_source<{type_}, {o.width}>([&](int i) {{ return {getter(o.ref)}(i); }})"
    if o.rows is None:
        return f"RegisterSource<{type_}, {o.width}>{{{name(o.ref)}}}"
    row, element = f"{name(o.ref)}_row", pointwise.ELEMENT[o.rows.dtype]
    where = f"{{{row}[0], {row}[1]}}, {{valid[0], valid[1]}}, {o.rows.columns}, lane"
    return f"RowSource<{type_}, {element}, {o.width}, {o.rows.access}>{{{where}}}"


def _setup(at: Spelling, node: Node) -> list[str]:
    """Nodes that run once per kernel, or once per tile before all others."""
    match node:
        case ir.LoadScalar(ref, dtype, address, once):
            type_, where = pointwise.COMPUTE[dtype], f"{'p.' if once else ''}{at.address(address)}"
            return [f"const {type_} {name(ref)} = from_word<{type_}>(bits(ld_global({where})));"]
        case ir.SinkStart(ref, how, dtype, width):
            type_, identity = pointwise.COMPUTE[dtype], at.expression(ir.Identity(how, dtype))
            if not width:
                return [f"{type_} {name(ref)} = {identity};"]
            count = width // 4
            return [f"{type_} {name(ref)}[{count}];", f"for (int i = 0; i < {count}; ++i) {name(ref)}[i] = {identity};"]
        case ir.GradientStart(ref, dtype, x, y, shape):
            sizes = f"{x.width}, {y.width}, {shape.blocks}, {shape.all_blocks}, {shape.width}"
            type_ = f"Gradient<{pointwise.OPERAND[dtype]}, {sizes}, kLanes>"
            total, count = f"sum{ref.of}", shape.width // 2
            return [
                f"const {type_} {name(ref)}{{panels.base, panels.base + {y.at}, panels.stride, group * {shape.blocks}}};",
                f"float {total}[{shape.blocks}][{count}];",
                f"for (int m = 0; m < {shape.blocks}; ++m) for (int i = 0; i < {count}; ++i) {total}[m][i] = 0.0f;",
            ]
        case ir.PanelSumStart(sums, panel):
            type_ = f"PanelSums<{pointwise.OPERAND[panel.dtype]}, {panel.width}, kLanes>"
            return [
                f"const {type_} {name(sums)}{{panels.base + {panel.at}, panels.stride, group}};",
                f"float sink{sums.of}[2 * {name(sums)}.kRounds] = {{}};",
            ]
        case ir.Panel(ref):
            return [f"const {_panel_type(node)} {name(ref)}{{panels.mine() + {node.at}}};"]
        case ir.ClearPanel(panel):
            return [f"{_panel_type(panel)}{{panels.mine() + {panel.at}}}.clear(lane, 1 + group);"]
        case ir.Image(ref, offset):
            return [f"const Image {name(ref)} = Image::at(scratch + {offset});"]
        case ir.AxisIndices(extents):
            return _axes(extents)
        case ir.SeenBlocks():
            return [seen_blocks(at, node)]
        case ir.RowAddresses():
            return _addresses(at, node)
    return []


def seen_blocks(at: Spelling, node: ir.SeenBlocks) -> str:
    """``SeenBlocks`` of the first and last row of the batch that the lanes of the CTA have, for consumers and for the loader."""
    low, high = (("false", 0) if bound is None else ("true", bound) for bound in (node.low, node.high))
    template = f"{node.inner}, {node.extent}, {node.step}, {low[0]}, {low[1]}, {high[0]}, {high[1]}"
    rows = f"rows_at.first, rows_at.last, {node.count}"
    if node.shift is None:
        return f"const SeenBlocks {name(node.ref)} = SeenBlocks::of<{template}>({rows});"
    guard = f"SeenBlocks::k{node.guard.capitalize()}, {node.size}"
    number = f"from_word<i32>(bits(ld_global(p.{at.address(node.shift)})))"
    return f"const SeenBlocks {name(node.ref)} = SeenBlocks::shifted<{template}, {guard}>({rows}, {node.sign}, {number});"


def _panel_type(panel: ir.Panel) -> str:
    return f"Panel<{pointwise.OPERAND[panel.dtype]}, {panel.width}>"


def _axes(extents: tuple[int, ...]) -> list[str]:
    """The index along each stream axis of the thread's two rows: the mixed-radix digits of the row, the last axis fastest."""
    if len(extents) == 1:
        return ["const i64 axis0[2] = {row[0], row[1]};"]
    found, inner = [], 1
    for a in reversed(range(len(extents))):
        text = [f"row[{h}] / {inner}ll % {extents[a]}ll" for h in range(2)]
        found.append(f"const i64 axis{a}[2] = {{{text[0]}, {text[1]}}};")
        inner *= extents[a]
    return found


def _addresses(at: Spelling, node: ir.RowAddresses) -> list[str]:
    row, k = f"{name(node.ref)}_row", node.ref.of
    if node.staged:
        return [f"const u8* const {row}[2] = {{staged{k}.row(n, lane.row), staged{k}.row(n, lane.row + 8)}};"]
    const, byte = ("const ", "const u8") if node.ref.kind == "in" else ("", "u8")
    offset = " + ".join(f"axis{axis}[h] * {stride}ll" for axis, stride in node.strides) or "0"
    return [
        f"{const}void* {row}[2];",
        *each_row(f"{row}[h] = static_cast<{byte}*>({at.constant(node.array)}) + (valid[h] ? {offset} : 0);"),
    ]


_KINDS = (_loops, _rows, _queues, _segments, _products, product_lines, _setup)
