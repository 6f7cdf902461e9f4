"""Time loops as pipelines on the CPU: ``scan``, ``fori_loop`` and ``while_loop`` with a number of steps that is known.

Each program runs with ``force``, so the cost model decides nothing, and is compared with the same steps in float64 (integers and
booleans bit for bit, by ``jax.jit``). ``covered`` asserts that the whole loop is inside of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from tests.support.checks import TARGET, leaves_in_float64

RNG = np.random.default_rng(5)
ULP = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.asarray(RNG.standard_normal(shape), dtype))


def check(f: Callable[..., Any], *args: Any, covered: bool = True, tolerance: float | None = None) -> Any:
    """``f`` is pipelined and right; ``covered``: nothing of it is left to XLA, and its loop is in the report."""
    pipelined = kj.pipeline(f, force=True, strict=True)
    got = jax.jit(pipelined)(*args)
    types = jax.tree.leaves(jax.eval_shape(f, *args))
    exact = None if all(jnp.issubdtype(t.dtype, jnp.floating) for t in types) else jax.tree.leaves(jax.jit(f)(*args))
    dtypes = [x.dtype.name for x in jax.tree.leaves(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    tolerance = tolerance or max((ULP.get(d, 1e-5) for d in dtypes), default=0.0)
    for k, (g, t, w) in enumerate(zip(jax.tree.leaves(got), types, leaves_in_float64(f, args), strict=True)):
        assert (g.shape, g.dtype) == (t.shape, t.dtype)
        g = np.asarray(g)
        if g.dtype.kind in "biu":
            assert exact is not None
            np.testing.assert_array_equal(g, np.asarray(exact[k]))
            continue
        g = g.astype(np.float64)
        finite = np.isfinite(w)
        np.testing.assert_array_equal(g[~finite], w[~finite])
        scale = np.abs(w[finite]).max(initial=1.0)
        np.testing.assert_allclose(g[finite], w[finite], rtol=tolerance, atol=tolerance * scale)
    report = kj.explain(f, force=True)(*args)
    if covered:
        assert report.ops_pipelined == report.ops_total, str(report)
        assert any(region.loops for region in report.regions)
    return report


def lstm(xs: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (h, c), xs)


def gru(xs: Any, h: Any, w: Any, u: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        a, b = x @ w, h @ u
        n = h.shape[-1]
        r, z = (jax.nn.sigmoid(a[:, k * n : (k + 1) * n] + b[:, k * n : (k + 1) * n]) for k in range(2))
        new = (1 - z) * jnp.tanh(a[:, 2 * n :] + r * b[:, 2 * n :]) + z * h
        return new, new

    return lax.scan(step, h, xs)


def cartpole(state: Any, steps: int = 12) -> Any:
    """CartPole-v1's equations (Gymnasium), with a policy that looks at the angle, and a reset where the pole has fallen."""

    def step(state: Any, _: Any) -> Any:
        x, v, angle, spin = state
        force = jnp.where(angle + 0.5 * spin > 0, 10.0, -10.0)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        part = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * part) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        push = part - 0.05 * turn * cos / 1.1
        state = x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn
        done = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.2)
        state = tuple(jnp.where(done, 0.0, s) for s in state)
        return state, (jnp.stack(state, -1), done)

    return lax.scan(step, state, None, length=steps)


def pendulum(state: Any, torques: Any) -> Any:
    def step(state: Any, torque: Any) -> Any:
        angle, speed = state
        wrapped = (angle + math.pi) % (2 * math.pi) - math.pi
        cost = wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = jnp.clip(speed + (15.0 * jnp.sin(angle) + 3.0 * torque) * 0.05, -8.0, 8.0)
        return (angle + speed * 0.05, speed), -cost

    return lax.scan(step, state, torques)


# --- what users write -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 37])
def test_lstm(dtype: str, rows: int) -> None:
    check(lstm, *(normal(*s, dtype=dtype) for s in ((5, rows, 6), (rows, 8), (rows, 8), (6, 32), (8, 32), (32,))))


def test_gru_over_more_rows_than_a_tile() -> None:
    report = check(gru, normal(4, 1000, 5), normal(1000, 7), normal(5, 21), normal(7, 21))
    assert report.regions[0].rows == 1000 and report.regions[0].loops[0].steps == 4


@pytest.mark.parametrize("environments", [1, 37, 5000])
def test_simulators_are_covered(environments: int) -> None:
    report = check(cartpole, tuple(0.05 * normal(environments) for _ in range(4)))
    assert report.coverage == 1.0 and report.ops_total > 35
    check(pendulum, (normal(environments), normal(environments)), normal(9, environments))


def test_a_policy_in_the_loop() -> None:
    def rollout(w: Any, u: Any, state: Any) -> Any:
        def step(state: Any, noise: Any) -> Any:
            action = jnp.tanh(jnp.tanh(state @ w) @ u) + 0.1 * noise
            state = state * 0.95 + action
            return state, (state * state).sum(-1)

        return lax.scan(step, state, state[None] * jnp.arange(1.0, 7.0)[:, None, None])

    w, u, state = normal(3, 16), normal(16, 3), normal(131, 3)
    check(rollout, w, u, state, covered=False)


def test_vmapped_and_batch_major() -> None:
    f = jax.vmap(lambda x: lax.scan(lambda c, x: (c * 0.5 + x, jnp.tanh(c)), x[0], x))
    report = check(f, normal(300, 6, 3), covered=False)
    assert any(region.loops for region in report.regions)


def test_stacked_layers() -> None:
    check(lambda x, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0], normal(140, 16), normal(3, 16, 16))


def test_a_loop_and_its_neighbours_are_one_call() -> None:
    """A projection in front of the loop and a readout behind it are phases of its call, and so is all of the gradient."""

    def f(xs: Any, p: Any) -> Any:
        h = jax.nn.relu(xs @ p["into"])
        h = gru(h, jnp.zeros_like(h[0]), p["w"], p["u"])[1]
        return jax.nn.softmax(h @ p["out"])

    p = {"into": normal(3, 6), "w": 0.4 * normal(6, 18), "u": 0.4 * normal(6, 18), "out": normal(6, 5)}
    xs = normal(5, 67, 3)
    report = check(f, xs, p)
    assert len(report.regions) == 1 and len(report.regions[0].later) == 2
    gradient = jax.grad(lambda xs, p: -jnp.mean(jnp.log(f(xs, p)[..., 0])), argnums=1)
    report = check(gradient, xs, p, tolerance=5e-5)
    assert len(report.regions) == 1


def test_one_environment_without_a_batch() -> None:
    check(
        lambda x, w: lax.scan(lambda c, x: (jnp.tanh(w @ c + x), c.sum()), x[0] * 0, x), normal(6, 9), normal(9, 9), covered=False
    )
    check(lambda x: lax.fori_loop(0, 50, lambda i, x: x * 0.99 + i, x), jnp.float32(2.0))


def test_arrays_of_one_shape_that_depend_on_the_row_or_do_not() -> None:
    """The rows of a constant have the shape of those of a carry, in a stream of one row."""
    f = lambda x, b: lax.scan(lambda c, _: (jnp.tanh(c[::-1] + b) * b[0], c.sum()), x, None, length=3)  # noqa: E731
    report = check(f, normal(7, 5), normal(7, 5))
    assert report.regions[0].rows == 1


def test_everything_of_a_step_mixes_the_batch() -> None:
    """No dimension streams, so the loop is a stream of one row."""
    report = check(lambda x: lax.scan(lambda c, _: (c - c.mean(), c.max()), x, None, length=3), normal(333))
    assert report.regions[0].rows == 1


# --- forms of loops ---------------------------------------------------------------------------------------------------------------


def test_carries_that_are_swapped_or_handed_on() -> None:
    check(lambda a, b: lax.fori_loop(0, 9, lambda i, s: (s[1], s[0] * 0.5 + s[1]), (a, b)), normal(13), normal(13))
    check(lambda a, b: lax.fori_loop(0, 4, lambda i, s: (s[1], s[0], s[2] + s[0]), (a, b, a)), normal(213), normal(213))
    check(lambda a, b: lax.fori_loop(0, 4, lambda i, s: (s[0], s[1] + s[0]), (a, b)), normal(213), normal(213))


def test_pieces_of_a_carry_wait_for_the_readers_of_its_old_value() -> None:
    """The next carry is a concatenation: a piece of it that is made early must not be in the carry's place yet."""
    state, w = normal(70, 4) / 3, normal(4, 3)
    bodies = {
        "swapped halves": lambda c: [jnp.sin(c[:, 2:]), jnp.cos(c[:, :2])],
        "a later product": lambda c: [c[:, :1] * 0.5, jnp.tanh(c @ w.astype(c.dtype))],
        "a later reduction": lambda c: [jnp.sin(c[:, :1]), jnp.sum(c * c, 1, keepdims=True) / 4, jnp.tanh(c[:, 2:])],
        "a later sum along a row": lambda c: [jnp.sin(c[:, :1]), jnp.tanh(jnp.cumsum(c[:, :3], 1))],
        "pieces of pieces": lambda c: [
            jnp.concatenate([jnp.sin(c[:, 1:2]), jnp.cos(c[:, :1])], 1),
            jnp.concatenate([c[:, :1] * c[:, 3:], jnp.tanh(c[:, 1:2] + c[:, 2:3])], 1),
        ],
        "explicit Euler": lambda c: [c[:, :1] + 0.1 * c[:, 1:2], c[:, 1:2] - 0.1 * jnp.sin(c[:, :1]), c[:, 2:]],
    }
    for body in bodies.values():
        check(lambda c, body=body: lax.fori_loop(0, 3, lambda _, c: jnp.concatenate(body(c), 1), c), state)


def test_pieces_of_a_carry_in_a_body_that_needs_more_registers_than_there_are() -> None:
    def step(c: Any, _: Any) -> Any:
        a, b, p, q = c.T
        waves = [jnp.sin(p * k) * jnp.cos(q * (k + 1)) for k in range(40)]
        mixed = sum(x * y for x, y in zip(waves, waves[::-1], strict=True))
        return jnp.stack(
            [a + 0.1 * b, b - 0.1 * jnp.sin(a) + 0.01 * mixed, jnp.tanh(sum(waves) * 0.1 + a * b), mixed - a + b], 1
        ), None

    check(lambda c: lax.scan(step, c, None, length=2)[0], normal(70, 4) / 3, tolerance=1e-4)


def test_a_row_of_a_table_is_made_from_the_row_before() -> None:
    """As in the edit distance of two words: an inner loop reads the carried row while the next one grows."""

    def distance(a: Any, b: Any) -> Any:
        def row(before: Any, letter: Any) -> Any:
            def cell(left: Any, at: Any) -> Any:
                other, up, corner = at
                value = jnp.minimum(jnp.minimum(left + 1, up + 1), corner + (letter != other))
                return value, value

            _, after = lax.scan(cell, before[0] + 1, (b, before[1:], before[:-1]))
            return jnp.concatenate([(before[0] + 1)[None], after]), None

        return lax.scan(row, jnp.arange(b.shape[0] + 1), a)[0]

    a, b = (jax.device_put(RNG.integers(0, 3, (70, n)).astype(np.int32)) for n in (5, 3))
    check(jax.vmap(distance), a, b, covered=False)


def test_integers_booleans_and_counters() -> None:
    seeds = jnp.arange(533, dtype=jnp.uint32)
    check(lambda s: lax.fori_loop(0, 5, lambda i, s: (s * 1664525 + 1013904223) ^ (s >> 3), s), seeds)
    check(
        lambda s, t: lax.scan(lambda c, t: ((c[0] + t, c[1] | (c[0] > 9)), c[1]), (s, s > 500), t), jnp.arange(533), jnp.arange(6)
    )
    f = lambda x: lax.scan(lambda s, _: ((s[0] + 1, jnp.sin(s[1]) * s[0]), s[0] * 2), (0.0, x), None, length=4)  # noqa: E731
    report = check(f, normal(5000), covered=False)  # the counter comes from a loop of its own, which depends on no argument
    assert report.regions[0].rows == 5000


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_few_steps(steps: int, reverse: bool) -> None:
    f = lambda x: lax.scan(lambda c, x: (c * 0.5 + x, c), x.sum(0), x, reverse=reverse)  # noqa: E731
    if steps:
        check(f, normal(steps, 7), covered=False)
        return
    x = normal(0, 7)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(kj.pipeline(f, force=True))(x), jax.jit(f)(x))


def test_branches_and_early_exits() -> None:
    check(lambda x: lax.fori_loop(0, 5, lambda i, x: lax.cond(i % 2 == 0, lambda x: x * 2, jnp.sin, x), x), normal(33, 5))
    check(lambda x: lax.fori_loop(0, 5, lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: -x], x), x), normal(33, 5))

    def masked(x: Any) -> Any:
        def step(s: Any, _: Any) -> Any:
            x, done = s
            x = jnp.where(done, x, x * 1.5)
            return (x, done | (jnp.abs(x) > 2)), None

        return lax.scan(step, (x, jnp.zeros(x.shape, bool)), None, length=8)[0]

    check(masked, normal(201))


def test_while_loops() -> None:
    check(lambda x: lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 2, s[1] * 0.5 + 1), (0, x))[1], normal(77))
    check(lambda x: lax.while_loop(lambda s: s[0] >= 2, lambda s: (s[0] - 3, jnp.sin(s[1])), (11, x))[1], normal(77))
    f = lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: x * x + 1, x)  # noqa: E731
    report = kj.explain(f)(normal(77))
    assert any("the number of its steps depends on data" in r.reason for r in report.rejected)


def test_loops_in_loops() -> None:
    inner = lambda j, i, x: jnp.sin(x) + j * i  # noqa: E731
    check(lambda x: lax.fori_loop(0, 3, lambda i, x: lax.fori_loop(0, 4, lambda j, x: inner(j, i, x), x), x), normal(133))


def test_loops_in_loops_that_take_and_give_slices() -> None:
    """Slices of a slice of an array; and what an inner loop makes for all of its steps, which another one reads backwards."""

    def f(xs: Any, h: Any, w: Any) -> Any:
        def outer(h: Any, group: Any) -> Any:
            h, made = lax.scan(lambda h, x: ((new := jnp.tanh(h @ w + x)), new * 2), h, group)
            h, again = lax.scan(lambda h, y: (h * 0.5 + jnp.sin(y), h + y), h, made, reverse=True)
            return h, (again, made[0])

        return lax.scan(outer, h, xs)

    for rows, groups, steps in ((1, 2, 3), (131, 3, 1), (37, 1, 5)):
        check(f, normal(groups, steps, rows, 6), normal(rows, 6), 0.5 * normal(6, 6))
    check(lambda xs, h, w: f(xs, h, w)[0], normal(2, 3, 65, 6), normal(65, 6), 0.5 * normal(6, 6))
    check(f, *(x.astype(jnp.bfloat16) for x in (normal(2, 3, 65, 6), normal(65, 6), 0.5 * normal(6, 6))), tolerance=6e-2)


def test_a_loop_over_layers_in_a_loop_over_time() -> None:
    """The states of all layers are one carry, of which the inner loop takes slices; so it does of stacked weights."""

    def f(xs: Any, states: Any, w: Any, u: Any) -> Any:
        def step(states: Any, x: Any) -> Any:
            def layer(x: Any, of_layer: Any) -> Any:
                w, u, h = of_layer
                h = jnp.tanh(x @ w + h @ u)
                return h, h

            out, states = lax.scan(layer, x, (w, u, states))
            return states, out

        return lax.scan(step, states, xs)

    check(f, normal(4, 51, 6), normal(3, 51, 6), 0.5 * normal(3, 6, 6), 0.5 * normal(3, 6, 6))


def test_slices_of_numbers_in_inner_loops() -> None:
    """A row has one number in each slice, and integers and booleans are handed on as well."""

    def f(xs: Any, c: Any) -> Any:
        def outer(c: Any, group: Any) -> Any:
            c, (made, low) = lax.scan(lambda c, x: (c * 0.5 + x, (c + x, x < c)), c, group)
            return lax.scan(lambda c, y: (jnp.where(y[1], c + y[0], c), y[1].astype(jnp.int32)), c, (made, low))

        return lax.scan(outer, c, xs)

    check(f, normal(3, 4, 133), normal(133))


def test_rows_of_nan_stay_apart() -> None:
    x = normal(301).at[7].set(jnp.nan).at[9].set(jnp.inf)
    check(lambda x: lax.fori_loop(0, 6, lambda i, x: x * 0.5 + jnp.tanh(x), x), x)


def test_donated_carries() -> None:
    f = kj.pipeline(lambda x, y: lax.fori_loop(0, 5, lambda i, s: (s[1], s[0] + s[1]), (x, y)), force=True, strict=True)
    a, b = np.ones(400, np.float32), np.full(400, 2.0, np.float32)
    x, y = jax.jit(f, donate_argnums=(0, 1))(jnp.array(a), jnp.array(b))
    for _ in range(5):
        a, b = b, a + b
    np.testing.assert_array_equal(x, a)
    np.testing.assert_array_equal(y, b)


def test_under_transformations() -> None:
    f = lambda x: lax.scan(lambda c, x: (c * 0.5 + jnp.sin(x), c), x[0], x)  # noqa: E731
    x = normal(5, 71)
    p = kj.pipeline(f, force=True)
    for g, h, arg in ((p, f, x), (jax.checkpoint(p), f, x), (jax.vmap(p), jax.vmap(f), jnp.stack([x, 2 * x]))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.jit(g)(arg), jax.jit(h)(arg))
    loss = lambda f: lambda x: (f(x)[1] ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(loss(p)))(x), jax.grad(loss(f))(x), rtol=1e-5, atol=1e-5)


def test_a_body_with_something_unknown_says_what() -> None:
    report = kj.explain(lambda x: lax.scan(lambda c, _: (jnp.sort(c * 2), None), x, None, length=3)[0])(normal(5, 64))
    told = [r.reason for r in report.rejected if r.op == "scan"]
    assert told and "sort" in told[0] and "test_time_loops.py" in told[0]
    body = jax.jit(
        kj.pipeline(lambda x: lax.scan(lambda c, _: (jnp.sort(jnp.tanh(c) * 2), None), x, None, length=3)[0], force=True)
    )
    assert TARGET in body.lower(normal(64, 64)).as_text()  # the rest of the body is pipelined on its own


# --- any loop ---------------------------------------------------------------------------------------------------------------------

_UPDATES: tuple[Callable[[Any, Any], Any], ...] = (
    lambda c, x: c * 0.5 + x,
    lambda c, x: jnp.tanh(c + x),
    lambda c, x: jnp.where(c > x, c * 0.9, x),
    lambda c, x: jnp.minimum(c, x) - 0.1 * jnp.sin(c),
)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.sampled_from([1, 2, 13, 64, 130]),
    steps=st.integers(1, 5),
    row=st.sampled_from([(), (1,), (3,), (2, 4)]),
    carries=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    reverse=st.booleans(),
    unroll=st.sampled_from([1, 2]),
    time_first=st.booleans(),
)
def test_any_loop(rows: int, steps: int, row: Any, carries: Any, dtype: str, reverse: bool, unroll: int, time_first: bool) -> None:
    """Carries of many shapes that read each other, and slices that they read and give."""

    def f(xs: Any, *initial: Any) -> Any:
        xs = xs if time_first else jnp.moveaxis(xs, 1, 0)

        def step(state: Any, x: Any) -> Any:
            new, given = [], []
            for update, other, gives in carries:
                new.append(_UPDATES[update](state[other % len(state)], x))
                given += [new[-1]] * gives
            return tuple(new), tuple(given)

        return lax.scan(step, tuple(initial), xs, reverse=reverse, unroll=unroll)

    xs = normal(*((steps, rows) if time_first else (rows, steps)), *row, dtype=dtype)
    check(
        f, xs, *(normal(rows, *row, dtype=dtype) for _ in carries), covered=False, tolerance=6e-2 if dtype == "bfloat16" else None
    )


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.sampled_from([1, 2, 13, 130]),
    outer=st.sampled_from([1, 2, 3]),
    inner=st.sampled_from([1, 2, 5]),
    row=st.sampled_from([(), (3,), (2, 4)]),
    updates=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    reverse=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    time_first=st.booleans(),
)
def test_any_nest(rows: int, outer: int, inner: int, row: Any, updates: Any, reverse: Any, dtype: str, time_first: bool) -> None:
    """Two loops in a loop: the second one reads what the first has made; slices come from arrays of either order."""

    def f(xs: Any, initial: Any) -> Any:
        xs = xs if time_first else jnp.moveaxis(xs, 0, 2)

        def step(c: Any, group: Any) -> Any:
            first, second = (_UPDATES[k] for k in updates)
            c, made = lax.scan(lambda c, x: ((new := first(c, x)), (new, c + x)), c, group, reverse=reverse[0])
            return lax.scan(lambda c, y: (second(c, y[0]), y[1]), c, made, reverse=reverse[1])

        return lax.scan(step, initial, xs)

    shape = (outer, inner, rows) if time_first else (rows, outer, inner)
    check(f, normal(*shape, *row, dtype=dtype), normal(rows, *row, dtype=dtype), covered=False,
          tolerance=6e-2 if dtype == "bfloat16" else None)  # fmt: skip
