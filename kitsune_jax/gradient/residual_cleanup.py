"""Residuals: which values the forward pass stores for the backward pass, and which the backward pass computes again.

Comes in: the two jaxprs that linearization makes of a function, where residuals are results of the first and arguments of the
second. Goes out: the same with fewer bytes between them. Invariant: the backward pass repeats equations as they are, so it has the
same numbers as before, up to the order in which a product is summed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from kitsune_jax import _compat
from kitsune_jax.gradient.softmax_terms import (
    Flat,
    Forwarded,
    JaxprStep,
    is_value,
    rename_all,
    renamed,
    split_off_row_terms,
)
from kitsune_jax.ops.spec import COMPARISONS
from kitsune_jax.ops.table import OPS

# --- values much larger than their sources: recomputed in the backward pass -------------------------------------------------------

Division = tuple[Any, Any, Forwarded]  # primal, tangent, forwarded

# A value that is computed again is at least so many times larger than its sources, and than the operands of a product on the way:
# scores of 512 keys, of heads of 64. (A layer that is that much wider than its input is a product of few terms.)
_TIMES, _TIMES_OPERANDS = 4, 8
# At most so many operations of products for each byte that is not stored: a head of 256 columns in float32.
_FLOPS_PER_BYTE = 128
# More steps than this are no longer cheap beside the product.
_MOST_STEPS = 64

_ELEMENTWISE = frozenset(
    kind for kind, spec in OPS.items() if spec.moves or (spec.family in ("pointwise", "convert") and spec.flops <= 64)
)
_REPEATED = _ELEMENTWISE | {
    *("squeeze", "stack", "split", "unstack", "tile", "one_minus_square", "log2", "stop_gradient", "copy_p", "name", "dot_general"),
    *("random_wrap", "random_unwrap", "random_seed", "random_split", "random_fold_in"),
}
_EXTREMES = frozenset({"reduce_max", "reduce_min", "cummax", "cummin"})
_VIEWS = frozenset({"reshape", "broadcast_in_dim", "squeeze", "transpose", "stop_gradient", "copy", "copy_p", "name"})
_BITS = frozenset({"random_bits", "threefry2x32"})  # some sixty operations for each number


def recompute_large(primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int) -> Division | None:
    """Another division of a linearized function (see ``shrink_residuals``), in which the backward pass recomputes large
    intermediates, such as attention scores, from small values; None where no residual is much larger than its sources.

    The scores of an attention have a number for each pair of a query and a key. They are one product of the queries and the keys,
    and elementwise work on it with the statistics of each row (its largest score, its sum), masks and biases. All of these are
    small beside the scores, so they are stored instead, in at most a quarter of the bytes. Nothing here looks for an attention:
    pairwise distances, or an outer product, are such arrays too. A comparison that asks which numbers equal others, or their
    maximum, is not repeated.
    """
    jaxpr, _ = _compat.open_parts(primal)
    if jaxpr.effects or not any(f is None for f in forwarded):
        return None
    flat = Flat(primal)
    sources = flat.residuals(forwarded, results, consts)
    choice = _ResidualChoice(flat, sources, results, bits=False)
    with_bits = _ResidualChoice(flat, sources, results, bits=True)
    if 2 * with_bits.bytes < choice.bytes:  # the bits take more memory than all the rest
        choice = with_bits
    return _rebuilt(primal, tangent, flat, sources, forwarded, consts, choice) if choice.gone else None


@dataclasses.dataclass
class _Chain:
    """How a value is computed again: from ``leaves``, by ``steps``."""

    leaves: dict[int, None] = dataclasses.field(default_factory=dict)
    steps: dict[JaxprStep, None] = dataclasses.field(default_factory=dict)


class _ResidualChoice:
    """The residuals that are ``gone``, and the ``leaves`` that are stored for them, beside the residuals that stay. ``bits``:
    random bits may be computed again. ``bytes``: of all stored values."""

    def __init__(self, flat: Flat, sources: list[Any], results: int, *, bits: bool):
        self.flat = flat
        self.repeated = _REPEATED | _BITS if bits else _REPEATED
        self.arguments = set(flat.arguments)
        in_memory = {*flat.arguments, *(v for v in flat.results[:results] if is_value(v))}
        values = dict.fromkeys(v for v in sources if v is not None and is_value(v))
        candidates = [v for v in values if v not in in_memory and v in flat.maker]
        self.kept = {v for v in values if v not in candidates}
        self.gone: dict[int, None] = {}
        self.leaves: dict[int, None] = {}
        self.steps: set[JaxprStep] = set()
        # A source of another value comes first: if it stays, it may be read.
        for v in sorted(candidates, key=lambda v: (self._bytes(v), v)):
            chain = self._chain(v)
            if chain is None:
                self.kept.add(v)
            else:
                self.gone[v] = None
                self.leaves |= chain.leaves
                self.steps |= chain.steps.keys()
        self.leaves = {v: None for v in self.leaves if v not in self.kept}
        self.bytes = sum(map(self._bytes, (*self.kept, *self.leaves)))

    def _bytes(self, v: int) -> int:
        return _bytes(self.flat.avals[v])

    def _chain(self, root: int) -> _Chain | None:
        """How ``root`` is computed again, or None where that is not worth it."""
        chain, limit = _Chain(), self._bytes(root) // _TIMES
        if not self._visit(root, chain, limit):
            return None
        if sum(self._bytes(v) for v in chain.leaves if v not in self.kept and v not in self.arguments) > limit:
            return None
        products = [s for s in chain.steps if s.eqn.primitive.name == "dot_general"]
        if not products and any(self._bytes(v) > limit for v in chain.leaves):
            return None
        flops = sum(_flops(s.eqn) for s in products if s not in self.steps)
        return chain if flops <= _FLOPS_PER_BYTE * self._bytes(root) else None

    def _visit(self, v: int, chain: _Chain, limit: int) -> bool:
        """Add the sources and steps of ``v`` to ``chain``. False where some of them are neither small nor cheap to repeat."""
        step = self.flat.maker.get(v)
        if step is None or not self._is_repeated(step):
            return False
        if step.eqn.primitive.name == "dot_general" and _TIMES_OPERANDS * max(map(self._bytes, step.values)) > self._bytes(v):
            return False
        chain.steps[step] = None
        if len(chain.steps) > _MOST_STEPS:
            return False
        for x in step.values:
            if x in chain.leaves or self.flat.maker.get(x) in chain.steps:
                continue
            if x in self.arguments or (x in self.kept and self._bytes(x) <= limit):
                chain.leaves[x] = None
            elif self._bytes(x) <= limit:
                self._add_small(x, chain)
            elif not self._visit(x, chain, limit):
                return False
        return True

    def _add_small(self, v: int, chain: _Chain) -> None:
        """Store ``v``, or repeat the steps that make it of values that are stored anyway, if they take no product."""
        trial = _Chain(dict(chain.leaves), dict(chain.steps))
        if self._repeat_freely(v, trial):
            chain.leaves, chain.steps = trial.leaves, trial.steps
        else:
            chain.leaves[v] = None

    def _repeat_freely(self, v: int, chain: _Chain) -> bool:
        if v in self.arguments or v in self.kept:
            chain.leaves[v] = None
            return True
        step = self.flat.maker.get(v)
        if step is None or step.eqn.primitive.name == "dot_general" or not self._is_repeated(step):
            return False
        if step in chain.steps:
            return True
        chain.steps[step] = None
        return len(chain.steps) <= _MOST_STEPS and all(self._repeat_freely(x, chain) for x in step.values)

    def _asks_for_equals(self, step: JaxprStep) -> bool:
        """Does it ask which numbers equal others, or are as large as the largest? Computed again by a product whose sums have
        another order, the largest would not equal itself."""
        name = step.eqn.primitive.name
        if name not in COMPARISONS or len(step.values) < 2 or not jnp.issubdtype(step.eqn.invars[0].aval.dtype, jnp.inexact):
            return False
        return name in ("eq", "ne") or any(map(self._is_extreme, step.values))

    def _is_extreme(self, v: int) -> bool:
        step = self.flat.maker.get(v)
        while step is not None and step.values and step.eqn.primitive.name in _VIEWS:
            step = self.flat.maker.get(step.values[0])
        return step is not None and step.eqn.primitive.name in _EXTREMES

    def _is_repeated(self, step: JaxprStep) -> bool:
        eqn = step.eqn
        if eqn.effects or self._asks_for_equals(step):
            return False
        return eqn.primitive.name in self.repeated or eqn.primitive.name == "custom_jvp_call" and _is_elementwise(eqn)


def _is_elementwise(eqn: Any) -> bool:
    """Has the body of a function with a derivative of its own (``relu``, say) elementwise steps only?"""
    return all(e.primitive.name in _ELEMENTWISE for e in _equations(eqn.params["call_jaxpr"]))


def _equations(closed: Any) -> Iterator[Any]:
    for eqn in _compat.open_parts(closed)[0].eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        if inner is None:
            yield eqn
        else:
            yield from _equations(inner)


def _flops(eqn: Any) -> float:
    """Operations of a product."""
    (contract, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2.0 * math.prod(_compat.assumed_sizes([*eqn.outvars[0].aval.shape, *(shape[d] for d in contract)]))


def _rebuilt(
    primal: Any, tangent: Any, flat: Flat, sources: list[Any], forwarded: Forwarded, consts: int, choice: _ResidualChoice
) -> Division | None:
    jaxpr, _ = _compat.open_parts(tangent)
    slots = list(jaxpr.invars[: len(forwarded)])
    gone, leaves = list(choice.gone), list(dict.fromkeys(_read(flat, choice)))
    repeated, constants = _compat.open_parts(flat.jaxpr_of(gone, leaves, tangent))
    if constants:  # arrays that an equation holds, and that no residual could pass on
        return None
    stay = [k for k, v in enumerate(sources) if v is None or not is_value(v) or v not in choice.gone]
    numbers = {v: consts + k for k, v in enumerate(flat.arguments)}
    # A leaf that is a residual already keeps its argument.
    at = {sources[k]: slots[k] for k in reversed(stay) if sources[k] is not None and is_value(sources[k])}
    new = [v for v in leaves if v not in at]
    names = {var: at[v] for var, v in zip(repeated.invars, leaves, strict=True) if v in at}
    eqns = [renamed(e, names) for e in repeated.eqns]
    made = dict(zip(gone, rename_all(repeated.outvars, names), strict=True))
    replaced = {slot: made[v] for slot, v in zip(slots, sources, strict=True) if v is not None and is_value(v) and v in made}
    rest = [renamed(e, replaced) for e in jaxpr.eqns]
    outs = rename_all(jaxpr.outvars, replaced)
    fresh = [repeated.invars[leaves.index(v)] for v in new]
    invars = [*(slots[k] for k in stay), *fresh, *jaxpr.invars[len(slots) :]]
    passed = (*(forwarded[k] for k in stay), *(numbers.get(v) for v in new))
    results = len(flat.results) - sum(f is None for f in forwarded)
    stored = [sources[k] for k in stay if forwarded[k] is None] + [v for v in new if v not in numbers]
    primal = flat.jaxpr_of([*flat.results[:results], *stored], flat.arguments, primal)
    return primal, _compat.replace_jaxpr(tangent, invars=invars, eqns=[*eqns, *rest], outvars=outs), passed


def _read(flat: Flat, choice: _ResidualChoice) -> Iterator[int]:
    """The values that the repeated steps read and do not make."""
    made = {v for step in choice.steps for v in step.outputs}
    for step in flat.steps:
        if step in choice.steps:
            yield from (v for v in step.values if v not in made)


# --- values made by moving elements: moved again in the backward pass -------------------------------------------------------------

# Equations without arithmetic: their results are elements of their operands in another place or a wider type.
_MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "iota", "pad", "reshape", "squeeze"}
)
# A gather of smaller pieces than this reads more than it makes: a line of the cache for each.
_GATHERED_BYTES = 32
# Bytes that a GPU loads at once. Rows that are no multiple of it are loaded and stored element by element.
_VECTOR_BYTES = 16


def shrink_residuals(
    primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int, large: bool = False
) -> Division | None:
    """Another ``primal``, ``tangent`` and ``forwarded`` with fewer bytes of residuals, or None where there is nothing to gain.

    JAX keeps the operands of linear equations. Where such an operand is a concatenation, its parts are kept here instead: rows of
    256 columns are stored and loaded by vectors, rows of 319 are not, and the second part is often an argument, which is in memory
    anyway. A bias that was broadcast to all rows is not kept at all. Of rows that were gathered, the table and the index are kept.
    No value is stored that costs more to write and read than the residual that it replaces.

    ``primal``: a closed jaxpr from arguments to results (``results`` of them) and residuals; ``tangent``: one from residuals and
    tangents to tangents. ``forwarded``: for each residual, in the order of the arguments of ``tangent``, the number of the
    function's argument that it is (counting ``consts`` constants before the first), or None for the next one that ``primal`` makes.
    ``large``: recompute values that are much larger than their sources as well (``recompute_large``), and read sums that the
    forward pass has made (``softmax_terms``).
    """
    found = None
    for division in (split_off_row_terms, recompute_large) if large else ():
        better = division(primal, tangent, forwarded, results, consts)
        if better is not None:
            primal, tangent, forwarded = found = better
    jaxpr, _ = _compat.open_parts(primal)
    known = _of_constants(jaxpr)
    moves = {e.outvars[0]: e for e in jaxpr.eqns if not e.effects and (_is_move(e) or e.outvars[0] in known)}
    if jaxpr.effects or not any(not _compat.is_literal(v) and v in moves for v in jaxpr.outvars[results:]):
        return found
    return _MoveRepeater(primal, tangent, forwarded, results, consts, moves).run() or found


def _is_move(eqn: Any) -> bool:
    if eqn.primitive.name == "gather":
        return math.prod(_compat.assumed_sizes(eqn.params["slice_sizes"])) * eqn.outvars[0].aval.dtype.itemsize >= _GATHERED_BYTES
    return eqn.primitive.name in _MOVES


def _of_constants(jaxpr: Any) -> set[Any]:
    """Known integers, and what is computed of them alone: the backward pass that makes them again knows them as well, while nobody
    knows a residual."""
    made = set[Any]()
    for e in jaxpr.eqns:
        operands = [v for v in e.invars if not _compat.is_literal(v)]
        known = e.primitive.name == _compat.CONSTANT_NAME or operands and all(v in made for v in operands)
        if known and not e.effects and len(e.outvars) == 1 and e.outvars[0].aval.dtype.kind in "iub":
            made.add(e.outvars[0])
    return made


class _MoveRepeater:
    def __init__(self, primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int, moves: dict[Any, Any]):
        self.closed, self.forwarded = (primal, tangent), forwarded
        self.primal, self.tangent = primal, tangent = [_compat.open_parts(j)[0] for j in self.closed]
        self.results, self.consts, self.moves = results, consts, moves
        self.arguments = {v: consts + k for k, v in enumerate(primal.invars)}
        self.in_memory = {*primal.invars, *(v for v in primal.outvars[:results] if not _compat.is_literal(v))}
        # For each residual of the tangent jaxpr the variable of the primal jaxpr.
        computed = iter(primal.outvars[results:])
        self.slots = list(tangent.invars[: len(forwarded)])
        self.sources = [next(computed) if f is None else self._argument(f) for f in forwarded]
        stored = (v for v in self.sources if v is not None and not _compat.is_literal(v))
        self.read = {v for v in stored if not self._can_move(v)}

    def _argument(self, number: int) -> Any:
        return self.primal.invars[number - self.consts] if number >= self.consts else None

    def _can_move(self, v: Any) -> bool:
        return not _compat.is_literal(v) and v in self.moves

    def run(self) -> Division | None:
        again: dict[Any, None] = {}  # equations to repeat, by their results
        gone = set()
        for v in self.sources:
            if v is None or not self._can_move(v) or v in gone:
                continue
            leaves, made = self._sources_of(v)
            cost = sum(leaves.values())
            if cost < self._cost(v) or (_has_odd_rows(v) and self._cost(v) == cost):
                gone.add(v)
                again |= dict.fromkeys(made)
                self.read |= set(leaves)
            else:
                self.read.add(v)
        return self._rebuilt(gone, again) if gone else None

    def _cost(self, v: Any, most: float = math.inf) -> float:
        """Bytes to write and read if ``v`` is stored, 0 if it is read already. ``most``: bytes of it that are read."""
        return 0 if v in self.read else min(_bytes(v.aval), most) + (0 if v in self.in_memory else _bytes(v.aval))

    def _sources_of(self, v: Any) -> tuple[dict[Any, float], dict[Any, None]]:
        """The cheapest values that ``v`` can be made of by moves, with the cost of each, and the results of the moves on the way,
        ``v`` among them."""
        leaves: dict[Any, float] = {}
        made: dict[Any, None] = {}
        gathers = self.moves[v].primitive.name == "gather"
        for k, x in enumerate(self.moves[v].invars):
            if _compat.is_literal(x) or x in made:
                continue
            cost = self._cost(x, _bytes(v.aval) if gathers and k == 0 else math.inf)
            if x in self.moves and x not in self.read and x not in self.in_memory:
                deeper, on_the_way = self._sources_of(x)
                if sum(deeper.values()) <= cost:
                    leaves |= deeper
                    made |= on_the_way
                    continue
            leaves[x] = cost
        made[v] = None
        return {x: cost for x, cost in leaves.items() if x not in made}, made

    def _rebuilt(self, gone: set[Any], again: dict[Any, None]) -> Division:
        """The division without residuals ``gone``, whose tangent jaxpr makes ``again`` what the primal one has made by moves."""
        known = [v is not None and not _compat.is_literal(v) for v in self.sources]
        stay = [k for k, v in enumerate(self.sources) if not (known[k] and v in gone)]
        at = {self.sources[k]: self.slots[k] for k in reversed(stay) if known[k]}
        repeated = [e for v, e in self.moves.items() if v in again and v not in at]
        leaves = dict.fromkeys(v for e in repeated for v in e.invars if not _compat.is_literal(v))
        new = [v for v in leaves if v not in at and v not in again]
        replaced = {slot: v for slot, v, k in zip(self.slots, self.sources, known, strict=True) if k and v in gone}
        eqns = [*(renamed(e, at) for e in repeated), *(renamed(e, replaced) for e in self.tangent.eqns)]
        outs = rename_all(self.tangent.outvars, replaced)
        invars = [*(self.slots[k] for k in stay), *new, *self.tangent.invars[len(self.slots) :]]
        stored = [*(self.sources[k] for k in stay if self.forwarded[k] is None), *(v for v in new if v not in self.arguments)]
        return (
            _compat.replace_jaxpr(self.closed[0], outvars=[*self.primal.outvars[: self.results], *stored]),
            _compat.replace_jaxpr(self.closed[1], invars=invars, eqns=eqns, outvars=outs),
            (*(self.forwarded[k] for k in stay), *(self.arguments.get(v) for v in new)),
        )


def _bytes(aval: Any) -> int:
    return math.prod(_compat.assumed_sizes(getattr(aval, "shape", ()))) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _has_odd_rows(v: Any) -> bool:
    shape = _compat.assumed_sizes(getattr(v.aval, "shape", ()))
    return len(shape) > 1 and shape[-1] * v.aval.dtype.itemsize % _VECTOR_BYTES != 0
