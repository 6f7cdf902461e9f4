"""Whether this package works with the JAX at hand.

Comes in: JAX's version, and JAX. Goes out: ``available()``, ``why_not()``. Invariants: a version that the tests run on is believed;
any other is tried with a small function under the transformations, once per process, when a pipelined function is first called; and
where that fails, functions run as plain ``jax.jit``, with one warning.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat, preview, primitive
from kitsune_jax.errors import NotPipelined
from kitsune_jax.options import Options

TESTED = ((0, 10, 2), (0, 12, 0))
SUPPORTED = "0.10.2 to 0.12.0"

_lock = threading.Lock()
_known: str | None = None  # what ``why_not`` found


def available() -> bool:
    """Whether functions can be pipelined with this JAX. Warns, once per process, if they cannot."""
    if why_not():
        _warn()
    return not why_not()


def why_not() -> str:
    """Why ``available()`` is False, as a clause that names the versions supported; "" where it is True."""
    global _known
    if _known is None:
        with _lock:
            if _known is None:
                reason = primitive.failure or ("" if _is_tested() else _in_a_thread_of_its_own())
                works = f"kitsune_jax works with JAX {SUPPORTED}, and not with this JAX {jax.__version__} ({reason})"
                _known = works if reason else ""
    return _known


def _is_tested() -> bool:
    released = not re.search("[^0-9.]", jax.__version__)  # a pre-release is neither this version nor the one before
    return released and _compat.VERSION in TESTED


@functools.cache
def _warn() -> None:
    warnings.warn(f"{why_not()}. Pipelined functions run as plain jax.jit.", RuntimeWarning, stacklevel=4)


def _in_a_thread_of_its_own() -> str:
    """What ``_try`` finds, away from the caller's traces and contexts (a mesh, ``disable_jit``, a default device)."""
    found: list[str] = []

    def work() -> None:
        try:
            _try()
            found.append("")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def _try() -> None:
    """Take a small function through every rule and through its lowering. Raises whatever is amiss."""
    from jax.experimental import checkify, jet

    w, x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)

    bias = jnp.arange(3, dtype=jnp.float32)

    def plain(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w + bias) * 2

    def pipelined(strict: bool) -> Any:
        def call(w: Any, x: Any) -> Any:
            if not _compat.is_staging() or not _compat.valid_jaxtype(x):
                return plain(w, x)
            closed, consts = _compat.hoist_consts(_compat.trace_jaxpr(lambda *a: [plain(*a)], [jax.typeof(w), jax.typeof(x)]))
            outs = primitive.pipeline_p.bind(*consts, w, x, call_jaxpr=closed, options=Options(strict=strict, force=True))
            return outs[0]

        return jax.jit(call, inline=True)

    def transformed(f: Any, w: Any, x: Any) -> Any:
        def loss(f: Any, w: Any) -> Any:
            return jnp.sum(f(w, x) ** 2)

        def step(ws: Any) -> Any:
            tangents = jax.jvp(lambda w: f(w, x), (w,), (w,))
            gradients = jax.vmap(jax.grad(lambda w: loss(f, w)))(ws)
            recomputed = jax.value_and_grad(lambda w: loss(jax.checkpoint(f), w))(w)
            scanned = jax.lax.scan(lambda c, _: (c + jax.grad(lambda w: loss(f, w))(c), None), w, None, length=2)[0]
            checked = checkify.checkify(f, errors=checkify.user_checks)(w, x)[1]
            taylor = jet.jet(lambda w: f(w, x), (w,), ((jnp.ones_like(w),),), factorial_scaled=False)
            return tangents, gradients, recomputed, scanned, checked, taylor

        return jax.jit(step)

    preview.explain_jaxpr(
        _compat.without_dead_code(_compat.hoist_consts(jax.make_jaxpr(plain)(w, x))[0]),
        Options(force=True, strict=True),
        "cpu",
        None,
    )
    ws = np.stack([w, w / 2])
    want = transformed(plain, w, x).lower(ws).compile()(ws)
    try:
        lowered = transformed(pipelined(True), w, x).lower(ws)
    except NotPipelined:  # a platform without a target: the rules are all that can be tried
        lowered = transformed(pipelined(False), w, x).lower(ws)
    got = lowered.compile()(ws)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)
