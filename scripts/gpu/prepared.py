"""What ``scripts/gpu_check.sh --prepare`` made on another machine: the extension and the compiled kernels, in ``.gpu-check``.

Comes in: that folder, the versions here. Goes out: the extension where Python looks for it, the kernels in a cache; and in words
whatever is not as it was prepared for. ``python -m scripts.gpu.prepared`` tells as JSON what this machine has. Standard library
only, but for that.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.gpu import results
from scripts.gpu.results import ROOT

FOLDER = ROOT / ".gpu-check"
KERNELS = "kernels.tar.xz"
NATIVE = ("cpu/src", "cpu/include", "cuda/src")  # what the extension is built from


def about() -> dict[str, Any] | None:
    return results.read_json(FOLDER / "about.json")


def driver(device: str) -> Path | None:
    """The file of what the driver was taken to say of ``device`` ("h200")."""
    path = FOLDER / f"driver.{device}.json"
    return path if path.exists() else None


def commit() -> str:
    """Of this checkout, or of what was prepared where it has no git folder."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return str((about() or {}).get("commit", ""))


def version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "missing"


def install(cache: Path) -> tuple[bool, list[str]]:
    """Whether the extension came along, and what is to be told."""
    told = about()
    if told is None:
        return False, ["nothing was prepared (scripts/gpu_check.sh --prepare): kernels are compiled on this machine"]
    here = {
        "Python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "jaxlib": version("jaxlib"),
        "the C++ sources": results.fingerprint(NATIVE),
    }
    notes = [
        f"prepared for {name} {told['extension'][name]}, but this is {value}: build the extension here (pip install -e .)"
        for name, value in here.items()
        if told["extension"][name] != value
    ]
    used = not notes
    if told["sources"] != results.fingerprint():
        notes.append("the sources changed after they were prepared: kernels that differ are compiled on this machine")
    try:
        kernels = unpack(cache / "cuda")
        if used:
            for built in (FOLDER / "extension").glob("*.so"):
                new = ROOT / "kitsune_jax" / f"{built.name}.new"
                shutil.copy(built, new)
                new.replace(new.with_suffix(""))  # a process may have the old one open
    except (OSError, tarfile.TarError) as error:
        return False, [*notes, f"WRONG: what was prepared could not be copied ({error})"]
    commit = f", commit {told['commit']}{' with changes' if told['modified'] else ''}" if told["commit"] else ""
    return used, [*notes, f"prepared: {kernels} kernels for {', '.join(told['models'])}, NVRTC {told['nvrtc']}{commit}"]


def unpack(folder: Path) -> int:
    """The kernels as files that only this user can write, as the cache asks for; how many there are."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    count = 0
    with tarfile.open(FOLDER / KERNELS) as tar:
        for entry in tar:
            source = tar.extractfile(entry) if entry.isfile() else None
            if source is None or "/" in entry.name or not entry.name.endswith(".cubin"):
                continue
            path = folder / entry.name
            if not path.exists():
                temporary = path.with_suffix(".tmp")
                temporary.write_bytes(source.read())
                temporary.chmod(0o600)
                temporary.replace(path)
            count += 1
    return count


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


def devices_of(here: dict[str, Any]) -> list[dict[str, Any]]:
    """The devices of ``here()``."""
    driver = here.get("driver")
    return driver["devices"] if isinstance(driver, dict) else []


def device_of(here: dict[str, Any]) -> str:
    """The device that was prepared for which is the one here, by its name; "" for none."""
    name = next((of["name"].lower() for of in devices_of(here)), "")
    return next((device for device in (about() or {}).get("models", {}) if device in name), "")


def here() -> dict[str, Any]:
    """Versions and what the driver says of the device; ``fits``: plans here are those that were prepared."""
    from kitsune_jax.targets.cuda import runtime

    found = {
        "driver": runtime.driver_info(),
        "extension": runtime.why_not() or "built",
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        **surroundings(),
    }
    told = about()
    if told is not None:
        found["fits"] = told["models"].get(device_of(found)) == found["model"] and all(
            told[key] == found[key] for key in ("nvrtc", "headers", "package")
        )
    return found


if __name__ == "__main__":
    print(json.dumps(here()))
