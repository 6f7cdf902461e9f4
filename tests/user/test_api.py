"""``explain``, and what wrong arguments and switches are told."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import kitsune_jax as kj
from tests.support.checks import arrays, count

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here
X, W1, W2 = arrays(0, (6, 8), (8, 16), (16, 8))


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return jnp.tanh(jnp.sin(x @ w1) @ w2)


def test_explain_runs_nothing() -> None:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W1, W2)]
    calls = 0

    def f(x: Any, w1: Any, w2: Any) -> Any:
        nonlocal calls
        jax.debug.callback(lambda: pytest.fail("explain ran the function"))
        calls += 1
        return mlp(x, w1, w2)

    report = kj.explain(f, force=True)(*shapes)
    assert calls == 1
    assert report.ops_pipelined >= 4
    assert report.platform == "cpu"
    assert any("test_api.py" in r.source for r in report.rejected)
    assert kj.explain(kj.pipeline(mlp, force=True))(X, W1, W2).ops_pipelined == kj.explain(mlp, force=True)(X, W1, W2).ops_pipelined


def test_explain_for_a_device_that_is_not_there() -> None:
    report = kj.explain(mlp, platform="cuda", device="h200", force=True)(X, W1, W2)
    assert report.platform == "cuda"
    assert report.machine == "h200"


def test_a_region_between_effects_counts_as_left_to_xla() -> None:
    def f(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        io_callback(lambda _: None, None, y, ordered=True)
        z = io_callback(lambda: np.ones((6, 16), np.float32), jax.ShapeDtypeStruct((6, 16), jnp.float32), ordered=True)
        return jnp.sin(z + y)  # of a pipeline with the product, the callbacks would stand in the middle

    report = kj.explain(f, force=True)(X, W1)
    compiled = jax.jit(kj.pipeline(f, force=True)).lower(X, W1).compile().as_text()
    assert (report.ops_pipelined > 0) == (count(compiled) > 0)
    assert len(report.regions) == count(compiled)
    assert {r.op for r in report.rejected if "a side effect lies in the middle" in r.reason} >= {"dot_general", "tanh", "sin"}


def test_there_is_no_option_without_an_effect() -> None:
    with pytest.raises(TypeError, match="precision"):
        kj.pipeline(mlp, precision="highest")


def test_sums_of_a_cpu_are_deterministic_whatever_is_asked_for() -> None:
    ids = jax.device_put(np.asarray(np.random.default_rng(4).integers(0, 5_000, 20_000), jnp.int32))
    x = arrays(5, (20_000, 32))[0]
    found = set()
    for deterministic in (True, False, False):
        fn = kj.pipeline(lambda x, ids: jax.ops.segment_sum(jnp.tanh(x), ids, 5_000), force=True, deterministic=deterministic)
        report = kj.explain(fn)(x, ids)
        assert report.ops_pipelined and not any("deterministic" in note for note in report.notes)
        found.add(np.asarray(jax.jit(fn)(x, ids)).tobytes())
    assert len(found) == 1


def test_explain_counts_loop_bodies() -> None:
    ws = arrays(3, (4, 8, 8))[0]

    def f(x: Any, ws: Any, last: Any = lambda y: y) -> Any:
        return jax.lax.scan(lambda c, w: (last(jnp.sin(c @ w)), None), x, ws)[0]

    report = kj.explain(f, force=True)(X, ws)
    assert report.ops_pipelined == report.ops_total == 2
    assert "scan of 4 steps" in str(report) and "of carries stay on chip" in str(report)
    report = kj.explain(lambda x, ws: f(x, ws, jnp.sort), force=True)(X, ws)  # whose loop is left to XLA
    assert report.ops_pipelined >= 2
    assert any("bod" in note for note in report.notes)


def test_explain_of_a_step_reports_its_pipelined_calls_as_they_run() -> None:
    def loss(w1: Any, x: Any) -> Any:
        return (mlp(x, w1, W2) ** 2).sum()

    step = jax.value_and_grad(kj.pipeline(loss, force=True))
    report = kj.explain(step)(W1, X)
    compiled = jax.jit(step).lower(W1, X).compile().as_text()
    assert len(report.regions) == compiled.count('custom_call_target="kitsune_cpu"') >= 2
    assert any("2 pipelined calls" in note for note in report.notes)
    whole = kj.explain(jax.value_and_grad(loss), force=True)(W1, X)
    assert not any("pipelined calls" in note for note in whole.notes)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: kj.pipeline(3), TypeError, "takes a function"),
        (lambda: kj.pipeline(mlp, residuals="foo"), ValueError, "'save', 'recompute', or a policy"),
        (lambda: kj.pipeline(mlp, strict="yes"), ValueError, "True or False"),
        (lambda: kj.pipeline(mlp, force="yes"), ValueError, "True or False or None"),
        (lambda: kj.pipeline(mlp, network=(1e-5, 0)), ValueError, "network=(1e-05, 0) is not known: use (seconds of an empty"),
        (lambda: kj.pipeline(mlp, network=1e9), ValueError, "network=1000000000.0 is not known"),
        (lambda: kj.pipeline(mlp, deterministic=1), ValueError, "deterministic=1 is not known: use True or False"),
        (lambda: kj.pipeline(mlp, nosuch=True), TypeError, "unexpected keyword argument 'nosuch'"),
        (lambda: kj.explain(mlp, nosuch=True), TypeError, "unexpected keyword argument 'nosuch'"),
        (lambda: kj.pipeline(mlp, export="all"), ValueError, "'plain' or 'calls'"),
        (lambda: kj.pipeline(mlp, deterministic=None), ValueError, "True or False"),
        (lambda: kj.pipeline(mlp, static_argnums="x"), ValueError, "index"),
        (lambda: kj.pipeline(mlp, static_argnames="zz"), ValueError, "no argument 'zz'"),
        (lambda: kj.pipeline(mlp, static_argnums=0, donate_argnums=0), ValueError, "both static and donated"),
        (lambda: kj.pipeline(mlp)(X, {1, 2}, W2), TypeError, "neither an array nor hashable"),
        (lambda: kj.explain(mlp, platform="tpu"), ValueError, "'cpu' or 'cuda'"),
        (lambda: kj.explain(mlp, device="nosuch")(X, W1, W2), ValueError, "nosuch"),
    ],
)
def test_wrong_arguments_say_what_to_do(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize("name", ["KITSUNE_FORCE", "KITSUNE_STRICT", "KITSUNE_DISABLE"])
def test_wrong_switches_say_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"{name}='maybe' is not a switch"):
        kj.pipeline(mlp)(X, W1, W2)


THROUGH_A_LINK = """
import jax, jax.numpy as jnp
from jax import export
import kitsune_jax as kj

def mine(x):
    return jnp.tanh(x) * 2

def wrong(x):
    return jnp.tanh(x) @ x

f, x = kj.pipeline(mine, force=True), jnp.ones((64, 8))
print(kj.__file__)
print(kj.explain(f)(x))
print([line for line in export.export(jax.jit(f))(x).mlir_module().splitlines() if "kitsune_jax/" in line])
try:
    jax.jit(kj.pipeline(wrong))(x)
except TypeError as error:
    frames = []
    while error.__traceback__ is not None:
        frames.append(error.__traceback__.tb_frame.f_code.co_filename)
        error.__traceback__ = error.__traceback__.tb_next
    print([name for name in frames if "kitsune_jax/_compat" in name])
"""


def test_a_package_that_is_reached_through_a_link_shows_the_users_lines(tmp_path: pathlib.Path) -> None:
    """In reports, exported programs and tracebacks, where an environment or its folder is a symbolic link."""
    (tmp_path / "kitsune_jax").symlink_to(pathlib.Path(kj.__file__).parent)
    (tmp_path / "user.py").write_text(THROUGH_A_LINK)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, tmp_path / "user.py"], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    imported, *report, exported, hidden = done.stdout.splitlines()
    assert imported.startswith(str(tmp_path))
    assert "2 of 2 operators pipelined" in " ".join(" ".join(report).split())
    assert (exported, hidden) == ("[]", "[]")
