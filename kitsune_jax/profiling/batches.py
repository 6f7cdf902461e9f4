"""The batch dimension of a function's arguments: found by their shapes, and set to other sizes.

Comes in: the arguments of a call. Goes out: a ``Batch``, or the reason in words why the arguments have none. Nothing is run;
functions are traced for shapes only. A batch dimension is the leading dimension that all arrays of one or more arguments share, in
which the function can be traced with another size while the other arguments stay as they are.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from kitsune_jax.frontend.tracing import Arguments, is_array_like

INDICES = "{} holds integers of another leading dimension, which may be indices, so a larger batch may mean another program"
NONE_SHARED = "no argument has a leading dimension of its own"
NOT_TRACEABLE = "the function cannot be traced with another leading dimension of {}"


_Key: TypeAlias = tuple[int, Any]  # 0 and the place of a positional argument, or 1 and the name of another


@dataclasses.dataclass(frozen=True)
class Batch:
    """``size``: of the leading dimension of the arguments ``names``. ``leaves``: their arrays, as places among the leaves of the
    arguments."""

    size: int
    names: tuple[str, ...]
    leaves: frozenset[int]

    def resized(self, arguments: Arguments, size: int) -> Arguments:
        """``arguments`` with the batch dimension at ``size``: the first elements, or all of them again and again. Shapes
        (``jax.ShapeDtypeStruct``) become shapes."""
        leaves, tree = jax.tree.flatten(arguments)
        rows = np.arange(size) % self.size

        def one(x: Any) -> Any:
            return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x[rows]

        resized: Arguments = jax.tree.unflatten(tree, [one(x) if k in self.leaves else x for k, x in enumerate(leaves)])
        return resized


def batch_of(arguments: Arguments, names: Sequence[str], shapes_of: Callable[[Arguments], Sequence[Any]]) -> Batch | str:
    """The batch dimension of ``arguments``, or why there is none.

    ``names``: of the positional arguments. ``shapes_of``: the shapes of the function's results for arguments, some of them shapes;
    it may raise any error. A dimension on which results depend is preferred, then one of many arguments, then one of the last.
    """
    paths, tree = jax.tree.flatten_with_path(arguments)
    leaves = [leaf for _, leaf in paths]
    sizes: dict[_Key, set[int]] = {}  # argument -> leading dimensions of its arrays
    places: dict[_Key, list[int]] = {}
    for k, (path, leaf) in enumerate(paths):
        if _is_array(leaf):
            key = (path[0].idx, getattr(path[1], "idx", getattr(path[1], "key", None)))
            sizes.setdefault(key, set()).add(leaf.shape[0])
            places.setdefault(key, []).append(k)
    whole = {key: min(found) for key, found in sizes.items() if len(found) == 1 and min(found) > 0}
    if not whole:
        return NONE_SHARED
    order = {key: k for k, key in enumerate(sizes)}
    groups = {part for n in set(whole.values()) for part in _parts([key for key, size in whole.items() if size == n])}
    original = [x.shape for x in shapes_of(arguments)]
    shaped = jax.tree.unflatten(tree, [_shape(x) for x in leaves])
    batch: Batch | None = None
    for group in sorted(groups, key=lambda group: (-len(group), -order[group[-1]])):
        tried = Batch(whole[group[0]], tuple(_named(names, group)), frozenset(k for key in group for k in places[key]))
        try:
            results = [x.shape for x in shapes_of(tried.resized(shaped, 2 * tried.size))]
        except Exception:  # any error of the user's function says the same: these shapes do not fit
            continue
        if results != original:
            batch = tried
            break
        batch = batch or tried
    if batch is None:
        return NOT_TRACEABLE.format(" or ".join(_named(names, list(whole))))
    for key, own in places.items():
        others = [k for k in own if k not in batch.leaves]
        if any(np.issubdtype(leaves[k].dtype, np.integer) for k in others if not _is_key(leaves[k])):
            return INDICES.format(" and ".join(_named(names, (key,))))
    return batch


def _parts(keys: Sequence[_Key]) -> list[tuple[_Key, ...]]:
    """All of ``keys``, the first ones, the last ones, and each by itself: weights stand before the batch or behind it."""
    cuts = range(1, len(keys))
    return [tuple(keys), *(tuple(keys[:k]) for k in cuts), *(tuple(keys[k:]) for k in cuts), *((key,) for key in keys)]


def _named(names: Sequence[str], group: Sequence[_Key]) -> list[str]:
    return [names[at] if kind == 0 and at < len(names) else str(at) for kind, at in group]


def _is_key(x: Any) -> bool:
    """A random key: typed, or as two or four words."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.dtype == np.uint32 and x.shape in ((2,), (4,)))


def _is_array(x: Any) -> bool:
    return is_array_like(x) and len(getattr(x, "shape", ())) > 0


def _shape(x: Any) -> Any:
    if not _is_array(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype if isinstance(x, jax.Array) else jax.dtypes.canonicalize_dtype(x.dtype))


def argument_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of ``count`` positional arguments of ``fn``, or "argument 0" and so on where it does not say."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return (*own, *(f"argument {k}" for k in range(len(own), count)))
