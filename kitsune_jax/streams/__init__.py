"""Which axis of which value streams, what is stationary, what is a sink."""

from kitsune_jax.streams.propagate import Spread, spread
from kitsune_jax.streams.seeds import Seed, candidate_seeds, has_few_rows, is_batched
from kitsune_jax.streams.space import DimLabels, Region, StreamSpace, row_shape, row_strides

__all__ = [
    "DimLabels",
    "Region",
    "Seed",
    "Spread",
    "StreamSpace",
    "candidate_seeds",
    "has_few_rows",
    "is_batched",
    "row_shape",
    "row_strides",
    "spread",
]
