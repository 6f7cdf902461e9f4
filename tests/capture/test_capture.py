"""From functions to Graphs: round trips through NumPy, inlining, decompositions, and what stays opaque and why."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.capture.edit import Captured, scalar_of
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.table import verify
from reference.graph import evaluate_numpy
from reference.standalone import from_json, to_json
from tests.support.graphs import layer_norm, mlp, mlp_params, nerf, nerf_params

RNG = np.random.default_rng(11)


def array(*shape, dtype=np.float32):
    return jax.device_put(np.asarray(RNG.standard_normal(shape), dtype))


def captured(fn, *args, rewrite=None) -> Captured:
    closed, consts = _compat.hoist_consts(jax.make_jaxpr(fn)(*args))
    assert not consts, "pass arrays as arguments"
    result = capture(closed, rewrite=rewrite)
    verify(result.graph)
    assert not result.failures
    assert len(result.steps) == len(result.graph.ops)
    assert len(result.avals) == len(result.graph.values)
    for value, aval in zip(result.graph.values, result.avals, strict=True):
        assert aval is None or (value.shape, value.dtype) == (tuple(aval.shape), str(aval.dtype))
    return result


def run_steps(c: Captured, args):
    """The outputs, every op evaluated by JAX."""
    env = dict(zip(c.graph.inputs, jax.tree.leaves(args), strict=True))
    env |= {v: jnp.asarray(x.literal, x.dtype) for v, x in enumerate(c.graph.values) if x.literal is not None}
    for i, op in enumerate(c.graph.ops):
        outs = c.run(i, [env[v] for v in op.inputs])
        for v, out in zip(op.outputs, outs, strict=True):
            assert (out.shape, str(out.dtype)) == (c.graph.values[v].shape, c.graph.values[v].dtype), op
            env[v] = out
    return [env[v] for v in c.graph.outputs]


def kinds(c: Captured):
    return [op.kind for op in c.graph.ops]


def reasons(c: Captured):
    return [op.reason for op in c.graph.ops if op.kind == "opaque"]


def check(fn, *args, tolerance=2e-5, opaque=False) -> Captured:
    """Steps, NumPy rules and JAX agree; the Graph survives JSON."""
    c = captured(fn, *args)
    want = jax.tree.leaves(jax.jit(fn)(*args))
    for got, ref in zip(jax.jit(lambda *a: run_steps(c, a))(*args), want, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(ref, np.float64), rtol=tolerance, atol=tolerance)
    again = from_json(to_json(c.graph))
    assert again == c.graph and hash(again) == hash(c.graph)
    assert opaque == bool(reasons(c)), reasons(c)
    if not opaque:
        leaves = [np.asarray(x) for x in jax.tree.leaves(args)]
        for got, ref in zip(evaluate_numpy(c.graph, leaves), want, strict=True):
            assert (got.shape, got.dtype) == (ref.shape, ref.dtype)
            np.testing.assert_allclose(got.astype(np.float64), np.asarray(ref, np.float64), rtol=tolerance, atol=tolerance)
        for got in evaluate_numpy(c.graph, leaves, widen=True):
            assert got.dtype == np.float64 or not np.issubdtype(got.dtype, np.inexact)
    return c


def rms_norm(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def swiglu(x, gain, up, gate, down):
    h = rms_norm(x, gain)
    return x + (jax.nn.silu(h @ gate) * (h @ up)) @ down


def densenet(x, ws):
    for w in ws:
        x = jnp.concatenate([x, jax.nn.elu(x @ w)], axis=-1)
    return x


def loss(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def cross_entropy(params, x, labels):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(mlp(params, x)) * jax.nn.one_hot(labels, 4), -1))


NETS = {
    "mlp": (mlp, mlp_params(RNG, (6, 8, 4)), array(7, 6)),
    "nerf": (nerf, nerf_params(RNG, width=16, inputs=9), array(5, 9)),
    "layer_norm": (layer_norm, array(3, 5, 8), array(8), array(8)),
    "rms_norm": (rms_norm, array(3, 8), array(8)),
    "softmax": (lambda x: jax.nn.softmax(x, -1), array(5, 7)),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 0), array(5, 7)),
    "gelu": (jax.nn.gelu, array(13)),
    "gelu_erf": (lambda x: jax.nn.gelu(x, approximate=False), array(13)),
    "swiglu": (swiglu, array(5, 6), array(6), array(6, 8), array(6, 8), array(8, 6)),
    "densenet": (densenet, array(3, 4), [array(4, 3), array(7, 2)]),
    "batched": (lambda x, w: jax.vmap(lambda a, b: jnp.tanh(a @ b))(x, w), array(3, 4, 5), array(3, 5, 2)),
    "attention": (lambda q, k, v: jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)) @ v.swapaxes(1, 2), *[array(2, 3, 2, 4)] * 3),
    "integers": (lambda x: (x // 3 + x % 5 - (x << 2)) ^ jnp.clip(x, -2, 3), jnp.arange(-9, 9)),
    "where": (lambda x: jnp.where(x > 0, x, jnp.sin(x)), array(4, 5)),
    "argmax": (lambda x: (jnp.argmax(x, -1), jnp.cumsum(x, 0), jnp.flip(x, 1)), array(4, 5)),
    "pieces": (
        lambda x: (jnp.split(x, 2, 1), jnp.stack([x, x * 2], 1), jnp.unstack(x), jnp.tile(x, (2, 1)), jnp.tile(x, 3)),
        array(3, 4),
    ),
    "positions": (lambda x: jnp.where(jnp.arange(4) < 3, jnp.pad(x, ((1, 0), (0, 1)))[1:, :4], -jnp.inf).max(-1), array(3, 4)),
    "bfloat16": (
        lambda x, w: jax.nn.relu(x @ w).astype(jnp.float32).sum(0),
        array(4, 6, dtype=jnp.bfloat16),
        array(6, 3, dtype=jnp.bfloat16),
    ),
    "gradient": (jax.value_and_grad(loss), mlp_params(RNG, (6, 8, 4)), array(7, 6), array(7, 4)),
    "tanh gradient": (jax.grad(lambda x: jnp.tanh(x).sum()), array(4, 5)),
    "cross entropy": (jax.grad(cross_entropy), mlp_params(RNG, (6, 8, 4)), array(7, 6), jnp.arange(7) % 4),
    "hessian": (jax.hessian(lambda x: jnp.sum(jax.nn.silu(x) ** 2)), array(3)),
}


@pytest.mark.parametrize("name", NETS)
def test_round_trip(name):
    fn, *args = NETS[name]
    check(fn, *args, tolerance=0.05 if name == "bfloat16" else 3e-5)


def test_widened_evaluation_is_more_accurate():
    x, w = array(4, 300), array(300, 4)
    graph = captured(lambda x, w: jax.nn.softmax(x @ w), x, w).graph
    a, b = (np.asarray(v, np.float64) for v in (x, w))
    e = np.exp(a @ b - (a @ b).max(-1, keepdims=True))
    np.testing.assert_allclose(evaluate_numpy(graph, [x, w], widen=True)[0], e / e.sum(-1, keepdims=True), rtol=1e-13)


def test_canonical_parameters():
    def fn(x):
        y = lax.dot_general(x, x, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32)
        return lax.integer_pow(lax.round(y), 3), jnp.expand_dims(x, 1), lax.squeeze(x[:1], (0,)), x.astype(jnp.int32)

    by_kind = {op.kind: op for op in captured(fn, array(3, 4)).graph.ops}
    dot = by_kind["dot_general"]
    assert (dot["lhs_contract"], dot["rhs_batch"], dot["accumulate"], dot["precision"]) == ((1,), (), "float32", "HIGHEST")
    assert by_kind["integer_pow"]["y"] == 3 and by_kind["round"]["method"] == "away"
    assert by_kind["convert_element_type"]["new_dtype"] == "int32"
    assert by_kind["slice"].params == (("limit", (1, 4)), ("start", (0, 0)), ("strides", (1, 1)))
    assert "broadcast_in_dim" not in by_kind and by_kind["reshape"]["new_sizes"] in ((3, 1, 4), (4,))


def test_identities_leave_no_op():
    def fn(x):
        y = lax.stop_gradient(jnp.copy(x)).astype(x.dtype).reshape(x.shape)
        return lax.transpose(y, (0, 1)), y

    c = check(fn, array(2, 3))
    assert c.graph.ops == () and c.graph.outputs == (c.graph.inputs[0],) * 2


def test_calls_are_seen_through():
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g,))
    inner = jax.jit(lambda x: twice(jax.nn.relu(x)))
    c = check(lambda x: jax.checkpoint(inner)(x) + 1, array(5))
    assert kinds(c) == ["max", "mul", "add"]
    assert all("test_capture.py" in op.source for op in c.graph.ops)
    assert [op.label for op in c.graph.ops] == ["max", "mul", "add"]


def test_dead_code_is_dropped():
    c = check(lambda x: jax.jit(lambda y: (jnp.sin(y), jnp.cos(y)))(x)[0], array(3))
    assert kinds(c) == ["sin"]


def test_checkpoint_keeps_its_barrier():
    c = check(jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x))))), array(4), opaque=True)
    (barrier,) = [op for op in c.graph.ops if op.kind == "opaque"]
    assert "barrier" in barrier.reason
    assert kinds(c).count("sin") >= 1 and kinds(c).index("opaque") < kinds(c).index("cos")
    hlo = jax.jit(lambda *a: run_steps(c, a)).lower(array(4)).as_text()
    assert "optimization_barrier" in hlo
    free = captured(jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x))), prevent_cse=False)), array(4))
    assert not reasons(free)


def test_a_checkpoint_may_mark_some_inputs():
    fn = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(jnp.sin(x) * w)), prevent_cse=(True, False))
    c = captured(jax.grad(fn, argnums=(0, 1)), array(4), array(4))
    (barrier,) = [op for op in c.graph.ops if op.kind == "opaque"]
    assert c.graph.inputs[1] not in barrier.inputs and c.graph.inputs[0] in barrier.inputs


def test_effects_keep_their_order():
    def fn(x):
        jax.debug.print("a {}", x[0])
        y = jnp.sin(x)
        jax.debug.print("b {}", y[0])
        return y

    c = captured(fn, array(3))
    effectful = [i for i, s in enumerate(c.steps) if s.has_effects]
    assert len(effectful) == 2
    assert [c.graph.ops[i].kind for i in effectful] == ["opaque", "opaque"]
    assert all("side effects" in c.graph.ops[i].reason for i in effectful)
    run_steps(c, (array(3),))


@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_bodies_of_loops_are_rewritten(loop):
    functions = {
        "scan": lambda x: lax.scan(lambda c, y: (jnp.sin(c) + y, c), x[0], x)[1],
        "while": lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: jnp.sin(c) + i, x),
        "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda v: v * 2, x),
    }
    x, seen = array(3, 4), []

    def rewrite(body, times):
        seen.append([eqn.primitive.name for eqn in _compat.open_parts(body)[0].eqns])
        inner = capture(body, rewrite)
        new = _compat.trace_jaxpr(lambda *a: run_steps(inner, a), _compat.in_avals(body), lower=True)
        return _compat.as_kind_of(new, body)

    c = captured(functions[loop], x, rewrite=rewrite)
    assert not seen
    for step in c.steps:
        if step.prepare is not None:
            assert not step.prepare()
    assert any("sin" in names for names in seen)
    assert [op.kind for op in c.graph.ops].count("scan") == (loop != "cond")
    np.testing.assert_allclose(jax.jit(lambda a: run_steps(c, [a]))(x)[0], functions[loop](x), rtol=1e-6)


def test_constants_have_to_be_hoisted():
    table = array(3)
    closed = jax.make_jaxpr(lambda x: x + table)(array(3))
    if _compat.open_parts(closed)[1]:
        with pytest.raises(ValueError, match="without constants"):
            capture(closed)
    hoisted, consts = _compat.hoist_consts(closed)
    assert [c.shape for c in consts] == [(3,)]
    assert len(capture(hoisted).graph.inputs) == 2


def test_literals_are_rank_0_values_and_shared():
    c = check(lambda x: (x * 2.0 + 2.0, jnp.where(x > 0, x, jnp.float32(np.inf)).min()), array(3))
    literals = [v for v in c.graph.values if v.literal is not None]
    assert sorted((v.literal, v.dtype) for v in literals).count((2.0, "float32")) == 1
    assert all(v.shape == () for v in literals)


def test_a_number_of_jax_warns_of_nothing():
    """NumPy warns where an array stands for its dtype, as such numbers among the constants of diffrax's loops did."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scalar_of(jnp.float32(2)) == (2.0, "float32")
        assert scalar_of(True) == (True, "bool")


def test_a_choice_that_the_shapes_make_is_made():
    """``jnp.var`` converts its ``ddof`` and gives NaN where no elements are left."""
    c = check(lambda x: (jnp.var(x, 1), jnp.var(x, 1, ddof=2)), array(5, 7))
    kinds = {op.kind for op in c.graph.ops}
    assert not kinds & {"select_n", "gt", "convert_element_type"} and [op.kind for op in c.graph.ops].count("div") >= 2
    assert np.isnan(run_steps(captured(lambda x: jnp.var(x, 1, ddof=7), array(5, 7)), (array(5, 7),))[0]).all()


OPAQUE = {
    "sort": (lambda x: jnp.sort(x), "sort: kitsune_jax has no code"),
    "complex": (lambda x: jnp.fft.fft(x).real, "complex64"),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int16), "bitcast_convert_type"),
    "select of three": (lambda x: lax.select_n(jnp.int32(1), x, x, x + 1), "more than two cases"),
    "accuracy": (lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), "accuracy"),
    "float8": (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), "float8_e4m3fn"),
    "windows": (lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i,), (2,)))(jnp.arange(3)), "a window of several rows"),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_stays_opaque_says_why_and_still_runs(name):
    fn, reason = OPAQUE[name]
    x = array(4)
    closed, consts = _compat.hoist_consts(jax.make_jaxpr(fn)(x))
    c = capture(closed)
    assert any(reason in why for why in reasons(c)), reasons(c)
    np.testing.assert_allclose(run_steps(c, (*consts, x))[0], fn(x), rtol=1e-6)
    with pytest.raises(ValueError, match="is opaque"):
        evaluate_numpy(c.graph, [np.asarray(v) for v in (*consts, x)])


def test_a_dot_algorithm_that_rounds_its_inputs_stays_opaque():
    def dot(algorithm):
        return reasons(captured(lambda x: lax.dot(x, x, precision=algorithm), array(4, 4)))

    assert "BF16_BF16_F32" in dot(lax.DotAlgorithmPreset.BF16_BF16_F32)[0]  # not run: XLA has no such dot on every CPU
    assert dot(lax.DotAlgorithmPreset.F32_F32_F32) == dot("high") == []


def test_a_dot_algorithm_that_rounds_one_operand_is_a_product_of_rounded_ones():
    """As in the gradient of jax.nn.dot_product_attention, where XLA's CPUs round nothing."""
    x, w = array(4, 3), array(3, 5).astype(jnp.bfloat16)
    c = captured(
        lambda x, w: lax.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32, preferred_element_type=jnp.float32), x, w
    )
    assert reasons(c) == [] and kinds(c) == ["convert_element_type", "dot_general"]
    want = np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(run_steps(c, (x, w))[0], want, rtol=1e-5, atol=1e-6)


def test_a_jit_with_shardings_stays_a_call():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    c = captured(lambda x: jax.jit(jnp.sin, in_shardings=sharding)(x) + 1, array(3))
    assert reasons(c) == ["a jit with explicit shardings"]


def test_an_integer_predicate_selects_as_jax_does():
    which = jnp.array([0, 1, 0, 1, 2, -1], jnp.int32)
    c = check(lambda p, x: lax.select_n(p, x, -x), which, array(6))
    assert kinds(c) == ["neg", "ge", "select_n"]


def test_inside_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    seen = []

    def local(x):
        y = jnp.unstack(jnp.tile(jnp.sin(x) * jnp.arange(4.0), (2, 1)))[0]
        return lax.psum(y, "d")

    def through_steps(x):
        closed, consts = _compat.hoist_consts(jax.make_jaxpr(local)(x))
        c = capture(closed)
        seen.append(c)
        return run_steps(c, (*consts, x))[0]

    x = array(2, 4)
    options = {"mesh": mesh, "in_specs": spec, "out_specs": jax.sharding.PartitionSpec()}
    np.testing.assert_allclose(jax.jit(jax.shard_map(through_steps, **options))(x), jax.shard_map(local, **options)(x), rtol=1e-6)
    assert reasons(seen[0]) and all("communicates" in why for why in reasons(seen[0]))


def test_name_stacks_survive():
    def fn(x):
        with jax.named_scope("encoder"):
            return jax.jit(lambda y: jnp.split(jnp.sin(y), 2)[0])(x)

    c = captured(fn, array(4))
    text = jax.jit(lambda x: run_steps(c, [x])).lower(array(4)).as_text(debug_info=True)
    assert "encoder/" in text


def test_a_reshape_that_permutes_dimensions_first_is_a_transpose_and_a_reshape():
    x = jnp.arange(12.0).reshape(3, 4)
    fn = lambda x: lax.reshape(x, (6, 2), (1, 0))  # noqa: E731
    c = capture(jax.make_jaxpr(fn)(x))
    assert kinds(c) == ["transpose", "reshape"]
    np.testing.assert_array_equal(run_steps(c, [x])[0], fn(x))
