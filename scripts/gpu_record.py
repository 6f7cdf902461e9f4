"""The record of a run on a GPU in the format of the benchmarks, and the table of its kernel families in docs/gpu-verified.md.

    python -m scripts.gpu_record benchmarks/results/h200/record-2026-11-28    # writes benchmarks/results/h200/2026-11-28.json
    python -m scripts.gpu_record benchmarks/results/h200/record-2026-11-28 --changed    # which kernels changed since; two minutes

Comes in: a folder ``record-<date>`` with the ``measured.json`` of ``scripts/gpu_check.sh``. Goes out: ``<date>.json`` beside it:
cases as ``benchmarks.measure`` makes them, with seconds where the run wrote milliseconds and microseconds, the plans that were
measured, and for each kernel family and dtype how many programs were right. With ``--changed``, ``changed.json`` in the folder: the
kernels whose source or headers are others today than in its ``sources.json``, which ``scripts.code_hashes write --headers`` wrote
at the record's commit. Invariant: every number is the run's. What it did not measure has no entry, and no cell in a table.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import store, table
from benchmarks.machine import describe_commit
from scripts import code_hashes

VERIFIED = Path(__file__).parents[1] / "docs" / "gpu-verified.md"
FAMILIES = "families"  # between which markers of it the table of kernel families stands
_DTYPES = ("bfloat16", "float16", "float32")
_CASE = re.compile(r"(?P<train>train )?(?P<app>\w+) (?P<dtype>f32|bf16) (?P<rows>\d+)")
_ATTENTION = re.compile(r"attention (?P<rows>\d+) (?P<dim>\d+) (?P<mask>causal|full)(?P<gradient> gradient)?")
_COLUMN = {"eager_ms": "torch", "compile_ms": "torch_compile", "train_eager_ms": "torch", "cudnn_ms": "torch_cudnn"}
_KINDS = {"vertical-resident": "vertical, resident", "vertical-streamed": "vertical, streamed", "spatial-l2": "spatial, L2"}
_KINDS |= {"spatial-cluster": "spatial, cluster"}


# --- The run's measurements as a file of the benchmarks ---------------------------------------------------------------------------


def converted(measured: Mapping[str, Any], date: str) -> dict[str, Any]:
    """The file's content. ``measured``: the run's, with milliseconds and microseconds; ``date``: of the run."""
    about, library = measured["about"], measured["torch"]
    gpu = dict(
        zip(("name", "driver_version", "clocks.max.sm", "clocks.sm", "power.limit"), about["nvidia_smi"].split(", "), strict=True)
    )
    versions = {"jax": about["jax"], "jaxlib": about["jaxlib"], "nvidia-cuda-nvrtc": about["nvrtc"]}
    of_run = {"commit": about["commit"], "modified": None, "versions": versions}
    timed = {name: case for name, case in measured["cases"].items() if "ms" in case.get("columns", {}).get("jit", {})}
    of_torch = library.get("cases", {})
    cases = [{**_case(name, case, of_torch), **of_run} for name, case in timed.items() if name.split()[0] not in ("plans", "token")]
    plans = {_head(name): _plans(case["columns"]) for name, case in timed.items() if name.startswith("plans ")}
    ceilings = {"gemm_flops": (library.get("gemm_tflops"), 1e12), "copy_bandwidth": (library.get("copy_tbs"), 1e12)}
    return {
        "format": store.FORMAT,
        "machine": {"gpu": gpu},
        "date": date,
        **of_run,
        "cases": cases,
        "plans": plans,
        "tokens": {name: _columns(case["columns"], False) for name, case in timed.items() if name.startswith("token ")},
        "programs": _programs(measured["correctness"]),
        "library": {key: value * unit for key, (value, unit) in ceilings.items() if value},
    }


def _case(name: str, case: Mapping[str, Any], library: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a case. Seconds of columns that the run timed."""
    head, columns = _head_of(name), {key: of for key, of in case["columns"].items() if "ms" in of}
    train = head["mode"] == "train"
    other = {
        _COLUMN[key]: {"median": _seconds(ms)}
        for key, ms in library.get(name.removeprefix("train "), {}).items()
        if key in _COLUMN and key.startswith("train_") == train
    }
    pipeline = case["columns"]["pipeline"]
    regions = [
        {"arrangement": r["arrangement"], "seconds": r["seconds"], "baseline_seconds": r["baseline"]}
        for r in pipeline.get("regions", ())
    ]
    explain = {"coverage": pipeline.get("coverage", 0.0), "regions": regions}
    ours = columns.get("pipeline", {}).get("ms")
    ratios = {key: {"median": of["ms"] / ours} for key, of in columns.items() if ours and key in ("jit", "cudnn")}
    networks = {"jit": {"median": columns["network"]["speedup"]}} if "network" in columns else {}
    kernels = {
        key: [{"kernel": k["kernel"], "calls": k["calls"], "seconds": _seconds(k["us"], 1e-6)} for k in of["kernels"]]
        for key, of in columns.items()
        if "kernels" in of
    }
    return {
        **head,
        "columns": {**_columns(columns, train), **other},
        "speedup": {"whole": ratios, "network": networks} if train else ratios,
        "explain": {"whole": explain} if train else explain,
        "flops": case["flops"],
        "calls": len(regions),
        "difference": pipeline.get("differs_from_jit"),
        "kernels": kernels,
        "note": "XLA compiled it while other processes ran",
    }


def _columns(columns: Mapping[str, Any], train: bool) -> dict[str, Any]:
    """Seconds of the columns, which the benchmarks call "whole" where a whole training step is pipelined."""
    names = {"pipeline": "whole"} if train else {}
    timed = {names.get(key, key): of for key, of in columns.items() if "ms" in of}
    return {key: {"median": _seconds(of["ms"]), "min": _seconds(of["min_ms"])} for key, of in timed.items()}


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


def _plans(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_plan(name, of, columns["jit"]) for name, of in columns.items() if name != "jit" and "ms" in of]


def _plan(name: str, plan: Mapping[str, Any], jit: Mapping[str, Any]) -> dict[str, Any]:
    """``name``: as in "sm90-vertical-streamed-cluster2-lanes3 cluster2 stages1 split1"."""
    kind, cluster, stages, split = name.split()
    text = next(text for key, text in _KINDS.items() if key in kind)
    if "streamed" in kind and cluster != "cluster1":
        text = f"{text}, cluster of {cluster.removeprefix('cluster')}"
    if split != "split1":
        text = f"{text}, columns split by {split.removeprefix('split')}"
    ours = [k for k in plan.get("kernels", ()) if k["kernel"].startswith("kitsune")]
    return {
        "name": name,
        "arrangement": text,
        "lanes": plan["lanes"],
        "stages": int(stages.removeprefix("stages")),
        "replicas": plan["replicas"],
        "modelled": _seconds(plan["modelled_ms"]),
        "seconds": _seconds(plan["ms"]),
        "kernel": _seconds(sum(k["calls"] * k["us"] for k in ours), 1e-6) if ours else None,
        "cubins": plan.get("cubins", []),
        "jit": _seconds(jit["ms"]),
        "difference": plan.get("differs_from_jit"),
    }


def _programs(correctness: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each kernel family and dtype: programs, those within the bounds of the check, those whose second run had the same bits,
    and the names of the others."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, result in correctness.items():
        if len(name.split()) != 4:  # on the portable path, under a sanitizer
            continue
        family, dtype, _, _ = name.split()
        of = found.setdefault(
            (family, dtype),
            {"family": family, "dtype": dtype, "programs": 0, "right": 0, "same_bits": 0, "outside": [], "other_bits": []},
        )
        of["programs"] += 1
        of["right"] += result["ok"]
        of["same_bits"] += result.get("equal_bits", False)
        of["outside"] += [] if result["ok"] else [name]
        of["other_bits"] += [] if result.get("equal_bits") else [name]
    return list(found.values())


# --- The table of kernel families -------------------------------------------------------------------------------------------------


def families(folder: Path = store.RESULTS) -> str:
    """A table with a row for each kernel family: of the newest record that has it, when and where it ran, and in how many programs
    it was right, by dtype; and how many kernels of the family changed since."""
    rows: dict[str, dict[str, Any]] = {}
    for content in sorted((store.load(path) for path in folder.glob("*/*.json")), key=lambda c: str(c["date"])):
        newest: dict[str, dict[str, Any]] = {}
        for of in content.get("programs", ()):
            newest.setdefault(of["family"], {"of": content, "dtypes": {}})["dtypes"][of["dtype"]] = of
        rows |= newest
    if not rows:
        return "No record is stored yet."
    lines = ["| " + " | ".join(("family", "ran", *_DTYPES, "changed since")) + " |", "|---|---|" + "---:|" * (len(_DTYPES) + 1)]
    for family in sorted(rows):
        right = [_right(rows[family]["dtypes"].get(dtype)) for dtype in _DTYPES]
        cells = [f"`{family}`", _ran(rows[family]["of"]), *right, _changed(rows[family]["of"], family, folder)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ran(content: Mapping[str, Any]) -> str:
    return f"{content['date']}, {content['machine']['gpu']['name'].removeprefix('NVIDIA ')}, {content['commit'][:10]}"


def _changed(content: Mapping[str, Any], family: str, folder: Path) -> str:
    """How many of the family's kernels are others today than in the record ``content``; "?" where nobody has compared."""
    paths = list(folder.glob(f"*/record-{content['date']}/changed.json"))
    if not paths:
        return "?"
    found = json.loads(paths[0].read_text())["families"].get(family)
    return f"{found['changed']} of {found['kernels']}" if found else "?"


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """For each family of the hashes ``before``, by names such as "cuda/mlp/bfloat16/vertical": its kernels, and those that have
    another hash ``now``, or none.

    >>> changed({"cuda/mlp/float32/a": "1", "cuda/mlp/float32/b": "2"}, {"cuda/mlp/float32/a": "1", "cuda/mlp/float32/b": "3"})
    {'mlp': {'kernels': 2, 'changed': 1}}
    """
    found: dict[str, dict[str, int]] = {}
    for name, digest in before.items():
        of = found.setdefault(name.split("/")[1], {"kernels": 0, "changed": 0})
        of["kernels"] += 1
        of["changed"] += now.get(name) != digest
    return found


def compare_sources(folder: Path) -> None:
    """Write ``changed.json`` of a record's ``folder``. Raises ``OSError`` if it has no ``sources.json``."""
    before = json.loads((folder / "sources.json").read_text())
    content = {**describe_commit(), "families": changed(before, code_hashes.cuda_hashes())}
    (folder / "changed.json").write_text(json.dumps(content, indent=1) + "\n")


def _right(of: Mapping[str, Any] | None) -> str:
    return f"{of['right']} of {of['programs']}" if of else "-"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_record", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="record-<date>, with measured.json")
    parser.add_argument("--changed", action="store_true", help="compare today's kernels with those of the record instead")
    args = parser.parse_args(arguments)
    if args.changed:
        compare_sources(args.folder)
        return 0
    date = args.folder.name.removeprefix("record-")
    content = converted(json.loads((args.folder / "measured.json").read_text()), date)
    path = args.folder.parent / f"{date}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(content['cases'])} cases and {len(content['programs'])} families by dtype in {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
