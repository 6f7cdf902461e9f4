"""What the CUDA devices of this process have in common: a computation is lowered before it is known on which of them it will run.

Comes in: what the driver says of its devices, ``KITSUNE_CUDA_ARCH``. Goes out: the architecture that kernels are compiled for and
the name of the machine model that they are planned for. Invariant: a kernel made for ``arch()`` and ``model()`` runs on every
device here (on those of the named architecture, where one is named); so it asks for no more than the smallest of them has.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from kitsune_jax import config
from kitsune_jax.targets.cuda import nvrtc, runtime
from kitsune_jax.targets.cuda.planning.machines import Sizes, fitted_gpu

DEFAULT_ARCH = "sm_90a"
_OLDEST = 80
# Compute capabilities whose SMs have half the tensor cores of an A100's and twice the lanes (CUDA programming guide, "Compute
# Capabilities").
_SMALL_SMS = {86, 87, 89, 120, 121}
_ADVICE = "CUDA_VISIBLE_DEVICES hides devices, KITSUNE_CUDA_ARCH names the architecture to compile for"


@dataclasses.dataclass(frozen=True, order=True)
class Device:
    """``capability``: 90 is compute capability 9.0. ``sizes.shared_bytes``: the most shared memory that a block may have."""

    capability: int
    name: str
    sizes: Sizes


def here() -> tuple[Device, ...]:
    """The devices that the driver lists, in its order; none where there is no driver."""
    info = runtime.driver_info()
    if isinstance(info, str):
        return ()
    return tuple(_device(d) for d in info["devices"])


def _device(said: dict[str, Any]) -> Device:
    sizes = Sizes(said["multiprocessors"], said["shared_bytes"], said["l2_bytes"], said["clock"], said["memory_bandwidth"])
    if "MIG " in said["name"]:  # the driver may tell bus and L2 of the whole GPU, of which a slice has about its share of the SMs
        sizes = dataclasses.replace(sizes, l2_bytes=0, bandwidth=0.0)
    return Device(said["compute_capability"], said["name"], sizes)


def arch() -> str:
    """What kernels are compiled for: ``KITSUNE_CUDA_ARCH``, else what runs on every device here, else Hopper's.

    A cubin runs on devices of its own major version only: where there are several, this is "compute_80" or later, PTX that the
    driver compiles for each device.
    """
    named = config.cuda_arch()
    if named is not None:
        return named
    capabilities = sorted({d.capability for d in here() if d.capability >= _OLDEST})
    if not capabilities or capabilities == [90]:
        return DEFAULT_ARCH
    one_major = capabilities[0] // 10 == capabilities[-1] // 10
    return f"{'sm' if one_major else 'compute'}_{capabilities[0]}"


def model() -> str:
    """The machine model of ``arch()``, with the least that the devices which it runs on have of anything."""
    runs_on = [d for d in here() if _runs_on(arch(), d.capability)]
    if not runs_on:
        return "h200" if nvrtc.sm_of(arch()) == 900 else "a100"
    fields = [field.name for field in dataclasses.fields(Sizes)]
    least = Sizes(*(min(getattr(d.sizes, field) for d in runs_on) for field in fields))
    return fitted_gpu(_base(runs_on), least)


def _base(runs_on: list[Device]) -> str:
    """The model whose SMs are like those of the slowest of these devices."""
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


def why_not() -> str:
    """Why no kernel runs on every device here, as a clause that says what to do; "" where one does, or where there is none."""
    if config.cuda_arch() is not None:
        return ""
    old = sorted({d.capability for d in here() if d.capability < _OLDEST})
    if old:
        return f"there is a device of compute capability {old[0] / 10}, and kernels need 8.0 ({_ADVICE})"
    info = runtime.driver_info()
    if arch().startswith("compute_") and not isinstance(info, str):
        compiler = nvrtc.version()
        if info["version"] < 1000 * compiler[0] + 10 * compiler[1]:
            return (
                f"the devices are of several architectures ({_list()}), and the driver (CUDA {info['version'] // 1000}."
                f"{info['version'] % 1000 // 10}) compiles nothing that NVRTC {compiler[0]}.{compiler[1]} makes for all of them: "
                f"update the driver ({_ADVICE})"
            )
    return ""


def note() -> str:
    """What a report says where the devices differ; "" where they do not."""
    if len(set(here())) < 2 or config.cuda_arch() is not None:
        return ""
    return f"the devices here differ ({_list()}): this is planned for what all of them have. {_ADVICE}"


def _list() -> str:
    return ", ".join(f"{d.name} (sm_{d.capability} with {d.sizes.multiprocessors} SMs)".lstrip() for d in sorted(set(here())))
