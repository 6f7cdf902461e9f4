"""The suite of JAX's own tests: it pipelines the jitted functions of a file, and tells new differences from explained ones."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trust.jax_tests.compare import compare, files_of, known_differences, run_file

FILE = """
import os, unittest
import jax, jax.numpy as jnp, numpy as np
from jax import jit

W = np.ones((8, 8), np.float32)

def layer(x, w=W, n=1):
    for _ in range(n):
        x = jnp.tanh(x @ w)
    return x

def pipelined(f):
    return "kitsune_pipeline" in str(jax.make_jaxpr(f)(W))

class SyntheticTest(unittest.TestCase):
    def test_ok(self):
        self.assertEqual(len(jax.devices()), 8)
        np.testing.assert_allclose(jax.jit(layer)(W), np.tanh(W @ W), rtol=1e-6)
        np.testing.assert_allclose(jit(layer, static_argnums=2)(W, W, 1), np.tanh(W @ W), rtol=1e-6)

    def test_same_function(self):
        traced = []
        def f(x):
            traced.append(x)
            return x + 1
        jax.jit(f)(W), jax.jit(f)(W)
        self.assertEqual(len(traced), 1)

    def test_new(self):
        self.assertFalse(pipelined(jax.jit(layer)), "7 pipelines")

    def test_explained(self):
        self.assertFalse(pipelined(jit(layer)))

    def test_dies(self):
        if pipelined(jax.jit(static_argnums=1)(layer)):
            os._exit(3)

    def test_fails_anyway(self):
        self.assertTrue(False)

    def test_skipped(self):
        self.skipTest("it needs a TPU")
"""


def test_a_file_of_tests_with_and_without_pipelines(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "array_test.py"
    file.parent.mkdir()
    file.write_text(textwrap.dedent(FILE))
    assert files_of(tmp_path) == files_of(file.parent) == [file]
    found = compare(file, tmp_path / "out", 120.0, {"array_test.py:*.test_expl*": "reads the jaxpr"})
    assert found.passed == 5
    assert found.known == {"SyntheticTest.test_explained": "reads the jaxpr"}
    assert {test: outcome.kind for test, outcome in found.new.items()} == {
        "SyntheticTest.test_new": "failure",
        "SyntheticTest.test_dies": "crash",
    }
    text = found.text()
    assert "NEW, 1 x failure: AssertionError: True is not false : N pipelines\n    SyntheticTest.test_new" in text
    assert "explained, 1 x reads the jaxpr" in text


def test_a_test_that_hangs_ends_at_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "array_test.py"
    file.write_text(
        "import time, unittest\nclass T(unittest.TestCase):\n"
        "  def test_a(self): time.sleep(600)\n  def test_b(self): pass\n"
    )  # fmt: skip
    found = run_file(file, tmp_path / "out", "jit", 5.0)
    assert {test: outcome.kind for test, outcome in found.items()} == {"T.test_a": "hang", "T.test_b": "pass"}


def test_a_folder_without_tests_of_jax(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="checkout of JAX"):
        files_of(tmp_path)


def test_every_explained_difference_is_of_a_known_file() -> None:
    for pattern, reason in known_differences().items():
        assert reason and pattern.partition(":")[0].endswith("_test.py") and "Test." in pattern
