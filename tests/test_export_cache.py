"""Programs that leave the process: ``jax.export`` round trips and JAX's persistent compilation cache."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import kitsune_jax as kj
from tests.checks import TARGET, arrays, close, in_float64

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here
X, W1, W2 = arrays(0, (6, 8), (8, 16), (16, 8))
ALLOWED = [export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, "kitsune_cuda")]


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return jnp.tanh(jax.nn.relu(x @ w1) @ w2)


def loss(f: Any) -> Any:
    return lambda *args: jnp.sum(f(*args) ** 2)


def _exported(f: Any, *args: Any, **options: Any) -> Any:
    return export.export(jax.jit(f), disabled_checks=ALLOWED, **options)(*args)


def test_export_round_trip_with_gradient() -> None:
    sent = _exported(kj.pipeline(mlp, force=True), X, W1, W2).serialize(vjp_order=1)
    received = export.deserialize(sent)
    assert TARGET in received.mlir_module()
    close(received.call(X, W1, W2), in_float64(mlp, X, W1, W2))
    grads = jax.jit(jax.grad(loss(received.call), (0, 1, 2)))(X, W1, W2)
    close(grads, in_float64(jax.grad(loss(mlp), (0, 1, 2)), X, W1, W2))


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cpu", "cuda", "tpu")])
def test_export_for_several_platforms(platforms: tuple[str, ...]) -> None:
    exported = _exported(kj.pipeline(mlp, force=True), X, W1, W2, platforms=platforms)
    assert TARGET in exported.mlir_module()
    close(exported.call(X, W1, W2), in_float64(mlp, X, W1, W2))


def test_platforms_without_a_target_lower_inline() -> None:
    text = jax.jit(kj.pipeline(mlp, force=True)).trace(X, W1, W2).lower(lowering_platforms=("tpu",)).as_text()
    assert "kitsune" not in text
    assert "stablehlo.dot_general" in text


def test_export_with_symbolic_shapes_lowers_inline() -> None:
    (rows,) = export.symbolic_shape("rows")
    exported = _exported(kj.pipeline(mlp, force=True), jax.ShapeDtypeStruct((rows, 8), jnp.float32), W1, W2)
    for x in (X, X[:3]):
        close(exported.call(x, W1, W2), in_float64(mlp, x, W1, W2))


PROGRAM = textwrap.dedent(
    """
    import logging, sys
    import jax, jax.numpy as jnp
    import kitsune_jax as kj

    hits = []

    class Hits(logging.Handler):
        def emit(self, record):
            if "cache hit for 'jit_step" in record.getMessage():
                hits.append(record.getMessage())

    log = logging.getLogger("jax._src.compiler")
    log.addHandler(Hits())
    log.setLevel(logging.DEBUG)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

    def step(w, x):
        return jnp.sum(kj.pipeline(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), force=True)(w, x) ** 2)

    step = jax.jit(jax.value_and_grad(step))
    w, x = jnp.eye(8) * 0.5, jnp.ones((16, 8))
    compiled = step.lower(w, x).compile()
    loss, grad = compiled(w, x)
    print(len(hits), compiled.as_text().count('custom_call_target="kitsune_cpu"') > 0, f"{float(loss):.6f} {float(grad.sum()):.6f}")
    """
)


RECEIVER = """
import sys
import jax.numpy as jnp
import kitsune_jax
from jax import export
received = export.deserialize(open(sys.argv[1], "rb").read())
print(float(jnp.sum(received.call(jnp.ones((6, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))))))
"""


def test_a_process_that_only_imports_the_package_runs_an_exported_program(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "exported"
    file.write_bytes(_exported(kj.pipeline(mlp, force=True), X, W1, W2).serialize())
    assert float(_python(RECEIVER, file)[0]) == pytest.approx(48.0)  # tanh of 128 is 1, 6 x 8 times


def _python(program: str, argument: pathlib.Path) -> list[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    root = str(pathlib.Path(kj.__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", program, str(argument)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


def test_a_second_process_hits_the_persistent_cache(tmp_path: pathlib.Path) -> None:
    first, second = _python(PROGRAM, tmp_path), _python(PROGRAM, tmp_path)
    assert first[:2] == ["0", "True"]
    assert int(second[0]) > 0 and second[1] == "True"
    assert first[2:] == second[2:]
