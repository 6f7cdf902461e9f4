"""The device side of the arch contract: every function compiles, and ptxas makes the right thing of what is easily spelled wrongly.

Nothing runs here: what the functions mean is tested in the emulator; here the same names become PTX, and the machine code is read.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kernel_checks import sass
from kernel_checks.sass import Sass
from kitsune_jax.targets.cuda import nvrtc
from kitsune_jax.targets.cuda.nvrtc import Compiled
from kitsune_jax.targets.cuda.sources import CompileError

REPOSITORY = Path(__file__).resolve().parents[2]
ARCH = REPOSITORY / "cuda" / "include" / "kitsune" / "arch"
KERNELS = REPOSITORY / "cuda" / "tests" / "arch"
PORTABLE = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Registers, spills and the compile time are information; whatever has a number is a complaint (C7507: setmaxnreg ignored; C7508 to
# C7520: wgmma serialised or waited for early).
COMPLAINT = re.compile(r"\(C7\d\d\d\)|\bwarning\b", re.IGNORECASE)

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.why_not() or "")
needs_sass = pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")


@functools.cache
def compiled(kernel: str, arch: str) -> Compiled:
    return nvrtc.compile((KERNELS / f"{kernel}.cu").read_text(encoding="utf-8"), arch)


@functools.cache
def machine_code(kernel: str, arch: str, function: str = "kitsune_region") -> Sass:
    return sass.disassemble(compiled(kernel, arch).cubin, function)


def snippet(body: str) -> str:
    """A kernel of one warpgroup; `s` is its shared memory."""
    return (
        '#include "kitsune/arch/arch.h"\nusing namespace kitsune::arch;\nstruct Params { float* out; };\n'
        f"KITSUNE_KERNEL(kitsune_region, Params, p, 128) {{ const u8* s = &shared<u8>();\n{body}\n}}\n"
    )


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_wgmma", REPOSITORY / "scripts" / "gen_wgmma.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(code: Sass) -> list[str]:
    """Instructions as text. The tensor core's shape belongs to the opcode: HGMMA.64x128x16."""
    return [re.sub(r"^((?:@\S+ )?HGMMA\.64) x", r"\1x", str(one)) for one in code.instructions]


# --- every function of the contract


def declared() -> set[str]:
    """The functions of namespace kitsune::arch that a kernel may call."""
    names = set()
    for header in sorted(ARCH.glob("*.h")):
        if header.name not in ("device.h", "wgmma_instances.h"):
            public = re.sub(r"namespace detail \{.*?\n\}", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
            names |= set(re.findall(r"^KITSUNE_DEVICE [\w&]+ (\w+)\(", public, re.MULTILINE))
            names |= set(re.findall(r"^KITSUNE_DEVICE S& (\w+)\(", public, re.MULTILINE))
    return names


def test_the_kernel_of_all_functions_calls_every_function() -> None:
    source = (KERNELS / "all_functions.cu").read_text(encoding="utf-8")
    names = declared()
    assert len(names) > 80
    assert not [name for name in sorted(names) if not re.search(rf"\b{name}(?:<[\w, ]+>)?\(", source)]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", *PORTABLE])
def test_every_function_compiles_without_a_complaint(arch: str) -> None:
    assert not COMPLAINT.search(compiled("all_functions", arch).log), compiled("all_functions", arch).log


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sm", [900, 800])
def test_the_emulator_has_every_function_too(sm: int) -> None:
    emulator = REPOSITORY / "cuda" / "emulator" / "include"
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-DKITSUNE_EMULATE", f"-DKITSUNE_SM={sm}"]
    command += [f"-I{emulator}", f"-I{ARCH.parent.parent}", str(KERNELS / "all_functions.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inline_ptx_stands_only_in_arch() -> None:
    headers = [path for path in (REPOSITORY / "cuda" / "include").rglob("*.h") if ARCH not in path.parents]
    assert not [str(path) for path in headers if re.search(r"\basm\b[^;]*\(", path.read_text(encoding="utf-8"))]


def test_device_headers_include_only_the_project() -> None:
    for header in sorted(ARCH.glob("*.h")):
        for name in re.findall(r"^#include (.*)", header.read_text(encoding="utf-8"), re.MULTILINE):
            assert name.startswith(('"kitsune/', '"emulator/')), f"{header.name} includes {name}"


@needs_nvrtc
@pytest.mark.parametrize(
    ("body", "arch", "message"),
    [
        (
            "float d[20] = {}; wgmma_ss<Bf16, 40, false, false>(d, 0, 0, true);",
            "sm_90a",
            "no wgmma_ss of this type, N and orientation",
        ),
        (
            "float d[64] = {}; wgmma_ss<Tf32, 128, true, true>(d, 0, 0, true);",
            "sm_90a",
            "no wgmma_ss of this type, N and orientation",
        ),
        ("reg_dec<20>();", "sm_90a", "setmaxnreg takes multiples of 8 from 24 to 256"),
        ("cluster_sync();", "sm_80", 'identifier "cluster_sync" is undefined'),
    ],
)
def test_misuse_is_an_error_that_says_what(body: str, arch: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(snippet(body), arch)
    assert message in str(caught.value)


@needs_nvrtc
def test_hopper_code_is_refused_for_other_architectures() -> None:
    with pytest.raises(CompileError, match="compile for sm_90a"):
        nvrtc.compile(snippet(""), "sm_90", ["-UKITSUNE_SM", "-DKITSUNE_SM=900"])


# --- wgmma


def instances(tag: str) -> Iterator[tuple[int, str, str]]:
    """Of every instance of a type: its N, a call of it, and the instruction that it must become, without register numbers."""
    gen = generator()
    shape = {"Bf16": "16.F32.BF16", "F16": "16.F32", "Tf32": "8.F32.TF32"}[tag]
    for n in gen.N_TF32 if tag == "Tf32" else gen.N_16BIT:
        opcode, end = f"HGMMA.64x{n}x{shape} R", "RZ, !UPT, gsb0"
        yield n, f"wgmma_rs<{tag}, {n}>(d, a, desc_k128(s), false)", f"{opcode}, R, gdesc[UR], {end}"
        all_orientations = tag != "Tf32" and n in gen.N_TRANSPOSED
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)) if all_orientations else ((0, 0),):
            flags = f"{'true' if a else 'false'}, {'true' if b else 'false'}"
            descriptor = "gdesc[UR]" + (".tnspA" if a else "") + (".tnspB" if b else "")
            yield n, f"wgmma_ss<{tag}, {n}, {flags}>(d, desc_k128(s), desc_k128(s), false)", f"{opcode}, {descriptor}, {end}"


@needs_sass
@pytest.mark.parametrize("tag", ["Bf16", "F16", "Tf32"])
def test_every_wgmma_instance_becomes_its_instruction(tag: str) -> None:
    # A case each, so that ptxas does not interleave them and run out of registers.
    cases = "\n".join(
        f"case {i}: {{ float d[{n // 2}] = {{}}; pin(d); wgmma_fence(); {call}; wgmma_commit(); wgmma_wait<0>(); pin(d);"
        f" KITSUNE_UNROLL for (int i = 0; i < {n // 2}; ++i) sum += d[i]; break; }}"
        for i, (n, call, _) in enumerate(instances(tag))
    )
    body = f"u32 a[4] = {{1, 2, 3, 4}}; float sum = 0; switch (block_id()) {{ {cases} }} st_global(p.out, sum);"
    result = nvrtc.compile(snippet(body), "sm_90a")
    assert not COMPLAINT.search(result.log), result.log
    issued = [re.sub(r"\b(U?R)\d+", r"\1", line) for line in text_of(sass.disassemble(result.cubin)) if "HGMMA" in line]
    assert sorted(issued) == sorted(instruction for _, _, instruction in instances(tag))


@needs_sass
def test_accumulators_are_consecutive_and_a_false_accumulate_reads_none() -> None:
    body = """float d[32]; pin(d); wgmma_fence();
    KITSUNE_UNROLL for (int k = 0; k < 4; ++k) wgmma_rs<Bf16, 64>(d, {1, 2, 3, 4}, desc_k128(s) + 2 * k, k > 0);
    wgmma_commit(); wgmma_wait<0>(); pin(d);
    KITSUNE_UNROLL for (int i = 0; i < 32; ++i) st_global(p.out + 128 * i + thread_id(), d[i]);"""
    lines = text_of(sass.disassemble(nvrtc.compile(snippet(body), "sm_90a").cubin))
    issued = [line for line in lines if line.startswith("HGMMA")]
    first = re.match(r"HGMMA\S* R(\d+), R\d+, gdesc\[UR\d+\], RZ, !UPT", issued[0])
    assert first and not [line for line in issued[1:] if not re.search(rf" R{first[1]}, R\d+, gdesc\[UR\d+\], R{first[1]}\b", line)]
    stores = [re.search(r"\.64(?:\+0x([0-9a-f]+))?\], R(\d+)", line) for line in lines if line.startswith("STG")]
    assert [(int(one[1] or "0", 16) // 512, int(one[2]) - int(first[1])) for one in stores if one] == [(i, i) for i in range(32)]


@needs_sass
@pytest.mark.parametrize(
    ("descriptor", "low", "high"),
    [
        ("desc_k128(s)", 0x10000, 0x40000040),  # leading offset 1, stride 1024 / 16, swizzle mode 1 in the upper bits
        ("desc_mn128(s, 8192, 1024)", 0x2000000, 0x40000040),
        ("desc_mn128(s, 1024, 4096)", 0x400000, 0x40000100),
    ],
)
def test_descriptor_fields_stand_where_the_manual_says(descriptor: str, low: int, high: int) -> None:
    body = f"""float d[32] = {{}}; pin(d); wgmma_fence(); wgmma_ss<Bf16, 64, true, true>(d, {descriptor}, {descriptor}, true);
    wgmma_commit(); wgmma_wait<0>(); pin(d); st_global(p.out, d[0]);"""
    text = "\n".join(text_of(sass.disassemble(nvrtc.compile(snippet(body), "sm_90a").cubin)))
    # The address is known at launch only: ptxas masks it, shifts it, and sets the constant bits of the lower word.
    assert "0x3fff0," in text
    assert f"{low:#x}," in text and f"{high:#x}" in text


@needs_nvrtc
def test_the_log_tells_when_accumulators_are_touched_before_the_wait() -> None:
    body = """float d[32] = {}; pin(d); wgmma_fence(); wgmma_ss<Bf16, 64, false, false>(d, desc_k128(s), desc_k128(s), true);
    wgmma_commit(); KITSUNE_UNROLL for (int i = 0; i < 32; ++i) st_global(p.out + i, 2 * d[i]); wgmma_wait<0>();"""
    assert COMPLAINT.search(nvrtc.compile(snippet(body), "sm_90a").log)


def test_the_generated_instances_are_up_to_date() -> None:
    gen = generator()
    assert gen.HEADER.read_text(encoding="utf-8") == gen.generate(), "run scripts/gen_wgmma.py --write"


# --- synchronisation: dear where it is spelled wrongly


@needs_sass
@pytest.mark.parametrize("function", ["k_mbar_wait", "k_mbar_wait_cluster"])
def test_waits_suspend_and_leave_the_l1_cache_alone(function: str) -> None:
    code = machine_code("synchronisation", "sm_90a", function)
    assert code.count("SYNCS.PHASECHK.TRANS64.TRYWAIT") >= 1
    assert code.count("CCTL") == 0 and code.count("MEMBAR") == 0


@needs_sass
def test_a_remote_arrive_waits_for_shared_memory_only() -> None:
    code = machine_code("synchronisation", "sm_90a", "k_mbar_arrive_remote")
    opcodes = [one.opcode for one in code.instructions]
    assert code.count("MEMBAR.ALL.GPU") == 0 and code.count("CCTL") == 0
    # the read of the data, then the fence, then the arrival
    read, fence = opcodes.index("LDS"), opcodes.index("MEMBAR.ALL.CTA")
    assert read < fence < next(i for i, opcode in enumerate(opcodes) if opcode.startswith("SYNCS.ARRIVE"))


@needs_sass
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_polling_a_flag_invalidates_l1_once_after_the_loop(arch: str) -> None:
    code = machine_code("synchronisation", arch, "k_wait_ge")
    (invalidate,) = (one.address for one in code.instructions if one.opcode.startswith("CCTL.IVALL"))
    loops = [
        (int(one.operands, 16), one.address) for one in code.instructions if one.opcode == "BRA" and one.predicate and one.operands
    ]
    backward = [(start, end) for start, end in loops if start <= end]
    assert backward and all(not start <= invalidate <= end for start, end in backward)
    assert code.count("MEMBAR") == 0
    assert all(one.opcode.startswith("LDG.E.STRONG.GPU") for one in code.instructions if one.opcode.startswith("LDG"))


@needs_sass
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_release_of_a_flag_fences_before_the_addition(arch: str) -> None:
    opcodes = [one.opcode for one in machine_code("synchronisation", arch, "k_red_add_release").instructions]
    store = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("STG"))
    addition = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("RED"))
    assert store < opcodes.index("MEMBAR.ALL.GPU") < addition


@needs_sass
@pytest.mark.parametrize(
    ("function", "instruction"),
    [
        ("k_fence_proxy_async", "FENCE.VIEW.ASYNC.S"),
        ("k_fence_proxy_async_global", "FENCE.VIEW.ASYNC.G"),
        ("k_st_async", "STAS.128"),
    ],
)
def test_cheap_forms_do_not_drain_global_memory(function: str, instruction: str) -> None:
    code = machine_code("synchronisation", "sm_90a", function)
    assert code.count(instruction) == 1
    assert code.count("MEMBAR.ALL.GPU") == 0 and code.count("MEMBAR.SC") == 0


# --- whole kernels


@needs_sass
def test_a_hopper_pipeline_uses_the_machine_and_no_local_memory() -> None:
    result, code = compiled("pipeline_sm90", "sm_90a"), machine_code("pipeline_sm90", "sm_90a")
    assert not COMPLAINT.search(result.log), result.log
    for opcode in ("HGMMA", "UTMALDG.2D.MULTICAST", "UTMASTG.2D", "UBLKCP", "USETMAXREG", "SYNCS.ARRIVE", "SYNCS.PHASECHK", "STSM"):
        assert code.count(opcode) > 0, opcode
    shapes = {found[0] for line in text_of(code) if (found := re.search(r"HGMMA\.64x\d+x16", line))}
    assert shapes == {"HGMMA.64x128x16", "HGMMA.64x64x16"}
    assert not code.has_local_memory
    # One wait for each group of wgmma: any other was put in by ptxas, which then serialised them.
    assert code.count("WARPGROUP.DEPBAR") == 3
    # Draining global memory is for the release of the flag and the two cluster barriers.
    assert code.count("MEMBAR.ALL.GPU") <= 3


@needs_sass
def test_a_portable_pipeline_uses_the_machine_and_no_local_memory() -> None:
    result, code = compiled("pipeline_sm80", "sm_80"), machine_code("pipeline_sm80", "sm_80")
    assert not COMPLAINT.search(result.log), result.log
    for opcode in ("HMMA.16816.F32.BF16", "LDSM.16.M88.4", "LDGSTS.E.BYPASS.128", "ARRIVES.LDGSTSBAR"):
        assert code.count(opcode) > 0, opcode
    assert not code.has_local_memory


@needs_nvrtc
def test_a_kernel_of_three_wgmma_shapes_compiles_within_a_second() -> None:
    source = (KERNELS / "pipeline_sm90.cu").read_text(encoding="utf-8")
    nvrtc.compile(source, "sm_90a")  # the first call in a process loads the compiler
    start = time.process_time()
    nvrtc.compile(source, "sm_90a")
    assert time.process_time() - start < 1.0
