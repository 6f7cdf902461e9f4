"""The optimiser inside the pipelined step: updates run as later phases of the call that makes the gradients."""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kitsune_jax as kj
from benchmarks.apps import APPS
from kitsune_jax import _cpu, targets
from kitsune_jax import errors as cpu_errors
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import PlannedRegion, RouteOptions, route
from kitsune_jax.program.ir import Array, Program
from kitsune_jax.targets.cpu import lower as cpu_lower
from reference.interpret import interpret
from tests.support.checks import custom_calls, in_float64

ROWS = 97  # no multiple of a tile
LR, EPS = 0.05, 1e-3  # a small gradient over its own root would amplify rounding without bound; a larger eps does not

Params = Any
Step = Callable[..., Any]


def network(seed: int = 0, dtype: Any = jnp.float32) -> tuple[Params, jax.Array, jax.Array]:
    """Parameters of 11-13-5, inputs, targets."""
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jax.device_put(np.asarray(rng.standard_normal(shape) * 0.4, dtype))

    params = {"w0": array(11, 13), "b0": array(13), "w1": array(13, 5), "b1": array(5)}
    return params, array(ROWS, 11), array(ROWS, 5)


def predict(p: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w0"] + p["b0"]) @ p["w1"] + p["b1"]


def loss(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predict(p, x) - y).astype(jnp.promote_types(jnp.float32, y.dtype)) ** 2)


# --- optimisers, as optax and as people write them --------------------------------------------------------------------------------

OPTAX = {
    "sgd": optax.sgd(LR),
    "momentum": optax.sgd(LR, momentum=0.9, nesterov=True),
    "adam": optax.adam(LR, eps=EPS),
    "adamw": optax.adamw(LR, eps=EPS, weight_decay=0.01),
    "clipped_adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(LR, eps=EPS)),
    "unclipped_sgd": optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(LR)),
    "rmsprop": optax.rmsprop(LR, eps=EPS),
    "lion": optax.lion(LR),
}


def optax_step(optimiser: optax.GradientTransformation, objective: Callable[..., Any] = loss) -> Step:
    def step(p: Params, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(objective)(p, x, y)
        updates, state = optimiser.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    return step


def plain_adamw(p: Params, state: Any, x: jax.Array, y: jax.Array) -> Any:
    """AdamW with clipping in plain jnp."""
    m, v, t = state
    value, g = jax.value_and_grad(loss)(p, x, y)
    norm = jnp.sqrt(sum(jnp.sum(a * a) for a in jax.tree.leaves(g)))
    g = jax.tree.map(lambda a: a * jnp.minimum(1.0, 0.1 / (norm + 1e-6)), g)
    t = t + 1
    m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
    v = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
    c1, c2 = 1 - 0.9**t, 1 - 0.999**t
    p = jax.tree.map(lambda a, b, c: a - LR * ((b / c1) / (jnp.sqrt(c / c2) + EPS) + 0.01 * a), p, m, v)
    return p, (m, v, t), value


def zeros_like(p: Params) -> Any:
    return jax.tree.map(jnp.zeros_like, p), jax.tree.map(jnp.zeros_like, p), jnp.zeros((), jnp.float32)


def errors(got: Any, want: Any) -> float:
    """The largest difference of any leaf, relative to the leaf's root mean square."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.array_equal(np.isnan(a), np.isnan(b))
        if a.size:
            worst = max(worst, float(np.nanmax(np.abs(a - b)) / (np.sqrt(np.mean(b * b)) + 1e-12)))
    return worst


def check(step: Step, *args: Any, tol: float = 2e-5, calls: int = 1) -> Any:
    """``step`` in ``calls`` pipelines gives what it gives in float64, and the same bits again. Returns its results."""
    pipelined = kj.pipeline(step, force=True)
    assert custom_calls(pipelined, *args) == calls
    run = jax.jit(pipelined)
    got = run(*args)
    again = run(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert errors(got, in_float64(step, *args)) < tol
    return got


def planned(step: Step, *args: Any) -> tuple[PlannedRegion, ...]:
    closed = jax.make_jaxpr(step)(*args)
    return route(capture(closed).graph, "cpu", RouteOptions(force=True)).regions


def phases(step: Step, *args: Any) -> dict[int, int]:
    """phase -> number of stream spaces, of the one region of ``step``."""
    (region,) = planned(step, *args)
    found: dict[int, int] = {}
    for phase in region.phases:
        found[phase.number] = found.get(phase.number, 0) + 1
    return found


# --- right answers ----------------------------------------------------------------------------------------------------------------


SLOW = ("sgd", "momentum", "adam", "unclipped_sgd", "rmsprop", "lion")  # what the others do not do in other words


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in OPTAX])
def test_an_optax_step_is_one_call_and_agrees_with_float64(name: str) -> None:
    p, x, y = network()
    step, state = optax_step(OPTAX[name]), OPTAX[name].init(p)
    p, state, _ = jax.jit(step)(p, state, x, y)  # moments that are not zero
    check(step, p, state, x, y, tol=2e-5)


def test_a_plain_step_is_one_call_and_agrees_with_float64() -> None:
    p, x, y = network(1)
    p, state, _ = jax.jit(plain_adamw)(p, zeros_like(p), x, y)
    check(plain_adamw, p, state, x, y)
    assert phases(plain_adamw, p, state, x, y) == {0: 1, 1: 4, 2: 1, 3: 4}


@pytest.mark.slow
def test_two_hundred_steps_stay_together_with_the_unpipelined_run() -> None:
    p, x, y = network(2)
    optimiser = OPTAX["clipped_adamw"]
    step = optax_step(optimiser)
    runs = {}
    for name, f in (("plain", jax.jit(step)), ("pipelined", jax.jit(kj.pipeline(step, force=True)))):
        q, state, losses = p, optimiser.init(p), []
        for _ in range(200):
            q, state, value = f(q, state, x, y)
            losses.append(float(value))
        runs[name] = losses
    assert runs["plain"][-1] < 0.5 * runs["plain"][0]
    np.testing.assert_allclose(runs["pipelined"], runs["plain"], rtol=1e-3)


@pytest.mark.parametrize("name", [pytest.param("momentum", marks=pytest.mark.slow), "clipped_adamw"])
def test_bfloat16_parameters_are_as_good_as_without_pipelines(name: str) -> None:
    p, x, y = network(3, jnp.bfloat16)
    step, state = optax_step(OPTAX[name]), OPTAX[name].init(p)
    want = in_float64(step, p, state, x, y)
    assert custom_calls(kj.pipeline(step, force=True), p, state, x, y) == 1
    got = jax.jit(kj.pipeline(step, force=True))(p, state, x, y)
    assert [a.dtype for a in jax.tree.leaves(got)] == [a.dtype for a in jax.tree.leaves(jax.eval_shape(step, p, state, x, y))]
    assert errors(got, want) <= 1.5 * errors(jax.jit(step)(p, state, x, y), want) + 2**-8


def test_mixed_precision_keeps_float32_masters() -> None:
    p, x, y = network(4)

    def objective(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        return loss(low, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))

    step, state = optax_step(OPTAX["adamw"], objective), OPTAX["adamw"].init(p)
    want = in_float64(optax_step(OPTAX["adamw"]), p, state, x, y)
    pipelined = kj.pipeline(step, force=True)
    assert custom_calls(pipelined, p, state, x, y) == 1
    got = jax.jit(pipelined)(p, state, x, y)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(got[0]))
    assert errors(got, want) <= 1.5 * errors(jax.jit(step)(p, state, x, y), want) + 2**-8


# --- awkward parameters -----------------------------------------------------------------------------------------------------------


def test_scalar_and_one_element_parameters() -> None:
    p, x, y = network(5)
    p |= {"scale": jnp.float32(1.1), "shift": jnp.full((1,), 0.3), "gain": jnp.full((1, 1), 0.9)}

    def objective(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((predict(p, x * p["gain"]) * p["scale"] + p["shift"] - y) ** 2)

    # The two arrays of one element are made of a scalar twice, for the norm and for the update: the updates are calls of their own.
    step = optax_step(OPTAX["clipped_adamw"], objective)
    check(step, p, OPTAX["clipped_adamw"].init(p), x, y, tol=1e-4, calls=3)


def test_a_parameter_shared_by_two_layers() -> None:
    rng = np.random.default_rng(6)
    w, x, y = (jax.device_put(np.asarray(rng.standard_normal(s) * 0.3, jnp.float32)) for s in ((7, 7), (ROWS, 7), (ROWS, 7)))

    def objective(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) @ w.T - y) ** 2)

    step = optax_step(OPTAX["adam"], objective)
    check(step, w, OPTAX["adam"].init(w), x, y)


@pytest.mark.parametrize(
    "extra", [pytest.param((0,), marks=pytest.mark.slow), (3, 0), (4,)], ids=["empty", "empty_matrix", "unused"]
)
def test_parameters_without_a_gradient_do_not_keep_the_others_out(extra: tuple[int, ...]) -> None:
    p, x, y = network(7)
    p["extra"] = jnp.full(extra, 0.5)
    step = optax_step(OPTAX["adamw"])
    state = OPTAX["adamw"].init(p)
    region, *others = planned(step, p, state, x, y)
    assert len(region.phases) == 1 + 4
    check(step, p, state, x, y, calls=1 + len(others))


def test_one_row_of_data() -> None:
    p, x, y = network(8)
    step = optax_step(OPTAX["adam"])
    check(step, p, OPTAX["adam"].init(p), x[:1], y[:1], tol=1e-4)


# --- what stands around the update ------------------------------------------------------------------------------------------------


def test_gradients_and_norms_may_be_results_too() -> None:
    def step(p: Params, x: jax.Array, y: jax.Array) -> Any:
        value, g = jax.value_and_grad(loss)(p, x, y)
        norm = optax.tree.norm(g)
        return jax.tree.map(lambda a, b: a - LR * b / (1 + norm), p, g), g, norm, value, jax.tree.map(jnp.abs, g)

    check(step, *network(9))


def test_an_update_may_read_what_another_one_wrote() -> None:
    def step(p: Params, x: jax.Array, y: jax.Array) -> Any:
        g = jax.grad(loss)(p, x, y)
        new = {"w0": p["w0"] - LR * g["w0"]}
        new["b0"] = p["b0"] - LR * (g["b0"] + new["w0"].sum())
        new["w1"] = p["w1"] - LR * (g["w1"] * new["b0"].mean())
        new["b1"] = p["b1"] - LR * g["b1"]
        return new

    args = network(10)
    check(step, *args)
    assert max(phases(step, *args)) >= 3  # the sum of one update is a barrier for the next


def test_what_waits_for_an_operator_outside_stays_outside() -> None:
    def step(p: Params, x: jax.Array, y: jax.Array) -> Any:
        g = jax.grad(loss)(p, x, y)
        median = jnp.sort(g["w0"].reshape(-1))[0]
        return {k: p[k] - LR * g[k] * (median if k == "w1" else 1.0) for k in p}

    args = network(11)
    region, *others = planned(step, *args)
    assert len(region.phases) == 1 + 3
    assert len(others) == 1  # the update that waits for the sort, as a region of its own where all are forced
    check(step, *args, calls=2)


def test_two_networks_that_are_clipped_together() -> None:
    def step(p: Params, q: Params, x: jax.Array, y: jax.Array) -> Any:
        g, h = jax.grad(loss)(p, x, y), jax.grad(loss)(q, x[:50], y[:50])
        norm = optax.tree.norm((g, h))
        return jax.tree.map(lambda a, b: a - LR * b / norm, (p, q), (g, h)), norm

    p, x, y = network(12)
    q, _, _ = network(13)
    pipelined = kj.pipeline(step, force=True)
    assert custom_calls(pipelined, p, q, x, y) >= 1
    assert errors(jax.jit(pipelined)(p, q, x, y), in_float64(step, p, q, x, y)) < 2e-5


def test_a_second_step_in_the_same_function_reads_the_new_parameters() -> None:
    def step(p: Params, x: jax.Array, y: jax.Array) -> Any:
        for _ in range(2):
            p = jax.tree.map(lambda a, b: a - LR * b, p, jax.grad(loss)(p, x, y))
        return p

    check(step, *network(14), calls=1)


def test_donated_parameters_give_the_same_bits() -> None:
    p, x, y = network(15)
    optimiser = OPTAX["adamw"]
    step = kj.pipeline(optax_step(optimiser), force=True)

    def train(donated: tuple[int, ...]) -> Any:
        f = jax.jit(step, donate_argnums=donated)
        q = jax.tree.map(jnp.array, p)
        state = jax.tree.map(jnp.array, optimiser.init(p))
        for _ in range(3):
            q, state, value = f(q, state, x, y)
        return q, state, value

    for a, b in zip(jax.tree.leaves(train((0, 1))), jax.tree.leaves(train(())), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_updates_in_a_loop_over_steps() -> None:
    p, x, y = network(16)
    optimiser = OPTAX["adam"]
    step = optax_step(optimiser)

    def train(p: Params, x: jax.Array, y: jax.Array) -> Any:
        def body(carry: Any, _: None) -> Any:
            *carry, value = step(*carry, x, y)
            return tuple(carry), value

        return jax.lax.scan(body, (p, optimiser.init(p)), None, length=3)

    check(train, p, x, y, tol=1e-4)


# --- what is decided --------------------------------------------------------------------------------------------------------------


def test_a_nerf_step_with_adam_is_pipelined_as_a_whole() -> None:
    nerf = APPS["nerf"]
    p = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in nerf.shapes.items()}
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def objective(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((nerf.function(p, x) - y) ** 2)

    x, y = (jax.ShapeDtypeStruct((8192, n), jnp.float32) for n in (63, 4))
    report = kj.explain(optax_step(optimiser, objective), platform="cpu", device="avx512-2")(
        p, jax.eval_shape(optimiser.init, p), x, y
    )
    assert len(report.regions) == 1
    assert report.coverage >= 0.9
    (region,) = report.regions
    leaves = jax.tree.leaves(p)
    elements = sum(a.size for a in leaves)
    assert [(phase.streams, phase.rows) for phase in region.later] == [(18, elements), (1, 1), (18, elements)]
    assert "phase 3" in str(report) and "phase 3" in report._repr_html_()
    # Gradients live in the call only: it gives parameters, two moments and the loss.
    assert region.bytes_out == 4 * (3 * elements + 1)


def test_a_gradient_alone_has_one_phase() -> None:
    (region,) = planned(jax.value_and_grad(loss), *network())
    assert len(region.phases) == 1


def test_an_update_streams_in_the_order_of_its_parameter() -> None:
    """The gradients of keys and values are sums of one head after the other; parameters and moments have all heads of a token."""
    tokens, heads, size = 384, 4, 32
    p = {name: jax.ShapeDtypeStruct((tokens, heads, size), jnp.float32) for name in "qkv"}

    def attention(p: Params) -> jax.Array:
        scores = jnp.einsum("qhd,khd->hqk", p["q"], p["k"]) * size**-0.5
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), p["v"])

    def step(p: Params) -> Params:
        return jax.tree.map(lambda w, g: w - LR * g, p, jax.grad(lambda p: jnp.sum(attention(p) ** 2))(p))

    graph = capture(jax.make_jaxpr(step)(p), context=RewriteContext(targets.get("cpu").capabilities)).graph
    found = route(graph, "cpu", RouteOptions(device="amx-2", force=True)).regions
    updates = [phase.region.space.sizes for call in found for phase in call.phases[1:]]
    assert updates.count((tokens, heads, size)) == 2, updates  # that of the queries is part of the first phase


def test_there_are_no_later_phases_where_the_target_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = targets.get("cuda")
    monkeypatch.setattr(cuda, "capabilities", dataclasses.replace(cuda.capabilities, runs_phases=False))
    p, x, y = network()
    graph = capture(jax.make_jaxpr(plain_adamw)(p, zeros_like(p), x, y)).graph
    assert all(len(r.phases) == 1 for r in route(graph, "cuda", RouteOptions(force=True, code=False, device="h200")).regions)


def test_what_only_the_update_reads_is_computed_with_it() -> None:
    def step(p: Params, m: Params, x: jax.Array, y: jax.Array) -> Any:
        g = jax.grad(loss)(p, x, y)
        return jax.tree.map(lambda a, b: 0.9 * a + b, m, g)

    p, x, y = network()
    (region,) = planned(step, p, p, x, y)
    assert sorted(len(phase.region.ops) for phase in region.phases[1:]) == [2, 2, 2, 2]


# --- the interpreter --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.slow), 1])
def test_the_interpreter_runs_all_phases(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    p, x, y = network(17)
    args = (p, zeros_like(p), x, y)

    def emit(region: PlannedRegion, operands: Any, avals: Any, evaluate: Any, known: Any) -> Any:
        def run(*arrays: Any) -> Any:
            return tuple(interpret(region.program, arrays, schedule_seed=seed))

        return jax.pure_callback(run, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals), *operands)

    monkeypatch.setattr(PlannedRegion, "call", emit)
    step = functools.partial(plain_adamw)  # a function of its own, so that no cache knows it
    got = jax.jit(kj.pipeline(step, force=True))(*args)
    assert errors(got, in_float64(plain_adamw, *args)) < 2e-5


# --- the format -------------------------------------------------------------------------------------------------------------------


def small_program() -> Program:
    p, x, y = network()
    (region,) = planned(plain_adamw, p, zeros_like(p), x, y)
    assert len(region.program.parts) > 1
    return region.program


def test_a_call_of_several_phases_is_valid() -> None:
    assert _cpu.validate(cpu_lower.generate(small_program(), "step")) == ""


def _edited(program: Program, part: int, **changes: Any) -> Program:
    parts = list(program.parts)
    parts[part] = dataclasses.replace(parts[part], **changes)
    return dataclasses.replace(program, parts=tuple(parts))


BROKEN: dict[str, tuple[Callable[[Program], Program], str]] = {
    "reads_what_its_own_phase_writes": (lambda p: _edited(p, 1, phase=0), "which no earlier phase writes"),
    "phases_out_of_order": (lambda p: _edited(p, 0, phase=7), "is not in 7"),
    "writes_twice": (lambda p: _edited(p, 1, writes=p.parts[0].writes[:1]), "which is there already"),
    "writes_an_operand": (lambda p: _edited(p, 1, writes=(_scalar_operand(p),)), "which is there already"),
    "another_size": (lambda p: _edited(p, 1, reads=p.parts[2].reads), ", as "),
    "fewer_arrays": (lambda p: _edited(p, 1, reads=()), "but the program wants 1"),
    "a_part_is_missing": (lambda p: dataclasses.replace(p, parts=p.parts[:-1]), "is never written"),
    "no_part": (lambda p: dataclasses.replace(p, parts=()), "is never written"),
    "an_array_too_many": (lambda p: dataclasses.replace(p, arrays=(*p.arrays, Array((3,), "float32"))), "is never written"),
}


def _scalar_operand(p: Program) -> int:
    return next(k for k in range(p.operands) if p.arrays[k] == Array((), "float32"))


@pytest.mark.parametrize("name", BROKEN)
def test_the_parser_rejects_parts_that_do_not_fit_together(name: str) -> None:
    change, message = BROKEN[name]
    with pytest.raises(cpu_errors.InvalidProgram, match=re.escape(message)):
        cpu_lower.generate(change(small_program()), "step")


def test_the_parser_survives_any_damage() -> None:
    words = cpu_lower.generate(small_program(), "step")
    rng = np.random.default_rng(0)
    for n in range(0, len(words), 97):
        assert _cpu.validate(words[:n]) != ""
    assert "checksum" in _cpu.validate(np.concatenate([words[:-1], words[-1:] ^ 1]))
    rejected = 0
    for _ in range(300):
        damaged = words.copy()
        damaged[rng.integers(4, len(words))] = rng.choice([-1, 0, 1, 2, 255, 1 << 20, 1 << 62, rng.integers(1 << 40)])
        damaged[3] = zlib.crc32(damaged[4:].astype("<i8").tobytes())
        rejected += _cpu.validate(damaged) != ""  # most words lie in a program that has a checksum of its own
    assert rejected > 200  # the others are numbers that may be anything: constants, strides that stay inside their arrays


# --- random steps -----------------------------------------------------------------------------------------------------------------


@st.composite
def random_steps(draw: Any) -> Step:
    """Steps whose updates are random elementwise functions, with sums, reads of each other and operators that stay outside."""
    choices = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=2, max_size=7))

    def step(p: Params, x: jax.Array, y: jax.Array) -> Any:
        value, g = jax.value_and_grad(loss)(p, x, y)
        names = sorted(p)
        scale = jnp.float32(1.0)
        new = dict(p)
        extra = []
        for kind, which in choices:
            k = names[which]
            u = g[k]
            if kind == 0:
                scale = 1 / (1 + jnp.sqrt(jnp.sum(u * u)))
            elif kind == 1:
                new[k] = new[k] - 0.1 * u * scale
            elif kind == 2:
                new[k] = new[k] * 0.9 + jnp.tanh(u) * jnp.mean(new[names[(which + 1) % 4]])
            elif kind == 3:
                g = {**g, k: jnp.where(jnp.abs(u) > 0.01, u, 0.5 * u)}
            elif kind == 4:
                g = {**g, k: jnp.sort(u, axis=0)}
            elif kind == 5:
                extra.append(u.astype(jnp.bfloat16).astype(jnp.float32) * scale)
            elif kind == 6:
                scale = jnp.minimum(scale, jnp.max(jnp.abs(new[k])))
            else:
                new[k] = new[k] - 0.01 * jnp.flip(u, 0)
        return new, extra, scale, value

    return step


def _check_random(step: Step) -> None:
    args = network(18)
    got = jax.jit(kj.pipeline(step, force=True))(*args)
    want = jax.jit(step)(*args)  # not float64: comparisons and sorts of nearly equal values may go the other way there
    assert errors(got, want) < 2e-2  # a rounding to bfloat16 that falls the other way is 2**-8 of an element
    for region in planned(step, *args):
        for p in region.phases:
            before = {v for other in region.phases if other.number == p.number - 1 for v in other.region.outputs}
            same = {v for other in region.phases if other.number == p.number for v in other.region.outputs}
            assert same.isdisjoint(p.region.inputs)
            assert p.number == 0 or before & set(p.region.inputs)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(random_steps())
def test_random_steps(step: Step) -> None:
    _check_random(step)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(random_steps())
def test_many_random_steps(step: Step) -> None:
    _check_random(step)
