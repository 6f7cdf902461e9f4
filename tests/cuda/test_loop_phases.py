"""Loops in calls of several phases, in the emulator: what is computed in front of them and behind them is in the same kernel."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.errors import CannotLower
from kitsune_jax.program.build import assemble
from kitsune_jax.targets.cuda import call_layout, hostcc, runtime
from reference.check import verify
from tests.cuda.test_phases import PLANTED, planted
from tests.cuda.test_training import CHAIN, ROUNDING, check_close
from tests.support.checks import in_float64
from tests.support.cuda_recurrent_cases import heun, loss, pendulum
from tests.support.cuda_run import called, code_of, kernel_cache, run_call, tiled
from tests.support.phases import recurrence
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.usefixtures("kernel_cache"),
]

TOLERANCE = {"float32": 4e-3, "float16": 6e-3, "bfloat16": 4e-2}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize(
    ("dtype", "rows", "steps", "reverse"),
    [("float32", 131, 3, False), ("bfloat16", 257, 2, True), ("float16", 65, 4, False), ("float32", 1, 1, True)],
)
def test_a_projection_a_loop_a_readout_and_an_update(dtype: str, rows: int, steps: int, reverse: bool, sm: int) -> None:
    case = recurrence(rows, steps, dtype=dtype, reverse=reverse)
    operands = case.operands(np.random.default_rng(3))
    for program in call_layout.programs_of_call(tiled(case.program)):
        verify(program)
    got = run_call(case.program, *operands, sm=sm, lanes=2, replicas=2)
    assert max(case.errors(got, operands)) < TOLERANCE[dtype]


def test_every_schedule_gives_the_same_bits() -> None:
    case = recurrence(257)
    operands = case.operands(np.random.default_rng(3))
    code = code_of(case.program, lanes=2, replicas=3)
    found = {tuple(x.tobytes() for x in called(case.program, *operands, code=code, seed=seed)) for seed in range(3)}
    assert len(found) == 1


@pytest.mark.parametrize(
    "bug", [pytest.param("no barrier between phases", marks=pytest.mark.slow), "a CTA goes on when the first other one arrives"]
)
def test_a_loop_that_reads_too_early_is_seen(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, _ = PLANTED[bug]
    found = planted(recurrence(257), right, wrong, tmp_path, monkeypatch)
    assert sum(map(bool, found)) >= 6, found
    assert all("race: " in why or "nothing has written" in why for why in found if why), found


def test_a_slice_that_may_be_cached_is_seen() -> None:
    case = recurrence()
    code = code_of(case.program, change=lambda source: source.replace("#define KITSUNE_PHASES 1", ""))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ld_global"):
        called(case.program, *case.operands(np.random.default_rng(3)), code=code)


def test_weights_that_a_loop_cuts_are_refused() -> None:
    t, u = Tiles((70,), 64), Tiles((70,), 64)
    row = ((0,), ())
    t.store(t.op("tanh", t.load((70, 32), "float32", row)), (70, 32), row)
    x, layers = u.load((70, 32), "float32", row), u.input((96, 32))
    with u.loop(3, x) as loop:
        loop.next(u.matmul(loop.carries[0], u.load_slice(layers, (loop.index, 0, 32, 32))))
    u.store(loop.results[0], (70, 32), row)
    call = assemble([(0, t.program(), (0,), (2,)), (1, u.program(), (2, 1), (3,))], (0, 1), (3,))
    with pytest.raises(CannotLower, match="weights that change with the batch or a loop"):
        code_of(call)


# -- as users have it


def updated(recurrence: Any, params: tuple[jax.Array, ...], *args: jax.Array) -> Any:
    """A step of gradient descent."""
    value, grads = jax.value_and_grad(lambda params: loss(recurrence, *params, *args))(params)
    return value, tuple(p - 0.01 * g for p, g in zip(params, grads, strict=True))


def read_out(params: tuple[jax.Array, ...], xs: jax.Array) -> jax.Array:
    """A projection in front of a loop, and a readout behind it."""
    w, u, v = params

    def step(h: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(z + h @ u)
        return h, h

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], u.shape[0])), xs @ w)[1] @ v


def arguments(*shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(11)
    return tuple(jax.device_put(np.asarray(0.4 * rng.standard_normal(shape), jnp.float32)) for shape in shapes)


@pytest.mark.parametrize(
    ("function", "args", "later"),
    [
        (functools.partial(updated, heun), (arguments((6, 32), (32,), (32, 6)), *arguments((67, 6))), 1),
        (functools.partial(updated, pendulum), (arguments((), ()), *arguments((67,), (67,))), 0),
        (read_out, (arguments((5, 24), (24, 24), (24, 8)), *arguments((3, 67, 5))), 2),
    ],
)
def test_phases_of_a_loop(function: Any, args: Any, later: int) -> None:
    pipelined = kj.pipeline(function, target="emulator", force=True)
    report = kj.explain(pipelined)(*args)
    assert any(r.loops and len(r.later) >= later for r in report.regions), report
    before = runtime.calls()
    got = jax.block_until_ready(jax.jit(pipelined)(*args))
    assert runtime.calls() == before + len(report.regions)
    check_close(
        [np.asarray(x) for x in jax.tree.leaves(got)], jax.tree.leaves(in_float64(function, *args)), CHAIN * ROUNDING["float32"]
    )
