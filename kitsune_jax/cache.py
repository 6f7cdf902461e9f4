"""Compiled kernels and machine profiles on disk, so that each is made once per machine and not once per process.

Comes in: a key over everything that specialises an artefact (``key``), and a function that makes it. Goes out: its bytes, or a
file that holds them. Invariants: an entry is complete and unchanged or it is made again, because it ends in a digest of itself;
an entry is made by one thread of one process while the others wait for it; nothing is read from or written to a folder that
somebody else owns or can write (``folders``); no failure of the disk is a failure of the caller, as long as the artefact can be
made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kitsune_jax import config, folders
from kitsune_jax.folders import Untrusted

__all__ = ["Cache", "default", "key", "seal", "unseal"]

LIMIT_BYTES = 512 << 20
_MAGIC = b"KJcache1"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size
_ABANDONED_S = 3600.0  # no compile takes this long: an older temporary file was left behind by a process that died


def key(**parts: str | bytes) -> str:
    """A hash over named parts. Equal only if every name and every part is equal; the order of the names does not matter.

    Example::

        key(source=text, compiler="nvrtc 13.0", arch="sm_90a")
    """
    digest = hashlib.sha256()
    for name, part in sorted(parts.items()):
        content = part.encode() if isinstance(part, str) else part
        digest.update(f"{name}\0{len(content)}\0".encode())  # lengths, so that no two lists of parts run together
        digest.update(content)
    return digest.hexdigest()


def seal(content: bytes) -> bytes:
    """``content`` with its digest behind it."""
    return content + _MAGIC + hashlib.sha256(content).digest()


def unseal(sealed: bytes) -> bytes | None:
    """What ``seal`` was given, or ``None`` if ``sealed`` is not what it returned."""
    content, trailer = sealed[:-_TRAILER], sealed[-_TRAILER:]
    return content if trailer == _MAGIC + hashlib.sha256(content).digest() else None


@dataclass(frozen=True)
class Cache:
    """The entries in one folder, which need not exist; ``None``: there is no place for one, entries live as long as this process.

    Past ``limit_bytes`` the entries unused for longest are removed. ``what`` the entries are and how they are ``made``, for the
    warning where none can be kept.
    """

    folder: Path | None
    limit_bytes: int = LIMIT_BYTES
    what: str = "compiled kernels"
    made: str = "compiled"

    def get(self, key: str, suffix: str, make: Callable[[], bytes]) -> bytes:
        """The entry of ``key``; ``make()`` is called, once among all threads and processes, where there is none.

        ``make`` may raise, and must not ask for the same entry.
        """
        name = key + suffix
        found = self._read(name)
        if found is not None:
            return found
        with self._only_one(name):
            found = self._read(name)
            if found is not None:
                return found
            content = make()
            self._store(name, seal(content))
            return content

    def put(self, key: str, suffix: str, content: bytes) -> bytes:
        """Make ``content`` the entry of ``key``, whatever it was; returns it."""
        with self._only_one(key + suffix):
            self._store(key + suffix, seal(content))
        return content

    def get_file(self, key: str, suffix: str, make: Callable[[], bytes]) -> Path:
        """As ``get``, but a file of this process with the entry. Raises ``OSError`` if none can be written."""
        return folders.private_file(self.get(key, suffix, make), suffix)

    def keep(self, name: str, text: str) -> Path | None:
        """Write ``text`` for a person to read, where the limit applies to it as well; ``None`` if it cannot be written."""
        return self._store(name, text.encode())

    def _read(self, name: str) -> bytes | None:
        if self.folder is not None:
            try:
                with folders.opened(self.folder) as folder:
                    return unseal(folders.read(folder, name))
            except Untrusted as error:
                self._warn_once(error)
            except OSError:
                pass
        if self.folder in _unusable:
            with contextlib.suppress(OSError), folders.opened(folders.scratch(self.folder)) as folder:
                return unseal(folders.read(folder, name))
        return None

    def _store(self, name: str, content: bytes) -> Path | None:
        if self.folder is not None:
            try:
                with folders.opened(self.folder, create=True) as folder:
                    folders.replace(folder, name, content)
                    with contextlib.suppress(OSError):  # somebody may be removing the whole folder
                        self._evict(folder, spare=name)
                return self.folder / name
            except OSError as error:
                self._warn_once(error)
        else:
            self._warn_once(OSError(errno.ENOENT, "this user has no home folder"))
        with contextlib.suppress(OSError), folders.opened(folders.scratch(self.folder)) as folder:
            folders.replace(folder, name, content)
            return folders.scratch(self.folder) / name
        return None

    def _warn_once(self, error: OSError) -> None:
        if self.folder in _unusable:
            return
        _unusable.add(self.folder)
        where = "" if self.folder is None else f" in {self.folder}"
        warnings.warn(
            f"kitsune_jax cannot keep {self.what}{where} ({error.strerror}): they are {self.made} again in every process. "
            "Set KITSUNE_CACHE_DIR to a folder that this user can write, and nobody else.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _evict(self, folder: int, spare: str) -> None:
        """Remove the entries unused for longest until the rest fits, never ``spare``; and what dead processes left."""
        files = []
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # another process may have removed it
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if name.endswith(".tmp") and status.st_mtime < time.time() - _ABANDONED_S:
                    os.unlink(name, dir_fd=folder)
                elif not name.endswith((".tmp", ".lock")):
                    files.append((status.st_mtime_ns, status.st_size, name))
        total = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if total <= self.limit_bytes:
                return
            if name != spare:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                    total -= size

    @contextlib.contextmanager
    def _only_one(self, name: str) -> Iterator[None]:
        """Hold the lock of ``name`` against threads and, where the file system can lock, against processes."""
        with _thread_lock((self.folder, name)), contextlib.ExitStack() as stack:
            # Without it several processes may make the same entry; the rename keeps each whole.
            with contextlib.suppress(OSError):
                if self.folder is not None:
                    folder = stack.enter_context(folders.opened(self.folder, create=True))
                    stack.enter_context(_process_lock(folder, f"{name}.lock"))
            yield


def default() -> Cache:
    """The cache of compiled device code, in the folder that ``KITSUNE_CACHE_DIR`` chooses."""
    folder = config.cache_dir()
    return Cache(None if folder is None else folder.absolute() / "cuda")


class _ThreadLock:
    """A lock that can be referred to weakly, so that those of keys no thread waits for disappear."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_thread_locks: weakref.WeakValueDictionary[tuple[Path | None, str], _ThreadLock] = weakref.WeakValueDictionary()
_thread_locks_guard = threading.Lock()


@contextlib.contextmanager
def _thread_lock(key: tuple[Path | None, str]) -> Iterator[None]:
    with _thread_locks_guard:
        entry = _thread_locks.setdefault(key, _ThreadLock())
    with entry.lock:
        yield


@contextlib.contextmanager
def _process_lock(folder: int, name: str) -> Iterator[None]:
    """Hold ``flock`` on a file of an open folder, which exists only meanwhile. Raises ``OSError`` where nothing can be locked."""
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The one before removed the file before it let go: then this lock is on a file that nobody else will find.
            current = _inode(folder, name) == (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino)
        except BaseException:
            os.close(descriptor)
            raise
        if current:
            break
        os.close(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        os.close(descriptor)


def _inode(folder: int, name: str) -> tuple[int, int] | None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


_unusable: set[Path | None] = set()
