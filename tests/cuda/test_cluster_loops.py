"""Loops whose weights are shared out over a cluster, its CTAs handing each other their columns of what the next product contracts:
planned, in the emulator against float64, with planted bugs, and their machine code."""

from __future__ import annotations

import dataclasses
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
from kitsune_jax.errors import CannotLower
from kitsune_jax.frontend.route import PlannedRegion, RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime, tiles
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import kernel_cache, run_program, runner
from tests.support.programs import Case, lstm
from tests.support.simulators import cart_pole

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

# Of the largest number of a result: some steps of tf32, and of rounding to 16 bits. Gates are sums of up to 263 products.
TOLERANCE = {"float32": 1e-2, "bfloat16": 2e-2, "float16": 3e-3}


def tiled(case: Case, rows: int = tiles.TILE_ROWS) -> TileProgram:
    program = case.program.only
    assert program is not None
    return dataclasses.replace(program, tile_rows=rows)


def check_case(case: Case, dtype: str, seeds: int = 1, rows: int = tiles.TILE_ROWS, **how: Any) -> None:
    operands = case.operands(np.random.default_rng(5))
    found = list(map(runner(tiled(case, rows), *operands, **how), range(seeds)))
    errors = case.errors(found[0], operands)
    assert max(errors) < TOLERANCE[dtype], errors
    for other in found[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype, hidden, features, lanes, cluster", [
    ("bfloat16", 64, 9, 1, 2), ("float32", 128, 33, 2, 4), ("float16", 128, 64, 2, 4), ("bfloat16", 256, 7, 1, 8),
])  # fmt: skip
def test_every_cta_has_columns_of_its_own(dtype: str, hidden: int, features: int, lanes: int, cluster: int) -> None:
    """131 rows are three tiles for the lanes of one cluster: some lane has two of them, or one with three rows."""
    check_case(lstm(131, 3, features, hidden, dtype), dtype, seeds=4, lanes=lanes, cluster=cluster)


@pytest.mark.parametrize("dtype, hidden, rows, steps, cluster", [
    ("bfloat16", 64, 131, 3, 2), ("float16", 128, 1, 4, 4), ("float32", 64, 67, 3, 2),
])  # fmt: skip
def test_tiles_of_32_rows(dtype: str, hidden: int, rows: int, steps: int, cluster: int) -> None:
    """A thread has one row; half as much passes between the CTAs."""
    check_case(lstm(rows, steps, 33, hidden, dtype), dtype, 3, tiles.HALF_TILE_ROWS, lanes=1, cluster=cluster, replicas=3)


@pytest.mark.parametrize("rows, steps, reverse", [(1, 1, False), (67, 0, False), (193, 6, True)])
def test_trip_counts_rows_and_directions(rows: int, steps: int, reverse: bool) -> None:
    """Two clusters; of one row the second has none."""
    check_case(lstm(rows, steps, 5, 64, "bfloat16", reverse=reverse), "bfloat16", cluster=2, lanes=1, replicas=2)


# The words of a line, what the emulator says of a kernel without it, or with the first of two words replaced by the other.
BUGS: dict[str, tuple[tuple[str, ...], str, tuple[str, str]]] = {
    "an entry that is not given back": (("exchange", ".rd_release("), "deadlock|wait", ("", "")),
    "no wait for the others' columns": (("exchange", ".rd_acquire("), "race|never|read", ("", "")),
    "no wait for a free entry": (("exchange", ".wr_acquire("), "race|write", ("", "")),
    "a wait for the wrong phase of columns": (("exchange", ".rd_acquire("), "an asynchronous write", ("(n_", "(2 + n_")),
    "a wait for the wrong phase of a free entry": (("exchange", ".wr_acquire("), "deadlock", ("(n_", "(2 + n_")),
    "a CTA that leaves before the others have written": (
        ("cluster_sync();  // no CTA leaves",),
        "the cta exits.*cluster_sync is missing",
        ("", ""),
    ),
}


def changed(source: str, words: tuple[str, ...], instead: tuple[str, str]) -> str:
    """``source`` without the first line that has all ``words``, or with ``instead`` of a word of it."""
    lines = source.splitlines()
    at = next(k for k, line in enumerate(lines) if all(w in line for w in words))
    lines[at] = lines[at].replace(*instead) if instead[0] else ""
    return "\n".join(lines)


def check_bug(case: Case, words: tuple[str, ...], told: str, instead: tuple[str, str] = ("", "")) -> None:
    """One of several schedules says ``told`` of a kernel with a changed line: a CTA must be two steps ahead of another one before
    an entry is overwritten."""
    operands = case.operands(np.random.default_rng(5))
    with pytest.raises(Exception, match=told):
        for seed in range(12):
            run_program(tiled(case), *operands, cluster=2, seed=seed, change=lambda source: changed(source, words, instead))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_told(bug: str) -> None:
    check_bug(lstm(64, 7, 5, 64, "bfloat16"), *BUGS[bug])


def test_rows_of_the_next_step_are_loaded_ahead() -> None:
    """A step's rows are in registers when it begins; a kernel that loads the rows of the same step again is wrong."""
    case = lstm(67, 4, 40, 64, "bfloat16")
    operands = case.operands(np.random.default_rng(5))

    def stale(source: str) -> str:
        assert "RegisterSource<Bf16, 64>{ahead" in source and "RowSource" not in source
        return changed(source, ("const i32 next",), (" + 1;", ";"))

    errors = case.errors(run_program(tiled(case), *operands, cluster=2, lanes=1, change=stale), operands)
    assert max(errors) > 4 * TOLERANCE["bfloat16"]


def test_what_is_no_slab_is_refused() -> None:
    with pytest.raises(CannotLower, match="are not 4 slabs|are not 16 slabs"):
        run_program(tiled(lstm(64, 2, 5, 96, "bfloat16")), *lstm(64, 2, 5, 96).operands(np.random.default_rng(0)), cluster=4)
    simulator = cart_pole(rows=65, steps=2)
    with pytest.raises(CannotLower, match="no weights"):
        run_program(tiled(simulator), *simulator.operands(np.random.default_rng(0)), cluster=2)


# -- from a user's function


def lstm_layer(w: jax.Array, u: jax.Array, b: jax.Array, xs: jax.Array) -> jax.Array:
    def step(carry: Any, x: jax.Array) -> Any:
        c, h = carry
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    return jax.lax.scan(step, (jnp.zeros((xs.shape[1], u.shape[0]), xs.dtype),) * 2, xs)[1]


def gru_layer(w: jax.Array, u: jax.Array, b: jax.Array, xs: jax.Array) -> jax.Array:
    def step(h: jax.Array, x: jax.Array) -> Any:
        xr, xz, xn = jnp.split(x @ w + b, 3, axis=-1)
        hr, hz, hn = jnp.split(h @ u, 3, axis=-1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], u.shape[0]), xs.dtype), xs)[1]


LAYERS: dict[str, tuple[Callable[..., jax.Array], int]] = {"lstm": (lstm_layer, 4), "gru": (gru_layer, 3)}


def arguments(cell: str, width: int, steps: int, rows: int, dtype: str) -> tuple[jax.Array, ...]:
    rng, gates = np.random.default_rng(width), LAYERS[cell][1]
    shapes = (width, gates * width), (width, gates * width), (gates * width,), (steps, rows, width)
    scales = width**-0.5, width**-0.5, 0.1, 1.0
    return tuple(jax.device_put(np.asarray(k * rng.standard_normal(s), dtype)) for k, s in zip(scales, shapes, strict=True))


@functools.cache
def planned(cell: str, width: int, dtype: str, rows: int = 256) -> PlannedRegion:
    fn, gates = LAYERS[cell]
    shapes = (width, gates * width), (width, gates * width), (gates * width,), (128, rows, width)
    captured = capture(
        jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)),
        context=RewriteContext(TargetCapabilities(divides_gradients=True, runs_loops=True)),
    )
    (region,) = route(captured.graph, "cuda", RouteOptions(device="h200", code=False)).regions
    return region


@pytest.mark.parametrize("cell", LAYERS)
def test_a_wide_layer_is_one_call(cell: str) -> None:
    """As JAX users write it, of a width whose weights one CTA does not hold, planned for an H200 and run by the emulator."""
    fn, args = LAYERS[cell][0], arguments(cell, 128, 3, 70, "bfloat16")
    before = runtime.calls()
    found = np.asarray(jax.jit(kj.pipeline(fn, target="emulator", force=True))(*args), np.float32)
    assert runtime.calls() == before + 1
    wide = [np.asarray(x, np.float32) for x in args]
    want = in_float64(fn, *wide)
    assert np.abs(found - want).max() < 2e-2


def test_the_gradient_of_a_network_around_it() -> None:
    """The forward loop leaves what the way back reads, in slabs, and the reverse loop is over a cluster as well; the rest of the
    network is in calls of its own."""

    def loss(w: jax.Array, u: jax.Array, b: jax.Array, xs: jax.Array, p: jax.Array) -> jax.Array:
        out = jnp.tanh(lstm_layer(w, u, b, jnp.tanh(xs) * 2)) @ p
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    args = (
        *arguments("lstm", 128, 3, 70, "bfloat16"),
        jax.device_put(np.asarray(0.1 * np.random.default_rng(0).standard_normal((128, 32)), "bfloat16")),
    )
    report = kj.explain(kj.pipeline(gradients, force=True), platform="cuda", device="h200")(*args)
    assert ["clusters of 4" in region.traits for region in report.regions if any("scan" in s.name for s in region.stages)] == [
        True,
        True,
    ]
    found = jax.tree.leaves(jax.jit(kj.pipeline(gradients, target="emulator", force=True))(*args))
    want = jax.tree.leaves(in_float64(gradients, *args))
    for g, w in zip(found, want, strict=True):
        assert np.abs(np.asarray(g, np.float32) - w).max() < 2e-2 * np.abs(w).max()


def padded(w: jax.Array, u: jax.Array, h: jax.Array, xs: jax.Array, seen: jax.Array) -> Any:
    """What has come in is also added, and a sequence that is over keeps its state."""

    def step(h: jax.Array, at: Any) -> Any:
        x, seen = at
        made = jnp.tanh(x @ w + h @ u) + x
        h = jnp.where(seen[:, None], made, h)
        return h, (h, seen.astype(jnp.int32))

    return jax.lax.scan(step, h, (xs, seen))


def stacked(w: jax.Array, u: jax.Array, h: jax.Array, xs: jax.Array, _: jax.Array) -> Any:
    """Two layers in a step: the second one's product reads what the first one has made."""

    def step(carry: Any, x: jax.Array) -> Any:
        a, b = carry
        a = jnp.tanh(x + a @ u)
        b = jnp.tanh(a @ w + b @ u)
        return (a, b), b

    return jax.lax.scan(step, (h, h), xs)


def heun(w: jax.Array, u: jax.Array, h: jax.Array, xs: jax.Array, _: jax.Array) -> Any:
    """A neural ODE: nothing comes in, and each product waits for the one before it."""

    def slope(h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ w) @ u

    def step(_: Any, h: jax.Array) -> jax.Array:
        first = slope(h)
        return h + 0.1 * (first + slope(h + 0.2 * first))

    return jax.lax.fori_loop(0, xs.shape[0], step, h)


@pytest.mark.parametrize("loop, dtype", [(padded, "float32"), (padded, "bfloat16"), (stacked, "float16"), (heun, "bfloat16")])
def test_what_a_step_may_do(loop: Callable[..., Any], dtype: str) -> None:
    """Arrays that are multiplied and added, masks of rows, products of what a step makes: planned over a cluster, two schedules."""
    rng, (steps, rows, width) = np.random.default_rng(3), (4, 67, 256)
    shapes = (width, width), (width, width), (rows, width), (steps, rows, width)
    args = [jax.device_put(np.asarray(k * rng.standard_normal(s), dtype)) for k, s in zip((0.05, 0.05, 1, 1), shapes, strict=True)]
    args.append(jax.device_put(rng.random((steps, rows)) < 0.7))
    report = kj.explain(kj.pipeline(loop, force=True), platform="cuda", device="h200")(*args)
    assert ["clusters of" in str(region.traits) for region in report.regions] == [True]
    pipelined = jax.jit(kj.pipeline(loop, target="emulator", force=True))
    found = []
    for seed in (1, 2):
        runtime.set_emulator_seed(seed)
        found.append([np.asarray(x) for x in jax.tree.leaves(pipelined(*args))])
    want = jax.tree.leaves(in_float64(loop, *args))
    for g, again, w in zip(*found, want, strict=True):
        assert np.abs(g.astype(np.float64) - w).max() < TOLERANCE[dtype] * max(1.0, np.abs(w).max())
        assert g.tobytes() == again.tobytes()


@pytest.mark.parametrize("cell, width, dtype, size", [
    ("lstm", 128, "bfloat16", 4), ("lstm", 128, "float32", 4), ("lstm", 256, "float16", 8), ("gru", 256, "bfloat16", 8),
])  # fmt: skip
def test_the_planner_takes_it_where_xla_is_slower(cell: str, width: int, dtype: str, size: int) -> None:
    """128 steps of 256 sequences: modelled, at most 0.75 of XLA's time."""
    plan = planned(cell, width, dtype).phases[0].plan
    assert plan.cluster == plan.stages[0].split == size and (plan.tile_rows, plan.replicas) == (32, 8)
    assert plan.seconds < 0.75 * plan.baseline_seconds


def test_what_no_cluster_holds_is_told_in_words() -> None:
    """An LSTM of 256 in float32: 2 MiB of weights, which 8 CTAs do not hold and whose columns 16 do not share in whole blocks."""
    shapes = (256, 1024), (256, 1024), (1024,), (128, 256, 256)
    for device, told in (("h200", "need 258 KiB of shared memory in each"), ("a100", "this device has no clusters")):
        report = kj.explain(lstm_layer, platform="cuda", device=device)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
        (why,) = {r.reason for r in report.rejected if r.op == "scan"}
        assert not report.regions and "over a cluster: " in why and told in why


@pytest.mark.sampled(2)
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("cell, width, dtype", [("lstm", 256, "bfloat16"), ("lstm", 128, "float32"), ("gru", 128, "float16")])
def test_the_machine_code_spills_nothing(cell: str, width: int, dtype: str, compiler: str) -> None:
    """Nor is a register of a product in flight touched, or a product serialised; columns are stored to other CTAs."""
    region = planned(cell, width, dtype)
    program, plan = region.program.only, region.phases[0].plan
    assert program is not None
    source = lower.generate_kernel(program, arrangement_of(plan, program), "region").source
    made = compilers.cubin(source, "sm_90a", folder_of(compiler))
    assert sass.resources(made.log, made.cubin).spill_bytes == 0
    code = sass.disassemble(made.cubin, "kitsune_region").instructions
    assert any(i.opcode.startswith("STAS") for i in code)
    paths = flow(code)
    assert not in_flight(paths).hazards and not skipped(paths)
