"""XLA moves no data in front of our calls: between the user's arrays and a call stand reshapes and constants, and nothing else.

What moves elements or rounds them (``MOVES``) is sought backwards from each operand of each call, in the module that JAX hands to
XLA, and forwards from each result. Other operators compute, and are the program's own. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks import gpu_model
from benchmarks.graphs.apps import GRAPH_APPS, case_of
from benchmarks.sequences.apps import SEQUENCE_APPS
from benchmarks.training import initial_state, train_step
from kitsune_jax.targets.cuda import compile, hostcc, lower, runtime

pytestmark = pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or "")
MOVES = {
    *(
        "bitcast_convert",
        "broadcast_in_dim",
        "concatenate",
        "constant",
        "convert",
        "dynamic_slice",
        "iota",
        "pad",
        "reduce_precision",
    ),
    *("reshape", "reverse", "select", "slice", "transpose"),
}
FREE = {"constant", "reshape"}  # the table of the packing kernel and numbers of the program; another name for the same bytes
HALF = jnp.bfloat16


def calls_in(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                op = inner.operation
                if op.name == "stablehlo.custom_call" and runtime.TARGET_NAME in str(op.attributes["call_target_name"]):
                    yield op
                yield from calls_in(op)


def kind_of(op: Any, functions: dict[str, set[str]]) -> set[str]:
    """The operators that ``op`` is, or those in the function that it calls; empty if one of them computes."""
    name = getattr(op, "name", "").removeprefix("stablehlo.")
    found = functions[str(op.attributes["callee"]).removeprefix("@")] if name == "func.call" else {name}
    return found if found <= MOVES else set()


def moves_before(value: Any, functions: dict[str, set[str]]) -> set[str]:
    owner = getattr(value.owner, "operation", value.owner)
    found = kind_of(owner, functions)
    return found.union(*(moves_before(v, functions) for v in owner.operands)) if found else set()


def moves_after(value: Any, functions: dict[str, set[str]]) -> set[str]:
    found = set[str]()
    for use in value.uses:
        op = getattr(use.owner, "operation", use.owner)
        if kinds := kind_of(op, functions):
            found |= kinds.union(*(moves_after(v, functions) for v in op.results))
    return found


def moves(f: Callable[..., Any], args: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, set[str], set[str]]:
    """The number of calls, and what is moved in front of them and behind them, but for what is free."""
    monkeypatch.setattr(compile, "emulated", lambda source, sm: b"\x7fELF")
    monkeypatch.setattr(compile, "emulator_library", lambda: "")
    monkeypatch.setattr(runtime, "use_emulator", lambda path: None)
    pipelined = kj.pipeline(f, target="emulator", force=True)
    module = jax.jit(pipelined).trace(*args).lower().compiler_ir("stablehlo")
    calls = list(calls_in(module.operation))
    functions = {f.name.value: {op.operation.name.removeprefix("stablehlo.") for op in f.entry_block} for f in module.body}
    functions = {name: kinds - {"func.return"} for name, kinds in functions.items()}
    before = set[str]().union(*(moves_before(v, functions) for call in calls for v in call.operands))
    after = set[str]().union(*(moves_after(v, functions) for call in calls for v in call.results))
    return len(calls), before - FREE, after - FREE


def nerf() -> tuple[Callable[..., Any], Any]:
    return gpu_model._of_rows("nerf", HALF, 1000)


def nerf_training() -> tuple[Callable[..., Any], Any]:
    network, (params, x) = nerf()
    state = jax.eval_shape(lambda p: initial_state(p, np.random.default_rng(0)), params)
    return train_step(network), (state, x, jax.eval_shape(network, params, x))


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


HEADS = (jax.ShapeDtypeStruct((2, 256, 4, 64), HALF),) * 3


def attention_gradient() -> tuple[Callable[..., Any], Any]:
    return jax.grad(lambda *qkv: attention(*qkv).astype(jnp.float32).sum(), (0, 1, 2)), HEADS


def application(name: str) -> tuple[Callable[..., Any], Any]:
    """Its function, and its arguments as shapes: making the arrays costs XLA a program for every shape."""
    functions = list[Callable[..., Any]]()

    def arguments() -> tuple[Any, ...]:
        case = case_of({**GRAPH_APPS, **SEQUENCE_APPS}[name], "bf16", 256)
        functions.append(case.function)
        return case.params, *case.inputs

    shapes = jax.eval_shape(arguments)
    return functions[0], shapes


# What XLA still moves in front of calls: a weight of several operands is cut into one for each (`capture/rewrites/products.py`),
# the two of a recurrent cell become one, and a bias of one column is repeated for each row. A region reads what is made of them as
# any other array.
APPLICATIONS: dict[str, tuple[Callable[[], tuple[Callable[..., Any], Any]], set[str], set[str]]] = {
    "NeRF": (nerf, set(), set()),
    "training of NeRF": (nerf_training, {"slice"}, set()),
    "attention": (lambda: (attention, HEADS), set(), set()),
    "the gradient of attention": (attention_gradient, set(), set()),
    "MeshGraphNets": (lambda: application("meshgraphnets"), {"broadcast_in_dim", "slice"}, set()),
    "DLRM": (lambda: application("dlrm"), set(), set()),
    "LSTM": (lambda: application("lstm_256"), {"concatenate"}, set()),
}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_xla_moves_nothing_in_front_of_the_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, allowed, allowed_behind = APPLICATIONS[name]
    count, before, behind = moves(*made(), monkeypatch)
    assert count > 0
    assert (before, behind) == (allowed, allowed_behind)


def test_weights_that_xla_packs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what packs them again, transposes, pads and slices."""

    def call(target: str, code: Any, program: Any, args: Any, avals: Any, evaluate: Any) -> Any:
        transposed = [jnp.pad(a.T, ((0, 1), (0, 0)))[:-1].T if a.ndim == 2 else a for a in args]
        return honest(target, code, program, transposed, avals, evaluate)

    honest = lower.call
    monkeypatch.setattr(lower, "call", call)
    _, before, _ = moves(*nerf(), monkeypatch)
    assert {"transpose", "pad", "slice"} <= before
