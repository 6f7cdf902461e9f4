"""Bugs planted in a header of the device library, which the emulator must find."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import hostcc, sources


@dataclasses.dataclass(frozen=True)
class Bug:
    """``line``, a regular expression, is replaced by ``by``. ``found``: what the emulator says, or "" for a wrong result."""

    line: str
    by: str
    found: str = ""

    def plant(self, header: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """Kernels see a changed header in front of the real one, and stay out of the cache: the header is not in its key."""
        text = (sources.root() / "include" / header).read_text()
        changed, count = re.subn(self.line, self.by, text)
        assert count == 1, f"{self.line} is in {header} {count} times"
        place = folder / header
        place.parent.mkdir(parents=True)
        place.write_text(changed)
        real = sources.include_dirs
        patch.setattr(sources, "include_dirs", lambda part: (folder, *real(part)))
        patch.setattr(compilers, "emulated", hostcc.compile)
