"""Transformers, recurrent networks, solvers, simulators and optimisers of libraries, installed from PyPI and unchanged: pipelined
they give the same outputs and gradients.

Forced: at sizes that suit a test no pipeline would pay. A test is skipped where its library is not installed. What share of the
operators is pipelined is a property of the test (``pytest --junit-xml``), and ``python -m benchmarks run --app nnx_transformer``
tells the time against ``jax.jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks.graphs.apps import GraphCase, case_of
from benchmarks.graphs.measure import in_float64, loss_and_grads
from benchmarks.sequences.libraries import NEEDS, SEQUENCE_LIBRARY_APPS

ROWS = 37  # not a multiple of any tile
DRAWN = ("gymnax_cartpole", "gymnax_pendulum")  # their random bits in float64 are others
SLOW = ("linen_transformer", "equinox_transformer", "diffrax_ode", "nnx_lstm", "gymnax_pendulum")
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


def named(names: Any, slow: tuple[str, ...] = SLOW) -> Any:
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in names])


def case(name: str, dtype: str = "f32", rows: int = ROWS) -> GraphCase:
    for library in NEEDS[name]:
        pytest.importorskip(library)
    return case_of(SEQUENCE_LIBRARY_APPS[name], dtype, rows)


def distance(got: Any, want: Any) -> float:
    """|got - want| / |want| in the Euclidean norm over all arrays."""
    arrays = ([np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    pairs = list(zip(*arrays, strict=True))
    assert all(g.shape == w.shape for g, w in pairs)
    return float(np.sqrt(sum(np.sum((g - w) ** 2) for g, w in pairs) / sum(np.sum(w**2) for _, w in pairs)))


def outputs(found: GraphCase, function: Callable[..., Any]) -> Any:
    return jax.jit(function)(found.params, *found.inputs)


def gradients(found: GraphCase, function: Callable[..., Any]) -> Any:
    return jax.jit(loss_and_grads(found, function))(found.params, found.inputs, found.targets)


@named(SEQUENCE_LIBRARY_APPS)
def test_outputs_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    model = case(name)
    found, plain = (outputs(model, f) for f in (kj.pipeline(model.function, force=True), model.function))
    assert distance(found, plain) < 1e-4
    if name not in DRAWN:
        exact = in_float64(lambda params, inputs, _: model.function(params, *inputs), model)
        assert distance(found, exact) < max(4 * distance(plain, exact), 1e-6)
    report = kj.explain(model.function, force=True)(model.params, *model.inputs)
    record_property("operators pipelined", f"{report.ops_pipelined} of {report.ops_total}")
    assert report.ops_total > 0


@named([n for n in SEQUENCE_LIBRARY_APPS if SEQUENCE_LIBRARY_APPS[n].train_rows], (*SLOW, "nnx_transformer", "linen_gru"))
def test_gradients_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    model = case(name)
    exact = in_float64(loss_and_grads(model, model.function), model)
    found, plain = (gradients(model, f) for f in (kj.pipeline(model.function, force=True), model.function))
    assert jax.tree.structure(found) == jax.tree.structure(plain)
    assert distance(found, exact) < max(4 * distance(plain, exact), 1e-6)
    report = kj.explain(loss_and_grads(model, model.function), force=True)(model.params, model.inputs, model.targets)
    record_property("operators pipelined", f"{report.ops_pipelined} of {report.ops_total}")
    assert report.ops_total > 0


@pytest.mark.parametrize("name", ["jax_attention", "equinox_gru"])
def test_bfloat16_is_as_good_as_without_pipelines(name: str) -> None:
    model = case(name, "bf16")
    exact = in_float64(lambda params, inputs, _: model.function(params, *inputs), model)
    errors = [distance(outputs(model, f), exact) for f in (model.function, kj.pipeline(model.function, force=True))]
    assert errors[1] < 2 * errors[0] < 0.2


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("name", ["jax_attention", "equinox_gru"])
def test_of_one_token_or_sequence(name: str, rows: int) -> None:
    model = case(name, rows=rows)
    np.testing.assert_allclose(
        outputs(model, kj.pipeline(model.function, force=True)), outputs(model, model.function), rtol=1e-4, atol=1e-5
    )


def test_names_of_library_models_agree() -> None:
    from benchmarks import store

    assert tuple(SEQUENCE_LIBRARY_APPS) == tuple(NEEDS)
    assert set(SEQUENCE_LIBRARY_APPS) <= set(store.LIBRARY_APP_NAMES)
