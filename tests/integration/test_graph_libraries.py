"""Graph networks of jraph, flax, equinox and haiku, installed from PyPI and unchanged: pipelined they give the same outputs and
gradients.

What share of the operators is pipelined is a property of the test (``pytest --junit-xml``), and ``python -m benchmarks run --app
jraph_gat`` tells the time against ``jax.jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks.graphs.libraries import LIBRARY_APPS, NEEDS, random_graphs
from tests.support.library_models import LibraryModels, distance

LARGE = ("jraph_graph_network", "jraph_interaction_network", "haiku_message_passing")
MODELS = LibraryModels(LIBRARY_APPS, NEEDS, rows=331, least=0.5)  # edges: not a multiple of any tile


@MODELS.named()
def test_outputs_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    MODELS.check_outputs(name, record_property)


@MODELS.named(LARGE)
def test_gradients_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    MODELS.check_gradients(name, record_property)


@pytest.mark.parametrize("name", ["jraph_interaction_network", "equinox_message_passing"])
def test_gradients_by_the_features_of_nodes_and_edges(name: str) -> None:
    """What a user does who optimises a design: by the inputs, integers among them."""
    model = MODELS.case(name)

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
    MODELS.check_bfloat16(name)


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_graph_of_one_edge(rows: int) -> None:
    """Graphs without edges are among the three."""
    MODELS.check_rows("nnx_message_passing", rows, rtol=1e-5)


def test_the_random_graphs_are_separate() -> None:
    graphs = random_graphs(1000, np.random.default_rng(0))
    assert graphs["n_edge"].sum() == len(graphs["senders"]) == 1000
    last = np.repeat(np.cumsum(graphs["n_node"]), graphs["n_edge"])
    for ends in (graphs["senders"], graphs["receivers"]):
        assert (ends < last).all()
        assert (ends >= last - np.repeat(graphs["n_node"], graphs["n_edge"])).all()
