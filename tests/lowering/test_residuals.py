"""Residual policies: what the backward pass of a pipelined function keeps, recomputes and needs in memory, and the report of it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import kitsune_jax as kj
from benchmarks.apps import APPS, nerf
from kitsune_jax import _compat
from kitsune_jax.frontend import explain, residuals
from kitsune_jax.frontend.residuals import policy_name
from kitsune_jax.report.data import PolicyReport, flop_text, signed, time_text
from kitsune_jax.report.render import Report
from tests.support.checks import TARGET, arrays, close, count, in_float64

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

POLICIES = jax.checkpoint_policies
LAYERS = 3
ROWS, WIDTH = 97, 24


def network(ws: list[Any], x: Any) -> Any:
    for i, w in enumerate(ws):
        x = checkpoint_name(jnp.tanh(x @ w), f"layer{i}")
    return x


def inputs(dtype: Any = jnp.float32, rows: int = ROWS) -> tuple[list[Any], Any]:
    *ws, x = arrays(5, *[(WIDTH, WIDTH)] * LAYERS, (rows, WIDTH))
    return [w.astype(dtype) for w in ws], x.astype(dtype)


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jnp.sum(f(*args).astype(jnp.float32) ** 2)


def gradient(residuals: Any, f: Callable[..., Any] = network) -> Callable[..., Any]:
    return jax.grad(loss(kj.pipeline(f, force=True, residuals=residuals)), (0, 1))


def rows_of(report: Report) -> dict[str, PolicyReport]:
    assert report.residuals is not None
    return {p.policy: p for p in report.residuals.policies}


def results(compiled_text: str) -> list[str]:
    """The result types of each pipeline in a compiled program: ``f32[97,24]``."""
    calls = [line for line in compiled_text.splitlines() if f'custom_call_target="{TARGET}"' in line]
    return [t for line in calls for t in re.findall(r"\w+\[[\d,]*\]", line.split(" custom-call(")[0])]


# --- what is kept ---------------------------------------------------------------------------------------------------------------


def rectified(ws: list[Any], x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


@pytest.mark.parametrize(("dtype", "wider"), [(jnp.bfloat16, "f32"), (jnp.float32, "f64")])
def test_saved_values_have_the_dtype_they_were_computed_in(dtype: Any, wider: str) -> None:
    args = inputs(dtype)
    compiled = jax.jit(gradient("save", rectified)).lower(*args).compile()
    streamed = {t.split("[")[0] for t in results(compiled.as_text()) if f"[{ROWS}," in t}
    assert streamed == {"bf16" if dtype == jnp.bfloat16 else "f32", "pred"}
    assert wider not in streamed
    forward = explain.pipelined_calls(jax.make_jaxpr(gradient("save", rectified))(*args))[0]
    kept = [a.dtype for a in _compat.out_avals(forward.jaxpr) if a.shape == (ROWS, WIDTH)]
    assert set(kept) == {jnp.dtype(dtype), jnp.dtype(bool)}
    assert kept.count(jnp.dtype(bool)) == LAYERS


def dots(report: Report) -> list[int]:
    """Matrix products of each region."""
    return [sum(op == "dot_general" for stage in region.stages for op in stage.ops) for region in report.regions]


def test_recompute_repeats_the_forward_products_inside_the_backward_pipeline() -> None:
    args = inputs()
    by_policy = {r: kj.explain(gradient(r))(*args) for r in ("save", "recompute")}
    assert sum(dots(by_policy["save"])) == LAYERS + 2 * LAYERS
    assert dots(by_policy["recompute"]) == [LAYERS, LAYERS + 2 * LAYERS]
    assert count(jax.jit(gradient("recompute")).lower(*args).compile().as_text()) == 2


def test_recompute_writes_the_result_only() -> None:
    args = inputs()
    compiled = jax.jit(gradient("recompute")).lower(*args).compile()
    written = [t for t in results(compiled.as_text()) if t.startswith(f"f32[{ROWS},")]
    assert len(written) == 2  # the result, and the gradient by the inputs
    saved = jax.jit(gradient("save")).lower(*args).compile()
    assert len([t for t in results(saved.as_text()) if t.startswith(f"f32[{ROWS},")]) > LAYERS + 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_policies_give_equal_gradients_and_keep_what_they_name(dtype: Any) -> None:
    args = inputs(dtype)
    want = in_float64(jax.grad(loss(network), (0, 1)), *args)
    scale = [np.abs(a).max() for a in jax.tree.leaves(want)]
    kept = {}
    for name, policy in {
        "save": "save",
        "dots_saveable": POLICIES.dots_saveable,
        "save_only_these_names": POLICIES.save_only_these_names("layer1"),
        "recompute": "recompute",
    }.items():
        g = gradient(policy)
        assert count(jax.jit(g).lower(*args).compile().as_text()) >= 2
        got = [np.asarray(a, np.float64) / s for a, s in zip(jax.tree.leaves(jax.jit(g)(*args)), scale, strict=True)]
        close(got, [b / s for b, s in zip(jax.tree.leaves(want), scale, strict=True)], 3e-2 if dtype == jnp.bfloat16 else 2e-5)
        row = rows_of(kj.explain(g)(*args))[name]
        assert row.in_use
        kept[name] = row.kept_bytes
    layer = ROWS * WIDTH * jnp.dtype(dtype).itemsize
    assert kept["recompute"] == 0
    assert kept["save_only_these_names"] == layer
    assert kept["dots_saveable"] == LAYERS * layer
    assert kept["save"] >= LAYERS * layer


# --- the report -----------------------------------------------------------------------------------------------------------------


def test_report_compares_the_policy_in_use_with_the_alternatives() -> None:
    args = inputs()
    report = kj.explain(gradient("save"))(*args)
    save, recompute = rows_of(report)["save"], rows_of(report)["recompute"]
    assert report.residuals is not None
    assert not report.residuals.of_gradient
    assert (save.in_use, recompute.in_use) == (True, False)
    forward = explain.pipelined_calls(jax.make_jaxpr(gradient("save"))(*args))[0]
    made = [a for a in _compat.out_avals(forward.jaxpr) if a.shape == (ROWS, WIDTH)]
    assert 0 < save.kept_bytes <= sum(math.prod(a.shape) * a.dtype.itemsize for a in made)
    assert recompute.kept_bytes == 0
    assert save.argument_bytes == recompute.argument_bytes == sum(a.nbytes for a in jax.tree.leaves(args))
    assert save.flops_added == 0
    products = LAYERS * 2 * ROWS * WIDTH * WIDTH
    assert products <= recompute.flops_added < 1.5 * products
    assert save.plan is not None
    assert save.plan.seconds == pytest.approx(report.seconds)
    assert recompute.plan is not None
    assert recompute.plan.seconds_added == pytest.approx(recompute.plan.seconds - save.plan.seconds)


def test_only_the_explained_program_is_planned_if_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report takes no longer than lowering: nothing is planned for the comparison of policies alone."""
    monkeypatch.setattr(residuals, "_MOST_PLANNED", {"cpu": 3})
    args = inputs()
    step = kj.explain(gradient("save"))(*args)
    assert rows_of(step)["save"].plan is not None and rows_of(step)["recompute"].plan is None
    assert rows_of(step)["recompute"].flops_added > 0
    function = kj.explain(kj.pipeline(network, force=True))(*args)
    assert [row.plan for row in rows_of(function).values()] == [None, None]
    assert "not planned" in str(function)


def test_alternatives_are_what_the_other_policy_would_be() -> None:
    """The rows do not depend on which policy is in use."""
    args = inputs()
    told = {r: rows_of(kj.explain(gradient(r))(*args)) for r in ("save", "recompute")}
    for policy in ("save", "recompute"):
        a, b = told["save"][policy], told["recompute"][policy]
        assert (a.kept_bytes, a.argument_bytes, a.flops_added, a.plan) == (b.kept_bytes, b.argument_bytes, b.flops_added, b.plan)
    compiled = jax.jit(gradient("save")).lower(*args).compile()
    assert "opt-barrier" not in compiled.as_text()  # explaining the other policy has left nothing behind in JAX's caches


def test_report_of_a_function_tells_what_its_gradient_would_keep() -> None:
    args = inputs()
    alone = kj.explain(kj.pipeline(network, force=True))(*args)
    assert alone.residuals is not None
    assert alone.residuals.of_gradient
    assert rows_of(alone) == rows_of(kj.explain(gradient("save"))(*args))
    assert rows_of(kj.explain(network, force=True)(*args)) == rows_of(alone)
    named = kj.explain(kj.pipeline(network, force=True, residuals=POLICIES.save_only_these_names("layer1")))(*args)
    assert list(rows_of(named)) == ["save_only_these_names", "save", "recompute"]
    assert rows_of(named)["save_only_these_names"].kept_bytes == ROWS * WIDTH * 4


def test_residuals_of_loops_are_those_of_all_rounds() -> None:
    ws, x = inputs()
    stacked = jnp.stack(ws)

    def scanned(residuals: Any) -> Any:
        layer = kj.pipeline(lambda c, w: jnp.tanh(c @ w), force=True, residuals=residuals)
        return jax.grad(lambda ws, x: jnp.sum(jax.lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0] ** 2), (0, 1))

    rows = rows_of(kj.explain(scanned("recompute"))(stacked, x))
    layer = ROWS * WIDTH * 4
    assert rows["recompute"].kept_bytes == LAYERS * layer  # the inputs of each round, which the round before has made
    assert rows["save"].kept_bytes >= LAYERS * layer
    assert rows["recompute"].flops_added >= LAYERS * 2 * ROWS * WIDTH * WIDTH


def test_gradients_inside_a_loop_are_found() -> None:
    ws, x = inputs()

    def steps(ws: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, ws: jax.tree.map(lambda w, g: w - g, ws, gradient("save")(ws, x)[0]), ws)

    once = jax.grad(loss(kj.pipeline(network, force=True)))
    assert rows_of(kj.explain(steps)(ws, x))["save"].kept_bytes == rows_of(kj.explain(once)(ws, x))["save"].kept_bytes > 0


def test_nothing_is_told_where_nothing_is_kept() -> None:
    ws, x = inputs()
    whole = kj.pipeline(jax.value_and_grad(loss(network)), force=True)
    forward = kj.pipeline(network, force=True)
    ints = jnp.arange(ROWS * 4).reshape(ROWS, 4)
    assert kj.explain(whole)(ws, x).residuals is None  # one call holds both passes
    assert kj.explain(lambda ws, x: forward(ws, x) * 2)(ws, x).residuals is None  # no backward pass
    assert kj.explain(kj.pipeline(lambda i: i * 2 + 1, force=True))(ints).residuals is None  # not differentiable
    assert kj.explain(lambda x: x + 1, force=False)(x[:1]).residuals is None  # nothing is pipelined


def test_function_that_cannot_be_differentiated_is_explained() -> None:
    def f(ws: Any, x: Any) -> Any:
        y = jax.lax.while_loop(lambda y: jnp.sum(y) > 1.0, lambda y: y * 0.5, x)
        return network(ws, y)

    report = kj.explain(f, force=True)(*inputs())
    assert report.ops_pipelined
    assert report.residuals is None


def test_gpu_report_plans_both_policies() -> None:
    report = kj.explain(rectified, platform="cuda", device="h200", force=True)(*inputs(jnp.bfloat16, 4096))
    rows = rows_of(report)
    assert rows["recompute"].kept_bytes == 0 and rows["save"].kept_bytes > 0
    assert rows["recompute"].flops_added > 0
    assert all(row.plan is not None and row.plan.ops_pipelined > 0 for row in rows.values())


def test_text_html_and_dictionary_tell_all_of_it() -> None:
    report = kj.explain(gradient(POLICIES.dots_saveable))(*inputs())
    lines = str(report).split("residuals: ")[1].splitlines()[:5]
    assert lines[0] == "values that the forward pass saves for the backward pass"
    assert [line.split()[0] for line in lines[2:5]] == ["dots_saveable", "save", "recompute"]
    assert "dots_saveable (in use)" in lines[2]
    assert f"{LAYERS * ROWS * WIDTH * 4 / 1000:.1f} kB" in lines[2]
    html = report._repr_html_()
    assert "dots_saveable (in use)" in html
    assert html.count("<table>") == html.count("</table>")
    told = json.loads(json.dumps(report.to_dict()))["residuals"]["policies"]
    assert [p["policy"] for p in told] == ["dots_saveable", "save", "recompute"]


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("recompute", "recompute"),
        (POLICIES.dots_saveable, "dots_saveable"),
        (POLICIES.dots_with_no_batch_dims_saveable, "dots_with_no_batch_dims_saveable"),
        (POLICIES.save_any_names_but_these("a"), "save_any_names_but_these"),
        (lambda *_, **__: True, "<lambda>"),
    ],
)
def test_policies_have_the_names_users_know(policy: Any, name: str) -> None:
    assert policy_name(policy) == name


def test_work_and_differences_have_units_and_signs() -> None:
    assert [flop_text(x) for x in (0, 7, 433_000, 2.59e11)] == ["0 flop", "7 flop", "433 kflop", "259 Gflop"]
    assert [signed(time_text, x) for x in (-0.373, 0.0, 1.5e-6)] == ["-373 ms", "0 ns", "+1.50 us"]


# --- memory ---------------------------------------------------------------------------------------------------------------------

NERF_ROWS = 262_144


def nerf_step(network: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda p, x, y: jnp.mean((network(p, x) - y).astype(jnp.float32) ** 2))


def nerf_shapes(rows: int, dtype: Any) -> tuple[Any, Any, Any]:
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    return {k: shape(*s) for k, s in APPS["nerf"].shapes.items()}, shape(rows, 63), shape(rows, 4)


def temporary_bytes(step: Callable[..., Any], dtype: Any) -> tuple[int, int]:
    """Of the compiled step: bytes of temporaries, and how many pipelines it holds."""
    compiled = jax.jit(step).lower(*nerf_shapes(NERF_ROWS, dtype)).compile()
    return compiled.memory_analysis().temp_size_in_bytes, count(compiled.as_text())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_nerf_training_takes_a_quarter_of_the_memory(dtype: Any) -> None:
    """262 144 samples are compiled, not run."""
    plain, none = temporary_bytes(nerf_step(nerf), dtype)
    assert none == 0
    recompute, calls = temporary_bytes(nerf_step(kj.pipeline(nerf, residuals="recompute")), dtype)
    assert calls == 2
    assert recompute <= plain / 4
    whole, calls = temporary_bytes(kj.pipeline(nerf_step(nerf)), dtype)
    assert calls >= 1
    assert whole <= plain / 4


@pytest.mark.slow
def test_process_grows_by_a_quarter_of_what_plain_jax_takes() -> None:
    """Resident memory of a real run, so that nothing hides in the workers' own scratch."""
    code = (
        "import resource, sys, jax, numpy as np, kitsune_jax as kj\n"
        "from tests.lowering.test_residuals import *\n"
        "step = nerf_step(nerf if sys.argv[1] == 'plain' else kj.pipeline(nerf, residuals='recompute'))\n"
        "shapes = nerf_shapes(32_768, jnp.float32)\n"
        "args = jax.tree.map(lambda s: jax.device_put(np.full(s.shape, 0.01, s.dtype)), shapes)\n"
        "compiled = jax.jit(step).lower(*shapes).compile()\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "jax.block_until_ready(compiled(*args))\n"
        "print(peak() - before)\n"
    )
    plain, recompute = (int(_python(code, way)) for way in ("plain", "recompute"))
    assert recompute <= plain / 4


def _python(code: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]
