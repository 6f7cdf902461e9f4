"""The order of evaluation: values before their readers, effects in program order, regions as one node."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kitsune_jax.frontend.lowering import schedule
from kitsune_jax.ops.graph import Graph, Op, Value


@dataclasses.dataclass(frozen=True)
class Border:
    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Planned:
    name: str
    region: Border


def graph_of(reads: list[tuple[int, ...]], outputs: tuple[int, ...]) -> Graph:
    """Value 0 is the input; op ``i`` defines value ``i + 1``."""
    values = tuple(Value((4,), "float32") for _ in range(len(reads) + 1))
    graph = Graph(values, (0,), outputs, tuple(Op("exp", r, (i + 1,)) for i, r in enumerate(reads)))
    graph.validate()
    return graph


def check(graph: Graph, order: list[int | Planned]) -> None:
    """Every node reads only what was defined, and every output is."""
    defined = set(graph.inputs)
    for node in order:
        reads, gives = (
            (graph.ops[node].inputs, graph.ops[node].outputs)
            if isinstance(node, int)
            else (node.region.inputs, node.region.outputs)
        )
        assert set(reads) <= defined
        defined |= set(gives)
    assert set(graph.outputs) <= defined


def test_ops_alone_keep_their_order() -> None:
    graph = graph_of([(0,), (1,), (0, 2)], (3,))
    assert schedule(graph, [False] * 3, []) == ([0, 1, 2], [])


def test_a_region_waits_for_what_it_reads() -> None:
    graph = graph_of([(0,), (0,), (1, 2)], (3,))  # ops 0 and 2 are a region, which reads what op 1 gives
    region = Planned("r", Border((0, 2), (0, 2), (3,)))
    assert schedule(graph, [False] * 3, [region]) == ([1, region], [])


def test_a_value_that_a_region_does_not_give_is_made_again() -> None:
    graph = graph_of([(0,), (1,), (2,), (1,)], (3, 4))  # op 3 reads value 1 of the region {0, 1}, which gives value 2 only
    region = Planned("r", Border((0, 1), (0,), (2,)))
    order, _ = schedule(graph, [False] * 4, [region])
    assert 0 in order and 1 not in order
    check(graph, order)


def test_effects_keep_their_order_and_dissolve_a_region_between_them() -> None:
    # op 0 (effect) reads nothing of the region; op 3 (effect) comes after it but feeds the region, which feeds op 0's successor.
    graph = graph_of([(0,), (1,), (2,), (0,), (3, 4)], (5,))
    region = Planned("r", Border((0, 4), (3, 4, 0), (1, 5)))  # op 1 reads op 0, op 4 reads op 2, which reads op 1
    order, dissolved = schedule(graph, [False, True, False, True, False], [region])
    assert region not in order
    assert dissolved == [region]
    assert order.index(1) < order.index(3)
    check(graph, order)


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 14)
    graph = graph_of([tuple(rng.sample(range(i + 1), min(i + 1, rng.randint(1, 2)))) for i in range(n)], (n,))
    start, stop = sorted(rng.sample(range(n + 1), 2))
    ops = tuple(range(start, stop))  # consecutive ops are convex
    made = {i + 1 for i in ops}
    outside = {v for i, op in enumerate(graph.ops) if i not in ops for v in op.inputs} | set(graph.outputs)
    inputs = tuple(dict.fromkeys(v for i in ops for v in graph.ops[i].inputs if v not in made))
    region = Planned("r", Border(ops, inputs, tuple(sorted(made & outside))))
    effects = [i not in ops and rng.random() < 0.3 for i in range(n)]
    order, _ = schedule(graph, effects, [region])
    check(graph, order)
    with_effects = [node for node in order if isinstance(node, int) and effects[node]]
    assert with_effects == [i for i in range(n) if effects[i]]
    assert region in order
