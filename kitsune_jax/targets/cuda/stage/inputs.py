"""Inputs through a ring of tiles: which arrays, how deep the ring is, and the stage's nodes that read it.

Comes in: the nodes of a fitted stage, which read rows where they lie in global memory. Goes out: nodes that read them from an entry
of the ring (``TileRing`` of stage/rows.h). Rows of whole boxes that products read come by tensor maps, and the tensor core reads
them in the entry; others come by bulk copies. A deep ring is read for all that the stage needs. An entry of a shallow one has to be
free for a tile to come while the lane works on, so it is read up to the last product that multiplies with it; what the stage
reads later, such as a residual, is kept in registers if these are few, or still comes from global memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import ir, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.ir import Node, Ref
from kitsune_jax.targets.cuda.stage.fitting import Liveness


def ring_arrays(program: TileProgram, a: Arrangement) -> tuple[int, ...]:
    """The inputs that a ring may bring. A stage of a spatial pipeline has queues instead. Loops need no ring: a tile's
    computation hides its load. Other rows than these lie side by side in the accesses of a warp, or are staged."""
    body = program.stages[0].body
    if a.spatial or a.sm < 900 or any(i.block is not None for i in body):
        return ()
    loads = {i["array"] for i in body if i.kind == "load"}
    return tuple(k for k in sorted(loads) if frame.is_in_pieces(program, program.inputs[k]))


def boxed_arrays(program: TileProgram, arrays: Collection[int]) -> frozenset[int]:
    """Those of ``arrays`` that tensor maps may bring: of 16-bit elements and whole boxes, and an operand of a product, alone or
    beside others."""
    body, rows = program.stages[0].body, program.rows
    makers = {v: i for i in body for v in i.outputs}
    found, todo = set[int](), [i.inputs[0] for i in body if i.kind == "matmul"]
    while todo:
        maker = makers.get(todo.pop())
        if maker is not None and maker.kind == "concatenate":
            todo += maker.inputs
        elif maker is not None and maker.kind == "load" and maker["array"] in arrays:
            array = program.inputs[maker["array"]]
            if tiles.in_boxes(frame.columns_of(array).n, array.dtype) and rows <= tiles.MOST_BOXED_ROWS:
                found.add(maker["array"])
    return frozenset(found)


def multiplies_boxes(nodes: Sequence[Node], boxed: Collection[int]) -> bool:
    """Is each of ``boxed`` an operand of a product in the ring of tiles, and of none in global memory, or in a loop over layers,
    whose weights have one form?"""
    found = [o for node in nodes if isinstance(node, st.Issue) for o, _, _ in node.feeds if o.kind == "boxes"]
    every = [x for node in nodes for x in ir.within(node) if isinstance(x, st.Operand) and x.kind == "boxes"]
    refs = {o.rows.ref for o in found if o.rows is not None}
    return len(every) == len(found) and refs == {Ref("ring", k) for k in boxed}


@dataclasses.dataclass(frozen=True, slots=True)
class RingReads:
    """The ``nodes`` of a stage of which some read the ring's ``arrays``; ``others``: those of ``arrays`` that are read from global
    memory as well."""

    nodes: tuple[Node, ...]
    arrays: tuple[int, ...]
    others: frozenset[int]


# Registers of a thread, by lanes, that values and kept rows may have together. With three lanes 32 more than values alone may have:
# the edge MLP of a graph network, 96 of values and 32 kept, spills nothing.
_MOST_REGISTERS = {1: 208, 2: 200, 3: 128}


def room_for_kept(lanes: int, liveness: Liveness) -> int:
    """Registers that a stage has for kept rows."""
    return min(tiles.KEPT_REGISTERS, _MOST_REGISTERS[lanes] - liveness.peak)


def through_ring(nodes: Sequence[Node], arrays: Collection[int], held: bool, room: int, boxed: Collection[int] = ()) -> RingReads:
    """``nodes`` with a wait for the entry before the first read of ``arrays`` and its release behind the last one; if it is not
    ``held`` so long, behind the last one before a product that reads none of them. A product reads ``boxed`` arrays until it is
    complete. ``room``: registers for rows that are kept."""
    refs, found, last = {Ref("in", k) for k in arrays}, dict[int, set[int]](), -1
    flying = dict[Ref, set[int]]()  # products that read boxes, by their accumulators
    for n, node in enumerate(nodes):
        read = {x.ref.of for x in _rows_in(node) if x.ref in refs}
        if isinstance(node, st.Complete):
            read = flying.pop(node.ref, set())
        if read:
            found[n], last = read, n
        elif isinstance(node, st.Issue | st.LayerLoop) and last >= 0 and not (held or flying):
            break
        if isinstance(node, st.Issue) and read.intersection(boxed):
            flying[node.ref] = read
    if last < 0:
        return RingReads(tuple(nodes), (), frozenset())

    def change(x: Any) -> Any:
        if isinstance(x, ir.Rows) and x.ref in refs:
            access = "kInBoxes" if x.ref.of in boxed else "kInRing"
            return dataclasses.replace(x, ref=Ref("ring", x.ref.of), access=access)
        return x

    front = [ir.rebuild(node, change) if n in found else node for n, node in enumerate(nodes[: last + 1])]
    first = min(found)
    used = tuple(sorted(set[int]().union(*found.values())))
    kept, back = _with_kept(nodes[last + 1 :], [Ref("in", k) for k in used], room)
    kept = [ir.rebuild(node, change) for node in kept]
    made = (*front[:first], frame.TileEntry("rd_acquire"), *front[first:], *kept, frame.TileEntry("rd_release"), *back)
    named = [x.ref for node in made for x in ir.within(node) if isinstance(x, ir.Rows | st.KeepAddress)]
    return RingReads(made, used, frozenset(ref.of for ref in named if ref in refs))


def _with_kept(nodes: Sequence[Node], refs: Sequence[Ref], room: int) -> tuple[list[Node], list[Node]]:
    """(what to keep in at most ``room`` registers, ``nodes`` that read it): the rows of each of ``refs`` that only loops over
    blocks read, as pairs of 16-bit elements."""
    kept, back = list[Node](), list(nodes)
    for ref in refs:
        reads = [x for node in back for x in _rows_in(node) if x.ref == ref]
        loops = [node for node in back if isinstance(node, ir.BlockLoop) and any(x.ref == ref for x in _rows_in(node))]
        steps = [(loop, x) for loop in loops for x in loop.steps if isinstance(x, ir.ArrayBlock) and x.rows.ref == ref]
        if not steps or len(steps) < len(reads) or not all(x.rows.pairs and x.slab is None for _, x in steps):
            continue
        spans = [(loop.first - x.shift, loop.count) for loop, x in steps if isinstance(loop.first, int)]
        if len({loop.width for loop, _ in steps}) > 1 or len(spans) < len(steps):
            continue
        first, end = min(at for at, _ in spans), max(at + count for at, count in spans)
        rows, name = steps[0][1].rows, Ref("kept", ref.of)
        node = ir.KeptRows(name, rows, steps[0][0].width, first, end - first)
        if steps[0][0].width < tiles.BLOCK_COLUMNS or sum(k.registers for k in [*kept, node] if isinstance(k, ir.KeptRows)) > room:
            continue
        kept.append(node)

        def change(x: Any, ref: Ref = ref, name: Ref = name, first: int = first) -> Any:
            if isinstance(x, ir.ArrayBlock) and x.rows.ref == ref:
                return ir.KeptBlock(x.ref, name, first, x.shift)
            return x

        back = [ir.rebuild(node, change) for node in back]
    return kept, back


def _rows_in(node: Node) -> list[ir.Rows]:
    return [x for x in ir.within(node) if isinstance(x, ir.Rows)]


def entry_bytes(program: TileProgram, arrays: Collection[int]) -> int:
    """Bytes of an entry with the rows of ``arrays``, in boxes or not."""
    return tiles.TILE_ROWS * sum(frame.row_bytes(program.inputs[k]) for k in arrays)
