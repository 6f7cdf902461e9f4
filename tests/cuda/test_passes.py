"""The passes over the device IR of the CUDA target: registers alive, images in memory, chunks of products."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import ir, layout, lower
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from kitsune_jax.targets.cuda.ir import Node, Ref
from kitsune_jax.targets.cuda.stage import fitting
from kitsune_jax.targets.cuda.stage.builder import Shape
from kitsune_jax.targets.cuda.stage.facts import Facts
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_recurrent_cases import RECURRENT
from tests.support.cuda_run import Subject, arrangements, subject
from tests.support.cuda_training_cases import TRAINING
from tests.support.graphs import struct

V = [Ref("v", k) for k in range(4)]


def test_a_value_is_alive_from_its_definition_to_its_last_use() -> None:
    nodes = (ir.Alive(V[0], 10), ir.Alive(V[1], 20), ir.Alive(V[0]), ir.Alive(V[2], 30), ir.Alive(V[1]))
    found = fitting.liveness_of((), nodes)
    assert (found.peak, found.alive) == (50, (2, 1))  # v0 is read for the last time before v2 is made
    assert found.lives == {V[0]: (1, 3), V[1]: (2, 5), V[2]: (4, 4)}


def test_accumulators_of_sinks_are_alive_all_the_time() -> None:
    sink = frame.SinkStart(Ref("sink", 0), "Sum", "float32", 64, True)
    found = fitting.liveness_of((sink,), (ir.Alive(V[0], 10),))
    assert (found.held, found.peak) == (16, 26)


def test_layers_are_counted_where_the_loop_stands() -> None:
    loop = st.LayerLoop(3, 0, 1, (ir.Alive(V[1], 5), ir.Alive(V[0])))
    assert fitting.liveness_of((), (ir.Alive(V[0], 7), loop)).peak == 12


def test_rebuild_changes_every_node_and_keeps_what_does_not_change() -> None:
    kept, changed = ir.Literal("1.0f"), ir.Read("word", V[0], "float32")
    tree = (ir.Let(V[1], "float32", ir.Apply("{0} + {1}", (kept, changed))),)

    def renamed(x: Node) -> Node:
        return V[3] if x == V[0] else x

    (let,) = ir.rebuild(tree, renamed)
    assert let.expr.operands == (kept, ir.Read("word", V[3], "float32")) and let.expr.operands[0] is kept


# -- a stage of three layers whose results are read again


def skip(w0: Any, w1: Any, w2: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w0)
    g = jnp.tanh(h @ w1)
    return jnp.tanh(g @ w2) + h + g


@pytest.fixture(scope="module")
def of() -> Subject:
    square = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    return subject(skip, square, square, square, jax.ShapeDtypeStruct((512, 256), jnp.bfloat16))


def lowered(of: Subject, shape: Shape) -> fitting.Lowered:
    plan = arrangements(of)["sm90-vertical-streamed-cluster1-lanes1"]
    program = of.program(plan)
    return fitting._Fitter(program, 0, arrangement_of(plan, program)).lower_stage(shape)


@pytest.mark.parametrize("columns", [64, 128])
def test_products_are_issued_chunk_by_chunk_and_waited_for_once(of: Subject, columns: int) -> None:
    nodes = lowered(of, Shape(columns)).nodes
    issued = [n.ref for n in nodes if isinstance(n, st.Issue)]
    assert len(issued) == 256 // 128 + 2 * 256 // columns == len(set(issued))  # the input is fetched for each chunk
    assert issued == [n.ref for n in nodes if isinstance(n, st.Complete)]
    read = [ref for n in nodes if isinstance(n, ir.BlockLoop) for ref in n.reads if ref.kind == "d"]
    assert read == issued  # each block reads the chunk that has just been waited for


def test_an_image_costs_no_registers(of: Subject) -> None:
    kept = lowered(of, Shape())
    v = next(v for v in kept.liveness.alive if kept.may_be_image(v))
    image = lowered(of, Shape(images=frozenset({v})))
    assert image.liveness.peak < kept.liveness.peak
    assert [n.ref for n in image.prologue if isinstance(n, ir.Image)] == [Ref("image", v)]


def test_images_that_are_alive_together_do_not_overlap(of: Subject) -> None:
    values = frozenset(v for v, value in lowered(of, Shape()).values.items() if not value.row)
    found = lowered(of, Shape(images=values))
    kept = [n.ref.of for n in found.prologue if isinstance(n, ir.Image)]
    places = fitting.place_images(kept, found)
    assert len(kept) > 1
    for a, b in itertools.combinations(kept, 2):
        (first, last), (start, end) = found.liveness.life(a), found.liveness.life(b)
        together = first <= end and start <= last
        apart = places[a] + found.image_bytes(a) <= places[b] or places[b] + found.image_bytes(b) <= places[a]
        assert apart or not together


# -- the search for a shape


def growing(fitter: fitting._Fitter) -> Iterator[Shape]:
    """Shapes of the search, and the first of them with more and more images."""
    for columns, overlap, copies in ((64, True, True), (128, True, False), (64, False, True)):
        yield Shape(columns, overlap, copies=copies)
    shape = Shape()
    for _ in range(4):
        needs = fitter.needs(shape)
        more = [v for v in needs.liveness.alive if needs.may_be_image(v) and v not in shape.images][:1]
        shape = dataclasses.replace(shape, images=shape.images.union(more, needs.must_be_images))
        yield shape


@pytest.mark.parametrize("name", ["interaction-small", "layer-norm-step", "lstm-loop"])
def test_the_search_finds_the_registers_that_the_code_needs(name: str) -> None:
    family = {**FAMILIES, **TRAINING, **RECURRENT}[name]
    of = subject(family.function, *family.arguments(257, "bfloat16"))
    compared = 0
    for plan in dict(arrangements(of)).values():
        program = of.program(plan)
        for s in range(len(program.stages)):
            fitter = fitting._Fitter(program, s, arrangement_of(plan, program))
            for shape in growing(fitter):
                searched, code = fitter.needs(shape), fitting._Fitter(program, s, fitter.a).lower_stage(shape)
                assert (searched.liveness, searched.must_be_images) == (code.liveness, code.must_be_images)
                assert searched.values == code.values
                compared += 1
    assert compared > 10


def test_a_kernel_is_laid_out_without_the_same_search_twice(of: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage is fitted beside rings of several sizes. A shape is built for its registers, and for the code with as many chunks of
    weights as were tried: the default, and those that fit."""
    built, fitted = list[tuple[int, Shape]](), list[int]()
    real_builder, real_fitted = fitting.StageCodeBuilder, fitting._Fitter.fitted

    def builder(facts: Facts, shape: Shape, *rest: Any) -> fitting.StageCodeBuilder:
        built.append((id(facts), shape))
        return real_builder(facts, shape, *rest)

    def counted(self: fitting._Fitter, staged: frozenset[int], free: int) -> fitting.Fitted:
        fitted.append(free)
        return real_fitted(self, staged, free)

    plan = arrangements(of)["sm90-vertical-streamed-cluster1-lanes1"]
    program = of.program(plan)
    monkeypatch.setattr(fitting, "StageCodeBuilder", builder)
    monkeypatch.setattr(fitting._Fitter, "fitted", counted)
    layout.lay_out(program, arrangement_of(plan, program), "skip")
    assert len(fitted) > 1
    assert max(Counter(built).values()) <= 3


def test_a_stage_is_fitted_once_while_plans_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its part of the program is tried in several calls. Behind the search nothing is kept."""
    fitted: list[tuple[Any, ...]] = []

    class Counted(fitting._Fitter):
        def __init__(self, *key: Any) -> None:
            fitted.append(key)
            super().__init__(*key)

    def loss(params: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        for w, v in params:
            sums = jax.ops.segment_sum(jnp.tanh(nodes[senders] @ w), receivers, nodes.shape[0])
            nodes = nodes + jnp.tanh(sums @ v)
        return jnp.mean(nodes**2)

    index = jax.ShapeDtypeStruct((8192,), jnp.int32)
    args = [(struct(32, 32), struct(32, 32))] * 2, struct(2048, 32), index, index
    graph = capture(jax.make_jaxpr(jax.grad(loss))(*args)).graph
    monkeypatch.setattr(fitting, "_Fitter", Counted)
    lower._layout_or_reason.cache_clear()
    routed = route(graph, "cuda", RouteOptions(device="h200", code=False, force=True))
    assert any(len(region.phases) > 1 for region in routed.regions) and len(fitted) == len(set(fitted)) > 5
    once = len(fitted)
    for _ in range(2):
        fitting.StageFit([fitted[0][0]], *fitted[0][1:]).fit(0, staging=False)
    assert len(fitted) == once + 2
