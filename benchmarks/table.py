"""The tables of docs/measured.md and the README's summary of them, made from stored measurements.

Comes in: what ``store.newest`` gives. Goes out: Markdown, put between two markers of a file. No number is typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import generation
from kitsune_jax.report.data import byte_text, count_text

_WIDEST = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
_DTYPE = {"f32": "float32", "bf16": "bfloat16"}
PARTS = {"benchmarks": "infer", "training": "train"}  # between which markers of the document which mode's tables of CPUs stand
DEVICES, PLANS = "devices", "plans"  # between which markers of it the tables of GPUs stand, and the plans measured there
SUMMARY = "summary"  # between which markers of the README the ratios alone stand
PEERS = "peers"  # between which markers of the README the ratios to the fastest library stand

Record = dict[str, Any]
Results = list[tuple[dict[str, Any], list[Record]]]
Columns = dict[str, Callable[[Record], str]]  # by their heads: the cell of a record, "" where the record has no such number


def markdown(results: Results, mode: str = "infer") -> str:
    """One table per machine, of the records of ``mode``; a sentence where nothing has been measured."""
    chosen = [(machine, [r for r in records if r["mode"] == mode]) for machine, records in results]
    tables = [_TABLES[mode](machine, records) for machine, records in chosen if records]
    option = "" if mode == "infer" else f" --mode {mode}"
    return "\n\n".join(tables) or f"No measurement is stored yet: `python -m benchmarks run --all{option}` makes them."


def of_cpus(results: Results) -> Results:
    return [(machine, records) for machine, records in results if "gpu" not in machine]


def devices(results: Results) -> str:
    """The tables of the GPUs among ``results``, those of training steps behind the others."""
    gpus = [(machine, records) for machine, records in results if "gpu" in machine]
    modes = [mode for mode in PARTS.values() if any(r["mode"] == mode for _, records in gpus for r in records)]
    return "\n\n".join(markdown(gpus, mode) for mode in modes) or markdown([])


def plans(measured: dict[str, list[Record]]) -> str:
    """The plans of each application, modelled and measured: a row for each arrangement, two columns for each application."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for name, found in measured.items():
        for plan in found:
            of = (plan["arrangement"], str(plan["lanes"]), str(plan["stages"]))
            rows.setdefault(of, {})[name] = f"{1e3 * plan['modelled']:.3f} ms | {1e3 * plan['seconds']:.3f} ms"
    heads = [f"{name}: {what}" for name in measured for what in ("modelled", "measured")]
    cells = [[*of, *(times.get(name, "- | -") for name in measured)] for of, times in sorted(rows.items())]
    return "\n".join(markdown_lines(("arrangement", "lanes", "stages", *heads), cells))


def summary(results: Results) -> str:
    """How many times as fast as ``jax.jit`` each application is, at the largest size measured: a row for each, for each machine a
    column for inference and one for a training step."""
    found: dict[str, dict[tuple[int, str], tuple[int, str]]] = {}  # application -> (machine, mode) -> (rows, ratio)
    columns = [
        (k, mode) for k, (_, records) in enumerate(results) for mode in PARTS.values() if any(r["mode"] == mode for r in records)
    ]
    for k, (_, records) in enumerate(results):
        for r in records:
            speedup = (r["speedup"] if r["mode"] == "infer" else r["speedup"]["whole"]).get("jit")
            cells = found.setdefault(f"{r['title']}, {_DTYPE.get(r['dtype'], r['dtype'])}", {})
            if speedup and r["rows"] > cells.get((k, r["mode"]), (0, ""))[0]:
                cells[k, r["mode"]] = r["rows"], f"{speedup['median']:.2f}x"
    if not found:
        return markdown(results)
    heads = [f"{machine_name(results[k][0])}: {'inference' if mode == 'infer' else 'training step'}" for k, mode in columns]
    rows = [[what, *(cells.get(c, (0, "-"))[1] for c in columns)] for what, cells in found.items()]
    return "\n".join(markdown_lines(("application", *heads), rows))


def peers_summary(results: Results) -> str:
    """For each CPU with records of PyTorch: how many times as fast as the fastest of ``jax.jit``, PyTorch eager and compiled the
    pipeline is, a row for each application, a column for each dtype and mode."""
    parts = []
    kinds = [(dtype, mode) for dtype in _DTYPE for mode in PARTS.values()]
    for machine, records in of_cpus(results):
        cells: dict[str, dict[tuple[str, str], str]] = {}
        for r in records:
            if beside := beside_library(r):
                jit = (r["speedup"] if r["mode"] == "infer" else r["speedup"]["whole"])["jit"]["median"]
                ratio, name = min(beside, (jit, "`jax.jit`"))
                title = f"{r['title']}, {count_text(r['rows'])} {r.get('unit', 'rows')}"
                cells.setdefault(title, {})[r["dtype"], r["mode"]] = f"{ratio:.2f}x {name}"
        if cells:
            heads = [f"{_DTYPE[d]}, {'inference' if mode == 'infer' else 'training step'}" for d, mode in kinds]
            rows = [[title, *(found.get(kind, "-") for kind in kinds)] for title, found in cells.items()]
            versions = ", ".join(sorted({f"PyTorch {r['pytorch']}" for r in records if "pytorch" in r}))
            parts.append(f"{machine_name(machine)}, {versions}:\n\n" + "\n".join(markdown_lines(("application", *heads), rows)))
    return "\n\n".join(parts) or markdown([])


def machine_name(machine: dict[str, Any]) -> str:
    if "gpu" in machine:
        return str(machine["gpu"]["name"])
    cpu = " ".join(re.sub(r"\([^)]*\)|@.*|\bProcessor\b", " ", machine["cpu"]).split())
    widest = [name for isa, name in _WIDEST.items() if isa in machine.get("isa", ())]
    design = f" ({generation(machine)})" if generation(machine) else ""
    return ", ".join((cpu + design, f"{machine['cores']} cores", *widest[:1]))


def _inference(machine: dict[str, Any], records: list[Record]) -> str:
    if "gpu" in machine:
        return f"{_gpu_caption(machine, records)}\n\n{_lines('application', _GPU, records)}"
    return f"{_caption(machine, records)}\n\n{_lines('application', _CPU, records)}\n\n{_first_calls(records)}"


def _training(machine: dict[str, Any], records: list[Record]) -> str:
    if "gpu" in machine:
        return f"{_gpu_train_caption(machine, records)}\n\n{_lines('training step', _GPU_TRAIN, records)}"
    return f"{_train_caption(machine, records)}\n\n{_lines('training step', _CPU_TRAIN, records)}"


_TABLES = {"infer": _inference, "train": _training}


def markdown_lines(head: Sequence[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1), *("| " + " | ".join(row) + " |" for row in rows)]


def _when(records: list[dict[str, Any]]) -> str:
    """Versions of JAX, dates and commits of ``records``."""
    versions = sorted({r["versions"]["jax"] for r in records})
    dates = sorted({r["date"] for r in records})
    commits = sorted({f"{(r['commit'] or 'unknown')[:10]}{' with changes' if r['modified'] else ''}" for r in records})
    return (
        f"JAX {', '.join(versions)}, measured {dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''} at {', '.join(commits)}. "
        "Medians of interleaved runs; "
    )


def _caption(machine: dict[str, Any], records: list[dict[str, Any]]) -> str:
    return (
        f"{_cpu(machine)}, {_when(records)}"
        "in brackets the quartiles of the ratio within a round; error is the largest against float64, relative to the larger of "
        "the element and the root mean square. PyTorch: the faster of eager and compiled. -: not measured."
    )


def _train_caption(machine: dict[str, Any], records: list[Record]) -> str:
    return (
        f"{_cpu(machine)}, {_when(records)}"
        "in brackets the quartiles of the ratio within a round; error is that of the worst parameter's gradient against float64, "
        "in norm; memory is how far the first step raises the resident memory of a process: intermediates, pipelines' tiles and "
        "sums, results. PyTorch: the faster of eager and compiled. -: not measured."
    )


def _cpu(machine: dict[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])})"


def _gpu(machine: dict[str, Any]) -> str:
    return f"{machine['gpu']['name']}, driver {machine['gpu'].get('driver_version', 'unknown')}"


def what(record: Record) -> str:
    """Application, size and dtype of a record.

    >>> what({"title": "NeRF", "rows": 65536, "dtype": "bf16"})
    'NeRF, 65 536 rows, bfloat16'
    """
    return ", ".join(
        (
            record["title"],
            f"{count_text(record['rows'])} {record.get('unit', 'rows')}",
            str(_DTYPE.get(record["dtype"], record["dtype"])),
        )
    )


def _ratio(speedup: dict[str, Any] | None) -> str:
    if not speedup:
        return ""
    quartiles = f" ({speedup['q1']:.2f} to {speedup['q3']:.2f})" if "q1" in speedup else ""
    return f"**{speedup['median']:.2f}x**{quartiles}"


def _first_calls(records: list[dict[str, Any]]) -> str:
    overheads = [r["first_call"] for r in records if "first_call" in r]
    if not overheads:
        return "The first call's overhead was not measured."
    cold = max(overheads, key=lambda o: o["cold"]["overhead"])["cold"]
    warm = max(overheads, key=lambda o: o["warm"]["overhead"])["warm"]
    return (
        f"Tracing, lowering and compiling, the worst of these cases: {cold['pipeline']:.2f} s against {cold['jit']:.2f} s with "
        f"`jax.jit` the first time in a process, {warm['pipeline']:.2f} s against {warm['jit']:.2f} s after that."
    )


# --- Cells; columns that no record of a table has a number for are left out -------------------------------------------------------

_OTHERS = {"cudnn": "cuDNN", "torch_compile": "torch.compile", "torch_cudnn": "cuDNN, by PyTorch", "torch": "PyTorch"}
_BUSY = "while other processes compiled"  # the note of a case whose kernels of XLA were chosen on a busy device


def _lines(first: str, columns: Columns, records: list[Record]) -> str:
    rows = [[cell(r) for cell in columns.values()] for r in records]
    kept = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    heads = [first, *(head for k, head in enumerate(columns) if k in kept)]
    names = [f"{what(r)}{' *' if r.get('note') == _BUSY else ''}" for r in records]
    return "\n".join(markdown_lines(heads, [[name, *(row[k] or "-" for k in kept)] for name, row in zip(names, rows, strict=True)]))


def _gpu_caption(machine: dict[str, Any], records: list[Record]) -> str:
    floor = (
        "What the device can is the least time of the case by a machine model, and by the rates that a library's matmul and a copy "
        "reached on this device."
    )
    return _of_notes(machine, records, floor if any("roofline" in r for r in records) else "")


def _gpu_train_caption(machine: dict[str, Any], records: list[Record]) -> str:
    memory = "Memory is what XLA allocates for intermediates."
    return _of_notes(machine, records, memory if any("memory" in r for r in records) else "")


def _of_notes(machine: dict[str, Any], records: list[Record], more: str) -> str:
    """The caption of a table of a GPU; ``more``: its last sentence."""
    parts = [f"{_gpu(machine)}, {_when(records)}float32 is tf32 in all columns, JAX's default."]
    if any(_differs(r) for r in records):
        parts.append("The difference is that of the worst array, its norm over that of the result of `jax.jit`.")
    if any(r.get("note") == _BUSY for r in records):
        parts.append("\\*: XLA chose its kernels while other processes used the device.")
    return " ".join([*parts, *([more] if more else [])])


def _time(column: str, digits: int = 3) -> Callable[[Record], str]:
    return lambda r: f"{1e3 * r['columns'][column]['median']:.{digits}f} ms" if column in r["columns"] else ""


def _against(column: str, base: str) -> Callable[[Record], str]:
    """How many times as fast as column ``base`` is ``column`` of a training step."""

    def cell(record: Record) -> str:
        speedup = record["speedup"].get(column, {}).get(base)
        return _ratio(speedup) if speedup else ""

    return cell


def _explained(record: Record) -> dict[str, Any]:
    return dict(record["explain"]["whole"] if record["mode"] == "train" else record["explain"])


def _modelled(record: Record) -> str:
    regions = _explained(record).get("regions")
    if regions is None:
        return ""
    seconds = sum(region["seconds"] for region in regions)
    return f"{1e3 * seconds:.3f} ms" if regions and record.get("calls", 1) else "left to XLA"


def beside_library(record: Record) -> tuple[float, str] | None:
    """How many times as fast as the fastest of the other libraries the pipeline is, and that library's name."""
    own = record["speedup"] if record["mode"] == "infer" else record["speedup"]["whole"]
    found = [(own[c]["median"], name) for c, name in _OTHERS.items() if c in own]
    return min(found) if found else None


def _vs_library(record: Record) -> str:
    found = beside_library(record)
    return f"**{found[0]:.2f}x** {found[1]}" if found else ""


def _library(record: Record) -> str:
    """The fastest of the other libraries."""
    found = [(record["columns"][c]["median"], name) for c, name in _OTHERS.items() if c in record["columns"]]
    return f"{min(found)[1]}: {1e3 * min(found)[0]:.3f} ms" if found else ""


def _teraflops(record: Record) -> str:
    column = "whole" if record["mode"] == "train" else "pipeline"
    return f"{record['flops'] / record['columns'][column]['median'] / 1e12:.0f}" if record.get("flops") else ""


def _floor(record: Record) -> str:
    if "roofline" not in record:
        return ""
    seconds = record["columns"]["pipeline"]["median"]
    floors = [record["roofline"].get(kind) for kind in ("model", "measured")]
    return " / ".join(f"{100 * floor['seconds'] / seconds:.0f} %" if floor else "no model" for floor in floors)


def _errors(record: Record) -> str:
    columns = record["columns"]
    if record["mode"] == "train":
        shown = [columns[c]["errors"]["mean"] for c in ("jit", "whole") if "errors" in columns[c]]
    else:
        shown = [columns[c]["max_rel_error"] for c in ("jit", "pipeline") if "max_rel_error" in columns[c]]
    return " / ".join(f"{error:.1e}" for error in shown)


def _differs(record: Record) -> str:
    return f"{record['difference']:.1e}" if "difference" in record else ""


def _coverage(record: Record) -> str:
    explain = _explained(record)
    counted = "ops_total" in explain
    return f"{explain['ops_pipelined']} of {explain['ops_total']}" if counted else f"{100 * explain['coverage']:.0f} %"


def _moved(record: Record) -> str:
    explain = _explained(record)
    if "traffic_pipeline" not in explain:
        return ""
    return f"{byte_text(explain['traffic_bulk_sync'])} -> {byte_text(explain['traffic_pipeline'])}"


def _memory(record: Record) -> str:
    if "memory" not in record:
        return ""
    shown = [record["memory"].get(c, {}).get("temp_bytes") for c in ("jit", "network", "recompute", "whole")]
    return " / ".join("not measured" if b is None else byte_text(b) for b in shown)


def _peak_memory(record: Record) -> str:
    shown = [record["memory"].get(c, {}).get("peak_bytes") for c in ("jit", "network", "recompute", "whole")]
    return " / ".join("not measured" if b is None else byte_text(b) for b in shown) if any(shown) else ""


_CPU: Columns = {
    "`jax.jit`": _time("jit", 1),
    "blocked by hand": _time("blocked", 1),
    "pipeline": _time("pipeline", 1),
    "vs `jax.jit`": lambda r: _ratio(r["speedup"].get("jit")),
    "vs `jax.jit` with huge pages": lambda r: _ratio(r["speedup"].get("jit_hugepages")),
    "vs blocked": lambda r: _ratio(r["speedup"].get("blocked")),
    "vs PyTorch": _vs_library,
    "error: `jax.jit` / pipeline": _errors,
    "operators pipelined": _coverage,
    "bytes moved (model)": _moved,
}
_CPU_TRAIN: Columns = {
    "`jax.jit`": _time("jit", 1),
    "microbatched by hand": _time("microbatched", 1),
    "network pipelined": _time("network", 1),
    "step pipelined": _time("whole", 1),
    "step vs `jax.jit`": _against("whole", "jit"),
    "step vs microbatched": _against("whole", "microbatched"),
    "step vs PyTorch": _vs_library,
    "network vs `jax.jit`": _against("network", "jit"),
    "gradient's error: `jax.jit` / step": _errors,
    "operators pipelined": _coverage,
    "bytes moved (model)": _moved,
    "memory: `jax.jit` / network / network, recomputing / step": _peak_memory,
}
_GPU: Columns = {
    "`jax.jit`": _time("jit"),
    "pipeline": _time("pipeline"),
    "vs `jax.jit`": lambda r: _ratio(r["speedup"].get("jit")),
    "modelled": _modelled,
    "another library": _library,
    "TFLOP/s": _teraflops,
    "of what the device can (model / measured)": _floor,
    "error: `jax.jit` / pipeline": _errors,
    "difference from `jax.jit`": _differs,
    "operators pipelined": _coverage,
    "bytes moved (model)": _moved,
}
_GPU_TRAIN: Columns = {
    "`jax.jit`": _time("jit"),
    "network pipelined": _time("network"),
    "step pipelined": _time("whole"),
    "step vs `jax.jit`": _against("whole", "jit"),
    "network vs `jax.jit`": _against("network", "jit"),
    "modelled": _modelled,
    "another library": _library,
    "gradient's error: `jax.jit` / step": _errors,
    "difference from `jax.jit`": _differs,
    "operators pipelined": _coverage,
    "bytes moved (model)": _moved,
    "memory: `jax.jit` / network / network, recomputing / step": _memory,
}


# --- Markers ----------------------------------------------------------------------------------------------------------------------


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def update(path: Path, text: str, name: str = "benchmarks") -> bool:
    """Put ``text`` between the markers called ``name``; True where that changed the file. Raises ``ValueError`` without markers."""
    begin, end = markers(name)
    content = path.read_text()
    if content.count(begin) != 1 or content.count(end) != 1 or content.index(begin) > content.index(end):
        raise ValueError(f"{path.name} needs one {begin!r} and after it one {end!r}")
    changed = content[: content.index(begin)] + f"{begin}\n{text}\n" + content[content.index(end) :]
    if changed == content:
        return False
    path.write_text(changed)
    return True
