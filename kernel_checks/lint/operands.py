"""Which registers an instruction of Hopper's machine code reads and writes.

Comes in: an ``Instruction`` as the disassembler prints it. Goes out: ``Access``: general registers and predicates by name.
Invariants: an opcode that is not in these tables is an error and is never passed over; where a width is not certain the larger one
is taken. Uniform registers (UR, UP) are left out: the warp's front end reads them when an instruction is issued, and all threads
share them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from kernel_checks.sass import Instruction

__all__ = ["Access", "Product", "UnknownOpcode", "access", "product", "registers", "split"]


class UnknownOpcode(ValueError):
    """An opcode that the lint knows nothing about: look it up and add it to the tables of ``lint/operands.py``."""


@dataclass(frozen=True)
class Access:
    """Names of registers ("R12") and predicates ("P3"). The guard is one of ``reads``."""

    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True)
class Product:
    """An ``HGMMA``: its registers in flight, and whether it is the last of its group."""

    a: frozenset[str]
    d: frozenset[str]
    ends_group: bool


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The instruction set of Hopper (CUDA Binary Utilities), by what an instruction does with its first operands.
_NOTHING_WRITTEN = _names(
    """
    ACQBULK ARRIVES BAR BPT BRA BREAK BRX BRXU BSSY BSYNC CALL CCTL CCTLL CCTLT CGAERRBAR DEPBAR ENDCOLLECTIVE ERRBAR EXIT
    FENCE JMP JMX JMXU KILL LDGDEPBAR LDGSTS MEMBAR NANOSLEEP NOP PREEXIT R2B RED REDAS REDG REDS RET RPCMOV ST STAS STG
    STL STS UBLKCP UBLKPF UBLKRED UCGABAR_ARV UCGABAR_WAIT UTMACCTL UTMACMDFLUSH UTMALDG UTMAPF UTMAREDG UTMASTG
    USETMAXREG UVIRTCOUNT WARPGROUP WARPGROUPSET WARPSYNC YIELD
    """
)
# One or two predicates are written, all else is read.
_PREDICATES_WRITTEN = _names("DSETP ELECT FCHK FSETP HSETP2 ISETP PLOP3 R2P SYNCS TESTP VOTE")
_REGISTER_WRITTEN = _names(
    """
    ATOM ATOMG ATOMS B2R BMOV BMSK BREV CS2R DADD DFMA DMNMX DMUL F2F F2FP F2I F2IP FADD FFMA FLO FMNMX FMUL FRND FSEL
    FSET FSWZADD HADD2 HFMA2 HMMA HMNMX2 HMUL2 HSET2 I2F I2FP I2I I2IP IABS IADD IADD3 IDP IDP4A IMAD IMMA IMNMX IMUL LD
    LDC LDG LDGMC LDL LDS LDSM LEA LEPC LOP LOP3 MATCH MOV MOVM MUFU P2R POPC PRMT QSPC S2R SEL SGXT SHF SHFL SHL SHR SUST
    VABSDIFF VABSDIFF4 VADD VHMNMX VIADD VIADDMNMX VIMNMX VIMNMX3 DMMA
    """
)
# Results in the uniform datapath, operands perhaps not: R2UR, S2UR, REDUX and all names that begin with a U.
_UNIFORM_WRITTEN = _names("R2UR REDUX S2UR VOTEU")
_MEMORY = _names("ATOM ATOMG ATOMS LD LDC LDG LDGMC LDL LDS RED REDAS REDG REDS ST STAS STG STL STS")
_DOUBLES = _names("DADD DFMA DMNMX DMUL DSETP")

_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b(?!P)")
_PREDICATE = re.compile(r"(?<![A-Z])P(\d)\b")
_PRODUCT = re.compile(r"[HIQB]GMMA(?:\.SP)?\.64x(\d+)x\d+\.(\w+)")


def registers(first: int, count: int) -> frozenset[str]:
    """``count`` registers from R<first> on."""
    return frozenset(f"R{first + i}" for i in range(count))


def split(operands: str) -> list[str]:
    return [one.strip() for one in operands.split(",")] if operands else []


def product(one: Instruction) -> Product | None:
    """What an ``HGMMA`` has in flight; ``None`` for every other instruction."""
    if not one.opcode.startswith(("HGMMA", "IGMMA", "QGMMA", "BGMMA")):
        return None
    shape, _, rest = f"{one.opcode}{one.operands}".partition(" ")
    found = _PRODUCT.match(shape)
    if found is None:
        raise UnknownOpcode(f"{one} at {one.address:#x}")
    d, *sources = split(rest)
    count = int(found[1]) // (4 if found[2] == "F16" else 2)
    # The sum's second naming is the same registers again. Whatever else is a register is read while the product runs.
    a = [s for s in sources if s != d and re.match(r"R\d", s)]
    return Product(
        frozenset().union(*(registers(int(s[1:].split(".")[0]), 4) for s in a)),
        registers(int(d[1:]), count) if re.fullmatch(r"R\d+", d) else frozenset(),
        "gsb0" in sources,
    )


def access(one: Instruction) -> Access:
    """What ``one``, which is no ``HGMMA``, reads and writes. Raises ``UnknownOpcode``."""
    written, read = _access(one.opcode, one.operands)
    guard = _PREDICATE.findall(one.predicate)
    return Access(read | {f"P{p}" for p in guard}, written)


@functools.lru_cache(maxsize=1 << 16)
def _access(opcode: str, operands: str) -> tuple[frozenset[str], frozenset[str]]:
    base, *modifiers = opcode.split(".")
    parts = split(operands)
    results = _results(base, parts)
    if results is None:
        raise UnknownOpcode(f"{opcode} {operands}")
    written = [_registers(parts[i], _result_width(base, modifiers)) for i in results]
    read = [_registers(part, _source_width(base, modifiers, i)) for i, part in enumerate(parts) if i not in results]
    if base in ("R2P", "P2R"):  # the last operand has a bit for each predicate that is meant
        (written if base == "R2P" else read).append(frozenset(f"P{i}" for i in range(7) if int(parts[-1], 16) >> i & 1))
    return frozenset().union(*written), frozenset().union(*read)


def _results(base: str, parts: list[str]) -> tuple[int, ...] | None:
    """Which operands are written: a register among the first two, and the predicates around it; ``None`` for an unknown opcode."""
    if base in _NOTHING_WRITTEN:
        return ()
    predicates = [i for i, part in enumerate(parts) if re.fullmatch(r"U?P[T\d]", part)]
    if base in _PREDICATES_WRITTEN or base in _UNIFORM_WRITTEN or base.startswith("U"):
        # Of these only what stands first is written: sources come behind, or are negated or registers.
        return tuple(
            i for i in predicates if i == 0 or (i == 1 and 0 in predicates and base.endswith("SETP")) or base == "PLOP3" and i == 1
        )
    if base not in _REGISTER_WRITTEN:
        return None
    first = 1 if predicates[:1] == [0] and len(parts) > 1 else 0
    # Sums with carries: R16, P4, P5, then the sources.
    carries = [i for i in predicates if first < i <= first + 2 and all(j in predicates for j in range(first + 1, i))]
    return (*range(first), first, *carries)


def _registers(part: str, width: int) -> frozenset[str]:
    found = frozenset(f"P{p}" for p in _PREDICATE.findall(part))
    for number, pair in _REGISTER.findall(part):
        found |= registers(int(number), max(width if "[" not in part else 1, 2 if pair else 1))
    return found


def _bits(modifiers: list[str]) -> int:
    """Registers of a memory access."""
    if "128" in modifiers:
        return 4
    return 2 if any(m in ("64", "U64", "S64", "F64") or m.endswith("x2") for m in modifiers) else 1


def _result_width(base: str, modifiers: list[str]) -> int:
    if base in _MEMORY:
        return _bits(modifiers)
    if base == "LDSM":
        return int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 1
    if base in ("HMMA", "IMMA", "DMMA"):
        return 2 if modifiers[1:2] == ["F16"] else 4
    if base == "CS2R":
        return 1 if "32" in modifiers else 2
    if base in _DOUBLES or base == "LEPC" or "WIDE" in modifiers or "64" in modifiers and base in ("MOV", "IADD", "SEL", "LOP3"):
        return 2
    if base in ("F2F", "I2F", "F2I", "FRND", "I2I"):
        return 2 if any("64" in m for m in modifiers) else 1
    return 1


def _source_width(base: str, modifiers: list[str], index: int) -> int:
    if base in _MEMORY:
        return _bits(modifiers)
    if base in ("HMMA", "IMMA", "DMMA"):
        return {1: 4, 2: 2}.get(index, _result_width(base, modifiers))
    if base in _DOUBLES:
        return 2
    if base in ("F2F", "I2F", "F2I", "FRND", "I2I"):
        return 2 if any("64" in m for m in modifiers) else 1
    return 2 if "WIDE" in modifiers and index >= 3 else 1
