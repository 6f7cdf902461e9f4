"""The CPU program of a call of several phases: CPU programs, and which array of the call each of theirs is.

Comes in: a ``Program``. Goes out: ``encode``, int64 words that travel as the attribute of the custom call, as those of a
single program do (``bytecode``). ``cpu/src/phased.cc`` reads them and checks that arrays match in type and size, that a program
reads nothing but operands and what earlier phases wrote, and that everything is written once.

Layout: ``MAGIC, VERSION, number of words in all, CRC-32 of the words after the header``; the name; a list of arrays (dtype,
elements); the number of operands and of results, which come first among the arrays; a list of parts, each its phase, the list of
arrays it reads, the list of those it writes, and its program, a list of words that is complete with its own header. Names and
lists as in ``bytecode``.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from kitsune_jax.program.ir import Program, TileProgram
from kitsune_jax.targets.cpu import bytecode
from kitsune_jax.targets.cpu.lower import lower

MAGIC = 0x4B495453_50484153  # "KITSPHAS"


def encode(program: Program, name: str, products: bytecode.Products) -> np.ndarray:
    """The words of ``program``, multiplied as ``products`` says. Raises ``CannotLower`` where a part has no code."""
    body = [*_list(bytecode.name_bytes(name))]
    body += [len(program.arrays), *(w for a in program.arrays for w in (bytecode.DTYPE_CODE[a.dtype], math.prod(a.shape)))]
    body += [program.operands, program.results, len(program.parts)]
    coded: dict[tuple[TileProgram, int], list[int]] = {}  # parameters of one shape are updated by equal programs
    for part in program.parts:
        key = part.program, part.phase
        if key not in coded:
            coded[key] = bytecode.encode(lower(part.program, f"{name}, phase {part.phase}", products)).tolist()
        body += [part.phase, *_list(part.reads), *_list(part.writes), *_list(coded[key])]
    words = np.asarray(body, np.int64)
    header = np.asarray([MAGIC, bytecode.VERSION, 4 + len(body), zlib.crc32(words.astype("<i8").tobytes())], np.int64)
    return np.concatenate([header, words])


def _list(items: bytes | tuple[int, ...] | list[int]) -> list[int]:
    return [len(items), *items]
