"""A loop over equal layers.

Comes in: a ``Run`` of ``equal_layers.py``. Goes out: a ``LayerLoop`` whose body is the first layer's, and recipes of all layers'
operands at equal distances. The value that goes from layer to layer lives in registers of its own, or in two images that take
turns.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.targets.cuda import columns, instructions
from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Keep, Ref
from kitsune_jax.targets.cuda.equal_layers import Run
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.values import InImage, InRegisters
from kitsune_jax.targets.errors import CannotLower

_ALL = 1 << 30  # whoever reads a layer's result reads what the loop hands on


def lower(at: Evaluation, run: Run) -> None:
    """Lowers all layers of ``run``."""
    entry, out = at.root(run.entry), at.root(run.exits[0])
    value = at.value(entry)
    if value.row:
        raise CannotLower("a loop over layers of one column")
    in_images = bool(at.shape.images & {entry, out})
    if in_images:
        at.together |= {entry, out}
    handover = _Images(at, run, entry, out) if in_images else _Copy(at, run, entry)
    handover.enter()
    first_weight, per_layer = len(at.weights), sum(i.kind == "matmul" for i in run.segments[0])
    _vectors(at, run)
    _weights(at, run)
    with at.body_of_loop() as body:
        at.settle(entry, handover.inside())
        for instr in run.segments[0]:
            instructions.lower(at, instr)
        handover.hand_on(out)
    at.add(st.LayerLoop(len(run.segments), first_weight, per_layer, tuple(body)))
    at.next_weight = None
    at.layer_vectors = {}
    at.values[entry] = value
    at.values[at.root(run.exits[-1])] = dataclasses.replace(value, home=handover.after())


def _vectors(at: Evaluation, run: Run) -> None:
    """Vectors of all layers one after the other; those of layer 0 know where they are, and how far the next layer's."""
    broadcasts = [k for k, i in enumerate(run.segments[0]) if i.kind == "broadcast_in_dim" and columns.is_vector(at, i)]
    recipes = [[columns.broadcast_recipe(at, segment[k]) for k in broadcasts] for segment in run.segments]
    if not broadcasts:
        return
    at.vectors.append(tuple(r for layer in recipes for r in layer))
    stride, offset = sum(r.words for r in recipes[0]), 0
    for k, recipe in zip(broadcasts, recipes[0], strict=True):
        vector = ir.Vector(len(at.vectors) - 1, offset)
        at.layer_vectors[run.segments[0][k].outputs[0]] = ir.Address(vector, layer=stride)
        offset += recipe.words


def _weights(at: Evaluation, run: Run) -> None:
    """Recipes of all layers' weights, layer by layer; the matmuls of layer 0 take theirs in order."""
    at.next_weight = len(at.weights)
    at.weights += [instructions.weight_recipe(at, i) for segment in run.segments for i in segment if i.kind == "matmul"]


class _Copy:
    """What a loop hands on, in registers: the results of a layer are copied to where the next one expects them."""

    def __init__(self, at: Evaluation, run: Run, entry: int):
        self.at, self.entry, self.value = at, entry, at.value(entry)
        self.reads = sum(i.inputs.count(run.entry) for i in run.segments[0])  # of the first layer
        self.ref = Ref("h", entry)

    def enter(self) -> None:
        self.at.evaluate(self.value.width, [Keep(self.entry, self.ref, self.value.form, push=True, reads=self.reads)])
        self.at.add(st.Alive(self.ref, self.value.registers))

    def inside(self) -> InRegisters | InImage:
        return InRegisters(self.ref, self.value.form, self.ref)

    def hand_on(self, out: int) -> None:
        self.at.materialize(out)
        made = self.at.value(out).home
        assert isinstance(made, InRegisters)
        copy = st.CopyRegisters(self.ref, made.ref, self.value.registers)
        self.at.add(copy, st.Alive(made.owner), st.Alive(self.ref))

    def after(self) -> InRegisters | InImage:
        return self.inside()


class _Images:
    """The same in two images of shared memory, which change places with every layer."""

    def __init__(self, at: Evaluation, run: Run, entry: int, out: int):
        self.at, self.value = at, at.value(entry)
        self.reads = sum(i.inputs.count(run.entry) for i in run.segments[0])
        self.values, self.layers = (entry, out), len(run.segments)
        self.refs = tuple(Ref("image", v) for v in self.values)
        self.owners = tuple(Ref("v", v) for v in self.values)

    def enter(self) -> None:
        for ref in self.refs:
            self.at.once_per_tile(st.Image(ref))
        self.at.add(st.Alive(self.owners[0], 0))
        first = self.refs[0]
        self.at.evaluate(self.value.width, [Keep(self.values[0], first, self.value.form, to=first, push=True, reads=self.reads)])
        self.at.add(st.Alive(self.owners[1], 0))

    def inside(self) -> InRegisters | InImage:
        self.at.add(st.TurnImages(*self.refs))
        return InImage(Ref("image", self.values[0], "_in"), self.value.form, self.owners[0])

    def hand_on(self, out: int) -> None:
        to = Ref("image", self.values[0], "_out")
        self.at.evaluate(self.value.width, [Keep(out, to, self.value.form, to=to, push=True, reads=_ALL)])
        self.at.add(*map(st.Alive, self.owners))

    def after(self) -> InRegisters | InImage:
        last = self.layers % 2
        return InImage(self.refs[last], self.value.form, self.owners[last])
