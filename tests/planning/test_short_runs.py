"""Short runs inside rows, in loops over time as hidden Markov models and state space models have them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax.planning.streams import Region, StreamSpace
from kitsune_jax.targets.cpu.planning.cost import CpuCost, folds_single_elements, pieces, spreads_short_runs
from kitsune_jax.targets.cpu.planning.machines import cpu_model
from tests.support.graphs import graph_of

Array = Any
STEPS, ROWS, STATES = 64, 37, 6


def _cost(function: Any, *shapes: tuple[int, ...]) -> CpuCost:
    graph = graph_of(function, *(jnp.zeros(s, jnp.float32) for s in shapes))
    rows = graph.values[graph.inputs[0]].shape[0]
    ops = tuple(range(len(graph.ops)))
    labels = tuple((v, ((0,), *[()] * (len(x.shape) - 1))) for v, x in enumerate(graph.values) if x.shape[:1] == (rows,))
    return CpuCost(graph, Region(StreamSpace((rows,)), ops, labels, graph.inputs, graph.outputs), cpu_model("amx-2"))


@pytest.mark.parametrize(
    ("function", "shapes", "runs"),
    [
        (lambda x, y: x[:, :, None] * y, [(9, 6), (9, 6, 4)], (6,)),  # each number four times
        (lambda x, y: x[:, None, :] * y, [(9, 4), (9, 6, 4)], (6,)),  # four numbers, six times
        (lambda x, y: x[:, None] * y, [(9,), (9, 64)], (1,)),  # one number for the whole row
        (lambda x, y: x[:, :, None] * y, [(9, 6), (9, 6, 16)], ()),  # as long as a vector
        (lambda x, y: x * y, [(9, 6, 4), (9, 6, 4)], ()),
        (lambda x, y: x * y[None], [(9, 6, 4), (6, 4)], ()),  # a weight lies as the row does
    ],
    ids=["inner", "outer", "row", "long", "none", "weight"],
)
def test_runs_of_a_repeated_operand(function: Any, shapes: list[tuple[int, ...]], runs: tuple[int, ...]) -> None:
    cost = _cost(function, *shapes)
    (product,) = [i for i, op in enumerate(cost.graph.ops) if op.kind == "mul"]
    assert spreads_short_runs(cost, product) == runs


@pytest.mark.parametrize(
    ("shape", "axis", "single"),
    [((9, 6, 4), 1, True), ((9, 6, 4), 2, True), ((9, 6, 32), 1, False), ((9, 4, 64), 2, False)],
)
def test_reductions_of_single_elements(shape: tuple[int, ...], axis: int, single: bool) -> None:
    cost = _cost(lambda x: jnp.max(x, axis), shape)
    (fold,) = [i for i, op in enumerate(cost.graph.ops) if op.kind == "reduce_max"]
    assert folds_single_elements(cost, fold) is single


@pytest.mark.parametrize(
    ("shape", "streamed", "rows", "expected"),
    [
        ((255, 512, 6), 1, 64, (2 * 255 * 64, 0)),  # 192 bytes of each step, read and written
        ((255, 512, 6), 1, 1, (2 * 255 * 512, 0)),  # of a row alone, 24 bytes
        ((512, 255, 6), 0, 64, (0, 0)),  # a row lies together
        ((255, 512, 64), 1, 64, (0, 0)),  # 2 KB of each step
        ((255, 512, 64), 1, 1, (2 * 255 * 512, 0)),  # and 256 bytes
        ((255, 16, 6), 1, 64, (0, 2 * 255 * 2)),  # a step is less than a page
    ],
)
def test_pieces_that_cross_the_border(shape: tuple[int, ...], streamed: int, rows: int, expected: tuple[int, int]) -> None:
    graph = graph_of(lambda x: jnp.exp(x), jnp.zeros(shape, jnp.float32))
    label = tuple((0,) if d == streamed else () for d in range(3))
    labels = ((graph.inputs[0], label), (graph.outputs[0], label))
    region = Region(StreamSpace((shape[streamed],)), (0,), labels, graph.inputs, graph.outputs)
    assert pieces(CpuCost(graph, region, cpu_model("amx-2")), rows) == expected


@pytest.mark.parametrize("size", [8, 32, 64])
def test_a_stream_whose_rows_lie_together_is_preferred(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Streaming over the 64 in the middle, a row at a time, took x * x + 1 two to twenty times as long (Xeon with AMX)."""
    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    report = kj.explain(lambda x: x * x + 1.0, force=True)(jnp.zeros((32768 // size, 64, size)))
    (region,) = report.regions
    assert region.rows == 32768 // size * 64


def _linear_recurrence(a: Array, b: Array) -> Array:
    return jnp.sum(jnp.sin(jax.lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), axis=1)[1]))


@pytest.mark.parametrize("function", [_linear_recurrence, jax.grad(_linear_recurrence, (0, 1))], ids=["forward", "gradient"])
def test_associative_scans_are_not_streamed_over_what_lies_apart(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Over the 128 of [2, 256, 128, 16], each a piece of 64 bytes: the gradient of a Mamba layer took twice ``jax.jit``'s CPU time
    so, and 0.9 times as long as it does with what does not pay left to XLA (same machine)."""
    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    a = jnp.zeros((2, 256, 128, 16))
    report = kj.explain(function)(a, a)
    assert report.regions and all(region.rows != 128 for region in report.regions), report


def _crf(scores: Array, emissions: Array) -> Array:
    def step(a: Array, e: Array) -> tuple[Array, None]:
        return jax.nn.logsumexp(a[:, :, None] + scores, axis=1) + e, None

    return jax.lax.scan(step, jnp.zeros((ROWS, STATES)), emissions)[0]


def _viterbi(scores: Array, emissions: Array) -> tuple[Array, Array]:
    def step(a: Array, e: Array) -> tuple[Array, Array]:
        s = a[:, :, None] + scores
        return s.max(1) + e, s.argmax(1)

    return jax.lax.scan(step, emissions[0], emissions[1:])


@pytest.mark.parametrize("function", [_crf, _viterbi])
def test_steps_of_short_runs_are_left_to_xla(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Measured on a Xeon with AMX, forced against ``jax.jit``, 256 steps: 0.33x and 0.43x. No call only cuts a slice."""
    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    report = kj.explain(function)(jnp.zeros((STATES, STATES)), jnp.zeros((STEPS, ROWS, STATES)))
    assert not report.to_dict()["regions"], report


@pytest.mark.parametrize("axis", [1, 2])
def test_short_reductions_in_the_steps_of_a_loop(monkeypatch: pytest.MonkeyPatch, axis: int) -> None:
    """Measured on a Xeon with AMX: 1.3 to 1.6 ns of one worker for each element, in steps that do little else."""

    def sums(h: Array) -> Array:
        return jax.lax.scan(lambda h, _: (h * 0.9, h.sum(axis)), h, None, length=STEPS)[1]

    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    h = jnp.ones((256, 12, 12))
    (region,) = kj.explain(kj.pipeline(sums, force=True))(h).to_dict()["regions"]
    assert 1.0e-9 < 2 * float(region["seconds"]) / (STEPS * h.size) < 2.0e-9
