"""Passes over tile programs: what they give is well-formed and computes the same; and what they are for happens."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from kitsune_jax.program.ir import TileProgram, walk
from kitsune_jax.program.passes import Flow, simplified, with_epilogues
from reference.check import verify
from reference.interpret import interpret
from tests.cpu.test_lower_random import Random
from tests.support.irregular import IRREGULAR
from tests.support.lowered import ROW, relu_layer
from tests.support.programs import CASES
from tests.support.tiles import Tiles

RNG = np.random.default_rng(11)


def kinds(program: TileProgram) -> list[str]:
    return [i.kind for s in program.stages for i in walk(s.body)]


def product(program: TileProgram):
    (found,) = [i for s in program.stages for i in walk(s.body) if i.kind == "matmul"]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_passes_keep_what_a_random_program_computes(seed: int) -> None:
    drawn = Random(seed)
    program = drawn.program().program()
    arrays = [a.astype(np.float64) for a in drawn.arrays]
    want = interpret(program, arrays, widen=True)
    simple = simplified(program)
    for made in (simple, with_epilogues(simple), with_epilogues(program), with_epilogues(simple, activated=False)):
        verify(made, lookahead=0)
        for g, w in zip(interpret(made, arrays, widen=True), want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*CASES, *IRREGULAR])
def test_passes_keep_what_a_structured_program_computes(name: str) -> None:
    case = {**CASES, **IRREGULAR}[name]()
    parts = [dataclasses.replace(p, program=with_epilogues(simplified(p.program))) for p in case.program.parts]
    made = dataclasses.replace(case.program, parts=tuple(parts))
    verify(made)
    arrays = case.operands(RNG)
    for g, w in zip(interpret(made, arrays, widen=True), interpret(case.program, arrays, widen=True), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)


def test_what_is_computed_twice_or_for_nobody_is_gone() -> None:
    t = Tiles((9,), 4)
    x = t.load((9, 6), streams=ROW)
    mean = [t.broadcast(t.reduce("sum", t.reshape(v, (6,)), (1,)), (6,), (0,)) for v in (x, t.op("copy", x))]
    t.op("exp", x)
    t.store(t.op("mul", t.op("sub", x, mean[0]), t.op("sub", x, mean[1])), (9, 6), ROW)
    made = simplified(t.program())
    verify(made)
    assert kinds(made) == ["load", "reduce_sum", "broadcast_in_dim", "sub", "mul", "store"]


def test_ops_that_change_nothing() -> None:
    """``jnp.tril`` adds 0 to an index, and selects True where a condition is true."""
    t = Tiles((10,), 4)
    index, zero = t.index((0,), (6,)), t.broadcast(t.literal(0, "int32"), (6,), ())
    seen = t.op("ge", t.op("add", index, zero), t.op("add", zero, t.iota((6,), 1)), dtype="bool")
    false, true = (t.broadcast(t.literal(x, "bool"), (6,), ()) for x in (False, True))
    same, turned = t.op("select_n", seen, false, true, dtype="bool"), t.op("select_n", seen, true, false, dtype="bool")
    t.store(t.op("convert_element_type", same, dtype="int32", new_dtype="int32"), (10, 6), ((0,), ()))
    t.store(t.op("convert_element_type", turned, dtype="int32", new_dtype="int32"), (10, 6), ((0,), ()))
    made = simplified(t.program())
    verify(made)
    kinds = [i.kind for i in made.stages[0].body]
    assert kinds.count("select_n") == 1 and "add" not in kinds
    for got, want in zip(interpret(made, []), interpret(t.program(), []), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_loop_reads_what_the_code_around_it_has_computed_and_not_the_other_way() -> None:
    t = Tiles((9,), 4)
    x = t.load((9, 6), streams=ROW)
    one = t.op("exp", x)
    with t.loop(3, one) as loop:
        loop.next(t.op("add", t.op("exp", x), t.op("tanh", loop.carries[0])))
    with t.loop(2, x) as other:
        t.op("tanh", x)  # nobody reads it
        other.next(t.op("sin", other.carries[0]))
    y = t.op("add", loop.results[0], t.op("sin", x))
    t.store(y, (9, 6), ROW)
    made = simplified(t.program())
    verify(made)
    assert kinds(made) == ["load", "exp", "loop", "tanh", "add", "sin", "add", "store"]
    a = RNG.standard_normal((9, 6)).astype(np.float32)
    assert np.array_equal(interpret(made, [a])[0], interpret(t.program(), [a])[0])


def test_a_product_takes_its_bias_and_its_activation() -> None:
    t = Tiles((9,), 4)
    x, w, b = t.load((9, 6), streams=ROW), t.load((6, 3)), t.load((3,))
    t.store(relu_layer(t, x, w, b), (9, 3), ROW)
    made = with_epilogues(simplified(t.program()))
    verify(made)
    assert kinds(made) == ["load", "load", "load", "matmul", "store"]
    assert product(made)["activation"] == "relu" and len(product(made).inputs) == 3
    linear = with_epilogues(simplified(t.program()), activated=False)
    assert kinds(linear) == ["load", "load", "load", "matmul", "max", "store"] and product(linear)["activation"] == "none"


def test_a_product_in_a_loop_takes_a_bias_from_outside() -> None:
    t = Tiles((9,), 4)
    x, w, b = t.load((9, 6), streams=ROW), t.load((6, 6)), t.load((6,))
    with t.loop(3, x) as loop:
        loop.next(t.op("tanh", t.op("add", t.matmul(loop.carries[0], w), t.broadcast(b, (6,), (1,)))))
    t.store(loop.results[0], (9, 6), ROW)
    made = with_epilogues(simplified(t.program()))
    verify(made)
    assert kinds(made) == ["load", "load", "load", "loop", "matmul", "store"]
    assert product(made)["activation"] == "tanh" and len(product(made).inputs) == 3
    arrays = [RNG.standard_normal(s).astype(np.float32) for s in ((9, 6), (6, 6), (6,))]
    found, wanted = (interpret(program, arrays, widen=True)[0] for program in (made, t.program()))
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_bias_is_brought_into_the_shape_of_the_columns() -> None:
    """x [r, k] by w [k, m, n], the result as [r, n, m], and a number for each m; loaded only behind the product."""
    t = Tiles((9,), 4)
    x, w = t.load((9, 6), streams=ROW), t.load((6, 4, 3))
    y = t.matmul(x, w, perm=(0, 2, 1))
    y = t.op("add", t.reshape(y, (1, 3, 4)), t.broadcast(t.load((4,)), (1, 3, 4), (3,)))
    t.store(y, (9, 1, 3, 4), ((0,), (), (), ()))
    made = with_epilogues(simplified(t.program()))
    verify(made)
    assert kinds(made) == ["load", "load", "load", "broadcast_in_dim", "matmul", "reshape", "store"]
    assert made.values[product(made).inputs[2]].shape == (3, 4)
    arrays = [RNG.standard_normal(s).astype(np.float32) for s in ((9, 6), (6, 4, 3), (4,))]
    assert np.array_equal(interpret(made, arrays)[0], interpret(t.program(), arrays)[0])


def test_what_another_reads_stays_and_a_value_that_streams_is_no_bias() -> None:
    t = Tiles((9,), 4)
    x, w, b = t.load((9, 6), streams=ROW), t.load((6, 6)), t.load((6,))
    y = t.op("add", t.matmul(x, w), t.broadcast(b, (6,), (1,)))
    t.store(t.op("max", y, t.literal(0.0)), (9, 6), ROW)
    t.store(y, (9, 6), ROW)
    made = with_epilogues(simplified(t.program()))
    assert product(made)["activation"] == "none" and "max" in kinds(made) and "add" not in kinds(made)
    t = Tiles((9,), 4)
    x, w = t.load((9, 6), streams=ROW), t.load((6, 6))
    t.store(t.op("add", t.matmul(x, w), x), (9, 6), ROW)
    assert len(product(with_epilogues(simplified(t.program()))).inputs) == 2


def test_a_product_that_a_loop_reads_keeps_its_result() -> None:
    t = Tiles((9,), 4)
    x, w = t.load((9, 6), streams=ROW), t.load((6, 6))
    y = t.matmul(x, w)
    with t.loop(2, x) as loop:
        loop.next(t.op("add", loop.carries[0], y))
    t.store(t.op("add", t.op("tanh", y), loop.results[0]), (9, 6), ROW)
    made = with_epilogues(simplified(t.program()))
    verify(made)
    assert product(made).get("activation") is None


def test_flow_names_makers_readers_and_constants() -> None:
    t = Tiles((9,), 4)
    x = t.load((9, 6), streams=ROW)
    seen = t.reshape(x, (1, 6, 1))
    y = t.op("add", seen, t.broadcast(t.literal(2.0), (1, 6, 1), ()))
    t.store(y, (9, 1, 6, 1), ((0,), (), (), ()))
    (stage,) = t.program().stages
    flow = Flow(t.values, t.literals, stage.body)
    assert flow.root(seen) == x and flow.literal(stage.body[3].inputs[1]) == 2.0
    assert flow.uses[x] == [(3, 0)] and flow.readers(y) == [4] and flow.makers[y].kind == "add"


def test_activations_mean_what_jax_says() -> None:
    """In the interpreter, which is what they are compared with elsewhere."""
    names = {
        "relu": ((), jax.nn.relu),
        "tanh": ((), jax.numpy.tanh),
        "logistic": ((), jax.nn.sigmoid),
        "silu": ((1.0,), jax.nn.silu),
        "leaky_relu": ((0.01,), jax.nn.leaky_relu),
        "elu": ((1.0,), jax.nn.elu),
        "gelu_erf": ((0.5**0.5,), lambda x: jax.nn.gelu(x, approximate=False)),
        "gelu_tanh": ((2 * (2 / np.pi) ** 0.5, 2 * 0.044715 * (2 / np.pi) ** 0.5), jax.nn.gelu),
    }
    a = np.linspace(-4, 4, 9 * 5, dtype=np.float32).reshape(9, 5)
    for name, (parameters, function) in names.items():
        t = Tiles((9,), 4)
        v = t.matmul(t.load((9, 5), streams=ROW), t.load((5, 5)))
        params = (*t.body[-1].params, ("activation", name), ("parameters", parameters))
        t.body[-1] = dataclasses.replace(t.body[-1], params=params)
        t.store(v, (9, 5), ROW)
        verify(t.program())
        got = interpret(t.program(), [a, np.eye(5, dtype=np.float32)])[0]
        np.testing.assert_allclose(got, np.asarray(function(a)), rtol=1e-5, atol=1e-6)
