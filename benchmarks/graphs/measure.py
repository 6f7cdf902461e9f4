"""One case of an application over graphs or tables, measured.

Comes in: an app, a mode, a dtype, a number of rows. Goes out: a record as ``benchmarks.measure`` makes them, so that they are
stored and shown alike; columns that make no sense here (blocks of rows by hand) are left out of it. Errors are against the same
function in float64 under ``jax.jit``: the rows of a graph depend on each other, so there is no reference by blocks of rows in
NumPy (``tests/user/test_benchmarks_graphs.py`` compares the functions with one on small graphs)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj
from benchmarks.graphs.apps import GraphApp, GraphCase, case_of
from benchmarks.measure import Effort, coverage_and_bytes, peer_errors
from benchmarks.memory import temp_bytes
from benchmarks.peers import client as peers
from benchmarks.timing import interleaved, paired_speedup, summary
from benchmarks.training import BETA1, State, adam, initial_state, relative_error

Network = Callable[..., jax.Array]
PIPELINED = ("network", "whole")


def measure_graph(app: GraphApp, mode: str, dtype: str, platform: str, rows: int, effort: Effort) -> dict[str, Any]:
    """All columns of one case in ``mode`` "infer" (see ``measure_inference``) or "train" (see ``measure_training``)."""
    case = case_of(app, dtype, rows)
    measured = measure_training(case, effort) if mode == "train" else measure_inference(case, effort)
    head = {"app": app.name, "title": app.title, "unit": app.unit, "mode": mode}
    return {**head, "dtype": dtype, "platform": platform, "rows": rows, **measured}


def measure_inference(case: GraphCase, effort: Effort) -> dict[str, Any]:
    """``columns``, ``speedup`` and ``explain`` as in ``benchmarks.measure.measure_inference``; "blocked" is ``app.by_hand``."""
    functions = {"jit": jax.jit(case.function), "pipeline": jax.jit(kj.pipeline(case.function))}
    if case.app.by_hand is not None:
        functions["blocked"] = jax.jit(case.app.by_hand)
    want = in_float64(lambda params, inputs, _: case.function(params, *inputs), case)
    errors = {column: max_relative_error(f(case.params, *case.inputs), want) for column, f in functions.items()}
    thunks = {c: functools.partial(f, case.params, *case.inputs) for c, f in functions.items()}
    with peers.peers(effort.peers, peers.Question(case.app.name, "infer", case.params, case.inputs)) as others:
        errors |= {c: max_relative_error(peer.result()["result"], want) for c, peer in others.items()}
        times = interleaved({**thunks, **others}, rounds=effort.rounds, seconds=effort.seconds, warmup=1)
    return {
        "columns": {c: {**summary(t), "max_rel_error": errors[c]} for c, t in times.items()},
        "speedup": {c: paired_speedup(t, times["pipeline"]) for c, t in times.items() if c != "pipeline"},
        "explain": coverage_and_bytes(kj.explain(case.function)(case.params, *case.inputs)),
    }


def measure_training(case: GraphCase, effort: Effort) -> dict[str, Any]:
    """``columns``, ``speedup``, ``memory`` (without what a process of its own measures) and ``explain`` as in
    ``benchmarks.measure.measure_training``; the columns are "jit", "network" and "whole"."""
    state = initial_state(case.params, np.random.default_rng(1))
    steps: dict[str, Callable[..., Any]] = {
        "jit": train_step(case, case.function),
        "network": train_step(case, kj.pipeline(case.function)),
        "whole": kj.pipeline(train_step(case, case.function)),
    }
    args = (state, case.inputs, case.targets)
    loss, grads = in_float64(loss_and_grads(case, case.function), case)
    compiled = {c: jax.jit(step).lower(*args).compile() for c, step in steps.items()}
    errors = {}
    for column, step in compiled.items():
        new, found = step(*args)
        # The first moment starts at zero, so that it is the gradient, scaled.
        means = jax.tree.map(lambda m, g: relative_error(m / (1 - BETA1), g), new.mean, grads)
        errors[column] = {"loss": relative_error(found, loss), "mean": max(jax.tree.leaves(means))}
    thunks = {c: functools.partial(step, *args) for c, step in compiled.items()}
    question = peers.Question(case.app.name, "train", case.params, case.inputs, case.targets, case.app.loss.__name__)
    with peers.peers(effort.peers, question) as others:
        errors |= {c: peer_errors(peer, loss, peers.flat(grads)) for c, peer in others.items()}
        times = interleaved({**thunks, **others}, rounds=effort.rounds, seconds=effort.seconds, warmup=1)
    return {
        "columns": {c: {**summary(t), "errors": errors[c]} for c, t in times.items()},
        "speedup": {p: {c: paired_speedup(t, times[p]) for c, t in times.items() if c != p} for p in PIPELINED},
        "memory": {c: {"temp_bytes": temp_bytes(step)} for c, step in compiled.items()},
        "explain": {c: coverage_and_bytes(report) for c, report in explained(case, state).items()},
    }


def loss_and_grads(case: GraphCase, network: Network) -> Callable[..., Any]:
    """The loss of ``network`` and its gradients by the parameters, a function of (parameters, inputs, targets)."""

    def objective(params: Any, inputs: tuple[Any, ...], y: jax.Array) -> jax.Array:
        return case.app.loss(network(params, *inputs), y)

    return jax.value_and_grad(objective)


def train_step(case: GraphCase, network: Network) -> Callable[..., tuple[State, jax.Array]]:
    def step(state: State, inputs: tuple[Any, ...], y: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = loss_and_grads(case, network)(state.params, inputs, y)
        return adam(state, grads), loss

    return step


def explained(case: GraphCase, state: State) -> dict[str, kj.Report]:
    """As ``benchmarks.training.explained``; "gradient" is the whole step without Adam, as the Kitsune paper counts."""
    args = (state, case.inputs, case.targets)
    return {
        "network": kj.explain(train_step(case, kj.pipeline(case.function)))(*args),
        "whole": kj.explain(train_step(case, case.function))(*args),
        "gradient": kj.explain(loss_and_grads(case, case.function))(state.params, *args[1:]),
    }


def in_float64(compute: Callable[..., Any], case: GraphCase) -> Any:
    """What ``compute(params, inputs, targets)`` gives with ``jax.jit`` for the same (rounded) values in float64: a pytree of NumPy
    arrays."""
    module: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    with module.enable_x64(True):
        wide = case.in_dtype(jnp.float64)
        return jax.tree.map(np.asarray, jax.jit(compute)(wide.params, wide.inputs, wide.targets))


def max_relative_error(got: Any, want: np.ndarray) -> float:
    """Largest |g - w| / max(|w|, rms(w)), as ``benchmarks.measure.max_relative_error``, over all elements."""
    found = np.asarray(got).astype(np.float64)
    return float(np.max(np.abs(found - want) / np.maximum(np.abs(want), np.sqrt(np.mean(want**2)))))
