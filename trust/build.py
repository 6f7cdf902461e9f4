"""The JAX function of a ``Program``, and the arrays it is called with.

Comes in: a ``Program``. Goes out: its arguments as NumPy arrays, and for any ``wrap`` (``kitsune_jax.pipeline``, or the identity)
the function with its loop and its transformation, ``wrap`` applied where the program says. The function and its reference are the
same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trust.context import Argument, Context, Reader, Recorder, weight
from trust.graphs import GRAPH
from trust.loops import LOOPS
from trust.moves import MOVE
from trust.operators import COMPUTE
from trust.program import Digits, Invalid, Program
from trust.transforms import REVERSE, TRANSFORMS, Callee

Array = Any
Function = Callable[..., Any]
OPERATORS = {**COMPUTE, **MOVE, **GRAPH}
FORWARD_ONLY = ("while", "fori_traced", "while_of_scan")  # loops that JAX cannot differentiate in reverse


@dataclasses.dataclass(frozen=True)
class Built:
    """``function(wrap)`` is called with ``arguments``."""

    function: Callable[[Callable[[Function], Function]], Function]
    arguments: tuple[np.ndarray, ...]
    specs: tuple[Argument, ...]


def build(program: Program) -> Built:
    """The function and arguments of ``program``. Raises ``Invalid`` if plain JAX cannot trace its body either."""
    recorder = Recorder()
    try:
        jax.eval_shape(lambda: _evaluate(program, recorder))
    except Exception as e:  # any error of JAX or an operator for these shapes
        raise Invalid(f"{type(e).__name__}: {e}") from e
    specs = tuple(recorder.demanded)
    if program.spare:
        specs = (*specs, Argument("row", (*program.lead, 3), program.dtype))
    arguments = tuple(_values(program, k, spec) for k, spec in enumerate(specs))
    return Built(lambda wrap: _function(program, specs, wrap), arguments, specs)


def _values(program: Program, k: int, spec: Argument) -> np.ndarray:
    rng = np.random.default_rng([program.seed, k])
    if spec.kind == "index":
        return rng.integers(0, spec.below, spec.shape).astype(spec.dtype)
    if spec.kind == "mask":
        return rng.random(spec.shape) < 0.6
    x = weight(rng, spec.shape) if spec.kind == "param" else rng.standard_normal(spec.shape) * program.magnitude
    return np.asarray(x).astype(jnp.dtype(spec.dtype))


def _evaluate(program: Program, source: Recorder | Reader) -> tuple[Array, ...]:
    c = Context(program, source)
    for _ in range(program.inputs):
        c.add(c.row(program.features))
    for op in program.ops:
        c.start(op.choice)
        v, u = c.rows[-1 - op.first % len(c.rows)], c.rows[op.second % len(c.rows)]
        new = OPERATORS[op.name](c, v, u)
        for value in new if isinstance(new, tuple) else (new,):
            c.add(jnp.asarray(value))
    return tuple(c.all[-1 - k % len(c.all)] for k in program.outputs)


def _function(program: Program, specs: Sequence[Argument], wrap: Callable[[Function], Function]) -> Function:
    def at(place: str) -> Callable[[Function], Function]:
        return wrap if program.pipelined in (place, "all") else lambda f: f

    def body(*args: Array) -> tuple[Array, ...]:
        return _evaluate(program, Reader(args))

    body.__name__ = "trust"
    looped = LOOPS[program.loop](Callee(body, tuple(specs), program), Digits(program.loop_choice), at("body"))
    transform = program.transform
    if program.loop in FORWARD_ONLY and transform in REVERSE:
        transform = "none"
    callee = Callee(at("loop")(looped), tuple(specs), program)
    return at("whole")(TRANSFORMS[transform](callee, Digits(program.transform_choice)))
