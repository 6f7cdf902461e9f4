"""The results in one small file, renewed while the check goes on: it is what comes back from a machine that is gone.

Comes in: the folder of results. Goes out: a ``.tar.gz``, the summary first. Invariant: the archive at ``path`` is whole at any
moment; where it cannot be written, the one before stays. Standard library only.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path

LONGEST_FILE = 512 << 10  # of a log: its end


def pack(folder: Path, path: Path) -> str:
    """Returns "", or why there is no new archive."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(temporary, "w:gz", compresslevel=6) as tar:
            for file in _files(folder):
                content = file.read_bytes()
                if file.suffix == ".log" and len(content) > LONGEST_FILE:
                    content = b"[the beginning is left out]\n" + content[-LONGEST_FILE:]
                entry = tarfile.TarInfo(f"{folder.name}/{file.relative_to(folder).as_posix()}")
                entry.size, entry.mtime = len(content), int(file.stat().st_mtime)
                tar.addfile(entry, io.BytesIO(content))
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return f"{path} could not be written ({error.strerror})"
    return ""


def unpack(path: Path, folder: Path) -> None:
    """Puts what ``pack`` took from another folder into ``folder``. Raises ``OSError`` or ``tarfile.TarError``."""
    with tarfile.open(path) as tar:
        for entry in tar:
            inside = Path(*Path(entry.name).parts[1:])
            if not entry.isfile() or ".." in inside.parts or inside.is_absolute():
                continue
            source = tar.extractfile(entry)
            assert source is not None
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            (folder / inside).write_bytes(source.read())


def _files(folder: Path) -> list[Path]:
    """The summary, then what the steps found, then the logs."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".tmp" and p.relative_to(folder).parts[0] != "cache"]
    return sorted(found, key=lambda p: (p.name != "summary.md", p.suffix == ".log", p.as_posix()))
