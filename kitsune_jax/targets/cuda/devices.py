"""What the CUDA devices of this process have in common: a computation is lowered before it is known on which of them it will run.

Comes in: what the driver says of its devices, ``KITSUNE_CUDA_ARCH``. Goes out: the architecture that kernels are compiled for and
the name of the machine model that they are planned for. Invariant: a kernel made for ``arch()`` and ``model()`` runs on every
device here (on those of the named architecture, where one is named); so it asks for no more than the smallest of them has.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax import config
from kitsune_jax.planning.machines import fitted_gpu
from kitsune_jax.targets.cuda import nvrtc, runtime

DEFAULT_ARCH = "sm_90a"
_OLDEST = 80
_ADVICE = "CUDA_VISIBLE_DEVICES hides devices, KITSUNE_CUDA_ARCH names the architecture to compile for"


@dataclasses.dataclass(frozen=True, order=True)
class Device:
    """``capability``: 90 is compute capability 9.0. ``shared_bytes``: the most shared memory that a block may have."""

    capability: int
    multiprocessors: int
    shared_bytes: int


def here() -> tuple[Device, ...]:
    """The devices that the driver lists, in its order; none where there is no driver."""
    info = runtime.driver_info()
    if isinstance(info, str):
        return ()
    return tuple(Device(d["compute_capability"], d["multiprocessors"], d["shared_bytes"]) for d in info["devices"])


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
    """The machine model of ``arch()``, with the fewest multiprocessors and the least shared memory of the devices it runs on."""
    base = "h200" if nvrtc.sm_of(arch()) == 900 else "a100"
    runs_on = [d for d in here() if _runs_on(arch(), d.capability)]
    if not runs_on:
        return base
    return fitted_gpu(base, min(d.multiprocessors for d in runs_on), min(d.shared_bytes for d in runs_on))


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
    return ", ".join(f"sm_{d.capability} with {d.multiprocessors} SMs" for d in sorted(set(here())))
