"""Gradients through time as CUDA kernels in the emulator: the reverse loop, with the sums of its steps in a lane's accumulators.

Against float64, with equal bits under several schedules; bugs that are planted must be found.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.errors import CannotLower
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import make_params
from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import hostcc, lower, nvrtc, runtime
from tests.cuda import test_sass
from tests.cuda.test_gradients import BUGS, HEADER
from tests.cuda.test_loops import tiled
from tests.cuda.test_training import CHAIN, ROUNDING, check_close, check_schedules, in_float64
from tests.support import checks
from tests.support.cuda_cases import recurrence
from tests.support.cuda_compilers import COMPILERS
from tests.support.cuda_recurrent_cases import RECURRENT, heun, loss, lstm, pendulum
from tests.support.cuda_run import Arrangements, Kernel, Subject, arrangements, by_hand, kernel_cache, run_program, runner, subject
from tests.support.programs import lstm_backward

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.usefixtures("kernel_cache"),
]

SMALL = [name for name, family in RECURRENT.items() if family.small]


@functools.lru_cache(maxsize=4)
def case(name: str, dtype: str, rows: int) -> tuple[Subject, Arrangements, list[np.ndarray]]:
    """The subject, its arrangements, and its results in float64."""
    family = RECURRENT[name]
    of = subject(family.function, *family.arguments(rows, dtype))
    assert of.region.space.rows == rows and of.region.sinks, "the reverse loop did not become a region with its sums"
    return of, arrangements(of), in_float64(family, of.args)


def check(name: str, dtype: str, rows: int, arrangement: str) -> None:
    of, found, want = case(name, dtype, rows)
    assert arrangement in found, f"no kernel; there is one for {sorted(found)}"
    check_close(check_schedules(Kernel(of, found[arrangement]), (1, 2, 3)), want, CHAIN * ROUNDING[dtype])


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "arrangement"),
    [
        ("simple-loop", "float32", 2, "sm90-vertical-resident-lanes3"),
        pytest.param("simple-loop", "bfloat16", 257, "sm90-vertical-resident-lanes2", marks=pytest.mark.slow),
        ("simple-loop-by-rows", "float16", 131, "sm80-vertical-resident-lanes2"),
        ("lstm-loop", "bfloat16", 70, "sm90-vertical-resident-lanes2"),
        pytest.param("lstm-loop", "float32", 70, "sm90-vertical-resident-lanes1", marks=pytest.mark.slow),
        ("gru-loop", "float16", 63, "sm90-vertical-resident-lanes2"),
        ("heun-loop", "float32", 193, "sm90-vertical-resident-lanes3"),
        pytest.param("heun-loop", "bfloat16", 65, "sm80-vertical-resident-lanes1", marks=pytest.mark.slow),
        ("pendulum-loop", "float32", 700, "sm90-vertical-resident-lanes2"),  # a thread has rows of its own
        pytest.param("pendulum-loop", "float32", 5, "sm80-vertical-resident-lanes1", marks=pytest.mark.slow),
    ],
)
def test_reverse_loops(name: str, dtype: str, rows: int, arrangement: str) -> None:
    check(name, dtype, rows, arrangement)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in SMALL for dtype in RECURRENT[name].dtypes])
def test_every_arrangement_of_every_family(name: str, dtype: str, subtests: Any) -> None:
    for arrangement in case(name, dtype, 131)[1]:
        with subtests.test(arrangement=arrangement):
            check(name, dtype, 131, arrangement)


@pytest.mark.slow
def test_sums_that_the_lanes_share() -> None:
    """64 x 256 sums twice take 256 registers of the threads of one lane; of two, each has half of the rows."""
    check("wide-lstm-loop", "bfloat16", 130, "sm90-vertical-resident-lanes2")


TOLERANCE = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 3e-3}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "steps", "features", "hidden", "sm", "lanes", "replicas"),
    [
        (131, 3, 6, 7, 900, 2, 1),
        (257, 2, 9, 8, 900, 1, 2),
        (65, 1, 6, 7, 800, 2, 1),
        (1, 0, 6, 7, 900, 1, 1),
        (1, 5, 3, 8, 900, 2, 1),
    ],
)
def test_the_gradient_of_an_lstm_and_of_its_embedding(
    rows: int, steps: int, features: int, hidden: int, sm: int, lanes: int, replicas: int, dtype: str
) -> None:
    """Weights, a bias, and rows of a table that indices in any order take: all are added up step by step."""
    written = lstm_backward(rows, steps, features, hidden, dtype)
    operands, program = written.operands(np.random.default_rng(5)), tiled(written.program.only)
    results = list(map(runner(program, *operands, sm=sm, lanes=lanes, replicas=replicas), (1, 2)))
    assert len({tuple(x.tobytes() for x in result) for result in results}) == 1
    assert max(written.errors(results[0], operands)) < TOLERANCE[dtype]


def test_sorted_indices_in_a_loop_are_refused() -> None:
    """Each step would begin again with the first segment."""
    program = tiled(lstm_backward().program.only)
    with pytest.raises(CannotLower, match="sorted indices in a loop"):
        lower.generate_kernel(with_sorted(program), by_hand(program, 900, 1, 1), "program")


def with_sorted(program: TileProgram) -> TileProgram:
    """``program`` with the promise that indices never decrease."""

    def of(i: Instr) -> Instr:
        if i.kind == "sink_at":
            return dataclasses.replace(i, params=make_params(**{**dict(i.params), "sorted": True}))
        if i.block is None:
            return i
        return dataclasses.replace(i, block=dataclasses.replace(i.block, body=tuple(map(of, i.block.body))))

    (stage,) = program.stages
    return dataclasses.replace(program, stages=(dataclasses.replace(stage, body=tuple(map(of, stage.body))),))


# -- planted bugs


def run(seed: int, change: Callable[[str], str] = str, rows: int = 257) -> float:
    written = lstm_backward(rows, 3, 6, 8, "bfloat16")
    operands = written.operands(np.random.default_rng(5))
    return max(written.errors(run_program(tiled(written.program.only), *operands, lanes=2, seed=seed, change=change), operands))


@pytest.mark.parametrize(
    "name",
    [
        "no barrier behind the products",
        *(
            pytest.param(f"no {bug}", marks=pytest.mark.slow)
            for bug in ("barrier in front of the products", "fence between stores and products")
        ),
    ],
)
def test_a_bug_planted_in_the_header_is_found_in_a_loop(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers.emulator_library()
    BUGS[name].plant(HEADER, tmp_path, monkeypatch)
    for seed in (1, 2, 3):
        with pytest.raises(Exception, match=BUGS[name].found):
            run(seed)


def forgotten(source: str) -> str:
    """A step begins with empty sums."""
    changed, count = re.subn(r"(\w+)\.add\((sum\d+),", r"for (auto& m : \2) for (auto& x : m) x = 0; \1.add(\2,", source)
    assert count == 2
    return changed


def not_shared(source: str) -> str:
    """A lane without a tile leaves the others alone: they wait for it at the barrier of the panels."""
    changed, count = re.subn(r"n < rounds; \+\+n", "n < rounds && n * workers + worker < kTiles; ++n", source)
    assert count == 1
    return changed


def test_bugs_planted_in_the_loop_are_found() -> None:
    for seed in (1, 2):
        assert run(seed) < TOLERANCE["bfloat16"]
        assert run(seed, forgotten) > 10 * TOLERANCE["bfloat16"]
        with pytest.raises(Exception, match="deadlock|waits"):
            run(seed, not_shared)


# -- as users have it


def arguments(dtype: str, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(7)
    return tuple(jax.device_put(np.asarray(0.4 * rng.standard_normal(shape), dtype)) for shape in shapes)


USERS: dict[str, tuple[Callable[..., Any], int, tuple[tuple[int, ...], ...]]] = {
    "simple": (recurrence, 5, ((5, 8), (8, 8), (8,), (67, 8), (4, 67, 5))),
    "lstm": (lstm, 3, ((5, 32), (8, 32), (32,), (67, 8), (67, 8), (3, 67, 5))),
    "heun": (heun, 4, ((6, 32), (32,), (32, 6), (67, 6))),
    "pendulum": (pendulum, 4, ((), (), (67,), (67,))),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "heun" else ()) for name in USERS])
def test_the_gradient_of_a_loop_is_made_of_kernels(name: str) -> None:
    recurrence, count, shapes = USERS[name]
    function = jax.grad(functools.partial(loss, recurrence), tuple(range(count)))
    args = arguments("float32", *shapes)
    report = kj.explain(kj.pipeline(function, target="emulator", force=True))(*args)
    loops = [line for line in str(report).splitlines() if "carries stay on chip" in line]
    assert len(loops) == 2, report  # forth and back
    before = runtime.calls()
    got = jax.block_until_ready(jax.jit(kj.pipeline(function, target="emulator", force=True))(*args))
    assert runtime.calls() == before + len(report.regions)
    check_close([np.asarray(x) for x in got], jax.tree.leaves(checks.in_float64(function, *args)), CHAIN * ROUNDING["float32"])


# -- plans


def shapes_of(dtype: str, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def lstm_shapes(dtype: str, hidden: int, rows: int = 8192, steps: int = 20) -> list[jax.ShapeDtypeStruct]:
    state, weights = (rows, hidden), (hidden, 4 * hidden)
    return shapes_of(dtype, weights, weights, weights[1:], state, state, (steps, rows, hidden))


@pytest.mark.parametrize(
    ("recurrence", "args", "sums", "gain"),
    [
        (lstm, lstm_shapes("bfloat16", 64), 3, 1.5),
        (lstm, lstm_shapes("float32", 64), 0, 1.5),  # 512 registers of sums: they are made behind the loop
        (heun, shapes_of("float32", (16, 32), (32,), (32, 16), (8192, 16)), 6, 4),
        (pendulum, shapes_of("float32", (), (), (65536,), (65536,)), 2, 4),
    ],
)
def test_reverse_loops_are_chosen_where_the_model_says_that_they_pay(
    recurrence: Callable[..., Any], args: list[jax.ShapeDtypeStruct], sums: int, gain: float
) -> None:
    function = jax.grad(functools.partial(loss, recurrence), tuple(range(2 if recurrence is pendulum else 3)))
    graph = capture(
        jax.make_jaxpr(function)(*args), context=RewriteContext(TargetCapabilities(divides_gradients=True, runs_loops=True))
    ).graph
    routed = route(graph, "cuda", RouteOptions(device="h200", code=False))
    loops = [(r, graph.ops[i]) for r in routed.regions for i in r.region.ops if graph.ops[i].body is not None]
    ((reverse, _),) = [(r, op) for r, op in loops if op["reverse"]]
    assert len(loops) == 2 and len(reverse.region.sinks) == sums, routed.report
    assert reverse.plan.baseline_seconds / reverse.plan.seconds > gain, routed.report


# -- machine code


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    ("name", "dtype", "arrangement"),
    [
        ("simple-loop", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("heun-loop", "float32", "sm90-vertical-resident-lanes3"),
        ("lstm-loop", "bfloat16", "sm90-vertical-resident-lanes2"),
    ],
)
def test_the_machine_code(name: str, dtype: str, arrangement: str, compiler: str) -> None:
    family = RECURRENT[name]
    of = subject(family.function, *family.shapes(2000, dtype))
    one = test_sass.made(of, arrangements(of)[arrangement], compiler)
    test_sass.check(one)
    test_sass.check_gradients(one)


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler, most", [(COMPILERS[0], 8), pytest.param(COMPILERS[1], 136, marks=pytest.mark.slow)])
def test_what_a_wide_loop_spills(compiler: str, most: int) -> None:
    """Addresses and descriptors of panels are made where they are used; in front of the loop they were 176 and 592 bytes."""
    family = RECURRENT["wide-lstm-loop"]
    of = subject(family.function, *family.shapes(2000, "bfloat16"))
    one = test_sass.made(of, arrangements(of)["sm90-vertical-resident-lanes2"], compiler)
    assert one.resources.spill_bytes <= most
