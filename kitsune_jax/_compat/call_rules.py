"""The rules of a call-like primitive, whose parameter ``call_jaxpr`` every transformation rewrites."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kitsune_jax._compat.call_rules_0_10 import _register_call_rules_0_10
from kitsune_jax._compat.jaxprs import hoist_consts, out_avals, trace_jaxpr
from kitsune_jax._compat.versions import ad, ad_util, checkify, core, jaxpr_as_fun, jet_lib, jex_core, util


def register_call_rules(prim: Any, leaner: Callable[..., Any]) -> None:
    """Give ``prim[call_jaxpr, **static]`` its rules: jvp, linearize, transpose, vmap, partial evaluation, DCE, remat, refs,
    checkify, jet.

    Every rule rewrites ``call_jaxpr`` and binds ``prim`` again with the same static parameters. No lowering is registered.
    ``leaner(primal jaxpr, tangent jaxpr, forwarded, number of results, number of constants, **static)`` gives another division of a
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

    def divided(call_jaxpr: Any, nzs: tuple[bool, ...], is_vjp: bool, params: tuple[tuple[str, Any], ...]) -> Any:
        primal, made, nz_out, forwarded, tangent = ad.linearize_jaxpr(call_jaxpr, list(nzs), is_vjp=is_vjp)
        structured = None
        if not isinstance(made, int):  # since 0.11: a tree of (results, residuals, structured residuals)
            structured = made.unpack()[2]
            if len(structured):
                return None
        n, consts = len(out_avals(call_jaxpr)), len(getattr(call_jaxpr, "consts", ()))
        found = leaner(primal, tangent, tuple(forwarded), n, consts, **dict(params))
        return None if found is None else (*found, nz_out, structured)

    remembered = util.weakref_lru_cache(divided)

    def linearize(is_vjp: bool, nzs: Any, *primals: Any, call_jaxpr: Any, **params: Any) -> Any:
        found = remembered(call_jaxpr, tuple(nzs), is_vjp, tuple(sorted(params.items())))
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
