"""Builds the extensions ``kitsune_jax._cpu`` and ``kitsune_jax._cuda``: setuptools and nanobind, no CMake.

Comes in: ``cpu/``, ``cuda/``, the headers of the installed nanobind and jaxlib. Goes out: two extension modules and, in wheels, the
sources that kernels are compiled from when they are needed. Invariants: the kernels of each instruction set are compiled with that
set's flags and nothing else is, never ``-march=native``, so that a wheel runs on every CPU of its architecture; jaxlib is found
without importing JAX; no CUDA toolkit is needed; from CPython 3.12 on one build runs on every later version (abi3); equal sources
give equal source distributions; the description of a package has no link that is broken outside of the repository.
"""

from __future__ import annotations

import concurrent.futures
import gzip
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
JOBS = 2
DEVICE_SOURCES = Path("kitsune_jax") / "cuda_sources"
DEVICE_SUFFIXES = {".h", ".cuh", ".cu", ".cc", ".S"}

# nanobind's stable ABI needs CPython 3.12; an interpreter without the GIL has none.
STABLE_ABI = (
    sys.implementation.name == "cpython" and sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
LINUX = platform.system() == "Linux"

COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fvisibility=hidden", "-g0"]
COMMON += ["-pthread"]  # without it, macOS hides lgamma_r
# The program format is read from files that others may have written. -U: some compilers define it by themselves, to another value.
HARDENED = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
LINKED = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"] if LINUX else []
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
WIDE = ["-mfma", "-mf16c", "-mprefer-vector-width=512"]
# The flags each ISA's translation unit says it wants in its first lines; for other architectures than its own it is empty.
ISA_FLAGS = {
    "x86_64": {
        "isa_generic.cc": ["-O1"],
        "isa_avx2.cc": ["-mavx2", "-mfma", "-mf16c"],
        "isa_avx512.cc": [*AVX512, *WIDE],
        "isa_avx512bf16.cc": [*AVX512, "-mavx512bf16", *WIDE],
        "isa_amx.cc": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", *WIDE],
    },
    "arm64": {"isa_neonbf16.cc": ["-march=armv8.2-a+bf16"]},
}
# Units that run once per program or per import, not once per call: optimized less, because they take longer to compile than to run.
COLD = ("executor.cc", "plan_strips.cc", "plan_vector.cc", "program.cc", "program_check.cc", "module.cc", "nanobind_combined.cpp")
COLD_FLAGS = {unit: ["-O1"] for unit in COLD}


def isa_flags(unit: str, platform: str) -> list[str]:
    """The flags that a unit of this file name gets where `platform` (as in ``sysconfig.get_platform()``) is built for.

    That is not always the machine that builds: on macOS, one compiler makes code for both architectures, at once if asked to.
    """
    machine = platform.rpartition("-")[2]
    if machine == "universal2":
        return [word for name, units in ISA_FLAGS.items() for flag in units.get(unit, []) for word in (f"-Xarch_{name}", flag)]
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)
    return ISA_FLAGS.get(machine, {}).get(unit, [])


# Units that include headers of nanobind or jaxlib.
WITH_PYTHON = ("module.cc", "ffi.cc", "nanobind_combined.cpp")


def kept_object(source: str, flags: list[str]) -> Path | None:
    """Where the object of a unit of the CPU library stands for the next build, in the folder ``KERNEL_OBJECTS``; ``None`` where
    none is kept.

    ``flags``: the options and the compiler's version. There is nothing of Python in these objects, so builds for several versions
    of Python may share them, and the C++ tests may link them.
    """
    folder, unit = os.environ.get("KERNEL_OBJECTS"), Path(source)
    if not folder or unit.parent.parts[-2:] != ("cpu", "src") or unit.name in WITH_PYTHON:
        return None
    read = [unit, *(ROOT / header for header in headers("cpu/include", "cpu/src"))]
    key = hashlib.sha256("\0".join([*flags, *(path.read_text() for path in read)]).encode()).hexdigest()
    return Path(folder) / f"{unit.stem}-{key[:16]}.o"


def jaxlib_include() -> str:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("jaxlib is needed to build kitsune_jax (for the headers of XLA's FFI): pip install jaxlib")
    return str(Path(next(iter(spec.submodule_search_locations))) / "include")


def sources(target: str) -> list[str]:
    """The units that take longest (one per ISA) first, so that no job is left alone with one; nanobind's own sources last."""
    found = sorted((ROOT / target / "src").glob("*.cc"), key=lambda path: (not path.name.startswith("isa_"), path.name))
    return [str(path.relative_to(ROOT)) for path in (*found, ROOT / target / "src" / "nanobind_combined.cpp")]


def headers(*rooms: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("*.h"))


def include_dirs() -> list[str]:
    """The headers of what the build requires; looked for by a build only, so that all else in this file needs setuptools only."""
    import nanobind

    robin_map = Path(nanobind.include_dir()).parent / "ext" / "robin_map" / "include"
    return [nanobind.include_dir(), nanobind.source_dir(), str(robin_map), jaxlib_include()]


class BuildExt(build_ext):
    """Compiles two files at a time, and the ISA units with their own flags."""

    def build_extensions(self) -> None:
        for folder in include_dirs():
            self.compiler.add_include_dir(folder)
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        """An older build that this interpreter would rather load goes: a name with one version in it comes before ``.abi3.so``."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            module = ROOT / Path(*ext.name.split("."))
            built = Path(self.get_ext_filename(ext.name)).name
            for suffix in importlib.machinery.EXTENSION_SUFFIXES:
                if module.name + suffix == built:
                    break
                module.with_name(module.name + suffix).unlink(missing_ok=True)

    def build_extension(self, ext: Extension) -> None:
        plain_compile = self.compiler.compile
        program = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)[0]
        compiler_version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            def compile_one(source: str) -> list[str]:
                own = [*COLD_FLAGS.get(Path(source).name, []), *isa_flags(Path(source).name, sysconfig.get_platform())]
                extra = [*(options.get("extra_postargs") or []), *own]
                kept = kept_object(source, [*extra, compiler_version])
                if kept is not None and kept.exists():
                    return [str(kept)]
                objects = plain_compile([source], **{**options, "extra_postargs": extra})
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(objects[0], f"{kept}.{os.getpid()}")
                    os.replace(f"{kept}.{os.getpid()}", kept)
                    for older in set(kept.parent.glob(f"{Path(source).stem}-*.o")) - {kept}:
                        older.unlink(missing_ok=True)
                return objects

            with concurrent.futures.ThreadPoolExecutor(JOBS) as executor:
                return [one for objects in executor.map(compile_one, sources) for one in objects]

        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = plain_compile


class BuildPy(build_py):
    """Puts what NVRTC and the emulator's compiler read into wheels; an editable install finds it in the repository."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / DEVICE_SOURCES, ignore_errors=True)
            for source, target in self.device_sources():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def device_sources(self) -> list[tuple[Path, Path]]:
        target = Path(self.build_lib) / DEVICE_SOURCES
        found = (path for room in ("include", "emulator") for path in sorted((ROOT / "cuda" / room).rglob("*")))
        return [(path, target / path.relative_to(ROOT / "cuda")) for path in found if path.suffix in DEVICE_SUFFIXES]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        copied = [] if self.editable_mode else [str(target) for _, target in self.device_sources()]
        return [*super().get_outputs(include_bytecode), *copied]


class Sdist(sdist):
    """Packs equal files to equal bytes: by name, owned by nobody, with one date (``SOURCE_DATE_EPOCH``, or else 1980)."""

    def make_archive(self, base_name: str, format: str, root_dir: Any = None, base_dir: Any = None, **_: Any) -> str:
        if format != "gztar":
            raise SystemExit(f"a source distribution is a .tar.gz, not {format}")
        date = int(os.environ.get("SOURCE_DATE_EPOCH") or 315532800)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(Path(base_dir).rglob("*")):
                if path.is_file():
                    entry = tarfile.TarInfo(path.as_posix())
                    entry.size, entry.mtime = path.stat().st_size, date
                    entry.mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
                    with path.open("rb") as file:
                        tar.addfile(entry, file)
        archive = f"{base_name}.tar.gz"
        Path(archive).parent.mkdir(parents=True, exist_ok=True)
        Path(archive).write_bytes(gzip.compress(packed.getvalue(), mtime=date))
        return archive


def extension(target: str, *own_headers: str) -> Extension:
    return Extension(
        f"kitsune_jax._{target}",
        sources=sources(target),
        depends=["setup.py", *headers(*own_headers)],
        include_dirs=list(own_headers),
        define_macros=[
            ("NDEBUG", "1"),
            ("NB_COMPACT_ASSERTIONS", "1"),
            *([("Py_LIMITED_API", "0x030C0000")] if STABLE_ABI else []),
        ],
        py_limited_api=STABLE_ABI,
        extra_compile_args=COMMON + HARDENED,
        extra_link_args=LINKED,
        libraries=["dl"] if LINUX and target == "cuda" else [],  # glibc before 2.34 has dlopen apart
        language="c++",
    )


# Code, which stays as it is, or a picture or a link (its text and its address).
MARKDOWN = re.compile(r"```.*?```|<picture>.*?</picture>\s*|<img\b[^>]*>\s*|!?\[([^\]]*)\]\(([^)\s]*)\)|`[^`]*`", re.DOTALL)


def description(readme: str) -> str:
    """The README for a page outside of the repository: without pictures and links whose addresses are relative to it; the text of
    the links stays."""

    def outside(found: re.Match[str]) -> str:
        whole, text, address = found[0], found[1], found[2]
        if whole.startswith("`") or re.match(r"https?://", address or ""):
            return whole
        return "" if whole.startswith(("!", "<")) else text

    return (
        MARKDOWN.sub(outside, readme).rstrip() + "\n\nThe source distribution has the documentation and the examples named here.\n"
    )


setup(
    long_description=description((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    ext_modules=[extension("cpu", "cpu/include", "cpu/src"), extension("cuda", "cuda/src")],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
)
