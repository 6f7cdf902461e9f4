"""Columns split over CTAs: where several CTAs share a stage, which values are slabs, and how a product gets columns of others.

Comes in: the instructions of a stage, and the CTAs that share it. Goes out: ``ColumnSplit``, which all other modules ask; slabs in
the order in which kernels read them; the nodes by which CTAs exchange columns, and the waits for these.

A CTA computes a slab of the columns of every product, so it has a slab of each weight and of each vector. A value of several groups
of columns, such as the four gates of an LSTM, has a slab of each group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import SINKS, Instr, TileProgram, walk
from kitsune_jax.targets.cuda import ir, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.ir import Ref
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS, SUM_BYTES, gradient_shapes, is_half

Joined = Mapping[int, Sequence[int]]  # concatenations that only matmuls read -> their parts

# --- The questions that other modules ask -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnSplit:
    """``ctas``: that share the stage; ``slabs``: slab -> its groups of columns; ``partial``: results of partial products;
    ``joined``: concatenations that only matmuls read -> their parts."""

    ctas: int
    slabs: dict[int, int]
    partial: frozenset[int]
    joined: Joined

    @staticmethod
    def of(instrs: Sequence[Instr], program: TileProgram, ctas: int, lanes: int, joined: Joined) -> ColumnSplit:
        """The split of a stage's columns among ``ctas`` CTAs. Raises ``CannotLower`` where there is none."""
        slabs = _slabs_of_stage(instrs, program, ctas, lanes, joined)
        return ColumnSplit(ctas, slabs, _partial_products(instrs, program, slabs, joined), joined)

    def parts(self, v: int) -> int:
        """The number of CTAs that the columns of ``v`` are split over."""
        return self.ctas if v in self.slabs else 1

    def groups(self, v: int) -> int:
        """The groups of columns of ``v``, of each of which a CTA has a slab."""
        return self.slabs.get(v, 1)

    def once(self, v: int) -> bool:
        """Must only one CTA output ``v``? All CTAs of a split stage have the values that are no slabs."""
        return self.ctas > 1 and v not in self.slabs

    def refuse(self, what: str, *values: int) -> None:
        """Raise ``CannotLower`` if one of ``values`` is a slab."""
        if any(v in self.slabs for v in values):
            raise CannotLower(f"{what} of columns that are split over CTAs has no code on the GPU")

    def refuse_stage(self, what: str) -> None:
        """Raise ``CannotLower`` if several CTAs share the stage."""
        if self.ctas > 1:
            raise CannotLower(f"{what} in a stage that is split by columns has no code on the GPU")

    def pieces(self, x: int) -> list[int]:
        """The values whose columns make up operand ``x`` of a product: the parts of a concatenation that only products read."""
        return _pieces(x, self.joined)

    def weight(self, v: int, x: int, columns: Callable[[int], int]) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """(pieces of K, columns of all CTAs, runs of K) of the weight of product ``v`` of operand ``x``. A CTA has all columns of a
        partial product, for its slab of each run of K."""
        pieces = self.pieces(x)
        k = tuple(columns(p) for p in pieces)
        if v not in self.partial:
            return k, columns(v), ()
        runs = tuple(n // self.slabs[p] for n, p in zip(k, pieces, strict=True) for _ in range(self.slabs[p]))
        return tuple(n // self.ctas for n in k), columns(v) * self.ctas, runs


def slab_by_slab(x: Any, groups: int, ctas: int) -> Any:
    """``x`` with its columns (the last dimension) in another order: by CTA, and for each CTA its slab of each group of columns."""
    if groups == 1:
        return x
    return x.reshape(*x.shape[:-1], groups, ctas, -1).swapaxes(-3, -2).reshape(x.shape)


def ring_bytes(bodies: Iterable[tuple[int, Sequence[Instr]]], lanes: int) -> int:
    """Upper bound of the bytes of the barriers of exchanges, for stages of (CTAs, instructions)."""
    blocks = [i.block for ctas, body in bodies if ctas > 1 for i in walk(body) if i.block is not None]
    return sum(16 * tiles.EXCHANGE_DEPTH * lanes for block in blocks for i in block.body if i.kind == "matmul")


# --- Which values are slabs -------------------------------------------------------------------------------------------------------


def _slabs_of_stage(instrs: Sequence[Instr], program: TileProgram, ctas: int, lanes: int, joined: Joined) -> dict[int, int]:
    """The slabs, each with the number of its groups of columns. Raises ``CannotLower`` where the stage cannot be split.

    The results of matmuls are slabs, and so are values that a pointwise operator combines with slabs. A matmul's operand is no
    slab, because it contracts all columns. Of a weight gradient, the operand whose columns become those of the accumulators is one.

    A loop carries slabs from step to step, so its products may read them: the CTAs then exchange their columns. A value that is
    sliced into equal parts, as the gates of an LSTM, has as many groups of columns. A product that contracts more bytes than its
    sums have, as that of the cotangents of gates, is *partial*: each CTA multiplies its columns with its rows of the weights, and
    the CTAs exchange the sums.
    """
    if ctas == 1:
        return {}
    if any(i.block is not None for i in instrs):
        return _loop_slabs(instrs, program, ctas, joined)

    found = {v for i in instrs if i.kind == "matmul" for v in i.outputs}
    for v in found:
        _check_columns(program, v, ctas)
    _spread(instrs, program, found)
    for i in instrs:
        if i.kind == "matmul_sink":
            found = _with_gradient_slab(i, instrs, program, ctas, lanes, found)
    if any(i.kind == "matmul" and i.inputs[0] in found for i in instrs):
        raise CannotLower("a matmul reads columns that are split over CTAs")
    return dict.fromkeys(sorted(found), 1)


def _check_columns(program: TileProgram, v: int, parts: int) -> None:
    columns = _columns(program, v)
    if columns % (parts * BLOCK_COLUMNS):
        raise CannotLower(f"{columns} columns are not {parts} slabs of whole blocks of {BLOCK_COLUMNS}")


def _with_gradient_slab(
    gradient: Instr, instrs: Sequence[Instr], program: TileProgram, ctas: int, lanes: int, found: set[int]
) -> set[int]:
    """``found`` and the operand of ``gradient`` to split: the one that needs fewest registers and leaves the other whole."""
    first, second = gradient.inputs
    half = is_half(program.values[first].dtype)
    for shape in gradient_shapes(_columns(program, first), _columns(program, second), half, ctas, lanes):
        rows, columns = (second, first) if shape.swapped else (first, second)
        slabs = {*found, columns}
        _spread(instrs, program, slabs)
        if rows not in slabs:
            return slabs
    raise CannotLower(f"a weight gradient does not fit the registers of {ctas} CTAs")


def _columns(program: TileProgram, v: int) -> int:
    return math.prod(program.values[v].shape)


def _is_wide(program: TileProgram, v: int) -> bool:
    return program.values[v].tile and _columns(program, v) != 1


_NOT_POINTWISE = frozenset({"matmul", "load", "pop", "push", "store", *SINKS})


def _spread(instrs: Sequence[Instr], program: TileProgram, found: set[int]) -> None:
    """Add to ``found`` all values that pointwise operators combine with slabs."""
    changed = True
    while changed:
        changed = False
        for i in instrs:
            if i.kind in _NOT_POINTWISE or not i.outputs:
                continue
            here = [v for v in (*i.inputs, *i.outputs) if _is_wide(program, v)]
            if any(v in found for v in here) and not all(v in found for v in here):
                found.update(here)
                changed = True


class _SplitClasses:
    """Classes (union-find) of values whose columns are split in the same way."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def of(self, v: int) -> int:
        while (up := self.parent.setdefault(v, v)) != v:
            self.parent[v] = v = self.parent.setdefault(up, up)
        return v

    def join(self, values: Iterable[int]) -> None:
        first, *others = map(self.of, values)
        for v in others:
            self.parent[self.of(v)] = self.of(first)


def _loop_slabs(instrs: Sequence[Instr], program: TileProgram, ctas: int, joined: Joined) -> dict[int, int]:
    body = tuple(walk(instrs))
    if not any(i.kind == "matmul" for i in body):
        raise CannotLower("a loop with no weights cannot be split by columns")
    if any(i.kind in SINKS for i in body):
        raise CannotLower("sums over the steps of a loop whose weights are split over CTAs have no code on the GPU")
    classes, parts = _SplitClasses(), list[tuple[int, int]]()  # (a value, an equal part of it)
    for i in body:
        parts += _equal_parts(i, program, joined)
        for values in _split_alike(i, program):
            classes.join(values)
    whole = {classes.of(x): _columns(program, x) // _columns(program, part) for x, part in parts}
    if any(_columns(program, x) != whole[classes.of(x)] * _columns(program, p) or classes.of(p) in whole for x, p in parts):
        raise CannotLower("columns that are sliced into parts of several sizes cannot be split over CTAs")
    found = {classes.of(v) for i in body if i.kind == "matmul" for v in i.outputs}
    while more := {classes.of(b) for x in parts for a, b in (x, x[::-1]) if classes.of(a) in found} - found:
        found |= more
    slabs = {v: whole.get(classes.of(v), 1) for v in sorted(classes.parent) if classes.of(v) in found}
    for v, groups in slabs.items():
        _check_columns(program, v, ctas * groups)
    sums = _partial_products(instrs, program, slabs, joined)
    for i in body:
        if i.kind == "matmul" and i.outputs[0] not in sums and any(slabs.get(v, 1) > 1 for v in _pieces(i.inputs[0], joined)):
            raise CannotLower("a product of sliced columns and others cannot be split over CTAs")
    return slabs


def _split_alike(instr: Instr, program: TileProgram) -> list[list[int]]:
    """Groups of values of ``instr`` whose columns must be split in the same way."""
    if instr.block is not None:
        count = len(instr.block.carries)
        places = zip(instr.inputs[-count:], instr.block.carries, instr.block.results, instr.outputs, strict=True) if count else ()
        groups = [[v for v in place if _is_wide(program, v)] for place in places]
    else:
        wide = [v for v in (*instr.inputs, *instr.outputs) if _is_wide(program, v)]
        moves = len({_columns(program, v) for v in wide}) > 1  # columns, which has no code for slabs
        apart = moves or instr.kind in ("matmul", "slice", "concatenate", "store", "store_slice")
        groups = [[v] for v in wide] if apart else [wide]
    return [group for group in groups if group]


def _partial_products(instrs: Sequence[Instr], program: TileProgram, found: Mapping[int, int], joined: Joined) -> frozenset[int]:
    """The results of partial products. ``found``: slab -> its groups."""
    body, sums = tuple(walk(instrs)), set[int]()
    makers = {v: i for i in body for v in i.outputs}
    for i in body:
        pieces = _pieces(i.inputs[0], joined) if i.kind == "matmul" else []
        if not pieces or any(p not in found or _is_loaded(p, makers) for p in pieces):
            continue
        size = 2 if is_half(program.values[i.inputs[0]].dtype) else 4
        contracted = size * _columns(program, i.inputs[0])
        if contracted > SUM_BYTES * _columns(program, i.outputs[0]) or any(found[p] > 1 for p in pieces):
            sums.update(i.outputs)
    return frozenset(sums)


def _is_loaded(v: int, makers: Mapping[int, Instr]) -> bool:
    """Is ``v`` from an array, of which every CTA can read all columns?"""
    while v in makers and makers[v].kind == "reshape":
        v = makers[v].inputs[0]
    return v in makers and makers[v].kind in ("load", "load_slice")


def _pieces(x: int, joined: Joined) -> list[int]:
    """The values whose columns make up operand ``x`` of a product."""
    found = [x]
    while any(p in joined for p in found):
        found = [part for p in found for part in joined.get(p, (p,))]
    return found


def _equal_parts(instr: Instr, program: TileProgram, joined: Collection[int]) -> list[tuple[int, int]]:
    """(a value, an equal part of its columns) for a slice or a concatenation."""
    if instr.kind == "slice":
        (x,), found = instr.inputs, instr.outputs
    elif instr.kind == "concatenate" and instr.outputs[0] not in joined and instr["dimension"] == 1:
        (x,), found = instr.outputs, instr.inputs
    else:
        return []
    return [(x, part) for part in found] if _is_wide(program, x) and len(program.values[x].shape) == 1 else []


# --- Exchanges: a product contracts columns of which each CTA of a cluster makes a slab -------------------------------------------


class ExchangeBuilder(Protocol):
    """The part of ``stage.builder.StageCodeBuilder``, which asks this module about columns, that exchanges need."""

    split: ColumnSplit
    program: TileProgram
    setup: list[ir.Node]
    gathered: dict[int, int]
    counter: int

    def root(self, v: int) -> int: ...
    def value(self, v: int) -> st.StageValue: ...
    def unnamed(self, value: st.StageValue) -> int: ...
    def settle(self, v: int, home: st.Home) -> None: ...
    def materialize(self, v: int) -> None: ...
    def add(self, *nodes: ir.Node) -> None: ...
    def evaluate(self, width: int, wanted: Iterable[ir.Action]) -> None: ...


def all_gather(at: ExchangeBuilder, v: int, depth: int = 1) -> int:
    """The value of which ``v`` is a slab, gathered from all CTAs through a ring of ``depth`` entries; or ``v`` if it is no slab.

    Each CTA has a slab of the columns of every weight, so the values of a step are slabs, while a product contracts all columns.
    Every lane stores its slab into an entry of a ring in the shared memory of each CTA (``ClusterQueue``, which all write and
    read), waits for all slabs before it first multiplies with them (``stage/chunks.py``), and multiplies from the entry, which it
    releases at the end of the step. A carry, sent when a step begins, has a ring of two entries, as a fast CTA may be a step ahead
    of a slow one; other values need one entry. All CTAs of a cluster run the same steps on the same tiles, so entry n is the same
    value in all.
    """
    v = at.root(v)
    value = at.value(v)
    if not value.slab:
        return v
    if v not in at.gathered:
        made = at.unnamed(st.StageValue(value.n * at.split.ctas, value.dtype, False))
        # Every CTA can read all columns of an array.
        at.settle(made, value.home if isinstance(value.home, st.InArray) else _exchanged(at, v, value, depth))
        at.gathered[v] = made
    return at.gathered[v]


def begin_all_gathers(at: ExchangeBuilder, body: Sequence[Instr], carries: Collection[int]) -> None:
    """Send the carries that products of ``body`` contract, before all else in a step."""
    for i in body:
        for v in at.split.pieces(i.inputs[0]) if i.kind == "matmul" else ():
            if at.root(v) in carries:
                all_gather(at, v, tiles.EXCHANGE_DEPTH)


def _exchanged(at: ExchangeBuilder, v: int, value: st.StageValue, depth: int) -> st.InImage:
    ring, push, entry = (_name(at, kind) for kind in ("exchange", "push", "entry"))
    vectors = tiles.image_vectors(value.width, value.form)
    at.setup.append(_exchange(at, ring, vectors, depth, value.form))
    at.add(st.QueueCall(ring, "wr_acquire"), st.Entry(push, ring, vectors, write=True))
    at.evaluate(value.width, [ir.Keep(v, _name(at, "q"), value.form, to=push, push=True, reads=1)])
    at.add(st.QueueCall(ring, "wr_release"), st.Entry(entry, ring, 0))
    return st.InImage(entry, value.form, ring)


def reduce_scatter(at: ExchangeBuilder, products: Sequence[tuple[int, st.Multiply]]) -> None:
    """Give slabs of the sums of partial ``products`` homes; the sums of one product travel while the next one multiplies.

    Each CTA has the sums over its part of K for all columns. It sends every other CTA the slab that it needs, and adds up the slabs
    that it gets in the order of the CTAs, so that all runs give the same bits.
    """
    for v, ring in [(v, _send_partial_sums(at, v, product)) for v, product in products]:
        value, parts = at.value(v), list[int]()
        part = dataclasses.replace(value, dtype="float32", slab=0, home=None)
        at.add(st.QueueCall(ring, "rd_acquire"))
        for rank in range(at.split.ctas):
            entry = _name(at, "entry")
            at.add(st.Entry(entry, ring, tiles.image_vectors(part.width, part.form), of=rank))
            parts.append(at.unnamed(dataclasses.replace(part, home=st.InImage(entry, part.form, ring))))
        at.settle(v, st.Expression(" + ".join(f"{{{k}}}" for k in range(at.split.ctas)), tuple(parts)))
        at.materialize(v)
        at.add(st.QueueCall(ring, "rd_release"))


def _send_partial_sums(at: ExchangeBuilder, v: int, product: st.Multiply) -> Ref:
    """The ring through which each CTA gets its slab of the sums that ``product`` has in every CTA."""
    ring, push, n = _name(at, "exchange"), _name(at, "push"), at.value(v).n * at.split.ctas
    mine = at.unnamed(st.StageValue(n, "float32", False, product))
    vectors = tiles.image_vectors(at.value(mine).width, "word") // at.split.ctas
    at.setup.append(_exchange(at, ring, vectors, 1, "word"))
    at.add(st.QueueCall(ring, "wr_acquire"), st.Entry(push, ring, vectors, write=True, each=True))
    at.evaluate(at.value(mine).width, [ir.Keep(mine, _name(at, "q"), "word", to=push, push=True, reads=1)])
    at.add(st.QueueCall(ring, "wr_release"))
    return ring


def _exchange(at: ExchangeBuilder, ring: Ref, vectors: int, depth: int, form: str) -> st.Exchange:
    half = at.program.tile_rows == tiles.HALF_TILE_ROWS
    if half and form == "bit":
        raise CannotLower("masks have no code in a tile of 32 rows")
    return st.Exchange(ring, vectors * at.split.ctas, depth, one_row_of=form if half else "")


def _name(at: ExchangeBuilder, kind: str) -> Ref:
    at.counter += 1
    return Ref(kind, at.counter, "_all")


def release_entries(at: ExchangeBuilder, known: dict[int, int]) -> None:
    """Release the entries of values that were gathered since ``known`` and are no longer read."""
    for v, made in at.gathered.items():
        home = at.value(made).home
        if v not in known and isinstance(home, st.InImage):
            at.add(st.QueueCall(home.owner, "rd_release"))


class ExchangeWaits:
    """The waits for columns of other CTAs, of the nodes of a stage in their order."""

    def __init__(self) -> None:
        self.loops: dict[Ref, int] = {}  # ring -> the loop whose steps have an entry in it
        self.awaited: set[Ref] = set()  # the rings that have been waited for

    def see(self, node: ir.Node, loop: int) -> None:
        """Note the exchanges that a node in loop ``loop`` declares or waits for."""
        if isinstance(node, st.Entry) and node.queue.kind == "exchange":
            self.loops[node.queue] = loop
        if isinstance(node, st.QueueCall) and node.queue.kind == "exchange" and node.call == "rd_acquire":
            self.awaited.add(node.queue)

    def with_wait(self, o: st.Operand, loop: int) -> st.Operand:
        """``o``, which waits for the columns of other CTAs if it is the first to multiply with them."""
        if o.owner.kind != "exchange" or o.owner in self.awaited:
            return o
        if self.loops[o.owner] != loop:
            raise CannotLower("columns of other CTAs that only an inner loop multiplies with have no code on the GPU")
        self.awaited.add(o.owner)
        return dataclasses.replace(o, awaited=True)

    def check(self) -> None:
        """Raise ``CannotLower`` if columns arrive that nothing waits for."""
        if self.loops.keys() != self.awaited:
            raise CannotLower("columns of other CTAs that no product waits for have no code on the GPU")
