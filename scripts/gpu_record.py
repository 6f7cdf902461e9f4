"""The record of a run on a GPU in the format of the benchmarks, and the table of its kernel families in docs/gpu-verified.md.

    python -m scripts.gpu_record benchmarks/results/h200/record-2026-11-26    # writes benchmarks/results/h200/2026-11-26.json

Comes in: a folder ``record-<date>`` with the ``measured.json`` of a run. Goes out: ``<date>.json`` beside it: cases as
``benchmarks.measure`` makes them, with seconds where the run wrote milliseconds and microseconds, the plans that were measured, and
for each kernel family and dtype how many programs were right. Invariant: every number is the run's. What it did not measure has no
entry, and no cell in a table.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store, table

VERIFIED = Path(__file__).parents[1] / "docs" / "gpu-verified.md"
FAMILIES = "families"  # between which markers of it the table of kernel families stands
_DTYPES = ("bfloat16", "float16", "float32")
_DEVICE = re.compile(
    r"(?P<gpu>.+), driver (?P<driver>[\d.]+), (?P<watts>\d+ W), JAX (?P<jax>[\d.]+), NVRTC (?P<nvrtc>[\d.]+), commit (\w+)"
)
_CASE = re.compile(r"(?P<train>train )?(?P<app>\w+) (?P<dtype>f32|bf16) (?P<rows>\d+)")
_ATTENTION = re.compile(r"attention (?P<rows>\d+) (?P<dim>\d+) (?P<mask>causal|full)(?P<gradient> gradient)?")
_COLUMN = {"eager_ms": "torch", "compile_ms": "torch_compile", "train_eager_ms": "torch", "cudnn_ms": "torch_cudnn"}
_ALONE = "alone on the device"
_KINDS = {"vertical-resident": "vertical, resident", "vertical-streamed": "vertical, streamed", "spatial-l2": "spatial, L2"}
_KINDS |= {"spatial-cluster": "spatial, cluster"}


# --- The run's measurements as a file of the benchmarks ---------------------------------------------------------------------------


def converted(measured: Mapping[str, Any], date: str) -> dict[str, Any]:
    """The file's content. ``measured``: the run's, with milliseconds and microseconds; ``date``: of the run."""
    found = _DEVICE.fullmatch(measured["device"])
    if found is None:
        raise ValueError(f"the record names its device in another form: {measured['device']!r}")
    gpu = {"name": found["gpu"], "driver_version": found["driver"], "power.limit": found["watts"]}
    of_run = {"commit": found[6], "modified": None, "versions": {"jax": found["jax"], "nvidia-cuda-nvrtc": found["nvrtc"]}}
    library: dict[str, Any] = measured["torch"]
    cases = [{**_case(name, runs, library), **of_run} for name, runs in measured["cases"].items()]
    return {
        "format": store.FORMAT,
        "machine": {"gpu": gpu},
        "date": date,
        **of_run,
        "cases": cases,
        "plans": {_head(name): [_plan(*of) for of in plans.items()] for name, plans in measured["plans"].items()},
        "programs": _programs(measured["correctness"]),
        "library": {"gemm_flops": library["gemm_tflops"] * 1e12, "copy_bandwidth": library["copy_tbs"] * 1e12},
    }


def _case(name: str, runs: Sequence[Mapping[str, Any]], library: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a case, of the run that had the device to itself where there is one; the other one is ``earlier``."""
    run, *others = sorted(runs, key=lambda r: r["xla_compiled"] != _ALONE)
    head = _head_of(name)
    train = head["mode"] == "train"
    other = {
        _COLUMN[key]: {"median": _seconds(ms)}
        for key, ms in library.get(name.removeprefix("train "), {}).items()
        if key.startswith("train_") == train
    }
    regions = [
        {"arrangement": r["arrangement"], "seconds": r["seconds"], "baseline_seconds": r["baseline"]} for r in run["regions"]
    ]
    explain = {"coverage": run["coverage"], "regions": regions}
    ratios = {base: {"median": ratio} for base, ratio in run["speedup"].items()}
    kernels = {
        key.removeprefix("kernels_"): [
            {"kernel": k["kernel"], "calls": k["calls"], "seconds": _seconds(k["us"], 1e-6)} for k in run[key]
        ]
        for key in run
        if key.startswith("kernels_")
    }
    return {
        **head,
        "columns": {**_columns(run, train), **other},
        "speedup": {"whole": ratios, "network": {}} if train else ratios,
        "explain": {"whole": explain} if train else explain,
        "flops": run["flops"],
        "calls": run["calls_pipeline"],
        "difference": run["differs_from_jit"],
        "kernels": kernels,
        "note": run["xla_compiled"],
        "earlier": [{"note": o["xla_compiled"], "columns": _columns(o, train)} for o in others],
    }


def _columns(run: Mapping[str, Any], train: bool) -> dict[str, Any]:
    """Seconds of the columns, which the benchmarks call "whole" where a whole training step is pipelined."""
    names = {"pipeline": "whole"} if train else {}
    return {names.get(c, c): {"median": _seconds(ms), "min": _seconds(run["min_ms"][c])} for c, ms in run["ms"].items()}


def _seconds(number: float, unit: float = 1e-3) -> float:
    return float(f"{number * unit:.10g}")


def _head_of(name: str) -> dict[str, Any]:
    """What names a case: ``_KEY`` of the store, its title and the unit of its rows."""
    from benchmarks.apps import APPS
    from benchmarks.graphs.apps import GRAPH_APPS
    from benchmarks.sequences.apps import SEQUENCE_APPS

    if of := _ATTENTION.fullmatch(name):
        gradient = "_gradient" if of["gradient"] else ""
        words = [
            f"{'gradient of ' if gradient else ''}attention",
            f"heads of {of['dim']}",
            *(["causal"] if of["mask"] == "causal" else []),
        ]
        head = {"app": f"attention_{of['dim']}_{of['mask']}{gradient}", "title": ", ".join(words), "unit": "tokens"}
        return {**head, "mode": "infer", "dtype": "bf16", "platform": "cuda", "rows": int(of["rows"])}
    found = _CASE.fullmatch(name)
    if found is None:
        raise ValueError(f"a case of an unknown name: {name!r}")
    app = APPS[found["app"]] if found["app"] in APPS else {**GRAPH_APPS, **SEQUENCE_APPS}[found["app"]]
    head = {
        "app": app.name,
        "title": app.title,
        "unit": getattr(app, "unit", "rows"),
        "mode": "train" if found["train"] else "infer",
    }
    return {**head, "dtype": found["dtype"], "platform": "cuda", "rows": int(found["rows"])}


def _head(name: str) -> str:
    """The application of measured plans, as a table's head."""
    head = _head_of(name.removeprefix("plans "))
    return table.what(head)


def _plan(name: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """``name``: as in "sm90-vertical-streamed-cluster2-lanes3 cluster2 stages1 split1"."""
    kind, cluster, stages, split = name.split()
    text = next(text for key, text in _KINDS.items() if key in kind)
    if "streamed" in kind and cluster != "cluster1":
        text = f"{text}, cluster of {cluster.removeprefix('cluster')}"
    if split != "split1":
        text = f"{text}, columns split by {split.removeprefix('split')}"
    return {
        "name": name,
        "arrangement": text,
        "lanes": plan["lanes"],
        "stages": int(stages.removeprefix("stages")),
        "replicas": plan["replicas"],
        "modelled": _seconds(plan["modelled_ms"]),
        "seconds": _seconds(plan["ms"]),
        "jit": _seconds(plan["jit_ms"]),
        "difference": plan["differs"],
    }


def _programs(correctness: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each kernel family and dtype: programs, those within the bounds of the check, those whose second run had the same bits,
    and the names of the others."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, result in correctness.items():
        family, dtype, _, _ = name.split()
        of = found.setdefault(
            (family, dtype),
            {"family": family, "dtype": dtype, "programs": 0, "right": 0, "same_bits": 0, "outside": [], "other_bits": []},
        )
        of["programs"] += 1
        of["right"] += result["ok"]
        of["same_bits"] += result["equal_bits"]
        of["outside"] += [] if result["ok"] else [name]
        of["other_bits"] += [] if result["equal_bits"] else [name]
    return list(found.values())


# --- The table of kernel families -------------------------------------------------------------------------------------------------


def families(folder: Path = store.RESULTS) -> str:
    """A table with a row for each kernel family: of the newest record that has it, when and where it ran, and in how many programs
    it was right, by dtype."""
    rows: dict[str, dict[str, Any]] = {}
    for content in sorted((store.load(path) for path in folder.glob("*/*.json")), key=lambda c: str(c["date"])):
        newest: dict[str, dict[str, Any]] = {}
        for of in content.get("programs", ()):
            newest.setdefault(of["family"], {"of": content, "dtypes": {}})["dtypes"][of["dtype"]] = of
        rows |= newest
    if not rows:
        return "No record is stored yet."
    lines = ["| " + " | ".join(("family", "ran", *_DTYPES)) + " |", "|---|---|" + "---:|" * len(_DTYPES)]
    for family in sorted(rows):
        cells = [f"`{family}`", _ran(rows[family]["of"]), *(_right(rows[family]["dtypes"].get(dtype)) for dtype in _DTYPES)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ran(content: Mapping[str, Any]) -> str:
    return f"{content['date']}, {content['machine']['gpu']['name'].removeprefix('NVIDIA ')}, {content['commit'][:10]}"


def _right(of: Mapping[str, Any] | None) -> str:
    return f"{of['right']} of {of['programs']}" if of else "-"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_record", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="record-<date>, with measured.json")
    args = parser.parse_args(arguments)
    date = args.folder.name.removeprefix("record-")
    content = converted(json.loads((args.folder / "measured.json").read_text()), date)
    path = args.folder.parent / f"{date}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(content['cases'])} cases and {len(content['programs'])} families by dtype in {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
