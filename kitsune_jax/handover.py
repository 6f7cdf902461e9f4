"""What the forward pass of a pipelined function hands to its backward pass, without what is cheaper to make again.

Comes in: the two jaxprs that linearization makes of a function, where residuals are results of the first and arguments of the
second. Goes out: the same with fewer bytes between them. Invariants: equations are repeated as they stand, here only those that
move elements; and nothing is handed over that costs more to write and read than what it replaces.

JAX keeps what a linear equation reads. Where that is a concatenation, its parts are kept here instead: rows of 256 columns are
stored and loaded by vectors, rows of 319 are not, and the second part is often an argument, which is in memory anyway. A bias that
was broadcast to all rows is not kept at all. Of rows that were gathered, the table and the index are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kitsune_jax import _compat
from kitsune_jax.flat import renamed
from kitsune_jax.repeats import without_large
from kitsune_jax.row_terms import without_row_terms

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
    primal: Any, tangent: Any, forwarded: Forwarded, results: int, consts: int, *, large: bool = False
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
