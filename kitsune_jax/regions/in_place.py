"""Updates of arrays that lie in memory: XLA writes them where they lie, and a pipeline would make a copy.

Comes in: a Graph. Goes out: the ops that no region takes, each with the reason. An update of what other ops compute may stream with
them; one of an argument, or of what a loop or an op that the table does not know makes, touches no more than the update.
"""

from __future__ import annotations

from kitsune_jax.graph import Graph

WHY = "an update of an array that lies in memory: XLA writes it in place"


def updated_in_place(graph: Graph) -> dict[int, str]:
    """op -> ``WHY``, for those updates."""
    producers = graph.producers()
    found = {}
    for i, op in enumerate(graph.ops):
        if op.kind != "dynamic_update_slice":
            continue
        made_by = producers.get(op.inputs[0])
        lies = made_by is None or made_by in found or graph.ops[made_by].kind == "opaque" or graph.ops[made_by].body is not None
        if lies:
            found[i] = WHY
    return found
