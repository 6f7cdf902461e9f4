"""What ``jax.jit`` traces when a pipelined function is called.

Comes in: a Python function, its residual policy and ``Options``. Goes out: the callable that traces it to a jaxpr and binds the
primitive on it. Invariant: there is one such callable for each function, policy and options, so JAX's trace cache knows it again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from kitsune_jax import _compat, arguments, mutations
from kitsune_jax.options import Options
from kitsune_jax.primitive import pipeline_p

_compat.hide_from_tracebacks(__file__)

Residuals: TypeAlias = "str | Callable[..., Any]"


class Body:
    """The callable that ``jax.jit`` traces: it traces ``fn`` to a jaxpr and binds the primitive on it.

    Holds ``fn`` weakly, as it is the value of a cache whose key is ``fn``; the ``Pipeline`` that calls it holds ``fn``.
    """

    def __init__(self, fn: Callable[..., Any], residuals: Residuals, options: Options | None) -> None:
        self._fn: Callable[[], Any] = _reference(fn)
        self._residuals = residuals
        self._options = options
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        self.__doc__ = fn.__doc__
        with contextlib.suppress(TypeError, ValueError):  # a built-in without a signature
            self.__signature__ = inspect.signature(fn)
        self.call_split = functools.partial(call_split, self)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._fn()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._options is None or not _compat.is_staging():
            # Not under jit's trace: disable_jit, or debug_nans runs the function op by op to name the guilty operator. Let it see
            # them.
            return self._with_residuals(self._fn())(*args, **kwargs)
        dynamic, rebuild, places = arguments.flatten_traced(args, kwargs)
        fn = self._with_residuals(mutations.watched(self._fn()))

        def flat(*leaves: Any) -> Any:
            a, k = rebuild(leaves)
            return fn(*a, **k)

        closed, out_tree = _compat.trace_call(flat, dynamic, _compat.call_info(fn, args, kwargs, places))
        closed, out_tree, lost = mutations.settled(closed, out_tree)
        mutations.refuse(self._fn(), lost)
        closed, consts = _compat.hoist_consts(closed)
        outs = pipeline_p.bind(*consts, *dynamic, call_jaxpr=closed, options=self._options)
        return jax.tree.unflatten(out_tree, outs)

    def watched(self) -> Callable[..., Any]:
        """The function without a primitive around it, as ``mutations.watched`` makes it."""
        return self._with_residuals(mutations.watched(self._fn()))

    def _with_residuals(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if self._residuals == "save":
            return fn
        return arguments.checkpoint(fn, self._residuals if callable(self._residuals) else None)


def call_split(body: Body, static: arguments.Static, donated: list[Any], kept: list[Any]) -> Any:
    args, kwargs = static.join(donated, kept)
    return body(*args, **kwargs)


_bodies: weakref.WeakKeyDictionary[Any, dict[Any, Body]] = weakref.WeakKeyDictionary()
_bodies_lock = threading.Lock()


def body_of(fn: Callable[..., Any], residuals: Residuals, options: Options | None) -> Body:
    """One body per function, residual policy and options, so that JAX's trace cache knows it again. Lives as long as ``fn``."""
    try:
        hash(fn)
        weakref.ref(fn)
    except TypeError:  # an unhashable callable, such as a module that holds arrays: as distinct as its identity
        return Body(fn, residuals, options)
    with _bodies_lock:
        per_fn = _bodies.setdefault(fn, {})
        key = (residuals, options)
        if key not in per_fn:
            per_fn[key] = Body(fn, residuals, options)
        return per_fn[key]


def _reference(fn: Callable[..., Any]) -> Callable[[], Any]:
    try:
        hash(fn)
        return weakref.ref(fn)
    except TypeError:
        return lambda: fn
