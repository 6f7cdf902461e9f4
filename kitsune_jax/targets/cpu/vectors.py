"""Vector programs: straight-line pointwise code over (rows, *extents), built in SSA form and then given registers.

Comes in: loads, constants, micro-operations and stores in program order through ``VectorBuilder``, or a tile program's pointwise
instructions through ``emit_micro_operations``. Goes out: one ``Vector`` instruction, its loop dimensions merged where every operand
allows it. Invariant: no micro-operation writes a register that it reads, so kernels may run in vectors of any width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.graph import Scalar
from kitsune_jax.ops.pointwise import Words, element
from kitsune_jax.ops.spec import NARROW, np_dtype
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, MAX_LOOP_DIMS, MAX_REGISTERS, OPCODE, SCRATCH, CpuOperand, CpuVector, Micro
from kitsune_jax.targets.cpu.memory import View, merge_dims

# --- Building a vector program ----------------------------------------------------------------------------------------------------


class TooManyRegisters(Exception):
    """More than ``MAX_REGISTERS`` values are alive at once: the group has to be split."""


def compute_type(dtype: str) -> str:
    """The type in which a value of ``dtype`` is computed: float32 for 16-bit floats, else ``dtype``."""
    return "float32" if dtype in NARROW else dtype


@dataclasses.dataclass
class _MicroOperation:
    """A micro-operation in SSA form. ``args``: SSA numbers of the registers it reads; ``dst``: its own number, -1 for stores."""

    op: str
    type: str
    args: tuple[int, ...] = ()
    dst: int = -1
    operand: int = -1  # load, store
    index: tuple[int, int, int] = (0, 0, 0)  # index: (loop dimension, divisor, modulus)
    from_type: str = "bool"
    imm: tuple[float, ...] = ()


class VectorBuilder:
    """Builds one ``Vector`` over a tile of row shape ``extents``, which has no dimensions of extent 1."""

    def __init__(self, extents: tuple[int, ...]):
        self.extents = extents
        self._nodes: list[_MicroOperation] = []
        self._loads: list[View] = []  # of shape ``extents``, as stores are
        self._stores: list[View] = []
        self._known: dict[object, int] = {}
        self._next = 0

    def _define(self, key: object, node: _MicroOperation) -> int:
        """The number of ``node``, or of the earlier node with the same ``key``."""
        if key not in self._known:
            node.dst = self._known[key] = self._next
            self._next += 1
            self._nodes.append(node)
        return self._known[key]

    def _squeezed(self, view: View) -> View:
        strides = tuple(s for n, s in zip(view.shape, view.strides, strict=True) if n != 1)
        if len(strides) != len(self.extents):
            raise CannotLower(f"an operand of shape {view.shape} in a loop over {self.extents}")
        return View(view.ref, view.row_stride, self.extents, strides)

    def load(self, view: View) -> int:
        """Register <- ``view``, whose shape is the loop's, with or without dimensions of extent 1."""
        view = self._squeezed(view)
        key = ("load", view)
        if key not in self._known:
            self._loads.append(view)
        return self._define(key, _MicroOperation("load", compute_type(view.dtype), operand=len(self._loads) - 1))

    def const(self, value: Scalar, dtype: str) -> int:
        kind = compute_type(dtype)
        return self._define(("const", kind, repr(value)), _MicroOperation("const", kind, imm=immediate(value, kind)))

    def index(self, dim: int, divisor: int, modulus: int, dtype: str) -> int:
        """Register <- (position in dimension ``dim`` // divisor) % modulus; 0 is the global row, 1.. are those of ``extents``,
        and -1.. are the numbers of the enclosing loops."""
        kind = dtype if dtype in ("int32", "uint32", "int64") else "int64"
        index = dim, divisor, modulus
        position = self._define(("index", index, kind), _MicroOperation("index", kind, index=index))
        return position if kind == dtype else self.rounded(self.convert(position, kind, compute_type(dtype)), dtype)

    def convert(self, x: int, from_type: str, to: str) -> int:
        if from_type == to:
            return x
        return self._define(("convert", x, to), _MicroOperation("convert", to, (x,), from_type=from_type))

    def rounded(self, x: int, dtype: str) -> int:
        """``x`` rounded to ``dtype`` where that is a 16-bit float, which has no register type of its own."""
        return self.micro(f"to_{dtype}", "float32", x) if dtype in NARROW else x

    def micro(self, op: str, kind: str, *args: int, from_type: str = "bool", imm: tuple[float, ...] = ()) -> int:
        return self._define((op, kind, args, imm), _MicroOperation(op, kind, args, from_type=from_type, imm=imm))

    def store(self, view: View, x: int) -> None:
        self._stores.append(self._squeezed(view))
        self._nodes.append(_MicroOperation("store", compute_type(view.dtype), (x,), operand=len(self._stores) - 1))

    def finish(self) -> CpuVector:
        """The instruction. Raises ``TooManyRegisters``, and ``CannotLower`` for more loop dimensions than the format has."""
        self._move_bits()
        indexed = any(n.op == "index" for n in self._nodes)
        # From the largest to the smallest stride of the first store, so that it writes consecutive elements.
        order = sorted(range(len(self.extents)), key=lambda d: -abs(self._stores[0].strides[d]))
        groups = merge_dims(self.extents, [view.strides for view in (*self._loads, *self._stores)], order)
        if len(groups) + 1 > MAX_LOOP_DIMS:
            raise CannotLower(f"a loop over more than {MAX_LOOP_DIMS - 1} dimensions of a tile")
        extents = tuple(_extent(self.extents, g) for g in groups)

        def operand(view: View) -> CpuOperand:
            return view.operand(tuple(view.strides[g[-1]] for g in groups) or (view.row_stride,))

        loads, stores = tuple(map(operand, self._loads)), tuple(map(operand, self._stores))
        if not extents:  # one element per row: an inner loop of extent 1 that merges with the rows
            extents = (1,)
        collapse = not indexed and all(o.row_stride == extents[0] * o.strides[0] for o in (*loads, *stores))
        return CpuVector(extents, int(collapse), loads, stores, tuple(self._allocate(groups)))

    def _move_bits(self) -> None:
        """Load and store the bits of 16-bit floats as integers, where the program only selects among and copies floats in scratch:
        converting them to float32 and back takes longer than all else."""
        moved = [n for n in self._nodes if n.type == "float32"]
        if not all(n.op in ("load", "store", "const", "select") for n in moved):
            return
        views = {"load": self._loads, "store": self._stores}
        places = [views[n.op][n.operand] for n in moved if n.op in views]
        makes = {n.dst for n in moved if n.op != "store"}
        others = [n for n in self._nodes if n.type != "float32"]
        dtypes = {view.dtype for view in places}
        if len(dtypes) != 1 or not dtypes <= NARROW or any(view.ref.space != SCRATCH for view in places):
            return
        if any(makes.intersection(n.args) for n in others):
            return
        (dtype,) = dtypes
        for n in moved:
            n.type = "uint16"
            if n.op == "const":
                with np.errstate(over="ignore"):  # which gives an infinity, as a store would
                    n.imm = (float(np.array(n.imm[0], np_dtype(dtype)).view(np.uint16)),)
            elif n.op in views:
                view = views[n.op][n.operand]
                ref = dataclasses.replace(view.ref, dtype=DTYPE_CODE["uint16"])
                views[n.op][n.operand] = dataclasses.replace(view, ref=ref)

    def _allocate(self, groups: Sequence[Sequence[int]]) -> list[Micro]:
        """Linear scan: a register is free again after the last micro-operation that reads it."""
        last = {x: i for i, node in enumerate(self._nodes) for x in node.args}
        free = list(range(MAX_REGISTERS - 1, -1, -1))
        at: dict[int, int] = {}
        code = []
        for i, node in enumerate(self._nodes):
            if node.op != "store":
                if node.dst not in last:
                    continue  # nothing reads it
                if not free:
                    raise TooManyRegisters
                at[node.dst] = free.pop()
            code.append(self._encode(node, at, groups))
            free.extend(at[x] for x in dict.fromkeys(node.args) if last[x] == i)
        return code

    def _encode(self, node: _MicroOperation, at: dict[int, int], groups: Sequence[Sequence[int]]) -> Micro:
        args = [at[x] for x in node.args]
        if node.op in ("load", "store"):
            args = [node.operand, *args]
        elif node.op == "index":
            args = list(self._position(node.index, groups))
        a, b, c, d = (*args, 0, 0, 0, 0)[:4]
        return Micro(OPCODE[node.op], DTYPE_CODE[node.type], at.get(node.dst, 0), a, b, c, d, DTYPE_CODE[node.from_type], node.imm)

    def _position(self, index: tuple[int, int, int], groups: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """``index`` in terms of merged loop dimensions: the inner extents of a merged dimension multiply the divisor."""
        dim, divisor, modulus = index
        if dim <= 0:
            return index
        for k, group in enumerate(groups):
            if dim - 1 in group:
                inner = _extent(self.extents, group[group.index(dim - 1) + 1 :])
                return k + 1, divisor * inner, modulus
        raise AssertionError(f"dimension {dim} is in no loop")


def _extent(extents: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(extents[d] for d in dims)


def immediate(value: Scalar, kind: str) -> tuple[float, ...]:
    if kind.startswith("float"):
        return (float(value),)
    number = int(value)
    if abs(number) <= 2**53:
        return (float(number),)
    return (float(number >> 32), float(number & 0xFFFFFFFF))


# --- Bits of ``rbg`` keys ---------------------------------------------------------------------------------------------------------

_WORD = "uint32"


def emit_element(builder: VectorBuilder, words: list[int]) -> int:
    """The register of an element's random bits. ``words``: registers of the key's four words and of the element's number."""

    def micro(name: str) -> Callable[[int, int], int]:
        return lambda x, y: builder.micro(name, _WORD, x, y)

    def number(value: int) -> int:
        return builder.const(value, _WORD)

    def less(x: int, y: int) -> int:
        return builder.convert(builder.micro("lt", _WORD, x, y), "bool", _WORD)

    def choose(which: int, zero: int, other: int) -> int:
        return builder.micro("select", _WORD, builder.micro("ne", _WORD, which, number(0)), zero, other)

    add, multiply, high, xor, both, shifted = map(micro, ("add", "mul", "mulhi", "xor", "and", "shift_right_logical"))
    return element(Words(number, add, multiply, high, xor, both, shifted, less, choose), *words)


# --- Pointwise instructions as micro-operations -----------------------------------------------------------------------------------


def is_pointwise(kind: str) -> bool:
    """Whether ``kind`` becomes micro-operations of a ``Vector``."""
    return kind in OPS and OPS[kind].family in ("pointwise", "convert") and kind != "copy"


def emit_micro_operations(builder: VectorBuilder, instr: Instr, args: list[int], dtypes: list[str], out: str, rounds: bool) -> int:
    """Append ``instr`` to ``builder``; returns the register of its result. 16-bit floats are computed in float32.

    ``args``: the operands' registers, ``dtypes`` their dtypes, ``out`` the result's dtype. ``rounds``: whether a conversion to a
    16-bit float has to round in the register (a store rounds anyway).
    """
    spec, params, result = OPS[instr.kind], dict(instr.params), compute_type(out)
    if spec.family == "convert":
        x = builder.convert(args[0], compute_type(dtypes[0]), result)
        return builder.rounded(x, out) if rounds and dtypes[0] != out else x
    if spec.cpu is None:
        raise CannotLower(f"{instr.kind} has no micro-operation on the CPU")
    if spec.gives == "any":  # the operand as it is
        return builder.micro(spec.cpu, result, *args, from_type=compute_type(dtypes[0]))
    types = [compute_type(dtypes[0]) if spec.gives else result] * len(args)
    if instr.kind == "select_n":
        types[0] = "bool"
    if instr.kind == "philox4x32":
        return emit_element(builder, args)
    args = [builder.convert(x, compute_type(t), to) for x, t, to in zip(args, dtypes, types, strict=True)]
    return builder.micro(spec.cpu.format(**params), types[-1], *args, imm=tuple(float(params[name]) for name in spec.immediates))
