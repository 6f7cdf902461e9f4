"""A jaxpr with the calls in it seen through: steps that read and make numbered values.

Comes in: a closed jaxpr. Goes out: a ``Flat``, and what it makes of arrays. Invariants: every equation is evaluated with its own
parameters, name stack, source line and mesh; only calls that say nothing about placement or compilation are seen through, and the
body of a function with a derivative of its own is not.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kitsune_jax import _compat
from kitsune_jax.capture.captured import Origin
from kitsune_jax.capture.jaxpr import why_not_inlined

_CALLS = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CALLS |= {f"vjp_node[{name}]": body for name, body in _CALLS.items()}  # as linearization for a gradient writes them

Atom = Any  # a value, by its number, or a literal of JAX's
Evaluate = Callable[[Callable[[Atom], Any]], Sequence[Any]]  # what reads a value -> the results of a step


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
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
    """``avals[v]``: the type of value ``v``. ``constants``: arrays that the jaxpr holds. ``maker[v]``: the step that makes it."""

    def __init__(self, closed: Any):
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.steps: list[Step] = []
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
                self.steps.append(Step(Origin((*around, eqn)), inputs, tuple(outs)))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [v if _compat.is_literal(v) else env[v] for v in jaxpr.outvars]

    def needed(self, wanted: Collection[Atom], known: Collection[int]) -> list[Step]:
        """The steps that make ``wanted`` of what is ``known``, in order."""
        alive = {v for v in wanted if is_value(v) and v not in known}
        steps = []
        for step in reversed(self.steps):
            if not alive.isdisjoint(step.outputs):
                steps.append(step)
                alive.update(v for v in step.values if v not in known)
        return steps[::-1]

    def evaluate(
        self, wanted: Sequence[Atom], known: Mapping[int, Any], instead: Mapping[Step, Evaluate] = types.MappingProxyType({})
    ) -> list[Any]:
        """The ``wanted`` values made of those that are ``known``, which are arrays or tracers. ``instead``: what some steps are
        evaluated by; it reads values of the steps before."""
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


def renamed(eqn: Any, names: Mapping[Any, Any]) -> Any:
    """``eqn`` with other variables in the place of those in ``names``."""

    def name(v: Any) -> Any:
        return v if _compat.is_literal(v) else names.get(v, v)

    return eqn.replace(invars=[name(v) for v in eqn.invars], outvars=[name(v) for v in eqn.outvars])
