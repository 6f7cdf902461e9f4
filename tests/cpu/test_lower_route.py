"""From a JAX function to the CPU executor: capture, regions, plan, tile program, code; results and the shape of the code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kitsune_jax import _cpu, targets
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import Infeasible, Plan
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.build import build
from kitsune_jax.regions.grow import anchored
from kitsune_jax.regions.select import select
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import call as cpu_call
from kitsune_jax.targets.cpu.bytecode import encode
from kitsune_jax.targets.cpu.lower import lower_program
from kitsune_jax.targets.cpu.planning.machines import cpu_model
from kitsune_jax.targets.cpu.planning.planner import plan
from tests.support.bytecode_sim import simulate
from tests.support.graphs import layer_norm, mlp, mlp_params, nerf, nerf_params, quotient_order
from tests.support.lowered import plain

RNG = np.random.default_rng(3)


def array(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.asarray(RNG.standard_normal(shape), dtype))


def execute(fn: Callable[..., Any], *args: Any) -> tuple[list[np.ndarray], list[bc.CpuProgram]]:
    """Every legal region of ``fn`` on the CPU executor (which the simulator confirms), all else through JAX."""
    captured = capture(jax.make_jaxpr(fn)(*args))
    graph = captured.graph
    machine = cpu_model("avx512bf16-2")

    def planner(graph: Graph, region: Region) -> Plan | str:
        try:
            return plan(graph, region, machine)
        except Infeasible as no:
            return str(no)

    def supports(i: int) -> str | None:
        op = graph.ops[i]
        return targets.get("cpu").supports(op, [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs])

    selection = select(graph, supports, planner, force=True)
    values: dict[int, Any] = dict(zip(graph.inputs, jax.tree.leaves(args), strict=True))
    values |= {v: np.asarray(x.literal, x.dtype) for v, x in enumerate(graph.values) if x.literal is not None}
    by_first = {anchored(graph, c.region): c for c in selection.regions}
    programs = []
    for node in quotient_order(graph, list(by_first)):
        chosen = by_first.get(node)
        if chosen is None:
            op = graph.ops[node[0]]
            values.update(zip(op.outputs, captured.run(node[0], [values[v] for v in op.inputs]), strict=True))
            continue
        tiles = build(graph, chosen.region, chosen.plan)
        code = lower_program(tiles, "region")
        programs.append(code)
        inputs = [np.ascontiguousarray(values[v]) for v in chosen.region.inputs]
        outs = simulate(code, inputs, [a.shape for a in tiles.outputs])
        ran = [np.empty_like(o) for o in outs]
        _cpu.run(encode(code), [plain(a) for a in inputs], [plain(a) for a in ran], 2)
        for a, b in zip(ran, outs, strict=True):
            _close(a, b)
        values.update(zip(chosen.region.outputs, ran, strict=True))
    return [np.asarray(values[v]) for v in graph.outputs], programs


def _close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = 4e-2 if want.dtype in (ml_dtypes.bfloat16, np.float16) else 2e-4
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


def swiglu(x: jax.Array, gain: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    h = x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype) * gain
    return x + (jax.nn.silu(h @ w_gate) * (h @ w_up)) @ w_down


def mean_squared_error(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def dense_net(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ a)
    return jnp.concatenate([x, h, jax.nn.relu(jnp.concatenate([x, h], -1) @ b)], -1)


BF16, F16 = jnp.bfloat16, jnp.float16
CASES: dict[str, tuple[Any, ...]] = {
    "nerf": (lambda x, p: nerf(p, x), array(37, 63), nerf_params(RNG, width=32)),
    "nerf_bf16": (lambda x, p: nerf(p, x), array(37, 63, dtype=BF16), nerf_params(RNG, width=32, dtype=BF16)),
    "layer_norm": (layer_norm, array(3, 5, 8), array(8), array(8)),
    "layer_norm_f16": (layer_norm, array(3, 5, 8, dtype=F16), array(8, dtype=F16), array(8, dtype=F16)),
    "softmax": (lambda x: jax.nn.softmax(x, -1), array(7, 11)),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), array(7, 11)),
    "gelu": (lambda x, w: jax.nn.gelu(x @ w), array(7, 11), array(11, 5)),
    "swiglu": (swiglu, array(13, 16), array(16), array(16, 24) / 4, array(16, 24) / 4, array(24, 16) / 4),
    "weight_first": (lambda x, w: jax.nn.relu(w @ x), array(5, 13), array(7, 5)),
    "flattened": (lambda x, w: (x.reshape(-1, 6) @ w).reshape(4, 5, 7), array(4, 5, 6), array(6, 7)),
    "heads": (lambda x, w: jnp.einsum("btd,dhk->bhtk", x, w), array(3, 5, 8), array(8, 2, 4)),
    "loss": (mean_squared_error, array(6, 4), array(17, 6), array(17, 4)),
    "loss_gradient": (jax.grad(mean_squared_error), array(6, 4), array(17, 6), array(17, 4)),
    "per_sample_gradient": (
        jax.vmap(jax.grad(lambda x, p: jnp.sum(mlp(p, x) ** 2)), (0, None)),
        array(17, 5),
        mlp_params(RNG, (5, 8, 3)),
    ),
    "causal_mask": (lambda x: jnp.where(jnp.arange(7)[:, None] >= jnp.arange(9)[None], x, -1e9), array(7, 9)),
    "one_hot": (lambda i, w: jax.nn.one_hot(i, 6) @ w, jax.device_put(RNG.integers(0, 6, 11)), array(6, 3)),
    "cumulative": (lambda x: jnp.cumsum(x[:, ::-1], 1), array(7, 5)),
    "padded": (lambda x: jnp.pad(x, ((0, 0), (1, 2))) * 2, array(7, 5)),
    "argmax": (lambda x: jnp.argmax(x, -1), array(7, 5)),
    "fourier": (lambda x, b: jnp.concatenate([jnp.sin(x @ b), jnp.cos(x @ b), x], -1), array(19, 2), array(2, 8)),
    "integers": (lambda x: (x * 3 + 1) % 7, jax.device_put(RNG.integers(-50, 50, (11, 3)))),
    "dense_net": (dense_net, array(11, 4), array(4, 3), array(7, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_jax(name: str) -> None:
    fn, *args = CASES[name]
    got, programs = execute(fn, *args)
    assert programs, "nothing was pipelined"
    for g, want in zip(got, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        _close(g, np.asarray(want))


def instructions(name: str) -> list[str]:
    fn, *args = CASES[name]
    (program,) = execute(fn, *args)[1]
    return [type(i).__name__.removeprefix("Cpu") for stage in program.stages for i in stage.body]


def test_nerf_has_no_instruction_too_many() -> None:
    for name in ("nerf", "nerf_bf16"):
        got = instructions(name)
        assert got.count("Matmul") == 9 and got.count("Vector") == 1 and len(got) == 10, got


def test_layer_norm_and_swiglu_instructions() -> None:
    assert instructions("layer_norm") == ["Reduce", "Vector", "Vector", "Reduce", "Vector", "Vector"]
    got = instructions("swiglu")
    assert got[-5:] == ["Matmul", "Matmul", "Vector", "Matmul", "Vector"], "silu and product are one group"


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["short", "long"])
def test_custom_call_through_jit(seconds: float) -> None:
    fn, *args = CASES["swiglu"]  # one region at any row count: the cost model may split a tiny function without a long chain
    (program,) = execute(fn, *args)[1]
    want = fn(*args)
    captured = capture(jax.make_jaxpr(fn)(*args)).graph
    assert len(captured.inputs) == len(program.inputs) == len(args)

    aval = jax.ShapeDtypeStruct(want.shape, want.dtype)
    (got,) = jax.jit(lambda *xs: cpu_call.call(encode(program), xs, [aval], seconds))(*args)
    _close(np.asarray(got), np.asarray(want))


def test_targets_refuse_unknown_platforms() -> None:
    with pytest.raises(ValueError, match="'tpu'; there is one for: cpu, cuda, emulator"):
        targets.get("tpu")
