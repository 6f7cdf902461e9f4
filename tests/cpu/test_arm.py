"""The CPU kernels for AArch64: cross-compiled, run in an emulated CPU, and what their inner loops are made of.

Emulation shows values, the choice of a kernel table and instruction counts; nothing here is a statement about speed. The tools are
Debian's packages g++-aarch64-linux-gnu and qemu-user; `make cpu-test-arm` runs the same C++ tests without pytest.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"make": "make", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder of the cross-compiled tests, made by one process at a time."""
    missing = [package for tool, package in PACKAGES.items() if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs the Debian packages {' '.join(missing)}")
    with (ROOT / "cpu" / "tests" / "cpu.mk").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(["make", "-j2", "cpu-arm"], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return ROOT / "build" / "cpu" / "aarch64"


def emulate(cpu: str, program: Path, *args: str) -> str:
    done = subprocess.run(["qemu-aarch64", "-cpu", cpu, program, *args], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("isa", ["neonbf16", "neon", "generic"])
def test_kernels_in_an_emulated_cpu(built: Path, isa: str) -> None:
    assert re.search(r"\b\d{4,} passed, 0 failed", emulate("max", built / "test_kernels", isa))


@pytest.mark.parametrize("isa", ["neonbf16", "neon", "generic"])
def test_executor_in_an_emulated_cpu(built: Path, isa: str) -> None:
    assert f"executor ({isa}): 0 checks failed" in emulate("max", built / "test_executor", isa)


@pytest.mark.parametrize("name", ["memory", "tiles", "validator"])
def test_the_rest_of_the_library_in_an_emulated_cpu(built: Path, name: str) -> None:
    assert f"{name}: 0 checks failed" in emulate("max", built / f"test_{name}")


def test_bf16_instructions_are_chosen_where_the_cpu_has_them(built: Path) -> None:
    assert emulate("max", built / "test_kernels", "--tables").split() == ["neonbf16", "neon", "generic"]
    assert emulate("cortex-a72", built / "test_kernels", "--tables").split() == ["neon", "generic"]
    assert "executor (neon): 0 checks failed" in emulate("cortex-a72", built / "test_executor")


def instructions(object_file: Path, function: str) -> list[tuple[int, str, str]]:
    """(address, name, operands) of the instructions of the one function whose demangled name starts so."""
    dump = ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", str(object_file)]
    text = subprocess.run(dump, capture_output=True, text=True, timeout=120, check=True).stdout
    (body,) = [part for part in re.split(r"\n\n", text) if f"::{function}(" in part.partition(">:\n")[0]]
    lines = re.findall(r"^ *([0-9a-f]+):\t(\S+)[ \t]*(.*)$", body, re.MULTILINE)
    return [(int(address, 16), name, operands) for address, name, operands in lines]


def busiest_loop(code: list[tuple[int, str, str]], product: str) -> list[tuple[int, str, str]]:
    """The instructions between a branch backwards and its target, of that which has most products."""
    loops = []
    for address, name, operands in code:
        target = re.search(r"\b([0-9a-f]+) <", operands)
        if name.startswith(("b.", "cb", "tb")) and target and int(target[1], 16) < address:
            loops.append([i for i in code if int(target[1], 16) <= i[0] <= address])
    return max(loops, key=lambda loop: sum(name == product for _, name, _ in loop))


@pytest.mark.parametrize(
    ("isa", "function", "step", "product", "products", "loads"),
    [
        ("neon", "multiply_block", "F32Step", "fmla", 48, 14),
        ("neon", "multiply_block", "F64Step", "fmla", 48, 14),
        ("neon", "outer_block", "F32Step", "fmla", 24, 4),
        ("neon", "outer_block", "F64Step", "fmla", 24, 7),
        ("neonbf16", "multiply_block", "BF16Step", "bfmmla", 24, 16),
        ("neonbf16", "outer_block", "BF16Step", "bfmmla", 24, 8),
    ],
)
def test_the_sums_of_a_block_stay_in_registers(
    built: Path, isa: str, function: str, step: str, product: str, products: int, loads: int
) -> None:
    space = f"kitsune::cpu::{isa}::"
    code = instructions(built / f"isa_{isa}.o", f"{function}<{space}{step}, 12, 2>")
    loop = busiest_loop(code, product)
    assert sum(name == product for _, name, _ in loop) == products
    assert sum(name.startswith("ld") for _, name, _ in loop) <= loads
    assert not [i for i in loop if "[sp" in i[2]]
    assert not [i for i in loop if i[1].startswith("st")]
