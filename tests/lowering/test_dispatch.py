"""A long call on a CPU is dispatched as other programs are: Python goes on, and waits where it reads the result."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import kitsune_jax as kj
from kitsune_jax.targets.cpu import call

CHEAP = 1000  # operations; XLA:CPU runs a program of fewer in the thread that asks for it


def simulated(x: Any, steps: int) -> Any:
    return jax.lax.fori_loop(0, steps, lambda _, x: jnp.sin(x) + 0.5, x)


def compiled(steps: int, *args: Any, **options: Any) -> Any:
    f = kj.pipeline(lambda *x: jax.tree.map(lambda x: simulated(x, steps), x), force=True, strict=True, **options)
    return jax.jit(f).lower(*args).compile()


def operations(program: Any) -> float:
    assert "kitsune_cpu" in program.as_text()
    return program.cost_analysis()["flops"]


def test_python_does_not_wait_for_a_long_call() -> None:
    x = jnp.ones((4096,))
    program = compiled(20_000, x)
    (out,) = program(x)
    assert not out.is_ready()
    np.testing.assert_allclose(out, simulated(np.ones(4096, np.float32), 20_000), rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (5, 0), (2, 3, 7)])
def test_long_calls_of_any_operands(monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...]) -> None:
    """The operand that nobody reads changes no result, whatever the operands are."""
    monkeypatch.setattr(call, "LONG_SECONDS", 0.0)
    x = jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 1, dtype)
    y = jnp.linspace(0, 1, 11)
    out = compiled(3, x.astype(jnp.float32), y)(x.astype(jnp.float32), y)
    np.testing.assert_allclose(out[1], simulated(y, 3), rtol=1e-6)
    f = kj.pipeline(lambda x, y: jnp.where(x[..., None], y, -y) if dtype == "bool" else x[..., None] + y, force=True, strict=True)
    if x.size:
        program = jax.jit(f).lower(x, y).compile()
        assert operations(program) >= CHEAP
        np.testing.assert_array_equal(np.asarray(program(x, y)), np.asarray(jax.jit(f.__wrapped__)(x, y)))


def test_xla_compiles_nothing_for_a_program_of_one_long_call() -> None:
    """What hands the call over is no kernel, which LLVM would take longer to compile than all else takes."""
    program = compiled(20_000, jnp.ones(4096)).as_text()
    assert set(re.findall(r" (\w[\w-]*)\(%", program)) - {"tuple"} == {"fft", "custom-call", "get-tuple-element"}


def test_short_calls_run_at_once() -> None:
    assert operations(compiled(10, jnp.ones(8))) < CHEAP <= operations(compiled(20_000, jnp.ones(4096)))


def test_a_long_call_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "LONG_SECONDS", 0.0)
    mesh, rows = Mesh(np.array(jax.devices()[:1]), ("rows",)), PartitionSpec("rows")
    f = jax.shard_map(kj.pipeline(lambda x: simulated(x, 5), force=True, strict=True), mesh=mesh, in_specs=rows, out_specs=rows)
    x = jnp.linspace(0, 1, 12)
    program = jax.jit(f).lower(x).compile()
    assert operations(program) >= CHEAP
    np.testing.assert_allclose(program(x), simulated(x, 5), rtol=1e-6)
