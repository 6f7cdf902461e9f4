"""Stream spaces and regions as data.

A **stream space** has one or more axes; the flattened index over them (last axis fastest) is the **row**. A value's dimension is
labelled with the tuple of axes that it runs over, outermost first, whose extents multiply to the dimension's size; ``()`` means
that the dimension is not streamed. A value none of whose dimensions is streamed is **stationary**. In the tile form of a streamed
value its streamed dimensions are gone and one row dimension stands in front: ``(rows, *row_shape)``.
"""

from __future__ import annotations

import dataclasses
import math

DimLabels = tuple[tuple[int, ...], ...]  # per dimension of a value: the stream axes it runs over


@dataclasses.dataclass(frozen=True, slots=True)
class StreamSpace:
    """The first ``batch`` axes are batch axes: a tile never crosses from one index of them to the next, so a value that streams
    over nothing else is stationary while a tile is at work (the keys of an attention head)."""

    sizes: tuple[int, ...]
    batch: int = 0

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def batches(self) -> int:
        return math.prod(self.sizes[: self.batch])

    def tiles(self, tile_rows: int) -> int:
        return self.batches * -(-math.prod(self.sizes[self.batch :]) // tile_rows)

    def of_batch(self, labels: DimLabels | None) -> bool:
        """Does a value with these labels run over batch axes only?"""
        return labels is not None and self.batch > 0 and all(a < self.batch for axes in labels for a in axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A convex subgraph that becomes one custom call.

    ``ops``: graph op indices, topological. ``labels``: for every *streamed* value the region reads or makes, its ``DimLabels``
    (stationary values are absent). ``inputs`` / ``outputs``: graph value ids that cross the border (literals are not inputs). The
    result of a maker (a broadcast, an iota: an op without streamed inputs) is never among the outputs: ops outside that read it
    compute it again.
    ``sinks``: the ops of the region that reduce over the whole stream space, whose outputs are stationary, or over all rows of each
    batch, whose outputs run over the batch axes. ``again``: ops of the
    region that others may compute as well, because that is cheaper than to store what they make; their results are no outputs.
    """

    space: StreamSpace
    ops: tuple[int, ...]
    labels: tuple[tuple[int, DimLabels], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sinks: tuple[int, ...] = ()
    again: tuple[int, ...] = ()

    def label_of(self) -> dict[int, DimLabels]:
        return dict(self.labels)


def row_shape(shape: tuple[int, ...], labels: DimLabels | None) -> tuple[int, ...]:
    """What is left of ``shape`` per row: its dimensions that are not streamed. ``labels=None`` (stationary) leaves it whole."""
    if labels is None:
        return shape
    return tuple(n for n, axes in zip(shape, labels, strict=True) if not axes)


def row_strides(shape: tuple[int, ...], labels: DimLabels, space: StreamSpace) -> tuple[int, ...]:
    """Element stride of every stream axis in a dense row-major array of ``shape`` (0 for axes the value does not depend on)."""
    strides = [0] * len(space.sizes)
    step = 1
    for n, axes in zip(reversed(shape), reversed(labels), strict=True):
        inner = step
        for axis in reversed(axes):
            strides[axis] = inner
            inner *= space.sizes[axis]
        step *= n
    return tuple(strides)


def dim_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a dense row-major array."""
    out = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def streamed_axes(labels: DimLabels) -> frozenset[int]:
    return frozenset(a for axes in labels for a in axes)
