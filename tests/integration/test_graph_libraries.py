"""Graph networks of jraph, flax, equinox and haiku, installed from PyPI and unchanged: pipelined they give the same outputs and
gradients.

Forced: at sizes that suit a test no pipeline would pay. A test is skipped where its library is not installed. What share of the
operators is pipelined is a property of the test (``pytest --junit-xml``), and ``python -m benchmarks run --app jraph_gat``
tells the time against ``jax.jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks.graphs.apps import GraphCase, case_of
from benchmarks.graphs.libraries import LIBRARY_APPS, NEEDS, random_graphs
from benchmarks.graphs.measure import in_float64, loss_and_grads

EDGES = 331  # not a multiple of any tile
each_model = pytest.mark.parametrize("name", list(LIBRARY_APPS))


def case(name: str, dtype: str = "f32", rows: int = EDGES) -> GraphCase:
    for library in NEEDS[name]:
        pytest.importorskip(library)
    return case_of(LIBRARY_APPS[name], dtype, rows)


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


@each_model
def test_outputs_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    model = case(name)
    exact = in_float64(lambda params, inputs, _: model.function(params, *inputs), model)
    found, plain = (outputs(model, f) for f in (kj.pipeline(model.function, force=True), model.function))
    assert distance(found, exact) < max(4 * distance(plain, exact), 1e-6)
    report = kj.explain(model.function, force=True)(model.params, *model.inputs)
    record_property("operators pipelined", f"{report.ops_pipelined} of {report.ops_total}")
    assert report.ops_pipelined > report.ops_total / 2


_LARGE = ("jraph_graph_network", "jraph_interaction_network", "haiku_message_passing")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in _LARGE else ()) for n in LIBRARY_APPS])
def test_gradients_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    model = case(name)
    exact = in_float64(loss_and_grads(model, model.function), model)
    found, plain = (gradients(model, f) for f in (kj.pipeline(model.function, force=True), model.function))
    assert jax.tree.structure(found) == jax.tree.structure(plain)
    assert distance(found, exact) < max(4 * distance(plain, exact), 1e-6)
    report = kj.explain(loss_and_grads(model, model.function), force=True)(model.params, model.inputs, model.targets)
    record_property("operators pipelined", f"{report.ops_pipelined} of {report.ops_total}")
    assert report.ops_pipelined > report.ops_total / 2


@pytest.mark.parametrize("name", ["jraph_interaction_network", "equinox_message_passing"])
def test_gradients_by_the_features_of_nodes_and_edges(name: str) -> None:
    """What a user does who optimises a design: by the inputs, integers among them."""
    model = case(name)

    def by_inputs(function: Callable[..., Any]) -> Any:
        arrays, rest = _floats(model.inputs)
        loss = jax.jit(jax.grad(lambda arrays: model.app.loss(function(model.params, *rest(arrays)), model.targets)))
        return loss(arrays)

    assert distance(by_inputs(kj.pipeline(model.function, force=True)), by_inputs(model.function)) < 1e-5


def _floats(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The floating-point leaves, and what puts them back."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def rest(arrays: list[Any]) -> Any:
        new = dict(zip(chosen, arrays, strict=True))
        return jax.tree.unflatten(structure, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in chosen], rest


@pytest.mark.parametrize("name", ["haiku_message_passing", "nnx_message_passing"])
def test_bfloat16_is_as_good_as_without_pipelines(name: str) -> None:
    model = case(name, "bf16")
    exact = in_float64(lambda params, inputs, _: model.function(params, *inputs), model)
    errors = [distance(outputs(model, f), exact) for f in (model.function, kj.pipeline(model.function, force=True))]
    assert errors[1] < 2 * errors[0] < 0.2


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_graph_of_one_edge(rows: int) -> None:
    """Graphs without edges are among the three."""
    model = case("nnx_message_passing", rows=rows)
    np.testing.assert_allclose(
        outputs(model, kj.pipeline(model.function, force=True)), outputs(model, model.function), rtol=1e-5, atol=1e-5
    )


def test_the_random_graphs_are_separate() -> None:
    graphs = random_graphs(1000, np.random.default_rng(0))
    assert graphs["n_edge"].sum() == len(graphs["senders"]) == 1000
    last = np.repeat(np.cumsum(graphs["n_node"]), graphs["n_edge"])
    for ends in (graphs["senders"], graphs["receivers"]):
        assert (ends < last).all()
        assert (ends >= last - np.repeat(graphs["n_node"], graphs["n_edge"])).all()
