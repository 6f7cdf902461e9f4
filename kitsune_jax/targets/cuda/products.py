"""The matmuls of a stage: when each chunk of columns is issued and when its results are waited for.

Comes in: pending ``Multiply`` values and the blocks a loop is about to read. Goes out: C++ text, and the order in which chunks of
weights are consumed (``order``), which is the order in which the loader must bring them. Invariant: where two chunks are in
flight, a ring of weights holds both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.values import InArray, InImage, InVector, Multiply, Registers

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body


_GROUP = 2  # Product::kGroup
# Blocks of an input that a product reads into registers before it starts, for each product again. A wider one is fetched on the
# way, which makes the product wait as it goes.
_NARROW = 2


@dataclasses.dataclass(slots=True)
class _State:
    """``issued`` / ``completed``: chunks so far; ``names``: of the products."""

    issued: int = 0
    completed: int = 0
    sources: tuple[str, ...] = ()
    rolling: bool = False
    done: int = 0  # blocks of K that are complete once a product has been issued
    copies: list[tuple[str, int]] = dataclasses.field(
        default_factory=list
    )  # operands copied to registers, as the budget knows them


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """``k_chunks`` chunks of ``columns`` columns of weight ``weight``, its column chunk ``chunk``."""

    weight: int
    chunk: int
    columns: int
    k_chunks: int


class Products:
    def __init__(self, body: Body):
        self.body = body
        self.state: dict[int, _State] = {}
        self.order: list[Fetch] = []
        self.layers = 1
        self.layer_bytes = self.layer_weights = self.layer_start = 0

    def advance(self, products: Sequence[int], first: int) -> None:
        """Makes the chunks of ``products`` that hold block ``first`` available, and issues the next ones where that is allowed."""
        for v in products:
            self.prepare(v)
        for v in products:
            chunk = self.chunk_of(v, first)
            if self.state[v].issued <= chunk:
                self._issue(v)
        ahead = len(products) == 1 and self._may_overlap(products[0])
        if ahead:
            self._issue(products[0])
        for k, v in enumerate(products):
            state = self.state[v]
            if state.completed <= self.chunk_of(v, first):
                pending = 1 if ahead else len(products) - 1 - k if not any(self.state[u].rolling for u in products) else 0
                blocks = self._shape(v).k_blocks
                self.body.text(f"{self._name(v, state.completed)}_product.complete<{pending}, {state.done}, {blocks}>();")
                state.completed += 1
                self._count_operands(v)

    def _count_operands(self, v: int) -> None:
        """A product's operands are in use until it is complete."""
        place = self.body.value(v).place
        assert isinstance(place, Multiply)
        for piece in place.pieces:
            self.body.used(piece)
        for copy in self.state[v].copies:
            self.body.budget.use(copy)

    def chunk_at(self, v: int, block: int) -> tuple[str, int]:
        """(accumulators, first block) of the chunk that holds ``block``."""
        chunk = self.chunk_of(v, block)
        return self._name(v, chunk), sum(self.blocks(v)[:chunk])

    # -- chunks

    def _shape(self, v: int) -> tiles.WeightShape:
        place = self.body.value(v).place
        assert isinstance(place, Multiply)
        return self.body.weights[place.weight].shape

    def blocks(self, v: int) -> list[int]:
        """How many blocks each chunk of columns has."""
        shape = self._shape(v)
        return [columns // tiles.block(shape.slab) for columns in shape.chunks]

    def chunk_of(self, v: int, block: int) -> int:
        at = 0
        for k, count in enumerate(self.blocks(v)):
            at += count
            if block < at:
                return k
        raise AssertionError("a block beyond the product")

    def _name(self, v: int, chunk: int) -> str:
        place = self.body.value(v).place
        assert isinstance(place, Multiply)
        return f"d{place.product}_{chunk}"

    def _may_overlap(self, v: int) -> bool:
        state, shape, config = self.state[v], self._shape(v), self.body.config
        if state.rolling or state.issued >= len(shape.chunks) or state.issued - state.completed > 1 or not config.overlap:
            return False
        place = self.body.value(v).place
        assert isinstance(place, Multiply)
        if state.copies or all(isinstance(self.body.value(p).place, InArray) for p in place.pieces):
            return False  # ptxas (13.0, 13.5) then puts a wait between the two, and may serialise the whole kernel (C7517, C7518)
        return config.resident or 2 * shape.k_chunks <= config.depth

    def most_columns(self, pieces: Sequence[int]) -> int:
        """Columns of a chunk at most, of a product of ``pieces``."""
        body = self.body
        operands = [body.values[p] for p in pieces if p in body.values]  # those of later layers in a loop are made in it
        fetched = any(isinstance(x.place, InArray) and tiles.blocks(x.width) > _NARROW for x in operands)
        return body.config.fetched if fetched else body.config.columns

    # -- text

    def prepare(self, v: int) -> None:
        """Gives the operands of ``v`` their homes."""
        if v in self.state:
            return
        place, shape = self.body.value(v).place, self._shape(v)
        assert isinstance(place, Multiply)
        copies: list[tuple[str, int]] = []
        sources = [self._source(piece, shape, copies) for piece in place.pieces]
        fetched = any(not text.startswith("RegisterSource") for text in sources)
        small = not self.body.config.resident and shape.k_chunks > self.body.config.depth
        self.state[v] = _State(sources=tuple(sources), rolling=fetched or small, copies=copies)

    def _source(self, v: int, shape: tiles.WeightShape, copies: list[tuple[str, int]]) -> str:
        """The C++ expression of an A operand; brings the value into registers if it is nowhere yet."""
        body, operand = self.body, pointwise.OPERAND[shape.dtype]
        value = body.value(v)
        if body.config.copies and isinstance(value.place, InImage) and v in body.entries and len(shape.chunks) > 1:
            # An entry of a queue that several chunks of columns read: from registers, products need not wait as they go.
            copies.append(("copy", v))
            body.budget.define(("copy", v), value.registers)
            return f"RegisterSource<{operand}, {value.width}>{{{body.copy_of(v)}}}"
        if isinstance(value.place, InArray) and not value.row:
            if tiles.blocks(value.width) <= _NARROW:
                return f"RegisterSource<{operand}, {value.width}>{{{body.copy_of(v)}}}"
            source = body.arrays.source(value.place.array, operand, value.width)
            if source is not None:
                return source
        if value.row:
            return f"RegisterSource<{operand}, 8>{{{body.row_as_tile(v)}}}"
        if not isinstance(value.place, (InImage, Registers)):
            body.materialize(v)
        if isinstance(value.place, InImage):
            return f"image_source<{operand}, {value.width}>([&](int i) {{ return {value.place.name}(i); }})"
        assert isinstance(value.place, Registers)
        return f"RegisterSource<{operand}, {value.width}>{{{value.place.name}}}"

    def _issue(self, v: int) -> None:
        state, shape, body = self.state[v], self._shape(v), self.body
        chunk = state.issued
        columns, name, operand = shape.chunks[chunk], self._name(v, chunk), pointwise.OPERAND[shape.dtype]
        place = body.value(v).place
        assert isinstance(place, Multiply)
        if body.config.resident:
            known = body.config.weight_offset  # empty on the pass that finds out what weights there are
            offset = (known[place.weight] if known else 0) + sum(shape.chunks[:chunk]) * shape.k_chunks * tiles.ROW_BYTES
            at = body.constants.number("resident", offset, offset)
            layer = f" + layer * {self.layer_bytes}" if self.layers > 1 else ""
            weights = f"{name}_weights"
            body.text(f"ResidentWeights<{columns}> {weights}{{shared + {at}{layer}}};")
        else:
            weights = "weights"
        rolling = "true" if state.rolling else "false"
        body.text(f"float {name}[{columns // 2}];")
        if place.bias is not None:
            self._start_from(place.bias, name, columns, sum(self.blocks(v)[:chunk]))
        started = "true" if place.bias is not None else "false"
        template = f"{operand}, {columns}, {rolling}, {started}, decltype({weights})"
        body.text(f"Product<{template}> {name}_product({name}, {weights});")
        first = done = 0
        for piece, source in zip(place.pieces, state.sources, strict=True):
            body.text(f"{name}_product.feed<{first}, {done}>({source});")
            first, done = self._after(state, source, tiles.blocks(body.value(piece).width), first)
        state.done = done
        body.text(f"{name}_product.commit();")
        self.order.append(Fetch(place.weight, chunk, columns, shape.k_chunks))
        state.issued += 1
        fetched = sum("RegisterSource" not in text for text in state.sources) and (32 if tiles.is_half(shape.dtype) else 64)
        body.budget.product(v, chunk, columns // 2 + fetched)

    def _after(self, state: _State, source: str, blocks: int, first: int) -> tuple[int, int]:
        """(blocks issued, blocks known to be complete) after a piece: what ``Product`` does, in numbers."""
        last = first + blocks
        if not state.rolling:
            return last, 0
        fetched = not source.startswith("RegisterSource")
        return last, last if fetched else first + (-(-blocks // _GROUP) - 1) * _GROUP

    def _start_from(self, bias: int, name: str, columns: int, first: int) -> None:
        place = self.body.value(bias).place
        assert isinstance(place, InVector)
        self.body.text(f"start_from<{columns}, {self.body.value(bias).width}>({name}, {self.body.address(place)}, lane, {first});")

    # -- layers

    def begin_layers(self, first_weight: int, per_layer: int, layers: int) -> None:
        """Until ``end_layers``, what is issued stands for ``layers`` layers with ``per_layer`` weights each."""
        recipes = self.body.weights[first_weight : first_weight + per_layer]
        self.layer_bytes = sum(r.shape.slab_bytes for r in recipes)
        self.layers, self.layer_weights, self.layer_start = layers, per_layer, len(self.order)

    def end_layers(self) -> None:
        one = self.order[self.layer_start :]
        for layer in range(1, self.layers):
            self.order += [dataclasses.replace(f, weight=f.weight + layer * self.layer_weights) for f in one]
        self.layers = 1
