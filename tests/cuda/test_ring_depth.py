"""The ring of streamed weights holds what lanes cannot go on without: a kernel with a smaller one is refused, and would hang.

Shared memory is taken away from kernels in the emulator, a chunk of weights after the other, until the code generator says no.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import layout, tiles
from kitsune_jax.targets.cuda.stage import fitting
from reference.interpret import interpret
from tests.support.checks import in_float64
from tests.support.cuda_run import Kernel, arrangements, by_hand, kernel_cache, run_program, subject
from tests.support.programs import attention
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

Made = tuple[TileProgram, list[np.ndarray]]


def products(k: int, n: int, dtype: str, count: int) -> Made:
    """relu(x W), 32 to ``k`` wide, times ``count`` matrices side by side, whose results are added up: small integers."""
    t = Tiles((131,), tiles.TILE_ROWS)
    x, w = t.load((131, 32), dtype, ((0,), ())), t.load((32, k), dtype)
    others = [t.load((k, n), dtype) for _ in range(count)]
    h = t.op("max", t.matmul(x, w, (((1,), (0,)), ((), ())), "float32"), t.broadcast(t.literal(0.0), (k,), ()))
    h = t.op("convert_element_type", h, dtype=dtype, new_dtype=dtype) if dtype != "float32" else h
    made = [t.matmul(h, w, (((1,), (0,)), ((), ())), "float32") for w in others]
    total = made[0]
    for other in made[1:]:
        total = t.op("add", total, other)
    t.store(total, (131, n), ((0,), ()))
    rng = np.random.default_rng(0)
    return t.program(), [rng.integers(-1, 2, s).astype(dtype) for s in ((131, 32), (32, k), *[(k, n)] * count)]


def scores_and_values(dtype: str, dim: int, block: int) -> Made:
    case = attention(2, 1, 131, 3 * block, dim, dim, dtype, block=block)
    assert case.program.only is not None
    return dataclasses.replace(case.program.only, tile_rows=tiles.TILE_ROWS), list(case.operands(np.random.default_rng(3)))


# (the program, lanes, chunks that must fit)
CASES = {
    "two products in flight": (products(256, 64, "float32", 2), 1, 6),
    "two products in flight, 16 bits": (products(512, 64, "bfloat16", 2), 2, 3),
    "a product that waits as it goes": (products(256, 64, "float32", 1), 1, 4),
    "a turn": (scores_and_values("bfloat16", 64, 128), 2, 3),
    "a turn, wide heads": (scores_and_values("bfloat16", 128, 64), 3, 4),
    "no turns": (scores_and_values("float32", 64, 64), 1, 2),
}


def depth_with(program: TileProgram, lanes: int, shared_bytes: int) -> int:
    """Of the ring; 0 where there is no kernel with so much shared memory."""
    a = dataclasses.replace(by_hand(program, 900, lanes, 2, resident=False), shared_bytes=shared_bytes)
    try:
        return layout.lay_out(program, a, "program").streaming.depth
    except CannotLower:
        return 0


def sizes(program: TileProgram, lanes: int) -> dict[int, int]:
    """Of shared memory, for each depth of a ring that has a kernel."""
    found = {depth_with(program, lanes, size): size for size in range(230_000, 16_000, -2048)}
    return {depth: size for depth, size in found.items() if depth}


FAST = ("two products in flight, 16 bits", "a turn")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_the_smallest_ring_does_and_a_smaller_one_hangs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (program, arrays), lanes, least = CASES[name]
    accepted = sizes(program, lanes)
    want = [np.asarray(w, np.float64) for w in interpret(program, arrays)]

    def right(size: int) -> bool:
        got = run_program(program, *arrays, lanes=lanes, replicas=2, resident=False, shared_bytes=size)
        return all(np.abs(g.astype(np.float64) - w).max() < 2e-2 * np.abs(w).max() for g, w in zip(got, want, strict=True))

    in_turns = name.startswith("a turn")  # a smaller ring does where lanes take none
    assert (2 if in_turns else least) == min(accepted)
    assert right(accepted[least]) and right(accepted[min(accepted)])
    monkeypatch.setattr(fitting, "least_ring_depth", lambda nodes: 0)
    smaller = {depth: size for depth, size in sizes(program, lanes).items() if depth < least}
    assert bool(smaller) == (least > 2)  # two are asked of every ring
    if smaller:
        with pytest.raises(jax.errors.JaxRuntimeError, match="deadlock"):
            right(smaller[max(smaller)])


def gated(x: Any, w: Any, a: Any, b: Any) -> Any:
    h = jax.nn.relu(x @ w)
    return jax.nn.silu(h @ a) * (h @ b)


@pytest.mark.parametrize("dtype, width", [("float32", 256), pytest.param("bfloat16", 512, marks=pytest.mark.slow)])
def test_two_products_of_more_chunks_than_a_ring_has(dtype: str, width: int) -> None:
    """Each fits the ring, both do not: they are multiplied as their chunks come."""
    rng = np.random.default_rng(0)
    shapes = ((131, 32), (32, width), (width, 64), (width, 64))
    args = [jax.device_put(np.asarray(rng.standard_normal(s) * s[0] ** -0.5, dtype)) for s in shapes]
    of = subject(gated, *args)
    want = in_float64(gated, *args)
    admitted = arrangements(of)
    found = {name: admitted[name] for name in admitted.names() if "streamed" in name and name in admitted}
    assert {"sm90-vertical-streamed-cluster2-lanes2", "sm80-vertical-streamed-cluster1-lanes1"} <= set(found)
    for plan in found.values():
        (got,) = Kernel(of, plan)()
        assert np.abs(got.astype(np.float64) - want).max() < 2e-2 * np.abs(want).max()
