"""Updates of arrays that lie in memory: XLA writes them where they lie, and a pipeline would make a copy.

Comes in: a Graph. Goes out: the ops that no region takes, each with the reason. An update of what other ops compute may stream with
them; one of an argument, or of what a loop or an op that the table does not know makes, touches no more than the update. So does a
sum by index that is added to such an array, which XLA folds into it: the gradient of what a step of a loop takes of an array.
"""

from __future__ import annotations

from kitsune_jax.graph import Graph

WHY = "an update of an array that lies in memory: XLA writes it in place"
# An array that is not so many times as large as what is folded into it is folded into beside the rest: no small part of it changes.
LARGER = 4


def updated_in_place(graph: Graph) -> dict[int, str]:
    """op -> ``WHY``, for those updates."""
    producers, readers = graph.producers(), graph.consumers()
    found = {}

    def lies(v: int) -> bool:
        made_by = producers.get(v)
        return made_by is None or made_by in found or graph.ops[made_by].kind == "opaque" or graph.ops[made_by].body is not None

    for i, op in enumerate(graph.ops):
        if op.kind == "dynamic_update_slice" and lies(op.inputs[0]):
            found[i] = WHY
        if op.kind != "add":
            continue
        for sums, x in (op.inputs, op.inputs[::-1]):
            made_by = producers.get(sums)
            folds = made_by is not None and graph.ops[made_by].kind == "scatter_sum" and readers.get(sums) == (i,)
            if made_by is None or not folds or sums in graph.outputs or graph.values[x].literal is not None or not lies(x):
                continue
            if graph.values[x].size > LARGER * graph.values[graph.ops[made_by].inputs[0]].size:
                found[i] = found[made_by] = WHY
                break
    return found
