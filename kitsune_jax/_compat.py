"""Everything that depends on the version of JAX, and the only file that imports private JAX.

Comes in: JAX objects (jaxprs, equations, lowering contexts). Goes out: the few operations the rest of the package needs on them,
with one meaning for every supported version (0.10.2 to 0.12). Invariants: nothing outside this file knows whether a jaxpr is
"closed"; importing it works with every JAX, and what a JAX lacks fails where it is used (``jax_support`` tries that first).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax.plain_text import printable


def parse_version(text: str) -> tuple[int, ...]:
    """The release in a version: (0, 13, 0) of "0.13.0rc1", "0.13.0.dev20260101" and "0.13"; () where it has no number."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", text)
    parts = [int(x) for x in numbers[0].split(".")[:3]] if numbers else []
    return (*parts, *[0] * (3 - len(parts))) if parts else ()


def _module(name: str) -> Any:
    """A module of JAX; an empty one of that name where this JAX has none, so that what needs it fails where it is used."""
    try:
        return importlib.import_module(name)
    except Exception:  # a module that was replaced may fail in any way, and importing this package must not
        return types.ModuleType(name)


VERSION = parse_version(jax.__version__)

ad_util = _module("jax._src.ad_util")
api_util = _module("jax._src.api_util")
checkify = _module("jax._src.checkify")
core = _module("jax._src.core")
lu = _module("jax._src.linear_util")
source_info_util = _module("jax._src.source_info_util")
traceback_util = _module("jax._src.traceback_util")
tree_util = _module("jax._src.tree_util")
util = _module("jax._src.util")
ad = _module("jax._src.interpreters.ad")
batching = _module("jax._src.interpreters.batching")
mlir = _module("jax._src.interpreters.mlir")
pe = _module("jax._src.interpreters.partial_eval")
remat = _module("jax._src.interpreters.remat")
discharge = _module("jax._src.state.discharge")
state_types = _module("jax._src.state.types")
jet_lib = _module("jax.experimental.jet")
jex_core = _module("jax.extend.core")


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
    """The function that a closed jaxpr stands for: of flat arrays, to a list of arrays."""
    return jex_core.jaxpr_as_fun(closed)


def hide_from_tracebacks(path: str) -> None:
    """Leave frames of the file ``path`` out of the tracebacks that JAX filters for its users."""
    with contextlib.suppress(AttributeError, TypeError):  # a JAX that cannot shows them
        traceback_util.register_exclusion(path)


def api_boundary(fn: Any) -> Any:
    """``fn``, out of which errors come with the traceback that JAX filters for its users, as out of ``jax.jit`` functions."""
    try:
        return traceback_util.api_boundary(fn)
    except (AttributeError, TypeError):  # a JAX that cannot shows every frame
        return fn


hide_from_tracebacks(__file__)  # the user's function is traced from here
# "The user's line" is never one of ours, in our reports and in JAX's own messages.
with contextlib.suppress(AttributeError, TypeError):
    source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)


# --- jaxprs ---------------------------------------------------------------------------------------------------------------------


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
    flattree = _module("jax._src.flattree")
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


def in_avals(closed: Any) -> list[Any]:
    """The abstract values of a jaxpr's arguments."""
    return [v.aval for v in open_parts(closed)[0].invars]


def out_avals(closed: Any) -> list[Any]:
    """The abstract values of a jaxpr's results."""
    return [v.aval for v in open_parts(closed)[0].outvars]


def has_effects(eqn: Any) -> bool:
    """Does the equation do something besides computing its results?"""
    return bool(eqn.effects)


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


# --- equations ------------------------------------------------------------------------------------------------------------------


def called(eqn: Any) -> str:
    """What the user called: the primitive's name; of a high-level primitive (``jax.experimental.hijax``) the name of its class, or
    of the function it wraps.
    """
    high = eqn.params.get("_prim")
    if high is None:
        return str(eqn.primitive.name)
    traced = getattr(high, "params", {}).get("traced")
    return str(getattr(traced, "fun_name", None) or type(high).__name__)


def expansion(eqn: Any) -> Any | None:
    """What a high-level primitive on arrays stands for, as a closed jaxpr of low-level ones; ``None`` for other equations."""
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
    """``closed`` as JAX lowers it: references are values, and those among the arguments are results as well."""
    jaxpr, _ = open_parts(closed)
    if any(is_ref(v.aval) for v in jaxpr.invars) or any("MutableArray" in type(e).__name__ for e in jaxpr.effects):
        return discharge.discharge_state(closed)
    return closed


def is_transposed(eqn: Any) -> bool:
    """Does the equation come from transposition, as the backward pass of every gradient does? JAX notes it in the name stack."""
    stack = eqn.source_info.name_stack.stack
    return any(type(part).__name__ == "Transform" and part.name == "transpose" for part in stack)  # a user's scope is a Scope


def source_line(eqn: Any) -> str:
    """The user's line, "model.py:12 (mlp)", or "" where there is none: never a frame inside JAX or this package."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return printable(f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name.rsplit('.', 1)[-1]})")


@contextlib.contextmanager
def user_context(eqn: Any) -> Iterator[None]:
    """Bind primitives as if they stood where ``eqn`` stands: its mesh and configuration, its name stack, its traceback.

    ``eqn.ctx.manager`` carries the (manual) mesh: without it ``shard_map(check_vma=True)`` refuses what is bound.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind_eqn(eqn: Any, vals: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluate one equation on ``vals`` (with other ``params`` if given) in its own context. Returns the list of its results."""
    bind_params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    with user_context(eqn):
        outs = eqn.primitive.bind(*vals, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


# --- lowering -------------------------------------------------------------------------------------------------------------------


def runs_on_one_device(ctx: Any) -> bool:
    """May a custom call stand in the module that ``ctx`` lowers: one device, or every mesh axis manual?

    Elsewhere XLA would gather the call's operands on every device without a word (jax issue 32098).
    """
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return axes.mesh.size == 1 or frozenset(axes.manual_axes) == frozenset(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 2) == 1


def is_exported(ctx: Any) -> bool:
    """Is the module that ``ctx`` lowers one of ``jax.export``, to be run by another process?"""
    return bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))


def lower_jaxpr(ctx: Any, closed: Any, args: Sequence[Any]) -> Any:
    """The MLIR values of ``closed`` on the MLIR values ``args``: what a lowering rule returns."""
    return mlir.lower_fun(jaxpr_as_fun(closed), multiple_results=True)(ctx, *args)


def register_lowering(prim: Any, rule: Any, **how: Any) -> None:
    """Lower ``prim`` by ``rule``, for ``platform=`` or for all of them."""
    mlir.register_lowering(prim, rule, **how)


# --- rules of a call-like primitive, whose parameter ``call_jaxpr`` every transformation rewrites ---------------------------------


def register_call_rules(prim: Any, leaner: Callable[..., Any]) -> None:
    """Give ``prim[call_jaxpr, **static]`` its rules: jvp, linearize, transpose, vmap, partial evaluation, DCE, remat, refs,
    checkify, jet.

    Every rule rewrites ``call_jaxpr`` and binds ``prim`` again with the same static parameters. No lowering is registered.
    ``leaner(primal jaxpr, tangent jaxpr, forwarded, number of results, number of constants)`` gives another division of a
    linearized call, as (primal jaxpr, tangent jaxpr, forwarded), or None.
    """
    if hasattr(jex_core, "register_call_primitive_rules"):
        jex_core.register_call_primitive_rules(prim, name=None)
    else:
        _register_call_rules_0_10(prim)
    ad.primitive_linearizations[prim] = _linearize_rule(prim, ad.primitive_linearizations[prim], leaner)
    _register_checkify(prim)
    jet_lib.jet_rules[prim] = functools.partial(_jet_rule, prim)


def _linearize_rule(prim: Any, usual: Callable[..., Any], leaner: Callable[..., Any]) -> Callable[..., Any]:
    """The rule ``usual``, but with the residuals of ``leaner`` where that has something to say."""

    def divided(call_jaxpr: Any, nzs: tuple[bool, ...], is_vjp: bool) -> Any:
        primal, made, nz_out, forwarded, tangent = ad.linearize_jaxpr(call_jaxpr, list(nzs), is_vjp=is_vjp)
        structured = None
        if not isinstance(made, int):  # since 0.11: a tree of (results, residuals, structured residuals)
            structured = made.unpack()[2]
            if len(structured):
                return None
        n, consts = len(out_avals(call_jaxpr)), len(getattr(call_jaxpr, "consts", ()))
        found = leaner(primal, tangent, tuple(forwarded), n, consts)
        return None if found is None else (*found, nz_out, structured)

    remembered = util.weakref_lru_cache(divided)

    def linearize(is_vjp: bool, nzs: Any, *primals: Any, call_jaxpr: Any, **params: Any) -> Any:
        found = remembered(call_jaxpr, tuple(nzs), is_vjp)
        if found is None:
            return usual(is_vjp, nzs, *primals, call_jaxpr=call_jaxpr, **params)
        primal, tangent, forwarded, nz_out, structured = found
        n = len(out_avals(call_jaxpr))
        outs = prim.bind(*primals, call_jaxpr=primal, **params)
        known, made = [*getattr(call_jaxpr, "consts", ()), *primals], iter(outs[n:])
        residuals = [next(made) if f is None else known[f] for f in forwarded]

        def tangents_of(residuals: Any, tangents: Sequence[Any]) -> list[Any]:
            live = [ad.instantiate_zeros(t) for nz, t in zip(nzs, tangents, strict=True) if nz]
            tangent_prim = ad.vjp_node(prim) if is_vjp and hasattr(ad, "vjp_node") else prim
            rest = iter(tangent_prim.bind(*residuals, *live, call_jaxpr=tangent, **params))
            zero = (ad_util.Zero(v.to_tangent_aval()) for v in out_avals(call_jaxpr))
            return [next(rest) if nz else z for nz, z in zip(nz_out, zero, strict=True)]

        if structured is None:
            return outs[:n], nz_out, residuals, lambda residuals, *tangents: tangents_of(residuals, tangents)
        nothing = structured.update([]).unflatten()
        return outs[:n], nz_out, residuals, nothing, lambda residuals, _, *tangents: tangents_of(residuals, tangents)

    return linearize


def _register_checkify(prim: Any) -> None:
    """Checkify looks inside. (Its default rule for a ``call_jaxpr`` binds with ``subfuns=``, which we do not take.)"""
    if hasattr(checkify, "eval_jaxpr_error_check"):
        checkify.error_checks[prim] = checkify.eval_jaxpr_error_check
    else:
        checkify.error_checks[prim] = lambda err, enabled, *args, call_jaxpr, **_: checkify.checkify_jaxpr(
            call_jaxpr, enabled, err, *args
        )


def _jet_rule(prim: Any, primals: Sequence[Any], series: Sequence[Sequence[Any]], *, call_jaxpr: Any, **params: Any) -> Any:
    """Taylor mode: ``call_jaxpr`` becomes the jaxpr of its own jet."""
    order, n_in, n_out = len(series[0]), len(primals), len(out_avals(call_jaxpr))

    def jet_flat(*flat: Any) -> list[Any]:
        terms = [list(flat[n_in + i * order : n_in + (i + 1) * order]) for i in range(n_in)]
        outs, out_terms = jet_lib.jet(
            lambda *a: tuple(jaxpr_as_fun(call_jaxpr)(*a)), tuple(flat[:n_in]), tuple(terms), factorial_scaled=False
        )
        return [*outs, *(t for ts in out_terms for t in ts)]

    flat = [*primals, *(t for ts in series for t in ts)]
    jaxpr, consts = hoist_consts(trace_jaxpr(jet_flat, [core.typeof(x) for x in flat]))
    outs = prim.bind(*consts, *flat, call_jaxpr=jaxpr, **params)
    return outs[:n_out], [list(outs[n_out + i * order : n_out + (i + 1) * order]) for i in range(n_out)]


# --- the same rules for JAX 0.10, which has no register_call_primitive_rules ------------------------------------------------------


def _register_call_rules_0_10(prim: Any) -> None:
    prim.multiple_results = True
    prim.skip_canonicalization = True

    @prim.def_effectful_abstract_eval
    def abstract_eval(*_: Any, call_jaxpr: Any, **__: Any) -> Any:
        return call_jaxpr.out_avals, core.positional_effects(call_jaxpr)

    core.custom_typechecks[prim] = lambda _ctx, *_atoms, call_jaxpr, **__: abstract_eval(call_jaxpr=call_jaxpr)
    prim.to_lojax = functools.partial(_to_lojax_0_10, prim)
    ad.primitive_jvps[prim] = functools.partial(_jvp_0_10, prim)
    ad.primitive_linearizations[prim] = functools.partial(_linearize_0_10, prim)
    transpose_jaxpr = util.weakref_lru_cache(_transpose_jaxpr_0_10)
    ad.fancy_transposes[prim] = functools.partial(_transpose_0_10, prim, transpose_jaxpr)
    batching.fancy_primitive_batchers[prim] = functools.partial(_batch_0_10, prim)
    pe.custom_partial_eval_rules[prim] = functools.partial(_partial_eval_0_10, prim)
    pe.partial_eval_jaxpr_custom_rules[prim] = functools.partial(
        pe.closed_call_partial_eval_custom_rule, "call_jaxpr", lambda *a: (a[-2], a[-1])
    )
    pe.dce_rules[prim] = pe.dce_jaxpr_closed_call_rule
    discharge.register_discharge_rule(prim)(functools.partial(_discharge_0_10, prim))
    remat.rules[prim] = functools.partial(_remat_0_10, prim)


def _nonzero(tangents: Sequence[Any]) -> list[bool]:
    return [type(t) is not ad_util.Zero for t in tangents]


def _with_zeros(call_jaxpr: Any, nonzero: Sequence[bool], tangents: Sequence[Any]) -> list[Any]:
    rest = iter(tangents)
    return [next(rest) if nz else ad_util.Zero(a.to_tangent_aval()) for a, nz in zip(call_jaxpr.out_avals, nonzero, strict=True)]


def _to_lojax_0_10(prim: Any, *hi_args: Any, call_jaxpr: Any, **params: Any) -> list[Any]:
    lo_args = [lo for aval, x in zip(call_jaxpr.in_avals, hi_args, strict=True) for lo in aval.lower_val(x)]
    outs = iter(prim.bind(*lo_args, call_jaxpr=pe.lower_jaxpr2(call_jaxpr), **params))
    return [t.raise_val(*itertools.islice(outs, len(t.lo_ty()))) for t in call_jaxpr.out_avals]


def _jvp_0_10(prim: Any, primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: Any, **params: Any) -> Any:
    jvp_jaxpr, nz_out = ad.jvp_jaxpr(call_jaxpr, _nonzero(tangents), False)
    live = [t for t in tangents if type(t) is not ad_util.Zero]
    outs = prim.bind(*primals, *live, call_jaxpr=jvp_jaxpr, **params)
    n = len(call_jaxpr.out_avals)
    return outs[:n], _with_zeros(call_jaxpr, nz_out, outs[n:])


def _batch_0_10(prim: Any, axis_data: Any, args: Any, dims: Any, *, call_jaxpr: Any, **params: Any) -> Any:
    batched, out_dims = batching.batch_jaxpr2(call_jaxpr, axis_data, tuple(dims))
    return prim.bind(*args, call_jaxpr=batched, **params), list(out_dims)


def _linearize_0_10(prim: Any, is_vjp: bool, nzs: Any, *primals: Any, call_jaxpr: Any, **params: Any) -> Any:
    primal_jaxpr, n_res, nz_out, forwarded, tangent_jaxpr = ad.linearize_jaxpr(call_jaxpr, nzs, is_vjp=is_vjp)
    outs = prim.bind(*primals, call_jaxpr=primal_jaxpr, **params)
    results, computed = util.split_list(outs, [len(outs) - n_res])
    residuals = util.subs_list(forwarded, [*call_jaxpr.consts, *primals], computed)

    def tangent_fun(residuals: Any, *tangents: Any) -> list[Any]:
        live = [ad.instantiate_zeros(t) for nz, t in zip(nzs, tangents, strict=True) if nz]
        return _with_zeros(call_jaxpr, nz_out, prim.bind(*residuals, *live, call_jaxpr=tangent_jaxpr, **params))

    return results, nz_out, residuals, tangent_fun


def _transpose_jaxpr_0_10(jaxpr: Any, in_tree: Any, avals: Any, specs: Any) -> tuple[Any, Any]:
    trees: list[Any] = []

    def transposed(*flat: Any) -> list[Any]:
        accumulators, cotangents = tree_util.tree_unflatten(in_tree, flat)
        args = ad.unproject_accums(specs, accumulators)
        ad.backward_pass3(jaxpr.jaxpr, False, jaxpr.consts, args, cotangents)
        outs, tree = tree_util.tree_flatten([x.freeze() if isinstance(x, ad.ValAccum) else None for x in args])
        trees.append(tree)
        return outs

    f = lu.wrap_init(transposed, debug_info=jaxpr.jaxpr.debug_info.with_unknown_names())
    out, _, consts = pe.trace_to_jaxpr_dynamic(f, avals)
    return core.ClosedJaxpr(out, consts), trees[-1]


def _transpose_0_10(prim: Any, transpose_jaxpr: Any, cotangents: Any, *args: Any, call_jaxpr: Any, **params: Any) -> None:
    accumulators, specs = ad.project_accums(args)
    flat, tree = tree_util.tree_flatten((accumulators, cotangents))
    jaxpr, out_tree = transpose_jaxpr(call_jaxpr, tree, tuple(core.typeof(x) for x in flat), specs)
    outs = tree_util.tree_unflatten(out_tree, prim.bind(*flat, call_jaxpr=jaxpr, **params))
    for x, ct in zip(args, outs, strict=True):
        if isinstance(x, ad.ValAccum):
            x.accum(ct)


def _partial_eval_0_10(prim: Any, trace: Any, *tracers: Any, call_jaxpr: Any, **params: Any) -> list[Any]:
    unknown = [not t.pval.is_known() for t in tracers]
    known_jaxpr, rest_jaxpr, out_unknown, res_avals, forwarded = pe.partial_eval_jaxpr_nounits_fwd(
        call_jaxpr, unknown, instantiate=False
    )
    known_in = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    outs = prim.bind(*known_in, call_jaxpr=known_jaxpr, **params)
    known_out, computed = util.split_list(outs, [len(outs) - len(res_avals)])
    rest = iter(computed)
    residuals = [next(rest) if f is None else [*call_jaxpr.consts, *known_in][f] for f in forwarded]
    in_tracers = [*map(trace.new_instantiated_const, residuals), *(t for t in tracers if not t.pval.is_known())]
    out_tracers = [pe.JaxprTracer(trace, pe.PartialVal.unknown(a), None) for a in rest_jaxpr.out_avals]
    effects = core.positional_effects(rest_jaxpr)
    eqn = pe.new_eqn_recipe(
        trace, in_tracers, out_tracers, prim, dict(params, call_jaxpr=rest_jaxpr), effects, source_info_util.current()
    )
    for t in out_tracers:
        t.recipe = eqn
    if pe.effects.partial_eval_kept_effects.filter_in(rest_jaxpr.effects):
        trace.effect_handles.append(pe.EffectHandle(in_tracers, eqn))
    return util.merge_lists(out_unknown, known_out, out_tracers)


def _discharge_0_10(prim: Any, in_avals: Any, _out_avals: Any, *args: Any, call_jaxpr: Any, **params: Any) -> Any:
    discharged, n_out, _ = discharge._cached_closed_jaxpr_discharge(call_jaxpr)
    outs, refs = util.split_list(prim.bind(*args, call_jaxpr=discharged, **params), [n_out])
    rest = iter(refs)
    return tuple(next(rest) if isinstance(a, state_types.AbstractRef) else None for a in in_avals), outs


def _remat_0_10(prim: Any, policy: Any, *args: Any, call_jaxpr: Any, **params: Any) -> Any:
    forward, again, n_res = remat.remat_jaxpr(call_jaxpr, policy)
    outs = prim.bind(*args, call_jaxpr=forward, **params)
    results, residuals = util.split_list(outs, [len(outs) - n_res])
    return results, lambda *xs: prim.bind(*residuals, *xs, call_jaxpr=again, **params)


def aval_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result of another shape and dtype that varies over the same mesh axes as ``aval`` (``shard_map`` checks that)."""
    if hasattr(aval, "update"):
        return aval.update(shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False)
    return jax.ShapeDtypeStruct(shape, dtype)


def varying_like(x: Any, aval: Any) -> Any:
    """``x``, which varies over the manual mesh axes that ``aval`` varies over as well, if not yet (``shard_map`` checks that)."""
    axes = _varying_axes(aval) if hasattr(aval, "shape") else ()
    missing = tuple(a for a in axes if a not in _varying_axes(jax.typeof(x))) if axes else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying_axes(aval: Any) -> Any:
    return aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", ())


def distributed_client() -> tuple[int, Any] | None:
    """(number of this process, the key-value store of all processes) of a program of several; None for one alone."""
    state = _module("jax._src.distributed").global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return None
    return int(state.process_id), state.client


def has_cpu_backend() -> bool:
    """Whether JAX can run something on the CPU here (``JAX_PLATFORMS`` may leave it out)."""
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return False
