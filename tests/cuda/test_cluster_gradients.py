"""Gradients through time of loops whose weights are shared out over a cluster: a CTA multiplies its columns of the cotangents of
gates with its rows of the weights, and the CTAs hand each other the sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import PlannedRegion, RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.spec import ROWS
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from tests.cuda.test_cluster_loops import LAYERS, TOLERANCE, arguments, check_bug, check_case, heun, padded, stacked, tiled
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import kernel_cache, run_program
from tests.support.programs import Array, Case
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")


def lstm_reverse(rows: int, steps: int, features: int, hidden: int, dtype: str) -> Case:
    """The way back of an LSTM: dh and dc are carried, dx and the cotangents of the gates are stored for each step."""
    t, streams = Tiles((rows,), 64), ((), (0,), ())
    gates = t.input((steps, rows, 4 * hidden), dtype, streams)  # i, f, g, o, activated
    cells, before = (t.input((steps, rows, hidden), "float32", streams) for _ in range(2))
    cotangents = t.input((steps, rows, hidden), dtype, streams)
    w, u = t.load((features, 4 * hidden), dtype), t.load((hidden, 4 * hidden), dtype)
    initial = t.load((rows, hidden), "float32", ((0,), ())), t.load((rows, hidden), "float32", ((0,), ()))
    dxs, dzs = (t.output((steps, rows, k), dtype, streams) for k in (features, 4 * hidden))
    one = t.broadcast(t.literal(1.0), (hidden,), ())

    def to(x: int, of: str) -> int:
        return x if t.values[x].dtype == of else t.op("convert_element_type", x, dtype=of, new_dtype=of)

    with t.loop(steps, *initial, reverse=True) as loop:

        def here(array: int) -> int:
            return to(t.reshape(t.load_slice(array, (loop.index, 0, 1, 1)), t.inputs[array].loaded.shape[1:]), "float32")

        def slope(a: int, by: int) -> int:
            return t.op("mul", by, t.op("mul", a, t.op("sub", one, a)))

        activated = here(gates)
        i, f, g, o = (
            t.op("slice", activated, shape=(hidden,), start=(0, k * hidden), limit=(ROWS, (k + 1) * hidden), strides=(1, 1))
            for k in range(4)
        )
        dh, tanh = t.op("add", loop.carries[0], here(cotangents)), t.op("tanh", here(cells))
        kept = t.op("sub", one, t.op("mul", tanh, tanh))
        dc = t.op("add", loop.carries[1], t.op("mul", t.op("mul", dh, o), kept))
        d_g = t.op("mul", t.op("mul", dc, i), t.op("sub", one, t.op("mul", g, g)))
        d_f, d_i = slope(f, t.op("mul", dc, here(before))), slope(i, t.op("mul", dc, g))
        dz = to(t.concat(d_i, d_f, d_g, slope(o, t.op("mul", dh, tanh)), dimension=1), dtype)
        t.store_slice(t.reshape(dz, (1, 4 * hidden)), dzs, (loop.index, 0, 1, 1))
        dx = to(t.matmul(dz, w, (((1,), (1,)), ((), ())), "float32"), dtype)
        t.store_slice(t.reshape(dx, (1, features)), dxs, (loop.index, 0, 1, 1))
        loop.next(t.matmul(dz, u, (((1,), (1,)), ((), ())), "float32"), t.op("mul", dc, f))
    for result in loop.results:
        t.store(result, (rows, hidden), ((0,), ()))

    def operands(rng: np.random.Generator) -> list[Array]:
        def draw(*shape: int, scale: float = 1.0, of: str = dtype) -> Array:
            return np.asarray(scale * rng.standard_normal(shape)).astype(np.dtype(of))

        z = rng.standard_normal((steps, rows, 4, hidden))
        z = np.where((np.arange(4) == 2)[:, None], np.tanh(z), 1 / (1 + np.exp(-z)))
        return [
            z.astype(np.dtype(dtype)).reshape(steps, rows, 4 * hidden),
            *(draw(steps, rows, hidden, of="float32") for _ in range(2)),
            draw(steps, rows, hidden),
            *(draw(k, 4 * hidden, scale=hidden**-0.5) for k in (features, hidden)),
            *(draw(rows, hidden, of="float32") for _ in range(2)),
        ]

    def reference(gates, cells, before, cotangents, w, u, dh, dc) -> list[Array]:
        dxs, dzs = np.zeros((steps, rows, features)), np.zeros((steps, rows, 4 * hidden))
        for s in reversed(range(steps)):
            i, f, g, o = np.split(gates[s], 4, axis=1)
            dh, tanh = dh + cotangents[s], np.tanh(cells[s])
            dc = dc + dh * o * (1 - tanh**2)
            d_i, d_f, d_o = dc * g * i * (1 - i), dc * before[s] * f * (1 - f), dh * tanh * o * (1 - o)
            dzs[s] = dz = np.concatenate([d_i, d_f, dc * i * (1 - g**2), d_o], axis=1)
            dxs[s], dh, dc = dz @ w.T, dz @ u.T, dc * f
        return [dxs, dzs, dh, dc]

    return Case(Program.of(t.program()), operands, reference)


@pytest.mark.parametrize("dtype, hidden, features, lanes, cluster", [
    ("bfloat16", 64, 64, 1, 2), ("float32", 128, 128, 1, 4), ("float16", 128, 128, 2, 4),
])  # fmt: skip
def test_every_cta_adds_up_columns_of_its_own(dtype: str, hidden: int, features: int, lanes: int, cluster: int) -> None:
    """131 rows are three tiles for the lanes of one cluster."""
    check_case(lstm_reverse(131, 3, features, hidden, dtype), dtype, seeds=4, lanes=lanes, cluster=cluster)


@pytest.mark.parametrize("rows, steps", [(1, 1), (67, 0), (193, 7)])
def test_trip_counts_and_rows(rows: int, steps: int) -> None:
    """Two clusters; of one row the second has none."""
    check_case(lstm_reverse(rows, steps, 64, 64, "bfloat16"), "bfloat16", cluster=2, lanes=1, replicas=2)


BUGS = {
    "a sum that is not given back": (("exchange", ".rd_release("), "deadlock|wait"),
    "no wait for the others' sums": (("exchange", ".rd_acquire("), "race|never|read"),
    "no wait for a free entry": (("exchange", ".wr_acquire("), "race|write"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_told(bug: str) -> None:
    check_bug(lstm_reverse(64, 7, 64, 64, "bfloat16"), *BUGS[bug])


def test_columns_in_the_wrong_place_are_seen() -> None:
    case = lstm_reverse(64, 2, 64, 64, "bfloat16")
    operands = case.operands(np.random.default_rng(5))

    def planted(right: str, wrong: str) -> float:
        def change(source: str) -> str:
            assert right in source
            return source.replace(right, wrong)

        return max(case.errors(run_program(tiled(case), *operands, cluster=2, change=change), operands))

    assert planted("slab", "slab") < TOLERANCE["bfloat16"]
    assert planted("% 4, v, i / 4)", "% 4, v, 1 - i / 4)") > 0.1  # each CTA gets what the other needs
    with pytest.raises(Exception, match="race"):
        planted("b / 1 * 32", "b / 1 * 0")  # all groups of columns are stored where the first one is


# -- from a user's function


def gradient(cell: str) -> Any:
    def loss(*args: jax.Array) -> jax.Array:
        return jnp.sum(LAYERS[cell][0](*args).astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1, 2, 3))


@pytest.mark.parametrize(
    "cell, dtype",
    [
        ("lstm", "float32"),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("gru", "bfloat16"), ("lstm", "float16"), ("gru", "float32"))),
    ],
)
def test_both_loops_are_over_clusters(cell: str, dtype: str) -> None:
    """As JAX users write it, against float64, under two schedules."""
    args, step = arguments(cell, 128, 3, 70, dtype), gradient(cell)
    report = kj.explain(kj.pipeline(step, force=True), platform="cuda", device="h200")(*args)
    assert (
        sum("clusters of" in str(region.traits) for region in report.regions if any("scan" in s.name for s in region.stages)) == 2
    )
    assert not any(r.op == "scan" for r in report.rejected)
    pipelined, found = jax.jit(kj.pipeline(step, target="emulator", force=True)), []
    for seed in (1, 2):
        runtime.set_emulator_seed(seed)
        found.append([np.asarray(x) for x in pipelined(*args)])
    want = in_float64(step, *args)
    for g, again, w in zip(*found, want, strict=True):
        assert np.abs(g.astype(np.float64) - w).max() < 2 * TOLERANCE[dtype] * np.abs(w).max()
        assert g.tobytes() == again.tobytes()


def side_by_side(w: jax.Array, b: jax.Array, xs: jax.Array) -> jax.Array:
    """An LSTM that multiplies x and h as one: on the way back dx and dh are columns of one product."""

    def step(carry: Any, x: jax.Array) -> Any:
        c, h = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w + b, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    return jax.lax.scan(step, (jnp.zeros((xs.shape[1], b.size // 4), xs.dtype),) * 2, xs)[1]


def test_columns_of_a_product_that_are_cut_apart() -> None:
    def step(*args: jax.Array) -> Any:
        return jax.grad(lambda *a: jnp.sum(side_by_side(*a).astype(jnp.float32) ** 2), (0, 1, 2))(*args)

    w, u, b, xs = arguments("lstm", 128, 3, 70, "bfloat16")
    args = (jnp.concatenate([w, u]), b, xs)
    report = kj.explain(kj.pipeline(step, force=True), platform="cuda", device="h200")(*args)
    assert (
        sum("clusters of" in str(region.traits) for region in report.regions if any("scan" in s.name for s in region.stages)) == 2
    )
    found = jax.jit(kj.pipeline(step, target="emulator", force=True))(*args)
    want = in_float64(step, *args)
    for g, right in zip(found, want, strict=True):
        assert np.abs(np.asarray(g, np.float32) - right).max() < 2 * TOLERANCE["bfloat16"] * np.abs(right).max()


@pytest.mark.parametrize(
    "loop, dtype, width",
    [(padded, "float32", 128), (stacked, "bfloat16", 256), pytest.param(heun, "float16", 256, marks=pytest.mark.slow)],
)
def test_gradients_of_what_a_step_may_do(loop: Callable[..., Any], dtype: str, width: int) -> None:
    """Sums of products that wait for each other, of carries, and beside columns that are handed on."""
    rng, (steps, rows) = np.random.default_rng(3), (3, 67)
    shapes = (width, width), (width, width), (rows, width), (steps, rows, width)
    args = [jax.device_put(np.asarray(k * rng.standard_normal(s), dtype)) for k, s in zip((0.05, 0.05, 1, 1), shapes, strict=True)]
    seen = jax.device_put(rng.random((steps, rows)) < 0.7)

    def step(*args: jax.Array) -> Any:
        def loss(*args: jax.Array) -> jax.Array:
            floats = [x for x in jax.tree.leaves(loop(*args, seen)) if x.dtype != jnp.int32]
            return sum(jnp.sum(jnp.sin(x if x.dtype == jnp.float64 else x.astype(jnp.float32))) for x in floats)

        return jax.grad(loss, (0, 1, 2, 3))(*args)

    report = kj.explain(kj.pipeline(step, force=True), platform="cuda", device="h200")(*args)
    assert ["clusters of" in str(r.traits) for r in report.regions if any("scan" in s.name for s in r.stages)] == [True, True]
    found = jax.jit(kj.pipeline(step, target="emulator", force=True))(*args)
    want = in_float64(step, *args)
    for g, w in zip(found, want, strict=True):
        assert np.abs(np.asarray(g, np.float64) - w).max() <= TOLERANCE[dtype] * np.abs(w).max()


@functools.cache
def planned(cell: str, dtype: str, width: int = 128, force: bool = True) -> PlannedRegion:
    """The reverse loop of 128 steps of 256 sequences."""
    gates = LAYERS[cell][1]
    shapes = (width, gates * width), (width, gates * width), (gates * width,), (128, 256, width)
    jaxpr = jax.make_jaxpr(gradient(cell))(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    graph = capture(
        jaxpr,
        context=RewriteContext(
            TargetCapabilities(divides_gradients=True, runs_loops=True, sums_online=True, sums_by_batch=False, most_summed=1 << 16)
        ),
    ).graph
    found = route(graph, "cuda", RouteOptions(device="h200", code=False, force=force))
    regions = [r for r in found.regions if r.phases[0].plan.cluster > 1]
    assert len(regions) == 2
    return regions[1]


@pytest.mark.parametrize("cell, width, dtype, size", [
    ("lstm", 128, "bfloat16", 4), ("lstm", 128, "float32", 4), ("lstm", 256, "bfloat16", 8), ("gru", 128, "bfloat16", 4),
    ("gru", 128, "float32", 4),
])  # fmt: skip
def test_as_few_ctas_as_hold_the_weights(cell: str, width: int, dtype: str, size: int) -> None:
    plan = planned(cell, dtype, width).phases[0].plan
    assert plan.cluster == plan.stages[0].split == size


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_planner_takes_it_where_xla_is_slower(cell: str) -> None:
    """128 steps of 256 sequences, against XLA's time of the same loop without the sums and dx."""
    plan = planned(cell, "bfloat16", force=False).phases[0].plan
    assert plan.seconds < plan.baseline_seconds


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("cell, width, dtype", [
    ("lstm", 128, "bfloat16"), ("lstm", 256, "float16"), ("gru", 128, "float32"),
    *(pytest.param(cell, 128, dtype, marks=pytest.mark.slow) for cell, dtype in (("lstm", "float32"), ("gru", "float16"))),
])  # fmt: skip
def test_the_machine_code_spills_nothing(cell: str, width: int, dtype: str, compiler: str) -> None:
    """Nor is a register of a product in flight touched, or a product serialised; sums are stored to other CTAs."""
    region = planned(cell, dtype, width)
    program, plan = region.program.only, region.phases[0].plan
    assert program is not None
    source = lower.generate_kernel(program, arrangement_of(plan, program), "region").source
    assert ".push_to(" in source
    made = compilers.cubin(source, "sm_90a", folder_of(compiler))
    assert sass.resources(made.log, made.cubin).spill_bytes == 0
    code = sass.disassemble(made.cubin, "kitsune_region").instructions
    assert any(i.opcode.startswith("STAS") for i in code)
    paths = flow(code)
    assert not in_flight(paths).hazards and not skipped(paths)
