"""Sums of a segment softmax in one pass, in the emulator: the largest score of a segment is found while its rows are summed."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kernel_checks.register_pool import register_pool
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import Program, TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, sources
from kitsune_jax.targets.cuda.planning.machines import H200
from tests.cuda.test_segments import ids
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import arrangements, by_hand, called, code_of, kernel_cache, plans, run, run_program, runner, subject

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

RNG = np.random.default_rng(31)
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 4e-3}
Arrays = tuple[np.ndarray, ...]


def softmax_sums(n: int, finite: bool = False) -> Callable[..., Any]:
    """Of values [rows, heads, width] and scores [rows, heads] the sums of values * e, and of e = e^(scores - largest).

    ``finite``: 0 stands for a largest score that is not finite.
    """

    def sums(values: jax.Array, scores: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        by = {"num_segments": n, "indices_are_sorted": True}
        largest = jax.lax.stop_gradient(jax.ops.segment_max(scores, index, **by))
        largest = jnp.where(jnp.isfinite(largest), largest, 0) if finite else largest
        e = jnp.exp(scores - largest[index])
        return jax.ops.segment_sum(values * e[:, :, None], index, **by), jax.ops.segment_sum(e, index, **by)

    return sums


def reference(arrays: Arrays, n: int, finite: bool = False) -> tuple[np.ndarray, ...]:
    """The sums in float64, and those of the magnitudes."""
    v, s = (x.astype(np.float64) for x in arrays[:2])
    total, norm, size = np.zeros((n, *v.shape[1:])), np.zeros((n, *s.shape[1:])), np.zeros((n, *v.shape[1:]))
    with np.errstate(all="ignore"):
        for i in range(n):
            mine = arrays[2] == i
            if mine.any():
                largest = s[mine].max(0)
                e = np.exp(s[mine] - (np.where(np.isfinite(largest), largest, 0) if finite else largest))
                total[i], norm[i] = (v[mine] * e[:, :, None]).sum(0), e.sum(0)
                size[i] = np.abs(v[mine] * e[:, :, None]).sum(0)
    return total, norm, size


def made(kind: str, rows: int, heads: int, width: int, n: int, dtype: str = "float32") -> Arrays:
    values = RNG.standard_normal((rows, heads, width)).astype(np_dtype(dtype))
    return values, (3 * RNG.standard_normal((rows, heads))).astype(np_dtype(dtype)), ids(kind, rows, n)


def program_of(arrays: Arrays, n: int, finite: bool = False) -> tuple[TileProgram, list[np.ndarray]]:
    """With the arrays in its order."""
    of = subject(softmax_sums(n, finite), *map(jnp.asarray, arrays))
    assert [op.kind for op in of.graph.ops].count("scatter_exp_sum") == 2
    plan = next(plan for _, plan in plans(of.graph, of.region, H200) if plan.arrangement == "vertical")
    return of.program(plan), [arrays[of.graph.inputs.index(v)] for v in of.region.inputs]


def check(arrays: Arrays, n: int, finite: bool = False, **how: int) -> None:
    program, operands = program_of(arrays, n, finite)
    got = {x.shape: x.astype(np.float64) for x in run_program(program, *operands, **how)}
    total, norm, size = reference(arrays, n, finite)
    for want, scale in ((total, size), (norm, norm)):
        found = got[want.shape]
        assert np.array_equal(np.isnan(found), np.isnan(want)), np.argwhere(np.isnan(found) != np.isnan(want))
        with np.errstate(invalid="ignore"):
            bad = np.abs(found - want) > TOLERANCE[str(arrays[0].dtype)] * scale + 1e-30
        assert not (bad & np.isfinite(want)).any(), np.nanmax(np.abs(found - want))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["random", "one", "rows", "super", "ends", "dropped", "none"])
@pytest.mark.parametrize(
    "rows, n, lanes, replicas", [(523, 97, 3, 2), (130, 1000, 1, 1), (1, 5, 2, 1), (64, 1, 1, 3), (900, 11, 2, 9)]
)
def test_ids_of_every_kind(kind: str, rows: int, n: int, lanes: int, replicas: int) -> None:
    check(made(kind, rows, 4, 8, n), n, lanes=lanes, replicas=replicas)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads, width", [(1, 2), (1, 40), (3, 2), (8, 8), (33, 5), (5, 31)])
@pytest.mark.parametrize("sm", [900, 800])
def test_heads_of_every_width(heads: int, width: int, dtype: str, sm: int) -> None:
    check(made("super", 300, heads, width, 23, dtype), 23, sm=sm, lanes=2, replicas=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("kind", ["random", "super", "rows"])
def test_scores_that_are_not_finite(finite: bool, kind: str) -> None:
    """Segments with a NaN, an infinity, or nothing but -inf, also in some of the heads and in a part of a segment only."""
    rows, n = 400, 31
    values, scores, index = made(kind, rows, 3, 4, n)
    scores[RNG.random(scores.shape) < 0.3] = -np.inf
    scores[np.isin(index, (4, 5, n // 3)), 1] = -np.inf
    scores[:64, 2] = -np.inf
    scores[index == 7] = -np.inf
    scores[np.flatnonzero(index == 9)[:1], 0] = np.nan
    scores[np.flatnonzero(index == 12)[:1], 0] = np.inf
    check((values, scores, index), n, finite, lanes=3, replicas=2)


def test_large_scores_do_not_overflow_and_equal_inputs_give_equal_bits() -> None:
    """Scores that grow along the stream: every tile, warp and lane has a larger one than those before."""
    rows, n = 700, 3
    values, scores, index = made("super", rows, 2, 8, n)
    scores += np.arange(rows, dtype=np.float32)[:, None] * 5
    check((values, scores, index), n, lanes=3, replicas=2)
    check((values, scores[::-1].copy(), index), n, lanes=3, replicas=2)
    program, operands = program_of((values, scores, index), n)
    results = map(runner(program, *operands, lanes=3, replicas=2), range(5))
    assert len({b"".join(x.tobytes() for x in result) for result in results}) == 1


def attention(of_sender: jax.Array, of_receiver: jax.Array, h: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """What a layer of GAT does with its edges."""
    n = len(h)
    scores = jax.nn.leaky_relu(of_sender[senders] + of_receiver[receivers], 0.2)
    e = jnp.exp(scores - jax.lax.stop_gradient(jax.ops.segment_max(scores, receivers, n))[receivers])
    weights = e / jax.ops.segment_sum(e, receivers, n)[receivers]
    return jax.ops.segment_sum(weights[:, :, None] * h[senders], receivers, n)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_layer_of_gat_is_one_pass_over_its_edges(dtype: str) -> None:
    edges, n, heads, width = 500, 40, 4, 8
    s, r, h = (
        jax.device_put(np.asarray(RNG.standard_normal(shape), dtype)) for shape in ((n, heads), (n, heads), (n, heads, width))
    )
    senders = jax.device_put(np.asarray(RNG.integers(0, n, edges), jnp.int32))
    receivers = jax.device_put(np.asarray(np.where(RNG.random(edges) < 0.5, n // 3, RNG.integers(0, n, edges)), jnp.int32))
    layer = kj.pipeline(attention, target="emulator", force=True)
    report = kj.explain(layer)(s, r, h, senders, receivers)
    edges_of = report.regions[0]
    assert edges_of.rows == edges and edges_of.ops >= 18 and "online scatter-add" in edges_of.order, report
    got = np.asarray(jax.jit(layer)(s, r, h, senders, receivers), np.float64)
    want = in_float64(attention, s, r, h, senders, receivers)
    assert np.abs(got - want).max() < {"float32": 1e-6, "bfloat16": 3e-2}[dtype] * np.abs(want).max()

    def loss(*args: jax.Array) -> jax.Array:
        return jnp.sum(attention(*args, senders, receivers).astype(jnp.float32) ** 2)

    grads = jax.jit(kj.pipeline(jax.grad(loss, (0, 1, 2)), target="emulator", force=True))(s, r, h)
    wants = in_float64(jax.grad(loss, (0, 1, 2)), s, r, h)
    for grad, expected in zip(grads, wants, strict=True):
        error = np.abs(np.asarray(grad, np.float64) - np.asarray(expected)).max()
        assert error < {"float32": 1e-5, "bfloat16": 6e-2}[dtype] * np.abs(np.asarray(expected)).max()


def projected(w: jax.Array, x: jax.Array, receivers: jax.Array) -> jax.Array:
    """Scores and values of edges by a product, so that there is something to share out over stages."""
    n, heads, width = 37, 4, 16
    both = jnp.tanh(x @ w)
    scores, values = 4 * both[:, :heads], both[:, heads:].reshape(-1, heads, width)
    e = jnp.exp(scores - jax.lax.stop_gradient(jax.ops.segment_max(scores, receivers, n))[receivers])
    return jax.ops.segment_sum(e[:, :, None] * values, receivers, n) / (1 + jax.ops.segment_sum(e, receivers, n))[..., None]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_arrangement(dtype: str) -> None:
    w, x = RNG.standard_normal((64, 68)).astype(np_dtype(dtype)) / 4, RNG.standard_normal((200, 64)).astype(np_dtype(dtype))
    receivers = np.where(RNG.random(200) < 0.5, 12, RNG.integers(0, 37, 200)).astype(np.int32)
    with jax.enable_x64(True):
        want = np.asarray(projected(*(jnp.asarray(a.astype(np.float64)) for a in (w, x)), jnp.asarray(receivers)))
    of = subject(projected, *map(jnp.asarray, (w, x, receivers)))
    assert [op.kind for op in of.graph.ops].count("scatter_exp_sum") == 2
    found = arrangements(of)
    assert any("spatial" in name for name in found) and any("lanes3" in name for name in found), list(found)
    for name, plan in found.items():
        (got,) = run(of, plan, seed=len(name))
        error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
        assert error < {"float32": 1e-2, "bfloat16": 6e-2, "float16": 1e-2}[dtype], (name, error)


def with_bug(right: str, wrong: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers, emulator = sources.include_dirs("emulator")
    include = tmp_path / "include"
    shutil.copytree(headers, include)
    file = include / "kitsune" / "stage" / "online.h"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    monkeypatch.setattr(sources, "include_dirs", lambda part: (include, emulator) if part == "emulator" else (include,))


PLANTED = {
    "the tops of the next tile lie where those of this one are read": ("    turn ^= 1;\n    const u32 two", "    const u32 two"),
    "runs are joined before all warps have theirs": (
        "  KITSUNE_DEVICE void join() {\n    bar_sync(barrier, kGroupThreads);\n",
        "  KITSUNE_DEVICE void join() {\n",
    ),
    "tops are read from the rows before all are there": ("    }\n    syncwarp();\n  }\n};", "    }\n  }\n};"),
    "a sum's tops are overwritten while another's are joined": (
        "    bar_sync(barrier, kGroupThreads);  // another",
        "    // another",
    ),
}


OFTEN = "the tops of the next tile lie where those of this one are read", "runs are joined before all warps have theirs"


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in OFTEN else pytest.mark.slow) for bug in PLANTED])
def test_the_emulator_sees_a_race(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bug(*PLANTED[bug], tmp_path, monkeypatch)
    arrays = made("random", 700, 4, 8, 97)
    tiles, operands = program_of(arrays, 97)
    program = Program.of(tiles)
    code = code_of(program, lanes=2, replicas=20 if "another" in bug else 2, change=lambda source: f"// planted: {bug}\n{source}")
    found = []
    for seed in range(8):
        try:
            called(program, *operands, code=code, seed=seed)
        except jax.errors.JaxRuntimeError as e:
            found.append(str(e))
    assert len(found) >= 4, "few schedules saw it"
    assert all(re.search(r"race: |which nothing has written", why) for why in found), found


WRONG = {
    "a sum is not scaled again": ("sum * rescaling(at, to) +", "sum +"),
    "what comes is not scaled": ("x * rescaling(top, to);", "x;"),
    "a run's first rows have another top": ("top[r] = top[r + 1];", "top[r] = top[r];"),
    "rows of no segment count": ("inside >> r & 1 ? maximum(most, score) : most", "maximum(most, score)"),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_scale_is_a_wrong_result(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bug(*WRONG[bug], tmp_path, monkeypatch)
    values, scores, index = made("dropped", 700, 4, 8, 5)
    scores[index < 0] = 200.0
    with pytest.raises(AssertionError):
        check((values, scores, index), 5, lanes=2, replicas=2)


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_machine_code(dtype: str, lanes: int, compiler: str) -> None:
    """No spills, roles within their registers, nobody leaves a barrier out."""
    program, _ = program_of(made("random", 20_000, 8, 8, 500, dtype), 500)
    found = lower.generate_kernel(program, by_hand(program, 900, lanes, 132), "region")
    compiled = compilers.cubin(found.source, "sm_90a", folder_of(compiler))
    code, resources = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
    assert not code.has_local_memory and resources.spill_bytes == resources.stack_bytes == 0
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not (skipped(paths) if code.count("CALL") == 0 else ())
    atomics = sum(i.opcode.startswith(("ATOM", "RED.")) for i in code.instructions)
    assert atomics == 3  # the counter of lanes, and of each of the two sums the counters of its groups of 32 lanes
    if lanes > 1:
        pool = register_pool(code, found.launch[3])
        assert pool.fits and all(role.used <= role.registers for role in pool.roles), pool
