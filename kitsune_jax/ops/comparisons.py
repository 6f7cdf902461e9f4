"""Kinds of ops that matter where values are held against each other (``program.passes.compared_values``, ``regions.compared``)."""

from __future__ import annotations

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"})
# Their result is one of their operands, or that one's negative: nothing is rounded.
HAND_ON = frozenset({"select_n", "neg", "abs", "max", "min", "clamp", "copy"})
