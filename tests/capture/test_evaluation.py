"""An op that is left to XLA becomes what its equation would have become: the same StableHLO, name stack and source line.

Where a Graph says the same in other words, XLA gets these words: a dimension of extent 1 is added by a reshape, and a weight
gradient is made in the orientation in which it is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.ops.table import OPS, SHAPE_RULES
from tests.capture.test_capture import run_steps
from tests.support.checks import enable_x64
from tests.support.graphs import struct
from tests.table.test_ops import METHODS, WITH_ACCURACY

QUICK_DTYPES = ("bool", "int8", "uint32", "int64", "bfloat16", "float32", "float64")
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "integer_pow": [{"y": 3}, {"y": 7}],
    "reduce_precision": [{"exponent_bits": 5, "mantissa_bits": 4}, {"exponent_bits": 11, "mantissa_bits": 52}],
    "round": [{"rounding_method": method} for method in METHODS.values()],
    **{kind: [{"accuracy": None}] for kind in WITH_ACCURACY},
}
# Both words of a hash are two ops, each of which binds the primitive (XLA does it once): tests/capture/test_random_bits.py.
APART = ("copy", "threefry2x32", "philox4x32")
PRIMITIVES = [kind for kind, spec in OPS.items() if spec.family == "pointwise" and kind not in APART]


def text(f: Callable[..., Any], args: Any, debug_info: bool = False) -> str:
    def same_name(*a: Any) -> Any:
        return f(*a)

    return jax.jit(same_name).lower(*args).as_text(debug_info=debug_info)


def check(f: Callable[..., Any], *args: Any) -> list[str]:
    """``f`` and its Graph, evaluated op by op, lower to the same program. Returns the kinds of its ops."""
    c = capture(jax.make_jaxpr(f)(*args))
    assert not c.failures
    assert text(lambda *a: run_steps(c, a), args) == text(lambda *a: jax.tree.leaves(f(*a)), args)
    return [op.kind for op in c.graph.ops]


@pytest.mark.parametrize("kind", PRIMITIVES)
def test_pointwise(kind: str) -> None:
    arity = OPS[kind].arity or 0
    with enable_x64():
        for dtype in [d for d in QUICK_DTYPES if d in OPS[kind].dtypes]:
            bits = {"new_dtype": np.dtype(f"int{8 * np_dtype(dtype).itemsize}")}
            for params in [bits] if kind == "bitcast_convert_type" else PARAMETERS.get(kind, [{}]):
                primitive = getattr(lax, f"{kind}_p")
                args = [struct(3, 5, dtype=np_dtype(dtype))] * arity
                if kind == "select_n":
                    args[0] = struct(3, 5, dtype=bool)
                (made,) = check(lambda *a, p=primitive, o=params: p.bind(*a, **o), *args)
                assert made == (kind if params.get("mantissa_bits") != 52 else "copy")


X, W = struct(6, 4), struct(4, 3)
FORMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "literals": (lambda x: (x * 2 + 1.5 - x / 3, 1 - x, lax.pow(x, np.float32(2)), jnp.maximum(x, 0)), (X,)),
    "weak types": (lambda x: (2 * jnp.sin(1.5 * x), x.astype(jnp.bfloat16) * 2, lax.select(x > 0, x, x * 2.5) ** 2), (X,)),
    "convert": (lambda x: (x.astype(jnp.int8), x.astype(jnp.bfloat16), x > 0), (X,)),
    "reduce": (lambda x: (x.sum(0), x.max((0, 1)), x.min(1), lax.reduce_prod(x, (0,)), (x > 0).any(1), (x > 1).all()), (X,)),
    "argreduce": (lambda x: (lax.argmax(x, 0, jnp.int32), lax.argmin(x, 1, jnp.int8)), (X,)),
    "cumulative": (lambda x: (lax.cumsum(x, 0), lax.cummax(x, 1, True), lax.cumlogsumexp(x, 0)), (X,)),
    "dot": (lambda x, w: (x @ w, lax.dot(x, w, precision="highest"), jnp.dot(-x, w, preferred_element_type=jnp.float32)), (X, W)),
    "dot of half precision": (lambda x, w: x @ w, (struct(6, 4, dtype=jnp.bfloat16), struct(4, 3, dtype=jnp.bfloat16))),
    "dot accumulated": (
        lambda x: lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32),
        (struct(6, 4, dtype=jnp.float16),),
    ),
    "dot of integers": (
        lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32),
        (struct(6, 4, dtype=jnp.int8),),
    ),
    "broadcast": (lambda x: (lax.broadcast_in_dim(x, (2, 6, 4), (1, 2)), jnp.zeros((3, 2)) + x[0, 0]), (X,)),
    "reshape": (lambda x: (x.reshape(8, 3), lax.squeeze(x[:1], (0,))), (X,)),
    "transpose": (lambda x: x.T, (X,)),
    "concatenate": (lambda x: jnp.concatenate([x, x * 2], 1), (X,)),
    "slice": (lambda x: (x[1:3], x[::2, 1:], lax.slice(x, (0, 1), (5, 4), (2, 3))), (X,)),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((1, -1, 0), (0, 2, 1))), (X,)),
    "rev": (lambda x: lax.rev(x, (0,)), (X,)),
    "iota": (lambda x: x * lax.broadcasted_iota(jnp.float32, (6, 4), 1), (X,)),
    "gradient": (lambda x, w: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))(x), (X, W)),
    "batch": (jax.vmap(lambda x, w: jnp.tanh(jnp.sin(x) @ w).sum(-1)), (struct(2, 6, 4), struct(2, 4, 3))),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("x64", [False, True])
def test_forms(name: str, x64: bool) -> None:
    f, args = FORMS[name]
    with enable_x64() if x64 else contextlib.nullcontext():
        kinds = check(f, *args)
    assert "opaque" not in kinds
    if name in SHAPE_RULES:
        assert any(OPS[kind].family == name for kind in kinds)


def test_a_matmul_precision_that_is_the_default_at_lowering_does_not_change_a_product() -> None:
    x = jnp.ones((3, 3))
    c = capture(jax.make_jaxpr(lambda x: lax.dot(x, x))(x))
    with jax.default_matmul_precision("highest"):
        lowered = text(lambda *a: run_steps(c, a), (x,))
    assert "HIGHEST" not in lowered and "dot_general" in lowered


def test_ops_stand_where_their_equations_stood() -> None:
    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("encoder"):
            return jax.jit(lambda x: jnp.sin(x @ w) * 2)(x)

    c = capture(jax.make_jaxpr(f)(X, W))
    for op in ("dot_general", "sin", "mul"):
        name = [line for line in text(lambda *a: run_steps(c, a), (X, W), True).splitlines() if f"/{op}" in line]
        assert any("encoder/jit(<lambda>)" in line for line in name), name
    assert "test_evaluation.py" in text(lambda *a: run_steps(c, a), (X, W), True)


def test_results_vary_over_a_mesh_as_the_equations_do() -> None:
    """``shard_map(check_vma=True)``, the default, refuses an op whose operands vary over different axes."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    seen = []

    def local(x: Any, w: Any) -> Any:
        h = jnp.sort(jnp.where(x > 0, x * 2.5, 0.0) @ w) + lax.iota(jnp.float32, 3)
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.clip(x, -1.0, 1.0) @ w)))(w)
        return lax.psum(h @ jnp.ones((3, 2)), "d"), gradient, h[:, 0]

    def evaluated(x: Any, w: Any) -> Any:
        seen.append(capture(jax.make_jaxpr(local)(x, w)))
        return tuple(run_steps(seen[-1], (x, w)))

    x, w = np.linspace(-1, 1, 40, dtype=np.float32).reshape(8, 5), np.ones((5, 3), np.float32)
    options = {"mesh": mesh, "in_specs": (by_rows, whole), "out_specs": (whole, whole, by_rows)}
    for got, want in zip(*(jax.jit(jax.shard_map(f, **options))(x, w) for f in (evaluated, local)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    kinds = [op.kind for op in seen[0].graph.ops]
    assert not seen[0].failures and {"copy", "iota", "select_n", "opaque"} <= set(kinds)
