"""``python -m kitsune_jax doctor``: the working and the broken parts of this installation, with advice for the broken ones.

Comes in: this process's environment, packages, caches and devices. Goes out: facts as plain data, with a list of problems and
advice for each. Invariant: it measures and compiles nothing, and changes no file.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import jax
import jaxlib
import numpy as np

from kitsune_jax import config, targets
from kitsune_jax.cli import folder
from kitsune_jax.cli.output import Table
from kitsune_jax.frontend import explain as preview
from kitsune_jax.report.data import byte_text
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cpu.profile import measure, store
from kitsune_jax.targets.cpu.profile import profile as profiles
from kitsune_jax.targets.cuda import nvrtc, runtime

_REPAIR = "pip install --force-reinstall --no-deps --no-cache-dir kitsune_jax"
_MEASURE = "python -m kitsune_jax machine measures it now"


def facts() -> dict[str, Any]:
    """The state of the installation by topic, as data for JSON. ``problems``: each with ``advice``; ``broken``: something does not
    work because of it."""
    variables = environment()
    with config.without_wrong_values() as wrong:
        found = {**_facts(), "environment": variables}
        problems = _problems(found)
    broken = [{"problem": text, "advice": f"correct {name}, or unset it", "broken": True} for name, text in wrong.items()]
    return {**found, "problems": [*broken, *problems]}


def _facts() -> dict[str, Any]:
    return {
        "versions": versions(),
        "jax": _jax(),
        "targets": {name: targets.get(name).why_not() for name in ("cpu", "cuda", "emulator")},  # "" where it works
        "cpu": {
            "processor": profiles.model_name(),
            "kernels": call.isa(),
            "available": list(call.isas()),
            "threads": config.num_threads(),
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "profile": _profile(),
        "gpu": _gpu(),
        "cache": {**folder.sizes(), "why_not": folder.why_unusable()},
    }


def versions() -> dict[str, str]:
    """The versions of this package, of the packages it needs, and of the system; nothing that names this machine or its user."""
    return {
        "kitsune_jax": config.__version__,
        "Python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def environment() -> dict[str, str]:
    return config.variables_beginning_with("KITSUNE_", "XLA_FLAGS", "JAX_")


def _jax() -> dict[str, Any]:
    try:
        kinds = [f"{d.platform}: {d.device_kind}" for d in jax.devices()]
        backend, error = jax.default_backend(), ""
    except RuntimeError as why:  # JAX_PLATFORMS names one that does not start
        kinds, backend, error = [], "", str(why)
    return {"why_not": preview.why_jax_is_unsupported() if backend else error, "backend": backend, "devices": kinds}


def _profile() -> dict[str, Any]:
    """The machine profile that CPU plans are made with. ``source``: "shipped", "measured", or "none" so far."""
    workers = config.num_threads()
    if name := config.profile():
        name = name if "-" in name else f"{name}-{workers}"
        try:
            return {"source": "shipped", "name": profiles.shipped(name).name}
        except ValueError as error:
            return {"source": "none", "why_not": str(error)}
    if call.extension() is None:
        return {"source": "shipped", "name": store.shipped_name(workers)}
    kept = store.on_disk(workers)
    if kept is None or not kept.numbers:
        return {"source": "none", "name": ""}
    return {
        "source": "measured",
        "name": kept.name,
        "measured_at": kept.measured_at,
        "numbers": len(kept.numbers),
        "possible": len(measure.keys(workers)),
        "doubtful": len(kept.doubtful),
    }


def _gpu() -> dict[str, Any]:
    info = runtime.driver_info()
    why = nvrtc.why_not()
    return {
        "driver": info if isinstance(info, str) else f"CUDA {info['version'] // 1000}.{info['version'] % 1000 // 10}",
        "devices": [
            {"name": d.name, "capability": d.capability / 10, "multiprocessors": d.sizes.multiprocessors}
            for d in runtime.devices_here()
        ],
        "nvrtc": "{}.{}".format(*nvrtc.version()) if why is None else "",
        "nvrtc_why_not": why or "",
    }


# --- What to do -------------------------------------------------------------------------------------------------------------------


def _problems(found: dict[str, Any]) -> list[dict[str, Any]]:
    problems: list[dict[str, Any]] = []

    def add(problem: str, advice: str, broken: bool) -> None:
        problems.append({"problem": problem, "advice": advice, "broken": broken})

    if why := found["jax"]["why_not"]:
        add(f"JAX does not fit or does not start: {why}", f"install a JAX from {preview.SUPPORTED}, or correct JAX_PLATFORMS", True)
    if why := found["targets"]["cpu"]:
        add(f"no pipelines on the CPU: {why}", _REPAIR, True)
    here = found["gpu"]["devices"]
    if here and (why := found["targets"]["cuda"]):
        add(f"no pipelines on the GPU: {why}", _REPAIR if runtime.why_not() else "pip install 'kitsune_jax[cuda13]'", True)
    if here and found["jax"]["backend"] == "cpu":
        add("there is a GPU, but JAX runs on the CPU", "pip install 'jax[cuda13]', and see that JAX_PLATFORMS is not cpu", False)
    if why := found["cache"]["why_not"]:
        add(
            f"nothing can be kept on disk, so every process compiles and measures again: {why}",
            "set KITSUNE_CACHE_DIR to a folder that you can write and other users cannot",
            True,
        )
    if why := found["profile"].get("why_not"):
        add(f"KITSUNE_PROFILE names no machine profile: {why}", "correct it, or unset it to measure this machine", True)
    for name, hint in config.unknown_variables().items():
        add(f"the environment variable {name} has no effect", hint, False)
    if config.disabled():
        add("KITSUNE_DISABLE is set, so nothing is pipelined", "unset it", False)
    load, threads = found["cpu"]["load"], found["cpu"]["threads"]
    if found["profile"]["source"] == "none" and load is not None and load > 0.5 * threads:
        add(
            f"this machine is not measured yet, and other programs run on it (load {load:.1f})",
            f"wait until they are done: numbers that they disturb are not kept. Then {_MEASURE}",
            False,
        )
    return problems


# --- For a person -----------------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> list[Table]:
    cpu, gpu, cache = found["cpu"], found["gpu"], found["cache"]
    works = [(name, f"no: {why}" if why else "yes") for name, why in found["targets"].items()]
    if not gpu["devices"]:
        compiles = ("cuda", "kernels can be compiled, and there is no GPU to run them")
        works = [compiles if row == ("cuda", "yes") else row for row in works]
    devices = [(d["name"], f"compute capability {d['capability']}, {d['multiprocessors']} multiprocessors") for d in gpu["devices"]]
    size = sum(kind["bytes"] for kind in cache["kinds"].values())
    rows = [
        ("JAX runs on", f"{found['jax']['backend'] or 'nothing'} ({', '.join(found['jax']['devices'])})"),
        ("processor", cpu["processor"]),
        ("instruction set", f"{cpu['kernels']} (available: {', '.join(cpu['available']) or 'none'}); {cpu['threads']} threads"),
        ("machine profile", _profile_text(found["profile"])),
        ("GPU driver", gpu["driver"]),
        *devices,
        ("NVRTC", gpu["nvrtc"] or f"no: {gpu['nvrtc_why_not']}"),
        ("cache", f"{cache['folder'] or 'none'}, {byte_text(size)}"),
    ]
    problems = [(f"{'BROKEN' if p['broken'] else 'note'}: {p['problem']}", p["advice"]) for p in found["problems"]]
    return [
        Table("versions", list(found["versions"].items())),
        Table("pipelines can run on", works),
        Table("this machine", rows),
        Table("environment variables", list(found["environment"].items())),
        Table("problems", [row for p in problems for row in ((p[0],), (f"  to do: {p[1]}",))] or [("none",)]),
    ]


def _profile_text(profile: dict[str, Any]) -> str:
    if profile["source"] == "shipped":
        return f"{profile['name']}, shipped"
    if profile["source"] == "none":
        return f"not measured yet: the first function measures what it needs; {_MEASURE}"
    when = (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(profile["measured_at"])) if profile["measured_at"] else "at an unknown time"
    )
    load = f"{profile['doubtful']} of them doubtful, as other programs ran" if profile["doubtful"] else "none of them under load"
    return f"{profile['name']}, measured {when}: {profile['numbers']} of {profile['possible']} numbers so far, {load}"
