"""The machine code of calls of several phases: the grid's barrier is in it, no load goes through the cache that is not coherent,
roles use the registers that they have, nothing lives in local memory, nobody touches the registers of a product in flight.

Nothing runs here.
"""

from __future__ import annotations

import functools

import pytest

from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kernel_checks.register_pool import register_pool
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import nvrtc
from kitsune_jax.targets.cuda.lower import Kernel
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import by_hand, generate_call_kernel, kernel_cache, tiled
from tests.support.phases import clipped, message_passing
from tests.support.programs import Case

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler"),
    pytest.mark.usefixtures("kernel_cache"),
]

CASES = {
    "a graph network's step": lambda: message_passing(200_000, 20_000, 128, "bfloat16"),
    "a graph network's step in float32": lambda: message_passing(200_000, 20_000, 64, "float32"),
    "clipping by a norm": lambda: clipped(4096, 256, "float32"),
}


@functools.cache
def kernel_of(name: str, sm: int, lanes: int) -> Kernel:
    case: Case = CASES[name]()
    call = tiled(case.program)
    return generate_call_kernel(call, tuple(by_hand(part.program, sm, lanes, 132) for part in call.parts), "region")


FAST = {("a graph network's step", 2), ("clipping by a norm", 3)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    ("name", "lanes"),
    [pytest.param(name, lanes, marks=[] if (name, lanes) in FAST else pytest.mark.slow) for name in CASES for lanes in (1, 2, 3)],
)
def test_a_call_of_several_phases(name: str, lanes: int, compiler: str) -> None:
    made = kernel_of(name, 900, lanes)
    compiled = compilers.cubin(made.source, "sm_90a", folder_of(compiler))
    code, resources = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
    assert not code.has_local_memory and resources.spill_bytes == resources.stack_bytes == 0
    assert "warning" not in compiled.log and "(C7" not in compiled.log
    assert code.count("LDG") and not any(".CONSTANT" in i.opcode for i in code.instructions if i.opcode.startswith("LDG"))
    assert code.count("CCTL.IVALL") >= 1, "no acquire empties the L1"
    assert any(i.opcode.startswith(("RED", "ATOM")) for i in code.instructions), "no CTA arrives"
    assert any("FENCE.VIEW.ASYNC" in i.opcode for i in code.instructions)
    paths = flow(code.instructions)
    products, skips = in_flight(paths), skipped(paths) if code.count("CALL") == 0 else ()
    assert not skips and not products.hazards and not products.serialised and products.empty == 0
    if lanes > 1:
        pool = register_pool(code, made.launch[3])
        assert pool.fits and all(role.used <= role.registers for role in pool.roles), pool


@pytest.mark.parametrize("name", CASES)
def test_the_portable_path(name: str) -> None:
    made = kernel_of(name, 800, 1)
    compiled = compilers.cubin(made.source, "sm_80")
    code = sass.disassemble(compiled.cubin, "kitsune_region")
    assert not code.has_local_memory
    assert not any(".CONSTANT" in i.opcode for i in code.instructions if i.opcode.startswith("LDG"))
