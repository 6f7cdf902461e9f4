"""Gradients of random networks with losses as users write them: by parameters and inputs, in one pipeline and around one.

The networks are those of ``trust_programs``, with layers that training adds: dropout and other masks, gates, clipped inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import kitsune_jax as kj
from tests.program.test_build import run_through_interpreter
from tests.support import trust_programs
from tests.support.checks import count
from tests.support.gradient_cases import LOSSES
from tests.support.gradient_checks import check_close
from tests.support.trust_programs import Network

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

Array = Any
Function = Callable[..., Any]
ROWS = (1, 2, 7, 64, 97, 257)
CLASSES = 5
ROUNDINGS = 64  # ten layers and their gradients; relative to the largest elements of a gradient
force = functools.partial(kj.pipeline, force=True)


@dataclasses.dataclass(frozen=True)
class Objective:
    """A network, a linear head, a loss; of ``(parameters, head, x, target)``."""

    network: Network
    loss: str

    def arguments(self) -> tuple[Any, ...]:
        params, x = self.network.arguments()
        rng = np.random.default_rng(self.network.seed + 10)
        width = jax.eval_shape(self.network, params, x)[0].shape[-1]
        head = (rng.standard_normal((width, CLASSES)) / width**0.5).astype(x.dtype)
        return params, head, x, LOSSES[self.loss].target(rng, x.shape[0], CLASSES, "float32")

    def __call__(self, wrap: Function, params: list[Array], head: Array, x: Array, target: Array) -> Array:
        """``wrap``: of the network with its head. Regularised by a reduction over all rows."""
        logits, rows, stream = wrap(self.forward)(params, head, x)
        wide = jnp.promote_types(logits.dtype, jnp.float32)
        penalty = jnp.mean(rows.astype(wide) ** 2) + jnp.sum(stream.astype(wide) ** 2)
        return LOSSES[self.loss].f(logits.astype(wide), target) + 0.1 * penalty

    def forward(self, params: list[Array], head: Array, x: Array) -> tuple[Array, ...]:
        last, rows, stream = self.network(params, x)
        return last @ head, rows, stream


def whole(objective: Objective, wrap: Function) -> Function:
    return wrap(jax.value_and_grad(functools.partial(objective, lambda f: f), (0, 1, 2)))


def network_only(objective: Objective, wrap: Function) -> Function:
    return jax.value_and_grad(functools.partial(objective, wrap), (0, 1, 2))


MODES = {f.__name__: f for f in (whole, network_only)}


@st.composite
def objectives(draw: Any, most_ops: int = 10) -> Objective:
    op = st.tuples(st.sampled_from(list(trust_programs.OPS)), st.integers(0, 3), st.integers(0, 11))
    network = Network(
        draw(st.sampled_from(["float32", "bfloat16"])),
        (draw(st.sampled_from(ROWS)),),
        draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 17])),
        tuple(draw(st.lists(op, min_size=1, max_size=most_ops))),
        draw(st.integers(0, 3)),
    )
    return Objective(network, draw(st.sampled_from(list(LOSSES))))


def check(objective: Objective, mode: str) -> None:
    args = objective.arguments()
    compiled = jax.jit(MODES[mode](objective, force)).lower(*args).compile()
    assert count(compiled.as_text()) > 0, "nothing was pipelined"
    check_close(compiled(*args), MODES[mode](objective, lambda f: f), args, precision(objective), ROUNDINGS, per_array=True)


def check_interpreter(objective: Objective) -> None:
    args = objective.arguments()
    plain = whole(objective, lambda f: f)
    got, regions = run_through_interpreter(plain, *args, seed=objective.network.seed)
    assert regions, "nothing was pipelined"
    check_close(got, plain, args, precision(objective), ROUNDINGS, per_array=True)


def precision(objective: Objective) -> str:
    casts = any(name == "cast" for name, _, _ in objective.network.ops)
    return "bfloat16" if casts else objective.network.dtype


quick = hypothesis.settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
thorough = hypothesis.settings(quick, max_examples=60)


@quick
@hypothesis.given(objectives(5), st.sampled_from(list(MODES)))
def test_gradients_of_random_networks(objective: Objective, mode: str) -> None:
    check(objective, mode)


@hypothesis.settings(quick, max_examples=2)
@hypothesis.given(objectives(4))
def test_gradients_of_random_networks_in_the_interpreter(objective: Objective) -> None:
    check_interpreter(objective)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@thorough
@hypothesis.given(objective=objectives())
def test_gradients_of_many_random_networks(mode: str, objective: Objective) -> None:
    check(objective, mode)


@pytest.mark.slow
@thorough
@hypothesis.given(objective=objectives())
def test_gradients_of_many_random_networks_in_the_interpreter(objective: Objective) -> None:
    check_interpreter(objective)
