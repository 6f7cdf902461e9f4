"""Arguments of a pipelined function: which leaves are arrays, which are static.

Comes in: ``(args, kwargs)`` of any pytrees. Goes out: a flat list of array-like leaves and a hashable rest, and the way back.
Invariant: ``join`` of ``split`` gives back the same arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from kitsune_jax import _compat

_compat.hide_from_tracebacks(__file__)

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Rebuild: TypeAlias = Callable[[Sequence[Any]], Arguments]

_DYNAMIC, _DONATED = object(), object()  # marks, in place of a leaf that is not static


def is_array_like(x: Any) -> bool:
    """Is ``x`` something ``jax.jit`` takes as a dynamic argument: an array, a number, a ref, a shape that stands for an array?"""
    if type(x) in (float, int, bool, complex) or isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return True
    return hasattr(x, "__jax_array__") or _compat.valid_jaxtype(x)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A static argument, kept whole: one leaf, whatever it is."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Static:
    """The hashable part of a call: the tree of its arguments, and each leaf that is not an array."""

    tree: Any
    leaves: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash((self.tree, self.leaves))

    def __eq__(self, other: object) -> bool:
        """As ``jax.jit`` compares static arguments: 1, 1.0 and True are three different values."""
        return (
            isinstance(other, Static)
            and self.tree == other.tree
            and all(type(a) is type(b) and a == b for a, b in zip(self.leaves, other.leaves, strict=True))
        )

    def join(self, donated: Sequence[Any], kept: Sequence[Any]) -> Arguments:
        """The arguments with these arrays in their places."""
        given, lent = iter(donated), iter(kept)
        leaves = [next(given) if x is _DONATED else next(lent) if x is _DYNAMIC else x for x in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        unwrap = lambda x: x.value if isinstance(x, _Whole) else x  # noqa: E731
        return tuple(unwrap(a) for a in args), {k: unwrap(v) for k, v in kwargs.items()}


@dataclasses.dataclass(frozen=True)
class Statics:
    """Static and donated arguments, by position and by name, completed from the function's signature as ``jax.jit`` does."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()

    @staticmethod
    def of(
        fn: Callable[..., Any],
        argnums: int | Sequence[int] | None,
        argnames: str | Iterable[str] | None,
        donated: int | Sequence[int] | None,
    ) -> Statics:
        """Raises ``ValueError`` for what is not an index or a name, and where a donated argument is static."""
        nums, give = _indices("static_argnums", argnums), _indices("donate_argnums", donated)
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        if not all(isinstance(n, str) for n in names):
            raise ValueError(f"static_argnames={argnames!r} must be a name or names of arguments")
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # a built-in without a signature
            return Statics(nums, names, give)
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        unknown = [n for n in names if n not in {p.name for p in parameters}]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"static_argnames: the function has no argument {unknown[0]!r}")
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        nums = tuple(i + len(positional) if i < 0 and not variadic else i for i in nums)
        if argnames is None:
            names = tuple(positional[i] for i in nums if 0 <= i < len(positional))
        elif argnums is None:
            nums = tuple(positional.index(n) for n in names if n in positional)
        if set(nums) & set(give):
            raise ValueError(
                f"argument {min(set(nums) & set(give))} is both static and donated: a static value has no buffer to donate"
            )
        return Statics(nums, names, give)

    def jit_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``jax.jit``."""
        given = {"static_argnums": self.argnums, "static_argnames": self.argnames, "donate_argnums": self.donated}
        return {k: v for k, v in given.items() if v}

    def all_arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Can ``jax.jit`` take these arguments as they are?"""
        if self.argnums or self.argnames:
            rest = [a for i, a in enumerate(args) if i not in self.argnums and i - len(args) not in self.argnums]
            return all(map(is_array_like, jax.tree.leaves((rest, {k: v for k, v in kwargs.items() if k not in self.argnames}))))
        return all(map(is_array_like, jax.tree.leaves((args, kwargs))))

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Static, list[Any], list[Any]]:
        """``(static, donated arrays, other arrays)``. Raises ``TypeError`` for a static leaf that cannot be hashed."""
        wrapped = (
            tuple(_Whole(a) if i in self.argnums or i - len(args) in self.argnums else a for i, a in enumerate(args)),
            {k: _Whole(v) if k in self.argnames else v for k, v in kwargs.items()},
        )
        paths, tree = jax.tree.flatten_with_path(wrapped)
        donated: list[Any] = []
        kept: list[Any] = []
        leaves: list[Any] = []
        for path, leaf in paths:
            if isinstance(leaf, _Whole) or not is_array_like(leaf):
                _check_hashable(path, leaf)
                leaves.append(leaf)
            elif path[0].idx == 0 and path[1].idx in self.donated:
                leaves.append(_DONATED)
                donated.append(leaf)
            else:
                leaves.append(_DYNAMIC)
                kept.append(leaf)
        return Static(tree, tuple(leaves)), donated, kept


def flatten_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Rebuild, list[int]]:
    """The tracers and arrays among the leaves, the way back, and which leaves they are.

    All else is static already and stays the Python value it is.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer | jax.Array | np.ndarray)]

    def rebuild(values: Sequence[Any]) -> Arguments:
        filled = list(leaves)
        for i, x in zip(places, values, strict=True):
            filled[i] = x
        rebuilt: Arguments = jax.tree.unflatten(tree, filled)
        return rebuilt

    return [leaves[i] for i in places], rebuild, places


def checkpoint(fn: Callable[..., Any], policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """``jax.checkpoint(fn)`` that also takes static leaves, as ``pipeline`` does."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        dynamic, rebuild, places = flatten_traced(args, kwargs)

        @functools.wraps(fn)
        def inner(*leaves: Any) -> Any:
            a, k = rebuild(leaves)
            return fn(*a, **k)

        _compat.name_call(inner, fn, args, kwargs, places)
        return jax.checkpoint(inner, policy=policy)(*dynamic)

    return wrapped


def _indices(name: str, given: int | Sequence[int] | None) -> tuple[int, ...]:
    values = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise ValueError(f"{name}={given!r} must be an index or indices of positional arguments")
    return values


def _check_hashable(path: Any, leaf: Any) -> None:
    value = leaf.value if isinstance(leaf, _Whole) else leaf
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"argument {jax.tree_util.keystr(path[1:])} of a pipelined function is a {type(value).__name__}, which is neither an "
            "array nor hashable: register it as a pytree (jax.tree_util.register_dataclass), make it hashable, or close over it"
        ) from None
