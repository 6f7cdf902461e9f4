"""Sinks by indices in any order as kernels, in the emulator: each lane has a table of its own, all are folded in a fixed order."""

from __future__ import annotations

import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kernel_checks.register_pool import register_pool
from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import Program, TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, sources, tiles
from reference.interpret import interpret
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import by_hand, called, code_of, kernel_cache, run_program, runner
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
RNG = np.random.default_rng(23)
WIDE = {"float32", "bfloat16", "float16"}


def summed(rows: int, width: int, n: int, dtype: str = "float32", how: str = "sum") -> TileProgram:
    t = Tiles((rows,), 64)
    shape, streams = ((rows, width), ROW) if width > 1 else ((rows,), ((0,),))
    t.sink_at(t.load(shape, dtype, streams), t.load((rows,), "int32", ((0,),)), how, n, "float32" if dtype in WIDE else None)
    return t.program()


def whole(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Whole numbers, of which sums are exact."""
    return RNG.integers(0 if dtype == "uint32" else -3, 4, shape).astype(np_dtype(dtype))


def ids(kind: str, rows: int, n: int) -> np.ndarray:
    found = RNG.integers(0, n, rows).astype(np.int32)
    if kind == "one":
        found[:] = n // 2
    if kind == "descending":
        found = np.sort(found)[::-1].copy()
    if kind == "super":
        found = np.where(RNG.random(rows) < 0.5, n // 3, found).astype(np.int32)
    if kind == "dropped":
        found = np.where(RNG.random(rows) < 0.4, RNG.choice(np.array([-(2**31), -1, n, 2**31 - 1], np.int32), rows), found)
    if kind == "none":
        found[:] = n
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["any", "one", "descending", "super", "dropped", "none"])
@pytest.mark.parametrize("sm", [900, 800])
def test_any_indices(kind: str, sm: int) -> None:
    rows, width, n = 331, 40, 13
    arrays = [whole(rows, width), ids(kind, rows, n)]
    (got,) = run_program(summed(rows, width, n), *arrays, sm=sm, lanes=2, replicas=2)
    assert np.array_equal(got, interpret(summed(rows, width, n), arrays)[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "width", "n"), [(1, 1, 1), (1, 33, 5), (64, 8, 97), (67, 1, 31), (129, 16, 7), (300, 130, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_shapes_and_dtypes(dtype: str, rows: int, width: int, n: int) -> None:
    """Against float64, of whole numbers that a half holds: every sum is exact."""
    x = whole(rows, width, dtype=dtype) if width > 1 else whole(rows, dtype=dtype)
    arrays = [x, ids("dropped", rows, n)]
    (got,) = run_program(summed(rows, width, n, dtype), *arrays, lanes=1, replicas=2)
    want = np.zeros(got.shape, np.float64)
    for i, row in zip(arrays[1], x.astype(np.float64), strict=True):
        if 0 <= i < n:
            want[i] += row
    assert np.array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("how", ["max", "min", "prod"])
def test_other_folds(how: str) -> None:
    rows, width, n = 200, 24, 9
    arrays = [1 + whole(rows, width) / 64, ids("dropped", rows, n)]
    arrays[1][arrays[1] == 4] = 5  # nothing is folded into row 4
    (got,) = run_program(summed(rows, width, n, how=how), *arrays, lanes=2, replicas=2)
    want = interpret(summed(rows, width, n, how=how), arrays)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_many_lanes_are_folded_in_groups_and_in_one_order() -> None:
    """More lanes than are folded at once; sums of any numbers have the same bits under every schedule."""
    rows, width, n = 20 * 64, 32, 6
    program = summed(rows, width, n)
    x, index = RNG.standard_normal((rows, width)).astype(np.float32), ids("any", rows, n)
    found = {one[0].tobytes() for one in map(runner(program, x, index, lanes=2, replicas=10), range(4))}
    assert len(found) == 1
    want = np.zeros((n, width))
    np.add.at(want, index, x.astype(np.float64))
    np.testing.assert_allclose(np.frombuffer(found.pop(), np.float32).reshape(n, width), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_by_senders_of_a_stream_by_receivers(dtype: str) -> None:
    """Two sums by different indices: a stream has one order, and a small table needs none."""
    edges, n, width = 150, 12, 16

    def loss(w: jax.Array, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        summed = jax.ops.segment_sum(jnp.tanh(nodes[senders] @ w), receivers, n)
        return jnp.sum(summed.astype(jnp.float32) ** 2)

    w, nodes = (jax.device_put(np.asarray(RNG.standard_normal(shape) * 0.3, dtype)) for shape in ((width, width), (n, width)))
    indices = [jax.device_put(np.asarray(RNG.integers(0, n, edges), jnp.int32)) for _ in range(2)]
    step = kj.pipeline(jax.value_and_grad(loss, (0, 1)), target="emulator", force=True)
    report = kj.explain(step)(w, nodes, *indices)
    assert report.coverage > 0.9
    value, grads = jax.jit(step)(w, nodes, *indices)
    want, want_grads = in_float64(jax.value_and_grad(loss, (0, 1)), w, nodes, *indices)
    tolerance = {"float32": 5e-3, "bfloat16": 6e-2}[dtype]
    assert abs(float(value) - float(want)) < tolerance * float(want)
    for got, reference in zip(grads, want_grads, strict=True):
        error = np.abs(np.asarray(got, np.float64) - np.asarray(reference)).max()
        assert error < tolerance * np.abs(np.asarray(reference)).max()


@pytest.mark.parametrize("kind", ["super", "dropped"])
@pytest.mark.parametrize(("width", "n"), [(33, 700), (128, 370), (2, 5_900)])
def test_a_table_that_takes_most_of_the_shared_memory(width: int, n: int, kind: str) -> None:
    """One lane to a CTA; tables of 185 KiB."""
    rows = 200
    arrays = [whole(rows, width), ids(kind, rows, n)]
    program = summed(rows, width, n)
    (got,) = run_program(program, *arrays, lanes=1, replicas=3)
    assert np.array_equal(got, interpret(program, arrays)[0])
    with pytest.raises(CannotLower, match="for tiles in shared memory; a CTA has"):
        lower.generate_kernel(program, by_hand(program, 900, 2, 3), "program")


def test_a_table_that_does_not_fit_is_refused_with_a_reason() -> None:
    n = tiles.MOST_TABLE_BYTES // (4 * 32)
    with pytest.raises(CannotLower, match="unsorted indices into .* rows of 32 columns: a lane's table has 196608 bytes"):
        lower.generate_kernel(summed(100, 32, n), by_hand(summed(100, 32, n), 900, 1, 1), "program")


PLANTED = {
    "rows are folded before all warps have written them": (
        "    bar_sync(barrier, kGroupThreads);\n    const int column",
        "    const int column",
    ),
    "the next block is written while this one is folded": (
        "How::fold(from_word<V>(ld_shared(mine + row * W)), x)));\n    }\n    bar_sync(barrier, kGroupThreads);\n",
        "How::fold(from_word<V>(ld_shared(mine + row * W)), x)));\n    }\n",
    ),
    "two groups fold into one row": ("row % kGroups != group) continue;", "r % kGroups != group) continue;"),
    "the fold of a group of lanes does not wait for it": ("    if (!group.last()) return;\n", "    (void)group;\n"),
}


OFTEN = "the next block is written while this one is folded", "two groups fold into one row"


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in OFTEN else pytest.mark.slow) for bug in PLANTED])
def test_the_emulator_sees_a_race(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers, emulator = sources.include_dirs("emulator")
    include = tmp_path / "include"
    shutil.copytree(headers, include)
    file, (right, wrong) = include / "kitsune" / "stage" / "table.h", PLANTED[bug]
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    monkeypatch.setattr(sources, "include_dirs", lambda part: (include, emulator) if part == "emulator" else (include,))
    program = Program.of(summed(700, 64, 30))
    code = code_of(program, lanes=2, replicas=3, change=lambda source: f"// planted: {bug}\n{source}")
    found = []
    for seed in range(6):
        try:
            called(program, whole(700, 64), ids("any", 700, 30), code=code, seed=seed)
        except jax.errors.JaxRuntimeError as e:
            found.append(str(e))
    assert len(found) >= 4, "few schedules saw it"
    assert all(re.search(r"race: |which nothing has written", why) for why in found), found


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_machine_code(lanes: int, compiler: str) -> None:
    """No spills, roles within their registers, nobody leaves a barrier out; and no atomic operation on a result."""
    program = summed(100_000, 128, 64, "bfloat16")
    made = lower.generate_kernel(program, by_hand(program, 900, lanes, 132), "region")
    compiled = compilers.cubin(made.source, "sm_90a", folder_of(compiler))
    code, resources = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
    assert not code.has_local_memory and resources.spill_bytes == resources.stack_bytes == 0
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not (skipped(paths) if code.count("CALL") == 0 else ())
    assert sum(i.opcode.startswith(("ATOM", "RED.")) for i in code.instructions) == 2  # the counters of lanes and of groups
    if lanes > 1:
        pool = register_pool(code, made.launch[3])
        assert pool.fits and all(role.used <= role.registers for role in pool.roles), pool
