"""Programs that leave the process: ``jax.export`` round trips and JAX's persistent compilation cache."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import pytest
from jax import export

import kitsune_jax as kj
from tests.support.checks import TARGET, arrays, close, count, in_float64
from tests.support.transform_cases import loss, mlp

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here
X, W1, W2 = arrays(0, (6, 8), (8, 16), (16, 8))
ALLOWED = [export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, "kitsune_cuda")]


def with_calls(f: Any) -> Any:
    return kj.pipeline(f, force=True, export="calls")


def _exported(f: Any, *args: Any, **options: Any) -> Any:
    return export.export(jax.jit(f), disabled_checks=ALLOWED, **options)(*args)


@pytest.mark.parametrize("step", [lambda f: f, lambda f: jax.grad(loss(f), (1, 2))], ids=["forward", "gradient"])
def test_an_export_is_plain_hlo_by_default(step: Any) -> None:
    sent = export.export(jax.jit(step(kj.pipeline(mlp, force=True))))(X, W1, W2).serialize(vjp_order=1)
    received = export.deserialize(sent)
    assert "kitsune" not in received.mlir_module()
    close(received.call(X, W1, W2), in_float64(step(mlp), X, W1, W2))


def test_the_same_function_keeps_its_pipelines_where_it_is_not_exported() -> None:
    f = kj.pipeline(mlp, force=True)
    export.export(jax.jit(f))(X, W1, W2)
    assert count(jax.jit(f).lower(X, W1, W2).compile().as_text()) > 0
    close(jax.jit(f)(X, W1, W2), in_float64(mlp, X, W1, W2))


def test_a_plain_export_runs_where_the_package_is_not(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "exported"
    file.write_bytes(export.export(jax.jit(kj.pipeline(mlp, force=True)))(X, W1, W2).serialize())
    without = RECEIVER.replace("import kitsune_jax", "sys.modules['kitsune_jax'] = None")
    assert float(_python(without, file)[0]) == pytest.approx(48.0)


@pytest.mark.parametrize("kept", [False, True])
def test_the_report_says_what_an_export_would_hold(kept: bool) -> None:
    report = kj.explain(with_calls(mlp) if kept else kj.pipeline(mlp, force=True))(X, W1, W2)
    assert report.ops_pipelined > 0
    (note,) = (n for n in report.notes if "jax.export" in n)
    assert ("disabled_checks" in note) == kept
    assert ("plain HLO" in note and 'export="calls"' in note) == (not kept)


def test_a_strict_function_is_not_exported_as_plain_hlo() -> None:
    with pytest.raises(kj.NotPipelined, match='export="calls"'):
        export.export(jax.jit(kj.pipeline(mlp, force=True, strict=True)))(X, W1, W2)


def test_an_export_with_calls_needs_the_check_disabled() -> None:
    with pytest.raises(ValueError, match="kitsune_cpu"):
        export.export(jax.jit(with_calls(mlp)))(X, W1, W2)


def test_an_unknown_kind_of_export_is_refused() -> None:
    with pytest.raises(ValueError, match="export='hlo' is not known: use 'plain' or 'calls'"):
        kj.pipeline(mlp, export="hlo")


def test_export_round_trip_with_gradient() -> None:
    sent = _exported(with_calls(mlp), X, W1, W2).serialize(vjp_order=1)
    received = export.deserialize(sent)
    assert TARGET in received.mlir_module()
    close(received.call(X, W1, W2), in_float64(mlp, X, W1, W2))
    grads = jax.jit(jax.grad(loss(received.call), (0, 1, 2)))(X, W1, W2)
    close(grads, in_float64(jax.grad(loss(mlp), (0, 1, 2)), X, W1, W2))


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cpu", "cuda", "tpu")])
@pytest.mark.parametrize("kept", [False, True])
def test_export_for_several_platforms(platforms: tuple[str, ...], kept: bool) -> None:
    f = with_calls(mlp) if kept else kj.pipeline(mlp, force=True)
    exported = export.export(jax.jit(f), disabled_checks=ALLOWED if kept else (), platforms=platforms)(X, W1, W2)
    assert (TARGET in exported.mlir_module()) == kept
    close(exported.call(X, W1, W2), in_float64(mlp, X, W1, W2))


def test_platforms_without_a_target_lower_inline() -> None:
    text = jax.jit(kj.pipeline(mlp, force=True)).trace(X, W1, W2).lower(lowering_platforms=("tpu",)).as_text()
    assert "kitsune" not in text
    assert "stablehlo.dot_general" in text


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
    file.write_bytes(_exported(with_calls(mlp), X, W1, W2).serialize())
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
