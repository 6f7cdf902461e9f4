# pyright: strict
"""Wrong calls, one to a line: type checkers refuse the lines that end in ``# refused``, and no other. Nothing runs them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import kitsune_jax as kj


@kj.pipeline
def scaled(x: jax.Array, by: int = 1) -> jax.Array:
    return jnp.sin(x)


def wrong_options() -> None:
    kj.pipeline(scaled, residuals="sav")  # refused
    kj.pipeline(residuals="sav")  # refused
    kj.pipeline(scaled, target="gpu")  # refused
    kj.pipeline(scaled, export="all")  # refused
    kj.pipeline(scaled, platfrom="cuda")  # refused
    kj.pipeline(3)  # refused
    kj.explain(scaled, residuals="sav")  # refused
    kj.explain(scaled, platform="tpu")  # refused
    kj.explain(scaled, platfrom="cuda")  # refused
    kj.profile(scaled, residuals="sav")  # refused
    kj.profile(scaled, repeat=3)  # refused


def wrong_arguments(x: jax.Array) -> None:
    scaled()  # refused
    scaled("x")  # refused
    scaled(x, "2")  # refused
    scaled(x, bye=2)  # refused
    kj.pipeline(scaled, force=True)(x, "2")  # refused
    kj.pipeline(force=True)(scaled)(x, "2")  # refused
    kj.explain(scaled, x)  # refused
    kj.profile(scaled, x)  # refused
    kj.profile(scaled)(x, "2")  # refused


def wrong_results(x: jax.Array) -> str:
    print(scaled(x).shap)  # refused
    print(kj.explain(scaled)(x).ops)  # refused
    print(kj.explain(scaled).ops_total)  # refused
    return scaled(x)  # refused
