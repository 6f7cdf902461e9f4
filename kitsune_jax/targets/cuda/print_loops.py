"""Loops over the blocks of a tile as C++: names, expressions of elements and rows, and what is done block by block.

Comes in: nodes of the device IR. Goes out: lines. Nothing is decided here.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.device_ir import Address, BlockLoop, Constant, Expr, Keep, Ref

# An element (h, c = 2 * (ii >> 1) + e of block b) of an object, by how the object holds its elements.
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
    # both elements of a pair, as they are
    "pair of registers": "{name}[b * {pairs} + ii]",
    "pair of block": "{name}[ii]",
    "pair of rows": "{name}[ii & 1][ii >> 1]",
}


def name(ref: Ref) -> str:
    return f"{ref.kind}{ref.of}{ref.part}"


def each_row(statement: str) -> list[str]:
    return ["KITSUNE_UNROLL", f"for (int h = 0; h < 2; ++h) {statement}"]


class Spelling:
    """Text of expressions. ``fields``: the constants that stand in a table, by name and key; others are literals."""

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
        """The expression of a row value, for one of the thread's two rows."""
        return self.expression(x).replace("[h]", f"[{h}]")

    def segment_word(self, runs: Ref, how: str, dtype: str, x: str) -> str:
        """What a row adds to its segment: nothing, where it has none."""
        type_ = pointwise.COMPUTE[dtype]
        return f"to_word({name(runs)}.inside[h] ? {type_}({x}) : {self.expression(ir.Identity(how, dtype))})"

    def block_loop(self, loop: BlockLoop) -> list[str]:
        return _Loop(self, loop).lines()


def _block(shift: int) -> str:
    return f"(b {'-' if shift > 0 else '+'} {abs(shift)})" if shift else "b"


def _from(slab: int, groups: int, rows: ir.Rows, width: int, block: str) -> str:
    """What a slab of ``groups`` adds to the columns of block ``block`` of ``rows``: a group of it begins where that of the rows
    does, and so many columns further on for each CTA before."""
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
    """C++ lambda: element offset of a logical column of an array whose columns do not lie together."""
    terms, inner = [], 1
    for extent, stride in rows.strides:
        terms.append(f"static_cast<i64>(column / {inner} % {extent}) * {stride}")
        inner *= extent
    return f"[](int column) {{ return {' + '.join(terms)}; }}"


class _Loop:
    def __init__(self, spelling: Spelling, loop: BlockLoop):
        self.spelling, self.loop = spelling, loop
        self.pairs = tiles.owned(loop.width)  # of elements that a thread has in a block
        self.ahead: list[str] = []  # in front of the loop
        self.before: list[str] = []  # once per block
        self.element: list[str] = []
        self.temporaries: list[str] = []  # both elements of a pair
        self.pair: list[str] = []  # after both elements of a pair
        self.after: list[str] = []  # once per block

    def lines(self) -> list[str]:
        for step in self.loop.steps:
            if isinstance(step, ir.Put):
                self._put(step)
            else:
                self._fetch(step)
        lines = [*self.ahead, "KITSUNE_UNROLL", f"for (int b = {self.loop.first}; b < {self.loop.last}; ++b) {{"]
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

    def _fetch(self, step: ir.Step) -> None:
        owned = self.pairs
        match step:
            case ir.MaskWords(ref, image, width):
                self.ahead += [f"u32 {name(ref)}[{tiles.registers(width, 'bit')}];", "KITSUNE_UNROLL"]
                vectors = tiles.image_vectors(width, "bit")
                self.ahead.append(f"for (int i = 0; i < {vectors}; ++i) from_image_vector({name(ref)}, i, {getter(image)}(i));")
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

    # -- what is done with the elements

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
                # Columns beyond the value's are folded as well, and not stored.
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
        own = f"{ref}_{-keep.first}" if keep.first < 0 else ref  # several parts of ``ref`` are made in one loop
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
        """Both elements of a pair as a word."""
        if put.pair:
            self.pair.append(f"{word} = {x};")
            return
        self.temporaries.append(f"t_{ref}")
        self.element.append(f"t_{ref}[e] = {x};")
        self.pair.append(f"{word} = pack<{pointwise.ELEMENT[put.dtype]}>(t_{ref}[0], t_{ref}[1]);")


def getter(image: Ref) -> str:
    """What gives vector i of an image or of an entry of a queue."""
    return f"{name(image)}.get" if image.kind == "image" else name(image)


def putter(image: Ref) -> str:
    return f"{name(image)}.put" if image.kind == "image" else name(image)
