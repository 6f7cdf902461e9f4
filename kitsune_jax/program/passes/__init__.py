"""Passes over tile programs, for every target: each takes a ``TileProgram`` and gives one that computes the same.

``simplified`` drops copies, what is computed twice and what nobody reads; ``with_epilogues`` puts biases and activations into the
matrix products before them, behind ``with_biases_first`` also into those of a sum. ``compared_values`` says what must have the same
bits wherever it is made. ``Flow`` is what they, and targets, ask about a body: who makes and who reads a value.
"""

from kitsune_jax.program.passes.compared import compared_values
from kitsune_jax.program.passes.epilogues import with_epilogues
from kitsune_jax.program.passes.flow import VIEWS, Flow
from kitsune_jax.program.passes.simplify import simplified
from kitsune_jax.program.passes.sums import with_biases_first

__all__ = ["VIEWS", "Flow", "compared_values", "simplified", "with_biases_first", "with_epilogues"]
