"""What this machine has for the check: versions, the device, tools. Builds nothing.

Comes in: nothing. Goes out: ``environment.json``; a finding per thing that the check needs, wrong where it is missing and no step
that needs it can succeed.
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

from scripts.gpu.record import Record, arguments


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    record = Record("environment", args.output)
    for finding in findings(args.dry_run):
        record.add(finding)
        print(f"{finding['name']}: {finding['found']}")
    return record.finish()


def findings(dry_run: bool) -> list[dict[str, Any]]:
    from kitsune_jax.targets.cuda import nvrtc, runtime

    driver = runtime.driver_info()
    device = not isinstance(driver, str) and bool(driver["devices"])
    found = [
        {"name": "the extension", "ok": runtime.available(), "found": runtime.why_not() or "built"},
        {
            "name": "a CUDA device",
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
