"""The capabilities of a target: one object that capture, the choice of regions and the lowering receive whole.

Invariant: a target has one such object. It is handed on whole; a function that needs one answer may take that one.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TargetCapabilities:
    """The defaults are those of a target with the simplest code: calls of one phase, no loops."""

    #: One call can have several phases, each with a stream space of its own.
    runs_phases: bool = False
    #: At most so many regions that follow each other become the phases of one call.
    most_merged: int = 1
    #: A call may recompute values that another call makes, instead of reading them from memory.
    recomputes: bool = False
    #: Calls recompute cheap values also where that takes longer, as in the program of one device among several.
    stores_least: bool = False
    #: Calls make arrays that are much larger than their operands (attention scores) block by block, so a backward pass may
    #: recompute such arrays instead of storing them.
    repeats_products: bool = False
    #: The weight gradient of a concatenation is captured as one product for each part. (Ops that read such a gradient then read
    #: several results, so a target whose calls update parameters is better off without.)
    divides_gradients: bool = False
    #: The operands of weight gradients may be stored for products of their own, where these and the rest take less time.
    stores_gradients: bool = False
    #: Every worker of a call has sums of its own, and workers without memory for them are idle. Operands of weight gradients may
    #: then be stored too.
    sums_by_worker: bool = False
    #: Rows are stored much faster than columns, so an attention is captured with its values in rows, whatever the order of the
    #: operands in its product (``capture.rewrites.products.exchange_operands``).
    stores_rows: bool = False
    #: There is code for the online sums of a segment softmax (``ops.reduce.ONLINE``).
    sums_online: bool = False
    #: There is code for sums over the rows of each batch. Without it, the gradients of an attention by queries and those by keys
    #: and values each compute scores of their own (``capture.rewrites.attention_scores``).
    sums_by_batch: bool = True
    #: There is code for the loops of a graph (``scan``).
    runs_loops: bool = False
    #: Products of a few rows may stream over the dimension that they contract, so that all workers read the weight.
    few_rows: bool = False
    #: A loop may be a call without the sums over its steps, which are then computed from arrays of all steps.
    sums_behind: bool = False
    #: So many elements of sums over the steps of a loop stay on chip. A loop with more weights stores arrays of all steps, and its
    #: gradients are computed from these (``capture.rewrites.loops``). ``None``: there is no limit.
    most_summed: int | None = None
    #: If there are fewer rows than workers, reductions over a long dimension may be split (``capture.rewrites.few_rows``).
    splits_reductions: bool = False
    #: Reductions of few rows over a long dimension may stream over its elements, as folds by index (``capture.rewrites.few_rows``).
    streams_elements: bool = False
    #: A tile with all columns of a wide hidden layer leaves little room for others, so a region may end with that layer, whose
    #: product then reads it from memory (``regions.alternatives``).
    cuts_wide_rows: bool = False
    #: Rows of so many bytes leave a worker's cache no room for enough of them, so a region may be cut around products that make or
    #: read such rows (``regions.alternatives``). ``None``: there is no limit.
    long_row_bytes: int | None = None
    #: The machine's workers, which a stream of fewer rows does not keep busy.
    workers: int = 1
    #: ``Target.generate`` runs a compiler for seconds, and may run in several threads at once.
    compiles: bool = False


SIMPLEST = TargetCapabilities()
