"""What a kernel asks the L2 for on behalf of the kernel behind it, as code generation reads it.

Comes in: ``Ahead``, the planner's choice. Goes out: ``Fetch``: the pieces of an operand, and the code that asks for them
(``cuda/include/kitsune/ahead.h``).
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.planning.plan import Ahead

PIECE_BYTES = 4096  # rows of a weight or so: a kernel that reads it in whatever order finds as much of each stretch


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """``pieces`` of ``PIECE_BYTES``, spread over the ``size`` bytes from byte ``first`` of an operand of ``array_bytes`` on.
    ``workers``: CTAs of the machine, all of which ask."""

    array_bytes: int
    first: int
    size: int
    pieces: int
    workers: int

    @staticmethod
    def of(ahead: Ahead) -> Fetch:
        pieces = max(1, ahead.fetched_bytes // PIECE_BYTES)
        return Fetch(ahead.array_bytes, ahead.first, ahead.weight_bytes, pieces, ahead.workers)

    def grid(self, working: int, ctas: int) -> int:
        """CTAs of a kernel of which ``working`` have tiles, in instances of ``ctas``."""
        return max(working, self.workers // ctas * ctas)

    @property
    def declared(self) -> str:
        """The operand, as a field of the kernel's parameters."""
        return "const void* ahead"

    @property
    def call(self) -> str:
        """By every consumer warpgroup, behind its last tile."""
        share = "block_id() * kLanes + group - 1, grid_size() * kLanes"
        return f"fetch_ahead<{self.first}, {self.size}, {self.pieces}, {PIECE_BYTES}>(p.ahead, {share});"
