"""What a call of a pipeline costs beside its work: XLA's custom call, the hand-over to the workers and waiting for them, and the
steps of the program.

Comes in: sizes. Goes out: ``caller``, a small CPU program to be timed inside a jitted function as XLA's own are.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kitsune_jax.profile.kernels import TILE
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import emit
from kitsune_jax.targets.cpu.words import encode

_F32 = bc.DTYPE_CODE["float32"]


def layers(rows: int, width: int, depth: int) -> np.ndarray:
    """The words of ``x @ w0 @ w1 ...``, ``rows`` x ``width``, in tiles of 96 rows."""
    tile = min(TILE, rows)
    weights = tuple(
        bc.Prep(bc.WEIGHT, bc.Ref(bc.IN, 1 + k, 0, _F32), _F32, (), (), (width,), (width,), (width,), (1,)) for k in range(depth)
    )

    def operand(k: int) -> bc.Operand:  # of layer k's input: the results in between take turns in two tiles of scratch
        if k in (0, depth):
            return bc.Operand(bc.Ref(bc.IN if k == 0 else bc.OUT, 0, 0, _F32), width, (0,))
        return bc.Operand(bc.Ref(bc.SCRATCH, 0, k % 2 * tile * width, _F32), width, (0,))

    products = tuple(bc.Matmul(operand(k), 1, 1, k, -1, 0, operand(k + 1)) for k in range(depth))
    return encode(
        bc.Program(
            name="profile",
            axes=(rows,),
            batch_axes=0,
            tile_rows=tile,
            workers=-(-rows // TILE),
            inputs=(bc.Array(_F32, rows * width), *[bc.Array(_F32, width * width)] * depth),
            outputs=(bc.Array(_F32, rows * width),),
            preps=weights,
            sinks=(),
            queues=(),
            stages=(bc.Stage("layers", 2 * tile * width * 4, products),),
        )
    )


def caller(rows: int, width: int, depth: int) -> Any:
    """A function of x (``rows`` x ``width``) and ``depth`` weights, float32, that is nothing but the call."""
    words = layers(rows, width, depth)
    result = jax.ShapeDtypeStruct((rows, width), np.float32)
    return lambda *args: emit.call(words, args, (result,))[0]
