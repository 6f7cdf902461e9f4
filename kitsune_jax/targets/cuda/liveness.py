"""How many registers a stage keeps alive, as far as the device IR can tell.

Comes in: the nodes of a stage. Goes out: ``Liveness``: the most registers alive at once, which values are alive there, and from
when to when each is. It counts what the nodes force (kept values, accumulators in flight), not addresses and temporaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import segment_ir
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Node, Ref

# Of a sink by sorted indices (``stage/segment.h``): addresses and the open segment; the runs of a tile, and the walk down its rows.
_SEGMENTS, _RUNS = 10, 16


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """``held``: registers that are alive for the whole kernel, the accumulators of sinks; ``peak``: the most at once, those
    included; ``alive``: values that are kept then, largest first; ``lives``: first and last moment of each owner."""

    held: int
    peak: int
    alive: tuple[int, ...]
    lives: dict[Ref, tuple[int, int]]
    end: int

    def life(self, v: int) -> tuple[int, int]:
        """From when to when the value is kept; one that is not kept so far may be at any time."""
        return self.lives.get(Ref("v", v), (0, self.end))


@dataclasses.dataclass(slots=True)
class _Span:
    owner: Ref
    registers: int
    first: int
    last: int


def of_stage(setup: Iterable[Node], nodes: Iterable[Node]) -> Liveness:
    held, spans, of = sum(_held(node) for node in setup), list[_Span](), dict[Ref, list[_Span]]()
    moment = 0
    for moment, (owner, registers) in enumerate(_events(nodes), 1):
        if registers is None:
            for span in of.get(owner, ()):
                span.last = moment
        else:
            spans.append(_Span(owner, registers, moment, moment))
            of.setdefault(owner, []).append(spans[-1])
    peak, at = held, 0
    for first in (s.first for s in spans):
        total = held + sum(s.registers for s in spans if s.first <= first <= s.last)
        if total > peak:
            peak, at = total, first
    alive: dict[int, int] = {}
    for s in spans:
        if s.first <= at <= s.last and s.registers and s.owner.kind in ("v", "h"):
            alive[s.owner.of] = alive.get(s.owner.of, 0) + s.registers
    lives = {owner: (min(s.first for s in mine), max(s.last for s in mine)) for owner, mine in of.items()}
    return Liveness(held, peak, tuple(sorted(alive, key=lambda v: (-alive[v], v))), lives, moment)


def _held(node: Node) -> int:
    match node:
        case st.SinkStart(width=width):
            return width // 4 or 1
        case st.GradientStart(shape=shape):
            return shape.registers
        case st.PanelSumStart():
            return 2
        case st.SegmentStart(width=width, tops=tops):
            return -(-width // 128) * (1 if tops is None else 2) + _SEGMENTS
    return 0


def _events(nodes: Iterable[Node]) -> Iterable[tuple[Ref, int | None]]:
    """(owner, registers that it gets) or (owner, None) where it is read, in the order of the device's work."""
    for node in nodes:
        match node:
            case st.Alive(owner, registers):
                yield owner, registers
            case st.Issue(ref=ref, registers=registers):
                yield ref, registers
            case ir.BlockLoop(reads=owners) | st.Complete(owners=owners):
                yield from ((owner, None) for owner in owners)
            case segment_ir.SegmentRuns(ref):
                yield Ref("runs", ref.of), _RUNS
            case segment_ir.RowRuns(ref):
                yield ref, _RUNS
            case segment_ir.JoinSegments(ref, runs):
                yield runs or Ref("runs", ref.of), None
            case st.TableRows(ref) | segment_ir.SummedRows(ref):
                yield ref, 4  # two addresses
            case segment_ir.FoldedRows(ref):
                yield ref, 3  # three indices
            case st.SetRow(ref) | st.LoadRow(ref) | st.FoldQuad(ref) if ref.kind == "r":
                yield ref, 2
            case st.LayerLoop(body=body):
                yield from _events(body)
            case st.CountedLoop(body=body):
                inside = list(_events(body))
                made = {owner for owner, registers in inside if registers is not None}
                yield from inside
                # What an iteration reads of the code around the loop, the next one reads again.
                yield from ((owner, None) for owner in dict.fromkeys(owner for owner, _ in inside) if owner not in made)
