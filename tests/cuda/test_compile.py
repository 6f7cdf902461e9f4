"""The compilers of generated kernels: NVRTC, the host's for the emulator, what they say of errors, and the disassembler."""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_checks import sass
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import hostcc, nvrtc, sources
from kitsune_jax.targets.cuda.nvrtc import Compiled
from kitsune_jax.targets.cuda.sources import CompileError
from tests.support.cuda_compilers import OLDER, folder_of

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason=str(nvrtc.why_not()))
needs_host = pytest.mark.skipif(not hostcc.available(), reason=str(hostcc.why_not()))
needs_sass = pytest.mark.skipif(not (sass.available() and nvrtc.available()), reason="no NVRTC, or no cuobjdump and nvdisasm")

PLAIN = """\
#include "kitsune/standin.h"

extern "C" __global__ void kitsune_region(float* p) {
    p[threadIdx.x] = twice(p[threadIdx.x]);
}
"""
LOCAL = """\
extern "C" __global__ void kitsune_region(float* p, int n) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = p[i];
    for (int i = 0; i < n; ++i) a[(i * 7) & 63] += a[i & 63];
    p[n] = a[n & 63];
}
"""
SHARED = """\
extern "C" __global__ void kitsune_region(float* p) {
    __shared__ float s[64];
    s[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 32) p[threadIdx.x] = s[threadIdx.x ^ 33];
}
"""
EMULATED = """\
#include "kitsune/standin.h"
#include "emulator/standin.h"

extern "C" __attribute__((visibility("default"))) int kitsune_region(int x) { return standin_add(twice(x), target()); }
"""
EMULATOR = """\
extern "C" int standin_add(int, int);
#ifndef KITSUNE_SM
#define KITSUNE_SM 0
#endif
__attribute__((noinline)) inline int target() { return KITSUNE_SM; }
"""
RUNTIME = """\
#include "emulator/standin.h"

extern "C" int standin_add(int x, int y) { return x + y; }
int use_the_inline_function() { return target(); }
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library of device headers and an emulator instead of the package's own."""
    base = tmp_path / "cuda"
    files = {
        "include/kitsune/standin.h": "#ifdef __CUDACC__\n__device__\n#endif\ninline float twice(float x) { return x + x; }\n",
        "emulator/include/emulator/standin.h": EMULATOR,
        "emulator/src/standin.cc": RUNTIME,
    }
    for name, text in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    monkeypatch.setattr(sources, "root", lambda: base)
    return base


# --- sources


def test_the_sources_are_found() -> None:
    assert (sources.root() / "include" / "kitsune").is_dir()
    assert len(sources.fingerprint("include")) == 64


def edited(base: Path, place: Path, edit: Callable[[Path], object]) -> Path:
    """A copy of ``base`` elsewhere, changed: the fingerprint of one folder is computed once per process."""
    for path in base.rglob("*"):
        if path.is_file():
            (place / path.relative_to(base)).parent.mkdir(parents=True, exist_ok=True)
            (place / path.relative_to(base)).write_bytes(path.read_bytes())
    edit(place)
    return place


@pytest.mark.parametrize(
    "edit, parts",
    [
        (lambda base: (base / "include/kitsune/standin.h").write_text("changed"), {"include", "emulator"}),
        (lambda base: (base / "include/kitsune/standin.h").rename(base / "include/kitsune/other.h"), {"include", "emulator"}),
        (lambda base: (base / "include/kitsune/new.h").touch(), {"include", "emulator"}),
        (lambda base: (base / "emulator/src/standin.cc").write_text("changed"), {"emulator"}),
        (lambda base: (base / "include/kitsune/.standin.h.swp").touch(), set()),
        (lambda base: (base / "readme").touch(), set()),
        (lambda base: None, set()),
    ],
    ids=["content", "name", "new file", "emulator", "hidden file", "file elsewhere", "place"],
)
def test_a_fingerprint_changes_with_what_a_compiler_can_read(
    standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Path], object], parts: set[str]
) -> None:
    both: tuple[sources.Part, ...] = ("include", "emulator")
    before = {part: sources.fingerprint(part) for part in both}
    monkeypatch.setattr(sources, "root", lambda: edited(standin, tmp_path / "copy", edit))
    assert {part for part, old in before.items() if sources.fingerprint(part) != old} == parts


def test_missing_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "root", lambda: tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere/include"):
        sources.fingerprint("include")


# --- errors in generated sources

NUMBERED = "".join(f"line {n}\n" for n in range(1, 31))


@pytest.mark.parametrize(
    "log",
    [
        "kitsune_region.cu(10): error: identifier",
        'note\nkitsune_region.cc:10:3: error: expected ";"\nkitsune_region.cc:20:3: error: more',
        "kitsune_region.cc:2:3: warning: w\nkitsune_region.cc:10:3: fatal error: x.h",
        'kitsune_region.cu(10): catastrophic error: cannot open source file "x.h"',
    ],
)
def test_the_lines_around_the_first_error_are_shown(log: str) -> None:
    shown = sources.excerpt(log, NUMBERED).splitlines()[1:]
    assert [line for line in shown if line.startswith(">")] == [">   10 | line 10"]
    assert [line.split(" | ")[1] for line in shown] == [f"line {n}" for n in range(6, 15)]


def test_an_error_in_a_header_shows_the_header(tmp_path: Path) -> None:
    (tmp_path / "a header.h").write_text("one\ntwo\n")
    assert ">    2 | two" in sources.excerpt(f"{tmp_path}/a header.h(2): error: no", NUMBERED)


@pytest.mark.parametrize("log", ["", "ptxas fatal   : no line", "/nowhere/x.h(3): error: gone", "kitsune_region.cu(3): warning: w"])
def test_without_a_line_nothing_is_shown(log: str) -> None:
    assert sources.excerpt(log, NUMBERED) == ""


# --- NVRTC


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_nvrtc_makes_a_cubin_of_one_architecture(standin: Path, arch: str) -> None:
    made = nvrtc.compile(PLAIN, arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert b".text.kitsune_region\0" in made.cubin
    assert f"'{arch}'" in made.log


@needs_nvrtc
@pytest.mark.parametrize(
    "arch, sm", [("sm_90a", 900), ("sm_90", 800), ("sm_80", 800), ("sm_86", 800), ("sm_120a", 800), ("compute_80", 800)]
)
def test_the_architecture_chooses_the_path(standin: Path, arch: str, sm: int) -> None:
    nvrtc.compile(f'#if KITSUNE_SM != {sm}\n#error "KITSUNE_SM"\n#endif\n{PLAIN}', arch)


@pytest.mark.parametrize("arch", ["sm_75", "90a", "", "compute_75", "compute_90a", "sm_90x"])
def test_what_is_no_usable_architecture_is_refused(arch: str) -> None:
    with pytest.raises(ValueError, match="sm_80 or a later one"):
        nvrtc.sm_of(arch)


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_an_error(standin: Path) -> None:
    with pytest.raises(CompileError, match="gpu-architecture"):
        nvrtc.compile(PLAIN, "sm_9000")


@needs_nvrtc
def test_headers_are_found_in_the_sources_alone(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.h").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"here\.h"):
        nvrtc.compile(f'#include "here.h"\n{PLAIN}', "sm_80")


@needs_nvrtc
def test_a_failed_compile_shows_log_lines_and_the_kept_source(standin: Path, own_cache: Path) -> None:
    source = PLAIN.replace("twice", "thrice")
    with pytest.raises(CompileError) as raised:
        nvrtc.compile(source, "sm_90a")
    error = raised.value
    assert 'identifier "thrice" is undefined' in error.log and error.log.strip() in str(error)
    assert ">    4 |     p[threadIdx.x] = thrice(p[threadIdx.x]);" in str(error)
    assert error.source_path is not None and error.source_path.parent == own_cache
    assert error.source_path.read_text() == source and str(error.source_path) in str(error)


@needs_nvrtc
def test_what_ptxas_refuses_is_an_error_as_well(standin: Path) -> None:
    with pytest.raises(CompileError, match="Not a name of any known instruction"):
        nvrtc.compile('extern "C" __global__ void kitsune_region() { asm volatile("nonsense;"); }', "sm_90a")


@needs_nvrtc
def test_warnings_reach_the_log(standin: Path) -> None:
    kernel = 'extern "C" __global__ void kitsune_region() { %s }'
    assert "shift count is too large" in nvrtc.compile(kernel % "int x = 1 << 40; (void)x;", "sm_80").log


@needs_nvrtc
def test_unused_variables_are_no_warning(standin: Path) -> None:
    assert "warning" not in nvrtc.compile('extern "C" __global__ void kitsune_region() { int unused; }', "sm_80").log


@needs_nvrtc
def test_threads_compile_at_the_same_time(standin: Path) -> None:
    kernels = [PLAIN.replace("kitsune_region", f"kernel_{n}") for n in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        made = list(executor.map(nvrtc.compile, kernels, itertools.repeat("sm_90a")))
    assert [f".text.kernel_{n}\0".encode() in one.cubin for n, one in enumerate(made)] == [True] * 4


@needs_nvrtc
def test_resources_are_what_ptxas_says(standin: Path) -> None:
    local, shared = nvrtc.compile(LOCAL, "sm_90a"), nvrtc.compile(SHARED, "sm_90a")
    used = sass.resources(local.log, local.cubin)
    assert (used.stack_bytes, used.shared_static, used.spill_bytes, used.barriers) == (256, 0, 0, 0)
    assert f"Used {used.registers} registers" in local.log and used.registers > 0
    used = sass.resources(shared.log, shared.cubin)
    assert (used.stack_bytes, used.shared_static, used.spill_bytes, used.barriers) == (0, 256, 0, 1)


@needs_nvrtc
def test_spills_are_counted(standin: Path) -> None:
    made = nvrtc.compile(many_live_values(32), "sm_90a", ["--maxrregcount=24"])
    used = sass.resources(made.log, made.cubin)
    assert used.spill_bytes > 0 and used.stack_bytes > 0 and used.registers <= 24
    made = nvrtc.compile(many_live_values(32), "sm_90a")
    assert sass.resources(made.log, made.cubin).spill_bytes == 0


def many_live_values(count: int) -> str:
    unroll = '_Pragma("unroll")'
    return f"""extern "C" __global__ void kitsune_region(volatile float* p) {{
        float a[{count}];
        {unroll} for (int i = 0; i < {count}; ++i) a[i] = p[i];
        {unroll} for (int i = {count} - 1; i >= 0; --i) p[i] = a[i];
    }}"""


@needs_nvrtc
def test_resources_of_another_or_of_no_kernel_are_refused(standin: Path) -> None:
    one, other = nvrtc.compile(SHARED, "sm_80"), nvrtc.compile(SHARED.replace("kitsune_region", "other"), "sm_80")
    for log, cubin in ((one.log, other.cubin), ("", one.cubin), (one.log + other.log, one.cubin)):
        with pytest.raises(ValueError, match="log"):
            sass.resources(log, cubin)


def test_a_compiled_kernel_can_be_stored() -> None:
    made = Compiled(b"\x7fELF\0\xff", "registers: \u00b5\n")
    assert Compiled.unpack(made.pack()) == made
    assert made.pack().startswith(made.cubin)


@pytest.fixture
def no_library_yet(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """NVRTC not yet loaded, and the places to look for it in the test's hand."""
    nvrtc._open.cache_clear()
    return lambda places: monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(places))


def test_without_nvrtc_there_is_advice(no_library_yet: Callable[[list[str]], None]) -> None:
    no_library_yet([])
    assert not nvrtc.available()
    assert "pip install kitsune_jax[cuda13]" in str(nvrtc.why_not())
    with pytest.raises(OSError, match="NVRTC"):
        nvrtc.compile(PLAIN, "sm_80")


def test_a_library_that_does_not_load_is_named(no_library_yet: Callable[[list[str]], None], tmp_path: Path) -> None:
    (tmp_path / "libnvrtc.so.13").write_text("no library")
    no_library_yet([str(tmp_path / "libnvrtc.so.13"), "libnvrtc-of-nobody.so"])
    assert str(tmp_path / "libnvrtc.so.13") in str(nvrtc.why_not())
    assert "of-nobody" not in str(nvrtc.why_not())


def test_the_builtins_are_loaded_first_and_by_path(
    no_library_yet: Callable[[list[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (tmp_path / name).touch()
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    no_library_yet([str(tmp_path / "libnvrtc.so.13")])
    monkeypatch.setattr(nvrtc, "_version_of", lambda handle: (0, 0))
    assert not nvrtc.available()
    assert loaded == [str(tmp_path / "libnvrtc-builtins.so.13.0"), str(tmp_path / "libnvrtc.so.13")]


@needs_nvrtc
def test_a_library_too_old_is_named(no_library_yet: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    no_library_yet(list(nvrtc._candidates()))
    monkeypatch.setattr(nvrtc, "_version_of", lambda handle: (12, 4))
    assert "is version 12.4, older than 12.8" in str(nvrtc.why_not())


@needs_nvrtc
def test_two_versions_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / "cache"))
    older = folder_of(OLDER)
    assert older is not None and nvrtc.version(older) == (13, 0)
    # What the compilers call themselves, in the order in which they are asked.
    source = 'extern "C" __global__ void kitsune_region(int* p) { *p = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__; }'
    for folder in (None, older, None):
        major, minor = nvrtc.version(folder)
        ptx = nvrtc.compile(source, "compute_80", folder=folder).cubin
        assert f", {major * 100 + minor};".encode() in ptx
        # A cache that took one for the other would hand out the first.
        assert f", {major * 100 + minor};".encode() in compilers.cubin(source, "compute_80", folder).cubin


@needs_nvrtc
def test_the_environment_chooses_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KITSUNE_NVRTC_DIR", str(folder_of(OLDER)))
    assert nvrtc.version() == (13, 0)
    made = compilers.cubin(SHARED, "sm_80")
    assert made.cubin == nvrtc.compile(SHARED, "sm_80", folder=folder_of(OLDER)).cubin


def test_a_folder_without_nvrtc_is_named(tmp_path: Path) -> None:
    assert f"it is not in {tmp_path}" in str(nvrtc.why_not(tmp_path))
    with pytest.raises(OSError, match="NVRTC"):
        nvrtc.compile(PLAIN, "sm_80", folder=tmp_path)


# --- the host's compiler


def test_without_a_host_compiler_there_is_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install g++" in str(hostcc.why_not())
    with pytest.raises(OSError, match="C\\+\\+17 compiler"):
        hostcc.compile(EMULATED, 900)


@needs_host
def test_a_compiler_that_does_not_start_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hostcc.find()
    (tmp_path / "c++").symlink_to(real.path)
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hostcc.find().path == str(tmp_path / "c++")


@needs_host
@pytest.mark.parametrize("sm", [800, 900])
def test_an_emulated_kernel_runs_against_the_emulators_library(standin: Path, tmp_path: Path, sm: int) -> None:
    ctypes.CDLL(str(compilers.emulator_library()), ctypes.RTLD_GLOBAL)
    (tmp_path / "kernel.so").write_bytes(compilers.emulated(EMULATED, sm))
    # Through the global library's function, and not through its copy of the inline one, which has another KITSUNE_SM.
    assert ctypes.CDLL(str(tmp_path / "kernel.so")).kitsune_region(5) == 10 + sm


@needs_host
def test_a_kernel_that_the_host_compiler_refuses_is_shown(standin: Path, own_cache: Path) -> None:
    with pytest.raises(CompileError) as raised:
        compilers.emulated(EMULATED.replace("twice", "thrice"), 900)
    assert ">    4 | extern" in str(raised.value) and "thrice" in raised.value.log
    assert raised.value.source_path is not None and raised.value.source_path.parent == own_cache


@needs_host
def test_a_precompiled_header_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fourth kernel on, and not for a source that defines a macro in front of its include."""
    monkeypatch.setattr(hostcc, "_seen", collections.Counter())
    hostcc._precompile.cache_clear()
    source = '#include "kitsune/kitsune.h"\nextern "C" unsigned answer() { return kitsune::kGroupThreads + 10; }\n'
    images = [hostcc.compile(source, 900) for _ in range(4)]
    assert len(set(images)) == 1
    found = hostcc.precompiled_header(hostcc.find(), hostcc.kernel_options(900), source)
    assert "clang" in hostcc.find().version or (found is not None and found.with_name("kitsune.h.gch").is_file())
    assert hostcc.precompiled_header(hostcc.find(), hostcc.kernel_options(900), f"#define KITSUNE_PHASES 1\n{source}") is None


@pytest.mark.parametrize("sm", [90, 1000])
def test_the_host_compiler_knows_two_paths(sm: int) -> None:
    with pytest.raises(ValueError, match="not 800 or 900"):
        hostcc.kernel_options(sm)


@needs_host
def test_an_emulator_that_does_not_compile_says_why(standin: Path) -> None:
    (standin / "emulator" / "src" / "broken.cc").write_text("int x = nonsense;\n")
    with pytest.raises(RuntimeError, match="nonsense"):
        compilers.emulator_library()


@needs_host
def test_an_emulator_without_sources_is_named(standin: Path) -> None:
    (standin / "emulator" / "src" / "standin.cc").unlink()
    with pytest.raises(FileNotFoundError, match="emulator/src"):
        compilers.emulator_library()


# --- behind the cache


class Counting:
    """A compiler that only counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: object, **__: object) -> Compiled:
        self.calls += 1
        return Compiled(str(self.calls).encode(), "log")


@pytest.fixture
def counting(standin: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """In the place of every compiler; the identities of the real ones are replaced too, so that no test needs them."""
    count = Counting()
    monkeypatch.setattr(nvrtc, "version", lambda *_: (13, 0))
    monkeypatch.setattr(hostcc, "find", lambda: hostcc.Compiler("/bin/cxx", "cxx 1"))
    monkeypatch.setattr(nvrtc, "compile", count)
    monkeypatch.setattr(hostcc, "compile", lambda *_: count().cubin)
    return count


def test_a_kernel_is_compiled_once(counting: Counting) -> None:
    assert compilers.cubin("source", "sm_90a") == compilers.cubin("source", "sm_90a") == Compiled(b"1", "log")
    assert compilers.emulated("source", 900) == compilers.emulated("source", 900) == b"2"
    assert counting.calls == 2


def test_another_source_or_architecture_is_another_kernel(counting: Counting) -> None:
    made = {compilers.cubin(source, arch).cubin for source in ("a", "b") for arch in ("sm_80", "sm_90", "sm_90a")}
    made |= {compilers.emulated(source, sm) for source in ("a", "b") for sm in (800, 900)}
    assert len(made) == counting.calls == 10


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, base: patch.setattr("kitsune_jax.config.__version__", "other"),
        lambda patch, base: patch.setattr(nvrtc, "version", lambda *_: (13, 1)),
        lambda patch, base: patch.setattr(nvrtc, "options_for", lambda arch: (arch,)),
        lambda patch, base: patch.setattr(sources, "root", lambda: base),
    ],
    ids=["package", "compiler", "options", "headers"],
)
def test_whatever_specialises_a_cubin_makes_another(
    counting: Counting,
    standin: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    other = edited(standin, tmp_path / "copy", lambda base: (base / "include/kitsune/standin.h").write_text("changed"))
    compilers.cubin("source", "sm_90a")
    change(monkeypatch, other)
    compilers.cubin("source", "sm_90a")
    assert counting.calls == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, base: patch.setattr("kitsune_jax.config.__version__", "other"),
        lambda patch, base: patch.setattr(hostcc, "find", lambda: hostcc.Compiler("/bin/cxx", "cxx 2")),
        lambda patch, base: patch.setattr(hostcc, "kernel_options", lambda sm: ("-O3",)),
        lambda patch, base: patch.setattr(sources, "root", lambda: base),
    ],
    ids=["package", "compiler", "options", "emulator's headers"],
)
def test_whatever_specialises_an_emulated_kernel_makes_another(
    counting: Counting,
    standin: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    other = edited(standin, tmp_path / "copy", lambda base: (base / "emulator/include/emulator/standin.h").write_text("changed"))
    compilers.emulated("source", 900)
    change(monkeypatch, other)
    compilers.emulated("source", 900)
    assert counting.calls == 2


@needs_host
def test_the_emulators_library_is_built_once(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compilers.emulator_library()
    monkeypatch.setattr(hostcc, "build_emulator", lambda: pytest.fail("built again"))
    assert compilers.emulator_library() == path


@needs_nvrtc
def test_a_virtual_architecture_gives_ptx_that_ends_with_a_zero(standin: Path) -> None:
    made = compilers.cubin(PLAIN, "compute_80")
    assert b".target sm_80" in made.cubin and b".version" in made.cubin
    assert made.cubin.endswith(b"\0"), "the driver reads PTX to its end"
    assert compilers.cubin(PLAIN, "compute_80") == made


@needs_nvrtc
def test_a_cached_kernel_is_the_compiled_one(standin: Path) -> None:
    first, second = compilers.cubin(PLAIN, "sm_90a"), compilers.cubin(PLAIN, "sm_90a")
    assert first == second
    assert first.cubin.startswith(b"\x7fELF") and "registers" in first.log


# --- the disassembler


@needs_sass
def test_local_memory_is_seen_in_the_machine_code(standin: Path) -> None:
    local, clean = (sass.disassemble(nvrtc.compile(source, "sm_90a").cubin) for source in (LOCAL, SHARED))
    assert local.has_local_memory and local.stack == 256 and local.count("STL") > 0 and local.count("LDL") > 0
    assert not clean.has_local_memory and clean.stack == 0


@needs_sass
def test_instructions_are_read_with_predicate_and_operands(standin: Path) -> None:
    made = nvrtc.compile(SHARED, "sm_80")
    code = sass.disassemble(made.cubin)
    assert code.function == "kitsune_region"
    assert code.registers == sass.resources(made.log, made.cubin).registers
    assert (code.count("BAR.SYNC"), code.count("STS"), code.count("LDS"), code.count("NONSENSE")) == (1, 1, 1, 0)
    assert code.shared == 256
    addresses = [one.address for one in code.instructions]
    assert addresses == list(range(0, 16 * len(addresses), 16))
    exits = [one for one in code.instructions if one.opcode == "EXIT"]
    assert any(one.predicate for one in exits) and any(not one.predicate for one in exits)  # an early one for half of the threads
    (store,) = [one for one in code.instructions if one.opcode.startswith("STS")]
    assert str(store) in str(code) and "[" in store.operands


@needs_sass
def test_a_function_is_chosen_by_name(standin: Path) -> None:
    cubin = nvrtc.compile(LOCAL + SHARED.replace("kitsune_region", "other"), "sm_90a").cubin
    assert sass.disassemble(cubin, "kitsune_region").has_local_memory
    assert not sass.disassemble(cubin, "other").has_local_memory
    for name in (None, "missing"):
        with pytest.raises(ValueError, match="kitsune_region, other"):
            sass.disassemble(cubin, name)


@pytest.mark.skipif(not sass.available(), reason="no cuobjdump and nvdisasm")
def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="cuobjdump"):
        sass.disassemble(b"no cubin")


def test_without_a_disassembler_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "_tool", lambda: None)
    with pytest.raises(OSError, match="pip install triton"):
        sass.disassemble(b"")


def test_an_instruction_reads_as_the_tool_prints_it() -> None:
    one = sass.Instruction(16, "!P0", "LDS.128", "R4, [R2+UR4]")
    assert str(one) == "@!P0 LDS.128 R4, [R2+UR4]"
    assert str(dataclasses.replace(one, predicate="", operands="")) == "LDS.128"
