"""What a forward pass hands to its backward pass: parts instead of concatenations, and nothing that is cheap to make again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks.apps import APPS
from kitsune_jax import _compat
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend import explain
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.gradient import residual_cleanup
from kitsune_jax.ops.capabilities import TargetCapabilities
from reference.standalone import run
from tests.support.checks import arrays, close, in_float64
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

ROWS = 97


def skipping(p: Any, x: Any) -> Any:
    """A network that reads its input again in its second layer, beside the first one's 40 columns."""
    h = jnp.tanh(x @ p[0])
    return jnp.tanh(jnp.concatenate([h, x], axis=-1) @ p[1])


def biased(p: Any, x: Any) -> Any:
    return jnp.sin(x @ p[0]) * jnp.broadcast_to(p[1], (*x.shape[:-1], p[1].shape[1]))


def repeated(p: Any, x: Any) -> Any:
    """The same concatenation is read by two products, and is a part of another one."""
    c = jnp.concatenate([x, jnp.cos(x)], axis=-1)
    return jnp.tanh(jnp.concatenate([c @ p[0], c, x], axis=-1) @ p[1]) * jnp.tanh(jnp.mean(c @ p[0]))


def widened(p: Any, x: Any) -> Any:
    h = jnp.tanh(x @ p[0])
    return jnp.sin(h.astype(jnp.float32) @ p[1].astype(jnp.float32))


def returned(p: Any, x: Any) -> Any:
    """The concatenation is a result too."""
    c = jnp.concatenate([jnp.tanh(x @ p[0]), x], axis=-1)
    return jnp.tanh(c @ p[1]), c


def gathered(p: Any, x: Any) -> Any:
    """Rows of a table, three times as many as it has, beside the streamed ones."""
    ids = jnp.arange(x.shape[0]) * 7 % p[0].shape[0]
    return jnp.tanh(jnp.concatenate([x, jnp.tanh(p[0])[ids]], axis=-1) @ p[1])


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "skipping": (skipping, ((9, 40), (49, 5), (ROWS, 9))),
    "biased": (biased, ((9, 40), (1, 40), (ROWS, 9))),
    "repeated": (repeated, ((18, 33), (60, 5), (ROWS, 9))),
    "widened": (widened, ((9, 40), (40, 5), (ROWS, 9))),
    "returned": (returned, ((9, 40), (49, 5), (ROWS, 9))),
    "gathered": (gathered, ((31, 40), (49, 5), (ROWS, 9))),
}


def case(name: str) -> tuple[Callable[..., Any], Any, Any]:
    f, shapes = CASES[name]
    *p, x = arrays(3, *shapes)
    return f, p, x


def total(f: Callable[..., Any]) -> Callable[..., Any]:
    def loss(p: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32)))) for y in jax.tree.leaves(f(p, x)))

    return loss


def passes(gradient: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """The streamed results of the forward call, and the streamed arguments of the backward one: shapes and dtypes."""
    forward, backward = explain.pipelined_calls(_compat.without_dead_code(jax.make_jaxpr(gradient)(*args)))
    rows = args[-1].shape[0]
    made, read = _compat.out_avals(forward.jaxpr), _compat.in_avals(backward.jaxpr)
    return (*([(a.shape[1:], str(a.dtype)) for a in avals if a.shape[:1] == (rows,)] for avals in (made, read)),)


def test_gathered_rows_are_handed_over_as_table_and_index() -> None:
    f, p, x = case("gathered")
    made, read = passes(jax.grad(total(kj.pipeline(f))), p, x)
    assert not {((40,), "float32"), ((49,), "float32")} & {*made, *read}


def test_single_numbers_that_were_gathered_are_handed_over_themselves() -> None:
    """A number of a table costs a line of the cache."""
    table, x = arrays(4, (31,), (ROWS, 9))

    def f(table: Any, x: Any) -> Any:
        ids = jnp.arange(x.shape[0]) * 7 % 31
        return jnp.tanh(x * jnp.sin(table)[ids][:, None])

    made, _ = passes(jax.grad(total(kj.pipeline(f)), 1), table, x)
    assert any(math.prod(shape) == 1 and dtype == "float32" for shape, dtype in made)


def test_a_concatenation_is_handed_over_as_its_parts() -> None:
    f, p, x = case("skipping")
    made, read = passes(jax.grad(total(kj.pipeline(f))), p, x)
    assert ((49,), "float32") not in (*made, *read)
    assert ((40,), "float32") in made  # the first part is made by the forward pass
    assert ((9,), "float32") not in made  # the second is an argument
    assert ((9,), "float32") in read


def test_a_broadcast_is_made_again() -> None:
    f, p, x = case("biased")
    made, read = passes(jax.grad(total(kj.pipeline(f))), p, x)
    assert made.count(((40,), "float32")) == read.count(((40,), "float32")) == 3  # the result; cos and sin of the product


def test_a_widened_value_is_handed_over_as_it_was() -> None:
    f, p, x = case("widened")
    made, _ = passes(jax.grad(total(kj.pipeline(f))), *(jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))))
    assert {dtype for shape, dtype in made if shape == (40,)} == {"bfloat16"}


def test_a_concatenation_that_is_a_result_is_not_taken_apart() -> None:
    f, p, x = case("returned")
    made, read = passes(jax.grad(total(kj.pipeline(f))), p, x)
    assert made.count(((49,), "float32")) >= 1
    assert sum(shape == (40,) for shape, _ in read) == sum(shape == (40,) for shape, _ in made)


def test_a_policy_of_checkpoint_keeps_what_it_names() -> None:
    f, p, x = case("skipping")
    policy = jax.checkpoint_policies.dots_saveable
    made, _ = passes(jax.grad(total(kj.pipeline(f, residuals=policy))), p, x)
    assert sorted(shape for shape, _ in made) == [(5,), (5,), (40,)]  # the result and the two products


@pytest.mark.sampled(3, way="grad")
@pytest.mark.parametrize("way", ["grad", "jvp", "hessian", "vmap", "checkpoint", "scan", "linearize"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_function(name: str, way: str) -> None:
    f, p, x = case(name)
    if way == "hessian":
        x = x[:7]

    def derived(g: Callable[..., Any]) -> Callable[..., Any]:
        loss = total(g)
        if way == "jvp":
            return lambda p, x: jax.jvp(jax.grad(loss, (0, 1)), (p, x), (p, x))
        if way == "hessian":
            return lambda p, x: jax.grad(lambda q: sum(jnp.sum(a**2) for a in jax.tree.leaves(jax.grad(loss)(q, x))))(p)
        if way == "vmap":
            return lambda p, x: jax.vmap(jax.grad(loss, (0, 1)), in_axes=(None, 0))(p, jnp.stack([x, x + 1]))
        if way == "checkpoint":
            return jax.grad(jax.checkpoint(loss), (0, 1))
        if way == "scan":
            return jax.grad(
                lambda p, x: jax.lax.scan(lambda c, x: (c + loss(p, x), None), 0.0 * x[0, 0], jnp.stack([x, x]))[0], (0, 1)
            )
        if way == "linearize":
            return lambda p, x: jax.linear_transpose(jax.linearize(loss, p, x)[1], p, x)(jnp.ones_like(loss(p, x)))
        return jax.grad(loss, (0, 1))

    got, want = jax.jit(derived(kj.pipeline(f, force=True)))(p, x), in_float64(derived(f), p, x)
    scale = [max(1.0, float(np.abs(a).max())) for a in jax.tree.leaves(want)]
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), scale, strict=True)
    for a, b, s in pairs:
        close(np.asarray(a, np.float64) / s, b / s, 2e-5)


def test_an_eager_gradient_is_compiled_once() -> None:
    """Equal calls must find what was divided for the first one."""
    f, p, x = case("skipping")
    gradient = jax.grad(total(kj.pipeline(f)))
    gradient(p, x)
    with jax.log_compiles(False):
        before = _compilations()
        gradient(p, x)
        assert _compilations() == before


def _compilations() -> int:
    from kitsune_jax.frontend.tracing import _jitted

    return sum(len(v) for v in _jitted.values())


# --- training on a GPU ----------------------------------------------------------------------------------------------------------


def odd(aval: Any) -> bool:
    return aval.shape[-1] * jnp.dtype(aval.dtype).itemsize % 16 != 0 and aval.shape[-1] > 4


def test_no_call_of_nerf_training_writes_rows_of_an_odd_pitch() -> None:
    """Neither the one that JAX cuts by its gradient, nor the one that is cut at its loss."""
    app, rows = APPS["nerf"], 262_144
    p = {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, shape in app.shapes.items()}
    x, y = (jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for n in (63, 4))

    def step(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda p, x, y: jnp.mean((f(p, x) - y).astype(jnp.float32) ** 2))

    leaves, tree = jax.tree.flatten((p, x, y))
    for whole in (True, False):
        g = step(app.function if whole else kj.pipeline(app.function))
        program = jax.make_jaxpr(lambda *a, g=g: g(*jax.tree.unflatten(tree, a)))(*leaves)
        calls = [program] if whole else [call.jaxpr for call in explain.pipelined_calls(program)]
        regions = 0
        for call in calls:
            graph = capture(call, context=RewriteContext(TargetCapabilities(divides_gradients=True))).graph
            for region in route(graph, "cuda", RouteOptions(device="h200", code=False)).regions:
                regions += 1
                streamed = [graph.values[v] for v in region.region.outputs if graph.values[v].shape[:1] == (rows,)]
                assert not any(map(odd, streamed)), [str(v) for v in streamed]
        assert regions  # at least the forward pass: by the model XLA is as fast backward


# --- weight gradients of concatenations -----------------------------------------------------------------------------------------


def over_rows(a: Any, b: Any) -> Any:
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())))


def products(gradient: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """Shapes of the weight gradients."""
    graph = capture(jax.make_jaxpr(gradient)(*args), context=RewriteContext(TargetCapabilities(divides_gradients=True))).graph
    return [graph.values[op.outputs[0]].shape for op in graph.ops if op.kind == "dot_general" and 0 in op["lhs_contract"]]


def test_the_weight_gradient_of_a_concatenation_is_made_by_parts() -> None:
    f, p, x = case("skipping")
    shapes = products(jax.grad(total(f)), p, x)
    assert (49, 5) not in shapes
    assert {(40, 5), (9, 5)} <= set(shapes)


@pytest.mark.parametrize("widths", [(1, 1, 1), (9, 9, 9, 9, 40)], ids=["narrow", "many"])
def test_small_parts_stay_together(widths: tuple[int, ...]) -> None:
    *xs, w = arrays(4, *((ROWS, n) for n in widths), (sum(widths), 5))
    assert products(jax.grad(lambda w, *xs: jnp.sum(jnp.concatenate(xs, -1) @ w)), w, *xs) == [w.shape]


def test_a_concatenation_of_rows_is_none_of_columns() -> None:
    a, b, c = arrays(5, (ROWS, 40), (ROWS, 40), (2 * ROWS, 5))
    assert products(lambda a, b, c: over_rows(jnp.concatenate([a, b]), c), a, b, c) == [(40, 5)]


@pytest.mark.parametrize("side", [0, 1])
def test_gradients_by_parts_are_those_of_the_whole(side: int) -> None:
    a, b, c = arrays(6, (ROWS, 40), (ROWS, 9), (ROWS, 7))

    def f(a: Any, b: Any, c: Any) -> Any:
        whole = jnp.concatenate([a, b], -1)
        return over_rows(*((whole, c) if side == 0 else (c, whole))) * 2.0

    captured = capture(jax.make_jaxpr(f)(a, b, c), context=RewriteContext(TargetCapabilities(divides_gradients=True)))
    assert sum(op.kind == "dot_general" for op in captured.graph.ops) == 2
    close(run(captured, (), (a, b, c))[0], in_float64(f, a, b, c))


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_of_both_passes_agree_with_float64(dtype: Any) -> None:
    """In the emulator: the backward kernel reads the parts of the concatenation."""
    f, p, x = case("skipping")
    p, x = jax.tree.map(lambda a: a.astype(dtype), (p, x))
    gradient = jax.jit(jax.grad(total(kj.pipeline(f, force=True, target="emulator")))).lower(p, x).compile()
    assert gradient.as_text().count('custom_call_target="kitsune_cuda"') >= 2
    for got, exact in zip(gradient(p, x), in_float64(jax.grad(total(f)), p, x), strict=True):
        s = np.abs(exact).max()
        close(np.asarray(got, np.float64) / s, exact / s, 3e-2 if dtype == jnp.bfloat16 else 5e-3)


def test_a_defect_of_the_choice_costs_bytes_and_not_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.concatenate([x, jnp.tanh(x)], -1) @ w))

    x, w = jnp.ones((5, 3)), jnp.ones((6, 4)) / 7
    want = jax.grad(loss, (0, 1))(x, w)
    monkeypatch.setattr(residual_cleanup, "shrink_residuals", broken)
    with pytest.warns(RuntimeWarning, match="kitsune_jax could not choose the residuals of a gradient.*on purpose"):
        got = jax.grad(kj.pipeline(loss), (0, 1))(x, w)
    for g, t in zip(got, want, strict=True):
        np.testing.assert_allclose(g, t, rtol=1e-5)
    monkeypatch.setenv("KITSUNE_STRICT", "1")
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        jax.grad(kj.pipeline(lambda x, w: 2 * loss(x, w)), (0, 1))(x, w)


def test_a_residual_may_be_a_number_that_stands_in_the_program() -> None:
    x = jnp.ones((5, 3))
    primal = jax.make_jaxpr(lambda x: (x.sum(), jnp.concatenate([x, x], -1), 0.0))(x)
    assert _compat.is_literal(_compat.open_parts(primal)[0].outvars[2])
    tangent = jax.make_jaxpr(lambda joined, zero, t: joined.sum() + zero + t)(jnp.ones((5, 6)), 0.0, 1.0)
    found = residual_cleanup.shrink_residuals(primal, tangent, (None, None), 1, 0)
    assert found is not None
    _, again, forwarded = found
    assert set(forwarded) == {None, 0}  # the number, and x
    assert [e.primitive.name for e in _compat.open_parts(again)[0].eqns][0] == "concatenate"


@pytest.mark.filterwarnings("error")
def test_a_constant_beyond_float16_does_not_warn():
    """NumPy would, where the gradient's passes are traced again: ``jax.jit`` leaves this conversion to XLA."""
    f = kj.pipeline(lambda s: jnp.sum(jax.nn.softmax(jnp.where(np.tri(20, dtype=bool), s, -1e30)) ** 2), force=True)
    (s,) = arrays(0, (20, 20))
    jax.jit(jax.grad(f)).lower(s.astype(jnp.float16))
