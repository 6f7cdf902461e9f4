"""Buffers that do not start at a multiple of 16 bytes: every operand and every result of a call may, and the answer is the same.

Kernels load and store 16 bytes at a time and fetch weights by bulk copies, so what is not aligned is copied at the launch. The
emulator runs such kernels and refuses a vector access that is not aligned; the driver that pretends shows where memory comes from.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import textwrap
from typing import Any

import numpy as np
import pytest

from kitsune_jax import _compat
from kitsune_jax.frontend.route import PlannedRegion
from kitsune_jax.planning.plan import Phase
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import hostcc, runtime
from kitsune_jax.targets.cuda import lower as cuda_lower
from reference import standalone
from tests.cuda.test_launch import _cuda, fake_driver, needs_compiler, run
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_run import arrangements, kernel_cache, subject
from tests.support.cuda_training_cases import TRAINING

__all__ = ["fake_driver", "kernel_cache"]
OFFSETS = (2, 4, 8)
CASES = [
    ("mlp", "bfloat16", "sm90-vertical-resident-lanes1"),
    ("mlp", "float16", "sm90-vertical-streamed-cluster2-lanes1"),
    ("mlp", "float32", "sm80-vertical-resident-lanes1"),
    ("nerf-small", "bfloat16", "sm90-spatial-cluster-lanes1"),
    ("tanh-step", "bfloat16", "sm90-spatial-l2-lanes2"),
    ("tanh-step", "bfloat16", "sm80-vertical-resident-lanes1"),
]


@functools.lru_cache(maxsize=8)
def recorded(name: str, dtype: str, arrangement: str) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """A kernel, the operands of its custom call (inputs, weights, the table by which they are packed), and what the call gave."""
    family = (FAMILIES | TRAINING)[name]
    of = subject(family.function, *family.arguments(130, dtype))
    plan = arrangements(of)[arrangement]
    program = Program.of(of.program(plan))
    code = cuda_lower.generate("emulator", program, [plan], "region")
    calls: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
    plain = _compat.named_ffi_call

    def recording(*target: Any, **options: Any) -> Any:
        def call(*operands: Any, **attributes: Any) -> Any:
            results = plain(*target, **options)(*operands, **attributes)
            calls.append(([np.asarray(x) for x in operands], [np.asarray(x) for x in results]))
            return results

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compat, "named_ffi_call", recording)
        standalone.run(
            of.captured, [PlannedRegion("region", of.region, (Phase(0, of.region, plan),), program, "emulator", code)], of.args
        )
    ((operands, results),) = calls
    return code, operands, results


def memory(array: np.ndarray, offset: int) -> np.ndarray:
    """The bytes of ``array``, at ``offset`` bytes behind a multiple of 256, between bytes that nobody may change."""
    room = np.full(array.nbytes + 1024, 0xA5, np.uint8)
    start = -room.ctypes.data % 256 + 256 + offset
    room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return room[start : start + array.nbytes]


def launched(kernel: Any, operands: list[np.ndarray], results: list[np.ndarray], offsets: list[int]) -> list[np.ndarray]:
    """The bytes of the results (the workspace apart) where buffer i lies ``offsets[i]`` bytes behind an aligned address."""
    blank = [np.full(r.nbytes, 0xFF, np.uint8) for r in results]
    buffers = [memory(array, offset) for array, offset in zip([*operands, *blank], offsets, strict=True)]
    before = [b.tobytes() for b in buffers[: len(operands)]]
    kernel.launch([(b.ctypes.data, b.nbytes) for b in buffers])
    assert [b.tobytes() for b in buffers[: len(operands)]] == before, "an operand has changed"
    for b in buffers:
        room = b.base
        assert room is not None
        first = b.ctypes.data - room.ctypes.data
        assert (room[:first] == 0xA5).all() and (room[first + b.nbytes :] == 0xA5).all(), "written beside a buffer"
    return buffers[len(operands) : -1]


@pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or "")
@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_each_operand_and_each_result_may_lie_at_any_element(case: tuple[str, str, str], every: bool) -> None:
    """All at each offset, and each alone at one of them, or at ``every`` one."""
    code, operands, results = recorded(*case)
    runtime.set_emulator_seed(1)
    kernel = _cuda.Kernel(code.image, np.asarray(code.kernel.launch, np.int64), "region", emulated=True, packer=code.packer)
    kernel.load()
    count = len(operands) + len(results)
    alone = [(i, offset) for i, offset in itertools.product(range(count), OFFSETS) if every or offset == OFFSETS[i % len(OFFSETS)]]
    single = [[offset * (k == i) for k in range(count)] for i, offset in alone]
    for offsets in [[0] * count, *single, *([offset] * count for offset in OFFSETS)]:
        got = launched(kernel, operands, results, offsets)
        for k, (g, want) in enumerate(zip(got, results)):
            assert g.tobytes() == want.tobytes(), f"result {k} differs where buffers lie at offsets {offsets}"


COPIES = """
ODD = [(a + 2 * (i + 1), n) for i, (a, n) in enumerate(buffers(5, 1000))]

def copies(given, stream=100, **changes):
    k = kernel(**changes)
    k.load(stream)
    n = len(journal())
    k.launch(given, stream)
    return journal()[n:]
"""


@needs_compiler
def test_what_is_not_aligned_is_copied_in_the_order_of_the_stream(fake_driver: pathlib.Path) -> None:
    program = COPIES + "lines = copies(ODD); print(json.dumps([lines, fake().fake_memory()]))"
    lines, left = run(program, fake_driver)
    given = [0x10000 * (i + 1) + 2 * (i + 1) for i in range(5)]
    before = []
    for i in range(5):
        before.append("allocate in order 1000 context=0")
        before += [f"copy {given[i]} to aligned 1000"] if i < 2 else []
    assert lines[:7] == before
    assert lines[7].startswith("memset ") and lines[8].startswith("launch ")
    assert int(lines[7].split()[1]) % 256 == 0, "the workspace's own copy is zeroed"
    assert int(lines[8].rpartition("first=")[2]) % 256 == 0, "the kernel gets the copy"
    assert lines[9:] == [f"copy aligned to {given[i]} 1000" for i in (2, 3)] + ["free in order"] * 5, "the workspace is nobody's"
    assert left == 0


@needs_compiler
def test_a_result_in_the_memory_of_an_operand_shares_its_copy(fake_driver: pathlib.Path) -> None:
    """The kernel finds in the result what the operand held."""
    lines = run(COPIES + "print(json.dumps(copies([*ODD[:2], ODD[1], *ODD[3:]])))", fake_driver)
    given = [0x10000 * (i + 1) + 2 * (i + 1) for i in range(5)]
    assert [line for line in lines if line.startswith(("allocate", "copy"))] == [
        *(line for i in (0, 1) for line in ("allocate in order 1000 context=0", f"copy {given[i]} to aligned 1000")),
        *["allocate in order 1000 context=0"] * 2,
        *(f"copy aligned to {given[i]} 1000" for i in (1, 3)),
    ]


@needs_compiler
def test_aligned_and_empty_buffers_are_not_copied(fake_driver: pathlib.Path) -> None:
    program = COPIES + "print(json.dumps(copies([(a + 16, n) for a, n in buffers()[:4]] + buffers()[4:])))"
    assert [line.split()[0] for line in run(program, fake_driver)] == ["memset", "launch"]
    program = COPIES + "print(json.dumps(copies([(3, 0)] + buffers()[1:])))"
    assert [line.split()[0] for line in run(program, fake_driver)] == ["memset", "launch"]


@needs_compiler
@pytest.mark.parametrize("fake", ["capturing=1", "pools=0"])
def test_a_graph_that_is_captured_keeps_the_copies_memory(fake_driver: pathlib.Path, fake: str) -> None:
    """XLA may repeat the graph as long as the executable lives. A second device has memory of its own."""
    program = COPIES + textwrap.dedent("""
    k = kernel()
    for stream in (100, 200):
        k.load(stream)
    n = len(journal())
    for stream in (100, 100, 200, 100):
        k.launch(ODD[:1] + buffers()[1:], stream)
    lines, kept = [line for line in journal()[n:] if line[:4] in ("allo", "free")], fake().fake_memory()
    del k
    print(json.dumps([lines, kept, fake().fake_memory()]))
    """)
    lines, kept, left = run(program, fake_driver, f"{fake},devices=2")
    assert lines == ["allocate 1000 context=0", "allocate 1000 context=1"]
    assert (kept, left) == (2, 0)


@needs_compiler
def test_a_copy_without_memory_is_an_error_that_leaves_nothing_behind(fake_driver: pathlib.Path) -> None:
    program = COPIES + "print(json.dumps([error(lambda: copies(ODD)), fake().fake_memory()]))"
    text, left = run(program, fake_driver, "allocate=2")
    assert text.startswith("RuntimeError: kitsune_cuda: mlp (train.py:12): cuMemAllocAsync failed: ") and left == 0
