"""Who makes and who reads each value of a body, whatever name it is called by.

Comes in: a stage's body, that of a loop, or ops of a graph. Goes out: ``Flow``. The **root** of a value is the one that it is
another name of: the operand of a copy, or of a view that only inserts, drops or moves dimensions of extent 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from kitsune_jax.graph import Graph, Scalar, Value
from kitsune_jax.program.ir import Instr, TileType, walk

VIEWS = frozenset({"broadcast_in_dim", "reshape", "transpose", "rev", "slice"})
Use = tuple[int, int]  # (instruction of the body, operand number)
Types = Sequence[TileType] | Mapping[int, TileType]


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` without its dimensions of extent 1."""
    return tuple(n for n in shape if n != 1)


def is_other_name(values: Types, instr: Instr) -> bool:
    """Whether the result of ``instr`` is its operand, up to dimensions of extent 1."""
    if instr.kind not in ("copy", "broadcast_in_dim", "reshape", "transpose", "convert_element_type"):
        return False
    x, y = values[instr.inputs[0]], values[instr.outputs[0]]
    if x.dtype != y.dtype or x.tile != y.tile:
        return False
    if instr.kind == "transpose":
        shape = x.rows_first
        moved = [p for p in instr["permutation"] if shape[p] != 1]
        return moved == sorted(moved)
    # Real dimensions go, in order, to real dimensions, and no other is real.
    return squeezed(x.shape) == squeezed(y.shape)


class Typed(Protocol):
    """What a ``Flow`` asks of a program: the types of values, and the constants among them."""

    @property
    def values(self) -> Types: ...
    @property
    def literals(self) -> Sequence[tuple[int, Scalar]]: ...


class Flow:
    """``results`` is what is read behind the body: what a loop hands to its next iteration."""

    def __init__(self, program: Typed, body: Sequence[Instr], results: Sequence[int] = ()):
        self.values, self.body, self.results = program.values, body, tuple(results)
        self.makers: dict[int, Instr] = {v: instr for instr in body for v in instr.outputs}
        self.uses: dict[int, list[Use]] = {}  # of a root, by instructions that are not names or views of constants themselves
        self.constants: dict[int, Scalar] = dict(program.literals)
        self._roots: dict[int, int] = {}
        for i, instr in enumerate(body):
            if is_other_name(self.values, instr):
                self._roots[instr.outputs[0]] = self.root(instr.inputs[0])
            elif instr.kind in VIEWS and (constant := self.literal(instr.inputs[0])) is not None:
                self.constants[instr.outputs[0]] = constant  # constants look the same under every view
            else:
                self._read(i, instr.inputs)
                if instr.block is not None:
                    inside = (v for j in walk(instr.block.body) for v in (*j.inputs, *(j.block.results if j.block else ())))
                    self._read(i, (*inside, *instr.block.results), named=False)
        self._read(len(body), self.results)

    @staticmethod
    def of_graph(graph: Graph, ops: Sequence[int], results: Sequence[int]) -> Flow:
        """Of the ops number ``ops`` of ``graph``; ``results``: the values that something else reads, too."""
        body = [Instr(op.kind, op.inputs, op.outputs, op.params) for op in (graph.ops[i] for i in ops)]
        read = {v: graph.values[v].literal for i in body for v in i.inputs}
        return Flow(_Ops(_Whole(graph.values), tuple((v, c) for v, c in read.items() if c is not None)), body, results)

    def _read(self, i: int, values: Sequence[int], named: bool = True) -> None:
        for p, v in enumerate(values):
            self.uses.setdefault(self.root(v), []).append((i, p if named else -1))

    def type(self, v: int) -> TileType:
        return self.values[v]

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


@dataclasses.dataclass(frozen=True)
class _Ops:
    values: _Whole
    literals: tuple[tuple[int, Scalar], ...]


class _Whole(dict[int, TileType]):
    """The types of a graph's values, made when they are asked for."""

    def __init__(self, values: Sequence[Value]):
        self.graph_values = values

    def __missing__(self, v: int) -> TileType:
        self[v] = TileType(False, self.graph_values[v].shape, self.graph_values[v].dtype)
        return self[v]
