"""The inside of ``explain``: a report of the plan that lowering would make, without running it; and whether this JAX is supported.

Comes in: a closed jaxpr, options, a machine that need not be present. Goes out: a ``Report``. Obstacles that keep pipelines away
from a call when it is lowered (a mesh, a missing extension, symbolic shapes) are found by JAX's own lowering of the program, so the
report counts as pipelined exactly the operators that will be. ``jax_is_supported``: a JAX version that the tests run on is
accepted; any other is tried with a small function under all transformations, once per process, when a pipelined function is first
called. If that fails, functions run as plain ``jax.jit``, with one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat, config, targets
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.config import Options, logger
from kitsune_jax.errors import Failure, NotPipelined, UnsupportedJaxWarning
from kitsune_jax.frontend import lowering, tracing
from kitsune_jax.frontend.route import RouteOptions
from kitsune_jax.frontend.tracing import pipeline_p
from kitsune_jax.ops.graph import Graph
from kitsune_jax.report.build import build_report, graph_flops
from kitsune_jax.report.data import Rejected
from kitsune_jax.report.render import Report, merge_body_reports, merge_reports, repeated

DISABLED = "KITSUNE_DISABLE is set (or config.override(disable=True)), so pipeline(fn) behaves as fn"
_SEE_ABOVE = "nothing of this call is pipelined, for the reason given above"


@dataclasses.dataclass(frozen=True)
class PipelinedCall:
    """A pipelined call in a program, and how often it runs: the steps of the ``scan`` around it; a ``while`` counts once."""

    jaxpr: Any
    options: Options
    times: int


def pipelined_calls(jaxpr: Any, times: int = 1) -> list[PipelinedCall]:
    """Every outermost pipelined call in ``jaxpr`` and in the jaxprs that it calls, in program order."""
    found: list[PipelinedCall] = []
    for eqn in _compat.open_parts(jaxpr)[0].eqns:
        if eqn.primitive.name == lowering.PRIMITIVE_NAME:
            found.append(PipelinedCall(eqn.params["call_jaxpr"], eqn.params["options"], times))
            continue
        rounds = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in _compat.inner_jaxprs(eqn):
            found += pipelined_calls(inner, rounds)
    return found


def explain_calls(calls: Sequence[PipelinedCall], obstacles: Sequence[str | None], platform: str, device: str | None) -> Report:
    """One report over several pipelined calls, each lowered on its own; ``obstacles`` has one entry per call."""
    reports = [
        repeated(explain_jaxpr(c.jaxpr, c.options, platform, device, why), c.times) for c, why in zip(calls, obstacles, strict=True)
    ]
    if len(reports) == 1:
        return reports[0]
    return merge_reports(reports, f"{len(reports)} pipelined calls are reported as one; operators outside of them are not counted")


@_compat.with_room_for_frames
def explain_jaxpr(call_jaxpr: Any, options: Options, platform: str, device: str | None, obstacle: str | None = None) -> Report:
    """The report of ``call_jaxpr`` and of the bodies of its loops on a machine that need not be present. Emits nothing.

    ``obstacle``: why nothing of it will be pipelined. Raises errors of this package only if ``options.strict``.
    """
    target = lowering.target_of(options, platform)
    assert target is not None
    try:
        if obstacle is None:
            planned = RouteOptions.of(options, device=device, code=False)
            timed = device is None and target == platform and not (options.force or options.strict) and config.tune() != "off"
            return lowering.fastest(call_jaxpr, planned, target, lowering.Chooser(options, target, None) if timed else None).report
        reports = []
        for graph in _graphs(call_jaxpr):
            rejected = [(i, _SEE_ABOVE) for i in range(len(graph.ops))]
            report = build_report(graph, (), rejected, targets.get(target).machine(device))
            reports.append(dataclasses.replace(report, obstacles=(obstacle,)))
        return merge_body_reports(reports)
    except Exception as error:  # lowering would record it; symbolic shapes have no size to report either
        if options.strict and obstacle is None:
            raise
        return report_without_plan(call_jaxpr, target, device, obstacle or Failure.of(error, "").report_reason)


def report_without_plan(program: Any, target: str, device: str | None, obstacle: str) -> Report:
    """The report of a program of which only the equations are known."""
    equations = len(_compat.open_parts(program)[0].eqns)
    rejected = (Rejected("equation", "", _SEE_ABOVE, equations),) if equations else ()
    return Report(equations, 0, (), rejected, 0, 0, *_machine(target, device), obstacles=(obstacle,))


def _machine(target: str, device: str | None) -> tuple[str, str]:
    executor = targets.get(target)
    return executor.platform, executor.machine(device).name


def flops_and_ops(call_jaxpr: Any) -> tuple[int, int]:
    """Useful operations and operators of ``call_jaxpr`` and of the bodies of its loops, once where the number of steps is
    unknown."""
    graphs = _graphs(call_jaxpr, scans=False)
    return sum(map(graph_flops, graphs)), sum(len(graph.ops) for graph in graphs)


def _graphs(call_jaxpr: Any, scans: bool = True) -> list[Graph]:
    """The Graph of ``call_jaxpr`` and those of the bodies of its loops and branches. ``scans``: also of loops that are operators
    with a body of their own."""
    found: list[Graph] = []

    def visit(jaxpr: Any, _: int = 1) -> Any:
        captured = capture(_compat.hoist_consts(jaxpr)[0], rewrite=visit)
        found.append(captured.graph)
        left = [i for i, op in enumerate(captured.graph.ops) if scans or op.body is None]
        lowering.rewrite_bodies_left_to_xla(captured, left)
        return jaxpr

    visit(call_jaxpr)
    return found


# --- obstacles that JAX's lowering finds ------------------------------------------------------------------------------------------


def as_call(program: Any, options: Options) -> Any:
    """The program of one pipelined call, that of ``program`` (closed, without constants)."""
    call = functools.partial(pipeline_p.bind, call_jaxpr=program, options=options)
    return _compat.trace_jaxpr(lambda *args: call(*args), _compat.in_avals(program), like=program)


def obstacles_of(
    program: Any, calls: Sequence[PipelinedCall], args: Sequence[Any], platform: str, device: str | None
) -> tuple[list[str | None], tuple[str, ...]]:
    """For each of the ``calls`` in ``program`` the reason why nothing of it would be pipelined, or ``None``; and notes where XLA
    divides some with pipelines among devices.

    Listed are the calls that JAX lowers in ``program`` of ``args``: none if JAX cannot lower it here.
    """
    shapes = [
        a if hasattr(a, "sharding") and not _compat.is_ref(aval) else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for a, aval in zip(args, _compat.in_avals(program), strict=True)
    ]
    run = _compat.jaxpr_as_fun(program)
    with lowering.watch_calls(elsewhere=device is not None) as seen:
        try:
            jax.jit(lambda *flat: run(*flat)).trace(*shapes).lower(lowering_platforms=(platform,))
        except Exception:  # such as an operator that does not lower for this platform: JAX will report it to the user
            logger.debug("the program cannot be lowered for %s to see what keeps pipelines away", platform, exc_info=True)
    divided = tuple(dict.fromkeys(note for s in seen if s.obstacle is None for note in s.divided))
    if len(seen) == len(calls):  # calls are lowered in program order
        return [s.obstacle for s in seen], divided
    by_kind = {_call_signature(s.call_jaxpr): s.obstacle for s in seen}  # equal calls were lowered once
    return [by_kind.get(_call_signature(call.jaxpr)) for call in calls], divided


def _call_signature(call_jaxpr: Any) -> tuple[str, ...]:
    """The name and types of a call. They identify it, because JAX makes new jaxprs of it on the way to its lowering."""
    return (_compat.function_name(call_jaxpr), *map(str, (*_compat.in_avals(call_jaxpr), *_compat.out_avals(call_jaxpr))))


# --- does this package work with the JAX at hand? ---------------------------------------------------------------------------------

TESTED_JAX = ((0, 10, 2), (0, 12, 0))
SUPPORTED = "0.10.2 to 0.12.0"


def jax_is_supported() -> bool:
    """Whether functions can be pipelined with this JAX. Warns, once per process, if they cannot."""
    if why_jax_is_unsupported():
        _warn()
    return not why_jax_is_unsupported()


@functools.cache
def why_jax_is_unsupported() -> str:
    """The reason why ``jax_is_supported()`` is False, as a clause that names the supported versions; "" if it is True."""
    reason = tracing.primitive_failure or ("" if _is_tested() else _try_in_thread())
    return f"kitsune_jax works with JAX {SUPPORTED}, and not with this JAX {jax.__version__} ({reason})" if reason else ""


def _is_tested() -> bool:
    released = not re.search("[^0-9.]", jax.__version__)  # a pre-release is neither this version nor the one before
    return released and _compat.VERSION in TESTED_JAX


@functools.cache
def _warn() -> None:
    message = f"{why_jax_is_unsupported()}. Pipelined functions run as plain jax.jit. Install a version of JAX that fits."
    warnings.warn(message, UnsupportedJaxWarning, stacklevel=4)


def _try_in_thread() -> str:
    """The error of ``_try``, or "". A thread of its own keeps the caller's contexts out (a mesh, ``disable_jit``, a device)."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(_try).exception()
    return f"{type(error).__name__}: {error}" if error else ""


def _try() -> None:
    """Take a small function through every rule and through its lowering. Raises any error of either."""
    from jax.experimental import checkify, jet

    w, x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)

    bias = jnp.arange(3, dtype=jnp.float32)

    def plain(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w + bias) * 2

    def pipelined(strict: bool) -> Any:
        def call(w: Any, x: Any) -> Any:
            if not _compat.is_staging() or not _compat.valid_jaxtype(x):
                return plain(w, x)
            closed, consts = _compat.hoist_consts(_compat.trace_jaxpr(lambda *a: [plain(*a)], [jax.typeof(w), jax.typeof(x)]))
            outs = tracing.pipeline_p.bind(*consts, w, x, call_jaxpr=closed, options=Options(strict=strict, force=True))
            return outs[0]

        return jax.jit(call, inline=True)

    def transformed(f: Any, w: Any, x: Any) -> Any:
        def loss(f: Any, w: Any) -> Any:
            return jnp.sum(f(w, x) ** 2)

        def step(ws: Any) -> Any:
            tangents = jax.jvp(lambda w: f(w, x), (w,), (w,))
            gradients = jax.vmap(jax.grad(lambda w: loss(f, w)))(ws)
            recomputed = jax.value_and_grad(lambda w: loss(jax.checkpoint(f), w))(w)
            scanned = jax.lax.scan(lambda c, _: (c + jax.grad(lambda w: loss(f, w))(c), None), w, None, length=2)[0]
            checked = checkify.checkify(f, errors=checkify.user_checks)(w, x)[1]
            taylor = jet.jet(lambda w: f(w, x), (w,), ((jnp.ones_like(w),),), factorial_scaled=False)
            return tangents, gradients, recomputed, scanned, checked, taylor

        return jax.jit(step)

    explain_jaxpr(
        _compat.without_dead_code(_compat.hoist_consts(jax.make_jaxpr(plain)(w, x))[0]),
        Options(force=True, strict=True),
        "cpu",
        None,
    )
    ws = np.stack([w, w / 2])
    want = transformed(plain, w, x).lower(ws).compile()(ws)
    try:
        lowered = transformed(pipelined(True), w, x).lower(ws)
    except NotPipelined:  # a platform without a target: only the rules can be tried
        lowered = transformed(pipelined(False), w, x).lower(ws)
    got = lowered.compile()(ws)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)
