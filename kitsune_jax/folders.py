"""Folders and files that only this user can write, so that native code may be loaded from them.

Comes in: a path. Goes out: a descriptor of its folder, and bytes of its files. Invariants: what is read belongs to this user, and
nobody else can write it or the folder it lies in; the check is made on the open folder and the open file that are read, not on
their names, so it holds whoever can rename the folders above; and symbolic links are followed to the folder, never to a file.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Untrusted", "opened", "private_file", "read", "replace", "scratch"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH  # an access control list that lets others write shows as the group's bit, too


class Untrusted(OSError):
    """A folder or file that somebody else owns or can write. ``strerror`` says so in words."""


def _check(descriptor: int, what: str) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise Untrusted(errno.EPERM, f"{what} belongs to user {status.st_uid}, not to user {os.geteuid()}, who runs this process")
    if status.st_mode & _OTHERS_WRITE:
        raise Untrusted(errno.EPERM, f"other users can write {what}; chmod go-w would forbid it")


@contextlib.contextmanager
def opened(path: Path, *, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder ``path``, made if ``create``. Raises ``Untrusted``, ``OSError`` where there is none."""
    if create:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(descriptor, "the folder")
        yield descriptor
    finally:
        os.close(descriptor)


def read(folder: int, name: str) -> bytes:
    """The file ``name`` of an open folder, which is marked as used now. Raises ``Untrusted``, ``OSError`` where there is none."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        _check(descriptor, name)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Untrusted(errno.EPERM, f"{name} is not a file")
        content = file.read()
        with contextlib.suppress(OSError):  # a folder that can only be read is a good cache all the same
            os.utime(descriptor)  # access times are often switched off
        return content


def replace(folder: int, name: str, content: bytes) -> None:
    """Put ``content`` at ``name`` in one step: a reader sees the old file or all of the new one."""
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


@functools.cache
def scratch(instead_of: Path | None = None) -> Path:
    """A folder of this process alone, removed when it ends; one for each folder that it stands for.

    Raises ``OSError`` where none can be made.
    """
    folder = Path(tempfile.mkdtemp(prefix="kitsune_jax-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def private_file(content: bytes, suffix: str) -> Path:
    """A file in ``scratch()``, the same for equal contents: for what opens files by their names, as ``dlopen`` does."""
    path = scratch() / f"{hashlib.sha256(content).hexdigest()}{suffix}"
    if not path.exists():
        with opened(scratch()) as folder:
            replace(folder, path.name, content)
    return path
