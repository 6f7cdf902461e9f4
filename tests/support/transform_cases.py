"""Every transformation as a case: one function built twice, from ``pipeline`` and from the identity, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tests.support.checks import arrays

Wrap = Callable[..., Any]
X, W1, W2 = arrays(0, (6, 8), (8, 16), (16, 8))
SQUARE = arrays(1, (3, 8, 8))[0]
BATCH = arrays(2, (5, 6, 8))[0]
POLICIES = jax.checkpoint_policies


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return jnp.tanh(jax.nn.relu(x @ w1) @ w2)


def loss(f: Any) -> Any:
    return lambda *args: jnp.sum(f(*args) ** 2)


CASES: dict[str, tuple[Callable[[Wrap], Any], tuple[Any, ...]]] = {}


def case(*args: Any) -> Callable[[Callable[[Wrap], Any]], Callable[[Wrap], Any]]:
    def register(build: Callable[[Wrap], Any]) -> Callable[[Wrap], Any]:
        CASES[build.__name__] = (build, args)
        return build

    return register


@case(X, W1, W2)
def forward(p: Wrap) -> Any:
    return p(mlp)


@case(X, W1, W2)
def grad(p: Wrap) -> Any:
    return jax.grad(loss(p(mlp)), (0, 1, 2))


@case(X, W1, W2)
def grad_of_weights_only(p: Wrap) -> Any:
    return jax.grad(loss(p(mlp)), (1, 2))


@case(X, W1, W2)
def value_and_grad(p: Wrap) -> Any:
    return jax.value_and_grad(loss(p(mlp)), (0, 1, 2))


@case(X, W1, W2)
def pipelined_value_and_grad(p: Wrap) -> Any:
    return p(jax.value_and_grad(loss(mlp), (0, 1, 2)))


@case(X, W1, W2)
def vjp(p: Wrap) -> Any:
    def f(*args: Any) -> Any:
        out, back = jax.vjp(p(mlp), *args)
        return out, back(jnp.ones_like(out))

    return f


@case(X, W1, W2)
def jvp(p: Wrap) -> Any:
    return lambda *args: jax.jvp(p(mlp), args, jax.tree.map(jnp.ones_like, args))


@case(X, W1, W2)
def jvp_of_one_argument(p: Wrap) -> Any:
    return lambda x, w1, w2: jax.jvp(lambda w: p(mlp)(x, w, w2), (w1,), (jnp.ones_like(w1),))


@case(X, W1, W2)
def linearize(p: Wrap) -> Any:
    def f(*args: Any) -> Any:
        out, tangent = jax.linearize(p(mlp), *args)
        return out, tangent(*args)

    return f


@case(X, W1, W2)
def jacfwd(p: Wrap) -> Any:
    return jax.jacfwd(p(mlp), 1)


@case(X, W1, W2)
def jacrev(p: Wrap) -> Any:
    return jax.jacrev(p(mlp), 1)


@case(W2[:, :2], X, W1)
def hessian(p: Wrap) -> Any:
    return jax.hessian(lambda w2, x, w1: loss(p(mlp))(x, w1, w2))


@case(X, W1, W2)
def grad_of_grad(p: Wrap) -> Any:
    return jax.grad(lambda *args: jnp.sum(jax.grad(loss(p(mlp)), 1)(*args) ** 2), 2)


@case(BATCH, W1, W2)
def vmap_with_shared_weights(p: Wrap) -> Any:
    return jax.vmap(p(mlp), (0, None, None))


@case(jnp.moveaxis(BATCH, 0, -1), W1, W2)
def vmap_of_the_last_axis(p: Wrap) -> Any:
    return jax.vmap(p(mlp), (2, None, None), out_axes=1)


@case(X, W1, W2)
def vmap_of_vectors(p: Wrap) -> Any:
    return jax.vmap(p(mlp), (0, None, None))


@case(jnp.stack([BATCH, BATCH * 2]), W1, W2)
def vmap_nested(p: Wrap) -> Any:
    return jax.vmap(jax.vmap(p(mlp), (0, None, None)), (0, None, None))


@case(X, jnp.stack([W1, W1 * 2]), W2)
def vmap_of_weights(p: Wrap) -> Any:
    return jax.vmap(p(mlp), (None, 0, None))


@case(BATCH, W1, W2)
def vmap_of_grad(p: Wrap) -> Any:
    return jax.vmap(jax.grad(loss(p(mlp)), 1), (0, None, None))


@case(BATCH, W1, W2)
def grad_of_vmap(p: Wrap) -> Any:
    return jax.grad(lambda *args: jnp.sum(jax.vmap(p(mlp), (0, None, None))(*args) ** 2), (1, 2))


def _checkpointed(policy: Any) -> Callable[[Wrap], Any]:
    return lambda p: jax.grad(loss(jax.checkpoint(p(mlp), policy=policy)), (0, 1, 2))


def _residuals(residuals: Any) -> Callable[[Wrap], Any]:
    return lambda p: jax.grad(loss(p(mlp, residuals=residuals)), (0, 1, 2))


for _name in ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"):
    CASES[f"checkpoint_{_name}"] = (_checkpointed(getattr(POLICIES, _name)), (X, W1, W2))
    CASES[f"residuals_{_name}"] = (_residuals(getattr(POLICIES, _name)), (X, W1, W2))
CASES["checkpoint_default"] = (_checkpointed(None), (X, W1, W2))
CASES["residuals_recompute"] = (_residuals("recompute"), (X, W1, W2))


def named(x: Any, w1: Any, w2: Any) -> Any:
    return jnp.tanh(jnp.sin(checkpoint_name(x @ w1, "hidden")) @ w2)


@case(X, W1, W2)
def checkpoint_of_names(p: Wrap) -> Any:
    policy = POLICIES.save_only_these_names("hidden")
    around = jax.grad(loss(jax.checkpoint(p(named), policy=policy)), (0, 1, 2))
    inside = jax.grad(loss(p(named, residuals=policy)), (0, 1, 2))
    return lambda *args: (around(*args), inside(*args))


@case(X, SQUARE)
def in_a_scan_body(p: Wrap) -> Any:
    return lambda x, ws: jax.lax.scan(lambda c, w: (p(mlp)(c, w, w), jnp.sum(c)), x, ws)


@case(X, SQUARE)
def grad_of_a_scan(p: Wrap) -> Any:
    return jax.grad(lambda x, ws: jnp.sum(jax.lax.scan(lambda c, w: (p(mlp)(c, w, w), None), x, ws)[0]), (0, 1))


def scanned(x: Any, ws: Any) -> Any:
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]


@case(X, SQUARE)
def around_a_scan(p: Wrap) -> Any:
    return p(scanned)


@case(X, SQUARE)
def grad_around_a_scan(p: Wrap) -> Any:
    return jax.grad(loss(p(scanned)), (0, 1))


@case(X)
def around_a_scan_that_closes_over_constants(p: Wrap) -> Any:
    table = np.asarray(SQUARE[0])
    inner = jax.jit(lambda c: jnp.tanh(c @ table))
    return jax.grad(loss(p(lambda x: jax.lax.scan(lambda c, _: (inner(c), jnp.sum(c)), x, None, length=3)[0])))


@case(X, SQUARE[0])
def in_a_while_body(p: Wrap) -> Any:
    return lambda x, w: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, p(mlp)(s[1], w, w)), (0, x))[1]


@case(X, SQUARE[0])
def in_both_branches(p: Wrap) -> Any:
    return lambda x, w: jax.lax.cond(jnp.sum(x) > 0, lambda y: p(mlp)(y, w, w), lambda y: p(mlp)(y, w.T, w), x)


def branching(x: Any, w: Any) -> Any:
    y = jax.lax.fori_loop(0, 3, lambda _, s: jnp.tanh(s @ w), x)
    return jax.lax.cond(jnp.sum(y) > 0, lambda y: y @ w, lambda y: jnp.sin(y @ w), y)


@case(X, SQUARE[0])
def around_loops_and_branches(p: Wrap) -> Any:
    return p(branching)


@case(X, SQUARE[0])
def grad_around_loops_and_branches(p: Wrap) -> Any:
    return jax.grad(loss(p(branching)), (0, 1))


@jax.custom_vjp
def sine_layer(x: Any, w: Any) -> Any:
    return jnp.sin(x @ w)


def _sine_back(saved: Any, g: Any) -> Any:
    x, w = saved
    h = g * jnp.cos(x @ w)
    return h @ w.T, x.T @ h


sine_layer.defvjp(lambda x, w: (sine_layer(x, w), (x, w)), _sine_back)


@jax.custom_jvp
def cube(x: Any) -> Any:
    return x * x * x


cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))


def with_custom_rules(x: Any, w1: Any, w2: Any) -> Any:
    h = jax.nn.silu(sine_layer(x, w1)) @ w2
    return cube(h) + jax.nn.softmax(jax.nn.gelu(x @ w1) @ w2)


@case(X, W1, W2)
def custom_rules_inside(p: Wrap) -> Any:
    return p(with_custom_rules)


@case(X, W1, W2)
def grad_of_custom_rules(p: Wrap) -> Any:
    return jax.grad(loss(p(with_custom_rules)), (0, 1, 2))


@case(X, W1, W2)
def inside_a_custom_vjp(p: Wrap) -> Any:
    f = jax.custom_vjp(lambda *args: p(mlp)(*args))
    f.defvjp(lambda *args: (p(mlp)(*args), args), lambda args, g: jax.vjp(p(mlp), *args)[1](g))
    return jax.grad(loss(f), (0, 1, 2))


def of_trees(params: Any, x: Any) -> Any:
    h = jax.nn.relu(x @ params["layers"][0])
    return {"y": h @ params["last"], "none": None, "pair": (h, jnp.sum(h))}


@case({"layers": [W1], "last": W2}, X)
def trees(p: Wrap) -> Any:
    return p(of_trees)


@case({"layers": [W1], "last": W2}, X)
def grad_of_trees(p: Wrap) -> Any:
    return jax.grad(lambda params, x: jnp.sum(p(of_trees)(params, x)["y"] ** 2))


@case(X)
def closed_over_arrays(p: Wrap) -> Any:
    return jax.value_and_grad(loss(p(lambda x: mlp(x, W1, W2))))


@case(X, W1)
def closed_over_tracers(p: Wrap) -> Any:
    return jax.grad(lambda x, w: loss(p(lambda y: mlp(y, w * 2, W2)))(x), (0, 1))


@case(X, W1)
def closed_over_statics(p: Wrap) -> Any:
    layers, activation = 2, "tanh"

    def f(x: Any, w: Any) -> Any:
        for _ in range(layers):
            x = getattr(jnp, activation)(x @ w @ w.T)
        return x

    return p(f)


@case(X, SQUARE[0])
def pipeline_of_pipelines(p: Wrap) -> Any:
    return jax.grad(loss(p(lambda x, w: p(mlp)(x, w, w) @ w)), (0, 1))


@case(X, jnp.arange(6), W1, jnp.ones(16, bool))
def integers_and_booleans(p: Wrap) -> Any:
    def f(x: Any, i: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w) * i[:, None] + b.astype(x.dtype), i + 1, b

    return lambda x, i, w, b: (p(f)(x, i, w, b), jax.grad(lambda x, w: jnp.sum(p(f)(x, i, w, b)[0] ** 2), (0, 1))(x, w))
