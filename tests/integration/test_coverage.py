"""What share of the applications' operators runs pipelined on the CPU, and what share of their off-chip bytes that saves.

Every legal region is asked for (``force=True``) at sizes that suit a test; what the cost model chooses at the sizes of the
papers is stored by ``python -m benchmarks run``. The bounds for operators are this project's, those for bytes the Kitsune
paper's (arXiv:2502.18403, its table of applications; it has no graph attention, and attention alone is held to its Llama's)."""

from __future__ import annotations

import pytest

import kitsune_jax as kj
from benchmarks.graphs.apps import GRAPH_APPS, case_of
from benchmarks.graphs.measure import loss_and_grads
from benchmarks.sequences.apps import SEQUENCE_APPS
from tests.support.draws import drawn_by_numpy

ROWS = {"meshgraphnets": 3000, "graphcast": 5_100, "dlrm": 1024, "gat": 20_000, "attention": 512, "transformer_layer": 512}
# Operators pipelined, bytes saved: inference, then loss and gradients.
BOUNDS = {
    "meshgraphnets": ((0.95, 0.578), (0.90, 0.403)),
    "graphcast": ((0.95, 0.572), (0.90, 0.401)),
    "dlrm": ((0.95, 0.443), (0.90, 0.251)),
    "gat": ((0.95, 0.0), (0.90, 0.0)),
    "attention": ((0.95, 0.491), (0.85, 0.452)),
    "transformer_layer": ((0.95, 0.491), (0.85, 0.452)),
}


def compute_coverage(report: kj.Report) -> float:
    """The pipelined share of the operators that compute something: a slice of a weight and the conversion of a number do not."""
    left = sum(r.count for r in report.rejected if r.op not in ("slice", "convert_element_type"))
    return report.ops_pipelined / (report.ops_pipelined + left)


def reports(name: str) -> tuple[kj.Report, kj.Report]:
    """Of inference, and of the loss with its gradients."""
    for needed in ("matplotlib", "optax", "rich"):
        pytest.importorskip(needed)
    with drawn_by_numpy():
        case = case_of({**GRAPH_APPS, **SEQUENCE_APPS}[name], "f32", ROWS[name])
    whole = kj.explain(loss_and_grads(case, case.function), force=True)(case.params, case.inputs, case.targets)
    return kj.explain(case.function, force=True)(case.params, *case.inputs), whole


@pytest.mark.parametrize(
    "name",
    [
        "dlrm",
        "gat",
        pytest.param("meshgraphnets", marks=pytest.mark.slow),
        pytest.param("graphcast", marks=pytest.mark.slow),
        "attention",
        "transformer_layer",
    ],
)
def test_operators_and_bytes(name: str) -> None:
    for report, (operators, saved) in zip(reports(name), BOUNDS[name], strict=True):
        assert compute_coverage(report) >= operators, report
        assert report.bytes_saved >= saved * report.traffic_bulk_sync, report


@pytest.mark.parametrize("name", ["cartpole", "cartpole_random", "pendulum", "lstm_16", "gru_16"])
def test_loops_over_time_run_on_chip(name: str) -> None:
    """All of a simulator or a recurrent layer, and of its gradient all but a number of the loss."""
    for needed in ("matplotlib", "optax", "rich"):
        pytest.importorskip(needed)
    case = case_of(SEQUENCE_APPS[name], "f32", 300)
    report = kj.explain(case.function, force=True)(case.params, *case.inputs)
    assert report.ops_pipelined == report.ops_total, report
    if case.app.train_rows:
        report = kj.explain(loss_and_grads(case, case.function), force=True)(case.params, case.inputs, case.targets)
        assert report.ops_pipelined >= report.ops_total - 1, report
