"""What is much larger than what it is made of is not handed to the backward pass: scores, masks, outer products."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.frontend import explain
from tests.support.checks import arrays, close, in_float64, in_parts

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

TOKENS, HEADS, HEAD = 67, 2, 8
Array = Any


def softmax_by_hand(s: Array) -> Array:
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def scores(q: Array, k: Array) -> Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])


def causal(n: int, m: int) -> Array:
    return jnp.arange(n)[:, None] >= jnp.arange(m)


def attend(q: Array, k: Array, v: Array, change: Callable[[Array], Array] = lambda s: s, softmax: Any = jax.nn.softmax) -> Array:
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(change(scores(q, k))), v)


def masked(q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v, lambda s: jnp.where(causal(*s.shape[2:]), s, -jnp.inf))


def by_hand(q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v, lambda s: jnp.where(causal(*s.shape[2:]), s, -1e30), softmax_by_hand)


def biased(q: Array, k: Array, v: Array) -> Array:
    """A slope of each head (ALiBi) and a soft cap."""
    far = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    slope = 2.0 ** -jnp.arange(1.0, 1.0 + q.shape[2])[:, None, None]
    return attend(q, k, v, lambda s: 5 * jnp.tanh(s / 5) - slope * far)


def padded(q: Array, k: Array, v: Array) -> Array:
    """Some keys of each batch are padding; the mask is added."""
    full = jnp.arange(k.shape[1]) < jnp.asarray([[31], [47]])
    return attend(q, k, v, lambda s: s + jnp.where(full, 0.0, -1e9)[:, None, None])


def heads_first(q: Array, k: Array, v: Array) -> Array:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(jax.nn.softmax(q @ jnp.swapaxes(k, 2, 3) * 0.3) @ v, 1, 2)


def library(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def grouped(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k[:, :, :1], v[:, :, :1], is_causal=True)


def log_sum(q: Array, k: Array, v: Array) -> Array:
    """The logarithm of the sum, instead of a quotient."""
    s = scores(q, k)
    p = jnp.exp(s - jax.scipy.special.logsumexp(s, axis=-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def dropped(q: Array, k: Array, v: Array) -> Array:
    def drop(p: Array) -> Array:
        return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.8, p.shape), p / 0.8, 0)

    return attend(q, k, v, lambda s: s, lambda s: drop(jax.nn.softmax(s)))


def projected(q: Array, k: Array, v: Array) -> Array:
    """Queries, keys and values are products themselves."""
    w = jnp.cos(jnp.arange(HEAD * HEAD, dtype=q.dtype)).reshape(HEAD, HEAD)
    return masked(jnp.tanh(q @ w), jnp.tanh(k @ w.T), v @ w)


def distances(q: Array, k: Array, v: Array) -> Array:
    """A kernel between all pairs of points: no softmax."""
    q2, k2 = (jnp.einsum("bnhd,bnhd->bhn", x, x) for x in (q, k))
    far = q2[..., None] + k2[:, :, None] - 2 * jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", 1 / (1 + far), v)


ATTENTIONS = {f.__name__: f for f in (masked, by_hand, biased, padded, heads_first, library, grouped, log_sum, dropped, projected)}
FUNCTIONS = {**ATTENTIONS, "distances": distances}


def qkv(dtype: Any = jnp.float32, tokens: int = TOKENS) -> list[Array]:
    return [x.astype(dtype) for x in arrays(1, *[(2, tokens, HEADS, HEAD)] * 3, scale=1.0)]


def total(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: jnp.sum(jnp.sin(f(*args).astype(jnp.promote_types(args[0].dtype, jnp.float32))))


def handed(gradient: Callable[..., Any], *args: Array) -> list[Any]:
    """The types of what the backward call reads."""
    _, backward = explain.pipelined_calls(_compat.without_dead_code(jax.make_jaxpr(gradient)(*args)))
    return _compat.in_avals(backward.jaxpr)


def size(aval: Any) -> int:
    return math.prod(aval.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_of_queries_times_keys_is_handed_over(name: str) -> None:
    args = qkv(tokens=251 if name == "dropped" else TOKENS)  # random bits are dear: beside few tokens their mask stays
    read = handed(jax.grad(total(kj.pipeline(FUNCTIONS[name])), (0, 1, 2)), *args)
    assert max(map(size, read)) <= args[0].size


def test_what_is_kept_grows_with_the_tokens() -> None:
    """Bytes that ``explain`` counts, forward to backward: the result and statistics of the rows."""

    def kept(tokens: int) -> int:
        report = kj.explain(jax.grad(total(kj.pipeline(masked, force=True)), (0, 1, 2)))(*qkv(tokens=tokens))
        assert report.residuals is not None
        return next(row.kept_bytes for row in report.residuals.policies if row.policy == "save")

    assert kept(134) == 2 * kept(67)
    assert kept(67) <= 4 * 2 * HEADS * 67 * (HEAD + 4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("masked", jnp.bfloat16), ("library", jnp.bfloat16), ("masked", jnp.float16), ("biased", jnp.float16)],
    ids=["masked-bfloat16", "library-bfloat16", "masked-float16", "biased-float16"],
)
def test_sixteen_bits(name: str, dtype: Any) -> None:
    args = qkv(dtype)
    gradient = jax.grad(total(kj.pipeline(FUNCTIONS[name], force=True)), (0, 1, 2))
    assert max(map(size, handed(gradient, *args))) <= args[0].size
    plain = jax.jit(jax.grad(total(FUNCTIONS[name]), (0, 1, 2)))(*args)
    exact = in_float64(jax.grad(total(FUNCTIONS[name]), (0, 1, 2)), *args)
    for got, usual, want in zip(jax.jit(gradient)(*args), plain, exact, strict=True):
        error, allowed = (np.abs(np.asarray(x, np.float64) - np.asarray(want, np.float64)).max() for x in (got, usual))
        assert error < 2 * allowed + 1e-3 * float(np.abs(want).max())


@pytest.mark.sampled(6, way="grad")
@pytest.mark.parametrize("way", ["grad", "jvp", "second", "vmap", "checkpoint", "scan", "dots_saveable", "value"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_function(name: str, way: str) -> None:
    f, args = FUNCTIONS[name], qkv()
    derived = WAYS[way]
    residuals = jax.checkpoint_policies.dots_saveable if way == "dots_saveable" else "save"
    got = jax.jit(derived(total(kj.pipeline(f, force=True, residuals=residuals))))(*args)
    want = in_float64(derived(total(f)), *args) if name != "dropped" else jax.jit(derived(total(f)))(*args)
    scale = [max(1.0, float(np.abs(a).max())) for a in jax.tree.leaves(want)]
    for a, b, s in zip(jax.tree.leaves(got), jax.tree.leaves(want), scale, strict=True):
        close(np.asarray(a, np.float64) / s, np.asarray(b, np.float64) / s, 2e-5)


def _second(loss: Any) -> Any:
    return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*a)), (0, 1, 2))


def _scanned(loss: Any) -> Any:
    def twice(*args: Array) -> Array:
        return jax.lax.scan(lambda c, s: (c + loss(*(s * a for a in args)), None), 0.0 * args[0].sum(), jnp.asarray([1.0, 0.5]))[0]

    return jax.grad(twice, (0, 1, 2))


WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda loss: jax.grad(loss, (0, 1, 2)),
    "value": lambda loss: jax.value_and_grad(loss, (1,)),
    "jvp": lambda loss: lambda *a: jax.jvp(jax.grad(loss, (0, 1, 2)), a, a),
    "second": _second,
    "vmap": lambda loss: lambda *a: jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=(0, None, None))(jnp.stack([a[0], -a[0]]), *a[1:]),
    "checkpoint": lambda loss: jax.grad(jax.checkpoint(loss), (0, 1, 2)),
    "dots_saveable": lambda loss: jax.grad(loss, (0, 1, 2)),
    "scan": _scanned,
}


# --- memory ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc")
@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_memory_grows_with_the_tokens(what: str) -> None:
    """Resident memory of a run in a process of its own: workers' tiles, partial sums and results included."""
    code = (
        "import sys, jax, jax.numpy as jnp, kitsune_jax as kj\n"
        "from benchmarks.memory import rise\n"
        "tokens, pipelined = int(sys.argv[1]), sys.argv[2] == 'pipelined'\n"
        "f = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)\n"
        "f = kj.pipeline(f) if pipelined else f\n"
        "q, k, v = (jax.random.normal(key, (1, tokens, 2, 64)) for key in jax.random.split(jax.random.key(0), 3))\n"
        "g = f if sys.argv[3] == 'forward' else jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1, 2))\n"
        "run = jax.jit(g).lower(q, k, v).compile()\n"
        "print(rise(lambda: run(q, k, v)))\n"
    )

    def grown(tokens: int, way: str) -> int:
        command = [sys.executable, "-c", code, str(tokens), way, what]
        one_device = {**os.environ, "XLA_FLAGS": ""}  # JAX has a thread for each, and each keeps tiles and blocks of keys
        done = subprocess.run(command, env=one_device, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    short, long, plain = grown(2048, "pipelined"), grown(8192, "pipelined"), grown(4096, "plain")
    assert long < 6 * short  # four times the tokens
    assert long < plain / 4


# --- what stays -----------------------------------------------------------------------------------------------------------------


def test_scores_that_are_not_much_larger_are_handed_over() -> None:
    """Of 60 tokens with heads of 8, a row of scores is less than eight times as large as a query."""
    q, k, v = qkv(tokens=60)
    assert max(map(size, handed(jax.grad(total(kj.pipeline(masked))), q, k, v))) == 2 * HEADS * 60 * 60


def test_wide_products_are_not_repeated() -> None:
    """A layer that is four times as wide as its input: a product of 512 terms is dearer than the numbers it gives."""
    x, w = arrays(2, (97, 512), (512, 2048))
    assert (97, 2048) in [a.shape for a in handed(jax.grad(total(kj.pipeline(lambda w, x: jnp.tanh(x @ w)))), w, x)]


def test_what_the_function_returns_is_read_where_it_is() -> None:
    """The weights of an attention that gives them away are in memory."""
    q, k, v = qkv()

    def f(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        p = jax.nn.softmax(scores(q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v), p

    forward, _ = explain.pipelined_calls(
        _compat.without_dead_code(jax.make_jaxpr(jax.grad(lambda *a: sum(map(jnp.sum, kj.pipeline(f)(*a))), (0, 1, 2)))(q, k, v))
    )
    assert sum(size(a) > q.size for a in _compat.out_avals(forward.jaxpr)) == 1


def test_a_mask_of_random_bits_stays_beside_activations() -> None:
    """Bits are dear to make: the mask of a layer's dropout is smaller than what else the layer hands over."""

    def f(w: Array, x: Array) -> Array:
        h = jnp.tanh(x @ w)
        return jnp.tanh(jnp.where(jax.random.bernoulli(jax.random.key(3), 0.9, h.shape), h, 0) @ w)

    w, x = arrays(5, (64, 64), (97, 64))
    assert "bool" in [str(a.dtype) for a in handed(jax.grad(total(kj.pipeline(f))), w, x) if a.shape == (97, 64)]


@pytest.mark.parametrize(("platform", "device"), [("cuda", "h200"), ("cpu", None)])
def test_no_target_is_handed_the_scores(platform: str, device: str | None) -> None:
    args = qkv()
    gradient = jax.grad(total(kj.pipeline(masked, force=True)), (0, 1, 2))
    report = kj.explain(gradient, platform=platform, device=device)(*args)
    assert report.residuals is not None
    kept = next(row.kept_bytes for row in report.residuals.policies if row.policy == "save")
    assert 4 * kept < 4 * 2 * HEADS * TOKENS * TOKENS


# --- random programs ------------------------------------------------------------------------------------------------------------


STEPS: list[Callable[[Array, Array, Array], Array]] = [
    lambda s, a, b: jnp.tanh(s),
    lambda s, a, b: s * a,
    lambda s, a, b: s + b,
    lambda s, a, b: jnp.where(s > a, s, b * s),
    lambda s, a, b: jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True))),
    lambda s, a, b: s / (1 + jnp.abs(s).sum(-1, keepdims=True)),
    lambda s, a, b: s - s.mean(-2, keepdims=True),
    lambda s, a, b: jax.nn.softmax(s, axis=-2),
    lambda s, a, b: jax.nn.relu(s).astype(jnp.float32),
    lambda s, a, b: jnp.swapaxes(s, 0, 1) if s.shape[0] == s.shape[1] else s,
    lambda s, a, b: jax.jit(lambda t: t * jnp.arange(t.shape[-1]) / t.shape[-1])(s),
]


@in_parts
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=5),
    st.sampled_from([(37, 41, 3), (64, 64, 5), (1, 43, 2), (29, 1, 4), (97, 101, 12)]),
    st.booleans(),
)
def test_random_programs_of_an_outer_product(
    part: int, steps: list[int], shape: tuple[int, int, int], ends_in_product: bool
) -> None:
    n, m, d = shape
    q, k, v, a, b = arrays(len(steps), (n, d), (m, d), (m, d), (n, 1), (1, m))

    def f(q: Array, k: Array, v: Array, a: Array, b: Array) -> Array:
        s = q @ k.T
        for i in steps:
            s = STEPS[i](s, *((a, b) if s.shape == (n, m) else (b.T, a.T)))
        return jnp.sum(jnp.sin(s @ v)) if ends_in_product and s.shape == (n, m) else jnp.sum(s * s)

    by = (0, 1, 2, 3, 4)
    got, want = jax.jit(jax.grad(kj.pipeline(f, force=True), by))(q, k, v, a, b), in_float64(jax.grad(f, by), q, k, v, a, b)
    for x, y in zip(got, want, strict=True):
        scale = max(1.0, float(np.abs(y).max(initial=0)))
        close(np.asarray(x, np.float64) / scale, y / scale, 5e-5)


@pytest.mark.parametrize("steps", [2, 30])
def test_long_chains_whose_values_are_read_twice(steps: int) -> None:
    """The time to look through a chain grows with its length, and not with the number of paths through it (2^30)."""

    def chain(x: Array) -> Array:
        for _ in range(steps):
            x = x - 0.1 * x * jnp.abs(x)
        return x

    def scored(q: Array, k: Array) -> Array:
        weights = jax.nn.softmax(q @ k.T + chain(jnp.ones((len(q), len(k))) * q[:, :1]))
        return jnp.sum((chain(weights @ k) @ k.T[:, :2]) ** 2)

    q, k = (jax.random.normal(jax.random.key(i), (TOKENS, HEAD)) for i in range(2))
    for pipelined in (jax.grad(kj.pipeline(scored)), kj.pipeline(jax.grad(scored))):
        jax.jit(pipelined).lower(q, k)  # what is tested here happens before anything is compiled


def test_a_chain_longer_than_the_stack_of_python_is_worked_off_in_blocks() -> None:
    def scored(q: Array, k: Array) -> Array:
        bias = jnp.ones((len(q), len(k))) * q[:, :1]
        for _ in range(600):
            bias = bias * bias + bias
        return jax.nn.softmax(q @ k.T + bias) @ k

    x = jnp.zeros((512, 2 * HEAD))
    jax.jit(kj.pipeline(scored)).lower(x, x)
