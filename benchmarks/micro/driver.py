"""The CUDA driver through ctypes: memory, events, occupancy. What a microbenchmark needs beside a launch, and no more.

Comes in: nothing; the first device's primary context is made current in the calling thread. Goes out: ``Driver``. Raises
``OSError`` where there is no driver, ``RuntimeError`` with the driver's own words when a call fails.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

# cuda.h, CUDA 12.0 and later.
_ATTRIBUTES = {"multiprocessors": 16, "clock_khz": 13, "memory_clock_khz": 36, "l2_bytes": 38, "major": 75, "minor": 76}
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_NON_BLOCKING = 1  # CUstream_flags: the default stream does not wait for it
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("dimensions", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class Driver:
    def __init__(self, own_stream: bool = False) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        stream = ctypes.c_void_p()
        if own_stream:
            self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self.stream = stream.value or 0  # 0: the default stream

    def _call(self, function: str, *arguments: Any) -> None:
        error = getattr(self._library, function)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'?').decode()} ({error})")

    def describe(self) -> dict[str, Any]:
        """Name, driver version, and the attributes that a number should be read beside."""
        name, version, value = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetName", name, 96, self._device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        found: dict[str, Any] = {"name": name.value.decode(), "driver_api": version.value}
        for key, attribute in _ATTRIBUTES.items():
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            found[key] = value.value
        return found

    def allocate(self, count: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def to_device(self, address: int, host: int, count: int) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(host), ctypes.c_size_t(count))

    def to_host(self, host: int, address: int, count: int) -> None:
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(host), ctypes.c_uint64(address), ctypes.c_size_t(count))

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds between two events around what ``work`` puts on the stream. Waits for it: kernels' errors appear here."""
        start, stop, milliseconds = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        with self._event(start), self._event(stop):
            self._call("cuEventRecord", start, ctypes.c_void_p(self.stream))
            work()
            self._call("cuEventRecord", stop, ctypes.c_void_p(self.stream))
            self._call("cuEventSynchronize", stop)
            self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, stop)
        return milliseconds.value / 1e3

    @contextlib.contextmanager
    def _event(self, event: ctypes.c_void_p) -> Iterator[None]:
        self._call("cuEventCreate", ctypes.byref(event), 0)
        try:
            yield
        finally:
            self._library.cuEventDestroy_v2(event)

    def max_active_clusters(self, cubin: bytes, kernel: str, *, cluster: int, block: int, shared_bytes: int) -> int:
        """How many clusters are resident at once; 0 where none fits."""
        module, function, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        try:
            self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
            self._call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
            attribute = _Attribute(id=_CLUSTER_DIMENSION)
            attribute.value[:3] = [cluster, 1, 1]
            config = _Config(shared_bytes=shared_bytes, attributes=ctypes.pointer(attribute), count=1)
            config.dimensions[:] = [cluster, 1, 1, block, 1, 1]
            self._call("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(config))
        finally:
            self._library.cuModuleUnload(module)
        return found.value
