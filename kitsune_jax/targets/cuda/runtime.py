"""The CUDA extension and the devices of this process: can kernels run here, and for which architecture are they made?

Comes in: the driver's answers, ``KITSUNE_CUDA_ARCH``, or the path of the emulator's library. Goes out: ``available()``,
``register()``, ``arch()``, ``device_model()``. Invariants: no import or call here fails because the extension is missing or of
another version; registering needs no CUDA driver, so that a machine without one can lower and export programs for CUDA.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import os
import re
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from kitsune_jax import config
from kitsune_jax.targets.cuda import nvrtc
from kitsune_jax.targets.cuda.planning.machines import Sizes, fitted_gpu

# --- The extension ----------------------------------------------------------------------------------------------------------------

TARGET_NAME = "kitsune_cuda"
LAUNCH_VERSION = 6

_lock = threading.Lock()
_registered: set[str] = set()
emulator: ctypes.CDLL | None = None  # the library in use


@functools.cache
def _load() -> tuple[Any, str]:
    """(the extension, "") or (None, the reason). There is no warning, unlike the CPU's: most machines without this target never ask
    for it, and ``why_not()`` is in the report."""
    try:
        extension = importlib.import_module("kitsune_jax._cuda")
        version = extension.launch_version()
    except Exception as error:  # a broken extension can fail in any way, and none may reach the user's program
        return None, f"the extension kitsune_jax._cuda cannot be imported ({error})"
    if version != LAUNCH_VERSION:
        words = f"the extension reads launch words of version {version}, but this package writes {LAUNCH_VERSION}"
        return None, f"{words}: reinstall kitsune_jax, so that both are of one build"
    return extension, ""


def available() -> bool:
    """Can kernels be registered with XLA here? This says nothing about a driver or a device: see ``driver_info()``."""
    return _load()[0] is not None


def why_not() -> str:
    """Why ``available()`` is False, as a clause; "" if it is True."""
    return _load()[1]


def register(platform: Literal["CUDA", "cpu"]) -> bool:
    """Register the FFI target ``kitsune_cuda``, once per platform; safe from any thread. Returns ``available()``. Calls on "cpu"
    run in the emulator (``use_emulator``).

    >>> from kitsune_jax.targets.cuda import runtime
    >>> runtime.register("CUDA") == runtime.available()
    True
    """
    extension = _load()[0]
    if extension is None:
        return False
    with _lock:
        if platform not in _registered:
            jax.ffi.register_ffi_target(TARGET_NAME, extension.handlers()[platform.lower()], platform=platform)
            _registered.add(platform)
    return True


def use_emulator(path: str | os.PathLike[str]) -> None:
    """Open the emulator's shared library for calls on platform "cpu"; the first one is that of the process. Raises ``RuntimeError``
    if it cannot be used."""
    extension, why = _load()
    if extension is None:
        raise RuntimeError(why)
    extension.use_emulator(os.fspath(path))
    global emulator
    with _lock:
        if emulator is None:
            emulator = ctypes.CDLL(os.fspath(path))  # another handle of the library that the extension opened
    set_emulator_seed(config.emulator_seed())


def set_emulator_seed(seed: int) -> None:
    """Select the schedule of all later launches. Does nothing before an emulator is in use, or if it has only one schedule."""
    if emulator is not None and hasattr(emulator, "kitsune_emulator_set_seed"):
        emulator.kitsune_emulator_set_seed(ctypes.c_uint64(seed))


def driver_info() -> dict[str, Any] | str:
    """``version`` of the CUDA driver (12040 is CUDA 12.4) and its ``devices``, each with ``compute_capability`` (90 is 9.0),
    ``multiprocessors`` and ``shared_bytes`` (the most a block may have); or a sentence about the missing part."""
    extension, why = _load()
    return why if extension is None else extension.driver_info()


def check(launch: Sequence[int]) -> str:
    """The extension's objection to launch words, by the check that it makes when XLA builds an executable; "" for valid words, and
    where the extension is missing."""
    extension = _load()[0]
    return "" if extension is None else str(extension.check_launch(np.asarray(launch, np.int64)))


def calls() -> int:
    """Custom calls launched so far in this process; 0 without the extension."""
    extension = _load()[0]
    return 0 if extension is None else int(extension.calls())


# --- Kernels that record a timeline -----------------------------------------------------------------------------------------------

# Made at import: jit's keys hold the values of all such contexts, so a new one has every function compiled again.
_stamps = jax.make_user_context(False)


def stamps() -> bool:
    """Are kernels generated with stamps now (``cuda/include/kitsune/timeline.h``)?"""
    return bool(_stamps.get_global())


def set_stamps(on: bool) -> None:
    """Functions that JAX has compiled for the other value are compiled again when they are called, and kept for both."""
    _stamps.set_global(on)


def start_timeline(chunks: int, devices: bool) -> None:
    """Stamped kernels record from now on, ``chunks`` chunks of 29 records in each context: of all ``devices`` in use, if wanted,
    and of the emulator. Raises ``RuntimeError`` where the extension is missing or there is no memory."""
    extension, why = _load()
    if extension is None:
        raise RuntimeError(f"kitsune_jax: {why}")
    extension.start_timeline(chunks, devices)


def clock_ns() -> int:
    """The host's clock beside which ``stop_timeline`` puts those of devices; 0 without the extension."""
    extension = _load()[0]
    return 0 if extension is None else int(extension.clock_ns())


def stop_timeline() -> Any:
    """Stop recording; returns the records, as ``Recording`` in ``cuda/src/timeline.h``."""
    return _load()[0].stop_timeline()


# --- The devices of this process. A computation is lowered before it is known on which of them it will run ------------------------

DEFAULT_ARCH = "sm_90a"
_OLDEST = 80
# Compute capabilities whose SMs have half the tensor cores of an A100's and twice its lanes (CUDA programming guide).
_SMALL_SMS = {86, 87, 89, 120, 121}
_ADVICE = "CUDA_VISIBLE_DEVICES hides devices, KITSUNE_CUDA_ARCH names the architecture to compile for"


@dataclasses.dataclass(frozen=True, order=True)
class Device:
    """``capability``: 90 is compute capability 9.0. ``sizes.shared_bytes``: the most shared memory of a block."""

    capability: int
    name: str
    sizes: Sizes


def devices_here() -> tuple[Device, ...]:
    """The devices that the driver lists, in its order; none without a driver."""
    info = driver_info()
    return () if isinstance(info, str) else tuple(map(_device, info["devices"]))


def _device(info: dict[str, Any]) -> Device:
    sizes = Sizes(info["multiprocessors"], info["shared_bytes"], info["l2_bytes"], info["clock"], info["memory_bandwidth"])
    if "MIG " in info["name"]:  # the driver may state bus and L2 of the whole GPU, though a slice has only its share
        sizes = dataclasses.replace(sizes, l2_bytes=0, bandwidth=0.0)
    return Device(info["compute_capability"], info["name"], sizes)


def arch() -> str:
    """The architecture to compile for: ``KITSUNE_CUDA_ARCH``, else one that runs on every device here, else Hopper's.

    A cubin runs only on devices of its own major version. For devices of several this is "compute_80" or later: PTX, which the
    driver compiles for each device.
    """
    named = config.cuda_arch()
    if named is not None:
        return named
    capabilities = sorted({d.capability for d in devices_here() if d.capability >= _OLDEST})
    if not capabilities or capabilities == [90]:
        return DEFAULT_ARCH
    one_major = capabilities[0] // 10 == capabilities[-1] // 10
    return f"{'sm' if one_major else 'compute'}_{capabilities[0]}"


def device_model() -> str:
    """The machine model to plan for: that of the devices which run ``arch()``, with the smallest of each size among them."""
    runs_on = [d for d in devices_here() if _runs_on(arch(), d.capability)]
    if not runs_on:
        return "h200" if nvrtc.sm_of(arch()) == 900 else "a100"
    fields = [field.name for field in dataclasses.fields(Sizes)]
    least = Sizes(*(min(getattr(d.sizes, field) for d in runs_on) for field in fields))
    return fitted_gpu(_base(runs_on), least)


def _base(runs_on: list[Device]) -> str:
    """The model whose SMs are like those of the slowest device."""
    if nvrtc.sm_of(arch()) != 900:
        return "l4" if any(d.capability in _SMALL_SMS for d in runs_on) else "a100"
    if any(re.search(r"\bH20\b", d.name) for d in runs_on):
        return "h20"
    return "h100" if any("H100" in d.name for d in runs_on) else "h200"


def _runs_on(arch: str, capability: int) -> bool:
    kind, number = arch.rstrip("af").split("_")
    if arch.endswith("a"):
        return capability == int(number)
    return capability >= int(number) and (kind == "compute" or capability // 10 == int(number) // 10)


def why_no_kernels() -> str:
    """Why kernels cannot run on every device here, as a clause with advice; "" if they can, or if there is no device."""
    if config.cuda_arch() is not None:
        return ""
    old = sorted({d.capability for d in devices_here() if d.capability < _OLDEST})
    if old:
        return f"there is a device of compute capability {old[0] / 10}, and kernels need 8.0 ({_ADVICE})"
    info = driver_info()
    if arch().startswith("compute_") and not isinstance(info, str):
        compiler = nvrtc.version()
        if info["version"] < 1000 * compiler[0] + 10 * compiler[1]:
            return (
                f"the devices are of several architectures ({_list()}), and the driver (CUDA {info['version'] // 1000}."
                f"{info['version'] % 1000 // 10}) cannot compile the PTX of NVRTC {compiler[0]}.{compiler[1]} for all of them: "
                f"update the driver ({_ADVICE})"
            )
    return ""


def note() -> str:
    """A note for the report where the devices differ; "" where they do not."""
    if len(set(devices_here())) < 2 or config.cuda_arch() is not None:
        return ""
    return f"the devices here differ ({_list()}): the plan fits all of them. {_ADVICE}"


def _list() -> str:
    return ", ".join(
        f"{d.name} (sm_{d.capability} with {d.sizes.multiprocessors} SMs)".lstrip() for d in sorted(set(devices_here()))
    )
