"""Command line of the benchmarks.

python -m benchmarks run --app nerf --dtype bf16            # its default sizes, on the CPU; --rows N for another
python -m benchmarks run --all                              # --platform cuda: on the first CUDA device
python -m benchmarks run --all --mode train                 # whole training steps
python -m benchmarks run --app gat --mode train --dtype f32 # a graph network; --rows counts edges
python -m benchmarks run --app lstm_64 --dtype f32          # a loop over time; --rows counts sequences
python -m benchmarks grid                                   # ordinary functions: never slower than jax.jit? (--help)
python -m benchmarks model                                  # the planner's model of an H200 beside the record of one
python -m benchmarks model --device cpu                     # that of this CPU beside what its pipelines take
python -m benchmarks.lower                                  # time to trace, lower and compile, against jax.jit
python -m benchmarks.devices                                # sharded functions beside sharded jax.jit
python -m benchmarks.scaling                                # a model of training on up to 1 024 devices
python -m benchmarks table                                  # writes the tables of docs; --print shows them instead
python -m benchmarks page                                   # writes the site's page of benchmarks; --print shows it instead
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import grid, grid_report, page, store, table

README = Path(__file__).parents[1] / "README.md"
TABLES = README.parent / "docs" / "measured.md"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.command == "table":
        return _table(args)
    if args.command == "page":
        return _page(args)
    if args.command == "grid":
        return grid.run(args)
    if args.command == "model":
        from benchmarks import cpu_model, gpu_model

        return gpu_model.run(args) if args.device == "h200" else cpu_model.run(re.compile(args.match).search)
    # Measuring imports JAX; making the table does not need it.
    from benchmarks.measure import Effort, child, train_child

    effort = Effort(args.rounds, args.seconds, getattr(args, "peers", ""))
    if args.command == "child":
        case = (args.app, args.dtype, args.rows)
        found = train_child(*case, args.column) if args.mode == "train" else child(*case, effort)
        args.output.write_text(json.dumps(found))
        return 0
    return _run(args, effort)


def _run(args: argparse.Namespace, effort: Any) -> int:
    import jax

    from benchmarks.apps import APPS
    from benchmarks.graphs.apps import GRAPH_APPS
    from benchmarks.graphs.libraries import LIBRARY_APPS
    from benchmarks.graphs.measure import measure_graph
    from benchmarks.machine import has_gpu
    from benchmarks.measure import measure
    from benchmarks.peers import client
    from benchmarks.sequences.apps import SEQUENCE_APPS
    from benchmarks.sequences.libraries import SEQUENCE_LIBRARY_APPS

    here = "cuda" if has_gpu() else jax.devices()[0].platform
    if here != args.platform:
        missing = "; is there a CUDA device, and jax[cuda13]?" if args.platform == "cuda" else ""
        print(f"JAX's default device is a {here}, not a {args.platform} device: set JAX_PLATFORMS={args.platform}{missing}")
        return 2
    pytorch = {}
    if args.peers:
        try:
            pytorch["pytorch"] = client.version(args.peers)
        except RuntimeError as error:
            print(error)
            return 2
    for name in (*store.ROW_APP_NAMES, *store.GRAPH_APP_NAMES, *store.SEQUENCE_APP_NAMES) if args.all else (args.app,):
        graph_app = {**GRAPH_APPS, **SEQUENCE_APPS, **LIBRARY_APPS, **SEQUENCE_LIBRARY_APPS}.get(name)
        for rows in [args.rows] if args.rows else (graph_app or APPS[name]).default_rows(args.platform, args.mode):
            for dtype in [args.dtype] if args.dtype else graph_app.dtypes if graph_app else store.DTYPE_NAMES:
                print(f"{name}, {args.mode}, {rows} {graph_app.unit if graph_app else 'rows'}, {dtype} ...", flush=True)
                case = (args.mode, dtype, args.platform, rows, effort)
                record = measure_graph(graph_app, *case) if graph_app else measure(name, *case, child=not args.no_child)
                path = store.save({**record, **pytorch}, args.results)
                # Mode infer has one pipelined column, mode train several.
                pipelined = record["speedup"] if args.mode == "train" else {"pipeline": record["speedup"]}
                for column, speedups in pipelined.items():
                    ratios = ", ".join(f"{s['median']:.2f}x {other}" for other, s in speedups.items())
                    print(f"  {column} {1e3 * record['columns'][column]['median']:.4g} ms: {ratios}", flush=True)
                print(f"  -> {path.name}", flush=True)
    return 0


def _table(args: argparse.Namespace) -> int:
    parts = documents(args.results)
    if args.print:
        print("\n\n".join(text for part in parts for text in part.values()))
        return 0
    for path, part in zip((args.readme, args.tables), parts, strict=True):
        changed = [name for name, text in part.items() if table.update(path, text, name)]
        print(f"{path.name} {'updated' if changed else 'is up to date'}")
    return 0


def _page(args: argparse.Namespace) -> int:
    if args.print:
        print("\n\n".join(page.documents(args.results)[page.PAGE].values()))
        return 0
    for path, changed in page.update(args.results).items():
        print(f"{path.name} {'updated' if changed else 'is up to date'}")
    return 0


def documents(folder: Path = store.RESULTS) -> tuple[dict[str, str], dict[str, str]]:
    """What stands between the markers of the README, and between those of docs/measured.md, by the marker's name."""
    results = store.newest(folder)
    readme = {
        table.SUMMARY: table.summary(results),
        table.PEERS: table.peers_summary(results),
        "grid": grid_report.markdown(grid.newest(folder)),
    }
    tables = {name: table.markdown(table.of_cpus(results), mode) for name, mode in table.PARTS.items()}
    return readme, {**tables, table.DEVICES: table.devices(results), table.PLANS: table.plans(store.measured_plans(folder))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Interleaved measurements of kitsune_jax.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure and store")
    which = run.add_mutually_exclusive_group(required=True)
    which.add_argument("--app", choices=store.APP_NAMES)
    which.add_argument("--all", action="store_true", help="every app, size and dtype")
    run.add_argument("--mode", choices=store.MODE_NAMES, default="infer", help="the function, or a training step of it")
    run.add_argument("--dtype", choices=store.DTYPE_NAMES, help="default: both")
    run.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--rows", type=_positive, help="default: the app's own sizes")
    run.add_argument(
        "--no-child", action="store_true", help="leave out what needs a fresh process: huge pages, the first call, memory"
    )
    run.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        default="",
        metavar="PYTHON",
        help="PyTorch too, eager and compiled, for the applications written in it; PYTHON: the interpreter that has it (this one)",
    )
    run.add_argument("--results", type=Path, default=store.RESULTS)

    child = commands.add_parser("child", help="what run starts in a fresh process")
    child.add_argument("--app", choices=store.ROW_APP_NAMES, required=True)
    child.add_argument("--dtype", choices=store.DTYPE_NAMES, required=True)
    child.add_argument("--rows", type=_positive, required=True)
    child.add_argument("--mode", choices=store.MODE_NAMES, default="infer")
    child.add_argument("--column", default="jit", help="mode train: of which the memory is measured")
    child.add_argument("--output", type=Path, required=True)
    for command in (run, child):
        command.add_argument("--rounds", type=_positive, default=15, help="interleaved calls of each column (default 15)")
        command.add_argument("--seconds", type=float, default=30.0, help="stop a case's rounds after this long (default 30)")

    grid.add_arguments(commands.add_parser("grid", help="the planner's choice against jax.jit, over many ordinary functions"))

    model = commands.add_parser("model", help="the planner's model of an H200 beside its record, or of this CPU beside its calls")
    model.add_argument("--device", choices=("h200", "cpu"), default="h200")
    model.add_argument("--match", default="", help="a regular expression: only cases whose name it finds")

    show = commands.add_parser("table", help="write the README's summary and the tables of docs/measured.md from what is stored")
    show.add_argument("--print", action="store_true", help="print it, change nothing")
    show.add_argument("--results", type=Path, default=store.RESULTS)
    show.add_argument("--readme", type=Path, default=README)
    show.add_argument("--tables", type=Path, default=TABLES)

    site = commands.add_parser("page", help="write docs/benchmarks.md from all that is stored, and mark what became slower")
    site.add_argument("--print", action="store_true", help="print it, change nothing")
    site.add_argument("--results", type=Path, default=store.RESULTS)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
