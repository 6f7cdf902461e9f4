"""From functions to Graphs: round trips through NumPy, inlining, decompositions, and what stays opaque and why."""

from __future__ import annotations
