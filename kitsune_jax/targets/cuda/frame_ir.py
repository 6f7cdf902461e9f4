"""The device IR around the tiles of a stage (setup, loop, finish, loader), and the layout of streamed arrays.

Comes in: a tile program's arrays and places that ``layout.py`` chose. Goes out: nodes that print C++, like those of ``ir.py``, and
the widths of accesses to arrays. Invariant: a node decides nothing when it is printed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import Array, ArrayType, TileProgram, TileType
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.ir import Address, Constant, Identity, Node, Ref, Spelling, flag, indented
from kitsune_jax.targets.cuda.tiles import GradientShape

# --- The setup of a stage ---------------------------------------------------------------------------------------------------------

_SEGMENTS = 10  # registers of a sink by sorted indices: addresses and the open segment


class Panel(Node):
    """A panel of ``width`` columns at byte ``at`` of the lane's panels."""

    ref: Ref
    dtype: str
    width: int
    at: int

    @property
    def type(self) -> str:
        return f"Panel<{pointwise.OPERAND[self.dtype]}, {self.width}>"

    code = ("const {type} {ref}{{panels.mine() + {at}}};",)


class ClearPanel(Node):
    panel: Panel

    code = ("{panel.type}{{panels.mine() + {panel.at}}}.clear(lane, 1 + group);",)


class GradientStart(Node):
    gradient: Ref
    dtype: str
    x: Panel
    y: Panel
    shape: GradientShape

    def lines(self, at: Spelling) -> list[str]:
        blocks, width, total = self.shape.blocks, self.shape.width, f"sum{self.gradient.of}"
        sizes = f"{self.x.width}, {self.y.width}, {blocks}, {self.shape.all_blocks}, {width}"
        type_ = f"Gradient<{pointwise.OPERAND[self.dtype]}, {sizes}, kLanes>"
        where = f"panels.base, panels.base + {self.y.at}, panels.stride, group * {blocks}"
        return [
            f"const {type_} {at.name(self.gradient)}{{{where}}};",
            f"float {total}[{blocks}][{width // 2}];",
            f"for (int m = 0; m < {blocks}; ++m) for (int i = 0; i < {width // 2}; ++i) {total}[m][i] = 0.0f;",
        ]

    @property
    def held(self) -> int:
        return self.shape.registers


class PanelSumStart(Node):
    """Declare the sum over the rows of a ``panel`` of ``gradient``. ``columns``: of the panel's operand, or of a slab of it if
    ``slabs``."""

    sums: Ref
    panel: Panel
    columns: int
    slabs: bool
    gradient: Ref

    code = (
        "const PanelSums<{panel.dtype:operand}, {panel.width}, kLanes> {sums}{{panels.base + {panel.at}, panels.stride, group}};",
        "float sink{sums.of}[2 * {sums}.kRounds] = {{}};",
    )

    @property
    def held(self) -> int:
        return 2


class LoadScalar(Node):
    """``once``: load before the tiles, otherwise for every layer."""

    ref: Ref
    dtype: str
    address: Address
    once: bool

    code = ("const {dtype:type} {ref} = from_word<{dtype:type}>(bits(ld_global({once:p.|}{address})));",)


class SinkStart(Node):
    """``width``: columns, 0 for a scalar; ``quad``: the threads of a quad hold different parts; ``spread``: the threads of a warp
    hold different columns (``fold_rows`` of sink.h)."""

    ref: Ref
    how: str
    dtype: str
    width: int
    quad: bool
    spread: bool = False

    def lines(self, at: Spelling) -> list[str]:
        sink, type_, identity = at.name(self.ref), pointwise.COMPUTE[self.dtype], Identity(self.how, self.dtype).text(at)
        if not self.width:
            return [f"{type_} {sink} = {identity};"]
        return [f"{type_} {sink}[{self.held}];", f"for (int i = 0; i < {self.held}; ++i) {sink}[i] = {identity};"]

    @property
    def held(self) -> int:
        return self.width // (32 if self.spread else 4) or 1


class Tops(Node):
    """The scaling of a softmax sum by the ``columns`` scores of a row in ``ref``. ``finite``: use 0 for a largest score that is not
    finite."""

    ref: Ref
    columns: int
    finite: bool


class TopsStart(Node):
    """``columns``: scores of a row. ``at``: offset in the lane's memory for segments."""

    ref: Ref
    columns: int
    at: int

    @property
    def bytes(self) -> int:
        return tiles.tops_bytes(self.columns)

    code = (
        "RunTops<{columns}> {ref}{{reinterpret_cast<u32*>(scratch + {at})}};",
        "static_assert(RunTops<{columns}>::kBytes == {bytes});",
    )


# --- Memory and results of a stage ------------------------------------------------------------------------------------------------


class LaneScratch(Node):
    """A lane's ``bytes`` of shared memory; the lanes' parts follow one another from ``at``."""

    at: Constant
    bytes: int

    code = ("u8* const scratch = shared + {at} + group * {bytes};",)


class ScratchRows(Node):
    at: int
    words: int

    code = ("const Scratch rows = Scratch::at(scratch + {at}, {words});",)


class PanelMemory(Node):
    lanes: LaneScratch
    at: int

    code = ("const Panels panels{{shared + {lanes.at}{at: + {at}|}, {lanes.bytes}, group}};",)


class Result(Node):
    """The place of a sink's partial sums, the parameter of its result, and the result's dtype."""

    partial: Constant
    out: Constant
    dtype: str

    @property
    def element(self) -> str:
        return pointwise.ELEMENT[self.dtype]

    def partials(self, at: Spelling, const: str = "") -> str:
        return f"reinterpret_cast<{const}u32*>(p.workspace + {at.constant(self.partial)})"


class SegmentStart(Node):
    """A result with rows of ``columns`` numbers, in tiles of ``width``. ``rows``: of each lane's table if the indices are not
    sorted, else 0. ``tops``: the scaling of a softmax sum. ``at``: offset in the lane's memory for segments, which the layout makes
    one in the lane's memory; it also sets ``result``."""

    ref: Ref
    how: str
    dtype: str
    width: int
    columns: int
    at: int
    rows: int = 0
    tops: Tops | None = None
    result: Result | None = None

    @property
    def bytes(self) -> int:
        """Bytes in the lane's memory."""
        return tiles.table_bytes(self.rows, self.width) if self.rows else tiles.segment_bytes(self.width)

    @property
    def fan_in(self) -> int:
        """Lanes whose partial results are folded into one first."""
        return tiles.FAN_IN if self.rows else tiles.SEGMENTS_FAN_IN

    @property
    def partial_words(self) -> int:
        """Words of the partial result that a lane writes to global memory."""
        tops = self.tops.columns if self.tops else 0
        return self.rows * self.width if self.rows else 2 * (self.width + tops + 1)  # two rows and their segments

    @property
    def held(self) -> int:
        return -(-self.width // 128) * (1 if self.tops is None else 2) + _SEGMENTS

    def lines(self, at: Spelling) -> list[str]:
        assert self.result is not None
        element, name = self.result.element, at.name(self.ref)
        template = f"{self.how}, {pointwise.COMPUTE[self.dtype]}, {element}, {self.width}"
        where = f"reinterpret_cast<u32*>(scratch + {self.at}), {at.constant(self.result.out)}, {self.columns}"
        where += f", {self.result.partials(at)}, workers, worker, 1 + group"
        if self.rows:
            type_ = f"Table<{template}, {self.rows}>"
            made, after = f"const {type_} {name}{{{where}}};", [f"{name}.clear();"]
        elif (tops := self.tops) is not None:
            each = self.columns // tops.columns
            type_ = f"OnlineSegments<{element}, {self.width}, {tops.columns}, {each}, {flag(tops.finite)}>"
            made, after = f"{type_} {name}{{{{{where}, {{}}}}, {at.name(tops.ref)}, {{}}}};", []
        else:
            type_ = f"Segments<{template}>"
            made, after = f"{type_} {name}{{{where}, {{}}}};", []
        return [made, f"static_assert({type_}::kBytes == {self.bytes});", *after]


class ClusterRing(Node):
    """``writers``, ``readers``: masks of the CTAs' ranks. ``stamp``: its number in a timeline, if one is recorded."""

    ref: Ref
    ring: Constant
    vectors: int
    depth: int
    slots: Constant
    writers: Constant
    readers: Constant
    stamp: Constant | None = None

    def lines(self, at: Spelling) -> list[str]:
        entry = self.depth * self.vectors * 128 * 16
        where = f"reinterpret_cast<U4*>(shared + {at.constant(self.slots)} + group * {entry})"
        ends = f"{at.constant(self.writers)}, {at.constant(self.readers)}, 1 + group"
        queue = f"ClusterQueue<{self.vectors}, {self.depth}>{{&{at.constant(self.ring)}[group], {where}, {ends}}}"
        if self.stamp is not None:
            return [f"const auto {at.name(self.ref)} = timed({queue}, {at.constant(self.stamp)});"]
        return [f"const {queue.replace('{', f' {at.name(self.ref)}{{', 1)};"]


class L2Ring(Node):
    """``writers``, ``readers``: numbers of CTAs. ``stamp``: as of ``ClusterRing``."""

    ref: Ref
    vectors: int
    counters: Constant
    slots: Constant
    depth: Constant
    writers: Constant
    readers: Constant
    stamp: Constant | None = None

    def lines(self, at: Spelling) -> list[str]:
        ends = ", ".join(at.constant(c) for c in (self.depth, self.writers, self.readers))
        where = f"p.zeroed() + {at.constant(self.counters)}, p.workspace + {at.constant(self.slots)}"
        queue = f"l2_queue<{self.vectors}>({where}, {ends}, instance * kLanes + group, 1 + group)"
        timed = queue if self.stamp is None else f"timed({queue}, {at.constant(self.stamp)})"
        return [f"const auto {at.name(self.ref)} = {timed};"]


class StagedArray(Node):
    """An array whose tiles are copied through the lane's memory. ``number``: of its barriers in the header."""

    ref: Ref
    dtype: str
    columns: int
    source: Constant
    lanes: LaneScratch
    at: int
    number: int

    @property
    def type(self) -> str:
        return f"StagedRows<Element<{pointwise.ELEMENT[self.dtype]}>::Bits, {self.columns}>"

    code = (
        "const {type} {ref}{{static_cast<const u8*>({source}), "
        "shared + {lanes.at} + group * {lanes.bytes} + {at}, header.staged[{number}][group]}};",
    )


class TileRing(Node):
    """The ring of tiles of inputs: ``depth`` entries of ``bytes`` from byte ``at`` of the CTA's shared memory on. ``arrays``:
    (input or its tensor map, its byte in an entry, bytes of its row, is it in boxes?)."""

    depth: int
    bytes: int
    at: int
    arrays: tuple[tuple[Constant, int, int, bool], ...]

    @property
    def type(self) -> str:
        return f"TileRing<{self.depth}, {self.bytes}, kLanes>"

    code = ("const {type} tiles{{&header.tiles, shared + {at}}};",)


class TileEntry(Node):
    """``call``: rd_acquire or rd_release, of the entry of the lane's tile."""

    call: str

    code = ("tiles.{call}(entry);",)


class RingRows(Node):
    """The addresses of the thread's rows of an input in the entry of the lane's tile, at byte ``at`` of it."""

    ref: Ref
    at: int
    bytes: int

    code = (
        "const u8* const {ref}_row[2] = {{tiles.row(entry, {at}, lane.row, {bytes}, valid[0]), "
        "tiles.row(entry, {at}, lane.row + 8, {bytes}, valid[1])}};",
    )


class RingBoxes(Node):
    """The address of an input's boxes at byte ``at`` of the entry of the lane's tile, and those of the thread's rows there."""

    ref: Ref
    at: int

    code = (
        "const u8* const {ref}_boxes = tiles.entry(entry) + {at};",
        "const u8* const {ref}_row[2] = {{tiles.box_row(entry, {at}, lane.row), tiles.box_row(entry, {at}, lane.row + 8)}};",
        "(void){ref}_row;",
    )


class WeightRing(Node):
    """The ring of streamed weights, after a header of ``header_bytes``."""

    header_bytes: int

    code = ("StreamedWeights<Weights> weights{{Weights{{&header.weights, shared + {header_bytes}}}}};",)

    def of_loader(self) -> list[str]:
        return [f"const Weights weights{{&header.weights, shared + {self.header_bytes}}};", "Weights::At next;"]


class AwaitWeights(Node):
    """Wait for the resident weights. ``stamped``: and record how long."""

    stamped: bool = False

    def lines(self, at: Spelling) -> list[str]:
        wait = "mbar_wait(header.resident, 0);"
        return [wait] if not self.stamped else ["{", "  const u32 begin = begin_wait();", f"  {wait}", f"  {_END_RESIDENT}", "}"]


_END_RESIDENT = "end_wait(Stamp::kResident, 0, begin);"


# --- Consumers --------------------------------------------------------------------------------------------------------------------

_ROUNDS = (
    "KITSUNE_NO_UNROLL",
    "for (u32 n = 0, tile; (tile = first_tile<kLanes, kTiles, kBatchTiles, kTogether>(share, n)) < kTiles; ++n) {",
)
_BATCH = "const BatchRows rows_at = BatchRows::of<kLanes, kBatchTiles>(tile, kBatchRows);"


class TileStamp(Node):
    """``stage``: its number in a timeline. ``records``: the most that a tile makes."""

    stage: Constant
    records: int


class TileLoop(Node):
    """``uniform``: every lane takes part in every round. ``consecutive``: a lane's tiles are consecutive in the stream, not
    strided. ``order``: the array with the element that each row of the stream reads. ``prefetched``: (input, bytes of a row) to
    prefetch for the next tile. ``batches``: tiles keep within a batch. ``tile_rows``: 64, 256 where a thread has whole rows
    (``stage/facts.py``), or 32 where it has one row, not two. ``stamp``: records each tile in a timeline. ``ring``: tiles come
    through a ring."""

    uniform: bool
    consecutive: bool
    order: Constant | None
    staged: tuple[StagedArray, ...]
    prefetched: tuple[tuple[Constant, int], ...]
    vectors: bool
    batches: bool
    tile_rows: int
    body: tuple[Node, ...]
    stamp: TileStamp | None = None
    ring: bool = False

    @property
    def scalar_rows(self) -> bool:
        return self.tile_rows > tiles.TILE_ROWS

    @property
    def one_row(self) -> bool:
        return self.tile_rows < tiles.TILE_ROWS

    def lines(self, at: Spelling) -> list[str]:
        # Computing a lane's tile from ``n`` needs no register for its number.
        lines, more, tile = list[str](), "n * workers + worker < kTiles", "static_cast<i64>(n) * workers + worker"
        first, following = "worker", "(tile + workers)"
        tile_rows, apart = ("kOwnRows", "kOwnRows / 2") if self.scalar_rows else ("kTileRows", "8")
        if self.one_row:
            tile_rows, apart = "kTileRows / 2", "0"
        if self.uniform or self.consecutive:
            lines.append("const u32 rounds = rounds_of(workers, kTiles);")
        if self.consecutive:
            more, tile = "n < rounds && worker * rounds + n < kTiles", "static_cast<i64>(worker) * rounds + n"
            first, following = "static_cast<i64>(worker) * rounds", "(n + 1 < rounds ? tile + 1 : kTiles)"
        if self.uniform:
            more = "n < rounds"
        staged = [at.name(s.ref) for s in self.staged]
        lines += [f"{s}.fetch(lane, 0, {first}, kRows);" for s in staged]
        if self.batches:
            lines += ["(void)workers, (void)worker;", *_ROUNDS]
            body = [_BATCH, "const i64 of_batch = rows_at.first + group * kTileRows + lane.row;"]
            body.append("const i64 first_row = rows_at.batch * kBatchRows + of_batch;")
            body.append("const bool valid[2] = {of_batch < kBatchRows, of_batch + 8 < kBatchRows};")
        else:
            lines += ["KITSUNE_NO_UNROLL", f"for (u32 n = 0; {more}; ++n) {{"]
            body = [f"const i64 tile = {tile};", f"const i64 first_row = tile * {tile_rows} + lane.row;"]
            second = "false" if self.one_row else f"first_row + {apart} < kRows"
            body.append(f"const bool valid[2] = {{first_row < kRows, {second}}};")
        rows = ["first_row", f"first_row + {apart}"]
        if self.order is not None:
            rows = [f"row_of({at.constant(self.order)}, {row}, valid[{h}])" for h, row in enumerate(rows)]
        body += ["(void)valid;", f"const i64 row[2] = {{{', '.join(rows)}}};"]
        if self.ring:
            body.append("const u32 entry = n * kLanes + group;")
        if staged:
            body.append(f"{self.staged[0].type}::turn(1 + group);")
        body += [f"{s}.fetch(lane, n + 1, {following}, kRows);" for s in staged]
        body += [f"{s}.wait(n, tile, kRows);" for s in staged]
        if self.prefetched:
            fetches = [f"  prefetch_tile({at.constant(array)}, next_row, kRows, {size});" for array, size in self.prefetched]
            next_row = f"  const i64 next_row = {following} * kTileRows;"
            body += ["if (lane.thread == 0) {", next_row, *fetches, "}"]
        if self.vectors:
            body.append("const float* const vectors = opaque(p.vectors);")
        body += at.lines(self.body)
        if self.stamp is not None:
            number = "static_cast<i64>(tile) + group" if self.batches else "tile"
            end = f"end_tile({at.constant(self.stamp.stage)}, {number}, kTiles);"
            body = [f"begin_tile({self.stamp.records});", *body, end]
        return [*lines, *indented(body), "}"]


class FinishSinks(Node):
    """``sinks``: each with its result and columns. ``segments``: sinks by indices, each with the counters of groups of lanes."""

    arrived: Constant
    sinks: tuple[tuple[SinkStart, Result, int], ...]
    segments: tuple[tuple[Ref, Constant], ...]

    def lines(self, at: Spelling) -> list[str]:
        counter = f"reinterpret_cast<u32*>(p.zeroed() + {at.constant(self.arrived)})"
        lines = [f"const Finish finish{{{counter}, &header.flags[group], workers, worker, 1 + group}};"]
        for sink, result, _ in self.sinks:
            what, lane = (str(sink.width), "lane, ") if sink.width else (flag(sink.quad), "")
            lines.append(f"store_partial<{sink.how}, {what}>({result.partials(at)}, finish, {lane}{at.name(sink.ref)});")
        for ref, groups in self.segments:
            lines.append(f"{at.name(ref)}.store_partial(p.zeroed() + {at.constant(groups)}, &header.flags[group]);")
        lines.append("if (finish.last()) {")
        lines += [f"  {at.name(ref)}.combine();" for ref, _ in self.segments]
        for sink, result, columns in self.sinks:
            template = f"{sink.how}, {pointwise.COMPUTE[sink.dtype]}, {result.element}"
            what = f"{at.constant(result.out)}, {result.partials(at, 'const ')}, finish, {columns}, {sink.width or 1}"
            lines.append(f"  combine<{template}>({what});")
        return [*lines, "}"]


class FinishGradients(Node):
    """Store each lane's rows of the weight gradients; the last lane to arrive with the same rows adds them up. ``parts``: CTAs with
    a partial sum; ``spatial``: a part is of an instance, not of a CTA; ``split``: of the stage. ``gradients``: each with the sums
    over its panels."""

    arrived: Constant
    parts: int
    spatial: bool
    split: int
    gradients: tuple[tuple[GradientStart, Result, tuple[tuple[PanelSumStart, Result], ...]], ...]

    def lines(self, at: Spelling) -> list[str]:
        arrived = f"reinterpret_cast<u32*>(p.zeroed() + {at.constant(self.arrived)} + (slab * kLanes + group) * 128)"
        part = "instance" if self.spatial else "share.block"
        lines = ["{", f"  const Finish finish{{{arrived}, &header.flags[group], workers / kLanes, {part}, 1 + group}};"]
        for g, result, sums in self.gradients:
            k, words = g.gradient.of, g.shape.words
            lines.append(f"  u32* const partial{k} = {result.partials(at)} + slab * {self.parts * words};")
            lines.append(f"  {at.name(g.gradient)}.store(partial{k} + static_cast<i64>(finish.worker) * {words}, lane, sum{k});")
            for total, into in sums:
                n, words = total.sums.of, total.panel.width
                lines.append(f"  u32* const partial{n} = {into.partials(at)} + slab * {self.parts * words};")
                lines.append(f"  {at.name(total.sums)}.store(partial{n} + finish.worker * {words}, sink{n});")
        lines.append("  if (finish.last()) {")
        for g, result, sums in self.gradients:
            shape = g.shape
            pitch = shape.rows if shape.swapped else shape.columns * self.split
            template = f"{result.element}, {flag(shape.swapped)}, {shape.blocks}, {shape.all_blocks}, {shape.width}"
            where = f"{shape.rows}, {shape.columns}, static_cast<int>(slab) * {shape.columns}, {pitch}"
            what = f"{at.constant(result.out)}, partial{g.gradient.of}, finish.workers, {at.name(g.gradient)}.first, {where}"
            lines.append(f"    combine_gradient<{template}>({what});")
            lines += [f"    {self._combine_columns(at, total, into)}" for total, into in sums]
        return [*lines, "  }", "}"]

    def _combine_columns(self, at: Spelling, total: PanelSumStart, result: Result) -> str:
        out, slabs = at.constant(result.out), total.slabs and self.split > 1
        if slabs:
            out = f"static_cast<u8*>({out}) + slab * {total.columns * pointwise.ITEM_SIZE[result.dtype]}"
        what = f"{out}, partial{total.sums.of}, finish.workers, {total.columns}"
        combine = f"{at.name(total.sums)}.combine<{result.element}>({what});"
        # If the stage is split by the other operand, all of its CTAs have the same sums.
        return combine if slabs or self.split == 1 else f"if (slab == 0) {combine}"


def _workers(ctas: int) -> str:
    """Declares the number of warpgroups that share the tiles: fewer than planned where the device holds fewer instances."""
    return f"const u32 workers = {f'share.blocks / {ctas}' if ctas else 'share.blocks'} * kLanes;"


class Consumer(Node):
    """``setup``: before the tiles; ``ctas``: of an instance, or 0 where each CTA takes tiles by itself."""

    setup: tuple[Node, ...]
    ctas: int
    loop: TileLoop
    finish: tuple[Node, ...]

    def lines(self, at: Spelling) -> list[str]:
        rows, worker = "mine", "instance * kLanes + group" if self.ctas else "share.block * kLanes + group"
        if self.loop.scalar_rows:
            rows, worker = "with_own_rows", "group * share.blocks + share.block"
        elif self.loop.one_row:
            rows = "with_one_row"
        lines = [f"const Lane lane = Lane::{rows}();", "(void)slab, (void)shared, (void)share, (void)instance;"]
        lines += [f"const u32 worker = {worker};", _workers(self.ctas), *at.lines(self.setup), *self.loop.lines(at)]
        finish = ["finishing();", *at.lines(self.finish)] if self.finish else []
        if finish and (stamp := self.loop.stamp) is not None:
            finish = ["begin_combine();", *finish, f"end_combine({at.constant(stamp.stage)});"]
        return [*lines, *finish]


# --- Loaders ----------------------------------------------------------------------------------------------------------------------


class FetchResident(Node):
    """A copy to shared memory of ``bytes`` of operand ``group`` from ``source``; with ``slabs``, of each CTA's own slab."""

    to: Constant
    group: int
    source: Constant
    bytes: int
    slabs: bool

    code = ("fetch_resident(shared + {to}, p.weights{group} + {source}{slabs: + slab * {bytes}|}, {bytes}, header.resident);",)


class LoadResident(Node):
    fetches: tuple[FetchResident, ...]

    def lines(self, at: Spelling) -> list[str]:
        if not self.fetches:
            return []
        expect = f"expect_resident(header.resident, {sum(f.bytes for f in self.fetches)});"
        return [expect, *at.lines(self.fetches), "finish_resident(header.resident);"]


class LoadStreamed(Node):
    """``runs``: (operand, chunks, bytes of a chunk) in the order of their use, for every round of tiles."""

    ring: WeightRing
    ctas: int
    runs: tuple[tuple[int, int, int], ...]

    def lines(self, at: Spelling) -> list[str]:
        lines = [*self.ring.of_loader(), _workers(self.ctas), "const u32 rounds = rounds_of(workers, kTiles);"]
        lines += ["KITSUNE_NO_UNROLL", "for (u32 round = 0; round < rounds; ++round) {"]
        lines += [f"  const u8* from{k} = p.weights{k};" for k in sorted({group for group, _, _ in self.runs})]
        return [*lines, *(f"  {_stream(*run)}" for run in self.runs), "}"]


def _stream(group: int, chunks: int, size: int, source: str = "from") -> str:
    return f"stream_weights(weights, next, {source}{group}, {chunks}, {size});"


class WeightBlocks(Node):
    """The weights of the ``count`` iterations of a loop, or of no loop (``count`` is 1), which are adjacent in memory. ``places``:
    (operand, offset of the first iteration's within a batch, bytes from one iteration to the next). ``runs``: (operand, chunks,
    bytes of a chunk) of an iteration. ``seen``, ``which``: as in ``CountedLoop``. ``late``: those of ``runs`` that lanes use an
    iteration later, behind the others of the next one."""

    count: int
    places: tuple[tuple[int, int, int], ...]
    runs: tuple[tuple[int, int, int], ...]
    seen: Ref | None
    which: str
    late: tuple[tuple[int, int, int], ...] = ()

    def lines(self, at: Spelling) -> list[str]:
        starts = [f"const u8* from{k} = of{k} + {first}ll" for k, first, _ in self.places]
        calls, count = [_stream(*run) for run in self.runs], str(self.count)
        seen = f"{at.name(self.seen)}.{self.which}" if self.seen is not None else ""
        steps = [f" + {f'{seen}_block(i)' if seen else 'i'} * {size}ll;" for _, _, size in self.places]
        if seen:
            count = f"{seen}_count()"
        if self.late:
            return self._with_late(count, steps)
        if not seen:
            before, inside = [f"{start};" for start in starts], calls
        else:
            before, inside = [], [*map("".join, zip(starts, steps, strict=True)), *calls]
        if count != "1":
            head = ["KITSUNE_NO_UNROLL", f"for (i32 i = 0; i < {count}; ++i) {{"]
            inside = [*head, *indented(inside), "}"]
        return ["{", *indented((*before, *inside)), "}"]

    def _with_late(self, count: str, steps: Sequence[str]) -> list[str]:
        groups = [k for k, _, _ in self.places]
        begin = [f"from{k} = of{k} + {first}ll{step}" for (k, first, _), step in zip(self.places, steps, strict=True)]
        inside = [f"if (i < {count}) {{", *indented((*begin, *(_stream(*run) for run in self.runs))), "}"]
        inside += ["if (i > 0) {", *indented(_stream(*run, "late") for run in self.late), "}"]
        inside += [f"late{k} = from{k};" for k in groups]
        before = [f"const u8 *from{k} = nullptr, *late{k} = nullptr;" for k in groups]
        return [
            "{",
            *indented((*before, "KITSUNE_NO_UNROLL", f"for (i32 i = 0; i <= {count}; ++i) {{", *indented(inside), "}")),
            "}",
        ]


class LoadBlocks(Node):
    """Weights that change from tile to tile. ``groups``: (operand, bytes of a batch); ``axes``: (batches from one index of the axis
    to the next, its extent) of the axes on which the weights depend, outermost first. ``seen``: the blocks that rows see."""

    ring: WeightRing
    groups: tuple[tuple[int, int], ...]
    axes: tuple[tuple[int, int], ...]
    seen: tuple[st.SeenBlocks, ...]
    parts: tuple[WeightBlocks, ...]

    def lines(self, at: Spelling) -> list[str]:
        batch = "0"
        for inner, extent in self.axes:
            batch = f"({batch} * {extent} + rows_at.batch / {inner} % {extent})"
        of = [f"const u8* const of{k} = p.weights{k} + static_cast<i64>({batch}) * {size}ll;" for k, size in self.groups]
        body = [_BATCH, *at.lines(self.seen), *of, *at.lines(self.parts)]
        return [*self.ring.of_loader(), *_ROUNDS, *indented(body), "}"]


class LoadTiles(Node):
    """Fills the ring of tiles. ``uniform``: every lane takes part in every round, one without a tile with the last one of the
    stream, whose rows it does not use; ``consecutive``: as in ``TileLoop``."""

    ring: TileRing
    uniform: bool
    consecutive: bool

    def lines(self, at: Spelling) -> list[str]:
        rows = sum(size for _, _, size, boxed in self.ring.arrays if not boxed)
        boxes = tiles.TILE_ROWS * sum(size for _, _, size, boxed in self.ring.arrays if boxed)
        round_, worker = "static_cast<i64>(i / kLanes)", "(share.block * kLanes + i % kLanes)"
        tile = f"{worker} * static_cast<i64>(rounds) + i / kLanes" if self.consecutive else f"{round_} * workers + {worker}"
        body = [f"const i64 tile = {tile};"]
        if self.uniform:
            body = [f"const i64 own = {tile};", "const i64 tile = own < kTiles ? own : kTiles - 1;"]
        body += [f"const u32 count = tiles.begin(i, tile, kRows, {rows}{f', {boxes}' if boxes else ''});"]
        body += ["if (count == 0) continue;"]
        for array, to, size, boxed in self.ring.arrays:
            of = at.constant(array)
            whole_boxes = f"tiles.fetch_boxes(i, {to}, {of}, tile, {size // 2 // tiles.BOX_COLUMNS});"
            body.append(whole_boxes if boxed else f"tiles.fetch(i, {to}, {of}, tile, count, {size});")
        head = [*self.ring.lines(at), _workers(0), "const u32 rounds = rounds_of(workers, kTiles);"]
        loop = ["KITSUNE_NO_UNROLL", "for (u32 i = 0; i < rounds * kLanes; ++i) {", *indented(body), "}"]
        return ["if (fetches_tiles()) {", *indented((*head, *loop, "return;")), "}"]


class StageCode(Node):
    """``split``: CTAs that run the stage."""

    consumer: Consumer
    loader: LoadResident | LoadStreamed | LoadBlocks
    split: int
    tiles: LoadTiles | None = None


# --- Streamed arrays: how a thread accesses their rows ----------------------------------------------------------------------------

_FEW_ACCESSES = 8  # of a thread to a tile: staging costs a barrier and a wait, which is no less


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The layout of the columns of a row: ``sizes`` and element ``strides`` of its dimensions, outermost first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def n(self) -> int:
        return math.prod(self.sizes)

    @property
    def contiguous(self) -> bool:
        return all(n == 1 or s == d for n, s, d in zip(self.sizes, self.strides, dim_strides(self.sizes), strict=True))


def columns_of(array: ArrayType) -> Columns:
    strides = dim_strides(array.shape)
    return Columns(tuple(array.shape[d] for d in array.dims), tuple(strides[d] for d in array.dims))


def array_bytes(array: ArrayType | Array | TileType) -> int:
    return math.prod(array.shape) * pointwise.ITEM_SIZE[array.dtype]


def row_bytes(array: ArrayType) -> int:
    return columns_of(array).n * pointwise.ITEM_SIZE[array.dtype]


def access_bytes(array: ArrayType) -> int:
    """The widest access to a row: it divides the starts of all pieces of a thread's columns, and the end of the row."""
    columns, size = columns_of(array), pointwise.ITEM_SIZE[array.dtype]
    return contiguous_access(columns.n, array.dtype, *(s * size for s in array.row_strides)) if columns.contiguous else size


def contiguous_access(columns: int, dtype: str, *pitches: int) -> int:
    """``access_bytes`` of contiguous rows of ``columns`` elements of ``dtype``; ``pitches``: bytes between rows."""
    size = pointwise.ITEM_SIZE[dtype]
    return math.gcd(16, tiles.owned(tiles.padded(columns)) * size, columns * size, *pitches)


def has_contiguous_tiles(program: TileProgram, array: ArrayType) -> bool:
    """Is a tile of the array one piece of memory? (Its start is then a multiple of 64 bytes, because a tile has 64 rows.)"""
    columns = columns_of(array)
    return (
        array.streamed
        and not program.batch_axes
        and program.order is None
        and len(program.axes) == 1
        and columns.contiguous
        and array.row_strides == (columns.n,)
    )


def is_staged(program: TileProgram, array: ArrayType) -> bool:
    """Should tiles of the array be copied through shared memory, if there is room, because a thread would need many narrow
    accesses?

    With accesses of 16 bytes there is no gain, and rows of such pitches conflict in the banks of shared memory.
    """
    columns = columns_of(array)
    if array.dtype not in pointwise.ITEM_SIZE or columns.n == 1 or not has_contiguous_tiles(program, array):
        return False
    width, wide = tiles.padded(columns.n), access_bytes(array)
    accesses = 2 * tiles.blocks(width) * tiles.owned(width) * pointwise.ITEM_SIZE[array.dtype] // wide  # of a thread, for a tile
    return wide < 16 and accesses > _FEW_ACCESSES


def is_in_pieces(program: TileProgram, array: ArrayType) -> bool:
    """Are the rows read in pieces of 64 bytes, 16 by each of the four threads that share a row? A tile of them is one piece of
    memory, whose start and size are multiples of 16 bytes."""
    if array.dtype not in pointwise.ITEM_SIZE:
        return False
    return has_contiguous_tiles(program, array) and access_bytes(array) == 16 and row_bytes(array) > 64


def staged_bytes(array: ArrayType) -> int:
    """Shared memory of a lane for a staged array: the current tile and the next."""
    return tiles.aligned(2 * tiles.TILE_ROWS * row_bytes(array), 128)


def rows_of(array: ArrayType, role: str, k: int, staged: bool) -> ir.Rows:
    """The access to the rows of input ("in") or output ("out") ``k``."""
    columns = columns_of(array)
    contiguous = columns.contiguous
    strides = () if contiguous else tuple(zip(reversed(columns.sizes), reversed(columns.strides), strict=True))
    pairs = role == "in" and contiguous and tiles.is_half(array.dtype)
    return ir.Rows(ir.Ref(role, k), array.dtype, columns.n, "kStaged" if staged else str(access_bytes(array)), strides, pairs)


def addresses_of(array: ArrayType, role: str, k: int, staged: bool) -> ir.RowAddresses:
    size = pointwise.ITEM_SIZE[array.dtype]
    strides = tuple((axis, stride * size) for axis, stride in enumerate(array.row_strides) if stride)
    return ir.RowAddresses(ir.Ref(role, k), ir.parameter(role, k), strides, staged)
