"""The machine code of a cubin, for tests and documentation: what ptxas really made of a kernel.

Comes in: a cubin. Goes out: its instructions and resources. Invariant: nothing that runs a program imports this module; its tools
(``cuobjdump`` and ``nvdisasm``, from the triton wheel or a CUDA toolkit) need no GPU and are no dependency of the package.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Instruction", "Resources", "Sass", "available", "disassemble", "resources"]

_FUNCTION = re.compile(r"^\s*Function : (\S+)$")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*?)\s*;")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USAGE = re.compile(r"^\s*Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``@!P0 LDS.128 R4, [R2+UR4]`` at a byte address in its function."""

    address: int
    predicate: str
    opcode: str
    operands: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.predicate and f"@{self.predicate}", self.opcode, self.operands) if part)


@dataclass(frozen=True)
class Sass:
    """A function's machine code and what it needs: registers and bytes of stack per thread, bytes of static shared memory.

    ``shared`` is as the tool says it: on Hopper with the 1024 bytes that the system reserves where there is any.
    """

    function: str
    instructions: tuple[Instruction, ...]
    registers: int
    stack: int
    shared: int

    def count(self, prefix: str) -> int:
        """How many instructions have an opcode that starts with ``prefix``, such as "HGMMA" or "LDS.128"."""
        return sum(one.opcode.startswith(prefix) for one in self.instructions)

    @property
    def has_local_memory(self) -> bool:
        """Whether anything lives in local memory: spills, or arrays that are indexed by a value known only at run time."""
        return self.stack > 0 or self.count("LDL") > 0 or self.count("STL") > 0

    def __str__(self) -> str:
        return "\n".join(f"{one.address:06x}  {one}" for one in self.instructions)


def available() -> bool:
    """Whether there is a disassembler here."""
    return _tool() is not None


def disassemble(cubin: bytes, function: str | None = None) -> Sass:
    """The machine code of ``function``, or of the only one in ``cubin``.

    Raises ``OSError`` where there is no disassembler, ``ValueError`` for no cubin, a function that is not there, or several.
    """
    tool = _tool()
    if tool is None:
        raise OSError("cuobjdump and nvdisasm were not found: pip install triton, or a CUDA toolkit with its bin folder on PATH")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"cuobjdump: {(done.stderr or done.stdout).strip()}")
    usage = {name: tuple(map(int, numbers)) for name, *numbers in _USAGE.findall(done.stdout)}
    bodies = dict(_functions(done.stdout))
    if function is None and len(bodies) == 1:
        function = next(iter(bodies))
    if function is None or function not in bodies or function not in usage:
        raise ValueError(f"asked for {function or 'the only function'}, the cubin has {', '.join(sorted(bodies)) or 'none'}")
    registers, stack, shared = usage[function]
    return Sass(function, bodies[function], registers, stack, shared)


def _functions(listing: str) -> Iterator[tuple[str, tuple[Instruction, ...]]]:
    name, body = "", list[Instruction]()
    for line in listing.splitlines():
        if header := _FUNCTION.match(line):
            if name:
                yield name, tuple(body)
            name, body = header[1], []
        elif found := _INSTRUCTION.match(line):
            body.append(Instruction(int(found[1], 16), found[2] or "", found[3], found[4]))
    if name:
        yield name, tuple(body)


def _tool() -> str | None:
    """cuobjdump with nvdisasm beside it, which it calls."""
    wheel = importlib.util.find_spec("triton")
    folders = [Path(place) / "backends" / "nvidia" / "bin" for place in (wheel.submodule_search_locations or ())] if wheel else []
    on_path = shutil.which("cuobjdump")
    folders += [Path(on_path).parent] if on_path else []
    folders.append(Path("/usr/local/cuda/bin"))
    for folder in folders:
        if all((folder / name).is_file() for name in ("cuobjdump", "nvdisasm")):
            return str(folder / "cuobjdump")
    return None


# --- What ptxas states in its log -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel as ptxas states them: registers per thread, memory in bytes.

    ``spill_bytes``: stores and loads of spills in the code, ``stack_bytes``: the frame per thread; both are 0 in a good kernel.
    ``registers`` of a kernel with ``setmaxnreg`` are those of its launch. ``shared_static`` excludes dynamic shared memory.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_static: int
    barriers: int


def resources(log: str, cubin: bytes) -> Resources:
    """The resources of the only kernel of ``cubin``, read from ``log``. Raises ``ValueError`` if the log does not fit the cubin."""
    entries = re.findall(r"Compiling entry function '(\w+)' for", log)
    if len(entries) != 1:
        raise ValueError(f"the log is of {len(entries)} kernels ({', '.join(entries) or 'none'}), not of one")
    if f".text.{entries[0]}\0".encode() not in cubin:
        raise ValueError(f"the log is of {entries[0]!r}, which is not in the cubin")
    used = re.search(r"Used (\d+) registers.*", log)
    frames = [tuple(map(int, frame)) for frame in _FRAME.findall(log)]
    if used is None or not frames:
        raise ValueError(f"the log does not state the resources of {entries[0]!r}:\n{log}")
    return Resources(
        registers=int(used[1]),
        spill_bytes=sum(stores + loads for _, stores, loads in frames),  # each function that is not inlined has its own line
        stack_bytes=max(_number(r"(\d+) bytes cumulative stack", used[0]), *(frame for frame, _, _ in frames)),
        shared_static=_number(r"(\d+) bytes smem", used[0]),
        barriers=_number(r"used (\d+) barriers", used[0]),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
