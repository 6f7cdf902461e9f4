"""NVRTC, the CUDA compiler as a library, through ctypes. It needs no GPU and no toolkit.

Comes in: generated CUDA C++ and an architecture. Goes out: a cubin and ptxas's log; or PTX, for an
architecture such as "compute_80". Invariants: importing this module loads nothing; where the library is
missing, ``why_not()`` says what to install; a kernel can include only headers whose fingerprint is in the cache key.

Without a ``folder`` the functions use the NVRTC of ``KITSUNE_NVRTC_DIR``, or the best one on this machine. A ``folder`` holds
libnvrtc itself, or a wheel of it that pip unpacked (``pip install --target``). A process may use several.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kitsune_jax import config
from kitsune_jax.progress import announced, in_own_thread
from kitsune_jax.targets.cuda import sources
from kitsune_jax.targets.cuda.sources import KERNEL, CompileError

_OLDEST = (12, 8)  # fence.{acquire,release}.sync_restrict needs PTX ISA 8.6; older versions than 12.8 are untested
_MAJORS = (13, 12)
_BUILTIN_OPERATION_FAILURE = 7  # nvrtc.h: the library of builtins was not found
_ADVICE = "to compile kernels for NVIDIA GPUs: pip install kitsune_jax[cuda13]"
# 177, "variable was declared but never referenced": generated code declares all that a stage may need. Other warnings are kept.
_QUIET = ("--diag-suppress=177",)
_FLOW = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)  # asked while it compiles: is it to end?
_ARCH = re.compile(r"sm_(\d+)[af]?|compute_(\d+)")


@dataclass(frozen=True)
class Compiled:
    """A cubin (or PTX, which ends with a zero), and the log of the compiler and ptxas (warnings, registers, spills).

    Packed, the cubin comes first, so that tools for cubins can read a packed file.
    """

    cubin: bytes
    log: str

    def pack(self) -> bytes:
        return self.cubin + self.log.encode() + struct.pack("<Q", len(self.cubin))

    @property
    def registers(self) -> int:
        """Registers of a thread at the launch of the only kernel, as ptxas states them."""
        used = re.search(r"Used (\d+) registers", self.log)
        if used is None:
            raise ValueError(f"the log does not state the registers of a kernel:\n{self.log}")
        return int(used[1])

    @classmethod
    def unpack(cls, packed: bytes) -> Compiled:
        (size,) = struct.unpack("<Q", packed[-8:])
        return cls(packed[:size], packed[size:-8].decode())


def available(folder: Path | None = None) -> bool:
    """Can kernels be compiled here?"""
    return why_not(folder) is None


def why_not(folder: Path | None = None) -> str | None:
    """``None`` if kernels can be compiled here, else a sentence with the reason and what to install."""
    try:
        _load(folder)
    except OSError as error:
        return str(error)
    return None


def version(folder: Path | None = None) -> tuple[int, int]:
    """NVRTC's version, such as (13, 0). Raises ``OSError`` with the message of ``why_not`` if there is none."""
    return _version_of(_load(folder))


def sm_of(arch: str) -> int:
    """The value of ``KITSUNE_SM`` for ``arch``: 900 for "sm_90a", Hopper with its own features; else 800, the portable path. Raises
    ``ValueError`` for an unknown architecture, or one older than sm_80."""
    match = _ARCH.fullmatch(arch)
    if match is None or int(match[1] or match[2]) < 80:
        raise ValueError(f"{arch!r} is not an architecture to compile for: use sm_90a, sm_80 or a later one, or compute_80 for PTX")
    return 900 if arch == "sm_90a" else 800


def options_for(arch: str) -> tuple[str, ...]:
    """The options that determine the code for ``arch``. NVRTC optimises fully by default."""
    ptxas = () if arch.startswith("compute_") else ("--ptxas-options=-v",)
    return ("--std=c++17", f"--gpu-architecture={arch}", f"-DKITSUNE_SM={sm_of(arch)}", *ptxas, *_QUIET)


def compile(source: str, arch: str, options: Sequence[str] = (), folder: Path | None = None) -> Compiled:
    """Compile ``source`` for ``arch`` ("sm_90a", "sm_80", "compute_80", ...), without any cache. Thread-safe; other Python threads
    run meanwhile, and Ctrl-C ends it. Raises ``CompileError`` with the log, ``OSError`` where there is no NVRTC, ``ValueError`` for
    an unknown architecture."""
    library = _load(folder)
    # By default NVRTC also searches the current folder, which the cache key does not cover.
    search = ["--no-source-include", *(f"--include-path={folder}" for folder in sources.include_dirs("include"))]
    arguments = [option.encode() for option in (*options_for(arch), *search, *options)]
    stop = threading.Event()
    with announced("nvrtc", "compiling CUDA kernels with NVRTC, each once: 0.2 to 6 s for one"):
        # This thread could not see a Ctrl-C while it is in the compiler.
        made = in_own_thread(lambda: _compile(library, source, arch, arguments, stop), "kitsune_jax nvrtc", stop.set)
    if isinstance(made, BaseException):
        raise made
    return made


def _compile(library: ctypes.CDLL, source: str, arch: str, arguments: list[bytes], stop: threading.Event) -> Compiled:
    go_on = _FLOW(lambda *_: int(stop.is_set()))
    with _program(library, source) as program:
        if hasattr(library, "nvrtcSetFlowCallback"):  # newer than the oldest NVRTC
            library.nvrtcSetFlowCallback(program, go_on, None)
        status = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
        log = _fetch(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if stop.is_set():  # nobody reads the result; a CompileError would keep the source
            raise InterruptedError("the compilation was interrupted")
        if status == _BUILTIN_OPERATION_FAILURE:
            raise OSError(f"NVRTC is incomplete ({log.strip()}); {_ADVICE}")
        if status != 0:
            raise CompileError(f"NVRTC ({_error(library, status)})", log, source, ".cu")
        return Compiled(_fetch(library, "PTX" if arch.startswith("compute_") else "CUBIN", program), log)


# --- The library ------------------------------------------------------------------------------------------------------------------


def _load(folder: Path | None = None) -> ctypes.CDLL:
    return _open(folder or config.nvrtc_dir())


@functools.cache
def _open(folder: Path | None) -> ctypes.CDLL:
    """The first NVRTC that loads and is new enough. Raises ``OSError`` with advice."""
    refused = []
    for path in _candidates() if folder is None else _inside(_lib_folders(folder)):
        try:
            _preload_builtins(Path(path).parent)
            handle = ctypes.CDLL(path)  # releases the GIL during calls; a library loaded by path is separate from its namesakes
        except OSError as error:
            if Path(path).is_absolute():
                refused.append(str(error))
            continue
        found = _version_of(handle)
        if found >= _OLDEST:
            return _declare(handle)
        refused.append(f"{path} is version {found[0]}.{found[1]}, older than {_OLDEST[0]}.{_OLDEST[1]}")
    nowhere = f"it is not in {folder}" if folder else "it is in no nvidia wheel, no CUDA toolkit and not on the loader's path"
    raise OSError(f"NVRTC (libnvrtc) was not found ({'; '.join(refused) or nowhere}); {_ADVICE}")


def _candidates() -> Iterator[str]:
    """Paths of libnvrtc, best first: NVIDIA's wheels, CUDA toolkits, the loader's own search."""
    folders: list[Path] = []
    wheels = importlib.util.find_spec("nvidia")
    for place in (wheels.submodule_search_locations or ()) if wheels else ():
        folders += _lib_folders(Path(place).parent)
    nvcc = shutil.which("nvcc")
    toolkits = [Path(nvcc).resolve().parents[1]] if nvcc else []
    toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    folders += [toolkit / lib for toolkit in toolkits for lib in ("lib64", "lib")]
    yield from _inside(folders)
    yield from (f"libnvrtc.so.{major}" for major in _MAJORS)


def _lib_folders(folder: Path) -> list[Path]:
    """Where libraries can be in ``folder``: in itself, or where wheels unpack, which differs by major version (cu13,
    cuda_nvrtc)."""
    return [folder.absolute(), *sorted(folder.absolute().glob("nvidia/*/lib"))]


def _inside(folders: Sequence[Path]) -> Iterator[str]:
    for major in _MAJORS:
        yield from (str(path) for folder in folders if (path := folder / f"libnvrtc.so.{major}").is_file())


def _preload_builtins(folder: Path) -> None:
    """Load the second library, which NVRTC opens by its bare name: without an rpath (as in 13.0's wheel) the loader misses it."""
    for path in sorted(folder.glob("libnvrtc-builtins.so.*")) if folder.is_absolute() else ():
        ctypes.CDLL(str(path))


def _version_of(handle: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    handle.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _declare(handle: ctypes.CDLL) -> ctypes.CDLL:
    """``handle`` with argument types, without which ctypes truncates pointers to 32 bits."""
    text, texts, size = ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t)
    program, programs = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    handle.nvrtcCreateProgram.argtypes = [programs, text, text, ctypes.c_int, texts, texts]
    handle.nvrtcCompileProgram.argtypes = [program, ctypes.c_int, texts]
    handle.nvrtcDestroyProgram.argtypes = [programs]
    for what in ("ProgramLog", "CUBIN", "PTX"):
        getattr(handle, f"nvrtcGet{what}Size").argtypes = [program, size]
        getattr(handle, f"nvrtcGet{what}").argtypes = [program, ctypes.c_char_p]
    if hasattr(handle, "nvrtcSetFlowCallback"):
        handle.nvrtcSetFlowCallback.argtypes = [program, _FLOW, ctypes.c_void_p]
    handle.nvrtcGetErrorString.argtypes = [ctypes.c_int]
    handle.nvrtcGetErrorString.restype = ctypes.c_char_p
    return handle


@contextlib.contextmanager
def _program(library: ctypes.CDLL, source: str) -> Iterator[ctypes.c_void_p]:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{KERNEL}.cu".encode(), 0, None, None))
    try:
        yield program
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC: {_error(library, status)}")


def _error(library: ctypes.CDLL, status: int) -> str:
    return str(library.nvrtcGetErrorString(status).decode())
