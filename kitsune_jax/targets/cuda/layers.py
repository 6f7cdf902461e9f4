"""A loop over equal layers, in the text of a stage.

Comes in: a ``Run`` of ``repeats.py``. Goes out: C++ text: a loop whose body is the first layer's, and recipes of all layers'
operands at equal distances.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kitsune_jax.targets.cuda import columns, instructions
from kitsune_jax.targets.cuda.actions import Keep
from kitsune_jax.targets.cuda.repeats import Run
from kitsune_jax.targets.cuda.values import InImage, Registers
from kitsune_jax.targets.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body


def emit(body: Body, run: Run) -> None:
    """A loop over equal layers: its body is the first layer's, with weights and vectors at a distance that grows with ``layer``.

    The value that goes from layer to layer lives in registers of its own, or in two images that take turns.
    """
    value, out = body.value(run.entry), run.exits[0]
    if value.row:
        raise CannotLower("a loop over layers of one column")
    if (run.entry in body.spill) != (out in body.spill):
        body.also_spill |= {run.entry, out}
    carry = (_ImageCarry if run.entry in body.spill and out in body.spill else _RegisterCarry)(body, run)
    carry.enter()
    first_weight, per_layer = len(body.weights), sum(i.kind == "matmul" for i in run.segments[0])
    _vectors(body, run)
    _weights(body, run)
    body.products.begin_layers(first_weight, per_layer, len(run.segments))
    body.text("KITSUNE_NO_UNROLL")
    body.text(f"for (u32 layer = 0; layer < {len(run.segments)}; ++layer) {{")
    body.values[run.entry] = dataclasses.replace(value, place=carry.inside())
    for instr in run.segments[0]:
        instructions.emit(body, instr)
    carry.hand_on()
    body.text("}")
    body.products.end_layers()
    body.next_recipe = None
    body.layer_vectors = {}
    body.values[run.entry] = value
    body.values[run.exits[-1]] = dataclasses.replace(value, place=carry.after())
    body.carries[run.exits[-1]] = carry.holds


def _vectors(body: Body, run: Run) -> None:
    """Vectors of all layers one after the other; those of layer 0 know where they are, and how far the next layer's."""
    broadcasts = [k for k, i in enumerate(run.segments[0]) if i.kind == "broadcast_in_dim" and columns.is_vector(body, i)]
    recipes = [[columns.broadcast_recipe(body, segment[k]) for k in broadcasts] for segment in run.segments]
    stride = sum(r.words for r in recipes[0])
    at = body.vectors.append([r for layer in recipes for r in layer])
    for k, recipe in zip(broadcasts, recipes[0], strict=True):
        body.layer_vectors[run.segments[0][k].outputs[0]] = (at, stride)
        at += recipe.words


def _weights(body: Body, run: Run) -> None:
    """Recipes of all layers' weights, layer by layer; the matmuls of layer 0 take theirs in order."""
    body.next_recipe = len(body.weights)
    for segment in run.segments:
        for instr in segment:
            if instr.kind == "matmul":
                body.weights.append(instructions.weight_recipe(body, instr))


_ALL = 1 << 30  # whoever reads a layer's result reads what the loop hands on


def _reads(run: Run) -> int:
    """How often the first layer reads what enters it."""
    return sum(instr.inputs.count(run.entry) for instr in run.segments[0])


class _RegisterCarry:
    """What a loop over layers hands on, in registers: the results of a layer are copied to where the next one expects them."""

    def __init__(self, body: Body, run: Run):
        self.body, self.run = body, run
        self.value = body.value(run.entry)
        self.form = self.value.form
        self.name = f"h{run.entry}"
        self.holds: tuple[object, ...] = (("carry", run.entry),)

    def enter(self) -> None:
        self.body.loop(self.value.width, [Keep(self.run.entry, self.name, self.form, push=True, reads=_reads(self.run))])
        self.body.budget.define(("carry", self.run.entry), self.value.registers)

    def inside(self) -> Registers:
        return Registers(self.name, self.form)

    def hand_on(self) -> None:
        body, out = self.body, self.run.exits[0]
        body.materialize(out)
        made = body.value(out).place
        assert isinstance(made, Registers)
        count = self.value.registers
        body.text("KITSUNE_UNROLL")
        body.text(f"for (int i = 0; i < {count}; ++i) {self.name}[i] = {made.name}[i];")
        body.budget.use(out)
        body.budget.use(("carry", self.run.entry))

    def after(self) -> Registers:
        return self.inside()


class _ImageCarry:
    """The same in two images of shared memory, which change places with every layer."""

    def __init__(self, body: Body, run: Run):
        self.body, self.run = body, run
        self.value = body.value(run.entry)
        self.form = self.value.form
        self.names = (f"image{run.entry}", f"image{run.exits[0]}")
        last = (run.entry, run.exits[0])[len(run.segments) % 2]  # where the last layer leaves its result
        self.holds: tuple[object, ...] = (last,)

    def enter(self) -> None:
        body = self.body
        for v, name in zip((self.run.entry, self.run.exits[0]), self.names, strict=True):
            body.prologue.append(f"const Image {name} = Image::at(scratch + {body.spill[v]});")
        body.budget.define(self.run.entry, 0)
        entry = Keep(self.run.entry, self.names[0], self.form, put=f"{self.names[0]}.put", push=True, reads=_reads(self.run))
        body.loop(self.value.width, [entry])
        body.budget.define(self.run.exits[0], 0)

    def inside(self) -> InImage:
        a, b = self.names
        self.body.text(f"const Image {a}_in = layer & 1 ? {b} : {a}, {a}_out = layer & 1 ? {a} : {b};")
        return InImage(f"{a}_in.get", self.form)

    def hand_on(self) -> None:
        out = f"{self.names[0]}_out"
        self.body.loop(self.value.width, [Keep(self.run.exits[0], out, self.form, put=f"{out}.put", push=True, reads=_ALL)])
        for v in (self.run.entry, self.run.exits[0]):
            self.body.budget.use(v)

    def after(self) -> InImage:
        return InImage(f"{self.names[len(self.run.segments) % 2]}.get", self.form)
