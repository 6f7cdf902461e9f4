"""A failure in one part of a function costs that part its pipeline, and nothing else; and what a valid Graph is."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.capture import primitives
from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import REWRITES, Rewrite, apply_rewrites
from kitsune_jax.ops.graph import Graph, Op, Value, make_params
from kitsune_jax.ops.table import OPS, SHAPE_RULES, verify
from tests.capture.test_capture import run_steps
from tests.support.checks import arrays

X, W, V = arrays(1, (9, 5), (5, 4), (4, 3))


def captured(f: Any, *args: Any, rewrite: Any = None) -> Captured:
    return capture(_compat.hoist_consts(jax.make_jaxpr(f)(*args))[0], rewrite)


def check_values(c: Captured, f: Any, *args: Any) -> None:
    verify(c.graph)
    for got, want in zip(jax.jit(lambda *a: run_steps(c, a))(*args), jax.tree.leaves(jax.jit(f)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


# --- rules -----------------------------------------------------------------------------------------------------------------------


def raises(t: Any) -> list[int]:
    t.reshape(t.ins[0], (t.builder.values[t.ins[0]].size,))  # what it appended must go
    raise RuntimeError("a bug")


def of_another_shape(t: Any) -> list[int]:
    return [t.reshape(t.ins[0], (t.builder.values[t.ins[0]].size,))]


def of_another_dtype(t: Any) -> list[int]:
    return [t.convert(t.ins[0], "float16")]


def invalid_op(t: Any) -> list[int]:
    return [t.op("slice", *t.ins, start=(0, 0), limit=(99, 99), strides=(1, 1))]


def too_many(t: Any) -> list[int]:
    return [*t.ins, *t.ins]


@pytest.mark.parametrize("rule", [raises, of_another_shape, of_another_dtype, invalid_op, too_many])
@pytest.mark.parametrize("inlined", [False, True], ids=["function", "call"])
def test_an_equation_whose_rule_fails_is_opaque_and_reported(monkeypatch: Any, rule: Any, inlined: bool) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.tanh(lax.cumsum(x @ w, axis=1)) * 2

    g = jax.jit(f) if inlined else f
    monkeypatch.setitem(primitives.RULES, "cumsum", rule)
    c = captured(g, X, W)
    assert [op.kind for op in c.graph.ops] == ["dot_general", "opaque", "tanh", "mul"]
    (failure,) = c.failures
    assert failure.part.startswith("cumsum (test_failures.py:")
    assert failure.reason.split(":")[0] in ("RuntimeError", "ValueError") and "Traceback" in failure.traceback
    assert "bug of kitsune_jax" in c.graph.ops[1].reason and "cumsum" in c.graph.ops[1].reason
    check_values(c, f, X, W)


def test_a_call_that_cannot_be_opened_stays_one(monkeypatch: Any) -> None:
    def f(x: Any) -> Any:
        return jax.nn.relu(jnp.sin(x)) * 2  # relu is a custom_jvp_call within a jit

    monkeypatch.setattr("kitsune_jax.capture.jaxpr.why_not_inlined", lambda eqn: 1 // 0)
    c = captured(f, X)
    assert [op.kind for op in c.graph.ops] == ["sin", "opaque", "mul"]
    assert "ZeroDivisionError" in c.failures[0].reason
    check_values(c, f, X)


# --- loops -----------------------------------------------------------------------------------------------------------------------


def other_types(body: Any) -> Any:
    return jax.make_jaxpr(lambda *a: [x.astype(jnp.float16) for x in a])(*_compat.in_avals(body))


def fails(body: Any, times: int) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("rewrite", [fails, other_types])
def test_a_body_that_cannot_be_rewritten_stays_as_it_is(rewrite: Any) -> None:
    def f(x: Any) -> Any:
        y = lax.scan(lambda c, row: (c * 0.5 + row, c), x[0], x)[1]
        return lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y * 2)

    c = captured(f, X, rewrite=rewrite)
    failures = [failure for step in c.steps if step.prepare is not None for failure in step.prepare()]
    assert [failure.part.split(" (")[0] for failure in failures] == ["the body of scan", "the body of cond", "the body of cond"]
    assert {"scan", "opaque", "mul"} <= {op.kind for op in c.graph.ops}
    check_values(c, f, X)


# --- rewrites --------------------------------------------------------------------------------------------------------------------


def raises_at_once(c: Captured) -> Captured:
    raise RuntimeError("a bug")


def reverses(c: Captured) -> Captured:
    """Moves every op in front of its operands."""
    return dataclasses.replace(c, graph=dataclasses.replace(c.graph, ops=c.graph.ops[::-1]), steps=c.steps[::-1])


def loses_a_result(c: Captured) -> Captured:
    return dataclasses.replace(c, graph=dataclasses.replace(c.graph, outputs=c.graph.outputs[1:]))


def changes_a_shape(c: Captured) -> Captured:
    last = c.graph.outputs[-1]
    values = tuple(Value((1, *v.shape), v.dtype) if k == last else v for k, v in enumerate(c.graph.values))
    return dataclasses.replace(c, graph=dataclasses.replace(c.graph, values=values))


@pytest.mark.parametrize("rewrite", [raises_at_once, reverses, loses_a_result, changes_a_shape])
def test_a_rewrite_that_fails_is_undone_and_the_next_one_runs(rewrite: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w)[:, :2], (x @ w)[:, :3]

    c = captured(f, X, W)
    tried = apply_rewrites(c, [Rewrite("the broken one", rewrite), *REWRITES])
    assert tried.graph == c.graph
    (failure,) = tried.failures
    assert failure.part == "a rewrite (the broken one)"
    check_values(tried, f, X, W)


# --- what a valid Graph is -------------------------------------------------------------------------------------------------------


A, B, T, START = Value((3, 4), "float32"), Value((4, 2), "float32"), Value((3, 4), "bool"), Value((), "int32")
DOT = make_params(lhs_contract=(1,), rhs_contract=(0,), lhs_batch=(), rhs_batch=(), accumulate="float32", precision=None)
WRONG = {
    "add": (("add", (A, B), A, ()), "not defined for"),
    "add_dtype": (("add", (A, T), A, ()), "does not make"),
    "arity": (("add", (A,), A, ()), "1 operands"),
    "test": (("lt", (A, A), A, ()), "does not make"),
    "select": (("select_n", (A, A, A), A, ()), "does not make"),
    "dot": (("dot_general", (A, B), A, DOT), r"has shape \(3, 2\)"),
    "dot_sizes": (("dot_general", (B, A), A, DOT), "not defined for"),
    "slice": (("slice", (A,), A, make_params(start=(0, 2), limit=(3, 5), strides=(1, 1))), "not defined for"),
    "reshape": (("reshape", (A,), B, make_params(new_sizes=(4, 2))), "not defined for"),
    "transpose": (("transpose", (A,), A, make_params(permutation=(1, 0))), r"has shape \(4, 3\)"),
    "broadcast": (("broadcast_in_dim", (B,), A, make_params(shape=(3, 4), dims=(0, 1))), "not defined for"),
    "concatenate": (("concatenate", (A, B), A, make_params(dimension=1)), "not defined for"),
    "window": (("dynamic_slice", (A, START, START), A, make_params(dims=(0, 0), sizes=(3, 3))), "not defined for"),
    "reduce": (("reduce_sum", (A,), A, make_params(axes=(1,))), r"has shape \(3,\)"),
    "convert": (("convert_element_type", (A,), A, make_params(new_dtype="bfloat16")), "does not make"),
    "unknown": (("frobnicate", (A,), A, ()), "not an op of the table"),
}  # fmt: skip


def test_every_family_of_the_table_has_a_shape_rule() -> None:
    assert set(SHAPE_RULES) == {spec.family for spec in OPS.values()} - {"loop"}  # has several results


@pytest.mark.parametrize("name", WRONG)
def test_an_op_that_does_not_fit_its_values_is_refused(name: str) -> None:
    (kind, ins, out, params), message = WRONG[name]
    graph = Graph((*ins, out), tuple(range(len(ins))), (len(ins),), (Op(kind, tuple(range(len(ins))), (len(ins),), params),))
    with pytest.raises(ValueError, match=message):
        verify(graph)


def test_a_window_of_several_dimensions_is_valid() -> None:
    window, updated = Value((2, 3), "float32"), Value((3, 4), "float32")
    cut = Op("dynamic_slice", (0, 1, 2), (3,), make_params(dims=(0, 1), sizes=(2, 3)))
    put = Op("dynamic_update_slice", (0, 3, 1, 2), (4,), make_params(dims=(0, 1)))
    verify(Graph((A, START, START, window, updated), (0, 1, 2), (4,), (cut, put)))
