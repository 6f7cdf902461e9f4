"""The host's C++ compiler, which builds generated kernels for the emulator, and the emulator's own library.

Comes in: generated CUDA C++, which includes the host implementation of ``arch/``. Goes out: the bytes of shared libraries.
Invariants: the source is the same as for a device, only ``KITSUNE_EMULATE`` differs; no option depends on the CPU at hand, so
machines can share a cache.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kitsune_jax.targets.cuda import sources
from kitsune_jax.targets.cuda.sources import KERNEL, CompileError

_NAMES = ("g++", "c++", "clang++")
_IDENTITY = ("--version", "-dumpmachine")
_SHARED = ("-std=c++17", "-fPIC", "-shared")
EMULATOR_OPTIONS = (*_SHARED, "-O3")


@dataclass(frozen=True)
class Compiler:
    """A C++17 compiler: its path, and its name, version and machine for cache keys."""

    path: str
    version: str


def available() -> bool:
    """Is there a host compiler?"""
    return why_not() is None


def why_not() -> str | None:
    """``None`` if there is a host compiler, else a sentence with the reason and what to install."""
    try:
        find()
    except OSError as error:
        return str(error)
    return None


def find() -> Compiler:
    """The first of g++, c++ and clang++ on PATH. Raises ``OSError`` with advice where there is none."""
    for path in filter(None, map(shutil.which, _NAMES)):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # a wrapper whose compiler is missing
            return _describe(path)
    raise OSError(f"the emulator needs a C++17 compiler, and none of {', '.join(_NAMES)} is on PATH (Debian: apt install g++)")


@functools.cache
def _describe(path: str) -> Compiler:
    name, machine = (subprocess.run([path, flag], capture_output=True, text=True, check=True).stdout for flag in _IDENTITY)
    return Compiler(path, " ".join([*name.splitlines()[:1], machine.strip()]))


def kernel_options(sm: int) -> tuple[str, ...]:
    """The options that determine a kernel's code; ``sm`` is 900 or 800, as ``KITSUNE_SM``."""
    if sm not in (800, 900):
        raise ValueError(f"sm is {sm}, not 800 or 900")
    # -O0: a kernel of four matmul layers compiles in 0.23 s with it and in 0.32 with -O1, attention in 0.21 and 0.41; they run
    # about as long, since the work is in the emulator's library (g++ 12, Zen 4).
    # -w: the warnings of the device's compiler count. -ffp-contract=off: the same bits on machines with and without FMA.
    # -Bsymbolic-functions: inline functions of arch/ are also in the emulator's library, perhaps for the other KITSUNE_SM; the
    # kernel must call its own. -nodefaultlibs: a kernel needs libgcc alone, and that the linker searches the others is a tenth of
    # the compilation. The C and the C++ library are there at run time, because the emulator's library has them.
    link = "-nodefaultlibs", "-Wl,-Bsymbolic-functions"
    return (*_SHARED, "-O0", "-w", "-ffp-contract=off", *link, "-DKITSUNE_EMULATE", f"-DKITSUNE_SM={sm}")


_HEADER = "kitsune/kitsune.h"
_MANY = 4  # kernels of one set of headers and options: precompiling them takes 0.16 s and saves 0.06 s a kernel
_seen: collections.Counter[tuple[object, ...]] = collections.Counter()
_precompiling = threading.Lock()


def precompiled_header(compiler: Compiler, options: tuple[str, ...], source: str) -> Path | None:
    """A header that includes the device library, with GCC's precompiled form beside it, for a process that compiles many kernels.

    None before the fourth kernel, for other compilers, and for a ``source`` that defines a macro before its include.
    """
    before, found, _ = source.partition(f'#include "{_HEADER}"')
    if not found or "#define" in before or "clang" in compiler.version:
        return None
    with _precompiling:
        wanted = compiler, options, _search(), sources.fingerprint("emulator")
        _seen[wanted] += 1
        return _precompile(*wanted) if _seen[wanted] >= _MANY else None


@functools.cache
def _precompile(compiler: Compiler, options: tuple[str, ...], search: tuple[str, ...], fingerprint: str) -> Path | None:
    folder = tempfile.mkdtemp(prefix="kitsune_jax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = Path(folder) / "kitsune.h"
    header.write_text(f'#include "{_HEADER}"\n')
    options = tuple(option for option in options if option != "-shared" and not option.startswith("-Wl,"))
    command = [compiler.path, *options, *search, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return header if done.returncode == 0 else None


def compile(source: str, sm: int) -> bytes:
    """Compile a generated kernel to a shared library that exports it, without any cache.

    Its calls into the emulator stay undefined, so load the emulator's library globally before it. Raises ``CompileError`` with the
    compiler's messages, ``OSError`` where there is no compiler.
    """
    compiler = find()
    with tempfile.TemporaryDirectory(prefix="kitsune_jax-") as folder:
        (Path(folder) / f"{KERNEL}.cc").write_text(source)
        try:
            options = kernel_options(sm)
            header = precompiled_header(compiler, options, source)
            include = [] if header is None else ["-include", str(header)]
            return _run(compiler, [*options, *include], [f"{KERNEL}.cc"], folder, ["-lgcc"])
        except _Failed as failure:
            raise CompileError(Path(compiler.path).name, str(failure), source, ".cc") from None


def build_emulator() -> bytes:
    """The emulator's runtime as a shared library, without any cache. Raises ``RuntimeError`` with the compiler's messages."""
    files = sorted((sources.root() / "emulator" / "src").glob("*.cc"))
    if not files:
        raise FileNotFoundError(f"the emulator has no sources in {sources.root() / 'emulator' / 'src'}; reinstall kitsune_jax")
    with tempfile.TemporaryDirectory(prefix="kitsune_jax-") as folder:
        # As one unit, so that the headers of the C++ library are read once: 6.5 s of a core, was 10.7 (g++ 12, Zen 4).
        (Path(folder) / "emulator.cc").write_text("".join(f'#include "{file}"\n' for file in files))
        try:
            return _run(find(), EMULATOR_OPTIONS, ["emulator.cc"], folder, libraries=["-ldl"])
        except _Failed as failure:
            raise RuntimeError(f"the emulator does not compile with {find().version}:\n{failure}") from None


def _search() -> tuple[str, ...]:
    return tuple(f"-I{path}" for path in sources.include_dirs("emulator"))


class _Failed(Exception):
    """The messages of a compiler that failed."""


def _run(compiler: Compiler, options: Sequence[str], files: Sequence[str], folder: str, libraries: Sequence[str] = ()) -> bytes:
    command = [compiler.path, *options, *_search(), *files, "-o", "out.so", *libraries]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        raise _Failed(done.stderr.strip() or f"{compiler.path} ended with status {done.returncode}")
    return (Path(folder) / "out.so").read_bytes()
