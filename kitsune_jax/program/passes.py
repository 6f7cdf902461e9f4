"""Passes over tile programs, for every target.

Comes in: a ``TileProgram``. Goes out: one that computes the same, or facts about it. ``simplified`` drops copies, common
subexpressions and dead code; ``with_biases_first`` and ``with_epilogues`` move biases and activations into matrix products, of
which ``recognise`` finds the activations. ``compared_values`` names the values that must have the same bits wherever they are
computed. ``Flow`` gives the maker and the readers of a value. Invariant: a pass changes results by rounding at most.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy dtype)
import numpy as np

from kitsune_jax.ops.graph import Graph, Param, Scalar, make_params
from kitsune_jax.ops.spec import COMPARISONS, EVERYWHERE, HAND_ON, ROWS, Rounding, is_float
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import EFFECTS, Instr, TileProgram, TileType, Writer, walk

# --- Makers and readers of values -------------------------------------------------------------------------------------------------

VIEWS = frozenset({"broadcast_in_dim", "reshape", "transpose", "rev", "slice"})
Use = tuple[int, int]  # (instruction of the body, operand number)
Types = Sequence[TileType] | Mapping[int, TileType]  # by value


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` without its dimensions of extent 1."""
    return tuple([n for n in shape if n != 1]) if 1 in shape else tuple(shape)


_NAMES = frozenset({"copy", "broadcast_in_dim", "reshape", "transpose", "convert_element_type"})


def is_other_name(values: Types, instr: Instr) -> bool:
    """Whether the result of ``instr`` is its operand, up to dimensions of extent 1."""
    if instr.kind not in _NAMES:
        return False
    x, y = values[instr.inputs[0]], values[instr.outputs[0]]
    if x.dtype != y.dtype or x.tile != y.tile:
        return False
    if instr.kind == "transpose":
        shape = x.rows_first
        moved = [p for p in instr["permutation"] if shape[p] != 1]
        return moved == sorted(moved)
    # Real dimensions go, in order, to real dimensions, and no other is real.
    return squeezed(x.shape) == squeezed(y.shape)


_stationary = functools.lru_cache(maxsize=1024)(functools.partial(TileType, False))


class Flow:
    """The makers and readers of the values of a body: of a stage, of a loop, or of ops of a graph.

    The **root** of a value is the one that it is another name of: the operand of a copy, or of a view that only inserts, drops or
    moves dimensions of extent 1. ``results``: values that are read behind the body, for example by a loop's next iteration.
    ``values``, ``literals``: the types of values, and constants."""

    def __init__(self, values: Types, literals: Iterable[tuple[int, Scalar]], body: Sequence[Instr], results: Sequence[int] = ()):
        self.values, self.body, self.results = values, body, tuple(results)
        self.makers: dict[int, Instr] = {v: instr for instr in body for v in instr.outputs}
        self.places = {v: i for i, instr in enumerate(body) for v in instr.outputs}  # the numbers of the makers
        self.uses: dict[int, list[Use]] = {}  # of a root, by instructions other than names and views of constants
        self.constants: dict[int, Scalar] = dict(literals)
        self._roots: dict[int, int] = {}
        for i, instr in enumerate(body):
            if instr.kind in _NAMES and is_other_name(self.values, instr):
                self._roots[instr.outputs[0]] = self.root(instr.inputs[0])
            elif instr.kind in VIEWS and (constant := self.literal(instr.inputs[0])) is not None:
                self.constants[instr.outputs[0]] = constant  # constants look the same under every view
            else:
                self._read(i, instr.inputs)
                if instr.block is not None:
                    inside = (v for j in walk(instr.block.body) for v in j.reads)
                    self._read(i, (*inside, *instr.block.results), named=False)
        self._read(len(body), self.results)

    @staticmethod
    def of_graph(graph: Graph, ops: Sequence[int], results: Sequence[int]) -> Flow:
        """The flow of the ops number ``ops`` of ``graph``; ``results``: the values that others read as well."""
        body = [Instr(op.kind, op.inputs, op.outputs, op.params) for op in (graph.ops[i] for i in ops)]
        values = {v: graph.values[v] for i in body for v in (*i.inputs, *i.outputs)}
        types = {v: _stationary(value.shape, value.dtype) for v, value in values.items()}
        return Flow(types, [(v, value.literal) for v, value in values.items() if value.literal is not None], body, results)

    def _read(self, i: int, values: Sequence[int], named: bool = True) -> None:
        roots, uses = self._roots, self.uses
        for p, v in enumerate(values):
            uses.setdefault(roots.get(v, v), []).append((i, p if named else -1))

    def type(self, v: int) -> TileType:
        return self.values[v]

    def root(self, v: int) -> int:
        return self._roots.get(v, v)

    def instruction(self, i: int) -> Instr:
        return self.body[i] if i < len(self.body) else Instr("results", self.results, ())

    def readers(self, root: int) -> list[int]:
        return [i for i, _ in self.uses.get(root, ())]

    def literal(self, v: int) -> Scalar | None:
        return self.constants.get(self._roots.get(v, v))

    def shape(self, v: int) -> tuple[int, ...]:
        return squeezed(self.type(v).shape)

    def dtype(self, v: int) -> str:
        return self.type(v).dtype


# --- Copies, common subexpressions and dead code ----------------------------------------------------------------------------------


def simplified(program: TileProgram) -> TileProgram:
    """``program`` without copies, common subexpressions (layer norms compute ``x - x.mean()`` twice), ops that change nothing
    (``jnp.tril`` adds 0 to an index and selects True where a condition is true) and dead code.

    An instruction whose value an earlier one of the same body, or of a body around it, has computed is replaced by that value."""
    once: dict[object, int] = {}
    literals = {v: once.setdefault((program.values[v].dtype, repr(c)), v) for v, c in program.literals}
    return program.with_bodies(lambda body: live(_Names(program, dict(literals)).body(body, {})))


class _Names:
    """``names``: value -> the earlier value that it equals. ``roots``: value -> the one that it is another name of. ``constants``:
    value -> the number that all of its elements are."""

    def __init__(self, program: TileProgram, names: dict[int, int]):
        self.program, self.names, self.roots = program, names, dict[int, int]()
        self.constants = dict(program.literals)

    def body(self, body: Sequence[Instr], known: dict[object, int]) -> tuple[Instr, ...]:
        """``known``: instructions that have been computed before ``body`` -> their values."""
        out = []
        for instr in body:
            if any(v in self.names for v in instr.inputs):
                instr = dataclasses.replace(instr, inputs=tuple(self.names.get(v, v) for v in instr.inputs))
            if instr.block is not None:
                inside = self.body(instr.block.body, dict(known))
                results = tuple(self.names.get(v, v) for v in instr.block.results)
                instr = dataclasses.replace(instr, block=dataclasses.replace(instr.block, body=inside, results=results))
            elif len(instr.outputs) == 1 and instr.kind not in EFFECTS:
                (made,) = instr.outputs
                same = self._before(instr, made, known)
                if same != made:
                    self.names[made] = same
                    continue
            out.append(instr)
        return tuple(out)

    def _before(self, instr: Instr, made: int, known: dict[object, int]) -> int:
        """The value that ``made`` equals: an earlier one, or itself."""
        t = self.program.values[made]
        if instr.kind in VIEWS and instr.inputs[0] in self.constants:
            self.constants[made] = self.constants[instr.inputs[0]]
        if (operand := self._unchanged(instr)) is not None and self.program.values[operand] == t:
            return operand
        key: object = (instr.kind, instr.inputs, instr.params, t)
        if is_other_name(self.program.values, instr):
            root = self.roots[made] = self.roots.get(instr.inputs[0], instr.inputs[0])
            if self.program.values[root] == t:
                return root
            key = (root, t)
        return known.setdefault(key, made)

    def _unchanged(self, instr: Instr) -> int | None:
        """The operand that ``instr`` computes again: x of x + 0, for integers, or c of ``select_n(c, False, True)``."""
        x, *others = instr.inputs or (-1,)
        constants = [self.constants.get(v) for v in others]
        if instr.kind == "add" and self.program.values[x].dtype.startswith(("int", "uint")):
            return x if constants == [0] else others[0] if self.constants.get(x) == 0 else None
        return x if instr.kind == "select_n" and constants == [0, 1] and self.program.values[others[0]].dtype == "bool" else None


def live(body: Sequence[Instr], results: Sequence[int] = ()) -> tuple[Instr, ...]:
    """The instructions of ``body`` that have an effect, or make a value that those or ``results`` need."""
    wanted, kept = set(results), []
    for instr in reversed(body):
        effect = any(i.kind in EFFECTS for i in walk((instr,)))
        if not effect and wanted.isdisjoint(instr.outputs):
            continue
        wanted.update(instr.inputs)
        if instr.block is not None:
            instr = instr.with_body(live(instr.block.body, instr.block.results))
            wanted.update(v for i in walk((instr,)) for v in i.reads)
        kept.append(instr)
    return tuple(reversed(kept))


# --- Values that are compared -----------------------------------------------------------------------------------------------------

EXTREMES = frozenset({"reduce_max", "reduce_min", "run_max"})
_MOVES = frozenset([*(kind for kind, spec in OPS.items() if spec.moves), "take", "cut", "paste", "copy"])
_COMPUTED = frozenset(kind for kind, spec in OPS.items() if spec.family in ("pointwise", "convert"))
_LEAVES = frozenset({"store", "store_slice", "push"})


def compared_values(program: TileProgram) -> frozenset[int]:
    """The values on the way to a comparison of two values, and to a maximum or minimum that leaves the program.

    A maximum's gradient goes to the rows that equal it (``eq(x, max(x))``), and is divided by their count, which must not be 0. The
    two may be in different programs, phases or loops that each compute ``x`` beside other operators. ``x`` has the same bits in all
    of them only if a target rounds every operator on the way to it as its jaxpr says."""
    sources = _Sources(program)
    found = sources.floats_behind(v for i in sources.instrs for v in sources.compared(i))
    left = sources.floats_behind((i.inputs[0] for i in sources.instrs if i.kind in _LEAVES), HAND_ON | {"convert_element_type"})
    largest = (sources.makers[v] for v in left if v in sources.makers)
    return sources.floats_behind(v for i in largest if i.kind in EXTREMES for v in i.inputs[:1]) | found


class _Sources:
    """The operands that each value is computed of. ``makers``: without loops; ``passed``: by loops and queues."""

    def __init__(self, program: TileProgram):
        self.program = program
        self.instrs = [i for stage in program.stages for i in walk(stage.body)]
        self.makers: dict[int, Instr] = {}
        self.passed: dict[int, tuple[int, ...]] = {}
        self.constant = {v for v, _ in program.literals}
        pushed: dict[int, int] = {}
        for i in self.instrs:
            if i.kind == "push":
                pushed[i["queue"]] = i.inputs[0]
            if i.kind in VIEWS and i.inputs[0] in self.constant:
                self.constant.update(i.outputs)
            if i.block is None:
                self.makers.update((v, i) for v in i.outputs)
                continue
            for first, carry, last, after in zip(i.inputs, i.block.carries, i.block.results, i.outputs, strict=True):
                self.passed[carry] = self.passed[after] = (first, last)
        self.passed.update((i.outputs[0], (pushed[i["queue"]],)) for i in self.instrs if i.kind == "pop")

    def compared(self, instr: Instr) -> tuple[int, ...]:
        """Operands of ``instr`` that it compares with another value."""
        if instr.kind in ("sink", "sink_at") and self.program.sinks[instr["sink"]].how in ("max", "min"):
            return instr.inputs[:1]
        x, y = instr.inputs if instr.kind in COMPARISONS else (-1, -1)
        return () if x == y or not self.constant.isdisjoint((x, y)) else (x, y)

    def floats_behind(self, values: Iterable[int], through: frozenset[str] = _COMPUTED) -> frozenset[int]:
        """The floats among ``values``, and those from which operators ``through`` compute them."""
        seen: set[int] = set()
        pending = list(values)
        while pending:
            v = pending.pop()
            if v in seen or v in self.constant or not is_float(self.program.values[v].dtype):
                continue
            seen.add(v)
            pending += self.passed.get(v, ())
            maker = self.makers.get(v)
            if maker is not None and (maker.kind in through or maker.kind in _MOVES or maker.kind in EXTREMES):
                pending += maker.inputs
        return frozenset(seen)


# --- Activations, recognised by what they compute ---------------------------------------------------------------------------------

_MOST_INSTRUCTIONS = 24  # of an activation's definition
_MOST_TERMS = 12  # of a sum
_TOLERANCE = 1e-6  # of a coefficient, for products of constants that were rounded to float32

Frozen = tuple[Any, ...]
Term = tuple[int, tuple[tuple[str, Frozen], ...]]  # power of x, and atoms (function, arguments)
Sum = dict[Term, float]

X: Sum = {(1, ()): 1.0}


@dataclasses.dataclass(frozen=True)
class Recognised:
    """``result``: the value that activation ``name`` with ``parameters`` makes (``reference.instruction_types`` defines them);
    ``absorbed``: the instructions that compute it."""

    name: str
    parameters: tuple[float, ...]
    result: int
    absorbed: tuple[int, ...]


def recognise(flow: Flow, x: int, rounding: Rounding = EVERYWHERE) -> Recognised | None:
    """The longest activation of ``x`` (unless float64) whose inner values, and ``x``, no other instruction reads.

    The instructions are evaluated symbolically, as sums of terms ``coefficient * x**power * atoms``, where an atom is a function of
    such a sum: the logistic function is written with tanh, and erfc with erf, so that equal activations have equal sums. Thus
    ``0.5 * x * (1 + tanh(c * (x + d * x**3)))`` and ``x * logistic(2 * c * (x + d * x**3))`` are both the tanh form of gelu.
    ``with_epilogues`` asks this of stages, the cost model of graphs.

    An activation rounds its result once, so it replaces one operator of a dtype whose results ``rounding`` rounds, or a function
    whose steps the product's epilogue rounds as well: ``x * logistic(x)`` and both forms of ``jax.nn.gelu``.
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
        match = _name(tuple(value.items())) if isinstance(value, dict) else None
        cone = _inner_cone(flow, root, out, makers) if match is not None else None
        fits = match is not None and (match[0] != "scale" or _is_stored(flow, out))
        if match is not None and fits and cone is not None and _rounds_as(flow, cone, match[0], rounding):
            found = Recognised(*match, out, cone)
    return found


def _is_stored(flow: Flow, v: int) -> bool:
    """Whether ``v`` lies in memory in any case: not only elementwise instructions read it, which may take it from a register."""
    for i in flow.readers(flow.root(v)):
        instr = flow.instruction(i)
        if instr.kind in VIEWS or instr.kind == "convert_element_type":
            if _is_stored(flow, instr.outputs[0]):
                return True
        elif instr.kind not in OPS or OPS[instr.kind].family != "pointwise":
            return True
    return False


def _inner_cone(flow: Flow, root: int, result: int, makers: dict[int, int]) -> tuple[int, ...] | None:
    """The instructions that compute ``result``; None where another one reads a value between ``root`` and ``result``."""
    values, work = {result}, [result]
    while work:
        for v in map(flow.root, flow.instruction(makers[work.pop()]).inputs):
            if v in makers and v not in values:
                values.add(v)
                work.append(v)
    cone = {makers[v] for v in values}
    inner = (values | {root}) - {result}
    return tuple(sorted(cone)) if all(i in cone for r in inner for i in flow.readers(r)) else None


def _rounds_as(flow: Flow, cone: tuple[int, ...], name: str, rounding: Rounding) -> bool:
    """Whether activation ``name`` rounds the 16-bit results that ``cone`` rounds."""
    instrs = [i for i in map(flow.instruction, cone) if not is_other_name(flow.values, i)]
    if name == "scale":
        return len(instrs) == 1 and _multiplies(flow, instrs[0])
    rounded = sum(rounding.rounds(i.kind, flow.dtype(i.outputs[0]), tuple(map(flow.literal, i.inputs))) for i in instrs)
    if rounded <= 1:
        return True
    kinds = sorted(i.kind for i in instrs)
    if name == "silu":
        return kinds == ["logistic", "mul"]
    if name == "gelu_tanh":
        return any(_is_chain(flow, instrs, (*cube, *_GELU)) for cube in (("integer_pow",), ("square", "mul")))
    # The epilogue's erfc rounds a float16 before, and takes the digits of a bfloat16.
    dtype = flow.dtype(flow.instruction(cone[0]).outputs[0])
    digits = rounding.takes_digits("erfc", dtype, dtype) == (dtype == "bfloat16")
    return name == "gelu_erf" and digits and kinds in (["erfc", "mul", "mul", "mul"], ["erfc", "mul", "mul", "mul", "neg"])


def _multiplies(flow: Flow, instr: Instr) -> bool:
    """Whether ``instr`` is a product with a constant, or a quotient that has the same bits as one."""
    if instr.kind != "div":
        return instr.kind in ("mul", "neg")
    by = flow.literal(instr.inputs[1])
    return by is not None and abs(math.frexp(by)[0]) == 0.5 and 2.0**-100 <= abs(by) <= 2.0**100


# jax.nn.gelu behind x**3: by a constant, + x, by a constant, tanh, + 1, by a half, by x. Other orders round other values.
_GELU = ("mul", "add", "mul", "tanh", "add", "mul", "mul")


def _is_chain(flow: Flow, instrs: Sequence[Instr], kinds: Sequence[str]) -> bool:
    """Whether ``instrs`` have these kinds in this order, and each reads the one before it; the last but one reads a constant."""
    if [i.kind for i in instrs] != list(kinds):
        return False
    follows = all(
        any(flow.root(v) == flow.root(before.outputs[0]) for v in after.inputs) for before, after in itertools.pairwise(instrs)
    )
    return follows and any(flow.literal(v) is not None for v in instrs[-2].inputs)


# --- evaluation -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Positive:
    """The truth of ``x > 0`` or ``x >= 0``, or its opposite: activations that select by it are continuous at 0."""

    opposite: bool


def _evaluate(flow: Flow, instr: Instr, known: dict[int, Sum | _Positive], dtype: str) -> Sum | _Positive | None:
    """The result of a pointwise instruction on values of ``known`` and constants; None where it is not in this algebra."""
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
        return _Positive(opposite=greater != (a == X)) if (a, b) in ((X, {}), ({}, X)) else None
    if kind == "select_n":
        return _select(args)
    sums = [a for a in args if isinstance(a, dict)]
    if len(sums) != len(args) or flow.dtype(instr.outputs[0]) != dtype:
        return None
    return _applied(kind, instr.params if kind == "integer_pow" else (), tuple([tuple(a.items()) for a in sums]))


@functools.lru_cache(maxsize=4096)
def _applied(kind: str, params: tuple[tuple[str, Param], ...], terms: tuple[Frozen, ...]) -> Sum | None:
    """Instruction ``kind`` on sums of ``terms``: every layer of a network has the same ones."""
    sums = map(dict, terms)
    if kind == "integer_pow":
        return _power(next(sums), dict(params)["y"])
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
    """By a constant, or by 1 + e^z."""
    others = dict(b)
    constant = others.pop((0, ()), 0.0)
    match list(others.items()):
        case [] if constant:
            return _multiply(a, _constant(1.0 / constant))
        case [((0, (("exp", (z,)),)), c)] if _near(constant, 1) and _near(c, 1):
            return _multiply(a, _logistic(_multiply(dict(z), _constant(-1.0))))
    return None


def _logistic(z: Sum) -> Sum:
    """(1 + tanh(z / 2)) / 2"""
    return _add(_constant(0.5), _multiply(_constant(0.5), _atom("tanh", _freeze(_multiply(z, _constant(0.5))))))


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
    "logistic": _logistic,
    "erfc": lambda a: _add(_constant(1.0), _atom("erf", _freeze(a)), -1.0),
    **{kind: lambda a, kind=kind: _atom(kind, _freeze(a)) for kind in ("tanh", "erf", "exp", "expm1")},
}


# --- names ----------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _name(of: Frozen) -> tuple[str, tuple[float, ...]] | None:
    """Name and parameters of the activation that a sum ``of`` these terms is."""
    value: Sum = dict(of)
    if not all(math.isfinite(c) for c in value.values()):
        return None
    terms = dict(value)
    plain = {p: terms.pop((p, ())) for p in (0, 1) if (p, ()) in terms}
    if not terms and set(plain) == {1}:
        return "scale", (plain[1],)
    if len(terms) != 1:
        return None
    (((power, atoms), scale),) = terms.items()
    if power not in (0, 1) or len(atoms) != 1:
        return None
    ((function, arguments),) = atoms
    if function == "where_positive":
        return _where(*arguments) if power == 0 and not plain and _near(scale, 1) else None
    inner = _odd(arguments[0])
    if inner is None or function not in ("tanh", "erf"):
        return None
    a, b = (math.copysign(1, scale) * c for c in inner)  # both functions are odd
    if function == "tanh" and power == 0 and not plain and _near(abs(scale), 1):
        return ("tanh", ()) if (a, b) == (1, 0) else None
    # (1 + f) / 2, times x or not
    if not (_near(abs(scale), 0.5) and set(plain) == {power} and _near(plain[power], 0.5)):
        return None
    if function == "erf":
        return _positive("gelu_erf", a) if power == 1 and b == 0 else None
    a, b = 2 * a, 2 * b  # of the logistic function (``_logistic``)
    if power == 0:
        return ("logistic", ()) if (a, b) == (1, 0) else None
    return _positive("silu", a) if b == 0 else _positive("gelu_tanh", a, b)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE


def _odd(frozen: Frozen) -> tuple[float, float] | None:
    """(a, b) of ``a x + b x^3``."""
    terms = dict(frozen)
    a, b = terms.pop((1, ()), 0.0), terms.pop((3, ()), 0.0)
    return None if terms else (a, b)


def _positive(name: str, *parameters: float) -> tuple[str, tuple[float, ...]] | None:
    return (name, parameters) if all(2.0**-100 <= p <= 2.0**100 for p in parameters) else None


def _where(on_true: Frozen, on_false: Frozen) -> tuple[str, tuple[float, ...]] | None:
    """The activation that is x where x is positive, and ``on_false`` elsewhere."""
    held = _freeze(_atom("where_positive", (), _freeze(X)))  # users clamp e^x so that it does not overflow where not selected
    match on_true, on_false:
        case (((1, ()), 1.0),), (((1, ()), a),):
            return _positive("leaky_relu", a)
        case (((1, ()), 1.0),), (((0, (("expm1", (z,)),)), a),) if z in (_freeze(X), held):
            return _positive("elu", a)
    return None


# --- Biases and activations in matrix products ------------------------------------------------------------------------------------

Makers = Mapping[int, Instr]
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def with_epilogues(program: TileProgram, rounding: Rounding = EVERYWHERE, *, activated: bool = True) -> TileProgram:
    """``program`` with biases and, where ``activated``, activations folded into its products; ``rounding``: of 16-bit results.

    A product whose result is read only by ``[convert] add(bias) [convert] activation [convert]`` becomes a ``matmul`` with the bias
    as third operand and the activation as parameter, computed in its accumulation dtype, rounded once. ``program``: best
    ``simplified``."""
    folding = _Folding(program, rounding, activated)
    folded = program.with_bodies(lambda body: folding.body(body, (), {}))
    return dataclasses.replace(folded, values=tuple(folding.values))


@dataclasses.dataclass(frozen=True)
class _Epilogue:
    """``result``: the value that the product makes now; ``absorbed``: the instructions that this replaces."""

    result: int
    bias: _Bias | None
    activation: str
    parameters: tuple[float, ...]
    absorbed: tuple[int, ...]
    rounds: str  # the dtype to which sums are rounded before the bias is added and before the activation, or float32


@dataclasses.dataclass(frozen=True)
class _Bias:
    """The stationary value ``source``, whose real dimensions lie along dimensions ``along`` of the product's columns."""

    source: int
    along: tuple[int, ...]


class _Folding:
    def __init__(self, program: TileProgram, rounding: Rounding, activated: bool):
        self.program, self.rounding, self.activated = program, rounding, activated
        self.values = list(program.values)

    def body(self, body: Sequence[Instr], results: Sequence[int], around: Makers) -> tuple[Instr, ...]:
        """``around``: makers of the values of the code around a loop's body."""
        flow = Flow(self.program.values, self.program.literals, body, results)
        makers = {**around, **flow.makers}
        found = {i: self._match(flow, makers, i) for i, instr in enumerate(body) if instr.kind == "matmul"}
        found = {i: e for i, e in found.items() if e.absorbed}
        gone = {v for i, e in found.items() for j in (i, *e.absorbed) for v in body[j].outputs}
        absorbed = {j for e in found.values() for j in e.absorbed}
        out: list[Instr] = []
        position = {v: i for i, instr in enumerate(body) for v in instr.outputs}
        moved: set[int] = set()  # values that are now made earlier, for a bias
        for i, instr in enumerate(body):
            if instr.block is not None:
                instr = instr.with_body(self.body(instr.block.body, instr.block.results, makers))
            if i in found:
                bias = found[i].bias
                for j in _chain(flow.makers, bias.source if bias else None):
                    if position[j.outputs[0]] > i and j.outputs[0] not in moved:
                        moved.update(j.outputs)
                        out.append(j)
                out += self._product(instr, found[i])
                gone.discard(found[i].result)
            elif i in absorbed or not moved.isdisjoint(instr.outputs):
                continue
            elif not gone.isdisjoint(instr.inputs):
                gone.update(instr.outputs)  # another name of a value that is no longer made
            else:
                out.append(instr)
        return live(out, results)

    def _product(self, instr: Instr, e: _Epilogue) -> list[Instr]:
        """The product ``instr`` that makes ``e.result``, with instructions that shape its bias and its result."""
        w, after, inputs = Writer(self.values, {}), [], instr.inputs
        (out,), result = instr.outputs, self.values[e.result]
        columns = tuple(self.values[out].shape[d - 1] for d in column_dims(instr, len(self.values[instr.inputs[1]].shape)))
        if e.bias is not None:
            bias, t = e.bias.source, self.values[e.bias.source]
            if t.shape != columns:
                if t.shape != squeezed(t.shape):
                    bias = w.reshape(bias, squeezed(t.shape))
                bias = w.broadcast(bias, TileType(False, columns, t.dtype), e.bias.along)
            inputs = (*inputs, bias)
        made = e.result
        if result.shape != self.values[out].shape:
            made = w.new(dataclasses.replace(self.values[out], dtype=result.dtype))
            after.append(Instr("reshape", (made,), (e.result,), make_params(new_sizes=(ROWS, *result.shape)), instr.op))
        params = make_params(**{**dict(instr.params), "activation": e.activation, "parameters": e.parameters, "rounds": e.rounds})
        return [*w.body, dataclasses.replace(instr, inputs=inputs, outputs=(made,), params=params), *after]

    def _match(self, flow: Flow, makers: Makers, i: int) -> _Epilogue:
        """The longest chain ``[convert] add(bias) [convert] activation [convert]`` after product ``i``, no link read by others."""
        product = flow.body[i]
        (out,) = product.outputs
        current, bias, activation, rounded, rounds = out, None, "none", False, "float32"
        parameters: tuple[float, ...] = ()
        absorbed: list[int] = []
        while flow.dtype(out) in _FLOATS and len(product.inputs) == 2:
            own = flow.dtype(current) if flow.dtype(current) in self.rounding.results else "float32"
            # Sums are rounded both before their bias and before their activation, or nowhere.
            both = bias is None or rounds == own
            if self.activated and activation == "none" and both and not (rounded and own == "float32"):
                found = recognise(flow, current, self.rounding)
                if found is not None:
                    current, activation, parameters, rounds = found.result, found.name, found.parameters, own
                    absorbed.extend(found.absorbed)
            if len(uses := flow.uses.get(flow.root(current), [])) != 1:
                break
            j, p = uses[0]
            instr = flow.instruction(j)
            if len(instr.outputs) != 1 or flow.shape(instr.outputs[0]) != flow.shape(out):
                break
            other = instr.inputs[1 - p] if instr.kind in ("add", "max") else -1
            may_add = instr.kind == "add" and bias is None and activation == "none"
            addend = bias_of(flow, makers, self.program, other, product) if may_add else None
            if instr.kind == "convert_element_type":
                x, y = flow.dtype(instr.inputs[0]), flow.dtype(instr.outputs[0])
                wider = np.dtype(y).itemsize - np.dtype(x).itemsize if {x, y} <= _FLOATS - {"float64"} else None
                if wider is None or wider > 0 and (rounded or rounds == x or not self.rounding.keeps_digits(x, y)):
                    break
                rounded = rounded or wider < 0
            elif addend is not None:
                bias, rounds = addend, own
            elif instr.kind == "max" and self.activated and activation == "none" and flow.literal(other) == 0:
                activation = "relu"
            else:
                break
            absorbed.append(j)
            (current,) = instr.outputs
        return _Epilogue(current, bias, activation, parameters, tuple(absorbed), rounds)


def column_dims(product: Instr, w_rank: int) -> list[int]:
    """The dimensions of a ``matmul``'s rows-first result that are columns: free dimensions of w, ascending in the result."""
    columns = w_rank - len(product["w_contract"]) - len(product["w_batch"])
    perm = product["out_perm"]
    return [d for d, source in enumerate(perm) if source >= len(perm) - columns]


def bias_of(flow: Flow, makers: Makers, program: TileProgram, v: int, product: Instr) -> _Bias | None:
    """``v`` as an addend of the product's result, if it is a loaded stationary array that varies along the columns only."""
    out = flow.type(product.outputs[0])
    if flow.shape(v) != squeezed(out.shape) and (flow.type(v).tile or flow.shape(v)):
        return None
    real = [d for d, n in enumerate(out.shape, 1) if n != 1]
    along = dict(zip(_real(flow, v), real, strict=False))  # real dimensions of ``v``, rows-first -> of the result
    while flow.type(v).tile:
        instr = makers.get(v)
        if instr is None:
            return None
        x = instr.inputs[0] if instr.inputs else -1
        if instr.kind == "convert_element_type" and flow.dtype(x) in ("float16", "bfloat16") and flow.dtype(v) == "float32":
            pass
        elif is_other_name(flow.values, instr):
            along = dict(zip(_real(flow, x), (along[d] for d in sorted(along)), strict=True))
        elif instr.kind == "transpose":
            along = {instr["permutation"][d]: to for d, to in along.items()}
        elif instr.kind == "broadcast_in_dim":
            shape = flow.type(x).rows_first
            along = {k: along[d] for k, d in enumerate(instr["dims"]) if d in along and shape[k] != 1}
        else:
            return None
        v = x
    columns = column_dims(product, len(flow.type(product.inputs[1]).shape))
    places = [columns.index(along[d]) if along[d] in columns else -1 for d in sorted(along)]
    whole = squeezed(flow.type(v).shape) == tuple(out.shape[along[d] - 1] for d in sorted(along))
    if not whole or -1 in places or places != sorted(places) or flow.dtype(v) not in _FLOATS or not _loaded(makers, program, v):
        return None
    return _Bias(v, tuple(places))


def _real(flow: Flow, v: int) -> list[int]:
    """The dimensions of ``v``, rows-first, that are not the rows and not of extent 1."""
    t = flow.type(v)
    return [d for d, n in enumerate(t.shape, int(t.tile)) if n != 1]


def _loaded(makers: Makers, program: TileProgram, v: int) -> bool:
    """Whether ``v`` is an array that depends on no row, with other strides or in another shape, but not copied."""
    chain = _chain(makers, v)
    if not chain or chain[0].kind != "load" or program.inputs[chain[0]["array"]].row_strides:
        return False
    strided = False
    for instr in chain[1:]:
        if instr.kind == "reshape" and strided and not is_other_name(program.values, instr):
            return False
        strided |= instr.kind != "reshape"
    return True


def _chain(makers: Makers, v: int | None) -> list[Instr]:
    """The instruction that makes ``v``, after those that make the values that it is a view of."""
    instr = makers.get(v) if v is not None else None
    if instr is None:
        return []
    return [*(_chain(makers, instr.inputs[0]) if instr.kind in (*VIEWS, "copy") else []), instr]


# --- Biases of sums of two products -----------------------------------------------------------------------------------------------


def with_biases_first(program: TileProgram) -> TileProgram:
    """``program`` with ``(x @ a + h @ b) + bias`` as ``(x @ a + bias) + h @ b``, in float32, where no other instruction reads the
    sum or the products: ``with_epilogues`` then adds the bias for free. ``program`` should be ``simplified``."""
    values = list(program.values)

    def body_of(body: Sequence[Instr], results: Sequence[int], around: Mapping[int, Instr]) -> tuple[Instr, ...]:
        flow = Flow(program.values, program.literals, body, results)
        makers = {**around, **flow.makers}
        moved = {j: found for j, instr in enumerate(body) if (found := _match(flow, makers, program, j, instr)) is not None}
        gone = {id(sums) for sums, *_ in moved.values()}
        out: list[Instr] = []
        for j, instr in enumerate(body):
            if instr.block is not None:
                instr = instr.with_body(body_of(instr.block.body, instr.block.results, makers))
            if j in moved:
                _, product, bias, other = moved[j]
                values.append(flow.type(product))
                out.append(dataclasses.replace(instr, inputs=(product, bias), outputs=(len(values) - 1,)))
                out.append(dataclasses.replace(instr, inputs=(len(values) - 1, other)))
            elif id(instr) not in gone:
                out.append(instr)
        return tuple(out)

    changed = program.with_bodies(lambda body: body_of(body, (), {}))
    return dataclasses.replace(changed, values=tuple(values))


def _match(
    flow: Flow, makers: Mapping[int, Instr], program: TileProgram, j: int, instr: Instr
) -> tuple[Instr, int, int, int] | None:
    """Of ``instr`` = (product + other) + bias: the inner addition, the product, the bias, the other product."""
    if instr.kind != "add" or flow.dtype(instr.outputs[0]) != "float32":
        return None
    for p, (v, bias) in enumerate((instr.inputs, instr.inputs[::-1])):
        inner = flow.makers.get(v)
        if inner is None or inner.kind != "add" or flow.uses.get(v) != [(j, p)]:
            continue
        products = [flow.makers.get(u) for u in inner.inputs]
        if any(m is None or m.kind != "matmul" or len(flow.uses.get(m.outputs[0], ())) != 1 for m in products):
            continue
        first = products[0]
        assert first is not None
        same = flow.type(first.outputs[0]) == flow.type(v) == flow.type(instr.outputs[0])
        if same and len(first.inputs) == 2 and bias_of(flow, makers, program, bias, first) is not None:
            return inner, inner.inputs[0], bias, inner.inputs[1]
    return None
