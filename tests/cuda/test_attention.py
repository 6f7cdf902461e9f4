"""Softmax attention by the online algorithm, as kernels in the emulator: against float64, under several schedules, planted bugs.

A lane has 64 queries of a head; keys and values of the head come block by block through the ring of streamed weights, which all
lanes of a CTA share.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, tiles
from kitsune_jax.targets.cuda.stage import chunks
from reference.interpret import interpret
from tests.support.cuda_run import by_hand, kernel_cache, run_program, runner
from tests.support.programs import Case, attention
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

# Of the largest number of a result: products round to tf32 or 16 bits, twice.
TOLERANCE = {"float32": 4e-3, "bfloat16": 2e-2, "float16": 4e-3}
SHAPES = {
    "blocks": {"queries": 64, "keys": 64, "dim": 16, "dim_v": 16, "block": 32},
    "remainders": {"queries": 70, "keys": 83, "dim": 40, "dim_v": 24, "block": 32},
    "one_query": {"queries": 1, "keys": 37, "dim": 8, "dim_v": 8, "block": 16},
    "fewer_keys_than_a_block": {"queries": 67, "keys": 5, "dim": 64, "dim_v": 8, "block": 8},
    "groups": {"heads": 2, "groups": 3, "queries": 131, "keys": 64, "dim": 32, "dim_v": 32, "block": 64},
    "causal": {"queries": 130, "keys": 150, "dim": 16, "dim_v": 40, "block": 32, "causal": True},
    "wide_heads": {"heads": 1, "queries": 65, "keys": 64, "dim": 128, "dim_v": 128, "block": 64},
}


def of(case: Case) -> TileProgram:
    return dataclasses.replace(case.program.only, tile_rows=tiles.TILE_ROWS)


def check(case: Case, tolerance: float, **how: int) -> None:
    operands = case.operands(np.random.default_rng(3))
    errors = case.errors(run_program(of(case), *operands, resident=False, **how), operands)
    assert max(errors) < tolerance, errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention(shape: str, dtype: str, every: bool) -> None:
    case = attention(dtype=dtype, **SHAPES[shape])
    how = [(900, 2, 2), (900, 1, 1), (800, 2, 3)]
    if not every:  # of a shape's kernels in bfloat16 another one for each
        how = how[list(SHAPES).index(shape) % 3 :][:1] if dtype == "bfloat16" else how[:1]
    for sm, lanes, replicas in how:
        check(case, TOLERANCE[dtype], sm=sm, lanes=lanes, replicas=replicas)


@pytest.mark.parametrize("seed", range(4))
def test_schedules(seed: int) -> None:
    check(attention(dtype="bfloat16", **SHAPES["causal"]), TOLERANCE["bfloat16"], lanes=3, replicas=2, seed=seed)


def test_equal_inputs_give_equal_bits_under_every_schedule() -> None:
    case = attention(dtype="bfloat16", **SHAPES["groups"])
    operands = case.operands(np.random.default_rng(3))
    results = {found[0].tobytes() for found in map(runner(of(case), *operands, resident=False, lanes=2), range(3))}
    assert len(results) == 1


# (queries, keys, size of keys, size of values, keys of a block): rows without a tile of their own, one block, a remainder, primes.
LATE = {
    "one_block": (1, 32, 80, 16, 32),
    "two_blocks": (67, 64, 64, 64, 32),
    "remainder": (131, 109, 128, 128, 16),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", LATE)
def test_values_a_block_late_give_the_bits_of_values_in_time(shape: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic and its order are the same, whatever the schedule; float64 agrees."""
    queries, keys, dim, dim_v, block = LATE[shape]
    case = attention(1, 2, queries, keys, dim, dim_v, dtype, block=block, causal=queries > 100)
    operands = case.operands(np.random.default_rng(3))
    source = lower.generate_kernel(of(case), by_hand(of(case), 900, 2, 2, resident=False), "test").source
    assert source.count("AwaitedWeights") == 4  # the first scores, scores and values of a step, the last values
    run = runner(of(case), *operands, resident=False, lanes=2, replicas=2)
    results = [run(seed)[0] for seed in range(3)]
    monkeypatch.setattr(chunks, "with_late_products", lambda nodes, weights: tuple(nodes))
    (in_time,) = run_program(of(case), *operands, resident=False, lanes=2, replicas=2)
    assert {r.tobytes() for r in results} == {in_time.tobytes()}
    errors = case.errors(results[:1], operands)
    assert max(errors) < TOLERANCE[dtype], errors


@pytest.mark.parametrize(
    "what, found, instead",
    [
        (
            "values come in time, not late",
            r"(?s)from0, (\d+), (\d+)\);\n *}\n.*?late0, ",
            r"from0, \1, \2); stream_weights(weights, next, from0, ",
        ),
        ("the last values are never brought", r"i <= (\d+); \+\+i", r"i < \1; ++i"),
        ("the result is scaled while values are added", r"(complete<.*>\(carry_\d+, )0,", r"\g<1>1,"),
        ("scores are read while they are made", r"(complete<.*>\(acc_\d+, )1,", r"\g<1>2,"),
    ],
)
def test_a_bug_in_late_values_is_found(what: str, found: str, instead: str) -> None:
    queries, keys, dim, dim_v, block = LATE["two_blocks"]
    case = attention(1, 2, queries, keys, dim, dim_v, "bfloat16", block=block)
    operands = case.operands(np.random.default_rng(3))

    def change(source: str) -> str:
        changed = re.sub(found, instead, source, count=1)
        assert changed != source
        return changed

    with pytest.raises(Exception):  # noqa: B017  (of XLA, with what the emulator says)
        errors = case.errors(run_program(of(case), *operands, resident=False, lanes=2, change=change), operands)
        assert max(errors) < TOLERANCE["bfloat16"], errors


@pytest.mark.parametrize(
    "what, found, instead",
    [
        ("scores are read before the product is complete", r"(complete<.*>\(\w+, )0,", r"\g<1>1,"),
        ("a block of keys is never brought", r"stream_weights\(weights, next, from0, (\d+), (\d+)\);", ""),
        ("a lane never gives its turn", r"give_turn<kLanes>\(group\);", ""),
        ("every head reads the keys of the first", r"p\.weights0 \+ static_cast<i64>\(.*\) \*", "p.weights0 + 0 *"),
    ],
)
def test_a_planted_bug_is_found(what: str, found: str, instead: str) -> None:
    case = attention(dtype="bfloat16", **SHAPES["blocks"])
    operands = case.operands(np.random.default_rng(3))

    def change(source: str) -> str:
        changed = re.sub(found, instead, source, count=1)
        assert changed != source
        return changed

    with pytest.raises(Exception):  # noqa: B017  (of XLA, with what the emulator says)
        errors = case.errors(run_program(of(case), *operands, resident=False, lanes=2, change=change), operands)
        assert max(errors) < TOLERANCE["bfloat16"], errors


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("dtype, dim, block", [("bfloat16", 128, 128), ("float32", 64, 64)])
def test_the_machine_code_keeps_scores_and_result_in_registers(dtype: str, dim: int, block: int) -> None:
    """Two lanes that take turns; no wgmma is serialised, nobody touches the registers of one in flight, and nothing is spilled. In
    16 bits the softmax runs beside all products with values of the block before."""
    case = attention(16, 1, 4096, 4096, dim, dim, dtype, block=block, causal=True)
    source = lower.generate_kernel(of(case), by_hand(of(case), 900, 2, 132, resident=False), "test").source
    made = compilers.cubin(source, "sm_90a", None)
    assert not re.search(r"\(C7\d\d\d\)", made.log), made.log
    used = sass.resources(made.log, made.cubin)
    assert (used.stack_bytes, used.spill_bytes) == (0, 0)
    code = sass.disassemble(made.cubin, "kitsune_region")
    paths = flow(code.instructions)
    found = in_flight(paths)
    assert not found.hazards and not skipped(paths)
    opcodes = [i.opcode for i in code.instructions]
    late = dtype == "bfloat16"
    assert found.most_left == (block // 16 if late else 0)
    assert sum(o.startswith("HGMMA") for o in opcodes) == (2 if late else 1) * (dim + block) // (16 if late else 8)
    assert {"BAR.SYNC.DEFER_BLOCKING", "BAR.ARV"} <= set(opcodes)


def test_weights_of_each_iteration() -> None:
    """No batch: a loop over layers, each with weights of its own, which come in the order of the loop."""
    t = Tiles((130,), 64)
    x, w = t.load((130, 24), "bfloat16", ((0,), ())), t.input((5, 24, 24), "bfloat16")
    with t.loop(5, x, reverse=True) as loop:
        (h,) = loop.carries
        made = t.matmul(h, t.load_slice(w, (loop.index, 0, 1, 1)), (((1,), (1,)), ((), ())), "float32")
        made = t.op("max", t.reshape(made, (24,)), t.broadcast(t.literal(0.0), (24,), ()))
        loop.next(t.op("convert_element_type", made, dtype="bfloat16", new_dtype="bfloat16"))
    t.store(loop.results[0], (130, 24), ((0,), ()))
    program, rng = t.program(), np.random.default_rng(0)
    arrays = [rng.integers(-1, 2, s).astype("bfloat16") for s in ((130, 24), (5, 24, 24))]
    (got,) = run_program(program, *arrays, resident=False, lanes=2)
    (want,) = interpret(program, arrays)
    np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want).astype(np.float64))


@pytest.mark.parametrize("dims", [((0,), (), ()), ((), (0,), ())])
def test_batches_of_weights_that_a_tile_multiplies_with_once(dims: tuple[tuple[int, ...], ...]) -> None:
    """Keys of which there are few are no loop: the head's lie first, or between."""
    t = Tiles((3, 70), 64, batch_axes=1)
    shape = (3, 20, 16) if dims[0] else (20, 3, 16)
    x, w = t.load((3, 70, 16), "float16", ((0,), (1,), ())), t.load(shape, "float16", dims)
    t.store(t.matmul(x, w, (((1,), (1,)), ((), ())), "float32"), (3, 70, 20), ((0,), (1,), ()))
    program, rng = t.program(), np.random.default_rng(0)
    arrays = [rng.integers(-2, 3, s).astype("float16") for s in ((3, 70, 16), shape)]
    (got,) = run_program(program, *arrays, resident=False, lanes=2, replicas=2)
    np.testing.assert_array_equal(got, interpret(program, arrays)[0])


def test_what_is_not_there_is_refused_in_words() -> None:
    case = attention(**SHAPES["blocks"])
    with pytest.raises(CannotLower, match="do not stay in shared memory"):
        lower.generate_kernel(of(case), by_hand(of(case), 900, 1, 1), "test")


def test_what_depends_on_the_batch_is_read_by_every_row() -> None:
    t = Tiles((3, 70), 64, batch_axes=1)
    x, bias = t.load((3, 70, 4), "float32", ((0,), (1,), ())), t.load((3, 4), "float32", ((0,), ()))
    t.store(t.op("add", x, t.broadcast(bias, (4,), (1,))), (3, 70, 4), ((0,), (1,), ()))
    program, rng = t.program(), np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype("float32") for s in ((3, 70, 4), (3, 4))]
    (got,) = run_program(program, *arrays, lanes=2, replicas=2)
    np.testing.assert_array_equal(got, interpret(program, arrays)[0])
