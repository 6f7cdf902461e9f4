"""What is written and read back in ``tests/capture/test_standalone.py``: every application and every training example, small."""

from __future__ import annotations

import functools
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import grid_functions
from benchmarks.apps import APPS, DTYPES, make_case
from benchmarks.grid_cases import GridCase
from benchmarks.training import make_train_case, microbatched_step, train_step
from trust.build import build
from trust.generate import draw

Case = tuple[Callable[..., Any], tuple[Any, ...]]
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
ROWS = 300  # not a multiple of a tile


def application(name: str, dtype: str) -> Case:
    case = make_case(name, dtype, ROWS)
    return case.app.function, (case.params, case.x)


def training(name: str, dtype: str, how: Callable[..., Any] = train_step) -> Case:
    train = make_train_case(name, dtype, ROWS)
    return how(train.case.app.function), (train.state, train.case.x, train.y)


def in_blocks() -> Case:
    """With a loop over blocks of rows, whose body is pipelined on its own."""
    step, args = training("mgn", "f32", microbatched_step)

    def small_blocks(*args: Any) -> Any:
        with mock.patch("benchmarks.training.block_rows", lambda rows: 100):
            return step(*args)

    return small_blocks, args


def dlrm() -> Case:
    with mock.patch.multiple(grid_functions, DLRM_TABLES=(3, 50, 16), DLRM_BOTTOM=(13, 24, 16)):
        problem = grid_functions.make_problem(GridCase("dlrm", "train", "f32", ROWS))
    return problem.function, problem.args


def quickstart() -> Case:
    rng = np.random.default_rng(0)
    widths = (64, 96, 96, 3)
    params = [(array(rng, m, n) / m**0.5, jnp.zeros(n)) for m, n in zip(widths, widths[1:], strict=False)]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return jnp.mean((x @ w + b - y) ** 2)

    return jax.value_and_grad(loss), (params, array(rng, ROWS, 64), jnp.ones((ROWS, 3)))


def array(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jax.device_put(rng.standard_normal(shape, dtype=np.float32))


def example(name: str, *libraries: str) -> Any:
    """The module ``examples/NAME.py``, which its folder has to be on the path for. Skips the test where a library is missing."""
    for library in ("matplotlib", "rich", "optax", *libraries):
        pytest.importorskip(library)
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)


def photograph() -> Case:
    fit_image = example("fit_image", "skimage", "PIL")
    optax = importlib.import_module("optax")
    params, optimiser = fit_image.initial_params(jax.random.key(0)), optax.adam(1e-3)

    def step(params: Any, state: Any, coordinates: jax.Array, colours: jax.Array) -> Any:
        value, grads = jax.value_and_grad(fit_image.squared_error)(params, coordinates, colours)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    return step, (params, optimiser.init(params), array(rng, ROWS, 2), array(rng, ROWS, 3))


def digits_optax() -> Case:
    digits_example = example("train_digits_optax", "sklearn")
    state = digits_example.initial_state(digits_example.initial_params(jax.random.key(0), [64, 48, 48, 10]))
    return functools.partial(digits_example.train_step, dtype="bfloat16"), (state, *digits())


def digits_nnx() -> Case:
    digits_example = example("train_digits_nnx", "flax", "orbax.checkpoint", "sklearn")
    nnx = importlib.import_module("flax.nnx")
    definition, state = nnx.split(digits_example.create({"width": 32, "dtype": "float32", "seed": 0}))
    train_step = digits_example.make_train_step(digits_example.loss_fn)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(definition, state)
        loss = train_step(model, optimizer, x, y)
        return nnx.state((model, optimizer)), loss

    return step, (state, *digits())


def digits() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return array(rng, ROWS, 64), jax.device_put(np.asarray(rng.integers(0, 10, ROWS), jnp.int32))


def photograph_equinox() -> Case:
    photo_example = example("train_photo_equinox", "equinox", "skimage", "PIL")
    eqx = importlib.import_module("equinox")
    arrays, static = eqx.partition(photo_example.create({"width": 32, "seed": 0}), eqx.is_array)
    train_step = photo_example.make_train_step(photo_example.gradient_fn, "float32")

    def step(arrays: Any, x: jax.Array, y: jax.Array) -> Any:
        *state, loss = train_step(*eqx.combine(arrays, static), x, y)
        return eqx.filter(state, eqx.is_array), loss

    rng = np.random.default_rng(0)
    return step, (arrays, array(rng, ROWS, 2), array(rng, ROWS, 3))


def drawn(number: int) -> Case:
    """A random program of ``trust``, its gradient or loop included."""
    program = draw(7, number)
    built = build(program)
    return built.function(lambda f: f), built.arguments


def is_double(name: str) -> bool:
    """Does the case ask for 64 bits?"""
    kind, _, number = name.partition("-")
    return kind == "drawn" and draw(7, int(number)).dtype == "float64"


CASES: dict[str, Callable[[], Case]] = {
    **{f"{name}-{dtype}": functools.partial(application, name, dtype) for name in APPS for dtype in DTYPES},
    **{f"{name}-{dtype}-train": functools.partial(training, name, dtype) for name in APPS for dtype in DTYPES},
    "mgn-blocks-train": in_blocks,
    "dlrm-train": dlrm,
    "quickstart": quickstart,
    "fit_image": photograph,
    "digits_optax": digits_optax,
    "digits_nnx": digits_nnx,
    "photo_equinox": photograph_equinox,
    **{f"drawn-{number}": functools.partial(drawn, number) for number in range(8)},
}
