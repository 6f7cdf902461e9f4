"""Settings of every test: the CPU backend with 8 forced devices, no switch inherited from the shell, each warning told again."""

from __future__ import annotations

import os

# Before JAX is imported. Programs on one device are unaffected; the tests of shard_map need several.
os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import pytest


@pytest.fixture(autouse=True)
def _no_inherited_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KITSUNE_DISABLE", "KITSUNE_FORCE", "KITSUNE_STRICT", "KITSUNE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _warnings_are_told_again() -> None:
    from kitsune_jax import lowering

    lowering._warned.clear()


@pytest.fixture(params=[True, False], ids=["forced", "modelled"])
def force(request: pytest.FixtureRequest) -> bool:
    """Both ways: every legal region is pipelined, or only those that the cost model expects to gain."""
    return bool(request.param)
