"""The cache on disk: files that only this user can write, and artefacts (compiled kernels, machine profiles) kept under a key.

Comes in: a key over everything that specialises an artefact (``key``), and a function that makes it. Goes out: its bytes, or a file
of them. Invariants, because native code is loaded from these folders:
* A file is read only if it and its folder belong to this user and nobody else can write them. The check is made on the open folder
  and the open file, not on their names, so renaming a folder above does not defeat it. Links to folders are followed, to files not.
* Every entry ends in a digest of itself: an incomplete or changed entry is made again. One thread of one process makes an entry
  while the others wait for it.
* A failure of the disk never fails the caller, as long as the artefact can be made.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kitsune_jax import config
from kitsune_jax.errors import CacheWarning

# --- folders and files that only this user can write ------------------------------------------------------------------------------

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
def opened_folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder ``path``, made if ``create``. Raises ``Untrusted``; ``OSError`` if there is no such folder."""
    if create:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(descriptor, "the folder")
        yield descriptor
    finally:
        os.close(descriptor)


def read_private_file(folder: int, name: str) -> bytes:
    """The content of the file ``name`` of an open folder. Raises ``Untrusted``; ``OSError`` if there is no such file."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        _check(descriptor, name)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Untrusted(errno.EPERM, f"{name} is not a file")
        content = file.read()
        with contextlib.suppress(OSError):  # a cache that can only be read works as well
            os.utime(descriptor)  # marks the file as used now: access times are often switched off
        return content


def replace_file(folder: int, name: str, content: bytes) -> None:
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
def scratch_folder(instead_of: Path | None = None) -> Path:
    """A folder of this process alone, removed when the process ends; one for each folder that it replaces.

    Raises ``OSError`` where none can be made.
    """
    folder = Path(tempfile.mkdtemp(prefix="kitsune_jax-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def private_file(content: bytes, suffix: str) -> Path:
    """A file in ``scratch_folder()``, the same for equal contents, for readers that need a file's name, such as ``dlopen``."""
    path = scratch_folder() / f"{hashlib.sha256(content).hexdigest()}{suffix}"
    if not path.exists():
        with opened_folder(scratch_folder()) as folder:
            replace_file(folder, path.name, content)
    return path


# --- artefacts under a key --------------------------------------------------------------------------------------------------------

LIMIT_BYTES = 512 << 20
_MAGIC = b"KJcache1"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size
_ABANDONED_S = 3600.0  # no compilation takes this long: an older temporary file is from a process that died


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
    """``content`` followed by its digest."""
    return content + _MAGIC + hashlib.sha256(content).digest()


def unseal(sealed: bytes) -> bytes | None:
    """The content that ``seal`` was given, or ``None`` if ``sealed`` is not a result of ``seal``."""
    content, trailer = sealed[:-_TRAILER], sealed[-_TRAILER:]
    return content if trailer == _MAGIC + hashlib.sha256(content).digest() else None


@dataclass(frozen=True)
class Cache:
    """The entries in one folder, which need not exist. With the folder ``None`` entries live as long as this process.

    Past ``limit_bytes`` the entries unused for longest are removed. ``what`` (the entries) and ``made`` (how) are words of the
    warning given when no entry can be kept.
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

    def find(self, key: str, suffix: str) -> bytes | None:
        """The entry of ``key``, or ``None`` where there is none."""
        return self._read(key + suffix)

    def put(self, key: str, suffix: str, content: bytes) -> bytes:
        """Make ``content`` the entry of ``key``, replacing any other; returns it."""
        with self._only_one(key + suffix):
            self._store(key + suffix, seal(content))
        return content

    def update(self, key: str, suffix: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace the entry of ``key`` by ``change`` of it, which is called, with ``None`` where there is no entry, while all other
        threads and processes wait. A result of ``None`` leaves the entry alone."""
        with self._only_one(key + suffix):
            content = change(self._read(key + suffix))
            if content is not None:
                self._store(key + suffix, seal(content))

    def get_file(self, key: str, suffix: str, make: Callable[[], bytes]) -> Path:
        """As ``get``, but returns a file of this process with the entry. Raises ``OSError`` if none can be written."""
        return private_file(self.get(key, suffix, make), suffix)

    def keep(self, name: str, text: str) -> Path | None:
        """Write ``text`` for a person to read; it counts towards the limit. ``None`` if it cannot be written."""
        return self._store(name, text.encode())

    def _read(self, name: str) -> bytes | None:
        if self.folder is not None:
            try:
                with opened_folder(self.folder) as folder:
                    return unseal(read_private_file(folder, name))
            except Untrusted as error:
                self._warn_once(error)
            except OSError:
                pass
        if self.folder in _unusable:
            with contextlib.suppress(OSError), opened_folder(scratch_folder(self.folder)) as folder:
                return unseal(read_private_file(folder, name))
        return None

    def _store(self, name: str, content: bytes) -> Path | None:
        if self.folder is not None:
            try:
                with opened_folder(self.folder, create=True) as folder:
                    replace_file(folder, name, content)
                    with contextlib.suppress(OSError):  # somebody may be removing the whole folder
                        self._evict(folder, spare=name)
                return self.folder / name
            except OSError as error:
                self._warn_once(error)
        else:
            self._warn_once(OSError(errno.ENOENT, "this user has no home folder"))
        with contextlib.suppress(OSError), opened_folder(scratch_folder(self.folder)) as folder:
            replace_file(folder, name, content)
            return scratch_folder(self.folder) / name
        return None

    def _warn_once(self, error: OSError) -> None:
        if self.folder in _unusable:
            return
        _unusable.add(self.folder)
        where = "" if self.folder is None else f" in {self.folder}"
        warnings.warn(
            f"kitsune_jax cannot keep {self.what}{where} ({error.strerror}): they are {self.made} again in every process. "
            "Set KITSUNE_CACHE_DIR to a folder that you can write and other users cannot.",
            CacheWarning,
            stacklevel=3,
        )

    def _evict(self, folder: int, spare: str) -> None:
        """Remove the entries unused for longest until the rest fits, never ``spare``; and temporary files of dead processes."""
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
            # On a file system without locks several processes may make the same entry; the rename keeps each whole.
            with contextlib.suppress(OSError):
                if self.folder is not None:
                    folder = stack.enter_context(opened_folder(self.folder, create=True))
                    stack.enter_context(_process_lock(folder, f"{name}.lock"))
            yield


def default() -> Cache:
    """The cache of compiled device code, in the folder that ``KITSUNE_CACHE_DIR`` chooses."""
    folder = config.cache_dir()
    return Cache(None if folder is None else folder.absolute() / "cuda")


# The lock of a key disappears when no thread holds it or waits for it.
_thread_locks: weakref.WeakValueDictionary[tuple[Path | None, str], threading.Lock] = weakref.WeakValueDictionary()
_thread_locks_guard = threading.Lock()


def _thread_lock(key: tuple[Path | None, str]) -> threading.Lock:
    with _thread_locks_guard:
        return _thread_locks.setdefault(key, threading.Lock())


@contextlib.contextmanager
def _process_lock(folder: int, name: str) -> Iterator[None]:
    """Hold ``flock`` on a file of an open folder, removed afterwards. Raises ``OSError`` where nothing can be locked."""
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "rb"):  # closes it, which unlocks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The last holder removes the file before it unlocks. Then this lock is on a file that nobody else will find: try again.
            try:
                current = os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=folder, follow_symlinks=False))
            except FileNotFoundError:
                current = False
            if current:
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)
                return


_unusable: set[Path | None] = set()
