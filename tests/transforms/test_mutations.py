"""A pipelined function that changes an object among its arguments says so, unless it returns the change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from tests.support.checks import arrays, close, custom_calls, in_float64

X, W = arrays(0, (6, 8), (8, 16))


@jax.tree_util.register_pytree_node_class
class Layer:
    """A layer that counts its calls and keeps a running mean, as layers of mutable libraries do."""

    def __init__(self, weight: Any, mean: Any) -> None:
        self.weight, self.mean = weight, mean

    def __call__(self, x: Any) -> Any:
        y = jnp.tanh(x @ self.weight)
        self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
        return y

    def frozen(self, x: Any) -> Any:
        return jnp.tanh(x @ self.weight) - self.mean

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.weight, self.mean), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Layer:
        return cls(*children)


def layer() -> Layer:
    return Layer(W, jnp.zeros(16))


def loss(layer: Layer, x: Any) -> Any:
    return jnp.sum(layer(x) ** 2)


def frozen_loss(layer: Layer, x: Any) -> Any:
    return jnp.sum(layer.frozen(x) ** 2)


def scanned(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda layer, x: jax.lax.scan(lambda total, row: (total + f(layer, row[None]), None), 0.0, x)[0]


AROUND: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "grad in jit": lambda f: jax.jit(jax.value_and_grad(f)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "vmap": lambda f: lambda layer, x: jax.vmap(f, in_axes=(None, 0))(layer, x[:, None]),
    "scan": scanned,
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "pipeline": lambda f: kj.pipeline(lambda layer, x: 2 * f(layer, x)),
    "lower": lambda f: lambda *args: jax.jit(f).lower(*args),
    "eval_shape": lambda f: lambda *args: jax.eval_shape(f, *args),
    "explain": kj.explain,
}


@pytest.mark.parametrize(
    "residuals", ["save", "recompute", jax.checkpoint_policies.dots_saveable], ids=["save", "recompute", "policy"]
)
@pytest.mark.parametrize("around", AROUND)
def test_a_change_that_is_lost_is_an_error_under_every_transformation(around: str, residuals: Any) -> None:
    with pytest.raises(kj.MutatedArgument, match=r"function loss changes .*: layer\[<flat index 1>\]\. "):
        AROUND[around](kj.pipeline(loss, residuals=residuals))(layer(), X)


@pytest.mark.parametrize("around", sorted(set(AROUND) - {"explain", "lower", "eval_shape", "pipeline"}))
def test_a_function_that_changes_nothing_is_computed(around: str) -> None:
    args = layer(), X
    close(AROUND[around](kj.pipeline(frozen_loss, force=True))(*args), AROUND[around](frozen_loss)(*args))


def test_the_error_is_raised_again_by_a_second_call() -> None:
    function = jax.jit(kj.pipeline(loss))
    for _ in range(2):
        with pytest.raises(kj.MutatedArgument):
            function(layer(), X)


def test_the_error_leaves_no_tracer_behind() -> None:
    mine = layer()
    with jax.checking_leaks(), pytest.raises(kj.MutatedArgument):
        jax.jit(kj.pipeline(loss, residuals="recompute"))(mine, X)
    np.testing.assert_array_equal(mine.mean, np.zeros(16))


def test_arguments_are_named_by_keyword_position_and_place_in_containers() -> None:
    def several(first: Any, *rest: Any, named: Any) -> Any:
        for changed in (first["a"][0], rest[1], named):
            changed(X)
        return X * 2

    with pytest.raises(kj.MutatedArgument) as raised:
        kj.pipeline(several)({"a": [layer()]}, X, layer(), named=layer())
    assert all(f"{name}[<flat index 1>]" in str(raised.value) for name in ("first['a'][0]", "rest[1]", "named"))


# --- no error -------------------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: Any


@jax.tree_util.register_pytree_node_class
class Cast(Layer):
    """Makes new arrays whenever it is flattened."""

    def tree_flatten(self) -> tuple[Any, None]:
        return (jnp.asarray(self.weight) + 0, jnp.asarray(self.mean) + 0), None


def into_a_dict(batch: dict[str, Any], w: Any) -> Any:
    batch["x"] = jnp.tanh(batch["x"])
    batch["new"] = batch["x"] + 1
    return batch["new"] @ w


def into_a_list(batch: list[Any], w: Any) -> Any:
    batch[0] = jnp.tanh(batch[0])
    batch.append(batch[0] + 1)
    return batch[-1] @ w


def into_a_dataclass(batch: Batch, w: Any) -> Any:
    batch.x = jnp.tanh(batch.x)
    return batch.x @ w


def object_in_a_dict_is_replaced(batch: dict[str, Any], x: Any) -> Any:
    batch["layer"] = Layer(jnp.tanh(batch["layer"].weight), batch["layer"].mean)
    return batch["layer"].frozen(x)


def object_is_returned(layer: Layer, x: Any) -> Any:
    return layer(x), layer


def change_is_returned(layer: Layer, x: Any) -> Any:
    return layer(x), {"mean": layer.mean}


def copy_is_changed(layer: Layer, x: Any) -> Any:
    layer = jax.tree.map(lambda x: x, layer)
    return layer(x)


def object_made_inside(w: Any, x: Any) -> Any:
    return Layer(w, jnp.zeros(16))(x)


def new_attribute(layer: Layer, x: Any) -> Any:
    layer.seen = x  # type: ignore[attr-defined]
    return layer.frozen(x)


def new_arrays_at_every_look(layer: Cast, x: Any) -> Any:
    return layer.frozen(x)


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (into_a_dict, lambda: {"x": X}),
        (into_a_list, lambda: [X]),
        (into_a_dataclass, lambda: Batch(X)),
        (object_in_a_dict_is_replaced, lambda: {"layer": layer()}),
        (object_is_returned, layer),
        (change_is_returned, layer),
        (copy_is_changed, layer),
        (object_made_inside, lambda: W),
        (new_attribute, layer),
        (new_arrays_at_every_look, lambda: Cast(W, jnp.zeros(16))),
    ],
    ids=lambda x: x.__name__ if hasattr(x, "__name__") and x.__name__ != "<lambda>" else "",
)
@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_what_jit_allows_without_a_loss_is_allowed(function: Any, first: Callable[[], Any], residuals: str) -> None:
    second = W if function.__name__.startswith("into") else X
    got = jax.jit(kj.pipeline(function, residuals=residuals))(first(), second)
    close(jax.tree.leaves(got), jax.tree.leaves(in_float64(function, first(), second)))


def in_jit(f: Any, layer: Layer, x: Any) -> Any:
    return jax.jit(lambda layer, x: (f(layer, x), layer))(layer, x)


def in_checkpoint(f: Any, layer: Layer, x: Any) -> Any:
    return jax.checkpoint(lambda layer, x: (f(layer, x), layer))(layer, x)


def in_scan(f: Any, layer: Layer, x: Any) -> Any:
    (layer, total), _ = jax.lax.scan(lambda c, row: ((c[0], c[1] + f(c[0], row[None])), None), (layer, 0.0), x)
    return total, layer


def in_fori_loop(f: Any, layer: Layer, x: Any) -> Any:
    layer, total = jax.lax.fori_loop(0, len(x), lambda i, c: (c[0], c[1] + f(c[0], x[i][None])), (layer, 0.0))
    return total, layer


def in_cond(f: Any, layer: Layer, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda a, x: (f(a, x), a), lambda a, x: (-f(a, x), a), layer, x)


@pytest.mark.parametrize("within", [in_jit, in_checkpoint, in_scan, in_fori_loop, in_cond], ids=lambda f: f.__name__)
@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_results_of_inner_calls_are_changes_only_where_the_call_changes_them(within: Any, residuals: str) -> None:
    """``nnx.jit`` and its kin write what comes out of their call into the module, whether it has changed or not."""

    def outer(f: Any) -> Any:
        def function(layer: Layer, x: Any) -> Any:
            result, out = within(f, layer, x)
            layer.weight, layer.mean = out.weight, out.mean
            return result

        return function

    close(jax.jit(kj.pipeline(outer(frozen_loss), residuals=residuals))(layer(), X), in_float64(outer(frozen_loss), layer(), X))
    with pytest.raises(kj.MutatedArgument, match=r": layer\[<flat index 1>\]\. "):
        jax.jit(kj.pipeline(outer(loss), residuals=residuals))(layer(), X)


def test_an_attribute_that_holds_a_tracer_of_a_loop_is_told_of_too() -> None:
    def function(layer: Layer, x: Any) -> Any:
        def body(total: Any, row: Any) -> Any:
            layer.mean = row
            return total + row, None

        return jax.lax.scan(body, jnp.zeros(8), x)[0]

    with pytest.raises(kj.MutatedArgument, match="layer"):
        kj.pipeline(function)(layer(), X)


def test_a_function_that_hands_modules_on_has_the_pipelines_of_one_that_does_not() -> None:
    def function(layer: Layer, x: Any) -> Any:
        result, out = in_jit(Layer.frozen, layer, x)
        layer.weight = out.weight
        return result

    assert custom_calls(kj.pipeline(function, force=True), layer(), X) == 1
    assert custom_calls(kj.pipeline(Layer.frozen, force=True), layer(), X) == 1


def test_references_may_be_written() -> None:
    def function(ref: Any, x: Any) -> Any:
        ref[...] = ref[...] + x.sum(0)
        return jnp.tanh(x)

    ref = jax.new_ref(jnp.zeros(8))
    jax.jit(kj.pipeline(function))(ref, X)
    close(ref[...], X.sum(0))


def test_explain_of_a_step_around_a_pipelined_loss_raises_nothing() -> None:
    def step(layer: Layer, x: Any) -> Any:
        value, grads = jax.value_and_grad(kj.pipeline(frozen_loss))(layer, x)
        layer.weight = layer.weight - grads.weight
        return value

    assert kj.explain(step)(layer(), X).ops_total > 0
    with pytest.raises(kj.MutatedArgument):
        kj.explain(kj.pipeline(step))(layer(), X)


@pytest.mark.parametrize("switch", ["disabled", "disable_jit"])
def test_without_pipelines_the_function_is_what_it_was(switch: str) -> None:
    mine = layer()
    with kj.config.override(disable=True) if switch == "disabled" else jax.disable_jit():
        close(kj.pipeline(loss)(mine, X), loss(layer(), X))


# --- libraries ------------------------------------------------------------------------------------------------------------------


def digits_step(nnx: Any) -> tuple[Callable[..., Any], Callable[[], Any], Any]:
    """A step that changes model and optimizer in place, its arguments, and data."""
    optax = pytest.importorskip("optax")

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.hidden, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.drop, self.outputs = nnx.Dropout(0.25, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.outputs(self.drop(nnx.relu(self.norm(self.hidden(x)))))

    def create() -> Any:
        model = Network(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def network_loss(model: Any, x: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), jnp.arange(len(x)) % 4).mean()

    return network_loss, create, arrays(1, (32, 8))[0]


def updated(nnx: Any, grad_of: Any, model: Any, optimizer: Any, x: Any) -> Any:
    value, grads = nnx.value_and_grad(grad_of)(model, x)
    optimizer.update(model, grads)
    return value


def test_nnx_step_in_place_is_an_error_that_names_the_parameters() -> None:
    nnx = pytest.importorskip("flax.nnx")
    network_loss, create, x = digits_step(nnx)
    with pytest.raises(kj.MutatedArgument, match=r"model\.drop\.rngs\.count\.value, model\.hidden\.bias\.value"):
        nnx.jit(kj.pipeline(lambda model, optimizer, x: updated(nnx, network_loss, model, optimizer, x)))(*create(), x)


def test_nnx_statistics_and_random_state_of_a_loss_are_named() -> None:
    nnx = pytest.importorskip("flax.nnx")
    network_loss, create, x = digits_step(nnx)
    step = nnx.jit(lambda model, optimizer, x: updated(nnx, kj.pipeline(network_loss), model, optimizer, x))
    with pytest.raises(
        kj.MutatedArgument, match=r": model\.drop\.rngs\.count\.value, model\.norm\.mean\.value, model\.norm\.var\.value\. "
    ):
        step(*create(), x)


@pytest.mark.parametrize("form", ["returned", "functional"])
def test_what_the_error_advises_trains_as_nnx_does(form: str) -> None:
    nnx = pytest.importorskip("flax.nnx")
    network_loss, create, x = digits_step(nnx)

    def returning(model: Any, x: Any) -> Any:
        return network_loss(model, x), nnx.state(model, (nnx.BatchStat, nnx.RngState))

    @nnx.jit
    def returned(model: Any, optimizer: Any, x: Any) -> Any:
        (value, state), grads = nnx.value_and_grad(kj.pipeline(returning, force=True), has_aux=True)(model, x)
        nnx.update(model, state)
        optimizer.update(model, grads)
        return value

    @jax.jit
    @kj.pipeline(force=True)
    def on_states(graphdef: Any, state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        value = updated(nnx, network_loss, model, optimizer, x)
        return value, nnx.state((model, optimizer))

    def functional(model: Any, optimizer: Any, x: Any) -> Any:
        value, state = on_states(*nnx.split((model, optimizer)), x)
        nnx.update((model, optimizer), state)
        return value

    plain = nnx.jit(lambda model, optimizer, x: updated(nnx, network_loss, model, optimizer, x))
    (got, want), step = (create(), create()), {"returned": returned, "functional": functional}[form]
    losses = [[float(f(*trained, x)) for _ in range(6)] for f, trained in ((step, got), (plain, want))]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < 0.9 * losses[0][0]
    close(*[jax.tree.leaves(nnx.state(trained[0], nnx.BatchStat)) for trained in (got, want)])


@pytest.mark.parametrize("inner", ["jit", "remat", "value_and_grad", "state"])
def test_nnx_transformations_inside_are_no_changes(inner: str) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))

    def forward(model: Any, x: Any) -> Any:
        return jnp.sum(model(x) ** 2)

    def function(model: Any, x: Any) -> Any:
        if inner == "state":
            return forward(nnx.merge(*nnx.split(model)), x)
        result = getattr(nnx, inner)(forward)(model, x)
        return result[0] if inner == "value_and_grad" else result

    close(jax.jit(kj.pipeline(function))(model, X), forward(model, X))


def test_a_merged_nnx_state_that_is_not_returned_is_no_change() -> None:
    nnx = pytest.importorskip("flax.nnx")
    network_loss, create, x = digits_step(nnx)
    graphdef, state = nnx.split(create()[0])
    close(kj.pipeline(lambda state, x: network_loss(nnx.merge(graphdef, state), x))(state, x), network_loss(create()[0], x))


def test_equinox_state_is_used_up_and_returned() -> None:
    eqx = pytest.importorskip("equinox")
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, axis_name="batch", mode="batch")

    def function(state: Any, x: Any) -> Any:
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    (got, new), (want, expected) = (f(state, X) for f in (jax.jit(kj.pipeline(function)), jax.jit(function)))
    close((got, jax.tree.leaves(new)), (want, jax.tree.leaves(expected)))
    close(kj.pipeline(lambda state, x: function(state, x)[0])(state, X), want)
