"""Graphs that stand alone: written by one process, planned, lowered and run by another, with the same results.

Comes in: a ``Captured``, or the text of a Graph. Goes out: text, or a function of arrays. An op of the table is evaluated by its
entry; an opaque op carries its equation as StableHLO, in its parameters, which ``jax.export`` makes only when the graph is written.
Invariant: any process with this version of the package can evaluate a written text. Tests use it to show that a Graph says
everything about a function.

>>> import jax.numpy as jnp
>>> from kitsune_jax.capture.jaxpr import capture
>>> captured = capture(jax.make_jaxpr(lambda x: jnp.sort(jnp.tanh(x)) * 2)(jnp.zeros(3)))
>>> graph = from_json(write(captured))
>>> as_function(graph, "cpu")(jnp.array([0.5, -1.0, 0.0]))[0].round(2).tolist()
[-1.52, 0.0, 0.92]
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from kitsune_jax.capture.edit import Captured, Step
from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.route import PlannedRegion, RouteOptions
from kitsune_jax.ops.graph import Graph, Op, Param, Value, make_params
from kitsune_jax.ops.table import verify
from kitsune_jax.targets import INSTEAD

PLATFORMS = ("cpu", "cuda")
_CALLS = [export.DisabledSafetyCheck.custom_call(name) for name in ("kitsune_cpu", "kitsune_cuda")]  # calls in loop bodies
_NO_ARRAYS = ("ref", "token")
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def captured_for(closed_jaxpr: Any, target: str, *, force: bool = False, strict: bool = False) -> tuple[Captured, list[Any]]:
    """``closed_jaxpr`` as its lowering for ``target`` sees it, with pipelines in the bodies of its loops, and its constants.

    The constants are the values of the first inputs of the Graph. A loop that is left to XLA is opaque: its body calls its own
    pipelines. ``force``, ``strict``: as in ``as_function``.
    """
    plan = lowering.planned_function(closed_jaxpr, RouteOptions(strict=strict, force=force), target)
    graph, why = plan.captured.graph, dict(plan.routed.rejected)
    ops = [
        op if op.body is None or i not in why else dataclasses.replace(op, kind="opaque", params=(), body=None, reason=why[i])
        for i, op in enumerate(graph.ops)
    ]
    captured = dataclasses.replace(plan.captured, graph=dataclasses.replace(graph, ops=tuple(ops)))
    return captured, list(plan.consts)


def write(captured: Captured, platforms: Sequence[str] = PLATFORMS) -> str:
    """``captured`` as a self-contained text.

    Bodies of loops are written as they are: if ``captured_for`` has put pipelines into them, the text is for its target only.

    Args:
      captured: a function, of arrays of known shapes.
      platforms: where its opaque ops are to run, "cpu" and "cuda".

    Returns:
      The JSON of a Graph (``from_json``).

    Raises:
      ValueError: an opaque op cannot be written: it has side effects, works on tokens or references, has symbolic dimensions, or
        ``jax.export`` refuses it (collectives, callbacks). The error names the op and its source line.
    """
    graph = captured.graph
    ops = []
    for i, op in enumerate(graph.ops):
        if any(not isinstance(n, int) for v in (*op.inputs, *op.outputs) for n in graph.values[v].shape):
            raise ValueError(f"{_op_text(op)} cannot be written: its shapes are symbolic; capture it with concrete shapes")
        ops.append(dataclasses.replace(op, params=_exported(captured, i, tuple(platforms))) if op.kind == "opaque" else op)
    return to_json(dataclasses.replace(graph, ops=tuple(ops)))


def as_function(graph: Graph, target: str, *, force: bool = False, strict: bool = False) -> Callable[..., list[jax.Array]]:
    """The function that ``graph`` computes, with custom calls of ``target`` in place of its pipelines.

    Args:
      graph: one that stands alone: from ``from_json``.
      target: "cpu", "cuda" or "emulator" (``route``).
      force: pipeline every legal region, even if the model expects no gain.
      strict: raise an error of this package instead of leaving the failing region to XLA.

    Returns:
      A function of one array for each of the graph's inputs, in order, which returns its outputs. It may be jitted.

    Raises:
      ValueError: there is no such target here, the graph is not valid, an opaque op carries no code for the target's platform, or
        the graph computes in 64 bits while JAX does not (``jax_enable_x64``).
    """
    why_not = lowering.missing_target(target)
    if why_not:
        raise ValueError(why_not)
    captured = _evaluable(graph, INSTEAD.get(target, target))
    planned, _ = lowering.plan_and_schedule(captured, target, RouteOptions(strict=strict, force=force))

    def function(*arrays: Any) -> list[jax.Array]:
        return run(captured, planned.regions, arrays)

    return function


def run(captured: Captured, regions: Sequence[PlannedRegion], args: Sequence[Any]) -> list[Any]:
    """Evaluate a captured function, every op by JAX and every region by its custom call. Returns the graph's outputs."""
    nodes, _ = lowering.schedule(captured.graph, [step.has_effects for step in captured.steps], regions)

    def failed(_: PlannedRegion, error: Exception) -> None:
        raise error

    return lowering.run_nodes(captured, nodes, args, failed)


# --- a Graph as JSON --------------------------------------------------------------------------------------------------------------

FORMAT_VERSION = 4


def to_json(graph: Graph) -> str:
    """Stable text form; ``from_json`` gives back an equal graph (NaN literals excepted: NaN is not equal to itself)."""
    return json.dumps({"format": FORMAT_VERSION, **_parts(graph)}, separators=(",", ":"))


def _parts(graph: Graph) -> dict[str, Any]:
    return {
        "values": [[list(v.shape), v.dtype, v.literal] for v in graph.values],
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "ops": [[o.kind, o.inputs, o.outputs, o.params, o.source, o.reason, o.label, o.body and _parts(o.body)] for o in graph.ops],
    }


def from_json(text: str) -> Graph:
    """Inverse of ``to_json``. Raises ``ValueError`` for another format version or a graph that is not valid."""
    parts = json.loads(text)
    if parts.get("format") != FORMAT_VERSION:
        raise ValueError(f"graph format {parts.get('format')!r} is not the supported {FORMAT_VERSION}")
    graph = _graph(parts)
    graph.validate()
    return graph


def _graph(parts: Any) -> Graph:
    return Graph(
        values=tuple(Value(tuple(shape), dtype, literal) for shape, dtype, literal in parts["values"]),
        inputs=tuple(parts["inputs"]),
        outputs=tuple(parts["outputs"]),
        ops=tuple(
            Op(kind, tuple(ins), tuple(outs), make_params(**dict(params)), source, reason, label, body and _graph(body))
            for kind, ins, outs, params, source, reason, label, body in parts["ops"]
        ),
    )


# --- opaque ops -------------------------------------------------------------------------------------------------------------------


def _exported(captured: Captured, i: int, platforms: tuple[str, ...]) -> tuple[tuple[str, Param], ...]:
    """Op ``i`` as StableHLO: the parameters ``module``; ``platforms``; ``operands``, the op's inputs that the module takes; and
    ``convention``, the version of JAX's calling convention."""
    op, step, values = captured.graph.ops[i], captured.steps[i], captured.graph.values
    ins, outs = ([values[v] for v in ids] for ids in (op.inputs, op.outputs))

    def opaque(*arrays: Any) -> list[Any]:
        return captured.run(i, arrays)

    try:
        if step.has_effects or any(v.dtype in _NO_ARRAYS for v in (*ins, *outs)):
            raise ValueError(op.reason)
        made = export.export(jax.jit(opaque), platforms=platforms, disabled_checks=_CALLS)(*map(_type_of, ins))
    except Exception as error:
        raise ValueError(f"{_op_text(op)} cannot be written: {error}") from error
    return make_params(
        module=base64.b64encode(made.mlir_module_serialized).decode(),
        platforms=made.platforms,
        operands=made.module_kept_var_idx,
        convention=made.calling_convention_version,
    )


def _op_text(op: Op) -> str:
    return f"{op.label} ({op.source or 'no source line'})"


def _evaluable(graph: Graph, platform: str) -> Captured:
    """``graph`` as a ``Captured`` whose opaque ops are evaluated on ``platform`` by the code that they carry."""
    verify(graph)
    wide = next((v.dtype for v in graph.values if v.dtype in ("int64", "uint64", "float64")), None)
    if wide and not jax.config.jax_enable_x64:
        raise ValueError(f"the graph computes in {wide}: call jax.config.update('jax_enable_x64', True) first")
    for op in graph.ops:
        if op.kind == "opaque" and platform not in dict(op.params).get("platforms", ()):
            raise ValueError(f"{_op_text(op)} is opaque and carries no code for the platform {platform}: write the graph for it")
    steps = [Step(evaluate=_exported_call(op, graph)) if op.kind == "opaque" else Step() for op in graph.ops]
    return Captured(graph, tuple(steps), tuple(None if v.literal is not None else _type_of(v) for v in graph.values))


def _exported_call(op: Op, graph: Graph) -> Callable[..., Sequence[Any]]:
    """The function that calls the module of ``op``: an export of some function of the same types, with its module replaced."""
    ins, outs = ([_type_of(graph.values[v]) for v in ids] for ids in (op.inputs, op.outputs))
    some = jax.jit(lambda *_: [jax.lax.full(t.shape, 0, t.dtype) for t in outs])
    exported = export.export(some, platforms=op["platforms"], disabled_checks=_CALLS)(*ins)
    return dataclasses.replace(
        exported,
        fun_name=op.label,
        mlir_module_serialized=base64.b64decode(op["module"]),
        module_kept_var_idx=op["operands"],
        calling_convention_version=op["convention"],
    ).call


def _type_of(value: Value) -> jax.ShapeDtypeStruct:
    if value.dtype.startswith("key<"):
        keys = [jax.eval_shape(functools.partial(jax.random.key, impl=kind), 0).dtype for kind in _KEYS]
        return jax.ShapeDtypeStruct(value.shape, next(k for k in keys if str(k) == value.dtype))
    return jax.ShapeDtypeStruct(value.shape, jnp.dtype(value.dtype))
