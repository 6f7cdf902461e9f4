"""A long dimension of the rows, worked off in blocks: a pass that makes a loop of what a stage computes over all of it.

``blocked`` finds out what has the dimension (``dims``), takes apart what is summed over it where that waits for an earlier
reduction of the same dimension (``factors``), and lays out the loops (``loops``, ``emit``); ``visible`` says which blocks a tile
does not have to look at, because a mask hides them from all of its rows.
"""

from kitsune_jax.program.blocks.dims import NotBlocked
from kitsune_jax.program.blocks.loops import blocked

__all__ = ["NotBlocked", "blocked"]
