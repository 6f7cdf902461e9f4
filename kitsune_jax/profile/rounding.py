"""Where ``jax.jit`` on this CPU rounds results of 16-bit floats: asked with a small program, once for each version of JAX.

Comes in: the JAX at hand. Goes out: ``at_hand``, a ``Rounding``. Invariant: the answer depends on the versions and flags of XLA and
on the CPU only, so all processes of a machine have the same; it is kept on disk beside the machine's profile.

Known answers: JAX 0.10.2, 0.11.2 and 0.12.0 round every result in both dtypes, but a bfloat16 result that is converted to float32
keeps its digits (XLA drops a conversion of its own in front of one of the program's).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import ml_dtypes
import numpy as np

from kitsune_jax import _compat, config
from kitsune_jax.cache import Cache
from kitsune_jax.cache import key as cache_key
from kitsune_jax.ops.rounding import NARROW, Rounding
from kitsune_jax.profile import machine_info

KNOWN = Rounding(NARROW, frozenset({"float16"}))
_SUFFIX = ".rounding.json"
_FORMAT = "1"  # of the program below, and of what is kept


@functools.cache
def at_hand() -> Rounding:
    """Where ``jit`` rounds on the CPU of this process; where there is none to ask, where the known versions do."""
    if not _compat.has_cpu_backend():
        return KNOWN
    folder = config.cache_dir()
    cache = Cache(None if folder is None else folder.absolute() / "profiles", what="answers of XLA", made="asked")
    try:
        found = json.loads(cache.get(_identity(), _SUFFIX, lambda: json.dumps(_to_json(ask())).encode()))
        return Rounding(frozenset(found["results"]), frozenset(found["widened"]))
    except Exception as error:  # neither an odd backend nor an odd file fails a user's program
        config.logger.warning("asking XLA where it rounds 16-bit results failed, so all of them are rounded: %s", error)
        return Rounding()


def ask() -> Rounding:
    """Run the program. In a thread of its own: the one that asks is in the middle of tracing a function."""
    found: list[Rounding | BaseException] = []

    def run() -> None:
        try:
            found.append(_ask())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="kitsune_jax rounding", daemon=True)
    thread.start()
    thread.join()
    if isinstance(found[0], Rounding):
        return found[0]
    raise RuntimeError(f"{type(found[0]).__name__}: {found[0]}") from found[0]


def _ask() -> Rounding:
    numbers = np.linspace(1.0, 2.0, 257)
    with jax.default_device(jax.devices("cpu")[0]):
        answers = {name: _answer(jnp.dtype(name), numbers) for name in sorted(NARROW)}
    return Rounding(
        frozenset(name for name, (rounds, _) in answers.items() if rounds),
        frozenset(name for name, (_, rounds) in answers.items() if rounds),
    )


def _answer(dtype: Any, numbers: np.ndarray) -> tuple[bool, bool]:
    """Is a result rounded that an operator of the same dtype reads? And one that is converted to float32?"""
    a, b = (x.astype(dtype) for x in (numbers, numbers[::-1] / 3))
    error, product = (np.asarray(x) for x in jax.jit(_errors)(a, b))
    exact = a.astype(np.float32) * b.astype(np.float32)
    return bool(np.any(error != 0)), bool(np.any(product != exact))


def _errors(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The error of a sum (Knuth's TwoSum), which is 0 where ``s`` keeps its digits; and a product in float32."""
    s = a + b
    t = s - a
    return (a - (s - t)) + (b - t), (a * b).astype(jnp.float32)


def _to_json(rounding: Rounding) -> dict[str, list[str]]:
    return {name: sorted(value) for name, value in dataclasses.asdict(rounding).items()}


def _identity() -> str:
    return cache_key(
        format=_FORMAT,
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        ml_dtypes=ml_dtypes.__version__,
        flags=config.xla_flags(),
        cpu=machine_info.model_name(),
    )
