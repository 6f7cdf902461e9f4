"""The functions of a kind of stages as C++: what its consumers set up, loop over and finish, and what its loader brings.

Comes in: a ``Kind``. Goes out: C++. Nothing is decided here.
"""

from __future__ import annotations

from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import pointwise, print_stage
from kitsune_jax.targets.cuda.device_ir import Node
from kitsune_jax.targets.cuda.frame_ir import Consumer, LoadBlocks, LoadResident, LoadStreamed, Result
from kitsune_jax.targets.cuda.print_loops import Spelling, name
from kitsune_jax.targets.cuda.segment_ir import TopsStart
from kitsune_jax.targets.cuda.sharing import Kind


def functions(program: TileProgram, kind: Kind) -> tuple[str, str]:
    """The consumers' function and the loader's."""
    spelling = Spelling(frozenset((c.name, c.key) for c in kind.fields))
    many = "Stages" if len(kind.stages) > 1 else "Stage"
    title = ", ".join(program.stages[s].name for s in kind.stages)
    comment = f"// {many} {', '.join(map(str, kind.stages))}: {title}\n"
    common = "const Params& p, Header& header, u8* shared, "
    arguments = f"{common}Share share, u32 group, u32 instance, u32 slab"
    consume = _function(f"consume{kind.number}", arguments, kind, _consumer(spelling, kind.code.consumer))
    load = _function(f"load{kind.number}", f"{common}Share share, u32 slab", kind, _loader(spelling, kind.code.loader))
    return comment + consume, load


def _function(title: str, arguments: str, kind: Kind, lines: list[str]) -> str:
    at = f", const Place{kind.number}& at" if kind.fields else ""
    body = ["(void)at;", *lines] if at and not any("at." in line for line in lines) else lines
    return "\n".join([f"KITSUNE_DEVICE void {title}({arguments}{at}) {{", *(f"  {line}" for line in body), "}\n"])


# -- consumers


def _consumer(at: Spelling, code: Consumer) -> list[str]:
    mine = "with_own_rows" if code.loop.own_rows else "mine"
    lines = [f"const Lane lane = Lane::{mine}();", "(void)slab, (void)shared, (void)share, (void)instance;"]
    worker = "instance * kLanes + group" if code.ctas else "share.block * kLanes + group"
    if code.loop.own_rows:
        worker = "group * share.blocks + share.block"
    lines += [f"const u32 worker = {worker};", _workers(code.ctas)]
    for node in code.setup:
        lines += _setup(at, node) or print_stage.lines(at, [node])
    lines += _tile_loop(at, code.loop)
    finish = [line for node in code.finish for line in _finish(at, node, "instance" if code.ctas else "share.block")]
    return [*lines, *(["finishing();", *finish] if finish else [])]


def _workers(ctas: int) -> str:
    """The warpgroups that share out the tiles: fewer than were planned where the device at hand holds fewer instances."""
    return f"const u32 workers = {f'share.blocks / {ctas}' if ctas else 'share.blocks'} * kLanes;"


def _setup(at: Spelling, node: Node) -> list[str]:
    match node:
        case frame.LaneScratch():
            return [f"u8* const scratch = {_lane(at, node)};"]
        case frame.ScratchRows(offset, words):
            return [f"const Scratch rows = Scratch::at(scratch + {offset}, {words});"]
        case frame.PanelMemory(lanes, offset):
            behind = f" + {offset}" if offset else ""
            return [f"const Panels panels{{shared + {at.constant(lanes.at)}{behind}, {lanes.bytes}, group}};"]
        case frame.SegmentMemory(start, result, offset):
            template = f"{start.how}, {pointwise.COMPUTE[start.dtype]}, {pointwise.ELEMENT[result.dtype]}, {start.width}"
            where = f"reinterpret_cast<u32*>(scratch + {offset}), {at.constant(result.out)}, {start.columns}"
            ends = f"{_partial(at, result)}, workers, worker, 1 + group"
            if start.rows:
                type_ = f"Table<{template}, {start.rows}>"
                return [
                    f"const {type_} {name(start.ref)}{{{where}, {ends}}};",
                    f"static_assert({type_}::kBytes == {start.bytes});",
                    f"{name(start.ref)}.clear();",
                ]
            if start.tops is not None:
                tops, element = start.tops, pointwise.ELEMENT[result.dtype]
                each, finite = start.columns // tops.columns, "true" if tops.finite else "false"
                type_ = f"OnlineSegments<{element}, {start.width}, {tops.columns}, {each}, {finite}>"
                return [
                    f"{type_} {name(start.ref)}{{{{{where}, {ends}, {{}}}}, {name(tops.ref)}, {{}}}};",
                    f"static_assert({type_}::kBytes == {start.bytes});",
                ]
            type_ = f"Segments<{template}>"
            return [
                f"{type_} {name(start.ref)}{{{where}, {ends}, {{}}}};",
                f"static_assert({type_}::kBytes == {start.bytes});",
            ]
        case TopsStart(ref, columns, offset):
            type_ = f"RunTops<{columns}>"
            return [
                f"{type_} {name(ref)}{{reinterpret_cast<u32*>(scratch + {offset})}};",
                f"static_assert({type_}::kBytes == {node.bytes});",
            ]
        case frame.ClusterRing(ref, ring, vectors, depth, slots, writers, readers):
            entry = depth * vectors * 128 * 16
            where = f"reinterpret_cast<U4*>(shared + {at.constant(slots)} + group * {entry})"
            ends = f"{at.constant(writers)}, {at.constant(readers)}, 1 + group"
            return [f"const ClusterQueue<{vectors}, {depth}> {name(ref)}{{&{at.constant(ring)}[group], {where}, {ends}}};"]
        case frame.ExchangeRing(ring, vectors, depth, offset, ctas):
            all_ctas, x = f"{(1 << ctas) - 1}u", name(ring)
            ends = f"reinterpret_cast<U4*>(scratch + {offset}), {all_ctas}, {all_ctas}, 1 + group"
            return [f"const ClusterQueue<{vectors}, {depth}> {x}{{&header.{x}[group], {ends}}};", f"u32 n_{x} = 0;"]
        case frame.L2Ring(ref, vectors, counters, slots, depth, writers, readers):
            where = f"p.zeroed() + {at.constant(counters)}, p.workspace + {at.constant(slots)}"
            ends = f"{at.constant(depth)}, {at.constant(writers)}, {at.constant(readers)}, instance * kLanes + group, 1 + group"
            return [f"const auto {name(ref)} = l2_queue<{vectors}>({where}, {ends});"]
        case frame.StagedArray(ref, _, _, source, lanes, offset, number):
            where = f"static_cast<const u8*>({at.constant(source)}), {_lane(at, lanes)} + {offset}, header.staged[{number}][group]"
            return [f"const {_staged_type(node)} {name(ref)}{{{where}}};"]
        case frame.WeightRing(header_bytes):
            return [f"StreamedWeights<Weights> weights{{Weights{{&header.weights, shared + {header_bytes}}}}};"]
        case frame.AwaitWeights():
            return ["mbar_wait(header.resident, 0);"]
    return []


def _lane(at: Spelling, lanes: frame.LaneScratch) -> str:
    return f"shared + {at.constant(lanes.at)} + group * {lanes.bytes}"


def _staged_type(node: frame.StagedArray) -> str:
    return f"StagedRows<Element<{pointwise.ELEMENT[node.dtype]}>::Bits, {node.columns}>"


def _tile_loop(at: Spelling, loop: frame.TileLoop) -> list[str]:
    # A lane's own tiles are counted without a register for their number.
    lines, more, tile = list[str](), "n * workers + worker < kTiles", "static_cast<i64>(n) * workers + worker"
    first, following = "worker", "(tile + workers)"
    if loop.uniform or loop.consecutive:
        lines.append("const u32 rounds = rounds_of(workers, kTiles);")
    if loop.consecutive:
        more, tile = "n < rounds && worker * rounds + n < kTiles", "static_cast<i64>(worker) * rounds + n"
        first, following = "static_cast<i64>(worker) * rounds", "(n + 1 < rounds ? tile + 1 : kTiles)"
    if loop.uniform:
        more = "n < rounds"
    staged = [name(s.ref) for s in loop.staged]
    lines += [f"{s}.fetch(lane, 0, {first}, kRows);" for s in staged]
    lines += (
        ["(void)workers, (void)worker;", *_ROUNDS] if loop.batches else ["KITSUNE_NO_UNROLL", f"for (u32 n = 0; {more}; ++n) {{"]
    )
    rows = (_BATCH, *_ROWS_OF_BATCH) if loop.batches else _OWN_ROWS if loop.own_rows else _ROWS_OF_TILE
    body = [*([] if loop.batches else [f"const i64 tile = {tile};"]), *rows, "(void)valid;"]
    apart = "kOwnRows / 2" if loop.own_rows else "8"
    if loop.order is None:
        body.append(f"const i64 row[2] = {{first_row, first_row + {apart}}};")
    else:
        order = at.constant(loop.order)
        body.append(f"const i64 row[2] = {{row_of({order}, first_row, valid[0]), row_of({order}, first_row + {apart}, valid[1])}};")
    if staged:
        body.append(f"{_staged_type(loop.staged[0])}::turn(1 + group);")
    body += [f"{s}.fetch(lane, n + 1, {following}, kRows);" for s in staged]
    body += [f"{s}.wait(n, tile, kRows);" for s in staged]
    if loop.prefetched:
        fetches = [f"  prefetch_tile({at.constant(array)}, next_row, kRows, {size});" for array, size in loop.prefetched]
        next_row = f"const i64 next_row = {following} * kTileRows;"
        body += ["if (lane.thread == 0) {", f"  {next_row}", *fetches, "}"]
    if loop.vectors:
        body.append("const float* const vectors = opaque(p.vectors);")
    body += print_stage.lines(at, loop.body)
    return [*lines, *(f"  {line}" for line in body), "}"]


_ROWS_OF_TILE = (
    "const i64 first_row = tile * kTileRows + lane.row;",
    "const bool valid[2] = {first_row < kRows, first_row + 8 < kRows};",
)
_OWN_ROWS = (
    "const i64 first_row = tile * kOwnRows + lane.row;",
    "const bool valid[2] = {first_row < kRows, first_row + kOwnRows / 2 < kRows};",
)
_ROUNDS = (
    "KITSUNE_NO_UNROLL",
    "for (u32 n = 0, tile; (tile = first_tile<kLanes, kTiles, kBatchTiles, kTogether>(share, n)) < kTiles; ++n) {",
)
_BATCH = "const BatchRows rows_at = BatchRows::of<kLanes, kBatchTiles>(tile, kBatchRows);"
_ROWS_OF_BATCH = (
    "const i64 of_batch = rows_at.first + group * kTileRows + lane.row;",
    "const i64 first_row = rows_at.batch * kBatchRows + of_batch;",
    "const bool valid[2] = {of_batch < kBatchRows, of_batch + 8 < kBatchRows};",
)


# -- partial sums


def _finish(at: Spelling, node: Node, part: str) -> list[str]:
    match node:
        case frame.FinishSinks(arrived, sinks, segments, tables):
            counter = f"reinterpret_cast<u32*>(p.zeroed() + {at.constant(arrived)})"
            lines = [f"const Finish finish{{{counter}, &header.flags[group], workers, worker, 1 + group}};"]
            for sink, result, _ in sinks:
                what = f"{'true' if sink.quad else 'false'}" if not sink.width else f"{sink.width}"
                lane = "" if not sink.width else "lane, "
                lines.append(f"store_partial<{sink.how}, {what}>({_partial(at, result)}, finish, {lane}{name(sink.ref)});")
            lines += [f"{name(ref)}.store_partial();" for ref in segments]
            for ref, groups in tables:
                lines.append(f"{name(ref)}.store_partial(p.zeroed() + {at.constant(groups)}, &header.flags[group]);")
            lines.append("if (finish.last()) {")
            lines += [f"  {name(ref)}.combine();" for ref in (*segments, *(ref for ref, _ in tables))]
            for sink, result, columns in sinks:
                template = f"{sink.how}, {pointwise.COMPUTE[sink.dtype]}, {pointwise.ELEMENT[result.dtype]}"
                what = f"{at.constant(result.out)}, {_partial(at, result, 'const ')}, finish, {columns}, {sink.width or 1}"
                lines.append(f"  combine<{template}>({what});")
            return [*lines, "}"]
        case frame.FinishGradients():
            return _finish_gradients(at, node, part)
    return print_stage.lines(at, [node])


def _partial(at: Spelling, result: Result, const: str = "") -> str:
    return f"reinterpret_cast<{const}u32*>(p.workspace + {at.constant(result.partial)})"


def _finish_gradients(at: Spelling, node: frame.FinishGradients, part: str) -> list[str]:
    """Each lane's rows of the stage's weight gradients: stored, and added up by the lane that comes last of those with the same."""
    arrived = f"reinterpret_cast<u32*>(p.zeroed() + {at.constant(node.arrived)} + (slab * kLanes + group) * 128)"
    lines = ["{", f"  const Finish finish{{{arrived}, &header.flags[group], workers / kLanes, {part}, 1 + group}};"]
    for g, result, sums in node.gradients:
        k, words = g.gradient.of, g.shape.words
        lines.append(f"  u32* const partial{k} = {_partial(at, result)} + slab * {node.parts * words};")
        lines.append(f"  {name(g.gradient)}.store(partial{k} + static_cast<i64>(finish.worker) * {words}, lane, sum{k});")
        for total, into in sums:
            n, words = total.sums.of, total.panel.width
            lines.append(f"  u32* const partial{n} = {_partial(at, into)} + slab * {node.parts * words};")
            lines.append(f"  {name(total.sums)}.store(partial{n} + finish.worker * {words}, sink{n});")
    lines.append("  if (finish.last()) {")
    for g, result, sums in node.gradients:
        k, shape = g.gradient.of, g.shape
        pitch = shape.rows if shape.swapped else shape.columns * node.split
        sizes = f"{shape.blocks}, {shape.all_blocks}, {shape.width}"
        template = f"{pointwise.ELEMENT[result.dtype]}, {'true' if shape.swapped else 'false'}, {sizes}"
        where = f"{shape.rows}, {shape.columns}, static_cast<int>(slab) * {shape.columns}, {pitch}"
        what = f"{at.constant(result.out)}, partial{k}, finish.workers, {name(g.gradient)}.first, {where}"
        lines.append(f"    combine_gradient<{template}>({what});")
        lines += [f"    {_combine_columns(at, total, into, node.split)}" for total, into in sums]
    return [*lines, "  }", "}"]


def _combine_columns(at: Spelling, total: frame.PanelSumStart, result: Result, split: int) -> str:
    out, k = at.constant(result.out), total.sums.of
    if total.slabs and split > 1:
        out = f"static_cast<u8*>({out}) + slab * {total.columns * pointwise.ITEM_SIZE[result.dtype]}"
    element = pointwise.ELEMENT[result.dtype]
    combine = f"{name(total.sums)}.combine<{element}>({out}, partial{k}, finish.workers, {total.columns});"
    # Where the stage is split by the other operand, all of its CTAs have the same sums.
    return combine if total.slabs or split == 1 else f"if (slab == 0) {combine}"


# -- loader


def _loader(at: Spelling, code: LoadResident | LoadStreamed | LoadBlocks) -> list[str]:
    match code:
        case LoadResident():
            lines = _resident(at, code)
        case LoadStreamed():
            lines = _streamed(code)
        case LoadBlocks():
            lines = _blocks(at, code)
    return ["(void)slab, (void)p, (void)header, (void)shared, (void)share;", *lines]


def _resident(at: Spelling, code: LoadResident) -> list[str]:
    if not code.fetches:
        return []
    lines = [f"expect_resident(header.resident, {sum(f.bytes for f in code.fetches)});"]
    for f in code.fetches:
        source = f"p.weights{f.group} + {at.constant(f.source)}{f' + slab * {f.bytes}' if f.slabs else ''}"
        lines.append(f"fetch_resident(shared + {at.constant(f.to)}, {source}, {f.bytes}, header.resident);")
    return [*lines, "finish_resident(header.resident);"]


def _blocks(at: Spelling, code: LoadBlocks) -> list[str]:
    batch = "0"
    for inner, extent in code.axes:
        batch = f"({batch} * {extent} + rows_at.batch / {inner} % {extent})"
    lines = [
        f"const Weights weights{{&header.weights, shared + {code.ring.header_bytes}}};",
        "Weights::At next;",
        *_ROUNDS,
        f"  {_BATCH}",
    ]
    lines += [f"  {print_stage.seen_blocks(at, node)}" for node in code.seen]
    lines += [f"  const u8* const of{k} = p.weights{k} + static_cast<i64>({batch}) * {size}ll;" for k, size in code.groups]
    for part in code.parts:
        lines += [f"  {line}" for line in _part(part)]
    return [*lines, "}"]


def _part(part: frame.Blocks) -> list[str]:
    """Iterations that follow each other lie one behind the other."""
    calls = [f"stream_weights(weights, next, from{group}, {chunks}, {size});" for group, chunks, size in part.runs]
    if part.seen is None:
        starts = [f"const u8* from{k} = of{k} + {first}ll;" for k, first, _ in part.places]
        count, head = str(part.count), list[str]()
    else:
        seen = f"{name(part.seen)}.{part.which}"
        starts, count = [], f"{seen}_count()"
        head = [f"const u8* from{k} = of{k} + {first}ll + {seen}_block(i) * {size}ll;" for k, first, size in part.places]
    if count == "1":
        return ["{", *(f"  {line}" for line in (*starts, *calls)), "}"]
    loop = ["KITSUNE_NO_UNROLL", f"for (i32 i = 0; i < {count}; ++i) {{", *(f"  {line}" for line in (*head, *calls)), "}"]
    return ["{", *(f"  {line}" for line in (*starts, *loop)), "}"]


def _streamed(code: LoadStreamed) -> list[str]:
    lines = [
        f"const Weights weights{{&header.weights, shared + {code.ring.header_bytes}}};",
        "Weights::At next;",
        _workers(code.ctas),
        "const u32 rounds = rounds_of(workers, kTiles);",
        "KITSUNE_NO_UNROLL",
        "for (u32 round = 0; round < rounds; ++round) {",
    ]
    lines += [f"  const u8* from{k} = p.weights{k};" for k in sorted({group for group, _, _ in code.runs})]
    lines += [f"  stream_weights(weights, next, from{group}, {chunks}, {size});" for group, chunks, size in code.runs]
    return [*lines, "}"]
