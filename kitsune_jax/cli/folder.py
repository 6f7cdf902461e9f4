"""``python -m kitsune_jax cache``: the folder on disk, its size by kind, and its removal.

Comes in: the cache folder. Goes out: the number and bytes of files of each kind, or the number of removed files. Invariant: only
files of the kinds below are removed, because ``KITSUNE_CACHE_DIR`` may name a folder that holds other things.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from kitsune_jax import config
from kitsune_jax.cache import Untrusted, opened_folder
from kitsune_jax.cli.output import Table
from kitsune_jax.report.data import byte_text

KINDS = {"cuda": "compiled kernels", "profiles": "machine profiles", "choices": "measured choices"}


def sizes() -> dict[str, Any]:
    """``folder`` (``None`` for a user without a home folder), and for each of ``kinds`` its ``files`` and ``bytes``."""
    folder = config.cache_dir()
    kinds = {}
    for kind, what in KINDS.items():
        found = _files(folder, kind)
        kinds[kind] = {"what": what, "files": len(found), "bytes": sum(found.values())}
    return {"folder": None if folder is None else str(folder), "kinds": kinds}


def tables(found: dict[str, Any]) -> list[Table]:
    rows = [(k["what"], str(k["files"]), byte_text(k["bytes"])) for k in found["kinds"].values()]
    title = f"cache: {found['folder'] or 'none, as this user has no home folder'}"
    return [Table(title, rows, ("kind", "files", "size"), right=(1, 2))]


def clear() -> int:
    """Remove the files of all kinds; returns how many were removed. Another process makes again what it needs."""
    folder, removed = config.cache_dir(), 0
    for kind in KINDS:
        for file in _files(folder, kind):
            with contextlib.suppress(OSError):  # another process may have removed it
                file.unlink()
                removed += 1
        if folder is not None:
            with contextlib.suppress(OSError):  # something else is in it
                (folder / kind).rmdir()
    return removed


def _files(folder: Path | None, kind: str) -> dict[Path, int]:
    """The files of a kind, with their bytes. Links are left alone."""
    found = {}
    with contextlib.suppress(OSError):
        for file in (folder / kind).iterdir() if folder is not None else ():
            with contextlib.suppress(OSError):
                status = file.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[file] = status.st_size
    return found


def why_unusable() -> str:
    """Why nothing can be kept in the folder, as a clause; "" where it can, or will be once the folder is made."""
    folder = config.cache_dir()
    if folder is None:
        return "this user has no home folder"
    place = folder.absolute()
    for part in (place, *(place / kind for kind in KINDS)):
        try:
            with opened_folder(part):
                pass
        except Untrusted as error:
            return f"{part}: {error.strerror}"
        except FileNotFoundError:
            pass
        except OSError as error:
            return f"{part}: {error.strerror}"
    there = next(p for p in (place, *place.parents) if p.exists())
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"
