"""The CPU extension as seen from Python: whether it is there, and its registration with XLA.

Comes in: nothing. Goes out: ``available()``, ``register()`` and the names of the FFI targets. Invariant: importing this module and
calling its functions never fails because of a missing or mismatched extension; that is said once, as a warning, and plain JAX runs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pathlib
import threading
import warnings
from typing import Any

import jax
import numpy as np

from kitsune_jax.targets.cpu import bytecode

TARGET_NAME = "kitsune_cpu"
ORDER_NAME = "kitsune_cpu_order"

_lock = threading.Lock()
_state: tuple[Any, str] | None = None  # (extension or None, why not)


def _load() -> tuple[Any, str]:
    """The extension module, known to XLA, and ""; or None and the reason. Looked for, and warned about, once."""
    global _state
    if _state is not None:
        return _state
    with _lock:
        if _state is None:
            _state = _find()
            if _state[0] is None:
                advice = "pip install --force-reinstall --no-deps --no-cache-dir kitsune_jax"
                warnings.warn(
                    f"kitsune_jax runs without its CPU pipelines: {_state[1]}. Functions run as plain JAX. To repair it: {advice}",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return _state


def _find() -> tuple[Any, str]:
    try:
        extension = importlib.import_module("kitsune_jax._cpu")
        version = extension.format_version()
    except Exception as error:  # a half-built extension can fail in any way, and none may reach the user's program
        return None, f"the extension kitsune_jax._cpu cannot be imported ({error})"
    if version != bytecode.VERSION:
        return None, f"the extension reads program format {version}, but this package writes {bytecode.VERSION}: different builds"
    try:
        jax.ffi.register_ffi_target(TARGET_NAME, extension.handlers(), platform="cpu")
        jax.ffi.register_ffi_target(ORDER_NAME, extension.order_handler(), platform="cpu")
    except Exception as error:  # an XLA that refuses the version of the FFI which the extension was built for
        return None, f"this JAX {jax.__version__} does not take the extension kitsune_jax._cpu ({error})"
    return extension, ""


def available() -> bool:
    """Whether CPU programs can run here. The first call warns (RuntimeWarning) if they cannot."""
    return _load()[0] is not None


def why_not() -> str:
    """Why ``available()`` is False, as a clause; "" when it is True."""
    return _load()[1]


def register() -> bool:
    """Registers the FFI targets (``TARGET_NAME``, ``ORDER_NAME``) for the CPU, once; safe from any thread. Returns ``available()``.

    >>> from kitsune_jax.targets.cpu import runtime
    >>> runtime.register() == runtime.available()
    True
    """
    return available()


def extension() -> Any | None:
    """The extension module, or None where it is missing."""
    return _load()[0]


def isa() -> str:
    """The kernel table that programs use from now on: "avx2", ...; "generic" without the extension."""
    found = _load()[0]
    return "generic" if found is None else str(found.isa())


def isas() -> tuple[str, ...]:
    """Every kernel table that this CPU can run, best first."""
    found = _load()[0]
    return () if found is None else tuple(found.available_isas())


@functools.cache
def digest() -> str:
    """A hash of the extension's file: another build may have other kernels."""
    found = _load()[0]
    if found is None:
        return ""
    try:
        return hashlib.sha256(pathlib.Path(found.__file__).read_bytes()).hexdigest()
    except OSError:  # loaded from somewhere that is no file: the package's version has to do
        return ""


def check(words: np.ndarray) -> str:
    """What the extension finds wrong with a program (int64 words), by the code that checks it when XLA makes an executable; "" for
    a valid program, and where the extension is missing."""
    extension = _load()[0]
    return "" if extension is None else str(extension.validate(words))


def calls() -> int:
    """Custom calls executed so far in this process; 0 without the extension."""
    extension = _load()[0]
    return 0 if extension is None else int(extension.calls())
