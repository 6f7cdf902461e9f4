"""What the CUDA extension makes of images and launch words that come from elsewhere, without a driver.

A driver is not told how long an image is, so all that an ELF file names must lie inside of it before one reads it.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
_cuda = pytest.importorskip("kitsune_jax._cuda", reason="the extension is not built: pip install -e .")
CXX = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
WORDS = np.array([6, 900, 132, 384, 2, 1024, 0, 0, 2, 3, 64], np.int64)


def elf(**changes: int) -> bytes:
    """A 64-bit ELF file of one segment and two sections, the second without bytes in the file."""
    f = {"segments": 64, "segment_entry": 56, "segment_count": 1, "segment_at": 0, "segment_bytes": 64 + 56 + 2 * 64}
    f |= {"sections": 120, "section_entry": 64, "section_count": 2, "section_at": 64, "section_bytes": 56, "kind": 1}
    f |= changes
    counts = (64, f["segment_entry"], f["segment_count"], f["section_entry"], f["section_count"], 0)
    header = b"\177ELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQI6H", 3, 190, 1, 0, f["segments"], f["sections"], 0, *counts)
    segment = struct.pack("<IIQQQQQQ", 1, 4, f["segment_at"], 0, 0, f["segment_bytes"], 2**40, 8)
    sections = [(f["kind"], f["section_at"], f["section_bytes"]), (8, 0, 2**40)]
    return header + segment + b"".join(struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, n, 0, 0, 8, 0) for kind, at, n in sections)


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(
    ("image", "message"),
    [
        (elf(), ""),
        (elf(segment_count=0, segments=2**63), "tables end beyond"),
        (elf(sections=121), "tables end beyond"),
        (elf(sections=2**64 - 64), "tables end beyond"),
        (elf(section_count=3), "tables end beyond"),
        (elf(section_entry=63), "tables end beyond"),
        (elf(segment_at=1), "segment 0 ends beyond"),
        (elf(segment_bytes=2**64 - 1, segment_at=2), "segment 0 ends beyond"),
        (elf(section_bytes=185), "section 0 ends beyond"),
        (elf(section_at=2**64 - 8), "section 0 ends beyond"),
        (elf()[:-1], "cut off"),
        (elf()[:63], "cut off"),
        (elf()[:4], "cut off"),
        (b"\177EL", "neither an ELF file nor text|not a shared library"),
        (b"PK\3\4\0\0", "neither an ELF file nor text|not a shared library"),
        (b"", "is empty"),
    ],
)
def test_an_image_is_read_within_its_bounds(image: bytes, message: str, emulated: bool) -> None:
    try:
        _cuda.Kernel(image, WORDS, "mlp", emulated)
        said = ""
    except ValueError as error:
        said = str(error)
    text_on_a_device = image == b"\177EL" and not emulated
    assert bool(said) == (bool(message) and not text_on_a_device), said
    assert text_on_a_device or re.search(message, said)


@pytest.mark.skipif(CXX is None or sys.platform != "linux", reason="needs Linux and a C++ compiler")
def test_altered_words_and_images_are_read_within_their_bounds(tmp_path: pathlib.Path) -> None:
    """A hundred thousand of each, under the sanitizers: refused with a sentence, or within every limit."""
    program, image = tmp_path / "words", tmp_path / "image"
    image.write_bytes(elf())
    flags = ["-std=c++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{ROOT / 'cuda' / 'src'}"]
    sources = [str(ROOT / "cuda" / "src" / "launch_words.cc"), str(ROOT / "cuda" / "tests" / "driver" / "fuzz_words.cc")]
    subprocess.run([str(CXX), *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program), str(image)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
