"""Small calls on a CPU: who runs the program, and that the model has XLA's own count of its operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.config import PlannerOptions
from kitsune_jax.targets.cpu.call import FlopCounts, count_flops
from kitsune_jax.targets.cpu.planning.machines import REGION_ALONE, cpu_model
from kitsune_jax.targets.cpu.planning.xla import of_ops, program_context
from tests.support.graphs import graph_of

CPU = cpu_model("amx-2")


def _layer(x: Any, w: Any) -> Any:
    return x @ w


def _softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


def _arrays(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(3)
    return [jax.device_put(np.asarray(rng.standard_normal(s), jnp.float32)) for s in shapes]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x + 1, [(999,)]),
        (lambda x: x * 2 + 1, [(501,)]),
        (_layer, [(3, 7), (7, 11)]),
        (_layer, [(32, 8), (8, 8)]),
        (lambda x: x.sum(0), [(127, 9)]),
    ],
    ids=["999", "1002", "3x7x11", "32x8x8", "sum"],
)
def test_operations_are_counted_as_xla_counts_them(function: Any, shapes: list[tuple[int, ...]]) -> None:
    args = _arrays(*shapes)
    found = jax.jit(function).lower(*args).compile().cost_analysis()["flops"]
    assert count_flops(graph_of(function, *args)).total == pytest.approx(found, rel=0.02)


def test_a_program_is_handed_over_unless_little_is_left_of_it() -> None:
    known = FlopCounts((2000, 10, 900), 2910)
    assert known.avoids_hand_over((0,)) and known.avoids_hand_over((0, 2)) and not known.avoids_hand_over((2,))
    assert not FlopCounts((500, 400), 900).avoids_hand_over((0, 1))  # the caller runs it anyway
    assert not FlopCounts().avoids_hand_over((0,))  # nothing is known of the program


def test_steps_of_a_loop_are_not_handed_over() -> None:
    graph = graph_of(_layer, *_arrays((32, 8), (8, 8)))
    assert program_context(graph, CPU, PlannerOptions(), body=False).flop_counts.total == 4096
    assert program_context(graph, CPU, PlannerOptions(), body=True).flop_counts.total == 0


def test_what_is_all_of_a_small_program_is_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    x, w = _arrays((32, 8), (8, 8))
    (alone,) = kj.explain(kj.pipeline(_layer))(x, w).to_dict()["regions"]
    # In a program that is handed over all the same, the same product gains nothing.
    beside = kj.explain(kj.pipeline(lambda x, w, y: (x @ w, jnp.sort(y))))(x, w, jnp.ones(5000))
    assert beside.to_dict()["regions"] == []
    handed_seconds = CPU.profile.seconds("xla/call/handed")
    assert alone["baseline_seconds"] > 0.5 * handed_seconds and alone["seconds"] < 0.5 * handed_seconds


@pytest.mark.parametrize(("rows", "cheaper"), [(331, True), (40_000, False)])
def test_loops_of_a_small_program_find_their_operands_in_the_second_level(rows: int, cheaper: bool) -> None:
    graph = graph_of(lambda x, y: jnp.tanh(x * y + x), *_arrays((rows, 96), (rows, 96)))
    known, beside = (
        of_ops(graph, range(len(graph.ops)), CPU, p)
        for p in (program_context(graph, CPU, PlannerOptions(), body=False), REGION_ALONE)
    )
    alone = CPU.workers * beside if cheaper else beside  # a loop of one thread has others beside it in a larger program
    assert (known < 0.9 * alone) is cheaper and (known == alone) is not cheaper


def test_workers_that_would_wait_for_each_other_cost_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(ws: list[Any], x: Any) -> Any:
        def loss(ws: list[Any]) -> Any:
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return jnp.sum(h**2)

        return jax.grad(loss)(ws)

    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    x, *ws = _arrays((127, 32), *[(32, 32)] * 5)
    (region,) = kj.explain(kj.pipeline(gradients, force=True))(ws, x).to_dict()["regions"]
    assert region["tiles"] == 1
    (region,) = kj.explain(kj.pipeline(gradients, force=True))(ws, jnp.tile(x, (32, 1))).to_dict()["regions"]
    assert region["tiles"] > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 7, 32])
def test_results_of_small_calls(monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int) -> None:
    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    x = _arrays((rows, 72))[0].astype(dtype)
    want = np.asarray(x, np.float64)
    want = np.exp(want - want.max(-1, keepdims=True))
    want /= want.sum(-1, keepdims=True)
    got = jax.jit(kj.pipeline(_softmax))(x)
    rtol = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 6e-3}[dtype]  # differences and exponentials are rounded, too
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rtol)
