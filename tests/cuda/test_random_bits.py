"""Bits of random keys in CUDA kernels: those of XLA under every schedule, what the compilers make of a hash, and its modelled time.

The kernels with the carries of the counter at their edges, as users write them, are in ``tests/cpu/test_rbg_bits.py``.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import NO_CONTEXT
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, sources
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from kitsune_jax.targets.cuda.planning.machines import H200
from kitsune_jax.targets.cuda.target import CUDA
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import Kernel, called, code_of, kernel_cache, subject
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

IMPLS = {"threefry2x32": "threefry2x32", "rbg": "philox4x32"}  # of jax.random -> the table's operator


def dropout(x: Any, w: Any, key: Any) -> Any:
    h = jax.nn.relu(x @ w)
    return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0) @ w.T


def shapes(impl: str, rows: int, width: int) -> list[Any]:
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, width), (width, width))] + [key]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows, width", [(1, 1), (67, 9), (131, 36)])
def test_bits_are_those_of_xla_under_every_schedule(impl: str, rows: int, width: int) -> None:
    def f(key: Any, x: Any) -> Any:
        return jax.random.bits(jax.random.wrap_key_data(key, impl=impl), x.shape) ^ x

    key = jax.random.key_data(jax.random.key(11, impl=impl))
    x = jax.device_put(np.random.default_rng(0).integers(0, 2**32, (rows, width), np.uint32))
    of = subject(f, key, x)
    run = Kernel(of, dataclasses.replace(CUDA.plan(of.graph, of.region, H200, NO_CONTEXT), replicas=1))
    want = f(key, x)
    for seed in range(3):
        np.testing.assert_array_equal(run(seed=seed)[0], want)


# The counter of this key carries from its first word into its second after two blocks, and from there on into its third.
KEY = (7, 5, 2**32 - 2, 2**32 - 1)
PLANTED = {
    "a carry of the counter is lost": ("carry &= x1 < 1;", "carry = 0;"),
    "the elements of a block are in another order": ("(place & 1 ? x3 : x2) :", "(place & 1 ? x2 : x3) :"),
    "a round is left out": ("i < 10; ++i) {\n    const Halves", "i < 9; ++i) {\n    const Halves"),
    "the halves of a product are swapped": ("x1 = second.low;", "x1 = second.high;"),
}


def hashes() -> Program:
    """The bits of a key of four words, at places that an array has: five for each of 71 rows."""
    t = Tiles((71,), 64)
    words = [t.load((), "uint32") for _ in range(4)]
    place = t.load((71, 5), "uint32", ((0,), ()))
    t.store(t.op("philox4x32", *words, place, dtype="uint32"), (71, 5), ((0,), ()))
    return Program.of(t.program())


@pytest.mark.parametrize("bug", [None, *PLANTED])
def test_a_planted_bug_gives_other_bits(bug: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug is not None:
        headers, emulator = sources.include_dirs("emulator")
        include = tmp_path / "include"
        shutil.copytree(headers, include)
        file, (right, wrong) = include / "kitsune" / "math.h", PLANTED[bug]
        assert file.read_text().count(right) == 1
        file.write_text(file.read_text().replace(right, wrong))
        monkeypatch.setattr(sources, "include_dirs", lambda part: (include, emulator) if part == "emulator" else (include,))
    code = code_of(hashes(), change=lambda source: f"// planted: {bug}\n{source}")
    arrays = [*(jnp.uint32(word) for word in KEY), jnp.arange(71 * 5, dtype=jnp.uint32).reshape(71, 5)]
    (got,) = called(hashes(), *arrays, code=code)
    want = np.asarray(lax.rng_bit_generator(jnp.array(KEY, jnp.uint32), (71, 5), dtype=jnp.uint32)[1])
    assert np.array_equal(got, want) == (bug is None)


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("impl", IMPLS)
def test_the_machine_code(impl: str, compiler: str) -> None:
    """Hashes beside products: nothing is spilled, and a hash takes no more instructions than the model counts for it. A product
    of Philox is one multiplication of 32 by 32 bits with both halves; two for each would be 40 for a hash."""
    width = 128
    of = subject(dropout, *shapes(impl, 262_144, width))
    plan = CUDA.plan(of.graph, of.region, H200, NO_CONTEXT)
    program = of.program(plan)
    made = lower.generate_kernel(program, arrangement_of(plan, program), "region")
    compiled = compilers.cubin(made.source, "sm_90a", folder_of(compiler))
    code, resources = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
    assert not code.has_local_memory and resources.spill_bytes == resources.stack_bytes == 0
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not (skipped(paths) if code.count("CALL") == 0 else ())
    hashed = 64 * width // 128  # by a thread, of a tile
    multiplied = code.count("IMAD.WIDE") + code.count("IMAD.HI")
    if impl == "rbg":
        assert 20 * hashed <= multiplied <= 21 * hashed
    words = {"threefry2x32": "SHF", "rbg": "LOP3"}[impl]  # a rotation for each round; exclusive ors of three words
    assert 18 * hashed <= code.count(words) <= 25 * hashed
    twice = (multiplied if impl == "rbg" else 0) / hashed  # these take the pipe for two
    assert len(code.instructions) / hashed - 30 + twice < 1.05 * OPS[IMPLS[impl]].flops  # 30: all that is not a hash


@pytest.mark.parametrize("impl, modelled", [("threefry2x32", 175e-6), ("rbg", 183e-6)])
def test_dropout_is_a_part_of_a_pipeline(impl: str, modelled: float) -> None:
    """By the model, which no device has confirmed: two products with dropout between them, 262 144 rows 128 wide."""
    report = kj.explain(kj.pipeline(dropout), platform="cuda", device="h200")(*shapes(impl, 262_144, 128))
    (region,) = report.regions
    assert report.coverage > 0.9 and 1.4 * region.seconds < region.baseline_seconds
    assert abs(region.seconds - modelled) < 0.05 * modelled


@pytest.mark.parametrize("impl", IMPLS)
def test_a_key_that_is_split_in_each_step(impl: str) -> None:
    """What a hash counts is the same for all rows, and made of nothing inside the loop's body."""

    def f(key: Any, x: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            key, x = carry
            key, now = jax.random.split(key)
            return (key, x ^ jax.random.bits(now, x.shape)), jax.random.bits(now, (3,))

        return lax.scan(step, (key, x), None, length=5)

    key, x = jax.random.key(3, impl=impl), jnp.arange(67, dtype=jnp.uint32)
    (key_after, after), bits = jax.jit(kj.pipeline(f, target="emulator", force=True, strict=True))(key, x)
    (wanted_key, wanted), wanted_bits = jax.jit(f)(key, x)
    np.testing.assert_array_equal(jax.random.key_data(key_after), jax.random.key_data(wanted_key))
    np.testing.assert_array_equal(after, wanted)
    np.testing.assert_array_equal(bits, wanted_bits)
