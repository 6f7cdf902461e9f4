"""Every kernel that the planner makes of an application is compiled by NVRTC for Hopper: of inference and of a training step, in
each dtype, as the planner chooses and with all that can be a pipeline.

Applications are those of the benchmarks, which are the examples' networks at full size, and the networks of the other examples.
Nothing runs here, and no GPU is needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from benchmarks import gpu_model
from benchmarks.apps import APPS
from benchmarks.graphs.apps import GRAPH_APPS, example
from benchmarks.sequences.apps import PLANNED_APPS, SEQUENCE_APPS
from kitsune_jax.errors import NotPipelined
from kitsune_jax.frontend import lowering
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from scripts.gpu import cases
from tests.support.cuda_run import kernel_cache  # noqa: F401  (a fixture)
from tests.support.draws import drawn_by_numpy
from tests.support.graphs import struct

pytestmark = [
    pytest.mark.skipif(not (nvrtc.available() and runtime.available()), reason="needs NVRTC and the CUDA extension"),
    pytest.mark.usefixtures("kernel_cache"),
]

MODES, DTYPES = ("infer", "train"), ("float32", "bfloat16", "float16")
BENCHMARKS = {**APPS, **GRAPH_APPS, **SEQUENCE_APPS, **PLANNED_APPS}
# The sizes of the device check; of other applications the largest that the benchmarks measure.
SIZES = {
    name: int(rows)
    for name, dtype, rows in [case.split()[-3:] for case in (*cases.CASES, *cases.LATER) if len(case.split()) > 2]
    if name in BENCHMARKS and dtype in ("f32", "bf16")
}
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def drawn(initial_params: Callable[..., Any], *sizes: Any) -> Any:
    return jax.eval_shape(lambda key: initial_params(key, *sizes), jax.random.key(0))


def fit_image() -> Made:
    module = example("fit_image")
    return module.network, (drawn(module.initial_params), struct(65_536, 2))


def nerf_rays() -> Made:
    module = example("nerf")
    sizes, rays = module.FULL, struct(module.FULL.rays, 3)
    network = functools.partial(module.network, sizes=sizes)
    return network, (drawn(module.initial_params, sizes), rays, rays, struct(sizes.rays, sizes.points))


def kernel_fusion() -> Made:
    module = example("kernel_fusion")
    sizes, count = module.FULL, len(module.KERNELS)
    params = drawn(module.initial_params, sizes, sizes.landmarks)
    kernels = [(struct(sizes.landmarks, 64), struct(sizes.landmarks, sizes.landmarks))] * count
    return module.network, (params, struct(sizes.batch, 64), kernels, struct(sizes.batch, count))


def neural_ode() -> Made:
    module = example("neural_ode")
    sizes = module.FULL
    return lambda params, first: module.solve(params, first, sizes.steps), (
        drawn(module.initial_params, sizes),
        struct(sizes.trajectories, 2),
    )


def digits() -> Made:
    module = example("train_digits_optax")
    return module.logits, (drawn(module.initial_params, (64, 256, 256, 10)), struct(1500, 64))


def photo_equinox() -> Made:
    import equinox as eqx

    module = example("train_photo_equinox")
    with drawn_by_numpy():
        params, static = eqx.partition(module.CoordinateNetwork(256, 6, key=jax.random.key(0)), eqx.is_inexact_array)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), (jax.eval_shape(lambda: params), struct(65_536, 2))


EXAMPLES = {f.__name__: f for f in (fit_image, nerf_rays, kernel_fusion, neural_ode, digits, photo_equinox)}
NEEDS = {"neural_ode": ("diffrax",), "photo_equinox": ("equinox", "skimage"), "fit_image": ("skimage",), "digits": ("sklearn",)}


def made(name: str, mode: str, dtype: str) -> Made:
    """The function of an application, or its training step, and the shapes of its arguments."""
    for needed in ("matplotlib", "optax", "rich", "PIL", *NEEDS.get(name, ())):
        pytest.importorskip(needed)
    if name in BENCHMARKS:
        app = BENCHMARKS[name]
        rows = SIZES.get(name) or max(app.default_rows("cuda", mode))
        return gpu_model.function_of(name, mode, jnp.dtype(dtype), rows)
    network, arguments = EXAMPLES[name]()
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), arguments)

    def loss(params: Any, *inputs: Any) -> jax.Array:
        return jnp.mean(network(params, *inputs).astype(jnp.float32) ** 2)

    return network if mode == "infer" else jax.value_and_grad(loss), arguments


def programs() -> list[tuple[str, str, str]]:
    """Simulators are of float32 only, and a token is not trained with."""
    found = []
    for name, mode, dtype in itertools.product([*BENCHMARKS, *EXAMPLES], MODES, DTYPES):
        app = BENCHMARKS.get(name)
        if app is not None and not app.default_rows("cuda", mode):
            continue
        if dtype == "float32" or len(getattr(app, "dtypes", DTYPES)) > 1:
            found.append((name, mode, dtype))
    return found


FAST = {
    ("transformer_layer", "infer", "float32"),  # queries of two halves, which two loops over the keys read
    ("attention", "infer", "float16"),
    ("mgn", "infer", "bfloat16"),
    ("lstm_16", "infer", "bfloat16"),
    ("digits", "train", "float32"),
}


# In float32 a tile of 64 rows by 512 landmarks takes 128 KiB of shared memory, and its gradient as much again: no region of the
# step has a kernel. One that gets a kernel must leave this list.
LEFT_TO_XLA = {("kernel_fusion", "train", "float32")}


def zeros_for_callback(_: Callable[..., Any], results: Any, *arguments: Any) -> Any:
    """In place of ``jax.pure_callback``, by which diffrax raises errors: JAX lowers a call of Python only for its own backend."""
    return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), results)


@pytest.mark.parametrize("force", [None, pytest.param(True, marks=pytest.mark.slow)], ids=["chosen", "all"])
@pytest.mark.parametrize("name, mode, dtype", [pytest.param(*p, marks=() if p in FAST else pytest.mark.slow) for p in programs()])
def test_every_planned_kernel_compiles(
    name: str, mode: str, dtype: str, force: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that does not compile is an error, and no fallback, where lowering is strict."""
    function, arguments = made(name, mode, dtype)
    found, real = set[str](), compilers.cubin

    def cubin(source: str, arch: str) -> compilers.Compiled:
        assert arch == "sm_90a"
        compiled = real(source, arch)
        found.add(source)
        return compiled

    monkeypatch.setattr(compilers, "cubin", cubin)
    monkeypatch.setattr(jax, "pure_callback", zeros_for_callback)
    lowering._routed.cache_clear()  # another test of this process may have lowered the same application
    traced = jax.jit(kj.pipeline(function, strict=True, force=force)).trace(*arguments)
    if (name, mode, dtype) in LEFT_TO_XLA:
        with pytest.raises(NotPipelined):
            traced.lower(lowering_platforms=("cuda",))
        return
    traced.lower(lowering_platforms=("cuda",))
    assert not force or found - {lower.PACKER}  # each of them can be pipelined in part


def test_the_programs_are_those_of_every_application() -> None:
    assert {name for name, _, _ in programs()} == {*BENCHMARKS, *EXAMPLES}
    assert set(programs()) >= FAST and SIZES["gat"] == 1_000_000
