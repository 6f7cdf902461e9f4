"""The C++ sources that generated kernels include.

Comes in: the package's folder. Goes out: the folder of the sources and the folders to search, a fingerprint for cache keys, and
``CompileError`` with an ``excerpt`` of the compiler's log. Invariant: the fingerprint changes with every byte that a compiler can
read below that folder, and with nothing else (neither the folder's place nor a file's date).
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Literal

from kitsune_jax import cache

KERNEL = "kitsune_region"  # the function every generated source defines, and the stem of its file name in messages

Part = Literal["include", "emulator"]

# An emulated kernel includes the host implementation of arch/, which includes the device's types.
_FOLDERS: dict[Part, tuple[str, ...]] = {"include": ("include",), "emulator": ("include", "emulator")}

# NVRTC writes "kernel.cu(12): error: ...", g++ and clang "kernel.cc:12:5: error: ..." or "fatal error".
_FIRST_ERROR = re.compile(
    r"^(?P<file>[^\s(:][^(:\n]*)(?:\((?P<nvrtc>\d+)\)|:(?P<host>\d+)(?::\d+)?): (?:\w+ )?error\b", re.MULTILINE
)
_AROUND = 4


def root() -> Path:
    """The folder with ``include/`` and ``emulator/``: in the package if that is installed, else in the repository."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "cuda_sources"
    return installed if installed.is_dir() else package.parent / "cuda"


def include_dirs(part: Part) -> tuple[Path, ...]:
    """The folders to search for headers, in this order; no others, because the fingerprint covers only these."""
    here = root()
    return (here / "include",) if part == "include" else (here / "include", here / "emulator" / "include")


def fingerprint(part: Part) -> str:
    """A hash over the names and contents of the files below ``root()`` that belong to ``part``; computed once per process.

    "include": what kernels include. "emulator": that and the emulator. Raises ``FileNotFoundError`` if the folders are missing.
    """
    return _fingerprint(root(), _FOLDERS[part])


@functools.cache
def _fingerprint(base: Path, folders: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        if not (base / folder).is_dir():
            raise FileNotFoundError(f"the CUDA sources are incomplete: there is no folder {base / folder}; reinstall kitsune_jax")
        for path in sorted(path for path in (base / folder).rglob("*") if path.is_file()):
            name = path.relative_to(base)
            if any(part.startswith(".") for part in name.parts):
                continue  # an editor's swap file is not a source
            content = path.read_bytes()
            digest.update(f"{name.as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


class CompileError(RuntimeError):
    """A generated kernel did not compile, which is a defect of this package and never of the user's function.

    ``log`` is the compiler's output; ``source_path`` the generated source, kept for inspection (``None`` if no folder is writable)
    in a file that ends in ``suffix``. The message shows the numbered lines around the first error.
    """

    def __init__(self, compiler: str, log: str, source: str, suffix: str) -> None:
        name = f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.failed{suffix}"
        source_path = cache.default().keep(name, source)
        where = f"; the source is {source_path}" if source_path else ""
        shown = excerpt(log, source)
        super().__init__("\n".join(part for part in (f"{compiler} refused a generated kernel{where}", log.strip(), shown) if part))
        self.log = log
        self.source_path = source_path


def excerpt(log: str, source: str) -> str:
    """The numbered lines, of ``source`` or of the header that ``log`` names, around the first error; "" if it names no line."""
    error = _FIRST_ERROR.search(log)
    if error is None:
        return ""
    file, line = error["file"], int(error["nvrtc"] or error["host"])
    if Path(file).stem == KERNEL:
        text = source
    else:
        try:
            text = Path(file).read_text(errors="replace")
        except OSError:
            return ""
    lines = text.splitlines()
    shown = range(max(1, line - _AROUND), min(len(lines), line + _AROUND) + 1)
    return "\n".join([f"{file}:", *(f"{'>' if n == line else ' '}{n:5} | {lines[n - 1]}" for n in shown)])
