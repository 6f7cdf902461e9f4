"""The tables of docs/measured.md and the README's summary of them, made from stored measurements.

Comes in: what ``store.newest`` gives. Goes out: Markdown, put between two markers of a file. No number is typed by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kitsune_jax.report.data import byte_text, count_text

_WIDEST = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
_DTYPE = {"f32": "float32", "bf16": "bfloat16"}
_HEAD = (
    "application",
    "`jax.jit`",
    "blocked by hand",
    "pipeline",
    "vs `jax.jit`",
    "vs `jax.jit` with huge pages",
    "vs blocked",
    "error: `jax.jit` / pipeline",
    "operators pipelined",
    "bytes moved (model)",
)

_GPU_HEAD = (
    "application",
    "`jax.jit`",
    "pipeline",
    "vs `jax.jit`",
    "TFLOP/s",
    "of what the device can (model / measured)",
    "error: `jax.jit` / pipeline",
    "operators pipelined",
    "bytes moved (model)",
)

_TRAIN_HEAD = (
    "training step",
    "`jax.jit`",
    "microbatched by hand",
    "network pipelined",
    "step pipelined",
    "step vs `jax.jit`",
    "step vs microbatched",
    "network vs `jax.jit`",
    "gradient's error: `jax.jit` / step",
    "operators pipelined",
    "bytes moved (model)",
    "memory: `jax.jit` / network / network, recomputing / step",
)
_TRAIN_GPU_HEAD = tuple(h for h in _TRAIN_HEAD if "microbatched" not in h)

PARTS = {"benchmarks": "infer", "training": "train"}  # between which markers of the document which mode's tables stand
SUMMARY = "summary"  # between which markers of the README the ratios alone stand

Results = list[tuple[dict[str, Any], list[dict[str, Any]]]]


def markdown(results: Results, mode: str = "infer") -> str:
    """One table per machine, of the records of ``mode``; a sentence where nothing has been measured."""
    chosen = [(machine, [r for r in records if r["mode"] == mode]) for machine, records in results]
    tables = [_TABLES[mode](machine, records) for machine, records in chosen if records]
    option = "" if mode == "infer" else f" --mode {mode}"
    return "\n\n".join(tables) or f"No measurement is stored yet: `python -m benchmarks run --all{option}` makes them."


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
    heads = [f"{_name(results[k][0])}: {'inference' if mode == 'infer' else 'training step'}" for k, mode in columns]
    rows = [[what, *(cells.get(c, (0, "-"))[1] for c in columns)] for what, cells in found.items()]
    return "\n".join(_lines(("application", *heads), rows))


def _name(machine: dict[str, Any]) -> str:
    if "gpu" in machine:
        return str(machine["gpu"]["name"])
    cpu = " ".join(re.sub(r"\([^)]*\)|@.*|\bProcessor\b", " ", machine["cpu"]).split())
    widest = [name for isa, name in _WIDEST.items() if isa in machine.get("isa", ())]
    return ", ".join((cpu, f"{machine['cores']} cores", *widest[:1]))


def _inference(machine: dict[str, Any], records: list[dict[str, Any]]) -> str:
    if "gpu" in machine:
        return f"{_gpu_caption(machine, records)}\n\n" + "\n".join(_lines(_GPU_HEAD, [_gpu_row(r) for r in records]))
    lines = _lines(_HEAD, [_row(r) for r in records])
    return f"{_caption(machine, records)}\n\n" + "\n".join(lines) + f"\n\n{_first_calls(records)}"


def _training(machine: dict[str, Any], records: list[dict[str, Any]]) -> str:
    gpu = "gpu" in machine
    lines = _lines(_TRAIN_GPU_HEAD if gpu else _TRAIN_HEAD, [_train_row(r, gpu) for r in records])
    return f"{_train_caption(machine, records, gpu)}\n\n" + "\n".join(lines)


_TABLES = {"infer": _inference, "train": _training}


def _lines(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
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
        "the element and the root mean square."
    )


def _gpu_caption(machine: dict[str, Any], records: list[dict[str, Any]]) -> str:
    return (
        f"{_gpu(machine)}, {_when(records)}"
        "float32 is tf32 in both columns, JAX's default. What the device can is the least time of the case by a machine model, and "
        "by the rates that a library's matmul and a copy reached on this device."
    )


def _train_caption(machine: dict[str, Any], records: list[dict[str, Any]], gpu: bool) -> str:
    memory = (
        "what XLA allocates for intermediates."
        if gpu
        else "how far the first step raises the resident memory of a process: intermediates, pipelines' tiles and sums, results."
    )
    return (
        f"{_gpu(machine) if gpu else _cpu(machine)}, {_when(records)}"
        "in brackets the quartiles of the ratio within a round; error is that of the worst parameter's gradient against float64, "
        f"in norm; memory is {memory}{' float32 is tf32 in all columns, as JAX has it by default.' if gpu else ''}"
    )


def _cpu(machine: dict[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])})"


def _gpu(machine: dict[str, Any]) -> str:
    return f"{machine['gpu']['name']}, driver {machine['gpu'].get('driver_version', 'unknown')}"


def _gpu_row(record: dict[str, Any]) -> list[str]:
    columns, explain, roofline = record["columns"], record["explain"], record.get("roofline", {})
    seconds = columns["pipeline"]["median"]
    floors = [roofline.get("model"), roofline.get("measured")]
    return [
        _what(record),
        *(f"{1e3 * columns[c]['median']:.3f} ms" for c in ("jit", "pipeline")),
        _ratio(record["speedup"].get("jit")),
        f"{record['flops'] / seconds / 1e12:.0f}" if "flops" in record else "not counted",
        " / ".join(f"{100 * floor['seconds'] / seconds:.0f} %" if floor else "no model" for floor in floors),
        f"{columns['jit']['max_rel_error']:.1e} / {columns['pipeline']['max_rel_error']:.1e}",
        f"{explain['ops_pipelined']} of {explain['ops_total']}",
        f"{byte_text(explain['traffic_bulk_sync'])} -> {byte_text(explain['traffic_pipeline'])}",
    ]


def _what(record: dict[str, Any]) -> str:
    return ", ".join(
        (
            record["title"],
            f"{count_text(record['rows'])} {record.get('unit', 'rows')}",
            _DTYPE.get(record["dtype"], record["dtype"]),
        )
    )


def _row(record: dict[str, Any]) -> list[str]:
    columns, speedup, explain = record["columns"], record["speedup"], record["explain"]
    return [
        _what(record),
        *(_milliseconds(columns.get(c), 1) for c in ("jit", "blocked", "pipeline")),
        *(_ratio(speedup.get(c)) for c in ("jit", "jit_hugepages", "blocked")),
        f"{columns['jit']['max_rel_error']:.1e} / {columns['pipeline']['max_rel_error']:.1e}",
        f"{explain['ops_pipelined']} of {explain['ops_total']}",
        f"{byte_text(explain['traffic_bulk_sync'])} -> {byte_text(explain['traffic_pipeline'])}",
    ]


def _train_row(record: dict[str, Any], gpu: bool) -> list[str]:
    columns, speedup, explain = record["columns"], record["speedup"], record["explain"]["whole"]
    shown = ("jit", "network", "whole") if gpu else ("jit", "microbatched", "network", "whole")
    against = [("whole", "jit"), ("network", "jit")] if gpu else [("whole", "jit"), ("whole", "microbatched"), ("network", "jit")]
    taken = "temp_bytes" if gpu else "peak_bytes"
    memory = [record["memory"].get(c, {}).get(taken) for c in ("jit", "network", "recompute", "whole")]
    return [
        _what(record),
        *(_milliseconds(columns.get(c), 3 if gpu else 1) for c in shown),
        *(_ratio(speedup[column].get(base)) for column, base in against),
        " / ".join(f"{columns[c]['errors']['mean']:.1e}" for c in ("jit", "whole")),
        f"{explain['ops_pipelined']} of {explain['ops_total']}",
        f"{byte_text(explain['traffic_bulk_sync'])} -> {byte_text(explain['traffic_pipeline'])}",
        " / ".join("not measured" if b is None else byte_text(b) for b in memory),
    ]


def _milliseconds(column: dict[str, Any] | None, digits: int) -> str:
    return f"{1e3 * column['median']:.{digits}f} ms" if column else "not measured"


def _ratio(speedup: dict[str, Any] | None) -> str:
    return f"**{speedup['median']:.2f}x** ({speedup['q1']:.2f} to {speedup['q3']:.2f})" if speedup else "not measured"


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
