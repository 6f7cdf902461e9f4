"""Jaxprs, equations, keys, versions and lowering contexts of JAX, with one meaning for every supported version.

Comes in: objects of JAX, private ones too. Goes out: functions for the rest of the package, with the same result in every version.
Invariant: only ``_compat`` uses JAX's private modules.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from kitsune_jax.config import printable, shown_file

# --- the version of JAX, its modules, and its tracebacks --------------------------------------------------------------------------


def parse_version(text: str) -> tuple[int, ...]:
    """The release in a version: (0, 13, 0) of "0.13.0rc1", "0.13.0.dev20260101" and "0.13"; () where it has no number."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", text)
    parts = [int(x) for x in numbers[0].split(".")[:3]] if numbers else []
    return (*parts, *[0] * (3 - len(parts))) if parts else ()


def jax_module(name: str) -> Any:
    """A module of JAX; an empty one of that name where this JAX has none, so that code that needs it fails where it uses it."""
    try:
        return importlib.import_module(name)
    except Exception:  # a module that was replaced may fail in any way, and importing this package must not
        return types.ModuleType(name)


F = TypeVar("F", bound=Callable[..., Any])

VERSION = parse_version(jax.__version__)

ad_util = jax_module("jax._src.ad_util")
api_util = jax_module("jax._src.api_util")
checkify = jax_module("jax._src.checkify")
core = jax_module("jax._src.core")
lu = jax_module("jax._src.linear_util")
source_info_util = jax_module("jax._src.source_info_util")
traceback_util = jax_module("jax._src.traceback_util")
tree_util = jax_module("jax._src.tree_util")
util = jax_module("jax._src.util")
ad = jax_module("jax._src.interpreters.ad")
batching = jax_module("jax._src.interpreters.batching")
mlir = jax_module("jax._src.interpreters.mlir")
pe = jax_module("jax._src.interpreters.partial_eval")
remat = jax_module("jax._src.interpreters.remat")
discharge = jax_module("jax._src.state.discharge")
state_types = jax_module("jax._src.state.types")
prng = jax_module("jax._src.random.prng")
jet_lib = jax_module("jax.experimental.jet")
jex_core = jax_module("jax.extend.core")
shape_poly = jax_module("jax._src.export.shape_poly")


def new_primitive(name: str) -> Any:
    """A primitive without rules."""
    return jex_core.Primitive(name)


def valid_jaxtype(x: Any) -> bool:
    """Can ``x`` be an operand of a primitive: an array, a number, a ref?"""
    try:
        aval = jax.typeof(x)
    except TypeError:
        return False
    return getattr(getattr(aval, "dtype", None), "kind", "") != "T"  # an array of strings has a type, but no operations


def jaxpr_as_fun(closed: Any) -> Any:
    """The function that a closed jaxpr computes: of flat arrays, to a list of arrays."""
    return jex_core.jaxpr_as_fun(closed)


def hide_from_tracebacks(path: str) -> None:
    """Leave frames of the file ``path`` out of the tracebacks that JAX filters for its users."""
    with contextlib.suppress(AttributeError, TypeError):  # a JAX that cannot shows them
        traceback_util.register_exclusion(path)


def api_boundary(fn: F) -> F:
    """``fn``, whose errors have the traceback that JAX filters for its users, like those of ``jax.jit`` functions."""
    try:
        return cast(F, traceback_util.api_boundary(fn))
    except (AttributeError, TypeError):  # a JAX that cannot shows every frame
        return fn


# A user's function is traced and evaluated through this folder, and the user's line in messages of JAX and in our reports must not
# be a line of this package. Paths are not resolved: frames name files as they were imported, links included.
_HERE = pathlib.Path(__file__).parent
for _file in _HERE.glob("*.py"):
    hide_from_tracebacks(str(_file))
with contextlib.suppress(AttributeError, TypeError):
    source_info_util.register_exclusion(str(_HERE.parent) + os.sep)


# --- lowering rules, devices, meshes, exports, processes --------------------------------------------------------------------------


def x64(enabled: bool) -> Any:
    """A context in which 64-bit types stay 64-bit (``enabled``) or become 32-bit ones, in this thread."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    return jax_module("jax.experimental").enable_x64(enabled)


def default_platform() -> str:
    """The platform that a program is most likely traced for: the platform of JAX's default device."""
    device = jax.config.jax_default_device
    name = device if isinstance(device, str) else device.platform if device is not None else jax.default_backend()
    return {"gpu": "cuda"}.get(name, name)


def runs_on_one_device(ctx: Any) -> bool:
    """May the module that ``ctx`` lowers hold a custom call: is there one device, or is every mesh axis manual that has several?

    Elsewhere XLA would gather the call's operands on every device without a word (jax issue 32098).
    """
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return all(size == 1 or name in axes.manual_axes for name, size in axes.mesh.shape.items())
    return getattr(axes, "num_devices", 2) == 1


def is_alone(ctx: Any) -> bool:
    """Is the module that ``ctx`` lowers a program for one device, of which no other knows?"""
    axes = ctx.module_context.axis_context
    return axes.mesh.size == 1 if hasattr(axes, "manual_axes") else getattr(axes, "num_devices", 2) == 1


def program_of(ctx: Any) -> Any:
    """The module that ``ctx`` lowers into: an object that can be referenced weakly."""
    return ctx.module_context.module


def is_exported(ctx: Any) -> bool:
    """Does ``ctx`` lower a module for ``jax.export``, to be run by another process?"""
    return bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """The platforms that ``ctx`` lowers for."""
    return tuple(ctx.module_context.platforms)


def array_type(shape: Sequence[int], dtype: Any) -> Any:
    """The abstract value of an array."""
    return core.ShapedArray(tuple(shape), dtype)


def lower_jaxpr(ctx: Any, closed: Any, args: Sequence[Any]) -> Any:
    """The MLIR values of ``closed`` on the MLIR values ``args``, as a lowering rule returns them."""
    return mlir.lower_fun(jaxpr_as_fun(closed), multiple_results=True)(ctx, *args)


def register_lowering(prim: Any, rule: Any, **how: Any) -> None:
    """Lower ``prim`` by ``rule``, for ``platform=`` or for all of them."""
    mlir.register_lowering(prim, rule, **how)


def aval_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result of another shape and dtype that varies over the same mesh axes as ``aval`` (``shard_map`` checks that)."""
    if hasattr(aval, "update"):
        if tuple(shape) != tuple(aval.shape) and not varies(aval):  # the entries of an explicit sharding belong to dimensions
            return core.ShapedArray(shape, jax.numpy.dtype(dtype))
        return aval.update(shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False)
    return jax.ShapeDtypeStruct(shape, dtype)


def with_shape(aval: Any, shape: tuple[Any, ...]) -> Any:
    """``aval`` with other sizes of its dimensions."""
    return aval.update(shape=shape)


def varies(aval: Any) -> bool:
    """Whether a value differs along a manual mesh axis."""
    return bool(_varying_axes(aval))


def varying_like(x: Any, aval: Any) -> Any:
    """``x``, which varies over the manual mesh axes that ``aval`` varies over as well, if not yet (``shard_map`` checks that)."""
    axes = _varying_axes(aval)
    missing = tuple(a for a in axes if a not in _varying_axes(jax.typeof(x))) if axes else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying_axes(aval: Any) -> Any:
    return aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", None) or ()


def distributed_client() -> tuple[int, Any] | None:
    """(number of this process, the key-value store of all processes) in a program of several processes; None in one alone."""
    state = jax_module("jax._src.distributed").global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return None
    return int(state.process_id), state.client


def has_cpu_backend() -> bool:
    """Whether JAX can run something on the CPU here (``JAX_PLATFORMS`` may leave it out)."""
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return False


# --- jaxprs, open or closed -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Switch Python's cyclic garbage collector off, unless the code inside turns it on.

    A plan, like a jaxpr, is many small objects that all live until it is made. Each collection meanwhile walks all objects of JAX
    and the user and finds nothing: a fifth of the time to lower a deep network's gradient.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_FRAME_WORDS = 70_000  # CPython maps a chunk of 1 MiB for such a frame, and leaves 460 KB of it to the frames of calls inside


def with_room_for_frames(function: F) -> F:
    """``function``, inside of which Python's frames lie in one chunk of memory.

    CPython keeps frames in chunks of 16 KiB (``push_chunk`` in ``Python/pystate.c``). A call that finds its chunk full maps another
    one, and unmaps it when it returns, so a loop at the end of a chunk faults on fresh pages in every call: 52 000 times, half of
    the time, in the lowering of 80 layers below JAX's own frames. A frame that is larger than a chunk gets one of its own size.
    Pages that nobody touches cost nothing.
    """
    if sys.implementation.name != "cpython":
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = call.__code__.replace(co_stacksize=_FRAME_WORDS)
    return cast(F, functools.wraps(function)(types.FunctionType(code, globals(), closure=call.__closure__)))


def is_literal(v: Any) -> bool:
    """Is the atom a constant written into the equation (``v.val``), and not a variable?"""
    return type(v).__name__ == "Literal"


def is_jaxpr(x: Any) -> bool:
    """Is ``x`` a jaxpr of either kind?"""
    return type(x).__name__ in ("Jaxpr", "ClosedJaxpr")


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        yield from (x for x in (value if isinstance(value, (tuple, list)) else (value,)) if is_jaxpr(x))


def open_parts(j: Any) -> tuple[Any, list[Any]]:
    """``(open jaxpr, constants)`` of a jaxpr of either kind: the constants belong to ``open_jaxpr.constvars``, in order."""
    if type(j).__name__ == "ClosedJaxpr":
        return j.jaxpr, list(j.consts)
    return j, list(getattr(j, "consts", ()) or ())


class _Text:
    """The text of jaxprs (``text_of``). ``types``: of abstract values; ``bodies``: of inner jaxprs, by their identity."""

    def __init__(self) -> None:
        self.types: dict[Any, str] = {}
        self.bodies: dict[int, str] = {}

    def jaxpr(self, jaxpr: Any) -> str:
        names: dict[Any, str] = {}

        def new(v: Any) -> str:
            names[v] = name = f"{len(names)}"
            return f"{name}:{self.type(v.aval)}"

        def read(v: Any) -> str:
            return f"{literal_text(v.val)}:{self.type(v.aval)}" if is_literal(v) else names[v]

        lines = [" ".join(map(new, (*jaxpr.constvars, *jaxpr.invars)))]
        for eqn in jaxpr.eqns:
            params = eqn.params
            words = [f"{k}={self.param(params[k])}" for k in sorted(params)]
            ins = " ".join(map(read, eqn.invars))
            lines.append(f"{' '.join(map(new, eqn.outvars))} = {eqn.primitive.name}[{' '.join(words)}] {ins}")
        lines.append(f"{' '.join(map(read, jaxpr.outvars))} {sorted(map(str, jaxpr.effects))}")
        return "\n".join(lines)

    def type(self, aval: Any) -> str:
        found = self.types.get(aval)
        if found is None:
            found = self.types[aval] = aval.str_short(short_dtypes=True)
        return found

    def param(self, x: Any) -> str:
        if type(x) is tuple:
            return f"({','.join(map(self.param, x))})"
        if is_jaxpr(x):
            if id(x) not in self.bodies:
                self.bodies[id(x)] = f"{{{self.jaxpr(open_parts(x)[0])}}}"
            return self.bodies[id(x)]
        return f"{{{','.join(sorted(map(repr, x)))}}}" if isinstance(x, frozenset) else str(x)


def literal_text(x: Any) -> str:
    """Of a number all digits; NumPy takes as long to lay out an array of one number as one of many."""
    return repr(np.asarray(x).item() if np.ndim(x) == 0 and not is_key(x) else x)


def text_of(jaxpr: Any) -> str:
    """An open jaxpr as text, the same in every process that traces the same program. JAX's own text, which is laid out in lines for
    a reader, takes four times as long."""
    return re.sub(r"0x[0-9a-f]+", "", _Text().jaxpr(jaxpr))


def hoist_consts(closed: Any) -> tuple[Any, list[Any]]:
    """The closed jaxpr with its constants as leading arguments, and the constants."""
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
    values = [ArrayConstant(np.asarray(c)) for c in consts]
    made, avals = constant_primitive(), in_avals(closed)
    return trace_jaxpr(lambda *a: jaxpr_as_fun(hoisted)(*(made.bind(value=v) for v in values), *a), avals, lower=True, like=closed)


# Of a constant array of integers that stays in a jaxpr: 16 million indices of 32 bits. An order that is made of it is as large, and
# a program holds both as text while it is compiled. Larger arrays are arguments, whose order XLA finds in every call.
MOST_INDEX_BYTES = 64 << 20


def indices_inside(closed: Any) -> tuple[Any, list[Any]]:
    """The closed jaxpr with its constants as leading arguments, and these; but for each array of integers, which may be indices, an
    equation ``kitsune_constant`` in front, so that it stays known to whoever lowers the jaxpr or its derivatives. The same for
    booleans of the shape of such an array: ``ids < 0`` of an array of NumPy is one, which JAX reads to count from the end."""
    hoisted, consts = hoist_consts(closed)
    jaxpr, _ = open_parts(hoisted)
    shapes = {c.shape for c in consts if _is_known(c, "iu")}
    known = (k for k, c in enumerate(consts) if _is_known(c, "iu") or _is_known(c, "b") and c.shape in shapes)
    inside = {k: ArrayConstant(np.asarray(consts[k])) for k in known}
    if not inside:
        return hoisted, consts
    made = constant_primitive()
    traced = [open_parts(trace_jaxpr(lambda v=v: [made.bind(value=v)], []))[0].eqns[0] for v in inside.values()]
    eqns = [eqn.replace(outvars=[jaxpr.invars[k]]) for k, eqn in zip(inside, traced, strict=True)]
    parts: dict[str, Any] = {
        "invars": [v for k, v in enumerate(jaxpr.invars) if k not in inside],
        "eqns": [*eqns, *jaxpr.eqns],
    }
    info, names = jaxpr.debug_info, getattr(jaxpr.debug_info, "arg_names", None)
    if isinstance(names, tuple) and len(names) == len(jaxpr.invars):
        parts["debug_info"] = info._replace(arg_names=tuple(name for k, name in enumerate(names) if k not in inside))
    return replace_jaxpr(hoisted, **parts), [c for k, c in enumerate(consts) if k not in inside]


def _is_known(x: Any, kinds: str) -> bool:
    """Is it an array of a dtype of one of ``kinds`` in the memory of this process, and neither a number nor too large?"""
    if not isinstance(x, np.ndarray | jax.Array) or isinstance(x, core.Tracer) or is_key(jax.typeof(x)):
        return False
    if x.dtype.kind not in kinds or x.size < 2 or x.size * x.dtype.itemsize > MOST_INDEX_BYTES:
        return False
    return isinstance(x, np.ndarray) or x.is_fully_addressable and len(x.devices()) == 1


def constant(array: np.ndarray) -> jax.Array:
    """``array`` as the result of an equation ``kitsune_constant`` of the jaxpr that is being traced."""
    made: jax.Array = constant_primitive().bind(value=ArrayConstant(array))
    return made


class ArrayConstant:
    """An array as the parameter of an equation: hashable, equal to one of equal bytes."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._key = (array.shape, str(array.dtype), array.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayConstant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{self.array.dtype}{list(self.array.shape)}"


CONSTANT_NAME = "kitsune_constant"


@functools.cache
def constant_primitive() -> Any:
    """``kitsune_constant[value]``, an array without operands."""
    prim = new_primitive(CONSTANT_NAME)
    prim.def_impl(lambda *, value: jax.numpy.asarray(value.array))
    prim.def_abstract_eval(lambda *, value: core.ShapedArray(value.array.shape, value.array.dtype))
    register_lowering(prim, lambda _, *, value: [mlir.ir_constant(value.array)])
    return prim


def as_kind_of(new: Any, old: Any) -> Any:
    """``new`` (closed, without constants) as the kind of jaxpr that ``old`` is: parameters of an equation must keep their kind."""
    if type(old).__name__ == "Jaxpr" and type(new).__name__ == "ClosedJaxpr":
        if new.consts:
            raise ValueError("a jaxpr with constants cannot be an open jaxpr: hoist them first")
        return new.jaxpr
    return new


def replace_jaxpr(closed: Any, **parts: Any) -> Any:
    """A closed jaxpr with other ``invars``, ``outvars`` or ``eqns``. Even without ``parts`` it is another object, which keeps none
    of the first alive (caches are keyed on the object)."""
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


def trace_jaxpr(
    fn: Callable[..., Sequence[Any]], avals: Sequence[Any], *, lower: bool = False, like: Any = None, name: str = ""
) -> Any:
    """The closed jaxpr of ``fn``, which takes arrays of ``avals`` and returns a flat list of arrays.

    No cache is read or filled, so a fresh closure costs nothing beyond its trace and ``jax.explain_cache_misses`` stays silent.
    ``lower`` resolves high-level types; it is needed where the result replaces the body of an equation that is being lowered.
    ``like``: a jaxpr that the result takes the place of; the result keeps the name of its function. ``name``: that name.
    """
    info = api_util.debug_info("kitsune_jax.pipeline", fn, tuple(avals), {})
    name = name or ("" if like is None else _source_of(like))
    if name:
        info = info._replace(func_src_info=name)
    return _trace_flat(fn, avals, info, lower)[0]


def call_info(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int]) -> Any:
    """The names in errors of tracing: of the function, and of the leaves number ``places`` of its arguments, as in ``jit``."""
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
    """JAX's note of the function that a jaxpr was traced from, "mlp at model.py:12"; "" if there is none."""
    info = open_parts(closed)[0].debug_info
    source = getattr(info, "func_src_info", "")
    return "" if source in ("", "<unknown>") else source


def function_name(closed: Any) -> str:
    """The user's function that a jaxpr was traced from, "mlp (model.py:12)"; differentiation and batching keep it."""
    name, _, place = _source_of(closed).partition(" at ")
    file, colon, line = place.rpartition(":")
    shown = f"{shown_file(file)}:{line}" if colon else os.path.basename(place)
    return printable(f"{name} ({shown})" if place else name or "a function")


def is_staging() -> bool:
    """Are operations being recorded in a jaxpr now (and not evaluated, differentiated or batched one by one)?"""
    return isinstance(core.trace_ctx.trace, pe.DynamicJaxprTrace)


def is_alive(tracer: Any) -> bool:
    """Is the trace that made the tracer still active?"""
    return bool(tracer._trace.is_valid())


def in_avals(closed: Any) -> list[Any]:
    """The abstract values of a jaxpr's arguments."""
    return [v.aval for v in open_parts(closed)[0].invars]


def out_avals(closed: Any) -> list[Any]:
    """The abstract values of a jaxpr's results."""
    return [v.aval for v in open_parts(closed)[0].outvars]


def without_dead_code(closed: Any) -> Any:
    """``closed`` with the same arguments and results, without the equations that no result needs, as ``jax.jit`` lowers it."""
    jaxpr, consts = open_parts(closed)
    live, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(live, consts) if type(closed).__name__ == "ClosedJaxpr" else live


# --- sizes that are not known yet (``jax.export`` with symbolic shapes) -----------------------------------------------------------


def is_symbolic(size: Any) -> bool:
    """Is the size of a dimension an expression, and no integer?"""
    return type(size) is not int and isinstance(size, getattr(shape_poly, "_DimExpr", ()))


def has_symbolic_shapes(closed: Any) -> bool:
    """Does an argument or an intermediate value have a dimension whose size is not an integer?"""
    jaxpr, _ = open_parts(closed)
    atoms = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return any(map(is_symbolic, (d for v in atoms for d in getattr(v.aval, "shape", ()))))


def symbolic_sizes(ctx: Any) -> dict[str, Any]:
    """The names of the sizes that the module which ``ctx`` lowers does not know, with their MLIR values."""
    names = ctx.module_context.shape_poly_state.dim_vars
    found = zip(names, ctx.dim_var_values, strict=True)
    return {name: value for name, value in found if name != "_platform_index"}  # an argument of a program for several platforms


def size_at(size: Any, sizes: Mapping[str, int]) -> int:
    """The size of a dimension where the symbols in it have these values."""
    return int(core.evaluate_shape((size,), tuple(sizes), *sizes.values())[0])


def size_of_text(text: str, scope: Any = None) -> Any:
    """The size that is written as ``text``, such as "2*b + 1", in a ``scope`` of symbols or in one of its own."""
    (size,) = jax.export.symbolic_shape(f"{text},", scope=scope)
    return size


_ASSUMED = 1024  # a symbol stands for a batch or for the tokens of a text: more than a row has elements, mostly


def assumed_sizes(shape: Sequence[Any]) -> list[int]:
    """``shape`` for estimates, with a number in the place of each symbol."""
    return [size_at(d, dict.fromkeys(d._get_vars(), _ASSUMED)) if is_symbolic(d) else d for d in shape]


def satisfies(size: Any, sizes: Mapping[str, int]) -> bool:
    """Do the values ``sizes`` satisfy the constraints that the user gave for the symbols of ``size``?"""
    for constraint in size.scope._explicit_constraints:
        try:
            left, right = (size_at(x, sizes) for x in (constraint.e1, constraint.e2))
        except KeyError:  # of a symbol that no argument has
            continue
        if left != right if constraint.cmp.name == "EQ" else left < right:
            return False
    return True


class AtSizes:
    """Jaxprs, their equations' parameters and types with numbers in the place of symbols. ``sizes``: the value of each symbol.

    ``origins``: by the identity of each new equation, that equation and the one in whose place it is. ``expressions``: all sizes
    with symbols that were met, by their texts.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        self.origins: dict[int, tuple[Any, Any]] = {}
        self.expressions: dict[str, Any] = {}
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, x: Any) -> Any:
        """``x``: a jaxpr, a type, a size, or a parameter of an equation."""
        if is_symbolic(x):
            self.expressions.setdefault(str(x), x)
            return size_at(x, self.sizes)
        if is_jaxpr(x):
            if id(x) not in self._known:
                self._known[id(x)] = x, self._jaxpr(x)
            return self._known[id(x)][1]
        if isinstance(x, tuple | list):
            new = [self.of(y) for y in x]
            if all(a is b for a, b in zip(x, new, strict=True)):
                return x
            return type(x)(*new) if hasattr(x, "_fields") else type(x)(new)
        if isinstance(x, core.AbstractValue) and any(map(is_symbolic, getattr(x, "shape", ()))):
            if is_ref(x):
                raise NotImplementedError("a mutable array has a symbolic shape")
            return with_shape(x, self.of(tuple(x.shape)))
        return x

    def _jaxpr(self, closed: Any) -> Any:
        jaxpr, consts = open_parts(closed)
        made: dict[Any, Any] = {}

        def atoms(found: Sequence[Any]) -> list[Any]:
            for v in found:
                if not is_literal(v) and v not in made:
                    made[v] = type(v)(self.of(v.aval))
            return [v if is_literal(v) else made[v] for v in found]

        places = {name: atoms(getattr(jaxpr, name)) for name in ("constvars", "invars")}
        eqns = []
        for eqn in jaxpr.eqns:
            params = {name: self.of(value) for name, value in eqn.params.items()}
            eqns.append(eqn.replace(invars=atoms(eqn.invars), outvars=atoms(eqn.outvars), params=params))
            self.origins[id(eqns[-1])] = eqns[-1], eqn
        new = jaxpr.replace(**places, eqns=eqns, outvars=atoms(jaxpr.outvars))
        return core.ClosedJaxpr(new, consts) if type(closed).__name__ == "ClosedJaxpr" else new


# --- equations --------------------------------------------------------------------------------------------------------------------


def called(eqn: Any) -> str:
    """The name of the user's operation: the primitive's name; for a high-level primitive (``jax.experimental.hijax``) the name of
    its class, or of the function it wraps.
    """
    high = eqn.params.get("_prim")
    if high is None:
        return str(eqn.primitive.name)
    traced = getattr(high, "params", {}).get("traced")
    return str(getattr(traced, "fun_name", None) or type(high).__name__)


def expansion(eqn: Any) -> Any | None:
    """The closed jaxpr of low-level primitives that a high-level primitive on arrays expands to; ``None`` for other equations."""
    high = eqn.params.get("_prim")
    atoms = (*eqn.invars, *eqn.outvars)
    if eqn.primitive.name != "call_hi_primitive" or any(type(v.aval).__name__ != "ShapedArray" for v in atoms):
        return None
    expand = functools.partial(eqn.primitive.to_lojax, _prim=high)
    with eqn.ctx.manager:
        return trace_jaxpr(expand, [v.aval for v in eqn.invars], lower=True)


def is_ref(aval: Any) -> bool:
    """Is it the type of a reference to a mutable array?"""
    return type(aval).__name__ == "AbstractRef"


def without_refs(closed: Any) -> Any:
    """``closed`` as JAX lowers it: references become values, and those among the arguments become results as well."""
    jaxpr, _ = open_parts(closed)
    if any(is_ref(v.aval) for v in jaxpr.invars) or any("MutableArray" in type(e).__name__ for e in jaxpr.effects):
        return discharge.discharge_state(closed)
    return closed


def is_transposed(eqn: Any) -> bool:
    """Was the equation made by transposition, as the backward pass of every gradient is? JAX notes it in the name stack."""
    stack = eqn.source_info.name_stack.stack
    return any(type(part).__name__ == "Transform" and part.name == "transpose" for part in stack)  # a user's scope is a Scope


def source_line(eqn: Any) -> str:
    """The user's line, "model.py:12 (mlp)", or "" where there is none: never a frame inside JAX or this package."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return printable(f"{shown_file(frame.file_name)}:{frame.start_line} ({frame.function_name.rsplit('.', 1)[-1]})")


@contextlib.contextmanager
def user_context(eqn: Any) -> Iterator[None]:
    """Bind primitives in the context of ``eqn``: its mesh and configuration, its name stack, its traceback.

    ``eqn.ctx.manager`` carries the (manual) mesh: without it ``shard_map(check_vma=True)`` refuses what is bound.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind_eqn(eqn: Any, vals: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluate one equation on ``vals`` (with other ``params`` if given) in its own context. Returns the list of its results.

    JAX folds the conversion of a literal with NumPy, which warns of a -1e30 that becomes an infinite float16. ``jax.jit`` folds no
    literal that is an argument of an inner ``jit``, as of ``jnp.where``: NumPy's warnings are those of the first trace alone.
    """
    bind_params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    with user_context(eqn), np.errstate(over="ignore", invalid="ignore"):
        outs = eqn.primitive.bind(*vals, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def scan_parts(eqn: Any) -> tuple[int, int]:
    """(number of constants, number of carries) among the operands of a ``scan``; the others hold a slice for each step."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = (len(list(part)) for part in eqn.params["ft_in"].unpack())
    return consts, carries


# --- custom calls with names of their own -----------------------------------------------------------------------------------------


def named_ffi_call(label: str, target: str, results: Sequence[Any], **options: Any) -> Callable[..., list[Any]]:
    """``jax.ffi.ffi_call(target, results, **options)``, which profilers show as ``label``: HLO names an instruction by its
    primitive, and all custom calls have one. Where this JAX does not let them be told apart, they keep its name."""
    plain = jax.ffi.ffi_call(target, results, **options)

    def call(*args: Any, **attributes: Any) -> list[Any]:
        closed = trace_jaxpr(lambda *xs: list(plain(*xs, **attributes)), [jax.typeof(x) for x in args])
        eqn, *more = open_parts(closed)[0].eqns
        named = None if more else _named_primitive(eqn.primitive, label)
        if named is None:
            return list(plain(*args, **attributes))
        return list(named.bind(*args, **eqn.params))

    return call


@functools.lru_cache(maxsize=4096)
def _named_primitive(primitive: Any, label: str) -> Any | None:
    """``primitive``, a custom call without transformations, under another name; ``None`` where this JAX has other rules."""
    try:
        rule = jax_module("jax._src.ffi").ffi_call_lowering
        found = new_primitive(label)
        found.multiple_results = True
        found.def_effectful_abstract_eval(primitive.abstract_eval)
        found.def_impl(lambda *args, **params: jax.jit(functools.partial(found.bind, **params))(*args))
        register_lowering(found, rule)
    except AttributeError:
        return None
    return found


# --- keys of ``jax.random`` as the arrays of uint32 that hold them ----------------------------------------------------------------


def is_key(aval: Any) -> bool:
    """Is it the type of an array of typed keys (``jax.random.key``)?"""
    dtype = getattr(aval, "dtype", None)
    return not (dtype is None or isinstance(dtype, np.dtype)) and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def physical(aval: Any) -> Any:
    """The type that JAX lowers ``aval`` as: for keys uint32 with the dimensions of a key behind the others; else ``aval``."""
    if isinstance(getattr(aval, "dtype", None), np.dtype):  # by far most
        return aval
    return core.physical_aval(aval) if is_key(aval) else aval


def wrapped_like(x: jax.Array, aval: Any) -> jax.Array:
    """The uint32 array ``x`` as keys of the type ``aval``."""
    return jax.random.wrap_key_data(x, impl=aval.dtype._impl.name)


def random_jaxpr(eqn: Any) -> Any | None:
    """The computation of an equation on keys, as a closed jaxpr on the arrays that hold them; ``None`` for other equations."""
    base = _base(eqn)
    if base is None:
        return None
    with eqn.ctx.manager:  # it decides how threefry counts (jax_threefry_partitionable)
        return trace_jaxpr(lambda *arrays: [base(*arrays)], [physical(v.aval) for v in eqn.invars], lower=True)


def _base(eqn: Any) -> Callable[..., Any] | None:
    """The function of arrays that JAX traces to lower the equation."""
    name, params = eqn.primitive.name, eqn.params
    if name == "random_seed":
        return functools.partial(prng.random_seed_impl_base, impl=params["impl"])
    if name not in ("random_bits", "random_split", "random_fold_in"):
        return None
    keys = eqn.invars[0].aval
    impl, rank = keys.dtype._impl, len(keys.shape)
    if name == "random_bits":
        how = {"bit_width": params["bit_width"], "shape": params["shape"]}
        return lambda x: prng.random_bits_impl_base(impl, x, rank, **how)
    if name == "random_split":
        return lambda x: prng.random_split_impl_base(impl, x, rank, shape=params["shape"])
    return lambda x, data: prng.random_fold_in_impl_base(impl, x, data, keys.shape)
