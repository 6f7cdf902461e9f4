"""The statements of a stage: rows, queues, products, loops, sums by indices; and the homes of the values that they compute.

Comes in: decisions of ``stage/builder.py`` and the passes beside it. Goes out: nodes that print C++, calls of the functions in
``cuda/include/kitsune/stage``; expressions and the loops over blocks are in ``ir.py``. Invariant: a node decides nothing when it is
printed.
"""

from __future__ import annotations

from kitsune_jax.ops.graph import Scalar
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda.ir import Address, Constant, Declaration, Expr, Node, Ref, Rows, Spelling, each_row, flag, indented

# --- Values with one number per row, in two registers -----------------------------------------------------------------------------


class RowStatement(Node):
    """A statement that sets the row value ``ref``."""

    ref: Ref

    def events(self) -> ir.Events:
        if self.ref.kind == "r":
            yield self.ref, 2


class SetRow(RowStatement):
    dtype: str
    expr: Expr

    code = ("{dtype:type} {ref}[2];", *each_row("{ref}[h] = {expr};"))


class LoadRow(RowStatement):
    """Load the number in ``column`` of each row."""

    rows: Rows
    column: int = 0

    def lines(self, at: Spelling) -> list[str]:
        dtype, behind = self.rows.dtype, self.column * pointwise.ITEM_SIZE[self.rows.dtype]
        starts = [f"{self.rows.name(at)}[{h}]" for h in range(2)]
        if self.rows.access == "kInBoxes":
            starts = [f"box_address({start}, {self.column})" for start in starts]
        elif behind:
            starts = [f"static_cast<const u8*>({start}) + {behind}" for start in starts]
        shared = ", true" if self.rows.access in ("kInBoxes", "kInRing", "kStaged") else ""
        loads = [f"load_one<{pointwise.ELEMENT[dtype]}{shared}>({start}, valid[{h}])" for h, start in enumerate(starts)]
        return [f"const {pointwise.COMPUTE[dtype]} {at.name(self.ref)}[2] = {{{', '.join(loads)}}};"]


class PopRow(Node):
    ref: Ref
    entry: Ref
    pop: Ref
    dtype: str

    code = (
        "const U4 {entry} = {pop}(0);",
        "const {dtype:type} {ref}[2] = {{from_word<{dtype:type}>({entry}.x), from_word<{dtype:type}>({entry}.y)}};",
    )


class StartFold(Node):
    ref: Ref
    how: str
    dtype: str

    code = ("{dtype:type} {ref}[2] = {{{how}::identity<{dtype:type}>(), {how}::identity<{dtype:type}>()}};",)


class FoldQuad(RowStatement):
    how: str

    code = ("fold_quad<{how}>({ref});",)


class FoldRow(Node):
    sink: Ref
    how: str
    dtype: str
    row: Expr

    code = each_row("if (valid[h]) {sink} = {how}::fold({sink}, {dtype:type}({row}));")


class StoreRow(Node):
    rows: Rows
    row: Expr
    once: bool

    code = each_row("{once:if (slab == 0) |}store_one<{rows.dtype:element}>({rows}[h], valid[h] && lane.q == 0, {row});")


class RowToScratch(Node):
    column: int
    row: Expr

    code = each_row("if (lane.q == 0) rows.put(lane, h, {column}, to_word({row}));")


class RowTile(Node):
    """A row value as the first column of a tile of 8: the operand of a product with K = 1."""

    ref: Ref
    row: Expr
    dtype: str

    def lines(self, at: Spelling) -> list[str]:
        element, numbers = pointwise.ELEMENT[self.dtype], [self.row.of_row(at, h) for h in range(2)]
        if tiles.is_half(self.dtype):
            type_, items = "u32", [f"lane.q == 0 ? pack<{element}>({x}, 0.0f) : 0" for x in numbers]
        else:
            type_, items = "float", [f"lane.q == 0 ? {x} : 0.0f, 0.0f" for x in numbers]
        return [f"{type_} {at.name(self.ref)}[{2 if tiles.is_half(self.dtype) else 4}] = {{{', '.join(items)}}};"]


class SyncWarp(Node):
    """Order the accesses of a warp to its scratch rows: earlier reads before later writes, and earlier writes before reads."""

    code = ("syncwarp();",)


# --- Products for each row, whose operands pass through shared memory row by row --------------------------------------------------

_WARPS = tiles.GROUP_THREADS // 32
_MOST_OF_TWO_SLOTS = 1 << 14  # most bytes of two slots of a warp; wider operands get one slot


class KeepAddress(Node):
    """Store the addresses of the rows ``ref`` as number ``number`` of those that the lane has in shared memory. ``stored``: the
    rows are written, so addresses beyond the stream are null."""

    ref: Ref
    number: int
    stored: bool

    def lines(self, at: Spelling) -> list[str]:
        rows = [f"{f'!valid[{h}] ? nullptr : ' if self.stored else ''}{at.name(self.ref)}_row[{h}]" for h in range(2)]
        return [f"row_addresses.keep(lane, {self.number}, {', '.join(rows)});"]


class Copied(Node):
    """Elements of an operand from ``first`` on, ``count`` of each of ``pieces`` sources. ``how``: "async" (16 bytes at a time),
    "elements" or "staged", from kept addresses number ``source`` on; or "scratch", from column ``source`` of the scratch rows."""

    how: str
    source: int
    pieces: int
    first: int
    count: int

    def line(self, operand: str) -> str:
        if self.how == "scratch":
            return f"{operand}.copy_scratch<{self.first}, {self.count}>(rows.base + row * rows.pitch + {self.source});"
        where = f"[&](int piece) {{ return row_addresses.get(row, {self.source} + piece); }}"
        if self.how == "async":
            return f"{operand}.copy_async<{self.first}, {self.count}, {self.pieces}>({where});"
        return f"{operand}.copy<{self.first}, {self.count}, {self.pieces}, {flag(self.how == 'staged')}>({where});"


class RowOperand(Node):
    """``free`` times K elements of a row. ``across``: K is the outer dimension. ``copied``: their sources."""

    free: int
    across: bool
    copied: tuple[Copied, ...]

    def slot_bytes(self, k: int, size: int) -> int:
        """``RowOperand::kBytes`` of stage/row_product.h."""
        run, runs = (self.free, k) if self.across else (k, self.free)
        return runs * (-(-run * size // 16) | 1) * 16


class ToRows(Node):
    """Write to the rows at kept addresses number ``number``. ``pairs``: the rows start at multiples of four bytes."""

    number: int
    pairs: bool


class RowProduct(Node):
    """x y^T of each row, of operands of ``dtype``, written to the image ``to`` of a value of dtype ``out`` with ``columns``
    columns, or to the rows of an array. ``y`` is None where it is x. ``picks``: a vector with the element of the product for each
    column, or -1 for ``fill``."""

    to: Ref | ToRows
    dtype: str
    k: int
    x: RowOperand
    y: RowOperand | None
    out: str
    columns: int
    picks: Address | None
    fill: Expr | None

    @property
    def others(self) -> RowOperand:
        return self.y or self.x

    @property
    def slots(self) -> int:
        return 2 if 2 * self._slot <= _MOST_OF_TWO_SLOTS else 1

    @property
    def _slot(self) -> int:
        size = 2 if tiles.is_half(self.dtype) else 4
        return self.x.slot_bytes(self.k, size) + (self.y.slot_bytes(self.k, size) if self.y else 0)

    @property
    def bytes(self) -> int:
        """Shared memory of a lane (``RowProduct::kBytes``)."""
        return _WARPS * (self.slots * self._slot + -(-self.x.free * self.others.free // 4) * 16)

    def lines(self, at: Spelling) -> list[str]:
        x, y, element = self.x, self.others, pointwise.ELEMENT[self.out]
        flags = ", ".join(map(flag, (x.across, y.across, self.y is None)))
        columns = "const AllColumns columns;"
        if self.picks is not None:
            assert self.fill is not None
            columns = f"const PickedColumns columns{{{at.address(self.picks)}, {self.fill.text(at)}}};"
        if isinstance(self.to, ToRows):
            template = f"{element}, {self.columns}, {flag(self.to.pairs)}"
            put = f"store_product<{template}>(row_addresses.get(row, {self.to.number}), "
        else:
            put = f"put_row<{element}, {tiles.padded(self.columns)}, {self.columns}>({at.name(self.to)}, row, "
        return [
            "{",
            f"  using Rows = RowProduct<{pointwise.OPERAND[self.dtype]}, {x.free}, {y.free}, {self.k}, {flags}, {self.slots}>;",
            f"  static_assert(Rows::kBytes == {self.bytes});",
            f"  {columns}",
            "  Rows{row_work}.rows(",
            "      [&](int row, const Rows::X& x, const Rows::Y& y) {",
            "        (void)row, (void)y;",
            *(f"        {copied.line('x')}" for copied in x.copied),
            *(f"        {copied.line('y')}" for copied in (self.y.copied if self.y else ())),
            "      },",
            f"      [&](int row, const u32* sums) {{ {put}[&](int c) {{ return columns.get(sums, c); }}); }});",
            "}",
        ]


class RowMemory(Node):
    """The lane's memory for products: ``addresses`` for each row at byte ``at``, and ``bytes`` of work space from ``work`` on. A
    warp uses its own part for all products, because only the warp itself knows when one is done."""

    addresses: int
    at: int
    work: int
    bytes: int

    def lines(self, at: Spelling) -> list[str]:
        found = [f"u8* const row_work = scratch + {self.work} + thread_id() % kGroupThreads / 32 * {self.bytes // 4};"]
        if self.addresses:
            type_ = f"RowAddresses<{self.addresses}>"
            found.append(f"const {type_} row_addresses = {type_}::at(scratch + {self.at});")
            found.append(f"static_assert({type_}::kBytes == {address_bytes(self.addresses)});")
        return found


def address_bytes(count: int) -> int:
    """Shared memory of a lane for ``count`` addresses of each of its rows (``RowAddresses::kBytes``)."""
    return tiles.TILE_ROWS * 8 * count


# --- Sinks by indices: by runs of sorted ones, atomically, and those of a segment softmax -----------------------------------------

_RUNS = 16  # registers of the runs of a tile, and of the walk down (``stage/segment.h``)


class SegmentRuns(Node):
    """Before the blocks of a tile: the runs of equal ``index`` among its rows, or, if not ``sorted``, the indices themselves.
    ``rows``: of the result."""

    ref: Ref
    index: Expr
    rows: int
    sorted: bool = True

    code = (
        "const i64 ids{ref.of}[2] = {{{index:rows}}};",
        "const {sorted:Runs|Members} runs{ref.of} = {sorted:Runs|Members}::of(ids{ref.of}, valid, {rows}ll);",
        "{ref}.begin(runs{ref.of});",
    )

    def events(self) -> ir.Events:
        yield Ref("runs", self.ref.of), _RUNS


class RowToSegments(Node):
    """Fold a tile that has one number per row."""

    ref: Ref
    how: str
    dtype: str
    row: Expr
    runs: Ref | None = None

    def lines(self, at: Spelling) -> list[str]:
        runs = self.runs or Ref("runs", self.ref.of)
        word = ir.segment_word(at, runs, self.how, self.dtype, self.row.text(at))
        return [
            # The block has 8 columns, all with the same number.
            *each_row(f"for (u32 c = lane.q; c < 8; c += 4) rows.put(lane, h, c, {word});"),
            f"{at.name(self.ref)}.block(rows, {at.name(runs)}, 0);",
        ]


class JoinSegments(Node):
    ref: Ref
    runs: Ref | None = None

    code = ("{ref}.join();",)

    def events(self) -> ir.Events:
        yield self.runs or Ref("runs", self.ref.of), None


class SummedRows(Declaration):
    """The addresses that the thread's two rows are added to: rows ``index`` of ``out``, which has ``rows`` rows of ``columns``
    floats; null for an index out of range."""

    out: Constant
    index: Expr
    rows: int
    columns: int

    registers = 4  # two addresses

    def lines(self, at: Spelling) -> list[str]:
        out, sizes = at.constant(self.out), f"{self.rows}ll, {self.columns}ll"
        found = [f"summed_row({out}, {self.index.of_row(at, h)}, valid[{h}], {sizes})" for h in range(2)]
        return [f"float* const {at.name(self.ref)}[2] = {{{', '.join(found)}}};"]


class AddRow(Node):
    """Add one number of each row at ``ref``."""

    ref: Ref
    row: Expr

    code = each_row("if ({ref}[h] != nullptr && lane.q == 0) red_add({ref}[h], {row});")


class FoldedRows(Declaration):
    """The rows of ``out`` that ``index`` names, into which a tile of ``width`` columns is folded by ``how``. ``rows``, ``columns``,
    ``dtype``: of ``out``."""

    how: str
    dtype: str
    width: int
    out: Constant
    index: Expr
    rows: int
    columns: int

    registers = 3  # three indices
    code = (
        "const i64 ids_{ref}[2] = {{{index:rows}}};",
        "const FoldedRows<{how}, {dtype:type}, {width}> {ref} = "
        "FoldedRows<{how}, {dtype:type}, {width}>::of({out}, {columns}, ids_{ref}, valid, {rows}ll);",
    )


class FoldRowAt(Node):
    """Fold a tile that has one number per row."""

    ref: Ref
    row: Expr

    code = each_row("{ref}.row(lane, h, {row});")


class RowRuns(Declaration):
    """The runs of equal ``index`` among the rows of a warp, for all sums of a softmax. ``rows``: of the results."""

    index: Expr
    rows: int

    registers = _RUNS
    code = ("const i64 ids_{ref}[2] = {{{index:rows}}};", "const Runs {ref} = Runs::of(ids_{ref}, valid, {rows}ll);")


class FindTops(Node):
    """Replace the scores in the warp's scratch rows by the largest ones of their runs."""

    ref: Ref
    runs: Ref

    code = ("{ref}.find(rows, {runs});",)


class BeginSegments(Node):
    """Start a fold by sorted indices, before the blocks of a tile; ``runs``: of equal indices in the tile."""

    ref: Ref
    runs: Ref

    code = ("{ref}.begin({runs});",)


# --- Queues -----------------------------------------------------------------------------------------------------------------------


class Exchange(Node):
    """A ring of ``depth`` entries for a value, ``vectors`` per thread, whose slabs the CTAs of a cluster pass to one another. The
    layout sets ``at``, its offset in the lane's memory, and ``ctas``, the mask of the cluster's CTAs. ``one_row_of``: the form of a
    value of which a thread has one row, else empty. ``stamped``: the waits for the others are summed for a timeline."""

    ring: Ref
    vectors: int
    depth: int
    at: int = -1
    ctas: int = 0
    one_row_of: str = ""
    stamped: bool = False

    def lines(self, at: Spelling) -> list[str]:
        name, queue = at.name(self.ring), f"ClusterQueue<{self.vectors}, {self.depth}, {self.size}{self.rows}>"
        type_ = f"SummedWaits<{queue}, 1>" if self.stamped else queue
        ends = f"{self.ctas}u, {self.ctas}u, 1 + group"
        slots = f"reinterpret_cast<{self.vector}*>(scratch + {self.at})"
        return [f"const {type_} {name}{{&header.{name}[group], {slots}, {ends}}};", f"u32 n_{name} = 0;"]

    @property
    def size(self) -> int:
        """The number of CTAs."""
        return self.ctas.bit_count()

    @property
    def rows(self) -> str:
        return f", Held::kOneRowOf{self.one_row_of.title()}s" if self.one_row_of else ""

    @property
    def vector(self) -> str:
        return "U2" if self.one_row_of else "U4"

    @property
    def bytes(self) -> int:
        return self.depth * self.vectors * tiles.GROUP_THREADS * (8 if self.one_row_of else 16)


def _count(queue: Ref) -> str:
    """The counter of a queue's entries: a tile has one entry of each queue, but a ring of an exchange counts its own."""
    return f"n_{queue.name}" if queue.kind == "exchange" else "n"


class QueueCall(Node):
    """``call``: rd_acquire, rd_release, wr_acquire or wr_release."""

    queue: Ref
    call: str

    def lines(self, at: Spelling) -> list[str]:
        n = _count(self.queue)
        return [f"{at.name(self.queue)}.{self.call}({n});", *([f"++{n};"] if n != "n" and self.call == "rd_release" else [])]


class Entry(Node):
    """Declare access to a queue's entry: ``ref(i)`` reads vector i, with ``write`` ``ref(i, v)`` writes it. ``slab``: vectors of a
    slab, if the value is one; ``once``: only the first of the CTAs that have the value writes; ``of``: read the slab of CTA ``of``;
    ``each``: every reader has its own entry."""

    ref: Ref
    queue: Ref
    slab: int
    write: bool = False
    once: bool = False
    of: int | None = None
    each: bool = False

    def lines(self, at: Spelling) -> list[str]:
        queue, n, slab, given = at.name(self.queue), _count(self.queue), self.slab, "int i"
        first = f"{self.of * slab} + " if self.of is not None else f"slab * {slab} + " if slab else ""
        body = f"return {queue}.pop({n}, {first}i);"
        if self.write:
            only = "if (slab == 0) " if self.once else ""
            given, body = "int i, U4 v", f"{only}{queue}.push({n}, {first}i, v);"
        if self.each:
            body = f"{queue}.push_to({n}, slab * {slab} + i % {slab}, v, i / {slab});"
        return [f"const auto {at.name(self.ref)} = [&]({given}) {{ {body} }};"]


class PushRow(Node):
    queue: Ref
    row: Expr
    once: bool

    code = ("{once:if (slab == 0) |}{queue}.push(n, 0, U4{{to_word({row:0}), to_word({row:1}), 0, 0}});",)


# --- Products ---------------------------------------------------------------------------------------------------------------------


class Operand(Node):
    """``kind``: "registers", "copy" (registers of an entry's copy), "array" (rows in registers), "rows" (loaded during the
    product), "boxes" (rows where they lie in the ring of tiles) or "image". ``dtype``: of the product. ``owner``: the object
    that must stay alive until the product is complete. ``awaited``: the image is an entry of ring ``owner``, and this is the
    first wait for it. ``one_row``: a thread has one row of it, not two."""

    kind: str
    ref: Ref
    width: int
    dtype: str
    owner: Ref
    rows: Rows | None = None
    awaited: bool = False
    one_row: bool = False

    @property
    def fetched(self) -> bool:
        return self.kind in ("rows", "image")

    def source(self, at: Spelling) -> str:
        """The C++ object from which the product reads the operand."""
        return f"one_row({self._source(at)})" if self.one_row else self._source(at)

    def _source(self, at: Spelling) -> str:
        type_ = pointwise.OPERAND[self.dtype]
        if self.kind == "image":
            return f"image_source<{type_}, {self.width}>([&](int i) {{ return {at.vectors(self.ref, 'get')}(i); }})"
        if self.rows is None:
            return f"RegisterSource<{type_}, {self.width}>{{{at.name(self.ref)}}}"
        if self.kind == "boxes":
            return f"BoxSource<{type_}, {self.width}>{{{at.name(self.rows.ref)}_boxes}}"
        row, element = self.rows.name(at), pointwise.ELEMENT[self.rows.dtype]
        where = f"{{{row}[0], {row}[1]}}, {{valid[0], valid[1]}}, {self.rows.columns}, lane"
        return f"RowSource<{type_}, {element}, {self.width}, {self.rows.access}>{{{where}}}"


class Resident(Node):
    """Weights in shared memory. ``weight``: number in the stage; ``offset``: in bytes; ``at``: set by the layout."""

    weight: int
    offset: ir.Index
    layer: int
    at: Constant | None = None

    stepped = ("offset",)

    def address(self, at: Spelling) -> str:
        assert self.at is not None
        layer = f" + layer * {self.layer}" if self.layer else ""
        chunk = f" + chunk * {self.offset.step}" if isinstance(self.offset, ir.Stepped) else ""
        return f"shared + {at.constant(self.at)}{layer}{chunk}"


class Issue(Node):
    """Start the products of a chunk of columns into accumulators ``ref``. ``registers``: accumulators and fragments, for
    ``liveness``; ``k_chunks`` of ``weight``: for the loader. ``started``: the accumulators hold a sum that the product adds to.
    ``first``: of the chunk's blocks of columns. ``awaited``: the streamed weights are all there before the product begins."""

    ref: Ref
    columns: int
    dtype: str
    rolling: bool
    weights: Resident | None  # None: streamed
    bias: tuple[Address, int] | None  # (vector, its width)
    first: ir.Index
    feeds: tuple[tuple[Operand, int, int], ...]  # with the first block of K, and the blocks that are complete before it
    weight: int
    chunk: int
    k_chunks: int
    registers: int
    started: bool = False
    awaited: bool = False

    stepped = ("first",)

    def lines(self, at: Spelling) -> list[str]:
        d, weights, found = at.name(self.ref), "weights", list[str]()
        product = f"product_{self.ref.of}{self.ref.suffix}"
        if self.weights is not None:
            weights = product.replace("product", "weights")
            found.append(f"ResidentWeights<{self.columns}> {weights}{{{self.weights.address(at)}}};")
        elif self.awaited:
            weights = product.replace("product", "weights")
            found.append(f"AwaitedWeights<{self.k_chunks}, decltype(weights)> {weights}(weights);")
        if not (self.started or self.ref.is_element):
            found.append(f"float {d}[{self.columns // 2}];")
        if self.bias is not None:
            address, width = self.bias
            found.append(f"start_from<{self.columns}, {width}>({d}, {at.address(address)}, lane, {self.first});")
        flags = f"{flag(self.rolling)}, {flag(self.started or self.bias is not None)}"
        template = f"{pointwise.OPERAND[self.dtype]}, {self.columns}, {flags}, decltype({weights})"
        found.append(f"Product<{template}> {product}({d}, {weights});")
        for operand, first, done in self.feeds:
            if operand.awaited:
                found.append(f"{at.name(operand.owner)}.rd_acquire({_count(operand.owner)});")
            found.append(f"{product}.feed<{first}, {done}>({operand.source(at)});")
        return [*found, f"{product}.commit();"]

    def events(self) -> ir.Events:
        yield self.ref, self.registers


class Complete(Node):
    """Wait until at most ``pending`` products are in flight. ``done`` of ``blocks`` blocks of K, of ``streamed`` weights or of
    others, are complete already."""

    ref: Ref
    pending: ir.Index
    dtype: str
    done: int
    blocks: int
    streamed: bool
    owners: tuple[Ref, ...]

    stepped = ("pending",)

    def lines(self, at: Spelling) -> list[str]:
        d, template = at.name(self.ref), f"{pointwise.OPERAND[self.dtype]}, {self.done}, {self.blocks}"
        return [f"complete<{template}>({d}, {self.pending}, weights);" if self.streamed else f"complete({d}, {self.pending});"]

    def events(self) -> ir.Events:
        yield from ((owner, None) for owner in self.owners)


class Pin(Node):
    """The registers ``ref`` are complete here: the compiler moves no arithmetic on them to a place behind."""

    ref: Ref

    code = ("pin({ref});",)


# --- Loops ------------------------------------------------------------------------------------------------------------------------


class Accumulators(Node):
    """Declare the accumulators of ``chunks`` chunks of ``columns`` columns each, for products in flight from one iteration of a
    ``ChunkLoop`` to the next."""

    ref: Ref
    chunks: int
    columns: int

    def lines(self, at: Spelling) -> list[str]:
        return [f"float {at.name(self.ref)}[{self.chunks}][{self.columns // 2}];"]


class ChunkLoop(Node):
    """``count`` copies of ``body``, whose ``Stepped`` numbers count the copies (``stage/rolling.py``). Copies that share no
    registers need not be unrolled: as many as those of a wide layer leave the instruction cache, and take a minute to compile."""

    count: int
    body: tuple[Node, ...]

    def lines(self, at: Spelling) -> list[str]:
        loop = f"for (int chunk = 0; chunk < {self.count}; ++chunk) {{"
        unroll = "KITSUNE_NO_UNROLL" if self.count >= _MANY_COPIES and all(map(_only_stores, self.body)) else "KITSUNE_UNROLL"
        return [unroll, loop, *indented(at.lines(self.body)), "}"]


_MANY_COPIES = 8


def _only_stores(node: Node) -> bool:
    """Does ``node`` leave all registers as they were, but those of products of its own copy?"""
    if isinstance(node, ir.BlockLoop):
        stores = all(isinstance(step.action, ir.Store) for step in node.steps if isinstance(step, ir.Put))
        return stores and all(ref.kind == "d" and not ref.part for ref in node.reads)
    return isinstance(node, Issue | Complete) and not node.ref.part


class LayerLoop(Node):
    """``weights``: of one layer, numbered consecutively from ``first_weight``."""

    layers: int
    first_weight: int
    weights: int
    body: tuple[Node, ...]

    def lines(self, at: Spelling) -> list[str]:
        return ["KITSUNE_NO_UNROLL", f"for (u32 layer = 0; layer < {self.layers}; ++layer) {{", *indented(at.lines(self.body)), "}"]

    def events(self) -> ir.Events:
        for node in self.body:
            yield from node.events()


class SeenBlocks(Node):
    """Once per tile: those of ``count`` blocks of ``step`` elements that the rows of all lanes see. A row sees the elements whose
    index is ``low`` to ``high`` more than the row's index on a stream axis (None: unbounded), which is the row over ``inner``,
    modulo ``extent``. ``shift``: address of a number that, times ``sign``, is added to both bounds; ``guard``: "rows" or "elements"
    (of ``size`` elements in all), as of a loop of the tile program (``program.ir``). Consumers and the loader find the blocks of
    the first to the last row of the batch that the lanes of the CTA have."""

    ref: Ref
    inner: int
    extent: int
    step: int
    low: int | None
    high: int | None
    count: int
    shift: Address | None = None
    sign: int = 1
    guard: str = ""
    size: int = 0

    def lines(self, at: Spelling) -> list[str]:
        low, high = ("false, 0" if bound is None else f"true, {bound}" for bound in (self.low, self.high))
        template, rows = f"{self.inner}, {self.extent}, {self.step}, {low}, {high}", f"rows_at.first, rows_at.last, {self.count}"
        made = f"of<{template}>({rows})"
        if self.shift is not None:
            guard = f"SeenBlocks::k{self.guard.capitalize()}, {self.size}"
            number = f"from_word<i32>(bits(ld_global(p.{at.address(self.shift)})))"
            made = f"shifted<{template}, {guard}>({rows}, {self.sign}, {number})"
        return [f"const SeenBlocks {at.name(self.ref)} = SeenBlocks::{made};"]


class CountedLoop(Node):
    """``count`` iterations of ``body``, numbered by ``number``, from the last one down if ``reverse``. With ``seen``, only
    ``which`` of its blocks: "whole" (all rows see them), "edges" (only some rows do), or "all". If ``first`` has nodes, they are
    the first iteration, ``body`` the others, and ``last`` follows the last one, if any runs."""

    number: Ref
    count: int
    reverse: bool
    body: tuple[Node, ...]
    seen: Ref | None = None
    which: str = "all"
    first: tuple[Node, ...] = ()
    last: tuple[Node, ...] = ()

    def lines(self, at: Spelling) -> list[str]:
        n, index, count, of = at.name(self.number), at.name(self.number), str(self.count), ""
        if self.reverse:
            index, of = f"i_{n}", f"{self.count - 1} - i_{n}"
        if self.seen is not None:
            blocks, index = f"{at.name(self.seen)}.{self.which}", f"i_{n}"
            count, of = f"{blocks}_count()", of or f"{blocks}_block({index})"
        head = [f"const i32 {n} = {of};", f"(void){n};"] if of else []
        loop = f"for (i32 {index} = {int(bool(self.first))}; {index} < {count}; ++{index}) {{"
        found = ["KITSUNE_NO_UNROLL", loop, *indented((*head, *at.lines(self.body))), "}"]
        which = {"whole": ["// blocks that all rows see"], "edges": ["// blocks that some rows do not see whole"]}
        said = which.get(self.which, []) if self.seen is not None else []
        if not self.first:
            return [*said, *found]
        start = f"const i32 {n} = {of.replace(index, '0') or 0};"
        first = ["{  // the first iteration", *indented((start, f"(void){n};", *at.lines(self.first))), "}"]
        others = ("// the others, each with the late product of the one before", *found)
        last = ("// the late product of the last one", *at.lines(self.last))
        return [*said, f"if ({count} > 0) {{", *indented((*first, *others, *last)), "}"]

    def events(self) -> ir.Events:
        inside = [event for node in self.body for event in node.events()]
        made = {owner for owner, registers in inside if registers is not None}
        yield from inside  # ``first`` has the registers of ``body``, or fewer
        # The next iteration reads again what this one reads of the code around the loop.
        yield from ((owner, None) for owner in dict.fromkeys(owner for owner, _ in inside) if owner not in made)
        yield from (event for node in self.last for event in node.events())


class NextStep(Node):
    """``ref``: the number of the iteration after ``number``, or of the last one. The iterations are those of a ``CountedLoop``."""

    ref: Ref
    number: Ref
    count: int
    reverse: bool

    def lines(self, at: Spelling) -> list[str]:
        n = at.name(self.number)
        last, next_ = (f"{n} == 0", f"{n} - 1") if self.reverse else (f"{n} == {self.count - 1}", f"{n} + 1")
        return [f"const i32 {at.name(self.ref)} = {last} ? {n} : {next_};"]


class Turn(Node):
    """The lanes of a CTA take turns at the tensor cores. ``what``: "take" (wait for this lane's turn), "give" (pass it to the next
    lane); "first" and "last" start and end the turns at the beginning and end of the kernel."""

    what: str

    def lines(self, at: Spelling) -> list[str]:
        first, last = ("if (group == kLanes - 1) ", "give"), ("if (group == 0) ", "take")
        when, call = {"first": first, "last": last}.get(self.what, ("", self.what))
        return [f"{when}{call}_turn<kLanes>(group);"]


# --- Weight gradients -------------------------------------------------------------------------------------------------------------


class RowToPanel(Node):
    panel: Ref
    tile: Ref

    code = ("{panel}.put(lane, 0, {tile}, valid);",)


class AddGradient(Node):
    gradient: Ref
    sums: tuple[Ref, ...]

    def lines(self, at: Spelling) -> list[str]:
        adds = " ".join(f"{at.name(s)}.add(sink{s.of});" for s in self.sums)
        meanwhile = f"[&] {{ {adds} }}" if self.sums else "[] {}"
        return [f"{at.name(self.gradient)}.add(sum{self.gradient.of}, {meanwhile});"]


# --- Homes of values --------------------------------------------------------------------------------------------------------------


class Home(Node):
    """The place of a value. A pending value (``Expression``, ``Multiply``) is evaluated by the first loop that reads it; it is then
    kept in registers or in an image in shared memory if it is read again."""


class Number(Home):
    value: Scalar


class Expression(Home):
    """A pointwise operator (C++ with {0}, {1}, ... for its operands), evaluated wherever it is read."""

    template: str
    operands: tuple[int, ...]


class Multiply(Home):
    """A matmul, whose products the first loop that reads it issues.

    ``product``: the value that names its accumulators. ``weight``: index of its recipe. ``pieces``: the values that make up its K.
    ``bias``: (vector that the accumulators start from, its width); ``start``: the value that they start from, for a product of one
    chunk of columns. ``operands``: the pieces, once they have homes.
    """

    product: int
    weight: int
    shape: tiles.WeightShape
    pieces: tuple[int, ...]
    bias: tuple[Address, int] | None = None
    operands: tuple[Operand, ...] = ()
    start: int | None = None


class InRegisters(Home):
    """``form``: "pair" (u32, two 16-bit values each), "bit" (u32, 32 booleans each), "word" (one element each) or "row" (one per
    row). ``owner``: the object whose registers they are (``stage/fitting.py``)."""

    ref: Ref
    form: str
    owner: Ref


class InImage(Home):
    """A register image, or the entry of a queue (whose ref is a "pop")."""

    ref: Ref
    form: str
    owner: Ref


class InArray(Home):
    """Rows of a streamed input array."""

    rows: Rows


class InVector(Home):
    """A stationary vector, or the scalar ``scalar`` that was loaded from it."""

    address: Address
    scalar: Ref | None = None


class InScratch(Home):
    """Columns of the warp's scratch rows, listed by the vector at ``table``; -1 means ``fill``. ``fold``: each is the fold of
    several columns, of which the vector lists the first, or the sum of a list of columns, of which the vector lists the start."""

    table: Address
    fill: Expr | None
    fold: ir.ScratchFold | ir.ScratchList | None = None


class LoopNumber(Home):
    """The number of a loop's iteration, which is the same for all rows."""

    ref: Ref


class Splat(Home):
    """One number per row (or a constant), read as a tile."""

    of: int


class Parts(Home):
    """Whole blocks of other values: (value, first block there, blocks)."""

    parts: tuple[tuple[int, int, int], ...]


class StageValue(Node):
    """``n``: columns of a row; ``row``: there is one number per row; ``slab``: if the value is a slab of a wider one, the number of
    groups of columns of that, else 0."""

    n: int
    dtype: str
    row: bool
    home: Home | None = None
    slab: int = 0

    @property
    def width(self) -> int:
        return tiles.padded(self.n)

    @property
    def form(self) -> str:
        """The form of its elements in registers. Masks are bits, but not slabs: other stages read several slabs as one value."""
        return "pair" if tiles.is_half(self.dtype) else "bit" if self.dtype == "bool" and not self.slab else "word"

    @property
    def part(self) -> ir.Slab | None:
        return ir.Slab(self.n, self.slab) if self.slab else None

    def slab_vectors(self, form: str) -> int:
        """Vectors of the slab in a queue's entry, which has those of all CTAs; 0 if the value is no slab."""
        return tiles.image_vectors(self.width, form) if self.slab else 0

    @property
    def registers(self) -> int:
        """32-bit registers of a thread."""
        return 2 if self.row else tiles.registers(self.width, self.form)


def queue_form(dtype: str, slabs: bool) -> str:
    """The form of the elements of a queue's entries. ``slabs``: a split stage writes or reads the queue."""
    return StageValue(2, dtype, False, slab=slabs).form


# --- Loops over columns, which ``stage/chunks.py`` expands ------------------------------------------------------------------------


class Evaluate(Node):
    """A loop over all blocks of tiles of ``width`` columns. ``homes``: the current place of every value that it reads."""

    width: int
    actions: tuple[ir.Action, ...]
    products: tuple[int, ...]
    homes: tuple[tuple[int, StageValue], ...]


class SingleColumn(Node):
    """A whole product that has one column of results."""

    value: int
    homes: tuple[tuple[int, StageValue], ...]
