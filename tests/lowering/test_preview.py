"""``explain`` tells what will really happen: what keeps every pipeline away stands at the top of the report and in its counts."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax import _cpu, config
from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.lowering import DIVIDED
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cuda import nvrtc
from tests.support.checks import arrays, count

X, W1, W2 = arrays(0, (16, 8), (8, 16), (16, 8))


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return jnp.tanh(jnp.sin(x @ w1) @ w2)


def _compiled(f: Any, *args: Any) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return count(jax.jit(f).lower(*args).compile().as_text())


def _blocked(report: kj.Report, words: str) -> None:
    """Nothing of ``report`` is pipelined, and its first line says so with ``words``."""
    assert report.ops_pipelined == 0 and report.regions == () and report.coverage == 0
    assert report.ops_total > 0 and sum(r.count for r in report.rejected) == report.ops_total
    assert report.bytes_saved == 0 and report.seconds == 0 and report.residuals is None
    assert any(words in obstacle for obstacle in report.obstacles), report.obstacles
    top = str(report).split("\n\n")[0].replace("\n  ", " ")
    assert top.startswith("nothing is pipelined: ") and words in top
    assert words in report._repr_html_().split("operators")[0].replace("&#x27;", "'")
    assert report.to_dict()["obstacles"] == list(report.obstacles)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("described", [False, True])
def test_sharded_arguments(mesh: jax.sharding.Mesh, described: bool) -> None:
    sharding = NamedSharding(mesh, P("data"))
    x: Any = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding) if described else jax.device_put(X, sharding)
    f = kj.pipeline(mlp, force=True)
    assert _compiled(f, x, W1, W2) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = kj.explain(f)(x, W1, W2)
    assert report.ops_pipelined > 0 and DIVIDED in report.notes
    assert DIVIDED not in kj.explain(f)(X, W1, W2).notes


def test_arguments_on_another_device_are_not_sharded() -> None:
    x, w1, w2 = (jax.device_put(a, jax.devices()[1]) for a in (X, W1, W2))
    f = kj.pipeline(mlp, force=True)
    assert (_compiled(f, x, w1, w2) > 0) and kj.explain(f)(x, w1, w2).ops_pipelined > 0


def test_a_constraint_inside_is_seen(mesh: jax.sharding.Mesh) -> None:
    f = kj.pipeline(lambda x, w1, w2: mlp(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))), w1, w2), force=True)
    assert _compiled(f, X, W1, W2) > 0
    assert DIVIDED in kj.explain(f)(X, W1, W2).notes


def test_calls_in_a_shard_map_and_outside_of_it(mesh: jax.sharding.Mesh) -> None:
    p = kj.pipeline(mlp, force=True)
    inside = jax.shard_map(p, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    assert _compiled(inside, X, W1, W2) > 0
    report = kj.explain(inside)(X, W1, W2)
    assert report.ops_pipelined > 0 and report.obstacles == () and DIVIDED not in report.notes

    def both(x: Any, w1: Any, w2: Any) -> Any:
        return inside(x, w1, w2) + p(x, w1, w2)

    assert _compiled(both, X, W1, W2) == 2
    report = kj.explain(both)(X, W1, W2)
    assert len(report.regions) == 2 and report.obstacles == () and DIVIDED in report.notes

    def twice(x: Any, w1: Any, w2: Any) -> Any:  # JAX lowers equal calls once
        return inside(inside(x, w1, w2), w1, w2) + p(p(x, w1, w2), w1, w2)

    report = kj.explain(twice)(X, W1, W2)
    assert len(report.regions) == 4 and report.obstacles == ()


@pytest.mark.parametrize("how", ["environment", "override"])
def test_the_kill_switch(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    f = kj.pipeline(mlp, force=True)
    step = jax.grad(lambda w: jnp.sum(f(X, w, W2) ** 2))
    if how == "environment":
        monkeypatch.setenv("KITSUNE_DISABLE", "1")
        reports = [kj.explain(f)(X, W1, W2), kj.explain(mlp, force=True)(X, W1, W2), kj.explain(step)(W1)]
        assert _compiled(f, X, W1, W2) == 0
    else:
        with config.override(disable=True):
            reports = [kj.explain(f)(X, W1, W2), kj.explain(mlp, force=True)(X, W1, W2), kj.explain(step)(W1)]
    for report in reports:
        _blocked(report, "KITSUNE_DISABLE")


def test_a_missing_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_state", (None, "the extension was never built"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = kj.explain(kj.pipeline(mlp, force=True))(X, W1, W2)
    _blocked(report, "the extension was never built")
    assert _compiled(kj.pipeline(mlp, force=True), X, W1, W2) == 0


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cuda = importlib.import_module("kitsune_jax.targets.cuda.target")
    cuda.warn_once.cache_clear()
    monkeypatch.setattr(nvrtc, "why_not", lambda: "libnvrtc.so was not found")
    yield
    cuda.warn_once.cache_clear()


@pytest.mark.usefixtures("no_nvrtc")
def test_missing_nvrtc() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _blocked(kj.explain(mlp, platform="cuda", force=True)(X, W1, W2), "libnvrtc.so was not found")
        elsewhere = kj.explain(mlp, platform="cuda", device="h200", force=True)(X, W1, W2)
    assert elsewhere.ops_pipelined > 0 and elsewhere.obstacles == ()  # of a machine that need not be here
    assert any("libnvrtc.so was not found" in note and "here" in note for note in elsewhere.notes)


def test_symbolic_shapes() -> None:
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    _blocked(kj.explain(mlp, force=True)(x, W1, W2), "symbolic")


def test_references_inside_are_values_when_it_is_lowered() -> None:
    def f(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        ref = jax.new_ref(jnp.zeros((16, 16)))
        ref[...] = y
        return jnp.sin(ref[...] + y)

    report = kj.explain(f, force=True)(X, W1)
    assert len(report.regions) == _compiled(kj.pipeline(f, force=True), X, W1) > 0

    def write(ref: Any, x: Any, w: Any) -> None:
        ref[...] = jnp.tanh(x @ w)

    assert kj.explain(write, force=True)(jax.new_ref(jnp.zeros((16, 16))), X, W1).ops_pipelined > 0


def test_a_bug_of_ours_is_told_and_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("planted")

    lowering._routed.cache_clear()
    monkeypatch.setattr(lowering, "route", broken)
    report = kj.explain(mlp, force=True)(X, W1, W2)
    assert report.ops_pipelined == 0 and report.ops_total > 0
    assert "KeyError: 'planted'" in str(report).split("\n\n")[0]
    assert kj.fallbacks() == ()
    with pytest.raises(KeyError, match="planted"):
        kj.explain(mlp, force=True, strict=True)(X, W1, W2)


def test_what_is_asked_runs_nothing(mesh: jax.sharding.Mesh) -> None:
    def f(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda: pytest.fail("explain ran the function"))
        return jnp.tanh(x @ w)

    before = _cpu.calls()
    kj.explain(kj.pipeline(f, force=True))(X, W1)
    kj.explain(lambda x, w: kj.pipeline(f, force=True)(x, w) * 2)(np.asarray(X), np.asarray(W1))
    assert _cpu.calls() == before
