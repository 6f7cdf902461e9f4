"""Measurements on disk: ``<machine>-<date>.json``, one file per machine and day, cases merged by what they measure. Those of a GPU
have a folder of their own, ``<device>/<device>-<date>.json``: what runs on another device is another machine.

Comes in: records of ``measure``. Goes out: files, and the newest record of every case of every machine. Invariant: a record says
itself which commit and versions it comes from, so that files hold records of several runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_commit, describe_machine, describe_software, machine_slug, today

FORMAT = 1
RESULTS = Path(__file__).parent / "results"
_KEY = ("platform", "app", "mode", "rows", "dtype")
ROW_APP_NAMES = ("nerf", "mgn", "swiglu")
GRAPH_APP_NAMES = ("meshgraphnets", "graphcast", "graphcast_processor", "dlrm", "gat", "graph_transformer")
SEQUENCE_APP_NAMES = (
    "attention",
    "attention_full",
    "transformer_layer",
    "llama_token",
    "cartpole",
    "cartpole_random",
    "cartpole_policy",
    "pendulum",
    "pendulum_policy",
    *(f"{cell}_{width}" for cell in ("lstm", "gru") for width in (16, 64, 256)),
)
# Of libraries that may not be installed: measured one by one, not with ``run --all``.
LIBRARY_APP_NAMES = (
    "jraph_graph_network",
    "jraph_interaction_network",
    "jraph_gat",
    "jraph_graph_convolution",
    "haiku_message_passing",
    "nnx_message_passing",
    "equinox_message_passing",
    "nnx_transformer",
    "linen_transformer",
    "equinox_transformer",
    "jax_attention",
    "nnx_lstm",
    "linen_gru",
    "equinox_gru",
    "diffrax_ode",
    "gymnax_cartpole",
    "gymnax_pendulum",
    "optax_in_a_loop",
)
# Attention at the sizes of FlashAttention-3's paper, by the size of a head: ``scripts/gpu_check.sh`` measures it on GPUs.
ATTENTION_NAMES = tuple(
    f"attention_{dim}_{mask}{gradient}" for gradient in ("", "_gradient") for dim in (128, 64) for mask in ("causal", "full")
)
APP_NAMES = (*ROW_APP_NAMES, *GRAPH_APP_NAMES, *SEQUENCE_APP_NAMES, *LIBRARY_APP_NAMES)
DTYPE_NAMES = ("f32", "bf16")
MODE_NAMES = ("infer", "train")


def case_key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[k] for k in _KEY)


def order(record: dict[str, Any]) -> tuple[Any, ...]:
    return (
        record["platform"],
        (*APP_NAMES, *ATTENTION_NAMES).index(record["app"]),
        record["mode"],
        record["rows"],
        DTYPE_NAMES.index(record["dtype"]),
    )


def save(record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Add ``record`` to today's file of this machine; an earlier record of the same case and day is replaced."""
    machine = describe_machine()
    slug = machine_slug(machine)
    path = (folder / slug if "gpu" in machine else folder) / f"{slug}-{today()}.json"
    record = {**record, **describe_commit(), "versions": describe_software()}
    records = load(path)["cases"] if path.exists() else []
    records = [r for r in records if case_key(r) != case_key(record)] + [record]
    content = {"format": FORMAT, "machine": machine, "date": today(), "cases": sorted(records, key=order)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
    return path


def load(path: Path) -> dict[str, Any]:
    """One file. Raises ``ValueError`` when it is of another format."""
    content = json.loads(path.read_text())
    if content.get("format") != FORMAT:
        raise ValueError(f"{path.name} has format {content.get('format')!r}, not {FORMAT}")
    return dict(content)


def files(folder: Path) -> list[Path]:
    # ``benchmarks.grid``, ``offchip``, ``lower`` and ``devices`` keep their records in the same folder.
    found = (*folder.glob("*.json"), *folder.glob("*/*.json"))
    return [path for path in found if not path.name.startswith(("grid-", "offchip-", "lower-", "devices-"))]


def measured_plans(folder: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """The planner's candidates that were measured, newest last: ``arrangement``, ``lanes``, ``stages``, and the seconds
    ``modelled`` and measured, by application."""
    found: dict[str, list[dict[str, Any]]] = {}
    for content in sorted(map(load, files(folder)), key=lambda c: c["date"]):
        found |= content.get("plans", {})
    return found


def newest(folder: Path = RESULTS) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(machine, records) for every machine that has files; of records of one case the newest, ordered by case."""
    machines: dict[str, tuple[dict[str, Any], dict[tuple[Any, ...], dict[str, Any]]]] = {}
    for content in sorted(map(load, files(folder)), key=lambda c: c["date"]):
        slug = machine_slug(content["machine"])
        records = machines[slug][1] if slug in machines else {}
        records.update({case_key(r): {**r, "date": content["date"]} for r in content["cases"]})
        machines[slug] = (content["machine"], records)
    return [(machine, sorted(records.values(), key=order)) for _, (machine, records) in sorted(machines.items())]
