"""Walking a jaxpr: calls are inlined, every other equation becomes ops of the table or one opaque op.

Comes in: a closed jaxpr without constants. Goes out: ``Captured``. Invariants: running the ops in order gives what the jaxpr
gives; ops with effects keep their order; recomputation that ``jax.checkpoint`` asks for stays behind an ``optimization_barrier``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.capture import keys
from kitsune_jax.capture.bodies import Bodies, Rewrite, failure
from kitsune_jax.capture.builder import Builder, scalar_of
from kitsune_jax.capture.captured import Captured, Origin, Step
from kitsune_jax.capture.equation import Equation
from kitsune_jax.capture.loops import cheap, loop
from kitsune_jax.capture.random_bits import GENERATOR
from kitsune_jax.capture.rewrites import APART, ONLINE, PARTS, REWRITES, UNORDERED, Rewriting, behind_loops, of_loops, rewritten
from kitsune_jax.capture.translate import translate
from kitsune_jax.fallbacks import Failure

__all__ = ["Captured", "capture"]

# Call-like primitives that are seen through, and the parameter that holds their body.
_BODY = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "kitsune_pipeline": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
_CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})
_LOOPS = {
    "scan": "a loop (scan): its body is pipelined on its own, because ",
    "while": "a loop (while): its body is pipelined on its own, because ",
    "cond": "a branch (cond): its branches are pipelined on their own",
}


def capture(
    closed_jaxpr: Any,
    rewrite: Rewrite | None = None,
    *,
    parts: bool = False,
    online: bool = False,
    unordered: bool = False,
    apart: bool = False,
    loops: bool = False,
    summed: int | None = None,
    kept: Collection[Any] = (),
) -> Captured:
    """The Graph of ``closed_jaxpr``, and what JAX needs to evaluate its ops as they stood (``Captured.run``).

    Args:
      closed_jaxpr: a closed jaxpr whose constants have been hoisted into arguments.
      rewrite: what ``Step.prepare`` applies to the (closed) bodies of a ``scan``, ``while`` or ``cond`` equation that is left to
        XLA; it returns a jaxpr of the same type, which takes the body's place when the op runs. Bodies that hold constants are left
        alone.
      parts: make weight gradients of concatenations part by part. (What is computed of such a gradient is then not computed of the
        result of a single op, so a target whose calls update parameters is better off without.)
      online: make the sums of a segment softmax online (``ops.online``), for a target that has code for that.
      unordered: let sums by index be added up in another order in every run, for a target that has code for that.
      apart: make the scores of an attention once for sums over the queries and once for those over the keys (``scores_apart``,
        ``score_divisions``), for a target without code for sums over the rows of each batch.
      loops: move the sums of a loop's steps behind the loop (``loop_sums``) and hand less from loop to loop (``loop_residuals``),
        for a target that has code for loops.
      summed: make products that only leave a loop behind it, where its weights have more elements (``loop_products``), for a target
        that has no room for sums over the steps of such a loop.
      kept: the places (``Origin.key``) of loops and generators that stay as they are.

    Returns:
      ``Captured``; its graph's inputs and outputs are those of the jaxpr, in order. An op that nothing reads and that has no effect
      is dropped. An equation or a rewrite that fails because of a bug in here costs only itself: the equation is opaque, the
      rewrite is undone, and ``failures`` says so.

    Raises:
      ValueError: ``closed_jaxpr`` has constants.

    >>> captured = capture(jax.make_jaxpr(lambda x: jax.nn.relu(x) + 1)(jnp.zeros((2, 3))))
    >>> [op.kind for op in captured.graph.ops]
    ['max', 'add']
    >>> captured.graph.values[captured.graph.outputs[0]].shape
    (2, 3)
    """
    jaxpr, consts = _compat.open_parts(closed_jaxpr)
    if consts or jaxpr.constvars:
        raise ValueError(f"capture takes a jaxpr without constants, this one has {len(consts)}: hoist them into arguments")
    builder = Builder()
    inputs = [builder.value(v.aval) for v in jaxpr.invars]
    within = (*REWRITES, *(of_loops(kept) if loops else ()))
    walk = _Walk(builder, rewrite, [], within, kept)
    outputs = walk.jaxpr(jaxpr, (), [keys.unwrapped(builder, v) for v in inputs], Origin(()))
    outputs = [keys.wrapped(builder, v, atom.aval) for v, atom in zip(outputs, jaxpr.outvars, strict=True)]
    captured = builder.finish(inputs, outputs, walk.failures)
    captured.graph.validate()
    behind = () if summed is None else (behind_loops(summed, kept),)
    asked = ((behind, loops), ((PARTS,), parts), ((ONLINE,), online), ((UNORDERED,), unordered), (APART, apart))
    return rewritten(captured, (*within, *(r for rewritings, wanted in asked if wanted for r in rewritings)))


@dataclasses.dataclass(frozen=True)
class _Walk:
    """``rewrites``: of the bodies of loops. ``inside``: in one. ``kept``: the places of what stays as it is. ``part_of``: the
    equation on keys that this is the expansion of."""

    builder: Builder
    rewrite: Rewrite | None
    failures: list[Failure]
    rewrites: Sequence[tuple[str, Rewriting]]
    kept: Collection[Any]
    inside: bool = False
    part_of: Origin | None = None

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int], around: Origin) -> list[int]:
        """Append ``jaxpr`` applied to values ``inputs``. Returns the value ids of its results."""
        env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._constant(const, var.aval, around)
        for eqn in jaxpr.eqns:
            origin = Origin((*around.eqns, eqn))
            ins = [self._read(env, v, origin) for v in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, ins, origin), strict=True))
        return [self._read(env, v, around) for v in jaxpr.outvars]

    def _read(self, env: Mapping[Any, int], v: Any, origin: Origin) -> int:
        return self._constant(v.val, v.aval, origin) if _compat.is_literal(v) else env[v]

    def _constant(self, x: Any, aval: Any, origin: Origin) -> int:
        """A literal for a scalar; for anything larger an op without inputs that yields it."""
        scalar = scalar_of(x)
        if scalar is not None and scalar[1] == str(getattr(aval, "dtype", "")):
            return self.builder.literal(*scalar)
        if isinstance(x, np.ndarray) and x.size == 1 and (number := scalar_of(x.reshape(()))) is not None:
            literal = self.builder.literal(*number)
            return self.builder.add("broadcast_in_dim", [literal], Step(origin), aval, shape=aval.shape, dims=())
        step = Step(origin, lambda: [x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)])
        return keys.unwrapped(self.builder, self.builder.opaque((), [aval], step, "a constant array")[0])

    def _equation(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        """Value ids of the equation's results, which are those of one opaque op where a rule fails."""
        mark = len(self.builder.ops)
        try:
            outs = self._translated(eqn, ins, origin)
            self.builder.check(outs, [_compat.physical(v.aval) for v in eqn.outvars])
            return outs
        except Exception as e:
            self.builder.cut(mark)
            self.failures.append(failure(e, eqn, origin))
            reason = f"{_compat.called(eqn)}: kitsune_jax failed on it, which is a bug of kitsune_jax ({type(e).__name__}: {e})"
            return self._opaque(eqn, ins, origin, reason)

    def _translated(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        name = eqn.primitive.name
        if name in _BODY:
            reason = why_not_inlined(eqn)
            return self._call(eqn, ins, origin) if reason is None else self._opaque(eqn, ins, origin, reason)
        effects = _effects(eqn)
        if effects:
            return self._opaque(eqn, ins, origin, effects)
        if name in _LOOPS:
            outs = self._branches(eqn, ins, origin) if name == "cond" else self._loop(eqn, ins, origin)
            return self._opaque(eqn, ins, origin, _LOOPS[name] + outs) if isinstance(outs, str) else outs
        expansion = _compat.expansion(eqn) or _compat.random_jaxpr(eqn)
        if expansion is not None:
            walk = dataclasses.replace(self, part_of=self.part_of or origin)
            return walk.jaxpr(*_compat.open_parts(expansion), ins, origin)
        stands_for = self.part_of or origin
        kept = name == "rng_bit_generator" and stands_for.key in self.kept
        outs = GENERATOR if kept else translate(self.builder, eqn, ins, origin, stands_for)
        return self._opaque(eqn, ins, origin, outs) if isinstance(outs, str) else outs

    def _call(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        jaxpr, consts = _compat.open_parts(eqn.params[_BODY[eqn.primitive.name]])
        if eqn.primitive.name in _CHECKPOINTS:
            ins = self._barrier(eqn, ins, origin)
        return self.jaxpr(jaxpr, consts, ins, origin)

    def _barrier(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        """The inputs of a checkpointed body, the marked ones behind a barrier, without which XLA would merge the recomputation.

        In a loop there is none: what is computed again there was computed in another loop, which nothing merges it with.
        """
        prevent = eqn.params["prevent_cse"]
        marked = [prevent] * len(ins) if isinstance(prevent, bool) else jax.tree.leaves(prevent)
        if self.inside or not eqn.params["differentiated"] or not any(marked):
            return ins
        behind = [v for v, m in zip(ins, marked, strict=True) if m]
        avals = [_compat.physical(a.aval) for a, m in zip(eqn.invars, marked, strict=True) if m]

        def evaluate(*arrays: Any) -> Sequence[Any]:
            with origin.context():
                return jax.lax.optimization_barrier(arrays)

        reason = "a barrier that keeps a recomputation from being merged with what it recomputes"
        outs = iter(self.builder.opaque(behind, avals, Step(origin, evaluate), reason))
        return [next(outs) if m else v for v, m in zip(ins, marked, strict=True)]

    def _opaque(self, eqn: Any, ins: list[int], origin: Origin, reason: str) -> list[int]:
        bodies = Bodies(eqn, origin, self.rewrite if eqn.primitive.name in _LOOPS else None)
        step = Step(origin, bodies.evaluate, bool(_effects(eqn)), bodies.prepare)
        ins = [keys.wrapped(self.builder, v, atom.aval) for v, atom in zip(ins, eqn.invars, strict=True)]
        outs = self.builder.opaque(ins, [v.aval for v in eqn.outvars], step, reason)
        return [keys.unwrapped(self.builder, v) for v in outs]

    def _loop(self, eqn: Any, ins: list[int], origin: Origin) -> list[int] | str:
        return loop(self.builder, eqn, ins, Bodies(eqn, origin, self.rewrite), lambda jaxpr: self._captured(jaxpr, origin))

    def _captured(self, closed: Any, origin: Origin) -> Captured:
        """The body of a loop or a branch inside one, as a Graph of its own."""
        jaxpr, consts = _compat.open_parts(closed)
        builder = Builder()
        inputs = [builder.value(_compat.physical(v.aval)) for v in jaxpr.invars]
        outputs = _Walk(builder, self.rewrite, self.failures, self.rewrites, self.kept, inside=True).jaxpr(
            jaxpr, consts, inputs, origin
        )
        return rewritten(builder.finish(inputs, outputs), self.rewrites)

    def _branches(self, eqn: Any, ins: list[int], origin: Origin) -> list[int] | str:
        """In a loop: all branches, if they are cheap, and a choice between their results; else the reason, "" for the usual one."""
        branches = eqn.params["branches"]
        if not self.inside or not all(cheap(self._captured(branch, origin)) for branch in branches):
            return ""
        index, *operands = ins
        results = [self.jaxpr(*_compat.open_parts(branch), operands, origin) for branch in branches]
        chosen = results[0]
        for k, other in enumerate(results[1:], 1):
            outs = []
            for var, no, yes in zip(eqn.outvars, chosen, other, strict=True):
                e = Equation(self.builder, eqn, ins, origin)
                e.out = _compat.physical(var.aval)
                e.out_shape, e.out_dtype = e.out.shape, str(e.out.dtype)
                taken = e.op("ge", index, e.constant(k, e.dtype_of(index)))
                outs.append(no if no == yes else e.op("select_n", taken, no, yes))
            chosen = outs
        return chosen


def _effects(eqn: Any) -> str:
    """What the equation does besides computing, in words; "" for nothing. Naming a mesh axis is no side effect."""
    kinds = {type(e).__name__ for e in eqn.effects} - {"NamedAxisEffect"}
    if not kinds:
        return ""
    if any(_compat.is_ref(v.aval) for v in eqn.invars):
        return f"reads or writes a mutable array ({_compat.called(eqn)})"
    return f"has side effects ({_compat.called(eqn)})"


def why_not_inlined(eqn: Any) -> str | None:
    """Why a call has to stay one: what it says about placement or compilation would be lost."""
    p = eqn.params
    if any(type(s).__name__ != "UnspecifiedValue" for s in (*p.get("in_shardings", ()), *p.get("out_shardings", ()))):
        return "a jit with explicit shardings"
    if any(x is not None for x in (*p.get("in_layouts", ()), *p.get("out_layouts", ()))):
        return "a jit with explicit layouts"
    if p.get("compiler_options_kvs"):
        return "a jit with compiler options of its own"
    return None
