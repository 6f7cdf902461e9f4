"""The cache of compiled kernels: made once, whole or not at all, bounded, and never in the caller's way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from kitsune_jax import cache
from kitsune_jax.cache import Cache


class Maker:
    """Makes ``content`` and counts how often."""

    def __init__(self, content: bytes = b"made") -> None:
        self.content = content
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.content


def never() -> bytes:
    pytest.fail("an entry that is there was made again")


def no_locks(*_: object) -> None:
    """``flock`` on a file system that has none."""
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A folder that nobody can make, not even root: its parent is a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "folder"


# --- keys


@pytest.mark.parametrize(
    "other",
    [
        {"source": "b", "arch": "sm_90a"},
        {"source": "a", "arch": "sm_80"},
        {"source": "a"},
        {"source": "a", "target": "sm_90a"},
        {"source": "a", "arch": "sm_90a", "options": ""},
        {"source": "asm_90a", "arch": ""},
    ],
)
def test_a_key_tells_every_name_and_every_part_apart(other: dict[str, str]) -> None:
    assert cache.key(source="a", arch="sm_90a") != cache.key(**other)


def test_a_key_does_not_depend_on_the_order_of_its_parts() -> None:
    assert cache.key(source="a", arch=b"b") == cache.key(arch="b", source="a")


# --- one entry


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    make = Maker()
    assert Cache(tmp_path / "new" / "folder").get("key", ".so", make) == b"made"
    assert Cache(tmp_path / "new" / "folder").get("key", ".so", never) == b"made"
    assert make.calls == 1


def test_entries_of_other_keys_and_suffixes_are_others(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    store.get("key", ".so", Maker(b"first"))
    assert store.get("other", ".so", Maker(b"second")) == b"second"
    assert store.get("key", ".cubin", Maker(b"third")) == b"third"


def test_threads_that_add_to_an_entry_lose_nothing(tmp_path: Path) -> None:
    store = Cache(tmp_path)

    def add(letter: bytes) -> None:
        store.update("key", ".txt", lambda content: (content or b"") + letter)

    threads = [threading.Thread(target=add, args=(bytes([65 + n]),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.update("key", ".txt", lambda content: None)  # leaves it alone
    assert sorted(store.find("key", ".txt") or b"") == list(range(65, 73))


def test_an_empty_entry_is_an_entry(tmp_path: Path) -> None:
    Cache(tmp_path).get("key", ".so", Maker(b""))
    assert Cache(tmp_path).get("key", ".so", never) == b""


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: bytes([whole[0] ^ 1]) + whole[1:],
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
        lambda whole: whole[1:],
        lambda whole: whole + b"\0",
        lambda whole: b"content",
    ],
    ids=["empty", "a byte short", "half", "first bit", "last bit", "front cut off", "a byte more", "never sealed"],
)
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store = Cache(tmp_path)
    store.get("key", ".so", Maker(b"content"))
    path = tmp_path / "key.so"
    path.write_bytes(damage(path.read_bytes()))
    make = Maker(b"content")
    assert store.get("key", ".so", make) == b"content"
    assert make.calls == 1
    assert store.get("key", ".so", never) == b"content"


def test_a_file_to_be_loaded_is_the_entry_in_a_folder_of_this_process(tmp_path: Path) -> None:
    path = Cache(tmp_path).get_file("key", ".so", Maker(b"content"))
    assert path.read_bytes() == b"content" and path.suffix == ".so"
    assert path.parent != tmp_path and path.parent.stat().st_mode & 0o077 == 0
    assert Cache(tmp_path).get_file("key", ".so", never) == path  # what is loaded already is known by its path


def test_what_fails_to_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Cache(tmp_path).get("key", ".so", fail)
    assert list(tmp_path.iterdir()) == []
    assert Cache(tmp_path).get("key", ".so", Maker()) == b"made"


def test_only_entries_remain_in_the_folder(tmp_path: Path) -> None:
    Cache(tmp_path).get("key", ".so", Maker())
    assert list(tmp_path.iterdir()) == [tmp_path / "key.so"]


def test_nobody_else_may_write_where_code_lies(tmp_path: Path) -> None:
    Cache(tmp_path / "cache").get("key", ".so", Maker())
    assert ((tmp_path / "cache").stat().st_mode | (tmp_path / "cache" / "key.so").stat().st_mode) & 0o022 == 0


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    cache.default().get("key", ".so", Maker())
    assert (tmp_path / "cuda" / "key.so").is_file()


# --- threads and processes


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_threads_wait_for_the_one_that_makes_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    if not locks:
        monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    store, calls, results = Cache(tmp_path), [], []
    start = threading.Barrier(6)

    def make() -> bytes:
        calls.append(1)
        time.sleep(0.05)
        return b"made"

    def work() -> None:
        start.wait()
        results.append(store.get("key", ".so", make))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"made"] * 6
    assert len(calls) == 1


def test_entries_of_different_keys_are_made_at_the_same_time(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def make() -> bytes:
        both.wait(timeout=30)  # broken unless the other one is being made as well
        return b"made"

    results: list[bytes] = []
    threads = [threading.Thread(target=lambda k=k: results.append(Cache(tmp_path).get(k, ".so", make))) for k in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"made"] * 2


def test_a_lock_holds_though_its_file_was_removed_by_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, waits, held, release = cache.fcntl.flock, threading.Event(), threading.Event(), threading.Event()
    inside: list[str] = []

    def announced(descriptor: int, how: int) -> None:
        waits.set()  # the file is open by now
        flock(descriptor, how)

    def work(name: str) -> None:
        with cache.opened_folder(tmp_path) as folder, cache._process_lock(folder, "key.lock"):
            inside.append(name)
            held.set()
            release.wait(timeout=30)
            inside.append(f"{name} leaves")

    second, third = (threading.Thread(target=work, args=[name]) for name in ("second", "third"))
    with cache.opened_folder(tmp_path) as folder, cache._process_lock(folder, "key.lock"):
        monkeypatch.setattr(cache.fcntl, "flock", announced)
        second.start()
        assert waits.wait(timeout=30)
    assert held.wait(timeout=30)
    waits.clear()
    third.start()
    assert waits.wait(timeout=30)
    release.set()
    second.join()
    third.join()
    assert inside == ["second", "second leaves", "third", "third leaves"]


# One interpreter that forks: importing the package four times would take longer than the test.
PROCESSES = """
import os, pathlib, signal, sys, time
from kitsune_jax.cache import Cache

folder, log = (pathlib.Path(name) for name in sys.argv[1:])

def make():
    with log.open("a") as file:
        file.write("made\\n")
    if sys.argv[0] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return b"made"

def child(work):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() == b"made" else 1)
    return pid

def die():
    sys.argv[0] = "die"
    Cache(folder).get("dies", ".so", make)

assert os.WTERMSIG(os.waitpid(child(die), 0)[1]) == signal.SIGKILL
assert Cache(folder).get("dies", ".so", make) == b"made"
log.write_text("")
pids = [child(lambda: Cache(folder).get("key", ".so", make)) for _ in range(4)]
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
"""


def test_processes_wait_for_the_one_that_makes_the_entry_and_not_for_a_dead_one(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", PROCESSES, folder, log], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "made\n"
    assert sorted(path.name for path in folder.iterdir()) == ["dies.so", "key.so"]


# --- disks that fail


def test_without_a_folder_everything_works_for_this_process_with_one_warning(unwritable: Path) -> None:
    store = Cache(unwritable)
    with pytest.warns(RuntimeWarning, match="KITSUNE_CACHE_DIR"):
        assert store.get("key", ".so", Maker()) == b"made"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get("key", ".so", never) == b"made"
        assert store.get_file("other", ".so", Maker(b"content")).read_bytes() == b"content"


def test_the_spare_folder_goes_with_its_process(unwritable: Path) -> None:
    code = "import sys, pathlib; from kitsune_jax.cache import Cache; import warnings; warnings.simplefilter('ignore')\n"
    code += "print(Cache(pathlib.Path(sys.argv[1])).get_file('key', '.so', lambda: b'made'))"
    done = subprocess.run([sys.executable, "-c", code, unwritable], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip().endswith(".so")
    assert not Path(done.stdout.strip()).parent.exists()


def test_a_full_disk_costs_only_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert Cache(tmp_path).get("key", ".so", Maker()) == b"made"
    with pytest.raises(OSError, match="No space left"):
        Cache(tmp_path).get_file("full", ".so", Maker())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_only_be_read_is_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).get("key", ".so", Maker())

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    assert Cache(tmp_path).get("key", ".so", never) == b"made"


def test_a_file_system_without_locks_is_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    Cache(tmp_path).get("key", ".so", Maker())
    assert Cache(tmp_path).get("key", ".so", never) == b"made"


def test_a_folder_that_cannot_be_listed_is_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "listdir", gone)
    assert Cache(tmp_path).get("key", ".so", Maker()) == b"made"


# --- folders that others can write


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def planted(folder: Path, mode: int = 0o755, owner: int | None = None, file_mode: int = 0o644) -> Path:
    """A folder with an entry "key.so" that is complete, so that nothing but its owner and mode can tell that it is another's."""
    folder.mkdir()
    (folder / "key.so").write_bytes(cache.seal(b"planted"))
    (folder / "key.so").chmod(file_mode)
    if owner is not None:
        for path in (folder, folder / "key.so"):
            os.chown(path, owner, -1)
    folder.chmod(mode)
    return folder


def test_an_entry_of_this_user_is_used(tmp_path: Path) -> None:
    assert Cache(planted(tmp_path / "cache")).get("key", ".so", never) == b"planted"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"mode": 0o777}, id="anybody's folder"),
        pytest.param({"mode": 0o1777}, id="a folder like /tmp"),
        pytest.param({"mode": 0o775}, id="a group's folder"),
        pytest.param({"owner": NOBODY}, id="another user's folder", marks=as_root),
    ],
)
def test_a_folder_that_others_can_write_is_not_used_and_told_once(tmp_path: Path, how: dict[str, int]) -> None:
    folder = planted(tmp_path / "cache", **how)
    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    with pytest.warns(RuntimeWarning, match="KITSUNE_CACHE_DIR") as told:
        assert Cache(folder).get("key", ".so", Maker()) == b"made"
        assert Cache(folder).get("key", ".so", never) == b"made"  # from the folder of this process
        assert Cache(folder).get_file("key", ".so", never).read_bytes() == b"made"
    assert len(told) == 1
    assert sorted((path.name, path.read_bytes()) for path in folder.iterdir()) == before, "something was written there"


@pytest.mark.parametrize("how", ["group", "others", pytest.param("owner", marks=as_root), "link", "fifo", "folder"])
def test_an_entry_that_others_can_write_is_made_again(tmp_path: Path, how: str) -> None:
    folder = planted(tmp_path / "cache")
    entry = folder / "key.so"
    if how in ("group", "others"):
        entry.chmod(0o664 if how == "group" else 0o646)
    elif how == "owner":
        os.chown(entry, NOBODY, -1)
    else:
        entry.unlink()
        if how == "link":
            (tmp_path / "elsewhere").write_bytes(cache.seal(b"planted"))
            entry.symlink_to(tmp_path / "elsewhere")
        elif how == "fifo":
            os.mkfifo(entry)
        else:
            entry.mkdir()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert Cache(folder).get("key", ".so", Maker()) == b"made"
    assert len(told) <= 1
    assert Cache(folder).get("key", ".so", never) == b"made"


def test_a_folder_that_is_swapped_after_it_was_opened_is_not_read(tmp_path: Path) -> None:
    folder = planted(tmp_path / "cache")
    with cache.opened_folder(folder) as descriptor:
        folder.rename(tmp_path / "moved")
        (folder).mkdir()
        (folder / "key.so").write_bytes(cache.seal(b"swapped"))
        assert cache.unseal(cache.read_private_file(descriptor, "key.so")) == b"planted"
        cache.replace_file(descriptor, "new.so", b"new")
    assert (tmp_path / "moved" / "new.so").exists() and not (folder / "new.so").exists()


def test_a_link_to_a_folder_of_this_user_is_followed(tmp_path: Path) -> None:
    planted(tmp_path / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert Cache(tmp_path / "link").get("key", ".so", never) == b"planted"


@as_root
def test_another_user_does_not_take_what_root_has_made() -> None:
    """In a process of that user: what it cannot trust it does not load, and what it cannot write it keeps for itself."""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are for root's eyes only
        os.chmod(place, 0o755)
        folder = planted(Path(place) / "cache")
        assert in_a_process_of_nobody(folder) == 0


def in_a_process_of_nobody(folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                taken = [Cache(folder).get("key", ".so", Maker()) for _ in range(2)]
            status = 0 if taken == [b"made"] * 2 and len(told) == 1 else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


HOMELESS = """
import os, pathlib, sys, warnings
for name in ("HOME", "KITSUNE_CACHE_DIR", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
os.environ.update(eval(sys.argv[1]))
import pwd
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody  # as for a container's arbitrary user
from kitsune_jax import config
from kitsune_jax import cache
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    made = []
    for _ in range(2):
        assert cache.default().get("key", ".so", lambda: made.append(1) or b"made") == b"made"
    assert cache.default().get_file("key", ".so", lambda: b"made").read_bytes() == b"made"
print(config.cache_dir(), len(made), [str(w.message) for w in told])
"""


@pytest.mark.parametrize("environment", [{}, {"XDG_CACHE_HOME": "relative"}, {"KITSUNE_CACHE_DIR": "~/kernels"}], ids=str)
def test_a_process_without_a_home_folder_keeps_what_it_makes_with_one_warning(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, repr(environment)], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None 1 ['kitsune_jax cannot keep compiled kernels (this user has no home folder)"), done.stdout
    assert list(tmp_path.iterdir()) == []


# --- size


def made(store: Cache, name: str, size: int) -> Path:
    assert store.folder is not None
    store.get(name, ".so", Maker(bytes(size)))
    return store.folder / f"{name}.so"


def fill(store: Cache, names: str, size: int = 1000) -> dict[str, Path]:
    """Entries used an hour ago and later, in this order."""
    paths = {}
    for age, name in enumerate(names):
        paths[name] = made(store, name, size)
        when = time.time() - 3000 + age
        os.utime(paths[name], (when, when))
    return paths


def test_the_entries_unused_for_longest_are_removed(tmp_path: Path) -> None:
    store = Cache(tmp_path, limit_bytes=3500)
    paths = fill(store, "abc")
    store.get("a", ".so", never)  # from now on "b" is the one unused for longest
    paths["d"] = made(store, "d", 1000)
    assert {name for name, path in paths.items() if path.exists()} == {"a", "c", "d"}


def test_nothing_is_removed_below_the_limit(tmp_path: Path) -> None:
    paths = fill(Cache(tmp_path, limit_bytes=4500), "abcd")
    assert all(path.exists() for path in paths.values())


def test_an_entry_above_the_limit_replaces_all_others(tmp_path: Path) -> None:
    store = Cache(tmp_path, limit_bytes=3500)
    fill(store, "abc")
    big = made(store, "big", 10_000)
    assert list(tmp_path.iterdir()) == [big]


def test_what_is_kept_for_reading_counts_as_well(tmp_path: Path) -> None:
    store = Cache(tmp_path, limit_bytes=3500)
    kept = store.keep("source.cu", "x" * 3000)
    assert kept is not None and kept.read_text() == "x" * 3000
    os.utime(kept, (0, 0))
    fill(store, "a")
    assert not kept.exists()


def test_only_abandoned_temporary_files_and_no_locks_are_removed(tmp_path: Path) -> None:
    old, new, lock = (tmp_path / name for name in ("a.so.x.tmp", "b.so.y.tmp", "c.so.lock"))
    for path in (old, new, lock):
        path.write_bytes(bytes(1000))
    for path in (old, lock):
        os.utime(path, (0, 0))
    Cache(tmp_path, limit_bytes=10).get("key", ".so", Maker())
    assert [path.exists() for path in (old, new, lock)] == [False, True, True]
