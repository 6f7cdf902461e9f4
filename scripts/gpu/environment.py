"""What this machine has for the check: versions, the device, tools. Builds nothing.

Comes in: nothing. Goes out: ``environment.json``; a finding per thing that the check needs, wrong where it is missing and no step
that needs it can succeed.
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

from scripts.gpu import prepared
from scripts.gpu.record import Record, arguments
from scripts.gpu.results import DEVICE

PREPARED = "what was prepared"


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    record = Record("environment", args.output, patience=args.patience)
    with record.case("looking", 60):
        found = findings(args.dry_run)
        found += [] if args.dry_run else prepared_findings()
    record.content["prepared_fits"] = any(f["name"] == PREPARED and f["ok"] for f in found)
    for finding in found:
        record.add(finding)
        print(f"{finding['name']}: {finding['found']}")
    return record.finish()


def prepared_findings() -> list[dict[str, Any]]:
    """Whether the kernels that came along are those that will be asked for; nothing where none did."""
    told = prepared.about()
    if told is None:
        return []
    here = surroundings()
    differ = [f"{name} {told[name]!r} was prepared, and is {value!r} here" for name, value in here.items() if told[name] != value]
    why = "; ".join(differ)
    return [{"name": PREPARED, "ok": not differ, "found": why or told["model"], **({"error": why} if differ else {})}]


def surroundings() -> dict[str, Any]:
    """What decides, beside the sources, which kernels are made, and under which keys the cache holds them."""
    import kitsune_jax
    from kitsune_jax.targets.cuda import nvrtc, runtime, sources

    return {
        "model": runtime.device_model(),
        "arch": runtime.arch(),
        "nvrtc": "{}.{}".format(*nvrtc.version()) if nvrtc.available() else "missing",
        "headers": sources.fingerprint("include"),
        "package": kitsune_jax.__version__,
    }


def findings(dry_run: bool) -> list[dict[str, Any]]:
    from kitsune_jax.targets.cuda import nvrtc, runtime

    driver = runtime.driver_info()
    device = not isinstance(driver, str) and bool(driver["devices"])
    found = [
        {"name": "the extension", "ok": runtime.available(), "found": runtime.why_not() or "built"},
        {
            "name": DEVICE,
            "ok": device or dry_run,
            "found": driver if isinstance(driver, str) or not device else driver["devices"],
        },
        {"name": "NVRTC", "ok": nvrtc.available(), "found": nvrtc.why_not() or "{}.{}".format(*nvrtc.version())},
        {"name": "JAX", "ok": dry_run or _jax_sees_gpu(), "found": _jax_devices()},
    ]
    found += [{"name": m, "ok": importlib.util.find_spec(m) is not None, "found": _where(m)} for m in ("scipy", "pytest")]
    # Without these a step is left out, with a note.
    found += [
        {"name": t, "ok": True, "found": shutil.which(t) or "not on PATH"} for t in ("compute-sanitizer", "ncu", "nvidia-smi")
    ]
    return found


def _where(module: str) -> str:
    spec = importlib.util.find_spec(module)
    return "missing" if spec is None else str(spec.origin)


def _jax_sees_gpu() -> bool:
    from benchmarks.machine import has_gpu

    return has_gpu()


def _jax_devices() -> str:
    import jax

    return ", ".join(str(d) for d in jax.devices())


if __name__ == "__main__":
    raise SystemExit(main())
