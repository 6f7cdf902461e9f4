"""Transformations of a function: derivatives by one argument, by two or by all, batches, and whole training steps.

Comes in: a ``Callee`` (the function, perhaps pipelined, and a description of its arguments) and choices. Goes out: a function of
the same arguments. Tangents, cotangents and batches are made of the arguments, so that a transformed function needs no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trust.context import Argument
from trust.program import Digits, Program

Array = Any
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Callee:
    """``f(*args)``, with an ``Argument`` for each."""

    f: Function
    specs: tuple[Argument, ...]
    program: Program

    def floats(self) -> list[int]:
        return [k for k, spec in enumerate(self.specs) if spec.is_float]

    def some(self, choices: Digits) -> tuple[int, ...]:
        """One floating argument, two, or all of them."""
        floats = self.floats()
        one = floats[choices.below(len(floats))]
        two = floats[choices.below(len(floats))]
        return choices.pick((one,), tuple(sorted({one, two})), tuple(floats))


def _floating(outs: Any) -> list[Array]:
    return [x for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.floating)]


def objective(callee: Callee, choices: Digits) -> Function:
    """A number that depends on all floating results, perhaps with a penalty on the parameters in one of the ways users write it."""
    reduce = choices.pick(
        lambda x: jnp.mean(jnp.sin(x)),
        lambda x: jnp.mean(jnp.square(x)) * 0.5,
        lambda x: jnp.sum(x) / x.size,
        lambda x: jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))) / x.size,
        lambda x: jnp.vdot(x, x) / x.size,
        lambda x: jax.scipy.special.logsumexp(x),
        lambda x: jnp.sqrt(jnp.sum(x * x) + 0.1),
    )
    norm = choices.pick(
        None,
        lambda w: jnp.vdot(w, w),
        lambda w: jnp.dot(w.reshape(-1), w.reshape(-1)),
        lambda w: jnp.einsum("i,i->", w.ravel(), w.ravel()) if w.ndim != 2 else jnp.einsum("ij,ij->", w, w),
        lambda w: jnp.sum(w**2),
        lambda w: jnp.sum(jnp.abs(w)),
        lambda w: jnp.sqrt(jnp.sum(jnp.square(w)) + 1e-2),
    )
    wide = choices.pick(True, False)

    def value(*args: Array) -> Array:
        total = jnp.zeros((), "float32" if callee.program.dtype != "float64" else "float64")
        for x in _floating(callee.f(*args)):
            if x.size:
                total = total + reduce(x.astype(total.dtype) if wide else x).astype(total.dtype)
        if norm is not None:
            for spec, w in zip(callee.specs, args, strict=True):
                if spec.kind == "param" and w.size:
                    total = total + 0.01 * norm(w).astype(total.dtype)
        return total

    return value


def _zeros_for_integers(args: Sequence[Array], tangent: Callable[[Array], Array]) -> tuple[Array, ...]:
    return tuple(tangent(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0) for x in args)


def _of_some(callee: Callee, chosen: Sequence[int], args: Sequence[Array]) -> Function:
    """The floating results as a function of the ``chosen`` arguments; the others are those of ``args``."""

    def of_chosen(*xs: Array) -> Any:
        full = list(args)
        for k, x in zip(chosen, xs, strict=True):
            full[k] = x
        return _floating(callee.f(*full))

    return of_chosen


def none(callee: Callee, choices: Digits) -> Function:
    return callee.f


def grad(callee: Callee, choices: Digits) -> Function:
    return jax.grad(objective(callee, choices), callee.some(choices))


def value_and_grad(callee: Callee, choices: Digits) -> Function:
    return jax.value_and_grad(objective(callee, choices), callee.some(choices))


def grad_of_checkpoint(callee: Callee, choices: Digits) -> Function:
    policy = choices.pick(None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable)
    remat = dataclasses.replace(callee, f=jax.checkpoint(callee.f, policy=policy))
    return jax.grad(objective(remat, choices), callee.some(choices))


def jvp(callee: Callee, choices: Digits) -> Function:
    """Tangents for one argument, two or all; the others are constant."""
    moved = callee.some(choices)

    def f(*args: Array) -> Any:
        xs = [args[k] for k in moved]
        return jax.jvp(_of_some(callee, moved, args), xs, [jnp.cos(x) for x in xs])

    return f


def linearize(callee: Callee, choices: Digits) -> Function:
    def f(*args: Array) -> Any:
        out, linear = jax.linearize(callee.f, *args)
        return out, linear(*_zeros_for_integers(args, jnp.cos))

    return f


def vjp(callee: Callee, choices: Digits) -> Function:
    wanted = callee.some(choices)

    def f(*args: Array) -> Any:
        outs, pull = jax.vjp(_of_some(callee, wanted, args), *(args[k] for k in wanted))
        return outs, pull([jnp.cos(x) / max(1, x.size) for x in outs])

    return f


def _batched(callee: Callee, choices: Digits, inner: Function) -> Function:
    """``vmap`` over some arguments, along their first or last axis."""
    mapped = choices.pick("row", "param", "all", "one")
    one = choices.below(len(callee.specs))
    out_axis = choices.pick(0, 0, -1)
    axes: list[int | None] = []
    for k, spec in enumerate(callee.specs):
        wanted = {"row": spec.streams, "param": not spec.streams, "all": True, "one": k == one}[mapped]
        axes.append(choices.pick(0, -1, 1 if spec.shape else 0) if wanted else None)
    if all(a is None for a in axes):
        axes[0] = 0

    def f(*args: Array) -> Any:
        def batch(x: Array, axis: int | None) -> Array:
            if axis is None:
                return x
            if jnp.issubdtype(x.dtype, jnp.floating):
                return jnp.stack([x, x * 0.5, -x], axis)
            return jnp.stack([x, jnp.flip(x) if x.ndim else x, x], axis)

        return jax.vmap(inner, axes, out_axis)(*map(batch, args, axes))

    return f


def vmap(callee: Callee, choices: Digits) -> Function:
    return _batched(callee, choices, callee.f)


def vmap_of_grad(callee: Callee, choices: Digits) -> Function:
    return _batched(callee, choices, jax.grad(objective(callee, choices), callee.some(choices)))


def grad_of_vmap(callee: Callee, choices: Digits) -> Function:
    batched = dataclasses.replace(callee, f=_batched(callee, choices, callee.f))
    return jax.grad(objective(batched, choices), callee.some(choices))


def vmap_of_jvp(callee: Callee, choices: Digits) -> Function:
    return _batched(callee, choices, jvp(callee, choices))


def vmap_of_vmap(callee: Callee, choices: Digits) -> Function:
    inner = _batched(callee, choices, callee.f)
    return lambda *args: jax.vmap(lambda s: inner(*(x * s if spec.is_float else x for x, spec in zip(args, callee.specs))))(
        jnp.array([1, 0.5], callee.program.dtype)
    )


def jacobian(callee: Callee, choices: Digits) -> Function:
    """The Jacobian of the sums of a few columns, by the first elements of one argument."""
    (k, *_) = callee.some(choices)
    kind = choices.pick(jax.jacfwd, jax.jacrev)

    def f(*args: Array) -> Any:
        def of_few(few: Array) -> Any:
            flat = args[k].reshape(-1)
            moved = jnp.concatenate([flat[: few.size] + few, flat[few.size :]]).reshape(args[k].shape)
            outs = [x for x in _floating(callee.f(*args[:k], moved, *args[k + 1 :])) if x.size]
            return [jnp.sum(x.reshape(-1, x.shape[-1])[:, :4], axis=0) * 4 / x.size if x.ndim else x for x in outs]

        return kind(of_few)(jnp.zeros((min(3, args[k].size),), args[k].dtype))

    return f


def hessian_vector(callee: Callee, choices: Digits) -> Function:
    value = objective(callee, choices)
    (k, *_) = callee.some(choices)

    def f(*args: Array) -> Any:
        def slope(x: Array) -> Array:
            return jax.grad(value, k)(*args[:k], x, *args[k + 1 :])

        return jax.jvp(slope, (args[k],), (jnp.cos(args[k]),))

    return f


def train(callee: Callee, choices: Digits) -> Function:
    """Whole training steps: value and gradient, clipping, an optimiser; once, or several in a ``scan``."""
    value = objective(callee, choices)
    optimiser, clipped = choices.pick("sgd", "momentum", "adam"), choices.pick("none", "norm", "elements")
    decay, steps = choices.pick(0.0, 0.01), choices.pick(0, 0, 2)
    learnt = [k for k, spec in enumerate(callee.specs) if spec.kind == "param"] or callee.floats()

    def step(params: list[Array], state: Any, args: Sequence[Array]) -> tuple[list[Array], Any, Array]:
        def loss(ps: list[Array]) -> Array:
            full = list(args)
            for k, p in zip(learnt, ps, strict=True):
                full[k] = p
            return value(*full)

        found, slopes = jax.value_and_grad(loss)(params)
        if clipped == "norm":
            size = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(found.dtype))) for g in slopes) + 1e-6)
            slopes = [(g * jnp.minimum(1.0, 0.5 / size)).astype(g.dtype) for g in slopes]
        elif clipped == "elements":
            slopes = [jnp.clip(g, -0.1, 0.1) for g in slopes]
        slopes = [g + decay * p for g, p in zip(slopes, params)]
        if optimiser == "sgd":
            return [p - 0.1 * g for p, g in zip(params, slopes)], state, found
        if optimiser == "momentum":
            speed = [0.9 * s + g for s, g in zip(state[0], slopes)]
            return [p - 0.1 * s for p, s in zip(params, speed)], (speed,), found
        first, second, count = state
        first = [0.9 * m + 0.1 * g for m, g in zip(first, slopes)]
        second = [0.99 * s + 0.01 * g * g for s, g in zip(second, slopes)]
        count = count + 1
        a, b = 1 - 0.9 ** count.astype(found.dtype), 1 - 0.99 ** count.astype(found.dtype)
        moved = [p - (0.01 * (m / a) / (jnp.sqrt(s / b) + 1e-3)).astype(p.dtype) for p, m, s in zip(params, first, second)]
        return moved, (first, second, count), found

    def f(*args: Array) -> Any:
        params = [args[k] for k in learnt]
        zeros = [p * 0.1 for p in params]
        state: Any = {"sgd": (), "momentum": (zeros,), "adam": (zeros, [z * z for z in zeros], jnp.int32(0))}[optimiser]
        if not steps:
            return step(params, state, args)

        def body(carry: Any, _: None) -> tuple[Any, Array]:
            new_params, new_state, found = step(carry[0], carry[1], args)
            return (new_params, new_state), found

        return lax.scan(body, (params, state), None, length=steps)

    return f


TRANSFORMS: dict[str, Callable[[Callee, Digits], Function]] = {
    "none": none,
    "grad": grad,
    "value_and_grad": value_and_grad,
    "grad_of_checkpoint": grad_of_checkpoint,
    "jvp": jvp,
    "linearize": linearize,
    "vjp": vjp,
    "vmap": vmap,
    "vmap_of_grad": vmap_of_grad,
    "grad_of_vmap": grad_of_vmap,
    "vmap_of_jvp": vmap_of_jvp,
    "vmap_of_vmap": vmap_of_vmap,
    "jacobian": jacobian,
    "hessian_vector": hessian_vector,
    "train": train,
}
REVERSE = frozenset(TRANSFORMS) - {"none", "jvp", "vmap", "vmap_of_jvp", "vmap_of_vmap"}
