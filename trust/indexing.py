"""Primitives that read or write at indices which are data, in plain NumPy: slices, gather and scatter in their general form."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
Params = dict[str, Any]


def _starts(indices: tuple[Array, ...], shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    return [int(np.clip(int(i), 0, n - k)) for i, n, k in zip(indices, shape, sizes, strict=True)]


def dynamic_slice(params: Params, x: Array, *indices: Array) -> Array:
    sizes = params["slice_sizes"]
    return x[tuple(slice(i, i + k) for i, k in zip(_starts(indices, x.shape, sizes), sizes, strict=True))]


def dynamic_update_slice(params: Params, x: Array, update: Array, *indices: Array) -> Array:
    out = np.array(x)
    out[tuple(slice(i, i + k) for i, k in zip(_starts(indices, x.shape, update.shape), update.shape, strict=True))] = update
    return out


def _windows(
    indices: Array, mapped: tuple[int, ...], batching: Any, shape: tuple[int, ...], sizes: tuple[int, ...], mode: str
) -> tuple[tuple[Array, ...], Array]:
    """An index array for each dimension of the operand, of shape (batch..., window...), and a mask of the windows inside it."""
    batch = indices.shape[:-1]
    starts: list[Array] = [np.zeros(batch, np.int64) for _ in shape]
    for k, d in enumerate(mapped):
        starts[d] = indices[..., k].astype(np.int64)
    for d, at in batching:
        starts[d] = np.broadcast_to(np.arange(batch[at]).reshape([-1 if k == at else 1 for k in range(len(batch))]), batch)
    valid = np.ones(batch, bool)
    for d, start in enumerate(starts):
        last = shape[d] - sizes[d]
        if mode == "FILL_OR_DROP":
            valid &= (start >= 0) & (start <= last)
        starts[d] = np.clip(start, 0, max(last, 0))
    at = []
    for d, start in enumerate(starts):
        offsets = np.arange(sizes[d]).reshape([-1 if k == d else 1 for k in range(len(shape))])
        at.append(start.reshape(*batch, *(1,) * len(shape)) + offsets)
    return tuple(at), valid.reshape(*batch, *(1,) * len(shape))


def _mode(params: Params) -> str:
    mode = params["mode"]
    return getattr(mode, "name", str(mode))


def gather(params: Params, x: Array, indices: Array) -> Array:
    numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    batching = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    at, valid = _windows(indices, numbers.start_index_map, batching, x.shape, sizes, _mode(params))
    batch = indices.ndim - 1
    out = np.zeros(np.broadcast_shapes(*(a.shape for a in at), valid.shape), x.dtype)
    if out.size and x.size:
        out = x[tuple(np.broadcast_arrays(*at))] if at else np.broadcast_to(x, out.shape)
    if not valid.all():
        fill = params["fill_value"]
        if fill is None:
            floating = not (np.issubdtype(x.dtype, np.integer) or x.dtype == np.bool_)
            fill = np.nan if floating else True if x.dtype == np.bool_ else np.iinfo(x.dtype).min
        out = np.where(valid, out, np.asarray(fill).astype(x.dtype))
    dropped = [batch + d for d in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    kept = tuple(n for d, n in enumerate(out.shape) if d not in dropped)
    out = out.reshape(kept) if out.size else np.zeros(kept, x.dtype)  # an empty operand has windows of no rows
    offsets = numbers.offset_dims
    order = iter(range(batch))
    window = iter(range(batch, out.ndim))
    return np.transpose(out, [next(window) if d in offsets else next(order) for d in range(out.ndim)])


def scatter(how: str, params: Params, x: Array, indices: Array, updates: Array) -> Array:
    numbers = params["dimension_numbers"]
    batching = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = numbers.update_window_dims
    kept = iter(windows)
    sizes = tuple(1 if d in dropped else updates.shape[next(kept)] for d in range(x.ndim))
    at, valid = _windows(indices, numbers.scatter_dims_to_operand_dims, batching, x.shape, sizes, _mode(params))
    moved = np.transpose(updates, [*(d for d in range(updates.ndim) if d not in windows), *windows])
    moved = moved.reshape(*indices.shape[:-1], *sizes)
    out = np.array(x)
    if not moved.size or not x.size:
        return out
    keep = np.broadcast_to(valid, moved.shape)
    where = tuple(np.broadcast_to(a, moved.shape)[keep] for a in at)
    writers = {"add": np.add.at, "sub": np.subtract.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at}
    if how == "set":
        out[where] = moved[keep]
    else:
        writers[how](out, where, moved[keep])
    return out
