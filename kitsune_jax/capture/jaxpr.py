"""From a jaxpr to a Graph: calls are inlined, loops become ``scan`` ops, every other equation ops of the table or one opaque op.

Comes in: a closed jaxpr without constants. Goes out: ``Captured``. Invariants: running the ops in order gives what the jaxpr gives;
ops with effects keep their order; recomputation that ``jax.checkpoint`` asks for stays behind an ``optimization_barrier``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.capture import random
from kitsune_jax.capture.edit import Builder, Captured, LoopEditor, Origin, Step, is_array, scalar_of, value_of
from kitsune_jax.capture.equation import Equation, bind_in_place
from kitsune_jax.capture.primitives import RULES, pointwise
from kitsune_jax.capture.random import GENERATOR
from kitsune_jax.capture.rewrites import ALWAYS, OF_BODIES, REWRITES, RewriteContext, apply_rewrites
from kitsune_jax.errors import Failure
from kitsune_jax.ops.graph import CONSTANT, Graph, Op, Scalar
from kitsune_jax.ops.loops import body_of, parts
from kitsune_jax.ops.spec import HIGHEST, is_float, name_of, np_dtype
from kitsune_jax.ops.table import NO_OPERATOR, OPS

# --- one equation as ops of the table ---------------------------------------------------------------------------------------------

_KEY_TYPES = ("random_wrap", "random_unwrap")  # inside of a Graph a key is its array of uint32
_IDENTITIES = ("copy", "copy_p", "stop_gradient", "name", *_KEY_TYPES)  # "name": checkpoint_name, whose policies have been applied
_COLLECTIVES = (
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "all_to_all"),
    *("ragged_all_to_all", "reduce_scatter", "axis_index", "pbroadcast", "pgather"),
)


def translate(
    builder: Builder, eqn: Any, ins: list[int], origin: Origin, stands_for: Origin, partitioned: bool = False
) -> list[int] | str:
    """Value ids of the results of ``eqn`` on ``ins``, or the reason why it stays opaque, for which nothing has been appended.

    ``stands_for``: the equation of the user's jaxpr that it is a part of. ``partitioned``: its sharding is a wish, which XLA knows.
    """
    name = eqn.primitive.name
    if name in _IDENTITIES and len(ins) == 1:
        return ins
    if name == "reshard" and not _placed(eqn.params.get("dst_sharding")):
        return ins  # autodiff writes one for a cotangent, also where no axis of the mesh is explicit
    if name in _COLLECTIVES:
        return f"{name}: communicates between devices"
    params = random.params_of(eqn)
    if params is None:
        return f"{_compat.called(eqn)}: computes with random keys; the pipeline knows only operators that move keys"
    e = Equation(builder, eqn, ins, origin, params, stands_for)
    if name not in RULES and e.kind not in OPS:
        return f"{_compat.called(eqn)}: {NO_OPERATOR}"
    why = _why_opaque(e, partitioned)
    if why:
        return why
    constant = _folded_constant(e)
    made = RULES.get(name, pointwise)(e) if constant is None else constant
    return [made] if isinstance(made, int) else made


def _folded_constant(e: Equation) -> int | None:
    """The result of an op on literals, as a literal: autodiff writes ``1 / n`` for the gradient of a mean, indexing wraps a fixed
    index. If the operands are repeated literals, such as the bounds of random numbers, the result is repeated as well.
    """
    spec = OPS.get(e.kind)
    if spec is None or spec.numpy is None or spec.moves:
        return None
    values, numbers = [e.builder.values[v] for v in e.ins], list[Scalar]()
    for v in e.ins:
        number = e.builder.constant_of(v)
        if number is None:
            return None
        numbers.append(number)
    dtype = e.out_dtype
    arrays = [np.asarray(x, np_dtype(v.dtype)) for x, v in zip(numbers, values, strict=True)]
    scalar = scalar_of(spec.numpy({"new_dtype": dtype}, *arrays, out_dtype=dtype))
    if scalar is None:
        return None
    small = is_float(dtype) and not abs(scalar[0]) >= float(ml_dtypes.finfo(np_dtype(dtype)).tiny)
    if small and (e.kind != "convert_element_type" or is_float(values[0].dtype)):
        return None  # zeros have a sign and subnormal numbers may be flushed: XLA's own arithmetic decides
    literal = e.builder.literal(*scalar)
    return e.broadcast(literal, e.out_shape, ()) if e.out_shape else literal


# --- reasons to stay opaque -------------------------------------------------------------------------------------------------------


def _why_opaque(e: Equation, partitioned: bool) -> str:
    """The dtype, placement or request about rounding that rules out any op; "" if there is none."""
    avals = [*e.in_avals, *(_compat.physical(v.aval) for v in e.eqn.outvars)]
    for aval in avals:
        if not is_array(aval):
            return f"{e.name}: works on {getattr(aval, 'dtype', 'a token')}, a type that the pipeline does not know"
    shardings = [*(getattr(a, "sharding", None) for a in avals), *(e.params.get(k) for k in ("sharding", "out_sharding"))]
    if not partitioned and any(map(_placed, shardings)):
        return f"{e.name}: is explicitly sharded (inside of shard_map a pipeline works on one device's part)"
    if e.accuracy not in (("", HIGHEST) if partitioned else ("",)):  # the program of a shard is captured again
        return f"{e.name}: asks for an accuracy; only the default one can be pipelined"
    if e.params.get("out_dtype") is not None:
        return f"{e.name}: asks for another result dtype; convert the result instead"
    spec = OPS.get(e.kind)
    if spec is not None and not spec.gives and not spec.mixes and e.in_avals:
        if len({name_of(a.dtype) for a in avals}) > 1:
            return f"{e.name}: mixes dtypes"
        if name_of(e.in_avals[0].dtype) not in spec.dtypes:
            return f"{e.name}: is not defined on {e.in_avals[0].dtype}"
    return ""


def _convolution_flops(eqn: Any) -> int | None:
    """Two operations per multiply-add of a convolution, those on padding and on zeros between the elements included in proportion;
    ``None`` for any other equation."""
    if eqn.primitive.name != "conv_general_dilated":
        return None
    out, kernel, params = eqn.outvars[0].aval, eqn.invars[1].aval, eqn.params
    per_output = kernel.size // max(1, kernel.shape[params["dimension_numbers"].rhs_spec[0]])
    return 2 * out.size * per_output // math.prod(params["lhs_dilation"])


def _placed(sharding: Any) -> bool:
    """Does it name a mesh axis, or a device?"""
    if sharding is None:
        return False
    spec = getattr(sharding, "spec", None)
    return spec is None or any([part is not None for part in spec])


# --- bodies of loops and branches that are left to XLA ----------------------------------------------------------------------------

# From a closed jaxpr, and how often it runs in one run of its equation (1 where that depends on data), to one of the same type.
BodyRewrite = Callable[[Any, int], Any]


class Bodies:
    """Evaluates the equation ``eqn``, with rewritten bodies once ``prepare`` has been called, when it is known that XLA runs it.

    A body that cannot be rewritten stays as it is, and is reported as a ``Failure``.
    """

    def __init__(self, eqn: Any, origin: Origin, rewrite: BodyRewrite | None):
        self.eqn, self.origin, self.rewrite = eqn, origin, rewrite
        self.params: dict[str, Any] | None = None

    def evaluate(self, *arrays: Any) -> list[Any]:
        """The equation on ``arrays``, with bodies as ``prepare`` has left them."""
        return bind_in_place(self.eqn, self.origin, self.params, *arrays)

    def prepare(self) -> list[Failure]:
        """Rewrite the bodies, once. Bodies that hold constants are left alone."""
        failures: list[Failure] = []
        if self.rewrite is not None and self.params is None:
            self.params = {k: self._param(v, failures) for k, v in self.eqn.params.items()}
        return failures

    def _param(self, x: Any, failures: list[Failure]) -> Any:
        if isinstance(x, tuple) and x and all(map(_compat.is_jaxpr, x)):
            return tuple(self._body(j, failures) for j in x)
        return self._body(x, failures) if _compat.is_jaxpr(x) else x

    def _body(self, jaxpr: Any, failures: list[Failure]) -> Any:
        if self.rewrite is None or _compat.open_parts(jaxpr)[1]:
            return jaxpr
        try:
            new = self.rewrite(jaxpr, self.eqn.params["length"] if self.eqn.primitive.name == "scan" else 1)
            if _types(new) != _types(jaxpr):
                raise ValueError(f"a body of type {_types(jaxpr)} was rewritten to one of type {_types(new)}")
            return new
        except Exception as e:
            failures.append(failure(e, self.eqn, self.origin, "the body of "))
            return jaxpr


def failure(error: Exception, eqn: Any, origin: Origin, part: str = "") -> Failure:
    """``error``, which a rule raised for ``eqn``, or for that part of it."""
    line = origin.source
    return Failure.of(error, part + _compat.called(eqn) + (f" ({line})" if line else ""))


def _types(jaxpr: Any) -> list[list[str]]:
    return [[str(value_of(a)) for a in avals] for avals in (_compat.in_avals(jaxpr), _compat.out_avals(jaxpr))]


# --- loops: scan, and a while whose number of steps is known, as the op scan ------------------------------------------------------

CaptureBody = Callable[[Any], Captured]  # captures a closed jaxpr as a Graph of its own

# All branches of a condition inside a loop are computed where each holds at most so many ops, and no products or loops.
_MOST_OPS = 64
_COSTLY = frozenset({"dot_general", "scan", "opaque"})
_FEW = 16  # elements of a value that counts as a scalar: a key, a pair of bounds


@dataclasses.dataclass(frozen=True)
class _CapturedLoop:
    """A loop whose body is ``body``: the numbers of the equation's operands that are constants, carries, xs, and how many steps."""

    body: Captured
    consts: tuple[int, ...]
    carries: tuple[int, ...]
    xs: tuple[int, ...]
    length: int
    reverse: bool


def loop(builder: Builder, eqn: Any, ins: Sequence[int], bodies: Bodies, capture_body: CaptureBody) -> list[int] | str:
    """Value ids of the results of the loop ``eqn`` on ``ins``, or the reason why it stays opaque.

    The op's body holds ops of the table only. A carry that the body hands on unchanged is a constant of the op, and so is an array
    that the body makes of nothing.
    """
    found = _scan(eqn, capture_body) if eqn.primitive.name == "scan" else _while(builder, eqn, ins, capture_body)
    if isinstance(found, str):
        return found
    graph = found.body.graph
    for op, step in zip(graph.ops, found.body.steps, strict=True):
        if step.has_effects or op.kind == "opaque" and op.inputs:
            return f"its body holds {op.label} ({op.source or 'no source line'}), {op.reason}"
    return _append(builder, eqn, ins, bodies, found)


def _scan(eqn: Any, capture_body: CaptureBody) -> _CapturedLoop:
    p = eqn.params
    numbers = tuple(range(len(eqn.invars)))
    first, carries = _compat.scan_parts(eqn)
    last = first + carries
    body = capture_body(p["jaxpr"])
    return _CapturedLoop(body, numbers[:first], numbers[first:last], numbers[last:], p["length"], p["reverse"])


def _while(builder: Builder, eqn: Any, ins: Sequence[int], capture_body: CaptureBody) -> _CapturedLoop | str:
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    numbers = tuple(range(len(eqn.invars)))
    body = capture_body(p["body_jaxpr"])
    length = _steps(builder, capture_body(p["cond_jaxpr"]).graph, body.graph, [*ins[:n], *ins[n + m :]], n, m)
    if length is None:
        return "the number of its steps depends on data"
    return _CapturedLoop(body, numbers[n : n + m], numbers[n + m :], (), length, False)


def _steps(builder: Builder, cond: Graph, body: Graph, ins: Sequence[int], consts: int, body_consts: int) -> int | None:
    """The number of steps of a loop that counts an integer from a constant to a constant by a constant; None for any other."""

    def number(graph: Graph, v: int, around: Sequence[int]) -> int | float | None:
        """The number of ``v`` if it is a constant of the body or of the loop's operands, else None."""
        if v in graph.inputs:
            return builder.values[around[graph.inputs.index(v)]].literal
        return graph.values[v].literal

    if len(cond.ops) != 1 or cond.outputs != cond.ops[0].outputs or cond.ops[0].kind not in ("lt", "le", "gt", "ge", "ne"):
        return None
    kind, (left, right) = cond.ops[0].kind, cond.ops[0].inputs
    if left not in cond.inputs[consts:]:
        left, right, kind = right, left, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}[kind]
    if left not in cond.inputs[consts:] or right in cond.inputs[consts:]:
        return None
    k = cond.inputs.index(left) - consts
    counter = body.inputs[body_consts + k]
    adds = next((op for op in body.ops if op.outputs == (body.outputs[k],) and op.kind in ("add", "sub")), None)
    if adds is None or counter not in adds.inputs or (adds.kind == "sub" and adds.inputs[0] != counter):
        return None
    other = adds.inputs[1 - adds.inputs.index(counter)]
    by, start, end = body.values[other].literal, number(cond, left, ins), number(cond, right, ins)
    if not all(type(x) is int for x in (by, start, end)) or not by:
        return None
    assert isinstance(by, int) and isinstance(start, int) and isinstance(end, int)
    by = -by if adds.kind == "sub" else by
    return _count(kind, start, end, by, builder.values[ins[consts + k]].dtype)


def _count(kind: str, start: int, end: int, by: int, dtype: str) -> int | None:
    """Steps of ``i = start; while i <kind> end: i += by``; None where that does not end before the integer overflows."""
    if kind == "ne":
        steps, rest = divmod(end - start, by)
        return None if rest or steps < 0 else steps
    down = kind in ("gt", "ge")
    if down:
        start, end, by = -start, -end, -by
    end += kind in ("le", "ge")
    if start >= end:
        return 0
    if by <= 0:
        return None
    bits = int(dtype.lstrip("uint")) - (not dtype.startswith("u"))
    steps = -(-(end - start) // by)
    last = start + steps * by
    lowest = 0 if dtype.startswith("u") else -(1 << bits)
    reaches = -last if down else last
    return steps if lowest <= reaches < 1 << bits else None


def _append(builder: Builder, eqn: Any, ins: Sequence[int], bodies: Bodies, found: _CapturedLoop) -> list[int]:
    """The op, with constants in place of carries that do not change, and of arrays that the body makes of nothing."""
    graph, steps = found.body.graph, found.body.steps
    arrays = [(op, step) for op, step in zip(graph.ops, steps, strict=True) if op.kind == "opaque"]
    made = [builder.opaque((), [found.body.avals[v] for v in op.outputs], step, op.reason) for op, step in arrays]
    first, last = len(found.consts), len(found.consts) + len(found.carries)
    in_consts, in_carries, in_xs = graph.inputs[:first], graph.inputs[first:last], graph.inputs[last:]
    same = [a == b for a, b in zip(in_carries, graph.outputs, strict=False)]
    still = [(v, ins[k]) for v, k, s in zip(in_carries, found.carries, same, strict=True) if s]
    changing = [(v, k) for v, k, s in zip(in_carries, found.carries, same, strict=True) if not s]
    consts = [
        *((v, w) for (op, _), values in zip(arrays, made, strict=True) for v, w in zip(op.outputs, values, strict=True)),
        *((v, ins[k]) for v, k in zip(in_consts, found.consts, strict=True)),
        *still,
    ]
    results = [k for k in range(len(graph.outputs)) if k >= len(same) or not same[k]]
    body = Graph(
        graph.values,
        (*(v for v, _ in consts), *(v for v, _ in changing), *in_xs),
        tuple(graph.outputs[k] for k in results),
        tuple(op for op in graph.ops if op.kind != "opaque"),
    )
    inputs = [*(v for _, v in consts), *(ins[k] for _, k in changing), *(ins[k] for k in found.xs)]
    place: dict[int, int] = {}
    for k, v in enumerate(inputs):
        place.setdefault(v, k)

    def evaluate(*arrays: Any) -> list[Any]:
        given = (arrays[place[v]] if v in place else None for v in ins)
        typed = [random.typed_key(x, atom.aval) for x, atom in zip(given, eqn.invars, strict=True)]
        whole = bodies.evaluate(*typed)
        return [random.key_data(whole[k]) for k in results]

    step = Step(bodies.origin, evaluate, prepare=bodies.prepare)
    avals = [_compat.physical(eqn.outvars[k].aval) for k in results]
    params = {"consts": len(consts), "carries": len(changing), "length": found.length, "reverse": found.reverse}
    outs = dict(zip(results, builder.loop(inputs, avals, step, body, **params), strict=True))
    scalars = _scalar_loop(builder, builder.ops[-1], step.origin)
    outs = {k: scalars.get(v, v) for k, v in outs.items()}
    handed_on = dict(zip((k for k, s in enumerate(same) if s), (v for _, v in still), strict=True))
    return [outs[k] if k in outs else handed_on[k] for k in range(len(graph.outputs))]


def _scalar_loop(builder: Builder, op: Op, origin: Origin) -> dict[int, int]:
    """Append a second loop, which makes only those results of the loop ``op`` that need nothing but a few scalars. Returns them.

    A counter is the same for all rows of a stream, so the call of the large loop could not store it. The second loop is dropped
    where nothing reads its results.
    """
    p, body = parts(op), body_of(op)

    def small(v: int) -> bool:
        return body.values[v].size <= _FEW

    carries = {k for k, v in enumerate(p.in_carries) if small(v)}
    while True:
        known = {v for v in (*p.in_consts, *p.in_xs, *(p.in_carries[k] for k in carries)) if small(v)}
        for inner in body.ops:
            if all(v in known or body.values[v].literal is not None for v in inner.inputs) and all(map(small, inner.outputs)):
                known.update(inner.outputs)
        known.update(v for v in body.outputs if body.values[v].literal is not None)
        lost = {k for k in carries if p.in_next[k] not in known}
        if not lost:
            break
        carries -= lost
    finals = sorted(carries)
    slices = [k for k, v in enumerate(p.in_ys) if v in known]
    if not (finals or slices) or all(v in known for v in body.outputs):
        return {}
    second = LoopEditor(op)
    second.carries, second.ys = [second.carries[k] for k in finals], [second.ys[k] for k in slices]
    read = second.read()
    second.xs = [(w, v) for w, v in second.xs if v in read]
    new = second.finish()
    made = builder.loop(new.inputs, [builder.avals[v] for v in new.outputs], Step(origin), body_of(new), **dict(new.params))
    return dict(zip(new.outputs, made, strict=True))


def is_cheap(branch: Captured) -> bool:
    """May the ops of this branch be computed although another branch is taken?"""
    return len(branch.graph.ops) <= _MOST_OPS and not any(
        op.kind in _COSTLY or step.has_effects for op, step in zip(branch.graph.ops, branch.steps, strict=True)
    )


# --- a jaxpr, equation by equation ------------------------------------------------------------------------------------------------

# Call-like primitives that are inlined, and the parameter that holds their body.
_CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})
_CALLS = ("closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "kitsune_pipeline")
_BODY = dict.fromkeys(("pjit", "jit", *_CHECKPOINTS), "jaxpr") | dict.fromkeys(_CALLS, "call_jaxpr")
_LOOPS = {
    "scan": "a loop (scan): XLA runs the loop, and only the operators of one step are pipelined, because ",
    "while": "a loop (while): XLA runs the loop, and only the operators of one step are pipelined, because ",
    "cond": "a branch (cond): XLA takes the branch, and the operators of each branch are pipelined by themselves",
}


def capture(closed_jaxpr: Any, rewrite: BodyRewrite | None = None, context: RewriteContext = ALWAYS) -> Captured:
    """The Graph of ``closed_jaxpr``, with the means to evaluate its ops by JAX (``Captured.run``).

    Args:
      closed_jaxpr: a closed jaxpr whose constants have been hoisted into arguments.
      rewrite: a function that ``Step.prepare`` applies to the (closed) bodies of a ``scan``, ``while`` or ``cond`` equation that is
        left to XLA; it returns a jaxpr of the same type, which takes the body's place when the op runs. Bodies that hold constants
        are left alone.
      context: the target's capabilities and the user's wishes, which decide which rewrites of the Graph follow
        (``rewrites.REWRITES``). Loops and generators at the places ``context.kept`` stay as they are.

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
    walk = _Walk(builder, rewrite, [], context)
    outputs = walk.jaxpr(jaxpr, (), [random.unwrap(builder, v) for v in inputs], Origin(()))
    outputs = [random.wrap(builder, v, atom.aval) for v, atom in zip(outputs, jaxpr.outvars, strict=True)]
    captured = builder.finish(inputs, outputs, walk.failures)
    captured.graph.validate()
    return apply_rewrites(captured, REWRITES, context)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """``context``: of the rewrites. ``inside``: in the body of a loop. ``part_of``: the equation whose expansion this is."""

    builder: Builder
    rewrite: BodyRewrite | None
    failures: list[Failure]
    context: RewriteContext
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

    def _integers(self, eqn: Any, origin: Origin) -> list[int]:
        """The result of an equation ``kitsune_constant``, whose value is known to whoever plans or lowers the graph."""
        array = eqn.params["value"].array
        step = Step(origin, lambda: bind_in_place(eqn, origin), constant=array)
        return self.builder.opaque((), [eqn.outvars[0].aval], step, "a constant array", CONSTANT, flops=0)

    def _constant(self, x: Any, aval: Any, origin: Origin) -> int:
        """A literal for a scalar; for any other constant an op without inputs that yields it."""
        scalar = scalar_of(x)
        if scalar is not None and scalar[1] == str(getattr(aval, "dtype", "")):
            return self.builder.literal(*scalar)
        if isinstance(x, np.ndarray) and x.size == 1 and (number := scalar_of(x.reshape(()))) is not None:
            literal = self.builder.literal(*number)
            return self.builder.add("broadcast_in_dim", [literal], Step(origin), aval, shape=aval.shape, dims=())
        step = Step(origin, lambda: [x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)])
        return random.unwrap(self.builder, self.builder.opaque((), [aval], step, "a constant array")[0])

    def _equation(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        """Value ids of the equation's results; where a rule fails, of the results of one opaque op."""
        mark = len(self.builder.ops)
        try:
            outs = self._translated(eqn, ins, origin)
            self.builder.check(outs, [_compat.physical(v.aval) for v in eqn.outvars])
            return outs
        except Exception as e:
            self.builder.cut(mark)
            self.failures.append(failure(e, eqn, origin))
            reason = f"{_compat.called(eqn)}: a bug of kitsune_jax, please report it ({type(e).__name__}: {e})"
            return self._opaque(eqn, ins, origin, reason)

    def _translated(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        name = eqn.primitive.name
        if name in _BODY:
            reason = why_not_inlined(eqn)
            return self._call(eqn, ins, origin) if reason is None else self._opaque(eqn, ins, origin, reason)
        if name == _compat.CONSTANT_NAME:
            return self._integers(eqn, origin)
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
        # XLA cannot divide a module with some of the operators that the generator becomes (mulhi, JAX 0.12).
        kept = name == "rng_bit_generator" and (self.context.partitioned or stands_for.key in self.context.kept)
        outs = GENERATOR if kept else translate(self.builder, eqn, ins, origin, stands_for, self.context.partitioned)
        return self._opaque(eqn, ins, origin, outs) if isinstance(outs, str) else outs

    def _call(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        jaxpr, consts = _compat.open_parts(eqn.params[_BODY[eqn.primitive.name]])
        if eqn.primitive.name in _CHECKPOINTS:
            ins = self._barrier(eqn, ins, origin)
        return self.jaxpr(jaxpr, consts, ins, origin)

    def _barrier(self, eqn: Any, ins: list[int], origin: Origin) -> list[int]:
        """The inputs of a checkpointed body, the marked ones behind a barrier, without which XLA would merge the recomputation.

        A body of a loop needs no barrier: the first computation is in another loop, with which XLA merges nothing.
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

        reason = "a barrier that keeps XLA from merging a recomputation with the first computation"
        outs = iter(self.builder.opaque(behind, avals, Step(origin, evaluate), reason, flops=0))
        return [next(outs) if m else v for v, m in zip(ins, marked, strict=True)]

    def _opaque(self, eqn: Any, ins: list[int], origin: Origin, reason: str) -> list[int]:
        bodies = Bodies(eqn, origin, self.rewrite if eqn.primitive.name in _LOOPS else None)
        prepare = None if bodies.rewrite is None else bodies.prepare
        step = Step(origin, bodies.evaluate, bool(_effects(eqn)), prepare, whole=True)
        ins = [random.wrap(self.builder, v, atom.aval) for v, atom in zip(ins, eqn.invars, strict=True)]
        outs = self.builder.opaque(ins, [v.aval for v in eqn.outvars], step, reason, flops=_convolution_flops(eqn))
        return [random.unwrap(self.builder, v) for v in outs]

    def _loop(self, eqn: Any, ins: list[int], origin: Origin) -> list[int] | str:
        return loop(self.builder, eqn, ins, Bodies(eqn, origin, self.rewrite), lambda jaxpr: self._capture_body(jaxpr, origin))

    def _capture_body(self, closed: Any, origin: Origin) -> Captured:
        """The body of a loop or a branch inside one, as a Graph of its own."""
        jaxpr, consts = _compat.open_parts(closed)
        builder = Builder()
        inputs = [builder.value(_compat.physical(v.aval)) for v in jaxpr.invars]
        outputs = _Walk(builder, self.rewrite, self.failures, self.context, inside=True).jaxpr(jaxpr, consts, inputs, origin)
        return apply_rewrites(builder.finish(inputs, outputs), OF_BODIES, self.context)

    def _branches(self, eqn: Any, ins: list[int], origin: Origin) -> list[int] | str:
        """In a loop all branches, if they are cheap, and a choice between their results; else "", the usual reason."""
        branches = eqn.params["branches"]
        if not self.inside or not all(is_cheap(self._capture_body(branch, origin)) for branch in branches):
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
    """The side effects of the equation, in words; "" if it has none. Naming a mesh axis is no side effect."""
    kinds = {type(e).__name__ for e in eqn.effects} - {"NamedAxisEffect"}
    if not kinds:
        return ""
    if any(_compat.is_ref(v.aval) for v in eqn.invars):
        return f"reads or writes a mutable array ({_compat.called(eqn)})"
    return f"has side effects ({_compat.called(eqn)})"


def why_not_inlined(eqn: Any) -> str | None:
    """Why a call is not inlined: it has parameters about placement or compilation, which would be lost. None where it is."""
    p = eqn.params
    if any(type(s).__name__ != "UnspecifiedValue" for s in (*p.get("in_shardings", ()), *p.get("out_shardings", ()))):
        return "a jit with explicit shardings"
    if any(x is not None for x in (*p.get("in_layouts", ()), *p.get("out_layouts", ()))):
        return "a jit with explicit layouts"
    if p.get("compiler_options_kvs"):
        return "a jit with compiler options of its own"
    return None
