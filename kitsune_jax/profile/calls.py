"""What a call of a pipeline costs beside its work: XLA's custom call, the hand-over to the workers, and waiting for them.

Comes in: a kernel's time. Goes out: ``programs``, small CPU programs to be timed inside a jitted function as XLA's own are.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kitsune_jax.profile.kernels import TILE
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import emit

WIDTH = 64
_F32 = bc.DTYPE_CODE["float32"]


def one_layer(rows: int) -> np.ndarray:
    """The words of ``x @ w``, ``rows`` x 64 times 64 x 64 in tiles of 96 rows."""
    weight = bc.Prep(bc.WEIGHT, bc.Ref(bc.IN, 1, 0, _F32), _F32, (), (), (WIDTH,), (WIDTH,), (WIDTH,), (1,))

    def rows_of(space: int) -> bc.Operand:
        return bc.Operand(bc.Ref(space, 0, 0, _F32), WIDTH, (0,))

    return bc.encode(
        bc.Program(
            name="profile",
            axes=(rows,),
            tile_rows=min(TILE, rows),
            workers=-(-rows // TILE),
            inputs=(bc.Array(_F32, rows * WIDTH), bc.Array(_F32, WIDTH * WIDTH)),
            outputs=(bc.Array(_F32, rows * WIDTH),),
            preps=(weight,),
            sinks=(),
            queues=(),
            stages=(bc.Stage("layer", 0, 0, (bc.Matmul(rows_of(bc.IN), 1, 1, 0, -1, 0, rows_of(bc.OUT)),)),),
        )
    )


def caller(rows: int) -> Any:
    """A function of x (``rows`` x 64) and w (64 x 64), float32, that is nothing but the call."""
    words = one_layer(rows)
    result = jax.ShapeDtypeStruct((rows, WIDTH), np.float32)
    return lambda x, w: emit.call(words, (x, w), (result,))[0]
