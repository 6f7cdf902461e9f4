"""Where a microbenchmark runs: a CUDA device, or the emulator.

Comes in: CUDA C++, launch words, NumPy arrays. Goes out: what the kernel wrote, and the seconds of a launch; the emulator gives
``None`` for them, because what it takes says nothing about a device. Invariant: both go through ``kitsune_jax._cuda.Kernel``, the
code that launches the product's kernels.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.micro.driver import Driver
from kitsune_jax.targets.cuda import compile, runtime

ENTRY = "kitsune_region"
_ALIGNMENT = 1024
_VERSION = runtime.LAUNCH_VERSION


@dataclasses.dataclass(frozen=True)
class Geometry:
    """``zeroed``: bytes at the start of the last result that are zero when the kernel starts."""

    grid: int
    block: int
    cluster: int = 1
    shared_bytes: int = 0
    cooperative: bool = False
    zeroed: int = 0

    def words(self, sm: int, operands: int, results: int) -> np.ndarray:
        numbers = (_VERSION, sm, self.grid, self.block, self.cluster, self.shared_bytes, int(self.cooperative))
        return np.array([*numbers, 0, operands, results, self.zeroed], np.int64)  # 0: the kernels rely on the grid


class Backend(Protocol):
    """``run``: ``repeats`` launches of ``source`` on ``operands``; ``results`` are zero before the first, and are filled."""

    emulated: bool
    sm: int
    multiprocessors: int

    def describe(self) -> dict[str, Any]: ...

    def compile(self, source: str) -> bytes: ...

    def run(
        self, source: str, geometry: Geometry, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], repeats: int = 1
    ) -> list[float | None]: ...

    def max_active_clusters(self, source: str, *, cluster: int, block: int, shared_bytes: int) -> int | None: ...


class Emulator:
    """The emulated device has 132 multiprocessors; few of them are used, because each thread costs memory."""

    emulated = True
    sm = 900
    multiprocessors = 4

    def __init__(self) -> None:
        runtime.use_emulator(compile.emulator_library())

    def describe(self) -> dict[str, Any]:
        return {"name": "emulator"}

    def compile(self, source: str) -> bytes:
        return compile.emulated(source, self.sm)

    def run(
        self, source: str, geometry: Geometry, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], repeats: int = 1
    ) -> list[float | None]:
        kernel = _kernel(self.compile(source), geometry.words(self.sm, len(operands), len(results)), emulated=True)
        kernel.load()
        given = [_aligned(a) for a in operands]
        made = [_aligned(np.zeros_like(a)) for a in results]
        for _ in range(repeats):
            kernel.launch([(a.ctypes.data, a.nbytes) for a in (*given, *made)])
        for result, copy in zip(results, made, strict=True):
            result[...] = copy
        return [None] * repeats

    def max_active_clusters(self, source: str, *, cluster: int, block: int, shared_bytes: int) -> int | None:
        return None


class Device:
    emulated = False

    def __init__(self, *, own_stream: bool = False) -> None:
        """``own_stream``: launches overlap with those of other streams. A ``Device`` belongs to the thread that made it."""
        self.driver = Driver(own_stream)
        self.about = self.driver.describe()
        self.multiprocessors = int(self.about["multiprocessors"])
        capability = 10 * self.about["major"] + self.about["minor"]
        self.arch = "sm_90a" if capability == 90 else f"sm_{capability}"
        self.sm = 900 if capability == 90 else 800

    def describe(self) -> dict[str, Any]:
        return dict(self.about)

    def compile(self, source: str) -> bytes:
        return compile.cubin(source, self.arch).cubin

    def run(
        self, source: str, geometry: Geometry, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], repeats: int = 1
    ) -> list[float | None]:
        kernel = _kernel(self.compile(source), geometry.words(self.sm, len(operands), len(results)), emulated=False)
        arrays = [*operands, *(np.zeros_like(a) for a in results)]
        addresses = [self.driver.allocate(a.nbytes) for a in arrays]
        try:
            for address, array in zip(addresses, arrays, strict=True):
                self.driver.to_device(address, array.ctypes.data, array.nbytes)
            self.driver.synchronize()  # a copy may return before its data has arrived, and other streams do not wait for it
            kernel.load(self.driver.stream)
            buffers = [(address, a.nbytes) for address, a in zip(addresses, arrays, strict=True)]
            seconds: list[float | None] = [
                self.driver.timed(lambda: kernel.launch(buffers, self.driver.stream)) for _ in range(repeats)
            ]
            for address, result in zip(addresses[len(operands) :], results, strict=True):
                self.driver.to_host(result.ctypes.data, address, result.nbytes)
        finally:
            for address in addresses:
                self.driver.free(address)
        return seconds

    def max_active_clusters(self, source: str, *, cluster: int, block: int, shared_bytes: int) -> int | None:
        cubin = self.compile(source)
        return self.driver.max_active_clusters(cubin, ENTRY, cluster=cluster, block=block, shared_bytes=shared_bytes)


def _kernel(image: bytes, words: np.ndarray, *, emulated: bool) -> Any:
    return importlib.import_module("kitsune_jax._cuda").Kernel(image, words, "microbenchmark", emulated)


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that a device's allocator could have given."""
    raw = np.zeros(array.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
