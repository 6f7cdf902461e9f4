"""Which small loops become pipelines on a CPU: XLA compiles a loop to one function unless a library multiplies or reduces in it.

The machines are profiles that come with the package, so the decisions are the same everywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import cpu_model

MACHINES = ("avx512-2", "avx2-8", "zen5-2")


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def network(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 1000, lambda i, x: jnp.tanh(x @ w), x)


def lorenz(x: Any, y: Any, z: Any) -> Any:
    def step(_: Any, s: Any) -> Any:
        x, y, z = s
        return x + 0.1 * (y - x), y + 0.01 * (x * (28 - z) - y), z + 0.01 * (x * y - 8 / 3 * z)

    return lax.fori_loop(0, 1000, step, (x, y, z))


def covariances(p: Any, a: Any) -> Any:
    return lax.fori_loop(0, 1000, lambda i, p: a @ p @ a.T + 0.01, p)


def report(f: Any, args: Any, machine: str) -> Any:
    return kj.explain(f, platform="cpu", device=machine)(*args)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_xla_compiles_is_left_to_it(machine: str) -> None:
    """Numbers, vectors and matrices of up to three columns: 17 to 590 ns a step with XLA, 90 to 890 with a pipeline (Xeon 6)."""
    for f, args in (
        (lorenz, (ones(), ones(), ones())),
        (network, (ones(1, 16), ones(16, 16))),
        (network, (ones(1, 128), ones(128, 128))),
        (network, (ones(5, 3), ones(3, 3))),
        (covariances, (ones(3, 3), ones(3, 3))),
    ):
        found = report(f, args, machine)
        assert not found.regions, str(found)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_xla_interprets_is_taken(machine: str) -> None:
    """The library multiplies in each step: 260 to 650 ns with XLA, 100 with a pipeline."""
    for f, args in (
        (network, (ones(3, 4), ones(4, 4))),
        (network, (ones(2, 8), ones(8, 8))),
        (network, (ones(300, 16), ones(16, 16))),
        (covariances, (ones(8, 8), ones(8, 8))),
    ):
        found = report(f, args, machine)
        assert found.ops_pipelined == found.ops_total and found.regions[0].loops, str(found)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_short_reverse_loop_is_left_to_xla(machine: str) -> None:
    """The gradient of an LSTM-like step of 5 rows and 3 columns has sums of 5 products, which XLA compiles: 116 us for 500 steps
    forward and back, 390 with a pipeline (Xeon 6)."""

    def loss(a: Any, x: Any) -> Any:
        def step(c: Any, seen: Any) -> Any:
            c = (c @ a) * seen
            s = c.sum(-1, keepdims=True)
            return c / s, jnp.log(s)

        return jnp.sum(lax.scan(step, x[0], x)[1])

    found = report(jax.grad(loss, (0, 1)), (ones(3, 3), ones(500, 5, 3)), machine)
    backward = [region for region in found.regions for stage in region.stages if "add_any" in " ".join(stage.ops)]
    assert not any(region.loops for region in backward), str(found)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_call_in_a_short_step(machine: str) -> None:
    """The loop is XLA's, as its number of steps is not known. A call takes longer than all of a step; wide ones have calls."""

    def until(x: Any, w: Any) -> Any:
        return lax.while_loop(lambda x: x[0, 0] < 1e9, lambda x: jnp.tanh(jnp.tanh(x @ w) @ w) @ w, x)

    for rows, width in ((1, 64), (4, 4), (16, 16)):
        assert not report(until, (ones(rows, width), ones(width, width)), machine).regions
    assert report(until, (ones(8192, 64), ones(64, 64)), machine).regions


def test_states_of_loops_that_are_one_pass_stay_in_the_first_cache() -> None:
    """Six numbers of float32 for each row; what a step also makes once for all rows, as a key, is shared by tall tiles."""

    def pass_over(*state: Any) -> Any:
        return lax.fori_loop(0, 100, lambda i, s: (*s[1:], jnp.sin(s[0]) + s[1]), state)

    def with_keys(key: Any, *state: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            key, s = carry
            key, own = jax.random.split(key)
            return key, (*s[1:], jnp.sin(s[0]) + jax.random.uniform(own, s[0].shape))

        return lax.fori_loop(0, 100, step, (key, state))[1]

    state = [ones(65536)] * 6
    (small,) = report(pass_over, state, "avx512-2").regions
    (tall,) = report(with_keys, (jax.random.key(0), *state), "avx512-2").regions
    assert 256 <= small.tile_rows <= 40 * 1024 // (6 * 4) < tall.tile_rows


def test_a_slice_of_a_state_of_few_columns_takes_no_time() -> None:
    """While its loop runs, such a state lies column by column."""

    def summed(s: Any) -> Any:
        return lax.fori_loop(0, 100, lambda i, s: s + jnp.sin(s[:, 1:4]).sum(1)[:, None], s)

    graph = capture(jax.make_jaxpr(summed)(ones(1009, 6))).graph
    (chosen,) = route(graph, "cpu", RouteOptions(force=True, device="avx512-2")).regions
    ((_, _, body),) = CpuCost(graph, chosen.region, cpu_model("avx512-2")).loops()
    (piece,) = (i for i in body.region.ops if body.family(i) == "slice")
    assert body.seconds(body.cpu_work(piece), 64) == 0.0


@pytest.mark.parametrize("machine", MACHINES)
def test_a_carry_that_a_call_reads_and_makes_is_copied_in_a_loop_of_xlas(machine: str) -> None:
    """The sums of weight gradients, one for each row: XLA adds to them where they lie."""

    def seconds(sums: Any, body: bool) -> float:
        def step(sums: Any, h: Any, z: Any) -> Any:
            return sums.astype(jnp.float32) + h[:, :, None] * z[:, None, :]

        graph = capture(jax.make_jaxpr(step)(sums, ones(256, 64), ones(256, 64))).graph
        (region,) = route(graph, "cpu", RouteOptions(force=True, device=machine, code=False, body=body)).regions
        return region.plan.seconds

    carry, other = ones(256, 64, 64), ones(256, 64, 64).astype(jnp.bfloat16)
    copied = carry.nbytes * dict(cpu_model(machine).profile.numbers)["xla/while/stored"]
    assert seconds(carry, True) > seconds(carry, False) + 0.7 * copied > seconds(carry, False) + 100e-6
    assert seconds(other, True) < seconds(other, False) + 0.3 * copied  # what is made is no carry that is read


def decoded(x: Any, ws: Any) -> Any:
    """64 tokens of 4 sequences, each with 4 heads of 32 and a cache of 256 keys and values."""

    def step(c: Any, i: Any) -> Any:
        x, keys, values = c
        q, k, v = ((x @ w).reshape(4, 4, 32) for w in ws[:3])
        keys, values = (lax.dynamic_update_slice(c, n[:, None], (0, i, 0, 0)) for c, n in ((keys, k), (values, v)))
        scores = jnp.where(jnp.arange(256) <= i, jnp.einsum("bhd,bshd->bhs", q, keys), -1e30)
        out = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores, -1), values).reshape(4, 128) @ ws[3]
        return (x + out, keys, values), out

    cache = jnp.zeros((4, 256, 4, 32))
    return lax.scan(step, (x, cache, cache), jnp.arange(64))[1]


def test_xla_copies_keys_that_do_not_lie_as_a_product_of_a_step_wants_them() -> None:
    """Modelled without the copies XLA took 0.9 ms, a pipeline 1.4. Measured: 7.2 and 4.8 of CPU time (float32, Xeon with AMX)."""
    found = report(decoded, (ones(4, 128), ones(4, 128, 128)), "emeraldrapids-2")
    assert found.ops_pipelined == found.ops_total, str(found)
