"""Jaxprs, open or closed: tracing functions to them, taking them apart and putting them together."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kitsune_jax._compat.lowering import register_lowering
from kitsune_jax._compat.versions import VERSION, api_util, core, jax_module, jaxpr_as_fun, lu, mlir, new_primitive, pe, tree_util
from kitsune_jax.plain_text import printable


def is_literal(v: Any) -> bool:
    """Is the atom a constant written into the equation (``v.val``), and not a variable?"""
    return type(v).__name__ == "Literal"


def is_jaxpr(x: Any) -> bool:
    """Is ``x`` a jaxpr of either kind?"""
    return type(x).__name__ in ("Jaxpr", "ClosedJaxpr")


def open_parts(j: Any) -> tuple[Any, list[Any]]:
    """``(open jaxpr, constants)`` of a jaxpr of either kind: the constants belong to ``open_jaxpr.constvars``, in order."""
    if type(j).__name__ == "ClosedJaxpr":
        return j.jaxpr, list(j.consts)
    return j, list(getattr(j, "consts", ()) or ())


def hoist_consts(closed: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr without constants, and the constants, which have become its leading arguments."""
    jaxpr, consts = open_parts(closed)
    if not jaxpr.constvars:
        return closed, []
    hoisted = pe.convert_constvars_jaxpr(jaxpr)
    return (core.ClosedJaxpr(hoisted, ()) if type(closed).__name__ == "ClosedJaxpr" else hoisted), consts


def constants_inside(closed: Any) -> Any:
    """A closed jaxpr without constants: an equation ``kitsune_constant`` makes each of them. It can only be lowered.

    For the body of a loop or branch, which may hold no constants. Raises where a constant is not a concrete array.
    """
    hoisted, consts = hoist_consts(closed)
    if not consts:
        return closed
    values = [Constant(np.asarray(c)) for c in consts]
    made, avals = constant_primitive(), in_avals(closed)
    return trace_jaxpr(lambda *a: jaxpr_as_fun(hoisted)(*(made.bind(value=v) for v in values), *a), avals, lower=True, like=closed)


class Constant:
    """An array as the parameter of an equation: hashable, equal to one of equal bytes."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._key = (array.shape, str(array.dtype), array.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{self.array.dtype}{list(self.array.shape)}"


@functools.cache
def constant_primitive() -> Any:
    """``kitsune_constant[value]``, an array without operands."""
    prim = new_primitive("kitsune_constant")
    prim.def_abstract_eval(lambda *, value: core.ShapedArray(value.array.shape, value.array.dtype))
    register_lowering(prim, lambda _, *, value: [mlir.ir_constant(value.array)])
    return prim


def as_kind_of(new: Any, old: Any) -> Any:
    """``new`` (closed, without constants) as the kind of jaxpr ``old`` is: what a parameter of an equation must keep being."""
    if type(old).__name__ == "Jaxpr" and type(new).__name__ == "ClosedJaxpr":
        if new.consts:
            raise ValueError("a jaxpr with constants cannot be an open jaxpr: hoist them first")
        return new.jaxpr
    return new


def copy_jaxpr(closed: Any) -> Any:
    """An equal jaxpr that is another object and keeps none of the first alive (caches are keyed on the object)."""
    if type(closed).__name__ == "ClosedJaxpr":
        return closed.replace(jaxpr=closed.jaxpr.replace())
    return closed.replace()


def replace_jaxpr(closed: Any, **parts: Any) -> Any:
    """A closed jaxpr with other ``invars``, ``outvars`` or ``eqns``."""
    if type(closed).__name__ == "ClosedJaxpr":
        return closed.replace(jaxpr=closed.jaxpr.replace(**parts))
    return closed.replace(**parts)


def first_results(closed: Any, count: int) -> Any:
    """The jaxpr with its first ``count`` results alone."""
    jaxpr, _ = open_parts(closed)
    info = jaxpr.debug_info
    if isinstance(getattr(info, "result_paths", None), tuple):
        info = info._replace(result_paths=info.result_paths[:count])
    return replace_jaxpr(closed, outvars=jaxpr.outvars[:count], debug_info=info)


def trace_jaxpr(fn: Callable[..., Sequence[Any]], avals: Sequence[Any], *, lower: bool = False, like: Any = None) -> Any:
    """The closed jaxpr of ``fn``, which takes arrays of ``avals`` and returns a flat list of arrays.

    No cache is read or filled, so a fresh closure costs nothing beyond its trace and ``jax.explain_cache_misses`` stays silent.
    ``lower`` resolves high-level types; it is needed where the result replaces the body of an equation that is being lowered.
    ``like``: a jaxpr that the result takes the place of; the result keeps the name of its function.
    """
    info = api_util.debug_info("kitsune_jax.pipeline", fn, tuple(avals), {})
    if like is not None and _source_of(like):
        info = info._replace(func_src_info=_source_of(like))
    return _trace_flat(fn, avals, info, lower)[0]


def call_info(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int]) -> Any:
    """What errors of tracing say: the function, and the names of the leaves number ``places`` of its arguments, as in ``jit``."""
    info = api_util.debug_info("jit", fn, args, kwargs)
    names = info.arg_names
    return info if names is None else info._replace(arg_names=tuple(names[i] for i in places))


def trace_call(fn: Callable[..., Any], leaves: Sequence[Any], info: Any) -> Any:
    """``(closed jaxpr, tree of the result)`` of ``fn``, which takes ``leaves`` (of their avals) and returns any tree of arrays.

    ``info``: of ``call_info``. Raises what ``jax.jit`` raises, in its words.
    """
    closed, tree = _trace_flat(fn, [core.typeof(x) for x in leaves], info, lower=False)
    freed = [eqn.invars[0] for eqn in open_parts(closed)[0].eqns if eqn.primitive.name == "free_ref"]
    if len(set(freed)) < len(freed):  # JAX finds this where it lowers a body; of a call without results it drops the body before
        raise ValueError(f"function {info.func_src_info} traced for {info.traced_for} frees a mutable array reference twice")
    return closed, tree


def name_call(wrapper: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any, places: Sequence[int]) -> None:
    """Give ``wrapper`` the ``call_info`` of ``fn``, so that errors of transforming it name ``fn`` and its arguments."""
    with contextlib.suppress(AttributeError, TypeError):  # a JAX that cannot names the wrapper's
        api_util.save_wrapped_fun_debug_info(wrapper, call_info(fn, args, kwargs, places))


def _trace_flat(fn: Callable[..., Any], avals: Sequence[Any], info: Any, lower: bool) -> tuple[Any, Any]:
    if VERSION < (0, 11):
        trees: list[Any] = []
        paths: list[str] = []

        def flat(*leaves: Any) -> list[Any]:
            with_paths, tree = tree_util.tree_flatten_with_path(fn(*leaves))
            trees.append(tree)
            paths.extend(f"result{tree_util.keystr(path)}" for path, _ in with_paths)
            return [leaf for _, leaf in with_paths]

        wrapped = lu.wrap_init(flat, debug_info=info)
        wrapped.debug_info = info._replace(result_paths=lambda: tuple(paths))  # ``wrap_init`` drops them
        jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, list(avals), lower=lower)
        return core.ClosedJaxpr(jaxpr, consts), trees[-1]
    flattree = jax_module("jax._src.flattree")
    trace = getattr(pe, "trace_to_jaxpr_nocache", pe.trace_to_jaxpr)
    closed, outs = trace(fn, flattree.flatten_args(*avals), info, requires_low=lower)
    return closed, outs.tree


def _source_of(closed: Any) -> str:
    """ "mlp at model.py:12": what JAX notes of the function that a jaxpr was traced from; "" where it notes nothing."""
    info = open_parts(closed)[0].debug_info
    source = getattr(info, "func_src_info", "")
    return "" if source in ("", "<unknown>") else source


def function_name(closed: Any) -> str:
    """The user's function that a jaxpr was traced from, "mlp (model.py:12)"; differentiation and batching keep it."""
    name, _, place = _source_of(closed).partition(" at ")
    return printable(f"{name} ({os.path.basename(place)})" if place else name or "a function")


def is_staging() -> bool:
    """Are operations being recorded in a jaxpr now (and not evaluated, differentiated or batched one by one)?"""
    return isinstance(core.trace_ctx.trace, pe.DynamicJaxprTrace)


def is_alive(tracer: Any) -> bool:
    """Is the trace that made the tracer still going on?"""
    return bool(tracer._trace.is_valid())


def in_avals(closed: Any) -> list[Any]:
    """The abstract values of a jaxpr's arguments."""
    return [v.aval for v in open_parts(closed)[0].invars]


def out_avals(closed: Any) -> list[Any]:
    """The abstract values of a jaxpr's results."""
    return [v.aval for v in open_parts(closed)[0].outvars]


def has_symbolic_shapes(closed: Any) -> bool:
    """Does an argument or an intermediate value have a dimension that is not an integer (``jax.export`` with symbolic shapes)?"""
    jaxpr, _ = open_parts(closed)
    atoms = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return any(type(d) is not int and not hasattr(d, "__index__") for v in atoms for d in getattr(v.aval, "shape", ()))


def without_dead_code(closed: Any) -> Any:
    """``closed`` with the same arguments and results, without what ``jax.jit`` drops before it lowers: equations nobody reads."""
    jaxpr, consts = open_parts(closed)
    live, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(live, consts) if type(closed).__name__ == "ClosedJaxpr" else live
