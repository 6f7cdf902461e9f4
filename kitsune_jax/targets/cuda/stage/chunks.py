"""Passes over the nodes of a stage: loops and products expanded in chunks of columns, products one iteration late, and lanes in
ping-pong.

Comes in: the nodes of a stage. Goes out: nodes without ``Evaluate`` and ``SingleColumn``, in which each product is issued chunk by
chunk and awaited before its results are read. Invariants: if two chunks are in flight, a ring of weights holds both; columns beyond
the logical ones are zero in all values that are kept or passed on, because a later matmul multiplies them by zero, and NaN would
survive that.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kitsune_jax.errors import CannotLower
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.pack import NO_LOOP, WeightRecipe
from kitsune_jax.targets.cuda.stage.split import ExchangeWaits

ROLLING_GROUP = 2  # blocks of K between two waits of a rolling product (``Product::kGroup``)
NO_ELEMENTS = "a value in {} has no elements"
Homes = dict[int, st.StageValue]


def expand_chunks(nodes: Sequence[ir.Node], weights: Sequence[WeightRecipe], depth: int, overlap: bool) -> tuple[ir.Node, ...]:
    """``nodes`` block by block. ``depth``: chunks that a ring of weights holds, or 0 for resident weights; ``overlap``: two chunks
    may be in flight."""
    return _expanded(nodes, _Chunks(weights, depth, overlap))


def reads_of_chunks(
    nodes: Sequence[ir.Node], weights: Sequence[WeightRecipe], depth: int, overlap: bool
) -> tuple[tuple[ir.Node, ...], bool]:
    """``expand_chunks`` with loops over blocks that have their reads, and no steps: for the registers of a stage, in a fraction of
    the time. And are two chunks in flight anywhere?"""
    expansion = _ReadsOfChunks(weights, depth, overlap)
    return _expanded(nodes, expansion), expansion.overlaps


def _expanded(nodes: Sequence[ir.Node], expansion: _Chunks) -> tuple[ir.Node, ...]:
    found = tuple(expansion.of(nodes))
    expansion.waits.check()
    return found


@dataclasses.dataclass(slots=True)
class _ProductState:
    """Chunks of a product issued and completed so far; ``done``: blocks of K that are complete when a chunk has been issued."""

    issued: int = 0
    completed: int = 0
    done: int = 0


class _Chunks:
    def __init__(self, weights: Sequence[WeightRecipe], depth: int, overlap: bool):
        self.weights, self.resident, self.depth, self.overlap = weights, not depth, depth, overlap
        self.state: dict[int, _ProductState] = {}
        self.nodes: list[ir.Node] = []
        self.homes: Homes = {}  # of the values that the current loop reads
        self.layer_bytes = 0  # of the weights of a layer, in a loop over layers
        self.loop = NO_LOOP  # the number of the loop around the current nodes
        self.counter = itertools.count()
        self.waits = ExchangeWaits()
        self.crowded = False  # do the products in flight have more chunks than the ring holds?
        self.overlaps = False  # were two chunks in flight anywhere?

    def of(self, nodes: Iterable[ir.Node]) -> list[ir.Node]:
        outer, self.nodes = self.nodes, []
        for node in nodes:
            match node:
                case st.Evaluate():
                    self._evaluate(node)
                case st.SingleColumn(v, homes):
                    self._advance([_product(dict(homes), v)], 0)
                case st.LayerLoop(_, first, count, body):
                    self.layer_bytes = sum(r.shape.slab_bytes for r in self.weights[first : first + count])
                    self.nodes.append(dataclasses.replace(node, body=tuple(self.of(body))))
                    self.layer_bytes = 0
                case st.CountedLoop(body=body):
                    around, self.loop = self.loop, node.number.of
                    self.nodes.append(dataclasses.replace(node, body=tuple(self.of(body))))
                    self.loop = around
                case _:
                    self.waits.see(node, self.loop)
                    self.nodes.append(node)
        found, self.nodes = self.nodes, outer
        return found

    def _evaluate(self, loop: st.Evaluate) -> None:
        homes = dict(loop.homes)
        products = [_product(homes, v) for v in loop.products]
        self.homes = homes
        self.nodes += _declarations(loop, homes)
        masks: dict[int, ir.Ref] = {}
        borders = _borders(loop, homes, products)
        for first, last in itertools.pairwise(borders):
            if products:
                self._advance(products, first)
            self.nodes.append(self.blocks(loop, first, last, masks))
            for a in loop.actions:
                if isinstance(a, ir.Keep) and not a.push:
                    share = homes[a.value].registers * (last - first) // tiles.blocks(loop.width)
                    self.nodes.append(ir.Alive(ir.Ref("v", a.value), 0 if a.to else share))
        for a in loop.actions:
            if isinstance(a, ir.Keep) and a.form == "bit" and a.to:
                self.nodes.append(ir.PutMask(a.ref, a.to, loop.width))

    def _advance(self, products: Sequence[st.Multiply], first: int) -> None:
        """Make the chunks of ``products`` that hold block ``first`` available, and issue the next ones if that is allowed."""
        self.crowded = not self.resident and sum(p.shape.k_chunks for p in products) > self.depth
        for p in products:
            if self._state(p).issued <= _chunk_of(p, first):
                self._issue(p)
        next_too = len(products) == 1 and self._may_overlap(products[0])
        self.overlaps |= next_too
        if next_too:
            self._issue(products[0])
        rolling = any(self._rolling(p) for p in products)
        for k, p in enumerate(products):
            state = self._state(p)
            if state.completed <= _chunk_of(p, first):
                pending = 1 if next_too else 0 if rolling else len(products) - 1 - k
                owners = tuple(o.owner for o in p.operands)
                ref = _accumulators(p, state.completed)
                blocks = state.done, p.shape.k_blocks
                self.nodes.append(st.Complete(ref, pending, p.shape.dtype, *blocks, not self.resident, owners))
                state.completed += 1

    def _state(self, p: st.Multiply) -> _ProductState:
        return self.state.setdefault(p.product, _ProductState())

    def _rolling(self, p: st.Multiply) -> bool:
        """Must the product wait between its blocks of K?"""
        return self.crowded or any(o.fetched for o in p.operands)

    def _may_overlap(self, p: st.Multiply) -> bool:
        state, shape = self._state(p), p.shape
        if self._rolling(p) or state.issued >= len(shape.chunks) or state.issued - state.completed > 1 or not self.overlap:
            return False
        if any(o.kind == "copy" for o in p.operands) or all(o.kind in ("array", "rows") for o in p.operands):
            return False  # ptxas (13.0, 13.5) would put a wait between the two, or serialise the whole kernel (C7517, C7518)
        if not self.resident and any(o.kind == "boxes" for o in p.operands):
            return False  # the same, where a wait for weights parts the instructions
        return self.resident or 2 * shape.k_chunks <= self.depth

    def _issue(self, p: st.Multiply) -> None:
        state, shape = self._state(p), p.shape
        chunk, rolling = state.issued, self._rolling(p)
        columns, weights = shape.chunks[chunk], None
        self._check_weights(self.weights[p.weight])
        if self.resident:
            offset = sum(shape.chunks[:chunk]) * shape.k_chunks * tiles.ROW_BYTES
            weights = st.Resident(p.weight, offset, self.layer_bytes)
        feeds, first, done = [], 0, 0
        for o in (self.waits.with_wait(o, self.loop) for o in p.operands):
            feeds.append((o, first, done))
            last = first + tiles.blocks(o.width)
            if rolling:  # the numbers of blocks that ``Product`` waits for
                done = last if o.fetched else first + (-(-(last - first) // ROLLING_GROUP) - 1) * ROLLING_GROUP
            first = last
        state.done = done
        if p.start is not None:
            self._start(p, chunk)
        # Fragments of one operand at a time: a product waits for those of one operand before it loads the next. As many for an
        # operand in boxes: with three lanes ptxas needs them for descriptors, or spills 38 words (256 x 256 after 256 columns).
        fragments = any(o.fetched or o.kind == "boxes" for o in p.operands) * (32 if tiles.is_half(shape.dtype) else 64)
        ref = _accumulators(p, chunk)
        registers = columns // 2 + fragments
        product = p.weight, chunk, shape.k_chunks, registers, p.start is not None
        block = sum(_blocks(p)[:chunk])
        self.nodes.append(st.Issue(ref, columns, shape.dtype, rolling, weights, p.bias, block, tuple(feeds), *product))
        state.issued += 1

    def _start(self, p: st.Multiply, chunk: int) -> None:
        """Copy the value that the product is added to into the accumulators of ``chunk``."""
        assert p.start is not None
        ref, first = _accumulators(p, chunk), sum(_blocks(p)[:chunk])
        self.nodes.append(ir.Registers(ref, "word", "float32", p.shape.chunks[chunk] // 2))
        loop = st.Evaluate(p.shape.slab, (ir.Keep(p.start, ref, "word", push=True, first=first),), (), tuple(self.homes.items()))
        self.nodes.append(self.blocks(loop, first, first + _blocks(p)[chunk], {}))

    def blocks(self, loop: st.Evaluate, first: int, last: int, masks: dict[int, ir.Ref]) -> ir.BlockLoop:
        """``loop`` over blocks [first, last), in which all sources stay in place."""
        return _BlockRange(loop, self.homes, first, last, masks, self.counter).loop()

    def _check_weights(self, recipe: WeightRecipe) -> None:
        """Raise ``CannotLower`` if the loader could not bring the weights in the order in which the stage uses them."""
        if self.resident and recipe.slices is not None:
            raise CannotLower("weights that change from tile to tile do not stay in shared memory")
        if not self.resident and recipe.loop != self.loop:
            raise CannotLower("weights that every iteration of a loop multiplies with must stay in shared memory")


class _ReadsOfChunks(_Chunks):
    """Finds what each loop over blocks reads, in the order of ``_BlockRange``, without its steps."""

    def blocks(self, loop: st.Evaluate, first: int, last: int, masks: dict[int, ir.Ref]) -> ir.BlockLoop:
        reads: dict[ir.Ref, None] = {}
        todo, seen = [(a.value, 0) for a in reversed(loop.actions)], set[tuple[int, int]]()
        while todo:
            read = todo.pop()
            if read in seen:
                continue
            seen.add(read)
            v, shift = read
            match self.homes[v].home:
                case st.Expression(_, operands):
                    todo += [(x, shift) for x in reversed(operands)]
                case st.InRegisters(_, form, owner):
                    if form != "row":
                        reads[owner] = None
                case st.InImage(owner=owner):
                    reads[owner] = None
                case st.InArray(rows):
                    reads[rows.ref] = None
                case st.Multiply() as p:
                    reads[_accumulators(p, _chunk_of(p, first))] = None
                case st.Splat(of):
                    todo.append((of, 0))
                case st.Parts(parts):
                    at = 0
                    for part, start, blocks in parts:
                        if at <= first - shift < at + blocks:
                            todo.append((part, shift + at - start))
                            break
                        at += blocks
                    else:
                        raise CannotLower(NO_ELEMENTS.format("Parts"))
                case st.Number() | st.LoopNumber() | st.InVector() | st.InScratch():  # in no registers or images of their own
                    pass
                case other:
                    raise CannotLower(NO_ELEMENTS.format(type(other).__name__))
        return ir.BlockLoop(loop.width, first, last - first, (), tuple(reads))


def _product(homes: Homes, v: int) -> st.Multiply:
    home = homes[v].home
    assert isinstance(home, st.Multiply)
    return home


def _blocks(p: st.Multiply) -> tuple[int, ...]:
    """The number of blocks of each chunk of columns."""
    return _blocks_of(p.shape.slab, p.shape.most)


@functools.lru_cache(maxsize=1024)
def _blocks_of(slab: int, most: int) -> tuple[int, ...]:
    return tuple(columns // tiles.block(slab) for columns in tiles.column_chunks(slab, most))


def _chunk_of(p: st.Multiply, block: int) -> int:
    return next(k for k, end in enumerate(itertools.accumulate(_blocks(p))) if block < end)


def _accumulators(p: st.Multiply, chunk: int) -> ir.Ref:
    return ir.Ref("d", p.product, f"_{chunk}" if len(p.shape.chunks) > 1 else "")


def _declarations(loop: st.Evaluate, homes: Homes) -> list[ir.Node]:
    """Registers of the values that the loop keeps, and of masks that it writes to images."""
    found: list[ir.Node] = []
    for a in loop.actions:
        if isinstance(a, ir.Keep) and not a.over and (a.form == "bit" or not a.to):
            count = tiles.registers(loop.width, a.form)
            found.append(ir.Registers(a.ref, a.form, homes[a.value].dtype, count, bool(a.to)))
    return found


def _borders(loop: st.Evaluate, homes: Homes, products: Sequence[st.Multiply]) -> list[int]:
    """The blocks at which a loop is split, so that between two of them every source is in one place."""
    borders = {0, tiles.blocks(loop.width)}
    for p in products:
        borders.update(itertools.accumulate(_blocks(p)))
    todo, seen = [a.value for a in loop.actions], set[int]()
    while todo:
        v = todo.pop()
        match homes[v].home if v not in seen else None:
            case st.Parts(parts):
                borders.update(itertools.accumulate(blocks for _, _, blocks in parts))
            case st.Expression(_, operands):
                todo += operands
        seen.add(v)
    return sorted(borders)


class _BlockRange:
    """The loop over blocks [first, last), in which all sources stay in place. Each source is loaded once per block, and each
    operator is listed once."""

    def __init__(
        self, loop: st.Evaluate, homes: Homes, first: int, last: int, masks: dict[int, ir.Ref], counter: itertools.count[int]
    ):
        self.source, self.homes, self.first, self.last, self.masks, self.mask_names = loop, homes, first, last, masks, counter
        self.names = itertools.count()  # of the names in the loop, which are equal in equal loops
        self.steps: list[ir.BlockStep] = []
        self.reads: dict[ir.Ref, None] = {}
        self.known: dict[tuple[int, int], ir.Expr] = {}
        self.fetched: dict[tuple[int, int], ir.Ref] = {}

    def loop(self) -> ir.BlockLoop:
        for action in self.source.actions:
            value = self.homes[action.value]
            pair = self._ready_pair(action.value) if isinstance(action, ir.Keep | ir.ToPanel) else None
            x = pair or self._read(action.value, 0)
            action = dataclasses.replace(action, value=-1)  # equal stages differ in the numbers of their values
            self.steps.append(ir.Put(action, x, value.dtype, value.n, pair is not None))
        return ir.BlockLoop(self.source.width, self.first, self.last - self.first, tuple(self.steps), tuple(self.reads))

    def _ready_pair(self, v: int) -> ir.Expr | None:
        """The word of a pair of 16-bit values that is packed already, with zeros beyond the columns; or None."""
        dtype = self.homes[v].dtype
        match self.homes[v].home:
            case st.InRegisters(ref, "pair", owner):
                self.reads[owner] = None
                return ir.Read("pair of registers", ref, dtype)
            case st.InImage(ref, "pair", owner):
                self.reads[owner] = None
                return ir.Read("pair of block", self._image_block(v, ref, "pair", 0), dtype)
            case st.InArray(rows) if rows.pairs:
                return ir.Read("pair of rows", self._array_block(v, rows, 0), dtype)
        return None

    def _read(self, v: int, shift: int) -> ir.Expr:
        """An element of ``v``, in its block b - shift."""
        if (v, shift) not in self.known:
            self.known[v, shift] = self._element(v, shift)
        return self.known[v, shift]

    def _element(self, v: int, shift: int) -> ir.Expr:
        value = self.homes[v]
        dtype = value.dtype
        match value.home:
            case st.Number(number):
                return ir.Literal(pointwise.literal(number, pointwise.COMPUTE[dtype]))
            case st.LoopNumber(ref):
                return ir.Read("scalar", ref, dtype)
            case st.Splat(of):
                return self._read(of, 0)
            case st.InRegisters(ref, form, owner):
                if form != "row":
                    self.reads[owner] = None
                return ir.Read(form, ref, dtype, shift)
            case st.Multiply() as p:
                if shift:
                    raise AssertionError("a matmul is read in place")
                chunk = _chunk_of(p, self.first)
                ref = _accumulators(p, chunk)
                self.reads[ref] = None
                return ir.Read("word", ref, dtype, sum(_blocks(p)[:chunk]))
            case st.InArray(rows):
                return ir.Read("pairs of rows" if rows.pairs else "rows", self._array_block(v, rows, shift), dtype)
            case st.InVector(_, scalar) if scalar:
                return ir.Read("scalar", scalar, dtype)
            case st.InVector(address):
                return ir.Read("vector", self._fetch(v, shift, lambda ref: ir.VectorBlock(ref, address, dtype, shift)), dtype)
            case st.InImage(ref, form, owner):
                self.reads[owner] = None
                if form == "bit":
                    return ir.Read("bit", self._mask(v, ref), dtype, shift)
                return ir.Read(f"{form} of image", self._image_block(v, ref, form, shift), dtype)
            case st.InScratch(starts, _, ir.ScratchList(listed)):
                return ir.SumOfList(dtype, starts, listed, value.width, shift)
            case st.InScratch(table, fill, fold):
                assert not isinstance(fold, ir.ScratchList)
                index = self._name("t")
                where = self._fetch(v, shift, lambda ref: ir.VectorBlock(ref, table, "float32", shift))
                self.steps.append(ir.Let(index, "int32", ir.Read("index", where, "int32")))
                return ir.FromScratch(dtype, index=index, fill=fill, fold=fold)
            case st.Parts(parts):
                at = 0
                for part, first, blocks in parts:
                    if at <= self.first - shift < at + blocks:
                        return self._read(part, shift + at - first)
                    at += blocks
            case st.Expression("{0}", (operand,)):  # a conversion between types that are computed in the same one
                return self._read(operand, shift)
            case st.Expression(template, operands):
                expr = ir.Apply(template, tuple(self._read(x, shift) for x in operands))
                name = self._name("t")
                self.steps.append(ir.Let(name, dtype, expr))
                return ir.Read("scalar", name, dtype)
        raise CannotLower(NO_ELEMENTS.format(type(value.home).__name__))

    def _name(self, kind: str) -> ir.Ref:
        return ir.Ref(kind, next(self.names))

    def _fetch(self, v: int, shift: int, step: Callable[[ir.Ref], ir.BlockStep]) -> ir.Ref:
        """The name of a block of ``v``, which ``step`` loads once."""
        if (v, shift) not in self.fetched:
            self.fetched[v, shift] = ref = self._name("x")
            self.steps.append(step(ref))
        return self.fetched[v, shift]

    def _array_block(self, v: int, rows: ir.Rows, shift: int) -> ir.Ref:
        value = self.homes[v]
        self.reads[rows.ref] = None
        return self._fetch(v, shift, lambda ref: ir.ArrayBlock(ref, rows, shift, value.part))

    def _image_block(self, v: int, image: ir.Ref, form: str, shift: int) -> ir.Ref:
        return self._fetch(v, shift, lambda ref: ir.ImageBlock(ref, image, form, shift))

    def _mask(self, v: int, image: ir.Ref) -> ir.Ref:
        if v not in self.masks:
            self.masks[v] = ir.Ref("m", next(self.mask_names))
            self.steps.append(ir.MaskWords(self.masks[v], image, self.homes[v].width))
        return self.masks[v]


# --- Products an iteration late: the code between two products of a loop runs beside the second one of the block before -----------


def with_late_products(nodes: Sequence[ir.Node], weights: Sequence[WeightRecipe]) -> tuple[ir.Node, ...]:
    """``nodes``, where loops that make an operand from one product, and add a second product with that operand to a carry, issue
    the second one an iteration later.

    As in FlashAttention-3 (arXiv 2407.08608, section 3.2): the scores of block j and the values of block j - 1 are issued together,
    and the softmax of block j runs beside the values. The arithmetic and its order are the same. Weights must be sliced, because
    only then the loader knows the loops (``layout.py``).
    """
    return tuple(made for node in nodes for made in _with_late_product(node, weights))


def _with_late_product(node: ir.Node, weights: Sequence[WeightRecipe]) -> tuple[ir.Node, ...]:
    found = _LateProduct.of(node, weights) if isinstance(node, st.CountedLoop) and not node.reverse else None
    return (node,) if found is None else found.nodes()


@dataclasses.dataclass(frozen=True, slots=True)
class _LateProduct:
    """The body of ``loop`` in parts, in their order: ``head``, ``early``, its wait, ``between``, ``late``, its wait, ``tail``.
    ``operand`` declares the operand of ``late``, and ``maker`` makes it; ``start`` scales ``carry``, which ``late`` adds to."""

    loop: st.CountedLoop
    head: tuple[ir.Node, ...]
    early: st.Issue
    early_wait: st.Complete
    between: tuple[ir.Node, ...]
    late: st.Issue
    late_wait: st.Complete
    tail: tuple[ir.Node, ...]
    carry: ir.Ref
    start: ir.BlockLoop
    operand: ir.Registers
    maker: ir.BlockLoop

    @classmethod
    def of(cls, loop: st.CountedLoop, weights: Sequence[WeightRecipe]) -> _LateProduct | None:
        body = loop.body
        places = [k for k, n in enumerate(body) if isinstance(n, st.Issue | st.Complete | st.CountedLoop | st.LayerLoop)]
        match [body[k] for k in places]:
            case [
                st.Issue() as early,
                st.Complete() as early_wait,
                st.Issue(feeds=((source, _, _),)) as late,
                st.Complete() as wait,
            ]:
                first, after, second, last = places
            case _:
                return None
        streamed = all(i.weights is None and weights[i.weight].slices is not None for i in (early, late))
        if not streamed or early.rolling or late.rolling or early.started or not late.started:
            return None
        declared = {n.ref: n for n in body if isinstance(n, ir.Registers)}
        operand = declared.get(source.ref)
        makers = [n for n in body if isinstance(n, ir.BlockLoop) and _packs(n, source.ref)]
        starts = [n for n in body[after + 1 : second] if isinstance(n, ir.BlockLoop) and _names(n, late.ref)]
        stores = [n for n in body[last + 1 :] if _names(n, late.ref)]
        carry = _copied_to(stores[0], late.ref) if len(stores) == 1 else None
        if operand is None or carry is None or any(o.ref in declared for o, _, _ in early.feeds):
            return None
        scaled, packed = ([n for n in body if _names(n, ref) and not isinstance(n, ir.Alive)] for ref in (carry, source.ref))
        if len(makers) != 1 or len(starts) != 1 or scaled != [*starts, *stores] or packed != [operand, *makers, late, wait]:
            return None
        between = tuple(n for n in body[after + 1 : second] if n not in starts and not _names(n, late.ref) and n != operand)
        tail = tuple(n for n in body[last + 1 :] if n not in stores)
        head = tuple(n for n in body[:first] if n != operand)
        return cls(loop, head, early, early_wait, between, late, wait, tail, carry, starts[0], operand, makers[0])

    def nodes(self) -> tuple[ir.Node, ...]:
        """The late product adds to the carry itself. Its operand is in float32 until the product of the block before is complete,
        and is packed then: ptxas serialises products whose operands are made while others are in flight (C7513)."""
        wide, packed = self.operand.ref, ir.Ref("c", self.operand.ref.of, "_late")
        ((source, first_block, done),) = self.late.feeds
        feeds = ((dataclasses.replace(source, ref=packed, owner=packed), first_block, done),)
        early = dataclasses.replace(self.early, awaited=True)
        late = dataclasses.replace(self.late, ref=self.carry, feeds=feeds, registers=0, awaited=True)
        late_wait = dataclasses.replace(self.late_wait, ref=self.carry, owners=(packed, self.carry))
        early_wait = dataclasses.replace(self.early_wait, pending=1)
        between = ir.rebuild(self.between, lambda x: self._unpacked(x, wide))
        head = (*self.head, dataclasses.replace(self.operand, form="word", dtype="float32", count=2 * self.operand.count))
        pack = ir.rebuild(_kept(self.maker, wide)[0], lambda x: _with_keep(x, wide, packed, "pair"))
        pack = dataclasses.replace(pack, x=ir.Read("word", wide, "float32"))
        start = ir.rebuild(self.start, lambda x: self.carry if x == self.late.ref else x)
        pack_all = dataclasses.replace(self.maker, steps=(pack,), reads=(wide,))
        kept = (start, *self.tail, pack_all, ir.Alive(packed), st.Pin(packed), st.Pin(self.carry))
        first = (*head, early, self.early_wait, *between, *kept)
        body = (*head, early, late, early_wait, *between, late_wait, *kept)
        loop = dataclasses.replace(self.loop, first=first, body=body, last=(late, late_wait))
        return dataclasses.replace(self.operand, ref=packed), ir.Alive(packed, self.operand.count), loop

    def _unpacked(self, x: ir.Node, wide: ir.Ref) -> ir.Node:
        if isinstance(x, ir.Put) and (made := _with_keep(x.action, wide, wide, "word")) is not x.action:
            return dataclasses.replace(x, action=made, dtype="float32")
        return dataclasses.replace(x, registers=2 * self.operand.count) if x == ir.Alive(wide, self.operand.count) else x


def _with_keep(action: ir.Node, ref: ir.Ref, to: ir.Ref, form: str) -> Any:
    """``action``; one that keeps a value in ``ref`` keeps it in ``to``."""
    return dataclasses.replace(action, ref=to, form=form) if isinstance(action, ir.Keep) and action.ref == ref else action


def _kept(loop: ir.BlockLoop, ref: ir.Ref) -> list[ir.Put]:
    """The steps of ``loop`` that keep elements in ``ref``."""
    puts = [step for step in loop.steps if isinstance(step, ir.Put)]
    return [put for put in puts if isinstance(put.action, ir.Keep) and put.action.ref == ref]


def _packs(loop: ir.BlockLoop, ref: ir.Ref) -> bool:
    """Does ``loop`` pack all elements of the 16-bit value ``ref``, which it computes in float32?"""
    kinds = [(p.action.form, p.action.to, p.action.first, p.pair) for p in _kept(loop, ref) if isinstance(p.action, ir.Keep)]
    return kinds == [("pair", None, 0, False)] and loop.first == 0 and loop.count == tiles.blocks(loop.width)


def _names(node: ir.Node, ref: ir.Ref) -> bool:
    return any(x == ref for x in ir.within(node))


def _copied_to(node: ir.Node, ref: ir.Ref) -> ir.Ref | None:
    """The registers to which ``node`` copies ``ref``, or None if it does something else."""
    match node:
        case ir.BlockLoop(steps=(ir.Put(ir.Keep(ref=to, form="word", to=None, first=0), ir.Read("word", source, _, 0)),)):
            return to if source == ref else None
    return None


# --- Ping-pong: while one lane multiplies, the others run the code between their products -----------------------------------------


def with_ping_pong(nodes: Sequence[ir.Node]) -> tuple[tuple[ir.Node, ...], bool]:
    """``nodes`` with ``Turn``s in loops that have two products or more, one after the other; and whether there is such a loop.

    As in FlashAttention-3 (named barriers, arXiv 2407.08608, section 3.1), a lane has its turn from the second product of an
    iteration to the first of the next one, and the softmax between the two runs during the products of other lanes. Without turns
    all lanes would multiply at the same time, and then all be in their softmax. All lanes of the CTA must run the loops equally
    often, as lanes on tiles of one batch do.
    """
    found = tuple(changed for node in nodes for changed in _with_turns(node))
    return found, found != tuple(nodes)


def _with_turns(node: ir.Node) -> tuple[ir.Node, ...]:
    """``node``; a loop with two products or more, which the lane enters and leaves with the turn, has ``Turn``s. Where the second
    product is late, each iteration has one turn, for all that it issues."""
    if not isinstance(node, st.CountedLoop):
        return (node,)
    if node.first:
        return (dataclasses.replace(node, first=_one_turn(node.first), body=_one_turn(node.body), last=_one_turn(node.last)),)
    products = [(k, inner.weight) for k, inner in enumerate(node.body) if isinstance(inner, st.Issue)]
    first = [k for k, weight in products if weight == products[0][1]]
    later = [k for k, weight in products if weight != products[0][1]]
    if not later or later[0] < first[-1]:
        return (node,)
    between = (st.Turn("give"), *node.body[first[-1] + 1 : later[0]], st.Turn("take"))
    body = (*node.body[: first[-1] + 1], *between, *node.body[later[0] :])
    return st.Turn("take"), dataclasses.replace(node, body=body), st.Turn("give")


def _one_turn(nodes: Sequence[ir.Node]) -> tuple[ir.Node, ...]:
    issues = [k for k, node in enumerate(nodes) if isinstance(node, st.Issue)]
    first, end = issues[0], issues[-1] + 1
    return (*nodes[:first], st.Turn("take"), *nodes[first:end], st.Turn("give"), *nodes[end:])
