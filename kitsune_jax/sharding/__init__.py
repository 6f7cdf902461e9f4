"""Pipelines under automatic partitioning: a jitted function whose arrays are sharded over several devices.

Comes in: a function that is lowered for several devices (``calls``). Goes out: custom calls that carry Graphs; where XLA partitions
the module it asks for the program of one device, and gets pipelines over its shards. Invariants: the functions of ``partition``
are pure ones of a Graph, a mesh and shardings, so every process has the same collectives; the results are those of one device,
whatever the shardings are.
"""

from __future__ import annotations
