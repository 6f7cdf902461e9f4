"""Loops, branches and calls whose body is nothing but one pipelined call.

XLA once took such a loop's carries for invariant and moved the call out of it, so that the loop never ended
(``targets.cpu.call.call`` says how). So the compiled program is read before anything runs: a call that has left its loop fails
here and does not hang.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.targets.cuda import runtime
from tests.support.checks import TARGET

ROWS, WIDTH = 5, 7
STEPS = 4


def forced(f: Callable[..., Any], target: str | None = None) -> Any:
    return kj.pipeline(f, force=True, target=target)


def carries(n: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(n)
    return tuple(jax.device_put(np.asarray(rng.uniform(0.5, 1.0, (ROWS, WIDTH)), jnp.float32)) for _ in range(n))


def computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation of an HLO module, by name; that of the entry is "ENTRY"."""
    found: dict[str, list[str]] = {}
    for line in hlo.splitlines():
        if line.endswith("{") and "->" in line:
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0]
            found[name] = []
        elif line.startswith(" ") and found:
            found[name].append(line)
    return found


def compiled(f: Callable[..., Any], *args: Any, inside: int = 1) -> Any:
    """``jax.jit(f)`` compiled, once it is certain that its calls stand where they belong.

    ``inside``: how many pipelined calls are within loops and branches; none may stand outside, and none may be a root.
    """
    executable = jax.jit(f).lower(*args).compile()
    parts = computations(executable.as_text())
    calls = {name: [x for x in lines if f'custom_call_target="{TARGET}"' in x] for name, lines in parts.items()}
    assert not calls["ENTRY"], "the call was moved out of its loop"
    assert sum(map(len, calls.values())) == inside
    roots = [x for lines in parts.values() for x in lines if x.lstrip().startswith("ROOT")]
    assert not [x for x in roots if f'"{TARGET}"' in x], "a call is the root of a computation"
    return executable


def close(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=1e-5)


def rotated(order: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A body that gives, in place ``i``, something of carry ``order[i]`` and of the first carry."""
    return lambda c: tuple(0.5 * c[k] * c[0] + 0.25 for k in order)


ORDERS = [order for n in (1, 2, 3) for order in itertools.permutations(range(n))] + [(0, 1, 2, 3), (3, 0, 1, 2), (4, 3, 2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
def test_a_while_loop_of_one_call(order: tuple[int, ...]) -> None:
    body, c = rotated(order), carries(len(order))

    def loop(body: Any) -> Any:
        return lambda c: lax.while_loop(lambda c: c[0][0, 2] > 0.3, body, c)

    executable = compiled(loop(forced(body)), c)
    want = tuple(np.asarray(x, np.float64) for x in c)
    while want[0][0, 2] > 0.3:
        want = body(want)
    close(executable(c), want)


def test_the_loop_that_never_ended() -> None:
    """As it was reported: the condition reads what the body doubles."""

    def loop(c: Any) -> Any:
        return lax.while_loop(lambda c: c[0][0, 2] <= 8, forced(lambda c: (c[0] * c[0], 2 * c[0] * c[1])), c)

    x = jnp.full((ROWS, WIDTH), 1.5, jnp.float32)
    got = compiled(lambda x: loop((x, x)), x)(x)
    close(got, (np.full((ROWS, WIDTH), 1.5**8), np.full((ROWS, WIDTH), 8 * 1.5**8)))


@pytest.mark.parametrize("stationary", [0, 1, 2])
def test_carries_that_the_body_hands_on(stationary: int) -> None:
    """A carry that the call returns as it is, in every place: a real invariant, which XLA may use."""

    def body(c: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x if k == stationary else x * 0.5 + 0.125 * c[stationary] for k, x in enumerate(c))

    c = carries(3)
    got = compiled(lambda c: lax.fori_loop(0, STEPS, lambda _, c: forced(body)(c), c), c)(c)
    want = tuple(np.asarray(x, np.float64) for x in c)
    for _ in range(STEPS):
        want = body(want)
    close(got, want)


def test_weights_among_the_carries() -> None:
    """A network in a loop: its weights are carries that never change, its activations one that does."""

    def body(c: Any) -> Any:
        w, b, x = c
        return w, b, jnp.tanh(x @ w + b)

    rng = np.random.default_rng(3)
    w, b, x = (rng.standard_normal(s).astype(np.float32) * 0.5 for s in ((WIDTH, WIDTH), (WIDTH,), (33, WIDTH)))
    got = compiled(lambda c: lax.fori_loop(0, STEPS, lambda _, c: forced(body)(c), c), (w, b, x))((w, b, x))
    want = x.astype(np.float64)
    for _ in range(STEPS):
        want = np.tanh(want @ w.astype(np.float64) + b)
    np.testing.assert_array_equal(got[0], w)
    np.testing.assert_array_equal(got[1], b)
    np.testing.assert_allclose(got[2], want, atol=2e-6)  # of numbers up to 1, some of them near 0, after several layers


@pytest.mark.parametrize("results", [1, 2, 3, 4, 5])
def test_a_scan_of_one_call(results: int) -> None:
    """All that a step makes is carried; and, beside it, all that it makes is given for each step."""
    body, c = rotated(tuple(range(results))), carries(results)

    def scan(c: Any) -> Any:
        return lax.scan(lambda c, _: ((new := forced(body)(c)), new[-1]), c, None, length=STEPS)

    want, each = tuple(np.asarray(x, np.float64) for x in c), []
    for _ in range(STEPS):
        want = body(want)
        each.append(want[-1])
    close(compiled(scan, c)(c), (want, np.stack(each)))


@pytest.mark.parametrize("results", [1, 2, 3])
def test_nested_loops(results: int) -> None:
    body, c = rotated(tuple(range(results))), carries(results)

    def nested(c: Any) -> Any:
        inner = lambda c: lax.fori_loop(0, 3, lambda _, c: forced(body)(c), c)  # noqa: E731
        return lax.while_loop(lambda c: c[0][0, 0] > 0.3, inner, c)

    want = tuple(np.asarray(x, np.float64) for x in c)
    while want[0][0, 0] > 0.3:
        for _ in range(3):
            want = body(want)
    close(compiled(nested, c)(c), want)


def test_a_pipelined_loop_around_one_call() -> None:
    """The loop itself is in the pipelined function, and its body becomes one call."""
    body, c = rotated((0, 1)), carries(2)
    f = forced(lambda c: lax.while_loop(lambda c: c[0][0, 0] > 0.3, body, c))
    want = tuple(np.asarray(x, np.float64) for x in c)
    while want[0][0, 0] > 0.3:
        want = body(want)
    close(compiled(f, c)(c), want)


def test_the_derivative_of_a_pipelined_loop() -> None:
    """Along a tangent, the body computes value and tangent from value and tangent: operands in the order of the carries."""
    f = forced(lambda x: lax.while_loop(lambda x: x[0, 0] < 8, lambda x: x * x, x))
    x, t = jnp.full((ROWS, WIDTH), 1.5, jnp.float32), carries(1)[0]
    got = compiled(lambda x, t: jax.jvp(f, (x,), (t,)), x, t)(x, t)
    close(got, (np.full((ROWS, WIDTH), 1.5**8), 8 * 1.5**7 * np.asarray(t, np.float64)))


def test_the_gradient_of_a_scan_of_one_call() -> None:
    body, c = rotated((0, 1)), carries(2)

    def loss(c: Any, wrap: Any) -> Any:
        return sum(x.sum() for x in lax.scan(lambda c, _: (wrap(body)(c), None), c, None, length=STEPS)[0])

    close(jax.jit(jax.grad(lambda c: loss(c, forced)))(c), jax.tree.map(np.asarray, jax.grad(lambda c: loss(c, lambda f: f))(c)))


@pytest.mark.parametrize("predicate", [True, False])
def test_branches_of_one_call(predicate: bool) -> None:
    first, second, c = rotated((0, 1)), rotated((1, 0)), carries(2)

    def f(p: Any, c: Any) -> Any:
        return lax.fori_loop(0, STEPS, lambda _, c: lax.cond(p, forced(first), forced(second), c), c)

    want = tuple(np.asarray(x, np.float64) for x in c)
    for _ in range(STEPS):
        want = (first if predicate else second)(want)
    close(compiled(f, predicate, c, inside=2)(predicate, c), want)


def test_a_called_computation_of_one_call() -> None:
    body, c = rotated((0, 1)), carries(2)
    called = jax.jit(forced(body), inline=False)
    got = compiled(lambda c: lax.fori_loop(0, STEPS, lambda _, c: called(c), c), c)(c)
    want = tuple(np.asarray(x, np.float64) for x in c)
    for _ in range(STEPS):
        want = body(want)
    close(got, want)


@pytest.mark.parametrize("results", [1, 2, 3])
@pytest.mark.parametrize("target", ["cpu", "cuda", "emulator"])
def test_every_call_has_a_result_that_nobody_reads(target: str, results: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps it from being a root, on every target: asked of the program that is given to XLA."""
    monkeypatch.setenv("KITSUNE_CUDA_ARCH", "sm_90a")
    f = forced(rotated(tuple(range(results))), "emulator" if target == "emulator" else None)
    traced = jax.jit(lambda c: f(c)).trace(carries(results))
    text = traced.lower(lowering_platforms=("cuda" if target == "cuda" else "cpu",)).as_text()
    (made,) = re.findall(r"%(\d+):(\d+) = stablehlo\.custom_call @kitsune_\w+", text)
    assert int(made[1]) == results + 1
    assert f"%{made[0]}#{results}" not in text


def test_the_body_of_a_loop_may_need_a_constant_array() -> None:
    """The kernel of a row's reversal reads a table of columns, which an equation's body cannot hold as its constant."""
    x = np.random.default_rng(4).standard_normal((ROWS, WIDTH)).astype(np.float32)

    def loop(x: Any, steps: Any) -> Any:  # how many is not known before it runs, so the loop is XLA's
        return lax.fori_loop(0, steps, lambda _, x: jnp.flip(x, 1) * 0.5 + 0.25 * x, x)

    before = runtime.calls()
    got = np.asarray(jax.jit(forced(loop, "emulator"))(x, STEPS))
    assert runtime.calls() == before + STEPS
    want = x.astype(np.float64)
    for _ in range(STEPS):
        want = want[:, ::-1] * 0.5 + 0.25 * want
    close(got, want)


def test_constants_inside_a_jaxpr_are_made_by_equations() -> None:
    table = np.random.default_rng(5).standard_normal((3, WIDTH)).astype(np.float32)
    closed = jax.make_jaxpr(lambda x: x + jnp.asarray(table))(table)
    inside = _compat.constants_inside(closed)
    assert len(_compat.open_parts(closed)[1]) == 1 and _compat.open_parts(inside)[1] == []
    np.testing.assert_array_equal(jax.jit(_compat.jaxpr_as_fun(inside))(table)[0], 2 * table)
