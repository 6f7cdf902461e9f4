"""Indices that a pipelined function closes over: their order is found where the program is lowered, and no call sorts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.targets import order_of_constants
from tests.support.checks import close, in_float64

ROWS, SEGMENTS, WIDTH = 4_001, 20_011, 64  # sums that no lane and no core has a table for: rows stream in order
FEW = 67
LARGE = 20_001, 50_021  # rows and segments of programs in which CPUs stream rows in order as well
RNG = np.random.default_rng(31)
Network = Callable[..., jax.Array]


def network(mode: str | None = None, segments: int = SEGMENTS) -> Network:
    def sums(x: jax.Array, table: jax.Array, senders: Any, receivers: Any) -> jax.Array:
        taken = table.at[senders].get(mode="clip" if mode == "clip" else "fill", fill_value=0)
        return jnp.zeros((segments, WIDTH), x.dtype).at[receivers].add(jnp.tanh(x + taken) * x, mode=mode)

    return sums


def arrays(dtype: Any = jnp.float32, rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
    return tuple(jax.device_put(np.asarray(RNG.standard_normal(shape), dtype)) for shape in ((rows, WIDTH), (FEW, WIDTH)))


def edges(dtype: Any = np.int32, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Senders and receivers, some of them negative and some beyond the last row."""
    return RNG.integers(-FEW - 3, FEW + 3, rows).astype(dtype), RNG.integers(-SEGMENTS - 9, SEGMENTS + 9, rows).astype(dtype)


def pipelined(fn: Network, *constants: np.ndarray, target: str | None = None) -> Any:
    return kj.pipeline(lambda x, table: fn(x, table, *constants), target=target, force=True, strict=True)


def sorts(fn: Any, *args: Any) -> int:
    """Sorts and orders that a call makes, in the program that XLA gets."""
    text = jax.jit(fn).lower(*args).as_text()
    assert "custom_call @kitsune_c" in text
    return text.count("stablehlo.sort") + text.count("@kitsune_cpu_order")


@pytest.mark.parametrize("target", [None, "emulator"])
def test_no_call_sorts_constant_indices(target: str | None) -> None:
    rows, segments = LARGE
    (x, table), ends, fn = arrays(rows=rows), edges(rows=rows), network(segments=segments)
    given = kj.pipeline(fn, target=target, force=True, strict=True)
    assert sorts(given, x, table, *ends) > 0, "indices that are arguments have an order of each call"
    assert sorts(pipelined(fn, *ends, target=target), x, table) == 0


@pytest.mark.parametrize("mode", [None, "drop", "clip"])
@pytest.mark.parametrize("target", [None, "emulator"])
def test_results_by_constant_indices(target: str | None, mode: str | None) -> None:
    x, table = arrays()
    ends = edges()
    got = jax.jit(pipelined(network(mode), *ends, target=target))(x, table)
    close(got, in_float64(lambda x, t: network(mode)(x, t, *ends), x, table))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 61])
def test_dtypes_and_few_rows(dtype: Any, rows: int) -> None:
    x, table = arrays(dtype, rows)
    ends = edges(np.int16, rows)
    got = jax.jit(pipelined(network(), *ends))(x, table)
    close(got, in_float64(lambda x, t: network()(x, t, *ends), x, table), tol=0.02)


def test_the_gradient_of_a_gather_sorts_no_constant() -> None:
    """The sum by senders is in the backward pass, which knows the constant as the forward pass does."""
    rows, segments = LARGE
    x, table = jax.device_put(np.asarray(RNG.standard_normal((rows, WIDTH)), jnp.float32)), jnp.ones((segments, WIDTH))
    senders = RNG.integers(-3, segments, rows).astype(np.int32)

    def loss(x: jax.Array, table: jax.Array, senders: Any) -> jax.Array:
        return jnp.sum(jnp.sin(x * table[senders]))

    inside = pipelined(loss, senders)
    gradient = jax.grad(inside, (0, 1))
    of_argument = jax.grad(kj.pipeline(loss, force=True, strict=True), (0, 1))
    assert sorts(of_argument, x, table, senders) > 0
    assert sorts(gradient, x, table) == 0
    for got, want in zip(gradient(x, table), in_float64(jax.grad(lambda *a: loss(*a, senders), (0, 1)), x, table), strict=True):
        close(got, want)


def test_constants_in_order_need_no_order() -> None:
    x, table = arrays()
    senders, receivers = edges()
    rising = np.sort(np.abs(receivers))
    reports = []
    for ends in (rising, rising[::-1].copy()):
        explained = kj.explain(lambda *a, ends=ends: network()(*a, senders, ends), force=True, device="h200")
        reports.append(str(explained(x, table)))
    assert ["order of" in report for report in reports] == [False, True], reports
    got = jax.jit(pipelined(network(), senders, rising))(x, table)
    close(got, in_float64(lambda x, t: network()(x, t, senders, rising), x, table))


@pytest.mark.parametrize("transform", [jax.vmap, jax.checkpoint, jax.jit, lambda f: jax.jit(jax.vmap(f))])
def test_transformations_of_a_function_with_constants(transform: Callable[..., Any]) -> None:
    senders, receivers = edges()
    one = (
        pipelined(network(), senders, receivers)
        if transform is jax.checkpoint
        else kj.pipeline(lambda x, t: network()(x, t, senders, receivers), force=True)
    )
    x, table = arrays()
    args = (x, table) if transform in (jax.checkpoint, jax.jit) else (jnp.stack([x, 2 * x]), jnp.stack([table, -table]))
    plain = transform(lambda x, t: network()(x, t, senders, receivers))
    close(transform(one)(*args), in_float64(plain, *args))
    with jax.disable_jit():
        close(one(x, table), in_float64(lambda x, t: network()(x, t, senders, receivers), x, table))


def test_a_loop_holds_the_constant() -> None:
    x, table = arrays()
    ends = edges()
    one = pipelined(network(), *ends)

    def steps(x: jax.Array, table: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, s: s + one(x, table), jnp.zeros((SEGMENTS, WIDTH)))

    close(jax.jit(steps)(x, table), 3 * in_float64(lambda x, t: network()(x, t, *ends), x, table))


def test_large_arrays_and_numbers_stay_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(fn: Any, *args: Any) -> set[str]:
        (call,) = [e for e in jax.make_jaxpr(jax.jit(fn))(*args).eqns]
        found, wanted = set[str](), [call]
        while wanted:
            e = wanted.pop()
            found.add(e.primitive.name)
            wanted += [inner for j in _compat.inner_jaxprs(e) for inner in _compat.open_parts(j)[0].eqns]
        return found

    x, table = arrays()
    ends, floats = edges(), np.ones((ROWS, 1), np.float32)
    assert _compat.CONSTANT_NAME in names(pipelined(network(), *ends), x, table)
    assert _compat.CONSTANT_NAME not in names(kj.pipeline(lambda x: x * floats), x)
    monkeypatch.setattr("kitsune_jax._compat.jaxprs.MOST_INDEX_BYTES", 4 * ROWS - 1)
    assert _compat.CONSTANT_NAME not in names(pipelined(network(), *ends), x, table)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_the_order_of_constants_is_the_order_of_a_call(dtype: Any) -> None:
    ids = RNG.integers(0, 256, 301).astype(np.uint8).astype(dtype)
    ids[:3] = np.array([-1, -100, 127]).astype(dtype)
    inside = (ids.astype(object) >= 0) & (ids.astype(object) < 90)
    want = [*sorted(np.flatnonzero(inside), key=lambda k: (int(ids[k]), k)), *np.flatnonzero(~inside)]
    assert order_of_constants(ids, 90).tolist() == want
