"""Who makes and who reads each value of a body, whatever name it is called by.

Comes in: a stage's body, or that of a loop. Goes out: ``Flow``. The **root** of a value is the one that it is another name of: the
operand of a copy, or of a view that only inserts, drops or moves dimensions of extent 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.graph import Scalar
from kitsune_jax.program.ir import Instr, TileProgram, TileType, walk

VIEWS = frozenset({"broadcast_in_dim", "reshape", "transpose", "rev", "slice"})
Use = tuple[int, int]  # (instruction of the body, operand number)


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` without its dimensions of extent 1."""
    return tuple(n for n in shape if n != 1)


def is_other_name(program: TileProgram, instr: Instr) -> bool:
    """Whether the result of ``instr`` is its operand, up to dimensions of extent 1."""
    if instr.kind not in ("copy", "broadcast_in_dim", "reshape", "transpose", "convert_element_type"):
        return False
    x, y = program.values[instr.inputs[0]], program.values[instr.outputs[0]]
    if x.dtype != y.dtype or x.tile != y.tile:
        return False
    if instr.kind == "transpose":
        shape = x.rows_first
        moved = [p for p in instr["permutation"] if shape[p] != 1]
        return moved == sorted(moved)
    # Real dimensions go, in order, to real dimensions, and no other is real.
    return squeezed(x.shape) == squeezed(y.shape)


class Flow:
    """``results``: what a loop's body hands to its next iteration. It is ``activations.Code``: activations are looked for in it."""

    def __init__(self, program: TileProgram, body: Sequence[Instr], results: Sequence[int] = ()):
        self.program, self.body, self.results = program, body, tuple(results)
        self.makers: dict[int, Instr] = {v: instr for instr in body for v in instr.outputs}
        self.uses: dict[int, list[Use]] = {}  # of a root, by instructions that are not names or views of constants themselves
        self.constants: dict[int, Scalar] = dict(program.literals)
        self._roots: dict[int, int] = {}
        for i, instr in enumerate(body):
            if is_other_name(program, instr):
                self._roots[instr.outputs[0]] = self.root(instr.inputs[0])
            elif instr.kind in VIEWS and (constant := self.literal(instr.inputs[0])) is not None:
                self.constants[instr.outputs[0]] = constant  # constants look the same under every view
            else:
                self._read(i, instr.inputs)
                if instr.block is not None:
                    inside = (v for j in walk(instr.block.body) for v in (*j.inputs, *(j.block.results if j.block else ())))
                    self._read(i, (*inside, *instr.block.results), named=False)
        self._read(len(body), self.results)

    def _read(self, i: int, values: Sequence[int], named: bool = True) -> None:
        for p, v in enumerate(values):
            self.uses.setdefault(self.root(v), []).append((i, p if named else -1))

    def type(self, v: int) -> TileType:
        return self.program.values[v]

    def root(self, v: int) -> int:
        return self._roots.get(v, v)

    def instruction(self, i: int) -> Instr:
        return self.body[i] if i < len(self.body) else Instr("results", self.results, ())

    def readers(self, root: int) -> list[int]:
        return [i for i, _ in self.uses.get(root, ())]

    def literal(self, v: int) -> Scalar | None:
        return self.constants.get(self.root(v))

    def shape(self, v: int) -> tuple[int, ...]:
        return squeezed(self.type(v).shape)

    def dtype(self, v: int) -> str:
        return self.type(v).dtype
