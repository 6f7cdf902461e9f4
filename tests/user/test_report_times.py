"""The times of a report: of operators left to XLA, and of the steps of loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax import targets
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.config import PlannerOptions

ON = {"platform": "cpu", "device": "avx512-8"}  # a shipped profile: the same numbers on every machine


@pytest.mark.parametrize(
    ("options", "flops"),
    [
        ({}, 2 * (2 * 8 * 10 * 10) * (4 * 3 * 3)),
        ({"feature_group_count": 2}, 2 * (2 * 8 * 10 * 10) * (2 * 3 * 3)),
        ({"lhs_dilation": (2, 2)}, 2 * (2 * 8 * 19 * 19) * (4 * 3 * 3) // 4),
    ],
)
def test_operations_of_a_convolution(options: dict[str, Any], flops: int) -> None:
    kernel = jnp.ones((8, 4 // options.get("feature_group_count", 1), 3, 3))
    f = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), [(1, 1), (1, 1)], **options)  # noqa: E731
    (op,) = capture(jax.make_jaxpr(f)(jnp.ones((2, 4, 10, 10)), kernel)).graph.ops
    assert dict(op.params) == {"flops": flops}


def test_a_convolution_is_known_and_a_sort_is_not() -> None:
    x, k = jnp.ones((2, 4, 10, 10)), jnp.ones((8, 4, 3, 3))
    assert kj.explain(lambda x: lax.conv_general_dilated(x, k, (1, 1), "SAME"), **ON)(x).unknown == 0
    assert kj.explain(lambda x: jnp.sort(x.reshape(-1)), **ON)(x).unknown >= 1


def test_operators_left_to_xla_share_the_time_of_their_kernels() -> None:
    """Each kernel's time is told once: that of a product goes to it, and not to the operators beside it."""

    def f(w: Any, x: Any) -> Any:
        return jnp.sort(jnp.abs(x @ w), 0)

    w, x = (
        jax.ShapeDtypeStruct((512, 512), jnp.int32),
        jax.ShapeDtypeStruct((4096, 512), jnp.int32),
    )  # no pipeline has int32 products
    cpu = targets.get("cpu")
    machine = cpu.machine("avx512-8")
    graph = capture(jax.make_jaxpr(f)(w, x)).graph
    known = [i for i, op in enumerate(graph.ops) if op.kind != "opaque"]
    kernels = cpu.xla_kernels(graph, known, machine, cpu.program_context(graph, machine, PlannerOptions(), False))
    report = kj.explain(f, **ON)(w, x)
    assert not report.regions
    told = {r.op: r.seconds for r in report.rejected}
    assert told["dot_general"] > told["abs"] > 0
    assert told["dot_general"] + told["abs"] == pytest.approx(sum(seconds for _, seconds in kernels), rel=1e-6)
    assert told["sort"] == pytest.approx(2 * 4096 * 512 * 4 / machine.dram_bandwidth)


def test_a_region_in_a_loop_runs_as_often_as_the_loop() -> None:
    """Of a loop that XLA runs; the operators of a step are counted once, its times for all steps."""

    def f(w: Any, x: Any) -> Any:
        def step(h: Any, _: Any) -> Any:
            for _ in range(3):
                h = jax.nn.relu(h @ w)
            return jnp.sort(h, 0), None

        return lax.scan(step, x, None, length=7)[0]

    report = kj.explain(f, force=True, **ON)(jnp.ones((64, 64)), jnp.ones((2048, 64)))
    (region,) = report.regions
    assert region.times == 7 and report.seconds == pytest.approx(7 * region.seconds)
    (sort,) = (r for r in report.rejected if r.op == "sort")
    machine = targets.get("cpu").machine("avx512-8")
    assert sort.count == 1 and sort.seconds == pytest.approx(7 * 2 * 2048 * 64 * 4 / machine.dram_bandwidth)
