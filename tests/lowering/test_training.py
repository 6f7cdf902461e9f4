"""Gradients where training loops take them: differentiated again, batched, in loops and branches, sharded, in mixed precision.

Every program is built twice from one function, the value and gradient of a loss: with only its network pipelined, and pipelined as
a whole. Each is compared with float64 JAX, and must hold pipelines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from tests.support.checks import arrays, count, in_float64

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

Params = dict[str, Any]
ValueAndGrad = Callable[..., tuple[Any, Params]]
# Rounded to 8 bits of mantissa at every operator, and summed over a few dozen rows.
TOLERANCE = {"float32": 5e-5, "bfloat16": 6e-2}
WIDTHS = (12, 20, 20, 3)


def make(rows: int, dtype: Any = jnp.float32, seed: int = 0) -> tuple[Params, Any, Any]:
    """Parameters, inputs and targets."""
    layers = list(zip(WIDTHS, WIDTHS[1:], strict=False))
    made = arrays(seed, *layers, *((n,) for n in WIDTHS[1:]), (20,), (rows, WIDTHS[0]), (rows, WIDTHS[-1]))
    names = ("w0", "w1", "w2", "b0", "b1", "b2", "gain")
    params = {name: a.astype(dtype) for name, a in zip(names, made, strict=False)}
    return params, *(a.astype(dtype) for a in made[-2:])


def network(p: Params, x: Any) -> Any:
    h = jax.nn.relu(x @ p["w0"] + p["b0"])
    f = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    f = f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + 1e-3)
    h = h + jax.nn.silu(f.astype(h.dtype) * p["gain"] @ p["w1"] + p["b1"])
    return h @ p["w2"] + p["b2"]


def squared_error(f: Callable[..., Any]) -> Callable[..., Any]:
    def loss(p: Params, x: Any, y: Any) -> Any:
        d = (f(p, x) - y).astype(jnp.promote_types(y.dtype, jnp.float32))
        return jnp.mean(d * d)

    return loss


def plain() -> ValueAndGrad:
    return jax.value_and_grad(squared_error(network))


def network_pipelined(**options: Any) -> ValueAndGrad:
    return jax.value_and_grad(squared_error(kj.pipeline(network, force=True, **options)))


def pipelined_as_a_whole(**options: Any) -> ValueAndGrad:
    return kj.pipeline(plain(), force=True, **options)


WAYS = {"network": network_pipelined, "whole": pipelined_as_a_whole}


def agree(got: Any, want: Any, tolerance: float, beside: Any = None) -> None:
    """Same tree and shapes; each array within ``tolerance`` of its largest value, or as near as that of ``beside``."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    others = jax.tree.leaves(want if beside is None else beside)
    for (path, a), b, other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), others, strict=True):
        assert np.shape(a) == np.shape(b)
        error, usual = (_error(x, b) for x in (a, other))
        assert error <= max(tolerance, 1.25 * usual), f"{jax.tree_util.keystr(path)} is off by {error:.2e} of its largest value"


def _error(got: Any, want: Any) -> float:
    """The largest error of an array, relative to its largest value."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-3))


def check(program: Callable[[ValueAndGrad], Any], way: str, args: Any, tolerance: float, **jit: Any) -> None:
    want = in_float64(program(plain()), *args)
    compiled = jax.jit(program(WAYS[way]()), **jit).lower(*args).compile()
    assert count(compiled.as_text()) > 0, "nothing was pipelined"
    # In 16 bits some sums of three terms are what rounding leaves of them, with jit as well.
    beside = jax.jit(program(plain()), **jit)(*args) if tolerance == TOLERANCE["bfloat16"] else None
    agree(compiled(*args), want, tolerance, beside)


# --- programs: a value and gradient in, a function of (parameters, inputs, targets) out ------------------------------------------

PROGRAMS: dict[str, Callable[[ValueAndGrad], Any]] = {}


def program(build: Callable[[ValueAndGrad], Any]) -> Callable[[ValueAndGrad], Any]:
    PROGRAMS[build.__name__] = build
    return build


@program
def value_and_gradient(vag: ValueAndGrad) -> Any:
    return vag


@program
def hessian_vector_product(vag: ValueAndGrad) -> Any:
    def f(p: Params, x: Any, y: Any) -> Any:
        return jax.jvp(lambda p: vag(p, x, y), (p,), (jax.tree.map(jnp.sin, p),))

    return f


@program
def gradient_of_the_gradient(vag: ValueAndGrad) -> Any:
    def norm(p: Params, x: Any, y: Any) -> Any:
        return sum(jnp.sum(g.astype(jnp.promote_types(g.dtype, jnp.float32)) ** 2) for g in jax.tree.leaves(vag(p, x, y)[1]))

    return jax.grad(norm)


@program
def hessian_by_a_bias(vag: ValueAndGrad) -> Any:
    return lambda p, x, y: jax.jacfwd(lambda b: vag({**p, "b2": b}, x, y)[1]["b2"])(p["b2"])


@program
def per_example_gradients(vag: ValueAndGrad) -> Any:
    return lambda p, x, y: jax.vmap(vag, (None, 0, 0))(p, x, y)


@program
def accumulation_in_a_scan(vag: ValueAndGrad) -> Any:
    def f(p: Params, x: Any, y: Any) -> Any:
        micro = lambda a: jnp.stack([a, a[::-1] * 0.5, a + 0.25])  # noqa: E731
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), p)

        def step(total: Params, batch: tuple[Any, Any]) -> tuple[Params, Any]:
            value, grads = vag(p, *batch)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), value

        return jax.lax.scan(step, zero, (micro(x), micro(y)))

    return f


@program
def descent_in_a_while_loop(vag: ValueAndGrad) -> Any:
    def f(p: Params, x: Any, y: Any) -> Any:
        def step(state: tuple[Any, Params]) -> tuple[Any, Params]:
            i, q = state
            return i + 1, jax.tree.map(lambda a, g: a - 0.1 * g, q, vag(q, x, y)[1])

        return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, p))[1]

    return f


@program
def gradient_in_a_branch(vag: ValueAndGrad) -> Any:
    def f(p: Params, x: Any, y: Any) -> Any:
        zeros = lambda p, x, y: jax.tree.map(jnp.zeros_like, vag(p, x, y))  # noqa: E731
        return jax.lax.cond(x.shape[0] > jnp.sum(x) * 0, vag, zeros, p, x, y)

    return f


@program
def under_a_checkpoint(vag: ValueAndGrad) -> Any:
    return jax.grad(lambda p, x, y: jax.checkpoint(vag)(p, x, y)[0].astype(jnp.promote_types(x.dtype, jnp.float32)))


SECOND_ORDER = ("hessian_vector_product", "gradient_of_the_gradient", "hessian_by_a_bias")
# Each program one way; the slow tests run both.
ALTERNATELY = [(name, tuple(WAYS)[i % 2]) for i, name in enumerate(PROGRAMS)]


@pytest.mark.parametrize(("name", "way"), ALTERNATELY)
def test_float32(name: str, way: str) -> None:
    check(PROGRAMS[name], way, make(23), TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("name", "way"), [("per_example_gradients", "network"), ("accumulation_in_a_scan", "network"), ("value_and_gradient", "whole")]
)
def test_bfloat16(name: str, way: str) -> None:
    check(PROGRAMS[name], way, make(23, jnp.bfloat16), TOLERANCE["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in SECOND_ORDER])
@pytest.mark.parametrize("rows", [1, 97, 331])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_order_at_every_size(name: str, way: str, rows: int, dtype: str) -> None:
    check(PROGRAMS[name], way, make(rows, jnp.dtype(dtype), seed=rows), TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SECOND_ORDER)
@pytest.mark.parametrize("rows", [1, 97, 331])
def test_second_order_at_every_size(name: str, way: str, rows: int) -> None:
    check(PROGRAMS[name], way, make(rows, seed=rows), TOLERANCE["float32"])


@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_an_empty_batch_is_zero(way: str) -> None:
    total = lambda f: lambda p, x, y: jnp.sum((f(p, x) - y) ** 2)  # noqa: E731
    pipelined = (
        jax.grad(total(kj.pipeline(network, force=True))) if way == "network" else kj.pipeline(jax.grad(total(network)), force=True)
    )
    grads = jax.jit(pipelined)(*make(0))
    assert {k: g.shape for k, g in grads.items()} == {k: a.shape for k, a in make(0)[0].items()}
    assert all(not np.any(np.asarray(g)) for g in grads.values())


# --- loops of training ----------------------------------------------------------------------------------------------------------


def momentum_step(vag: ValueAndGrad) -> Any:
    def step(p: Params, velocity: Params, x: Any, y: Any) -> tuple[Params, Params, Any]:
        value, grads = vag(p, x, y)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(lambda a, v: a - 0.05 * v, p, velocity), velocity, value

    return step


@pytest.mark.parametrize(("way", "residuals"), [("network", "recompute"), ("step", "save")])
def test_donated_parameters_and_optimiser_state(way: str, residuals: str) -> None:
    step = (
        kj.pipeline(momentum_step(plain()), force=True, residuals=residuals)
        if way == "step"
        else momentum_step(network_pipelined(residuals=residuals))
    )
    p, x, y = make(23)
    args = (p, jax.tree.map(jnp.zeros_like, p), x, y)
    want = in_float64(lambda p, v, x, y: momentum_step(plain())(*momentum_step(plain())(p, v, x, y)[:2], x, y), *args)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    assert count(compiled.as_text()) > 0
    first = compiled(*args)
    assert all(a.is_deleted() for a in jax.tree.leaves(args[:2]))
    agree(compiled(*first[:2], x, y), want, TOLERANCE["float32"])


@pytest.mark.parametrize("way", ["network", "whole"])
def test_bfloat16_compute_with_float32_master_weights(way: str) -> None:
    def cast(f: Callable[..., Any]) -> Callable[..., Any]:
        narrow = functools.partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))
        return lambda p, x: f(narrow(p), narrow(x)).astype(jnp.float32)

    mixed = (
        jax.value_and_grad(squared_error(cast(kj.pipeline(network, force=True))))
        if way == "network"
        else kj.pipeline(jax.value_and_grad(squared_error(cast(network))), force=True)
    )
    args = make(97)
    compiled = jax.jit(mixed).lower(*args).compile()
    assert count(compiled.as_text()) > 0
    value, grads = compiled(*args)
    assert {g.dtype for g in grads.values()} == {jnp.dtype(jnp.float32)}
    agree((value, grads), in_float64(plain(), *args), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_summed_over_eight_devices(way: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    p, x, y = make(8 * 5)
    vag = WAYS[way]()

    def local(p: Params, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda a: jax.lax.psum(a, "data") / 8, vag(p, x, y))

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
    compiled = jax.jit(sharded).lower(p, x, y).compile()
    text = compiled.as_text()
    assert count(text) > 0
    assert "all-gather" not in text
    agree(compiled(p, x, y), in_float64(plain(), p, x, y), TOLERANCE["float32"])


def test_gradients_summed_by_the_transposition_of_shard_map() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(kj.pipeline(network, force=True), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    args = make(8 * 3)
    compiled = jax.jit(jax.value_and_grad(squared_error(f))).lower(*args).compile()
    assert count(compiled.as_text()) >= 2
    agree(compiled(*args), in_float64(plain(), *args), TOLERANCE["float32"])


# --- determinism ----------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_two_runs_are_bit_equal(way: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, weight and bias gradients are sums over the rows, split over the workers: whoever is first must not matter."""
    monkeypatch.setenv("KITSUNE_PROFILE", f"zen5-{workers}")
    args = make(4099, seed=workers)
    vag = WAYS[way]()
    regions = kj.explain(vag)(*args).regions
    assert max(region.workers * region.replicas for region in regions) == workers
    compiled = jax.jit(vag).lower(*args).compile()
    first = jax.tree.map(np.asarray, compiled(*args))
    for _ in range(6):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, compiled(*args)), first)
    agree(first, in_float64(plain(), *args), TOLERANCE["float32"])
