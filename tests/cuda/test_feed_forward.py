"""The hidden layer of a feed-forward block, whose product behind it another kernel runs: the planner cuts the block there, a lane
keeps its rows, and products of a gate run beside those that it multiplies.

Compiled by NVRTC where there is one, and run in the emulator against float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import nvrtc
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from kitsune_jax.targets.cuda.lower import generate_kernel
from tests.cuda.test_kernels import CHAIN, ROUNDING, check_close, in_float64, in_tf32
from tests.support.cuda_run import Kernel, Subject, arrangements, kernel_cache, subject

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

PAIRS = "sm90-vertical-streamed-cluster2-lanes2"
Array = jax.Array


def gated(w_gate: Array, w_up: Array, x: Array) -> Array:
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def gelu(w: Array, b: Array, x: Array) -> Array:
    return jax.nn.gelu(x @ w + b)


def relu(w: Array, b: Array, x: Array) -> Array:
    return jax.nn.relu(x @ w + b)


def layer(fn: Callable[..., Array], dtype: str, rows: int, width: int, hidden: int) -> Subject:
    rng = np.random.default_rng(3)

    def array(*shape: int, by: float = 1.0) -> Array:
        return jax.device_put(np.asarray(rng.standard_normal(shape) * by, dtype))

    weight = array(width, hidden, by=width**-0.5)
    other = array(width, hidden, by=width**-0.5) if fn is gated else array(hidden)
    return subject(with_rows(fn), weight, other, array(rows, width))


def with_rows(fn: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """``fn`` with a result that only a stream over the rows makes: with few rows the columns would be the longer stream."""
    return lambda weight, other, x: (fn(weight, other, x), jnp.tanh(x))


@pytest.mark.parametrize(
    ("fn", "dtype", "rows", "width", "hidden", "name"),
    [
        (gated, "bfloat16", 1, 256, 704, PAIRS),
        (gated, "bfloat16", 130, 96, 1000, PAIRS),
        (gated, "float32", 63, 128, 640, PAIRS),
        (gelu, "float16", 1153, 128, 1100, PAIRS),
        (relu, "float32", 1031, 96, 1024, PAIRS),
        (relu, "bfloat16", 1097, 96, 1031, "sm80-vertical-streamed-cluster1-lanes1"),
    ],
)
def test_a_wide_hidden_layer(fn: Callable[..., Array], dtype: str, rows: int, width: int, hidden: int, name: str) -> None:
    of = layer(fn, dtype, rows, width, hidden)
    want = (in_tf32 if dtype == "float32" else in_float64)(with_rows(fn), of.args)
    assert of.region.space.rows == rows
    kernel = Kernel(of, arrangements(of)[name])
    first = kernel(seed=1)
    check_close(first, want, CHAIN * ROUNDING[dtype])
    assert [x.tobytes() for x in first] == [x.tobytes() for x in kernel(seed=2)]


def source_of(of: Subject, name: str) -> str:
    plan = arrangements(of)[name]
    program = of.program(plan)
    return generate_kernel(program, arrangement_of(plan, program), "region").source


def test_rows_are_loaded_once_for_all_chunks() -> None:
    """Else each of 44 products would read the 64 KiB of a tile from the L2 again."""
    source = source_of(layer(gated, "bfloat16", 130, 512, 1408), PAIRS)
    assert "RowSource" not in source and re.search(r"u32 load_\d+\[128\]", source)
    assert re.search(r"KITSUNE_NO_UNROLL\s+for \(int chunk = 0; chunk < 22;", source)  # unrolled: a minute of compilation
    narrow = source_of(layer(gated, "bfloat16", 130, 128, 256), "sm90-vertical-resident-lanes2")
    assert "BoxSource" in narrow  # few products: the tensor core reads the rows where they lie


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
def test_nothing_is_spilled() -> None:
    of = subject(gated, *(jnp.zeros(shape, "bfloat16") for shape in ((512, 1408), (512, 1408), (2000, 512))))
    made = compilers.cubin(source_of(of, PAIRS), "sm_90a")
    found = sass.resources(made.log, made.cubin)
    assert found.spill_bytes == found.stack_bytes == 0
    assert not re.search(r"\(C7\d\d\d\)", made.log)


def test_a_block_is_cut_behind_its_hidden_layer() -> None:
    def block(x: Array, gate: Array, up: Array, down: Array) -> Array:
        return gated(gate, up, x) @ down

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((65536, 512), (512, 1408), (512, 1408), (1408, 512))]
    report = kj.explain(block, platform="cuda", device="h200")(*arrays)
    assert (report.ops_pipelined, report.ops_total) == (5, 6)
    (region,) = report.regions
    assert region.seconds < 0.3e-3 < 0.35e-3 < region.baseline_seconds


def test_a_block_is_cut_in_front_of_its_hidden_layer_too() -> None:
    """With the normalisation of a tile in its registers, the kernel of both products would take longer than XLA's. The product in
    front, as an attention has, is none of the gate's."""

    def block(x: Array, out: Array, gain: Array, gate: Array, up: Array, down: Array) -> Array:
        x = x @ out
        x32 = x.astype(jnp.float32)
        normed = (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6) * gain).astype(x.dtype)
        return x + gated(gate, up, normed) @ down

    arrays = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((65536, 512), (512, 512), (512,), (512, 1408), (512, 1408), (1408, 512))
    ]
    report = kj.explain(block, platform="cuda", device="h200")(*arrays)
    assert report.ops_pipelined == 5  # both products, the sigmoid and its two factors
    (region,) = report.regions
    assert region.seconds < 0.3e-3 < 0.35e-3 < region.baseline_seconds
