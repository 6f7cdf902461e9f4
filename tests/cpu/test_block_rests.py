"""Gradients by any operands of what is worked off in blocks, with a rest of any length behind the last block, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cpu.bytecode import CpuLoop, CpuProgram
from tests.support.block_cases import CASES, subsets
from tests.support.blocks import planned_as
from trust import reference

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.filterwarnings("error")

Array = Any
TOLERANCE = {"float32": 5e-6, "bfloat16": 3e-2, "float16": 4e-3}
# Blocks, and lengths that leave a rest of 1, 2, a prime and all but one of a block's elements.
RESTS = [(128, 257), (128, 258), (128, 263), (128, 383), (256, 257), (256, 511), (512, 513)]
SAMPLE = [
    ("heads", (2,)), ("heads", (0, 1, 2)), ("heads of one element", (1,)), ("one head", (1, 2)), ("causal", (2,)),
    ("classes", (1,)), ("classes by embedding", (1,)), ("norm", (1,)), ("norm in front of a product", (2,)),
]  # fmt: skip


def gradient_of(name: str, length: int, by: tuple[int, ...], dtype: str) -> tuple[Callable[..., tuple[Array, ...]], list[Array]]:
    case, rng = CASES[name], np.random.default_rng(length)
    operands = [jax.device_put(np.asarray(rng.standard_normal(shape), dtype)) for shape in case.shapes(length)]

    def loss(*operands: Array) -> Array:
        return jnp.sum(case.function(*operands[:-1]).astype(jnp.float32) * operands[-1])

    return jax.grad(loss, by), operands


def check(name: str, length: int, by: tuple[int, ...], dtype: str = "float32", force: bool = True) -> None:
    gradient, operands = gradient_of(name, length, by, dtype)
    got = jax.jit(kj.pipeline(gradient, strict=force, force=force))(*operands)
    wanted = reference.evaluate(jax.make_jaxpr(gradient)(*operands), operands, reference.Arithmetic(widen=True))
    for k, x, y in zip(by, got, wanted, strict=True):
        assert x.shape == y.shape
        error = np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()
        assert error < TOLERANCE[dtype], f"{name}, {length}, by {k} of {by}: {error}"


@pytest.mark.parametrize("name, by", SAMPLE)
def test_a_rest_of_one_element(name: str, by: tuple[int, ...]) -> None:
    with planned_as("in blocks"):
        check(name, 257, by)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["causal", "causal, one head"])
def test_blocks_that_a_mask_cuts_are_smaller(name: str, dtype: str, programs: list[CpuProgram]) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    operands = [jax.device_put(np.asarray(rng.standard_normal(shape), dtype)) for shape in case.shapes(587)]
    with planned_as("in blocks", 256):
        got = jax.jit(kj.pipeline(case.function, strict=True, force=True))(*operands[:-1])
    jaxpr = jax.make_jaxpr(case.function)(*operands[:-1])
    (wanted,) = reference.evaluate(jaxpr, operands[:-1], reference.Arithmetic(widen=True))
    assert np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max() < TOLERANCE[dtype]
    loops = [i for program in programs for stage in program.stages for i in stage.body if isinstance(i, CpuLoop)]
    assert [(loop.within[2], loop.within[-1]) for loop in loops] == [(256, 1), (128, 2)]


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_worked_off_in_blocks(name: str, programs: list[CpuProgram]) -> None:
    gradient, operands = gradient_of(name, 257, subsets(name)[-1], "float32")
    with planned_as("in blocks"):
        jax.jit(kj.pipeline(gradient, strict=True, force=True)).lower(*operands)
    assert any(isinstance(i, CpuLoop) for program in programs for stage in program.stages for i in stage.body)


@pytest.mark.slow
@pytest.mark.parametrize("block, length", RESTS)
@pytest.mark.parametrize("name", CASES)
def test_every_rest_by_every_choice_of_operands(name: str, block: int, length: int) -> None:
    with planned_as("in blocks", block):
        for by in subsets(name):
            check(name, length, by)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_a_rest_of_one_element_in_16_bits(name: str, dtype: str) -> None:
    with planned_as("in blocks"):
        for by in subsets(name):
            check(name, 257, by, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("length", [257, 385, 513])
@pytest.mark.parametrize("name", CASES)
def test_plans_that_the_model_chooses(name: str, length: int) -> None:
    for by in subsets(name):
        check(name, length, by, force=False)
