"""Targets: what executes plans. One folder per family; the rest of the package asks a ``Target``, which it gets by its name.

A target is a *platform* of JAX ("cpu", "cuda") or "emulator": CUDA kernels, planned for a GPU, compiled for and run on the host.
To add one, make its folder with an object of ``base.Target``, and name that object in ``_OBJECTS``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from kitsune_jax.errors import CannotLower, InvalidProgram

if TYPE_CHECKING:
    from kitsune_jax.targets.base import Target

__all__ = ["INSTEAD", "PLATFORMS", "CannotLower", "InvalidProgram", "get"]

# The module and the object of each target. A target is imported when it is first asked for.
_OBJECTS = {
    "cpu": ("kitsune_jax.targets.cpu.target", "CPU"),
    "cuda": ("kitsune_jax.targets.cuda.target", "CUDA"),
    "emulator": ("kitsune_jax.targets.cuda.target", "EMULATOR"),
}
# Targets that are asked for by name, and the platform of JAX on which they then take the place of its own target.
INSTEAD = {"emulator": "cpu"}
PLATFORMS = tuple(name for name in _OBJECTS if name not in INSTEAD)


def get(name: str) -> Target[Any, Any, Any]:
    """The target called ``name``. Raises ``ValueError`` for one that there is not.

    >>> get("emulator").platform
    'cuda'
    """
    if name not in _OBJECTS:
        raise ValueError(f"no target executes regions on {name!r}; there is one for: {', '.join(_OBJECTS)}")
    module, attribute = _OBJECTS[name]
    return cast("Target[Any, Any, Any]", getattr(importlib.import_module(module), attribute))
