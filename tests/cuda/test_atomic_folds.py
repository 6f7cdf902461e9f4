"""Maxima and minima by indices in any order, folded atomically into tables of any size, in the emulator: equal bits always."""

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
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, sources
from reference.interpret import interpret
from tests.cuda.test_atomic import summed
from tests.cuda.test_unsorted import ids
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import by_hand, called, code_of, kernel_cache, run_program, runner

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

RNG = np.random.default_rng(37)
HOW = {"max": np.maximum, "min": np.minimum}
DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32"]


def drawn(rows: int, width: int, dtype: str) -> np.ndarray:
    """Both signs, zeros of both signs, infinities, NaNs of both signs; integers up to the largest."""
    shape = (rows, width) if width > 1 else (rows,)
    if "int" in dtype:
        info = np.iinfo(dtype)
        return RNG.integers(info.min, info.max, shape, np_dtype(dtype), endpoint=True)
    x = RNG.standard_normal(shape).astype(np_dtype(dtype))
    for value in (0.0, -0.0, np.inf, -np.inf):
        x[RNG.random(shape) < 0.05] = value
    x[RNG.random(shape) < 0.004] = np.nan
    x[RNG.random(shape) < 0.004] = np.copysign(np.nan, -1)
    return x


def reference(x: np.ndarray, index: np.ndarray, n: int, how: str) -> np.ndarray:
    """In the order of the rows; +0 is larger than -0."""
    floats = "int" not in str(x.dtype)
    nothing = {"max": -np.inf, "min": np.inf}[how] if floats else getattr(np.iinfo(x.dtype), {"max": "min", "min": "max"}[how])
    want = np.full((n, *x.shape[1:]), nothing, x.dtype)
    for i, row in zip(index, x, strict=True):
        if 0 <= i < n:
            both = np.stack([want[i], row]).astype(np.float64 if floats else np.int64)
            chosen = HOW[how](both[0], both[1])
            if floats:
                negative = np.signbit(both).all(0) if how == "max" else np.signbit(both).any(0)
                chosen = np.where((both == 0).all(0), np.where(negative, -0.0, 0.0), chosen)
            want[i] = chosen.astype(x.dtype)
    return want


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal numbers, also in the sign of zeros; NaN where NaN should be."""
    if "int" in str(want.dtype):
        return got.dtype == want.dtype and np.array_equal(got, want)
    a, b = got.astype(np.float64), want.astype(np.float64)
    signs = np.signbit(a) == np.signbit(b)
    return got.dtype == want.dtype and np.array_equal(a, b, equal_nan=True) and bool((signs | np.isnan(a)).all())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["any", "one", "descending", "super", "dropped", "none"])
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize("how", HOW)
def test_any_indices(how: str, kind: str, sm: int) -> None:
    rows, width, n = 331, 40, 13
    program, arrays = summed(rows, width, n, how=how), [drawn(rows, width, "float32"), ids(kind, rows, n)]
    found = [one for (one,) in map(runner(program, *arrays, sm=sm, lanes=2, replicas=2), range(3))]
    assert same(found[0], reference(*arrays, n, how))
    assert len({x.tobytes() for x in found}) == 1
    np.testing.assert_array_equal(found[0], interpret(program, arrays)[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "width", "n"), [(1, 1, 1), (1, 33, 5), (64, 8, 977), (67, 1, 31), (129, 6, 70_000), (100, 7, 3), (200, 130, 3)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_shapes_and_dtypes(how: str, dtype: str, rows: int, width: int, n: int) -> None:
    """Blocks of 32 and of 8 columns, one number to a row; tables of any size."""
    arrays = [drawn(rows, width, dtype), ids("dropped", rows, n)]
    (got,) = run_program(summed(rows, width, n, dtype, how), *arrays, lanes=1, replicas=2)
    assert same(got, reference(*arrays, n, how))


# -- as users have it


def both_ends(w: jax.Array, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Messages fold by receivers, and by senders: a stream has one order."""
    messages = jnp.tanh(nodes[senders] @ w)
    n = len(nodes)
    return jax.ops.segment_sum(messages, receivers, n), jax.ops.segment_max(messages, senders, n)


FAST = {(1, "float16"), (67, "bfloat16"), (300, "float32")}
EVERY = [
    pytest.param(edges, dtype, marks=[] if (edges, dtype) in FAST else pytest.mark.slow)
    for edges in (1, 67, 300)
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.mark.parametrize("edges, dtype", EVERY)
def test_a_maximum_by_a_second_index_into_a_large_table(edges: int, dtype: str) -> None:
    """A table that no lane has room for; the sums have an order, and the maxima none: no option is needed, and bits are equal."""
    n, width = 3_100, 16
    w, nodes = (jax.device_put(np.asarray(RNG.standard_normal(shape) * 0.3, dtype)) for shape in ((width, width), (n, width)))
    ends = [jax.device_put(np.asarray(RNG.integers(0, n, edges), jnp.int32)) for _ in range(2)]
    pipelined = kj.pipeline(both_ends, target="emulator", force=True)
    report = kj.explain(pipelined)(w, nodes, *ends)
    (region,) = report.regions
    assert {"scatter-add", "scatter-max"} <= {op for stage in region.stages for op in stage.ops}, region
    assert not any("deterministic" in note for note in report.notes)
    sums, largest = jax.jit(pipelined)(w, nodes, *ends)
    want = in_float64(both_ends, w, nodes, *ends)
    touched = np.isin(np.arange(n), np.asarray(ends[0]))
    assert np.all(np.asarray(largest, np.float64)[~touched] == -np.inf)  # as JAX has it
    tolerance = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    for got, reference in ((sums, want[0]), (largest[touched], want[1][touched])):
        assert np.abs(np.asarray(got, np.float64) - np.asarray(reference)).max() < tolerance


def by_ends(w: jax.Array, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> tuple[jax.Array, ...]:
    """With a part of the messages that every edge has of its own."""
    messages = jax.nn.relu(jnp.concatenate([nodes[senders], edges], -1) @ w)
    return jax.ops.segment_sum(messages, receivers, len(nodes)), jax.ops.segment_max(messages, senders, len(nodes))


def test_the_planner_takes_it_where_the_model_says_so() -> None:
    """4 000 000 edges by both ends are one call; by one index alone the stream is in its order."""
    shape = jax.ShapeDtypeStruct
    weights, nodes, edges = (shape(s, "float32") for s in ((256, 128), (10_000, 128), (4_000_000, 128)))
    args = weights, nodes, edges, *[shape((4_000_000,), "int32")] * 2
    (two,) = kj.explain(by_ends, platform="cuda", device="h200")(*args).regions
    assert two.order and {"scatter-add", "scatter-max"} <= {op for stage in two.stages for op in stage.ops}
    (one,) = kj.explain(lambda *args: by_ends(*args)[1], platform="cuda", device="h200")(*args).regions
    assert "scatter-max" in one.order


# -- planted bugs


PLANTED = {
    "the sign of a number is not looked at": ("if (on && b >= 0) red_max", "if (on) red_max"),
    "a NaN keeps its sign": ("is_nan(v) ? 0x7fffffff : static_cast<i32>(bits(v))", "static_cast<i32>(bits(v))"),
    "the last run of a warp is forgotten": ("    close(open, column, acc, true);\n    syncwarp();", "    syncwarp();"),
    "columns beyond the row": ("row >= 0 && column < columns)", "row >= 0)"),
    "an index that is out of range": ("valid[h] && i >= 0 && i < rows) found.mine", "valid[h]) found.mine"),
    "a load and a store": (
        "  if (on && b >= 0) red_max(reinterpret_cast<i32*>(p), b);",
        "  if (on && b >= 0) st_global(p, ld_l2(p) < v ? v : ld_l2(p));",
    ),
}


OFTEN = "the sign of a number is not looked at", "the last run of a warp is forgotten", "a load and a store"


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in OFTEN else pytest.mark.slow) for bug in PLANTED])
def test_it_is_found(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers, emulator = sources.include_dirs("emulator")
    include = tmp_path / "include"
    shutil.copytree(headers, include)
    file, (right, wrong) = include / "kitsune" / "stage" / "atomic.h", PLANTED[bug]
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    monkeypatch.setattr(sources, "include_dirs", lambda part: (include, emulator) if part == "emulator" else (include,))
    program = Program.of(summed(700, 60, 301, how="max"))
    code = code_of(program, lanes=2, replicas=3, change=lambda source: f"// planted: {bug}\n{source}")
    arrays = drawn(700, 60, "float32"), ids("dropped", 700, 301)
    for seed in range(3):
        try:
            (got,) = called(program, *arrays, code=code, seed=seed)
        except jax.errors.JaxRuntimeError as e:
            assert re.search(r"race: |outside global memory|nothing has written", str(e)), e
            continue
        assert not same(got, reference(*arrays, 301, "max"))


# -- machine code


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_machine_code(lanes: int, compiler: str) -> None:
    """Nothing comes back, no loop that tries again, no spills; a float's maximum is one of integers, by its sign."""
    program = summed(100_000, 128, 50_000, "bfloat16", "max")
    made = lower.generate_kernel(program, by_hand(program, 900, lanes, 132), "region")
    compiled = compilers.cubin(made.source, "sm_90a", folder_of(compiler))
    code, resources = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
    assert not code.has_local_memory and resources.spill_bytes == resources.stack_bytes == 0
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not (skipped(paths) if code.count("CALL") == 0 else ())
    atomics = [str(i) for i in code.instructions if i.opcode.startswith(("ATOM", "RED")) and "REDUX" not in i.opcode]
    assert atomics and all(re.search(r"REDG\.E\.(MAX\.S32|MIN)\.STRONG\.GPU", i) for i in atomics), atomics
    if lanes > 1:
        pool = register_pool(code, made.launch[3])
        assert pool.fits and all(role.used <= role.registers for role in pool.roles), pool
