"""Capture, planning and code generation cost in proportion to the length of a network. Counted are calls, not seconds."""

from __future__ import annotations

import cProfile
import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax._compat import call_rules
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.route import RouteOptions, route
from tests.support.graphs import struct

PACKAGE = str(Path(kj.__file__).parent)
MOST = 5.0  # times the work for 4 times the layers


def blocks(params, x):
    for w, b, gain in params:
        h = jax.nn.gelu(x @ w + b)
        h = h - h.mean(-1, keepdims=True)
        x = x + h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5) * gain
    return x


def layers(n):
    return [(struct(96, 96), struct(96), struct(96))] * n, struct(4096, 96)


def gradient(params, x):
    return jax.grad(lambda p: (blocks(p, x) ** 2).mean())(params)


def training_step(params, moments, x):
    grads = gradient(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, moments), moments


def passing(params, nodes, edges, senders, receivers):
    for w1, w2, w3, w4 in params:
        edges = edges + jax.nn.gelu(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1) @ w1) @ w2
        sums = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
        nodes = nodes + jax.nn.gelu(jnp.concatenate([nodes, sums], -1) @ w3) @ w4
    return nodes


def steps(n):
    index = jax.ShapeDtypeStruct((8192,), jnp.int32)
    params = [(struct(96, 32), struct(32, 32), struct(64, 32), struct(32, 32))] * n
    return params, struct(2048, 32), struct(8192, 32), index, index


CASES = {  # a training step has the gradient in it
    "forward": (blocks, layers),
    "gradient": (gradient, layers),
    "training step": (training_step, lambda n: (layers(n)[0], layers(n)[0], layers(n)[1])),
    "message passing": (passing, steps),
    "message passing's gradient": (lambda p, *a: jax.grad(lambda p: (passing(p, *a) ** 2).mean())(p), steps),
}


# Layers of the smaller network, if not 10: below this many XLA keeps all arrays of a step, and fewer regions are compared.
FEWEST = {"training step": 20}


def calls(run):
    """Calls of this package's functions, and of built-in functions out of its code, while ``run`` runs."""
    profile = cProfile.Profile()  # in C: a hook in Python takes three times as long
    profile.runcall(run)
    own = [e for e in profile.getstats() if not isinstance(e.code, str) and e.code.co_filename.startswith(PACKAGE)]
    return sum(e.callcount + sum(c.callcount for c in e.calls or () if isinstance(c.code, str)) for e in own)


def work(name, n, target, device):
    f, arguments = CASES[name]
    closed = jax.make_jaxpr(f)(*arguments(n))
    return calls(lambda: route(capture(closed).graph, target, RouteOptions(device=device, code=target == "cpu")))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("training step", "message passing's gradient") else ()) for n in CASES]
)
def test_four_times_the_layers_are_at_most_five_times_the_work(name):
    work(name, 1, "cpu", "avx512-2")  # whatever is worked out once
    few, many = (work(name, n * FEWEST.get(name, 10), "cpu", "avx512-2") for n in (1, 4))
    assert few < many <= MOST * few


@pytest.mark.parametrize("name", [pytest.param("forward", marks=pytest.mark.slow), "gradient"])
def test_so_they_are_on_a_gpu(name):
    work(name, 1, "cuda", "h200")
    few, many = (work(name, n, "cuda", "h200") for n in (10, 40))
    assert few < many <= MOST * few


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_is_as_it_was_behind_a_lowering(was_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off while a plan is made, which costs a fifth less; behind it, and behind an error, it is on if it was on."""
    seen: list[bool] = []
    made = lowering.pipelined_jaxpr

    def watched(*args: Any) -> Any:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise RuntimeError("planted")
        return made(*args)

    monkeypatch.setattr(lowering, "pipelined_jaxpr", watched)
    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        jax.jit(kj.pipeline(lambda x: jnp.tanh(x) * 2)).lower(jnp.ones((8, 4)))
        assert gc.isenabled() == was_on
        with pytest.raises(RuntimeError, match="planted"):
            jax.jit(kj.pipeline(lambda x: jnp.tanh(x) * 3, strict=True)).lower(jnp.ones((8, 4)))
        assert gc.isenabled() == was_on and seen == [False, False]
    finally:
        gc.enable() if before else gc.disable()


def test_rules_of_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the same equations, on the same lines of the user, as if each was traced for itself."""
    f = kj.pipeline(lambda p, x: blocks(p, x))
    rule, ran = call_rules.ad.primitive_jvps[jax.lax.tanh_p], list[int]()

    def counted(*args: Any, **params: Any) -> Any:
        ran.append(1)
        return rule(*args, **params)

    def traced() -> str:
        ran.clear()
        jax.clear_caches()
        made = jax.make_jaxpr(lambda p, x: jax.grad(lambda p: (f(p, x) ** 2).mean())(p))(*layers(6))
        return str(made.pretty_print(source_info=True, name_stack=True))

    monkeypatch.setitem(call_rules.ad.primitive_jvps, jax.lax.tanh_p, counted)
    shared, once = traced(), len(ran)
    monkeypatch.setattr(call_rules, "_with_equal_equations", lambda call_jaxpr: call_jaxpr)
    assert traced() == shared and len(ran) == 6 and once == 1


def _inner(x: int) -> int:
    return x + 1


def _loop() -> int:
    return sum(_inner(x) for x in range(1000))


def _faults_below(depth: int, run: Callable[[], int]) -> int:
    """Page faults of ``run`` below ``depth`` calls."""
    if depth:
        return _faults_below(depth - 1, run)
    run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_frames_have_room_at_any_depth() -> None:
    """A call at the end of a chunk of frames maps a new chunk: without room some depth has a fault in every call."""
    roomy = _compat.with_room_for_frames(_loop)
    assert roomy() == 500_500 and roomy.__name__ == "_loop"
    assert max(_faults_below(depth, roomy) for depth in range(150)) < 200


def test_room_for_frames_hands_on_arguments_and_errors() -> None:
    @_compat.with_room_for_frames
    def divided(x: int, *, by: int) -> float:
        return x / by

    assert divided(6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        divided(1, by=0)
