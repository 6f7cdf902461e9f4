"""The Kitsune paper's table of applications, for those over graphs, tables and sequences: operators covered and off-chip bytes
saved.

Comes in: nothing. Goes out: a table in docs/offchip.md, of ``kj.explain`` for the CPU at the sizes that ``python -m benchmarks
run`` has for training; nothing is run. "Chosen" is what the cost model keeps, "legal" every region that it may choose from. A
pass of training is the loss with its gradients, as the paper counts. Usage::

    python -m benchmarks.graphs.offchip            # a minute; --print shows it instead
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import kitsune_jax as kj
from benchmarks.graphs.apps import GRAPH_APPS, GraphCase, case_of
from benchmarks.graphs.measure import loss_and_grads
from benchmarks.offchip import DOCUMENT
from benchmarks.sequences.apps import PLANNED_APPS, SEQUENCE_APPS
from benchmarks.table import update
from kitsune_jax.report.data import count_text

# arXiv:2502.18403, operators covered and off-chip bytes saved by vertical fusion and by Kitsune, in per cent: inference, training.
PAPER = {
    "meshgraphnets": (("71 / 80", "56.5 / 57.8"), ("24 / 73", "21.8 / 40.3")),
    "graphcast": (("60 / 83", "24.0 / 57.2"), ("20 / 75", "9.1 / 40.1")),
    "dlrm": (("81 / 81", "22.5 / 44.3"), ("31 / 78", "7.9 / 25.1")),
    "llama_8b": (("37 / 70", "10.0 / 49.1"), ("11 / 39", "2.9 / 45.2")),
    "llama_8b_token": (("37 / 70", "0.0 / 0.1"), ("-", "-")),
}
TABLED_APPS = {**GRAPH_APPS, **SEQUENCE_APPS, **PLANNED_APPS}
_HEAD = (
    "application",
    "mode",
    "operators",
    "covered: chosen / legal",
    "paper: V / K",
    "bytes saved: chosen / legal",
    "paper: V / K",
)


def reports(case: GraphCase, mode: str) -> list[kj.Report]:
    """Of the regions chosen, and of every legal one."""
    if mode == "infer":
        return [kj.explain(case.function, force=force)(case.params, *case.inputs) for force in (None, True)]
    step = loss_and_grads(case, case.function)
    return [kj.explain(step, force=force)(case.params, case.inputs, case.targets) for force in (None, True)]


def row(case: GraphCase, mode: str) -> list[str]:
    chosen, legal = reports(case, mode)
    operators, saved = PAPER.get(case.app.name, (("-", "-"), ("-", "-")))[mode == "train"]
    return [
        f"{case.app.title}, {count_text(case.rows)} {case.app.unit}",
        mode,
        str(legal.ops_total),
        f"{100 * chosen.coverage:.0f} / {100 * legal.coverage:.0f} %",
        operators,
        f"{100 * saved_share(chosen):.1f} / {100 * saved_share(legal):.1f} %",
        saved,
    ]


def saved_share(report: kj.Report) -> float:
    return report.bytes_saved / max(1, report.traffic_bulk_sync)


def markdown(names: Sequence[str] = tuple(TABLED_APPS)) -> str:
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|" + "---:|" * (len(_HEAD) - 2)]
    machine = ""
    for name in names:
        app = TABLED_APPS[name]
        case = case_of(app, "f32", (app.train_rows or app.rows)[0])
        lines += ["| " + " | ".join(row(case, mode)) + " |" for mode in (("infer", "train") if app.train_rows else ("infer",))]
        machine = machine or kj.explain(lambda x: x + 1)(case.inputs[-1]).machine
    return f"Planned for {machine}, float32.\n\n" + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs.offchip", description="The applications' off-chip bytes.")
    parser.add_argument("--print", action="store_true", help="print the table, change nothing")
    args = parser.parse_args(argv)
    if args.print:
        print(markdown())
    else:
        print(f"{DOCUMENT.name} {'updated' if update(DOCUMENT, markdown(), 'applications') else 'is up to date'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
