"""One loop over the blocks of a tile: evaluates pointwise expressions element by element and hands the results on.

Comes in: values of a stage and what is to be done with them (keep, store, push, fold). Goes out: C++ text. Everything that the loop
reads is brought in once per block; everything pending that is read again later is kept on the way. Invariant: columns beyond the
logical ones are zero in whatever is kept or handed on, because a later matmul multiplies them by zero and NaN would survive that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.actions import Action, Keep
from kitsune_jax.targets.cuda.segment import Segment
from kitsune_jax.targets.cuda.values import Expression, Multiply, Parts

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body


class Loop:
    def __init__(self, body: Body, width: int, actions: Iterable[Action]):
        self.body, self.width = body, width
        self.actions = list(actions)
        self.owned = tiles.owned(width)
        self.masks: dict[int, str] = {}  # images of masks, which are brought in whole
        for action in self.actions:
            if body.value(action.value).width != width:
                raise AssertionError("a loop is over tiles of one width")

    def emit(self) -> None:
        self._place_operands()
        self._keep_on_the_way()
        self._declare()
        products = self._products()
        for first, last in self._segments(products):
            if products:
                self.body.products.advance(products, first)
            Segment(self, first, last).emit()
            self._count_kept(first, last)
        self._put_bits()
        for action in self.actions:
            if isinstance(action, Keep) and not action.push:
                self.body.settle(action)

    def _count_kept(self, first: int, last: int) -> None:
        for action in self.actions:
            if isinstance(action, Keep) and not action.push:
                share = self.body.value(action.value).registers * (last - first) // tiles.blocks(self.width)
                self.body.budget.define(action.value, 0 if action.put else share)

    # -- what is pending below the roots

    def _place_operands(self) -> None:
        """Operands of the products below get their homes first, in loops of their own: this loop may read them as well."""
        for v in self._products():
            if isinstance(self.body.value(v).place, Multiply):  # an earlier one's operand may have brought it home
                self.body.products.prepare(v)

    def _keep_on_the_way(self) -> None:
        """Pending values at and below the roots that are read again later are kept by this loop, too."""
        roots = {self.body.root(a.value) for a in self.actions if isinstance(a, Keep) and not a.push}
        pending = self._pending_below()
        reads: Counter[int] = Counter()
        for action in self.actions:
            reads[self.body.root(action.value)] += action.reads if isinstance(action, Keep) else 1
        for v in pending:
            place = self.body.value(v).place
            if isinstance(place, Expression):
                reads.update(self.body.root(x) for x in place.instr.inputs)
        for v in pending:
            if v not in roots and self.body.read_again(v, reads[v]):
                self.actions.append(self.body.keep(v))

    def _pending_below(self) -> list[int]:
        found: dict[int, None] = {}

        def visit(v: int) -> None:
            v, value = self.body.root(v), self.body.value(v)
            if value.row or v in found:
                return
            match value.place:
                case Expression(instr):
                    for operand in instr.inputs:
                        visit(operand)
                    found[v] = None
                case Multiply():
                    found[v] = None
                case Parts(parts):
                    for part, first, blocks in parts:
                        if self.body.value(part).width == self.width and first == 0 and blocks == tiles.blocks(self.width):
                            visit(part)

        for action in self.actions:
            visit(action.value)
        return list(found)

    def _products(self) -> list[int]:
        return [v for v in self._pending_below() if isinstance(self.body.value(v).place, Multiply)]

    def _declare(self) -> None:
        for action in self.actions:
            if not isinstance(action, Keep):
                continue
            count = tiles.registers(self.width, action.form)
            if action.form == "bit":
                self.body.text(f"u32 {'w_' if action.put else ''}{action.name}[{count}] = {{}};")
            elif not action.put:
                type_ = "u32" if action.form == "pair" else pointwise.COMPUTE[self.body.value(action.value).dtype]
                self.body.text(f"{type_} {action.name}[{count}];")

    def _put_bits(self) -> None:
        """Masks as images: a vector holds the bits of several blocks, so it is complete only after the loop."""
        for action in self.actions:
            if isinstance(action, Keep) and action.form == "bit" and action.put:
                vectors = tiles.image_vectors(self.width, "bit")
                self.body.text("KITSUNE_UNROLL")
                self.body.text(f"for (int i = 0; i < {vectors}; ++i) {action.put}(i, image_vector(w_{action.name}, i));")

    def _segments(self, products: list[int]) -> list[tuple[int, int]]:
        """Runs of blocks within which every source lies in one place."""
        total = tiles.blocks(self.width)
        cuts = {0, total}
        for v in self._all_sources():
            match self.body.value(v).place:
                case Parts(parts):
                    at = 0
                    for _, _, blocks in parts:
                        at += blocks
                        cuts.add(at)
        for v in products:
            cuts.update(itertools.accumulate(self.body.products.blocks(v)))
        ordered = sorted(cuts)
        return list(zip(ordered, ordered[1:], strict=False))

    def _all_sources(self) -> list[int]:
        found: dict[int, None] = {}

        def visit(v: int) -> None:
            if v in found:
                return
            found[v] = None
            match self.body.value(v).place:
                case Expression(instr):
                    for operand in instr.inputs:
                        visit(operand)

        for action in self.actions:
            visit(action.value)
        return list(found)
