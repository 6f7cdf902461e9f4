"""Sharded functions that leave the process by ``jax.export``."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax import config
from tests.sharding.test_programs import mesh
from tests.support.checks import arrays, close, count, in_float64
from tests.support.sharded_programs import PROGRAMS

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax")
PROGRAM = PROGRAMS["tensor parallel"]
ALLOWED = [export.DisabledSafetyCheck.custom_call("kitsune_region (import kitsune_jax)")]


def arguments() -> list[Any]:
    on = mesh()
    return [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(PROGRAM.args, PROGRAM.specs, strict=True)]


def exported(**options: Any) -> Any:
    return export.export(jax.jit(kj.pipeline(PROGRAM.function, force=True, **options)), disabled_checks=ALLOWED)(*arguments())


def test_an_export_is_plain_by_default() -> None:
    received = export.deserialize(exported().serialize())
    assert "kitsune" not in received.mlir_module()
    close(received.call(*arguments()), in_float64(PROGRAM.function, *PROGRAM.args))


def test_an_export_with_calls_is_divided_where_it_is_compiled() -> None:
    received = export.deserialize(exported(export="calls").serialize())
    compiled = jax.jit(received.call).lower(*arguments()).compile()
    assert count(compiled.as_text()) > 0
    close(compiled(*arguments()), in_float64(PROGRAM.function, *PROGRAM.args))


(B,) = export.symbolic_shape("b", constraints=["mod(b, 4) == 0"])
X, W = arrays(0, (64, 32), (32, 16))


def of_batches(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) @ w.T


def symbolic(function: Any, *specs: Any, **options: Any) -> Any:
    fn = jax.jit(function(kj.pipeline(of_batches, force=True, export="calls", **options)))
    return export.export(fn, disabled_checks=ALLOWED)(*specs)


@pytest.mark.parametrize("split", [P(), P(None, "model")], ids=["whole weights", "divided weights"])
def test_a_symbolic_batch_is_divided_where_the_program_is_called(split: Any) -> None:
    on = mesh()
    places = NamedSharding(on, P("data")), NamedSharding(on, split)
    specs = [jax.ShapeDtypeStruct(s, np.float32, sharding=p) for s, p in zip(((B, 32), (32, 16)), places, strict=True)]
    received = export.deserialize(symbolic(lambda f: f, *specs, strict=True).serialize(vjp_order=1))
    for rows in (8, 64):
        args = [jax.device_put(x, place) for x, place in zip((X[:rows], W), places, strict=True)]
        compiled = jax.jit(received.call).lower(*args).compile()
        assert count(compiled.as_text()) > 0 and "all-gather" not in compiled.as_text()
        assert compiled(*args).sharding.spec == P("data")
        close(compiled(*args), in_float64(of_batches, X[:rows], W))
    step = jax.jit(jax.grad(lambda *a: jnp.sum(received.call(*a) ** 2), 1)).lower(*args).compile()
    assert count(step.as_text()) > 0
    close(step(*args), in_float64(jax.grad(lambda *a: jnp.sum(of_batches(*a) ** 2), 1), X, W), 1e-3)


def test_a_symbolic_export_for_one_device_is_divided_among_several_and_runs_in_a_shard_map() -> None:
    received = export.deserialize(symbolic(lambda f: f, jax.ShapeDtypeStruct((B, 32), np.float32), W, strict=True).serialize())
    on = mesh()
    args = jax.device_put(X, NamedSharding(on, P("data"))), jax.device_put(W, NamedSharding(on, P()))
    places = {"in_specs": (P("data"), P()), "out_specs": P("data"), "check_vma": False}
    shards = [jax.shard_map(received.call, mesh=on, axis_names=axes, **places) for axes in ({"data", "model"}, {"data"})]
    three = mesh(shape=(2, 2, 2), names=("data", "model", "rows"))
    for call in (received.call, *shards):
        compiled = jax.jit(call).lower(*args).compile()
        assert count(compiled.as_text()) > 0 and "all-gather" not in compiled.as_text()
        close(compiled(*args), in_float64(of_batches, X, W))
    args = jax.device_put(X, NamedSharding(three, P(("data", "rows")))), jax.device_put(W, NamedSharding(three, P(None, "model")))
    compiled = jax.jit(jax.shard_map(received.call, mesh=three, axis_names={"data"}, **places)).lower(*args).compile()
    assert count(compiled.as_text()) > 0 and "all-gather" not in compiled.as_text()
    close(compiled(*args), in_float64(of_batches, X, W))


@pytest.mark.parametrize("axes", [{"data", "model"}, {"data"}], ids=["all axes", "some axes"])
def test_symbolic_shapes_inside_of_a_shard_map_are_plain(axes: set[str]) -> None:
    on = mesh()
    specs = jax.ShapeDtypeStruct((B, 32), np.float32), jax.ShapeDtypeStruct((32, 16), np.float32)

    def divided(f: Any) -> Any:
        return jax.shard_map(f, mesh=on, in_specs=(P("data"), P()), out_specs=P("data"), axis_names=axes)

    with pytest.raises(kj.NotPipelined, match="symbolic inside of a jax.shard_map"):
        symbolic(divided, *specs, strict=True)
    received = export.deserialize(symbolic(divided, *specs).serialize())
    assert "kitsune_region" not in received.mlir_module()
    args = jax.device_put(X, NamedSharding(on, P("data"))), jax.device_put(W, NamedSharding(on, P()))
    close(jax.jit(received.call)(*args), in_float64(of_batches, X, W))


def test_an_export_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    received = export.deserialize(exported(export="calls").serialize())
    monkeypatch.setattr(config, "__version__", "9.9.9")
    with pytest.raises(Exception, match="exported with kitsune_jax .*export it again"):
        jax.jit(received.call).lower(*arguments()).compile()


def test_without_the_package_the_error_says_which_import_is_missing(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "exported"
    file.write_bytes(exported(export="calls").serialize())
    script = f"""
        import numpy as np, jax
        from jax import export
        received = export.deserialize(open({str(file)!r}, "rb").read())
        mesh = jax.make_mesh((8,), ("all",), (jax.sharding.AxisType.Auto,))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        args = [jax.device_put(np.ones(a.shape, a.dtype), whole) for a in received.in_avals]
        jax.jit(received.call)(*args)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert "import kitsune_jax" in ran.stderr
