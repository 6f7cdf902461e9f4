"""The op table: one entry says everything about an op.

Comes in: nothing (this is data). Goes out: ``OPS``, by canonical kind. To add an op, add its entry (``pointwise``,
``shape`` or ``reduce``) and, where JAX's parameters differ from the entry's, its rule in ``rules``. Invariant: for every
entry the NumPy rule equals JAX in every dtype of ``OpSpec.dtypes``, and the relations hold by experiment
(``tests/table/test_ops.py``).

>>> OPS["exp"].family, OPS["exp"].arity, OPS["exp"].cpu
('pointwise', 1, 'exp')
>>> import numpy as np
>>> OPS["reduce_sum"].numpy({"axes": (1,)}, np.ones((2, 3), np.float32), out_dtype="float32").tolist()
[3.0, 3.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kitsune_jax.graph import Param
from kitsune_jax.ops.pointwise import POINTWISE
from kitsune_jax.ops.reduce import REDUCTIONS
from kitsune_jax.ops.shape import SHAPES
from kitsune_jax.ops.spec import OpSpec

__all__ = ["FAMILIES", "OPS", "OpSpec", "resolve_rows"]

FAMILIES = (
    "pointwise",
    "convert",
    "reduce",
    "argreduce",
    "cumulative",
    "dot",
    "broadcast",
    "reshape",
    "transpose",
    "concatenate",
    "slice",
    "pad",
    "rev",
    "iota",
)

OPS: Mapping[str, OpSpec] = MappingProxyType({**POINTWISE, **SHAPES, **REDUCTIONS})

_ROWS = -1  # program.ir.ROWS
_SIZES = ("shape", "new_sizes", "limit")


def resolve_rows(params: Mapping[str, Param] | tuple[tuple[str, Param], ...], rows: int) -> dict[str, Param]:
    """Parameters of a rows-first op on a tile of ``rows`` rows: every ``ROWS`` in ``shape``, ``new_sizes`` or ``limit`` replaced.

    >>> resolve_rows({"shape": (-1, 4), "dims": (0,)}, rows=7)
    {'shape': (7, 4), 'dims': (0,)}
    """
    return {k: _resolve(v, rows) if k in _SIZES else v for k, v in dict(params).items()}


def _resolve(sizes: Any, rows: int) -> tuple[int, ...]:
    return tuple(rows if n == _ROWS else n for n in sizes)
