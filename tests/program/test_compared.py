"""Which values have the same bits wherever they are made: through names, loops and queues, and not beyond what memory holds."""

from __future__ import annotations

from kitsune_jax.program.passes import compared_values
from tests.support.tiles import Tiles

ROW = ((0,), ())
SHAPE = (9, 5)


def loads(t: Tiles, count: int, dtype: str = "float32") -> list[int]:
    return [t.load(SHAPE, dtype, ROW) for _ in range(count)]


def store(t: Tiles, x: int) -> None:
    t.store(x, (9, *t.values[x].shape), ((0,), *((),) * len(t.values[x].shape)))


def compare(t: Tiles, x: int, y: int, kind: str = "eq") -> None:
    store(t, t.op("convert_element_type", t.op(kind, x, y, dtype="bool"), dtype="float32"))


def test_both_sides_of_a_comparison_and_what_they_are_made_of() -> None:
    t = Tiles((9,), 4)
    x, y, z = loads(t, 3)
    score = t.op("mul", t.op("add", x, y), y)
    named = t.reshape(score, (5, 1))
    other = t.op("exp", z)
    compare(t, t.reshape(named, (5,)), z, "ge")
    store(t, other)
    assert {score, named, score - 1, x, y, z} <= compared_values(t.program())
    assert other not in compared_values(t.program())


def test_not_with_a_constant_nor_with_itself_nor_of_integers() -> None:
    t = Tiles((9,), 4)
    (x,), (i,) = loads(t, 1), loads(t, 1, "int32")
    y, zero = t.op("exp", x), t.literal(0.0)
    compare(t, y, zero, "gt")
    compare(t, y, t.broadcast(zero, (5,), ()), "gt")
    compare(t, y, y, "ne")  # is it NaN?
    compare(t, i, t.op("neg", i))
    assert not compared_values(t.program())


def test_a_maximum_that_leaves_and_not_one_that_stays() -> None:
    t = Tiles((9,), 4)
    x, y, z = loads(t, 3)
    left, stays, folded = t.op("exp", x), t.op("exp", y), t.op("exp", z)
    store(t, t.op("neg", t.broadcast(t.reduce("max", left, (1,)), (5,), (0,))))
    store(t, t.op("sub", stays, t.broadcast(t.reduce("max", stays, (1,)), (5,), (0,))))
    t.sink(folded, "max", (0,))
    found = compared_values(t.program())
    assert left in found and folded in found and stays not in found


def test_a_sum_is_not_looked_into() -> None:
    t = Tiles((9,), 4)
    x, y = loads(t, 2)
    inside = t.op("exp", x)
    total = t.broadcast(t.reduce("sum", inside, (1,)), (5,), (0,))
    compare(t, total, y)
    assert total in compared_values(t.program()) and inside not in compared_values(t.program())


def test_through_a_loop() -> None:
    """A running maximum, as that of an attention over blocks of keys."""
    t = Tiles((9,), 4)
    x, y = loads(t, 2)
    with t.loop(3, x) as loop:
        score = t.op("exp", loop.carries[0])
        loop.next(t.op("max", loop.carries[0], t.broadcast(t.reduce("max", score, (1,)), (5,), (0,))))
    store(t, loop.results[0])
    assert {score, x} <= compared_values(t.program()) and y not in compared_values(t.program())


def test_through_a_queue() -> None:
    t = Tiles((9,), 4)
    x, y = loads(t, 2)
    score = t.op("exp", x)
    q = t.queue(score, (1,))
    t.stage()
    compare(t, t.pop(q), t.load(SHAPE, "float32", ROW))
    assert score in compared_values(t.program()) and y not in compared_values(t.program())


def test_a_long_chain_that_is_read_twice_at_each_step() -> None:
    t = Tiles((9,), 4)
    first, other = loads(t, 2)
    x = first
    for _ in range(300):
        x = t.op("add", x, x)
    compare(t, x, other)
    assert len(compared_values(t.program())) == 302
