"""A whole call, and it as the int64 words of the custom call's attribute.

Comes in: a ``Call`` of programs (``bytecode``). Goes out: ``encode``, in int64 words: ``MAGIC, VERSION, number of words in all,
CRC-32 of the words after the header (as little-endian bytes)``, then the dataclasses depth first in the order their fields are
declared. An ``int`` is one word; a ``float`` is its IEEE-754 double bits; a ``tuple`` is its length, then its elements; a name is
its length, then one word for each UTF-8 byte; an instruction is its ``CODE``, then its fields.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from typing import Any

import numpy as np

from kitsune_jax.targets.cpu.bytecode import MAGIC, MAX_NAME_BYTES, VERSION, Array, Program


@dataclasses.dataclass(frozen=True)
class Part:
    """A program on arrays of the call, given by number: ``reads`` are its inputs, ``writes`` its outputs."""

    phase: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    program: Program


@dataclasses.dataclass(frozen=True)
class Call:
    """A whole call. Of ``arrays`` the first are its ``operands``, the next its ``results``; the others live during the call only.

    Parts stand in the order of their phases, between which a barrier stands. A part reads operands and what earlier phases wrote.
    """

    name: str
    arrays: tuple[Array, ...]
    operands: int
    results: int
    parts: tuple[Part, ...]

    @staticmethod
    def of(program: Program) -> Call:
        """The call that is nothing but ``program``: its inputs are the operands, its outputs the results."""
        arrays = (*program.inputs, *program.outputs)
        n = len(program.inputs)
        part = Part(0, tuple(range(n)), tuple(range(n, len(arrays))), program)
        return Call(program.name, arrays, n, len(program.outputs), (part,))


def encode(call: Call | Program) -> np.ndarray:
    """``call``, or the call that is nothing but one program, as int64 words, shape (words,)."""
    body: list[int] = []
    _emit(call if isinstance(call, Call) else Call.of(call), body, {})
    words = np.asarray(body, np.int64)
    header = np.asarray([MAGIC, VERSION, 4 + len(body), zlib.crc32(words.astype("<i8").tobytes())], np.int64)
    return np.concatenate([header, words])


def name_bytes(name: str) -> bytes:
    """``name`` as it travels: UTF-8. The path of a source file may hold bytes that are not; each becomes a question mark."""
    return name.encode("utf-8", "replace")[:MAX_NAME_BYTES].decode("utf-8", "ignore").encode()


_layouts: dict[type, tuple[tuple[int, ...], tuple[str, ...]]] = {}


def _layout(x: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What stands in front of the fields of an instruction or record, and the fields' names."""
    if type(x) not in _layouts:
        code = (x.CODE,) if hasattr(x, "CODE") else ()
        _layouts[type(x)] = code, tuple(field.name for field in dataclasses.fields(x))
    return _layouts[type(x)]


def _emit(x: Any, out: list[int], programs: dict[int, list[int]]) -> None:
    """Append ``x`` to ``out``. ``programs``: words by the program's identity, for parameters of one shape share an update."""
    if isinstance(x, tuple):
        out.append(len(x))
        for v in x:
            _emit(v, out, programs)
    elif isinstance(x, (bool, int, np.integer)):
        out.append(int(x))
    elif isinstance(x, float):
        out.append(struct.unpack("<q", struct.pack("<d", x))[0])
    elif isinstance(x, str):
        data = name_bytes(x)
        out.append(len(data))
        out.extend(data)
    elif id(x) in programs:
        out.extend(programs[id(x)])
    else:
        start = len(out)
        code, names = _layout(x)
        out.extend(code)
        for name in names:
            v = getattr(x, name)
            if type(v) is int:
                out.append(v)
            else:
                _emit(tuple(float(e) for e in v) if name in ("imm", "fill") else v, out, programs)
        if isinstance(x, Program):
            programs[id(x)] = out[start:]
