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

import kitsune_jax as kj
from kitsune_jax import config
from tests.sharding.test_programs import mesh
from tests.support.checks import close, count, in_float64
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


def test_a_symbolic_batch_says_why_it_is_plain() -> None:
    (rows,) = export.symbolic_shape("b")
    f = jax.jit(kj.pipeline(lambda x: jnp.tanh(x @ np.ones((32, 8), np.float32)), force=True, strict=True, export="calls"))
    with pytest.raises(kj.NotPipelined, match="shapes are symbolic"):
        export.export(f, disabled_checks=ALLOWED)(jax.ShapeDtypeStruct((rows, 32), np.float32))


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
