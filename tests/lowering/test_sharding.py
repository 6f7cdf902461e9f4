"""Eight forced devices: pipelines under ``shard_map``; plain HLO and one warning under XLA's old partitioner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax.frontend import lowering
from tests.support.checks import arrays, close, count, in_float64
from tests.support.transform_cases import loss, mlp

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here
X, W1, W2 = arrays(0, (16, 8), (8, 16), (16, 8))


def _mesh(shape: tuple[int, ...] = (8,), names: tuple[str, ...] = ("data",), kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert len(jax.devices()) >= 8, "set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX starts"
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def _sharded(f: Any, **options: Any) -> Any:
    return jax.shard_map(f, mesh=_mesh(), in_specs=(P("data"), P(), P()), out_specs=P("data"), **options)


def _gathers(text: str) -> int:
    return len(re.findall(r"= \S+ all-gather", text))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_keeps_its_pipelines(check_vma: bool, force: bool) -> None:
    p = _sharded(kj.pipeline(mlp, force=force), check_vma=check_vma)
    for f, want in ((p, mlp), (jax.grad(loss(p), (0, 1, 2)), jax.grad(loss(mlp), (0, 1, 2)))):
        compiled = jax.jit(f).lower(X, W1, W2).compile()
        if force:
            assert count(compiled.as_text()) > 0
        assert _gathers(compiled.as_text()) == 0
        close(jax.jit(f)(X, W1, W2), in_float64(want, X, W1, W2))


def test_grad_inside_shard_map() -> None:
    f = _sharded(jax.grad(loss(kj.pipeline(mlp, force=True))))
    assert count(jax.jit(f).lower(X, W1, W2).compile().as_text()) > 0
    close(jax.jit(f)(X, W1, W2), in_float64(jax.grad(loss(mlp)), X, W1, W2))


def test_scan_inside_shard_map() -> None:
    def scanned(x: Any, w: Any, _: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w @ w.T), None), x, None, length=3)[0]

    f = jax.jit(_sharded(kj.pipeline(scanned, force=True)))
    assert count(f.lower(X, W1, W2).compile().as_text()) > 0
    close(f(X, W1, W2), in_float64(scanned, X, W1, W2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("force", [True, False])
def test_the_gradient_of_a_loop_inside_shard_map(check_vma: bool, force: bool) -> None:
    """Sums of weights' gradients leave the loop and are added up over the mesh; a loop that is left to XLA is as it was."""

    def recurrent(x: Any, w: Any, u: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ w + h @ u)
            return h, h

        return jax.lax.scan(step, jnp.zeros((x.shape[1], u.shape[0]), x.dtype) * x[0, :, :1], x)[1]

    args = arrays(3, (4, 16, 8), (8, 6), (6, 6))
    spread = P(None, "data")
    p = jax.shard_map(
        kj.pipeline(recurrent, force=force), mesh=_mesh(), in_specs=(spread, P(), P()), out_specs=spread, check_vma=check_vma
    )
    f = jax.jit(jax.grad(loss(p), (0, 1, 2)))
    assert (count(f.lower(*args).compile().as_text()) > 1) is force
    close(f(*args), in_float64(jax.grad(loss(recurrent), (0, 1, 2)), *args))


def test_collective_inside_the_pipeline() -> None:
    p = kj.pipeline(lambda x, w: jax.lax.psum(jnp.tanh(x) @ w, "data"), force=True)
    f = jax.shard_map(p, mesh=_mesh(), in_specs=(P(None, "data"), P("data")), out_specs=P())
    want = lambda x, w: jnp.tanh(x) @ w  # noqa: E731
    assert count(jax.jit(f).lower(X, W1).compile().as_text()) > 0
    close(jax.jit(f)(X, W1), in_float64(want, X, W1))
    close(jax.jit(jax.grad(loss(f), (0, 1)))(X, W1), in_float64(jax.grad(loss(want), (0, 1)), X, W1))


def test_vmap_inside_shard_map() -> None:
    batch = jnp.stack([X, X * 2, X * 3, X * 4, X, X, X, X])
    f = jax.jit(_sharded(jax.vmap(kj.pipeline(mlp, force=True), (0, None, None))))
    assert count(f.lower(batch, W1, W2).compile().as_text()) > 0
    close(f(batch, W1, W2), in_float64(jax.vmap(mlp, (0, None, None)), batch, W1, W2))


@pytest.mark.parametrize("manual", [("a", "b"), ("b", "c"), ("c",)])
@pytest.mark.parametrize("step", ["forward", "gradient"])
def test_a_shard_map_that_leaves_an_axis_automatic(manual: tuple[str, ...], step: str) -> None:
    """XLA divides the hidden layer by it."""
    mesh = _mesh((2, 2, 2), ("a", "b", "c")) if len(manual) == 2 else _mesh((4, 2), ("c", "d"))
    (hidden,) = (name for name in mesh.axis_names if name not in manual)
    f = jax.shard_map(
        kj.pipeline(mlp, force=True, strict=True),
        mesh=mesh,
        in_specs=(P(manual), P(), P()),
        out_specs=P(manual),
        axis_names=set(manual),
    )
    specs = P(manual), P(None, hidden), P(hidden)
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((X, W1, W2), specs, strict=True)]
    run, want = (jax.grad(loss(f), (0, 1, 2)), jax.grad(loss(mlp), (0, 1, 2))) if step == "gradient" else (f, mlp)
    compiled = jax.jit(run).lower(*args).compile()
    assert count(compiled.as_text()) > 0
    assert _gathers(compiled.as_text()) == 0
    close(compiled(*args), in_float64(want, X, W1, W2))


@pytest.mark.parametrize("manual", ["a", "b", "c"])
@pytest.mark.parametrize("step", ["forward", "gradient"])
def test_a_shard_map_that_leaves_several_axes_automatic(manual: str, step: str) -> None:
    """XLA numbers the devices of a group as the first operands and results are divided, in one order of the axes or another."""
    mesh = _mesh((2, 2, 2), ("a", "b", "c"))
    first, second = (name for name in mesh.axis_names if name != manual)
    f = jax.shard_map(
        kj.pipeline(mlp, force=True, strict=True),
        mesh=mesh,
        in_specs=(P(manual), P(), P()),
        out_specs=P(manual),
        axis_names={manual},
    )
    run, want = (jax.grad(loss(f), (0, 1, 2)), jax.grad(loss(mlp), (0, 1, 2))) if step == "gradient" else (f, mlp)
    for b, c in ((first, second), (second, first)):
        for specs in (
            (P((manual, b)), P(None, c), P(c)),
            (P(manual, b), P(b), P(None, c)),
            (P(manual), P(None, (b, c)), P((b, c))),
            (P(manual, c), P(None, (c, b)), P()),
        ):
            args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((X, W1, W2), specs, strict=True)]
            compiled = jax.jit(run).lower(*args).compile()
            assert count(compiled.as_text()) > 0
            close(compiled(*args), in_float64(want, X, W1, W2))


def test_no_array_is_gathered_where_several_axes_are_automatic() -> None:
    mesh = _mesh((2, 2, 2), ("a", "b", "c"))
    f = jax.shard_map(kj.pipeline(mlp, force=True), mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P("a"), axis_names={"a"})
    specs = P(("a", "b")), P(None, "c"), P("c")
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((X, W1, W2), specs, strict=True)]
    for run in (f, jax.grad(loss(f), (0, 1, 2))):
        assert _gathers(jax.jit(run).lower(*args).compile().as_text()) == 0


@pytest.mark.parametrize("step", ["forward", "gradient"])
def test_a_shard_map_whose_automatic_axis_has_one_device(step: str) -> None:
    mesh = _mesh((8, 1), ("a", "b"))
    f = jax.shard_map(
        kj.pipeline(mlp, force=True, strict=True), mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P("a"), axis_names={"a"}
    )
    run, want = (jax.grad(loss(f), (0, 1, 2)), jax.grad(loss(mlp), (0, 1, 2))) if step == "gradient" else (f, mlp)
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((X, W1, W2), (P("a"), P(), P()), strict=True)]
    compiled = jax.jit(run).lower(*args).compile()
    assert count(compiled.as_text()) > 0
    close(compiled(*args), in_float64(want, X, W1, W2))


@pytest.fixture
def old_partitioner() -> Iterator[None]:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.usefixtures("old_partitioner")
def test_the_old_partitioner_is_plain_and_says_so_once() -> None:
    lowering.warn_sharded.cache_clear()
    mesh = _mesh()
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    weights = [jax.device_put(w, NamedSharding(mesh, P())) for w in (W1, W2)]
    p = kj.pipeline(mlp, force=True)
    with pytest.warns(UserWarning, match="jax_use_shardy_partitioner") as told:
        compiled = jax.jit(p).lower(x, *weights).compile()
        gradient = jax.jit(jax.grad(loss(p), (0, 1, 2))).lower(x, *weights).compile()
    assert len([w for w in told if "kitsune_jax" in str(w.message)]) == 1
    for c in (compiled, gradient):
        assert (count(c.as_text()), _gathers(c.as_text())) == (0, 0)
    close(compiled(x, *weights), in_float64(mlp, X, W1, W2))
    close(gradient(x, *weights), in_float64(jax.grad(loss(mlp), (0, 1, 2)), X, W1, W2))


@pytest.mark.usefixtures("old_partitioner")
def test_strict_says_why_under_the_old_partitioner() -> None:
    x = jax.device_put(X, NamedSharding(_mesh(), P("data")))
    with pytest.raises(kj.NotPipelined, match="jax_use_shardy_partitioner"):
        jax.jit(kj.pipeline(mlp, force=True, strict=True))(x, W1, W2)


@pytest.mark.filterwarnings("ignore:kitsune_jax")
def test_manual_and_automatic_parts_of_one_program() -> None:
    p = kj.pipeline(mlp, force=True)

    def f(a: Any, b: Any, w1: Any, w2: Any) -> Any:
        return jnp.sum(p(a, w1, w2)) + jnp.sum(_sharded(p)(b, w1, w2))

    text = jax.jit(f).lower(X[:2], X, W1, W2).compile().as_text()
    assert count(text) > 0
    close(
        jax.jit(f)(X[:2], X, W1, W2),
        in_float64(lambda a, b, w1, w2: jnp.sum(mlp(a, w1, w2)) + jnp.sum(mlp(b, w1, w2)), X[:2], X, W1, W2),
    )


def test_a_mesh_of_one_and_another_device() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    f = jax.jit(kj.pipeline(mlp, force=True))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    assert count(f.lower(x, W1, W2).compile().as_text()) > 0
    elsewhere = [jax.device_put(a, jax.devices()[3]) for a in (X, W1, W2)]
    assert count(f.lower(*elsewhere).compile().as_text()) > 0
    out = f(*elsewhere)
    assert out.devices() == {jax.devices()[3]}
    close(out, in_float64(mlp, X, W1, W2))
