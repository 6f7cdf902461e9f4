"""The registers that a kernel's warpgroups hand around are those that its launch has; otherwise it would hang on a GPU.

Read from the machine code that both tested compilers make. The emulator's side of it is in ``test_emulator.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kernel_checks import sass
from kernel_checks.register_pool import RegisterPool, register_pool
from kernel_checks.sass import Instruction, Sass
from kitsune_jax.errors import InvalidProgram
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import Arrangements, Subject, arrangements, kernel_cache, subject  # noqa: F401  (a fixture)
from tests.support.cuda_training_cases import COMPILED, TRAINING

pytestmark = pytest.mark.usefixtures("kernel_cache")
needs_compilers = pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")

ROWS = 2000
NETWORKS = {**FAMILIES, **TRAINING, **COMPILED}
# What pipeline.h asks for, by lanes: the loader's registers, a consumer's, and what the launch must have for them.
ROLES = {2: (24, 240, 168), 3: (32, 160, 128)}


@functools.cache
def of_family(name: str, dtype: str) -> Subject:
    return subject(NETWORKS[name].function, *NETWORKS[name].shapes(ROWS, dtype))


@functools.cache
def found(name: str, dtype: str) -> Arrangements:
    return arrangements(of_family(name, dtype))


def pool_of(name: str, dtype: str, arrangement: str, compiler: str) -> RegisterPool:
    of, plan = of_family(name, dtype), found(name, dtype)[arrangement]
    program = of.program(plan)
    made = lower.generate_kernel(program, arrangement_of(plan, program), "region")
    cubin = compilers.cubin(made.source, "sm_90a", folder_of(compiler)).cubin
    return register_pool(sass.disassemble(cubin, "kitsune_region"), made.launch[3])


def check(pool: RegisterPool, lanes: int) -> None:
    assert pool.warpgroups == 1 + lanes
    loader, consumer, launch = ROLES[lanes]
    assert pool.launch == launch
    assert {(r.gives, r.registers) for r in pool.roles} == {(True, loader), (False, consumer)}
    assert all(r.used <= r.registers for r in pool.roles), pool
    assert pool.fits, pool


@pytest.mark.sampled(4)
@needs_compilers
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "name, dtype, arrangement",
    [
        ("loss", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("loss", "float32", "sm90-vertical-resident-lanes3"),
        ("mlp", "bfloat16", "sm90-vertical-streamed-cluster2-lanes2"),
        ("swiglu-small", "bfloat16", "sm90-spatial-l2-lanes2"),
        ("edge-update-small", "bfloat16", "sm90-spatial-cluster-lanes2"),
        ("tanh-step", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("tanh-step", "bfloat16", "sm90-spatial-l2-lanes3"),
    ],
)
def test_roles_ask_for_the_registers_of_the_launch_and_use_no_more(name: str, dtype: str, arrangement: str, compiler: str) -> None:
    check(pool_of(name, dtype, arrangement, compiler), int(arrangement[-1]))


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name, dtype", [(name, dtype) for name in NETWORKS for dtype in NETWORKS[name].dtypes])
def test_every_family(name: str, dtype: str, compiler: str, subtests: Any) -> None:
    for arrangement in found(name, dtype):
        if arrangement.startswith("sm90"):
            with subtests.test(arrangement=arrangement):
                lanes = int(arrangement.partition("lanes")[2][0])
                pool = pool_of(name, dtype, arrangement, compiler)
                if lanes == 1:
                    assert not pool.roles and pool.launch <= 255
                else:
                    check(pool, lanes)


@needs_compilers
def test_a_kernel_whose_launch_has_too_few_registers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later compiler may do: launch with what the code needs, and not with the even share of an SM."""
    plan = found("loss", "bfloat16")["sm90-vertical-resident-lanes2"]
    program = of_family("loss", "bfloat16").program(plan)
    monkeypatch.setattr(runtime, "arch", lambda: "sm_90a")
    lower.generate("cuda", Program.of(program), [plan], "region")
    real = compilers.cubin

    def fewer(source: str, arch: str) -> compilers.Compiled:
        made = real(source, arch)
        return compilers.Compiled(made.cubin, made.log.replace("Used 168 registers", "Used 160 registers"))

    monkeypatch.setattr(compilers, "cubin", fewer)
    with pytest.raises(InvalidProgram, match="160 registers a thread.*168"):
        lower.generate("cuda", Program.of(program), [plan], "region")


# --- the reader itself, on code written by hand


def code(registers: int, *lines: str) -> Sass:
    split = [line.split(maxsplit=2) if line.startswith("@") else ["", *line.split(maxsplit=1)] for line in lines]
    instructions = [Instruction(16 * i, p.removeprefix("@"), op, rest[0] if rest else "") for i, (p, op, *rest) in enumerate(split)]
    return Sass("kernel", tuple(instructions), registers, 0, 0)


def two_lanes(loader: int, consumer: int, *, launch: int = 168, in_loader: str = "NOP", in_consumer: str = "NOP") -> RegisterPool:
    kernel = code(
        launch,
        "@!P0 BRA 0x60",
        f"USETMAXREG.TRY_ALLOC.CTAPOOL UP0, {consumer:#x}",
        "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
        "@!P0 BRA 0x10",
        in_consumer,
        "EXIT",
        f"USETMAXREG.DEALLOC.CTAPOOL {loader:#x}",
        in_loader,
        "EXIT",
    )
    return register_pool(kernel, 384)


def test_the_reader_adds_up_what_roles_ask_for() -> None:
    pool = two_lanes(32, 240)
    assert (pool.available, pool.asked, pool.fits) == (504, 512, False)
    assert two_lanes(24, 240).fits
    assert not two_lanes(24, 240, launch=160).fits


@pytest.mark.parametrize(
    "instruction, used",
    [
        ("IADD3 R23, R1, R2, RZ", 24),
        ("LDG.E.128.CONSTANT R20, desc[UR4][R2.64]", 24),
        ("STG.E.64 desc[UR4][R22.64], R20", 24),
        ("STS.128 [R23+UR4], R12", 24),
        ("IMAD.WIDE.U32 R22, R23, R1, R4", 24),
        ("HMMA.16816.F32.BF16 R20, R4, R22, R8", 24),
        ("HGMMA.64x32x16.F32.BF16 R8, R4, gdesc[UR8], R8, gsb0", 24),
    ],
)
def test_the_reader_knows_how_many_registers_an_operand_takes(instruction: str, used: int) -> None:
    pool = two_lanes(24, 240, in_loader=instruction)
    loader = next(r for r in pool.roles if r.gives)
    assert loader.used == used and pool.fits


def test_a_role_whose_code_names_a_register_too_many_does_not_fit() -> None:
    assert not two_lanes(24, 240, in_loader="IADD3 R24, R1, R2, RZ").fits
    assert not two_lanes(24, 240, in_consumer="IADD3 R1, R2, R240, RZ").fits


def test_each_role_is_judged_by_the_code_that_it_runs() -> None:
    pool = two_lanes(24, 240, in_consumer="IADD3 R239, R1, R2, RZ")
    assert {r.gives: r.used for r in pool.roles} == {True: 0, False: 240} and pool.fits


def test_a_kernel_that_hands_nothing_over_always_fits() -> None:
    pool = register_pool(code(250, "IADD3 R249, R1, R2, RZ", "EXIT"), 256)
    assert pool.roles == () and pool.fits
