"""Hand-written tile programs, lowered and run: shared by the tests of the CPU code generator."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kitsune_jax import _cpu
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cpu.bytecode import encode
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.bytecode_sim import simulate
from tests.support.tiles import Tiles

RNG = np.random.default_rng(7)
BF16 = ml_dtypes.bfloat16
ROW = ((0,), ())


def array(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def run(program: TileProgram, *inputs: np.ndarray, tolerance: float | None = None) -> list[np.ndarray]:
    """The simulator's outputs, after the executor has agreed with them (to ``tolerance``) on 1 and on 2 threads."""
    code = lower_program(program, "test")
    words = encode(code)
    assert _cpu.validate(words) == ""
    want = simulate(code, inputs, [a.shape for a in program.outputs])
    for threads in (1, 2):
        got = [np.empty_like(w) for w in want]
        _cpu.run(words, [plain(a) for a in inputs], [plain(a) for a in got], threads)
        for g, w in zip(got, want, strict=True):
            close(g, w, tolerance or (1e-2 if w.dtype == BF16 else 2e-5))
    return want


def plain(a: np.ndarray) -> np.ndarray:
    """bfloat16 as the 16-bit integers that array interfaces know."""
    return np.ascontiguousarray(a).view(np.uint16) if a.dtype == BF16 else np.ascontiguousarray(a)


def kinds(program: TileProgram, stage: int = 0) -> list[str]:
    return [type(i).__name__.removeprefix("Cpu") for i in lower_program(program, "test").stages[stage].body]


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


def relu_layer(t: Tiles, x: int, w: int, b: int, relu: bool = True) -> int:
    y = t.matmul(x, w)
    n = t.values[y].shape[-1]
    y = t.op("add", y, t.broadcast(b, (n,), (1,)))
    return t.op("max", y, t.literal(0.0, t.values[y].dtype)) if relu else y
