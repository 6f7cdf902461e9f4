"""A Graph stands alone: written here, read, planned, lowered and run in another process, it gives the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from benchmarks.apps import APPS, DTYPES
from kitsune_jax import _compat
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.graph import Graph
from reference.standalone import as_function, captured_for, from_json, to_json, write
from tests.support.checks import arrays, custom_calls, enable_x64
from tests.support.cuda_run import kernel_cache as kernel_cache
from tests.support.standalone_cases import CASES, is_double

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODES = ("forced", "modelled")


def flat(name: str) -> tuple[Any, list[Any]]:
    """The case as a function of arrays to a list of arrays, and the arrays."""
    f, args = CASES[name]()
    leaves, tree = jax.tree.flatten(args)
    return lambda *leaves: jax.tree.leaves(f(*jax.tree.unflatten(tree, leaves))), [np.asarray(x) for x in leaves]


def precision(name: str) -> contextlib.AbstractContextManager[Any]:
    return enable_x64() if is_double(name) else contextlib.nullcontext()


def mlp(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) * 2, jnp.sort(x)


X, W = arrays(1, (70, 32), (32, 16))


def send(path: pathlib.Path, closed: Any, target: str, force: bool, args: Sequence[Any]) -> None:
    captured, consts = captured_for(closed, target, force=force, strict=True)
    path.write_text(json.dumps([target, force, write(captured)]))
    path.with_suffix(".in").write_bytes(pickle.dumps([np.asarray(x) for x in (*consts, *args)]))


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: pathlib.Path) -> pathlib.Path:
    """The folder in which another process has evaluated every case that is tested; it has not seen the functions."""
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {(case.get("name"), case.get("mode")) for case in cases}
    folder = tmp_path_factory.mktemp("graphs")
    for name in CASES:
        modes = [mode for mode in MODES if (name, mode) in asked]
        if not modes:
            continue
        with contextlib.suppress(pytest.skip.Exception), precision(name):
            f, args = flat(name)
            closed = jax.make_jaxpr(f)(*args)
            for mode in modes:
                send(folder / f"{name}-{mode}.json", closed, "cpu", mode == "forced", args)
    send(folder / "mlp-emulator.json", jax.make_jaxpr(mlp)(X, W), "emulator", True, (X, W))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "tests.support.standalone_process", str(folder)], env=env, check=True, timeout=900)
    return folder


def check(path: pathlib.Path, pipelined: Any, args: Sequence[Any]) -> tuple[int, int]:
    """The other process has given the bits of ``pipelined``. Returns how many custom calls its program has, and how many ours."""
    error = path.with_suffix(".error")
    assert not error.exists(), error.read_text()
    lowered = jax.jit(pipelined).lower(*args)
    want = [np.asarray(x) for x in lowered.compile()(*args)]
    got = pickle.loads(path.with_suffix(".out").read_bytes())
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in want]
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
    return int(path.with_suffix(".calls").read_text()), lowered.as_text().count("@kitsune_")


def is_fast(name: str) -> bool:
    """Of the applications one in each dtype, another one for training; half of the drawn programs; all others."""
    app, _, rest = name.partition("-")
    if app == "drawn":
        return int(rest) % 2 == 0
    dtype, _, train = rest.partition("-")
    if app not in APPS or dtype not in DTYPES:
        return True
    return (list(APPS).index(app) + list(DTYPES).index(dtype)) % len(APPS) == bool(train)


@pytest.mark.sampled(4, mode="forced")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if is_fast(name) else pytest.mark.slow) for name in CASES])
def test_another_process_gives_the_same_bits(name: str, mode: str, elsewhere: pathlib.Path) -> None:
    path = elsewhere / f"{name}-{mode}.json"
    if not path.exists():
        pytest.skip("a library of this example is not installed")
    with precision(name):
        f, args = flat(name)
        theirs, ours = check(path, kj.pipeline(f, force=mode == "forced"), args)
    if name.startswith("drawn"):  # JAX writes a function that is called twice once
        assert (theirs > 0) == (ours > 0)
    else:
        assert theirs == ours and (ours > 0 or mode == "modelled")


def test_kernels_for_a_gpu_do_so_too(elsewhere: pathlib.Path) -> None:
    assert check(elsewhere / "mlp-emulator.json", kj.pipeline(mlp, force=True, target="emulator"), (X, W)) == (1, 1)


# --- what a text holds ------------------------------------------------------------------------------------------------------------


def again(f: Any, *args: Any) -> tuple[Graph, list[Any]]:
    """The Graph of ``f``, written and read, and the results of its function."""
    closed, consts = _compat.hoist_consts(jax.make_jaxpr(f)(*args))
    text = write(capture(closed))
    graph = from_json(text)
    assert to_json(graph) == text
    return graph, jax.jit(as_function(graph, "cpu", strict=True))(*consts, *args)


def bits(x: Any) -> tuple[Any, ...]:
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return str(x.dtype), x.shape, np.asarray(x).tobytes()


TABLE = np.arange(6, dtype=np.float32)
VALUES: dict[str, tuple[Any, ...]] = {
    "not a number": (
        lambda x: (jnp.where(x > 0, x, np.nan), jnp.minimum(x, np.inf), jnp.maximum(x, -np.inf)),
        arrays(2, (3, 6))[0],
    ),
    "bfloat16": (lambda x: (x * 1.5 + jnp.bfloat16(np.inf)) - x, jnp.arange(6, dtype=jnp.bfloat16)),
    "int4": (lambda x: (x.astype(jnp.int4), x.astype(jnp.uint4) + jnp.uint4(1)), jnp.arange(6.0)),
    "float8": (lambda x: x.astype(jnp.float8_e4m3fn) * jnp.float8_e4m3fn(0.5), jnp.arange(6.0)),
    "complex": (lambda x: jnp.fft.fft(x) * (1 + 2j), jnp.arange(6.0)),
    "keys": (lambda k, x: (jax.random.split(k), x + jax.random.normal(k, x.shape)), jax.random.key(3), jnp.arange(6.0)),
    "rbg keys": (lambda k: jax.random.split(k), jax.random.key(3, impl="rbg")),
    "constants": (lambda x: lax.sort(x) + TABLE, jnp.arange(6.0)),
    "a loop": (lambda x: lax.scan(lambda c, r: (jnp.sin(c) * r, c), x[0], x), arrays(3, (5, 4))[0]),
    "a branch": (lambda x: lax.cond(x[0] > 1, jnp.sin, lambda x: x * 2, x), jnp.arange(6.0)),
    "a barrier": (jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x))))), jnp.arange(6.0)),
    "linear algebra": (lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(5)), arrays(4, (5, 4))[0]),
    "nothing": (lambda x: jnp.sort(x)[:, :0], arrays(5, (5, 4))[0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_every_kind_survive(name: str) -> None:
    f, *args = VALUES[name]
    _, outs = again(f, *args)
    assert list(map(bits, outs)) == [bits(x) for x in jax.tree.leaves(jax.jit(f)(*args))]


def test_arguments_that_an_opaque_op_does_not_read() -> None:
    def f(x: Any, unused: Any) -> Any:
        return lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], lax.cond(
            x[0] > 0, lambda x, y: x, lambda x, y: -x, x, unused
        )

    graph, outs = again(f, jnp.arange(3.0), jnp.ones(7))
    assert any(op.kind == "opaque" and len(op["operands"]) < len(op.inputs) for op in graph.ops)
    np.testing.assert_array_equal(outs[0], [0, 8, 16])


def test_pipelines_in_loops_are_written_for_their_target_only_where_they_were_asked_for() -> None:
    def f(x: Any, w: Any, last: Any = jnp.sort) -> Any:  # which leaves the loop to XLA
        return lax.scan(lambda c, _: (last(jnp.tanh(jnp.tanh(c @ w) @ w.T)), None), x, None, length=3)[0]

    closed = jax.make_jaxpr(f)(X, W)
    with_calls = as_function(from_json(write(captured_for(closed, "cpu", force=True)[0])), "cpu")
    assert custom_calls(with_calls, X, W) == custom_calls(kj.pipeline(f, force=True), X, W) == 1
    assert custom_calls(as_function(again(f, X, W)[0], "cpu", force=True), X, W) == 0
    whole = again(lambda x, w: f(x, w, jnp.sin), X, W)[0]  # a loop that is a pipeline itself needs no other process to be one
    assert custom_calls(as_function(whole, "cpu", force=True), X, W) == 1


def test_it_is_a_function_of_arrays() -> None:
    function = as_function(again(mlp, X, W)[0], "cpu")
    want = mlp(X, W)
    for run in (function, jax.jit(function)):
        for got, ref in zip(run(X, W), want, strict=True):
            np.testing.assert_allclose(got, ref, rtol=1e-5, atol=1e-6)


# --- what cannot be written or read -----------------------------------------------------------------------------------------------


def prints(x: Any) -> Any:
    jax.debug.print("x {}", x[0])
    return jnp.sin(x)


def updates(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[0] = 1.0
    return ref[...]


def calls_back(x: Any) -> Any:
    return jax.pure_callback(np.sin, x, x) * 2


@pytest.mark.parametrize("f,why", [(prints, "side effects"), (updates, "side effects"), (calls_back, "callback")])
def test_an_op_that_cannot_be_written_is_named(f: Any, why: str) -> None:
    captured = capture(jax.make_jaxpr(f)(jnp.ones(3)))
    with pytest.raises(ValueError, match=rf"test_standalone.py:\d+ \({f.__name__}\)\) cannot be written: .*{why}"):
        write(captured)


def test_a_collective_cannot_be_written() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def local(x: Any) -> Any:
        seen.append(capture(jax.make_jaxpr(lambda x: lax.psum(jnp.sin(x), "d"))(x)))
        return x

    spec = jax.sharding.PartitionSpec("d")
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)).lower(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"psum.* \(test_standalone.py:\d+ .*cannot be written"):
        write(seen[0])


@pytest.mark.parametrize("f", [jnp.sort, jnp.sin])
def test_symbolic_shapes_cannot_be_written(f: Any) -> None:
    (n,) = jax.export.symbolic_shape("n")
    traced = jax.jit(lambda x: f(x)).trace(jax.ShapeDtypeStruct((n,), jnp.float32))
    with pytest.raises(ValueError, match=rf"{f.__name__} \(test_standalone.py:\d+ .*symbolic"):
        write(capture(traced.jaxpr))


def test_a_graph_that_was_only_dumped_can_be_planned_but_not_run() -> None:
    graph = from_json(to_json(capture(jax.make_jaxpr(mlp)(X, W)).graph))
    with pytest.raises(
        ValueError, match=r"sort \(test_standalone.py:\d+ \(mlp\)\) is opaque and carries no code for the platform cpu"
    ):
        as_function(graph, "cpu")


def test_a_graph_written_for_another_platform_is_refused() -> None:
    graph = from_json(write(capture(jax.make_jaxpr(mlp)(X, W)), platforms=("cuda",)))
    with pytest.raises(ValueError, match="no code for the platform cpu"):
        as_function(graph, "cpu")


def test_64_bits_have_to_be_switched_on() -> None:
    with enable_x64():
        graph, outs = again(lambda x: jnp.sort(x) * 2, jnp.arange(3.0))
        assert outs[0].dtype == np.float64
    with pytest.raises(ValueError, match="float64: call jax.config.update.*jax_enable_x64"):
        as_function(graph, "cpu")


def test_a_target_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'tpu'"):
        as_function(again(mlp, X, W)[0], "tpu")


def test_a_text_that_makes_no_sense_is_refused() -> None:
    text = to_json(again(mlp, X, W)[0]).replace('[[70,16],"float32",null]', '[[71,16],"float32",null]', 1)
    with pytest.raises(ValueError, match="dot_general"):
        as_function(from_json(text), "cpu")
