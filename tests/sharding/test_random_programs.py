"""Random programs (``trust``) whose arguments are sharded at random, against NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from tests.support.checks import in_parts
from trust.check import check
from trust.generate import draw

SEED, EACH = 11, 12


def sharded(number: int, residuals: str) -> Callable[[Any], Any]:
    """Pipelines a function whose arguments are divided by a mesh of 2 x 3 devices; XLA takes uneven parts of few arrays."""
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])

    def wrap(f: Any) -> Any:
        pipelined = kj.pipeline(f, force=True, residuals=residuals)

        def divided(*args: Any, **kwargs: Any) -> Any:
            rng = random.Random(number)

            def put(x: Any) -> Any:
                if not np.ndim(x) or not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
                    return x
                axes: list[tuple[str, ...]] = [()] * np.ndim(x)
                for name, size in mesh.shape.items():
                    d = rng.randrange(-1, np.ndim(x))
                    if d >= 0 and x.shape[d] and x.shape[d] % (size * np.prod([mesh.shape[a] for a in axes[d]], dtype=int)) == 0:
                        axes[d] = (*axes[d], name)
                return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*(a or None for a in axes))))

            args, kwargs = jax.tree.map(put, (args, kwargs))
            return pipelined(*args, **kwargs)

        return divided

    return wrap


@in_parts
def test_a_random_program(part: int) -> None:
    outcomes = []
    for number in range(part * EACH, (part + 1) * EACH):
        program = draw(SEED, number)
        outcome = check(program, sharded(number, program.residuals))
        assert not outcome.failed, f"program {SEED}:{number}: {outcome.kind}: {outcome.detail}"
        outcomes.append(outcome)
    assert sum(outcome.pipelines for outcome in outcomes) >= EACH / 2
    assert sum(outcome.kind == "ok" for outcome in outcomes) >= EACH / 2
