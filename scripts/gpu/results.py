"""JSON files that a full disk or a kill cannot spoil. Standard library only: the driver of the check needs nothing installed.

Comes in: a path, plain data. Goes out: a file that is whole, the new one or the one before. A write that fails is told, and is no
error of the caller, who has more important things to do than to write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("kitsune_jax", "cuda", "benchmarks", "scripts")
_SUFFIXES = {".py", ".h", ".cc", ".cu", ".cpp", ".sh"}


def fingerprint(rooms: Sequence[str] = _SOURCES) -> str:
    """A hash of the sources, by which a copy without its git folder can be told from a checkout."""
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted(p for p in (ROOT / room).rglob("*") if p.suffix in _SUFFIXES):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def say(text: str) -> None:
    """Prints a line; where it goes may be full or gone."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def write(path: Path, text: str) -> str:
    """Replaces ``path`` by ``text``. Returns "", or why it could not be written; then the file is what it was."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return f"{path.name} could not be written ({error.strerror})"
    return ""


def write_json(path: Path, content: dict[str, Any]) -> str:
    return write(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """``None`` where there is no such file, or it holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
