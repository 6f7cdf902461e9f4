"""The CUDA compilers whose machine code is tested: the newest, which the environment has, and 13.0, the oldest that
``kitsune_jax[cuda13]`` admits.

Comes in: a compiler's name. Goes out: the folder to hand to ``nvrtc.compile`` or ``compile.cubin``. Invariant: a compiler that is
not there is an error that says what to run, and no test that is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kitsune_jax.targets.cuda import nvrtc

NEWEST, OLDER = "newest", "13.0"
COMPILERS = (NEWEST, OLDER)
_VENV = Path(__file__).resolve().parents[2] / ".venv"  # the Makefile installs it there, for whatever Python runs the tests
_PLACES = (Path(sys.prefix) / "nvrtc-13.0", _VENV / "nvrtc-13.0")


def folder_of(compiler: str) -> Path | None:
    """The folder of one of ``COMPILERS``; ``None`` for the newest, which is found without. Raises ``FileNotFoundError``."""
    if compiler == NEWEST:
        return None
    for place in _PLACES:
        if nvrtc.available(place) and nvrtc.version(place) == (13, 0):
            return place
    raise FileNotFoundError(f"NVRTC 13.0 is not in {_PLACES[0]}: run `make .venv/.nvrtc-13.0`")
