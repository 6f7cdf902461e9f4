"""Columns of a carry, or of what a step makes, that the CTAs of a cluster hand each other: a product contracts all of them.

Comes in: an operand of a product, and the ``Evaluation`` of a stage with a loop that is split over a cluster. Goes out: the value
with all of its columns. Each CTA holds a slab of every weight's columns still, so what it makes in a step is a slab, and the next
product needs those of the others as well: every lane stores its slab into the entry of a ring in the shared memory of each CTA
(``ClusterQueue``, of which all are writers and readers), waits for the slabs of all where it multiplies with them first
(``chunks.py``), and multiplies from there. An entry is given back at the end of the step: a carry, which is sent when a step
begins, has a ring of two, in which a fast CTA may be a step ahead of a slow one; for what is made in a step one entry does.
Invariant: all CTAs of a cluster take the same steps on the same tiles, so entry n is the same value in all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.device_ir import Keep, Ref
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.values import InArray, InImage, Value


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
    at.counter += 1
    ring, push, entry = (Ref(kind, at.counter, "_all") for kind in ("exchange", "push", "entry"))
    vectors = tiles.image_vectors(value.width, value.form)
    at.setup.append(st.Exchange(ring, vectors * at.split, depth))
    at.add(st.QueueCall(ring, "wr_acquire"), st.Entry(push, ring, vectors, write=True))
    at.evaluate(value.width, [Keep(v, Ref("q", at.counter, "_all"), value.form, to=push, push=True, reads=1)])
    at.add(st.QueueCall(ring, "wr_release"), st.Entry(entry, ring, 0))
    return InImage(entry, value.form, ring)


def give_back(at: Evaluation, known: dict[int, int]) -> None:
    """The entries of what was put together since ``known``: nobody reads it any more."""
    for v, made in at.gathered.items():
        home = at.value(made).home
        if v not in known and isinstance(home, InImage):
            at.add(st.QueueCall(home.owner, "rd_release"))
