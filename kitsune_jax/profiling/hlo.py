"""The text of a compiled module, as the work of each instruction that can be a kernel.

Comes in: ``compiled.as_text()``. Goes out: a ``Module``: for every instruction by name the JAX operators that it computes, the
user's lines, its operations and bytes. Only the text is read, never a clock. A fusion is one kernel, with the operations of all
instructions in it and the bytes of its operands and results. Operations of sorts, FFTs, decompositions and custom calls are not in
the text: such work is not ``counted``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from kitsune_jax.config import printable, shown_file


@dataclasses.dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of one kernel.

    ``ops``: JAX's names of the operators in it, in order; ``sources``: the user's lines, "model.py:12 (mlp)". ``dots``: operations
    of matrix products and convolutions in ``dtype``; ``simple`` and ``transcendental``: elements computed by an operation of either
    kind. ``bytes``: read and written. ``counted``: whether all operations are in these numbers.
    """

    ops: tuple[str, ...]
    sources: tuple[str, ...] = ()
    dots: int = 0
    dtype: str = "float32"
    simple: int = 0
    transcendental: int = 0
    bytes: int = 0
    counted: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A compiled module. ``works``: by instruction, whose dots may be written as underscores, as in the names of a GPU's kernels.
    ``holders``: instructions that run others as kernels, and the names of these."""

    name: str
    works: Mapping[str, KernelWork]
    holders: Mapping[str, frozenset[str]]

    def work(self, op: str) -> KernelWork:
        """The work of the kernel ``op``: not counted, if the module has none of that name."""
        return self.works.get(op, KernelWork((op,), counted=False))


def read(text: str) -> Module:
    """The module with the HLO text ``text``. Raises ``ValueError`` for any other text."""
    head = re.match(r"\s*HloModule ([\w.\-]+)", text)
    if head is None:
        raise ValueError("not the text of an HLO module")
    lines = text.splitlines()
    sources = _frames(lines)
    program = _Reader(_computations(lines), sources)
    everything = {i.name: i for c in program.computations.values() for i in c.instructions}
    fused = {name for i in everything.values() if i.opcode not in _HOLD for name in i.called}
    kernels = [
        (c, i) for key, c in program.computations.items() if key not in fused for i in c.instructions if i.opcode not in _NO_KERNEL
    ]
    holders = {i.name: program.inside(i) for _, i in kernels if i.opcode in _HOLD}
    works = {i.name: program.work(c, i) for c, i in kernels}
    return Module(head[1], {re.sub(r"[.-]", "_", name): work for name, work in works.items()} | works, holders)


# --- the text ---------------------------------------------------------------------------------------------------------------------

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25, "bf16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_HOLD = frozenset({"while", "conditional", "call", "async-start"})
_NO_KERNEL = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "optimization-barrier", "partition-id"}
)
# fmt: off
_TRANSCENDENTAL = frozenset((
    "exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "sine", "cosine", "tan", "power", "erf",
    "rsqrt", "sqrt", "cbrt", "atan2", "acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh",
))
# Instructions that move elements, or make them from an index.
_MOVES = frozenset((
    "broadcast", "iota", "reshape", "transpose", "copy", "slice", "concatenate", "pad", "reverse", "gather", "dynamic-slice",
    "dynamic-update-slice", "bitcast-convert", "copy-start", "copy-done",
))
_UNCOUNTED = frozenset((
    "sort", "fft", "custom-call", "cholesky", "triangular-solve", "rng", "rng-bit-generator", "topk", "infeed", "outfeed", "map",
))
# fmt: on
_WINDOWED = frozenset({"slice", "dynamic-slice", "gather"})
_SILENT = frozenset({"broadcast", "iota", "copy", "bitcast-convert"})  # mostly XLA's own, so not named
_IN_JAX = {"dot": "dot_general", "convolution": "conv_general_dilated"}  # of instructions that XLA has left without a name

Shape = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    called: tuple[str, ...]
    op_name: str
    frame: int
    root: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Computation:
    instructions: tuple[_Instruction, ...]
    by_name: Mapping[str, _Instruction]

    def shapes(self, name: str) -> tuple[Shape, ...]:
        return self.by_name[name].shapes if name in self.by_name else ()


_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*(?:e\dm\d\w*)?)\[([\d,<= ]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)


def _computations(lines: Sequence[str]) -> dict[str, _Computation]:
    found: dict[str, _Computation] = {}
    name, body = "", list[_Instruction]()
    for line in lines:
        head = _HEAD.match(line)
        if head is not None:
            name, body = head[1], []
        elif line.startswith("}") and name:
            found[name] = _Computation(tuple(body), {i.name: i for i in body})
            name = ""
        elif name and " = " in line and (instruction := _instruction(line)) is not None:
            body.append(instruction)
    return found


def _instruction(line: str) -> _Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shapes = tuple((m[1], _dims(m[2])) for m in _SHAPE.finditer(rest[:end]))
    opcode = re.match(r"\s*([\w\-]+)\(", rest[end:])
    if opcode is None:
        return None
    start = end + opcode.end() - 1
    stop = _closing(rest, start)
    attributes = rest[stop:]
    frame = re.search(r"stack_frame_id=(\d+)", attributes)
    op_name = re.search(r'op_name="([^"]*)"', attributes)
    return _Instruction(
        head[2],
        opcode[1],
        shapes,
        tuple(re.findall(r"%([\w.\-]+)", rest[start:stop])),
        attributes,
        tuple(n for m in _CALLED.finditer(attributes) for n in re.findall(r"[\w.\-]+", m[1])),
        op_name[1] if op_name else "",
        int(frame[1]) if frame else 0,
        bool(head[1]),
    )


def _closing(text: str, start: int) -> int:
    """The place behind the parenthesis that closes the one at ``start``."""
    depth = 0
    for k in range(start, len(text)):
        depth += (text[k] == "(") - (text[k] == ")")
        if depth == 0:
            return k + 1
    return len(text)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in re.findall(r"\d+", text))


def _frames(lines: Iterable[str]) -> dict[int, str]:
    """The user's line of each stack frame: that of its innermost function."""
    tables: dict[str, dict[int, str]] = {}
    at: dict[int, str] = {}
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            at = tables.setdefault(line, {})
        elif line.startswith(("%", "ENTRY")):
            break
        elif found := re.match(r"(\d+) (.*)", line):
            at[int(found[1])] = found[2]
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})

    def place(text: str) -> str:
        f = {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", text)}
        file = shown_file(files.get(f.get("file_name_id", 0), "").strip('"'))
        function = functions.get(f.get("function_name_id", 0), "").strip('"').rsplit(".", 1)[-1]
        return printable(f"{file}:{f.get('line', 0)} ({function})")

    places = {k: place(text) for k, text in tables.get("FileLocations", {}).items()}
    frames = {k: re.search(r"file_location_id=(\d+)", text) for k, text in tables.get("StackFrames", {}).items()}
    return {k: places.get(int(m[1]), "") for k, m in frames.items() if m is not None}


# --- the work ---------------------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, computations: Mapping[str, _Computation], sources: Mapping[int, str]):
        self.computations, self.sources = computations, sources
        self.inside = functools.cache(self._inside)

    def _inside(self, i: _Instruction) -> frozenset[str]:
        """The instructions that ``i``, a loop, branch or call, runs."""
        found = set[str]()
        for name in i.called:
            for inner in self.computations[name].instructions if name in self.computations else ():
                found.add(inner.name)
                if inner.opcode in _HOLD:
                    found |= self.inside(inner)
        return frozenset(found)

    def work(self, c: _Computation, i: _Instruction) -> KernelWork:
        """The work of instruction ``i`` of ``c``."""
        if i.opcode not in ("fusion", *_HOLD):
            label, sources = self._names([i])
            ops = label or (_IN_JAX.get(i.opcode, i.opcode),)
            return dataclasses.replace(self._own(c, i), ops=ops, sources=sources, bytes=_moved(c, i))
        inner = [(body, k) for name in i.called if (body := self.computations.get(name)) for k in body.instructions]
        works = [self.work(body, k) if k.opcode in ("fusion", *_HOLD) else self._own(body, k) for body, k in inner]
        times = self._steps(i)
        products = [w for w in works if w.dots]
        ops, sources = self._names([k for _, k in inner])
        if not ops:
            ops, sources = self._names([i])
        return KernelWork(
            ops or ("copy" if i.opcode == "fusion" else i.opcode,),
            sources,
            times * sum(w.dots for w in works),
            products[0].dtype if products else "float32",
            times * sum(w.simple for w in works),
            times * sum(w.transcendental for w in works),
            self._fused_bytes(c, i) if i.opcode == "fusion" else times * sum(_moved(body, k) for body, k in inner),
            all(w.counted for w in works) and times > 0,
        )

    def _steps(self, i: _Instruction) -> int:
        """How often the computations of ``i`` run; 0 if the text does not say."""
        if i.opcode != "while":
            return 1
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', i.attributes)
        return int(found[1]) if found else 0

    def _names(self, instructions: Iterable[_Instruction]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """JAX's operators of ``instructions``, and their lines. XLA writes one operator as several instructions in a row."""
        found = dict[tuple[str, int], str]()
        for i in instructions:
            if i.op_name and "/" in i.op_name and i.opcode not in _NO_KERNEL and i.opcode not in _SILENT:
                found[i.op_name, i.frame] = i.op_name.rsplit("/", 1)[-1].partition("[")[0]
        lines = dict.fromkeys(self.sources.get(frame, "") for _, frame in found)
        return tuple(found.values()), tuple(line for line in lines if line)

    def _own(self, c: _Computation, i: _Instruction) -> KernelWork:
        """The operations of a plain instruction, without names and bytes."""
        elements = sum(math.prod(dims) for _, dims in i.shapes)
        none = KernelWork(())
        if i.opcode in _NO_KERNEL or i.opcode in _MOVES:
            return none
        if i.opcode == "dot" or (i.opcode == "custom-call" and "gemm" in i.attributes):
            return _product(c, i)
        if i.opcode == "convolution":
            return _convolution(c, i)
        if i.opcode in _UNCOUNTED:
            return dataclasses.replace(none, counted=False)
        if i.opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter") and i.operands:
            read = c.shapes(i.operands[-1] if i.opcode == "scatter" else i.operands[0])
            window = math.prod(_dims(m[1].replace("x", ","))) if (m := re.search(r"window=\{size=([\dx]+)", i.attributes)) else 1
            passed = elements * window if i.opcode == "reduce-window" else sum(math.prod(dims) for _, dims in read)
            return dataclasses.replace(none, simple=passed)
        if i.opcode in _TRANSCENDENTAL:
            return dataclasses.replace(none, transcendental=elements)
        return dataclasses.replace(none, simple=elements)

    def _fused_bytes(self, c: _Computation, i: _Instruction) -> int:
        """Bytes of the operands and results of a fusion: of an operand that it only cuts from or reads by index, those that it
        takes; of a result that is an operand updated in place, those of the update, read and written."""
        body = self.computations.get(i.called[0]) if i.called else None
        if body is None:
            return _moved(c, i)
        updates = {k.name: k for k in body.instructions if k.opcode == "dynamic-update-slice"}
        total = 0
        for p in (k for k in body.instructions if k.opcode == "parameter"):
            readers = [k for k in body.instructions if p.name in k.operands]
            if readers and all(k.opcode in _WINDOWED and k.operands[0] == p.name for k in readers):
                total += sum(_bytes(k.shapes) for k in readers)
            elif not (readers and all(k.name in updates and k.operands[0] == p.name for k in readers)):
                total += _bytes(p.shapes)
        roots = [k for k in body.instructions if k.root]
        if len(roots) == 1 and roots[0].name in updates:
            return total + _bytes(body.shapes(roots[0].operands[1]))
        return total + _bytes(i.shapes)


def _bytes(shapes: Iterable[Shape]) -> int:
    return int(sum(math.prod(dims) * _item(dtype) for dtype, dims in shapes))


def _item(dtype: str) -> float:
    if dtype in _BYTES:
        return _BYTES[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width[1]) / 8 if width else 4


def _moved(c: _Computation, i: _Instruction) -> int:
    """Bytes that a plain instruction reads and writes."""
    out = _bytes(i.shapes)
    if i.opcode in _NO_KERNEL or i.opcode in _HOLD:
        return 0
    if i.opcode in _WINDOWED:
        return 2 * out
    if i.opcode == "dynamic-update-slice" and len(i.operands) > 1:
        return 2 * _bytes(c.shapes(i.operands[1]))
    return out + sum(_bytes(c.shapes(name)) for name in dict.fromkeys(i.operands))


def _product(c: _Computation, i: _Instruction) -> KernelWork:
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', i.attributes)
    shapes = c.shapes(i.operands[0]) if i.operands else ()
    if contracted is None or not shapes:
        return KernelWork((), counted=False)
    dtype, dims = shapes[0]
    k = math.prod(dims[d] for d in _dims(contracted[1]))
    # A library's call may have a second result, its workspace.
    return KernelWork((), dots=2 * math.prod(i.shapes[0][1]) * k, dtype=_DTYPES.get(dtype, dtype))


def _convolution(c: _Computation, i: _Instruction) -> KernelWork:
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.attributes)
    shapes = c.shapes(i.operands[1]) if len(i.operands) > 1 else ()
    if labels is None or not shapes:
        return KernelWork((), counted=False)
    dtype, kernel = shapes[0]
    per_output = math.prod(kernel) // max(1, kernel[labels[1].index("o")])
    return KernelWork((), dots=2 * math.prod(i.shapes[0][1]) * per_output, dtype=_DTYPES.get(dtype, dtype))
