"""What a lane does with a tile, as C++, node by node.

Comes in: nodes of the device IR. Goes out: lines. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable

from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import pointwise, print_products, segment_ir, tiles
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Node, Ref
from kitsune_jax.targets.cuda.print_loops import Spelling, each_row, getter, name, putter


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
        case st.Registers(ref, form, dtype, count, words):
            type_ = pointwise.COMPUTE[dtype] if form == "word" else "u32"
            return [f"{type_} {'w_' if words else ''}{name(ref)}[{count}]{' = {}' if form == 'bit' else ''};"]
        case st.PutMask(ref, to, width):
            put = f"{putter(to)}(i, image_vector(w_{name(ref)}, i));"
            return ["KITSUNE_UNROLL", f"for (int i = 0; i < {tiles.image_vectors(width, 'bit')}; ++i) {put}"]
        case st.LayerLoop(layers, _, _, body):
            return ["KITSUNE_NO_UNROLL", f"for (u32 layer = 0; layer < {layers}; ++layer) {{", *lines(at, body), "}"]
        case st.Turn(what):
            return [f"{_TURNS[what]};"]
        case st.CountedLoop(number, count, reverse, body, seen, which):
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
        case st.TurnImages(first, second):
            a, b = name(first), name(second)
            return [f"const Image {a}_in = layer & 1 ? {b} : {a}, {a}_out = layer & 1 ? {a} : {b};"]
        case st.CopyRegisters(to, source, count):
            return ["KITSUNE_UNROLL", f"for (int i = 0; i < {count}; ++i) {name(to)}[i] = {name(source)}[i];"]
    return []


def _rows(at: Spelling, node: Node) -> list[str]:
    match node:
        case st.SetRow(ref, dtype, expr):
            return [f"{pointwise.COMPUTE[dtype]} {name(ref)}[2];", *each_row(f"{name(ref)}[h] = {at.expression(expr)};")]
        case st.LoadRow(ref, rows, column):
            behind = column * pointwise.ITEM_SIZE[rows.dtype]
            starts = [f"{name(rows.ref)}_row[{h}]" for h in range(2)]
            if behind:
                starts = [f"static_cast<const u8*>({start}) + {behind}" for start in starts]
            loads = [f"load_one<{pointwise.ELEMENT[rows.dtype]}>({start}, valid[{h}])" for h, start in enumerate(starts)]
            return [f"const {pointwise.COMPUTE[rows.dtype]} {name(ref)}[2] = {{{', '.join(loads)}}};"]
        case st.PopRow(ref, entry, pop, dtype):
            type_, e = pointwise.COMPUTE[dtype], name(entry)
            words = f"from_word<{type_}>({e}.x), from_word<{type_}>({e}.y)"
            return [f"const U4 {e} = {name(pop)}(0);", f"const {type_} {name(ref)}[2] = {{{words}}};"]
        case st.StartFold(ref, how, dtype):
            identity = at.expression(ir.Identity(how, dtype))
            return [f"{pointwise.COMPUTE[dtype]} {name(ref)}[2] = {{{identity}, {identity}}};"]
        case st.FoldQuad(ref, how):
            return [f"fold_quad<{how}>({name(ref)});"]
        case st.FoldRow(sink, how, dtype, row):
            fold = f"{how}::fold({name(sink)}, {pointwise.COMPUTE[dtype]}({at.expression(row)}))"
            return each_row(f"if (valid[h]) {name(sink)} = {fold};")
        case st.StoreRow(rows, row, once):
            where = f"{name(rows.ref)}_row[h], valid[h] && lane.q == 0, {at.expression(row)}"
            return each_row(f"{_once(once)}store_one<{pointwise.ELEMENT[rows.dtype]}>({where});")
        case st.RowToScratch(column, row):
            return each_row(f"if (lane.q == 0) rows.put(lane, h, {column}, to_word({at.expression(row)}));")
        case st.RowTile(ref, row, dtype):
            element = pointwise.ELEMENT[dtype]
            if tiles.is_half(dtype):
                items = [f"lane.q == 0 ? pack<{element}>({at.of_row(row, h)}, 0.0f) : 0" for h in range(2)]
                return [f"u32 {name(ref)}[2] = {{{', '.join(items)}}};"]
            items = [f"lane.q == 0 ? {at.of_row(row, h)} : 0.0f, 0.0f" for h in range(2)]
            return [f"float {name(ref)}[4] = {{{', '.join(items)}}};"]
        case st.SyncWarp():
            return ["syncwarp();"]
        case st.TableRows():
            return _table_rows(at, node)
        case st.SliceRows():
            return _slice_rows(at, node)
    return []


def _table_rows(at: Spelling, node: st.TableRows) -> list[str]:
    assert isinstance(node.table, ir.Constant)
    row, table = f"{name(node.ref)}_row", at.constant(node.table)
    otherwise = "" if node.otherwise is None else f", {at.address(node.otherwise)}"
    rows = [f"table_row({table}, {at.of_row(node.index, h)}, {node.rows}ll, {node.bytes}ll{otherwise})" for h in range(2)]
    return [f"const void* const {row}[2] = {{{', '.join(rows)}}};"]


def _slice_rows(at: Spelling, node: st.SliceRows) -> list[str]:
    row, const = f"{name(node.ref)}_row", "const " if node.loads else ""
    behind = [f"static_cast<i64>({at.expression(n)}) * {size}ll" for n, size in node.terms]
    where = " + ".join([f"static_cast<{const}u8*>({name(node.whole)}_row[h])", *behind])
    return [f"{const}void* {row}[2];", *each_row(f"{row}[h] = {where};")]


def _once(once: bool) -> str:
    return "if (slab == 0) " if once else ""


def _queues(at: Spelling, node: Node) -> list[str]:
    match node:
        case st.QueueCall(queue, call):
            n = _count(queue)
            return [f"{name(queue)}.{call}({n});", *([f"++{n};"] if n != "n" and call == "rd_release" else [])]
        case st.Entry(ref, queue, slab, write, once):
            first, n = f"slab * {slab} + " if slab else "", _count(queue)
            if node.of is not None:
                first = f"{node.of * slab} + "
            if node.each:
                push = f"{name(queue)}.push_to({n}, slab * {slab} + i % {slab}, v, i / {slab});"
                return [f"const auto {name(ref)} = [&](int i, U4 v) {{ {push} }};"]
            if write:
                return [f"const auto {name(ref)} = [&](int i, U4 v) {{ {_once(once)}{name(queue)}.push({n}, {first}i, v); }};"]
            return [f"const auto {name(ref)} = [&](int i) {{ return {name(queue)}.pop({n}, {first}i); }};"]
        case st.PushRow(queue, row, once):
            words = ", ".join(f"to_word({at.of_row(row, h)})" for h in range(2))
            return [f"{_once(once)}{name(queue)}.push(n, 0, U4{{{words}, 0, 0}});"]
    return []


def _count(queue: Ref) -> str:
    """Which entry of a queue is meant: a tile has one of each, and a ring of an exchange counts its own."""
    return f"n_{name(queue)}" if queue.kind == "exchange" else "n"


def _segments(at: Spelling, node: Node) -> list[str]:
    match node:
        case segment_ir.SegmentRuns(ref, index, rows, in_order):
            ids, segments = f"ids{ref.of}", name(ref)
            of, kind = ", ".join(at.of_row(index, h) for h in range(2)), "Runs" if in_order else "Members"
            return [
                f"const i64 {ids}[2] = {{{of}}};",
                f"const {kind} runs{ref.of} = {kind}::of({ids}, valid, {rows}ll);",
                f"{segments}.begin(runs{ref.of});",
            ]
        case segment_ir.RowToSegments(ref, how, dtype, row, runs):
            runs = runs or Ref("runs", ref.of)
            x = at.segment_word(runs, how, dtype, at.expression(row))
            return [
                # The block has 8 columns, which are folded alike.
                *each_row(f"for (u32 c = lane.q; c < 8; c += 4) rows.put(lane, h, c, {x});"),
                f"{name(ref)}.block(rows, {name(runs)}, 0);",
            ]
        case segment_ir.RowRuns(ref, index, rows):
            ids, of = f"ids_{name(ref)}", ", ".join(at.of_row(index, h) for h in range(2))
            return [f"const i64 {ids}[2] = {{{of}}};", f"const Runs {name(ref)} = Runs::of({ids}, valid, {rows}ll);"]
        case segment_ir.FindTops(ref, runs):
            return [f"{name(ref)}.find(rows, {name(runs)});"]
        case segment_ir.BeginSegments(ref, runs):
            return [f"{name(ref)}.begin({name(runs)});"]
        case segment_ir.SummedRows(ref, out, index, rows, columns):
            found = [f"summed_row({at.constant(out)}, {at.of_row(index, h)}, valid[{h}], {rows}ll, {columns}ll)" for h in range(2)]
            return [f"float* const {name(ref)}[2] = {{{', '.join(found)}}};"]
        case segment_ir.AddRow(ref, row):
            return each_row(f"if ({name(ref)}[h] != nullptr && lane.q == 0) red_add({name(ref)}[h], {at.expression(row)});")
        case segment_ir.FoldedRows(ref, how, dtype, width, out, index, rows, columns):
            ids, of = f"ids_{name(ref)}", ", ".join(at.of_row(index, h) for h in range(2))
            type_ = f"FoldedRows<{how}, {pointwise.COMPUTE[dtype]}, {width}>"
            made = f"{type_}::of({at.constant(out)}, {columns}, {ids}, valid, {rows}ll)"
            return [f"const i64 {ids}[2] = {{{of}}};", f"const {type_} {name(ref)} = {made};"]
        case segment_ir.FoldRowAt(ref, row):
            return each_row(f"{name(ref)}.row(lane, h, {at.expression(row)});")
        case segment_ir.JoinSegments(ref):
            return [f"{name(ref)}.join();"]
    return []


def _products(at: Spelling, node: Node) -> list[str]:
    match node:
        case st.Issue():
            return _issue(at, node)
        case st.Complete(ref, pending, done, blocks):
            return [f"{name(ref)}_product.complete<{pending}, {done}, {blocks}>();"]
        case st.RowToPanel(panel, tile):
            return [f"{name(panel)}.put(lane, 0, {name(tile)}, valid);"]
        case st.AddGradient(gradient, sums):
            meanwhile = " ".join(f"{name(s)}.add(sink{s.of});" for s in sums)
            return [f"{name(gradient)}.add(sum{gradient.of}, [{'&' if sums else ''}] {{{f' {meanwhile} ' if sums else ''}}});"]
    return []


def _issue(at: Spelling, node: st.Issue) -> list[str]:
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


def _operand(o: st.Operand) -> str:
    type_ = pointwise.OPERAND[o.dtype]
    if o.kind == "image":
        return f"image_source<{type_}, {o.width}>([&](int i) {{ return {getter(o.ref)}(i); }})"
    if o.rows is None:
        return f"RegisterSource<{type_}, {o.width}>{{{name(o.ref)}}}"
    row, element = f"{name(o.ref)}_row", pointwise.ELEMENT[o.rows.dtype]
    where = f"{{{row}[0], {row}[1]}}, {{valid[0], valid[1]}}, {o.rows.columns}, lane"
    return f"RowSource<{type_}, {element}, {o.width}, {o.rows.access}>{{{where}}}"


def _setup(at: Spelling, node: Node) -> list[str]:
    """Once per kernel, or once per tile in front of everything."""
    match node:
        case st.LoadScalar(ref, dtype, address, once):
            type_, where = pointwise.COMPUTE[dtype], f"{'p.' if once else ''}{at.address(address)}"
            return [f"const {type_} {name(ref)} = from_word<{type_}>(bits(ld_global({where})));"]
        case st.SinkStart(ref, how, dtype, width):
            type_, identity = pointwise.COMPUTE[dtype], at.expression(ir.Identity(how, dtype))
            if not width:
                return [f"{type_} {name(ref)} = {identity};"]
            count = width // 4
            return [f"{type_} {name(ref)}[{count}];", f"for (int i = 0; i < {count}; ++i) {name(ref)}[i] = {identity};"]
        case st.GradientStart(ref, dtype, x, y, shape):
            sizes = f"{x.width}, {y.width}, {shape.blocks}, {shape.all_blocks}, {shape.width}"
            type_ = f"Gradient<{pointwise.OPERAND[dtype]}, {sizes}, kLanes>"
            total, count = f"sum{ref.of}", shape.width // 2
            return [
                f"const {type_} {name(ref)}{{panels.base, panels.base + {y.at}, panels.stride, group * {shape.blocks}}};",
                f"float {total}[{shape.blocks}][{count}];",
                f"for (int m = 0; m < {shape.blocks}; ++m) for (int i = 0; i < {count}; ++i) {total}[m][i] = 0.0f;",
            ]
        case st.PanelSumStart(sums, panel):
            type_ = f"PanelSums<{pointwise.OPERAND[panel.dtype]}, {panel.width}, kLanes>"
            return [
                f"const {type_} {name(sums)}{{panels.base + {panel.at}, panels.stride, group}};",
                f"float sink{sums.of}[2 * {name(sums)}.kRounds] = {{}};",
            ]
        case st.Panel(ref):
            return [f"const {_panel_type(node)} {name(ref)}{{panels.mine() + {node.at}}};"]
        case st.ClearPanel(panel):
            return [f"{_panel_type(panel)}{{panels.mine() + {panel.at}}}.clear(lane, 1 + group);"]
        case st.Image(ref, offset):
            return [f"const Image {name(ref)} = Image::at(scratch + {offset});"]
        case st.AxisIndices(extents):
            return _axes(extents)
        case st.SeenBlocks():
            return [seen_blocks(at, node)]
        case st.RowAddresses():
            return _addresses(at, node)
    return []


def seen_blocks(at: Spelling, node: st.SeenBlocks) -> str:
    """Consumers and the loader know the first and the last row of the batch that the lanes of the CTA have."""
    low, high = (("false", 0) if bound is None else ("true", bound) for bound in (node.low, node.high))
    template = f"{node.inner}, {node.extent}, {node.step}, {low[0]}, {low[1]}, {high[0]}, {high[1]}"
    rows = f"rows_at.first, rows_at.last, {node.count}"
    if node.shift is None:
        return f"const SeenBlocks {name(node.ref)} = SeenBlocks::of<{template}>({rows});"
    guard = f"SeenBlocks::k{node.guard.capitalize()}, {node.size}"
    number = f"from_word<i32>(bits(ld_global(p.{at.address(node.shift)})))"
    return f"const SeenBlocks {name(node.ref)} = SeenBlocks::shifted<{template}, {guard}>({rows}, {node.sign}, {number});"


def _panel_type(panel: st.Panel) -> str:
    return f"Panel<{pointwise.OPERAND[panel.dtype]}, {panel.width}>"


def _axes(extents: tuple[int, ...]) -> list[str]:
    """The index along each stream axis of the thread's two rows: the row in mixed radix, the last axis fastest."""
    if len(extents) == 1:
        return ["const i64 axis0[2] = {row[0], row[1]};"]
    found, inner = [], 1
    for a in reversed(range(len(extents))):
        text = [f"row[{h}] / {inner}ll % {extents[a]}ll" for h in range(2)]
        found.append(f"const i64 axis{a}[2] = {{{text[0]}, {text[1]}}};")
        inner *= extents[a]
    return found


def _addresses(at: Spelling, node: st.RowAddresses) -> list[str]:
    row, k = f"{name(node.ref)}_row", node.ref.of
    if node.staged:
        return [f"const u8* const {row}[2] = {{staged{k}.row(n, lane.row), staged{k}.row(n, lane.row + 8)}};"]
    const, byte = ("const ", "const u8") if node.ref.kind == "in" else ("", "u8")
    offset = " + ".join(f"axis{axis}[h] * {stride}ll" for axis, stride in node.strides) or "0"
    return [
        f"{const}void* {row}[2];",
        *each_row(f"{row}[h] = static_cast<{byte}*>({at.constant(node.array)}) + (valid[h] ? {offset} : 0);"),
    ]


_KINDS = (_loops, _rows, _queues, _segments, _products, print_products.lines, _setup)
