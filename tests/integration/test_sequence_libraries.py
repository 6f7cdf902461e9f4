"""Transformers, recurrent networks, solvers, simulators and optimisers of libraries, installed from PyPI and unchanged: pipelined
they give the same outputs and gradients.

What share of the operators is pipelined is a property of the test (``pytest --junit-xml``), and ``python -m benchmarks run --app
nnx_transformer`` tells the time against ``jax.jit``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import store
from benchmarks.sequences.libraries import NEEDS, SEQUENCE_LIBRARY_APPS
from tests.support.library_models import LibraryModels

SLOW = ("linen_transformer", "equinox_transformer", "diffrax_ode", "nnx_lstm", "gymnax_pendulum")
MODELS = LibraryModels(SEQUENCE_LIBRARY_APPS, NEEDS, rows=37, drawn=("gymnax_cartpole", "gymnax_pendulum"))
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


@MODELS.named(SLOW)
def test_outputs_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    MODELS.check_outputs(name, record_property)


@MODELS.named((*SLOW, "nnx_transformer", "linen_gru"), trained=True)
def test_gradients_are_those_of_jit_and_of_float64(name: str, record_property: Callable[..., None]) -> None:
    MODELS.check_gradients(name, record_property)


@pytest.mark.parametrize("name", ["jax_attention", "equinox_gru"])
def test_bfloat16_is_as_good_as_without_pipelines(name: str) -> None:
    MODELS.check_bfloat16(name)


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("name", ["jax_attention", "equinox_gru"])
def test_of_one_token_or_sequence(name: str, rows: int) -> None:
    MODELS.check_rows(name, rows, rtol=1e-4)


def test_names_of_library_models_agree() -> None:
    assert tuple(SEQUENCE_LIBRARY_APPS) == tuple(NEEDS)
    assert set(SEQUENCE_LIBRARY_APPS) <= set(store.LIBRARY_APP_NAMES)
