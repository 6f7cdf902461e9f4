"""The mask of a ReLU's gradient is read off the ReLU's result, so that its argument need not be kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax import _compat
from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.targets.cpu import bytecode
from kitsune_jax.targets.cpu.lower import lower_program
from reference.graph import evaluate_numpy
from tests.support.graphs import mlp

X = np.array([-2.0, -0.0, 0.0, 1e-30, 3.0, np.inf, -np.inf, np.nan], np.float32)


def captured(fn, *args) -> Captured:
    return capture(_compat.hoist_consts(jax.make_jaxpr(fn)(*args))[0])


def operand(c: Captured, kind: str) -> str:
    """The kind of the op that makes the array which the (only) comparison of ``kind`` reads, or "input"."""
    (op,) = (op for op in c.graph.ops if op.kind == kind)
    (v,) = (v for v in op.inputs if c.graph.values[v].literal is None)
    maker = c.graph.producers().get(v)
    return "input" if maker is None else c.graph.ops[maker].kind


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x: (jnp.maximum(x, 0.0), x > 0.0), "gt"),
        (lambda x: (jnp.maximum(0.0, x), x > 0.0), "gt"),
        (lambda x: (jnp.maximum(x, 0.0), jnp.less(0.0, x)), "lt"),
    ],
    ids=["max(x, 0)", "max(0, x)", "0 < x"],
)
def test_mask_of_a_relu_reads_its_result(fn, kind):
    assert operand(captured(fn, X), kind) == "max"


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x: (jnp.maximum(x, 0.0), x >= 0.0), "ge"),
        (lambda x: (jnp.maximum(x, 0.0), x < 0.0), "lt"),
        (lambda x: (jnp.maximum(x, 0.0), jnp.greater(0.0, x)), "gt"),
        (lambda x: (jnp.maximum(x, 0.0), x > 1.0), "gt"),
        (lambda x: (jnp.maximum(x, 1.0), x > 0.0), "gt"),
        (lambda x: (x > 0.0, jnp.maximum(x, 0.0)), "gt"),
    ],
    ids=["x >= 0", "x < 0", "0 > x", "x > 1", "max(x, 1)", "mask before the relu"],
)
def test_other_comparisons_keep_their_argument(fn, kind):
    assert operand(captured(fn, X), kind) == "input"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_mask_is_the_same_for_every_kind_of_number(dtype):
    x = jnp.asarray(X, dtype) if dtype != "int32" else jnp.arange(-2, 3, dtype=dtype)
    c = captured(lambda x: (jnp.maximum(x, 0), x > 0), x)
    assert operand(c, "gt") == "max"
    np.testing.assert_array_equal(evaluate_numpy(c.graph, [np.asarray(x)])[1], np.asarray(x) > 0)


def test_training_step_of_an_mlp_rectifies_in_its_matmuls(monkeypatch):
    programs = []
    monkeypatch.setattr(
        "kitsune_jax.targets.cpu.lower.lower_program", lambda p, *how: programs.append(lower_program(p, *how)) or programs[-1]
    )
    import kitsune_jax as kj

    rng = np.random.default_rng(0)
    params = [(rng.standard_normal((24, 24)).astype(np.float32), np.zeros(24, np.float32)) for _ in range(3)]
    x = rng.standard_normal((101, 24)).astype(np.float32)
    step = jax.grad(lambda params, x: jnp.sum(mlp(params, x) ** 2))
    jax.jit(kj.pipeline(step, force=True)).lower(params, x)
    matmuls = [i for p in programs for s in p.stages for i in s.body if isinstance(i, bytecode.Matmul)]
    relu = bytecode.ACTIVATIONS.index("relu")
    assert sum(m.activation == relu for m in matmuls) == 2  # every layer but the last
