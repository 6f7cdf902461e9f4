"""Which values of a program are compared with others, or are what a maximum that leaves it was taken of.

Comes in: a ``TileProgram``. Goes out: these values, and what pointwise operators make them of. A maximum's gradient goes to the
rows that equal it (``eq(x, max(x))``), and what equals nothing is divided by a count of 0. Maximum and comparison may be in
different programs, phases or loops, each of which makes ``x`` again beside other operators. ``x`` has the same bits everywhere
only if every operator on the way to it is rounded as its jaxpr says, whatever stands around it. How, a target knows.
"""

from __future__ import annotations

from collections.abc import Iterable

from kitsune_jax.ops.comparisons import COMPARISONS, HAND_ON
from kitsune_jax.ops.spec import is_float
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.passes.flow import VIEWS

EXTREMES = frozenset({"reduce_max", "reduce_min", "run_max"})
_MOVES = frozenset([*(kind for kind, spec in OPS.items() if spec.moves), "take", "cut", "paste", "copy"])
_COMPUTED = frozenset(kind for kind, spec in OPS.items() if spec.family in ("pointwise", "convert"))
_LEAVES = frozenset({"store", "store_slice", "push"})


def compared_values(program: TileProgram) -> frozenset[int]:
    """The values on the way to a comparison of two values, and to a maximum or minimum that leaves the program."""
    sources = _Sources(program)
    found = sources.behind(v for i in sources.instrs for v in sources.compared(i))
    left = sources.behind((i.inputs[0] for i in sources.instrs if i.kind in _LEAVES), HAND_ON | {"convert_element_type"})
    largest = (sources.makers[v] for v in left if v in sources.makers)
    return sources.behind(v for i in largest if i.kind in EXTREMES for v in i.inputs[:1]) | found


class _Sources:
    """What each value is made of. ``makers``: of those that no loop hands on."""

    def __init__(self, program: TileProgram):
        self.program = program
        self.instrs = [i for stage in program.stages for i in walk(stage.body)]
        self.makers: dict[int, Instr] = {}
        self.handed: dict[int, tuple[int, ...]] = {}  # by loops and queues
        self.constant = {v for v, _ in program.literals}
        pushed: dict[int, int] = {}
        for i in self.instrs:
            if i.kind == "push":
                pushed[i["queue"]] = i.inputs[0]
            if i.kind in VIEWS and i.inputs[0] in self.constant:
                self.constant.update(i.outputs)
            if i.block is None:
                self.makers.update((v, i) for v in i.outputs)
                continue
            for first, carry, last, after in zip(i.inputs, i.block.carries, i.block.results, i.outputs, strict=True):
                self.handed[carry] = self.handed[after] = (first, last)
        self.handed.update((i.outputs[0], (pushed[i["queue"]],)) for i in self.instrs if i.kind == "pop")

    def compared(self, instr: Instr) -> tuple[int, ...]:
        """Operands of ``instr`` that the bits of another value are held against."""
        if instr.kind in ("sink", "sink_at") and self.program.sinks[instr["sink"]].how in ("max", "min"):
            return instr.inputs[:1]
        x, y = instr.inputs if instr.kind in COMPARISONS else (-1, -1)
        return () if x == y or not self.constant.isdisjoint((x, y)) else (x, y)

    def behind(self, values: Iterable[int], through: frozenset[str] = _COMPUTED) -> frozenset[int]:
        """The floats among ``values``, and those that operators ``through`` make them of."""
        seen: set[int] = set()
        pending = list(values)
        while pending:
            v = pending.pop()
            if v in seen or v in self.constant or not is_float(self.program.values[v].dtype):
                continue
            seen.add(v)
            pending += self.handed.get(v, ())
            maker = self.makers.get(v)
            if maker is not None and (maker.kind in through or maker.kind in _MOVES or maker.kind in EXTREMES):
                pending += maker.inputs
        return frozenset(seen)
