"""A program that ``jax.jit`` refuses is refused by a pipelined function in the same words, with the names of its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from tests.support.checks import arrays

X, W = arrays(0, (6, 8), (8, 16))
REFERENCE = object()  # stands for a new reference to X in a case's arguments

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Case] = {}


def case(*args: Any, **kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(f: Callable[..., Any]) -> Callable[..., Any]:
        CASES[f.__name__] = (f, args or (X, W), kwargs)
        return f

    return add


@case()
def condition(first: Any, second: Any) -> Any:
    return first if first.sum() > 0 else second


@case({"a": X}, [W])
def condition_on_leaves(params: Any, rest: Any) -> Any:
    return 1.0 if params["a"][0, 0] > rest[0][0, 0] else 2.0


@case(X, W, scale=jnp.float32(2))
def condition_on_a_keyword(first: Any, second: Any, *, scale: Any) -> Any:
    return first if scale > 0 else second


@case(X, 3, W)
def condition_beside_a_number(first: Any, second: int, third: Any) -> Any:
    return first if third.sum() > second else third


@case()
def condition_within(first: Any, second: Any) -> Any:
    return jax.jit(lambda y: y if y > 0 else -y)(first.sum())


@case()
def variadic(*args: Any, **kwargs: Any) -> Any:
    return int(args[1][0, 0])


@case()
def number(first: Any, second: Any) -> Any:
    return float(second.sum())


@case()
def index(first: Any, second: Any) -> Any:
    return [1, 2, 3][first[0, 0].astype(int)]


@case()
def numpy_of_a_tracer(first: Any, second: Any) -> Any:
    return np.asarray(second) + 1


@case()
def shape_of_a_value(first: Any, second: Any) -> Any:
    return jnp.zeros(first[0, 0].astype(int))


@case()
def mask(first: Any, second: Any) -> Any:
    return first[first > 0]


@case()
def assertion(first: Any, second: Any) -> Any:
    assert (first > 0).all()
    return first


@case()
def shapes_of_a_product(first: Any, second: Any) -> Any:
    return jax.lax.dot(second, first)


@case()
def no_such_attribute(first: Any, second: Any) -> Any:
    return first.nosuch


@case()
def item_assignment(first: Any, second: Any) -> Any:
    first[0] = 1
    return first


@case()
def carry_of_another_shape(first: Any, second: Any) -> Any:
    return jax.lax.scan(lambda c, _: (jnp.concatenate([c, c]), None), first, None, length=3)[0]


@case()
def branches_of_two_shapes(first: Any, second: Any) -> Any:
    return jax.lax.cond(first[0, 0] > 0, lambda: first, lambda: second)


@case()
def missing_argument(first: Any, second: Any, third: Any) -> Any:
    return first


@case(X, W, nosuch=1.0)
def unexpected_argument(first: Any, second: Any) -> Any:
    return first


@case()
def text_returned(first: Any, second: Any) -> Any:
    return {"a": "text", "b": [first, second]}


@case()
def object_returned(first: Any, second: Any) -> Any:
    return first, object()


@case()
def gradient_of_an_array(first: Any, second: Any) -> Any:
    return jax.grad(lambda x: x @ second)(first)


@case(REFERENCE, W)
def reference_returned(reference: Any, second: Any) -> Any:
    return reference


@case(REFERENCE, W)
def reference_returned_in_a_tree(reference: Any, second: Any) -> Any:
    return {"x": second, "y": reference}


@case()
def own_reference_returned(first: Any, second: Any) -> Any:
    return jax.new_ref(first)


@case()
def use_after_freeze(first: Any, second: Any) -> Any:
    reference = jax.new_ref(first)
    return jax.freeze(reference) + reference[...]


@case(REFERENCE, REFERENCE)
def one_reference_twice(reference: Any, second: Any) -> Any:
    return reference[...] + second[...]


@case(REFERENCE, W)
def condition_on_a_reference(reference: Any, second: Any) -> Any:
    return second if reference[0, 0] > 0 else second * 2


@case(REFERENCE, W)
def store_of_another_shape(reference: Any, second: Any) -> Any:
    reference[...] = second
    return second


WRAPPERS: dict[str, Callable[..., Any]] = {
    "jit": lambda f: jax.jit(kj.pipeline(f, force=True)),
    "alone": lambda f: kj.pipeline(f, force=True),
    "recompute": lambda f: jax.jit(kj.pipeline(f, force=True, residuals="recompute")),
}


def _refusal(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[type[BaseException], str]:
    reference = jax.new_ref(X)
    with pytest.raises(Exception) as caught:
        f(*(reference if a is REFERENCE else a for a in args), **kwargs)
    return caught.type, re.sub(r"0x[0-9a-f]+|\(id=\d+\)", "", str(caught.value))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", CASES)
def test_the_same_error_as_jit(name: str, wrapper: str) -> None:
    f, args, kwargs = CASES[name]
    assert _refusal(WRAPPERS[wrapper](f), args, kwargs) == _refusal(jax.jit(f), args, kwargs)


def test_the_catalogue_names_arguments() -> None:
    """The comparison above would also hold of messages that name nothing."""
    for name, argument in (("condition", "first"), ("condition_on_leaves", "params['a']"), ("reference_returned", "reference")):
        f, args, kwargs = CASES[name]
        assert f"argument{'s' if '[' in argument else ''} {argument}" in _refusal(kj.pipeline(f), args, kwargs)[1]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_leaked_tracer_is_named(wrapper: str) -> None:
    leaked: list[Any] = []

    def leaks(first: Any) -> Any:
        leaked.append(first * 2)
        return first

    WRAPPERS[wrapper](leaks)(X)
    with pytest.raises(
        jax.errors.UnexpectedTracerError, match=r"function being traced when the value leaked was leaks at .*test_errors.py"
    ):
        leaked[0] + 1


@pytest.mark.skipif(not hasattr(jax, "free_ref"), reason="this JAX has no free_ref")
@pytest.mark.parametrize("wrapper", ["jit", "alone"])
def test_a_reference_freed_twice(wrapper: str) -> None:
    def once() -> None:
        jax.free_ref(jax.new_ref(X))

    def twice() -> None:
        reference = jax.new_ref(X)
        jax.free_ref(reference)
        jax.free_ref(reference)

    WRAPPERS[wrapper](once)()
    with pytest.raises(KeyError):  # of no message but the id of a variable
        jax.jit(twice)()
    with pytest.raises(ValueError, match=r"function twice at .* frees a mutable array reference twice"):
        WRAPPERS[wrapper](twice)()


def test_a_traceback_of_the_user_s_error_names_the_user_s_files_only() -> None:
    """As JAX filters it, under nested functions and under transformations."""

    def inner(x: Any) -> Any:
        raise AssertionError("the user's own")

    def outer(x: Any) -> Any:
        return kj.pipeline(inner)(x) + 1

    calls = {
        "jit": lambda: jax.jit(kj.pipeline(outer))(1.0),
        "eager": lambda: kj.pipeline(outer)(1.0),
        "grad": lambda: jax.jit(kj.pipeline(jax.grad(outer)))(1.0),
        "vmap": lambda: jax.vmap(kj.pipeline(outer))(jnp.ones(3)),
        "recompute": lambda: jax.jit(kj.pipeline(outer, residuals="recompute"))(1.0),
    }
    for name, call in calls.items():
        with pytest.raises(AssertionError, match="the user's own") as raised:
            call()
        files = [frame.path for frame in raised.traceback]
        assert sum(str(path) == __file__ for path in files) >= 3, name
        assert not [path for path in files if "kitsune_jax" in path.parts and "tests" not in path.parts], (name, files)
