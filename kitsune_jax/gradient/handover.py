"""Residuals: which values the forward pass stores for the backward pass, and which the backward pass computes again.

Comes in: the two jaxprs that linearization makes of a function, where residuals are results of the first and arguments of the
second. Goes out: the same with fewer bytes between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from kitsune_jax import _compat
from kitsune_jax.gradient.row_terms import Flat, Step, is_value, renamed, without_row_terms
from kitsune_jax.ops.spec import COMPARISONS
from kitsune_jax.ops.table import OPS

# ----------------------------------------------------------------------------------------------------------------------------------
# What is much larger than what it is made of is not handed to the backward pass, but made there again.
#
# Comes in: the two jaxprs that linearization makes of a function, as for ``handover``. Goes out: the same with fewer bytes
# between them. Invariants: the backward pass repeats equations as they stand, so it has the same numbers as before up to the
# order in which a product is summed; and what it reads instead is at most a quarter as large.
#
# The scores of an attention have a number for each pair of a query and a key. They are one product of the queries and the keys,
# and elementwise work on it with the statistics of each row (its largest score, its sum), masks and biases. All of these are
# small beside the scores, so they are handed over, and the scores are made again. Nothing here looks for an attention: pairwise
# distances, or an outer product, are such arrays too. What asks which numbers equal others, or their maximum, is not made again.
# ----------------------------------------------------------------------------------------------------------------------------------

Division = tuple[Any, Any, tuple[int | None, ...]]

# What is made again is at least so many times larger than what it is made of, and than the operands of a product on the way: scores
# of 512 keys, of heads of 64. (A layer that is that much wider than its input is a product of few terms.)
_TIMES, _TIMES_OPERANDS = 4, 8
# At most so many operations of products for each byte that is not handed over: a head of 256 columns in float32.
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
_ELSEWHERE = frozenset({"reshape", "broadcast_in_dim", "squeeze", "transpose", "stop_gradient", "copy", "copy_p", "name"})
_BITS = frozenset({"random_bits", "threefry2x32"})  # some sixty operations for each number


def without_large(primal: Any, tangent: Any, forwarded: tuple[int | None, ...], results: int, consts: int) -> Division | None:
    """Another division of a linearized function (see ``handover.lean``), or None where nothing is much larger than its parts."""
    jaxpr, _ = _compat.open_parts(primal)
    if jaxpr.effects or not any(f is None for f in forwarded):
        return None
    flat = Flat(primal)
    computed = iter(flat.results[results:])
    sources = [next(computed) if f is None else flat.arguments[f - consts] if f >= consts else None for f in forwarded]
    apart = _Choice(flat, sources, results, bits=False)
    with_bits = _Choice(flat, sources, results, bits=True)
    if 2 * with_bits.bytes < apart.bytes:  # the bits take more memory than all the rest
        apart = with_bits
    return _rebuilt(primal, tangent, flat, sources, forwarded, consts, apart) if apart.gone else None


@dataclasses.dataclass
class _Chain:
    """How a value is made again: of ``leaves``, by ``steps``."""

    leaves: dict[int, None] = dataclasses.field(default_factory=dict)
    steps: dict[Step, None] = dataclasses.field(default_factory=dict)


class _Choice:
    """Which residuals are ``gone``, and the ``leaves`` that are handed over for them, beside those that stay. ``bits``: random bits
    may be made again. ``bytes``: of all that is handed over."""

    def __init__(self, flat: Flat, sources: list[Any], results: int, *, bits: bool):
        self.flat = flat
        self.repeated = _REPEATED | _BITS if bits else _REPEATED
        self.arguments = set(flat.arguments)
        results_of_all = {v for v in flat.results[:results] if is_value(v)}
        values = dict.fromkeys(v for v in sources if v is not None and is_value(v))
        open_to_it = [v for v in values if v not in self.arguments and v not in results_of_all and v in flat.maker]
        self.kept = {v for v in values if v not in open_to_it}
        self.gone: dict[int, None] = {}
        self.leaves: dict[int, None] = {}
        self.steps: set[Step] = set()
        # A value that another one is made of comes first: if it stays, it may be read.
        for v in sorted(open_to_it, key=lambda v: (self._bytes(v), v)):
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
        aval = self.flat.avals[v]
        return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)

    def _chain(self, root: int) -> _Chain | None:
        """How ``root`` is made again, or None where it is not worth it."""
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
        """Add to ``chain`` what makes ``v``. False where some of it is neither small nor cheap to make again."""
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
                self._small(x, chain)
            elif not self._visit(x, chain, limit):
                return False
        return True

    def _small(self, v: int, chain: _Chain) -> None:
        """Hand ``v`` over, or, where it takes no arithmetic to make it of what is handed over anyway, make it again."""
        trial = _Chain(dict(chain.leaves), dict(chain.steps))
        if self._free(v, trial):
            chain.leaves, chain.steps = trial.leaves, trial.steps
        else:
            chain.leaves[v] = None

    def _free(self, v: int, chain: _Chain) -> bool:
        if v in self.arguments or v in self.kept:
            chain.leaves[v] = None
            return True
        step = self.flat.maker.get(v)
        if step is None or step.eqn.primitive.name == "dot_general" or not self._is_repeated(step):
            return False
        if step in chain.steps:
            return True
        chain.steps[step] = None
        return len(chain.steps) <= _MOST_STEPS and all(self._free(x, chain) for x in step.values)

    def _is_held_against(self, step: Step) -> bool:
        """Does it ask which numbers equal others, or are as large as the largest? Made again, by a product whose sums have another
        order, say, the largest would not equal itself."""
        name = step.eqn.primitive.name
        if name not in COMPARISONS or len(step.values) < 2 or not jnp.issubdtype(step.eqn.invars[0].aval.dtype, jnp.inexact):
            return False
        return name in ("eq", "ne") or any(map(self._is_extreme, step.values))

    def _is_extreme(self, v: int) -> bool:
        step = self.flat.maker.get(v)
        while step is not None and step.values and step.eqn.primitive.name in _ELSEWHERE:
            step = self.flat.maker.get(step.values[0])
        return step is not None and step.eqn.primitive.name in _EXTREMES

    def _is_repeated(self, step: Step) -> bool:
        eqn = step.eqn
        if eqn.effects or self._is_held_against(step):
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
    """Of a product."""
    (contract, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contract)


def _rebuilt(
    primal: Any, tangent: Any, flat: Flat, sources: list[Any], forwarded: tuple[int | None, ...], consts: int, choice: _Choice
) -> Division | None:
    jaxpr, _ = _compat.open_parts(tangent)
    slots = list(jaxpr.invars[: len(forwarded)])
    gone, leaves = list(choice.gone), list(dict.fromkeys(v for v in _read(flat, choice)))
    again = _compat.trace_jaxpr(
        lambda *arrays: flat.evaluate(gone, dict(zip(leaves, arrays, strict=True))), [flat.avals[v] for v in leaves], like=tangent
    )
    repeated, constants = _compat.open_parts(again)
    if constants:  # arrays that an equation holds: nobody could hand them over
        return None
    stay = [k for k, v in enumerate(sources) if v is None or not is_value(v) or v not in choice.gone]
    numbers = {v: consts + k for k, v in enumerate(flat.arguments)}
    # A leaf that is a residual already is read where that lies.
    at = {sources[k]: slots[k] for k in reversed(stay) if sources[k] is not None and is_value(sources[k])}
    new = [v for v in leaves if v not in at]
    names = {var: at[v] for var, v in zip(repeated.invars, leaves, strict=True) if v in at}
    eqns = [renamed(e, names) for e in repeated.eqns]
    made = dict(zip(gone, (names.get(v, v) if not _compat.is_literal(v) else v for v in repeated.outvars), strict=True))
    replaced = {slot: made[v] for slot, v in zip(slots, sources, strict=True) if v is not None and is_value(v) and v in made}
    rest = [renamed(e, replaced) for e in jaxpr.eqns]
    outs = [v if _compat.is_literal(v) else replaced.get(v, v) for v in jaxpr.outvars]
    fresh = [repeated.invars[leaves.index(v)] for v in new]
    invars = [*(slots[k] for k in stay), *fresh, *jaxpr.invars[len(slots) :]]
    told = (*(forwarded[k] for k in stay), *(numbers.get(v) for v in new))
    results = len(flat.results) - sum(f is None for f in forwarded)
    stored = [sources[k] for k in stay if forwarded[k] is None] + [v for v in new if v not in numbers]
    wanted = [*flat.results[:results], *stored]
    primal = _compat.trace_jaxpr(
        lambda *arrays: flat.evaluate(wanted, dict(zip(flat.arguments, arrays, strict=True))), _compat.in_avals(primal), like=primal
    )
    return primal, _compat.replace_jaxpr(tangent, invars=invars, eqns=[*eqns, *rest], outvars=outs), told


def _read(flat: Flat, choice: _Choice) -> Iterator[int]:
    """What the steps that are repeated read and do not make."""
    made = {v for step in choice.steps for v in step.outputs}
    for step in flat.steps:
        if step in choice.steps:
            yield from (v for v in step.values if v not in made)


# ----------------------------------------------------------------------------------------------------------------------------------
# What the forward pass of a pipelined function hands to its backward pass, without what is cheaper to make again.
#
# Comes in: the two jaxprs that linearization makes of a function, where residuals are results of the first and arguments of the
# second. Goes out: the same with fewer bytes between them. Invariants: equations are repeated as they stand, here only those that
# move elements; and nothing is handed over that costs more to write and read than what it replaces.
#
# JAX keeps what a linear equation reads. Where that is a concatenation, its parts are kept here instead: rows of 256 columns are
# stored and loaded by vectors, rows of 319 are not, and the second part is often an argument, which is in memory anyway. A bias
# that was broadcast to all rows is not kept at all. Of rows that were gathered, the table and the index are kept.
# ----------------------------------------------------------------------------------------------------------------------------------

# Equations without arithmetic, whose results are the elements of their operands in another place or a wider type.
_MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "iota", "pad", "reshape", "squeeze"}
)
# A gather of smaller pieces than this reads more than it gives: a line of the cache for each.
_GATHERED_BYTES = 32
# What a GPU loads at once. Rows whose bytes are no multiple of it are loaded and stored element by element.
_VECTOR_BYTES = 16


Forwarded = tuple[int | None, ...]


def lean(
    primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int, large: bool = False
) -> tuple[Any, Any, Forwarded] | None:
    """Another ``primal``, ``tangent`` and ``forwarded`` with less to hand over, or None where there is nothing to gain.

    ``primal``: a closed jaxpr from arguments to results (``results`` of them) and residuals; ``tangent``: one from residuals and
    tangents to tangents. ``forwarded``: for each residual, in the order of the arguments of ``tangent``, the number of the
    function's argument that it is (counting ``consts`` constants before the first), or None for the next one that ``primal`` makes.
    ``large``: what is much larger than what it is made of is made again as well (``repeats``), and sums that the forward pass has
    made are read (``row_terms``).
    """
    found = None
    for division in (without_row_terms, without_large) if large else ():
        better = division(primal, tangent, forwarded, results, consts)
        if better is not None:
            primal, tangent, forwarded = found = better
    jaxpr, _ = _compat.open_parts(primal)
    moves = {e.outvars[0]: e for e in jaxpr.eqns if _is_move(e) and not e.effects}
    if jaxpr.effects or not any(not _compat.is_literal(v) and v in moves for v in jaxpr.outvars[results:]):
        return found
    return _Lean(primal, tangent, forwarded, results, consts, moves).run() or found


def _is_move(eqn: Any) -> bool:
    if eqn.primitive.name == "gather":
        return math.prod(eqn.params["slice_sizes"]) * eqn.outvars[0].aval.dtype.itemsize >= _GATHERED_BYTES
    return eqn.primitive.name in _MOVES


class _Lean:
    def __init__(self, primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int, moves: dict[Any, Any]):
        self.closed, self.forwarded = (primal, tangent), forwarded
        self.primal, self.tangent = primal, tangent = [_compat.open_parts(j)[0] for j in self.closed]
        self.results, self.consts, self.moves = results, consts, moves
        self.arguments = {v: consts + k for k, v in enumerate(primal.invars)}
        self.in_memory = {*primal.invars, *(v for v in primal.outvars[:results] if not _compat.is_literal(v))}
        # What each residual of the tangent jaxpr is in the primal one.
        computed = iter(primal.outvars[results:])
        self.slots = list(tangent.invars[: len(forwarded)])
        self.sources = [next(computed) if f is None else self._argument(f) for f in forwarded]
        whole = (v for v in self.sources if v is not None and not _compat.is_literal(v))
        self.read = {v for v in whole if not self._can_move(v)}

    def _argument(self, number: int) -> Any:
        return self.primal.invars[number - self.consts] if number >= self.consts else None

    def _can_move(self, v: Any) -> bool:
        return not _compat.is_literal(v) and v in self.moves

    def run(self) -> tuple[Any, Any, Forwarded] | None:
        again: dict[Any, None] = {}  # equations to repeat, by their results
        gone = set()
        for v in self.sources:
            if v is None or not self._can_move(v) or v in gone:
                continue
            leaves, made = self._taken_apart(v)
            apart = sum(leaves.values())
            if apart < self._cost(v) or (_odd(v) and self._cost(v) == apart):
                gone.add(v)
                again |= dict.fromkeys(made)
                self.read |= set(leaves)
            else:
                self.read.add(v)
        return self._rebuilt(gone, again) if gone else None

    def _cost(self, v: Any, most: float = math.inf) -> float:
        """Bytes to write and read because ``v`` is handed over, beside what is handed over already. ``most``: that are read."""
        return 0 if v in self.read else min(_bytes(v), most) + (0 if v in self.in_memory else _bytes(v))

    def _taken_apart(self, v: Any) -> tuple[dict[Any, float], dict[Any, None]]:
        """The cheapest values that ``v`` can be made of by moves, with the cost of each, and the results of the moves on the way,
        ``v`` among them."""
        leaves: dict[Any, float] = {}
        made: dict[Any, None] = {}
        gathers = self.moves[v].primitive.name == "gather"
        for k, x in enumerate(self.moves[v].invars):
            if _compat.is_literal(x) or x in made:
                continue
            cost = self._cost(x, _bytes(v) if gathers and k == 0 else math.inf)
            if x in self.moves and x not in self.read and x not in self.in_memory:
                deeper, on_the_way = self._taken_apart(x)
                if sum(deeper.values()) <= cost:
                    leaves |= deeper
                    made |= on_the_way
                    continue
            leaves[x] = cost
        made[v] = None
        return {x: cost for x, cost in leaves.items() if x not in made}, made

    def _rebuilt(self, gone: set[Any], again: dict[Any, None]) -> tuple[Any, Any, Forwarded]:
        slots, forwarded, stored = list[Any](), list[int | None](), list[Any]()
        names: dict[Any, Any] = {}  # values of the primal jaxpr -> what they are called in the tangent one
        twice: dict[Any, Any] = {}
        for slot, source, number in zip(self.slots, self.sources, self.forwarded, strict=True):
            known = source is not None and not _compat.is_literal(source)
            if known and source in names and source in gone:
                twice[slot] = names[source]
                continue
            if known:
                names.setdefault(source, slot)
            if known and source in gone:
                continue
            slots.append(slot)
            forwarded.append(number)
            if number is None:
                stored.append(source)
        repeated = [e for v, e in self.moves.items() if v in again and (v in gone or v not in names)]
        for v in dict.fromkeys(v for e in repeated for v in e.invars if not _compat.is_literal(v)):
            if v not in names and v not in again:
                names[v] = v
                slots.append(v)
                forwarded.append(self.arguments.get(v))
                if v not in self.arguments:
                    stored.append(v)
        eqns = [renamed(e, names) for e in repeated]
        rest, outs = self.tangent.eqns, self.tangent.outvars
        if twice:
            rest, outs = [renamed(e, twice) for e in rest], [v if _compat.is_literal(v) else twice.get(v, v) for v in outs]
        tangents = self.tangent.invars[len(self.slots) :]
        return (
            _compat.replace_jaxpr(self.closed[0], outvars=[*self.primal.outvars[: self.results], *stored]),
            _compat.replace_jaxpr(self.closed[1], invars=[*slots, *tangents], eqns=[*eqns, *rest], outvars=outs),
            tuple(forwarded),
        )


def _bytes(v: Any) -> int:
    itemsize = getattr(getattr(v.aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(v.aval, "shape", ())) * itemsize


def _odd(v: Any) -> bool:
    shape: Sequence[int] = getattr(v.aval, "shape", ())
    return len(shape) > 1 and shape[-1] * v.aval.dtype.itemsize % _VECTOR_BYTES != 0
