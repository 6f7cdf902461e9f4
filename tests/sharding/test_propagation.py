"""What is divided along which axes between pipelined functions and behind them: as with ``jax.jit``, whatever the arguments are."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax.sharding.by_xla import bytes_sent, collectives
from tests.support.checks import close, count, in_float64
from tests.support.sharded_programs import PROGRAMS

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax")  # a fall-back to plain HLO is a failure here

AXES = {"data": 4, "model": 2}


def compiled(function: Any, args: Any, specs: Any, donate: tuple[int, ...] = ()) -> tuple[Any, list[Any]]:
    on = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2)
    placed = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(args, specs, strict=True)]
    return jax.jit(function, donate_argnums=donate).lower(*placed).compile(), placed


def divided_as_with_jit(ours: Any, plain: Any) -> bool:
    """``ours``, ``plain``: two compilations."""
    pairs = zip(jax.tree.leaves(ours.output_shardings), jax.tree.leaves(plain.output_shardings), strict=True)
    return all(mine.spec == other.spec for mine, other in pairs)


def any_spec(rng: random.Random, shape: tuple[int, ...]) -> Any:
    """A random division of an array of that shape, in parts of equal size."""
    dims = [()] * len(shape)
    for axis, size in AXES.items():
        d = rng.randrange(-1, len(shape))
        if d >= 0 and shape[d] % (size * int(np.prod([AXES[a] for a in dims[d]], dtype=int))) == 0:
            dims[d] = (*dims[d], axis)
    return P(*(axes or None for axes in dims))


@pytest.mark.parametrize(
    "name",
    [
        "data parallel",
        "gradient of tensor parallel",
        "train step",
        "gradient of attention over queries",
        "layer, tensor parallel",
        "gradient of layers, recomputed",
        "gradient of graph attention",
        "gradient of tables by row",
        "a token decoded",
        "gradient of recurrent, gates",
        "three products as one",
        "cumulative rows",
    ],
)
def test_any_division_of_the_arguments_divides_the_results_as_with_jit(name: str) -> None:
    program, rng = PROGRAMS[name], random.Random(name)
    for _ in range(2):
        specs = [any_spec(rng, np.shape(x)) for x in program.args]
        ours, _ = compiled(kj.pipeline(program.function, force=True, strict=True), program.args, specs)
        plain, _ = compiled(program.function, program.args, specs)
        assert count(ours.as_text()) > 0
        assert divided_as_with_jit(ours, plain), f"{specs}: {ours.output_shardings}, and with jit {plain.output_shardings}"


def test_a_function_that_is_called_twice_divides_each_result_for_itself() -> None:
    """The inner function is lowered once."""

    def network(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    def twice(f: Any) -> Any:
        return lambda x, y, w: (f(x, w), f(y, w))

    x, w = PROGRAMS["data parallel"].args[:2]
    specs = P("data"), P("model"), P()
    ours, placed = compiled(twice(jax.jit(kj.pipeline(network, force=True, strict=True))), (x, x, w), specs)
    assert [found.spec for found in ours.output_shardings] == [P("data"), P("model")]
    assert not sum(collectives(ours.as_text()).values())
    close(ours(*placed), in_float64(twice(network), x, x, w))


def test_a_whole_bias_of_divided_columns_has_a_divided_gradient() -> None:
    program = PROGRAMS["gradient of tensor parallel"]
    specs = P("data"), P(None, "model"), P(), P("model")
    ours, placed = compiled(kj.pipeline(program.function, force=True, strict=True), program.args, specs)
    plain, _ = compiled(program.function, program.args, specs)
    _, _, bias, _ = ours.output_shardings
    assert bias.spec == P("model") and divided_as_with_jit(ours, plain)
    assert bytes_sent(ours.as_text()) <= 1.001 * bytes_sent(plain.as_text())
    close(ours(*placed), in_float64(program.function, *program.args, by_xla=True))


def decode(x: Any, keys: Any, values: Any, at: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> tuple[Any, Any, Any]:
    """A token through the attention of a layer, and its caches (batch, heads, keys, features) with the token."""
    q, key, value = ((x @ w).reshape(x.shape[0], 1, -1, 16).transpose(0, 2, 1, 3) for w in (wq, wk, wv))
    keys, values = (jax.lax.dynamic_update_slice_in_dim(c, new, at, 2) for c, new in ((keys, key), (values, value)))
    scores = jnp.where(jnp.arange(keys.shape[2]) <= at, jnp.einsum("bhqd,bhkd->bhqk", q, keys), -1e30)
    found = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), values)
    return found.transpose(0, 2, 1, 3).reshape(x.shape) @ wo, keys, values


@pytest.mark.parametrize(
    ("cache", "columns", "rows"),
    [
        (P(None, "model"), P(None, "model"), P("model")),
        (P(None, "model", "data"), P(None, "model"), P("model")),
        (P("model", None, "data"), P(), P()),
        (P(), P(None, "model"), P("model")),
    ],
    ids=["heads", "heads and keys", "batch and keys", "only the weights"],
)
def test_updated_caches_are_divided_as_with_jit(cache: Any, columns: Any, rows: Any) -> None:
    rng = np.random.default_rng(3)
    shapes = (4, 1, 128), (4, 8, 64, 16), (4, 8, 64, 16), *((128, 128),) * 4
    x, *arrays = (rng.standard_normal(shape).astype(np.float32) * 0.1 for shape in shapes)
    args = x, *arrays[:2], np.int32(37), *arrays[2:]
    specs = P(), cache, cache, P(), columns, columns, columns, rows
    ours, placed = compiled(kj.pipeline(decode, force=True, strict=True), args, specs, donate=(1, 2))
    plain, _ = compiled(decode, args, specs, donate=(1, 2))
    assert count(ours.as_text()) > 0
    assert divided_as_with_jit(ours, plain)
    assert collectives(ours.as_text()) == collectives(plain.as_text())
    assert bytes_sent(ours.as_text()) <= 1.001 * bytes_sent(plain.as_text())
    memory = [found.memory_analysis() for found in (ours, plain)]
    assert memory[0].temp_size_in_bytes <= memory[1].temp_size_in_bytes + 4096
    assert memory[0].alias_size_in_bytes == memory[1].alias_size_in_bytes
    close(ours(*placed), in_float64(decode, *args))


def test_a_cache_stays_where_it_is_where_its_row_is_divided_along_the_same_axis() -> None:
    """The row is gathered, which is less."""
    program = PROGRAMS["a token decoded"]
    specs = P(), P(None, None, "model"), P("model"), P("model"), P(None, "model"), P()
    ours, placed = compiled(kj.pipeline(program.function, force=True, strict=True), program.args, specs)
    plain, _ = compiled(program.function, program.args, specs)
    assert divided_as_with_jit(ours, plain)
    assert bytes_sent(ours.as_text()) <= 1.001 * bytes_sent(plain.as_text())
    close(ours(*placed), in_float64(program.function, *program.args))


def test_no_shard_map_hands_xlas_partitioner_what_it_cannot_divide() -> None:
    """It would end the process, with this package's product by segment: the operators beside a call are gone before it runs."""
    program, on = PROGRAMS["multiplied up"], jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    args = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(program.args, (P("z", "y"), P()), strict=True)]

    def compiled_inside(f: Any) -> Any:
        inside = jax.shard_map(f, mesh=on, in_specs=(P(), P()), out_specs=P(), axis_names={"x"}, check_vma=False)
        return jax.jit(inside).lower(*args).compile()

    ours = compiled_inside(kj.pipeline(program.function, force=True, strict=True))
    plain = compiled_inside(program.function)
    assert divided_as_with_jit(ours, plain)
    assert bytes_sent(ours.as_text()) <= bytes_sent(plain.as_text())
    close(ours(*args), in_float64(program.function, *program.args))


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("gradient of two products as one", (P(), P("model"), P(None, "model"))),
        ("layers, fully sharded", (P(None, "data", "model"), P(None, None, "data"), P(None, None, ("data", "model")), *(P(),) * 4)),
    ],
)
def test_an_operand_that_is_less_than_the_result_of_its_product_is_gathered(name: str, specs: Any) -> None:
    """The other operand is whole where this one is contracted. In parts, the result would be summed over the devices."""
    program = PROGRAMS[name]
    ours, placed = compiled(kj.pipeline(program.function, force=True, strict=True), program.args, specs)
    plain, _ = compiled(program.function, program.args, specs)
    assert count(ours.as_text()) > 0
    assert bytes_sent(ours.as_text()) <= 1.001 * bytes_sent(plain.as_text())
    close(ours(*placed), in_float64(program.function, *program.args, by_xla=True))
