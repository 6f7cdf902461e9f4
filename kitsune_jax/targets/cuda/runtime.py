"""The CUDA extension as seen from Python: whether it is there, and its registration with XLA.

Comes in: nothing, or the path of the emulator's library. Goes out: ``available()``, ``register()`` and the name of the FFI target.
Invariants: importing this module and calling its functions never fails because of a missing or mismatched extension; registering
opens no CUDA driver, so that a machine without one can lower and export programs for CUDA.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from kitsune_jax import config

TARGET_NAME = "kitsune_cuda"
ENTRY_POINT = "kitsune_region"
LAUNCH_VERSION = 4

_lock = threading.Lock()
_state: tuple[Any, str] | None = None  # (extension or None, why not)
_registered: set[str] = set()
_emulator: ctypes.CDLL | None = None


def _load() -> tuple[Any, str]:
    """The extension module and "", or None and the reason; looked for once.

    No warning, unlike the CPU's: most machines that lack this target never ask for it, and ``why_not()`` is in the report.
    """
    global _state
    if _state is not None:
        return _state
    with _lock:
        if _state is None:
            _state = _find()
        return _state


def _find() -> tuple[Any, str]:
    try:
        extension = importlib.import_module("kitsune_jax._cuda")
        version = extension.launch_version()
    except Exception as error:  # a half-built extension can fail in any way, and none may reach the user's program
        return None, f"the extension kitsune_jax._cuda cannot be imported ({error})"
    if version != LAUNCH_VERSION:
        return (
            None,
            f"the extension reads launch words of version {version}, but this package writes {LAUNCH_VERSION}: different builds",
        )
    return extension, ""


def available() -> bool:
    """Whether kernels can be registered with XLA here. Says nothing about a driver or a device: see ``driver_info()``."""
    return _load()[0] is not None


def why_not() -> str:
    """Why ``available()`` is False, as a clause; "" when it is True."""
    return _load()[1]


def register(platform: Literal["CUDA", "cpu"], emulator: str | os.PathLike[str] | None = None) -> bool:
    """Registers the FFI target ``kitsune_cuda``, once per platform; safe from any thread. Returns ``available()``.

    For "cpu" the calls run in the emulator, whose shared library is ``emulator``: a process has one, and the first call opens it.
    It may also be opened later, by ``use_emulator``. Raises ``RuntimeError`` if it cannot be used.

    >>> from kitsune_jax.targets.cuda import runtime
    >>> runtime.register("CUDA") == runtime.available()
    True
    """
    extension = _load()[0]
    if extension is None:
        return False
    if emulator is not None:
        use_emulator(emulator)
    with _lock:
        if platform not in _registered:
            jax.ffi.register_ffi_target(TARGET_NAME, extension.handlers()[platform.lower()], platform=platform)
            _registered.add(platform)
    return True


def use_emulator(path: str | os.PathLike[str]) -> None:
    """Opens the emulator's shared library for calls on platform "cpu". Raises ``RuntimeError`` if it cannot be used."""
    extension, why = _load()
    if extension is None:
        raise RuntimeError(why)
    extension.use_emulator(os.fspath(path))
    global _emulator
    with _lock:
        if _emulator is None:
            _emulator = ctypes.CDLL(os.fspath(path))  # what the extension has opened, once more
    set_emulator_seed(config.emulator_seed())


def set_emulator_seed(seed: int) -> None:
    """The schedule of every launch from now on. Does nothing before an emulator is in use, or where it has no schedules."""
    if _emulator is not None and hasattr(_emulator, "kitsune_emulator_set_seed"):
        _emulator.kitsune_emulator_set_seed(ctypes.c_uint64(seed))


def emulator() -> ctypes.CDLL:
    """The emulator's library, with the types of the functions by which it counts. Raises ``RuntimeError`` before one is in use."""
    if _emulator is None:
        raise RuntimeError("no emulator is in use: nothing was compiled for it yet")
    _emulator.kitsune_emulator_start_counting.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    _emulator.kitsune_emulator_start_counting.restype = None
    _emulator.kitsune_emulator_stop_counting.restype = ctypes.c_char_p
    return _emulator


def driver_info() -> dict[str, Any] | str:
    """The CUDA driver: ``version`` (12040 is CUDA 12.4) and ``devices``, each with ``compute_capability`` (90 is 9.0),
    ``multiprocessors`` and ``shared_bytes`` (the most a block may have); or one sentence that says what is missing."""
    extension, why = _load()
    return why if extension is None else extension.driver_info()


def check(launch: Sequence[int]) -> str:
    """What the extension finds wrong with launch words, by the code that checks them when XLA makes an executable; "" for valid
    words, and where the extension is missing."""
    extension = _load()[0]
    return "" if extension is None else str(extension.check_launch(np.asarray(launch, np.int64)))


def calls() -> int:
    """Custom calls launched so far in this process; 0 without the extension."""
    extension = _load()[0]
    return 0 if extension is None else int(extension.calls())
