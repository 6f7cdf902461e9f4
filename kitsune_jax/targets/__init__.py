"""Targets run plans on devices; each has a folder, and ``get`` returns its ``base.Target`` by name.

A target is a *platform* of JAX ("cpu", "cuda") or "emulator", which compiles CUDA kernels planned for a GPU for the host.
To add a target, make a folder with a ``base.Target`` object and name that object in ``_OBJECTS``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from kitsune_jax.errors import CannotLower, InvalidProgram

if TYPE_CHECKING:
    from kitsune_jax.targets.base import Target

__all__ = ["INSTEAD", "PLATFORMS", "CannotLower", "InvalidProgram", "get"]

# The module and the object of each target, imported by the first ``get``.
_OBJECTS = {
    "cpu": ("kitsune_jax.targets.cpu.target", "CPU"),
    "cuda": ("kitsune_jax.targets.cuda.target", "CUDA"),
    "emulator": ("kitsune_jax.targets.cuda.target", "EMULATOR"),
}
# Targets that run only where a user names them, and the JAX platform whose own target they then replace.
INSTEAD = {"emulator": "cpu"}
PLATFORMS = tuple(name for name in _OBJECTS if name not in INSTEAD)


def get(name: str) -> Target[Any, Any, Any]:
    """The target called ``name``. Raises ``ValueError`` for any other name.

    >>> get("emulator").platform
    'cuda'
    """
    if name not in _OBJECTS:
        raise ValueError(f"no target executes regions on {name!r}; there is one for: {', '.join(_OBJECTS)}")
    module, attribute = _OBJECTS[name]
    return cast("Target[Any, Any, Any]", getattr(importlib.import_module(module), attribute))
