"""Matrix descriptors of shared memory: the address of every element against the canonical layouts of the PTX ISA.

``addresses`` is a model of its own, written from the manual, "PTX ISA, Asynchronous Warpgroup Level Matrix Instructions": Shared
Memory Matrix Layout (strides, canonical layouts), Matrix Descriptor Format, and the swizzle of 16-byte units. CUTLASS says the same
in include/cute/atom/mma_traits_sm90_gmma.hpp, "Canonical layouts". It knows nothing of the emulator's decoding. Against it stand:
the images of weights (``reference/packed.py``, which those of the packing kernel equal), what ``Panel::put`` leaves in shared
memory, every descriptor that the products of ``matmul.h`` and ``gradient.h`` give to wgmma, and the emulator's decoding. Planted
errors must be found by the same comparison.
"""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.targets.cuda import compile, hostcc, pack, runtime
from kitsune_jax.targets.cuda.tiles import WeightShape, block, is_half, padded
from reference import packed as packed_arrays
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]
_cuda = pytest.importorskip("kitsune_jax._cuda", reason="the extension is not built: pip install -e .")
pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.usefixtures("kernel_cache"),
]
ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "cuda" / "tests" / "descriptors"
RECORDS = 512
FIRST = 1024  # of the codes of weights: the bits of a number that is not subnormal, which XLA's CPU would flush
TYPES = {"bfloat16": ("Bf16", "Bf16"), "float16": ("F16", "F16"), "float32": ("Tf32", "float")}
ROW_UNITS = {0: 1, 3: 2, 2: 4, 1: 8}  # 16-byte units of a row of the layout, by the swizzle mode of bits 62 and 63


# -- the manual


def addresses(descriptor: int, rows: int, depth: int, itemsize: int, mn_major: bool) -> np.ndarray:
    """Shared-memory addresses of elements (m or n, k), as [rows, depth].

    T is the elements of 16 bytes, u the units of a row. K-major: ((8, m), (T, 2)) with strides ((u T, SBO), (1, T)), and without a
    swizzle ((T, SBO), (1, LBO)). MN-major: ((T, u, m), (8, k)) with strides ((1, T, LBO), (u T, SBO)), without a swizzle
    ((1, SBO), (T, LBO)) with u = 1.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    units = ROW_UNITS[descriptor >> 62]
    assert descriptor >> 49 & 7 == 0, "patterns begin at multiples of their size here"
    lanes = 16 // itemsize
    r, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if mn_major:
        near, far = (leading, stride) if units > 1 else (stride, leading)
        at = r % lanes * itemsize + r // lanes % units * 16 + r // (lanes * units) * near + k % 8 * units * 16 + k // 8 * far
    else:
        across = 16 if units > 1 else leading
        at = r % 8 * units * 16 + r // 8 * stride + k % lanes * itemsize + k // lanes * across
    at = start + at
    return at ^ (at >> 7 & (units - 1)) << 4  # Swizzle<log2 u, 4, 3>: bits from 7 on are added to those from 4 on


def encoded(address: int, leading: int, stride: int, mode: int = 1) -> int:
    return (address & 0x3FFFF) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


# -- running


def compiled(kind: str, plant: str = "", **case: Any) -> Any:
    names = {"LANES": 1, "K0": 0, "K1": 0, "TYPE": "Bf16", "ELEMENT": "Bf16", **case}
    lines = ["#include <cstring>", "#include <type_traits>", f"#define KERNEL_{kind.upper()}"]
    lines += [f"#define CASE_{name} {value}" for name, value in names.items()]
    if plant:
        lines += ["#define PLANTED", f"#define PLANT_{plant}"]
    recorded, kernels = ((FOLDER / name).read_text() for name in ("recorded.h", "kernels.cc"))
    source = "\n".join([*lines, kernels.replace('#include "recorded.h"', recorded.replace("#pragma once", ""))])
    runtime.use_emulator(compile.emulator_library())
    words = [runtime.LAUNCH_VERSION, 900, 1, 128 * names["LANES"], 1, -(-names["BYTES"] // 1024) * 1024, 0, 0, 1, 3, 0]
    kernel = _cuda.Kernel(compile.emulated(source, 900), np.array(words, np.int64), kind, emulated=True)
    kernel.load()
    return kernel


def launched(kernel: Any, given: np.ndarray, lanes: int, out_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Records of each warpgroup, [lane][record], of which the first is where the shared memory begins; and what is in ``out``."""
    given = np.ascontiguousarray(given).reshape(-1).view(np.uint8)
    records, out, workspace = np.zeros((lanes, RECORDS), np.uint64), np.zeros(max(out_bytes, 16), np.uint8), np.zeros(16, np.uint8)
    kernel.launch([(a.ctypes.data, a.nbytes) for a in (given, records, out, workspace)])
    return records, out


def elements(memory: np.ndarray, at: np.ndarray, start: int, itemsize: int) -> np.ndarray:
    """The elements at addresses ``at`` of shared memory that begins at ``start``; -1 outside of it."""
    values = memory.view(np.uint16 if itemsize == 2 else np.uint32)
    index = (at - start) // itemsize
    inside = (index >= 0) & (index < values.size) & ((at - start) % itemsize == 0)
    return np.where(inside, values[np.where(inside, index, 0)].astype(np.int64), -1)


# -- weights


def codes(k: int, n: int, dtype: str) -> Any:
    """A weight whose elements' bits say where they stand: FIRST + row * n + column. Zero is padding."""
    bits = FIRST + np.arange(k * n).reshape(k, n)
    assert bits.max() < 0x7C00, "numbers of every type"
    if is_half(dtype):
        return jnp.asarray(bits.astype(np.uint16).view(jnp.dtype(dtype)))
    return jnp.asarray((bits << 13).astype(np.uint32).view(np.float32))  # the bits of tf32, to which weights are rounded


def code_of(elements: np.ndarray, dtype: str) -> np.ndarray:
    return elements if is_half(dtype) else elements >> 13


def logical(position: int | np.ndarray, width: int) -> Any:
    """The tile's column at the tensor core's ``position``: of a block of B, 8 j + 2 q + e is (B / 4) q + 2 j + e (layout.h)."""
    b = block(width)
    within = position % b
    return position // b * b + within % 8 // 2 * (b // 4) + within // 8 * 2 + within % 2


def columns_of_k(pieces: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """For each instruction the rows of the weight that its k = 0, 1, ... are; -1 is padding.

    An instruction of 16-bit types takes two groups of eight columns of a block, one of tf32 takes one: its k = q and q + 4 are the
    columns e = 0 and 1 of thread q (PTX ISA, register fragments of A).
    """
    found, start = [], 0
    for piece in pieces:
        width = padded(piece)
        for b in range(width // block(width)):
            groups = block(width) // 8
            for j in range(0, groups, 2 if is_half(dtype) else 1):
                if is_half(dtype):
                    k = np.arange(16)
                    position = np.where(j + k // 8 < groups, b * block(width) + 8 * j + k, -1)
                else:
                    k = np.arange(8)
                    position = b * block(width) + 8 * j + 2 * (k % 4) + k // 4
                row = np.where(position >= 0, logical(position, width), piece)
                found.append(np.where(row < piece, start + row, -1))
        start += piece
    return found


def packed(weight: Any, recipe: pack.WeightRecipe, chunk: int) -> Any:
    """The image of ``weight``."""
    return packed_arrays.weights([(recipe, chunk)], lambda _: np.asarray(weight))


def wrong_weights(pieces: tuple[int, ...], n: int, dtype: str, plant: str = "") -> list[str]:
    """What is wrong in the product of a tile of ``pieces`` columns with n of weights: elements that a descriptor does not find."""
    shape = WeightShape(pieces, n, dtype)
    itemsize, depth = (2, 16) if is_half(dtype) else (4, 8)
    k = sum(pieces)
    recipe = pack.WeightRecipe(0, (0, 1), 1, shape)
    weight = codes(k, n, dtype)
    wrong, first = [], 0
    for chunk, columns in enumerate(shape.chunks):
        image = np.asarray(packed(weight, recipe, chunk)).view(np.uint8)
        type_, element = TYPES[dtype]
        widths = {f"K{i}": padded(p) for i, p in enumerate(pieces)}
        kernel = compiled("weights", plant, TYPE=type_, ELEMENT=element, N=columns, BYTES=image.size, **widths)
        records, _ = launched(kernel, image, 1, 0)
        start, descriptors = int(records[0, 0]), [int(d) for d in records[0, 1:] if d]
        rows = columns_of_k(pieces, dtype)
        if len(descriptors) != len(rows):
            wrong.append(f"{len(descriptors)} instructions, not {len(rows)}")
        position = first + np.arange(columns)
        column = logical(position, shape.slab)[:, None]
        for s, (d, row) in enumerate(zip(descriptors, rows)):
            got = code_of(elements(image, addresses(d, columns, depth, itemsize, False), start, itemsize), dtype)
            want = np.where((row[None] >= 0) & (column < n), FIRST + row[None] * n + column, 0)
            if (got != want).any():
                wrong.append(f"chunk {chunk}, instruction {s}: {(got != want).sum()} of {got.size} elements")
        first += columns
    return wrong


WIDTHS = (8, 16, 32, 64, 96, 128, 152)
WEIGHTS = [
    *(((k,), n) for k, n in zip(WIDTHS, (128, 96, 64, 32, 16, 8, 192))),
    *(((k,), n) for k, n in ((27, 128), (5, 8), (12, 13), (64, 100), (32, 16), (128, 128))),
    *((pieces, 40) for pieces in ((27, 40), (8, 3), (16, 64), (40, 12))),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("pieces", "n"), WEIGHTS, ids=str)
def test_descriptors_of_weights_find_every_element_where_it_was_packed(pieces: tuple[int, ...], n: int, dtype: str) -> None:
    assert wrong_weights(pieces, n, dtype) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("plant", ["STRIDE", "STEP", "NO_SWIZZLE"])
def test_a_wrong_descriptor_of_weights_is_found(plant: str, dtype: str) -> None:
    assert wrong_weights((64,), 32, dtype, plant) != []


def test_weights_that_are_packed_without_the_swizzle_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_arrays, "_swizzle", lambda x: x)
    assert wrong_weights((64,), 32, "bfloat16") != []


# -- panels


# The row of the tile that a row of a panel holds: bits 0 and 2 change places, so that stores have no bank conflicts.
TILE_ROWS = np.array([row & ~5 | (row & 1) << 2 | (row & 4) >> 2 for row in range(64)])


def wrong_panels(x: int, y: int, n: int, lanes: int, dtype: str, plant: str = "") -> list[str]:
    """What is wrong in X^T Y of panels of ``x`` and ``y`` columns."""
    blocks = [-(-w // 64) for w in (x, y)]
    stride = 8192 * sum(blocks)
    kernel = compiled("panels", plant, TYPE=TYPES[dtype][0], LANES=lanes, K0=x, K1=y, N=n, BYTES=lanes * stride)
    records, memory = launched(kernel, np.zeros(16, np.uint8), lanes, lanes * stride)
    each, wrong = -(-blocks[0] // lanes), []
    for group in range(lanes):
        start, given = int(records[group, 0]), [int(d) for d in records[group, 1:] if d]
        order = [(lane, m, step) for lane in range(lanes) for m in range(each) for step in range(4)]
        if len(given) != 2 * len(order):
            wrong.append(f"{len(given)} descriptors, not {2 * len(order)}")
        for (lane, m, step), a, b in zip(order, given[::2], given[1::2]):
            row = lane * 64 + TILE_ROWS[step * 16 : step * 16 + 16][None]
            first = min(group * each + m, blocks[0] - 1) * 64
            for name, d, rows, column, width in (
                ("X", a, 64, first + np.arange(64)[:, None], x),
                ("Y", b, n, np.arange(n)[:, None], y),
            ):
                got = elements(memory, addresses(d, rows, 16, 2, True), start, 2)
                want = np.where(column < width, 1 + row * width + column, 0)
                if (got != want).any():
                    wrong.append(
                        f"warpgroup {group}, {name} of lane {lane}, block {m}, step {step}: {(got != want).sum()} elements"
                    )
    return wrong


PANELS = [
    *((w, 64, 64, 1) for w in (8, 16, 32, 64, 96, 256)),
    *((64, w, n, 1) for w, n in ((8, 64), (16, 64), (96, 128), (160, 192), (256, 256))),
    *((x, y, n, lanes) for lanes in (2, 3) for x, y, n in ((128, 32, 64), (192, 128, 128), (96, 256, 256), (64, 8, 64))),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("x", "y", "n", "lanes"), PANELS)
def test_descriptors_of_panels_find_every_element_where_it_was_put(x: int, y: int, n: int, lanes: int, dtype: str) -> None:
    assert wrong_panels(x, y, n, lanes, dtype) == []


@pytest.mark.parametrize("plant", ["STRIDE", "SWAPPED", "NO_SWIZZLE"])
def test_a_wrong_descriptor_of_panels_is_found(plant: str) -> None:
    assert wrong_panels(128, 128, 128, 2, "bfloat16", plant) != []


# -- the functions that make descriptors, and the emulator that reads them


@functools.cache
def header() -> list[list[int]]:
    """(address, LBO, SBO, descriptor) as ``kitsune/arch/wgmma.h`` makes them: the header itself, its assembly left out."""
    program = pathlib.Path(compile.emulator_library()).parent / "descriptor_header"
    search = f"-I{ROOT / 'cuda' / 'include'}"
    subprocess.run([hostcc.find().path, "-std=c++17", "-w", search, str(FOLDER / "header.cc"), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def test_the_devices_header_encodes_as_the_manual_says() -> None:
    made = header()
    assert len(made) == 227 * 7
    for address, leading, stride, descriptor in made:
        assert descriptor == encoded(address, leading, stride), f"address {address}, LBO {leading}, SBO {stride}"


def test_the_emulators_header_encodes_as_the_devices_does() -> None:
    """What the kernels of this file record is made by the emulator's copies of these two functions."""
    text = (ROOT / "cuda" / "emulator" / "include" / "emulator" / "arch.h").read_text()
    body = re.search(r"inline u64 desc_mn128\(.*?\n}\ninline u64 desc_k128\(const void\* p\) \{ return (.*?); }", text, re.DOTALL)
    assert body and body[1] == "desc_mn128(p, 16, 1024)"
    records, _ = launched(compiled("panels", TYPE="Bf16", K0=64, K1=64, N=64, BYTES=16384), np.zeros(16, np.uint8), 1, 16384)
    start = int(records[0, 0])
    assert [int(d) for d in records[0, 1:3]] == [encoded(start, 8192, 1024), encoded(start + 8192, 8192, 1024)]


PRODUCTS = [  # (type, N, A, B): (MN-major, first byte, LBO, SBO)
    ("bfloat16", 128, (False, 0, 16, 1024), (False, 8192, 16, 1024)),
    ("bfloat16", 64, (False, 32, 16, 1024), (False, 8192 + 96, 16, 2048)),
    ("float16", 64, (False, 64, 16, 2048), (False, 16384, 8192, 1024)),  # swizzled K-major layouts do not use the LBO
    ("float32", 64, (False, 96, 16, 1024), (False, 8192 + 32, 16, 1024)),
    ("bfloat16", 128, (True, 0, 8192, 1024), (True, 8192, 8192, 1024)),
    ("bfloat16", 128, (True, 2048, 8192, 1024), (True, 8192 + 6144, 8192, 1024)),
    ("float16", 192, (False, 0, 16, 1024), (True, 8192, 2048, 1024)),
    ("bfloat16", 128, (True, 0, 16, 4096), (True, 8192, 1024, 2048)),
]


@pytest.mark.parametrize(("dtype", "n", "a", "b"), PRODUCTS)
def test_the_emulator_reads_operands_where_the_manual_says(dtype: str, n: int, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    itemsize, depth = (2, 16) if is_half(dtype) else (4, 8)
    memory = np.random.default_rng(0).integers(-3, 4, 49152 // itemsize).astype(jnp.dtype(dtype))
    given = {name: f"{encoded(first, lbo, sbo)}ull" for name, (_, first, lbo, sbo) in (("A", a), ("B", b))}
    trans = {f"TRANS_{name}": str(bool(mn)).lower() for name, (mn, *_) in (("A", a), ("B", b))}
    kernel = compiled("products", TYPE=TYPES[dtype][0], N=n, BYTES=49152, **given, **trans)
    records, out = launched(kernel, memory, 1, 64 * n * 4)
    start = int(records[0, 0])
    values = memory.astype(np.float64)

    def operand(which: tuple[int, ...], rows: int, descriptor: int) -> np.ndarray:
        at = addresses(descriptor, rows, depth, itemsize, bool(which[0])) - start
        assert at.min() >= 0 and at.max() < memory.nbytes
        return values[at // itemsize]

    want = operand(a, 64, int(records[0, 1])) @ operand(b, n, int(records[0, 2])).T
    np.testing.assert_array_equal(out.view(np.float32).reshape(64, n), want)
