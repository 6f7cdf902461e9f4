"""The bodies of loops and branches that are left to XLA: rewritten when it is known that they are.

Comes in: an equation with bodies, where it stands, and what rewrites a body. Goes out: ``Bodies``, which evaluates the equation.
Invariant: a body that cannot be rewritten stays as it is, and is reported as a ``Failure``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kitsune_jax import _compat
from kitsune_jax.capture.builder import value_of
from kitsune_jax.capture.captured import Origin
from kitsune_jax.capture.equation import bind_in_place
from kitsune_jax.fallbacks import Failure

Rewrite = Callable[[Any], Any]


class Bodies:
    """The equation ``eqn``. ``rewrite`` takes a closed jaxpr and returns one of the same type."""

    def __init__(self, eqn: Any, origin: Origin, rewrite: Rewrite | None):
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
            new = self.rewrite(jaxpr)
            if _types(new) != _types(jaxpr):
                raise ValueError(f"a body of type {_types(jaxpr)} was rewritten to one of type {_types(new)}")
            return new
        except Exception as e:
            failures.append(failure(e, self.eqn, self.origin, "the body of "))
            return jaxpr


def failure(error: Exception, eqn: Any, origin: Origin, part: str = "") -> Failure:
    """``error``, which a rule made of ``eqn``, or of that part of it."""
    line = origin.source
    return Failure.of(error, part + _compat.called(eqn) + (f" ({line})" if line else ""))


def _types(jaxpr: Any) -> list[list[str]]:
    return [[str(value_of(a)) for a in avals] for avals in (_compat.in_avals(jaxpr), _compat.out_avals(jaxpr))]
