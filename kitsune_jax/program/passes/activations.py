"""Activations that a matrix product applies to its sums: recognised by what they compute, however they are spelled.

Comes in: a value, the result of a product with its bias. Goes out: the activation that everything between it and one later value
computes. ``with_epilogues`` asks this of the bodies of stages, and the cost model of the graph that it plans (``flow.of_graph``).

The instructions in between are evaluated symbolically, as sums of terms ``coefficient * x**power * atoms`` where an atom is a
function of such a sum; equal activations have equal sums. Examples: ``0.5 * x * (1 + tanh(c * (x + d * x**3)))`` and
``x * logistic(2 * c * (x + d * x * x * x))`` are both the tanh form of gelu.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from kitsune_jax.graph import Param
from kitsune_jax.ops.rounding import EVERYWHERE, Rounding
from kitsune_jax.program.ir import Instr
from kitsune_jax.program.passes.flow import Flow

_MOST_INSTRUCTIONS = 24  # of an activation's definition
_MOST_TERMS = 12  # of a sum
_TOLERANCE = 1e-6  # of a coefficient: products of constants that were rounded to float32


PARAMETERS = {  # activation -> how many it has; x is the sum that it is applied to
    "none": 0,  # x
    "relu": 0,  # max(x, 0)
    "leaky_relu": 1,  # x where it is positive, else a x
    "elu": 1,  # x where it is positive, else a (e**x - 1)
    "logistic": 0,
    "tanh": 0,
    "silu": 1,  # x logistic(a x)
    "gelu_tanh": 2,  # x logistic(a x + b x**3)
    "gelu_erf": 1,  # x (1 + erf(a x)) / 2
}

Frozen = tuple[object, ...]
Term = tuple[int, tuple[tuple[str, Frozen], ...]]  # power of x, and atoms (function, arguments)
Sum = dict[Term, float]

X: Sum = {(1, ()): 1.0}
_FUNCTIONS = frozenset({"tanh", "logistic", "erf", "erfc", "exp", "expm1"})


@dataclasses.dataclass(frozen=True)
class Recognised:
    """``result`` is the value that activation ``name`` with ``parameters`` makes; the instructions ``absorbed`` compute it."""

    name: str
    parameters: tuple[float, ...]
    result: int
    absorbed: tuple[int, ...]


def recognise(flow: Flow, x: int, rounding: Rounding = EVERYWHERE) -> Recognised | None:
    """The longest activation of ``x`` (not of a float64 one) whose inner values, ``x`` among them, nothing else reads.

    An activation rounds its result once, so it stands for one operator of a dtype whose results ``rounding`` rounds, or for
    ``x * logistic(x)``, of which the product's epilogue rounds both.
    """
    dtype = flow.dtype(x)
    if dtype == "float64":
        return None
    shape = flow.shape(x)
    root = flow.root(x)
    known: dict[int, Sum | _Positive] = {root: X}
    makers: dict[int, int] = {}
    queue = sorted(set(flow.readers(root)))
    found = None
    while queue and len(makers) < _MOST_INSTRUCTIONS:
        i = queue.pop(0)
        instr = flow.instruction(i)
        value = None
        if len(instr.outputs) == 1 and flow.shape(instr.outputs[0]) == shape:
            value = _evaluate(flow, instr, known, dtype)
        if value is None or (isinstance(value, dict) and len(value) > _MOST_TERMS):
            continue
        out = instr.outputs[0]
        known[out], makers[out] = value, i
        queue = sorted({*queue, *flow.readers(out)})
        match = _name(value) if isinstance(value, dict) else None
        cone = _closed(flow, root, out, makers) if match is not None else None
        if match is not None and cone is not None and _rounds_alike(flow, cone, match, rounding):
            found = Recognised(*match, out, cone)
    return found


def _closed(flow: Flow, root: int, result: int, makers: dict[int, int]) -> tuple[int, ...] | None:
    """The instructions that ``result`` takes; None where another one reads a value between ``root`` and ``result``."""
    cone: set[int] = set()
    values = {result}
    todo = [result]
    while todo:
        i = makers[todo.pop()]
        cone.add(i)
        for v in flow.instruction(i).inputs:
            r = flow.root(v)
            if r in makers and r not in values:
                values.add(r)
                todo.append(r)
    inner = (values | {root}) - {result}
    return tuple(sorted(cone)) if all(i in cone for r in inner for i in flow.readers(r)) else None


def _rounds_alike(flow: Flow, cone: tuple[int, ...], match: tuple[str, tuple[float, ...]], rounding: Rounding) -> bool:
    """Does the activation ``match`` have the roundings of the instructions ``cone``, which it stands for?"""
    instrs = [flow.instruction(i) for i in cone]
    rounded = [
        i.kind for i in instrs if rounding.rounds(i.kind, flow.dtype(i.outputs[0]), tuple(flow.literal(v) for v in i.inputs))
    ]
    return len(rounded) <= 1 or (match == ("silu", (1.0,)) and sorted(rounded) == ["logistic", "mul"])


# ---- evaluation


@dataclasses.dataclass(frozen=True)
class _Positive:
    """The truth of ``x > 0`` or ``x >= 0``, or the opposite. Activations that choose by it are continuous: 0 is on either side."""

    opposite: bool


def _evaluate(flow: Flow, instr: Instr, known: dict[int, Sum | _Positive], dtype: str) -> Sum | _Positive | None:
    """The result of a pointwise instruction on values of ``known`` and constants; None where it is not of this algebra."""
    args: list[Sum | _Positive] = []
    for v in instr.inputs:
        literal = flow.literal(v)
        if (value := known.get(flow.root(v))) is not None:
            args.append(value)
        elif literal is not None and flow.dtype(v) == dtype:
            args.append(_constant(float(literal)))
        else:
            return None
    kind = instr.kind
    if kind in ("gt", "ge", "lt", "le"):
        a, b = args
        greater = kind in ("gt", "ge")
        if (a, b) == (X, {}):
            return _Positive(opposite=not greater)
        return _Positive(opposite=greater) if (a, b) == ({}, X) else None
    if kind == "select_n":
        return _select(args)
    sums = [a for a in args if isinstance(a, dict)]
    if len(sums) != len(args) or flow.dtype(instr.outputs[0]) != dtype:
        return None
    if kind == "integer_pow":
        return _power(sums[0], instr["y"])
    if kind in _FUNCTIONS:
        return _atom(kind, _freeze(sums[0]))
    rule = _RULES.get(kind)
    return None if rule is None else rule(*sums)


def _constant(c: float) -> Sum:
    return {(0, ()): c} if c != 0 else {}


def _freeze(a: Sum) -> Frozen:
    return tuple(sorted(a.items(), key=repr))


def _atom(name: str, *arguments: Frozen) -> Sum:
    return {(0, ((name, arguments),)): 1.0}


def _add(a: Sum, b: Sum, sign: float = 1.0) -> Sum:
    out = dict(a)
    for term, c in b.items():
        out[term] = out.get(term, 0.0) + sign * c
    return {term: c for term, c in out.items() if c != 0}


def _multiply(a: Sum, b: Sum) -> Sum:
    out: Sum = {}
    for (p, atoms), c in a.items():
        for (q, more), d in b.items():
            term = p + q, tuple(sorted((*atoms, *more), key=repr))
            out[term] = out.get(term, 0.0) + c * d
    return out


def _divide(a: Sum, b: Sum) -> Sum | None:
    if not b:
        return None
    if set(b) == {(0, ())}:
        return _multiply(a, _constant(1.0 / b[0, ()]))
    return _multiply(a, _atom("inverse", _freeze(b)))


def _power(a: Sum, y: Param) -> Sum | None:
    if not isinstance(y, int) or not 1 <= y <= 4:
        return None
    out = a
    for _ in range(y - 1):
        out = _multiply(out, a)
        if len(out) > _MOST_TERMS:
            return None
    return out


def _select(args: list[Sum | _Positive]) -> Sum | None:
    pred, on_false, on_true = args
    if not isinstance(pred, _Positive) or not isinstance(on_false, dict) or not isinstance(on_true, dict):
        return None
    if pred.opposite:
        on_true, on_false = on_false, on_true
    return _atom("where_positive", _freeze(on_true), _freeze(on_false))


_RULES: dict[str, Callable[..., Sum | None]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, b, -1.0),
    "neg": lambda a: _multiply(a, _constant(-1.0)),
    "mul": _multiply,
    "div": _divide,
    "square": lambda a: _multiply(a, a),
}


# ---- names


def _name(value: Sum) -> tuple[str, tuple[float, ...]] | None:
    """Name and parameters of the activation that ``value`` is."""
    if not all(math.isfinite(c) for c in value.values()):
        return None
    terms = dict(value)
    plain = {p: terms.pop((p, ())) for p in (0, 1) if (p, ()) in terms}
    if len(terms) != 1:
        return None
    (((power, atoms), scale),) = terms.items()
    if power not in (0, 1) or len(atoms) != 1:
        return None
    ((function, arguments),) = atoms
    if not plain:
        return _alone(function, arguments, power, scale)
    # (1 + f) / 2, times x or not
    if not (_near(scale, 0.5) and set(plain) == {power} and _near(plain[power], 0.5)):
        return None
    inner = _odd(arguments[0])
    if inner is None:
        return None
    if function == "tanh":
        return _sigmoid(power, 2 * inner[0], 2 * inner[1])
    return _positive("gelu_erf", inner[0]) if function == "erf" and power == 1 and inner[1] == 0 else None


def _alone(function: str, arguments: tuple[object, ...], power: int, scale: float) -> tuple[str, tuple[float, ...]] | None:
    """The activation ``scale * x**power * function(arguments)``."""
    if function == "where_positive" and power == 0 and _near(scale, 1):
        return _where(*arguments)
    inner = _odd(arguments[0])
    if function == "erfc" and power == 1 and _near(scale, 0.5) and inner is not None and inner[1] == 0:
        return _positive("gelu_erf", -inner[0])
    if not _near(scale, 1):
        return None
    if function == "tanh" and power == 0:
        return ("tanh", ()) if inner == (1, 0) else None
    if function == "logistic" and inner is not None:
        return _sigmoid(power, *inner)
    if function == "inverse":  # of 1 + e^-ax
        terms = dict(_terms(arguments[0]))
        if not _near(terms.pop((0, ()), 0.0), 1) or len(terms) != 1:
            return None
        (((p, atoms), c),) = terms.items()
        if p == 0 and len(atoms) == 1 and atoms[0][0] == "exp" and _near(c, 1):
            inner = _odd(atoms[0][1][0])
            return None if inner is None else _sigmoid(power, -inner[0], -inner[1])
    return None


def _terms(frozen: object) -> Sum:
    return dict(frozen)  # type: ignore[call-overload, no-any-return]


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE


def _odd(frozen: object) -> tuple[float, float] | None:
    """(a, b) of ``a x + b x^3``."""
    terms = dict(_terms(frozen))
    a, b = terms.pop((1, ()), 0.0), terms.pop((3, ()), 0.0)
    return None if terms else (a, b)


def _positive(name: str, *parameters: float) -> tuple[str, tuple[float, ...]] | None:
    return (name, parameters) if all(2.0**-100 <= p <= 2.0**100 for p in parameters) else None


def _sigmoid(power: int, a: float, b: float) -> tuple[str, tuple[float, ...]] | None:
    """x**power times the logistic function of ``a x + b x^3``."""
    if power == 0:
        return ("logistic", ()) if (a, b) == (1, 0) else None
    return _positive("silu", a) if b == 0 else _positive("gelu_tanh", a, b)


def _where(on_true: object, on_false: object) -> tuple[str, tuple[float, ...]] | None:
    """x where it is positive, and something else elsewhere."""
    if _terms(on_true) != X:
        return None
    terms = _terms(on_false)
    if len(terms) != 1:
        return None
    (((power, atoms), a),) = terms.items()
    if not 2.0**-100 <= a <= 2.0**100:
        return None
    if power == 1 and not atoms:
        return "leaky_relu", (a,)
    held = _freeze(_atom("where_positive", (), _freeze(X)))  # users keep e^x from overflowing where it is not chosen
    if power == 0 and len(atoms) == 1 and atoms[0][0] == "expm1" and atoms[0][1][0] in (_freeze(X), held):
        return "elu", (a,)
    return None
