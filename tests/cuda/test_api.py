"""CUDA kernels through the public API, in the emulator: transformations, sharding, loops, ``explain``, and what happens without a
compiler, an extension, or code for an operator."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax import config
from kitsune_jax.frontend import lowering
from kitsune_jax.targets.cuda import hostcc, print_kernel, runtime, target
from tests.support.checks import arrays, close, in_float64
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("kernel_cache"),
    pytest.mark.filterwarnings("error:kitsune_jax could not"),  # a failure of ours that falls back is a failure here
]

X, W1, B1, W2 = arrays(0, (96, 16), (16, 32), (32,), (32, 8))
TF32 = 4e-3  # of values near 1, after two products
emulated = {"force": True, "target": "emulator"}


def mlp(x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    return jnp.tanh(jax.nn.relu(x @ w1 + b1) @ w2)


def kernels_in(f: Any, *args: Any) -> int:
    return jax.jit(f).lower(*args).as_text().count("@kitsune_cuda")


def test_jit_and_eager_call_the_same_kernel() -> None:
    f = kj.pipeline(mlp, strict=True, **emulated)
    before = runtime.calls()
    eager, jitted = jax.block_until_ready((f(X, W1, B1, W2), jax.jit(f)(X, W1, B1, W2)))
    assert runtime.calls() == before + 2
    np.testing.assert_array_equal(np.asarray(eager), np.asarray(jitted))
    close(np.asarray(jitted), in_float64(mlp, X, W1, B1, W2), TF32)


def test_a_kind_of_kernel_that_is_ruled_out_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next best plan is taken; where every kind is ruled out, nothing is pipelined and the report says why."""

    def explained() -> Any:
        return kj.explain(mlp, **emulated)(X, W1, B1, W2)

    assert explained().regions[0].arrangement == "vertical"
    monkeypatch.setenv("KITSUNE_CUDA_AVOID", "sm90-vertical-resident-*, sm90-vertical-streamed-*")
    assert explained().regions[0].arrangement == "spatial"
    got = kj.pipeline(mlp, strict=True, **emulated)(X, W1, B1, W2)
    close(np.asarray(got), in_float64(mlp, X, W1, B1, W2), TF32)
    monkeypatch.setenv("KITSUNE_CUDA_AVOID", "*")
    report = explained()
    assert not report.regions and report.text(verbose=True).count("KITSUNE_CUDA_AVOID") == len(report.rejected)


def test_grad_of_a_pipelined_function() -> None:
    """The forward pass is a kernel; what the backward pass has no code for (weight gradients) is plain HLO; both are right."""

    def loss(f: Any) -> Any:
        return lambda *args: (f(*args) ** 2).sum() / 96

    pipelined = jax.jit(jax.value_and_grad(loss(kj.pipeline(mlp, **emulated)), (0, 1, 2, 3)))
    before = runtime.calls()
    got = pipelined(X, W1, B1, W2)
    jax.block_until_ready(got)
    assert runtime.calls() > before
    close(jax.tree.map(np.asarray, got), in_float64(jax.value_and_grad(loss(mlp), (0, 1, 2, 3)), X, W1, B1, W2), TF32)


def test_a_whole_training_step_inside() -> None:
    def step(x: Any, w1: Any, b1: Any, w2: Any) -> Any:
        loss, (g1, gb, g2) = jax.value_and_grad(lambda *p: (mlp(x, *p) ** 2).mean(), (0, 1, 2))(w1, b1, w2)
        return loss, w1 - 0.1 * g1, b1 - 0.1 * gb, w2 - 0.1 * g2

    got = jax.jit(kj.pipeline(step, **emulated))(X, W1, B1, W2)
    close(jax.tree.map(np.asarray, got), in_float64(step, X, W1, B1, W2), TF32)


def test_vmap_over_rows_and_over_weights() -> None:
    f = kj.pipeline(mlp, **emulated)
    xs = jnp.stack([X, X * 0.5, -X])
    got = jax.jit(jax.vmap(f, (0, None, None, None)))(xs, W1, B1, W2)
    close(np.asarray(got), in_float64(jax.vmap(mlp, (0, None, None, None)), xs, W1, B1, W2), TF32)
    ws = jnp.stack([W1, W1 * 0.5])
    got = jax.jit(jax.vmap(f, (None, 0, None, None)))(X, ws, B1, W2)
    close(np.asarray(got), in_float64(jax.vmap(mlp, (None, 0, None, None)), X, ws, B1, W2), TF32)


def test_scan_around_and_inside() -> None:
    ws = arrays(1, (3, 16, 16))[0]

    def network(step: Any) -> Any:
        return lambda x, ws: jax.lax.scan(lambda c, w: (step(c, w), c.sum()), x, ws)

    def step(c: Any, w: Any) -> Any:
        return jnp.tanh(c @ w) + c

    want = in_float64(network(step), X, ws)
    before = runtime.calls()
    around = jax.jit(network(kj.pipeline(step, strict=True, **emulated)))(X, ws)
    jax.block_until_ready(around)
    assert runtime.calls() == before + 3
    close(jax.tree.map(np.asarray, around), want, 2 * TF32)
    inside = jax.jit(kj.pipeline(network(step), strict=True, **emulated))(X, ws)
    close(jax.tree.map(np.asarray, inside), want, 2 * TF32)


def test_shard_map_runs_a_kernel_on_each_device() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    f = jax.shard_map(
        kj.pipeline(mlp, strict=True, **emulated),
        mesh=mesh,
        in_specs=(P("rows"), P(), P(), P()),
        out_specs=P("rows"),
        check_vma=True,
    )
    before = runtime.calls()
    got = jax.block_until_ready(jax.jit(f)(X, W1, B1, W2))
    assert runtime.calls() == before + 2
    close(np.asarray(got), in_float64(mlp, X, W1, B1, W2), TF32)


def test_float32_products_of_highest_precision_are_not_rounded_to_tf32() -> None:
    def exact(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.dot(x, w, precision=jax.lax.Precision.HIGHEST))

    got = jax.jit(kj.pipeline(exact, **emulated))(X, W1)
    close(np.asarray(got), in_float64(exact, X, W1), 1e-5)
    reasons = [r.reason for r in kj.explain(exact, platform="cuda", force=True)(X, W1).rejected]
    assert any("HIGHEST" in r for r in reasons)


def test_special_values_pass_through_a_chain() -> None:
    x = X.at[3, 5].set(jnp.nan).at[70, 0].set(jnp.inf)
    got = np.asarray(jax.jit(kj.pipeline(mlp, strict=True, **emulated))(x, W1, B1, W2))
    want = np.asarray(jax.jit(mlp)(x, W1, B1, W2))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got[:3], want[:3], atol=TF32)


def test_padding_never_meets_a_nan_of_the_last_tile() -> None:
    """Rows and columns beyond an array's end are zeros, not whatever lies behind it: 0 * NaN would show."""
    x = jnp.full((70, 27), jnp.nan).at[:69].set(0.5)
    w = jnp.ones((27, 5))
    got = np.asarray(jax.jit(kj.pipeline(lambda x, w: jax.nn.relu(x @ w) + 1, strict=True, **emulated))(x, w))
    assert np.isfinite(got[:69]).all() and np.isnan(got[69]).all()


# -- explain, platforms


def test_explain_plans_for_the_gpu_without_one() -> None:
    report = kj.explain(mlp, platform="cuda", force=True)(X, W1, B1, W2)
    assert report.platform == "cuda" and report.coverage == 1.0 and len(report.regions) == 1
    assert report.to_dict() == kj.explain(kj.pipeline(mlp, **emulated))(X, W1, B1, W2).to_dict()


def test_the_emulator_is_for_the_cpu_only() -> None:
    """Lowered for a GPU, a function that asks for the emulator gets the GPU's own kernels."""
    f = kj.pipeline(mlp, strict=True, **emulated)
    assert lowering.target_of(lowering.Options(target="emulator"), "cpu") == "emulator"
    assert lowering.target_of(lowering.Options(target="emulator"), "cuda") == "cuda"
    assert lowering.target_of(lowering.Options(target="emulator"), None) is None
    assert kernels_in(f, X, W1, B1, W2) == 1


def test_an_unknown_target_is_told() -> None:
    with pytest.raises(ValueError, match="target='gpu' is not known: use 'emulator'"):
        kj.pipeline(mlp, target="gpu")


# -- what goes wrong


def test_without_a_compiler_one_warning_and_plain_hlo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    target.warn_once.cache_clear()
    f = kj.pipeline(lambda x: jnp.sin(x) * 3, **emulated)
    with pytest.warns(RuntimeWarning) as told:
        got = jax.jit(f)(X)
        jax.jit(lambda x: f(x) + 1)(X)
    assert [str(w.message) for w in told if "kitsune" in str(w.message)] == [
        f"kitsune_jax makes no CUDA kernels here: {hostcc.why_not()}. Functions lower as plain HLO. "
        "python -m kitsune_jax doctor says what to do."
    ]
    assert "C++17 compiler" in str(hostcc.why_not())
    np.testing.assert_allclose(np.asarray(got), np.sin(np.asarray(X)) * 3, atol=1e-6)
    assert kernels_in(f, X) == 0


def test_without_a_compiler_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kj.NotPipelined, match=r"C\+\+17 compiler"):
            jax.jit(kj.pipeline(lambda x: jnp.cos(x) * 3, strict=True, **emulated))(X)


def test_strict_raises_with_the_reasons() -> None:
    with pytest.raises(kj.NotPipelined) as no:
        jax.jit(kj.pipeline(lambda x: jax.lax.cumsum(x, axis=1), strict=True, **emulated))(X)
    assert "cumsum has no code on the GPU" in str(no.value)


def test_an_error_of_the_emulator_names_region_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes outside of its results, because we made it so, is an error of JAX."""
    made = print_kernel.source

    def planted(*laid_out: Any) -> str:
        right = made(*laid_out)
        wrong = right.replace("static_cast<u8*>(p.out0)", "static_cast<u8*>(p.out0) + 1000000")
        assert wrong != right
        return wrong

    monkeypatch.setattr(print_kernel, "source", planted)
    monkeypatch.setenv("KITSUNE_EMULATOR_SEED", "77")
    f = kj.pipeline(lambda x: jnp.tanh(x) * 7, strict=True, **emulated)
    with pytest.raises(Exception, match=r"(?s)region0.*emulator seed 77"):
        jax.block_until_ready(jax.jit(f)(X))


@pytest.mark.parametrize("seed", ["-1", "abc", str(1 << 64)])
def test_a_seed_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
    monkeypatch.setenv("KITSUNE_EMULATOR_SEED", seed)
    with pytest.raises(ValueError, match="KITSUNE_EMULATOR_SEED"):
        config.emulator_seed()
