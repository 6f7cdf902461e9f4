"""One equation while it is captured: its operands, its parameters, and the ops of the table that it becomes.

Comes in: an equation, its operands' value ids, its origin. Goes out: ops appended to the builder, all with the equation's origin;
for gathers and scatters also their dimension numbers in one form, and the components of their index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from kitsune_jax import _compat
from kitsune_jax.capture.edit import Builder, Origin, Step, kept_dims, type_of
from kitsune_jax.ops.graph import Param, Scalar
from kitsune_jax.ops.spec import is_float, np_dtype
from kitsune_jax.ops.table import RENAMED

# --- operands, parameters, and methods that append ops ----------------------------------------------------------------------------


class Equation:
    """Operands and parameters of one equation, and methods that append ops. Keys are arrays of uint32 here, also in ``params``.

    ``stands_for``: the equation of the user's jaxpr that it is a part of. The methods return an operand, and append nothing, where
    it has the wanted shape, order or dtype already.
    """

    def __init__(
        self,
        builder: Builder,
        eqn: Any,
        ins: list[int],
        origin: Origin,
        params: dict[str, Any] | None = None,
        stands_for: Origin | None = None,
    ):
        self.stands_for = stands_for or origin
        self.builder, self.eqn, self.ins, self.step = builder, eqn, ins, Step(origin)
        self.params: dict[str, Any] = eqn.params if params is None else params
        self.name: str = eqn.primitive.name
        self.kind = RENAMED.get(self.name, self.name)  # of the op with its meaning, if there is one
        self.in_avals = [_compat.physical(v.aval) for v in eqn.invars]
        self.out = _compat.physical(eqn.outvars[0].aval)
        self.out_shape, self.out_dtype = type_of(self.out)

    @property
    def accuracy(self) -> str:
        """The accuracy that the equation asks for: "" for the default one, "HIGHEST", or bounds in words."""
        asked = self.params.get("accuracy")
        return "" if asked is None else getattr(asked, "name", str(asked)).replace("DEFAULT", "")

    def shape_of(self, v: int) -> tuple[int, ...]:
        return self.builder.values[v].shape

    def dtype_of(self, v: int) -> str:
        return self.builder.values[v].dtype

    def aval_of_result(self, k: int) -> Any:
        """JAX's type of result number ``k``."""
        return _compat.physical(self.eqn.outvars[k].aval)

    def step_in_pipelines(self) -> Step:
        """A step for an op that costs more than the equation, which is captured as opaque where no pipeline takes the op."""
        return Step(self.stands_for, rewritten=True)

    def op(self, kind: str, *ins: int, dtype: str = "", **params: Param) -> int:
        """Append an op, whose entry gives the shape of its result. ``dtype``: the result's, where the kind leaves it open."""
        return self.builder.add(kind, ins, self.step, self.out, dtype or self.out_dtype, **params)

    def reshape(self, v: int, shape: Sequence[int]) -> int:
        """``v`` in another shape; if a reshape made ``v``, its operand in that shape."""
        if self.shape_of(v) == tuple(shape):
            return v
        made = self.builder.made_by(v)
        if made is not None and made.kind == "reshape":
            return self.reshape(made.inputs[0], shape)
        axis, parts = self._parts(v)
        to = (kept_dims(self.shape_of(v), shape) or {}).get(axis) if parts else None
        if to is not None:
            small = (*shape[:to], 1, *shape[to + 1 :])
            return self.op("concatenate", *(self.reshape(x, small) for x in parts), dimension=to)
        return self.op("reshape", v, new_sizes=shape)

    def broadcast(self, v: int, shape: Sequence[int], dims: Sequence[int]) -> int:
        return self.op("broadcast_in_dim", v, shape=shape, dims=dims)

    def slice(self, v: int, start: Sequence[int], limit: Sequence[int], strides: Sequence[int] = ()) -> int:
        strides = tuple(strides) or (1,) * len(start)
        whole = not any(start) and self.shape_of(v) == tuple(limit) and all(s == 1 for s in strides)
        if whole:
            return v
        made = self.builder.made_by(v)
        if made is not None and made.kind == "concatenate":  # a slice of one part, as where keys are split into words
            axis = made["dimension"]
            ends = list(accumulate(self.shape_of(x)[axis] for x in made.inputs))
            for x, end in zip(made.inputs, ends, strict=True):
                before = end - self.shape_of(x)[axis]
                if before <= start[axis] and start[axis] < limit[axis] <= end:
                    first, last = ([a - before if d == axis else a for d, a in enumerate(at)] for at in (start, limit))
                    return self.slice(x, first, last, strides)
        axis, parts = self._parts(v)
        if parts and (start[axis], limit[axis], strides[axis]) == (0, len(parts), 1):
            last = [1 if d == axis else n for d, n in enumerate(limit)]
            return self.op("concatenate", *(self.slice(x, start, last, strides) for x in parts), dimension=axis)
        return self.op("slice", v, start=start, limit=limit, strides=strides)

    def _parts(self, v: int) -> tuple[int, tuple[int, ...]]:
        """(axis, parts) of ``v``, where that is a few keys, or words of keys, side by side; no parts for any other value.

        Ops that move ``v`` are appended for each part, so that an op that takes a part of the result finds it.
        """
        made = self.builder.made_by(v)
        if made is None or made.kind != "concatenate" or self.dtype_of(v) != "uint32":
            return 0, ()
        axis = made["dimension"]
        assert isinstance(axis, int)
        return axis, made.inputs if all(self.shape_of(x)[axis] == 1 for x in made.inputs) else ()

    def part(self, v: int, axis: int, start: int, size: int) -> int:
        """``size`` elements of ``v`` along ``axis`` from ``start`` on."""
        shape = self.shape_of(v)
        at = [start if d == axis else 0 for d in range(len(shape))]
        return self.slice(v, at, [start + size if d == axis else n for d, n in enumerate(shape)])

    def transpose(self, v: int, permutation: Sequence[int]) -> int:
        """``v`` with its dimensions in another order; if a transposition made ``v``, its operand in that order."""
        if tuple(permutation) == tuple(range(len(permutation))):
            return v
        made = self.builder.made_by(v)
        if made is not None and made.kind == "transpose":  # the gradient of a table that is also multiplied transposed has two
            return self.transpose(made.inputs[0], [made["permutation"][d] for d in permutation])
        return self.op("transpose", v, permutation=permutation)

    def convert(self, v: int, dtype: str) -> int:
        """``v`` in another dtype; a literal becomes another literal."""
        literal = self.builder.values[v].literal
        if self.dtype_of(v) == dtype:
            return v
        return self.op("convert_element_type", v, new_dtype=dtype) if literal is None else self.constant(literal, dtype)

    def constant(self, scalar: Scalar, dtype: str = "") -> int:
        """A literal, by default of the result's dtype."""
        dtype = dtype or self.out_dtype
        rounded = np.asarray(scalar).astype(np_dtype(dtype))
        python = float if is_float(dtype) else bool if dtype == "bool" else int
        return self.builder.literal(python(rounded), dtype)

    def full(self, scalar: Scalar, shape: Sequence[int], dtype: str = "") -> int:
        """``scalar`` everywhere, by default in the result's dtype."""
        return self.broadcast(self.constant(scalar, dtype), shape, ())


def bind_in_place(eqn: Any, origin: Origin, params: dict[str, Any] | None = None, *arrays: Any) -> list[Any]:
    """The equation on ``arrays``, in its context (with other ``params`` if given). Literals keep their own, perhaps weak, type."""
    vals = [v.val if _compat.is_literal(v) and np.ndim(x) == 0 else x for v, x in zip(eqn.invars, arrays, strict=True)]
    with origin.enclosing():
        return _compat.bind_eqn(eqn, vals, params)


# --- dimension numbers and indices of gathers and scatters ------------------------------------------------------------------------

MODES = ("FILL_OR_DROP", "CLIP", "PROMISE_IN_BOUNDS")


@dataclasses.dataclass(frozen=True)
class ScatterDims:
    """The dimension numbers of a gather or a scatter, in one form.

    ``window``: dimensions of the rows (gathered, or updates) that come from the array; ``dropped`` and ``batching``: dimensions of
    the array that do not; ``batching[k]`` is dimension ``index_batching[k]`` of the index. ``index_map``: the dimensions of the
    array that the components of the index are positions in.
    """

    window: tuple[int, ...]
    dropped: tuple[int, ...]
    index_map: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]

    def windowed(self, rank: int) -> dict[int, int]:
        """Dimension of the gathered or folded rows -> the dimension of the array, of that rank, that it comes from or goes to."""
        in_window = [d for d in range(rank) if d not in (*self.dropped, *self.batching)]
        return dict(zip(self.window, in_window, strict=True))


def scatter_dims_of(e: Equation) -> ScatterDims:
    n = e.params["dimension_numbers"]
    if e.name == "gather":
        return ScatterDims(
            n.offset_dims, n.collapsed_slice_dims, n.start_index_map, n.operand_batching_dims, n.start_indices_batching_dims
        )
    return ScatterDims(
        n.update_window_dims,
        n.inserted_window_dims,
        n.scatter_dims_to_operand_dims,
        n.operand_batching_dims,
        n.scatter_indices_batching_dims,
    )


def mode_of(e: Equation) -> str:
    return str(getattr(e.params["mode"], "name", e.params["mode"]))


def components(e: Equation, count: int) -> tuple[int, ...]:
    """The values that the last dimension of the index holds, one per indexed dimension; () where no concatenation made it."""
    index = e.ins[1]
    if count == 1:
        return (index,)
    op = e.builder.made_by(index)
    last = len(e.shape_of(index)) - 1
    if op is None or op.kind != "concatenate" or op["dimension"] != last or len(op.inputs) != count:
        return ()
    return op.inputs
