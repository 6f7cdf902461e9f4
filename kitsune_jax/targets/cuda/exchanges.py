"""Columns of a carry, or of what a step makes, that the CTAs of a cluster hand each other: a product contracts all of them.

Comes in: an operand of a product, and the ``Evaluation`` of a stage with a loop that is split over a cluster. Goes out: the value
with all of its columns. Each CTA holds a slab of every weight's columns still, so what it makes in a step is a slab, and the next
product needs those of the others as well: every lane stores its slab into the entry of a ring in the shared memory of each CTA
(``ClusterQueue``, of which all are writers and readers), waits for the slabs of all where it multiplies with them first
(``chunks.py``), and multiplies from there. An entry is given back at the end of the step: a carry, which is sent when a step
begins, has a ring of two, in which a fast CTA may be a step ahead of a slow one; for what is made in a step one entry does.
Of a partial product (``slabs.py``) they hand each other sums: every CTA has those of its part of K for all columns, sends each
other CTA the slab that it needs, and adds up what it has got, in the order of the CTAs, so all runs give the same bits.
Invariant: all CTAs of a cluster take the same steps on the same tiles, so entry n is the same value in all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.device_ir import Keep, Ref
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.values import Expression, InArray, InImage, Multiply, Value


def whole(at: Evaluation, v: int, depth: int = 1) -> int:
    """``v``, or where that is a slab the value of which it is one, by way of a ring of ``depth`` entries."""
    v = at.root(v)
    value = at.value(v)
    if not value.slab:
        return v
    if v not in at.gathered:
        made = at.unnamed(Value(value.n * at.split, value.dtype, False))
        # All of an array's columns are there for every CTA.
        at.settle(made, value.home if isinstance(value.home, InArray) else _exchanged(at, v, value, depth))
        at.gathered[v] = made
    return at.gathered[v]


def begin(at: Evaluation, body: Sequence[Instr], carries: Collection[int]) -> None:
    """Sends the carries that products of ``body`` contract on their way, in front of all else that a step does."""
    for i in body:
        for v in pieces(at, i.inputs[0]) if i.kind == "matmul" else ():
            if at.root(v) in carries:
                whole(at, v, tiles.EXCHANGE_DEPTH)


def pieces(at: Evaluation, x: int) -> list[int]:
    """The values whose columns make up the operand: the parts of a concatenation that nobody else needs as one."""
    parts = at.facts.joined.get(x)
    return [x] if parts is None else [p for part in parts for p in pieces(at, part)]


def _exchanged(at: Evaluation, v: int, value: Value, depth: int) -> InImage:
    ring, push, entry = (_name(at, kind) for kind in ("exchange", "push", "entry"))
    vectors = tiles.image_vectors(value.width, value.form)
    at.setup.append(st.Exchange(ring, vectors * at.split, depth))
    at.add(st.QueueCall(ring, "wr_acquire"), st.Entry(push, ring, vectors, write=True))
    at.evaluate(value.width, [Keep(v, _name(at, "q"), value.form, to=push, push=True, reads=1)])
    at.add(st.QueueCall(ring, "wr_release"), st.Entry(entry, ring, 0))
    return InImage(entry, value.form, ring)


def add_up(at: Evaluation, products: Sequence[tuple[int, Multiply]]) -> None:
    """Gives slabs of the sums of partial ``products`` homes. Those of one are on their way while the next one multiplies."""
    for v, ring in [(v, _handed_out(at, v, product)) for v, product in products]:
        value, parts = at.value(v), list[int]()
        part = dataclasses.replace(value, dtype="float32", slab=0, home=None)
        at.add(st.QueueCall(ring, "rd_acquire"))
        for rank in range(at.split):
            entry = _name(at, "entry")
            at.add(st.Entry(entry, ring, tiles.image_vectors(part.width, part.form), of=rank))
            parts.append(at.unnamed(dataclasses.replace(part, home=InImage(entry, part.form, ring))))
        at.settle(v, Expression(" + ".join(f"{{{k}}}" for k in range(at.split)), tuple(parts)))
        at.materialize(v)
        at.add(st.QueueCall(ring, "rd_release"))


def _handed_out(at: Evaluation, v: int, product: Multiply) -> Ref:
    """The ring by which each CTA gets its slab of what ``product`` has made in every other."""
    ring, push, n = _name(at, "exchange"), _name(at, "push"), at.value(v).n * at.split
    mine = at.unnamed(Value(n, "float32", False, product))
    vectors = tiles.image_vectors(at.value(mine).width, "word") // at.split
    at.setup.append(st.Exchange(ring, vectors * at.split, 1))
    at.add(st.QueueCall(ring, "wr_acquire"), st.Entry(push, ring, vectors, write=True, each=True))
    at.evaluate(at.value(mine).width, [Keep(mine, _name(at, "q"), "word", to=push, push=True, reads=1)])
    at.add(st.QueueCall(ring, "wr_release"))
    return ring


def _name(at: Evaluation, kind: str) -> Ref:
    at.counter += 1
    return Ref(kind, at.counter, "_all")


def give_back(at: Evaluation, known: dict[int, int]) -> None:
    """The entries of what was put together since ``known``: nobody reads it any more."""
    for v, made in at.gathered.items():
        home = at.value(made).home
        if v not in known and isinstance(home, InImage):
            at.add(st.QueueCall(home.owner, "rd_release"))
