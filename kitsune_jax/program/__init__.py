"""The tile program: one typed SSA body per stage, its builder, and its NumPy interpreter."""

from kitsune_jax.program.build import assemble, build
from kitsune_jax.program.ir import (
    ROWS,
    Array,
    ArrayType,
    Block,
    Instr,
    Part,
    Program,
    QueueType,
    SinkType,
    StageProgram,
    TileProgram,
    TileType,
)

__all__ = [
    "ROWS",
    "Array",
    "ArrayType",
    "Block",
    "Instr",
    "Part",
    "Program",
    "QueueType",
    "SinkType",
    "StageProgram",
    "TileProgram",
    "TileType",
    "assemble",
    "build",
]
