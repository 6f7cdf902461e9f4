"""Compiled kernels on disk, so that each is compiled once per machine and not once per process.

Comes in: a key over everything that specialises an artefact (``key``), and a function that makes it. Goes out: its bytes, or a
file that holds them. Invariants: an entry is complete and unchanged or it is made again, because it ends in a digest of itself;
an entry is made by one thread of one process while the others wait for it; no failure of the disk is a failure of the caller,
as long as the artefact can be made.

The digest stands at the *end* of the file: the loaders of ELF files ignore what follows the last section, so an entry that is a
shared library can be opened where it lies.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kitsune_jax import config

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
    """The entries in one folder, which need not exist. Past ``limit_bytes`` the entries unused for longest are removed."""

    folder: Path
    limit_bytes: int = LIMIT_BYTES

    def get(self, key: str, suffix: str, make: Callable[[], bytes]) -> bytes:
        """The entry of ``key``; ``make()`` is called, once among all threads and processes, where there is none.

        ``make`` may raise, and must not ask for the same entry.
        """
        return self._get(key + suffix, make)[0]

    def get_file(self, key: str, suffix: str, make: Callable[[], bytes]) -> Path:
        """As ``get``, but a file that begins with the entry and ends with its digest. Raises ``OSError`` if none can be written."""
        path = self._get(key + suffix, make)[1]
        if path is None:
            raise OSError(f"neither {self.folder} nor the folder for temporary files can be written; set KITSUNE_CACHE_DIR")
        return path

    def keep(self, name: str, text: str) -> Path | None:
        """Write ``text`` for a person to read, where the limit applies to it as well; ``None`` if it cannot be written."""
        return self._store(name, text.encode())

    def _get(self, name: str, make: Callable[[], bytes]) -> tuple[bytes, Path | None]:
        found = self._read(name)
        if found is not None:
            return found
        with self._only_one(name):
            found = self._read(name)
            if found is not None:
                return found
            content = make()
            return content, self._store(name, seal(content))

    def _read(self, name: str) -> tuple[bytes, Path] | None:
        folders = [self.folder]
        if self.folder in _unwritable:
            with contextlib.suppress(OSError):
                folders.append(_scratch(self.folder))
        for path in (folder / name for folder in folders):
            with contextlib.suppress(OSError):
                content = unseal(path.read_bytes())
                if content is None:
                    continue
                with contextlib.suppress(OSError):  # a folder that can only be read is a good cache all the same
                    os.utime(path)  # the time of last use: access times are often switched off
                return content, path
        return None

    def _store(self, name: str, content: bytes) -> Path | None:
        try:
            path = _replace(self.folder / name, content)
        except OSError as error:
            _warn_once(self.folder, error)
            try:
                return _replace(_scratch(self.folder) / name, content)
            except OSError:
                return None
        with contextlib.suppress(OSError):  # somebody may be removing the whole folder
            self._evict(spare=path)
        return path

    def _evict(self, spare: Path) -> None:
        """Remove the entries unused for longest until the rest fits, never ``spare``; and what dead processes left."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may have removed it
                status = path.stat()
                if path.suffix == ".tmp" and status.st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()
                elif path.suffix not in (".tmp", ".lock"):
                    files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit_bytes:
                return
            if path != spare:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size

    @contextlib.contextmanager
    def _only_one(self, name: str) -> Iterator[None]:
        """Hold the lock of ``name`` against threads and, where the file system can lock, against processes."""
        path = self.folder / f"{name}.lock"
        with _thread_lock(path), contextlib.ExitStack() as stack:
            # Without it several processes may make the same entry; the rename keeps each whole.
            with contextlib.suppress(OSError):
                stack.enter_context(_process_lock(path))
            yield


def default() -> Cache:
    """The cache of compiled device code, in the folder that ``KITSUNE_CACHE_DIR`` chooses."""
    return Cache(config.cache_dir().absolute() / "cuda")


def _replace(path: Path, content: bytes) -> Path:
    """Put ``content`` at ``path`` in one step: a reader sees the old file or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # what lies here will be run: nobody else may write it
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path


class _ThreadLock:
    """A lock that can be referred to weakly, so that those of keys no thread waits for disappear."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_thread_locks: weakref.WeakValueDictionary[Path, _ThreadLock] = weakref.WeakValueDictionary()
_thread_locks_guard = threading.Lock()


@contextlib.contextmanager
def _thread_lock(path: Path) -> Iterator[None]:
    with _thread_locks_guard:
        entry = _thread_locks.setdefault(path, _ThreadLock())
    with entry.lock:
        yield


@contextlib.contextmanager
def _process_lock(path: Path) -> Iterator[None]:
    """Hold ``flock`` on ``path``, which exists only meanwhile. Raises ``OSError`` where the file system cannot lock."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The one before removed the file before it let go: then this lock is on a file that nobody else will find.
            current = _inode(path) == (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino)
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
            path.unlink()
        os.close(descriptor)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


_unwritable: set[Path] = set()


def _warn_once(folder: Path, error: OSError) -> None:
    if folder in _unwritable:
        return
    _unwritable.add(folder)
    warnings.warn(
        f"kitsune_jax cannot keep compiled kernels in {folder} ({error.strerror}): they are compiled again in every process. "
        "Set KITSUNE_CACHE_DIR to a folder that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _scratch(instead_of: Path) -> Path:
    """A folder for what cannot be stored in ``instead_of``; it is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="kitsune_jax-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder
