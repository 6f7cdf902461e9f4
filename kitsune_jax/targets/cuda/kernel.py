"""The kernel of a call: the route from its stages to source, launch words and the recipes of its operands.

Comes in: a tile program, or a call of several, and ``Arrangement``s (what the plans ask for). Goes out: ``Kernel``. The route: each
stage is lowered to nodes of the device IR and fitted into registers and shared memory (``fitting``), all of them are laid out
(``layout``) and completed (``frames``), equal ones found (``sharing``), and printed (``print_kernel``). The parts of a call of
several phases go this way one by one, and are put together by ``call_layout`` and ``print_phases``. Raises ``CannotLower`` where
the arrangement does not fit.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import SINKS, Array, Program, TileProgram, walk
from kitsune_jax.targets.cuda import call_layout, cuts, frames, layout, print_kernel, print_phases, sharing, tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.fetches import Fetch
from kitsune_jax.targets.cuda.layout import Layout
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.errors import CannotLower

__all__ = ["Arrangement", "Kernel", "generate", "of_call"]


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """What XLA makes of a part's stationary operands. ``weights``: recipes of each image, and ``order``, how ``pack.weights`` lines
    them up; then the vectors; ``tables``: stationary values that are read as they lie. ``program``: the part as it was laid out,
    whose values these are."""

    program: TileProgram
    weights: tuple[tuple[WeightRecipe, ...], ...]
    order: tuple[tuple[tuple[int, int], ...], ...]
    vectors: tuple[VectorRecipe, ...]
    tables: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """Its operands are ``inputs`` of the call, what is ``packed`` for each part, for each result of ``filled`` an array of the
    identity of the fold, whose memory becomes that result, and the array that it asks the L2 for, where there is one. Its results
    are those of the call, ``kept`` and the workspace; those of ``widened`` are float32 where the call's are narrower."""

    source: str
    launch: tuple[int, ...]
    inputs: tuple[int, ...]
    packed: tuple[Packed, ...]
    filled: tuple[tuple[int, str], ...]
    kept: tuple[Array, ...]
    workspace_bytes: int
    registers: int  # estimate of what values need, at most
    widened: tuple[int, ...] = ()

    @property
    def shared_bytes(self) -> int:
        return self.launch[5]

    @property
    def hints(self) -> int:
        """Operands, the last ones, that the kernel asks the L2 for and does not read."""
        return self.launch[11]


def generate(program: TileProgram, arrangement: Arrangement, name: str, share: bool = True, fetch: Fetch | None = None) -> Kernel:
    """The kernel of ``program`` as ``arrangement`` asks. ``share``: equal stages run the same code. Raises ``CannotLower``."""
    _check(program)
    program, widened = _widened(program)
    found = dataclasses.replace(layout.of_kernel(program, arrangement, name), fetch=fetch)
    source = print_kernel.source(found, _kinds(found, share))
    packed = (_packed(found, found.operands.tables),)
    operands, size, most = found.operands.inputs, found.workspace.bytes, _registers(found)
    return Kernel(source, found.launch, operands, packed, found.filled, (), size, most, widened)


def of_call(call: Program, arrangements: tuple[Arrangement, ...], name: str, fetch: Fetch | None = None) -> Kernel:
    """The kernel of a call of several parts, arranged as each of ``arrangements`` asks. Raises ``CannotLower``."""
    for part in call.parts:
        _check(part.program)
        if len(call.parts) > 1 and cuts.by_groups(part.program):
            raise CannotLower("tiles of a batch, and weights that a loop cuts, have no code in a call of several phases on the GPU")
    found = call_layout.of_call(call, arrangements, name, fetch)
    layouts = [part.layout for part in found.parts]
    if any(at.exchanges for at in layouts):
        raise CannotLower("a loop whose weights are split over a cluster has no code in a call of several phases on the GPU")
    source = print_phases.source(found, [_kinds(at, True) for at in layouts])
    packed = tuple(_packed(at, tuple(v for v in at.operands.tables if call_layout.table_input(at, v) is None)) for at in layouts)
    most = max(_registers(at) for at in layouts)
    return Kernel(source, found.launch, found.direct, packed, found.filled, found.kept, found.workspace_bytes, most)


def _check(program: TileProgram) -> None:
    if program.batch_axes and len(program.stages) > 1:
        raise CannotLower("tiles that keep within a batch have no spatial pipeline")
    if any(program.outputs[sink.array].row_strides for sink in program.sinks):
        raise CannotLower("sums of each batch, as the gradients of an attention's keys and values, have no code on the GPU")
    if any(i.kind in SINKS and i.get("dims") is not None for stage in program.stages for i in walk(stage.body)):
        raise CannotLower("sums into a part of a sink have no code on the GPU")
    if program.tile_rows != tiles.TILE_ROWS:
        raise CannotLower(f"tiles of {program.tile_rows} rows; the GPU's have {tiles.TILE_ROWS}")


def _widened(program: TileProgram) -> tuple[TileProgram, tuple[int, ...]]:
    """``program`` with float32 results where rows are added to them atomically (a bfloat16 would be rounded at every addition), and
    which these are."""
    found = {program.sinks[i["sink"]].array for s in program.stages for i in s.body if layout.is_added(i)}
    wide = tuple(k for k in sorted(found) if program.outputs[k].dtype in ("bfloat16", "float16"))
    outputs = [dataclasses.replace(a, dtype="float32") if k in wide else a for k, a in enumerate(program.outputs)]
    return dataclasses.replace(program, outputs=tuple(outputs)), wide


def _kinds(at: Layout, share: bool) -> list[sharing.Kind]:
    return sharing.kinds([frames.of_stage(at, s) for s in range(len(at.stages))], share)


def _packed(at: Layout, tables: tuple[int, ...]) -> Packed:
    operands = at.operands
    return Packed(at.program, tuple(operands.of_group(d) for d in operands.groups), operands.order, operands.vectors, tables)


def _registers(at: Layout) -> int:
    return max(stage.lowered.liveness.peak for stage in at.stages)
