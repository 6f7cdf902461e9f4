"""Which functions are compiled alone, to compare XLA's own partition with this package's. That takes as long as compiling them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.sharding import by_xla
from kitsune_jax.sharding.by_xla import _least_memory, bytes_sent, collectives
from tests.support.checks import close, in_float64
from tests.support.sharded_programs import PROGRAMS, enlarged

MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))


def layers(x: Any, v: Any, w: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ v) @ w)


def recurrent(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros_like(x[0]), x)[0]


@pytest.mark.parametrize(
    ("function", "shapes", "divided", "compared"),
    [
        (layers, [(4096, 64), (64, 64), (64, 64)], ["x", None, None], False),
        (recurrent, [(16, 64, 256), (256, 256)], [(None, None, "x"), (None, "x")], True),
    ],
    ids=["rows", "recurrent columns"],
)
def test_only_what_may_need_less_is_compared(
    function: Any, shapes: list[tuple[int, ...]], divided: list[Any], compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    partition_by_xla = _compat.partition_by_xla
    monkeypatch.setattr(_compat, "partition_by_xla", lambda *args: asked.append(args) or partition_by_xla(*args))
    rng = np.random.default_rng(3)
    args = []
    for shape, axes in zip(shapes, divided, strict=True):
        array = rng.standard_normal(shape, np.float32)
        spec = PartitionSpec(*axes) if isinstance(axes, tuple) else PartitionSpec(axes)
        args.append(jax.device_put(array, NamedSharding(MESH, spec)))
    got = jax.jit(kj.pipeline(function, force=None))(*args)
    assert bool(asked) == compared
    np.testing.assert_allclose(got, jax.jit(function)(*args), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("computed", [True, False])
def test_rows_that_are_summed_by_index_take_memory(computed: bool) -> None:
    """XLA reads them from an array: of rows that some op computes, or of an operand, which takes no more memory."""

    def summed(rows: Any, index: Any) -> Any:
        return jax.ops.segment_sum(rows * rows if computed else rows, index, num_segments=7)

    rows = jax.ShapeDtypeStruct((97, 5), np.float32)
    needed = _least_memory(jax.make_jaxpr(summed)(rows, jax.ShapeDtypeStruct((97,), np.int32)))
    assert needed == (97 * 5 * 4 if computed else 0)


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def moved(counts: Any) -> int:
    return int(sum(counts[kind] for kind in ("all-gather", "all-to-all", "collective-permute")))


def needs_no_more(ours: Any, plain: Any) -> None:
    """A compiled program than another: to send, to gather, and temporary memory."""
    texts = ours.as_text(), plain.as_text()
    assert bytes_sent(texts[0]) <= 1.001 * bytes_sent(texts[1])
    assert moved(collectives(texts[0])) <= moved(collectives(texts[1]))
    memory = [found.memory_analysis().temp_size_in_bytes for found in (ours, plain)]
    assert memory[0] <= 1.01 * memory[1] + 4096


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("tables by row over both axes", (P(None, "x"), P(None, "x"), P("x"))),
        ("attention over queries and keys", (P(None, "x"), P(None, None, None, "x"), P(None, None, None, "x"))),
    ],
)
def test_what_a_shard_map_leaves_automatic_is_compared(name: str, specs: Any) -> None:
    """Alone among the devices of a group: where an axis is manual too, XLA ends the process in some of its divisions."""
    program, on = PROGRAMS[name], mesh((4, 2), ("x", "y"))
    args = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(program.args, specs, strict=True)]

    def compiled(f: Any) -> Any:
        inside = jax.shard_map(f, mesh=on, in_specs=(P(),) * len(args), out_specs=P(), axis_names={"y"}, check_vma=False)
        return jax.jit(inside).lower(*args).compile()

    ours = compiled(kj.pipeline(program.function))
    needs_no_more(ours, compiled(program.function))
    close(ours(*args), in_float64(program.function, *program.args, by_xla=True))


@pytest.mark.parametrize("force", [True, None])
@pytest.mark.parametrize(
    ("name", "rows", "specs"),
    [
        ("tables by row", 4096, (P("y"), P("z"), P())),
        ("tables by row, as the batch", 4096, (P("y"), P("y"), P())),
        ("tables by row, as the batch", 384, (P("y"), P("y"), P())),
        ("tables by row, as the batch", 4096, (P(("y", "z")), P("y"), P())),
        ("tables by row, as the batch", 4096, (P(None, "y"), P("z"), P())),
    ],
)
def test_a_table_has_its_gradient_in_a_partly_manual_shard_map(name: str, rows: int, specs: Any, force: bool | None) -> None:
    """What is added is gathered there, as by XLA; the table, which is larger, is not summed over the devices."""
    program, on = PROGRAMS[f"gradient of {name}"], mesh((2, 2, 2), ("x", "y", "z"))
    table, index, w = program.args
    given = (table[:rows], index % rows, w)
    args = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(given, specs, strict=True)]

    def compiled(f: Any) -> Any:
        inside = jax.shard_map(f, mesh=on, in_specs=(P(),) * len(args), out_specs=P(), axis_names={"x"}, check_vma=False)
        return jax.jit(inside).lower(*args).compile()

    ours = compiled(kj.pipeline(program.function, force=force))
    needs_no_more(ours, compiled(program.function))
    close(ours(*args), in_float64(program.function, *given, by_xla=True))


@pytest.mark.parametrize("manual", ["a", "b", "c"])
def test_xlas_partition_runs_in_every_group(manual: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is made for one group of devices. The others have other numbers, and other arrays."""
    monkeypatch.setattr(by_xla, "_MORE_SENT", 0.0)  # XLA's is taken wherever it is compared

    def step(x: Any, w: Any) -> tuple[Any, ...]:
        y = jnp.tanh(x @ w)
        return jnp.roll(y, 3, 0), jnp.flip(y, 0), y @ w.T, jnp.max(y, 0)[None], (y.T @ x)[None]

    on, rng = mesh((2, 2, 2), ("a", "b", "c")), np.random.default_rng(5)
    x, w = rng.standard_normal((32, 8), np.float32), rng.standard_normal((8, 16), np.float32)
    b, c = (axis for axis in on.axis_names if axis != manual)
    want = [in_float64(step, part, w) for part in np.split(x, 2)]
    for of_x, of_w in [((b,), (None, c)), ((c, b), (b,)), ((b,), ((c, b),)), ((b, c), (None, b))]:
        inside = jax.shard_map(
            kj.pipeline(step), mesh=on, in_specs=(P(manual), P()), out_specs=P(manual), axis_names={manual}, check_vma=False
        )
        args = (jax.device_put(x, NamedSharding(on, P((manual, *of_x)))), jax.device_put(w, NamedSharding(on, P(*of_w))))
        caplog.clear()
        with caplog.at_level("INFO", "kitsune_jax"):
            got = jax.jit(inside)(*args)
        assert "XLA divides a part of it" in caplog.text
        close(list(got), [np.concatenate(parts) for parts in zip(*want, strict=True)])


@pytest.mark.parametrize("name", ["flipped rows", "gradient of flipped rows", "a maximum and where"])
def test_shards_of_unequal_size_are_compared(name: str) -> None:
    """XLA divides a function of padded arrays, which cuts the padding off at its start: it has no arguments in unequal shards."""
    program, on = enlarged(PROGRAMS[name], 512), mesh((4, 2), ("data", "model"))

    def rows(f: Any) -> Any:
        return lambda x, w: f(jax.lax.with_sharding_constraint(x[3:], NamedSharding(on, P("data"))), w)

    def compiled(f: Any) -> Any:
        return jax.jit(rows(f)).lower(*(jax.device_put(x, NamedSharding(on, P())) for x in program.args)).compile()

    ours, plain = compiled(kj.pipeline(program.function)), compiled(program.function)
    memory = [found.memory_analysis().temp_size_in_bytes for found in (ours, plain)]
    assert memory[0] <= 1.01 * memory[1] + 4096
    few = rows(program.function), *(x[:50] if x.shape[0] > 50 else x for x in program.args)
    got = jax.jit(rows(kj.pipeline(program.function)))(*few[1:])
    close(got, in_float64(program.function, few[1][3:], few[2], by_xla=True))


def test_a_function_with_a_constraint_inside_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    on = mesh((4, 2), ("data", "model"))

    def f(x: Any, w: Any) -> Any:
        y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(on, P(None, "data")))
        return jnp.tanh(y @ w.T)

    x, w = PROGRAMS["data parallel"].args[:2]
    args = (jax.device_put(x, NamedSharding(on, P("data"))), w)
    with caplog.at_level("DEBUG", "kitsune_jax"):
        ours = jax.jit(kj.pipeline(f)).lower(*args).compile()
    assert "is not compared" not in caplog.text
    needs_no_more(ours, jax.jit(f).lower(*args).compile())
    close(ours(*args), in_float64(f, x, w, by_xla=True))


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("gradient of attention over batches", (P(None, None, "y", "x"), P(None, None, "x", "y"), P(None, "y"))),
        ("radial basis", (P("y", "x"), P("y"), P("x", "y"))),
        ("graph attention", (P(), P("y"), P(), P("y"), P(("x", "y")), P("x"))),
    ],
)
def test_xlas_partition_divides_its_results_as_xla(name: str, specs: Any) -> None:
    """Without a move of them behind the call, where this package's would divide them in another way."""
    program, on = PROGRAMS[name], mesh((4, 2), ("x", "y"))
    args = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(program.args, specs, strict=True)]
    ours, plain = (jax.jit(f).lower(*args).compile() for f in (kj.pipeline(program.function), program.function))
    needs_no_more(ours, plain)
    assert [found.spec for found in jax.tree.leaves(ours.output_shardings)] == [
        found.spec for found in jax.tree.leaves(plain.output_shardings)
    ]
    close(ours(*args), in_float64(program.function, *program.args, by_xla=True))


def test_xlas_partition_divides_its_results_as_xla_in_a_partly_manual_shard_map() -> None:
    program, on = PROGRAMS["gradient of layer, fully sharded"], mesh((2, 2, 2), ("x", "y", "z"))
    specs = (P(), P(None, ("y", "z")), P("z", "y"), P(None, ("y", "z")), P("y"), P("z", "y"), P("z"))
    args = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(program.args, specs, strict=True)]

    def compiled(f: Any) -> Any:
        inside = jax.shard_map(f, mesh=on, in_specs=(P(),) * len(args), out_specs=P(), axis_names={"x"}, check_vma=False)
        return jax.jit(inside).lower(*args).compile()

    ours = compiled(kj.pipeline(program.function))
    needs_no_more(ours, compiled(program.function))
    close(ours(*args), in_float64(program.function, *program.args, by_xla=True))
