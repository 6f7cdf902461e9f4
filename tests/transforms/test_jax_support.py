"""A JAX that this package does not know costs pipelines, never an import or an answer."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from kitsune_jax import _compat
from kitsune_jax.frontend import explain

# Imports JAX, takes away from what this package sees of it, and runs a pipelined function in a fork for each of the names given.
# JAX's own modules keep the name, or JAX itself would not work.
CHILD = """
import importlib, json, os, sys, types, warnings

import jax
import jax.numpy as jnp
import numpy as np

version, losses = json.loads(sys.argv[1])
jax.__version__ = version or jax.__version__
x, w = (np.random.default_rng(0).standard_normal(shape) for shape in ((7, 5), (5, 3)))


class Without(types.ModuleType):
    def __init__(self, module, name):
        super().__init__(module.__name__)
        self._kept = module, name

    def __getattr__(self, name):
        module, gone = self._kept
        if name == gone:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return getattr(module, name)


def lose(module, name, how):
    load = importlib.import_module

    def import_module(asked, package=None):
        if asked == module and name is None:
            raise ImportError(f"No module named {module!r}")
        if asked != module:
            return load(asked, package)
        found = Without(load(asked, package), name)
        if how == "changed":
            setattr(found, name, lambda: None)  # no signature and no type that anybody expects
        return found

    importlib.import_module = import_module


def check(module, name, how):
    lose(module, name, how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import kitsune_jax as kj

        def f(x, w):
            return jnp.sum(jnp.tanh(x @ w))

        f32 = [jnp.asarray(a, jnp.float32) for a in (x, w)]
        pipelined = kj.pipeline(f, force=True)
        values = [pipelined(*f32), jax.jit(pipelined)(*f32)]
        gradients = [jax.grad(pipelined, 1)(*f32), jax.jit(jax.grad(pipelined, 1))(*f32)]
        batched = jax.vmap(kj.pipeline(lambda x, w: jnp.tanh(x @ w), residuals="recompute"), (0, None))(*f32)
        report = kj.explain(f)(*f32)
    tanh = np.tanh(x @ w)
    for value in values:
        np.testing.assert_allclose(value, tanh.sum(), rtol=1e-4, atol=1e-4)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, x.T @ (1 - tanh**2), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batched, tanh, rtol=1e-4, atol=1e-4)
    ours = [str(warning.message) for warning in told if "kitsune_jax" in str(warning.message)]
    assert len(ours) <= 1, ours
    if ours:
        assert "0.10.2 to 0.12.0" in ours[0] and "plain jax.jit" in ours[0], ours
        assert report.ops_pipelined == 0 and any("0.10.2 to 0.12.0" in why for why in report.obstacles), report
    return ours


for loss in losses:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = check(*loss)
        except BaseException as error:
            import traceback
            answer = traceback.format_exc()
        os.write(write, json.dumps(answer).encode()[:60000])
        os._exit(0)
    os.close(write)
    answer = os.fdopen(read).read()
    os.waitpid(pid, 0)
    print(json.dumps([loss, json.loads(answer or '"died"')]), flush=True)
"""


def run(losses: list[tuple[str, str | None, str]], version: str = "") -> dict[tuple[str, str | None, str], Any]:
    """The warnings that a pipelined function gives where JAX has lost each of ``losses``; a string is what went wrong."""
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([version, losses])],
        capture_output=True, text=True, timeout=600, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {tuple(loss): answer for loss, answer in map(json.loads, done.stdout.splitlines())}


def private_names() -> list[tuple[str, str | None, str]]:
    """Every module that ``_compat`` loads and every attribute that it reads of one, for the version of JAX at hand."""
    body = [node for file in Path(_compat.__file__).parent.glob("*.py") for node in ast.parse(file.read_text()).body]
    nodes = [node for statement in body for node in ast.walk(statement)]
    modules = {
        node.targets[0].id: node.value.args[0].value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "jax_module"
    }
    assert len(modules) > 15, "_compat no longer loads its modules by jax_module(name)"
    other_versions = () if _compat.VERSION < (0, 11) else [n for n in body if getattr(n, "name", "").endswith("_0_10")]
    skipped = {id(node) for body in other_versions for node in ast.walk(body)}
    names = {
        (modules[node.value.id], node.attr, "missing")
        for node in nodes
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules and id(node) not in skipped
    }
    return [*((module, None, "missing") for module in sorted(set(modules.values()))), *sorted(names)]


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.12.0", (0, 12, 0)), ("0.12.0.1", (0, 12, 0)), ("0.13.0rc1", (0, 13, 0)), ("0.12.0.dev20260101", (0, 12, 0)),
        ("0.13.0rc1.dev20260101+abc", (0, 13, 0)), ("0.13", (0, 13, 0)), ("1", (1, 0, 0)), ("0.13.1b2", (0, 13, 1)),
        ("unknown", ()),
    ],
)  # fmt: skip
def test_the_release_of_any_version_is_found(text: str, release: tuple[int, ...]) -> None:
    assert _compat.parse_version(text) == release


def test_this_jax_is_supported() -> None:
    assert explain.why_jax_is_unsupported() == ""
    assert _compat.VERSION in explain.TESTED_JAX, f"the tests run on JAX {jax.__version__}: say so in jax_support.TESTED"


NOTHING = ("nothing", "at all", "missing")


# What follows JAX 0.10 differs from it, so that JAX cannot pass for a later one.
LATER = ["0.13.0.dev20260101+g0123456", "0.12.1rc1", "2.0"] if _compat.VERSION >= (0, 11) else ["0.10.3rc1", "0.10.99"]


@pytest.mark.parametrize("version", [LATER[0], *(pytest.param(v, marks=pytest.mark.slow) for v in LATER[1:])])
def test_an_unknown_version_that_has_everything_pipelines_without_a_word(version: str) -> None:
    assert run([NOTHING], version) == {NOTHING: []}


def unknown_version() -> str:
    return f"{_compat.VERSION[0]}.{_compat.VERSION[1]}.99rc1"


SAMPLE = [
    ("jax._src.interpreters.remat", None, "missing"), ("jax._src.interpreters.partial_eval", "dce_jaxpr", "missing"),
    ("jax.extend.core", "register_call_primitive_rules", "missing"), ("jax._src.core", "trace_ctx", "changed"),
]  # fmt: skip


def test_what_a_jax_lacks_costs_the_pipelines_and_is_told_once() -> None:
    answers = run(SAMPLE, unknown_version())
    assert {loss: a for loss, a in answers.items() if isinstance(a, str)} == {}
    assert sum(bool(a) for a in answers.values()) >= 3, "nothing was missed"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "changed"])
def test_every_private_name_may_be_missing_or_changed(how: str) -> None:
    losses = [(module, name, how) for module, name, _ in private_names() if name is not None or how == "missing"]
    answers = run(losses, unknown_version())
    assert len(answers) == len(losses) > 25
    assert {loss: a for loss, a in answers.items() if isinstance(a, str)} == {}
    assert sum(bool(a) for a in answers.values()) > 15, "nothing was missed"


def test_a_rule_that_cannot_be_registered_is_found_on_a_known_version_too() -> None:
    loss = ("jax._src.interpreters.mlir", "register_lowering", "missing")
    (told,) = run([loss]).values()
    assert len(told) == 1 and "register_lowering" in told[0], told
