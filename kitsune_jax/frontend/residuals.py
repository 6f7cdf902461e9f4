"""The residuals that each policy keeps between the forward and the backward pass, and their cost, for ``explain``.

Comes in: programs (closed jaxprs) with pipelined calls in them, one per policy. Goes out: a ``ResidualReport``. Invariant: every
number of a policy is read off a program that was traced with it, so batching, loops and the arguments of the derivative are the
user's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kitsune_jax import _compat
from kitsune_jax.config import Options, logger
from kitsune_jax.frontend import explain, lowering
from kitsune_jax.frontend.tracing import Residuals, pipeline_p
from kitsune_jax.report.data import PlannedPasses, PolicyReport, ResidualReport

ALTERNATIVES = ("save", "recompute")

# The policy that replaces the functions' own while ``explain`` traces an alternative. JAX keys its trace caches on it. Made at
# import, because making one empties them.
override = jax.make_user_context(None)

# Calls whose body runs in place. A checkpoint is not one: values that it recomputes were not kept.
_INLINED = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def policy_name(policy: Residuals) -> str:
    """The name of a policy in a report: ``dots_saveable``, ``save_only_these_names``."""
    if isinstance(policy, str):
        return policy
    public = next((name for name, value in vars(jax.checkpoint_policies).items() if value is policy), None)
    if public is not None:
        return public
    if hasattr(policy, "__qualname__"):
        return str(policy.__qualname__).split(".<locals>")[0].rsplit(".", 1)[-1].lstrip("_")
    name = type(policy).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() if type(policy).__module__.startswith("jax.") else name


# --- the residuals of one program -------------------------------------------------------------------------------------------------


def kept(program: Any) -> tuple[int, int] | None:
    """The bytes that backward equations of ``program`` read: (results of forward equations, operands of those); ``None`` if it has
    no pipelined backward pass.

    An equation counts if it is a pipelined call or contains some (a loop, a ``shard_map``). An equation with both passes, such as a
    loop over steps of training, is looked into, and counts once for any trip count.
    """
    flow = _ResidualFlow()
    flow.visit(program, {}, backward=False)
    if not flow.read:
        return None
    made, arguments = flow.read.keys() & flow.made.keys(), flow.read.keys() & flow.arguments.keys()
    return sum(flow.read[v] for v in made), sum(flow.read[v] for v in arguments - made)


class _ResidualFlow:
    """Values by number, with their bytes: those that forward equations make and read, and those that backward equations read."""

    def __init__(self) -> None:
        self.made: dict[int, int] = {}
        self.arguments: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self._new = itertools.count()

    def visit(self, program: Any, env: dict[Any, int], *, backward: bool) -> list[int]:
        """Walk a jaxpr whose arguments are in ``env``, in reading order. Returns the numbers of its results."""
        jaxpr, _ = _compat.open_parts(program)
        for eqn in jaxpr.eqns:
            back = backward or _compat.is_transposed(eqn)
            if eqn.primitive.name in _INLINED:
                inner = eqn.params[_INLINED[eqn.primitive.name]]
                bound = dict(zip(_compat.open_parts(inner)[0].invars, self._numbers(env, eqn.invars), strict=True))
                env.update(zip(eqn.outvars, self.visit(inner, bound, backward=back), strict=True))
                continue
            directions = _directions(eqn, back)
            if directions == {True, False}:
                for inner in _compat.inner_jaxprs(eqn):
                    self.visit(inner, {}, backward=False)
            elif directions == {True}:
                self.read.update(self._sized(env, eqn.invars))
            elif directions == {False}:
                self.arguments.update(self._sized(env, eqn.invars))
                self.made.update(self._sized(env, eqn.outvars))
        return self._numbers(env, jaxpr.outvars)

    def _numbers(self, env: dict[Any, int], atoms: Sequence[Any]) -> list[int]:
        return [next(self._new) if _compat.is_literal(v) else env.setdefault(v, next(self._new)) for v in atoms]

    def _sized(self, env: dict[Any, int], atoms: Sequence[Any]) -> dict[int, int]:
        arrays = [v for v in atoms if not _compat.is_literal(v)]
        return dict(zip(self._numbers(env, arrays), (_bytes(v.aval) for v in arrays), strict=True))


def _directions(eqn: Any, backward: bool) -> set[bool]:
    """For the pipelined calls in ``eqn``: is each backward? Empty if it has none."""
    if eqn.primitive.name == lowering.PRIMITIVE_NAME:
        return {backward}
    return {
        direction
        for body in _compat.inner_jaxprs(eqn)
        for inner in _compat.open_parts(body)[0].eqns
        for direction in _directions(inner, backward or _compat.is_transposed(inner))
    }


def _bytes(aval: Any) -> int:
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(_compat.assumed_sizes(getattr(aval, "shape", ()))) * itemsize


def is_derivative(program: Any) -> bool:
    """Does ``program`` have a backward pass already?"""
    return any(
        _compat.is_transposed(eqn) or any(map(is_derivative, _compat.inner_jaxprs(eqn)))
        for eqn in _compat.open_parts(program)[0].eqns
    )


# --- the gradient of one call ---------------------------------------------------------------------------------------------------


def gradient(plain: Any, options: Options, policy: Residuals) -> Any:
    """A pipelined call of ``plain`` (traced without a policy) and its backward pass by all inexact arguments, as one program.

    Raises JAX's error if ``plain`` has no gradient.
    """
    fn = _compat.jaxpr_as_fun(plain)
    if policy != "save":
        fn = jax.checkpoint(fn, policy=policy if callable(policy) else None)
    avals = _compat.in_avals(plain)
    call = _compat.trace_jaxpr(lambda *a: fn(*a), avals)
    by = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    cotangents = [aval for aval in _compat.out_avals(plain) if jnp.issubdtype(aval.dtype, jnp.inexact)]

    def forward_and_backward(args: list[Any], given: list[Any]) -> Any:
        def of_inexact(*inexact: Any) -> list[Any]:
            merged = {**dict(enumerate(args)), **dict(zip(by, inexact, strict=True))}
            outs = pipeline_p.bind(*(merged[i] for i in range(len(args))), call_jaxpr=call, options=options)
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]

        outs, back = jax.vjp(of_inexact, *(args[i] for i in by))
        return outs, back(given)

    shapes = [[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in group] for group in (avals, cotangents)]
    return _compat.hoist_consts(jax.make_jaxpr(forward_and_backward)(*shapes))[0]


# --- the report -----------------------------------------------------------------------------------------------------------------


# Operators of a program that is planned for the comparison alone, by platform: a report takes no longer than lowering. Plans for a
# GPU take longer: 4 CPU-s for NeRF's gradient, of 150 operators, where lowering NeRF takes 2.2.
_MOST_PLANNED = {"cpu": 200, "cuda": 60}


def cost_of(
    program: Any, policy: str, in_use: bool, platform: str, device: str | None, *, explained: bool = False
) -> PolicyReport | None:
    """The residuals and plans of ``program``, or ``None`` if it has no pipelined backward pass. ``explained``: the report has its
    plans anyway.

    ``flops_added`` and ``seconds_added`` are all of its operations and seconds, until ``_beside`` subtracts those of "save".
    """
    live = _compat.without_dead_code(program)
    bytes_kept = kept(live)
    if bytes_kept is None:
        return None
    calls = explain.pipelined_calls(live)
    sizes = [explain.flops_and_ops(call.jaxpr) for call in calls]
    plan = None
    if explained or sum(ops for _, ops in sizes) <= _MOST_PLANNED.get(platform, 0):
        reports = [explain.explain_jaxpr(c.jaxpr, c.options, platform, device) for c in calls]
        seconds = sum(call.times * report.seconds for call, report in zip(calls, reports, strict=True))
        plan = PlannedPasses(seconds, seconds, sum(r.ops_pipelined for r in reports), sum(r.ops_total for r in reports))
    flops = sum(call.times * flops for call, (flops, _) in zip(calls, sizes, strict=True))
    return PolicyReport(policy, in_use, *bytes_kept, flops, plan)


def _beside(base: PolicyReport, policy: PolicyReport) -> PolicyReport:
    plan = policy.plan
    if plan is not None:
        plan = dataclasses.replace(plan, seconds_added=plan.seconds - base.plan.seconds if base.plan else 0.0)
    return dataclasses.replace(policy, flops_added=policy.flops_added - base.flops_added, plan=plan)


def compare_calls(
    closed: Any, calls: Sequence[explain.PipelinedCall], retrace: Callable[..., Any], platform: str, device: str | None
) -> ResidualReport | None:
    """Residuals of a program with pipelined calls. ``closed``: the program with its own policies; ``retrace(policy)`` traces it
    again with another one."""

    def trace(policy: Residuals | None) -> Any:
        if policy is None:
            return closed
        with override(policy):
            return retrace(policy)

    in_use = ", ".join(dict.fromkeys(call.options.residuals for call in calls))
    return _compare(trace, in_use, platform, device, of_gradient=False)


def compare_gradients(
    closed: Any, options: Options, own: Residuals, retrace: Callable[..., Any], platform: str, device: str | None
) -> ResidualReport | None:
    """Residuals of the gradient of a pipelined function, traced to ``closed`` with its ``own`` policy."""
    plain = closed if own == "save" else retrace("save")

    def trace(policy: Residuals | None) -> Any:
        return gradient(plain, options, own if policy is None else policy)

    return _compare(trace, options.residuals, platform, device, of_gradient=True)


def _compare(
    trace: Callable[[Residuals | None], Any], in_use: str, platform: str, device: str | None, *, of_gradient: bool
) -> ResidualReport | None:
    """The policy ``in_use`` against the alternatives.

    ``trace(policy)`` is the program under a policy, ``trace(None)`` under the one in use. ``None`` if there is no backward pass, in
    the program or because JAX cannot differentiate the function. A policy that JAX refuses (some effects cannot be recomputed) is
    left out.
    """
    found: dict[str, PolicyReport] = {}
    for name in dict.fromkeys((in_use, *ALTERNATIVES)):
        try:
            traced = trace(None if name == in_use else name)
        except Exception:  # the rule that refuses may raise any type
            logger.debug("residuals=%r cannot be traced", name, exc_info=True)
            continue
        cost = cost_of(traced, name, name == in_use, platform, device, explained=name == in_use and not of_gradient)
        if cost is None:
            return None
        found[name] = cost
    if not {in_use, "save"} <= found.keys():
        return None
    return ResidualReport(tuple(_beside(found["save"], cost) for cost in found.values()), of_gradient)
