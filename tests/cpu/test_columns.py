"""Loops over rows of a few columns, which lie column by column: their shifts, pads and sums, in whole tiles and in the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cpu import bytecode
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.checks import leaves_in_float64

STEPS = 5
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}


def leapfrog(x: Array, p: Array, mass: Array) -> tuple[Array, Array]:
    """Hamiltonian steps of rows [n, d]: neighbours along the row pull at each other; all energies, and where they end."""

    def energy(x: Array) -> Array:
        return 0.5 * jnp.sum(x * x, -1) + jnp.sum(jnp.log1p((x[:, 1:] - x[:, :-1] ** 2) ** 2), -1)

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        x, p = carry
        p = p - 0.05 * jax.grad(lambda x: energy(x).sum())(x)
        x = x + 0.1 * mass * p
        return (x, p), energy(x) + 0.5 * jnp.sum(p * p * mass, -1)

    (x, p), energies = lax.scan(step, (x, p), None, length=STEPS)
    return energies, x


def extremes(x: Array, p: Array, mass: Array) -> tuple[Array, Array]:
    """What has no gradient: largest and smallest columns, an ``all`` and a ``prod`` of each row."""

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        x, p = carry
        top, low = x.max(-1), p.min(-1)
        inside = jnp.all(jnp.abs(x) < 100, -1)
        x = jnp.where(inside[:, None], x * mass + jnp.pad(p[:, 1:], ((0, 0), (1, 0))), x)
        p = jnp.concatenate([p[:, -1:], p[:, :-1]], -1) * 0.5 + jnp.prod(mass) * low[:, None]
        return (x, p), top + low

    (x, p), out = lax.scan(step, (x, p), None, length=STEPS)
    return out, x + p


def arguments(rows: int, columns: int, dtype: Any, seed: int = 0) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed + 100 * rows + columns)
    x, p = (jax.device_put(np.asarray(rng.standard_normal((rows, columns)), dtype)) for _ in range(2))
    return x, p, jax.device_put(np.asarray(rng.uniform(0.5, 1.5, columns), dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 10), (7, 3), (64, 10), (45, 9), (1000, 10), (533, 20), (64, 31), (0, 5)])
@pytest.mark.parametrize("f", [leapfrog, extremes])
def test_every_height_of_the_last_tile(f: Callable[..., Any], rows: int, columns: int, dtype: str) -> None:
    args = arguments(rows, columns, dtype)
    got = jax.jit(kj.pipeline(f, force=True))(*args)
    for a, b in zip(got, leaves_in_float64(f, args), strict=True):
        scale = max(np.abs(b).max(initial=0), 1)
        np.testing.assert_allclose(np.asarray(a, np.float64) / scale, b / scale, atol=TOLERANCE[dtype], rtol=0)


def loops_of(f: Callable[..., Any], args: Any) -> tuple[list[bytecode.CpuLoop], list[bytecode.CpuOperand]]:
    """The loops of a function's programs, and what their elementwise work reads and writes in the memory of the program."""
    routed = route(capture(jax.make_jaxpr(f)(*args)).graph, "cpu", RouteOptions(device="zen5-2", force=True))
    made = [lower_program(part.program, "loops") for region in routed.regions for part in region.program.parts]
    loops = [i for program in made for stage in program.stages for i in stage.body if isinstance(i, bytecode.CpuLoop)]
    vectors = [i for loop in loops for i in loop.body if isinstance(i, bytecode.CpuVector)]
    return loops, [o for i in vectors for o in (*i.loads, *i.stores) if o.ref.space == bytecode.SCRATCH]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [4, 8])
def test_what_a_step_multiplies_and_what_it_hands_on_lie_row_by_row(width: int, dtype: Any) -> None:
    """The state of a recurrent layer, and in its gradient the cotangent that a product makes: copied into columns and back in every
    step, 8 columns of bfloat16 took 1.3 times as long as with ``jax.jit``, and 0.6 times as rows (Xeon with AMX)."""
    x, w = jnp.ones((STEPS, 64, width), dtype), jnp.ones((width, width), dtype)

    def run(x: Array, w: Array) -> Array:
        def step(h: Array, x: Array) -> tuple[Array, Array]:
            h = jnp.tanh(h @ w + x)
            return h, h

        return lax.scan(step, jnp.zeros_like(x[0]), x)[1].astype(jnp.float32).sum()

    for f in (run, jax.grad(run, (0, 1))):
        loops, operands = loops_of(f, (x, w))
        assert loops and operands
        assert all(o.row_stride != 1 for o in operands)


def test_nothing_in_the_loop_is_read_with_a_stride() -> None:
    """Shifted, padded or folded, the columns of 256 rows are dense, so whatever works on them takes whole vectors."""
    (loop,), operands = loops_of(leapfrog, arguments(256, 10, "float32"))
    operands += [o for i in loop.body if isinstance(i, bytecode.Reduce) for o in (i.x, i.out)]
    assert len(operands) > 10
    assert all(o.row_stride in (0, 1) for o in operands)
