"""The Graph as data: validation, printing, and a JSON form that gives back an equal graph."""

from __future__ import annotations

import dataclasses
import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from kitsune_jax.ops.graph import Graph, Op, Value, make_params
from reference.standalone import FORMAT_VERSION, from_json, to_json

# Names and words, which have one line.
TEXT = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=5)
PARAM = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@st.composite
def graphs(draw) -> Graph:
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    dtype = st.sampled_from(["float32", "bfloat16", "int8", "bool"])
    values = [Value(draw(shape), draw(dtype)) for _ in range(draw(st.integers(1, 3)))]
    inputs = tuple(range(len(values)))
    scalars = st.booleans() | st.integers() | st.floats(allow_nan=False)
    values += [Value((), draw(dtype), draw(scalars)) for _ in range(draw(st.integers(0, 2)))]
    ops = []
    for _ in range(draw(st.integers(0, 4))):
        operands = tuple(draw(st.lists(st.integers(0, len(values) - 1), max_size=3)))
        made = draw(st.integers(1, 2))
        outs = tuple(range(len(values), len(values) + made))
        values += [Value(draw(shape), draw(dtype)) for _ in range(made)]
        names = draw(st.lists(st.sampled_from(["axes", "shape", "y"]), unique=True))
        params = make_params(**{n: draw(PARAM) for n in names})
        ops.append(
            Op(
                draw(st.sampled_from(["add", "opaque"])),
                operands,
                outs,
                params,
                draw(st.sampled_from(["", "a.py:3 (f)", "\u00e9.py:1"])),
                "why",
                "label",
            )
        )
    outputs = tuple(draw(st.lists(st.integers(0, len(values) - 1), max_size=3)))
    return Graph(tuple(values), inputs, outputs, tuple(ops))


@hypothesis.given(graphs())
@hypothesis.settings(max_examples=100, deadline=None)
def test_json_round_trip(graph):
    graph.validate()
    text = to_json(graph)
    again = from_json(text)
    assert again == graph and hash(again) == hash(graph)
    assert to_json(again) == text
    assert str(graph).count("\n") == len(graph.ops) + 1


def test_json_keeps_infinities_and_the_sign_of_zero():
    graph = Graph((Value((), "float32", -math.inf), Value((), "float32", -0.0), Value((), "float32", math.nan)), (), (0, 1, 2), ())
    low, zero, nan = from_json(to_json(graph)).values
    assert low.literal == -math.inf
    assert isinstance(zero.literal, float) and math.copysign(1, zero.literal) == -1
    assert isinstance(nan.literal, float) and math.isnan(nan.literal)


def test_another_format_is_refused():
    graph = Graph((Value((2,), "float32"),), (0,), (0,), ())
    text = json.dumps({**json.loads(to_json(graph)), "format": FORMAT_VERSION + 1})
    with pytest.raises(ValueError, match="format"):
        from_json(text)


X = Value((2,), "float32")
GOOD = Graph((X, X, X), (0,), (2,), (Op("neg", (0,), (1,)), Op("add", (0, 1), (2,))))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"inputs": (0, 0)}, "listed twice"),
        ({"ops": GOOD.ops[::-1]}, "before it is defined"),
        ({"ops": (Op("neg", (0,), (0,)),)}, "again"),
        ({"ops": (Op("neg", (0,), (9,)),)}, "unknown value"),
        ({"ops": GOOD.ops[:1]}, "never defined"),
    ],
)
def test_invalid_graphs_are_refused(change, message):
    GOOD.validate()
    broken = dataclasses.replace(GOOD, **change)
    with pytest.raises(ValueError, match=message):
        broken.validate()
    with pytest.raises(ValueError, match=message):
        from_json(to_json(broken))


def test_producers_and_consumers():
    assert GOOD.producers() == {1: 0, 2: 1}
    assert GOOD.consumers() == {0: (0, 1), 1: (1,)}


def test_parameters_are_canonical():
    params = make_params(b=[np.int64(2), (1.5, None)], a=True)
    assert params == (("a", True), ("b", (2, (1.5, None))))
    assert type(dict(params)["b"][0]) is int
    op = Op("slice", (), (), params)
    assert op["a"] is True
    with pytest.raises(KeyError, match="no parameter 'c'"):
        op["c"]
    assert (X.size, Value((), "int8").size, Value((3, 0), "int8").size) == (2, 1, 0)
    assert str(X) == "float32[2]" and str(Value((), "int8", 3)) == "3:int8"
