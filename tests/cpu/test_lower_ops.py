"""The CPU code generator: concatenations, pads, reductions, scans, sinks and queues, by hand-written tile programs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kitsune_jax.errors import CannotLower
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.lowered import ROW, array, close, kinds, relu_layer, run
from tests.support.tiles import Tiles

# Concatenate, pad, reductions, scans, sinks, queues.


def test_concatenate_of_everything() -> None:
    """A fresh value, the same value again, an input, a constant and a reduction, along the first of two dimensions."""
    t = Tiles((5,), 2)
    x = t.load((5, 2, 3), streams=((0,), (), ()))
    y = t.op("exp", x)
    total = t.broadcast(t.reduce("sum", x, (1,)), (1, 3), (0, 2))
    c = t.concat(y, y, x, t.broadcast(t.literal(7.0), (1, 3), ()), total, dimension=1)
    t.store(c, (5, 8, 3), ((0,), (), ()))
    a = array(5, 2, 3)
    seven = np.full((5, 1, 3), 7, np.float32)
    close(run(t.program(), a)[0], np.concatenate([np.exp(a), np.exp(a), a, seven, a.sum(1, keepdims=True)], 1))


def test_nested_concatenations_are_computed_in_place() -> None:
    t = Tiles((5,), 2)
    x = t.load((5, 3), streams=ROW)
    inner = t.concat(t.op("sin", x), t.op("cos", x), dimension=1)
    t.store(t.concat(x, inner, dimension=1), (5, 9), ROW)
    a = array(5, 3)
    close(run(t.program(), a)[0], np.concatenate([a, np.sin(a), np.cos(a)], 1))
    assert kinds(t.program()) == ["Vector", "Vector"]


@pytest.mark.parametrize(
    "low,high,interior",
    [((1, 0), (2, 3), (0, 0)), ((-1, 2), (0, -2), (0, 0)), ((0, -3), (-2, 1), (1, 2)), ((-9, 0), (0, 0), (0, 0))],
)
def test_pad(low: tuple[int, int], high: tuple[int, int], interior: tuple[int, int]) -> None:
    a = array(5, 12, 4)
    config = [(0, 0, 0), *zip(low, high, interior, strict=True)]
    want = np.asarray(jax.lax.pad(a, np.float32(0.5), config))
    t = Tiles((5,), 2)
    x = t.load((5, 12, 4), streams=((0,), (), ()))
    y = t.op("pad", x, t.literal(0.5), shape=want.shape[1:], low=(0, *low), high=(0, *high), interior=(0, *interior))
    t.store(y, want.shape, ((0,), (), ()))
    assert np.array_equal(run(t.program(), a)[0], want)


@pytest.mark.parametrize("axes", [(1,), (2,), (3,), (1, 3), (1, 2), (2, 3), (1, 2, 3)])
def test_reductions(axes: tuple[int, ...]) -> None:
    t = Tiles((5,), 2)
    x = t.load((5, 2, 3, 4), streams=((0,), (), (), ()))
    a = array(5, 2, 3, 4)
    wants = []
    for how, fn in (("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)):
        y = t.reduce(how, t.transpose(x, (0, 1, 2, 3)), axes)
        wants.append(fn(a, axis=axes))
        t.store(y, wants[-1].shape, ((0,), *[()] * (wants[-1].ndim - 1)))
    for got, want in zip(run(t.program(), a), wants, strict=True):
        close(got, want)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_reductions_of_small_matrices(rows: int, axis: int) -> None:
    """Dimensions shorter than a vector: the rows of a tile are worked on together, a last tile of other length too."""
    t = Tiles((rows,), 17)
    x = t.load((rows, 3, 6), streams=((0,), (), ()))
    a = array(rows, 3, 6)
    for how in ("sum", "max", "min", "prod"):
        t.store(t.reduce(how, x, (axis,)), (rows, 6 if axis == 1 else 3), ((0,), ()))
    for got, fn in zip(run(t.program(), a), (np.sum, np.max, np.min, np.prod), strict=True):
        close(got, fn(a, axis=axis))


@pytest.mark.parametrize("axis", [1, 2])
def test_arg_reductions_and_scans(axis: int) -> None:
    t = Tiles((5,), 2)
    x = t.load((5, 3, 4), streams=((0,), (), ()))
    a = array(5, 3, 4)
    y = t.op("argmax", x, shape=tuple(n for d, n in enumerate((3, 4), 1) if d != axis), dtype="int32", axis=axis)
    t.store(y, np.argmax(a, axis).shape, ((0,), ()))
    t.store(t.op("cumsum", x, axis=axis, reverse=False), a.shape, ((0,), (), ()))
    t.store(t.op("cummax", x, axis=axis, reverse=True), a.shape, ((0,), (), ()))
    got = run(t.program(), a)
    assert np.array_equal(got[0], np.argmax(a, axis).astype(np.int32))
    close(got[1], np.cumsum(a, axis))
    close(got[2], np.flip(np.maximum.accumulate(np.flip(a, axis), axis), axis))


def test_sinks() -> None:
    t = Tiles((11,), 4)
    x = t.load((11, 2, 3), streams=((0,), (), ()))
    y = t.op("square", x)
    for how, axes in (("sum", (0,)), ("sum", (0, 1)), ("max", (0, 1, 2)), ("min", (0, 2))):
        t.sink(y, how, axes)
    a = array(11, 2, 3)
    got = run(t.program(), a)
    for g, want in zip(got, (np.sum(a * a, 0), np.sum(a * a, (0, 1)), np.max(a * a), np.min(a * a, (0, 2))), strict=True):
        close(g, np.asarray(want))


def test_queues_are_written_and_read_in_place() -> None:
    t = Tiles((13,), 4)
    x, w, b = t.load((13, 3), streams=ROW), t.load((3, 70)), t.load((70,))
    h = relu_layer(t, x, w, b)
    q = t.queue(h, (1, 2))
    t.stage()
    h = t.pop(q)
    r = t.queue(t.op("tanh", h), (2,))
    t.stage()
    t.store(t.op("add", t.pop(q), t.pop(r)), (13, 70), ROW)
    a, c, d = array(13, 3), array(3, 70), array(70)
    want = np.maximum(a @ c + d, 0)
    close(run(t.program(), a, c, d)[0], want + np.tanh(want))
    assert [kinds(t.program(), s) for s in range(3)] == [["Matmul"], ["Vector"], ["Vector"]]


def test_a_value_pushed_stored_and_used() -> None:
    t = Tiles((13,), 4)
    x, w = t.load((13, 3), streams=ROW), t.load((3, 5))
    h = t.matmul(x, w)
    q, p = t.queue(h, (1,)), t.queue(t.op("exp", h), (1,))
    t.store(h, (13, 5), ROW)
    t.store(h, (5, 13), ((), (0,)))
    t.stage()
    t.store(t.op("sub", t.pop(q), t.pop(p)), (13, 5), ROW)
    a, c = array(13, 3), array(3, 5)
    got = run(t.program(), a, c)
    close(got[0], a @ c)
    close(got[1], (a @ c).T)
    close(got[2], a @ c - np.exp(a @ c))


def test_the_same_weight_is_prepared_once() -> None:
    t = Tiles((5,), 2)
    x, w = t.load((5, 4), streams=ROW), t.load((4, 4))
    t.store(t.matmul(t.op("tanh", t.matmul(x, w)), w), (5, 4), ROW)
    assert len(lower_program(t.program(), "t").preps) == 1


def test_what_cannot_be_lowered_says_so() -> None:
    t = Tiles((5,), 2)
    x = t.load((5, 4), streams=ROW)
    t.store(t.op("sort", x), (5, 4), ROW)
    with pytest.raises(CannotLower, match="sort"):
        lower_program(t.program(), "t")
    t = Tiles((5,), 2)
    x, y = t.load((5, 4), streams=ROW), t.load((5, 4, 3), streams=((0,), (), ()))
    t._add("matmul", (x, y), (t._new(True, (3,), "float32"),), x_contract=(1,), x_batch=(), w_contract=(1,), w_batch=(),
           out_perm=(0, 1), accumulate="float32")  # fmt: skip
    t.store(len(t.values) - 1, (5, 3), ROW)
    with pytest.raises(CannotLower, match="two streamed values"):
        lower_program(t.program(), "t")
