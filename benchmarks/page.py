"""The site's page of benchmarks, ``docs/benchmarks.md``: speed by kind of model, by machine and by date of record, beside others.

Comes in: all records in ``benchmarks/results``, old ones too. Goes out: Markdown, put between markers of the page, of ``README.md``
and of ``docs/start/for-you.md``. No number is typed by hand. A record *regressed* if its speed relative to ``jax.jit`` is less than
``SLOWER`` times that of the record before it, of the same case on the same kind of machine, and the spreads do not meet. Ratios are
compared and not times: machines of one kind differ in speed from day to day.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import chart, grid, grid_verdict, store, table
from benchmarks.machine import machine_slug

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "img" / "speed.svg"
PAGE, FOR_YOU, README = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "start" / "for-you.md", ROOT / "README.md"
SLOWER = 0.9
MARK = "slower"  # stands beside the speed of a record that regressed
# Kinds of model, by a regular expression of the applications' names. The first that matches counts.
KINDS = {
    "MLPs over many rows: NeRF, edge networks": r"nerf|mgn",
    "gated blocks (SwiGLU)": r"swiglu",
    "graph networks": r"meshgraphnets|graphcast.*|gat|graph_transformer|jraph_.*|.*_message_passing",
    "recommendation (DLRM)": r"dlrm",
    "attention": r"attention.*|jax_attention",
    "transformer layer as Llama's": r".*transformer.*",
    "one token from a cache of keys": r"llama_token",
    "simulators: CartPole, Pendulum": r"cartpole|cartpole_random|pendulum|gymnax_.*",
    "simulators with a policy network": r".*_policy",
    "LSTM, GRU": r".*(lstm|gru).*",
    "differential equations, optimisers in loops": r"diffrax_ode|optax_in_a_loop",
}
MODES = {"infer": "inference", "train": "training step"}
_PEERS = {
    "blocked": "blocked by hand",
    "microbatched": "microbatched by hand",
    "jit_hugepages": "`jax.jit`, huge pages",
    "cudnn": "cuDNN, by JAX",
    "torch": "PyTorch",
    "torch_compile": "torch.compile",
    "torch_cudnn": "cuDNN, by PyTorch",
}

Record = Mapping[str, Any]
Timed = tuple[str, Record]  # date, record
Column = tuple[str, str]  # device, mode
COLUMNS: tuple[Column, ...] = tuple((device, mode) for device in ("CPU", "GPU") for mode in MODES)


def documents(folder: Path = store.RESULTS) -> dict[Path, dict[str, str]]:
    """The generated parts of each document, by the marker's name."""
    kinds = {"kinds": by_kind(store.newest(folder))}
    page = {
        "regressions": regressions(folder),
        "slower": slower_functions(folder),
        "history": history(folder),
        "peers": peers(store.newest(folder)),
        "ordinary": ordinary(folder),
        "sharded": sharded(folder),
        "compiling": compiling(folder),
    }
    return {README: kinds, FOR_YOU: kinds, PAGE: {**kinds, **page}}


def speedup(record: Record, base: str = "jit") -> dict[str, float] | None:
    """How many times as fast as the column ``base`` is what a user would run: the pipelined function, or the pipelined step."""
    found = record["speedup"] if record["mode"] == "infer" else record["speedup"].get("whole", {})
    ratio: dict[str, float] | None = found.get(base)
    return ratio


# --- by kind of model -------------------------------------------------------------------------------------------------------------


def kind_of(app: str) -> str:
    """The kind of model that an application is. Raises ``KeyError`` for one that no kind names."""
    for kind, pattern in KINDS.items():
        if re.fullmatch(pattern, app):
            return kind
    raise KeyError(app)


def ranges(results: table.Results) -> dict[str, dict[Column, list[Record]]]:
    """The records of each kind of model that has any, by device ("CPU", "GPU") and mode."""
    found: dict[str, dict[Column, list[Record]]] = {kind: {} for kind in KINDS}
    for machine, records in results:
        for r in records:
            mode = "train" if r["app"].endswith("_gradient") else r["mode"]
            if speedup(r):
                found[kind_of(r["app"])].setdefault(("GPU" if "gpu" in machine else "CPU", mode), []).append(r)
    return {kind: columns for kind, columns in found.items() if columns}


def by_kind(results: table.Results) -> str:
    """Of each kind of model the range of speeds relative to ``jax.jit``: on all CPUs and on all GPUs, newest records."""
    heads = ["kind of model", *(f"{device}: {MODES[mode]}" for device, mode in COLUMNS)]
    rows = [[kind, *(_range(found.get(c, [])) for c in COLUMNS)] for kind, found in ranges(results).items()]
    return "\n".join(table.markdown_lines(heads, rows))


def _range(records: Sequence[Record]) -> str:
    """The least and the largest speed of some records; a loss is bold."""
    if not records:
        return "-"
    ratios = [_ratio(r)["median"] for r in records]
    if all(r.get("calls") == 0 for r in records) and all(0.95 <= ratio < 1.05 for ratio in ratios):
        return "left to XLA"
    least, most = (f"**{x:.2f}x**" if round(x, 2) < 0.95 else f"{x:.2f}x" for x in (min(ratios), max(ratios)))
    text = least if least == most else f"{least} to {most}"
    cudnn = [s["median"] for r in records if (s := speedup(r, "cudnn"))]
    return f"{text}; of cuDNN's speed {min(cudnn):.2f}x to {max(cudnn):.2f}x" if cudnn else text


# --- by machine and date ----------------------------------------------------------------------------------------------------------


def timelines(folder: Path) -> dict[str, tuple[dict[str, Any], dict[tuple[Any, ...], list[Timed]]]]:
    """By kind of machine: the machine, and the records of each case by date, oldest first."""
    found: dict[str, tuple[dict[str, Any], dict[tuple[Any, ...], list[Timed]]]] = {}
    for content in sorted(map(store.load, store.files(folder)), key=lambda c: c["date"]):
        machine, cases = found.setdefault(machine_slug(content["machine"]), (content["machine"], {}))
        for record in content["cases"]:
            cases.setdefault(store.case_key(record), []).append((content["date"], record))
    return dict(sorted(found.items()))


def regressed(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Is ``after`` slower than ``before`` by more than their spreads? Both: ratios with ``median`` and, if known, quartiles.

    >>> regressed({"median": 2.0, "q1": 1.9, "q3": 2.1}, {"median": 1.5, "q1": 1.4, "q3": 1.6})
    True
    >>> regressed({"median": 2.0, "q1": 1.5, "q3": 2.1}, {"median": 1.5, "q1": 1.4, "q3": 1.6})
    False
    """
    least = before.get("q1", before.get("low", before["median"]))
    most = after.get("q3", after.get("high", after["median"]))
    return after["median"] < SLOWER * before["median"] and most < least


def _steps(cases: Mapping[Any, Sequence[Timed]]) -> Iterator[tuple[Timed, Timed]]:
    """Each record that has a ratio, with the one before it."""
    for timed in cases.values():
        known = [(date, r) for date, r in timed if speedup(r)]
        yield from zip(known, known[1:])


def _ratio(record: Record) -> dict[str, float]:
    found = speedup(record)
    assert found is not None  # of the records that ``_steps`` gives
    return found


def regressions(folder: Path = store.RESULTS) -> str:
    """A line for each application whose newest record regressed."""
    found = []
    for machine, cases in timelines(folder).values():
        for (earlier, before), (later, after) in _steps({key: timed[-2:] for key, timed in cases.items()}):
            if regressed(_ratio(before), _ratio(after)):
                name = f"{table.machine_name(machine)}: {table.what(dict(after))}, {_mode(after)}"
                found.append(f"- {name}: {_ratio(after)['median']:.2f}x on {later}, {_ratio(before)['median']:.2f}x on {earlier}")
    return "\n".join(found) or "None."


def history(folder: Path = store.RESULTS) -> str:
    """For each kind of machine a table: the cases, and their speed at each date; a regression is marked."""
    return "\n\n".join(_history(machine, cases) for machine, cases in timelines(folder).values()) or table.markdown([])


def _history(machine: dict[str, Any], cases: Mapping[tuple[Any, ...], Sequence[Timed]]) -> str:
    dates = sorted({date for timed in cases.values() for date, _ in timed})
    worse = {(store.case_key(dict(r)), date) for (_, before), (date, r) in _steps(cases) if regressed(_ratio(before), _ratio(r))}
    rows = []
    for key in sorted(cases, key=lambda key: store.order(dict(cases[key][-1][1]))):
        ratios = {date: found["median"] for date, r in cases[key] if (found := speedup(r))}
        if not ratios:
            continue
        record = cases[key][-1][1]
        cells = {date: f"**{x:.2f}x, {MARK}**" if (key, date) in worse else f"{x:.2f}x" for date, x in ratios.items()}
        rows.append([table.what(dict(record)), _mode(record), *(cells.get(date, "-") for date in dates)])
    heads = ["application", "mode", *(f"{date}: {_versions(cases, date)}" for date in dates)]
    return f"### {table.machine_name(machine)}\n\n" + "\n".join(table.markdown_lines(heads, rows))


def _mode(record: Record) -> str:
    return "gradient" if record["app"].endswith("_gradient") else MODES[record["mode"]]


def _versions(cases: Mapping[Any, Sequence[Timed]], date: str) -> str:
    """The releases of this package and of JAX that the records of a date were made with."""
    versions = [r["versions"] for timed in cases.values() for when, r in timed if when == date]
    texts = []
    for package, name in (("kitsune_jax", "release"), ("jax", "JAX")):
        known = sorted({v[package] for v in versions if v.get(package)})
        texts += [f"{name} {', '.join(known)}"] if known else []
    return ", ".join(texts)


# --- beside others ----------------------------------------------------------------------------------------------------------------


def peers(results: table.Results) -> str:
    """For each machine a table: times of the pipeline, of ``jax.jit`` and of the others that the newest records have."""
    parts = []
    for machine, records in results:
        shown = [r for r in records if set(_PEERS) & set(r["columns"])]
        if not shown:
            continue
        columns = [c for c in _PEERS if any(c in r["columns"] for r in shown)]
        rows = []
        for r in shown:
            own = "pipeline" if r["mode"] == "infer" else "whole"
            times = [r["columns"].get(c) for c in (own, "jit", *columns)]
            best = min(t["median"] for t in times if t)
            cells = [_time(t, best) if t else "-" for t in times]
            rows.append([table.what(r), _mode(r), *cells])
        heads = ["application", "mode", "pipeline", "`jax.jit`", *(_PEERS[c] for c in columns)]
        parts.append(f"### {table.machine_name(machine)}, beside others\n\n" + "\n".join(table.markdown_lines(heads, rows)))
    return "\n\n".join(parts) or table.markdown([])


def _time(column: Mapping[str, float], best: float) -> str:
    seconds = column["median"]
    text = f"{1e3 * seconds:.{3 if seconds < 1e-2 else 1}f} ms"
    return f"**{text}**" if seconds == best else text


# --- ordinary functions, several devices, compiling -------------------------------------------------------------------------------


def _grids(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All runs of the grid by kind of machine, oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for content in sorted(map(grid.load, folder.glob("grid-*.json")), key=lambda c: c["date"]):
        found.setdefault(machine_slug(content["machine"]), []).append(content)
    return dict(sorted(found.items()))


def _grid_regressions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, dict[str, float], dict[str, float]]]:
    """(label, ratio before, ratio after) of the cases of a run that regressed."""
    old = {r["label"]: r["speedup"]["choice"] for r in before["cases"] if "error" not in r}
    new = {r["label"]: r["speedup"]["choice"] for r in after["cases"] if "error" not in r}
    return [(label, old[label], s) for label, s in new.items() if label in old and regressed(old[label], s)]


def ordinary(folder: Path = store.RESULTS) -> str:
    """The runs of the grid: how much faster its functions are, how many are slower, and how many regressed since the run before."""
    rows = []
    for runs in _grids(folder).values():
        for before, run in zip([None, *runs], runs):
            tally = grid_verdict.tally(run["cases"])
            since = str(len(_grid_regressions(before, run))) if before else "-"
            cells = (str(tally.cases), f"{tally.mean:.2f}x", str(tally.slower), f"{tally.taken} of {tally.possible}", since)
            rows.append([table.machine_name(run["machine"]), run["date"], *cells])
    heads = (
        "machine",
        "date",
        "functions",
        "geometric mean",
        "below 0.95x",
        "wins above 1.10x taken",
        "slower than the run before",
    )
    return "\n".join(table.markdown_lines(heads, rows)) if rows else table.markdown([])


def slower_functions(folder: Path = store.RESULTS) -> str:
    """For each kind of machine the functions of the grid that regressed in the newest run."""
    parts = []
    for runs in _grids(folder).values():
        for before, run in zip(runs[-2:], runs[-1:]) if len(runs) > 1 else ():
            found = _grid_regressions(before, run)
            rows = [[label, f"{old['median']:.2f}x", f"{new['median']:.2f}x"] for label, old, new in found]
            head = f"{table.machine_name(run['machine'])}: {len(rows)} of {len(run['cases'])} functions"
            if rows:
                listed = "\n".join(table.markdown_lines(("function", before["date"], run["date"]), rows))
                parts.append(f'<details markdown="1"><summary>{head}</summary>\n\n{listed}\n\n</details>')
    return "\n\n".join(parts) or "None."


def _newest(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The newest file of each machine of ``devices`` or ``lower``."""
    found: dict[str, dict[str, Any]] = {}
    for content in sorted(map(store.load, folder.glob(f"{kind}-*.json")), key=lambda c: c["date"]):
        found[machine_slug(content["machine"])] = content
    yield from found.values()


def sharded(folder: Path = store.RESULTS) -> str:
    """Sharded functions beside sharded ``jax.jit``."""
    rows = []
    for content in _newest(folder, "devices"):
        where = [table.machine_name(content["machine"]), content["date"]]
        rows += [[r["network"], r["mode"], str(r["devices"]), *where, f"{r['speedup']:.2f}x"] for r in content["cases"]]
    return "\n".join(table.markdown_lines(("network", "mode", "devices", "machine", "date", "vs `jax.jit`"), rows))


def compiling(folder: Path = store.RESULTS) -> str:
    """How long tracing, lowering and compiling take."""
    rows = []
    for content in _newest(folder, "lower"):
        where = [table.machine_name(content["machine"]), content["date"]]
        for r in content["cases"]:
            times = [f"{sum(r['columns'][c].values()):.2f} s" for c in ("jit", "pipeline")]
            rows.append([r["network"], str(r["layers"]), *where, *times, f"{r['ratio']:.2f}"])
    heads = ("network", "layers", "machine", "date", "`jax.jit`", "pipeline", "pipeline / `jax.jit`")
    return "\n".join(table.markdown_lines(heads, rows))


def update(folder: Path = store.RESULTS) -> dict[Path, list[str]]:
    """Write the picture and the generated parts; which parts of which document changed."""
    changed = {
        path: [name for name, text in parts.items() if table.update(path, text, name)] for path, parts in documents(folder).items()
    }
    picture = chart.svg(chart.bars(ranges(store.newest(folder))))
    changed[PICTURE] = [] if PICTURE.exists() and PICTURE.read_text() == picture else ["picture"]
    PICTURE.write_text(picture)
    return changed
