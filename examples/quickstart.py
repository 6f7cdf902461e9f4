"""The README's example: a multilayer perceptron as a spatial pipeline, its gradient, and the report of what was done."""

import jax
import jax.numpy as jnp

import kitsune_jax as kj


@kj.pipeline  # like jax.checkpoint: any pytrees in and out, composes with every JAX transformation
def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


widths = [64, 256, 256, 256, 256, 3]
keys = jax.random.split(jax.random.key(0), len(widths))
params = [(jax.random.normal(k, (m, n)) / m**0.5, jnp.zeros(n)) for k, m, n in zip(keys, widths, widths[1:], strict=False)]
x, y = jax.random.normal(keys[-1], (16384, 64)), jnp.ones((16384, 3))

out = jax.jit(mlp)(params, x)  # runs as a pipeline where that pays
value, grads = jax.jit(jax.value_and_grad(loss))(params, x, y)  # so do the forward and the backward pass of a gradient
print(f"loss {value:.4f}, output {out.shape}")
print(kj.explain(mlp)(params, x))  # runs nothing: what was pipelined, what was not and why, the plan, the bytes
