"""The tile program (``ir``), its builder, its checker (``verify``), passes over it (``passes``), and its NumPy interpreter."""

from kitsune_jax.program.assemble import assemble
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Array, Program, TileProgram

__all__ = ["Array", "Program", "TileProgram", "assemble", "build"]
