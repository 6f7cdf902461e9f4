"""Kernels that ask the L2 for the weight of a product behind them, through the public API in the emulator, and as machine code."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import counters, sass
from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.route import PlannedRegion, RouteOptions
from kitsune_jax.planning.cost import itemsize
from kitsune_jax.planning.plan import Ahead
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import hostcc, lower, nvrtc, runtime, sources
from kitsune_jax.targets.cuda.arrangement import PIECE_BYTES
from kitsune_jax.targets.cuda.lower import generate_call_kernel
from reference import standalone
from tests.cuda.test_decoding import quick_folds, token
from tests.cuda.test_launch import _cuda
from tests.support.checks import in_float64
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import arrangements, by_hand, called, code_of, kernel_cache, subject, tiled
from tests.support.cuda_training_cases import TRAINING
from tests.support.phases import message_passing

__all__ = ["kernel_cache", "quick_folds"]
pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.usefixtures("kernel_cache", "quick_folds"),
]


@pytest.fixture(autouse=True, scope="module")
def emulator(kernel_cache: pathlib.Path) -> None:
    """In use before something counts what it does."""
    runtime.use_emulator(compilers.emulator_library())
    runtime.register("cpu")


Array = Any
RNG = np.random.default_rng(29)
HEADS, SIZE, HIDDEN = 3, 16, 20_011


def layer(x: Array, q: Array, k: Array, v: Array, last: Array, out: Array, down: Array) -> Array:
    """A token's attention, and the two products behind it: ``down`` is 32 MB in float32, of which a part may be asked for."""
    h = token(q, k, v, last).reshape(len(q), -1) @ out
    return x + jnp.maximum(h, 0) @ down


def arguments(dtype: Any = jnp.float32, batch: int = 1, keys: int = 1103) -> tuple[Array, ...]:
    def made(*shape: int) -> Array:
        return jnp.asarray(RNG.standard_normal(shape) / shape[0] ** 0.5, dtype)

    wide = 400 * (4 // jnp.dtype(dtype).itemsize)
    cache = (batch, keys, HEADS, SIZE)
    weights = made(HEADS * SIZE, HIDDEN), made(HIDDEN, wide)
    return made(batch, wide), made(batch, 1, HEADS, SIZE), made(*cache), made(*cache), np.int32(keys // 2), *weights


def asked(found: list[counters.Counts], name: str) -> int:
    """Bytes that a launch has asked the L2 for."""
    *packing, one = found
    assert len(packing) <= 1
    return sum(event.amount for event in one.events if event.name == name)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)],
)
def test_a_token_asks_for_the_weight_behind_it(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(dtype)
    decode = kj.pipeline(layer, target="emulator", strict=True, fetch_ahead=True)
    (region,) = kj.explain(decode)(*args).regions
    assert region.ahead is not None and region.ahead.weight_bytes == args[-1].nbytes
    assert 1e6 < region.ahead.bytes < 0.5 * args[-1].nbytes and region.ahead.bytes % PIECE_BYTES == 0
    without = kj.pipeline(layer, target="emulator", strict=True)
    assert kj.explain(without)(*args).regions[0].ahead is None
    plain = np.asarray(jax.jit(without)(*args))
    monkeypatch.setenv("KITSUNE_EMULATOR_SEED", "7")
    runtime.set_emulator_seed(7)
    with counters.counting(900) as found:
        got = np.asarray(jax.jit(decode)(*args))
    assert asked(found, "bulk_prefetch_l2") == region.ahead.bytes
    assert (got == plain).all(), "what the L2 is asked for has no part in the result"
    want = in_float64(layer, *args)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def decode(q: Array, k: Array, v: Array, last: Array, out: Array) -> Array:
    return token(q, k, v, last).reshape(len(q), -1) @ out


def decoded(keys: int) -> tuple[Array, ...]:
    """Arguments of ``decode``, with a weight of 32 MB."""
    return *arguments(keys=keys)[1:5], jnp.asarray(RNG.standard_normal((HEADS * SIZE, 166_667)), jnp.float32)


def planned(device: str, *args: Array) -> tuple[Any, PlannedRegion]:
    """``decode`` as it is planned for ``device``, with the code of its one call."""
    jaxpr = jax.make_jaxpr(decode)(*args)
    captured, routed, _ = lowering.capture_until_stable(
        jaxpr, lambda body: body, "emulator", RouteOptions(strict=True, fetch_ahead=True, device=device)
    )
    (region,) = routed.regions
    return captured, region


def test_the_portable_kernel_asks_line_by_line() -> None:
    args = decoded(1103)
    captured, region = planned("a100", *args)
    assert region.ahead is not None and region.code.kernel.launch[1] == 800
    with counters.counting(800) as found:
        (got,) = standalone.run(captured, [region], args)
    assert asked(found, "prefetch_l2") == region.ahead.fetched_bytes and asked(found, "bulk_prefetch_l2") == 0
    np.testing.assert_allclose(np.asarray(got), in_float64(decode, *args), rtol=1e-4, atol=1e-4)


def test_all_multiprocessors_ask() -> None:
    """Those without a tile do nothing else."""
    _, region = planned("h200", *decoded(1024))
    assert region.code.kernel.launch[2] == 132 > region.plan.tiles // region.plan.lanes
    assert region.code.kernel.hints == 1  # the last operand is a hint


@pytest.mark.parametrize("sm", [900, 800])
def test_a_call_of_several_phases_asks_when_its_last_ends(sm: int) -> None:
    case = message_passing()
    operands, weight = case.operands(np.random.default_rng(3)), np.zeros(50_000, np.uint8)
    call = tiled(case.program)
    ahead = Ahead(0, weight.nbytes, 0, weight.nbytes, 6 * PIECE_BYTES, 0, 9, 0.0)
    made = generate_call_kernel(call, tuple(by_hand(part.program, sm, 2, 3) for part in call.parts), "program", ahead)
    assert made.launch[2] >= 9
    code = lower.emulated_code(made, "program")
    plain = called(case.program, *operands, code=code_of(case.program, sm=sm, lanes=2, replicas=3))
    for seed in range(4):
        with counters.counting(sm) as found:
            got = called(case.program, *operands, weight, code=code, seed=seed)
        assert asked(found, "bulk_prefetch_l2" if sm == 900 else "prefetch_l2") == 6 * PIECE_BYTES
        assert [x.tobytes() for x in got] == [x.tobytes() for x in plain]


ARRANGED = [
    ("mlp", "float16", "sm90-vertical-streamed-cluster2-lanes1"),
    ("nerf-small", "bfloat16", "sm90-spatial-cluster-lanes1"),
    ("tanh-step", "bfloat16", "sm90-spatial-l2-lanes2"),
]


@pytest.mark.parametrize("case", ARRANGED, ids=" ".join)
def test_ctas_that_only_ask_disturb_no_pipeline(case: tuple[str, str, str]) -> None:
    """Clusters, rings and sums: the CTAs without tiles are none of theirs."""
    name, dtype, arrangement = case
    family = (FAMILIES | TRAINING)[name]
    of = subject(family.function, *family.arguments(130, dtype))
    plain = of.planned(arrangements(of)[arrangement], "emulator")
    value = max(of.graph.inputs, key=lambda v: of.graph.values[v].size)
    size = of.graph.values[value].size * itemsize(of.graph.values[value].dtype)
    ahead = Ahead(value, size, 0, size, size // 2, 0, 24, 0.0)
    code = lower.generate("emulator", plain.program, [plain.plan], "region", ahead)
    asking = dataclasses.replace(plain, code=code, ahead=ahead)
    grid, ctas = code.kernel.launch[2], code.kernel.launch[7]
    assert grid == 24 // ctas * ctas > plain.code.kernel.launch[2]
    want, got = (standalone.run(of.captured, [region], of.args) for region in (plain, asking))
    assert [np.asarray(x).tobytes() for x in got] == [np.asarray(x).tobytes() for x in want]


# -- the code by itself: any array, wherever it starts


@functools.lru_cache(maxsize=2)
def small(sm: int) -> PlannedRegion:
    return planned("h200" if sm == 900 else "a100", *decoded(1024))[1]


def launched(array_bytes: int, first: int, size: int, pieces: int, offset: int, sm: int = 900, change: str = "") -> int:
    """Bytes that the kernel of ``small`` asks for of an array that starts ``offset`` bytes behind a multiple of 16."""
    region = small(sm)
    ahead = Ahead(0, array_bytes, first, size, pieces * PIECE_BYTES, 0, 4, 0.0)
    made = lower._cached_kernel(region.program, tuple(phase.plan for phase in region.phases), "region", ahead)
    changed = dataclasses.replace(made, source=f"// planted: {change}\n{made.source}") if change else made
    code = lower.emulated_code(changed, "region")
    kernel = _cuda.Kernel(code.image, np.asarray(made.launch, np.int64), "region", emulated=True, packer=code.packer)
    kernel.load()
    operands = made.launch[8]
    sizes = made.launch[12 : 12 + operands + made.launch[9]]
    buffers = [np.zeros(n + 64, np.uint8) for n in sizes]
    starts = [-b.ctypes.data % 64 + offset * (k == operands - 1) for k, b in enumerate(buffers)]
    with counters.counting(sm) as found:
        kernel.launch([(b.ctypes.data + at, n) for b, at, n in zip(buffers, starts, sizes, strict=True)])
    return asked(found, "bulk_prefetch_l2" if sm == 900 else "prefetch_l2")


CASES = [(4096, 0, 4096, 1), (40_000, 0, 40_000, 7), (3 * 4096, 0, 3 * 4096, 3), (100_016, 12_000, 33_000, 8), (9_999, 1, 9_998, 2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("array", "first", "size", "pieces"), CASES)
@pytest.mark.parametrize("offset", [0, 2, 14])
def test_nothing_beyond_the_array_is_asked_for(array: int, first: int, size: int, pieces: int, offset: int) -> None:
    """The emulator refuses it, and a bulk copy that is not aligned. No more than a piece's last bytes are missing."""
    got = launched(array, first, size, pieces, offset)
    assert pieces * PIECE_BYTES - 16 <= got <= pieces * PIECE_BYTES
    if (first + offset) % 16 == 0:
        assert got == pieces * PIECE_BYTES


PLANTED = {
    "whole pieces to the end": ("at + Piece <= Bytes ? Piece", "at + Piece <= Bytes + 16 ? Piece", "outside global memory", 2, 900),
    "not aligned": ("% 16);\n", "% 1);\n", "multiples of 16", 2, 900),
    "one line more": ("line < bytes;", "line <= bytes;", "outside global memory", 0, 800),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_emulator_sees_what_is_asked_for_elsewhere(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, message, offset, sm = PLANTED[bug]
    small(sm)
    headers, emulator = sources.include_dirs("emulator")
    include = tmp_path / "include"
    shutil.copytree(headers, include)
    file = include / "kitsune" / "ahead.h"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    monkeypatch.setattr(sources, "include_dirs", lambda part: (include, emulator) if part == "emulator" else (include,))
    for seed in range(3):
        runtime.set_emulator_seed(seed)
        with pytest.raises(RuntimeError, match=message):
            launched(3 * 4096, 0, 3 * 4096, 3, offset, sm, bug)


# -- the machine code


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(("device", "arch", "opcode"), [("h200", "sm_90a", "UBLKPF.L2"), ("a100", "sm_80", "CCTL.E.PF2")])
def test_the_machine_code_asks_and_spills_nothing(device: str, arch: str, opcode: str, compiler: str) -> None:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    args = shape(1, 1, 8, 64), shape(1, 4096, 8, 64), shape(1, 4096, 8, 64), np.int32(4000), shape(512, 32_768)
    options = RouteOptions(strict=True, fetch_ahead=True, device=device, code=False)
    routed = lowering.capture_until_stable(jax.make_jaxpr(decode)(*args), lambda body: body, "cuda", options)[1]
    (region,) = routed.regions
    assert region.ahead is not None
    plans = tuple(phase.plan for phase in region.phases)
    registers = []
    for ahead in (None, region.ahead):
        made = lower._cached_kernel(region.program, plans, "region", ahead)
        result = compilers.cubin(made.source, arch, folder_of(compiler))
        resources, code = sass.resources(result.log, result.cubin), sass.disassemble(result.cubin, "kitsune_region")
        assert (code.count(opcode) > 0) == (ahead is not None)
        assert resources.spill_bytes == resources.stack_bytes == 0
        registers.append(resources.registers)
    assert abs(registers[1] - registers[0]) <= 8


@pytest.mark.parametrize("of_product", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_argument_that_is_updated_in_place_stays_so(of_product: bool) -> None:
    """The product reads the weight behind the call, so who writes it waits for both as it is: XLA makes no copy more."""

    def step(*args: Array) -> tuple[Array, Array]:
        y = layer(*args)
        return y, jax.lax.dynamic_update_slice(args[-1], y if of_product else args[0], (7, 0))

    args = arguments()

    def copies(fetch_ahead: bool) -> int:
        pipelined = kj.pipeline(step, target="emulator", strict=True, fetch_ahead=fetch_ahead)
        assert (kj.explain(pipelined)(*args).regions[0].ahead is not None) == fetch_ahead
        text = jax.jit(pipelined, donate_argnums=6).lower(*args).compile().as_text()
        assert text is not None and "input_output_alias" in text
        return sum(" copy(" in line and f"f32[{HIDDEN},400]" in line for line in text.splitlines())

    assert copies(True) == copies(False) == (0 if of_product else 2)


def test_a_batch_of_tokens_asks_once() -> None:
    x, q, k, v, last, *weights = arguments(batch=2)
    decode = kj.pipeline(
        lambda *args: layer(*(a[None] for a in args[:4]), *args[4:])[0], target="emulator", strict=True, fetch_ahead=True
    )
    both = jax.vmap(decode, in_axes=(0, 0, 0, 0, None, None, None))
    (region,) = kj.explain(both)(x, q, k, v, last, *weights).regions
    assert region.ahead is not None and region.ahead.weight_bytes == weights[1].nbytes
    got = np.asarray(jax.jit(both)(x, q, k, v, last, *weights))
    np.testing.assert_allclose(got, in_float64(layer, x, q, k, v, last, *weights), rtol=1e-5, atol=1e-5)
