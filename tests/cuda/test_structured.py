"""Tile programs with loops and slices of arrays: what has no kernel yet is refused in words."""

from __future__ import annotations

import dataclasses

import pytest

from kitsune_jax.program.ir import TileProgram, walk
from kitsune_jax.targets.cuda import kernel, tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.errors import CannotLower
from tests.support.programs import CASES

WITHOUT = {"loop", "load_slice", "store_slice"}


def used(program: TileProgram) -> set[str]:
    """The instructions of ``program`` that have no code."""
    return {i.kind for stage in program.stages for i in walk(stage.body)} & WITHOUT


def generated(program: TileProgram) -> kernel.Kernel:
    stages = len(program.stages)
    one = Arrangement(
        spatial=False, sm=900, lanes=1, cluster=1, replicas=1, resident=(True,) * stages, split=(1,) * stages, places=(),
        shared_bytes=227 << 10,
    )  # fmt: skip
    return kernel.generate(dataclasses.replace(program, tile_rows=tiles.TILE_ROWS), one, "test")


@pytest.mark.parametrize("name", [name for name in CASES if any(used(p.program) for p in CASES[name]().program.parts)])
def test_a_structured_program_is_refused_by_the_names_of_its_instructions(name: str) -> None:
    for program in (part.program for part in CASES[name]().program.parts if used(part.program)):
        with pytest.raises(CannotLower) as no:
            generated(program)
        assert all(kind in no.value.reason for kind in used(program)), no.value.reason


def test_tiles_that_keep_within_a_batch_are_refused() -> None:
    whole = next(p.program for case in CASES.values() for p in case().program.parts if p.program.batch_axes)
    plain = tuple(dataclasses.replace(s, body=()) for s in whole.stages)
    with pytest.raises(CannotLower, match="within a batch"):
        generated(dataclasses.replace(whole, stages=plain))
