"""A whole training step of an application, and the ways it is run.

Comes in: a ``Case``. Goes out: ``TrainCase`` (a state, rows, targets), jitted steps ``(state, x, y) -> (state, loss)``, and their
errors against float64. The step is forward, mean squared error, backward and Adam (Kingma and Ba 2015, arXiv:1412.6980).
Parameters and activations have the case's dtype; moments and the update are float32. No column donates its arguments, so every
call starts from the same state.

``jit`` is what everybody writes; ``microbatched`` the best a JAX user does by hand on a CPU: blocks of rows whose residuals fit the
cache, their gradients added up in float32 (on a GPU a block that fits the cache is too small to fill the device). ``network``
pipelines the network alone, as a user does who changes one line; ``whole`` the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj
from benchmarks.apps import Case, Params, make_case
from benchmarks.columns import RowFunction, block_rows

RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8  # the paper's own
_REFERENCE_ROWS = 4096  # float64 residuals of a block: some tens of megabytes for the deepest network


class State(NamedTuple):
    """``mean`` and ``square`` are Adam's moments of the gradient, in float32; ``steps`` counts those done."""

    params: Any  # a pytree, as are the moments
    mean: Any
    square: Any
    steps: Any  # a scalar


Step = Callable[[State, jax.Array, jax.Array], tuple[State, jax.Array]]


@dataclasses.dataclass(frozen=True)
class TrainCase:
    case: Case
    state: State
    y: jax.Array


def make_train_case(name: str, dtype: str, rows: int, seed: int = 0) -> TrainCase:
    """The inputs of ``make_case``, random targets, and Adam's state in the middle of a training.

    The first moment starts at zero, so that after one step it is the gradient, scaled: its error is the gradient's. The second
    does not, or the update would be the gradient's sign, which rounding turns where the gradient is nearly zero.
    """
    case = make_case(name, dtype, rows, seed)
    rng = np.random.default_rng(seed + 1)
    out = jax.eval_shape(case.app.function, case.params, case.x)
    y = jnp.asarray(rng.standard_normal(out.shape, dtype=np.float32), out.dtype)
    return TrainCase(case, initial_state(case.params, rng), y)


def initial_state(params: Any, rng: np.random.Generator) -> State:
    """Adam's state of ``params``, any pytree, in the middle of a training (see ``make_train_case``)."""
    mean = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    square = jax.tree.map(lambda p: jnp.asarray(rng.uniform(1e-6, 1e-4, p.shape), jnp.float32), params)
    return State(params, mean, square, jnp.int32(1000))


def squared_error(out: jax.Array, y: jax.Array, count: int) -> jax.Array:
    return jnp.sum((out.astype(jnp.float32) - y.astype(jnp.float32)) ** 2) / count


def adam(state: State, grads: Any) -> State:
    steps = state.steps + 1
    power = steps.astype(jnp.float32)
    correct1, correct2 = 1 - BETA1**power, 1 - BETA2**power

    def update(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        g = g.astype(jnp.float32)
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        p = (p.astype(jnp.float32) - RATE * (m / correct1) / (jnp.sqrt(v / correct2) + EPSILON)).astype(p.dtype)
        return p, m, v

    new = jax.tree.map(update, state.params, state.mean, state.square, grads)
    params, mean, square = jax.tree.transpose(jax.tree.structure(state.params), jax.tree.structure((0, 0, 0)), new)
    return State(params, mean, square, steps)


def train_step(network: RowFunction) -> Step:
    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        def objective(params: Params) -> jax.Array:
            return squared_error(network(params, x), y, y.size)

        loss, grads = jax.value_and_grad(objective)(state.params)
        return adam(state, grads), loss

    return step


def microbatched_step(network: RowFunction) -> Step:
    """``train_step`` by blocks of rows: ``lax.scan`` adds up loss and gradients, and the tail, where there is one, comes last."""

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        def objective(params: Params, x: jax.Array, part: jax.Array) -> jax.Array:
            return squared_error(network(params, x), part, y.size)

        def add(total: Any, block: tuple[jax.Array, ...]) -> tuple[Any, None]:
            new = jax.value_and_grad(objective)(state.params, *block)
            return jax.tree.map(lambda t, n: t + n.astype(jnp.float32), total, new), None

        rows, size = x.shape[0], block_rows(x.shape[0])
        whole = rows - rows % size
        zeros = (jnp.float32(0), {k: jnp.zeros(p.shape, jnp.float32) for k, p in state.params.items()})
        total, _ = jax.lax.scan(add, zeros, tuple(a[:whole].reshape(-1, size, *a.shape[1:]) for a in (x, y)))
        if whole < rows:
            total, _ = add(total, (x[whole:], y[whole:]))
        loss, grads = total
        return adam(state, grads), loss

    return step


TRAIN_STEPS: dict[str, Callable[[RowFunction], Any]] = {
    "jit": lambda network: jax.jit(train_step(network)),
    "microbatched": lambda network: jax.jit(microbatched_step(network)),
    "network": lambda network: jax.jit(train_step(kj.pipeline(network))),
    "whole": lambda network: jax.jit(kj.pipeline(train_step(network))),
    # ``network``, keeping its arguments only: compiled for its memory, not timed.
    "recompute": lambda network: jax.jit(train_step(kj.pipeline(network, residuals="recompute"))),
}
PIPELINED = ("network", "whole")


def train_column_names(platform: str) -> tuple[str, ...]:
    """The columns timed on ``platform`` ("cpu" or "cuda")."""
    return ("jit", "microbatched", *PIPELINED) if platform == "cpu" else ("jit", *PIPELINED)


def explained(train: TrainCase) -> dict[str, kj.Report]:
    """The report of each pipelined column. That of ``network`` counts what the pipelined calls hold: not the loss, not Adam."""
    network, args = train.case.app.function, (train.state, train.case.x, train.y)
    return {
        "network": kj.explain(train_step(kj.pipeline(network)))(*args),
        "whole": kj.explain(train_step(network))(*args),
    }


def reference(train: TrainCase) -> tuple[State, float]:
    """One step in float64 NumPy from the same (rounded) inputs, block by block."""
    case = train.case
    params, square = ({k: _double(a) for k, a in tree.items()} for tree in (train.state.params, train.state.square))
    x, y = np.asarray(case.x), np.asarray(train.y)
    grads = {k: np.zeros(p.shape) for k, p in params.items()}
    loss = 0.0
    for start in range(0, case.rows, _REFERENCE_ROWS):
        rows = slice(start, start + _REFERENCE_ROWS)
        out, pullback = case.app.reference_vjp(params, _double(x[rows]))
        difference = out - _double(y[rows])
        loss += float((difference**2).sum()) / y.size
        for k, g in pullback(2 * difference / y.size).items():
            grads[k] += g
    steps = int(train.state.steps) + 1
    mean = {k: BETA1 * _double(train.state.mean[k]) + (1 - BETA1) * g for k, g in grads.items()}
    square = {k: BETA2 * square[k] + (1 - BETA2) * g * g for k, g in grads.items()}
    new = {
        k: params[k] - RATE * (mean[k] / (1 - BETA1**steps)) / (np.sqrt(square[k] / (1 - BETA2**steps)) + EPSILON) for k in params
    }
    return State(new, mean, square, steps), loss


def step_errors(got: tuple[State, jax.Array], want: tuple[State, float]) -> dict[str, float]:
    """|g - w| / |w| in the Euclidean norm: of the loss, and of the worst array of each part of the state.

    ``mean`` is the gradient's error (see ``make_train_case``). In norm, because a gradient is not continuous where a ReLU's sum is
    zero: where rounding changes a sum's sign, a row's part of some elements comes or goes, in any column. Raises ``ValueError``
    where the step was not counted.
    """
    if int(got[0].steps) != int(want[0].steps):
        raise ValueError(f"{int(got[0].steps)} steps were counted, not {int(want[0].steps)}")
    errors = {"loss": relative_error(got[1], np.float64(want[1]))}
    for part in ("params", "mean", "square"):
        new = getattr(got[0], part)
        errors[part] = max(relative_error(new[k], w) for k, w in getattr(want[0], part).items())
    return errors


def relative_error(got: Any, want: Any) -> float:
    """|got - want| / |want| in the Euclidean norm; |got| where ``want`` is 0, as the gradient of what nobody reads is."""
    return float(np.linalg.norm(_double(got) - want) / (np.linalg.norm(want) or 1.0))


def _double(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
