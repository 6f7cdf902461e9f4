"""Simulators as tile programs written by hand: loops that carry a state of a few numbers for each row."""

from __future__ import annotations

import numpy as np

from kitsune_jax.ops.spec import ROWS
from kitsune_jax.program.ir import Program
from tests.support.programs import Array, Case
from tests.support.tiles import Tiles


def cart_pole(rows: int = 37, steps: int = 5, *, columns: bool = False, reverse: bool = False, tile_rows: int = 16) -> Case:
    """CartPole's equations of motion: an action for each row and step comes in, the position goes out, the state is carried:
    four arrays, or (``columns``) one with four columns."""
    t = Tiles((rows,), tile_rows)
    lit = t.literal
    actions, out = t.input((steps, rows), "int32", ((), (0,))), t.output((steps, rows), "float32", ((), (0,)))
    state = [t.load((rows, 4), "float32", ((0,), ()))] if columns else [t.load((rows,), "float32", ((0,),)) for _ in range(4)]
    with t.loop(steps, *state, reverse=reverse) as loop:
        parts = loop.carries
        if columns:
            cut = [t.op("slice", parts[0], shape=(1,), start=(0, k), limit=(ROWS, k + 1), strides=(1, 1)) for k in range(4)]
            parts = tuple(t.reshape(c, ()) for c in cut)
        x, v, angle, turn = parts
        action = t.reshape(t.load_slice(actions, (loop.index, 0, 1, 1)), ())
        right = t.op("eq", action, lit(1, "int32"), dtype="bool")
        force = t.op("select_n", right, lit(-10.0), lit(10.0), shape=(), dtype="float32")
        cos, sin = t.op("cos", angle), t.op("sin", angle)
        push = t.op("div", t.op("add", force, t.op("mul", t.op("mul", t.op("mul", turn, turn), sin), lit(0.05))), lit(1.1))
        lever = t.op("mul", lit(0.5), t.op("sub", lit(4 / 3), t.op("mul", t.op("mul", cos, cos), lit(0.1 / 1.1))))
        bend = t.op("div", t.op("sub", t.op("mul", lit(9.8), sin), t.op("mul", cos, push)), lever)
        pull = t.op("sub", push, t.op("mul", t.op("mul", lit(0.05 / 1.1), bend), cos))
        moved = [t.op("add", p, t.op("mul", lit(0.02), d)) for p, d in ((x, v), (v, pull), (angle, turn), (turn, bend))]
        t.store_slice(t.reshape(moved[0], (1,)), out, (loop.index, 0, 1, 1))
        loop.next(*([t.concat(*(t.reshape(m, (1,)) for m in moved), dimension=1)] if columns else moved))
    for v in loop.results:
        t.store(v, (rows, 4) if columns else (rows,), ((0,), ()) if columns else ((0,),))

    def operands(rng: np.random.Generator) -> list[Array]:
        state = 0.3 * rng.standard_normal((rows, 4)).astype(np.float32)
        return [rng.integers(0, 2, (steps, rows)).astype(np.int32), *([state] if columns else np.ascontiguousarray(state.T))]

    def reference(actions: Array, *state: Array) -> list[Array]:
        x, v, angle, turn = state[0].T if columns else state
        out = np.zeros((steps, rows))
        for k in reversed(range(steps)) if reverse else range(steps):
            cos, sin = np.cos(angle), np.sin(angle)
            push = (np.where(actions[k] == 1, 10, -10) + 0.05 * turn * turn * sin) / 1.1
            bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - cos * cos * 0.1 / 1.1))
            pull = push - 0.05 / 1.1 * bend * cos
            x, v, angle, turn = x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend
            out[k] = x
        return [out, np.stack([x, v, angle, turn], 1)] if columns else [out, x, v, angle, turn]

    return Case(Program.of(t.program()), operands, reference)
