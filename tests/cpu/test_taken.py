"""Sums over the edges of a node of what lies at their other ends: rows that a sum reads where the table has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kitsune_jax as kj
from kitsune_jax.targets.cpu import bytecode as bc
from tests.support.checks import close, in_float64
from tests.support.irregular import ids_of
from tests.support.segments import attention, attention_arguments, softmax

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 4e-3}
WEIGHTS = {"none": None, "edges": (), "heads": (3,), "all": (3, 5)}


def taken(made: list[bc.CpuProgram], kind: type = bc.AccumulateTaken) -> list[Any]:
    return [i for p in made for s in p.stages for i in s.body if isinstance(i, kind)]


def passing(n: int, mode: str | None = None, ids_sorted: bool = False) -> Any:
    def f(table: Any, weights: Any, senders: Any, receivers: Any) -> Any:
        rows = table.at[senders].get(mode=mode)
        if weights is not None:
            rows = rows * weights.reshape(*weights.shape, *(1,) * (3 - weights.ndim))
        return jax.ops.segment_sum(rows, receivers, num_segments=n, indices_are_sorted=ids_sorted)

    return f


def wanted(f: Any, *args: Any) -> Any:
    wide = [np.asarray(a, np.float64) if a is not None and jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
    return in_float64(f, *wide)


@given(
    st.integers(1, 400), st.integers(1, 9), st.integers(1, 30), st.sampled_from(list(WEIGHTS)), st.sampled_from(list(TOLERANCE)),
    st.sampled_from(["mixed", "equal", "outside", "half"]), st.sampled_from([None, "clip", "fill"]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_any_ids(edges, nodes, n, weights, dtype, ids, mode, ids_sorted, seed) -> None:
    rng = np.random.default_rng(seed)
    table = jax.device_put(np.asarray(rng.standard_normal((nodes, 3, 5)), dtype))
    shape = WEIGHTS[weights]
    w = None if shape is None else jax.device_put(np.asarray(rng.standard_normal((edges, *shape)), dtype))
    senders, receivers = (jax.device_put(ids_of(rng, ids, edges, k)) for k in (nodes, n))
    args = table, w, senders, jnp.sort(receivers) if ids_sorted else receivers
    f = passing(n, mode, ids_sorted)
    got = np.asarray(jax.jit(kj.pipeline(f, force=True))(*args), np.float64)
    want = wanted(f, *args)
    scale = max(1.0, np.nanmax(np.abs(want), initial=0.0))
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("weights", list(WEIGHTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_read_where_the_table_has_them(programs, weights: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    nodes, edges = 301, 4007
    shape = WEIGHTS[weights]
    w = None if shape is None else jax.device_put(np.asarray(rng.standard_normal((edges, *shape)), dtype))
    senders, receivers = (jax.device_put(np.asarray(rng.integers(0, nodes, edges), jnp.int32)) for _ in range(2))
    args = jax.device_put(np.asarray(rng.standard_normal((nodes, 3, 5)), dtype)), w, senders, jnp.sort(receivers)
    f = passing(nodes, ids_sorted=True)
    close(np.asarray(jax.jit(kj.pipeline(f, force=True))(*args), np.float64), wanted(f, *args), TOLERANCE[dtype])
    (found,) = taken(programs)
    assert found.factors == {"none": 0, "edges": 1, "heads": 3, "all": 15}[weights]
    assert not any(isinstance(i, bc.Gather) for p in programs for s in p.stages for i in s.body)


def test_attention_and_its_gradient_read_rows_in_place(programs) -> None:
    args = attention_arguments(n=37, edges=1009)
    close(jax.jit(kj.pipeline(attention(softmax), force=True))(*args), in_float64(attention(softmax), *args))
    (found,) = taken(programs)
    assert (found.heads, found.factors) == (2, 2)

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(attention(softmax)(*args)))

    gradient = jax.grad(loss, (0, 1, 2, 3))
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args))
    (dot, *_) = taken(programs, bc.CpuTakenDot)
    assert (dot.heads, dot.inner) == (2, 5) and 37 in (dot.x.rows, dot.y.rows)


def test_rows_that_something_else_reads_are_taken_as_before(programs) -> None:
    rng = np.random.default_rng(0)
    table = jax.device_put(np.asarray(rng.standard_normal((31, 20)), jnp.float32))
    senders, receivers = (jax.device_put(np.asarray(rng.integers(0, 31, 401), jnp.int32)) for _ in range(2))

    receivers = jnp.sort(receivers)

    def both(table: Any, senders: Any, receivers: Any) -> Any:
        rows = table[senders]
        return jax.ops.segment_sum(rows, receivers, num_segments=31, indices_are_sorted=True), jnp.tanh(rows)

    close(jax.jit(kj.pipeline(both, force=True))(table, senders, receivers), in_float64(both, table, senders, receivers))
    assert taken(programs) == []


@given(
    st.integers(1, 400), st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.sampled_from(list(TOLERANCE)),
    st.sampled_from(["mixed", "equal", "outside", "half"]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_products_of_any_rows(edges, nodes, heads, inner, dtype, ids, both, seed) -> None:
    rng = np.random.default_rng(seed)
    table, own = (jax.device_put(np.asarray(rng.standard_normal((k, heads, inner)), dtype)) for k in (nodes, edges))
    senders, receivers = (jax.device_put(ids_of(rng, ids, edges, nodes)) for _ in range(2))

    def products(table: Any, own: Any, senders: Any, receivers: Any) -> Any:
        other = jnp.cos(table)[receivers] if both else own
        return jnp.sum(table.at[senders].get(mode="fill", fill_value=0) * other, -1)

    args = table, own, senders, receivers
    got = np.asarray(jax.jit(kj.pipeline(products, force=True))(*args), np.float64)
    np.testing.assert_allclose(got, wanted(products, *args), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4 * inner**0.5)


def test_products_for_every_second_place_of_a_result(programs) -> None:
    """The sums for the heads of a row are written one behind the other: a result in which they lie apart gets copies of them."""
    rng = np.random.default_rng(0)
    table, own = (jax.device_put(np.asarray(rng.standard_normal((k, 3, 5)), jnp.float32)) for k in (31, 401))
    senders = jax.device_put(np.asarray(rng.integers(0, 31, 401), jnp.int32))

    def stacked(table: Any, own: Any, senders: Any) -> Any:
        return jnp.stack([jnp.sum(table[senders] * own, -1), own[..., 0]], -1)

    close(jax.jit(kj.pipeline(stacked, force=True))(table, own, senders), in_float64(stacked, table, own, senders))
    assert len(taken(programs, bc.CpuTakenDot)) == 1
