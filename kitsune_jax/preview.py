"""What the lowering of a program would do, found without running anything: the inside of ``explain``.

Comes in: a closed jaxpr, options, a machine that need not be there. Goes out: a ``Report``. Invariant: what keeps pipelines away
from a call when it is lowered (a mesh, a missing extension, symbolic shapes) is found by JAX's own lowering of the program, so the
report counts as pipelined what will be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from kitsune_jax import _compat, lowering, targets
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.config import logger
from kitsune_jax.fallbacks import Failure
from kitsune_jax.options import Options
from kitsune_jax.primitive import pipeline_p
from kitsune_jax.report.build import build_report, graph_flops
from kitsune_jax.report.data import Rejected
from kitsune_jax.report.join import joined, with_bodies
from kitsune_jax.report.model import Report

DISABLED = "KITSUNE_DISABLE is set (or config.override(disable=True)), so pipeline(fn) behaves as fn"
_AT_THE_TOP = "nothing of this call is pipelined, for the reason at the top"


@dataclasses.dataclass(frozen=True)
class Call:
    """A pipelined call in a program, and how often it runs: once, or as the ``scan`` around it says (a ``while`` says nothing)."""

    jaxpr: Any
    options: Options
    times: int


def pipelined_calls(jaxpr: Any, times: int = 1) -> list[Call]:
    """Every outermost pipelined call in ``jaxpr`` and in what it calls, in program order."""
    found: list[Call] = []
    for eqn in _compat.open_parts(jaxpr)[0].eqns:
        if eqn.primitive.name == lowering.PRIMITIVE_NAME:
            found.append(Call(eqn.params["call_jaxpr"], eqn.params["options"], times))
            continue
        rounds = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if _compat.is_jaxpr(inner):
                    found += pipelined_calls(inner, rounds)
    return found


def explain_calls(calls: Sequence[Call], obstacles: Sequence[str | None], platform: str, device: str | None) -> Report:
    """One report over several pipelined calls, as each is lowered on its own; ``obstacles`` are those of the calls."""
    reports = [explain_jaxpr(c.jaxpr, c.options, platform, device, why) for c, why in zip(calls, obstacles, strict=True)]
    if len(reports) == 1:
        return reports[0]
    return joined(reports, f"{len(reports)} pipelined calls are reported as one; operators outside of them are not counted")


def explain_jaxpr(call_jaxpr: Any, options: Options, platform: str, device: str | None, obstacle: str | None = None) -> Report:
    """The report of ``call_jaxpr`` and of the bodies of its loops on a machine that need not be there. Emits nothing.

    ``obstacle``: why nothing of it will be pipelined. Raises errors of this package only if ``options.strict``.
    """
    reports: list[Report] = []
    target = lowering.target_of(options, platform)
    assert target is not None

    def visit(jaxpr: Any) -> Any:
        whole = _compat.hoist_consts(jaxpr)[0]
        if obstacle is None:
            captured, planned, nodes = lowering.captured_and_settled(
                whole, visit, target, options, device, code=False, body=bool(reports)
            )
            reports.append(planned.report)
            lowering.prepare_left(captured, nodes)
        else:
            captured = capture(whole, rewrite=visit)
            everything = range(len(captured.graph.ops))
            report = build_report(captured.graph, (), [(i, _AT_THE_TOP) for i in everything], *_machine(target, device))
            reports.append(dataclasses.replace(report, obstacles=(obstacle,)))
            lowering.prepare_left(captured, everything)
        return jaxpr

    try:
        visit(call_jaxpr)
    except Exception as error:  # what lowering would record; symbolic shapes have no size to report either
        if options.strict and obstacle is None:
            raise
        return unplanned(call_jaxpr, target, device, obstacle or Failure.of(error, "").told)
    return with_bodies(reports)


def unplanned(program: Any, target: str, device: str | None, obstacle: str) -> Report:
    """The report of a program of which nothing is known but its equations."""
    equations = len(_compat.open_parts(program)[0].eqns)
    rejected = (Rejected("equation", "", _AT_THE_TOP, equations),) if equations else ()
    return Report(equations, 0, (), rejected, 0, 0, *_machine(target, device), obstacles=(obstacle,))


def _machine(target: str, device: str | None) -> tuple[str, str]:
    executor = targets.get(target)
    return executor.platform, executor.machine(device).name


def flops_of(call_jaxpr: Any) -> int:
    """Useful operations of ``call_jaxpr`` and of the bodies of its loops, once where the number of steps is unknown."""
    flops = 0

    def visit(jaxpr: Any) -> Any:
        nonlocal flops
        captured = capture(_compat.hoist_consts(jaxpr)[0], rewrite=visit)
        flops += graph_flops(captured.graph)
        for op, step in zip(captured.graph.ops, captured.steps, strict=True):
            if step.prepare is not None and op.body is None:
                step.prepare()
        return jaxpr

    visit(call_jaxpr)
    return flops


# --- what JAX's lowering finds --------------------------------------------------------------------------------------------------


def obstacle_of(program: Any, options: Options, args: Sequence[Any], platform: str, device: str | None) -> str | None:
    """Why nothing would be pipelined of a call of ``program`` (closed, without constants) on ``args``, or ``None``."""
    seen = _lowered(lambda *flat: pipeline_p.bind(*flat, call_jaxpr=program, options=options), program, args, platform, device)
    return seen[0].obstacle if seen else None


def obstacles_of(program: Any, calls: Sequence[Call], args: Sequence[Any], platform: str, device: str | None) -> list[str | None]:
    """The same of each of the ``calls`` in ``program``."""
    seen = _lowered(_compat.jaxpr_as_fun(program), program, args, platform, device)
    if len(seen) == len(calls):  # calls are lowered in program order
        return [s.obstacle for s in seen]
    by_kind = {_kind(s.call_jaxpr): s.obstacle for s in seen}  # equal calls were lowered once
    return [by_kind.get(_kind(call.jaxpr)) for call in calls]


def _kind(call_jaxpr: Any) -> tuple[str, ...]:
    """What a call is known by: JAX makes new jaxprs of it on the way to its lowering."""
    return (_compat.function_name(call_jaxpr), *map(str, (*_compat.in_avals(call_jaxpr), *_compat.out_avals(call_jaxpr))))


def _lowered(run: Any, program: Any, args: Sequence[Any], platform: str, device: str | None) -> list[lowering.Seen]:
    """What is seen of the pipelined calls while JAX lowers ``run`` of ``args``; nothing where JAX cannot lower it here."""
    shapes = [
        a if hasattr(a, "sharding") and not _compat.is_ref(aval) else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for a, aval in zip(args, _compat.in_avals(program), strict=True)
    ]
    with lowering.watched(elsewhere=device is not None) as seen:
        try:
            jax.jit(lambda *flat: run(*flat)).trace(*shapes).lower(lowering_platforms=(platform,))
        except Exception:  # an operator that does not lower for this platform, say: the user will hear of it from JAX
            logger.debug("the program cannot be lowered for %s to see what keeps pipelines away", platform, exc_info=True)
    return seen
