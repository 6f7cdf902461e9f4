"""The tile program: one typed SSA body per stage, its builder, and its NumPy interpreter."""

from kitsune_jax.program.build import build
from kitsune_jax.program.ir import ROWS, ArrayType, Instr, QueueType, SinkType, StageProgram, TileProgram, TileType

__all__ = ["ROWS", "ArrayType", "Instr", "QueueType", "SinkType", "StageProgram", "TileProgram", "TileType", "build"]
