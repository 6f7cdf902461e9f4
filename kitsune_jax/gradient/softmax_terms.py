"""Gradients of a softmax: a term that is constant in a row is taken out of the sum over that row.

Comes in: the two jaxprs that linearization makes of a function, which are read as ``Flat``. Goes out: the same, whose tangents take
fewer passes over their rows. Invariant: the numbers are the same but for rounding.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.capture.edit import Origin
from kitsune_jax.capture.jaxpr import why_not_inlined

# --- a jaxpr with its calls inlined: steps that read and make numbered values -----------------------------------------------------

_CALLS = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CALLS |= {f"vjp_node[{name}]": body for name, body in _CALLS.items()}  # as linearization for a gradient writes them

Forwarded = tuple[int | None, ...]  # for each residual the number of the function's argument that it is, or None
Atom = Any  # a value, by its number, or a literal of JAX's
Evaluate = Callable[[Callable[[Atom], Any]], Sequence[Any]]  # from a function that reads a value to the results of a step


@dataclasses.dataclass(frozen=True, eq=False)
class JaxprStep:
    """An equation that is no call, with the values that it reads and makes; ``origin``: the calls around it, and itself."""

    origin: Origin
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def eqn(self) -> Any:
        return self.origin.eqns[-1]

    @property
    def values(self) -> list[int]:
        """The values that it reads."""
        return [v for v in self.inputs if is_value(v)]


def is_value(v: Atom) -> bool:
    """Is the atom a value and not a literal?"""
    return type(v) is int


class Flat:
    """A closed jaxpr with its calls inlined. Calls that set placement or compilation stay, and so do functions with a derivative of
    their own.

    ``avals[v]``: the type of value ``v``. ``constants``: arrays that the jaxpr holds. ``maker[v]``: the step that makes ``v``.
    """

    def __init__(self, closed: Any):
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.steps: list[JaxprStep] = []
        self.arguments = [self._value(v.aval) for v in _compat.open_parts(closed)[0].invars]
        self.results: list[Atom] = self._body(closed, self.arguments, ())
        self.maker = {v: step for step in self.steps for v in step.outputs}

    def _value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _body(self, closed: Any, arguments: Sequence[Atom], around: tuple[Any, ...]) -> list[Atom]:
        jaxpr, consts = _compat.open_parts(closed)
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._value(var.aval)
            self.constants[env[var]] = const
        for eqn in jaxpr.eqns:
            inputs = tuple(v if _compat.is_literal(v) else env[v] for v in eqn.invars)
            if eqn.primitive.name in _CALLS and why_not_inlined(eqn) is None:
                outs = self._body(eqn.params[_CALLS[eqn.primitive.name]], inputs, (*around, eqn))
            else:
                outs = [self._value(v.aval) for v in eqn.outvars]
                self.steps.append(JaxprStep(Origin((*around, eqn)), inputs, tuple(outs)))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [v if _compat.is_literal(v) else env[v] for v in jaxpr.outvars]

    def residuals(self, forwarded: Forwarded, results: int, consts: int) -> list[Any]:
        """The values that are residuals of a linearized function (``residual_cleanup.shrink_residuals``); None for constants in
        front of the arguments."""
        computed = iter(self.results[results:])
        return [next(computed) if f is None else self.arguments[f - consts] if f >= consts else None for f in forwarded]

    def needed(self, wanted: Collection[Atom], known: Collection[int]) -> list[JaxprStep]:
        """The steps that make ``wanted`` of ``known`` values, in order."""
        alive = {v for v in wanted if is_value(v) and v not in known}
        steps = []
        for step in reversed(self.steps):
            if not alive.isdisjoint(step.outputs):
                steps.append(step)
                alive.update(v for v in step.values if v not in known)
        return steps[::-1]

    def evaluate(
        self, wanted: Sequence[Atom], known: Mapping[int, Any], instead: Mapping[JaxprStep, Evaluate] = types.MappingProxyType({})
    ) -> list[Any]:
        """The ``wanted`` values made of ``known`` ones, which are arrays or tracers. ``instead``: functions that replace some steps
        and read values of the steps before. Every equation has its own parameters, name stack, source line and mesh."""
        env = {**self.constants, **known}

        def read(v: Atom) -> Any:
            return env[v] if is_value(v) else v.val

        for step in self.steps if instead else self.needed(wanted, env):
            with step.origin.enclosing():
                if step in instead:
                    with _compat.user_context(step.eqn):
                        outs = instead[step](read)
                else:
                    outs = _compat.bind_eqn(step.eqn, [read(v) for v in step.inputs])
            env.update(zip(step.outputs, outs, strict=True))
        return [read(v) for v in wanted]

    def jaxpr_of(self, wanted: Sequence[Atom], known: Sequence[int], like: Any) -> Any:
        """The closed jaxpr that makes ``wanted`` values of ``known`` ones; named after the jaxpr ``like``."""
        avals = [self.avals[v] for v in known]
        return _compat.trace_jaxpr(lambda *a: self.evaluate(wanted, dict(zip(known, a, strict=True))), avals, like=like)


def rename_all(variables: Sequence[Any], names: Mapping[Any, Any]) -> list[Any]:
    """``variables``, with others in the place of those in ``names``. Literals stay."""
    return [v if _compat.is_literal(v) else names.get(v, v) for v in variables]


def renamed(eqn: Any, names: Mapping[Any, Any]) -> Any:
    """``eqn`` with other variables in the place of those in ``names``."""
    return eqn.replace(invars=rename_all(eqn.invars, names), outvars=rename_all(eqn.outvars, names))


# --- terms that are the same in a whole row ---------------------------------------------------------------------------------------

Read = Callable[[Atom], Any]
_MOST_FACTORS = 64  # of a product, and steps on the way to a row term
Term = Callable[[Read, dict[int, Any]], Any]  # of the values of the tangent, and those of the forward pass
_TIMES = 8  # the summed row is at least so many times larger than the sum, as in ``residual_cleanup._TIMES_OPERANDS``


@dataclasses.dataclass(frozen=True)
class _RowValue:
    """A value with one element in each row: ``v``, or ``v`` put into ``shape`` with its dimensions at ``dims``."""

    v: Atom
    shape: tuple[int, ...] = ()
    dims: tuple[int, ...] | None = None

    def of(self, x: Any) -> Any:
        return x if self.dims is None else lax.broadcast_in_dim(x, self.shape, self.dims)


@dataclasses.dataclass(frozen=True)
class _RowTerm:
    """A term ``sign * u * factors * masks``: ``u`` is a tangent; ``factors``: values and their powers; ``masks``: (mask, number of
    the case that is taken)."""

    u: _RowValue
    factors: tuple[tuple[Atom, int], ...] = ()
    masks: tuple[tuple[Atom, int], ...] = ()
    sign: int = 1


@dataclasses.dataclass(frozen=True)
class _Split:
    """A value without its row terms (None: it has no other terms), and its row terms."""

    rest: Callable[[Read], Any] | None
    rows: tuple[_RowTerm, ...] = ()


class _ProductOfFactors:
    """A value of the forward pass as a product: ``whole`` factors with their powers, and those with one element in each row."""

    def __init__(self, flat: Flat, over: Sequence[int]):
        self.flat, self.over = flat, over
        self.whole: collections.Counter[Any] = collections.Counter()
        self.rows: list[tuple[_RowValue, int]] = []
        self.steps = 0

    def add(self, v: Atom, power: int) -> _ProductOfFactors:
        self.steps += 1
        step = self.flat.maker.get(v) if is_value(v) else None
        name = step.eqn.primitive.name if step is not None else ""
        if (thin := _thin(self.flat, v, self.over)) is not None:
            self.rows.append((thin, power))
        elif name in ("mul", "div") and step is not None and self.steps < _MOST_FACTORS:
            self.add(step.inputs[0], power).add(step.inputs[1], power if name == "mul" else -power)
        elif name == "convert_element_type" and step is not None and jnp.issubdtype(step.eqn.params["new_dtype"], jnp.floating):
            self.add(step.inputs[0], power)
        elif step is not None and (case := _masked(self.flat, step)) is not None and power == 1:
            self.whole["mask", step.inputs[0], case - 1] += 1
            self.add(step.inputs[case], power)
        else:
            self.whole[v] += power
        return self

    def key(self) -> dict[Any, int]:
        return {v: n for v, n in self.whole.items() if n}


def split_off_row_terms(primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int) -> Any:
    """Another division of a linearized function (see ``residual_cleanup.shrink_residuals``), or None where no sum has a term that
    is the same in a row.

    A product ``sum_j (u a_j + b_j) v_j`` of the tangents ``u`` and ``b`` becomes ``u o + sum_j b_j v_j``, with a value
    ``o = sum_j a_j v_j`` of the forward pass; the values that are stored in addition are small beside ``a``.

    The tangent of a softmax ``p`` is ``p_j (s_j - u)`` with ``u = sum_i p_i s_i``. Its product with the values ``v`` is where this
    finds ``u`` times the attention's result. In the backward pass the sum of p times dp over all keys then is that of the result
    times its cotangent, over the columns of a head: the first gradient of a row does not wait for all keys of the row.
    """
    if _compat.open_parts(primal)[0].effects or all(e.primitive.name != "dot_general" for e in _compat.open_parts(tangent)[0].eqns):
        return None
    flat = Flat(primal)
    sources = flat.residuals(forwarded, results, consts)
    return _RowTerms(flat, Flat(tangent), sources).run(primal, tangent, forwarded, results, consts)


class _RowTerms:
    def __init__(self, primal: Flat, tangent: Flat, sources: list[Atom | None]):
        self.primal, self.tangent, self.sources = primal, tangent, sources
        self.linear = set(tangent.arguments[len(sources) :])
        for step in tangent.steps:
            if not self.linear.isdisjoint(step.values):
                self.linear.update(step.outputs)
        self.reads = collections.Counter(v for step in tangent.steps for v in step.inputs if is_value(v))
        self.source = dict(zip(tangent.arguments, sources, strict=False))
        self.read: dict[int, None] = {}  # values of the forward pass that are stored in addition

    def run(self, primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int) -> Any:
        instead = {step: made for step in self.tangent.steps if (made := self._split_product(step)) is not None}
        if not instead:
            return None
        slots = len(self.sources)
        at = {v: k for k, v in reversed(list(enumerate(self.sources))) if v is not None and is_value(v)}
        new = [v for v in self.read if v not in at]
        places = {v: self.tangent.arguments[at[v]] for v in self.read if v in at}

        def given(f: Term) -> Evaluate:
            return lambda read: [f(read, handed)]

        handed: dict[int, Any] = {}

        def tangents(*arrays: Any) -> list[Any]:
            env = dict(zip(self.tangent.arguments, (*arrays[:slots], *arrays[slots + len(new) :]), strict=True))
            handed.update({v: env[places[v]] for v in places})
            handed.update(zip(new, arrays[slots:], strict=False))
            return self.tangent.evaluate(self.tangent.results, env, {s: given(f) for s, f in instead.items()})

        avals = _compat.in_avals(tangent)
        avals = [*avals[:slots], *(self.primal.avals[v] for v in new), *avals[slots:]]
        numbers = {v: consts + k for k, v in enumerate(self.primal.arguments)}
        stored = [v for v in new if v not in numbers]
        return (
            self.primal.jaxpr_of([*self.primal.results, *stored], self.primal.arguments, primal),
            _compat.without_dead_code(_compat.trace_jaxpr(tangents, avals, like=tangent)),
            (*forwarded, *(numbers.get(v) for v in new)),
        )

    def _is_linear(self, v: Atom) -> bool:
        return is_value(v) and v in self.linear

    def _known(self, v: Atom) -> Atom | None:
        """The value of the forward pass that ``v`` is."""
        return self.source.get(v) if is_value(v) else v

    # --- one product ------------------------------------------------------------------------------------------------------------

    def _split_product(self, step: JaxprStep) -> Term | None:
        """The function that replaces ``step``: of the tangent's values, and of those of the forward pass that are ``read``."""
        if step.eqn.primitive.name != "dot_general" or sum(map(self._is_linear, step.inputs)) != 1:
            return None
        side = int(self._is_linear(step.inputs[1]))
        over = step.eqn.params["dimension_numbers"][0][side]
        x = step.inputs[side]
        if _count(self.tangent.avals[x]) < _TIMES * _count(self.tangent.avals[step.outputs[0]]):
            return None
        split = self._split(x, over, 0)
        if not split.rows or split.rest is None:
            return None
        before = dict(self.read)
        sums = [made for row in split.rows if (made := self._sum(step, side, over, row)) is not None]
        if len(sums) < len(split.rows):
            self.read = before
            return None
        rest = split.rest

        def evaluate(read: Read, handed: dict[int, Any]) -> Any:
            operands = [rest(read) if k == side else read(v) for k, v in enumerate(step.inputs)]
            (total,) = _compat.bind_eqn(step.eqn, operands)
            for made in sums:
                total = lax.add(total, made(read, handed))
            return total

        return evaluate

    def _split(self, x: Atom, over: Sequence[int], depth: int) -> _Split:
        """Tangent ``x``, ``depth`` steps in front of the product, without the terms that have one element in each row.

        A value that several steps read stays whole: it would be made for each of them."""
        whole = _Split(lambda read: read(x))
        step = self.tangent.maker.get(x)
        if (thin := _thin(self.tangent, x, over)) is not None:
            return _Split(None, (_RowTerm(thin),))
        if step is None or depth > _MOST_FACTORS or (depth and self.reads[x] > 1):
            return whole
        name, ins = step.eqn.primitive.name, step.inputs
        if name in ("add_any", "add", "sub") and all(map(self._is_linear, ins)):
            return self._sums(x, [self._split(v, over, depth + 1) for v in ins], name == "sub", whole)
        case = 1 + int(self._is_linear(ins[2])) if name == "select_n" and len(ins) == 3 else None
        if case is not None and _masked(self.tangent, step) != case:
            return whole
        k = next((k for k, v in enumerate(ins) if self._is_linear(v)), None) if case is None else case
        linear = k is not None and self._is_linear(ins[k])
        simple = name in ("neg", "convert_element_type", "select_n", "mul") or name == "div" and k == 0
        if not linear or not simple or sum(map(self._is_linear, ins)) != 1:
            return whole
        assert k is not None
        inner = self._split(ins[k], over, depth + 1)
        if not inner.rows:
            return whole
        rows = tuple(self._times(row, name, ins, k) for row in inner.rows)
        rest = inner.rest
        if rest is None:
            return _Split(None, rows)

        def evaluate(read: Read) -> Any:
            return _compat.bind_eqn(step.eqn, [rest(read) if i == k else read(v) for i, v in enumerate(ins)])[0]

        return _Split(evaluate, rows)

    def _sums(self, x: Atom, parts: Sequence[_Split], negative: bool, whole: _Split) -> _Split:
        rows = [dataclasses.replace(r, sign=-r.sign if negative and k else r.sign) for k, p in enumerate(parts) for r in p.rows]
        rests = [(p.rest, -1 if negative and k else 1) for k, p in enumerate(parts) if p.rest is not None]
        if not rows:
            return whole
        shape = self.tangent.avals[x].shape

        def evaluate(read: Read) -> Any:
            made = [(r(read), sign) for r, sign in rests if r is not None]
            total = None
            for part, sign in made:
                part = jnp.broadcast_to(part if sign > 0 else lax.neg(part), shape)
                total = part if total is None else lax.add(total, part)
            return total

        return _Split(evaluate if rests else None, tuple(rows))

    def _times(self, row: _RowTerm, name: str, ins: Sequence[Atom], k: int) -> _RowTerm:
        if name in ("mul", "div"):
            return dataclasses.replace(row, factors=(*row.factors, (ins[1 - k], 1 if name == "mul" else -1)))
        if name == "select_n":
            return dataclasses.replace(row, masks=(*row.masks, (ins[0], k - 1)))
        return dataclasses.replace(row, sign=-row.sign) if name == "neg" else row

    def _sum(self, step: JaxprStep, side: int, over: Sequence[int], row: _RowTerm) -> Term | None:
        """The term of ``row`` in the product, where a product of the forward pass has its factors."""
        wanted = _ProductOfFactors(self.primal, over)
        for v, power in row.factors:
            known = self._known(v)
            if known is None:
                return None
            wanted.add(known, power)
        for mask, case in row.masks:
            if (known := self._known(mask)) is None:
                return None
            wanted.whole["mask", known, case] += 1
        other = self._known(step.inputs[1 - side])
        for product in self.primal.steps:
            same = product.eqn.primitive.name == "dot_general" and product.inputs[1 - side] == other
            if not same or product.eqn.params["dimension_numbers"] != step.eqn.params["dimension_numbers"]:
                continue
            given = _ProductOfFactors(self.primal, over).add(product.inputs[side], 1)
            if given.key() == wanted.key():
                powers = [*wanted.rows, *((v, -power) for v, power in given.rows)]
                return self._given(step, side, over, row, product.outputs[0], powers)
        return None

    def _given(
        self, step: JaxprStep, side: int, over: Sequence[int], row: _RowTerm, total: int, powers: Sequence[tuple[_RowValue, int]]
    ) -> Term:
        self.read |= dict.fromkeys(v for v in (total, *(thin.v for thin, _ in powers)) if is_value(v))
        shape, rank = self.tangent.avals[step.outputs[0]].shape, len(self.tangent.avals[step.inputs[side]].shape)
        batch = step.eqn.params["dimension_numbers"][1][side]
        free = [d for d in range(rank) if d not in over and d not in batch]
        first = len(batch) if side == 0 else len(shape) - len(free)
        place = {**{d: k for k, d in enumerate(batch)}, **{d: first + k for k, d in enumerate(free)}}

        def in_place(x: Any) -> Any:
            """A factor with one element in each row, as the product has its rows."""
            if not jnp.ndim(x):
                return x
            kept = sorted(place, key=lambda d: place[d])
            narrow = lax.transpose(lax.squeeze(x, over), [sorted(place).index(d) for d in kept])
            return lax.expand_dims(narrow, [k for k in range(len(shape)) if k not in place.values()])

        def evaluate(read: Read, handed: dict[int, Any]) -> Any:
            u = row.u.of(read(row.u.v))
            scale = in_place(u.astype(jnp.float32) if u.dtype.itemsize < 4 else u)
            for thin, power in powers:
                x = thin.of(handed[thin.v] if is_value(thin.v) else jnp.asarray(thin.v.val, thin.v.aval.dtype))
                x = in_place(x).astype(scale.dtype)
                scale = lax.integer_pow(x, power) * scale if power != 1 else x * scale
            made = handed[total].astype(scale.dtype) * (scale if row.sign > 0 else lax.neg(scale))
            return made.astype(self.tangent.avals[step.outputs[0]].dtype)

        return evaluate


def _thin(flat: Flat, v: Atom, over: Sequence[int]) -> _RowValue | None:
    """``v`` if it has one element in each row, or the value that was repeated along the rows to make it."""
    if not is_value(v) or _is_row(flat.avals[v].shape, over):
        return _RowValue(v)
    step = flat.maker.get(v)
    if step is None or step.eqn.primitive.name != "broadcast_in_dim":
        return None
    shape = [1] * len(flat.avals[v].shape)
    dims = tuple(map(int, step.eqn.params["broadcast_dimensions"]))
    for n, d in zip(step.eqn.invars[0].aval.shape, dims, strict=True):
        shape[d] = n
    return _RowValue(step.inputs[0], tuple(shape), dims) if _is_row(shape, over) else None


def _masked(flat: Flat, step: JaxprStep) -> int | None:
    """The operand of a choice that a mask leaves where the other one is 0."""
    if step.eqn.primitive.name != "select_n" or len(step.inputs) != 3:
        return None
    zero = [_is_zero(flat, v) for v in step.inputs[1:]]
    return 2 if zero[0] and not zero[1] else 1 if zero[1] and not zero[0] else None


def _is_zero(flat: Flat, v: Atom) -> bool:
    if not is_value(v):
        return not v.val
    step = flat.maker.get(v)
    return step is not None and step.eqn.primitive.name == "broadcast_in_dim" and _is_zero(flat, step.inputs[0])


def _is_row(shape: Sequence[int], over: Sequence[int]) -> bool:
    return not shape or all(shape[d] == 1 for d in over)


def _count(aval: Any) -> int:
    return math.prod(_compat.assumed_sizes(aval.shape))
