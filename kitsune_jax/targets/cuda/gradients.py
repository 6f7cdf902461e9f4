"""Weight gradients in the text of a stage: both operands to panels in shared memory, which the lanes of the CTA multiply together.

Comes in: a ``matmul_sink`` and the ``Body`` it belongs to. Goes out: text, and what the kernel around the stage must know: the
accumulators (``body.gradients``) and the panels' bytes. The gradients of a stage use the panels in turn. Sums over the rows of an
operand (the gradient of a bias) are made from its panel.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.actions import ToPanel
from kitsune_jax.targets.cuda.values import GradientCode, PanelSum
from kitsune_jax.targets.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body


@dataclasses.dataclass(frozen=True, slots=True)
class _Panel:
    """``value`` in shared memory. ``at``: bytes from the lane's panels on; ``width``: its columns."""

    value: int
    name: str
    at: int
    width: int


def emit(body: Body, instr: Instr) -> None:
    """Generates ``instr``. Raises ``CannotLower``."""
    if (instr["x_contract"], instr["y_contract"], instr["x_batch"], instr["y_batch"]) != ((0,), (0,), (), ()):
        raise CannotLower("a product that contracts the stream and other dimensions has no code on the GPU")
    sink = body.program.sinks[instr["sink"]]
    dtype, other = (body.value(v).dtype for v in instr.inputs)
    if other != dtype or dtype not in pointwise.OPERAND or sink.dtype != "float32":
        raise CannotLower(f"a weight gradient of {dtype} and {other} in {sink.dtype} has no code on the GPU")
    shape, k, operand = _shape(body, instr), instr["sink"], pointwise.OPERAND[dtype]
    x, y = _panels(body, instr)
    for panel in (x, y):
        if panel.name in body.early_panels:
            continue
        _declare(body, panel)
        if body.value(panel.value).row:
            body.text(f"{panel.name}.put(lane, 0, {body.row_as_tile(panel.value)}, valid);")
        else:
            body.loop(panel.width, [ToPanel(panel.value, panel.name)])
    type_ = f"Gradient<{operand}, {x.width}, {y.width}, {shape.blocks}, {shape.all_blocks}, {shape.width}, kLanes>"
    where = f"panels.base, panels.base + {y.at}, panels.stride, group * {shape.blocks}"
    body.setup.append(f"const {type_} gradient{k}{{{where}}};")
    body.setup.append(f"float sum{k}[{shape.blocks}][{shape.width // 2}];")
    body.setup.append(f"for (int m = 0; m < {shape.blocks}; ++m) for (int i = 0; i < {shape.width // 2}; ++i) sum{k}[m][i] = 0.0f;")
    sums = tuple(_sum(body, i, panel) for panel in (x, y) for i in _sums_of(body, instr, panel.value))
    meanwhile = " ".join(f"columns{s.sink}.add(sink{s.sink});" for s in sums)
    body.text(f"gradient{k}.add(sum{k}, [&] {{ {meanwhile} }});" if sums else f"gradient{k}.add(sum{k}, [] {{}});")
    body.gradients.append(GradientCode(k, shape, pointwise.ELEMENT[body.program.outputs[sink.array].dtype], sums))
    body.budget.hold(shape.registers)


def early(body: Body, effect: Instr) -> list[ToPanel]:
    """The panel of the stage's next gradient that holds the value of ``effect``: it is written in the same loop."""
    (v,) = effect.inputs
    instr = next((i for i in body.instrs if i.kind == "matmul_sink" and i["sink"] not in {g.sink for g in body.gradients}), None)
    if instr is None or body.instrs.index(instr) < body.instrs.index(effect):
        return []
    mine = [x for x in instr.inputs if body.root(x) == body.root(v)]
    if len(mine) != 1:
        return []
    (panel,) = (p for p in _panels(body, instr) if p.value == mine[0])
    if panel.name in body.early_panels:
        return []
    body.early_panels.add(panel.name)
    _declare(body, panel)
    return [ToPanel(panel.value, panel.name)]


def sums_panel(body: Body, effect: Instr) -> bool:
    """Is ``effect`` the sum over the rows of a 16-bit value that is an operand of a gradient of the stage?"""
    return any(effect in _sums_of(body, i, v) for i in body.instrs if i.kind == "matmul_sink" for v in i.inputs)


def _sums_of(body: Body, gradient: Instr, v: int) -> list[Instr]:
    """The sums that are made of the panel of ``v``: of the first gradient that has one."""
    operands = [i.inputs for i in body.instrs[: body.instrs.index(gradient)] if i.kind == "matmul_sink"]
    t = body.program.values[v]
    if not tiles.is_half(t.dtype) or math.prod(t.shape) == 1 or any(body.root(x) == body.root(v) for xs in operands for x in xs):
        return []
    if v == gradient.inputs[1] and body.root(gradient.inputs[0]) == body.root(v):
        return []

    def is_sum(i: Instr) -> bool:
        if i.kind != "sink" or body.root(i.inputs[0]) != body.root(v):
            return False
        sink = body.program.sinks[i["sink"]]
        return sink.how == "sum" and sink.dtype in ("float32", t.dtype) and tuple(i["axes"]) == (0,)

    return [i for i in body.instrs if is_sum(i)]


def _sum(body: Body, instr: Instr, panel: _Panel) -> PanelSum:
    k = instr["sink"]
    operand = pointwise.OPERAND[body.program.values[panel.value].dtype]
    columns = math.prod(body.program.sinks[k].shape) // (body.config.split if panel.value in body.slabs else 1)
    type_ = f"PanelSums<{operand}, {panel.width}, kLanes>"
    body.setup.append(f"const {type_} columns{k}{{panels.base + {panel.at}, panels.stride, group}};")
    body.setup.append(f"float sink{k}[2 * columns{k}.kRounds] = {{}};")
    body.budget.hold(2)
    element = pointwise.ELEMENT[body.program.outputs[body.program.sinks[k].array].dtype]
    return PanelSum(k, panel.width, columns, panel.value in body.slabs, element)


def _panels(body: Body, instr: Instr) -> tuple[_Panel, _Panel]:
    """The operand whose columns are the rows of the accumulators, and the other."""
    x, y = reversed(instr.inputs) if _shape(body, instr).swapped else instr.inputs
    widths = [_width(body, v) for v in (x, y)]
    first = tiles.panel_bytes(widths[0], tiles.is_half(body.program.values[x].dtype))
    return _Panel(x, f"panel{instr['sink']}x", 0, widths[0]), _Panel(y, f"panel{instr['sink']}y", first, widths[1])


def _width(body: Body, v: int) -> int:
    """Of the panel of ``v``, which the stage may not have made yet."""
    columns = math.prod(body.program.values[v].shape)
    return tiles.padded(columns // body.config.split if v in body.slabs else columns)


def _declare(body: Body, panel: _Panel) -> None:
    dtype = body.value(panel.value).dtype
    type_ = f"Panel<{pointwise.OPERAND[dtype]}, {panel.width}>"
    body.prologue.append(f"const {type_} {panel.name}{{panels.mine() + {panel.at}}};")
    if panel.width % 64:
        body.setup.append(f"{type_}{{panels.mine() + {panel.at}}}.clear(lane, 1 + group);")
    body.panel_bytes = max(body.panel_bytes, panel.at + tiles.panel_bytes(panel.width, tiles.is_half(dtype)))


def _shape(body: Body, instr: Instr) -> tiles.GradientShape:
    """The accumulators of a weight gradient: of a split stage, those whose slabs the stage's other values agree with."""
    n = [math.prod(body.program.values[v].shape) for v in instr.inputs]
    half = tiles.is_half(body.program.values[instr.inputs[0]].dtype)
    shapes = tiles.gradient_shapes(n[0], n[1], half, body.config.split, body.config.lanes)
    if body.config.split > 1:
        slabs = [v in body.slabs for v in instr.inputs]
        shapes = [s for s in shapes if slabs == [s.swapped, not s.swapped]]
    if not shapes:
        raise CannotLower(f"a weight gradient of {n[0]} x {n[1]} does not fit the registers of {body.config.split} CTAs")
    return shapes[0]
