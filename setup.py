"""Builds the extensions ``kitsune_jax._cpu`` and ``kitsune_jax._cuda``: setuptools and nanobind, no CMake.

Comes in: ``cpu/``, ``cuda/``, the headers of the installed nanobind and jaxlib. Goes out: two extension modules and, in wheels, the
sources that kernels are compiled from when they are needed. Invariants: the kernels of each instruction set are compiled with that
set's flags and nothing else is, never ``-march=native``, so that a wheel runs on every CPU of its architecture; jaxlib is found
without importing JAX; no CUDA toolkit is needed.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import platform
import shutil
from pathlib import Path
from typing import Any

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
JOBS = 2
DEVICE_SOURCES = Path("kitsune_jax") / "cuda_sources"
DEVICE_SUFFIXES = {".h", ".cuh", ".cu", ".cc", ".S"}

COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fvisibility=hidden", "-g0"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
WIDE = ["-mfma", "-mf16c", "-mprefer-vector-width=512"]
# The flags each ISA's translation unit says it wants in its first lines; on other machines than x86-64 those units are empty.
ISA_FLAGS = {
    "isa_avx2.cc": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512.cc": [*AVX512, *WIDE],
    "isa_avx512bf16.cc": [*AVX512, "-mavx512bf16", *WIDE],
}


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


class BuildExt(build_ext):
    """Compiles two files at a time, and the ISA units with their own flags."""

    def build_extension(self, ext: Extension) -> None:
        plain_compile = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            def compile_one(source: str) -> list[str]:
                extra = list(options.get("extra_postargs") or [])
                if platform.machine().lower() in ("x86_64", "amd64"):
                    extra += ISA_FLAGS.get(Path(source).name, [])
                return plain_compile([source], **{**options, "extra_postargs": extra})

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


nanobind_dir = Path(nanobind.include_dir()).parent


def extension(target: str, *include_dirs: str) -> Extension:
    return Extension(
        f"kitsune_jax._{target}",
        sources=sources(target),
        depends=["setup.py", *headers(*include_dirs)],
        include_dirs=[
            *include_dirs,
            nanobind.include_dir(),
            nanobind.source_dir(),
            str(nanobind_dir / "ext" / "robin_map" / "include"),
            jaxlib_include(),
        ],
        define_macros=[("NDEBUG", "1"), ("NB_COMPACT_ASSERTIONS", "1")],
        extra_compile_args=COMMON,
        extra_link_args=["-Wl,-s"] if platform.system() == "Linux" else [],
        libraries=["dl"] if platform.system() == "Linux" and target == "cuda" else [],  # glibc before 2.34 has dlopen apart
        language="c++",
    )


setup(
    ext_modules=[extension("cpu", "cpu/include", "cpu/src"), extension("cuda", "cuda/src")],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
