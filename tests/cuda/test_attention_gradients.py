"""The gradient of attention as users write it, from a function to kernels in the emulator, against float64.

One kernel has queries for rows and works off the keys in blocks; one has keys for rows and works off the queries. Both make the
scores again, so neither adds to sums that another tile adds to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
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
from kitsune_jax.frontend.route import Routed, RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import GpuPlan
from kitsune_jax.program.build import build
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from tests.support.checks import in_float64
from tests.support.cuda_attention_cases import ATTENTION_GRADIENTS
from tests.support.cuda_cases import Family
from tests.support.cuda_run import Kernel, Subject, arrangements, kernel_cache, run_program, subject

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

Array = Any
TOLERANCE = {"float32": 4e-3, "bfloat16": 2e-2, "float16": 4e-3}  # of the largest number: products round to tf32 or 16 bits


@dataclasses.dataclass(frozen=True)
class Case:
    """``mask``: of [queries, keys], True where a query sees a key."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 300
    keys: int = 300
    dim: int = 16
    mask: Callable[[Array, Array], Array] | None = None
    residuals: str = "save"


def causal(q: Array, k: Array) -> Array:
    return q >= k


def window(q: Array, k: Array) -> Array:
    return (q >= k) & (q - k < 90)


CASES = {
    "plain": Case(queries=261, keys=389),
    "causal": Case(mask=causal, dim=24),
    "cross": Case(mask=causal, queries=270, keys=421),
    "more queries than keys": Case(mask=causal, queries=421, keys=270),
    "window": Case(mask=window, batch=2, heads=1, kv_heads=1, queries=400, keys=400),
    "groups of heads": Case(mask=causal, heads=4, kv_heads=2, batch=2),
    "one head of keys": Case(heads=3, kv_heads=1, batch=2),
    "a single head": Case(mask=causal, heads=1, kv_heads=1, dim=24, queries=421, keys=421),
    "a single head, across": Case(heads=1, kv_heads=1, queries=301, keys=389),
    "nothing saved": Case(mask=causal, residuals="recompute"),
    "wide": Case(mask=causal, dim=64, queries=540, keys=540),
}


def attention(case: Case, q: Array, k: Array, v: Array) -> Array:
    seen = None if case.mask is None else case.mask(jnp.arange(case.queries)[:, None], jnp.arange(case.keys))[None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=seen)


def reference(case: Case, q: Array, k: Array, v: Array, do: Array) -> list[np.ndarray]:
    """dq, dk, dv of [batch, tokens, heads, size] in float64, by hand."""
    q, k, v, do = (np.asarray(a, np.float64) for a in (q, k, v, do))
    groups = case.heads // case.kv_heads
    k, v = (np.repeat(a, groups, 2) for a in (k, v))
    s = np.einsum("bthd,bjhd->bhtj", q, k) / math.sqrt(case.dim)
    if case.mask is not None:
        s = np.where(case.mask(np.arange(case.queries)[:, None], np.arange(case.keys)), s, -math.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bthd,bjhd->bhtj", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(case.dim)
    sums = np.einsum("bhtj,bthd->bjhd", ds, q), np.einsum("bhtj,bthd->bjhd", p, do)
    grouped = (a.reshape(case.batch, case.keys, case.kv_heads, groups, case.dim).sum(3) for a in sums)
    return [np.einsum("bhtj,bjhd->bthd", ds, k), *grouped]


def drawn(case: Case, dtype: str, seed: int = 0) -> list[Array]:
    """q, k, v and the result's cotangent."""
    rng = np.random.default_rng(seed)
    shapes = [(case.queries, case.heads), (case.keys, case.kv_heads), (case.keys, case.kv_heads), (case.queries, case.heads)]
    return [jax.device_put(np.asarray(rng.standard_normal((case.batch, *s, case.dim)), dtype)) for s in shapes]


def gradients(case: Case, **options: Any) -> Callable[..., Any]:
    options = {"target": "emulator", "force": True, "strict": True, "residuals": case.residuals, **options}
    pipelined = kj.pipeline(lambda q, k, v: attention(case, q, k, v), **options)
    return lambda q, k, v, do: jax.vjp(pipelined, q, k, v)[1](do)


@functools.lru_cache(maxsize=2)
def compiled_for(case: Case, dtype: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = jax.jit(gradients(case)).lower(*drawn(case, dtype)).compile()
    return compiled


def run(case: Case, args: list[Array], seed: int = 1) -> tuple[list[np.ndarray], int]:
    """The gradients, and the number of kernels that made them."""
    compiled = compiled_for(case, str(args[0].dtype))
    runtime.set_emulator_seed(seed)
    before = runtime.calls()
    got = jax.block_until_ready(compiled(*args))
    return [np.asarray(g) for g in got], runtime.calls() - before


def errors(got: list[np.ndarray], wanted: list[np.ndarray]) -> list[float]:
    assert all(np.isfinite(g.astype(np.float64)).all() for g in got)  # Python's max may drop a NaN
    return [float(np.abs(g.astype(np.float64) - w).max() / np.abs(w).max()) for g, w in zip(got, wanted, strict=True)]


FAST = {("plain", "float16"), ("causal", "bfloat16"), ("groups of heads", "float32")}
EVERY = [
    pytest.param(name, dtype, marks=[] if (name, dtype) in FAST else pytest.mark.slow) for name in CASES for dtype in TOLERANCE
]


@pytest.mark.parametrize("name, dtype", EVERY)
def test_the_gradient_is_kernels(name: str, dtype: str) -> None:
    """One for the result (where it is not made again), one by queries, one by keys and values."""
    case = CASES[name]
    args = drawn(case, dtype)
    got, kernels = run(case, args)
    assert kernels == (2 if case.residuals == "recompute" else 3)
    for g, w, error in zip(got, reference(case, *args), errors(got, reference(case, *args)), strict=True):
        assert g.shape == w.shape and error < TOLERANCE[dtype]


def plain(q: Array, k: Array, v: Array) -> Array:
    """[tokens, size]: no axis stands for heads."""
    scores = (q @ k.T).astype(jnp.promote_types(q.dtype, jnp.float32)) * q.shape[-1] ** -0.5
    return jax.nn.softmax(scores, axis=-1).astype(q.dtype) @ v


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_head_without_an_axis_for_heads(dtype: str) -> None:
    """Sums over the keys are made by queries and those over the queries by keys, and nothing else is: no array of scores."""
    rng = np.random.default_rng(3)
    args = [jax.device_put(np.asarray(rng.standard_normal((n, 16)), dtype)) for n in (331, 397, 397, 331)]
    step = kj.pipeline(lambda q, k, v, do: jax.vjp(plain, q, k, v)[1](do), target="emulator", force=True, strict=True)
    compiled = jax.jit(step).lower(*args).compile()
    before = runtime.calls()
    got = [np.asarray(x) for x in jax.block_until_ready(compiled(*args))]
    assert runtime.calls() == before + 2
    case = Case(heads=1, kv_heads=1, queries=331, keys=397)
    want = [w[0, :, 0] for w in reference(case, *(a[None, :, None] for a in args))]
    assert max(errors(got, want)) < TOLERANCE[dtype]


def test_queries_that_see_nothing() -> None:
    """Hidden by a low number they see every key equally, also those in blocks that the mask hides; each key sees some query."""
    case = dataclasses.replace(CASES["plain"], queries=400, keys=300, mask=lambda q, k: q > k)
    args = drawn(case, "bfloat16")
    args[3] = args[3].at[:, 0].multiply(64)
    want = in_float64(lambda q, k, v, g: jax.vjp(lambda *qkv: attention(case, *qkv), q, k, v)[1](g), *args)
    got, kernels = run(case, args)
    assert kernels == 3 and max(errors(got, want)) < TOLERANCE["bfloat16"]


def wanted(family: Family, args: tuple[Array, ...]) -> list[np.ndarray]:
    return jax.tree.leaves(in_float64(family.function, *args))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ATTENTION_GRADIENTS)
def test_every_arrangement_under_several_schedules(name: str, dtype: str) -> None:
    """Of every number of lanes and extent of a block, on Hopper and portable: float64's numbers, and equal bits."""
    family = ATTENTION_GRADIENTS[name]
    of = subject(family.function, *family.arguments(331, dtype), batches=True)
    want = wanted(family, of.args)
    found = arrangements(of)
    assert {"sm90-vertical-streamed-cluster1-lanes2-blocks64", "sm80-vertical-streamed-cluster1-lanes1-blocks64"} <= set(found)
    for plan in found.values():
        kernel = Kernel(of, plan)
        results = [kernel(seed=seed) for seed in range(3)]
        assert max(errors(results[0], want)) < TOLERANCE[dtype]
        assert len({tuple(x.tobytes() for x in r) for r in results}) == 1


def test_equal_bits_under_every_schedule() -> None:
    """Sums over the queries are carries of one tile, so there is nothing that schedules could order."""
    case = CASES["causal"]
    args = drawn(case, "bfloat16")
    results = {tuple(g.tobytes() for g in run(case, args, seed)[0]) for seed in range(3)}
    assert len(results) == 1


@functools.cache
def by_keys() -> tuple[Subject, GpuPlan, list[np.ndarray]]:
    """The subject of the planted bugs, its plan, and its results in float64, which the kernel without a bug has."""
    family = ATTENTION_GRADIENTS["attention-by-keys"]
    of = subject(family.function, *family.arguments(131, "bfloat16"), batches=True)
    plan, want = arrangements(of)["sm90-vertical-streamed-cluster1-lanes2-blocks64"], wanted(family, of.args)
    assert max(errors(Kernel(of, plan)(), want)) < TOLERANCE["bfloat16"]
    return of, plan, want


@pytest.mark.parametrize(
    "what, found, instead",
    [
        ("queries in front of the keys count as seen", r"seen0\.whole_(count|block)", r"seen0.all_\1"),
        ("the mask's edge is left out", r"seen0\.edges_count\(\)", "0"),
        ("statistics of other queries", r"static_cast<i64>\(step_(\d+)\)", r"static_cast<i64>(i_step_\1)"),
    ],
)
def test_a_planted_bug_is_found(what: str, found: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (of, plan, want), emulated = by_keys(), compilers.emulated

    def change(source: str, sm: int) -> bytes:
        changed = re.sub(found, instead, source)
        assert changed != source or source == lower.PACKER
        return emulated(changed, sm)

    monkeypatch.setattr(compilers, "emulated", change)
    planted = Kernel(of, plan)
    with pytest.raises(Exception):  # noqa: B017  (of XLA, with what the emulator says)
        assert max(errors(planted(), want)) < TOLERANCE["bfloat16"]


# (heads, head size, dtype, bytes of a thread that the kernels by queries and by keys spill). By queries in float32 only blocks of
# 32 keys spill nothing, and are modelled 19 % slower than the fastest; no device has timed either.
SIZES = {
    "64": (16, 64, "bfloat16", (0, 16)),
    "single": (1, 64, "bfloat16", (0, 0)),
    "128": (16, 128, "bfloat16", (0, 96)),
    "tf32": (16, 64, "float32", (20, 792)),
}


def backward_of(heads: int, dim: int, dtype: str, is_causal: bool) -> tuple[Graph, Routed]:
    """The backward pass of attention over 4 096 tokens, as it is captured for the CUDA target, and its regions on an H200."""
    qkv = [jax.ShapeDtypeStruct((1, 4096, heads, dim), dtype)] * 3
    statistics = [jax.ShapeDtypeStruct((1, heads, 4096), "float32")] * 2

    def backward(q: Array, k: Array, v: Array, out: Array, do: Array, largest: Array, total: Array) -> tuple[Array, ...]:
        scale = dim**-0.5
        scores = jnp.einsum("bthd,bjhd->bhtj", q, k, preferred_element_type=jnp.float32) * scale
        if is_causal:
            scores = jnp.where(jnp.tril(jnp.ones((4096, 4096), bool)), scores, -jnp.inf)
        p = jnp.exp(scores - largest[..., None]) / total[..., None]
        dp = jnp.einsum("bthd,bjhd->bhtj", do, v, preferred_element_type=jnp.float32)
        term = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), do.astype(jnp.float32))
        ds, p = (p * (dp - term[..., None]) * scale).astype(dtype), p.astype(dtype)
        return jnp.einsum("bhtj,bjhd->bthd", ds, k), jnp.einsum("bhtj,bthd->bjhd", ds, q), jnp.einsum("bhtj,bthd->bjhd", p, do)

    graph = capture(
        jax.make_jaxpr(backward)(*qkv, *qkv[:2], *statistics),
        context=RewriteContext(TargetCapabilities(divides_gradients=True, sums_by_batch=False)),
    ).graph
    return graph, route(graph, "cuda", RouteOptions(device="h200", code=False))


@pytest.mark.sampled(4, name="single")
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_are_chosen(name: str, is_causal: bool) -> None:
    """By the model, which no device has confirmed; and no array of queries by keys is left."""
    heads, dim, dtype, _ = SIZES[name]
    graph, routed = backward_of(heads, dim, dtype, is_causal)
    assert sum(op.kind == "dot_general" for r in routed.regions for op in (graph.ops[i] for i in r.region.ops)) >= 7
    borders = {v for r in routed.regions for v in (*r.region.inputs, *r.region.outputs)}
    assert not [v for v in borders if graph.values[v].size >= 4096**2]
    assert all(r.plan.seconds < r.plan.baseline_seconds for r in routed.regions)


def test_a_block_of_float32_leaves_registers_to_the_compiler() -> None:
    """In blocks of 128 keys, 7 % faster by the model, the kernel by queries spilled 2 280 bytes a thread."""
    for name, size in (("tf32", 64), ("64", 128)):
        _, routed = backward_of(*SIZES[name][:3], is_causal=True)
        assert [r.plan.blocks[2] for r in routed.regions if r.plan.blocks is not None] == [size, size]


@pytest.mark.slow
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_machine_code_of_planned_kernels(name: str, is_causal: bool) -> None:
    """No wgmma is serialised, nobody touches the registers of one in flight, and few are spilled."""
    heads, dim, dtype, spilled = SIZES[name]
    graph, routed = backward_of(heads, dim, dtype, is_causal)
    blocked = [r for r in routed.regions if r.plan.blocks is not None]
    assert len(blocked) == 2
    for region in blocked:
        program = build(graph, region.region, region.plan)
        compiled = compilers.cubin(
            lower.generate_kernel(program, arrangement_of(region.plan, program), "test").source, "sm_90a", None
        )
        assert not re.search(r"\(C7\d\d\d\)", compiled.log), compiled.log
        by_keys = len(region.region.outputs) == 2  # by queries there are three: two numbers of a row are stored for this one
        assert sass.resources(compiled.log, compiled.cubin).spill_bytes <= spilled[by_keys]
        paths = flow(sass.disassemble(compiled.cubin, "kitsune_region").instructions)
        assert not in_flight(paths).hazards and not skipped(paths)


def by_queries(do: Any, v: Any, k: Any, scores: Any, largest: Any, total: Any, shift: Any, seen: Any) -> Any:
    """The gradient by queries from stored scores and a stored mask, as of one head of 4 096 tokens, whose scores XLA stores."""
    products = jnp.einsum("bqd,bkd->bqk", do, v).astype(jnp.float32) / total[..., None] + shift[..., None]
    by_scores = jnp.where(seen, products * jnp.exp(scores - largest[..., None]), 0) * 0.125
    return jnp.einsum("bqk,bkd->bqd", by_scores.astype(do.dtype), k)


@pytest.mark.parametrize("lanes", [1, 2])
def test_gradients_by_queries_from_stored_scores(lanes: int) -> None:
    """The operand of the late product is declared in front of the first one; it was declared twice, which does not compile."""
    rng = np.random.default_rng(2)
    batch, queries, keys, dim = 2, 70, 300, 16
    arrays = [rng.standard_normal((batch, n, dim)) for n in (queries, keys, keys)]
    floats = [rng.random((batch, queries, *more)) + low for more, low in (((keys,), 0.5), ((), 1.5), ((), 0.5), ((), 0.5))]
    seen = rng.random((batch, queries, keys)) > 0.3
    args = [*(jnp.asarray(a, "bfloat16") for a in arrays), *(jnp.asarray(a, "float32") for a in floats), jnp.asarray(seen)]
    of = subject(by_queries, *args, batches=True)
    plan = arrangements(of)[f"sm90-vertical-streamed-cluster1-lanes{lanes}-blocks64"]
    program, given = of.program(plan), dict(zip(of.graph.inputs, of.args, strict=True))
    assert "_late" in lower.generate_kernel(program, arrangement_of(plan, program), "test").source
    (got,) = run_program(program, *(given[v] for v in of.region.inputs), lanes=lanes, resident=False)
    want = in_float64(by_queries, *args)
    assert np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max() < 0.02
