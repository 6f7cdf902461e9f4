"""What leaves a stage: pushes into queues, stores to arrays, sinks. All that is done with one value is done in one loop.

Comes in: an instruction with an effect, and the ``Body`` it belongs to. Goes out: text. Invariant: an effect may come earlier than
its place in the stage, never later: a wait for a queue's free slot depends on earlier tiles only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import gradients, pointwise, tiles
from kitsune_jax.targets.cuda.actions import Action, Fold, Keep, Store
from kitsune_jax.targets.cuda.values import SinkCode, queue_form
from kitsune_jax.targets.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body

HOW = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "and": "And", "or": "Or"}
KINDS = frozenset({"push", "store", "sink"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Effect:
    """``action``: None where the lines in front do everything (a value with one number per row)."""

    before: tuple[str, ...]
    action: Action | None
    after: tuple[str, ...] = ()


def emit(body: Body, instr: Instr) -> None:
    """Generates ``instr``, and with it every other effect of its value that the stage has further on."""
    (v,) = instr.inputs
    if gradients.sums_panel(body, instr):
        return  # with the gradient
    batch = [_MAKERS[i.kind](body, i) for i in body.effects_of(instr)]
    for effect in batch:
        for line in effect.before:
            body.text(line)
    actions = [effect.action for effect in batch if effect.action is not None]
    if actions:
        body.loop(body.value(v).width, [*actions, *gradients.early(body, instr)])
    for effect in batch:
        for line in effect.after:
            body.text(line)


def _push(body: Body, instr: Instr) -> _Effect:
    (v,), q = instr.inputs, instr["queue"]
    value = body.value(v)
    acquire, release = f"queue{q}.wr_acquire(n);", f"queue{q}.wr_release(n);"
    once = _once(body, v)
    if value.row:
        x = [f"to_word({body.row(v).replace('[h]', f'[{h}]')})" for h in range(2)]
        return _Effect((acquire, f"{once}queue{q}.push(n, 0, U4{{{x[0]}, {x[1]}, 0, 0}});", release), None)
    form = queue_form(value.dtype, q in body.config.slab_queues)
    first = f"slab * {tiles.image_vectors(value.width, form)} + " if v in body.slabs else ""
    put = f"const auto push{q} = [&](int i, U4 v) {{ {once}queue{q}.push(n, {first}i, v); }};"
    return _Effect((acquire, put), Keep(v, f"q{q}", form, put=f"push{q}", push=True, reads=1), (release,))


def _store(body: Body, instr: Instr) -> _Effect:
    (v,) = instr.inputs
    array = instr["array"]
    if not body.value(v).row:
        if _once(body, v):
            raise CannotLower("a stage that is split by columns stores a value that is not")
        return _Effect((), Store(v, array))
    row, x = body.arrays.row("out", array), body.row(v)
    element = pointwise.ELEMENT[body.program.outputs[array].dtype]
    store = f"store_one<{element}>({row}[h], valid[h] && lane.q == 0, {x});"
    return _Effect(("KITSUNE_UNROLL", f"for (int h = 0; h < 2; ++h) {_once(body, v)}{store}"), None)


def _once(body: Body, v: int) -> str:
    """What stands in front of an effect of ``v``: all CTAs of a split stage have what is no slab, and only one hands it on."""
    return "if (slab == 0) " if body.config.split > 1 and v not in body.slabs else ""


def _sink(body: Body, instr: Instr) -> _Effect:
    (v,) = instr.inputs
    sink = body.program.sinks[instr["sink"]]
    value, rank = body.value(v), len(body.program.values[v].shape)
    if sink.how not in HOW:
        raise CannotLower(f"a sink by {sink.how} has no code on the GPU")
    how, type_, name = HOW[sink.how], pointwise.COMPUTE[sink.dtype], f"sink{instr['sink']}"
    scalar = value.row or len(instr["axes"]) == rank + 1
    if not scalar and tuple(instr["axes"]) != (0,):
        raise CannotLower("a sink over the rows and a part of a row's dimensions has no code on the GPU")
    if body.config.split > 1:
        raise CannotLower("a sink of a stage that is split by columns has no code on the GPU")
    width = 1 if scalar else value.width
    body.sinks.append(SinkCode(instr["sink"], name, how, type_, scalar, width, not value.row))
    body.budget.hold(1 if scalar else width // 4)
    identity = f"{how}::identity<{type_}>()"
    if scalar:
        body.setup.append(f"{type_} {name} = {identity};")
    else:
        body.setup.append(f"{type_} {name}[{width // 4}];")
        body.setup.append(f"for (int i = 0; i < {width // 4}; ++i) {name}[i] = {identity};")
    if not value.row:
        return _Effect((), Fold(v, how, name, stream=True, scalar=scalar))
    fold = f"if (valid[h]) {name} = {how}::fold({name}, {type_}({body.row(v)}));"
    return _Effect(("KITSUNE_UNROLL", f"for (int h = 0; h < 2; ++h) {fold}"), None)


_MAKERS = {"push": _push, "store": _store, "sink": _sink}
