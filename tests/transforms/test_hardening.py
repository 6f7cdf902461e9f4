"""The extensions are built so that a mistake in them is hard to exploit: checked in the files that this process has loaded."""

from __future__ import annotations

import importlib
import struct
import sys
import sysconfig
from pathlib import Path

import pytest

PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
DT_FLAGS, DT_FLAGS_1, DT_TEXTREL = 30, 0x6FFFFFFB, 22
DF_BIND_NOW, DF_1_NOW, PF_X = 8, 1, 1
gil = not sysconfig.get_config_var("Py_GIL_DISABLED")


def segments(elf: bytes) -> dict[int, tuple[int, int, int]]:
    """By type: flags, offset and size of each segment of a 64-bit ELF file."""
    (table,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    found = {}
    for i in range(count):
        kind, flags, offset, _, _, in_file = struct.unpack_from("<IIQQQQ", elf, table + i * size)
        found[kind] = (flags, offset, in_file)
    return found


def dynamic(elf: bytes) -> dict[int, int]:
    _, offset, size = segments(elf)[PT_DYNAMIC]
    return dict(struct.unpack_from("<QQ", elf, offset + at) for at in range(0, size, 16))


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_an_extension_is_hardened(name: str) -> None:
    path = importlib.import_module(f"kitsune_jax.{name}").__file__
    assert path is not None
    elf = Path(path).read_bytes()
    entries = dynamic(elf)
    assert not segments(elf)[PT_GNU_STACK][0] & PF_X, "its stack is executable"
    assert PT_GNU_RELRO in segments(elf), "its tables of functions stay writable"
    assert entries.get(DT_FLAGS, 0) & DF_BIND_NOW or entries.get(DT_FLAGS_1, 0) & DF_1_NOW, "functions are bound when first called"
    assert DT_TEXTREL not in entries
    assert b"\0__stack_chk_fail\0" in elf, "its stack is not guarded"


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_an_extension_runs_on_every_later_python(name: str) -> None:
    path = importlib.import_module(f"kitsune_jax.{name}").__file__
    assert path is not None
    assert path.endswith(".abi3.so" if sys.version_info >= (3, 12) and gil else sysconfig.get_config_var("EXT_SUFFIX")), path
