"""The kernel of a tile program: the route from its stages to source, launch words and the recipes of its operands.

Comes in: a tile program and an ``Arrangement`` (what the plan asks for). Goes out: ``Kernel``. The route: each stage is lowered to
nodes of the device IR and fitted into registers and shared memory (``fitting``), all of them are laid out (``layout``) and
completed (``frames``), equal ones found (``sharing``), and printed (``print_kernel``). Raises ``CannotLower`` where the arrangement
does not fit.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import TileProgram, walk
from kitsune_jax.targets.cuda import frames, layout, print_kernel, sharing, tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.errors import CannotLower

__all__ = ["Arrangement", "Kernel", "generate"]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """``weights``: recipes of each image operand, and ``order``, how ``pack.weights`` lines them up; operands are the streamed
    ``inputs``, the images, the vectors, the ``tables``, and for each output of ``filled`` an array of the
    identity of the fold, whose memory becomes that output."""

    source: str
    launch: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[tuple[WeightRecipe, ...], ...]
    order: tuple[tuple[tuple[int, int], ...], ...]
    vectors: tuple[VectorRecipe, ...]
    tables: tuple[int, ...]
    filled: tuple[tuple[int, str], ...]
    workspace_bytes: int
    registers: int  # estimate of what values need, at most

    @property
    def shared_bytes(self) -> int:
        return self.launch[5]


def generate(program: TileProgram, arrangement: Arrangement, name: str, share: bool = True) -> Kernel:
    """The kernel of ``program`` as ``arrangement`` asks. ``share``: equal stages run the same code. Raises ``CannotLower``."""
    used = {i.kind for stage in program.stages for i in walk(stage.body)}
    if without := sorted(used & {"loop", "load_slice", "store_slice"}):
        raise CannotLower(f"{' and '.join(without)} inside a kernel: no code for it yet")
    if program.batch_axes:
        raise CannotLower("tiles that keep within a batch have no kernel yet")
    if program.tile_rows != tiles.TILE_ROWS:
        raise CannotLower(f"tiles of {program.tile_rows} rows; the GPU's have {tiles.TILE_ROWS}")
    found = layout.of_kernel(program, arrangement, name)
    kinds = sharing.kinds([frames.of_stage(found, s) for s in range(len(found.stages))], share)
    operands = found.operands
    return Kernel(
        print_kernel.source(found, kinds),
        found.launch,
        operands.inputs,
        tuple(operands.of_group(d) for d in operands.groups),
        operands.order,
        operands.vectors,
        operands.tables,
        found.filled,
        found.workspace.bytes,
        max(stage.lowered.liveness.peak for stage in found.stages),
    )
