"""Which values of a loop's body lie column by column in scratch.

A carry of a few columns (the state of a simulator, ``[envs, 4]``) is taken apart by slices and put together again in every
iteration. Row by row each of these is a load or a store with a stride; column by column they are dense, and a sum over the
columns adds whole vectors. Rows as long as a vector
stay rows where nothing takes them apart (the state of a recurrent layer): what they are computed with lies row by row. So do
carries that a step multiplies with a matrix, or makes so, and what is handed on in their place: a product reads and writes rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileType
from kitsune_jax.program.passes.flow import VIEWS, Use

MOST_COLUMNS = 32
_VECTOR = 16
_COPIES = frozenset({"slice", "concatenate", "pad"})
_READERS = _COPIES | {"results", "store", "store_slice"} | {kind for kind, op in OPS.items() if op.family == "reduce"}


def by_columns(
    t: TileType,
    roots: Collection[int],
    uses: Mapping[int, Sequence[Use]],
    instruction: Callable[[int], Instr],
    pointwise: Callable[[str], bool],
) -> bool:
    """Whether nothing reads ``roots``, a tile of type ``t`` and what a loop's next step has in its place, but element by element,
    through views, as a piece of another tile or to fold it, and its rows are short, or something takes them apart."""
    if not t.tile or not 1 < math.prod(t.shape) <= MOST_COLUMNS or sum(n > 1 for n in t.shape) != 1:
        return False
    apart = math.prod(t.shape) < _VECTOR

    def fits(v: int) -> bool:
        nonlocal apart
        for i, _ in uses.get(v, ()):
            instr = instruction(i)
            apart |= instr.kind in _COPIES
            if instr.kind in VIEWS:
                if not fits(instr.outputs[0]):
                    return False
            elif not pointwise(instr.kind) and instr.kind not in _READERS:
                return False
        return True

    return all(map(fits, roots)) and apart
