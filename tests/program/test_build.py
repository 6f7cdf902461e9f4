"""Graph + Region + Plan -> tile program, executed by the NumPy interpreter, equals JAX; for layouts that are easy to get wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax import targets
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.planning.plan import Infeasible
from kitsune_jax.program.build import build
from kitsune_jax.regions.grow import anchored
from kitsune_jax.regions.select import select
from kitsune_jax.targets.cpu.planning.machines import cpu_model
from kitsune_jax.targets.cpu.planning.planner import plan
from reference.check import check_deadlock_free
from reference.interpret import interpret
from tests.support.checks import enable_x64, in_float64
from tests.support.graphs import graph_of, layer_norm, nerf, nerf_params, quotient_order
from tests.support.irregular import order_of

RNG = np.random.default_rng(2)


def array(*shape: int, dtype=np.float32):
    return jax.device_put(np.asarray(RNG.standard_normal(shape), dtype))


def run_through_interpreter(fn, *args, seed: int = 0):
    """Every legal region of ``fn`` through plan, tile program and interpreter; the other ops through JAX. (outputs, regions)."""
    captured = capture(jax.make_jaxpr(fn)(*args))
    graph = captured.graph
    machine = cpu_model("avx512bf16-2")

    def planner(graph, region):
        try:
            return plan(graph, region, machine)
        except Infeasible as no:
            return str(no)

    selection = select(graph, lambda i: None, planner, force=True)
    values = dict(zip(graph.inputs, jax.tree.leaves(args), strict=True))
    values |= {v: np.asarray(x.literal, x.dtype) for v, x in enumerate(graph.values) if x.literal is not None}
    producers = graph.producers()

    def read(v: int) -> np.ndarray:
        """A value from outside of the regions, or made again there: the indices of an order may be made by ops of a region."""
        if v not in values:
            op = graph.ops[producers[v]]
            values.update(zip(op.outputs, captured.run(producers[v], [read(x) for x in op.inputs]), strict=True))
        return np.asarray(values[v])

    by_first = {anchored(graph, c.region): c for c in selection.regions}
    for node in quotient_order(graph, list(by_first)):
        chosen = by_first.get(node)
        if chosen is None:
            op = graph.ops[node[0]]
            values.update(zip(op.outputs, captured.run(node[0], [values[v] for v in op.inputs]), strict=True))
            continue
        program = build(graph, chosen.region, chosen.plan)
        assert check_deadlock_free(program) is None
        given = [np.asarray(values[v]) for v in chosen.region.inputs]
        if chosen.plan.order is not None:
            n = max(graph.ops[i]["n"] for i in chosen.region.sinks if chosen.plan.order in graph.ops[i].inputs[1:])
            given.append(order_of(read(chosen.plan.order).reshape(-1), n))
        outs = interpret(program, given, schedule_seed=seed)
        values.update(zip(chosen.region.outputs, outs, strict=True))
    return [np.asarray(values[v]) for v in graph.outputs], selection.regions


def nested(xs, states, w):
    """An inner loop over layers, whose weights and states are slices; another one reads backwards what the first has made."""

    def step(states, group):
        def layer(x, of_layer):
            w, h = of_layer
            h = jnp.tanh(x @ w + h)
            return h, (h, h * 2)

        out, (states, made) = jax.lax.scan(layer, group[0], (w, states))
        return states, (jax.lax.scan(lambda c, y: (c * 0.5 + y, c + y), out, made, reverse=True), group[1])

    return jax.lax.scan(step, states, xs)


CASES = {
    "nerf": (lambda: (lambda x, p: nerf(p, x), array(37, 63), nerf_params(RNG, width=32))),
    "weight_first": (lambda: (lambda x, w: jax.nn.relu(w @ x).sum(0), array(5, 13), array(7, 5))),
    "two_leading_axes": (lambda: (layer_norm, array(3, 5, 8), array(8), array(8))),
    "flattened": (lambda: (lambda x, w: (x.reshape(-1, 6) @ w).reshape(4, 5, 7), array(4, 5, 6), array(6, 7))),
    "position": (lambda: (lambda x, pos: jnp.tanh(x + pos), array(3, 5, 6), array(5, 6))),
    "keepdims_bias": (lambda: (lambda x, b: x * 2 + b, array(3, 5, 6), array(1, 1, 6))),
    "batched_weight": (lambda: (lambda x, w: jnp.einsum("nvk,vkm->nvm", x, w), array(11, 3, 4), array(3, 4, 5))),
    "two_contracted": (lambda: (lambda x, w: jnp.einsum("nhd,hdm->nm", x, w), array(11, 3, 4), array(3, 4, 5))),
    "inner_free": (lambda: (lambda x, w: jnp.einsum("ntk,km->nmt", x, w), array(11, 3, 4), array(4, 5))),
    "middle_stream": (lambda: (lambda x, w: jnp.einsum("anb,bc->acn", x, w), array(3, 11, 4), array(4, 5))),
    "iota": (lambda: (lambda x: x * jax.lax.broadcasted_iota(jnp.float32, x.shape, 0), array(9, 4))),
    "masked_rows": (lambda: (lambda x: jnp.where(jnp.arange(9)[:, None] % 2 == 0, x, 0).sum(), array(9, 4))),
    "loss": (lambda: (lambda x, w, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2), array(23, 4), array(4, 3), array(23, 3))),
    "softmax": (lambda: (lambda x: jax.nn.log_softmax(x, -1), array(9, 17))),
    "pad_slice": (lambda: (lambda x: jnp.pad(x, ((0, 0), (2, 1)))[:, 1:-2:2], array(9, 8))),
    "rev_concat": (lambda: (lambda x: jnp.concatenate([x[:, ::-1], x * 2, x[:, :2]], 1), array(9, 5))),
    "cumulative": (lambda: (lambda x: jnp.cumsum(jnp.exp(x), 1), array(9, 5))),
    "arg": (lambda: (lambda x: jnp.argmax(x * x, 1), array(9, 5))),
    "batch_stat": (lambda: (lambda x, w: jnp.tanh((x - x.mean(0)) @ w), array(19, 4), array(4, 3))),
    "one_row": (lambda: (lambda x, w: jax.nn.relu(x @ w), array(1, 4), array(4, 3))),
    "transposed_use": (lambda: (lambda x, w: jnp.tanh(x).T + w, array(9, 4), array(4, 9))),
    "loops_in_loops": (lambda: (nested, array(2, 2, 19, 4), array(3, 19, 4), array(3, 4, 4))),
    "grad": (lambda: (jax.grad(lambda x, p: (nerf(p, x) ** 2).sum()), array(13, 63), nerf_params(RNG, width=16))),
}


@pytest.mark.parametrize("name", CASES)
def test_tile_program_equals_jax(name):
    fn, *args = CASES[name]()
    got, regions = run_through_interpreter(fn, *args)
    assert regions, "nothing was pipelined"
    want, like = jax.tree.leaves(in_float64(fn, *args)), jax.tree.leaves(jax.eval_shape(fn, *args))
    for g, w, x in zip(got, want, like, strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=3e-4, atol=3e-5)


@pytest.mark.parametrize("name", CASES)
def test_tile_program_equals_jax_in_float64(name):
    with enable_x64():
        fn, *args = CASES[name]()
        args = jax.tree.map(lambda a: jax.device_put(np.asarray(a, np.float64)), args)
        got, regions = run_through_interpreter(fn, *args, seed=1)
        assert regions, "nothing was pipelined"
        for g, w in zip(got, jax.tree.leaves(in_float64(fn, *args)), strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(g, np.asarray(w), rtol=1e-11, atol=1e-12)


def test_a_plan_that_does_not_cover_the_region_is_refused():
    graph = graph_of(lambda x, p: nerf(p, x), jnp.zeros((32, 63)), nerf_params(RNG, width=8))
    machine = cpu_model("avx512bf16-2")
    chosen = select(graph, lambda i: None, lambda g, r: plan(g, r, machine), force=True).regions[0]
    import dataclasses

    short = dataclasses.replace(chosen.plan.stages[0], ops=chosen.plan.stages[0].ops[:-1])
    with pytest.raises(ValueError, match="cover"):
        build(graph, chosen.region, dataclasses.replace(chosen.plan, stages=(short, *chosen.plan.stages[1:])))


def test_weight_gradients_are_sinks_of_the_same_region():
    """Forward, loss and backward of an MLP in one region: nothing waits for the whole batch before the gradients are summed."""

    def loss(params, x, y):
        return ((nerf(params, x) - y) ** 2).mean()

    args = (nerf_params(RNG, width=16), array(53, 63), array(53, 4))
    got, regions = run_through_interpreter(jax.value_and_grad(loss), *args)
    assert max(len(c.region.sinks) for c in regions) >= 19  # the loss, 9 dW, 9 db
    want = jax.tree.leaves(jax.value_and_grad(loss)(*args))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, np.asarray(w), rtol=1e-3, atol=1e-5)


def test_a_stream_runs_over_the_slow_dimension_of_an_array():
    """Over the fast one every element of a row is a cache line of its own; the model has to know."""
    routed = route(graph_of(jnp.tanh, jnp.zeros((4096, 256))), "cpu", RouteOptions(force=True, device="avx512-2"))
    (region,) = routed.regions
    assert region.region.space.sizes == (4096,)


def test_a_region_without_code_costs_only_itself(monkeypatch):
    """The other regions keep theirs, and the report says why."""

    def fn(x, w):
        return jnp.tanh(jnp.sort(jnp.tanh(x @ w), axis=0) @ w)

    graph = graph_of(fn, jnp.zeros((64, 8)), jnp.zeros((8, 8)))
    both = route(graph, "cpu", RouteOptions(force=True))
    cpu = targets.get("cpu")
    generate = cpu.generate

    def fails_first(program, plan, name, *more):
        if not seen:
            seen.append(name)
            raise targets.CannotLower("no code today")
        return generate(program, plan, name, *more)

    seen = []
    monkeypatch.setattr(cpu, "generate", fails_first)
    one = route(graph, "cpu", RouteOptions(force=True))
    assert len(both.regions) == 2 and len(one.regions) == 1
    assert any("no code today" in r.reason for r in one.report.rejected)
