"""Sums by indices in any order where ``deterministic=False``: rows are added to the result atomically, in the emulator."""

from __future__ import annotations

import dataclasses
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
from kitsune_jax.targets.cuda import lower, nvrtc, sources
from reference.interpret import interpret
from tests.cuda.test_unsorted import ROW, ids
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import by_hand, called, code_of, kernel_cache, run_program
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

RNG = np.random.default_rng(29)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def summed(rows: int, width: int, n: int, dtype: str = "float32", how: str = "sum") -> TileProgram:
    t = Tiles((rows,), 64)
    shape, streams = ((rows, width), ROW) if width > 1 else ((rows,), ((0,),))
    accumulate = None if "int" in dtype else "float32"
    t.sink_at(t.load(shape, dtype, streams), t.load((rows,), "int32", ((0,),)), how, n, accumulate, unordered=True)
    return t.program()


def reference(x: np.ndarray, index: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The sums in float64, and those of the magnitudes."""
    want = np.zeros((2, n, *x.shape[1:]))
    for i, row in zip(index, x.astype(np.float64), strict=True):
        if 0 <= i < n:
            want[:, i] += row, np.abs(row)
    return want[0], want[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["any", "one", "super", "dropped", "none"])
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_indices(kind: str, sm: int, seed: int) -> None:
    rows, width, n = 331, 40, 13
    arrays = [RNG.standard_normal((rows, width)).astype(np.float32), ids(kind, rows, n)]
    (got,) = run_program(summed(rows, width, n), *arrays, sm=sm, lanes=2, replicas=2, seed=seed)
    want, size = reference(*arrays, n)
    assert np.all(np.abs(got - want) <= 1e-5 * size)
    np.testing.assert_allclose(got, interpret(summed(rows, width, n), arrays)[0], atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "width", "n"), [(1, 1, 1), (1, 33, 5), (64, 8, 977), (67, 1, 31), (129, 6, 70_000), (100, 7, 3), (200, 130, 3)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shapes_and_dtypes(dtype: str, rows: int, width: int, n: int) -> None:
    """Tables of any size; widths that take four floats at once, two and one."""
    x = RNG.standard_normal((rows, width) if width > 1 else rows).astype(np_dtype(dtype))
    arrays = [x, ids("dropped", rows, n)]
    (got,) = run_program(summed(rows, width, n, dtype), *arrays, lanes=1, replicas=2)
    assert got.dtype == np_dtype(dtype)
    want, size = reference(*arrays, n)
    assert np.all(np.abs(got.astype(np.float64) - want) <= TOLERANCE[dtype] * size)


@pytest.mark.parametrize(("dtype", "how"), [("int32", "sum"), ("float32", "prod")])
def test_other_folds_are_refused_with_a_reason(dtype: str, how: str) -> None:
    program = summed(100, 16, 9, dtype, "sum")
    program = dataclasses.replace(program, sinks=(dataclasses.replace(program.sinks[0], how=how),))
    with pytest.raises(CannotLower, match=f"a {how} of {dtype} by atomic operations"):
        lower.generate_kernel(program, by_hand(program, 900, 1, 1), "program")


def loss(w: jax.Array, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    summed = jax.ops.segment_sum(jnp.tanh(nodes[senders] @ w), receivers, len(nodes))
    return jnp.sum(summed.astype(jnp.float32) ** 2)


def graph_of(edges: int, n: int, width: int, dtype: str) -> tuple[jax.Array, ...]:
    w, nodes = (jax.device_put(np.asarray(RNG.standard_normal(shape) * 0.3, dtype)) for shape in ((width, width), (n, width)))
    return w, nodes, *(jax.device_put(np.asarray(RNG.integers(0, n, edges), jnp.int32)) for _ in range(2))


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in ("bfloat16", "float16"))])
def test_the_gradient_by_senders_into_a_large_table(dtype: str) -> None:
    """A table that no lane has room for."""
    args = graph_of(300, 1_500, 16, dtype)
    step = kj.pipeline(jax.value_and_grad(loss, (0, 1)), target="emulator", force=True, deterministic=False)
    report = kj.explain(step)(*args)
    assert any("deterministic=False: the last bits of" in note and "test_atomic.py" in note for note in report.notes), report.notes
    value, grads = jax.jit(step)(*args)
    want, want_grads = in_float64(jax.value_and_grad(loss, (0, 1)), *args)
    tolerance = {"float32": 5e-3, "bfloat16": 6e-2, "float16": 1e-2}[dtype]
    assert abs(float(value) - float(want)) < tolerance * float(want)
    for got, reference in zip(grads, want_grads, strict=True):
        error = np.abs(np.asarray(got, np.float64) - np.asarray(reference)).max()
        assert error < tolerance * np.abs(np.asarray(reference)).max()


def test_only_where_it_is_asked_for() -> None:
    args = graph_of(300, 1_500, 16, "float32")
    for options in ({}, {"deterministic": True}):
        report = kj.explain(jax.value_and_grad(loss, (0, 1)), target="emulator", force=True, **options)(*args)
        assert not any("deterministic" in note for note in report.notes)
    report = kj.explain(loss, platform="cpu", force=True, deterministic=False)(*args)  # a CPU has no use for it
    assert not any("deterministic" in note for note in report.notes)


def edge_loss(params: tuple[jax.Array, ...], nodes: jax.Array, edges: jax.Array, *ends: jax.Array) -> jax.Array:
    """A step over edges whose products are not made of the nodes."""
    both = jnp.concatenate([edges, nodes[ends[0]], nodes[ends[1]]], -1)
    messages = jax.nn.relu(both @ params[0]) @ params[1]
    return jnp.sum(jax.ops.segment_sum(messages, ends[1], len(nodes)) ** 2)


@pytest.mark.parametrize(("rows", "n", "width", "atomic"), [(100_000, 10_000, 128, True), (100_000, 20, 16, False)])
def test_the_planner_chooses_by_the_model(rows: int, n: int, width: int, atomic: bool) -> None:
    """A large table is added to atomically, and more operators of the gradient are in calls then; a small one has lanes' tables."""
    shape = jax.ShapeDtypeStruct
    params = shape((3 * width, width), "float32"), shape((width, width), "float32")
    ends = [shape((rows,), "int32")] * 2
    step = jax.value_and_grad(edge_loss, (0, 1))
    found = []
    for deterministic in (True, False):
        explained = kj.explain(step, platform="cuda", device="h200", deterministic=deterministic)
        found.append(explained(params, shape((n, width), "float32"), shape((rows, width), "float32"), *ends))
    assert any("added atomically" in note for note in found[1].notes) == atomic
    assert not any("added atomically" in note for note in found[0].notes)
    assert found[1].ops_pipelined >= found[0].ops_pipelined + (10 if atomic else 0)


def test_a_table_that_the_lanes_have_room_for_needs_no_atomic_additions() -> None:
    """1 000 rows of 16 are 62 KiB of each lane: a deterministic call."""
    shape = jax.ShapeDtypeStruct
    params = shape((48, 16), "float32"), shape((16, 16), "float32")
    ends = [shape((1_000_000,), "int32")] * 2
    explained = kj.explain(kj.pipeline(jax.value_and_grad(edge_loss, (0, 1)), force=True), platform="cuda", device="h200")
    report = explained(params, shape((1_000, 16), "float32"), shape((1_000_000, 16), "float32"), *ends)
    assert report.coverage > 0.9 and not report.regions[0].order
    assert not any("added atomically" in note for note in report.notes)


def test_a_wrong_value_is_an_error_that_says_what_is_right() -> None:
    with pytest.raises(ValueError, match="deterministic='no' is not known: use True or False"):
        kj.pipeline(loss, deterministic="no")


PLANTED = {
    "a load and a store instead of an addition": (
        "      red_add(row + column + i * kEach, part);\n",
        "      float* const at = row + column + i * kEach;\n"
        "      for (int k = 0; k < kEach; ++k) st_global(at + k, ld_l2(at + k) + part[k]);\n",
    ),
    "an index that is out of range": ("valid && i >= 0 && i < rows ?", "valid ?"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_emulator_sees_it(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers, emulator = sources.include_dirs("emulator")
    include = tmp_path / "include"
    shutil.copytree(headers, include)
    file, (right, wrong) = include / "kitsune" / "stage" / "atomic.h", PLANTED[bug]
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    monkeypatch.setattr(sources, "include_dirs", lambda part: (include, emulator) if part == "emulator" else (include,))
    program = Program.of(summed(700, 64, 30))
    code = code_of(program, lanes=2, replicas=3, change=lambda source: f"// planted: {bug}\n{source}")
    x, found = RNG.standard_normal((700, 64)).astype(np.float32), []
    for seed in range(4):
        try:
            called(program, x, ids("dropped", 700, 30), code=code, seed=seed)
        except jax.errors.JaxRuntimeError as e:
            found.append(str(e))
    assert len(found) == 4, "some schedules did not see it"
    assert all(re.search(r"race: |outside global memory|not aligned", why) for why in found), found


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_machine_code(lanes: int, compiler: str) -> None:
    """Four floats an addition, nothing comes back, no shared memory and no spills."""
    program = summed(100_000, 128, 50_000, "bfloat16")
    made = lower.generate_kernel(program, by_hand(program, 900, lanes, 132), "region")
    compiled = compilers.cubin(made.source, "sm_90a", folder_of(compiler))
    code, resources = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
    assert not code.has_local_memory and resources.spill_bytes == resources.stack_bytes == 0
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not (skipped(paths) if code.count("CALL") == 0 else ())
    atomics = [str(i) for i in code.instructions if i.opcode.startswith(("ATOM", "RED"))]
    assert len(atomics) == 16 and all("REDG.E.ADD.F32" in i and "x4." in i for i in atomics), atomics  # 64 floats of a thread
    if lanes > 1:
        pool = register_pool(code, made.launch[3])
        assert pool.fits and all(role.used <= role.registers for role in pool.roles), pool
