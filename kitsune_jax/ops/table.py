"""The op table: one entry says everything about an op.

Comes in: nothing (this is data). Goes out: ``OPS``, by canonical kind. To add an op, add its entry (``pointwise``, ``shape``,
``reduce``, ``indexing``, ``windows``, ``online`` or ``loops``; docs/adding.md) and, where JAX's parameters differ from the entry's,
its rule in ``capture.primitives``. Invariant: for every entry the NumPy rule equals JAX in every dtype of ``OpSpec.dtypes``, and
the relations hold by experiment (``tests/table``).

>>> OPS["exp"].family, OPS["exp"].arity, OPS["exp"].cpu
('pointwise', 1, 'exp')
>>> import numpy as np
>>> OPS["reduce_sum"].numpy({"axes": (1,)}, np.ones((2, 3), np.float32), out_dtype="float32").tolist()
[3.0, 3.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kitsune_jax.ops.indexing import INDEXED
from kitsune_jax.ops.local import resolve_rows
from kitsune_jax.ops.loops import entries
from kitsune_jax.ops.online import ONLINE
from kitsune_jax.ops.pointwise import POINTWISE
from kitsune_jax.ops.reduce import REDUCTIONS
from kitsune_jax.ops.shape import SHAPES
from kitsune_jax.ops.spec import OpSpec
from kitsune_jax.ops.windows import WINDOWS

__all__ = ["OPS", "RENAMED", "OpSpec", "resolve_rows"]

_TABLE: dict[str, OpSpec] = {**POINTWISE, **SHAPES, **REDUCTIONS, **INDEXED, **WINDOWS, **ONLINE}
_TABLE.update(entries(_TABLE))  # loops, whose bodies hold ops of the table
OPS: Mapping[str, OpSpec] = MappingProxyType(_TABLE)

# Kinds by the names of JAX's primitives, where these are others.
RENAMED: Mapping[str, str] = MappingProxyType({name: spec.kind for spec in OPS.values() for name in spec.names})
