"""Arrays of any size are planned in memory that does not grow with them, and addressed in 64 bits."""

from __future__ import annotations

import re
import tracemalloc

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cuda.lower import _cached_kernel
from tests.support.graphs import struct

ROWS = (10**3, 10**6, 10**9, 10**12)
MOST_BYTES = 16 << 20  # an array of a byte for each of a million rows' 23 columns would be more


def mlp(w, v, x):
    return jax.nn.gelu(x @ w) @ v


def rearranged(w, x):
    wide = jnp.concatenate([x, x[:, ::-1], jnp.pad(x[:, 1:5], ((0, 0), (1, 2)))], -1)
    return wide @ w


def transposed(w, x):
    return (x.T[::-1]).T @ w * jnp.arange(8.0)


def normed(g, w, x):
    centred = x - x.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g) @ w


def indexed(w, x):
    return (x + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None]) @ w


def contracted(x, w, v):
    return (x @ w) @ v


CASES = {
    "mlp": (mlp, lambda n: (struct(8, 32), struct(32, 8), struct(n, 8))),
    "concatenate, reverse, pad": (rearranged, lambda n: (struct(23, 8), struct(n, 8))),
    "its gradient": (jax.grad(lambda w, x: (rearranged(w, x) ** 2).sum(), (0, 1)), lambda n: (struct(23, 8), struct(n, 8))),
    "transpose": (transposed, lambda n: (struct(8, 8), struct(n, 8))),
    "norm": (normed, lambda n: (struct(8), struct(8, 8), struct(n, 8))),
    "row index": (indexed, lambda n: (struct(8, 8), struct(n, 8))),
    "gradient": (jax.grad(lambda *a: (mlp(*a) ** 2).mean(), (0, 1, 2)), lambda n: (struct(8, 32), struct(32, 8), struct(n, 8))),
    "long rows": (contracted, lambda n: (struct(40, n), struct(n, 16), struct(16, 4))),
}


def peak_bytes(run):
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.sampled(4, rows=10**12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ROWS, ids="{:.0e}".format)
def test_planning_takes_no_memory_in_proportion_to_an_array(name, rows):
    f, arguments = CASES[name]
    args = arguments(rows)
    kj.explain(f, platform="cpu")(*arguments(64))  # imports are not counted
    assert peak_bytes(lambda: kj.explain(f, platform="cuda", device="h200")(*args)) < MOST_BYTES
    assert peak_bytes(lambda: kj.explain(f, platform="cpu")(*args)) < MOST_BYTES


@pytest.mark.parametrize("name", CASES)
def test_lowering_takes_no_memory_in_proportion_to_an_array(name):
    f, arguments = CASES[name]
    lowering._routed.cache_clear()
    peaks = [peak_bytes(lambda: jax.jit(kj.pipeline(f, force=True)).lower(*arguments(rows))) for rows in ROWS]  # noqa: B023
    assert max(peaks) < MOST_BYTES


def planned(f, args, target="cuda"):
    graph = capture(jax.make_jaxpr(f)(*args)).graph
    return route(graph, target, RouteOptions(force=True, code=False))


@pytest.mark.parametrize("name", ["mlp", "row index", "gradient"])
def test_generated_cuda_computes_rows_in_64_bits(name):
    """2**34 rows of 8 floats are more bytes, and more elements, than 32 bits count."""
    f, arguments = CASES[name]
    (region,) = planned(f, arguments(1 << 34)).regions
    source = _cached_kernel(region.program, (region.plan,), "region").source
    assert f"constexpr i64 kRows = {1 << 34};" in source and f"constexpr u32 kTiles = {1 << 28};" in source
    assert len(
        re.findall(
            r"const i64 tile = static_cast<i64>\(n\) \* workers \+ worker;\n *const i64 first_row = tile \* kTileRows", source
        )
    ) == len(re.findall(r"first_row = ", source))
    rows = re.findall(r"\b(\w+) (?:first_row|next_row|axis\d|row)(?:\[2\])? = ", source)
    assert rows and set(rows) == {"i64"}
    products = re.findall(r"axis\d\[\d\] \* (\w+)", source)
    assert products and all(p.endswith("ll") for p in products)


def test_rows_and_columns_that_a_kernel_cannot_count_are_refused_in_words():
    report = kj.explain(mlp, platform="cuda", device="h200", force=True)(struct(8, 32), struct(32, 8), struct(1 << 38, 8))
    assert not report.ops_pipelined and any(
        "rows; the CUDA target counts 137438953472 at most" in r.reason for r in report.rejected
    )
    report = kj.explain(lambda x: jnp.exp(x) * 2, platform="cuda", device="h200", force=True)(struct(4, 1 << 20))
    assert all("columns" not in r.reason for r in report.rejected) and report.ops_pipelined  # as a stream of elements


def test_a_weight_longer_than_the_cpu_packs_is_left_to_xla(recwarn):
    f, arguments = CASES["long rows"]
    report = kj.explain(f, platform="cpu", force=True)(*arguments(10**9))
    assert report.ops_total == 2
    jax.jit(kj.pipeline(f, force=True)).lower(*arguments(10**9))
    assert not kj.fallbacks() and not [w for w in recwarn if "kitsune" in str(w.message)]
