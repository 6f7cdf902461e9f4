"""The rules of a call-like primitive, whose parameter ``call_jaxpr`` every transformation rewrites.

Comes in: a primitive, and functions that choose residuals and give the context. Goes out: its rules for jvp, linearize, transpose,
vmap, partial evaluation, dead code, remat, references, checkify and jet. Invariant: each rule binds the same primitive again, with
a transformed ``call_jaxpr``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kitsune_jax._compat.jaxprs import (
    ad,
    ad_util,
    batching,
    checkify,
    collector_paused,
    core,
    discharge,
    hoist_consts,
    inner_jaxprs,
    is_key,
    is_literal,
    jaxpr_as_fun,
    jet_lib,
    jex_core,
    literal_text,
    lu,
    new_primitive,
    open_parts,
    out_avals,
    pe,
    remat,
    replace_jaxpr,
    source_info_util,
    state_types,
    trace_jaxpr,
    tree_util,
    util,
    with_room_for_frames,
)

# --- rules for JAX 0.10, which has no ``register_call_primitive_rules`` -----------------------------------------------------------


def _register_call_rules_0_10(prim: Any) -> None:
    prim.multiple_results = True
    prim.skip_canonicalization = True

    @prim.def_effectful_abstract_eval
    def abstract_eval(*_: Any, call_jaxpr: Any, **__: Any) -> Any:
        return call_jaxpr.out_avals, core.positional_effects(call_jaxpr)

    core.custom_typechecks[prim] = lambda _ctx, *_atoms, call_jaxpr, **__: abstract_eval(call_jaxpr=call_jaxpr)
    prim.to_lojax = functools.partial(_to_lojax_0_10, prim)
    ad.primitive_jvps[prim] = functools.partial(_jvp_0_10, prim)
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


def _with_zeros(call_jaxpr: Any, nonzero: Sequence[bool], tangents: Sequence[Any]) -> list[Any]:
    rest = iter(tangents)
    return [next(rest) if nz else ad_util.Zero(a.to_tangent_aval()) for a, nz in zip(out_avals(call_jaxpr), nonzero, strict=True)]


def _to_lojax_0_10(prim: Any, *hi_args: Any, call_jaxpr: Any, **params: Any) -> list[Any]:
    lo_args = [lo for aval, x in zip(call_jaxpr.in_avals, hi_args, strict=True) for lo in aval.lower_val(x)]
    outs = iter(prim.bind(*lo_args, call_jaxpr=pe.lower_jaxpr2(call_jaxpr), **params))
    return [t.raise_val(*itertools.islice(outs, len(t.lo_ty()))) for t in call_jaxpr.out_avals]


def _jvp_0_10(prim: Any, primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: Any, **params: Any) -> Any:
    nonzero = [type(t) is not ad_util.Zero for t in tangents]
    jvp_jaxpr, nz_out = ad.jvp_jaxpr(call_jaxpr, nonzero, False)
    outs = prim.bind(*primals, *itertools.compress(tangents, nonzero), call_jaxpr=jvp_jaxpr, **params)
    n = len(call_jaxpr.out_avals)
    return outs[:n], _with_zeros(call_jaxpr, nz_out, outs[n:])


def _batch_0_10(prim: Any, axis_data: Any, args: Any, dims: Any, *, call_jaxpr: Any, **params: Any) -> Any:
    batched, out_dims = batching.batch_jaxpr2(call_jaxpr, axis_data, tuple(dims))
    return prim.bind(*args, call_jaxpr=batched, **params), list(out_dims)


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


# --- the linearization of equal equations, made once ------------------------------------------------------------------------------
# JAX traces the rule of every equation of a jaxpr anew. Of the equations of equal layers that is half the time of a linearization.


def _equation_primitive() -> Any:
    """A primitive that stands for an equation while a jaxpr is linearized, and leaves what that equation would have left."""
    prim = new_primitive("kitsune_equation")
    prim.multiple_results = True
    ad.primitive_linearizations[prim] = _linearize_equation
    pe.custom_staging_rules[prim] = _stage_equation
    return prim


def _evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """``jaxpr`` on ``args``. Its equations belong to the user's line at hand, and not to the one for which they were made."""
    opened, consts = open_parts(jaxpr)
    found: list[Any] = core.eval_jaxpr(opened, consts, *args, propagate_source_info=False)
    return found


def _stage_equation(trace: Any, _source_info: Any, *args: Any, jaxpr: Any) -> list[Any]:
    with core.set_current_trace(trace):
        return _evaluate(jaxpr, *args)


def _linearize_equation(is_vjp: bool, nzs: Any, *primals: Any, jaxpr: Any) -> Any:
    primal, made, nz_out, forwarded, tangent = ad.linearize_jaxpr(jaxpr, list(nzs), is_vjp=is_vjp)  # JAX remembers it
    n = len(out_avals(jaxpr))
    outs = _evaluate(primal, *primals)
    own = iter(outs[n:])
    residuals = [next(own) if f is None else primals[f] for f in forwarded]

    def tangents_of(residuals: Any, *tangents: Any) -> list[Any]:
        live = [ad.instantiate_zeros(t) for nz, t in zip(nzs, tangents, strict=True) if nz]
        return _with_zeros(jaxpr, nz_out, _evaluate(tangent, *residuals, *live))

    if isinstance(made, int):
        return outs[:n], nz_out, residuals, tangents_of
    return outs[:n], nz_out, residuals, None, lambda residuals, _, *tangents: tangents_of(residuals, *tangents)


@dataclasses.dataclass(frozen=True)
class _LiteralOperand:
    """A literal operand, number ``place``. ``text``: all that another one may differ in."""

    place: int
    text: str
    val: Any = dataclasses.field(compare=False)


@util.cache(max_size=1024)
def _alone(
    prim: Any, params: tuple[tuple[str, type, Any], ...], avals: tuple[Any, ...], numbers: tuple[_LiteralOperand, ...], ctx: Any
) -> Any:
    """The jaxpr of one equation, whose operands are ``numbers`` and, in the other places, arguments of the types ``avals``."""
    known = {number.place: number.val for number in numbers}

    def bind(*args: Any) -> list[Any]:
        given = iter(args)
        operands = [known[k] if k in known else next(given) for k in range(len(known) + len(avals))]
        found = prim.bind(*operands, **{name: value for name, _, value in params})
        return list(found) if prim.multiple_results else [found]

    with ctx.manager:
        return trace_jaxpr(bind, avals, lower=True)


def _key(eqn: Any) -> tuple[Any, ...] | None:
    """The arguments of ``_alone`` for an equation; ``None`` where its linearization may depend on more."""
    prim = eqn.primitive
    if eqn.effects or prim not in ad.primitive_jvps or prim in ad.primitive_linearizations or any(inner_jaxprs(eqn)):
        return None
    if any(type(v.aval) is not core.ShapedArray or is_key(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return None
    numbers = tuple(
        _LiteralOperand(k, f"{type(v.val)} {v.aval} {literal_text(v.val)}", v.val)
        for k, v in enumerate(eqn.invars)
        if is_literal(v)
    )
    params = tuple((name, type(value), value) for name, value in sorted(eqn.params.items()))
    key = prim, params, tuple(v.aval for v in eqn.invars if not is_literal(v)), numbers, eqn.ctx
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _with_equal_equations(call_jaxpr: Any) -> Any:
    """``call_jaxpr`` with ``_equation`` in place of each equation that it has several times."""
    jaxpr, consts = open_parts(call_jaxpr)
    keys = [_key(eqn) for eqn in jaxpr.eqns]
    count = collections.Counter(keys)
    eqns = [
        eqn
        if key is None or count[key] < 2
        else eqn.replace(primitive=_equation, params={"jaxpr": _alone(*key)}, invars=[v for v in eqn.invars if not is_literal(v)])
        for eqn, key in zip(jaxpr.eqns, keys, strict=True)
    ]
    return replace_jaxpr(call_jaxpr, eqns=eqns)


_equation = _equation_primitive()


# --- rules for every supported JAX ------------------------------------------------------------------------------------------------


def register_call_rules(prim: Any, choose_residuals: Callable[..., Any], context: Callable[..., Any]) -> None:
    """Give ``prim[call_jaxpr, **static]`` its rules: jvp, linearize, transpose, vmap, partial evaluation, DCE, remat, refs,
    checkify, jet.

    Every rule rewrites ``call_jaxpr`` and binds ``prim`` again with the same static parameters. No lowering is registered.
    ``choose_residuals(primal jaxpr, tangent jaxpr, forwarded, number of results, number of constants, context(**static))`` divides
    a linearized call anew, as (primal jaxpr, tangent jaxpr, forwarded), or returns None to keep JAX's division. Its answer is
    remembered for equal arguments.
    """
    if hasattr(jex_core, "register_call_primitive_rules"):
        jex_core.register_call_primitive_rules(prim, name=None)
    else:
        _register_call_rules_0_10(prim)
    ad.primitive_linearizations[prim] = _linearize_rule(prim, choose_residuals, context)
    _register_checkify(prim)
    jet_lib.jet_rules[prim] = functools.partial(_jet_rule, prim)


def _linearize_rule(prim: Any, choose_residuals: Callable[..., Any], context: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's rule, but with the residuals of ``choose_residuals`` where that returns some."""

    @with_room_for_frames
    @collector_paused()
    def divide(call_jaxpr: Any, nzs: tuple[bool, ...], is_vjp: bool, how: Any) -> Any:
        primal, made, nz_out, forwarded, tangent = ad.linearize_jaxpr(_with_equal_equations(call_jaxpr), list(nzs), is_vjp=is_vjp)
        division = primal, tangent, tuple(forwarded)
        structured = None if isinstance(made, int) else made.unpack()[2]  # a tree of residuals, since 0.11
        if not structured:
            n, consts = len(out_avals(call_jaxpr)), len(getattr(call_jaxpr, "consts", ()))
            division = choose_residuals(*division, n, consts, how) or division
        return (*division, nz_out, structured)

    remembered = util.weakref_lru_cache(divide)

    def linearize(is_vjp: bool, nzs: Any, *primals: Any, call_jaxpr: Any, **params: Any) -> Any:
        primal, tangent, forwarded, nz_out, structured = remembered(call_jaxpr, tuple(nzs), is_vjp, context(**params))
        n = len(out_avals(call_jaxpr))
        outs = prim.bind(*primals, call_jaxpr=primal, **params)
        known, made = [*getattr(call_jaxpr, "consts", ()), *primals], iter(outs[n:])
        residuals = [next(made) if f is None else known[f] for f in forwarded]

        def tangents_of(residuals: Any, tree: Any, *tangents: Any) -> list[Any]:
            live = [ad.instantiate_zeros(t) for nz, t in zip(nzs, tangents, strict=True) if nz]
            tangent_prim = ad.vjp_node(prim) if is_vjp and hasattr(ad, "vjp_node") else prim
            found = tangent_prim.bind(*residuals, *live, *tree_util.tree_leaves(tree), call_jaxpr=tangent, **params)
            return _with_zeros(call_jaxpr, nz_out, found)

        if structured is None:
            return outs[:n], nz_out, residuals, lambda residuals, *tangents: tangents_of(residuals, (), *tangents)
        return outs[:n], nz_out, residuals, structured.update(list(made)).unflatten(), tangents_of

    return linearize


def _register_checkify(prim: Any) -> None:
    """Register the rule of checkify, which looks inside. (JAX's rule for a ``call_jaxpr`` binds ``subfuns=``, unknown to
    ``prim``.)"""
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
