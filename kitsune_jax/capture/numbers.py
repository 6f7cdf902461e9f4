"""What gathers and scatters say about dimensions, and what is known of their indices while a Graph is captured.

Comes in: an ``Equation``, a gather or a scatter. Goes out: ``Numbers``, the values that the index holds, numbers that are known.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.capture.builder import Builder
from kitsune_jax.capture.equation import Equation
from kitsune_jax.graph import Scalar

MODES = ("FILL_OR_DROP", "CLIP", "PROMISE_IN_BOUNDS")


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What the dimension numbers of gathers and scatters have in common.

    ``window``: dimensions of the rows (gathered, or updates) that come from the array; ``dropped`` and ``batching``: dimensions of
    the array that do not; ``batching[k]`` is dimension ``index_batching[k]`` of the index. ``index_map``: the dimensions of the
    array that the components of the index are positions in.
    """

    window: tuple[int, ...]
    dropped: tuple[int, ...]
    index_map: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]


def numbers_of(e: Equation) -> Numbers:
    n = e.params["dimension_numbers"]
    if e.name == "gather":
        return Numbers(
            n.offset_dims, n.collapsed_slice_dims, n.start_index_map, n.operand_batching_dims, n.start_indices_batching_dims
        )
    return Numbers(
        n.update_window_dims,
        n.inserted_window_dims,
        n.scatter_dims_to_operand_dims,
        n.operand_batching_dims,
        n.scatter_indices_batching_dims,
    )


def mode_of(e: Equation) -> str:
    return str(getattr(e.params["mode"], "name", e.params["mode"]))


def components(e: Equation, count: int) -> tuple[int, ...]:
    """The values that the last dimension of the index holds, one per indexed dimension; () where they cannot be told apart."""
    index = e.ins[1]
    if count == 1:
        return (index,)
    op = e.builder.maker(index)
    last = len(e.shape_of(index)) - 1
    if op is None or op.kind != "concatenate" or op["dimension"] != last or len(op.inputs) != count:
        return ()
    return op.inputs


def known(builder: Builder, v: int) -> Scalar | None:
    """The number that every element of ``v`` is, if it is a literal behind views."""
    literal = builder.values[v].literal
    op = builder.maker(v)
    if literal is None and op is not None and op.kind in ("broadcast_in_dim", "reshape"):
        return known(builder, op.inputs[0])
    return literal
