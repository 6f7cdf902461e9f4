"""The compilers behind the cache: each generated source is compiled once.

Comes in: generated CUDA C++ and an architecture. Goes out: a cubin, or for the emulator the bytes of a shared library. Invariant:
the cache key holds everything that the result depends on, and nothing that differs between equal machines.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kitsune_jax import cache, config
from kitsune_jax.progress import announced
from kitsune_jax.targets.cuda import hostcc, nvrtc, sources
from kitsune_jax.targets.cuda.nvrtc import Compiled


def cubin(source: str, arch: str, folder: Path | None = None) -> Compiled:
    """The cubin of ``source`` for ``arch`` ("sm_90a", "sm_80", ...), or PTX for "compute_80", with ptxas's log.

    ``folder`` has the NVRTC to use (see ``nvrtc``). Raises ``CompileError``, ``OSError`` where there is no NVRTC
    (``nvrtc.why_not()``), ``ValueError`` for an unknown ``arch``.
    """
    compiler = "nvrtc {}.{}".format(*nvrtc.version(folder))
    key = _key("cubin", source, "include", compiler, nvrtc.options_for(arch))
    _show(key, ".cu", source, arch)
    return Compiled.unpack(cache.default().get(key, ".cubin", lambda: nvrtc.compile(source, arch, folder=folder).pack()))


def emulated(source: str, sm: int) -> bytes:
    """``source`` as a shared library for the emulator, which exports the kernel; ``sm`` is 900 or 800. Raises ``CompileError``,
    ``OSError`` where there is no C++ compiler (``hostcc.why_not()``)."""
    key = _key("emulated", source, "emulator", hostcc.find().version, hostcc.kernel_options(sm))
    _show(key, ".cc", source, f"the emulator, sm_{sm // 10}")
    return cache.default().get(key, ".so", lambda: hostcc.compile(source, sm))


def emulator_library() -> Path:
    """The path of the emulator's shared library, built on first use. Load it soon: a full cache may delete it.

    Raises ``OSError`` where there is no C++ compiler or no folder to write to, ``RuntimeError`` if it does not compile.
    """
    key = _key("emulator", "", "emulator", hostcc.find().version, hostcc.EMULATOR_OPTIONS)

    def build() -> bytes:
        with announced("emulator", "compiling the emulator of CUDA kernels, once: 15 s or more"):
            return hostcc.build_emulator()

    return cache.default().get_file(key, ".so", build)


def _show(key: str, suffix: str, source: str, what_for: str) -> None:
    """If debug logging is on, keep the source beside its image and log its path."""
    if config.logger.isEnabledFor(logging.DEBUG):
        config.logger.debug("kernel for %s: %s", what_for, cache.default().keep(key + suffix, source))


def _key(kind: str, source: str, headers: sources.Part, compiler: str, options: tuple[str, ...]) -> str:
    return cache.key(
        kind=kind,
        package=config.__version__,
        source=source,
        headers=sources.fingerprint(headers),
        compiler=compiler,
        options="\n".join(options),
    )
