"""Weight gradients: both operands go to panels in shared memory, which the lanes of the CTA multiply together.

Comes in: a ``matmul_sink`` and the ``Evaluation`` of its stage. Goes out: nodes. The gradients of a stage use the panels in turn.
Sums over the rows of an operand (the gradient of a bias) are made from its panel.
"""

from __future__ import annotations

import math

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Ref, ToPanel
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.statements import Panel
from kitsune_jax.targets.errors import CannotLower


def lower(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``. Raises ``CannotLower``."""
    if (instr["x_contract"], instr["y_contract"], instr["x_batch"], instr["y_batch"]) != ((0,), (0,), (), ()):
        raise CannotLower("a product that contracts the stream and other dimensions has no code on the GPU")
    sink = at.program.sinks[instr["sink"]]
    dtype, other = (at.value(v).dtype for v in instr.inputs)
    if other != dtype or dtype not in pointwise.OPERAND or sink.dtype != "float32":
        raise CannotLower(f"a weight gradient of {dtype} and {other} in {sink.dtype} has no code on the GPU")
    (x_value, x), (y_value, y) = _panels(at, instr)
    for v, panel in ((x_value, x), (y_value, y)):
        if panel in at.prologue or _holds(at, v, panel):
            continue  # written already, in the loop of another effect, or for an earlier gradient
        _declare(at, v, panel)
        if at.value(v).row:
            at.add(st.RowToPanel(panel.ref, at.row_tile(v)))
        else:
            at.evaluate(panel.width, [ToPanel(v, panel.ref)])
    gradient, shape = Ref("gradient", instr["sink"]), _shape(at, instr)
    at.setup.append(st.GradientStart(gradient, dtype, x, y, shape))
    sums = []
    for v, panel in ((x_value, x), (y_value, y)):
        for i in (i for g, of, i in at.facts.panel_sums if g == instr and of == v):
            sums.append(Ref("columns", i["sink"]))
            n = math.prod(at.program.sinks[i["sink"]].shape)
            at.setup.append(st.PanelSumStart(sums[-1], panel, n // at.split if at.is_slab(v) else n, at.is_slab(v), gradient))
    at.add(st.AddGradient(gradient, tuple(sums)))
    at.done.add(instr)


def early_panel(at: Evaluation, effect: Instr) -> list[ToPanel]:
    """The panel of the stage's next gradient that holds the value of ``effect``: it is written in the same loop."""
    instrs, root = at.instrs, at.root(effect.inputs[0])
    instr = next((i for i in instrs if i.kind == "matmul_sink" and i not in at.done), None)
    if instr is None or instrs.index(instr) < instrs.index(effect):
        return []
    mine = [x for x in instr.inputs if at.root(x) == root]
    if len(mine) != 1:
        return []
    (panel,) = (p for v, p in _panels(at, instr) if v == mine[0])
    if panel in at.prologue or _holds(at, root, panel):
        return []
    _declare(at, root, panel)
    return [ToPanel(root, panel.ref)]


def _panels(at: Evaluation, instr: Instr) -> tuple[tuple[int, Panel], tuple[int, Panel]]:
    """The operand whose columns are the rows of the accumulators, and the other; each with its panel."""
    x, y = reversed(instr.inputs) if _shape(at, instr).swapped else instr.inputs
    k, dtype, (x_width, y_width) = instr["sink"], at.program.values[x].dtype, (_width(at, v) for v in (x, y))
    behind = tiles.panel_bytes(x_width, tiles.is_half(dtype))
    return (x, Panel(Ref("panel", k, "x"), dtype, x_width, 0)), (y, Panel(Ref("panel", k, "y"), dtype, y_width, behind))


def _width(at: Evaluation, v: int) -> int:
    """Of the panel of ``v``, which the stage may not have made yet."""
    columns = math.prod(at.program.values[v].shape)
    return tiles.padded(columns // at.split if at.is_slab(v) else columns)


def _holds(at: Evaluation, v: int, panel: Panel) -> bool:
    """Does ``v`` lie in the place of ``panel`` still? In a step of a loop two weights have gradients with one cotangent."""
    return at.repeated and at.panels.get(panel.at, ())[:2] == (at.root(v), panel.width)


def _declare(at: Evaluation, v: int, panel: Panel) -> None:
    """``v`` goes to ``panel``, and what lay there is gone."""
    at.once_per_tile(panel)
    end = panel.at + tiles.panel_bytes(panel.width, tiles.is_half(panel.dtype))
    at.panels = {place: of for place, of in at.panels.items() if place >= end or of[2] <= panel.at}
    at.panels[panel.at] = at.root(v), panel.width, end
    if panel.width % 64:
        at.setup.append(st.ClearPanel(panel))


def _shape(at: Evaluation, instr: Instr) -> tiles.GradientShape:
    """The accumulators of a weight gradient: of a split stage, those whose slabs the stage's other values agree with."""
    n = [math.prod(at.program.values[v].shape) for v in instr.inputs]
    half = tiles.is_half(at.program.values[instr.inputs[0]].dtype)
    shapes = tiles.gradient_shapes(n[0], n[1], half, at.split, at.lanes)
    if at.split > 1:
        slabs = [at.is_slab(v) for v in instr.inputs]
        shapes = [s for s in shapes if slabs == [s.swapped, not s.swapped]]
    if not shapes:
        raise CannotLower(f"a weight gradient of {n[0]} x {n[1]} does not fit the registers of {at.split} CTAs")
    return shapes[0]
