"""The packing kernel: its images and vectors equal those of ``reference/packed.py`` bit by bit, for recipes of every kind.

The kernel is compiled once, since recipes are data, and launched as a call does: by launch words, in front of another kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_checks import counters
from kitsune_jax.ops.graph import make_params
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import ArrayType, Instr, StageProgram, TileProgram, TileType
from kitsune_jax.targets.cuda import compile, hostcc, lower, packing, runtime, sources
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe, WeightSlice
from kitsune_jax.targets.cuda.packing import CallResult, CallWorkspace, PackedImage, Pointer, Stationary, custom_call
from kitsune_jax.targets.cuda.tiles import WeightShape, in_boxes
from reference import packed
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]
_cuda = pytest.importorskip("kitsune_jax._cuda", reason="the extension is not built: pip install -e .")
pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.usefixtures("kernel_cache"),
]
FLOATS = ("float32", "bfloat16", "float16")
NOTHING = """#include "kitsune/kitsune.h"
using namespace kitsune;
struct Params { u8* p[16]; };
KITSUNE_KERNEL(kitsune_region, Params, p, 32) {}
"""


def numbers(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    """Random bits, so that every element is another one, with NaN and infinities; 16-bit numbers that are not subnormal."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype not in FLOATS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    x = rng.normal(size=shape).astype(np.float32)
    x.reshape(-1)[:: max(1, x.size // 7)] = np.inf
    x.reshape(-1)[1 :: max(2, x.size // 5)] = np.nan
    return x.astype(np_dtype(dtype))


def program_of(arrays: Sequence[np.ndarray], more: Sequence[Instr] = (), values: Sequence[TileType] = ()) -> TileProgram:
    """A program whose value k is array k; then come the values of ``more``."""
    inputs = tuple(ArrayType(a.shape, a.dtype.name, False) for a in arrays)
    loads = [Instr("load", (), (k,), make_params(array=k)) for k in range(len(arrays))]
    types = (*(TileType(False, a.shape, a.dtype) for a in inputs), *values)
    return TileProgram((1,), 64, inputs, (), types, (), (StageProgram("all", (*loads, *more)),), (), ())


@functools.cache
def main_kernel() -> bytes:
    runtime.use_emulator(compile.emulator_library())
    return compile.emulated(NOTHING, 900)


def launched(
    part: Stationary,
    arrays: Sequence[np.ndarray],
    made: Callable[[packing.MadeByXla], Any] = lambda _: None,
    packer: str = lower.PACKER,
    fills: Sequence[tuple[CallResult, int]] = (),
) -> list[np.ndarray]:
    """The bytes of each image of ``part``, then those of each filled result."""
    count = len(part.weights) + bool(part.vectors)
    sizes = [sum(r.shape.part_bytes(c) * r.count for r, c in parts) for parts in part.weights]
    sizes += [4 * sum(r.words for r in part.vectors)] if part.vectors else []
    pointers = [Pointer(f"image{k}", PackedImage(0, k), size) for k, size in zip(range(count), sizes, strict=True)]
    pointers += [Pointer("filled", result, size) for result, size in fills]
    pointers += [Pointer("out", CallResult(result.number), size) for result, size in fills]
    call = custom_call([*pointers, Pointer("workspace", CallWorkspace(), 128)], [part], (900, 1, 32, 1, 0, 0, 0), 0)
    image = compile.emulated(packer, 900)
    kernel = _cuda.Kernel(main_kernel(), np.asarray(call.launch, np.int64), "packed", emulated=True, packer=image)
    kernel.load()
    operands = list[np.ndarray]()
    for operand in call.operands:
        match operand:
            case int():
                operands.append(arrays[operand])
            case packing.MadeByXla():
                operands.append(np.asarray(packing.as_operand(operand, made(operand))))
            case packing.Recipes():
                operands.append(np.frombuffer(call.recipes, np.uint8).copy())
    results = [np.zeros(size, np.uint8) for _, size in fills] + [np.zeros(call.workspace_bytes, np.uint8)]
    kernel.launch([(a.ctypes.data, a.nbytes) for a in (*operands, *results)])
    first = 11 + call.launch[8] + call.launch[9] + 2
    places = [call.launch[first + 3 * k : first + 3 * k + 3] for k in range(count)] if count else []
    return [*(results[-1][at : at + n] for _, at, n in places), *results[:-1]]


def same(got: np.ndarray, want: Any, dtype: str) -> None:
    """NaN may have any bits: XLA's have others than the array's."""
    x, y = got.view(np_dtype(dtype)), np.asarray(want).reshape(-1)
    assert x.shape == y.shape
    unsigned = np.uint16 if x.itemsize == 2 else np.uint32
    equal = x.view(unsigned) == y.view(unsigned)
    if dtype in FLOATS:
        equal |= np.isnan(x) & np.isnan(y)
    assert equal.all(), f"{(~equal).sum()} of {equal.size} elements differ, the first is number {int(np.argmin(equal))}"


# -- weights

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 27, 31, 32, 33, 40, 64, 67, 101, 128])


@st.composite
def weights(draw: st.DrawFn) -> tuple[list[tuple[WeightRecipe, int]], np.ndarray]:
    """Parts of one image, all of one weight, and its array."""
    dtype = draw(st.sampled_from(FLOATS))
    split = draw(st.sampled_from([1, 1, 2, 4]))
    groups = draw(st.sampled_from([1, 2, 4])) if split > 1 else 1
    k, n = tuple(draw(st.lists(SIZES, min_size=1, max_size=2))), draw(SIZES)
    runs: tuple[int, ...] = ()
    if split > 1:
        n = 32 * split * groups * draw(st.integers(1, 2))
        if draw(st.booleans()):
            k = tuple(split * x for x in k)
            runs = k
    pieces = tuple(x // split for x in k) if runs else k
    shape = WeightShape(pieces, n * split if runs else n, dtype, split, draw(st.sampled_from([32, 64, 128])))
    contracted = [sum(k)]
    free = [n]
    if n % 2 == 0 and draw(st.booleans()):
        free = [2, n // 2]
    if sum(k) % 3 == 0 and draw(st.booleans()):
        contracted = [sum(k) // 3, 3]
    dims = contracted + free
    order = draw(st.permutations(range(len(dims))))  # dimension order[d] of (contracted, free) is dimension d of the block
    inverse = tuple(order.index(d) for d in range(len(dims)))
    block = [dims[d] for d in order]
    slices = None
    array = list(block)
    if split == 1 and draw(st.booleans()):
        slices, array = draw(sliced(block))
    whole = [p for p, size in enumerate(pieces) if split == 1 and in_boxes(size, dtype)]
    in_place = tuple(p for p in whole if draw(st.booleans()))
    recipe = WeightRecipe(0, inverse, len(contracted), shape, slices, groups, runs, in_place)
    chunks = [(recipe, c) for c in range(split * len(shape.chunks))]
    parts = [(recipe, -1)] if slices is None and draw(st.booleans()) else draw(st.permutations(chunks))
    return parts, numbers(array, dtype, draw(st.integers(0, 99)))


@st.composite
def sliced(draw: st.DrawFn, block: list[int]) -> tuple[WeightSlice, list[int]]:
    batches = draw(st.lists(st.integers(1, 3), max_size=2))
    array, batch_dims = list(block), list[int]()
    dim = draw(st.integers(-1, len(block) - 1))
    count = draw(st.integers(1, 3)) if dim >= 0 else 1
    step = first = 0
    size = 0
    if dim >= 0:
        size = block[dim]
        step = draw(st.sampled_from([size, max(1, size // 2)]))
        first = draw(st.integers(0, 2)) * step if count == 1 else 0
        array[dim] = first + step * (count - 1) + size
    names = [("block", d) for d in range(len(block))]
    for b, n in enumerate(batches):  # a batch dimension anywhere
        at = draw(st.integers(0, len(array)))
        array.insert(at, n)
        names.insert(at, ("batch", b))
    batch_dims = [d for d, (kind, _) in enumerate(names) if kind == "batch"]
    place = {d: k for k, (kind, d) in enumerate(names) if kind == "block"}
    axes = tuple((a, array[d]) for a, d in enumerate(batch_dims))
    loop = 0 if count > 1 else -1
    reverse = count > 1 and draw(st.booleans())
    return WeightSlice(loop, 0, place.get(dim, -1), first, step, size, count, reverse, tuple(batch_dims), axes), array


def test_the_rounding_to_tf32_is_that_of_xla() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32)
    bits[::3] &= 0xFFFFF000  # ties
    got, want = packed.nearest_tf32(bits.view(np.float32)), jax.lax.reduce_precision(bits.view(np.float32), 8, 10)
    same(got.view(np.uint8), want, "float32")


@settings(max_examples=40, deadline=None)
@given(weights())
def test_images_of_weights_are_those_of_the_recipe(case: tuple[list[tuple[WeightRecipe, int]], np.ndarray]) -> None:
    parts, array = case
    part = Stationary(program_of([array]), (tuple(parts),), (), (0,))
    (got,) = launched(part, [array])
    same(got, packed.weights(parts, lambda _: array), array.dtype.name)


# -- vectors

WORDS = ("float32", "bfloat16", "float16", "int32", "uint32", "bool", "int8", "uint8", "int16", "uint16")


@st.composite
def vectors(draw: st.DrawFn) -> tuple[list[VectorRecipe], list[np.ndarray]]:
    recipes, arrays = list[VectorRecipe](), list[np.ndarray]()
    for k in range(draw(st.integers(1, 4))):
        split = draw(st.sampled_from([1, 2]))
        groups = draw(st.sampled_from([1, 2])) if split > 1 else 1
        row = draw(st.lists(st.sampled_from([1, 2, 3, 7, 31, 45]), min_size=1, max_size=3))
        row[-1] *= split * groups
        dims = sorted(draw(st.sets(st.integers(0, len(row) - 1))))
        shape = tuple(row[d] if draw(st.booleans()) else 1 for d in dims)
        kept = draw(st.booleans())
        arrays.append(numbers(shape if kept else (math.prod(shape), 1), draw(st.sampled_from(WORDS)), k))
        width = 32 * -(-math.prod(row) // (32 * split))
        recipes.append(VectorRecipe(k, shape, tuple(dims), tuple(row), width, split, groups=groups))
    if draw(st.booleans()):
        table = tuple(range(-3, draw(st.integers(1, 40))))
        recipes.append(VectorRecipe(None, (len(table),), (0,), (len(table),), 64, table=table))
    return recipes, arrays


@settings(max_examples=30, deadline=None)
@given(vectors())
def test_vectors_are_those_of_the_recipe(case: tuple[list[VectorRecipe], list[np.ndarray]]) -> None:
    recipes, arrays = case
    (got,) = launched(Stationary(program_of(arrays), (), tuple(recipes), tuple(range(len(arrays)))), arrays)
    want = packed.vectors(recipes, [None if r.value is None else arrays[r.value] for r in recipes])
    assert got.view(np.uint32).shape == want.shape
    floats = got.view(np.float32)
    equal = (got.view(np.uint32) == np.asarray(want)) | np.isnan(floats) & np.isnan(np.asarray(want).view(np.float32))
    assert equal.all(), np.argmin(equal)


# -- sectors


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loads_and_stores_are_whole_sectors(dtype: str) -> None:
    """Of a weight [K, N] and of values [batch, token, head, N], whose columns are neighbours, each is read once. Of a transposed
    weight and of keys [batch, token, head, K] float32 is as well; of 16-bit pairs half of a sector is read at a time."""
    heads = WeightSlice(0, 0, 1, 0, 64, 64, 2, False, (0, 2), ((0, 2), (1, 4)))
    cases = [((96, 160), (0, 1), 1, None), ((160, 96), (1, 0), 1, None)]
    cases += [((2, 128, 4, 64), (0, 1), 1, heads), ((2, 128, 4, 64), (1, 0), 1, heads)]
    for k, (shape, permutation, contracted, slices) in enumerate(cases):
        array = numbers(shape, dtype, 0)
        sizes = shape if slices is None else (64, 64)
        k_size, n = (sizes[d] for d in permutation)
        recipe = WeightRecipe(0, permutation, contracted, WeightShape((k_size,), n, dtype), slices)
        parts = tuple((recipe, c) for c in range(len(recipe.shape.chunks)))
        main_kernel()
        with counters.counting(900) as found:
            (got,) = launched(Stationary(program_of([array]), (parts,), (), (0,)), [array])
        same(got, packed.weights(parts, lambda _, array=array: array), dtype)
        accesses = [a for a in found[0].accesses if a.buffer in ("operand 0", "result 0")]
        read, written = (sum(32 * a.sectors for a in accesses if a.op == op) for op in ("ld_global", "st_global"))
        assert written == got.nbytes
        assert read == array.nbytes * (2 if k % 2 and dtype == "bfloat16" else 1), (k, read)


# -- values that only move elements

MOVES: dict[str, tuple[tuple[int, ...], list[tuple[str, dict[str, Any]]]]] = {
    "transposed": ((13, 40), [("transpose", {"permutation": (1, 0)})]),
    "sliced by steps": ((27, 90), [("slice", {"start": (1, 10), "limit": (27, 90), "strides": (2, 2)})]),
    "a slice transposed": ((40, 7, 9), [
        ("slice", {"start": (8, 0, 0), "limit": (40, 7, 9), "strides": ()}), ("transpose", {"permutation": (2, 0, 1)}),
        ("reshape", {"new_sizes": (9, 32 * 7)}),
    ]),
    "broadcast": ((40,), [("broadcast_in_dim", {"shape": (13, 40), "dims": (1,)})]),
    "reshaped in a way that strides cannot say": ((6, 10), [
        ("transpose", {"permutation": (1, 0)}), ("reshape", {"new_sizes": (5, 12)}),
    ]),
}  # fmt: skip


def evaluated(kind: str, params: dict[str, Any], x: Any) -> Any:
    match kind:
        case "transpose":
            return jnp.transpose(x, params["permutation"])
        case "slice":
            return jax.lax.slice(x, params["start"], params["limit"], params["strides"] or None)
        case "broadcast_in_dim":
            return jax.lax.broadcast_in_dim(x, params["shape"], params["dims"])
        case "convert_element_type":
            return x.astype(params["dtype"])
    return x.reshape(params["new_sizes"])


def moved(moves: Sequence[tuple[str, dict[str, Any]]], array: np.ndarray) -> tuple[TileProgram, list[Any]]:
    """A program with these operators of an array, and each of its values."""
    values, instrs = [jnp.asarray(array)], list[Instr]()
    for k, (kind, params) in enumerate(moves):
        values.append(evaluated(kind, params, values[-1]))
        instrs.append(Instr(kind, (k,), (k + 1,), make_params(**params)))
    types = [TileType(False, v.shape, v.dtype.name) for v in values[1:]]
    return program_of([array], instrs, types), values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_elements_is_packed_from_the_array(name: str, dtype: str) -> None:
    shape, moves = MOVES[name]
    array = numbers(shape, dtype, 1)
    program, values = moved(moves, array)
    last = len(moves)
    k, n = values[last].shape
    recipe = WeightRecipe(last, (0, 1), 1, WeightShape((k,), n, dtype))
    vector = VectorRecipe(last, (k, n), (0, 1), (k, n), 32 * -(-k * n // 32))
    part = Stationary(program, (((recipe, -1),),), (vector,), (0,))
    asked = list[packing.MadeByXla]()

    def made(of: packing.MadeByXla) -> Any:
        asked.append(of)
        return values[of.value]

    weight, words = launched(part, [array], made)
    assert bool(asked) == ("cannot" in name), "XLA makes a value only where strides cannot say where its elements lie"
    same(weight, packed.weights([(recipe, -1)], lambda _: np.asarray(values[last])), dtype)
    same(words, packed.vectors([vector], [np.asarray(values[last])]).view(np.float32), "float32")


@pytest.mark.parametrize(("chain", "by_xla"), [
    (("float32", "bfloat16"), False), (("float32", "float16"), False), (("bfloat16", "float32"), False),
    (("float16", "float32"), False), (("bfloat16", "float16"), False), (("float16", "float32", "bfloat16"), False),
    (("float32", "bfloat16", "float32"), True), (("float32", "bfloat16", "float16"), True),
], ids=str)  # fmt: skip
def test_a_cast_is_one_rounding_of_the_array(chain: tuple[str, ...], by_xla: bool) -> None:
    array = numbers((17, 33), chain[0], 1)
    program, values = moved([("convert_element_type", {"dtype": dtype}) for dtype in chain[1:]], array)
    last = len(chain) - 1
    recipe = WeightRecipe(last, (0, 1), 1, WeightShape((17,), 33, chain[-1]))
    vector = VectorRecipe(last, (17, 33), (0, 1), (17, 33), 576)
    asked = list[packing.MadeByXla]()

    def made(of: packing.MadeByXla) -> Any:
        asked.append(of)
        return values[of.value]

    weight, words = launched(Stationary(program, (((recipe, -1),),), (vector,), (0,)), [array], made)
    assert bool(asked) == by_xla
    same(weight, packed.weights([(recipe, -1)], lambda _: np.asarray(values[last])), chain[-1])
    same(words, packed.vectors([vector], [np.asarray(values[last])]).view(np.float32), "float32")


def test_numbers_of_the_program_are_in_the_table() -> None:
    program = dataclasses.replace(program_of([]), values=(TileType(False, (), "bfloat16"),), literals=((0, 1.25),))
    (got,) = launched(Stationary(program, (), (VectorRecipe(0, (), (), (40,), 64),), ()), [])
    assert (got.view(np.float32) == [1.25] * 40 + [0] * 24).all()


# -- fills


@pytest.mark.parametrize("size", [1, 5, 16, 1024, 1031, 3000])
def test_results_that_are_folded_into_hold_the_identity(size: int) -> None:
    kinds = [
        ("sum", "float32"),
        ("max", "float32"),
        ("min", "float16"),
        ("max", "bfloat16"),
        ("max", "int32"),
        ("prod", "bfloat16"),
    ]
    fills = [(CallResult(k, how, dtype), size * np_dtype(dtype).itemsize) for k, (how, dtype) in enumerate(kinds)]
    got = launched(Stationary(program_of([]), (), (), ()), [], fills=fills)
    for (how, dtype), filled in zip(kinds, got, strict=True):
        assert (filled.view(np_dtype(dtype)) == np.asarray(identity(how, np_dtype(dtype)), np_dtype(dtype))).all(), (how, dtype)


# -- planted errors

PLANTS = [
    ("no swizzle", "(unit ^ row % 8)", "unit"),
    ("ties away from zero", "+ (v >> 13 & 1)", "+ 1"),
    ("a column that is padding is read", "column >= 0)", "true)"),
    ("every batch is the first", "wide(&d->step) * iteration", "wide(&d->step) * 0"),
    ("two warps take the same job", "job += grid_size() * (kPackThreads / 32)", "job += 1"),
    ("nothing is packed", "job < jobs;", "job < 0;"),
]


@pytest.mark.parametrize(("what", "found", "instead"), PLANTS, ids=[what for what, *_ in PLANTS])
def test_a_planted_error_is_found(what: str, found: str, instead: str) -> None:
    text = (sources.root() / "include" / "kitsune" / "pack.h").read_text().replace("#pragma once", "")
    assert text.count(found) == 1, what
    packer = lower.PACKER.replace('#include "kitsune/pack.h"', text.replace(found, instead))
    ties = (np.arange(3 * 40 * 2 * 17, dtype=np.uint32) * 0x1000 + 0x3F800000).view(np.float32).reshape(3, 40, 2, 17)
    slices = WeightSlice(0, 0, 1, 0, 20, 20, 2, False, (0, 2), ((0, 3), (1, 2)))
    recipe = WeightRecipe(0, (0, 1), 1, WeightShape((20,), 17, "float32"), slices)
    part = Stationary(program_of([ties]), (((recipe, 0),),), (), (0,))
    want = packed.weights([(recipe, 0)], lambda _: ties)
    same(launched(part, [ties])[0], want, "float32")
    with pytest.raises((AssertionError, RuntimeError)):
        same(launched(part, [ties], packer=packer)[0], want, "float32")
