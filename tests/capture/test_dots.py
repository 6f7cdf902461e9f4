"""Products that contract nothing are multiplications: dots with numbers, outer products, and the gradients of penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.table import verify
from reference.graph import evaluate_numpy
from tests.support.checks import count
from tests.support.gradient_checks import check_close

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")

Array = Any
Function = Callable[..., Any]
N = 37


def dot(contract: Any = ((), ()), batch: Any = ((), ()), **options: Any) -> Function:
    return lambda x, y: lax.dot_general(x, y, (contract, batch), **options)


def sines(f: Function) -> Function:
    """With a first operand that streams."""
    return lambda x, *rest: f(jnp.sin(x), *rest)


NUMBER = np.float32(1.5)

OUTER: dict[str, tuple[Any, ...]] = {
    "outer": (sines(jnp.outer), (N,), (5,)),
    "outer_second_streams": (lambda a, b: jnp.outer(a, jnp.sin(b)), (5,), (N,)),
    "column_times_row": (lambda a, b: jnp.sin(a)[:, None] * b, (N,), (5,)),
    "einsum": (sines(lambda a, b: jnp.einsum("i,j->ij", a, b)), (N,), (7,)),
    "einsum_transposed": (sines(lambda a, b: jnp.einsum("i,j->ji", a, b)), (N,), (7,)),
    "einsum_of_matrix": (sines(lambda a, b: jnp.einsum("ij,k->ijk", a, b)), (N, 3), (7,)),
    "einsum_batched": (sines(lambda a, b: jnp.einsum("ij,ik->ijk", a, b)), (N, 3), (N, 7)),
    "einsum_scaled_rows": (sines(lambda a, b: jnp.einsum("ij,i->ij", a, b)), (N, 3), (N,)),
    "batch_behind": (sines(dot(batch=((1,), (0,)))), (3, N), (N, 4)),
    "batch_crossed": (sines(dot(batch=((1, 0), (0, 1)))), (3, N), (N, 3)),
    "batch_only": (sines(dot(batch=((0, 1), (0, 1)))), (N, 3), (N, 3)),
    "number_left": (lambda s, x: dot()(s, jnp.sin(x)), (), (N, 5)),
    "number_right": (sines(dot()), (N, 5), ()),
    "literal_left": (lambda x: dot()(NUMBER.astype(x.dtype), jnp.sin(x)), (N, 5)),
    "literal_right": (lambda x: dot()(jnp.sin(x), NUMBER.astype(x.dtype)), (N, 5)),
    "tensordot_of_nothing": (sines(lambda a, b: jnp.tensordot(a, b, 0)), (N, 2), (3,)),
    "kron": (sines(jnp.kron), (N,), (3,)),
}
CONTRACTED: dict[str, tuple[Any, ...]] = {
    "dot_of_vectors": (sines(jnp.dot), (N,), (N,)),
    "vdot_with_itself": (lambda a: jnp.vdot(jnp.sin(a), jnp.sin(a)) / N, (N, 5)),
    "einsum_to_number": (lambda a: jnp.einsum("ij,ij->", a, a) / N, (N, 5)),
    "rows_with_rows": (sines(lambda a, b: jnp.einsum("ij,ij->i", a, b)), (N, 3), (N, 3)),
    "matrix_vector": (sines(jnp.matmul), (N, 5), (5,)),
    "vector_matrix": (lambda v, x: v @ jnp.sin(x), (N,), (N, 5)),
    "vector_wide_matrix": (sines(jnp.matmul), (5,), (5, N)),
    "one_contracted": (sines(jnp.matmul), (N, 1), (1, 5)),
    "one_column": (sines(jnp.matmul), (N, 5), (5, 1)),
    "all_of_size_one": (sines(lambda x, w: jnp.einsum("nij,jk->nik", x, w)), (N, 1, 1), (1, 1)),
    "nothing_contracted": (lambda x, w, y: jnp.tanh(x @ w + y), (N, 0), (0, 5), (N, 5)),
    "vector_of_ones": (lambda x: jnp.ones(N, x.dtype) @ jnp.sin(x), (N, 5)),
    "matrix_of_ones": (lambda x: jnp.sin(x) @ jnp.ones((5, 3), x.dtype), (N, 5)),
}
FORMS = {**OUTER, **CONTRACTED}


def arguments(name: str, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(len(name))
    return [np.asarray(rng.uniform(-1, 1, shape)).astype(jnp.dtype(dtype)) for shape in FORMS[name][1:]]


def check(f: Function, args: list[np.ndarray], dtype: str) -> None:
    """In a pipeline as in float64, and no ``dot_general`` without contraction reaches the passes."""
    captured = capture(jax.make_jaxpr(f)(*args))
    verify(captured.graph)
    assert not captured.failures
    assert all(op["lhs_contract"] for op in captured.graph.ops if op.kind == "dot_general")
    check_close(jax.jit(kj.pipeline(f, force=True))(*args), f, args, dtype, roundings=32, per_array=True)


@pytest.mark.parametrize("name", FORMS)
def test_product(name: str) -> None:
    check(FORMS[name][0], arguments(name, "float32"), "float32")


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_a_product_by_each_argument(name: str) -> None:
    f, args = FORMS[name][0], arguments(name, "float32")
    for k in range(len(args)):
        check(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), k), args, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMS)
def test_product_and_gradients_in_16_bits(name: str, dtype: str) -> None:
    f, args = FORMS[name][0], arguments(name, dtype)
    check(f, args, dtype)
    for k in range(len(args)):
        check(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)).astype(jnp.float32)), k), args, dtype)


# --- dtypes ----------------------------------------------------------------------------------------------------------------------

DTYPES = [
    *[(d, d, None) for d in ("float32", "bfloat16", "float16", "int8", "int32", "uint8")],
    *[("bfloat16", "bfloat16", "float32"), ("float16", "float16", "float32"), ("float32", "float32", "bfloat16")],
    *[("bfloat16", "float32", "float32"), ("int8", "int8", "int32"), ("int8", "uint8", "int32")],
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("left,right,result", DTYPES)
@pytest.mark.parametrize("shapes", [((N,), (5,)), ((), (N, 5)), ((N, 5), ())], ids=["outer", "number_left", "number_right"])
def test_an_outer_product_is_rounded_once_to_the_dtype_that_was_asked_for(
    shapes: Any, left: str, right: str, result: str | None
) -> None:
    rng = np.random.default_rng(3)
    args = [np.asarray(rng.uniform(-99, 99, s)).astype(jnp.dtype(d)) for s, d in zip(shapes, (left, right), strict=True)]

    def f(x: Array, y: Array) -> Array:
        return dot(preferred_element_type=result)(x + x, y)

    graph = capture(jax.make_jaxpr(f)(*args)).graph
    verify(graph)
    assert "dot_general" not in [op.kind for op in graph.ops]
    want = jax.jit(f)(*args)
    for got in (jax.jit(kj.pipeline(f, force=True))(*args), evaluate_numpy(graph, args)[0]):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))


@pytest.mark.parametrize("argument", [None, 0, 1])
@pytest.mark.parametrize("left,right", [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")])
def test_operands_of_two_dtypes_are_multiplied_in_one_that_holds_both(left: str, right: str, argument: int | None) -> None:
    rng = np.random.default_rng(5)
    x, w = rng.uniform(-1, 1, (N, 13)).astype(jnp.dtype(left)), rng.uniform(-1, 1, (13, 7)).astype(jnp.dtype(right))
    rows = dot(((1,), (0,)), preferred_element_type="float32")
    wave: Function = lambda x, w: jnp.sin(rows(jnp.sin(x), w))  # noqa: E731
    product = wave if argument is None else jax.grad(lambda x, w: jnp.sum(wave(x, w)), argument)
    report = kj.explain(product, force=True)(x, w)
    assert all("does not depend on the rows" in r.reason for r in report.rejected), report  # a cast of the weights stays in front
    dtype = "float32" if argument is None else (left, right)[argument]
    check_close(jax.jit(kj.pipeline(product, force=True))(x, w), product, [x, w], dtype, roundings=32)


# --- penalties -------------------------------------------------------------------------------------------------------------------

PENALTIES: dict[str, Function] = {
    "vdot": lambda w, b: jnp.vdot(w, w),
    "dot": lambda w, b: jnp.dot(b, b),
    "einsum": lambda w, b: jnp.einsum("ij,ij->", w, w),
    "norm": lambda w, b: jnp.sqrt(jnp.vdot(w, w)) + jnp.sqrt(jnp.inner(b, b)),
    "tensordot": lambda w, b: jnp.tensordot(w, w, 2),
    "outer": lambda w, b: jnp.sum(jnp.outer(b, b)),
    "orthogonality": lambda w, b: jnp.sum((w.T @ w - jnp.eye(w.shape[1])) ** 2),
}


def training_step(penalty: str, optimiser: Any) -> Function:
    def loss(params: Any, x: Array, y: Array) -> Array:
        h = x
        for w, b in params[:-1]:
            h = jax.nn.relu(h @ w + b)
        w, b = params[-1]
        return jnp.mean((h @ w + b - y) ** 2) + 1e-2 * sum(PENALTIES[penalty](w, b) for w, b in params)

    def step(params: Any, x: Array, y: Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        updates, _ = optimiser.update(gradient, optimiser.init(params), params)
        return value, optax.apply_updates(params, updates)

    return step


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimiser", ["sgd", "clipped"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_training_step_with_a_penalty_in_its_loss(penalty: str, optimiser: str, force: bool) -> None:
    rng = np.random.default_rng(1)
    dims, rows = ((64, 128, 128, 10), 2000) if not force else ((5, 13, 7, 3), 131)
    params = [
        (rng.standard_normal((i, o)).astype(np.float32) / i**0.5, rng.standard_normal(o).astype(np.float32) * 0.1)
        for i, o in zip(dims, dims[1:], strict=False)
    ]
    x, y = (rng.standard_normal((rows, n)).astype(np.float32) for n in (dims[0], dims[-1]))
    made = {"sgd": optax.sgd(0.1), "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))}[optimiser]
    step = training_step(penalty, made)
    compiled = jax.jit(kj.pipeline(step, force=force)).lower(params, x, y).compile()
    assert count(compiled.as_text()) > 0
    check_close(compiled(params, x, y), step, (params, x, y), "float32", roundings=64, per_array=True)


# --- products of which a transposition puts a dimension of the left operand last --------------------------------------------------

MIXED: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "attention": ("bhqk,bkhd->bqhd", (2, 3, 7, 5), (2, 5, 3, 4)),
    "attention_of_groups": ("bhgqk,bkhd->bqhgd", (2, 3, 2, 7, 5), (2, 5, 3, 4)),
    "attention_of_one_row": ("bhqk,bkhd->bqhd", (1, 3, 1, 5), (1, 5, 3, 4)),
    "batch_last": ("bij,bjk->kib", (2, 3, 5), (2, 5, 4)),
    "two_columns": ("bhqk,bkhde->bqhde", (2, 3, 7, 5), (2, 5, 3, 4, 2)),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_product_in_another_order_has_rows(name: str, dtype: str) -> None:
    """A transposition of the product then moves whole rows, whichever call it is in; each element is the same sum."""
    subscripts, *shapes = MIXED[name]
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    f = lambda x, y: jnp.einsum(subscripts, x, y)  # noqa: E731
    captured = capture(jax.make_jaxpr(f)(x, y), None, RewriteContext(TargetCapabilities(stores_rows=True)))
    verify(captured.graph)
    moved = [op["permutation"] for op in captured.graph.ops if op.kind == "transpose"]
    if name != "batch_last":
        assert all(order[-1] == len(order) - 1 for order in moved), moved
    for got in (evaluate_numpy(captured.graph, [x, y])[0], jax.jit(kj.pipeline(f, force=True))(x, y)):
        check_close(jnp.asarray(got), f, (x, y), dtype, roundings=32)


def test_a_product_that_others_read_keeps_its_order() -> None:
    def f(p: Array, v: Array) -> Any:
        a = lax.dot_general(v, p, (((1,), (3,)), ((0, 2), (0, 1))))  # [b, h, d, q]
        return a.transpose(0, 3, 1, 2), jnp.sum(a)

    args = jnp.ones((2, 3, 7, 5)), jnp.ones((2, 5, 3, 4))
    plain, rewritten = (
        capture(jax.make_jaxpr(f)(*args), None, RewriteContext(TargetCapabilities(stores_rows=on))) for on in (False, True)
    )
    assert plain.graph == rewritten.graph


# --- products of transposed operands ----------------------------------------------------------------------------------------------


def embeddings(x: Array, table: Array, ids: Array) -> Array:
    """The loss of a language model whose last layer is its table of embeddings."""
    logits = jnp.tanh(x + table[ids]) @ table.T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits, -1), ids[:, None], -1))


TRANSPOSED: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "weight": (lambda x, w: jnp.sin(x) @ w.T, (7, 5), (6, 5)),
    "weight of two dimensions": (
        lambda x, w: lax.dot_general(jnp.sin(x), w.transpose(2, 0, 1), (((1,), (0,)), ((), ()))),
        (7, 5),
        (2, 3, 5),
    ),
    "gradient by hand": (lambda x, y: jnp.sin(x).T @ jnp.cos(y), (N, 5), (N, 6)),
    "both": (lambda x, w: x.T @ w.T, (5, 7), (6, 5)),
    "itself": (lambda x, _: x.T @ x, (N, 5), (1,)),
    "twice": (lambda x, w: jnp.sin(x) @ w.T.T, (7, 5), (5, 6)),
}


def kinds_of(f: Function, *args: Array) -> list[str]:
    captured = capture(jax.make_jaxpr(f)(*args))
    assert not captured.failures
    verify(captured.graph)
    return [op.kind for op in captured.graph.ops]


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_product_reads_a_transposed_operand_as_it_lies(name: str, dtype: str) -> None:
    f, *shapes = TRANSPOSED[name]
    rng = np.random.default_rng(4)
    args = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    assert "transpose" not in kinds_of(f, *args)
    check_close(jax.jit(kj.pipeline(f, force=True))(*args), f, args, dtype, roundings=32)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: (x @ w.T, jnp.sum(jnp.sin(w.T) ** 2, 0)),  # the transposition is made for another reader
        lambda x, w: (x @ w.T, w.T),
        lambda x, w: lax.dot_general(x, jnp.stack([w, w]).transpose(2, 1, 0), (((1,), (0,)), ((), ()))),  # columns in another order
    ],
    ids=["read by another", "a result", "order"],
)
def test_a_transposition_that_a_product_cannot_replace_stays(f: Function) -> None:
    args = jnp.ones((7, 5)), jnp.ones((6, 5))
    assert "transpose" in kinds_of(f, *args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("argument", [0, 1, (0, 1)])
def test_the_gradient_of_a_table_that_is_also_a_layer_is_not_transposed(argument: Any, dtype: str) -> None:
    """Autodiff transposes it twice: once behind the product, and once more because the product reads the table transposed."""
    rng = np.random.default_rng(5)
    x, table = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in [(N, 6), (53, 6)])
    args = x, table, jnp.asarray(rng.integers(0, 53, N), jnp.int32)
    f = jax.grad(embeddings, argument)
    assert "transpose" not in kinds_of(f, *args)
    got = jax.jit(kj.pipeline(f, force=True))(*args)
    for g, k in zip(got, argument, strict=True) if isinstance(argument, tuple) else [(got, argument)]:
        check_close(g, jax.grad(embeddings, k), args, dtype, roundings=64)
