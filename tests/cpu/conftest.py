"""What tests of the CPU target share as fixtures."""

from __future__ import annotations

import pytest

from kitsune_jax.frontend import lowering
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu.lower import lower_program


@pytest.fixture
def programs(monkeypatch):
    """Every CPU program that is lowered."""
    made: list[bc.CpuProgram] = []
    monkeypatch.setattr(
        "kitsune_jax.targets.cpu.lower.lower_program", lambda p, *args: made.append(lower_program(p, *args)) or made[-1]
    )
    lowering._routed.cache_clear()
    return made
