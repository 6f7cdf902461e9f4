"""What ``scripts/gpu_check.sh --prepare`` made on another machine: the extension and the compiled kernels, in ``.gpu-check``.

Comes in: that folder, the versions here. Goes out: the extension where Python looks for it, the kernels in a cache; and in words
whatever is not as it was prepared for. Standard library only.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.gpu import results

FOLDER = results.ROOT / ".gpu-check"
KERNELS = "kernels.tar.xz"
NATIVE = ("cpu/src", "cpu/include", "cuda/src")  # what the extension is built from


def about() -> dict[str, Any] | None:
    return results.read_json(FOLDER / "about.json")


def version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "missing"


def install(cache: Path) -> tuple[bool, list[str]]:
    """Whether the extension came along, and what is to be told."""
    told = about()
    if told is None:
        return False, [
            "nothing was prepared (scripts/gpu_check.sh --prepare): the extension and the kernels are made on this machine"
        ]
    here = {
        "Python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "jaxlib": version("jaxlib"),
        "the C++ sources": results.fingerprint(NATIVE),
    }
    notes = [
        f"prepared for {name} {told['extension'][name]}, but this is {value}: the extension is built on this machine"
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
                new = results.ROOT / "kitsune_jax" / f"{built.name}.new"
                shutil.copy(built, new)
                new.replace(new.with_suffix(""))  # a process may have the old one open
    except (OSError, tarfile.TarError) as error:
        return False, [*notes, f"WRONG: what was prepared could not be copied ({error})"]
    commit = f", commit {told['commit']}{' with changes' if told['modified'] else ''}" if told["commit"] else ""
    return used, [*notes, f"prepared: {kernels} kernels for {told['model']}, compiled with NVRTC {told['nvrtc']}{commit}"]


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
