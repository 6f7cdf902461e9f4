"""The evaluation of a jaxpr with NumPy, primitive by primitive: every result is compared with it.

Comes in: the result of ``jax.make_jaxpr``, and arrays for its arguments. Goes out: arrays for its results. XLA takes no part, so an
error of XLA cannot hide an error of ours. ``widen`` holds every floating value in float64, so that only the rounding of arguments
and literals is left; without it the result of each primitive is rounded to its dtype, as the jaxpr says. ``jitter`` moves results
of arithmetic by up to one rounding: the spread of several such samples is the error that roundings may cause.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from trust.primitives import EXACT, PRIMITIVES, SEVERAL, Unknown

Array = Any
STEPS = 1000  # rounds of a while loop: every loop that is drawn ends after a few


class Endless(Exception):
    """A while loop of the reference does not end: its description is wrong."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """``widen``: floating values are float64. ``jitter``: the generator of extra roundings, or ``None``."""

    widen: bool = False
    jitter: np.random.Generator | None = None

    def held(self, x: Array, dtype: Any, exact: bool = True) -> Array:
        """``x`` as a value of ``dtype`` is held."""
        x = np.asarray(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            return x.astype(dtype)
        if self.widen:
            return x.astype(np.float64)
        if self.jitter is not None and not exact and x.size:
            eps = float(jnp.finfo(dtype).eps)
            x = x.astype(np.float64) * (1 + 0.5 * eps * self.jitter.integers(-1, 2, x.shape))
        return x.astype(dtype)


def evaluate(closed: Any, args: Sequence[Array], arithmetic: Arithmetic) -> list[Array]:
    """The results of ``closed`` on ``args``.

    Raises:
      Unknown: a primitive has no entry in ``PRIMITIVES``. Endless: a loop runs for more than ``STEPS`` rounds.
    """
    with np.errstate(all="ignore"):
        return _run(closed, [arithmetic.held(a, a.dtype) for a in map(np.asarray, args)], arithmetic)


def roundest(closed: Any) -> float:
    """The largest rounding (epsilon) of a floating dtype anywhere in ``closed``; 0 without floats."""
    jaxpr = _open(closed)[0]
    found = [0.0]
    for eqn in jaxpr.eqns:
        for v in (*eqn.invars, *eqn.outvars):
            if jnp.issubdtype(v.aval.dtype, jnp.floating):
                found.append(float(jnp.finfo(v.aval.dtype).eps))
        found += [roundest(inner) for inner in inner_jaxprs(eqn)]
    return max(found)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    values = (v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,)))
    return [v for v in values if type(v).__name__ in ("Jaxpr", "ClosedJaxpr")]


def _open(closed: Any) -> tuple[Any, list[Any]]:
    if type(closed).__name__ == "ClosedJaxpr":
        return closed.jaxpr, list(closed.consts)
    return closed, list(getattr(closed, "consts", ()) or ())


def _run(closed: Any, args: Sequence[Array], arithmetic: Arithmetic) -> list[Array]:
    jaxpr, consts = _open(closed)
    env: dict[Any, Array] = {}
    for v, x in zip(jaxpr.constvars, consts, strict=True):
        env[v] = arithmetic.held(x, v.aval.dtype)
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Array:
        return arithmetic.held(np.asarray(v.val, v.aval.dtype), v.aval.dtype) if hasattr(v, "val") else env[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in CONTROL:
            outs = CONTROL[name](eqn.params, operands, arithmetic)
        elif name in PRIMITIVES:
            if not arithmetic.widen and name not in SEVERAL:  # NumPy would round each step of a sum to 16 bits
                operands = [x.astype(np.float32) if _is_short(x.dtype) else x for x in operands]
            outs = PRIMITIVES[name](eqn.params, *operands)
            outs = outs if isinstance(outs, list) else [outs]
        elif inner := next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None):
            outs = _run(inner, operands, arithmetic)
        else:
            raise Unknown(name)
        for v, x in zip(eqn.outvars, outs, strict=True):
            if np.shape(x) != v.aval.shape:
                raise AssertionError(f"{name}: {np.shape(x)} instead of {v.aval.shape}")
            env[v] = arithmetic.held(x, v.aval.dtype, exact=name in EXACT or name in CONTROL or name not in PRIMITIVES)
    return [read(v) for v in jaxpr.outvars]


def _is_short(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize == 2


def _while(params: dict[str, Any], operands: list[Array], arithmetic: Arithmetic) -> list[Array]:
    a, b = params["cond_nconsts"], params["body_nconsts"]
    for_cond, for_body, carry = operands[:a], operands[a : a + b], operands[a + b :]
    for _ in range(STEPS):
        goes_on = _run(params["cond_jaxpr"], [*for_cond, *carry], arithmetic)[0]
        if not goes_on.any():
            return carry
        new = _run(params["body_jaxpr"], [*for_body, *carry], arithmetic)
        # Under vmap each example has its own predicate: examples that have ended keep their carry.
        carry = [
            np.where(goes_on.reshape(goes_on.shape + (1,) * (a.ndim - goes_on.ndim)), b, a) for a, b in zip(carry, new, strict=True)
        ]
    raise Endless


def _scan(params: dict[str, Any], operands: list[Array], arithmetic: Arithmetic) -> list[Array]:
    if "num_consts" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        consts, carries = (len(part) for part in params["ft_in"].unpack()[:2])
    carry, xs = operands[consts : consts + carries], operands[consts + carries :]
    steps = range(params["length"])
    collected: list[list[Array]] = []
    for i in reversed(steps) if params["reverse"] else steps:
        outs = _run(params["jaxpr"], [*operands[:consts], *carry, *(x[i] for x in xs)], arithmetic)
        carry = outs[:carries]
        collected.append(outs[carries:])
    if params["reverse"]:
        collected.reverse()
    if collected:
        return [*carry, *(np.stack(ys) for ys in zip(*collected, strict=True))]
    avals = [v.aval for v in _open(params["jaxpr"])[0].outvars[carries:]]
    return [*carry, *(arithmetic.held(np.zeros((0, *a.shape)), a.dtype) for a in avals)]


def _cond(params: dict[str, Any], operands: list[Array], arithmetic: Arithmetic) -> list[Array]:
    which = int(np.clip(int(operands[0]), 0, len(params["branches"]) - 1))
    return _run(params["branches"][which], operands[1:], arithmetic)


CONTROL = {"while": _while, "scan": _scan, "cond": _cond}
