"""Models of libraries, unchanged: what the tests of all of them compare, pipelined against plain and against float64.

Forced: at sizes that suit a test no pipeline would pay. A test is skipped where the model's library is not installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks.graphs.apps import GraphApp, GraphCase, case_of
from benchmarks.graphs.measure import loss_and_grads
from tests.support.checks import in_float64
from tests.support.draws import drawn_by_numpy


@dataclasses.dataclass(frozen=True)
class LibraryModels:
    """``apps``: by name; ``needs``: name -> its packages; ``rows``: a size for tests; ``drawn``: those that draw random bits, which
    are others in float64; ``least``: more than this part of the operators is pipelined."""

    apps: Mapping[str, GraphApp]
    needs: Mapping[str, tuple[str, ...]]
    rows: int
    drawn: tuple[str, ...] = ()
    least: float = 0.0

    def case(self, name: str, dtype: str = "f32", rows: int | None = None) -> GraphCase:
        for library in self.needs[name]:
            pytest.importorskip(library)
        with drawn_by_numpy():
            return case_of(self.apps[name], dtype, self.rows if rows is None else rows)

    def named(self, slow: tuple[str, ...] = (), trained: bool = False) -> Any:
        """The models as parameters of a test, those of ``slow`` with the mark."""
        names = [n for n, app in self.apps.items() if app.train_rows or not trained]
        return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in names])

    def check_outputs(self, name: str, record_property: Callable[..., None]) -> None:
        model = self.case(name)
        found, plain = (outputs(model, f) for f in (kj.pipeline(model.function, force=True), model.function))
        assert distance(found, plain) < 1e-4
        if name not in self.drawn:
            exact = in_float64(model.function, model.params, *model.inputs)
            assert distance(found, exact) < max(4 * distance(plain, exact), 1e-6)
        self._check_share(kj.explain(model.function, force=True)(model.params, *model.inputs), record_property)

    def check_gradients(self, name: str, record_property: Callable[..., None]) -> None:
        model = self.case(name)
        exact = in_float64(loss_and_grads(model, model.function), model.params, model.inputs, model.targets)
        found, plain = (gradients(model, f) for f in (kj.pipeline(model.function, force=True), model.function))
        assert jax.tree.structure(found) == jax.tree.structure(plain)
        assert distance(found, exact) < max(4 * distance(plain, exact), 1e-6)
        explained = kj.explain(loss_and_grads(model, model.function), force=True)
        self._check_share(explained(model.params, model.inputs, model.targets), record_property)

    def _check_share(self, report: Any, record_property: Callable[..., None]) -> None:
        record_property("operators pipelined", f"{report.ops_pipelined} of {report.ops_total}")
        assert report.ops_pipelined > self.least * report.ops_total

    def check_bfloat16(self, name: str) -> None:
        """Pipelined, a model in bfloat16 is as near to float64 as plain."""
        model = self.case(name, "bf16")
        exact = in_float64(model.function, model.params, *model.inputs)
        errors = [distance(outputs(model, f), exact) for f in (model.function, kj.pipeline(model.function, force=True))]
        assert errors[1] < 2 * errors[0] < 0.2

    def check_rows(self, name: str, rows: int, rtol: float) -> None:
        model = self.case(name, rows=rows)
        found, plain = (outputs(model, f) for f in (kj.pipeline(model.function, force=True), model.function))
        np.testing.assert_allclose(found, plain, rtol=rtol, atol=1e-5)


def distance(got: Any, want: Any) -> float:
    """|got - want| / |want| in the Euclidean norm over all arrays."""
    arrays = ([np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    pairs = list(zip(*arrays, strict=True))
    assert all(g.shape == w.shape for g, w in pairs)
    return float(np.sqrt(sum(np.sum((g - w) ** 2) for g, w in pairs) / sum(np.sum(w**2) for _, w in pairs)))


def outputs(model: GraphCase, function: Callable[..., Any]) -> Any:
    return jax.jit(function)(model.params, *model.inputs)


def gradients(model: GraphCase, function: Callable[..., Any]) -> Any:
    return jax.jit(loss_and_grads(model, function))(model.params, model.inputs, model.targets)
