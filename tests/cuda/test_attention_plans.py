"""Attention as users write it, from a function to a kernel in the emulator: planned, and the numbers of float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from kitsune_jax.errors import CannotLower
from kitsune_jax.planning.plan import NO_CONTEXT
from kitsune_jax.program.ir import walk
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.machines import H200
from kitsune_jax.targets.cuda.planning.planner import plans_in_batches
from kitsune_jax.targets.cuda.planning.program_work import ProgramWork
from kitsune_jax.targets.cuda.target import CUDA
from tests.support.checks import in_float64
from tests.support.cuda_attention_cases import ATTENTION
from tests.support.cuda_run import Kernel, arrangements, kernel_cache, run_program, subject

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

TOLERANCE = {"float32": 4e-3, "bfloat16": 2e-2, "float16": 4e-3}  # of the largest number: products round to tf32 or 16 bits


@dataclasses.dataclass(frozen=True)
class Case:
    """``scores``: what is done with scaled scores [heads, queries, keys], in NumPy as in JAX; ``layout``: of q, k and v."""

    layout: str = "thd"
    heads: int = 2
    queries: int = 70
    keys: int = 300
    dim: int = 16
    dim_v: int = 0
    scores: Callable[..., Any] = lambda s, xp: s


def causal(s: Any, xp: Any) -> Any:
    q, k = s.shape[-2:]
    return xp.where(xp.arange(q)[:, None] + (k - q) >= xp.arange(k), s, -math.inf)


def tril(s: Any, xp: Any) -> Any:
    return xp.where(xp.tril(xp.ones(s.shape[-2:], bool)), s, -1e30 if xp is jnp else -math.inf)


def window(s: Any, xp: Any) -> Any:
    q, k = s.shape[-2:]
    away = xp.arange(q)[:, None] + (k - q) - xp.arange(k)
    return xp.where((away >= 0) & (away < 90), s, -math.inf)


def alibi(s: Any, xp: Any) -> Any:
    q, k = s.shape[-2:]
    slopes = xp.asarray(2.0 ** -np.arange(1, len(s) + 1), np.float32)
    away = xp.abs(xp.arange(q)[:, None] + (k - q) - xp.arange(k)).astype(np.float32)
    return s - slopes[:, None, None] * away


def capped(s: Any, xp: Any) -> Any:
    return 5 * xp.tanh(s / 5)


CASES = {
    "plain": Case(),
    "batch_first": Case("bhtd"),
    "tokens_first": Case("bthd", dim=40, dim_v=24),
    "one_head": Case("td", queries=130),
    "few_keys": Case(keys=90),
    "causal": Case(queries=300, scores=causal),
    "causal_cross": Case(queries=130, keys=333, dim=32, scores=causal),
    "tril": Case("bhtd", queries=300, scores=tril),
    "window": Case(queries=300, keys=400, scores=window),
    "alibi": Case(scores=alibi),
    "capped": Case(scores=capped),
    "wide": Case(heads=1, dim=128, queries=65),
    "widest": Case(heads=1, dim=256, queries=65),
}
PRODUCTS = {"thd": ("qhd,khd->hqk", "hqk,khd->qhd"), "bhtd": ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"),
            "bthd": ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"), "td": ("qd,kd->qk", "qk,kd->qd")}  # fmt: skip


def shape_of(case: Case, tokens: int, dim: int) -> tuple[int, ...]:
    return tuple({"b": 2, "h": case.heads, "t": tokens, "d": dim}[letter] for letter in case.layout)


def attention(case: Case, xp: Any, q: Any, k: Any, v: Any) -> Any:
    first, second = PRODUCTS[case.layout]
    wide = np.float32 if xp is jnp else np.float64
    scores = (xp.einsum(first, q, k) * case.dim**-0.5).astype(wide)
    if case.layout in ("thd", "td"):
        scores = case.scores(scores, xp)
    else:
        scores = xp.stack([case.scores(s, xp) for s in scores]) if xp is np else jax.vmap(lambda s: case.scores(s, jnp))(scores)
    p = xp.exp(scores - scores.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return xp.einsum(second, p.astype(q.dtype), v)


def drawn(case: Case, dtype: str) -> list[jax.Array]:
    rng = np.random.default_rng(4)
    shapes = [(case.queries, case.dim), (case.keys, case.dim), (case.keys, case.dim_v or case.dim)]
    return [jax.device_put(np.asarray(rng.standard_normal(shape_of(case, *s)), dtype)) for s in shapes]


def one_kernel(function: Callable[..., Any], *args: Any, seed: int = 1, kernels: int = 1) -> np.ndarray:
    pipelined = jax.jit(kj.pipeline(function, target="emulator", force=True))
    compiled = pipelined.lower(*args).compile()
    runtime.set_emulator_seed(seed)
    before = runtime.calls()
    got = np.asarray(jax.block_until_ready(compiled(*args)), np.float64)
    assert runtime.calls() == before + kernels
    return got


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


FAST = {("plain", "bfloat16"), ("few_keys", "float32"), ("causal", "bfloat16")}
EVERY = [pytest.param(*c, marks=[] if c in FAST else pytest.mark.slow) for c in itertools.product(CASES, ("bfloat16", "float32"))]


@pytest.mark.parametrize("name, dtype", EVERY)
def test_attention_is_one_kernel(name: str, dtype: str) -> None:
    case = CASES[name]
    args = drawn(case, dtype)
    got = one_kernel(lambda q, k, v: attention(case, jnp, q, k, v), *args)
    want = attention(case, np, *(np.asarray(a, np.float64) for a in args))
    assert error(got, want) < TOLERANCE[dtype]


def masked(q: Any, k: Any, v: Any, **arrays: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, **arrays)


def wanted(q: Any, k: Any, v: Any, hidden: Any = None, bias: Any = 0.0) -> np.ndarray:
    """[b, t, h, d], with groups of heads of queries for each head of keys; ``hidden``, ``bias``: [b, h, q, k]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + bias
    if hidden is not None:
        scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put(np.asarray(np.random.default_rng(seed).standard_normal(shape), "bfloat16"))


def qkv(queries: int = 70, keys: int = 300, heads: int = 4, kv_heads: int = 4, dim: int = 16) -> list[jax.Array]:
    return [tokens(2, queries, heads, dim), tokens(2, keys, kv_heads, dim, seed=1), tokens(2, keys, kv_heads, dim, seed=2)]


def rotated(x: Any, cos: Any, sin: Any, xp: Any) -> Any:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def rotated_attention(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    """As Llama's: heads of queries in groups, for each of which there is a head of keys; causal."""
    batch, queries, heads, dim = q.shape
    q = rotated(q, cos, sin, jnp).reshape(batch, queries, k.shape[2], -1, dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * dim**-0.5
    seen = jnp.arange(k.shape[1]) <= jnp.arange(queries)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf).astype(jnp.float32), axis=-1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(q.dtype), v).reshape(batch, queries, heads, dim)


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in ("bfloat16", "float16"))])
@pytest.mark.parametrize("queries", [300, pytest.param(1, marks=pytest.mark.slow)])
def test_queries_that_are_rotated_by_their_position(queries: int, dtype: str) -> None:
    """The two halves of a query are put together before both loops over its keys: over whole blocks, and over those that the mask
    cuts. The mask of one query and one key is one number, which no loop makes: with ``force`` it is a call of its own."""
    q, k, v = (jnp.asarray(a[:1], dtype) for a in qkv(queries, queries, heads=4, kv_heads=2, dim=64))
    angles = np.outer(np.arange(queries), 0.1 ** np.arange(32))[:, None, :]
    turn = [jnp.asarray(f(angles), dtype) for f in (np.cos, np.sin)]
    got = one_kernel(rotated_attention, q, k, v, *turn, kernels=2 if queries == 1 else 1)
    hidden = np.arange(queries) > np.arange(queries)[:, None]
    q, k, v, *turn = (np.asarray(a, np.float64) for a in (q, k, v, *turn))
    assert error(got, wanted(rotated(q, *turn, np), k, v, hidden)) < TOLERANCE[dtype]


@pytest.mark.slow
def test_grouped_heads_with_a_causal_mask() -> None:
    args = qkv(300, 300, heads=4, kv_heads=2)
    got = one_kernel(lambda *a: masked(*a, is_causal=True), *args)
    later = np.arange(300) > np.arange(300)[:, None]
    assert error(got, wanted(*args, hidden=later)) < TOLERANCE["bfloat16"]


def test_padding() -> None:
    """Every batch has keys of its own length: a mask that depends on the batch, and on no query."""
    args, lengths = qkv(), jnp.asarray([100, 257])
    visible = jnp.arange(300)[None, :] < lengths[:, None]
    got = one_kernel(lambda q, k, v, m: masked(q, k, v, mask=m[:, None, None, :]), *args, visible)
    assert error(got, wanted(*args, hidden=~np.asarray(visible)[:, None, None, :])) < TOLERANCE["bfloat16"]


@pytest.mark.slow
def test_segments_of_queries_and_keys() -> None:
    args, rng = qkv(), np.random.default_rng(7)
    of_q, of_k = (jax.device_put(np.asarray(np.sort(rng.integers(0, 3, (2, n))), "int32")) for n in (70, 300))
    got = one_kernel(lambda q, k, v, a, b: masked(q, k, v, mask=(a[:, :, None] == b[:, None, :])[:, None]), *args, of_q, of_k)
    apart = np.asarray(of_q)[:, None, :, None] != np.asarray(of_k)[:, None, None, :]
    assert error(got, wanted(*args, hidden=apart)) < TOLERANCE["bfloat16"]


@pytest.mark.slow
def test_a_mask_and_a_bias_of_every_score() -> None:
    args, rng = qkv(), np.random.default_rng(7)
    mask, bias = (
        jax.device_put(rng.random((2, 4, 70, 300)) < 0.5),
        jax.device_put(np.asarray(rng.standard_normal((4, 70, 300)), "bfloat16")),
    )
    got = one_kernel(lambda q, k, v, m, b: masked(q, k, v, mask=m, bias=b[None]), *args, mask, bias)
    assert error(got, wanted(*args, ~np.asarray(mask), np.asarray(bias, np.float64))) < TOLERANCE["bfloat16"]


def test_pooling_by_log_sum_exp() -> None:
    """No product with values: one row has all of the scores of a query."""
    q, k = tokens(3, 70, 16), tokens(3, 300, 16, seed=1)
    got = one_kernel(lambda q, k: jax.nn.logsumexp(jnp.einsum("hqd,hkd->hqk", q, k).astype(jnp.float32), -1), q, k)
    scores = np.einsum("hqd,hkd->hqk", np.asarray(q, np.float64), np.asarray(k, np.float64))
    assert error(got, np.log(np.exp(scores).sum(-1))) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("hidden, bare", [(-math.inf, True), (-1e30, False)])
def test_blocks_that_no_row_of_a_cta_sees_are_not_read(hidden: float, bare: bool) -> None:
    """Values behind the mask are NaN: times 0 they would be NaN. Those that another lane's rows see are read."""
    q, k, v = (tokens(1, 640, 2, 16, seed=n) for n in range(3))
    v = v.at[:, 448:].set(jnp.nan)

    def function(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 4
        seen = jnp.arange(640)[:, None] >= jnp.arange(640) if bare else jnp.tril(jnp.ones((640, 640), bool))
        p = jax.nn.softmax(jnp.where(seen, scores, hidden), -1).astype(q.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    got = one_kernel(function, q, k, v)
    want = wanted(q, k, jnp.where(jnp.isnan(v), 0, v), hidden=np.arange(640) > np.arange(640)[:, None])
    assert error(got[:, :256], want[:, :256]) < TOLERANCE["bfloat16"]
    assert np.isnan(got[:, 448:]).all()


def placed(q: Any, k: Any, v: Any, place: Any, hidden: float = -math.inf) -> Any:
    """Queries from ``place`` on of a text whose keys are in ``k``: [t, h, d]."""
    scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / 4
    seen = place + jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, hidden), -1).astype(q.dtype), v)


@pytest.mark.parametrize("hidden", [-math.inf, -1e30])
def test_a_piece_of_a_text_reads_the_blocks_before_it(hidden: float) -> None:
    """Where the piece lies is known when the kernel runs. Values behind it are NaN, which no block of theirs may be read for."""
    q, k, v = tokens(130, 2, 16), tokens(640, 2, 16, seed=1), tokens(640, 2, 16, seed=2)
    compiled = jax.jit(kj.pipeline(functools.partial(placed, hidden=hidden), target="emulator", force=True))
    for seed, place in enumerate((0, 1, 100, 283, 470)):
        end = -(-(place + 130) // 128) * 128  # of the last block: what it hides of that is read, and multiplied with 0
        runtime.set_emulator_seed(seed)
        before = runtime.calls()
        got = np.asarray(compiled(q, k, v.at[end:].set(jnp.nan), jnp.int32(place)), np.float64)
        assert runtime.calls() == before + 1
        later = np.arange(640) > place + np.arange(130)[:, None]
        want = wanted(q[None], k[None], v[None], hidden=later)[0]
        assert error(got, want) < TOLERANCE["bfloat16"]


def test_a_piece_in_front_of_all_keys_sees_them_as_jax_has_it() -> None:
    """Its first rows see nothing: where a low number hides keys, all of them have one weight."""
    q, k, v = tokens(130, 2, 16), tokens(300, 2, 16, seed=1), tokens(300, 2, 16, seed=2)
    got = one_kernel(functools.partial(placed, hidden=-1e30), q, k, v, jnp.int32(-40))
    later = np.arange(300) > np.arange(130)[:, None] - 40
    want = wanted(q[None], k[None], v[None], hidden=later & (np.arange(130)[:, None] >= 40))[0]
    want[:40] = np.asarray(v, np.float64).mean(0)
    assert error(got, want) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    "bug, found, instead",
    [
        ("", "^", ""),
        pytest.param(
            "the place is another one", r"(SeenBlocks::shifted<[^>]*>\([^;]*), 1, [^;]*;", r"\1, 1, 64);", marks=pytest.mark.slow
        ),
        ("the loader knows no place", r"(?s)^(.*)(SeenBlocks::shifted<[^>]*>\([^;]*), 1, from_word[^;]*;", r"\1\2, 1, 0);"),
    ],
)
def test_a_bug_in_the_place_of_a_piece_is_found(bug: str, found: str, instead: str) -> None:
    q, k, v = tokens(70, 2, 16), tokens(300, 2, 16, seed=1), tokens(300, 2, 16, seed=2)
    of = subject(placed, q, k, v, jnp.int32(200), batches=True)
    plan = arrangements(of)["sm90-vertical-streamed-cluster1-lanes1-blocks64"]
    program, given = of.program(plan), dict(zip(of.graph.inputs, of.args, strict=True))
    arrays = [given[v] for v in of.region.inputs]

    def change(source: str) -> str:
        changed = re.sub(found, instead, source)
        assert changed != source or not bug
        return changed

    def right() -> bool:
        (got,) = run_program(program, *arrays, lanes=1, resident=False, change=change)
        want = wanted(q[None], k[None], v[None], hidden=np.arange(300) > 200 + np.arange(70)[:, None])[0]
        return error(got.astype(np.float64), want) < TOLERANCE["bfloat16"]

    try:
        assert right() == (not bug)
    except jax.errors.JaxRuntimeError as e:
        assert bug and re.search("deadlock|has not been waited for", str(e)), e


def test_one_query_of_each_head() -> None:
    """The products are a kernel each: a batch of so few numbers streams over its heads."""
    case = Case(queries=1, heads=4)
    args = drawn(case, "bfloat16")
    got = one_kernel(lambda q, k, v: attention(case, jnp, q, k, v), *args, kernels=2)
    assert error(got, attention(case, np, *(np.asarray(a, np.float64) for a in args))) < TOLERANCE["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ATTENTION)
def test_every_arrangement_under_several_schedules(name: str, dtype: str) -> None:
    """Of every number of lanes and extent of a block, on Hopper and portable: float64's numbers, and equal bits."""
    family = ATTENTION[name]
    of = subject(family.function, *family.arguments(131, dtype), batches=True)
    want = in_float64(family.function, *of.args)
    found = arrangements(of)
    assert {"sm90-vertical-streamed-cluster1-lanes2-blocks64", "sm80-vertical-streamed-cluster1-lanes1-blocks64"} <= set(found)
    for plan in found.values():
        run = Kernel(of, plan)
        results = [run(seed=seed)[0] for seed in range(3)]
        assert error(results[0].astype(np.float64), want) < TOLERANCE[dtype]
        assert len({r.tobytes() for r in results}) == 1


def test_a_planned_kernel_gives_equal_bits_under_every_schedule() -> None:
    case = CASES["causal_cross"]
    args = drawn(case, "bfloat16")
    results = {one_kernel(lambda q, k, v: attention(case, jnp, q, k, v), *args, seed=seed).tobytes() for seed in range(3)}
    assert len(results) == 1


@pytest.mark.parametrize(
    "what, found, instead",
    [
        ("the loader brings a block that no consumer asks for", r"(i32 i = 0; i < seen0)\.edges_count", r"\1.all_count"),
        pytest.param(
            "blocks at the edge count as whole ones, too", r"seen0\.whole_(count|block)", r"seen0.all_\1", marks=pytest.mark.slow
        ),
        ("the mask's edge is left out", r"seen0\.edges_count\(\)", "0"),
    ],
)
def test_a_planted_bug_is_found(what: str, found: str, instead: str) -> None:
    family = ATTENTION["attention-causal"]
    of = subject(family.function, *family.arguments(131, "bfloat16"), batches=True)
    plan = arrangements(of)["sm90-vertical-streamed-cluster1-lanes2-blocks64"]

    def change(source: str) -> str:
        changed = re.sub(found, instead, source)
        assert changed != source
        return changed

    want = in_float64(family.function, *of.args)
    with pytest.raises(Exception):  # noqa: B017  (of XLA, with what the emulator says)
        (got,) = run_program(of.program(plan), *of.args, lanes=2, resident=False, change=change)
        assert error(got.astype(np.float64), want) < TOLERANCE["bfloat16"]


LARGE = {
    "heads of 128": (1, 4096, 16, 128, "bfloat16"),
    "heads of 64": (1, 4096, 32, 64, "bfloat16"),
    "float32": (1, 4096, 16, 64, "float32"),
    "a batch of short ones": (16, 512, 16, 64, "bfloat16"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_chosen(name: str, is_causal: bool) -> None:
    """By the model, which no device has confirmed."""
    *shape, dtype = LARGE[name]
    arrays = [jax.ShapeDtypeStruct(tuple(shape), dtype)] * 3
    report = kj.explain(kj.pipeline(lambda q, k, v: masked(q, k, v, is_causal=is_causal)), platform="cuda", device="h200")(*arrays)
    (region,) = report.regions
    assert region.seconds < region.baseline_seconds
    assert report.coverage > 0.9


def test_the_only_stage_of_a_kernel_in_blocks_is_number_0() -> None:
    x = jax.ShapeDtypeStruct((1, 4096, 16, 128), "bfloat16")
    attention = kj.pipeline(lambda q, k, v: jax.nn.dot_product_attention(q, k, v))
    (region,) = kj.explain(attention, platform="cuda", device="h200")(x, x, x).regions
    (stage,) = region.stages
    assert stage.name.startswith("0:")


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dim, dtype", [(64, "bfloat16"), (80, "float16"), (128, "bfloat16"), (128, "float32"), (256, "bfloat16")])
def test_the_model_knows_which_products_are_late(dim: int, dtype: str, is_causal: bool) -> None:
    """Of every extent of a block and number of lanes. A kernel with late values is modelled as faster than the same without."""
    arrays = [jax.ShapeDtypeStruct((1, 4096, 16, dim), dtype)] * 3
    of = subject(lambda q, k, v: masked(q, k, v, is_causal=is_causal), *arrays, batches=True)
    in_time = {(p.lanes, p.blocks): p.seconds for p in plans_in_batches(GpuCost(of.graph, of.region, H200), in_time=True)}
    some = 0
    for plan in plans_in_batches(GpuCost(of.graph, of.region, H200)):
        program = of.program(plan)
        try:
            source = lower.generate_kernel(program, arrangement_of(plan, program), "test").source
        except CannotLower:
            continue
        loops = [i for i in walk(program.stages[0].body) if i.kind == "loop"]
        late = [ProgramWork(program, H200, plan.lanes).late_products(loop) is not None for loop in loops]
        assert late == ["AwaitedWeights" in source] * len(loops), (plan.lanes, plan.blocks)
        some += all(late)
        if all(late):
            assert plan.seconds < in_time[plan.lanes, plan.blocks]
    assert some or dtype == "float32" or dim == 256


def test_the_model_issues_what_the_machine_code_of_a_block_does() -> None:
    """Two lanes, 128 keys, heads of 128: NVRTC 13.5 makes 559 instructions of a block."""
    arrays = [jax.ShapeDtypeStruct((1, 4096, 16, 128), "bfloat16")] * 3
    of = subject(masked, *arrays, batches=True)
    plan = next(p for p in plans_in_batches(GpuCost(of.graph, of.region, H200)) if (p.lanes, p.blocks[2:]) == (2, (128,)))
    program = of.program(plan)
    work = ProgramWork(program, H200, 2)
    blocks = [work.of(program.stages[0].body, lambda loop, n=n: float(n)).issue for n in (11, 12)]
    issued = (blocks[1] - blocks[0]) * H200.rate(H200.simt_rates, "other") / 128
    assert 0.85 * 559 < issued < 1.15 * 559


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_of_any_size_are_scaled_in_the_exponential(dtype: str) -> None:
    """Equal ones, large ones, and infinite ones. A row with infinite scores is NaN, as with ``jax.jit``, and no other row is."""
    q, k, v = (x.astype(dtype) for x in qkv(heads=1, kv_heads=1, dim=64))
    q = q.at[:, 3].set(0).at[:, 5].mul(100).at[:, 7].mul(3e3).at[:, 9].set(math.inf)
    got, want = one_kernel(masked, q, k, v), wanted(q, k, v)
    rows = np.arange(70) != 9
    assert np.isnan(got[:, 9]).all() and np.isnan(masked(q, k, v)[:, 9].astype("float32")).all()
    assert error(got[:, rows], want[:, rows]) < TOLERANCE[dtype]


def test_weights_that_are_read_twice() -> None:
    """The sum is of the rounded weights, which the product with the values reads as well."""

    def rounded(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        p = jnp.exp(scores - scores.max(-1, keepdims=True)).astype(q.dtype)
        out = jnp.einsum("hqk,khd->hqd", p, v, preferred_element_type=jnp.float32)
        return (out / p.astype(jnp.float32).sum(-1, keepdims=True)).astype(q.dtype)

    args = [x[0] for x in qkv(heads=2, kv_heads=2)]
    assert error(one_kernel(rounded, *args), in_float64(rounded, *args)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("scale, fused", [(0.25, True), (-0.25, False), (1.5, False)])
def test_only_scales_without_a_danger_are_part_of_the_exponential(scale: float, fused: bool) -> None:
    """The largest scaled score is not the largest score, scaled, for a negative scale; with scales above ln 2 it may overflow."""

    def scaled(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * scale
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)

    q, k, v = (x[0] for x in qkv(heads=2, kv_heads=2))
    of = subject(scaled, q, k, v, batches=True)
    plan = arrangements(of)["sm90-vertical-streamed-cluster1-lanes2-blocks64"]
    sources = []

    def seen(source: str) -> str:
        sources.append(source)
        return source

    (got,) = run_program(of.program(plan), *of.args, lanes=2, resident=False, change=seen)
    assert error(got.astype(np.float64), in_float64(scaled, q, k, v)) < TOLERANCE["bfloat16"]
    assert [bool(re.search(r"exp_coarse\(.*, [\d.-]+f, ", s)) for s in sources] == [fused]


# (heads, head size, dtype, products of a block of keys in the machine code of a loop)
COMPILED = {"128": (16, 128, "bfloat16"), "64": (32, 64, "bfloat16"), "256": (8, 256, "bfloat16"), "tf32": (16, 64, "float32")}


@pytest.mark.slow
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_machine_code_of_planned_kernels(name: str, is_causal: bool) -> None:
    """No wgmma is serialised, nobody touches the registers of one in flight, nothing is spilled, and every loop multiplies once, or
    twice where values are a block late: its first and its last multiplication stand outside of it."""
    heads, dim, dtype = COMPILED[name]
    arrays = [jax.ShapeDtypeStruct((1, 4096, heads, dim), dtype)] * 3
    of = subject(lambda q, k, v: masked(q, k, v, is_causal=is_causal), *arrays, batches=True)
    plan = CUDA.plan(of.graph, of.region, H200, NO_CONTEXT)
    assert plan.blocks is not None
    program = of.program(plan)
    made = lower.generate_kernel(program, arrangement_of(plan, program), "test")
    compiled = compilers.cubin(made.source, "sm_90a", None)
    assert not re.search(r"\(C7\d\d\d\)", compiled.log), compiled.log
    used = sass.resources(compiled.log, compiled.cubin)
    assert (used.stack_bytes, used.spill_bytes) == (0, 0)
    code = sass.disassemble(compiled.cubin, "kitsune_region")
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not skipped(paths)
    loops, block, depth = 1 + is_causal, plan.blocks[2], 16 if dtype == "bfloat16" else 8  # whole blocks, and the mask's edges
    widest = max(int(columns) for columns in re.findall(r"Product<\w+, (\d+),", made.source))
    wanted = loops * (dim // depth * -(-block // widest) + block // depth * -(-dim // widest))
    wanted *= 2 if "AwaitedWeights" in made.source else 1
    assert sum(i.opcode.startswith("HGMMA") for i in code.instructions) == wanted
    assert ("AwaitedWeights" in made.source) == (name in ("128", "64"))
